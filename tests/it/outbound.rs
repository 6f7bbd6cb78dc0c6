//! The sender's side: who waits, for how long, in which order, and what is sent when the store fails.

use std::collections::HashMap;
use std::future::{Future, pending};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::task::{JoinHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep};
use tower_token_bucket::conformance::Model;
use tower_token_bucket::outbound::{AcquireError, Limiter};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Limit, LimitName, MemoryStore, OnStoreFailure, Quota, Store,
};

const NAME: &str = "peer";
/// Longer than anything here takes, in virtual time.
const LONG: Duration = Duration::from_secs(3600);

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// `capacity` tokens, and as many a second as `rate` says.
fn b(capacity: u64, rate: u64) -> Quota {
    Quota::per_second(rate).with_capacity(capacity)
}

fn key(name: impl std::fmt::Display) -> BucketKey {
    BucketKey::id(name.to_string())
}

fn charge(key: BucketKey, quota: Quota, amount: Amount) -> [Charge; 1] {
    [Charge::new(LimitName::try_new(NAME).unwrap(), key, quota, amount)]
}

fn no_tokens(retry_after: Duration) -> AcquireError {
    AcquireError::NoTokens { retry_after }
}

/// A question that the store was asked, and its answer.
#[derive(Clone, Debug)]
struct Question {
    at: Duration,
    cost: u64,
    allowed: bool,
    wait: Option<Duration>,
}

/// A memory store that keeps its questions, answers as late as a test wishes, fails, and lets others in between.
#[derive(Clone)]
struct Watched {
    buckets: MemoryStore,
    started: Instant,
    questions: Arc<Mutex<Vec<Question>>>,
    latency: Duration,
    broken: Arc<AtomicBool>,
    silent: Arc<AtomicBool>,
    asked: Arc<AtomicU64>,
    /// What others do right after the n-th question, counted from 1.
    between: Arc<Mutex<HashMap<u64, Box<dyn FnOnce() + Send>>>>,
}

impl Watched {
    fn new() -> Self {
        Self::on(MemoryStore::new())
    }

    fn on(buckets: MemoryStore) -> Self {
        Self {
            buckets,
            started: Instant::now(),
            questions: Arc::default(),
            latency: Duration::ZERO,
            broken: Arc::default(),
            silent: Arc::default(),
            asked: Arc::default(),
            between: Arc::default(),
        }
    }

    fn late(latency: Duration) -> Self {
        Self { latency, ..Self::new() }
    }

    fn calls(&self) -> u64 {
        self.asked.load(Relaxed)
    }

    fn questions(&self) -> Vec<Question> {
        self.questions.lock().unwrap().clone()
    }

    fn after_question(&self, n: u64, others: impl FnOnce() + Send + 'static) {
        self.between.lock().unwrap().insert(n, Box::new(others));
    }

    fn level(&self, key: BucketKey, quota: Quota) -> i64 {
        level(&self.buckets, key, quota)
    }
}

/// What a bucket holds, in units of its quota.
fn level(store: &MemoryStore, key: BucketKey, quota: Quota) -> i64 {
    // The whole tokens, and how long the rest takes: exact to the microsecond.
    let decision = at_once(store.acquire(&charge(key, quota, Amount::Peek))).unwrap();
    -i64::try_from(decision.reset_after().unwrap().as_micros()).unwrap()
}

impl Store for Watched {
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, io::Error>> + Send>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        let n = self.asked.fetch_add(1, Relaxed) + 1;
        if self.silent.load(Relaxed) {
            return Box::pin(pending());
        }
        if self.broken.load(Relaxed) {
            return Box::pin(async { Err(io::Error::other("connection refused")) });
        }
        let decision = at_once(self.buckets.acquire(charges)).unwrap();
        self.questions.lock().unwrap().push(Question {
            at: self.started.elapsed(),
            cost: charges[0].cost(),
            allowed: decision.is_allowed(),
            wait: decision.retry_after(),
        });
        let others = self.between.lock().unwrap().remove(&n);
        if let Some(others) = others {
            others();
        }
        let latency = self.latency;
        Box::pin(async move {
            if !latency.is_zero() {
                sleep(latency).await;
            }
            Ok(decision)
        })
    }
}

fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

