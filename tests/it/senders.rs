//! Senders as a whole: how near they come to a limit that they do not know, and what several processes send together.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower::{BoxError, Layer, ServiceExt, service_fn};
use tower_token_bucket::outbound::{AdaptiveRate, Host, Limiter, ThrottleError, ThrottleLayer};
use tower_token_bucket::{BucketKey, KeyExtractor, MemoryStore, OnStoreFailure, Quota, RedisStore, Store};

use crate::outbound::{Noted, excess};
use crate::server::Server;

const NAME: &str = "webhooks";

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

// A limit that the sender does not know, in virtual time.

/// A peer that enforces a limit of its own, and keeps when it was asked, and whether it was content.
#[derive(Clone)]
struct Peer {
    rate: f64,
    burst: f64,
    /// Whether a 429 says how long to wait, in whole seconds, rounded up.
    says_how_long: bool,
    started: Instant,
    state: Arc<Mutex<PeerState>>,
}

struct PeerState {
    level: f64,
    at: Duration,
    seen: Vec<(Duration, bool)>,
}

impl Peer {
    fn new(rate: f64, burst: f64, says_how_long: bool) -> Self {
        let state = PeerState { level: burst, at: Duration::ZERO, seen: Vec::new() };
        Self { rate, burst, says_how_long, started: Instant::now(), state: Arc::new(Mutex::new(state)) }
    }

    fn answer(&self) -> Response<()> {
        let mut state = self.state.lock().unwrap();
        let now = self.started.elapsed();
        state.level = (state.level + (now - state.at).as_secs_f64() * self.rate).min(self.burst);
        state.at = now;
        let is_content = state.level >= 1.0;
        state.seen.push((now, is_content));
        if is_content {
            state.level -= 1.0;
            return Response::new(());
        }
        let seconds = ((1.0 - state.level) / self.rate).ceil().max(1.0);
        refusal(self.says_how_long.then_some(seconds as u64))
    }
}

fn refusal(retry_after_s: Option<u64>) -> Response<()> {
    let response = Response::builder().status(StatusCode::TOO_MANY_REQUESTS);
    let response = match retry_after_s {
        Some(seconds) => response.header("retry-after", seconds),
        None => response,
    };
    response.body(()).unwrap()
}

fn post() -> Request<()> {
    Request::post("http://peer.example/hook").body(()).unwrap()
}

/// How well a minute went.
struct Minute {
    /// What passed, of what the peer's limit allowed.
    share: f64,
    /// Answers of the second half that were 429, of all its answers.
    refused: f64,
}

/// Workers that send for a minute all that they may, to a peer that allows a tenth of what they assume.
async fn minute(assumed: u64, workers: usize, says_how_long: bool, round_trip: Duration) -> Minute {
    const MINUTE: Duration = ms(60_000);
    let real = assumed as f64 / 10.0;
    let peer = Peer::new(real, real, says_how_long);
    let limiter = Limiter::new(MemoryStore::new(), NAME, Quota::per_second(assumed).with_capacity(20))
        .adaptive(AdaptiveRate::below(assumed as f64));
    let throttle = ThrottleLayer::new(limiter);
    let mut tasks = JoinSet::new();
    for _ in 0..workers {
        let answers = peer.clone();
        let client = throttle.layer(service_fn(move |_: Request<()>| {
            let peer = answers.clone();
            async move {
                sleep(round_trip / 2).await;
                let answer = peer.answer();
                sleep(round_trip / 2).await;
                Ok::<_, Infallible>(answer)
            }
        }));
        tasks.spawn(async move {
            loop {
                match client.clone().oneshot(post()).await {
                    Ok(_) => {}
                    Err(ThrottleError::Acquire(error)) => sleep(error.retry_after().unwrap()).await,
                    Err(ThrottleError::Inner(never)) => match never {},
                }
            }
        });
    }
    sleep(MINUTE).await;
    drop(tasks);
    let seen = &peer.state.lock().unwrap().seen;
    let passed = seen.iter().filter(|(_, is_content)| *is_content).count() as f64;
    let second_half: Vec<_> = seen.iter().filter(|(at, _)| *at >= MINUTE / 2).collect();
    let refused = second_half.iter().filter(|(_, is_content)| !is_content).count() as f64;
    Minute {
        share: passed / (peer.burst + peer.rate * MINUTE.as_secs_f64()),
        // No answer at all is no success.
        refused: if second_half.is_empty() { 1.0 } else { refused / second_half.len() as f64 },
    }
}

