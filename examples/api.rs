//! An API whose requests cost by route. Run with
//!
//! ```text
//! cargo run --example api [-- [--listen 127.0.0.1:0] [--config FILE.toml]]
//! ```
//!
//! Without `--config` it takes `examples/api.toml`. A file that cannot be used ends the program with status 2. SIGHUP, or
//! a change of the file, applies its limits to the running API.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower_token_bucket::config::Config;
use tower_token_bucket::{ConfigError, LimitsHandle, MemoryStore, Store, TokenBucketLayer};

/// How often each handler ran.
#[derive(Default)]
struct Calls {
    users: AtomicU64,
    search: AtomicU64,
    reports: AtomicU64,
    health: AtomicU64,
}

fn app<St: Store>(layer: TokenBucketLayer<St>) -> Router {
    Router::new()
        .route("/users/{id}", get(user))
        .route("/search", get(search))
        .route("/reports/generate", post(report))
        .route("/health", get(health))
        .with_state(Arc::new(Calls::default()))
        // Last, so that it covers every route above.
        .layer(layer)
}

async fn user(State(calls): State<Arc<Calls>>, Path(id): Path<String>) -> Json<Value> {
    calls.users.fetch_add(1, Relaxed);
    Json(json!({ "id": id }))
}

async fn search(State(calls): State<Arc<Calls>>) -> Json<Value> {
    calls.search.fetch_add(1, Relaxed);
    Json(json!({ "results": [] }))
}

async fn report(State(calls): State<Arc<Calls>>) -> Json<Value> {
    let number = calls.reports.fetch_add(1, Relaxed) + 1;
    Json(json!({ "report": number }))
}

async fn health(State(calls): State<Arc<Calls>>) -> Json<Value> {
    calls.health.fetch_add(1, Relaxed);
    let counts = BTreeMap::from([
        ("GET /users/{id}", calls.users.load(Relaxed)),
        ("GET /search", calls.search.load(Relaxed)),
        ("POST /reports/generate", calls.reports.load(Relaxed)),
        ("GET /health", calls.health.load(Relaxed)),
    ]);
    Json(json!({ "status": "ok", "calls": counts }))
}

/// What the command line asks for.
struct Arguments {
    listen: Option<SocketAddr>,
    file: Option<String>,
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    const USAGE: &str = "allowed are --listen ADDRESS:PORT and --config FILE.toml";
    let mut arguments = Arguments { listen: None, file: None };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or_else(|| format!("{word} needs a value: {USAGE}"));
        match word.as_str() {
            "--listen" => {
                let text = value()?;
                let address = text.parse().map_err(|_| format!("--listen {text:?} is no address and port: {USAGE}"))?;
                arguments.listen = Some(address);
            }
            "--config" => arguments.file = Some(value()?),
            _ => return Err(format!("unknown argument {word:?}: {USAGE}")),
        }
    }
    Ok(arguments)
}

/// A file's text as settings, all of them checked; or what is wrong, with the file's name in front.
fn parse(file: &str, text: &str) -> Result<Config, String> {
    let config: Config = toml::from_str(text).map_err(|error| format!("{file}{}", place_and_reason(text, &error)))?;
    config.check().map_err(|error| format!("{file}: {error}"))?;
    Ok(config)
}

/// A file's text. What is no file, such as a pipe, could keep its reader waiting.
async fn read(file: &str) -> Result<String, String> {
    const BYTES_MAX: u64 = 1 << 20;
    let wrong = |error| format!("{file}: {error}");
    let about = tokio::fs::metadata(file).await.map_err(wrong)?;
    if !about.is_file() || about.len() > BYTES_MAX {
        return Err(format!("{file}: not a file of at most {BYTES_MAX} bytes"));
    }
    tokio::fs::read_to_string(file).await.map_err(wrong)
}

/// What to serve, and where.
async fn start() -> Result<(SocketAddr, Router), String> {
    let arguments = arguments(std::env::args().skip(1))?;
    // First, so that the signal ends nothing.
    let hangups = hangups().map_err(|error| format!("SIGHUP: {error}"))?;
    let (file, text) = match &arguments.file {
        Some(file) => (file.as_str(), read(file).await?),
        None => ("examples/api.toml", include_str!("api.toml").to_owned()),
    };
    let config = parse(file, &text)?;
    let api = async {
        Ok::<_, ConfigError>(match config.redis_store().await? {
            Some(store) => limited(config.layer(store)?),
            None => limited(config.layer(MemoryStore::new())?),
        })
    };
    let (app, limits) = api.await.map_err(|error| format!("{file}: {error}"))?;
    if let Some(file) = arguments.file {
        tokio::spawn(reload(file, text, limits, hangups));
    }
    Ok((arguments.listen.or(config.listen()).unwrap_or(SocketAddr::from(([127, 0, 0, 1], 3000))), app))
}

