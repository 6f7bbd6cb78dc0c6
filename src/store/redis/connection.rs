//! One connection to one server, made when it is needed and made anew when it is lost.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, ProtocolVersion,
    PushInfo, PushKind, RedisConnectionInfo, RedisError, RedisResult,
};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::sentinel::Sentinels;
use crate::error::ConfigError;

/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// For this long after a failed attempt nobody tries again, and callers get its error at once.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);
/// After this long another attempt may be made beside one that hangs: whichever connects first is taken.
const CONNECT_AGAIN: Duration = Duration::from_millis(300);
/// The kernel gives up a connection whose data nobody acknowledges for this long.
const USER_TIMEOUT: Duration = Duration::from_secs(3);
/// It looks after an idle connection this often: proxies and firewalls forget those that are silent.
const KEEPALIVE: Duration = Duration::from_secs(30);

/// What a URL says: an address, and how to be let in there and at the other servers of the same topology.
#[derive(Clone)]
pub(super) struct Access {
    info: ConnectionInfo,
}

impl Access {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        let refused = |reason: &str| ConfigError::RedisUrl { reason: reason.to_owned() };
        if cfg!(not(feature = "rustls")) && (url.starts_with("rediss://") || url.starts_with("valkeys://")) {
            return Err(refused("TLS needs the feature `rustls`"));
        }
        let form = "allowed are redis://[user:password@]host[:port][/database], the same with rediss for TLS, and \
                    redis+unix:///path; in a user and a password %, :, /, ?, # and @ are percent-encoded";
        let info = url.into_connection_info().map_err(|_| refused(form))?;
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE);
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(USER_TIMEOUT);
        let info = info.set_redis_settings(settings).set_tcp_settings(tcp);
        // What opening it refuses is refused now, and not with each connection.
        Client::open(info.clone()).map_err(|_| refused(form))?;
        Ok(Self { info })
    }

    /// The same for another server.
    pub(super) fn at(&self, host: &str, port: u16) -> Self {
        let host = host.to_owned();
        let address = match self.info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Self { info: self.info.clone().set_addr(address) }
    }

    /// The same without a user, a password and a database.
    pub(super) fn anonymous(&self) -> Self {
        let settings = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3);
        Self { info: self.info.clone().set_redis_settings(settings) }
    }

    /// Whether it names a database other than the first.
    pub(super) fn has_database(&self) -> bool {
        self.info.redis_settings().db() != 0
    }

    pub(super) fn has_password(&self) -> bool {
        self.info.redis_settings().password().is_some()
    }

    /// Host and port; none for a socket.
    pub(super) fn host(&self) -> Option<(&str, u16)> {
        match self.info.addr() {
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => Some((host, *port)),
            _ => None,
        }
    }

    /// A new connection. `on_push` hears what the server says unasked.
    pub(super) async fn connect(
        &self,
        on_push: impl Fn(PushInfo) + Send + Sync + 'static,
    ) -> RedisResult<MultiplexedConnection> {
        #[cfg(feature = "rustls")]
        if matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
            // Without one rustls panics, unless it finds exactly one that is compiled in, which a dependency can change.
            && rustls::crypto::CryptoProvider::get_default().is_none()
        {
            let text = "TLS needs a provider of cryptography: the application has to install one, such as with \
                        rustls::crypto::ring::default_provider().install_default()";
            return Err((ErrorKind::InvalidClientConfig, text).into());
        }
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            // Those who ask have deadlines of their own.
            .set_response_timeout(None)
            .set_push_sender(move |push| {
                on_push(push);
                Ok::<(), ()>(())
            });
        Client::open(self.info.clone())?.get_multiplexed_async_connection_with_config(&config).await
    }
}

/// The address, without a password.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.addr().fmt(f)
    }
}

/// Where a connection leads.
pub(super) enum Target {
    Server(Access),
    /// Wherever the primary is at the moment.
    Primary(Sentinels),
}

/// A connection without Nagle's delay, over RESP3 so that a loss is known at once, and made anew when it is lost. Nothing
/// is ever sent a second time.
#[derive(Clone)]
pub(super) struct Connection {
    shared: Arc<Shared>,
}

/// Counts the attempts to connect, and so tells one connection from the next.
pub(super) type Generation = u64;

/// An open connection. Calls on it are for this connection alone: they never wait for the next one.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) inner: MultiplexedConnection,
    pub(super) generation: Generation,
}

struct Shared {
    target: Target,
    link: Mutex<Link>,
    /// Counts the attempts that have ended.
    ended: watch::Sender<u64>,
    /// Up to which generation all connections are lost.
    lost: watch::Sender<Generation>,
}

#[derive(Default)]
struct Link {
    open: Option<Open>,
    /// How many attempts there were. An open connection is known by its own, so that a late error of an earlier one does
    /// not close it.
    attempts: Generation,
    /// When the last attempt began, if it has not ended.
    connecting: Option<Instant>,
    failed: Option<(Instant, RedisError)>,
}

impl Connection {
    pub(super) fn new(target: Target) -> Self {
        let (ended, lost) = (watch::Sender::new(0), watch::Sender::new(0));
        Self { shared: Arc::new(Shared { target, link: Mutex::default(), ended, lost }) }
    }

