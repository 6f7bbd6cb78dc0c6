//! Callers that give up: nothing is leaked, nothing is sent for one that has gone before its turn, and at most 64 checks
//! are charged after all callers have gone.

use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::limit::ConcurrencyLimit;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Global, Health, Limit, LimitName, MemoryStore, OnStoreFailure, Quota,
    RedisAcquire, RedisErrorKind, RedisStore, Store, TokenBucketLayer,
};

use crate::losses::charged;
use crate::server::Server;

/// Longer than anything takes on a busy machine; only ever waited for when a test fails.
const LONG: Duration = Duration::from_secs(20);
const ON_THE_WIRE: usize = 64;
const WAITING: usize = 4096;

/// Plenty, of which less than one comes back while a test runs.
const QUOTA: Quota = Quota::from_parts(20_000, 1, Duration::from_secs(86_400));

fn take(cost: u64) -> [Charge; 1] {
    [Charge::new(LimitName::try_new("all").unwrap(), BucketKey::global(), QUOTA, Amount::Take(cost))]
}

type Ask = Request<Full<Bytes>>;
type Answer = Response<Full<Bytes>>;

fn ask() -> Ask {
    Request::get("/").body(Full::default()).unwrap()
}

fn layer<St: Store>(store: St) -> TokenBucketLayer<St> {
    let limit = Limit::new("all", QUOTA).key_by(Global);
    TokenBucketLayer::new(store, limit).on_store_failure(OnStoreFailure::Deny)
}

/// An inner service that pends a few times and lets one request in at a time.
fn one_at_a_time(
    permits: &Arc<Semaphore>,
) -> impl Service<Ask, Response = Answer, Error = Infallible, Future: Send> + Clone + use<> {
    let inner = service_fn(|_: Ask| async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        Ok::<_, Infallible>(Response::new(Full::default()))
    });
    ConcurrencyLimit::with_semaphore(inner, Arc::clone(permits))
}

#[derive(Default)]
struct Woken(Notify);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

/// Polls so many times, each after the first when it is woken, and returns the output if there is one by then.
async fn polls<F: Future>(mut future: Pin<&mut F>, k: usize) -> Option<F::Output> {
    let woken = Arc::<Woken>::default();
    let waker = Waker::from(Arc::clone(&woken));
    for number in 1..=k {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return Some(output),
            Poll::Pending if number < k => timeout(LONG, woken.0.notified()).await.expect("it is woken"),
            Poll::Pending => {}
        }
    }
    None
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

async fn connect(server: &Server) -> RedisStore {
    RedisStore::connect(&server.url()).await.unwrap()
}

/// A store whose script is known to the server, and whose bucket misses one token.
async fn known(server: &Server) -> RedisStore {
    let store = connect(server).await;
    assert!(store.acquire(&take(1)).await.unwrap().is_allowed());
    store
}

async fn allowed(store: &RedisStore) -> Decision {
    let decision = timeout(LONG, store.acquire(&take(1))).await.expect("a place on the wire").unwrap();
    assert!(decision.is_allowed());
    decision
}

/// Asks until it is answered, which closes the breaker, and says how many answers that took. Answers come in order, so
/// that all that was sent before has been carried out.
async fn until_answered(store: &RedisStore) -> u64 {
    let started = Instant::now();
    for answered in 1.. {
        while timeout(LONG, store.acquire(&take(1))).await.expect("an answer").is_err() {
            assert!(started.elapsed() < LONG, "it does not heal");
            sleep(Duration::from_millis(10)).await;
        }
        if store.health() == Health::Closed {
            return answered;
        }
    }
    unreachable!()
}

// A server that freezes.

