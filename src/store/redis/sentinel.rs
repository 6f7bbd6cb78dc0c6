//! Where the primary is, by its sentinels.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisResult};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::connection::Access;
use crate::error::ConfigError;

/// How long sentinels have for an answer, unless most of them have given the same before.
const PATIENCE: Duration = Duration::from_millis(300);

/// The sentinels that watch over a primary.
pub(super) struct Sentinels {
    sentinels: Vec<Access>,
    name: String,
}

impl Sentinels {
    pub(super) fn new(sentinels: Vec<Access>, name: &str) -> Result<Self, ConfigError> {
        let refused = |reason: &str| ConfigError::RedisUrl { reason: reason.to_owned() };
        if name.is_empty() {
            return Err(refused("the name of the primary is empty: it is the one that the sentinels know it by"));
        }
        if sentinels.is_empty() {
            return Err(refused("there is no sentinel: at least one URL is needed"));
        }
        Ok(Self { sentinels, name: name.to_owned() })
    }

    /// How to reach the server that most sentinels take for the primary, of those that answer.
    pub(super) async fn primary(&self) -> RedisResult<Access> {
        let until = Instant::now() + PATIENCE;
        let mut answers = JoinSet::new();
        for sentinel in &self.sentinels {
            answers.spawn(ask(sentinel.clone(), self.name.clone()));
        }
        let mut votes: HashMap<(String, u16), usize> = HashMap::new();
        let mut failure = None;
        while let Ok(Some(answer)) = timeout_at(until, answers.join_next()).await {
            match answer {
                Ok(Ok(address)) => {
                    let count = votes.entry(address).or_default();
                    *count += 1;
                    if *count * 2 > self.sentinels.len() {
                        break;
                    }
                }
                Ok(Err(error)) => failure = Some(error),
                Err(_) => {}
            }
        }
        match votes.into_iter().max_by_key(|(_, count)| *count) {
            Some(((host, port), _)) => Ok(self.sentinels[0].at(&host, port)),
            None => Err(failure.unwrap_or((ErrorKind::Io, "no sentinel answers").into())),
        }
    }
}

/// The address of the primary, as one sentinel knows it. Sentinels commonly want no password; one that does gets that of
/// the URL.
async fn ask(sentinel: Access, name: String) -> RedisResult<(String, u16)> {
    let answer = match question(&sentinel.anonymous(), &name).await {
        Err(error) if sentinel.has_password() && error.code() == Some("NOAUTH") => question(&sentinel, &name).await,
        answer => answer,
    };
    let unknown = || RedisError::from((ErrorKind::MasterNameNotFoundBySentinel, "the sentinels do not know the name"));
    let (host, port) = answer?.ok_or_else(unknown)?;
    Ok((host, port.parse().map_err(|_| (ErrorKind::Parse, "a sentinel gave a port that is none"))?))
}

async fn question(sentinel: &Access, name: &str) -> RedisResult<Option<(String, String)>> {
    let mut connection = sentinel.connect(drop).await?;
    Cmd::new().arg("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name).query_async(&mut connection).await
}

impl fmt::Display for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (by its sentinels)", self.name)
    }
}
