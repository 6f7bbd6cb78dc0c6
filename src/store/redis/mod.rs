//! Buckets in Redis, shared by all instances.

mod breaker;
mod check;
mod cluster;
mod connection;
mod denials;
mod error;
mod gather;
mod node;
mod script;
mod sentinel;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::aio::ConnectionLike;
use tokio::time::Instant;

pub use breaker::Health;
use check::{Acquire, Check};
use cluster::Cluster;
use connection::{Access, Connection, Target};
use denials::{Denials, Noted};
use error::Counts;
pub use error::{RedisError, RedisErrorKind};
use node::Node;
use script::{PaceCall, Script};
use sentinel::Sentinels;

use crate::charge::Charge;
use crate::decision::Decision;
use crate::error::{ConfigError, or_panic};
use crate::log;
use crate::outbound::{AdaptiveStore, Paced, Pacer, Pacing, Rates};
use crate::store::Store;

/// How long [`RedisStore::connect`] waits for the first connection before it goes on without.
const FIRST_CONNECTION: Duration = Duration::from_millis(500);

/// Buckets in Redis, shared by all instances: one script call for all charges of a request.
///
/// Checks that come while another is under way travel together in the next call, which takes the server a fraction of the
/// time; a check by itself is sent at once. Each is told what a call of its own would have told it, first come first
/// served. In a cluster those share a call whose keys are in one slot.
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
///   400 ms one check at a time asks whether Redis answers again. A check whose deadline passes without an answer is such
///   a failure, unless others have been answered since it began; one whose client has hung up before says nothing. A lost
///   connection is one failure, however many checks were on it.
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
    topology: Topology,
    script: Arc<Script>,
    counts: Arc<Counts>,
    /// None where it is switched off.
    denials: Option<Arc<Denials>>,
}

/// Which servers have the buckets.
#[derive(Clone, Debug)]
enum Topology {
    /// One, or the one that is the primary.
    Node(Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl RedisStore {
    /// Creates a store on the Redis server at `url`: `redis://[user:password@]host[:port][/database]`, the same with
    /// `rediss` for TLS (feature `rustls`), or `redis+unix:///path`.
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

    /// Creates a store on the Redis Cluster that the nodes at `urls` belong to: at least one of them has to answer for
    /// the others to be found. User, password and TLS are those of the first.
    ///
    /// All limits on one identity are in one slot and so one step. Charges of a request on several identities, such as a
    /// limit by key and one by address, are made in turn; if a later one refuses, the earlier ones are given back. That
    /// is never over a limit, and briefly under it.
    ///
    /// Nodes that move, fail and come back are followed. One that is down fails the checks of its own slots only.
    ///
    /// # Errors
    ///
    /// [`ConfigError::RedisUrl`] for URLs that cannot be used.
    pub async fn cluster<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, ConfigError> {
        let store = Self::unconnected_cluster(urls)?;
        store.first_connection().await;
        Ok(store)
    }

    /// Creates a store on the primary that the sentinels at `urls` know as `master`, and follows it when it fails over.
    /// User, password, database and TLS are those of the first URL, for the primary; a sentinel is only sent a password
    /// when it wants one.
    ///
    /// # Errors
    ///
    /// [`ConfigError::RedisUrl`] for URLs that cannot be used.
    pub async fn sentinel<U: AsRef<str>>(urls: impl IntoIterator<Item = U>, master: &str) -> Result<Self, ConfigError> {
        let store = Self::unconnected_sentinel(urls, master)?;
        store.first_connection().await;
        Ok(store)
    }

    /// A store that connects when it is first asked.
    pub(crate) fn unconnected(url: &str) -> Result<Self, ConfigError> {
        Ok(Self::on(Target::Server(Access::parse(url)?)))
    }

    pub(crate) fn unconnected_cluster<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Self, ConfigError> {
        let counts = Arc::<Counts>::default();
        let cluster = Cluster::new(all(urls)?, Arc::clone(&counts))?;
        Ok(Self::with(Topology::Cluster(Arc::new(cluster)), counts))
    }

    pub(crate) fn unconnected_sentinel<U: AsRef<str>>(
        urls: impl IntoIterator<Item = U>,
        master: &str,
    ) -> Result<Self, ConfigError> {
        Ok(Self::on(Target::Primary(Sentinels::new(all(urls)?, master)?)))
    }

    fn on(target: Target) -> Self {
        Self::of(|counts| Node::own(Connection::new(target), counts))
    }

    fn of(node: impl FnOnce(Arc<Counts>) -> Node) -> Self {
        let counts = Arc::<Counts>::default();
        let node = node(Arc::clone(&counts));
        Self::with(Topology::Node(Arc::new(node)), counts)
    }

    fn with(topology: Topology, counts: Arc<Counts>) -> Self {
        let (script, denials) = (Arc::new(Script::new()), Some(Arc::new(Denials::new())));
        Self { topology, script, counts, denials }
    }

    /// Waits a little for the first connection.
    pub(crate) async fn first_connection(&self) {
        let ready = async {
            match &self.topology {
                Topology::Node(node) => node.ready().await,
                Topology::Cluster(cluster) => cluster.ready().await,
            }
        };
        let what = || match &self.topology {
            Topology::Node(node) => node.address().unwrap_or_default(),
            Topology::Cluster(_) => "the nodes of the cluster".to_owned(),
        };
        match tokio::time::timeout(FIRST_CONNECTION, ready).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => log::warning!("Redis at {}: {error}; it is tried again when it is needed", what()),
            Err(_) => log::warning!("Redis at {}: no answer yet; it is tried again when it is needed", what()),
        }
    }

    /// Creates a store on a connection of your own: a `MultiplexedConnection`, a `ConnectionManager`, or any other that
    /// is cheap to clone and sends a command at most once. To make it anew when it is lost is its own business.
    #[must_use]
    pub fn from_connection<C>(connection: C) -> Self
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        Self::of(|counts| Node::given(connection, counts))
    }