fn at_once<F: Future>(future: F) -> F::Output {
    match poll(std::pin::pin!(future)) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("not at once"),
    }
}

/// Waits in a task of its own; it is in the queue when this returns.
async fn wait<St: Store>(limiter: &Limiter<St>, key: BucketKey, cost: u64) -> JoinHandle<(Outcome, Instant)> {
    let limiter = limiter.clone();
    let task = tokio::spawn(async move {
        let outcome = limiter.acquire(key, cost).await;
        (outcome, Instant::now())
    });
    settle().await;
    task
}

type Outcome = Result<Duration, AcquireError>;

/// Lets all tasks run that can, with no time passing.
async fn settle() {
    for _ in 0..50 {
        yield_now().await;
    }
}

/// The same numbers on every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Panics when more was granted than the quota allows in some interval, whatever it is: (when, how much), in order.
#[track_caller]
fn assert_within(quota: Quota, grants: &[(Duration, u64)]) {
    let mut model = Model::default();
    for (i, (at, cost)) in grants.iter().enumerate() {
        let take = charge(key(""), quota, Amount::Take(*cost));
        let reply = model.acquire(&take, at.as_micros() as u64)[0];
        assert!(reply.is_allowed(), "grant {i} of {cost} at {at:?} is above {quota}");
    }
}

// Order and number of questions: django-redis-aiogram#95 woke up 110 685 times for 500 waiters.

#[tokio::test(start_paused = true)]
async fn five_hundred_waiters_are_served_in_order_at_the_rate_with_about_one_question_each() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(1, 100)).max_wait(LONG);
    let started = Instant::now();
    let grants = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for i in 0..500 {
        let (limiter, grants) = (limiter.clone(), Arc::clone(&grants));
        tasks.spawn(async move {
            let waited = limiter.acquire(key("a"), 1).await.unwrap();
            assert_eq!(waited, started.elapsed(), "the time waited is what is returned");
            grants.lock().unwrap().push((i, started.elapsed()));
        });
    }
    tasks.join_all().await;
    let grants = grants.lock().unwrap();
    for (i, (who, at)) in grants.iter().enumerate() {
        assert_eq!((*who, *at), (i, ms(10) * i as u32), "first come, first served, every 10 ms");
    }
    assert_eq!(started.elapsed(), ms(4990));
    assert!(store.calls() <= 750, "{} questions for 500 grants", store.calls());
    println!("500 waiters, B(1,100/s): {} questions", store.calls());
}

#[tokio::test(start_paused = true)]
async fn above_a_thousand_a_second_several_waiters_share_a_question() {
    let store = Watched::new();
    let quota = b(50, 20_000);
    let limiter = Limiter::new(store.clone(), NAME, quota);
    let grants = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for i in 0..2000 {
        let (limiter, grants) = (limiter.clone(), Arc::clone(&grants));
        tasks.spawn(async move {
            limiter.acquire(key("a"), 1).await.unwrap();
            grants.lock().unwrap().push((i, started.elapsed()));
        });
    }
    tasks.join_all().await;
    let grants = grants.lock().unwrap();
    assert!(grants.iter().map(|(i, _)| *i).eq(0..2000));
    let spent: Vec<_> = grants.iter().map(|(_, at)| (*at, 1)).collect();
    assert_within(quota, &spent);
    // (2000 − 50) / 20 a millisecond.
    assert_eq!(started.elapsed(), ms(98));
    assert!(store.calls() < 210, "{} questions for 2000 grants", store.calls());
    println!("2000 waiters, B(50,20000/s): {} questions", store.calls());
}

/// aiolimiter#290, firecracker#2048.
#[tokio::test(start_paused = true)]
async fn a_large_cost_that_came_first_is_served_first_though_small_ones_keep_coming() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).max_wait(LONG);
    // Before: they have drained the bucket.
    for _ in 0..10 {
        limiter.try_acquire(key("a"), 1).await.unwrap();
    }
    let started = Instant::now();
    let large = wait(&limiter, key("a"), 10).await;
    let mut small = Vec::new();
    for _ in 0..200 {
        small.push(wait(&limiter, key("a"), 1).await);
        assert!(limiter.try_acquire(key("a"), 1).await.is_err(), "others wait");
        sleep(ms(10)).await;
    }
    let (outcome, at) = large.await.unwrap();
    assert_eq!((outcome, at - started), (Ok(ms(1000)), ms(1000)));
    for (i, small) in small.into_iter().enumerate() {
        let (outcome, at) = small.await.unwrap();
        outcome.unwrap();
        assert_eq!(at - started, ms(1100) + ms(100) * i as u32);
    }
}

