//! An API whose requests cost by route, as that of `examples/api.rs`, and a page that shows its buckets, its decisions and
//! its store, live. Run with
//!
//! ```text
//! cargo run --example dashboard [-- [--listen 127.0.0.1:0] [--redis redis://127.0.0.1:6379]]
//! ```
//!
//! and open <http://127.0.0.1:3000>. The page names the addresses of clients: one that strangers can reach goes behind a
//! login.

mod seen;
mod watch;

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::extract::Path;
use axum::http::header;
use axum::middleware::from_fn_with_state;
use axum::response::Html;
use axum::{Json, Router, routing::get, routing::post};
use serde_json::{Value, json};
use tower_token_bucket::{
    ApiKey, ClientIp, CostTable, KeyExtractor, Limit, MemoryStore, Quota, RedisErrorKind, RedisStore, Store,
    TokenBucketLayer,
};
use watch::{Watch, stats, watch};

/// What requests cost.
const ROUTES: [(&str, u64); 4] =
    [("GET /users/{id}", 1), ("GET /search", 3), ("POST /reports/generate", 10), ("GET /health", 0)];
/// The page is one file and asks nobody but its own server; its own script and style are in it.
const CSP: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

fn app<St: Store>(store: St, health: impl Fn() -> Value + Send + Sync + 'static) -> Router {
    let key = || ApiKey::verified("x-api-key", |key| ["alpha", "beta"].contains(&key)).or(ClientIp::peer());
    let costs = || ROUTES.iter().fold(CostTable::new(1), |table, (route, cost)| table.route(route, *cost));
    let limit = Limit::new("per-key", Quota::per_second(1).with_capacity(20)).key_by(key()).cost(costs());
    // A stricter quota on trial: the page shows whom it would refuse.
    let trial = Limit::new("trial", Quota::per_second(1).with_capacity(12)).key_by(key()).cost(costs()).shadow();
    let shared = Arc::new(Watch { key: Box::new(key()), seen: Mutex::default(), store: Box::new(health) });
    let page = || async { ([(header::CONTENT_SECURITY_POLICY, CSP)], Html(include_str!("page.html"))) };
    Router::new()
        .route("/users/{id}", get(|Path(id): Path<String>| async move { Json(json!({ "id": id })) }))
        .route("/search", get(|| async { Json(json!({ "results": [] })) }))
        .route("/reports/generate", post(|| async { Json(json!({ "report": "made" })) }))
        .route("/health", get(|| async { Json(json!({ "status": "ok" })) }))
        .layer(TokenBucketLayer::new(store, limit).and(trial))
        .layer(from_fn_with_state(Arc::clone(&shared), watch))
        // After the layers, so that to look at it costs nothing and is not counted.
        .route("/", get(page))
        .route("/stats", get(stats))
        .with_state(shared)
}

/// What a store in Redis says of itself.
fn redis_health(store: &RedisStore) -> Value {
    use RedisErrorKind::{BreakerOpen, Bucket, Configuration, Crowded, Late, Lost, Reply, Unavailable, Unreachable};
    let kinds = [Unreachable, BreakerOpen, Crowded, Unavailable, Configuration, Bucket, Lost, Late, Reply];
    let failures: BTreeMap<_, _> = kinds.iter().map(|kind| (format!("{kind:?}"), store.failures(*kind))).collect();
    let nodes = store.nodes().into_iter().map(|(address, health)| json!([address, format!("{health:?}")]));
    json!({ "kind": "Redis", "health": format!("{:?}", store.health()), "nodes": nodes.collect::<Vec<_>>(),
        "failures": failures })
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let (mut listen, mut redis) = ("127.0.0.1:3000".to_owned(), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match (word.as_str(), words.next()) {
            ("--listen", Some(address)) => listen = address,
            ("--redis", Some(url)) => redis = Some(url),
            _ => return Err(format!("{word}: allowed are --listen ADDRESS:PORT and --redis URL").into()),
        }
    }
    let app = match redis {
        Some(url) => {
            let store = RedisStore::connect(&url).await.map_err(|error| error.to_string())?;
            app(store.clone(), move || redis_health(&store))
        }
        None => app(MemoryStore::new(), || json!({ "kind": "memory", "health": "Closed" })),
    };
    let listener = tokio::net::TcpListener::bind(&listen).await.map_err(|error| format!("{listen}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
