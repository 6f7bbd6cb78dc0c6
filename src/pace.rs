//! The arithmetic of a bucket whose rate adapts to what a peer says: pure functions of stored state, settings and now.
//!
//! All numbers are integers below 2⁵³, so that `lua/pace.lua` computes the same with doubles. Rates are in thousandths of a
//! token per second, and a token has 10⁹ units: in e microseconds a bucket earns e·rate units.

use crate::bucket;
use crate::error::ConfigError;
use crate::quota::{Quota, UNITS_MAX};

/// Units of a token.
pub(crate) const UNITS: u64 = 1_000_000_000;
/// Tokens of the largest bucket.
const CAPACITY_MAX: u64 = UNITS_MAX / UNITS;
/// From here on a rate is in whole tokens per second.
const WHOLE: u64 = 1_000_000;
/// A million tokens per second.
const RATE_MAX: u64 = 1_000_000_000;
/// A rate is cut at most once, and raised at most once, in this time.
const INTERVAL_US: u64 = 1_000_000;
/// Where a clock that does not count from 1970 has to begin: 0 stands for never, and a rate that has never been cut is cut
/// by the first refusal.
pub(crate) const BEGIN_US: u64 = INTERVAL_US;
/// No cooldown is longer.
const COOLDOWN_MAX_US: u64 = 3_600_000_000;
/// A cooldown of a peer that gives no hint is a random time from the least to a second, which each further one doubles, up
/// to the most.
const BACKOFF_MIN_US: u64 = 500_000;
const BACKOFF_US: u64 = 1_000_000;
const BACKOFF_MAX_US: u64 = 60_000_000;
/// A refusal after more tokens than that is the first: the peer has answered others since its last one.
const UNANSWERED: u64 = 2;
/// A stored time further ahead of the clock, and no cooldown, is set to now: the clock has stepped back.
const AHEAD_MAX_US: u64 = 1_000_000;
/// A rate that has been cut is remembered for so long.
const MEMORY_US: u64 = 86_400_000_000;

/// How a rate adapts to a peer: a part of a [`Limiter`](crate::outbound::Limiter), shared by all senders through the store.
///
/// A 429 multiplies the rate by `decrease`, at most once a second and never below `floor`. Each second without one in
/// which at least half of the rate was used multiplies it by `increase`, never above `ceiling`. The rate starts at the
/// ceiling.
///
/// # Example
///
/// ```
/// use tower_token_bucket::outbound::{AdaptiveRate, Limiter};
/// use tower_token_bucket::{MemoryStore, Quota};
///
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_second(100).with_capacity(20))
///     .adaptive(AdaptiveRate { floor: 0.5, ..AdaptiveRate::below(100.0) });
/// assert_eq!(AdaptiveRate::of(Quota::per_minute(600)), AdaptiveRate::below(10.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdaptiveRate {
    /// The highest rate, in tokens per second: 0.001 to 1,000,000, rounded to a thousandth below 1000 and to a whole
    /// token above.
    pub ceiling: f64,
    /// The lowest rate, in tokens per second: 0.001 to the ceiling.
    pub floor: f64,
    /// What a 429 multiplies the rate by: 0 to 0.999999.
    pub decrease: f64,
    /// What a second without one multiplies it by: above 1, to 8. It grows by a thousandth of a token per second at
    /// least, by a whole token above 1000.
    pub increase: f64,
}

impl AdaptiveRate {
    /// At most `ceiling` tokens per second, at least a hundredth of that; halved, and raised by a tenth.
    #[must_use]
    pub const fn below(ceiling: f64) -> Self {
        Self { ceiling, floor: ceiling / 100.0, decrease: 0.5, increase: 1.10 }
    }

    /// The same for what a quota refills.
    #[must_use]
    pub fn of(quota: Quota) -> Self {
        let (tokens, per) = quota.refill();
        Self::below(tokens as f64 / per.as_secs_f64())
    }
}

/// The same, as checked integers, with the capacity of the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PaceSettings {
    pub(crate) capacity: u64,
    pub(crate) ceiling: u64,
    pub(crate) floor: u64,
    pub(crate) decrease_ppm: u64,
    pub(crate) increase_ppm: u64,
}

impl PaceSettings {
    pub(crate) fn try_new(capacity: u64, rate: AdaptiveRate) -> Result<Self, ConfigError> {
        let refused = |setting: &str, value: f64, allowed: &str| {
            Err(ConfigError::AdaptiveRate { reason: format!("{setting} {value} is not allowed: {allowed}") })
        };
        let thousandths = |rate: f64| (rate * 1000.0).round() as u64;
        let (ceiling, floor) = (thousandths(rate.ceiling), thousandths(rate.floor));
        // NaN becomes 0.
        if !(1..=RATE_MAX).contains(&ceiling) {
            return refused("ceiling", rate.ceiling, "0.001 to 1000000 tokens per second are");
        }
        // A floor that rounds to nothing is the least there is.
        let floor = floor.max(1);
        if !rate.floor.is_finite() || rate.floor < 0.0 || floor > ceiling {
            return refused("floor", rate.floor, "0.001 to the ceiling are");
        }
        let ppm = |factor: f64| (factor * 1e6).round() as u64;
        if !(rate.decrease >= 0.0 && rate.decrease < 1.0 && ppm(rate.decrease) < 1_000_000) {
            return refused("decrease", rate.decrease, "0 to 0.999999 are");
        }
        if !(rate.increase > 1.0 && rate.increase <= 8.0) {
            return refused("increase", rate.increase, "above 1 to 8 are");
        }
        if capacity > CAPACITY_MAX {
            let allowed = format!("1 to {CAPACITY_MAX} tokens are where the rate adapts");
            return refused("capacity", capacity as f64, &allowed);
        }
        Ok(Self {
            capacity,
            ceiling: whole(ceiling),
            floor: whole(floor),
            decrease_ppm: ppm(rate.decrease),
            increase_ppm: ppm(rate.increase),
        })
    }

