//! The sender's side: who waits, for how long, in which order, and what is sent when the store fails.

use std::collections::HashMap;
use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::future::{Future, Ready, pending, ready};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tower::limit::ConcurrencyLimit;
use tower::retry::{Policy, Retry};
use tower::timeout::Timeout;
use tower::{BoxError, Layer, Service, ServiceExt, service_fn};
use tower_token_bucket::conformance::Model;
use tower_token_bucket::outbound::{
    AcquireError, Host, Limiter, ResponseFuture, Throttle, ThrottleError, ThrottleLayer,
};
use tower_token_bucket::{
    Amount, BucketKey, Charge, ConfigError, CostTable, Decision, Identity, KeyExtractor, Limit, LimitName, MemoryStore,
    NoKey, OnStoreFailure, Quota, RedisStore, Reply, Store,
};

use crate::log::Log;
use crate::server::Server;

const NAME: &str = "peer";
const NO_HOST: &str = "the request names no bucket: no host in its URL or `Host` field, or none that `key_by` finds";
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

type Others = Box<dyn FnOnce() + Send>;

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
    between: Arc<Mutex<HashMap<u64, Others>>>,
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

// The layer around a client.

type Ask = Request<String>;

fn ask(url: &str) -> Ask {
    Request::get(url).body(String::new()).unwrap()
}

fn throttle<St: Store>(store: St, quota: Quota) -> ThrottleLayer<St> {
    ThrottleLayer::new(Limiter::new(store, NAME, quota).max_wait(LONG))
}

/// Panics when it is called without being ready, as a clone of a ready one is, and counts both.
#[derive(Debug, Default)]
struct Probe {
    is_ready: bool,
    readied: Arc<AtomicUsize>,
    calls: Arc<AtomicUsize>,
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        Self { is_ready: false, readied: Arc::clone(&self.readied), calls: Arc::clone(&self.calls) }
    }
}

impl Probe {
    fn seen(&self) -> (usize, usize) {
        (self.readied.load(Relaxed), self.calls.load(Relaxed))
    }
}

impl Service<Ask> for Probe {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Ready<Result<Response<String>, Infallible>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.is_ready {
            return Poll::Ready(Ok(()));
        }
        self.readied.fetch_add(1, Relaxed);
        self.is_ready = true;
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn call(&mut self, ask: Ask) -> Self::Future {
        assert!(self.is_ready, "called before it was ready");
        self.is_ready = false;
        self.calls.fetch_add(1, Relaxed);
        ready(Ok(Response::new(ask.into_body())))
    }
}

async fn send<S: Service<Ask>>(service: &mut S, ask: Ask) -> Result<S::Response, S::Error> {
    service.ready().await?.call(ask).await
}

#[tokio::test(start_paused = true)]
async fn the_inner_service_is_made_ready_and_called_when_the_tokens_are_there() {
    let probe = Probe::default();
    let mut service = throttle(Watched::late(ms(20)), b(1, 1)).layer(probe.clone());
    let mut clone = service.clone();
    let started = Instant::now();
    let first = tokio::spawn(service.ready().await.unwrap().call(ask("http://a/")));
    let second = tokio::spawn(clone.ready().await.unwrap().call(ask("http://a/")));
    sleep(ms(19)).await;
    assert_eq!(probe.seen(), (0, 0), "the store is being asked");
    first.await.unwrap().unwrap();
    assert_eq!(probe.seen(), (1, 1));
    sleep_to(started + ms(990)).await;
    assert_eq!(probe.seen(), (1, 1), "it waits");
    second.await.unwrap().unwrap();
    assert_eq!(probe.seen(), (2, 2));
    assert_eq!(started.elapsed(), ms(1040), "a second after the answer, and the next answer");
}

async fn sleep_to(at: Instant) {
    tokio::time::sleep_until(at).await;
}

#[tokio::test(start_paused = true)]
async fn one_that_waits_for_tokens_holds_no_permit_of_the_inner_service() {
    let permits = Arc::new(Semaphore::new(1));
    let inner = ConcurrencyLimit::with_semaphore(Probe::default(), Arc::clone(&permits));
    let mut service = throttle(MemoryStore::new(), b(1, 1)).layer(inner);
    send(&mut service, ask("http://a/")).await.unwrap();
    let started = Instant::now();
    let waiting = tokio::spawn(service.ready().await.unwrap().call(ask("http://a/")));
    settle().await;
    assert_eq!(permits.available_permits(), 1);
    // Another host's request gets it meanwhile.
    send(&mut service, ask("http://b/")).await.unwrap();
    assert_eq!(started.elapsed(), Duration::ZERO);
    waiting.await.unwrap().unwrap();
    assert_eq!((started.elapsed(), permits.available_permits()), (ms(1000), 1));
}

