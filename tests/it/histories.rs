//! Random histories of requests with several limits, callers and plans: `MemoryStore`, `RedisStore` with its script on a
//! real server, and the exact model say and store the same. Then what many callers at once charge, and rollouts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Cmd, Pipeline, RedisFuture};
use tokio::task::JoinSet;
use tokio::time::{Instant, advance};
use tower_token_bucket::conformance::Model;
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, LimitName, MemoryStore, Outcome, Quota, RedisStore, Store, redis,
};

use crate::arithmetic::{Exact, name};
use crate::memory::{ask, forget, in_16_threads, said};
use crate::redis_script::{Buckets, Random, START_US, Write, quotas, reply_and_writes, tick};
use crate::server::{Server, Value, encode};

const HOUR: Duration = Duration::from_secs(3600);

/// A connection for `RedisStore` that calls the script with the clock as an argument, and looks at all buckets before
/// and after, in one go. It blocks: no timer of a paused clock passes meanwhile.
#[derive(Clone)]
struct Clocked(Arc<Mutex<Clock>>);

struct Clock {
    redis: Buckets,
    keys: Vec<String>,
    now_us: u64,
    last: Seen,
}

/// What the last call did: the buckets before and after it, and what was written.
#[derive(Default)]
struct Seen {
    before: Vec<Option<String>>,
    after: Vec<Option<String>>,
    writes: Vec<Write>,
}

impl Clock {
    fn call(&mut self, cmd: &Cmd) -> redis::Value {
        let mut args: Vec<Vec<u8>> = cmd
            .args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(text) => text.to_vec(),
                _ => unreachable!("a script call has no cursor"),
            })
            .collect();
        assert_eq!(args[0], b"EVALSHA");
        args[1] = self.redis.clock_sha.clone().into_bytes();
        args.extend([self.now_us / 1_000_000, self.now_us % 1_000_000].map(|part| part.to_string().into_bytes()));
        let look: Vec<&str> = ["MGET"].into_iter().chain(self.keys.iter().map(String::as_str)).collect();
        let mut commands = Vec::new();
        encode(&mut commands, &look);
        encode(&mut commands, &args);
        encode(&mut commands, &look);
        self.redis.connection.send(&commands).unwrap();
        let [before, answer, after] = [(); 3].map(|()| self.redis.connection.receive().unwrap());
        let (reply, writes) = reply_and_writes(&answer).unwrap_or_else(|| panic!("{answer:?}"));
        self.last = Seen { before: texts(before), after: texts(after), writes };
        integers(&reply)
    }
}

fn texts(values: Value) -> Vec<Option<String>> {
    let Value::Array(values) = values else { panic!("{values:?}") };
    values.iter().map(|value| value.text().map(str::to_owned)).collect()
}

fn integers(value: &Value) -> redis::Value {
    match value {
        Value::Int(int) => redis::Value::Int(*int),
        Value::Array(values) => redis::Value::Array(values.iter().map(integers).collect()),
        Value::Text(text) => redis::Value::BulkString(text.clone().into_bytes()),
        other => panic!("not a reply: {other:?}"),
    }
}

impl ConnectionLike for Clocked {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, redis::Value> {
        let reply = self.0.lock().unwrap().call(cmd);
        Box::pin(std::future::ready(Ok(reply)))
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        _: &'a Pipeline,
        _: usize,
        _: usize,
    ) -> RedisFuture<'a, Vec<redis::Value>> {
        unreachable!("a script call is one command")
    }

    fn get_db(&self) -> i64 {
        0
    }
}

fn key(charge: &Charge) -> String {
    format!("tb:v1:{{{}}}:{}", charge.key(), charge.limit())
}

/// The same buckets under the same quotas, charged otherwise.
fn with(limits: &[Charge], amount: Amount) -> Vec<Charge> {
    limits.iter().map(|limit| Charge::new(limit.limit().clone(), *limit.key(), limit.quota(), amount)).collect()
}

