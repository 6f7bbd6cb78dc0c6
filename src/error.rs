//! What is wrong with a configuration, found before a request is served.

use std::fmt;

use crate::quota::QuotaError;

/// A setting that cannot be used; its text names the place, the reason and the allowed values.
///
/// Returned by every `try_` constructor. The twins without `try_` panic with the same text.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{ConfigError, Quota};
///
/// let error: ConfigError = Quota::try_per_second(0).unwrap_err();
/// assert_eq!(error.to_string(), "refill is 0: allowed are 1 to 1099511627776 tokens per period");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// A quota that is zero, too large, or that integers cannot hold exactly.
    Quota(QuotaError),
    /// A limit's name outside `[A-Za-z0-9._-]{1,64}`.
    LimitName {
        /// The name as given.
        name: String,
    },
    /// Two limits of one layer whose names are equal when case is ignored.
    DuplicateLimit {
        /// The name as given the second time.
        name: String,
    },
    /// A layer without a limit.
    NoLimit,
    /// An entry of a cost table that is not `"METHOD /template"`, `"* /template"` or `"/template"`.
    Route {
        /// The entry as given.
        route: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A cost that its limit's capacity can never pay.
    CostAboveCapacity {
        /// The limit's name.
        limit: String,
        /// The entry of the cost table, or `"the default cost"`.
        entry: String,
        /// The cost, in tokens.
        cost: u64,
        /// The limit's capacity, in tokens.
        capacity: u64,
    },
    /// An IPv6 prefix length outside 32 to 128.
    Ipv6Prefix {
        /// The length as given, in bits.
        bits: u8,
    },
    /// A network of proxies that is neither an address nor an address and a prefix length.
    Network {
        /// The network as given.
        network: String,
    },
    /// A number of proxies that the header cannot tell of.
    Hops {
        /// The header that they set.
        header: String,
        /// The number as given.
        hops: usize,
    },
    /// A `share` of 0: the local bucket gets one n-th of the quota, n from 1.
    Share,
    /// A memory store that may hold no bucket.
    Buckets,
    /// A deadline of zero.
    Deadline,
    /// A prefix of keys outside `[A-Za-z0-9._:-]{1,64}`.
    Prefix {
        /// The prefix as given.
        prefix: String,
    },
    /// A Redis URL that cannot be used.
    RedisUrl {
        /// What is wrong with it: the URL itself is not shown, it may hold a password.
        reason: String,
    },
    /// A rate that cannot adapt so.
    AdaptiveRate {
        /// Which setting it is, and what is allowed.
        reason: String,
    },
    /// A header name that is not one.
    HeaderName {
        /// The name as given.
        name: String,
    },
    /// A setting of a configuration file.
    Setting {
        /// The setting's place, such as `limits[0].per`.
        key: String,
        /// What is wrong with it, and what is allowed.
        reason: String,
    },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Quota(error) => error.fmt(f),
            Self::LimitName { name } => {
                write!(f, "limit name {name:?} is not allowed: 1 to 64 of A-Z a-z 0-9 . _ - are")
            }
            Self::DuplicateLimit { name } => {
                write!(f, "limit name {name:?} is used twice: names differ by more than case within one layer")
            }
            Self::NoLimit => f.write_str("there is no limit: a layer has at least one"),
            Self::Route { route, reason } => write!(f, "route {route:?} is not allowed: {reason}"),
            Self::CostAboveCapacity { limit, entry, cost, capacity } => write!(
                f,
                "cost {cost} of {entry} is above the capacity {capacity} of limit {limit:?}: \
                 it could never pass, allowed are 0 to {capacity} (where plans have larger ones, `quota_by` comes first)"
            ),
            Self::Ipv6Prefix { bits } => write!(f, "ipv6_prefix {bits} is not allowed: 32 to 128 bits are"),
            Self::Network { network } => {
                write!(
                    f,
                    "{network:?} is no network: allowed are addresses, and networks such as 10.0.0.0/8 or 2001:db8::/32"
                )
            }
            Self::Hops { header, hops } => {
                let most = if matches!(&**header, "x-forwarded-for" | "forwarded") { "1 or more are" } else { "1 is" };
                write!(f, "{hops} hops are not allowed with the header {header}: {most}")
            }
            Self::Share => f.write_str("share 0 is not allowed: 1 or more is (one n-th of the quota)"),
            Self::Buckets => f.write_str("buckets 0 is not allowed: 1 or more is"),
            Self::Deadline => f.write_str("deadline 0 is not allowed: any longer time is"),
            Self::Prefix { prefix } => {
                write!(f, "prefix {prefix:?} is not allowed: 1 to 64 of A-Z a-z 0-9 . _ - : are")
            }
            Self::RedisUrl { reason } => write!(f, "the Redis URL cannot be used: {reason}"),
            Self::AdaptiveRate { reason } => write!(f, "adaptive rate: {reason}"),
            Self::HeaderName { name } => write!(
                f,
                "header name {name:?} is not allowed: letters, digits and ! # $ % & ' * + - . ^ _ ` | ~ are (RFC 9110, 5.6.2)"
            ),
            Self::Setting { key, reason } => write!(f, "{key}: {reason}"),
        }
    }
}

impl std::error::Error for ConfigError {}

impl From<QuotaError> for ConfigError {
    fn from(error: QuotaError) -> Self {
        Self::Quota(error)
    }
}

/// The panicking twin of a `try_` function: its caller is named, with the error's own text.
#[track_caller]
pub(crate) fn or_panic<T>(result: Result<T, ConfigError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
