//! Checks that travel together in one call: what each is told is what a call of its own would have given, and what goes
//! wrong with one, or with the call, is nobody else's matter.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::task::{JoinSet, yield_now};
use tokio::time::{Instant, sleep, timeout};
use tower_token_bucket::conformance::Model;
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, Health, LimitName, Quota, RedisAcquire, RedisErrorKind, RedisStore, Reply,
    Store,
};

use crate::losses::{charged, until};
use crate::proxy::{Mode, Proxy};
use crate::redis_store::Accounted;
use crate::server::{Server, Value};
use crate::topology::Cluster;

const HOUR: Duration = Duration::from_secs(3600);
/// Longer than anything takes on a busy machine; only ever waited for when a test fails.
const LONG: Duration = Duration::from_secs(20);
const ON_THE_WIRE: usize = 64;

/// Tokens of which none comes back while a test runs.
fn slow(capacity: u64) -> Quota {
    Quota::new(1, HOUR).with_capacity(capacity)
}

fn charge(limit: &str, key: BucketKey, quota: Quota, amount: Amount) -> Charge {
    Charge::new(LimitName::try_new(limit).unwrap(), key, quota, amount)
}

fn take(limit: &str, quota: Quota, cost: u64) -> Charge {
    charge(limit, BucketKey::global(), quota, Amount::Take(cost))
}

/// One of plenty.
fn one() -> [Charge; 1] {
    [take("plenty", slow(100_000), 1)]
}

/// Whole tokens that are gone from the bucket of [`one`].
fn taken(server: &Server) -> u64 {
    charged(server, "plenty", slow(100_000))
}

fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Polls each once, in order. On one thread no task runs meanwhile: the first is sent, where nobody is on the wire, and the
/// others wait.
fn polled<'a>(store: &RedisStore, requests: impl IntoIterator<Item = &'a [Charge]>) -> Vec<RedisAcquire> {
    let ask = |charges: &[Charge]| {
        // However slow this machine is, none is given up late.
        let mut check = store.acquire_within(charges, LONG);
        assert!(poll_once(&mut check).is_pending());
        check
    };
    requests.into_iter().map(ask).collect()
}

fn polled_ones(store: &RedisStore, checks: usize) -> Vec<RedisAcquire> {
    polled(store, std::iter::repeat_n(&one()[..], checks))
}

/// Lets what waits be sent.
async fn a_moment() {
    for _ in 0..5 {
        yield_now().await;
    }
}

async fn answer(check: RedisAcquire) -> Decision {
    timeout(LONG, check).await.expect("an answer").unwrap()
}

/// A store on a proxy, and a server that knows the script.
async fn through_a_proxy(server: &Server) -> (Proxy, RedisStore) {
    let proxy = Proxy::start(server.port()).await;
    let store = RedisStore::connect(&proxy.url()).await.unwrap();
    assert!(store.acquire(&one()).await.unwrap().is_allowed());
    server.query(&["CONFIG", "RESETSTAT"]);
    (proxy, store)
}

// What they are told.

/// The script with an account: each call appends the server's time, its keys, its arguments and its reply to a list, in
/// the same step.
fn with_an_account(body: &str) -> String {
    // Before the body, which may replace texts by numbers.
    format!(
        "local account_time
        local keys, args = table.concat(KEYS, '|'), table.concat(ARGV, '|')
        local function body()\n{body}\nend
        local reply = body()
        local replies = reply
        if type(reply) ~= 'string' then
            replies = {{}}
            for i, value in ipairs(type(reply) == 'table' and reply or {{ reply }}) do
                replies[i] = string.format('%.0f', value)
            end
            replies = table.concat(replies, ' ')
        end
        redis.call('RPUSH', 'account', table.concat({{ account_time[1], account_time[2], keys, args, replies }}, '\\n'))
        return reply"
    )
}

/// A request of the account, with the replies that the server gave.
struct Accounting {
    now_us: u64,
    charges: Vec<Charge>,
    replies: Vec<Reply>,
}

