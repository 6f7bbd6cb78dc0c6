//! What a request costs once that is known: `Settle`, in memory and on real servers.

use std::convert::Infallible;
use std::future::{Future, Ready, pending, ready};
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::task::JoinSet;
use tokio::time::{Instant, advance, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_token_bucket::conformance::Model;
use tower_token_bucket::{
    Amount, BucketKey, Charge, CostTable, Decision, Global, Limit, LimitName, MemoryStore, OnStoreFailure, Quota,
    RedisStore, Settle, Source, Store, TokenBucketLayer,
};

use crate::log::Log;
use crate::server::Server;

type Ask = Request<Full<Bytes>>;
type Answer = Response<Full<Bytes>>;

const DAY: Duration = Duration::from_secs(86_400);
/// No test waits that long for something to come.
const PATIENCE: Duration = Duration::from_secs(10);

/// 100 tokens, of which none comes back while a test runs.
const HUNDRED: Quota = Quota::new(1, DAY).with_capacity(100);

/// One bucket for all requests, at the cost that the request names.
fn limit(name: &str, quota: Quota) -> Limit {
    Limit::new(name, quota).key_by(Global).cost(|parts: &Parts| {
        let cost = parts.headers.get("cost").expect("a cost");
        cost.to_str().unwrap().parse().unwrap()
    })
}

/// A layer that settles. Its limit is `all`, of [`HUNDRED`], and a busy machine is no outage.
fn layer<St: Store>(store: St) -> TokenBucketLayer<St> {
    let layer = TokenBucketLayer::new(store, limit("all", HUNDRED)).settle();
    layer.on_store_failure(OnStoreFailure::Deny).deadline(PATIENCE)
}

fn ask(cost: u64) -> Ask {
    Request::get("/").header("cost", cost).body(Full::default()).unwrap()
}

/// Answers at once, with the `Settle` and the `Decision` of the request.
#[allow(clippy::needless_pass_by_value)] // As a handler takes it.
fn desk(request: Ask) -> Ready<Result<Answer, Infallible>> {
    let mut answer = Response::new(Full::default());
    if let Some(settle) = request.extensions().get::<Settle>() {
        answer.extensions_mut().insert(settle.clone());
    }
    ready(Ok(answer))
}

/// One request through the layer.
async fn send<St: Store>(layer: &TokenBucketLayer<St>, cost: u64) -> Answer {
    layer.layer(service_fn(desk)).oneshot(ask(cost)).await.unwrap()
}

/// A request that is admitted: what settles it, after the response.
async fn reserve<St: Store>(layer: &TokenBucketLayer<St>, cost: u64) -> Settle {
    let answer = send(layer, cost).await;
    assert_eq!(answer.status(), 200, "a cost of {cost}");
    answer.extensions().get::<Settle>().expect("a `Settle`").clone()
}

/// What is in the bucket that a decision is about, in whole tokens; less than none is a debt.
fn level_of(decision: &Decision) -> i64 {
    let quota = decision.bound().unwrap().quota();
    let (tokens, per) = quota.refill();
    let missing = decision.reset_after().unwrap().as_micros() * u128::from(tokens);
    quota.capacity() as i64 - missing.div_ceil(per.as_micros()) as i64
}

async fn level<St: Store>(store: &St, limit: &Limit) -> i64 {
    level_of(&store.peek(limit, BucketKey::global()).await.unwrap())
}

/// Waits until `all` holds that.
async fn comes_to<St: Store>(store: &St, tokens: i64) {
    let until = Instant::now() + PATIENCE;
    loop {
        let now = level(store, &limit("all", HUNDRED)).await;
        if now == tokens {
            return;
        }
        assert!(Instant::now() < until, "the bucket comes to {now}, not to {tokens}");
        sleep(Duration::from_millis(1)).await;
    }
}

async fn in_redis(url: &str) -> RedisStore {
    RedisStore::connect(url).await.unwrap()
}

on_both_stores! {
    what_was_reserved_and_not_used_is_there_for_the_next_request,
    a_handler_settles_its_own_request,
    a_higher_cost_is_a_debt_that_refills_first,
    a_debt_is_bounded_by_one_capacity,
    a_refund_ends_at_the_capacity,
    the_cost_that_was_charged_changes_nothing_and_a_cost_of_nothing_gives_all_back,
    after_the_first_call_the_cost_only_rises,
    clones_settle_the_same_request,
    many_tasks_that_settle_one_request_charge_it_once,
    requests_settle_apart_from_each_other,
    settling_one_limit_leaves_the_others_alone,
    a_handler_settles_the_limits_of_every_layer_around_it,
    shadow_limits_settle_what_they_charged,
    what_charged_nothing_has_nothing_to_be_settled,
    every_request_that_reaches_the_handler_can_be_settled_where_the_layer_asks_for_it,
    a_handler_that_panics_leaves_what_was_reserved_and_no_debt,
    a_response_that_is_dropped_leaves_what_was_reserved_or_settled,
    a_request_is_settled_under_the_quota_it_was_charged_under,
}

async fn what_was_reserved_and_not_used_is_there_for_the_next_request(store: impl Store) {
    let layer = layer(store.clone());
    let first = reserve(&layer, 60).await;
    assert_eq!(send(&layer, 60).await.status(), 429, "60 of 100 are reserved");
    first.actual("all", 10);
    comes_to(&store, 90).await;
    reserve(&layer, 60).await.actual("all", 60);
    assert_eq!(send(&layer, 31).await.status(), 429);
    assert_eq!(send(&layer, 30).await.status(), 200);
}

async fn a_handler_settles_its_own_request(store: impl Store) {
    async fn complete(Extension(settle): Extension<Settle>, used: String) -> String {
        settle.actual("tokens", used.parse().unwrap());
        used
    }
    let limit = Limit::new("tokens", HUNDRED).key_by(Global).cost(CostTable::new(60));
    let layer = TokenBucketLayer::new(store.clone(), limit.clone()).settle().deadline(PATIENCE);
    let app: Router = Router::new().route("/complete", post(complete)).layer(layer);
    for (used, left) in [("10", 90), ("20", 70), ("5", 65)] {
        let request = Request::post("/complete").body(axum::body::Body::from(used)).unwrap();
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), 200);
        let until = Instant::now() + PATIENCE;
        while level(&store, &limit).await != left {
            assert!(Instant::now() < until, "{used} tokens leave {} and not {left}", level(&store, &limit).await);
            sleep(Duration::from_millis(1)).await;
        }
    }
}

