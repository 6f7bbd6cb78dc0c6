//! Rates that adapt, as stores keep them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::charge::LimitName;
use crate::key::BucketKey;
use crate::pace::{PaceAsk, PaceReply, PaceSettings};
use crate::store::Store;

/// A store that also keeps rates that adapt: [`MemoryStore`](crate::MemoryStore), `RedisStore`, and those that hand on the
/// [`Rates`] of another.
///
/// # Example
///
/// ```
/// use tower_token_bucket::outbound::{AdaptiveStore, Rates};
/// use tower_token_bucket::{Charge, MemoryStore, Store};
///
/// #[derive(Clone)]
/// struct Wrapped(MemoryStore);
///
/// impl Store for Wrapped {
///     type Error = <MemoryStore as Store>::Error;
///     type Future = <MemoryStore as Store>::Future;
///
///     fn acquire(&self, charges: &[Charge]) -> Self::Future {
///         self.0.acquire(charges)
///     }
/// }
///
/// impl AdaptiveStore for Wrapped {
///     fn rates(&self) -> Rates {
///         self.0.rates()
///     }
/// }
/// ```
pub trait AdaptiveStore: Store {
    /// What keeps the rates.
    fn rates(&self) -> Rates;
}

/// What keeps rates that adapt: a bucket, its rate and the cooldown of each key, which are read and written in one step.
#[derive(Clone)]
pub struct Rates(Arc<dyn Pacer>);

impl Rates {
    pub(crate) fn new(pacer: impl Pacer) -> Self {
        Self(Arc::new(pacer))
    }

    pub(super) fn pace(&self, pacing: Pacing, deadline: Duration) -> Paced {
        self.0.pace(pacing, deadline)
    }

    /// Whether what they say has to be remembered here.
    pub(super) fn may_fail(&self) -> bool {
        self.0.may_fail()
    }
}

impl fmt::Debug for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rates").finish_non_exhaustive()
    }
}

pub(crate) trait Pacer: Send + Sync + 'static {
    fn pace(&self, pacing: Pacing, deadline: Duration) -> Paced;

    /// Whether there may be no answer.
    fn may_fail(&self) -> bool;
}

/// The answer to come.
pub(crate) type Paced =
    Pin<Box<dyn Future<Output = Result<PaceReply, Box<dyn std::error::Error + Send + Sync>>> + Send>>;

/// One question about a bucket.
#[derive(Clone, Debug)]
pub(crate) struct Pacing {
    pub(crate) limit: LimitName,
    pub(crate) key: BucketKey,
    pub(crate) settings: PaceSettings,
    pub(crate) ask: PaceAsk,
}
