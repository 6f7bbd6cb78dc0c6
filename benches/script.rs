//! What a decision costs the server: `lua/token_bucket.lua` against the least that any script costs, and against the
//! designs of other limiters.
//!
//! Run with `cargo bench --bench script`; `ROUNDS=401` for quieter figures. Four connections with 16 commands on the wire
//! each; CPU time of the server's process; all variants in turn, round after round, on one server. Times depend on the
//! machine and its mood, so a ratio is taken in each round, against the floor of that round, and the median is shown.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

#[path = "../tests/support/server.rs"]
mod server;

use std::time::{Duration, Instant};

use server::{Connection, Server, Value, encode};

const CONNECTIONS: usize = 4;
const PIPELINE: usize = 16;
/// Decisions of a variant in a round.
const DECISIONS: usize = 1_280;
const KEYS: usize = 1_000;

const FLOOR_NAME: &str = "floor: TIME, GET, SET PX";
const TOKEN_BUCKET: &str = include_str!("../lua/token_bucket.lua");
const ONE: &str = include_str!("scripts/one.lua");
const FLOOR: &str = include_str!("scripts/floor.lua");
const REDIS_RATE: &str = include_str!("scripts/redis_rate.lua");
const SPRING: &str = include_str!("scripts/spring.lua");
const TRAEFIK: &str = include_str!("scripts/traefik.lua");

/// One of 1 000 000 tokens that refill at 10 per second: no bucket is full, and none runs dry while it is measured.
const ALLOWED: [&str; 5] = ["take", "100000", ":1000000:1:100000:", "100000000000", "1"];
/// One of 100 tokens that refill at 100 per hour, from a bucket that is an hour in debt.
const DENIED: [&str; 5] = ["take", "36000000", ":100:1:36000000:", "3600000000", "1"];
/// What puts it there: all that it has, and twice that.
const DRAIN: [&str; 5] = ["spend", "7200000000", ":100:1:36000000:", "3600000000", "1"];

/// Keys and arguments of a call.
type Args = (Vec<String>, Vec<String>);

/// A form of a script, and what it answers.
struct Variant {
    name: String,
    script: &'static str,
    /// Decisions of one call.
    decisions: usize,
    /// Keys and arguments of call `i`.
    args: Box<dyn Fn(usize) -> Args>,
    denied: bool,
    /// CPU time of the server per decision, a figure for each round, in microseconds.
    costs: Vec<f64>,
}

impl Variant {
    fn new(
        name: &str,
        script: &'static str,
        decisions: usize,
        denied: bool,
        args: impl Fn(usize) -> Args + 'static,
    ) -> Self {
        Self { name: name.to_owned(), script, decisions, args: Box::new(args), denied, costs: Vec::new() }
    }

    fn cost(&self) -> f64 {
        median(self.costs.clone())
    }

    /// The cost in relation to that of `other`, in the same rounds.
    fn ratio(&self, other: &Self) -> f64 {
        median(self.costs.iter().zip(&other.costs).map(|(own, other)| own / other).collect())
    }

    /// Commands for one round, as many for each connection.
    fn commands(&self, sha: &str) -> Vec<Vec<u8>> {
        let calls = (DECISIONS / self.decisions).max(CONNECTIONS * PIPELINE);
        let call = |i: usize| {
            let (keys, args) = (self.args)(i);
            let mut command = vec!["EVALSHA".to_owned(), sha.to_owned(), keys.len().to_string()];
            command.extend(keys);
            command.extend(args);
            let mut bytes = Vec::new();
            encode(&mut bytes, &command);
            bytes
        };
        (0..calls / (CONNECTIONS * PIPELINE) * CONNECTIONS * PIPELINE).map(call).collect()
    }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn texts<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(str::to_owned).to_vec()
}

/// A key as the crate writes it.
fn key(kind: &str, i: usize) -> String {
    let i = i % KEYS;
    format!("tb:v1:{{ip:203.0.{}.{}}}:{kind}", i / 250, i % 250)
}

