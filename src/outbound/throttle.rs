//! A client service that sends nothing without tokens.

use std::fmt;
use std::future::{Future, ready};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Context, Poll};
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::runtime::Handle;
use tower_layer::Layer;
use tower_service::Service;

use super::error::{AcquireError, ThrottleError};
use super::limiter::Limiter;
use super::peer::{ReadRemaining, Said, said};
use crate::cost::{Cost, CostTable};
#[cfg(feature = "ratelimit-fields")]
use crate::error::{ConfigError, or_panic};
use crate::key::{BucketKey, KeyExtractor, NoKey};
use crate::store::Store;

/// Keys buckets by the host that a request goes to, with its port unless that is the usual one: by the URL, or the `Host`
/// field.
///
/// # Example
///
/// ```
/// use tower_token_bucket::KeyExtractor;
/// use tower_token_bucket::outbound::Host;
///
/// let (parts, ()) = http::Request::get("https://Hooks.example/a?secret=1").body(())?.into_parts();
/// let (other, ()) = http::Request::get("/b").header("host", "hooks.example").body(())?.into_parts();
/// assert_eq!(Host.extract(&parts), Host.extract(&other));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl KeyExtractor for Host {
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        let field = || parts.headers.get(http::header::HOST)?.to_str().ok();
        let authority =
            parts.uri.authority().map(http::uri::Authority::as_str).or_else(field).ok_or(NoKey::Identity)?;
        // Without a user, and without a port that goes without saying.
        let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        let default = if parts.uri.scheme_str() == Some("http") { ":80" } else { ":443" };
        let host = host.strip_suffix(default).unwrap_or(host).trim_end_matches('.');
        Ok(BucketKey::id(host.to_ascii_lowercase()))
    }
}

/// Puts a [`Limiter`] in front of a client service: each request waits for the tokens of its key before it is sent.
///
/// The key is the [`Host`] by default; an endpoint's id that your own code puts into the request's extensions is
/// [`Identity::of`](crate::Identity::of). A request that gets no tokens in time is [`ThrottleError::Acquire`], distinct
/// from the errors of the inner service: put it back into its queue and count no attempt.
///
/// With an [adaptive](Limiter::adaptive) limiter, and only with one, a 429 of the peer, or a 503 with a `Retry-After`, is
/// reported to all senders before the response is handed on, or if it is dropped.
///
/// Where a request is retried, put this layer inside the retries, so that each attempt waits for its own tokens. A timeout
/// belongs inside this layer as well, so that waiting is not counted.
///
/// The service is always ready. It makes the inner one ready when the tokens are there; what limits concurrency belongs
/// outside this layer, or requests that have their tokens gather behind it.
///
/// # Example
///
/// ```
/// use tower::{ServiceBuilder, service_fn};
/// use tower_token_bucket::outbound::{Limiter, ThrottleLayer};
/// use tower_token_bucket::{BucketKey, Identity, MemoryStore, Quota};
///
/// #[derive(Clone)]
/// struct Endpoint(u64);
///
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_second(50).with_capacity(25));
/// let throttle = ThrottleLayer::new(limiter)
///     .key_by(Identity::of(|endpoint: &Endpoint| BucketKey::id(endpoint.0.to_le_bytes())));
/// let client = ServiceBuilder::new()
///     .layer(throttle)
///     .service(service_fn(|request: http::Request<()>| async { Ok::<_, std::io::Error>(http::Response::new(())) }));
/// # let _ = client;
/// ```
#[must_use]
pub struct ThrottleLayer<St> {
    shared: Arc<Shared<St>>,
}

struct Shared<St> {
    limiter: Limiter<St>,
    key: Arc<dyn KeyExtractor>,
    cost: Arc<dyn Cost>,
    /// What a peer says beside `Retry-After`, where it is asked for.
    remaining: Option<ReadRemaining>,
}

impl<St: Store> ThrottleLayer<St> {
    /// Creates a layer that charges each request 1 token of its host.
    pub fn new(limiter: Limiter<St>) -> Self {
        let (key, cost) = (Arc::new(Host), Arc::new(CostTable::new(1)));
        Self { shared: Arc::new(Shared { limiter, key, cost, remaining: None }) }
    }

    fn set(self, set: impl FnOnce(&mut Shared<St>)) -> Self {
        let Shared { limiter, key, cost, remaining } = &*self.shared;
        let (limiter, key, cost) = (limiter.clone(), Arc::clone(key), Arc::clone(cost));
        let mut shared = Shared { limiter, key, cost, remaining: *remaining };
        set(&mut shared);
        Self { shared: Arc::new(shared) }
    }

