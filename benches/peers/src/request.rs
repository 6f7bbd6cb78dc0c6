//! What each layer adds to a request: tower services around an empty handler, with buckets in memory.
//!
//! Instructions and allocations are counted by valgrind, which runs this program again and counts nothing but the requests,
//! after a few that warm up: they do not depend on the machine's mood, and no allocator that counts adds to them. Without
//! valgrind those columns are empty, and a line says so.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::hint::black_box;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::pin::pin;
use std::process::{Command, Stdio};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::middleware::from_fn_with_state;
use http::{HeaderValue, Request, Response, StatusCode};
use tower::{Layer, Service};
use tower_token_bucket::{CostTable, HeaderStyle, MemoryStore, TokenBucketLayer};

use crate::callgrind::Counts;
use crate::chart::{Axis, Chart, Form, Panel, Series};
use crate::peer::{self, API_KEY, AXUM_GCRA, AXUM_GOVERNOR, LIMITADOR, OURS, Rule, TOWER_GOVERNOR};
use crate::table::{Row, Target, figure, median, ratio};

/// Requests in one sample of the time, and for the instructions.
const REQUESTS: usize = 1_000;
const COUNTED: usize = 300;
/// Names the case that valgrind runs.
const CASE: &str = "PEERS_REQUEST";

type Run = Box<dyn FnMut(usize)>;

/// The empty handler, with the body of an axum; and a refusal that costs nothing, which denied cases are compared with.
struct Handler<B> {
    status: StatusCode,
    body: PhantomData<fn() -> B>,
}

impl<B> Clone for Handler<B> {
    fn clone(&self) -> Self {
        handler(self.status)
    }
}

fn handler<B>(status: StatusCode) -> Handler<B> {
    Handler { status, body: PhantomData }
}

impl<B: Default> Service<Request<Body>> for Handler<B> {
    type Response = Response<B>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        black_box(&request);
        let mut response = Response::new(B::default());
        *response.status_mut() = self.status;
        ready(Ok(response))
    }
}

/// The empty handler of axum 0.8.
fn ok() -> Handler<Body> {
    handler(StatusCode::OK)
}

fn request() -> Request<Body> {
    let key = "sk_live_0123456789abcdef0123456789abcdef";
    let mut request = Request::get("/search/books").header(&API_KEY, key).body(Body::empty()).expect("a request");
    let peer: SocketAddr = "203.0.113.9:4711".parse().expect("an address");
    request.extensions_mut().insert(ConnectInfo(peer));
    request
}

/// A clone: a body is none.
fn again(request: &Request<Body>) -> Request<Body> {
    let mut again = Request::new(Body::empty());
    (*again.uri_mut(), *again.headers_mut()) = (request.uri().clone(), request.headers().clone());
    *again.extensions_mut() = request.extensions().clone();
    again
}

fn answer<S, B>(service: &mut S, request: Request<Body>) -> Response<B>
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible>,
{
    let mut cx = Context::from_waker(Waker::noop());
    let Poll::Ready(Ok(())) = service.poll_ready(&mut cx) else { unreachable!("the handler is always ready") };
    match pin!(service.call(request)).poll(&mut cx) {
        Poll::Ready(Ok(response)) => response,
        Poll::Ready(Err(never)) => match never {},
        Poll::Pending => unreachable!("what is in memory answers at once"),
    }
}

/// So many requests, each a clone of the same one, that are all denied or all allowed.
fn run<S, B>(mut service: S, rule: Rule) -> Run
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + 'static,
    B: 'static,
{
    let request = request();
    let denied = rule == Rule::Scarce;
    let mut drained = 0;
    while denied && answer(&mut service, again(&request)).status() == StatusCode::OK {
        drained += 1;
        assert!(drained < 10, "it never refuses");
    }
    let expected = if denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    Box::new(move |requests| {
        for _ in 0..requests {
            let response = black_box(answer(&mut service, again(black_box(&request))));
            assert_eq!(response.status(), expected);
        }
    })
}

/// What is measured, allowed and denied.
pub(crate) struct Case {
    pub(crate) who: &'static str,
    pub(crate) key: &'static str,
    pub(crate) fields: &'static str,
    run: fn(Rule) -> Run,
}

const fn case(who: &'static str, key: &'static str, fields: &'static str, run: fn(Rule) -> Run) -> Case {
    Case { who, key, fields, run }
}

const PEER: &str = "peer address";
const HEADER: &str = "header";
const NONE: &str = "none";

