//! Decisions per second of one Redis and of a cluster of three primaries, through `RedisStore`, and memory per key.
//!
//! Many tasks, each of which asks for one decision after the other. Both stores are asked in turn, round after round. On a
//! machine with fewer cores than servers the decisions per second say little; CPU time of Redis per decision does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, Quota, RedisStore, Store};

use crate::calls::{CONNECTIONS, PIPELINE, TOKEN_BUCKET};
use crate::server::{Server, encode};
use crate::table::{Row, figure, median, ratio};
use crate::topology::Cluster;

/// Tasks that ask at the same time.
const TASKS: [usize; 2] = [64, 256];
/// Identities: many, and a few that all ask for.
const IDENTITIES: [usize; 2] = [10_000, 4];

fn charges(identities: usize) -> Arc<Vec<[Charge; 1]>> {
    let name = LimitName::try_new("per-key").expect("a name");
    let quota = Quota::per_second(100_000).with_capacity(1_000_000);
    let of = |i: usize| [Charge::new(name.clone(), BucketKey::id((i as u64).to_le_bytes()), quota, Amount::Take(1))];
    Arc::new((0..identities).map(of).collect())
}

/// Figures of one store, of each round.
#[derive(Default)]
pub(crate) struct Measured {
    pub(crate) per_second: Vec<f64>,
    /// Microseconds of Redis, of all servers together, per decision.
    pub(crate) cpu: Vec<f64>,
    /// Script calls per decision.
    calls: Vec<f64>,
    /// The share of the decisions' CPU time that fell to the busiest server.
    busiest: Vec<f64>,
    /// Bytes to and from Redis per decision.
    bytes: Vec<f64>,
    p50: Vec<f64>,
    failed: usize,
}

async fn ask(store: RedisStore, tasks: usize, charges: Arc<Vec<[Charge; 1]>>, time: Duration) -> (Vec<f64>, usize) {
    let (next, started) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let all: Vec<_> = (0..tasks)
        .map(|_| {
            let (store, charges, next) = (store.clone(), charges.clone(), next.clone());
            tokio::spawn(async move {
                let (mut took, mut failed) = (Vec::new(), 0);
                while started.elapsed() < time {
                    let sent = Instant::now();
                    let charge = &charges[next.fetch_add(1, Relaxed) % charges.len()];
                    match store.acquire(charge).await {
                        Ok(decision) if decision.is_allowed() => took.push(sent.elapsed().as_secs_f64() * 1e6),
                        _ => failed += 1,
                    }
                }
                (took, failed)
            })
        })
        .collect();
    let (mut took, mut failed) = (Vec::new(), 0);
    for task in all {
        let (of, without) = task.await.expect("no task panics");
        took.extend(of);
        failed += without;
    }
    (took, failed)
}

/// A number of `INFO`.
fn info(server: &Server, name: &str) -> f64 {
    let info = server.query(&["INFO", "ALL"]);
    let line = info.text().and_then(|info| info.lines().find_map(|line| line.strip_prefix(name)));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or(f64::NAN)
}

async fn round(
    store: &RedisStore,
    servers: &[&Server],
    tasks: usize,
    identities: usize,
    time: Duration,
    to: &mut Measured,
) {
    let cpu = || servers.iter().map(|server| server.cpu().as_secs_f64() * 1e6).collect::<Vec<_>>();
    let calls = || servers.iter().map(|server| server.calls("evalsha") + server.calls("eval")).sum::<u64>() as f64;
    let bytes = || {
        let of = |server: &&Server| -> f64 {
            info(server, "total_net_input_bytes:") + info(server, "total_net_output_bytes:")
        };
        servers.iter().map(of).sum::<f64>()
    };
    let (cpu_before, calls_before, bytes_before, started) = (cpu(), calls(), bytes(), Instant::now());
    let (took, failed) = ask(store.clone(), tasks, charges(identities), time).await;
    let (elapsed, decisions) = (started.elapsed().as_secs_f64(), took.len() as f64);
    let spent: Vec<_> = cpu().iter().zip(&cpu_before).map(|(after, before)| after - before).collect();
    let total: f64 = spent.iter().sum();
    to.per_second.push(decisions / elapsed);
    to.cpu.push(total / decisions);
    to.calls.push((calls() - calls_before) / decisions);
    to.bytes.push((bytes() - bytes_before) / decisions);
    to.busiest.push(spent.iter().copied().fold(0.0, f64::max) / total);
    to.p50.push(median(took));
    to.failed += failed;
}