    /// Sets whose bucket a request is charged to.
    pub fn key_by(self, key: impl KeyExtractor) -> Self {
        self.set(|shared| shared.key = Arc::new(key))
    }

    /// Sets how many tokens a request takes.
    pub fn cost(self, cost: impl Cost) -> Self {
        self.set(|shared| shared.cost = Arc::new(cost))
    }

    /// Reads what the peer says of its limits beside `Retry-After`: the `RateLimit` fields of the drafts 6 to 11, or
    /// `X-RateLimit-Remaining` and `-Reset` (feature `ratelimit-fields`). Needs an [adaptive](Limiter::adaptive) limiter.
    ///
    /// A 429 without a `Retry-After` is left alone until the limit with the least left has more. Any other response that says
    /// that nothing is left for more than a second [pauses](Limiter::pause) all senders to that key until there is. Of
    /// several limits the one with the least counts. Fields that are malformed are ignored.
    ///
    /// Only for a peer whose limit is that of the key, and not one that it has for each path.
    ///
    /// # Example
    ///
    /// ```
    /// use tower_token_bucket::outbound::{AdaptiveRate, Limiter, ThrottleLayer};
    /// use tower_token_bucket::{MemoryStore, Quota};
    ///
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new(MemoryStore::new(), "webhooks", quota).adaptive(AdaptiveRate::of(quota));
    /// let throttle = ThrottleLayer::new(limiter).read_ratelimit_fields();
    /// # let _ = throttle;
    /// ```
    ///
    /// # Panics
    ///
    /// When the limiter does not adapt; [`try_read_ratelimit_fields`](Self::try_read_ratelimit_fields) returns the error.
    #[cfg(feature = "ratelimit-fields")]
    #[track_caller]
    pub fn read_ratelimit_fields(self) -> Self {
        or_panic(self.try_read_ratelimit_fields())
    }

    /// Reads what the peer says of its limits, like [`read_ratelimit_fields`](Self::read_ratelimit_fields).
    ///
    /// # Errors
    ///
    /// [`ConfigError::AdaptiveRate`] when the limiter does not adapt.
    #[cfg(feature = "ratelimit-fields")]
    pub fn try_read_ratelimit_fields(self) -> Result<Self, ConfigError> {
        if !self.shared.limiter.is_adaptive() {
            let reason =
                "a limiter that does not adapt has no use for a peer's fields: call `adaptive` first".to_owned();
            return Err(ConfigError::AdaptiveRate { reason });
        }
        Ok(self.set(|shared| shared.remaining = Some(super::fields::remaining)))
    }
}

impl<St> Clone for ThrottleLayer<St> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<St> fmt::Debug for ThrottleLayer<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThrottleLayer").field("limiter", &self.shared.limiter).finish_non_exhaustive()
    }
}

impl<S, St> Layer<S> for ThrottleLayer<St> {
    type Service = Throttle<S, St>;

    fn layer(&self, inner: S) -> Self::Service {
        Throttle { inner, shared: Arc::clone(&self.shared) }
    }
}

/// The client service that [`ThrottleLayer`] makes.
/// Any HTTP client service can be inside. It is always ready, cloning it is as cheap as cloning the client, and all clones
/// share the limiter.
///
/// # Example
///
/// ```
/// use http::{Request, Response};
/// use tower::{Layer, ServiceExt, service_fn};
/// use tower_token_bucket::outbound::{Limiter, ThrottleError, ThrottleLayer};
/// use tower_token_bucket::{MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() {
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_minute(1));
/// let client = service_fn(|_| async { Ok::<_, std::io::Error>(Response::new(())) });
/// let throttle = ThrottleLayer::new(limiter).layer(client);
///
/// let to = |host: &str| Request::post(format!("https://{host}/hook")).body(()).unwrap();
/// assert!(throttle.clone().oneshot(to("a.example")).await.is_ok());
/// let again = throttle.clone().oneshot(to("a.example")).await;
/// assert!(matches!(again, Err(ThrottleError::Acquire(_))), "the next token is 60 s away");
/// assert!(throttle.oneshot(to("b.example")).await.is_ok(), "another host has a bucket of its own");
/// # }
/// ```
pub struct Throttle<S, St> {
    inner: S,
    shared: Arc<Shared<St>>,
}

impl<S: Clone, St> Clone for Throttle<S, St> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: Arc::clone(&self.shared) }
    }
}