/// The requests of a call, in the order in which the script makes them.
fn requests(entry: &str, known: &HashMap<String, Charge>) -> Vec<Accounting> {
    let lines: Vec<&str> = entry.split('\n').collect();
    let [seconds, micros, keys, args, replies] = lines[..] else { panic!("{entry}") };
    let number = |text: &str| -> i64 { text.parse().unwrap_or_else(|_| panic!("{text} in {entry}")) };
    let now_us = (number(seconds) * 1_000_000 + number(micros)) as u64;
    let keys: Vec<&str> = keys.split('|').collect();
    let args: Vec<&str> = args.split('|').collect();
    let replies: Vec<i64> = replies.split(' ').map(number).collect();
    let charge = |place: usize, values: &[&str]| {
        let quota: Vec<i64> = values[2].trim_matches(':').split(':').map(number).collect();
        let per_us = quota[2] as u64;
        let quota = Quota::from_parts(quota[0] as u64, quota[1] as u64, Duration::from_micros(per_us));
        let tokens = number(values[1]) as u64 / per_us;
        let (shadow, kind) = match values[0].strip_prefix("shadow ") {
            Some(kind) => (true, kind),
            None => (false, values[0]),
        };
        let amount = match kind.split(' ').next().unwrap() {
            "take" => Amount::Take(tokens),
            "refuse" => Amount::Take(quota.capacity() + 1),
            "spend" => Amount::Spend(tokens),
            "give" => Amount::Give(tokens),
            _ => Amount::Peek,
        };
        let known = &known[keys[place]];
        let charge = Charge::new(known.limit().clone(), *known.key(), quota, amount);
        if shadow { charge.shadow() } else { charge }
    };
    let reply = |place: usize| {
        let ahead = replies.get(keys.len() + place).map_or(0, |ahead| *ahead as u64);
        Reply::new(replies[place].div_euclid(2), replies[place].rem_euclid(2) == 1, ahead)
    };
    // Equal takes are named once, and told what the first of them found.
    let nth = |found: Reply, units: i64, nth: i64| {
        let made = (found.level().max(0) / units).min(nth);
        let level = found.level() - made * units;
        let is_made = made == nth && level >= units;
        Reply::new(if is_made { level - units } else { level }, is_made, found.ahead_us())
    };
    let of = |place: usize, values: &[&str]| -> Vec<Accounting> {
        let charges: Vec<_> = values.chunks(5).enumerate().map(|(i, values)| charge(place + i, values)).collect();
        let replies: Vec<_> = (place..place + values.len() / 5).map(reply).collect();
        let Some(times) = values[0].strip_prefix("take ").map(number) else {
            return vec![Accounting { now_us, charges, replies }];
        };
        let reply = |i| vec![nth(replies[0], number(values[1]), i)];
        (0..times).map(|i| Accounting { now_us, charges: charges.clone(), replies: reply(i) }).collect()
    };
    if keys.len() == 1 {
        return of(0, &args);
    }
    let (mut place, mut rest, mut all) = (0, &args[..], Vec::new());
    while place < keys.len() {
        let (count, charges) = (number(rest[0]) as usize, number(rest[1]) as usize);
        for _ in 0..count {
            all.extend(of(place, &rest[2..2 + 5 * charges]));
            place += charges;
        }
        rest = &rest[2 + 5 * charges..];
    }
    all
}

