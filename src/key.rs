//! Whose bucket a request is charged to.

mod recent;

use std::fmt;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::header::HeaderName;
use http::request::Parts;

use crate::error::ConfigError;

/// Instances have to agree on the name of a bucket, so the key of the hash is a constant. It keeps credentials and
/// foreign text out of what is stored and gives them a fixed length; a store that is shared with strangers adds a
/// secret of its own.
const HASH_KEY: &[u8; 32] = b"tower-token-bucket v1 bucket key";

/// A credential longer than this counts as none, in bytes.
pub(crate) const CREDENTIAL_MAX: usize = 512;

type Hash128 = [u8; 16];

/// The keyed 128-bit hash under which credentials and foreign text are known.
pub(crate) fn hash_128(text: &[u8]) -> Hash128 {
    first_128(&blake3::keyed_hash(HASH_KEY, text))
}

/// The key of a second hash, made of an operator's secret.
#[cfg(feature = "redis")]
#[derive(Clone)]
pub(crate) struct SecretKey([u8; 32]);

#[cfg(feature = "redis")]
impl SecretKey {
    pub(crate) fn new(secret: &[u8]) -> Self {
        Self(blake3::derive_key("tower-token-bucket v1 store secret", secret))
    }

    fn hash_128(&self, hash: Hash128) -> Hash128 {
        first_128(&blake3::keyed_hash(&self.0, &hash))
    }
}

fn first_128(hash: &blake3::Hash) -> Hash128 {
    let mut short = [0; 16];
    short.copy_from_slice(&hash.as_bytes()[..16]);
    short
}

/// An IPv4 address in the clothes of IPv6 is that IPv4 address, by its bits: mapped (`::ffff:192.0.2.7`), or
/// compatible (`::192.0.2.7`, long deprecated), which a client could choose between otherwise.
pub(crate) const fn canonical(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => match v6.to_bits() {
            // `::`, `::1` and other addresses that would be in 0.0.0.0/8 are not meant.
            bits @ 0x0100_0000..=0xffff_ffff => IpAddr::V4(Ipv4Addr::from_bits(bits as u32)),
            _ => IpAddr::V6(v6),
        },
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// Names a bucket, together with a limit's name. It has a fixed size: text from outside is only ever held as a keyed
/// 128-bit hash.
///
/// [`Display`](fmt::Display) writes the name as stores do: `ip:203.0.113.9`, `ip:2001:db8::/64`, `key:<32 hex>`,
/// `id:<32 hex>` or `global`. [`Debug`] shows the kind only.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BucketKey {
    kind: Kind,
    /// How many bits of an IPv6 address count.
    prefix: u8,
    /// The address as a number, or the hash. Beside the kind and not in it, so that keys of all kinds are moved and named in
    /// one way.
    bits: [u8; 16],
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Global,
    V4,
    V6,
    Key,
    Id,
}

impl BucketKey {
    const fn new(kind: Kind, bits: [u8; 16]) -> Self {
        Self { kind, prefix: 0, bits }
    }

    /// The one bucket that all requests share.
    #[must_use]
    pub const fn global() -> Self {
        Self::new(Kind::Global, [0; 16])
    }

    /// The bucket of a client address. An IPv4-mapped IPv6 address is its IPv4 address; of an IPv6 address the first
    /// 64 bits count, since a client commonly holds all addresses below them.
    #[must_use]
    pub const fn ip(address: IpAddr) -> Self {
        Self::ip_prefix(address, 64)
    }

    /// The bucket of a client address, of whose first `bits` bits count if it is IPv6.
    pub(crate) const fn ip_prefix(address: IpAddr, bits: u8) -> Self {
        Self::canonical_prefix(canonical(address), bits)
    }

    /// The same for an address that is [`canonical`] already.
    #[inline]
    pub(crate) const fn canonical_prefix(address: IpAddr, bits: u8) -> Self {
        match address {
            IpAddr::V4(address) => Self::new(Kind::V4, (address.to_bits() as u128).to_le_bytes()),
            IpAddr::V6(address) => {
                let host_bits = 128 - if bits > 128 { 128 } else { bits as u32 };
                let mask = if host_bits == 128 { 0 } else { u128::MAX << host_bits };
                Self { prefix: bits, ..Self::new(Kind::V6, (address.to_bits() & mask).to_le_bytes()) }
            }
        }
    }

    /// The same as two numbers, which no two keys share: a small one for what it is, and the address or the hash.
    pub(crate) fn numbers(&self) -> (u16, u128) {
        (u16::from_le_bytes([self.kind as u8, self.prefix]), u128::from_le_bytes(self.bits))
    }

    /// The bucket of a credential, which is kept as a keyed hash only.
    #[must_use]
    pub fn credential(credential: impl AsRef<[u8]>) -> Self {
        Self::new(Kind::Key, recent::recall(credential.as_ref(), hash_128))
    }

    /// The bucket of any other identity: a user, a tenant, an endpoint. The text is kept as a keyed hash only.
    #[must_use]
    pub fn id(id: impl AsRef<[u8]>) -> Self {
        Self::new(Kind::Id, recent::recall(id.as_ref(), hash_128))
    }
}

#[cfg(feature = "redis")]
impl BucketKey {
    /// The same key as it is known under a secret: what is a hash already is hashed again.
    pub(crate) fn under(&self, secret: &SecretKey) -> Self {
        match self.kind {
            Kind::Key | Kind::Id => Self::new(self.kind, secret.hash_128(self.bits)),
            Kind::Global | Kind::V4 | Kind::V6 => *self,
        }
    }
}

