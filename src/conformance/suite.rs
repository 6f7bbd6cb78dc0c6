//! The contract of a store, question by question.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::task::JoinSet;

use crate::charge::{Amount, Charge, LimitName};
use crate::decision::Decision;
use crate::error::or_panic;
use crate::key::BucketKey;
use crate::quota::Quota;
use crate::store::Store;

/// So slow that no whole token comes back while a test runs.
const SLOW: Duration = Duration::from_secs(3600);

/// Asks `store` all questions of the contract, with buckets that nobody else uses. Needs tokio, and takes about a second
/// of the store's clock.
///
/// # Panics
///
/// At the first answer that is wrong, with what was asked and what is right.
pub async fn check<S: Store>(store: &S) {
    let asked = &Asked { store, run: RandomState::new().hash_one("run") };
    a_fresh_bucket_holds_its_capacity(asked).await;
    a_refused_charge_takes_nothing(asked).await;
    buckets_are_named_by_limit_and_key(asked).await;
    all_charges_are_made_or_none(asked).await;
    the_same_bucket_twice_pays_twice(asked).await;
    a_shadow_charge_never_refuses(asked).await;
    spend_give_and_peek_are_clamped(asked).await;
    a_cost_above_the_capacity_never_passes(asked).await;
    a_changed_quota_keeps_the_tokens(asked).await;
    a_debt_refills_first(asked).await;
    a_promise_is_kept(asked).await;
    an_answer_at_once_is_the_same_step(asked).await;
    nobody_overdraws(asked).await;
}

/// The store, and what keeps the buckets of this run apart from those of others.
struct Asked<'a, S> {
    store: &'a S,
    run: u64,
}

impl<S: Store> Asked<'_, S> {
    fn charge(&self, limit: &str, key: &str, quota: Quota, amount: Amount) -> Charge {
        let key = BucketKey::id(format!("{}/{key}", self.run));
        Charge::new(or_panic(LimitName::try_new(limit)), key, quota, amount)
    }

    async fn acquire(&self, charges: &[Charge]) -> Decision {
        match self.store.acquire(charges).await {
            Ok(decision) => decision,
            Err(error) => panic!("the store fails: {error}"),
        }
    }

    /// Asks, and compares what is allowed and what remains in each bucket.
    #[track_caller]
    fn expect<'b>(
        &'b self,
        charges: &'b [Charge],
        allowed: bool,
        remaining: &'b [u64],
    ) -> impl Future<Output = Decision> + 'b {
        let caller = std::panic::Location::caller();
        async move {
            let decision = self.acquire(charges).await;
            let got: Vec<_> =
                decision.outcomes().iter().map(|outcome| outcome.remaining().unwrap_or_default()).collect();
            assert!(
                decision.is_allowed() == allowed && got == remaining,
                "{charges:?} is {}, and leaves {remaining:?}; the store says {}, and {got:?} ({caller})",
                if allowed { "allowed" } else { "denied" },
                if decision.is_allowed() { "allowed" } else { "denied" },
            );
            decision
        }
    }
}

fn slow(capacity: u64) -> Quota {
    Quota::new(1, SLOW).with_capacity(capacity)
}

use Amount::{Give, Peek, Spend, Take};

async fn a_fresh_bucket_holds_its_capacity(asked: &Asked<'_, impl Store>) {
    let take = |cost| [asked.charge("fresh", "a", slow(5), Take(cost))];
    asked.expect(&take(4), true, &[1]).await;
    asked.expect(&take(1), true, &[0]).await;
    let decision = asked.expect(&take(1), false, &[0]).await;
    let wait = decision.retry_after().unwrap_or_default();
    assert!(wait <= SLOW && wait > SLOW - Duration::from_secs(60), "an hour has to pass, not {wait:?}");
    let full = decision.reset_after().unwrap_or_default();
    assert!(full <= 5 * SLOW && full > 5 * SLOW - Duration::from_secs(60), "five hours fill it, not {full:?}");
    assert_eq!(decision.limit(), Some("fresh"), "the limit that refuses is named");
}

async fn a_refused_charge_takes_nothing(asked: &Asked<'_, impl Store>) {
    let take = |cost| [asked.charge("refused", "a", slow(10), Take(cost))];
    asked.expect(&take(8), true, &[2]).await;
    for _ in 0..3 {
        asked.expect(&take(5), false, &[2]).await;
    }
    asked.expect(&take(2), true, &[0]).await;
}

