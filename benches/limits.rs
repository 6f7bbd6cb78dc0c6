//! What a second and a fourth limit add to a request, in both stores.
//!
//! Run with `cargo bench --bench limits`; `ROUNDS=401` for quieter figures. Redis: CPU time of the server's process per
//! request, one request to a call, four connections with 16 commands on the wire each. Memory: time per acquire, one
//! after the other. All in turn, round after round; a ratio is taken in each round, against the request with one limit,
//! and the median is shown.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

#[path = "support/calls.rs"]
mod calls;

use std::future::Future;
use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use calls::{ALLOWED, DENIED, TOKEN_BUCKET, Variant, key, measure, median, rounds, several, texts};
use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, MemoryStore, Quota, Store};

const LIMITS: [usize; 3] = [1, 2, 4];
/// Clients of the memory store, and requests of each in a round.
const CLIENTS: u32 = 1_000;
const REQUESTS: usize = 20;

/// By number of limits, per request, allowed and then denied.
fn redis() -> Vec<Variant> {
    let of = |limits: usize, denied| {
        let (charge, kind) = match (denied, limits) {
            (true, _) => (DENIED, "denied"),
            // Buckets of their own: the limits of a request are charged together.
            (false, 1) => (ALLOWED, "allowed"),
            (false, 2) => (ALLOWED, "allowed-2"),
            (false, _) => (ALLOWED, "allowed-4"),
        };
        if limits == 1 {
            return Variant::new("1", TOKEN_BUCKET, 1, denied, move |i| (vec![key(kind, i)], texts(charge)));
        }
        Variant::new(&limits.to_string(), TOKEN_BUCKET, 1, denied, several(limits, charge, kind))
    };
    [false, true].into_iter().flat_map(|denied| LIMITS.map(|limits| of(limits, denied))).collect()
}

/// Requests in memory under a number of limits.
struct Memory {
    limits: usize,
    denied: bool,
    store: MemoryStore,
    requests: Vec<Vec<Charge>>,
    /// Nanoseconds per acquire, a figure for each round.
    costs: Vec<f64>,
}

impl Memory {
    fn new(limits: usize, denied: bool) -> Self {
        let quota = if denied { Quota::per_hour(100) } else { Quota::per_second(10).with_capacity(1_000_000) };
        let charge = |client: u32, limit: usize, amount| {
            let name = LimitName::try_new(&format!("limit-{limit}")).expect("a name");
            let address = IpAddr::V4(Ipv4Addr::from_bits(0xcb00_7100 + client));
            Charge::new(name, BucketKey::ip(address), quota, amount)
        };
        let all = |amount| -> Vec<Vec<_>> {
            (0..CLIENTS).map(|client| (0..limits).map(|limit| charge(client, limit, amount)).collect()).collect()
        };
        let memory =
            Self { limits, denied, store: MemoryStore::new(), requests: all(Amount::Take(1)), costs: Vec::new() };
        if denied {
            // All that it has, and twice that.
            all(Amount::Spend(200)).iter().for_each(|drain| assert!(memory.acquire(drain)));
        }
        memory
    }

    /// Whether it is allowed.
    fn acquire(&self, charges: &[Charge]) -> bool {
        let answer = pin!(self.store.acquire(black_box(charges)));
        match answer.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Ok(decision)) => black_box(decision).is_allowed(),
            Poll::Ready(Err(never)) => match never {},
            Poll::Pending => unreachable!("the memory store answers at once"),
        }
    }

    fn run(&mut self) {
        let started = Instant::now();
        for _ in 0..REQUESTS {
            for charges in &self.requests {
                assert_ne!(self.acquire(charges), self.denied);
            }
        }
        self.costs.push(started.elapsed().as_nanos() as f64 / (REQUESTS * self.requests.len()) as f64);
    }
}

fn memory(rounds: usize) -> Vec<Memory> {
    let mut all: Vec<_> =
        [false, true].into_iter().flat_map(|denied| LIMITS.map(|limits| Memory::new(limits, denied))).collect();
    // The first one warms up.
    for _ in 0..=rounds {
        all.iter_mut().for_each(Memory::run);
    }
    for memory in &mut all {
        memory.costs.remove(0);
    }
    all
}

/// The median, and how often that of one limit it is.
fn column(costs: &[f64], one: &[f64]) -> String {
    format!(
        "{:.2} | {:.2}",
        median(costs.to_vec()),
        median(costs.iter().zip(one).map(|(own, one)| own / one).collect())
    )
}

fn main() {
    let rounds = rounds(101);
    let mut redis = redis();
    measure(&mut redis, rounds);
    let memory = memory(rounds);

    println!("cost of a request, {rounds} rounds, medians\n");
    println!("| limits | allowed | x one | denied | x one |\n|---|---|---|---|---|");
    for limits in LIMITS {
        let costs = |limits: usize, denied| {
            let variant = redis.iter().find(|variant| variant.name == limits.to_string() && variant.denied == denied);
            &variant.expect("it was measured").costs[..]
        };
        let of = |denied| column(costs(limits, denied), costs(1, denied));
        println!("| Redis, {limits}: server CPU, us | {} | {} |", of(false), of(true));
    }
    for limits in LIMITS {
        let costs = |limits, denied| {
            let memory = memory.iter().find(|memory| memory.limits == limits && memory.denied == denied);
            &memory.expect("it was measured").costs[..]
        };
        let of = |denied| column(costs(limits, denied), costs(1, denied));
        println!("| memory, {limits}: ns | {} | {} |", of(false), of(true));
    }
}
