//! Waiting for tokens.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use super::adaptive::Adaptive;
use super::error::AcquireError;
use super::event::{Event, RateState, Watcher};
use super::queue::{Answer, Known, Queue, Waiter};
use crate::charge::{Amount, Charge, LimitName};
use crate::checks::Checks;
use crate::decision::Source;
use crate::error::{ConfigError, or_panic};
use crate::failure::{OnStoreFailure, RETRY_AFTER};
use crate::key::BucketKey;
use crate::metrics::{self, Began, End};
use crate::pace::PaceAsk;
use crate::quota::Quota;
use crate::rejection::{Reason, Verdict};
use crate::store::Store;

/// How long an acquire waits, unless [`max_wait`](Limiter::max_wait) says otherwise.
const MAX_WAIT_DEFAULT: Duration = Duration::from_secs(5);
/// Keys for which the store is asked at a time: as many as a Redis store has on the wire.
const QUESTIONS: usize = 64;
/// How many may wait, unless [`max_waiters`](Limiter::max_waiters) says otherwise.
const MAX_WAITERS_DEFAULT: usize = 100_000;

/// Gives tokens to those who wait for them: first come, first served for each key, in this process.
///
/// Several processes share the buckets through their store, where whoever asks first when the tokens are there gets them.
/// A large cost is served in its turn, keys do not wait for each other, and a waiter that is dropped frees its place. The
/// number of calls of the store grows with what is granted, not with how many wait or for how long.
///
/// Cloning it is cheap; clones share the queues, unless their settings are changed: set everything before you clone. It
/// needs a tokio runtime with timers.
///
/// # Example
///
/// ```
/// use tower_token_bucket::outbound::{AcquireError, Limiter};
/// use tower_token_bucket::{BucketKey, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), AcquireError> {
/// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_minute(60).with_capacity(2));
/// let endpoint = BucketKey::id("endpoint 7");
/// limiter.try_acquire(endpoint, 2).await?;
/// let error = limiter.acquire(endpoint, 2).await.map(drop);
/// assert_eq!(error, Ok(()), "two seconds are less than the five that it waits at most");
/// # Ok(())
/// # }
/// ```
pub struct Limiter<St> {
    pub(super) shared: Arc<Shared<St>>,
}

pub(super) struct Shared<St> {
    pub(super) checks: Checks<St>,
    pub(super) limit: LimitName,
    pub(super) quota: Quota,
    max_wait: Duration,
    max_waiters: usize,
    queues: Arc<Queues>,
    pub(super) adaptive: Option<Adaptive>,
    pub(super) watcher: Watcher,
}

#[derive(Default)]
pub(super) struct Queues {
    of: Mutex<HashMap<BucketKey, Arc<Queue>>>,
    waiting: AtomicUsize,
    /// Questions to the store at a time: more keys than that wait here, where no deadline runs.
    questions: Questions,
}

struct Questions(Semaphore);

impl Default for Questions {
    fn default() -> Self {
        Self(Semaphore::new(QUESTIONS))
    }
}

impl<St: Store> Limiter<St> {
    /// Creates a limiter whose buckets are named by `limit` and key.
    ///
    /// # Panics
    ///
    /// When `limit` is not 1 to 64 of `A-Z a-z 0-9 . _ -`; [`try_new`](Self::try_new) returns the error.
    #[must_use]
    #[track_caller]
    pub fn new(store: St, limit: &str, quota: Quota) -> Self {
        or_panic(Self::try_new(store, limit, quota))
    }

    /// Creates a limiter, like [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// [`ConfigError::LimitName`] when `limit` is not 1 to 64 of `A-Z a-z 0-9 . _ -`.
    pub fn try_new(store: St, limit: &str, quota: Quota) -> Result<Self, ConfigError> {
        let shared = Shared {
            checks: Checks::new(store),
            limit: LimitName::try_new(limit)?,
            quota,
            max_wait: MAX_WAIT_DEFAULT,
            max_waiters: MAX_WAITERS_DEFAULT,
            queues: Arc::default(),
            adaptive: None,
            watcher: Watcher::default(),
        };
        metrics::limit_is(limit, quota);
        Ok(Self { shared: Arc::new(shared) })
    }
}

