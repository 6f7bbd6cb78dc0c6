//! What the layer adds to a request, with buckets in memory: instructions, allocations and nanoseconds.
//!
//! Run with `cargo bench --bench request`; `ROUNDS=301` for quieter times. A service around an empty handler that sets one
//! header, as handlers do; one hot key. Every figure is a difference to the same service without the layer.
//!
//! Instructions and allocations are counted by valgrind, which runs this program with N and with 2 N requests: the
//! difference has no start-up in it and does not depend on the machine's mood. Allocations are the calls of the allocator
//! that it sees, since an allocator that counts would add its own instructions. Without valgrind both columns are empty.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

#[path = "support/callgrind.rs"]
mod callgrind;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use axum::extract::ConnectInfo;
use bytes::Bytes;
use callgrind::Counts;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use tower::{Layer, Service};
use tower_token_bucket::{
    ApiKey, ClientIp, CostTable, Decision, HeaderStyle, Limit, MemoryStore, Quota, TokenBucket, TokenBucketLayer,
};

const KEY: &str = "sk_live_0123456789abcdef0123456789abcdef";
/// Requests in one sample of the time, and N for the instructions.
const REQUESTS: usize = 1_000;
const ROUTES: usize = 1_000;

type Body = Full<Bytes>;

fn request() -> Request<Body> {
    let mut request = Request::get("/search/books").header("x-api-key", KEY).body(Body::default()).expect("a request");
    let peer: SocketAddr = "203.0.113.9:4711".parse().expect("an address");
    request.extensions_mut().insert(ConnectInfo(peer));
    request
}

/// The empty handler.
#[derive(Clone)]
struct Handler {
    /// Its response has a header, so that the map of headers is there.
    header: bool,
    /// It puts a decision where the layer does: what these inserts cost is shown apart.
    decision: Option<Decision>,
}

impl Service<Request<Body>> for Handler {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let mut response = Response::new(Body::default());
        if self.header {
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(decision) = &self.decision {
            request.extensions_mut().insert(decision.clone());
            response.extensions_mut().insert(decision.clone());
        }
        black_box(&request);
        ready(Ok(response))
    }
}

/// A refusal that costs nothing, but for the decision: what the denied cases are compared with.
#[derive(Clone)]
struct Refusal(Option<Decision>);

impl Service<Request<Body>> for Refusal {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        black_box(&request);
        let mut response = Response::new(Body::default());
        if let Some(decision) = &self.0 {
            response.extensions_mut().insert(decision.clone());
        }
        ready(Ok(response))
    }
}

/// What a layer cannot do without that reads `Parts`, does nothing before it is polled, and calls a service that is ready:
/// no limits, no key, no store, and no state but these.
#[derive(Clone)]
struct Skeleton {
    inner: Handler,
    decision: Arc<Decision>,
}

struct SkeletonFuture {
    inner: Option<Handler>,
    parts: Option<Parts>,
    body: Option<Body>,
    given: Arc<Decision>,
    decision: Option<Decision>,
    response: Option<Ready<Result<Response<Body>, Infallible>>>,
}

impl Service<Request<Body>> for Skeleton {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = SkeletonFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let clone = self.inner.clone();
        let inner = Some(std::mem::replace(&mut self.inner, clone));
        let (parts, body) = request.into_parts();
        let (parts, body, given) = (Some(parts), Some(body), Arc::clone(&self.decision));
        SkeletonFuture { inner, parts, body, given, decision: None, response: None }
    }
}

impl Future for SkeletonFuture {
    type Output = Result<Response<Body>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let (Some(mut inner), Some(mut parts), Some(body)) = (this.inner.take(), this.parts.take(), this.body.take())
        {
            let decision = this.decision.insert(black_box(Decision::clone(&this.given)));
            parts.extensions.insert(decision.clone());
            this.response = Some(inner.call(Request::from_parts(parts, body)));
        }
        let mut output = Pin::new(this.response.as_mut().expect("a call")).poll(cx);
        if let Poll::Ready(Ok(response)) = &mut output {
            this.response = None;
            if let Some(decision) = this.decision.take() {
                response.extensions_mut().insert(decision);
            }
        }
        output
    }
}

fn answer<S>(service: &mut S, request: Request<Body>) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    let mut cx = Context::from_waker(Waker::noop());
    let Poll::Ready(Ok(())) = service.poll_ready(&mut cx) else { unreachable!("the handler is always ready") };
    match pin!(service.call(request)).poll(&mut cx) {
        Poll::Ready(Ok(response)) => response,
        Poll::Ready(Err(never)) => match never {},
        Poll::Pending => unreachable!("the memory store answers at once"),
    }
}

type Run = Box<dyn FnMut(usize)>;

/// So many requests, each a clone of the same one.
fn run<S>(mut service: S) -> Run
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + 'static,
{
    let request = request();
    Box::new(move |requests| {
        for _ in 0..requests {
            black_box(answer(&mut service, black_box(&request).clone()));
        }
    })
}

