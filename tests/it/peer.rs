//! What a peer says of the sender's rate, and what those who watch hear of it.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt};
use tower_token_bucket::outbound::{
    AcquireError, AdaptiveRate, Event, Limiter, PublishedLimit, RateState, ThrottleError, ThrottleLayer,
};
use tower_token_bucket::{BucketKey, ConfigError, MemoryStore, Quota};

use crate::arithmetic::Rng;

const NAME: &str = "peer";

const fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn key() -> BucketKey {
    BucketKey::id("peer.example")
}

/// What happened, and when.
type Heard = Arc<Mutex<Vec<(Duration, Event)>>>;

/// A limiter of 10 tokens and 10 a second, whose events are noted.
fn limiter() -> (Limiter<MemoryStore>, Heard) {
    let (heard, began) = (Heard::default(), Instant::now());
    let notes = Arc::clone(&heard);
    let limiter = Limiter::new(MemoryStore::new(), NAME, Quota::per_second(10).with_capacity(10))
        .adaptive(AdaptiveRate::below(10.0))
        .on_event(move |of, event| {
            assert_eq!(*of, key());
            notes.lock().unwrap().push((began.elapsed(), event.clone()));
        });
    (limiter, heard)
}

fn heard(heard: &Heard) -> Vec<(Duration, Event)> {
    std::mem::take(&mut heard.lock().unwrap())
}

fn state(event: &Event) -> RateState {
    match event {
        Event::Rate(state) | Event::Refused(state) | Event::Paused(state) => *state,
        other => panic!("{other:?} has no state"),
    }
}

#[tokio::test(start_paused = true)]
async fn those_who_watch_hear_of_waits_errors_refusals_and_pauses() {
    let (limiter, notes) = limiter();
    limiter.acquire(key(), 10).await.unwrap();
    limiter.acquire(key(), 5).await.unwrap();
    let events = heard(&notes);
    assert!(matches!(events[0].1, Event::Rate(RateState { rate: 10.0, cooldown: Duration::ZERO, at_floor: None, .. })));
    assert_eq!(events[1], (s(0), Event::Acquired { cost: 10, waited: s(0) }));
    let last = events.last().unwrap();
    let waited = Duration::from_millis(500);
    assert_eq!(*last, (waited, Event::Acquired { cost: 5, waited }));

    limiter.refused(key(), Some(s(2))).await.unwrap();
    limiter.pause(key(), s(60)).await.unwrap();
    let error = limiter.acquire(key(), 1).await.unwrap_err();
    let events = heard(&notes);
    assert!(matches!(events[0].1, Event::Refused(RateState { rate: 5.0, cooldown, .. }) if cooldown == s(2)));
    assert!(matches!(events[1].1, Event::Paused(RateState { rate: 5.0, cooldown, .. }) if cooldown == s(60)));
    assert_eq!(events.last().unwrap().1, Event::NotAcquired(error));
    assert_eq!(limiter.rate_state(key()).await.unwrap(), state(&events[1].1), "to look tells nobody");
    assert!(heard(&notes).is_empty());

    let dear = limiter.acquire(key(), 11).await.unwrap_err();
    assert_eq!(heard(&notes)[0].1, Event::NotAcquired(dear));
    limiter.acquire(key(), 0).await.unwrap();
    assert!(heard(&notes).is_empty(), "what costs nothing is no event");
}

#[tokio::test(start_paused = true)]
async fn the_time_at_the_floor_is_one_for_all_senders() {
    let store = MemoryStore::new();
    let sender = || {
        let limiter = Limiter::new(store.clone(), NAME, Quota::per_second(8));
        limiter.adaptive(AdaptiveRate { floor: 2.0, ..AdaptiveRate::below(8.0) })
    };
    let (one, other) = (sender(), sender());
    for _ in 0..2 {
        one.refused(key(), Some(s(1))).await.unwrap();
        sleep(s(1)).await;
    }
    sleep(s(299)).await;
    let state = other.rate_state(key()).await.unwrap();
    assert_eq!((state.rate, state.at_floor), (2.0, Some(s(300))));
    let fixed = Limiter::new(store, "fixed", Quota::per_second(8)).rate_state(key()).await.unwrap();
    assert_eq!((fixed.rate, fixed.cooldown, fixed.at_floor), (8.0, s(0), None));
}

