//! A primary dies under load: only the policy's answers meanwhile, and the store's again without a restart.

use super::*;
use crate::topology::until;

const QUOTA: Quota = Quota::per_second(100).with_capacity(50);

/// Waits in a thread of its own for what servers do by themselves.
async fn until_then(what: &'static str, is: impl Fn() -> bool + Send + 'static) {
    tokio::task::spawn_blocking(move || until(what, is)).await.unwrap();
}

/// A server or a policy answers: what is remembered would hide which.
fn policies(store: RedisStore) -> Service {
    service(&TokenBucketLayer::new(store.remember_denials(false), limit("failover", QUOTA, 0)))
}

async fn ask(service: &Service, key: BucketKey) -> Source {
    let answer = service.clone().oneshot(request(&[key])).await.unwrap();
    assert!(matches!(answer.status().as_u16(), 200 | 429));
    answer.extensions().get::<Decision>().unwrap().source()
}

/// Asks until the store answers, and returns how many answers were the policy's.
async fn ask_until_healed(service: &Service, key: BucketKey) -> usize {
    let started = Instant::now();
    for failed in 0.. {
        if ask(service, key).await == Source::Store {
            return failed;
        }
        assert!(started.elapsed() < HEAL_MAX, "does not heal");
        sleep(Duration::from_millis(10)).await;
    }
    unreachable!()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_a_primary_of_a_cluster_dies_its_replica_is_found_and_other_slots_go_on() {
    let cluster = Arc::new(Cluster::start_with(3, 1, &["--cluster-require-full-coverage", "no"]));
    let keys = identities(&cluster, "failover");
    let idle = policies(RedisStore::cluster(cluster.urls()).await.unwrap());
    for key in &keys {
        assert_eq!(ask_until_healed(&idle, *key).await, 0);
    }
    let store = RedisStore::cluster(&cluster.urls()[..1]).await.unwrap();
    let load = Load::start(policies(store.clone()), keys.iter().map(|key| vec![*key]).collect(), 500);
    sleep(Duration::from_millis(500)).await;

    cluster.nodes[0].kill();
    let killed = load.now();
    let (servers, slot) = (Arc::clone(&cluster), cluster.slot(&tag(keys[0])));
    until_then("the replica is promoted", move || {
        servers.nodes[3..].iter().any(|it| crate::topology::info(it, "role:") == "master")
            && servers.owner(slot).is_some()
    })
    .await;
    let promoted = load.now();
    let healed = load.healed(0, killed, 30).await;
    assert!(healed < promoted + HEAL_MAX, "promoted after {promoted:?}, healed after {healed:?}");
    sleep(Duration::from_millis(300)).await;
    let answers = load.end().await;

    println!(
        "killed {killed:?}, promoted {promoted:?}, healed {healed:?}, {} connections",
        store.connections().unwrap()
    );
    answers.check_statuses();
    answers.check_rule_2(QUOTA, 1, "cluster");
    answers.check_deadline("cluster");
    assert!(answers.failed(0) > 0, "the policy answered for the slots of the dead node");
    for who in 1..3 {
        let (failed, all) = (answers.failed(who), answers.of(who).count());
        assert!(failed * 20 <= all, "{failed} of {all} requests on a node that is well were answered by the policy");
    }
    // One that was idle all the time: the first requests may find the dead node.
    for key in &keys {
        println!("idle meanwhile: {} answers by the policy", ask_until_healed(&idle, *key).await);
    }

    // The dead one comes back, as a replica, and is not asked.
    cluster.nodes[0].restart();
    let servers = Arc::clone(&cluster);
    until_then("it comes back as a replica", move || {
        crate::topology::info(&servers.nodes[0], "master_link_status:") == "up"
    })
    .await;
    let after = policies(RedisStore::cluster(cluster.urls()).await.unwrap());
    assert_eq!(ask_until_healed(&after, keys[0]).await, 0);
    assert_eq!(cluster.nodes[0].calls("evalsha"), 0);
}

/// What is wrong with the sentinels while the primary dies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lost {
    Killed,
    Frozen,
}

