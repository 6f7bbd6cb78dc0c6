//! A named quota with its key, cost and mode; and all limits of a layer, which turn a request into charges.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use http::request::Parts;

use crate::charge::{Amount, Charge, Charges, LimitName};
use crate::client_ip::ClientIp;
use crate::cost::{Cost, CostTable, is_preflight, matched};
use crate::error::{ConfigError, or_panic};
use crate::failure::OnStoreFailure;
use crate::key::{BucketKey, KeyExtractor, NoKey};
use crate::log;
use crate::quota::Quota;

type QuotaBy = dyn Fn(&Parts) -> Option<Quota> + Send + Sync;

/// A named quota, whose bucket each request is charged to, and how much.
///
/// By default a request costs 1 token and is charged to the address of its peer. Cloning a limit is cheap.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{ClientIp, CostTable, Limit, Quota};
///
/// let limit = Limit::new("per-address", Quota::per_second(10).with_capacity(100))
///     .key_by(ClientIp::peer())
///     .cost(CostTable::new(1).route("GET /search", 3).exempt("GET /health"));
/// ```
#[derive(Clone)]
pub struct Limit {
    name: LimitName,
    quota: Quota,
    key: Arc<dyn KeyExtractor>,
    cost: Arc<dyn Cost>,
    quota_by: Option<Arc<QuotaBy>>,
    shadow: bool,
    on_store_failure: Option<OnStoreFailure>,
}

impl Limit {
    /// Creates a limit.
    ///
    /// # Panics
    ///
    /// When `name` is not 1 to 64 of `A-Z a-z 0-9 . _ -`; [`try_new`](Self::try_new) returns the error.
    #[must_use]
    #[track_caller]
    pub fn new(name: &str, quota: Quota) -> Self {
        or_panic(Self::try_new(name, quota))
    }

    /// Creates a limit, like [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// [`ConfigError::LimitName`] when `name` is not 1 to 64 of `A-Z a-z 0-9 . _ -`.
    pub fn try_new(name: &str, quota: Quota) -> Result<Self, ConfigError> {
        Ok(Self {
            name: LimitName::try_new(name)?,
            quota,
            key: Arc::new(ClientIp::peer()),
            cost: Arc::new(CostTable::new(1)),
            quota_by: None,
            shadow: false,
            on_store_failure: None,
        })
    }

    /// Sets whose bucket a request is charged to.
    #[must_use]
    pub fn key_by(mut self, key: impl KeyExtractor) -> Self {
        self.key = Arc::new(key);
        self
    }

    /// Sets how many tokens a request takes.
    ///
    /// A cost above the capacity could never pass. Where each request may have a quota of its own, set
    /// [`quota_by`](Self::quota_by) first: then the costs are compared with the quota of each request.
    ///
    /// # Panics
    ///
    /// When a [`CostTable`] has a cost above the capacity; [`try_cost`](Self::try_cost) returns the error.
    #[must_use]
    #[track_caller]
    pub fn cost(self, cost: impl Cost) -> Self {
        or_panic(self.try_cost(cost))
    }

    /// Sets how many tokens a request takes, like [`cost`](Self::cost).
    ///
    /// # Errors
    ///
    /// [`ConfigError::CostAboveCapacity`] when a [`CostTable`] has a cost above the capacity.
    pub fn try_cost(mut self, cost: impl Cost) -> Result<Self, ConfigError> {
        if self.quota_by.is_none()
            && let Some((cost, entry)) = cost.largest()
            && cost > self.quota.capacity()
        {
            let limit = self.name.as_str().to_owned();
            return Err(ConfigError::CostAboveCapacity { limit, entry, cost, capacity: self.quota.capacity() });
        }
        self.cost = Arc::new(cost);
        Ok(self)
    }

    /// Chooses the quota of each request: plans such as free and pro. `None` is the limit's own quota, never
    /// unlimited; a request without a limit is one that [costs](Self::cost) 0. It is only asked for requests that have a
    /// key.
    ///
    /// Buckets keep their tokens when a plan changes: a smaller capacity clamps, and the time since the bucket's last
    /// use is earned at the rate of whoever asks.
    #[must_use]
    pub fn quota_by(mut self, quota: impl Fn(&Parts) -> Option<Quota> + Send + Sync + 'static) -> Self {
        self.quota_by = Some(Arc::new(quota));
        self
    }

    /// Makes this limit decide, charge and record, but never refuse: to see what it would do before it does.
    #[must_use]
    pub fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Sets what happens to this limit when the store fails, in the place of the
    /// [layer's policy](crate::TokenBucketLayer::on_store_failure). Where one limit of a request says `Deny`, the request
    /// is refused; those that say `Allow` are left out, and the others are charged on this instance alone.
    #[must_use]
    pub fn on_store_failure(mut self, policy: OnStoreFailure) -> Self {
        self.on_store_failure = Some(policy);
        self
    }