async fn a_higher_cost_is_a_debt_that_refills_first(store: impl Store) {
    // 10 tokens in 10 s; a second more for what a busy machine does.
    let quota = Quota::new(1, Duration::from_secs(1)).with_capacity(10);
    let layer = TokenBucketLayer::new(store.clone(), limit("all", quota)).settle().deadline(PATIENCE);
    reserve(&layer, 10).await.actual("all", 13);
    let until = Instant::now() + PATIENCE;
    loop {
        let decision = send(&layer, 1).await.extensions().get::<Decision>().unwrap().clone();
        assert!(!decision.is_allowed());
        assert_eq!(decision.remaining(), Some(0), "a debt is not shown as tokens");
        let wait = decision.retry_after().unwrap();
        if wait > Duration::from_secs(1) {
            assert!(wait <= Duration::from_secs(4), "3 s of debt and 1 s for the token, not {wait:?}");
            assert!(wait > Duration::from_secs(2), "{wait:?}");
            break;
        }
        assert!(Instant::now() < until, "no debt");
        sleep(Duration::from_millis(1)).await;
    }
}

async fn a_debt_is_bounded_by_one_capacity(store: impl Store) {
    for cost in [201, 1_000_000, 1 << 53, u64::MAX - 1, u64::MAX] {
        store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
        let settle = reserve(&layer(store.clone()), 1).await;
        settle.actual("all", cost);
        comes_to(&store, -100).await;
        // Nothing more can be owed, and nothing comes back.
        settle.actual("all", u64::MAX);
        settle.actual("all", 0);
        comes_to(&store, -100).await;
    }
}

async fn a_refund_ends_at_the_capacity(store: impl Store) {
    let settle = reserve(&layer(store.clone()), 60).await;
    // The operator is faster.
    store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
    store.penalize(&limit("all", HUNDRED), BucketKey::global(), 1).await.unwrap();
    settle.actual("all", 0);
    comes_to(&store, 100).await;
    assert_eq!(send(&layer(store.clone()), 100).await.status(), 200);
    assert_eq!(send(&layer(store), 1).await.status(), 429);
}

async fn the_cost_that_was_charged_changes_nothing_and_a_cost_of_nothing_gives_all_back(store: impl Store) {
    let layer = layer(store.clone());
    let same = reserve(&layer, 60).await;
    same.actual("all", 60);
    assert_eq!(level(&store, &limit("all", HUNDRED)).await, 40);
    // It was the first call: the cost only rises from here.
    same.actual("all", 50);
    same.actual("all", 61);
    comes_to(&store, 39).await;
    reserve(&layer, 39).await.actual("all", 0);
    comes_to(&store, 39).await;
}

async fn after_the_first_call_the_cost_only_rises(store: impl Store) {
    let settle = reserve(&layer(store.clone()), 60).await;
    for (cost, left) in [(10, 90), (5, 90), (0, 90), (10, 90), (11, 89), (10, 89), (60, 40), (150, -50), (149, -50)] {
        settle.actual("all", cost);
        comes_to(&store, left).await;
    }
    settle.actual("all", 151);
    comes_to(&store, -51).await;
}

async fn clones_settle_the_same_request(store: impl Store) {
    let settle = reserve(&layer(store.clone()), 60).await;
    let clone = settle.clone();
    clone.actual("all", 10);
    comes_to(&store, 90).await;
    settle.actual("all", 5);
    drop(clone);
    settle.clone().actual("all", 12);
    comes_to(&store, 88).await;
}

async fn many_tasks_that_settle_one_request_charge_it_once(store: impl Store) {
    for (reserved, actual) in [(10, 90), (90, 10), (50, 50), (1, 150)] {
        store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
        let settle = reserve(&layer(store.clone()), reserved).await;
        let mut tasks = JoinSet::new();
        for _ in 0..64 {
            let settle = settle.clone();
            tasks.spawn(async move { settle.actual("all", actual) });
        }
        tasks.join_all().await;
        comes_to(&store, 100 - actual as i64).await;
        settle.actual("all", actual + 1);
        comes_to(&store, 99 - actual as i64).await;
    }
}