/// Answers with these, in turn, and with 200 after that.
#[derive(Clone)]
struct Peer(Arc<Mutex<Vec<Response<()>>>>);

impl Service<Request<()>> for Peer {
    type Response = Response<()>;
    type Error = Infallible;
    type Future = Ready<Result<Response<()>, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        ready(Ok(self.0.lock().unwrap().pop().unwrap_or_default()))
    }
}

fn answer(status: u16, fields: &[(&str, &str)]) -> Response<()> {
    let mut response = Response::builder().status(status);
    for (name, value) in fields {
        response = response.header(*name, *value);
    }
    response.body(()).unwrap()
}

/// The cooldown and the rate after a request that is answered so.
async fn after(asked: bool, status: u16, fields: &[(&str, &str)]) -> (Duration, f64) {
    let (limiter, _) = limiter();
    let mut layer = ThrottleLayer::new(limiter.clone());
    if asked {
        layer = layer.read_ratelimit_fields();
    }
    let peer = Peer(Arc::new(Mutex::new(vec![answer(status, fields)])));
    let mut client = layer.layer(peer);
    let request = Request::get("http://peer.example/").body(()).unwrap();
    let response = client.ready().await.unwrap().call(request).await.unwrap();
    assert_eq!(response.status(), status, "the caller has the response all the same");
    let state = limiter.rate_state(key()).await.unwrap();
    (state.cooldown, state.rate)
}