impl fmt::Display for BucketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = u128::from_le_bytes(self.bits);
        let hash = u128::from_be_bytes(self.bits);
        match self.kind {
            Kind::Global => f.write_str("global"),
            Kind::V4 => write!(f, "ip:{}", Ipv4Addr::from_bits(number as u32)),
            Kind::V6 => write!(f, "ip:{}/{}", Ipv6Addr::from_bits(number), self.prefix),
            Kind::Key => write!(f, "key:{hash:032x}"),
            Kind::Id => write!(f, "id:{hash:032x}"),
        }
    }
}

impl fmt::Debug for BucketKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Global => "global",
            Kind::V4 | Kind::V6 => "ip",
            Kind::Key => "key",
            Kind::Id => "id",
        };
        write!(f, "BucketKey({kind})")
    }
}

/// Why a request has no bucket key.
/// An extractor of your own returns one; [`or`](KeyExtractor::or) asks the next extractor instead.
///
/// # Example
///
/// ```
/// use http::request::Parts;
/// use tower_token_bucket::{BucketKey, ClientIp, KeyExtractor, Limit, NoKey, Quota};
///
/// /// Put into the extensions of each request by what authenticates.
/// #[derive(Clone)]
/// struct Tenant(u64);
///
/// struct ByTenant;
///
/// impl KeyExtractor for ByTenant {
///     fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
///         let Tenant(id) = parts.extensions.get().ok_or(NoKey::Identity)?;
///         Ok(BucketKey::id(id.to_le_bytes()))
///     }
/// }
///
/// let limit = Limit::new("per-tenant", Quota::per_minute(600)).key_by(ByTenant.or(ClientIp::peer()));
/// # let _ = limit;
/// let (parts, ()) = http::Request::new(()).into_parts();
/// assert_eq!(ByTenant.extract(&parts).unwrap_err(), NoKey::Identity);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoKey {
    /// There is no accepted credential in the named header: answered with 401.
    Credential(HeaderName),
    /// A closure found no identity: answered with 401.
    Identity,
    /// The server did not put the peer's address into the request's extensions: a fault of the configuration, answered
    /// with 503.
    Peer,
}

/// Finds the bucket key of a request.
///
/// Implemented by [`ClientIp`](crate::ClientIp), [`ApiKey`](crate::ApiKey), [`Global`], by `a.or(b)`, and by closures from
/// `&http::request::Parts` to `Option<BucketKey>`.
///
/// # Example
///
/// ```
/// use http::request::Parts;
/// use tower_token_bucket::{BucketKey, Limit, Quota};
///
/// struct Tenant(u64);
/// let limit = Limit::new("per-tenant", Quota::per_minute(600))
///     .key_by(|parts: &Parts| parts.extensions.get::<Tenant>().map(|tenant| BucketKey::id(tenant.0.to_le_bytes())));
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` finds no key",
    note = "a key is found by `ApiKey`, `ClientIp`, `Identity`, `Global`, or a closure with the type of its argument: \
            `|parts: &Parts| -> Option<BucketKey> {{ … }}`",
    note = "`ClientIp::forwarded(…)` needs `.trusted_proxies(…)` or `.hops(…)`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Finds the bucket key.
    ///
    /// # Errors
    ///
    /// [`NoKey`] says why there is none: the request is then refused.
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey>;

    /// Asks `other` where this extractor finds no key.
    #[must_use]
    fn or<K: KeyExtractor>(self, other: K) -> Or<Self, K>
    where
        Self: Sized,
    {
        Or { first: self, second: other }
    }
}

impl<F> KeyExtractor for F
where
    F: Fn(&Parts) -> Option<BucketKey> + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        self(parts).ok_or(NoKey::Identity)
    }
}

/// One extractor, then another: what [`KeyExtractor::or`] returns.
#[derive(Clone, Debug)]
pub struct Or<A, B> {
    first: A,
    second: B,
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        self.first.extract(parts).or_else(|why| {
            self.second.extract(parts).map_err(|other| {
                // A fault of the configuration matters more than what the client left out.
                if other == NoKey::Peer { other } else { why }
            })
        })
    }
}

/// Keys buckets by an identity that an authentication layer of your own has put into the request's extensions. That
/// layer has to run first: in axum it is added after this one, since layers that are added later are outside.
///
/// # Example
///
/// ```
/// use tower_token_bucket::{BucketKey, ClientIp, Identity, KeyExtractor, Limit, Quota};
///
/// #[derive(Clone)]
/// struct User { id: String }
///
/// let limit = Limit::new("per-user", Quota::per_second(10))
///     .key_by(Identity::of(|user: &User| BucketKey::id(&user.id)).or(ClientIp::peer()));
/// ```
pub struct Identity<T, F> {
    key: F,
    of: PhantomData<fn(&T)>,
}

impl<T, F> Identity<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> BucketKey + Send + Sync + 'static,
{
    /// Keys by what `key` makes of the `T` in the request's extensions.
    #[must_use]
    pub fn of(key: F) -> Self {
        Self { key, of: PhantomData }
    }
}

impl<T, F> KeyExtractor for Identity<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> BucketKey + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<BucketKey, NoKey> {
        parts.extensions.get::<T>().map(&self.key).ok_or(NoKey::Identity)
    }
}

impl<T, F> fmt::Debug for Identity<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").finish_non_exhaustive()
    }
}

/// All requests share one bucket.
#[derive(Clone, Copy, Debug, Default)]
pub struct Global;

impl KeyExtractor for Global {
    fn extract(&self, _: &Parts) -> Result<BucketKey, NoKey> {
        Ok(BucketKey::global())
    }
}

pub(crate) fn header_name(name: &str) -> Result<HeaderName, ConfigError> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| ConfigError::HeaderName { name: name.to_owned() })
}
