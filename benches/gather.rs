//! What checks cost that travel together: the store against one EVALSHA for each decision, sent with redis-rs on one
//! connection, and on four with as many in flight together, since what a server's call costs by itself depends on how
//! many commands it reads at a time. Denials are not remembered here, so that each check is asked.
//!
//! Run with `cargo bench --bench gather`; `ROUNDS=101` for quieter figures, `THREADS=1` for another runtime. All variants
//! in turn, round after round, on one server. Times depend on the machine and its mood, so a ratio is taken in each
//! round, against the raw calls of that round, and the median is shown. The client's CPU time is read from `/proc`.

#[path = "support/calls.rs"]
mod calls;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use calls::{ALLOWED, DENIED, KEYS, TOKEN_BUCKET, key, median, rounds};
use redis::Cmd;
use redis::aio::MultiplexedConnection;
use tokio::time::Instant;
use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, Quota, RedisStore, Store};

use calls::server::Server;

const TASKS: usize = 64;
/// Decisions of a variant in a round.
const DECISIONS: usize = 6_400;
const HOT: usize = 4;
const ALLOWING: Quota = Quota::per_second(10).with_capacity(1_000_000);
const DENYING: Quota = Quota::per_hour(100);

/// Where decisions come from.
#[derive(Clone)]
enum Asked {
    Raw(MultiplexedConnection, Arc<str>),
    Store(RedisStore),
}

impl Asked {
    /// Decision `i` of one kind.
    async fn decide(&mut self, kind: Kind, i: usize) -> bool {
        let i = i % kind.keys;
        match self {
            Self::Raw(connection, sha) => {
                let mut cmd = Cmd::new();
                cmd.arg("EVALSHA").arg(&**sha).arg(1).arg(key(kind.limit(), i));
                for arg in if kind.denied { DENIED } else { ALLOWED } {
                    cmd.arg(arg);
                }
                let reply: i64 = cmd.query_async(connection).await.expect("the server answers");
                reply & 1 == 1
            }
            Self::Store(store) => store.acquire(&[kind.charge(i)]).await.expect("the server answers").is_allowed(),
        }
    }
}

#[derive(Clone, Copy)]
struct Kind {
    keys: usize,
    denied: bool,
}

impl Kind {
    fn limit(self) -> &'static str {
        if self.denied { "denied" } else { "allowed" }
    }

    fn charge(self, i: usize) -> Charge {
        static NAMES: std::sync::OnceLock<[LimitName; 2]> = std::sync::OnceLock::new();
        let name = |name| LimitName::try_new(name).expect("a name");
        let names = NAMES.get_or_init(|| [name("allowed"), name("denied")]);
        let address = BucketKey::ip(IpAddr::V4(Ipv4Addr::new(203, 0, (i / 250) as u8, (i % 250) as u8)));
        let quota = if self.denied { DENYING } else { ALLOWING };
        Charge::new(names[usize::from(self.denied)].clone(), address, quota, Amount::Take(1))
    }
}

/// What a number of decisions took.
#[derive(Clone, Copy)]
struct Cost {
    server: f64,
    client: f64,
    time: f64,
    calls: f64,
}

