//! Whether a server is asked at all: not for a while after it has failed a few times in a row.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::metrics;

/// Failures in a row that open the breaker.
const FAILURES: u32 = 5;
/// How long it is open at first. Each probe that fails doubles that, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(100);
/// It is said to be well after this long without opening again: where only some checks fail it could flap.
const QUIET: Duration = Duration::from_secs(1);
/// Short enough to be well again within a second of the server's return.
const PAUSE_MAX: Duration = Duration::from_millis(400);
/// A probe that takes longer, whose caller has no deadline, no longer keeps others from probing.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// What a breaker lets through.
///
/// # Example
///
/// ```no_run
/// use tower_token_bucket::{Health, RedisErrorKind, RedisStore};
///
/// fn report(store: &RedisStore) {
///     for (address, health) in store.nodes() {
///         println!("{address} is asked: {}", health == Health::Closed);
///     }
///     println!("late: {}", store.failures(RedisErrorKind::Late));
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Health {
    /// The server answers: every check asks it.
    Closed,
    /// The server has failed a few times in a row: checks fail at once, without asking.
    Open,
    /// One check asks whether the server answers again; all others fail at once.
    Probing,
}

/// Opens after a few failures in a row, and lets one probe at a time through until one is answered.
pub(super) struct Breaker {
    /// 0 while all is well, so that checks look at one number that nobody writes.
    failures: AtomicU32,
    /// The operator has been told that it opened, and not yet that all is well.
    told: AtomicBool,
    state: Mutex<State>,
    /// Held while the state is told.
    telling: Mutex<()>,
    /// The server's address.
    node: Box<str>,
}

#[derive(Debug)]
struct State {
    health: Health,
    /// When the next probe may go.
    probe_at: Instant,
    pause: Duration,
    /// When the last outage began, and when it was over.
    since: Instant,
    closed: Instant,
}

/// A check that was let through, to be told apart from others when it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) began: Instant,
    pub(super) probe: bool,
}

/// A change of state that the operator should hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Opened,
    /// After so long.
    Closed(Duration),
}

impl Breaker {
    /// Of the server with that address.
    pub(super) fn new(node: &str, now: Instant) -> Self {
        metrics::breaker_is(node, Health::Closed);
        let state = State { health: Health::Closed, probe_at: now, pause: PAUSE, since: now, closed: now };
        Self {
            failures: AtomicU32::new(0),
            told: AtomicBool::new(false),
            state: Mutex::new(state),
            telling: Mutex::new(()),
            node: node.into(),
        }
    }

    /// Changes the state, when all else is done, and tells it when that is unlocked: a recorder is foreign, and may ask for
    /// it. Who tells reads it again, so that the last state is told last.
    fn set(&self, mut state: MutexGuard<'_, State>, health: Health) {
        state.health = health;
        drop(state);
        let _order = self.telling.lock().unwrap_or_else(PoisonError::into_inner);
        metrics::breaker_is(&self.node, self.health());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can leave it half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn health(&self) -> Health {
        self.state().health
    }

    /// Lets a check through, or says in how long a probe may go.
    pub(super) fn enter(&self, now: Instant) -> Result<Ticket, Duration> {
        // Never more than the failures in a row by the time that this one ends: then they are counted under the lock.
        if self.failures.load(Ordering::Relaxed) >= FAILURES {
            let mut state = self.state();
            match state.health {
                Health::Closed => {}
                Health::Open | Health::Probing if now >= state.probe_at => {
                    state.probe_at = now + PROBE_MAX;
                    self.set(state, Health::Probing);
                    return Ok(Ticket { began: now, probe: true });
                }
                Health::Open => return Err(state.probe_at - now),
                Health::Probing => return Err(state.pause),
            }
        }
        Ok(Ticket { began: now, probe: false })
    }

    /// Whether a check that has waited since may still ask, or in how long a probe may go.
    pub(super) fn enter_again(&self, ticket: Ticket, now: Instant) -> Result<(), Duration> {
        if ticket.probe || self.failures.load(Ordering::Relaxed) < FAILURES {
            return Ok(());
        }
        let state = self.state();
        match state.health {
            Health::Closed => Ok(()),
            Health::Open => Err(state.probe_at.saturating_duration_since(now)),
            Health::Probing => Err(state.pause),
        }
    }

    /// A check was answered while its caller waited.
    pub(super) fn answered(&self, ticket: Ticket) -> Option<Change> {
        let is_told = self.told.load(Ordering::Relaxed);
        if !ticket.probe && !is_told && self.failures.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut state = self.state();
        if ticket.probe {
            state.closed = Instant::now();
            self.failures.store(0, Ordering::Relaxed);
            self.set(state, Health::Closed);
            return None;
        }
        // An answer that was on its way when the breaker opened does not close it.
        if state.health != Health::Closed {
            return None;
        }
        self.failures.store(0, Ordering::Relaxed);
        let is_well = is_told && state.closed.elapsed() >= QUIET;
        if is_well {
            self.told.store(false, Ordering::Relaxed);
            return Some(Change::Closed(state.closed - state.since));
        }
        None
    }

    /// A check failed.
    pub(super) fn failed(&self, ticket: Ticket, now: Instant) -> Option<Change> {
        let mut state = self.state();
        if ticket.probe {
            state.pause = (state.pause * 2).min(PAUSE_MAX);
            state.probe_at = now + state.pause;
            self.set(state, Health::Open);
            return None;
        }
        if state.health != Health::Closed {
            return None;
        }
        let failures = self.failures.load(Ordering::Relaxed) + 1;
        self.failures.store(failures, Ordering::Relaxed);
        if failures < FAILURES {
            return None;
        }
        // One that opens again at once goes on where it was.
        let is_told = self.told.swap(true, Ordering::Relaxed);
        let pause = if is_told { (state.pause * 2).min(PAUSE_MAX) } else { PAUSE };
        let since = if is_told { state.since } else { ticket.began };
        *state = State { probe_at: now + pause, pause, since, ..*state };
        self.set(state, Health::Open);
        (!is_told).then_some(Change::Opened)
    }

    /// A check ended in a way that says nothing of the server.
    pub(super) fn said_nothing(&self, ticket: Ticket, now: Instant) {
        if ticket.probe {
            let mut state = self.state();
            state.probe_at = now;
            self.set(state, Health::Open);
        }
    }
}

impl fmt::Debug for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker").field("health", &self.health()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A breaker that has just opened, and when.
    fn opened() -> (Breaker, Instant) {
        let now = Instant::now();
        let breaker = Breaker::new("", now);
        for i in 1..=FAILURES {
            let change = breaker.failed(breaker.enter(now).unwrap(), now);
            assert_eq!(change, (i == FAILURES).then_some(Change::Opened));
        }
        assert_eq!(breaker.health(), Health::Open);
        (breaker, now)
    }

