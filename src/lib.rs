//! `TokenBucketLayer`: a token bucket in front of any tower service, in memory or shared in Redis.
//!
//! Each request is given a bucket (by API key, client address or anything else) and a cost (by route). Before the inner
//! service is called the cost is taken from the bucket. If the tokens are not there, the inner service is never called:
//! the answer is 429 with the exact time to wait.
//!
//! ```
//! use axum::{Router, body::Body, routing::get};
//! use http::{Request, StatusCode};
//! use tower::ServiceExt;
//! use tower_token_bucket::{CostTable, Global, Limit, MemoryStore, Quota, TokenBucketLayer};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let limit = Limit::new("everyone", Quota::per_minute(4))
//!     .key_by(Global)
//!     .cost(CostTable::new(1).route("GET /search", 3));
//! let app = Router::new()
//!     .route("/search", get(|| async { "found" }))
//!     .layer(TokenBucketLayer::new(MemoryStore::new(), limit));
//!
//! let search = || Request::get("/search").body(Body::empty());
//! let allowed = app.clone().oneshot(search()?).await?;
//! assert_eq!(allowed.status(), StatusCode::OK);
//! assert_eq!(allowed.headers()["ratelimit"], r#""everyone";r=1;t=15"#);
//!
//! let refused = app.oneshot(search()?).await?;
//! assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
//! assert_eq!(refused.headers()["retry-after"], "30");
//! # Ok(())
//! # }
//! ```
//!
//! # The path of a request
//!
//! ```text
//! request ─▶ limits: key, cost, quota ─▶ store.acquire (one step, all or nothing) ─▶ Decision ─┬─ allowed ─▶ inner service
//!                                                                                              └─ denied  ─▶ 429 + Retry-After
//! ```
//!
//! # What you choose
//!
//! | | type | default |
//! |---|---|---|
//! | how much | [`Quota`]: capacity and refill rate | |
//! | whose bucket | [`KeyExtractor`]: [`ApiKey`], [`ClientIp`], [`Identity`], [`Global`], `a.or(b)`, closures | the peer's address |
//! | what it costs | [`Cost`]: [`CostTable`], closures | 1 |
//! | where buckets live | [`Store`]: [`MemoryStore`], `RedisStore` (feature `redis`), your own | |
//!
//! A [`Limit`] is a named quota with its key and cost. A layer has one or more, and charges all of them or none.
//!
//! # What the client is told
//!
//! A refusal is 429 with `Retry-After` (whole seconds, rounded up: whoever sleeps for so long passes, unless others take the
//! tokens), `Cache-Control: no-store` and an `application/problem+json` body that names the limits that refused. Every
//! response to a request that a bucket was asked for has `RateLimit` and `RateLimit-Policy`; [`HeaderStyle`] chooses others,
//! or none. A request of gRPC is refused with the status 8, 14 or 16 in trailers only. The module [`rejection`] is about
//! responses of your own, and [`headers::EXPOSE_HEADERS`] is what a CORS layer further out has to expose.
//!
//! A [`Decision`] is in the extensions of every request that is let through, and of every response.
//!
//! # When the store fails
//!
//! One [deadline](TokenBucketLayer::deadline), 50 ms by default, covers the whole check. After it, or after an error,
//! [`OnStoreFailure`] applies, of the layer or of a [limit](Limit::on_store_failure): the same limits on this instance alone
//! (`Local`, the default), no limit (`Allow`), or 503 with `Retry-After` (`Deny`). The inner service never sees an error of
//! the store. A `RedisStore` that has failed five times in a row answers at once, until it is well again. Tokens that a check
//! may have taken are not given back, and no command is sent a second time whose outcome is not known.
//!
//! # When there is no key
//!
//! A request without an accepted credential is answered with 401; with [`or`](KeyExtractor::or) it is charged to
//! another key, such as its address. A request whose peer address is unknown is answered with 503, and one line in the
//! log says how the server has to be started. Requests that cost nothing need no key.
//!
//! # When a request costs more than a full bucket
//!
//! No wait can help. A [`CostTable`] with such a cost is refused when the limit is built, but where
//! [plans](Limit::quota_by) have capacities of their own. A cost that is only known with the request is answered with 429
//! without `Retry-After`, whatever the policy for failures is, and no store is asked.
//!
//! # While it runs
//!
//! [`LimitsHandle`] replaces the limits, [`Settle`] charges what a request has really cost, [`Store::peek`],
//! [`reset`](Store::reset) and [`penalize`](Store::penalize) are for operators. A limit in
//! [shadow](Limit::shadow) decides and refuses nothing.
//!
//! # What is seen
//!
//! With the feature `metrics` decisions, checks, failures and waits are series for any recorder: the module `metrics` names
//! them all.
//!
//! With the feature `tracing` the decision goes to the span that a request is in, where that has declared the fields:
//! `rate_limit.decision` (`allowed`, `denied`, `too_dear` or `no_key`), `rate_limit.limit` (the one that
//! [bound](Decision::bound)), `rate_limit.source`, and `rate_limit.retry_after` in seconds.
//!
//! ```
//! # #[cfg(feature = "tracing")] {
//! use http::Request;
//! use tracing::{Span, field::Empty, info_span};
//!
//! // For `tower_http::trace::TraceLayer::make_span_with`; that layer belongs around this one.
//! fn span<B>(request: &Request<B>) -> Span {
//!     info_span!(
//!         "request",
//!         method = %request.method(),
//!         rate_limit.decision = Empty,
//!         rate_limit.limit = Empty,
//!         rate_limit.source = Empty,
//!         rate_limit.retry_after = Empty,
//!     )
//! }
//! # span(&Request::new(()));
//! # }
//! ```
//!
//! A refusal is also an event at DEBUG with the same fields; a reload is one at INFO, and a store that fails and a breaker
//! that opens are at WARN. No event, field or label holds a credential or an identity.
//!
//! # The sender's side
//!
//! [`outbound`] waits for tokens before a peer is called, and obeys what the peer says.
//!
//! # Features
//!
//! | feature | what for | default |
//! |---|---|---|
//! | `axum` | the peer address, the matched route and the original path that axum knows | yes |
//! | `redis` | `RedisStore` | yes |
//! | `rustls` | TLS to Redis | |
//! | `tracing` | events instead of the few lines on stderr, and fields on the current span | |
//! | `metrics` | `metrics`: counters, gauges and histograms, for any recorder | |
//! | `ratelimit-fields` | the sender's side reads a peer's `RateLimit` fields | |
//! | `serde` | `config`: limits from a file | |
//! | `conformance` | `conformance`: tests and the exact model for those who write a store | |
//!
//! # Guides
//!
//! - [README](https://docs.rs/crate/tower-token-bucket/latest): which key for which deployment, Redis and its settings, what
//!   is promised when something fails, the code map.
//! - [Moving here](https://docs.rs/crate/tower-token-bucket/latest/source/docs/migrating.md) from tower_governor or from a
//!   counter in Redis, and why a token bucket.
//! - [Planning](https://docs.rs/crate/tower-token-bucket/latest/source/docs/planning.md) for more than one Redis.
//! - [Beside others](https://docs.rs/crate/tower-token-bucket/latest/source/docs/peers.md): what other crates do better, and
//!   when not to use this one.
//! - [What it costs](https://docs.rs/crate/tower-token-bucket/latest/source/docs/performance.md), and how that is known.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod few;
mod log;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(not(feature = "metrics"))]
mod metrics;
mod quota;
mod text;

