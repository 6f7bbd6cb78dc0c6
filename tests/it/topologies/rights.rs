//! Passwords and the least rights, on clusters and behind sentinels: what is missing is said clearly, and no secret is.

use super::*;
use crate::redis_script::RIGHTS;
use crate::server::version;
use tower_token_bucket::{RedisError, RedisErrorKind};

/// What a client of a cluster needs beside the rights of every client.
const CLUSTER_RIGHTS: &str = "+cluster|slots +asking";
/// What a client of a sentinel that knows users needs there; at the servers it needs the rights of every client.
const SENTINEL_RIGHTS: &str = "-@all +sentinel|get-master-addr-by-name";
const SECRET: &str = "canary-password";

fn set_user(server: &Server, user: &str, rights: &str) {
    let line = format!("ACL SETUSER {user} reset on >{SECRET} {rights}");
    server.query(&line.split(' ').collect::<Vec<_>>());
}

fn with(credentials: &str, servers: &[Server]) -> Vec<String> {
    servers.iter().map(|server| format!("redis://{credentials}@127.0.0.1:{}", server.port())).collect()
}

/// The error of a store that cannot work, in which there is no secret.
async fn error(store: RedisStore) -> RedisError {
    let asked = tokio::time::timeout(HEAL_MAX, store.acquire(&[take("rights", BucketKey::global(), slow(5), 1)]));
    let error = asked.await.expect("an error in time").unwrap_err();
    let shown = format!("{error} {error:?} {store:?} {:?}", store.nodes());
    println!("{error}");
    assert!(!shown.contains("canary"), "{shown}");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_least_rights_is_enough_on_a_cluster() {
    let cluster = shared();
    let everywhere = |user: &str, rights: &str| cluster.nodes.iter().for_each(|node| set_user(node, user, rights));
    let rights = format!("{RIGHTS} {CLUSTER_RIGHTS}");
    everywhere("limiter", &rights);
    let urls = with(&format!("limiter:{SECRET}"), &cluster.nodes);
    let store = RedisStore::cluster(&urls).await.unwrap();
    conformance::check(&store).await;

    // While a slot moves.
    let key = identity(cluster, "rights", 0);
    let slot = cluster.slot(&tag(key));
    let charge = [take("rights", key, slow(50), 1)];
    store.acquire(&charge).await.unwrap();
    cluster.begin_move(slot, 0, 1);
    cluster.move_keys(slot, 0, 1);
    store.acquire(&charge).await.unwrap();
    // Without the right to say ASKING.
    everywhere("limiter", &rights.replace(" +asking", ""));
    let error_of_a_move = store.acquire(&charge).await.unwrap_err();
    println!("without ASKING: {error_of_a_move}");
    everywhere("limiter", &rights);
    cluster.end_move(slot, 0, 1);
    store.acquire(&charge).await.unwrap();
    assert_eq!(level(&cluster.nodes[1], "rights", key), 47);
    cluster.begin_move(slot, 1, 0);
    cluster.end_move(slot, 1, 0);

    // Without the right to ask who has which slots.
    everywhere("blind", &rights.replace(" +cluster|slots", ""));
    let store = RedisStore::cluster(with(&format!("blind:{SECRET}"), &cluster.nodes)).await.unwrap();
    let error = error(store).await;
    assert_eq!(error.kind(), RedisErrorKind::Configuration);
    // Redis 6.2 names the command only.
    let named = if version() < (7, 0) { "'cluster'" } else { "cluster|slots" };
    assert!(error.to_string().contains(named), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_a_clear_error_on_a_cluster() {
    for urls in [with("limiter:canary-wrong", &shared().nodes), with("nobody:canary-wrong", &shared().nodes)] {
        let error = error(RedisStore::cluster(&urls).await.unwrap()).await;
        assert_eq!(error.kind(), RedisErrorKind::Configuration);
        assert!(error.to_string().contains("WRONGPASS"), "{error}");
    }
}

/// A password for the servers; then one that the sentinels want too, and users of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_and_users_of_servers_and_of_sentinels_are_sent_where_they_are_wanted() {
    let args = ["--requirepass", SECRET, "--masterauth", SECRET];
    let watched = Watched::start_with(&args, &format!("sentinel auth-pass {MASTER} {SECRET}"));
    let connect = |credentials: &str| {
        let urls = with(credentials, &watched.sentinels);
        async move { RedisStore::sentinel(urls, MASTER).await.unwrap() }
    };
    let good = format!(":{SECRET}");
    let charge = [take("rights", BucketKey::global(), slow(50), 1)];
    connect(&good).await.acquire(&charge).await.expect("the sentinels want none");
    let wrong = error(connect(":canary-wrong").await).await;
    assert_eq!(wrong.kind(), RedisErrorKind::Configuration);

    let everywhere = |line: &str| {
        for sentinel in &watched.sentinels {
            sentinel.query(&line.split(' ').collect::<Vec<_>>());
        }
    };
    everywhere(&format!("ACL SETUSER default resetpass >{SECRET}"));
    connect(&good).await.acquire(&charge).await.expect("the same password for both");
    let wrong = error(connect(":canary-wrong").await).await;
    assert_eq!(wrong.kind(), RedisErrorKind::Configuration);

    for server in &watched.servers {
        set_user(server, "limiter", RIGHTS);
    }
    everywhere(&format!("ACL SETUSER limiter reset on >{SECRET} {SENTINEL_RIGHTS}"));
    let store = connect(&format!("limiter:{SECRET}")).await;
    conformance::check(&store).await;
    // One that may not ask the sentinels.
    everywhere(&format!("ACL SETUSER limiter reset on >{SECRET} -@all +ping"));
    let error = error(connect(&format!("limiter:{SECRET}")).await).await;
    assert_eq!(error.kind(), RedisErrorKind::Configuration);
}
