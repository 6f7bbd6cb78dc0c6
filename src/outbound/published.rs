//! From what a peer publishes to a quota.

use std::time::Duration;

use crate::error::{ConfigError, or_panic};
use crate::quota::Quota;

/// A limit as a peer publishes it, such as "100 requests per second, bursts to 200".
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_token_bucket::Quota;
/// use tower_token_bucket::outbound::PublishedLimit;
///
/// let limit = PublishedLimit::new(100, Duration::from_secs(1)).bursts_to(200);
/// assert_eq!(limit.quota(), Quota::per_second(100).with_capacity(200));
/// assert_eq!(limit.with_others().quota(), Quota::per_second(100).with_capacity(100), "others send too");
///
/// let pacer = PublishedLimit::new(100, Duration::from_secs(1));
/// assert_eq!(pacer.quota(), Quota::per_second(100).with_capacity(100), "nothing is said of bursts");
///
/// // "1,000 requests per minute", counted in each minute: never more than 1,000 in any 60 seconds.
/// let counted = PublishedLimit::new(1_000, Duration::from_secs(60)).windowed();
/// assert_eq!(counted.quota(), Quota::per_second(15).with_capacity(100));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedLimit {
    requests: u64,
    per: Duration,
    /// As published, if it is.
    burst: Option<u64>,
    with_others: bool,
    windowed: bool,
}

impl PublishedLimit {
    /// So many requests in that time. Where nothing is said of bursts, the capacity is what the rate gives in a second,
    /// at least 1: a pacer.
    #[must_use]
    pub const fn new(requests: u64, per: Duration) -> Self {
        Self { requests, per, burst: None, with_others: false, windowed: false }
    }

    /// So many requests may come at once.
    #[must_use]
    pub const fn bursts_to(self, requests: u64) -> Self {
        Self { burst: Some(requests), ..self }
    }

    /// Others send to the same limit, or what is on its way may arrive together: half of the burst is used, at least 1.
    #[must_use]
    pub const fn with_others(self) -> Self {
        Self { with_others: true, ..self }
    }

    /// The peer counts requests in windows, and has no bucket: what is sent is never more than the limit in any window, wherever
    /// it begins. The capacity is a tenth of the limit, or the burst if one is published, at most the limit; what is left of
    /// the limit refills.
    #[must_use]
    pub const fn windowed(self) -> Self {
        Self { windowed: true, ..self }
    }

    /// The quota to send under.
    ///
    /// # Panics
    ///
    /// When there is none; [`try_quota`](Self::try_quota) returns the error.
    #[must_use]
    #[track_caller]
    pub fn quota(self) -> Quota {
        or_panic(self.try_quota())
    }

    /// The quota to send under.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Quota`] when the limit, the time or the burst is zero, and when the numbers are larger than a
    /// [`Quota`] holds.
    pub fn try_quota(self) -> Result<Quota, ConfigError> {
        let Self { requests, per, burst, with_others, windowed } = self;
        let unsaid = || {
            let in_a_second = u128::from(requests) * 1_000_000 / per.as_micros().max(1);
            if windowed { requests / 10 } else { u64::try_from(in_a_second).unwrap_or(u64::MAX) }.max(1)
        };
        let burst = burst.unwrap_or_else(unsaid);
        let capacity = if with_others { burst.div_ceil(2) } else { burst };
        if !windowed || requests == 0 {
            return Quota::try_from_parts(capacity, requests, per);
        }
        // A window holds a full bucket, and of what refills in it all but the last token: none, where that is the only one.
        let capacity = capacity.min(requests);
        Quota::try_from_parts(capacity, (requests - capacity).max(1), per)
    }
}
