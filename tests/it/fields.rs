//! The fields that tell a client how much is left, read back with a parser of structured fields.

use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode};
use serde_json::Value;
use sfv::{BareItem, ListEntry, Parser};
use tokio::time::advance;
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::headers::{
    EXPOSE_HEADERS, RATELIMIT, RATELIMIT_POLICY, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET,
};
use tower_token_bucket::rejection::Rejection;
use tower_token_bucket::{
    Charge, Decision, Global, HeaderStyle, Limit, MemoryStore, OnStoreFailure, Quota, Reply, Store, TokenBucketLayer,
};

use crate::arithmetic::{QUOTAS, Raw, Rng, quota};

/// Answers with these replies, whatever is asked.
#[derive(Clone)]
struct Replies(Arc<[Reply]>);

impl Store for Replies {
    type Error = Infallible;
    type Future = Ready<Result<Decision, Infallible>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        ready(Ok(Decision::new(charges, &self.0).expect("as many replies as charges")))
    }
}

/// Never answers, and counts the questions.
#[derive(Clone, Default)]
struct Broken(Arc<AtomicU64>);

#[derive(Debug)]
struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("gone")
    }
}

impl std::error::Error for Gone {}

impl Store for Broken {
    type Error = Gone;
    type Future = Ready<Result<Decision, Gone>>;

    fn acquire(&self, _: &[Charge]) -> Self::Future {
        self.0.fetch_add(1, Ordering::Relaxed);
        ready(Err(Gone))
    }
}

/// A limit on all requests; the cost is that of the request's header `cost`, or 1.
fn limit(name: &str, quota: Quota) -> Limit {
    Limit::new(name, quota).key_by(Global).cost(|parts: &Parts| number(&parts.headers, "cost").unwrap_or(1))
}

fn costs(limit: Limit, cost: u64) -> Limit {
    limit.cost(move |_: &Parts| cost)
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name).map(|value| value.to_str().unwrap().parse().unwrap())
}

/// The response to a request of this cost, whose inner response has the fields in `inner`.
async fn response<St: Store>(
    layer: &TokenBucketLayer<St>,
    cost: u64,
    inner: &[(HeaderName, &'static str)],
) -> Response<Body> {
    let inner: Vec<_> = inner.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect();
    let service = layer.layer(service_fn(move |_: Request<Body>| {
        let mut response = Response::new(Body::empty());
        inner.iter().for_each(|(name, value)| _ = response.headers_mut().append(name.clone(), value.clone()));
        ready(Ok::<_, Infallible>(response))
    }));
    service.oneshot(Request::builder().header("cost", cost).body(Body::empty()).unwrap()).await.unwrap()
}

async fn fields<St: Store>(layer: &TokenBucketLayer<St>, cost: u64) -> HeaderMap {
    response(layer, cost, &[]).await.into_parts().0.headers
}

/// The one line of a field.
#[track_caller]
fn line<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next();
    assert!(lines.next().is_none(), "{name} has one line");
    line.map(|line| line.to_str().unwrap())
}

/// The items of a list: a name, and its parameters in order, all of them integers.
type Items = Vec<(String, Vec<(String, i64)>)>;

#[track_caller]
fn parse(line: &str) -> Items {
    let list: sfv::List = Parser::new(line).parse().unwrap_or_else(|error| panic!("{line}: {error}"));
    let item = |entry: ListEntry| {
        let ListEntry::Item(item) = entry else { panic!("{line}: an inner list") };
        let BareItem::String(name) = item.bare_item else { panic!("{line}: the name is a string") };
        let parameter = |(key, value): (sfv::Key, BareItem)| {
            let BareItem::Integer(value) = value else { panic!("{line}: {key:?} is an integer") };
            (key.as_str().to_owned(), i64::from(value))
        };
        (name.as_str().to_owned(), item.params.into_iter().map(parameter).collect())
    };
    list.into_iter().map(item).collect()
}

#[track_caller]
fn items(headers: &HeaderMap, name: &HeaderName) -> Items {
    line(headers, name).map_or_else(Vec::new, parse)
}

fn item(name: &str, parameters: [(&str, i128); 2]) -> (String, Vec<(String, i64)>) {
    (name.to_owned(), parameters.map(|(key, value)| (key.to_owned(), i64::try_from(value).unwrap())).to_vec())
}

fn ceil(a: i128, b: i128) -> i128 {
    (a + b - 1).div_euclid(b)
}

// The examples of the contract.

#[tokio::test(start_paused = true)]
async fn a_full_bucket_tells_what_is_left_and_when_it_is_back() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("per-key", Quota::per_second(10).with_capacity(100)));
    let headers = fields(&layer, 1).await;
    assert_eq!(line(&headers, &RATELIMIT_POLICY), Some("\"per-key\";q=100;w=10"));
    assert_eq!(line(&headers, &RATELIMIT), Some("\"per-key\";r=99;t=10"));
    assert_eq!(line(&headers, &RETRY_AFTER), None);
}

