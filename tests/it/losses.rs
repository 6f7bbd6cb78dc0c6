//! What is admitted when Redis loses its state, with real traffic on real servers: in every window of `d` seconds with k
//! losses, at most (1 + k) capacities and what `d` refills, and under `Local` what the instances' own buckets hold. And
//! each charge is made once, whatever becomes of its reply.

use std::convert::Infallible;
use std::future::ready;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tower::{Layer as _, Service, ServiceExt as _, service_fn};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Global, Health, Limit, LimitName, OnStoreFailure, Quota, RedisErrorKind,
    RedisStore, Source, Store as _, TokenBucketLayer,
};

use crate::proxy::{Mode, Proxy};
use crate::server::{Server, Value};

/// Longer than anything takes on a busy machine; only ever waited for when a test fails.
const LONG: Duration = Duration::from_secs(20);
const HOUR: Duration = Duration::from_secs(3600);

fn charge(limit: &str, key: BucketKey, quota: Quota, cost: u64) -> Charge {
    Charge::new(LimitName::try_new(limit).unwrap(), key, quota, Amount::Take(cost))
}

/// How many tokens are missing in `limit`'s global bucket, by what the server holds. For quotas that earn less than a
/// token while a test runs.
pub(crate) fn charged(server: &Server, limit: &str, quota: Quota) -> u64 {
    let Value::Text(state) = server.query(&["GET", &format!("tb:v1:{{global}}:{limit}")]) else { return 0 };
    let level: u64 = state.rsplit(':').next().unwrap().parse().unwrap();
    let per_us = quota.refill().1.as_micros() as u64;
    (quota.capacity() * per_us - level).div_ceil(per_us)
}

/// Waits until something is so.
pub(crate) async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is() {
        assert!(started.elapsed() < LONG, "not within {LONG:?}: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

// Traffic, and the account of it.

struct Admission {
    sent: Instant,
    received: Instant,
    cost: u64,
}

#[derive(Default)]
struct Account {
    admissions: Mutex<Vec<Admission>>,
    /// By the server's bucket.
    denied: AtomicUsize,
    /// When local buckets were asked, and when they answered.
    local: Mutex<(Vec<Instant>, Vec<Instant>)>,
    stopped: AtomicBool,
}

struct Traffic {
    account: Arc<Account>,
    quota: Quota,
    tasks: JoinSet<()>,
}

impl Traffic {
    /// Several instances of a server, each with a connection of its own, and several clients of each, on one bucket.
    async fn start(url: &str, instances: u32, quota: Quota, policy: OnStoreFailure) -> Self {
        let (account, mut tasks) = (Arc::<Account>::default(), JoinSet::new());
        for _ in 0..instances {
            let limit = Limit::new("all", quota)
                .key_by(Global)
                .cost(|parts: &http::request::Parts| parts.headers["cost"].to_str().unwrap().parse().unwrap());
            // What is lost behind its back is seen at once, so that the bounds are tight.
            let store = RedisStore::connect(url).await.unwrap().remember_denials(false);
            let layer = TokenBucketLayer::new(store, limit);
            let layer = layer.on_store_failure(policy).share(instances);
            // Without `Local` nothing but the server decides what is admitted: no answer is too late.
            let layer = if policy == OnStoreFailure::Local { layer } else { layer.deadline(LONG) };
            let inner = |_: Request<Full<Bytes>>| ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())));
            let service = layer.layer(service_fn(inner));
            for client in 0..4 {
                let (mut service, account) = (service.clone(), Arc::clone(&account));
                tasks.spawn(async move {
                    for call in client.. {
                        if account.stopped.load(SeqCst) {
                            break;
                        }
                        let cost = [1, 2, 1, 3][call % 4];
                        let request = Request::get("/").header("cost", cost).body(Full::default()).unwrap();
                        let sent = Instant::now();
                        let response = service.ready().await.unwrap().call(request).await.unwrap();
                        account.record(sent, cost, &response);
                        sleep(Duration::from_millis(2)).await;
                    }
                });
            }
        }
        Self { account, quota, tasks }
    }

    /// Until the server's bucket is empty for most requests.
    async fn until_drained(&self) {
        let denied = self.account.denied.load(SeqCst);
        until("denials", || self.account.denied.load(SeqCst) > denied + 60).await;
    }

    async fn stop(mut self) -> Self {
        self.account.stopped.store(true, SeqCst);
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        self
    }

    fn admitted(&self) -> u64 {
        self.account.admissions.lock().unwrap().iter().map(|admission| admission.cost).sum()
    }

    /// Looks at every window: from the moment that one request was sent to the moment that another was answered. What
    /// was sent after its start and answered before its end was admitted within it, and never more than a capacity for
    /// itself and each loss that it has a part in, what it refills, and what `more` allows.
    ///
    /// Returns the most that was admitted over what a window refills.
    fn check(&self, losses: &[(Instant, Instant)], more: impl Fn(Instant, Instant) -> f64) -> f64 {
        let mut admissions = self.account.admissions.lock().unwrap();
        admissions.sort_by_key(|admission| admission.received);
        let capacity = self.quota.capacity() as f64;
        let (tokens, per) = self.quota.refill();
        let mut most = 0f64;
        for start in admissions.iter().map(|admission| admission.sent) {
            let mut admitted = 0;
            for admission in admissions.iter().filter(|admission| admission.sent >= start) {
                admitted += admission.cost;
                let end = admission.received;
                let k = losses.iter().filter(|(from, to)| *from <= end && *to >= start).count();
                let refilled = (end - start).as_secs_f64() * tokens as f64 / per.as_secs_f64();
                most = most.max(admitted as f64 - refilled);
                // One token for two clocks, the server's and this one's, of which one may be slewed.
                let bound = (1 + k) as f64 * capacity + refilled + more(start, end) + 1.0;
                assert!(
                    admitted as f64 <= bound,
                    "{admitted} tokens in {:?} with {k} losses, where {bound:.1} are allowed",
                    end - start
                );
            }
        }
        most
    }
}