impl<St: Clone> Limiter<St> {
    /// With settings of its own it is a limiter of its own: whoever waits is served by those it came to.
    pub(super) fn set(mut self, set: impl FnOnce(&mut Shared<St>)) -> Self {
        let shared = Arc::make_mut(&mut self.shared);
        shared.queues = Arc::default();
        set(shared);
        self
    }

    /// Sets how long an [`acquire`](Self::acquire) waits at most; by default 5 s.
    #[must_use]
    pub fn max_wait(self, max_wait: Duration) -> Self {
        self.set(|shared| shared.max_wait = max_wait)
    }

    /// Sets how many may wait at a time, for all keys together; by default 100,000. One more is
    /// [refused](AcquireError::Crowded) at once.
    #[must_use]
    pub fn max_waiters(self, waiters: usize) -> Self {
        self.set(|shared| shared.max_waiters = waiters)
    }

    /// Sets how long one check of the store may take, until [`on_store_failure`](Self::on_store_failure) applies; by
    /// default 50 ms.
    ///
    /// # Panics
    ///
    /// When `deadline` is zero; [`try_deadline`](Self::try_deadline) returns the error.
    #[must_use]
    #[track_caller]
    pub fn deadline(self, deadline: Duration) -> Self {
        or_panic(self.try_deadline(deadline))
    }

    /// Sets how long one check of the store may take, like [`deadline`](Self::deadline).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Deadline`] when `deadline` is zero.
    pub fn try_deadline(self, deadline: Duration) -> Result<Self, ConfigError> {
        if deadline.is_zero() {
            return Err(ConfigError::Deadline);
        }
        Ok(self.set(|shared| shared.checks.deadline = deadline))
    }

    /// Sets what happens when the store fails: by default [`OnStoreFailure::Local`], buckets of this process, which with
    /// a [share](Self::share) keep to the peer's limit. `Deny` gives [`AcquireError::StoreFailed`]; `Allow` gives tokens
    /// that nobody counts, and so breaks the promise that this limiter is for.
    #[must_use]
    pub fn on_store_failure(self, policy: OnStoreFailure) -> Self {
        self.set(|shared| shared.checks.on_store_failure = policy)
    }

    /// Gives the local buckets of [`OnStoreFailure::Local`] one `n`-th of the quota, for n senders; by default 1, the
    /// whole quota. A cost above the share cannot be paid while the store fails: [`AcquireError::StoreFailed`].
    ///
    /// # Panics
    ///
    /// When `n` is 0; [`try_share`](Self::try_share) returns the error.
    #[must_use]
    #[track_caller]
    pub fn share(self, n: u32) -> Self {
        or_panic(self.try_share(n))
    }

    /// Gives the local buckets one `n`-th of the quota, like [`share`](Self::share).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Share`] when `n` is 0.
    pub fn try_share(self, n: u32) -> Result<Self, ConfigError> {
        if n == 0 {
            return Err(ConfigError::Share);
        }
        Ok(self.set(|shared| shared.checks.share = n))
    }

    /// Calls `watch` with everything that [happens](Event), for metrics and alerts: at once, in the task in which it happens,
    /// so it must not block. The last one set is called, and one that panics is no fault of the limiter. The key shows as a
    /// hash: to name an endpoint, keep a map from `BucketKey` to its name.
    ///
    /// # Example
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    /// use std::time::Duration;
    /// use tower_token_bucket::outbound::{AdaptiveRate, Event, Limiter};
    /// use tower_token_bucket::{BucketKey, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_token_bucket::outbound::AcquireError> {
    /// let waited_ms = Arc::new(AtomicU64::new(0));
    /// let sum = Arc::clone(&waited_ms);
    /// let limiter = Limiter::new(MemoryStore::new(), "webhooks", Quota::per_second(10).with_capacity(1))
    ///     .adaptive(AdaptiveRate::below(10.0))
    ///     .on_event(move |key, event| match event {
    ///         Event::Acquired { waited, .. } => drop(sum.fetch_add(waited.as_millis() as u64, Relaxed)),
    ///         Event::Refused(state) if state.at_floor > Some(Duration::from_secs(300)) => {
    ///             eprintln!("{key} has refused all but {} requests a second for 5 minutes", state.rate);
    ///         }
    ///         _ => {}
    ///     });
    /// limiter.acquire(BucketKey::id("endpoint 7"), 1).await?;
    /// limiter.acquire(BucketKey::id("endpoint 7"), 1).await?;
    /// assert_eq!(waited_ms.load(Relaxed), 100);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn on_event(self, watch: impl Fn(&BucketKey, &Event) + Send + Sync + 'static) -> Self {
        self.set(|shared| shared.watcher = Watcher::new(watch))
    }
}

