//! `MemoryStore`: the exact model, many threads, and a bounded memory. The clock is paused.

use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, advance};
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::conformance::Model;
use tower_token_bucket::{
    Amount, BucketKey, Charge, ConfigError, Decision, Global, Limit, LimitName, MemoryStore, Quota, Source, Store,
    TokenBucketLayer,
};

use crate::arithmetic::{QUOTAS, Rng, name, quota};

/// What a store holds that is not told otherwise, as its docs say.
const BUCKETS_DEFAULT: usize = 786_432;
const SHARDS: usize = 64;

pub(crate) fn ask(store: &MemoryStore, charges: &[Charge]) -> Decision {
    let Ok(decision) = store.acquire(charges).into_inner();
    decision
}

fn key(i: u32) -> BucketKey {
    BucketKey::ip(IpAddr::V4(Ipv4Addr::from_bits(i)))
}

fn take(limit: &LimitName, i: u32, quota: Quota, cost: u64) -> Charge {
    Charge::new(limit.clone(), key(i), quota, Amount::Take(cost))
}

// Against the model.

/// All that a decision says.
pub(crate) fn said(decision: &Decision) -> impl PartialEq + std::fmt::Debug + use<> {
    let outcome = |outcome: &tower_token_bucket::Outcome| {
        let remaining = outcome.remaining();
        (outcome.is_allowed(), outcome.is_too_dear(), remaining, outcome.retry_after(), outcome.reset_after())
    };
    let outcomes: Vec<_> = decision.outcomes().iter().map(outcome).collect();
    (decision.is_allowed(), decision.remaining(), decision.retry_after(), decision.reset_after(), outcomes)
}

/// A store forgets a bucket when the life that it was written with is over.
pub(crate) fn forget(model: &mut Model, charge: &Charge, now_us: u64) {
    let Some(state) = model.state(charge) else { return };
    let at_us: u64 = state.split(':').next().unwrap().parse().unwrap();
    if now_us >= at_us + model.life_ms(charge, at_us).unwrap() * 1000 {
        model.forget(charge);
    }
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_agrees_with_the_model() {
    let limits = ["a", "b", "c"].map(name);
    let mut denied = 0;
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        // Few buckets, so that the bound is never reached: what is shared there is another test.
        let (store, mut model) = (MemoryStore::new(), Model::default());
        let started = Instant::now();
        let quotas = [(); 4].map(|()| quota(rng.pick(&QUOTAS)));
        for step in 0..500 {
            let pause_us = if rng.chance(40) { 0 } else { rng.scaled(20_000_000) };
            advance(Duration::from_micros(pause_us)).await;
            let now_us = started.elapsed().as_micros() as u64;
            let charges: Vec<Charge> = (0..1 + rng.below(4))
                .map(|_| {
                    let limit = rng.below(3) as usize;
                    // Mostly the limit's own quota, at times another.
                    let quota = quotas[if rng.chance(90) { limit } else { 3 }];
                    let cost = 1 + rng.scaled(quota.capacity() + 1);
                    let amount = match rng.below(12) {
                        0 => Amount::Spend(cost),
                        1 => Amount::Give(cost),
                        2 => Amount::Peek,
                        _ => Amount::Take(cost),
                    };
                    let charge = Charge::new(limits[limit].clone(), key(rng.below(3) as u32), quota, amount);
                    if rng.chance(20) { charge.shadow() } else { charge }
                })
                .collect();
            for charge in &charges {
                forget(&mut model, charge, now_us);
            }
            let expected = Decision::new(&charges, &model.acquire(&charges, now_us)).unwrap();
            let decision = ask(&store, &charges);
            assert_eq!(said(&decision), said(&expected), "seed {seed}, step {step}: {charges:?} at {now_us}");
            assert_eq!(decision.source(), Source::Store);
            denied += u64::from(!decision.is_allowed());
        }
        assert_eq!(store.overflowed(), 0);
    }
    assert!(denied > 3_000, "{denied}");
}

