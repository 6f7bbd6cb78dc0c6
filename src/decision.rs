//! The store's answer, and what follows from it.

use std::fmt;
use std::time::Duration;

use http::HeaderValue;

use crate::charge::{Charge, LimitName};
use crate::few::Few;
use crate::quota::Quota;

/// What a store says of one charge: the level, and whether the tokens were there.
///
/// An implementer of [`Store`](crate::Store) makes a [`Decision`] of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    level: i64,
    ahead_us: u32,
    allowed: bool,
}

impl Reply {
    /// Creates a reply. `level` is what the bucket holds now, in units of 1/p token where the charge's quota refills n
    /// tokens per p microseconds in lowest terms; negative is a debt. `ahead_us`, at most 1 000 000, is by how many
    /// microseconds the bucket's time lies ahead of the clock, which has stepped back by as much.
    #[must_use]
    pub const fn new(level: i64, allowed: bool, ahead_us: u64) -> Self {
        let ahead_us = if ahead_us > 1_000_000 { 1_000_000 } else { ahead_us as u32 };
        Self { level, ahead_us, allowed }
    }

    /// Whether the tokens were there.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// The level, in units of 1/p token.
    #[must_use]
    pub const fn level(&self) -> i64 {
        self.level
    }

    /// By how many microseconds the bucket's time lies ahead of the clock.
    #[must_use]
    pub const fn ahead_us(&self) -> u64 {
        self.ahead_us as u64
    }
}

/// Where a decision comes from.
/// # Example
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// use tower_token_bucket::{Limit, MemoryStore, Quota, Source, TokenBucketLayer};
///
/// /// How many requests were decided without the store.
/// let blind = Arc::new(AtomicU64::new(0));
/// let count = Arc::clone(&blind);
/// let limit = Limit::new("per-address", Quota::per_second(10));
/// let layer = TokenBucketLayer::new(MemoryStore::new(), limit).on_decision(move |decision| {
///     if matches!(decision.source(), Source::Local | Source::Policy) {
///         count.fetch_add(1, Relaxed);
///     }
/// });
/// # let _ = layer;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The store answered.
    Store,
    /// An earlier denial, remembered by this instance.
    Remembered,
    /// The store failed, and this instance's own buckets answered
    /// ([`OnStoreFailure::Local`](crate::OnStoreFailure::Local)).
    Local,
    /// Nothing is charged: every cost is 0, or the request is a CORS preflight.
    Exempt,
    /// The store failed, and the request was let through or refused by policy
    /// ([`OnStoreFailure::Allow`](crate::OnStoreFailure::Allow), [`Deny`](crate::OnStoreFailure::Deny)).
    Policy,
    /// The layer refused without asking the store: too dear, no key, or no peer address.
    Layer,
}

impl Source {
    /// In one word.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Remembered => "remembered",
            Self::Local => "local",
            Self::Exempt => "exempt",
            Self::Policy => "policy",
            Self::Layer => "layer",
        }
    }
}

/// The store's answer to all charges of a request.
///
/// It is in the extensions of every request that reaches the inner service, where a handler can read it, and of every
/// response, where an outer layer can log it.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, MemoryStore, Quota, Store};
///
/// # tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
/// let store = MemoryStore::new();
/// let name = LimitName::try_new("jobs")?;
/// let charge = |cost| [Charge::new(name.clone(), BucketKey::global(), Quota::per_second(5), Amount::Take(cost))];
/// let decision = store.acquire(&charge(4)).await?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.remaining(), Some(1));
/// let decision = store.acquire(&charge(5)).await?;
/// assert!(!decision.is_allowed() && decision.retry_after().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Decision {
    outcomes: Few<Outcome>,
    allowed: bool,
    source: Source,
}

impl Decision {
    /// Creates a store's decision from its replies, one for each charge and in their order.
    ///
    /// `None` when there are fewer or more replies than charges: what answered did not understand the question.
    #[must_use]
    pub fn new(charges: &[Charge], replies: &[Reply]) -> Option<Self> {
        (charges.len() == replies.len()).then(|| Self::of_replies(charges, replies.iter().copied().map(Some)))
    }

    /// The decision about one charge.
    pub(crate) fn of_one(charge: &Charge, reply: Reply) -> Self {
        let outcome = Outcome::new(charge, Some(reply));
        Self { allowed: !outcome.refuses(), outcomes: Few::One(outcome), source: Source::Store }
    }

