//! An axum service whose instances share their buckets in Redis. Run two of them with
//!
//! ```text
//! docker run --rm -p 6379:6379 redis:7
//! cargo run --example redis [-- 127.0.0.1:3000 [redis://127.0.0.1:6379]]
//! cargo run --example redis -- 127.0.0.1:3001
//! curl -i http://127.0.0.1:3000/search
//! curl -i http://127.0.0.1:3001/search
//! ```
//!
//! Without a second argument `REDIS_URL` names the server. Stop Redis, and each instance goes on with buckets of its own.

use std::error::Error;
use std::net::SocketAddr;

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_token_bucket::{CostTable, Limit, OnStoreFailure, Quota, RedisStore, TokenBucketLayer};

fn app(store: RedisStore) -> Router {
    let costs = CostTable::new(1).route("GET /search", 3).exempt("GET /health");
    let limit = Limit::new("per-address", Quota::per_minute(10)).cost(costs);
    // What a Redis that is slow or gone means: `Local` (the default) limits on this instance alone, `Allow` limits nothing,
    // `Deny` answers 503. With n instances `.share(n)` gives each one n-th of the quota meanwhile.
    let layer = TokenBucketLayer::new(store, limit).on_store_failure(OnStoreFailure::Local);
    Router::new()
        .route("/", get(|| async { "Hello, World!\n" }))
        .route("/search", get(|| async { "found\n" }))
        .route("/health", get(|| async { "ok\n" }))
        .layer(layer)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // The log says when Redis is given up, and when it is back.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let url = arguments.next().or_else(|| std::env::var("REDIS_URL").ok());
    let url = url.unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    // Fails for a URL that cannot be used. A server that is not there yet is a failure of the store.
    let store = RedisStore::connect(&url).await.map_err(|error| error.to_string())?;
    let listener = TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app(store).into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
