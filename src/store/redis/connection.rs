//! One connection to one server, made when it is needed and made anew when it is lost.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, IntoConnectionInfo, Pipeline, ProtocolVersion, PushInfo, PushKind,
    RedisError, RedisFuture, RedisResult, ServerErrorKind, Value,
};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::error::ConfigError;

/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// For this long after a failed attempt nobody tries again, and callers get its error at once.
const CONNECT_PAUSE: Duration = Duration::from_millis(100);
/// An answer that takes longer is not waited for: above any deadline that makes sense for a check.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The kernel gives up a connection whose data nobody acknowledges for this long.
const USER_TIMEOUT: Duration = Duration::from_secs(3);

/// The connection that [`RedisStore::connect`](crate::RedisStore::connect) makes: without Nagle's delay, over RESP3 so
/// that a loss is known at once, and made anew when it is lost. No command is ever sent a second time.
#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    link: Mutex<Link>,
    /// Counts the attempts that have ended.
    ended: watch::Sender<u64>,
}

#[derive(Default)]
struct Link {
    open: Option<MultiplexedConnection>,
    /// Which connection is open, so that a late error of an earlier one does not close it.
    generation: u64,
    connecting: bool,
    failed: Option<(Instant, RedisError)>,
}

impl Connection {
    pub(super) fn new(url: &str) -> Result<Self, ConfigError> {
        let refused = |reason: &str| ConfigError::RedisUrl { reason: reason.to_owned() };
        let form = "allowed are redis://[user:password@]host[:port][/database] and redis+unix:///path";
        if url.starts_with("rediss://") || url.starts_with("valkeys://") {
            return Err(refused("TLS is not built yet"));
        }
        let info = url.into_connection_info().map_err(|_| refused(form))?;
        let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
        let tcp = TcpSettings::default().set_nodelay(true);
        #[cfg(target_os = "linux")]
        let tcp = tcp.set_user_timeout(USER_TIMEOUT);
        let client =
            Client::open(info.set_redis_settings(settings).set_tcp_settings(tcp)).map_err(|_| refused(form))?;
        let ended = watch::Sender::new(0);
        Ok(Self { shared: Arc::new(Shared { client, link: Mutex::default(), ended }) })
    }

    /// Waits for an open connection, or for the error of the attempt to make one.
    pub(super) async fn ready(&self) -> RedisResult<()> {
        self.open().await.map(drop)
    }

    /// The server's address, without a password.
    pub(super) fn address(&self) -> String {
        self.shared.client.get_connection_info().addr().to_string()
    }

    async fn open(&self) -> RedisResult<(u64, MultiplexedConnection)> {
        loop {
            // Before the look, so that an attempt that ends in between is not missed.
            let mut ended = self.shared.ended.subscribe();
            if let Some(open) = self.shared.look()? {
                return Ok(open);
            }
            // The sender is part of `self`.
            let _ = ended.changed().await;
        }
    }

    fn answered<T>(&self, generation: u64, result: RedisResult<T>) -> RedisResult<T> {
        if let Err(error) = &result
            && (error.is_unrecoverable_error()
                // The server was demoted; only a new connection, to wherever the name leads by then, can help.
                || error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly))
        {
            self.shared.lost(generation);
        }
        result
    }
}

impl Shared {
    fn link(&self) -> MutexGuard<'_, Link> {
        // Nothing under this lock can leave it half done.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The open connection; or `None` while one is being made, by a task that no caller's deadline stops.
    fn look(self: &Arc<Self>) -> RedisResult<Option<(u64, MultiplexedConnection)>> {
        let mut link = self.link();
        if let Some(open) = &link.open {
            return Ok(Some((link.generation, open.clone())));
        }
        if link.connecting {
            return Ok(None);
        }
        if let Some((at, error)) = &link.failed
            && at.elapsed() < CONNECT_PAUSE
        {
            return Err(error.clone());
        }
        let Ok(runtime) = Handle::try_current() else {
            return Err((ErrorKind::Client, "a tokio runtime is needed").into());
        };
        link.connecting = true;
        link.generation += 1;
        runtime.spawn(Arc::clone(self).connect(link.generation));
        Ok(None)
    }

    async fn connect(self: Arc<Self>, generation: u64) {
        let shared = Arc::downgrade(&self);
        let on_push = move |push: PushInfo| {
            if push.kind == PushKind::Disconnection
                && let Some(shared) = shared.upgrade()
            {
                shared.lost(generation);
                // The next check finds a connection, or an attempt under way. The outcome is theirs to read.
                let _ = shared.look();
            }
            Ok::<(), ()>(())
        };
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(CONNECT_TIMEOUT))
            .set_response_timeout(Some(RESPONSE_TIMEOUT))
            .set_push_sender(on_push);
        let made = self.client.get_multiplexed_async_connection_with_config(&config).await;
        let mut link = self.link();
        link.connecting = false;
        match made {
            Ok(open) => (link.open, link.failed) = (Some(open), None),
            Err(error) => link.failed = Some((Instant::now(), error)),
        }
        drop(link);
        self.ended.send_modify(|ended| *ended += 1);
    }

    fn lost(&self, generation: u64) {
        let mut link = self.link();
        if link.generation == generation {
            link.open = None;
        }
    }
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        Box::pin(async move {
            let (generation, mut open) = self.open().await?;
            let result = open.req_packed_command(cmd).await;
            // A server's error comes as a value.
            self.answered(generation, result.and_then(Value::extract_error))
        })
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        pipeline: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        Box::pin(async move {
            let (generation, mut open) = self.open().await?;
            let result = open.req_packed_commands(pipeline, offset, count).await;
            self.answered(generation, result)
        })
    }

    fn get_db(&self) -> i64 {
        self.shared.client.get_connection_info().redis_settings().db()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("address", &self.address()).finish_non_exhaustive()
    }
}
