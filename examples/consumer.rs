//! An endpoint for webhooks that allows so many a second, and refuses what is above that. Run with
//!
//! ```text
//! cargo run --example consumer -- --rate 20 --capacity 10 [--listen 127.0.0.1:0]
//! ```
//!
//! and send to what it prints from another terminal, at a rate that it does not allow:
//!
//! ```text
//! cargo run --example dispatcher -- --to http://127.0.0.1:PORT/hook --events 200 --rate 60 --capacity 5 --adaptive
//! curl http://127.0.0.1:PORT/health
//! ```

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tower_token_bucket::{CostTable, Limit, MemoryStore, Quota, TokenBucketLayer};

/// The endpoint. Each sender, known by its address, has the whole quota.
fn app(quota: Quota) -> Router {
    let [received, refused] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let (one, other) = (Arc::clone(&received), Arc::clone(&refused));
    let counts = move || async move { Json(json!({ "received": one.load(Relaxed), "refused": other.load(Relaxed) })) };
    let receive =
        move |Json(_): Json<Value>| async move { Json(json!({ "received": received.fetch_add(1, Relaxed) + 1 })) };
    let limit = Limit::new("per-sender", quota).cost(CostTable::new(1).exempt("GET /health"));
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit).on_decision(move |decision| {
        refused.fetch_add(u64::from(!decision.is_allowed()), Relaxed);
    });
    Router::new().route("/hook", post(receive)).route("/health", get(counts)).layer(layer)
}

/// Where to listen, and what to allow.
fn arguments(mut words: impl Iterator<Item = String>) -> Result<(SocketAddr, Quota), String> {
    const USAGE: &str = "allowed are --rate R, --capacity C and --listen ADDRESS:PORT";
    let (mut rate, mut capacity, mut listen) = (None, None, SocketAddr::from(([127, 0, 0, 1], 0)));
    while let Some(word) = words.next() {
        if !matches!(&*word, "--rate" | "--capacity" | "--listen") {
            return Err(format!("unknown argument {word:?}: {USAGE}"));
        }
        let text = words.next().ok_or_else(|| format!("{word} needs a value: {USAGE}"))?;
        let wrong = |allowed| format!("{word} {text:?} is not allowed: {allowed}");
        match &*word {
            "--rate" => {
                let parsed = text.parse().ok().filter(|rate| (0.001..=1e6).contains(rate));
                rate = Some(parsed.ok_or_else(|| wrong("tokens per second from 0.001 to 1000000 are"))?);
            }
            "--capacity" => capacity = Some(text.parse().map_err(|_| wrong("whole numbers from 1 are"))?),
            _ => listen = text.parse().map_err(|_| wrong("an address and a port such as 127.0.0.1:0 are"))?,
        }
    }
    let rate: f64 = rate.ok_or_else(|| format!("--rate is missing: {USAGE}"))?;
    let capacity = capacity.ok_or_else(|| format!("--capacity is missing: {USAGE}"))?;
    let quota = Quota::try_from_parts(capacity, (rate * 1000.0).round() as u64, Duration::from_secs(1000));
    Ok((listen, quota.map_err(|error| format!("--rate and --capacity: {error}"))?))
}

async fn serve(listen: SocketAddr, app: Router) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_used_is_named_with_what_is_allowed() {
        let read = |words: &str| arguments(words.split_whitespace().map(str::to_owned));
        let (listen, quota) = read("--rate 0.5 --capacity 3 --listen 127.0.0.1:4000").expect("allowed");
        assert_eq!((listen.port(), quota.capacity(), quota.refill()), (4000, 3, (1, Duration::from_secs(2))));
        for (words, parts) in [
            ("", ["--rate is missing", "--listen"]),
            ("--rate 5", ["--capacity is missing", "--listen"]),
            ("--rate", ["--rate needs a value", "--listen"]),
            ("--bogus", ["unknown argument", "--listen"]),
            ("--rate inf --capacity 1", ["--rate", "0.001 to 1000000"]),
            ("--rate 1 --capacity 0", ["capacity is 0", "1 to 2147483648"]),
            ("--rate 1 --capacity 1.5", ["--capacity", "from 1"]),
            ("--rate 1 --capacity 1 --listen here", ["--listen", "127.0.0.1:0"]),
        ] {
            let error = read(words).err().expect(words);
            assert!(parts.iter().all(|part| error.contains(part)), "{words}: {error}");
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let (listen, quota) = match arguments(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = serve(listen, app(quota)).await {
        eprintln!("error: {listen}: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
