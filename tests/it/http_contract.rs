//! What a client sees: responses and their fields, costs by route, keys, several limits, and errors of configuration.

use std::convert::Infallible;
use std::future::ready;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::MockConnectInfo;
use axum::response::IntoResponse;
use axum::routing::{any, get};
use axum::{Extension, Router};
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::cors::{Any, CorsLayer};
use tower_token_bucket::headers::EXPOSE_HEADERS;
use tower_token_bucket::rejection::{Empty, Reason, Rejection};
use tower_token_bucket::{
    ApiKey, BucketKey, ClientIp, ConfigError, CostTable, Decision, Global, HeaderStyle, Identity, KeyExtractor, Limit,
    LimitName, MemoryStore, NoKey, OnStoreFailure, Quota, RedisStore, Source, Store, TokenBucketLayer,
};

use crate::log::Log;
use crate::plumbing::Fragile;

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const REDUCED_CAPACITY: &str = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";

/// One bucket for all requests.
fn limit(name: &str, quota: Quota) -> Limit {
    Limit::new(name, quota).key_by(Global)
}

fn layer(limit: Limit) -> TokenBucketLayer<MemoryStore> {
    TokenBucketLayer::new(MemoryStore::new(), limit)
}

/// A router of one route for every method, with the layer on it.
fn app<St: Store>(layer: TokenBucketLayer<St>) -> Router {
    Router::new().route("/", any(ok)).layer(layer)
}

async fn ok() -> &'static str {
    "ok"
}

/// A request without a body; `headers` is `name: value`, one a line.
fn request(method: &str, path: &str, headers: &str) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers.lines().map(|line| line.split_once(": ").unwrap()) {
        request = request.header(name, value);
    }
    request.body(Body::empty()).unwrap()
}

fn parts(headers: &str) -> Parts {
    request("GET", "/", headers).into_parts().0
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    decision: Option<Decision>,
    body: String,
}

impl Answer {
    /// The value of a field that is there once, or not at all.
    #[track_caller]
    fn field(&self, name: &str) -> Option<&str> {
        let lines: Vec<_> = self.headers.get_all(name).iter().collect();
        assert!(lines.len() <= 1, "{name}: {lines:?}");
        lines.first().map(|line| line.to_str().unwrap())
    }

    #[track_caller]
    fn json(&self) -> Value {
        assert_eq!(self.field("content-type"), Some("application/problem+json"));
        serde_json::from_str(&self.body).unwrap()
    }

    #[track_caller]
    fn source(&self) -> Source {
        self.decision.as_ref().expect("a decision").source()
    }

    fn violated(&self) -> Vec<String> {
        serde_json::from_value(self.json()["violated-policies"].clone()).unwrap()
    }
}

/// Sends a request to a clone of the service.
async fn send<S>(service: &S, request: Request<Body>) -> Answer
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let response = service.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = body.collect().await.unwrap();
    assert!(body.trailers().is_none());
    let body = String::from_utf8(body.to_bytes().to_vec()).unwrap();
    Answer { status: parts.status.as_u16(), headers: parts.headers, decision: parts.extensions.get().cloned(), body }
}

async fn get_root(app: &Router) -> Answer {
    send(app, request("GET", "/", "")).await
}

/// A router whose only bucket is empty, and the layer's answer to a `GET`.
async fn drained<St: Store>(layer: TokenBucketLayer<St>) -> (Router, Answer) {
    let app = app(layer);
    while get_root(&app).await.status == 200 {}
    let denied = get_root(&app).await;
    (app, denied)
}

// 1. The refusal.

#[tokio::test(start_paused = true)]
async fn a_denial_is_429_with_a_problem_document_and_the_time_to_wait() {
    let (_, denied) = drained(layer(limit("per-key", Quota::per_minute(7).with_capacity(3)))).await;
    assert_eq!(denied.status, 429);
    // 60/7 s, rounded up: tower-governor#38, #40, throttle-kit, fastify#325, traefik#8581.
    assert_eq!(denied.field("retry-after"), Some("9"));
    assert_eq!(denied.field("cache-control"), Some("no-store"));
    assert_eq!(denied.field("content-length"), Some(denied.body.len().to_string().as_str()));
    let problem = denied.json();
    assert_eq!(problem["type"], QUOTA_EXCEEDED);
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["violated-policies"], json!(["per-key"]));
    assert!(!problem["title"].as_str().unwrap().is_empty());
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("per-key") && detail.contains("9 s"), "{detail}");
    assert_eq!(problem.as_object().unwrap().len(), 5, "{problem}");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_waits_as_long_as_it_is_told_passes() {
    // dotnet#92557: a whole period, or too short for a heavy cost.
    for (quota, cost) in [
        (Quota::per_second(10).with_capacity(20), 20),
        (Quota::per_second(3), 1),
        (Quota::per_minute(7).with_capacity(9), 8),
        (Quota::per_day(1), 1),
        (Quota::per_second(5000), 1),
    ] {
        let app = app(layer(limit("a", quota).cost(cost_of_header)));
        let dear = || request("GET", "/", &format!("cost: {cost}"));
        assert_eq!(send(&app, request("GET", "/", &format!("cost: {}", quota.capacity()))).await.status, 200);
        let denied = send(&app, dear()).await;
        assert_eq!(denied.status, 429, "{quota}");
        let wait: u64 = denied.field("retry-after").unwrap().parse().unwrap();
        assert!(wait >= 1);
        tokio::time::advance(Duration::from_secs(wait)).await;
        assert_eq!(send(&app, dear()).await.status, 200, "{quota}");
    }
}

fn cost_of_header(parts: &Parts) -> u64 {
    parts.headers.get("cost").map_or(1, |cost| cost.to_str().unwrap().parse().unwrap())
}

#[tokio::test(start_paused = true)]
async fn head_is_refused_with_the_same_fields_and_no_body() {
    let (app, by_get) = drained(layer(limit("a", Quota::per_minute(1)))).await;
    let by_head = send(&app, request("HEAD", "/", "")).await;
    assert_eq!((by_head.status, by_head.body.as_str()), (429, ""));
    assert_eq!(by_head.headers, by_get.headers);
    // And with nothing around that would take the body away.
    let plain = layer(limit("a", Quota::per_minute(1)));
    let plain = plain.layer(service_fn(|_| ready(Ok::<_, Infallible>(Response::new(Body::from("ok"))))));
    assert_eq!(send(&plain, request("GET", "/", "")).await.status, 200);
    let (by_head, by_get) = (send(&plain, request("HEAD", "/", "")).await, send(&plain, request("GET", "/", "")).await);
    assert_eq!((by_head.status, by_get.status), (429, 429));
    assert_eq!(by_head.headers, by_get.headers);
    assert!(by_head.body.is_empty() && !by_get.body.is_empty());
}

#[tokio::test(start_paused = true)]
async fn an_admitted_response_is_the_inner_one_with_the_fields_added() {
    let inner = Router::new().route("/", get(|| async { (StatusCode::CREATED, [("x-own", "1")], "made") }));
    let answer = get_root(&inner.layer(layer(limit("a", Quota::per_minute(2))))).await;
    assert_eq!((answer.status, answer.body.as_str(), answer.field("x-own")), (201, "made", Some("1")));
    assert_eq!((answer.field("retry-after"), answer.field("cache-control")), (None, None));
    assert!(answer.field("ratelimit").is_some());
}

#[tokio::test(start_paused = true)]
async fn a_handler_can_read_the_decision() {
    let handler = |Extension(decision): Extension<Decision>| async move {
        format!("{:?} {:?}", decision.remaining(), decision.source())
    };
    let app = Router::new().route("/", get(handler)).layer(layer(limit("a", Quota::per_minute(2))));
    assert_eq!(get_root(&app).await.body, "Some(1) Store");
    assert_eq!(get_root(&app).await.body, "Some(0) Store");
}

// 2 and 3. The fields.

#[tokio::test(start_paused = true)]
async fn draft_11_tells_the_quota_and_what_is_left_of_it() {
    let app = app(layer(limit("per-key", Quota::per_second(10).with_capacity(100)).cost(cost_of_header)));
    let first = get_root(&app).await;
    assert_eq!(first.field("ratelimit-policy"), Some("\"per-key\";q=100;w=10"));
    assert_eq!(first.field("ratelimit"), Some("\"per-key\";r=99;t=10"));
    send(&app, request("GET", "/", "cost: 96")).await;
    tokio::time::advance(Duration::from_millis(20)).await;
    // Level 3.2, cost 20.
    let denied = send(&app, request("GET", "/", "cost: 20")).await;
    assert_eq!(denied.field("retry-after"), Some("2"));
    assert_eq!(denied.field("ratelimit-policy"), Some("\"per-key\";q=100;w=10"));
    assert_eq!(denied.field("ratelimit"), Some("\"per-key\";r=3;t=2"));
}

#[tokio::test(start_paused = true)]
async fn fields_that_an_inner_layer_has_set_are_kept_and_lists_appended_to() {
    let set =
        [("ratelimit", "\"inner\";r=5;t=1"), ("ratelimit-policy", "\"inner\";q=9;w=1"), ("x-ratelimit-limit", "7")];
    let inner = Router::new().route("/", get(move || async move { set }));
    let draft = get_root(&inner.clone().layer(layer(limit("a", Quota::per_second(2))))).await;
    assert_eq!(draft.field("ratelimit"), Some("\"inner\";r=5;t=1, \"a\";r=1;t=1"));
    assert_eq!(draft.field("ratelimit-policy"), Some("\"inner\";q=9;w=1, \"a\";q=2;w=1"));
    let legacy = layer(limit("a", Quota::per_second(2))).headers(HeaderStyle::Legacy);
    let legacy = get_root(&inner.layer(legacy)).await;
    assert_eq!((legacy.field("x-ratelimit-limit"), legacy.field("x-ratelimit-remaining")), (Some("7"), Some("1")));
}

#[tokio::test(start_paused = true)]
async fn a_layer_around_another_adds_its_fields_to_the_refusal_of_the_inner_one() {
    let inner = app(layer(limit("inner", Quota::per_minute(1))));
    let (_, denied) = drained_router(inner.layer(layer(limit("outer", Quota::per_hour(10))))).await;
    assert_eq!(denied.field("retry-after"), Some("60"));
    assert_eq!(denied.field("ratelimit"), Some("\"inner\";r=0;t=60, \"outer\";r=7;t=2520"));
    assert_eq!(denied.violated(), ["inner"]);
}

async fn drained_router(app: Router) -> (Router, Answer) {
    while get_root(&app).await.status == 200 {}
    let denied = get_root(&app).await;
    (app, denied)
}

