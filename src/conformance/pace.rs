//! The exact model of a rate that adapts, with the clock as an argument.

use crate::error::ConfigError;
use crate::outbound::AdaptiveRate;
use crate::pace::{self, Pace, PaceAsk, PaceReply, PaceSettings};

/// One bucket whose rate adapts, with the time as an argument.
///
/// # Example
///
/// ```
/// use tower_token_bucket::conformance::RateModel;
/// use tower_token_bucket::outbound::AdaptiveRate;
///
/// let mut model = RateModel::try_new(5, AdaptiveRate::below(10.0))?;
/// assert!(model.take(5, 1_000_000).is_allowed());
/// model.refused(Some(2_000_000), 0, 1_000_000);
/// let reply = model.take(1, 2_999_999);
/// assert!(!reply.is_allowed() && reply.rate() == 5_000 && reply.ahead_us() == 1);
/// assert!(model.take(1, 3_200_000).is_allowed(), "at 5 tokens per second, from the end of the cooldown");
/// # Ok::<(), tower_token_bucket::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
pub struct RateModel {
    settings: PaceSettings,
    state: Option<Pace>,
}

/// What the model says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateReply(PaceReply);

impl RateModel {
    /// A full bucket at its ceiling.
    ///
    /// # Errors
    ///
    /// [`ConfigError::AdaptiveRate`] for settings out of their ranges.
    pub fn try_new(capacity: u64, rate: AdaptiveRate) -> Result<Self, ConfigError> {
        Ok(Self { settings: PaceSettings::try_new(capacity, rate)?, state: None })
    }

    /// The same bucket under other settings.
    ///
    /// # Errors
    ///
    /// [`ConfigError::AdaptiveRate`] for settings out of their ranges.
    pub fn change(&mut self, capacity: u64, rate: AdaptiveRate) -> Result<(), ConfigError> {
        self.settings = PaceSettings::try_new(capacity, rate)?;
        Ok(())
    }

    /// The settings as the script takes them: capacity, ceiling, floor, decrease and increase.
    #[must_use]
    pub fn settings(&self) -> [u64; 5] {
        let PaceSettings { capacity, ceiling, floor, decrease_ppm, increase_ppm } = self.settings;
        [capacity, ceiling, floor, decrease_ppm, increase_ppm]
    }

    /// Takes `cost` tokens at `now_us`, in microseconds, if they are there.
    pub fn take(&mut self, cost: u64, now_us: u64) -> RateReply {
        RateReply(pace::ask(&mut self.state, &self.settings, PaceAsk::Take(cost), now_us))
    }

    /// Looks at the bucket.
    pub fn look(&mut self, now_us: u64) -> RateReply {
        RateReply(pace::ask(&mut self.state, &self.settings, PaceAsk::Look, now_us))
    }

    /// The peer has refused: with a time to wait, or with how far the back-off is from the least to the most, in millionths.
    pub fn refused(&mut self, hint_us: Option<u64>, random_ppm: u64, now_us: u64) -> RateReply {
        RateReply(pace::ask(&mut self.state, &self.settings, PaceAsk::Refused { hint_us, random_ppm }, now_us))
    }

    /// The peer has nothing left for so long, and has refused nothing.
    pub fn pause(&mut self, hint_us: u64, now_us: u64) -> RateReply {
        RateReply(pace::ask(&mut self.state, &self.settings, PaceAsk::Pause { hint_us }, now_us))
    }

    /// What is stored: `at:level:rate:until:cut:since:used:strikes:floored:capacity`.
    #[must_use]
    pub fn state(&self) -> Option<String> {
        self.state.as_ref().map(Pace::to_string)
    }

    /// How long that has to be kept, counted from `now_us`, in milliseconds.
    #[must_use]
    pub fn life_ms(&self, now_us: u64) -> Option<u64> {
        self.state.as_ref().map(|state| state.life_ms(&self.settings, now_us))
    }
}

impl RateReply {
    /// Whether the tokens were there.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.0.allowed
    }

    /// The level, in units of 10⁻⁹ token.
    #[must_use]
    pub fn level(&self) -> i64 {
        self.0.level
    }

    /// Microseconds until it refills.
    #[must_use]
    pub fn ahead_us(&self) -> u64 {
        self.0.ahead_us
    }

    /// The rate, in thousandths of a token per second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.0.rate
    }

    /// For how many microseconds the rate has been the lowest, if it is.
    #[must_use]
    pub fn floored_us(&self) -> Option<u64> {
        self.0.floored_us
    }
}
