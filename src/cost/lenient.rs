//! Paths that a lenient server takes for others.

use std::borrow::Cow;

/// A path in the form to which servers that are lenient reduce it.
pub(super) struct LenientPath(Vec<u8>);

impl LenientPath {
    /// `None` for a path that every server takes for itself.
    pub(super) fn new(path: &str) -> Option<Self> {
        let bytes = path.as_bytes();
        let strict = !bytes.iter().any(|byte| byte.is_ascii_uppercase() || matches!(byte, b'%' | b';'))
            && !bytes.windows(2).any(|pair| pair == b"//")
            && (bytes.len() <= 1 || !bytes.ends_with(b"/"));
        if strict {
            return None;
        }
        let mut reduced = Vec::with_capacity(bytes.len());
        let mut rest = bytes;
        let mut parameter = false;
        while let [first, after @ ..] = rest {
            let mut byte = *first;
            rest = after;
            if byte == b'%'
                && let [high, low, after @ ..] = rest
                && let (Some(high), Some(low)) = ((*high as char).to_digit(16), (*low as char).to_digit(16))
            {
                byte = (high * 16 + low) as u8;
                rest = after;
            }
            parameter = byte != b'/' && (parameter || byte == b';');
            let doubled = byte == b'/' && reduced.last() == Some(&b'/');
            if !parameter && !doubled {
                reduced.push(byte);
            }
        }
        if reduced.len() > 1 && reduced.ends_with(b"/") {
            reduced.pop();
        }
        Some(Self(reduced))
    }

    /// How specific the template is where it matches, segment by segment; the more so, the greater.
    pub(super) fn matches(&self, template: &str) -> Option<Vec<u8>> {
        let mut specific = Vec::new();
        let mut segments = self.0.split(|byte| *byte == b'/');
        // A trailing slash is none here.
        for wanted in template.strip_suffix('/').unwrap_or(template).split('/') {
            let (literal, parameter) = literal_of(wanted);
            let segment = segments.next().filter(|segment| starts_with(segment, &literal))?;
            let rank = match parameter {
                // The rest, whatever follows.
                Some('*') => {
                    specific.push(u8::from(!literal.is_empty()));
                    return Some(specific);
                }
                Some(_) => 2 + u8::from(!literal.is_empty()),
                None if segment.len() == literal.len() => 4,
                None => return None,
            };
            specific.push(rank);
        }
        segments.next().is_none().then_some(specific)
    }
}

fn starts_with(segment: &[u8], literal: &str) -> bool {
    segment.get(..literal.len()).is_some_and(|start| start.eq_ignore_ascii_case(literal.as_bytes()))
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
