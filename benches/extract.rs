//! What it takes to find the key of a request, in nanoseconds. Run with
//!
//! ```text
//! cargo bench --bench extract
//! ```
#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

use std::collections::HashSet;
use std::hint::black_box;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use http::request::Parts;
use http::{HeaderValue, Request};
use tower_token_bucket::{ApiKey, ClientIp, KeyExtractor};

/// How long each case runs for each sample.
const SAMPLE: Duration = Duration::from_millis(50);
const SAMPLES: usize = 9;

fn parts(peer: &str, headers: &[(&'static str, &'static str)]) -> Parts {
    let mut parts = Request::new(()).into_parts().0;
    parts.extensions.insert(peer.parse::<SocketAddr>().expect("an address and a port"));
    for (name, line) in headers {
        parts.headers.append(*name, HeaderValue::from_static(line));
    }
    parts
}

/// The median of the samples, in nanoseconds for each call. The requests come in turn.
fn measure(key: &dyn KeyExtractor, parts: &[Parts]) -> f64 {
    let mut samples: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let (began, mut calls) = (Instant::now(), 0u32);
            while began.elapsed() < SAMPLE {
                for parts in parts.iter().cycle().take(1000) {
                    let _ = black_box(black_box(key).extract(black_box(parts)));
                }
                calls += 1000;
            }
            began.elapsed().as_nanos() as f64 / f64::from(calls)
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    samples[SAMPLES / 2]
}

fn main() {
    const KEY: &str = "sk_live_0123456789abcdef0123456789abcdef";
    let known: HashSet<&str> = HashSet::from([KEY, "another"]);
    let verified = ApiKey::verified("x-api-key", move |key| known.contains(key)).or(ClientIp::peer());
    let by_list = ClientIp::forwarded("x-forwarded-for").trusted_proxies(["10.0.0.0/8", "172.16.0.0/12"]);
    let by_forwarded = ClientIp::forwarded("forwarded").trusted_proxies(["10.0.0.0/8", "172.16.0.0/12"]);

    let list = [("x-forwarded-for", "198.51.100.7, 203.0.113.9, 10.0.0.2")];
    let forwarded = [("forwarded", "for=198.51.100.7, for=\"203.0.113.9:80\";proto=https, for=10.0.0.2")];
    let key = [("x-api-key", KEY)];
    let by_key = ApiKey::unverified("x-api-key");
    // As long as the one key; each comes again after all the others.
    let keys = |n: u32| -> Vec<Parts> {
        let line =
            |i: u32| HeaderValue::try_from(format!("sk_live_{:032x}", i.wrapping_mul(0x9e37_79b9))).expect("a line");
        let with = |i| {
            let mut parts = parts("203.0.113.9:4711", &[]);
            parts.headers.insert("x-api-key", line(i));
            parts
        };
        (0..n).map(with).collect()
    };
    for (name, extractor, parts) in [
        ("peer, IPv4", &ClientIp::peer() as &dyn KeyExtractor, parts("203.0.113.9:4711", &[])),
        ("peer, IPv6", &ClientIp::peer(), parts("[2001:db8::1]:4711", &[])),
        ("x-forwarded-for, 3 elements", &by_list, parts("10.0.0.1:80", &list)),
        ("x-forwarded-for, not trusted", &by_list, parts("203.0.113.9:80", &list)),
        ("forwarded, 3 elements", &by_forwarded, parts("10.0.0.1:80", &forwarded)),
        ("verified key", &verified, parts("203.0.113.9:4711", &key)),
        ("no key, then the peer", &verified, parts("203.0.113.9:4711", &[])),
    ] {
        println!("{name:<32} {:>8.1} ns", measure(extractor, &[parts]));
    }
    for n in [1, 20, 100, 1000] {
        println!("{:<32} {:>8.1} ns", format!("{n} keys in turn"), measure(&by_key, &keys(n)));
    }
}
