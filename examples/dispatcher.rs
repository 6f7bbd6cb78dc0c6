//! A dispatcher of webhooks: posts events to one endpoint, and never faster than that endpoint allows. Run with
//!
//! ```text
//! cargo run --example consumer -- --rate 20 --capacity 10 --listen 127.0.0.1:4000
//! cargo run --example dispatcher -- --to http://127.0.0.1:4000/hook --events 200 --rate 20 --capacity 5
//! ```
//!
//! With `--redis redis://127.0.0.1:6379` all dispatchers keep to the rate together. With `--adaptive` the rate is a
//! ceiling: 429 and `Retry-After` of the endpoint stop all of them, and make them slower. `--max-wait 5s` is how long an
//! event waits for its token before it goes back into the queue, `--workers 4` how many are under way at a time.
//!
//! At the end it prints what became of the events, as one line of JSON. Arguments that cannot be used end it with status 2.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::iter::successors;
use std::num::{NonZeroU16, NonZeroU64};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::util::BoxCloneService;
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
use tower_token_bucket::outbound::{AdaptiveRate, AdaptiveStore, Host, Limiter, ThrottleError, ThrottleLayer};
use tower_token_bucket::{KeyExtractor, MemoryStore, Quota, RedisStore, Store};

/// How often an event is tried, not counted what the endpoint put off and what was never sent.
const ATTEMPTS_MAX: u32 = 5;
const BACKOFF: Duration = Duration::from_millis(200);
/// Of a request that has its token.
const TIMEOUT: Duration = Duration::from_secs(10);

struct Event {
    id: u32,
    failures: u32,
}

