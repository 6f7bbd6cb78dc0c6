//! From a request to a question for the store.

use std::fmt;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_service::Service;

use crate::decision::{Decision, Source};
use crate::future::ResponseFuture;
use crate::limit::Demand;
use crate::rejection::{Reason, ResponseForRejection, Verdict};
use crate::settings::Shared;
use crate::store::Store;

/// The middleware that [`TokenBucketLayer`](crate::TokenBucketLayer) puts around a service.
///
/// Readiness is that of the inner service, which is held while the store decides and is free again after a denial or a
/// drop. Errors are those of the inner service.
/// # Example
///
/// Around any service from `http::Request` to `http::Response`, without a router:
///
/// ```
/// use bytes::Bytes;
/// use http::{Request, Response};
/// use http_body_util::Full;
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_token_bucket::{Global, Limit, MemoryStore, Quota, TokenBucket, TokenBucketLayer};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limit = Limit::new("everyone", Quota::per_minute(1)).key_by(Global);
/// let inner = service_fn(|_: Request<()>| async { Ok::<_, std::io::Error>(Response::new(Full::<Bytes>::default())) });
/// let service: TokenBucket<_, MemoryStore> = TokenBucketLayer::new(MemoryStore::new(), limit).layer(inner);
/// assert_eq!(service.clone().oneshot(Request::new(())).await?.status(), 200);
/// assert_eq!(service.oneshot(Request::new(())).await?.status(), 429);
/// # Ok(())
/// # }
/// ```
pub struct TokenBucket<S, St, R = crate::rejection::Problem> {
    inner: S,
    shared: Arc<Shared<St, R>>,
}

impl<S, St, R> TokenBucket<S, St, R> {
    pub(crate) fn new(inner: S, shared: Arc<Shared<St, R>>) -> Self {
        Self { inner, shared }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service, mutable.
    pub fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service, without the middleware.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, St, R, ReqBody, ResBody> Service<Request<ReqBody>> for TokenBucket<S, St, R>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    St: Store,
    R: ResponseForRejection<ResBody>,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S, St, R, ReqBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        // The service that is ready moves into the future; a clone of it, which is not, stays for the next call.
        let clone = self.inner.clone();
        let inner = mem::replace(&mut self.inner, clone);

        let shared = Arc::clone(&self.shared);
        let (parts, body) = request.into_parts();
        // One look at the limits: a request is never judged by a mixture.
        let demand = self.shared.settings.limits.now().demand(&parts);
        let verdict = match demand {
            Demand::Charges(charges) => return ResponseFuture::asking(shared, inner, parts, body, charges),
            Demand::Nothing => Verdict::of(Decision::bare(true, Source::Exempt)),
            Demand::TooDear(charges) => {
                let decision = Decision::unasked(&charges);
                // Only shadow limits: they do not refuse.
                if decision.is_allowed() { Verdict::of(decision) } else { Verdict::refused(Reason::TooDear, decision) }
            }
            Demand::NoKey(why) => Verdict::refused(Reason::NoKey(why), Decision::bare(false, Source::Layer)),
        };
        ResponseFuture::decided(shared, inner, parts, body, verdict)
    }
}

impl<S: Clone, St, R> Clone for TokenBucket<S, St, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, St, R> fmt::Debug for TokenBucket<S, St, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenBucket").field("inner", &self.inner).finish_non_exhaustive()
    }
}
