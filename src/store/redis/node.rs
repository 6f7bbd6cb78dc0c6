//! One server, and the care that is taken of it: how many checks are on the wire, how many wait, and whether it is asked
//! at all.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, RedisResult, Value};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::breaker::{Breaker, Change, Health};
use super::connection::{Connection, Generation, Open};
use super::error::{Address, Counts, RedisError, RedisErrorKind};
use super::gather::Gather;
use crate::log;

/// Checks on the wire: what is charged at most after all callers have given up.
pub(super) const ON_THE_WIRE: usize = 64;
/// Checks that wait for a place on the wire. One more is refused at once.
pub(super) const WAITING: usize = 4096;

/// One server.
pub(super) struct Node {
    link: Link,
    pub(super) breaker: Breaker,
    pub(super) places: Arc<Semaphore>,
    /// Those that wait for a place by themselves.
    waiting: AtomicUsize,
    pub(super) gather: Gather,
    /// Counts the answers that came while their callers waited. A server that gives any has not failed those that it
    /// answers later.
    pub(super) answers: AtomicU64,
    /// The last connection whose loss was a failure: it is one, however many were on it.
    pub(super) losses: AtomicU64,
    pub(super) counts: Arc<Counts>,
}

/// What leads to the server.
enum Link {
    Own(Connection),
    Given(Arc<dyn Given>),
}

impl Link {
    fn address(&self) -> Option<String> {
        match self {
            Self::Own(connection) => Some(connection.address()),
            Self::Given(_) => None,
        }
    }
}

/// An open way to the server.
pub(super) enum Wire {
    Own(Open),
    Given(Arc<dyn Given>),
}

pub(super) type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A connection of the user's own.
pub(super) trait Given: Send + Sync {
    fn ask<'a>(&self, cmd: &'a Cmd) -> Boxed<'a, RedisResult<Value>>;
}

impl<C: ConnectionLike + Clone + Send + Sync + 'static> Given for C {
    fn ask<'a>(&self, cmd: &'a Cmd) -> Boxed<'a, RedisResult<Value>> {
        let mut connection = self.clone();
        Box::pin(async move { connection.req_packed_command(cmd).await })
    }
}

fn few_answers() -> redis::RedisError {
    (ErrorKind::UnexpectedReturnType, "one answer to one command").into()
}

/// A server's error comes as a value. Those within an answer are a matter of whoever reads it.
fn server_error(answer: Value) -> RedisResult<Value> {
    match answer {
        Value::ServerError(error) => Err(error.into()),
        answer => Ok(answer),
    }
}

impl Wire {
    /// Sends a command and waits for its answer.
    pub(super) async fn ask(&mut self, cmd: Cmd) -> RedisResult<Value> {
        let answer = match self {
            Self::Own(open) => open.inner.send_packed_command(&cmd).await,
            Self::Given(connection) => connection.ask(&cmd).await,
        };
        answer.and_then(server_error)
    }

    /// Sends commands, one after the other in one go, and waits for the answer to each.
    pub(super) async fn ask_all(&mut self, mut cmds: Vec<Cmd>) -> Vec<RedisResult<Value>> {
        let Self::Own(open) = self else {
            let mut answers = Vec::with_capacity(cmds.len());
            for cmd in cmds {
                answers.push(self.ask(cmd).await);
            }
            return answers;
        };
        if cmds.len() == 1
            && let Some(cmd) = cmds.pop()
        {
            return vec![self.ask(cmd).await];
        }
        let mut pipeline = redis::Pipeline::with_capacity(cmds.len());
        let count = cmds.len();
        cmds.into_iter().for_each(|cmd| _ = pipeline.add_command(cmd));
        match open.inner.send_packed_commands(&pipeline, 0, count).await {
            Ok(answers) if answers.len() == count => answers.into_iter().map(server_error).collect(),
            Ok(_) => vec![Err(few_answers()); count],
            Err(error) => vec![Err(error); count],
        }
    }

    /// The same for a key that is on its way to this server.
    pub(super) async fn ask_for_a_moving_key(&mut self, cmd: Cmd) -> RedisResult<Value> {
        let Self::Own(open) = self else { return self.ask(cmd).await };
        // One pipeline, so that nobody's command comes between the two.
        let mut pipeline = redis::pipe();
        pipeline.add_command(Cmd::new().arg("ASKING").take()).add_command(cmd);
        let mut answers = open.inner.send_packed_commands(&pipeline, 1, 1).await?;
        answers.pop().ok_or_else(few_answers).and_then(server_error)
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        match self {
            Self::Own(open) => Some(open.generation),
            Self::Given(_) => None,
        }
    }
}

impl Node {
    pub(super) fn own(connection: Connection, counts: Arc<Counts>) -> Self {
        Self::new(Link::Own(connection), counts)
    }

