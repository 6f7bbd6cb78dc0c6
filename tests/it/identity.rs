//! Who is asking, and what it costs: what an outsider can write chooses no bucket, renews none, and dodges no cost.

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::future::ready;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::{self, get, post};
use axum::{Extension, Router};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use proptest::prelude::*;
use serde_json::Value;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::normalize_path::NormalizePathLayer;
use tower_token_bucket::config::Config;
use tower_token_bucket::rejection::Rejection;
use tower_token_bucket::{
    Amount, ApiKey, BucketKey, Charge, ClientIp, ConfigError, CostTable, Decision, Global, Identity, KeyExtractor,
    Limit, LimitName, MemoryStore, NoKey, OnStoreFailure, Quota, RedisStore, Store, TokenBucketLayer,
};

use crate::log::Log;
use crate::server::Server;

// Client addresses.

/// The address that a trusted proxy connects from.
const PROXY: &str = "198.51.100.1";
/// What realclientip's strategy takes for private; `trusted_proxies` is how that is said here.
const PRIVATE: &str = "10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 \
    192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 \
    ::1/128 2001:db8::/32 fc00::/7 fe80::/10 ff00::/8 100::/64";
/// <https://www.cloudflare.com/ips>
const CLOUDFLARE: &str = "173.245.48.0/20 103.21.244.0/22 103.22.200.0/22 103.31.4.0/22 141.101.64.0/18 108.162.192.0/18 \
    190.93.240.0/20 188.114.96.0/20 197.234.240.0/22 198.41.128.0/17 162.158.0.0/15 104.16.0.0/13 \
    104.24.0.0/14 172.64.0.0/13 131.0.72.0/22 2400:cb00::/32 2606:4700::/32 2803:f800::/32 \
    2405:b500::/32 2405:8100::/32 2a06:98c0::/29 2c0f:f248::/32";

fn name(text: &str) -> HeaderName {
    HeaderName::from_bytes(text.as_bytes()).unwrap()
}

fn value(bytes: &[u8]) -> HeaderValue {
    HeaderValue::from_bytes(bytes).unwrap()
}

/// The head of a request with these header lines, from `peer` where there is one.
fn parts<'a>(peer: Option<&str>, lines: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Parts {
    let mut parts = Request::new(()).into_parts().0;
    for (header, line) in lines {
        parts.headers.append(name(header), value(line));
    }
    if let Some(peer) = peer {
        parts.extensions.insert(SocketAddr::new(peer.parse().unwrap(), 4711));
    }
    parts
}

/// The address that a request is charged to; all bits of an IPv6 address are in it, and no prefix.
fn address(by: &ClientIp, parts: &Parts) -> String {
    let key = by.clone().ipv6_prefix(128).extract(parts).unwrap().to_string();
    let address = key.strip_prefix("ip:").unwrap();
    address.strip_suffix("/128").unwrap_or(address).to_owned()
}

#[track_caller]
fn check_address(by: &ClientIp, peer: &str, header: &str, lines: &[&str], expected: &str) {
    let parts = parts(Some(peer), lines.iter().map(|line| (header, line.as_bytes())));
    assert_eq!(address(by, &parts), expected, "{header}: {lines:?}");
}

fn vectors(file: &str) -> Value {
    let path = format!("{}/tests/vectors/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// An address of the vectors as it is shown here: the zone is dropped, since it has a meaning on one machine only.
fn shown(address: &str) -> String {
    let (address, _) = address.split_once('%').unwrap_or((address, ""));
    address.parse::<IpAddr>().unwrap().to_canonical().to_string()
}

/// One row of realclientip's strategies.
struct Row<'a> {
    name: &'a str,
    lines: Vec<(&'a str, &'a [u8])>,
    peer: Option<&'a str>,
    /// `None`: the constructor fails there.
    want: Option<String>,
    row: &'a Value,
}

impl Row<'_> {
    fn header(&self) -> &str {
        self.row["header_name"].as_str().unwrap()
    }

    /// The request, from the row's peer or else from a trusted one.
    fn parts(&self) -> Parts {
        parts(self.peer.or(Some(PROXY)), self.lines.iter().copied())
    }

    #[track_caller]
    fn check(&self, by: &ClientIp) {
        assert_eq!(Some(address(by, &self.parts())), self.want, "{}", self.name);
    }
}

/// The rows of a strategy; an address that cannot be derived there is the peer's here.
fn rows<'a>(all: &'a Value, strategy: &str) -> Vec<Row<'a>> {
    let row = |row: &'a Value| {
        let pair = |pair: &'a Value| (pair[0].as_str().unwrap(), pair[1].as_str().unwrap().as_bytes());
        let peer = row["remote_addr"].as_str().filter(|peer| *peer != "@" && !peer.is_empty()).map(|peer| {
            let host = peer.strip_prefix('[').map_or(peer, |host| host.split_once(']').unwrap().0);
            // Of IPv4 addresses only, the port.
            let host = host.split_once(':').filter(|(_, port)| !port.contains(':')).map_or(host, |(host, _)| host);
            // A socket's address has a number for its zone, and not in the address.
            host.split_once('%').map_or(host, |(host, _)| host)
        });
        let want = row["want"].as_str().map(|want| shown(if want.is_empty() { peer.unwrap_or(PROXY) } else { want }));
        Row {
            name: row["name"].as_str().unwrap(),
            lines: row["headers"].as_array().map_or(Vec::new(), |lines| lines.iter().map(pair).collect()),
            peer,
            want,
            row,
        }
    };
    all[strategy].as_array().unwrap().iter().map(row).collect()
}

#[test]
fn all_vectors_of_realclientip_hold() {
    let all = vectors("realclientip.json");
    let mut seen = 0;

    for row in rows(&all, "TestRightmostTrustedRangeStrategy") {
        seen += 1;
        let mut networks: Vec<&str> = match row.row["trusted_ranges"].as_str() {
            Some(_) => CLOUDFLARE.split(' ').collect(),
            None => row.row["trusted_ranges"].as_array().unwrap().iter().map(|net| net.as_str().unwrap()).collect(),
        };
        if row.peer.is_none() {
            // No peer there means that its check is skipped; here it is always checked, so it has to be trusted.
            networks.push(PROXY);
        }
        let by = ClientIp::try_forwarded(row.header()).map(|by| by.trusted_proxies(networks));
        match row.name {
            "Error: empty header nanme" => {
                assert_eq!(by.unwrap_err(), ConfigError::HeaderName { name: String::new() });
            }
            // Any other name is here a header of one address, as X-Real-IP is.
            "Error: bad header nanme" => assert!(by.is_ok()),
            "Peer Unix socket: walks header as normal" => {
                assert_eq!(row.row["remote_addr"], "@");
                let by = by.unwrap().peer_by(|_| Some(PROXY.parse().unwrap()));
                // The closure says who is behind the socket: here a trusted proxy.
                let by_socket = ClientIp::forwarded(row.header())
                    .trusted_proxies(["10.0.0.0/8", PROXY])
                    .peer_by(|parts| parts.extensions.get::<SocketAddr>().is_none().then(|| PROXY.parse().unwrap()));
                assert_eq!(Some(address(&by_socket, &parts(None, row.lines.iter().copied()))), row.want);
                row.check(&by);
            }
            _ => row.check(&by.unwrap()),
        }
    }

    for row in rows(&all, "TestRightmostTrustedCountStrategy") {
        seen += 1;
        let hops = row.row["trusted_count"].as_u64().unwrap() as usize;
        let by = ClientIp::try_forwarded(row.header()).and_then(|by| by.try_hops(hops));
        match row.name {
            "Error: empty header name" => assert!(matches!(by, Err(ConfigError::HeaderName { .. }))),
            "Error: zero trustedCount" => assert!(matches!(by, Err(ConfigError::Hops { hops: 0, .. }))),
            // One hop is what a header of one address can tell of.
            "Error: invalid header" => assert!(by.is_ok()),
            _ => row.check(&by.unwrap()),
        }
    }

    for row in rows(&all, "TestSingleIPHeaderStrategy") {
        seen += 1;
        match row.name {
            "Error: empty header name" => assert!(ClientIp::try_forwarded("").is_err()),
            // A list is not one address: the name alone makes it a list here, and no strategy has to refuse it.
            "Error: X-Forwarded-For header" => {}
            _ => {
                row.check(&ClientIp::forwarded(row.header()).trusted_proxies([PROXY]));
                row.check(&ClientIp::forwarded(row.header()).hops(1));
            }
        }
    }

    for row in rows(&all, "TestRemoteAddrStrategy") {
        seen += 1;
        match row.name {
            "Fail: empty RemoteAddr" | "Fail: Unix domain socket" => {
                assert_eq!(ClientIp::peer().extract(&parts(None, [])), Err(NoKey::Peer));
            }
            // The kernel has no such peer, and whoever makes one up by a closure gets its bucket.
            "Fail: zero RemoteAddr IP" | "Fail: unspecified RemoteAddr IP" => row.check(&ClientIp::peer()),
            _ => row.check(&ClientIp::peer()),
        }
    }

    // A strategy that is not offered, since it trusts whole ranges that were not named.
    for mut row in rows(&all, "TestRightmostNonPrivateStrategy") {
        seen += 1;
        match row.name {
            // One address, and no list, for every name but two.
            "Error: invalid header" => continue,
            // It skips what cannot be read; here that gives the peer.
            "XFF: rightmost not desirable" | "Forwarded: rightmost not desirable" => row.want = Some(PROXY.to_owned()),
            _ => {}
        }
        row.check(&ClientIp::forwarded(row.header()).trusted_proxies(PRIVATE.split(' ')));
    }

    for row in all["parseForwardedListItem"].as_array().unwrap() {
        seen += 1;
        let expected = row["want"].as_str().map_or(PROXY.to_owned(), shown);
        check_address(
            &ClientIp::forwarded("forwarded").hops(1),
            PROXY,
            "forwarded",
            &[row["fwd"].as_str().unwrap()],
            &expected,
        );
    }

    for row in all["forwardedHeaderRFCDeviations"].as_array().unwrap() {
        seen += 1;
        let lines: Vec<_> = row["headers"].as_array().unwrap().iter().map(|line| line[1].as_str().unwrap()).collect();
        let lines: Vec<_> = lines.iter().map(|line| ("forwarded", line.as_bytes())).collect();
        let results = row["realclientip_result"].as_array().unwrap();
        for (hops, result) in results.iter().rev().enumerate() {
            let by = ClientIp::forwarded("forwarded").hops(hops + 1);
            let expected = result.as_str().map_or(PROXY.to_owned(), shown);
            assert_eq!(address(&by, &parts(Some(PROXY), lines.iter().copied())), expected, "{row}");
        }
        let past = ClientIp::forwarded("forwarded").hops(results.len() + 1);
        assert_eq!(address(&past, &parts(Some(PROXY), lines.iter().copied())), PROXY, "{row}");
    }

    assert_eq!(seen, 93);
}

