//! An API with a form of its own for errors, that refusals have too. Run with
//!
//! ```text
//! cargo run --example rejection [-- 127.0.0.1:3000]
//! curl -i 'http://127.0.0.1:3000/rows?count=3'     # the second is refused
//! curl -i 'http://127.0.0.1:3000/rows?count=9'     # no wait would help
//! ```

use std::error::Error;
use std::net::SocketAddr;

use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::get};
use serde_json::json;
use tokio::net::TcpListener;
use tower_token_bucket::rejection::{Reason, Rejection};
use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};

/// The response to a request that is refused. The layer adds what is missing: `Retry-After`, `Cache-Control: no-store`
/// and the `RateLimit` fields.
fn reject(rejection: &Rejection) -> Response {
    let code = match rejection.reason() {
        Reason::Denied => "rate_limited",
        Reason::TooDear => "too_expensive",
        // There is no key to charge, or the store has failed under `OnStoreFailure::Deny`.
        _ => "unavailable",
    };
    let error = json!({
        "code": code,
        "limits": rejection.violated().collect::<Vec<_>>(),
        "retry_after_ms": rejection.retry_after().map(|wait| wait.as_micros().div_ceil(1_000) as u64),
    });
    (rejection.status(), Json(json!({ "error": error }))).into_response()
}

/// A row costs a token: so one request can ask for more than a full bucket holds.
fn cost(parts: &Parts) -> u64 {
    let count = parts.uri.query().and_then(|query| query.strip_prefix("count=")?.parse().ok());
    count.unwrap_or(1).max(1)
}

fn app() -> Router {
    let limit = Limit::new("per-address", Quota::per_minute(5)).cost(cost);
    Router::new()
        .route("/rows", get(|| async { Json(json!({ "rows": [] })) }))
        .layer(TokenBucketLayer::new(MemoryStore::new(), limit).rejection(reject))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