/// redis-rs by itself: 2,000 of 2,000 commands run after their callers have given up.
async fn frozen_for(pause: Duration) {
    let server = Server::start();
    let store = known(&server).await;
    let inner = |_: Ask| async { Ok::<_, Infallible>(Answer::default()) };
    let service = layer(store.clone()).layer(service_fn(inner));
    server.query(&["CONFIG", "RESETSTAT"]);
    server.freeze();
    let started = Instant::now();
    let mut requests = JoinSet::new();
    for _ in 0..20 {
        for _ in 0..100 {
            let service = service.clone();
            requests.spawn(async move { service.oneshot(ask()).await.unwrap().status().as_u16() });
        }
        sleep(pause / 20).await;
    }
    let statuses = timeout(LONG, requests.join_all()).await.expect("each ends at its deadline");
    assert_eq!(statuses, [503; 2000]);
    sleep(pause.saturating_sub(started.elapsed())).await;
    server.thaw();
    let answered = until_answered(&store).await;
    let late = charged(&server, "all", QUOTA) - 1 - answered;
    println!("frozen for {pause:?}: {late} of 2000 checks are charged after the thaw");
    assert!((1..=64).contains(&late), "{late}");
    let calls = server.calls("evalsha");
    assert!((answered + 1..=late + answered).contains(&calls), "{calls} calls: each is one charge, or several");
    // Exact again.
    for i in 1..=50 {
        assert_eq!(allowed(&store).await.remaining(), Some(20_000 - 1 - late - answered - i));
    }
    assert_eq!(server.calls("evalsha"), calls + 50);
}

#[tokio::test]
async fn after_a_freeze_of_3_s_at_most_64_of_2000_checks_are_charged_and_then_it_is_exact_again() {
    frozen_for(Duration::from_secs(3)).await;
}

/// After 5 s without an answer the connection is taken for dead. What was sent on it may still be carried out; a new one
/// is not made as long as nobody answers.
#[tokio::test]
async fn after_a_freeze_of_8_s_they_are_no_more() {
    frozen_for(Duration::from_secs(8)).await;
}

// A response future that is dropped after k polls, for each k until it is resolved.

/// Often enough that what is leaked each time would have used up all places on the wire.
const AGAIN: usize = ON_THE_WIRE + 6;

#[tokio::test]
async fn in_memory_a_response_dropped_at_any_poll_frees_the_inner_service_and_keeps_its_charge() {
    let store = MemoryStore::new();
    let permits = Arc::new(Semaphore::new(1));
    let mut service = layer(store.clone()).layer(one_at_a_time(&permits));
    let mut taken = 0;
    for k in 1.. {
        let mut resolved = false;
        for _ in 0..AGAIN {
            let mut future = Box::pin(service.ready().await.unwrap().call(ask()));
            resolved = polls(future.as_mut(), k).await.is_some();
            drop(future);
            assert_eq!(permits.available_permits(), 1, "dropped after {k} polls");
            // Taken, and not given back.
            taken += 2;
            assert_eq!(store.acquire(&take(1)).await.unwrap().remaining(), Some(20_000 - taken), "after {k} polls");
        }
        if resolved {
            assert!(k >= 4, "the inner service pends three times, and {k} polls were enough");
            break;
        }
    }
}

/// Drops responses at every poll until they are resolved, `prepare` before each, and looks after each that nothing is
/// leaked and that the same connection serves the next request right.
async fn dropped_at_every_poll(server: &Server, store: RedisStore, prepare: impl Fn()) -> usize {
    let permits = Arc::new(Semaphore::new(1));
    let mut service = layer(store.clone()).deadline(LONG).layer(one_at_a_time(&permits));
    for k in 0.. {
        let mut resolved = 0;
        for _ in 0..AGAIN {
            prepare();
            let before = (server.calls("evalsha"), charged(server, "all", QUOTA));
            let mut future = Box::pin(service.ready().await.unwrap().call(ask()));
            let answer = polls(future.as_mut(), k).await;
            drop(future);
            assert_eq!(permits.available_permits(), 1, "dropped after {k} polls");
            if let Some(answer) = answer {
                assert_eq!(answer.unwrap().status(), 200);
                resolved += 1;
            }
            let response = service.ready().await.unwrap().call(ask()).await.unwrap();
            assert_eq!(response.status(), 200, "the one after {k} polls");
            let left = response.extensions().get::<Decision>().unwrap().remaining().unwrap();
            let sent = server.calls("evalsha") - before.0 - 1;
            let taken = 20_000 - left - before.1 - 1;
            // Where the script was not known the first call is refused.
            assert!(sent <= 1 && taken <= sent, "after {k} polls {sent} sent, {taken} taken");
            if k == 0 {
                assert_eq!(sent, 0, "a check that was never polled sends nothing");
            } else if resolved > 0 {
                assert_eq!((sent, taken), (1, 1));
            }
        }
        if resolved == AGAIN {
            assert_eq!(store.health(), Health::Closed);
            assert_eq!(store.connections(), Some(1), "one connection serves all");
            return k;
        }
    }
    unreachable!()
}

