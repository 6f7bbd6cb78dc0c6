//! The README's code map: each file is on it, and none names what the map says that it never sees. And what the documents
//! name is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const README: &str = include_str!("../../README.md");

/// What a file that "never sees" this does not name outside its comments and tests.
const NEVER: &[(&str, &[&str])] = &[
    ("arithmetic", &["bucket::", "pace::"]),
    ("bodies", &["Body", "Bytes", "Request", "Response", "body"]),
    ("clocks", &["Instant", "SystemTime", "elapsed", "sleep", "timeout"]),
    ("clocks but Redis's", &["os.clock", "os.time", "ARGV.now"]),
    ("costs", &["Cost", "CostTable", "cost"]),
    ("credentials", &["AUTHORIZATION", "ApiKey", "credential"]),
    ("HTTP", &["Body", "HeaderMap", "HeaderValue", "Parts", "Request", "Response", "StatusCode", "http"]),
    ("identities", &["BucketKey", "IpAddr", "identity"]),
    (
        "inbound requests",
        &["ApiKey", "ClientIp", "ConnectInfo", "Limits", "MatchedPath", "OriginalUri", "TokenBucketLayer"],
    ),
    ("keys", &["BucketKey", "KeyExtractor", "extract", "key"]),
    ("paths", &["OriginalUri", "path", "uri"]),
    ("Redis", &["RedisError", "RedisStore", "redis::"]),
    ("requests", &["Body", "HeaderMap", "Parts", "Request"]),
    ("responses", &["HeaderMap", "HeaderValue", "Response", "StatusCode"]),
    ("status codes", &["401", "429", "503", "StatusCode", "status"]),
    (
        "stores",
        &["MemoryStore", "RedisStore", "acquire_at_once", "acquire_within", "crate::store", "impl Store", "redis::"],
    ),
];

/// What only the files of the second table name.
const ONLY: &[(&str, &[&str])] = &[
    ("the crate `redis`", &["pub use redis", "redis::Cmd", "redis::Client", "redis::aio", "use redis::", "redis::{"]),
    ("axum", &["axum::"]),
    ("a status code", &["StatusCode"]),
    ("the wall clock", &["SystemTime"]),
    ("the monotonic clock", &["Instant"]),
    ("a timer", &["Sleep", "interval", "sleep", "sleep_until", "timeout", "timeout_at"]),
];

#[test]
fn no_file_names_what_the_map_says_it_never_sees() {
    let (map, _) = tables();
    let mut used = BTreeSet::new();
    let mut faults = Vec::new();
    for [files, _, claims] in &map {
        for claim in claims.split(", ").filter(|claim| !claim.is_empty()) {
            let words = words(NEVER, claim);
            used.insert(claim);
            for file in sources().iter().filter(|source| paths(files).any(|path| covers(path, source))) {
                faults.extend(named(file, words).map(|(line, word)| format!("{file}:{line}: {word:?} ({claim})")));
            }
        }
    }
    assert!(faults.is_empty(), "named where the README's code map says \"never sees\":\n{}", faults.join("\n"));
    let unused: Vec<_> = NEVER.iter().map(|(claim, _)| claim).filter(|claim| !used.contains(**claim)).collect();
    assert!(unused.is_empty(), "no row of the README's code map says {unused:?}");
}

#[test]
fn what_few_files_may_name_is_named_in_those_only() {
    let (_, few) = tables();
    let mut faults = Vec::new();
    for [what, files] in &few {
        let words = words(ONLY, what);
        for file in sources() {
            let is_allowed = paths(files).any(|path| covers(path, &file));
            if !is_allowed {
                faults.extend(named(&file, words).map(|(line, word)| format!("{file}:{line}: {word:?} ({what})")));
            }
        }
        for path in paths(files) {
            if !sources().iter().any(|file| covers(path, file) && named(file, words).next().is_some()) {
                faults.push(format!("{path} does not name {what}, so the table need not allow it"));
            }
        }
    }
    assert!(faults.is_empty(), "against the README's table of what few files may name:\n{}", faults.join("\n"));
    assert_eq!(few.len(), ONLY.len(), "rows of that table, and of the test's");
}

