//! Where buckets live.

use std::future::Future;

use crate::charge::Charge;
use crate::decision::Decision;

pub(crate) mod memory;
#[cfg(feature = "redis")]
pub(crate) mod redis;

/// Where buckets live: makes all charges of a request in one step, or none.
///
/// A store is a handle: its clones share the buckets. An implementation keeps this contract:
///
/// - One call is one atomic step, whatever other callers do: all enforced charges are made, or none. A shadow charge is
///   made when all enforced charges pass and it has the tokens, and never refuses.
/// - The clock is the store's own, read once a call; callers do not send a time.
/// - A charge that is refused changes no level.
/// - `acquire` does not block. The future does the work when it is polled, and never panics for what the other side
///   answers: an answer that cannot be understood is an [error](Self::Error).
/// - A future that is dropped half-way may have charged or not; it never admits without a charge, and nothing is given
///   back.
///
/// # Example
///
/// A store that asks another one, and counts the questions:
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tower_token_bucket::{Charge, MemoryStore, Store};
///
/// #[derive(Clone, Debug, Default)]
/// struct Counted { inner: MemoryStore, questions: Arc<AtomicU64> }
///
/// impl Store for Counted {
///     type Error = <MemoryStore as Store>::Error;
///     type Future = <MemoryStore as Store>::Future;
///
///     fn acquire(&self, charges: &[Charge]) -> Self::Future {
///         self.questions.fetch_add(1, Ordering::Relaxed);
///         self.inner.acquire(charges)
///     }
/// }
/// ```
pub trait Store: Clone + Send + Sync + 'static {
    /// Why the store did not answer.
    type Error: std::error::Error + Send + Sync + 'static;

    /// The answer to come.
    type Future: Future<Output = Result<Decision, Self::Error>> + Send + 'static;

    /// Makes all `charges` or none, in one step.
    fn acquire(&self, charges: &[Charge]) -> Self::Future;
}
