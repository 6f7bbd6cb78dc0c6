//! What an operator does to a bucket: `peek`, `reset` and `penalize`, in memory and on real servers.

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::{Instant, advance};
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::{
    ApiKey, BucketKey, ClientIp, Decision, KeyExtractor, Limit, MemoryStore, Quota, RedisStore, Source, Store,
    TokenBucketLayer,
};

use crate::server::Server;

const DAY: Duration = Duration::from_secs(86_400);
/// A busy machine is no outage.
const PATIENCE: Duration = Duration::from_secs(10);

/// So many tokens, of which none comes back while a test runs.
const fn tokens(capacity: u64) -> Quota {
    Quota::new(1, DAY).with_capacity(capacity)
}

fn limit(capacity: u64) -> Limit {
    let key = ApiKey::verified("x-api-key", |key| ["alpha", "beta"].contains(&key)).or(ClientIp::peer());
    Limit::new("per-client", tokens(capacity)).key_by(key)
}

/// Who sends a request, and the key that an operator writes for them.
#[derive(Clone, Copy, Debug)]
enum Client {
    Alpha,
    Beta,
    V4,
    V6,
}

impl Client {
    const ALL: [Self; 4] = [Self::Alpha, Self::Beta, Self::V4, Self::V6];

    fn key(self) -> BucketKey {
        match self {
            Self::Alpha => BucketKey::credential("alpha"),
            Self::Beta => BucketKey::credential("beta"),
            Self::V4 => BucketKey::ip("203.0.113.9".parse().unwrap()),
            // The whole /64 is one client.
            Self::V6 => BucketKey::ip("2001:db8::1".parse().unwrap()),
        }
    }

    fn ask(self) -> Request<Full<Bytes>> {
        let mut request = Request::get("/").body(Full::default()).unwrap();
        let (key, peer) = match self {
            Self::Alpha => (Some("alpha"), "192.0.2.1:1"),
            Self::Beta => (Some("beta"), "192.0.2.1:1"),
            // A key that is not accepted is none.
            Self::V4 => (Some("gamma"), "203.0.113.9:4711"),
            Self::V6 => (None, "[2001:db8::ffff:2]:4711"),
        };
        if let Some(key) = key {
            request.headers_mut().insert("x-api-key", key.parse().unwrap());
        }
        request.extensions_mut().insert(peer.parse::<SocketAddr>().unwrap());
        request
    }
}

/// The status of one request of `client`.
async fn send<St: Store>(layer: &TokenBucketLayer<St>, client: Client) -> u16 {
    let inner = service_fn(|_| ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))));
    let answer = layer.layer(inner).oneshot(client.ask()).await.unwrap();
    let decision = answer.extensions().get::<Decision>().unwrap();
    assert!(matches!(decision.source(), Source::Store | Source::Remembered), "{client:?}: {decision:?}");
    answer.status().as_u16()
}

/// What is in the bucket, in whole tokens; less than none is a debt.
async fn level<St: Store>(store: &St, limit: &Limit, key: BucketKey) -> i64 {
    let decision = store.peek(limit, key).await.unwrap();
    assert!(decision.is_allowed() && decision.retry_after().is_none(), "a look is never refused");
    let missing = decision.reset_after().unwrap().as_micros().div_ceil(DAY.as_micros()) as i64;
    let level = limit.quota().capacity() as i64 - missing;
    assert_eq!(decision.remaining(), Some(level.max(0) as u64));
    assert_eq!(decision.limit(), Some(limit.name()));
    level
}

/// With a secret, as a server that is shared should have: the verbs find the same bucket.
async fn in_redis(url: &str) -> RedisStore {
    RedisStore::connect(url).await.unwrap().secret("s3cret").prefix("ops")
}

on_both_stores! {
    the_bucket_of_a_key_nobody_has_used_is_full,
    an_operator_finds_the_buckets_that_extractors_charge,
    a_client_that_is_penalized_is_refused_and_after_a_reset_admitted,
    a_penalty_is_bounded_by_a_debt_of_one_capacity,
    a_reset_fills_the_bucket_from_a_debt_too,
    the_quota_of_the_limit_that_is_passed_counts,
    a_limit_in_shadow_has_a_bucket_like_any_other,
}

async fn the_bucket_of_a_key_nobody_has_used_is_full(store: impl Store) {
    for client in Client::ALL {
        for capacity in [1, 100, 20_000] {
            assert_eq!(level(&store, &limit(capacity), client.key()).await, capacity as i64);
        }
        let decision = store.peek(&limit(7), client.key()).await.unwrap();
        assert_eq!(decision.reset_after(), Some(Duration::ZERO));
    }
}

