//! How long a peer says to wait.

use std::time::{Duration, SystemTime};

use http::header::RETRY_AFTER;
use http::{HeaderMap, Response, StatusCode};

/// Longer than that counts as that.
const MOST: Duration = Duration::from_secs(3600);

/// What a response says of the sender's rate: `None` if nothing, else the time to wait, if it has one.
///
/// That is 429, and 503 with a `Retry-After`.
pub(super) fn refusal<B>(response: &Response<B>) -> Option<Option<Duration>> {
    let hint = retry_after(response.headers(), SystemTime::now());
    match response.status() {
        StatusCode::TOO_MANY_REQUESTS => Some(hint),
        StatusCode::SERVICE_UNAVAILABLE => hint.map(Some),
        _ => None,
    }
}

/// The `Retry-After` of RFC 9110, 10.2.3: whole seconds, or a date in one of its three forms. One in the past is no time;
/// what is neither is ignored.
pub(super) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim_matches([' ', '\t']);
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are more than an hour.
        return Some(value.parse().map_or(MOST, Duration::from_secs).min(MOST));
    }
    let date = httpdate::parse_http_date(value).ok()?;
    Some(date.duration_since(now).unwrap_or_default().min(MOST))
}