impl<St: Store> Limiter<St> {
    /// Takes `cost` tokens if they are there and nobody waits for them.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] says why not, and when.
    pub async fn try_acquire(&self, key: BucketKey, cost: u64) -> Result<(), AcquireError> {
        self.acquire_within(key, cost, Duration::ZERO).await.map(drop)
    }

    /// Waits for `cost` tokens and takes them, and returns how long that took: at most
    /// [`max_wait`](Self::max_wait), and the [`deadline`](Self::deadline) of one check. Where that is known not to be
    /// enough, it fails at once.
    ///
    /// Dropped before it is ready it takes nothing, unless the store is being asked at that moment: then the tokens go to
    /// the next that waits.
    ///
    /// # Errors
    ///
    /// [`AcquireError`] says why there are none, and when: nothing was taken.
    pub async fn acquire(&self, key: BucketKey, cost: u64) -> Result<Duration, AcquireError> {
        self.acquire_within(key, cost, self.shared.max_wait).await
    }

    async fn acquire_within(&self, key: BucketKey, cost: u64, max_wait: Duration) -> Result<Duration, AcquireError> {
        if cost == 0 {
            return Ok(Duration::ZERO);
        }
        let result = self.shared.wait(key, cost, max_wait).await;
        metrics::waited(self.shared.limit.as_str(), cost, &result);
        self.shared.watcher.tell(&key, || match &result {
            Ok(waited) => Event::Acquired { cost, waited: *waited },
            Err(error) => Event::NotAcquired(error.clone()),
        });
        result
    }
}

impl<St: Store> Shared<St> {
    async fn wait(self: &Arc<Self>, key: BucketKey, cost: u64, max_wait: Duration) -> Result<Duration, AcquireError> {
        let capacity = self.quota.capacity();
        if cost > capacity {
            return Err(AcquireError::TooDear { cost, capacity });
        }
        let began = Instant::now();
        let _waiting = Waiter::new(&self.queues.waiting, self.max_waiters)?;
        self.enter(key, cost, began, max_wait)?.await?;
        Ok(began.elapsed())
    }

    /// What the bucket of a key holds, heard without asking.
    pub(super) fn heard(&self, key: BucketKey, known: Known) {
        let queues = self.queues.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.get(&key) {
            queue.heard(known);
        }
    }

    /// Joins the queue of a key, and starts the task that serves it if there is none.
    fn enter(
        self: &Arc<Self>,
        key: BucketKey,
        cost: u64,
        now: Instant,
        max_wait: Duration,
    ) -> Result<Answer, AcquireError> {
        let mut queues = self.queues.of.lock().unwrap_or_else(PoisonError::into_inner);
        let mut is_new = false;
        let queue = queues.entry(key).or_insert_with(|| {
            is_new = true;
            let known = self.adaptive.as_ref().and_then(|adaptive| adaptive.heard.known(&key, now));
            Arc::new(Queue::new(self.quota.capacity(), known))
        });
        let answer = match queue.push(cost, now, max_wait) {
            Ok(answer) => answer,
            Err(error) => {
                if is_new {
                    queues.remove(&key);
                }
                return Err(error);
            }
        };
        let queue = Arc::clone(queue);
        drop(queues);
        if is_new {
            // Made here, so that nobody waits for a task that no runtime runs.
            let serving = Serving { queues: Arc::clone(&self.queues), key, queue };
            tokio::spawn(Arc::clone(self).serve(serving));
        }
        Ok(answer)
    }

