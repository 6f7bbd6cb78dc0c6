//! Limits from a configuration file, in any format that serde reads.
//!
//! [`Config`] is the whole file that `examples/api.rs` reads; [`LimitConfig`] is one of its limits, for programs whose
//! file has other parts.
//!
//! ```toml
//! listen = "127.0.0.1:3000"
//! headers = "draft11"                    # draft11 | legacy | legacy-delta | off
//!
//! [store]                                # without this table: memory
//! redis = "redis://127.0.0.1:6379"       # or cluster = ["redis://…", …]; or sentinel = ["redis://…", …] with master = "name"
//! deadline = "50ms"
//! on_failure = "local"                   # local | allow | deny
//! share = 1                              # local: one n-th of the quota
//! prefix = "tb"
//! secret = "…"                           # for the hash of credentials; optional
//!
//! [client_ip]                            # without it: the peer's address
//! header = "x-forwarded-for"             # x-forwarded-for | forwarded | x-real-ip
//! trusted_proxies = ["127.0.0.1/32"]
//! ipv6_prefix = 64                       # 32 to 128
//!
//! [[limits]]
//! name = "per-key"
//! key = "api-key-or-client-ip"           # api-key | client-ip | api-key-or-client-ip | global
//! api_key_header = "x-api-key"
//! api_keys = ["alpha", "beta"]           # the keys that are accepted
//! capacity = 100
//! refill = 10                            # tokens ...
//! per = "1s"                             # ... per period: a whole number of us, ms, s, m, h or d
//! default_cost = 1
//! shadow = false
//! [limits.costs]
//! "GET /search" = 3
//! "POST /reports/generate" = 10
//! "GET /health" = 0
//! ```

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::api_key::ApiKey;
use crate::client_ip::ClientIp;
use crate::cost::CostTable;
use crate::error::ConfigError;
use crate::failure::OnStoreFailure;
use crate::headers::HeaderStyle;
use crate::key::{Global, KeyExtractor};
use crate::layer::TokenBucketLayer;
use crate::limit::Limit;
use crate::quota::Quota;
use crate::store::Store;

/// A configuration file: where to listen, which fields to send, and the limits.
///
/// # Example
///
/// ```
/// use tower_token_bucket::config::Config;
/// use tower_token_bucket::MemoryStore;
///
/// let config: Config = toml::from_str(r#"
///     [[limits]]
///     name = "per-address"
///     key = "client-ip"
///     capacity = 100
///     refill = 10
///     per = "1s"
/// "#)?;
/// let layer = config.layer(MemoryStore::new())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    listen: Option<SocketAddr>,
    #[serde(default)]
    headers: Headers,
    store: Option<StoreConfig>,
    #[serde(default)]
    client_ip: ClientIpConfig,
    limits: Vec<LimitConfig>,
}

impl Config {
    /// The address to listen on, for the program that serves.
    #[must_use]
    pub fn listen(&self) -> Option<SocketAddr> {
        self.listen
    }

    /// Which fields to send.
    #[must_use]
    pub fn headers(&self) -> HeaderStyle {
        match self.headers {
            Headers::Draft11 => HeaderStyle::Draft11,
            Headers::Legacy => HeaderStyle::Legacy,
            Headers::LegacyDelta => HeaderStyle::LegacyDelta,
            Headers::Off => HeaderStyle::Off,
        }
    }

    /// The limits, in the order of the file.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Setting`] that names the key, the reason and the allowed values.
    pub fn limits(&self) -> Result<Vec<Limit>, ConfigError> {
        let client_ip = self.client_ip.client_ip()?;
        if self.limits.is_empty() {
            return Err(setting("limits", "there is none: at least one is needed"));
        }
        let mut limits: Vec<Limit> = Vec::with_capacity(self.limits.len());
        for (i, limit) in self.limits.iter().enumerate() {
            let limit = limit.limit(&client_ip).map_err(|error| within(&format!("limits[{i}]"), error))?;
            if limits.iter().any(|known| known.name().eq_ignore_ascii_case(limit.name())) {
                let error = ConfigError::DuplicateLimit { name: limit.name().to_owned() };
                return Err(setting(&format!("limits[{i}].name"), error));
            }
            limits.push(limit);
        }
        Ok(limits)
    }