    /// Whether the server is asked: not while its breaker is open. Of a cluster that of the node that is worst off;
    /// [`nodes`](Self::nodes) has them all.
    #[must_use]
    pub fn health(&self) -> Health {
        let all = self.nodes();
        let is = |health| all.iter().any(|(_, of)| *of == health);
        if is(Health::Open) {
            Health::Open
        } else if is(Health::Probing) {
            Health::Probing
        } else {
            Health::Closed
        }
    }

    /// The servers that are known to have buckets, by address, and whether each is asked.
    #[must_use]
    pub fn nodes(&self) -> Vec<(String, Health)> {
        let nodes = match &self.topology {
            Topology::Node(node) => vec![Arc::clone(node)],
            Topology::Cluster(cluster) => cluster.nodes(),
        };
        nodes.iter().map(|node| (node.address().unwrap_or_default(), node.health())).collect()
    }

    /// How many checks have failed so, since the store was made.
    #[must_use]
    pub fn failures(&self, kind: RedisErrorKind) -> u64 {
        self.counts.get(kind)
    }

    /// How often a connection has been made or tried, since the store was made: 1 while all is well, on a cluster 1 for
    /// each node. `None` on a connection of your own.
    #[must_use]
    pub fn connections(&self) -> Option<u64> {
        match &self.topology {
            Topology::Node(node) => node.attempts(),
            Topology::Cluster(cluster) => cluster.nodes().iter().map(|node| node.attempts()).sum(),
        }
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
    pub fn try_prefix(self, prefix: &str) -> Result<Self, ConfigError> {
        let script = self.script.with_prefix(prefix)?;
        Ok(self.with_other_buckets(script))
    }

    /// Sets whether this store remembers denials; by default it does. A cost that has been refused is refused again, with
    /// every dearer one, until it could pass, and Redis is not asked. That is exact: a cheaper request is asked, and so is
    /// everything after a second, after a refund or a [reset](Store::reset) made here, and under another quota.
    /// [`Source::Remembered`](crate::Source::Remembered) tells such decisions.
    ///
    /// A refund or a reset that another instance makes is seen a second later at the latest. In a cluster, limits of one
    /// request on several identities are asked each time.
    ///
    /// # Example
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), tower_token_bucket::ConfigError> {
    /// let store = tower_token_bucket::RedisStore::connect("redis://127.0.0.1:6379").await?.remember_denials(false);
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn remember_denials(mut self, remember: bool) -> Self {
        self.denials = remember.then(|| Arc::new(Denials::new()));
        self
    }

    /// Sets a secret for the hashes of credentials and foreign text, so that who reads the keys of a Redis that is
    /// shared with others cannot test guesses. Instances that share buckets have the same. Without one the key of the
    /// hash is a constant.
    #[must_use]
    pub fn secret(self, secret: impl AsRef<[u8]>) -> Self {
        let script = self.script.with_secret(secret.as_ref());
        self.with_other_buckets(script)
    }

    /// Whose denials are not those of the buckets before.
    fn with_other_buckets(self, script: Script) -> Self {
        let remembers = self.denials.is_some();
        Self { script: Arc::new(script), ..self }.remember_denials(remembers)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("topology", &self.topology)
            .field("script", &self.script)
            .field("denials", &self.denials)
            .finish()
    }
}

/// All that the URLs say.
fn all<U: AsRef<str>>(urls: impl IntoIterator<Item = U>) -> Result<Vec<Access>, ConfigError> {
    urls.into_iter().map(|url| Access::parse(url.as_ref())).collect()
}

impl RedisStore {
    fn check(&self, charges: &[Charge], deadline: Option<Duration>) -> RedisAcquire {
        let mut noted = None;
        if let Some(denials) = &self.denials {
            let now = Instant::now();
            if let Some(decision) = denials.recall(charges, now) {
                return RedisAcquire { inner: Inner::Known(Some(decision)), noted };
            }
            let in_turn = match &self.topology {
                Topology::Node(_) => false,
                Topology::Cluster(_) => charges.iter().any(|charge| charge.key() != charges[0].key()),
            };
            noted = denials.ask(charges, in_turn, now);
        }
        let script = Arc::clone(&self.script);
        let charges = charges.iter().cloned().collect();
        RedisAcquire {
            noted,
            inner: match &self.topology {
                Topology::Node(node) => {
                    Inner::Check(Box::new(Check::new(Arc::clone(node), Acquire { script, charges }, deadline)))
                }
                Topology::Cluster(cluster) => {
                    Inner::Cluster(Box::pin(Arc::clone(cluster).acquire(script, charges, deadline)))
                }
            },
        }
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

impl AdaptiveStore for RedisStore {
    fn rates(&self) -> Rates {
        Rates::new(self.clone())
    }
}

impl Pacer for RedisStore {
    fn may_fail(&self) -> bool {
        true
    }

    fn pace(&self, pacing: Pacing, deadline: Duration) -> Paced {
        let call = PaceCall { script: Arc::clone(&self.script), pacing };
        let boxed = |error| -> Box<dyn std::error::Error + Send + Sync> { Box::new(error) };
        match &self.topology {
            Topology::Node(node) => {
                let check = Check::new(Arc::clone(node), call, Some(deadline));
                Box::pin(async move { check.await.map_err(boxed) })
            }
            Topology::Cluster(cluster) => {
                let check = Arc::clone(cluster).check(call.slot(), call, Some(deadline));
                Box::pin(async move { check.await.map_err(boxed) })
            }
        }
    }
}

/// The answer of Redis to come.
///
/// Dropped before it is sent it takes nothing; dropped later the tokens may be taken, and are not given back.
/// # Example
///
/// Whoever asks the store by themselves brings the deadline:
///
/// ```no_run
/// use std::time::Duration;
/// use tokio::time::timeout;
/// use tower_token_bucket::{Amount, BucketKey, Charge, LimitName, Quota, RedisStore, Store};
///
/// # async fn ask() -> Result<(), Box<dyn std::error::Error>> {
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
/// let name = LimitName::try_new("exports")?;
/// let take = Charge::new(name, BucketKey::id("tenant 7"), Quota::per_hour(20), Amount::Take(1));
/// let decision = timeout(Duration::from_millis(50), store.acquire(&[take])).await??;
/// if let Some(wait) = decision.retry_after() {
///     println!("the next export may begin in {wait:?}");
/// }
/// # Ok(())
/// # }
/// # drop(ask());
/// ```
#[must_use = "futures do nothing unless polled"]
pub struct RedisAcquire {
    inner: Inner,
    noted: Option<Noted>,
}

enum Inner {
    /// None once it has been given.
    Known(Option<Decision>),
    Check(Box<Check<Acquire>>),
    Cluster(Pin<Box<dyn Future<Output = Result<Decision, RedisError>> + Send>>),
}

impl Future for RedisAcquire {
    type Output = Result<Decision, RedisError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match &mut self.inner {
            Inner::Known(decision) => return Poll::Ready(Ok(decision.take().expect("polled after completion"))),
            Inner::Check(check) => ready!(Pin::new(check).poll(cx)),
            Inner::Cluster(acquire) => ready!(acquire.as_mut().poll(cx)),
        };
        if let (Some(noted), Ok(decision)) = (self.noted.take(), &result) {
            noted.answered(decision, Instant::now());
        }
        Poll::Ready(result)
    }
}

impl fmt::Debug for RedisAcquire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisAcquire").finish_non_exhaustive()
    }
}