/// The CPU time of all threads of this process.
fn client_cpu() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let spent = tasks.filter_map(|task| {
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(spent.sum())
}

/// Decisions of so many tasks at once, and how long each took.
async fn decisions(asked: &[Asked], kind: Kind, tasks: usize, each: usize) -> Vec<Duration> {
    let mut running = tokio::task::JoinSet::new();
    for task in 0..tasks {
        let mut asked = asked[task % asked.len()].clone();
        running.spawn(async move {
            let mut took = Vec::with_capacity(each);
            for i in 0..each {
                let started = Instant::now();
                let allowed = asked.decide(kind, task * KEYS / tasks + i).await;
                took.push(started.elapsed());
                assert_eq!(allowed, !kind.denied);
            }
            took
        });
    }
    running.join_all().await.concat()
}

async fn cost(server: &Server, asked: &[Asked], kind: Kind, tasks: usize) -> Cost {
    let (calls, cpu, own, started) = (server.calls("evalsha"), server.cpu(), client_cpu(), Instant::now());
    decisions(asked, kind, tasks, DECISIONS / tasks).await;
    let (time, own) = (started.elapsed(), client_cpu() - own);
    let each = |spent: Duration| spent.as_secs_f64() * 1e6 / DECISIONS as f64;
    let calls = (server.calls("evalsha") - calls) as f64 / DECISIONS as f64;
    Cost { server: each(server.cpu() - cpu), client: each(own), time: each(time), calls }
}

async fn print_costs(server: &Server, both: &[Vec<Asked>; 2], spread: &[Asked], rounds: usize) {
    let kinds = [(KEYS, false), (KEYS, true), (HOT, false), (HOT, true)];
    let kinds = kinds.map(|(keys, denied)| Kind { keys, denied });
    let mut costs: Vec<Vec<[Cost; 3]>> = vec![Vec::new(); kinds.len()];
    let tasks = TASKS * both[0].len();
    for _ in 0..rounds {
        for (kind, costs) in kinds.iter().zip(&mut costs) {
            let raw = cost(server, &both[0], *kind, tasks).await;
            let store = cost(server, &both[1], *kind, tasks).await;
            costs.push([raw, store, cost(server, spread, *kind, tasks).await]);
        }
    }
    println!(
        "\n{} x {TASKS} tasks, {rounds} rounds of {DECISIONS} decisions, medians; us of CPU per decision\n",
        both[0].len()
    );
    println!(
        "| keys | answer | server: raw | on 4 connections | store | decisions per CPU second: x raw | x 4 connections | \
         target | client: raw | store | x raw | target | decisions/s x | calls per decision |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    for (kind, costs) in kinds.iter().zip(&costs) {
        let of = |figure: &dyn Fn(&[Cost; 3]) -> f64| median(costs.iter().map(figure).collect());
        let target = match (kind.keys == HOT, kind.denied) {
            (true, _) => ">= 10",
            (false, false) => ">= 1.8",
            (false, true) => ">= 3",
        };
        println!(
            "| {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {target} | {:.2} | {:.2} | {:.2} | <= 1.2 | {:.2} | {:.3} |",
            kind.keys,
            kind.limit(),
            of(&|[raw, ..]| raw.server),
            of(&|[.., spread]| spread.server),
            of(&|[_, store, _]| store.server),
            of(&|[raw, store, _]| raw.server / store.server),
            of(&|[_, store, spread]| spread.server / store.server),
            of(&|[raw, ..]| raw.client),
            of(&|[_, store, _]| store.client),
            of(&|[raw, store, _]| store.client / raw.client),
            of(&|[raw, store, _]| raw.time / store.time),
            of(&|[_, store, _]| store.calls),
        );
    }
}

fn quantile(of: &mut [Duration], q: f64) -> f64 {
    of.sort();
    of[((of.len() - 1) as f64 * q) as usize].as_secs_f64() * 1e6
}

/// One check at a time: whoever is alone waits for nobody.
async fn print_alone(both: &[Vec<Asked>; 2], rounds: usize) {
    let kind = Kind { keys: KEYS, denied: false };
    let mut took = [Vec::new(), Vec::new()];
    let mut ratios = Vec::new();
    for round in 0..rounds {
        let mut medians = [0.0; 2];
        let mut these = [Vec::new(), Vec::new()];
        for i in 0..400 {
            for which in [i & 1, 1 - (i & 1)] {
                let (mut asked, started) = (both[which][0].clone(), Instant::now());
                asked.decide(kind, round * 400 + i).await;
                these[which].push(started.elapsed());
            }
        }
        for which in 0..2 {
            medians[which] = quantile(&mut these[which], 0.5);
            took[which].append(&mut these[which]);
        }
        ratios.push(medians[1] / medians[0]);
    }
    let [raw, store] = took.map(|mut took| quantile(&mut took, 0.5));
    println!("\none check alone: raw {raw:.1} us, store {store:.1} us, {:.3} x (p50)", median(ratios));
}

async fn print_latencies(both: &[Vec<Asked>; 2], rounds: usize) {
    println!(
        "\n| in flight | keys | raw p50 us | p99 | store p50 us | p99 | p50 x | p99 x |\n|---|---|---|---|---|---|---|---|"
    );
    for (tasks, keys) in [(2, KEYS), (4, KEYS), (16, KEYS), (64, KEYS), (64, HOT), (1000, KEYS), (1000, HOT)] {
        let kind = Kind { keys, denied: false };
        let mut figures: [Vec<[f64; 2]>; 2] = Default::default();
        for _ in 0..rounds {
            for (asked, figures) in both.iter().zip(&mut figures) {
                let mut took = decisions(asked, kind, tasks, (DECISIONS / tasks).clamp(10, 1000)).await;
                figures.push([quantile(&mut took, 0.5), quantile(&mut took, 0.99)]);
            }
        }
        let of = |which: usize, i: usize| median(figures[which].iter().map(|of| of[i]).collect());
        let ratio =
            |i: usize| median(figures[1].iter().zip(&figures[0]).map(|(store, raw)| store[i] / raw[i]).collect());
        println!(
            "| {tasks} | {keys} | {:.0} | {:.0} | {:.0} | {:.0} | {:.2} | {:.2} |",
            of(0, 0),
            of(0, 1),
            of(1, 0),
            of(1, 1),
            ratio(0),
            ratio(1)
        );
    }
}

async fn raw(server: &Server) -> Asked {
    let client = redis::Client::open(server.url()).expect("a URL");
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let connection = client.get_multiplexed_async_connection_with_config(&config).await.expect("a connection");
    let sha = server.query(&["SCRIPT", "LOAD", TOKEN_BUCKET]).text().expect("a hash").to_owned();
    Asked::Raw(connection, sha.into())
}

/// What the server spends on a call that does nothing, where it reads one at a time: no decision is cheaper than that,
/// divided by how many share a call.
async fn print_floor(server: &Server, rounds: usize) {
    let Asked::Raw(mut connection, _) = raw(server).await else { return };
    let sha = server.query(&["SCRIPT", "LOAD", "return 1"]).text().expect("a hash").to_owned();
    let mut spent = Vec::new();
    for _ in 0..rounds {
        let cpu = server.cpu();
        for _ in 0..1_000 {
            let mut cmd = Cmd::new();
            let _: i64 = cmd.arg("EVALSHA").arg(&sha).arg(0).query_async(&mut connection).await.expect("an answer");
        }
        spent.push((server.cpu() - cpu).as_secs_f64() * 1e3);
    }
    let each = median(spent);
    println!(
        "\none call by itself that does nothing: {each:.1} us of the server, for each of 64 in it {:.2}",
        each / 64.0
    );
}

async fn measure(server: &Server, rounds: usize) {
    print_floor(server, rounds).await;
    let mut both = [Vec::new(), Vec::new()];
    let mut spread = Vec::new();
    for _ in 0..4 {
        spread.push(raw(server).await);
    }
    for instances in [1, 4] {
        while both[0].len() < instances {
            both[0].push(raw(server).await);
            let store = RedisStore::connect(&server.url()).await.expect("a store");
            both[1].push(Asked::Store(store.remember_denials(false)));
        }
        if let Asked::Store(store) = &both[1][0] {
            for i in 0..KEYS {
                let charge = Kind { keys: KEYS, denied: true }.charge(i);
                let debt = Charge::new(charge.limit().clone(), *charge.key(), charge.quota(), Amount::Spend(200));
                store.acquire(&[debt]).await.expect("the server answers");
            }
        }
        for denied in [false, true] {
            for asked in &both {
                decisions(asked, Kind { keys: KEYS, denied }, TASKS, 20).await;
            }
        }
        print_costs(server, &both, &spread, rounds).await;
        if instances == 1 {
            print_alone(&both, rounds).await;
            print_latencies(&both, rounds).await;
        }
    }
}

fn main() {
    let rounds = rounds(31);
    let threads = std::env::var("THREADS").ok().and_then(|threads| threads.parse().ok()).unwrap_or(2);
    let server = Server::start();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let measured = tokio::spawn(async move { measure(&server, rounds).await });
        measured.await.expect("it comes to its end");
    });
}
