//! Calls of scripts on a real server, and what they cost it: what the benches of the script share.

#![allow(dead_code, reason = "each bench uses a part of it")]
#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

#[path = "../../tests/support/server.rs"]
pub(crate) mod server;

use std::time::{Duration, Instant};

use server::{Connection, Server, Value, encode};

pub(crate) const CONNECTIONS: usize = 4;
pub(crate) const PIPELINE: usize = 16;
/// Decisions of a variant in a round.
pub(crate) const DECISIONS: usize = 1_280;
pub(crate) const KEYS: usize = 1_000;

pub(crate) const TOKEN_BUCKET: &str = include_str!("../../lua/token_bucket.lua");
pub(crate) const FLOOR: &str = include_str!("../scripts/floor.lua");
pub(crate) const FLOOR_NAME: &str = "floor: TIME, GET, SET PX";
const REDIS_RATE: &str = include_str!("../scripts/redis_rate.lua");
const SPRING: &str = include_str!("../scripts/spring.lua");
const TRAEFIK: &str = include_str!("../scripts/traefik.lua");
const BLOG: &str = include_str!("../scripts/blog.lua");

/// One of 1 000 000 tokens that refill at 10 per second: no bucket is full, and none runs dry while it is measured.
pub(crate) const ALLOWED: [&str; 5] = ["take", "100000", ":1000000:1:100000:", "100000000000", "1"];
/// One of 100 tokens that refill at 100 per hour, from a bucket that is an hour in debt.
pub(crate) const DENIED: [&str; 5] = ["take", "36000000", ":100:1:36000000:", "3600000000", "1"];
/// What puts it there: all that it has, and twice that.
pub(crate) const DRAIN: [&str; 5] = ["spend", "7200000000", ":100:1:36000000:", "3600000000", "1"];

/// Keys and arguments of a call.
pub(crate) type Args = (Vec<String>, Vec<String>);

/// A form of a script, and what it answers.
pub(crate) struct Variant {
    pub(crate) name: String,
    pub(crate) script: &'static str,
    /// Decisions of one call.
    pub(crate) decisions: usize,
    /// Keys and arguments of call `i`.
    pub(crate) args: Box<dyn Fn(usize) -> Args>,
    pub(crate) denied: bool,
    /// CPU time of the server per decision, a figure for each round, in microseconds.
    pub(crate) costs: Vec<f64>,
}

impl Variant {
    pub(crate) fn new(
        name: &str,
        script: &'static str,
        decisions: usize,
        denied: bool,
        args: impl Fn(usize) -> Args + 'static,
    ) -> Self {
        Self { name: name.to_owned(), script, decisions, args: Box::new(args), denied, costs: Vec::new() }
    }

    pub(crate) fn cost(&self) -> f64 {
        median(self.costs.clone())
    }

    /// The cost in relation to that of `other`, in the same rounds.
    pub(crate) fn ratio(&self, other: &Self) -> f64 {
        median(self.costs.iter().zip(&other.costs).map(|(own, other)| own / other).collect())
    }

    /// Commands for one round, as many for each connection.
    pub(crate) fn commands(&self, sha: &str) -> Vec<Vec<u8>> {
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

pub(crate) fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

pub(crate) fn texts<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(str::to_owned).to_vec()
}

/// A key as the crate writes it.
pub(crate) fn key(kind: &str, i: usize) -> String {
    let i = i % KEYS;
    format!("tb:v1:{{ip:203.0.{}.{}}}:{kind}", i / 250, i % 250)
}

/// One request with one charge to a call.
pub(crate) fn one(kind: &'static str, charge: [&'static str; 5]) -> impl Fn(usize) -> Args {
    move |i| (vec![key(kind, i)], texts(charge))
}

/// Designs of other limiters, each with buckets that are nearly full and with buckets that are empty for a long time.
pub(crate) fn peers() -> Vec<Variant> {
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let micros = move || now().as_micros().to_string();
    let seconds = move || now().as_secs_f64().to_string();
    let spring_keys = |kind: &str, i| vec![key(kind, i) + ".tokens", key(kind, i) + ".timestamp"];
    vec![
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
            (vec![key("traefik", i)], texts(["0.00001", "1000000", "100000", &micros(), "500000"]))
        }),
        Variant::new("Traefik's design", TRAEFIK, 1, true, move |i| {
            (vec![key("traefik-denied", i)], texts(["0.0000000001", "1", "86400", &micros(), "500000"]))
        }),
        Variant::new("the usual script", BLOG, 1, false, move |i| {
            (vec![key("blog", i)], texts(["1000000", "10", &seconds(), "1"]))
        }),
        Variant::new("the usual script", BLOG, 1, true, move |i| {
            (vec![key("blog-denied", i)], texts(["1", "0.0001", &seconds(), "1"]))
        }),
    ]
}

/// One request with `charges` charges to a call.
pub(crate) fn several(charges: usize, charge: [&'static str; 5], kind: &'static str) -> impl Fn(usize) -> Args {
    move |i| {
        let keys = (0..charges).map(|j| key(kind, i * charges + j)).collect();
        let mut args = vec!["1".to_owned(), charges.to_string()];
        (0..charges).for_each(|_| args.extend(texts(charge)));
        (keys, args)
    }
}

/// Sends all commands, and returns the answers.
pub(crate) fn run(connections: &mut [Connection], commands: &[Vec<u8>]) -> Vec<Value> {
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
pub(crate) fn says(answer: &Value, denied: bool) -> bool {
    match answer {
        Value::Int(reply) => denied == (reply & 1 == 0),
        // The peers': the first value says it.
        Value::Array(values) if values.iter().any(|value| value.text().is_some()) || values.len() < 3 => {
            let first = &values[0];
            denied
                == (first.int() == Some(0) || first.text() == Some("false") || first.int().is_some_and(|i| i & 1 == 0))
        }
        Value::Array(values) => values.iter().all(|value| says(value, denied)),
        // Two charges.
        Value::Text(text) => {
            text.split(' ').all(|reply| reply.parse().is_ok_and(|reply| says(&Value::Int(reply), denied)))
        }
        Value::Nil | Value::Status(_) | Value::Error(_) => false,
    }
}

/// `ROUNDS` from the environment.
pub(crate) fn rounds(default: usize) -> usize {
    std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(default)
}

/// Runs all variants in turn, round after round, on a server of their own; returns how long it took.
pub(crate) fn measure(variants: &mut [Variant], rounds: usize) -> Duration {
    let server = Server::start();
    let mut connections: Vec<_> = (0..CONNECTIONS).map(|_| server.connect()).collect();
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
    started.elapsed()
}
