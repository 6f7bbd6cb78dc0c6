//! The sender's side where something goes wrong: stores that fail and come back, clocks, senders that differ, hooks that
//! panic, and many keys.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::conformance::RateModel;
use tower_token_bucket::outbound::{AcquireError, AdaptiveRate, Event, Limiter, ThrottleLayer};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, LimitName, MemoryStore, OnStoreFailure, Quota, RedisStore, Store,
};

use crate::proxy::{Mode, Proxy};
use crate::server::Server;

const NAME: &str = "peer";
const US: u64 = 1_000_000;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key() -> BucketKey {
    BucketKey::id("peer.example")
}

fn b(capacity: u64, rate: u64) -> Quota {
    Quota::per_second(rate).with_capacity(capacity)
}

async fn in_redis(url: &str, quota: Quota, rate: AdaptiveRate) -> Limiter<RedisStore> {
    Limiter::new(RedisStore::connect(url).await.unwrap(), NAME, quota).adaptive(rate)
}

/// The time to come back that an acquire tells, if it gives no tokens.
async fn told<St: Store>(limiter: &Limiter<St>) -> Option<Duration> {
    limiter.acquire(key(), 1).await.err().and_then(|error| error.retry_after())
}

// Cooldowns and rates where the store fails.

#[tokio::test]
async fn a_cooldown_that_this_process_has_heard_of_outlasts_its_store() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(10, 10), AdaptiveRate::below(10.0)).await;
    limiter.refused(key(), Some(s(60))).await.unwrap();
    assert!(told(&limiter).await > Some(s(50)));
    server.kill();
    let told = told(&limiter).await;
    assert!(told > Some(s(50)), "the peer said 60 s, and the limiter {told:?}");
}

#[tokio::test]
async fn a_cooldown_that_begins_while_the_store_is_away_does_not_end_when_it_is_back() {
    let server = Server::start();
    let proxy = Proxy::start(server.port()).await;
    let limiter = in_redis(&proxy.url(), b(10, 10), AdaptiveRate::below(10.0)).await;
    limiter.acquire(key(), 1).await.unwrap();
    proxy.set(Mode::Refuse).await;
    limiter.refused(key(), Some(s(60))).await.unwrap();
    assert!(told(&limiter).await > Some(s(50)), "here it is kept");
    proxy.set(Mode::Pass).await;
    let until = Instant::now() + s(2);
    while Instant::now() < until {
        let told = told(&limiter).await;
        assert!(told > Some(s(50)), "the peer said 60 s, and the limiter {told:?}");
        sleep(ms(20)).await;
    }
}

#[tokio::test]
async fn a_rate_that_has_been_learnt_outlasts_the_store() {
    let server = Server::start();
    let rate = AdaptiveRate { decrease: 0.0, ..AdaptiveRate::below(100.0) };
    let limiter = in_redis(&server.url(), b(1, 100), rate).await.max_wait(s(2));
    limiter.refused(key(), Some(Duration::ZERO)).await.unwrap();
    assert_eq!(limiter.rate(key()).await.unwrap(), 1.0);
    server.kill();
    let (began, mut sent) = (Instant::now(), 0);
    while began.elapsed() < s(1) {
        sent += u64::from(limiter.try_acquire(key(), 1).await.is_ok());
        sleep(ms(5)).await;
    }
    assert!(sent <= 3, "{sent} in a second, where the peer has taken no more than 1");
}

#[tokio::test]
async fn to_be_told_of_a_cooldown_again_asks_redis_no_more_than_once_a_second() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(10, 10), AdaptiveRate::below(10.0)).await;
    limiter.refused(key(), Some(s(60))).await.unwrap();
    let before = server.calls("evalsha");
    let began = Instant::now();
    for _ in 0..500 {
        assert!(told(&limiter).await > Some(s(30)));
    }
    let (asked, most) = (server.calls("evalsha") - before, began.elapsed().as_secs() + 2);
    assert!(asked <= most, "asked {asked} times for 0 tokens");
}