fn key_of(charge: &Charge) -> String {
    format!("tb:v1:{{{}}}:{}", charge.key(), charge.limit())
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Charges of any kind on a few buckets.
fn any_charge(random: &mut Random) -> Charge {
    let quotas = [slow(20), slow(500), Quota::per_second(300).with_capacity(40), Quota::new(7, 3 * HOUR)];
    let limit = random.below(4) as usize;
    let key = if random.below(2) == 0 { BucketKey::global() } else { BucketKey::id("one") };
    // Now and then as during a rollout, where no bucket is gone and forgotten meanwhile.
    let quota = if limit == 1 && random.below(8) == 0 { slow(300) } else { quotas[limit] };
    let amount = match random.below(10) {
        0 => Amount::Spend(random.below(5)),
        1 => Amount::Give(random.below(4)),
        2 => Amount::Peek,
        3 => Amount::Take(quota.capacity() + 1),
        _ => Amount::Take(1 + random.below(3)),
    };
    let charge = charge(["a", "b", "c", "d"][limit], key, quota, amount);
    if random.below(6) == 0 { charge.shadow() } else { charge }
}

/// What a decision says, to the bit.
fn said(decision: &Decision) -> String {
    format!("{} {:?} {:?}", decision.is_allowed(), decision.retry_after(), decision.outcomes())
}

const TASKS: usize = 24;
const EACH: usize = 60;

fn mark(task: usize, i: usize) -> Charge {
    charge("mark", BucketKey::id(format!("{task} {i}")), slow(1), Amount::Peek)
}

/// All requests are the model's, one after the other in the order in which the server made them, at its own time; and that
/// order agrees with when they were asked and answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_requests_of_many_tasks_are_what_one_call_each_would_have_given_in_an_order_that_clients_saw() {
    let server = Server::start();
    // Each request is to be in a call.
    let store =
        RedisStore::from_connection(Accounted::new(&server.url(), with_an_account).await).remember_denials(false);
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let store = store.clone();
        tasks.spawn(async move {
            let mut random = Random(0x9e37_79b9 + task as u64);
            let mut seen = Vec::new();
            for i in 0..EACH {
                // Of one charge, such as most are, and of several with a mark to know them by.
                let several = random.below(2) == 0;
                let mut charges: Vec<_> =
                    (0..if several { 1 + random.below(3) } else { 1 }).map(|_| any_charge(&mut random)).collect();
                if several {
                    charges.push(mark(task, i));
                }
                let started = Instant::now();
                let decision = store.acquire(&charges).await.unwrap();
                seen.push((several.then_some((task, i)), charges, started, Instant::now(), said(&decision)));
            }
            seen
        });
    }
    let seen = tasks.join_all().await.concat();

    let mut known = HashMap::new();
    for limit in ["a", "b", "c", "d"] {
        for key in [BucketKey::global(), BucketKey::id("one")] {
            let charge = charge(limit, key, slow(1), Amount::Peek);
            known.insert(key_of(&charge), charge);
        }
    }
    let marks: BTreeMap<String, (usize, usize)> =
        (0..TASKS).flat_map(|task| (0..EACH).map(move |i| (key_of(&mark(task, i)), (task, i)))).collect();
    for (key, (task, i)) in &marks {
        known.insert(key.clone(), mark(*task, *i));
    }
    let Value::Array(account) = server.query(&["LRANGE", "account", "0", "-1"]) else { panic!("no account") };
    let (calls, requests): (usize, Vec<_>) =
        (account.len(), account.iter().flat_map(|entry| requests(entry.text().unwrap(), &known)).collect());
    println!("{} requests in {calls} calls", requests.len());
    assert_eq!(requests.len(), TASKS * EACH);
    assert!(calls < requests.len() / 2, "they travel together");

    let mut model = Model::default();
    let mut told: BTreeMap<String, i64> = BTreeMap::new();
    let by_mark: HashMap<_, _> = seen
        .iter()
        .filter_map(|(mark, charges, started, ended, said)| Some(((*mark)?, (charges, started, ended, said))))
        .collect();
    let mut latest = None;
    for request in &requests {
        let right = model.acquire(&request.charges, request.now_us);
        assert_eq!(right, request.replies, "{:?}", request.charges);
        let decision = Decision::new(&request.charges, &right).unwrap();
        let last = request.charges.last().unwrap();
        match marks.get(&key_of(last)) {
            Some(mark) => {
                let (charges, started, ended, answer) = by_mark[mark];
                assert_eq!(charges, &request.charges);
                assert_eq!(answer, &said(&decision));
                assert!(
                    latest.is_none_or(|latest| *ended >= latest),
                    "answered before one was asked that is before it"
                );
                latest = latest.max(Some(*started));
            }
            None => *told.entry(format!("{:?} {}", request.charges, said(&decision))).or_default() += 1,
        }
    }
    for (mark, charges, _, _, said) in &seen {
        if mark.is_none() {
            *told.entry(format!("{charges:?} {said}")).or_default() -= 1;
        }
    }
    let wrong: Vec<_> = told.iter().filter(|(_, count)| **count != 0).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    for charge in known.values().filter(|charge| ["a", "b", "d"].contains(&charge.limit().as_str())) {
        let value = server.query(&["GET", &key_of(charge)]);
        assert_eq!(value.text().map(str::to_owned), model.state(charge), "{charge:?}");
    }
}