#[test]
fn all_vectors_of_express_rate_limit_hold() {
    let all = vectors("ip_key_express_rate_limit.json");
    let key = |ip: &str, bits: Option<u8>| {
        let by = ClientIp::peer();
        let by = bits.map_or(by.clone(), |bits| by.ipv6_prefix(bits));
        let key = by.extract(&parts(Some(ip), [])).unwrap().to_string();
        key.strip_prefix("ip:").unwrap().to_owned()
    };
    let rows = all["rows"].as_array().unwrap();
    for row in rows {
        let (ip, bits) = (row["ip"].as_str().unwrap(), row["prefix"].as_u64());
        if let Some(bits @ ..32) = bits {
            // Shorter prefixes than 32 are refused: such networks belong to many.
            assert!(ClientIp::peer().try_ipv6_prefix(bits as u8).is_err());
        }
        let bits = bits.filter(|bits| *bits >= 32).map(|bits| bits as u8);
        assert_eq!(key(ip, bits), row["key"].as_str().unwrap(), "{row}");
    }
    let not_equal = all["not_equal"].as_array().unwrap();
    for pair in not_equal {
        assert_ne!(key(pair[0].as_str().unwrap(), Some(56)), key(pair[1].as_str().unwrap(), Some(56)));
    }
    assert_eq!(rows.len() + not_equal.len(), 18);
}

/// Random bytes that a seed determines; what a header can hold, and much of what means something in one.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// A header value of that many bytes, or somewhat fewer.
    fn header(&mut self, length: usize) -> Vec<u8> {
        const PIECES: &str = concat!(
            r#",|,|"|"|\|\"|\\|;|=| |:|[|]|%|for=|For="|by=|host=|proto=https|1.1.1.1|10.0.0.2|2001:db8::1|127.0.0.1|, |"#,
            r#"[2001:db8::1]:80|::ffff:10.0.0.2|unknown|_hidden|for=10.0.0.2|for=6.6.6.6|", for=|é|😀"#,
        );
        let pieces: Vec<&str> = PIECES.split('|').collect();
        let mut bytes = Vec::with_capacity(length);
        // Bytes of all kinds, a few kinds, or pieces that mean something.
        let kind = self.below(3);
        while bytes.len() < length {
            match kind {
                0 => {
                    let byte = self.next() as u8;
                    bytes.push(if byte == b'\t' || (byte >= b' ' && byte != 0x7f) { byte } else { b',' });
                }
                1 => bytes.push(self.pick(b"\"\\,;= \tf")),
                _ => bytes.extend_from_slice(self.pick(&pieces).as_bytes()),
            }
        }
        bytes.truncate(length);
        bytes
    }
}

/// What an outsider sends: 1 to 20 lines of up to 8 KiB together.
fn outsider(seed: u64, length: usize, lines: usize) -> Vec<Vec<u8>> {
    let mut noise = Noise(seed);
    (0..lines).map(|_| noise.header(length / lines)).collect()
}

/// How a proxy adds its element to what it was sent: to the last line, as most do, or in a line of its own.
fn append(lines: &mut Vec<Vec<u8>>, own_line: bool, element: &str) {
    match lines.last_mut().filter(|_| !own_line) {
        Some(last) => {
            last.extend_from_slice(b", ");
            last.extend_from_slice(element.as_bytes());
        }
        None => lines.push(element.as_bytes().to_vec()),
    }
}

/// The client of the properties, and what the first proxy says of it.
const CLIENT: &str = "203.0.113.9";
const CLIENT_FORWARDED: [&str; 8] = [
    "for=203.0.113.9",
    "For=\"203.0.113.9:4711\";proto=https",
    "proto=http;host=example.com;for=203.0.113.9",
    "by=\"_x\";for=\"203.0.113.9\";host=\"a, for=6.6.6.6\"",
    "host=\"\\\", for=6.6.6.6, \\\"\";for=203.0.113.9",
    "host=\"x\\\\\";for=\"[::ffff:203.0.113.9]\"",
    "for=203.0.113.9;host=\"for=6.6.6.6;\\\\\\\"\"",
    "FOR = ,for=\"[::ffff:cb00:7109]:_p\" ;proto=\"\"",
];
const CLIENT_LIST: [&str; 5] =
    ["203.0.113.9", "203.0.113.9:4711", "::ffff:203.0.113.9", "[::ffff:cb00:7109]:80", "\t203.0.113.9  "];

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Two proxies: the first saw the client, the second saw the first.
    #[test]
    fn nothing_left_of_a_trusted_tail_changes_the_address(
        seed: u64,
        length in prop_oneof![3 => 0..200usize, 1 => 0..=8192usize],
        count in prop_oneof![2 => 1..4usize, 1 => 1..=20usize],
        own_lines: [bool; 2],
        form in 0..40usize,
    ) {
        let sent = outsider(seed, length, count);
        for (header, client, proxy) in [
            ("x-forwarded-for", CLIENT_LIST[form % CLIENT_LIST.len()], "10.0.0.2"),
            ("forwarded", CLIENT_FORWARDED[form % CLIENT_FORWARDED.len()], "for=\"10.0.0.2:80\";proto=http"),
        ] {
            let mut lines = sent.clone();
            append(&mut lines, own_lines[0], client);
            append(&mut lines, own_lines[1], proxy);
            let parts = parts(Some("10.0.0.1"), lines.iter().map(|line| (header, line.as_slice())));
            for by in [
                ClientIp::forwarded(header).trusted_proxies(["10.0.0.0/8"]),
                ClientIp::forwarded(header).hops(2),
            ] {
                prop_assert_eq!(address(&by, &parts), CLIENT, "{:?}", by);
            }
            // From outside the trusted networks all of it is ignored.
            let by = ClientIp::forwarded(header).trusted_proxies(["10.0.0.0/30"]).peer_by(|_| "9.9.9.9".parse().ok());
            prop_assert_eq!(address(&by, &parts), "9.9.9.9");
            prop_assert_eq!(address(&ClientIp::peer(), &parts), "10.0.0.1");
        }
        // A proxy replaces a header of one address; one that adds a second line makes it say nothing.
        let mut lines = vec![CLIENT.as_bytes().to_vec()];
        for (header, by_proxies) in [("x-real-ip", true), ("cf-connecting-ip", false)] {
            let by = ClientIp::forwarded(header);
            let by = if by_proxies { by.trusted_proxies(["10.0.0.0/8"]) } else { by.hops(1) };
            let one = parts(Some("10.0.0.1"), lines.iter().map(|line| (header, line.as_slice())));
            prop_assert_eq!(address(&by, &one), CLIENT);
            lines = sent.iter().cloned().chain(lines).collect();
            let many = parts(Some("10.0.0.1"), lines.iter().map(|line| (header, line.as_slice())));
            prop_assert_eq!(address(&by, &many), "10.0.0.1");
            lines = vec![CLIENT.as_bytes().to_vec()];
        }
    }

    /// Everything is trusted, so that everything is read.
    #[test]
    fn whatever_a_header_holds_nothing_panics(
        seed: u64,
        length in prop_oneof![3 => 0..300usize, 1 => 0..=8192usize],
        count in 1..=20usize,
        hops in 1..30usize,
    ) {
        let lines = outsider(seed, length, count);
        let headers = ["x-forwarded-for", "forwarded", "x-real-ip", "authorization", "x-api-key"];
        for header in headers {
            let parts = parts(Some("10.0.0.1"), lines.iter().map(|line| (header, line.as_slice())));
            let by = ClientIp::forwarded(header);
            let _ = by.clone().trusted_proxies(["0.0.0.0/0", "::/0"]).extract(&parts).unwrap();
            let hops = by.try_hops(hops).map(|by| by.extract(&parts).unwrap());
            prop_assert!(hops.is_ok() || !matches!(header, "x-forwarded-for" | "forwarded"));
            let _ = ApiKey::unverified(header).extract(&parts);
        }
    }

    /// What can be a header value at all, in one line, over the bytes themselves.
    #[test]
    fn arbitrary_bytes_are_an_address_or_none(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let Ok(line) = HeaderValue::from_bytes(&bytes) else { return Ok(()) };
        for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
            let parts = parts(Some("10.0.0.1"), [(header, line.as_bytes())]);
            let key = ClientIp::forwarded(header).hops(1).extract(&parts).unwrap().to_string();
            prop_assert!(key.starts_with("ip:"), "{}", key);
        }
    }
}

