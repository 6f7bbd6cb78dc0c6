//! All integration tests, in one binary.
#![allow(clippy::unwrap_used)] // A test that fails may panic.

#[cfg(feature = "rustls")]
#[path = "../support/tls.rs"]
mod certificates;
#[path = "../support/log.rs"]
mod log;
#[path = "../support/proxy.rs"]
mod proxy;
#[path = "../support/server.rs"]
mod server;
#[path = "../support/topology.rs"]
mod topology;

mod arithmetic;
#[cfg(target_os = "linux")]
mod clock;
mod dropped;
mod faults;
mod fields;
mod histories;
mod http_contract;
mod identity;
mod losses;
mod memory;
mod outbound;
mod pace;
mod plumbing;
mod redis_script;
mod redis_store;
mod reload;
mod servers;
mod settle;
#[cfg(feature = "rustls")]
mod tls;
mod topologies;
mod verbs;
