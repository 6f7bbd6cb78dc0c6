//! Slots move, and scripts are flushed, while clients ask: no charge is lost or made twice, and no error is seen.

use super::*;
use tower_token_bucket::{Health, RedisErrorKind};

/// 64 tasks that take one token at a time, until they are told to stop.
struct Hammer {
    stop: Arc<AtomicBool>,
    tasks: JoinSet<(u64, u64)>,
}

impl Hammer {
    fn start(store: &RedisStore, charges: &[Charge]) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let mut tasks = JoinSet::new();
        for _ in 0..64 {
            let (store, charges, stop) = (store.clone(), charges.to_vec(), Arc::clone(&stop));
            tasks.spawn(async move {
                let (mut admitted, mut failed) = (0, 0);
                while !stop.load(Relaxed) {
                    match store.acquire(&charges).await {
                        Ok(decision) => {
                            assert!(decision.is_allowed(), "there are enough");
                            admitted += 1;
                        }
                        // The answer proves that nothing ran.
                        Err(error) => {
                            let kind = error.kind();
                            assert!(
                                matches!(kind, RedisErrorKind::Unavailable | RedisErrorKind::BreakerOpen),
                                "{error}"
                            );
                            failed += 1;
                            sleep(Duration::from_millis(1)).await;
                        }
                    }
                }
                (admitted, failed)
            });
        }
        Self { stop, tasks }
    }

    /// How many calls were admitted, and how many failed.
    async fn end(self) -> (u64, u64) {
        self.stop.store(true, Relaxed);
        let all = self.tasks.join_all().await;
        all.into_iter().fold((0, 0), |sum, it| (sum.0 + it.0, sum.1 + it.1))
    }
}

/// More than can be taken meanwhile.
const ENOUGH: u64 = 600_000;
const A_MOMENT: Duration = Duration::from_millis(60);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moves_under_load_costs_no_token_and_no_answer() {
    let cluster = shared();
    let quota = slow(ENOUGH);
    let key = identity(cluster, "moves", 0);
    let slot = cluster.slot(&tag(key));
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let (moved, asked, asking) = (cluster.errors("MOVED"), cluster.errors("ASK"), cluster.calls("asking"));
    let hammer = Hammer::start(&store, &[take("moves", key, quota, 1)]);
    for (from, to) in [(0, 1), (1, 2), (2, 1), (1, 0), (0, 2), (2, 0)] {
        sleep(A_MOMENT).await;
        cluster.begin_move(slot, from, to);
        sleep(A_MOMENT / 4).await;
        cluster.move_keys(slot, from, to);
        sleep(A_MOMENT).await;
        cluster.end_move(slot, from, to);
    }
    sleep(A_MOMENT).await;
    let (admitted, failed) = hammer.end().await;
    let left = level(&cluster.nodes[0], "moves", key);
    let (moved, asked) = (cluster.errors("MOVED") - moved, cluster.errors("ASK") - asked);
    let asking = cluster.calls("asking") - asking;
    println!("{admitted} admitted in 6 moves; MOVED {moved}, ASK {asked}, ASKING {asking}, failed {failed}");
    assert_eq!(failed, 0);
    assert_eq!(admitted + left as u64, quota.capacity());
    assert!(moved >= 6 && asked >= 6 && asking >= asked, "each move was seen");
    assert_eq!(store.failures(RedisErrorKind::Unavailable), 0);
}

/// While one of two keys has moved neither node can ask both: then the policy may answer, and nothing is charged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_limits_in_a_slot_that_moves_are_charged_together_or_not_at_all() {
    let cluster = shared();
    let quota = slow(ENOUGH);
    let key = identity(cluster, "two moves", 0);
    let slot = cluster.slot(&tag(key));
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let try_again = cluster.errors("TRYAGAIN");
    let hammer = Hammer::start(&store, &[take("moves-a", key, quota, 1), take("moves-b", key, quota, 1)]);
    for (from, to) in [(0, 1), (1, 2), (2, 0)] {
        sleep(A_MOMENT).await;
        cluster.begin_move(slot, from, to);
        sleep(A_MOMENT / 4).await;
        cluster.move_key(&name_of("moves-a", key), from, to);
        sleep(A_MOMENT).await;
        cluster.end_move(slot, from, to);
    }
    sleep(A_MOMENT).await;
    let (admitted, failed) = hammer.end().await;
    let try_again = cluster.errors("TRYAGAIN") - try_again;
    println!("{admitted} admitted in 3 moves; TRYAGAIN {try_again}, {failed} calls failed");
    for name in ["moves-a", "moves-b"] {
        assert_eq!(admitted + level(&cluster.nodes[0], name, key) as u64, quota.capacity(), "{name}");
    }
    assert!(try_again > 0);
    assert!(store.nodes().iter().all(|(_, health)| *health == Health::Closed), "{:?}", store.nodes());
}

