//! `lua/token_bucket.lua` on a real server, held against the exact model: the same replies, values and lives.
//!
//! For most of it the clock is an argument: the one `TIME` expression of the script is swapped for two arguments, and
//! what it writes is reported beside its reply and kept without a life, so that simulated hours do not expire it.

use std::fmt::Write as _;
use std::time::Duration;

use tower_token_bucket::conformance::Model;
use tower_token_bucket::{Amount, BucketKey, Charge, Decision, LimitName, Quota, Reply};

use crate::server::{Connection, Server, Value, encode};

const SCRIPT: &str = include_str!("../../lua/token_bucket.lua");
const TIME: &str = "local time = redis.call('TIME')\n";
const SET: &str = "redis.pcall('SET', ";
/// A time of 16 digits, as the times of this century are.
pub(crate) const START_US: u64 = 1_764_456_789_000_000;

/// The script with the clock as its last two arguments. It answers with its reply, and then with the key, the value and
/// the life of each write.
fn with_a_clock() -> String {
    assert_eq!(SCRIPT.matches("'TIME'").count(), 1, "the clock is read in one place");
    assert_eq!(SCRIPT.matches(TIME).count(), 1, "the clock is read on a line of its own");
    assert_eq!(SCRIPT.matches("'SET'").count(), SCRIPT.matches(SET).count(), "writes all look alike");
    let body = SCRIPT.replace(TIME, "local time = { ARGV[#ARGV - 1], ARGV[#ARGV] }\n").replace(SET, "set(");
    format!(
        "local written = {{}}
        local function set(key, value, px, life)
            assert(px == 'PX')
            for _, text in ipairs({{ key, value, string.format('%.17g', life) }}) do written[#written + 1] = text end
            return redis.call('SET', key, value)
        end
        local function body()
            {body}
        end
        return {{ body(), written }}"
    )
}

/// One call of the script.
#[derive(Clone, Debug, Default)]
struct Call {
    now_us: u64,
    /// Requests that differ in their buckets only, run after run.
    runs: Vec<Vec<Vec<Charge>>>,
    /// Each of them so many times, but named once.
    times: usize,
}

impl Call {
    fn new(now_us: u64, charges: &[Charge]) -> Self {
        Self { now_us, runs: vec![vec![charges.to_vec()]], times: 1 }
    }

    fn requests(&self) -> impl Iterator<Item = &Vec<Charge>> {
        self.runs.iter().flatten()
    }

    fn charges(&self) -> impl Iterator<Item = &Charge> {
        self.requests().flatten()
    }

    /// KEYS with their number before them, and ARGV.
    fn args(&self) -> Vec<String> {
        let keys: Vec<_> = self.charges().map(key).collect();
        let single = keys.len() == 1;
        let mut args = vec![keys.len().to_string()];
        args.extend(keys);
        for run in &self.runs {
            if !single {
                args.extend([run.len().to_string(), run[0].len().to_string()]);
            }
            let first = args.len();
            run[0].iter().for_each(|charge| push_charge(&mut args, charge));
            if self.times > 1 {
                args[first] = format!("{} {}", args[first], self.times);
            }
        }
        args
    }

    /// EVALSHA on the script [with a clock](with_a_clock).
    fn encode(&self, to: &mut Vec<u8>, sha: &str) {
        let mut command = vec!["EVALSHA".to_owned(), sha.to_owned()];
        command.extend(self.args());
        command.extend([(self.now_us / 1_000_000).to_string(), (self.now_us % 1_000_000).to_string()]);
        encode(to, &command);
    }
}

fn key(charge: &Charge) -> String {
    charge.limit().to_string()
}

/// The five arguments of a charge, as the script's head describes them.
fn push_charge(args: &mut Vec<String>, charge: &Charge) {
    let quota = charge.quota();
    let (n, per) = quota.refill();
    let (c, p) = (quota.capacity(), per.as_micros() as u64);
    let (kind, tokens) = match charge.amount() {
        Amount::Take(tokens) if tokens > c => ("refuse", 0),
        Amount::Take(tokens) => ("take", tokens),
        Amount::Spend(tokens) => ("spend", tokens),
        Amount::Give(tokens) => ("give", tokens),
        _ => ("peek", 0),
    };
    args.push(format!("{}{kind}", if charge.is_shadow() { "shadow " } else { "" }));
    args.push((tokens.min(2 * c) * p).to_string());
    args.push(format!(":{c}:{n}:{p}:"));
    args.push((c * p).to_string());
    args.push(n.to_string());
}

/// Reads the script's reply to `charges` charges.
fn replies(value: &Value, charges: usize) -> Vec<Reply> {
    let integers: Vec<i64> = match value {
        Value::Int(reply) => vec![*reply],
        Value::Array(replies) => replies.iter().map(|reply| reply.int().expect("integers only")).collect(),
        Value::Text(replies) => replies.split(' ').map(|reply| reply.parse().expect("integers only")).collect(),
        other => panic!("not a reply: {other:?}"),
    };
    assert!(integers.len() == charges || integers.len() == 2 * charges, "{charges} charges, {integers:?}");
    assert!(integers.len() == charges || integers[charges..].iter().any(|ahead| *ahead > 0), "{integers:?}");
    assert_eq!(matches!(value, Value::Int(_)), integers.len() == 1, "one integer is not an array");
    let ahead = |i: usize| integers.get(charges + i).map_or(0, |ahead| *ahead as u64);
    (0..charges).map(|i| Reply::new(integers[i] >> 1, integers[i] & 1 == 1, ahead(i))).collect()
}

/// A server with both forms of the script loaded.
pub(crate) struct Buckets {
    pub(crate) server: Server,
    pub(crate) connection: Connection,
    sha: String,
    pub(crate) clock_sha: String,
}

impl Buckets {
    pub(crate) fn start() -> Self {
        let server = Server::start();
        let load = |script: &str| server.query(&["SCRIPT", "LOAD", script]).text().expect("a hash").to_owned();
        let (sha, clock_sha) = (load(SCRIPT), load(&with_a_clock()));
        Self { connection: server.connect(), server, sha, clock_sha }
    }

    /// The answers to calls with their own clocks: the reply, and the key, value and life of each write.
    fn answers(&mut self, calls: &[Call]) -> Vec<(Value, Vec<Write>)> {
        let mut commands = Vec::new();
        calls.iter().for_each(|call| call.encode(&mut commands, &self.clock_sha));
        self.connection.send(&commands).expect("the server listens");
        let answers = calls.iter().map(|call| {
            let answer = self.connection.receive().expect("the server answers");
            reply_and_writes(&answer).unwrap_or_else(|| panic!("{answer:?} to {call:?}"))
        });
        answers.collect()
    }

    /// Makes the charges of one request at `now_us`.
    fn acquire(&mut self, now_us: u64, charges: &[Charge]) -> Decision {
        let answers = self.answers(&[Call::new(now_us, charges)]);
        Decision::new(charges, &replies(&answers[0].0, charges.len())).expect("a reply to each charge")
    }

    /// Makes the charges of one request by the server's own clock, as it is done in production.
    fn acquire_now(&self, charges: &[Charge]) -> Value {
        let args = Call::new(0, charges).args();
        let mut command = vec!["EVALSHA", &self.sha];
        command.extend(args.iter().map(String::as_str));
        self.server.command(&command)
    }

    fn value(&self, key: &str) -> Option<String> {
        self.server.query(&["GET", key]).text().map(str::to_owned)
    }

    fn pttl(&self, key: &str) -> i64 {
        self.server.query(&["PTTL", key]).int().expect("an integer")
    }
}

/// The answer of the script [with a clock](with_a_clock).
pub(crate) fn reply_and_writes(answer: &Value) -> Option<(Value, Vec<Write>)> {
    let Value::Array(parts) = answer else { return None };
    let [reply, Value::Array(written)] = &parts[..] else { return None };
    let text = |value: &Value| value.text().map(str::to_owned);
    let write =
        |write: &[Value]| Some(Write { key: text(&write[0])?, value: text(&write[1])?, life_ms: text(&write[2])? });
    Some((reply.clone(), written.chunks_exact(3).map(write).collect::<Option<_>>()?))
}

#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) life_ms: String,
}

