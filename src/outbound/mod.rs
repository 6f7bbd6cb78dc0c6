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
//! [`Limiter::on_event`] tells of it.
//!
//! # Which quota
//!
//! [`PublishedLimit`] turns "100 requests per second, bursts to 200" into a [`Quota`](crate::Quota), and half of that burst
//! where others send too.
//!
//! # With retries and timeouts
//!
//! From the outside in: what limits how many are under way, retries, this layer, the timeout of one attempt. So each attempt
//! waits for its own token, and the wait is not counted in the timeout. A retry policy passes
//! [`ThrottleError::Acquire`] on: nothing was sent, and the queue that the request came from is the place to wait.
//!
//! ```
//! use std::future::{Ready, ready};
//! use std::time::Duration;
//!
//! use http::{Request, Response};
//! use tower::retry::Policy;
//! use tower::{BoxError, ServiceBuilder, service_fn};
//! use tower_token_bucket::outbound::{Limiter, ThrottleError, ThrottleLayer};
//! use tower_token_bucket::{MemoryStore, Quota};
//!
//! #[derive(Clone)]
//! struct Attempts(u32);
//!
//! impl Policy<Request<String>, Response<String>, ThrottleError<BoxError>> for Attempts {
//!     type Future = Ready<()>;
//!
//!     fn retry(
//!         &mut self,
//!         _: &mut Request<String>,
//!         result: &mut Result<Response<String>, ThrottleError<BoxError>>,
//!     ) -> Option<Self::Future> {
//!         let again = match result {
//!             Ok(response) => response.status().is_server_error() || response.status() == 429,
//!             Err(ThrottleError::Inner(_)) => true,
//!             Err(ThrottleError::Acquire(_)) => false,
//!         };
//!         self.0 = self.0.checked_sub(1)?;
//!         again.then(|| ready(()))
//!     }
//!
//!     fn clone_request(&mut self, request: &Request<String>) -> Option<Request<String>> {
//!         Some(request.clone())
//!     }
//! }
//!
//! let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_second(50));
//! let client = ServiceBuilder::new()
//!     .concurrency_limit(64)
//!     .retry(Attempts(3))
//!     .layer(ThrottleLayer::new(limiter))
//!     .timeout(Duration::from_secs(10))
//!     .service(service_fn(|_: Request<String>| async { Ok::<_, std::io::Error>(Response::new(String::new())) }));
//! # async fn send(mut client: impl tower::Service<Request<String>, Error = ThrottleError<BoxError>>) {
//! #     let _ = client.call(Request::new(String::new())).await;
//! # }
//! # drop(send(client));
//! ```

mod adaptive;
mod error;
mod event;
#[cfg(feature = "ratelimit-fields")]
mod fields;
mod heard;
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
