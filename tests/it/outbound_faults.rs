//! The sender's side where something goes wrong: stores that fail and come back, clocks, senders that differ, hooks that
//! panic, and many keys.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::conformance::RateModel;
use tower_token_bucket::outbound::{AcquireError, AdaptiveRate, Event, Limiter, ThrottleLayer};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, LimitName, MemoryStore, OnStoreFailure, Quota, RedisStore, Store,
};

use crate::proxy::{Mode, Proxy};
use crate::server::Server;

const NAME: &str = "peer";
const US: u64 = 1_000_000;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key() -> BucketKey {
    BucketKey::id("peer.example")
}

fn b(capacity: u64, rate: u64) -> Quota {
    Quota::per_second(rate).with_capacity(capacity)
}

async fn in_redis(url: &str, quota: Quota, rate: AdaptiveRate) -> Limiter<RedisStore> {
    Limiter::new(RedisStore::connect(url).await.unwrap(), NAME, quota).adaptive(rate)
}

/// The time to come back that an acquire tells, if it gives no tokens.
async fn told<St: Store>(limiter: &Limiter<St>) -> Option<Duration> {
    limiter.acquire(key(), 1).await.err().and_then(|error| error.retry_after())
}

// Cooldowns and rates where the store fails.

#[tokio::test]
async fn a_cooldown_that_this_process_has_heard_of_outlasts_its_store() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(10, 10), AdaptiveRate::below(10.0)).await;
    limiter.refused(key(), Some(s(60))).await.unwrap();
    assert!(told(&limiter).await > Some(s(50)));
    server.kill();
    let told = told(&limiter).await;
    assert!(told > Some(s(50)), "the peer said 60 s, and the limiter {told:?}");
}

#[tokio::test]
async fn a_cooldown_that_begins_while_the_store_is_away_does_not_end_when_it_is_back() {
    let server = Server::start();
    let proxy = Proxy::start(server.port()).await;
    let limiter = in_redis(&proxy.url(), b(10, 10), AdaptiveRate::below(10.0)).await;
    limiter.acquire(key(), 1).await.unwrap();
    proxy.set(Mode::Refuse).await;
    limiter.refused(key(), Some(s(60))).await.unwrap();
    assert!(told(&limiter).await > Some(s(50)), "here it is kept");
    proxy.set(Mode::Pass).await;
    let until = Instant::now() + s(2);
    while Instant::now() < until {
        let told = told(&limiter).await;
        assert!(told > Some(s(50)), "the peer said 60 s, and the limiter {told:?}");
        sleep(ms(20)).await;
    }
}

#[tokio::test]
async fn a_rate_that_has_been_learnt_outlasts_the_store() {
    let server = Server::start();
    let rate = AdaptiveRate { decrease: 0.0, ..AdaptiveRate::below(100.0) };
    let limiter = in_redis(&server.url(), b(1, 100), rate).await.max_wait(s(2));
    limiter.refused(key(), Some(Duration::ZERO)).await.unwrap();
    assert_eq!(limiter.rate(key()).await.unwrap(), 1.0);
    server.kill();
    let (began, mut sent) = (Instant::now(), 0);
    while began.elapsed() < s(1) {
        sent += u64::from(limiter.try_acquire(key(), 1).await.is_ok());
        sleep(ms(5)).await;
    }
    assert!(sent <= 3, "{sent} in a second, where the peer has taken no more than 1");
}

#[tokio::test]
async fn to_be_told_of_a_cooldown_again_asks_redis_no_more_than_once_a_second() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(10, 10), AdaptiveRate::below(10.0)).await;
    limiter.refused(key(), Some(s(60))).await.unwrap();
    let before = server.calls("evalsha");
    let began = Instant::now();
    for _ in 0..500 {
        assert!(told(&limiter).await > Some(s(30)));
    }
    let (asked, most) = (server.calls("evalsha") - before, began.elapsed().as_secs() + 2);
    assert!(asked <= most, "asked {asked} times for 0 tokens");
}

// A clock that steps back.

#[test]
fn a_clock_that_steps_back_begins_no_cooldown_that_has_ended() {
    let mut model = RateModel::try_new(10, AdaptiveRate::below(10.0)).unwrap();
    let began = 1_000_000 * US;
    model.refused(Some(US), 0, began);
    assert!(model.take(1, began + 10 * US).is_allowed(), "it ended 9 s ago");
    // 100 s back. Rule 7: nobody waits longer than an empty bucket needs to fill, plus 1 s.
    let now = began - 90 * US;
    model.take(1, now);
    let fills = 10 * US / 5;
    assert!(model.take(1, now + fills + US).is_allowed());
}

