//! Whole axum servers over loopback, each with one peer's layer in front of the same handler: in memory and on Redis.
//!
//! Each server is a process of its own, this program started again, on a runtime with all cores; the client is one thread
//! here. All are loaded in turn, round after round. CPU time is that of the server's process, user and system.

use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use axum::Router;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use tower_token_bucket::{HeaderStyle, RedisStore};

use crate::chart::{Chart, Form, Series};
use crate::load::{Outcome, Plan, Until, drive, requests};
use crate::peer::{
    self, AXUM_GOVERNOR, BLOG, Design, LIMITADOR, OURS, REDIS_RATE, Rule, SPRING, TOWER_GOVERNOR,
    TOWER_RATE_LIMIT_REDIS,
};
use crate::request::{Valgrind, bars};
use crate::server::Server;
use crate::table::{Row, Target, figure, median, ratio};

/// Names the server that this process is to be.
const SERVE: &str = "PEERS_SERVE";
const CONNECTIONS: usize = 32;
/// Of those that are allowed, and of those that are refused: a flood comes from few.
const KEYS: [usize; 2] = [1_000, 20];
/// Requests that valgrind counts, and twice that.
const COUNTED: usize = 300;

const ALONE: &str = "handler alone";
const OURS_PLAIN: &str = "tower-token-bucket, no fields";
const GOVERNOR_FIELDS: &str = "tower_governor 0.8.0, fields";

/// In memory.
const MEMORY: [&str; 7] = [ALONE, OURS, OURS_PLAIN, TOWER_GOVERNOR, GOVERNOR_FIELDS, AXUM_GOVERNOR, LIMITADOR];
const REDIS: [&str; 5] = [OURS, TOWER_RATE_LIMIT_REDIS, BLOG, REDIS_RATE, SPRING];

async fn app(who: &str, rule: Rule, url: Option<&str>) -> Router {
    let app = Router::new().route("/", get(|| async { "ok" }));
    match (who, url) {
        (ALONE, _) => app,
        (OURS, None) => app.layer(peer::memory(rule, true, HeaderStyle::Draft11)),
        (OURS_PLAIN, None) => app.layer(peer::memory(rule, true, HeaderStyle::Off)),
        (TOWER_GOVERNOR, None) => app.layer(peer::tower_governor(rule)),
        (GOVERNOR_FIELDS, None) => app.layer(peer::tower_governor_with_headers(rule)),
        (AXUM_GOVERNOR, None) => app.layer(peer::axum_governor(rule)),
        (LIMITADOR, None) => app.layer(from_fn_with_state(peer::limitador(rule), peer::by_limitador)),
        (OURS, Some(url)) => {
            let store = RedisStore::connect(url).await.expect("a URL");
            app.layer(peer::ours(store, rule, true, HeaderStyle::Draft11))
        }
        (TOWER_RATE_LIMIT_REDIS, Some(url)) => app.layer(peer::tower_rate_limit_redis(rule, url).await),
        (_, Some(url)) => app.layer(from_fn_with_state(Design::new(who, rule, url).await, peer::by_design)),
        (who, None) => unreachable!("{who} needs a Redis"),
    }
}

/// Whether this process is a server: it says its address, and serves until its standard input ends.
pub(crate) fn child() -> bool {
    let Ok(what) = std::env::var(SERVE) else { return false };
    let mut words = what.split('|');
    let mut next = || words.next().filter(|word| !word.is_empty());
    let who = next().expect("who");
    let rule = if next() == Some("denied") { Rule::Scarce } else { Rule::Served };
    let counted = next() == Some("counted");
    let url = next();
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if counted {
        builder = tokio::runtime::Builder::new_current_thread();
    }
    let runtime = builder.enable_all().build().expect("a runtime");
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let app = runtime.block_on(app(who, rule, url));
    counted_serving(&runtime, app);
    true
}

/// What valgrind counts: not what layers do when they are made, such as finding out how fast the clock is.
#[inline(never)]
fn counted_serving(runtime: &tokio::runtime::Runtime, app: Router) {
    runtime.block_on(async {
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        println!("{}", listener.local_addr().expect("an address"));
        axum::serve(listener, app).await.expect("it serves");
    });
}

/// A server's process.
struct Serving {
    process: Child,
    address: SocketAddr,
    /// Where it is counted.
    valgrind: Option<Valgrind>,
}

