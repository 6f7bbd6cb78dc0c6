//! `TokenBucketLayer`: token buckets for tower services, in memory or shared in Redis.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod error;
mod log;
mod quota;
mod text;

mod charge;
mod client_ip;
mod cost;
mod key;
mod limit;

mod bucket;
mod decision;
mod store;

mod failure;
pub mod headers;
pub mod rejection;

pub mod future;
mod layer;
mod service;

#[cfg(feature = "serde")]
pub mod config;
#[cfg(feature = "conformance")]
pub mod conformance;

pub use charge::{Amount, Charge, LimitName};
pub use client_ip::ClientIp;
pub use cost::{Cost, CostTable};
pub use decision::{Decision, Outcome, Reply, Source};
pub use error::ConfigError;
pub use failure::OnStoreFailure;
pub use headers::HeaderStyle;
pub use key::{ApiKey, BucketKey, Global, KeyExtractor, NoKey, Or};
pub use layer::TokenBucketLayer;
pub use limit::Limit;
pub use quota::{Quota, QuotaError};
pub use service::TokenBucket;
pub use store::Store;
pub use store::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use store::redis::{Connection, RedisAcquire, RedisError, RedisStore};

#[cfg(feature = "redis")]
pub use redis;
