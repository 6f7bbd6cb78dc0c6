//! The address of the client that sent a request.

mod header;

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::HeaderName;
use http::request::Parts;
use ipnet::IpNet;

use crate::error::{ConfigError, or_panic};
use crate::key::{BucketKey, KeyExtractor, NoKey, canonical, header_name};
use header::Form;

type PeerBy = dyn Fn(&Parts) -> Option<IpAddr> + Send + Sync;

/// Keys buckets by the client's address: that of the peer, or what trusted proxies say in a header.
///
/// The address of the peer is read from axum's `ConnectInfo<SocketAddr>` (feature `axum`), else from a plain
/// [`SocketAddr`] in the request's extensions, where a server on hyper puts it itself, or by a
/// [closure](Self::peer_by). Without any of them the answer is 503 and one line in the log that says what to call;
/// [`or`](KeyExtractor::or) names a fallback.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{ClientIp, Limit, Quota};
///
/// // Directly on the network.
/// let direct = Limit::new("per-address", Quota::per_second(10)).key_by(ClientIp::peer());
/// // Behind load balancers in 10.0.0.0/8.
/// let behind = Limit::new("per-address", Quota::per_second(10))
///     .key_by(ClientIp::forwarded("x-forwarded-for").trusted_proxies(["10.0.0.0/8"]).ipv6_prefix(56));
/// ```
#[derive(Clone)]
pub struct ClientIp {
    ipv6_prefix: u8,
    peer_by: Option<Arc<PeerBy>>,
    forwarded: Option<Forwarded>,
}

/// A header that proxies set: [`trusted_proxies`](Self::trusted_proxies) or [`hops`](Self::hops) says which of its
/// addresses to believe.
#[derive(Clone, Debug)]
#[must_use = "nothing is trusted until `trusted_proxies` or `hops` says what"]
pub struct ForwardedBy {
    header: HeaderName,
    form: Form,
}

#[derive(Clone, Debug)]
struct Forwarded {
    header: HeaderName,
    form: Form,
    trust: Trust,
}

#[derive(Clone, Debug)]
enum Trust {
    /// The proxies' own addresses.
    Proxies(Arc<[IpNet]>),
    /// How many proxies there are, whatever their addresses.
    Hops(usize),
}

impl ClientIp {
    /// Keys by the address of the peer, whatever the request's headers say.
    #[must_use]
    pub fn peer() -> Self {
        Self { ipv6_prefix: 64, peer_by: None, forwarded: None }
    }

    /// Keys by the address that proxies put into `header`: `x-forwarded-for` and `forwarded` (RFC 7239) are lists, every
    /// other header, such as `x-real-ip` or `cf-connecting-ip`, has one address.
    ///
    /// # Panics
    ///
    /// When `header` is not the name of a header; [`try_forwarded`](Self::try_forwarded) returns the error.
    #[track_caller]
    pub fn forwarded(header: &str) -> ForwardedBy {
        or_panic(Self::try_forwarded(header))
    }

    /// Keys by the address that proxies put into `header`, like [`forwarded`](Self::forwarded).
    ///
    /// # Errors
    ///
    /// [`ConfigError::HeaderName`] when `header` is not the name of a header.
    pub fn try_forwarded(header: &str) -> Result<ForwardedBy, ConfigError> {
        let header = header_name(header)?;
        let form = match header.as_str() {
            "x-forwarded-for" => Form::List,
            "forwarded" => Form::Forwarded,
            _ => Form::Single,
        };
        Ok(ForwardedBy { header, form })
    }

    /// Sets how many leading bits of an IPv6 address count: 32 to 128, by default 64, since a client commonly holds all
    /// addresses below those.
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

    /// Finds the address of the peer by a closure: for Unix sockets, the PROXY protocol, or a server that keeps the
    /// address in a type of its own. `None` is an unknown peer.
    ///
    /// ```
    /// use std::net::{IpAddr, Ipv4Addr};
    /// use tower_token_bucket::ClientIp;
    ///
    /// // A proxy on the same machine, over a Unix socket.
    /// let key = ClientIp::forwarded("x-real-ip")
    ///     .trusted_proxies(["127.0.0.1"])
    ///     .peer_by(|_| Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    /// ```
    #[must_use]
    pub fn peer_by(mut self, peer: impl Fn(&Parts) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        self.peer_by = Some(Arc::new(peer));
        self
    }

    /// The client's address, folded to IPv4 where it is one in IPv6 clothes; `None` when there is no peer.
    fn address(&self, parts: &Parts) -> Option<IpAddr> {
        let peer = canonical(match &self.peer_by {
            Some(peer_by) => peer_by(parts)?,
            None => peer(parts)?.ip(),
        });
        match &self.forwarded {
            Some(forwarded) => Some(forwarded.address(parts, peer).unwrap_or(peer)),
            None => Some(peer),
        }
    }
}

