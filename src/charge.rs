//! What a request asks of the store: one charge for each limit that it pays.

use std::fmt;
use std::sync::Arc;

use http::HeaderValue;

use crate::error::ConfigError;
use crate::failure::OnStoreFailure;
use crate::few::Few;
use crate::headers::Policies;
use crate::key::BucketKey;
use crate::quota::Quota;

/// The charges of one request.
pub(crate) type Charges = Few<Charge>;

/// The name of a limit: 1 to 64 of `A-Z a-z 0-9 . _ -`; cloning it is cheap.
#[derive(Clone)]
pub struct LimitName(Arc<Named>);

struct Named {
    text: Box<str>,
    hash: u128,
    policies: Policies,
}

impl LimitName {
    /// Creates a limit's name.
    ///
    /// # Errors
    ///
    /// [`ConfigError::LimitName`] for anything but 1 to 64 of `A-Z a-z 0-9 . _ -`.
    pub fn try_new(name: &str) -> Result<Self, ConfigError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if name.is_empty() || name.len() > 64 || !name.bytes().all(allowed) {
            return Err(ConfigError::LimitName { name: name.to_owned() });
        }
        let hash = crate::key::hash_128(name.as_bytes());
        Ok(Self(Arc::new(Named { text: name.into(), hash: u128::from_le_bytes(hash), policies: Policies::default() })))
    }

    /// The name itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    /// The item of `RateLimit-Policy` for the limit under `quota`.
    pub(crate) fn policy(&self, quota: &Quota) -> HeaderValue {
        self.0.policies.get(self, quota)
    }

    /// A fixed-length stand-in for the name, for the keys of a map.
    pub(crate) fn hash_128(&self) -> u128 {
        self.0.hash
    }
}

impl fmt::Debug for LimitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl fmt::Display for LimitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl PartialEq for LimitName {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.text == other.0.text
    }
}

impl Eq for LimitName {}

/// How a charge changes its bucket, in whole tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Amount {
    /// Takes tokens if they are there; refuses otherwise. `Take(0)` is [`Peek`](Self::Peek).
    Take(u64),
    /// Takes tokens whether they are there or not; the debt goes down to one negative capacity and no further.
    Spend(u64),
    /// Gives tokens back, up to the capacity and no further.
    Give(u64),
    /// Looks at the level and changes nothing.
    Peek,
}

/// What one limit asks of one bucket. All charges of a request go to [`Store::acquire`](crate::Store::acquire) in one
/// call.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, Quota};
///
/// let name = LimitName::try_new("per-key")?;
/// let charge = Charge::new(name, BucketKey::id("tenant 7"), Quota::per_second(10), Amount::Take(3));
/// assert_eq!(charge.cost(), 3);
/// # Ok::<(), tower_token_bucket::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Charge {
    limit: LimitName,
    key: BucketKey,
    quota: Quota,
    amount: Amount,
    shadow: bool,
    /// In the place of the layer's.
    on_store_failure: Option<OnStoreFailure>,
}

impl Charge {
    /// Creates an enforced charge of `amount` to the bucket that `limit` and `key` name.
    #[must_use]
    pub fn new(limit: LimitName, key: BucketKey, quota: Quota, amount: Amount) -> Self {
        let amount = if amount == Amount::Take(0) { Amount::Peek } else { amount };
        Self { limit, key, quota, amount, shadow: false, on_store_failure: None }
    }

    /// Makes this a shadow charge: it never refuses, and is made when all enforced charges pass and the tokens are
    /// there.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// The same charge of another amount.
    pub(crate) fn with(&self, amount: Amount) -> Self {
        let Self { limit, key, quota, amount: _, shadow, on_store_failure } = self.clone();
        Self { shadow, on_store_failure, ..Self::new(limit, key, quota, amount) }
    }

    pub(crate) fn with_quota(mut self, quota: Quota) -> Self {
        self.quota = quota;
        self
    }

    pub(crate) fn with_on_store_failure(mut self, policy: Option<OnStoreFailure>) -> Self {
        self.on_store_failure = policy;
        self
    }

    /// What applies to this charge, in the place of the layer's policy, when the store fails.
    pub(crate) fn on_store_failure(&self) -> Option<OnStoreFailure> {
        self.on_store_failure
    }

    /// The limit that charges.
    #[must_use]
    pub fn limit(&self) -> &LimitName {
        &self.limit
    }

    /// Names the bucket, together with the limit.
    #[must_use]
    pub fn key(&self) -> &BucketKey {
        &self.key
    }

    /// Capacity and refill rate to apply.
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// How the bucket changes.
    #[must_use]
    pub fn amount(&self) -> Amount {
        self.amount
    }

    /// Whether this is a shadow charge.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// The tokens that have to be there: those of [`Amount::Take`], 0 for the other amounts.
    #[must_use]
    pub fn cost(&self) -> u64 {
        match self.amount {
            Amount::Take(cost) => cost,
            Amount::Spend(_) | Amount::Give(_) | Amount::Peek => 0,
        }
    }

    /// Whether the cost is above the capacity, so that no wait can make it pass.
    #[must_use]
    pub fn is_too_dear(&self) -> bool {
        self.cost() > self.quota.capacity()
    }

    /// Whether `other` is for the same bucket, and both are in one mode.
    pub(crate) fn is_same_bucket(&self, other: &Self) -> bool {
        self.shadow == other.shadow && self.key == other.key && self.limit == other.limit
    }

    /// The same charge on one `n`-th of the quota. A cost that only the whole quota can pay takes the whole share.
    pub(crate) fn share(mut self, n: u32) -> Self {
        let fits = !self.is_too_dear();
        self.quota = self.quota.share(n);
        if let Amount::Take(cost) = &mut self.amount
            && fits
        {
            *cost = (*cost).min(self.quota.capacity());
        }
        self
    }
}
