//! What is seen from outside: each series with its value, as many after many clients as after few, and nothing of a client
//! in any of them, nor in any event.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::{Future, pending, ready};
use std::net::SocketAddr;
use std::pin::Pin;
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use ::metrics::{
    Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit, set_default_local_recorder,
};
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::{any, get};
use http::request::Parts;
use http::{Request, Response};
use tokio::time::{Instant, advance, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_token_bucket::outbound::{AdaptiveRate, Limiter};
use tower_token_bucket::{
    ApiKey, BucketKey, Charge, ClientIp, CostTable, Decision, Global, Health, KeyExtractor, Limit, MemoryStore,
    OnStoreFailure, Quota, RedisError, RedisStore, Store, TokenBucketLayer,
};
use tracing::field::Empty;
use tracing::{Instrument, info_span};

use crate::log::Log;
use crate::recorder::Series;
use crate::server::Server;

const DECISIONS: &str = "token_bucket_decisions_total";
const COST: &str = "token_bucket_cost_total";
const CHECKS: &str = "token_bucket_check_duration_seconds";
const FAILURES: &str = "token_bucket_store_failures_total";
const BREAKER: &str = "token_bucket_breaker_state";
const KEY: &str = "canary-key";

fn limit(name: &str, capacity: u64) -> Limit {
    Limit::new(name, Quota::per_day(capacity)).key_by(Global)
}

fn request(method: &str, path: &str) -> Request<Body> {
    Request::builder().method(method).uri(path).body(Body::empty()).unwrap()
}

fn is(values: &[(&str, f64)]) -> Vec<(String, f64)> {
    values.iter().map(|(labels, value)| ((*labels).to_owned(), *value)).collect()
}

/// An axum router with routes, whose layer is as given.
fn router<St: Store + Clone + Sync>(layer: TokenBucketLayer<St>) -> Router
where
    St::Future: Send,
{
    let ok = || async { "ok" };
    Router::new()
        .route("/users/{id}", get(ok))
        .route("/search", any(ok))
        .route("/health", get(ok))
        .fallback(ok)
        .layer(layer)
}

async fn send<B>(
    service: &(impl Service<Request<B>, Response = Response<impl Sized>, Error = Infallible> + Clone),
    request: Request<B>,
) -> u16 {
    service.clone().oneshot(request).await.unwrap().status().as_u16()
}

/// How many checks ended in each way.
fn checks(series: &Series) -> Vec<(String, usize)> {
    series.of(CHECKS).into_iter().map(|(labels, values)| (labels, values.len())).collect()
}

#[tokio::test(start_paused = true)]
async fn decisions_by_limit_route_outcome_and_source() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let costs = CostTable::new(1).route("GET /search", 3).exempt("GET /health");
    let router = router(TokenBucketLayer::new(MemoryStore::new(), limit("all", 6).cost(costs)));
    for (method, path, status) in [
        ("GET", "/users/1", 200),
        ("GET", "/users/2", 200),
        ("HEAD", "/users/3", 200),
        ("GET", "/search?q=1", 200),
        ("GET", "/search?q=2", 429),
        ("PURGE", "/search", 429),
        ("GET", "/health", 200),
        ("GET", "/nothing/here", 429),
    ] {
        assert_eq!(send(&router, request(method, path)).await, status, "{method} {path}");
    }
    let expected = [
        (" GET /health allowed exempt", 1.0),
        ("all GET /search allowed store", 1.0),
        ("all GET /search denied store", 1.0),
        ("all GET /users/{id} allowed store", 2.0),
        ("all GET unmatched denied store", 1.0),
        ("all HEAD /users/{id} allowed store", 1.0),
        ("all _OTHER /search denied store", 1.0),
    ];
    assert_eq!(series.values(DECISIONS), is(&expected));
    assert_eq!(series.values(COST), is(&[("all", 6.0)]));
    assert_eq!(checks(&series), [("{outcome=\"answered\"}".to_owned(), 7)], "what costs nothing asks nobody");
    let labels = r#"{limit="all",method="GET",route="/users/{id}",outcome="allowed",source="store"}"#;
    assert!(series.texts().contains(&format!("{DECISIONS}{labels}")), "{:?}", series.texts());
}