/// Whoever comes first is served first: those that wait are decided in the order in which they were asked.
#[tokio::test]
async fn what_waits_is_decided_first_come_first_served_whatever_is_merged() {
    for seed in 1..=40 {
        let server = Server::start();
        let (_proxy, store) = through_a_proxy(&server).await;
        let mut random = Random(seed);
        let quotas = [slow(30), slow(12)];
        let any = |random: &mut Random| {
            let which = random.below(3) as usize;
            let amount = match random.below(6) {
                0 => Amount::Give(random.below(3)),
                1 => Amount::Spend(random.below(3)),
                _ => Amount::Take(1 + random.below(3)),
            };
            charge(["x", "y", "z"][which], BucketKey::global(), quotas[random.below(2) as usize], amount)
        };
        let asked: Vec<Vec<Charge>> =
            (0..ON_THE_WIRE).map(|_| (0..1 + random.below(2)).map(|_| any(&mut random)).collect()).collect();
        let checks = polled(&store, asked.iter().map(|charges| &charges[..]));
        let mut model = Model::default();
        for (charges, check) in asked.iter().zip(checks) {
            let right = Decision::new(charges, &model.acquire(charges, 1_000_000_000)).unwrap();
            let decision = answer(check).await;
            let levels = |of: &Decision| -> Vec<_> {
                of.outcomes().iter().map(|outcome| (outcome.is_allowed(), outcome.remaining())).collect()
            };
            assert_eq!((decision.is_allowed(), levels(&decision)), (right.is_allowed(), levels(&right)), "seed {seed}");
        }
        // The first by itself, and all others.
        assert_eq!(server.calls("evalsha"), 2);
    }
}

/// Four instances with 64 tasks each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_is_exact_to_the_token_in_few_calls_and_fair() {
    const CAPACITY: u64 = 5000;
    let server = Server::start();
    let lasts = Duration::from_secs(std::env::var("HOT_SECS").ok().and_then(|secs| secs.parse().ok()).unwrap_or(2));
    let mut stores = Vec::new();
    for _ in 0..4 {
        // Nothing but gathering keeps the calls few.
        stores.push(RedisStore::connect(&server.url()).await.unwrap().remember_denials(false));
    }
    let until = Instant::now() + lasts;
    let mut tasks = JoinSet::new();
    for store in &stores {
        for _ in 0..64 {
            let store = store.clone();
            tasks.spawn(async move {
                let (mut admitted, mut asked, mut longest) = (0, 0, Duration::ZERO);
                let started = Instant::now();
                while Instant::now() < until {
                    let since = Instant::now();
                    admitted += u64::from(store.acquire(&[take("hot", slow(CAPACITY), 1)]).await.unwrap().is_allowed());
                    asked += 1;
                    longest = longest.max(since.elapsed());
                }
                (admitted, asked, started.elapsed() / asked, longest)
            });
        }
    }
    let tasks = tasks.join_all().await;
    let admitted: u64 = tasks.iter().map(|task| task.0).sum();
    let asked: u32 = tasks.iter().map(|task| task.1).sum();
    let calls = server.calls("evalsha") as f64 / f64::from(asked);
    let mut waits: Vec<_> = tasks.iter().map(|task| task.2).collect();
    waits.sort();
    let (median, most) = (waits[waits.len() / 2], waits[waits.len() - 1]);
    let longest = tasks.iter().map(|task| task.3).max().unwrap();
    println!(
        "{asked} asked in {lasts:?}, {admitted} admitted, {calls:.4} calls per request; a task waits {median:?} in the \
         median, {most:?} at most ({:.2} x), and {longest:?} once",
        most.as_secs_f64() / median.as_secs_f64()
    );
    assert!(asked > CAPACITY as u32, "{asked}");
    assert_eq!((admitted, charged(&server, "hot", slow(CAPACITY))), (CAPACITY, CAPACITY));
    assert!(calls < 0.1, "{calls}");
    for store in &stores {
        assert_eq!((store.health(), store.connections()), (Health::Closed, Some(1)));
    }
}