    /// The limit's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The limit's own quota.
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// Whether the limit never refuses.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// A charge of this limit to the bucket of `key`.
    pub(crate) fn charge_to(&self, key: BucketKey, amount: Amount) -> Charge {
        Charge::new(self.name.clone(), key, self.quota, amount)
    }

    /// What this limit charges a request: nothing where the cost is 0.
    fn charge(&self, parts: &Parts, preflight: bool) -> Result<Option<Charge>, NoKey> {
        let cost = if preflight { self.cost.preflight_cost(parts) } else { self.cost.cost(parts) };
        if cost == 0 {
            return Ok(None);
        }
        let key = match self.key.extract(parts) {
            Ok(key) => key,
            // A limit that never refuses does not refuse for want of a key either; the operator hears of a missing peer.
            Err(why) if self.shadow && why != NoKey::Peer => return Ok(None),
            Err(why) => return Err(why),
        };
        // Only now: a plan may be looked up by what the key stands for.
        let quota = self.quota_by.as_ref().and_then(|quota_by| quota_by(parts)).unwrap_or(self.quota);
        let charge = Charge::new(self.name.clone(), key, quota, Amount::Take(cost));
        let charge = charge.with_on_store_failure(self.on_store_failure);
        Ok(Some(if self.shadow { charge.shadow() } else { charge }))
    }
}

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limit")
            .field("name", &self.name)
            .field("quota", &self.quota)
            .field("shadow", &self.shadow)
            .finish_non_exhaustive()
    }
}

/// The limits of a layer: at least one, with different names, in order of declaration.
pub(crate) struct Limits {
    limits: Vec<Limit>,
    /// The operator has been told that there is no peer address.
    told: Arc<AtomicBool>,
}

/// What a request asks for.
#[derive(Debug)]
pub(crate) enum Demand {
    /// Every cost is 0.
    Nothing,
    /// Tokens.
    Charges(Charges),
    /// A cost above the capacity, which no wait can pay, is among the charges: no store need hear of them.
    TooDear(Charges),
    /// A limit found no key.
    NoKey(NoKey),
}

impl Limits {
    pub(crate) fn try_new(limits: impl IntoIterator<Item = Limit>) -> Result<Self, ConfigError> {
        let mut unique: Vec<Limit> = Vec::new();
        for limit in limits {
            // Header fields and metrics compare names without their case.
            if unique.iter().any(|known| known.name().eq_ignore_ascii_case(limit.name())) {
                return Err(ConfigError::DuplicateLimit { name: limit.name().to_owned() });
            }
            unique.push(limit);
        }
        if unique.is_empty() {
            return Err(ConfigError::NoLimit);
        }
        Ok(Self { limits: unique, told: Arc::default() })
    }

    /// Others in their place.
    pub(crate) fn replaced(&self, limits: impl IntoIterator<Item = Limit>) -> Result<Self, ConfigError> {
        let told = Arc::clone(&self.told);
        Ok(Self { told, ..Self::try_new(limits)? })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Limit> {
        self.iter().find(|limit| limit.name() == name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Limit> {
        self.limits.iter()
    }

    /// The template of the route that a request is for: the router's own match, or that of the first limit that knows one.
    pub(crate) fn template<'a>(&'a self, parts: &'a Parts) -> Option<&'a str> {
        matched(parts).or_else(|| self.iter().find_map(|limit| limit.cost.template(parts)))
    }

    /// Asks each limit for its charge: the key is only looked for where there is a cost.
    pub(crate) fn demand(&self, parts: &Parts) -> Demand {
        let preflight = is_preflight(parts);
        let mut charges = Charges::None;
        for limit in &self.limits {
            match limit.charge(parts, preflight) {
                Ok(Some(charge)) => charges.push(charge),
                Ok(None) => {}
                Err(why) => {
                    if why == NoKey::Peer {
                        self.tell_of_no_peer();
                    }
                    if !limit.shadow {
                        return Demand::NoKey(why);
                    }
                }
            }
        }
        if charges.is_empty() {
            return Demand::Nothing;
        }
        if charges.iter().any(Charge::is_too_dear) {
            let refused = charges.iter().any(|charge| charge.is_too_dear() && !charge.is_shadow());
            if refused || charges.iter().all(Charge::is_too_dear) {
                return Demand::TooDear(charges);
            }
        }
        Demand::Charges(charges)
    }

    /// One line that says what to do about it.
    fn tell_of_no_peer(&self) {
        if !self.told.swap(true, Ordering::Relaxed) {
            log::error!(
                "the address of the peer is not in the request's extensions, so that requests are refused with 503 (by a \
                 shadow limit: not seen): serve with `into_make_service_with_connect_info::<SocketAddr>()`, insert a \
                 `SocketAddr`, or add an extractor with `.or(…)`"
            );
        }
    }
}
