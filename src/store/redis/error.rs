//! Why Redis did not answer.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::{ErrorKind, ServerErrorKind};

use crate::metrics;

/// Why Redis did not answer, in one line. It shows neither a password nor a bucket key: what the server quotes is left out.
#[derive(Clone)]
pub struct RedisError {
    kind: RedisErrorKind,
    retry_after: Option<Duration>,
    source: Option<Arc<redis::RedisError>>,
}

/// What servers say of a client that they refuse, where the code is none of its own.
const CONFIGURATION_TEXTS: [&str; 6] = [
    "unknown command",
    "DB index is out of range",
    "invalid DB index",
    // What a script is not allowed: until Redis 7.0, and later.
    "user executing the script can't run",
    "ACL failure in script",
    "cluster support disabled",
];

/// What kind of failure it was, and so whether tokens may have been taken.
/// # Example
///
/// ```no_run
/// use tower_token_bucket::{ConfigError, RedisErrorKind, RedisStore};
///
/// # async fn look() -> Result<(), ConfigError> {
/// let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
/// // … the store goes to a layer, and some time later:
/// if store.failures(RedisErrorKind::Configuration) > 0 {
///     eprintln!("Redis refuses this service: look at its password and rights");
/// }
/// # Ok(())
/// # }
/// # drop(look());
/// assert!(RedisErrorKind::Lost.is_unknown() && !RedisErrorKind::Unreachable.is_unknown());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RedisErrorKind {
    /// No connection could be made: nothing was sent.
    Unreachable,
    /// The server has failed a few times in a row and is not asked for a moment: nothing was sent.
    BreakerOpen,
    /// As many checks wait for a place on the connection as may: nothing was sent.
    Crowded,
    /// The server answered that it cannot do it now, and did nothing: `LOADING`, `BUSY`, `OOM`, `READONLY`,
    /// `NOREPLICAS`, `MISCONF`, `CLUSTERDOWN`, `MASTERDOWN`, `TRYAGAIN`.
    Unavailable,
    /// The server refuses this client, and did nothing: `NOAUTH`, `WRONGPASS`, `NOPERM`, an unknown command.
    Configuration,
    /// The key holds something else than a bucket (`WRONGTYPE`, or a foreign value), and is left as it is. Other keys
    /// are not concerned.
    Bucket,
    /// The connection was lost before the answer came: the tokens may have been taken.
    Lost,
    /// The caller gave up before an answer came: the tokens may have been taken. Mostly only counted, since nobody is
    /// there to receive it.
    Late,
    /// An answer that is not the script's: the tokens may have been taken.
    Reply,
}

impl RedisErrorKind {
    const ALL: [Self; 9] = [
        Self::Unreachable,
        Self::BreakerOpen,
        Self::Crowded,
        Self::Unavailable,
        Self::Configuration,
        Self::Bucket,
        Self::Lost,
        Self::Late,
        Self::Reply,
    ];

    /// Whether the charges may have been made though no answer came. All other kinds prove that they were not.
    #[must_use]
    pub fn is_unknown(self) -> bool {
        matches!(self, Self::Lost | Self::Late | Self::Reply)
    }

    /// What an answered error says; `None` where it is not the server's.
    fn of_server(error: &redis::RedisError) -> Option<Self> {
        let text = error.to_string();
        // A refusal that the script passes on has the script's name before its code in Redis 6.2.
        let says = |code: &str| error.code() == Some(code) || text.contains(&format!("-{code} "));
        let any = |codes: &[&str]| codes.iter().any(|code| says(code));
        if any(&["WRONGTYPE", "TOKENBUCKET"]) {
            return Some(Self::Bucket);
        }
        let unavailable = [
            "LOADING",
            "BUSY",
            "OOM",
            "READONLY",
            "NOREPLICAS",
            "MISCONF",
            "CLUSTERDOWN",
            "MASTERDOWN",
            "TRYAGAIN",
            "MOVED",
            "ASK",
            "UNKILLABLE",
        ];
        if any(&unavailable) || text.contains("max number of clients") {
            return Some(Self::Unavailable);
        }
        let configuration = ["NOAUTH", "WRONGPASS", "NOPERM", "CROSSSLOT", "NOPROTO", "DENIED"];
        let is_configuration = any(&configuration)
            || error.kind() == ErrorKind::AuthenticationFailed
            || error.kind() == ErrorKind::InvalidClientConfig
            || error.kind() == ErrorKind::MasterNameNotFoundBySentinel
            // What redis-rs makes of an unknown HELLO, in the words of Redis 6.2.
            || error.kind() == ErrorKind::RESP3NotSupported
            || CONFIGURATION_TEXTS.iter().any(|what| text.contains(what));
        if is_configuration {
            return Some(Self::Configuration);
        }
        matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension).then_some(Self::Reply)
    }

    /// In one word.
    fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::BreakerOpen => "breaker_open",
            Self::Crowded => "crowded",
            Self::Unavailable => "unavailable",
            Self::Configuration => "configuration",
            Self::Bucket => "bucket",
            Self::Lost => "lost",
            Self::Late => "late",
            Self::Reply => "reply",
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Unreachable => "no connection to Redis",
            Self::BreakerOpen => "Redis has failed a few times in a row and is not asked for a moment",
            Self::Crowded => "as many checks wait for Redis as may",
            Self::Unavailable => "Redis cannot do it now",
            Self::Configuration => "Redis refuses this client",
            Self::Bucket => "the bucket's key in Redis holds something else",
            Self::Lost => "the connection to Redis was lost",
            Self::Late => "Redis did not answer in time",
            Self::Reply => "Redis gave an answer of the wrong shape",
        }
    }
}