/// The script and the model, at any time that is asked for.
struct Pair {
    /// The history, for failures.
    history: String,
    buckets: Vec<Charge>,
    model: Model,
    clock: Clocked,
    store: RedisStore,
    denials: usize,
    /// Of all denials: those writes that rule 4 allows.
    extended: usize,
    brought_back: usize,
}

impl Pair {
    fn start() -> Self {
        let (redis, keys) = (Buckets::start(), Vec::new());
        let clock = Clocked(Arc::new(Mutex::new(Clock { redis, keys, now_us: 0, last: Seen::default() })));
        Self {
            history: String::new(),
            buckets: Vec::new(),
            model: Model::default(),
            // It asks each time: the clock that is an argument here is not that of this process.
            store: RedisStore::from_connection(clock.clone()).remember_denials(false),
            clock,
            denials: 0,
            extended: 0,
            brought_back: 0,
        }
    }

    /// Starts a history over all of these buckets, full ones.
    fn begin(&mut self, history: String, buckets: Vec<Charge>) {
        let mut clock = self.clock.0.lock().unwrap();
        clock.redis.server.query(&["FLUSHALL"]);
        clock.keys = buckets.iter().map(key).collect();
        drop(clock);
        (self.history, self.buckets, self.model) = (history, buckets, Model::default());
    }

    /// Forgets the buckets of these charges whose life is over.
    fn forget(&mut self, charges: &[Charge], now_us: u64) {
        for charge in charges {
            let had = self.model.state(charge).is_some();
            forget(&mut self.model, charge, now_us);
            if had && self.model.state(charge).is_none() {
                self.clock.0.lock().unwrap().redis.server.query(&["DEL", &key(charge)]);
            }
        }
    }

    async fn ask(&mut self, charges: &[Charge], now_us: u64) -> Decision {
        let context = format!("{}: {charges:?} at {now_us}", self.history);
        self.clock.0.lock().unwrap().now_us = now_us;
        let decision = self.store.acquire(charges).await.unwrap();
        let expected = Decision::new(charges, &self.model.acquire(charges, now_us)).unwrap();
        assert_eq!(said(&decision), said(&expected), "{context}");

        let seen = std::mem::take(&mut self.clock.0.lock().unwrap().last);
        let states: Vec<_> = self.buckets.iter().map(|bucket| self.model.state(bucket)).collect();
        assert_eq!(seen.after, states, "{context}");
        for write in &seen.writes {
            let charge = charges.iter().find(|charge| key(charge) == write.key).expect("a bucket of the request");
            let life_ms = self.model.life_ms(charge, now_us).unwrap();
            assert_eq!(Some(&write.value), self.model.state(charge).as_ref(), "{context}");
            assert_eq!(write.life_ms, life_ms.to_string(), "{context}: {write:?}");
            // The memory store counts a life from the bucket's own time.
            let at_us = Stored::read(&write.value).at_us;
            let forgotten_us = at_us + self.model.life_ms(charge, at_us).unwrap() * 1000;
            let expired_us = now_us + life_ms * 1000;
            assert!(expired_us.abs_diff(forgotten_us.max(now_us)) <= 1000, "{context}: {write:?}");
        }
        if !decision.is_allowed() {
            self.denied(charges, now_us, &seen, &context);
        }
        decision
    }

    /// Rule 4: each bucket is as it was, but for a longer life or a time that is brought back.
    fn denied(&mut self, charges: &[Charge], now_us: u64, seen: &Seen, context: &str) {
        self.denials += 1;
        for ((bucket, before), after) in self.buckets.iter().zip(&seen.before).zip(&seen.after) {
            if before == after {
                continue;
            }
            let (Some(old), Some(new)) = (before, after) else { panic!("{context}: {before:?}, then {after:?}") };
            let (old, new) = (Stored::read(old), Stored::read(new));
            let takes = charges.iter().filter(|charge| charge.cost() > 0 && key(charge) == key(bucket));
            let of_it: Vec<_> = takes.filter(|charge| old.is_kept_by(charge.quota(), &new)).collect();
            assert!(!of_it.is_empty(), "{context}: {before:?}, then {after:?}");
            let behind = old.at_us > now_us + 1_000_000;
            assert_eq!(new.at_us, if behind { now_us } else { old.at_us }, "{context}: {before:?}, then {after:?}");
            assert!(behind || new.expiry_us() > old.expiry_us(), "{context}: {before:?}, then {after:?}");
            self.brought_back += usize::from(behind);
            self.extended += usize::from(!behind);
        }
    }
}

