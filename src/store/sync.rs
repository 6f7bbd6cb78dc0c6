//! The locks and counters of buckets in memory: those of `std`, or for `tests/races` those of a scheduler that tries the rare
//! orders of threads.

#[cfg(all(test, shuttle))]
pub(super) use shuttle::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(all(test, shuttle)))]
pub(super) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};
