//! What a store has to do, as tests that any implementation can run.
//!
//! [`check`] asks a store the questions that the contract of [`Store`](crate::Store) is about, over its own clock.
//! [`Model`] is the exact bucket with the time as an argument, for stores whose clock a test can set.
//!
//! # Example
//!
//! ```
//! use tower_token_bucket::{MemoryStore, conformance};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().build()?.block_on(async {
//! conformance::check(&MemoryStore::new()).await;
//! # });
//! # Ok::<(), std::io::Error>(())
//! ```

mod model;
mod pace;
mod suite;

pub use model::Model;
pub use pace::{RateModel, RateReply};
pub use suite::check;
