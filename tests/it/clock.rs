//! The clock of the Redis server is stepped while it runs. A step forward gives at most one capacity; a step back gives
//! nothing and keeps nobody out for longer than an empty bucket needs to fill, plus 1 s. What the script answers and
//! writes is what the exact model does at the server's own time, which the script reports in the same step.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower_token_bucket::conformance::Model;
use tower_token_bucket::{Amount, BucketKey, Charge, Decision, LimitName, Quota, RedisStore, Store as _};

use crate::losses::{info, until, until_replicated};
use crate::redis_store::{Accounted, EACH_CHARGE};
use crate::server::{Server, Value};

const KEY: &str = "tb:v1:{global}:clock";
const HOUR: i64 = 3_600_000_000;
const SECOND: Duration = Duration::from_secs(1);

/// The shim, built once.
fn shim() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/clock_shim.rs");
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // Other processes may do the same at this moment: each builds its own, and puts it where all find it.
        let (built, library) =
            (directory.join(format!("clock_shim-{}.so", std::process::id())), directory.join("clock_shim.so"));
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let output = Command::new(rustc)
            .args(["--edition", "2024", "--crate-type", "cdylib", "-O", "-C", "panic=abort", source, "-o"])
            .arg(&built)
            .output()
            .expect("whoever runs the tests has rustc");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        std::fs::rename(built, &library).unwrap();
        library
    })
}

/// A server whose clock a test steps.
struct Clocked {
    server: Server,
    offset: File,
    offset_path: PathBuf,
}

impl Clocked {
    fn start() -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, SeqCst);
        let offset_path =
            std::env::temp_dir().join(format!("tower-token-bucket-{}-clock-{number}", std::process::id()));
        std::fs::write(&offset_path, 0i64.to_ne_bytes()).unwrap();
        let offset = File::options().write(true).open(&offset_path).unwrap();
        let server = Server::start_with_env(&[], &[("LD_PRELOAD", shim()), ("CLOCK_SHIM", &offset_path)]);
        let clocked = Self { server, offset, offset_path };
        clocked.step_to(HOUR);
        assert!(clocked.ahead_us() > HOUR - 60_000_000, "the shim does not reach the server");
        clocked.step_to(0);
        clocked
    }

    /// Sets the server's clock so far ahead of this machine's.
    fn step_to(&self, offset_us: i64) {
        self.offset.write_all_at(&offset_us.to_ne_bytes(), 0).unwrap();
        // Valkey 9.1 asks the system for the time once a millisecond, and reckons in between.
        std::thread::sleep(Duration::from_millis(2));
    }

    /// How far the server's clock is ahead.
    fn ahead_us(&self) -> i64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        self.now_us() - now.as_micros() as i64
    }

    fn now_us(&self) -> i64 {
        let Value::Array(time) = self.server.query(&["TIME"]) else { panic!("no time") };
        let [seconds, micros] = [0, 1].map(|i: usize| time[i].text().unwrap().parse::<i64>().unwrap());
        seconds * 1_000_000 + micros
    }

    /// The life of the bucket: none if there is no bucket, and never without an end.
    fn life_ms(&self) -> Option<i64> {
        let life = self.server.query(&["PTTL", KEY]).int().unwrap();
        assert_ne!(life, -1, "a key without an end");
        (life != -2).then_some(life)
    }
}

impl Drop for Clocked {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.offset_path);
    }
}

/// A store that asks each time: only the server's clock is stepped here, and what a step does is seen at once.
async fn unremembering(url: &str) -> RedisStore {
    RedisStore::connect(url).await.unwrap().remember_denials(false)
}

fn take(quota: Quota, cost: u64) -> [Charge; 1] {
    [Charge::new(LimitName::try_new("clock").unwrap(), BucketKey::global(), quota, Amount::Take(cost))]
}

async fn ask(store: &RedisStore, quota: Quota, cost: u64) -> Decision {
    store.acquire(&take(quota, cost)).await.unwrap()
}