#[tokio::test(start_paused = true)]
async fn it_is_always_ready_itself() {
    let never = ConcurrencyLimit::with_semaphore(Probe::default(), Arc::new(Semaphore::new(0)));
    let mut service = throttle(MemoryStore::new(), b(1, 1)).layer(never);
    assert!(at_once(service.ready()).is_ok());
    let mut waiting = Box::pin(service.call(ask("http://a/")));
    for _ in 0..10 {
        assert!(poll(waiting.as_mut()).is_pending());
        settle().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_that_is_dropped_at_any_poll_leaves_nothing_behind() {
    let tasks = Handle::current().metrics().num_alive_tasks();
    for latency in [Duration::ZERO, ms(5)] {
        for k in 0..12 {
            let permits = Arc::new(Semaphore::new(1));
            let probe = Probe::default();
            let slow = {
                let probe = probe.clone();
                service_fn(move |ask: Ask| {
                    let mut probe = probe.clone();
                    async move {
                        sleep(ms(3)).await;
                        probe.ready().await.unwrap().call(ask).await
                    }
                })
            };
            let inner = ConcurrencyLimit::with_semaphore(slow, Arc::clone(&permits));
            let store = Watched::late(latency);
            let limiter = Limiter::new(store.clone(), NAME, b(1, 100)).max_wait(LONG).max_waiters(1);
            let mut service = ThrottleLayer::new(limiter).layer(inner);
            send(&mut service, ask("http://a/")).await.unwrap();
            let mut response = Box::pin(service.call(ask("http://a/")));
            for _ in 0..k {
                if poll(response.as_mut()).is_ready() {
                    break;
                }
                // A millisecond for each poll: it goes through all states.
                sleep(ms(2)).await;
            }
            drop(response);
            settle().await;
            sleep(ms(10)).await;
            assert_eq!(permits.available_permits(), 1, "dropped after {k} polls");
            assert_eq!(Handle::current().metrics().num_alive_tasks(), tasks, "dropped after {k} polls");
            // Its place among those that may wait is free, and the service is as good as before.
            send(&mut service, ask("http://a/")).await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn no_tokens_are_a_distinct_error_and_the_inner_services_errors_are_its_own() {
    let calls = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&calls);
    let inner = service_fn(move |_: Ask| {
        counter.fetch_add(1, Relaxed);
        ready(Err::<Response<String>, _>(io::Error::other("reset by peer")))
    });
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1)).max_wait(ms(500));
    let mut service = ThrottleLayer::new(limiter).layer(inner);
    let error = send(&mut service, ask("http://a/")).await.unwrap_err();
    let ThrottleError::Inner(inner) = &error else { panic!("{error:?}") };
    assert_eq!((inner.to_string(), error.to_string()), ("reset by peer".to_owned(), "reset by peer".to_owned()));
    let error = send(&mut service, ask("http://a/")).await.unwrap_err();
    let ThrottleError::Acquire(acquire) = &error else { panic!("{error:?}") };
    assert_eq!(acquire.retry_after(), Some(ms(1000)));
    assert_eq!(error.source().unwrap().downcast_ref::<AcquireError>(), Some(acquire));
    assert_eq!(error.to_string(), "no tokens in time: they could be there in 1s");
    assert_eq!(calls.load(Relaxed), 1, "nothing was sent");
}

#[tokio::test(start_paused = true)]
async fn an_inner_service_that_fails_to_become_ready_is_its_error() {
    #[derive(Clone)]
    struct Closed;
    impl Service<Ask> for Closed {
        type Response = Response<String>;
        type Error = &'static str;
        type Future = Ready<Result<Response<String>, &'static str>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(Err("closed"))
        }

        fn call(&mut self, _: Ask) -> Self::Future {
            panic!("called before it was ready")
        }
    }
    let mut service = throttle(MemoryStore::new(), b(1, 1)).layer(Closed);
    assert_eq!(send(&mut service, ask("http://a/")).await.unwrap_err(), ThrottleError::Inner("closed"));
}

#[tokio::test(start_paused = true)]
async fn without_a_host_there_is_no_key_and_what_costs_nothing_needs_none() {
    let probe = Probe::default();
    let store = Watched::new();
    let layer = throttle(store.clone(), b(1, 1));
    let mut service = layer.clone().layer(probe.clone());
    let error = send(&mut service, ask("/path")).await.unwrap_err();
    assert_eq!(error, ThrottleError::Acquire(AcquireError::NoKey(NoKey::Identity)));
    assert_eq!(error.to_string(), NO_HOST);
    assert_eq!((probe.seen(), store.calls()), ((0, 0), 0));
    let mut free = layer.cost(CostTable::new(1).exempt("GET /path")).layer(probe.clone());
    send(&mut free, ask("/path")).await.unwrap();
    assert_eq!((probe.seen(), store.calls()), ((1, 1), 0));
}

#[test]
fn hosts_are_told_apart_by_name_and_port_whatever_the_case_path_and_credentials() {
    let of = |url: &str| Host.extract(&ask(url).into_parts().0);
    let field = |host: &str| {
        let request = Request::get("/").header("host", host).body(()).unwrap();
        Host.extract(&request.into_parts().0)
    };
    let expected = Ok(BucketKey::id("hooks.example"));
    for url in ["https://hooks.example/", "http://HOOKS.example/b?c=d", "https://user:secret@Hooks.Example/x"] {
        assert_eq!(of(url), expected, "{url}");
    }
    assert_eq!(field("Hooks.EXAMPLE"), expected);
    assert_eq!(of("http://Hooks.example:8080/"), Ok(BucketKey::id("hooks.example:8080")));
    assert_eq!(field("hooks.example:8080"), of("http://hooks.example:8080/"));
    assert_eq!(of("http://[2001:DB8::1]:8080/"), Ok(BucketKey::id("[2001:db8::1]:8080")));
    // The port that goes without saying, and the dot of the root, make no other host.
    for url in ["http://hooks.example:80/", "https://hooks.example:443/", "https://hooks.example./"] {
        assert_eq!(of(url), expected, "{url}");
    }
    assert_ne!(of("http://hooks.example:443/"), expected);
    assert_eq!(of("http://a/").unwrap(), BucketKey::id("a"));
    assert_ne!(of("http://a:1/"), of("http://a:2/"));
    let both = Request::get("http://url.example/").header("host", "field.example").body(()).unwrap();
    assert_eq!(Host.extract(&both.into_parts().0), Ok(BucketKey::id("url.example")), "where it is sent");
    assert_eq!(of("/"), Err(NoKey::Identity));
    let binary = Request::get("/").header("host", http::HeaderValue::from_bytes(b"\xff").unwrap()).body(()).unwrap();
    assert_eq!(Host.extract(&binary.into_parts().0), Err(NoKey::Identity));
}

#[tokio::test(start_paused = true)]
async fn endpoints_are_told_apart_by_an_identity_or_a_closure_and_pay_by_a_table_or_a_closure() {
    #[derive(Clone)]
    struct Endpoint(u64);
    let with = |id: u64| {
        let mut ask = ask("http://a/send");
        ask.extensions_mut().insert(Endpoint(id));
        ask
    };
    let store = Watched::new();
    let quota = b(10, 1);
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(Duration::ZERO);
    let layer = ThrottleLayer::new(limiter);
    let mut service = layer
        .clone()
        .key_by(Identity::of(|endpoint: &Endpoint| BucketKey::id(endpoint.0.to_le_bytes())))
        .cost(CostTable::new(1).route("GET /send", 6))
        .layer(Probe::default());
    send(&mut service, with(1)).await.unwrap();
    let error = send(&mut service, with(1)).await.unwrap_err();
    assert_eq!(error, ThrottleError::Acquire(no_tokens(ms(2000))));
    send(&mut service, with(2)).await.unwrap();
    assert!(matches!(
        send(&mut service, ask("http://a/")).await,
        Err(ThrottleError::Acquire(AcquireError::NoKey(NoKey::Identity)))
    ));
    let mut service = layer
        .key_by(|parts: &Parts| parts.headers.get("tenant").map(BucketKey::id))
        .cost(|parts: &Parts| parts.uri.path().len() as u64)
        .layer(Probe::default());
    let tenant = |path: &str| {
        let mut ask = ask(path);
        ask.headers_mut().insert("tenant", "t".parse().unwrap());
        ask
    };
    send(&mut service, tenant("http://a/12345678")).await.unwrap();
    assert!(send(&mut service, tenant("http://b/1")).await.is_err(), "1 is left");
    send(&mut service, tenant("http://b/")).await.unwrap();
    let error = send(&mut service, tenant("http://a/12345678901")).await.unwrap_err();
    assert_eq!(error, ThrottleError::Acquire(AcquireError::TooDear { cost: 12, capacity: 10 }));
}

/// Tries again as often as said, and at once.
#[derive(Clone)]
struct Again(usize);

impl<T> Policy<Ask, T, ThrottleError<&'static str>> for Again {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Ask, result: &mut Result<T, ThrottleError<&'static str>>) -> Option<Self::Future> {
        if self.0 == 0 || !matches!(result, Err(ThrottleError::Inner(_))) {
            return None;
        }
        self.0 -= 1;
        Some(ready(()))
    }

    fn clone_request(&mut self, ask: &Ask) -> Option<Ask> {
        Some(self::ask(&ask.uri().to_string()))
    }
}

