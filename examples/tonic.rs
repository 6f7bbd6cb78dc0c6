//! A gRPC service: who is refused is told RESOURCE_EXHAUSTED, and when to come back. Run with
//!
//! ```text
//! cargo run --example tonic [-- 127.0.0.1:50051]
//! printf '\0\0\0\0\0' | curl -s --http2-prior-knowledge -H 'content-type: application/grpc' -H 'te: trailers' \
//!     --data-binary @- -D - -o /dev/null http://127.0.0.1:50051/grpc.health.v1.Health/Check
//! ```
//!
//! The first five calls end with `grpc-status: 0`, the next with 8 and `grpc-retry-pushback-ms`, which clients that retry
//! obey. The health service stands here for one of your own.

use std::error::Error;
use std::net::SocketAddr;

use tonic::transport::Server;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tower_token_bucket::rejection::Empty;
use tower_token_bucket::{ClientIp, CostTable, Limit, MemoryStore, Quota, TokenBucketLayer};

fn layer() -> TokenBucketLayer<MemoryStore, Empty> {
    // tonic has a type of its own for the address of the peer.
    let peer = ClientIp::peer().peer_by(|parts| {
        let connection = parts.extensions.get::<TcpConnectInfo>()?;
        connection.remote_addr().map(|address| address.ip())
    });
    // Routes are `POST /package.Service/Method`. A CORS preflight would be free, and tonic takes OPTIONS for a call.
    let costs = CostTable::new(1).route("OPTIONS /{*path}", 1).route("POST /grpc.health.v1.Health/Watch", 3);
    let limit = Limit::new("per-address", Quota::per_minute(5)).key_by(peer).cost(costs);
    // A refusal is trailers only; the default response would need a body made of bytes.
    TokenBucketLayer::new(MemoryStore::new(), limit).rejection(Empty)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:50051".to_owned());
    let wrong = |error: &dyn Error| format!("cannot listen on {address}: {error}");
    let address: SocketAddr = address.parse().map_err(|error| wrong(&error))?;
    let incoming = TcpIncoming::bind(address).map_err(|error| wrong(&error))?;
    println!("listening on http://{}", incoming.local_addr()?);

    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("jobs", tonic_health::ServingStatus::Serving).await;
    Server::builder().layer(layer()).add_service(health).serve_with_incoming(incoming).await?;
    Ok(())
}