/// How many of so many requests of one token pass.
async fn admitted(store: &RedisStore, quota: Quota, asked: usize) -> usize {
    let mut admitted = 0;
    for _ in 0..asked {
        admitted += usize::from(ask(store, quota, 1).await.is_allowed());
    }
    admitted
}

#[tokio::test]
async fn a_step_forward_gives_what_the_time_earns_and_at_most_one_capacity() {
    let clocked = Clocked::start();
    let store = unremembering(&clocked.server.url()).await;
    // Ten an hour and three an hour, and what is full in less.
    for (quota, earned) in [
        (Quota::per_hour(10), 10),
        (Quota::per_hour(3).with_capacity(10), 3),
        (Quota::new(10, Duration::from_secs(600)), 10),
    ] {
        clocked.server.query(&["DEL", KEY]);
        clocked.step_to(0);
        assert_eq!(admitted(&store, quota, 15).await, 10);
        clocked.step_to(HOUR);
        assert_eq!(admitted(&store, quota, 30).await, earned, "{quota}");
        clocked.step_to(2 * HOUR);
        assert_eq!(admitted(&store, quota, 30).await, earned, "{quota}");
        assert!(clocked.life_ms().is_some());
    }
}

#[tokio::test]
async fn a_step_back_gives_nothing_and_keeps_nobody_out_for_longer_than_an_empty_bucket_needs_and_a_second() {
    let clocked = Clocked::start();
    let store = unremembering(&clocked.server.url()).await;
    // Full after 2 s.
    let quota = Quota::new(10, 2 * SECOND);
    for cost in [1, 10] {
        clocked.server.query(&["DEL", KEY]);
        assert!(ask(&store, quota, 10).await.is_allowed());
        let before = clocked.now_us();
        clocked.step_to(clocked.ahead_us() - HOUR);
        assert!(clocked.now_us() < before - HOUR / 2);
        // Its life is an hour too long, and not without an end.
        assert!(clocked.life_ms().unwrap() > 3_500_000);
        let asked = Instant::now();
        let denied = ask(&store, quota, cost).await;
        assert!(!denied.is_allowed() && denied.remaining() == Some(0), "{denied:?}");
        // The bucket is empty, and refills from now: the wait is for this cost, and the life is short again.
        let wait = denied.retry_after().unwrap();
        assert_eq!(wait, 2 * SECOND / 10 * cost as u32);
        assert!(clocked.life_ms().unwrap() <= 2001, "counted from the millisecond that had begun");
        // The promise is kept, and what was earned by then is all there is.
        sleep(wait.saturating_sub(asked.elapsed())).await;
        let allowed = ask(&store, quota, cost).await;
        assert!(allowed.is_allowed(), "{allowed:?} after {:?}", asked.elapsed());
    }
    // Nobody is asked before it would have been full: then it is full, or has an hour more to live and is empty.
    clocked.server.query(&["DEL", KEY]);
    assert!(ask(&store, quota, 10).await.is_allowed());
    clocked.step_to(clocked.ahead_us() - HOUR);
    sleep(2 * SECOND + SECOND / 2).await;
    let wait = ask(&store, quota, 10).await.retry_after().unwrap_or_default();
    assert!(wait <= 3 * SECOND, "{wait:?}");
}

#[tokio::test]
async fn a_step_of_half_a_second_gives_nothing_and_every_promise_is_kept() {
    let clocked = Clocked::start();
    let store = unremembering(&clocked.server.url()).await;
    let quota = Quota::per_second(10);
    let mut offset = 0;
    for step in [-500_000, 500_000, -500_000, -500_000, 500_000] {
        clocked.server.query(&["DEL", KEY]);
        let started = Instant::now();
        assert!(ask(&store, quota, 10).await.is_allowed());
        offset += step;
        clocked.step_to(offset);
        let answer = ask(&store, quota, 10).await;
        // The server has decided before that.
        let answered = Instant::now();
        // Forward: half of it is there. Back: it refills from the time that is stored, which is kept.
        let right = if step > 0 { SECOND / 2 } else { SECOND * 3 / 2 };
        let passed = started.elapsed();
        let wait = answer.retry_after().unwrap_or_default();
        assert!(wait <= right && wait >= right.saturating_sub(passed), "{step}: {wait:?} after {passed:?}");
        let most = if step > 0 { 5 } else { 0 } + passed.saturating_sub(SECOND / 2).as_millis() / 100;
        assert!(u128::from(answer.remaining().unwrap()) <= most + u128::from(step > 0), "{answer:?} after {passed:?}");
        assert!(clocked.life_ms().unwrap() <= 2001);
        sleep(wait.saturating_sub(answered.elapsed())).await;
        assert!(ask(&store, quota, 10).await.is_allowed(), "after {wait:?}");
    }
}