// Callers that leave, or that nobody polls.

#[tokio::test]
async fn those_that_leave_while_they_wait_are_not_charged_and_those_that_were_sent_are() {
    let server = Server::start();
    let (proxy, store) = through_a_proxy(&server).await;
    proxy.set(Mode::Hold).await;
    let mut checks = polled_ones(&store, 21);
    a_moment().await;
    until("both calls are made", || server.calls("evalsha") == 2).await;
    let mut waiting = polled_ones(&store, 20);
    // Half of those that are on the wire, the first too, and half of those that wait.
    for place in (0..checks.len()).rev().step_by(2) {
        drop(checks.remove(place));
    }
    for place in (0..waiting.len()).rev().step_by(2) {
        drop(waiting.remove(place));
    }
    a_moment().await;
    proxy.set(Mode::Pass).await;
    for check in checks.into_iter().chain(waiting) {
        assert!(answer(check).await.is_allowed());
    }
    assert_eq!(taken(&server), 1 + 21 + 10);
    assert_eq!(server.calls("evalsha"), 3);
    // No place is lost.
    for check in polled_ones(&store, 3 * ON_THE_WIRE) {
        assert!(answer(check).await.is_allowed());
    }
    assert_eq!(taken(&server), 1 + 21 + 10 + 3 * ON_THE_WIRE as u64);
    assert_eq!(store.health(), Health::Closed);
}

#[tokio::test]
async fn a_caller_that_is_polled_once_and_then_left_holds_nobody_up() {
    let server = Server::start();
    let (_proxy, store) = through_a_proxy(&server).await;
    // One by itself, and some that wait: none of them is polled again until all others are answered.
    let left = polled_ones(&store, 10);
    for i in 1..=100 {
        assert!(answer(store.acquire(&one())).await.is_allowed(), "{i}");
    }
    for check in left {
        assert!(answer(check).await.is_allowed());
    }
    assert_eq!(taken(&server), 1 + 110);
}

#[tokio::test]
async fn as_many_as_may_be_on_the_wire_are_in_a_call_and_no_more() {
    let server = Server::start();
    let (proxy, store) = through_a_proxy(&server).await;
    proxy.set(Mode::Hold).await;
    let checks = polled_ones(&store, 1 + 3 * ON_THE_WIRE);
    a_moment().await;
    until("both calls are made", || server.calls("evalsha") == 2).await;
    sleep(Duration::from_millis(20)).await;
    assert_eq!(taken(&server), 1 + ON_THE_WIRE as u64, "one by itself, and 63");
    // They leave, and what was not sent is not charged.
    drop(checks);
    proxy.set(Mode::Pass).await;
    assert!(answer(store.acquire(&one())).await.is_allowed());
    assert_eq!(taken(&server), 1 + ON_THE_WIRE as u64 + 1);
}

/// Where an answer takes long others do not wait for it.
#[tokio::test]
async fn a_call_that_takes_long_does_not_hold_others_up() {
    let server = Server::start();
    let (proxy, store) = through_a_proxy(&server).await;
    proxy.set(Mode::Hold).await;
    let mut checks = Vec::new();
    for calls in 1..=10 {
        checks.extend(polled_ones(&store, 1));
        a_moment().await;
        until("one more call is made", || server.calls("evalsha") == calls).await;
        sleep(Duration::from_millis(5)).await;
    }
    proxy.set(Mode::Pass).await;
    for check in checks {
        assert!(answer(check).await.is_allowed());
    }
    assert_eq!(taken(&server), 1 + 10);
}

// What goes wrong.