    /// Checks all settings; no server is asked.
    ///
    /// To apply a changed file to a running layer, check it and then [replace](crate::LimitsHandle::replace) the limits
    /// with [its own](Self::limits).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Setting`] that names the key, the reason and the allowed values.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.layer(crate::MemoryStore::new()).map(drop)
    }

    /// The layer that the file describes, on `store`, once all settings are [checked](Self::check).
    ///
    /// # Errors
    ///
    /// [`ConfigError::Setting`] that names the key, the reason and the allowed values.
    pub fn layer<St: Store>(&self, store: St) -> Result<TokenBucketLayer<St>, ConfigError> {
        let layer = TokenBucketLayer::try_new(store, self.limits()?)?.headers(self.headers());
        match &self.store {
            Some(_) if cfg!(not(feature = "redis")) => Err(setting("store", "the crate's feature `redis` is needed")),
            Some(config) => config.apply(layer).map_err(|error| within("store", error)),
            None => Ok(layer),
        }
    }

    /// The store in Redis that the file names: `None` for buckets in memory.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Setting`] that names the key, the reason and the allowed values. A server that is down is no
    /// error.
    #[cfg(feature = "redis")]
    pub async fn redis_store(&self) -> Result<Option<crate::RedisStore>, ConfigError> {
        let Some(config) = &self.store else { return Ok(None) };
        let store = config.unconnected().map_err(|error| within("store", error))?;
        store.first_connection().await;
        Ok(Some(store))
    }
}

/// Where buckets live, and what happens when that fails.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table of settings of the store")]
#[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "only the Redis store reads all of it"))]
struct StoreConfig {
    redis: Option<Secret>,
    cluster: Option<Secrets>,
    sentinel: Option<Secrets>,
    master: Option<String>,
    deadline: Option<String>,
    on_failure: Option<OnFailure>,
    share: Option<Number>,
    prefix: Option<String>,
    secret: Option<Secret>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OnFailure {
    Local,
    Allow,
    Deny,
}

impl StoreConfig {
    fn apply<St: Store>(&self, mut layer: TokenBucketLayer<St>) -> Result<TokenBucketLayer<St>, ConfigError> {
        if let Some(text) = &self.deadline {
            let deadline = duration(text).map_err(|reason| setting("deadline", reason))?;
            layer = layer.try_deadline(deadline).map_err(|error| setting("deadline", error))?;
        }
        if let Some(policy) = self.on_failure {
            layer = layer.on_store_failure(match policy {
                OnFailure::Local => OnStoreFailure::Local,
                OnFailure::Allow => OnStoreFailure::Allow,
                OnFailure::Deny => OnStoreFailure::Deny,
            });
        }
        #[cfg(feature = "redis")]
        self.unconnected()?;
        let share = self.share.map_or(1, |share| share.0);
        let share = u32::try_from(share)
            .map_err(|_| setting("share", format_args!("{share} is not allowed: 1 to 4294967295 are")))?;
        layer.try_share(share).map_err(|error| setting("share", error))
    }

