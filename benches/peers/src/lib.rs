//! tower-token-bucket beside other limiters, in the same run.
//!
//! ```text
//! cd benches/peers
//! cargo run --release                     # everything, briefly: a table with ratios, and the pictures in docs/
//! cargo run --release --bin request       # tower services around an empty handler
//! cargo run --release --bin server        # whole axum servers over loopback, in memory and on Redis
//! cargo run --release --bin shards        # one Redis and a cluster of three; memory per key
//! cargo run --release --bin load -- http://127.0.0.1:3000/search
//! ```
//!
//! Peers run with their defaults and as their documentation says, with the same quota, the same keys and the same handler,
//! in turn within each round; a ratio is taken in each round, and the median is shown.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

pub mod compare;
pub mod load;
mod peer;
pub mod request;
pub mod script;
pub mod shards;
mod table;
pub mod whole;

#[path = "../../support/callgrind.rs"]
mod callgrind;
#[path = "../../support/calls.rs"]
#[allow(clippy::duplicate_mod, reason = "it brings the servers that the clusters need too")]
mod calls;
#[path = "../../support/chart.rs"]
mod chart;
#[path = "../../../tests/support/server.rs"]
mod server;
#[path = "../../../tests/support/topology.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod topology;

/// Whether this process is one that a bench has started, and has done what it was started for. Each program asks first.
#[must_use]
pub fn child() -> bool {
    request::child() || whole::child()
}

/// A number from the environment, such as `ROUNDS`.
fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}