#[tokio::test(start_paused = true)]
async fn inside_retries_each_attempt_pays_and_waits() {
    let calls = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&calls);
    let inner = service_fn(move |_: Ask| {
        counter.fetch_add(1, Relaxed);
        ready(Err::<Response<String>, _>("reset"))
    });
    let store = Watched::new();
    let mut service = Retry::new(Again(4), throttle(store.clone(), b(1, 10)).layer(inner));
    let started = Instant::now();
    assert_eq!(send(&mut service, ask("http://a/")).await.unwrap_err(), ThrottleError::Inner("reset"));
    assert_eq!((calls.load(Relaxed), started.elapsed()), (5, ms(400)));
    assert_eq!(store.questions().iter().filter(|question| question.allowed).count(), 5);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_inside_does_not_count_the_wait_and_one_outside_does_and_frees_the_place() {
    let slow = service_fn(|_: Ask| async {
        sleep(ms(50)).await;
        Ok::<_, Infallible>(Response::new(String::new()))
    });
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1)).max_wait(LONG).max_waiters(1);
    let layer = ThrottleLayer::new(limiter);
    let mut inside = layer.clone().layer(Timeout::new(slow, ms(100)));
    let mut outside = Timeout::new(layer.layer(slow), ms(100));
    let started = Instant::now();
    send(&mut inside, ask("http://a/")).await.unwrap();
    send(&mut inside, ask("http://a/")).await.unwrap();
    assert_eq!(started.elapsed(), ms(1050));
    let error: BoxError = send(&mut outside, ask("http://a/")).await.unwrap_err();
    assert!(error.is::<tower::timeout::error::Elapsed>(), "{error}");
    // Outside of it, an error that says why is found as such.
    let first = send(&mut inside, ask("http://a/"));
    let mut first = Box::pin(first);
    assert!(poll(first.as_mut()).is_pending());
    let error = send(&mut outside, ask("http://a/")).await.unwrap_err();
    let error = error.downcast_ref::<ThrottleError<Infallible>>().unwrap();
    assert_eq!(*error, ThrottleError::Acquire(AcquireError::Crowded));
    first.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_hundred_requests_through_the_layer_reach_the_peer_within_its_quota() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let started = Instant::now();
    let inner = service_fn(move |_: Ask| {
        log.lock().unwrap().push((started.elapsed(), 1));
        ready(Ok::<_, Infallible>(Response::new(String::new())))
    });
    let quota = b(10, 20);
    let service = throttle(MemoryStore::new(), quota).layer(inner);
    let mut tasks = JoinSet::new();
    for _ in 0..110 {
        let mut service = service.clone();
        tasks.spawn(async move { send(&mut service, ask("http://a/")).await.unwrap() });
    }
    tasks.join_all().await;
    assert_within(quota, &seen.lock().unwrap());
    assert_eq!(started.elapsed(), Duration::from_secs(5));
}