#[tokio::test(start_paused = true)]
async fn costs_of_all_sizes_are_served_in_order_and_never_above_the_quota() {
    for seed in 1..=20 {
        let mut dice = Dice(seed);
        let store = Watched::late(ms(dice.below(3) * 4));
        let quota = b(20, 1 + dice.below(1000));
        let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG);
        let started = Instant::now();
        let grants = Arc::new(Mutex::new(Vec::new()));
        let mut tasks = JoinSet::new();
        for i in 0..300 {
            let cost = 1 + dice.below(20);
            let (limiter, grants) = (limiter.clone(), Arc::clone(&grants));
            tasks.spawn(async move {
                limiter.acquire(key("a"), cost).await.unwrap();
                grants.lock().unwrap().push((i, cost));
            });
            if dice.below(10) == 0 {
                sleep(ms(dice.below(200))).await;
            }
        }
        tasks.join_all().await;
        assert!(grants.lock().unwrap().iter().map(|(i, _)| *i).eq(0..300), "in order");
        let taken: u64 = grants.lock().unwrap().iter().map(|(_, cost)| cost).sum();
        let questions = store.questions();
        let spent: u64 = questions.iter().filter(|question| question.allowed).map(|question| question.cost).sum();
        assert_eq!(taken, spent, "what the store gave is what the waiters have");
        // Where a cost takes longer than a second to come, the head asks every second.
        let most = 450 + started.elapsed().as_secs();
        assert!(questions.len() as u64 <= most, "{} questions for 300 grants", questions.len());
    }
}

// Waiters that leave: dotnet#64078, leaky-bucket#30 and #39.

/// What comes of a crowd of which half leaves.
struct Crowd {
    /// (who, when, cost), as they were served.
    served: Vec<(usize, Duration, u64)>,
    /// Who has not left.
    stayed: Vec<usize>,
    store: Watched,
    quota: Quota,
    elapsed: Duration,
}

/// A thousand waiters with these costs, of which half leaves at random: before, while the store is asked, and when their
/// tokens were just given.
async fn crowd(seed: u64, quota: Quota, latency: Duration, cost: impl Fn(&mut Dice) -> u64) -> Crowd {
    let mut dice = Dice(seed);
    let store = Watched::late(latency);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG);
    let mut waiting: Vec<_> = (0..1000)
        .map(|i| {
            let cost = cost(&mut dice);
            let limiter = limiter.clone();
            let mut future = Box::pin(async move { limiter.acquire(key("a"), cost).await });
            assert!(poll(future.as_mut()).is_pending());
            (i, cost, future)
        })
        .collect();
    let mut leave: Vec<_> = (0..999).filter(|_| dice.below(2) == 0).collect();
    let mut stayed: Vec<_> = (0..1000).collect();
    let started = Instant::now();
    let mut served = Vec::new();
    while !waiting.is_empty() {
        settle().await;
        // Those at the front most often: they may have their tokens, and not know it.
        let front: Vec<_> = waiting.iter().take(4).map(|(i, ..)| *i).collect();
        let mut go: Vec<_> = front.into_iter().filter(|i| leave.contains(i)).collect();
        if !leave.is_empty() && dice.below(8) == 0 {
            go.push(leave[dice.below(leave.len() as u64) as usize]);
        }
        leave.retain(|i| !go.contains(i));
        stayed.retain(|i| !go.contains(i));
        waiting.retain(|(i, ..)| !go.contains(i));
        waiting.retain_mut(|(i, cost, future)| match poll(future.as_mut()) {
            Poll::Ready(outcome) => {
                outcome.unwrap();
                served.push((*i, started.elapsed(), *cost));
                leave.retain(|leaves| leaves != i);
                false
            }
            Poll::Pending => true,
        });
        if !waiting.is_empty() {
            sleep(ms(1)).await;
        }
    }
    let elapsed = started.elapsed();
    Crowd { served, stayed, store, quota, elapsed }
}