#[tokio::test]
async fn a_foreign_value_is_an_error_for_those_in_a_call_that_name_its_key_and_for_no_others() {
    let server = Server::start();
    let (_proxy, store) = through_a_proxy(&server).await;
    for set in [&["SET", "garbage"][..], &["LPUSH", "a"]] {
        server.query(&[set[0], "tb:v1:{global}:bad", set[1]]);
        let [bad, good, other] = ["bad", "good", "other"].map(|limit| take(limit, slow(1000), 1));
        let requests = [
            vec![good.clone()],
            vec![bad.clone()],
            vec![good.clone(), bad.clone()],
            vec![other.clone(), good.clone()],
            vec![bad.clone(), bad],
            vec![other],
            vec![good],
        ];
        let asked: Vec<_> = (0..60).map(|i| &requests[i % requests.len()][..]).collect();
        let calls = server.calls("evalsha");
        let failures = store.failures(RedisErrorKind::Bucket);
        let mut errors = 0;
        for (charges, check) in asked.iter().zip(polled(&store, asked.iter().copied())) {
            let names_it = charges.iter().any(|charge| charge.limit().as_str() == "bad");
            match timeout(LONG, check).await.expect("an answer") {
                Ok(decision) => assert!(decision.is_allowed() && !names_it),
                Err(error) => {
                    assert!(names_it && error.kind() == RedisErrorKind::Bucket, "{error}");
                    errors += 1;
                }
            }
        }
        assert!(server.calls("evalsha") - calls <= 2);
        assert_eq!(store.failures(RedisErrorKind::Bucket) - failures, errors);
        assert_eq!(store.health(), Health::Closed);
        let each = |limit| charged(&server, limit, slow(1000));
        let named = |limit: &str| {
            let is = |charges: &&&[Charge]| {
                charges.iter().any(|charge| charge.limit().as_str() == limit)
                    && charges.iter().all(|charge| charge.limit().as_str() != "bad")
            };
            asked.iter().filter(is).count() as u64
        };
        assert_eq!((each("good"), each("other")), (named("good"), named("other")));
        server.query(&["FLUSHALL"]);
    }
}

#[tokio::test]
async fn where_the_script_is_gone_all_in_a_call_are_sent_once_more_together() {
    let server = Server::start();
    let (_proxy, store) = through_a_proxy(&server).await;
    for round in 1..=5 {
        server.query(&["SCRIPT", "FLUSH"]);
        for check in polled_ones(&store, 50) {
            assert!(answer(check).await.is_allowed());
        }
        assert_eq!(taken(&server), 1 + 50 * round);
        // The first by itself and the others both find it gone.
        assert_eq!((server.calls("evalsha"), server.calls("eval")), (2 * round, 2 * round));
        a_moment().await;
    }
}

#[tokio::test]
async fn a_connection_that_is_cut_is_lost_for_all_in_a_call_and_charges_each_once() {
    let server = Server::start();
    let (proxy, store) = through_a_proxy(&server).await;
    let mut admitted = 0;
    for round in 1..=3 {
        proxy.set(Mode::Hold).await;
        let sent = polled_ones(&store, 30);
        let before = 1 + 30 * (round - 1) + admitted;
        a_moment().await;
        until("all calls are made", || taken(&server) == before + 30).await;
        let waiting = polled_ones(&store, 10);
        proxy.cut();
        for check in sent {
            let error = timeout(LONG, check).await.expect("an end").unwrap_err();
            assert_eq!(error.kind(), RedisErrorKind::Lost, "{error}");
        }
        proxy.set(Mode::Pass).await;
        // Those that were not sent yet go on the next connection, or find this one closed.
        for check in waiting {
            match timeout(LONG, check).await.expect("an end") {
                Ok(decision) => admitted += u64::from(decision.is_allowed()),
                Err(error) => assert_eq!(error.kind(), RedisErrorKind::Lost, "{error}"),
            }
        }
        assert_eq!(taken(&server), 1 + 30 * round + admitted);
        assert_eq!(store.failures(RedisErrorKind::Lost), 41 * round - 1 - admitted);
        // One loss is one failure.
        assert_eq!(store.health(), Health::Closed);
        assert!(answer(store.acquire(&one())).await.is_allowed());
        admitted += 1;
        assert_eq!(store.connections(), Some(1 + round));
        a_moment().await;
    }
}

