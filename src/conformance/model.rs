//! The exact model, with the clock as an argument.

use std::collections::HashMap;

use crate::bucket::{self, State};
use crate::charge::Charge;
use crate::decision::Reply;
use crate::key::BucketKey;

/// Buckets as every store has to keep them, with the time as an argument.
///
/// # Example
///
/// ```
/// use tower_token_bucket::conformance::Model;
/// use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, Quota};
///
/// let mut model = Model::default();
/// let name = LimitName::try_new("jobs")?;
/// let take = [Charge::new(name, BucketKey::global(), Quota::per_second(1), Amount::Take(1))];
/// assert!(model.acquire(&take, 5_000_000)[0].is_allowed());
/// assert!(!model.acquire(&take, 5_999_999)[0].is_allowed());
/// assert_eq!(model.state(&take[0]).as_deref(), Some("5000000:1:1:1000000:0"));
/// assert!(model.acquire(&take, 6_000_000)[0].is_allowed());
/// # Ok::<(), tower_token_bucket::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Model {
    buckets: HashMap<(String, BucketKey), State>,
}

impl Model {
    /// Makes all charges or none at `now_us`, in microseconds, and replies to each in order.
    ///
    /// A bucket is kept until [`forget`](Self::forget), whatever its life.
    pub fn acquire(&mut self, charges: &[Charge], now_us: u64) -> Vec<Reply> {
        let mut names: Vec<(String, BucketKey)> = Vec::new();
        let mut slots = Vec::new();
        for charge in charges {
            let name = Self::name(charge);
            let slot = names.iter().position(|known| *known == name).unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            });
            slots.push(slot);
        }
        let mut states: Vec<_> = names.iter().map(|name| self.buckets.get(name).copied()).collect();
        let before = states.clone();
        let replies = bucket::acquire(charges, &slots, &before, &mut states, now_us);
        for (name, state) in names.into_iter().zip(states) {
            if let Some(state) = state {
                self.buckets.insert(name, state);
            }
        }
        replies.into_vec()
    }

    /// The stored state of a charge's bucket: `at:capacity:tokens:per:level`, where `at` is in microseconds, and the
    /// level in units of 1/`per` token at a refill rate of `tokens` per `per` microseconds.
    #[must_use]
    pub fn state(&self, charge: &Charge) -> Option<String> {
        self.buckets.get(&Self::name(charge)).map(State::to_string)
    }

    /// How long the stored state of a charge's bucket has to be kept, counted from `now_us`, in milliseconds.
    #[must_use]
    pub fn life_ms(&self, charge: &Charge, now_us: u64) -> Option<u64> {
        self.buckets.get(&Self::name(charge)).map(|state| state.life_ms(now_us))
    }

    /// Forgets a charge's bucket, as a store does when its life is over.
    pub fn forget(&mut self, charge: &Charge) {
        self.buckets.remove(&Self::name(charge));
    }

    fn name(charge: &Charge) -> (String, BucketKey) {
        (charge.limit().as_str().to_owned(), *charge.key())
    }
}