#[tokio::test]
async fn in_redis_a_response_dropped_at_any_poll_leaks_nothing_and_the_next_on_the_connection_is_right() {
    let server = Server::start();
    let store = known(&server).await;
    let k = dropped_at_every_poll(&server, store, || {}).await;
    // To be sent, answered, and three times for the inner service.
    assert!(k >= 5, "{k}");
}

#[tokio::test]
async fn the_same_where_the_script_has_to_be_sent() {
    let server = Server::start();
    let store = known(&server).await;
    let k = dropped_at_every_poll(&server, store, || _ = server.query(&["SCRIPT", "FLUSH"])).await;
    assert!(k >= 6, "{k}");
}

/// Checks that are on the wire of a frozen server, or wait.
fn polled_once(store: &RedisStore, checks: usize) -> Vec<RedisAcquire> {
    let mut checks: Vec<RedisAcquire> = (0..checks).map(|_| store.acquire(&take(1))).collect();
    for check in &mut checks {
        assert!(poll_once(check).is_pending());
    }
    checks
}

#[tokio::test]
async fn a_response_dropped_while_it_waits_for_a_place_on_the_wire_was_never_sent() {
    let server = Server::start();
    let store = known(&server).await;
    let permits = Arc::new(Semaphore::new(1));
    let mut service = layer(store.clone()).deadline(LONG).layer(one_at_a_time(&permits));
    server.query(&["CONFIG", "RESETSTAT"]);
    server.freeze();
    // However slow this machine is, no check is given up late.
    tokio::time::pause();
    let mut wire = polled_once(&store, ON_THE_WIRE);
    for k in 0..AGAIN {
        let mut future = Box::pin(service.ready().await.unwrap().call(ask()));
        for _ in 0..k % 4 {
            assert!(polls(future.as_mut(), 1).await.is_none());
        }
        drop(future);
        assert_eq!(permits.available_permits(), 1);
    }
    let mut waiting = polled_once(&store, 2);
    tokio::time::resume();
    server.thaw();
    // One place becomes free, for the first; dropped before it takes it, it leaves it to the second.
    assert!(timeout(LONG, wire.remove(0)).await.unwrap().unwrap().is_allowed());
    drop(waiting.remove(0));
    assert!(timeout(LONG, waiting.remove(0)).await.expect("a place").unwrap().is_allowed());
    for check in wire {
        assert!(timeout(LONG, check).await.unwrap().unwrap().is_allowed());
    }
    let sent = ON_THE_WIRE as u64 + 1;
    assert_eq!(charged(&server, "all", QUOTA), sent + 1);
    assert!(server.calls("evalsha") <= sent);
    assert_eq!(allowed(&store).await.remaining(), Some(20_000 - sent - 2));
}

#[tokio::test]
async fn a_response_dropped_while_the_store_connects_was_never_sent() {
    let server = Server::start();
    // It accepts, and says nothing.
    server.freeze();
    let store = connect(&server).await;
    let permits = Arc::new(Semaphore::new(1));
    let mut service = layer(store.clone()).deadline(LONG).layer(one_at_a_time(&permits));
    tokio::time::pause();
    for round in 0..3 {
        for k in 0..AGAIN {
            let mut future = Box::pin(service.ready().await.unwrap().call(ask()));
            for _ in 0..k % 4 {
                assert!(polls(future.as_mut(), 1).await.is_none(), "round {round}, poll {k}");
            }
            drop(future);
            assert_eq!(permits.available_permits(), 1);
        }
        // As many as there are places, which wait for the connection, and some that wait for a place.
        drop(polled_once(&store, ON_THE_WIRE + 6));
    }
    tokio::time::resume();
    server.thaw();
    let answered = until_answered(&store).await;
    // The first of them was refused for want of the script.
    assert_eq!((server.calls("evalsha"), server.calls("eval")), (answered, 1));
    assert_eq!(charged(&server, "all", QUOTA), answered);
    for _ in 0..AGAIN {
        allowed(&store).await;
    }
}

// Bounds.

