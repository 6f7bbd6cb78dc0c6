//! Threads whose order a scheduler chooses: many of those that real threads hardly ever come in. Each test holds in all of them.
//!
//! Run by `tests/races`, with the time as an argument.

use shuttle::thread;

use super::*;
use crate::charge::{Amount, LimitName};
use crate::key::BucketKey;
use crate::outbound::AdaptiveRate;
use crate::pace::{PaceAsk, PaceSettings};

/// Orders that are tried of each, by chance and with a few changes of threads at the worst places.
const ORDERS: usize = 1_000;
const CHANGES: usize = 3;
/// When a bucket that was drained at 0 is full again.
const FULL_US: u64 = 1_000_000;

fn in_all_orders(test: impl Fn() + Copy + Send + Sync + 'static) {
    shuttle::check_random(test, ORDERS);
    shuttle::check_pct(test, ORDERS, CHANGES);
}

/// Runs each in a thread of its own, and gives what they found.
fn together<T: Send + 'static>(threads: impl IntoIterator<Item = impl FnOnce() -> T + Send + 'static>) -> Vec<T> {
    let threads: Vec<_> = threads.into_iter().map(thread::spawn).collect();
    threads.into_iter().map(|thread| thread.join().expect("a thread has panicked")).collect()
}

/// A limit of so many tokens in a second, which all come back in one.
fn charge(key: u64, capacity: u64, amount: Amount) -> Charge {
    let limit = LimitName::try_new("raced").expect("a name");
    Charge::new(limit, BucketKey::id(key.to_le_bytes()), Quota::new(capacity, Duration::from_secs(1)), amount)
}

/// A store with room for one bucket in each shard.
fn narrow() -> Arc<Shared> {
    let shared = MemoryStore::bounded(SHARDS.0).shared;
    assert_eq!(shared.buckets_per_shard, 1);
    shared
}

/// Keys that share one shard.
fn neighbours<const N: usize>(shared: &Shared) -> [u64; N] {
    let shard = |key: u64| shared.shard(shared.name(&charge(key, 1, Amount::Peek)));
    let mut keys = (0..).filter(|key| shard(*key) == shard(0));
    std::array::from_fn(|_| keys.next().expect("there are always more"))
}

fn level(shared: &Shared, key: u64, capacity: u64, now_us: u64) -> u64 {
    shared.acquire(&[charge(key, capacity, Amount::Peek)], now_us).remaining().expect("it was asked")
}

/// Locks are taken in one order, whatever order the charges have: nobody waits for ever, and all are made or none.
#[test]
fn charges_to_several_buckets_are_one_step() {
    in_all_orders(|| {
        let shared = MemoryStore::new().shared;
        let orders: [&[u64]; 3] = [&[0, 1, 2], &[2, 0], &[1, 2, 0]];
        let taken = together(orders.map(|keys| {
            let shared = Arc::clone(&shared);
            move || {
                let charges: Vec<_> = keys.iter().map(|key| charge(*key, 3, Amount::Take(1))).collect();
                let allowed = (0..2).filter(|_| shared.acquire(&charges, 0).is_allowed()).count() as u64;
                keys.iter().map(|key| (*key, allowed)).collect::<Vec<_>>()
            }
        }));
        for key in 0..3 {
            let taken: u64 = taken.iter().flatten().filter(|(of, _)| *of == key).map(|(_, taken)| taken).sum();
            assert_eq!(level(&shared, key, 3, 0), 3 - taken, "of {key}");
        }
        // Those of 0 and 2 are asked for six times, and each refusal is for want of them.
        assert_eq!(level(&shared, 2, 3, 0), 0);
    });
}

