//! The limits of a running layer are replaced: for all at once, and never for a request that is under way.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body_util::Full;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{advance, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_token_bucket::{
    Charge, ConfigError, Decision, Global, Limit, MemoryStore, OnStoreFailure, Quota, RedisStore, Store,
    TokenBucketLayer,
};

use crate::server::Server;

type Ask = Request<Full<Bytes>>;
type Answer = Response<Full<Bytes>>;

const DAY: Duration = Duration::from_secs(86_400);
/// A busy machine is no outage.
const PATIENCE: Duration = Duration::from_secs(10);

/// One bucket of so many tokens, of which none comes back while a test runs, at the cost that the request names, or 1.
fn limit(name: &str, capacity: u64) -> Limit {
    Limit::new(name, Quota::new(1, DAY).with_capacity(capacity))
        .key_by(Global)
        .cost(|parts: &Parts| parts.headers.get("cost").map_or(1, |cost| cost.to_str().unwrap().parse().unwrap()))
}

fn layer<St: Store>(store: St, capacity: u64) -> TokenBucketLayer<St> {
    TokenBucketLayer::new(store, limit("all", capacity)).deadline(PATIENCE)
}

fn ask(cost: u64) -> Ask {
    Request::get("/").header("cost", cost).body(Full::default()).unwrap()
}

fn service<St: Store>(
    layer: &TokenBucketLayer<St>,
) -> impl Service<Ask, Response = Answer, Error = Infallible, Future: Send> + Clone + use<St> {
    layer.layer(service_fn(|_: Ask| ready(Ok(Response::new(Full::default())))))
}

/// Admitted or not, and what the fields say of the first limit: its name, its capacity and what remains of it.
async fn send(
    service: impl Service<Ask, Response = Answer, Error = Infallible>,
    cost: u64,
) -> (u16, String, u64, Option<u64>) {
    let answer = service.oneshot(ask(cost)).await.unwrap();
    let outcome = &answer.extensions().get::<Decision>().unwrap().outcomes()[0];
    let (name, capacity) = (outcome.limit().to_owned(), outcome.quota().capacity());
    let policy = answer.headers()["ratelimit-policy"].to_str().unwrap();
    assert!(policy.starts_with(&format!("\"{name}\";q={capacity};")), "{policy}");
    (answer.status().as_u16(), name, capacity, outcome.remaining())
}

fn is(name: &str, status: u16, capacity: u64, remaining: u64) -> (u16, String, u64, Option<u64>) {
    (status, name.to_owned(), capacity, Some(remaining))
}