/// A client that talks to a proxy which writes what the client says of itself (Host, a protocol, a port) into its own
/// element, quoted and escaped as RFC 9110 says.
#[test]
fn what_a_client_says_of_itself_within_a_trusted_element_changes_nothing() {
    let mut noise = Noise(7);
    let mut hosts: Vec<String> = [
        "evil, for=6.6.6.6",
        "evil\", for=6.6.6.6, x=\"",
        "\"",
        "\\",
        "\\\"",
        "\\\\\", for=6.6.6.6;a=\"",
        "a;for=6.6.6.6",
        "a\";for=6.6.6.6;b=\"",
        ",,,,",
        "for=\"6.6.6.6\"",
        "",
    ]
    .map(str::to_owned)
    .to_vec();
    for _ in 0..2000 {
        let length = noise.below(24);
        hosts
            .push((0..length).map(|_| noise.pick(&['"', '\\', ',', ';', '=', ' ', 'f', 'o', 'r', '6', '.'])).collect());
    }
    for host in &hosts {
        let quoted = host.replace('\\', "\\\\").replace('"', "\\\"");
        for element in [
            format!("for=203.0.113.9;host=\"{quoted}\""),
            format!("host=\"{quoted}\";for=203.0.113.9"),
            format!("by=10.0.0.1;proto=\"{quoted}\";for=\"203.0.113.9:80\";host=\"{quoted}\""),
        ] {
            for by in [
                ClientIp::forwarded("forwarded").hops(1),
                ClientIp::forwarded("forwarded").trusted_proxies(["10.0.0.0/8"]),
            ] {
                for before in [None, Some("for=6.6.6.6"), Some("for=6.6.6.6;x=\""), Some("\\"), Some("\"\\")] {
                    let line = before.map_or(element.clone(), |before| format!("{before}, {element}"));
                    check_address(&by, "10.0.0.1", "forwarded", &[&line], CLIENT);
                    let lines: Vec<&str> = before.into_iter().chain([element.as_str()]).collect();
                    check_address(&by, "10.0.0.1", "forwarded", &lines, CLIENT);
                }
            }
        }
    }
}