// A clock that steps back.

#[test]
fn a_clock_that_steps_back_begins_no_cooldown_that_has_ended() {
    let mut model = RateModel::try_new(10, AdaptiveRate::below(10.0)).unwrap();
    let began = 1_000_000 * US;
    model.refused(Some(US), 0, began);
    assert!(model.take(1, began + 10 * US).is_allowed(), "it ended 9 s ago");
    // 100 s back. Rule 7: nobody waits longer than an empty bucket needs to fill, plus 1 s.
    let now = began - 90 * US;
    model.take(1, now);
    let fills = 10 * US / 5;
    assert!(model.take(1, now + fills + US).is_allowed());
}

/// What `lua/pace.lua` keeps after the test above: the bucket has tokens, and the cooldown seems to go on.
#[tokio::test]
async fn where_the_clock_has_stepped_back_to_before_a_cooldown_nobody_waits_beyond_max_wait_or_asks_all_the_time() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(10, 10), AdaptiveRate::below(10.0)).await.max_wait(ms(500));
    limiter.acquire(key(), 1).await.unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
    let (until, at) = (now + 60 * US, now + 90 * US);
    let value = format!("{at}:9000000000:5000:{until}:{}:{at}:1:0:0:10", until - US);
    server.query(&["SET", &server.keys()[0], &value, "PX", "600000"]);
    let before = server.calls("evalsha");
    let outcome = timeout(s(3), limiter.acquire(key(), 1)).await;
    let asked = server.calls("evalsha") - before;
    assert!(outcome.is_ok() && asked <= 5, "{outcome:?} after {asked} questions");
}

// Senders that differ.

/// Rule 8: the life of a bucket is reckoned with the largest capacity that has used it.
#[tokio::test(start_paused = true)]
async fn senders_with_two_capacities_send_no_more_than_the_larger_allows() {
    let store = MemoryStore::new();
    let limiter = |capacity| Limiter::new(store.clone(), NAME, b(capacity, 10)).adaptive(AdaptiveRate::below(10.0));
    let (large, small) = (limiter(100), limiter(1));
    let (began, mut sent) = (Instant::now(), 0);
    for _ in 0..20 {
        while large.try_acquire(key(), 10).await.is_ok() {
            sent += 10;
        }
        small.acquire(key(), 1).await.unwrap();
        sent += 1;
        sleep(ms(150)).await;
    }
    let most = 100 + 10 * began.elapsed().as_millis() / 1000 + 1;
    assert!(sent <= most, "{sent} in {:?}, where {most} are allowed", began.elapsed());
}

/// As while `adaptive` is being rolled out: they have two buckets, and neither is an outage for the other.
#[tokio::test]
async fn senders_of_which_some_adapt_are_in_nobodys_way() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let plain = Limiter::new(store.clone(), NAME, b(10, 1)).on_store_failure(OnStoreFailure::Deny);
    let adapts = plain.clone().adaptive(AdaptiveRate::below(1.0));
    for limiter in [plain, adapts] {
        for _ in 0..10 {
            limiter.try_acquire(key(), 1).await.unwrap();
        }
        assert!(matches!(limiter.try_acquire(key(), 1).await, Err(AcquireError::NoTokens { .. })));
    }
    let names = server.keys();
    assert!(names.len() == 2 && names[1] == format!("{}:rate", names[0]), "{names:?}");
}

/// A store that fails, a little later.
#[derive(Clone)]
struct Broken;

impl Store for Broken {
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, io::Error>> + Send>>;