#[tokio::test(start_paused = true)]
async fn a_list_that_was_in_several_lines_is_one_line_with_nothing_lost() {
    let inner = get(|| async {
        let mut headers = HeaderMap::new();
        headers.append("ratelimit", "\"x\";r=1;t=1".parse().unwrap());
        headers.append("ratelimit", "\"y\";r=2;t=2".parse().unwrap());
        headers
    });
    let answer = get_root(&Router::new().route("/", inner).layer(layer(limit("a", Quota::per_second(2))))).await;
    assert_eq!(answer.field("ratelimit"), Some("\"x\";r=1;t=1, \"y\";r=2;t=2, \"a\";r=1;t=1"));
}

#[tokio::test(start_paused = true)]
async fn legacy_tells_of_the_limit_that_binds() {
    let limits = || {
        layer(limit("second", Quota::per_second(10)).cost(cost_of_header))
            .and(limit("minute", Quota::per_minute(20)).cost(cost_of_header))
    };
    let app = app(limits().headers(HeaderStyle::LegacyDelta));
    let fields = |answer: &Answer| {
        ["limit", "remaining", "reset"].map(|name| {
            let value: u64 = answer.field(&format!("x-ratelimit-{name}")).unwrap().parse().unwrap();
            value
        })
    };
    // 7 of 10 against 17 of 20: the least share; 3 tokens at 10/s.
    assert_eq!(fields(&send(&app, request("GET", "/", "cost: 3")).await), [10, 7, 1]);
    tokio::time::advance(Duration::from_secs(1)).await;
    send(&app, request("GET", "/", "cost: 10")).await;
    // 0 of 10 against 7.33 of 20: denied by both, and the longest wait is that of the minute.
    let denied = send(&app, request("GET", "/", "cost: 8")).await;
    assert_eq!((denied.status, denied.field("retry-after")), (429, Some("2")));
    assert_eq!(fields(&denied), [20, 7, 38]);
    assert!(denied.field("ratelimit").is_none() && denied.field("ratelimit-policy").is_none());

    let unix = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let app = self::app(limits().headers(HeaderStyle::Legacy));
    let [capacity, remaining, reset] = fields(&send(&app, request("GET", "/", "cost: 10")).await);
    assert_eq!((capacity, remaining), (10, 0));
    assert!((unix + 1..=unix + 4).contains(&reset), "{reset} at {unix}");
}

#[tokio::test(start_paused = true)]
async fn every_style_sends_retry_after_and_off_sends_nothing_else() {
    for style in [HeaderStyle::Draft11, HeaderStyle::Legacy, HeaderStyle::LegacyDelta, HeaderStyle::Off] {
        let (_, denied) = drained(layer(limit("a", Quota::per_minute(1))).headers(style)).await;
        assert_eq!((denied.status, denied.field("retry-after")), (429, Some("60")), "{style:?}");
        let others = denied.headers.keys().filter(|name| name.as_str().contains("ratelimit")).count();
        assert_eq!(others == 0, style == HeaderStyle::Off, "{style:?}");
    }
}

// 4. Responses of one's own, no key, no peer.