/// Asserts what a minute has to reach, at two rates, with few workers and many, near the peer and far from it.
async fn assert_found(says_how_long: bool, runs: usize) {
    let mut missed = Vec::new();
    for assumed in [100, 1000] {
        // Four workers at 100 ms cannot send 100 requests a second.
        for (workers, round_trip) in [(4, ms(0)), (4, ms(20)), (32, ms(0)), (32, ms(20)), (32, ms(100))] {
            let mut minutes = Vec::new();
            for _ in 0..runs {
                minutes.push(minute(assumed, workers, says_how_long, round_trip).await);
            }
            let share = minutes.iter().map(|minute| minute.share).fold(f64::MAX, f64::min);
            let refused = minutes.iter().map(|minute| minute.refused).fold(0.0, f64::max);
            let line = format!(
                "{assumed}/s assumed, {}/s allowed, {workers} workers, {round_trip:?} away: {:.1} % of the limit, {:.2} % refused",
                assumed / 10,
                share * 100.0,
                refused * 100.0
            );
            println!("{line}");
            if share < 0.80 || refused >= 0.02 {
                missed.push(line);
            }
        }
    }
    assert!(missed.is_empty(), "at least 80 %, and fewer than 2 %: {missed:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_tenth_of_the_assumed_rate_is_found_where_the_peer_says_how_long_to_wait() {
    assert_found(true, 1).await;
}

/// The back-off is random, so the worst of several runs counts.
#[tokio::test(start_paused = true)]
async fn a_tenth_of_the_assumed_rate_is_found_where_the_peer_does_not_say_how_long_to_wait() {
    assert_found(false, 5).await;
}

// The rate that a peer's refusals lead to, through the whole layer.

/// The bucket of [`post`].
fn peer_key() -> BucketKey {
    Host.extract(&post().into_parts().0).unwrap()
}

fn adaptive(capacity: u64) -> Limiter<MemoryStore> {
    let limiter = Limiter::new(MemoryStore::new(), NAME, Quota::per_second(100).with_capacity(capacity));
    limiter.adaptive(AdaptiveRate::below(100.0))
}

#[tokio::test(start_paused = true)]
async fn a_refusal_stops_all_workers_for_its_time_and_the_rate_grows_from_its_half_to_the_ceiling() {
    const ONE_WAY: Duration = ms(5);
    let limiter = adaptive(20);
    let started = Instant::now();
    let (starts, refused_at) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(None)));
    let (noted, when) = (Arc::clone(&starts), Arc::clone(&refused_at));
    let client = ThrottleLayer::new(limiter.clone()).layer(service_fn(move |_: Request<()>| {
        noted.lock().unwrap().push(started.elapsed());
        let refused_at = Arc::clone(&when);
        async move {
            sleep(ONE_WAY).await;
            let is_refused = {
                let mut refused_at = refused_at.lock().unwrap();
                let is_refused = refused_at.is_none() && started.elapsed() >= ms(1000);
                if is_refused {
                    *refused_at = Some(started.elapsed());
                }
                is_refused
            };
            sleep(ONE_WAY).await;
            Ok::<_, Infallible>(if is_refused { refusal(Some(2)) } else { Response::new(()) })
        }
    }));
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let client = client.clone();
        tasks.spawn(async move {
            loop {
                client.clone().oneshot(post()).await.unwrap();
            }
        });
    }
    // Another endpoint, whose every token has to be there at once.
    let other = limiter.clone();
    tasks.spawn(async move {
        loop {
            other.try_acquire(BucketKey::id("other.example"), 1).await.unwrap();
            sleep(ms(20)).await;
        }
    });
    let mut rates = Vec::new();
    while started.elapsed() < ms(15_000) {
        sleep(ms(50)).await;
        rates.push(limiter.rate(peer_key()).await.unwrap());
    }
    // The other endpoint's would have ended.
    assert_eq!(tasks.len(), 9);
    drop(tasks);

    let heard = refused_at.lock().unwrap().unwrap() + ONE_WAY;
    let starts = starts.lock().unwrap().clone();
    let first = *starts.iter().find(|at| **at > heard).unwrap();
    // The bucket is empty then, and earns 50 a second.
    assert_eq!(first, heard + ms(2000) + ms(20));
    let second_after = starts.iter().filter(|at| **at > heard && **at <= heard + ms(3000)).count();
    assert_eq!(second_after, 50, "in the first second");

    rates.dedup();
    // A tenth more each second, in thousandths of a token, rounded down.
    assert_eq!(rates, [100.0, 50.0, 55.0, 60.5, 66.55, 73.205, 80.525, 88.577, 97.434, 100.0]);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_in_the_first_second_of_a_store_halves_the_rate_too() {
    let limiter = adaptive(5);
    limiter.refused(peer_key(), Some(ms(1000))).await.unwrap();
    assert_eq!(limiter.rate(peer_key()).await.unwrap(), 50.0);
}

