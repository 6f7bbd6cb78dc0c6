//! The default response.

use std::sync::LazyLock;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, Response};

use super::{NO_STORE, Reason, Rejection, ResponseForRejection};
use crate::decision::{Decision, Outcome};
use crate::headers::{HeaderStyle, RATELIMIT, RATELIMIT_POLICY, levels, number_value, policies, seconds, write_fields};
use crate::key::NoKey;
use crate::text::{Sink, Written};

/// The default response: `application/problem+json` (RFC 9457), without a body for `HEAD` and gRPC. For bodies that
/// are `From<Bytes>`, as those of axum and `http-body-util::Full` are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Problem;

impl<B: From<Bytes>> ResponseForRejection<B> for Problem {
    fn response_for_rejection(&self, rejection: &Rejection) -> Response<B> {
        if rejection.is_grpc() {
            return rejection.response(B::from(Bytes::new()));
        }
        let json = Json { rejection, detail: Detail::of(rejection) }.to_bytes();
        let length = number_value(json.len() as u64);
        let mut response = rejection.response(body(rejection, json));
        response.headers_mut().insert(CONTENT_TYPE, PROBLEM_JSON);
        // `HEAD` has the length that `GET` would have.
        response.headers_mut().insert(CONTENT_LENGTH, length);
        response
    }

    fn complete_response(&self, rejection: &Rejection, style: HeaderStyle) -> Response<B> {
        denied(rejection, style).unwrap_or_else(|| rejection.complete(self.response_for_rejection(rejection), style))
    }
}

/// No body for `HEAD`.
fn body<B: From<Bytes>>(rejection: &Rejection, json: Bytes) -> B {
    B::from(if rejection.is_head() { Bytes::new() } else { json })
}

/// The complete response to a request that was denied over HTTP, since it is floods of them that have to be cheap. `None` for
/// all others, and where a field has no value.
fn denied<B: From<Bytes>>(rejection: &Rejection, style: HeaderStyle) -> Option<Response<B>> {
    if !matches!(rejection.reason, Reason::Denied) || rejection.is_grpc() {
        return None;
    }
    let detail = Detail::of(rejection);
    let wait = detail.wait?;
    let json = Json { rejection, detail }.to_bytes();
    let headers = denied_headers(&rejection.decision, style, wait, json.len() as u64)?;
    let mut response = rejection.response(body(rejection, json));
    *response.headers_mut() = headers;
    Some(response)
}

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const BLANK: HeaderValue = HeaderValue::from_static("");

/// The headers of a denial with nothing in those that differ, in the order in which they are added one by one.
static DENIED: LazyLock<HeaderMap> =
    LazyLock::new(|| blank([CONTENT_TYPE, CONTENT_LENGTH, RETRY_AFTER, CACHE_CONTROL]));
static DENIED_DRAFT_11: LazyLock<HeaderMap> =
    LazyLock::new(|| blank([CONTENT_TYPE, CONTENT_LENGTH, RETRY_AFTER, CACHE_CONTROL, RATELIMIT_POLICY, RATELIMIT]));

fn blank<const N: usize>(names: [HeaderName; N]) -> HeaderMap {
    let mut headers: HeaderMap = names.into_iter().map(|name| (name, BLANK)).collect();
    headers.insert(CONTENT_TYPE, PROBLEM_JSON);
    headers.insert(CACHE_CONTROL, NO_STORE);
    headers
}

/// What [`Rejection::complete`] would leave. To hash the names, once to look for one and once to set it, is most of the cost;
/// in a clone none is hashed.
fn denied_headers(decision: &Decision, style: HeaderStyle, wait: u64, length: u64) -> Option<HeaderMap> {
    let mut headers = match style {
        HeaderStyle::Draft11 => DENIED_DRAFT_11.clone(),
        HeaderStyle::Legacy | HeaderStyle::LegacyDelta | HeaderStyle::Off => DENIED.clone(),
    };
    for (name, value) in &mut headers {
        if *name == CONTENT_LENGTH {
            *value = number_value(length);
        } else if *name == RETRY_AFTER {
            *value = number_value(wait);
        } else if *name == RATELIMIT_POLICY {
            *value = policies(decision)?;
        } else if *name == RATELIMIT {
            *value = levels(decision)?;
        }
    }
    if style != HeaderStyle::Draft11 {
        write_fields(&mut headers, decision, style);
    }
    Some(headers)
}

/// What happened, in words.
pub(super) struct Detail<'a> {
    reason: &'a Reason,
    limit: &'a str,
    cost: u64,
    capacity: u64,
    /// In seconds.
    wait: Option<u64>,
}