#[tokio::test(start_paused = true)]
async fn a_denial_tells_its_own_wait() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("per-key", Quota::per_second(10).with_capacity(100)));
    fields(&layer, 100).await;
    advance(Duration::from_millis(320)).await;
    let response = response(&layer, 20, &[]).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(line(response.headers(), &RETRY_AFTER), Some("2"), "16.8 tokens are missing");
    assert_eq!(line(response.headers(), &RATELIMIT), Some("\"per-key\";r=3;t=2"));
    assert_eq!(line(response.headers(), &RATELIMIT_POLICY), Some("\"per-key\";q=100;w=10"));
    // Who sleeps that long passes.
    advance(Duration::from_secs(2)).await;
    assert_eq!(line(&fields(&layer, 20).await, &RATELIMIT), Some("\"per-key\";r=3;t=1"));
}

#[tokio::test(start_paused = true)]
async fn an_empty_bucket_tells_the_time_to_the_next_token() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("slow", Quota::per_minute(4)));
    assert_eq!(line(&fields(&layer, 4).await, &RATELIMIT), Some("\"slow\";r=0;t=15"));
    advance(Duration::from_secs(7)).await;
    let headers = fields(&layer, 3).await;
    assert_eq!(line(&headers, &RATELIMIT), Some("\"slow\";r=0;t=38"), "a refusal tells its own wait");
    assert_eq!(line(&headers, &RETRY_AFTER), Some("38"));
}

#[tokio::test(start_paused = true)]
async fn waits_are_never_zero_and_never_shorter_than_the_truth() {
    for (tokens, per_ms, retry_after) in
        [(1, 1, "1"), (1, 999, "1"), (1, 1_000, "1"), (1, 1_001, "2"), (1, 86_400_000, "86400")]
    {
        let layer = TokenBucketLayer::new(
            MemoryStore::new(),
            limit("limit", Quota::new(tokens, Duration::from_millis(per_ms))),
        );
        assert_eq!(line(&fields(&layer, 1).await, &RETRY_AFTER), None);
        assert_eq!(line(&fields(&layer, 1).await, &RETRY_AFTER), Some(retry_after), "{tokens} per {per_ms} ms");
    }
}

// Random states.

/// One limit in a random state, and what its fields have to say.
struct State {
    raw: Raw,
    cost: u64,
    reply: Reply,
    /// In units of 1/p token where the quota, in lowest terms, is n per p microseconds.
    level: i128,
    ahead_us: i128,
    n: i128,
    p: i128,
    refuses: bool,
}

impl State {
    /// A level before the charge, from a whole debt to full, near the cost half of the time.
    fn random(rng: &mut Rng) -> Self {
        let raw = match rng.below(4) {
            0 => (1 + rng.scaled(1 << 20), 1 + rng.scaled(1 << 20), 1 + rng.scaled(1 << 31)),
            _ => rng.pick(&QUOTAS),
        };
        let (tokens, per) = quota(raw).refill();
        let (n, p) = (i128::from(tokens), i128::try_from(per.as_micros()).unwrap());
        let full = i128::from(raw.0) * p;
        let cost = 1 + if rng.chance(50) { rng.scaled(raw.0) } else { rng.below(raw.0) };
        let near = i128::from(cost) * p + i128::from(rng.below(5)) - 2;
        let level = match rng.below(8) {
            0 => -i128::from(rng.below(full as u64 + 1)),
            1 => full,
            2 => 0,
            3 | 4 => near.min(full),
            _ => i128::from(rng.below(full as u64 + 1)),
        };
        let ahead_us = if rng.chance(15) { i128::from(rng.below(1_000_001)) } else { 0 };
        let refuses = level < i128::from(cost) * p;
        Self { raw, cost, reply: Reply::new(0, true, 0), level, ahead_us, n, p, refuses }
    }

