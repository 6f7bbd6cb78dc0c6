//! `RedisStore` on clusters and behind sentinels: the contract of a store, and what holds when nodes fail and slots move.

mod failover;
mod moves;
mod outages;
mod rights;
mod several;
mod spread;

use std::convert::Infallible;
use std::fmt::Write as _;
use std::future::ready;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Identity, Limit, LimitName, Quota, RedisStore, Source, Store,
    TokenBucketLayer, conformance,
};

use crate::server::Server;
use crate::topology::{Cluster, MASTER, Watched};

const HOUR: Duration = Duration::from_secs(3600);
/// Of the layer, by default.
const DEADLINE: Duration = Duration::from_millis(50);
/// Within this time of a promotion, or of a node's return, the store has to answer again.
const HEAL_MAX: Duration = Duration::from_secs(5);

type Service = BoxCloneSyncService<Request<Full<Bytes>>, Response<Full<Bytes>>, Infallible>;

/// Three primaries that no test harms; each uses keys of its own.
fn shared() -> &'static Cluster {
    static CLUSTER: OnceLock<Cluster> = OnceLock::new();
    // On a busy machine a node may be silent for a while, and none of these tests wants it replaced.
    CLUSTER.get_or_init(|| Cluster::start_with(3, 0, &["--cluster-node-timeout", "15000"]))
}

/// So many tokens, of which none comes back while a test runs.
fn slow(capacity: u64) -> Quota {
    Quota::new(1, HOUR).with_capacity(capacity)
}

fn charge(limit: &str, key: BucketKey, quota: Quota, amount: Amount) -> Charge {
    Charge::new(LimitName::try_new(limit).unwrap(), key, quota, amount)
}

fn take(limit: &str, key: BucketKey, quota: Quota, cost: u64) -> Charge {
    charge(limit, key, quota, Amount::Take(cost))
}

/// The first of these identities that a primary has from the start.
fn identity(cluster: &Cluster, name: &str, primary: usize) -> BucketKey {
    let is_there = |key: &BucketKey| cluster.slots(primary).contains(&cluster.slot(&tag(*key)));
    (0..).map(|i| BucketKey::id(format!("{name} {i}"))).find(is_there).expect("one in three")
}

/// One identity on each primary.
fn identities(cluster: &Cluster, name: &str) -> Vec<BucketKey> {
    (0..cluster.primaries).map(|primary| identity(cluster, name, primary)).collect()
}

/// The hash tag that all keys of an identity have.
fn tag(key: BucketKey) -> String {
    format!("{{{key}}}")
}

fn name_of(limit: &str, key: BucketKey) -> String {
    format!("tb:v1:{}:{limit}", tag(key))
}

/// The level of a bucket of a [`slow`] quota, in whole tokens.
fn level(server: &Server, limit: &str, key: BucketKey) -> i64 {
    let value = server.query(&["GET", &name_of(limit, key)]);
    let units: i64 = value.text().expect("a bucket").rsplit(':').next().unwrap().parse().unwrap();
    units.div_euclid(HOUR.as_micros() as i64)
}

fn owner(cluster: &Cluster, key: BucketKey) -> &Server {
    cluster.owner(cluster.slot(&tag(key))).expect("the slot has an owner")
}

/// The identities of a request, by limit.
#[derive(Clone)]
struct Who(Vec<BucketKey>);

fn request(keys: &[BucketKey]) -> Request<Full<Bytes>> {
    let mut request = Request::new(Full::default());
    request.extensions_mut().insert(Who(keys.to_vec()));
    request
}

/// A limit on the `i`-th identity of each request.
fn limit(name: &str, quota: Quota, i: usize) -> Limit {
    Limit::new(name, quota).key_by(Identity::of(move |who: &Who| who.0[i]))
}

fn service(layer: &TokenBucketLayer<RedisStore>) -> Service {
    let inner = service_fn(|_: Request<Full<Bytes>>| ready(Ok(Response::new(Full::default()))));
    BoxCloneSyncService::new(layer.layer(inner))
}

/// One answer to a client.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// Which of the identities asked.
    who: usize,
    /// When it asked, counted from the start of the load.
    at: Duration,
    took: Duration,
    status: u16,
    source: Source,
}

/// Requests at a steady rate, each on one of some identities in turn, whether earlier ones are answered or not.
struct Load {
    started: Instant,
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Seen>>>,
    /// By how much timers were late: what a busy machine adds to any time that is measured here.
    late: Arc<Mutex<Vec<Duration>>>,
    task: JoinHandle<()>,
}