/// The API behind a layer, and what replaces the limits of that.
fn limited<St: Store>(layer: TokenBucketLayer<St>) -> (Router, LimitsHandle) {
    let limits = layer.handle();
    (app(layer), limits)
}

/// Applies the limits of the file again after a SIGHUP, and when a look at it, once a second, shows another text. A file
/// that cannot be used changes nothing. Its other settings count at the next start. Write a file beside it and rename that:
/// half of a file may be a file that can be used.
async fn reload(file: String, text: String, limits: LimitsHandle, hangups: Arc<Notify>) {
    let mut seen = Ok(text);
    let mut look = tokio::time::interval(Duration::from_secs(1));
    loop {
        let asked = tokio::select! {
            () = hangups.notified() => true,
            _ = look.tick() => false,
        };
        let now = read(&file).await;
        if now == seen && !asked {
            continue;
        }
        let replace = |text: &String| {
            let new = parse(&file, text)?.limits().map_err(|error| format!("{file}: {error}"))?;
            limits.replace(new).map_err(|error| format!("{file}: {error}"))
        };
        match now.as_ref().map_err(Clone::clone).and_then(replace) {
            Ok(()) => {
                tracing::info!("{file}: the limits are now {limits:?}; its other settings count at the next start");
            }
            Err(error) => tracing::error!("the limits stay as they are: {error}"),
        }
        seen = now;
    }
}

/// A turn for each SIGHUP, where there is such a thing.
fn hangups() -> std::io::Result<Arc<Notify>> {
    let turns = Arc::new(Notify::new());
    #[cfg(unix)]
    {
        let mut hangups = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?;
        let turns = Arc::clone(&turns);
        tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                turns.notify_one();
            }
        });
    }
    Ok(turns)
}

/// The line and the setting that an error is about. Nothing else of the line is shown, nor a value that looks like a URL:
/// there may be a credential in it.
fn place_and_reason(text: &str, error: &toml::de::Error) -> String {
    const SETTINGS: [&str; 27] = [
        "listen",
        "headers",
        "store",
        "redis",
        "cluster",
        "sentinel",
        "master",
        "deadline",
        "on_failure",
        "share",
        "prefix",
        "secret",
        "client_ip",
        "header",
        "trusted_proxies",
        "ipv6_prefix",
        "limits",
        "name",
        "key",
        "api_key_header",
        "api_keys",
        "capacity",
        "refill",
        "per",
        "default_cost",
        "shadow",
        "costs",
    ];
    let start = error.span().map_or(0, |span| span.start);
    let before = text.get(..start).unwrap_or_default();
    let line = before.lines().count().max(1) + usize::from(before.ends_with('\n'));
    let key = text.lines().nth(line - 1).and_then(|line| line.split_once('=')).map_or("", |(key, _)| key.trim());
    let place = if SETTINGS.contains(&key) { format!("{key}: ") } else { String::new() };
    let reason = error.message();
    format!(":{line}: {place}{}", if reason.contains("://") { "a URL does not belong here" } else { reason })
}

async fn serve(listen: SocketAddr, app: Router) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    // The peer's address is what a client without a key is known by.
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credential_is_in_no_error_of_a_file() {
        for text in [
            "[[limits]]\napi_keys = [\n\"a\",\n\"s3cret==\"\n\"s3cret==\"\n]",
            "[[limits]]\napi_keys = [\n\"s3cret==\n]",
            "[[limits]]\napi_keys = [\ns3cret==\n]",
            "[[limits]]\napi_keys = [\n\"s3cret=\\q\"\n]",
            "headers = \"redis://u:s3cret@h\"",
            "[store]\n\"redis://u:s3cret@h\" = 1",
            "[[limits]]\napi_keys = \"s3cret\"",
            "[store]\nsecret = [\"s3cret\"]",
        ] {
            let error = toml::from_str::<Config>(text).expect_err(text);
            let shown = place_and_reason(text, &error);
            assert!(shown.starts_with(':') && !shown.contains("s3cret"), "{text}: {shown}");
        }
        let text = "[[limits]]\nname = \"a\"\ncapcity = 3";
        let shown = place_and_reason(text, &toml::from_str::<Config>(text).expect_err(text));
        assert!(shown.starts_with(":3: ") && shown.contains("unknown field `capcity`"), "{shown}");
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let (listen, app) = match start().await {
        Ok(started) => started,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = serve(listen, app).await {
        eprintln!("error: {listen}: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