impl Crowd {
    /// Asserts the order, that each was within the quota, and that the bucket holds what it would if the others had never
    /// been there.
    #[track_caller]
    fn assert_nothing_lost(&self, seed: u64) {
        let order: Vec<_> = self.served.iter().map(|(i, ..)| *i).collect();
        assert_eq!(order, self.stayed, "seed {seed}: those who stay are served in order");
        let spent: Vec<_> = self.served.iter().map(|(_, at, cost)| (*at, *cost)).collect();
        assert_within(self.quota, &spent);
        let taken: u64 = self.store.questions().iter().filter(|it| it.allowed).map(|it| it.cost).sum();
        let given: u64 = self.served.iter().map(|(.., cost)| cost).sum();
        assert_eq!(taken, given, "seed {seed}: what was taken from the bucket is what those have who stayed");
    }
}

#[tokio::test(start_paused = true)]
async fn when_half_of_a_thousand_waiters_leave_the_others_are_served_in_order_and_nothing_is_lost() {
    for seed in 1..=8 {
        let quota = b(5, 500);
        let latency = ms(if seed % 2 == 0 { 3 } else { 0 });
        let crowd = crowd(seed, quota, latency, |_| 1).await;
        crowd.assert_nothing_lost(seed);
        // The exact model, asked when the store was.
        let mut model = Model::default();
        for question in crowd.store.questions() {
            let take = charge(key("a"), quota, Amount::Take(question.cost));
            assert_eq!(model.acquire(&take, question.at.as_micros() as u64)[0].is_allowed(), question.allowed);
        }
        let peek = charge(key("a"), quota, Amount::Peek);
        let now = crowd.store.started.elapsed().as_micros() as u64;
        let outcome = Decision::new(&peek, &model.acquire(&peek, now)).unwrap();
        let missing = outcome.reset_after().unwrap().as_micros() as i64;
        assert_eq!(crowd.store.level(key("a"), quota), -missing);
        if latency.is_zero() {
            let grants = crowd.served.len() as u64;
            let most = ms(2) * (grants as u32) + ms(5);
            assert!(crowd.elapsed <= most, "{grants} grants in {:?}", crowd.elapsed);
            assert!(crowd.store.calls() * 2 <= grants * 3, "{} questions, {grants} grants", crowd.store.calls());
            println!("seed {seed}: {} questions, {grants} grants, {:?}", crowd.store.calls(), crowd.elapsed);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_that_leaves_frees_its_place_at_once_for_a_cheaper_one_behind() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(10, 10)).max_wait(LONG);
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let started = Instant::now();
    let head = wait(&limiter, key("a"), 10).await;
    let second = wait(&limiter, key("a"), 2).await;
    let third = wait(&limiter, key("a"), 3).await;
    sleep(ms(500)).await;
    head.abort();
    let (outcome, at) = second.await.unwrap();
    assert_eq!((outcome, at - started), (Ok(ms(500)), ms(500)), "its tokens are there");
    let (outcome, at) = third.await.unwrap();
    assert_eq!((outcome, at - started), (Ok(ms(500)), ms(500)));
    assert_eq!(limiter.try_acquire(key("a"), 1).await, Err(no_tokens(ms(100))), "and no more");
}

#[tokio::test(start_paused = true)]
async fn one_in_the_middle_that_leaves_frees_its_place_too() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).max_wait(LONG);
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let started = Instant::now();
    let first = wait(&limiter, key("a"), 1).await;
    let middle = wait(&limiter, key("a"), 8).await;
    let last = wait(&limiter, key("a"), 1).await;
    sleep(ms(50)).await;
    middle.abort();
    assert_eq!(first.await.unwrap().1 - started, ms(100));
    assert_eq!(last.await.unwrap().1 - started, ms(200));
}

