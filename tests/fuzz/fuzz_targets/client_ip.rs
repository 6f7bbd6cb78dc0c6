//! Headers of proxies and credentials, over arbitrary bytes: nothing panics, and what an outsider sends left of a trusted
//! tail changes nothing.
#![no_main]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::LazyLock;

use http::request::Parts;
use http::{HeaderName, HeaderValue, Request};
use libfuzzer_sys::{Corpus, fuzz_target};
use tower_token_bucket::{ApiKey, BucketKey, ClientIp, KeyExtractor};

const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9));
const PROXY: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// A header, what two proxies append to it, and those who read it: by trusted networks, by hops, and all of it.
struct Header {
    name: HeaderName,
    tails: [[&'static str; 2]; 2],
    by_proxies: ClientIp,
    by_hops: ClientIp,
    everything: ClientIp,
}

impl Header {
    fn new(name: &'static str, tails: [[&'static str; 2]; 2]) -> Self {
        Self {
            name: HeaderName::from_static(name),
            tails,
            by_proxies: ClientIp::forwarded(name).trusted_proxies(["10.0.0.0/8"]),
            by_hops: ClientIp::forwarded(name).hops(2),
            everything: ClientIp::forwarded(name).trusted_proxies(["0.0.0.0/0", "::/0"]),
        }
    }
}

static HEADERS: LazyLock<[Header; 2]> = LazyLock::new(|| {
    [
        Header::new("x-forwarded-for", [["203.0.113.9", "10.0.0.2"], ["[::ffff:cb00:7109]:80", "10.0.0.2:443"]]),
        Header::new(
            "forwarded",
            [
                ["for=203.0.113.9;proto=http", "for=10.0.0.2"],
                ["by=_x;host=\"\\\", for=6.6.6.6;a=\\\"\";for=\"203.0.113.9:1\"", "For=\"[::ffff:10.0.0.2]:80\""],
            ],
        ),
    ]
});

static SINGLE: LazyLock<ClientIp> = LazyLock::new(|| ClientIp::forwarded("x-real-ip").hops(1));
static BEARER: LazyLock<ApiKey> = LazyLock::new(|| ApiKey::unverified("authorization"));

fn parts(name: &HeaderName, lines: impl IntoIterator<Item = HeaderValue>) -> Parts {
    let mut parts = Request::new(()).into_parts().0;
    parts.extensions.insert(SocketAddr::new(PROXY, 4711));
    for line in lines {
        parts.headers.append(name.clone(), line);
    }
    parts
}

// The first byte says how the proxies append; lines end at line feeds.
fuzz_target!(|data: &[u8]| -> Corpus {
    let Some((how, sent)) = data.split_first() else { return Corpus::Reject };
    let lines: Option<Vec<HeaderValue>> =
        sent.split(|byte| *byte == b'\n').map(|line| HeaderValue::from_bytes(line).ok()).collect();
    let Some(lines) = lines else { return Corpus::Reject };

    for header in &*HEADERS {
        let mut appended = lines.clone();
        for (i, element) in header.tails[usize::from(how & 1)].iter().enumerate() {
            let own_line = how & (2 << i) != 0;
            if own_line {
                appended.push(HeaderValue::from_static(element));
            } else {
                let last = appended.pop().unwrap();
                let joined = [last.as_bytes(), b", ", element.as_bytes()].concat();
                appended.push(HeaderValue::from_bytes(&joined).unwrap());
            }
        }
        let parts_of_client = parts(&header.name, appended);
        assert_eq!(header.by_proxies.extract(&parts_of_client), Ok(BucketKey::ip(CLIENT)));
        assert_eq!(header.by_hops.extract(&parts_of_client), Ok(BucketKey::ip(CLIENT)));

        let parts = parts(&header.name, lines.iter().cloned());
        for by in [&header.by_proxies, &header.by_hops, &header.everything] {
            by.extract(&parts).unwrap();
        }
    }
    SINGLE.extract(&parts(&HeaderName::from_static("x-real-ip"), lines.iter().cloned())).unwrap();

    // One line is one key; it is the same with any blanks around it.
    let authorization = HeaderName::from_static("authorization");
    let key = BEARER.extract(&parts(&authorization, lines.iter().cloned()));
    if let ([line], Ok(key)) = (&*lines, key) {
        let padded = [b" \t", line.as_bytes(), b"\t "].concat();
        let padded = HeaderValue::from_bytes(&padded).unwrap();
        assert_eq!(BEARER.extract(&parts(&authorization, [padded])), Ok(key));
    }
    Corpus::Keep
});
