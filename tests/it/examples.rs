//! Every program of `examples/`, built and started as its reader does, and asked over its port.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::server::Server;
use crate::servers::{Answer, Browser};

/// How often, what, with which field; the status, and what is in the answer.
type Exchange = (usize, &'static str, &'static str, u16, &'static [&'static str]);

/// HTTP servers, how they are started, and what they answer one after the other.
const SERVERS: [(&str, &[&str], &[Exchange]); 8] = [
    (
        "minimal",
        &["127.0.0.1:0"],
        &[
            (1, "GET /", "", 200, &["ratelimit: \"per-address\";r=4;t=48", "Hello"]),
            (4, "GET /", "", 200, &["ratelimit-policy: \"per-address\";q=5;w=60"]),
            (1, "GET /", "", 429, &["retry-after: ", "#quota-exceeded"]),
        ],
    ),
    (
        "plans",
        &["127.0.0.1:0"],
        &[
            (3, "GET /", "x-api-key: alpha", 200, &["\"per-key\";q=3;w=60"]),
            (1, "GET /", "x-api-key: alpha", 429, &["retry-after: "]),
            (9, "GET /", "x-api-key: beta", 200, &["\"per-key\";q=100;w=10"]),
            (1, "GET /", "x-api-key: gamma", 401, &["www-authenticate: ApiKey header=\"x-api-key\""]),
            (1, "GET /", "", 401, &[]),
        ],
    ),
    (
        "behind_proxy",
        &["127.0.0.1:0"],
        &[
            (3, "GET /", "x-forwarded-for: 203.0.113.9", 200, &["\"per-client\""]),
            (2, "GET /", "x-forwarded-for: 198.51.100.7, 203.0.113.9", 200, &[]),
            (1, "GET /", "x-forwarded-for: 198.51.100.8, 203.0.113.9", 429, &[]),
            (1, "GET /", "x-forwarded-for: 198.51.100.7", 200, &["r=4"]),
        ],
    ),
    (
        "behind_proxy",
        &["127.0.0.1:0", "10.0.0.0/8", "2001:db8::/32"],
        &[
            (5, "GET /", "x-forwarded-for: 203.0.113.9", 200, &[]),
            (1, "GET /", "x-forwarded-for: 198.51.100.7", 429, &[]),
        ],
    ),
    (
        "hyper",
        &["127.0.0.1:0"],
        &[
            (1, "GET /search", "", 200, &["ratelimit: \"per-address\";r=2;t=24", "Hello from /search"]),
            (1, "GET /search", "", 429, &["retry-after: "]),
            (9, "GET /health", "", 200, &["Hello from /health"]),
            (2, "GET /users/7", "", 200, &[]),
            (1, "GET /users/7", "", 429, &[]),
        ],
    ),
    (
        "rejection",
        &["127.0.0.1:0"],
        &[
            (1, "GET /rows?count=3", "", 200, &["{\"rows\":[]}", "r=2"]),
            (1, "GET /rows?count=3", "", 429, &["content-type: application/json", "retry-after: ", "no-store", "r=2"]),
            (1, "GET /rows?count=3", "", 429, &["\"code\":\"rate_limited\"", "\"limits\":[\"per-address\"]"]),
            (1, "GET /rows?count=9", "", 429, &["\"code\":\"too_expensive\"", "\"retry_after_ms\":null"]),
            (2, "GET /rows", "", 200, &[]),
        ],
    ),
    (
        "dashboard",
        &["--listen", "127.0.0.1:0"],
        &[
            (1, "GET /search", "x-api-key: alpha", 200, &["ratelimit: \"per-key\";r=17;t=17"]),
            (1, "GET /", "", 200, &["content-security-policy: default-src 'none'", "</html>"]),
            (1, "GET /stats", "", 200, &["\"route\":\"GET /search\"", "\"key\":\"key:", "\"kind\":\"memory\""]),
        ],
    ),
    (
        "api",
        &["--listen", "127.0.0.1:0"],
        &[
            (1, "GET /users/7", "x-api-key: beta", 200, &["ratelimit: \"per-key\";r=19;t=19", "{\"id\":\"7\"}"]),
            (1, "POST /reports/generate", "x-api-key: beta", 200, &[]),
            (1, "POST /reports/generate", "x-api-key: beta", 429, &["retry-after: 1"]),
            (1, "GET /health", "", 200, &["\"GET /users/{id}\":1", "\"POST /reports/generate\":1"]),
        ],
    ),
];