/// The events to send, and what became of the others.
#[derive(Default)]
struct Events {
    queue: VecDeque<Event>,
    delivered: u32,
    throttled: u64,
    requeued: u64,
    failed: u32,
    /// How long each request waited for its token.
    waits: Vec<Duration>,
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Events>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Events> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Throttled = BoxCloneService<Request<Full<Bytes>>, Response<()>, ThrottleError<BoxError>>;

/// A client that sends nothing without a token.
fn throttled<St: Store>(limiter: Limiter<St>, events: Shared) -> Throttled {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let post = service_fn(move |request: Request<Full<Bytes>>| {
        if let Some(asked) = request.extensions().get::<Instant>() {
            events.lock().waits.push(asked.elapsed());
        }
        let response = client.request(request);
        async move {
            let (head, body) = timeout(TIMEOUT, response).await??.into_parts();
            // Read, so that the connection can be used again; what it says is of no interest.
            let _ = timeout(TIMEOUT, Limited::new(body, 1 << 16).collect()).await;
            Ok::<_, BoxError>(Response::from_parts(head, ()))
        }
    });
    ServiceBuilder::new().layer(ThrottleLayer::new(limiter)).service(post).boxed_clone()
}

/// Sends events until there are none. A worker that finds none may go: those under way are with the others.
async fn work(events: Shared, to: Uri, client: Throttled) {
    let next = || events.lock().queue.pop_front();
    while let Some(mut event) = next() {
        let body = json!({ "id": event.id, "type": "example" }).to_string();
        let request = Request::post(&to).header("content-type", "application/json").extension(Instant::now());
        let request = request.body(Full::from(body)).expect("a URL and fixed fields");
        let rest = match client.clone().oneshot(request).await.map(|response| response.status()) {
            Ok(status) if status.is_success() => {
                events.lock().delivered += 1;
                continue;
            }
            // The limiter knows by now: where it adapts, nobody gets a token until the endpoint wants to be asked again.
            Ok(StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) => {
                events.lock().throttled += 1;
                Duration::ZERO
            }
            // Nothing was sent. The next event would get no token either: all of them go to the same endpoint.
            Err(ThrottleError::Acquire(error)) => {
                events.lock().requeued += 1;
                error.retry_after().unwrap_or(BACKOFF)
            }
            other => {
                // What the endpoint does not want it will not want the next time either.
                let is_unwanted = matches!(&other, Ok(status) if !status.is_server_error());
                let why = other.map_or_else(|error| reasons(&error), |status| format!("the endpoint answers {status}"));
                event.failures += 1;
                if is_unwanted || event.failures == ATTEMPTS_MAX {
                    tracing::error!("event {} is lost: {why}", event.id);
                    events.lock().failed += 1;
                    continue;
                }
                tracing::warn!("event {} is tried again: {why}", event.id);
                BACKOFF * 2u32.pow(event.failures - 1)
            }
        };
        events.lock().queue.push_back(event);
        sleep(rest).await;
    }
}

/// What went wrong, and why.
fn reasons(error: &ThrottleError<BoxError>) -> String {
    let ThrottleError::Inner(error) = error else { return error.to_string() };
    let reasons = successors(Some(&**error as &dyn Error), |error| (**error).source());
    reasons.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Sends all events, and says what became of them.
async fn dispatch<St: AdaptiveStore>(asked: &Arguments, store: St) -> Result<String, String> {
    let mut limiter = Limiter::new(store, "webhooks", asked.quota).max_wait(asked.max_wait);
    if asked.adaptive {
        let rate = AdaptiveRate::below(asked.rate);
        limiter = limiter.try_adaptive(rate).map_err(|error| format!("--adaptive: {error}"))?;
    }
    let began = Instant::now();
    let events = Shared::default();
    events.lock().queue.extend((1..=asked.events).map(|id| Event { id, failures: 0 }));
    let client = throttled(limiter.clone(), events.clone());
    let workers: JoinSet<()> =
        (0..asked.workers).map(|_| work(events.clone(), asked.to.clone(), client.clone())).collect();
    workers.join_all().await;
    let elapsed = began.elapsed();
    let endpoint = Request::post(&asked.to).body(()).expect("a URL").into_parts().0;
    let endpoint = Host.extract(&endpoint).expect("a URL with a host");
    let rate = limiter.rate(endpoint).await.expect("answered here where the store fails");
    let Events { delivered, throttled, requeued, failed, waits, .. } = &mut *events.lock();
    waits.sort_unstable();
    let wait_ms = |percent: usize| {
        let rank = (waits.len() * percent).div_ceil(100).max(1);
        waits.get(rank - 1).map_or(0.0, |wait| wait.as_micros() as f64 / 1e3)
    };
    let (events, p50, p99, elapsed_s) = (asked.events, wait_ms(50), wait_ms(99), elapsed.as_millis() as f64 / 1e3);
    Ok(format!(
        r#"{{"events":{events},"delivered":{delivered},"throttled":{throttled},"requeued":{requeued},"failed":{failed},"wait_p50_ms":{p50},"wait_p99_ms":{p99},"rate":{rate},"elapsed_s":{elapsed_s}}}"#
    ))
}

/// What the command line asks for.
struct Arguments {
    to: Uri,
    events: u32,
    rate: f64,
    quota: Quota,
    redis: Option<String>,
    max_wait: Duration,
    workers: u16,
    adaptive: bool,
}

const VALUES: [&str; 7] = ["--to", "--events", "--rate", "--capacity", "--redis", "--max-wait", "--workers"];

fn usage() -> String {
    format!("allowed are --adaptive and, each with a value, {}", VALUES.join(", "))
}

fn arguments(mut words: impl Iterator<Item = String>) -> Result<Arguments, String> {
    let mut given =
        HashMap::from([("--max-wait".to_owned(), "5s".to_owned()), ("--workers".to_owned(), "4".to_owned())]);
    while let Some(word) = words.next() {
        let value = match &*word {
            "--adaptive" => String::new(),
            word if VALUES.contains(&word) => {
                words.next().ok_or_else(|| format!("{word} needs a value: {}", usage()))?
            }
            _ => return Err(format!("unknown argument {word:?}: {}", usage())),
        };
        given.insert(word, value);
    }
    let rate: f64 = value(&given, "--rate", "0.001 to 1000000 tokens per second", |text| {
        text.parse().ok().filter(|rate| (0.001..=1e6).contains(rate))
    })?;
    let capacity = value(&given, "--capacity", "whole numbers from 1", |text| text.parse().ok())?;
    // Thousandths of a token per second.
    let quota = Quota::try_from_parts(capacity, (rate * 1000.0).round() as u64, Duration::from_secs(1000));
    Ok(Arguments {
        to: value(&given, "--to", "URLs such as http://127.0.0.1:4000/hook", |text| {
            text.parse().ok().filter(|to: &Uri| to.scheme_str() == Some("http"))
        })?,
        events: value(&given, "--events", "whole numbers up to 10000000", |text| {
            text.parse().ok().filter(|events| *events <= 10_000_000)
        })?,
        rate,
        quota: quota.map_err(|error| format!("--rate and --capacity: {error}"))?,
        max_wait: value(&given, "--max-wait", "whole numbers from 1 with a unit of us, ms, s, m or h", time)?,
        workers: value(&given, "--workers", "whole numbers from 1 to 65535", |text| {
            text.parse().ok().map(NonZeroU16::get)
        })?,
        redis: given.remove("--redis"),
        adaptive: given.contains_key("--adaptive"),
    })
}

type Given = HashMap<String, String>;

fn value<T>(given: &Given, word: &str, allowed: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, String> {
    let text = given.get(word).ok_or_else(|| format!("{word} is missing: {}", usage()))?;
    parse(text).ok_or_else(|| format!("{word} {text:?} is not allowed: {allowed} are"))
}

/// A whole number and a unit, such as `5s`.
fn time(text: &str) -> Option<Duration> {
    let units = [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000), ("h", 3_600_000_000)];
    let (number, micros) = units.iter().find_map(|(unit, micros)| Some((text.strip_suffix(unit)?, micros)))?;
    let number: NonZeroU64 = number.parse().ok()?;
    Some(Duration::from_micros(number.get().checked_mul(*micros)?))
}

async fn run() -> Result<String, String> {
    let asked = arguments(std::env::args().skip(1))?;
    match &asked.redis {
        Some(url) => {
            let store = RedisStore::connect(url).await.map_err(|error| format!("--redis: {error}"))?;
            dispatch(&asked, store).await
        }
        None => dispatch(&asked, MemoryStore::new()).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "--to http://127.0.0.1:4000/hook --events 9 --rate 2.01 --capacity 5";

    fn read(words: &str) -> Result<Arguments, String> {
        arguments(words.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn what_is_asked_for_is_what_is_done() {
        let asked =
            read(&format!("{GOOD} --max-wait 250ms --workers 7 --adaptive --redis redis://h")).expect("allowed");
        assert_eq!((asked.events, asked.rate, asked.quota.capacity(), asked.workers), (9, 2.01, 5, 7));
        // 2.01 * 1000 is not 2009.
        assert_eq!(asked.quota.refill(), (201, Duration::from_secs(100)));
        assert_eq!((asked.max_wait, asked.adaptive), (Duration::from_millis(250), true));
        assert_eq!(asked.redis.as_deref(), Some("redis://h"));
        let usual = read(GOOD).expect("allowed");
        assert_eq!(
            (usual.max_wait, usual.workers, usual.adaptive, usual.redis),
            (Duration::from_secs(5), 4, false, None)
        );
    }

    #[test]
    fn what_cannot_be_used_is_named_with_what_is_allowed() {
        for (words, parts) in [
            ("", ["--rate is missing", "--workers"]),
            ("--to", ["--to needs a value", "--workers"]),
            ("--bogus", ["unknown argument", "--workers"]),
            ("--to https://h/hook", ["--to", "http://"]),
            ("--to http:///hook", ["--to", "http://"]),
            ("--rate 0", ["--rate", "0.001 to 1000000"]),
            ("--rate NaN", ["--rate", "0.001 to 1000000"]),
            ("--capacity 0", ["capacity is 0", "1 to 2147483648"]),
            ("--events -1", ["--events", "up to 10000000"]),
            ("--workers 0", ["--workers", "from 1 to 65535"]),
            ("--max-wait 5", ["--max-wait", "us, ms, s, m or h"]),
            ("--max-wait 0s", ["--max-wait", "from 1"]),
            ("--max-wait 99999999999999999h", ["--max-wait", "from 1"]),
        ] {
            // The last of two counts.
            let asked = if words.contains(' ') { format!("{GOOD} {words}") } else { words.to_owned() };
            let error = read(&asked).err().expect(words);
            assert!(parts.iter().all(|part| error.contains(part)), "{words}: {error}");
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    match run().await {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
