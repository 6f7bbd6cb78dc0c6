//! Rates that adapt: `lua/pace.lua` on a real server against the exact model, and what both say of a peer's refusals.

use tower_token_bucket::conformance::{RateModel, RateReply};
use tower_token_bucket::outbound::AdaptiveRate;

use crate::redis_script::Random;
use crate::server::{Connection, Server, Value, encode};

const SCRIPT: &str = include_str!("../../lua/pace.lua");
const TIME: &str = "local time = redis.call('TIME')\n";
const SET: &str = "redis.pcall('SET', ";
const START_US: u64 = 1_764_456_789_000_000;

/// The script with the clock as its last two arguments; it answers with its reply, and with the life of what it wrote.
fn with_a_clock() -> String {
    assert_eq!((SCRIPT.matches(TIME).count(), SCRIPT.matches(SET).count()), (1, 1));
    let body = SCRIPT.replace(TIME, "local time = { ARGV[#ARGV - 1], ARGV[#ARGV] }\n").replace(SET, "set(");
    format!(
        "local life = '-'
        local function set(key, value, px, ms)
            life = ms
            return redis.call('SET', key, value)
        end
        local function body()
            {body}
        end
        return {{ body(), life, redis.call('GET', KEYS[1]) }}"
    )
}

struct Scripted {
    server: Server,
    connection: Connection,
    sha: String,
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    Take(u64),
    Look,
    Refused(Option<u64>, u64),
    Pause(u64),
}

impl Scripted {
    fn start() -> Self {
        let server = Server::start();
        let sha = server.query(&["SCRIPT", "LOAD", &with_a_clock()]).text().unwrap().to_owned();
        Self { connection: server.connect(), server, sha }
    }

    /// The integers of the reply, the life of what was written, and what is stored.
    fn ask(&mut self, key: &str, settings: [u64; 5], ask: Ask, now_us: u64) -> (Vec<i64>, String, Option<String>) {
        let (kind, amount, random) = match ask {
            Ask::Take(cost) => ("take", cost as i64, 0),
            Ask::Look => ("look", 0, 0),
            Ask::Refused(hint, random) => ("refused", hint.map_or(-1, |hint| hint as i64), random),
            Ask::Pause(hint) => ("pause", hint as i64, 0),
        };
        let mut command = vec!["EVALSHA".to_owned(), self.sha.clone(), "1".to_owned(), key.to_owned(), kind.to_owned()];
        command.extend([amount.to_string(), random.to_string()]);
        command.extend(settings.map(|setting| setting.to_string()));
        command.extend([(now_us / 1_000_000).to_string(), (now_us % 1_000_000).to_string()]);
        let mut bytes = Vec::new();
        encode(&mut bytes, &command);
        self.connection.send(&bytes).unwrap();
        let answer = self.connection.receive().unwrap();
        let Value::Array(parts) = &answer else { panic!("{answer:?} to {command:?}") };
        let Value::Array(reply) = &parts[0] else { panic!("{answer:?} to {command:?}") };
        let life = parts[1].text().unwrap().to_owned();
        (reply.iter().map(|value| value.int().unwrap()).collect(), life, parts[2].text().map(str::to_owned))
    }
}

fn says(reply: RateReply) -> Vec<i64> {
    let floored = reply.floored_us().map_or(-1, |us| us as i64);
    vec![i64::from(reply.is_allowed()), reply.level(), reply.ahead_us() as i64, reply.rate() as i64, floored]
}

fn random_rate(random: &mut Random) -> AdaptiveRate {
    let ceiling = (1 + random.magnitude(999_999_999)) as f64 / 1000.0;
    let floor = ceiling / (1 + random.magnitude(1000)) as f64;
    let decrease = random.below(1_000_000) as f64 / 1e6;
    let increase = 1.000_001 + random.magnitude(6_999_998) as f64 / 1e6;
    AdaptiveRate { ceiling, floor, decrease, increase }
}

