//! What the layer allocates for a request: counts, which hold on every machine. `benches/request.rs` has the figures that do
//! not.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use axum::extract::ConnectInfo;
use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use tower::{Layer, Service};
use tower_token_bucket::{ApiKey, Decision, HeaderStyle, Limit, MemoryStore, Quota, TokenBucketLayer};

type Body = Full<Bytes>;

fn request() -> Request<Body> {
    let mut request = Request::get("/").header("x-api-key", "alpha").body(Body::default()).unwrap();
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from(([203, 0, 113, 9], 4711))));
    request
}

/// A handler whose response has a header, as most have; with a decision it makes the same inserts as the layer.
#[derive(Clone, Default)]
struct Handler(Option<Decision>);

impl Service<Request<Body>> for Handler {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let mut response = Response::new(Body::default());
        response.headers_mut().insert("content-type", HeaderValue::from_static("text/plain"));
        if let Some(decision) = &self.0 {
            request.extensions_mut().insert(decision.clone());
            response.extensions_mut().insert(decision.clone());
        }
        ready(Ok(response))
    }
}

/// The response, and how many allocations were made until it was there.
fn answer(
    service: &mut impl Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
) -> (Response<Body>, u64) {
    let (mut request, mut response) = (Some(request()), None);
    let counted = allocation_counter::measure(|| {
        let mut cx = Context::from_waker(Waker::noop());
        assert!(service.poll_ready(&mut cx).is_ready());
        if let Poll::Ready(Ok(answer)) = pin!(service.call(request.take().unwrap())).poll(&mut cx) {
            response = Some(answer);
        }
    });
    (response.unwrap(), counted.count_total)
}

fn layer(limits: &[Limit], style: HeaderStyle) -> TokenBucketLayer<MemoryStore> {
    TokenBucketLayer::try_new(MemoryStore::new(), limits.to_vec()).unwrap().headers(style)
}

/// What the layer allocates for a request that is allowed, but for the inserts of its decision.
fn allowed(limits: &[Limit], style: HeaderStyle) -> u64 {
    let mut service = layer(limits, style).layer(Handler::default());
    // The first request makes the buckets, and what is made once.
    for _ in 0..3 {
        assert_eq!(answer(&mut service).0.status(), 200);
    }
    let (response, all) = answer(&mut service);
    let mut alone = Handler(response.extensions().get().cloned());
    // A decision about several limits is cloned for each of the two inserts, and made by nobody.
    let clones = if limits.len() > 1 { 1 } else { 0 };
    all - (answer(&mut alone).1 - clones)
}

fn limit(name: &str, quota: Quota) -> Limit {
    Limit::new(name, quota)
}

fn by_key(name: &str, quota: Quota) -> Limit {
    limit(name, quota).key_by(ApiKey::unverified("x-api-key"))
}

#[test]
fn a_request_that_is_allowed_allocates_nothing_but_the_field_that_differs_each_time() {
    let many = Quota::per_second(1_000);
    assert_eq!(allowed(&[limit("a", many)], HeaderStyle::Off), 0, "by address");
    assert_eq!(allowed(&[by_key("a", many)], HeaderStyle::Off), 0, "by key");
    assert_eq!(
        allowed(&[by_key("a", many)], HeaderStyle::Draft11),
        1,
        "with RateLimit; RateLimit-Policy is always the same"
    );
    let plans = by_key("a", many).quota_by(|_| Some(Quota::per_second(50)));
    assert_eq!(allowed(&[plans], HeaderStyle::Draft11), 1, "under the quota of a plan");
}

#[test]
fn more_limits_allocate_no_more_than_two() {
    let many = Quota::per_second(1_000);
    let limits: Vec<Limit> = ["a", "b", "c", "d"].map(|name| by_key(name, many)).into();
    for style in [HeaderStyle::Off, HeaderStyle::Draft11] {
        let [two, four] = [2, 4].map(|n| allowed(&limits[..n], style));
        assert!(two <= 5 && four <= two, "{style:?}: {two} for two limits, {four} for four");
    }
}

#[test]
fn a_refusal_with_everything_allocates_four_times_and_for_the_insert_of_its_decision() {
    for (quota, wait) in [(Quota::per_minute(3), 0), (Quota::per_day(3), 1)] {
        let mut service = layer(&[by_key("a", quota)], HeaderStyle::Draft11).layer(Handler::default());
        (0..5).for_each(|_| drop(answer(&mut service)));
        let (response, all) = answer(&mut service);
        assert_eq!((response.status().as_u16(), response.headers().len()), (429, 6));
        // The map of the extensions, its table, and the decision.
        assert_eq!(
            all - 3,
            4 + wait,
            "the map of the headers twice, RateLimit, the body, and a wait of 1 000 s or more"
        );
    }
}
