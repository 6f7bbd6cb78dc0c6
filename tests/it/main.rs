//! All integration tests, in one binary.
#![allow(clippy::unwrap_used)] // A test that fails may panic.

