//! Checks that travel together, denials that are remembered, and buckets in memory: where they do not hold.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Cmd, RedisFuture};
use tokio::runtime::Builder;
use tokio::sync::Notify;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Health, Limit, LimitName, MemoryStore, Quota, RedisAcquire, RedisStore, Store, redis,
};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::util::SubscriberInitExt;

use crate::server::Server;
use crate::topology::Cluster;

const HOUR: Duration = Duration::from_secs(3600);
/// Longer than anything takes on a busy machine; only ever waited for when a test fails.
const LONG: Duration = Duration::from_secs(20);

/// Tokens of which none comes back while a test runs.
fn slow(capacity: u64) -> Quota {
    Quota::new(1, HOUR).with_capacity(capacity)
}

fn charge(limit: &str, key: BucketKey, quota: Quota, amount: Amount) -> Charge {
    Charge::new(LimitName::try_new(limit).unwrap(), key, quota, amount)
}

fn take(limit: &str, key: BucketKey, quota: Quota) -> Charge {
    charge(limit, key, quota, Amount::Take(1))
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

// Checks that travel together.

/// One server of which a cluster is made: each request's keys share a hash tag, and so a slot; those of different requests
/// do not. By itself each is answered, as one endpoint before several shards answers it.
#[tokio::test]
async fn requests_of_different_identities_on_a_server_with_slots_are_answered_also_when_they_come_together() {
    let cluster = Cluster::start(1, 0);
    let store = RedisStore::connect(&cluster.nodes[0].url()).await.unwrap();
    let charges: Vec<_> = (0..20).map(|i| [take("per-client", BucketKey::id(format!("{i}")), slow(10))]).collect();
    for charges in &charges {
        assert!(store.acquire(charges).await.unwrap().is_allowed(), "one by one");
    }
    let mut checks: Vec<_> = charges.iter().map(|charges| store.acquire(charges)).collect();
    for check in &mut checks {
        assert!(poll_once(check).is_pending());
    }
    for check in checks {
        let decision = timeout(LONG, check).await.expect("an answer");
        assert!(decision.expect("no error that one by itself would not have had").is_allowed());
    }
}

/// Says that it is no primary; the last time only when it is let.
#[derive(Clone, Default)]
struct Demoted {
    asked: Arc<Mutex<u32>>,
    holds: Arc<Mutex<Option<Arc<Notify>>>>,
}

impl ConnectionLike for Demoted {
    fn req_packed_command<'a>(&'a mut self, _: &'a Cmd) -> RedisFuture<'a, redis::Value> {
        *self.asked.lock().unwrap() += 1;
        let holds = self.holds.lock().unwrap().clone();
        Box::pin(async move {
            if let Some(holds) = holds {
                holds.notified().await;
            }
            Err((redis::ErrorKind::Server(redis::ServerErrorKind::ReadOnly), "You can't write against a replica")
                .into())
        })
    }

    one_command_at_a_time!();
}

/// The client that made the probe hangs up before the answer comes: an error, as all before.
#[tokio::test]
async fn a_probe_that_is_answered_with_an_error_does_not_close_the_breaker_when_its_caller_has_gone() {
    let connection = Demoted::default();
    let store = RedisStore::from_connection(connection.clone());
    let one = [take("plenty", BucketKey::global(), slow(100_000))];
    for _ in 0..5 {
        store.acquire(&one).await.unwrap_err();
    }
    assert_eq!(store.health(), Health::Open);
    let notify = Arc::new(Notify::new());
    *connection.holds.lock().unwrap() = Some(Arc::clone(&notify));
    sleep(Duration::from_millis(150)).await;
    let mut probe = store.acquire_within(&one, LONG);
    assert!(poll_once(&mut probe).is_pending());
    assert_eq!(*connection.asked.lock().unwrap(), 6, "the probe is sent");
    drop(probe);
    notify.notify_one();
    sleep(Duration::from_millis(20)).await;
    assert_ne!(store.health(), Health::Closed, "nothing but errors was ever answered");
}

/// A user that may not call MGET is told so, and no bucket is made full.
#[tokio::test]
async fn an_error_for_a_right_that_is_missing_has_written_nothing() {
    let server = Server::start();
    let mut acl = vec!["ACL", "SETUSER", "limiter", "on", ">password", "~tb:v1:*"];
    acl.extend("-@all +evalsha +eval +time +get +set".split(' '));
    server.query(&acl);
    let store = RedisStore::connect(&server.url().replace("redis://", "redis://limiter:password@")).await.unwrap();
    let charges: Vec<_> = ["a", "b", "c"].map(|limit| take(limit, BucketKey::global(), slow(2))).into();
    store.acquire(&charges).await.unwrap_err();
    assert_eq!(server.keys(), Vec::<String>::new());
}

/// One of two slots in a pipeline has moved: those of the other are charged once.
#[tokio::test]
async fn a_slot_that_has_moved_is_no_matter_of_others_in_the_same_pipeline() {
    let cluster = Cluster::start(2, 0);
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let slot_of = |key: &BucketKey| cluster.slot(&format!("{{{key}}}"));
    let mut keys = (0..).map(|i| BucketKey::id(format!("several {i}")));
    let mut on_the_first = || keys.find(|key| cluster.slots(0).contains(&slot_of(key))).unwrap();
    let (stays, moves, bad) = (on_the_first(), on_the_first(), on_the_first());
    let of = |key| [take("slots", key, slow(1000))];
    for key in [stays, moves] {
        assert!(store.acquire(&of(key)).await.unwrap().is_allowed());
    }
    cluster.begin_move(slot_of(&moves), 0, 1);
    cluster.move_key(&format!("tb:v1:{{{moves}}}:slots"), 0, 1);
    cluster.end_move(slot_of(&moves), 0, 1);
    cluster.nodes[0].query(&["LPUSH", &format!("tb:v1:{{{bad}}}:slots"), "a"]);
    let asked: Vec<_> = (0..30).map(|i| of([stays, moves, bad][i % 3])).collect();
    let mut checks: Vec<_> = asked.iter().map(|charges| store.acquire_within(charges, LONG)).collect();
    checks.iter_mut().for_each(|check| assert!(poll_once(check).is_pending()));
    for (i, check) in checks.into_iter().enumerate() {
        let result = timeout(LONG, check).await.expect("an answer");
        assert_eq!(result.is_ok_and(|decision| decision.is_allowed()), i % 3 < 2, "{i}");
    }
    for key in [stays, moves] {
        assert_eq!(store.acquire(&of(key)).await.unwrap().remaining(), Some(1000 - 12));
    }
}

/// As many keys as a call may have, and more for one request.
#[tokio::test]
async fn requests_with_very_many_limits_share_calls() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    for limits in [62, 63, 500, 4001] {
        let charges: Vec<_> =
            (0..limits).map(|i| take(&format!("{limits}-{i}"), BucketKey::global(), slow(1000))).collect();
        let mut checks: Vec<_> = (0..66).map(|_| store.acquire_within(&charges, LONG)).collect();
        checks.iter_mut().for_each(|check| assert!(poll_once(check).is_pending()));
        for check in checks {
            let decision = timeout(LONG, check).await.expect("an answer").unwrap();
            assert!(decision.is_allowed() && decision.outcomes().len() == limits);
        }
        assert_eq!(store.acquire(&charges).await.unwrap().remaining(), Some(1000 - 67));
    }
}