async fn buckets_are_named_by_limit_and_key(asked: &Asked<'_, impl Store>) {
    for (limit, key) in [("one", "a"), ("one", "b"), ("two", "a")] {
        asked.expect(&[asked.charge(limit, key, slow(2), Take(2))], true, &[0]).await;
    }
    asked.expect(&[asked.charge("one", "a", slow(2), Take(1))], false, &[0]).await;
}

async fn all_charges_are_made_or_none(asked: &Asked<'_, impl Store>) {
    for (limits, wide) in [(["wide", "narrow"], 0), (["narrow", "wide2"], 1)] {
        let charges = |key| {
            let quota = |limit: &str| if limit == "narrow" { slow(1) } else { slow(5) };
            limits.map(|limit| asked.charge(limit, key, quota(limit), Take(1)))
        };
        let key = limits.concat();
        let (first, second) = if wide == 0 { ([4, 0], [4, 0]) } else { ([0, 4], [0, 4]) };
        asked.expect(&charges(&key), true, &first).await;
        for _ in 0..3 {
            let decision = asked.expect(&charges(&key), false, &second).await;
            let refusing: Vec<_> =
                decision.outcomes().iter().filter(|outcome| outcome.refuses()).map(|outcome| outcome.limit()).collect();
            assert_eq!(refusing, ["narrow"], "the limit that refuses is named, and no other");
        }
    }
    let many = |cost| ["a", "b", "c", "d"].map(|limit| asked.charge(limit, "many", slow(9), Take(cost)));
    asked.expect(&many(4), true, &[5; 4]).await;
    asked.expect(&many(6), false, &[5; 4]).await;
    asked.expect(&many(5), true, &[0; 4]).await;
    // The longest wait counts.
    let fast = Quota::new(1, SLOW / 2);
    let both = [asked.charge("fast", "wait", fast, Take(1)), asked.charge("slow", "wait", slow(1), Take(1))];
    asked.expect(&both, true, &[0, 0]).await;
    let wait = asked.expect(&both, false, &[0, 0]).await.retry_after().unwrap_or_default();
    assert!(wait > SLOW - Duration::from_secs(60), "the slower limit has the longer wait, {wait:?} is the other's");
}

async fn the_same_bucket_twice_pays_twice(asked: &Asked<'_, impl Store>) {
    let twice = |cost| [0; 2].map(|_| asked.charge("twice", "a", slow(5), Take(cost)));
    asked.expect(&twice(3), false, &[5, 5]).await;
    asked.expect(&twice(2), true, &[3, 1]).await;
}

async fn a_shadow_charge_never_refuses(asked: &Asked<'_, impl Store>) {
    let charges = |cost| {
        [asked.charge("watched", "a", slow(2), Take(cost)).shadow(), asked.charge("enforced", "a", slow(6), Take(cost))]
    };
    asked.expect(&charges(2), true, &[0, 4]).await;
    let decision = asked.expect(&charges(2), true, &[0, 2]).await;
    assert!(!decision.outcomes()[0].is_allowed(), "a shadow charge says that the tokens are not there");
    // When an enforced charge refuses, a shadow charge is not made.
    let other = asked.charge("watched", "b", slow(9), Take(1)).shadow();
    let both = [other, asked.charge("enforced", "a", slow(6), Take(3))];
    asked.expect(&both, false, &[9, 2]).await;
}

async fn spend_give_and_peek_are_clamped(asked: &Asked<'_, impl Store>) {
    let one = |amount| [asked.charge("verbs", "a", slow(5), amount)];
    asked.expect(&one(Peek), true, &[5]).await;
    asked.expect(&one(Give(3)), true, &[5]).await;
    asked.expect(&one(Take(4)), true, &[1]).await;
    asked.expect(&one(Give(2)), true, &[3]).await;
    asked.expect(&one(Give(u64::MAX)), true, &[5]).await;
    asked.expect(&one(Take(0)), true, &[5]).await;
    asked.expect(&one(Spend(7)), true, &[0]).await;
    asked.expect(&one(Peek), true, &[0]).await;
    // A debt of 2: after 4 are given, 2 are there.
    asked.expect(&one(Give(4)), true, &[2]).await;
    // The debt ends at one negative capacity.
    asked.expect(&one(Spend(u64::MAX)), true, &[0]).await;
    asked.expect(&one(Give(5)), true, &[0]).await;
    asked.expect(&one(Give(1)), true, &[1]).await;
}