impl Serving {
    fn start(who: &str, denied: bool, counted: bool, url: Option<&str>) -> Option<Self> {
        let mut valgrind = if counted { Some(Valgrind::new("counted_serving")?) } else { None };
        let mut plain = Command::new(std::env::current_exe().ok()?);
        let command = valgrind.as_mut().map_or(&mut plain, |valgrind| &mut valgrind.command);
        let denied = if denied { "denied" } else { "allowed" };
        let counted = if counted { "counted" } else { "timed" };
        command.env(SERVE, format!("{who}|{denied}|{counted}|{}", url.unwrap_or_default()));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut()?).read_line(&mut line).ok()?;
        let address = line.trim().parse().ok()?;
        Some(Self { process, address, valgrind })
    }

    /// Time on a core of all threads, in microseconds; `None` where the system does not say.
    fn cpu(&self) -> Option<f64> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.process.id())).ok()?;
        let nanos = threads.filter_map(|thread| {
            let stat = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            stat.split(' ').next()?.parse::<f64>().ok()
        });
        Some(nanos.sum::<f64>() / 1e3)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What is known of a server, a figure for each round.
pub(crate) struct Measured {
    who: &'static str,
    on_redis: bool,
    denied: bool,
    per_second: Vec<f64>,
    /// Microseconds per request: of the server, and of Redis.
    cpu: Vec<f64>,
    redis_cpu: Vec<f64>,
    /// Commands to Redis per request.
    calls: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

/// Those that are refused have keys of their own: on Redis both servers of a peer share the buckets.
fn plan(to: SocketAddr, denied: bool, keys: usize, connections: usize, until: Until) -> Plan {
    let kind = if denied { "none" } else { "live" };
    let keys: Vec<_> = (0..keys).map(|i| format!("sk_{kind}_{i:032x}")).collect();
    Plan { to, requests: requests("localhost", "/", "x-api-key", &keys), connections, until }
}

fn commands(redis: &Server) -> f64 {
    (redis.calls("evalsha") + redis.calls("eval")) as f64
}

/// One round of a server.
fn load(runtime: &tokio::runtime::Runtime, serving: &Serving, redis: &Server, until: Until, to: &mut Measured) {
    let before = (serving.cpu(), redis.cpu(), commands(redis));
    let plan = plan(serving.address, to.denied, KEYS[usize::from(to.denied)], CONNECTIONS, until);
    let outcome: Outcome = runtime.block_on(drive(&plan)).expect("the server answers");
    let answers = outcome.latencies.len() as f64;
    let expected = if to.denied { 429 } else { 200 };
    // In the first round, the first request of each key is admitted.
    let right = to.per_second.is_empty() || outcome.statuses.keys().all(|status| *status == expected);
    assert!(right, "{}, denied {}: {:?}", to.who, to.denied, outcome.statuses);
    to.per_second.push(outcome.per_second());
    to.cpu.push(serving.cpu().zip(before.0).map_or(f64::NAN, |(after, before)| (after - before) / answers));
    to.redis_cpu.push((redis.cpu() - before.1).as_secs_f64() * 1e6 / answers);
    to.calls.push((commands(redis) - before.2) / answers);
    to.p50.push(outcome.percentile(0.5));
    to.p99.push(outcome.percentile(0.99));
}

/// Loads each server in each round for so long.
pub(crate) fn measure(rounds: usize, time: Duration) -> Vec<Measured> {
    let redis = Server::start();
    let url = redis.url();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut all = Vec::new();
    for denied in [false, true] {
        let memory = MEMORY.iter().filter(|who| !denied || **who != ALONE).map(|who| (*who, false));
        for (who, on_redis) in memory.chain(REDIS.map(|who| (who, true))) {
            let Some(serving) = Serving::start(who, denied, false, on_redis.then_some(&url)) else {
                println!("{who} does not start");
                continue;
            };
            let [per_second, cpu, redis_cpu, calls, p50, p99] = Default::default();
            all.push((serving, Measured { who, on_redis, denied, per_second, cpu, redis_cpu, calls, p50, p99 }));
        }
    }
    // The first round warms up, and drains the buckets of one token.
    for round in 0..=rounds {
        let until = if round == 0 { Until::Requests(2 * KEYS[0] / CONNECTIONS + 1) } else { Until::Time(time) };
        all.iter_mut().for_each(|(serving, measured)| load(&runtime, serving, &redis, until, measured));
    }
    let cold = |(_, mut of): (Serving, Measured)| {
        for figures in [&mut of.per_second, &mut of.cpu, &mut of.redis_cpu, &mut of.calls, &mut of.p50, &mut of.p99] {
            figures.remove(0);
        }
        of
    };
    all.into_iter().map(cold).collect()
}

/// Instructions of a whole request, in memory, by server; `None` where valgrind does not run.
pub(crate) fn instructions() -> Vec<(&'static str, Option<f64>)> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let count = |who: &str, requests: usize| -> Option<f64> {
        let mut serving = Serving::start(who, false, true, None)?;
        let plan = plan(serving.address, false, 1, 1, Until::Requests(requests));
        runtime.block_on(drive(&plan)).ok()?;
        drop(serving.process.stdin.take());
        serving.process.wait().ok()?;
        Some(serving.valgrind.as_ref()?.counts()?.instructions)
    };
    let each = |who| Some((count(who, 2 * COUNTED)? - count(who, COUNTED)?) / COUNTED as f64);
    MEMORY.map(|who| (who, each(who))).into()
}

