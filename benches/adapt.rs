//! How a sender finds a limit that it does not know: a dispatcher that assumes 100 requests per second, and a consumer on
//! loopback that allows 10, and after a minute 50. Run with
//!
//! ```text
//! cargo bench --bench adapt
//! ```
//!
//! It takes a minute and a half, prints how much of the limit was reached and how much of it was refused, and draws
//! `docs/adapt.svg`.

#![allow(clippy::disallowed_types, reason = "a bench measures real time")]

#[path = "support/chart.rs"]
mod chart;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::post;
use chart::{Axis, Chart, Form, Panel, Series};
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_token_bucket::outbound::{AdaptiveRate, Host, Limiter, ThrottleError, ThrottleLayer};
use tower_token_bucket::{KeyExtractor, Limit, MemoryStore, Quota, TokenBucketLayer};

/// What the sender assumes, in requests per second, and its burst.
const ASSUMED: u64 = 100;
const BURST: u64 = 20;
const WORKERS: usize = 8;
/// What the consumer allows, in requests per second and as its burst: at first, and after so many seconds.
const AT_FIRST: u64 = 10;
const LATER: u64 = 50;
const CHANGE_S: u64 = 60;
const END_S: u64 = 95;
/// How often the sender's rate is looked at.
const LOOK: Duration = Duration::from_millis(250);

/// When each request came, in seconds, and whether it was let through.
#[derive(Clone)]
struct Seen {
    began: Instant,
    requests: Arc<Mutex<Vec<(f64, bool)>>>,
}

impl Seen {
    fn record(&self, is_allowed: bool) {
        let at = self.began.elapsed().as_secs_f64();
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push((at, is_allowed));
    }

    /// How many in these seconds were let through, and how many not.
    fn count(&self, from: f64, to: f64) -> (f64, f64) {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        let within: Vec<_> = requests.iter().filter(|(at, _)| (from..to).contains(at)).collect();
        let allowed = within.iter().filter(|(_, is_allowed)| *is_allowed).count();
        (allowed as f64, (within.len() - allowed) as f64)
    }
}

fn limit(rate: u64) -> Limit {
    Limit::new("per-sender", Quota::per_second(rate))
}

/// A consumer, where it listens, and what changes its limit.
async fn consumer(seen: Seen) -> Result<(Uri, impl Fn(u64) -> Result<(), BoxError>), BoxError> {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit(AT_FIRST))
        .on_decision(move |decision| seen.record(decision.is_allowed()));
    let handle = layer.handle();
    let app = Router::new().route("/hook", post(async || ())).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let to = format!("http://{}/hook", listener.local_addr()?).parse()?;
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    Ok((to, move |rate| Ok(handle.replace([limit(rate)])?)))
}

/// A worker that sends all that it may.
async fn work(to: Uri, limiter: Limiter<MemoryStore>) -> BoxError {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let client = ThrottleLayer::new(limiter).layer(service_fn(move |request: Request<Full<Bytes>>| {
        let response = client.request(request);
        async move {
            let (head, body) = response.await?.into_parts();
            body.collect().await?;
            Ok::<_, BoxError>(Response::from_parts(head, ()))
        }
    }));
    loop {
        let request = Request::post(&to).body(Full::default()).expect("a URL");
        match client.clone().oneshot(request).await {
            Ok(_) => {}
            Err(ThrottleError::Acquire(error)) => sleep(error.retry_after().unwrap_or_default()).await,
            Err(ThrottleError::Inner(error)) => return error,
        }
    }
}

fn chart(seen: &Seen, rates: Vec<(f64, f64)>, summary: String) -> Chart {
    let (change, end) = (CHANGE_S as f64, END_S as f64);
    let seconds = || (0..END_S).map(|second| (second as f64 + 0.5, seen.count(second as f64, second as f64 + 1.0)));
    let series = |name: &str, form, colour, points| Series { name: name.to_owned(), form, colour, points };
    let limit = vec![(0.0, AT_FIRST as f64), (change, LATER as f64), (end, LATER as f64)];
    let sent = series("delivered", Form::Bars(0.8), 3, seconds().map(|(at, (allowed, _))| (at, allowed)).collect());
    let refused =
        series("refused (429)", Form::Bars(0.8), 1, seconds().map(|(at, (_, refused))| (at, refused)).collect());
    let most = refused.points.iter().map(|(_, refused)| *refused).fold(0.0, f64::max);
    let to = (most / 5.0).ceil().max(1.0) * 5.0;
    Chart {
        title: format!("A sender that assumes {ASSUMED} requests per second finds what its peer allows"),
        description: summary,
        x: Axis::numbers("time (s)", 0.0, end, 10.0),
        panels: vec![
            Panel {
                name: "requests per second".to_owned(),
                height: 260.0,
                to: ASSUMED as f64,
                step: 20.0,
                series: vec![
                    series("rate that the sender allows itself", Form::Line, 0, rates),
                    series("what the peer allows", Form::Steps, 2, limit),
                    sent,
                ],
            },
            Panel { name: "refused per second".to_owned(), height: 70.0, to, step: to / 2.0, series: vec![refused] },
        ],
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let seen = Seen { began: Instant::now(), requests: Arc::default() };
    let (to, change) = consumer(seen.clone()).await?;
    let endpoint = Host.extract(&Request::post(&to).body(())?.into_parts().0).expect("a URL with a host");
    let quota = Quota::per_second(ASSUMED).with_capacity(BURST);
    let limiter = Limiter::new(MemoryStore::new(), "webhooks", quota).adaptive(AdaptiveRate::below(ASSUMED as f64));
    let mut workers: JoinSet<_> = (0..WORKERS).map(|_| work(to.clone(), limiter.clone())).collect();
    let (mut rates, mut is_changed) = (Vec::new(), false);
    loop {
        let at = seen.began.elapsed().as_secs_f64();
        if at >= END_S as f64 {
            break;
        }
        if at >= CHANGE_S as f64 && !is_changed {
            change(LATER)?;
            is_changed = true;
        }
        rates.push((at, limiter.rate(endpoint).await?));
        sleep(LOOK).await;
        if let Some(ended) = workers.try_join_next() {
            return Err(ended?);
        }
    }

    let minute = CHANGE_S as f64;
    let share = seen.count(0.0, minute).0 / (AT_FIRST as f64 * (minute + 1.0)) * 100.0;
    let refused = |from, to| {
        let (allowed, refused) = seen.count(from, to);
        refused / (allowed + refused) * 100.0
    };
    let half = refused(minute / 2.0, minute);
    let found = rates.iter().find(|(at, rate)| *at > minute && *rate >= LATER as f64).map(|(at, _)| at - minute);
    let later = seen.count(END_S as f64 - 10.0, END_S as f64).0 / 10.0;
    let last = refused(END_S as f64 - 10.0, END_S as f64);
    let found = found.map_or("is not reached".to_owned(), |after| format!("is reached after {after:.1} s"));
    let summary = format!(
        "Of {AT_FIRST} requests per second that the peer allows in the first minute, {share:.1} % are delivered; in its second half {half:.1} % are refused. \
         Then the peer allows {LATER}, which {found}; in the last ten seconds {later:.1} per second are delivered and {last:.1} % refused."
    );
    println!("{summary}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/adapt.svg");
    chart(&seen, rates, summary).write(&path)?;
    println!("{}", path.display());
    Ok(())
}