#[tokio::test(start_paused = true)]
async fn the_memory_store_keeps_its_promises_to_the_microsecond() {
    let limit = name("limit");
    for raw in QUOTAS {
        let quota = quota(raw);
        for cost in [1, raw.0] {
            let store = MemoryStore::new();
            assert!(ask(&store, &[take(&limit, 1, quota, raw.0)]).is_allowed(), "a fresh bucket is full");
            let denied = ask(&store, &[take(&limit, 1, quota, cost)]);
            let wait = denied.retry_after().unwrap();
            // tokio's clock ends before the slowest of them are full.
            if wait > Duration::from_secs(3_000_000_000) {
                continue;
            }
            advance(wait - Duration::from_micros(1)).await;
            assert!(
                !ask(&store, &[take(&limit, 1, quota, cost)]).is_allowed(),
                "{quota}: {cost} after {wait:?} - 1 us"
            );
            advance(Duration::from_micros(1)).await;
            assert!(ask(&store, &[take(&limit, 1, quota, cost)]).is_allowed(), "{quota}: {cost} after {wait:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn clones_of_a_store_share_their_buckets() {
    let (store, limit) = (MemoryStore::new(), name("limit"));
    let clone = store.clone();
    assert!(ask(&store, &[take(&limit, 1, Quota::per_day(1), 1)]).is_allowed());
    assert!(!ask(&clone, &[take(&limit, 1, Quota::per_day(1), 1)]).is_allowed());
    assert_eq!((store.buckets(), clone.buckets()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn limits_of_one_key_and_keys_of_one_limit_have_buckets_of_their_own() {
    let store = MemoryStore::new();
    for limit in ["a", "b", "A"].map(name) {
        for i in 0..3 {
            assert!(ask(&store, &[take(&limit, i, Quota::per_day(1), 1)]).is_allowed(), "{limit} {i}");
        }
    }
    assert_eq!(store.buckets(), 9);
}

#[tokio::test(start_paused = true)]
async fn a_look_or_a_denial_makes_no_bucket() {
    let (store, limit) = (MemoryStore::new(), name("limit"));
    ask(&store, &[Charge::new(limit.clone(), key(1), Quota::per_day(1), Amount::Peek)]);
    assert!(!ask(&store, &[take(&limit, 2, Quota::per_day(1), 2)]).is_allowed(), "above the capacity");
    assert!(!ask(&store, &[take(&limit, 3, Quota::per_day(1), 1), take(&limit, 4, Quota::per_day(1), 2)]).is_allowed());
    assert_eq!(store.buckets(), 0);
}

// Many threads.

/// Runs `body` in 16 threads that start together; the sum of what they return.
pub(crate) fn in_16_threads(body: impl Fn(u64) -> u64 + Sync) -> u64 {
    let barrier = Barrier::new(16);
    let run = |i| {
        barrier.wait();
        body(i)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16).map(|i| scope.spawn(move || run(i))).collect::<Vec<_>>();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

#[test]
fn sixteen_threads_on_one_key_never_overdraw_it() {
    let (store, limit) = (MemoryStore::new(), name("limit"));
    let quota = Quota::per_day(1).with_capacity(5_000);
    let passes = |cost| ask(&store, &[take(&limit, 1, quota, cost)]).is_allowed();
    let taken = in_16_threads(|i| {
        let cost = 1 + i % 3;
        (0..1_000).map(|_| if passes(cost) { cost } else { 0 }).sum()
    });
    assert_eq!(taken, 5_000, "all of it, and no more");
    assert!(!passes(1));
}

#[test]
fn sixteen_threads_with_two_limits_in_opposite_orders_neither_deadlock_nor_overdraw() {
    let store = MemoryStore::new();
    let (a, b) = (name("a"), name("b"));
    let (large, small) = (Quota::per_day(1).with_capacity(20_000), Quota::per_day(1).with_capacity(300));
    let taken = in_16_threads(|thread| {
        let mut rng = Rng::new(thread);
        let mut taken = 0;
        for _ in 0..2_000 {
            let i = rng.below(8) as u32;
            let mut charges = [take(&a, i, large, 1), take(&b, i, small, 1)];
            if thread % 2 == 0 {
                charges.reverse();
            }
            taken += u64::from(ask(&store, &charges).is_allowed());
        }
        taken
    });
    assert_eq!(taken, 8 * 300, "the small ones bind");
    let left = |limit: &LimitName, quota, i| {
        let peek = Charge::new(limit.clone(), key(i), quota, Amount::Peek);
        ask(&store, &[peek]).remaining().unwrap()
    };
    for i in 0..8 {
        assert_eq!((left(&a, large, i), left(&b, small, i)), (20_000 - 300, 0), "both are charged or none");
    }
}

#[test]
fn two_charges_of_one_request_are_one_step_for_all_others() {
    // Tokens only move from one bucket to the other: whoever looks at both sees the same sum.
    let (store, limit) = (MemoryStore::new(), name("limit"));
    let quota = Quota::new(1, Duration::from_secs(1 << 25)).with_capacity(50);
    ask(&store, &[Charge::new(limit.clone(), key(0), quota, Amount::Spend(25))]);
    ask(&store, &[Charge::new(limit.clone(), key(1), quota, Amount::Spend(25))]);
    let on = |i, amount| Charge::new(limit.clone(), key(i), quota, amount);
    in_16_threads(|thread| {
        let mut rng = Rng::new(thread);
        for _ in 0..3_000 {
            let (from, to) = if rng.chance(50) { (0, 1) } else { (1, 0) };
            let cost = 1 + rng.below(9);
            ask(&store, &[on(from, Amount::Take(cost)), on(to, Amount::Give(cost))]);
            let seen = ask(&store, &[on(to, Amount::Peek), on(from, Amount::Peek)]);
            let sum: u64 = seen.outcomes().iter().map(|outcome| outcome.remaining().unwrap()).sum();
            assert_eq!(sum, 50);
        }
        0
    });
}

// A bounded memory.

#[tokio::test(start_paused = true)]
async fn zero_buckets_are_refused_and_other_numbers_rounded_up() {
    assert!(matches!(MemoryStore::try_with_buckets(0), Err(ConfigError::Buckets)));
    let panic = std::panic::catch_unwind(|| MemoryStore::with_buckets(0)).unwrap_err();
    let text = MemoryStore::try_with_buckets(0).unwrap_err().to_string();
    assert_eq!(panic.downcast_ref::<String>(), Some(&text));

    let (limit, quota) = (name("limit"), Quota::per_day(10));
    for (asked, most) in [(1, 64), (64, 64), (65, 128), (1_000, 1_024)] {
        let store = MemoryStore::with_buckets(asked);
        for i in 0..50_000 {
            ask(&store, &[take(&limit, i, quota, 1)]);
        }
        assert!((most..=most + 1).contains(&store.buckets()), "{asked}: with the one that the others share");
        assert_eq!(store.overflowed(), 50_000 - (store.buckets() as u64 - 1), "{asked}");
    }
}

#[tokio::test(start_paused = true)]
async fn several_new_buckets_in_one_request_stay_within_the_bound() {
    // One place in each shard: two new keys of a request may well want the same one.
    let (a, b, quota) = (name("a"), name("b"), Quota::per_day(1_000_000));
    for _ in 0..100 {
        let store = MemoryStore::with_buckets(SHARDS);
        for i in 0..500 {
            ask(&store, &[take(&a, i, quota, 1), take(&b, i, quota, 1), take(&a, i + 20_000, quota, 1)]);
        }
        assert!(store.buckets() <= SHARDS + 2, "{} buckets, of which 2 are shared", store.buckets());
    }
}

#[tokio::test(start_paused = true)]
async fn keys_without_a_bucket_share_one_for_each_limit() {
    let store = MemoryStore::with_buckets(SHARDS);
    let (a, b) = (name("a"), name("b"));
    let (small, large) = (Quota::per_day(10), Quota::per_day(25));
    for i in 0..10_000 {
        ask(&store, &[take(&a, i, small, 10)]);
    }
    let overflowed = store.overflowed();
    assert_eq!(overflowed, 10_000 - (store.buckets() as u64 - 1));
    // Limit a's is drained; limit b's is its own, and full.
    let admitted = |limit, quota| -> usize {
        (20_000..20_100).filter(|i| ask(&store, &[take(limit, *i, quota, 1)]).is_allowed()).count()
    };
    assert_eq!(admitted(&a, small), 0);
    assert_eq!(admitted(&b, large), 25);
    assert_eq!(store.overflowed(), overflowed + 200);
    // Several charges, all to the same shared bucket, and one more to another: all or none.
    advance(Duration::from_secs(86_400 / 10 * 3)).await;
    let two = |i| ask(&store, &[take(&a, i, small, 1), take(&a, i + 1, small, 1), take(&b, i, large, 1)]).is_allowed();
    assert!(two(30_000), "3 tokens have come back");
    assert!(!two(30_010), "1 is left");
    assert!(ask(&store, &[take(&a, 30_020, small, 1)]).is_allowed(), "and was not taken");
}

#[tokio::test(start_paused = true)]
async fn full_buckets_are_forgotten_in_small_steps_and_no_others() {
    let (store, limit) = (MemoryStore::new(), name("limit"));
    let (quick, slow) = (Quota::per_second(10), Quota::per_day(10));
    for i in 0..20_000 {
        ask(&store, &[take(&limit, i, quick, 1)]);
    }
    for i in 100_000..101_000 {
        assert!(ask(&store, &[take(&limit, i, slow, 10)]).is_allowed());
    }
    assert_eq!(store.buckets(), 21_000);
    advance(Duration::from_micros(99_999)).await;
    ask(&store, &[take(&limit, 1_000_000, quick, 1)]);
    assert_eq!(store.buckets(), 21_001, "none of them is full yet");
    advance(Duration::from_micros(1)).await;
    let mut before = store.buckets();
    for i in 0..20_000 {
        advance(Duration::from_millis(1)).await;
        ask(&store, &[take(&limit, 2_000_000 + i, quick, 1)]);
        let now = store.buckets();
        assert!(now + 64 >= before, "from {before} to {now} at once");
        before = now;
    }
    assert!((1_000..6_000).contains(&before), "{before}: those that are not full, and a few more");
    for i in 100_000..101_000 {
        assert!(!ask(&store, &[take(&limit, i, slow, 1)]).is_allowed(), "a drained bucket stays drained");
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_at_its_bound_takes_new_keys_again_when_buckets_are_full() {
    let store = MemoryStore::with_buckets(1_024);
    let (limit, quick) = (name("limit"), Quota::per_second(10));
    for i in 0..20_000 {
        ask(&store, &[take(&limit, i, quick, 1)]);
    }
    let overflowed = store.overflowed();
    assert!(store.buckets() >= 1_024);
    advance(Duration::from_secs(2)).await;
    // Keys fall into shards of 16 places at random: a few find theirs taken.
    let mut denied = 0;
    for i in 0..500 {
        denied += u64::from(!ask(&store, &[take(&limit, 50_000 + i, quick, 10)]).is_allowed());
        advance(Duration::from_millis(1)).await;
    }
    let more = store.overflowed() - overflowed;
    assert!(denied <= more && more < 20, "{more} more, {denied} denied");
    assert!(store.buckets() <= 1_025);
}

/// Keys in a row, as the addresses of a network, are spread over all parts of a store, whatever its random numbers are: no
/// part of 32 places has to take more than it holds, where the mean is 10.
#[test]
fn keys_in_a_row_are_spread_evenly() {
    let (limit, quota) = (name("limit"), Quota::per_day(10));
    for step in [1, 2, 64, 256, 65_536] {
        for _ in 0..40 {
            let store = MemoryStore::with_buckets(64 * 32);
            (0..640).for_each(|i| drop(ask(&store, &[take(&limit, i * step, quota, 1)])));
            assert_eq!((store.buckets(), store.overflowed()), (640, 0), "a step of {step}");
        }
    }
}

/// Runs the test of this name alone, in a process of its own with `FLOOD` set; what it prints after `measured: `.
fn in_a_process_of_its_own(test: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env("FLOOD", "1")
        .output()
        .unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    stdout.split_once("measured: ").unwrap_or_else(|| panic!("{stdout}")).1.lines().next().unwrap().to_owned()
}

/// The memory of this process that is in use, in bytes.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn a_flood_of_a_million_keys_is_bounded_and_resets_no_bucket() {
    const MIB: usize = 1 << 20;
    if std::env::var_os("FLOOD").is_none() {
        let measured = in_a_process_of_its_own("memory::a_flood_of_a_million_keys_is_bounded_and_resets_no_bucket");
        let mib: Vec<usize> = measured.split(' ').map(|bytes| bytes.parse::<usize>().unwrap() / MIB).collect();
        let [first, churned] = mib[..] else { panic!("{measured}") };
        println!("{first} MiB after the first flood, {churned} MiB at most in those that followed");
        // The documented 48, and what the allocator and this test itself need.
        assert!(first <= 55 && churned <= 55, "{mib:?} MiB");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let before = resident();
        let used = || resident().saturating_sub(before);
        let (store, limit, other) = (MemoryStore::new(), name("limit"), name("other"));
        let quota = Quota::per_day(10);
        let (drained, half) = (4_000_000_000, 4_000_000_001);
        assert!(ask(&store, &[take(&limit, drained, quota, 10)]).is_allowed());
        assert!(ask(&store, &[take(&limit, half, quota, 5)]).is_allowed());

        let mut shared = 0;
        for i in 0..1_000_000 {
            let overflowed = store.overflowed();
            let allowed = ask(&store, &[take(&limit, i, quota, 1)]).is_allowed();
            if store.overflowed() == overflowed {
                assert!(allowed, "a key with a bucket of its own");
            } else {
                shared += u64::from(allowed);
            }
        }
        assert!(store.buckets() <= BUCKETS_DEFAULT + 1, "{} buckets", store.buckets());
        assert!(store.buckets() > BUCKETS_DEFAULT / 100 * 97, "{} buckets", store.buckets());
        assert_eq!(store.overflowed(), 1_000_002 - (store.buckets() as u64 - 1));
        assert_eq!(shared, 10, "all keys without a bucket take from one");
        assert!(!ask(&store, &[take(&limit, drained, quota, 1)]).is_allowed(), "drained before the flood");
        let left = ask(&store, &[take(&limit, half, quota, 1)]);
        assert_eq!(left.remaining(), Some(4), "as if there were no flood");
        let first = used();

        // The same again and again: buckets become full and make room.
        let mut most = first;
        for round in 1..=2 {
            advance(Duration::from_secs(86_400)).await;
            let before = store.buckets();
            for i in 0..300_000 {
                ask(&store, &[take(&other, round * 1_000_000 + i, quota, 1)]);
            }
            most = most.max(used());
            assert!(store.buckets() <= before + 2, "{before}, then {}", store.buckets());
            for i in 300_000..1_300_000 {
                ask(&store, &[take(&other, round * 1_000_000 + i, quota, 1)]);
            }
            most = most.max(used());
            assert!(store.buckets() <= BUCKETS_DEFAULT + 2, "{} buckets", store.buckets());
        }
        println!("\nmeasured: {first} {most}");
    });
}

/// Runs `body` in 4 threads.
fn in_4_threads(body: impl Fn(u32) + Sync) {
    let body = &body;
    std::thread::scope(|scope| (0..4).for_each(|thread| drop(scope.spawn(move || body(thread)))));
}

fn left(store: &MemoryStore, limit: &LimitName, i: u32, quota: Quota) -> u64 {
    let peek = Charge::new(limit.clone(), key(i), quota, Amount::Peek);
    ask(store, &[peek]).remaining().unwrap()
}

#[test]
fn every_bucket_is_kept_while_the_store_grows_under_others() {
    const EACH: u32 = 60_000;
    let (store, limit, quota) = (MemoryStore::new(), name("limit"), Quota::per_day(10));
    let cost = |i: u32| u64::from(1 + i % 9);
    in_4_threads(|thread| {
        let mut rng = Rng::new(u64::from(thread));
        let first = thread * EACH;
        for i in first..first + EACH {
            assert!(ask(&store, &[take(&limit, i, quota, cost(i))]).is_allowed());
            // One of its own, and one of those of all that may be there.
            let own = first + rng.below(u64::from(i - first) + 1) as u32;
            assert_eq!(left(&store, &limit, own, quota), 10 - cost(own));
            let any = rng.below(u64::from(4 * EACH)) as u32;
            let seen = left(&store, &limit, any, quota);
            assert!(seen == 10 || seen == 10 - cost(any), "{seen} of 10, and {} was taken", cost(any));
        }
    });
    assert_eq!((store.buckets(), store.overflowed()), (4 * EACH as usize, 0));
    assert!((0..4 * EACH).all(|i| left(&store, &limit, i, quota) == 10 - cost(i)));
}

#[test]
fn no_bucket_that_is_not_full_is_lost_while_others_are_forgotten() {
    const SLOW: u32 = 2_000;
    let (store, limit) = (MemoryStore::new(), name("limit"));
    // Full again after a millisecond, and after hours.
    let (quick, slow) = (Quota::per_second(1_000).with_capacity(1), Quota::per_day(10));
    in_4_threads(|thread| {
        let first = thread << 24;
        for i in 0..100_000 {
            assert!(ask(&store, &[take(&limit, first + i, quick, 1)]).is_allowed());
            // Slow buckets lie between quick ones, which go; and one limit's next to the other's in one request.
            let (own, other) = (first + (1 << 23) + i / 50, first + (1 << 22) + i / 50);
            if i % 50 == 0 {
                assert!(ask(&store, &[take(&limit, own, slow, 3), take(&limit, other, slow, 10)]).is_allowed());
            } else if i % 50 == 49 {
                let denied = ask(&store, &[take(&limit, own, slow, 1), take(&limit, other, slow, 1)]);
                assert!(!denied.is_allowed(), "{i}");
            }
        }
        for i in 0..SLOW {
            let (own, other) = (first + (1 << 23) + i, first + (1 << 22) + i);
            assert_eq!((left(&store, &limit, own, slow), left(&store, &limit, other, slow)), (7, 0), "{thread}: {i}");
        }
    });
    assert_eq!(store.overflowed(), 0);
    let slow = 4 * 2 * SLOW as usize;
    assert!((slow..slow + 200_000).contains(&store.buckets()), "{} of 400 000 quick ones", store.buckets() - slow);
}

#[test]
fn a_bucket_that_is_forgotten_and_made_again_hands_out_no_more_than_its_quota() {
    let (store, limit) = (MemoryStore::new(), name("limit"));
    let quota = Quota::per_second(2_000).with_capacity(4);
    let admitted: Vec<AtomicU64> = (0..32).map(|_| AtomicU64::new(0)).collect();
    let started = Instant::now();
    in_4_threads(|thread| {
        let mut rng = Rng::new(u64::from(thread));
        for i in 0..100_000 {
            // In bursts, with pauses in which it is full; a flood of others looks for those that are.
            let hot = (i / 200 + rng.below(4) as usize) % admitted.len();
            if ask(&store, &[take(&limit, hot as u32, quota, 1)]).is_allowed() {
                admitted[hot].fetch_add(1, Ordering::Relaxed);
            }
            ask(&store, &[take(&limit, ((1 + thread) << 24) | i as u32, quota, 1)]);
        }
    });
    let most = 4 + (started.elapsed().as_secs_f64() * 2_000.0).ceil() as u64;
    for (i, admitted) in admitted.iter().enumerate() {
        let admitted = admitted.load(Ordering::Relaxed);
        assert!(admitted <= most, "{i}: {admitted} of {most}");
    }
    assert_eq!(store.overflowed(), 0);
}

#[test]
fn four_threads_that_flood_a_store_do_not_pass_its_bound() {
    const MOST: usize = 4_096;
    let (store, limit, quota) = (MemoryStore::with_buckets(MOST), name("limit"), Quota::per_day(10));
    let drained = 0xffff_0000;
    (0..16).for_each(|i| assert!(ask(&store, &[take(&limit, drained + i, quota, 10)]).is_allowed()));
    let (own, shared) = (AtomicU64::new(0), AtomicU64::new(0));
    in_4_threads(|thread| {
        for i in 0..20_000 {
            // Two of a limit in one request are one step, at the bound as well.
            let key = (thread << 20) | (2 * i);
            let decision = ask(&store, &[take(&limit, key, quota, 1), take(&limit, key + 1, quota, 1)]);
            let counter = if decision.is_allowed() { &own } else { &shared };
            counter.fetch_add(1, Ordering::Relaxed);
            if i % 100 == 0 {
                assert!(store.buckets() <= MOST + 1, "{}", store.buckets());
            }
        }
    });
    let own = own.into_inner();
    assert_eq!(own + shared.into_inner(), 80_000);
    // Every token that was taken is in a bucket of its own, or in the one that is shared.
    let buckets = store.buckets() as u64 - 16 - 1;
    assert!((buckets..=buckets + 10).contains(&(2 * own)), "{own} requests, {buckets} buckets");
    assert!((0..16).all(|i| left(&store, &limit, drained + i, quota) == 0), "a drained bucket stays drained");
    // Two need two places: keys that come alone take those that are left.
    in_4_threads(|thread| {
        (0..5_000).for_each(|i| drop(ask(&store, &[take(&limit, (thread << 20) | (1 << 19) | i, quota, 1)])));
    });
    assert!((MOST..=MOST + 1).contains(&store.buckets()), "{}: with the one that is shared", store.buckets());
}

// Code of the user that panics.

#[tokio::test(start_paused = true)]
async fn a_closure_that_panics_leaves_the_store_as_it_was() {
    let store = MemoryStore::new();
    let quota = Quota::per_day(10);
    let (fault, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let faulty = |place: &'static str| {
        let fault = Arc::clone(&fault);
        move || assert!(!fault.load(Ordering::Relaxed), "fault in {place}")
    };
    let (in_key, in_cost, in_quota, in_hook) = (faulty("key"), faulty("cost"), faulty("quota"), faulty("hook"));
    let limits: [Limit; 4] = [
        Limit::new("limit", quota).key_by(Global),
        Limit::new("limit", quota).key_by(move |_: &http::request::Parts| {
            in_key();
            Some(BucketKey::global())
        }),
        Limit::new("limit", quota).key_by(Global).cost(move |_: &http::request::Parts| {
            in_cost();
            1
        }),
        Limit::new("limit", quota).key_by(Global).quota_by(move |_| {
            in_quota();
            None
        }),
    ];
    let in_hook = Arc::new(in_hook);
    for (i, limit) in limits.into_iter().enumerate() {
        let (in_hook, seen) = (Arc::clone(&in_hook), Arc::clone(&seen));
        let layer = TokenBucketLayer::new(store.clone(), limit).on_decision(move |_| {
            seen.fetch_add(1, Ordering::Relaxed);
            in_hook();
        });
        let inner = service_fn(|_: Request<()>| async { Ok::<_, std::io::Error>(Response::new(Body::empty())) });
        let call = |broken| {
            fault.store(broken, Ordering::Relaxed);
            let service = layer.layer(inner);
            tokio::spawn(async move { service.oneshot(Request::new(())).await.unwrap().status() })
        };
        assert!(call(true).await.unwrap_err().is_panic(), "limit {i}");
        assert_eq!(call(false).await.unwrap(), StatusCode::OK, "limit {i}");
    }
    // Four requests that passed, and one whose hook panicked when it was charged already.
    let left = ask(&store, &[Charge::new(name("limit"), BucketKey::global(), quota, Amount::Peek)]);
    assert_eq!((left.remaining(), seen.load(Ordering::Relaxed)), (Some(5), 5));
}