fn charge(name: &str, quota: Quota, amount: Amount) -> Charge {
    Charge::new(LimitName::try_new(name).expect("a name"), BucketKey::global(), quota, amount)
}

fn take(quota: Quota, tokens: u64) -> [Charge; 1] {
    [charge("b", quota, Amount::Take(tokens))]
}

/// SplitMix64: small, and the same numbers from the same seed everywhere.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 0 to `n` - 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// 1 to `max`, small ones as often as large ones.
    pub(crate) fn magnitude(&mut self, max: u64) -> u64 {
        let bits = self.below(u64::from(64 - max.leading_zeros()) + 1);
        (1 + self.below(1 << bits)).min(max)
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

/// Ordinary quotas, and those at the bounds of what is accepted.
pub(crate) fn quotas(random: &mut Random) -> Vec<Quota> {
    let second = Duration::from_secs(1);
    let hour = Duration::from_secs(3600);
    let us = Duration::from_micros;
    let mut quotas = vec![
        Quota::per_second(1),
        Quota::per_second(10),
        Quota::per_second(10).with_capacity(100),
        Quota::per_second(10).with_capacity(10_000),
        Quota::per_second(100).with_capacity(10),
        Quota::per_second(1_000_000).with_capacity(1_000_000_000),
        Quota::per_second(300_000),
        Quota::per_second(1500).with_capacity(1),
        Quota::per_minute(100).with_capacity(7),
        Quota::per_hour(1),
        Quota::per_hour(1).with_capacity(625_499),
        Quota::per_day(1).with_capacity(26_062),
        Quota::from_parts(868, 1, Duration::from_secs(30 * 86_400)),
        Quota::from_parts(3, 1, second * 3),
        Quota::from_parts(7, 3, Duration::from_millis(7)),
        // At the bounds: capacity 2^31, n 2^40, p 2^45, capacity x p 2^51.
        Quota::from_parts(1 << 31, 1, us(1)),
        Quota::from_parts(1 << 31, 1 << 40, us(1)),
        Quota::from_parts(1 << 31, (1 << 40) - 1, us(1 << 20)),
        Quota::from_parts(1, 1, us(1 << 45)),
        Quota::from_parts(64, 1, us(1 << 45)),
        Quota::from_parts(64, (1 << 40) - 1, us((1 << 45) - 1)),
        Quota::from_parts(1, 1 << 40, us((1 << 45) - 1)),
    ];
    while quotas.len() < 48 {
        let p = random.magnitude(1 << 45);
        let capacity = random.magnitude(((1 << 51) / p).min(1 << 31));
        let period = if random.one_in(2) { us(p) } else { hour };
        quotas.extend(Quota::try_from_parts(capacity, random.magnitude(1 << 40), period).ok());
    }
    quotas
}

/// What is taken of a bucket in the common case: something that it mostly has. A take of nothing is a peek.
fn takes(random: &mut Random, model: &Model, name: &str, quota: Quota) -> u64 {
    match amount(random, model, name, quota) {
        Amount::Take(tokens) if random.one_in(4) => tokens,
        _ => 1 + random.below(2),
    }
}

/// What is asked of a bucket: anything, with an eye on what its level just allows.
fn amount(random: &mut Random, model: &Model, name: &str, quota: Quota) -> Amount {
    let near = model.state(&charge(name, quota, Amount::Peek)).and_then(|state| {
        let (rest, level) = state.rsplit_once(':')?;
        let (_, p) = rest.rsplit_once(':')?;
        Some((level.parse::<i64>().ok()? / p.parse::<i64>().ok()?).unsigned_abs())
    });
    let tokens = match random.below(12) {
        0 => 0,
        1 => u64::MAX - random.below(2),
        2 => quota.capacity() + random.below(3),
        3..6 => near.unwrap_or(1) + random.below(2),
        6..9 => random.magnitude(quota.capacity()),
        _ => 1 + random.below(3),
    };
    match random.below(16) {
        0 => Amount::Peek,
        1 | 2 => Amount::Give(tokens),
        3 | 4 => Amount::Spend(tokens),
        _ => Amount::Take(tokens),
    }
}

/// Moves the clock: mostly a little forward, at times by up to an hour either way, or by the step that is just kept.
pub(crate) fn tick(random: &mut Random, now_us: u64) -> u64 {
    match random.below(40) {
        0 => now_us - random.magnitude(3_600_000_000),
        1 => now_us - random.magnitude(1_000_100),
        2 => now_us - (999_999 + random.below(3)),
        3 | 4 => now_us + random.magnitude(3_600_000_000),
        5..20 => now_us,
        20..30 => now_us + random.magnitude(1_000),
        _ => now_us + random.magnitude(2_000_000),
    }
}

fn random_call(random: &mut Random, model: &Model, now_us: u64, quotas: &[Quota]) -> Call {
    const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];
    let mut call = Call { now_us, runs: Vec::new(), times: 1 };
    // The common case of several limits: takes from different buckets, each mostly under the quota that it had.
    if random.one_in(2) {
        let first = random.below(NAMES.len() as u64) as usize;
        let request = (first..first + 2 + random.below(4) as usize).map(|i| {
            let name = NAMES[i % NAMES.len()];
            let quota = if random.one_in(40) { *random.pick(quotas) } else { quotas[i % NAMES.len() % quotas.len()] };
            let charge = charge(name, quota, Amount::Take(takes(random, model, name, quota)));
            if random.one_in(40) { charge.shadow() } else { charge }
        });
        call.runs.push(vec![request.collect()]);
        return call;
    }
    let runs = if random.one_in(3) { 1 + random.below(3) } else { 1 };
    for _ in 0..runs {
        let charges = if random.one_in(2) { 1 } else { 1 + random.below(4) };
        let shape: Vec<_> = (0..charges)
            .map(|_| {
                let (name, quota) = (*random.pick(&NAMES), *random.pick(quotas));
                let charge = charge(name, quota, amount(random, model, name, quota));
                if random.one_in(5) { charge.shadow() } else { charge }
            })
            .collect();
        let requests = if random.one_in(3) { 1 + random.below(5) } else { 1 };
        let run = (0..requests).map(|_| {
            let elsewhere = |of: &Charge, random: &mut Random| {
                let moved = charge(random.pick::<&str>(&NAMES), of.quota(), of.amount());
                if of.is_shadow() { moved.shadow() } else { moved }
            };
            shape.iter().map(|of| elsewhere(of, random)).collect()
        });
        call.runs.push(run.collect());
    }
    call
}