async fn an_operator_finds_the_buckets_that_extractors_charge(store: impl Store) {
    let layer = TokenBucketLayer::new(store.clone(), limit(9)).deadline(PATIENCE);
    for (i, client) in Client::ALL.into_iter().enumerate() {
        for _ in 0..=i {
            assert_eq!(send(&layer, client).await, 200);
        }
    }
    for (i, client) in Client::ALL.into_iter().enumerate() {
        assert_eq!(level(&store, &limit(9), client.key()).await, 8 - i as i64, "{client:?}");
        // The keys are those of the extractors, however they are made.
        let parts = client.ask().into_parts().0;
        let key = ApiKey::unverified("x-api-key").extract(&parts);
        assert_eq!(key.is_ok_and(|key| key == client.key()), matches!(client, Client::Alpha | Client::Beta));
    }
    // The same text is another bucket as an id, and another limit has buckets of its own.
    assert_eq!(level(&store, &limit(9), BucketKey::id("alpha")).await, 9);
    assert_eq!(level(&store, &Limit::new("per-day", tokens(9)), Client::Alpha.key()).await, 9);
}

async fn a_client_that_is_penalized_is_refused_and_after_a_reset_admitted(store: impl Store) {
    let layer = TokenBucketLayer::new(store.clone(), limit(5)).deadline(PATIENCE);
    for client in Client::ALL {
        assert_eq!(send(&layer, client).await, 200);
    }
    for client in Client::ALL {
        let decision = store.penalize(&limit(5), client.key(), 10).await.unwrap();
        assert!(decision.is_allowed(), "a penalty is never refused");
        assert_eq!(decision.remaining(), Some(0));
        for other in Client::ALL {
            let expected = if other.key() == client.key() { 429 } else { 200 };
            assert_eq!(send(&layer, other).await, expected, "{other:?}, when {client:?} is penalized");
        }
        let decision = store.reset(&limit(5), client.key()).await.unwrap();
        assert_eq!(decision.remaining(), Some(5));
        assert_eq!(send(&layer, client).await, 200);
        for all in Client::ALL {
            store.reset(&limit(5), all.key()).await.unwrap();
        }
    }
}

async fn a_penalty_is_bounded_by_a_debt_of_one_capacity(store: impl Store) {
    let key = Client::Alpha.key();
    // One after the other.
    for (cost, left) in [(0, 5), (2, 3), (3, 0), (4, -4), (0, -4), (1, -5), (1, -5), (u64::MAX, -5)] {
        store.penalize(&limit(5), key, cost).await.unwrap();
        assert_eq!(level(&store, &limit(5), key).await, left, "a penalty of {cost}");
    }
    for cost in [10, 11, 1 << 40, 1 << 53, u64::MAX] {
        store.reset(&limit(5), key).await.unwrap();
        store.penalize(&limit(5), key, cost).await.unwrap();
        assert_eq!(level(&store, &limit(5), key).await, -5, "a penalty of {cost}");
    }
}

async fn a_reset_fills_the_bucket_from_a_debt_too(store: impl Store) {
    for cost in [0, 1, 5, 7, 10, u64::MAX] {
        store.penalize(&limit(5), Client::V4.key(), cost).await.unwrap();
        store.reset(&limit(5), Client::V4.key()).await.unwrap();
        assert_eq!(level(&store, &limit(5), Client::V4.key()).await, 5, "after a penalty of {cost}");
        // Full, and no more.
        store.reset(&limit(5), Client::V4.key()).await.unwrap();
        store.penalize(&limit(5), Client::V4.key(), 1).await.unwrap();
        assert_eq!(level(&store, &limit(5), Client::V4.key()).await, 4);
    }
}

async fn the_quota_of_the_limit_that_is_passed_counts(store: impl Store) {
    let (free, pro) = (limit(5), limit(50));
    let key = Client::Beta.key();
    let layer = TokenBucketLayer::new(store.clone(), free.clone().quota_by(|_| Some(tokens(50)))).deadline(PATIENCE);
    for _ in 0..10 {
        assert_eq!(send(&layer, Client::Beta).await, 200);
    }
    // A client on a plan of 50: the limit's own quota of 5 shows no more than that, and looking changes nothing.
    assert_eq!(level(&store, &free, key).await, 5);
    assert_eq!(level(&store, &pro, key).await, 40);
    // A reset fills up to the quota that is passed; a smaller one clamps.
    store.reset(&free, key).await.unwrap();
    assert_eq!(level(&store, &pro, key).await, 5);
    store.reset(&pro, key).await.unwrap();
    assert_eq!(level(&store, &pro, key).await, 50);
    // So does the debt.
    store.penalize(&pro, key, 1000).await.unwrap();
    assert_eq!(level(&store, &pro, key).await, -50);
    assert_eq!(level(&store, &free, key).await, -5);
    assert_eq!(level(&store, &pro, key).await, -50);
    assert_eq!(send(&layer, Client::Beta).await, 429);
    store.reset(&free, key).await.unwrap();
    assert_eq!(level(&store, &pro, key).await, 5, "the debt under the larger quota is gone");
    assert_eq!(send(&layer, Client::Beta).await, 200);
}