const HANDLER: Handler = Handler { header: true, decision: None };

fn allowed() -> Quota {
    Quota::per_second(100_000).with_capacity(1_000_000)
}

fn limit(name: &str, quota: Quota, key: bool) -> Limit {
    let limit = Limit::new(name, quota);
    if key { limit.key_by(ApiKey::unverified("x-api-key")) } else { limit.key_by(ClientIp::peer()) }
}

fn layer(limits: usize, quota: Quota, key: bool, style: HeaderStyle) -> TokenBucketLayer<MemoryStore> {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("per-key", quota, key)).headers(style);
    (1..limits).fold(layer, |layer, i| layer.and(limit(&format!("limit-{i}"), quota, key)))
}

fn admitting(key: bool, style: HeaderStyle) -> Run {
    run(layer(1, allowed(), key, style).layer(HANDLER))
}

/// A service whose bucket is empty for a long time.
fn drained(key: bool, style: HeaderStyle) -> TokenBucket<Handler, MemoryStore> {
    let mut service = layer(1, Quota::per_hour(10), key, style).layer(HANDLER);
    while answer(&mut service, request()).status() == 200 {}
    service
}

fn refusing(key: bool, style: HeaderStyle) -> Run {
    run(drained(key, style))
}

fn several(limits: usize) -> Run {
    run(layer(limits, allowed(), true, HeaderStyle::Draft11).layer(HANDLER))
}

fn routes(routes: usize) -> Run {
    let named = (1..routes).map(|i| format!("GET /collection-{i}/{{id}}")).chain(["GET /search/{id}".to_owned()]);
    let table = named.fold(CostTable::new(1), |table, route| table.route(&route, 2));
    let limit = limit("per-key", allowed(), true).cost(table);
    run(TokenBucketLayer::new(MemoryStore::new(), limit).headers(HeaderStyle::Off).layer(HANDLER))
}

/// As the layer leaves one in the extensions.
fn decision(denied: bool) -> Decision {
    let response = if denied {
        answer(&mut drained(true, HeaderStyle::Off), request())
    } else {
        answer(&mut layer(1, allowed(), true, HeaderStyle::Off).layer(HANDLER), request())
    };
    response.extensions().get::<Decision>().expect("a decision").clone()
}

/// Clones and drops: the layer makes one of the two decisions that it inserts.
fn clones() -> Run {
    let decision = decision(false);
    Box::new(move |times| (0..times).for_each(|_| drop(black_box(black_box(&decision).clone()))))
}

/// What is measured.
struct Case {
    name: &'static str,
    run: fn() -> Run,
    /// What is taken off, by its name.
    without: &'static [&'static str],
    /// Targets in instructions and allocations, for what remains.
    targets: Option<(f64, f64)>,
}

const BARE: &str = "the handler alone";
const BARE_EMPTY: &str = "the handler alone, no header of its own";
const INSERTS: &str = "the handler, inserting decisions";
const CLONE: &str = "a clone of a decision";
const REFUSAL: &str = "a refusal for nothing";
const REFUSAL_INSERTS: &str = "a refusal for nothing, inserting its decision";

