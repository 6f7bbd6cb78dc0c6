//! A service behind proxies, which limits the clients and not the proxies. Run with
//!
//! ```text
//! cargo run --example behind_proxy [-- 127.0.0.1:3000 10.0.0.0/8 2001:db8::/32]
//! curl -i -H 'x-forwarded-for: 203.0.113.9' http://127.0.0.1:3000/
//! curl -i -H 'x-forwarded-for: 198.51.100.7, 203.0.113.9' http://127.0.0.1:3000/
//! ```
//!
//! The networks after the address are those of the proxies; without any, this machine is trusted, so that curl can stand
//! for a proxy. Both requests are those of 203.0.113.9: what stands left of it, the client may have written itself.

use std::error::Error;
use std::net::SocketAddr;

use axum::{Router, routing::get};
use tokio::net::TcpListener;
use tower_token_bucket::{ClientIp, Limit, MemoryStore, Quota, TokenBucketLayer};

fn app(client: ClientIp) -> Router {
    let limit = Limit::new("per-client", Quota::per_minute(5)).key_by(client);
    Router::new()
        .route("/", get(|| async { "Hello, World!\n" }))
        .layer(TokenBucketLayer::new(MemoryStore::new(), limit))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let mut proxies: Vec<_> = arguments.collect();
    if proxies.is_empty() {
        proxies = vec!["127.0.0.1".to_owned(), "::1".to_owned()];
    }
    // From anybody else the header is ignored. Networks that are written into the program are for `trusted_proxies`, which
    // panics where one of them is none.
    let client =
        ClientIp::forwarded("x-forwarded-for").try_trusted_proxies(proxies).map_err(|error| error.to_string())?;
    let listener = TcpListener::bind(&address).await.map_err(|error| format!("cannot listen on {address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app(client).into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}