impl<S: fmt::Debug, St> fmt::Debug for Throttle<S, St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl<S, St, B, ResBody> Service<Request<B>> for Throttle<S, St>
where
    S: Service<Request<B>, Response = Response<ResBody>> + Clone,
    St: Store,
{
    type Response = S::Response;
    type Error = ThrottleError<S::Error>;
    type Future = ResponseFuture<S, St, B>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, body) = request.into_parts();
        let cost = self.shared.cost.cost(&parts);
        // What costs nothing needs no key.
        let key = if cost == 0 { Ok(BucketKey::global()) } else { self.shared.key.extract(&parts) };
        let limiter = self.shared.limiter.clone();
        let asked = key.clone();
        let acquire: Acquire = Box::pin({
            let limiter = limiter.clone();
            async move { limiter.acquire(asked.map_err(AcquireError::NoKey)?, cost).await }
        });
        let request = Some(Request::from_parts(parts, body));
        // What costs nothing has no rate.
        let key = key.ok().filter(|_| cost > 0);
        let (remaining, call) = (self.shared.remaining, Some((self.inner.clone(), request)));
        ResponseFuture { limiter, key, remaining, state: State::Acquiring { acquire, call } }
    }
}

type Acquire = Pin<Box<dyn Future<Output = Result<Duration, AcquireError>> + Send>>;
type Report = Pin<Box<dyn Future<Output = Result<(), AcquireError>> + Send>>;

pin_project! {
    /// The response to come of a [`Throttle`].
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, St, B>
    where
        S: Service<Request<B>>,
    {
        limiter: Limiter<St>,
        key: Option<BucketKey>,
        remaining: Option<ReadRemaining>,
        #[pin]
        state: State<S, S::Future, S::Response, B>,
    }

    impl<S, St, B> PinnedDrop for ResponseFuture<S, St, B>
    where
        S: Service<Request<B>>,
    {
        /// What a peer has said is for all senders, whether this one still waits for the response or not.
        fn drop(this: Pin<&mut Self>) {
            if let StateProject::Reporting { report, .. } = this.project().state.project()
                && let Ok(runtime) = Handle::try_current()
            {
                runtime.spawn(mem::replace(report, Box::pin(ready(Ok(())))));
            }
        }
    }
}

pin_project! {
    /// Named by what is polled.
    #[project = StateProject]
    enum State<S, F, R, B> {
        Acquiring { acquire: Acquire, call: Option<(S, Option<Request<B>>)> },
        // The tokens are there, and the inner service may not be.
        Readying { inner: S, request: Option<Request<B>> },
        Calling { #[pin] response: F },
        // The senders have to hear what the peer says before anything else is sent.
        Reporting { report: Report, response: Option<R> },
        Done,
    }
}

impl<S, St, B, ResBody> Future for ResponseFuture<S, St, B>
where
    S: Service<Request<B>, Response = Response<ResBody>>,
    St: Store,
{
    type Output = Result<S::Response, ThrottleError<S::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let result = match this.state.as_mut().project() {
                // Acquiring => Readying | Done
                StateProject::Acquiring { acquire, call } => {
                    match (task::ready!(acquire.as_mut().poll(cx)), call.take()) {
                        (Ok(_), Some((inner, request))) => {
                            this.state.set(State::Readying { inner, request });
                            continue;
                        }
                        (Err(error), _) => Err(ThrottleError::Acquire(error)),
                        (Ok(_), None) => panic!("polled after completion"),
                    }
                }
                // Readying => Calling | Done
                StateProject::Readying { inner, request } => match task::ready!(inner.poll_ready(cx)) {
                    Ok(()) => {
                        let request = mem::take(request).expect("polled after completion");
                        let response = inner.call(request);
                        this.state.set(State::Calling { response });
                        continue;
                    }
                    Err(error) => Err(ThrottleError::Inner(error)),
                },
                // Calling => Reporting | Done
                StateProject::Calling { response } => {
                    let result = task::ready!(response.poll(cx)).map_err(ThrottleError::Inner);
                    let said = result.as_ref().ok().and_then(|response| said(response, *this.remaining));
                    match (result, said, *this.key) {
                        (Ok(response), Some(said), Some(key)) => {
                            let limiter = this.limiter.clone();
                            let report: Report = Box::pin(async move {
                                match said {
                                    Said::Refused { retry_after } => limiter.refused(key, retry_after).await,
                                    Said::Exhausted { wait } => limiter.pause(key, wait).await,
                                }
                            });
                            this.state.set(State::Reporting { report, response: Some(response) });
                            continue;
                        }
                        (result, ..) => result,
                    }
                }
                // Reporting => Done
                StateProject::Reporting { report, response } => {
                    // Where the store fails nothing more can be done about it; the response is the caller's all the same.
                    let _ = task::ready!(report.as_mut().poll(cx));
                    Ok(response.take().expect("polled after completion"))
                }
                StateProject::Done => panic!("polled after completion"),
            };
            this.state.set(State::Done);
            return Poll::Ready(result);
        }
    }
}

impl<S, St, B> fmt::Debug for ResponseFuture<S, St, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
