//! The limits of a layer, which can be replaced while it runs.

use std::fmt;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};

use crate::error::ConfigError;
use crate::limit::{Limit, Limits};
use crate::{log, metrics};

/// Replaces the limits of a running layer, for all its clones and services: what
/// [`TokenBucketLayer::handle`](crate::TokenBucketLayer::handle) returns. Cloning it is cheap.
///
/// Buckets are named by their limit and key, and keep their tokens: a smaller capacity clamps, and the time since a
/// bucket's last use is earned at the new rate. A limit with a new name starts with full buckets. A request is judged by
/// the limits that were there when it came, to its end.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};
///
/// let layer = TokenBucketLayer::new(MemoryStore::new(), Limit::new("per-address", Quota::per_second(10)));
/// let handle = layer.handle();
/// // … layer goes to a router, and some time later:
/// handle.replace([Limit::new("per-address", Quota::per_second(20))])?;
/// assert_eq!(handle.limits()[0].quota().capacity(), 20);
/// # Ok::<(), tower_token_bucket::ConfigError>(())
/// ```
#[derive(Clone)]
pub struct LimitsHandle {
    current: Arc<ArcSwap<Limits>>,
}

impl LimitsHandle {
    pub(crate) fn new(limits: Limits) -> Self {
        metrics::limits_are(&limits);
        Self { current: Arc::new(ArcSwap::from_pointee(limits)) }
    }

    /// Replaces all limits at once. With an error the old ones stay.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NoLimit`] when there is none, [`ConfigError::DuplicateLimit`] when two have names that are equal
    /// but for their case.
    pub fn replace(&self, limits: impl IntoIterator<Item = Limit>) -> Result<(), ConfigError> {
        let limits = self.now().replaced(limits)?;
        metrics::limits_are(&limits);
        self.current.store(Arc::new(limits));
        metrics::reloaded();
        log::info!("the limits of a layer are replaced: {self:?}");
        Ok(())
    }

    /// The limits as they are now, in order.
    #[must_use]
    pub fn limits(&self) -> Vec<Limit> {
        self.now().iter().cloned().collect()
    }

    /// The limits as they are now, without a lock.
    pub(crate) fn now(&self) -> Guard<Arc<Limits>> {
        self.current.load()
    }
}

impl fmt::Debug for LimitsHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.now().iter()).finish()
    }
}