/// Those that have a test of their own below.
const OTHERS: [&str; 7] = ["consumer", "custom_store", "dispatcher", "metrics", "redis", "reqwest", "tonic"];

/// The examples that these features allow, by name. Nothing is left to build where cargo has built them along with the
/// tests.
fn binaries() -> &'static BTreeMap<String, PathBuf> {
    static BUILT: OnceLock<BTreeMap<String, PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let this = std::env::current_exe().unwrap();
        // As these tests were built: target/PROFILE/deps/it-HASH.
        let profile = match this.ancestors().nth(2).and_then(|path| path.file_name()?.to_str()).unwrap() {
            "debug" => "dev",
            profile => profile,
        };
        let features = [("metrics", cfg!(feature = "metrics")), ("rustls", cfg!(feature = "rustls"))];
        let features: Vec<_> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
        let mut build = Command::new(env!("CARGO"));
        // What cargo sets for a test would make build scripts run again that look at it, and all that follows.
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        for name in names.filter(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            build.env_remove(name);
        }
        let output = build
            .args(["build", "--locked", "--examples", "--message-format=json-render-diagnostics"])
            .args(["--profile", profile, "--features", &features.join(",")])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = String::from_utf8(output.stdout).unwrap();
        let messages = lines.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let examples = messages.filter(|message| message["target"]["kind"][0] == "example");
        let named = examples.filter_map(|message| {
            Some((message["target"]["name"].as_str()?.to_owned(), message["executable"].as_str()?.into()))
        });
        named.collect()
    })
}

/// A program that listens, until it is dropped.
struct Running {
    process: Child,
    /// Open, so that what it prints later harms nothing.
    stdout: BufReader<ChildStdout>,
    url: String,
}

impl Running {
    fn start(example: &str, arguments: &[&str], env: &[(&str, &str)]) -> Self {
        let mut command = Command::new(&binaries()[example]);
        command.args(arguments).envs(env.iter().copied()).env_remove("RUST_LOG");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        let mut running = Self { process, stdout, url: String::new() };
        let mut line = String::new();
        running.stdout.read_line(&mut line).unwrap();
        let url = line.trim_end().strip_prefix("listening on ");
        running.url = url.unwrap_or_else(|| panic!("{example} {arguments:?} does not start: {line:?}")).to_owned();
        running
    }

