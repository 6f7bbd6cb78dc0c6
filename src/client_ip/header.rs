//! The addresses in a header that proxies set, from the right: the last element is what the nearest proxy has written,
//! and whoever reads no further reads nothing that a client has.

use std::net::{IpAddr, Ipv6Addr};

use crate::key::canonical;

/// How a header holds addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `203.0.113.9, 10.1.2.3`: X-Forwarded-For.
    List,
    /// `for=203.0.113.9;proto=https, for="[2001:db8::1]:4711"`: RFC 7239.
    Forwarded,
    /// One line with one address.
    Single,
}

impl Form {
    /// The addresses of all lines, from the right; `None` for an element that cannot be read.
    pub(super) fn elements<'a>(
        self,
        lines: impl DoubleEndedIterator<Item = &'a [u8]> + 'a,
    ) -> impl Iterator<Item = Option<IpAddr>> + 'a {
        let mut lines = lines.rev();
        let mut rest: Option<&[u8]> = lines.next();
        let only = lines.next();
        let single = self == Self::Single;
        // Two lines of what has to be one say nothing.
        let mut ambiguous = single && only.is_some();
        let mut lines = only.into_iter().chain(lines);
        std::iter::from_fn(move || {
            let line = rest?;
            if std::mem::take(&mut ambiguous) {
                rest = None;
                return Some(None);
            }
            let comma = match self {
                Self::List => line.iter().rposition(|byte| *byte == b','),
                Self::Forwarded => last_comma(line),
                Self::Single => None,
            };
            let element = match comma {
                Some(comma) => {
                    rest = Some(&line[..comma]);
                    &line[comma + 1..]
                }
                None => {
                    rest = lines.next();
                    line
                }
            };
            Some(match self {
                Self::Forwarded => forwarded_for(element).and_then(address),
                Self::List | Self::Single => address(element),
            })
        })
    }
}

/// The last comma outside a quoted string, seen from the right: quotes are paired from there, so that one that is never
/// closed spoils nothing that stands right of it.
fn last_comma(line: &[u8]) -> Option<usize> {
    let mut quoted = false;
    for (i, byte) in line.iter().enumerate().rev() {
        match byte {
            b'"' if !is_escaped(line, i) => quoted = !quoted,
            b',' if !quoted => return Some(i),
            _ => {}
        }
    }
    None
}