    #[cfg(feature = "redis")]
    fn unconnected(&self) -> Result<crate::RedisStore, ConfigError> {
        use crate::RedisStore;

        let Self { redis, cluster, sentinel, master, .. } = self;
        if master.is_some() && sentinel.is_none() {
            return Err(setting("master", "allowed only beside sentinel"));
        }
        let at = |key: &'static str| move |error| setting(key, error);
        let store = match (redis, cluster, sentinel) {
            (Some(url), None, None) => RedisStore::unconnected(&url.0).map_err(at("redis"))?,
            (None, Some(urls), None) => RedisStore::unconnected_cluster(&urls.0).map_err(at("cluster"))?,
            (None, None, Some(urls)) => {
                let name = "there is none: the name that the sentinels know the primary by is needed";
                let master = master.as_ref().ok_or_else(|| setting("master", name))?;
                RedisStore::unconnected_sentinel(&urls.0, master).map_err(at("sentinel"))?
            }
            (None, None, None) => {
                return Err(setting(
                    "redis",
                    "there is none: the URL of a server is needed, or those of a cluster or of sentinels",
                ));
            }
            _ => return Err(setting("redis", "one of redis, cluster and sentinel is allowed")),
        };
        let store = match &self.secret {
            Some(secret) if secret.0.is_empty() => return Err(setting("secret", "an empty one is not allowed")),
            Some(secret) => store.secret(&secret.0),
            None => store,
        };
        match &self.prefix {
            Some(prefix) => store.try_prefix(prefix).map_err(|error| setting("prefix", error)),
            None => Ok(store),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Headers {
    #[default]
    Draft11,
    Legacy,
    LegacyDelta,
    Off,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table of settings of the client's address")]
struct ClientIpConfig {
    header: Option<ForwardedHeader>,
    trusted_proxies: Option<Vec<String>>,
    ipv6_prefix: Option<Number>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ForwardedHeader {
    XForwardedFor,
    Forwarded,
    XRealIp,
}

impl ForwardedHeader {
    fn name(self) -> &'static str {
        match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::Forwarded => "forwarded",
            Self::XRealIp => "x-real-ip",
        }
    }
}

impl ClientIpConfig {
    fn client_ip(&self) -> Result<ClientIp, ConfigError> {
        let client_ip = match (self.header, &self.trusted_proxies) {
            (None, None) => ClientIp::peer(),
            (Some(header), Some(networks)) if !networks.is_empty() => ClientIp::try_forwarded(header.name())
                .and_then(|forwarded| forwarded.try_trusted_proxies(networks))
                .map_err(|error| setting("client_ip.trusted_proxies", error))?,
            (Some(_), _) => {
                let reason = "there is none: at least one network of proxies whose header is believed is needed";
                return Err(setting("client_ip.trusted_proxies", reason));
            }
            (None, Some(_)) => {
                let reason = "there is none: the header that the trusted proxies set is needed";
                return Err(setting("client_ip.header", reason));
            }
        };
        match self.ipv6_prefix {
            // What is too large is so whatever its type.
            Some(bits) => client_ip
                .try_ipv6_prefix(u8::try_from(bits.0).unwrap_or(u8::MAX))
                .map_err(|error| setting("client_ip.ipv6_prefix", error)),
            None => Ok(client_ip),
        }
    }
}

/// One limit of a configuration file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table of settings of a limit")]
pub struct LimitConfig {
    name: String,
    key: KeyBy,
    api_key_header: Option<String>,
    api_keys: Option<Secrets>,
    capacity: Number,
    refill: Number,
    per: String,
    default_cost: Option<Number>,
    #[serde(default)]
    shadow: bool,
    #[serde(default)]
    costs: BTreeMap<String, Number>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
enum KeyBy {
    #[serde(rename = "api-key")]
    Credential,
    #[serde(rename = "client-ip")]
    Address,
    #[serde(rename = "api-key-or-client-ip")]
    CredentialOrAddress,
    #[serde(rename = "global")]
    Global,
}

impl LimitConfig {
    /// The limit, whose client addresses `client_ip` finds.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Setting`] that names the key within the limit, the reason and the allowed values.
    pub fn limit(&self, client_ip: &ClientIp) -> Result<Limit, ConfigError> {
        let per = duration(&self.per).map_err(|reason| setting("per", reason))?;
        let quota = Quota::try_from_parts(self.capacity.0, self.refill.0, per).map_err(|error| match &error {
            ConfigError::Quota(quota) => setting(quota.place(), &error),
            _ => error,
        })?;
        let mut costs = CostTable::new(self.default_cost.map_or(1, |cost| cost.0));
        for (route, cost) in &self.costs {
            costs = costs.try_route(route, cost.0).map_err(|error| setting("costs", error))?;
        }
        let limit = Limit::try_new(&self.name, quota).map_err(|error| setting("name", error))?;
        let of_costs = |error| match &error {
            ConfigError::CostAboveCapacity { entry, .. } if !entry.starts_with('"') => setting("default_cost", error),
            _ => setting("costs", error),
        };
        let limit = limit.try_cost(costs).map_err(of_costs)?;
        let limit = match self.key {
            KeyBy::Global => limit.key_by(self.no_api_key(Global)?),
            KeyBy::Address => limit.key_by(self.no_api_key(client_ip.clone())?),
            KeyBy::Credential => limit.key_by(self.api_key()?),
            KeyBy::CredentialOrAddress => limit.key_by(self.api_key()?.or(client_ip.clone())),
        };
        Ok(if self.shadow { limit.shadow() } else { limit })
    }

    fn no_api_key<K>(&self, key: K) -> Result<K, ConfigError> {
        for (name, set) in [("api_key_header", self.api_key_header.is_some()), ("api_keys", self.api_keys.is_some())] {
            if set {
                return Err(setting(name, "allowed only where key is api-key or api-key-or-client-ip"));
            }
        }
        Ok(key)
    }

    fn api_key(&self) -> Result<ApiKey, ConfigError> {
        let keys = self.api_keys.as_ref().map_or(&[][..], |keys| &keys.0);
        if keys.is_empty() {
            return Err(setting("api_keys", "there is none: at least one accepted key is needed"));
        }
        for (i, key) in keys.iter().enumerate() {
            if !ApiKey::is_credential(key.as_bytes()) {
                let reason = "not a key that a client can send: allowed are 1 to 512 visible characters of ASCII";
                return Err(setting(&format!("api_keys[{i}]"), reason));
            }
        }
        // Compared by their hashes, in constant time.
        let known: HashSet<blake3::Hash> = keys.iter().map(|key| blake3::hash(key.as_bytes())).collect();
        let header = self.api_key_header.as_deref().unwrap_or("x-api-key");
        ApiKey::try_verified(header, move |key| known.contains(&blake3::hash(key.as_bytes())))
            .map_err(|error| setting("api_key_header", error))
    }
}

/// A text that is never shown, not even as the value that an error is about.
#[derive(Clone)]
#[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "only the Redis store reads it"))]
struct Secret(String);

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self).map_err(|_| de::Error::custom("not a text in quotes"))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// The same of several texts.
#[derive(Clone)]
struct Secrets(Vec<String>);

impl<'de> Deserialize<'de> for Secrets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Vec::deserialize(deserializer).map(Self).map_err(|_| de::Error::custom("not a list of texts in quotes"))
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// A whole number. A value that is none is not shown where it is a text: a misplaced setting may be a credential.
#[derive(Clone, Copy, Debug)]
struct Number(u64);

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;

        impl Visitor<'_> for Whole {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a whole number, 0 or more")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Number, E> {
                Ok(Number(number))
            }

            fn visit_str<E: de::Error>(self, _: &str) -> Result<Number, E> {
                Err(E::invalid_type(de::Unexpected::Other("a text"), &self))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Number, E> {
                u64::try_from(number).map(Number).map_err(|_| E::invalid_value(de::Unexpected::Signed(number), &self))
            }
        }

        deserializer.deserialize_u64(Whole)
    }
}

/// A whole number and a unit, such as `1s`.
fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let micros = match unit.trim_start_matches(' ') {
        "us" => 1,
        "ms" => 1_000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        "d" => 86_400_000_000,
        _ => 0,
    };
    let parsed: Option<u64> = number.parse().ok().and_then(|number: u64| number.checked_mul(micros));
    match parsed {
        Some(total) if total > 0 => Ok(Duration::from_micros(total)),
        _ => Err(format!(
            "{text:?} is not a length of time: allowed are a whole number from 1 and a unit of us, ms, s, m, h or d, \
             such as \"1s\""
        )),
    }
}