#[tokio::test(start_paused = true)]
async fn each_limit_says_what_became_of_it() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let cost = |parts: &Parts| parts.headers.get("cost").map_or(1, |cost| cost.to_str().unwrap().parse().unwrap());
    let enforced = limit("enforced", 3).cost(cost);
    let shadow = limit("shadow", 1).shadow();
    let keyed = limit("keyed", 10).key_by(ApiKey::verified("x-api-key", |key| key == KEY));
    let layer = TokenBucketLayer::new(MemoryStore::new(), enforced).and(shadow).and(keyed);
    let service = layer.layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty())))));
    let ask = |cost: u64| {
        let mut request = request("GET", "/");
        request.headers_mut().insert("x-api-key", KEY.parse().unwrap());
        request.headers_mut().insert("cost", cost.into());
        request
    };
    assert_eq!(send(&service, ask(2)).await, 200);
    assert_eq!(send(&service, ask(1)).await, 200, "the shadow limit refuses nothing");
    assert_eq!(send(&service, ask(1)).await, 429);
    assert_eq!(send(&service, ask(4)).await, 429, "it can never pass");
    assert_eq!(send(&service, request("GET", "/")).await, 401);
    let expected = [
        (" GET unmatched no_key layer", 1.0),
        ("enforced GET unmatched allowed store", 2.0),
        ("enforced GET unmatched denied store", 1.0),
        ("enforced GET unmatched too_dear layer", 1.0),
        ("keyed GET unmatched allowed store", 2.0),
        ("keyed GET unmatched not_charged layer", 1.0),
        ("keyed GET unmatched not_charged store", 1.0),
        ("shadow GET unmatched allowed store", 1.0),
        ("shadow GET unmatched not_charged layer", 1.0),
        ("shadow GET unmatched shadow_denied store", 2.0),
    ];
    assert_eq!(series.values(DECISIONS), is(&expected));
    assert_eq!(series.values(COST), is(&[("enforced", 3.0), ("keyed", 2.0), ("shadow", 1.0)]));
}

#[tokio::test(start_paused = true)]
async fn without_a_router_the_route_is_that_of_a_cost_table() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let costs = CostTable::new(1).route("GET /users/{id}", 2).route("* /files/{*rest}", 1);
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("first", 100)).and(limit("all", 100).cost(costs));
    let service = layer.layer(service_fn(|_: Request<Body>| ready(Ok::<_, Infallible>(Response::new(Body::empty())))));
    for (method, path) in
        [("GET", "/users/1"), ("HEAD", "/users/2"), ("POST", "/users/3"), ("PUT", "/files/a/b"), ("GET", "/FILES/a")]
    {
        assert_eq!(send(&service, request(method, path)).await, 200);
    }
    let all: Vec<_> = series.values(DECISIONS).into_iter().filter(|(labels, _)| labels.starts_with("all")).collect();
    let expected = [
        ("all GET /users/{id} allowed store", 1.0),
        ("all GET unmatched allowed store", 1.0),
        ("all HEAD /users/{id} allowed store", 1.0),
        ("all POST unmatched allowed store", 1.0),
        ("all PUT /files/{*rest} allowed store", 1.0),
    ];
    assert_eq!(all, is(&expected));
}

/// A store that never answers, or always fails.
#[derive(Clone, Copy, Debug)]
struct Broken {
    answers: bool,
}

#[derive(Debug)]
struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("gone")
    }
}

impl std::error::Error for Gone {}

impl Store for Broken {
    type Error = Gone;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, Gone>> + Send>>;

    fn acquire(&self, _: &[Charge]) -> Self::Future {
        if self.answers { Box::pin(ready(Err(Gone))) } else { Box::pin(pending()) }
    }
}