/// The task that would have sent them ends with its runtime.
#[test]
fn checks_of_another_runtime_are_sent_when_that_of_the_call_ends() {
    let server = Server::start();
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    // The connection's own, the one whose task sends, and the one that waits.
    let (home, other, first) =
        (Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(), runtime(), runtime());
    let (proxy, store) = home.block_on(through_a_proxy(&server));
    home.block_on(proxy.set(Mode::Hold));
    let sent = first.block_on(async {
        let sent = polled_ones(&store, 5);
        a_moment().await;
        sent
    });
    let waiting = other.block_on(async {
        until("both calls are made", || server.calls("evalsha") == 2).await;
        polled_ones(&store, 5)
    });
    drop(first);
    home.block_on(proxy.set(Mode::Pass));
    other.block_on(async {
        for check in waiting {
            assert!(answer(check).await.is_allowed());
        }
        // Nobody can tell what became of those that the task had sent.
        for (i, check) in sent.into_iter().enumerate() {
            match timeout(LONG, check).await.expect("an end") {
                Ok(decision) => assert!(i == 0 && decision.is_allowed()),
                Err(error) => assert_eq!(error.kind(), RedisErrorKind::Lost, "{error}"),
            }
        }
        assert_eq!(taken(&server), 1 + 10);
        // No place is lost.
        for _ in 0..2 * ON_THE_WIRE {
            assert!(answer(store.acquire(&one())).await.is_allowed());
        }
    });
}

// Clusters.

#[tokio::test]
async fn in_a_cluster_those_of_a_slot_share_a_call_and_those_of_others_go_beside_it() {
    let cluster = Cluster::start(3, 0);
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let keys: Vec<_> = (0..6).map(|i| BucketKey::id(format!("several {i}"))).collect();
    let take = |key: BucketKey| [charge("slots", key, slow(1000), Amount::Take(1))];
    // Makes the script known everywhere.
    for key in &keys {
        assert!(answer(store.acquire(&take(*key))).await.is_allowed());
    }
    let known = cluster.calls("evalsha");
    let asked: Vec<_> = (0..60).map(|i| take(keys[i % keys.len()])).collect();
    for check in polled(&store, asked.iter().map(|charges| &charges[..])) {
        assert!(answer(check).await.is_allowed());
    }
    let calls = cluster.calls("evalsha") - known;
    // One by itself on each node, and one for each slot.
    assert!((6..=9).contains(&calls), "{calls} calls for 60 checks of 6 slots on 3 nodes");
    for key in &keys {
        assert_eq!(answer(store.acquire(&take(*key))).await.remaining(), Some(1000 - 12));
    }
    assert_eq!(cluster.errors("CROSSSLOT") + cluster.errors("MOVED"), 0);
}

#[tokio::test]
async fn a_slot_that_has_moved_is_followed_by_all_in_a_call() {
    let cluster = Cluster::start(3, 0);
    let store = RedisStore::cluster(cluster.urls()).await.unwrap();
    let key = BucketKey::id("moved");
    let slot = cluster.slot(&format!("{{{key}}}"));
    let take = |limit: &str| [charge(limit, key, slow(1000), Amount::Take(1))];
    assert!(answer(store.acquire(&take("a"))).await.is_allowed());
    let owner = (0..3).find(|node| cluster.slots(*node).contains(&slot)).unwrap();
    let to = (owner + 1) % 3;
    cluster.begin_move(slot, owner, to);
    // While it moves: one key has gone, and the other stays, or is nowhere yet.
    cluster.move_key(&format!("tb:v1:{{{key}}}:a"), owner, to);
    let asked: Vec<_> = (0..40).map(|i| take(if i % 2 == 0 { "a" } else { "b" })).collect();
    for check in polled(&store, asked.iter().map(|charges| &charges[..])) {
        assert!(answer(check).await.is_allowed());
    }
    cluster.end_move(slot, owner, to);
    for check in polled(&store, asked.iter().map(|charges| &charges[..])) {
        assert!(answer(check).await.is_allowed());
    }
    assert_eq!(answer(store.acquire(&take("a"))).await.remaining(), Some(1000 - 42));
    assert_eq!(answer(store.acquire(&take("b"))).await.remaining(), Some(1000 - 41));
    assert_eq!(store.failures(RedisErrorKind::Unavailable), 0);
}
