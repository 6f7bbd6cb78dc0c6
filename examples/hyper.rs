//! The layer on a server of plain hyper, without a router. Run with
//!
//! ```text
//! cargo run --example hyper [-- 127.0.0.1:3000]
//! curl -i http://127.0.0.1:3000/users/7
//! curl -i http://127.0.0.1:3000/search
//! ```
//!
//! There is no router: the server says who the peer is, and the cost table matches the paths.

use std::convert::Infallible;
use std::error::Error;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tower::{ServiceBuilder, service_fn};
use tower_token_bucket::{CostTable, Limit, MemoryStore, Quota, TokenBucketLayer};

async fn hello(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let text = format!("Hello from {}\n", request.uri().path());
    Ok(Response::new(Full::from(text)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);

    let costs = CostTable::new(1).route("GET /search", 3).exempt("GET /health");
    let limit = Limit::new("per-address", Quota::per_minute(5)).cost(costs);
    // One layer for all connections: its buckets are behind the store.
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit);
    loop {
        let (stream, peer) = listener.accept().await?;
        let service = ServiceBuilder::new()
            // The key is by default the peer's address, which is looked for in the extensions, as a `SocketAddr`.
            .map_request(move |mut request: Request<Incoming>| {
                request.extensions_mut().insert(peer);
                request
            })
            .layer(layer.clone())
            .service(service_fn(hello));
        tokio::spawn(async move {
            let http = auto::Builder::new(TokioExecutor::new());
            let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service));
            if let Err(error) = connection.await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}