impl Account {
    fn record(&self, sent: Instant, cost: u64, response: &Response<Full<Bytes>>) {
        let received = Instant::now();
        let source = response.extensions().get::<Decision>().map(Decision::source);
        if source == Some(Source::Local) {
            let mut local = self.local.lock().unwrap();
            local.0.push(sent);
            local.1.push(received);
        }
        match response.status() {
            StatusCode::OK => self.admissions.lock().unwrap().push(Admission { sent, received, cost }),
            StatusCode::TOO_MANY_REQUESTS if matches!(source, Some(Source::Store | Source::Remembered)) => {
                _ = self.denied.fetch_add(1, SeqCst);
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {}
            other => panic!("{other}"),
        }
    }

    /// How often a local bucket was asked.
    fn local(&self) -> usize {
        self.local.lock().unwrap().0.len()
    }
}

/// Does something that takes a while, and says when.
fn timed(what: impl FnOnce()) -> (Instant, Instant) {
    let started = Instant::now();
    what();
    (started, Instant::now())
}

/// A way to a server that can be led to another, and that can lose answers.
#[derive(Clone)]
struct Way {
    port: u16,
    target: watch::Sender<u16>,
    /// The next so many times that the server says something, that is lost with the connection. Then nothing is.
    lose: Arc<AtomicU64>,
    /// One in so many is lost; 0 for none.
    lose_one_in: Arc<AtomicU64>,
}

impl Way {
    async fn to(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let way = Self {
            port: listener.local_addr().unwrap().port(),
            target: watch::Sender::new(port),
            lose: Arc::default(),
            lose_one_in: Arc::default(),
        };
        let kept = way.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let way = kept.clone();
                tokio::spawn(async move {
                    // Whoever leads elsewhere cuts this one.
                    let mut target = way.target.subscribe();
                    let port = *target.borrow_and_update();
                    tokio::select! {
                        _ = way.carry(client, port) => {}
                        _ = target.changed() => {}
                    }
                });
            }
        });
        way
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn lead_to(&self, port: u16) {
        self.target.send_replace(port);
    }

    async fn carry(&self, mut client: TcpStream, port: u16) -> io::Result<()> {
        let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) = (client.split(), server.split());
        let answers = async {
            let mut said = vec![0; 1 << 16];
            for number in 1u64.. {
                let bytes = from_server.read(&mut said).await?;
                let one_in = self.lose_one_in.load(SeqCst);
                let lost = self.lose.fetch_update(SeqCst, SeqCst, |lose| lose.checked_sub(1)).is_ok();
                if bytes == 0 || lost || (one_in > 0 && number % one_in == 0) {
                    break;
                }
                to_client.write_all(&said[..bytes]).await?;
            }
            Ok(())
        };
        tokio::select! {
            ended = answers => ended,
            ended = tokio::io::copy(&mut from_client, &mut to_server) => ended.map(drop),
        }
    }
}