#[tokio::test(start_paused = true)]
async fn when_the_store_fails_the_source_is_the_policy_and_the_checks_say_how_they_ended() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    for (policy, name) in
        [(OnStoreFailure::Local, "local"), (OnStoreFailure::Allow, "allow"), (OnStoreFailure::Deny, "deny")]
    {
        for answers in [true, false] {
            let layer = TokenBucketLayer::new(Broken { answers }, limit(name, 1).on_store_failure(policy));
            let router = router(layer.and(limit("watched", 9).shadow()).deadline(Duration::from_millis(20)));
            send(&router, request("GET", "/users/1")).await;
        }
    }
    let expected = [
        ("allow GET /users/{id} allowed policy", 2.0),
        ("deny GET /users/{id} denied policy", 2.0),
        ("local GET /users/{id} allowed local", 2.0),
        ("watched GET /users/{id} allowed local", 4.0),
        ("watched GET /users/{id} not_charged policy", 2.0),
    ];
    assert_eq!(series.values(DECISIONS), is(&expected));
    let ends = series.of(CHECKS);
    let late = vec![0.02; 3];
    assert_eq!(ends, [("{outcome=\"failed\"}".to_owned(), vec![0.0; 3]), ("{outcome=\"late\"}".to_owned(), late)]);
}

#[tokio::test]
async fn redis_its_failures_by_kind_and_its_breaker() {
    let (series, server) = (Series::default(), Server::start());
    let _recorder = set_default_local_recorder(&series);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let node = format!("127.0.0.1:{}", server.port());
    assert_eq!(series.values(BREAKER), is(&[(&node, 0.0)]), "before anything is asked");
    let layer = TokenBucketLayer::new(store.clone(), limit("all", 2)).deadline(Duration::from_secs(5));
    let router = router(layer.on_store_failure(OnStoreFailure::Deny));
    for status in [200, 200, 429, 429] {
        assert_eq!(send(&router, request("GET", "/users/1")).await, status);
    }
    let expected = [
        ("all GET /users/{id} allowed store", 2.0),
        ("all GET /users/{id} denied remembered", 1.0),
        ("all GET /users/{id} denied store", 1.0),
    ];
    assert_eq!(series.values(DECISIONS), is(&expected));
    assert_eq!(series.values(FAILURES), []);

    server.kill();
    let ask = || request("GET", "/search");
    let began = Instant::now();
    while series.value(BREAKER, &node) != Some(2.0) {
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", series.texts());
        advance_past_memory(&store).await;
        send(&router, ask()).await;
    }
    while store.failures(tower_token_bucket::RedisErrorKind::BreakerOpen) == 0 {
        advance_past_memory(&store).await;
        send(&router, ask()).await;
    }
    for (kind, count) in series.values(FAILURES) {
        assert_eq!(count, of_kind(&store, &kind) as f64, "{kind}");
    }
    let kinds: Vec<_> = series.values(FAILURES).into_iter().map(|(kind, _)| kind).collect();
    assert!(kinds.contains(&"breaker_open".to_owned()) && kinds.contains(&"unreachable".to_owned()), "{kinds:?}");

    server.restart();
    while series.value(BREAKER, &node) != Some(0.0) {
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", series.texts());
        sleep(Duration::from_millis(20)).await;
        send(&router, ask()).await;
    }
}

/// A recorder that looks at the store whenever a gauge is set.
#[derive(Default)]
struct Curious(Series, OnceLock<RedisStore>, Mutex<Vec<Health>>);

impl Recorder for Curious {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, metadata: &Metadata<'_>) -> Counter {
        self.0.register_counter(key, metadata)
    }

    fn register_gauge(&self, key: &Key, metadata: &Metadata<'_>) -> Gauge {
        if let Some(store) = self.1.get() {
            self.2.lock().unwrap().push(store.health());
        }
        self.0.register_gauge(key, metadata)
    }

    fn register_histogram(&self, key: &Key, metadata: &Metadata<'_>) -> Histogram {
        self.0.register_histogram(key, metadata)
    }
}

#[tokio::test]
async fn a_recorder_may_look_at_the_store_whose_breaker_it_hears_of() {
    let (curious, server) = (Curious::default(), Server::start());
    let _recorder = set_default_local_recorder(&curious);
    let store = RedisStore::connect(&server.url()).await.unwrap();
    curious.1.set(store.clone()).unwrap();
    server.kill();
    while curious.2.lock().unwrap().is_empty() {
        let _: Result<_, RedisError> = store.reset(&limit("all", 2), BucketKey::global()).await;
    }
    assert_eq!(curious.2.lock().unwrap()[0], Health::Open);
}