impl Load {
    fn start(service: Service, identities: Vec<Vec<BucketKey>>, per_second: u32) -> Self {
        let (started, stop) = (Instant::now(), Arc::<AtomicBool>::default());
        let (seen, late) = (Arc::<Mutex<Vec<Seen>>>::default(), Arc::<Mutex<Vec<Duration>>>::default());
        let (stopped, all, all_late) = (Arc::clone(&stop), Arc::clone(&seen), Arc::clone(&late));
        let task = tokio::spawn(async move {
            let mut ticks = interval(Duration::from_secs(1) / per_second);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut requests = JoinSet::new();
            for who in (0..identities.len()).cycle() {
                ticks.tick().await;
                if stopped.load(Relaxed) {
                    break;
                }
                while let Some(ended) = requests.try_join_next() {
                    ended.expect("no request panics");
                }
                let (service, request, seen) = (service.clone(), request(&identities[who]), Arc::clone(&all));
                requests.spawn(async move {
                    let asked = Instant::now();
                    let answer = service.oneshot(request).await.unwrap();
                    let took = asked.elapsed();
                    let source = answer.extensions().get::<Decision>().expect("a decision").source();
                    let status = answer.status().as_u16();
                    seen.lock().unwrap().push(Seen { who, at: asked - started, took, status, source });
                });
                let late = Arc::clone(&all_late);
                requests.spawn(async move {
                    let before = Instant::now();
                    sleep(DEADLINE).await;
                    late.lock().unwrap().push(before.elapsed().saturating_sub(DEADLINE));
                });
            }
            requests.join_all().await;
        });
        Self { started, stop, seen, late, task }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// Waits until the last `n` answers to one identity, of requests that were sent after a time, are the store's.
    #[track_caller]
    fn healed(&self, who: usize, after: Duration, n: usize) -> impl Future<Output = Duration> {
        let caller = std::panic::Location::caller();
        async move {
            loop {
                let seen: Vec<_> = self.seen().into_iter().filter(|it| it.who == who && it.at >= after).collect();
                let last = seen.iter().rev().take_while(|it| it.source == Source::Store).count();
                if last >= n {
                    return seen[seen.len() - last].at;
                }
                assert!(self.now() < after + HEAL_MAX + Duration::from_secs(2), "does not heal ({caller})");
                sleep(Duration::from_millis(10)).await;
            }
        }
    }

    /// Stops, and returns all answers.
    async fn end(self) -> Answers {
        self.stop.store(true, Relaxed);
        self.task.await.expect("no request panics");
        let mut late = std::mem::take(&mut *self.late.lock().unwrap());
        late.sort();
        Answers { all: self.seen.lock().unwrap().clone(), late }
    }
}

struct Answers {
    all: Vec<Seen>,
    late: Vec<Duration>,
}

impl Answers {
    fn of(&self, who: usize) -> impl Iterator<Item = &Seen> {
        self.all.iter().filter(move |it| it.who == who)
    }

    /// How many requests of an identity were admitted by one source.
    fn admitted(&self, who: usize, source: Source) -> u64 {
        self.of(who).filter(|it| it.status == 200 && it.source == source).count() as u64
    }

    /// Those that the policy answered.
    fn failed(&self, who: usize) -> usize {
        self.of(who).filter(|it| it.source != Source::Store).count()
    }

    /// Rule 2 with `k` losses of state and the local term, for each identity.
    fn check_rule_2(&self, quota: Quota, k: u64, what: &str) {
        let first = self.all.iter().map(|it| it.at).min().unwrap();
        let last = self.all.iter().map(|it| it.at + it.took).max().unwrap();
        let rate = quota.refill().0 as f64 / quota.refill().1.as_secs_f64();
        let refill = (rate * (last - first).as_secs_f64()).ceil() as u64;
        for who in 0..=self.all.iter().map(|it| it.who).max().unwrap() {
            let (store, local) = (self.admitted(who, Source::Store), self.admitted(who, Source::Local));
            println!(
                "{what}: identity {who}: {} requests, {store} admitted by the store, {local} locally; refill {refill}",
                self.of(who).count()
            );
            assert!(store <= (1 + k) * quota.capacity() + refill, "{what}: {store} admitted by the store");
            assert!(local <= quota.capacity() + refill, "{what}: {local} admitted locally");
        }
    }

    /// Admitted or denied, and nothing else.
    fn check_statuses(&self) {
        for seen in &self.all {
            assert!(matches!(seen.status, 200 | 429), "{seen:?}");
        }
    }