/// What is asked: one server, a cluster of one primary, which shows what a cluster costs by itself, and one of three.
const SERVERS: [&str; 3] = ["1", "cluster of 1", "cluster of 3"];

/// Tasks, identities, and what each of [`SERVERS`] made of them.
pub(crate) struct Case {
    tasks: usize,
    identities: usize,
    measured: [Measured; 3],
}

pub(crate) fn measure(rounds: usize, time: Duration) -> Vec<Case> {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let (server, clusters) = (Server::start(), [1, 3].map(|primaries| Cluster::start(primaries, 0)));
    let nodes: [Vec<_>; 3] = [vec![&server], clusters[0].nodes.iter().collect(), clusters[1].nodes.iter().collect()];
    runtime.block_on(async {
        let stores = [
            RedisStore::connect(&server.url()).await.expect("a URL"),
            RedisStore::cluster(clusters[0].urls()).await.expect("URLs"),
            RedisStore::cluster(clusters[1].urls()).await.expect("URLs"),
        ];
        let mut cases: Vec<_> = IDENTITIES
            .iter()
            .flat_map(|identities| TASKS.iter().map(move |tasks| (*tasks, *identities)))
            .map(|(tasks, identities)| Case { tasks, identities, measured: Default::default() })
            .collect();
        // The first round connects and warms up.
        for i in 0..=rounds {
            for case in &mut cases {
                for ((store, nodes), to) in stores.iter().zip(&nodes).zip(&mut case.measured) {
                    round(store, nodes, case.tasks, case.identities, time, to).await;
                    if i == 0 {
                        *to = Measured::default();
                    }
                }
            }
        }
        cases
    })
}

/// How many keys: they fill a table of Redis as far as a million does, with an eighth of the time.
const FILLED: usize = 125_000;

/// What a key is like, its script, and the arguments of call `i`.
struct Kept {
    name: &'static str,
    script: &'static str,
    keys: fn(usize) -> Vec<String>,
    args: &'static [&'static str],
}

/// 50 of 100 tokens are taken, that refill at 100 per hour: no key expires meanwhile.
const KEPT: [Kept; 5] = [
    Kept {
        name: "ours, by address",
        script: TOKEN_BUCKET,
        keys: |i| vec![format!("tb:v1:{{ip:10.{}.{}.{}}}:per-key", i >> 16, (i >> 8) & 255, i & 255)],
        args: &["take", "1800000000", ":100:1:36000000:", "3600000000", "1"],
    },
    Kept {
        name: "ours, by API key",
        script: TOKEN_BUCKET,
        keys: |i| vec![format!("tb:v1:{{key:{:032x}}}:per-key", i as u128 * 0x9e37_79b9_7f4a_7c15)],
        args: &["take", "1800000000", ":100:1:36000000:", "3600000000", "1"],
    },
    Kept {
        name: "redis_rate's design, by address",
        script: include_str!("../../scripts/redis_rate.lua"),
        keys: |i| vec![format!("rate:10.{}.{}.{}", i >> 16, (i >> 8) & 255, i & 255)],
        args: &["100", "100", "3600", "50"],
    },
    Kept {
        name: "Spring's design, by address",
        script: include_str!("../../scripts/spring.lua"),
        keys: |i| {
            let key = format!("request_rate_limiter.{{10.{}.{}.{}}}", i >> 16, (i >> 8) & 255, i & 255);
            vec![key.clone() + ".tokens", key + ".timestamp"]
        },
        args: &["0.027", "100", "50"],
    },
    Kept {
        name: "the usual script, by address",
        script: include_str!("../../scripts/blog.lua"),
        keys: |i| vec![format!("rate_limit:10.{}.{}.{}", i >> 16, (i >> 8) & 255, i & 255)],
        args: &["100", "0.027", "1764456789.123456", "50"],
    },
];