async fn requests_settle_apart_from_each_other(store: impl Store) {
    let layer = layer(store.clone());
    let (a, b, c) = (reserve(&layer, 50).await, reserve(&layer, 30).await, reserve(&layer, 20).await);
    b.actual("all", 35);
    comes_to(&store, -5).await;
    a.actual("all", 20);
    comes_to(&store, 25).await;
    b.actual("all", 40);
    comes_to(&store, 20).await;
    c.actual("all", 0);
    comes_to(&store, 40).await;
}

async fn settling_one_limit_leaves_the_others_alone(store: impl Store) {
    let other = limit("other", HUNDRED);
    let layer = layer(store.clone()).and(other.clone());
    let settle = reserve(&layer, 60).await;
    settle.actual("all", 10);
    comes_to(&store, 90).await;
    assert_eq!(level(&store, &other).await, 40);
    settle.actual("all", 100);
    comes_to(&store, 0).await;
    assert_eq!(level(&store, &other).await, 40);
    settle.actual("other", 10);
    let until = Instant::now() + PATIENCE;
    while level(&store, &other).await != 90 {
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(1)).await;
    }
    comes_to(&store, 0).await;
}

async fn a_handler_settles_the_limits_of_every_layer_around_it(store: impl Store) {
    // The layers have stores of their own; the innermost has a limit of the outermost's name, and is the nearer one.
    let (far, near) = (MemoryStore::new(), MemoryStore::new());
    let outer = TokenBucketLayer::new(far.clone(), limit("outer", HUNDRED)).and(limit("same", HUNDRED)).settle();
    let middle = layer(store.clone());
    let silent = TokenBucketLayer::new(MemoryStore::new(), limit("not-asked-for", HUNDRED));
    let inner = TokenBucketLayer::new(near.clone(), limit("inner", HUNDRED)).and(limit("same", HUNDRED)).settle();
    let mut service = outer.layer(middle.layer(silent.layer(inner.layer(service_fn(desk)))));
    let answer = service.ready().await.unwrap().call(ask(60)).await.unwrap();
    let settle = answer.extensions().get::<Settle>().unwrap();
    settle.actual("outer", 10);
    settle.actual("inner", 20);
    settle.actual("all", 30);
    settle.actual("same", 40);
    comes_to(&store, 70).await;
    assert_eq!(level(&far, &limit("outer", HUNDRED)).await, 90);
    assert_eq!(level(&near, &limit("inner", HUNDRED)).await, 80);
    assert_eq!((level(&near, &limit("same", HUNDRED)).await, level(&far, &limit("same", HUNDRED)).await), (60, 40));
}

async fn shadow_limits_settle_what_they_charged(store: impl Store) {
    let watched = limit("watched", HUNDRED);
    let small = limit("small", Quota::new(1, DAY).with_capacity(50));
    let layer = layer(store.clone()).and(watched.clone().shadow()).and(small.clone().shadow());
    let first = reserve(&layer, 60).await;
    first.actual("watched", 55);
    // It is too dear for `small`, which charged nothing.
    for cost in [0, 70, u64::MAX] {
        first.actual("small", cost);
    }
    let until = Instant::now() + PATIENCE;
    while level(&store, &watched).await != 45 {
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(1)).await;
    }
    // 45 are there and 40 of `all`: the request passes, and `small` has charged it too.
    let second = reserve(&layer, 40).await;
    second.actual("small", 41);
    second.actual("all", 0);
    comes_to(&store, 40).await;
    assert_eq!((level(&store, &watched).await, level(&store, &small).await), (5, 9));
    // 5 are left of `watched`, which would have refused: it keeps them.
    let third = reserve(&layer, 9).await;
    third.actual("watched", 0);
    third.actual("watched", 100);
    third.actual("all", 10);
    comes_to(&store, 30).await;
    assert_eq!(level(&store, &watched).await, 5);
}

async fn what_charged_nothing_has_nothing_to_be_settled(store: impl Store) {
    let (log, _guard) = Log::capture();
    let free = Limit::new("free", HUNDRED).key_by(Global).cost(CostTable::new(0));
    let layer = layer(store.clone()).and(free.clone());
    // Exempt from every limit, and from one of two.
    let exempt = send(&layer, 0).await;
    assert_eq!(exempt.extensions().get::<Decision>().unwrap().source(), Source::Exempt);
    let exempt = exempt.extensions().get::<Settle>().unwrap();
    let settle = reserve(&layer, 60).await;
    for cost in [0, 1, 50, u64::MAX] {
        exempt.actual("all", cost);
        exempt.actual("free", cost);
        settle.actual("free", cost);
    }
    settle.actual("all", 61);
    comes_to(&store, 39).await;
    assert_eq!(level(&store, &free).await, 100);
    assert_eq!(log.text(), "", "both are limits of the layer");
}

async fn every_request_that_reaches_the_handler_can_be_settled_where_the_layer_asks_for_it(store: impl Store) {
    let has = |answer: &Answer| answer.extensions().get::<Settle>().is_some();
    let settling = layer(store.clone());
    for (cost, status) in [(0, 200), (60, 200), (60, 429), (40, 200), (101, 429), (0, 200)] {
        let answer = send(&settling, cost).await;
        assert_eq!((answer.status().as_u16(), has(&answer)), (status, status == 200), "a cost of {cost}");
    }
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow] {
        let layer = TokenBucketLayer::new(Switch::at(BROKEN), limit("all", HUNDRED)).on_store_failure(policy);
        assert!(has(&send(&layer.clone().settle(), 60).await), "{policy:?}");
        assert!(!has(&send(&layer, 40).await), "{policy:?}");
    }
    // Too dear for a limit that only watches: no store is asked.
    let watch = TokenBucketLayer::new(store.clone(), limit("watch", HUNDRED).shadow()).settle();
    assert!(has(&send(&watch, 101).await));
    store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
    let without = TokenBucketLayer::new(store, limit("all", HUNDRED)).deadline(PATIENCE);
    for cost in [0, 60] {
        assert!(!has(&send(&without, cost).await));
    }
}