    /// The same where a charge may have no reply: nothing is known of it.
    pub(crate) fn of_replies(charges: &[Charge], replies: impl IntoIterator<Item = Option<Reply>>) -> Self {
        let outcomes = charges.iter().zip(replies).map(|(charge, reply)| Outcome::new(charge, reply));
        let mut decision = Self::of(outcomes.collect(), Source::Store);
        if !decision.allowed && charges.len() > 1 {
            // Where a bucket is charged twice, the second charge needs what the first takes as well.
            let takes = decision.outcomes.iter_mut().enumerate().filter(|(_, outcome)| outcome.cost > 0);
            for (i, outcome) in takes {
                let same = |earlier: &&Charge| earlier.cost() > 0 && earlier.is_same_bucket(&charges[i]);
                for earlier in charges[..i].iter().filter(same) {
                    outcome.need(earlier.cost());
                }
            }
        }
        decision
    }

    /// The decision of the layer itself about charges that no store has seen.
    pub(crate) fn unasked(charges: &[Charge]) -> Self {
        Self::of(charges.iter().map(|charge| Outcome::new(charge, None)).collect(), Source::Layer)
    }

    fn of(outcomes: Few<Outcome>, source: Source) -> Self {
        let allowed = !outcomes.iter().any(Outcome::refuses);
        Self { outcomes, allowed, source }
    }

    /// A decision without outcomes.
    pub(crate) fn bare(allowed: bool, source: Source) -> Self {
        Self { outcomes: Few::None, allowed, source }
    }

    pub(crate) fn with_source(mut self, source: Source) -> Self {
        self.source = source;
        self
    }

    /// The same, with the costs that were asked for in the place of those that were charged.
    pub(crate) fn with_costs_of(mut self, charges: &[Charge]) -> Self {
        for (outcome, charge) in self.outcomes.iter_mut().zip(charges) {
            outcome.cost = charge.cost();
        }
        self
    }

    /// Whether the request may go on: no enforced limit refuses.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// Whole tokens left in the bucket of the limit that [bound](Self::bound): 0 or more. `None` when no bucket was
    /// asked.
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.bound().and_then(Outcome::remaining)
    }

    /// Time until the request could pass: the longest wait among the limits that refuse, exact to the microsecond.
    /// `None` when it is allowed, and when no wait would help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let mut longest = None;
        for outcome in self.outcomes.iter().filter(|outcome| outcome.refuses()) {
            longest = longest.max(Some(outcome.retry_after()?));
        }
        longest
    }

    /// Time until the bucket of the limit that [bound](Self::bound) is full. `None` when no bucket was asked.
    #[must_use]
    pub fn reset_after(&self) -> Option<Duration> {
        self.bound().and_then(Outcome::reset_after)
    }

    /// The outcome of the limit that bound: the one with the longest wait when denied, the one with the least
    /// remaining share of its capacity when allowed. Shadow limits never bind.
    #[must_use]
    pub fn bound(&self) -> Option<&Outcome> {
        let enforced = self.outcomes.iter().filter(|outcome| !outcome.is_shadow());
        if self.allowed {
            // a/b < c/d without a division: levels and capacities in units, so below 2^51 each.
            let share = |outcome: &Outcome| {
                let level = outcome.reply.map_or(0, |reply| reply.level());
                (i128::from(level), i128::from(outcome.quota.full()))
            };
            enforced.min_by(|a, b| {
                let ((a, a_full), (b, b_full)) = (share(a), share(b));
                (a * b_full).cmp(&(b * a_full))
            })
        } else {
            // No wait helps where the cost is above the capacity: longer than any. `rev`: the first of equals.
            let wait = |outcome: &&Outcome| outcome.retry_after().unwrap_or(Duration::MAX);
            enforced.filter(|outcome| outcome.refuses()).rev().max_by_key(wait)
        }
    }

    /// The name of the limit that [bound](Self::bound).
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        self.bound().map(Outcome::limit)
    }

    /// What each limit says, in order of declaration; limits whose cost is 0 say nothing.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// Where the decision comes from.
    #[must_use]
    pub fn source(&self) -> Source {
        self.source
    }
}

/// What one limit says of a request.
/// # Example
///
/// ```
/// use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, MemoryStore, Quota, Store};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let (second, day) = (LimitName::try_new("second")?, LimitName::try_new("day")?);
/// let take = |cost| {
///     [
///         Charge::new(second.clone(), BucketKey::global(), Quota::per_second(5), Amount::Take(cost)),
///         Charge::new(day.clone(), BucketKey::global(), Quota::per_day(1_000), Amount::Take(cost)),
///     ]
/// };
/// let store = MemoryStore::new();
/// store.acquire(&take(4)).await?;
/// let decision = store.acquire(&take(2)).await?;
/// let [second, day] = decision.outcomes() else { unreachable!("one for each charge") };
/// assert!(second.refuses() && !day.refuses());
/// assert_eq!(second.remaining(), Some(1));
/// assert_eq!(second.retry_after().unwrap().as_millis(), 200); // until there are two
/// assert_eq!(day.remaining(), Some(996)); // it keeps what the other has refused
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Outcome {
    limit: LimitName,
    quota: Quota,
    cost: u64,
    /// What has to be in the bucket for this cost to pass.
    needed: u64,
    shadow: bool,
    /// `None` when the store was not asked.
    reply: Option<Reply>,
}

