//! What a peer's response says of the sender's rate.

use std::time::{Duration, SystemTime};

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderValue, Response, StatusCode};

/// Longer than that counts as that.
pub(super) const MOST: Duration = Duration::from_secs(3600);
/// A shorter wait is not told apart from none by fields in whole seconds: the bucket is exact there.
const LEAST: Duration = Duration::from_secs(1);

/// What a response says, where it says anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// The peer has refused: with a time to wait, or without.
    Refused { retry_after: Option<Duration> },
    /// The peer has nothing left for so long.
    Exhausted { wait: Duration },
}

/// What is left, as a response says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Remaining {
    pub(super) tokens: u64,
    /// Until there are more.
    pub(super) wait: Duration,
}

/// Reads what is left from the fields of a response.
pub(super) type ReadRemaining = fn(&HeaderMap, SystemTime) -> Option<Remaining>;

/// What a response says of the sender's rate: a refusal is 429, and 503 with a `Retry-After`, which wins over what else says
/// how long to wait.
pub(super) fn said<B>(response: &Response<B>, remaining: Option<ReadRemaining>) -> Option<Said> {
    let (headers, status) = (response.headers(), response.status());
    if status != StatusCode::TOO_MANY_REQUESTS && status != StatusCode::SERVICE_UNAVAILABLE && remaining.is_none() {
        return None;
    }
    let now = SystemTime::now();
    let remaining = remaining.and_then(|read| read(headers, now));
    match (status, retry_after(headers, now)) {
        (StatusCode::TOO_MANY_REQUESTS, retry_after) => {
            // One that is over by now is none: the clocks differ.
            let reset = remaining.map(|remaining| remaining.wait).filter(|wait| !wait.is_zero());
            Some(Said::Refused { retry_after: retry_after.or(reset) })
        }
        (StatusCode::SERVICE_UNAVAILABLE, retry_after @ Some(_)) => Some(Said::Refused { retry_after }),
        _ => {
            let Remaining { wait, .. } =
                remaining.filter(|remaining| remaining.tokens == 0 && remaining.wait > LEAST)?;
            Some(Said::Exhausted { wait })
        }
    }
}

/// The `Retry-After` of RFC 9110, 10.2.3: whole seconds, or a date in one of its three forms. One in the past is no time.
/// What is neither is ignored, such as a sign, a decimal, or a date in another zone than GMT.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?;
    if let Some(seconds) = seconds(value) {
        return Some(Duration::from_secs(seconds).min(MOST));
    }
    let date = httpdate::parse_http_date(text(value)?).ok()?;
    Some(date.duration_since(now).unwrap_or_default().min(MOST))
}

/// Whole seconds. More digits than fit are more than anybody waits.
pub(super) fn seconds(value: &HeaderValue) -> Option<u64> {
    let digits = text(value)?;
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse().unwrap_or(u64::MAX))
}

fn text(value: &HeaderValue) -> Option<&str> {
    Some(value.to_str().ok()?.trim_matches([' ', '\t']))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VECTORS: &str = include_str!("../../tests/vectors/retry_after_urllib3.json");

    fn read(value: &str, now: SystemTime) -> Option<Duration> {
        let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_bytes(value.as_bytes()).unwrap())]);
        retry_after(&headers, now)
    }

    #[test]
    fn all_rows_of_urllib3_but_for_dates_in_another_zone_than_gmt() {
        let vectors: serde_json::Value = serde_json::from_str(VECTORS).unwrap();
        let rows = |name: &str| vectors[name].as_array().unwrap().clone();
        // 2019-06-03T11:00:00Z.
        assert_eq!(vectors["now"], "2019-06-03T11:00:00Z");
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_559_559_600);
        for row in rows("valid_seconds") {
            let wait = Duration::from_secs(row[1].as_u64().unwrap());
            assert_eq!(read(row[0].as_str().unwrap(), now), Some(wait), "{row}");
        }
        for row in rows("invalid") {
            assert_eq!(read(row.as_str().unwrap(), now), None, "{row}");
        }
        for row in rows("dates") {
            let value = row[0].as_str().unwrap();
            // A choice: these are no dates of RFC 9110, and the back-off of a refusal without a time is the safe answer.
            let wait = (!value.ends_with("UTC")).then(|| Duration::from_secs(row[1].as_u64().unwrap()));
            assert_eq!(read(value, now), wait, "{row}");
        }
        // Theirs is set by the caller.
        for (value, wait) in [("3599", 3599), ("3600", 3600), ("3601", 3600), ("99999999999999999999999", 3600)] {
            assert_eq!(read(value, now), Some(Duration::from_secs(wait)), "{value}");
        }
        assert_eq!(read("Mon, 03 Jun 2019 10:59:59 GMT", now), Some(Duration::ZERO), "a date in the past");
        assert_eq!(read("Tue, 04 Jun 2019 11:00:00 GMT", now), Some(MOST));
    }
}