// Types.

#[test]
fn public_types_are_send_sync_clone_and_debug_and_show_no_url() {
    fn shared<T: Send + Sync + Clone + fmt::Debug + Unpin + 'static>() {}
    fn error<T: Error + Send + Sync + Clone + PartialEq + 'static>() {}
    fn sendable<T: Send>(value: T) -> T {
        value
    }
    shared::<Limiter<MemoryStore>>();
    shared::<Limiter<RedisStore>>();
    shared::<ThrottleLayer<MemoryStore>>();
    shared::<Throttle<Probe, MemoryStore>>();
    shared::<Host>();
    error::<AcquireError>();
    error::<ThrottleError<AcquireError>>();
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1));
    drop(sendable(limiter.acquire(key("a"), 1)));
    drop(sendable(limiter.try_acquire(key("a"), 1)));
    let layer = ThrottleLayer::new(limiter.clone());
    let mut service = layer.layer(Probe::default());
    let response: ResponseFuture<Probe, _, String> =
        sendable(service.call(ask("https://user:secret@host.example/path")));
    let shown = format!("{limiter:?} {layer:?} {service:?} {response:?}");
    for secret in ["secret", "host.example", "path"] {
        assert!(!shown.contains(secret), "{shown}");
    }
    for name in ["Limiter", NAME, "ThrottleLayer", "Throttle", "ResponseFuture"] {
        assert!(shown.contains(name), "{shown}");
    }
    // A store that is not `Debug` will do.
    let _ = format!("{:?}", Limiter::new(Watched::new(), NAME, b(1, 1)));
}

