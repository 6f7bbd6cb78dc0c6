//! The address of the client that sent a request.

use std::net::{IpAddr, SocketAddr};

use http::request::Parts;

use crate::error::{ConfigError, or_panic};
use crate::key::{BucketKey, KeyExtractor, NoKey};

/// Keys buckets by the client's address.
///
/// The address of the peer is read from axum's `ConnectInfo<SocketAddr>` (feature `axum`), else from a plain
/// [`SocketAddr`] in the request's extensions, where a hyper server puts it itself. Without either the answer is 503
/// and one line in the log that says what to call.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{ClientIp, Limit, Quota};
///
/// let limit = Limit::new("per-address", Quota::per_second(10)).key_by(ClientIp::peer().ipv6_prefix(56));
/// ```
#[derive(Clone, Debug)]
pub struct ClientIp {
    ipv6_prefix: u8,
}

impl ClientIp {
    /// Keys by the address of the peer, whatever the request's headers say.
    #[must_use]
    pub fn peer() -> Self {
        Self { ipv6_prefix: 64 }
    }

    /// Sets how many leading bits of an IPv6 address count: 32 to 128, by default 64.
    ///
    /// # Panics
    ///
    /// When `bits` is not 32 to 128; [`try_ipv6_prefix`](Self::try_ipv6_prefix) returns the error.
    #[must_use]
    #[track_caller]
    pub fn ipv6_prefix(self, bits: u8) -> Self {
        or_panic(self.try_ipv6_prefix(bits))
    }

    /// Sets how many leading bits of an IPv6 address count, like [`ipv6_prefix`](Self::ipv6_prefix).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Ipv6Prefix`] when `bits` is not 32 to 128.
    pub fn try_ipv6_prefix(mut self, bits: u8) -> Result<Self, ConfigError> {
        if !(32..=128).contains(&bits) {
            return Err(ConfigError::Ipv6Prefix { bits });
        }
        self.ipv6_prefix = bits;
        Ok(self)
    }
}

impl KeyExtractor for ClientIp {
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        let address = peer(parts).ok_or(NoKey::Peer)?;
        Ok(BucketKey::ip_prefix(address, self.ipv6_prefix))
    }
}

fn peer(parts: &Parts) -> Option<IpAddr> {
    let extensions = &parts.extensions;
    #[cfg(feature = "axum")]
    {
        use axum::extract::ConnectInfo;
        use axum::extract::connect_info::MockConnectInfo;

        if let Some(ConnectInfo(peer)) = extensions.get::<ConnectInfo<SocketAddr>>() {
            return Some(peer.ip());
        }
        if let Some(MockConnectInfo(peer)) = extensions.get::<MockConnectInfo<SocketAddr>>() {
            return Some(peer.ip());
        }
    }
    extensions.get::<SocketAddr>().map(SocketAddr::ip)
}