#[test]
fn the_script_says_and_stores_what_the_model_does() {
    let mut scripted = Scripted::start();
    let (mut taken, mut refused, mut raised, mut floored) = (0, 0, 0, 0);
    for seed in 0..150 {
        let mut random = Random(seed);
        let key = format!("pace-{seed}");
        let mut now_us = START_US;
        let capacity = 1 + random.magnitude(2_251_798);
        let mut model = RateModel::try_new(capacity, random_rate(&mut random)).unwrap();
        for step in 0..400 {
            if random.one_in(60) {
                model.change(1 + random.magnitude(2_251_798), random_rate(&mut random)).unwrap();
            }
            // Mostly forward, by what matters at this rate; at times far, and at times back.
            let [capacity, ceiling, ..] = model.settings();
            let look = model.look(now_us);
            let step_us = 1_000_000_000 / look.rate().max(1);
            now_us = match random.below(20) {
                0 => now_us - random.magnitude(7_200_000_000),
                1 => now_us + random.magnitude(7_200_000_000),
                2 | 3 => now_us + random.magnitude(3_000_000),
                4..=9 => now_us,
                _ => now_us + random.below(2 * step_us + 1),
            };
            let ask = match random.below(30) {
                0 => Ask::Refused(None, random.below(1_000_000)),
                1 => Ask::Refused(Some(random.magnitude(5_000_000_000)), 0),
                2 if random.one_in(2) => Ask::Pause(random.magnitude(5_000_000_000)),
                2 => Ask::Look,
                // All that there is, so that at least half of the rate is used.
                3..=14 => Ask::Take((look.level().max(0) as u64 / 1_000_000_000).max(1)),
                _ => Ask::Take(1 + random.magnitude(capacity)),
            };
            let before = model.state();
            let (got, life, stored) = scripted.ask(&key, model.settings(), ask, now_us);
            let reply = match ask {
                Ask::Take(cost) => model.take(cost, now_us),
                Ask::Look => model.look(now_us),
                Ask::Refused(hint, random) => model.refused(hint, random, now_us),
                Ask::Pause(hint) => model.pause(hint, now_us),
            };
            let context =
                format!("seed {seed}, step {step}, {ask:?} at {now_us} under {:?} on {before:?}", model.settings());
            assert_eq!(got, says(reply), "{context}");
            assert_eq!(stored, model.state(), "{context}");
            if model.state() != before {
                assert_eq!(life, model.life_ms(now_us).unwrap().to_string(), "{context}");
            }
            assert!((1..=ceiling).contains(&reply.rate()) && reply.level() <= (capacity * 1_000_000_000) as i64);
            taken += usize::from(matches!(ask, Ask::Take(_)) && reply.is_allowed());
            refused += usize::from(matches!(ask, Ask::Refused(..)));
            raised += usize::from(reply.rate() > look.rate());
            floored += usize::from(reply.floored_us().is_some_and(|us| us > 0));
        }
    }
    let counts = format!("{taken} taken, {refused} refused, {raised} raised, {floored} at the floor");
    assert!(taken > 5_000 && refused > 2_500 && raised > 500 && floored > 500, "{counts}");
    assert_eq!(scripted.server.command(&["SET", "foreign", "x"]), Value::Status("OK".to_owned()));
}

fn model(capacity: u64, ceiling: f64) -> RateModel {
    RateModel::try_new(capacity, AdaptiveRate::below(ceiling)).unwrap()
}

#[test]
fn a_refusal_empties_the_bucket_which_refills_only_from_the_end_of_the_cooldown() {
    let mut model = model(10, 10.0);
    assert!(model.take(1, START_US).is_allowed());
    let reply = model.refused(Some(2_000_000), 0, START_US);
    assert_eq!((reply.level(), reply.ahead_us(), reply.rate()), (0, 2_000_000, 5_000));
    assert!(!model.take(1, START_US + 2_199_999).is_allowed());
    assert!(model.take(1, START_US + 2_200_000).is_allowed());
}

