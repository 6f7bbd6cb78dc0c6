//! An axum service that limits each client address, with its buckets in memory. Run with
//!
//! ```text
//! cargo run --example minimal [-- 127.0.0.1:3000]
//! curl -i http://127.0.0.1:3000/
//! ```
//!
//! The first five requests pass, then one every 12 seconds.

use std::error::Error;
use std::net::SocketAddr;

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_token_bucket::{Limit, MemoryStore, Quota, TokenBucketLayer};

fn app() -> Router {
    let limit = Limit::new("per-address", Quota::per_minute(5));
    Router::new()
        .route("/", get(|| async { "Hello, World!\n" }))
        // After the last route: those that are added later are not limited.
        .layer(TokenBucketLayer::new(MemoryStore::new(), limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    // With the address of each peer, which the layer takes as its key.
    axum::serve(listener, app().into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
