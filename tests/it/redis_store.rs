//! `RedisStore` on real servers: the contract of a store, and the account of every token.

use std::collections::HashSet;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::{Cmd, RedisFuture};
use tokio::task::JoinSet;
use tower_token_bucket::conformance::{self, Model};
use tower_token_bucket::{
    Amount, BucketKey, Charge, Decision, LimitName, MemoryStore, Quota, RedisStore, Store, redis,
};

use crate::redis_script::RIGHTS;
use crate::server::{Server, Value};

const SCRIPT: &str = include_str!("../../lua/token_bucket.lua");
const HOUR: Duration = Duration::from_secs(3600);

fn charge(limit: &str, key: BucketKey, quota: Quota, cost: u64) -> Charge {
    Charge::new(LimitName::try_new(limit).unwrap(), key, quota, Amount::Take(cost))
}

async fn plain(server: &Server) -> MultiplexedConnection {
    let client = redis::Client::open(server.url()).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_keeps_the_contract_on_every_kind_of_connection() {
    let server = Server::start();
    conformance::check(&RedisStore::connect(&server.url()).await.unwrap()).await;
    conformance::check(&RedisStore::from_connection(plain(&server).await)).await;
    let resp3 = format!("{}/?protocol=resp3", server.url());
    let client = redis::Client::open(resp3).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    conformance::check(&RedisStore::from_connection(connection).prefix("other").secret("s")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_store_keeps_the_same_contract() {
    conformance::check(&MemoryStore::new()).await;
}

/// What it answers at once is about other buckets.
#[derive(Clone, Debug, Default)]
struct Doubled(MemoryStore, MemoryStore);

impl Store for Doubled {
    type Error = <MemoryStore as Store>::Error;
    type Future = <MemoryStore as Store>::Future;

    fn acquire(&self, charges: &[Charge]) -> Self::Future {
        self.0.acquire(charges)
    }

    fn acquire_at_once(&self, charges: &[Charge]) -> Option<Decision> {
        self.1.acquire_at_once(charges)
    }
}

#[tokio::test]
async fn a_store_that_answers_at_once_from_other_buckets_does_not_keep_it() {
    let checked = tokio::spawn(async { conformance::check(&Doubled::default()).await });
    let panic = checked.await.unwrap_err().into_panic();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains("at-once"), "{text}");
}

#[tokio::test]
async fn every_call_is_one_evalsha_and_no_key_is_without_a_life() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap().remember_denials(false);
    let fast = charge("fast", BucketKey::global(), Quota::per_second(1500).with_capacity(1), 1);
    let both = [fast, charge("slow", BucketKey::global(), Quota::new(1, HOUR).with_capacity(50), 1)];
    store.acquire(&both).await.unwrap();
    let before = server.calls("evalsha");
    for _ in 0..20 {
        store.acquire(&both).await.unwrap();
        for key in server.keys() {
            // 0: its last millisecond; -2: it has just ended; -1 would be no life at all.
            let life = server.query(&["PTTL", &key]).int().unwrap();
            assert!(life >= 0 || life == -2, "{key} has a life of {life}");
        }
    }
    assert_eq!(server.calls("evalsha") - before, 20);
    assert_eq!(server.calls("eval"), 1, "the script is sent once");
    assert_eq!(server.calls("script|load"), 0);
}

/// rate-limit-redis#71, bottleneck#118.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_that_is_gone_is_sent_again_unseen() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let take = [charge("flush", BucketKey::global(), Quota::new(1, HOUR).with_capacity(100), 1)];
    for _ in 0..4 {
        server.query(&["SCRIPT", "FLUSH"]);
        let mut calls = JoinSet::new();
        for _ in 0..64 {
            let (store, take) = (store.clone(), take.clone());
            calls.spawn(async move { store.acquire(&take).await.unwrap().is_allowed() });
        }
        calls.join_all().await;
    }
    let Value::Text(state) = server.query(&["GET", "tb:v1:{global}:flush"]) else { panic!("no bucket") };
    assert!(state.contains(":100:1:3600000000:"), "{state}");
    assert!(!store.acquire(&take).await.unwrap().is_allowed(), "256 calls have taken all 100 tokens");
}

