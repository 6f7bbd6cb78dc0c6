//! Buckets in Redis, shared by all instances.

mod breaker;
mod connection;
mod error;
mod node;
mod script;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use redis::aio::ConnectionLike;

pub use breaker::Health;
use connection::Connection;
pub use error::{RedisError, RedisErrorKind};
use node::{Check, Node};
use script::Script;

use crate::charge::Charge;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::log;
use crate::store::Store;

/// How long [`RedisStore::connect`] waits for the first connection before it goes on without.
const FIRST_CONNECTION: Duration = Duration::from_millis(500);

/// Buckets in Redis, shared by all instances: one script call for all charges of a request.
///
/// A store is a handle: its clones share the connection. Redis 6.2 or newer, or Valkey. The script is called by its
/// hash; where the server does not know it (after a restart, a failover or `SCRIPT FLUSH`) the call is sent once more
/// with the script itself. Nothing is ever sent again after any other outcome, since the tokens may have been taken.
///
/// A bucket is a string at `tb:v1:{identity}:limit`, such as `tb:v1:{ip:203.0.113.9}:per-address`: five numbers, which
/// are explained in `lua/token_bucket.lua`, with a time to live that ends when the bucket is full. Credentials and
/// foreign text are stored as keyed 128-bit hashes only.
///
/// The store itself waits as long as Redis takes: the [deadline](crate::TokenBucketLayer::deadline) of the layer covers
/// all of it, and whoever asks the store directly has to set one. What protects both sides when Redis is slow or gone:
///
/// - At most 64 checks are on the wire. Each keeps its place until it is answered, even after its caller has given up, so
///   that no more than those are charged late. Up to 4,096 more wait, unsent, and leave when they are dropped; beyond
///   that a check [fails](RedisErrorKind::Crowded) at once.
/// - After 5 failures in a row a breaker opens, and checks [fail](RedisErrorKind::BreakerOpen) at once. After 100 to
///   400 ms one check at a time asks whether Redis answers again. A check counts as failed when it is given up after
///   10 ms, or its deadline if that is shorter.
/// - A connection that is lost, or whose server has been demoted (`READONLY`), or that leaves a check without an answer
///   for 5 s, is made anew.
///
/// # Example
///
/// ```no_run
/// use tower_token_bucket::{Limit, Quota, RedisStore, TokenBucketLayer};
///
/// # async fn example() -> Result<(), tower_token_bucket::ConfigError> {
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
/// let layer = TokenBucketLayer::new(store, Limit::new("per-address", Quota::per_second(10)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    node: Arc<Node>,
    script: Arc<Script>,
}

impl RedisStore {
    /// Creates a store on the Redis server at `url`: `redis://[user:password@]host[:port][/database]`, or
    /// `redis+unix:///path`.
    ///
    /// The connection is made at once if the server answers, else as soon as it does: a server that is down does not
    /// keep a program from starting. A lost connection is made anew.
    ///
    /// # Errors
    ///
    /// [`ConfigError::RedisUrl`] for a URL that cannot be used; it does not show the URL, which may hold a password.
    pub async fn connect(url: &str) -> Result<Self, ConfigError> {
        let store = Self::unconnected(url)?;
        store.first_connection().await;
        Ok(store)
    }

    /// A store that connects when it is first asked.
    pub(crate) fn unconnected(url: &str) -> Result<Self, ConfigError> {
        Ok(Self::on(Node::own(Connection::new(url)?)))
    }

    /// Waits a little for the first connection.
    pub(crate) async fn first_connection(&self) {
        let address = || self.node.address().unwrap_or_default();
        match tokio::time::timeout(FIRST_CONNECTION, self.node.ready()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warning!("no connection to Redis at {} yet: {error}", address()),
            Err(_) => log::warning!("no connection to Redis at {} yet", address()),
        }
    }

    /// Creates a store on a connection of your own: a `MultiplexedConnection`, a `ConnectionManager`, or any other that
    /// is cheap to clone and sends a command at most once. To make it anew when it is lost is its own business.
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::on(Node::given(connection))
    }

    fn on(node: Node) -> Self {
        Self { node: Arc::new(node), script: Arc::new(Script::new()) }
    }

    /// Whether the server is asked: not while its breaker is open.
    #[must_use]
    pub fn health(&self) -> Health {
        self.node.health()
    }

    /// How many checks have failed so, since the store was made.
    #[must_use]
    pub fn failures(&self, kind: RedisErrorKind) -> u64 {
        self.node.counts.get(kind)
    }

    /// How often a connection has been made or tried, since the store was made: 1 while all is well. `None` on a
    /// connection of your own.
    #[must_use]
    pub fn connections(&self) -> Option<u64> {
        self.node.attempts()
    }

    /// Sets the first part of all keys, by default `tb`. Instances that share buckets have the same.
    ///
    /// # Panics
    ///
    /// When `prefix` is not 1 to 64 of `A-Z a-z 0-9 . _ - :`; [`try_prefix`](Self::try_prefix) returns the error.
    #[must_use]
    #[track_caller]
    pub fn prefix(self, prefix: &str) -> Self {
        or_panic(self.try_prefix(prefix))
    }

    /// Sets the first part of all keys, like [`prefix`](Self::prefix).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Prefix`] when `prefix` is not 1 to 64 of `A-Z a-z 0-9 . _ - :`.
    pub fn try_prefix(mut self, prefix: &str) -> Result<Self, ConfigError> {
        self.script = Arc::new(self.script.with_prefix(prefix)?);
        Ok(self)
    }

    /// Sets a secret for the hashes of credentials and foreign text, so that who reads the keys of a Redis that is
    /// shared with others cannot test guesses. Instances that share buckets have the same. Without one the key of the
    /// hash is a constant.
    #[must_use]
    pub fn secret(mut self, secret: impl AsRef<[u8]>) -> Self {
        self.script = Arc::new(self.script.with_secret(secret.as_ref()));
        self
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("node", &self.node).field("script", &self.script).finish()
    }
}

impl RedisStore {
    fn check(&self, charges: &[Charge], deadline: Option<Duration>) -> RedisAcquire {
        RedisAcquire { check: Check::new(Arc::clone(&self.node), Arc::clone(&self.script), charges, deadline) }
    }
}

impl Store for RedisStore {
    type Error = RedisError;
    type Future = RedisAcquire;

    fn acquire(&self, charges: &[Charge]) -> RedisAcquire {
        self.check(charges, None)
    }

    fn acquire_within(&self, charges: &[Charge], deadline: Duration) -> RedisAcquire {
        self.check(charges, Some(deadline))
    }
}

/// The answer of Redis to come.
///
/// Dropped before it is sent it takes nothing; dropped later the tokens may be taken, and are not given back.
#[must_use = "futures do nothing unless polled"]
pub struct RedisAcquire {
    check: Check,
}

impl Future for RedisAcquire {
    type Output = Result<Decision, RedisError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.check).poll(cx)
    }
}

impl fmt::Debug for RedisAcquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAcquire").finish_non_exhaustive()
    }
}
