//! What is set on a layer, as its services and their futures share it.

use std::sync::Arc;

use crate::checks::Checks;
use crate::decision::Decision;
use crate::headers::HeaderStyle;
use crate::reload::LimitsHandle;

pub(crate) type OnDecision = dyn Fn(&Decision) + Send + Sync;

/// All that is set, but for the responses, whose type can change.
#[derive(Clone)]
pub(crate) struct Settings<St> {
    pub(crate) limits: LimitsHandle,
    pub(crate) checks: Checks<St>,
    pub(crate) headers: HeaderStyle,
    pub(crate) on_decision: Option<Arc<OnDecision>>,
    /// Requests carry a [`Settle`](crate::Settle).
    pub(crate) settle: bool,
}

/// What a service and its futures share.
pub(crate) struct Shared<St, R> {
    pub(crate) settings: Settings<St>,
    pub(crate) rejection: R,
}