/// Compares the script's answer to a call with the model's; what differs is told.
fn compare(model: &mut Model, call: &Call, reply: &Value, writes: &[Write]) -> Result<(), String> {
    let before: Vec<_> = call.charges().map(|charge| model.state(charge)).collect();
    let mut expected = Vec::new();
    let mut may_write = Vec::new();
    for request in call.requests() {
        let was: Vec<_> = request.iter().map(|charge| model.state(charge)).collect();
        let made = model.acquire(request, call.now_us);
        let denied = request.iter().zip(&made).any(|(charge, reply)| !charge.is_shadow() && !reply.is_allowed());
        for ((charge, reply), was) in request.iter().zip(&made).zip(was) {
            let changes = !denied && reply.is_allowed() && charge.amount() != Amount::Peek;
            if changes || model.state(charge) != was {
                may_write.push(key(charge));
            }
        }
        expected.extend(made);
    }
    let got = replies(reply, expected.len());
    if got != expected {
        return Err(format!("replies: {got:?}, expected: {expected:?}, before: {before:?}"));
    }
    for (i, write) in writes.iter().enumerate() {
        if !may_write.contains(&write.key) || writes[..i].iter().any(|other| other.key == write.key) {
            return Err(format!("{write:?} should not be, before: {before:?}"));
        }
    }
    for (charge, before) in call.charges().zip(&before) {
        let state = model.state(charge);
        let written = writes.iter().find(|write| write.key == key(charge));
        let life = model.life_ms(charge, call.now_us).map(|life| life.to_string());
        let same = match written {
            Some(write) => Some(&write.value) == state.as_ref() && Some(&write.life_ms) == life.as_ref(),
            None => state == *before,
        };
        if !same {
            return Err(format!("{written:?}, expected: {state:?} for {life:?} ms, before: {before:?}"));
        }
    }
    Ok(())
}