/// A connection that sends a command and loses the answer.
#[derive(Clone)]
struct Lossy {
    inner: MultiplexedConnection,
    sent: Arc<AtomicU64>,
}

impl ConnectionLike for Lossy {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, redis::Value> {
        Box::pin(async move {
            self.sent.fetch_add(1, Ordering::Relaxed);
            self.inner.req_packed_command(cmd).await?;
            Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into())
        })
    }

    the_rest_by_inner!();
}

/// rate-limit-redis#251, #252.
#[tokio::test]
async fn a_lost_answer_is_an_error_and_one_charge() {
    let server = Server::start();
    let inner = plain(&server).await;
    let take = [charge("lost", BucketKey::global(), Quota::new(1, HOUR).with_capacity(9), 1)];
    // Makes the script known.
    RedisStore::from_connection(inner.clone()).acquire(&take).await.unwrap();
    let lossy = Lossy { inner, sent: Arc::default() };
    let store = RedisStore::from_connection(lossy.clone());
    for _ in 0..3 {
        store.acquire(&take).await.unwrap_err();
    }
    assert_eq!(lossy.sent.load(Ordering::Relaxed), 3, "nothing is sent twice");
    let state = server.query(&["GET", "tb:v1:{global}:lost"]);
    let level: u64 = state.text().unwrap().rsplit(':').next().unwrap().parse().unwrap();
    assert_eq!(level / 3_600_000_000, 5, "4 of 9 are taken: {state:?}");
}