fn find<'a>(all: &'a [Measured], who: &str, on_redis: bool, denied: bool) -> Option<&'a Measured> {
    all.iter().find(|it| it.who == who && it.on_redis == on_redis && it.denied == denied)
}

pub(crate) fn print(all: &[Measured], instructions: &[(&str, Option<f64>)]) {
    println!(
        "whole axum servers over loopback, {} keys (refused: {}), {CONNECTIONS} connections; ratios to ours with its fields in the \
         same place\n",
        KEYS[0], KEYS[1],
    );
    println!(
        "| buckets | answers | | req/s | x ours | server CPU us | x ours | Redis CPU us | calls | p50 us | p99 us |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for of in all {
        let Some(ours) = find(all, OURS, of.on_redis, of.denied) else { continue };
        let place = if of.on_redis { "Redis" } else { "memory" };
        let redis = if of.on_redis {
            format!("{} | {}", figure(median(of.redis_cpu.clone())), figure(median(of.calls.clone())))
        } else {
            " | ".to_owned()
        };
        println!(
            "| {place} | {} | {} | {:.0} | {} | {} | {} | {redis} | {:.0} | {:.0} |",
            if of.denied { "429" } else { "200" },
            of.who,
            median(of.per_second.clone()),
            figure(ratio(&of.per_second, &ours.per_second)),
            figure(median(of.cpu.clone())),
            figure(ratio(&of.cpu, &ours.cpu)),
            median(of.p50.clone()),
            median(of.p99.clone()),
        );
    }
    println!("\nnot here: axum_gcra (for axum 0.7), limitador on Redis (0.14.0 without RocksDB does not build).\n");
    let alone = instructions.iter().find(|(who, _)| *who == ALONE).and_then(|(_, count)| *count);
    let Some(alone) = alone else {
        println!("no instructions: valgrind is not installed, or cannot run this program\n");
        return;
    };
    println!("| one request, in memory, allowed | instructions | added |\n|---|---|---|");
    for (who, count) in instructions {
        let count = count.unwrap_or(f64::NAN);
        println!("| {who} | {count:.0} | {:+.0} |", count - alone);
    }
    println!();
}