/// Answers each command after a delay of its own, and then at once: that the tokens were there.
#[derive(Clone, Default)]
struct Delayed {
    delays: Arc<Mutex<VecDeque<Duration>>>,
    calls: Arc<Mutex<u32>>,
}

impl Delayed {
    fn of(delays: impl IntoIterator<Item = Duration>) -> Self {
        Self { delays: Arc::new(Mutex::new(delays.into_iter().collect())), ..Self::default() }
    }

    fn calls(&self) -> u32 {
        *self.calls.lock().unwrap()
    }
}

impl ConnectionLike for Delayed {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, redis::Value> {
        *self.calls.lock().unwrap() += 1;
        let delay = self.delays.lock().unwrap().pop_front();
        let keys: usize = match cmd.args_iter().nth(2) {
            Some(redis::Arg::Simple(keys)) => std::str::from_utf8(keys).unwrap().parse().unwrap(),
            _ => unreachable!("a script call has keys"),
        };
        Box::pin(async move {
            if let Some(delay) = delay {
                sleep(delay).await;
            }
            let one = redis::Value::Int(1);
            Ok(if keys == 1 { one } else { redis::Value::Array(vec![one; keys]) })
        })
    }

    one_command_at_a_time!();
}

fn polled_ones(store: &RedisStore, checks: usize) -> Vec<RedisAcquire> {
    let one = [take("plenty", BucketKey::global(), slow(100_000))];
    let mut checks: Vec<_> = (0..checks).map(|_| store.acquire_within(&one, LONG)).collect();
    checks.iter_mut().for_each(|check| assert!(poll_once(check).is_pending()));
    checks
}

