//! Paths that a lenient server takes for others.

use std::borrow::Cow;

use smallvec::SmallVec;

/// How specific a template is where it matches, segment by segment; the more so, the greater.
type Specific = SmallVec<[u8; 16]>;

/// More readings of one path than this are not looked at: it costs the most that its method can.
const READINGS_MAX: usize = 16;
/// Nor are those of a path that is longer, in bytes.
const PATH_MAX: usize = 4 << 10;

/// What a lenient server may take the path for, first of all for itself: all that comes of it when a server does some of
/// what servers do to paths, in any order, any number of times. `None` when that is too much.
pub(super) fn readings(path: &str) -> Option<Vec<Vec<u8>>> {
    if path.len() > PATH_MAX {
        return None;
    }
    let mut readings = vec![path.as_bytes().to_vec()];
    let mut next = 0;
    while let Some(path) = readings.get(next) {
        let read = [decoded, without_parameters, without_doubled_slashes, without_dots, without_last_slash];
        for other in read.map(|read| read(path)) {
            if !readings.contains(&other) {
                readings.push(other);
            }
        }
        if readings.len() > READINGS_MAX {
            return None;
        }
        next += 1;
    }
    Some(readings)
}

/// Whether servers differ about a path: by its case, `%`, `;parameters`, doubled or last slashes, or dots.
pub(super) fn is_ambiguous(path: &str) -> bool {
    let bytes = path.as_bytes();
    bytes.iter().any(|byte| !byte.is_ascii() || byte.is_ascii_uppercase() || matches!(byte, b'%' | b';'))
        || bytes.windows(2).any(|pair| matches!(pair, b"//" | b"/."))
        || (bytes.len() > 1 && bytes.ends_with(b"/"))
}

/// `%2F` is `/`.
fn decoded(path: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(path.len());
    let mut rest = path;
    while let [first, after @ ..] = rest {
        let digit = |at: usize| after.get(at).and_then(|digit| char::from(*digit).to_digit(16));
        if let (b'%', Some(high), Some(low)) = (*first, digit(0), digit(1)) {
            decoded.push((high * 16 + low) as u8);
            rest = &after[2..];
        } else {
            decoded.push(*first);
            rest = after;
        }
    }
    decoded
}

/// `/a;b=c/d` is `/a/d`.
fn without_parameters(path: &[u8]) -> Vec<u8> {
    let mut parameter = false;
    let mut kept = path.to_vec();
    kept.retain(|byte| {
        parameter = *byte != b'/' && (parameter || *byte == b';');
        !parameter
    });
    kept
}

fn without_doubled_slashes(path: &[u8]) -> Vec<u8> {
    let mut kept = path.to_vec();
    kept.dedup_by(|a, b| *a == b'/' && *b == b'/');
    kept
}

fn without_last_slash(path: &[u8]) -> Vec<u8> {
    let length = path.iter().rposition(|byte| *byte != b'/').map_or(1, |last| last + 1);
    path[..length.min(path.len())].to_vec()
}

/// `/a/./b/../c` is `/a/c` (RFC 3986, section 5.2.4).
fn without_dots(path: &[u8]) -> Vec<u8> {
    let mut kept: Vec<&[u8]> = Vec::new();
    let mut ends_in_dots = false;
    for segment in path.split(|byte| *byte == b'/') {
        ends_in_dots = matches!(segment, b"." | b"..");
        match segment {
            // The empty one before the first slash stays.
            b".." if kept.len() > 1 => drop(kept.pop()),
            b"." | b".." => {}
            segment => kept.push(segment),
        }
    }
    if ends_in_dots {
        kept.push(b"");
    }
    kept.join(&b'/')
}

/// How specific the template is where it matches the path. A last slash of the template is none.
pub(super) fn matches(path: &[u8], template: &str, any_case: bool) -> Option<Specific> {
    let mut specific = Specific::new();
    let mut segments = path.split(|byte| *byte == b'/');
    for wanted in template.strip_suffix('/').unwrap_or(template).split('/') {
        let (literal, parameter) = literal_of(wanted);
        let segment = segments.next()?;
        let length = starts_with(segment, literal.as_bytes(), any_case)?;
        let rank = match parameter {
            // The rest, whatever follows.
            Some('*') => {
                specific.push(u8::from(!literal.is_empty()));
                return Some(specific);
            }
            Some(_) if segment.len() > length => 2 + u8::from(!literal.is_empty()),
            None if segment.len() == length => 4,
            _ => return None,
        };
        specific.push(rank);
    }
    segments.next().is_none().then_some(specific)
}

/// The length of the literal, as it is written or decoded, that the segment starts with.
fn starts_with(segment: &[u8], literal: &[u8], any_case: bool) -> Option<usize> {
    let starts = |literal: &[u8]| {
        let start = segment.get(..literal.len())?;
        (start == literal || (any_case && start.eq_ignore_ascii_case(literal))).then_some(literal.len())
    };
    starts(literal).or_else(|| literal.contains(&b'%').then(|| decoded(literal)).and_then(|literal| starts(&literal)))
}
/// The literal start of a template's segment, and what its parameter starts with, if it has one.
fn literal_of(segment: &str) -> (Cow<'_, str>, Option<char>) {
    let Some(brace) = segment.find(['{', '}']) else { return (Cow::Borrowed(segment), None) };
    let mut literal = segment[..brace].to_owned();
    let mut rest = segment[brace..].chars();
    while let Some(c) = rest.next() {
        match (c, rest.as_str().chars().next()) {
            // A doubled brace is a literal one.
            ('{', Some('{')) | ('}', Some('}')) => {
                rest.next();
                literal.push(c);
            }
            ('{', first) => return (Cow::Owned(literal), first),
            (c, _) => literal.push(c),
        }
    }
    (Cow::Owned(literal), None)
}
