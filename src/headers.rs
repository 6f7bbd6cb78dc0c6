//! The fields that tell a client how much is left: draft-ietf-httpapi-ratelimit-headers-11, or the older `X-RateLimit-*`.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{HeaderName, RETRY_AFTER};
use http::{HeaderMap, HeaderValue};
use smallvec::SmallVec;

use crate::charge::LimitName;
use crate::decision::{Decision, Outcome};
use crate::quota::Quota;
use crate::text::{Sink, Text, small_number};

/// Which fields tell a client how much is left. `Retry-After` is sent with every style.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{HeaderStyle, Limit, MemoryStore, Quota, TokenBucketLayer};
///
/// let layer = TokenBucketLayer::new(MemoryStore::new(), Limit::new("per-address", Quota::per_second(10)))
///     .headers(HeaderStyle::Legacy);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderStyle {
    /// `RateLimit-Policy: "per-key";q=100;w=10` and `RateLimit: "per-key";r=99;t=10`, a list with an item for each limit:
    /// capacity and seconds to fill it, tokens left and seconds until they are worth waiting for
    /// ([draft 11](https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/11/)).
    #[default]
    Draft11,
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset` of the limit that binds: capacity, tokens
    /// left, and the time at which the bucket is full in seconds since 1970.
    Legacy,
    /// The same, with `X-RateLimit-Reset` in seconds from now.
    LegacyDelta,
    /// None of them.
    Off,
}

/// `RateLimit-Policy`.
pub const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// `RateLimit`.
pub const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// `X-RateLimit-Limit`.
pub const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
/// `X-RateLimit-Remaining`.
pub const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
/// `X-RateLimit-Reset`.
pub const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// Every field that the layer may set and that scripts of another origin can only read when CORS exposes it.
///
/// # Example
///
/// ```
/// use tower_http::cors::CorsLayer;
/// use tower_token_bucket::headers::EXPOSE_HEADERS;
///
/// let cors = CorsLayer::new().expose_headers(EXPOSE_HEADERS);
/// ```
pub const EXPOSE_HEADERS: [HeaderName; 6] =
    [RETRY_AFTER, RATELIMIT_POLICY, RATELIMIT, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];

/// Whole seconds, rounded up, at least 1.
pub(crate) fn seconds(wait: Duration) -> u64 {
    (wait.as_secs() + u64::from(wait.subsec_nanos() > 0)).max(1)
}

/// The w of a quota: seconds in which an empty bucket fills.
fn window(quota: &Quota) -> u64 {
    (quota.full() as u64).div_ceil(quota.tokens() * 1_000_000).max(1)
}

/// The t of an outcome that has `remaining` tokens: its own wait where it refuses, else the time in which what is left
/// refills, or the time to the next token where nothing is left.
fn time(outcome: &Outcome, remaining: u64) -> u64 {
    let wait = if outcome.refuses() {
        outcome.retry_after()
    } else if remaining > 0 {
        // Below 2^51 units.
        let units = remaining * outcome.quota().per_us();
        return units.div_ceil(outcome.quota().tokens() * 1_000_000).max(1);
    } else {
        outcome.next_token_after()
    };
    wait.map_or(1, seconds)
}

/// Sets the fields of `style`. Those that an inner layer has set are kept; the lists are appended to.
#[inline]
pub(crate) fn write_fields(headers: &mut HeaderMap, decision: &Decision, style: HeaderStyle) {
    match style {
        HeaderStyle::Draft11 => write_draft_11(headers, decision),
        HeaderStyle::Legacy => write_legacy(headers, decision, true),
        HeaderStyle::LegacyDelta => write_legacy(headers, decision, false),
        HeaderStyle::Off => {}
    }
}

fn write_draft_11(headers: &mut HeaderMap, decision: &Decision) {
    // Few responses have the fields already, so they are not looked for first.
    if policies(decision).is_some_and(|line| headers.append(RATELIMIT_POLICY, line)) {
        join_lines(headers, RATELIMIT_POLICY);
    }
    if levels(decision).is_some_and(|line| headers.append(RATELIMIT, line)) {
        join_lines(headers, RATELIMIT);
    }
}

/// `RateLimit-Policy`.
#[inline]
pub(crate) fn policies(decision: &Decision) -> Option<HeaderValue> {
    let list = |list: &mut List, outcome: &Outcome| join(list, outcome.policy().as_bytes());
    line(decision, |outcome| Some(outcome.policy()), list)
}

