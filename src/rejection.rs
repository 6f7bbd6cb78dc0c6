//! The response to a request that does not reach the inner service.

mod problem;

use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER, WWW_AUTHENTICATE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode};
use std::time::Duration;

use crate::decision::Decision;
use crate::headers::{HeaderStyle, number_value, seconds, write_fields};
use crate::key::NoKey;
use crate::text::{Text, Written};
use problem::Detail;

pub use problem::Problem;

/// Why a request did not reach the inner service, and how it asked.
#[derive(Clone, Debug)]
pub struct Rejection {
    reason: Reason,
    decision: Decision,
    head: bool,
    grpc: Option<HeaderValue>,
}

/// Why a request did not reach the inner service.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// The tokens were not there: 429.
    Denied,
    /// The cost is above the capacity, so that no wait helps: 429 without `Retry-After`.
    TooDear,
    /// There is no bucket to charge: 401, or 503 for [`NoKey::Peer`].
    NoKey(NoKey),
    /// The store failed, under [`OnStoreFailure::Deny`](crate::OnStoreFailure::Deny): 503.
    StoreFailed {
        /// When to try again.
        retry_after: Duration,
    },
}

/// Whether to call the inner service, and what was decided.
#[derive(Debug)]
pub(crate) struct Verdict {
    pub(crate) decision: Decision,
    /// Why not to: `None` to go on.
    pub(crate) refused: Option<Reason>,
}

impl Verdict {
    /// What follows from the decision alone.
    pub(crate) fn of(decision: Decision) -> Self {
        let refused = (!decision.is_allowed()).then_some(Reason::Denied);
        Self { decision, refused }
    }

    pub(crate) fn refused(reason: Reason, decision: Decision) -> Self {
        Self { decision, refused: Some(reason) }
    }
}

impl Reason {
    /// What became of a request, in one word.
    pub(crate) fn name(refused: Option<&Self>) -> &'static str {
        match refused {
            None => "allowed",
            Some(Self::Denied | Self::StoreFailed { .. }) => "denied",
            Some(Self::TooDear) => "too_dear",
            Some(Self::NoKey(_)) => "no_key",
        }
    }
}

impl Rejection {
    pub(crate) fn new(reason: Reason, decision: Decision, request: &Parts) -> Self {
        let content_type = request.headers.get(CONTENT_TYPE);
        let is_grpc = |value: &&HeaderValue| {
            value.as_bytes().get(..GRPC.len()).is_some_and(|start| start.eq_ignore_ascii_case(GRPC))
        };
        let grpc = content_type.filter(is_grpc).cloned();
        Self { reason, decision, head: request.method == Method::HEAD, grpc }
    }

    /// Why the request was refused.
    #[must_use]
    pub fn reason(&self) -> &Reason {
        &self.reason
    }

    /// The decision, with what each limit says.
    #[must_use]
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// The names of the limits that refuse, in order of declaration.
    pub fn violated(&self) -> impl Iterator<Item = &str> {
        self.decision.outcomes().iter().filter(|outcome| outcome.refuses()).map(|outcome| outcome.limit())
    }

    /// When to try again: `None` when no wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.reason {
            Reason::StoreFailed { retry_after } => Some(retry_after),
            Reason::Denied => self.decision.retry_after(),
            Reason::TooDear | Reason::NoKey(_) => None,
        }
    }

    /// The status that says so over HTTP.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match &self.reason {
            Reason::Denied | Reason::TooDear => StatusCode::TOO_MANY_REQUESTS,
            Reason::NoKey(NoKey::Peer) | Reason::StoreFailed { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Reason::NoKey(NoKey::Credential(_) | NoKey::Identity) => StatusCode::UNAUTHORIZED,
        }
    }

    /// Whether the request was `HEAD`, whose response has no body.
    #[must_use]
    pub fn is_head(&self) -> bool {
        self.head
    }

    /// Whether the request was gRPC: its content type starts with `application/grpc`.
    #[must_use]
    pub fn is_grpc(&self) -> bool {
        self.grpc.is_some()
    }

    /// The gRPC status: RESOURCE_EXHAUSTED, UNAVAILABLE or UNAUTHENTICATED.
    fn grpc_status(&self) -> HeaderValue {
        HeaderValue::from_static(match &self.reason {
            Reason::Denied | Reason::TooDear => "8",
            Reason::NoKey(NoKey::Peer) | Reason::StoreFailed { .. } => "14",
            Reason::NoKey(NoKey::Credential(_) | NoKey::Identity) => "16",
        })
    }

    /// The response without a body: status, and for gRPC the trailers in the place of headers.
    fn response<B>(&self, body: B) -> Response<B> {
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        if let Some(content_type) = &self.grpc {
            headers.insert(CONTENT_TYPE, content_type.clone());
            headers.insert(GRPC_STATUS, self.grpc_status());
            if let Ok(message) = HeaderValue::from_maybe_shared(Detail::of(self).to_bytes()) {
                headers.insert(GRPC_MESSAGE, message);
            }
            return response;
        }
        *response.status_mut() = self.status();
        response
    }

    /// Adds the fields that the response leaves out.
    fn complete<B>(&self, mut response: Response<B>, style: HeaderStyle) -> Response<B> {
        let unauthorized = response.status() == StatusCode::UNAUTHORIZED;
        let headers = response.headers_mut();
        if unauthorized && matches!(self.reason, Reason::NoKey(_)) {
            insert_missing(headers, WWW_AUTHENTICATE, || self.challenge());
        }
        add_missing(headers, self);
        write_fields(headers, &self.decision, style);
        response
    }

    /// RFC 9110, section 11.6.1: a 401 names a scheme. For a header of its own there is no registered one.
    fn challenge(&self) -> HeaderValue {
        match &self.reason {
            Reason::NoKey(NoKey::Credential(header)) if *header != http::header::AUTHORIZATION => {
                let challenge = format!("ApiKey header=\"{header}\"");
                HeaderValue::from_str(&challenge).unwrap_or(HeaderValue::from_static("ApiKey"))
            }
            _ => HeaderValue::from_static("Bearer"),
        }
    }
}