/// What `lua/pace.lua` keeps after the test above: the bucket has tokens, and the cooldown seems to go on.
#[tokio::test]
async fn where_the_clock_has_stepped_back_to_before_a_cooldown_nobody_waits_beyond_max_wait_or_asks_all_the_time() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(10, 10), AdaptiveRate::below(10.0)).await.max_wait(ms(500));
    limiter.acquire(key(), 1).await.unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
    let (until, at) = (now + 60 * US, now + 90 * US);
    let value = format!("{at}:9000000000:5000:{until}:{}:{at}:1:0:0", until - US);
    server.query(&["SET", &server.keys()[0], &value, "PX", "600000"]);
    let before = server.calls("evalsha");
    let outcome = timeout(s(3), limiter.acquire(key(), 1)).await;
    let asked = server.calls("evalsha") - before;
    assert!(outcome.is_ok() && asked <= 5, "{outcome:?} after {asked} questions");
}

// Senders that differ.

/// Rule 8: the life of a bucket is reckoned with the largest capacity that has used it.
#[tokio::test(start_paused = true)]
async fn senders_with_two_capacities_send_no_more_than_the_larger_allows() {
    let store = MemoryStore::new();
    let limiter = |capacity| Limiter::new(store.clone(), NAME, b(capacity, 10)).adaptive(AdaptiveRate::below(10.0));
    let (large, small) = (limiter(100), limiter(1));
    let (began, mut sent) = (Instant::now(), 0);
    for _ in 0..20 {
        while large.try_acquire(key(), 10).await.is_ok() {
            sent += 10;
        }
        small.acquire(key(), 1).await.unwrap();
        sent += 1;
        sleep(ms(150)).await;
    }
    let most = 100 + 10 * began.elapsed().as_millis() / 1000 + 1;
    assert!(sent <= most, "{sent} in {:?}, where {most} are allowed", began.elapsed());
}