/// `RateLimit`.
#[inline]
pub(crate) fn levels(decision: &Decision) -> Option<HeaderValue> {
    let list = |list: &mut List, outcome: &Outcome| {
        if let Some(item) = level(outcome) {
            join(list, item.as_bytes());
        }
    };
    line(decision, |outcome| level(outcome).map(|item| value(&item)), list)
}

/// The items of all enforced limits; that of one limit is the whole line.
#[inline]
fn line(
    decision: &Decision,
    item: impl FnOnce(&Outcome) -> Option<HeaderValue>,
    list: impl Fn(&mut List, &Outcome),
) -> Option<HeaderValue> {
    let mut enforced = decision.outcomes().iter().filter(|outcome| !outcome.is_shadow());
    let first = enforced.next()?;
    let Some(second) = enforced.next() else { return item(first) };
    let mut line = List::new();
    for outcome in [first, second].into_iter().chain(enforced) {
        list(&mut line, outcome);
    }
    HeaderValue::from_bytes(&line).ok().filter(|line| !line.is_empty())
}

/// The item of `RateLimit`.
#[inline(always)]
fn level(outcome: &Outcome) -> Option<Item> {
    let r = outcome.remaining()?;
    let mut item = Item::new();
    item.push("\"").push(outcome.limit()).push("\";r=").push_number(r).push(";t=").push_number(time(outcome, r));
    Some(item)
}

/// Makes one line of those that are there.
#[cold]
fn join_lines(headers: &mut HeaderMap, name: HeaderName) {
    let mut list = List::new();
    for line in headers.get_all(&name) {
        // An empty line is an empty list: nothing to be set apart.
        if !line.as_bytes().trim_ascii().is_empty() {
            join(&mut list, line.as_bytes());
        }
    }
    if let Ok(line) = HeaderValue::from_bytes(&list) {
        headers.insert(name, line);
    }
}

type List = SmallVec<[u8; 256]>;

fn join(list: &mut List, item: &[u8]) {
    if !list.is_empty() {
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(item);
}

/// Items of `RateLimit-Policy` for a limit, which are made once for each of the first quotas that it is used with: its
/// own, and those of plans.
#[derive(Default)]
pub(crate) struct Policies([OnceLock<(Quota, HeaderValue)>; 4]);

impl Policies {
    pub(crate) fn get(&self, limit: &LimitName, quota: &Quota) -> HeaderValue {
        for known in &self.0 {
            let (known, item) = known.get_or_init(|| (*quota, policy(limit, quota)));
            if known == quota {
                return item.clone();
            }
        }
        policy(limit, quota)
    }
}

fn policy(limit: &LimitName, quota: &Quota) -> HeaderValue {
    let mut item = Item::new();
    item.push("\"").push(limit.as_str()).push("\";q=").push_number(quota.capacity());
    value(item.push(";w=").push_number(window(quota)))
}

/// Room for a name, two parameters and their numbers. It is a string of RFC 9651 and its parameters: names have no
/// character that would have to be escaped.
type Item = Text<128>;

/// A number, without the buffer that `HeaderValue::from` allocates beside the value; a small one without the value's.
pub(crate) fn number_value(number: u64) -> HeaderValue {
    small_number(number).map_or_else(|| value(Text::<20>::new().push_number(number)), HeaderValue::from_static)
}

fn value<const N: usize>(item: &Text<N>) -> HeaderValue {
    // Never: it is visible ASCII.
    HeaderValue::from_bytes(item.as_bytes()).unwrap_or(HeaderValue::from_static(""))
}

fn write_legacy(headers: &mut HeaderMap, decision: &Decision, since_1970: bool) {
    let Some(outcome) = decision.bound() else { return };
    let (Some(remaining), Some(reset_after)) = (outcome.remaining(), outcome.reset_after()) else { return };
    let reset = if since_1970 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        now + reset_after
    } else {
        reset_after
    };
    let reset = reset.as_secs() + u64::from(reset.subsec_nanos() > 0);
    for (name, number) in [
        (X_RATELIMIT_LIMIT, outcome.quota().capacity()),
        (X_RATELIMIT_REMAINING, remaining),
        (X_RATELIMIT_RESET, reset),
    ] {
        headers.entry(name).or_insert_with(|| number_value(number));
    }
}