#[tokio::test(start_paused = true)]
async fn who_leaves_before_the_first_poll_has_taken_nothing_and_no_place() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(1, 1)).max_waiters(1);
    drop(limiter.acquire(key("a"), 1));
    drop(limiter.try_acquire(key("a"), 1));
    settle().await;
    assert_eq!(store.calls(), 0);
    limiter.try_acquire(key("a"), 1).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn all_that_leave_leave_nothing_behind() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(10, 10)).max_wait(LONG).max_waiters(100);
    let before = Handle::current().metrics().num_alive_tasks();
    for round in 1..=20 {
        let mut waiters: Vec<_> = (0..100).map(|i| Box::pin(limiter.acquire(key(i % 10), 10))).collect();
        for waiter in &mut waiters {
            assert!(poll(waiter.as_mut()).is_pending());
        }
        settle().await;
        assert_eq!(poll(Box::pin(limiter.acquire(key("b"), 1)).as_mut()), Poll::Ready(Err(AcquireError::Crowded)));
        drop(waiters);
        settle().await;
        assert_eq!(Handle::current().metrics().num_alive_tasks(), before, "round {round}");
    }
    let calls = store.calls();
    sleep(Duration::from_secs(100)).await;
    assert_eq!(store.calls(), calls, "nobody waits, so nobody asks");
}

// What is refused at once: resilience4j#2194 sleeps the whole timeout though it cannot win.

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_fails_at_once_with_the_exact_time_and_takes_nothing() {
    let store = Watched::new();
    let quota = b(10, 10);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(ms(900));
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let started = Instant::now();
    let before = store.level(key("a"), quota);
    assert_eq!(limiter.acquire(key("a"), 10).await, Err(no_tokens(ms(1000))));
    // Behind one that waits: with what that one takes, and without a question.
    let first = wait(&limiter, key("a"), 5).await;
    let calls = store.calls();
    assert_eq!(limiter.acquire(key("a"), 5).await, Err(no_tokens(ms(1000))));
    assert_eq!(limiter.try_acquire(key("a"), 1).await, Err(no_tokens(ms(600))));
    assert_eq!(store.calls(), calls);
    assert_eq!(started.elapsed(), Duration::ZERO, "no time has passed");
    assert_eq!(store.level(key("a"), quota), before, "nothing was taken");
    // At the very moment is in time.
    let second = wait(&limiter, key("a"), 4).await;
    assert_eq!(first.await.unwrap().0, Ok(ms(500)));
    assert_eq!(second.await.unwrap().0, Ok(ms(900)));
    sleep(ms(100)).await;
    assert_eq!(limiter.try_acquire(key("a"), 1).await, Ok(()), "all that came since");
    assert_eq!(limiter.try_acquire(key("a"), 1).await, Err(no_tokens(ms(100))));
}