#[tokio::test(start_paused = true)]
async fn after_twenty_refusals_the_rate_is_the_floor_and_the_sender_goes_on() {
    let limiter = adaptive(5);
    sleep(ms(1000)).await;
    let client = ThrottleLayer::new(limiter.clone())
        .layer(service_fn(|_: Request<()>| async { Ok::<_, Infallible>(refusal(Some(1))) }));
    let mut rates = Vec::new();
    for _ in 0..20 {
        let response = client.clone().oneshot(post()).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        rates.push(limiter.rate(peer_key()).await.unwrap());
    }
    assert_eq!(rates[..7], [50.0, 25.0, 12.5, 6.25, 3.125, 1.562, 1.0]);
    assert!(rates[6..].iter().all(|rate| *rate == 1.0), "{rates:?}");
}

/// inspect_ai#5138. Nothing is sent during a cooldown, so that these are late answers to what was sent before.
#[tokio::test(start_paused = true)]
async fn late_refusals_that_extend_a_cooldown_lower_the_rate_to_the_floor() {
    const SENT: u32 = 20;
    let limiter = adaptive(u64::from(SENT));
    let number = Arc::new(AtomicU32::new(0));
    let client = ThrottleLayer::new(limiter.clone()).layer(service_fn(move |_: Request<()>| {
        let late = ms(10_000) * (number.fetch_add(1, Relaxed) + 1);
        async move {
            sleep(late).await;
            Ok::<_, Infallible>(refusal(Some(89)))
        }
    }));
    let mut tasks: JoinSet<_> = (0..SENT).map(|_| client.clone().oneshot(post())).collect();
    let mut rates = Vec::new();
    while let Some(response) = tasks.join_next().await {
        assert_eq!(response.unwrap().unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
        rates.push(limiter.rate(peer_key()).await.unwrap());
    }
    assert_eq!(rates[..7], [50.0, 25.0, 12.5, 6.25, 3.125, 1.562, 1.0]);
    assert!(rates.len() == 20 && rates[6..].iter().all(|rate| *rate == 1.0), "{rates:?}");
    let error = limiter.acquire(peer_key(), 1).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(ms(90_000)), "the last cooldown, and a second for a token at the floor");
}

// Several processes on one Redis, and a peer that has a clock of its own.

