//! The API key that a request carries.

use std::fmt;
use std::sync::Arc;

use http::header::{AUTHORIZATION, HeaderName};
use http::request::Parts;

use crate::error::{ConfigError, or_panic};
use crate::key::{BucketKey, CREDENTIAL_MAX, KeyExtractor, NoKey, header_name};

type Accepts = dyn Fn(&str) -> bool + Send + Sync;

/// Keys buckets by an API key in a request header.
///
/// A header that is missing, empty, doubled, longer than 512 bytes or not text counts as no key: the next extractor of
/// [`or`](KeyExtractor::or) is asked, and without one the answer is 401. In `Authorization` the key is what follows
/// `Bearer`, in any case and with any number of blanks.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{ApiKey, ClientIp, KeyExtractor, Limit, Quota};
///
/// let limit = Limit::new("per-key", Quota::per_second(10))
///     .key_by(ApiKey::verified("x-api-key", |key| key == "alpha" || key == "beta").or(ClientIp::peer()));
/// ```
#[derive(Clone)]
pub struct ApiKey {
    header: HeaderName,
    accepts: Option<Arc<Accepts>>,
}

impl ApiKey {
    /// Keys by the credential in `header` where `predicate` accepts it. A key that is not accepted counts as none, so
    /// that made-up keys buy nothing.
    ///
    /// Each text that the predicate accepts has a bucket of its own. Where one client can have several (tokens that are
    /// renewed, keys in any case), key by the client instead: [`Identity`](crate::Identity), or a closure.
    ///
    /// # Panics
    ///
    /// When `header` is not the name of a header; [`try_verified`](Self::try_verified) returns the error.
    #[must_use]
    #[track_caller]
    pub fn verified(header: &str, predicate: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        or_panic(Self::try_verified(header, predicate))
    }

    /// Keys by an accepted credential, like [`verified`](Self::verified).
    ///
    /// # Errors
    ///
    /// [`ConfigError::HeaderName`] when `header` is not the name of a header.
    pub fn try_verified(
        header: &str,
        predicate: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Result<Self, ConfigError> {
        Ok(Self { header: header_name(header)?, accepts: Some(Arc::new(predicate)) })
    }

    /// Keys by whatever credential stands in `header`, without asking whether it is a real one.
    ///
    /// An attacker who makes up a new key for every request gets a full bucket for every request: the limit does not
    /// limit him at all, and each key costs the store a bucket. Use it only behind something that has verified the
    /// key, or beside a second limit that counts by address:
    ///
    /// ```
    /// use tower_token_bucket::{ApiKey, ClientIp, Limit, MemoryStore, Quota, TokenBucketLayer};
    ///
    /// let per_key = Limit::new("per-key", Quota::per_second(10)).key_by(ApiKey::unverified("x-api-key"));
    /// let per_address = Limit::new("per-address", Quota::per_second(50)).key_by(ClientIp::peer());
    /// let layer = TokenBucketLayer::new(MemoryStore::new(), per_key).and(per_address);
    /// ```
    ///
    /// # Panics
    ///
    /// When `header` is not the name of a header; [`try_unverified`](Self::try_unverified) returns the error.
    #[must_use]
    #[track_caller]
    pub fn unverified(header: &str) -> Self {
        or_panic(Self::try_unverified(header))
    }

    /// Keys by any credential, like [`unverified`](Self::unverified).
    ///
    /// # Errors
    ///
    /// [`ConfigError::HeaderName`] when `header` is not the name of a header.
    pub fn try_unverified(header: &str) -> Result<Self, ConfigError> {
        Ok(Self { header: header_name(header)?, accepts: None })
    }

    fn credential<'a>(&self, parts: &'a Parts) -> Option<&'a [u8]> {
        let mut lines = parts.headers.get_all(&self.header).iter();
        let (line, None) = (lines.next()?, lines.next()) else { return None };
        // Blanks stand around a credential: HTTP/2 brings it as it was sent, and those who check tokens skip them. A header
        // has no other white space.
        let text = line.as_bytes().trim_ascii();
        let key = if self.header == AUTHORIZATION {
            let (scheme, key) = text.split_at(text.iter().position(|byte| matches!(byte, b' ' | b'\t'))?);
            scheme.eq_ignore_ascii_case(b"bearer").then_some(key)?.trim_ascii_start()
        } else {
            text
        };
        Self::is_credential(key).then_some(key)
    }

    /// Whether a client could send this text as a key at all.
    pub(crate) fn is_credential(key: &[u8]) -> bool {
        // Without a way out, so that many bytes are looked at together.
        let visible = key.iter().fold(true, |visible, byte| visible & matches!(byte, b' '..=b'~'));
        visible && (1..=CREDENTIAL_MAX).contains(&key.len()) && !key.starts_with(b" ") && !key.ends_with(b" ")
    }

    fn accepts(&self, key: &[u8]) -> bool {
        self.accepts.as_ref().is_none_or(|accepts| std::str::from_utf8(key).is_ok_and(|key| accepts(key)))
    }
}

impl KeyExtractor for ApiKey {
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        self.credential(parts)
            .filter(|key| self.accepts(key))
            .map(BucketKey::credential)
            .ok_or_else(|| NoKey::Credential(self.header.clone()))
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKey")
            .field("header", &self.header)
            .field("verified", &self.accepts.is_some())
            .finish_non_exhaustive()
    }
}