#[tokio::test(start_paused = true)]
async fn to_come_back_after_the_time_that_the_error_says_is_enough() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, Quota::new(7, Duration::from_secs(3)).with_capacity(50));
    limiter.try_acquire(key("a"), 50).await.unwrap();
    for cost in [1, 3, 20, 50] {
        let Err(error) = limiter.try_acquire(key("a"), cost).await else { panic!("there are none") };
        let retry_after = error.retry_after().unwrap();
        tokio::time::advance(retry_after - Duration::from_micros(1)).await;
        assert!(limiter.try_acquire(key("a"), cost).await.is_err(), "a microsecond early");
        tokio::time::advance(Duration::from_micros(1)).await;
        limiter.try_acquire(key("a"), cost).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn one_that_was_accepted_fails_as_soon_as_it_is_known_that_others_were_quicker() {
    let buckets = MemoryStore::new();
    let limiter = Limiter::new(buckets.clone(), NAME, b(10, 10)).max_wait(ms(1200));
    let other = Limiter::new(buckets, NAME, b(10, 10));
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let started = Instant::now();
    let first = wait(&limiter, key("a"), 5).await;
    let second = wait(&limiter, key("a"), 5).await;
    let third = wait(&limiter, key("a"), 2).await;
    sleep(ms(400)).await;
    other.try_acquire(key("a"), 4).await.unwrap();
    // At 500 ms the first asks, and hears that 4 are missing.
    let (outcome, at) = second.await.unwrap();
    assert_eq!((outcome, at - started), (Err(no_tokens(ms(900))), ms(500)), "at 1400 ms, and it waits until 1200");
    let (outcome, at) = first.await.unwrap();
    outcome.unwrap();
    assert!(at - started >= ms(900) && at - started <= ms(940), "the promised moment, and a tenth at most");
    let (outcome, at) = third.await.unwrap();
    outcome.unwrap();
    assert!(at - started >= ms(1100) && at - started <= ms(1140));
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_capacity_fails_in_no_time_and_without_a_question() {
    let store = Watched::new();
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow, OnStoreFailure::Deny] {
        let limiter = Limiter::new(store.clone(), NAME, b(10, 10)).max_wait(LONG).on_store_failure(policy);
        let too_dear = AcquireError::TooDear { cost: 11, capacity: 10 };
        assert_eq!(at_once(limiter.acquire(key("a"), 11)), Err(too_dear.clone()));
        assert_eq!(at_once(limiter.try_acquire(key("a"), 11)), Err(too_dear));
        let error = at_once(limiter.acquire(key("a"), u64::MAX)).unwrap_err();
        assert_eq!(error.retry_after(), None);
    }
    settle().await;
    assert_eq!(store.calls(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_costs_nothing_asks_nobody_and_waits_for_nobody() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(1, 1)).max_wait(LONG).max_waiters(2);
    limiter.try_acquire(key("a"), 1).await.unwrap();
    let _first = wait(&limiter, key("a"), 1).await;
    let _second = wait(&limiter, key("a"), 1).await;
    let calls = store.calls();
    assert_eq!(at_once(limiter.acquire(key("a"), 0)), Ok(Duration::ZERO));
    assert_eq!(at_once(limiter.try_acquire(key("a"), 0)), Ok(()));
    settle().await;
    assert_eq!(store.calls(), calls);
}

#[tokio::test(start_paused = true)]
async fn no_more_wait_than_may_on_all_keys_together() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1)).max_wait(LONG).max_waiters(3);
    for name in ["a", "b"] {
        limiter.try_acquire(key(name), 1).await.unwrap();
    }
    let mut waiting = Vec::new();
    for name in ["a", "a", "b"] {
        waiting.push(wait(&limiter, key(name), 1).await);
    }
    let clone = limiter.clone();
    for name in ["a", "b", "c"] {
        assert_eq!(at_once(limiter.acquire(key(name), 1)), Err(AcquireError::Crowded));
        assert_eq!(at_once(clone.try_acquire(key(name), 1)), Err(AcquireError::Crowded));
    }
    waiting.remove(1).abort();
    settle().await;
    let fourth = wait(&clone, key("c"), 1).await;
    assert_eq!(fourth.await.unwrap().0, Ok(Duration::ZERO), "one has left");
    for waiting in waiting {
        assert_eq!(waiting.await.unwrap().0, Ok(ms(1000)));
    }
    limiter.try_acquire(key("d"), 1).await.unwrap();
}

/// PyrateLimiter#301 sleeps under a lock.
#[tokio::test(start_paused = true)]
async fn one_that_waits_ten_seconds_delays_no_other_key() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, Quota::new(1, Duration::from_secs(10))).max_wait(LONG);
    limiter.try_acquire(key("a"), 1).await.unwrap();
    let started = Instant::now();
    let slow = wait(&limiter, key("a"), 1).await;
    for i in 0..100 {
        assert_eq!(limiter.acquire(key(i), 1).await, Ok(Duration::ZERO));
    }
    assert_eq!(started.elapsed(), Duration::ZERO);
    assert_eq!(slow.await.unwrap().0, Ok(Duration::from_secs(10)));
    // A store that does not answer for one key keeps no other waiting either.
    store.silent.store(true, Relaxed);
    let stuck = wait(&limiter, key("a"), 1).await;
    store.silent.store(false, Relaxed);
    assert_eq!(limiter.acquire(key("b"), 1).await, Ok(Duration::ZERO));
    drop(stuck);
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_waiters_on_a_thousand_keys_are_served_and_forgotten() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(1, 10));
    let tasks_before = Handle::current().metrics().num_alive_tasks();
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for i in 0..10_000_u32 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            limiter.acquire(key(i % 1000), 1).await.unwrap();
            assert_eq!(started.elapsed(), ms(100) * (i / 1000));
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    settle().await;
    assert_eq!(started.elapsed(), ms(900));
    assert!(store.calls() <= 15_000, "{} questions", store.calls());
    assert_eq!(Handle::current().metrics().num_alive_tasks(), tasks_before);
    let calls = store.calls();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(store.calls(), calls);
    println!("10000 waiters on 1000 keys: {calls} questions");
}