impl RedisError {
    pub(super) fn new(kind: RedisErrorKind) -> Self {
        Self { kind, retry_after: None, source: None }
    }

    /// The breaker is open, and lets a probe through after that.
    pub(super) fn breaker_open(retry_after: Duration) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(RedisErrorKind::BreakerOpen) }
    }

    /// No connection was made, so nothing was sent.
    pub(super) fn unsent(error: redis::RedisError) -> Self {
        let kind = RedisErrorKind::of_server(&error).unwrap_or(RedisErrorKind::Unreachable);
        Self { source: Some(Arc::new(error)), ..Self::new(kind) }
    }

    /// No answer of the script came to what was sent.
    pub(super) fn sent(error: redis::RedisError) -> Self {
        let kind = RedisErrorKind::of_server(&error).unwrap_or(match error.kind() {
            // An answer that was cut short was one.
            ErrorKind::Parse if error.to_string().contains("end of input") => RedisErrorKind::Lost,
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => RedisErrorKind::Reply,
            _ => RedisErrorKind::Lost,
        });
        Self { source: Some(Arc::new(error)), ..Self::new(kind) }
    }

    /// What kind of failure it was.
    #[must_use]
    pub fn kind(&self) -> RedisErrorKind {
        self.kind
    }

    /// When the server is asked again, if it is known.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Whether only another connection can help: this one is lost, or its server was demoted.
    pub(super) fn ends_the_connection(&self) -> bool {
        self.source.as_ref().is_some_and(|source| {
            source.is_unrecoverable_error()
                || source.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly)
                || source.code() == Some("NOAUTH")
        })
    }
}

/// Where a node of a cluster says that a key is to be asked for. It proves that nothing ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Redirect {
    /// The slot is another node's.
    Moved(Address),
    /// The slot is on its way to another node, and so is the key.
    Ask(Address),
    /// The slot is on its way, and some of the keys have arrived.
    TryAgain,
}

/// A node's host, empty where it is the one that said so, and port.
pub(super) type Address = (String, u16);

impl RedisError {
    /// Whether a call has named keys of several slots: nothing ran.
    pub(super) fn is_cross_slot(&self) -> bool {
        let kind = self.source.as_ref().map(|source| source.kind());
        kind == Some(ErrorKind::Server(ServerErrorKind::CrossSlot))
    }

    pub(super) fn redirect(&self) -> Option<Redirect> {
        let source = self.source.as_ref()?;
        if source.kind() == ErrorKind::Server(ServerErrorKind::TryAgain) {
            return Some(Redirect::TryAgain);
        }
        // The port is behind the last colon: IPv6 addresses come without brackets.
        let (host, port) = source.redirect_node()?.0.rsplit_once(':')?;
        let address = (host.to_owned(), port.parse().ok()?);
        Some(match source.kind() {
            ErrorKind::Server(ServerErrorKind::Ask) => Redirect::Ask(address),
            _ => Redirect::Moved(address),
        })
    }
}

impl fmt::Display for RedisErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl fmt::Display for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => match (source.code(), source.detail()) {
                (Some(code), detail) => {
                    write!(f, "{}: {code} {}", self.kind, without_quotations(detail.unwrap_or_default()))
                }
                (None, _) => write!(f, "{}: {}", self.kind, without_quotations(&source.to_string())),
            },
            None => self.kind.fmt(f),
        }
    }
}

impl fmt::Debug for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisError({:?}: {self})", self.kind)
    }
}

/// The commands that a store sends, and a setting, as servers name them.
const COMMANDS: [&str; 15] = [
    "asking",
    "auth",
    "client",
    "client|setinfo",
    "cluster",
    "cluster|slots",
    "eval",
    "evalsha",
    "get",
    "hello",
    "maxmemory",
    "mget",
    "select",
    "set",
    "time",
];

/// A text of the server in one line, up to where it quotes anything but a command: it may be a password or a bucket key.
fn without_quotations(text: &str) -> String {
    // The apostrophe of a word, as in `can't`, is no quotation mark.
    let text = text.replace("n't", "n\u{2019}t");
    let mut parts = text.split(['\'', '"', '`']);
    let mut shown = parts.next().unwrap_or_default().to_owned();
    while let (Some(quoted), Some(rest)) = (parts.next(), parts.next()) {
        if !COMMANDS.contains(&quoted.to_ascii_lowercase().as_str()) {
            break;
        }
        shown.extend(["'", quoted, "'", rest]);
    }
    let line = |c: char| match c {
        '\u{2019}' => '\'',
        '\u{2028}' | '\u{2029}' => ' ',
        c if c.is_control() => ' ',
        c => c,
    };
    shown.trim_end().chars().map(line).take(200).collect()
}

impl Error for RedisError {}

/// How many checks failed, by kind.
#[derive(Debug, Default)]
pub(super) struct Counts([AtomicU64; RedisErrorKind::ALL.len()]);

impl Counts {
    pub(super) fn add(&self, kind: RedisErrorKind) {
        self.0[kind as usize].fetch_add(1, Ordering::Relaxed);
        metrics::store_failed(kind.name());
    }

    pub(super) fn get(&self, kind: RedisErrorKind) -> u64 {
        self.0[kind as usize].load(Ordering::Relaxed)
    }
}
