//! `RedisStore` on clusters and behind sentinels: the contract of a store, and what holds when nodes fail and slots move.

use std::time::Duration;

use tower_token_bucket::{RedisStore, conformance};

use crate::topology::{Cluster, MASTER, Watched};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_the_contract_of_a_store() {
    let cluster = Cluster::start(3, 0);
    // One node is enough to find the others.
    conformance::check(&RedisStore::cluster(&cluster.urls()[..1]).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_primary_that_sentinels_know_keeps_the_contract_of_a_store() {
    let watched = Watched::start();
    conformance::check(&RedisStore::sentinel(watched.urls(), MASTER).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_the_sentinels_do_not_know_is_a_clear_error() {
    let watched = Watched::start();
    let store = RedisStore::sentinel(watched.urls(), "others").await.unwrap();
    let error = format!("{:?}", tokio::time::timeout(Duration::from_secs(5), conformance_error(&store)).await.unwrap());
    assert!(error.contains("do not know the name"), "{error}");
}

async fn conformance_error(store: &RedisStore) -> String {
    use tower_token_bucket::{BucketKey, Limit, Quota, Store};
    let limit = Limit::new("a", Quota::per_second(1));
    store.peek(&limit, BucketKey::global()).await.unwrap_err().to_string()
}