mod api_key;
mod charge;
mod client_ip;
mod cost;
mod key;
mod limit;

mod bucket;
mod decision;
mod pace;
mod store;

mod checks;
mod failure;
pub mod headers;
pub mod rejection;

pub mod future;
mod layer;
mod reload;
mod service;
mod settings;
mod settle;

pub mod outbound;

#[cfg(feature = "serde")]
pub mod config;
#[cfg(feature = "conformance")]
pub mod conformance;

pub use api_key::ApiKey;
pub use charge::{Amount, Charge, LimitName};
pub use client_ip::{ClientIp, ForwardedBy};
pub use cost::{Cost, CostTable};
pub use decision::{Decision, Outcome, Reply, Source};
pub use error::ConfigError;
pub use failure::OnStoreFailure;
pub use headers::HeaderStyle;
pub use key::{BucketKey, Global, Identity, KeyExtractor, NoKey, Or};
pub use layer::TokenBucketLayer;
pub use limit::Limit;
pub use quota::{Quota, QuotaError};
pub use reload::LimitsHandle;
pub use service::TokenBucket;
pub use settle::Settle;
pub use store::Store;
pub use store::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use store::redis::{Health, RedisAcquire, RedisError, RedisErrorKind, RedisStore};

#[cfg(feature = "redis")]
pub use redis;

#[cfg(all(doctest, feature = "axum", feature = "redis"))]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../docs/migrating.md")]
struct Migrating;
