//! Lines for the operator, all of them in one place.
//!
//! With the feature `tracing` they are events. Without it the few faults that somebody has to see go to stderr, since a
//! limiter that fails in silence is worse than a library that writes a line.

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

pub(crate) use {error, warning};