/// A value in Redis.
struct Stored {
    at_us: u64,
    capacity: i128,
    tokens: i128,
    per_us: i128,
    level: i128,
}

impl Stored {
    fn read(text: &str) -> Self {
        let numbers: Vec<i128> = text.split(':').map(|number| number.parse().unwrap()).collect();
        let [at_us, capacity, tokens, per_us, level] = numbers[..] else { panic!("{text}") };
        Self { at_us: at_us as u64, capacity, tokens, per_us, level }
    }

    fn expiry_us(&self) -> i128 {
        let missing = (self.capacity * self.per_us).min(1 << 51) - self.level;
        i128::from(self.at_us) + (missing.max(0) + self.tokens - 1) / self.tokens
    }

    /// Whether `new` has the same tokens in terms of `quota`: as many as it holds at most, the part of one rounded down.
    fn is_kept_by(&self, quota: Quota, new: &Self) -> bool {
        let (tokens, per) = quota.refill();
        let (capacity, per_us) = (i128::from(quota.capacity()), per.as_micros() as i128);
        let same_quota = (new.capacity, new.tokens, new.per_us) == (self.capacity.max(capacity), tokens.into(), per_us);
        let same_level = if self.level >= capacity * self.per_us {
            new.level == capacity * per_us
        } else if self.level < -capacity * self.per_us {
            (-capacity * per_us..(1 - capacity) * per_us).contains(&new.level)
        } else {
            // level / p, less than 1 / p' above level' / p'.
            (0..self.per_us).contains(&(self.level * per_us - new.level * self.per_us))
        };
        same_quota && same_level
    }
}

/// The memory store too. Its clock starts at 0 and the script's in this century: only the difference counts.
struct Three {
    pair: Pair,
    memory: MemoryStore,
    started: Instant,
}

impl Three {
    fn start() -> Self {
        Self { pair: Pair::start(), memory: MemoryStore::new(), started: Instant::now() }
    }

    fn begin(&mut self, history: String, buckets: Vec<Charge>) {
        self.pair.begin(history, buckets);
        (self.memory, self.started) = (MemoryStore::new(), Instant::now());
    }

    async fn ask(&mut self, charges: &[Charge]) -> Decision {
        let now_us = START_US + self.started.elapsed().as_micros() as u64;
        self.pair.forget(charges, now_us);
        let looks = with(charges, Amount::Peek);
        let before = said(&ask(&self.memory, &looks));
        let in_memory = ask(&self.memory, charges);
        let decision = self.pair.ask(charges, now_us).await;
        let context = || format!("{}: {charges:?} at {now_us}", self.pair.history);
        assert_eq!(said(&in_memory), said(&decision), "{}", context());
        if !decision.is_allowed() {
            assert_eq!(said(&ask(&self.memory, &looks)), before, "{}", context());
        }
        decision
    }

    /// Looks at all buckets under each of these quotas.
    async fn look(&mut self, quotas: &[Quota]) {
        for quota in quotas {
            let looks = self.pair.buckets.iter();
            let looks = looks.map(|bucket| Charge::new(bucket.limit().clone(), *bucket.key(), *quota, Amount::Peek));
            let looks: Vec<_> = looks.collect();
            self.ask(&looks).await;
        }
    }
}

