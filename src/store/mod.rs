//! Where buckets live.

use std::future::Future;
use std::time::Duration;

use crate::charge::{Amount, Charge};
use crate::decision::Decision;
use crate::key::BucketKey;
use crate::limit::Limit;

pub(crate) mod memory;
mod paces;
#[cfg(feature = "redis")]
pub(crate) mod redis;
mod sync;

/// Where buckets live: makes all charges of a request in one step, or none.
///
/// A store is a handle: its clones share the buckets. The methods beside [`acquire`](Self::acquire) are for operators,
/// with the keys that extractors make. An implementation keeps this contract, and can prove it with the crate's
/// `conformance` module:
///
/// - One call is one atomic step, whatever other callers do: all enforced charges are made, or none. A shadow charge is
///   made when all enforced charges pass and it has the tokens, and never refuses.
/// - The clock is the store's own, read once a call; callers do not send a time.
/// - A charge that is refused changes no level.
/// - `acquire` does not block. It may make the charges itself, or leave that to the future, which is polled at once. It
///   never panics for what the other side answers: an answer that cannot be understood is an [error](Self::Error).
/// - A future that is dropped half-way may have charged or not; it never admits without a charge, and nothing is given
///   back.
///
/// # Example
///
/// An operator looks into a bucket, and helps its owner out:
///
/// ```
/// use tower_token_bucket::{BucketKey, Limit, MemoryStore, Quota, Store};
///
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let store = MemoryStore::new();
/// let limit = Limit::new("per-key", Quota::per_hour(100));
/// let client = BucketKey::credential("alpha"); // as `ApiKey` makes it
/// store.penalize(&limit, client, 130).await?;
/// assert_eq!(store.peek(&limit, client).await?.remaining(), Some(0));
/// store.reset(&limit, client).await?;
/// assert_eq!(store.peek(&limit, client).await?.remaining(), Some(100));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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

    /// The answer of a store that always has it at once, and so without a future: the layer asks for this first. `None`,
    /// as by default, leaves the question to [`acquire_within`](Self::acquire_within); nothing has been charged then.
    ///
    /// It is the same step as `acquire`. A store around another one may leave it out, or pass it on as it does `acquire`.
    /// # Example
    ///
    /// ```
    /// use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, MemoryStore, Quota, Store};
    ///
    /// let name = LimitName::try_new("everyone")?;
    /// let take = Charge::new(name, BucketKey::global(), Quota::per_minute(4), Amount::Take(3));
    /// let decision = MemoryStore::new().acquire_at_once(&[take]).expect("memory answers at once");
    /// assert_eq!(decision.remaining(), Some(1));
    /// # Ok::<(), tower_token_bucket::ConfigError>(())
    /// ```
    fn acquire_at_once(&self, charges: &[Charge]) -> Option<Decision> {
        let _ = charges;
        None
    }

    /// The same for a caller that gives up, and drops the future, after `deadline`: what the layer calls. A store may
    /// draw its conclusions; by default it makes no difference.
    fn acquire_within(&self, charges: &[Charge], deadline: Duration) -> Self::Future {
        let _ = deadline;
        self.acquire(charges)
    }

    /// Looks into the bucket of `limit` and `key`, and changes nothing: the decision says what is
    /// [left](Decision::remaining) and when it is [full](Decision::reset_after).
    ///
    /// The limit's own quota counts, here and in the other two. For a client on another plan, pass a limit of the same
    /// name with the quota of that plan.
    fn peek(&self, limit: &Limit, key: BucketKey) -> Self::Future {
        self.acquire(&[limit.charge_to(key, Amount::Peek)])
    }

    /// Fills the bucket of `limit` and `key`, a debt included.
    fn reset(&self, limit: &Limit, key: BucketKey) -> Self::Future {
        self.acquire(&[limit.charge_to(key, Amount::Give(u64::MAX))])
    }

    /// Takes `cost` tokens from the bucket of `limit` and `key`, whether they are there or not. The debt, of at most one
    /// capacity, refills first: twice the capacity keeps a client out for the longest time that a bucket can.
    fn penalize(&self, limit: &Limit, key: BucketKey, cost: u64) -> Self::Future {
        self.acquire(&[limit.charge_to(key, Amount::Spend(cost))])
    }
}
