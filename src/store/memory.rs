//! Buckets in the memory of this process.

use std::cmp;
use std::convert::Infallible;
use std::fmt;
use std::future::{Ready, ready};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::bucket::{self, State};
use crate::charge::Charge;
use crate::decision::{Decision, Reply};
use crate::error::ConfigError;
use crate::outbound::{AdaptiveStore, Paced, Pacer, Pacing, Rates};
use crate::pace::{self, Pace, PaceReply};
use crate::quota::Quota;
use crate::store::Store;
use crate::store::paces::Paces;
use crate::store::sync::{AtomicU64, Mutex, MutexGuard, Ordering};
use crate::{log, metrics};

/// Fewest and most locks over disjoint parts of the buckets: powers of two.
const SHARDS: (usize, usize) = (64, 1 << 12);
/// Buckets of a shard, where there may be more shards.
const BUCKETS_PER_SHARD: usize = 3 << 10;
const BUCKETS_DEFAULT: usize = 256 * BUCKETS_PER_SHARD;
/// Places for buckets that are made at once.
const CHUNK: usize = 32;
/// Chains that are made at once.
const CHAINS: usize = 128;
/// Places looked at for a bucket to forget whenever a new one is made.
const LOOK_AT: usize = 8;
/// The same where a shard is at its bound: a new key waits for no more than this before it shares the overflow bucket.
const LOOK_AT_BOUND: usize = 64;
/// The number of no place.
const NONE: u32 = u32::MAX;

/// Buckets in the memory of this process: exact for one instance, and with no set-up.
///
/// A store is a handle: its clones share the buckets. Memory is bounded. Buckets that are full are forgotten, a few
/// whenever a new one is made, since a fresh bucket is full as well; no other bucket ever is, so a flood of new keys
/// resets nothing. A store holds at most 786 432 buckets, or what [`with_buckets`](Self::with_buckets) says, in at most
/// 48 MiB (64 bytes for each bucket, in places that are made as they are needed and then kept). At the bound the keys
/// that have no bucket share one overflow bucket for each limit: that is logged once and [counted](Self::overflowed).
///
/// No call waits for others to be tidied up: the store grows and forgets by a few buckets at a time.
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
    names: Names,
    /// As many as a power of two.
    shards: Box<[Mutex<Shard>]>,
    buckets_per_shard: usize,
    overflowed: AtomicU64,
    held: metrics::Held,
    /// Buckets whose rate adapts: made when there are any.
    paces: OnceLock<Paces>,
}

/// Buckets under one lock, in a chained hash table that grows by one place and one chain at a time (linear hashing).
/// Nothing that grows is ever made anew as a whole, so that nobody waits for it.
///
/// The alignment keeps two locks out of one line of the caches.
#[repr(align(128))]
struct Shard {
    #[allow(clippy::vec_box, reason = "more are made without moving those that are there")]
    places: Vec<Box<[Bucket; CHUNK]>>,
    /// The places of the first buckets of each chain, close together, since they are looked at first.
    #[allow(clippy::vec_box, reason = "more are made without moving those that are there")]
    chains: Vec<Box<[u32; CHAINS]>>,
    /// Places that have been used, the first ones; there are as many chains.
    used: u32,
    /// The first place that is free again: these are chained as well.
    free: u32,
    buckets: usize,
    /// The place to look at next for a bucket to forget.
    hand: u32,
}

/// A bucket in its place: a [`State`] in as few bytes as integers allow, since most of them lie idle.
#[derive(Clone, Copy)]
struct Bucket {
    name: Name,
    at_us: u64,
    level: i64,
    /// 0 in a place that is free.
    tokens: u64,
    per_us: u64,
    capacity: u32,
    /// The next bucket of the chain.
    next: u32,
}

/// Names a bucket, whatever its limit and key are.
type Name = [u64; 2];