/// Whether an odd number of backslashes stands before `i`.
fn is_escaped(line: &[u8], i: usize) -> bool {
    line[..i].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// The value of the first `for` parameter, without its quotes.
fn forwarded_for(element: &[u8]) -> Option<&[u8]> {
    let mut rest = element;
    loop {
        let mut quoted = false;
        let end = rest.iter().enumerate().position(|(i, byte)| {
            quoted ^= *byte == b'"' && !is_escaped(rest, i);
            *byte == b';' && !quoted
        });
        let parameter = &rest[..end.unwrap_or(rest.len())];
        let equals = parameter.iter().position(|byte| *byte == b'=');
        if let Some(equals) = equals
            && parameter[..equals].trim_ascii_start().eq_ignore_ascii_case(b"for")
        {
            let value = parameter[equals + 1..].trim_ascii();
            let unquoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            return Some(unquoted.unwrap_or(value));
        }
        rest = &rest[end? + 1..];
    }
}

/// An address with or without a port, brackets and a zone; `None` for anything else, and for the unspecified address.
/// The zone is dropped: it has a meaning on one machine only.
fn address(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?.trim_matches([' ', '\t']);
    let parsed = if let Some(bracketed) = text.strip_prefix('[') {
        let (inside, port) = bracketed.split_once(']')?;
        if !port.is_empty() {
            is_port(port.strip_prefix(':')?).then_some(())?;
        }
        without_zone(inside)?.parse().ok()?
    } else if let Ok(address) = text.parse::<IpAddr>() {
        address
    } else if let Some(address) = without_zone(text).filter(|address| address.len() < text.len()) {
        address.parse::<Ipv6Addr>().ok()?.into()
    } else {
        let (host, port) = text.split_once(':')?;
        is_port(port).then_some(())?;
        host.parse::<std::net::Ipv4Addr>().ok()?.into()
    };
    let address = canonical(parsed);
    (!address.is_unspecified()).then_some(address)
}

/// Cuts `%eth0` off an IPv6 address.
fn without_zone(text: &str) -> Option<&str> {
    match text.split_once('%') {
        Some((address, zone)) if !zone.is_empty() && address.contains(':') => Some(address),
        Some(_) => None,
        None => Some(text),
    }
}

/// A number, or an obfuscated port of RFC 7239.
fn is_port(port: &str) -> bool {
    let obfuscated = port.strip_prefix('_').unwrap_or(port);
    !obfuscated.is_empty()
        && port.len() <= 64
        && (obfuscated.len() < port.len() || port.len() <= 5)
        && obfuscated.bytes().all(|byte| {
            byte.is_ascii_digit()
                || (obfuscated.len() < port.len() && (byte.is_ascii_alphabetic() || matches!(byte, b'.' | b'_' | b'-')))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walked(form: Form, lines: &[&str]) -> Vec<Option<String>> {
        let lines: Vec<&[u8]> = lines.iter().map(|line| line.as_bytes()).collect();
        form.elements(lines.into_iter()).map(|address| address.map(|address| address.to_string())).collect()
    }

    #[track_caller]
    fn check(form: Form, lines: &[&str], expected: &[&str]) {
        let walked = walked(form, lines);
        let walked: Vec<_> = walked.iter().map(|address| address.as_deref().unwrap_or("-")).collect();
        assert_eq!(walked, expected, "{lines:?}");
    }

    #[test]
    fn all_lines_are_one_list_walked_from_the_right() {
        check(
            Form::List,
            &["1.1.1.1, 2.2.2.2:80", "[2001:db8::1]:443,3.3.3.3"],
            &["3.3.3.3", "2001:db8::1", "2.2.2.2", "1.1.1.1"],
        );
        check(Form::List, &["1.1.1.1, nope", ", 2.2.2.2,"], &["-", "2.2.2.2", "-", "-", "1.1.1.1"]);
        check(Form::List, &[], &[]);
        check(Form::List, &[""], &["-"]);
    }

    #[test]
    fn quotes_are_paired_from_the_right() {
        check(Form::Forwarded, &["For=\"1.1.1.1, For=2.2.2.2"], &["2.2.2.2", "-"]);
        check(Form::Forwarded, &["for=9.9.9.9;host=\"evil, for=6.6.6.6\""], &["9.9.9.9"]);
        check(Form::Forwarded, &["for=9.9.9.9;host=\"a\\\", for=6.6.6.6\""], &["9.9.9.9"]);
        check(Form::Forwarded, &["for=\"", "for=\"[2001:db8::1]:4711\";by=x"], &["2001:db8::1", "-"]);
        check(Form::Forwarded, &["host=\"for=1.1.1.1;x\";FOR=2.2.2.2"], &["2.2.2.2"]);
        check(Form::Forwarded, &["proto=https", "for=_hidden, for=unknown"], &["-", "-", "-"]);
    }

    #[test]
    fn a_header_of_one_address_has_one_line() {
        check(Form::Single, &["1.1.1.1:80"], &["1.1.1.1"]);
        check(Form::Single, &["1.1.1.1", "2.2.2.2"], &["-"]);
        check(Form::Single, &["1.1.1.1, 2.2.2.2"], &["-"]);
    }

    #[test]
    fn addresses_come_with_ports_brackets_zones_and_in_ipv6_clothes() {
        for (text, expected) in [
            ("192.0.2.7", "192.0.2.7"),
            ("\t192.0.2.7:99 ", "192.0.2.7"),
            ("192.0.2.7:_abc", "192.0.2.7"),
            ("::ffff:192.0.2.7", "192.0.2.7"),
            ("::ffff:c000:207", "192.0.2.7"),
            ("[::ffff:192.0.2.7]:80", "192.0.2.7"),
            ("[1.1.1.1]", "1.1.1.1"),
            ("2001:DB8::1", "2001:db8::1"),
            ("fe80::1%eth0", "fe80::1"),
            ("[fe80::1%25eth0]:80", "fe80::1"),
            ("0.0.0.0", "-"),
            ("::", "-"),
            ("[::1", "-"),
            ("::1]", "-"),
            ("[::1]x", "-"),
            ("[::1]:", "-"),
            ("[::1]:http", "-"),
            ("192.0.2.7:", "-"),
            ("192.0.2.7:123456", "-"),
            ("192.0.2.7%eth0", "-"),
            ("192.0.2.999", "-"),
            ("192.0.2.07", "-"),
            ("1.1.1.1 2.2.2.2", "-"),
            ("fe80::1%", "-"),
            ("", "-"),
        ] {
            check(Form::List, &[text], &[expected]);
        }
    }
}