/// `SCRIPT_OPERATIONS` sets the number of charges, `SCRIPT_SEED` another history.
#[test]
fn a_million_random_charges_are_answered_and_stored_as_the_model_says() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let operations = number("SCRIPT_OPERATIONS").unwrap_or(1_000_000);
    let seed = number("SCRIPT_SEED").unwrap_or(1);
    let mut random = Random(seed);
    let mut buckets = Buckets::start();
    let mut done = 0;
    while done < operations {
        // Few quotas at a time, so that the same one comes back to a bucket.
        buckets.server.query(&["FLUSHALL"]);
        let mut model = Model::default();
        let mut now_us = START_US + random.below(1 << 40);
        let all = quotas(&mut random);
        let different = if random.one_in(2) { 1 } else { 1 + random.below(6) };
        let few: Vec<_> = (0..different).map(|_| *random.pick(&all)).collect();
        for _ in 0..20 {
            let mut calls = Vec::new();
            let mut asked = model.clone();
            for _ in 0..64 {
                now_us = tick(&mut random, now_us);
                let call = random_call(&mut random, &asked, now_us, &few);
                for request in call.requests() {
                    asked.acquire(request, now_us);
                }
                done += call.charges().count() as u64;
                calls.push(call);
            }
            let answers = buckets.answers(&calls);
            for (call, (reply, writes)) in calls.iter().zip(&answers) {
                if let Err(why) = compare(&mut model, call, reply, writes) {
                    panic!("seed {seed}: {why}\n{call:#?}");
                }
            }
            // An expired key, in the only way in which this model forgets.
            if let Some(charge) = calls.last().and_then(|call| call.charges().next()) {
                buckets.server.query(&["DEL", &key(charge)]);
                model.forget(charge);
            }
        }
    }
}

/// Equal takes on one bucket, in one call: what is said of the first tells what is said of the others.
#[test]
fn equal_takes_that_are_named_once_are_what_they_are_one_by_one() {
    let mut buckets = Buckets::start();
    let (mut some, mut all, mut none) = (0, 0, 0);
    for seed in 0..400 {
        let mut random = Random(1000 + seed);
        buckets.server.query(&["FLUSHALL"]);
        let mut model = Model::default();
        let all_quotas = quotas(&mut random);
        let few: Vec<_> = (0..1 + random.below(2)).map(|_| *random.pick(&all_quotas)).collect();
        let mut now_us = START_US + random.below(1 << 40);
        for _ in 0..40 {
            now_us = tick(&mut random, now_us);
            let quota = *random.pick(&few);
            let tokens = takes(&mut random, &model, "a", quota).clamp(1, quota.capacity());
            let names = &["a", "b", "c"][..1 + random.below(3) as usize];
            let times = 2 + random.magnitude(60) as usize;
            let run = names.iter().map(|name| vec![charge(name, quota, Amount::Take(tokens))]);
            let call = Call { now_us, runs: vec![run.collect()], times };
            let (reply, writes) = buckets.answers(std::slice::from_ref(&call)).remove(0);
            let got = replies(&reply, names.len());
            let units = (tokens * quota.refill().1.as_micros() as u64) as i64;
            for (charge, got) in call.charges().zip(got) {
                let before = model.state(charge);
                let right: Vec<_> =
                    (0..times).map(|_| model.acquire(std::slice::from_ref(charge), now_us)[0]).collect();
                let found = right[0].level() + if right[0].is_allowed() { units } else { 0 };
                let context = format!("seed {seed}: {call:?} on {before:?}");
                assert_eq!(got, Reply::new(found, right[0].is_allowed(), right[0].ahead_us()), "{context}");
                let made = right.iter().filter(|reply| reply.is_allowed()).count();
                assert_eq!(made as i64, (found.max(0) / units).min(times as i64), "{context}");
                let left = right[times - 1].level();
                assert_eq!(left, found - made as i64 * units, "{context}");
                let written = writes.iter().find(|write| write.key == key(charge));
                let state = model.state(charge);
                assert_eq!(written.map(|write| &write.value), state.as_ref().filter(|_| state != before), "{context}");
                if let Some(write) = written {
                    assert_eq!(write.life_ms, model.life_ms(charge, now_us).unwrap().to_string(), "{context}");
                }
                match made {
                    0 => none += 1,
                    made if made == times => all += 1,
                    _ => some += 1,
                }
            }
        }
    }
    assert!(some > 1_000 && all > 1_000 && none > 1_000, "{some} made in part, {all} made whole, {none} not made");
}

/// Writes bucket values by hand and reads them back through the script, as every version of the crate has to.
#[test]
fn ten_thousand_random_values_round_trip_as_plain_integers() {
    let mut random = Random(2);
    let mut buckets = Buckets::start();
    for _ in 0..100 {
        let quotas = quotas(&mut random);
        let mut values = Vec::new();
        let mut calls = Vec::new();
        for i in 0..100 {
            let quota = *random.pick(&quotas);
            let (n, per) = quota.refill();
            let (p, full) = (per.as_micros() as i64, (quota.capacity() * per.as_micros() as u64) as i64);
            let level = random.below(2 * full as u64 + 1) as i64 - full;
            let value = format!("{START_US}:{}:{n}:{p}:{level}", quota.capacity());
            let name = format!("k{i}");
            buckets.server.query(&["SET", &name, &value]);
            // Spending nothing at the same moment writes the same state again.
            calls.push(Call::new(START_US, &[charge(&name, quota, Amount::Spend(0))]));
            values.push((name, value, level));
        }
        for ((name, value, level), (reply, writes)) in values.iter().zip(buckets.answers(&calls)) {
            assert_eq!(reply, Value::Int(2 * level + 1));
            assert_eq!((writes[0].key.as_str(), &writes[0].value), (name.as_str(), value));
            let stored = buckets.value(name).expect("a value");
            assert_eq!(stored, *value);
            assert!(stored.bytes().all(|byte| byte.is_ascii_digit() || byte == b':' || byte == b'-'), "{stored}");
            assert!(writes[0].life_ms.bytes().all(|byte| byte.is_ascii_digit()), "{writes:?}");
        }
    }
}

