//! The limiters that are compared, each as its documentation sets it up, by one and the same quota and key.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum_governor::nz;
use http::header::RETRY_AFTER;
use http::request::Parts;
use http::{HeaderName, HeaderValue, StatusCode};
use redis::Script;
use redis::aio::MultiplexedConnection;
use tower_governor::GovernorError;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_token_bucket::{ApiKey, ClientIp, HeaderStyle, Limit, MemoryStore, Quota, Store, TokenBucketLayer};

pub(crate) const OURS: &str = "tower-token-bucket";
pub(crate) const TOWER_GOVERNOR: &str = "tower_governor 0.8.0";
pub(crate) const AXUM_GOVERNOR: &str = "axum-governor 2.1.2";
pub(crate) const AXUM_GCRA: &str = "axum_gcra 0.1.1";
pub(crate) const LIMITADOR: &str = "limitador 0.14.0";
pub(crate) const TOWER_RATE_LIMIT_REDIS: &str = "tower-rate-limit-redis 1.0.2";
pub(crate) const BLOG: &str = "the usual script";
pub(crate) const REDIS_RATE: &str = "redis_rate's design";
pub(crate) const SPRING: &str = "Spring's design";

/// The header that has the client's key.
pub(crate) static API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// A quota that all of them can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    /// A token every 100 ns, 1,000,000 at once: one client alone cannot use it up.
    Plenty,
    /// A token every millisecond, 50,000 at once: the most that each of those on Redis can hold.
    Served,
    /// One a day.
    Scarce,
}

impl Rule {
    /// Time for one token.
    fn period(self) -> Duration {
        match self {
            Self::Plenty => Duration::from_nanos(100),
            Self::Served => Duration::from_millis(1),
            Self::Scarce => Duration::from_secs(86_400),
        }
    }

    fn capacity(self) -> u32 {
        match self {
            Self::Plenty => 1_000_000,
            Self::Served => 50_000,
            Self::Scarce => 1,
        }
    }

    fn quota(self) -> Quota {
        let quota = match self {
            Self::Plenty => Quota::new(10, Duration::from_micros(1)),
            Self::Served => Quota::per_second(1_000),
            Self::Scarce => Quota::per_day(1),
        };
        quota.with_capacity(self.capacity().into())
    }

    /// Tokens per second.
    fn rate(self) -> f64 {
        1.0 / self.period().as_secs_f64()
    }
}

pub(crate) fn key(parts: &http::HeaderMap) -> &str {
    parts.get(&API_KEY).and_then(|key| key.to_str().ok()).unwrap_or_default()
}

/// Our layer, by the header or by the peer's address.
pub(crate) fn ours<St: Store>(store: St, rule: Rule, by_header: bool, style: HeaderStyle) -> TokenBucketLayer<St> {
    let limit = Limit::new("per-key", rule.quota());
    let limit = if by_header { limit.key_by(ApiKey::unverified("x-api-key")) } else { limit.key_by(ClientIp::peer()) };
    // Longer than the default: every decision is to be one of the store.
    TokenBucketLayer::new(store, limit).headers(style).deadline(Duration::from_secs(2))
}

pub(crate) fn memory(rule: Rule, by_header: bool, style: HeaderStyle) -> TokenBucketLayer<MemoryStore> {
    ours(MemoryStore::new(), rule, by_header, style)
}

/// The key of tower_governor.
#[derive(Clone)]
pub(crate) struct HeaderKey;

impl tower_governor::key_extractor::KeyExtractor for HeaderKey {
    type Key = String;

    fn extract<T>(&self, request: &http::Request<T>) -> Result<String, GovernorError> {
        Ok(key(request.headers()).to_owned())
    }
}

type GovernorLayer<K, M> = tower_governor::GovernorLayer<K, M, Body>;
type NoHeaders = governor::middleware::NoOpMiddleware<governor::clock::QuantaInstant>;
type WithHeaders = governor::middleware::StateInformationMiddleware;

pub(crate) fn tower_governor_by_peer(rule: Rule) -> GovernorLayer<PeerIpKeyExtractor, NoHeaders> {
    let mut builder = GovernorConfigBuilder::default();
    builder.period(rule.period()).burst_size(rule.capacity());
    GovernorLayer::new(builder.finish().expect("a quota"))
}