#[test]
fn every_file_is_on_the_map_once_and_every_one_on_it_exists() {
    let (map, few) = tables();
    let listed: Vec<&str> = map.iter().flat_map(|[files, ..]| paths(files)).collect();
    for source in sources() {
        let rows: Vec<_> = listed.iter().filter(|path| covers(path, &source)).collect();
        assert_eq!(rows.len(), 1, "{source} is on the README's code map {} times: {rows:?}", rows.len());
    }
    for path in listed.into_iter().chain(few.iter().flat_map(|[_, files]| paths(files))) {
        assert!(root().join(path).exists(), "{path} of the README's code map is not there");
    }
    // `check.rs` and its like, in the description of a directory.
    for [files, what, _] in &map {
        for name in quoted(what).filter(|name| name.ends_with(".rs")) {
            let is_it = |source: &String| {
                source.ends_with(&format!("/{name}")) && paths(files).any(|path| covers(path, source))
            };
            assert!(sources().iter().any(is_it), "{name} of the README's code map is not under {files}");
        }
    }
}

/// A clock of the process is tokio's, which a test can pause. A script reads that of Redis once, and what it may call is what
/// the README's rights of a user allow.
#[test]
fn there_is_one_clock_and_scripts_call_what_their_user_may() {
    let rights = README.split_once("-@all ").unwrap().1.split_once('~').unwrap().0;
    let rights: Vec<_> = rights.split_whitespace().map(|right| right.trim_start_matches('+').to_uppercase()).collect();
    for file in sources() {
        if file.ends_with(".lua") {
            let text = without_comments(&read(&file), "--");
            assert_eq!(text.matches("'TIME'").count(), 1, "{file} reads the clock once");
            // A name in capitals is a command, or an option of `SET`.
            for name in text
                .split('\'')
                .skip(1)
                .step_by(2)
                .filter(|name| name.len() > 1 && name.chars().all(char::is_uppercase))
            {
                assert!(
                    name == "PX" || rights.iter().any(|right| right == name),
                    "{file} calls {name}, which {rights:?} lack"
                );
            }
        } else if let Some((line, word)) = named(&file, &["std::time::Instant"]).next() {
            panic!("{file}:{line}: {word}: tests cannot pause that clock");
        }
    }
}

#[test]
fn commands_and_paths_of_the_documents_name_what_there_is() {
    let guides = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().file_name());
    let guides = guides.map(|name| format!("docs/{}", name.to_str().unwrap())).filter(|name| name.ends_with(".md"));
    let mut named = Vec::new();
    for document in guides.chain(["README.md".to_owned(), "CHANGELOG.md".to_owned()]) {
        let text = read(&document);
        for (option, directory) in [("example", "examples"), ("bench", "benches"), ("bin", "benches/peers/src/bin")] {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            for after in text.split(&format!("--{option} ")).skip(1) {
                let name = after.split(|c| !is_part(c)).next().unwrap();
                // One that stands for any of them has no name.
                if !name.is_empty() {
                    named.push((format!("{directory}/{name}"), format!("{document}: --{option} {name}")));
                }
            }
        }
        let is_path =
            |word: &&str| ["benches/", "docs/", "examples/", "tests/"].iter().any(|start| word.starts_with(start));
        let words = text.split(|c: char| c.is_whitespace() || "`()[]<>,;:".contains(c)).filter(is_path);
        named.extend(words.map(|path| (path.trim_end_matches('.').to_owned(), format!("{document}: {path}"))));
    }
    assert!(named.len() > 50, "only {} were found", named.len());
    let is_there = |path: &str| [path, &format!("{path}.rs")].iter().any(|path| root().join(path).exists());
    let missing: Vec<_> = named.iter().filter(|(path, _)| !is_there(path)).collect();
    assert!(missing.is_empty(), "not there: {missing:?}");
}

#[test]
fn words_in_comments_and_tests_do_not_count_and_those_in_text_do() {
    let text = concat!(
        "//! Instant\n",
        "let a = \"redis://Instant\"; // Instant\n",
        "/* Instant\n /* Instant */ Instant */ let b = 'x'; let c = '\"'; // Instant\n",
        "let d = r#\"// \" Instant\"#; let e: &'static str = \"\\\" // Instant\";\n",
        "let f = an_Instant + Instants;\n",
        "#[cfg(test)]\nmod tests { Instant }\n",
    );
    assert_eq!(found(text, "//", &["Instant"]), [(2, "Instant"), (5, "Instant"), (5, "Instant")]);
    assert_eq!(found("call('TIME') -- TIME\n", "--", &["TIME"]), [(1, "TIME")]);
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(root().join(file)).unwrap()
}

