//! Why nothing was sent.

use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::key::NoKey;

/// Why there were no tokens: nothing was taken, and nothing is sent.
///
/// It is no failure of the peer. Put what was to be sent back into its queue, for [`retry_after`](Self::retry_after), and
/// do not count an attempt for it: attempts are what the peer has answered, or failed to. What
/// [`is_permanent`](Self::is_permanent) is not to be tried again.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_token_bucket::outbound::{AcquireError, Limiter};
/// use tower_token_bucket::{BucketKey, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), AcquireError> {
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_minute(1));
/// let endpoint = BucketKey::id("endpoint 7");
/// limiter.acquire(endpoint, 1).await?;
/// let error = limiter.acquire(endpoint, 1).await.unwrap_err(); // at once: it waits 5 s at most
/// assert_eq!(error.retry_after(), Some(Duration::from_secs(60)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AcquireError {
    /// The tokens are not there within the time that the caller would wait.
    NoTokens {
        /// The time from now until they could be, with those that wait before.
        retry_after: Duration,
    },
    /// The cost is above the capacity, so that no wait helps.
    TooDear {
        /// The tokens that were asked for.
        cost: u64,
        /// The most that the bucket holds.
        capacity: u64,
    },
    /// As many wait as [may](super::Limiter::max_waiters).
    Crowded,
    /// The request names no bucket.
    NoKey(NoKey),
    /// The store failed, under [`OnStoreFailure::Deny`](crate::OnStoreFailure::Deny).
    StoreFailed {
        /// When it is asked again.
        retry_after: Duration,
    },
}

impl AcquireError {
    /// Whether no wait helps: the cost is above the capacity, or the request names no bucket.
    ///
    /// # Example
    ///
    /// ```
    /// use tower_token_bucket::outbound::AcquireError;
    ///
    /// assert!(AcquireError::TooDear { cost: 11, capacity: 10 }.is_permanent());
    /// assert!(!AcquireError::Crowded.is_permanent(), "though nobody knows for how long");
    /// ```
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::TooDear { .. } | Self::NoKey(_))
    }

    /// When to try again; `None` when no wait helps, or it is not known how long, as when [too many](Self::Crowded) wait.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::NoTokens { retry_after } | Self::StoreFailed { retry_after } => Some(*retry_after),
            Self::TooDear { .. } | Self::Crowded | Self::NoKey(_) => None,
        }
    }
}

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTokens { retry_after } => write!(f, "no tokens in time: they could be there in {retry_after:?}"),
            Self::TooDear { cost, capacity } => {
                write!(f, "a cost of {cost} is above the capacity {capacity}: it can never be paid")
            }
            Self::Crowded => f.write_str("as many wait for tokens as may"),
            Self::NoKey(NoKey::Credential(header)) => {
                write!(f, "the request names no bucket: no credential in {header}")
            }
            Self::NoKey(NoKey::Identity) => f.write_str(
                "the request names no bucket: no host in its URL or `Host` field, or none that `key_by` finds",
            ),
            Self::NoKey(NoKey::Peer) => f.write_str("the request names no bucket: it has no peer"),
            Self::StoreFailed { retry_after } => {
                write!(f, "the store of the buckets failed: it is asked again in {retry_after:?}")
            }
        }
    }
}

impl Error for AcquireError {}

/// Why a [`Throttle`](super::Throttle) has no response.
/// The two are never to be mixed up: only [`Inner`](Self::Inner) says something of the peer, and counts as an attempt.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_token_bucket::outbound::{AcquireError, ThrottleError};
///
/// /// After how long a dispatcher puts the event back into its queue; `None` for one that it gives up.
/// fn again_after<E>(error: &ThrottleError<E>, attempts: &mut u32) -> Option<Duration> {
///     match error {
///         ThrottleError::Acquire(error) if error.is_permanent() => None,
///         ThrottleError::Acquire(error) => Some(error.retry_after().unwrap_or(Duration::from_secs(1))),
///         ThrottleError::Inner(_) => {
///             *attempts += 1;
///             (*attempts < 5).then(|| Duration::from_secs(1 << *attempts))
///         }
///     }
/// }
///
/// let (mut attempts, retry_after) = (0, Duration::from_millis(700));
/// let no_tokens = ThrottleError::<std::io::Error>::Acquire(AcquireError::NoTokens { retry_after });
/// assert_eq!(again_after(&no_tokens, &mut attempts), Some(retry_after));
/// assert_eq!(attempts, 0);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThrottleError<E> {
    /// There were no tokens: nothing was sent.
    Acquire(AcquireError),
    /// The inner service failed.
    Inner(E),
}

impl<E: fmt::Display> fmt::Display for ThrottleError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Acquire(error) => error.fmt(f),
            Self::Inner(error) => error.fmt(f),
        }
    }
}

/// Also for the boxed errors of tower, which are no [`Error`] themselves. The inner error shows as it is, so that only that
/// of the tokens is a source.
impl<E: fmt::Debug + fmt::Display> Error for ThrottleError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Acquire(error) => Some(error),
            Self::Inner(_) => None,
        }
    }
}