/// A failover to a machine with another clock is a step: forward it gives at most one capacity, back it gives nothing.
#[tokio::test]
async fn a_promoted_replica_whose_clock_is_wrong_is_a_step_of_the_clock() {
    // Ten tokens, all back after 600 s.
    let quota = Quota::new(10, Duration::from_secs(600));
    for (ahead_us, given) in [(HOUR, 10), (120_000_000, 2), (0, 0), (-120_000_000, 0), (-HOUR, 0)] {
        let primary = Server::start_with(&["--repl-diskless-sync-delay", "0"]);
        let replica = Clocked::start();
        replica.step_to(ahead_us);
        replica.server.query(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
        until("the replica follows", || info(&replica.server, "master_link_status:") == "up").await;
        let store = unremembering(&primary.url()).await;
        assert_eq!(admitted(&store, quota, 15).await, 10);
        until_replicated(&primary, &replica.server).await;
        primary.kill();
        replica.server.query(&["REPLICAOF", "NO", "ONE"]);
        let store = unremembering(&replica.server.url()).await;
        assert_eq!(admitted(&store, quota, 30).await, given, "{ahead_us}");
        // Nobody waits longer than an empty bucket needs, and a second; and the key has an end.
        let wait = ask(&store, quota, 10).await.retry_after().unwrap();
        assert!(wait <= 601 * SECOND, "{wait:?}");
        assert!(replica.life_ms().unwrap() <= 601_000);
    }
}

/// The script with an account: for each charge it appends to a list, in the same step, whether the bucket was there, the
/// server's time, the units, the reply, and the life and value that it left; of the last of a call only.
fn with_an_account(body: &str) -> String {
    format!(
        "local account_time
        local existed = redis.call('EXISTS', KEYS[1])
        local function body()\n{body}\nend
        local reply = body()\n{EACH_CHARGE}
        each_charge(function(place, a, said, nth, is_last)
            local replied, ahead, left = reply, 0, '- -'
            if type(reply) == 'table' then replied, ahead = reply[place], reply[#KEYS + place] or 0 end
            replied = said(replied)
            if place == #KEYS and is_last then
                left = redis.call('PTTL', KEYS[1]) .. ' ' .. (redis.call('GET', KEYS[1]) or 'none')
            end
            local text = string.format('%d %d %d %d %d %s %s', place + nth > 1 and 1 or existed, account_time[1],
                account_time[2], replied, ahead, ARGV[a + 1], left)
            redis.call('RPUSH', 'account', text)
        end)
        return reply"
    )
}

/// Steps of an hour and of less than a second, back and forth, under traffic: every reply, every value and every life is
/// the model's at the server's own time, and all that is admitted is a capacity for each step forward.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_back_and_forth_under_traffic_agree_with_the_model_call_by_call() {
    const MARK: &str = "local t = redis.call('TIME'); redis.call('RPUSH', 'account', 'mark ' .. t[1] .. ' ' .. t[2])";
    for quota in [Quota::per_second(50), Quota::per_hour(30), Quota::new(7, 3 * SECOND).with_capacity(40)] {
        let clocked = Clocked::start();
        let store = RedisStore::from_connection(Accounted::new(&clocked.server.url(), with_an_account).await)
            .remember_denials(false);
        let stopped = Arc::new(AtomicBool::new(false));
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for task in 0..4 {
            let (store, stopped) = (store.clone(), Arc::clone(&stopped));
            tasks.spawn(async move {
                for call in task.. {
                    if stopped.load(SeqCst) {
                        break;
                    }
                    ask(&store, quota, [1, 2, 1, 5][call % 4]).await;
                    sleep(Duration::from_millis(3)).await;
                }
            });
        }
        // The clock is noted before and after each step, so that what has expired in between is accounted for.
        let (mut offset, mut forward) = (0, 0);
        for step in [
            HOUR,
            -HOUR,
            -HOUR,
            HOUR,
            -500_000,
            500_000,
            -500_000,
            -500_000,
            1_000_000,
            -HOUR,
            HOUR,
            -HOUR,
            2 * HOUR,
            -900_000,
            -900_000,
            -900_000,
            HOUR,
            -1_100_000,
            1_100_000,
            -2 * HOUR,
        ] {
            sleep(Duration::from_millis(120)).await;
            clocked.server.query(&["EVAL", MARK, "0"]);
            offset += step;
            forward += u64::from(step > 0);
            // Between two scripts: within one, a life would be counted from another clock than the level.
            clocked.server.query(&["CLIENT", "PAUSE", "10000", "WRITE"]);
            clocked.step_to(offset);
            clocked.server.query(&["CLIENT", "UNPAUSE"]);
            clocked.server.query(&["EVAL", MARK, "0"]);
        }
        sleep(Duration::from_millis(120)).await;
        stopped.store(true, SeqCst);
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
        let lasted = started.elapsed();

        let Value::Array(account) = clocked.server.query(&["LRANGE", "account", "0", "-1"]) else { panic!("none") };
        let per_us = quota.refill().1.as_micros() as i64;
        let mut model = Model::default();
        // The latest time on the server's clock since the bucket was written.
        let mut latest_us = 0;
        let (mut admitted, mut denied, mut expired) = (0, 0, 0);
        for entry in &account {
            let text = entry.text().unwrap();
            let words: Vec<&str> = text.split(' ').collect();
            let number = |i: usize| -> i64 { words[i].parse().unwrap() };
            let now_us = (number(1) * 1_000_000 + number(2)) as u64;
            latest_us = latest_us.max(now_us);
            if words[0] == "mark" {
                continue;
            }
            let charge = take(quota, (number(5) / per_us) as u64);
            if number(0) == 0 && model.state(&charge[0]).is_some() {
                // Gone: only ever because it was full, at some time.
                let peek = [Charge::new(charge[0].limit().clone(), *charge[0].key(), quota, Amount::Peek)];
                let level = model.acquire(&peek, latest_us)[0].level();
                assert_eq!(level, quota.capacity() as i64 * per_us, "a bucket has gone before its time: {text}");
                model.forget(&charge[0]);
                expired += 1;
            }
            let before = model.state(&charge[0]);
            let right = model.acquire(&charge, now_us)[0];
            assert_eq!(
                (number(3).rem_euclid(2) == 1, number(3).div_euclid(2)),
                (right.is_allowed(), right.level()),
                "{text}"
            );
            assert_eq!(number(4), right.ahead_us() as i64, "{text}");
            let state = model.state(&charge[0]);
            if state != before {
                latest_us = now_us;
            }
            if words[7] != "-" {
                assert_eq!(words[7], state.as_deref().unwrap_or("none"), "{text}");
                if state != before {
                    let life = model.life_ms(&charge[0], now_us).unwrap() as i64;
                    assert!(number(6) <= life + 1, "a life of {} ms, not {life}: {text}", words[6]);
                }
                assert_ne!(number(6), -1, "a key without an end: {text}");
            }
            if right.is_allowed() { admitted += charge[0].cost() } else { denied += 1 }
        }
        let (tokens, per) = quota.refill();
        let bound =
            (1 + forward) * quota.capacity() + (lasted.as_secs_f64() * tokens as f64 / per.as_secs_f64()).ceil() as u64;
        println!(
            "{quota}: {} calls, {denied} denied, {expired} lives over, {admitted} admitted of at most {bound} in {lasted:.1?}",
            account.len()
        );
        assert!(admitted <= bound, "{quota}: {admitted} of at most {bound}");
        assert!(admitted >= quota.capacity() && denied > 0);
    }
}