async fn a_handler_that_panics_leaves_what_was_reserved_and_no_debt(store: impl Store) {
    let layer = layer(store.clone());
    for (settled, left) in [(None, 40), (Some(10), 90), (Some(150), -50)] {
        store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
        let handler = service_fn(move |request: Ask| async move {
            if let Some(cost) = settled {
                request.extensions().get::<Settle>().unwrap().actual("all", cost);
            }
            if request.method() == http::Method::GET {
                panic!("a handler that fails");
            }
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        });
        let service = CatchPanicLayer::new().layer(layer.layer(handler));
        assert_eq!(service.oneshot(ask(60)).await.unwrap().status(), StatusCode::INTERNAL_SERVER_ERROR);
        comes_to(&store, left).await;
    }
    // And the layer goes on.
    store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
    reserve(&layer, 60).await.actual("all", 10);
    comes_to(&store, 90).await;
}

async fn a_response_that_is_dropped_leaves_what_was_reserved_or_settled(store: impl Store) {
    let reached = Arc::new(tokio::sync::Notify::new());
    for (settled, left) in [(None, 40), (Some(10), 90), (Some(150), -50)] {
        store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
        let seen = Arc::clone(&reached);
        let handler = service_fn(move |request: Ask| {
            if let Some(cost) = settled {
                request.extensions().get::<Settle>().unwrap().actual("all", cost);
            }
            seen.notify_one();
            async move {
                pending::<()>().await;
                drop(request);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        let response = layer(store.clone()).layer(handler).oneshot(ask(60));
        tokio::select! {
            _ = response => unreachable!("the handler never ends"),
            () = reached.notified() => {}
        }
        comes_to(&store, left).await;
    }
}

async fn a_request_is_settled_under_the_quota_it_was_charged_under(store: impl Store) {
    // A plan of 100, which becomes one of 50 while the request is under way; its limit is then gone altogether.
    let (log, _guard) = Log::capture();
    let layer = TokenBucketLayer::new(store.clone(), limit("all", Quota::new(1, DAY).with_capacity(1)));
    let plan = limit("all", Quota::new(1, DAY).with_capacity(1)).quota_by(|_| Some(HUNDRED));
    let handle = layer.handle();
    handle.replace([plan]).unwrap();
    let layer = layer.settle().deadline(PATIENCE);
    let settle = reserve(&layer, 60).await;
    handle.replace([limit("all", Quota::new(1, DAY).with_capacity(50))]).unwrap();
    settle.actual("all", 10);
    comes_to(&store, 90).await;
    handle.replace([limit("another", HUNDRED)]).unwrap();
    settle.actual("all", 20);
    comes_to(&store, 80).await;
    // The bucket is the same one for the others, who see it through their own quota.
    handle.replace([limit("all", Quota::new(1, DAY).with_capacity(50))]).unwrap();
    reserve(&layer, 50).await.actual("all", 51);
    let small = limit("all", Quota::new(1, DAY).with_capacity(50));
    let until = Instant::now() + PATIENCE;
    while level(&store, &small).await != -1 {
        assert!(Instant::now() < until, "{}", level(&store, &small).await);
        sleep(Duration::from_millis(1)).await;
    }
    // Reloads are events of their own.
    let others = log.lines().into_iter().filter(|line| !line.contains("INFO tower_token_bucket::reload: "));
    assert_eq!(others.collect::<Vec<_>>(), [""; 0]);
}

// In memory, to the microsecond.

#[tokio::test(start_paused = true)]
async fn in_memory_a_settlement_is_there_when_the_call_returns_and_a_debt_ends_to_the_microsecond() {
    let quota = Quota::per_second(10).with_capacity(10);
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("all", quota)).settle();
    reserve(&layer, 10).await.actual("all", 15);
    let denied = send(&layer, 1).await;
    let wait = denied.extensions().get::<Decision>().unwrap().retry_after().unwrap();
    assert_eq!(wait, Duration::from_millis(600), "5 tokens of debt, and one");
    advance(wait - Duration::from_micros(1)).await;
    assert_eq!(send(&layer, 1).await.status(), 429);
    advance(Duration::from_micros(1)).await;
    assert_eq!(send(&layer, 1).await.status(), 200);
    assert_eq!(send(&layer, 1).await.status(), 429);
}

#[test]
fn in_memory_nothing_needs_a_runtime() {
    let layer = TokenBucketLayer::new(MemoryStore::new(), limit("all", HUNDRED)).settle();
    let now = |cost| match Box::pin(send(&layer, cost)).as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("not at once"),
    };
    now(60).extensions().get::<Settle>().unwrap().actual("all", 10);
    assert_eq!((now(91).status().as_u16(), now(90).status().as_u16()), (429, 200));
}

#[test]
fn in_memory_threads_that_settle_one_request_charge_it_once() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = MemoryStore::new();
    for actual in [10, 60, 90, 150] {
        runtime.block_on(async { store.reset(&limit("all", HUNDRED), BucketKey::global()).await }).unwrap();
        let settle =
            runtime.block_on(reserve(&TokenBucketLayer::new(store.clone(), limit("all", HUNDRED)).settle(), 60));
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| settle.actual("all", actual));
            }
        });
        assert_eq!(runtime.block_on(level(&store, &limit("all", HUNDRED))), 100 - actual as i64);
    }
}

