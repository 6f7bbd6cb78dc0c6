//! What a check needs: the store, its deadline, and what holds when it fails.

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

    /// The verdict on a request whose check failed.
    pub(crate) fn fail(&self, charges: &[Charge], why: &dyn fmt::Display) -> Verdict {
        self.failures.failed(self.on_store_failure, why);
        self.failures.decide(self.on_store_failure, self.share, charges)
    }

    /// Why a check failed that took too long.
    pub(crate) fn late(&self) -> impl fmt::Display + use<St> {
        Late(self.deadline)
    }

    /// What becomes of a settlement that the store does not answer: a charge is made here, a refund is lost, since the
    /// local bucket never gave what would come back to it.
    fn unsettled(&self, charge: Charge, why: &dyn fmt::Display) {
        self.failures.failed(self.on_store_failure, why);
        if self.on_store_failure == OnStoreFailure::Local && matches!(charge.amount(), Amount::Spend(_)) {
            self.failures.charge(&charge.share(self.share));
        }
    }
}

impl<St: Store> Checks<St> {
    /// Asks the store.
    pub(crate) fn acquire(&self, charges: &[Charge]) -> St::Future {
        self.store.acquire_within(charges, self.deadline)
    }

    /// Makes a charge that does not refuse, in a task of its own where the store does not answer at once.
    pub(crate) fn settle(&self, charge: Charge) {
        let mut acquire = Box::pin(self.acquire(std::slice::from_ref(&charge)));
        match acquire.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => self.settled(charge, &result),
            Poll::Pending => match Handle::try_current() {
                Ok(runtime) => {
                    let checks = self.clone();
                    runtime.spawn(async move {
                        match timeout(checks.deadline, acquire).await {
                            Ok(result) => checks.settled(charge, &result),
                            Err(_) => checks.unsettled(charge, &checks.late()),
                        }
                    });
                }
                Err(error) => self.unsettled(charge, &error),
            },
        }
    }

    fn settled(&self, charge: Charge, result: &Result<Decision, St::Error>) {
        match result {
            Ok(_) => self.failures.answered(),
            Err(error) => self.unsettled(charge, error),
        }
    }
}

struct Late(Duration);

impl fmt::Display for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no answer within {:?}", self.0)
    }
}