/// Three callers of two organisations, and five limits: three on the caller, one on the organisation, one on all. A
/// caller's plan sets the quotas of its requests, on the buckets that it shares too, and changes between requests.
struct Api {
    limits: [LimitName; 5],
    identities: [[BucketKey; 3]; 5],
    /// By plan and limit.
    plans: [[Quota; 5]; 3],
    /// By caller.
    plan: [usize; 3],
}

/// A limit that mostly only watches.
const WATCH: usize = 2;

impl Api {
    fn new(random: &mut Random) -> Self {
        let all = quotas(random);
        // The first ones are ordinary, all of them go to the bounds of what is accepted.
        let mut quota = || if random.one_in(3) { *random.pick(&all) } else { *random.pick(&all[..15]) };
        let plans = [(); 3].map(|()| [(); 5].map(|()| quota()));
        let callers = [0, 1, 2].map(|caller| BucketKey::id(format!("caller {caller}")));
        let organisations = [0, 0, 1].map(|organisation| BucketKey::id(format!("organisation {organisation}")));
        Self {
            limits: ["per-second", "per-day", "watch", "organisation", "all"].map(name),
            identities: [callers, callers, callers, organisations, [BucketKey::global(); 3]],
            plans,
            plan: [0, 1, 2],
        }
    }

    /// A look at each bucket.
    fn buckets(&self) -> Vec<Charge> {
        let mut buckets: HashMap<String, Charge> = HashMap::new();
        for caller in 0..3 {
            for limit in 0..5 {
                let charge = self.charge(limit, caller, Amount::Peek);
                buckets.insert(key(&charge), charge);
            }
        }
        buckets.into_values().collect()
    }

    fn charge(&self, limit: usize, caller: usize, amount: Amount) -> Charge {
        let quota = self.plans[self.plan[caller]][limit];
        Charge::new(self.limits[limit].clone(), self.identities[limit][caller], quota, amount)
    }

    /// One to four charges of one caller, on limits in any order, at times the same one twice.
    fn request(&mut self, random: &mut Random, model: &mut Model, now_us: u64) -> Vec<Charge> {
        let caller = random.below(3) as usize;
        if random.one_in(8) {
            self.plan[caller] = random.below(3) as usize;
        }
        let mut limits = [0, 1, 2, 3, 4];
        shuffle(random, &mut limits);
        let mut limits = limits[..1 + random.below(4) as usize].to_vec();
        if random.one_in(12) {
            limits[0] = *limits.last().unwrap();
        }
        let mut charge = |limit| {
            let look = [self.charge(limit, caller, Amount::Peek)];
            let level = Decision::new(&look, &model.acquire(&look, now_us)).unwrap();
            let amount = amount(random, level.outcomes());
            let charge = self.charge(limit, caller, amount);
            if random.one_in(if limit == WATCH { 1 } else { 12 }) { charge.shadow() } else { charge }
        };
        limits.into_iter().map(&mut charge).collect()
    }
}

fn shuffle<T>(random: &mut Random, of: &mut [T]) {
    for i in (1..of.len()).rev() {
        of.swap(i, random.below(i as u64 + 1) as usize);
    }
}

/// Mostly takes, with an eye on what the level just allows.
fn amount(random: &mut Random, seen: &[Outcome]) -> Amount {
    let (capacity, remaining) = (seen[0].quota().capacity(), seen[0].remaining().unwrap());
    let tokens = match random.below(16) {
        0 => random.below(2) * u64::MAX,
        1 => capacity + random.below(3),
        2..5 => remaining + random.below(2),
        5..9 => random.magnitude(capacity),
        9..12 => random.magnitude(1 + remaining),
        _ => 1 + random.below(3),
    };
    match random.below(20) {
        0 => Amount::Peek,
        1 | 2 => Amount::Give(tokens),
        3 | 4 => Amount::Spend(tokens),
        _ => Amount::Take(tokens),
    }
}