/// Takes `cost` tokens at each `at_ms`, and expects those to pass of which `expected` says so.
#[track_caller]
fn check(quota: Quota, takes: &[(u64, u64)], expected: &[bool]) {
    let mut buckets = Buckets::start();
    let mut passed = |&(at_ms, cost)| buckets.acquire(START_US + at_ms * 1000, &take(quota, cost)).is_allowed();
    let passed: Vec<_> = takes.iter().map(&mut passed).collect();
    assert_eq!(passed, expected, "{quota}");
}

#[test]
fn an_interval_is_earned_once_though_the_clock_goes_to_and_fro() {
    check(Quota::per_second(1), &[(1000, 1), (2000, 1), (1000, 1), (2000, 1)], &[true, true, false, false]);
}

#[test]
fn a_clock_that_steps_back_takes_no_tokens_and_keeps_the_promised_wait() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_second(1).with_capacity(5);
    assert!(buckets.acquire(START_US + 10_000_000, &take(quota, 5)).is_allowed());
    let denied = buckets.acquire(START_US + 4_000_000, &take(quota, 1));
    assert_eq!((denied.remaining(), denied.retry_after()), (Some(0), Some(Duration::from_secs(1))));
    assert!(!buckets.acquire(START_US + 4_999_999, &take(quota, 1)).is_allowed());
    assert!(buckets.acquire(START_US + 5_000_000, &take(quota, 1)).is_allowed());
}

#[test]
fn a_time_up_to_a_second_ahead_is_kept_and_reported() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_second(1).with_capacity(5);
    assert!(buckets.acquire(START_US + 1_000_000, &take(quota, 5)).is_allowed());
    let answers = buckets.answers(&[Call::new(START_US, &take(quota, 1))]);
    assert_eq!(answers[0].0, Value::Array(vec![Value::Int(0), Value::Int(1_000_000)]));
    assert!(answers[0].1.is_empty(), "kept, so not written");
    let denied = buckets.acquire(START_US, &take(quota, 1));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(2)));
    // One microsecond more, and it is brought back: once.
    let calls = [Call::new(START_US - 1, &take(quota, 1)), Call::new(START_US, &take(quota, 1))];
    let answers = buckets.answers(&calls);
    assert_eq!(answers[0].0, Value::Int(0));
    assert_eq!(answers[0].1[0].value, format!("{}:5:1:1000000:0", START_US - 1));
    assert!(answers[1].1.is_empty());
}

#[test]
fn nothing_is_earned_at_the_boundary_of_a_second() {
    check(Quota::per_second(10), &[(950, 10), (1002, 1)], &[true, false]);
}

#[test]
fn a_rate_below_one_a_second_is_ordinary() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_day(1).with_capacity(5);
    let answers = buckets.answers(&[Call::new(START_US, &take(quota, 5))]);
    assert_eq!(answers[0].1[0].life_ms, "432000000");
    let denied = buckets.acquire(START_US, &take(quota, 1));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(86_400)));
}

#[test]
fn what_is_earned_counts_from_the_last_write_not_from_the_burst() {
    let takes: Vec<_> = [(0, 100)].into_iter().chain([(3100, 1); 4]).collect();
    check(Quota::per_second(1).with_capacity(100), &takes, &[true, true, true, true, false]);
}

#[test]
fn a_wait_is_rounded_up_to_its_microsecond() {
    check(Quota::per_second(3), &[(0, 3), (333, 1), (334, 1)], &[true, false, true]);
    let mut buckets = Buckets::start();
    buckets.acquire(START_US, &take(Quota::per_second(3), 3));
    assert_eq!(
        buckets.acquire(START_US, &take(Quota::per_second(3), 1)).retry_after(),
        Some(Duration::from_micros(333_334))
    );
}

#[test]
fn an_idle_bucket_holds_its_capacity_and_no_more() {
    let takes: Vec<_> = [(0, 3)].into_iter().chain([(60_000, 1); 4]).collect();
    check(Quota::per_second(3), &takes, &[true, true, true, true, false]);
}

#[test]
fn rates_above_a_thousand_a_second_hold() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_second(2000).with_capacity(10);
    // Every 100 us for 100 ms: the burst of 10, and 2 a millisecond.
    let passed = (0..=1000).filter(|i| buckets.acquire(START_US + i * 100, &take(quota, 1)).is_allowed()).count();
    assert_eq!(passed, 10 + 200);
}

#[test]
fn a_denial_takes_nothing() {
    check(Quota::per_day(10), &[(0, 8), (0, 5), (0, 2), (0, 1)], &[true, false, true, false]);
}

#[test]
fn all_limits_are_charged_or_none() {
    let mut buckets = Buckets::start();
    let charges = [charge("a", Quota::per_day(5), Amount::Take(1)), charge("b", Quota::per_day(1), Amount::Take(1))];
    let decisions: Vec<_> = (0..3).map(|_| buckets.acquire(START_US, &charges)).collect();
    assert_eq!(decisions.iter().map(Decision::is_allowed).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(decisions[2].limit(), Some("b"));
    assert_eq!(decisions[2].outcomes()[0].remaining(), Some(4));
}

#[test]
fn a_drained_bucket_waits_at_the_rate_of_whoever_asks() {
    let second = Quota::per_second;
    for (old, new, wait_ms) in [
        (second(10).with_capacity(15), second(1000).with_capacity(15), 1),
        (second(1000), second(1).with_capacity(1000), 1000),
    ] {
        let mut buckets = Buckets::start();
        assert!(buckets.acquire(START_US, &take(old, old.capacity())).is_allowed());
        let denied = buckets.acquire(START_US, &take(new, 1));
        assert!(!denied.is_allowed());
        assert_eq!(denied.retry_after(), Some(Duration::from_millis(wait_ms)));
    }
}

#[test]
fn a_smaller_capacity_clamps_at_the_next_call() {
    let mut buckets = Buckets::start();
    buckets.acquire(START_US, &take(Quota::per_day(1000), 1));
    let decision = buckets.acquire(START_US, &[charge("b", Quota::per_day(10), Amount::Peek)]);
    assert_eq!(decision.remaining(), Some(10));
}

#[test]
fn instances_with_different_capacities_hand_out_no_more_than_the_larger() {
    let mut buckets = Buckets::start();
    let quotas = [Quota::per_second(10), Quota::per_second(10).with_capacity(100)];
    let passed = (0..400).filter(|i| buckets.acquire(START_US, &take(quotas[i % 2], 1)).is_allowed()).count();
    assert!(passed <= 100, "{passed}");
}

#[test]
fn a_refund_stops_at_the_capacity() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_day(10);
    buckets.acquire(START_US, &take(quota, 3));
    let decision = buckets.acquire(START_US, &[charge("b", quota, Amount::Give(u64::MAX))]);
    assert_eq!(decision.remaining(), Some(10));
}

