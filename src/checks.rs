//! What a check needs: the store, its deadline, and what holds when it fails.

use std::error::Error;
use std::fmt;
use std::future::Future as _;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;

use crate::charge::{Amount, Charge};
use crate::decision::Decision;
use crate::failure::{Failures, OnStoreFailure};
use crate::rejection::Verdict;
use crate::store::Store;

/// How long a check may take, unless [`deadline`](crate::TokenBucketLayer::deadline) says otherwise.
const DEADLINE_DEFAULT: Duration = Duration::from_millis(50);

/// A store, and what holds when it fails.
#[derive(Clone)]
pub(crate) struct Checks<St> {
    store: St,
    pub(crate) deadline: Duration,
    pub(crate) on_store_failure: OnStoreFailure,
    pub(crate) share: u32,
    pub(crate) failures: Arc<Failures>,
}

impl<St> Checks<St> {
    pub(crate) fn new(store: St) -> Self {
        Self {
            store,
            deadline: DEADLINE_DEFAULT,
            on_store_failure: OnStoreFailure::default(),
            share: 1,
            failures: Arc::default(),
        }
    }

    pub(crate) fn store(&self) -> &St {
        &self.store
    }

    /// The verdict on a request whose check was not answered in time.
    pub(crate) fn late(&self, charges: &[Charge]) -> Verdict {
        let retry_after = self.too_late();
        self.failures.decide(self.on_store_failure, self.share, charges, retry_after)
    }

    /// A check was not answered in time.
    pub(crate) fn too_late(&self) -> Option<Duration> {
        self.failures.failed(self.on_store_failure, &Late(self.deadline));
        None
    }

    /// A check failed: when the store is asked again, if that is known.
    pub(crate) fn failed(&self, error: &(dyn Error + 'static)) -> Option<Duration> {
        self.failures.failed(self.on_store_failure, &error);
        retry_after(error)
    }

    /// What becomes of a settlement that the store does not answer: a charge is made here, a refund is lost, since the
    /// local bucket never gave what would come back to it.
    fn unsettled(&self, charge: Charge, why: &dyn fmt::Display) {
        self.failures.failed(self.on_store_failure, why);
        let policy = charge.on_store_failure().unwrap_or(self.on_store_failure);
        if policy == OnStoreFailure::Local && matches!(charge.amount(), Amount::Spend(_)) {
            self.failures.charge(&charge.share(self.share));
        }
    }
}

impl<St: Store> Checks<St> {
    /// Asks a store that has its answer at once.
    pub(crate) fn acquire_at_once(&self, charges: &[Charge]) -> Option<Decision> {
        self.store.acquire_at_once(charges)
    }

    /// Asks the store.
    pub(crate) fn acquire(&self, charges: &[Charge]) -> St::Future {
        self.store.acquire_within(charges, self.deadline)
    }

    /// The verdict on a request whose check failed.
    pub(crate) fn fail(&self, charges: &[Charge], error: &St::Error) -> Verdict {
        let retry_after = self.failed(error);
        self.failures.decide(self.on_store_failure, self.share, charges, retry_after)
    }

    /// Makes a charge that does not refuse, in a task of its own where the store does not answer at once.
    pub(crate) fn settle(&self, charge: Charge, runtime: Option<&Handle>) {
        let _entered = runtime.map(Handle::enter);
        let mut acquire = Box::pin(self.acquire(std::slice::from_ref(&charge)));
        match acquire.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => self.settled(charge, &result),
            Poll::Pending => {
                let Some(runtime) = runtime else {
                    return self.unsettled(charge, &"this store needs a tokio runtime");
                };
                let checks = self.clone();
                runtime.spawn(async move {
                    match timeout(checks.deadline, acquire).await {
                        Ok(result) => checks.settled(charge, &result),
                        Err(_) => checks.unsettled(charge, &Late(checks.deadline)),
                    }
                });
            }
        }
    }

    fn settled(&self, charge: Charge, result: &Result<Decision, St::Error>) {
        match result {
            Ok(_) => self.failures.answered(),
            Err(error) => self.unsettled(charge, error),
        }
    }
}

/// When the store is asked again, where its error says so, or one that it passes on.
#[cfg(feature = "redis")]
fn retry_after(error: &(dyn Error + 'static)) -> Option<Duration> {
    match error.downcast_ref::<crate::RedisError>() {
        Some(error) => error.retry_after(),
        None => retry_after(error.source()?),
    }
}

#[cfg(not(feature = "redis"))]
fn retry_after(_: &(dyn Error + 'static)) -> Option<Duration> {
    None
}

struct Late(Duration);

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no answer within {:?}", self.0)
    }
}