/// What makes this test binary a sender: the words of its [`Job`].
const JOB: &str = "TOKEN_BUCKET_SENDER";
/// Fields of a request: the process that sends it, and when it had its token, in microseconds since that began.
const SENDER: &str = "x-sender";
const GRANTED: &str = "x-granted";
const CAPACITY: u64 = 20;
const RATE: u64 = 100;
/// It grows fast, so that a test does not last.
const SENDERS_RATE: AdaptiveRate = AdaptiveRate { increase: 1.5, ..AdaptiveRate::below(RATE as f64) };

fn quota() -> Quota {
    Quota::per_second(RATE).with_capacity(CAPACITY)
}

/// What a sending process is told, as words in its environment.
struct Job {
    redis: String,
    to: String,
    /// An endpoint that is far from its limit.
    other: String,
    adapts: bool,
    workers: usize,
    seconds: u64,
}

impl Job {
    fn words(&self) -> String {
        let Self { redis, to, other, adapts, workers, seconds } = self;
        format!("{redis} {to} {other} {adapts} {workers} {seconds}")
    }

    fn read(words: &str) -> Self {
        let mut words = words.split(' ').map(str::to_owned);
        let mut next = || words.next().unwrap();
        Self {
            redis: next(),
            to: next(),
            other: next(),
            adapts: next().parse().unwrap(),
            workers: next().parse().unwrap(),
            seconds: next().parse().unwrap(),
        }
    }
}

/// A sending process, where a test below has started it; no test by itself.
#[test]
fn process() {
    let Ok(words) = std::env::var(JOB) else { return };
    let job = Job::read(&words);
    runtime().block_on(async {
        let store = RedisStore::connect(&job.redis).await.unwrap();
        say("ready");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let began = Instant::now();
        say("began");
        if job.adapts {
            let limiter = Limiter::new(store, NAME, quota()).adaptive(SENDERS_RATE);
            send(&job, began, limiter.clone(), limiter).await;
        } else {
            let noted = Noted::new(store.clone(), began);
            let limiter = Limiter::new(noted.clone(), NAME, quota());
            send(&job, began, limiter, Limiter::new(store, NAME, quota())).await;
            for (asked, answered, cost) in noted.given() {
                say(&format!("given {} {} {cost}", asked.as_micros(), answered.as_micros()));
            }
        }
        say("done");
    });
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// On a line of its own: the harness prints too.
fn say(line: &str) {
    println!("\nsender: {line}");
}

/// Sends all that it may to one endpoint, and a little to the other.
async fn send<St: Store>(job: &Job, began: Instant, limiter: Limiter<St>, other: Limiter<impl Store>) {
    // Where Redis is slow nothing is sent: this is not about the policy.
    let limiter = limiter.deadline(ms(2000)).on_store_failure(OnStoreFailure::Deny);
    let other = other.deadline(ms(2000)).on_store_failure(OnStoreFailure::Deny);
    let http = Client::builder(TokioExecutor::new()).build_http();
    let post = service_fn(move |mut request: Request<Full<Bytes>>| {
        let granted = began.elapsed().as_micros().to_string();
        request.headers_mut().insert(GRANTED, granted.parse().unwrap());
        let response = http.request(request);
        async move {
            let (head, body) = response.await?.into_parts();
            body.collect().await?;
            Ok::<_, BoxError>(Response::from_parts(head, ()))
        }
    });
    let id = std::process::id();
    let request = move |to: &str| Request::post(to).header(SENDER, id).body(Full::default()).unwrap();
    let until = began + Duration::from_secs(job.seconds);
    let mut tasks = JoinSet::new();
    for _ in 0..job.workers {
        let client = ThrottleLayer::new(limiter.clone()).layer(post.clone());
        let to = job.to.clone();
        tasks.spawn(async move {
            while Instant::now() < until {
                match client.clone().oneshot(request(&to)).await {
                    Ok(response) if response.status() == StatusCode::TOO_MANY_REQUESTS => {
                        say(&format!("heard {}", began.elapsed().as_micros()));
                    }
                    Ok(response) => assert_eq!(response.status(), StatusCode::OK),
                    Err(ThrottleError::Acquire(error)) => sleep(error.retry_after().unwrap()).await,
                    Err(ThrottleError::Inner(error)) => panic!("{error}"),
                }
            }
        });
    }
    // Whose tokens have to be there at once.
    let at_once = ThrottleLayer::new(other.max_wait(Duration::ZERO)).layer(post);
    while Instant::now() < until {
        let response = at_once.clone().oneshot(request(&job.other)).await.expect("the other endpoint's token is there");
        assert_eq!(response.status(), StatusCode::OK);
        sleep(ms(50)).await;
    }
    while let Some(worker) = tasks.join_next().await {
        worker.unwrap();
    }
}

/// A sending process. What it says of its clock is brought onto this one's: it began between two moments here.
struct Sender {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
    began: (Instant, Instant),
}

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Sender {
    fn start(job: &Job) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["senders::process", "--exact", "--nocapture", "--test-threads=1"])
            .env(JOB, job.words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        let now = Instant::now();
        let mut sender = Self { child, output, began: (now, now) };
        assert_eq!(sender.next(), "ready");
        sender
    }

    /// What it says next.
    fn next(&mut self) -> String {
        loop {
            let line = self.output.next().expect("it has died").unwrap();
            if let Some(said) = line.strip_prefix("sender: ") {
                return said.to_owned();
            }
        }
    }

    fn begin(&mut self) {
        let before = Instant::now();
        writeln!(self.child.stdin.as_mut().unwrap(), "begin").unwrap();
        assert_eq!(self.next(), "began");
        self.began = (before, Instant::now());
    }

    /// The moments of this clock between which that time of its own was.
    fn when(&self, us: &str) -> (Instant, Instant) {
        let since = Duration::from_micros(us.parse().unwrap());
        (self.began.0 + since, self.began.1 + since)
    }

    /// All that it says until it ends, and ends well.
    fn finish(&mut self) -> Vec<String> {
        let mut said = Vec::new();
        loop {
            let line = self.next();
            if line == "done" {
                break;
            }
            said.push(line);
        }
        // To the end: it would fail if nobody listened to the harness's last words.
        self.output.by_ref().for_each(drop);
        assert!(self.child.wait().unwrap().success());
        said
    }
}