    /// The reply of the store, when `all` pass or one refuses.
    fn decide(&mut self, all: bool) {
        if all {
            self.level -= i128::from(self.cost) * self.p;
        }
        self.reply = Reply::new(self.level as i64, !self.refuses, self.ahead_us as u64);
    }

    fn wait_us(&self, units: i128) -> i128 {
        self.ahead_us + ceil(units - self.level, self.n)
    }

    fn q_w(&self) -> [(&'static str, i128); 2] {
        let q = i128::from(self.raw.0);
        [("q", q), ("w", ceil(q * self.p, self.n * 1_000_000).max(1))]
    }

    fn r_t(&self) -> [(&'static str, i128); 2] {
        let r = self.level.max(0) / self.p;
        let t = if self.refuses {
            ceil(self.wait_us(i128::from(self.cost) * self.p), 1_000_000)
        } else if r > 0 {
            ceil(r * self.p, self.n * 1_000_000)
        } else {
            ceil(self.wait_us(self.p), 1_000_000)
        };
        [("r", r), ("t", t.max(1))]
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_random_states_are_told_as_they_are() {
    let mut rng = Rng::new(11);
    let (mut denied, mut exact, mut states) = (0, 0, 0);
    while states < 10_000 {
        let mut limits: Vec<State> = (0..1 + rng.below(3)).map(|_| State::random(&mut rng)).collect();
        let all = limits.iter().all(|state| !state.refuses);
        limits.iter_mut().for_each(|state| state.decide(all));
        let names: Vec<String> = (0..limits.len()).map(|i| format!("Limit_{i}.x-{}", "y".repeat(i * 27))).collect();
        let store = Replies(limits.iter().map(|state| state.reply).collect());
        let built = names.iter().zip(&limits).map(|(name, state)| costs(limit(name, quota(state.raw)), state.cost));
        let layer = TokenBucketLayer::try_new(store, built).unwrap();
        let response = response(&layer, 1, &[]).await;
        let headers = response.headers();
        let context = format!("{:?} of {headers:?}", limits.iter().map(|state| state.reply).collect::<Vec<_>>());

        let expected = |parameters: fn(&State) -> [(&'static str, i128); 2]| -> Items {
            names.iter().zip(&limits).map(|(name, state)| item(name, parameters(state))).collect()
        };
        assert_eq!(items(headers, &RATELIMIT_POLICY), expected(State::q_w), "{context}");
        let told = items(headers, &RATELIMIT);
        assert_eq!(told, expected(State::r_t), "{context}");

        for ((_, parameters), state) in told.iter().zip(&limits) {
            let [(_, q), (_, w)] = state.q_w();
            let (r, t) = (i128::from(parameters[0].1), i128::from(parameters[1].1));
            assert!((0..=q).contains(&r) && t >= 1, "{context}");
            if state.level >= 0 && state.ahead_us == 0 {
                assert!(t <= w, "{context}: {w}");
                exact += 1;
            }
            states += 1;
        }
        let refusing = told.iter().zip(&limits).filter(|(_, state)| state.refuses);
        let longest = refusing.map(|((_, parameters), _)| parameters[1].1).max();
        let retry_after = line(headers, &RETRY_AFTER);
        assert!(retry_after.is_none_or(|text| text.bytes().all(|byte| byte.is_ascii_digit())), "{context}");
        assert_eq!(retry_after.map(|text| text.parse::<i64>().unwrap()), longest, "{context}");
        let status = if all { StatusCode::OK } else { StatusCode::TOO_MANY_REQUESTS };
        assert_eq!(response.status(), status, "{context}");
        denied += u64::from(!all);
    }
    assert!(denied > 2_000 && exact > 5_000, "{denied} denied, {exact} with neither a debt nor a clock ahead");
}

// Several limits, and those that have no item.

#[tokio::test(start_paused = true)]
async fn several_limits_are_one_list_in_order_of_declaration() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("z", Quota::per_second(10)))
        .and(limit("a", Quota::per_minute(60)))
        .and(limit("M", Quota::per_day(10_000).with_capacity(20)));
    let headers = fields(&layer, 4).await;
    assert_eq!(line(&headers, &RATELIMIT_POLICY), Some("\"z\";q=10;w=1, \"a\";q=60;w=60, \"M\";q=20;w=173"));
    assert_eq!(line(&headers, &RATELIMIT), Some("\"z\";r=6;t=1, \"a\";r=56;t=56, \"M\";r=16;t=139"));
    // z has 6 and a has 56: only z refuses, and only its t is a wait.
    let headers = fields(&layer, 8).await;
    assert_eq!(line(&headers, &RATELIMIT), Some("\"z\";r=6;t=1, \"a\";r=56;t=56, \"M\";r=16;t=139"));
    assert_eq!(line(&headers, &RETRY_AFTER), Some("1"));
}

#[tokio::test(start_paused = true)]
async fn limits_in_shadow_and_of_cost_0_have_no_item() {
    let quota = Quota::per_day(1).with_capacity(2);
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("shadow", quota).shadow())
        .and(limit("enforced", Quota::per_second(10)))
        .and(costs(limit("free", quota), 0));
    for left in ["r=9;t=1", "r=8;t=1", "r=7;t=1"] {
        let headers = fields(&layer, 1).await;
        assert_eq!(line(&headers, &RATELIMIT_POLICY), Some("\"enforced\";q=10;w=1"));
        assert_eq!(line(&headers, &RATELIMIT), Some(&*format!("\"enforced\";{left}")));
    }
    let denied = fields(&layer, 8).await;
    assert_eq!(line(&denied, &RATELIMIT), Some("\"enforced\";r=7;t=1"));
    assert_eq!(line(&denied, &RETRY_AFTER), Some("1"), "the shadow's day does not count");

    let only = TokenBucketLayer::new(MemoryStore::new(), limit("shadow", quota).shadow());
    for layer in [only, TokenBucketLayer::new(MemoryStore::new(), costs(limit("free", quota), 0))] {
        let response = response(&layer, 1, &[]).await;
        assert_eq!((response.status(), response.headers().len()), (StatusCode::OK, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_capacity_has_neither_an_item_nor_a_wait_under_every_policy() {
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny] {
        let store = Broken::default();
        let layer = TokenBucketLayer::new(store.clone(), limit("limit", Quota::per_second(10)))
            .and(limit("other", Quota::per_second(100)))
            .on_store_failure(policy);
        let response = response(&layer, 11, &[]).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(items(response.headers(), &RATELIMIT), []);
        assert_eq!(line(response.headers(), &RETRY_AFTER), None);
        assert_eq!(store.0.load(Ordering::Relaxed), 0, "the store is not asked");
    }
}

#[tokio::test(start_paused = true)]
async fn the_local_bucket_is_reported_when_it_answers() {
    let layer = TokenBucketLayer::new(Broken::default(), limit("limit", Quota::per_second(10).with_capacity(100)))
        .on_store_failure(OnStoreFailure::Local)
        .share(4);
    let headers = fields(&layer, 1).await;
    assert_eq!(line(&headers, &RATELIMIT_POLICY), Some("\"limit\";q=25;w=10"));
    assert_eq!(line(&headers, &RATELIMIT), Some("\"limit\";r=24;t=10"));
    let denied = fields(&layer, 25).await;
    assert_eq!(line(&denied, &RATELIMIT), Some("\"limit\";r=24;t=1"));
    assert_eq!(line(&denied, &RETRY_AFTER), Some("1"), "one token at 2.5 a second");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_let_through_by_policy_has_no_fields() {
    for style in [HeaderStyle::Draft11, HeaderStyle::Legacy, HeaderStyle::LegacyDelta, HeaderStyle::Off] {
        let layer = TokenBucketLayer::new(Broken::default(), limit("limit", Quota::per_second(10)))
            .on_store_failure(OnStoreFailure::Allow)
            .headers(style);
        let response = response(&layer, 1, &[(RATELIMIT, "\"inner\";r=1;t=1")]).await;
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers().len(), 1);
        assert_eq!(line(response.headers(), &RATELIMIT), Some("\"inner\";r=1;t=1"), "the inner layer's is kept");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_refused_by_policy_has_a_wait_and_no_items() {
    let layer = TokenBucketLayer::new(Broken::default(), limit("limit", Quota::per_second(10)))
        .on_store_failure(OnStoreFailure::Deny);
    let response = response(&layer, 1, &[]).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(line(response.headers(), &RETRY_AFTER), Some("1"));
    assert_eq!((line(response.headers(), &RATELIMIT), line(response.headers(), &RATELIMIT_POLICY)), (None, None));
}

// Fields that are there already.

#[tokio::test(start_paused = true)]
async fn fields_of_an_inner_layer_are_kept_and_appended_to() {
    let outer = TokenBucketLayer::new(MemoryStore::new(), limit("outer", Quota::per_second(10)));
    let inner = TokenBucketLayer::new(MemoryStore::new(), limit("inner", Quota::per_minute(6)));
    let service = outer
        .layer(inner.layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty()))))));
    let headers = service.oneshot(Request::new(Body::empty())).await.unwrap().into_parts().0.headers;
    assert_eq!(line(&headers, &RATELIMIT_POLICY), Some("\"inner\";q=6;w=60, \"outer\";q=10;w=1"));
    assert_eq!(line(&headers, &RATELIMIT), Some("\"inner\";r=5;t=50, \"outer\";r=9;t=1"));
}

#[tokio::test(start_paused = true)]
async fn several_lines_of_an_inner_layer_become_one_list() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("outer", Quota::per_second(10)));
    let inner = [
        (RATELIMIT, "\"a\";r=1;t=2"),
        (RATELIMIT, "\"b\";r=3;t=4 ,  \"c\";r=5;t=6"),
        (RATELIMIT_POLICY, "\"a\";q=1;w=2"),
        (RATELIMIT_POLICY, "\"b\";q=3;w=4"),
    ];
    let response = response(&layer, 1, &inner).await;
    let own = item("outer", [("r", 9), ("t", 1)]);
    let [a, b, c] = [("a", 1, 2), ("b", 3, 4), ("c", 5, 6)].map(|(name, r, t)| item(name, [("r", r), ("t", t)]));
    assert_eq!(items(response.headers(), &RATELIMIT), [a, b, c, own]);
    let own = item("outer", [("q", 10), ("w", 1)]);
    let [a, b] = [("a", 1, 2), ("b", 3, 4)].map(|(name, q, w)| item(name, [("q", q), ("w", w)]));
    assert_eq!(items(response.headers(), &RATELIMIT_POLICY), [a, b, own]);
}

