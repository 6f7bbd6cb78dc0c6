//! The layer around the limits, which sees every decision, and the figures that the page asks for.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{Method, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tower_token_bucket::{Decision, KeyExtractor};

use super::seen::Seen;

/// What the layer around the limits and the page share.
pub(super) struct Watch {
    pub(super) key: Box<dyn KeyExtractor>,
    pub(super) seen: Mutex<Seen>,
    pub(super) store: Box<dyn Fn() -> Value + Send + Sync>,
}

/// Sees every response with its decision, which the layer has left there, and the request that it answers.
pub(super) async fn watch(State(watch): State<Arc<Watch>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let key = watch.key.extract(&parts).ok();
    let method = if parts.method == Method::HEAD { &Method::GET } else { &parts.method };
    let route = parts.extensions.get::<MatchedPath>().map(|path| format!("{method} {}", path.as_str()));
    let response = next.run(Request::from_parts(parts, body)).await;
    if let Some(decision) = response.extensions().get::<Decision>() {
        watch.seen.lock().unwrap_or_else(PoisonError::into_inner).count(route.as_deref(), key, decision);
    }
    response
}

pub(super) async fn stats(State(watch): State<Arc<Watch>>) -> impl IntoResponse {
    let mut stats = watch.seen.lock().unwrap_or_else(PoisonError::into_inner).stats();
    stats["store"] = (watch.store)();
    ([(header::CACHE_CONTROL, "no-store")], Json(stats))
}