/// Starts them all, and lets them begin when all are there.
fn start_senders(number: usize, job: &Job) -> Vec<Sender> {
    let mut senders: Vec<_> = (0..number).map(|_| Sender::start(job)).collect();
    senders.iter_mut().for_each(Sender::begin);
    senders
}

/// A request, as the endpoint saw it.
#[derive(Clone)]
struct Arrival {
    at: Instant,
    sender: u32,
    /// Since its sender began, by that one's clock.
    granted: Duration,
    refused: bool,
}

/// An endpoint in this process, that refuses one request for two seconds when that is asked for.
#[derive(Clone, Default)]
struct Endpoint {
    arrivals: Arc<Mutex<Vec<Arrival>>>,
    refuse_next: Arc<AtomicBool>,
}

impl Endpoint {
    /// Starts it, and gives the URL to send to.
    fn start(&self, runtime: &tokio::runtime::Runtime) -> String {
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let endpoint = self.clone();
        let app = axum::Router::new()
            .route("/hook", axum::routing::post(move |headers| std::future::ready(endpoint.answer(&headers))));
        runtime.spawn(async move { axum::serve(listener, app).await });
        url
    }

    fn answer(&self, headers: &HeaderMap) -> Response<axum::body::Body> {
        let text = |name: &str| headers[name].to_str().unwrap().to_owned();
        let refused = self.refuse_next.swap(false, Relaxed);
        let (sender, granted) = (text(SENDER).parse().unwrap(), Duration::from_micros(text(GRANTED).parse().unwrap()));
        self.arrivals.lock().unwrap().push(Arrival { at: Instant::now(), sender, granted, refused });
        let response = if refused { refusal(Some(2)) } else { Response::new(()) };
        response.map(|()| axum::body::Body::empty())
    }

