//! The arithmetic of a bucket: pure functions of stored state, quota, amount and now.
//!
//! All numbers are integers below 2⁵³ in magnitude, so that `lua/token_bucket.lua` computes the same with doubles. Time
//! is in microseconds. A level is in units of 1/p token, where the quota refills n tokens per p microseconds: in e
//! microseconds a bucket earns e·n units, and nothing is ever rounded.

use smallvec::SmallVec;

use crate::charge::{Amount, Charge};
use crate::decision::Reply;
use crate::quota::{Quota, UNITS_MAX};

/// A stored time further ahead of the clock than this is set to now: the clock has stepped back.
const AHEAD_MAX_US: u64 = 1_000_000;

/// What is kept of a bucket between two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    /// When the level was that, in microseconds.
    pub(crate) at_us: u64,
    /// The largest capacity that has used the bucket, in tokens: the bucket lives until that one would be full.
    pub(crate) capacity: u64,
    /// The refill rate of the last writer, n tokens per p microseconds; p is the unit of the level.
    pub(crate) tokens: u64,
    pub(crate) per_us: u64,
    /// In units of 1/p token; negative while a debt is worked off.
    pub(crate) level: i64,
}

impl State {
    /// When the bucket is full for the largest capacity that has used it.
    fn expiry_us(&self) -> u64 {
        let full = (u128::from(self.capacity) * u128::from(self.per_us)).min(u128::from(UNITS_MAX)) as i64;
        let missing = (full - self.level).max(0) as u64;
        self.at_us + missing.div_ceil(self.tokens)
    }

    /// How long the state has to be kept, counted from the millisecond of `now_us` that has begun, as Redis does: until the
    /// bucket is full, rounded up to a millisecond, at least 1 ms.
    pub(crate) fn life_ms(&self, now_us: u64) -> u64 {
        life_ms(self.expiry_us(), now_us)
    }

    /// Whether this quota was the last writer's, and none with a larger capacity has used the bucket. When its life is
    /// over, such a state says what a fresh bucket says.
    pub(crate) fn is_of(&self, quota: &Quota) -> bool {
        self.tokens == quota.tokens() && self.per_us == quota.per_us() && self.capacity == quota.capacity()
    }

    /// Whether the state can be forgotten: the bucket is full for every quota, as a fresh one is.
    pub(crate) fn is_forgotten(&self, now_us: u64) -> bool {
        now_us >= self.at_us + self.life_ms(self.at_us) * 1000
    }
}

/// The life of what has to be kept until `expiry_us`: it ends in the first millisecond of the clock that begins then or
/// later, since Redis may end it when that begins.
pub(crate) fn life_ms(expiry_us: u64, now_us: u64) -> u64 {
    (expiry_us.saturating_sub(now_us) + now_us % 1000).div_ceil(1000).max(1)
}

/// `at:capacity:tokens:per:level`, five integers: what a store keeps as text.
#[cfg(feature = "conformance")]
impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}:{}:{}", self.at_us, self.capacity, self.tokens, self.per_us, self.level)
    }
}

/// A bucket as one quota sees it, before anything is taken.
struct Reading {
    at_us: u64,
    capacity: u64,
    /// The level at `at_us`, and the level now.
    level: i64,
    refilled: i64,
    /// The stored time lay further ahead of the clock than [`AHEAD_MAX_US`].
    behind: bool,
}

impl Reading {
    #[inline]
    fn new(stored: Option<&State>, quota: &Quota, now_us: u64) -> Self {
        let full = quota.full();
        let Some(stored) = stored else {
            let capacity = quota.capacity();
            return Self { at_us: now_us, capacity, level: full, refilled: full, behind: false };
        };
        let level = if stored.is_of(quota) { stored.level } else { level_under(*stored, quota) };
        let behind = stored.at_us.saturating_sub(now_us) > AHEAD_MAX_US;
        let at_us = if behind { now_us } else { stored.at_us };
        // A product that does not fit would fill any bucket, as the largest one that fits does.
        let earned = now_us.saturating_sub(at_us).saturating_mul(quota.tokens());
        let missing = (full - level) as u64;
        let refilled = if earned >= missing { full } else { level + earned as i64 };
        Self { at_us, capacity: stored.capacity.max(quota.capacity()), level, refilled, behind }
    }

    fn state(&self, at_us: u64, level: i64, quota: &Quota) -> State {
        State { at_us, capacity: self.capacity, tokens: quota.tokens(), per_us: quota.per_us(), level }
    }

    fn reply(&self, level: i64, allowed: bool, now_us: u64) -> Reply {
        Reply::new(level, allowed, self.at_us.saturating_sub(now_us))
    }
}