/// For the table of all.
pub(crate) fn rows(all: &[Measured], instructions: &[(&str, Option<f64>)]) -> Vec<Row> {
    let mut rows = Vec::new();
    let count = |who: &str| instructions.iter().find(|of| of.0 == who).and_then(|of| of.1).unwrap_or(f64::NAN);
    let added = count(OURS) - count(ALONE);
    rows.push(Row {
        what: "instructions added to a whole request, with fields".to_owned(),
        ours: added,
        peer: ("target".to_owned(), 3_600.0),
        ratio: added / 3_600.0,
        target: Some(Target::AtMost(1.0)),
    });
    let mut row = |what: &str, ours: Option<&Measured>, peer: Option<&Measured>, target: Option<Target>| {
        let Some((ours, peer)) = ours.zip(peer) else { return };
        rows.push(Row {
            what: format!("req/s, {what}"),
            ours: median(ours.per_second.clone()),
            peer: (peer.who.to_owned(), median(peer.per_second.clone())),
            ratio: ratio(&ours.per_second, &peer.per_second),
            target,
        });
    };
    for who in [GOVERNOR_FIELDS, AXUM_GOVERNOR, LIMITADOR] {
        row("memory, allowed", find(all, OURS, false, false), find(all, who, false, false), Some(Target::AtLeast(1.0)));
    }
    for denied in [false, true] {
        let what = if denied { "Redis, denied" } else { "Redis, allowed" };
        for who in REDIS.into_iter().skip(1) {
            let target = Some(Target::AtLeast(1.0));
            row(what, find(all, OURS, true, denied), find(all, who, true, denied), target);
        }
    }
    for who in REDIS.into_iter().skip(1) {
        let target = Some(Target::AtLeast(1.0));
        let what = "ours in memory, peer on Redis, allowed";
        row(what, find(all, OURS, false, false), find(all, who, true, false), target);
    }
    let mut cpu = |what: &str, of: fn(&Measured) -> &Vec<f64>, on_redis: bool, denied: bool, peers: &[&'static str]| {
        for who in peers {
            let pair = find(all, OURS, on_redis, denied).zip(find(all, who, on_redis, denied));
            let Some((ours, peer)) = pair else { continue };
            rows.push(Row {
                what: what.to_owned(),
                ours: median(of(ours).clone()),
                peer: ((*who).to_owned(), median(of(peer).clone())),
                ratio: ratio(of(ours), of(peer)),
                target: None,
            });
        }
    };
    let local = [GOVERNOR_FIELDS, AXUM_GOVERNOR, LIMITADOR];
    cpu("us of server CPU per request, memory, allowed", |of| &of.cpu, false, false, &local);
    cpu("us of server CPU per request, memory, denied", |of| &of.cpu, false, true, &local);
    cpu("us of server CPU per request, Redis, allowed", |of| &of.cpu, true, false, &REDIS[1..]);
    cpu("us of server CPU per request, Redis, denied", |of| &of.cpu, true, true, &REDIS[1..]);
    cpu("us of Redis CPU per request, allowed", |of| &of.redis_cpu, true, false, &REDIS[1..]);
    cpu("us of Redis CPU per request, denied", |of| &of.redis_cpu, true, true, &REDIS[1..]);
    if let Some(ours) = find(all, OURS, true, true) {
        let calls = median(ours.calls.clone());
        rows.push(Row {
            what: "calls to Redis per refused request".to_owned(),
            ours: calls,
            peer: ("one call each".to_owned(), 1.0),
            ratio: calls,
            target: Some(Target::AtMost(0.01)),
        });
    }
    rows
}

/// CPU time per request, in relation to ours in the same place, and that of Redis in microseconds: what is left of a second
/// by others on the machine changes requests per second, and these hardly.
pub(crate) fn chart(all: &[Measured], on_redis: bool) -> Chart {
    let shown: &[&str] = if on_redis { &REDIS } else { &MEMORY };
    let series = |denied: bool, of: fn(&Measured, &Measured) -> f64| {
        let figure = |who: &str| {
            let found = find(all, who, on_redis, denied).zip(find(all, OURS, on_redis, denied));
            found.map_or(f64::NAN, |(own, ours)| of(own, ours))
        };
        let shift = if denied { 0.19 } else { -0.19 };
        let points = shown.iter().enumerate().map(|(at, who)| (at as f64 + shift, figure(who))).collect();
        let name = if denied { "denied" } else { "allowed" };
        Series { name: name.to_owned(), form: Form::Bars(0.36), colour: usize::from(denied), points }
    };
    let both = |of| vec![series(false, of), series(true, of)];
    let names: Vec<_> = shown.iter().map(|who| short(who)).collect();
    let place = if on_redis { "on Redis" } else { "in memory" };
    let title = format!("CPU time of one request to a whole axum server, buckets {place}");
    let mut chart =
        bars(&title, &names, "CPU time of the server; ours is 1", both(|of, ours| ratio(&of.cpu, &ours.cpu)));
    if on_redis {
        let below = bars("", &names, "CPU time of Redis, us", both(|of, _| median(of.redis_cpu.clone())));
        chart.description = format!("Server: {} Redis: {}", chart.description, below.description);
        chart.panels.extend(below.panels);
    }
    chart
}

/// A name that fits under a bar.
fn short(who: &'static str) -> &'static str {
    match who {
        OURS => "ours",
        OURS_PLAIN => "ours, no fields",
        TOWER_GOVERNOR => "tower_governor",
        GOVERNOR_FIELDS => "the same, fields",
        AXUM_GOVERNOR => "axum-governor",
        LIMITADOR => "limitador",
        TOWER_RATE_LIMIT_REDIS => "tower-rate-limit-redis",
        REDIS_RATE => "redis_rate",
        SPRING => "Spring",
        who => who,
    }
}

/// The program.
pub fn main() {
    let time = Duration::from_millis(crate::number("MILLIS", 500) as u64);
    let measured = measure(crate::number("ROUNDS", 11), time);
    print(&measured, &instructions());
}