    fn browser(&self) -> Browser {
        Browser::new(self.url.strip_prefix("http://").unwrap().parse().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a program to its end.
fn run(example: &str, arguments: &[&str]) -> Output {
    Command::new(&binaries()[example]).args(arguments).env_remove("REDIS_URL").stdin(Stdio::null()).output().unwrap()
}

#[track_caller]
fn printed(output: &Output) -> &str {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    std::str::from_utf8(&output.stdout).unwrap()
}

async fn ask(browser: &Browser, request: &str, field: &str) -> Answer {
    let (method, path) = request.split_once(' ').unwrap();
    browser.send_with(method, path, field.split_once(": "), "").await
}

#[test]
fn every_example_is_run_here() {
    for example in binaries().keys() {
        let is_run = OTHERS.contains(&&**example) || SERVERS.iter().any(|(name, ..)| name == example);
        assert!(is_run, "{example}");
    }
}

#[tokio::test]
async fn each_server_answers_as_its_text_says() {
    for (example, arguments, exchanges) in SERVERS {
        let running = Running::start(example, arguments, &[]);
        let browser = running.browser();
        for (times, request, field, status, parts) in exchanges {
            for _ in 0..*times {
                let answer = ask(&browser, request, field).await;
                let text = answer.text();
                assert_eq!(answer.status, *status, "{example}: {request} {field}: {text}");
                let missing = parts.iter().find(|part| !text.contains(**part));
                assert_eq!(missing, None, "{example}: {request} {field}: {text}");
            }
        }
    }
}

#[tokio::test]
async fn two_instances_share_their_buckets_in_redis_and_survive_it() {
    let server = Server::start();
    let instances = [
        Running::start("redis", &["127.0.0.1:0", &server.url()], &[("REDIS_URL", "redis://192.0.2.1")]),
        Running::start("redis", &["127.0.0.1:0"], &[("REDIS_URL", &server.url())]),
    ];
    let browsers = instances.each_ref().map(Running::browser);
    let mut seen = Vec::new();
    // On a busy machine an answer may come after the deadline, and is then the instance's own: another round.
    for _ in 0..20 {
        server.query(&["FLUSHALL"]);
        seen.clear();
        for browser in browsers.iter().chain(&browsers) {
            let answer = ask(browser, "GET /search", "").await;
            seen.push((answer.status, answer.field("ratelimit").unwrap().split(';').nth(1).unwrap().to_owned()));
        }
        if seen == [(200, "r=7"), (200, "r=4"), (200, "r=1"), (429, "r=1")].map(|(status, r)| (status, r.to_owned())) {
            break;
        }
        // A refusal is remembered so long.
        tokio::time::sleep(Duration::from_millis(1100)).await;
    }
    assert_eq!(seen.last(), Some(&(429, "r=1".to_owned())), "{seen:?}");
    assert_eq!(server.keys(), ["tb:v1:{ip:127.0.0.1}:per-address"]);
    server.kill();
    for browser in &browsers {
        for _ in 0..3 {
            let answer = ask(browser, "GET /", "").await;
            assert!([200, 429].contains(&answer.status), "{}", answer.text());
            assert!(answer.field("ratelimit").is_some(), "limited on its own");
        }
        assert_eq!(ask(browser, "GET /health", "").await.status, 200);
    }
}

#[tokio::test]
async fn a_grpc_service_refuses_with_resource_exhausted_and_pushback() {
    let running = Running::start("tonic", &["127.0.0.1:0"], &[]);
    let mut client = HealthClient::new(Endpoint::new(running.url.clone()).unwrap().connect().await.unwrap());
    let question = || HealthCheckRequest { service: "jobs".to_owned() };
    drop(client.watch(question()).await.unwrap());
    for _ in 0..2 {
        assert_eq!(client.check(question()).await.unwrap().into_inner().status, 1);
    }
    for _ in 0..2 {
        let status = client.check(question()).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        let pushback = status.metadata().get("grpc-retry-pushback-ms").unwrap().to_str().unwrap();
        assert!((1..=12_000).contains(&pushback.parse::<u32>().unwrap()), "{pushback}");
    }
    // What looks like a preflight is a call for tonic, and is charged as one.
    let client = Client::builder(TokioExecutor::new()).http2_only(true).build_http();
    let call = |method| {
        let call = Request::builder().method(method).uri(format!("{}/grpc.health.v1.Health/Check", running.url));
        let call = call.header("origin", "https://a.example").header("access-control-request-method", "POST");
        client
            .request(call.header("content-type", "application/grpc").body(Full::new(Bytes::from(&[0; 5][..]))).unwrap())
    };
    for method in ["OPTIONS", "POST"] {
        let answer = call(method).await.unwrap();
        assert_eq!(answer.headers()["grpc-status"], "8", "{method}: {answer:?}");
    }
}

#[tokio::test]
async fn senders_deliver_to_the_consumer() {
    let consumer = Running::start("consumer", &["--rate", "50", "--capacity", "20", "--listen", "127.0.0.1:0"], &[]);
    let hook = format!("{}/hook", consumer.url);
    let output = run("reqwest", &[&hook]);
    let lines = printed(&output);
    assert!(lines.starts_with("waited ") && lines.ends_with("delivered 20\n"), "{lines}");
    let output = run("dispatcher", &["--to", &hook, "--events", "30", "--rate", "40", "--capacity", "5"]);
    let line: serde_json::Value = serde_json::from_str(printed(&output)).unwrap();
    assert_eq!((&line["delivered"], &line["failed"]), (&30.into(), &0.into()), "{line}");
    let health = ask(&consumer.browser(), "GET /health", "").await.text();
    assert!(health.contains("\"received\":50,"), "{health}");
}

#[test]
fn a_store_of_ones_own_keeps_the_contract() {
    let output = run("custom_store", &[]);
    let lines: Vec<_> = printed(&output).lines().collect();
    assert_eq!(lines[0], "the store keeps the contract");
    let expected = ["200 OK, \"everybody\";r=1;t=30", "200 OK, \"everybody\";r=0;t=", "429 Too Many Requests, "];
    assert_eq!(lines.len(), 4);
    assert!(lines[1..].iter().zip(expected).all(|(line, start)| line.starts_with(start)), "{lines:?}");
}

#[cfg(feature = "metrics")]
#[test]
fn the_series_of_a_few_requests_are_printed() {
    let output = run("metrics", &[]);
    let lines = printed(&output);
    for line in [
        r#"token_bucket_decisions_total{limit="everybody",method="GET",route="/search",outcome="allowed",source="store"} 2"#,
        r#"token_bucket_decisions_total{limit="everybody",method="GET",route="/users/{id}",outcome="denied",source="store"} 2"#,
        r#"token_bucket_cost_total{limit="everybody"} 7"#,
        r#"token_bucket_memory_buckets{} 1"#,
    ] {
        assert!(lines.lines().any(|printed| printed == line), "{line}\n{lines}");
    }
}

#[test]
fn an_argument_that_cannot_be_used_is_named() {
    let local = "127.0.0.1:0";
    for (example, arguments, parts) in [
        ("minimal", &["--help"][..], ["--help", "invalid socket address"]),
        ("plans", &["here"], ["here", "invalid socket address"]),
        ("hyper", &["here"], ["here", "invalid socket address"]),
        ("rejection", &["here"], ["here", "invalid socket address"]),
        ("tonic", &["localhost:1"], ["localhost:1", "invalid socket address"]),
        ("behind_proxy", &["here"], ["here", "invalid socket address"]),
        ("behind_proxy", &[local, "10/8"], ["10/8", "such as 10.0.0.0/8"]),
        ("redis", &[local, "http://127.0.0.1"], ["Redis URL", "redis://["]),
        ("redis", &["here"], ["here", "invalid socket address"]),
        ("dashboard", &["--listen", "here"], ["here", "invalid socket address"]),
        ("dashboard", &["--listen"], ["--listen", "--listen ADDRESS:PORT"]),
        ("api", &["--listen", "here"], ["here", "--listen ADDRESS:PORT"]),
        ("consumer", &["--rate", "x"], ["--rate", "0.001 to 1000000"]),
        ("dispatcher", &["--to", "x"], ["--rate is missing", "--workers"]),
        ("reqwest", &[], ["URL", "http://127.0.0.1:4000/hook"]),
        ("reqwest", &["not a url"], ["not a url", "invalid uri"]),
    ] {
        let output = run(example, arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{example} {arguments:?}: {}, {said}", output.status);
        assert!(parts.iter().all(|part| said.contains(part)), "{example} {arguments:?}: {said}");
        assert!(!said.contains("panicked"), "{example} {arguments:?}: {said}");
    }
}