#[tokio::test]
async fn a_server_that_is_down_at_the_start_or_restarts_is_found_again() {
    let server = Server::start();
    server.kill();
    let store = RedisStore::connect(&server.url()).await.expect("a server that is down is no error");
    let take = [charge("down", BucketKey::global(), Quota::new(1, HOUR).with_capacity(9), 1)];
    let error = store.acquire(&take).await.unwrap_err();
    assert!(error.to_string().contains("no connection to Redis"), "{error}");
    for _ in 0..3 {
        server.restart();
        let until = tokio::time::Instant::now() + Duration::from_secs(5);
        while store.acquire(&take).await.is_err() {
            assert!(tokio::time::Instant::now() < until, "the store does not find the server again");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(server.keys().len(), 1);
    }
}

#[tokio::test]
async fn urls_that_cannot_be_used_are_refused_and_not_shown() {
    for url in ["", "http://canary@127.0.0.1", "redis://:canary@host:port", "rediss://:canary@host:port", "canary"] {
        let error = RedisStore::connect(url).await.unwrap_err().to_string();
        assert!(error.contains("the Redis URL cannot be used") && !error.contains("canary"), "{url}: {error}");
    }
}

#[tokio::test]
async fn a_password_is_in_no_error_and_no_debug() {
    let server = Server::start_with(&["--requirepass", "right"]);
    let url = format!("redis://:canary-password@127.0.0.1:{}", server.port());
    let store = RedisStore::connect(&url).await.unwrap().secret("canary-secret");
    let error = store.acquire(&[charge("a", BucketKey::global(), Quota::per_second(1), 1)]).await.unwrap_err();
    let shown = format!("{error} {error:?} {store:?}");
    assert!(!shown.contains("canary"), "{shown}");
    conformance::check(&RedisStore::connect(&server.url()).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_rights_that_the_readme_prints_is_enough() {
    let line = format!("ACL SETUSER limiter on >password {RIGHTS}");
    assert!(include_str!("../../README.md").contains(&line), "the README has the line {line}");
    let server = Server::start();
    server.query(&line.split(' ').collect::<Vec<_>>());
    server.query(&["ACL", "SETUSER", "default", "off"]);
    let url = format!("redis://limiter:password@127.0.0.1:{}", server.port());
    conformance::check(&RedisStore::connect(&url).await.unwrap()).await;
}

/// discourse#14682, n8n#24636, erpc#1058, bottleneck#180.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_fit_one_pattern_whatever_the_identity_says() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let quota = Quota::new(1, HOUR);
    let mut hostile: Vec<BucketKey> = ["", "{}", "}{", "a}:b{c", "\r\nSET x y\r\n", "\0", "ключ", "*", "{a}{b}"]
        .into_iter()
        .flat_map(|text| [BucketKey::id(text), BucketKey::credential(text)])
        .collect();
    hostile.push(BucketKey::id("x".repeat(1 << 20)));
    for address in ["203.0.113.9", "::ffff:203.0.113.9", "2001:db8::1", "2001:db8::2", "::1"] {
        hostile.push(BucketKey::ip(address.parse().unwrap()));
    }
    hostile.push(BucketKey::global());
    let distinct: HashSet<_> = hostile.iter().copied().collect();
    for key in &hostile {
        store.acquire(&[charge("a.b_c-D", *key, quota, 1)]).await.unwrap();
    }
    let keys = server.keys();
    assert_eq!(keys.len(), distinct.len(), "each identity has a bucket of its own");
    for key in &keys {
        let identity = key.strip_prefix("tb:v1:{").and_then(|rest| rest.strip_suffix("}:a.b_c-D")).expect(key);
        let hex = |text: &str| text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let fits = match identity.split_once(':') {
            None => identity == "global",
            Some(("ip", address)) => matches!(address, "203.0.113.9" | "2001:db8::/64" | "::/64"),
            Some(("key" | "id", hash)) => hex(hash),
            Some(_) => false,
        };
        assert!(fits, "{key}");
    }
    // A secret changes the hashes and nothing else; the same secret gives the same.
    for _ in 0..2 {
        let secret = store.clone().secret("s3cret").prefix("with");
        secret
            .acquire(&[charge("a", BucketKey::id("x"), quota, 1), charge("a", BucketKey::global(), quota, 1)])
            .await
            .unwrap();
    }
    let with: Vec<_> = server.keys().into_iter().filter(|key| key.starts_with("with:v1:{")).collect();
    assert_eq!(with.len(), 2);
    assert!(with.contains(&"with:v1:{global}:a".to_owned()));
    assert!(!with.contains(&format!("with:v1:{{{}}}:a", BucketKey::id("x"))));
}

/// A value that is no bucket concerns its key only.
#[tokio::test]
async fn a_foreign_value_is_an_error_and_stays_as_it_is() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let key = "tb:v1:{global}:foreign";
    let take = [charge("foreign", BucketKey::global(), Quota::per_second(5), 1)];
    let with_other = [take[0].clone(), charge("other", BucketKey::global(), Quota::new(1, HOUR).with_capacity(5), 1)];
    for set in [&["SET", key, "hello"][..], &["SET", key, "1:2:3"], &["HSET", key, "a", "b"]] {
        server.query(&["DEL", key]);
        server.query(set);
        let before = server.query(&["DUMP", key]);
        for charges in [&take[..], &with_other] {
            let error = store.acquire(charges).await.unwrap_err().to_string();
            assert!(error.contains("TOKENBUCKET") || error.contains("WRONGTYPE"), "{error}");
        }
        assert_eq!(server.query(&["DUMP", key]), before);
    }
    assert_eq!(server.keys(), [key], "the sibling was not charged");
}

/// bucket4j#602: instances with different settings during a rollout. A slower quota never loses a drained bucket to the
/// life that a faster one gave it.
#[tokio::test]
async fn a_rollout_hands_out_no_more_than_the_larger_quota() {
    let server = Server::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let hundred = Quota::new(1, HOUR).with_capacity(100);
    let ten = Quota::new(1, HOUR).with_capacity(10);
    let mut admitted = 0;
    for i in 0..250 {
        let quota = if i % 2 == 0 { hundred } else { ten };
        let decision = store.acquire(&[charge("caps", BucketKey::global(), quota, 1)]).await.unwrap();
        admitted += u32::from(decision.is_allowed());
    }
    assert!((10..=100).contains(&admitted), "{admitted}");

    // Drained under a quota that refills in 100 ms, then asked under one that needs an hour: the denial extends the life.
    let fast = [charge("lives", BucketKey::global(), Quota::new(10, Duration::from_millis(100)), 10)];
    let slow = [charge("lives", BucketKey::global(), Quota::new(10, HOUR), 10)];
    assert!(store.acquire(&fast).await.unwrap().is_allowed());
    assert!(!store.acquire(&slow).await.unwrap().is_allowed());
    let life = server.query(&["PTTL", "tb:v1:{global}:lives"]).int().unwrap();
    assert!(life > 3_000_000, "{life}");
    tokio::time::sleep(Duration::from_millis(150)).await;
    assert!(!store.acquire(&slow).await.unwrap().is_allowed(), "the time since is earned at the slow rate");
}

/// Calls a function with the place of each charge of a call, in order, and with where its values are in ARGV.
pub(crate) const EACH_CHARGE: &str = "
    -- What is said to one of equal takes, of which the first is told what it found.
    local function said(reply, units, nth)
        local level = (reply - reply % 2) / 2
        local made = math.min(math.floor(math.max(level, 0) / units), nth)
        level = level - made * units
        if made == nth and level >= units then return 2 * (level - units) + 1 end
        return 2 * level
    end
    local function each_request(of, place, a)
        local times = string.match(ARGV[a], '^take (%d+)$')
        if not times then return of(place, a, function(reply) return reply end, 0, true) end
        for nth = 0, times - 1 do
            of(place, a, function(reply) return said(reply, ARGV[a + 1] + 0, nth) end, nth, nth == times - 1)
        end
    end
    local function each_charge(of)
        if #KEYS == 1 then return each_request(of, 1, 1) end
        local place, a = 0, 1
        while place < #KEYS do
            local requests, charges = ARGV[a] + 0, ARGV[a + 1] + 0
            for i = 0, requests * charges - 1 do
                place = place + 1
                each_request(of, place, a + 2 + 5 * (i % charges))
            end
            a = a + 2 + 5 * charges
        end
    end";

/// Sends a script of a test's own in the place of the store's.
#[derive(Clone)]
pub(crate) struct Accounted {
    inner: MultiplexedConnection,
    script: Arc<str>,
}

impl Accounted {
    /// The script is made of the store's, which leaves the time that it has read in `account_time`.
    pub(crate) async fn new(url: &str, script: impl FnOnce(&str) -> String) -> Self {
        const TIME: &str = "local time = redis.call('TIME')\n";
        assert_eq!(SCRIPT.matches(TIME).count(), 1);
        let body = SCRIPT.replace(TIME, "local time = redis.call('TIME')\naccount_time = time\n");
        let client = redis::Client::open(url).unwrap();
        // On a busy machine an answer may take longer than redis-rs waits by itself.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let inner = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
        Self { inner, script: script(&body).into() }
    }
}

/// The script with an account: for each charge the server's time, the arguments and the reply are appended to a list, in
/// the same step.
fn with_an_account(body: &str) -> String {
    format!(
        "local account_time\nlocal function body()\n{body}\nend\nlocal reply = body()\n{EACH_CHARGE}
        each_charge(function(place, a, said)
            local replied = said(type(reply) == 'table' and reply[place] or reply)
            redis.call('RPUSH', 'account', account_time[1] .. ' ' .. account_time[2] .. ' ' .. ARGV[a + 1] .. ' ' ..
                ARGV[a + 2] .. ' ' .. string.format('%.0f', replied))
        end)
        return reply"
    )
}

impl ConnectionLike for Accounted {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, redis::Value> {
        Box::pin(async move {
            let mut args = cmd.args_iter().map(|arg| match arg {
                redis::Arg::Simple(text) => text.to_vec(),
                _ => unreachable!("a script call has no cursor"),
            });
            let verb = args.next().unwrap();
            args.next();
            let mut sent = Cmd::new();
            if verb == b"EVALSHA" {
                sent.arg("EVALSHA").arg(redis::Script::new(&self.script).get_hash());
            } else {
                sent.arg("EVAL").arg(&*self.script);
            }
            for arg in args {
                sent.arg(arg);
            }
            self.inner.req_packed_command(&sent).await
        })
    }

    the_rest_by_inner!();
}

/// One of the processes of the accounting test; by itself it does nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accounting_process() {
    let Ok(job) = std::env::var("TOKEN_BUCKET_ACCOUNTING") else { return };
    let fields: Vec<&str> = job.split(' ').collect();
    let [url, capacity, tokens, per_us, calls] = fields[..] else { panic!("{job}") };
    let number = |text: &str| text.parse::<u64>().unwrap();
    let quota = Quota::from_parts(number(capacity), number(tokens), Duration::from_micros(number(per_us)));
    let store = RedisStore::from_connection(Accounted::new(url, with_an_account).await).remember_denials(false);
    let mut tasks = JoinSet::new();
    for task in 0..16 {
        let (store, calls) = (store.clone(), number(calls));
        tasks.spawn(async move {
            for call in 0..calls {
                let cost = [1, 1, 2, 3, 7][((task + call) % 5) as usize].min(quota.capacity());
                store.acquire(&[charge("account", BucketKey::global(), quota, cost)]).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
}

/// Rule 2 on the server's own clock: 4 processes of 16 tasks each on one key, with processes that end and start and a
/// script that is flushed in between. Every admission and every refusal is compared with the exact model.
#[test]
fn every_token_is_accounted_for_on_the_servers_own_clock() {
    for (capacity, tokens, per) in [
        (5, 1, Duration::from_secs(86_400)),
        (400, 1, Duration::from_secs(86_400)),
        (20, 3, Duration::from_secs(1)),
        (100, 100, Duration::from_secs(1)),
        (1000, 5000, Duration::from_secs(1)),
    ] {
        let server = Server::start();
        let quota = Quota::from_parts(capacity, tokens, per);
        let spawn = |calls: u32| {
            let job = format!("{} {capacity} {tokens} {} {calls}", server.url(), per.as_micros());
            Command::new(std::env::current_exe().unwrap())
                .args(["redis_store::accounting_process", "--exact"])
                .env("TOKEN_BUCKET_ACCOUNTING", job)
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        };
        // Four at a time; as one ends, the next starts.
        let mut running: Vec<_> = (0..4).map(|i| spawn(40 + 40 * i)).collect();
        let mut started = 4;
        while !running.is_empty() {
            server.query(&["SCRIPT", "FLUSH"]);
            std::thread::sleep(Duration::from_millis(20));
            running.retain_mut(|process| match process.try_wait().unwrap() {
                Some(status) => {
                    assert!(status.success());
                    false
                }
                None => true,
            });
            while running.len() < 4 && started < 7 {
                running.push(spawn(60));
                started += 1;
            }
        }

        let Value::Array(account) = server.query(&["LRANGE", "account", "0", "-1"]) else { panic!("no account") };
        assert_eq!(account.len(), 16 * (40 + 80 + 120 + 160 + 3 * 60));
        let mut model = Model::default();
        let (full, n) = (i128::from(capacity) * i128::from(quota.refill().1.as_micros() as u64), quota.refill().0);
        // The largest excess of what was admitted over what any interval that ends here allows.
        let (mut excess, mut last_us, mut admitted) = (0i128, 0, 0);
        for entry in &account {
            let words: Vec<u64> =
                entry.text().unwrap().split(' ').map(|word| word.parse().unwrap_or(u64::MAX)).collect();
            let [seconds, micros, units, _, reply] = words[..] else { panic!("{entry:?}") };
            let now_us = seconds * 1_000_000 + micros;
            let per_us = quota.refill().1.as_micros() as u64;
            let take = [charge("account", BucketKey::global(), quota, units / per_us)];
            let right = model.acquire(&take, now_us)[0];
            assert_eq!(reply % 2 == 1, right.is_allowed(), "{quota}: {entry:?}");
            assert_eq!(reply / 2, right.level() as u64, "{quota}: {entry:?}");
            if right.is_allowed() {
                excess = (excess - i128::from(now_us - last_us) * i128::from(n)).max(0) + i128::from(units);
                assert!(excess <= full, "{quota}: an interval that ends at {now_us} admits more than it may");
                (last_us, admitted) = (now_us, admitted + units / per_us);
            }
        }
        assert!(admitted >= capacity / 2, "{quota}: {admitted} tokens");
    }
}
