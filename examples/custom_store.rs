//! A store of your own, and how to know that it is right. This one keeps its buckets in a map under a lock; for any other
//! place the arithmetic is the same, and so is the proof: `cargo run --example custom_store`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{Layer, ServiceExt, service_fn};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Global, Limit, Quota, Reply, Store, TokenBucketLayer, conformance,
};

/// A level is counted in units of 1/p token, where the quota refills n tokens in p microseconds: each microsecond adds n
/// units, and nothing is rounded.
struct Bucket {
    at: Instant,
    level: i128,
    quota: Quota,
}

/// A charge to a bucket, or to a new one, which is full: are the tokens there, and what is the level before and after?
fn step(bucket: Option<&Bucket>, charge: &Charge, now: Instant) -> (bool, i128, i128) {
    let (n, per) = charge.quota().refill();
    let units = |tokens: u64| i128::from(tokens) * per.as_micros() as i128;
    let full = units(charge.quota().capacity());
    let level = bucket.map_or(full, |bucket| {
        // Written under another quota, it keeps its tokens and the part of one; a smaller capacity clamps.
        let kept = (bucket.level * units(1)).div_euclid(bucket.quota.refill().1.as_micros() as i128).clamp(-full, full);
        full.min(kept + now.duration_since(bucket.at).as_micros() as i128 * i128::from(n))
    });
    match charge.amount() {
        Amount::Take(cost) if units(cost) > level => (false, level, level),
        Amount::Take(cost) => (true, level, level - units(cost)),
        Amount::Spend(cost) => (true, level, (level - units(cost)).max(-full)),
        Amount::Give(tokens) => (true, level, (level + units(tokens)).min(full)),
        _ => (true, level, level),
    }
}

/// A handle: its clones share the buckets. None is forgotten; one that is full could be.
#[derive(Clone, Default)]
struct MapStore(Arc<Mutex<HashMap<(String, BucketKey), Bucket>>>);

impl Store for MapStore {
    type Error = Infallible;
    type Future = Ready<Result<Decision, Infallible>>;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        // For everybody else this is one step.
        let mut buckets = self.0.lock().expect("nothing panics under this lock");
        let now = Instant::now();
        let name = |charge: &Charge| (charge.limit().to_string(), *charge.key());
        // On the side, one after the other, since two may be to one bucket: the enforced charges and then, if all of them
        // pass, those in shadow. What is said of each is the level that it leaves.
        let mut changed = HashMap::new();
        let mut replies = vec![Reply::new(0, true, 0); charges.len()];
        let mut all = true;
        for shadow in [false, true] {
            for (i, charge) in charges.iter().enumerate().filter(|(_, charge)| all && charge.is_shadow() == shadow) {
                let name = name(charge);
                let (allowed, _, level) = step(changed.get(&name).or(buckets.get(&name)), charge, now);
                replies[i] = Reply::new(level as i64, allowed, 0);
                if allowed && charge.amount() != Amount::Peek {
                    changed.insert(name, Bucket { at: now, level, quota: charge.quota() });
                }
            }
            all = charges.iter().zip(&replies).all(|(charge, reply)| charge.is_shadow() || reply.is_allowed());
        }
        if all {
            buckets.extend(changed);
        } else {
            // Nothing is written, and what is said of each is the level that it found.
            for (charge, reply) in charges.iter().zip(&mut replies) {
                let (alone, level, _) = step(buckets.get(&name(charge)), charge, now);
                *reply = Reply::new(level as i64, if charge.is_shadow() { alone } else { reply.is_allowed() }, 0);
            }
        }
        ready(Ok(Decision::new(charges, &replies).expect("one reply for each charge")))
    }
}

#[tokio::main]
async fn main() {
    let store = MapStore::default();
    conformance::check(&store).await;
    println!("the store keeps the contract");
    let limit = Limit::new("everybody", Quota::per_minute(2)).key_by(Global);
    let hello = service_fn(|_: Request<()>| ready(Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("hello")))));
    let service = TokenBucketLayer::new(store, limit).layer(hello);
    for _ in 0..3 {
        let response = service.clone().oneshot(Request::new(())).await.expect("infallible");
        println!("{}, {}", response.status(), response.headers()["ratelimit"].to_str().unwrap_or_default());
    }
}