impl<'a> Detail<'a> {
    pub(super) fn of(rejection: &'a Rejection) -> Self {
        let bound = rejection.decision.bound();
        let (limit, cost) = bound.map_or(("", 0), |outcome| (outcome.limit(), outcome.cost()));
        let capacity = bound.map_or(0, |outcome| outcome.quota().capacity());
        // Those of the limit that bound are those of the decision.
        let wait = bound.and_then(Outcome::retry_after).map(seconds);
        Detail { reason: &rejection.reason, limit, cost, capacity, wait }
    }
}

impl Written for Detail<'_> {
    #[inline]
    fn write(&self, to: &mut impl Sink) {
        match self.reason {
            Reason::Denied => to
                .push("limit ")
                .push(self.limit)
                .push(" has too few tokens for a cost of ")
                .push_number(self.cost)
                .push("; they are there in ")
                .push_number(self.wait.unwrap_or(1))
                .push(" s"),
            Reason::TooDear => to
                .push("the cost of ")
                .push_number(self.cost)
                .push(" is above the capacity of ")
                .push_number(self.capacity)
                .push(" of limit ")
                .push(self.limit)
                .push("; no wait helps"),
            Reason::NoKey(NoKey::Credential(header)) => {
                to.push("an accepted key in the header ").push(header.as_str()).push(" is required")
            }
            Reason::NoKey(NoKey::Identity) => to.push("the request has no identity to charge"),
            Reason::NoKey(NoKey::Peer) => to.push("the server does not know the address of its peer"),
            Reason::StoreFailed { .. } => to.push("the store of the rate limit does not answer"),
        };
    }
}

/// The body of the default response, RFC 9457. Every text in it is our own or has passed a check, so nothing in it has to
/// be escaped.
struct Json<'a> {
    rejection: &'a Rejection,
    detail: Detail<'a>,
}