/// A client that asked nothing meanwhile still knows the old owner: one more trip, and no error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_moved_while_the_client_was_idle_is_followed_at_once() {
    let cluster = shared();
    let quota = slow(ENOUGH);
    let key = identity(cluster, "idle", 1);
    let slot = cluster.slot(&tag(key));
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let charge = [take("idle", key, quota, 1)];
    for (i, (from, to)) in [(1, 2), (2, 0), (0, 1)].into_iter().enumerate() {
        store.acquire(&charge).await.unwrap();
        cluster.begin_move(slot, from, to);
        cluster.end_move(slot, from, to);
        sleep(Duration::from_millis(20)).await;
        store.acquire(&charge).await.unwrap();
        assert_eq!(level(&cluster.nodes[to], "idle", key), (ENOUGH - 2 * (i as u64 + 1)) as i64);
    }
}

/// rate-limit-redis#71. redis-rs by itself loads a script on all primaries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_are_flushed_on_all_nodes_are_sent_again_to_the_node_that_needs_them() {
    let cluster = Cluster::start(3, 0);
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let keys = identities(&cluster, "flush");
    let quota = slow(ENOUGH);
    // The first alone: the other nodes are not sent what they do not need.
    store.acquire(&[take("flush", keys[0], quota, 1)]).await.unwrap();
    let evals: Vec<_> = cluster.nodes.iter().map(|node| node.calls("eval")).collect();
    assert_eq!(evals, [1, 0, 0]);
    for node in &cluster.nodes {
        node.query(&["CONFIG", "RESETSTAT"]);
    }

    let hammers: Vec<_> = keys.iter().map(|key| Hammer::start(&store, &[take("flush", *key, quota, 1)])).collect();
    for _ in 0..8 {
        sleep(A_MOMENT / 2).await;
        for node in &cluster.nodes {
            node.query(&["SCRIPT", "FLUSH"]);
        }
    }
    sleep(A_MOMENT / 2).await;
    for (i, hammer) in hammers.into_iter().enumerate() {
        let (admitted, failed) = hammer.end().await;
        let taken = quota.capacity() - level(&cluster.nodes[i], "flush", keys[i]) as u64;
        let node = &cluster.nodes[i];
        let (evals, calls, unknown) = (node.calls("eval"), node.calls("evalsha"), cluster.errors("NOSCRIPT"));
        println!("node {i}: {admitted} admitted, {calls} EVALSHA, {evals} EVAL; NOSCRIPT {unknown} on all");
        assert_eq!((failed, taken), (0, admitted + u64::from(i == 0)));
        assert!(evals >= 8, "each flush was met");
        // Each call is one EVALSHA, and one EVAL where the script was gone: 64 at a time meet a flush at most.
        assert!(calls <= admitted);
        assert!(evals <= 9 * 64, "{evals}");
    }
    assert_eq!(cluster.calls("script|load"), 0);
    assert_eq!(cluster.calls("eval"), cluster.errors("NOSCRIPT"), "one EVAL for each NOSCRIPT");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_that_follows_a_slot_in_vain_is_counted_as_a_failure() {
    let cluster = shared();
    let key = identity(cluster, "counted", 0);
    let slot = cluster.slot(&tag(key));
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let both = [take("a", key, slow(50), 1), take("b", key, slow(50), 1)];
    store.acquire(&both).await.unwrap();
    cluster.begin_move(slot, 0, 1);
    cluster.move_key(&name_of("a", key), 0, 1);
    let error = store.acquire(&both).await.unwrap_err();
    cluster.end_move(slot, 0, 1);
    cluster.begin_move(slot, 1, 0);
    cluster.end_move(slot, 1, 0);
    assert_eq!(error.kind(), RedisErrorKind::Unavailable, "{error}");
    assert_eq!(store.failures(RedisErrorKind::Unavailable), 1, "{error}");
}
