//! The fields in which a peer says what is left: `RateLimit` of the drafts 6 to 11, and `X-RateLimit-*`.
//!
//! Drafts 8 to 11 have a list of limits, `"name";r=4;t=60`; draft 7 has a dictionary, `limit=5, remaining=4, reset=60`; draft 6
//! has a field for each number
//! ([draft-ietf-httpapi-ratelimit-headers](https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/)). Those that
//! begin with `X-` have no specification.

use std::cmp::Reverse;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;
use sfv::{BareItem, Dictionary, Item, List, ListEntry, Parser};

use super::peer::{MOST, Remaining, seconds};

/// An `X-RateLimit-Reset` from here on is no time to wait but a moment, in seconds since 1970; from here on in
/// milliseconds.
const MOMENT: u64 = 1_000_000_000;
const MOMENT_MS: u64 = MOMENT * 1000;

/// What is left of the limit that binds. Fields that are malformed are as good as none.
pub(super) fn remaining(headers: &HeaderMap, now: SystemTime) -> Option<Remaining> {
    of_ratelimit(headers)
        .or_else(|| of_numbers(headers, ["ratelimit-remaining", "ratelimit-reset"], now))
        .or_else(|| of_numbers(headers, ["x-ratelimit-remaining", "x-ratelimit-reset"], now))
}

fn of_ratelimit(headers: &HeaderMap) -> Option<Remaining> {
    // Several lines are one list.
    let mut lines = headers.get_all("ratelimit").iter();
    let first = lines.next()?;
    let line = lines.fold(first.as_bytes().to_vec(), |line, next| [&*line, b", ", next.as_bytes()].concat());
    match Parser::new(&line).parse::<List>() {
        Ok(list) => list.iter().filter_map(of_item).min_by_key(|left| (left.tokens, Reverse(left.wait))),
        Err(_) => {
            let dictionary: Dictionary = Parser::new(&line).parse().ok()?;
            let number = |name: &str| match dictionary.get(name) {
                Some(ListEntry::Item(item)) => number(&item.bare_item),
                _ => None,
            };
            Some(of(number("remaining")?, number("reset")?))
        }
    }
}

/// One limit of a list, named by a string or, as the next draft has it, by a token.
fn of_item(entry: &ListEntry) -> Option<Remaining> {
    let ListEntry::Item(Item { bare_item: BareItem::String(_) | BareItem::Token(_), params }) = entry else {
        return None;
    };
    Some(of(number(params.get("r")?)?, number(params.get("t")?)?))
}

fn number(item: &BareItem) -> Option<u64> {
    item.as_integer().and_then(|number| u64::try_from(i64::from(number)).ok())
}

fn of(tokens: u64, seconds: u64) -> Remaining {
    Remaining { tokens, wait: Duration::from_secs(seconds).min(MOST) }
}

