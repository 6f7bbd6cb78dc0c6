//! Denials that this instance remembers, so that a flood of refused requests does not reach Redis.
//!
//! A bucket that refuses a cost refuses it, and every dearer one, until it has refilled that far: nothing but a refund, a
//! reset or another quota can change that, and what happens to it elsewhere is noticed since Redis is asked again after a
//! second. So a remembered denial is exact, and never answers a cheaper cost.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashTable;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::bucket;
use crate::charge::{Amount, Charge};
use crate::decision::{Decision, Outcome, Reply, Source};
use crate::key::BucketKey;
use crate::quota::Quota;

/// Redis is asked again after this long.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Locks over disjoint parts.
const SHARDS: usize = 16;
/// Denials in each part: about 5 MB in all, where they are of one or two limits.
const DENIALS: usize = 1024;
/// Places looked at for a denial that is over, where a part is full.
const LOOK_AT: usize = 8;
/// Buckets of one remainder share a count of what ended denials.
const ENDINGS: usize = 1024;

/// The denials that are remembered, each by the bucket that refuses for the longest time.
pub(super) struct Denials {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    len: AtomicUsize,
    /// How often denials of a bucket have been ended: an answer to a question from before that is not remembered.
    endings: Box<[AtomicU64]>,
}

#[derive(Default)]
struct Shard {
    denials: HashTable<Denial>,
    hand: usize,
}

struct Denial {
    hash: u64,
    /// Whose buckets were asked, in the order of the outcomes.
    keys: SmallVec<[BucketKey; 2]>,
    /// What Redis last said, at some time after the question was sent and before the answer came.
    decision: Decision,
    sent: Instant,
    answered: Instant,
    /// Which of the charges refuses for the longest time, and the cost that it refuses.
    refusing: usize,
    cost: u64,
    /// Until then that cost cannot pass, and Redis is not asked again.
    until: Instant,
}

