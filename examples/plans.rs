//! A plan for each API key: who is free and who pays have quotas of their own. Run with
//!
//! ```text
//! cargo run --example plans [-- 127.0.0.1:3000]
//! curl -i -H 'x-api-key: alpha' http://127.0.0.1:3000/     # free: 3 a minute
//! curl -i -H 'x-api-key: beta' http://127.0.0.1:3000/      # pro: 10 a second, 100 at once
//! ```
//!
//! Without one of these keys the answer is 401.

use std::error::Error;

use axum::{Router, http::request::Parts, routing::get};
use tokio::net::TcpListener;
use tower_token_bucket::{ApiKey, Limit, MemoryStore, Quota, TokenBucketLayer};

const FREE: Quota = Quota::per_minute(3);
const PRO: Quota = Quota::per_second(10).with_capacity(100);

/// The plan of a key that has been given out. It is asked for each request, and so from memory.
fn plan(key: &str) -> Option<Quota> {
    match key {
        "alpha" => Some(FREE),
        "beta" => Some(PRO),
        _ => None,
    }
}

fn app() -> Router {
    let limit = Limit::new("per-key", FREE)
        .key_by(ApiKey::verified("x-api-key", |key| plan(key).is_some()))
        // `None` is the limit's own quota. A client whose plan changes keeps its tokens.
        .quota_by(|parts: &Parts| plan(parts.headers.get("x-api-key")?.to_str().ok()?));
    Router::new()
        .route("/", get(|| async { "Hello, World!\n" }))
        .layer(TokenBucketLayer::new(MemoryStore::new(), limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app()).await?;
    Ok(())
}