#[test]
fn errors_say_what_happened_and_when_to_come_back() {
    let failed = AcquireError::StoreFailed { retry_after: ms(1500) };
    let texts = [
        (no_tokens(ms(250)), "no tokens in time: they could be there in 250ms", Some(ms(250))),
        (
            AcquireError::TooDear { cost: 11, capacity: 10 },
            "a cost of 11 is above the capacity 10: it can never be paid",
            None,
        ),
        (AcquireError::Crowded, "as many wait for tokens as may", None),
        (AcquireError::NoKey(NoKey::Identity), NO_HOST, None),
        (failed, "the store of the buckets failed: it is asked again in 1.5s", Some(ms(1500))),
    ];
    for (error, text, retry_after) in texts {
        assert_eq!((error.to_string(), error.retry_after()), (text.to_owned(), retry_after));
        assert!(error.source().is_none());
        assert_eq!(ThrottleError::<Infallible>::Acquire(error).to_string(), text);
    }
}

#[test]
fn what_cannot_be_set_is_an_error_that_says_so() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1));
    assert!(matches!(Limiter::try_new(MemoryStore::new(), "a b", b(1, 1)), Err(ConfigError::LimitName { .. })));
    assert!(matches!(limiter.clone().try_deadline(Duration::ZERO), Err(ConfigError::Deadline)));
    assert!(matches!(limiter.clone().try_share(0), Err(ConfigError::Share)));
    for panics in [
        |limiter: Limiter<MemoryStore>| limiter.deadline(Duration::ZERO),
        |limiter: Limiter<MemoryStore>| limiter.share(0),
    ] {
        let limiter = limiter.clone();
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| panics(limiter))).is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_is_logged_once_and_so_is_its_end() {
    let (log, _guard) = Log::capture();
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, b(100, 1));
    store.broken.store(true, Relaxed);
    for _ in 0..20 {
        limiter.try_acquire(key("https://user:secret@host"), 1).await.unwrap();
    }
    store.broken.store(false, Relaxed);
    sleep(ms(1500)).await;
    limiter.try_acquire(key("https://user:secret@host"), 1).await.unwrap();
    let lines = log.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(!log.text().contains("secret"));
}

// Real Redis.

/// A store that notes when each question was asked and answered, by this process's clock.
#[derive(Clone)]
pub(crate) struct Noted {
    inner: RedisStore,
    started: Instant,
    /// (asked, answered, how much was given)
    given: Arc<Mutex<Vec<(Duration, Duration, u64)>>>,
    calls: Arc<AtomicU64>,
}

impl Noted {
    pub(crate) fn new(inner: RedisStore, started: Instant) -> Self {
        Self { inner, started, given: Arc::default(), calls: Arc::default() }
    }

    /// (asked, answered, how much was given)
    pub(crate) fn given(&self) -> Vec<(Duration, Duration, u64)> {
        self.given.lock().unwrap().clone()
    }
}

impl Store for Noted {
    type Error = <RedisStore as Store>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, Self::Error>> + Send>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        self.acquire_within(charges, ms(1000))
    }

    fn acquire_within(&self, charges: &[Charge], deadline: Duration) -> Self::Future {
        self.calls.fetch_add(1, Relaxed);
        let (store, cost) = (self.clone(), charges[0].cost());
        let answer = self.inner.acquire_within(charges, deadline);
        let asked = self.started.elapsed();
        Box::pin(async move {
            let answer = answer.await;
            if answer.as_ref().is_ok_and(Decision::is_allowed) {
                store.given.lock().unwrap().push((asked, store.started.elapsed(), cost));
            }
            answer
        })
    }
}

/// The most by which what surely was given within an interval exceeds the quota, over all intervals: a question was
/// answered between when it was asked and when the answer came.
pub(crate) fn excess(given: &[(Duration, Duration, u64)], quota: Quota, rate: f64) -> f64 {
    let mut most = f64::MIN;
    for (from, ..) in given {
        let mut within: Vec<_> = given.iter().filter(|(asked, ..)| asked >= from).collect();
        within.sort_unstable_by_key(|(_, answered, _)| *answered);
        let mut sum = 0;
        for (_, answered, cost) in within {
            sum += cost;
            let allowed = quota.capacity() as f64 + rate * (*answered - *from).as_secs_f64();
            most = most.max(sum as f64 - allowed);
        }
    }
    most
}

async fn noted(server: &Server, started: Instant, n: usize) -> Vec<Noted> {
    let mut stores = Vec::new();
    for _ in 0..n {
        let inner = RedisStore::connect(&server.url()).await.unwrap();
        stores.push(Noted::new(inner, started));
    }
    stores
}

