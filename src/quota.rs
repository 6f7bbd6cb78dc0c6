//! The rule for a bucket: how much it holds and how fast it refills, as integers that are exact in Rust and in Lua.

use std::fmt;
use std::time::Duration;

use crate::error::ConfigError;
use crate::text::Text;

/// Largest capacity, in tokens.
const CAPACITY_MAX: u64 = 1 << 31;
/// Largest number of tokens per period, the fraction in lowest terms.
const TOKENS_MAX: u64 = 1 << 40;
/// Longest period in microseconds, the fraction in lowest terms.
const PER_MAX: u64 = 1 << 45;
/// Largest capacity × period: a level of that many units, and twice it, are exact in a double.
pub(crate) const UNITS_MAX: u64 = 1 << 51;

/// Capacity and refill rate of a bucket.
///
/// A quota of 10 per second with capacity 50 lets 50 requests of cost 1 through at once, then one every 100 ms. Refill
/// is continuous: there is no window at whose start tokens appear. Every constructor counts TOKENS per period, and the
/// capacity is that number until [`with_capacity`](Self::with_capacity) says otherwise.
///
/// A quota is held as integers: `n` tokens per `p` microseconds in lowest terms. Accepted are capacities from 1 to 2³¹
/// with n ≤ 2⁴⁰, p ≤ 2⁴⁵ and capacity × p ≤ 2⁵¹: for example capacity 10⁹ at 100 per minute or at 10⁶ per second,
/// 625 499 at one per hour, 26 062 at one per day. What does not fit is refused with the nearest quota that does.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_token_bucket::Quota;
///
/// const BURSTY: Quota = Quota::per_second(10).with_capacity(50);
/// assert_eq!(BURSTY.capacity(), 50);
/// assert_eq!(BURSTY.time_to_full(), Duration::from_secs(5));
/// assert_eq!(Quota::new(1, Duration::from_secs(90)).to_string(), "capacity 1, 1 token per 90 s");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    capacity: u32,
    tokens: u64,
    per_us: u64,
}