#[test]
fn a_quota_counts_tokens_per_second() {
    let takes: Vec<_> = [(0, 60)].into_iter().chain([(1000, 1); 21]).collect();
    let mut expected = vec![true; 21];
    expected.push(false);
    check(Quota::per_second(20).with_capacity(60), &takes, &expected);
}

/// Times outside 2001 to 2286 do not have 16 digits.
#[test]
fn times_of_other_lengths_are_read_as_well() {
    let mut buckets = Buckets::start();
    for at in [0, 1, 5_000_000, 999_999_999_999_999, 10_000_000_000_000_000 / 4 * 3] {
        buckets.server.query(&["FLUSHALL"]);
        let quota = Quota::per_second(2);
        assert!(buckets.acquire(at, &take(quota, 2)).is_allowed());
        assert_eq!(buckets.value("b"), Some(format!("{at}:2:1:500000:0")));
        assert!(!buckets.acquire(at + 499_999, &take(quota, 1)).is_allowed());
        assert!(buckets.acquire(at + 500_000, &take(quota, 1)).is_allowed());
    }
}

/// By the server's own clock.
#[test]
fn value_and_life_are_written_by_one_command() {
    let buckets = Buckets::start();
    let quota = Quota::per_day(1).with_capacity(5);
    assert_eq!(buckets.acquire_now(&take(quota, 5)), Value::Int(1));
    let pttl = buckets.pttl("b");
    // Counted from the millisecond that had begun.
    assert!((431_999_000..=432_000_001).contains(&pttl), "{pttl}");
    assert_eq!((buckets.server.calls("set"), buckets.server.calls("get"), buckets.server.calls("time")), (1, 1, 1));
    // A life shorter than a millisecond is one.
    let fast = Quota::per_second(1500).with_capacity(1);
    assert_eq!(buckets.acquire_now(&[charge("fast", fast, Amount::Take(1))]), Value::Int(1));
    let pttl = buckets.pttl("fast");
    assert!(pttl == -2 || pttl >= 0, "{pttl}");
}

#[test]
fn a_denial_writes_nothing_and_a_bucket_is_read_once() {
    let buckets = Buckets::start();
    let quota = Quota::per_day(2);
    assert_eq!(buckets.acquire_now(&take(quota, 2)), Value::Int(1));
    assert_eq!(buckets.acquire_now(&take(quota, 1)).int().map(|reply| reply & 1), Some(0));
    assert_eq!((buckets.server.calls("set"), buckets.server.calls("get")), (1, 2));
    // The same bucket twice, and another one, in one request.
    let both = |tokens| {
        [
            charge("b", quota, Amount::Take(tokens)),
            charge("c", quota, Amount::Take(tokens)),
            charge("c", quota, Amount::Take(tokens)),
        ]
    };
    buckets.acquire_now(&both(1));
    assert_eq!((buckets.server.calls("set"), buckets.server.calls("mget")), (1, 1), "b is empty");
    buckets.server.query(&["DEL", "b"]);
    buckets.acquire_now(&both(1));
    assert_eq!((buckets.server.calls("set"), buckets.server.calls("mget")), (3, 2), "b and c, each once");
    assert_eq!(buckets.server.keys(), ["b", "c"]);
    assert!(buckets.pttl("b") > 0 && buckets.pttl("c") > 0);
}

#[test]
fn what_is_not_a_bucket_is_an_error_and_stays_as_it_is() {
    let buckets = Buckets::start();
    let quota = Quota::per_second(10).with_capacity(100);
    let mut values: Vec<_> =
        ["", "hello", "12", "1:2:3", "1764456789123456:100:1:100000", "::::"].map(str::to_owned).into();
    for level in ["", "x", "nan", "-nan", "-inf", "--1", "1 2", "10000001", "-9007199254740993"] {
        values.push(format!("1764456789123456:100:1:100000:{level}"));
    }
    for at in ["176445678912345x", "             nan"] {
        values.push(format!("{at}:100:1:100000:0"));
    }
    for quota in [":0:1:100000:", ":100:0:100000:", ":100:1:0:", ":100:1:1e9:", ":100:-1:5:", ":4294967296:1:5:"] {
        values.push(format!("1764456789123456{quota}0"));
    }
    for value in values {
        buckets.server.query(&["SET", "b", &value]);
        for amount in [Amount::Take(1), Amount::Take(101), Amount::Spend(1), Amount::Give(1), Amount::Peek] {
            let answer = buckets.acquire_now(&[charge("b", quota, amount)]);
            // More than the capacity is read as a full bucket's level under another quota would be.
            let full = value.ends_with(":10000001");
            // Text where a number is reckoned with is an error of Lua's.
            let is_error = matches!(&answer, Value::Error(error) if error.starts_with("TOKENBUCKET ") || error.contains("arithmetic"));
            assert!(is_error || full, "{value:?}: {answer:?}");
            if !full {
                assert_eq!(buckets.value("b").as_ref(), Some(&value));
            }
        }
    }
    buckets.server.query(&["DEL", "b"]);
    buckets.server.query(&["LPUSH", "b", "x"]);
    for amount in [Amount::Take(1), Amount::Spend(1), Amount::Peek] {
        let answer = buckets.acquire_now(&[charge("b", quota, amount)]);
        assert!(matches!(&answer, Value::Error(error) if error.starts_with("WRONGTYPE ")), "{answer:?}");
    }
    assert_eq!(buckets.server.query(&["LLEN", "b"]), Value::Int(1));
}

