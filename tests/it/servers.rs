//! The same layer on real sockets: axum, plain hyper, a Unix socket and tonic.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use axum::Router;
use axum::routing::{get, post};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tonic::Code;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower::{Layer, ServiceBuilder, service_fn};
use tower_token_bucket::rejection::Empty;
use tower_token_bucket::{
    BucketKey, ClientIp, CostTable, Global, KeyExtractor, Limit, MemoryStore, OnStoreFailure, Quota, TokenBucketLayer,
};

use crate::plumbing::Fragile;

/// Of tokens of which none comes back while a test runs; keyed by the address of the peer.
fn layer(capacity: u64) -> TokenBucketLayer<MemoryStore> {
    let costs = CostTable::new(1).route("POST /reports/{id}", 3).exempt("GET /health");
    TokenBucketLayer::new(MemoryStore::new(), Limit::new("per-address", Quota::per_day(capacity)).cost(costs))
}

pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    #[track_caller]
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let lines: Vec<_> = self.headers.get_all(name).iter().collect();
        assert!(lines.len() <= 1, "{name}: {lines:?}");
        lines.first().map(|line| line.to_str().unwrap())
    }

    /// The fields, one a line, and the body.
    pub(crate) fn text(&self) -> String {
        let fields = self.headers.iter().map(|(name, value)| format!("{name}: {}\n", value.to_str().unwrap()));
        fields.collect::<String>() + &self.body
    }

    async fn of(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self { status: parts.status.as_u16(), headers: parts.headers, body: String::from_utf8(body.into()).unwrap() }
    }
}

pub(crate) struct Browser {
    client: Client<HttpConnector, Full<Bytes>>,
    server: SocketAddr,
}

impl Browser {
    pub(crate) fn new(server: SocketAddr) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), server }
    }

    async fn send(&self, method: &str, path: &str, body: &'static str) -> Answer {
        self.send_with(method, path, None, body).await
    }

    /// With a field of this name and value.
    pub(crate) async fn send_with(
        &self,
        method: &str,
        path: &str,
        field: Option<(&str, &str)>,
        body: &'static str,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", self.server));
        if let Some((name, value)) = field {
            request = request.header(name, value);
        }
        let request = request.body(Full::from(body)).unwrap();
        Answer::of(self.client.request(request).await.unwrap()).await
    }
}

async fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// What every HTTP server has to answer: 5 tokens, of which a report takes 3.
async fn check_http(browser: &Browser, calls: &AtomicUsize) {
    let first = browser.send("GET", "/users/7", "").await;
    assert_eq!((first.status, first.body.as_str()), (200, "ok"));
    assert_eq!(first.field("ratelimit-policy"), Some("\"per-address\";q=5;w=86400"));
    assert_eq!(first.field("ratelimit"), Some("\"per-address\";r=4;t=69120"));
    let report = browser.send("POST", "/reports/2024", "a body").await;
    assert_eq!((report.status, report.field("ratelimit")), (200, Some("\"per-address\";r=1;t=17280")));
    // Too few for a report, enough for a user; the body of a refused request is not read, and does no harm.
    for body in ["", "a body", "a longer body that nobody reads"] {
        let denied = browser.send("POST", "/reports/2024", body).await;
        assert_eq!(denied.status, 429);
        let wait: u64 = denied.field("retry-after").unwrap().parse().unwrap();
        assert!((34_500..=34_560).contains(&wait), "{wait}");
        assert_eq!(denied.field("cache-control"), Some("no-store"));
        assert_eq!(denied.field("content-type"), Some("application/problem+json"));
        let problem: serde_json::Value = serde_json::from_str(&denied.body).unwrap();
        assert_eq!(problem["violated-policies"], serde_json::json!(["per-address"]));
        assert!(denied.field("ratelimit").unwrap().starts_with("\"per-address\";r=1;t=34"));
    }
    assert_eq!(browser.send("GET", "/nope", "").await.field("ratelimit"), Some("\"per-address\";r=0;t=17280"));
    let denied = browser.send("GET", "/users/7", "").await;
    let head = browser.send("HEAD", "/users/7", "").await;
    assert_eq!((denied.status, head.status, head.body.as_str()), (429, 429, ""));
    assert_eq!(head.field("content-length"), denied.field("content-length"));
    assert_eq!(head.field("content-type"), denied.field("content-type"));
    assert_eq!(browser.send("GET", "/health", "").await.status, 200);
    assert_eq!(calls.load(Relaxed), 3);
}

#[tokio::test]
async fn axum_serves_and_refuses() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let handler = move || {
        counter.fetch_add(1, Relaxed);
        async { "ok" }
    };
    let app = Router::new()
        .route("/users/{uid}", get(handler.clone()))
        .route("/reports/{number}", post(handler.clone()))
        .route("/health", get(handler))
        .layer(layer(5));
    let (listener, address) = listener().await;
    let server = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, server).await });
    check_http(&Browser::new(address), &calls).await;
}