async fn a_cost_above_the_capacity_never_passes(asked: &Asked<'_, impl Store>) {
    for cost in [6, u64::MAX] {
        let decision = asked.expect(&[asked.charge("dear", "a", slow(5), Take(cost))], false, &[5]).await;
        assert_eq!(decision.retry_after(), None, "no wait helps a cost of {cost}");
    }
}

async fn a_changed_quota_keeps_the_tokens(asked: &Asked<'_, impl Store>) {
    let take = |quota, cost| [asked.charge("changed", "a", quota, Take(cost))];
    asked.expect(&take(slow(10), 4), true, &[6]).await;
    asked.expect(&take(slow(5), 1), true, &[4]).await;
    asked.expect(&take(slow(100), 1), true, &[3]).await;
    let other = Quota::new(3, SLOW).with_capacity(50);
    asked.expect(&take(other, 3), true, &[0]).await;
    // Two settings at once hand out no more than the larger.
    let mut passed = 0;
    for i in 0..220 {
        let capacity = if i % 2 == 0 { 100 } else { 10 };
        let charges = [asked.charge("rollout", "a", slow(capacity), Take(1))];
        passed += u32::from(asked.acquire(&charges).await.is_allowed());
    }
    assert!(passed <= 100, "capacities of 100 and 10 in turn admit {passed}, more than the larger");
}

async fn a_debt_refills_first(asked: &Asked<'_, impl Store>) {
    let one = |amount| [asked.charge("debt", "a", slow(2), amount)];
    asked.expect(&one(Spend(4)), true, &[0]).await;
    let wait = asked.expect(&one(Take(1)), false, &[0]).await.retry_after().unwrap_or_default();
    assert!(wait > 3 * SLOW - Duration::from_secs(60), "two hours of debt and one for the token, not {wait:?}");
}

async fn a_promise_is_kept(asked: &Asked<'_, impl Store>) {
    let take = [asked.charge("promise", "a", Quota::new(1, Duration::from_millis(400)), Take(1))];
    assert!(asked.acquire(&take).await.is_allowed(), "a fresh bucket is full");
    let decision = asked.acquire(&take).await;
    let wait = decision.retry_after().unwrap_or_default();
    assert!(!decision.is_allowed() && wait <= Duration::from_millis(400), "one token in 400 ms, not {wait:?}");
    // Timers have milliseconds, waits have microseconds.
    tokio::time::sleep(wait + Duration::from_millis(1)).await;
    assert!(asked.acquire(&take).await.is_allowed(), "it passes after the {wait:?} that were promised");
    assert!(!asked.acquire(&take).await.is_allowed(), "and only once");
}

async fn an_answer_at_once_is_the_same_step(asked: &Asked<'_, impl Store>) {
    let one = |amount| [asked.charge("at-once", "a", slow(3), amount)];
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..5 {
        let Some(decision) = asked.store.acquire_at_once(&one(Take(1))) else {
            // Then nothing has been charged.
            asked.expect(&one(Peek), true, &[3 - taken]).await;
            continue;
        };
        if decision.is_allowed() {
            taken += 1;
        } else {
            refused += 1;
        }
        let left = 3u64.saturating_sub(taken);
        assert_eq!(decision.remaining(), Some(left), "what is left after {taken} of 3 tokens were taken at once");
        // Whoever asks by `acquire` finds the same bucket.
        asked.expect(&one(Peek), true, &[left]).await;
    }
    assert!(taken <= 3 && (refused == 0 || taken == 3), "{taken} of 3 taken at once, {refused} refused");
}

async fn nobody_overdraws(asked: &Asked<'_, impl Store>) {
    let pair =
        |cost| [asked.charge("hot", "a", slow(500), Take(cost)), asked.charge("hot2", "a", slow(700), Take(cost))];
    let mut tasks = JoinSet::new();
    for task in 0..32u64 {
        let store = asked.store.clone();
        let cost = 1 + task % 3;
        let charges = pair(cost);
        tasks.spawn(async move {
            let mut taken = 0;
            for _ in 0..40 {
                match store.acquire(&charges).await {
                    Ok(decision) if decision.is_allowed() => taken += cost,
                    Ok(_) => {}
                    Err(error) => panic!("the store fails: {error}"),
                }
            }
            taken
        });
    }
    let mut taken = 0;
    while let Some(joined) = tasks.join_next().await {
        taken += match joined {
            Ok(taken) => taken,
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
    }
    // What is too little for those who still asked.
    while asked.acquire(&pair(1)).await.is_allowed() {
        taken += 1;
    }
    assert_eq!(taken, 500, "32 tasks share 500 tokens");
    asked.expect(&pair(1), false, &[0, 200]).await;
}
