//! Nodes freeze, connections are cut, and nobody is there at the start: the policy for the slots that it concerns, the
//! store for all others, and the store for all as soon as it answers again.

use super::*;
use std::net::{Ipv4Addr, TcpListener};
use tower_token_bucket::{Health, OnStoreFailure, RedisErrorKind};

const QUOTA: Quota = Quota::per_second(1000);

/// A server or a policy answers: what is remembered would hide which.
fn policies(store: &RedisStore) -> Service {
    service(&TokenBucketLayer::new(store.clone().remember_denials(false), limit("outages", QUOTA, 0)))
}

fn each(keys: &[BucketKey]) -> Vec<Vec<BucketKey>> {
    keys.iter().map(|key| vec![*key]).collect()
}

fn health(store: &RedisStore, server: &Server) -> Health {
    let nodes = store.nodes();
    let end = format!(":{}", server.port());
    nodes.iter().find(|(address, _)| address.ends_with(&end)).unwrap_or_else(|| panic!("{nodes:?}")).1
}

/// Waits until `is`, for as long as healing may take.
#[track_caller]
fn soon(what: &str, is: impl AsyncFn() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let started = Instant::now();
        while !is().await {
            assert!(started.elapsed() < HEAL_MAX, "{what}: not within {HEAL_MAX:?} ({caller})");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Three primaries of which one may be gone without harm to the slots of the others, and that nobody replaces.
fn independent() -> Cluster {
    let args = ["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "15000"];
    Cluster::start_with(3, 0, &args)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_frozen_fails_its_own_slots_only_and_heals_by_itself() {
    let cluster = independent();
    let keys = identities(&cluster, "frozen");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let load = Load::start(policies(&store), each(&keys), 600);
    sleep(Duration::from_millis(300)).await;
    cluster.nodes[1].freeze();
    let frozen = load.now();
    sleep(Duration::from_millis(1200)).await;
    assert_ne!(health(&store, &cluster.nodes[1]), Health::Closed);
    assert_eq!(store.health(), health(&store, &cluster.nodes[1]), "the worst of all");
    for well in [0, 2] {
        assert_eq!(health(&store, &cluster.nodes[well]), Health::Closed);
    }
    cluster.nodes[1].thaw();
    let thawed = load.now();
    let healed = load.healed(1, thawed, 30).await;
    let answers = load.end().await;
    println!("frozen {frozen:?}, thawed {thawed:?}, healed {healed:?}; {} by the policy", answers.failed(1));
    assert!(healed < thawed + Duration::from_secs(1), "thawed {thawed:?}, healed {healed:?}");
    answers.check_statuses();
    answers.check_deadline("frozen");
    assert!(answers.failed(1) > 100);
    for who in [0, 2] {
        let (failed, all) = (answers.failed(who), answers.of(who).count());
        assert!(failed * 20 <= all, "{failed} of {all} requests on a node that is well were answered by the policy");
    }
    // A probe that gets no answer ends its connection, which may be what is dead: there are a few.
    let connections = store.connections().unwrap();
    assert!((3..=3 + 6).contains(&connections), "{connections} connections");

    // It comes back while nobody asks: the first request finds it.
    cluster.nodes[1].freeze();
    let service = policies(&store);
    let source = async || {
        let answer = service.clone().oneshot(request(&keys[1..2])).await.unwrap();
        answer.extensions().get::<Decision>().unwrap().source()
    };
    for _ in 0..8 {
        assert_eq!(source().await, Source::Local);
    }
    assert_eq!(health(&store, &cluster.nodes[1]), Health::Open);
    cluster.nodes[1].thaw();
    sleep(Duration::from_millis(600)).await;
    assert_eq!(source().await, Source::Store);

    // The same for one that dies and is started again: it is heard of, and the connection is there before it is asked.
    cluster.nodes[1].kill();
    sleep(Duration::from_millis(50)).await;
    for _ in 0..8 {
        assert_eq!(source().await, Source::Local);
    }
    cluster.nodes[1].restart();
    cluster.settle();
    sleep(Duration::from_millis(600)).await;
    soon("it is found again", async || source().await == Source::Store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_connections_cut_at_once_are_made_anew() {
    let cluster = independent();
    let keys = identities(&cluster, "cut");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let load = Load::start(policies(&store), each(&keys), 600);
    for _ in 0..5 {
        sleep(Duration::from_millis(300)).await;
        for node in &cluster.nodes {
            // Not this one, whose answer would be lost.
            node.query(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        }
    }
    let cut = load.now();
    for who in 0..3 {
        load.healed(who, cut, 20).await;
    }
    let answers = load.end().await;
    let failed: usize = (0..3).map(|who| answers.failed(who)).sum();
    let connections = store.connections().unwrap();
    println!(
        "cut 5 times: {failed} of {} requests answered by the policy, {connections} connections",
        answers.all.len()
    );
    answers.check_statuses();
    answers.check_deadline("cut");
    assert!(failed * 20 <= answers.all.len(), "{failed} of {}", answers.all.len());
    assert!((15..=25).contains(&connections), "{connections}");
    // Cut while it is idle: a loss is heard of, and the first request finds the next connection.
    for node in &cluster.nodes {
        node.query(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    }
    sleep(Duration::from_millis(300)).await;
    for key in &keys {
        store.acquire(&[take("idle", *key, slow(5), 1)]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_not_there_at_the_start_is_found_later() {
    let cluster = independent();
    let keys = identities(&cluster, "late");
    for node in &cluster.nodes {
        node.kill();
    }
    let started = Instant::now();
    let store = RedisStore::cluster(cluster.urls()).await.expect("nodes that are down are no error");
    assert!(started.elapsed() < Duration::from_secs(1));
    let error = store.acquire(&[take("late", keys[0], slow(5), 1)]).await.unwrap_err();
    assert_eq!(error.kind(), RedisErrorKind::Unreachable, "{error}");
    let load = Load::start(policies(&store), each(&keys), 300);
    sleep(Duration::from_millis(500)).await;
    assert!(load.seen().iter().all(|it| it.source == Source::Local));
    for node in &cluster.nodes {
        node.restart();
    }
    let back = load.now();
    cluster.settle();
    let serves = load.now();
    for who in 0..3 {
        let healed = load.healed(who, serves, 20).await;
        println!("back {back:?}, serves {serves:?}, healed {healed:?}");
        assert!(healed < serves + Duration::from_secs(1));
    }
    let answers = load.end().await;
    answers.check_statuses();
    answers.check_deadline("late");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_seed_that_answers_is_enough() {
    let cluster = shared();
    let dead = |_| {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        format!("redis://127.0.0.1:{port}")
    };
    // One that takes connections and never answers.
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let silent = format!("redis://{}", silent.local_addr().unwrap());
    for alive in 0..3 {
        let urls = (0..3).map(dead).chain([cluster.nodes[alive].url()]);
        let store = RedisStore::cluster(urls).await.unwrap();
        for key in identities(cluster, "seed") {
            store.acquire(&[take("seed", key, slow(50), 1)]).await.unwrap();
        }
    }
    let store = RedisStore::cluster([silent, cluster.nodes[0].url()]).await.unwrap();
    soon("the second is asked", async || {
        store.acquire(&[take("seed", BucketKey::global(), slow(50), 1)]).await.is_ok()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_charged_before_a_node_failed_is_given_back() {
    let cluster = independent();
    let keys = identities(&cluster, "given back");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let layer = TokenBucketLayer::new(store.clone(), limit("a", slow(1000), 0)).and(limit("b", slow(1000), 1));
    let service = service(&layer);
    let load = Load::start(service, vec![keys], 300);
    sleep(Duration::from_millis(300)).await;
    cluster.nodes[1].kill();
    sleep(Duration::from_millis(700)).await;
    let answers = load.end().await;
    let (failed, admitted) = (answers.failed(0), answers.admitted(0, Source::Store));
    let left = level(&cluster.nodes[0], "a", identity(&cluster, "given back", 0));
    println!("{admitted} admitted by the store, {failed} answered by the policy, {left} of 1000 left");
    answers.check_statuses();
    answers.check_deadline("given back");
    assert!(failed > 50);
    // Of a request whose deadline has passed, or whose answer was lost, it is not known.
    let unknown = store.failures(RedisErrorKind::Lost) + store.failures(RedisErrorKind::Late);
    let late = answers.all.iter().filter(|it| it.took >= DEADLINE).count() as u64;
    assert!((1000 - left) as u64 <= admitted + unknown + late, "{unknown} unknown, {late} late");
    assert!((1000 - left) as u64 >= admitted);
}

/// As it does for requests on one identity, and what waits leaves with its caller: otherwise each request waits for its
/// deadline, and all that ever waited are charged when the node is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_node_opens_its_breaker_for_requests_on_two_identities_too() {
    let cluster = independent();
    let keys = identities(&cluster, "two frozen");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let layer = TokenBucketLayer::new(store.clone(), limit("a", slow(600_000), 0)).and(limit("b", slow(600_000), 1));
    let service = service(&layer);
    let both = [keys[0], keys[1]];
    assert_eq!(service.clone().oneshot(request(&both)).await.unwrap().status(), 200);
    cluster.nodes[1].freeze();
    let load = Load::start(service, vec![both.to_vec()], 300);
    sleep(Duration::from_millis(1000)).await;
    let answers = load.end().await;
    let health = health(&store, &cluster.nodes[1]);
    let took = answers.all.iter().rev().take(100).map(|it| it.took).max().unwrap();
    cluster.nodes[1].thaw();
    // What was on the wire is carried out: of what waited, nobody waits any more.
    sleep(Duration::from_millis(1000)).await;
    let taken = 600_000 - level(&cluster.nodes[1], "b", keys[1]) - 1;
    println!("{health:?}; the last 100 requests took at most {took:?}; {taken} of {} charged late", answers.all.len());
    assert_ne!(health, Health::Closed, "the last 100 requests took up to {took:?}");
    assert!(taken <= 64, "{taken} tokens were taken after their callers had gone");
}

/// A shadow limit keeps nobody out, also when its node is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_limit_whose_node_is_down_keeps_nobody_out_and_costs_no_token() {
    let cluster = independent();
    let keys = identities(&cluster, "shadow down");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let layer = TokenBucketLayer::new(store.clone(), limit("enforced", slow(100), 0))
        .and(limit("watching", slow(100), 1).shadow())
        .on_store_failure(OnStoreFailure::Deny);
    let service = service(&layer);
    assert_eq!(service.clone().oneshot(request(&keys)).await.unwrap().status(), 200);
    cluster.nodes[1].kill();
    let mut statuses = Vec::new();
    for _ in 0..20 {
        statuses.push(service.clone().oneshot(request(&keys)).await.unwrap().status().as_u16());
    }
    let admitted = 1 + statuses.iter().filter(|status| **status == 200).count() as i64;
    let left = level(&cluster.nodes[0], "enforced", keys[0]);
    assert_eq!(left, 100 - admitted, "{statuses:?}: what was not admitted is not charged");
    assert_eq!(admitted, 21, "{statuses:?}");
}

/// A store outlives the runtime that made it: a static one does, and one of a test.
#[test]
fn a_store_whose_runtime_ends_while_it_looks_at_the_slots_looks_again() {
    let cluster = shared();
    // They take connections and never answer: longer than the first connection is waited for.
    let silent: Vec<_> = (0..2).map(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()).collect();
    let urls = silent.iter().map(|it| format!("redis://{}", it.local_addr().unwrap())).chain([cluster.nodes[0].url()]);
    let first = tokio::runtime::Runtime::new().unwrap();
    let store = first.block_on(RedisStore::cluster(urls)).unwrap();
    first.shutdown_background();
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let charge = [take("runtime", BucketKey::global(), slow(50), 1)];
        let started = Instant::now();
        while !matches!(tokio::time::timeout(DEADLINE, store.acquire(&charge)).await, Ok(Ok(_))) {
            assert!(started.elapsed() < HEAL_MAX, "no other look at the slots");
        }
    });
}
