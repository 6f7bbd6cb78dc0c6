//! Buckets in the memory of this process.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashTable;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::bucket::{self, State};
use crate::charge::Charge;
use crate::decision::{Decision, Reply};
use crate::error::ConfigError;
use crate::key::BucketKey;
use crate::log;
use crate::outbound::{AdaptiveStore, Paced, Pacer, Pacing, Rates};
use crate::pace::{self, Pace, PaceReply};
use crate::store::Store;

/// Locks over disjoint parts of the buckets.
const SHARDS: usize = 64;
/// Three quarters of the 2¹⁴ places of a shard's table: it keeps an eighth of them empty, and needs some room for those
/// that are forgotten.
const BUCKETS_DEFAULT: usize = SHARDS * ((1 << 14) / 4 * 3);
/// Places looked at for a bucket to forget whenever a new one is made.
const LOOK_AT: usize = 8;
/// The same where a shard is at its bound: a new key waits for no more than this before it shares the overflow bucket.
const LOOK_AT_BOUND: usize = 64;

/// Buckets in the memory of this process: exact for one instance, and with no set-up.
///
/// A store is a handle: its clones share the buckets. Memory is bounded. Buckets that are full are forgotten, a few
/// whenever a new one is made, since a fresh bucket is full as well; no other bucket ever is, so a flood of new keys
/// resets nothing. A store holds at most 786 432 buckets, or what [`with_buckets`](Self::with_buckets) says, in at most
/// 97 MiB (97 bytes for each of 2²⁰ places, which are made as they are needed and then kept). At the bound the keys that
/// have no bucket share one overflow bucket for each limit: that is logged once and [counted](Self::overflowed).
///
/// The clock is monotonic, read once a call, to the microsecond. It is tokio's, so that tests can pause it; no runtime
/// is needed.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};
///
/// let layer = TokenBucketLayer::new(MemoryStore::new(), Limit::new("per-address", Quota::per_second(10)));
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

struct Shared {
    started: Instant,
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    buckets_per_shard: usize,
    overflowed: AtomicU64,
    /// Buckets whose rate adapts: few, since they are those of peers.
    paces: Mutex<Paces>,
}

#[derive(Default)]
struct Paces {
    of: HashMap<(u128, BucketKey), Kept>,
    /// When there are so many, those whose life is over are forgotten.
    look_at: usize,
}

struct Kept {
    pace: Pace,
    until_us: u64,
}

#[derive(Default)]
struct Shard {
    buckets: HashTable<Bucket>,
    /// The place to look at next for a bucket to forget.
    hand: usize,
}

struct Bucket {
    name: Name,
    state: State,
}

/// Names a bucket in the table.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Name {
    /// The limit, as a hash of its name.
    limit: u128,
    /// `None` for the bucket that keys without one share.
    key: Option<BucketKey>,
}

impl MemoryStore {
    /// Creates an empty store of at most 786 432 buckets.
    #[must_use]
    pub fn new() -> Self {
        Self::bounded(BUCKETS_DEFAULT)
    }

    /// Creates an empty store of at most `buckets` buckets, rounded up to a multiple of 64. (One overflow bucket for
    /// each limit comes on top.)
    ///
    /// # Panics
    ///
    /// When `buckets` is 0; [`try_with_buckets`](Self::try_with_buckets) returns the error.
    #[must_use]
    #[track_caller]
    pub fn with_buckets(buckets: usize) -> Self {
        crate::error::or_panic(Self::try_with_buckets(buckets))
    }

    /// Creates an empty store of at most `buckets` buckets, like [`with_buckets`](Self::with_buckets).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Buckets`] when `buckets` is 0.
    pub fn try_with_buckets(buckets: usize) -> Result<Self, ConfigError> {
        if buckets == 0 {
            return Err(ConfigError::Buckets);
        }
        Ok(Self::bounded(buckets))
    }

