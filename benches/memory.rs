//! What a decision costs in the memory store, what an idle key costs, and how long a request may have to wait.
//!
//! Run with `cargo bench --bench memory`; `ROUNDS=51` for quieter figures. Times depend on the machine and on what else
//! runs there: all of a table is measured in turn, round after round, and the median is shown. Of the longest waits the
//! least of all rounds is shown, since what the store does to its callers comes again in every round, and what the
//! machine does to this program does not.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, MemoryStore, Quota, Store};

const KEYS: [u32; 3] = [1, 10_000, 1_000_000];
const THREADS: [u64; 2] = [1, 2];
/// Decisions of each thread in a round.
const DECISIONS: usize = 200_000;
/// Never empty, and not full soon.
const ENDLESS: Quota = Quota::per_hour(1_000_000).with_capacity(2_000_000_000);
/// Names the part that runs in a process of its own.
const PART: &str = "MEMORY_PART";

fn charge(limit: &LimitName, key: u32, quota: Quota) -> Charge {
    Charge::new(limit.clone(), BucketKey::ip(IpAddr::V4(Ipv4Addr::from_bits(key))), quota, Amount::Take(1))
}

fn name() -> LimitName {
    LimitName::try_new("per-key").expect("a name")
}

fn acquire(store: &MemoryStore, charge: Charge) -> bool {
    let Ok(decision) = store.acquire(black_box(&[charge])).into_inner();
    black_box(decision).is_allowed()
}

/// Numbers below `keys` in an order that no cache foresees.
fn order(seed: u64, keys: u32) -> impl Iterator<Item = u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ((u128::from(state) * u128::from(keys)) >> 64) as u32
    })
}

/// Nanoseconds per decision of each of `threads`, on `keys` keys that are there already.
fn decisions(store: &MemoryStore, keys: u32, threads: u64, round: usize) -> f64 {
    let (limit, quota) = (name(), ENDLESS);
    let barrier = Barrier::new(threads as usize);
    let run = |thread| {
        let keys: Vec<u32> = order(1 + thread + 16 * round as u64, keys).take(DECISIONS).collect();
        barrier.wait();
        let started = Instant::now();
        for key in keys {
            assert!(acquire(store, charge(&limit, key, quota)));
        }
        started.elapsed().as_nanos() as f64 / DECISIONS as f64
    };
    let times: Vec<f64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    times.iter().sum::<f64>() / threads as f64
}

/// The memory of this process that is in use, in bytes; 0 where it is not known.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or("0 kB");
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0) * 1024
}

/// Bytes per key that has been charged once.
fn idle(keys: u32) -> f64 {
    let (store, limit, quota) = (MemoryStore::with_buckets(2_000_000), name(), Quota::per_day(10));
    let before = resident();
    (0..keys).for_each(|key| assert!(acquire(&store, charge(&limit, key, quota))));
    (resident() - before) as f64 / f64::from(keys)
}

/// How often this thread has lost its processor to another one; 0 where it is not known.
fn preempted() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|line| line.trim().parse().ok()).unwrap_or(0)
}

/// The longest time that one of `times` calls takes in which the processor was this thread's all the time.
fn longest(times: u32, mut call: impl FnMut(u32)) -> Duration {
    let (mut longest, mut switches) = (Duration::ZERO, preempted());
    let mut before = Instant::now();
    for i in 0..times {
        call(i);
        let mut now = Instant::now();
        if now - before > longest {
            let again = preempted();
            if again == switches {
                longest = now - before;
            }
            (switches, now) = (again, Instant::now());
        }
        before = now;
    }
    longest
}

/// The longest waits, in microseconds: for nothing, while a store grows to `keys`, and while those expire and as many new
/// ones come.
fn waits(keys: u32) -> [f64; 3] {
    let (store, limit, quota) = (MemoryStore::with_buckets(12_000_000), name(), Quota::per_second(1));
    let nothing = longest(keys, |key| drop(black_box(charge(&limit, key, quota))));
    let growing = longest(keys, |key| assert!(acquire(&store, charge(&limit, key, quota))));
    std::thread::sleep(Duration::from_secs(1));
    let expiring = longest(keys, |key| assert!(acquire(&store, charge(&limit, 0x8000_0000 + key, quota))));
    assert!(store.buckets() < keys as usize * 2, "none is forgotten");
    [nothing, growing, expiring].map(|wait| wait.as_secs_f64() * 1e6)
}

/// What a part prints in a process of its own, where no other has left its memory.
fn apart<const N: usize>(part: &str) -> [f64; N] {
    let this = std::env::current_exe().expect("this program");
    let output = Command::new(this).env(PART, part).output().expect("it runs once more");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: Vec<f64> = String::from_utf8_lossy(&output.stdout)
        .split_whitespace()
        .map(|figure| figure.parse().expect("a number"))
        .collect();
    figures.try_into().expect("so many figures")
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

fn main() {
    if let Ok(part) = std::env::var(PART) {
        let (part, keys) = part.split_once(' ').expect("a part and a number of keys");
        let keys = keys.parse().expect("a number");
        match part {
            "idle" => println!("{}", idle(keys)),
            _ => println!("{}", waits(keys).map(|wait| wait.to_string()).join(" ")),
        }
        return;
    }
    let rounds: usize = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(21);

    let stores = KEYS.map(|keys| {
        let (store, limit) = (MemoryStore::with_buckets(2_000_000), name());
        (0..keys).for_each(|key| assert!(acquire(&store, charge(&limit, key, ENDLESS))));
        store
    });
    let all = KEYS.iter().zip(&stores).flat_map(|(keys, store)| THREADS.map(|threads| (*keys, store, threads)));
    let mut measured: Vec<_> = all.map(|all| (all, Vec::new())).collect();
    for round in 0..rounds {
        for ((keys, store, threads), times) in &mut measured {
            times.push(decisions(store, *keys, *threads, round));
        }
    }
    println!("decisions, {rounds} rounds, medians\n\n| keys | threads | ns |\n|---|---|---|");
    for ((keys, _, threads), times) in measured {
        println!("| {keys} | {threads} | {:.0} |", median(times));
    }
    println!("\n| idle keys | bytes each |\n|---|---|");
    for keys in [10_000, 100_000, 700_000, 1_000_000, 1_400_000] {
        println!("| {keys} | {:.1} |", apart::<1>(&format!("idle {keys}"))[0]);
    }
    println!("\nlongest wait, us, the least of 5 rounds\n");
    println!("| keys | nothing | growing | expiring, and as many new ones |\n|---|---|---|---|");
    for keys in [1_000_000, 5_000_000] {
        let rounds: Vec<[f64; 3]> = (0..5).map(|_| apart(&format!("waits {keys}"))).collect();
        let least = |i: usize| rounds.iter().map(|round| round[i]).fold(f64::INFINITY, f64::min);
        println!("| {keys} | {:.0} | {:.0} | {:.0} |", least(0), least(1), least(2));
    }
}