/// What it remembers would be an answer.
async fn advance_past_memory(store: &RedisStore) {
    let _: Result<_, RedisError> = store.reset(&limit("all", 2), BucketKey::global()).await;
    sleep(Duration::from_millis(1)).await;
}

fn of_kind(store: &RedisStore, name: &str) -> u64 {
    use tower_token_bucket::RedisErrorKind::{
        BreakerOpen, Bucket, Configuration, Crowded, Late, Lost, Reply, Unavailable, Unreachable,
    };
    let kinds = [
        ("unreachable", Unreachable),
        ("breaker_open", BreakerOpen),
        ("crowded", Crowded),
        ("unavailable", Unavailable),
        ("configuration", Configuration),
        ("bucket", Bucket),
        ("lost", Lost),
        ("late", Late),
        ("reply", Reply),
    ];
    let kind = kinds.into_iter().find(|(of, _)| *of == name).unwrap();
    store.failures(kind.1)
}

#[tokio::test(start_paused = true)]
async fn the_capacity_and_the_rate_that_are_set_and_what_a_reload_makes_of_them() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let slow = Limit::new("slow", Quota::per_minute(30).with_capacity(5));
    let layer = TokenBucketLayer::new(MemoryStore::new(), Limit::new("quick", Quota::per_second(7))).and(slow);
    let capacities = || series.values("token_bucket_limit_capacity_tokens");
    let rates = || series.values("token_bucket_limit_refill_tokens_per_second");
    assert_eq!(capacities(), is(&[("quick", 7.0), ("slow", 5.0)]));
    assert_eq!(rates(), is(&[("quick", 7.0), ("slow", 0.5)]));
    assert_eq!(series.values("token_bucket_reloads_total"), []);
    let (log, _logged) = Log::capture();
    let handle = layer.handle();
    handle.replace([Limit::new("quick", Quota::per_second(8).with_capacity(80))]).unwrap();
    handle.replace([]).unwrap_err();
    assert_eq!(capacities(), is(&[("quick", 80.0), ("slow", 5.0)]));
    assert_eq!(rates(), is(&[("quick", 8.0), ("slow", 0.5)]));
    assert_eq!(series.values("token_bucket_reloads_total"), is(&[("", 1.0)]));
    let lines = log.lines();
    assert!(lines.len() == 1 && lines[0].contains("INFO") && lines[0].contains("quick"), "{lines:?}");
    let described = series.units();
    assert_eq!(described.len(), 13);
    let seconds: Vec<_> = described.iter().filter(|(_, unit)| **unit == Some(Unit::Seconds)).collect();
    assert_eq!(seconds.len(), 2);
    for (name, unit) in &described {
        assert_eq!(*unit == Some(Unit::Seconds), name.ends_with("_seconds"), "{name}");
        assert!(name.starts_with("token_bucket_"), "{name}");
    }
    // What is documented is what there is, and the README's alerts look at it.
    let named = |text: &'static str| -> BTreeSet<_> {
        text.split(|c: char| !c.is_alphanumeric() && c != '_')
            .filter(|word| word.starts_with("token_bucket_"))
            .collect()
    };
    let names: BTreeSet<_> = described.keys().map(|name| &**name).collect();
    let documented = include_str!("../../src/metrics.rs").split("//! # Labels").next().unwrap();
    assert_eq!(named(documented), names, "the table of the module `metrics`");
    let alerts = include_str!("../../README.md").split("```promql").nth(1).unwrap().split("```").next().unwrap();
    assert!(!named(alerts).is_empty() && named(alerts).is_subset(&names), "the README's alerts: {:?}", named(alerts));
}