async fn a_limit_in_shadow_has_a_bucket_like_any_other(store: impl Store) {
    let watched = limit(5).shadow();
    store.penalize(&watched, Client::V6.key(), 7).await.unwrap();
    assert_eq!(level(&store, &watched, Client::V6.key()).await, -2);
    store.reset(&watched, Client::V6.key()).await.unwrap();
    assert_eq!(level(&store, &watched, Client::V6.key()).await, 5);
}

// In memory, to the microsecond.

#[tokio::test(start_paused = true)]
async fn a_penalty_keeps_a_client_out_for_exactly_as_long_as_its_debt_takes() {
    let store = MemoryStore::new();
    let limit = Limit::new("per-client", Quota::per_second(10).with_capacity(20)).key_by(ClientIp::peer());
    let layer = TokenBucketLayer::new(store.clone(), limit.clone());
    // Twice the capacity: 20 tokens of debt and one more, 2.1 s.
    store.penalize(&limit, Client::V4.key(), 40).await.unwrap();
    assert_eq!(store.peek(&limit, Client::V4.key()).await.unwrap().reset_after(), Some(Duration::from_secs(4)));
    advance(Duration::from_micros(2_099_999)).await;
    assert_eq!(send(&layer, Client::V4).await, 429);
    advance(Duration::from_micros(1)).await;
    assert_eq!(send(&layer, Client::V4).await, 200);
}

#[tokio::test(start_paused = true)]
async fn a_look_makes_no_bucket_in_memory() {
    let store = MemoryStore::new();
    for client in Client::ALL {
        store.peek(&limit(5), client.key()).await.unwrap();
    }
    assert_eq!(store.buckets(), 0);
    store.penalize(&limit(5), Client::V4.key(), 1).await.unwrap();
    assert_eq!(store.buckets(), 1);
}

// Servers.

#[tokio::test]
async fn a_look_writes_nothing_to_redis_and_each_verb_is_one_round_trip() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    // Makes the script known.
    store.peek(&limit(5), BucketKey::global()).await.unwrap();
    for client in Client::ALL {
        store.peek(&limit(5), client.key()).await.unwrap();
    }
    assert_eq!(server.keys(), [""; 0], "a look at a full bucket makes no key");

    store.penalize(&limit(5), Client::V4.key(), 7).await.unwrap();
    let key = "tb:v1:{ip:203.0.113.9}:per-client";
    assert_eq!(server.keys(), [key]);
    let value = server.query(&["GET", key]);
    assert!(value.text().unwrap().ends_with(":5:1:86400000000:-172800000000"), "{value:?}");
    let (since, life_ms) = (Instant::now(), server.query(&["PTTL", key]).int().unwrap());
    let (sets, calls) = (server.calls("set"), server.calls("evalsha"));
    // Through other quotas too: a slower one does not even extend the life, as a refused request would.
    for looked in [limit(5), limit(2), limit(500), Limit::new("per-client", Quota::new(1, 10 * DAY))] {
        store.peek(&looked, Client::V4.key()).await.unwrap();
    }
    assert_eq!(server.query(&["GET", key]), value);
    let (left_ms, at_most_ms) = (server.query(&["PTTL", key]).int().unwrap(), since.elapsed().as_millis() as i64 + 1);
    assert!((life_ms - at_most_ms..=life_ms).contains(&left_ms), "{left_ms} ms of {life_ms}");
    assert_eq!((server.calls("set") - sets, server.calls("evalsha") - calls), (0, 4));

    store.reset(&limit(5), Client::V4.key()).await.unwrap();
    store.penalize(&limit(5), Client::V4.key(), 1).await.unwrap();
    assert_eq!((server.calls("set") - sets, server.calls("evalsha") - calls), (2, 6));
    let value = server.query(&["GET", key]);
    assert!(value.text().unwrap().ends_with(":5:1:86400000000:345600000000"), "{value:?}");
    assert!(server.query(&["PTTL", key]).int().unwrap() > 0);
}

#[tokio::test]
async fn a_verb_on_a_redis_that_is_gone_is_an_error() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    server.kill();
    assert!(store.peek(&limit(5), Client::V4.key()).await.is_err());
    assert!(store.reset(&limit(5), Client::V4.key()).await.is_err());
    assert!(store.penalize(&limit(5), Client::V4.key(), 1).await.is_err());
}