/// Requests that happen to be gathered in one call do not suffer from each other's keys.
#[test]
fn a_foreign_value_fails_only_the_requests_that_name_it() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_day(10);
    buckets.server.query(&["SET", "foreign", "hello"]);
    buckets.server.query(&["LPUSH", "list", "x"]);
    let request = |a, b| vec![charge(a, quota, Amount::Take(1)), charge(b, quota, Amount::Take(1))];
    let requests = vec![request("b", "c"), request("b", "foreign"), request("list", "c"), request("c", "d")];
    let answers = buckets.answers(&[Call { now_us: START_US, runs: vec![requests], times: 1 }]);
    let Value::Array(replies) = &answers[0].0 else { panic!("{answers:?}") };
    let mut shown = String::new();
    for reply in replies {
        match reply {
            Value::Int(reply) => write!(shown, "{} ", reply & 1),
            Value::Error(error) => write!(shown, "{} ", error.split(' ').next().unwrap_or_default()),
            other => write!(shown, "{other:?} "),
        }
        .expect("a text");
    }
    assert_eq!(shown, "1 1 TOKENBUCKET TOKENBUCKET WRONGTYPE WRONGTYPE 1 1 ");
    let mut written: Vec<_> = answers[0].1.iter().map(|write| write.key.as_str()).collect();
    written.sort_unstable();
    assert_eq!(written, ["b", "c", "d"]);
    assert_eq!(buckets.value("foreign").as_deref(), Some("hello"));
}

/// Requests of several takes have a short way of their own, of two and of more, with the same results.
#[test]
fn several_takes_are_made_the_same_whatever_their_buckets_hold() {
    let mut buckets = Buckets::start();
    let other = Quota::per_second(7).with_capacity(30);
    let quotas: Vec<_> = (10..19).map(|rate| Quota::per_second(rate).with_capacity(100)).collect();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let take = |name: &str, quota, tokens| charge(name, quota, Amount::Take(tokens));
    for count in 2..=names.len() {
        for odd in 0..count {
            let quota = quotas[odd];
            let others = |tokens| {
                names[..count]
                    .iter()
                    .zip(&quotas)
                    .map(move |(name, quota)| take(name, *quota, tokens))
                    .collect::<Vec<_>>()
            };
            // What was taken of the odd one before, how long ago, and what is asked of it then.
            let cases = [
                (None, 0, take(names[odd], quota, 1)),
                (None, 0, take(names[odd], quota, 100)),
                (None, 0, take(names[odd], quota, 101)),
                (Some((quota, 100)), 0, take(names[odd], quota, 1)),
                (Some((quota, 100)), 99_999, take(names[odd], quota, 1)),
                (Some((quota, 100)), 100_000, take(names[odd], quota, 1)),
                (Some((quota, 100)), 3_600_000_000, take(names[odd], quota, 100)),
                (Some((quota, 100)), -1, take(names[odd], quota, 1)),
                (Some((quota, 50)), -1_000_000, take(names[odd], quota, 50)),
                (Some((quota, 50)), -1_000_001, take(names[odd], quota, 50)),
                (Some((quota, 50)), -1_000_001, take(names[odd], quota, 51)),
                (Some((other, 3)), 5, take(names[odd], quota, 27)),
                (Some((other, 30)), 5, take(names[odd], quota, 1)),
                (Some((quota, 90)), 0, take(names[odd], quota, 20).shadow()),
                (Some((quota, 90)), 0, charge(names[odd], quota, Amount::Spend(20))),
                (Some((quota, 90)), 0, charge(names[odd], quota, Amount::Give(5))),
                (Some((quota, 90)), 0, charge(names[odd], quota, Amount::Peek)),
                // The same bucket twice: enough for each, not for both.
                (None, 0, take(names[(odd + 1) % count], quotas[(odd + 1) % count], 60)),
            ];
            for (before, later, asked) in cases {
                for tokens in [40, 100] {
                    buckets.server.query(&["FLUSHALL"]);
                    let mut model = Model::default();
                    // Two seconds earlier, so that the odd one alone can be ahead of the clock.
                    let before_us = START_US - 2_000_000;
                    let mut calls: Vec<_> = others(40).into_iter().map(|take| Call::new(before_us, &[take])).collect();
                    calls.remove(odd);
                    if let Some((quota, tokens)) = before {
                        calls.push(Call::new(START_US, &[take(names[odd], quota, tokens)]));
                    }
                    let mut request = others(tokens);
                    request[odd] = asked.clone();
                    calls.push(Call::new(START_US.wrapping_add_signed(later), &request));
                    for (call, (reply, writes)) in calls.iter().zip(buckets.answers(&calls)) {
                        if let Err(why) = compare(&mut model, call, &reply, &writes) {
                            panic!("{why}\n{call:#?}");
                        }
                    }
                }
            }
        }
    }
}