/// Buckets are counted over all stores of a process, which other tests have as well.
#[tokio::test(start_paused = true)]
async fn buckets_in_memory() {
    if std::env::var_os("BUCKETS").is_none() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "metrics::buckets_in_memory", "--test-threads=1"])
            .env("BUCKETS", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let held = || series.value("token_bucket_memory_buckets", "");
    let (first, second) = (MemoryStore::with_buckets(64), MemoryStore::new());
    let charge = |limit: &str, key: u64| {
        let name = tower_token_bucket::LimitName::try_new(limit).unwrap();
        let key = BucketKey::id(key.to_le_bytes());
        Charge::new(name, key, Quota::per_second(1), tower_token_bucket::Amount::Take(1))
    };
    for key in 0..10 {
        second.acquire(&[charge("a", key)]).await.unwrap();
        assert_eq!(held(), Some((key + 1) as f64));
        second.acquire(&[charge("a", key)]).await.unwrap();
        assert_eq!(held(), Some((key + 1) as f64), "no new one");
    }
    second.acquire(&[charge("a", 0), charge("b", 0), charge("c", 0)]).await.unwrap();
    assert_eq!(held(), Some(10.0), "it was denied");
    second.acquire(&[charge("b", 0), charge("c", 0)]).await.unwrap();
    assert_eq!(held(), Some(12.0));
    for key in 0..1_000 {
        first.acquire(&[charge("a", key)]).await.unwrap();
        first.acquire(&[charge("a", key), charge("b", key)]).await.unwrap();
        assert_eq!(held(), Some((first.buckets() + second.buckets()) as f64));
    }
    let overflowed = series.value("token_bucket_memory_overflowed_total", "");
    assert_eq!(overflowed, Some(first.overflowed() as f64));
    assert!(overflowed > Some(1_000.0), "{overflowed:?}");
    // Those that are full are forgotten.
    advance(Duration::from_secs(60)).await;
    for key in 2_000..2_100 {
        first.acquire(&[charge("a", key)]).await.unwrap();
    }
    assert_eq!(held(), Some((first.buckets() + second.buckets()) as f64));
    drop(first);
    assert_eq!(held(), Some(12.0));
    drop(second);
    assert_eq!(held(), Some(0.0));
}

#[tokio::test(start_paused = true)]
async fn senders_that_wait_those_that_get_nothing_and_peers_that_refuse() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let key = BucketKey::id("canary-endpoint");
    let limiter = Limiter::new(MemoryStore::new(), "hooks", Quota::per_second(10).with_capacity(2))
        .max_wait(Duration::from_millis(150));
    for _ in 0..3 {
        limiter.acquire(key, 1).await.unwrap();
    }
    limiter.acquire(key, 2).await.unwrap_err();
    limiter.acquire(key, 3).await.unwrap_err();
    limiter.clone().max_waiters(0).acquire(key, 1).await.unwrap_err();
    assert_eq!(
        series.of("token_bucket_wait_duration_seconds"),
        [("{limit=\"hooks\"}".to_owned(), vec![0.0, 0.0, 0.1])]
    );
    let expected = [("hooks crowded", 1.0), ("hooks no_tokens", 1.0), ("hooks too_dear", 1.0)];
    assert_eq!(series.values("token_bucket_not_acquired_total"), is(&expected));
    assert_eq!(series.values(COST), is(&[("hooks", 3.0)]));
    assert_eq!(series.value("token_bucket_limit_capacity_tokens", "hooks"), Some(2.0));
    assert_eq!(series.value("token_bucket_limit_refill_tokens_per_second", "hooks"), Some(10.0));
    let adaptive = Limiter::new(MemoryStore::new(), "adaptive", Quota::per_second(10))
        .adaptive(AdaptiveRate::of(Quota::per_second(10)));
    adaptive.refused(key, Some(Duration::from_secs(1))).await.unwrap();
    assert_eq!(series.values("token_bucket_refused_total"), is(&[("adaptive", 1.0)]));
    let broken = Limiter::new(Broken { answers: true }, "broken", Quota::per_second(10));
    broken.on_store_failure(OnStoreFailure::Deny).acquire(key, 1).await.unwrap_err();
    assert_eq!(series.value("token_bucket_not_acquired_total", "broken store_failed"), Some(1.0));
    assert!(checks(&series).contains(&("{outcome=\"failed\"}".to_owned(), 1)), "{:?}", checks(&series));
    assert_says_nothing_of_a_client(&series.texts().join("\n"));
}