/// A bucket is forgotten when it is full, also by a thread that is ahead of or behind the one that drains it.
#[test]
fn no_bucket_is_forgotten_that_is_not_full() {
    in_all_orders(|| {
        let shared = narrow();
        let [drained, other] = neighbours(&shared);
        assert!(shared.acquire(&[charge(drained, 1, Amount::Take(1))], 0).is_allowed());
        let take = |key, now_us| {
            let shared = Arc::clone(&shared);
            move || shared.acquire(&[charge(key, 1, Amount::Take(1))], now_us).is_allowed()
        };
        let allowed = together([
            take(drained, FULL_US - 1),
            take(drained, FULL_US),
            take(drained, FULL_US),
            take(other, FULL_US - 1),
            take(other, FULL_US),
        ]);
        let allowed = allowed.into_iter().filter(|allowed| *allowed).count() as u64;
        // One token for each key that had a bucket of its own, and one that those without shared.
        let shared_too = u64::from(shared.overflowed.load(Ordering::Relaxed) > 0);
        assert!(allowed <= 2 + shared_too, "{allowed} allowed");
        assert!(allowed >= 1);
    });
}

/// Also where several threads find the last place free.
#[test]
fn the_bound_holds() {
    in_all_orders(|| {
        let shared = narrow();
        let [a, b, c, d] = neighbours(&shared);
        let allowed = together([[a, b], [b, c], [d, a]].map(|keys| {
            let shared = Arc::clone(&shared);
            move || {
                keys.map(|key| {
                    let decision = shared.acquire(&[charge(key, 9, Amount::Take(1))], 0);
                    let buckets = lock(&shared.shards[shared.shard(shared.name(&charge(a, 9, Amount::Peek)))]).buckets;
                    assert!(buckets <= 1 + 1, "{buckets}: one, and at most the one that is shared");
                    decision.is_allowed()
                })
            }
        }));
        let all = allowed.into_iter().flatten().filter(|allowed| *allowed).count() as u64;
        // Six tokens, each from the bucket of one key or from that of the others.
        let left: u64 = levels(&shared).map(|(level, capacity)| capacity - level).sum();
        assert_eq!((all, left), (6, 6));
    });
}

/// Level and capacity of each bucket, in tokens.
fn levels(shared: &Shared) -> impl Iterator<Item = (u64, u64)> {
    shared.shards.iter().flat_map(|shard| {
        let shard = lock(shard);
        let buckets = (0..shard.used).map(|place| *shard.bucket(place)).filter(|bucket| bucket.tokens > 0);
        buckets.map(|bucket| (bucket.level as u64 / bucket.per_us, u64::from(bucket.capacity))).collect::<Vec<_>>()
    })
}

/// The same for rates that adapt.
#[test]
fn no_more_rates_are_kept_than_may_be() {
    in_all_orders(|| {
        let paces = Arc::new(Paces::new(2));
        let settings = PaceSettings::try_new(1, AdaptiveRate::below(1.0)).expect("settings");
        let pacing = move |key: u64, ask| {
            let limit = LimitName::try_new("raced").expect("a name");
            Pacing { limit, key: BucketKey::id(key.to_le_bytes()), settings, ask }
        };
        let overflowed = together([[0, 1], [1, 2], [3, 0]].map(|keys| {
            let paces = Arc::clone(&paces);
            move || {
                keys.map(|key| {
                    let take = pacing(key, PaceAsk::Take(1));
                    // Of what changes nothing nothing is kept.
                    paces.ask(&pacing(key, PaceAsk::Look), || pace::BEGIN_US);
                    let (reply, is_shared) = paces.ask(&take, || pace::BEGIN_US);
                    (key, reply.allowed, is_shared)
                })
            }
        }));
        let mut own: Vec<_> = overflowed.iter().flatten().filter(|(_, _, is_shared)| !is_shared).collect();
        own.sort_unstable();
        own.dedup_by_key(|(key, ..)| *key);
        assert!(own.len() <= 2, "{own:?} have a rate of their own");
        let allowed = overflowed.iter().flatten().filter(|(_, allowed, _)| *allowed).count();
        assert!(allowed <= 2 + 1, "{overflowed:?}: one token for each of two, and one for the others");
    });
}
