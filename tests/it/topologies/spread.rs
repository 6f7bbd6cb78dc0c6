//! What a cluster is for: identities spread over its primaries, and so does the work.

use tower_token_bucket::redis::Script;

use super::*;
use crate::server::{Value, encode};

const SCRIPT: &str = include_str!("../../../lua/token_bucket.lua");
const IDENTITIES: usize = 10_000;

fn client(i: usize) -> BucketKey {
    BucketKey::id(format!("client {i}"))
}

/// Asks once for each identity, 64 at a time.
async fn ask_all(store: &RedisStore) {
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let store = store.clone();
        tasks.spawn(async move {
            for i in (task..IDENTITIES).step_by(64) {
                assert!(store.acquire(&[take("spread", client(i), slow(9), 1)]).await.unwrap().is_allowed());
            }
        });
    }
    tasks.join_all().await;
}

/// The CPU time that a server needs for one check on each key that it has, 64 at a time: the least of a few runs, since
/// others share the machine. The client is not the bottleneck, as it is above.
fn cpu(server: &Server) -> Duration {
    let hash = Script::new(SCRIPT).get_hash().to_owned();
    let (mut connection, mut least, keys) = (server.connect(), Duration::MAX, server.keys());
    for _ in 0..5 {
        let before = server.cpu();
        for some in keys.chunks(64) {
            let mut commands = Vec::new();
            for key in some {
                let quota = ":9:1:3600000000:";
                encode(&mut commands, &["EVALSHA", &hash, "1", key, "take", "3600000000", quota, "32400000000", "1"]);
            }
            connection.send(&commands).unwrap();
            for _ in some {
                assert!(matches!(connection.receive().unwrap(), Value::Int(_)));
            }
        }
        least = least.min(server.cpu() - before);
    }
    least
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identities_and_their_checks_spread_evenly_over_the_primaries() {
    let cluster = Cluster::start(3, 0);
    let single = Server::start();
    ask_all(&RedisStore::connect(&single.url()).await.unwrap()).await;
    ask_all(&RedisStore::cluster(cluster.urls()).await.unwrap()).await;
    let keys: Vec<_> = cluster.nodes.iter().map(|node| node.query(&["DBSIZE"]).int().unwrap() as usize).collect();
    let calls: Vec<_> = cluster.nodes.iter().map(|node| node.calls("evalsha") as usize).collect();
    println!("{IDENTITIES} identities: keys {keys:?}, EVALSHA {calls:?}");
    assert_eq!(keys.iter().sum::<usize>(), IDENTITIES);
    for (keys, calls) in keys.iter().zip(&calls) {
        assert!(keys.abs_diff(IDENTITIES / 3) < IDENTITIES / 50, "{keys} keys");
        // Few share a slot, and so may share a call.
        assert!((keys * 19 / 20..=*keys).contains(calls), "one call for each, at the node that has the key: {calls}");
    }
    assert_eq!(cluster.errors("MOVED"), 0);

    let (of_one, of_each) = (cpu(&single), cluster.nodes.iter().map(cpu).collect::<Vec<_>>());
    let ratio = of_one.as_secs_f64() / of_each.iter().max().unwrap().as_secs_f64();
    println!("their checks take {of_one:?} of one server and {of_each:?} of three: {ratio:.2} times as many decisions");
}