/// inspect_ai#5138: the time until which nothing is sent is not that from which the rate may be cut again.
#[test]
fn refusals_that_extend_a_cooldown_keep_lowering_the_rate_to_the_floor() {
    let mut model = model(10, 64.0);
    let mut rates = Vec::new();
    for i in 0..20 {
        rates.push(model.refused(Some(89_000_000), 0, START_US + i * 10_000_000).rate());
    }
    assert_eq!(rates[..7], [32_000, 16_000, 8_000, 4_000, 2_000, 1_000, 640]);
    assert!(rates[6..].iter().all(|rate| *rate == 640), "{rates:?}");
}

#[test]
fn a_rate_is_cut_once_an_interval_however_many_are_refused_in_it() {
    let mut model = model(10, 64.0);
    for i in 0..50 {
        assert_eq!(model.refused(Some(1_000), 0, START_US + i * 10_000).rate(), 32_000);
    }
    assert_eq!(model.refused(Some(1_000), 0, START_US + 1_000_000).rate(), 16_000);
}

/// Netflix, AWS: idle success raises nothing.
#[test]
fn a_rate_grows_only_when_half_of_it_is_used_and_time_alone_ends_a_cooldown() {
    let mut model = model(100, 100.0);
    model.refused(Some(0), 0, START_US);
    let mut now_us = START_US;
    for _ in 0..10 {
        now_us += 1_000_000;
        model.take(10, now_us);
        assert_eq!(model.look(now_us).rate(), 50_000, "a fifth of the rate is used");
    }
    now_us += 500_000;
    model.take(20, now_us);
    now_us += 250_000;
    model.take(20, now_us);
    now_us += 250_000;
    assert_eq!(model.look(now_us).rate(), 55_000, "half of it and more");
    for _ in 0..200 {
        now_us += 100_000;
        while model.take(1, now_us).is_allowed() {}
    }
    assert_eq!(model.look(now_us).rate(), 100_000, "up to the ceiling");
}

#[test]
fn a_refusal_without_a_hint_backs_off_longer_each_time_up_to_a_minute() {
    let mut model = model(10, 10.0);
    let mut waits = Vec::new();
    let mut now_us = START_US;
    for _ in 0..10 {
        let wait = model.refused(None, 1_000_000, now_us).ahead_us();
        waits.push(wait);
        now_us += wait;
    }
    assert_eq!(waits[..7], [1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000, 32_000_000, 60_000_000]);
    assert!(waits[6..].iter().all(|wait| *wait == 60_000_000));
    let mut least = self::model(10, 10.0);
    for _ in 0..10 {
        assert_eq!(least.refused(None, 0, now_us).ahead_us(), 500_000, "at random, from half a second");
        now_us += 500_000;
    }
}

#[test]
fn a_peer_that_has_answered_others_since_its_last_refusal_starts_again() {
    let mut model = RateModel::try_new(10, AdaptiveRate { floor: 50.0, ..AdaptiveRate::below(100.0) }).unwrap();
    let mut now_us = START_US;
    for _ in 0..5 {
        assert_eq!(model.refused(None, 1_000_000, now_us).ahead_us(), 1_000_000);
        now_us += 1_000_000;
        for _ in 0..3 {
            now_us += 200_000;
            assert!(model.take(1, now_us).is_allowed());
        }
    }
}

#[test]
fn refusals_of_what_was_sent_before_the_first_are_one_strike() {
    let mut model = model(100, 100.0);
    for i in 0..20 {
        let wait = model.refused(None, 1_000_000, START_US + i * 10_000).ahead_us();
        assert_eq!(wait, 1_000_000 - i * 10_000, "a second from the first");
    }
    assert_eq!(model.refused(None, 1_000_000, START_US + 1_000_000).ahead_us(), 2_000_000);
}