/// One request with `charges` charges to a call.
fn several(charges: usize, charge: [&'static str; 5], kind: &'static str) -> impl Fn(usize) -> Args {
    move |i| {
        let keys = (0..charges).map(|j| key(kind, i * charges + j)).collect();
        let mut args = vec!["1".to_owned(), charges.to_string()];
        (0..charges).for_each(|_| args.extend(texts(charge)));
        (keys, args)
    }
}

/// `requests` requests with one charge each to a call, on `keys` different keys.
fn many(requests: usize, keys: usize, charge: [&'static str; 5], kind: &'static str) -> impl Fn(usize) -> Args {
    move |i| {
        let keys = (0..requests).map(|j| key(kind, i * keys + j * keys / requests)).collect();
        let mut args = texts([&requests.to_string(), "1"]);
        args.extend(texts(charge));
        (keys, args)
    }
}

fn variants() -> Vec<Variant> {
    let one = |kind: &'static str, charge: [&'static str; 5]| move |i| (vec![key(kind, i)], texts(charge));
    let now = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.unwrap_or_default().as_micros().to_string()
    };
    let spring_keys = |kind: &str, i| vec![key(kind, i) + ".tokens", key(kind, i) + ".timestamp"];
    vec![
        Variant::new("return 1", ONE, 1, false, one("allowed", ALLOWED)),
        Variant::new(FLOOR_NAME, FLOOR, 1, false, one("floor", ALLOWED)),
        Variant::new(FLOOR_NAME, FLOOR, 1, true, one("floor-denied", DENIED)),
        Variant::new("one charge", TOKEN_BUCKET, 1, false, one("allowed", ALLOWED)),
        Variant::new("one charge", TOKEN_BUCKET, 1, true, one("denied", DENIED)),
        Variant::new("2 charges in a request", TOKEN_BUCKET, 2, false, several(2, ALLOWED, "allowed")),
        Variant::new("2 charges in a request", TOKEN_BUCKET, 2, true, several(2, DENIED, "denied")),
        Variant::new("4 charges in a request", TOKEN_BUCKET, 4, false, several(4, ALLOWED, "allowed")),
        Variant::new("4 charges in a request", TOKEN_BUCKET, 4, true, several(4, DENIED, "denied")),
        Variant::new("4 requests in a call", TOKEN_BUCKET, 4, false, many(4, 4, ALLOWED, "allowed")),
        Variant::new("4 requests in a call", TOKEN_BUCKET, 4, true, many(4, 4, DENIED, "denied")),
        Variant::new("16 requests in a call", TOKEN_BUCKET, 16, false, many(16, 16, ALLOWED, "allowed")),
        Variant::new("16 requests in a call", TOKEN_BUCKET, 16, true, many(16, 16, DENIED, "denied")),
        Variant::new("64 requests in a call", TOKEN_BUCKET, 64, false, many(64, 64, ALLOWED, "allowed")),
        Variant::new("64 requests in a call", TOKEN_BUCKET, 64, true, many(64, 64, DENIED, "denied")),
        Variant::new("64 requests, 4 hot keys", TOKEN_BUCKET, 64, false, many(64, 4, ALLOWED, "allowed")),
        Variant::new("64 requests, 4 hot keys", TOKEN_BUCKET, 64, true, many(64, 4, DENIED, "denied")),
        Variant::new("redis_rate's design", REDIS_RATE, 1, false, move |i| {
            (vec![key("rate", i)], texts(["1000000", "10", "1", "1"]))
        }),
        Variant::new("redis_rate's design", REDIS_RATE, 1, true, move |i| {
            (vec![key("rate-denied", i)], texts(["1", "1", "864000", "1"]))
        }),
        Variant::new("Spring's design", SPRING, 1, false, move |i| {
            (spring_keys("spring", i), texts(["10", "1000000", "1"]))
        }),
        Variant::new("Spring's design", SPRING, 1, true, move |i| {
            (spring_keys("spring-denied", i), texts(["0.0001", "1", "1"]))
        }),
        Variant::new("Traefik's design", TRAEFIK, 1, false, move |i| {
            (vec![key("traefik", i)], texts(["0.00001", "1000000", "100000", &now(), "500000"]))
        }),
        Variant::new("Traefik's design", TRAEFIK, 1, true, move |i| {
            (vec![key("traefik-denied", i)], texts(["0.0000000001", "1", "86400", &now(), "500000"]))
        }),
    ]
}