#[tokio::test(start_paused = true)]
async fn what_is_tried_takes_only_what_is_there_and_nothing_while_others_wait() {
    let store = Watched::new();
    let quota = b(10, 1);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG);
    limiter.try_acquire(key("a"), 7).await.unwrap();
    assert_eq!(limiter.try_acquire(key("a"), 4).await, Err(no_tokens(ms(1000))));
    let waiting = wait(&limiter, key("a"), 5).await;
    let calls = store.calls();
    assert_eq!(limiter.try_acquire(key("a"), 1).await, Err(no_tokens(ms(3000))), "5 and 1 are asked for, 3 are there");
    assert_eq!(store.calls(), calls);
    waiting.abort();
    settle().await;
    limiter.try_acquire(key("a"), 3).await.unwrap();
    assert_eq!(store.level(key("a"), quota), -10_000_000);
    // While the store is asked for somebody else: in turn.
    let late = Watched::late(ms(20));
    let limiter = Limiter::new(late.clone(), NAME, b(10, 1)).max_wait(LONG);
    let first = wait(&limiter, key("a"), 6).await;
    assert_eq!(limiter.try_acquire(key("a"), 6).await.map_err(|error| error.retry_after()), Err(Some(ms(2000))));
    first.await.unwrap().0.unwrap();
}

// Several processes.

#[tokio::test(start_paused = true)]
async fn who_loses_a_race_adds_up_to_a_tenth_of_its_wait_and_never_subtracts() {
    let buckets = MemoryStore::new();
    let quota = b(1, 10);
    let stores = [Watched::on(buckets.clone()), Watched::on(buckets)];
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    let grants = Arc::new(Mutex::new(Vec::new()));
    for store in &stores {
        let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG);
        for _ in 0..200 {
            let (limiter, grants) = (limiter.clone(), Arc::clone(&grants));
            tasks.spawn(async move {
                limiter.acquire(key("a"), 1).await.unwrap();
                grants.lock().unwrap().push((started.elapsed(), 1));
            });
        }
    }
    tasks.join_all().await;
    assert_within(quota, &grants.lock().unwrap());
    let mut added = Vec::new();
    for store in &stores {
        let mut promised: Option<Duration> = None;
        for pair in store.questions().windows(2) {
            let lost = !pair[0].allowed && promised.is_some_and(|promised| promised <= pair[0].at);
            let least = match pair[0].wait {
                Some(wait) => pair[0].at + wait,
                None => pair[0].at + ms(100),
            };
            assert!(pair[1].at >= least, "asked at {:?}, promised was {least:?}", pair[1].at);
            if let Some(wait) = pair[0].wait.filter(|_| lost) {
                // A timer's tick on top.
                assert!(pair[1].at <= least + wait / 10 + ms(1), "{:?} after {least:?}, {wait:?}", pair[1].at);
                added.push(pair[1].at - least);
            } else {
                assert!(pair[1].at <= least + ms(1), "no jitter at the promised moment");
            }
            promised = Some(least);
        }
    }
    let elapsed = started.elapsed();
    let calls = stores[0].calls() + stores[1].calls();
    assert!(added.len() >= 20, "{} races lost", added.len());
    assert!(added.iter().any(|added| *added >= ms(5)), "they do not stay in step");
    println!("2 x 200 waiters, B(1,10/s): {calls} questions, {} races lost, {elapsed:?}", added.len());
    assert!(calls <= 600 + 400, "{calls} questions for 400 grants");
}

#[tokio::test(start_paused = true)]
async fn what_somebody_gives_back_is_noticed_within_a_second() {
    let store = Watched::new();
    let quota = Quota::new(1, Duration::from_secs(60)).with_capacity(10);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG);
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let started = Instant::now();
    let waiting = wait(&limiter, key("a"), 5).await;
    sleep(ms(3500)).await;
    store.buckets.reset(&Limit::new(NAME, quota), key("a")).await.unwrap();
    let (outcome, at) = waiting.await.unwrap();
    outcome.unwrap();
    assert!(at - started <= ms(4500), "{:?}", at - started);
    assert!(store.calls() <= 6, "{} questions", store.calls());
}

