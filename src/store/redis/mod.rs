//! Buckets in Redis, shared by all instances.

mod connection;
mod error;
mod script;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{ErrorKind, ServerErrorKind};

pub use connection::Connection;
pub use error::RedisError;
use script::Script;

use crate::charge::{Charge, Charges};
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
/// all of it.
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
pub struct RedisStore<C = Connection> {
    connection: C,
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
        Ok(Self::from_connection(Connection::new(url)?))
    }

    /// Waits a little for the first connection.
    pub(crate) async fn first_connection(&self) {
        let connection = &self.connection;
        match tokio::time::timeout(FIRST_CONNECTION, connection.ready()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                log::warning!("no connection to Redis at {} yet: {}", connection.address(), RedisError::from(error));
            }
            Err(_) => log::warning!("no connection to Redis at {} yet", connection.address()),
        }
    }
}

impl<C> RedisStore<C>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    /// Creates a store on a connection of your own: a `MultiplexedConnection`, a `ConnectionManager`, or any other that
    /// is cheap to clone and sends a command at most once.
    #[must_use]
    pub fn from_connection(connection: C) -> Self {
        Self { connection, script: Arc::new(Script::new()) }
    }
}

impl<C> RedisStore<C> {
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

impl<C> fmt::Debug for RedisStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("script", &self.script).finish_non_exhaustive()
    }
}

impl<C> Store for RedisStore<C>
where
    C: ConnectionLike + Clone + Send + Sync + 'static,
{
    type Error = RedisError;
    type Future = RedisAcquire;

    fn acquire(&self, charges: &[Charge]) -> RedisAcquire {
        let charges: Charges = charges.iter().cloned().collect();
        let script = Arc::clone(&self.script);
        let mut connection = self.connection.clone();
        let inner = Box::pin(async move {
            if charges.is_empty() {
                return Decision::new(&charges, &[]).ok_or_else(RedisError::reply);
            }
            let mut reply = script.evalsha(&charges).query_async(&mut connection).await;
            if let Err(error) = &reply
                && error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
            {
                // The answer proves that nothing ran.
                reply = script.eval(&charges).query_async(&mut connection).await;
            }
            script::decision(&charges, &reply?).ok_or_else(RedisError::reply)
        });
        RedisAcquire { inner }
    }
}

/// The answer of Redis to come.
///
/// Dropped before it is sent it takes nothing; dropped later the tokens may be taken, and are not given back.
#[must_use = "futures do nothing unless polled"]
pub struct RedisAcquire {
    // Boxed inside a type of its own, so that a release that no longer boxes it changes no name.
    inner: Pin<Box<dyn Future<Output = Result<Decision, RedisError>> + Send>>,
}

impl Future for RedisAcquire {
    type Output = Result<Decision, RedisError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.inner.as_mut().poll(cx)
    }
}

impl fmt::Debug for RedisAcquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAcquire").finish_non_exhaustive()
    }
}