#[tokio::test]
async fn beyond_64_on_the_wire_and_4096_that_wait_a_check_is_refused_at_once_and_those_that_wait_leave_when_dropped() {
    let server = Server::start();
    let store = known(&server).await;
    let inner = |_: Ask| async { Ok::<_, Infallible>(Answer::default()) };
    let mut service = layer(store.clone()).layer(service_fn(inner));
    server.query(&["CONFIG", "RESETSTAT"]);
    server.freeze();
    tokio::time::pause();
    let mut checks = polled_once(&store, ON_THE_WIRE + WAITING);
    let mut crowded = 0;
    for left in [0, 1, 100, WAITING, 0] {
        // From both ends of the queue.
        for _ in 0..left {
            let place = if left % 2 == 0 { checks.len() - 1 } else { ON_THE_WIRE };
            drop(checks.remove(place));
        }
        checks.extend(polled_once(&store, left));
        for _ in 0..10 {
            let Poll::Ready(refused) = poll_once(&mut store.acquire(&take(1))) else { panic!("not at once") };
            assert_eq!(refused.unwrap_err().kind(), RedisErrorKind::Crowded);
            // The policy applies at once.
            let mut response = Box::pin(service.ready().await.unwrap().call(ask()));
            let Poll::Ready(response) = poll_once(&mut response) else { panic!("not at once") };
            assert_eq!(response.unwrap().status(), 503);
            crowded += 2;
        }
        assert_eq!(store.failures(RedisErrorKind::Crowded), crowded);
    }
    // The load of this instance says nothing of the server.
    assert_eq!(store.health(), Health::Closed);
    tokio::time::resume();
    server.thaw();
    let mut answers = JoinSet::new();
    checks.into_iter().for_each(|check| _ = answers.spawn(timeout(LONG, check)));
    for answer in answers.join_all().await {
        assert!(answer.expect("an answer").unwrap().is_allowed());
    }
    let sent = (ON_THE_WIRE + WAITING) as u64;
    assert_eq!(charged(&server, "all", QUOTA), sent + 1);
    assert!(server.calls("evalsha") <= sent);
    allowed(&store).await;
}

#[tokio::test]
async fn the_script_is_not_sent_for_a_caller_that_has_gone() {
    let server = Server::start();
    let store = known(&server).await;
    server.query(&["SCRIPT", "FLUSH"]);
    server.query(&["CONFIG", "RESETSTAT"]);
    server.freeze();
    tokio::time::pause();
    let checks = polled_once(&store, ON_THE_WIRE);
    // The first by itself, the others in one call, by a task.
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    drop(checks);
    tokio::time::resume();
    server.thaw();
    // After those on the wire, all of which were refused for want of the script: the first that is there sends it.
    for i in 1..=AGAIN as u64 {
        assert_eq!(allowed(&store).await.remaining(), Some(20_000 - 1 - i));
    }
    assert_eq!((server.calls("evalsha"), server.calls("eval")), (2 + AGAIN as u64, 1));
}