    pub(super) fn given<C>(connection: C, counts: Arc<Counts>) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::new(Link::Given(Arc::new(connection)), counts)
    }

    fn new(link: Link, counts: Arc<Counts>) -> Self {
        Self {
            breaker: Breaker::new(&link.address().unwrap_or_else(|| "given".to_owned()), Instant::now()),
            link,
            places: Arc::new(Semaphore::new(ON_THE_WIRE)),
            waiting: AtomicUsize::new(0),
            gather: Gather::new(Instant::now()),
            answers: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            counts,
        }
    }

    pub(super) fn health(&self) -> Health {
        self.breaker.health()
    }

    /// How often a connection was made, or tried. None for one that was given.
    pub(super) fn attempts(&self) -> Option<u64> {
        match &self.link {
            Link::Own(connection) => Some(connection.attempts()),
            Link::Given(_) => None,
        }
    }

    pub(super) fn address(&self) -> Option<String> {
        self.link.address()
    }

    /// The address that this node gives, with its own host where it leaves that out.
    pub(super) fn resolve(&self, address: Address) -> Address {
        match &self.link {
            Link::Own(connection) if matches!(&*address.0, "" | "?") => (connection.host(), address.1),
            Link::Own(_) | Link::Given(_) => address,
        }
    }

    /// Sends a command that is no check.
    pub(super) async fn command(&self, cmd: Cmd) -> Result<Value, RedisError> {
        let mut wire = match &self.link {
            Link::Own(connection) => Wire::Own(connection.open().await.map_err(RedisError::unsent)?),
            Link::Given(connection) => Wire::Given(Arc::clone(connection)),
        };
        wire.ask(cmd).await.map_err(RedisError::sent)
    }

    /// Waits for an open connection, or for the error of the attempt to make one.
    pub(super) async fn ready(&self) -> Result<(), RedisError> {
        match &self.link {
            Link::Own(connection) => connection.open().await.map(drop).map_err(RedisError::unsent),
            Link::Given(_) => Ok(()),
        }
    }

    /// Waits for a place on the wire and for the wire. Nothing is sent.
    pub(super) async fn enter(self: Arc<Self>) -> Result<Place, RedisError> {
        let permit = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(permit) => Ok(permit),
            Err(_) => {
                let waiting = Waiting::new(&self.waiting, self.gather.waiting());
                let _waiting = waiting.ok_or(RedisError::new(RedisErrorKind::Crowded))?;
                Arc::clone(&self.places).acquire_owned().await
            }
        };
        self.place(permit).await
    }

    /// The same for those that wait together.
    pub(super) async fn enter_for_others(&self) -> Result<Place, RedisError> {
        self.place(Arc::clone(&self.places).acquire_owned().await).await
    }

    async fn place(&self, permit: Result<OwnedSemaphorePermit, AcquireError>) -> Result<Place, RedisError> {
        // The places are never closed.
        let permit = permit.map_err(|_| RedisError::new(RedisErrorKind::Crowded))?;
        let wire = match &self.link {
            Link::Own(connection) => Wire::Own(connection.open().await.map_err(RedisError::unsent)?),
            Link::Given(connection) => Wire::Given(Arc::clone(connection)),
        };
        Ok(Place { wire, permit, requests: 1 })
    }

    /// How many wait for a place by themselves.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether nobody is on the wire, or waits.
    pub(super) fn is_idle(&self) -> bool {
        self.places.available_permits() == ON_THE_WIRE && self.gather.is_idle()
    }

    /// Makes a place one for as many requests, or for fewer where there are not as many places. For how many it is.
    pub(super) fn widen(&self, place: &mut Place, requests: usize) -> usize {
        let more = self.places.available_permits().min(requests.saturating_sub(place.requests));
        // Another may have been quicker.
        if let Ok(permits) = Arc::clone(&self.places).try_acquire_many_owned(more as u32) {
            place.permit.merge(permits);
            place.requests += more;
        }
        place.requests
    }

    /// A place on the wire, if there is one at this moment.
    pub(super) fn enter_now(&self) -> Option<Place> {
        let permit = Arc::clone(&self.places).try_acquire_owned().ok()?;
        let wire = match &self.link {
            Link::Own(connection) => Wire::Own(connection.now()?),
            Link::Given(connection) => Wire::Given(Arc::clone(connection)),
        };
        Some(Place { wire, permit, requests: 1 })
    }

    /// The connection of that generation is of no use any more.
    pub(super) fn lost(&self, generation: Option<Generation>) {
        if let (Link::Own(connection), Some(generation)) = (&self.link, generation) {
            connection.lost(generation);
        }
    }

    /// Waits until the connection of that generation is lost. Whoever gave one closes it.
    pub(super) async fn until_lost(&self, generation: Option<Generation>) {
        match (&self.link, generation) {
            (Link::Own(connection), Some(generation)) => connection.until_lost(generation).await,
            _ => std::future::pending().await,
        }
    }

    pub(super) fn tell(&self, change: Change, why: &dyn fmt::Display) {
        if let (Change::Opened, Link::Own(connection)) = (change, &self.link)
            && connection.follows_a_failover()
        {
            // The next probe asks the sentinels again.
            connection.lost(connection.attempts());
        }
        let address = self.address().unwrap_or_else(|| "(a given connection)".to_owned());
        match change {
            Change::Opened => log::warning!(
                "Redis at {address} has failed a few times in a row, and is not asked until it answers a probe ({why})"
            ),
            Change::Closed(after) => log::warning!("Redis at {address} answers again, after {after:.1?}"),
        }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("address", &self.address()).field("breaker", &self.breaker).finish_non_exhaustive()
    }
}

/// One of those that wait for a place.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(waiting: &'a AtomicUsize, others: usize) -> Option<Self> {
        let one = Self(waiting);
        // Dropped, and so taken back, where there are too many.
        (waiting.fetch_add(1, Ordering::Relaxed) + others < WAITING).then_some(one)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A place on the wire: kept until the answer has come, whoever waits for it by then.
pub(super) struct Place {
    pub(super) wire: Wire,
    permit: OwnedSemaphorePermit,
    /// For so many.
    requests: usize,
}

impl Place {
    /// Leaves places to others that so many requests do not need.
    pub(super) fn narrow(&mut self, requests: usize) {
        drop(self.permit.split(self.requests.saturating_sub(requests)));
        self.requests = self.requests.min(requests);
    }
}