#[tokio::test(start_paused = true)]
async fn one_that_waits_for_an_hour_asks_once_a_second() {
    let store = Watched::new();
    let quota = Quota::per_hour(1);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG * 2);
    limiter.try_acquire(key("a"), 1).await.unwrap();
    let waiting: Vec<_> = {
        let mut all = Vec::new();
        for _ in 0..2 {
            all.push(wait(&limiter, key("a"), 1).await);
        }
        all
    };
    for (i, waiting) in waiting.into_iter().enumerate() {
        assert_eq!(waiting.await.unwrap().0, Ok(LONG * (i as u32 + 1)));
    }
    assert!(store.calls() <= 7203, "{} questions", store.calls());
}

// The store fails.

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_leaves_each_sender_its_share() {
    let quota = b(20, 100);
    let store = Watched::new();
    store.broken.store(true, Relaxed);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG).share(4);
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for _ in 0..130 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            limiter.acquire(key("a"), 1).await.unwrap();
            (started.elapsed(), 1)
        });
    }
    let mut grants = tasks.join_all().await;
    grants.sort_unstable();
    assert_within(b(5, 25), &grants);
    assert_eq!(started.elapsed(), Duration::from_secs(5));
    // A try, and what does not fit.
    let error = limiter.try_acquire(key("a"), 1).await.unwrap_err();
    assert_eq!(error, no_tokens(ms(40)));
    // Well again: the shared bucket.
    store.broken.store(false, Relaxed);
    for _ in 0..20 {
        limiter.try_acquire(key("a"), 1).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn under_deny_nobody_gets_tokens_and_all_hear_when_to_come_back() {
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(1, 1)).max_wait(LONG).on_store_failure(OnStoreFailure::Deny);
    limiter.try_acquire(key("a"), 1).await.unwrap();
    let mut waiting = Vec::new();
    for _ in 0..100 {
        waiting.push(wait(&limiter, key("a"), 1).await);
    }
    let started = Instant::now();
    store.broken.store(true, Relaxed);
    for waiting in waiting {
        let (outcome, at) = waiting.await.unwrap();
        assert_eq!(outcome, Err(AcquireError::StoreFailed { retry_after: ms(1000) }));
        assert_eq!(at - started, ms(1000), "when the first asks");
    }
    let error = at_once_settled(limiter.try_acquire(key("a"), 1)).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(ms(1000)));
    store.broken.store(false, Relaxed);
    limiter.acquire(key("a"), 1).await.unwrap();
}

/// The output of a future that needs no time.
async fn at_once_settled<F: Future>(future: F) -> F::Output {
    let started = Instant::now();
    let output = future.await;
    assert_eq!(started.elapsed(), Duration::ZERO);
    output
}

#[tokio::test(start_paused = true)]
async fn a_store_that_never_answers_costs_the_deadline_of_each_check() {
    for (policy, deadline) in [(OnStoreFailure::Deny, 50), (OnStoreFailure::Local, 50), (OnStoreFailure::Deny, 7)] {
        let store = Watched::new();
        store.silent.store(true, Relaxed);
        let limiter = Limiter::new(store.clone(), NAME, b(10, 10)).on_store_failure(policy).deadline(ms(deadline));
        let started = Instant::now();
        let outcome = limiter.try_acquire(key("a"), 1).await;
        assert_eq!(started.elapsed(), ms(deadline));
        let failed = AcquireError::StoreFailed { retry_after: ms(1000) };
        assert_eq!(outcome, if policy == OnStoreFailure::Deny { Err(failed) } else { Ok(()) });
        assert_eq!(store.calls(), 1);
    }
    // Nine at once, of a local bucket of nine: the first alone, and the others together.
    let store = Watched::new();
    store.silent.store(true, Relaxed);
    let limiter = Limiter::new(store.clone(), NAME, b(9, 1));
    let started = Instant::now();
    let all: JoinSet<_> = (0..9)
        .map(|_| {
            let limiter = limiter.clone();
            async move { limiter.acquire(key("a"), 1).await.unwrap() }
        })
        .collect();
    all.join_all().await;
    assert!(started.elapsed() <= ms(100), "{:?}", started.elapsed());
}