impl ForwardedBy {
    /// Believes the proxies in these networks, such as `10.0.0.0/8`, `2001:db8::/32` or a single address.
    ///
    /// A header from any other peer is ignored. All lines of the header are one list, which is walked from the right:
    /// addresses of trusted proxies are skipped, the first other one is the client. What stands left of it, and may be
    /// the client's own invention, is never looked at. An element that cannot be read, or a list of nothing but trusted
    /// proxies, gives the peer.
    ///
    /// # Panics
    ///
    /// When a network is malformed; [`try_trusted_proxies`](Self::try_trusted_proxies) returns the error.
    #[must_use]
    #[track_caller]
    pub fn trusted_proxies<N: AsRef<str>>(self, networks: impl IntoIterator<Item = N>) -> ClientIp {
        or_panic(self.try_trusted_proxies(networks))
    }

    /// Believes the proxies in these networks, like [`trusted_proxies`](Self::trusted_proxies).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Network`] when a network is malformed.
    pub fn try_trusted_proxies<N: AsRef<str>>(
        self,
        networks: impl IntoIterator<Item = N>,
    ) -> Result<ClientIp, ConfigError> {
        let networks: Result<Arc<[IpNet]>, _> = networks.into_iter().map(|text| network(text.as_ref())).collect();
        Ok(self.by(Trust::Proxies(networks?)))
    }

    /// Believes that each request has passed exactly `n` proxies, whatever their addresses: the client is the n-th
    /// element from the right. Only for servers that nobody can reach but through those proxies; whoever can chooses
    /// his own address. A list that is shorter, or an element that cannot be read, gives the peer.
    ///
    /// # Panics
    ///
    /// When `n` is 0, or more than 1 for a header of one address; [`try_hops`](Self::try_hops) returns the error.
    #[must_use]
    #[track_caller]
    pub fn hops(self, n: usize) -> ClientIp {
        or_panic(self.try_hops(n))
    }

    /// Believes that each request has passed exactly `n` proxies, like [`hops`](Self::hops).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Hops`] when `n` is 0, or more than 1 for a header of one address.
    pub fn try_hops(self, n: usize) -> Result<ClientIp, ConfigError> {
        if n == 0 || (n > 1 && self.form == Form::Single) {
            return Err(ConfigError::Hops { header: self.header.as_str().to_owned(), hops: n });
        }
        Ok(self.by(Trust::Hops(n)))
    }

    fn by(self, trust: Trust) -> ClientIp {
        let forwarded = Forwarded { header: self.header, form: self.form, trust };
        ClientIp { forwarded: Some(forwarded), ..ClientIp::peer() }
    }
}

impl Forwarded {
    /// The address that the header gives; `None` for that of the peer.
    #[inline(never)] // so that it takes nothing from those who only ask for the peer
    fn address(&self, parts: &Parts, peer: IpAddr) -> Option<IpAddr> {
        let lines = || parts.headers.get_all(&self.header).iter().map(|line| line.as_bytes());
        match &self.trust {
            Trust::Hops(n) => self.form.elements(lines()).nth(n - 1)?,
            Trust::Proxies(networks) => {
                let is_trusted = |address: &IpAddr| networks.iter().any(|network| network.contains(address));
                if !is_trusted(&peer) {
                    return None;
                }
                let mut elements = self.form.elements(lines());
                if self.form == Form::Single {
                    return elements.next()?;
                }
                // An element that cannot be read ends the walk.
                elements.find(|address| address.is_none_or(|address| !is_trusted(&address)))?
            }
        }
    }
}

fn network(text: &str) -> Result<IpNet, ConfigError> {
    let parse = || {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address.parse::<IpAddr>().ok()?, bits.parse::<u8>().ok()?),
            None => {
                let address = text.parse::<IpAddr>().ok()?;
                (address, if address.is_ipv4() { 32 } else { 128 })
            }
        };
        let net = IpNet::new(address, bits).ok()?;
        // A network of IPv4-mapped addresses is one of IPv4.
        match (canonical(address), net) {
            (IpAddr::V4(address), IpNet::V6(_)) if bits >= 96 => IpNet::new(address.into(), bits - 96).ok(),
            _ => Some(net),
        }
    };
    parse().ok_or_else(|| ConfigError::Network { network: text.to_owned() })
}

fn peer(parts: &Parts) -> Option<&SocketAddr> {
    let extensions = &parts.extensions;
    #[cfg(feature = "axum")]
    {
        use axum::extract::ConnectInfo;
        use axum::extract::connect_info::MockConnectInfo;

        if let Some(ConnectInfo(peer)) = extensions.get::<ConnectInfo<SocketAddr>>() {
            return Some(peer);
        }
        if let Some(MockConnectInfo(peer)) = extensions.get::<MockConnectInfo<SocketAddr>>() {
            return Some(peer);
        }
    }
    extensions.get()
}

impl KeyExtractor for ClientIp {
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        let address = self.address(parts).ok_or(NoKey::Peer)?;
        Ok(BucketKey::canonical_prefix(address, self.ipv6_prefix))
    }
}

impl fmt::Debug for ClientIp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientIp")
            .field("ipv6_prefix", &self.ipv6_prefix)
            .field("forwarded", &self.forwarded)
            .finish_non_exhaustive()
    }
}