const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
/// What the content type of a gRPC request starts with.
const GRPC: &[u8] = b"application/grpc";
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// How long a gRPC client is to wait, in milliseconds; negative tells it not to try again (gRFC A6).
const GRPC_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

/// Makes the response to a request that does not reach the inner service.
///
/// Implemented by [`Problem`] (the default), [`Empty`], and closures from `&Rejection` to `Response<B>`. What the
/// response sets is kept; the layer adds `Retry-After`, `Cache-Control: no-store`, the `WWW-Authenticate` of a 401 for want
/// of a key, and the RateLimit fields, where they are missing.
///
/// # Example
///
/// ```
/// use axum::body::Body;
/// use http::Response;
/// use tower_token_bucket::rejection::Rejection;
/// use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};
///
/// let layer = TokenBucketLayer::new(MemoryStore::new(), Limit::new("per-address", Quota::per_second(10)))
///     .rejection(|rejection: &Rejection| {
///         let mut response = Response::new(Body::from("slow down"));
///         *response.status_mut() = rejection.status();
///         response
///     });
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no response with the body `{B}`",
    note = "a response to a refusal is made by `Problem`, `Empty`, or a closure with the type of its argument: \
            `|rejection: &Rejection| -> Response<{B}> {{ … }}`"
)]
pub trait ResponseForRejection<B> {
    /// Makes the response.
    fn response_for_rejection(&self, rejection: &Rejection) -> Response<B>;

    // Not for implementers: `Problem` alone knows beforehand which fields the layer will add.
    #[doc(hidden)]
    fn complete_response(&self, rejection: &Rejection, style: HeaderStyle) -> Response<B> {
        rejection.complete(self.response_for_rejection(rejection), style)
    }
}

impl<F, B> ResponseForRejection<B> for F
where
    F: Fn(&Rejection) -> Response<B>,
{
    fn response_for_rejection(&self, rejection: &Rejection) -> Response<B> {
        self(rejection)
    }
}

/// A response without a body, for bodies that are only `Default`, as tonic's is.
/// # Example
///
/// ```
/// use tower_token_bucket::rejection::Empty;
/// use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};
///
/// let limit = Limit::new("per-address", Quota::per_second(10));
/// let layer = TokenBucketLayer::new(MemoryStore::new(), limit).rejection(Empty);
/// // For tonic's `Server::builder().layer(layer)`.
/// # fn tonic<S>(layer: &impl tower::Layer<S, Service: tower::Service<http::Request<tonic::body::Body>>>) {}
/// # type Inner = tower::util::BoxCloneService<
/// #     http::Request<tonic::body::Body>, http::Response<tonic::body::Body>, std::convert::Infallible>;
/// # tonic::<Inner>(&layer);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Empty;

impl<B: Default> ResponseForRejection<B> for Empty {
    fn response_for_rejection(&self, rejection: &Rejection) -> Response<B> {
        rejection.response(B::default())
    }
}

/// The whole response: what `how` makes of the rejection, with the fields that it left out.
pub(crate) fn respond<B>(how: &impl ResponseForRejection<B>, rejection: Rejection, style: HeaderStyle) -> Response<B> {
    let mut response = how.complete_response(&rejection, style);
    response.extensions_mut().insert(rejection.decision);
    response
}

/// Sets a field of a well-known name that is not there. It is looked for first: such a name is found so quickly that an
/// entry costs more than the second look.
fn insert_missing(headers: &mut HeaderMap, name: HeaderName, value: impl FnOnce() -> HeaderValue) {
    if !headers.contains_key(&name) {
        headers.insert(name, value());
    }
}

fn add_missing(headers: &mut HeaderMap, rejection: &Rejection) {
    let wait = rejection.retry_after();
    if rejection.is_grpc() {
        let pushback = match (wait, &rejection.reason) {
            (Some(wait), _) => Some(Text::<24>::new().number(wait.as_micros().div_ceil(1000).max(1))),
            (None, Reason::TooDear) => Some(Text::new().str("-1")),
            (None, _) => None,
        };
        if let Some(value) = pushback.and_then(|text| HeaderValue::from_bytes(text.as_bytes()).ok()) {
            headers.entry(GRPC_PUSHBACK).or_insert(value);
        }
    } else if let Some(wait) = wait {
        insert_missing(headers, RETRY_AFTER, || number_value(seconds(wait)));
    }
    insert_missing(headers, CACHE_CONTROL, || NO_STORE);
}
