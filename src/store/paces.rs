//! Rates that adapt, in the memory of this process.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use crate::key::BucketKey;
use crate::outbound::Pacing;
use crate::pace::{self, Pace, PaceReply, PaceSettings};

/// Places looked at for a rate to forget whenever a new one is kept.
const LOOK_AT: usize = 8;
/// The same at the bound: a new key waits for no more than this before it shares the overflow bucket.
const LOOK_AT_BOUND: usize = 64;

/// Buckets whose rate adapts, at most so many, and one more for each limit: the keys that come at the bound share it. What
/// is at its ceiling and full is forgotten in small steps, since a fresh one is as well.
pub(super) struct Paces {
    of: HashTable<Kept>,
    hasher: RandomState,
    most: usize,
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
        Self { of: HashTable::new(), hasher: RandomState::new(), most, hand: 0 }
    }

    /// Answers one question. And whether it went to an overflow bucket.
    pub(super) fn ask(&mut self, pacing: &Pacing, now_us: u64) -> (PaceReply, bool) {
        let Pacing { limit, key, settings, ask } = pacing;
        let name = self.make_room((limit.hash_128(), Some(*key)), now_us);
        let mut state = self.find(name).filter(|kept| now_us < kept.until_us).map(|kept| kept.pace);
        let before = state;
        let reply = pace::ask(&mut state, settings, *ask, now_us);
        if let Some(pace) = state.filter(|state| Some(*state) != before) {
            self.keep(name, pace, settings, now_us);
        }
        (reply, name.1.is_none())
    }

    /// Goes on from there.
    pub(super) fn go_on_from(&mut self, pacing: &Pacing, pace: Pace, now_us: u64) {
        let name = self.make_room((pacing.limit.hash_128(), Some(pacing.key)), now_us);
        // Others' word is no reason to slow all of those down that share a bucket.
        if name.1.is_some() {
            self.keep(name, pace, &pacing.settings, now_us);
        }
    }

    fn hash(&self, name: Name) -> u64 {
        self.hasher.hash_one(name)
    }

    fn find(&self, name: Name) -> Option<&Kept> {
        self.of.find(self.hash(name), |kept| kept.name == name)
    }

    /// The name itself where it is known, or may be by now; else that of the overflow bucket.
    fn make_room(&mut self, name: Name, now_us: u64) -> Name {
        if self.find(name).is_some() {
            return name;
        }
        self.forget(LOOK_AT, now_us);
        if self.of.len() >= self.most {
            self.forget(LOOK_AT_BOUND, now_us);
        }
        if self.of.len() >= self.most { (name.0, None) } else { name }
    }

    fn keep(&mut self, name: Name, pace: Pace, settings: &PaceSettings, now_us: u64) {
        let hash = self.hash(name);
        let kept = Kept { name, pace, until_us: now_us + pace.life_ms(settings, now_us) * 1000 };
        match self.of.find_mut(hash, |kept| kept.name == name) {
            Some(known) => *known = kept,
            None => _ = self.of.insert_unique(hash, kept, |kept| self.hasher.hash_one(kept.name)),
        }
    }

    fn forget(&mut self, places: usize, now_us: u64) {
        let all = self.of.num_buckets();
        for _ in 0..places.min(all) {
            self.hand = (self.hand + 1) % all;
            if let Ok(kept) = self.of.get_bucket_entry(self.hand)
                && kept.get().until_us <= now_us
            {
                kept.remove();
            }
        }
    }
}