    /// The server's address, without a password.
    pub(super) fn address(&self) -> String {
        match &self.shared.target {
            Target::Server(access) => access.to_string(),
            Target::Primary(sentinels) => sentinels.to_string(),
        }
    }

    /// The host of a server that has one.
    pub(super) fn host(&self) -> String {
        match &self.shared.target {
            Target::Server(access) => access.host().map(|(host, _)| host.to_owned()).unwrap_or_default(),
            Target::Primary(_) => String::new(),
        }
    }

    /// Whether another connection may lead to another server.
    pub(super) fn follows_a_failover(&self) -> bool {
        matches!(self.shared.target, Target::Primary(_))
    }

    /// How often a connection was asked for: 1 if all is well.
    pub(super) fn attempts(&self) -> Generation {
        self.shared.link().attempts
    }

    /// The open connection; waits for the attempt to make one, or for its error.
    pub(super) async fn open(&self) -> RedisResult<Open> {
        let began = Instant::now();
        loop {
            // Before the look, so that an attempt that ends in between is not missed.
            let mut ended = self.shared.ended.subscribe();
            if let Some(open) = self.shared.look()? {
                return Ok(open);
            }
            // The sender is part of `self`. An attempt that hangs, or that nobody runs, does not end.
            let _ = timeout(CONNECT_AGAIN, ended.changed()).await;
            // Where attempts hang there is always another under way.
            self.shared.failed_since(began)?;
        }
    }

    /// The connection that is open at this moment.
    pub(super) fn now(&self) -> Option<Open> {
        self.shared.link().open.clone()
    }

    /// This one is of no use any more: the next check makes another.
    pub(super) fn lost(&self, generation: Generation) {
        self.shared.lost(generation);
    }

    /// Waits until that connection is lost.
    pub(super) async fn until_lost(&self, generation: Generation) {
        // The sender is part of `self`.
        let _ = self.shared.lost.subscribe().wait_for(|lost| *lost >= generation).await;
    }
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Link> {
        // Nothing under this lock can leave it half done.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open connection; or `None` while one is being made, by a task that no caller's deadline stops.
    fn look(self: &Arc<Self>) -> RedisResult<Option<Open>> {
        let mut link = self.link();
        let is_connecting = link.connecting.is_some_and(|since| since.elapsed() < CONNECT_AGAIN);
        if link.open.is_some() || is_connecting {
            return Ok(link.open.clone());
        }
        if let Some((at, error)) = &link.failed
            && at.elapsed() < CONNECT_PAUSE
        {
            return Err(error.clone());
        }
        let Ok(runtime) = Handle::try_current() else {
            return Err((ErrorKind::Client, "a tokio runtime is needed").into());
        };
        link.connecting = Some(Instant::now());
        link.attempts += 1;
        let result = Err((ErrorKind::Io, "the attempt to connect was not brought to its end").into());
        let attempt = Attempt { shared: Arc::clone(self), generation: link.attempts, result };
        // A runtime that ends drops it at once, and it says so under this lock.
        drop(link);
        runtime.spawn(attempt.connect());
        Ok(None)
    }

    /// The error of an attempt that has ended since, if there is no connection.
    fn failed_since(&self, began: Instant) -> RedisResult<()> {
        let link = self.link();
        match &link.failed {
            Some((at, error)) if link.open.is_none() && *at >= began => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn lost(&self, generation: Generation) {
        self.lost.send_if_modified(|lost| std::mem::replace(lost, generation.max(*lost)) < generation);
        let mut link = self.link();
        let gone = link.open.take_if(|open| open.generation == generation);
        // What closes a connection is not for this lock.
        drop(link);
        drop(gone);
    }
}

/// An attempt to connect. Its end is told when it is dropped: with its runtime it may end at any point.
struct Attempt {
    shared: Arc<Shared>,
    generation: Generation,
    result: RedisResult<()>,
}

impl Attempt {
    async fn connect(mut self) {
        let (shared, generation) = (Arc::downgrade(&self.shared), self.generation);
        let on_push = move |push: PushInfo| {
            if push.kind == PushKind::Disconnection
                && let Some(shared) = shared.upgrade()
            {
                shared.lost(generation);
                // The next check finds a connection, or an attempt under way. The outcome is theirs to read.
                let _ = shared.look();
            }
        };
        let made = match &self.shared.target {
            Target::Server(access) => access.connect(on_push).await,
            Target::Primary(sentinels) => match sentinels.primary().await {
                Ok(access) => access.connect(on_push).await,
                Err(error) => Err(error),
            },
        };
        self.result = made.map(|inner| {
            let mut link = self.shared.link();
            // Another attempt may have been quicker, and its connection lost again.
            if link.open.is_none() && generation > *self.shared.lost.borrow() {
                link.open = Some(Open { inner, generation });
            }
        });
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let mut link = self.shared.link();
        link.failed = std::mem::replace(&mut self.result, Ok(())).err().map(|error| (Instant::now(), error));
        if link.attempts == self.generation {
            link.connecting = None;
        }
        drop(link);
        self.shared.ended.send_modify(|ended| *ended += 1);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("address", &self.address()).finish_non_exhaustive()
    }
}