async fn a_moment() {
    for _ in 0..5 {
        yield_now().await;
    }
}

/// Of two calls that are under way the later one is answered first: who waits by then is sent at once, and does not wait
/// for the other call.
#[tokio::test(start_paused = true)]
async fn who_waits_while_two_calls_are_under_way_is_sent_when_either_is_answered() {
    let ms = Duration::from_millis;
    let connection = Delayed::of([ms(3000), ms(3000), ms(1)]);
    let store = RedisStore::from_connection(connection.clone());
    let mut checks = polled_ones(&store, 2);
    a_moment().await;
    assert_eq!(connection.calls(), 2, "one by itself, and one by a task");
    sleep(ms(5)).await;
    checks.extend(polled_ones(&store, 1));
    a_moment().await;
    assert_eq!(connection.calls(), 3, "a call that takes long does not keep others waiting");
    let waits = polled_ones(&store, 1).remove(0);
    let began = Instant::now();
    assert!(waits.await.unwrap().is_allowed());
    assert!(began.elapsed() <= ms(50), "{:?}", began.elapsed());
}

// Denials that are remembered.

/// Limits on different identities in a cluster are charged in turn, and given back if a later one refuses. Who asks in
/// between finds the token gone, for as long as that takes and not for a second.
#[tokio::test]
async fn a_denial_between_a_charge_and_its_return_is_not_remembered_in_a_cluster() {
    let cluster = Cluster::start(1, 0);
    let (store, other) =
        (RedisStore::cluster(cluster.urls()).await.unwrap(), RedisStore::cluster(cluster.urls()).await.unwrap());
    let (x, y) = (BucketKey::id("x"), BucketKey::id("y"));
    let mut seen = false;
    for i in 0..20 {
        let (a, b) = (take(&format!("a{i}"), x, slow(1)), take(&format!("b{i}"), y, slow(1)));
        // Another instance's, so that this one has to ask.
        assert!(other.acquire(std::slice::from_ref(&b)).await.unwrap().is_allowed());
        let (both, single) = ([a.clone(), b], [a]);
        let (both, between) = tokio::join!(store.acquire(&both), store.acquire(&single));
        assert!(!both.unwrap().is_allowed());
        if between.unwrap().is_allowed() {
            continue;
        }
        seen = true;
        // All is over by now, and the token is there.
        let look = [charge(&format!("a{i}"), x, slow(1), Amount::Peek)];
        assert_eq!(store.acquire(&look).await.unwrap().remaining(), Some(1));
        let decision = store.acquire(&single).await.unwrap();
        assert!(decision.is_allowed(), "round {i}: refused by {:?}", decision.source());
    }
    assert!(seen, "nobody asked in between");
}