    fn bounded(buckets: usize) -> Self {
        let shared = Shared {
            started: Instant::now(),
            hasher: RandomState::new(),
            shards: std::array::from_fn(|_| Mutex::default()),
            buckets_per_shard: buckets.div_ceil(SHARDS),
            overflowed: AtomicU64::new(0),
            paces: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many buckets are held now, those among them that are full but not yet forgotten.
    #[must_use]
    pub fn buckets(&self) -> usize {
        self.shared.shards.iter().map(|shard| lock(shard).buckets.len()).sum()
    }

    /// How many charges went to an overflow bucket, because the store held as many buckets as it may.
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.shared.overflowed.load(Ordering::Relaxed)
    }

    /// Makes all charges or none, at once.
    pub(crate) fn acquire_now(&self, charges: &[Charge]) -> Decision {
        let shared = &*self.shared;
        let now_us = shared.now_us();
        let replies: SmallVec<[Reply; 2]> = match charges {
            [charge] => SmallVec::from_slice(&[shared.acquire_one(charge, now_us)]),
            charges => shared.acquire_all(charges, now_us),
        };
        // As many replies as charges: there always is a decision.
        Decision::new(charges, &replies).unwrap_or_else(|| Decision::bare(false, crate::Source::Store))
    }
}

impl AdaptiveStore for MemoryStore {
    fn rates(&self) -> Rates {
        Rates::new(self.clone())
    }
}

impl Pacer for MemoryStore {
    fn pace(&self, pacing: Pacing, _: Duration) -> Paced {
        let reply = self.pace_now(&pacing);
        Box::pin(ready(Ok(reply)))
    }
}

impl MemoryStore {
    /// Goes on from what another store has said of a rate that adapts, at one `share`-th of it.
    pub(crate) fn go_on_from(&self, pacing: &Pacing, reply: PaceReply, share: u32) {
        let Pacing { limit, key, settings, .. } = pacing;
        let now_us = self.shared.now_us() + pace::BEGIN_US;
        let pace = Pace::of_reply(reply, settings, share, now_us);
        let mut paces = self.shared.paces.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = Kept { pace, until_us: now_us + pace.life_ms(settings, now_us) * 1000 };
        paces.of.insert((limit.hash_128(), *key), kept);
    }

    /// Answers one question about a rate that adapts.
    pub(crate) fn pace_now(&self, pacing: &Pacing) -> PaceReply {
        let Pacing { limit, key, settings, ask } = pacing;
        let now_us = self.shared.now_us() + pace::BEGIN_US;
        let mut paces = self.shared.paces.lock().unwrap_or_else(PoisonError::into_inner);
        let name = (limit.hash_128(), *key);
        let mut state = paces.of.get(&name).filter(|kept| now_us < kept.until_us).map(|kept| kept.pace);
        let before = state;
        let reply = pace::ask(&mut state, settings, *ask, now_us);
        if let Some(pace) = state.filter(|state| Some(*state) != before) {
            if paces.of.len() >= paces.look_at {
                paces.of.retain(|_, kept| now_us < kept.until_us);
                paces.look_at = 1024.max(2 * paces.of.len());
            }
            let until_us = now_us + pace.life_ms(settings, now_us) * 1000;
            paces.of.insert(name, Kept { pace, until_us });
        }
        reply
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("buckets", &self.buckets()).finish_non_exhaustive()
    }
}

impl Store for MemoryStore {
    type Error = Infallible;
    type Future = Ready<Result<Decision, Infallible>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        ready(Ok(self.acquire_now(charges)))
    }
}

/// No user code runs under a lock, so a poisoned one guards nothing that is half done.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Name {
    fn of(charge: &Charge) -> Self {
        Self { limit: charge.limit().hash_128(), key: Some(*charge.key()) }
    }

    /// The bucket that the keys of the same limit share which have none.
    fn overflow(self) -> Self {
        Self { key: None, ..self }
    }
}

/// Where a bucket is, or would be.
#[derive(Clone, Copy)]
struct Place {
    name: Name,
    hash: u64,
}

impl Place {
    fn shard(&self) -> usize {
        // The table takes the topmost and the lowest bits.
        (self.hash >> 32) as usize % SHARDS
    }
}

impl Shared {
    fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn place(&self, name: Name) -> Place {
        Place { name, hash: self.hasher.hash_one(name) }
    }

    /// One charge, under one lock.
    fn acquire_one(&self, charge: &Charge, now_us: u64) -> Reply {
        let mut place = self.place(Name::of(charge));
        loop {
            let mut shard = lock(&self.shards[place.shard()]);
            let found = shard.get(&place, now_us);
            if found.is_some() || self.make_room(&mut shard, &place, &[], now_us) {
                let mut state = found.flatten();
                let before = state;
                let reply = bucket::acquire_one(charge, &mut state, now_us);
                if state != before {
                    shard.set(&place, state, &self.hasher);
                }
                return reply;
            }
            drop(shard);
            place = self.overflow(place);
        }
    }