    fn arrivals(&self) -> Vec<Arrival> {
        self.arrivals.lock().unwrap().clone()
    }
}

/// By how much that many at those moments exceed the quota, in the interval in which they do most.
fn excess_of(arrivals: &[Instant]) -> f64 {
    let (mut level, mut last, mut most) = (0.0, arrivals[0], 0.0_f64);
    for at in arrivals {
        level = f64::max(level - (*at - last).as_secs_f64() * RATE as f64, 0.0) + 1.0;
        most = most.max(level - CAPACITY as f64);
        last = *at;
    }
    most
}

#[test]
fn four_processes_never_send_more_than_the_quota_and_leave_little_of_it() {
    const SECONDS: u64 = 10;
    let (server, runtime) = (Server::start(), runtime());
    let [endpoint, other] = [(); 2].map(|()| Endpoint::default());
    let (to, to_other) = (endpoint.start(&runtime), other.start(&runtime));
    let job = Job { redis: server.url(), to, other: to_other, adapts: false, workers: 8, seconds: SECONDS };
    let mut senders = start_senders(4, &job);
    let zero = senders[0].began.0;
    let (mut given, mut clocks) = (Vec::new(), HashMap::new());
    for sender in &mut senders {
        clocks.insert(sender.child.id(), sender.began.0);
        for line in sender.finish() {
            let words: Vec<_> = line.split(' ').collect();
            let ["given", asked, answered, cost] = words[..] else { panic!("{line}") };
            given.push((sender.when(asked).0 - zero, sender.when(answered).1 - zero, cost.parse::<u64>().unwrap()));
        }
    }
    let arrivals = endpoint.arrivals();
    let tokens: u64 = given.iter().map(|(.., cost)| cost).sum();
    assert_eq!(tokens as usize, arrivals.len(), "what was taken is what was sent");

    // What Redis granted, exactly: its clock may be slewed by 500 millionths, which is half a token in 10 s.
    let granted = excess(&given, quota(), RATE as f64);
    let first = given.iter().map(|(_, answered, _)| *answered).min().unwrap();
    let last = given.iter().map(|(asked, ..)| *asked).max().unwrap();
    let most = CAPACITY as f64 + RATE as f64 * (last - first).as_secs_f64();
    let share = arrivals.len() as f64 / most;

    // What the endpoint saw: a request comes a little later than it had its token, and not always by the same time, so that
    // two may come nearer to each other than they were sent. In no interval are there more above the quota than it earns in
    // the longest of these times, which on a machine with time to spare is some milliseconds; 40 ms are 4 tokens.
    let at: Vec<_> = arrivals.iter().map(|arrival| arrival.at).collect();
    let seen = excess_of(&at);
    let longest =
        arrivals.iter().map(|arrival| arrival.at - (clocks[&arrival.sender] + arrival.granted)).max().unwrap();
    println!(
        "4 x 8 senders: {tokens} of {most:.1} ({:.1} %); {granted:.3} granted above the quota, {seen:.2} seen above it, {longest:?} on the way at most",
        share * 100.0
    );
    assert!(granted <= 0.5, "{granted} granted above the quota");
    assert!(seen <= f64::max(4.0, RATE as f64 * longest.as_secs_f64()), "{seen} seen above the quota, {longest:?}");
    assert!(share >= 0.97, "{tokens} of {most}");
    // Each sends every 50 ms or a little later, and has its token at once: it ends with a panic if not.
    let others = other.arrivals().len();
    println!("another endpoint: {others}");
    assert!(others as u64 >= 4 * SECONDS * 20 / 2, "{others} to another endpoint");
}

