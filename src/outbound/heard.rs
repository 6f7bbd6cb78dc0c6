//! What the store last said of the rates that adapt: so that a peer's word outlasts the store, and that the store is not
//! asked again for what is known to be refused.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::queue::Known;
use crate::key::BucketKey;
use crate::pace::PaceReply;

/// Keys of which something is kept: those that are refused, or slower than they may be.
const KEYS_MAX: usize = 16_384;
/// The store is asked again at least so often.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// What is older says nothing of the peer.
const OLD: Duration = Duration::from_secs(3600);

#[derive(Debug, Default)]
pub(super) struct Heard {
    of: Mutex<HashMap<BucketKey, Word>>,
}

#[derive(Clone, Copy, Debug)]
struct Word {
    reply: PaceReply,
    at: Instant,
    /// The local bucket goes on from there.
    is_local: bool,
    /// Until when the peer is left alone, where the store has not been told.
    untold: Option<Instant>,
}

impl Word {
    /// When the cooldown ends.
    fn until(&self) -> Instant {
        let of_the_store = self.at + Duration::from_micros(self.reply.ahead_us);
        self.untold.map_or(of_the_store, |untold| untold.max(of_the_store))
    }
}

impl Heard {
    fn with<T>(&self, then: impl FnOnce(&mut HashMap<BucketKey, Word>) -> T) -> T {
        then(&mut self.of.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The store has said this. What is neither refused nor slower than it may be needs no memory.
    pub(super) fn store_said(&self, key: BucketKey, reply: PaceReply, ceiling: u64, now: Instant) {
        self.with(|of| {
            if reply.allowed && reply.ahead_us == 0 && reply.rate >= ceiling {
                of.remove(&key);
                return;
            }
            if of.len() >= KEYS_MAX && !of.contains_key(&key) {
                of.retain(|_, word| word.until() > now && word.at + OLD > now);
                if of.len() >= KEYS_MAX {
                    return;
                }
            }
            of.insert(key, Word { reply, at: now, is_local: false, untold: None });
        });
    }

    /// A peer has to be left alone until then, and the store could not be told.
    pub(super) fn not_told(&self, key: BucketKey, reply: PaceReply, now: Instant) {
        let until = now + Duration::from_micros(reply.ahead_us);
        self.with(|of| {
            if of.len() < KEYS_MAX || of.contains_key(&key) {
                let word = of.entry(key).or_insert(Word { reply, at: now, is_local: true, untold: None });
                word.untold = word.untold.max(Some(until));
            }
        });
    }

    /// How long the peer is to be left alone, where the store has to be told first.
    pub(super) fn untold(&self, key: &BucketKey, now: Instant) -> Option<Duration> {
        let until = self.with(|of| of.get(key).and_then(|word| word.untold))?;
        until.checked_duration_since(now).filter(|wait| !wait.is_zero())
    }

    /// What the local bucket does not know yet, where the store fails.
    pub(super) fn for_local(&self, key: &BucketKey, now: Instant) -> Option<PaceReply> {
        self.with(|of| {
            let word = of.get_mut(key).filter(|word| !word.is_local)?;
            word.is_local = true;
            let ahead = word.until().saturating_duration_since(now);
            Some(PaceReply { ahead_us: ahead.as_micros() as u64, ..word.reply })
        })
    }

    /// What a bucket is known to hold, where the store need not be asked again yet.
    pub(super) fn known(&self, key: &BucketKey, now: Instant) -> Option<(Known, Instant)> {
        let word = self.with(|of| of.get(key).copied())?;
        (word.untold.is_none() && word.at + ASK_AGAIN > now).then(|| (Known::of_pace(&word.reply, word.at), word.at))
    }
}