#[test]
fn hand_made_attacks_on_the_walk_give_the_client_or_the_peer() {
    let list = ClientIp::forwarded("x-forwarded-for").trusted_proxies(["10.0.0.0/8", "2001:db8:aaaa::/48"]);
    let forwarded = ClientIp::forwarded("forwarded").trusted_proxies(["10.0.0.0/8", "2001:db8:aaaa::/48"]);
    for (by, header, lines, expected) in [
        // The client is trusted's first visitor, in whatever clothes the proxy shows it.
        (&list, "x-forwarded-for", &["6.6.6.6, 203.0.113.9"][..], CLIENT),
        (&list, "x-forwarded-for", &["203.0.113.9, 10.0.0.3:1234, ::ffff:10.0.0.2, [2001:db8:aaaa::1]:443"], CLIENT),
        (&list, "x-forwarded-for", &["203.0.113.9,[::ffff:a00:2]"], CLIENT),
        // Trusted addresses that the client has put there are left of its own.
        (&list, "x-forwarded-for", &["6.6.6.6, 10.0.0.9", "10.0.0.8", "203.0.113.9", "10.0.0.2"], CLIENT),
        // Quotes and semicolons mean nothing in this list.
        (&list, "x-forwarded-for", &["6.6.6.6, \"x, 203.0.113.9"], CLIENT),
        (&list, "x-forwarded-for", &["6.6.6.6, \"203.0.113.9\""], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6; 203.0.113.9"], "10.0.0.1"),
        // What cannot be read is where it ends: not what stands left of it.
        (&list, "x-forwarded-for", &["6.6.6.6, unknown"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, unknown, 10.0.0.2"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, "], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6", ""], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6,,10.0.0.2"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, 010.0.0.2"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, 0x0a.0.0.2"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, 167772162"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, 10.2"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, 0.0.0.0"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, ::ffff:0:0"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, unix:"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, localhost"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, 203.0.113.9\u{a0}"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["6.6.6.6, ２０３.0.113.9"], "10.0.0.1"),
        (&list, "x-forwarded-for", &["10.0.0.3, 10.0.0.2"], "10.0.0.1"),
        (&list, "x-forwarded-for", &[""], "10.0.0.1"),
        (&list, "x-forwarded-for", &[], "10.0.0.1"),
        // Another header that says so.
        (&list, "forwarded", &["for=6.6.6.6"], "10.0.0.1"),
        (&list, "x-real-ip", &["6.6.6.6"], "10.0.0.1"),
        (&forwarded, "x-forwarded-for", &["6.6.6.6"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for=203.0.113.9"], CLIENT),
        (&forwarded, "forwarded", &["for=6.6.6.6;x=\"", "for=203.0.113.9;proto=http"], CLIENT),
        (&forwarded, "forwarded", &["for=6.6.6.6;x=\", for=203.0.113.9"], CLIENT),
        (&forwarded, "forwarded", &["for=6.6.6.6;x=\\\", for=\"203.0.113.9\""], CLIENT),
        (&forwarded, "forwarded", &["for=6.6.6.6;x=\"\\, for=203.0.113.9"], CLIENT),
        // A name that ends in `for`, one within quotes, none at all, another scheme of names.
        (&forwarded, "forwarded", &["for=6.6.6.6, x-for=203.0.113.9"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, host=\"for=203.0.113.9\""], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, proto=https"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for=_gazonk"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for=unknown, for=10.0.0.2"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for=\"203.0.113.9"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for="], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6, for=''"], "10.0.0.1"),
        (&forwarded, "forwarded", &["for=6.6.6.6,"], "10.0.0.1"),
        (&forwarded, "forwarded", &["203.0.113.9"], "10.0.0.1"),
    ] {
        check_address(by, "10.0.0.1", header, lines, expected);
    }
}

/// CVE-2026-30827, axum-governor: one client has one bucket, in whatever clothes its address comes.
#[test]
fn every_spelling_of_an_address_is_one_bucket() {
    let by = ClientIp::forwarded("x-forwarded-for").hops(1);
    for (key, spellings) in [
        (
            "ip:203.0.113.9",
            &[
                "203.0.113.9",
                "203.0.113.9:80",
                "203.0.113.9:_x",
                "[203.0.113.9]",
                "[203.0.113.9]:80",
                "::ffff:203.0.113.9",
                "::FFFF:CB00:7109",
                "0:0:0:0:0:ffff:203.0.113.9",
                "[::ffff:203.0.113.9]:80",
                "[::ffff:203.0.113.9%eth0]:80",
                "::203.0.113.9",
                " \t203.0.113.9\t ",
            ][..],
        ),
        (
            "ip:2001:db8:1:2::/64",
            &[
                "2001:db8:1:2::3",
                "2001:DB8:1:2:0:0:0:3",
                "2001:0db8:0001:0002:ffff:ffff:ffff:ffff",
                "[2001:db8:1:2::3]",
                "[2001:db8:1:2::4]:80",
                "2001:db8:1:2::3%25eth0",
                "2001:db8:1:2::1.2.3.4",
            ],
        ),
    ] {
        for spelling in spellings {
            let parts = parts(Some("10.0.0.1"), [("x-forwarded-for", spelling.as_bytes())]);
            assert_eq!(by.extract(&parts).unwrap().to_string(), key, "{spelling}");
        }
        for spelling in spellings.iter().filter(|spelling| spelling.parse::<IpAddr>().is_ok()) {
            let key_of_peer = ClientIp::peer().extract(&parts(Some(spelling), [])).unwrap();
            assert_eq!(key_of_peer.to_string(), key, "{spelling}");
            assert_eq!(BucketKey::ip(spelling.parse().unwrap()).to_string(), key, "{spelling}");
        }
    }
}

#[test]
fn networks_of_proxies_are_as_wide_as_they_are_written() {
    for (network, inside, outside) in [
        ("10.1.2.3", "10.1.2.3", "10.1.2.2"),
        ("10.1.2.3/32", "::ffff:10.1.2.3", "10.1.2.2"),
        ("10.1.2.3/8", "10.255.0.1", "11.0.0.0"),
        ("::ffff:10.1.2.3", "10.1.2.3", "10.1.2.4"),
        ("::ffff:10.0.0.0/104", "10.255.0.1", "11.0.0.0"),
        ("::ffff:0:0/96", "10.1.2.3", "2001:db8::1"),
        ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::1"),
        ("::/0", "2001:db8::1", "10.1.2.3"),
        ("0.0.0.0/0", "10.1.2.3", "2001:db8::1"),
        ("fe80::1", "fe80::1", "fe80::2"),
    ] {
        let by = ClientIp::forwarded("x-real-ip").trusted_proxies([network]);
        check_address(&by, inside, "x-real-ip", &["203.0.113.9"], CLIENT);
        check_address(&by, outside, "x-real-ip", &["203.0.113.9"], outside);
    }
    for network in ["", "/", "10.0.0.0/", "10.0.0.0/33", "::/129", "10/8", "10.0.0.0/8/8", "10.0.0.0/-1", "10.0.0.0 /8"]
    {
        let refused = ClientIp::forwarded("x-real-ip").try_trusted_proxies([network]);
        assert_eq!(refused.unwrap_err(), ConfigError::Network { network: network.to_owned() });
    }
}

/// Header bombs: the walk takes time in the length of the header, not in its square.
#[test]
fn the_walk_reads_each_byte_a_few_times_at_most() {
    let quotes = "\"".repeat(1 << 16);
    let slashes = "\\".repeat(1 << 16);
    let pairs = "\\\"".repeat(1 << 15);
    let trusted = "for=10.0.0.2,".repeat(5000);
    let commas = ",".repeat(1 << 16);
    let semicolons = "x=\";\";".repeat(10_000);
    let everything = ClientIp::forwarded("forwarded").trusted_proxies(["0.0.0.0/0", "::/0"]);
    for bomb in [&quotes, &slashes, &pairs, &trusted, &commas, &semicolons] {
        let parts = parts(Some("10.0.0.1"), [("forwarded", bomb.as_bytes())]);
        let began = std::time::SystemTime::now();
        for _ in 0..20 {
            everything.extract(&parts).unwrap();
        }
        let took = began.elapsed().unwrap_or_default();
        // 20 times 64 KiB: without a square it is milliseconds, with one it is minutes.
        assert!(took < Duration::from_secs(10), "{took:?} for {}", &bomb[..8]);
    }
}

// API keys.

fn key_of(by: &impl KeyExtractor, parts: &Parts) -> String {
    match by.extract(parts) {
        Ok(key) => key.to_string(),
        Err(why) => format!("{why:?}"),
    }
}

fn by_header() -> impl KeyExtractor {
    ApiKey::verified("x-api-key", |key| key == "alpha" || key == "beta" || key.len() > 500).or(ClientIp::peer())
}

fn by_bearer() -> impl KeyExtractor {
    ApiKey::verified("authorization", |key| key == "alpha" || key == "beta").or(ClientIp::peer())
}

const ADDRESS: &str = "ip:203.0.113.9";

#[track_caller]
fn check_key(by: &impl KeyExtractor, header: &str, lines: &[&[u8]], expected: &str) {
    let parts = parts(Some(CLIENT), lines.iter().map(|line| (header, *line)));
    let shown: Vec<_> = lines.iter().map(|line| line.escape_ascii().to_string()).collect();
    assert_eq!(key_of(by, &parts), expected, "{header}: {shown:?}");
}

#[test]
fn what_is_no_accepted_key_is_charged_to_the_address() {
    let (alpha, beta) = (BucketKey::credential("alpha").to_string(), BucketKey::credential("beta").to_string());
    let long = |length| vec![b'k'; length];
    let (most, more) = (long(512), long(513));
    for (lines, expected) in [
        (&[&b"alpha"[..]][..], &*alpha),
        (&[b" alpha\t"], &alpha),
        (&[b"\t \talpha"], &alpha),
        (&[b"beta"], &beta),
        (&[&most], &BucketKey::credential(&most).to_string()),
        // Blanks are not part of the key.
        (&[&[&most[..], b" "].concat()], &BucketKey::credential(&most).to_string()),
        (&[&more], ADDRESS),
        (&[&long(60_000)], ADDRESS),
        // None, empty, blank.
        (&[], ADDRESS),
        (&[b""], ADDRESS),
        (&[b" \t "], ADDRESS),
        // Not accepted.
        (&[b"gamma"], ADDRESS),
        (&[b"Alpha"], ADDRESS),
        (&[b"alpha,beta"], ADDRESS),
        (&[b"alpha, alpha"], ADDRESS),
        (&[b"\"alpha\""], ADDRESS),
        (&[b"Bearer alpha"], ADDRESS),
        // Doubled, in any order.
        (&[b"alpha", b"alpha"], ADDRESS),
        (&[b"alpha", b"beta"], ADDRESS),
        (&[b"alpha", b"gamma"], ADDRESS),
        (&[b"gamma", b"alpha"], ADDRESS),
        (&[b"alpha", b""], ADDRESS),
        (&[b"", b"alpha"], ADDRESS),
        // Not text.
        (&[b"alpha\xff"], ADDRESS),
        (&["älpha".as_bytes()], ADDRESS),
        (&["ａlpha".as_bytes()], ADDRESS),
        (&["alpha\u{200b}".as_bytes()], ADDRESS),
        (&[b"al\tpha"], ADDRESS),
    ] {
        check_key(&by_header(), "x-api-key", lines, expected);
    }
    // One line with a comma is one key, of those that are told apart by their text.
    let joined = ApiKey::unverified("x-api-key");
    check_key(&joined, "x-api-key", &[b"alpha,beta"], &BucketKey::credential("alpha,beta").to_string());
    check_key(&joined, "x-api-key", &[b"alpha", b"beta"], "Credential(\"x-api-key\")");
    // A header's name has no case.
    assert_eq!(key_of(&by_header(), &parts(Some(CLIENT), [("X-API-Key", &b"alpha"[..])])), alpha);
}

/// What those accept who check bearer tokens: `headers` (of axum-extra) takes any case, one space and then any blanks;
/// tower-http compares the whole value; others split at blanks.
#[test]
fn a_bearer_token_is_one_bucket_in_every_spelling() {
    let alpha = BucketKey::credential("alpha").to_string();
    for spelling in [
        "Bearer alpha",
        "bearer alpha",
        "BEARER alpha",
        "bEaReR alpha",
        "Bearer  alpha",
        "Bearer      alpha",
        "Bearer alpha ",
        "Bearer alpha\t",
        "Bearer \talpha",
        "Bearer\talpha",
        "Bearer \t \talpha \t",
        " Bearer alpha",
        "\tBearer alpha",
    ] {
        check_key(&by_bearer(), "authorization", &[spelling.as_bytes()], &alpha);
        let unverified = ApiKey::unverified("authorization");
        check_key(&unverified, "Authorization", &[spelling.as_bytes()], &alpha);
    }
    let padded = format!("Bearer {}alpha", " ".repeat(8000));
    check_key(&by_bearer(), "authorization", &[padded.as_bytes()], &alpha);
    for (lines, expected) in [
        (&["alpha"][..], ADDRESS),
        (&["Bearer"], ADDRESS),
        (&["Bearer "], ADDRESS),
        (&["Bearer \t "], ADDRESS),
        (&["Beareralpha"], ADDRESS),
        (&["Bearer: alpha"], ADDRESS),
        (&["Bearer=alpha"], ADDRESS),
        (&["Bearer,alpha"], ADDRESS),
        (&["Basic alpha"], ADDRESS),
        (&["Basic YWxwaGE6"], ADDRESS),
        (&["Digest alpha"], ADDRESS),
        (&["Basic Bearer alpha"], ADDRESS),
        (&["Bearer Bearer alpha"], ADDRESS),
        (&["Bearer alpha beta"], ADDRESS),
        (&["Bearer alpha, Bearer beta"], ADDRESS),
        (&["Bearer \"alpha\""], ADDRESS),
        (&["Bearer alpha", "Bearer alpha"], ADDRESS),
        (&["Basic alpha", "Bearer alpha"], ADDRESS),
        (&["Bearer alpha", "Basic alpha"], ADDRESS),
        (&["Bearer\u{a0}alpha"], ADDRESS),
        (&["Ｂearer alpha"], ADDRESS),
    ] {
        let lines: Vec<_> = lines.iter().map(|line| line.as_bytes()).collect();
        check_key(&by_bearer(), "authorization", &lines, expected);
    }
    let oversized = format!("Bearer {}", "k".repeat(513));
    check_key(
        &ApiKey::unverified("authorization"),
        "authorization",
        &[oversized.as_bytes()],
        "Credential(\"authorization\")",
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the `headers` crate takes for the token `alpha`, as axum-extra's typed header does, is `alpha`'s bucket.
    #[test]
    fn what_a_typed_header_accepts_has_the_bucket_of_its_token(
        line in "[ \t]{0,2}([bB][eE][aA][rR][eE][rR]|Basic)[ \t]{0,3}(alpha|beta|alpha beta|al\tpha|)[ \t]{0,2}"
    ) {
        // authorization.rs of headers 0.4: the scheme in any case, a space, and the token is what follows the blanks.
        let typed = line
            .get(..7)
            .filter(|start| start.eq_ignore_ascii_case("bearer "))
            .map(|_| line[7..].trim_start());
        let parts = parts(Some(CLIENT), [("authorization", line.as_bytes())]);
        if let Some(token @ ("alpha" | "beta")) = typed {
            prop_assert_eq!(key_of(&by_bearer(), &parts), BucketKey::credential(token).to_string());
        } else {
            let key = key_of(&by_bearer(), &parts);
            let known = ["alpha", "beta"].map(|token| BucketKey::credential(token).to_string());
            prop_assert!(key == ADDRESS || known.contains(&key), "{}", key);
        }
    }
}

async fn hello() -> &'static str {
    "hello"
}

fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    for (header, line) in headers {
        request.headers_mut().append(name(header), value(line.as_bytes()));
    }
    request.extensions_mut().insert(ConnectInfo(SocketAddr::new(CLIENT.parse().unwrap(), 4711)));
    request
}

async fn send<S>(service: &S, request: Request<Body>) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    service.clone().oneshot(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn without_a_key_the_answer_is_401_and_names_the_scheme() {
    for (header, refused, challenge) in [
        ("authorization", &["Basic YWxwaGE6", "Bearer gamma", "alpha", ""][..], "Bearer"),
        ("x-api-key", &["gamma", "", "Bearer alpha"], "ApiKey header=\"x-api-key\""),
    ] {
        let limit = Limit::new("a", Quota::per_day(50)).key_by(ApiKey::verified(header, |key| key == "alpha"));
        let store = MemoryStore::new();
        let app = Router::new().route("/", get(hello)).layer(TokenBucketLayer::new(store.clone(), limit));
        for line in refused {
            let answer = send(&app, request("GET", "/", &[(header, line)])).await;
            assert_eq!(answer.status(), StatusCode::UNAUTHORIZED, "{line}");
            assert_eq!(answer.headers()["www-authenticate"], challenge);
        }
        assert_eq!(send(&app, request("GET", "/", &[])).await.status(), 401);
        let accepted = if header == "authorization" { "bearer alpha" } else { "alpha" };
        assert_eq!(send(&app, request("GET", "/", &[(header, accepted)])).await.status(), 200);
        assert_eq!(send(&app, request("GET", "/", &[(header, accepted), (header, accepted)])).await.status(), 401);
    }
}

/// CubeSandbox#1379, litellm-rs#408, hyperdx#2775.
#[tokio::test]
async fn a_thousand_made_up_keys_leave_one_bucket() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    for (limit, header, prefix) in [("by-header", "x-api-key", ""), ("by-bearer", "authorization", "Bearer ")] {
        let key = ApiKey::verified(header, |key| key == "alpha").or(ClientIp::peer());
        let limits = Limit::new(limit, Quota::per_day(600)).key_by(key);
        let layer = TokenBucketLayer::new(store.clone(), limits).deadline(Duration::from_secs(30));
        let app = Router::new().route("/", get(hello)).layer(layer);
        let mut noise = Noise(11);
        let mut statuses = BTreeMap::new();
        for i in 0..1000 {
            let made_up = format!("{prefix}{:x}", noise.next());
            let twice = [(header, &*made_up), (header, &*made_up)];
            let answer = send(&app, request("GET", "/", &twice[..1 + usize::from(i % 7 == 0)])).await;
            *statuses.entry(answer.status().as_u16()).or_insert(0) += 1;
        }
        assert_eq!(statuses, BTreeMap::from([(200, 600), (429, 400)]), "{header}");
    }
    assert_eq!(server.keys(), ["tb:v1:{ip:203.0.113.9}:by-bearer", "tb:v1:{ip:203.0.113.9}:by-header"]);
}

/// Layers that are added later are outside: the one that authenticates is added after the one that counts.
#[tokio::test(start_paused = true)]
async fn an_identity_comes_from_a_layer_that_is_added_later() {
    #[derive(Clone)]
    struct User(&'static str);

    let layer = || {
        let key = Identity::of(|user: &User| BucketKey::id(user.0)).or(ClientIp::peer());
        TokenBucketLayer::new(MemoryStore::new(), Limit::new("per-user", Quota::per_day(50)).key_by(key))
            .on_decision(|decision| assert_eq!(decision.outcomes().len(), 1))
    };
    let remaining = |answer: &Response<Body>| answer.extensions().get::<Decision>().unwrap().remaining().unwrap();

    let limits = layer();
    let of = |user| Router::new().route("/", get(hello)).layer(limits.clone()).layer(Extension(User(user)));
    let (alice, bob) = (of("alice"), of("bob"));
    let nobody = Router::new().route("/", get(hello)).layer(limits.clone());
    for left in [49, 48, 47] {
        assert_eq!(remaining(&send(&alice, request("GET", "/", &[])).await), left);
    }
    assert_eq!(remaining(&send(&bob, request("GET", "/", &[])).await), 49);
    // Nothing in a header makes one somebody.
    assert_eq!(remaining(&send(&nobody, request("GET", "/", &[("user", "alice"), ("x-user", "alice")])).await), 49);

    // The other way round nobody has been authenticated yet: the address is charged, for both of them.
    let limits = layer();
    let of = |user| Router::new().route("/", get(hello)).layer(Extension(User(user))).layer(limits.clone());
    assert_eq!(remaining(&send(&of("alice"), request("GET", "/", &[])).await), 49);
    assert_eq!(remaining(&send(&of("bob"), request("GET", "/", &[])).await), 48);

    // Alone it is 401.
    let key = Identity::of(|user: &User| BucketKey::id(user.0));
    assert_eq!(key.extract(&parts(Some(CLIENT), [])), Err(NoKey::Identity));
    let limit = Limit::new("per-user", Quota::per_day(50)).key_by(key);
    let app = Router::new().route("/", get(hello)).layer(TokenBucketLayer::new(MemoryStore::new(), limit));
    let answer = send(&app, request("GET", "/", &[("authorization", "Bearer alice")])).await;
    assert_eq!((answer.status(), &answer.headers()["www-authenticate"]), (StatusCode::UNAUTHORIZED, &value(b"Bearer")));
}

#[test]
fn an_identity_of_one_kind_is_never_one_of_another() {
    let texts = ["alice", "203.0.113.9", "ip:203.0.113.9", "global", "key:00000000000000000000000000000000", ""];
    let mut all: Vec<BucketKey> = vec![BucketKey::global(), BucketKey::ip("203.0.113.9".parse().unwrap())];
    for text in texts {
        all.extend([BucketKey::id(text), BucketKey::credential(text)]);
    }
    let names: HashSet<String> = all.iter().map(BucketKey::to_string).collect();
    assert_eq!(names.len(), all.len());
}

// Keys in Redis.

/// CRC-16/XMODEM, and the slot of a key as Redis Cluster has it.
fn slot(key: &[u8]) -> u16 {
    let tagged = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let length = key[open + 1..].iter().position(|byte| *byte == b'}')?;
        (length > 0).then(|| &key[open + 1..open + 1 + length])
    });
    tagged.unwrap_or(key).iter().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| (crc << 1) ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 })
    }) % 16_384
}

