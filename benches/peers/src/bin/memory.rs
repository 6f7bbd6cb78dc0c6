//! Decisions of `MemoryStore` against those of `governor`'s keyed limiters, in the same run, in turn.
//!
//! Run with `cargo run --release --bin memory` in `benches/peers`; `ROUNDS=51` for quieter figures. Times depend on the
//! machine and its mood, so a ratio is taken in each round, and the median is shown.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Barrier;
use std::time::Instant;

use governor::{DefaultKeyedRateLimiter, Quota as GovernorQuota, RateLimiter};
use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, MemoryStore, Quota, Store};

const KEYS: [u64; 3] = [1, 10_000, 1_000_000];
const THREADS: [u64; 2] = [1, 2];
/// Decisions of each thread in a round.
const DECISIONS: usize = 200_000;

/// A key as clients send it, and what is kept of it where 128 bits are enough.
#[derive(Clone)]
struct Key {
    text: String,
    hash: u128,
    ours: BucketKey,
}

impl Key {
    fn new(i: u64) -> Self {
        let text = format!("sk_live_{i:032x}");
        let hash = (u128::from(i).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835)).rotate_left(64);
        Self { ours: BucketKey::id(&text), text, hash }
    }
}

/// What is compared, with all keys in it.
enum Peer {
    Ours(MemoryStore, LimitName),
    Strings(DefaultKeyedRateLimiter<String>),
    Hashes(DefaultKeyedRateLimiter<u128>),
}

const NAMES: [&str; 3] = ["MemoryStore", "governor, String", "governor, 128 bits"];
const ENDLESS: Quota = Quota::per_hour(1_000_000).with_capacity(2_000_000_000);

impl Peer {
    fn all(keys: &[Key]) -> [Self; 3] {
        let endless = GovernorQuota::per_second(NonZeroU32::MAX).allow_burst(NonZeroU32::MAX);
        let name = LimitName::try_new("per-key").expect("a name");
        let all = [
            Self::Ours(MemoryStore::with_buckets(2_000_000), name),
            Self::Strings(RateLimiter::keyed(endless)),
            Self::Hashes(RateLimiter::keyed(endless)),
        ];
        for peer in &all {
            keys.iter().for_each(|key| assert!(peer.decide(key)));
        }
        all
    }

    fn decide(&self, key: &Key) -> bool {
        match self {
            Self::Ours(store, name) => {
                let charge = Charge::new(name.clone(), key.ours, ENDLESS, Amount::Take(1));
                let Ok(decision) = store.acquire(black_box(&[charge])).into_inner();
                black_box(decision).is_allowed()
            }
            Self::Strings(limiter) => black_box(limiter.check_key(black_box(&key.text))).is_ok(),
            Self::Hashes(limiter) => black_box(limiter.check_key(black_box(&key.hash))).is_ok(),
        }
    }

    /// Nanoseconds per decision of each thread.
    fn run(&self, keys: &[Key], threads: u64, round: u64) -> f64 {
        let barrier = Barrier::new(threads as usize);
        let run = |thread: u64| {
            let mut state = (1 + thread + 16 * round).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            // What a request brings is in the caches already.
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                keys[((u128::from(state) * keys.len() as u128) >> 64) as usize].clone()
            };
            let keys: Vec<Key> = (0..DECISIONS).map(|_| next()).collect();
            barrier.wait();
            let started = Instant::now();
            for key in &keys {
                assert!(self.decide(key));
            }
            started.elapsed().as_nanos() as f64 / DECISIONS as f64
        };
        let times: Vec<f64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        times.iter().sum::<f64>() / threads as f64
    }
}

fn median(of: impl Iterator<Item = f64>) -> f64 {
    let mut of: Vec<f64> = of.collect();
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(21);
    println!("ns per decision, {rounds} rounds, medians; (MemoryStore's as a part of it)\n");
    println!("| keys | threads | {} |\n|---|---|---|---|---|", NAMES.join(" | "));
    for keys in KEYS {
        let keys: Vec<Key> = (0..keys).map(Key::new).collect();
        let peers = Peer::all(&keys);
        for threads in THREADS {
            let times: Vec<[f64; 3]> =
                (0..rounds).map(|round| peers.each_ref().map(|peer| peer.run(&keys, threads, round))).collect();
            let column = |i: usize| {
                let ratio = median(times.iter().map(|times| times[0] / times[i]));
                format!("{:.0} ({ratio:.2})", median(times.iter().map(|times| times[i])))
            };
            println!("| {} | {threads} | {} | {} | {} |", keys.len(), column(0), column(1), column(2));
        }
    }
}
