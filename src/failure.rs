//! What happens to a request when the store does not answer.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::charge::{Charge, Charges};
use crate::decision::{Decision, Source};
use crate::log;
use crate::rejection::{Reason, Verdict};
use crate::store::memory::MemoryStore;

/// What happens to a request when the store fails: an error, or no answer within the deadline.
///
/// A cost above the capacity is refused under every policy.
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

/// After this long a client that was refused because the store failed may ask again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The policy with what it keeps between requests: one for a layer and all its clones.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// The buckets of [`OnStoreFailure::Local`].
    local: MemoryStore,
    /// The last check failed.
    failing: AtomicBool,
}

impl Failures {
    /// A check failed.
    pub(crate) fn failed(&self, policy: OnStoreFailure, why: &dyn fmt::Display) {
        if !self.failing.swap(true, Ordering::Relaxed) {
            log::warning!("a check of the store failed ({why}): {policy:?} applies to those that do");
        }
    }

    /// What to do with a request whose check failed.
    pub(crate) fn decide(&self, policy: OnStoreFailure, share: u32, charges: &[Charge]) -> Verdict {
        match policy {
            OnStoreFailure::Local => {
                let shares: Charges = charges.iter().map(|charge| charge.clone().share(share)).collect();
                Verdict::of(self.local.acquire_now(&shares).with_source(Source::Local).with_costs_of(charges))
            }
            OnStoreFailure::Allow => Verdict::of(Decision::bare(true, Source::Policy)),
            OnStoreFailure::Deny => {
                let reason = Reason::StoreFailed { retry_after: RETRY_AFTER };
                Verdict::refused(reason, Decision::bare(false, Source::Policy))
            }
        }
    }

    /// Makes a charge that does not refuse in this instance's own bucket.
    pub(crate) fn charge(&self, charge: &Charge) {
        self.local.acquire_now(std::slice::from_ref(charge));
    }

    /// A check was answered.
    pub(crate) fn answered(&self) {
        // Read first: the line stays shared between the cores that serve requests.
        if self.failing.load(Ordering::Relaxed) && self.failing.swap(false, Ordering::Relaxed) {
            log::warning!("checks of the store succeed again");
        }
    }
}