/// Mostly a short pause or none, at times one until a wait or a life that was told is over, give or take a microsecond.
fn pause(random: &mut Random, last: Option<&Decision>) -> Duration {
    let told = match (random.below(20), last) {
        (0..4, Some(last)) => last.retry_after(),
        (4, Some(last)) => last.reset_after(),
        _ => None,
    };
    let us = match (told, random.below(20)) {
        (Some(told), _) => (told.as_micros() as u64 + random.below(3)).saturating_sub(1),
        (None, 0) => random.magnitude(24 * 3_600_000_000),
        (None, 1..6) => random.magnitude(1_000),
        (None, 6..11) => random.magnitude(2_000_000),
        _ => 0,
    };
    Duration::from_micros(us).min(30 * 24 * HOUR)
}

/// `HISTORIES_SEED` sets another first seed.
fn seeds(histories: u64) -> std::ops::Range<u64> {
    let first = std::env::var("HISTORIES_SEED").map_or(1, |text| text.parse().expect("a number"));
    first..first + histories
}

#[tokio::test(start_paused = true)]
async fn memory_redis_and_the_model_say_and_store_the_same_in_any_history_of_requests_with_several_limits() {
    let mut three = Three::start();
    let mut allowed = 0;
    for seed in seeds(40) {
        let mut random = Random(seed);
        let mut api = Api::new(&mut random);
        three.begin(format!("seed {seed}"), api.buckets());
        let plans = api.plans.concat();
        let mut last: Option<Decision> = None;
        for _ in 0..500 {
            advance(pause(&mut random, last.as_ref())).await;
            let now_us = START_US + three.started.elapsed().as_micros() as u64;
            let charges = api.request(&mut random, &mut three.pair.model, now_us);
            let decision = three.ask(&charges).await;
            allowed += usize::from(decision.is_allowed());
            last = Some(decision);
            if random.one_in(20) {
                three.look(&[*random.pick(&plans)]).await;
            }
        }
        three.look(&plans).await;
        assert_eq!(three.memory.overflowed(), 0);
    }
    let Pair { denials, extended, .. } = three.pair;
    assert!(allowed > 5_000 && denials > 5_000 && extended > 500, "{allowed}, {denials}, {extended}");
}

#[tokio::test]
async fn a_denial_changes_no_sibling_though_the_clock_goes_to_and_fro_and_plans_change() {
    let mut pair = Pair::start();
    for seed in seeds(20) {
        let mut random = Random(seed);
        let mut api = Api::new(&mut random);
        pair.begin(format!("seed {seed}"), api.buckets());
        let mut now_us = START_US + random.below(1 << 40);
        for _ in 0..500 {
            now_us = tick(&mut random, now_us);
            let charges = api.request(&mut random, &mut pair.model, now_us);
            pair.ask(&charges, now_us).await;
        }
    }
    let Pair { denials, extended, brought_back, .. } = pair;
    assert!(denials > 3_000 && extended > 500 && brought_back > 300, "{denials}, {extended}, {brought_back}");
}

// Many callers at once.

/// What each of them does: takes 1 to 9 tokens from all limits in one step, in any order of the limits, and at times
/// gives some of them back, or looks. The tokens that it has in the end.
async fn work<S: Store>(store: S, limits: Vec<Charge>, seed: u64, requests: u64) -> u64 {
    let mut random = Random(seed);
    let mut held = 0;
    for i in 0..requests {
        let cost = 1 + random.below(9);
        let amount = match random.below(8) {
            0 if cost <= held => Amount::Give(cost),
            1 => Amount::Peek,
            _ => Amount::Take(cost),
        };
        let mut charges = with(&limits, amount);
        shuffle(&mut random, &mut charges);
        let decision = store.acquire(&charges).await.unwrap();
        match amount {
            Amount::Take(_) if decision.is_allowed() => held += cost,
            Amount::Give(_) => held -= cost,
            _ => {}
        }
        assert_alike(&decision, &format!("seed {seed}, request {i}: {amount:?} from {} limits", limits.len()));
    }
    held
}