/// Makes 128-bit names by multiply-shift hashing (Dietzfelbinger 1996): two different buckets have the same name with a
/// probability of 2⁻¹²⁸, whoever chooses their keys, since the multipliers are random and nothing tells them.
///
/// Each half of a name is a hash of 64 bits of the key's number, plus a half of what is known beforehand: the hash of the
/// limit, and the kind of key. The hashes of two numbers differ by each value with a probability of 2⁻⁶⁴, so also by the
/// one that makes up for what else differs. One number has one hash, and then the names differ as what is known does: always
/// under one limit, and under two unless their own hashes, which no client chooses, are less than 2¹⁶ apart.
struct Names {
    multipliers: [[u128; 2]; 2],
    addends: [u128; 2],
}

impl MemoryStore {
    /// Creates an empty store of at most 786 432 buckets.
    #[must_use]
    pub fn new() -> Self {
        Self::bounded(BUCKETS_DEFAULT)
    }

    /// Creates an empty store of at most `buckets` buckets, rounded up to a multiple of 64, and above 200 000 by less
    /// than 1 %. (One overflow bucket for each limit comes on top.)
    ///
    /// The bound is held by each of 64 parts or more, which keys do not fill evenly: the first ones share the overflow bucket
    /// at 96 % of 100 000 buckets, at 80 % of 1000, and below that much earlier.
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
        let shards = (buckets / BUCKETS_PER_SHARD).next_power_of_two().clamp(SHARDS.0, SHARDS.1);
        let shared = Shared {
            started: Instant::now(),
            names: Names::random(),
            shards: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            // No more than there are numbers of places.
            buckets_per_shard: buckets.div_ceil(shards).min(1 << 31),
            overflowed: AtomicU64::new(0),
            held: metrics::Held::default(),
            paces: OnceLock::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How many buckets are held now, those among them that are full but not yet forgotten.
    #[must_use]
    pub fn buckets(&self) -> usize {
        self.shared.shards.iter().map(|shard| lock(shard).buckets).sum()
    }

    /// How many charges went to an overflow bucket, because the store held as many buckets as it may.
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.shared.overflowed.load(Ordering::Relaxed)
    }

    /// Makes all charges or none, at once.
    pub(crate) fn acquire_now(&self, charges: &[Charge]) -> Decision {
        self.shared.acquire(charges, self.shared.now_us())
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

    fn may_fail(&self) -> bool {
        false
    }
}

impl MemoryStore {
    /// Goes on from what another store has said of a rate that adapts, at one `share`-th of it.
    pub(crate) fn go_on_from(&self, pacing: &Pacing, reply: PaceReply, share: u32) {
        let pace = |now_us| Pace::of_reply(reply, &pacing.settings, share, now_us);
        self.shared.paces().go_on_from(pacing, || self.shared.pace_us(), pace);
    }