/// A debt that this instance makes is known to it.
#[tokio::test]
async fn a_remembered_denial_tells_the_wait_of_a_debt_that_this_instance_has_made() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let of = |amount| [charge("per-client", BucketKey::global(), slow(10), amount)];
    assert!(store.acquire(&of(Amount::Take(10))).await.unwrap().is_allowed());
    assert!(!store.acquire(&of(Amount::Take(1))).await.unwrap().is_allowed());
    assert!(store.acquire(&of(Amount::Spend(5))).await.unwrap().is_allowed());
    let decision = store.acquire(&of(Amount::Take(1))).await.unwrap();
    let wait = decision.retry_after().unwrap();
    assert!(wait > 5 * HOUR, "{wait:?} by {:?}", decision.source());
}

/// A debt under another quota earns the time since the last write at that quota's rate.
#[tokio::test]
async fn a_spend_under_a_faster_quota_ends_a_denial() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let fast = Quota::per_second(1000).with_capacity(10);
    let of = |quota, amount| [charge("per-client", BucketKey::global(), quota, amount)];
    assert!(store.acquire(&of(slow(10), Amount::Take(10))).await.unwrap().is_allowed());
    assert!(!store.acquire(&of(slow(10), Amount::Take(1))).await.unwrap().is_allowed());
    sleep(Duration::from_millis(30)).await;
    assert!(store.acquire(&of(fast, Amount::Spend(1))).await.unwrap().is_allowed());
    let look = store.acquire(&of(slow(10), Amount::Peek)).await.unwrap().remaining();
    // At that rate the tenth comes within a millisecond, after which there is no key.
    assert!(matches!(look, Some(9 | 10)), "{look:?}");
    let decision = store.acquire(&of(slow(10), Amount::Take(1))).await.unwrap();
    assert!(decision.is_allowed(), "refused by {:?}", decision.source());
}

// Buckets in memory.

/// Looks at the store for each line that is logged, as a subscriber that counts does.
#[derive(Clone)]
struct Looks(MemoryStore);

impl<'a> MakeWriter<'a> for Looks {
    type Writer = io::Sink;

    fn make_writer(&'a self) -> io::Sink {
        assert!(self.0.buckets() > 0);
        io::sink()
    }
}