#[tokio::test(start_paused = true)]
async fn a_refusal_without_retry_after_waits_as_the_fields_say_when_they_are_asked_for() {
    for fields in [
        &[("ratelimit", "\"a\";r=0;t=7")][..],
        &[("ratelimit", "limit=5, remaining=0, reset=7")],
        &[("ratelimit-remaining", "0"), ("ratelimit-reset", "7")],
        &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "7")],
        &[("ratelimit", "\"second\";r=5;t=1, \"minute\";r=2;t=7")],
    ] {
        assert_eq!(after(true, 429, fields).await, (s(7), 5.0), "{fields:?}");
        let (cooldown, rate) = after(false, 429, fields).await;
        assert!(cooldown <= s(1) && rate == 5.0, "not asked for: the back-off, {cooldown:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_wins_and_what_is_malformed_is_ignored() {
    let field = ("ratelimit", "\"a\";r=0;t=7");
    assert_eq!(after(true, 429, &[("retry-after", "3"), field]).await, (s(3), 5.0));
    assert_eq!(after(true, 503, &[("retry-after", "3"), field]).await, (s(3), 5.0));
    assert_eq!(after(true, 429, &[("retry-after", "soon"), field]).await, (s(7), 5.0));
    for field in ["\"a\";r=0;t=", "\"a\";r=0;t=-7", "\"a\";r=0;t=7.0", "a b", "é", ""] {
        let (cooldown, rate) = after(true, 429, &[("ratelimit", field)]).await;
        assert!(cooldown <= s(1) && rate == 5.0, "{field:?}: the back-off, {cooldown:?}");
        assert_eq!(after(true, 200, &[("ratelimit", field)]).await, (s(0), 10.0), "{field:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_with_nothing_left_is_left_alone_before_it_refuses_and_the_rate_stays() {
    for status in [200, 404, 403, 503] {
        assert_eq!(after(true, status, &[("ratelimit", "\"a\";r=0;t=7")]).await, (s(7), 10.0), "{status}");
    }
    assert_eq!(after(true, 200, &[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "7")]).await, (s(7), 10.0));
    assert_eq!(after(true, 200, &[("ratelimit", "\"a\";r=1;t=7")]).await, (s(0), 10.0), "there is one left");
    assert_eq!(after(true, 200, &[("ratelimit", "\"a\";r=0;t=1")]).await, (s(0), 10.0), "the bucket knows better");
    assert_eq!(after(false, 200, &[("ratelimit", "\"a\";r=0;t=7")]).await, (s(0), 10.0), "not asked for");
}

#[tokio::test(start_paused = true)]
async fn during_a_pause_nothing_is_sent_by_anybody_and_after_it_all_goes_on() {
    let (limiter, _) = limiter();
    let limiter = limiter.max_wait(s(10));
    let peer = Peer(Arc::new(Mutex::new(vec![answer(200, &[("ratelimit", "\"a\";r=0;t=60")])])));
    let client = ThrottleLayer::new(limiter.clone()).read_ratelimit_fields().layer(peer);
    let send = async |client: &ThrottleClient| {
        client.clone().oneshot(Request::get("http://peer.example/").body(()).unwrap()).await
    };
    send(&client).await.unwrap();
    let error = send(&client).await.unwrap_err();
    let ThrottleError::Acquire(AcquireError::NoTokens { retry_after }) = error else { panic!("{error:?}") };
    assert_eq!(retry_after, Duration::from_millis(60_100), "the end of the pause, and one token");
    sleep(s(59)).await;
    let began = Instant::now();
    assert_eq!(send(&client).await.unwrap().status(), StatusCode::OK);
    assert_eq!(began.elapsed(), Duration::from_millis(1_100));
}

type ThrottleClient = tower_token_bucket::outbound::Throttle<Peer, MemoryStore>;

#[test]
fn a_published_limit_becomes_the_quota_that_keeps_it() {
    let quota = |limit: PublishedLimit| {
        let quota = limit.quota();
        let (tokens, per) = quota.refill();
        (quota.capacity(), tokens as f64 / per.as_secs_f64())
    };
    let published = PublishedLimit::new(100, s(1)).bursts_to(200);
    assert_eq!(quota(published), (200, 100.0));
    assert_eq!(quota(published.with_others()), (100, 100.0));
    assert_eq!(quota(PublishedLimit::new(100, s(1))), (100, 100.0), "a pacer");
    assert_eq!(quota(PublishedLimit::new(3, s(60))), (1, 0.05), "less than one a second");
    assert_eq!(quota(PublishedLimit::new(100, s(1)).bursts_to(1).with_others()), (1, 100.0));
    assert_eq!(quota(PublishedLimit::new(5_000, s(3600)).windowed()), (500, 1.25));
    assert_eq!(quota(PublishedLimit::new(10, s(10)).bursts_to(99).windowed()), (10, 0.1), "no more than the limit");
    for wrong in [
        PublishedLimit::new(0, s(1)),
        PublishedLimit::new(0, s(1)).windowed(),
        PublishedLimit::new(1, s(0)),
        PublishedLimit::new(1, s(1)).bursts_to(0),
        PublishedLimit::new(1, s(1)).bursts_to(0).with_others(),
        PublishedLimit::new(u64::MAX, s(1)),
    ] {
        assert!(matches!(wrong.try_quota(), Err(ConfigError::Quota(_))), "{wrong:?}");
    }
}

/// A sender that takes all that it can get, at random moments: no window holds more than the published limit.
#[tokio::test(start_paused = true)]
async fn under_a_windowed_limit_no_window_holds_more_than_the_limit() {
    let (mut rng, mut all) = (Rng::new(7), 0);
    for _ in 0..60 {
        let (requests, per) = (1 + rng.below(40), s(1 + rng.below(60)));
        let mut limit = PublishedLimit::new(requests, per).windowed();
        if rng.below(2) == 0 {
            limit = limit.bursts_to(1 + rng.below(60));
        }
        let limiter = Limiter::new(MemoryStore::new(), NAME, limit.quota());
        let (began, mut sent) = (Instant::now(), Vec::new());
        while began.elapsed() < 6 * per {
            if rng.below(8) == 0 {
                sleep(per.mul_f64(rng.below(1000) as f64 / 500.0)).await;
            }
            match limiter.try_acquire(key(), 1).await {
                Ok(()) => sent.push(began.elapsed()),
                Err(error) => sleep(error.retry_after().unwrap()).await,
            }
        }
        for (i, from) in sent.iter().enumerate() {
            let within = sent[i..].iter().take_while(|at| **at < *from + per).count() as u64;
            assert!(within <= requests, "{within} of {requests} in {per:?} under {:?}", limit.quota());
        }
        all += sent.len();
    }
    assert!(all > 1000, "{all} sent");
}