    /// Several charges, under the locks of all their shards. Locks are taken in order, so that no two callers wait for
    /// each other.
    fn acquire_all(&self, charges: &[Charge], now_us: u64) -> SmallVec<[Reply; 2]> {
        let mut places: SmallVec<[Place; 2]> = charges.iter().map(|charge| self.place(Name::of(charge))).collect();
        'overflow: loop {
            let mut shards: SmallVec<[usize; 2]> = places.iter().map(Place::shard).collect();
            shards.sort_unstable();
            shards.dedup();
            let mut locked: SmallVec<[_; 2]> = shards.iter().map(|shard| lock(&self.shards[*shard])).collect();
            let of = |place: &Place| shards.binary_search(&place.shard()).unwrap_or(0);

            let mut slots: SmallVec<[usize; 2]> = SmallVec::new();
            let mut unique: SmallVec<[Place; 2]> = SmallVec::new();
            let mut states: SmallVec<[Option<State>; 2]> = SmallVec::new();
            for i in 0..places.len() {
                let place = places[i];
                if let Some(slot) = unique.iter().position(|known| known.name == place.name) {
                    slots.push(slot);
                    continue;
                }
                let shard = &mut locked[of(&place)];
                let found = shard.get(&place, now_us);
                if found.is_none() && !self.make_room(shard, &place, &unique, now_us) {
                    places[i] = self.overflow(place);
                    continue 'overflow;
                }
                slots.push(unique.len());
                unique.push(place);
                states.push(found.flatten());
            }
            let before = states.clone();
            let replies = bucket::acquire(charges, &slots, &mut states, now_us);
            for ((place, state), before) in unique.iter().zip(states).zip(before) {
                if state != before {
                    locked[of(place)].set(place, state, &self.hasher);
                }
            }
            return replies;
        }
    }

    /// Whether a new bucket may be made, when this call also asks for those in `others`. Forgets a few full ones first.
    fn make_room(&self, shard: &mut Shard, place: &Place, others: &[Place], now_us: u64) -> bool {
        shard.forget(LOOK_AT, now_us);
        let is_full = |shard: &Shard| {
            let new = others.iter().filter(|other| other.shard() == place.shard() && !shard.holds(other)).count();
            shard.buckets.len() + new >= self.buckets_per_shard
        };
        if place.name.key.is_some() && is_full(shard) {
            shard.forget(LOOK_AT_BOUND, now_us);
            return !is_full(shard);
        }
        true
    }

    fn overflow(&self, place: Place) -> Place {
        if self.overflowed.fetch_add(1, Ordering::Relaxed) == 0 {
            let most = self.buckets_per_shard * SHARDS;
            log::warning!(
                "the memory store holds as many buckets as it may ({most}): new keys share an overflow bucket"
            );
        }
        self.place(place.name.overflow())
    }
}

impl Shard {
    fn holds(&self, place: &Place) -> bool {
        self.buckets.find(place.hash, |bucket| bucket.name == place.name).is_some()
    }

    /// The bucket's place in the table if it has one, and its state unless its life is over.
    fn get(&self, place: &Place, now_us: u64) -> Option<Option<State>> {
        let bucket = self.buckets.find(place.hash, |bucket| bucket.name == place.name)?;
        Some((!bucket.state.is_forgotten(now_us)).then_some(bucket.state))
    }

    fn set(&mut self, place: &Place, state: Option<State>, hasher: &RandomState) {
        let Some(state) = state else { return };
        match self.buckets.find_mut(place.hash, |bucket| bucket.name == place.name) {
            Some(bucket) => bucket.state = state,
            None => {
                self.renew(hasher);
                let bucket = Bucket { name: place.name, state };
                self.buckets.insert_unique(place.hash, bucket, |bucket| hasher.hash_one(bucket.name));
            }
        }
    }

    /// Makes the table anew in its own size where forgotten buckets have used up its places, which would double it.
    fn renew(&mut self, hasher: &RandomState) {
        let (buckets, places) = (self.buckets.len(), self.buckets.num_buckets());
        // Fuller than that it has to grow.
        if buckets < self.buckets.capacity() || buckets > places / 16 * 13 {
            return;
        }
        let hash = |bucket: &Bucket| hasher.hash_one(bucket.name);
        let mut renewed = HashTable::with_capacity(places / 8 * 7);
        for bucket in self.buckets.drain() {
            renewed.insert_unique(hash(&bucket), bucket, hash);
        }
        self.buckets = renewed;
    }

    /// Looks at the next `places` of the table and forgets the buckets there whose life is over.
    fn forget(&mut self, places: usize, now_us: u64) {
        let all = self.buckets.num_buckets();
        for _ in 0..places.min(all) {
            self.hand = (self.hand + 1) % all;
            if let Ok(bucket) = self.buckets.get_bucket_entry(self.hand)
                && bucket.get().state.is_forgotten(now_us)
            {
                bucket.remove();
            }
        }
    }
}
