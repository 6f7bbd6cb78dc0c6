//! All integration tests, in one binary.
#![allow(clippy::unwrap_used)] // A test that fails may panic.

#[cfg(feature = "rustls")]
#[path = "../support/tls.rs"]
mod certificates;
/// What a connection that changes single commands leaves to its `inner` one: the rest of `ConnectionLike`.
macro_rules! the_rest_by_inner {
    () => {
        fn req_packed_commands<'a>(
            &'a mut self,
            pipeline: &'a redis::Pipeline,
            offset: usize,
            count: usize,
        ) -> redis::RedisFuture<'a, Vec<redis::Value>> {
            self.inner.req_packed_commands(pipeline, offset, count)
        }

        fn get_db(&self) -> i64 {
            0
        }
    };
}

/// The rest of `ConnectionLike` for a connection that is only sent single commands.
macro_rules! one_command_at_a_time {
    () => {
        fn req_packed_commands<'a>(
            &'a mut self,
            _: &'a redis::Pipeline,
            _: usize,
            _: usize,
        ) -> redis::RedisFuture<'a, Vec<redis::Value>> {
            unreachable!("one command at a time")
        }

        fn get_db(&self) -> i64 {
            0
        }
    };
}

/// Each test on memory buckets with a paused clock, and on a server of its own, by the `in_redis` of its file.
macro_rules! on_both_stores {
    ($($test:ident),+ $(,)?) => {
        mod in_memory {
            $(#[tokio::test(start_paused = true)]
            async fn $test() {
                super::$test(super::MemoryStore::new()).await;
            })+
        }
        mod in_redis {
            $(#[tokio::test]
            async fn $test() {
                let server = super::Server::start();
                super::$test(super::in_redis(&server.url()).await).await;
            })+
        }
    };
}

#[path = "../support/log.rs"]
mod log;
#[path = "../support/proxy.rs"]
mod proxy;
#[cfg(feature = "metrics")]
#[path = "../support/recorder.rs"]
mod recorder;
#[path = "../support/server.rs"]
mod server;
#[path = "../support/topology.rs"]
mod topology;

mod allocations;
mod arithmetic;
mod breakage;
#[cfg(target_os = "linux")]
mod clock;
mod code_map;
mod denials;
mod dropped;
mod examples;
mod faults;
mod fields;
mod gather;
mod histories;
mod http_contract;
mod identity;
mod losses;
mod memory;
#[cfg(feature = "metrics")]
mod metrics;
mod outbound;
mod outbound_faults;
mod pace;
mod peer;
mod plumbing;
mod redis_script;
mod redis_store;
mod reload;
mod senders;
mod servers;
mod settle;
#[cfg(feature = "rustls")]
mod tls;
mod topologies;
mod verbs;
