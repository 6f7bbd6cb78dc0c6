//! What happens to a request when the store does not answer.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::charge::{Charge, Charges};
use crate::decision::{Decision, Source};
use crate::log;
use crate::rejection::{Reason, Verdict};
use crate::store::memory::MemoryStore;

/// What happens to a request when the store fails: an error, or no answer within the deadline.
///
/// A cost above the capacity is refused under every policy.
/// # Example
///
/// With four instances, so that in an outage they keep to the limit together; logins are rather refused than let through without
/// their limit:
///
/// ```
/// use tower_token_bucket::{ConfigError, Limit, OnStoreFailure, Quota, Store, TokenBucketLayer};
///
/// fn layer<St: Store>(store: St) -> Result<TokenBucketLayer<St>, ConfigError> {
///     let requests = Limit::new("requests", Quota::per_second(100));
///     let logins = Limit::new("logins", Quota::per_minute(10)).on_store_failure(OnStoreFailure::Deny);
///     Ok(TokenBucketLayer::try_new(store, [requests, logins])?
///         .on_store_failure(OnStoreFailure::Local)
///         .share(4))
/// }
/// # layer(tower_token_bucket::MemoryStore::new()).unwrap();
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// The same limits, on this instance alone: in memory buckets of its own, which keep their state from one outage to
    /// the next. Each instance then hands out the whole quota, or the
    /// [share](crate::TokenBucketLayer::share) of it.
    #[default]
    Local,
    /// The request is let through, and no limit holds.
    Allow,
    /// The request is refused: 503 with `Retry-After`.
    Deny,
}

/// After this long a client that was refused because the store failed may ask again, unless the store says otherwise.
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The store is said to be well again after this long without a failure: it may fail for some keys only.
const QUIET: Duration = Duration::from_secs(1);

/// The policy with what it keeps between requests: one for a layer and all its clones.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// The buckets of [`OnStoreFailure::Local`].
    local: MemoryStore,
    /// Whether the operator has been told that checks fail, and not yet that they no longer do.
    failing: AtomicBool,
    outage: Mutex<Option<Outage>>,
}

/// Since the operator was told that checks fail.
#[derive(Debug)]
struct Outage {
    failures: u64,
    last: Instant,
}

impl Failures {
    /// A check failed.
    pub(crate) fn failed(&self, policy: OnStoreFailure, why: &dyn fmt::Display) {
        let now = Instant::now();
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *outage {
            Some(outage) => {
                outage.failures += 1;
                outage.last = now;
            }
            None => {
                *outage = Some(Outage { failures: 1, last: now });
                self.failing.store(true, Ordering::Relaxed);
                log::warning!(
                    "a check of the store failed ({why}): requests whose check fails are decided by {policy:?}"
                );
            }
        }
    }

    /// A check was answered.
    #[inline]
    pub(crate) fn answered(&self) {
        // Read first: the line stays shared between the cores that serve requests.
        if self.failing.load(Ordering::Relaxed) {
            self.answered_again();
        }
    }

    #[cold]
    fn answered_again(&self) {
        let mut outage = self.outage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Outage { failures, last }) = &*outage
            && last.elapsed() >= QUIET
        {
            log::warning!("checks of the store succeed again, {failures} have failed");
            *outage = None;
            self.failing.store(false, Ordering::Relaxed);
        }
    }

    /// What to do with a request whose check failed: `policy` applies to the limits that have none of their own.
    pub(crate) fn decide(
        &self,
        policy: OnStoreFailure,
        share: u32,
        charges: &[Charge],
        retry_after: Option<Duration>,
    ) -> Verdict {
        let is = |charge: &Charge, which| charge.on_store_failure().unwrap_or(policy) == which;
        if charges.iter().any(|charge| !charge.is_shadow() && is(charge, OnStoreFailure::Deny)) {
            let reason = Reason::StoreFailed { retry_after: retry_after.unwrap_or(RETRY_AFTER) };
            return Verdict::refused(reason, Decision::bare(false, Source::Policy));
        }
        let local: Charges = charges.iter().filter(|charge| is(charge, OnStoreFailure::Local)).cloned().collect();
        if local.is_empty() {
            return Verdict::of(Decision::bare(true, Source::Policy));
        }
        let shares: Charges = local.iter().map(|charge| charge.clone().share(share)).collect();
        Verdict::of(self.local.acquire_now(&shares).with_source(Source::Local).with_costs_of(&local))
    }

    /// Makes a charge that does not refuse in this instance's own bucket.
    pub(crate) fn charge(&self, charge: &Charge) {
        self.local.acquire_now(std::slice::from_ref(charge));
    }
}
