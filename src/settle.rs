//! After the response: the real cost in the place of the one that was charged.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::Extensions;
use smallvec::SmallVec;
use tokio::runtime::Handle;

use crate::charge::{Amount, Charge};
use crate::checks::Checks;
use crate::decision::{Decision, Outcome, Source};
use crate::limit::{Limit, Limits};
use crate::log;
use crate::reload::LimitsHandle;
use crate::settings::Settings;
use crate::store::Store;

/// Settles what a request costs once that is known: charges more, or gives back.
///
/// It is in the extensions of every request that reaches the inner service when
/// [`TokenBucketLayer::settle`](crate::TokenBucketLayer::settle) asks for it; clones are for the same request. The
/// layer's cost is then an estimate that is reserved before the request runs. A request that never settles has simply
/// spent it: after a panic nothing is owed and nothing comes back. Where a request passes several layers, one value
/// settles the limits of all of them; of two with the same name, the inner one's.
///
/// # Example
///
/// ```
/// use axum::{Extension, Router, routing::post};
/// use tower_token_bucket::{CostTable, Limit, MemoryStore, Quota, Settle, TokenBucketLayer};
///
/// async fn complete(Extension(settle): Extension<Settle>) -> String {
///     let (answer, used) = ("…".to_owned(), 120);
///     settle.actual("tokens", used);
///     answer
/// }
///
/// // 2000 are reserved, and all but 120 come back.
/// let limit = Limit::new("tokens", Quota::per_minute(100_000)).cost(CostTable::new(2000));
/// let layer = TokenBucketLayer::new(MemoryStore::new(), limit).settle();
/// let app: Router = Router::new().route("/complete", post(complete)).layer(layer);
/// ```
#[derive(Clone)]
pub struct Settle {
    inner: Arc<dyn Settling>,
}

trait Settling: Send + Sync {
    /// Whether the limit is known: its difference is on its way, or there is none.
    fn actual(&self, limit: &str, cost: u64) -> bool;

    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

/// What a request was charged, and where.
struct Charged<St> {
    checks: Checks<St>,
    /// That of the request, since a handler may settle in a thread of its own.
    runtime: Option<Handle>,
    limits: LimitsHandle,
    source: Source,
    reserved: SmallVec<[Reserved; 2]>,
    /// That of a layer further out, which the request has passed.
    outer: Option<Settle>,
}

struct Reserved {
    charge: Charge,
    /// The quota is the limit's own, and no plan's.
    is_own: bool,
    cost: Mutex<Cost>,
}

#[derive(Debug)]
struct Cost {
    tokens: u64,
    settled: bool,
}

impl Settle {
    /// Sets the cost that `limit` charges this request, in tokens, and returns at once: the difference is charged or
    /// given back in a task of its own, within the layer's deadline.
    ///
    /// A higher cost is taken whether the tokens are there or not; the debt, of at most one capacity, refills first. A
    /// refund ends at the capacity. After the first call the cost only rises: a lower one changes nothing, since a debt
    /// may have been cut off at its bound.
    ///
    /// A limit that charged nothing has nothing to be settled: one that cost 0, one in shadow that would have refused,
    /// and all of them where the store failed and [`OnStoreFailure::Allow`](crate::OnStoreFailure::Allow) let the request
    /// pass. A name that is none of the layer's limits is an error in the log, once.
    ///
    /// It is charged under the quota that the limit has by then, or the request's plan.
    ///
    /// A refund comes on top of what the bucket has refilled since: where it has been full in between, up to one
    /// reservation more passes than if nothing had been reserved. So settle soon.
    ///
    /// When the store fails, a refund may be lost. Under [`OnStoreFailure::Local`](crate::OnStoreFailure::Local) a charge is
    /// made in this instance's own bucket instead; a request that was admitted from there is settled there.
    pub fn actual(&self, limit: &str, cost: u64) {
        static TOLD: AtomicBool = AtomicBool::new(false);
        if !self.inner.actual(limit, cost) && !TOLD.swap(true, Ordering::Relaxed) {
            log::error!("a handler settles limit {limit:?}, which is none of its layer's: {self:?}");
        }
    }

    /// Puts one into the extensions of a request that goes on. `charges` are those that were asked for, `decision` says
    /// what became of them.
    pub(crate) fn insert<St: Store>(
        extensions: &mut Extensions,
        settings: &Settings<St>,
        charges: &[Charge],
        decision: &Decision,
    ) {
        // A policy for failures may leave some out.
        let is_charged = |charge: &&Charge| {
            let of = |outcome: &&Outcome| outcome.limit() == charge.limit().as_str();
            decision.outcomes().iter().find(of).is_some_and(Outcome::is_allowed)
        };
        let limits = settings.limits.now();
        let inner = Charged {
            checks: settings.checks.clone(),
            runtime: Handle::try_current().ok(),
            limits: settings.limits.clone(),
            source: decision.source(),
            reserved: charges.iter().filter(is_charged).map(|charge| Reserved::new(charge, &limits)).collect(),
            outer: extensions.remove(),
        };
        extensions.insert(Self { inner: Arc::new(inner) });
    }
}

impl fmt::Debug for Settle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl Reserved {
    fn new(charge: &Charge, limits: &Limits) -> Self {
        let limit = limits.get(charge.limit().as_str());
        Self {
            cost: Mutex::new(Cost { tokens: charge.cost(), settled: false }),
            is_own: limit.is_some_and(|limit| limit.quota() == charge.quota()),
            charge: charge.clone(),
        }
    }

    /// What turns the cost so far into `cost`: nothing where it is the same, or lower for a second time.
    ///
    /// `limit` is the same limit as it is by now: a capacity that has been raised meanwhile is not clamped by the old one.
    fn difference(&self, cost: u64, shared_by: u32, limit: Option<&Limit>) -> Option<Charge> {
        // Nothing under this lock can leave it half done.
        let mut now = self.cost.lock().unwrap_or_else(PoisonError::into_inner);
        if now.settled && cost <= now.tokens {
            return None;
        }
        let before = std::mem::replace(&mut *now, Cost { tokens: cost, settled: true }).tokens;
        let of_share = |cost| self.charge.with(Amount::Take(cost)).share(shared_by);
        let (before, after) = (of_share(before).cost(), of_share(cost).cost());
        let amount = match after.checked_sub(before) {
            Some(0) => return None,
            Some(more) => Amount::Spend(more),
            None => Amount::Give(before - after),
        };
        let quota = limit.filter(|_| self.is_own).map_or(self.charge.quota(), Limit::quota);
        Some(self.charge.with(amount).with_quota(quota).share(shared_by))
    }
}

impl<St: Store> Settling for Charged<St> {
    fn actual(&self, limit: &str, cost: u64) -> bool {
        let Some(reserved) = self.reserved.iter().find(|reserved| reserved.charge.limit().as_str() == limit) else {
            let is_known = self.limits.now().get(limit).is_some();
            return self.outer.as_ref().is_some_and(|outer| outer.inner.actual(limit, cost)) || is_known;
        };
        let is_local = self.source == Source::Local;
        let shared_by = if is_local { self.checks.share } else { 1 };
        if let Some(charge) = reserved.difference(cost, shared_by, self.limits.now().get(limit)) {
            if is_local {
                self.checks.failures.charge(&charge);
            } else {
                self.checks.settle(charge, self.runtime.as_ref());
            }
        }
        true
    }

    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = f.debug_list();
        list.entries(self.limits.now().iter().map(Limit::name));
        if let Some(outer) = &self.outer {
            list.entry(outer);
        }
        list.finish()
    }
}