    #[test]
    fn a_few_failures_in_a_row_open_it_and_an_answer_between_them_does_not() {
        let now = Instant::now();
        let breaker = Breaker::new("", now);
        for _ in 0..10 {
            for _ in 1..FAILURES {
                assert_eq!(breaker.failed(breaker.enter(now).unwrap(), now), None);
            }
            assert_eq!(breaker.answered(breaker.enter(now).unwrap()), None);
        }
        assert_eq!(breaker.health(), Health::Closed);
        opened();
    }

    #[test]
    fn one_probe_at_a_time_asks_after_the_pause_and_its_answer_closes_it() {
        let (breaker, now) = opened();
        assert_eq!(breaker.enter(now).unwrap_err(), PAUSE);
        assert_eq!(breaker.enter(now + PAUSE - MS).unwrap_err(), MS);
        let probe = breaker.enter(now + PAUSE).unwrap();
        assert_eq!(breaker.health(), Health::Probing);
        for _ in 0..3 {
            breaker.enter(now + 10 * PAUSE_MAX).unwrap_err();
        }
        // Unless it hangs.
        assert!(breaker.enter(now + PAUSE + PROBE_MAX).unwrap().probe);
        breaker.enter(now + PAUSE + PROBE_MAX).unwrap_err();
        assert_eq!(breaker.answered(probe), None, "it is said to be well when it stays so");
        assert_eq!(breaker.health(), Health::Closed);
        assert!(!breaker.enter(now).unwrap().probe);
        // It takes as many failures to open it again.
        assert_eq!(breaker.failed(breaker.enter(now).unwrap(), now), None);
    }

    #[test]
    fn each_probe_that_fails_doubles_the_pause_up_to_its_bound() {
        let (breaker, mut now) = opened();
        now += PAUSE;
        for pause in [2 * PAUSE, 4 * PAUSE, 4 * PAUSE, 4 * PAUSE] {
            let probe = breaker.enter(now).unwrap();
            assert_eq!(breaker.failed(probe, now), None);
            assert_eq!(breaker.enter(now).unwrap_err(), pause.min(PAUSE_MAX));
            now += pause.min(PAUSE_MAX);
        }
        // Where it opens again at once it goes on with the long one, and says nothing.
        breaker.answered(breaker.enter(now).unwrap());
        for _ in 0..FAILURES {
            assert_eq!(breaker.failed(breaker.enter(now).unwrap(), now), None);
        }
        assert_eq!(breaker.enter(now).unwrap_err(), PAUSE_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn it_is_said_to_be_well_after_a_quiet_second() {
        let (breaker, now) = opened();
        tokio::time::advance(PAUSE).await;
        breaker.answered(breaker.enter(now + PAUSE).unwrap());
        tokio::time::advance(QUIET - MS).await;
        assert_eq!(breaker.answered(breaker.enter(now).unwrap()), None);
        tokio::time::advance(MS).await;
        let change = breaker.answered(breaker.enter(now).unwrap());
        assert_eq!(change, Some(Change::Closed(PAUSE)));
        assert_eq!(breaker.answered(breaker.enter(now).unwrap()), None);
        // Then the next outage starts with the short pause.
        let now = Instant::now();
        for _ in 0..FAILURES {
            breaker.failed(breaker.enter(now).unwrap(), now);
        }
        assert_eq!(breaker.enter(now).unwrap_err(), PAUSE);
    }

    #[test]
    fn what_was_on_its_way_when_it_opened_neither_closes_nor_reopens_it() {
        let now = Instant::now();
        let breaker = Breaker::new("", now);
        let early: Vec<_> = (0..FAILURES + 2).map(|_| breaker.enter(now).unwrap()).collect();
        for ticket in &early[..FAILURES as usize] {
            breaker.failed(*ticket, now);
        }
        assert_eq!(breaker.answered(early[FAILURES as usize]), None);
        assert_eq!(breaker.failed(early[FAILURES as usize + 1], now), None);
        // What has not been sent by then is not sent.
        assert_eq!(breaker.enter_again(early[0], now).unwrap_err(), PAUSE);
        assert_eq!(breaker.health(), Health::Open);
        assert_eq!(breaker.enter(now).unwrap_err(), PAUSE);
    }

    #[test]
    fn a_probe_that_says_nothing_makes_room_for_the_next() {
        let (breaker, now) = opened();
        let probe = breaker.enter(now + PAUSE).unwrap();
        breaker.enter(now + PAUSE).unwrap_err();
        breaker.said_nothing(probe, now + PAUSE + MS);
        assert!(breaker.enter(now + PAUSE + MS).unwrap().probe);
    }
}