/// First what is taken off all others.
pub(crate) const CASES: [Case; 10] = [
    case("handler alone", "", "", |rule| {
        let status = if rule == Rule::Scarce { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
        run(handler::<Body>(status), rule)
    }),
    case(OURS, PEER, NONE, |rule| run(peer::memory(rule, false, HeaderStyle::Off).layer(ok()), rule)),
    case(OURS, HEADER, NONE, |rule| run(peer::memory(rule, true, HeaderStyle::Off).layer(ok()), rule)),
    case(OURS, HEADER, "RateLimit (draft 11), 2", |rule| {
        run(peer::memory(rule, true, HeaderStyle::Draft11).layer(ok()), rule)
    }),
    case(TOWER_GOVERNOR, PEER, NONE, |rule| run(peer::tower_governor_by_peer(rule).layer(ok()), rule)),
    case(TOWER_GOVERNOR, HEADER, NONE, |rule| run(peer::tower_governor(rule).layer(ok()), rule)),
    case(TOWER_GOVERNOR, HEADER, "X-RateLimit, 2", |rule| {
        run(peer::tower_governor_with_headers(rule).layer(ok()), rule)
    }),
    case(AXUM_GOVERNOR, HEADER, "RateLimit and X-RateLimit, 5", |rule| {
        run(peer::axum_governor(rule).layer(ok()), rule)
    }),
    case(AXUM_GCRA, HEADER, NONE, |rule| {
        let inner = handler::<axum_07::body::Body>(StatusCode::OK);
        run(peer::axum_gcra(rule).default_handle_error().layer(inner), rule)
    }),
    case(LIMITADOR, HEADER, "X-RateLimit, 3", |rule| {
        run(from_fn_with_state(peer::limitador(rule), peer::by_limitador).layer(ok()), rule)
    }),
];
const OURS_BY_PEER: usize = 1;
const OURS_PLAIN: usize = 2;
const OURS_FIELDS: usize = 3;
const GOVERNOR_PLAIN: usize = 5;
const GOVERNOR_FIELDS: usize = 6;

/// One request of a case.
#[derive(Default)]
pub(crate) struct Measured {
    counts: Option<Counts>,
    /// Nanoseconds, a figure for each round.
    times: Vec<f64>,
}

/// Of all cases, allowed and denied.
pub(crate) type Both = [Vec<Measured>; 2];

const RULES: [Rule; 2] = [Rule::Plenty, Rule::Scarce];

/// A run of this program under valgrind, and where it writes what it has counted.
pub(crate) struct Valgrind {
    pub(crate) command: Command,
    written: std::path::PathBuf,
}

impl Valgrind {
    /// Counts what is done in functions of this name.
    pub(crate) fn new(function: &str) -> Option<Self> {
        let written = std::env::temp_dir().join(format!("peers-{}-{function}", std::process::id()));
        let mut command = Command::new("valgrind");
        command.args(["--tool=callgrind", "--collect-atstart=no"]);
        command.arg(format!("--callgrind-out-file={}", written.display()));
        command.arg(format!("--toggle-collect=*{function}*")).arg(std::env::current_exe().ok()?);
        command.stderr(Stdio::null());
        Some(Self { command, written })
    }

    /// After the end of the run.
    pub(crate) fn counts(&self) -> Option<Counts> {
        let written = std::fs::read_to_string(&self.written).ok()?;
        let _ = std::fs::remove_file(&self.written);
        Counts::read(&written)
    }
}

/// What valgrind counts for one request; `None` where it does not run. The difference of two runs, since it counts calls
/// everywhere.
fn counts(case: usize, rule: usize) -> Option<Counts> {
    let count = |requests: usize| -> Option<Counts> {
        let mut run = Valgrind::new("counted_requests")?;
        let status = run.command.env(CASE, format!("{case} {rule} {requests}")).status().ok()?;
        run.counts().filter(|_| status.success())
    };
    let (once, twice) = (count(COUNTED)?, count(2 * COUNTED)?);
    Some(Counts::each(once, twice, COUNTED))
}

#[inline(never)]
fn counted_requests(run: &mut Run, requests: usize) {
    run(requests);
}

/// A runtime for the tasks that some layers start; it never runs them.
fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Whether this process is one that valgrind counts.
pub(crate) fn child() -> bool {
    let Ok(what) = std::env::var(CASE) else { return false };
    let numbers: Vec<usize> = what.split(' ').map(|number| number.parse().expect("a number")).collect();
    let [case, rule, requests] = numbers[..] else { panic!("three numbers") };
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut run = (CASES[case].run)(RULES[rule]);
    run(100);
    counted_requests(&mut run, requests);
    true
}

pub(crate) fn measure(rounds: usize) -> Both {
    let runtime = runtime();
    let _inside = runtime.enter();
    let mut runs = RULES.map(|rule| CASES.each_ref().map(|case| (case.run)(rule)));
    let mut all: Both = std::array::from_fn(|_| CASES.iter().map(|_| Measured::default()).collect());
    for (rule, (runs, all)) in runs.iter_mut().zip(&mut all).enumerate() {
        for (case, (run, measured)) in runs.iter_mut().zip(all).enumerate() {
            run(REQUESTS);
            measured.counts = counts(case, rule);
        }
    }
    for _ in 0..rounds {
        for (runs, all) in runs.iter_mut().zip(&mut all) {
            for (run, measured) in runs.iter_mut().zip(all) {
                let started = Instant::now();
                run(REQUESTS);
                measured.times.push(started.elapsed().as_nanos() as f64 / REQUESTS as f64);
            }
        }
    }
    all
}

/// What a case adds to the handler alone.
struct Added {
    instructions: f64,
    allocations: f64,
    times: Vec<f64>,
}

fn added(all: &[Measured], case: usize) -> Added {
    let (own, bare) = (&all[case], &all[0]);
    let both = own.counts.zip(bare.counts);
    let counted = |of: fn(Counts) -> f64| both.map_or(f64::NAN, |(own, bare)| of(own) - of(bare));
    Added {
        instructions: counted(|counts| counts.instructions),
        allocations: counted(|counts| counts.allocations),
        times: own.times.iter().zip(&bare.times).map(|(own, bare)| own - bare).collect(),
    }
}

/// What a layer adds as something grows: the number of keys, each asked in turn, of limits, or of routes with a cost.
pub(crate) struct Growth {
    name: &'static str,
    /// Nanoseconds of the handler alone, ours, tower_governor and axum-governor, where they have such a thing; a figure for
    /// each round.
    times: [Vec<f64>; 4],
}

const GROWN: [&str; 4] = ["handler alone", OURS, TOWER_GOVERNOR, AXUM_GOVERNOR];
/// Services of this size: the handler alone, and then the peers.
type Runs = fn(usize) -> Vec<Run>;
/// What the ratio at 1 M keys is taken of.
const MOST_KEYS: &str = "1 M keys";

fn keyed<S, B>(mut service: S, keys: std::rc::Rc<Vec<HeaderValue>>) -> Run
where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + 'static,
    B: 'static,
{
    let request = request();
    let mut next = 0;
    Box::new(move |requests| {
        for _ in 0..requests {
            let mut request = again(&request);
            request.headers_mut().insert(&API_KEY, keys[next].clone());
            // A step that has no factor in common with a power of ten: buckets that are asked in turn are not neighbours.
            next = (next + 700_001) % keys.len();
            assert_eq!(answer(&mut service, request).status(), StatusCode::OK);
        }
    })
}

fn by_keys(keys: usize) -> Vec<Run> {
    let key = |i: usize| HeaderValue::try_from(format!("sk_live_{:032x}", i * 0x9e37_79b9)).expect("a key");
    let all = std::rc::Rc::new((0..keys).map(key).collect::<Vec<_>>());
    let rule = Rule::Plenty;
    let mut runs = vec![
        keyed(ok(), all.clone()),
        keyed(peer::memory(rule, true, HeaderStyle::Off).layer(ok()), all.clone()),
        keyed(peer::tower_governor(rule).layer(ok()), all.clone()),
        keyed(peer::axum_governor(rule).layer(ok()), all),
    ];
    runs.iter_mut().for_each(|run| run(keys));
    runs
}

/// tower_governor knows one limit: it stands there as many times.
fn by_limits(limits: usize) -> Vec<Run> {
    let rule = Rule::Plenty;
    let governor = || peer::tower_governor(rule);
    let ours = (1..limits).fold(peer::memory(rule, true, HeaderStyle::Off), |layer, i| layer.and(peer::limit(i, rule)));
    vec![
        run(ok(), rule),
        run(ours.layer(ok()), rule),
        match limits {
            1 => run(governor().layer(ok()), rule),
            2 => run(governor().layer(governor().layer(ok())), rule),
            _ => run(governor().layer(governor().layer(governor().layer(governor().layer(ok())))), rule),
        },
        run(peer::axum_governor_stack(rule, limits).layer(ok()), rule),
    ]
}

/// The peers have no costs.
fn by_routes(routes: usize) -> Vec<Run> {
    let rule = Rule::Plenty;
    let named = (1..routes).map(|i| format!("GET /collection-{i}/{{id}}")).chain(["GET /search/{id}".to_owned()]);
    let table = named.fold(CostTable::new(1), |table, route| table.route(&route, 2));
    let limit = peer::limit(0, rule).cost(table);
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit).headers(HeaderStyle::Off);
    vec![run(ok(), rule), run(layer.layer(ok()), rule)]
}