#[test]
fn a_peer_that_refuses_all_is_left_alone_for_longer_also_at_a_rate_below_one() {
    let mut model = model(5, 50.0);
    let (mut now_us, mut waits) = (START_US, Vec::new());
    for _ in 0..12 {
        while !model.take(1, now_us).is_allowed() {
            now_us += 10_000;
        }
        // The answer takes a while.
        now_us += 100_000;
        waits.push(model.refused(None, 1_000_000, now_us).ahead_us());
    }
    assert!(waits.is_sorted() && waits.last() == Some(&60_000_000), "{waits:?}");
    // It answers one: the next refusal is the first again.
    while !model.take(1, now_us).is_allowed() {
        now_us += 10_000;
    }
    now_us += 2_000_000;
    assert_eq!(model.refused(None, 1_000_000, now_us).ahead_us(), 1_000_000);
}

#[test]
fn settings_that_cannot_be_are_refused_with_what_is_allowed() {
    let good = AdaptiveRate::below(10.0);
    for (capacity, rate, parts) in [
        (1, AdaptiveRate { ceiling: 0.0, ..good }, ["ceiling 0", "0.001 to 1000000"]),
        (1, AdaptiveRate { ceiling: f64::NAN, ..good }, ["ceiling NaN", "0.001 to 1000000"]),
        (1, AdaptiveRate { ceiling: 1e7, ..good }, ["ceiling 10000000", "0.001 to 1000000"]),
        (1, AdaptiveRate { floor: 11.0, ..good }, ["floor 11", "0.001 to the ceiling"]),
        (1, AdaptiveRate { floor: -1.0, ..good }, ["floor -1", "0.001 to the ceiling"]),
        (1, AdaptiveRate { decrease: 1.0, ..good }, ["decrease 1", "0 to 0.999999"]),
        (1, AdaptiveRate { increase: 1.0, ..good }, ["increase 1", "above 1 to 8"]),
        (1, AdaptiveRate { increase: f64::INFINITY, ..good }, ["increase inf", "above 1 to 8"]),
        (3_000_000, good, ["capacity 3000000", "1 to 2251799"]),
    ] {
        let error = RateModel::try_new(capacity, rate).unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{rate:?}: {error}");
    }
    // 2.01 * 1000 is not 2009.
    assert_eq!(RateModel::try_new(1, AdaptiveRate::below(2.01)).unwrap().settings()[1], 2010);
}

#[test]
fn a_pause_empties_the_bucket_until_it_is_over_and_keeps_the_rate() {
    let mut model = model(10, 10.0);
    assert!(model.take(1, START_US).is_allowed());
    let reply = model.pause(2_000_000, START_US);
    assert_eq!((reply.level(), reply.ahead_us(), reply.rate()), (0, 2_000_000, 10_000));
    assert_eq!(model.pause(1_000_000, START_US).ahead_us(), 2_000_000, "a shorter one changes nothing");
    assert!(!model.take(1, START_US + 2_099_999).is_allowed());
    assert!(model.take(1, START_US + 2_100_000).is_allowed());
    assert_eq!(model.pause(u64::MAX, START_US + 2_100_000).ahead_us(), 3_600_000_000, "an hour at most");
}

#[test]
fn the_time_at_the_floor_begins_with_the_last_cut_and_ends_with_the_first_growth() {
    let mut model = model(10, 64.0);
    assert_eq!(model.look(START_US).floored_us(), None);
    for i in 0..7 {
        assert_eq!(model.refused(Some(0), 0, START_US + i * 1_000_000).rate() == 640, i == 6);
    }
    let floored_us = START_US + 6_000_000;
    assert_eq!(model.look(floored_us).floored_us(), Some(0));
    model.refused(Some(0), 0, floored_us + 5_000_000);
    assert_eq!(model.look(floored_us + 9_000_000).floored_us(), Some(9_000_000), "a further cut changes nothing");
    assert!(model.take(1, floored_us + 9_000_000).is_allowed());
    let reply = model.look(floored_us + 10_000_000);
    assert!(reply.rate() > 640 && reply.floored_us().is_none(), "{reply:?}");
    let one = AdaptiveRate { floor: 10.0, ..AdaptiveRate::below(10.0) };
    let mut fixed = RateModel::try_new(1, one).unwrap();
    assert_eq!(fixed.refused(Some(0), 0, START_US).floored_us(), None, "a rate that cannot change has no floor");
}