/// What has to be known of a question when its answer comes.
pub(super) struct Noted {
    denials: Arc<Denials>,
    buckets: SmallVec<[Bucket; 2]>,
    /// When it was sent, where the answer may be a denial to remember. Else it gives tokens, or makes a debt, which ends
    /// denials: those of questions that were sent before it was answered, too.
    sent: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Bucket {
    hash: u64,
    key: BucketKey,
    /// How often denials of it had been ended.
    endings: u64,
}

impl Denials {
    pub(super) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            shards: std::array::from_fn(|_| Mutex::default()),
            len: AtomicUsize::new(0),
            endings: (0..ENDINGS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The answer to these charges, if it is a denial that is known.
    pub(super) fn recall(&self, charges: &[Charge], now: Instant) -> Option<Decision> {
        if self.len.load(Ordering::Relaxed) == 0 || !are_takes(charges) {
            return None;
        }
        charges.iter().filter(|charge| !charge.is_shadow()).find_map(|charge| {
            let hash = self.hash(charge);
            let mut shard = self.shard(hash);
            let denial = shard.denials.find(hash, |denial| denial.is_of(hash, charge.key()))?;
            if denial.quota() == charge.quota() {
                return denial.answer(charges, now);
            }
            // Under another quota the bucket is another one.
            self.end(&mut shard, hash, charge.key());
            None
        })
    }

    /// Notes what is asked now, if its answer matters.
    ///
    /// What is charged in turn, and given back where a later one refuses, gives tokens as well.
    pub(super) fn ask(self: &Arc<Self>, charges: &[Charge], in_turn: bool, now: Instant) -> Option<Noted> {
        let changes = |charge: &Charge| matches!(charge.amount(), Amount::Give(_) | Amount::Spend(_));
        let gives = in_turn || charges.iter().any(changes);
        let is_twice = |i: usize| {
            let is_one = |one: &Charge| one.key() == charges[i].key() && one.limit() == charges[i].limit();
            charges[..i].iter().any(is_one)
        };
        // Where a bucket is charged twice, what it refuses depends on both.
        if !gives && (!are_takes(charges) || (1..charges.len()).any(is_twice)) {
            return None;
        }
        let bucket = |charge: &Charge| {
            let hash = self.hash(charge);
            Bucket { hash, key: *charge.key(), endings: self.ending(hash).load(Ordering::Acquire) }
        };
        let noted = Noted {
            denials: Arc::clone(self),
            buckets: charges.iter().map(bucket).collect(),
            sent: (!gives).then_some(now),
        };
        noted.end();
        Some(noted)
    }

    fn hash(&self, charge: &Charge) -> u64 {
        self.hasher.hash_one((charge.limit().hash_128(), charge.key()))
    }

    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The table takes the topmost and the lowest bits.
        let shard = &self.shards[(hash >> 32) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ending(&self, hash: u64) -> &AtomicU64 {
        &self.endings[(hash >> 32) as usize % ENDINGS]
    }

    /// Forgets the denials of a bucket: those to come of questions that have been asked, too.
    fn end(&self, shard: &mut Shard, hash: u64, key: &BucketKey) {
        self.ending(hash).fetch_add(1, Ordering::Release);
        self.remove(shard, hash, key);
    }

    fn remove(&self, shard: &mut Shard, hash: u64, key: &BucketKey) {
        if let Ok(denial) = shard.denials.find_entry(hash, |denial| denial.is_of(hash, key)) {
            denial.remove();
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Forgets some that are over, and says whether there were any.
    fn make_room(&self, shard: &mut Shard, now: Instant) -> bool {
        let all = shard.denials.num_buckets();
        for _ in 0..LOOK_AT.min(all) {
            shard.hand = (shard.hand + 1) % all;
            if let Ok(denial) = shard.denials.get_bucket_entry(shard.hand)
                && denial.get().until <= now
            {
                denial.remove();
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
        }
        shard.denials.len() < DENIALS
    }
}

impl Noted {
    /// Remembers the answer if it is a denial. One that is no denial says what the buckets of known denials hold.
    pub(super) fn answered(&self, decision: &Decision, now: Instant) {
        let Some(sent) = self.sent else { return };
        // Where the clock has stepped back, time is not what it seems.
        let is_now = |outcome: &Outcome| outcome.reply().is_some_and(|reply| reply.ahead_us() == 0);
        let is_now = decision.outcomes().iter().all(is_now);
        if decision.is_allowed() {
            if self.denials.len.load(Ordering::Relaxed) > 0 {
                self.took(decision, sent, now, is_now);
            }
        } else if is_now {
            self.refused(decision, sent, now);
        }
    }

    fn refused(&self, decision: &Decision, sent: Instant, now: Instant) {
        let outcomes = decision.outcomes();
        let waits = outcomes.iter().map(|outcome| if outcome.refuses() { outcome.retry_after() } else { None });
        let Some((refusing, Some(_))) = waits.enumerate().max_by_key(|(_, wait)| *wait) else { return };
        let Bucket { hash, key, endings } = self.buckets[refusing];
        let keys = self.buckets.iter().map(|bucket| bucket.key).collect();
        let cost = outcomes[refusing].cost();
        let mut denial =
            Denial { hash, keys, decision: decision.clone(), sent, answered: now, refusing, cost, until: sent };
        denial.reckon();
        let denials = &self.denials;
        let mut shard = denials.shard(hash);
        if now >= denial.until || denials.ending(hash).load(Ordering::Acquire) != endings {
            return;
        }
        if let Some(known) = shard.denials.find_mut(hash, |denial| denial.is_of(hash, &key)) {
            // Of answers that overtake each other the later one holds.
            if sent >= known.sent {
                *known = denial;
            }
        } else if shard.denials.len() < DENIALS || denials.make_room(&mut shard, now) {
            shard.denials.insert_unique(hash, denial, |denial| denial.hash);
            denials.len.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A cheaper request has taken tokens: what is known to be refused has to wait for longer.
    fn took(&self, decision: &Decision, sent: Instant, now: Instant, is_now: bool) {
        for Bucket { hash, key, .. } in &self.buckets {
            let mut shard = self.denials.shard(*hash);
            let Some(denial) = shard.denials.find_mut(*hash, |denial| denial.is_of(*hash, key)) else { continue };
            let is_same = denial.keys.iter().eq(self.buckets.iter().map(|bucket| &bucket.key))
                && denial.decision.outcomes().iter().zip(decision.outcomes()).all(|(one, other)| one.is_like(other));
            if !is_same || !is_now {
                self.denials.remove(&mut shard, *hash, key);
            } else if sent >= denial.sent {
                (denial.decision, denial.sent, denial.answered) = (decision.clone(), sent, now);
                denial.reckon();
            }
        }
    }

    /// Ends the denials of what is given tokens.
    fn end(&self) {
        if self.sent.is_none() {
            for Bucket { hash, key, .. } in &self.buckets {
                self.denials.end(&mut self.denials.shard(*hash), *hash, key);
            }
        }
    }
}

/// Answered, or given up: the tokens may be there by now.
impl Drop for Noted {
    fn drop(&mut self) {
        self.end();
    }
}

impl Denial {
    fn quota(&self) -> Quota {
        self.decision.outcomes()[self.refusing].quota()
    }

    /// Until when the cost is refused: counted from when the question was sent, since nobody knows when it was answered.
    fn reckon(&mut self) {
        let outcome = &self.decision.outcomes()[self.refusing];
        let units = bucket::units(self.cost, &outcome.quota());
        let level = outcome.reply().map_or(units, |reply| reply.level());
        let wait_us = ((units - level).max(0) as u64).div_ceil(outcome.quota().tokens());
        self.until = self.sent + Duration::from_micros(wait_us).min(ASK_AGAIN);
    }

    fn is_of(&self, hash: u64, key: &BucketKey) -> bool {
        self.hash == hash && self.keys[self.refusing] == *key
    }

    /// The denial of these charges at that time, with what the buckets hold by then, if they are the same or dearer.
    fn answer(&self, charges: &[Charge], now: Instant) -> Option<Decision> {
        let outcomes = self.decision.outcomes();
        let is_same = |i: usize| {
            let (outcome, charge) = (&outcomes[i], &charges[i]);
            outcome.is_of(charge) && self.keys[i] == *charge.key() && !charge.is_too_dear()
        };
        let is_known = outcomes.len() == charges.len() && (0..charges.len()).all(is_same);
        if now >= self.until || !is_known || charges[self.refusing].cost() < self.cost {
            return None;
        }
        let elapsed_us = u64::try_from(now.saturating_duration_since(self.answered).as_micros()).ok()?;
        let refilled = |(charge, outcome): (&Charge, &Outcome)| {
            let quota = charge.quota();
            let earned = i64::try_from(elapsed_us.saturating_mul(quota.tokens())).unwrap_or(i64::MAX);
            let level = outcome.reply()?.level().saturating_add(earned).min(quota.full());
            Some(Reply::new(level, level >= bucket::units(charge.cost(), &quota), 0))
        };
        let replies: SmallVec<[Reply; 2]> = charges.iter().zip(outcomes).map(refilled).collect::<Option<_>>()?;
        Decision::new(charges, &replies).map(|decision| decision.with_source(Source::Remembered))
    }
}

/// Whether all are takes, and so change nothing where one is refused.
fn are_takes(charges: &[Charge]) -> bool {
    charges.iter().all(|charge| matches!(charge.amount(), Amount::Take(_)))
}

impl fmt::Debug for Denials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Denials").field("len", &self.len).finish_non_exhaustive()
    }
}
