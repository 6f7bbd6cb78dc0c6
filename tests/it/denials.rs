//! Denials that a `RedisStore` remembers: what is answered without Redis, what never is, and what ends it.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Global, Limit, LimitName, Quota, RedisStore, Source, Store,
};

use crate::arithmetic::Rng;
use crate::proxy::{Mode, Proxy};
use crate::server::Server;

const HOUR: Duration = Duration::from_secs(3600);

/// So many tokens, of which none comes back while a test runs.
const fn tokens(capacity: u64) -> Quota {
    Quota::new(1, HOUR).with_capacity(capacity)
}

fn key() -> BucketKey {
    BucketKey::id("client")
}

fn charge(limit: &str, quota: Quota, amount: Amount) -> Charge {
    Charge::new(LimitName::try_new(limit).unwrap(), key(), quota, amount)
}

fn take(quota: Quota, cost: u64) -> [Charge; 1] {
    [charge("per-client", quota, Amount::Take(cost))]
}

async fn ask(store: &RedisStore, charges: &[Charge]) -> Decision {
    store.acquire(charges).await.unwrap()
}

fn denied_by(decision: &Decision, source: Source) {
    assert!(!decision.is_allowed() && decision.source() == source, "{decision:?}");
}

async fn store(server: &Server) -> RedisStore {
    RedisStore::connect(&server.url()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_denials_reaches_redis_in_less_than_one_of_a_hundred() {
    let server = Server::start();
    let store = store(&server).await;
    assert!(ask(&store, &take(tokens(1), 1)).await.is_allowed());
    let before = server.calls("evalsha");
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let store = store.clone();
        tasks.spawn(async move {
            for i in 0..1600 {
                assert!(!ask(&store, &take(tokens(1), 1)).await.is_allowed(), "an hour early");
                if i % 16 == 0 {
                    tokio::task::yield_now().await;
                }
            }
            1600
        });
    }
    let denied: u64 = tasks.join_all().await.iter().sum();
    let calls = server.calls("evalsha") - before;
    println!("{denied} denied, {calls} calls");
    assert!(calls * 100 < denied, "{calls} calls for {denied} denials");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_denials_ends_at_the_promised_moment() {
    let server = Server::start();
    let store = store(&server).await;
    let quota = Quota::new(1, Duration::from_secs(3));
    assert!(ask(&store, &take(quota, 1)).await.is_allowed());
    let promised = Instant::now() + ask(&store, &take(quota, 1)).await.retry_after().unwrap();
    let mut tasks = JoinSet::new();
    for _ in 0..64 {
        let store = store.clone();
        tasks.spawn(async move {
            while Instant::now() < promised {
                if ask(&store, &take(quota, 1)).await.is_allowed() {
                    // A machine that stood still in between.
                    assert!(Instant::now() >= promised, "before the promised moment");
                    return 1;
                }
                tokio::task::yield_now().await;
            }
            0
        });
    }
    let early: u32 = tasks.join_all().await.iter().sum();
    sleep_until(promised).await;
    let mut decision = ask(&store, &take(quota, 1)).await;
    // Valkey 9.1 looks at its clock once a millisecond.
    if let Some(wait) = decision.retry_after().filter(|_| early == 0) {
        assert!(wait <= Duration::from_millis(1), "{wait:?} after the promised moment");
        tokio::time::sleep(2 * wait).await;
        decision = ask(&store, &take(quota, 1)).await;
    }
    assert_eq!(early + u32::from(decision.is_allowed()), 1, "at the promised moment, once");
}

#[tokio::test]
async fn what_is_as_dear_or_dearer_is_answered_here_and_what_is_cheaper_never() {
    let server = Server::start();
    let store = store(&server).await;
    let quota = tokens(10);
    assert!(ask(&store, &take(quota, 5)).await.is_allowed());
    denied_by(&ask(&store, &take(quota, 7)).await, Source::Store);
    let before = server.calls("evalsha");
    for cost in [7, 8, 10] {
        let decision = ask(&store, &take(quota, cost)).await;
        denied_by(&decision, Source::Remembered);
        assert_eq!(decision.remaining(), Some(5));
        let wait = decision.retry_after().unwrap();
        assert!((cost - 6..=cost - 5).contains(&wait.as_secs().div_ceil(3600)), "{wait:?} for {cost}");
    }
    assert_eq!(server.calls("evalsha"), before);
    denied_by(&ask(&store, &take(quota, 6)).await, Source::Store);
    denied_by(&ask(&store, &take(quota, 6)).await, Source::Remembered);
    assert!(ask(&store, &take(quota, 5)).await.is_allowed(), "the tokens are there");
    denied_by(&ask(&store, &take(quota, 1)).await, Source::Store);
}

#[tokio::test]
async fn after_a_second_redis_is_asked_again_and_so_what_others_give_back_is_seen() {
    let server = Server::start();
    let (store, other) = (store(&server).await, store(&server).await);
    let limit = Limit::new("per-client", tokens(1));
    assert!(ask(&store, &take(tokens(1), 1)).await.is_allowed());
    denied_by(&ask(&store, &take(tokens(1), 1)).await, Source::Store);
    let asked = Instant::now();
    other.reset(&limit, key()).await.unwrap();
    while !ask(&store, &take(tokens(1), 1)).await.is_allowed() {
        sleep(Duration::from_millis(5)).await;
    }
    let seen = asked.elapsed();
    println!("seen after {seen:?}");
    assert!(seen <= Duration::from_millis(1500), "{seen:?}");
}

#[tokio::test]
async fn a_reset_a_refund_and_another_quota_made_here_end_it_at_once() {
    let server = Server::start();
    let store = store(&server).await;
    let limit = Limit::new("per-client", tokens(10)).key_by(Global);
    let empty = async |cost| {
        store.penalize(&limit, key(), 20).await.unwrap();
        store.acquire(&[charge("per-client", tokens(10), Amount::Give(10))]).await.unwrap();
        denied_by(&ask(&store, &take(tokens(10), cost)).await, Source::Store);
        denied_by(&ask(&store, &take(tokens(10), cost)).await, Source::Remembered);
    };
    empty(1).await;
    store.reset(&limit, key()).await.unwrap();
    assert!(ask(&store, &take(tokens(10), 10)).await.is_allowed(), "a reset");
    empty(3).await;
    store.acquire(&[charge("per-client", tokens(10), Amount::Give(3))]).await.unwrap();
    assert!(ask(&store, &take(tokens(10), 3)).await.is_allowed(), "a refund");
    empty(1).await;
    let larger = Quota::new(2, HOUR).with_capacity(10);
    denied_by(&ask(&store, &take(larger, 5)).await, Source::Store);
    denied_by(&ask(&store, &take(tokens(10), 9)).await, Source::Store);
}

#[tokio::test]
async fn a_look_and_a_debt_are_always_asked() {
    let server = Server::start();
    let store = store(&server).await;
    let limit = Limit::new("per-client", tokens(2));
    assert!(ask(&store, &take(tokens(2), 2)).await.is_allowed());
    denied_by(&ask(&store, &take(tokens(2), 2)).await, Source::Store);
    assert_eq!(store.peek(&limit, key()).await.unwrap().source(), Source::Store);
    assert_eq!(store.penalize(&limit, key(), 1).await.unwrap().source(), Source::Store);
    // A debt makes the wait longer.
    denied_by(&ask(&store, &take(tokens(2), 2)).await, Source::Store);
    denied_by(&ask(&store, &take(tokens(2), 2)).await, Source::Remembered);
}

#[tokio::test]
async fn of_several_limits_the_siblings_are_told_with_what_they_have_refilled() {
    let server = Server::start();
    let store = store(&server).await;
    let both = |slow, fast| {
        [
            charge("slow", tokens(3), Amount::Take(slow)),
            charge("fast", Quota::per_second(100).with_capacity(100), Amount::Take(fast)),
        ]
    };
    assert!(ask(&store, &both(3, 100)).await.is_allowed());
    denied_by(&ask(&store, &both(1, 5)).await, Source::Store);
    sleep(Duration::from_millis(200)).await;
    let decision = ask(&store, &both(1, 5)).await;
    denied_by(&decision, Source::Remembered);
    let [slow, fast] = decision.outcomes() else { panic!("{decision:?}") };
    assert!(slow.refuses() && !fast.refuses(), "{decision:?}");
    assert!((19..=60).contains(&fast.remaining().unwrap()), "{fast:?}");
    // Another set, though with the same bucket.
    denied_by(&ask(&store, &both(1, 5)[..1]).await, Source::Store);
    denied_by(&ask(&store, &[both(1, 5)[0].clone(), both(1, 5)[1].clone().shadow()]).await, Source::Store);
}

#[tokio::test]
async fn it_can_be_switched_off() {
    let server = Server::start();
    let store = store(&server).await.remember_denials(false);
    assert!(ask(&store, &take(tokens(1), 1)).await.is_allowed());
    for _ in 0..3 {
        denied_by(&ask(&store, &take(tokens(1), 1)).await, Source::Store);
    }
}

#[tokio::test]
async fn buckets_of_another_prefix_or_secret_are_others() {
    let server = Server::start();
    let store = store(&server).await;
    assert!(ask(&store, &take(tokens(1), 1)).await.is_allowed());
    for _ in 0..2 {
        ask(&store, &take(tokens(1), 1)).await;
    }
    assert!(ask(&store.clone().prefix("other"), &take(tokens(1), 1)).await.is_allowed());
    assert!(ask(&store.clone().secret("other"), &take(tokens(1), 1)).await.is_allowed());
}

/// The answer to a question that was sent before a reset comes after it.
#[tokio::test]
async fn an_answer_that_a_reset_has_overtaken_is_not_remembered() {
    let server = Server::start();
    let proxy = Proxy::start(server.port()).await;
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    let limit = Limit::new("per-client", tokens(1));
    assert!(ask(&store, &take(tokens(1), 1)).await.is_allowed());
    proxy.set(Mode::Delay(Duration::from_millis(200))).await;
    let late = tokio::spawn({
        let store = store.clone();
        async move { ask(&store, &take(tokens(1), 1)).await }
    });
    sleep(Duration::from_millis(50)).await;
    let reset = store.reset(&limit, key());
    drop(tokio::time::timeout(Duration::from_millis(1), reset).await);
    denied_by(&late.await.unwrap(), Source::Store);
    proxy.set(Mode::Pass).await;
    sleep(Duration::from_millis(300)).await;
    assert!(ask(&store, &take(tokens(1), 1)).await.source() == Source::Store);
}

/// However many clients are refused, what is remembered of them is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_remembered_is_bounded() {
    let server = Server::start();
    let store = store(&server).await;
    let name = LimitName::try_new("per-client").unwrap();
    for round in 0..400u32 {
        let asked = (0..64u32).map(|i| {
            let client = BucketKey::id((round * 64 + i).to_le_bytes());
            let charge = Charge::new(name.clone(), client, tokens(1), Amount::Take(1));
            let store = store.clone();
            async move {
                ask(&store, std::slice::from_ref(&charge)).await;
                ask(&store, &[charge]).await
            }
        });
        let all: JoinSet<Decision> = asked.collect();
        all.join_all().await.iter().for_each(|decision| denied_by(decision, Source::Store));
    }
    let said = format!("{store:?}");
    let len: usize = said.split("Denials { len: ").nth(1).unwrap().split([',', ' ']).next().unwrap().parse().unwrap();
    assert!((1_000..=16_384).contains(&len), "{len} of 25600");
}

/// Random costs under random quotas: whoever is refused and comes back after the promised wait passes, and nobody is
/// admitted beyond capacity and refill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_promised_wait_is_kept_and_nothing_is_given_twice() {
    let server = Server::start();
    let store = store(&server).await;
    let mut rng = Rng::new(3);
    for round in 0..40 {
        let quota = Quota::per_second(20 + rng.below(2000)).with_capacity(1 + rng.below(20));
        let limit = format!("round-{round}");
        let (began, mut given) = (Instant::now(), 0);
        while began.elapsed() < Duration::from_millis(60) {
            let cost = 1 + rng.below(quota.capacity());
            let charges = [charge(&limit, quota, Amount::Take(cost))];
            let decision = ask(&store, &charges).await;
            if decision.is_allowed() {
                given += cost;
                continue;
            }
            // Some come too early, and hear a wait that is no longer than before.
            let wait = decision.retry_after().unwrap();
            if rng.chance(30) {
                continue;
            }
            tokio::task::spawn_blocking(move || std::thread::sleep(wait)).await.unwrap();
            let decision = ask(&store, &charges).await;
            assert!(decision.is_allowed(), "a cost of {cost} after {wait:?} under {quota:?}: {decision:?}");
            given += cost;
        }
        let (tokens, per) = quota.refill();
        let refilled = tokens as f64 * began.elapsed().as_secs_f64() / per.as_secs_f64();
        assert!(given as f64 <= quota.capacity() as f64 + refilled + 1e-6, "{given} under {quota:?}");
    }
}