fn quota() -> Quota {
    Quota::per_second(20).with_capacity(200)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_loss_no_window_has_more_than_a_capacity_and_its_refill() {
    let server = Server::start();
    let traffic = Traffic::start(&server.url(), 3, quota(), OnStoreFailure::Deny).await;
    traffic.until_drained().await;
    sleep(Duration::from_secs(1)).await;
    let traffic = traffic.stop().await;
    let most = traffic.check(&[], |_, _| 0.0);
    println!("no loss: {} admitted, at most {most:.1} over the refill", traffic.admitted());
    assert!(most > 190.0, "{most}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_restart_without_the_state_gives_one_capacity_and_no_more() {
    let server = Server::start();
    let traffic = Traffic::start(&server.url(), 3, quota(), OnStoreFailure::Deny).await;
    traffic.until_drained().await;
    let mut losses = Vec::new();
    for _ in 0..3 {
        // Killed with SIGKILL, with nothing persisted.
        losses.push(timed(|| server.restart()));
        traffic.until_drained().await;
    }
    let traffic = traffic.stop().await;
    let most = traffic.check(&losses, |_, _| 0.0);
    println!("3 restarts: {} admitted, at most {most:.1} over the refill", traffic.admitted());
    // The bound is no larger than it has to be.
    assert!(most > 3.8 * 200.0, "{most}");
}

/// The setting that keeps k at 0 where a server that has died comes back by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_from_an_append_only_file_gives_nothing() {
    let server = Server::start_with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let traffic = Traffic::start(&server.url(), 3, quota(), OnStoreFailure::Deny).await;
    traffic.until_drained().await;
    for _ in 0..3 {
        server.restart();
        traffic.until_drained().await;
    }
    let traffic = traffic.stop().await;
    let most = traffic.check(&[], |_, _| 0.0);
    println!("3 restarts from a file: {} admitted, at most {most:.1} over the refill", traffic.admitted());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_flush_of_all_keys_gives_one_capacity_and_no_more() {
    let server = Server::start();
    let traffic = Traffic::start(&server.url(), 3, quota(), OnStoreFailure::Deny).await;
    traffic.until_drained().await;
    let mut losses = Vec::new();
    for _ in 0..4 {
        losses.push(timed(|| _ = server.query(&["FLUSHALL"])));
        traffic.until_drained().await;
    }
    let traffic = traffic.stop().await;
    let most = traffic.check(&losses, |_, _| 0.0);
    println!("4 flushes: {} admitted, at most {most:.1} over the refill", traffic.admitted());
    assert!(most > 4.8 * 200.0, "{most}");
}

/// A primary and its replica, which has all of it.
async fn replicated() -> (Server, Server) {
    let primary = Server::start_with(&["--repl-diskless-sync-delay", "0"]);
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()]);
    until("the replica follows", || info(&replica, "master_link_status:") == "up").await;
    (primary, replica)
}

/// Waits until a replica has all that its primary has.
pub(crate) async fn until_replicated(primary: &Server, replica: &Server) {
    let offset = |server, field| info(server, field).parse::<u64>().unwrap();
    let all = offset(primary, "master_repl_offset:");
    until("the replica has all of it", || offset(replica, "slave_repl_offset:") >= all).await;
}