    /// The deadline is kept by 99 of 100, but for what timers were late by themselves.
    fn check_deadline(&self, what: &str) {
        let mut took: Vec<_> = self.all.iter().map(|it| it.took).collect();
        took.sort();
        let (p99, late) = (took[took.len() * 99 / 100], self.late[self.late.len() * 99 / 100]);
        println!("{what}: {} requests, 99 % within {p99:?}; timers late by {late:?}", took.len());
        assert!(p99 <= DEADLINE + Duration::from_millis(20) + late, "{what}: 99 % within {p99:?} only");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_the_contract_of_a_store() {
    // One node is enough to find the others.
    conformance::check(&RedisStore::cluster(&shared().urls()[..1]).await.unwrap()).await;
    conformance::check(&RedisStore::cluster(shared().urls()).await.unwrap().prefix("other").secret("s")).await;
}

/// One of the processes of the accounts below; by itself it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn account_process() {
    let Ok(job) = std::env::var("TOKEN_BUCKET_TOPOLOGY") else { return };
    let mut words = job.split(' ');
    let store = match words.next() {
        Some("cluster") => RedisStore::cluster(words).await.unwrap(),
        _ => RedisStore::sentinel(words, MASTER).await.unwrap(),
    };
    let mut line = "admitted".to_owned();
    for tokens in admit(&store).await {
        let _ = write!(line, " {tokens}");
    }
    println!("{line}");
}

const ACCOUNTS: [(&str, u64); 4] = [("alpha", 400), ("beta", 900), ("gamma", 7), ("delta", 100_000)];

/// 16 tasks take from each account; what each of them has admitted.
async fn admit(store: &RedisStore) -> [u64; ACCOUNTS.len()] {
    let mut tasks = JoinSet::new();
    for task in 0..16u64 {
        let store = store.clone();
        tasks.spawn(async move {
            let mut admitted = [0; ACCOUNTS.len()];
            for call in 0..40 {
                let which = (task + call) as usize % ACCOUNTS.len();
                let (name, capacity) = ACCOUNTS[which];
                let cost = [1, 1, 2, 3, 7][(task + call * 3) as usize % 5];
                let decision = store.acquire(&[take("account", BucketKey::id(name), slow(capacity), cost)]).await;
                if decision.expect("the store answers").is_allowed() {
                    admitted[which] += cost;
                }
            }
            admitted
        });
    }
    let mut all = [0; ACCOUNTS.len()];
    for admitted in tasks.join_all().await {
        for (all, admitted) in all.iter_mut().zip(admitted) {
            *all += admitted;
        }
    }
    all
}

/// Three processes of 16 tasks each: what they have admitted is what is gone, to the token.
async fn check_account(job: &str, store: &RedisStore, server: impl Fn(BucketKey) -> &'static Server) {
    let spawn = |_| {
        Command::new(std::env::current_exe().unwrap())
            .args(["topologies::account_process", "--exact", "--nocapture"])
            .env("TOKEN_BUCKET_TOPOLOGY", job)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let others: Vec<_> = (0..2).map(spawn).collect();
    let mut admitted = admit(store).await;
    for other in others {
        let output = other.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let numbers = text.lines().find_map(|line| line.split_once("admitted ")).expect(&text).1;
        for (all, number) in admitted.iter_mut().zip(numbers.split(' ')) {
            *all += number.parse::<u64>().unwrap();
        }
    }
    for ((name, capacity), mut admitted) in ACCOUNTS.into_iter().zip(admitted) {
        let charge = [take("account", BucketKey::id(name), slow(capacity), 1)];
        let left = level(server(BucketKey::id(name)), "account", BucketKey::id(name));
        assert_eq!(admitted as i64 + left, capacity as i64, "{name}: {admitted} admitted, {left} left");
        if capacity < 1000 {
            while store.acquire(&charge).await.unwrap().is_allowed() {
                admitted += 1;
            }
            assert_eq!(admitted, capacity, "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_token_of_a_cluster_is_accounted_for() {
    let store = RedisStore::cluster(shared().urls()).await.unwrap();
    let job = format!("cluster {}", shared().urls().join(" "));
    check_account(&job, &store, |key| owner(shared(), key)).await;
    assert_eq!(store.connections(), Some(3), "one connection to each node");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_primary_that_sentinels_know_keeps_the_contract_of_a_store_and_every_account() {
    static WATCHED: OnceLock<Watched> = OnceLock::new();
    let watched = WATCHED.get_or_init(Watched::start);
    let store = RedisStore::sentinel(watched.urls(), MASTER).await.unwrap();
    conformance::check(&store).await;
    let job = format!("sentinel {}", watched.urls().join(" "));
    check_account(&job, &store, |_| watched.primary().expect("there is one")).await;
    assert_eq!(store.connections(), Some(1));

    // A name that they do not know.
    let store = RedisStore::sentinel(watched.urls(), "others").await.unwrap();
    let error = store.acquire(&[take("a", BucketKey::global(), slow(1), 1)]).await.unwrap_err().to_string();
    assert!(error.contains("do not know the name"), "{error}");
}
