//! Those that wait for the tokens of one key, in the order in which they came.

use std::collections::VecDeque;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout_at};

use super::error::AcquireError;
use crate::decision::Decision;
use crate::pace::{PaceReply, UNITS};
use crate::quota::Quota;

/// The first asks again at least so often, so that a changed rate or a refund is noticed.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Those that wait for one key.
pub(super) struct Queue {
    quota: Quota,
    state: Mutex<State>,
    /// Somebody has left.
    changed: Notify,
}

#[derive(Default)]
struct State {
    places: VecDeque<Place>,
    known: Option<Known>,
    asked: Option<Instant>,
    /// Beyond the promised moment, after somebody else was quicker.
    jitter: Duration,
}

struct Place {
    cost: u64,
    until: Instant,
    answer: oneshot::Sender<Result<(), AcquireError>>,
}

/// What the bucket held when it was last heard of.
#[derive(Clone, Copy)]
pub(super) struct Known {
    /// From when on it refills.
    at: Instant,
    /// In units of 1/p token at a refill rate of n tokens in p microseconds.
    level: i64,
    n: u64,
    p: u64,
}

impl Known {
    pub(super) fn of(decision: &Decision, now: Instant) -> Option<Self> {
        let outcome = decision.outcomes().first()?;
        let (reply, quota) = (outcome.reply()?, outcome.quota());
        let at = now + Duration::from_micros(reply.ahead_us());
        Some(Self { at, level: reply.level(), n: quota.tokens(), p: quota.per_us() })
    }

    pub(super) fn of_pace(reply: &PaceReply, now: Instant) -> Self {
        Self { at: now + Duration::from_micros(reply.ahead_us), level: reply.level, n: reply.rate, p: UNITS }
    }

    /// When the bucket will have given that many tokens, if all go to those who wait.
    fn when(&self, tokens: u64) -> Instant {
        let needed = i128::from(tokens) * i128::from(self.p);
        let missing = (needed - i128::from(self.level)).max(0) as u128;
        let micros = missing.div_ceil(u128::from(self.n));
        // Longer than anybody waits, where it does not fit.
        let wait = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX).min(u64::from(u32::MAX) << 16));
        self.at + wait
    }
}

impl Queue {
    pub(super) fn new(quota: Quota) -> Self {
        Self { quota, state: Mutex::default(), changed: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can leave it half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.state().places.is_empty()
    }

    /// Joins the end, unless it is known that the tokens are not there in time.
    pub(super) fn push(self: &Arc<Self>, cost: u64, now: Instant, max_wait: Duration) -> Result<Answer, AcquireError> {
        let mut state = self.state();
        let before: u64 = state.places.iter().map(|place| place.cost).sum();
        let until = now + max_wait;
        if let Some(known) = state.known {
            let when = known.when(before + cost);
            if when > until {
                return Err(AcquireError::NoTokens { retry_after: when - now });
            }
        }
        let (answer, receiver) = oneshot::channel();
        state.places.push_back(Place { cost, until, answer });
        Ok(Answer { queue: Arc::clone(self), receiver, cost, is_done: false })
    }

    /// What to ask the store for now: the costs of the first, and of those after it whose tokens are there too. Or until
    /// when to wait with that. `None` when nobody waits any more.
    pub(super) fn next(&self, now: Instant) -> Option<Result<u64, Instant>> {
        let mut state = self.state();
        let State { places, known, asked, jitter } = &mut *state;
        places.retain(|place| !place.answer.is_closed());
        if let Some(known) = known {
            // Whoever cannot be served in time hears of it now, and is in nobody's way.
            let mut before = 0;
            for place in std::mem::take(places) {
                let when = known.when(before + place.cost);
                if when.max(now) > place.until && when > now {
                    let _ = place.answer.send(Err(AcquireError::NoTokens { retry_after: when - now }));
                } else {
                    before += place.cost;
                    places.push_back(place);
                }
            }
        }
        let first = places.front()?.cost;
        let Some(known) = known else { return Some(Ok(first)) };
        let mut ask_at = known.when(first) + *jitter;
        if let Some(asked) = asked {
            ask_at = ask_at.min(*asked + ASK_AGAIN);
        }
        if ask_at > now {
            return Some(Err(ask_at));
        }
        let mut cost = first;
        for place in places.iter().skip(1) {
            if known.when(cost + place.cost) > now || cost + place.cost > self.quota.capacity() {
                break;
            }
            cost += place.cost;
        }
        Some(Ok(cost))
    }

    /// The store's answer to what was asked for.
    pub(super) fn answered(&self, cost: u64, is_allowed: bool, known: Option<Known>, now: Instant) {
        let mut state = self.state();
        // Where it was promised by now, somebody else was quicker.
        let lost = !is_allowed && state.known.is_some_and(|before| before.when(cost) <= now);
        state.jitter = match &known {
            Some(known) if lost => known.when(cost).saturating_duration_since(now).mul_f64(0.1 * random()),
            _ => Duration::ZERO,
        };
        state.known = known;
        state.asked = Some(now);
        if is_allowed {
            state.give(cost);
        }
    }

    /// What the bucket holds, heard without asking.
    pub(super) fn heard(&self, known: Known) {
        self.state().known = Some(known);
        self.changed.notify_one();
    }

    /// The store failed: nobody waits any longer.
    pub(super) fn fail(&self, retry_after: Duration) {
        for place in std::mem::take(&mut self.state().places) {
            let _ = place.answer.send(Err(AcquireError::StoreFailed { retry_after }));
        }
    }

    /// Waits until then, or until somebody leaves.
    pub(super) async fn changed_until(&self, until: Instant) {
        let _ = timeout_at(until, self.changed.notified()).await;
    }
}

impl State {
    /// Gives tokens to the first, and what those that have left do not take to the next.
    fn give(&mut self, mut tokens: u64) {
        while self.places.front().is_some_and(|place| place.cost <= tokens)
            && let Some(place) = self.places.pop_front()
        {
            if place.answer.send(Ok(())).is_ok() {
                tokens -= place.cost;
            }
        }
    }
}

/// A fraction of one, from the randomness that keys hash maps.
pub(super) fn random() -> f64 {
    (RandomState::new().hash_one(0u8) >> 11) as f64 / (1u64 << 53) as f64
}

/// One of those that wait, as far as their number is bounded.
pub(super) struct Waiter<'a>(&'a AtomicUsize);

impl<'a> Waiter<'a> {
    pub(super) fn new(waiting: &'a AtomicUsize, most: usize) -> Result<Self, AcquireError> {
        let one = Self(waiting);
        // Dropped, and so taken back, where there are too many.
        if waiting.fetch_add(1, Ordering::Relaxed) < most { Ok(one) } else { Err(AcquireError::Crowded) }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The tokens to come.
pub(super) struct Answer {
    queue: Arc<Queue>,
    receiver: oneshot::Receiver<Result<(), AcquireError>>,
    cost: u64,
    is_done: bool,
}

impl Future for Answer {
    type Output = Result<(), AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.receiver).poll(cx));
        self.is_done = true;
        // The task that serves the queue goes with its runtime.
        Poll::Ready(answer.unwrap_or(Err(AcquireError::StoreFailed { retry_after: ASK_AGAIN })))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        self.receiver.close();
        // Given, and not received: the next has them.
        if let Ok(Ok(())) = self.receiver.try_recv() {
            self.queue.state().give(self.cost);
        }
        self.queue.changed.notify_one();
    }
}