/// Two fields of one number each.
fn of_numbers(headers: &HeaderMap, names: [&str; 2], now: SystemTime) -> Option<Remaining> {
    let [tokens, reset] = names.map(|name| {
        let mut lines = headers.get_all(name).iter();
        // Of several nobody knows which holds.
        lines.next().filter(|_| lines.next().is_none()).and_then(seconds)
    });
    let (tokens, reset) = (tokens?, reset?);
    let moment = match reset {
        ..MOMENT => return Some(of(tokens, reset)),
        MOMENT..MOMENT_MS => Duration::from_secs(reset),
        MOMENT_MS.. => Duration::from_millis(reset),
    };
    let now = now.duration_since(UNIX_EPOCH).ok()?;
    Some(Remaining { tokens, wait: moment.saturating_sub(now).min(MOST) })
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};
    use serde_json::Value;

    use super::*;

    const FORMATS: &str = include_str!("../../tests/vectors/ratelimit_header_formats.json");
    const DRAFT: &str = include_str!("../../tests/vectors/ratelimit_draft_examples.json");
    const NOW: u64 = 1_764_500_000;

    fn read<'a>(fields: impl IntoIterator<Item = (&'a str, &'a str)>) -> Option<(u64, u64)> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
            headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value);
        }
        let remaining = remaining(&headers, UNIX_EPOCH + Duration::from_secs(NOW))?;
        Some((remaining.tokens, remaining.wait.as_secs()))
    }

    fn line(value: &str) -> Option<(u64, u64)> {
        read([("ratelimit", value)])
    }

    #[test]
    fn all_formats_of_express_rate_limit() {
        let vectors: Value = serde_json::from_str(FORMATS).unwrap();
        let cases = vectors["cases"].as_array().unwrap();
        // Two hours are one.
        let wanted = [("legacy", (4, 60)), ("06", (4, 60)), ("07", (4, 60)), ("08", (4, 3600)), ("08 multi", (0, 5))];
        assert_eq!(cases.len(), wanted.len());
        let moment = (NOW + 60).to_string();
        for (case, (draft, left)) in cases.iter().zip(wanted) {
            assert_eq!(case["draft"], draft);
            let fields = case["headers"].as_object().unwrap().iter();
            let fields = fields.map(|(name, value)| (&**name, value.as_str().unwrap()));
            let fields = fields.map(|(name, value)| (name, if value == "<unix seconds>" { &moment } else { value }));
            assert_eq!(read(fields), Some(left), "{draft}");
        }
    }

    #[test]
    fn all_examples_of_the_draft() {
        let vectors: Value = serde_json::from_str(DRAFT).unwrap();
        let rows = |name: &str| vectors[name].as_array().unwrap().clone();
        for row in rows("draft11_ratelimit") {
            let item = &row[1][0][1];
            // Without a `t` there is no time to wait.
            let left = item["t"].as_u64().map(|t| (item["r"].as_u64().unwrap(), t.min(3600)));
            assert_eq!(line(row[0].as_str().unwrap()), left, "{row}");
        }
        // A policy says nothing of what is left.
        for row in rows("draft11_policy") {
            assert_eq!(line(row[0].as_str().unwrap()), None, "{row}");
        }
        for row in rows("malformed_must_be_ignored_whole") {
            let value = row.as_str().unwrap();
            // What is no list of draft 11 can be the dictionary of draft 7.
            let left = value.starts_with("limit=").then_some((4, 60));
            assert_eq!(line(value), left, "{row}");
        }
        for row in rows("well_formed_sf_but_invalid_values") {
            assert_eq!(line(row.as_str().unwrap()), None, "{row}");
        }
    }

    /// Lists as structured fields have them, with what a limit needs appended to each of their members.
    #[test]
    fn all_lists_of_the_structured_field_tests() {
        let (mut read, mut refused) = (0, 0);
        for file in [
            include_str!("../../tests/vectors/structured-field-tests/list.json"),
            include_str!("../../tests/vectors/structured-field-tests/param-list.json"),
            include_str!("../../tests/vectors/structured-field-tests/token.json"),
            include_str!("../../tests/vectors/structured-field-tests/string.json"),
            include_str!("../../tests/vectors/structured-field-tests/number.json"),
            include_str!("../../tests/vectors/structured-field-tests/binary.json"),
            include_str!("../../tests/vectors/structured-field-tests/item.json"),
        ] {
            let rows: Vec<Value> = serde_json::from_str(file).unwrap();
            for row in rows {
                let raw: Vec<&str> = row["raw"].as_array().unwrap().iter().map(|raw| raw.as_str().unwrap()).collect();
                let is_list = row["header_type"] == "list";
                let text = raw.join(", ");
                let parsed = Parser::new(&text).parse::<List>();
                let must_fail = row["must_fail"] == true;
                if row["can_fail"] != true && (is_list || !must_fail) {
                    // An item is a list of one, and an empty list is a list.
                    assert_eq!(parsed.is_err(), must_fail, "{row}");
                }
                let Ok(value) = HeaderValue::from_bytes(format!("{text};r=7;t=9").as_bytes()) else { continue };
                let headers = HeaderMap::from_iter([(HeaderName::from_static("ratelimit"), value)]);
                let left = remaining(&headers, UNIX_EPOCH);
                let named = |member: &Value| {
                    let is_token = member[0]["__type"] == "token";
                    member[0].is_string() || is_token
                };
                let members = row["expected"].as_array();
                let last = if is_list { members.and_then(|members| members.last()) } else { Some(&row["expected"]) };
                match last {
                    _ if must_fail || row["can_fail"] == true => refused += usize::from(left.is_none()),
                    Some(last) if named(last) => {
                        assert_eq!(left.map(|left| (left.tokens, left.wait.as_secs())), Some((7, 9)), "{row}");
                        read += 1;
                    }
                    _ => assert_eq!(left, None, "{row}"),
                }
            }
        }
        assert!(read >= 20 && refused >= 50, "{read} read, {refused} refused");
    }

    #[test]
    fn of_several_limits_the_one_with_the_least_counts_and_among_those_the_longest_wait() {
        assert_eq!(line(r#""second";r=3;t=1, "day";r=50;t=3000"#), Some((3, 1)));
        assert_eq!(line(r#""second";r=0;t=1, "day";r=0;t=3000"#), Some((0, 3000)));
        assert_eq!(read([("ratelimit", r#""a";r=3;t=1"#), ("ratelimit", r#""b";r=0;t=4"#)]), Some((0, 4)), "lines");
        assert_eq!(line(r#""a";r=0;t=4, "b";r=-1;t=9, c;r=1.5;t=9, ("d");r=0;t=9, 5;r=0;t=9"#), Some((0, 4)));
        assert_eq!(line(r#""a";r=0;t=999999999"#), Some((0, 3600)), "an hour at most");
    }

    #[test]
    fn what_is_malformed_is_ignored_and_what_is_well_formed_beside_it_is_read() {
        let x = ("x-ratelimit-remaining", "0");
        assert_eq!(read([("ratelimit", "\"a\";r="), x, ("x-ratelimit-reset", "5")]), Some((0, 5)));
        assert_eq!(read([x]), None);
        for reset in ["", "-1", "1.5", "soon", "Mon, 03 Jun 2019 11:30:12 GMT"] {
            assert_eq!(read([x, ("x-ratelimit-reset", reset)]), None, "{reset}");
        }
        assert_eq!(read([x, x, ("x-ratelimit-reset", "5")]), None, "two that may differ");
    }

    #[test]
    fn a_reset_is_a_time_or_a_moment_in_seconds_or_milliseconds() {
        let reset = |reset: u64| read([("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", &reset.to_string())]);
        assert_eq!(reset(90), Some((0, 90)));
        assert_eq!(reset(NOW + 90), Some((0, 90)));
        assert_eq!(reset((NOW + 90) * 1000), Some((0, 90)));
        assert_eq!(reset(NOW - 90), Some((0, 0)), "in the past");
        assert_eq!(reset(u64::MAX), Some((0, 3600)));
    }
}