/// Numbers that look random, and are the same every time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

#[tokio::test(start_paused = true)]
async fn whatever_the_calls_the_bucket_holds_no_more_than_without_the_request_and_what_the_total_leaves() {
    let mut numbers = Numbers(0x5e77_1e00);
    for history in 0..2000 {
        let store = MemoryStore::new();
        let layer = layer(store.clone());
        // What others have taken.
        let start = 100 - numbers.below(100);
        let _ = reserve(&layer, 100 - start).await;
        let settle = reserve(&layer, 1 + numbers.below(start)).await;
        let mut total = None;
        for _ in 0..numbers.below(8) {
            let cost = match numbers.below(10) {
                0 => 0,
                1 => u64::MAX - numbers.below(2),
                2 => numbers.below(500),
                _ => numbers.below(120),
            };
            settle.actual("all", cost);
            // The first sets it, and then it only rises.
            total = total.max(Some(cost));
            let (start, cost) = (start as i64, i64::try_from(total.unwrap()).unwrap_or(i64::MAX));
            let left = level(&store, &limit("all", HUNDRED)).await;
            assert!(left <= start, "history {history}: {left} of {start}");
            assert_eq!(left, (start.saturating_sub(cost)).max(-100), "history {history}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn requests_under_way_at_once_leave_the_sum_of_their_costs() {
    let mut numbers = Numbers(0xfeed);
    for history in 0..500 {
        let store = MemoryStore::new();
        let layer = layer(store.clone());
        let mut requests = Vec::new();
        for _ in 0..3 {
            let cost = 1 + numbers.below(33);
            requests.push((reserve(&layer, cost).await, cost, false));
        }
        for _ in 0..20 {
            let (settle, cost, settled) = &mut requests[numbers.below(3) as usize];
            // Three of these are no more debt than there can be.
            let next = numbers.below(60);
            settle.actual("all", next);
            *cost = if *settled { next.max(*cost) } else { next };
            *settled = true;
            let sum: u64 = requests.iter().map(|(_, cost, _)| cost).sum();
            assert_eq!(level(&store, &limit("all", HUNDRED)).await, 100 - sum as i64, "history {history}");
        }
    }
}

/// Refills, refusals and settlements in any order: the store's level is that of the exact model, to the unit, and what
/// was paid in the end is no more than the capacity and what came back.
#[tokio::test(start_paused = true)]
async fn settlements_among_refills_agree_with_the_model() {
    let quota = Quota::from_parts(100, 7, Duration::from_millis(30));
    let name = LimitName::try_new("all").unwrap();
    let charge = |amount| [Charge::new(name.clone(), BucketKey::global(), quota, amount)];
    let mut numbers = Numbers(0xacc0);
    for history in 0..100 {
        let (store, started) = (MemoryStore::new(), Instant::now());
        let layer = TokenBucketLayer::new(store.clone(), limit("all", quota)).settle();
        let mut model = Model::default();
        let mut open: Vec<(Settle, u64, bool)> = Vec::new();
        let (mut paid, mut cut) = (0, false);
        for _ in 0..60 {
            if numbers.below(3) == 0 {
                advance(Duration::from_micros(numbers.below(200_000))).await;
            }
            let now_us = started.elapsed().as_micros() as u64;
            if open.is_empty() || numbers.below(2) == 0 {
                let cost = 1 + numbers.below(100);
                let right = model.acquire(&charge(Amount::Take(cost)), now_us)[0];
                let answer = send(&layer, cost).await;
                assert_eq!(answer.status() == 200, right.is_allowed(), "history {history}");
                if right.is_allowed() {
                    open.push((answer.extensions().get::<Settle>().unwrap().clone(), cost, false));
                    paid += cost;
                }
            } else {
                let place = numbers.below(open.len() as u64) as usize;
                let (settle, cost, settled) = &mut open[place];
                let next = numbers.below(130);
                settle.actual("all", next);
                if !*settled || next > *cost {
                    let amount = if next > *cost { Amount::Spend(next - *cost) } else { Amount::Give(*cost - next) };
                    let reply = model.acquire(&charge(amount), now_us)[0];
                    cut |= reply.level() == -(100 * 30_000);
                    paid = paid + next - *cost;
                    (*cost, *settled) = (next, true);
                }
            }
            let right = model.acquire(&charge(Amount::Peek), now_us)[0];
            let decision = store.peek(&limit("all", quota), BucketKey::global()).await.unwrap();
            assert_eq!(decision.remaining(), Some(right.level().max(0) as u64 / 30_000), "history {history}");
            let missing = (100 * 30_000 - right.level()) as u64;
            assert_eq!(decision.reset_after(), Some(Duration::from_micros(missing.div_ceil(7))), "history {history}");
            // In units: the level is no more than what there ever was, less all that was paid.
            let ever = 100 * 30_000 + 7 * i128::from(now_us);
            assert!(cut || i128::from(right.level()) <= ever - 30_000 * i128::from(paid), "history {history}");
        }
    }
}

// The log.

/// The only test that gives a wrong name: it is told once in a process.
#[tokio::test(start_paused = true)]
async fn a_name_that_is_no_limit_is_told_once_with_those_that_are() {
    let (log, _guard) = Log::capture();
    let store = MemoryStore::new();
    let outer = TokenBucketLayer::new(MemoryStore::new(), limit("per-tenant", HUNDRED)).settle();
    let inner = layer(store.clone()).and(limit("burst", HUNDRED));
    let answer = outer.layer(inner.layer(service_fn(desk))).oneshot(ask(60)).await.unwrap();
    let settle = answer.extensions().get::<Settle>().unwrap();
    for name in ["tokns", "tokns", "", "ALL", "{global}\nforged line", "all "] {
        settle.actual(name, 10);
    }
    let lines = log.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("ERROR"), "{lines:?}");
    for word in ["\"tokns\"", "\"all\"", "\"burst\"", "\"per-tenant\""] {
        assert!(lines[0].contains(word), "{word} in {lines:?}");
    }
    assert_eq!(level(&store, &limit("all", HUNDRED)).await, 40);
    settle.actual("all", 10);
    assert_eq!(level(&store, &limit("all", HUNDRED)).await, 90);
    assert_eq!(format!("{settle:?}"), r#"["all", "burst", ["per-tenant"]]"#);
}

// A store that fails.

const GOOD: u8 = 0;
const BROKEN: u8 = 1;
const SILENT: u8 = 2;

/// A store that a test breaks, mutes and mends.
#[derive(Clone, Debug, Default)]
struct Switch {
    buckets: MemoryStore,
    mode: Arc<AtomicU8>,
    calls: Arc<AtomicUsize>,
}

impl Switch {
    fn at(mode: u8) -> Self {
        let store = Self::default();
        store.set(mode);
        store
    }

    fn set(&self, mode: u8) {
        self.mode.store(mode, Relaxed);
    }
}

impl Store for Switch {
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, io::Error>> + Send>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        self.calls.fetch_add(1, Relaxed);
        match self.mode.load(Relaxed) {
            GOOD => {
                let answer = self.buckets.acquire(charges);
                Box::pin(async { answer.await.map_err(|never| match never {}) })
            }
            BROKEN => Box::pin(ready(Err(io::Error::other("connection refused")))),
            _ => Box::pin(pending()),
        }
    }
}

/// A layer on such a store, with the policy `Local`.
fn local(store: &Switch) -> TokenBucketLayer<Switch> {
    TokenBucketLayer::new(store.clone(), limit("all", HUNDRED)).settle()
}

/// The decision of this instance's own bucket about a cost that it does not have: it takes nothing.
async fn locally<St: Store>(layer: &TokenBucketLayer<St>, too_much: u64) -> i64 {
    let answer = send(&layer.clone().on_store_failure(OnStoreFailure::Local), too_much).await;
    let decision = answer.extensions().get::<Decision>().unwrap();
    assert_eq!((decision.source(), decision.is_allowed()), (Source::Local, false), "{too_much} are there");
    level_of(decision)
}

#[tokio::test(start_paused = true)]
async fn what_the_local_bucket_admitted_is_settled_there() {
    let store = Switch::at(BROKEN);
    let layer = local(&store);
    let settle = reserve(&layer, 60).await;
    let calls = store.calls.load(Relaxed);
    // The store is back: it has charged nothing, and gets nothing.
    store.set(GOOD);
    settle.actual("all", 10);
    assert_eq!(store.calls.load(Relaxed), calls, "the store is not asked");
    store.set(BROKEN);
    assert_eq!(locally(&layer, 91).await, 90);
    settle.actual("all", 150);
    assert_eq!(locally(&layer, 1).await, -50);
    settle.actual("all", u64::MAX);
    assert_eq!(locally(&layer, 1).await, -100);
    assert_eq!(level(&store.buckets, &limit("all", HUNDRED)).await, 100);
}

#[tokio::test(start_paused = true)]
async fn a_share_gives_back_no_more_than_it_took_and_nobody_pays_less_than_the_share_of_the_cost() {
    // A quarter of 100: 25 in the local bucket.
    let costs = [0, 1, 10, 24, 25, 26, 60, 99, 100, 101, 126, 150, 1 << 60, u64::MAX];
    for reserved in [1, 10, 24, 25, 26, 60, 100] {
        for first in costs {
            for second in costs {
                let layer = local(&Switch::at(BROKEN)).share(4);
                let settle = reserve(&layer, reserved).await;
                settle.actual("all", first);
                settle.actual("all", second);
                let paid = first.max(second);
                // As a request of that cost would have paid; what is above the capacity is a debt.
                let right =
                    if paid > 100 { 25 - i64::try_from(paid).unwrap_or(i64::MAX) } else { 25 - paid.min(25) as i64 };
                if right < 25 {
                    let left = locally(&layer, 25).await;
                    assert_eq!(left, right.max(-25), "{reserved} reserved, then {first} and {second}");
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_share_that_is_used_by_others_since_gets_back_no_more_than_it_gave() {
    // So that a refund of 60 - 20 would show: it would fill the bucket of 25, out of which 25 were taken.
    let layer = local(&Switch::at(BROKEN)).share(4);
    let settle = reserve(&layer, 60).await;
    assert_eq!(locally(&layer, 1).await, 0);
    settle.actual("all", 20);
    assert_eq!(locally(&layer, 25).await, 5);
    let _ = reserve(&layer, 5).await;
    assert_eq!(locally(&layer, 1).await, 0);
}

#[tokio::test(start_paused = true)]
async fn when_the_store_fails_before_the_settlement_a_charge_is_made_here_and_a_refund_is_lost() {
    for mode in [BROKEN, SILENT] {
        for share in [1, 4] {
            let own = 100 / i64::from(share);
            let store = Switch::default();
            let layer = local(&store).share(share);
            let (more, less) = (reserve(&layer, 50).await, reserve(&layer, 30).await);
            store.set(mode);
            // In this order a refund would show: the local bucket was full before.
            more.actual("all", 60);
            less.actual("all", 10);
            // Up to the deadline it may still be answered.
            sleep(Duration::from_millis(51)).await;
            store.set(BROKEN);
            assert_eq!(locally(&layer, 100).await, own - 10, "mode {mode}, share {share}");
            more.actual("all", u64::MAX);
            assert_eq!(locally(&layer, 100).await, -own, "a debt of one capacity at most");
            store.set(GOOD);
            assert_eq!(level(&store.buckets, &limit("all", HUNDRED)).await, 20, "the store never heard of it");
            // What follows is settled there.
            more.actual("all", u64::MAX);
            less.actual("all", 11);
            assert_eq!(level(&store.buckets, &limit("all", HUNDRED)).await, 19);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_settlement_has_the_layers_deadline_and_no_less() {
    let store = Switch::default();
    let layer = local(&store).deadline(Duration::from_millis(300));
    let settle = reserve(&layer, 50).await;
    store.set(SILENT);
    let started = Instant::now();
    settle.actual("all", 60);
    assert_eq!(started.elapsed(), Duration::ZERO);
    store.set(BROKEN);
    // Full before: a request of 100 would pass.
    sleep(Duration::from_millis(299)).await;
    let _ = reserve(&layer, 1).await;
    assert_eq!(locally(&layer, 100).await, 99);
    sleep(Duration::from_millis(2)).await;
    assert_eq!(locally(&layer, 100).await, 89);
}

#[tokio::test(start_paused = true)]
async fn under_deny_and_allow_nothing_is_made_up_for() {
    for policy in [OnStoreFailure::Deny, OnStoreFailure::Allow] {
        for mode in [BROKEN, SILENT] {
            let store = Switch::default();
            let layer = local(&store).on_store_failure(policy);
            let (more, less) = (reserve(&layer, 50).await, reserve(&layer, 30).await);
            store.set(mode);
            more.actual("all", 90);
            less.actual("all", 10);
            sleep(Duration::from_millis(51)).await;
            store.set(BROKEN);
            let _ = reserve(&layer.clone().on_store_failure(OnStoreFailure::Local), 1).await;
            assert_eq!(locally(&layer, 100).await, 99, "{policy:?}");
            store.set(GOOD);
            assert_eq!(level(&store.buckets, &limit("all", HUNDRED)).await, 20, "{policy:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_passed_by_policy_was_not_charged_and_is_not_settled() {
    let store = Switch::at(BROKEN);
    let layer = local(&store).on_store_failure(OnStoreFailure::Allow);
    let settle = reserve(&layer, 60).await;
    let calls = store.calls.load(Relaxed);
    for mode in [BROKEN, GOOD] {
        store.set(mode);
        for cost in [0, 10, 150] {
            settle.actual("all", cost);
        }
    }
    assert_eq!(store.calls.load(Relaxed), calls);
    assert_eq!(level(&store.buckets, &limit("all", HUNDRED)).await, 100);
    store.set(BROKEN);
    let _ = reserve(&layer.clone().on_store_failure(OnStoreFailure::Local), 1).await;
    assert_eq!(locally(&layer, 100).await, 99);
}

#[tokio::test(start_paused = true)]
async fn a_settlement_that_fails_is_an_outage_in_the_log_and_one_that_succeeds_ends_it() {
    let (log, _guard) = Log::capture();
    let store = Switch::default();
    let layer = local(&store);
    let (a, b) = (reserve(&layer, 20).await, reserve(&layer, 20).await);
    store.set(BROKEN);
    a.actual("all", 30);
    b.actual("all", 30);
    assert_eq!(log.lines().len(), 1, "{}", log.text());
    store.set(GOOD);
    a.actual("all", 40);
    assert_eq!(log.lines().len(), 1, "an answer right after a failure says nothing");
    advance(Duration::from_secs(1)).await;
    a.actual("all", 50);
    b.actual("all", 40);
    let lines = log.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(lines[0].contains("WARN") && lines[0].contains("connection refused"), "{lines:?}");
    assert!(lines[1].contains("succeed again"), "{lines:?}");
}

// Servers.

#[tokio::test]
async fn a_request_and_its_settlement_are_two_round_trips_and_an_unchanged_cost_is_none() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let layer = layer(store.clone()).and(limit("other", HUNDRED));
    // Makes the script known.
    store.reset(&limit("all", HUNDRED), BucketKey::global()).await.unwrap();
    let left = async |tokens: u64| {
        let until = Instant::now() + PATIENCE;
        loop {
            let value = server.query(&["GET", "tb:v1:{global}:all"]);
            let level: u64 = value.text().unwrap().rsplit(':').next().unwrap().parse().unwrap();
            if level.div_ceil(86_400_000_000) == tokens + 1 || level / 86_400_000_000 == tokens {
                return;
            }
            assert!(Instant::now() < until, "{value:?}, not {tokens}");
            sleep(Duration::from_millis(1)).await;
        }
    };
    let before = server.calls("evalsha");
    let settle = reserve(&layer, 60).await;
    settle.actual("all", 10);
    left(90).await;
    assert_eq!(server.calls("evalsha") - before, 2);
    for cost in [10, 9, 0, 10] {
        settle.actual("all", cost);
    }
    settle.actual("other", 60);
    settle.actual("other", 60);
    // One that is sent after all that was not.
    settle.actual("all", 11);
    left(89).await;
    assert_eq!(server.calls("evalsha") - before, 3);
    assert_eq!(server.calls("eval"), 1);
}

#[tokio::test]
async fn the_response_does_not_wait_for_redis_and_the_policy_holds_for_the_settlement() {
    let server = Arc::new(Server::start());
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let layer = layer(store.clone()).on_store_failure(OnStoreFailure::Local);
    let frozen = Arc::clone(&server);
    let took = Arc::new(Mutex::new(None));
    let told = Arc::clone(&took);
    let service = layer.layer(service_fn(move |request: Ask| {
        frozen.freeze();
        let started = Instant::now();
        request.extensions().get::<Settle>().unwrap().actual("all", 90);
        *told.lock().unwrap() = Some(started.elapsed());
        ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())))
    }));
    let started = Instant::now();
    // The check may take 10 s, and so may the settlement.
    let answer = service.oneshot(ask(60)).await.unwrap();
    assert_eq!(answer.status(), 200);
    let took = took.lock().unwrap().unwrap();
    assert!(took < Duration::from_secs(1) && started.elapsed() < Duration::from_secs(5), "{took:?}");
    server.thaw();
    comes_to(&store, 10).await;

    // Frozen for longer than the deadline: 30 more are charged here; and in Redis too, when it goes on.
    let quick = layer.deadline(Duration::from_millis(200));
    let settle = reserve(&quick, 10).await;
    server.freeze();
    settle.actual("all", 40);
    // Timers end in order.
    sleep(Duration::from_millis(300)).await;
    assert_eq!(locally(&quick, 71).await, 70);
    server.thaw();
    comes_to(&store, -30).await;
}

#[tokio::test]
async fn a_redis_that_is_killed_before_the_settlement_gives_nobody_more() {
    for share in [1, 4] {
        let own = 100 / i64::from(share);
        let server = Server::start();
        let store = RedisStore::connect(&server.url()).await.unwrap();
        let layer = layer(store.clone()).on_store_failure(OnStoreFailure::Local).share(share);
        let (more, less) = (reserve(&layer, 50).await, reserve(&layer, 30).await);
        server.kill();
        // So that a request of 100, or of the whole share, is refused from here on, and takes nothing.
        let _ = reserve(&layer, 1).await;
        assert_eq!(locally(&layer, 100).await, own - 1);
        more.actual("all", 60);
        let until = Instant::now() + PATIENCE;
        while locally(&layer, 100).await != own - 11 {
            assert!(Instant::now() < until, "nothing is charged here");
            sleep(Duration::from_millis(5)).await;
        }
        less.actual("all", 10);
        // Which ends after the other, and gives nothing back.
        more.actual("all", 62);
        while locally(&layer, 100).await != own - 13 {
            assert!(Instant::now() < until, "{} here", locally(&layer, 100).await);
            sleep(Duration::from_millis(5)).await;
        }
        server.restart();
        let until = Instant::now() + PATIENCE;
        while store.peek(&limit("all", HUNDRED), BucketKey::global()).await.is_err() {
            assert!(Instant::now() < until);
            sleep(Duration::from_millis(5)).await;
        }
        // An empty server has full buckets: nothing comes on top, and a charge is made there again.
        less.actual("all", 0);
        more.actual("all", 65);
        comes_to(&store, 97).await;
    }
}

/// A thread that no runtime knows, such as one of a pool for CPU work. The charge is made in Redis or here.
#[tokio::test]
async fn a_thread_without_a_runtime_may_settle() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let layer = layer(store.clone()).on_store_failure(OnStoreFailure::Local);
    let settle = reserve(&layer, 60).await;
    std::thread::spawn(move || settle.actual("all", 90)).join().expect("no panic");
    let until = Instant::now() + PATIENCE;
    while level(&store, &limit("all", HUNDRED)).await != 10 {
        server.freeze();
        let here = send(&layer.clone().deadline(Duration::from_millis(50)), 71).await;
        server.thaw();
        if here.status() == 429 {
            break;
        }
        assert!(Instant::now() < until, "charged neither there nor here");
    }
}

/// A bucket that has been full again before the refund has lost what it would have held above its capacity; the refund
/// comes on top. Beside it, a bucket of which nothing was reserved.
#[tokio::test(start_paused = true)]
async fn a_refund_to_a_bucket_that_has_been_full_since_gives_no_more_than_the_reservation() {
    let quota = Quota::per_second(10).with_capacity(100);
    let (with, without) = (MemoryStore::new(), MemoryStore::new());
    let layers = [&with, &without].map(|store| TokenBucketLayer::new(store.clone(), limit("all", quota)).settle());
    let settle = reserve(&layers[0], 60).await;
    advance(Duration::from_secs(6)).await;
    for layer in &layers {
        let _ = reserve(layer, 100).await;
    }
    settle.actual("all", 0);
    let (with, without) = (level(&with, &limit("all", quota)).await, level(&without, &limit("all", quota)).await);
    assert_eq!((with, without), (60, 0));
}