/// As while `adaptive` is being rolled out.
#[tokio::test(start_paused = true)]
async fn senders_of_which_some_adapt_share_one_bucket() {
    let store = MemoryStore::new();
    let plain = Limiter::new(store.clone(), NAME, b(10, 10));
    let adapts = Limiter::new(store, NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    let mut sent = 0;
    for limiter in [plain, adapts] {
        while limiter.try_acquire(key(), 1).await.is_ok() {
            sent += 1;
        }
    }
    assert_eq!(sent, 10);
}

/// A store that fails, a little later.
#[derive(Clone)]
struct Broken;

impl Store for Broken {
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, io::Error>> + Send>>;

    fn acquire(&self, _: &[Charge]) -> Self::Future {
        Box::pin(async {
            sleep(ms(1)).await;
            Err(io::Error::other("broken"))
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_clone_with_settings_of_its_own_keeps_to_them_while_it_waits() {
    let local = Limiter::new(Broken, NAME, b(10, 10));
    let deny = local.clone().on_store_failure(OnStoreFailure::Deny);
    let (local, deny) = tokio::join!(local.acquire(key(), 1), deny.acquire(key(), 1));
    assert!(local.is_ok());
    assert!(matches!(deny, Err(AcquireError::StoreFailed { .. })), "{deny:?}");
}

#[tokio::test(start_paused = true)]
async fn costs_above_the_share_keep_to_the_share_as_well() {
    let (began, mut sent) = (Instant::now(), 0);
    let senders: Vec<_> = (0..10).map(|_| Limiter::new(Broken, NAME, b(10, 10)).share(10)).collect();
    while began.elapsed() < s(60) {
        for sender in &senders {
            sent += if sender.try_acquire(key(), 10).await.is_ok() { 10 } else { 0 };
        }
        sleep(ms(100)).await;
    }
    // 10 senders, a tenth of the capacity and of the rate each.
    let most = 10 + 10 * began.elapsed().as_secs() + 10;
    assert!(sent <= most, "{sent} tokens in 60 s, where {most} are promised");
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_share_is_told_when_it_could_pass() {
    let limiter = Limiter::new(Broken, NAME, b(10, 10)).share(10);
    limiter.try_acquire(key(), 10).await.unwrap();
    let told = limiter.try_acquire(key(), 10).await.unwrap_err().retry_after().unwrap();
    sleep(told / 2).await;
    assert!(limiter.try_acquire(key(), 10).await.is_err(), "told to wait {told:?}, and given after half of it");
}

// Waiters.

/// A memory store of which somebody else takes a token right before the second question, and which is slow from the
/// hundredth on, so that a paused clock goes on.
#[derive(Clone)]
struct Contended {
    buckets: MemoryStore,
    asked: Arc<AtomicU64>,
}

impl Store for Contended {
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, Self::Error>> + Send>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        let asked = self.asked.fetch_add(1, Relaxed) + 1;
        let (buckets, charges) = (self.buckets.clone(), charges.to_vec());
        Box::pin(async move {
            if asked == 2 {
                let charge = &charges[0];
                let one = Charge::new(charge.limit().clone(), *charge.key(), charge.quota(), Amount::Take(1));
                buckets.acquire(&[one]).await?;
            }
            if asked >= 100 {
                sleep(ms(1)).await;
            }
            buckets.acquire(&charges).await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn one_whose_time_is_over_by_less_than_a_millisecond_does_not_ask_all_the_time() {
    let quota = b(2, 2000);
    let store = Contended { buckets: MemoryStore::new(), asked: Arc::default() };
    let name = LimitName::try_new(NAME).unwrap();
    store.buckets.acquire(&[Charge::new(name, key(), quota, Amount::Take(2))]).await.unwrap();
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(ms(1));
    let outcome = limiter.acquire(key(), 2).await;
    let asked = store.asked.load(Relaxed);
    assert!(asked <= 5, "{asked} questions in a millisecond, for {outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_panics_takes_no_tokens_from_others() {
    let panics = AtomicBool::new(true);
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10))
        .adaptive(AdaptiveRate::below(10.0))
        .on_event(move |_, event| assert!(!matches!(event, Event::Rate(_)) || !panics.swap(false, Relaxed), "a fault"));
    let (one, two) = tokio::join!(limiter.acquire(key(), 1), limiter.acquire(key(), 1));
    assert!(one.is_ok() || two.is_ok(), "{one:?}, {two:?}");
}

// Many keys.

/// Rule 10: memory is bounded without user code. A store of 64 buckets holds 64, whatever they adapt to.
#[test]
fn rates_that_adapt_fit_into_the_bound_of_a_memory_store() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let limiter = Limiter::new(MemoryStore::with_buckets(64), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            for endpoint in 0..50_000u64 {
                limiter.refused(BucketKey::id(endpoint.to_le_bytes()), Some(s(1))).await.unwrap();
            }
        });
    });
    let kept = counted.bytes_current;
    assert!(kept < 1 << 20, "{kept} bytes are kept for 64 buckets");
}

/// While Redis answers, senders give no more than its buckets hold, however many keys are waited for at a time: those
/// that wait can wait for a place on the wire as well.
#[tokio::test]
async fn many_keys_at_a_time_are_no_outage_of_redis() {
    const KEYS: u64 = 8_000;
    let server = Server::start();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let quota = Quota::per_hour(1);
        let limiter = Limiter::new(store, NAME, quota.with_capacity(1)).deadline(s(60)).max_wait(s(60));
        for endpoint in 0..KEYS {
            let limiter = limiter.clone();
            tasks.spawn(async move { limiter.acquire(BucketKey::id(endpoint.to_le_bytes()), 1).await.is_ok() });
        }
    }
    let given = tasks.join_all().await.into_iter().filter(|given| *given).count();
    assert_eq!(given as u64, KEYS, "of one token for each key");
}

// What a peer says.

#[tokio::test(start_paused = true)]
async fn a_refusal_whose_reset_is_in_the_past_has_no_time_and_backs_off() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    let peer = service_fn(|_: Request<()>| async {
        let response = Response::builder().status(429);
        // The peer's clock, or this one, is wrong by years.
        let response = response.header("x-ratelimit-remaining", "0").header("x-ratelimit-reset", "1000000001");
        response.body(())
    });
    let client = ThrottleLayer::new(limiter.clone()).read_ratelimit_fields().layer(peer);
    client.oneshot(Request::get("http://peer.example/").body(()).unwrap()).await.unwrap();
    let cooldown = limiter.rate_state(key()).await.unwrap().cooldown;
    assert!(cooldown >= ms(500), "{cooldown:?}");
}

#[test]
fn a_rate_is_lowered_by_whatever_factor_is_allowed() {
    let rate = AdaptiveRate { decrease: 0.999_999_9, ..AdaptiveRate::below(10.0) };
    if let Ok(mut model) = RateModel::try_new(10, rate) {
        let rate = model.refused(Some(US), 0, 1_000 * US).rate();
        assert!(rate < 10_000, "{rate}");
    }
}