/// The hostile identities: every byte, braces and line ends in every place, long ones.
fn hostile(i: usize, noise: &mut Noise) -> Vec<u8> {
    const PIECES: &str = "{|}|{}|}{|\r\n|\n|\0|:|*|?|[a-z]|SET x y|é|ключ🔑|alpha|\u{202e}";
    let pieces: Vec<&str> = PIECES.split('|').collect();
    // All of one length or another, and each different: the number is in it, in the middle.
    let mut text = Vec::new();
    for half in 0..2 {
        for _ in 0..noise.below(5) {
            text.extend_from_slice(noise.pick(&pieces).as_bytes());
        }
        text.push(noise.next() as u8 | 0x80);
        if half == 0 {
            text.extend_from_slice(format!("{i}").as_bytes());
        }
    }
    if i % 1000 == 999 {
        text.resize(1 << 20, b'}');
    }
    text
}

/// discourse#14682, n8n#24636, erpc#1058, bottleneck#180, posthog#60838.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_hostile_identities_have_one_key_each_all_of_one_form_and_spread_over_all_slots() {
    assert_eq!(slot(b"123456789"), 0x31c3);
    assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));

    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limit = LimitName::try_new("a.b_c-D").unwrap();
    let mut noise = Noise(3);
    let mut tasks = tokio::task::JoinSet::new();
    let mut expected = HashSet::new();
    for i in 0..10_000 {
        let text = hostile(i, &mut noise);
        let key = if i % 2 == 0 { BucketKey::id(&text) } else { BucketKey::credential(&text) };
        expected.insert(format!("tb:v1:{{{key}}}:a.b_c-D"));
        let charge = Charge::new(limit.clone(), key, Quota::per_day(1000), Amount::Take(1));
        if tasks.len() == 64 {
            tasks.join_next().await;
        }
        let store = store.clone();
        tasks.spawn(async move { assert!(store.acquire(&[charge]).await.unwrap().is_allowed()) });
    }
    tasks.join_all().await;

    let keys = server.keys();
    assert_eq!(keys.len(), 10_000, "each identity has a bucket of its own");
    // 64 ranges of slots of the same size: 10 000 keys should be spread evenly.
    let mut counts = [0u32; 64];
    for key in &keys {
        assert!(expected.contains(key), "{key}");
        let hash = key.strip_prefix("tb:v1:{").and_then(|rest| rest.strip_suffix("}:a.b_c-D")).expect(key);
        let hash = hash.strip_prefix("id:").or(hash.strip_prefix("key:")).expect(key);
        assert!(hash.len() == 32 && hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')), "{key}");
        assert_eq!(key.matches(['{', '}']).count(), 2, "{key}");
        // Another limit of the same identity is in the same slot.
        assert_eq!(slot(key.as_bytes()), slot(key.replace("a.b_c-D", "other").as_bytes()));
        counts[usize::from(slot(key.as_bytes()) / 256)] += 1;
    }
    let mean = 10_000.0 / 64.0;
    let chi_square: f64 = counts.iter().map(|count| (f64::from(*count) - mean).powi(2) / mean).sum();
    // 63 degrees of freedom: between these in all but one of a million draws.
    assert!((25.0..130.0).contains(&chi_square), "{chi_square}: {counts:?}");
}

// A canary credential.

/// All that a response shows: status, headers, body, and the decision in its extensions.
async fn all_of(answer: Response<Body>) -> (StatusCode, String) {
    let (parts, body) = answer.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let decision = parts.extensions.get::<Decision>();
    let body = String::from_utf8_lossy(&body);
    (parts.status, format!("{:?} {:?} {decision:?} {body}", parts.status, parts.headers))
}

/// Everything that a server was sent, from this connection's MONITOR until the mark.
fn monitored(monitor: &mut crate::server::Connection, server: &Server) -> Vec<String> {
    server.query(&["ECHO", "the-mark"]);
    let mut lines = Vec::new();
    loop {
        let line = monitor.receive().unwrap();
        let line = line.text().unwrap_or_default().to_owned();
        if line.contains("the-mark") {
            return lines;
        }
        lines.push(line);
    }
}