#[tokio::test(start_paused = true)]
async fn an_empty_line_of_an_inner_layer_does_not_break_the_list() {
    for lines in [["", "\"a\";r=1;t=2"], ["\"a\";r=1;t=2", ""]] {
        let layer = TokenBucketLayer::new(MemoryStore::new(), limit("outer", Quota::per_second(10)));
        let response = response(&layer, 1, &lines.map(|line| (RATELIMIT, line))).await;
        let expected = [item("a", [("r", 1), ("t", 2)]), item("outer", [("r", 9), ("t", 1)])];
        assert_eq!(items(response.headers(), &RATELIMIT), expected, "{lines:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_of_ones_own_keeps_its_fields_and_gets_those_it_lacks() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("limit", Quota::per_day(1)));
    let service = |retry_after: Option<&'static str>| {
        let layer = layer.clone().rejection(move |rejection: &Rejection| {
            let mut response = Response::new(Body::from("slow down"));
            *response.status_mut() = rejection.status();
            if let Some(retry_after) = retry_after {
                response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(retry_after));
                response.headers_mut().insert(RATELIMIT, HeaderValue::from_static("\"own\";r=0;t=1"));
            }
            response
        });
        layer.layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty())))))
    };
    assert_eq!(fields(&layer, 1).await.len(), 2);
    for (retry_after, expected, list) in
        [(None, "86400", "\"limit\";r=0;t=86400"), (Some("7"), "7", "\"own\";r=0;t=1, \"limit\";r=0;t=86400")]
    {
        let response = service(retry_after).oneshot(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(line(response.headers(), &RETRY_AFTER), Some(expected));
        assert_eq!(line(response.headers(), &RATELIMIT), Some(list));
    }
}