/// The files of `src` and `lua`, as the README writes them.
fn sources() -> Vec<String> {
    fn collect(directory: &str, into: &mut Vec<String>) {
        for entry in fs::read_dir(root().join(directory)).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{directory}/{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() { collect(&path, into) } else { into.push(path) }
        }
    }
    let mut sources = Vec::new();
    collect("src", &mut sources);
    collect("lua", &mut sources);
    sources.sort();
    sources
}

/// The code map's two tables, without their heads.
fn tables() -> (Vec<[&'static str; 3]>, Vec<[&'static str; 2]>) {
    let section = README.split("\n## Code map\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let mut tables = section.split("\n|---").skip(1).map(|table| table.split_once('\n').unwrap().1);
    (rows(tables.next().unwrap()), rows(tables.next().unwrap()))
}

fn rows<const N: usize>(table: &'static str) -> Vec<[&'static str; N]> {
    let cells = |line: &'static str| {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        cells.try_into().unwrap_or_else(|cells| panic!("{N} cells, not {cells:?}"))
    };
    table.lines().take_while(|line| line.starts_with('|')).map(cells).collect()
}

fn words(of: &'static [(&str, &[&str])], claim: &str) -> &'static [&'static str] {
    let (_, words) = of.iter().find(|(known, _)| *known == claim).unwrap_or_else(|| panic!("no words for {claim:?}"));
    words
}

fn quoted(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn paths(cell: &str) -> impl Iterator<Item = &str> {
    quoted(cell).filter(|path| path.starts_with("src/") || path.starts_with("lua/"))
}

/// Whether `source` is that file, or below that directory, or below the directory of the file's name.
fn covers(path: &str, source: &str) -> bool {
    let directory = path.strip_suffix(".rs").unwrap_or(path.trim_end_matches('/'));
    source == path || source.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/'))
}

/// Line and word of each place where one of the words stands.
fn named(file: &str, words: &'static [&'static str]) -> impl Iterator<Item = (usize, &'static str)> {
    let marker = if file.ends_with(".lua") { "--" } else { "//" };
    found(&read(file), marker, words).into_iter()
}

fn found(text: &str, marker: &str, words: &'static [&'static str]) -> Vec<(usize, &'static str)> {
    let code = without_comments(text, marker);
    let code = code.split("#[cfg(test)]\nmod tests").next().unwrap();
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (number, line) in code.lines().enumerate() {
        for &word in words {
            let is_part_of_another = |at: usize| {
                let (before, after) = (line[..at].chars().next_back(), line[at + word.len()..].chars().next());
                word.starts_with(is_part) && before.is_some_and(is_part)
                    || word.ends_with(is_part) && after.is_some_and(is_part)
            };
            found.extend(
                line.match_indices(word).filter(|(at, _)| !is_part_of_another(*at)).map(|_| (number + 1, word)),
            );
        }
    }
    found
}

/// The text with its lines, and without what a comment says. Text in quotes stays, whatever it looks like.
fn without_comments(text: &str, marker: &str) -> String {
    let mut code = String::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = if rest.starts_with(marker) {
            rest.find('\n').unwrap_or(rest.len())
        } else if marker == "//" && rest.starts_with("/*") {
            block_comment(rest)
        } else {
            let length = quoted_text(rest).unwrap_or(c.len_utf8());
            code.push_str(&rest[..length]);
            rest = &rest[length..];
            continue;
        };
        code.extend(rest[..length].chars().filter(|c| *c == '\n'));
        rest = &rest[length..];
    }
    code
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    loop {
        let step = match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                2
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                2
            }
            [] => return at,
            _ => 1,
        };
        at += step;
        if depth == 0 {
            return at;
        }
    }
}

/// The length of the literal that the text begins with.
fn quoted_text(text: &str) -> Option<usize> {
    if let Some(hashes) = text.strip_prefix('r').map(|rest| rest.len() - rest.trim_start_matches('#').len())
        && text[1 + hashes..].starts_with('"')
    {
        let end = format!("\"{}", "#".repeat(hashes));
        let begin = hashes + 2;
        return Some(begin + text[begin..].find(&end)? + end.len());
    }
    // The quote itself as a character.
    if text.starts_with("'\"'") || text.starts_with("'\\\"'") {
        return Some(1 + text[1..].find('\'')? + 1);
    }
    let inside = text.strip_prefix('"')?;
    let mut escaped = false;
    let end = inside.find(|c| {
        let is_end = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        is_end
    })?;
    Some(end + 2)
}