pub(crate) fn measure_growth(rounds: usize) -> Vec<Growth> {
    // Short, so that most samples are not interrupted on a busy machine.
    const SAMPLE: usize = 500;
    let runtime = runtime();
    let _inside = runtime.enter();
    let cases: [(_, Runs, _); 9] = [
        ("1 key", by_keys, 1),
        ("10 k keys", by_keys, 10_000),
        (MOST_KEYS, by_keys, 1_000_000),
        ("1 limit", by_limits, 1),
        ("2 limits", by_limits, 2),
        ("4 limits", by_limits, 4),
        ("1 route", by_routes, 1),
        ("10 routes", by_routes, 10),
        ("1 k routes", by_routes, 1_000),
    ];
    let mut all: Vec<_> =
        cases.iter().map(|(name, make, size)| (Growth { name, times: Default::default() }, make(*size))).collect();
    // The first round warms up.
    for round in 0..=rounds {
        for (growth, runs) in &mut all {
            for (run, times) in runs.iter_mut().zip(&mut growth.times) {
                let started = Instant::now();
                run(SAMPLE);
                times.extend((round > 0).then(|| started.elapsed().as_nanos() as f64 / SAMPLE as f64));
            }
        }
    }
    all.into_iter().map(|(growth, _)| growth).collect()
}