/// Sends all commands, and returns the answers.
fn run(connections: &mut [Connection], commands: &[Vec<u8>]) -> Vec<Value> {
    let mut answers = Vec::with_capacity(commands.len());
    for turn in commands.chunks(connections.len() * PIPELINE) {
        for (connection, commands) in connections.iter_mut().zip(turn.chunks(PIPELINE)) {
            connection.send(&commands.concat()).expect("the server listens");
        }
        for (connection, commands) in connections.iter_mut().zip(turn.chunks(PIPELINE)) {
            answers.extend(commands.iter().map(|_| connection.receive().expect("the server answers")));
        }
    }
    answers
}

/// Whether the answer says so of each of its decisions.
fn says(answer: &Value, denied: bool) -> bool {
    match answer {
        Value::Int(reply) => denied == (reply & 1 == 0),
        // The peers': the first value says it.
        Value::Array(values) if values.iter().any(|value| value.text().is_some()) || values.len() < 3 => {
            let first = &values[0];
            denied
                == (first.int() == Some(0) || first.text() == Some("false") || first.int().is_some_and(|i| i & 1 == 0))
        }
        Value::Array(values) => values.iter().all(|value| says(value, denied)),
        Value::Nil | Value::Status(_) | Value::Error(_) | Value::Text(_) => false,
    }
}

fn main() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(101);
    let server = Server::start();
    let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| server.connect()).collect();
    let mut variants = variants();
    let load = |script: &str| server.query(&["SCRIPT", "LOAD", script]).text().expect("a hash").to_owned();
    let shas: Vec<_> = variants.iter().map(|variant| load(variant.script)).collect();

    let sha = load(TOKEN_BUCKET);
    for i in 0..KEYS {
        let key = key("denied", i);
        let mut drain = vec!["EVALSHA", &sha, "1", &key];
        drain.extend(DRAIN);
        server.query(&drain);
    }
    // Warm up: the first call of a peer that is to be denied is not.
    for (variant, sha) in variants.iter().zip(&shas) {
        run(&mut connections, &variant.commands(sha));
        let answers = run(&mut connections, &variant.commands(sha));
        let wrong = answers.iter().find(|answer| variant.script != FLOOR && !says(answer, variant.denied));
        assert!(wrong.is_none(), "{}, denied {}: {wrong:?}", variant.name, variant.denied);
    }
    let started = Instant::now();
    for _ in 0..rounds {
        for (variant, sha) in variants.iter_mut().zip(&shas) {
            let commands = variant.commands(sha);
            let before = server.cpu();
            run(&mut connections, &commands);
            let spent: Duration = server.cpu() - before;
            variant.costs.push(spent.as_secs_f64() * 1e6 / (commands.len() * variant.decisions) as f64);
        }
    }

    println!("server CPU per decision, {rounds} rounds in {:?}, medians\n", started.elapsed());
    println!("| variant | allowed us | x floor | denied us | x floor |\n|---|---|---|---|---|");
    let find = |name: &str, denied| variants.iter().find(|v| v.name == name && v.denied == denied);
    let against = |other: &str, variant: &Variant| {
        find(other, variant.denied).map_or(String::new(), |other| format!("{:.2}", variant.ratio(other)))
    };
    let mut names: Vec<_> = variants.iter().map(|variant| variant.name.as_str()).collect();
    names.dedup();
    for name in names {
        let column = |denied| match find(name, denied) {
            Some(variant) => format!("{:.2} | {}", variant.cost(), against(FLOOR_NAME, variant)),
            None => " | ".to_owned(),
        };
        println!("| {name} | {} | {} |", column(false), column(true));
    }
    println!("\n| one charge to a call costs, against | allowed | denied |\n|---|---|---|");
    let peers = ["redis_rate's design", "Spring's design", "Traefik's design"];
    for other in peers.into_iter().chain(["64 requests in a call", "64 requests, 4 hot keys"]) {
        let column = |denied| find("one charge", denied).map_or(String::new(), |variant| against(other, variant));
        println!("| {other} | {} | {} |", column(false), column(true));
    }
}