    fn acquire(&self, _: &[Charge]) -> Self::Future {
        Box::pin(async {
            sleep(ms(1)).await;
            Err(io::Error::other("broken"))
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_clone_with_settings_of_its_own_keeps_to_them_while_it_waits() {
    let local = Limiter::new(Broken, NAME, b(10, 10));
    let deny = local.clone().on_store_failure(OnStoreFailure::Deny);
    let (local, deny) = tokio::join!(local.acquire(key(), 1), deny.acquire(key(), 1));
    assert!(local.is_ok());
    assert!(matches!(deny, Err(AcquireError::StoreFailed { .. })), "{deny:?}");
}

#[tokio::test(start_paused = true)]
async fn costs_above_the_share_keep_to_the_share_as_well() {
    let (began, mut sent) = (Instant::now(), 0);
    let senders: Vec<_> = (0..10).map(|_| Limiter::new(Broken, NAME, b(10, 10)).share(10)).collect();
    while began.elapsed() < s(60) {
        for sender in &senders {
            sent += if sender.try_acquire(key(), 10).await.is_ok() { 10 } else { 0 };
        }
        sleep(ms(100)).await;
    }
    // 10 senders, a tenth of the capacity and of the rate each.
    let most = 10 + 10 * began.elapsed().as_secs() + 10;
    assert!(sent <= most, "{sent} tokens in 60 s, where {most} are promised");
}

#[tokio::test(start_paused = true)]
async fn a_cost_above_the_share_waits_for_the_store_and_takes_nothing_from_others() {
    let limiter = Limiter::new(Broken, NAME, b(10, 10)).share(10);
    for _ in 0..3 {
        let error = limiter.acquire(key(), 10).await.unwrap_err();
        assert!(matches!(error, AcquireError::StoreFailed { .. }), "{error:?}");
    }
    limiter.try_acquire(key(), 1).await.unwrap();
}

// Waiters.

/// A memory store of which somebody else takes a token right before the second question, and which is slow from the
/// hundredth on, so that a paused clock goes on.
#[derive(Clone)]
struct Contended {
    buckets: MemoryStore,
    asked: Arc<AtomicU64>,
}

impl Store for Contended {
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, Self::Error>> + Send>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        let asked = self.asked.fetch_add(1, Relaxed) + 1;
        let (buckets, charges) = (self.buckets.clone(), charges.to_vec());
        Box::pin(async move {
            if asked == 2 {
                let charge = &charges[0];
                let one = Charge::new(charge.limit().clone(), *charge.key(), charge.quota(), Amount::Take(1));
                buckets.acquire(&[one]).await?;
            }
            if asked >= 100 {
                sleep(ms(1)).await;
            }
            buckets.acquire(&charges).await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn one_whose_time_is_over_by_less_than_a_millisecond_does_not_ask_all_the_time() {
    let quota = b(2, 2000);
    let store = Contended { buckets: MemoryStore::new(), asked: Arc::default() };
    let name = LimitName::try_new(NAME).unwrap();
    store.buckets.acquire(&[Charge::new(name, key(), quota, Amount::Take(2))]).await.unwrap();
    let limiter = Limiter::new(store.clone(), NAME, quota).max_wait(ms(1));
    let outcome = limiter.acquire(key(), 2).await;
    let asked = store.asked.load(Relaxed);
    assert!(asked <= 5, "{asked} questions in a millisecond, for {outcome:?}");
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_panics_takes_no_tokens_from_others() {
    let panics = AtomicBool::new(true);
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10))
        .adaptive(AdaptiveRate::below(10.0))
        .on_event(move |_, event| assert!(!matches!(event, Event::Rate(_)) || !panics.swap(false, Relaxed), "a fault"));
    let (one, two) = tokio::join!(limiter.acquire(key(), 1), limiter.acquire(key(), 1));
    assert!(one.is_ok() || two.is_ok(), "{one:?}, {two:?}");
}

// Many keys.

/// Rule 10: memory is bounded without user code. A store of 64 buckets holds 64, whatever they adapt to.
#[test]
fn rates_that_adapt_fit_into_the_bound_of_a_memory_store() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let limiter = Limiter::new(MemoryStore::with_buckets(64), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    let counted = allocation_counter::measure(|| {
        runtime.block_on(async {
            for endpoint in 0..50_000u64 {
                limiter.refused(BucketKey::id(endpoint.to_le_bytes()), Some(s(1))).await.unwrap();
            }
        });
    });
    let kept = counted.bytes_current;
    assert!(kept < 1 << 20, "{kept} bytes are kept for 64 buckets");
}

/// Also where threads come at once, each to a lock of its own: not one more has a rate of its own.
#[test]
fn threads_that_flood_a_memory_store_with_rates_do_not_pass_its_bound() {
    const MOST: u64 = 4_096;
    let store = MemoryStore::with_buckets(MOST as usize);
    let limiter = Limiter::new(store.clone(), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let limiter = &limiter;
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
                runtime.block_on(async {
                    for endpoint in 0..5_000u64 {
                        let key = BucketKey::id((thread << 32 | endpoint).to_le_bytes());
                        limiter.refused(key, Some(s(60))).await.unwrap();
                    }
                });
            });
        }
    });
    assert_eq!(store.overflowed(), 4 * 5_000 - MOST);
}

/// While Redis answers, senders give no more than its buckets hold, however many keys are waited for at a time: those
/// that wait can wait for a place on the wire as well.
#[tokio::test]
async fn many_keys_at_a_time_are_no_outage_of_redis() {
    const KEYS: u64 = 8_000;
    let server = Server::start();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let quota = Quota::per_hour(1);
        let limiter = Limiter::new(store, NAME, quota.with_capacity(1)).deadline(s(60)).max_wait(s(60));
        for endpoint in 0..KEYS {
            let limiter = limiter.clone();
            tasks.spawn(async move { limiter.acquire(BucketKey::id(endpoint.to_le_bytes()), 1).await.is_ok() });
        }
    }
    let given = tasks.join_all().await.into_iter().filter(|given| *given).count();
    assert_eq!(given as u64, KEYS, "of one token for each key");
}

// What a peer says.

#[tokio::test(start_paused = true)]
async fn a_refusal_whose_reset_is_in_the_past_has_no_time_and_backs_off() {
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    let peer = service_fn(|_: Request<()>| async {
        let response = Response::builder().status(429);
        // The peer's clock, or this one, is wrong by years.
        let response = response.header("x-ratelimit-remaining", "0").header("x-ratelimit-reset", "1000000001");
        response.body(())
    });
    let client = ThrottleLayer::new(limiter.clone()).read_ratelimit_fields().layer(peer);
    client.oneshot(Request::get("http://peer.example/").body(()).unwrap()).await.unwrap();
    let cooldown = limiter.rate_state(key()).await.unwrap().cooldown;
    assert!(cooldown >= ms(500), "{cooldown:?}");
}

#[test]
fn a_rate_is_lowered_by_whatever_factor_is_allowed() {
    let rate = AdaptiveRate { decrease: 0.999_999_9, ..AdaptiveRate::below(10.0) };
    if let Ok(mut model) = RateModel::try_new(10, rate) {
        let rate = model.refused(Some(US), 0, 1_000 * US).rate();
        assert!(rate < 10_000, "{rate}");
    }
}

// What holds.

/// A peer that answers each request with the next of these.
fn peer(
    answers: Vec<Response<()>>,
) -> impl tower::Service<Request<()>, Response = Response<()>, Error = io::Error, Future: Send> + Clone {
    let answers = Arc::new(std::sync::Mutex::new(answers.into_iter()));
    service_fn(move |_: Request<()>| {
        let next = answers.lock().unwrap().next();
        async move { next.ok_or_else(|| io::Error::other("no more is answered")) }
    })
}

fn request() -> Request<()> {
    Request::get("http://peer.example/").body(()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn whatever_a_peer_says_its_response_is_handed_on_and_nothing_lasts_longer_than_an_hour() {
    let mut values: Vec<Vec<u8>> = [
        "",
        " ",
        "-1",
        "+1",
        "0",
        "1e9",
        "1.5",
        "٣",
        "3600",
        "3601",
        "18446744073709551615",
        "18446744073709551616",
        "99999999999999999999999999999999999999",
        "Thu, 01 Jan 1970 00:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "Sun, 31 Feb 2027 10:00:00 GMT",
        "Mon, 00 Jan 0000 00:00:00 GMT",
        "\"a\";r=0;t=999999999999999",
        "\"a\";r=0;t=-1",
        "\"a\";r=-999999999999999;t=5",
        "\"a\";r=0;t=9999999999999999",
        "\"a\";r=0;t=1.5",
        "limit=1, remaining=0, reset=999999999999999",
        "remaining=?1, reset=:AAAA:",
        "((((((((",
        "\"unended",
        "a;r=0;t=7, a;r=0;t=7",
        ",,,",
        "\"é\";r=0;t=9",
    ]
    .iter()
    .map(|value| value.as_bytes().to_vec())
    .collect();
    values.push(vec![0xff; 300]);
    values.push("\"a\";r=0;t=9, ".repeat(4_000).into_bytes());
    values.push(b"(".repeat(60_000));
    values.push(b"9".repeat(60_000));
    for value in values {
        for status in [200, 204, 301, 429, 500, 503] {
            for name in ["retry-after", "ratelimit", "ratelimit-reset", "x-ratelimit-reset", "x-ratelimit-remaining"] {
                for lines in [1, 3] {
                    let mut answer = Response::builder().status(status);
                    for other in ["ratelimit-remaining", "x-ratelimit-remaining"] {
                        answer = answer.header(other, "0");
                    }
                    for _ in 0..lines {
                        answer = answer.header(name, http::HeaderValue::from_bytes(&value).unwrap());
                    }
                    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
                    let peer = peer(vec![answer.body(()).unwrap()]);
                    let client = ThrottleLayer::new(limiter.clone()).read_ratelimit_fields().layer(peer);
                    let response = client.oneshot(request()).await.unwrap();
                    assert_eq!(response.status(), status);
                    let state = limiter.rate_state(key()).await.unwrap();
                    let value = String::from_utf8_lossy(&value[..value.len().min(40)]).into_owned();
                    assert!(state.cooldown <= s(3600), "{status} {name}: {value} × {lines}: {state:?}");
                    assert!(state.rate >= 0.1 && (status == 429 || status == 503 || state.rate == 10.0), "{state:?}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cooldown_longer_than_anybody_waits_is_told_to_the_microsecond_and_nothing_is_sent_before_its_end() {
    let refused = Response::builder().status(429).header("retry-after", "60").body(()).unwrap();
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(10, 10)).adaptive(AdaptiveRate::below(10.0));
    let client = ThrottleLayer::new(limiter).layer(peer(vec![refused, Response::new(())]));
    assert_eq!(client.clone().oneshot(request()).await.unwrap().status(), 429);
    let began = Instant::now();
    for passed in [0, 1, 59] {
        sleep(began + s(passed) - Instant::now()).await;
        let error = client.clone().oneshot(request()).await;
        if passed < 55 {
            let Err(tower_token_bucket::outbound::ThrottleError::Acquire(error)) = error else { panic!("{error:?}") };
            assert_eq!(error.retry_after(), Some(ms(60_200) - s(passed)), "at 5 a second from the end on");
            assert_eq!(began.elapsed(), s(passed), "at once");
        } else {
            assert_eq!(error.unwrap().status(), 200);
            assert_eq!(began.elapsed(), ms(60_200));
        }
    }
}

async fn extremes<St: Store>(limiter: Limiter<St>) {
    for cost in [11, 1 << 31, u64::MAX] {
        let error = limiter.acquire(key(), cost).await.unwrap_err();
        assert_eq!(error, AcquireError::TooDear { cost, capacity: 10 });
    }
    assert_eq!(limiter.acquire(key(), 0).await, Ok(Duration::ZERO));
    limiter.acquire(key(), 10).await.unwrap();
    limiter.refused(key(), Some(Duration::MAX)).await.unwrap();
    limiter.pause(key(), Duration::MAX).await.unwrap();
    let cooldown = limiter.rate_state(key()).await.unwrap().cooldown;
    assert!(cooldown <= s(3600) && cooldown > s(3590), "{cooldown:?}");
    let error = limiter.try_acquire(key(), 1).await.unwrap_err();
    assert!(error.retry_after() > Some(s(3590)), "{error}");
    // For ever; nobody would live to see it.
    assert!(timeout(ms(100), limiter.acquire(key(), 10)).await.is_err());
}

#[tokio::test]
async fn settings_and_times_that_are_as_large_as_can_be_are_no_fault() {
    let server = Server::start();
    let rate = AdaptiveRate { ceiling: 1e6, floor: 1e6, decrease: 0.0, increase: 8.0 };
    let quota = Quota::per_second(10);
    let memory = Limiter::new(MemoryStore::new(), NAME, quota).adaptive(rate);
    extremes(memory.max_wait(Duration::MAX).deadline(Duration::MAX).max_waiters(usize::MAX).share(u32::MAX)).await;
    let redis = in_redis(&server.url(), quota, rate).await;
    extremes(redis.max_wait(Duration::MAX).deadline(Duration::MAX).max_waiters(usize::MAX).share(u32::MAX)).await;
    let slow = AdaptiveRate { ceiling: 0.001, floor: 0.0, decrease: 0.0, increase: 8.0 };
    let slow = Limiter::new(MemoryStore::new(), NAME, Quota::per_second(2_251_799)).adaptive(slow);
    slow.acquire(key(), 2_251_799).await.unwrap();
    let error = slow.acquire(key(), 2_251_799).await.unwrap_err();
    assert!(error.retry_after() > Some(s(2_251_798_000)), "{error}");
}

#[tokio::test]
async fn whatever_happens_to_a_bucket_in_redis_its_waiters_get_tokens_and_nobody_waits_for_ever() {
    let server = Server::start();
    let limiter = in_redis(&server.url(), b(1, 20), AdaptiveRate::below(20.0)).await.deadline(s(5)).share(10);
    limiter.acquire(key(), 1).await.unwrap();
    let name = server.keys()[0].clone();
    let faults: [&[&str]; 7] = [
        &["SCRIPT", "FLUSH"],
        &["FLUSHALL"],
        &["SET", &name, "something else", "PX", "300"],
        &["SET", &name, "1:2:3", "PX", "300"],
        &["SET", &name, "1796049415052425:14315500:5500:1796049414868004:1796049413868004:1:1:0:0", "PX", "300"],
        &["DEL", &name],
        &["CONFIG", "RESETSTAT"],
    ];
    for fault in faults {
        let waiting: Vec<_> = (0..6)
            .map(|_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { limiter.acquire(key(), 1).await })
            })
            .collect();
        sleep(ms(60)).await;
        server.query(fault);
        for waits in waiting {
            let waited = timeout(s(20), waits).await.expect("for ever").unwrap();
            assert!(waited.is_ok(), "{fault:?}: {waited:?}");
        }
    }
    server.query(&["DEL", &name]);
    server.query(&["RPUSH", &name, "another type"]);
    limiter.try_acquire(key(), 1).await.unwrap_or_else(|error| assert!(error.retry_after().is_some(), "{error}"));
    assert!(limiter.try_acquire(BucketKey::id("another"), 1).await.is_ok(), "one key says nothing of others");
}

#[tokio::test(start_paused = true)]
async fn a_hook_may_call_the_limiter_and_let_go_of_others() {
    let own: Arc<std::sync::OnceLock<Limiter<MemoryStore>>> = Arc::default();
    let (of_hook, told) = (Arc::clone(&own), Arc::new(AtomicU64::new(0)));
    let times = Arc::clone(&told);
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(2, 10)).adaptive(AdaptiveRate::below(10.0)).on_event(
        move |key, event| {
            times.fetch_add(1, Relaxed);
            let (limiter, key) = (of_hook.get().unwrap().clone(), *key);
            if let Event::Acquired { cost: 1, .. } = event {
                // Joins the queue, and leaves it at once.
                let mut acquire = Box::pin(limiter.acquire(key, 2));
                let waker = std::task::Waker::noop();
                assert!(acquire.as_mut().poll(&mut std::task::Context::from_waker(waker)).is_pending());
                drop(acquire);
                tokio::spawn(async move { limiter.pause(key, ms(10)).await });
            }
        },
    );
    own.set(limiter.clone()).unwrap();
    for _ in 0..20 {
        limiter.acquire(key(), 1).await.unwrap();
    }
    assert!(told.load(Relaxed) > 40);
}

/// What is given is what the model of a bucket gives, with those that leave at any time and cooldowns in between.
#[tokio::test(start_paused = true)]
async fn of_those_that_leave_nothing_is_given_twice_and_the_others_are_all_served() {
    let steady = AdaptiveRate { floor: 40.0, ..AdaptiveRate::below(40.0) };
    for seed in 0..20u64 {
        let (store, began) = (MemoryStore::new(), Instant::now());
        let limiter = Limiter::new(store, NAME, b(5, 40)).adaptive(steady).max_wait(s(3600));
        let mut random = crate::arithmetic::Rng::new(seed);
        let mut tasks = tokio::task::JoinSet::new();
        let mut stay = 0;
        for _ in 0..300 {
            let (cost, starts, leaves) = (1 + random.below(5), random.below(5_000), random.below(6_000));
            let leaves = (random.below(2) == 0).then_some(leaves);
            stay += usize::from(leaves.is_none());
            let limiter = limiter.clone();
            tasks.spawn(async move {
                sleep(ms(starts)).await;
                let acquire = limiter.acquire(key(), cost);
                let given = match leaves {
                    Some(leaves) => timeout(ms(leaves), acquire).await.is_ok_and(|given| given.is_ok()),
                    None => acquire.await.is_ok(),
                };
                let stays = leaves.is_none();
                given.then(|| (began.elapsed().as_micros() as u64 + US, cost, stays))
            });
        }
        let mut cooldowns = Vec::new();
        for _ in 0..5 {
            sleep(ms(900)).await;
            limiter.refused(key(), Some(ms(300))).await.unwrap();
            cooldowns.push(began.elapsed().as_micros() as u64 + US);
        }
        let mut given: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        assert_eq!(given.iter().filter(|given| given.2).count(), stay, "seed {seed}: who stays is served");
        given.sort_unstable();
        let mut model = RateModel::try_new(5, steady).unwrap();
        let mut cooldowns = cooldowns.into_iter().peekable();
        for (at, cost, _) in given {
            while let Some(began) = cooldowns.next_if(|began| *began < at) {
                model.refused(Some(300_000), 0, began);
            }
            assert!(model.take(cost, at).is_allowed(), "seed {seed}: {cost} at {at}");
        }
    }
}

#[test]
fn one_runtime_ends_and_those_of_another_are_served_again_where_the_rate_adapts() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let limiter = Limiter::new(MemoryStore::new(), NAME, b(1, 10)).adaptive(AdaptiveRate::below(10.0));
    let (first, second) = (runtime(), runtime());
    first.block_on(async {
        limiter.acquire(key(), 1).await.unwrap();
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire(key(), 1).await });
        tokio::task::yield_now().await;
    });
    drop(first);
    let waited = second.block_on(async { timeout(s(10), limiter.acquire(key(), 1)).await });
    assert!(waited.is_ok_and(|waited| waited.is_ok()));
}