/// `canary` in all of it: the accepted key, one that is not accepted, the operator's secret and Redis's password.
#[tokio::test]
async fn a_canary_credential_is_nowhere() {
    let (log, _guard) = Log::capture_all();
    let server = Server::start_with(&["--requirepass", "canary-password"]);
    let mut monitor = server.connect();
    let mut command = Vec::new();
    crate::server::encode(&mut command, &["MONITOR"]);
    monitor.send(&command).unwrap();
    assert_eq!(monitor.receive().unwrap().text(), Some("OK"));

    let toml = format!(
        r#"
        [store]
        redis = "redis://default:canary-password@127.0.0.1:{}"
        deadline = "30s"
        secret = "canary-secret"
        on_failure = "deny"
        [client_ip]
        header = "x-forwarded-for"
        trusted_proxies = ["10.0.0.0/8"]
        [[limits]]
        name = "per-key"
        key = "api-key"
        api_key_header = "authorization"
        api_keys = ["canary-key", "canary-other"]
        capacity = 2
        refill = 1
        per = "1h"
        [[limits]]
        name = "per-key-or-address"
        key = "api-key-or-client-ip"
        api_key_header = "x-api-key"
        api_keys = ["canary-third"]
        capacity = 50
        refill = 1
        per = "1h"
        "#,
        server.port()
    );
    let config: Config = toml::from_str(&toml).unwrap();
    let store = config.redis_store().await.unwrap().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let decisions = Arc::clone(&seen);
    let layer = config
        .layer(store.clone())
        .unwrap()
        .on_decision(move |decision| decisions.lock().unwrap().push(format!("{decision:?}")));
    let rejections = Arc::new(Mutex::new(Vec::new()));
    let refused = Arc::clone(&rejections);
    let own = layer.clone().rejection(move |rejection: &Rejection| {
        refused.lock().unwrap().push(format!("{rejection:?} {:?}", rejection.reason()));
        let mut response = Response::new(Body::empty());
        *response.status_mut() = rejection.status();
        response
    });
    let app = Router::new().route("/", get(hello)).layer(layer.clone());
    let with_own = Router::new().route("/", get(hello)).layer(own.clone());

    let mut answers = Vec::new();
    let known = [("authorization", "Bearer canary-key"), ("x-api-key", "canary-third")];
    let unknown = [("authorization", "Bearer canary-unknown"), ("x-api-key", "canary-unknown")];
    let grpc = [known[0], ("content-type", "application/grpc")];
    for (expected, headers) in [(200, &known[..]), (200, &known), (429, &known), (200, &grpc), (401, &unknown)] {
        for app in [&app, &with_own].into_iter().take(if expected == 200 { 1 } else { 2 }) {
            let (status, shown) = all_of(send(app, request("GET", "/", headers)).await).await;
            assert_eq!(status, expected, "{shown}");
            answers.push(shown);
        }
    }
    let commands = monitored(&mut monitor, &server);
    let keys = server.keys();
    assert_eq!(keys.len(), 2, "{keys:?}");
    assert!(commands.iter().any(|command| command.contains("evalsha") || command.contains("EVALSHA")), "{commands:?}");
    let values: Vec<_> = keys.iter().map(|key| format!("{:?}", server.query(&["GET", key]))).collect();

    // A password that is wrong, a store that has gone, each with every policy.
    let failing = RedisStore::connect(&format!("redis://:canary-wrong@127.0.0.1:{}", server.port())).await.unwrap();
    let mut errors = vec![format!("{failing:?}")];
    for killed in [false, true] {
        if killed {
            server.kill();
        }
        for store in [&failing, &store] {
            let name = LimitName::try_new("x").unwrap();
            let charge = Charge::new(name, BucketKey::credential("canary-key"), Quota::per_day(5), Amount::Take(1));
            match store.acquire(std::slice::from_ref(&charge)).await {
                Ok(decision) => errors.push(format!("{decision:?}")),
                Err(error) => errors.push(format!("{error} {error:?} {charge:?}")),
            }
        }
        for (policy, expected) in
            [(OnStoreFailure::Deny, 503), (OnStoreFailure::Local, 200), (OnStoreFailure::Allow, 200)]
        {
            let layer = config.layer(failing.clone()).unwrap().on_store_failure(policy);
            let app = Router::new().route("/", get(hello)).layer(layer);
            let (status, shown) = all_of(send(&app, request("GET", "/", &known)).await).await;
            assert_eq!(status, expected, "{shown}");
            answers.push(shown);
        }
    }

    // What can be shown of every type on the way.
    let key = BucketKey::credential("canary-key");
    let by_key = ApiKey::verified("x-api-key", |key| key == "canary-key");
    let by_both = by_key.clone().or(ApiKey::unverified("authorization"));
    let no_key = by_key.extract(&parts(None, [("x-api-key", &b"canary"[..])])).unwrap_err();
    let limit = Limit::new("a", Quota::per_day(5)).key_by(by_both.clone());
    let mut service = own.layer(Router::new().route("/", get(hello)));
    let future = Service::<Request<Body>>::call(&mut service, request("GET", "/", &known));
    let debug = format!(
        "{config:?} {config:#?} {store:?} {key:?} {by_key:?} {by_both:?} {no_key:?} {limit:?} {:?} {layer:?} {own:?} \
         {service:?} {future:?} {:?}",
        config.limits().unwrap(),
        ConfigError::RedisUrl { reason: RedisStore::connect("redis://:canary@x:port").await.unwrap_err().to_string() },
    );
    let log = log.text();
    assert!(log.contains("per-key") || log.contains("check of the store failed"), "the capture works: {log}");
    for (what, text) in [
        ("commands", commands.join("\n")),
        ("keys", keys.join("\n")),
        ("values", values.join("\n")),
        ("answers", answers.join("\n")),
        ("decisions", seen.lock().unwrap().join("\n")),
        ("rejections", rejections.lock().unwrap().join("\n")),
        ("errors", errors.join("\n")),
        ("Debug", debug),
        ("log", log),
    ] {
        assert!(!text.is_empty(), "{what}");
        let found = text.lines().find(|line| line.to_ascii_lowercase().contains("canary"));
        assert_eq!(found, None, "{what}");
    }
}

// Costs.

/// What is asked for, by its plain name, and its price; the default is 1.
const PRICES: [(&str, &str, u64); 8] = [
    ("GET", "/search", 7),
    ("POST", "/reports/generate", 10),
    ("GET", "/users/{id}", 2),
    ("GET", "/users/{id}/keys", 9),
    ("GET", "/files/{*path}", 3),
    ("GET", "/files/export", 50),
    ("*", "/admin/{*rest}", 8),
    ("OPTIONS", "/admin/{*rest}", 8),
];
const FREE: &str = "/health";

fn costs(prefix: &str) -> CostTable {
    let table = CostTable::new(1).exempt(&format!("GET {prefix}{FREE}"));
    PRICES
        .iter()
        .fold(table, |table, (method, template, cost)| table.route(&format!("{method} {prefix}{template}"), *cost))
}

fn by_cost(costs: CostTable) -> TokenBucketLayer<MemoryStore> {
    let quota = Quota::per_second(1_000_000);
    TokenBucketLayer::new(MemoryStore::new(), Limit::new("a", quota).key_by(Global).cost(costs))
}

/// What a handler is worth: it tells in its response that it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ran(u64);

fn routes() -> Router {
    let handler = |price| move || ready(Extension(Ran(price)));
    Router::new()
        .route("/search", get(handler(7)))
        .route("/reports/generate", post(handler(10)))
        .route("/users/{user}", get(handler(2)))
        .route("/users/{user}/keys", get(handler(9)))
        .route("/files/{*rest}", get(handler(3)))
        .route("/files/export", get(handler(50)))
        .route("/admin/{*path}", routing::any(handler(8)))
        .route("/health", get(handler(0)))
        .fallback(handler(1))
}

/// What was paid, and what ran: without the layer nothing may.
async fn paid<S>(service: &S, request: Request<Body>) -> (u64, Option<Ran>)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let answer = send(service, request).await;
    let ran = answer.extensions().get::<Ran>().copied();
    let Some(decision) = answer.extensions().get::<Decision>() else {
        assert_eq!(ran, None, "a handler that the layer is around has run without it");
        return (0, None);
    };
    (decision.outcomes().first().map_or(0, |outcome| outcome.cost()), ran)
}

/// What an attacker may do to the spelling of a path.
#[derive(Clone, Copy, Debug)]
enum Twist {
    Case,
    Encode,
    Slashes,
    Trailing,
    Parameters,
    EncodedParameters,
    Dots,
    EncodeTwice,
}

const ISSUE: [Twist; 6] =
    [Twist::Case, Twist::Encode, Twist::Slashes, Twist::Trailing, Twist::Parameters, Twist::EncodedParameters];

