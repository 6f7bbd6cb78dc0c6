//! Lines for the operator, all of them in one place.
//!
//! With the feature `tracing` they are events. Without it the few faults that somebody has to see go to stderr, since a
//! limiter that fails in silence is worse than a library that writes a line.

use crate::decision::Decision;
use crate::rejection::Reason;

macro_rules! error {
    ($($line:tt)+) => {{
        #[cfg(feature = "tracing")]
        tracing::error!($($line)+);
        #[cfg(not(feature = "tracing"))]
        eprintln!("tower-token-bucket: error: {}", format_args!($($line)+));
    }};
}

macro_rules! warning {
    ($($line:tt)+) => {{
        #[cfg(feature = "tracing")]
        tracing::warn!($($line)+);
        #[cfg(not(feature = "tracing"))]
        eprintln!("tower-token-bucket: warning: {}", format_args!($($line)+));
    }};
}

/// What an operator may want to know, and need not: nothing without `tracing`.
macro_rules! info {
    ($($line:tt)+) => {{
        #[cfg(feature = "tracing")]
        tracing::info!($($line)+);
        #[cfg(not(feature = "tracing"))]
        let _ = format_args!($($line)+);
    }};
}

pub(crate) use {error, info, warning};

/// A request's verdict is known: it goes to the span that the request is in, as far as that has declared the fields, and a
/// refusal is an event.
#[cfg(feature = "tracing")]
pub(crate) fn decided(decision: &Decision, refused: Option<&Reason>) {
    // Whoever has the feature and no subscriber pays for a look at one number.
    if !tracing::dispatcher::has_been_set() {
        return;
    }
    let (name, source) = (Reason::name(refused), decision.source().name());
    let retry_after = match refused {
        Some(Reason::StoreFailed { retry_after }) => Some(*retry_after),
        _ => decision.retry_after(),
    };
    let retry_after = retry_after.map(|wait| wait.as_secs_f64());
    let span = tracing::Span::current();
    if !span.is_none() {
        span.record("rate_limit.decision", name);
        span.record("rate_limit.source", source);
        span.record("rate_limit.limit", decision.limit());
        span.record("rate_limit.retry_after", retry_after);
    }
    if refused.is_some() {
        tracing::debug!(
            target: "tower_token_bucket",
            {
                rate_limit.decision = name,
                rate_limit.limit = decision.limit(),
                rate_limit.source = source,
                rate_limit.retry_after = retry_after,
            },
            "a request is refused"
        );
    }
}

#[cfg(not(feature = "tracing"))]
pub(crate) fn decided(_: &Decision, _: Option<&Reason>) {}