#[tokio::test(start_paused = true)]
async fn a_response_of_ones_own_keeps_what_it_sets_and_gets_what_it_leaves_out() {
    // snarkOS#4472: a custom error response loses Retry-After.
    let own = |rejection: &Rejection| -> Response<Body> {
        assert_eq!(rejection.reason(), &Reason::Denied);
        assert_eq!(rejection.violated().collect::<Vec<_>>(), ["a"]);
        assert_eq!(rejection.retry_after(), Some(Duration::from_secs(60)));
        assert!(!rejection.is_grpc() && !rejection.is_head());
        (StatusCode::IM_A_TEAPOT, [("x-own", "yes"), ("content-type", "text/plain")], "slow down").into_response()
    };
    let (_, denied) = drained(layer(limit("a", Quota::per_minute(1)))).await;
    let with_own = layer(limit("a", Quota::per_minute(1))).rejection(own);
    let (_, denied_own) = drained_router(Router::new().route("/", any(ok)).layer(with_own)).await;
    assert_eq!((denied_own.status, denied_own.body.as_str()), (418, "slow down"));
    assert_eq!(denied_own.field("content-type"), Some("text/plain"));
    assert_eq!(denied_own.field("x-own"), Some("yes"));
    for name in ["retry-after", "cache-control", "ratelimit", "ratelimit-policy"] {
        assert!(denied.field(name).is_some());
        assert_eq!(denied_own.field(name), denied.field(name));
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_of_ones_own_keeps_its_own_retry_after_and_cache_control() {
    let own = |rejection: &Rejection| -> Response<Body> {
        let response = Response::builder().status(rejection.status()).header("retry-after", "120");
        let response = response.header("cache-control", "private").header("ratelimit", "\"own\";r=0;t=120");
        response.body(Body::empty()).unwrap()
    };
    let with_own = layer(limit("a", Quota::per_minute(1))).rejection(own);
    let (_, denied) = drained_router(Router::new().route("/", any(ok)).layer(with_own)).await;
    assert_eq!((denied.status, denied.field("retry-after")), (429, Some("120")));
    assert_eq!(denied.field("cache-control"), Some("private"));
    assert_eq!(denied.field("ratelimit"), Some("\"own\";r=0;t=120, \"a\";r=0;t=60"));
}

#[tokio::test(start_paused = true)]
async fn the_empty_response_has_the_fields_and_no_body() {
    let with_empty = layer(limit("a", Quota::per_minute(1))).rejection(Empty);
    let (_, denied) = drained_router(Router::new().route("/", any(ok)).layer(with_empty)).await;
    assert_eq!((denied.status, denied.body.as_str(), denied.field("retry-after")), (429, "", Some("60")));
    assert_eq!((denied.field("content-type"), denied.field("cache-control")), (None, Some("no-store")));
    assert!(denied.field("ratelimit").is_some());
}

#[tokio::test(start_paused = true)]
async fn without_a_key_the_answer_is_401_with_a_challenge() {
    let by_header = |header: &str| Limit::new("a", Quota::per_second(1)).key_by(ApiKey::verified(header, |_| false));
    for (header, sent, challenge) in [
        ("x-api-key", "", "ApiKey header=\"x-api-key\""),
        ("x-api-key", "x-api-key: wrong", "ApiKey header=\"x-api-key\""),
        ("X-Other", "", "ApiKey header=\"x-other\""),
        ("authorization", "", "Bearer"),
        ("Authorization", "authorization: Bearer wrong", "Bearer"),
        ("authorization", "authorization: Basic d3Jvbmc=", "Bearer"),
    ] {
        let store = MemoryStore::new();
        let app = app(TokenBucketLayer::new(store.clone(), by_header(header)));
        let answer = send(&app, request("GET", "/", sent)).await;
        assert_eq!(answer.status, 401, "{header}: {sent}");
        assert_eq!(answer.field("www-authenticate"), Some(challenge));
        assert_eq!(answer.field("cache-control"), Some("no-store"));
        assert_eq!((answer.field("retry-after"), answer.field("ratelimit")), (None, None));
        let problem = answer.json();
        assert_eq!(problem["status"], 401);
        assert_eq!(problem["type"], "about:blank");
        assert_eq!(problem["title"], "Unauthorized");
        assert!(problem.get("violated-policies").is_none());
        assert!(!answer.body.contains("wrong") && !answer.body.contains("d3Jvbmc"), "{}", answer.body);
        let head = send(&app, request("HEAD", "/", sent)).await;
        assert_eq!((head.headers, head.body.as_str()), (answer.headers, ""));
        assert_eq!(store.buckets(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_closure_that_finds_no_identity_is_401_with_a_challenge() {
    let by_closure = Limit::new("a", Quota::per_second(1)).key_by(|_: &Parts| None);
    let answer = get_root(&app(layer(by_closure))).await;
    assert_eq!((answer.status, answer.field("www-authenticate").is_some()), (401, true));
}

/// RFC 9110, section 15.5.2: a 401 has a challenge, whoever makes the response.
#[tokio::test(start_paused = true)]
async fn a_response_of_ones_own_has_the_challenge_that_it_leaves_out() {
    let by_key = || Limit::new("a", Quota::per_second(1)).key_by(ApiKey::verified("x-api-key", |_| false));
    for (own, challenge) in [(None, Some("ApiKey header=\"x-api-key\"")), (Some("Basic"), Some("Basic"))] {
        let response = move |rejection: &Rejection| {
            let response = Response::builder().status(rejection.status());
            let response = own.into_iter().fold(response, |response, own| response.header("www-authenticate", own));
            response.body(Body::empty()).unwrap()
        };
        let app = Router::new().route("/", any(ok)).layer(layer(by_key()).rejection(response));
        let answer = get_root(&app).await;
        assert_eq!((answer.status, answer.field("www-authenticate")), (401, challenge));
    }
    let as_200 = |_: &Rejection| Response::new(Body::empty());
    let app = Router::new().route("/", any(ok)).layer(layer(by_key()).rejection(as_200));
    let answer = get_root(&app).await;
    assert_eq!((answer.status, answer.field("www-authenticate")), (200, None));
}

#[tokio::test(start_paused = true)]
async fn without_a_peer_address_the_answer_is_503_and_one_line_says_what_to_call() {
    // tower_governor: 500 for every request without ConnectInfo.
    let (log, _guard) = Log::capture();
    let by_address = || Limit::new("a", Quota::per_second(1));
    let by_default = layer(by_address());
    let apps = [
        app(by_default.clone()),
        app(by_default.clone().headers(HeaderStyle::Off)),
        app(by_default.and(Limit::new("b", Quota::per_second(1)).key_by(ClientIp::peer().ipv6_prefix(56)))),
    ];
    for app in apps.iter().cycle().take(9) {
        let answer = get_root(app).await;
        assert_eq!((answer.status, answer.source()), (503, Source::Layer));
        let problem = answer.json();
        assert_eq!((&problem["status"], &problem["type"]), (&json!(503), &json!("about:blank")));
        assert!(answer.field("www-authenticate").is_none());
    }
    let lines = log.lines();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    assert!(lines[0].contains("ERROR") && lines[0].contains("into_make_service_with_connect_info"), "{}", lines[0]);
    // An API key that is missing as well does not make it the client's fault.
    let either = by_address().key_by(ApiKey::verified("x-api-key", |_| true).or(ClientIp::peer()));
    let either = app(layer(either));
    assert_eq!(get_root(&either).await.status, 503);
    assert_eq!(send(&either, request("GET", "/", "x-api-key: k")).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_fallback_serves_requests_without_a_peer_address() {
    // Unix sockets have none.
    let (log, _guard) = Log::capture();
    let app = app(layer(Limit::new("a", Quota::per_minute(1)).key_by(ClientIp::peer().or(Global))));
    assert_eq!((get_root(&app).await.status, get_root(&app).await.status), (200, 429));
    assert!(log.lines().iter().all(|line| !line.contains("ERROR")), "{:#?}", log.lines());
}

// Rule 6: too dear.

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_capacity_has_an_answer_of_its_own() {
    // redis_rate, redisson#1524, bucket4j#220: a finite wait for ever.
    let limits = layer(limit("small", Quota::per_second(5)).cost(cost_of_header))
        .and(limit("large", Quota::per_second(50)).cost(cost_of_header))
        .and(limit("smaller", Quota::per_second(4)).cost(cost_of_header));
    let app = app(limits);
    let answer = send(&app, request("GET", "/", "cost: 6")).await;
    assert_eq!((answer.status, answer.source()), (429, Source::Layer));
    assert_eq!((answer.field("retry-after"), answer.field("ratelimit")), (None, None));
    assert_eq!(answer.field("cache-control"), Some("no-store"));
    let problem = answer.json();
    assert_eq!((&problem["type"], &problem["status"]), (&json!(QUOTA_EXCEEDED), &json!(429)));
    assert_eq!(answer.violated(), ["small", "smaller"]);
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains('6') && detail.contains('5') && detail.contains("small"), "{detail}");
    let decision = answer.decision.unwrap();
    assert_eq!((decision.is_allowed(), decision.retry_after(), decision.remaining()), (false, None, None));
    // Nothing was taken.
    assert_eq!(send(&app, request("GET", "/", "cost: 4")).await.status, 200);
    let head = send(&app, request("HEAD", "/", "cost: 6")).await;
    assert_eq!((head.status, head.body.as_str(), head.field("retry-after")), (429, "", None));
    for style in [HeaderStyle::Legacy, HeaderStyle::Off] {
        let app = self::app(layer(limit("a", Quota::per_second(5)).cost(|_: &Parts| u64::MAX)).headers(style));
        let answer = get_root(&app).await;
        assert_eq!((answer.status, answer.field("retry-after")), (429, None));
        assert!(answer.headers.keys().all(|name| !name.as_str().contains("ratelimit")), "{style:?}");
    }
}

// 5. The store's failure.

#[tokio::test(start_paused = true)]
async fn a_failed_store_under_deny_is_503_with_a_time_to_come_back() {
    for store in [Fragile::broken(), Fragile::silent()] {
        let deny = TokenBucketLayer::new(store, limit("a", Quota::per_second(1)));
        let deny = deny.on_store_failure(OnStoreFailure::Deny).deadline(Duration::from_millis(5));
        let app = app(deny);
        let answer = get_root(&app).await;
        assert_eq!((answer.status, answer.source()), (503, Source::Policy));
        let wait: u64 = answer.field("retry-after").unwrap().parse().unwrap();
        assert!(wait >= 1);
        assert_eq!(answer.field("cache-control"), Some("no-store"));
        let problem = answer.json();
        assert_eq!((&problem["type"], &problem["status"]), (&json!(REDUCED_CAPACITY), &json!(503)));
        assert!(problem.get("violated-policies").is_none());
        // Nothing of the store's own error reaches a client.
        assert!(!answer.body.contains("connection refused"), "{}", answer.body);
        let head = send(&app, request("HEAD", "/", "")).await;
        assert_eq!((head.headers, head.body.as_str()), (answer.headers, ""));
    }
}

// 6. gRPC.

#[tokio::test(start_paused = true)]
async fn grpc_is_refused_with_http_200_and_trailers_only() {
    let per_minute = || limit("a", Quota::from_parts(3, 3, Duration::from_secs(1))).cost(cost_of_header);
    let by_key = per_minute().key_by(ApiKey::verified("x-api-key", |_| false));
    let by_address = per_minute().key_by(ClientIp::peer());
    let broken = || TokenBucketLayer::new(Fragile::broken(), per_minute()).on_store_failure(OnStoreFailure::Deny);
    let drained = app(layer(per_minute()));
    assert_eq!(send(&drained, request("GET", "/", "cost: 3")).await.status, 200);
    let cases: [(Router, u64, &str, Option<&str>); 5] = [
        // 333.334 ms, rounded up.
        (drained, 1, "8", Some("334")),
        (app(layer(per_minute())), 4, "8", Some("-1")),
        (app(layer(by_key)), 1, "16", None),
        (app(layer(by_address)), 1, "14", None),
        (app(broken()), 1, "14", Some("1000")),
    ];
    for (app, cost, status, pushback) in cases {
        for kind in ["application/grpc", "application/grpc+proto", "application/grpc-web", "application/grpc-web-text"]
        {
            let headers = format!("content-type: {kind}\ncost: {cost}");
            let answer = send(&app, request("POST", "/", &headers)).await;
            assert_eq!((answer.status, answer.body.as_str()), (200, ""), "{status} {kind}");
            assert_eq!(answer.field("content-type"), Some(kind));
            assert_eq!(answer.field("grpc-status"), Some(status));
            assert_eq!(answer.field("grpc-retry-pushback-ms"), pushback, "{status}");
            assert!(answer.field("grpc-message").is_some_and(|text| !text.is_empty() && !text.contains('%')));
            assert!(answer.field("content-length").is_none_or(|length| length == "0"));
            assert!(answer.decision.is_some_and(|decision| !decision.is_allowed()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_grpc_is_not_answered_as_grpc() {
    let (app, _) = drained(layer(limit("a", Quota::per_minute(1)))).await;
    for kind in ["application/json", "application/x-grpc", "text/plain; application/grpc", ""] {
        let answer = send(&app, request("POST", "/", &format!("content-type: {kind}"))).await;
        assert_eq!((answer.status, answer.field("grpc-status")), (429, None), "{kind}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_content_type_is_grpc_in_any_case() {
    // RFC 9110, section 8.3.1: the type is case-insensitive.
    let (app, _) = drained(layer(limit("a", Quota::per_minute(1)))).await;
    let answer = send(&app, request("POST", "/", "content-type: Application/gRPC+proto")).await;
    assert_eq!((answer.status, answer.field("grpc-status")), (200, Some("8")));
}

#[tokio::test(start_paused = true)]
async fn the_empty_response_and_responses_of_ones_own_say_so_in_grpc_as_well() {
    let kind = "content-type: application/grpc";
    let with_empty = Router::new().route("/", any(ok)).layer(layer(limit("a", Quota::per_minute(1))).rejection(Empty));
    let (app, _) = drained_router(with_empty).await;
    let answer = send(&app, request("POST", "/", kind)).await;
    assert_eq!((answer.status, answer.field("grpc-status")), (200, Some("8")));
    assert_eq!(answer.field("grpc-retry-pushback-ms"), Some("60000"));
    let own = |rejection: &Rejection| -> Response<Body> {
        let response = Response::builder().header("grpc-status", if rejection.is_grpc() { "14" } else { "none" });
        response.status(if rejection.is_grpc() { 200 } else { 429 }).body(Body::empty()).unwrap()
    };
    let with_own = Router::new().route("/", any(ok)).layer(layer(limit("a", Quota::per_minute(1))).rejection(own));
    let (app, _) = drained_router(with_own).await;
    let answer = send(&app, request("POST", "/", kind)).await;
    assert_eq!((answer.field("grpc-status"), answer.field("grpc-retry-pushback-ms")), (Some("14"), Some("60000")));
}

// 7. CORS.

const PREFLIGHT: &str = "origin: https://a.example\naccess-control-request-method: GET";

#[tokio::test(start_paused = true)]
async fn a_preflight_costs_nothing_unless_the_table_names_options() {
    // tower-governor#8, Bamboo-agent#169: the preflight is charged.
    let tables = [
        (CostTable::new(1), 0),
        (CostTable::new(1).route("* /", 2), 0),
        (CostTable::new(1).route("GET /", 2), 0),
        (CostTable::new(1).route("* /", 2).route("OPTIONS /", 3), 3),
        (CostTable::new(1).exempt("OPTIONS /"), 0),
    ];
    for (table, cost) in tables {
        // It needs no key where it costs nothing.
        let by_key =
            Limit::new("a", Quota::per_day(100)).key_by(ApiKey::verified("x-api-key", |_| true)).cost(table.clone());
        let app = app(layer(by_key));
        let with_key = format!("{PREFLIGHT}\nx-api-key: k");
        assert_eq!(cost_of(&app, request("OPTIONS", "/", &with_key)).await, Some(cost), "{table:?}");
        let without = send(&app, request("OPTIONS", "/", PREFLIGHT)).await;
        assert_eq!(without.status, if cost == 0 { 200 } else { 401 }, "{table:?}");
        if cost == 0 {
            assert_eq!(without.source(), Source::Exempt);
        }
    }
    let closure = app(layer(limit("a", Quota::per_day(9)).cost(|_: &Parts| 5)));
    assert_eq!(cost_of(&closure, request("OPTIONS", "/", PREFLIGHT)).await, Some(0));
}

/// Behind a router the template is matched as the operator has written it: an entry with parameters covers those that are
/// more specific, and a path that a client writes plays no part in it.
#[tokio::test(start_paused = true)]
async fn an_entry_covers_the_templates_of_a_router_that_have_none_of_their_own() {
    let table = CostTable::new(1)
        .route("POST /{*path}", 2)
        .route("* /admin/{*rest}", 5)
        .route("GET /admin/users/{name}", 6)
        .route("GET /orders/7", 9)
        .route("OPTIONS /{*path}", 3)
        .exempt("GET /static/{*file}");
    let routes = ["/orders", "/orders/{id}", "/admin/users/{id}", "/admin/reports", "/static/{name}"];
    let router = routes.into_iter().fold(Router::new(), |router, route| router.route(route, any(ok)));
    let nested = Router::new().nest("/admin", Router::new().route("/keys", any(ok)));
    let app = router.merge(nested).layer(layer(limit("a", Quota::per_day(100)).cost(table)));
    let cases = [
        ("POST", "/orders", Some(2)),
        ("GET", "/orders", Some(1)),
        // The entry is for one path of the route's.
        ("GET", "/orders/7", Some(1)),
        ("GET", "/admin/users/3", Some(6)),
        ("HEAD", "/admin/users/3", Some(6)),
        ("DELETE", "/admin/users/3", Some(5)),
        ("POST", "/admin/reports", Some(5)),
        ("GET", "/admin/keys", Some(5)),
        ("GET", "/static/a.css", Some(0)),
        ("GET", "/nowhere", Some(1)),
        ("POST", "/nowhere", Some(2)),
    ];
    check_costs(&app, &cases).await;
    // Handlers of `any` ignore the method, so that a preflight is a call like any other.
    for path in ["/orders", "/orders/7", "/nowhere"] {
        assert_eq!(cost_of(&app, request("OPTIONS", path, PREFLIGHT)).await, Some(3), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_number_is_a_cost() {
    let app = app(layer(limit("a", Quota::per_day(9)).cost(5)));
    assert_eq!(cost_of(&app, request("GET", "/", "")).await, Some(5));
    let build = || Limit::try_new("a", Quota::per_day(9)).unwrap().try_cost(10);
    assert!(build().unwrap_err().to_string().contains("every request"), "{}", build().unwrap_err());
}

#[tokio::test(start_paused = true)]
async fn options_that_are_no_preflight_pay() {
    let app = app(layer(limit("a", Quota::per_day(100)).cost(CostTable::new(1).route("* /", 2))));
    assert_eq!(cost_of(&app, request("OPTIONS", "/", "origin: https://a.example")).await, Some(2));
    // Nor is any other method a preflight, whatever it says.
    assert_eq!(cost_of(&app, request("GET", "/", PREFLIGHT)).await, Some(2));
    assert_eq!(cost_of(&app, request("OPTIONS", "/nope", "")).await, Some(1));
}

#[tokio::test(start_paused = true)]
async fn behind_a_cors_layer_a_refusal_has_its_fields_and_exposes_ours() {
    let (app, _) = drained(layer(limit("a", Quota::per_minute(1)))).await;
    let app = app.layer(CorsLayer::new().allow_origin(Any).expose_headers(EXPOSE_HEADERS));
    let denied = send(&app, request("GET", "/", "origin: https://a.example")).await;
    assert_eq!((denied.status, denied.field("access-control-allow-origin")), (429, Some("*")));
    let exposed = denied.field("access-control-expose-headers").unwrap();
    for name in denied.headers.keys().filter(|name| name.as_str().starts_with("ratelimit") || *name == "retry-after") {
        assert!(exposed.split(',').any(|exposed| exposed == name), "{name}: {exposed}");
    }
    assert_eq!(denied.headers.keys().filter(|name| exposed.contains(name.as_str())).count(), 3);
    // The preflight is answered outside, and the other way round it passes through.
    assert_eq!(send(&app, request("OPTIONS", "/", PREFLIGHT)).await.status, 200);
    let inside = Router::new().route("/", get(ok)).layer(CorsLayer::permissive());
    let app = inside.layer(layer(limit("a", Quota::per_minute(1))));
    for _ in 0..3 {
        let preflight = send(&app, request("OPTIONS", "/", PREFLIGHT)).await;
        assert_eq!((preflight.status, preflight.source()), (200, Source::Exempt));
        assert!(preflight.field("access-control-allow-origin").is_some());
    }
    assert_eq!(get_root(&app).await.status, 200);
}

// Costs by route, in every position of the layer (ecosystem.md, section 2.2).

/// Tokens that the request took by its decision; `None` where the layer did not run.
async fn cost_of<S>(service: &S, request: Request<Body>) -> Option<u64>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let decision = send(service, request).await.decision?;
    Some(decision.outcomes().first().map_or(0, |outcome| outcome.cost()))
}

async fn check_costs<S>(service: &S, cases: &[(&str, &str, Option<u64>)])
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    for (method, path, cost) in cases {
        assert_eq!(cost_of(service, request(method, path, "")).await, *cost, "{method} {path}");
    }
}

/// By other names of parameters than the routers below have.
fn table() -> CostTable {
    CostTable::new(1)
        .route("GET /users/{id}", 2)
        .route("POST /users/{user}", 3)
        .route("* /files/{*path}", 4)
        .route("GET /api/users/{id}", 5)
        .route("POST /api/{version}/{tenant}/users/{id}", 6)
        .route("/any/{x}/thing", 7)
        .exempt("GET /health")
}

fn by_route() -> TokenBucketLayer<MemoryStore> {
    layer(limit("a", Quota::per_day(20_000)).cost(table()))
}

fn routes() -> Router {
    Router::new()
        .route("/users/{uid}", get(ok).post(ok))
        .route("/files/{*rest}", any(ok))
        .route("/any/{y}/thing", any(ok))
        .route("/health", get(ok))
        .route("/other/{uid}", get(ok))
}

/// Costs where the layer sees every request under its full path.
const EVERYWHERE: [(&str, &str, Option<u64>); 20] = [
    ("GET", "/users/7", Some(2)),
    ("GET", "/users/7?id=8", Some(2)),
    ("GET", "/users/%2F", Some(2)),
    ("HEAD", "/users/7", Some(2)),
    ("POST", "/users/7", Some(3)),
    // 405.
    ("PUT", "/users/7", Some(1)),
    ("OPTIONS", "/users/7", Some(1)),
    ("GET", "/files/a/b", Some(4)),
    ("DELETE", "/files/a", Some(4)),
    ("PROPFIND", "/any/1/thing", Some(7)),
    ("GET", "/health", Some(0)),
    ("HEAD", "/health", Some(0)),
    ("GET", "/other/1", Some(1)),
    // 405.
    ("POST", "/health", Some(1)),
    // 404.
    ("GET", "/", Some(1)),
    ("GET", "/nope", Some(1)),
    ("GET", "/health/", Some(1)),
    ("GET", "//health", Some(1)),
    // 404 here, and what a lenient server takes for a user.
    ("GET", "/users/7/", Some(2)),
    ("GET", "/Users/7", Some(2)),
];

/// The same, where the layer is not run for what no route matches.
fn without_404() -> Vec<(&'static str, &'static str, Option<u64>)> {
    let mut cases = EVERYWHERE.to_vec();
    for (_, path, cost) in &mut cases {
        if ["/", "/nope", "/health/", "//health", "/users/7/", "/Users/7"].contains(path) {
            *cost = None;
        }
    }
    cases
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_by_a_layer_on_the_router() {
    check_costs(&routes().layer(by_route()), &EVERYWHERE).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_by_a_route_layer_which_does_not_run_for_404s() {
    check_costs(&routes().route_layer(by_route()), &without_404()).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_by_a_layer_around_the_whole_router() {
    check_costs(&by_route().layer(routes()), &EVERYWHERE).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_by_a_layer_on_a_single_route() {
    let cases = [
        ("GET", "/users/7", Some(2)),
        ("HEAD", "/users/7", Some(2)),
        ("POST", "/users/7", Some(3)),
        ("GET", "/files/a", None),
        ("GET", "/nope", None),
    ];
    let app = Router::new().route("/users/{uid}", get(ok).post(ok).layer(by_route())).route("/files/{*rest}", any(ok));
    check_costs(&app, &cases).await;
    check_costs(&app, &[("PUT", "/users/7", Some(1))]).await;
    let app = Router::new().route("/users/{uid}", get(ok).post(ok).route_layer(by_route()));
    check_costs(&app, &cases).await;
    check_costs(&app, &[("PUT", "/users/7", None)]).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_inside_a_nest_by_the_full_path() {
    let users = || Router::new().route("/users/{uid}", get(ok).post(ok));
    let app = Router::new().nest("/api", users().layer(by_route()));
    check_costs(
        &app,
        &[
            ("GET", "/api/users/7", Some(5)),
            ("HEAD", "/api/users/7", Some(5)),
            ("POST", "/api/users/7", Some(1)),
            ("PUT", "/api/users/7", Some(1)),
            ("GET", "/api/nope", None),
            ("GET", "/users/7", None),
        ],
    )
    .await;
    let tenants = || Router::new().nest("/{tenant}", users());
    for app in [
        Router::new().nest("/api/{v}", Router::new().nest("/{tenant}", users().layer(by_route()))),
        Router::new().nest("/api/{v}", tenants().layer(by_route())),
        Router::new().nest("/api/{v}", tenants()).layer(by_route()),
    ] {
        check_costs(&app, &[("POST", "/api/1/t/users/7", Some(6)), ("GET", "/api/1/t/users/7", Some(1))]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_outside_a_nest() {
    let users = || Router::new().route("/users/{uid}", get(ok).post(ok));
    let cases = [
        ("GET", "/api/users/7", Some(5)),
        ("HEAD", "/api/users/7", Some(5)),
        ("POST", "/api/users/7", Some(1)),
        ("GET", "/api/nope", Some(1)),
        ("GET", "/nope", Some(1)),
        // A path that only looks like the nested one.
        ("GET", "/users/7", Some(2)),
    ];
    check_costs(&Router::new().nest("/api", users()).layer(by_route()), &cases).await;
    check_costs(&Router::new().nest_service("/api", users()).layer(by_route()), &cases).await;
    check_costs(&by_route().layer(Router::new().nest("/api", users())), &cases).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_inside_a_nested_service_and_its_fallback() {
    let users = Router::new().route("/users/{uid}", get(ok).post(ok)).fallback(ok);
    let app = Router::new().nest_service("/api", users.layer(by_route()));
    check_costs(
        &app,
        &[
            ("GET", "/api/users/7", Some(5)),
            ("POST", "/api/users/7", Some(1)),
            // The fallback sees a path without its prefix; the full one counts.
            ("GET", "/api/health", Some(1)),
            ("GET", "/api/files/a", Some(1)),
            ("GET", "/health", None),
        ],
    )
    .await;
    // A service that is no router, where only the original path tells.
    let inner = by_route().layer(service_fn(|_| ready(Ok::<_, Infallible>(Response::new(Body::empty())))));
    let app = Router::new().nest_service("/api", inner);
    check_costs(&app, &[("GET", "/api/users/7", Some(5)), ("GET", "/api/health", Some(1))]).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_in_the_fallback_of_a_nested_router() {
    let users = || Router::new().route("/users/{uid}", get(ok)).fallback(ok);
    for app in
        [Router::new().nest("/api", users().layer(by_route())), Router::new().nest("/api", users()).layer(by_route())]
    {
        // The path without its prefix would be free, or cost 4.
        check_costs(&app, &[("GET", "/api/health", Some(1)), ("GET", "/api/files/a", Some(1))]).await;
    }
    let app = Router::new().nest("/api", users().layer(by_route()));
    check_costs(&app, &[("GET", "/api/users/7", Some(5)), ("GET", "/health", None)]).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_in_a_fallback() {
    let app = Router::new().route("/health", get(ok)).fallback_service(routes());
    check_costs(&app.layer(by_route()), &EVERYWHERE).await;
    let app = Router::new().route("/users/{uid}", get(ok)).fallback_service(routes().layer(by_route()));
    check_costs(&app, &[("GET", "/users/7", None), ("GET", "/files/a", Some(4)), ("GET", "/nope", Some(1))]).await;
    let app = Router::new().fallback(ok).layer(by_route());
    check_costs(&app, &[("GET", "/users/7", Some(2)), ("GET", "/nope", Some(1))]).await;
}

#[tokio::test(start_paused = true)]
async fn costs_are_found_in_the_merged_half_that_has_the_layer() {
    let half = Router::new().route("/users/{uid}", get(ok)).layer(by_route());
    let other = Router::new().route("/files/{*rest}", any(ok));
    // A 404 of the whole belongs to the half that was merged last.
    let cases = |not_found| [("GET", "/users/7", Some(2)), ("GET", "/files/a", None), ("GET", "/nope", not_found)];
    check_costs(&half.clone().merge(other.clone()), &cases(None)).await;
    check_costs(&other.clone().merge(half), &cases(Some(1))).await;
    let both = Router::new().route("/users/{uid}", get(ok)).merge(other).layer(by_route());
    check_costs(&both, &[("GET", "/users/7", Some(2)), ("GET", "/files/a", Some(4))]).await;
}

#[tokio::test(start_paused = true)]
async fn routes_that_are_added_after_the_layer_are_not_limited() {
    let app = Router::new().route("/users/{uid}", get(ok)).layer(by_route()).route("/files/{*rest}", any(ok));
    check_costs(&app, &[("GET", "/users/7", Some(2)), ("GET", "/files/a", None)]).await;
}

#[tokio::test(start_paused = true)]
async fn behind_a_router_nothing_in_a_path_can_choose_another_cost() {
    // All of these are matched by the wildcard, and cost what it costs.
    let proxy = Router::new().route("/{*rest}", any(ok)).layer(by_route());
    for path in ["/health", "/users/7", "/x", "/files/a", "/api/users/1"] {
        assert_eq!(cost_of(&proxy, request("GET", path, "")).await, Some(1), "{path}");
    }
    let named =
        layer(limit("a", Quota::per_day(100)).cost(CostTable::new(1).route("/{*all}", 9).exempt("GET /health")));
    let proxy = Router::new().route("/{*rest}", any(ok)).layer(named);
    assert_eq!(cost_of(&proxy, request("GET", "/health", "")).await, Some(9));
    // Escapes are not undone: the router does not either.
    for service in [routes().layer(by_route())] {
        for path in ["/%68ealth", "/health%2F", "/users/7/../../health", "/./health", "/health;x"] {
            assert_eq!(cost_of(&service, request("GET", path, "")).await, Some(1), "{path}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn around_the_router_no_spelling_of_a_path_is_cheaper_than_its_plain_form() {
    let app = by_route().layer(routes());
    for path in
        ["/API/users/7", "/api//users/7", "/api/users/7/", "/%61pi/users/7", "/api;x=y/users/7", "//api/users/7"]
    {
        assert_eq!(cost_of(&app, request("GET", path, "")).await, Some(5), "{path}");
    }
    // What is free is free in its plain form only.
    for path in ["/HEALTH", "/health/", "//health", "/%68ealth", "/health;x"] {
        assert_eq!(cost_of(&app, request("GET", path, "")).await, Some(1), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn around_the_router_a_capital_in_a_parameter_does_not_make_a_request_dearer() {
    // However lenient a server is, none takes `/users/ABC` for the catch-all, since `/users/{id}` is more specific.
    let table = CostTable::new(1).route("/{*all}", 9).route("GET /users/{id}", 2).route("GET /files/{*path}", 3);
    let routes = Router::new().route("/users/{id}", get(ok)).route("/files/{*path}", get(ok)).route("/{*all}", any(ok));
    let limits = || layer(limit("a", Quota::per_day(1000)).cost(table.clone()));
    let cases = [
        ("GET", "/users/abc", Some(2)),
        ("GET", "/users/ABC", Some(2)),
        ("GET", "/users/6F9619FF-8B86-D011-B42D-00C04FC964FF", Some(2)),
        ("GET", "/users/a%20b", Some(2)),
        ("GET", "/files/README", Some(3)),
        ("GET", "/other/README", Some(9)),
    ];
    check_costs(&routes.clone().layer(limits()), &cases).await;
    check_costs(&limits().layer(routes), &cases).await;
}

#[tokio::test(start_paused = true)]
async fn the_default_cost_can_be_nothing_or_more_and_tables_differ_by_limit() {
    let per_route = limit("route", Quota::per_day(50)).cost(CostTable::new(0).route("GET /users/{id}", 7));
    let per_call = limit("call", Quota::per_day(50)).cost(CostTable::new(2).exempt("GET /health"));
    let app = routes().layer(layer(per_route).and(per_call));
    for (path, costs) in [
        ("/users/1", vec![("route", 7), ("call", 2)]),
        ("/other/1", vec![("call", 2)]),
        ("/nope", vec![("call", 2)]),
        ("/health", vec![]),
    ] {
        let answer = send(&app, request("GET", path, "")).await;
        let decision = answer.decision.as_ref().unwrap();
        let seen: Vec<_> = decision.outcomes().iter().map(|outcome| (outcome.limit(), outcome.cost())).collect();
        assert_eq!(seen, costs, "{path}");
        // A limit of cost 0 has no item.
        let items = answer.field("ratelimit").map_or(0, |list| list.split(", ").count());
        assert_eq!(items, costs.len(), "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_cost_of_nothing_needs_no_key_and_no_peer() {
    let by_key = Limit::new("a", Quota::per_day(50)).key_by(ApiKey::verified("x-api-key", |_| false)).cost(table());
    let by_address = Limit::new("b", Quota::per_day(50)).cost(table());
    let app = routes().layer(layer(by_key).and(by_address));
    let answer = send(&app, request("GET", "/health", "")).await;
    assert_eq!((answer.status, answer.source()), (200, Source::Exempt));
    assert!(answer.headers.keys().all(|name| !name.as_str().starts_with("ratelimit")));
    assert_eq!(send(&app, request("GET", "/users/1", "")).await.status, 401);
}

// Keys.

fn name_of(key: &impl KeyExtractor, parts: &Parts) -> Option<String> {
    key.extract(parts).ok().map(|key| key.to_string())
}

#[test]
fn a_credential_is_known_by_a_hash_of_fixed_length() {
    // discourse#14682, n8n#24636: raw keys and unbounded text in Redis.
    let any = ApiKey::unverified("x-api-key");
    let mut names = Vec::new();
    for key in ["a", "alpha", "Alpha", "{x}", "a b", &"k".repeat(512)] {
        let name = name_of(&any, &parts(&format!("x-api-key: {key}"))).unwrap();
        let hex = name.strip_prefix("key:").unwrap();
        assert!(hex.len() == 32 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')), "{name}");
        assert_eq!(name, BucketKey::credential(key).to_string());
        assert!(!names.contains(&name));
        names.push(name);
    }
    assert_ne!(BucketKey::credential("a"), BucketKey::id("a"));
    assert_eq!(BucketKey::id("a").to_string().len(), "id:".len() + 32);
    assert_eq!(BucketKey::global().to_string(), "global");
}

#[test]
fn only_a_header_that_is_there_once_and_can_be_read_is_a_credential() {
    let (any, verified) = (ApiKey::unverified("X-Api-Key"), ApiKey::verified("x-api-key", |_| true));
    let long = "k".repeat(513);
    for headers in ["", "x-api-key: ", "x-api-key:   ", "x-api-key: a\nx-api-key: a", "x-api-key: a\nX-API-Key: b"] {
        for key in [&any, &verified] {
            let none = NoKey::Credential("x-api-key".parse().unwrap());
            assert_eq!(key.extract(&parts(headers)), Err(none), "{headers:?}");
        }
    }
    for key in [&any, &verified] {
        assert_eq!(name_of(key, &parts(&format!("x-api-key: {long}"))), None);
        assert!(name_of(key, &parts(&format!("x-api-key: {}", &long[1..]))).is_some());
        for bytes in [&b"k\xc3\xa9y"[..], b"\xff", b"a\tb"] {
            let mut parts = parts("");
            parts.headers.insert("x-api-key", http::HeaderValue::from_bytes(bytes).unwrap());
            assert_eq!(name_of(key, &parts), None, "{bytes:?}");
        }
    }
}

#[test]
fn only_verified_keys_count_and_the_predicate_sees_what_was_sent() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sent = Arc::clone(&seen);
    let key = ApiKey::verified("authorization", move |key| {
        sent.lock().unwrap().push(key.to_owned());
        key == "alpha"
    });
    let alpha = Some(BucketKey::credential("alpha").to_string());
    for (line, expected) in [
        ("Bearer alpha", &alpha),
        ("bearer alpha", &alpha),
        ("BEARER    alpha", &alpha),
        ("Bearer alpha  ", &alpha),
        ("Bearer ALPHA", &None),
        ("Bearer beta", &None),
        ("Bearer alpha beta", &None),
        ("alpha", &None),
        ("Bearer", &None),
        ("Bearer ", &None),
        ("Bearer  ", &None),
        ("Basic alpha", &None),
        ("Bearerx alpha", &None),
        ("Bearer=alpha", &None),
    ] {
        assert_eq!(&name_of(&key, &parts(&format!("authorization: {line}"))), expected, "{line:?}");
    }
    assert_eq!(*seen.lock().unwrap(), ["alpha", "alpha", "alpha", "alpha", "ALPHA", "beta", "alpha beta"]);
}

#[tokio::test(start_paused = true)]
async fn made_up_keys_and_spellings_buy_no_bucket() {
    // CubeSandbox#1379, litellm-rs#408, hyperdx#2775.
    let store = MemoryStore::new();
    let either = ApiKey::verified("x-api-key", |key| key == "alpha").or(ClientIp::peer());
    let limit = Limit::new("a", Quota::per_day(10)).key_by(either);
    let app = app(TokenBucketLayer::new(store.clone(), limit)).layer(MockConnectInfo(peer("203.0.113.9:1")));
    let mut admitted = 0;
    for i in 0..1000 {
        let key = match i % 4 {
            0 => "x-api-key: Alpha\nx-forwarded-for: 10.0.0.1".to_owned(),
            1 => format!("x-api-key: alpha\nx-api-key: alpha\nx-forwarded-for: 10.0.0.{}", i % 256),
            _ => format!("x-api-key: {i}"),
        };
        admitted += usize::from(send(&app, request("GET", "/", &key)).await.status == 200);
    }
    assert_eq!((admitted, store.buckets()), (10, 1));
    // The real one has its own, however it is written around.
    for headers in ["x-api-key: alpha", "x-api-key:  alpha  ", "X-API-KEY: alpha"] {
        assert_eq!(send(&app, request("GET", "/", headers)).await.status, 200);
    }
    assert_eq!(store.buckets(), 2);
}

fn peer(address: &str) -> SocketAddr {
    address.parse().unwrap()
}

#[test]
fn the_peer_is_read_from_axum_or_from_a_plain_address() {
    let by_peer = ClientIp::peer();
    for (address, name) in [
        ("203.0.113.9:1234", "ip:203.0.113.9"),
        // CVE-2026-30827, GHSA-5847-rm3g-23mw: mapped addresses in one bucket, or in a second one.
        ("[::ffff:203.0.113.9]:1", "ip:203.0.113.9"),
        // actix-governor#47, CVE-2021-22915: one client has a whole /64.
        ("[2001:db8::1]:1", "ip:2001:db8::/64"),
        ("[2001:db8:0:0:ffff:ffff:ffff:ffff]:9", "ip:2001:db8::/64"),
        ("[2001:db8:0:1::1]:1", "ip:2001:db8:0:1::/64"),
        // Compatible, by the same bits.
        ("[::203.0.113.9]:1", "ip:203.0.113.9"),
        ("[::1]:1", "ip:::/64"),
    ] {
        let mut from_axum = parts("");
        from_axum.extensions.insert(ConnectInfo(peer(address)));
        let mut mocked = parts("");
        mocked.extensions.insert(MockConnectInfo(peer(address)));
        let mut plain = parts("x-forwarded-for: 198.51.100.1");
        plain.extensions.insert(peer(address));
        for parts in [from_axum, mocked, plain] {
            assert_eq!(name_of(&by_peer, &parts).as_deref(), Some(name), "{address}");
        }
    }
    let mut both = parts("");
    both.extensions.insert(peer("203.0.113.1:1"));
    both.extensions.insert(MockConnectInfo(peer("203.0.113.2:1")));
    both.extensions.insert(ConnectInfo(peer("203.0.113.3:1")));
    assert_eq!(name_of(&by_peer, &both).as_deref(), Some("ip:203.0.113.3"), "axum's own comes first");
    assert_eq!(by_peer.extract(&parts("")), Err(NoKey::Peer));
}

#[test]
fn the_prefix_of_ipv6_addresses_can_be_set_and_does_not_touch_ipv4() {
    for (bits, address, name) in [
        (32, "[2001:db8:ffff::1]:1", "ip:2001:db8::/32"),
        (56, "[2001:db8:0:ff::1]:1", "ip:2001:db8::/56"),
        (128, "[2001:db8::1]:1", "ip:2001:db8::1/128"),
        (32, "203.0.113.9:1", "ip:203.0.113.9"),
        (32, "[::ffff:203.0.113.9]:1", "ip:203.0.113.9"),
    ] {
        let mut parts = parts("");
        parts.extensions.insert(peer(address));
        assert_eq!(name_of(&ClientIp::peer().ipv6_prefix(bits), &parts).as_deref(), Some(name));
    }
}

#[tokio::test(start_paused = true)]
async fn each_address_has_its_bucket_and_forwarded_headers_change_nothing() {
    // status-list-server#540, CVE-2020-35590; axum-governor: an untrusted header answered with 400.
    let store = MemoryStore::new();
    let shared = TokenBucketLayer::new(store.clone(), Limit::new("a", Quota::per_day(3)));
    let from = |address: &str| app(shared.clone()).layer(MockConnectInfo(peer(address)));
    for (i, forwarded) in [
        "x-forwarded-for: 1.2.3.4",
        "x-forwarded-for: \"unclosed, 1.2.3.4, [::",
        "forwarded: for=1.2.3.4\nx-real-ip: 1.2.3.4",
        "x-forwarded-for: 1.2.3.5",
    ]
    .into_iter()
    .enumerate()
    {
        let status = send(&from("203.0.113.9:1"), request("GET", "/", forwarded)).await.status;
        assert_eq!(status, if i < 3 { 200 } else { 429 }, "{forwarded}");
    }
    for address in ["203.0.113.9:2", "[::ffff:203.0.113.9]:3"] {
        assert_eq!(get_root(&from(address)).await.status, 429, "{address}");
    }
    for address in ["203.0.113.10:1", "[2001:db8::1]:1", "[2001:db8::2]:1"] {
        assert_eq!(get_root(&from(address)).await.status, 200, "{address}");
    }
    assert_eq!(store.buckets(), 3);
}

/// `ip:…` of a request from `from`, with these headers.
fn client(by: &ClientIp, from: &str, headers: &str) -> String {
    let mut parts = parts(headers);
    parts.extensions.insert(ConnectInfo(peer(from)));
    name_of(by, &parts).unwrap()
}

#[test]
fn behind_trusted_proxies_the_client_is_the_first_untrusted_hop_from_the_right() {
    // status-list-server#540, tower_governor, axum-governor: the leftmost element decides, ports and lines are skipped.
    let proxies = ["10.0.0.0/8", "2001:db8:f::/48", "127.0.0.1"];
    let list = ClientIp::forwarded("X-Forwarded-For").trusted_proxies(proxies);
    for (headers, expected) in [
        ("x-forwarded-for: 203.0.113.9", "ip:203.0.113.9"),
        ("x-forwarded-for: 1.1.1.1, 203.0.113.9, 10.2.3.4", "ip:203.0.113.9"),
        ("x-forwarded-for: 1.1.1.1\nx-forwarded-for: 203.0.113.9\nx-forwarded-for: 10.2.3.4", "ip:203.0.113.9"),
        ("x-forwarded-for: \"unclosed, 203.0.113.9:4711, 10.2.3.4", "ip:203.0.113.9"),
        ("x-forwarded-for: ::ffff:203.0.113.9, ::ffff:10.2.3.4", "ip:203.0.113.9"),
        ("x-forwarded-for: [2001:db8:1::1]:443, [2001:db8:f::2]:1", "ip:2001:db8:1::/64"),
        // Garbage stops the walk at the peer; so does a list of proxies only.
        ("x-forwarded-for: 1.1.1.1, unknown, 10.2.3.4", "ip:10.0.0.1"),
        ("x-forwarded-for: 1.1.1.1,", "ip:10.0.0.1"),
        ("x-forwarded-for: 10.9.9.9, 10.2.3.4", "ip:10.0.0.1"),
        ("", "ip:10.0.0.1"),
        ("x-real-ip: 1.1.1.1\nforwarded: for=1.1.1.1", "ip:10.0.0.1"),
    ] {
        for from in ["10.0.0.1:1", "[::ffff:10.0.0.1]:1"] {
            assert_eq!(client(&list, from, headers), expected, "{headers}");
        }
        // A peer that is not trusted has its header ignored.
        assert_eq!(client(&list, "198.51.100.1:1", headers), "ip:198.51.100.1", "{headers}");
    }
    let forwarded = ClientIp::forwarded("forwarded").trusted_proxies(proxies);
    for (headers, expected) in [
        ("forwarded: for=1.1.1.1, for=203.0.113.9;proto=https;by=10.2.3.4", "ip:203.0.113.9"),
        ("forwarded: For=\"[2001:db8:1::1]:4711\", for=10.2.3.4", "ip:2001:db8:1::/64"),
        ("forwarded: for=\"evil, for=203.0.113.9:80", "ip:203.0.113.9"),
        ("forwarded: for=1.1.1.1, for=_hidden", "ip:10.0.0.1"),
        ("forwarded: for=1.1.1.1, proto=https", "ip:10.0.0.1"),
    ] {
        assert_eq!(client(&forwarded, "10.0.0.1:1", headers), expected, "{headers}");
        assert_eq!(client(&forwarded, "198.51.100.1:1", headers), "ip:198.51.100.1", "{headers}");
    }
    let single = ClientIp::forwarded("x-real-ip").trusted_proxies(proxies).ipv6_prefix(48);
    for (headers, expected) in [
        ("x-real-ip: 203.0.113.9", "ip:203.0.113.9"),
        ("x-real-ip: 2001:db8:1:2::3", "ip:2001:db8:1::/48"),
        ("x-real-ip: 1.1.1.1\nx-real-ip: 2.2.2.2", "ip:10.0.0.1"),
        ("x-real-ip: 1.1.1.1, 2.2.2.2", "ip:10.0.0.1"),
    ] {
        assert_eq!(client(&single, "10.0.0.1:1", headers), expected, "{headers}");
    }
}

#[test]
fn with_a_number_of_hops_the_client_is_that_element_from_the_right() {
    let two = ClientIp::forwarded("x-forwarded-for").hops(2);
    for (headers, expected) in [
        ("x-forwarded-for: 1.1.1.1, 203.0.113.9, 192.0.2.1", "ip:203.0.113.9"),
        ("x-forwarded-for: 1.1.1.1\nx-forwarded-for: 203.0.113.9, 192.0.2.1", "ip:203.0.113.9"),
        ("x-forwarded-for: 192.0.2.1", "ip:198.51.100.1"),
        ("x-forwarded-for: unknown, 192.0.2.1", "ip:198.51.100.1"),
    ] {
        assert_eq!(client(&two, "198.51.100.1:1", headers), expected, "{headers}");
    }
}

#[tokio::test(start_paused = true)]
async fn behind_a_trusted_proxy_each_client_has_its_own_bucket() {
    // rari#117, PostHog#40341.
    let store = MemoryStore::new();
    let by = ClientIp::forwarded("x-forwarded-for").trusted_proxies(["10.0.0.0/8"]);
    let shared = TokenBucketLayer::new(store.clone(), Limit::new("a", Quota::per_day(1)).key_by(by));
    let app = app(shared).layer(MockConnectInfo(peer("10.0.0.1:1")));
    for (client, status) in
        [("203.0.113.1", 200), ("203.0.113.2", 200), ("203.0.113.1", 429), ("9.9.9.9, 203.0.113.1", 429)]
    {
        let answer = send(&app, request("GET", "/", &format!("x-forwarded-for: {client}"))).await;
        assert_eq!(answer.status, status, "{client}");
    }
    assert_eq!(store.buckets(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_identity_of_the_users_own_layer_is_found_in_the_extensions() {
    #[derive(Clone)]
    struct User(&'static str);
    let by = Identity::of(|user: &User| BucketKey::id(user.0));
    let users = app(layer(Limit::new("a", Quota::per_day(1)).key_by(by)));
    assert_eq!(get_root(&users).await.status, 401);
    // The layer of one's own is outside.
    for (user, status) in [("ada", 200), ("bob", 200), ("ada", 429)] {
        assert_eq!(get_root(&users.clone().layer(Extension(User(user)))).await.status, status, "{user}");
    }
}

#[tokio::test(start_paused = true)]
async fn closures_and_extractors_of_ones_own_find_keys_and_costs() {
    #[derive(Clone)]
    struct Tenant(&'static str);
    let tenant = |parts: &Parts| parts.extensions.get::<Tenant>().map(|tenant| BucketKey::id(tenant.0));
    struct Host;
    impl KeyExtractor for Host {
        fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
            parts.headers.get("host").map(BucketKey::id).ok_or(NoKey::Identity)
        }
    }
    let limit = Limit::new("a", Quota::per_day(2))
        .key_by(tenant.or(Host).or(Global))
        .cost(|parts: &Parts| parts.uri.query().map_or(1, |query| query.len() as u64));
    let app = app(layer(limit));
    let with_tenant = |path: &str, name| {
        let mut request = request("GET", path, "host: h");
        request.extensions_mut().insert(Tenant(name));
        request
    };
    for (request, status) in [
        (with_tenant("/?ab", "x"), 200),
        (with_tenant("/", "x"), 429),
        (with_tenant("/", "y"), 200),
        (with_tenant("/?abc", "y"), 429),
        (request("GET", "/", "host: h"), 200),
        (request("GET", "/?ab", "host: h"), 429),
        (request("GET", "/?ab", ""), 200),
        (request("GET", "/", ""), 429),
    ] {
        let path = request.uri().to_string();
        assert_eq!(send(&app, request).await.status, status, "{path}");
    }
}

#[tokio::test(start_paused = true)]
async fn plans_choose_the_quota_and_none_is_the_limits_own() {
    let plan = |parts: &Parts| match parts.headers.get("plan")?.to_str().ok()? {
        "pro" => Some(Quota::per_day(5)),
        "free" => Some(Quota::per_day(1)),
        _ => None,
    };
    let by_plan = Limit::new("plans", Quota::per_day(2)).key_by(ApiKey::unverified("x-api-key")).quota_by(plan);
    let app = app(layer(by_plan));
    for (plan, capacity) in [("pro", 5), ("free", 1), ("unknown", 2)] {
        let headers = format!("x-api-key: {plan}\nplan: {plan}");
        for i in 0..=capacity {
            let answer = send(&app, request("GET", "/", &headers)).await;
            assert_eq!(answer.status, if i < capacity { 200 } else { 429 }, "{plan} {i}");
            assert!(answer.field("ratelimit-policy").unwrap().starts_with(&format!("\"plans\";q={capacity};")));
        }
    }
    let without = send(&app, request("GET", "/", "x-api-key: other")).await;
    assert_eq!(without.field("ratelimit-policy"), Some("\"plans\";q=2;w=86400"));
}

#[tokio::test(start_paused = true)]
async fn each_closure_is_asked_once_a_request_and_no_store_hears_of_one_without_a_key() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let note = |what: &'static str| {
        let asked = Arc::clone(&asked);
        move || asked.lock().unwrap().push(what)
    };
    let (key, cost, quota) = (note("key"), note("cost"), note("quota"));
    let has_key = |parts: &Parts| parts.headers.contains_key("x-api-key");
    let first = Limit::new("a", Quota::per_day(1))
        .key_by(move |parts: &Parts| {
            key();
            has_key(parts).then(BucketKey::global)
        })
        .quota_by(move |_| {
            quota();
            None
        })
        .cost(move |_: &Parts| {
            cost();
            1
        });
    let store = Fragile::default();
    let app = app(TokenBucketLayer::new(store.clone(), limit("before", Quota::per_day(9))).and(first));
    for (headers, status, calls) in [("x-api-key: k", 200, 1), ("x-api-key: k", 429, 2), ("", 401, 2)] {
        assert_eq!(send(&app, request("GET", "/", headers)).await.status, status);
        let mut seen = std::mem::take(&mut *asked.lock().unwrap());
        seen.sort_unstable();
        // Without a key there is no plan to look up.
        assert_eq!(seen, if status == 401 { &["cost", "key"][..] } else { &["cost", "key", "quota"] });
        assert_eq!(store.calls(), calls);
    }
}

#[tokio::test(start_paused = true)]
async fn with_plans_a_cost_is_compared_with_the_quota_of_each_request() {
    // A table that no plan but the largest can pay is no error when plans are set first.
    let by_plan = Limit::new("plans", Quota::per_day(2))
        .key_by(Global)
        .quota_by(|parts| parts.headers.contains_key("pro").then_some(Quota::per_day(50)))
        .cost(CostTable::new(1).route("GET /", 10));
    let app = app(layer(by_plan));
    let small = send(&app, request("GET", "/", "")).await;
    assert_eq!((small.status, small.source(), small.field("retry-after")), (429, Source::Layer, None));
    assert_eq!(send(&app, request("GET", "/", "pro: 1")).await.status, 200);
}

// Several limits, and shadows.

#[tokio::test(start_paused = true)]
async fn several_limits_are_one_step_and_a_refusal_leaves_the_siblings_untouched() {
    // envoy ratelimit#427, linkerd, axum-governor: A(5), B(1): 3 calls, 1 passes, A has 4.
    let app = app(layer(limit("A", Quota::per_day(5))).and(limit("B", Quota::per_hour(1))));
    assert_eq!(get_root(&app).await.field("ratelimit"), Some("\"A\";r=4;t=69120, \"B\";r=0;t=3600"));
    for _ in 0..2 {
        let denied = get_root(&app).await;
        assert_eq!((denied.status, denied.field("retry-after")), (429, Some("3600")));
        assert_eq!(denied.field("ratelimit"), Some("\"A\";r=4;t=69120, \"B\";r=0;t=3600"));
        assert_eq!(denied.field("ratelimit-policy"), Some("\"A\";q=5;w=86400, \"B\";q=1;w=3600"));
        assert_eq!(denied.violated(), ["B"]);
        assert_eq!(denied.decision.unwrap().limit(), Some("B"));
    }
}

#[tokio::test(start_paused = true)]
async fn the_longest_wait_counts_and_those_that_refuse_are_named_in_order() {
    let limits = layer(limit("z-minute", Quota::per_minute(1)))
        .and(limit("wide", Quota::per_day(1000)))
        .and(limit("a-hour", Quota::per_hour(1)))
        .and(limit("m-second", Quota::per_second(1)));
    let (app, denied) = drained(limits).await;
    assert_eq!(denied.violated(), ["z-minute", "a-hour", "m-second"]);
    assert_eq!(denied.field("retry-after"), Some("3600"));
    assert_eq!(denied.decision.as_ref().unwrap().limit(), Some("a-hour"));
    let names =
        |field: &str| field.split(", ").map(|item| item.split(';').next().unwrap().to_owned()).collect::<Vec<_>>();
    let order = ["\"z-minute\"", "\"wide\"", "\"a-hour\"", "\"m-second\""];
    assert_eq!(names(denied.field("ratelimit").unwrap()), order);
    assert_eq!(names(denied.field("ratelimit-policy").unwrap()), order);
    tokio::time::advance(Duration::from_secs(60)).await;
    let denied = get_root(&app).await;
    assert_eq!((denied.violated(), denied.field("retry-after")), (vec!["a-hour".to_owned()], Some("3540")));
    tokio::time::advance(Duration::from_secs(3540)).await;
    assert_eq!(get_root(&app).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn a_shadow_limit_decides_and_is_charged_but_never_refuses() {
    let limits = layer(limit("watched", Quota::per_day(2)).shadow()).and(limit("enforced", Quota::per_day(4)));
    let app = app(limits);
    let mut seen = Vec::new();
    for _ in 0..5 {
        let answer = get_root(&app).await;
        let decision = answer.decision.clone().unwrap();
        let [watched, enforced] = decision.outcomes() else { panic!("{decision:?}") };
        assert!(watched.is_shadow() && !enforced.is_shadow() && !watched.refuses());
        assert!(!answer.field("ratelimit").unwrap().contains("watched"));
        assert!(!answer.field("ratelimit-policy").unwrap().contains("watched"));
        seen.push((answer.status, watched.is_allowed(), watched.remaining()));
        if answer.status == 429 {
            assert_eq!(answer.violated(), ["enforced"]);
        }
    }
    let (two, one, none) = ((200, true, Some(1)), (200, true, Some(0)), (200, false, Some(0)));
    assert_eq!(seen, [two, one, none, none, (429, false, Some(0))]);
}

#[tokio::test(start_paused = true)]
async fn a_shadow_limit_without_a_key_or_too_dear_refuses_nothing() {
    let no_key = || Limit::new("no-key", Quota::per_day(1)).key_by(ApiKey::verified("x-api-key", |_| false)).shadow();
    let no_peer = || Limit::new("no-peer", Quota::per_day(1)).key_by(ClientIp::peer()).shadow();
    let dear = || limit("dear", Quota::per_day(1)).cost(|_: &Parts| 2).shadow();
    for shadow in [no_key(), no_peer(), dear()] {
        let alone = app(layer(shadow.clone()));
        for _ in 0..3 {
            let answer = get_root(&alone).await;
            assert_eq!(answer.status, 200, "{shadow:?}");
            assert!(answer.decision.is_some_and(|decision| decision.is_allowed()));
        }
        let beside = app(layer(shadow.clone()).and(limit("enforced", Quota::per_day(1))));
        assert_eq!(get_root(&beside).await.status, 200);
        let denied = get_root(&beside).await;
        assert_eq!((denied.status, denied.violated()), (429, vec!["enforced".to_owned()]), "{shadow:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shadow_limit_that_sees_no_peer_is_told_to_the_operator() {
    // It would otherwise look as if it never refused.
    let (log, _guard) = Log::capture();
    let app = app(layer(Limit::new("watched", Quota::per_day(1)).shadow()));
    assert_eq!((get_root(&app).await.status, get_root(&app).await.status), (200, 200));
    let lines = log.lines();
    assert_eq!(
        lines.iter().filter(|line| line.contains("into_make_service_with_connect_info")).count(),
        1,
        "{lines:#?}"
    );
}

#[tokio::test(start_paused = true)]
async fn limits_by_key_and_by_address_are_charged_together() {
    let per_key = Limit::new("per-key", Quota::per_day(5)).key_by(ApiKey::unverified("x-api-key"));
    let per_address = Limit::new("per-address", Quota::per_day(3)).key_by(ClientIp::peer());
    let app = app(layer(per_key).and(per_address)).layer(MockConnectInfo(peer("203.0.113.9:1")));
    let mut admitted = 0;
    for i in 0..50 {
        admitted += usize::from(send(&app, request("GET", "/", &format!("x-api-key: {i}"))).await.status == 200);
    }
    assert_eq!(admitted, 3, "fresh keys do not help");
    assert_eq!(get_root(&app).await.status, 401);
}

// Errors of configuration: the place, the reason and what is allowed; and the twins agree.

#[track_caller]
fn check_error<T>(error: Result<T, ConfigError>, panic: Option<Box<dyn FnOnce()>>, parts: &[&str]) {
    let error = error.err().expect("an error").to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing: {error}");
    }
    assert!(!error.ends_with('.') && !error.contains('\n'), "{error}");
    if let Some(panic) = panic {
        let message = catch_unwind(AssertUnwindSafe(panic)).unwrap_err();
        let message =
            message.downcast_ref::<String>().cloned().or(message.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        assert_eq!(message.as_deref(), Some(error.as_str()));
    }
}

/// The twin that panics.
fn twin<T: 'static>(build: impl FnOnce() -> T + 'static) -> Option<Box<dyn FnOnce()>> {
    Some(Box::new(move || drop(build())))
}

#[test]
fn a_quota_that_cannot_be_is_refused_with_the_reason() {
    let second = Duration::from_secs(1);
    check_error(Quota::try_per_second(0), twin(|| Quota::per_second(0)), &["refill", "0", "allowed are 1 to"]);
    check_error(Quota::try_new(1, Duration::ZERO), twin(|| Quota::new(1, Duration::ZERO)), &["period", "0", "allowed"]);
    let none = Quota::per_second(1);
    check_error(none.try_with_capacity(0), twin(move || none.with_capacity(0)), &["capacity", "0", "allowed are 1 to"]);
    let large = 1 << 40;
    let build = move || Quota::from_parts(large, 1, second);
    check_error(Quota::try_from_parts(large, 1, second), twin(build), &["capacity", "allowed are 1 to", "nearest"]);
}

#[test]
fn a_limits_name_that_cannot_be_is_refused_with_what_is_allowed() {
    let long = "n".repeat(65);
    for name in ["", "a b", "a:b", "{a}", "a\n", "é", "a\"b", &long] {
        let quoted = format!("{name:?}");
        let owned = name.to_owned();
        let build = twin(move || Limit::new(&owned, Quota::per_second(1)));
        check_error(
            Limit::try_new(name, Quota::per_second(1)),
            build,
            &["limit name", &quoted, "1 to 64 of A-Z a-z 0-9 . _ -"],
        );
        check_error(LimitName::try_new(name), None, &["limit name", &quoted]);
    }
    for name in ["a", "A.b_c-9", &long[1..]] {
        assert_eq!(Limit::new(name, Quota::per_second(1)).name(), name);
    }
}

#[test]
fn two_limits_whose_names_differ_only_by_case_are_refused() {
    for (first, second) in [("a", "a"), ("per-key", "Per-KEY")] {
        let limits = move || [first, second].map(|name| limit(name, Quota::per_second(1)));
        let text = format!("{second:?}");
        let parts = ["limit name", &text, "twice", "more than case"];
        check_error(TokenBucketLayer::try_new(MemoryStore::new(), limits()), None, &parts);
        let [one, two] = limits();
        let build = twin(move || {
            let [one, two] = limits();
            layer(one).and(two)
        });
        check_error(layer(one).try_and(two), build, &parts);
    }
    assert!(layer(limit("a", Quota::per_second(1))).try_and(limit("b", Quota::per_second(1))).is_ok());
}

#[test]
fn a_layer_without_a_limit_is_refused() {
    check_error(TokenBucketLayer::try_new(MemoryStore::new(), []), None, &["no limit", "at least one"]);
}

#[test]
fn a_route_that_cannot_be_is_refused_with_what_is_allowed() {
    for (route, reason) in [
        ("FETCH /x", "allowed are GET"),
        ("GET", "starts with /"),
        ("HEAD /x", "name GET"),
        ("GET /:id", "{id}"),
        ("GET /{a}{b}", "axum 0.8"),
    ] {
        let quoted = format!("{route:?}");
        let build = twin(move || CostTable::new(1).route(route, 1));
        check_error(CostTable::new(1).try_route(route, 1), build, &["route", &quoted, reason]);
        let build = twin(move || CostTable::new(1).exempt(route));
        check_error(CostTable::new(1).try_exempt(route), build, &["route", &quoted, reason]);
    }
    let table = || CostTable::new(1).route("GET /u/{a}", 1);
    let build = twin(move || table().route("GET /u/{b}", 2));
    check_error(table().try_route("GET /u/{b}", 2), build, &["\"GET /u/{b}\"", "already"]);
}

#[test]
fn a_cost_above_the_capacity_is_refused_where_the_table_shows_it() {
    let quota = Quota::per_second(9);
    type Case = (fn() -> CostTable, &'static str, &'static str);
    let cases: [Case; 4] = [
        (|| CostTable::new(1).route("POST /reports", 10), "\"POST /reports\"", "10"),
        (|| CostTable::new(1).route("/any/{x}", 11), "\"* /any/{x}\"", "11"),
        (|| CostTable::new(12), "the default cost", "12"),
        (|| CostTable::new(1).route("GET /a", 20).route("GET /b", 13), "\"GET /a\"", "20"),
    ];
    for (table, entry, cost) in cases {
        let build = twin(move || limit("small", quota).cost(table()));
        let parts = [entry, cost, "\"small\"", "capacity 9", "allowed are 0 to 9"];
        check_error(limit("small", quota).try_cost(table()), build, &parts);
    }
    assert!(limit("small", quota).try_cost(CostTable::new(1).route("GET /a", 9)).is_ok());
    // A closure's costs are known with the request only; and with plans the quota is.
    assert!(limit("small", quota).try_cost(|_: &Parts| 10).is_ok());
    assert!(limit("small", quota).quota_by(|_| None).try_cost(CostTable::new(10)).is_ok());
}

#[test]
fn other_settings_that_cannot_be_are_refused_with_what_is_allowed() {
    for bits in [0, 31, 129, 255] {
        let text = bits.to_string();
        let build = twin(move || ClientIp::peer().ipv6_prefix(bits));
        check_error(ClientIp::peer().try_ipv6_prefix(bits), build, &["ipv6_prefix", &text, "32 to 128"]);
    }
    for network in ["", "10.0.0.0/33", "10.0.0/8", "2001:db8::/129", "proxy.example", "10.0.0.1:80", "10.0.0.0/-1"] {
        let quoted = format!("{network:?}");
        let by = || ClientIp::forwarded("x-forwarded-for");
        let build = twin(move || by().trusted_proxies(["127.0.0.1", network]));
        check_error(by().try_trusted_proxies(["127.0.0.1", network]), build, &[&quoted, "network", "allowed are"]);
    }
    for (header, hops, allowed) in
        [("x-forwarded-for", 0, "1 or more"), ("forwarded", 0, "1 or more"), ("x-real-ip", 2, "1 is")]
    {
        let text = hops.to_string();
        let by = move || ClientIp::forwarded(header);
        check_error(by().try_hops(hops), twin(move || by().hops(hops)), &[header, &text, "hops", allowed]);
    }
    let any = || layer(limit("a", Quota::per_second(1)));
    check_error(any().try_share(0), twin(move || any().share(0)), &["share", "0", "1 or more"]);
    let zero = Duration::ZERO;
    check_error(any().try_deadline(zero), twin(move || any().deadline(zero)), &["deadline", "0", "longer"]);
    let build = twin(|| MemoryStore::with_buckets(0));
    check_error(MemoryStore::try_with_buckets(0), build, &["buckets", "0", "1 or more"]);
}

#[test]
fn a_header_name_that_cannot_be_is_refused_with_what_is_allowed() {
    for name in ["", "x api key", "x-key:", "é"] {
        let quoted = format!("{name:?}");
        // The place, the reason, and which characters a name has.
        let parts = [quoted.as_str(), "header", "allowed"];
        check_error(ApiKey::try_verified(name, |_| true), twin(move || ApiKey::verified(name, |_| true)), &parts);
        check_error(ApiKey::try_unverified(name), twin(move || ApiKey::unverified(name)), &parts);
        check_error(ClientIp::try_forwarded(name), twin(move || ClientIp::forwarded(name)), &parts);
    }
}

#[test]
fn a_setting_of_a_file_is_refused_with_its_place() {
    let file = "[[limits]]\nname = \"a\"\nkey = \"global\"\ncapacity = 0\nrefill = 1\nper = \"1s\"\n";
    let config: tower_token_bucket::config::Config = toml::from_str(file).unwrap();
    check_error(config.limits(), None, &["limits[0].capacity", "0", "allowed are 1 to"]);
}

#[tokio::test]
async fn settings_of_the_redis_store_that_cannot_be_are_refused_without_showing_the_url() {
    for url in ["", "127.0.0.1:6379", "http://127.0.0.1", "redis://:s3cret@", "redis://user:s3cret@host:port/0"] {
        let error = RedisStore::connect(url).await.expect_err(url);
        assert!(matches!(error, ConfigError::RedisUrl { .. }), "{error:?}");
        assert!(!error.to_string().contains("s3cret") && !format!("{error:?}").contains("s3cret"), "{error}");
        check_error(Err::<(), _>(error), None, &["Redis URL", "cannot be used"]);
    }
    let long = "p".repeat(65);
    for prefix in ["", "a b", "{a}", "a\n", &long] {
        let store = RedisStore::connect("redis://127.0.0.1:1").await.unwrap();
        let (quoted, text, twins) = (format!("{prefix:?}"), prefix.to_owned(), store.clone());
        let build = twin(move || twins.prefix(&text));
        check_error(store.try_prefix(prefix), build, &["prefix", &quoted, "1 to 64 of A-Z a-z 0-9 . _ - :"]);
    }
}

/// So that every variant has its test above.
#[tokio::test]
async fn every_kind_of_configuration_error_can_be_told_apart() {
    let quota = Quota::per_second(1);
    let errors = [
        Quota::try_per_second(0).unwrap_err(),
        Limit::try_new("", quota).unwrap_err(),
        layer(limit("a", quota)).try_and(limit("A", quota)).unwrap_err(),
        TokenBucketLayer::try_new(MemoryStore::new(), []).unwrap_err(),
        CostTable::new(1).try_route("x", 1).unwrap_err(),
        limit("a", quota).try_cost(CostTable::new(2)).unwrap_err(),
        ClientIp::peer().try_ipv6_prefix(0).unwrap_err(),
        layer(limit("a", quota)).try_share(0).unwrap_err(),
        layer(limit("a", quota)).try_deadline(Duration::ZERO).unwrap_err(),
        ApiKey::try_unverified("").unwrap_err(),
        MemoryStore::try_with_buckets(0).unwrap_err(),
        ClientIp::forwarded("forwarded").try_trusted_proxies(["x"]).unwrap_err(),
        ClientIp::forwarded("forwarded").try_hops(0).unwrap_err(),
        RedisStore::connect("redis://127.0.0.1:1").await.unwrap().try_prefix("").unwrap_err(),
        RedisStore::connect("").await.unwrap_err(),
    ];
    for (i, error) in errors.iter().enumerate() {
        let other = match error {
            ConfigError::Quota(_) => 0,
            ConfigError::LimitName { .. } => 1,
            ConfigError::DuplicateLimit { .. } => 2,
            ConfigError::NoLimit => 3,
            ConfigError::Route { .. } => 4,
            ConfigError::CostAboveCapacity { .. } => 5,
            ConfigError::Ipv6Prefix { .. } => 6,
            ConfigError::Share => 7,
            ConfigError::Deadline => 8,
            ConfigError::HeaderName { .. } => 9,
            ConfigError::Buckets => 10,
            ConfigError::Network { .. } => 11,
            ConfigError::Hops { .. } => 12,
            ConfigError::Prefix { .. } => 13,
            ConfigError::RedisUrl { .. } => 14,
            _ => usize::MAX,
        };
        assert_eq!(i, other, "{error}");
        let _: &dyn std::error::Error = error;
    }
}