// The other styles.

#[tokio::test(start_paused = true)]
async fn legacy_delta_tells_the_limit_that_binds_and_when_it_is_full() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("burst", Quota::per_second(10).with_capacity(100)))
        .and(limit("minute", Quota::per_minute(60)))
        .headers(HeaderStyle::LegacyDelta);
    let of = |headers: &HeaderMap| {
        assert_eq!((line(headers, &RATELIMIT), line(headers, &RATELIMIT_POLICY)), (None, None));
        [X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET]
            .map(|name| line(headers, &name).map(|text| text.parse::<u64>().unwrap()).unwrap())
    };
    // 59 of 60 is a smaller share than 99 of 100.
    assert_eq!(of(&fields(&layer, 1).await), [60, 59, 1]);
    assert_eq!(of(&fields(&layer, 49).await), [60, 10, 50]);
    let denied = fields(&layer, 55).await;
    assert_eq!(of(&denied), [60, 10, 50], "45 s is the longest wait: the other has 50 tokens and waits 0.5 s");
    assert_eq!(line(&denied, &RETRY_AFTER), Some("45"));
}

#[tokio::test(start_paused = true)]
async fn legacy_tells_the_limit_that_refuses_and_not_the_one_with_the_least_share() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("small", Quota::per_second(10)))
        .and(limit("slow", Quota::per_hour(3_600).with_capacity(1_000)))
        .headers(HeaderStyle::LegacyDelta);
    fields(&layer, 10).await;
    let headers = fields(&layer, 1).await;
    assert_eq!(number(&headers, "x-ratelimit-limit"), Some(10));
    assert_eq!(number(&headers, "x-ratelimit-remaining"), Some(0));
    assert_eq!(number(&headers, "x-ratelimit-reset"), Some(1));
}