async fn primary_dies(lost: Lost) {
    let watched = Arc::new(Watched::start());
    let key = BucketKey::id("failover");
    let idle = policies(RedisStore::sentinel(watched.urls(), MASTER).await.unwrap());
    assert_eq!(ask_until_healed(&idle, key).await, 0);
    let store = RedisStore::sentinel(watched.urls(), MASTER).await.unwrap();
    let load = Load::start(policies(store.clone()), vec![vec![key]], 500);
    sleep(Duration::from_millis(300)).await;
    match lost {
        Lost::Killed => watched.sentinels[0].kill(),
        Lost::Frozen => watched.sentinels[0].freeze(),
    }
    sleep(Duration::from_millis(200)).await;
    assert!(load.seen().iter().all(|it| it.status != 503));

    watched.servers[0].kill();
    let killed = load.now();
    let servers = Arc::clone(&watched);
    until_then("a replica is promoted", move || servers.primary().is_some()).await;
    let promoted = load.now();
    let healed = load.healed(0, killed, 50).await;
    assert!(healed < promoted + HEAL_MAX, "promoted after {promoted:?}, healed after {healed:?}");
    sleep(Duration::from_millis(200)).await;
    let answers = load.end().await;
    let attempts = store.connections().unwrap();
    println!("{lost:?}: killed {killed:?}, promoted {promoted:?}, healed {healed:?}, {attempts} attempts");
    answers.check_statuses();
    answers.check_rule_2(QUOTA, 1, "sentinel");
    answers.check_deadline("sentinel");
    println!("idle meanwhile: {} answers by the policy", ask_until_healed(&idle, key).await);

    if lost == Lost::Frozen {
        watched.sentinels[0].thaw();
        // The old primary is back as a replica of the new one, and one that has missed everything takes it for the
        // primary, until the others tell it better.
        let primary = watched.primary().unwrap().port().to_string();
        watched.servers[0].restart();
        watched.servers[0].query(&["REPLICAOF", "127.0.0.1", &primary]);
        let stale = Server::start_sentinel(&crate::topology::monitor(watched.servers[0].port(), ""));
        let misled = policies(RedisStore::sentinel([stale.url()], MASTER).await.unwrap());
        println!("misled: {} answers by the policy", ask_until_healed(&misled, key).await);
        let stale = Server::start_sentinel(&crate::topology::monitor(watched.servers[0].port(), ""));
        let urls = watched.urls().into_iter().chain([stale.url()]);
        let all = policies(RedisStore::sentinel(urls, MASTER).await.unwrap());
        assert_eq!(ask_until_healed(&all, key).await, 0, "most sentinels know better");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_primary_dies_the_sentinels_that_are_left_tell_the_next() {
    primary_dies(Lost::Killed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_is_frozen_or_gives_an_old_address_does_not_keep_the_store_from_the_primary() {
    primary_dies(Lost::Frozen).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_becomes_a_replica_is_left() {
    let watched = Arc::new(Watched::start());
    let key = BucketKey::id("switch");
    let store = RedisStore::sentinel(watched.urls(), MASTER).await.unwrap();
    let load = Load::start(policies(store.clone()), vec![vec![key]], 500);
    sleep(Duration::from_millis(300)).await;
    let before = load.now();
    watched.sentinels[0].query(&["SENTINEL", "FAILOVER", MASTER]);
    let old = watched.servers[0].port().to_string();
    let servers = Arc::clone(&watched);
    until_then("the sentinels know another", move || {
        let told = |it: &Server| crate::topology::info(it, "master0:");
        servers.sentinels.iter().all(|it| !told(it).contains(&format!(":{old},")))
    })
    .await;
    // They make it a replica after 10 s. No connection is lost by that, as it would be if they did it.
    let others = || watched.servers[1..].iter();
    let primary = others().find(|it| crate::topology::info(it, "role:") == "master").unwrap().port().to_string();
    watched.servers[0].query(&["REPLICAOF", "127.0.0.1", &primary]);
    let switched = load.now();
    let healed = load.healed(0, switched, 50).await;
    assert!(healed < switched + HEAL_MAX, "switched after {switched:?}, healed after {healed:?}");
    let answers = load.end().await;
    println!("began {before:?}, switched {switched:?}, healed {healed:?}, {} by the policy", answers.failed(0));
    answers.check_statuses();
    answers.check_rule_2(QUOTA, 1, "switch");
}

/// As above, and the connections to the old one stay open: nothing but silence tells that it is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_hangs_is_left_for_the_one_that_the_sentinels_promote() {
    let watched = Arc::new(Watched::start());
    let key = BucketKey::id("hangs");
    let store = RedisStore::sentinel(watched.urls(), MASTER).await.unwrap();
    let load = Load::start(policies(store.clone()), vec![vec![key]], 500);
    sleep(Duration::from_millis(300)).await;
    watched.servers[0].freeze();
    let frozen = load.now();
    let servers = Arc::clone(&watched);
    until_then("a replica is promoted", move || {
        servers.servers[1..].iter().any(|it| crate::topology::info(it, "role:") == "master")
    })
    .await;
    let promoted = load.now();
    let healed = load.healed(0, frozen, 50).await;
    // Earlier than a connection is given up for its silence: the breaker has the sentinels asked.
    assert!(healed < frozen + Duration::from_secs(5), "promoted after {promoted:?}, healed after {healed:?}");
    // The old one wakes up, and still takes itself for the primary.
    watched.servers[0].thaw();
    // Its connections are closed when it is made a replica.
    let calls = || crate::topology::info(&watched.servers[0], "cmdstat_evalsha:calls=");
    let before = calls();
    sleep(Duration::from_millis(300)).await;
    assert_eq!(calls(), before, "nobody asks it");
    let answers = load.end().await;
    println!("frozen {frozen:?}, promoted {promoted:?}, healed {healed:?}, {} attempts", store.connections().unwrap());
    answers.check_statuses();
    answers.check_rule_2(QUOTA, 1, "hangs");
    answers.check_deadline("hangs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_of_a_cluster_that_hangs_is_left_for_its_replica() {
    // Without the slots of one node, none is served: the policy answers for all until the replica is there.
    let cluster = Arc::new(Cluster::start(3, 1));
    let keys = identities(&cluster, "hangs");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let load = Load::start(policies(store.clone()), keys.iter().map(|key| vec![*key]).collect(), 500);
    sleep(Duration::from_millis(300)).await;
    cluster.nodes[2].freeze();
    let frozen = load.now();
    let servers = Arc::clone(&cluster);
    until_then("the replica is promoted", move || crate::topology::info(&servers.nodes[5], "role:") == "master").await;
    let promoted = load.now();
    let mut healed = Duration::ZERO;
    for who in 0..3 {
        healed = healed.max(load.healed(who, promoted, 30).await);
    }
    assert!(healed < promoted + HEAL_MAX, "promoted after {promoted:?}, healed after {healed:?}");
    cluster.nodes[2].thaw();
    sleep(Duration::from_millis(300)).await;
    let answers = load.end().await;
    println!("frozen {frozen:?}, promoted {promoted:?}, healed {healed:?}");
    answers.check_statuses();
    answers.check_rule_2(QUOTA, 1, "cluster hangs");
    answers.check_deadline("cluster hangs");
}