    pub(crate) fn full(&self) -> i64 {
        (self.capacity * UNITS) as i64
    }

    /// One `n`-th of the capacity and of the rates, at least the least of each.
    pub(crate) fn share(&self, n: u32) -> Self {
        let share = |of: u64| (of / u64::from(n)).max(1);
        Self {
            capacity: share(self.capacity),
            ceiling: whole(share(self.ceiling)),
            floor: whole(share(self.floor)),
            ..*self
        }
    }
}

/// A rate as it may be: whole tokens above 1000 per second.
fn whole(rate: u64) -> u64 {
    if rate >= WHOLE { rate - rate % 1000 } else { rate }
}

/// What is kept between two calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    /// When the level was that, in microseconds: in the future during a cooldown.
    pub(crate) at_us: u64,
    pub(crate) level: i64,
    /// In thousandths of a token per second.
    pub(crate) rate: u64,
    /// When the cooldown ends.
    pub(crate) until_us: u64,
    /// When the rate was last cut.
    pub(crate) cut_us: u64,
    /// Since when the use is counted, and the tokens used since.
    pub(crate) since_us: u64,
    pub(crate) used: u64,
    /// Refusals without a hint since the last second without one.
    pub(crate) strikes: u64,
    /// Since when the rate has been the lowest; 0 where it is not.
    pub(crate) floored_us: u64,
    /// The largest that has used the bucket, in tokens: the state is kept until that one would be full.
    pub(crate) capacity: u64,
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PaceAsk {
    /// Tokens, if they are there.
    Take(u64),
    /// The rate, and nothing else.
    Look,
    /// The peer refused: with a time to wait, or with a fraction of the back-off, in millionths.
    Refused { hint_us: Option<u64>, random_ppm: u64 },
    /// The peer has nothing left for so long, and has refused nothing.
    Pause { hint_us: u64 },
}

/// What is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PaceReply {
    pub(crate) allowed: bool,
    pub(crate) level: i64,
    /// From when on that refills, counted from now.
    pub(crate) ahead_us: u64,
    pub(crate) rate: u64,
    /// For how long the rate has been the lowest, if it is.
    pub(crate) floored_us: Option<u64>,
}

impl Pace {
    /// What another store has said, at one `share`-th of it.
    pub(crate) fn of_reply(reply: PaceReply, settings: &PaceSettings, share: u32, now_us: u64) -> Self {
        let PaceReply { level, ahead_us, rate, floored_us, .. } = reply;
        let at_us = now_us + ahead_us;
        Self {
            at_us,
            level: level / i64::from(share),
            rate: whole((rate / u64::from(share)).max(1)),
            until_us: if ahead_us > 0 { at_us } else { 0 },
            cut_us: 0,
            since_us: at_us,
            used: 0,
            strikes: 0,
            floored_us: floored_us.map_or(0, |us| now_us.saturating_sub(us).max(1)),
            capacity: settings.capacity,
        }
    }

    fn read(stored: Option<Self>, settings: &PaceSettings, now_us: u64) -> Self {
        let full = settings.full();
        let Some(stored) = stored else {
            let (level, rate) = (full, settings.ceiling);
            let (until_us, cut_us, used, strikes, floored_us) = (0, 0, 0, 0, 0);
            let (at_us, since_us, capacity) = (now_us, now_us, settings.capacity);
            return Self { at_us, level, rate, until_us, cut_us, since_us, used, strikes, floored_us, capacity };
        };
        let mut pace = stored;
        pace.capacity = pace.capacity.max(settings.capacity).min(CAPACITY_MAX);
        // A cooldown that was over when this was written does not begin again, whatever the clock says now.
        if pace.at_us > pace.until_us {
            pace.until_us = 0;
        }
        pace.rate = pace.rate.clamp(settings.floor, settings.ceiling);
        pace.level = pace.level.clamp(-full, full);
        // A clock that has stepped back keeps nobody out for longer than a cooldown can last.
        pace.until_us = pace.until_us.min(now_us + COOLDOWN_MAX_US);
        pace.cut_us = pace.cut_us.min(now_us);
        pace.since_us = pace.since_us.min(now_us.max(pace.until_us));
        if pace.at_us > (now_us + AHEAD_MAX_US).max(pace.until_us) {
            pace.at_us = now_us;
        }
        if now_us > pace.at_us {
            let earned = (now_us - pace.at_us).saturating_mul(pace.rate);
            let missing = (full - pace.level) as u64;
            pace.level = if earned >= missing { full } else { pace.level + earned as i64 };
            pace.at_us = now_us;
        }
        pace.grow(settings, now_us);
        pace.mark_the_floor(settings, now_us);
        pace
    }