#[tokio::test(start_paused = true)]
async fn legacy_tells_the_reset_in_seconds_since_1970() {
    let layer =
        TokenBucketLayer::new(MemoryStore::new(), limit("limit", Quota::per_minute(60))).headers(HeaderStyle::Legacy);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let before = now();
    let headers = fields(&layer, 30).await;
    let reset = number(&headers, "x-ratelimit-reset").unwrap();
    assert!((before + 30..=now() + 31).contains(&reset), "{reset}, and it was {before}");
    assert_eq!(number(&headers, "x-ratelimit-limit"), Some(60));
    assert_eq!(number(&headers, "x-ratelimit-remaining"), Some(30));
}

#[tokio::test(start_paused = true)]
async fn legacy_fields_of_an_inner_layer_are_kept() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("limit", Quota::per_minute(60)))
        .headers(HeaderStyle::LegacyDelta);
    let response = response(&layer, 1, &[(X_RATELIMIT_REMAINING, "3")]).await;
    assert_eq!(line(response.headers(), &X_RATELIMIT_REMAINING), Some("3"));
}

#[tokio::test(start_paused = true)]
async fn off_keeps_retry_after_and_nothing_else() {
    let layer =
        TokenBucketLayer::new(MemoryStore::new(), limit("limit", Quota::per_minute(1))).headers(HeaderStyle::Off);
    assert_eq!(fields(&layer, 1).await, HeaderMap::new());
    let denied = fields(&layer, 1).await;
    assert_eq!(line(&denied, &RETRY_AFTER), Some("60"));
    for name in EXPOSE_HEADERS.into_iter().filter(|name| *name != RETRY_AFTER) {
        assert_eq!(line(&denied, &name), None, "{name}");
    }
}

// The parser that the other tests rely on.

#[test]
fn the_parser_reads_the_examples_of_the_draft_and_refuses_what_is_malformed() {
    let examples: Value = serde_json::from_str(include_str!("../vectors/ratelimit_draft_examples.json")).unwrap();
    let list = |line: &str| Parser::new(line).parse::<sfv::List>();
    let mut rows = 0;
    for row in ["draft11_policy", "draft11_ratelimit"].iter().flat_map(|key| examples[key].as_array().unwrap()) {
        let (line, expected) = (row[0].as_str().unwrap(), row[1].as_array().unwrap());
        let parsed = list(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        assert_eq!(parsed.len(), expected.len(), "{line}");
        for (entry, expected) in parsed.iter().zip(expected) {
            let ListEntry::Item(entry) = entry else { panic!("{line}") };
            assert_eq!(entry.bare_item.as_string().map(|name| name.as_str()), expected[0].as_str(), "{line}");
            let parameters = expected[1].as_object().unwrap();
            assert_eq!(entry.params.len(), parameters.len(), "{line}");
            for (key, value) in parameters.iter().filter(|(_, value)| value.is_i64()) {
                let found = entry.params.iter().find(|(known, _)| known.as_str() == key).unwrap().1;
                assert_eq!(found.as_integer().map(i64::from), value.as_i64(), "{line}: {key}");
            }
        }
        rows += 1;
    }
    for row in examples["editor_copy_2026_08_15"].as_array().unwrap() {
        assert!(list(row[0].as_str().unwrap()).is_ok(), "{row}");
        rows += 1;
    }
    for row in examples["well_formed_sf_but_invalid_values"].as_array().unwrap() {
        assert!(list(row.as_str().unwrap()).is_ok(), "{row}");
        rows += 1;
    }
    for row in examples["malformed_must_be_ignored_whole"].as_array().unwrap().iter().skip(1) {
        assert!(list(row.as_str().unwrap()).is_err(), "{row}");
        rows += 1;
    }
    assert_eq!(rows, 23);
}