/// Limits that are always charged alike hold the same where they have the same quota, and have lost the same where
/// nothing refills them.
fn assert_alike(decision: &Decision, context: &str) {
    let outcomes = decision.outcomes();
    for a in outcomes {
        for b in outcomes.iter().filter(|b| a.quota() == b.quota()) {
            assert_eq!((a.remaining(), a.reset_after()), (b.remaining(), b.reset_after()), "{context}: {outcomes:?}");
        }
    }
    let mut charged: Vec<_> = outcomes.iter().filter(|outcome| is_slow(outcome.quota())).map(charged).collect();
    charged.dedup();
    assert!(charged.len() <= 1, "{context}: {outcomes:?}");
}

fn is_slow(quota: Quota) -> bool {
    quota.refill() == (1, HOUR)
}

/// What has been taken and not given back, where nothing refills it.
fn charged(outcome: &Outcome) -> u64 {
    outcome.quota().capacity() - outcome.remaining().unwrap()
}

/// So many limits on one key, from which nothing comes back: the first one binds.
fn slow_limits(random: &mut Random, limits: usize) -> Vec<Charge> {
    let capacities = (0..limits as u64).map(|i| if i == 0 { 2_000 } else { 2_000 + random.magnitude(100_000) });
    capacities.enumerate().map(|(i, capacity)| limit(&format!("slow-{i}"), slow(capacity))).collect()
}

/// So many limits on one key, of which one counts what is charged, and the others are alike and refill quickly.
fn fast_limits(limits: usize) -> Vec<Charge> {
    let fast = Quota::per_second(FAST_RATE).with_capacity(FAST_CAPACITY);
    let counter = limit("counter", slow(600_000));
    std::iter::once(counter).chain((1..limits).map(|i| limit(&format!("fast-{i}"), fast))).collect()
}

const FAST_CAPACITY: u64 = 300;
const FAST_RATE: u64 = 2_000;

fn slow(capacity: u64) -> Quota {
    Quota::new(1, HOUR).with_capacity(capacity)
}

fn limit(limit: &str, quota: Quota) -> Charge {
    Charge::new(name(limit), BucketKey::id("caller"), quota, Amount::Peek)
}

/// What was admitted is what was charged, to each of the limits.
async fn assert_charged<S: Store>(store: &S, limits: &[Charge], admitted: u64, context: &str) {
    let decision = store.acquire(limits).await.unwrap();
    assert_alike(&decision, context);
    for outcome in decision.outcomes().iter().filter(|outcome| is_slow(outcome.quota())) {
        assert_eq!(charged(outcome), admitted, "{context}: {}", outcome.limit());
    }
}

/// No more than these are left for all of the limits, and no fewer.
async fn assert_drained_by<S: Store>(store: &S, limits: &[Charge], left: u64, context: &str) {
    for (cost, passes) in [(left + 1, false), (left, true), (1, false)] {
        let decision = store.acquire(&with(limits, Amount::Take(cost))).await.unwrap();
        assert_eq!(decision.is_allowed(), passes, "{context}: {cost} of {left}");
    }
}

/// Rule 2, with what was given back taken off on both sides.
fn assert_bounded(admitted: u64, started: Instant, context: &str) {
    let most = FAST_CAPACITY + (started.elapsed().as_secs_f64() * FAST_RATE as f64) as u64 + 1;
    assert!((FAST_CAPACITY / 2..=most).contains(&admitted), "{context}: {admitted} of {most}");
}

fn in_memory(limits: &[Charge], seed: u64) -> (MemoryStore, u64) {
    let store = MemoryStore::new();
    let admitted = in_16_threads(|thread| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(work(store.clone(), limits.to_vec(), seed + thread, 1_000))
    });
    (store, admitted)
}

/// Two instances, each with eight tasks. The store is of a third one, which remembers no denial: what is given back at
/// one instance is noticed at another only when it asks again, up to a second after a denial.
async fn in_redis(server: &Server, limits: &[Charge], seed: u64) -> (RedisStore, u64) {
    server.query(&["FLUSHALL"]);
    let instances =
        [RedisStore::connect(&server.url()).await.unwrap(), RedisStore::connect(&server.url()).await.unwrap()];
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let store = instances[task as usize % 2].clone();
        tasks.spawn(work(store, limits.to_vec(), seed + task, 150));
    }
    let admitted = tasks.join_all().await.into_iter().sum();
    (RedisStore::connect(&server.url()).await.unwrap(), admitted)
}