impl Quota {
    /// Creates a quota of `tokens` per second, with the same capacity.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self); [`try_per_second`](Self::try_per_second) returns the error.
    #[must_use]
    #[track_caller]
    pub const fn per_second(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(1))
    }

    /// Creates a quota of `tokens` per minute, with the same capacity.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self).
    #[must_use]
    #[track_caller]
    pub const fn per_minute(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(60))
    }

    /// Creates a quota of `tokens` per hour, with the same capacity.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self).
    #[must_use]
    #[track_caller]
    pub const fn per_hour(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(3600))
    }

    /// Creates a quota of `tokens` per day of 86 400 seconds, with the same capacity.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self).
    #[must_use]
    #[track_caller]
    pub const fn per_day(tokens: u64) -> Self {
        Self::new(tokens, Duration::from_secs(86_400))
    }

    /// Creates a quota of `tokens` per period `per`, with the same capacity. Rates below one per second are ordinary.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self).
    #[must_use]
    #[track_caller]
    pub const fn new(tokens: u64, per: Duration) -> Self {
        Self::from_parts(tokens, tokens, per)
    }

    /// Creates a quota from its capacity, and its `tokens` per period `per`, at once: for a capacity that has to be
    /// smaller than the number of tokens per period.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self).
    #[must_use]
    #[track_caller]
    pub const fn from_parts(capacity: u64, tokens: u64, per: Duration) -> Self {
        match Self::check(capacity, tokens, per) {
            Ok(quota) => quota,
            Err(error) => panic!("{}", error.text().as_str()),
        }
    }

    /// Replaces the capacity: the most tokens a bucket holds, and what a fresh one holds.
    ///
    /// # Panics
    ///
    /// When the quota is not one of those [accepted](Self).
    #[must_use]
    #[track_caller]
    pub const fn with_capacity(self, capacity: u64) -> Self {
        Self::from_parts(capacity, self.tokens, Duration::from_micros(self.per_us))
    }

    /// Creates a quota of `tokens` per second, like [`per_second`](Self::per_second).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_per_second(tokens: u64) -> Result<Self, ConfigError> {
        Self::try_new(tokens, Duration::from_secs(1))
    }

    /// Creates a quota of `tokens` per minute, like [`per_minute`](Self::per_minute).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_per_minute(tokens: u64) -> Result<Self, ConfigError> {
        Self::try_new(tokens, Duration::from_secs(60))
    }

    /// Creates a quota of `tokens` per hour, like [`per_hour`](Self::per_hour).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_per_hour(tokens: u64) -> Result<Self, ConfigError> {
        Self::try_new(tokens, Duration::from_secs(3600))
    }

    /// Creates a quota of `tokens` per day, like [`per_day`](Self::per_day).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_per_day(tokens: u64) -> Result<Self, ConfigError> {
        Self::try_new(tokens, Duration::from_secs(86_400))
    }

    /// Creates a quota of `tokens` per period `per`, like [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_new(tokens: u64, per: Duration) -> Result<Self, ConfigError> {
        Self::try_from_parts(tokens, tokens, per)
    }

    /// Creates a quota from all its parts, like [`from_parts`](Self::from_parts).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_from_parts(capacity: u64, tokens: u64, per: Duration) -> Result<Self, ConfigError> {
        match Self::check(capacity, tokens, per) {
            Ok(quota) => Ok(quota),
            Err(error) => Err(ConfigError::Quota(error)),
        }
    }

    /// Replaces the capacity, like [`with_capacity`](Self::with_capacity).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the quota is not one of those [accepted](Self).
    pub const fn try_with_capacity(self, capacity: u64) -> Result<Self, ConfigError> {
        Self::try_from_parts(capacity, self.tokens, Duration::from_micros(self.per_us))
    }

    /// The most tokens a bucket holds, and what a fresh one holds.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity as u64
    }

    /// The refill rate in lowest terms: so many tokens per period.
    #[must_use]
    pub const fn refill(&self) -> (u64, Duration) {
        (self.tokens, Duration::from_micros(self.per_us))
    }

    /// How long an empty bucket takes to fill, rounded up to a microsecond.
    #[must_use]
    pub const fn time_to_full(&self) -> Duration {
        Duration::from_micros((self.full() as u64).div_ceil(self.tokens))
    }

    /// One `n`-th of this quota, capacity and rate, as near as integers come, with a capacity of at least 1.
    pub(crate) const fn share(&self, n: u32) -> Self {
        if n <= 1 {
            return *self;
        }
        let capacity = if self.capacity / n == 0 { 1 } else { self.capacity / n };
        nearest(capacity as u64, self.tokens as u128, self.per_us as u128 * n as u128)
    }

    /// n of "n tokens per p microseconds".
    pub(crate) const fn tokens(&self) -> u64 {
        self.tokens
    }

    /// p of "n tokens per p microseconds": one token is p units of a level.
    pub(crate) const fn per_us(&self) -> u64 {
        self.per_us
    }

    /// The level of a full bucket, in units of 1/p token: at most 2⁵¹.
    pub(crate) const fn full(&self) -> i64 {
        (self.capacity as u64 * self.per_us) as i64
    }

    fn check_ratio_is_reduced(&self) -> bool {
        gcd(u128::from(self.tokens), u128::from(self.per_us)) == 1
    }

    const fn check(capacity: u64, tokens: u64, per: Duration) -> Result<Self, QuotaError> {
        // Nanoseconds first, so that 1 per 500 ns is 2 per microsecond and not an error.
        let nanos = per.as_nanos();
        let wanted = tokens as u128 * 1000;
        // The refill first: without a capacity of its own a quota has that of its refill.
        let fault = if tokens == 0 {
            Fault::NoRefill
        } else if capacity == 0 {
            Fault::NoCapacity
        } else if nanos == 0 {
            Fault::NoPeriod
        } else if capacity > CAPACITY_MAX {
            Fault::Capacity
        } else {
            let divisor = gcd(wanted, nanos);
            let (n, p) = (wanted / divisor, nanos / divisor);
            if n > TOKENS_MAX as u128 || p > PER_MAX as u128 {
                Fault::Rate
            } else if capacity as u128 * p > UNITS_MAX as u128 {
                Fault::Product
            } else {
                return Ok(Self { capacity: capacity as u32, tokens: n as u64, per_us: p as u64 });
            }
        };
        let nearest = match fault {
            Fault::NoCapacity | Fault::NoRefill | Fault::NoPeriod => None,
            Fault::Capacity | Fault::Rate | Fault::Product => Some(nearest(capacity, wanted, nanos)),
        };
        Err(QuotaError { fault, capacity, tokens, per, nearest })
    }

    const fn write<const N: usize>(&self, text: Text<N>) -> Text<N> {
        let text = text.str("capacity ").number(self.capacity as u128).str(", ").number(self.tokens as u128);
        let text = text.str(if self.tokens == 1 { " token per " } else { " tokens per " });
        write_duration(text, Duration::from_micros(self.per_us))
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        debug_assert!(self.check_ratio_is_reduced());
        f.write_str(self.write(Text::<96>::new()).as_str())
    }
}

/// Why a quota is not accepted, and the nearest one that is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaError {
    fault: Fault,
    capacity: u64,
    tokens: u64,
    per: Duration,
    nearest: Option<Quota>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    NoCapacity,
    NoRefill,
    NoPeriod,
    Capacity,
    Rate,
    Product,
}

