//! An API whose requests cost by route, as that of `examples/api.rs`, and a page that shows its buckets, its decisions and
//! its store, live. Run with
//!
//! ```text
//! cargo run --example dashboard [-- [--listen 127.0.0.1:0] [--redis redis://127.0.0.1:6379]]
//! ```
//!
//! and open <http://127.0.0.1:3000>. The page names the addresses of clients: one that strangers can reach goes behind a
//! login.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{MatchedPath, Path, Request, State};
use axum::http::{Method, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::time::Instant;
use tower_token_bucket::{
    ApiKey, BucketKey, ClientIp, CostTable, Decision, KeyExtractor, Limit, MemoryStore, Outcome, Quota, RedisErrorKind,
    RedisStore, Store, TokenBucketLayer,
};

/// What requests are counted as, and what they cost; the last is all the rest.
const ROUTES: [(&str, u64); 5] =
    [("GET /users/{id}", 1), ("GET /search", 3), ("POST /reports/generate", 10), ("GET /health", 0), ("other", 1)];
const SECONDS: usize = 60;
const BUCKETS_MAX: usize = 20;
/// The page is one file and asks nobody but its own server; its own script and style are in it.
const CSP: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Requests of one second that were allowed, allowed though a shadow limit would have refused them, and denied.
type Counts = [u32; 3];

/// What has been decided lately.
#[derive(Default)]
struct Seen {
    /// The seconds in which something came, by number, with the counts of each route.
    seconds: VecDeque<(u64, [Counts; ROUTES.len()])>,
    /// How many decisions came from where.
    sources: BTreeMap<String, u64>,
    /// What is known of a limit's bucket: how often it was asked for, and what it said last, and when.
    buckets: HashMap<(String, BucketKey), (u64, Outcome, Instant)>,
}

impl Seen {
    fn count(&mut self, second: u64, route: usize, key: Option<BucketKey>, decision: &Decision) {
        if self.seconds.back().is_none_or(|(last, _)| *last < second) {
            self.seconds.push_back((second, Default::default()));
        }
        let would_refuse = |of: &Outcome| of.is_shadow() && (of.is_too_dear() || of.retry_after().is_some());
        let which = match decision.is_allowed() {
            true => usize::from(decision.outcomes().iter().any(would_refuse)),
            false => 2,
        };
        if let Some((_, counts)) = self.seconds.back_mut() {
            counts[route][which] += 1;
        }
        if self.seconds.len() > SECONDS {
            self.seconds.pop_front();
        }
        *self.sources.entry(format!("{:?}", decision.source()).to_lowercase()).or_default() += 1;
        // An outcome without a level is of a bucket that was not asked.
        for outcome in decision.outcomes().iter().filter(|outcome| outcome.remaining().is_some()) {
            let Some(key) = key else { continue };
            let name = (outcome.limit().to_owned(), key);
            let asked = self.buckets.get(&name).map_or(0, |(asked, ..)| *asked);
            self.buckets.insert(name, (asked + 1, outcome.clone(), Instant::now()));
        }
        while self.buckets.len() > BUCKETS_MAX {
            let fullest = self.buckets.iter().min_by_key(|(_, (_, outcome, at))| full_in(outcome, *at));
            let Some(fullest) = fullest.map(|(name, _)| name.clone()) else { break };
            self.buckets.remove(&fullest);
        }
    }
}

/// Time until a bucket is full, which at `at` was as `outcome` says.
fn full_in(outcome: &Outcome, at: Instant) -> Duration {
    outcome.reset_after().unwrap_or_default().saturating_sub(at.elapsed())
}

/// What the layer around the limits and the page share.
struct Watch {
    began: Instant,
    key: Box<dyn KeyExtractor>,
    seen: Mutex<Seen>,
    store: Box<dyn Fn() -> Value + Send + Sync>,
}

/// Sees every response with its decision, which the layer has left there, and the request that it answers.
async fn watch(State(watch): State<Arc<Watch>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let key = watch.key.extract(&parts).ok();
    let method = if parts.method == Method::HEAD { &Method::GET } else { &parts.method };
    let name = parts.extensions.get::<MatchedPath>().map(|path| format!("{method} {}", path.as_str()));
    let route = ROUTES.iter().position(|(route, _)| name.as_deref() == Some(route)).unwrap_or(ROUTES.len() - 1);
    let response = next.run(Request::from_parts(parts, body)).await;
    if let Some(decision) = response.extensions().get::<Decision>() {
        let mut seen = watch.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.count(watch.began.elapsed().as_secs(), route, key, decision);
    }
    response
}

async fn stats(State(watch): State<Arc<Watch>>) -> ([(header::HeaderName, &'static str); 1], Json<Value>) {
    let now = watch.began.elapsed().as_secs();
    let seen = watch.seen.lock().unwrap_or_else(PoisonError::into_inner);
    let mut history = [[Counts::default(); SECONDS]; ROUTES.len()];
    for (second, counts) in seen.seconds.iter().filter(|(second, _)| second + SECONDS as u64 > now) {
        for (route, counts) in counts.iter().enumerate() {
            history[route][SECONDS - 1 - now.saturating_sub(*second) as usize] = *counts;
        }
    }
    let routes = ROUTES.iter().zip(&history);
    let routes =
        routes.map(|((route, cost), seconds)| json!({ "route": route, "cost": cost, "seconds": &seconds[..] }));
    let mut buckets: Vec<_> = seen.buckets.iter().collect();
    buckets.sort_by(|(a, (a_asked, ..)), (b, (b_asked, ..))| (b_asked, &a.0).cmp(&(a_asked, &b.0)));
    let buckets = buckets.into_iter().map(|((limit, key), (asked, outcome, at))| {
        let (tokens, per) = outcome.quota().refill();
        json!({ "key": key.to_string(), "limit": limit, "shadow": outcome.is_shadow(), "asked": asked,
            "capacity": outcome.quota().capacity(), "rate": tokens as f64 / per.as_secs_f64(),
            "full_in": full_in(outcome, *at).as_secs_f64() })
    });
    let (routes, buckets): (Vec<_>, Vec<_>) = (routes.collect(), buckets.collect());
    let all = json!({ "routes": routes, "buckets": buckets, "sources": seen.sources, "store": (watch.store)() });
    ([(header::CACHE_CONTROL, "no-store")], Json(all))
}

fn app<St: Store>(store: St, health: impl Fn() -> Value + Send + Sync + 'static) -> Router {
    let key = || ApiKey::verified("x-api-key", |key| ["alpha", "beta"].contains(&key)).or(ClientIp::peer());
    let costs = || ROUTES[..4].iter().fold(CostTable::new(1), |table, (route, cost)| table.route(route, *cost));
    let limit = Limit::new("per-key", Quota::per_second(1).with_capacity(20)).key_by(key()).cost(costs());
    // A stricter quota on trial: the page shows whom it would refuse.
    let trial = Limit::new("trial", Quota::per_second(1).with_capacity(12)).key_by(key()).cost(costs()).shadow();
    let shared = Watch { began: Instant::now(), key: Box::new(key()), seen: Mutex::default(), store: Box::new(health) };
    let shared = Arc::new(shared);
    let page = || async { ([(header::CONTENT_SECURITY_POLICY, CSP)], Html(include_str!("dashboard.html"))) };
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

async fn serve() -> Result<(), Box<dyn Error>> {
    let (mut listen, mut redis) = ("127.0.0.1:3000".to_owned(), None);
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        match (word.as_str(), words.next()) {
            ("--listen", Some(address)) => listen = address,
            ("--redis", Some(url)) => redis = Some(url),
            _ => return Err(format!("{word:?}: allowed are --listen ADDRESS:PORT and --redis URL").into()),
        }
    }
    let app = match redis {
        Some(url) => {
            let store = RedisStore::connect(&url).await?;
            app(store.clone(), move || redis_health(&store))
        }
        None => app(MemoryStore::new(), || json!({ "kind": "memory", "health": "Closed" })),
    };
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    if let Err(error) = serve().await {
        eprintln!("error: {error}");
        return ExitCode::from(2);
    }
    ExitCode::SUCCESS
}
