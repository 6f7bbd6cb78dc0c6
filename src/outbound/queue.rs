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

/// The first asks again at least so often, so that a changed rate or a refund is noticed.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// All are looked through again when the last has to wait so much longer.
const LATE: Duration = Duration::from_millis(1);
/// Longer than anybody waits, and short enough to be added to any time.
const FOR_EVER: Duration = Duration::from_secs(1 << 32);

/// Those that wait for one key.
pub(super) struct Queue {
    capacity: u64,
    state: Mutex<State>,
    /// Somebody has left.
    changed: Notify,
}

#[derive(Default)]
struct State {
    places: VecDeque<Place>,
    /// What they cost together, without those that have left.
    waiting: u64,
    /// Tokens that somebody left behind who was given them: the next have them.
    credit: u64,
    known: Option<Known>,
    asked: Option<Instant>,
    /// Beyond the promised moment, after somebody else was quicker.
    jitter: Duration,
    /// By how much the last has to wait longer than when all were last looked through.
    late: Duration,
    /// Somebody has left.
    left: bool,
}

struct Place {
    cost: u64,
    until: Instant,
    answer: oneshot::Sender<Result<(), AcquireError>>,
}

/// What the bucket held when it was last heard of.
#[derive(Clone, Copy)]
pub(super) struct Known {
    at: Instant,
    /// It refills from then on.
    ahead: Duration,
    /// In units of 1/p token at a refill rate of n tokens in p microseconds.
    level: i64,
    n: u64,
    p: u64,
}

impl Known {
    pub(super) fn of(decision: &Decision, now: Instant) -> Option<Self> {
        let outcome = decision.outcomes().first()?;
        let (reply, quota) = (outcome.reply()?, outcome.quota());
        let ahead = Duration::from_micros(reply.ahead_us());
        Some(Self { at: now, ahead, level: reply.level(), n: quota.tokens(), p: quota.per_us() })
    }

    pub(super) fn of_pace(reply: &PaceReply, now: Instant) -> Self {
        let ahead = Duration::from_micros(reply.ahead_us);
        Self { at: now, ahead, level: reply.level, n: reply.rate, p: UNITS }
    }

    /// When the bucket will have given that many tokens, if all go to those who wait.
    fn when(&self, tokens: u64) -> Instant {
        let needed = i128::from(tokens) * i128::from(self.p);
        let missing = (needed - i128::from(self.level)).max(0) as u128;
        if missing == 0 {
            return self.at;
        }
        let micros = u64::try_from(missing.div_ceil(u128::from(self.n))).unwrap_or(u64::MAX);
        self.at + self.ahead + Duration::from_micros(micros).min(FOR_EVER)
    }
}

impl Queue {
    /// A queue for a bucket of which something may be known, and since when.
    pub(super) fn new(capacity: u64, known: Option<(Known, Instant)>) -> Self {
        let (known, asked) = known.unzip();
        Self { capacity, state: Mutex::new(State { known, asked, ..State::default() }), changed: Notify::new() }
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
        let until = now + max_wait.min(FOR_EVER);
        if let Some(known) = state.known {
            let when = known.when((state.waiting + cost).saturating_sub(state.credit));
            if when > until {
                return Err(AcquireError::NoTokens { retry_after: when - now });
            }
        }
        let (answer, receiver) = oneshot::channel();
        state.places.push_back(Place { cost, until, answer });
        state.waiting += cost;
        Ok(Answer { queue: Arc::clone(self), receiver, cost, is_done: false })
    }

    /// What to ask the store for now: the cost of the first, and of those after it whose tokens are there too; and that of
    /// the first alone. Or until when to wait with that. `None` when nobody waits any more.
    pub(super) fn next(&self, now: Instant) -> Option<Result<(u64, u64), Instant>> {
        let mut state = self.state();
        state.look_through(now);
        let State { places, credit, known, asked, jitter, .. } = &mut *state;
        let (first, until) = places.front().map(|place| (place.cost.saturating_sub(*credit), place.until))?;
        let Some(known) = known else { return Some(Ok((first, first))) };
        let mut ask_at = (known.when(first) + *jitter).min(until);
        if let Some(asked) = asked {
            ask_at = ask_at.min(*asked + ASK_AGAIN);
        }
        if ask_at > now {
            return Some(Err(ask_at));
        }
        let mut cost = first;
        for place in places.iter().skip(1) {
            if known.when(cost + place.cost) > now || cost + place.cost > self.capacity {
                break;
            }
            cost += place.cost;
        }
        Some(Ok((cost, first)))
    }