/// Megabytes that a million keys take.
pub(crate) fn memory() -> Vec<(&'static str, f64)> {
    let of = |kept: &Kept| {
        let server = Server::start();
        let sha = server.query(&["SCRIPT", "LOAD", kept.script]).text().expect("a hash").to_owned();
        let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| server.connect()).collect();
        let fill = |connections: &mut Vec<crate::server::Connection>, range: std::ops::Range<usize>| {
            let all: Vec<_> = range.collect();
            for turn in all.chunks(CONNECTIONS * PIPELINE) {
                for (connection, of) in connections.iter_mut().zip(turn.chunks(PIPELINE)) {
                    let mut bytes = Vec::new();
                    for i in of {
                        let keys = (kept.keys)(*i);
                        let mut command = vec!["EVALSHA".to_owned(), sha.clone(), keys.len().to_string()];
                        command.extend(keys);
                        command.extend(kept.args.iter().map(|arg| (*arg).to_owned()));
                        encode(&mut bytes, &command);
                    }
                    connection.send(&bytes).expect("the server listens");
                }
                for (connection, of) in connections.iter_mut().zip(turn.chunks(PIPELINE)) {
                    of.iter().for_each(|_| drop(connection.receive().expect("the server answers")));
                }
            }
        };
        // Buffers and the script are there before.
        fill(&mut connections, FILLED..FILLED + CONNECTIONS * PIPELINE);
        server.query(&["FLUSHALL"]);
        let before = info(&server, "used_memory:");
        fill(&mut connections, 0..FILLED);
        let size = server.query(&["DBSIZE"]).int();
        assert_eq!(size, Some((FILLED * (kept.keys)(0).len()) as i64), "{}: keys are missing", kept.name);
        (kept.name, (info(&server, "used_memory:") - before) / FILLED as f64)
    };
    KEPT.iter().map(of).collect()
}

pub(crate) fn print(cases: &[Case], memory: &[(&str, f64)]) {
    println!("one Redis, and clusters of one and of three primaries, through RedisStore; allowed\n");
    println!(
        "| identities | tasks | servers | decisions/s here | p50 us | calls per decision | bytes | Redis CPU us per decision | a core can | all cores can | busiest | failed |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    for case in cases {
        for (servers, of) in SERVERS.iter().zip(&case.measured) {
            let (cpu, busiest) = (median(of.cpu.clone()), median(of.busiest.clone()));
            println!(
                "| {} | {} | {servers} | {:.0} | {:.0} | {:.3} | {:.0} | {} | {:.0} | {:.0} | {:.0} % | {} |",
                case.identities,
                case.tasks,
                median(of.per_second.clone()),
                median(of.p50.clone()),
                median(of.calls.clone()),
                median(of.bytes.clone()),
                figure(cpu),
                1e6 / cpu,
                // All of them, once the busiest has no time left.
                1e6 / (cpu * busiest),
                busiest * 100.0,
                of.failed,
            );
        }
    }
    println!("\n| memory of Redis | bytes per key, MB per million keys |\n|---|---|");
    memory.iter().for_each(|(name, bytes)| println!("| {name} | {bytes:.0} |"));
    println!();
}

/// For the table of all.
pub(crate) fn rows(cases: &[Case], memory: &[(&'static str, f64)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for case in cases.iter().filter(|case| case.tasks == TASKS[0]) {
        let [one, _, three] = &case.measured;
        rows.push(Row {
            what: format!("us of Redis CPU per decision, {} identities, cluster of 3", case.identities),
            ours: median(three.cpu.clone()),
            peer: ("one server".to_owned(), median(one.cpu.clone())),
            ratio: ratio(&three.cpu, &one.cpu),
            target: None,
        });
    }
    if let Some((ours, others)) = memory.split_first() {
        for (name, bytes) in others.iter().skip(1) {
            rows.push(Row {
                what: "bytes per key in Redis".to_owned(),
                ours: ours.1,
                peer: ((*name).to_owned(), *bytes),
                ratio: ours.1 / bytes,
                target: None,
            });
        }
    }
    rows
}

/// The program.
pub fn main() {
    let time = Duration::from_millis(crate::number("MILLIS", 500) as u64);
    print(&measure(crate::number("ROUNDS", 11), time), &memory());
}