    /// Asks for tokens, of which the first needs so many: those that are given, if any, and what the bucket holds; or when
    /// the store is asked again.
    async fn ask(&self, key: BucketKey, cost: u64, first: u64) -> Result<(Option<u64>, Option<Known>), Duration> {
        // The share of a process that is on its own may be smaller than what was asked for all together.
        let share = self.quota.share(self.checks.share).capacity();
        let given = |is_local: bool| if is_local { cost.min(share) } else { cost };
        if let Some(adaptive) = &self.adaptive {
            return match self.pace(adaptive, key, PaceAsk::Take(cost)).await {
                Ok((reply, is_local)) => {
                    self.watcher.tell(&key, || Event::Rate(RateState::of(&reply)));
                    Ok((reply.allowed.then(|| given(is_local)), Some(Known::of_pace(&reply, Instant::now()))))
                }
                Err(error) => Err(error.retry_after().unwrap_or_default()),
            };
        }
        let charges = [Charge::new(self.limit.clone(), key, self.quota, Amount::Take(cost))];
        let is_dear = self.checks.on_store_failure == OnStoreFailure::Local && first > share;
        let began = Began::now();
        let answer = timeout(self.checks.deadline, self.checks.acquire(&charges)).await;
        began.ended(End::of(&answer));
        let Verdict { decision, refused } = match answer {
            Ok(Ok(decision)) => {
                self.checks.failures.answered();
                Verdict::of(decision)
            }
            // More than the share cannot be paid here.
            Ok(Err(error)) if is_dear => return Err(self.checks.failed(&error).unwrap_or(RETRY_AFTER)),
            Err(_) if is_dear => return Err(self.checks.too_late().unwrap_or(RETRY_AFTER)),
            Ok(Err(error)) => self.checks.fail(&charges, &error),
            Err(_) => self.checks.late(&charges),
        };
        if let Some(Reason::StoreFailed { retry_after }) = refused {
            return Err(retry_after);
        }
        let given = decision.is_allowed().then(|| given(decision.source() == Source::Local));
        Ok((given, Known::of(&decision, Instant::now())))
    }

    /// Gives tokens to those who wait for this key, until nobody does.
    async fn serve(self: Arc<Self>, serving: Serving) {
        let queue = &serving.queue;
        let mut question = None;
        loop {
            match queue.next(Instant::now()) {
                Some(Ok((cost, first))) => {
                    let questions = &self.queues.questions.0;
                    if question.is_none() {
                        question = questions.try_acquire().ok();
                    }
                    if question.is_none() {
                        // Nobody closes it. Some may have left by then.
                        question = questions.acquire().await.ok();
                        continue;
                    }
                    let answer = self.ask(serving.key, cost, first).await;
                    question = None;
                    match answer {
                        Ok((given, known)) => queue.answered(given, known, Instant::now()),
                        Err(retry_after) => queue.fail(retry_after),
                    }
                    continue;
                }
                Some(Err(until)) => queue.changed_until(until).await,
                // Unless somebody has come since.
                None if serving.is_over() => return,
                None => {}
            }
            question = None;
        }
    }
}

/// A queue that is served. When that ends, in whatever way, nobody waits for it any longer.
struct Serving {
    queues: Arc<Queues>,
    key: BucketKey,
    queue: Arc<Queue>,
}

impl Serving {
    /// Takes the queue out of the map if nobody waits.
    fn is_over(&self) -> bool {
        let mut queues = self.queues.of.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = self.queue.is_empty();
        if is_over {
            queues.remove(&self.key);
        }
        is_over
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let mut queues = self.queues.of.lock().unwrap_or_else(PoisonError::into_inner);
        if queues.get(&self.key).is_some_and(|queue| Arc::ptr_eq(queue, &self.queue)) {
            queues.remove(&self.key);
        }
        drop(queues);
        self.queue.fail(RETRY_AFTER);
    }
}

impl<St> Clone for Limiter<St> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<St: Clone> Clone for Shared<St> {
    fn clone(&self) -> Self {
        let Self { checks, limit, quota, max_wait, max_waiters, queues, adaptive, watcher } = self;
        Self {
            checks: checks.clone(),
            limit: limit.clone(),
            quota: *quota,
            max_wait: *max_wait,
            max_waiters: *max_waiters,
            queues: Arc::clone(queues),
            adaptive: adaptive.clone(),
            watcher: watcher.clone(),
        }
    }
}

impl<St> fmt::Debug for Limiter<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("limit", &self.shared.limit)
            .field("quota", &self.shared.quota)
            .field("max_wait", &self.shared.max_wait)
            .finish_non_exhaustive()
    }
}
