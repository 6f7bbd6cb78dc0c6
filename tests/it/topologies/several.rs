//! Limits on several identities of a request, whose slots are on different nodes: charged in turn, and given back.

use super::*;
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::task::Poll;
use tower_token_bucket::{MemoryStore, Outcome};

/// A sequence of numbers that look random, and are the same for the same seed.
struct Random(u64);

impl Random {
    /// Another one each time, which a failure shows.
    fn new() -> Self {
        let seed = RandomState::new().hash_one("seed");
        println!("seed {seed}");
        Self(seed)
    }

    fn below(&mut self, bound: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// The buckets that requests share: two on each primary, so that some requests are one step and some are several.
fn buckets(name: &str) -> Vec<(BucketKey, u64)> {
    let cluster = shared();
    (0..6).map(|i| (identity(cluster, &format!("{name} {i}"), i % 3), [150, 400, 3000, 250, 90, 600][i])).collect()
}

/// A request on one to three of the buckets, in random order.
fn draw(random: &mut Random, buckets: &[(BucketKey, u64)]) -> Vec<(usize, Charge)> {
    let cost = 1 + random.below(3);
    let mut left: Vec<_> = (0..buckets.len()).collect();
    (0..1 + random.below(3))
        .map(|_| {
            let which = left.swap_remove(random.below(left.len() as u64) as usize);
            let (key, capacity) = buckets[which];
            (which, take("several", key, slow(capacity), cost))
        })
        .collect()
}

fn split(drawn: Vec<(usize, Charge)>) -> (Vec<usize>, Vec<Charge>) {
    drawn.into_iter().unzip()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_contention_each_identity_is_charged_what_was_admitted_and_no_more() {
    let store = RedisStore::cluster(shared().urls()).await.unwrap();
    let buckets = Arc::new(buckets("contention"));
    let mut seeds = Random::new();
    let mut tasks = JoinSet::new();
    for _ in 0..48 {
        let (store, buckets, mut random) = (store.clone(), Arc::clone(&buckets), Random(seeds.below(u64::MAX)));
        tasks.spawn(async move {
            let (mut admitted, mut refused) = ([0; 6], 0);
            for _ in 0..50 {
                let (which, charges) = split(draw(&mut random, &buckets));
                let decision = store.acquire(&charges).await.expect("the store answers");
                assert_eq!(decision.outcomes().len(), charges.len());
                if decision.is_allowed() {
                    which.iter().zip(&charges).for_each(|(which, charge)| admitted[*which] += charge.cost());
                } else {
                    refused += 1;
                    assert!(decision.outcomes().iter().any(Outcome::refuses));
                }
            }
            (admitted, refused)
        });
    }
    let (mut admitted, mut refused) = ([0; 6], 0);
    for (some, none) in tasks.join_all().await {
        admitted.iter_mut().zip(some).for_each(|(all, some)| *all += some);
        refused += none;
    }
    println!("{refused} of 2400 refused; admitted {admitted:?}");
    assert!(refused > 100, "there is something to give back");
    for ((key, capacity), admitted) in buckets.iter().zip(admitted) {
        let left = level(owner(shared(), *key), "several", *key);
        assert_eq!(admitted as i64 + left, *capacity as i64, "{admitted} of {capacity} admitted, {left} left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_dropped_at_any_point_never_let_more_pass() {
    let store = RedisStore::cluster(shared().urls()).await.unwrap();
    let buckets = Arc::new(buckets("drops"));
    let mut seeds = Random::new();
    let mut tasks = JoinSet::new();
    for _ in 0..48 {
        let (store, buckets, mut random) = (store.clone(), Arc::clone(&buckets), Random(seeds.below(u64::MAX)));
        tasks.spawn(async move {
            let (mut admitted, mut dropped) = ([0; 6], [0; 6]);
            for _ in 0..50 {
                let (which, charges) = split(draw(&mut random, &buckets));
                let acquire = store.acquire(&charges);
                let decision = match random.below(3) {
                    0 => Some(acquire.await),
                    // After some time.
                    1 => tokio::time::timeout(Duration::from_micros(random.below(4000)), acquire).await.ok(),
                    // After some polls.
                    _ => {
                        let (mut acquire, mut polls) = (pin!(acquire), random.below(5));
                        std::future::poll_fn(|cx| match polls.checked_sub(1) {
                            None => Poll::Ready(None),
                            Some(left) => {
                                polls = left;
                                acquire.as_mut().poll(cx).map(Some)
                            }
                        })
                        .await
                    }
                };
                let sums = match decision {
                    // Those that are dropped late count as failures of the node: the breaker may open.
                    None | Some(Err(_)) => &mut dropped,
                    Some(Ok(decision)) if decision.is_allowed() => &mut admitted,
                    Some(Ok(_)) => continue,
                };
                which.iter().zip(&charges).for_each(|(which, charge)| sums[*which] += charge.cost());
            }
            (admitted, dropped)
        });
    }
    let (mut admitted, mut dropped) = ([0; 6], [0; 6]);
    for (some, others) in tasks.join_all().await {
        admitted.iter_mut().zip(some).for_each(|(all, some)| *all += some);
        dropped.iter_mut().zip(others).for_each(|(all, some)| *all += some);
    }
    // What was dropped goes on for a moment, to give back what has to be.
    let levels =
        || -> Vec<_> { buckets.iter().map(|(key, _)| level(owner(shared(), *key), "several", *key)).collect() };
    let mut last = Vec::new();
    while last != levels() {
        last = levels();
        sleep(Duration::from_millis(100)).await;
    }
    println!("admitted {admitted:?}, dropped {dropped:?}, left {last:?}");
    for (i, (_, capacity)) in buckets.iter().enumerate() {
        let taken = *capacity as i64 - last[i];
        assert!(last[i] >= 0 && taken >= admitted[i] as i64, "{taken} taken and {} admitted", admitted[i]);
        assert!(taken <= (admitted[i] + dropped[i]) as i64, "{taken} taken, {} admitted", admitted[i]);
    }
    assert!(dropped.iter().sum::<u64>() > 500);
}

/// The longest wait, which limit refuses and what remains of each: what one step in memory says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_on_several_nodes_report_what_one_step_in_memory_reports() {
    let cluster = shared();
    let redis = RedisStore::cluster(cluster.urls()).await.unwrap();
    let memory = MemoryStore::new();
    let mut random = Random::new();
    // Periods and capacities of which no small multiples are equal, so that there is one longest wait and one least share.
    let quotas = [(11, 3600), (13, 5003), (17, 7919), (19, 4201), (23, 6007), (29, 9001)]
        .map(|(capacity, seconds)| Quota::new(1, Duration::from_secs(seconds)).with_capacity(capacity));
    let (mut refused, mut in_turn) = (0, 0);
    for round in 0..60 {
        let keys: Vec<_> = (0..3).map(|i| identity(cluster, &format!("report {round} {i} {}", random.0), i)).collect();
        for _ in 0..8 {
            // Each bucket at most once, as in the requests of a layer.
            let mut left: Vec<_> = (0..6).collect();
            let charges: Vec<_> = (0..2 + random.below(3))
                .map(|_| {
                    let bucket = left.swap_remove(random.below(left.len() as u64) as usize);
                    let (which, name) = (bucket % 3, ["x", "y"][bucket / 3]);
                    let amount = match random.below(12) {
                        0 => Amount::Peek,
                        1 => Amount::Take(18),
                        cost => Amount::Take(cost / 2),
                    };
                    let charge = charge(name, keys[which], quotas[bucket], amount);
                    if random.below(4) == 0 { charge.shadow() } else { charge }
                })
                .collect();
            in_turn += u32::from(charges.iter().any(|charge| charge.key() != charges[0].key()));
            let (got, right) = (redis.acquire(&charges).await.unwrap(), memory.acquire(&charges).await.unwrap());
            refused += u32::from(!right.is_allowed());
            let what = format!("{charges:#?}\nis {got:#?}\nand in memory {right:#?}");
            assert_eq!(got.is_allowed(), right.is_allowed(), "{what}");
            let about = |a: Option<Duration>, b: Option<Duration>| {
                a.is_some() == b.is_some()
                    && a.unwrap_or_default().abs_diff(b.unwrap_or_default()) < Duration::from_secs(60)
            };
            assert!(about(got.retry_after(), right.retry_after()), "{what}");
            for (got, right) in got.outcomes().iter().zip(right.outcomes()) {
                let of = |it: &Outcome| (it.limit().to_owned(), it.is_allowed(), it.refuses(), it.remaining());
                assert_eq!(of(got), of(right), "{what}");
                assert!(about(got.retry_after(), right.retry_after()), "{what}");
            }
            let tie = right.outcomes().iter().filter(|it| it.remaining() == Some(0)).count() > 1;
            if !right.is_allowed() || !tie {
                assert_eq!(got.limit(), right.limit(), "{what}");
            }
        }
    }
    println!("{refused} of 480 refused, {in_turn} in turn");
    assert!(refused > 60 && in_turn > 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_is_told_of_all_limits_on_all_nodes() {
    let cluster = shared();
    let keys = identities(cluster, "told");
    let limits = || {
        let quotas = [slow(9), slow(3), slow(5)];
        (0..3).map(move |i| limit(["one", "two", "three"][i], quotas[i], i))
    };
    let in_redis = RedisStore::cluster(cluster.urls()).await.unwrap();
    let patient = |layer: TokenBucketLayer<RedisStore>| service(&layer.deadline(Duration::from_secs(10)));
    let redis = patient(TokenBucketLayer::try_new(in_redis, limits()).unwrap());
    let inner = service_fn(|_: Request<Full<Bytes>>| ready(Ok::<_, Infallible>(Response::new(Full::default()))));
    let memory = TokenBucketLayer::try_new(MemoryStore::new(), limits()).unwrap().layer(inner);
    for i in 0..5 {
        let answers = [
            redis.clone().oneshot(request(&keys)).await.unwrap(),
            memory.clone().oneshot(request(&keys)).await.unwrap(),
        ];
        assert_eq!(answers[0].status(), if i < 3 { 200 } else { 429 });
        let told = answers.map(|answer| {
            let text = |name: &str| answer.headers().get(name).map(|it| it.to_str().unwrap().to_owned());
            // The seconds of an hour that have passed differ.
            let items = text("ratelimit").unwrap();
            let items: Vec<_> = items.split(',').map(|it| it.split(";t=").next().unwrap().to_owned()).collect();
            let wait = text("retry-after").map(|it| it.parse::<u64>().unwrap().div_ceil(60));
            (answer.status(), items, text("ratelimit-policy"), wait)
        });
        assert_eq!(told[0], told[1]);
        assert_eq!(told[0].1.len(), 3);
    }
}

/// What is clamped at the end of a debt, or at the capacity, is less than what was asked for: to give that back is too
/// much.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_charged_without_asking_beside_a_charge_that_refuses_leaves_no_trace() {
    let cluster = shared();
    let keys = identities(cluster, "clamped");
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let one = |amount| charge("clamped", keys[0], slow(10), amount);
    let refuses = take("clamped", keys[1], slow(10), 11);
    let level = || level(owner(cluster, keys[0]), "clamped", keys[0]);
    for (first, amount, right) in [(Amount::Spend(19), Amount::Spend(5), -9), (Amount::Give(18), Amount::Give(5), 9)] {
        store.acquire(&[one(first)]).await.unwrap();
        assert_eq!(level(), right);
        assert!(!store.acquire(&[one(amount), refuses.clone()]).await.unwrap().is_allowed());
        assert_eq!(level(), right, "after a refused request of {amount:?}");
    }
}

/// As [`MemoryStore`] does: the level of a bucket is the same for all charges of a request that is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_that_a_refused_request_names_twice_is_reported_as_it_was() {
    let cluster = shared();
    let keys = identities(cluster, "twice");
    let charges = [
        take("twice", keys[0], slow(10), 2),
        take("twice", keys[0], slow(10), 3),
        take("other", keys[1], slow(10), 11),
    ];
    let remaining = |decision: Decision| decision.outcomes().iter().map(Outcome::remaining).collect::<Vec<_>>();
    let in_memory = remaining(MemoryStore::new().acquire(&charges).await.unwrap());
    assert_eq!(in_memory, [Some(10); 3]);
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    assert_eq!(remaining(store.acquire(&charges).await.unwrap()), in_memory);
}
