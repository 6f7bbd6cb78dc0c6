//! Whether a server is asked at all: not for a while after it has failed a few times in a row.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Failures in a row that open the breaker.
const FAILURES: u32 = 5;
/// How long it is open at first. Each probe that fails doubles that, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(100);
/// Short enough to be well again within a second of the server's return.
const PAUSE_MAX: Duration = Duration::from_millis(400);

/// What a breaker lets through.
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
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    health: Health,
    /// While open: when the next probe may go.
    probe_at: Instant,
    pause: Duration,
    /// When the last outage began.
    since: Instant,
}

/// A check that was let through, to be told apart from others when it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    began: Instant,
    probe: bool,
}

/// A change of state that the operator should hear of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Opened,
    /// After so long.
    Closed(Duration),
}

impl Breaker {
    pub(super) fn new(now: Instant) -> Self {
        let state = State { health: Health::Closed, probe_at: now, pause: PAUSE, since: now };
        Self { failures: AtomicU32::new(0), state: Mutex::new(state) }
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
                Health::Open if now >= state.probe_at => {
                    state.health = Health::Probing;
                    return Ok(Ticket { began: now, probe: true });
                }
                Health::Open => return Err(state.probe_at - now),
                Health::Probing => return Err(state.pause),
            }
        }
        Ok(Ticket { began: now, probe: false })
    }

    /// A check was answered while its caller waited.
    pub(super) fn answered(&self, ticket: Ticket) -> Option<Change> {
        if !ticket.probe && self.failures.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut state = self.state();
        if ticket.probe {
            state.health = Health::Closed;
            state.pause = PAUSE;
            self.failures.store(0, Ordering::Relaxed);
            return Some(Change::Closed(state.since.elapsed()));
        }
        // An answer that was on its way when the breaker opened does not close it.
        if state.health == Health::Closed {
            self.failures.store(0, Ordering::Relaxed);
        }
        None
    }

    /// A check failed.
    pub(super) fn failed(&self, ticket: Ticket, now: Instant) -> Option<Change> {
        let mut state = self.state();
        if ticket.probe {
            state.health = Health::Open;
            state.pause = (state.pause * 2).min(PAUSE_MAX);
            state.probe_at = now + state.pause;
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
        *state = State { health: Health::Open, probe_at: now + PAUSE, pause: PAUSE, since: ticket.began };
        Some(Change::Opened)
    }

    /// A check was given up without an answer: after `patience` that is a failure, before it says nothing, since its
    /// client may have gone away. Whether it was a failure, and the change.
    pub(super) fn given_up(&self, ticket: Ticket, patience: Duration, now: Instant) -> (bool, Option<Change>) {
        if now - ticket.began >= patience {
            return (true, self.failed(ticket, now));
        }
        if ticket.probe {
            let mut state = self.state();
            state.health = Health::Open;
            state.probe_at = now;
        }
        (false, None)
    }
}

impl fmt::Debug for Breaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Breaker").field("health", &self.health()).finish_non_exhaustive()
    }
}
