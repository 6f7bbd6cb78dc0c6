//! What is set on a layer, as its services and their futures share it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::charge::Charge;
use crate::decision::Decision;
use crate::failure::{Failures, OnStoreFailure};
use crate::headers::HeaderStyle;
use crate::limit::Limits;
use crate::rejection::Verdict;

pub(crate) type OnDecision = dyn Fn(&Decision) + Send + Sync;

/// All that is set, but for the responses, whose type can change.
#[derive(Clone)]
pub(crate) struct Settings<St> {
    pub(crate) store: St,
    pub(crate) limits: Arc<Limits>,
    pub(crate) headers: HeaderStyle,
    pub(crate) deadline: Duration,
    pub(crate) on_store_failure: OnStoreFailure,
    pub(crate) share: u32,
    pub(crate) on_decision: Option<Arc<OnDecision>>,
    pub(crate) failures: Arc<Failures>,
}

impl<St> Settings<St> {
    /// The verdict on a request whose check failed.
    pub(crate) fn fail(&self, charges: &[Charge], why: &dyn fmt::Display) -> Verdict {
        self.failures.decide(self.on_store_failure, self.share, charges, why)
    }
}

/// What a service and its futures share.
pub(crate) struct Shared<St, R> {
    pub(crate) settings: Settings<St>,
    pub(crate) rejection: R,
}