/// Tasks that acquire one token after the other until then; what they got, by the clock when they got it.
fn senders(
    stores: &[Noted],
    each: usize,
    until: Instant,
    set: impl Fn(Limiter<Noted>) -> Limiter<Noted>,
    quota: Quota,
) -> JoinSet<Vec<(Duration, u64)>> {
    let mut tasks = JoinSet::new();
    for store in stores {
        let limiter = set(Limiter::new(store.clone(), NAME, quota));
        for _ in 0..each {
            let (limiter, started) = (limiter.clone(), store.started);
            tasks.spawn(async move {
                let mut got = Vec::new();
                while Instant::now() < until {
                    match limiter.acquire(key("a"), 1).await {
                        Ok(_) => got.push((started.elapsed(), 1)),
                        Err(error) => sleep(error.retry_after().unwrap_or(ms(10))).await,
                    }
                }
                got
            });
        }
    }
    tasks
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_processes_on_one_redis_never_send_more_than_the_quota_and_leave_little_of_it() {
    let server = Server::start();
    let quota = b(20, 100);
    let started = Instant::now();
    let stores = noted(&server, started, 3).await;
    let until = Instant::now() + ms(4000);
    let tasks = senders(&stores, 8, until, |limiter| limiter, quota);
    let other = Limiter::new(RedisStore::connect(&server.url()).await.unwrap(), NAME, b(50, 50));
    let other = tokio::spawn(async move {
        let mut got = 0;
        for _ in 0..40 {
            got += usize::from(other.try_acquire(key("b"), 1).await.is_ok());
            sleep(ms(50)).await;
        }
        got
    });
    let mut got: Vec<_> = tasks.join_all().await.concat();
    got.sort_unstable();
    let given: Vec<_> = stores.iter().flat_map(Noted::given).collect();
    let calls: u64 = stores.iter().map(|store| store.calls.load(Relaxed)).sum();
    let sum: u64 = given.iter().map(|(.., cost)| cost).sum();
    assert_eq!(got.len() as u64, sum, "what was taken is what the senders have");
    let excess = excess(&given, quota, 100.0);
    let (first, last) = (got[0].0, got[got.len() - 1].0);
    let most = 20.0 + 100.0 * (last - first).as_secs_f64();
    let share = got.len() as f64 / most;
    println!(
        "3 x 8 senders: {} of {most:.1} ({:.1} %), {excess:.3} above, {calls} questions",
        got.len(),
        share * 100.0
    );
    assert!(excess <= 1.0, "{excess} above the quota");
    assert!(share >= 0.97, "{} of {most}", got.len());
    assert!(calls <= got.len() as u64 * 4, "{calls} questions for {} grants", got.len());
    assert_eq!(other.await.unwrap(), 40, "another key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_process_gives_back_is_noticed_in_redis_too() {
    let server = Server::start();
    let quota = Quota::per_hour(10);
    let stores = noted(&server, Instant::now(), 1).await;
    let limiter = Limiter::new(stores[0].clone(), NAME, quota).max_wait(LONG);
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let waiting = wait(&limiter, key("a"), 4).await;
    let other = RedisStore::connect(&server.url()).await.unwrap();
    sleep(ms(1300)).await;
    let asked = stores[0].calls.load(Relaxed);
    other.reset(&Limit::new(NAME, quota), key("a")).await.unwrap();
    let waited = waiting.await.unwrap().0.unwrap();
    println!("noticed after {:?}", waited.saturating_sub(ms(1300)));
    assert!(stores[0].calls.load(Relaxed) <= asked + 2, "with the next question");
}

/// Runs senders through an outage, and gives what they got, and when it began and ended.
async fn outage(
    begin: impl FnOnce(&Server),
    end: impl FnOnce(&Server),
    policy: OnStoreFailure,
) -> (Vec<(Duration, u64)>, Duration, Duration) {
    let server = Server::start();
    let started = Instant::now();
    let stores = noted(&server, started, 2).await;
    let until = Instant::now() + ms(3000);
    let set = |limiter: Limiter<Noted>| limiter.share(2).on_store_failure(policy);
    let tasks = senders(&stores, 4, until, set, b(20, 100));
    sleep(ms(1000)).await;
    let began = started.elapsed();
    begin(&server);
    sleep(ms(1000)).await;
    end(&server);
    let ended = started.elapsed();
    let mut got: Vec<_> = tasks.join_all().await.concat();
    got.sort_unstable();
    (got, began, ended)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_killed_frozen_and_back_again_never_lets_more_through_than_was_promised() {
    type Do = fn(&Server);
    let outages: [(&str, Do, Do, f64); 2] =
        [("killed", Server::kill, Server::restart, 1.0), ("frozen", Server::freeze, Server::thaw, 0.0)];
    for (name, begin, end, losses) in outages {
        let (got, began, ended) = outage(begin, end, OnStoreFailure::Local).await;
        let elapsed = got.last().unwrap().0.as_secs_f64();
        let down = (ended - began).as_secs_f64() + 1.0;
        // 2 instances, each with the half.
        let promised = (1.0 + losses) * 20.0 + 100.0 * elapsed + (20.0 + 100.0 * down);
        assert!(got.len() as f64 <= promised, "{name}: {} of {promised}", got.len());
        let during = got.iter().filter(|(at, _)| *at > began + ms(200) && *at < ended).count();
        println!("{name}: {} in {elapsed:.2} s, {during} of them while it was away", got.len());
        assert!(during > 0, "{name}: the local share goes on");
        let after = got.iter().filter(|(at, _)| *at > ended + ms(500)).count();
        assert!(after > 0, "{name}: it goes on");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_deny_nothing_is_sent_while_redis_is_away() {
    let (got, began, ended) = outage(Server::freeze, Server::thaw, OnStoreFailure::Deny).await;
    let during = got.iter().filter(|(at, _)| *at > began + ms(100) && *at < ended).count();
    assert_eq!(during, 0);
    assert!(got.iter().any(|(at, _)| *at < began) && got.iter().any(|(at, _)| *at > ended), "before and after");
    assert!(got.len() as f64 <= 20.0 + 100.0 * got.last().unwrap().0.as_secs_f64() + 1.0);
}

// Faults.

#[tokio::test(start_paused = true)]
async fn when_the_store_fails_no_more_is_given_than_the_share_whatever_was_known_before() {
    let quota = b(20, 20);
    let store = Watched::new();
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG).share(4);
    // The first of twenty is answered, that 19 are left, and then the store is gone.
    let broken = Arc::clone(&store.broken);
    store.after_question(1, move || broken.store(true, Relaxed));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for _ in 0..20 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            limiter.acquire(key("a"), 1).await.unwrap();
            started.elapsed()
        });
    }
    let mut grants = tasks.join_all().await;
    grants.sort_unstable();
    let at_once = grants.iter().filter(|at| at.is_zero()).count();
    assert!(at_once <= 1 + 5, "{at_once} at once: 1 from the store, and the local bucket holds 5");
}

/// The output, or a panic when it takes longer than anything here: a waiter that nobody serves would hang for ever.
async fn in_time<F: Future>(future: F) -> F::Output {
    timeout(LONG * 2, future).await.expect("it hangs")
}

#[tokio::test(start_paused = true)]
async fn to_wait_for_ever_is_allowed() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1)).max_wait(Duration::MAX);
    let first = limiter.clone();
    let first = tokio::spawn(async move { first.acquire(key("a"), 1).await });
    assert!(matches!(in_time(first).await, Ok(Ok(_))));
    let second = limiter.clone();
    let second = tokio::spawn(async move { second.acquire(key("a"), 1).await });
    assert!(matches!(in_time(second).await, Ok(Ok(_))));
}