/// The stored level in units of another quota: whole tokens are kept, the part of one is rounded down, and a smaller
/// capacity clamps, a debt as well.
#[inline(never)]
fn level_under(stored: State, quota: &Quota) -> i64 {
    let capacity = quota.capacity();
    let per_us = stored.per_us as i64;
    let whole = stored.level.div_euclid(per_us);
    let part = stored.level.rem_euclid(per_us) as u128;
    if whole >= capacity as i64 {
        return quota.full();
    }
    let part = part * u128::from(quota.per_us()) / u128::from(stored.per_us);
    whole.max(-(capacity as i64)) * quota.per_us() as i64 + part as i64
}

/// `cost` tokens in units of `quota`. Twice the capacity stands for all that is more: none of it can be taken, spent
/// or given.
pub(crate) fn units(cost: u64, quota: &Quota) -> i64 {
    (cost.min(2 * quota.capacity()) * quota.per_us()) as i64
}

/// Makes one charge; a refused `Take` takes nothing. The reply, and what is to be written.
#[inline(always)]
fn step(stored: Option<&State>, quota: &Quota, amount: Amount, now_us: u64) -> (Reply, Option<State>) {
    let reading = Reading::new(stored, quota, now_us);
    let full = quota.full();
    let level = match amount {
        Amount::Peek => return (reading.reply(reading.refilled, true, now_us), None),
        Amount::Take(cost) => {
            let level = reading.refilled - units(cost, quota);
            if level < 0 {
                return (reading.reply(reading.refilled, false, now_us), keep(stored, &reading, quota));
            }
            level
        }
        Amount::Spend(cost) => (reading.refilled - units(cost, quota)).max(-full),
        Amount::Give(cost) => (reading.refilled + units(cost, quota)).min(full),
    };
    (reading.reply(level, true, now_us), Some(reading.state(reading.at_us.max(now_us), level, quota)))
}

/// The two writes that a charge may make that refuses, neither of which takes a token: to bring back a time that lies too
/// far ahead, and to extend a life that this quota, being slower, has made too short for the wait that was promised. A
/// full bucket refuses what can never pass, so that nothing is promised, and a larger quota may have more in it.
#[inline]
fn keep(stored: Option<&State>, reading: &Reading, quota: &Quota) -> Option<State> {
    let stored = stored.filter(|_| reading.refilled < quota.full())?;
    // The same quota would live as long.
    if !reading.behind && stored.is_of(quota) {
        return None;
    }
    let own = reading.state(reading.at_us, reading.level, quota);
    (reading.behind || own.expiry_us() > stored.expiry_us()).then_some(own)
}

/// Makes all charges or none, in one step, and replies to each in order.
///
/// `slots` says which of `states` each charge is for; the states are changed in place. All or none runs over the
/// enforced charges; a shadow charge is made when they all pass and it has the tokens. `before` is a copy of `states`.
pub(crate) fn acquire(
    charges: &[Charge],
    slots: &[usize],
    before: &[Option<State>],
    states: &mut [Option<State>],
    now_us: u64,
) -> SmallVec<[Reply; 4]> {
    let mut replies: SmallVec<[Reply; 4]> = SmallVec::from_elem(Reply::new(0, true, 0), charges.len());
    let mut all = true;
    for shadow in [false, true] {
        if shadow && !all {
            break;
        }
        for (i, charge) in charges.iter().enumerate().filter(|(_, charge)| charge.is_shadow() == shadow) {
            let state = &mut states[slots[i]];
            let (reply, written) = step(state.as_ref(), &charge.quota(), charge.amount(), now_us);
            *state = written.or(*state);
            replies[i] = reply;
            all &= shadow || replies[i].is_allowed();
        }
    }
    if !all {
        states.copy_from_slice(before);
        for (i, charge) in charges.iter().enumerate() {
            let (state, quota) = (&mut states[slots[i]], charge.quota());
            let reading = Reading::new(before[slots[i]].as_ref(), &quota, now_us);
            let allowed = match charge.amount() {
                Amount::Take(cost) if charge.is_shadow() => reading.refilled >= units(cost, &quota),
                Amount::Take(_) => replies[i].is_allowed(),
                Amount::Spend(_) | Amount::Give(_) | Amount::Peek => true,
            };
            if !allowed {
                *state = keep(state.as_ref(), &reading, &quota).or(*state);
            }
            replies[i] = reading.reply(reading.refilled, allowed, now_us);
        }
    }
    replies
}

/// Makes one charge: what [`acquire`] does with a slice of one. The reply, and what is to be written.
#[inline(always)]
pub(crate) fn acquire_one(charge: &Charge, stored: Option<&State>, now_us: u64) -> (Reply, Option<State>) {
    step(stored, &charge.quota(), charge.amount(), now_us)
}