pub(crate) fn tower_governor(rule: Rule) -> GovernorLayer<HeaderKey, NoHeaders> {
    let mut builder = GovernorConfigBuilder::default();
    builder.period(rule.period()).burst_size(rule.capacity());
    GovernorLayer::new(builder.key_extractor(HeaderKey).finish().expect("a quota"))
}

pub(crate) fn tower_governor_with_headers(rule: Rule) -> GovernorLayer<HeaderKey, WithHeaders> {
    let mut builder = GovernorConfigBuilder::default();
    builder.period(rule.period()).burst_size(rule.capacity());
    GovernorLayer::new(builder.key_extractor(HeaderKey).use_headers().finish().expect("a quota"))
}

/// One more limit of ours.
pub(crate) fn limit(number: usize, rule: Rule) -> Limit {
    Limit::new(&format!("limit-{number}"), rule.quota()).key_by(ApiKey::unverified("x-api-key"))
}

/// Inside a runtime: it has a task that forgets idle keys.
pub(crate) fn axum_governor(rule: Rule) -> axum_governor::GovernorLayer<String> {
    axum_governor_stack(rule, 1)
}

/// As many limits in one layer.
pub(crate) fn axum_governor_stack(rule: Rule, limits: usize) -> axum_governor::GovernorLayer<String> {
    use axum_governor::{GovernorConfigBuilder, GovernorLayer, Quota, extractor::Header};
    const NAMES: [&str; 4] = ["limit-0", "limit-1", "limit-2", "limit-3"];
    let quota = match rule {
        Rule::Plenty => Quota::requests_per_second(nz!(10_000_000u32)).burst(nz!(1_000_000u32)),
        Rule::Served => Quota::requests_per_second(nz!(1_000u32)).burst(nz!(50_000u32)),
        Rule::Scarce => Quota::seconds_per_request(nz!(86_400u32)),
    };
    let builder = GovernorConfigBuilder::default().with_extractor(Header(&API_KEY)).quota_default(quota);
    let builder = NAMES[1..limits].iter().fold(builder, |builder, name| builder.stack(name, Header(&API_KEY), quota));
    GovernorLayer::new(builder.finish().expect("a quota"))
}

/// The key of axum_gcra.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct GcraKey(String);

#[axum_07::async_trait]
impl<S: Sync> axum_07::extract::FromRequestParts<S> for GcraKey {
    type Rejection = StatusCode;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, StatusCode> {
        Ok(Self(key(&parts.headers).to_owned()))
    }
}

pub(crate) fn axum_gcra(rule: Rule) -> axum_gcra::RateLimitLayerBuilder<GcraKey> {
    let capacity = u64::from(rule.capacity()).try_into().expect("a capacity");
    axum_gcra::RateLimitLayer::builder().with_default_quota(axum_gcra::gcra::Quota::new(rule.period(), capacity))
}

/// limitador is no layer: what an application has to write around it. A window of the same rate and burst.
pub(crate) fn limitador(rule: Rule) -> Arc<limitador::RateLimiter> {
    let limiter = limitador::RateLimiter::new(10_000_000);
    let (most, window) = match rule {
        Rule::Plenty => (10_000_000, 1),
        Rule::Served => (50_000, 50),
        Rule::Scarce => (1, 86_400),
    };
    let variable = "key".to_owned().try_into().expect("an expression");
    limiter.add_limit(limitador::limit::Limit::new("per-key", most, window, Vec::new(), vec![variable]));
    Arc::new(limiter)
}

/// Whether it is refused, and the three fields that limitador makes. Apart, since what it returns cannot be sent to
/// another thread.
fn ask_limitador(limiter: &limitador::RateLimiter, key: &str) -> Option<(bool, HashMap<String, String>)> {
    let values = HashMap::from([("key".to_owned(), key.to_owned())]);
    let checked = limiter.check_rate_limited_and_update(&"per-key".to_owned().into(), &values.into(), 1);
    let mut checked = checked.ok()?;
    Some((checked.limited, checked.response_header()))
}

