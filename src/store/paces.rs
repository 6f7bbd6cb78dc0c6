//! Rates that adapt, in the memory of this process.

use std::hash::{BuildHasher, RandomState};
use std::sync::PoisonError;

use hashbrown::HashTable;

use crate::key::BucketKey;
use crate::outbound::Pacing;
use crate::pace::{self, Pace, PaceReply, PaceSettings};
use crate::store::sync::{AtomicUsize, Mutex, MutexGuard, Ordering};

/// Places looked at for a rate to forget whenever a new one is kept.
const LOOK_AT: usize = 8;
/// The same at the bound: a new key waits for no more than this before it shares the overflow bucket.
const LOOK_AT_BOUND: usize = 64;
/// A part grows by doubling, and who waits for its lock waits for that: so it has about this many rates at most.
const RATES_PER_SHARD: usize = 1024;
const SHARDS_MAX: usize = 1024;

/// Buckets whose rate adapts, at most so many, and one more for each limit: the keys that come at the bound share it. What
/// is at its ceiling and full is forgotten in small steps, since a fresh one is as well.
pub(super) struct Paces {
    /// As many as a power of two.
    shards: Box<[Mutex<Shard>]>,
    hasher: RandomState,
    most: usize,
    /// Those that have a name of their own, and places that are taken for such.
    len: AtomicUsize,
}

#[derive(Default)]
struct Shard {
    of: HashTable<Kept>,
    /// The place to look at next for a rate to forget.
    hand: usize,
}

struct Kept {
    name: Name,
    pace: Pace,
    until_us: u64,
}

/// A limit, by the hash of its name, and a key: `None` for those that have no bucket of their own.
type Name = (u128, Option<BucketKey>);

impl Paces {
    pub(super) fn new(most: usize) -> Self {
        let shards = (most / RATES_PER_SHARD).next_power_of_two().min(SHARDS_MAX);
        let shards = (0..shards).map(|_| Mutex::default()).collect();
        Self { shards, hasher: RandomState::new(), most, len: AtomicUsize::new(0) }
    }

    /// Answers one question. And whether it went to an overflow bucket. The time is read when nobody can come between.
    pub(super) fn ask(&self, pacing: &Pacing, now_us: impl Fn() -> u64) -> (PaceReply, bool) {
        let Pacing { limit, key, settings, ask } = pacing;
        let limit = limit.hash_128();
        let mut name = (limit, Some(*key));
        let mut hash = self.hash(name);
        let mut shard = self.shard(hash);
        let mut now = now_us();
        if !self.make_room(&mut shard, hash, name, now) {
            drop(shard);
            name = (limit, None);
            hash = self.hash(name);
            shard = self.shard(hash);
            now = now_us();
        }
        let mut state = shard.find(hash, name).filter(|kept| now < kept.until_us).map(|kept| kept.pace);
        let before = state;
        let reply = pace::ask(&mut state, settings, *ask, now);
        match state.filter(|state| Some(*state) != before) {
            Some(pace) => self.keep(&mut shard, hash, name, pace, settings, now),
            None => self.leave_room(&shard, hash, name),
        }
        (reply, name.1.is_none())
    }

    /// Goes on from what `pace` makes of the time, which is read when nobody can come between.
    pub(super) fn go_on_from(&self, pacing: &Pacing, now_us: impl Fn() -> u64, pace: impl FnOnce(u64) -> Pace) {
        let name = (pacing.limit.hash_128(), Some(pacing.key));
        let hash = self.hash(name);
        let mut shard = self.shard(hash);
        let now = now_us();
        // Others' word is no reason to slow all of those down that share a bucket.
        if self.make_room(&mut shard, hash, name, now) {
            self.keep(&mut shard, hash, name, pace(now), &pacing.settings, now);
        }
    }

    fn hash(&self, name: Name) -> u64 {
        self.hasher.hash_one(name)
    }

    /// By bits that its table does not begin with.
    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        let shard = (hash >> 32) as usize & (self.shards.len() - 1);
        // Nothing under this lock can leave it half done.
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the name is known, or has a place by now.
    fn make_room(&self, shard: &mut Shard, hash: u64, name: Name, now_us: u64) -> bool {
        if shard.find(hash, name).is_some() {
            return true;
        }
        for places in [LOOK_AT, LOOK_AT_BOUND] {
            self.len.fetch_sub(shard.forget(places, now_us), Ordering::Relaxed);
            if self.len.fetch_add(1, Ordering::Relaxed) < self.most {
                return true;
            }
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        false
    }

    /// The name has not needed its place.
    fn leave_room(&self, shard: &Shard, hash: u64, name: Name) {
        if name.1.is_some() && shard.find(hash, name).is_none() {
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn keep(&self, shard: &mut Shard, hash: u64, name: Name, pace: Pace, settings: &PaceSettings, now_us: u64) {
        let kept = Kept { name, pace, until_us: now_us + pace.life_ms(settings, now_us) * 1000 };
        match shard.of.find_mut(hash, |kept| kept.name == name) {
            Some(known) => *known = kept,
            None => _ = shard.of.insert_unique(hash, kept, |kept| self.hash(kept.name)),
        }
    }
}

impl Shard {
    fn find(&self, hash: u64, name: Name) -> Option<&Kept> {
        self.of.find(hash, |kept| kept.name == name)
    }

    /// Looks at so many places. How many names have lost theirs: overflow buckets are not among them.
    fn forget(&mut self, places: usize, now_us: u64) -> usize {
        let all = self.of.num_buckets();
        let mut forgotten = 0;
        for _ in 0..places.min(all) {
            self.hand = (self.hand + 1) % all;
            if let Ok(kept) = self.of.get_bucket_entry(self.hand)
                && kept.get().until_us <= now_us
            {
                forgotten += usize::from(kept.remove().0.name.1.is_some());
            }
        }
        forgotten
    }
}