const CASES: [Case; 23] = {
    use HeaderStyle::{Draft11, Legacy, Off};
    const fn case(name: &'static str, run: fn() -> Run, without: &'static [&'static str]) -> Case {
        Case { name, run, without, targets: None }
    }
    const fn target(name: &'static str, run: fn() -> Run, without: &'static [&'static str], of: (f64, f64)) -> Case {
        Case { name, run, without, targets: Some(of) }
    }
    [
        case(BARE, || run(HANDLER), &[]),
        case(BARE_EMPTY, || run(Handler { header: false, ..HANDLER }), &[]),
        case(INSERTS, || run(Handler { decision: Some(decision(false)), ..HANDLER }), &[]),
        case(CLONE, clones, &[]),
        case(REFUSAL, || run(Refusal(None)), &[]),
        case(REFUSAL_INSERTS, || run(Refusal(Some(decision(true)))), &[]),
        case(
            "a skeleton of a layer",
            || run(Skeleton { inner: HANDLER, decision: decision(false).into() }),
            &[INSERTS],
        ),
        target("allowed: peer, no fields", || admitting(false, Off), &[INSERTS], (450.0, 0.0)),
        target("allowed: header key, no fields", || admitting(true, Off), &[INSERTS], (800.0, 0.0)),
        target("allowed: header key, Draft11", || admitting(true, Draft11), &[INSERTS], (1_850.0, 1.0)),
        case("allowed: header key, Draft11, and inserts", || admitting(true, Draft11), &[BARE]),
        case(
            "the same, the handler sets no header",
            || run(layer(1, allowed(), true, Draft11).layer(Handler { header: false, ..HANDLER })),
            &[BARE_EMPTY],
        ),
        case("allowed: header key, Legacy", || admitting(true, Legacy), &[INSERTS]),
        case("denied: peer, no fields", || refusing(false, Off), &[REFUSAL_INSERTS]),
        case("denied: header key, no fields", || refusing(true, Off), &[REFUSAL_INSERTS]),
        target("denied: header key, Draft11", || refusing(true, Draft11), &[REFUSAL_INSERTS], (2_700.0, 6.0)),
        case("denied: header key, Draft11, and insert", || refusing(true, Draft11), &[REFUSAL]),
        case("1 limit", || several(1), &[INSERTS]),
        case("2 limits", || several(2), &[INSERTS]),
        case("4 limits", || several(4), &[INSERTS]),
        case("1 route, by path", || routes(1), &[INSERTS]),
        case("10 routes, by path", || routes(10), &[INSERTS]),
        case("1,000 routes, by path", || routes(ROUTES), &[INSERTS]),
    ]
};

/// Names the case that valgrind runs, and how many requests.
const CASE: &str = "REQUEST_CASE";

/// What valgrind counts for one request of the case; `None` where it does not run.
fn counts(case: &Case) -> Option<Counts> {
    let written = std::env::temp_dir().join(format!("request-{}", std::process::id()));
    let count = |requests: usize| {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", &format!("--callgrind-out-file={}", written.display())])
            .arg(std::env::current_exe().ok()?)
            .env(CASE, format!("{requests} {}", case.name))
            .output()
            .ok()?;
        let counts = std::fs::read_to_string(&written).ok()?;
        let _ = std::fs::remove_file(&written);
        Counts::read(&counts).filter(|_| output.status.success())
    };
    let (once, twice) = (count(REQUESTS)?, count(2 * REQUESTS)?);
    Some(Counts::each(once, twice, REQUESTS))
}

/// What is known of one request of a case.
struct Measured {
    counts: Option<Counts>,
    /// Nanoseconds, a figure for each round.
    times: Vec<f64>,
}

fn measure(rounds: usize) -> Vec<Measured> {
    let mut runs = CASES.each_ref().map(|case| (case.run)());
    let mut measured: Vec<Measured> = CASES
        .iter()
        .zip(&mut runs)
        .map(|(case, run)| {
            run(REQUESTS);
            Measured { counts: counts(case), times: Vec::new() }
        })
        .collect();
    for _ in 0..rounds {
        for (run, measured) in runs.iter_mut().zip(&mut measured) {
            let started = Instant::now();
            run(REQUESTS);
            measured.times.push(started.elapsed().as_nanos() as f64 / REQUESTS as f64);
        }
    }
    measured
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// A figure of the case without those of what it is compared with. The decision that the layer makes is its own: of the
/// two that are inserted, one is not taken off.
fn added(case: &Case, own: f64, of: impl Fn(&str) -> f64) -> f64 {
    let made = if case.without.contains(&INSERTS) || case.without.contains(&REFUSAL_INSERTS) { of(CLONE) } else { 0.0 };
    own - case.without.iter().map(|name| of(name)).sum::<f64>() + made
}

fn main() {
    if let Ok(case) = std::env::var(CASE) {
        let (requests, name) = case.split_once(' ').expect("requests and a name");
        let case = CASES.iter().find(|case| case.name == name).expect("a case of this name");
        return (case.run)()(requests.parse().expect("a number"));
    }
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(101);
    let measured = measure(rounds);
    let find = |name: &str| &measured[CASES.iter().position(|case| case.name == name).expect("a case of this name")];

    if measured[0].counts.is_none() {
        println!("no counts: valgrind is not installed, or cannot run this program\n");
    }
    println!("added to a request, {rounds} rounds, medians of ns; (x target)\n");
    println!("| | instructions | allocations | ns |\n|---|---|---|---|");
    for (case, own) in CASES.iter().zip(&measured) {
        let count = |of: fn(&Counts) -> f64| {
            let own = own.counts.as_ref().map(of)?;
            Some(added(case, own, |name| find(name).counts.as_ref().map_or(0.0, of)))
        };
        let times = (0..rounds).map(|i| added(case, own.times[i], |name| find(name).times[i]));
        let against = |figure: f64, target: Option<f64>| match target {
            Some(0.0) => format!("{figure:.0} (target 0)"),
            Some(target) => format!("{figure:.0} ({:.2} x {target})", figure / target),
            None => format!("{figure:.0}"),
        };
        println!(
            "| {} | {} | {} | {:.0} |",
            case.name,
            count(|counts| counts.instructions)
                .map_or(String::new(), |count| against(count, case.targets.map(|target| target.0))),
            count(|counts| counts.allocations)
                .map_or(String::new(), |count| against(count, case.targets.map(|target| target.1))),
            median(times.collect()),
        );
    }
}