#[tokio::test(start_paused = true)]
async fn all_services_clones_and_routes_have_the_new_limits_at_the_next_request() {
    let layer = layer(MemoryStore::new(), 100);
    let before = service(&layer);
    let clone_of_the_layer = layer.clone();
    let handle = layer.handle();
    let of_the_clone = service(&clone_of_the_layer.headers(Default::default()).on_decision(|_| {}));
    let whole = Router::new().route("/", get(|| async { "ok" })).layer(layer.clone());
    let by_route = Router::new().route("/", get(|| async { "ok" }).layer(layer.clone()));
    let clone_of_a_service = before.clone();
    let clone_of_a_handle = handle.clone();

    let mut left = 1000;
    for (round, capacity) in [100, 50, 1000].into_iter().enumerate() {
        let handle = if round == 1 { &handle } else { &clone_of_a_handle };
        handle.replace([limit("all", capacity)]).unwrap();
        left = left.min(capacity);
        for service in [&before, &clone_of_a_service] {
            left -= 1;
            assert_eq!(send(service.clone(), 1).await, is("all", 200, capacity, left));
        }
        left -= 2;
        assert_eq!(send(of_the_clone.clone(), 2).await, is("all", 200, capacity, left));
        assert_eq!(send(service(&layer), 1).await, is("all", 200, capacity, left - 1));
        left -= 1;
        for router in [&whole, &by_route] {
            let request = Request::get("/").body(Body::empty()).unwrap();
            let answer = router.clone().oneshot(request).await.unwrap();
            left -= 1;
            let policy = answer.headers()["ratelimit-policy"].to_str().unwrap();
            assert!(policy.starts_with(&format!("\"all\";q={capacity};")), "{policy}");
        }
        for seen in [&handle.limits(), &layer.handle().limits()] {
            assert_eq!((seen.len(), seen[0].name(), seen[0].quota().capacity()), (1, "all", capacity));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn with_an_error_the_old_limits_stay() {
    let layer = layer(MemoryStore::new(), 100).and(limit("more", 200));
    let handle = layer.handle();
    let service = service(&layer);
    assert!(matches!(handle.replace([]), Err(ConfigError::NoLimit)));
    for twice in [["new", "new"], ["new", "NEW"]] {
        let error = handle.replace(twice.map(|name| limit(name, 5))).unwrap_err();
        assert!(matches!(&error, ConfigError::DuplicateLimit { name } if name == twice[1]), "{error:?}");
    }
    let names: Vec<_> = handle.limits().iter().map(|limit| limit.name().to_owned()).collect();
    assert_eq!(names, ["all", "more"]);
    assert_eq!(send(service.clone(), 1).await, is("all", 200, 100, 99));
    // What is right still goes through afterwards.
    handle.replace([limit("new", 5)]).unwrap();
    assert_eq!(send(service, 1).await, is("new", 200, 5, 4));
}

#[tokio::test(start_paused = true)]
async fn and_makes_a_layer_with_limits_of_its_own_which_earlier_handles_do_not_reach() {
    let first = layer(MemoryStore::new(), 100);
    let handle = first.handle();
    let second = first.clone().and(limit("more", 200));
    handle.replace([limit("all", 10)]).unwrap();
    assert_eq!(send(service(&second), 1).await, is("all", 200, 100, 99), "not reached");
    assert_eq!(send(service(&first), 1).await, is("all", 200, 10, 9), "the clone's `and` changed nothing here");
    assert_eq!(first.handle().limits().len(), 1);
    second.handle().replace([limit("all", 20)]).unwrap();
    assert_eq!(send(service(&second), 1).await, is("all", 200, 20, 8));
    assert_eq!(send(service(&first), 1).await, is("all", 200, 10, 7));
    // One that fails changes nothing, and what `and` starts from is what is there by then.
    assert!(matches!(first.clone().try_and(limit("ALL", 1)), Err(ConfigError::DuplicateLimit { .. })));
    handle.replace([limit("late", 30)]).unwrap();
    let third = first.and(limit("more", 200));
    let names: Vec<_> = third.handle().limits().iter().map(|limit| limit.name().to_owned()).collect();
    assert_eq!(names, ["late", "more"]);
}

#[tokio::test(start_paused = true)]
async fn settings_after_the_handle_keep_it() {
    let layer = layer(MemoryStore::new(), 100);
    let handle = layer.handle();
    let layer = layer.settle().share(2).on_store_failure(OnStoreFailure::Deny).on_decision(|_| {});
    let layer = layer.rejection(tower_token_bucket::rejection::Empty);
    handle.replace([limit("all", 10)]).unwrap();
    let service = layer.layer(service_fn(|_: Ask| ready(Ok::<Answer, Infallible>(Response::new(Full::default())))));
    assert_eq!(send(service, 1).await, is("all", 200, 10, 9));
}

async fn buckets_keep_their_tokens(store: impl Store) {
    let layer = layer(store, 100);
    let (handle, service) = (layer.handle(), service(&layer));
    assert_eq!(send(service.clone(), 40).await, is("all", 200, 100, 60));
    // A larger capacity gives no tokens; a smaller one clamps, for good.
    handle.replace([limit("all", 1000)]).unwrap();
    assert_eq!(send(service.clone(), 10).await, is("all", 200, 1000, 50));
    assert_eq!(send(service.clone(), 51).await, is("all", 429, 1000, 50));
    handle.replace([limit("all", 30)]).unwrap();
    assert_eq!(send(service.clone(), 5).await, is("all", 200, 30, 25));
    handle.replace([limit("all", 100)]).unwrap();
    assert_eq!(send(service.clone(), 5).await, is("all", 200, 100, 20));
    // A new name starts full; the old one is found again as it was left.
    handle.replace([limit("new", 100), limit("all", 100)]).unwrap();
    assert_eq!(send(service.clone(), 21).await, is("new", 429, 100, 100));
    assert_eq!(send(service.clone(), 20).await, is("new", 200, 100, 80));
    handle.replace([limit("all", 100)]).unwrap();
    assert_eq!(send(service, 1).await, is("all", 429, 100, 0));
}

#[tokio::test(start_paused = true)]
async fn in_memory_buckets_keep_their_tokens_and_a_new_name_starts_full() {
    buckets_keep_their_tokens(MemoryStore::new()).await;
}

#[tokio::test]
async fn in_redis_buckets_keep_their_tokens_and_a_new_name_starts_full() {
    let server = Server::start();
    buckets_keep_their_tokens(RedisStore::connect(&server.url()).await.unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn the_time_since_the_last_use_is_earned_at_the_new_rate() {
    let quota = |tokens| Limit::new("all", Quota::per_second(tokens).with_capacity(100)).key_by(Global);
    let layer = TokenBucketLayer::new(MemoryStore::new(), quota(1).cost(|_: &Parts| 100));
    let handle = layer.handle();
    let service = service(&layer);
    assert_eq!(send(service.clone(), 1).await, is("all", 200, 100, 0));
    advance(Duration::from_secs(2)).await;
    handle.replace([quota(20)]).unwrap();
    assert_eq!(send(service.clone(), 1).await, is("all", 200, 100, 39));
    // And the new cost counts: 1, no longer 100.
    assert_eq!(send(service, 1).await, is("all", 200, 100, 38));
}

/// A store that asks its buckets when it is let.
#[derive(Clone, Debug)]
struct Gate {
    buckets: MemoryStore,
    open: Arc<Semaphore>,
    asked: Arc<AtomicU64>,
}

impl Store for Gate {
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Decision, Infallible>> + Send>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        self.asked.fetch_add(1, Relaxed);
        let (store, charges) = (self.clone(), charges.to_vec());
        Box::pin(async move {
            store.open.acquire().await.unwrap().forget();
            store.buckets.acquire(&charges).await
        })
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_under_way_is_judged_by_the_limits_that_were_there_when_it_came() {
    let gate = Gate { buckets: MemoryStore::new(), open: Arc::new(Semaphore::new(0)), asked: Arc::default() };
    let layer = layer(gate.clone(), 100).and(limit("more", 200));
    let (handle, service) = (layer.handle(), service(&layer));
    for cost in [60, 60] {
        let under_way = tokio::spawn(service.clone().oneshot(ask(cost)));
        let asked = gate.asked.load(Relaxed);
        while gate.asked.load(Relaxed) == asked {
            tokio::task::yield_now().await;
        }
        handle.replace([limit("other", 7)]).unwrap();
        gate.open.add_permits(1);
        let answer = under_way.await.unwrap().unwrap();
        let decision = answer.extensions().get::<Decision>().unwrap();
        let seen: Vec<_> =
            decision.outcomes().iter().map(|outcome| (outcome.limit(), outcome.quota().capacity())).collect();
        assert_eq!(seen, [("all", 100), ("more", 200)]);
        let policy = answer.headers()["ratelimit-policy"].to_str().unwrap();
        assert_eq!(policy, r#""all";q=100;w=8640000, "more";q=200;w=17280000"#);
        let left = answer.headers()["ratelimit"].to_str().unwrap();
        assert!(left.starts_with(r#""all";r=40;t="#) && left.contains(r#", "more";r=140;t="#), "{left}");
        // Admitted the first time, refused by `all` the second.
        let retry_after = answer.headers().get("retry-after").is_some();
        assert_eq!(retry_after, !decision.is_allowed());
        assert_eq!(decision.limit(), Some("all"));

        gate.open.add_permits(1);
        let (status, name, capacity, _) = send(service.clone(), 1).await;
        assert_eq!((status, &*name, capacity), (200, "other", 7));
        handle.replace([limit("all", 100), limit("more", 200)]).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_check_fails_has_the_local_buckets_of_the_limits_it_came_with() {
    let gate = Gate { buckets: MemoryStore::new(), open: Arc::new(Semaphore::new(0)), asked: Arc::default() };
    let layer = layer(gate.clone(), 100).deadline(Duration::from_millis(50));
    let (handle, service) = (layer.handle(), service(&layer));
    let under_way = tokio::spawn(service.oneshot(ask(60)));
    while gate.asked.load(Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    handle.replace([limit("all", 7)]).unwrap();
    let answer = under_way.await.unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.extensions().get::<Decision>().unwrap().remaining(), Some(40));
}

#[tokio::test(start_paused = true)]
async fn closures_of_a_limit_and_handlers_may_replace_the_limits() {
    let layer = layer(MemoryStore::new(), 100);
    let handle = layer.handle();
    let in_closure = handle.clone();
    let replacing = limit("all", 100).cost(move |_: &Parts| {
        in_closure.replace([limit("next", 10)]).unwrap();
        assert_eq!(in_closure.limits()[0].name(), "next");
        60
    });
    handle.replace([replacing]).unwrap();
    let in_handler = handle.clone();
    let service = layer.layer(service_fn(move |_: Ask| {
        in_handler.replace([limit("last", 5)]).unwrap();
        ready(Ok::<Answer, Infallible>(Response::new(Full::default())))
    }));
    assert_eq!(send(service.clone(), 1).await, is("all", 200, 100, 40));
    assert_eq!(send(service, 1).await, is("last", 200, 5, 4));
}

#[test]
fn threads_that_replace_at_once_leave_the_limits_of_one_of_them() {
    let handle = layer(MemoryStore::new(), 1).handle();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let handle = &handle;
            scope.spawn(move || {
                for i in 0..200 {
                    handle.replace(marked(thread * 1000 + i)).unwrap();
                    let capacities: Vec<_> = handle.limits().iter().map(|limit| limit.quota().capacity()).collect();
                    mark_of(&capacities);
                }
            });
        }
    });
}

/// Two limits whose quotas bear a mark.
fn marked(mark: u64) -> [Limit; 2] {
    let capacity = 10_000_000 + 2 * mark;
    [("one", capacity), ("two", capacity + 1)]
        .map(|(name, capacity)| Limit::new(name, Quota::per_second(1).with_capacity(capacity)).key_by(Global))
}

/// The mark of two quotas, which is the same one.
fn mark_of(capacities: &[u64]) -> u64 {
    let [one, two] = capacities[..] else { panic!("{capacities:?}") };
    assert!(one % 2 == 0 && two == one + 1, "a mixture: {capacities:?}");
    (one - 10_000_000) / 2
}

/// Four tasks ask without a pause while the limits are replaced `swaps` times, one each `pause`, and never before some
/// requests have come between. Two limits each time: their capacities, and the cost, which is 1 or 2, say of which set
/// they are.
async fn swap_under_load<St: Store>(layer: &TokenBucketLayer<St>, swaps: u64, pause: Duration) {
    let set = |i: u64| {
        let cost = 1 + i % 2;
        marked(i).map(|limit| limit.cost(move |_: &Parts| cost))
    };
    let handle = layer.handle();
    handle.replace(set(0)).unwrap();
    let (done, requests) = (Arc::<AtomicBool>::default(), Arc::new(Semaphore::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..4 {
        let (service, done, requests) = (service(layer), Arc::clone(&done), Arc::clone(&requests));
        tasks.spawn(async move {
            let (mut changes, mut last) = (0u64, 0);
            while !done.load(Relaxed) {
                let answer = service.clone().oneshot(ask(0)).await.unwrap();
                assert_eq!(answer.status(), 200, "no request fails");
                let outcomes = answer.extensions().get::<Decision>().unwrap().outcomes();
                let capacities: Vec<_> = outcomes.iter().map(|outcome| outcome.quota().capacity()).collect();
                let mark = mark_of(&capacities);
                let costs: Vec<_> = outcomes.iter().map(|outcome| (outcome.limit(), outcome.cost())).collect();
                assert_eq!(costs, [("one", 1 + mark % 2), ("two", 1 + mark % 2)]);
                let policy = answer.headers()["ratelimit-policy"].to_str().unwrap();
                let items: Vec<_> = policy.split(", ").map(|item| item.rsplit_once(';').unwrap().0).collect();
                assert_eq!(items, [format!("\"one\";q={}", capacities[0]), format!("\"two\";q={}", capacities[1])]);
                assert!(mark >= last, "an older set after a newer one: {mark} after {last}");
                changes += u64::from(mark != last);
                last = mark;
                requests.add_permits(1);
                tokio::task::yield_now().await;
            }
            changes
        });
    }
    for i in 1..=swaps {
        if !pause.is_zero() {
            sleep(pause).await;
        }
        // Those that came meanwhile do not count.
        requests.forget_permits(Semaphore::MAX_PERMITS);
        tokio::select! {
            come = requests.acquire_many(8) => come.unwrap().forget(),
            joined = tasks.join_next() => panic!("a task has ended: {joined:?}"),
        }
        handle.replace(set(i)).unwrap();
    }
    done.store(true, Relaxed);
    let changes: u64 = tasks.join_all().await.iter().sum();
    // At least one of the tasks has seen each set, but for the last.
    assert!(changes >= swaps - 1, "{changes} changes were seen");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_memory_2000_swaps_under_load_fail_no_request_and_mix_nothing() {
    swap_under_load(&layer(MemoryStore::new(), 1), 2000, Duration::ZERO).await;
}

/// 200 swaps in 10 s, as an operator may do, in 2.4 s: what matters is how many requests are under way at a swap, and a
/// check on this server takes less than a millisecond, so that four are at each of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_redis_200_swaps_under_load_fail_no_request_and_mix_nothing() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let layer = layer(store, 1).on_store_failure(OnStoreFailure::Deny);
    swap_under_load(&layer, 200, Duration::from_millis(12)).await;
}