// Runtimes.

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Polls on this thread, which is in no runtime.
fn by_hand<F: Future + Unpin>(mut future: F) -> F::Output {
    for _ in 0..LONG.as_millis() {
        if let Poll::Ready(output) = poll_once(&mut future) {
            return output;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("no answer within {LONG:?}");
}

/// Asks in `runtime` until it is answered.
fn heals(runtime: &Runtime, store: &RedisStore) {
    runtime.block_on(async {
        let started = Instant::now();
        while !matches!(timeout(LONG / 20, store.acquire(&take(1))).await, Ok(Ok(_))) {
            assert!(started.elapsed() < LONG, "it does not heal in another runtime");
            sleep(Duration::from_millis(10)).await;
        }
    });
}

#[test]
fn a_store_is_polled_and_dropped_outside_of_a_runtime() {
    let server = Server::start();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let store = runtime.block_on(known(&server));
    assert!(by_hand(store.acquire(&take(1))).unwrap().is_allowed());
    for _ in 0..AGAIN {
        let mut check = store.acquire(&take(1));
        let _ = poll_once(&mut check);
    }
    for _ in 0..AGAIN {
        assert!(by_hand(store.acquire(&take(1))).unwrap().is_allowed());
    }
    let charged = charged(&server, "all", QUOTA);
    assert_eq!(by_hand(store.acquire(&take(1))).unwrap().remaining(), Some(20_000 - charged - 1));
    let _ = format!("{store:?} {:?}", store.health());
}

#[test]
fn a_store_whose_runtime_has_ended_fails_and_heals_in_another() {
    let server = Server::start();
    let first = runtime();
    let store = first.block_on(known(&server));
    let mut before = store.acquire(&take(1));
    assert!(poll_once(&mut before).is_pending());
    drop(first);
    // One that was sent, one on the connection that has ended, and one that would have to connect.
    for check in [before, store.acquire(&take(1)), store.acquire(&take(1))] {
        let error = by_hand(check).unwrap_err();
        assert!([RedisErrorKind::Lost, RedisErrorKind::Unreachable].contains(&error.kind()), "{error}");
    }
    heals(&runtime(), &store);
}

/// Drops what it holds, and says whether that panicked.
struct Watched(Option<RedisAcquire>, Arc<AtomicBool>);

impl Drop for Watched {
    fn drop(&mut self) {
        let check = self.0.take();
        if catch_unwind(AssertUnwindSafe(|| drop(check))).is_err() {
            self.1.store(true, SeqCst);
        }
    }
}

#[test]
fn checks_that_end_with_their_runtime_do_no_harm() {
    let server = Server::start();
    let first = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let store = first.block_on(known(&server));
    server.freeze();
    let panicked = Arc::new(AtomicBool::new(false));
    // On the wire, waiting for a place, and already given up.
    let polled = Arc::new(Semaphore::new(0));
    for _ in 0..100 {
        let (mut check, polled) = (Watched(Some(store.acquire(&take(1))), Arc::clone(&panicked)), Arc::clone(&polled));
        first.spawn(std::future::poll_fn(move |cx| {
            polled.add_permits(1);
            Pin::new(check.0.as_mut().unwrap()).poll(cx).map(drop)
        }));
    }
    _ = first.block_on(polled.acquire_many(100)).unwrap();
    first.block_on(async {
        for _ in 0..3 {
            let mut check = store.acquire(&take(1));
            assert!(poll_once(&mut check).is_pending());
        }
    });
    drop(first);
    server.thaw();
    assert!(!panicked.load(SeqCst));
    let second = runtime();
    heals(&second, &store);
    for _ in 0..AGAIN {
        second.block_on(allowed(&store));
    }
}

/// One that is still there, and does nothing: its connection is taken for dead after 5 s of silence.
#[test]
fn a_store_whose_runtime_stands_still_heals_in_another() {
    let server = Server::start();
    let first = runtime();
    let store = first.block_on(known(&server));
    heals(&runtime(), &store);
    drop(first);
}

/// The task that connects ends with its runtime, and has to leave room for another.
#[test]
fn a_store_whose_runtime_ends_while_it_connects_connects_in_another() {
    let server = Server::start();
    server.freeze();
    let first = runtime();
    let store = first.block_on(connect(&server));
    drop(first);
    server.thaw();
    heals(&runtime(), &store);
}

/// A worker that is still at a check when its runtime ends: what it spawns then is dropped at once, by that worker.
#[test]
fn a_check_in_a_runtime_that_ends_comes_to_an_end() {
    let server = Server::start();
    let ended = runtime();
    let handle = ended.handle().clone();
    let store = ended.block_on(connect(&server));
    let known = ended.block_on(known(&server));
    drop(ended);
    let (done, is_done) = std::sync::mpsc::channel();
    let stores = [store.clone(), known.clone()];
    std::thread::spawn(move || {
        let _entered = handle.enter();
        for store in stores {
            for _ in 0..3 {
                done.send(by_hand(store.acquire(&take(1))).map(drop)).unwrap();
            }
        }
    });
    for _ in 0..6 {
        let error = is_done.recv_timeout(LONG).expect("it hangs, or has panicked").unwrap_err();
        assert!([RedisErrorKind::Lost, RedisErrorKind::Unreachable].contains(&error.kind()), "{error}");
    }
    for store in [store, known] {
        heals(&runtime(), &store);
    }
}

/// The same where the runtime is still there, and does nothing.
#[test]
fn a_store_whose_runtime_stands_still_while_it_connects_connects_in_another() {
    let server = Server::start();
    server.freeze();
    let first = runtime();
    let store = first.block_on(connect(&server));
    server.thaw();
    heals(&runtime(), &store);
    drop(first);
}

/// A response that nobody polls asks nobody.
#[tokio::test]
async fn in_memory_a_request_whose_response_is_never_polled_takes_nothing() {
    let store = MemoryStore::new();
    let mut service = layer(store.clone()).layer(one_at_a_time(&Arc::new(Semaphore::new(1))));
    drop(service.ready().await.unwrap().call(ask()));
    assert_eq!(store.acquire(&take(1)).await.unwrap().remaining(), Some(20_000 - 1));
}
