//! The configuration of the middleware.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tower_layer::Layer;

use crate::checks::Checks;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::failure::OnStoreFailure;
use crate::headers::HeaderStyle;
use crate::limit::{Limit, Limits};
use crate::rejection::Problem;
use crate::reload::LimitsHandle;
use crate::service::TokenBucket;
use crate::settings::{Settings, Shared};
use crate::store::Store;

/// Puts token buckets in front of a service: each request takes its cost from the bucket of its key, or is refused
/// before the inner service is called.
///
/// All state is in the store, so clones of the layer, routes that it is applied to and clones of the service share the
/// buckets. The inner service has to be `Clone`; put a `tower::buffer::Buffer` around one that is not.
///
/// On an axum router, use `.layer` after the last route: routes that are added later are not limited.
///
/// # Example
///
/// ```
/// use axum::{Router, routing::get};
/// use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};
///
/// let burst = Limit::new("burst", Quota::per_second(10).with_capacity(50));
/// let day = Limit::new("day", Quota::per_day(10_000));
/// let layer = TokenBucketLayer::new(MemoryStore::new(), burst).and(day);
/// let app: Router = Router::new().route("/", get(|| async { "hello" })).layer(layer);
/// ```
#[derive(Clone)]
#[must_use]
pub struct TokenBucketLayer<St, R = Problem> {
    settings: Settings<St>,
    rejection: R,
}

impl<St: Store> TokenBucketLayer<St> {
    /// Creates a layer of one limit; [`and`](Self::and) adds more.
    pub fn new(store: St, limit: Limit) -> Self {
        or_panic(Self::try_new(store, [limit]))
    }

    /// Creates a layer of one or more limits, in that order.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NoLimit`] when there is none, [`ConfigError::DuplicateLimit`] when two have names that are equal
    /// but for their case.
    pub fn try_new(store: St, limits: impl IntoIterator<Item = Limit>) -> Result<Self, ConfigError> {
        let settings = Settings {
            limits: LimitsHandle::new(Limits::try_new(limits)?),
            checks: Checks::new(store),
            headers: HeaderStyle::default(),
            on_decision: None,
            settle: false,
        };
        Ok(Self { settings, rejection: Problem })
    }
}

impl<St: Store, R> TokenBucketLayer<St, R> {
    /// Adds a limit. All limits of a layer are one step: all of them are charged or none, and the longest wait counts.
    ///
    /// # Panics
    ///
    /// When a limit has the same name but for its case; [`try_and`](Self::try_and) returns the error.
    #[track_caller]
    pub fn and(self, limit: Limit) -> Self {
        or_panic(self.try_and(limit))
    }

    /// Adds a limit, like [`and`](Self::and).
    ///
    /// # Errors
    ///
    /// [`ConfigError::DuplicateLimit`] when a limit has the same name but for its case.
    pub fn try_and(mut self, limit: Limit) -> Result<Self, ConfigError> {
        let limits = self.settings.limits.now().replaced(self.settings.limits.limits().into_iter().chain([limit]))?;
        // Its own, since clones of the layer keep theirs.
        self.settings.limits = LimitsHandle::new(limits);
        Ok(self)
    }

    /// What replaces the limits of this layer, of its clones and of all their services while they run.
    ///
    /// Call it last: [`and`](Self::and) makes a layer whose limits are its own, which earlier handles do not reach.
    #[must_use]
    pub fn handle(&self) -> LimitsHandle {
        self.settings.limits.clone()
    }

    /// Puts a [`Settle`](crate::Settle) into the extensions of every request that reaches the inner service: with it a
    /// handler charges more, or gives back, once the real cost is known.
    pub fn settle(mut self) -> Self {
        self.settings.settle = true;
        self
    }

    /// Sets which fields tell a client how much is left; by default [`HeaderStyle::Draft11`].
    pub fn headers(mut self, style: HeaderStyle) -> Self {
        self.settings.headers = style;
        self
    }

    /// Sets a hook that sees every decision, in the task of its request. It must not block.
    pub fn on_decision(mut self, hook: impl Fn(&Decision) + Send + Sync + 'static) -> Self {
        self.settings.on_decision = Some(Arc::new(hook));
        self
    }

    /// Sets what happens when the store fails; by default [`OnStoreFailure::Local`].
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.settings.checks.on_store_failure = policy;
        self
    }

    /// Gives the local buckets of [`OnStoreFailure::Local`] one `n`-th of each quota: with n instances they hand out
    /// the whole of it together. A cost above the share and within the capacity takes the whole local bucket. By
    /// default 1, the whole quota on each instance.
    ///
    /// # Panics
    ///
    /// When `n` is 0; [`try_share`](Self::try_share) returns the error.
    #[track_caller]
    pub fn share(self, n: u32) -> Self {
        or_panic(self.try_share(n))
    }

    /// Gives the local buckets one `n`-th of each quota, like [`share`](Self::share).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Share`] when `n` is 0.
    pub fn try_share(mut self, n: u32) -> Result<Self, ConfigError> {
        if n == 0 {
            return Err(ConfigError::Share);
        }
        self.settings.checks.share = n;
        Ok(self)
    }

    /// Sets how long a whole check may take: connecting, waiting, sending and the answer. Then
    /// [`on_store_failure`](Self::on_store_failure) applies. By default 50 ms. A store that answers at once needs no
    /// timer; one that does not needs tokio's.
    ///
    /// # Panics
    ///
    /// When `deadline` is zero; [`try_deadline`](Self::try_deadline) returns the error.
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// Sets how long a whole check may take, like [`deadline`](Self::deadline).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Deadline`] when `deadline` is zero.
    pub fn try_deadline(mut self, deadline: Duration) -> Result<Self, ConfigError> {
        if deadline.is_zero() {
            return Err(ConfigError::Deadline);
        }
        self.settings.checks.deadline = deadline;
        Ok(self)
    }

    /// Sets how a refused request is answered; by default [`Problem`]. See
    /// [`ResponseForRejection`](crate::rejection::ResponseForRejection).
    pub fn rejection<R2>(self, rejection: R2) -> TokenBucketLayer<St, R2> {
        TokenBucketLayer { settings: self.settings, rejection }
    }
}

impl<S, St: Store, R: Clone> Layer<S> for TokenBucketLayer<St, R> {
    type Service = TokenBucket<S, St, R>;

    fn layer(&self, inner: S) -> Self::Service {
        let shared = Shared { settings: self.settings.clone(), rejection: self.rejection.clone() };
        TokenBucket::new(inner, Arc::new(shared))
    }
}

impl<St, R> fmt::Debug for TokenBucketLayer<St, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenBucketLayer")
            .field("limits", &self.settings.limits)
            .field("headers", &self.settings.headers)
            .field("deadline", &self.settings.checks.deadline)
            .field("on_store_failure", &self.settings.checks.on_store_failure)
            .field("share", &self.settings.checks.share)
            .finish_non_exhaustive()
    }
}