impl QuotaError {
    /// The nearest quota that can be held: `None` where a number is 0.
    #[must_use]
    pub const fn nearest(&self) -> Option<Quota> {
        self.nearest
    }

    /// The part that is at fault, as configuration files call it.
    #[cfg(feature = "serde")]
    pub(crate) fn place(&self) -> &'static str {
        match self.fault {
            Fault::NoCapacity | Fault::Capacity | Fault::Product => "capacity",
            Fault::NoRefill | Fault::Rate => "refill",
            Fault::NoPeriod => "per",
        }
    }

    const fn text(&self) -> Text<320> {
        let text = Text::new();
        let text = match self.fault {
            Fault::NoCapacity => {
                return text.str("capacity is 0: allowed are 1 to ").number(CAPACITY_MAX as u128).str(" tokens");
            }
            Fault::NoRefill => {
                let text = text.str("refill is 0: allowed are 1 to ").number(TOKENS_MAX as u128);
                return text.str(" tokens per period");
            }
            Fault::NoPeriod => return text.str("period (per) is 0: any longer time is allowed"),
            Fault::Capacity => text
                .str("capacity ")
                .number(self.capacity as u128)
                .str(" is too large: allowed are 1 to ")
                .number(CAPACITY_MAX as u128)
                .str(" tokens"),
            Fault::Rate => {
                let text = text.str("refill of ").number(self.tokens as u128).str(" tokens per ");
                let text = write_duration(text, self.per).str(" cannot be held exactly: in lowest terms at most ");
                let text = text.number(TOKENS_MAX as u128).str(" tokens per at most ").number(PER_MAX as u128);
                text.str(" us are allowed")
            }
            Fault::Product => {
                let text = text.str("capacity ").number(self.capacity as u128).str(" with a refill of ");
                let text = text.number(self.tokens as u128).str(" tokens per ");
                let text = write_duration(text, self.per).str(" cannot be held exactly: capacity x period in us, ");
                text.str("in lowest terms, is at most ").number(UNITS_MAX as u128)
            }
        };
        match self.nearest {
            Some(quota) => quota.write(text.str("; the nearest quota that can be held: ")),
            None => text,
        }
    }
}

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text().as_str())
    }
}

impl std::error::Error for QuotaError {}

/// In the largest unit of s, ms, us and ns that is exact.
const fn write_duration<const N: usize>(text: Text<N>, duration: Duration) -> Text<N> {
    let nanos = duration.as_nanos();
    if nanos.is_multiple_of(1_000_000_000) {
        text.number(nanos / 1_000_000_000).str(" s")
    } else if nanos.is_multiple_of(1_000_000) {
        text.number(nanos / 1_000_000).str(" ms")
    } else if nanos.is_multiple_of(1_000) {
        text.number(nanos / 1_000).str(" us")
    } else {
        text.number(nanos).str(" ns")
    }
}

const fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

const fn min(a: u128, b: u128) -> u128 {
    if a < b { a } else { b }
}

/// The accepted quota nearest to `capacity` at `tokens`/`per_us`, none of them 0: the rate is the best rational
/// approximation within the bounds (by its continued fraction), then the capacity is cut to what that period allows.
const fn nearest(capacity: u64, tokens: u128, per_us: u128) -> Quota {
    const TOKENS: u128 = TOKENS_MAX as u128;
    const PER: u128 = PER_MAX as u128;
    let (mut n, mut p) = (tokens, per_us);
    // So that every product below fits; what is cut off is far below the precision of what fits the bounds.
    while n >> 80 != 0 || p >> 80 != 0 {
        (n, p) = (n >> 1, p >> 1);
    }
    // Convergents h/k of n/p.
    let (mut h0, mut k0, mut h1, mut k1) = (0, 1, 1, 0);
    while p != 0 {
        let digit = n / p;
        let mut fits = digit;
        if let Some(most) = (TOKENS - h0).checked_div(h1) {
            fits = min(fits, most);
        }
        if let Some(most) = (PER - k0).checked_div(k1) {
            fits = min(fits, most);
        }
        // A digit that is cut short gives a nearer fraction beyond half of it, or at half where the rest says so.
        let is_nearer = fits * 2 > digit || (fits * 2 == digit && n % p * k1 < k0 * p);
        if fits < digit && !is_nearer && k1 != 0 {
            break;
        }
        (h0, k0, h1, k1) = (h1, k1, fits * h1 + h0, fits * k1 + k0);
        if fits < digit {
            break;
        }
        (n, p) = (p, n % p);
    }
    // Slower or faster than any rate that fits.
    let (n, p) = if h1 == 0 { (1, PER) } else { (h1, k1) };
    let capacity = min(min(capacity as u128, CAPACITY_MAX as u128), UNITS_MAX as u128 / p);
    Quota { capacity: capacity as u32, tokens: n as u64, per_us: p as u64 }
}