    /// Remembers since when the rate has been the lowest: never, where there is only one.
    fn mark_the_floor(&mut self, settings: &PaceSettings, now_us: u64) {
        self.floored_us = match self.floored_us {
            _ if self.rate > settings.floor || settings.floor == settings.ceiling => 0,
            0 => now_us,
            since => since.min(now_us),
        };
    }

    /// Nothing is sent until then: the bucket is empty, and refills from the end only.
    fn cool_down(&mut self, until_us: u64) {
        self.until_us = self.until_us.max(until_us);
        self.level = self.level.min(0);
        self.at_us = self.at_us.max(self.until_us);
        (self.since_us, self.used) = (self.until_us, 0);
    }

    /// Raises the rate after an interval in which at least half of it was used.
    fn grow(&mut self, settings: &PaceSettings, now_us: u64) {
        if now_us < self.since_us + INTERVAL_US {
            return;
        }
        let ms = ((now_us - self.since_us) / 1000).min(4_000_000);
        if self.used * 2_000_000 >= self.rate * ms {
            let least = self.rate + if self.rate < WHOLE { 1 } else { 1000 };
            let raised = whole(self.rate * settings.increase_ppm / 1_000_000);
            self.rate = raised.max(least).min(settings.ceiling);
        }
        // An interval in which nothing was sent does not show that the peer is well.
        if self.used > 0 {
            self.strikes = 0;
        }
        (self.since_us, self.used) = (now_us, 0);
    }

    fn reply(&self, allowed: bool, now_us: u64) -> PaceReply {
        let floored_us = (self.floored_us > 0).then(|| now_us - self.floored_us);
        let ahead_us = self.at_us.saturating_sub(now_us);
        PaceReply { allowed, level: self.level, ahead_us, rate: self.rate, floored_us }
    }

    /// How long the state has to be kept, as [`bucket::life_ms`] counts: until the bucket is full, and a day more where the
    /// rate is not the highest.
    pub(crate) fn life_ms(&self, settings: &PaceSettings, now_us: u64) -> u64 {
        let missing = ((self.capacity * UNITS) as i64 - self.level).max(0) as u64;
        let memory = if self.rate < settings.ceiling || self.strikes > 0 { MEMORY_US } else { 0 };
        bucket::life_ms(self.at_us + missing.div_ceil(self.rate) + memory, now_us)
    }
}

/// Answers what is asked, and changes what is stored.
pub(crate) fn ask(stored: &mut Option<Pace>, settings: &PaceSettings, ask: PaceAsk, now_us: u64) -> PaceReply {
    let mut pace = Pace::read(*stored, settings, now_us);
    match ask {
        PaceAsk::Look => return pace.reply(true, now_us),
        PaceAsk::Take(cost) => {
            let units = (cost.min(2 * settings.capacity) * UNITS) as i64;
            // A time ahead of the clock by less than a cooldown is one that the clock has stepped back from.
            if now_us < pace.until_us || pace.level < units {
                return pace.reply(false, now_us);
            }
            pace.level -= units;
            pace.used = (pace.used + cost).min(1 << 31);
        }
        PaceAsk::Refused { hint_us, random_ppm } => {
            if hint_us.is_some() || pace.used > UNANSWERED {
                pace.strikes = 0;
            }
            let cooldown = match hint_us {
                Some(hint) => hint.min(COOLDOWN_MAX_US),
                // What was sent before the peer first refused says nothing new.
                None if now_us < pace.until_us => 0,
                None => {
                    let most = (BACKOFF_US << pace.strikes.min(6)).min(BACKOFF_MAX_US);
                    pace.strikes = (pace.strikes + 1).min(6);
                    BACKOFF_MIN_US + (most - BACKOFF_MIN_US) * random_ppm / 1_000_000
                }
            };
            pace.cool_down(now_us + cooldown);
            if now_us >= pace.cut_us + INTERVAL_US {
                pace.rate = whole(pace.rate * settings.decrease_ppm / 1_000_000).max(settings.floor);
                pace.cut_us = now_us;
                pace.mark_the_floor(settings, now_us);
            }
        }
        PaceAsk::Pause { hint_us } => pace.cool_down(now_us + hint_us.min(COOLDOWN_MAX_US)),
    }
    *stored = Some(pace);
    pace.reply(true, now_us)
}

/// `at:level:rate:until:cut:since:used:strikes:floored:capacity`, ten integers: what a store keeps as text.
impl std::fmt::Display for Pace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { at_us, level, rate, until_us, cut_us, since_us, used, strikes, floored_us, capacity } = self;
        write!(f, "{at_us}:{level}:{rate}:{until_us}:{cut_us}:{since_us}:{used}:{strikes}:{floored_us}:{capacity}")
    }
}