impl Outcome {
    fn new(charge: &Charge, reply: Option<Reply>) -> Self {
        Self {
            limit: charge.limit().clone(),
            quota: charge.quota(),
            cost: charge.cost(),
            needed: charge.cost(),
            shadow: charge.is_shadow(),
            reply,
        }
    }

    /// The item of `RateLimit-Policy`.
    pub(crate) fn policy(&self) -> HeaderValue {
        self.limit.policy(&self.quota)
    }

    /// Needs `more` tokens in the bucket than its own cost.
    fn need(&mut self, more: u64) {
        self.needed = self.needed.saturating_add(more);
        if let Some(reply) = &mut self.reply {
            let units = u128::from(self.needed) * u128::from(self.quota.per_us());
            reply.allowed = u128::try_from(reply.level).is_ok_and(|level| level >= units);
        }
    }

    /// What the store said of this charge.
    pub(crate) fn reply(&self) -> Option<Reply> {
        self.reply
    }

    /// Whether a charge is for this limit, under the same quota and in the same mode.
    #[cfg(feature = "redis")]
    pub(crate) fn is_of(&self, charge: &Charge) -> bool {
        self.shadow == charge.is_shadow() && self.quota == charge.quota() && self.limit == *charge.limit()
    }

    /// Whether another is of this limit, under the same quota and in the same mode.
    #[cfg(feature = "redis")]
    pub(crate) fn is_like(&self, other: &Self) -> bool {
        self.shadow == other.shadow && self.quota == other.quota && self.limit == other.limit
    }

    /// The limit's name.
    #[must_use]
    pub fn limit(&self) -> &str {
        self.limit.as_str()
    }

    /// Capacity and refill rate that were applied.
    #[must_use]
    pub fn quota(&self) -> Quota {
        self.quota
    }

    /// The tokens that were asked for.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether this limit only watches.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.shadow
    }

    /// Whether this limit, by itself, has the tokens; `false` when it was not asked.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.reply.is_some_and(|reply| reply.is_allowed()) && !self.is_too_dear()
    }

    /// Whether the cost is above the capacity, so that no wait can make it pass.
    #[must_use]
    pub fn is_too_dear(&self) -> bool {
        self.needed > self.quota.capacity()
    }

    /// Whether this limit keeps the request from the inner service.
    #[must_use]
    pub fn refuses(&self) -> bool {
        let denied = self.reply.is_some_and(|reply| !reply.is_allowed());
        !self.shadow && (denied || self.is_too_dear())
    }

    /// Whole tokens in the bucket after the decision: 0 to the capacity. `None` when it was not asked.
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.reply.map(|reply| reply.level().max(0) as u64 / self.quota.per_us())
    }

    /// Time until this cost could pass, with no other traffic: exact to the microsecond. `None` when the tokens are
    /// there, and when no wait would help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        let reply = self.reply.filter(|reply| !reply.is_allowed() && !self.is_too_dear())?;
        let needed = (self.needed * self.quota.per_us()) as i64;
        Some(self.wait_for(needed, reply))
    }

    /// Time until the bucket is full. `None` when it was not asked.
    #[must_use]
    pub fn reset_after(&self) -> Option<Duration> {
        self.reply.map(|reply| self.wait_for(self.quota.full(), reply))
    }

    /// Time until the next whole token: for an empty bucket the time until something can pass again.
    pub(crate) fn next_token_after(&self) -> Option<Duration> {
        self.reply.map(|reply| {
            let next = reply.level().div_euclid(self.quota.per_us() as i64) + 1;
            self.wait_for(next.max(1) * self.quota.per_us() as i64, reply)
        })
    }

    /// Time until the bucket holds `needed` units.
    fn wait_for(&self, needed: i64, reply: Reply) -> Duration {
        let missing = (needed - reply.level()).max(0) as u64;
        if missing == 0 {
            return Duration::ZERO;
        }
        Duration::from_micros(reply.ahead_us() + missing.div_ceil(self.quota.tokens()))
    }
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("limit", &self.limit)
            .field("cost", &self.cost)
            .field("shadow", &self.shadow)
            .field("allowed", &self.is_allowed())
            .field("remaining", &self.remaining())
            .field("retry_after", &self.retry_after())
            .field("reset_after", &self.reset_after())
            .finish_non_exhaustive()
    }
}