impl Growth {
    fn added(&self, who: usize) -> Vec<f64> {
        self.times[who].iter().zip(&self.times[0]).map(|(own, bare)| own - bare).collect()
    }
}

pub(crate) fn print(both: &Both) {
    if both[0][0].counts.is_none() {
        println!("no instructions: valgrind is not installed, or cannot run this program\n");
    }
    println!(
        "what a layer adds to a request, one hot key, in memory: instructions / allocations / ns (times ours with fields)\n"
    );
    println!("| | key | fields | allowed | x ours | denied | x ours |\n|---|---|---|---|---|---|---|");
    for (i, case) in CASES.iter().enumerate().skip(1) {
        let column = |all: &[Measured]| {
            let (own, ours) = (added(all, i), added(all, OURS_FIELDS));
            let times = median(own.times.clone());
            format!(
                "{:.0} / {:.0} / {times:.0} | {} / {}",
                own.instructions,
                own.allocations,
                figure(own.instructions / ours.instructions),
                figure(ratio(&own.times, &ours.times)),
            )
        };
        println!("| {} | {} | {} | {} | {} |", case.who, case.key, case.fields, column(&both[0]), column(&both[1]));
    }
    println!(
        "\nlimitador: windows, no buckets; a middleware of a few lines around it. axum_gcra: for axum 0.7, whose handler it has here.\n"
    );
}

pub(crate) fn print_growth(all: &[Growth]) {
    println!("ns that a layer adds as something grows (by header, no fields; axum-governor has always fields)\n");
    println!("| | {} | {} | {} | ours / tower_governor |\n|---|---|---|---|---|", GROWN[1], GROWN[2], GROWN[3]);
    for of in all {
        let medians = [1, 2, 3].map(|who| figure(median(of.added(who))));
        println!("| {} | {} | {} |", of.name, medians.join(" | "), figure(ratio(&of.added(1), &of.added(2))));
    }
    println!();
}