fn twisted(path: &str, twists: &[Twist], noise: &mut Noise) -> String {
    let mut path = path.to_owned();
    for twist in twists {
        let mut twisted = String::new();
        for (i, c) in path.char_indices() {
            let hit = noise.below(4) == 0;
            match twist {
                Twist::Case if hit => twisted.push(c.to_ascii_uppercase()),
                Twist::Encode if hit && i > 0 => {
                    let lower = noise.below(2) == 0;
                    twisted += &if lower { format!("%{:02x}", c as u8) } else { format!("%{:02X}", c as u8) };
                }
                Twist::EncodeTwice if hit && i > 0 => twisted += &format!("%25{:02x}", c as u8),
                Twist::Slashes if hit && c == '/' => twisted += noise.pick(&["//", "///"]),
                Twist::Parameters if noise.below(2) == 0 && c == '/' && i > 0 => {
                    twisted += noise.pick(&[";/", ";a=b/", ";A;b=c%2Fd/", ";%3B/"]);
                }
                Twist::EncodedParameters if hit && c == '/' && i > 0 => twisted += noise.pick(&["%3b/", "%3Bx=y/"]),
                Twist::Dots if noise.below(2) == 0 && c == '/' => {
                    twisted += noise.pick(&["/./", "/x/../", "/health/../", "/%2e/", "/x/%2E%2e/", "/x/..;/", "/../"]);
                }
                _ => twisted.push(c),
            }
        }
        let at_end = match twist {
            Twist::Trailing => noise.pick(&["/", "//", "%2F", "/;"]),
            Twist::Parameters => noise.pick(&[";", ";v=1", ";a%2Fb", ""]),
            Twist::Dots => noise.pick(&["", "/.", "/x/.."]),
            _ => "",
        };
        path = twisted + at_end;
    }
    path
}