fn setting(key: &str, reason: impl fmt::Display) -> ConfigError {
    ConfigError::Setting { key: key.to_owned(), reason: reason.to_string() }
}

/// The same error, with the place around its key.
fn within(place: &str, error: ConfigError) -> ConfigError {
    match error {
        ConfigError::Setting { key, reason } => ConfigError::Setting { key: format!("{place}.{key}"), reason },
        error => setting(place, error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        match toml::from_str::<Config>(text) {
            Ok(config) => config.limits().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    }

    fn limit(change: &str) -> String {
        let mut lines: Vec<&str> =
            vec!["name = \"a\"", "key = \"client-ip\"", "capacity = 5", "refill = 1", "per = \"1s\""];
        let key = change.split(' ').next().unwrap();
        lines.retain(|line| !line.starts_with(key));
        format!("[[limits]]\n{}\n{change}\n", lines.join("\n"))
    }

    #[test]
    fn a_wrong_setting_is_refused_with_its_place_the_reason_and_what_is_allowed() {
        for (change, parts) in [
            ("capacity = 0", ["limits[0].capacity", "capacity is 0", "1 to 2147483648"]),
            ("capacity = 4294967296", ["limits[0].capacity", "too large", "nearest"]),
            ("capacity = -1", ["capacity = -1", "`-1`", "0 or more"]),
            ("capacity = 1.5", ["capacity = 1.5", "floating point", "a whole number"]),
            ("refill = nan", ["refill = nan", "floating point", "a whole number"]),
            ("refill = 0", ["limits[0].refill", "refill is 0", "1 to 1099511627776"]),
            ("per = \"soon\"", ["limits[0].per", "\"soon\"", "us, ms, s, m, h or d"]),
            ("per = \"0s\"", ["limits[0].per", "\"0s\"", "from 1"]),
            ("per = \"99999999999999999999s\"", ["limits[0].per", "not a length of time", "from 1"]),
            ("per = \"5000d\"", ["limits[0].refill", "cannot be held exactly", "nearest"]),
            ("name = \"a b\"", ["limits[0].name", "\"a b\"", "A-Z a-z 0-9"]),
            ("key = \"ip\"", ["key = \"ip\"", "unknown variant", "client-ip"]),
            ("key = \"api-key\"", ["limits[0].api_keys", "there is none", "at least one"]),
            ("api_keys = [\"x\"]", ["limits[0].api_keys", "allowed only where", "api-key"]),
            ("api_key_header = \"x\"", ["limits[0].api_key_header", "allowed only where", "api-key"]),
            ("capacity = \"canary\"", ["capacity = ", "a text", "a whole number"]),
            ("capcity = 3", ["capcity", "unknown field", "`capacity`"]),
            ("default_cost = 6", ["limits[0].default_cost", "the default cost", "above the capacity 5"]),
            ("costs = { \"FETCH\" = 1 }", ["limits[0].costs", "\"FETCH\"", "allowed are GET"]),
            ("costs = { \"GET /x\" = 6 }", ["limits[0].costs", "\"GET /x\"", "above the capacity 5"]),
            ("costs = { \"GET /x\" = 1, \"GET  /x\" = 2 }", ["limits[0].costs", "\"GET  /x\"", "one space"]),
        ] {
            let error = error(&limit(change));
            assert!(parts.iter().all(|part| error.contains(part)), "{change}: {error}");
        }
    }

    #[test]
    fn a_wrong_key_is_never_shown() {
        let keys = "key = \"api-key\"\napi_keys = [\"alpha\", \"s3cret canary\\n\"]";
        let error = error(&limit(keys));
        assert!(error.contains("limits[0].api_keys[1]") && !error.contains("canary"), "{error}");
        let config: Config = toml::from_str(&limit("key = \"api-key\"\napi_keys = [\"canary\"]")).unwrap();
        assert!(!format!("{config:?}").contains("canary"));
        for keys in ["\"canary\"", "[\"canary\", 3]", "{ canary = 1 }"] {
            let error = toml::from_str::<Config>(&limit(&format!("key = \"api-key\"\napi_keys = {keys}"))).unwrap_err();
            assert_eq!(error.message(), "not a list of texts in quotes");
        }
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn a_wrong_store_is_refused_and_its_secrets_are_not_shown() {
        for (table, part) in [
            ("", "store.redis: there is none"),
            ("cluster = []", "store.cluster: the Redis URL cannot be used: there is no node"),
            (
                "cluster = [\"redis://:canary@127.0.0.1/3\"]",
                "store.cluster: the Redis URL cannot be used: a cluster has no",
            ),
            (
                "cluster = [\"redis://127.0.0.1:1\", \"http://:canary@h\"]",
                "store.cluster: the Redis URL cannot be used: allowed",
            ),
            ("sentinel = [\"redis://127.0.0.1:1\"]", "store.master: there is none"),
            ("sentinel = []\nmaster = \"m\"", "store.sentinel: the Redis URL cannot be used: there is no sentinel"),
            (
                "sentinel = [\"redis://127.0.0.1:1\"]\nmaster = \"\"",
                "store.sentinel: the Redis URL cannot be used: the name",
            ),
            ("redis = \"redis://127.0.0.1:1\"\nmaster = \"m\"", "store.master: allowed only beside sentinel"),
            ("redis = \"redis://127.0.0.1:1\"\ncluster = [\"redis://127.0.0.1:1\"]", "store.redis: one of redis"),
            ("redis = \"http://user:canary@127.0.0.1\"", "store.redis: the Redis URL cannot be used"),
            ("redis = \"redis://127.0.0.1:1\"\nprefix = \"{canary}\"", "store.prefix: prefix"),
            ("redis = \"redis://127.0.0.1:1\"\nsecret = \"\"", "store.secret: an empty one"),
            ("redis = \"redis://127.0.0.1:1\"\nshare = 0", "store.share: share 0"),
            ("redis = \"redis://127.0.0.1:1\"\ndeadline = \"0ms\"", "store.deadline: \"0ms\""),
        ] {
            let config: Config = toml::from_str(&format!("[store]\n{table}\n{}", limit("shadow = true"))).unwrap();
            let layer = config.layer(crate::MemoryStore::new()).map(drop);
            let error = match config.redis_store().await {
                Ok(_) => layer.unwrap_err().to_string(),
                Err(error) => error.to_string(),
            };
            assert!(error.starts_with(part) && !error.contains(":canary"), "{table}: {error}");
        }
        let secrets = "[store]\nredis = \"redis://:canary@127.0.0.1\"\nsecret = \"canary\"\n";
        let config: Config = toml::from_str(&(secrets.to_owned() + &limit("shadow = true"))).unwrap();
        assert!(!format!("{config:?}").contains("canary"));
    }

    #[test]
    fn names_differ_by_more_than_case() {
        let twice = limit("name = \"a\"") + &limit("name = \"A\"");
        assert!(error(&twice).starts_with("limits[1].name: limit name \"A\" is used twice"));
    }

    #[test]
    fn a_file_without_limits_or_with_a_wrong_client_ip_is_refused() {
        assert!(error("limits = []").contains("at least one"));
        assert!(error("limits = 3").contains("limits"));
        assert!(error("").contains("limits"));
        assert!(error(&("[client_ip]\nipv6_prefix = 8\n".to_owned() + &limit("shadow = true"))).contains("32 to 128"));
        for (table, part) in [
            ("header = \"forwarded\"", "client_ip.trusted_proxies: there is none"),
            ("header = \"forwarded\"\ntrusted_proxies = []", "client_ip.trusted_proxies: there is none"),
            ("trusted_proxies = [\"10.0.0.0/8\"]", "client_ip.header: there is none"),
            (
                "header = \"forwarded\"\ntrusted_proxies = [\"10/8\"]",
                "client_ip.trusted_proxies: \"10/8\" is no network",
            ),
            ("header = \"x-client\"", "unknown variant `x-client`, expected one of `x-forwarded-for`"),
        ] {
            let error = error(&format!("[client_ip]\n{table}\n{}", limit("shadow = true")));
            assert!(error.contains(part), "{table}: {error}");
        }
    }

    #[test]
    fn periods_are_a_number_and_a_unit() {
        for (text, seconds) in
            [("1s", 1.0), ("19 s", 19.0), ("50ms", 0.05), ("7us", 7e-6), ("2h", 7200.0), ("1d", 86400.0)]
        {
            assert_eq!(duration(text), Ok(Duration::from_secs_f64(seconds)), "{text}");
        }
    }
}