/// None of several buckets is written where one holds something else, or a level that its quota cannot have.
#[test]
fn several_takes_write_nothing_where_one_is_not_a_bucket() {
    let buckets = Buckets::start();
    let quota = Quota::per_second(10).with_capacity(100);
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let (hello, low) = ("hello".to_owned(), "1764456789123456:100:1:100000:-9007199254740993".to_owned());
    let (negative, text) = ("-5:100:1:100000:0".to_owned(), "1764456789123456:100:1:100000:x".to_owned());
    for count in 2..=names.len() {
        let charges: Vec<_> = names[..count].iter().map(|name| charge(name, quota, Amount::Take(1))).collect();
        for odd in &names[..count] {
            for value in [&hello, &low, &negative, &text] {
                buckets.server.query(&["FLUSHALL"]);
                buckets.server.query(&["SET", odd, value]);
                let answer = buckets.acquire_now(&charges);
                let failed = |error: &Value| matches!(error, Value::Error(error) if error.starts_with("TOKENBUCKET "));
                match &answer {
                    Value::Array(replies) => {
                        assert!(replies.len() == count && replies.iter().all(failed), "{answer:?}");
                    }
                    Value::Error(error) => assert!(error.contains("arithmetic") && value == &text, "{answer:?}"),
                    _ => panic!("{answer:?}"),
                }
                assert_eq!(buckets.server.keys(), [*odd]);
            }
            buckets.server.query(&["FLUSHALL"]);
            buckets.server.query(&["LPUSH", odd, "x"]);
            let answer = buckets.acquire_now(&charges);
            let failed = |error: &Value| matches!(error, Value::Error(error) if error.starts_with("WRONGTYPE "));
            let Value::Array(replies) = &answer else { panic!("{answer:?}") };
            assert!(replies.len() == count && replies.iter().all(failed), "{answer:?}");
            assert_eq!(buckets.server.keys(), [*odd]);
        }
    }
}

/// The server refuses a write in the middle of a script: as its own error, with no key left without a life.
#[test]
fn a_refused_write_is_the_servers_own_error() {
    let buckets = Buckets::start();
    let quota = Quota::per_day(10);
    buckets.acquire_now(&take(quota, 1));
    buckets.server.query(&["CONFIG", "SET", "maxmemory", "1"]);
    let one = take(quota, 1);
    let two = [charge("b", quota, Amount::Take(1)), charge("c", quota, Amount::Take(1))];
    let three = [&two[..], &[charge("d", quota, Amount::Take(1))]].concat();
    for charges in [&one[..], &two[..], &three[..]] {
        let answer = buckets.acquire_now(charges);
        assert!(matches!(&answer, Value::Error(error) if error.contains("OOM command not allowed")), "{answer:?}");
    }
    buckets.server.query(&["CONFIG", "SET", "maxmemory", "0"]);
    buckets.server.query(&["REPLICAOF", "127.0.0.1", "1"]);
    for charges in [&one[..], &two[..], &three[..]] {
        let answer = buckets.acquire_now(charges);
        assert!(matches!(&answer, Value::Error(error) if error.contains("READONLY ")), "{answer:?}");
    }
    assert_eq!(buckets.server.keys(), ["b"]);
    assert!(buckets.pttl("b") > 0);
}

/// The least rights, as the README says them.
pub(crate) const RIGHTS: &str = "-@all +evalsha +eval +time +get +mget +set ~tb:v1:*";

#[test]
fn the_script_needs_few_rights() {
    let buckets = Buckets::start();
    let quota = Quota::per_day(10);
    // `eval` sends the script where it is not loaded.
    let rights = format!("reset on nopass {RIGHTS}");
    let command: Vec<_> = ["ACL", "SETUSER", "limiter"].into_iter().chain(rights.split(' ')).collect();
    buckets.server.query(&command);
    let mut connection = buckets.server.connect();
    let mut answer = |args: &[String]| {
        let mut command = Vec::new();
        encode(&mut command, args);
        connection.send(&command).expect("the server listens");
        connection.receive().expect("the server answers")
    };
    assert_eq!(answer(&["AUTH", "limiter", ""].map(str::to_owned)), Value::Status("OK".to_owned()));
    let mut call = |names: &[&str]| {
        let charges: Vec<_> = names.iter().map(|name| charge(name, quota, Amount::Take(1))).collect();
        let mut args = vec!["EVALSHA".to_owned(), buckets.sha.clone()];
        args.extend(Call::new(0, &charges).args());
        // Limits' names have no colon.
        args.iter_mut().filter(|arg| arg.starts_with("mine")).for_each(|arg| arg.insert_str(0, "tb:v1:{global}:"));
        answer(&args)
    };
    assert!(matches!(call(&["mine"]), Value::Int(_)));
    assert!(matches!(call(&["mine", "mine2"]), Value::Text(_)));
    assert!(matches!(call(&["another"]), Value::Error(error) if error.starts_with("NOPERM")));
    assert_eq!(buckets.server.keys(), ["tb:v1:{global}:mine", "tb:v1:{global}:mine2"]);
}

/// As many as a call may have.
#[test]
fn a_call_may_carry_thousands_of_charges() {
    let mut buckets = Buckets::start();
    let quota = Quota::per_day(2);
    let requests: Vec<_> = (0..4000).map(|i| vec![charge(&format!("k{}", i % 3999), quota, Amount::Take(2))]).collect();
    let answers = buckets.answers(&[Call { now_us: START_US, runs: vec![requests], times: 1 }]);
    let Value::Array(replies) = &answers[0].0 else { panic!("{:?}", answers[0].0) };
    assert_eq!(replies.iter().filter(|reply| **reply == Value::Int(1)).count(), 3999);
    assert_eq!((replies.last(), answers[0].1.len()), (Some(&Value::Int(0)), 3999));
}
