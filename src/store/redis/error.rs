//! Why Redis did not answer.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Why Redis did not answer. It shows neither a password nor a bucket key.
#[derive(Clone, Debug)]
pub struct RedisError {
    text: &'static str,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

impl RedisError {
    /// An answer that is not one of the script's.
    pub(crate) fn reply() -> Self {
        Self { text: "Redis gave an answer of the wrong shape", source: None }
    }
}

impl fmt::Display for RedisError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Some(source) => write!(f, "{}: {source}", self.text),
            None => f.write_str(self.text),
        }
    }
}

impl Error for RedisError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().and_then(|source| source.source())
    }
}

impl From<redis::RedisError> for RedisError {
    fn from(error: redis::RedisError) -> Self {
        let text = if error.is_io_error() { "no connection to Redis" } else { "Redis gave an error" };
        Self { text, source: Some(Arc::new(error)) }
    }
}