#[tokio::test]
async fn axum_without_connect_info_answers_503_and_says_why() {
    let (log, _guard) = crate::log::Log::capture();
    let app = Router::new().route("/users/{id}", get(|| async { "ok" })).layer(layer(5));
    let (listener, address) = listener().await;
    tokio::spawn(async move { axum::serve(listener, app).await });
    let browser = Browser::new(address);
    for _ in 0..3 {
        assert_eq!(browser.send("GET", "/users/7", "").await.status, 503);
    }
    let lines = log.lines();
    assert_eq!(
        lines.iter().filter(|line| line.contains("into_make_service_with_connect_info")).count(),
        1,
        "{lines:#?}"
    );
}

#[tokio::test]
async fn axum_on_a_unix_socket_serves_with_a_fallback() {
    // tower_governor: 500 for every request; Unix sockets have no address.
    let limit = Limit::new("all", Quota::per_day(2)).key_by(ClientIp::peer().or(Global));
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit);
    let app = Router::new().route("/", get(|| async { "ok" })).layer(layer);
    let path = std::env::temp_dir().join(format!("tower-token-bucket-{}.sock", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    let stream = UnixStream::connect(&path).await.unwrap();
    std::fs::remove_file(&path).unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    for status in [200, 200, 429] {
        let request = Request::get("/").header("host", "localhost").body(Full::<Bytes>::default()).unwrap();
        let answer = Answer::of(sender.send_request(request).await.unwrap()).await;
        assert_eq!(answer.status, status);
    }
}

#[tokio::test]
async fn plain_hyper_serves_and_refuses_with_costs_by_path() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&calls);
    let handler = service_fn(move |request: Request<Incoming>| {
        if request.uri().path() != "/nope" {
            counter.fetch_add(1, Relaxed);
        }
        async { Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("ok")))) }
    });
    let service = layer(5).layer(handler);
    let (listener, address) = listener().await;
    tokio::spawn(async move {
        loop {
            let (stream, peer) = listener.accept().await.unwrap();
            let with_peer = move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(peer);
                request
            };
            let service = ServiceBuilder::new().map_request(with_peer).service(service.clone());
            let http = hyper::server::conn::http1::Builder::new();
            tokio::spawn(http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)));
        }
    });
    check_http(&Browser::new(address), &calls).await;
}

/// A health service behind the layer.
async fn grpc<St: tower_token_bucket::Store>(
    layer: TokenBucketLayer<St, Empty>,
) -> HealthClient<tonic::transport::Channel>
where
    St::Future: Send,
{
    let (listener, address) = listener().await;
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("jobs", tonic_health::ServingStatus::Serving).await;
    let server = tonic::transport::Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let endpoint = tonic::transport::Endpoint::new(format!("http://{address}")).unwrap();
    HealthClient::new(endpoint.connect().await.unwrap())
}

fn question() -> HealthCheckRequest {
    HealthCheckRequest { service: "jobs".to_owned() }
}

#[tokio::test]
async fn tonic_serves_and_refuses_with_resource_exhausted() {
    // A peer's address is where tonic puts it.
    let by_peer = |parts: &Parts| {
        let address = parts.extensions.get::<TcpConnectInfo>()?.remote_addr()?;
        Some(BucketKey::ip(address.ip()))
    };
    for limit in [
        Limit::new("a", Quota::per_day(2)).key_by(by_peer),
        Limit::new("a", Quota::per_day(2)).key_by(Global),
        // By path: gRPC's are `/package.Service/Method`.
        Limit::new("a", Quota::per_day(4))
            .key_by(Global)
            .cost(CostTable::new(1).route("POST /grpc.health.v1.Health/Check", 2)),
    ] {
        let mut client = grpc(TokenBucketLayer::new(MemoryStore::new(), limit).rejection(Empty)).await;
        for _ in 0..2 {
            let answer = client.check(question()).await.unwrap();
            assert!(answer.metadata().contains_key("ratelimit"));
            assert_eq!(answer.into_inner().status, 1);
        }
        for _ in 0..2 {
            let status = client.check(question()).await.unwrap_err();
            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
            assert!(status.message().contains("limit a"), "{status:?}");
            let pushback: u64 =
                status.metadata().get("grpc-retry-pushback-ms").unwrap().to_str().unwrap().parse().unwrap();
            assert!((43_100_000..=43_200_000).contains(&pushback), "{pushback}");
            // A stream is refused before it starts.
            assert_eq!(client.watch(question()).await.unwrap_err().code(), Code::ResourceExhausted);
        }
    }
}

#[tokio::test]
async fn tonic_tells_what_no_wait_helps_no_key_and_a_failed_store_apart() {
    let dear = Limit::new("a", Quota::per_day(2)).key_by(Global).cost(|_: &Parts| 3);
    let mut client = grpc(TokenBucketLayer::new(MemoryStore::new(), dear).rejection(Empty)).await;
    let status = client.check(question()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "-1");

    let no_key = Limit::new("a", Quota::per_day(2)).key_by(|_: &Parts| None);
    let mut client = grpc(TokenBucketLayer::new(MemoryStore::new(), no_key).rejection(Empty)).await;
    assert_eq!(client.check(question()).await.unwrap_err().code(), Code::Unauthenticated);

    let limit = Limit::new("a", Quota::per_day(2)).key_by(Global);
    let deny = TokenBucketLayer::new(Fragile::broken(), limit).on_store_failure(OnStoreFailure::Deny);
    let mut client = grpc(deny.rejection(Empty)).await;
    let status = client.check(question()).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(!status.message().contains("connection refused"), "{status:?}");
}