/// A field of what a server says of its replication.
pub(crate) fn info(server: &Server, field: &str) -> String {
    let info = server.query(&["INFO", "replication"]);
    let line = info.text().unwrap().lines().find_map(|line| line.strip_prefix(field));
    line.unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_that_missed_charges_gives_one_capacity_and_no_more() {
    let (primary, replica) = replicated().await;
    let way = Way::to(primary.port()).await;
    // It misses all that comes now.
    replica.query(&["REPLICAOF", "NO", "ONE"]);
    let traffic = Traffic::start(&way.url(), 3, quota(), OnStoreFailure::Deny).await;
    traffic.until_drained().await;
    sleep(Duration::from_millis(500)).await;
    assert!(replica.keys().is_empty());
    let loss = timed(|| way.lead_to(replica.port()));
    traffic.until_drained().await;
    let traffic = traffic.stop().await;
    assert_eq!(replica.keys().len(), 1);
    let most = traffic.check(&[loss], |_, _| 0.0);
    println!("stale replica: {} admitted, at most {most:.1} over the refill", traffic.admitted());
    assert!(most > 1.8 * 200.0, "{most}");
}

/// A partition: the primary goes on, and what it charges does not reach the replica.
#[tokio::test]
async fn a_promoted_replica_gives_again_what_was_not_replicated_and_no_more() {
    let primary = Server::start();
    let proxy = Proxy::start(primary.port()).await;
    let replica = Server::start_with(&["--replicaof", "127.0.0.1", &proxy.port.to_string()]);
    until("the replica follows", || info(&replica, "master_link_status:") == "up").await;
    let quota = Quota::new(1, HOUR).with_capacity(100);
    let take = [charge("partition", BucketKey::global(), quota, 1)];
    let admitted = async |store: RedisStore, most: u64| {
        let mut admitted = 0;
        for _ in 0..most {
            admitted += u64::from(store.acquire(&take).await.unwrap().is_allowed());
        }
        admitted
    };
    let before = admitted(RedisStore::connect(&primary.url()).await.unwrap(), 30).await;
    until_replicated(&primary, &replica).await;
    proxy.set(Mode::Drop).await;
    let unreplicated = admitted(RedisStore::connect(&primary.url()).await.unwrap(), 20).await;
    primary.kill();
    replica.query(&["REPLICAOF", "NO", "ONE"]);
    let after = admitted(RedisStore::connect(&replica.url()).await.unwrap(), 150).await;
    assert_eq!((before, unreplicated), (30, 20));
    assert_eq!(before + unreplicated + after, 100 + unreplicated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_promoted_replica_that_has_every_charge_gives_nothing() {
    let (primary, replica) = replicated().await;
    let way = Way::to(primary.port()).await;
    let traffic = Traffic::start(&way.url(), 3, quota(), OnStoreFailure::Deny).await;
    traffic.until_drained().await;
    // What a planned failover does: writes wait, the replica catches up, and takes over.
    primary.query(&["CLIENT", "PAUSE", "60000", "WRITE"]);
    until_replicated(&primary, &replica).await;
    replica.query(&["REPLICAOF", "NO", "ONE"]);
    way.lead_to(replica.port());
    primary.kill();
    traffic.until_drained().await;
    let traffic = traffic.stop().await;
    // The four clients of an instance may share a call.
    assert!(replica.calls("evalsha") > 60 / 4, "the replica has served");
    let most = traffic.check(&[], |_, _| 0.0);
    println!("planned failover: {} admitted, at most {most:.1} over the refill", traffic.admitted());
}

/// Drains buckets that are full again after so long, lets new keys flood the server until its memory is full, and says how many of the drained ones gave
/// another capacity; how many keys were evicted; and how many of the flood were refused.
async fn flood(policy: &str, full_after: Duration) -> (usize, u64, usize) {
    const DRAINED: u64 = 200;
    let quota = Quota::new(1000, full_after);
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    // New keys that each miss one token, for an hour.
    let new = Quota::from_parts(1000, 1, HOUR);
    let drain = async || {
        let mut allowed = 0;
        for i in 0..DRAINED {
            let take = [charge("drained", BucketKey::id(format!("drained {i}")), quota, 1000)];
            allowed += usize::from(store.acquire(&take).await.is_ok_and(|decision| decision.is_allowed()));
        }
        allowed
    };
    assert_eq!(drain().await, 200);
    let memory = server.query(&["INFO", "memory"]);
    let used = memory.text().unwrap().lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    let full = used.parse::<u64>().unwrap() + 3_000_000;
    server.query(&["CONFIG", "SET", "maxmemory-policy", policy]);
    server.query(&["CONFIG", "SET", "maxmemory", &full.to_string()]);
    let refused = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for task in 0..32 {
        let (store, refused) = (store.clone(), Arc::clone(&refused));
        tasks.spawn(async move {
            for i in 0..800 {
                let take = [charge("flood", BucketKey::id(format!("flood {task} {i}")), new, 1)];
                match store.acquire(&take).await {
                    Ok(decision) => assert!(decision.is_allowed(), "a new key"),
                    Err(error) => {
                        let expected = [RedisErrorKind::Unavailable, RedisErrorKind::BreakerOpen];
                        assert!(expected.contains(&error.kind()), "{error}");
                        refused.fetch_add(1, SeqCst);
                    }
                }
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let stats = server.query(&["INFO", "stats"]);
    let evicted = stats.text().unwrap().lines().find_map(|line| line.strip_prefix("evicted_keys:")).unwrap();
    // A denial writes nothing, and so needs no memory: the probe's answer closes the breaker.
    let probe = [charge("drained", BucketKey::id("drained 0"), quota, 1000)];
    let started = Instant::now();
    while store.health() != Health::Closed {
        assert!(started.elapsed() < LONG, "the breaker does not close");
        let _ = store.acquire(&probe).await;
        sleep(Duration::from_millis(20)).await;
    }
    let lost = drain().await;
    let keyspace = server.query(&["INFO", "keyspace"]);
    let keyspace = keyspace.text().unwrap().lines().find_map(|line| line.strip_prefix("db0:keys=")).unwrap();
    let (keys, rest) = keyspace.split_once(",expires=").unwrap();
    assert_eq!(keys, rest.split(',').next().unwrap(), "each key has a life");
    (lost, evicted.parse().unwrap(), refused.load(SeqCst))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_by_last_use_gives_a_capacity_for_each_drained_bucket_that_it_takes() {
    for policy in ["allkeys-lru", "volatile-lru"] {
        let (lost, evicted, refused) = flood(policy, 1000 * HOUR).await;
        println!("{policy}: {lost} of 200 drained buckets lost, {evicted} keys evicted, {refused} checks refused");
        assert!(lost > 100 && evicted > 1000 && refused == 0, "{lost} {evicted} {refused}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_eviction_every_drained_bucket_stays_and_new_keys_find_an_outage() {
    let (lost, evicted, refused) = flood("noeviction", 1000 * HOUR).await;
    println!("noeviction: {lost} of 200 drained buckets lost, {evicted} keys evicted, {refused} checks refused");
    assert!(lost == 0 && evicted == 0 && refused > 1000, "{lost} {evicted} {refused}");
}

/// It goes by time: what is soonest full goes first, however much of it is missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eviction_by_the_shortest_life_keeps_drained_buckets_but_those_that_are_full_before_the_new_keys() {
    let (lost, evicted, refused) = flood("volatile-ttl", 1000 * HOUR).await;
    println!("volatile-ttl: {lost} of 200 drained buckets lost, {evicted} keys evicted, {refused} checks refused");
    assert!(lost == 0 && evicted > 1000 && refused == 0, "{lost} {evicted} {refused}");
    let (lost, evicted, refused) = flood("volatile-ttl", HOUR / 4).await;
    println!("volatile-ttl: {lost} of 200 drained, fast buckets lost, {evicted} keys evicted");
    assert!(lost > 100 && evicted > 1000 && refused == 0, "{lost} {evicted} {refused}");
}

/// What the instances' own buckets add in a window: their shares of a capacity, and what those refill from the first time
/// that one is asked to the last. Instances times share are 1.
fn local(traffic: &Traffic) -> impl Fn(Instant, Instant) -> f64 {
    let (mut asked, mut answered) = traffic.account.local.lock().unwrap().clone();
    asked.sort();
    answered.sort();
    let quota = traffic.quota;
    move |start, end| {
        let first = asked.get(asked.partition_point(|asked| *asked < start));
        let last = answered[..answered.partition_point(|answered| *answered <= end)].last();
        match (first, last) {
            (Some(first), Some(last)) if first < last => {
                let (tokens, per) = quota.refill();
                quota.capacity() as f64 + (*last - *first).as_secs_f64() * tokens as f64 / per.as_secs_f64()
            }
            _ => 0.0,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_local_an_outage_adds_what_the_shares_hold_and_refill_and_flaps_do_not_fill_them() {
    let server = Server::start();
    let quota = Quota::per_second(10).with_capacity(200);
    let traffic = Traffic::start(&server.url(), 3, quota, OnStoreFailure::Local).await;
    traffic.until_drained().await;
    let outage = async |how: &dyn Fn()| {
        let before = traffic.account.local();
        let loss = timed(how);
        assert!(traffic.account.local() > before, "nobody noticed");
        traffic.until_drained().await;
        loss
    };
    // Frozen, three times: nothing is lost, and the local buckets are full at the first time only.
    for _ in 0..3 {
        outage(&|| {
            server.freeze();
            std::thread::sleep(Duration::from_millis(700));
            server.thaw();
        })
        .await;
    }
    let flaps = traffic.admitted();
    // Restarted empty after a while: a loss, and an outage.
    let loss = outage(&|| {
        server.kill();
        std::thread::sleep(Duration::from_millis(700));
        server.restart();
    })
    .await;
    let traffic = traffic.stop().await;
    let most = traffic.check(&[loss], local(&traffic));
    println!(
        "local: {flaps} admitted after 3 flaps, {} after a restart, at most {most:.1} over the refill",
        traffic.admitted()
    );
    assert!(most > 2.8 * 200.0, "the server's bucket twice, and the shares of one: {most}");
}

/// rate-limit-redis#251, #252: whatever was lost, nothing is charged twice, and nothing is admitted that was not charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_answers_lost_on_the_way_admitted_is_at_most_charged_is_at_most_sent() {
    let server = Server::start();
    let way = Way::to(server.port()).await;
    let quota = Quota::from_parts(10_000, 1, 24 * HOUR);
    let store = RedisStore::connect(&way.url()).await.unwrap();
    let take = [charge("lost", BucketKey::global(), quota, 1)];
    // Makes the script known.
    assert!(store.acquire(&take).await.unwrap().is_allowed());
    way.lose_one_in.store(40, SeqCst);
    let (admitted, lost) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(0)));
    let mut tasks = JoinSet::new();
    for _ in 0..8 {
        let (store, take, admitted, lost) = (store.clone(), take.clone(), Arc::clone(&admitted), Arc::clone(&lost));
        tasks.spawn(async move {
            let mut sent = 0;
            while sent < 120 {
                match store.acquire(&take).await {
                    Ok(decision) => {
                        assert!(decision.is_allowed());
                        admitted.fetch_add(1, SeqCst);
                        sent += 1;
                    }
                    Err(error) if error.kind() == RedisErrorKind::Lost => {
                        lost.fetch_add(1, SeqCst);
                        sent += 1;
                    }
                    Err(error) => {
                        let unsent = [RedisErrorKind::Unreachable, RedisErrorKind::BreakerOpen];
                        assert!(unsent.contains(&error.kind()), "{error}");
                        sleep(Duration::from_millis(5)).await;
                    }
                }
            }
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.unwrap();
    }
    let (admitted, lost) = (admitted.load(SeqCst), lost.load(SeqCst));
    let sent = 1 + 8 * 120;
    assert_eq!(admitted + lost, sent);
    let charged = charged(&server, "lost", quota);
    println!("{admitted} admitted, {charged} charged, {sent} sent, {lost} of them without an answer");
    assert!(admitted <= charged && charged <= sent, "{admitted} {charged} {sent}");
    // Each call that the server ran was a charge, or several; the first was once refused for want of the script.
    assert!(server.calls("evalsha") <= charged, "{} calls", server.calls("evalsha"));
    assert_eq!(server.calls("eval"), 1);
    assert!(lost > 10, "{lost}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_lost_answer_is_one_charge_and_one_command() {
    let server = Server::start();
    let way = Way::to(server.port()).await;
    let quota = Quota::per_day(100);
    let store = RedisStore::connect(&way.url()).await.unwrap();
    let take = [charge("lost", BucketKey::global(), quota, 1)];
    assert!(store.acquire(&take).await.unwrap().is_allowed());
    for round in 0..4 {
        let before = (charged(&server, "lost", quota), server.calls("evalsha"));
        way.lose.store(1, SeqCst);
        let error = timeout(LONG, store.acquire(&take)).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), RedisErrorKind::Lost, "{error}");
        assert_eq!((charged(&server, "lost", quota), server.calls("evalsha")), (before.0 + 1, before.1 + 1));
        // The next is as if nothing had been.
        let decision = timeout(LONG, store.acquire(&take)).await.unwrap().unwrap();
        assert_eq!(decision.remaining(), Some(100 - 3 - 2 * round));
    }
    assert_eq!(server.calls("eval"), 1);
}