#[test]
fn the_line_that_tells_of_the_overflow_bucket_is_logged_when_no_lock_is_held() {
    let (done, is_done) = mpsc::channel();
    std::thread::spawn(move || {
        let store = MemoryStore::with_buckets(64);
        let subscriber = tracing_subscriber::fmt().with_writer(Looks(store.clone())).finish();
        let _guard = subscriber.set_default();
        let runtime = Builder::new_current_thread().build().unwrap();
        for i in 0..1000 {
            let key = BucketKey::id(format!("{i}"));
            let charges = [take("a", key, slow(10)), take("b", key, slow(10))];
            runtime.block_on(store.acquire(&charges)).unwrap();
        }
        assert!(store.overflowed() > 0);
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(10)).expect("nobody waits for a lock for ever");
}

/// The flood never takes the token: its other limit refuses for ever. What it hears of this one may be a denial.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reset_has_returned_nothing_of_before_refuses() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limit = Limit::new("per-client", slow(1));
    let one = [take("per-client", BucketKey::global(), slow(1))];
    let none = take("none", BucketKey::global(), slow(1));
    assert!(store.acquire(std::slice::from_ref(&none)).await.unwrap().is_allowed());
    let stop = Arc::new(AtomicBool::new(false));
    let mut flood = JoinSet::new();
    for _ in 0..8 {
        let (store, stop, both) = (store.clone(), Arc::clone(&stop), [one[0].clone(), none.clone()]);
        flood.spawn(async move {
            let mut asked = 0u64;
            while !stop.load(Ordering::Relaxed) {
                assert!(!store.acquire(&both).await.unwrap().is_allowed());
                // A denial of the first limit by itself, too: a cost that never passes while the token is gone.
                asked += 1;
                yield_now().await;
            }
            asked
        });
    }
    let (mut admitted, started) = (0, Instant::now());
    while started.elapsed() < Duration::from_secs(2) {
        store.reset(&limit, BucketKey::global()).await.unwrap();
        let decision = store.acquire(&one).await.unwrap();
        assert!(decision.is_allowed(), "after {admitted}: refused by {:?}", decision.source());
        admitted += 1;
        // Denials in flight when the next reset comes.
        let (a, b, c) = tokio::join!(store.acquire(&one), store.acquire(&one), async {
            store.reset(&limit, BucketKey::global()).await.map(drop)
        });
        c.unwrap();
        if !(a.unwrap().is_allowed() || b.unwrap().is_allowed()) {
            assert!(store.acquire(&one).await.unwrap().is_allowed(), "after {admitted}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    let asked: u64 = flood.join_all().await.iter().sum();
    println!("{admitted} resets, {asked} denials");
}

/// Quotas at their bounds, for longer than any process runs.
#[tokio::test(start_paused = true)]
async fn buckets_of_any_quota_outlast_a_thousand_times_a_thousand_days() {
    let store = MemoryStore::with_buckets(1);
    let day = Duration::from_secs(86_400);
    let quotas = [
        Quota::from_parts(1 << 31, 1, Duration::from_micros(1 << 20)),
        Quota::from_parts(64, 1, Duration::from_micros(1 << 45)),
        Quota::from_parts(1, 1 << 40, Duration::from_micros(1)),
        Quota::new(1, 30 * day).with_capacity(868),
    ];
    for round in 0..4 {
        for (i, quota) in quotas.iter().enumerate() {
            let all = |amount| [charge(&format!("q{i}"), BucketKey::global(), *quota, amount)];
            let capacity = quota.capacity();
            assert!(store.acquire(&all(Amount::Take(capacity))).await.unwrap().is_allowed(), "{i} in {round}");
            let denied = store.acquire(&all(Amount::Take(capacity))).await.unwrap();
            assert!(!denied.is_allowed());
            tokio::time::advance(denied.retry_after().unwrap()).await;
            assert!(store.acquire(&all(Amount::Take(capacity))).await.unwrap().is_allowed());
            let spent = store.acquire(&all(Amount::Spend(u64::MAX))).await.unwrap();
            assert!(spent.reset_after().is_some());
        }
        tokio::time::advance(1_000_000 * day).await;
    }
}

/// A process that stands still for a while, as a container or a machine does that is paused: who has read the clock before
/// must not write that time over a later one, or the time between is earned twice.
#[cfg(unix)]
#[test]
fn a_pause_of_the_process_is_earned_once() {
    const NAME: &str = "breakage::a_pause_of_the_process_is_earned_once";
    if std::env::var_os("PAUSED").is_none() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture", "--test-threads=1"])
            .env("PAUSED", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let signal = |name: &str| Command::new("kill").arg(name).arg(child.id().to_string()).status().unwrap();
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(400));
            assert!(signal("-STOP").success());
            std::thread::sleep(Duration::from_millis(1500));
            assert!(signal("-CONT").success());
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let (capacity, rate) = (100_000, 10_000);
    let (store, began) = (MemoryStore::new(), Instant::now());
    let one = [take("hot", BucketKey::global(), Quota::per_second(rate).with_capacity(capacity))];
    let admitted: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut admitted = 0;
                    while began.elapsed() < Duration::from_millis(8500) {
                        let Poll::Ready(Ok(decision)) = poll_once(&mut store.acquire(&one)) else { unreachable!() };
                        admitted += u64::from(decision.is_allowed());
                    }
                    admitted
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let most = capacity + (rate as f64 * began.elapsed().as_secs_f64()).ceil() as u64;
    println!("{admitted} of at most {most}");
    assert!(admitted <= most, "{admitted} of at most {most}");
}