#[test]
fn a_refusal_to_one_process_stops_both_and_halves_the_rate_of_both_while_others_go_on() {
    let (server, runtime) = (Server::start(), runtime());
    let [endpoint, other] = [(); 2].map(|()| Endpoint::default());
    let (to, to_other) = (endpoint.start(&runtime), other.start(&runtime));
    let rate = {
        let key = Host.extract(&Request::post(&to).body(()).unwrap().into_parts().0).unwrap();
        let store = runtime.block_on(RedisStore::connect(&server.url())).unwrap();
        let limiter = Limiter::new(store, NAME, quota()).deadline(ms(2000)).on_store_failure(OnStoreFailure::Deny);
        // The settings of the senders.
        let limiter = limiter.adaptive(SENDERS_RATE);
        let runtime = runtime.handle().clone();
        move || runtime.block_on(limiter.rate(key)).unwrap()
    };
    let job = Job { redis: server.url(), to, other: to_other, adapts: true, workers: 4, seconds: 8 };
    let mut senders = start_senders(2, &job);
    std::thread::sleep(ms(1000));
    assert_eq!(rate(), 100.0);
    endpoint.refuse_next.store(true, Relaxed);
    std::thread::sleep(ms(1000));
    assert_eq!(rate(), 50.0, "half, of both");

    let heard: Vec<_> = senders
        .iter_mut()
        .flat_map(|sender| {
            let said = sender.finish();
            said.iter().map(|line| sender.when(line.strip_prefix("heard ").unwrap())).collect::<Vec<_>>()
        })
        .collect();
    let [heard] = heard[..] else { panic!("one refusal was heard {} times", heard.len()) };
    let clocks: HashMap<_, _> = senders.iter().map(|sender| (sender.child.id(), sender.began)).collect();
    let arrivals = endpoint.arrivals();
    let refused: Vec<_> = arrivals.iter().filter(|arrival| arrival.refused).collect();
    let [refused] = refused[..] else { panic!("{} were refused", refused.len()) };
    let both = [true, false]
        .map(|of_refused| arrivals.iter().filter(|arrival| (arrival.sender == refused.sender) == of_refused).count());
    assert!(both.iter().all(|sent| *sent > 50), "each sends: {both:?}");

    // The sender has reported the refusal before it hears of it. What had its token before that is under way; it may have
    // had it from Redis, and not know it yet, for which it has as long as the 150 ms of a busy machine.
    let over = heard.1 + ms(150);
    let starts = |arrival: &Arrival| {
        let (from, to) = clocks[&arrival.sender];
        (from + arrival.granted, to + arrival.granted)
    };
    let under_way = arrivals.iter().filter(|it| starts(it).1 > refused.at && starts(it).0 <= over).count();
    let early: Vec<_> = arrivals
        .iter()
        .map(starts)
        .filter(|(from, to)| *from > over && *to < refused.at + ms(2000))
        .map(|(from, _)| from - refused.at)
        .collect();
    assert!(early.is_empty(), "sent after a refusal for 2 s: {early:?}");
    let first = arrivals.iter().map(starts).map(|(from, _)| from).filter(|from| *from > over).min().unwrap();
    println!(
        "heard after {:?}, {under_way} under way, the next {:?} after the refusal",
        heard.1 - refused.at,
        first - refused.at
    );
    // Half of the rate, from an empty bucket; some may be late, as above.
    let next = arrivals.iter().map(starts).filter(|(from, to)| *from >= first && *to < first + ms(1000)).count();
    println!("{next} in the second after that");
    assert!(next <= 50 + 1 + 2, "{next} in a second at 50/s");
    assert_eq!(rate(), 100.0, "the ceiling again");
    let others = other.arrivals();
    let meanwhile = others.iter().filter(|it| it.at > refused.at && it.at < refused.at + ms(2000)).count();
    println!("{meanwhile} to another endpoint meanwhile");
    assert!(meanwhile >= 2 * 2 * 20 / 2, "{meanwhile} to another endpoint in 2 s");
}