    /// Answers one question about a rate that adapts.
    pub(crate) fn pace_now(&self, pacing: &Pacing) -> PaceReply {
        let (reply, is_overflow) = self.shared.paces().ask(pacing, || self.shared.pace_us());
        if is_overflow {
            self.shared.count_overflow();
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

    fn acquire_at_once(&self, charges: &[Charge]) -> Option<Decision> {
        Some(self.acquire_now(charges))
    }
}

/// No user code runs under a lock, so a poisoned one guards nothing that is half done.
fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Names {
    /// In the place of a key's numbers, for the bucket that keys without one share: no key has these.
    const OVERFLOW: (u16, u128) = (u16::MAX, 0);

    fn random() -> Self {
        let random = RandomState::new();
        let number = |i: usize| (u128::from(random.hash_one(2 * i)) << 64) | u128::from(random.hash_one(2 * i + 1));
        Self { multipliers: [[number(0), number(1)], [number(2), number(3)]], addends: [number(4), number(5)] }
    }

    fn name(&self, limit: u128, (kind, number): (u16, u128)) -> Name {
        let known = limit.wrapping_add(kind.into());
        let halves = |number: u128| [number as u64, (number >> 64) as u64];
        let (known, words) = (halves(known), halves(number));
        std::array::from_fn(|half| {
            let products = words.iter().zip(&self.multipliers[half]);
            let sum = products.fold(self.addends[half], |sum, (word, multiplier)| {
                sum.wrapping_add(multiplier.wrapping_mul(u128::from(*word)))
            });
            mix(known[half].wrapping_add((sum >> 64) as u64))
        })
    }
}

/// The last step of MurmurHash3 (Appleby 2011), a bijection. Keys in a row, as the addresses of a network, have sums in a row,
/// which for one process in twenty would fall into a few of the shards and chains.
const fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ bits >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    bits = (bits ^ bits >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    bits ^ bits >> 33
}

/// This clock does not step back: where a bucket has been written later than `now_us`, others were quicker since that was
/// read. However long ago that is, as after a pause of the process, no time is earned twice.
fn latest(now_us: u64, states: &[Option<State>]) -> u64 {
    states.iter().flatten().map(|state| state.at_us).fold(now_us, u64::max)
}

impl Shared {
    fn now_us(&self) -> u64 {
        let elapsed = self.started.elapsed();
        // Not by `as_micros`, whose 128 bits are dear.
        elapsed.as_secs().saturating_mul(1_000_000).saturating_add(elapsed.subsec_micros().into())
    }

    /// The same for rates that adapt.
    fn pace_us(&self) -> u64 {
        self.now_us() + pace::BEGIN_US
    }

    fn name(&self, charge: &Charge) -> Name {
        self.names.name(charge.limit().hash_128(), charge.key().numbers())
    }

    /// The number of the shard; chains are told apart by the other half of the name.
    fn shard(&self, name: Name) -> usize {
        name[0] as usize & (self.shards.len() - 1)
    }

    /// Makes all charges or none.
    fn acquire(&self, charges: &[Charge], now_us: u64) -> Decision {
        if let [charge] = charges {
            return Decision::of_one(charge, self.acquire_one(charge, now_us));
        }
        let two = <&[Charge; 2]>::try_from(charges).ok().and_then(|two| self.acquire_two(two, now_us));
        let replies = two.unwrap_or_else(|| self.acquire_all(charges, now_us));
        Decision::of_replies(charges, replies.into_iter().map(Some))
    }

    /// One charge, under one lock.
    fn acquire_one(&self, charge: &Charge, now_us: u64) -> Reply {
        let mut name = self.name(charge);
        loop {
            let mut shard = lock(&self.shards[self.shard(name)]);
            if let Some(place) = shard.find(name) {
                let bucket = shard.bucket_mut(place);
                let state = bucket.read(Some(&charge.quota()), now_us);
                let now_us = state.map_or(now_us, |state| now_us.max(state.at_us));
                let (reply, written) = bucket::acquire_one(charge, state.as_ref(), now_us);
                bucket.set(written);
                return reply;
            }
            if let Some(reply) = self.acquire_new(shard, charge, name, now_us) {
                return reply;
            }
            name = self.overflow(charge);
        }
    }

    /// The same for a bucket that is not there; `None` where there is no room for it.
    #[inline(never)]
    fn acquire_new(&self, mut shard: MutexGuard<'_, Shard>, charge: &Charge, name: Name, now_us: u64) -> Option<Reply> {
        let before = shard.buckets;
        let reply = self.make_room(&mut shard, charge, name, &[], now_us).then(|| {
            let (reply, written) = bucket::acquire_one(charge, None, now_us);
            shard.set(name, written);
            reply
        });
        let more = shard.buckets as isize - before as isize;
        drop(shard);
        self.held.add(more);
        reply
    }

    /// Two charges to buckets that are there, in different shards: what [`acquire_all`](Self::acquire_all) does, without
    /// its lists. `None` where it is another case.
    fn acquire_two(&self, charges: &[Charge; 2], now_us: u64) -> Option<SmallVec<[Reply; 4]>> {
        let names = charges.each_ref().map(|charge| self.name(charge));
        let shards = names.map(|name| self.shard(name));
        let lock = |i: usize| lock(&self.shards[shards[i]]);
        let (mut first, mut second) = match shards[0].cmp(&shards[1]) {
            cmp::Ordering::Less => {
                let first = lock(0);
                (first, lock(1))
            }
            cmp::Ordering::Equal => return None,
            cmp::Ordering::Greater => {
                let second = lock(1);
                (lock(0), second)
            }
        };
        let (first, second) = (first.bucket_of(names[0])?, second.bucket_of(names[1])?);
        let before = [first.read(None, now_us), second.read(None, now_us)];
        let mut states = before;
        let replies = bucket::acquire(charges, &[0, 1], &before, &mut states, latest(now_us, &before));
        first.set(states[0]);
        second.set(states[1]);
        Some(replies)
    }

    /// Several charges, under the locks of all their shards. Locks are taken in order, so that no two callers wait for
    /// each other.
    fn acquire_all(&self, charges: &[Charge], now_us: u64) -> SmallVec<[Reply; 4]> {
        let mut names: SmallVec<[Name; 4]> = charges.iter().map(|charge| self.name(charge)).collect();
        'overflow: loop {
            let mut shards: SmallVec<[usize; 4]> = names.iter().map(|name| self.shard(*name)).collect();
            shards.sort_unstable();
            shards.dedup();
            let mut locked: SmallVec<[_; 4]> = shards.iter().map(|shard| lock(&self.shards[*shard])).collect();
            let buckets =
                |locked: &[MutexGuard<'_, Shard>]| locked.iter().map(|shard| shard.buckets as isize).sum::<isize>();
            let held = buckets(&locked);
            let of = |name: Name| shards.binary_search(&self.shard(name)).unwrap_or(0);

            let mut slots: SmallVec<[usize; 4]> = SmallVec::new();
            let mut unique: SmallVec<[Name; 4]> = SmallVec::new();
            let mut states: SmallVec<[Option<State>; 4]> = SmallVec::new();
            for (i, charge) in charges.iter().enumerate() {
                let name = names[i];
                if let Some(slot) = unique.iter().position(|known| *known == name) {
                    slots.push(slot);
                    continue;
                }
                let shard = &mut locked[of(name)];
                let found = shard.find(name);
                if found.is_none() && !self.make_room(shard, charge, name, &unique, now_us) {
                    let more = buckets(&locked) - held;
                    drop(locked);
                    self.held.add(more);
                    names[i] = self.overflow(charge);
                    continue 'overflow;
                }
                slots.push(unique.len());
                unique.push(name);
                states.push(found.and_then(|place| shard.bucket(place).read(None, now_us)));
            }
            let before = states.clone();
            let replies = bucket::acquire(charges, &slots, &before, &mut states, latest(now_us, &before));
            for ((name, state), before) in unique.into_iter().zip(states).zip(before) {
                if state != before {
                    locked[of(name)].set(name, state);
                }
            }
            let more = buckets(&locked) - held;
            drop(locked);
            self.held.add(more);
            return replies;
        }
    }

    /// Whether a new bucket may be made, when this call also asks for those in `others`. Forgets a few full ones first.
    fn make_room(&self, shard: &mut Shard, charge: &Charge, name: Name, others: &[Name], now_us: u64) -> bool {
        shard.forget(LOOK_AT, now_us);
        let is_full = |shard: &Shard| {
            let is_new = |other: &&Name| self.shard(**other) == self.shard(name) && shard.find(**other).is_none();
            shard.buckets + others.iter().filter(is_new).count() >= self.buckets_per_shard
        };
        if !is_full(shard) || name == self.shared_name(charge) {
            return true;
        }
        shard.forget(LOOK_AT_BOUND, now_us);
        !is_full(shard)
    }

    /// Names the bucket that the keys of the same limit share which have none.
    fn shared_name(&self, charge: &Charge) -> Name {
        self.names.name(charge.limit().hash_128(), Names::OVERFLOW)
    }

    fn paces(&self) -> &Paces {
        self.paces.get_or_init(|| Paces::new(self.buckets_per_shard * self.shards.len()))
    }

    fn count_overflow(&self) {
        metrics::overflowed();
        if self.overflowed.fetch_add(1, Ordering::Relaxed) == 0 {
            let most = self.buckets_per_shard * self.shards.len();
            log::warning!(
                "a part of the memory store holds as many buckets as it may ({most} in all): new keys share an overflow \
                 bucket"
            );
        }
    }

    /// The name to go on with where a charge can have no bucket of its own.
    fn overflow(&self, charge: &Charge) -> Name {
        self.count_overflow();
        self.shared_name(charge)
    }
}

impl Bucket {
    const FREE: Self = Self { name: [0; 2], at_us: 0, level: 0, tokens: 0, per_us: 0, capacity: 0, next: NONE };

    fn state(&self) -> State {
        let Self { at_us, level, tokens, per_us, capacity, .. } = *self;
        State { at_us, capacity: u64::from(capacity), tokens, per_us, level }
    }

    /// What is kept of it; `None` when its life is over, unless it makes no difference to this quota, the only one that
    /// asks.
    fn read(&self, quota: Option<&Quota>, now_us: u64) -> Option<State> {
        let state = self.state();
        (quota.is_some_and(|quota| state.is_of(quota)) || !state.is_forgotten(now_us)).then_some(state)
    }

    fn set(&mut self, state: Option<State>) {
        let Some(State { at_us, capacity, tokens, per_us, level }) = state else { return };
        // A capacity is at most 2³¹.
        *self = Self { at_us, level, tokens, per_us, capacity: capacity as u32, ..*self };
    }
}

impl Shard {
    const fn new() -> Self {
        Self { places: Vec::new(), chains: Vec::new(), used: 0, free: NONE, buckets: 0, hand: 0 }
    }

    fn bucket(&self, place: u32) -> &Bucket {
        &self.places[place as usize / CHUNK][place as usize % CHUNK]
    }

    fn bucket_mut(&mut self, place: u32) -> &mut Bucket {
        &mut self.places[place as usize / CHUNK][place as usize % CHUNK]
    }

    /// The place of the first bucket of the chain that is for this name.
    fn first(&self, name: Name) -> u32 {
        let chain = self.chain(name);
        self.chains.get(chain / CHAINS).map_or(NONE, |chains| chains[chain % CHAINS])
    }

    fn first_mut(&mut self, name: Name) -> &mut u32 {
        let chain = self.chain(name);
        &mut self.chains[chain / CHAINS][chain % CHAINS]
    }

    /// The number of the chain: as many of the name's bits as number all chains, and one bit less for a chain that is
    /// not there yet.
    fn chain(&self, name: Name) -> usize {
        let mask = self.used.next_power_of_two() - 1;
        let chain = name[1] as u32 & mask;
        (if chain < self.used { chain } else { chain & (mask >> 1) }) as usize
    }

    fn find(&self, name: Name) -> Option<u32> {
        let mut place = self.first(name);
        while place != NONE {
            let bucket = self.bucket(place);
            if bucket.name == name {
                return Some(place);
            }
            place = bucket.next;
        }
        None
    }

    fn bucket_of(&mut self, name: Name) -> Option<&mut Bucket> {
        self.find(name).map(|place| self.bucket_mut(place))
    }

    fn set(&mut self, name: Name, state: Option<State>) {
        if state.is_none() {
            return;
        }
        let place = self.find(name).unwrap_or_else(|| self.insert(name));
        self.bucket_mut(place).set(state);
    }

    fn insert(&mut self, name: Name) -> u32 {
        let place = match self.free {
            NONE => self.add_place(),
            free => {
                self.free = self.bucket(free).next;
                free
            }
        };
        *self.bucket_mut(place) = Bucket { name, ..Bucket::FREE };
        self.link(place);
        self.buckets += 1;
        place
    }

    /// Puts a bucket at the head of its chain.
    fn link(&mut self, place: u32) {
        let name = self.bucket(place).name;
        self.bucket_mut(place).next = std::mem::replace(self.first_mut(name), place);
    }

    /// One place more, and one chain, which takes about half of the buckets of the chain that was there in its stead.
    fn add_place(&mut self) -> u32 {
        let new = self.used;
        if new as usize == self.places.len() * CHUNK {
            self.places.push(Box::new([Bucket::FREE; CHUNK]));
        }
        if new as usize == self.chains.len() * CHAINS {
            self.chains.push(Box::new([NONE; CHAINS]));
        }
        self.used += 1;
        // Its number without the topmost bit.
        let other = (new - self.used.next_power_of_two() / 2) as usize;
        let mut rest = std::mem::replace(&mut self.chains[other / CHAINS][other % CHAINS], NONE);
        while rest != NONE {
            let next = self.bucket(rest).next;
            self.link(rest);
            rest = next;
        }
        new
    }

    fn remove(&mut self, place: u32) {
        let Bucket { name, next, .. } = *self.bucket(place);
        let mut before = self.first(name);
        if before == place {
            *self.first_mut(name) = next;
        } else {
            while self.bucket(before).next != place {
                before = self.bucket(before).next;
            }
            self.bucket_mut(before).next = next;
        }
        *self.bucket_mut(place) = Bucket { next: self.free, ..Bucket::FREE };
        self.free = place;
        self.buckets -= 1;
    }

    /// Looks at the next `places` and forgets the buckets there whose life is over.
    fn forget(&mut self, places: usize, now_us: u64) {
        for _ in 0..places.min(self.used as usize) {
            self.hand = if self.hand + 1 < self.used { self.hand + 1 } else { 0 };
            let bucket = self.bucket(self.hand);
            if bucket.tokens > 0 && bucket.state().is_forgotten(now_us) {
                self.remove(self.hand);
            }
        }
    }
}

#[cfg(all(test, shuttle))]
mod races;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use crate::key::BucketKey;

    #[test]
    fn keys_of_one_number_have_names_of_their_own() {
        let [v4, v6] = ["0.0.0.0", "::"].map(|address| address.parse().unwrap());
        let prefixes = (0..=128).map(|bits| BucketKey::ip_prefix(v6, bits));
        let keys = [BucketKey::global(), BucketKey::ip(v4)].into_iter().chain(prefixes).map(|key| key.numbers());
        let keys: Vec<(u16, u128)> = keys.chain([Names::OVERFLOW]).collect();
        assert!(keys.iter().all(|(_, number)| *number == 0));
        let (names, mut known) = (Names::random(), std::collections::HashSet::new());
        for limit in ["a", "b"].map(|name| crate::charge::LimitName::try_new(name).unwrap().hash_128()) {
            keys.iter().for_each(|key| assert!(known.insert(names.name(limit, *key)), "{key:?}"));
        }
    }

    /// Names that are alike in the bits that number a chain, and others.
    fn name(i: u64) -> Name {
        [i, if i.is_multiple_of(3) { i << 20 } else { i.wrapping_mul(0x9e37_79b9_7f4a_7c15) }]
    }

    fn state(at_us: u64) -> State {
        // Full a second after it was written.
        State { at_us, capacity: 1, tokens: 1, per_us: 1_000_000, level: 0 }
    }

    #[test]
    fn a_shard_agrees_with_a_map_whatever_is_made_and_forgotten() {
        let (mut shard, mut map) = (Shard::new(), std::collections::HashMap::new());
        let mut random = 1u64;
        for step in 0..24_000u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            // It grows to a thousand, shrinks to nothing, and grows again.
            let (i, now_us) = (random % 1_000, step * if step % 8_000 < 4_000 { 10 } else { 10_000 });
            if random >> 63 == 0 {
                shard.set(name(i), Some(state(now_us)));
                map.insert(i, state(now_us));
            } else {
                let before = shard.buckets;
                shard.forget(3, now_us);
                assert!(before - shard.buckets <= 3);
                if shard.buckets < before {
                    map.retain(|i, state| !state.is_forgotten(now_us) || shard.find(name(*i)).is_some());
                }
            }
            assert_eq!(shard.buckets, map.len());
            assert_eq!(shard.find(name(i)).map(|place| shard.bucket(place).state()), map.get(&i).copied());
        }
        assert!((0..1_000).all(|i| shard.find(name(i)).is_some() == map.contains_key(&i)));
        assert!(shard.used <= 1_000, "places are used again");
    }
}
