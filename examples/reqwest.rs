//! A `reqwest` client that sends no faster than its peer allows, to each host by itself. Run with
//!
//! ```text
//! cargo run --example consumer -- --rate 5 --capacity 2 --listen 127.0.0.1:4000
//! cargo run --example reqwest -- http://127.0.0.1:4000/hook
//! ```
//!
//! It posts 20 events, and prints how long each waited for its token.

use std::error::Error;
use std::time::Duration;

use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_token_bucket::MemoryStore;
use tower_token_bucket::outbound::{AdaptiveRate, Event, Limiter, PublishedLimit, ThrottleError, ThrottleLayer};

type Request = http::Request<String>;
type Response = http::Response<reqwest::Body>;

/// `reqwest` has types of its own, which can be made of those of `http` and back.
fn client(
    limiter: Limiter<MemoryStore>,
) -> impl Service<Request, Response = Response, Error = ThrottleError<reqwest::Error>> {
    let client = reqwest::Client::new();
    let send = service_fn(move |request: Request| {
        let (client, request) = (client.clone(), reqwest::Request::try_from(request));
        async move { client.execute(request?).await.map(Response::from) }
    });
    ServiceBuilder::new().layer(ThrottleLayer::new(limiter)).service(send)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let to = std::env::args().nth(1).ok_or("give a URL, such as http://127.0.0.1:4000/hook")?;
    let to: http::Uri = to.parse().map_err(|error| format!("{to}: {error}"))?;
    let published = PublishedLimit::new(10, Duration::from_secs(1)).bursts_to(4);
    let limiter = Limiter::new(MemoryStore::new(), "webhooks", published.try_quota()?)
        .adaptive(AdaptiveRate::of(published.try_quota()?))
        .on_event(|_, event| match event {
            Event::Acquired { waited, .. } => println!("waited {waited:.0?}"),
            Event::Refused(state) => println!("refused: {:.0?} of quiet, then {}/s", state.cooldown, state.rate),
            _ => {}
        });
    let mut client = client(limiter);
    let mut delivered = 0;
    while delivered < 20 {
        let event = format!(r#"{{"id":{delivered}}}"#);
        let request = http::Request::post(to.clone()).header("content-type", "application/json").body(event)?;
        match client.ready().await?.call(request).await {
            Ok(response) if response.status().is_success() => delivered += 1,
            // The limiter knows by now when the peer wants to be asked again.
            Ok(response) if response.status() == http::StatusCode::TOO_MANY_REQUESTS => {}
            Ok(response) => return Err(format!("the endpoint answers {}", response.status()).into()),
            // Nothing was sent: no attempt is counted.
            Err(ThrottleError::Acquire(error)) if !error.is_permanent() => {
                tokio::time::sleep(error.retry_after().unwrap_or(Duration::from_secs(1))).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    println!("delivered {delivered}");
    Ok(())
}