impl Written for Json<'_> {
    #[inline]
    fn write(&self, to: &mut impl Sink) {
        to.push(match self.detail.reason {
            Reason::Denied | Reason::TooDear => concat!(
                r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
                r#""title":"Request cannot be satisfied as assigned quota has been exceeded","status":429,"detail":""#
            ),
            Reason::NoKey(NoKey::Peer) => {
                r#"{"type":"about:blank","title":"Service Unavailable","status":503,"detail":""#
            }
            Reason::NoKey(NoKey::Credential(_) | NoKey::Identity) => {
                r#"{"type":"about:blank","title":"Unauthorized","status":401,"detail":""#
            }
            Reason::StoreFailed { .. } => concat!(
                r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","#,
                r#""title":"Request cannot be satisfied due to temporary server capacity constraints","#,
                r#""status":503,"detail":""#
            ),
        });
        self.detail.write(to);
        let mut end = r#""}"#;
        if matches!(self.detail.reason, Reason::Denied | Reason::TooDear) {
            to.push(r#"","violated-policies":["#);
            end = "]}";
            for (i, name) in self.rejection.violated().enumerate() {
                to.push(if i == 0 { r#"""# } else { r#"",""# }).push(name);
                end = r#""]}"#;
            }
        }
        to.push(end);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{Method, Request};

    use super::*;
    use crate::charge::{Amount, Charge, LimitName};
    use crate::decision::{Reply, Source};
    use crate::headers::X_RATELIMIT_RESET;
    use crate::key::BucketKey;
    use crate::quota::Quota;

    const STYLES: [HeaderStyle; 4] =
        [HeaderStyle::Draft11, HeaderStyle::Legacy, HeaderStyle::LegacyDelta, HeaderStyle::Off];

    /// Status, headers in their order, and body.
    fn sent(response: &Response<Bytes>, style: HeaderStyle) -> (u16, Vec<(HeaderName, HeaderValue)>, Bytes) {
        // The wall clock goes on between two responses.
        let fixed = |name: &&HeaderName| style != HeaderStyle::Legacy || **name != X_RATELIMIT_RESET;
        let value = |name| if fixed(&name) { response.headers()[name].clone() } else { BLANK };
        let headers = response.headers().keys().map(|name| (name.clone(), value(name))).collect();
        assert_eq!(response.headers().len(), response.headers().keys_len());
        (response.status().as_u16(), headers, response.body().clone())
    }

    /// Compares the two ways; how many of the responses had headers that were cloned.
    fn check(reason: &Reason, decision: &Decision) -> usize {
        let mut quick = 0;
        for style in STYLES {
            for (method, content_type) in [
                (Method::GET, "text/plain"),
                (Method::HEAD, "text/plain"),
                (Method::POST, "application/grpc"),
                (Method::POST, "application/grpc+proto"),
            ] {
                let request = Request::builder().method(method).header(CONTENT_TYPE, content_type).body(()).unwrap();
                let rejection = Rejection::new(reason.clone(), decision.clone(), &request.into_parts().0);
                let one_by_one: Response<Bytes> = Problem.response_for_rejection(&rejection);
                let one_by_one = rejection.complete(one_by_one, style);
                let at_once: Response<Bytes> = Problem.complete_response(&rejection, style);
                assert_eq!(sent(&at_once, style), sent(&one_by_one, style), "{rejection:?} {style:?}");
                quick += usize::from(denied::<Bytes>(&rejection, style).is_some());
            }
        }
        quick
    }

    fn charge(name: &str, quota: Quota, cost: u64) -> Charge {
        Charge::new(LimitName::try_new(name).unwrap(), BucketKey::global(), quota, Amount::Take(cost))
    }

    fn quotas() -> Vec<(Quota, u64)> {
        let every = |seconds| Quota::new(1, Duration::from_secs(seconds));
        vec![
            (every(1), 1),
            (every(999), 1),
            (every(1_000), 1),
            (every(1_000_000).with_capacity(1_000), 1_000),
            (Quota::per_second(1_000).with_capacity(100_000), 12_345),
            (Quota::per_minute(7), 3),
        ]
    }

    #[test]
    fn a_denial_at_once_is_the_same_as_one_by_one() {
        let mut waits = Vec::new();
        for (quota, cost) in quotas() {
            let charges = [charge("per-key", quota, cost)];
            for level in [0, -1, quota.full() / 2, quota.full()] {
                let decision = Decision::new(&charges, &[Reply::new(level, false, 0)]).unwrap();
                waits.extend(decision.retry_after().map(seconds));
                assert_eq!(check(&Reason::Denied, &decision), 2 * STYLES.len());
            }
        }
        assert!([1, 999, 1_000, 1_000_000_000].iter().all(|wait| waits.contains(wait)), "{waits:?}");
    }

    #[test]
    fn several_limits_and_shadows_are_told_of_at_once() {
        let names = ["a", "per-key", &"x".repeat(64)];
        let (mut quick, mut denied) = (0, 0);
        for modes in 0..4_usize.pow(3) {
            let mode = |i: usize| (modes >> (2 * i) & 1 == 1, modes >> (2 * i + 1) & 1 == 1);
            for first in 0..quotas().len() {
                let limits = (0..3).map(|i| {
                    let (quota, cost) = quotas()[(first + i) % quotas().len()];
                    let charge = charge(names[i], quota, cost);
                    let (allowed, shadow) = mode(i);
                    let reply = Reply::new(if allowed { quota.full() } else { 0 }, allowed, 0);
                    (if shadow { charge.shadow() } else { charge }, reply)
                });
                let (charges, replies): (Vec<Charge>, Vec<Reply>) = limits.unzip();
                let decision = Decision::new(&charges, &replies).unwrap();
                if !decision.is_allowed() {
                    quick += check(&Reason::Denied, &decision);
                    denied += 1;
                }
            }
        }
        assert_eq!(quick, 2 * STYLES.len() * denied);
    }

    #[test]
    fn what_is_no_denial_or_has_no_wait_is_completed() {
        let quota = Quota::per_second(1);
        let none = Decision::bare(false, Source::Layer);
        let dear = Decision::unasked(&[charge("a", quota, 2)]);
        for (reason, decision) in [
            (Reason::TooDear, &dear),
            (Reason::NoKey(NoKey::Credential(HeaderName::from_static("x-api-key"))), &none),
            (Reason::NoKey(NoKey::Credential(http::header::AUTHORIZATION)), &none),
            (Reason::NoKey(NoKey::Identity), &none),
            (Reason::NoKey(NoKey::Peer), &none),
            (Reason::StoreFailed { retry_after: Duration::from_secs(1_000) }, &none),
            (Reason::Denied, &none),
            (Reason::Denied, &dear),
        ] {
            assert_eq!(check(&reason, decision), 0, "{reason:?}");
        }
        // A bucket that is charged twice can need more than it holds.
        let twice = [charge("a", quota, 1), charge("a", quota, 1)];
        let decision = Decision::new(&twice, &[Reply::new(1_000_000, true, 0), Reply::new(0, false, 0)]).unwrap();
        assert_eq!((decision.is_allowed(), decision.retry_after()), (false, None));
        assert_eq!(check(&Reason::Denied, &decision), 0);
    }
}