#[tokio::test]
async fn threads_on_one_memory_store_charge_all_limits_of_a_request_what_they_admit() {
    for limits in 2..=4 {
        let seed = 100 * limits as u64;
        let context = format!("{limits} limits, seed {seed}");
        let slow = slow_limits(&mut Random(seed), limits);
        let (store, admitted) = in_memory(&slow, seed);
        assert_charged(&store, &slow, admitted, &context).await;
        assert_drained_by(&store, &slow, 2_000 - admitted, &context).await;

        let (fast, started) = (fast_limits(limits), Instant::now());
        let (store, admitted) = in_memory(&fast, seed);
        assert_bounded(admitted, started, &context);
        assert_charged(&store, &fast, admitted, &context).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_of_two_instances_on_one_redis_charge_all_limits_of_a_request_what_they_admit() {
    let server = Server::start();
    for limits in 2..=4 {
        let seed = 100 * limits as u64;
        let context = format!("{limits} limits, seed {seed}");
        let slow = slow_limits(&mut Random(seed), limits);
        let (store, admitted) = in_redis(&server, &slow, seed).await;
        assert_charged(&store, &slow, admitted, &context).await;
        assert_drained_by(&store, &slow, 2_000 - admitted, &context).await;

        let (fast, started) = (fast_limits(limits), Instant::now());
        let (store, admitted) = in_redis(&server, &fast, seed).await;
        assert_bounded(admitted, started, &context);
        assert_charged(&store, &fast, admitted, &context).await;
    }
}

// Rollouts.

/// Old and new instances, as they ask one after the other: 10 and 100 tokens on one key.
fn rollout(of: usize) -> [Charge; 1] {
    let quota = Quota::per_day(1).with_capacity([10, 100][of]);
    [Charge::new(name("rollout"), BucketKey::id("caller"), quota, Amount::Take(1))]
}

#[tokio::test(start_paused = true)]
async fn two_capacities_on_one_memory_store_hand_out_no_more_than_the_larger_in_any_order() {
    for seed in seeds(100) {
        let mut random = Random(seed);
        let store = MemoryStore::new();
        let share = random.below(11);
        let mut admitted = 0;
        for _ in 0..400 {
            let of = usize::from(random.below(10) < share);
            admitted += u64::from(ask(&store, &rollout(of)).is_allowed());
        }
        assert!((10..=100).contains(&admitted), "seed {seed}: {admitted}");
        assert!(!ask(&store, &rollout(1)).is_allowed(), "seed {seed}: nothing is left for either");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_instances_with_different_capacities_hand_out_no_more_than_the_larger_at_once() {
    let server = Server::start();
    let instances =
        [RedisStore::connect(&server.url()).await.unwrap(), RedisStore::connect(&server.url()).await.unwrap()];
    for round in 0..10 {
        let instances = instances.each_ref().map(|store| store.clone().prefix(&format!("round-{round}")));
        let mut tasks = JoinSet::new();
        for task in 0..8 {
            let store = instances[task % 2].clone();
            tasks.spawn(async move {
                let mut admitted = 0;
                for _ in 0..50 {
                    admitted += u64::from(store.acquire(&rollout(task % 2)).await.unwrap().is_allowed());
                }
                admitted
            });
        }
        let admitted: u64 = tasks.join_all().await.into_iter().sum();
        assert!((10..=100).contains(&admitted), "{admitted}");
    }
}

/// Two or three quotas that differ in rate and capacity, and the larger of all: the largest capacity at the highest rate.
fn changing(random: &mut Random) -> (Vec<Quota>, Quota) {
    let rates = [(1, 3), (1, 1), (89, 7), (10, 1), (97, 3), (300, 7), (1_000, 1), (3_001, 2)];
    let of = |capacity, (n, seconds)| Quota::from_parts(capacity, n, Duration::from_secs(seconds));
    let picked: Vec<_> = (0..2 + random.below(2)).map(|_| (random.magnitude(200), random.below(8) as usize)).collect();
    let quotas = picked.iter().map(|(capacity, rate)| of(*capacity, rates[*rate])).collect();
    let capacity = picked.iter().map(|(capacity, _)| *capacity).max().unwrap();
    let fastest = picked.iter().map(|(_, rate)| *rate).max_by(|a, b| {
        let ((n, p), (m, q)) = (rates[*a], rates[*b]);
        (n * q).cmp(&(m * p))
    });
    (quotas, of(capacity, rates[fastest.unwrap()]))
}

#[tokio::test(start_paused = true)]
async fn cutting_and_raising_a_quota_back_and_forth_never_gains_a_token_on_either_store() {
    let mut three = Three::start();
    let on = |quota, amount| [Charge::new(name("changing"), BucketKey::global(), quota, amount)];
    let (mut allowed, mut gone) = (0, 0);
    for seed in seeds(60) {
        let mut random = Random(seed);
        let (quotas, larger) = changing(&mut random);
        three.begin(format!("seed {seed}"), on(larger, Amount::Peek).to_vec());
        let (n, per) = larger.refill();
        // What the larger quota alone would hold by now, were all the same admitted.
        let mut most = Exact::full((larger.capacity(), n, per.as_micros() as u64), START_US);
        for step in 0..150 {
            let us = if random.one_in(3) { 0 } else { random.magnitude(30_000) };
            advance(Duration::from_micros(us)).await;
            let now_us = START_US + three.started.elapsed().as_micros() as u64;
            let context = format!("seed {seed}, step {step}: {quotas:?}");
            // A change alone, or one that takes.
            let before = three.ask(&on(larger, Amount::Peek)).await.remaining().unwrap();
            let cost = if random.one_in(2) { 0 } else { random.magnitude(1 + before / 2) };
            let amount = if cost == 0 { Amount::Spend(0) } else { Amount::Take(cost) };
            let decision = three.ask(&on(*random.pick(&quotas), amount)).await;
            let taken = if decision.is_allowed() { cost } else { 0 };
            let after = three.ask(&on(larger, Amount::Peek)).await.remaining().unwrap();
            assert!(after + taken <= before, "{context}: {before}, {taken} taken, then {after}");
            most.to(now_us);
            assert!(most.charge(Amount::Take(taken)), "{context}: {taken} taken");
            assert!(after <= most.remaining(), "{context}: {after}");
            allowed += usize::from(taken > 0);
            gone += usize::from(before < larger.capacity() / 4);
        }
    }
    assert!(allowed > 500 && gone > 2_000, "{allowed}, {gone}");
}

#[tokio::test(start_paused = true)]
async fn a_denied_request_under_a_smaller_slower_quota_leaves_the_siblings_of_a_larger_one_untouched() {
    let mut three = Three::start();
    let large = Quota::per_second(10).with_capacity(100);
    let small = Quota::per_second(1).with_capacity(10);
    let on = |limit: &str, quota, amount| Charge::new(name(limit), BucketKey::global(), quota, amount);
    let empty = Quota::per_day(1);
    three.begin("siblings".into(), vec![on("a", large, Amount::Peek), on("b", empty, Amount::Peek)]);
    three.ask(&[on("a", large, Amount::Take(50)), on("b", empty, Amount::Take(1))]).await;
    let before = three.ask(&[on("a", large, Amount::Peek)]).await.remaining();
    let denied = three.ask(&[on("b", empty, Amount::Take(1)), on("a", small, Amount::Take(1))]).await;
    assert!(!denied.is_allowed());
    let after = three.ask(&[on("a", large, Amount::Peek)]).await.remaining();
    assert_eq!(before, after);
}