/// Sends as that many clients, each by a key and an address of its own, to paths and by a method of their own.
async fn clients(router: &Router, from: u32, to: u32) {
    for i in from..to {
        let mut ask = request("GET", &format!("/users/canary-{i}"));
        if i % 100 == 0 {
            ask = request("GET", &format!("/canary/{i}"));
        }
        if i % 1_000 == 0 {
            *ask.method_mut() = format!("CANARY{i}").parse().unwrap();
        }
        ask.headers_mut().insert("x-api-key", format!("canary-{i}").parse().unwrap());
        let address = SocketAddr::from(((0x0a00_0000 + i).to_be_bytes(), 4711));
        ask.extensions_mut().insert(ConnectInfo(address));
        // One in five is refused the second time.
        for _ in 0..requests(i) {
            let mut again = Request::new(Body::empty());
            (*again.method_mut(), *again.uri_mut()) = (ask.method().clone(), ask.uri().clone());
            *again.headers_mut() = ask.headers().clone();
            again.extensions_mut().insert(ConnectInfo(address));
            send(router, again).await;
        }
    }
}

fn requests(client: u32) -> u32 {
    if client.is_multiple_of(5) { 2 } else { 1 }
}

fn assert_says_nothing_of_a_client(text: &str) {
    for canary in ["canary", "CANARY", "10.0."] {
        assert!(!text.contains(canary), "{canary} in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn there_are_as_many_series_after_100_000_clients_as_after_10() {
    let series = Series::default();
    let _recorder = set_default_local_recorder(&series);
    let by_key = Limit::new("per-key", Quota::per_day(1)).key_by(ApiKey::unverified("x-api-key").or(ClientIp::peer()));
    let by_address = Limit::new("per-address", Quota::per_day(1)).shadow();
    let router = router(TokenBucketLayer::new(MemoryStore::new(), by_key).and(by_address));
    clients(&router, 0, 1).await;
    clients(&router, 92, 101).await;
    let few = series.texts();
    clients(&router, 101, 100_101).await;
    assert_eq!(series.texts(), few);
    let counted: f64 = series.values(DECISIONS).iter().map(|(_, count)| count).sum();
    let requests: u32 = (0..1).chain(92..100_101).map(requests).sum();
    assert_eq!(counted, f64::from(2 * requests), "of two limits");
    assert_says_nothing_of_a_client(&few.join("\n"));
    println!("{} series", few.len());
}

#[tokio::test(start_paused = true)]
async fn the_span_of_a_request_has_the_decision_where_it_declares_the_fields_and_no_event_names_a_client() {
    let (log, _logged) = Log::capture_all();
    let by_key = Limit::new("per-key", Quota::per_minute(1)).key_by(ApiKey::unverified("x-api-key"));
    let layer = TokenBucketLayer::new(MemoryStore::new(), by_key);
    let router = router(layer);
    let ask = || {
        let mut ask = request("GET", "/users/canary-7");
        ask.headers_mut().insert("x-api-key", KEY.parse().unwrap());
        ask
    };
    let declared = || {
        info_span!(
            "request",
            rate_limit.decision = Empty,
            rate_limit.limit = Empty,
            rate_limit.source = Empty,
            rate_limit.retry_after = Empty
        )
    };
    send(&router, ask()).instrument(declared()).await;
    let text = log.text();
    let allowed = r#"rate_limit.decision="allowed" rate_limit.source="store" rate_limit.limit="per-key""#;
    assert!(text.contains(allowed) && !text.contains("retry_after"), "{text}");
    send(&router, ask()).instrument(declared()).await;
    let text = log.text();
    let denied = r#"rate_limit.decision="denied" rate_limit.source="store" rate_limit.limit="per-key""#;
    assert!(text.contains(denied) && text.contains("rate_limit.retry_after=60"), "{text}");
    let event = |text: &str| text.lines().filter(|line| line.contains("a request is refused")).count();
    assert_eq!(event(&text), 1, "{text}");
    // Neither a span that declares nothing, nor none, is in the way.
    send(&router, ask()).instrument(info_span!("bare")).await;
    send(&router, ask()).await;
    send(&router, request("GET", "/users/canary-8")).await;
    let text = log.text();
    assert_eq!(event(&text), 4, "{text}");
    assert!(
        text.lines().any(|line| line.contains("DEBUG") && line.contains(r#"rate_limit.decision="no_key""#)),
        "{text}"
    );
    assert_says_nothing_of_a_client(&text);
}
