//! What a limiter tells those who watch it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::error::AcquireError;
use crate::key::BucketKey;
use crate::pace::PaceReply;

/// The rate of a key, as all senders share it.
/// What [`Limiter::rate_state`](super::Limiter::rate_state) returns, and what events carry.
///
/// # Example
///
/// ```
/// use std::time::Duration;
/// use tower_token_bucket::outbound::{AdaptiveRate, Limiter};
/// use tower_token_bucket::{BucketKey, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), tower_token_bucket::outbound::AcquireError> {
/// let quota = Quota::per_second(10);
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", quota).adaptive(AdaptiveRate::of(quota));
/// let endpoint = BucketKey::id("endpoint 7");
/// limiter.refused(endpoint, Some(Duration::from_secs(30))).await?; // a 429 with `Retry-After: 30`
/// let state = limiter.rate_state(endpoint).await?;
/// assert_eq!(state.rate, 5.0); // half of it, from when the cooldown is over
/// assert_eq!(state.cooldown, Duration::from_secs(30));
/// assert_eq!(state.at_floor, None);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RateState {
    /// In tokens per second.
    pub rate: f64,
    /// Nothing is sent for so long: the peer has said so. Zero where nothing is in the way.
    pub cooldown: Duration,
    /// For how long the rate has been the lowest that [`AdaptiveRate::floor`](super::AdaptiveRate::floor) allows: a peer
    /// that refuses for minutes what is agreed. `None` where it is higher.
    pub at_floor: Option<Duration>,
}

impl RateState {
    pub(super) fn of(reply: &PaceReply) -> Self {
        Self {
            rate: reply.rate as f64 / 1000.0,
            cooldown: Duration::from_micros(reply.ahead_us),
            at_floor: reply.floored_us.map(Duration::from_micros),
        }
    }
}

/// What has happened, for [`Limiter::on_event`](super::Limiter::on_event).
/// # Example
///
/// ```
/// use std::sync::{Arc, Mutex};
/// use std::time::Duration;
/// use tower_token_bucket::outbound::{AcquireError, Event, Limiter};
/// use tower_token_bucket::{BucketKey, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let seen = Arc::new(Mutex::new(Vec::new()));
/// let list = Arc::clone(&seen);
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_minute(1))
///     .on_event(move |_, event| list.lock().unwrap().push(event.clone()));
/// let endpoint = BucketKey::id("endpoint 7");
/// let _ = limiter.acquire(endpoint, 1).await;
/// let _ = limiter.acquire(endpoint, 1).await;
/// let retry_after = Duration::from_secs(60);
/// assert_eq!(*seen.lock().unwrap(), [
///     Event::Acquired { cost: 1, waited: Duration::ZERO },
///     Event::NotAcquired(AcquireError::NoTokens { retry_after }),
/// ]);
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// Tokens were given.
    Acquired {
        /// How many.
        cost: u64,
        /// How long that took.
        waited: Duration,
    },
    /// There were no tokens: nothing was taken.
    NotAcquired(AcquireError),
    /// The store was asked for tokens at a rate that adapts, and told the rate.
    Rate(RateState),
    /// The peer has refused: a cooldown begins, or goes on.
    Refused(RateState),
    /// The peer has said that it has nothing left for a while.
    Paused(RateState),
}

/// Calls whoever watches, if anybody does.
#[derive(Clone, Default)]
pub(super) struct Watcher(Option<Arc<Watch>>);

type Watch = dyn Fn(&BucketKey, &Event) + Send + Sync;

impl Watcher {
    pub(super) fn new(watch: impl Fn(&BucketKey, &Event) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(watch)))
    }

    /// A hook that panics has no say in who gets tokens: whoever watches has the panic's message.
    pub(super) fn tell(&self, key: &BucketKey, event: impl FnOnce() -> Event) {
        if let Some(watch) = &self.0 {
            let event = event();
            let _ = catch_unwind(AssertUnwindSafe(|| watch(key, &event)));
        }
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Watcher" } else { "nobody" })
    }
}