#[test]
fn a_runtime_that_ends_leaves_no_queue_that_nobody_serves() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let limiter = runtime().block_on(async { Limiter::new(MemoryStore::new(), NAME, b(1, 1)).max_wait(LONG) });
    let first = runtime();
    first.block_on(async {
        limiter.try_acquire(key("a"), 1).await.unwrap();
        drop(wait(&limiter, key("a"), 1).await);
    });
    drop(first);
    let outcome = runtime().block_on(async { timeout(LONG * 2, limiter.acquire(key("a"), 1)).await });
    assert!(outcome.is_ok(), "it hangs");
}

/// Panics when it is asked for the n-th time.
#[derive(Clone)]
struct Panics {
    buckets: MemoryStore,
    asked: Arc<AtomicU64>,
    at: u64,
}

impl Store for Panics {
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Decision, std::convert::Infallible>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        assert!(self.asked.fetch_add(1, Relaxed) + 1 != self.at, "a fault of a store");
        self.buckets.acquire(charges)
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_panics_once_leaves_nobody_waiting_for_ever() {
    let store = Panics { buckets: MemoryStore::new(), asked: Arc::default(), at: 2 };
    let limiter = Limiter::new(store, NAME, b(1, 1));
    limiter.try_acquire(key("a"), 1).await.unwrap();
    settle().await;
    // It may fail, or panic.
    let waiting = wait(&limiter, key("a"), 1).await;
    let _ = in_time(waiting).await;
    assert!(in_time(limiter.acquire(key("a"), 1)).await.is_ok(), "the store is well again");
}

#[test]
fn outside_a_runtime_it_panics_and_leaves_no_queue_that_nobody_serves() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 1));
    let first = limiter.clone();
    let outcome = std::thread::spawn(move || poll(Box::pin(first.acquire(key("a"), 1)).as_mut()).is_ready()).join();
    assert!(outcome.is_err(), "there is no runtime");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let outcome = runtime.block_on(async { timeout(LONG, limiter.acquire(key("a"), 1)).await });
    assert!(outcome.is_ok(), "it hangs");
}