/// For the table of all.
pub(crate) fn rows(both: &Both, growth: &[Growth]) -> Vec<Row> {
    let row = |what: &str, denied: bool, ours: usize, peer: usize, target: Option<Target>| {
        let all = &both[usize::from(denied)];
        let (own, other) = (added(all, ours).instructions, added(all, peer).instructions);
        let peer = &CASES[peer];
        Row { what: what.to_owned(), ours: own, peer: (peer.who.to_owned(), other), ratio: own / other, target }
    };
    let mut rows = vec![
        row("instructions: allowed, peer address", false, OURS_BY_PEER, 4, Some(Target::AtMost(1.0))),
        row("instructions: allowed, header", false, OURS_PLAIN, GOVERNOR_PLAIN, Some(Target::AtMost(1.0))),
        row("instructions: allowed, header, fields", false, OURS_FIELDS, GOVERNOR_FIELDS, Some(Target::AtMost(1.0))),
        row("instructions: allowed, header, fields", false, OURS_FIELDS, 7, None),
        row("instructions: allowed, header", false, OURS_PLAIN, 8, None),
        row("instructions: allowed, header, fields", false, OURS_FIELDS, 9, None),
        row("instructions: denied, header, fields", true, OURS_FIELDS, GOVERNOR_FIELDS, Some(Target::AtMost(1.0))),
        row("instructions: denied, header, fields", true, OURS_FIELDS, 7, None),
    ];
    let (denied_ours, denied_peer) = (added(&both[1], OURS_FIELDS), added(&both[1], GOVERNOR_FIELDS));
    rows.push(Row {
        what: "ns: denied, header, fields".to_owned(),
        ours: median(denied_ours.times.clone()),
        peer: (TOWER_GOVERNOR.to_owned(), median(denied_peer.times.clone())),
        ratio: ratio(&denied_ours.times, &denied_peer.times),
        target: Some(Target::AtMost(1.0 / 9.0)),
    });
    if let Some(most) = growth.iter().find(|of| of.name == MOST_KEYS) {
        rows.push(Row {
            what: format!("ns: allowed, {MOST_KEYS}"),
            ours: median(most.added(1)),
            peer: (TOWER_GOVERNOR.to_owned(), median(most.added(2))),
            ratio: ratio(&most.added(1), &most.added(2)),
            target: Some(Target::AtMost(0.6)),
        });
    }
    rows
}

/// Instructions of each layer, in relation to ours; nanoseconds where they are not known. Without limitador, beside which
/// all others would be flat.
pub(crate) fn chart(both: &Both) -> Chart {
    let shown = [OURS_FIELDS, OURS_PLAIN, GOVERNOR_FIELDS, GOVERNOR_PLAIN, 7, 8];
    let counted = both[0][0].counts.is_some();
    let of = |all: &[Measured], case: usize| {
        let (own, ours) = (added(all, case), added(all, OURS_FIELDS));
        if counted { own.instructions / ours.instructions } else { ratio(&own.times, &ours.times) }
    };
    let series = |name: &str, colour: usize, shift: f64| {
        let points = shown.iter().enumerate().map(|(at, case)| (at as f64 + shift, of(&both[colour], *case))).collect();
        Series { name: name.to_owned(), form: Form::Bars(0.36), colour, points }
    };
    let names =
        ["ours", "ours, no fields", "tower_governor, fields", "tower_governor", "axum-governor, fields", "axum_gcra"];
    let unit = if counted { "instructions" } else { "time" };
    bars(
        &format!("What a layer adds to a request in memory: {unit}, ours with its fields is 1"),
        &names,
        &format!("{unit}, times ours"),
        vec![series("allowed", 0, -0.19), series("denied", 1, 0.19)],
    )
}

/// Bars beside each other, a panel that fits the highest.
pub(crate) fn bars(title: &str, names: &[&str], what: &str, mut series: Vec<Series>) -> Chart {
    series.iter_mut().for_each(|series| series.points.retain(|point| point.1.is_finite()));
    let values = || series.iter().flat_map(|series| &series.points).map(|point| point.1);
    let most = values().fold(0.1, f64::max);
    let step = [0.125, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0];
    let step = step.into_iter().find(|step| most / step <= 8.0).unwrap_or(1_000.0);
    let said = series.iter().map(|series| {
        let of: Vec<_> =
            series.points.iter().map(|at| format!("{} {:.2}", names[at.0.round() as usize], at.1)).collect();
        format!("{}: {}.", series.name, of.join(", "))
    });
    Chart {
        title: title.to_owned(),
        description: said.collect::<Vec<_>>().join(" "),
        x: Axis::names("", names),
        panels: vec![Panel { name: what.to_owned(), height: 220.0, to: (most / step).ceil() * step, step, series }],
    }
}

/// How cost grows.
pub(crate) fn chart_growth(all: &[Growth]) -> Chart {
    let names: Vec<_> = all.iter().map(|of| of.name).collect();
    let series = |who: usize| Series {
        name: GROWN[who].to_owned(),
        form: Form::Bars(0.26),
        colour: who - 1,
        points: all
            .iter()
            .enumerate()
            .map(|(at, of)| (at as f64 + (who as f64 - 2.0) * 0.28, median(of.added(who)) / 1_000.0))
            .collect(),
    };
    bars(
        "What a decision in memory costs as keys, limits and routes are added",
        &names,
        "microseconds added to a request",
        [1, 2, 3].map(series).into(),
    )
}

/// The program.
pub fn main() {
    print(&measure(crate::number("ROUNDS", 101)));
    print_growth(&measure_growth(crate::number("ROUNDS", 301)));
}
