//! A clock for one process that a test sets while it runs: built by tests/it/clock.rs with rustc alone, put before libc
//! with LD_PRELOAD, and part of no crate.
//!
//! The file that `CLOCK_SHIM` names holds the offset, in microseconds, as eight bytes of this machine's order. It is
//! added to the real-time clock in all the ways there are to read it; the monotonic clocks are left alone, as they are
//! when an operator or NTP steps the clock.
//!
//! libc's own initialisation and allocators ask for the time too, so nothing here allocates, locks or panics.

use std::ffi::{c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

const CLOCK_REALTIME: c_int = 0;
const CLOCK_REALTIME_COARSE: c_int = 5;
#[cfg(target_arch = "x86_64")]
const SYS_CLOCK_GETTIME: c_long = 228;
#[cfg(target_arch = "aarch64")]
const SYS_CLOCK_GETTIME: c_long = 113;
const PROT_READ: c_int = 1;
const MAP_SHARED: c_int = 1;

#[repr(C)]
pub struct Timespec {
    seconds: i64,
    nanos: i64,
}

#[repr(C)]
pub struct Timeval {
    seconds: i64,
    micros: i64,
}

unsafe extern "C" {
    fn syscall(number: c_long, ...) -> c_long;
    fn getenv(name: *const c_char) -> *const c_char;
    fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    fn close(file: c_int) -> c_int;
    fn mmap(at: *mut c_void, length: usize, prot: c_int, flags: c_int, file: c_int, offset: i64) -> *mut c_void;
}

/// The file in memory; null until it has been mapped.
static OFFSET: AtomicPtr<AtomicI64> = AtomicPtr::new(ptr::null_mut());

fn offset_us() -> i64 {
    let mut offset = OFFSET.load(Ordering::Acquire);
    if offset.is_null() {
        // SAFETY: the name ends in a zero byte; what comes back is null, or text that nobody changes.
        let path = unsafe { getenv(c"CLOCK_SHIM".as_ptr()) };
        if path.is_null() {
            return 0;
        }
        // SAFETY: `path` is the text from above; the file descriptor is checked, and closed once.
        offset = unsafe {
            let file = open(path, 0);
            if file < 0 {
                return 0;
            }
            let map = mmap(ptr::null_mut(), size_of::<AtomicI64>(), PROT_READ, MAP_SHARED, file, 0);
            close(file);
            if map as isize == -1 {
                return 0;
            }
            map.cast()
        };
        // Mapped twice by two threads that are quick: both maps are of one file, and stay.
        OFFSET.store(offset, Ordering::Release);
    }
    // SAFETY: a page that stays mapped, holds eight bytes and is aligned; another process writes them in one go.
    unsafe { (*offset).load(Ordering::Relaxed) }
}

/// The clock as the kernel has it, with the offset if it is the real-time one.
fn now(clock: c_int) -> Result<Timespec, c_int> {
    let mut time = Timespec { seconds: 0, nanos: 0 };
    // SAFETY: the kernel writes one timespec to where one is.
    let failed = unsafe { syscall(SYS_CLOCK_GETTIME, c_long::from(clock), &raw mut time) };
    if failed != 0 {
        return Err(-1);
    }
    if clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE {
        // Read once: it may change at any moment.
        let offset_us = offset_us();
        let nanos = time.nanos + offset_us % 1_000_000 * 1000;
        time.seconds += offset_us / 1_000_000 + nanos.div_euclid(1_000_000_000);
        time.nanos = nanos.rem_euclid(1_000_000_000);
    }
    Ok(time)
}

/// # Safety
///
/// As for libc's: `time` is valid for one write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: c_int, time: *mut Timespec) -> c_int {
    match now(clock) {
        Ok(now) => {
            // SAFETY: the caller's promise.
            unsafe { time.write(now) };
            0
        }
        Err(failed) => failed,
    }
}

/// # Safety
///
/// As for libc's: `time` is null, or valid for one write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut Timeval, _zone: *mut c_void) -> c_int {
    match now(CLOCK_REALTIME) {
        Ok(now) => {
            if !time.is_null() {
                // SAFETY: the caller's promise.
                unsafe { time.write(Timeval { seconds: now.seconds, micros: now.nanos / 1000 }) };
            }
            0
        }
        Err(failed) => failed,
    }
}

/// # Safety
///
/// As for libc's: `to` is null, or valid for one write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(to: *mut i64) -> i64 {
    let seconds = now(CLOCK_REALTIME).map_or(-1, |now| now.seconds);
    if !to.is_null() {
        // SAFETY: the caller's promise.
        unsafe { to.write(seconds) };
    }
    seconds
}