pub(crate) async fn by_limitador(
    State(limiter): State<Arc<limitador::RateLimiter>>,
    request: Request,
    next: Next,
) -> Response {
    let Some((limited, fields)) = ask_limitador(&limiter, key(request.headers())) else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut response = if limited { StatusCode::TOO_MANY_REQUESTS.into_response() } else { next.run(request).await };
    for (name, value) in fields {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::try_from(value)) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// The key of tower-rate-limit-redis.
#[derive(Clone)]
pub(crate) struct Resolver;

impl tower_rate_limit_redis::KeyResolver for Resolver {
    type Key = String;
    type ErrorBody = Body;

    fn key<T>(&self, request: &http::Request<T>) -> Result<String, http::Response<Body>> {
        Ok(key(request.headers()).to_owned())
    }
}

pub(crate) async fn tower_rate_limit_redis(rule: Rule, url: &str) -> tower_rate_limit_redis::RateLimitLayer<Resolver> {
    let client = redis_032::Client::open(url).expect("a URL");
    let connection = client.get_multiplexed_async_connection().await.expect("the server listens");
    tower_rate_limit_redis::RateLimitLayer::builder()
        .conn(connection)
        .key_resolver(Resolver)
        .capacity(rule.capacity().try_into().expect("a capacity that it can hold"))
        .emission_interval(rule.period())
        // As in its example.
        .timeout(Duration::from_millis(300))
        .build()
}

#[derive(Clone, Copy)]
enum Form {
    Blog,
    RedisRate,
    Spring,
}

/// A design that is a script and no crate, called by a middleware as an application writes it.
pub(crate) struct Design {
    form: Form,
    rule: Rule,
    script: Script,
    connection: MultiplexedConnection,
}

impl Design {
    pub(crate) async fn new(name: &str, rule: Rule, url: &str) -> Arc<Self> {
        let (form, script) = match name {
            BLOG => (Form::Blog, include_str!("../../scripts/blog.lua")),
            REDIS_RATE => (Form::RedisRate, include_str!("../../scripts/redis_rate.lua")),
            _ => (Form::Spring, include_str!("../../scripts/spring.lua")),
        };
        let client = redis::Client::open(url).expect("a URL");
        let connection = client.get_multiplexed_async_connection().await.expect("the server listens");
        Arc::new(Self { form, rule, script: Script::new(script), connection })
    }

    /// Whether it is allowed, what remains, and seconds to wait where it says so.
    async fn decide(&self, key: &str) -> redis::RedisResult<(bool, i64, Option<u64>)> {
        let mut connection = self.connection.clone();
        let capacity = self.rule.capacity();
        match self.form {
            Form::Blog => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
                let mut call = self.script.key(format!("rate_limit:{key}"));
                call.arg(capacity).arg(self.rule.rate()).arg(now).arg(1);
                let (allowed, remaining): (i64, i64) = call.invoke_async(&mut connection).await?;
                Ok((allowed == 1, remaining, None))
            }
            Form::RedisRate => {
                let mut call = self.script.key(format!("rate:{key}"));
                let (rate, period) = match self.rule {
                    Rule::Scarce => (1, 86_400),
                    Rule::Plenty | Rule::Served => (self.rule.rate() as u64, 1),
                };
                call.arg(capacity).arg(rate).arg(period).arg(1);
                let (allowed, remaining, wait, _): (i64, i64, String, String) =
                    call.invoke_async(&mut connection).await?;
                Ok((allowed > 0, remaining, wait.parse().ok().filter(|wait: &f64| *wait > 0.0).map(|wait| wait as u64)))
            }
            Form::Spring => {
                let mut call = self.script.key(format!("request_rate_limiter.{{{key}}}.tokens"));
                call.key(format!("request_rate_limiter.{{{key}}}.timestamp"));
                call.arg(self.rule.rate()).arg(capacity).arg(1);
                let (allowed, remaining): (i64, i64) = call.invoke_async(&mut connection).await?;
                Ok((allowed == 1, remaining, None))
            }
        }
    }
}

/// With the fields that such middleware has: the limit, what remains, and the wait where the script says it.
pub(crate) async fn by_design(State(design): State<Arc<Design>>, request: Request, next: Next) -> Response {
    static LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
    static REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
    let Ok((allowed, remaining, wait)) = design.decide(key(request.headers())).await else {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let mut response = if allowed { next.run(request).await } else { StatusCode::TOO_MANY_REQUESTS.into_response() };
    let fields = response.headers_mut();
    fields.insert(LIMIT.clone(), design.rule.capacity().into());
    fields.insert(REMAINING.clone(), remaining.into());
    if let Some(wait) = wait {
        fields.insert(RETRY_AFTER, wait.into());
    }
    response
}