    /// The store's answer to what was asked for: the tokens that it gives.
    pub(super) fn answered(&self, given: Option<u64>, known: Option<Known>, now: Instant) {
        let mut state = self.state();
        let before = state.known;
        let last_before = before.map(|known| known.when(state.waiting.saturating_sub(state.credit)));
        let first = state.places.front().map_or(0, |place| place.cost.saturating_sub(state.credit));
        // Where it was promised by now, and is not there, somebody else was quicker.
        let was_promised = before.is_some_and(|before| before.when(first) <= now);
        let wait = known.map_or(Duration::ZERO, |known| known.when(first).saturating_duration_since(now));
        state.jitter = if given.is_none() && was_promised { wait.mul_f64(0.1 * random()) } else { Duration::ZERO };
        state.known = known;
        state.asked = Some(now);
        if let Some(tokens) = given {
            state.give(tokens);
        }
        let last = known.map(|known| known.when(state.waiting.saturating_sub(state.credit)));
        state.late += match (last_before, last) {
            (Some(before), Some(last)) => last.saturating_duration_since(before),
            _ => FOR_EVER,
        };
    }

    /// What the bucket holds, heard without asking.
    pub(super) fn heard(&self, known: Known) {
        let mut state = self.state();
        state.known = Some(known);
        state.late = FOR_EVER;
        drop(state);
        self.changed.notify_one();
    }

    /// Nobody waits any longer: the store failed, or nobody asks it.
    pub(super) fn fail(&self, retry_after: Duration) {
        let mut state = self.state();
        state.waiting = 0;
        for place in std::mem::take(&mut state.places) {
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
    fn give(&mut self, tokens: u64) {
        self.credit += tokens;
        while self.places.front().is_some_and(|place| place.cost <= self.credit)
            && let Some(place) = self.places.pop_front()
        {
            // One that has left has taken its cost out of the sum itself.
            if place.answer.is_closed() {
                continue;
            }
            self.waiting -= place.cost;
            if place.answer.send(Ok(())).is_ok() {
                self.credit -= place.cost;
            }
        }
        if self.places.is_empty() {
            self.credit = 0;
        }
    }

    /// Forgets those that have left, and tells those that cannot be served in time: where anything has changed that much.
    fn look_through(&mut self, now: Instant) {
        if std::mem::take(&mut self.left) {
            self.places.retain(|place| !place.answer.is_closed());
            // What they have left behind may be enough for the next.
            self.give(0);
        }
        // Whose time is over has asked for the last time.
        let is_over = self.places.front().is_some_and(|place| place.until <= now);
        if self.late < LATE && !is_over {
            return;
        }
        self.late = Duration::ZERO;
        let Some(known) = self.known else { return };
        let mut before = 0;
        for place in std::mem::take(&mut self.places) {
            let when = known.when((before + place.cost).saturating_sub(self.credit));
            if when > place.until && when > now {
                if !place.answer.is_closed() {
                    self.waiting -= place.cost;
                }
                let _ = place.answer.send(Err(AcquireError::NoTokens { retry_after: when - now }));
            } else {
                before += place.cost;
                self.places.push_back(place);
            }
        }
        // There may be another first.
        self.give(0);
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
        let mut state = self.queue.state();
        self.receiver.close();
        match self.receiver.try_recv() {
            // Given, and not received: the next have them.
            Ok(Ok(())) => state.give(self.cost),
            Ok(Err(_)) => {}
            Err(_) => state.waiting = state.waiting.saturating_sub(self.cost),
        }
        state.left = true;
        drop(state);
        self.queue.changed.notify_one();
    }
}