#[tokio::test(start_paused = true)]
async fn who_has_just_left_is_in_nobodys_way() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).max_wait(ms(1000));
    limiter.try_acquire(key("a"), 10).await.unwrap();
    let mut head = Box::pin(limiter.acquire(key("a"), 10));
    assert!(poll(head.as_mut()).is_pending());
    settle().await;
    drop(head);
    // No other task has run since. The same after a `timeout` around an acquire, which is then tried again.
    assert_eq!(limiter.acquire(key("a"), 10).await, Ok(ms(1000)));
    let mut head = Box::pin(limiter.acquire(key("a"), 10));
    assert!(poll(head.as_mut()).is_pending());
    settle().await;
    drop(head);
    assert_eq!(limiter.try_acquire(key("a"), 1).await, Err(no_tokens(ms(100))), "the exact time");
}

/// A store whose clock has stepped back by half a second, and whose bucket holds so many tokens.
#[derive(Clone)]
struct Ahead(Arc<AtomicU64>);

impl Store for Ahead {
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Decision, std::convert::Infallible>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        // B(10,1/s): a token is 10⁶ units.
        let cost = charges[0].cost();
        let allowed = self.0.fetch_update(Relaxed, Relaxed, |level| level.checked_sub(cost)).is_ok();
        let reply = Reply::new(self.0.load(Relaxed) as i64 * 1_000_000, allowed, 500_000);
        std::future::ready(Ok(Decision::new(charges, &[reply]).unwrap()))
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_that_are_there_are_given_though_the_clock_has_stepped_back() {
    let limiter = Limiter::new(Ahead(Arc::new(AtomicU64::new(10))), NAME, b(10, 1)).max_wait(ms(100));
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..10 {
        let limiter = limiter.clone();
        tasks.spawn(async move { limiter.acquire(key("a"), 1).await });
    }
    for outcome in tasks.join_all().await {
        assert_eq!(outcome, Ok(Duration::ZERO), "its token is there");
    }
    assert_eq!(started.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_lost_race_for_several_delays_the_first_no_more_than_a_tenth_of_its_own_wait() {
    for _ in 0..10 {
        let quota = Quota::new(1, Duration::from_secs(1)).with_capacity(100);
        let store = Watched::new();
        let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(LONG);
        // 99 are left, and so the next question is for 99; but others take 60 first.
        let buckets = store.buckets.clone();
        store.after_question(1, move || {
            let take = charge(key("a"), quota, Amount::Take(60));
            assert!(at_once(buckets.acquire(&take)).unwrap().is_allowed());
        });
        let mut tasks = JoinSet::new();
        let started = Instant::now();
        for _ in 0..100 {
            let limiter = limiter.clone();
            tasks.spawn(async move {
                limiter.acquire(key("a"), 1).await.unwrap();
                started.elapsed()
            });
        }
        let mut grants = tasks.join_all().await;
        grants.sort_unstable();
        let at_once = grants.iter().filter(|at| at.is_zero()).count();
        assert_eq!(at_once, 40, "39 tokens were there; the second was served at {:?}", grants[1]);
    }
}

#[tokio::test(start_paused = true)]
async fn nobody_waits_longer_than_it_would_after_a_lost_race_either() {
    for _ in 0..20 {
        let quota = b(10, 10);
        let buckets = MemoryStore::new();
        let limiter = Limiter::new(buckets.clone(), NAME, quota).max_wait(ms(1500));
        let other = Limiter::new(buckets, NAME, quota);
        limiter.try_acquire(key("a"), 10).await.unwrap();
        let started = Instant::now();
        let waiting = wait(&limiter, key("a"), 10).await;
        sleep(ms(500)).await;
        other.try_acquire(key("a"), 5).await.unwrap();
        // At 1000 ms the race is lost, and at 1500 ms the tokens are there, which is in time.
        let (outcome, at) = waiting.await.unwrap();
        assert!(at - started <= ms(1501), "{outcome:?} after {:?}", at - started);
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_of_one_that_leaves_while_the_store_is_asked_serve_the_next_though_it_is_dearer() {
    for seed in 1..=8 {
        let latency = ms(if seed % 2 == 0 { 3 } else { 0 });
        let crowd = crowd(seed, b(10, 2000), latency, |dice| 1 + dice.below(5)).await;
        crowd.assert_nothing_lost(seed);
    }
}
