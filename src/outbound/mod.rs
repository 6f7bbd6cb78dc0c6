//! The sender's side: wait for a token before calling a peer that limits its callers.
//!
//! A [`Limiter`] has a bucket for each key, such as each endpoint, shared by all senders through the store. A sender waits
//! for its tokens; [`ThrottleLayer`] does that around any client service, so that nothing is sent without them.
//!
//! ```
//! use std::time::Duration;
//! use tower_token_bucket::outbound::Limiter;
//! use tower_token_bucket::{BucketKey, MemoryStore, Quota};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_second(10).with_capacity(1));
//! let endpoint = BucketKey::id("endpoint 7");
//! assert_eq!(limiter.acquire(endpoint, 1).await?, Duration::ZERO);
//! assert_eq!(limiter.acquire(endpoint, 1).await?, Duration::from_millis(100));
//! # Ok(())
//! # }
//! ```
//!
//! # A peer's own word
//!
//! With [`Limiter::adaptive`] all senders share what the peer says: a 429, or a 503 with `Retry-After`, empties the bucket
//! until the time that it names is over, and lowers the rate; seconds without one raise it again. See [`AdaptiveRate`].
//!
//! # Which quota
//!
//! A peer that publishes "100 requests per second, bursts to 200" is `Quota::per_second(100).with_capacity(200)`. Take a
//! fraction of the published burst, half of it when others send too, since what is on its way may arrive together:
//! `with_capacity(100)`. A capacity of 1 is a pacer: one at a time, evenly.

mod adaptive;
mod error;
mod event;
#[cfg(feature = "ratelimit-fields")]
mod fields;
mod limiter;
mod peer;
mod published;
mod queue;
mod rates;
mod throttle;

pub use crate::pace::AdaptiveRate;
pub use error::{AcquireError, ThrottleError};
pub use event::{Event, RateState};
pub use limiter::Limiter;
pub use published::PublishedLimit;
pub use rates::{AdaptiveStore, Rates};
pub(crate) use rates::{Paced, Pacer, Pacing};
pub use throttle::{Host, ResponseFuture, Throttle, ThrottleLayer};