/// Spellings of all that has a price, and of what is free, each with some of the twists.
fn spellings(prefix: &str, count: usize, twists: &[Twist]) -> Vec<(&'static str, String)> {
    const PATHS: [(&str, &str); 9] = [
        ("GET", "/search"),
        ("POST", "/reports/generate"),
        ("GET", "/users/7"),
        ("GET", "/users/ab/keys"),
        ("GET", "/files/a/b"),
        ("GET", "/files/export"),
        ("PUT", "/admin/x/y"),
        ("GET", "/health"),
        ("GET", "/nothing"),
    ];
    let mut noise = Noise(5);
    let mut all = Vec::with_capacity(count);
    while all.len() < count {
        let (method, path) = noise.pick(&PATHS);
        let some: Vec<Twist> = (0..noise.below(4)).map(|_| noise.pick(twists)).collect();
        let path = twisted(&format!("{prefix}{path}"), &some, &mut noise);
        let method = match noise.below(4) {
            0 if method == "GET" => "HEAD",
            1 => {
                noise.pick(&["GET", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get", "Get", "HEAD", "X"])
            }
            _ => method,
        };
        if path.parse::<http::Uri>().is_ok_and(|uri| uri.path().len() == path.len()) {
            all.push((method, path));
        }
    }
    all
}

async fn check_paid<S>(what: &str, prefix: &str, twists: &[Twist], service: &S)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone,
{
    let mut dear = 0;
    let mut dodged = Vec::new();
    for (method, path) in spellings(prefix, 2000, twists) {
        // Browsers ask like this before they send anything else; `routes` has no handler for it but /admin's.
        let preflight = [("access-control-request-method", "GET"), ("origin", "https://example.com")];
        for headers in [&[][..], &preflight] {
            if method != "OPTIONS" && !headers.is_empty() {
                continue;
            }
            let (cost, ran) = paid(service, request(method, &path, headers)).await;
            match ran {
                // Nothing but the fallback: a preflight to it is free by contract.
                Some(Ran(1)) if !headers.is_empty() => {}
                Some(Ran(price)) if cost < price => dodged.push(format!("{method} {path}: {cost} for {price}")),
                Some(Ran(price)) => dear += usize::from(price > 3),
                None => {}
            }
        }
    }
    assert!(dodged.is_empty(), "{what}: {} dodged, such as {:#?}", dodged.len(), &dodged[..dodged.len().min(12)]);
    assert!(dear > 100, "{what}: only {dear} dear ones ran");
}

#[tokio::test(start_paused = true)]
async fn no_spelling_of_a_path_reaches_a_dear_handler_for_less_in_any_position_of_the_layer() {
    let all = [&ISSUE[..], &[Twist::Dots, Twist::EncodeTwice]].concat();
    for twists in [&ISSUE[..], &all] {
        check_paid("on the router", "", twists, &routes().layer(by_cost(costs("")))).await;
        check_paid("around it", "", twists, &by_cost(costs("")).layer(routes())).await;
        let api = || Router::new().nest("/api", routes());
        check_paid("outside a nest", "/api", twists, &api().layer(by_cost(costs("/api")))).await;
        check_paid("around a nest", "/api", twists, &by_cost(costs("/api")).layer(api())).await;
        let service = Router::new().nest_service("/api", routes());
        check_paid("outside a nested service", "/api", twists, &service.layer(by_cost(costs("/api")))).await;
    }
}

/// Inside a nest the layer does not see what the outer router refuses.
#[tokio::test(start_paused = true)]
async fn no_spelling_of_a_path_reaches_a_dear_handler_for_less_inside_a_nest() {
    let all = [&ISSUE[..], &[Twist::Dots, Twist::EncodeTwice]].concat();
    let inside = Router::new().nest("/api", routes().layer(by_cost(costs("/api"))));
    check_paid("inside a nest", "/api", &all, &inside).await;
    let inside = Router::new().nest_service("/api", by_cost(costs("/api")).layer(routes()));
    check_paid("inside a nested service", "/api", &all, &inside).await;
}

/// tower-http's own lenience, in both places and in both modes.
#[tokio::test(start_paused = true)]
async fn no_spelling_of_a_path_reaches_a_dear_handler_for_less_where_slashes_are_trimmed_or_added() {
    let trim = NormalizePathLayer::trim_trailing_slash();
    let inside = by_cost(costs("")).layer(trim.layer(routes()));
    check_paid("trimmed inside", "", &ISSUE, &inside).await;
    let outside = trim.layer(by_cost(costs("")).layer(routes()));
    check_paid("trimmed outside", "", &ISSUE, &outside).await;
    let outside = trim.layer(routes().layer(by_cost(costs(""))));
    check_paid("trimmed outside the router", "", &ISSUE, &outside).await;

    let append = NormalizePathLayer::append_trailing_slash();
    let handler = |price| move || ready(Extension(Ran(price)));
    let with_slashes = || {
        Router::new()
            .route("/search/", get(handler(7)))
            .route("/users/{user}/keys/", get(handler(9)))
            .route("/files/export/", get(handler(50)))
            .route("/health/", get(handler(0)))
            .fallback(handler(1))
    };
    let inside = by_cost(costs("")).layer(append.layer(with_slashes()));
    check_paid("added inside", "", &ISSUE, &inside).await;
    // A table that names the routes as the router does, with their slashes.
    let table =
        CostTable::new(1).route("GET /search/", 7).route("GET /users/{id}/keys/", 9).route("GET /files/export/", 50);
    let inside = by_cost(table).layer(append.layer(with_slashes()));
    check_paid("added inside, named with slashes", "", &ISSUE, &inside).await;
}

/// A server that reduces a path in some of the ways that servers do, and then looks it up.
#[derive(Clone, Copy, Debug, Default)]
struct Lenience {
    /// Cuts `;parameters` off before it decodes, or after.
    parameters_before: bool,
    parameters_after: bool,
    decode: u8,
    dots: bool,
    collapse: bool,
    trim: bool,
    lower: bool,
}

fn without_parameters(path: &str) -> String {
    let segments = path.split('/').map(|segment| segment.split_once(';').map_or(segment, |(name, _)| name));
    segments.collect::<Vec<_>>().join("/")
}

fn decoded(path: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = path.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        if let (b'%', Some(high), Some(low)) = (*first, hex(0), hex(1)) {
            bytes.push((high * 16 + low) as u8);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// RFC 3986, 5.2.4.
fn without_dots(path: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    for (i, segment) in segments.iter().enumerate() {
        match *segment {
            ".." => drop(kept.pop()),
            "." => {}
            other => kept.push(other),
        }
        if i + 1 == segments.len() && matches!(*segment, "." | "..") {
            kept.push("");
        }
    }
    format!("/{}", kept.join("/"))
}

impl Lenience {
    /// Every mixture.
    fn all(decode: &[u8], dots: &[bool]) -> Vec<Self> {
        let mut all = Vec::new();
        for &decode in decode {
            for &dots in dots {
                for bits in 0..32u8 {
                    let bit = |i: u8| bits & (1 << i) != 0;
                    let (parameters_before, parameters_after) = (bit(0), bit(1));
                    all.push(Self {
                        parameters_before,
                        parameters_after,
                        decode,
                        dots,
                        collapse: bit(2),
                        trim: bit(3),
                        lower: bit(4),
                    });
                }
            }
        }
        all
    }

    fn reduced(&self, path: &str) -> String {
        let mut path = path.to_owned();
        if self.parameters_before {
            path = without_parameters(&path);
        }
        for _ in 0..self.decode {
            path = decoded(&path);
        }
        if self.parameters_after {
            path = without_parameters(&path);
        }
        if self.collapse {
            while path.contains("//") {
                path = path.replace("//", "/");
            }
        }
        if self.dots {
            path = without_dots(&path);
        }
        if self.trim && path.len() > 1 {
            path.truncate(path.trim_end_matches('/').len().max(1));
        }
        if self.lower { path.to_lowercase() } else { path }
    }

    /// A plain tower service that looks its path up like that, without a word of axum's.
    fn server(
        self,
        prices: &[(&'static str, &'static str, u64)],
    ) -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone {
        let mut router = matchit::Router::new();
        let mut templates: Vec<(String, Vec<(&'static str, u64)>)> = Vec::new();
        for (method, template, price) in prices.iter().copied().chain([("GET", FREE, 0)]) {
            let template = if self.lower { template.to_lowercase() } else { template.to_owned() };
            match templates.iter_mut().find(|(known, _)| *known == template) {
                Some((_, methods)) => methods.push((method, price)),
                None => templates.push((template, vec![(method, price)])),
            }
        }
        for (i, (template, _)) in templates.iter().enumerate() {
            router.insert(template.clone(), i).unwrap();
        }
        let (router, templates) = (Arc::new(router), Arc::new(templates));
        service_fn(move |request: Request<Body>| {
            let path = self.reduced(request.uri().path());
            let method = if request.method() == Method::HEAD { "GET" } else { request.method().as_str() };
            let methods = router.at(&path).map(|found| templates[*found.value].1.as_slice()).unwrap_or_default();
            let own = methods.iter().find(|(known, _)| *known == method);
            let price = own.or(methods.iter().find(|(known, _)| *known == "*")).map_or(1, |(_, price)| *price);
            let mut response = Response::new(Body::empty());
            response.extensions_mut().insert(Ran(price));
            ready(Ok(response))
        })
    }
}

/// Asks for the same things of servers that are lenient in these ways; what was dodged, by way.
async fn dodged(
    ways: &[Lenience],
    twists: &[Twist],
    count: usize,
    table: CostTable,
    prices: &[(&'static str, &'static str, u64)],
) -> Vec<String> {
    let all = spellings("", count, twists);
    let mut dodged = Vec::new();
    for way in ways {
        let service = by_cost(table.clone()).layer(way.server(prices));
        for (method, path) in &all {
            let (cost, ran) = paid(&service, request(method, path, &[])).await;
            let Ran(price) = ran.unwrap();
            if cost < price {
                dodged.push(format!("{method} {path} = {}: {cost} for {price} by {way:?}", way.reduced(path)));
            }
        }
    }
    dodged
}

#[tokio::test(start_paused = true)]
async fn no_spelling_of_a_path_reaches_a_dear_handler_of_a_lenient_server_for_less() {
    let ways = Lenience::all(&[0, 1], &[false]);
    let dodged = dodged(&ways, &ISSUE, 800, costs(""), &PRICES).await;
    assert!(dodged.is_empty(), "{} dodged, such as {:#?}", dodged.len(), &dodged[..dodged.len().min(20)]);
}

#[tokio::test(start_paused = true)]
async fn no_dot_segment_and_no_double_encoding_reaches_a_dear_handler_of_a_lenient_server_for_less() {
    let ways = Lenience::all(&[0, 1, 2], &[true]);
    let all = [&ISSUE[..], &[Twist::Dots, Twist::Dots, Twist::EncodeTwice]].concat();
    let dodged = dodged(&ways, &all, 400, costs(""), &PRICES).await;
    assert!(dodged.is_empty(), "{} dodged, such as {:#?}", dodged.len(), &dodged[..dodged.len().min(20)]);
}

/// A table may be written in capitals or with slashes at the end; a server that does not care takes the plain path.
#[tokio::test(start_paused = true)]
async fn no_plain_spelling_of_a_path_that_the_table_has_in_capitals_is_cheaper() {
    const CAPITALS: [(&str, &str, u64); 3] =
        [("GET", "/Search", 7), ("GET", "/Users/{id}/Keys", 9), ("GET", "/files/Export/", 50)];
    let table = CAPITALS
        .iter()
        .fold(CostTable::new(1), |table, (method, template, cost)| table.route(&format!("{method} {template}"), *cost));
    let trimmed = CAPITALS.map(|(method, template, cost)| (method, template.trim_end_matches('/'), cost));
    let ways: Vec<_> = Lenience::all(&[0, 1], &[false]).into_iter().filter(|way| way.lower && way.trim).collect();
    let dodged = dodged(&ways, &ISSUE, 500, table, &trimmed).await;
    assert!(dodged.is_empty(), "{} dodged, such as {:#?}", dodged.len(), &dodged[..dodged.len().min(20)]);
}

#[tokio::test(start_paused = true)]
async fn methods_pay_what_the_handler_that_they_reach_costs() {
    let app = routes().layer(by_cost(costs("")));
    let around = by_cost(costs("")).layer(routes());
    let preflight = [("access-control-request-method", "GET"), ("origin", "https://example.com")];
    for (method, path, headers, expected) in [
        ("GET", "/search", &[][..], (7, Some(7))),
        ("HEAD", "/search", &[], (7, Some(7))),
        // 405: no handler runs.
        ("POST", "/search", &[], (1, None)),
        ("get", "/search", &[], (1, None)),
        ("PROPFIND", "/search", &[], (1, None)),
        ("OPTIONS", "/search", &[], (1, None)),
        ("OPTIONS", "/search", &preflight, (0, None)),
        ("HEAD", "/reports/generate", &[], (1, None)),
        ("HEAD", "/health", &[], (0, Some(0))),
        ("POST", "/health", &[], (1, None)),
        // Any method at all reaches this one.
        ("GET", "/admin/x", &[], (8, Some(8))),
        ("HEAD", "/admin/x", &[], (8, Some(8))),
        ("PROPFIND", "/admin/x", &[], (8, Some(8))),
        ("get", "/admin/x", &[], (8, Some(8))),
        ("TRACE", "/admin/x", &[], (8, Some(8))),
        ("OPTIONS", "/admin/x", &[], (8, Some(8))),
        // Named, so that a handler for any method cannot be reached for nothing by what only looks like a preflight.
        ("OPTIONS", "/admin/x", &preflight, (8, Some(8))),
    ] {
        let expected = (expected.0, expected.1.map(Ran));
        assert_eq!(paid(&app, request(method, path, headers)).await, expected, "{method} {path}");
        assert_eq!(paid(&around, request(method, path, headers)).await, expected, "{method} {path}");
        // Not the method that it says it is: a word of its own.
        let overridden = [headers, &[("x-http-method-override", "GET")]].concat();
        assert_eq!(paid(&app, request(method, path, &overridden)).await, expected, "{method} {path}");
    }
}

/// tonic looks at the path alone: whatever the method is, the call is made. A preflight is free unless OPTIONS is named,
/// so a table for such a service names it beside any method.
#[tokio::test(start_paused = true)]
async fn a_service_that_ignores_methods_is_paid_where_the_table_names_any_method_and_options() {
    let check = "/grpc.health.v1.Health/Check";
    let all = CostTable::new(10).route("OPTIONS /{*path}", 10);
    let one = CostTable::new(1).route(check, 10).route(&format!("OPTIONS {check}"), 10);
    for table in [all, one] {
        let (_reporter, health) = tonic_health::server::health_reporter();
        let service = by_cost(table).layer(tonic::service::Routes::new(health).prepare().into_axum_router());
        for (method, headers) in [
            ("POST", &[][..]),
            ("OPTIONS", &[]),
            ("GET", &[]),
            ("X", &[]),
            ("OPTIONS", &[("access-control-request-method", "POST"), ("origin", "https://example.com")]),
        ] {
            let mut request = request(method, check, headers);
            *request.body_mut() = Body::from(vec![0; 5]);
            let answer = send(&service, request).await;
            let decision = answer.extensions().get::<Decision>().unwrap();
            let cost = decision.outcomes().first().map_or(0, |outcome| outcome.cost());
            let trailers = answer.into_body().collect().await.unwrap().trailers().cloned().unwrap_or_default();
            let ran = trailers.get("grpc-status").is_some_and(|status| status == "0");
            assert!(!ran || cost == 10, "{method} {headers:?}: {cost}");
        }
    }
}

// What it takes.

#[test]
fn finding_the_key_allocates_nothing() {
    let header = "x-forwarded-for";
    let lines = [(header, &b"6.6.6.6, 203.0.113.9"[..]), (header, b"10.0.0.2"), ("x-api-key", b"alpha")];
    let plain = parts(Some(CLIENT), lines);
    let mut of_axum = parts(None, lines);
    of_axum.extensions.insert(ConnectInfo(SocketAddr::new(CLIENT.parse().unwrap(), 4711)));
    let proxied = parts(Some("10.0.0.1"), lines);
    let known: HashSet<&str> = HashSet::from(["alpha", "beta"]);
    let by_key = ApiKey::verified("x-api-key", move |key| known.contains(key));
    let extractors: [(&str, &Parts, Box<dyn KeyExtractor>); 7] = [
        ("the peer", &plain, Box::new(ClientIp::peer())),
        ("the peer, of axum", &of_axum, Box::new(ClientIp::peer())),
        ("a peer that is not trusted", &plain, Box::new(ClientIp::forwarded(header).trusted_proxies(["10.0.0.0/8"]))),
        ("trusted proxies", &proxied, Box::new(ClientIp::forwarded(header).trusted_proxies(["10.0.0.0/8"]))),
        ("hops", &proxied, Box::new(ClientIp::forwarded(header).hops(2))),
        ("a verified key", &plain, Box::new(by_key.clone().or(ClientIp::peer()))),
        ("a key that is not there", &of_axum, Box::new(ApiKey::unverified("authorization").or(ClientIp::peer()))),
    ];
    for (what, parts, key) in &extractors {
        key.extract(parts).unwrap();
        let counted = allocation_counter::measure(|| {
            let _ = std::hint::black_box(key.extract(std::hint::black_box(parts)));
        });
        assert_eq!(counted.count_total, 0, "{what}");
    }
    let counted = allocation_counter::measure(|| drop(std::hint::black_box(vec![0u8; 100])));
    assert_eq!(counted.count_total, 1, "the count works");
}
