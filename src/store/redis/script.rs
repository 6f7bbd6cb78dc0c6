//! What is sent to `lua/token_bucket.lua`, and what its answer means.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use redis::{Cmd, Value};
use smallvec::SmallVec;

use super::check::{Acquire, Call};
use super::error::{RedisError, RedisErrorKind};
use crate::bucket;
use crate::charge::{Amount, Charge};
use crate::decision::{Decision, Reply};
use crate::error::ConfigError;
use crate::key::{BucketKey, SecretKey};
use crate::outbound::Pacing;
use crate::pace::{PaceAsk, PaceReply};
use crate::quota::Quota;

const SOURCE: &str = include_str!("../../../lua/token_bucket.lua");
const PACE: &str = include_str!("../../../lua/pace.lua");

/// How a script is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Hash,
    /// With the script itself.
    Source,
}

/// The scripts, and how buckets are named.
#[derive(Clone)]
pub(super) struct Script {
    hash: String,
    pace_hash: String,
    prefix: Box<str>,
    secret: Option<SecretKey>,
}

impl Script {
    pub(super) fn new() -> Self {
        let hash = |source| redis::Script::new(source).get_hash().to_owned();
        Self { hash: hash(SOURCE), pace_hash: hash(PACE), prefix: "tb".into(), secret: None }
    }

    pub(super) fn with_prefix(&self, prefix: &str) -> Result<Self, ConfigError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b':');
        if prefix.is_empty() || prefix.len() > 64 || !prefix.bytes().all(allowed) {
            return Err(ConfigError::Prefix { prefix: prefix.to_owned() });
        }
        Ok(Self { prefix: prefix.into(), ..self.clone() })
    }

    pub(super) fn with_secret(&self, secret: &[u8]) -> Self {
        Self { secret: Some(SecretKey::new(secret)), ..self.clone() }
    }

    /// The call for one request: by the script's hash, or with the script itself. KEYS and ARGV are as the header of the
    /// script says.
    pub(super) fn call(&self, by: By, charges: &[Charge]) -> Cmd {
        let mut cmd = Cmd::new();
        self.write_verb(&mut cmd, by);
        cmd.arg(charges.len());
        let mut text = String::with_capacity(128);
        for charge in charges {
            text.clear();
            self.write_key(&mut text, charge);
            cmd.arg(&text);
        }
        if charges.len() > 1 {
            // One request of that many charges.
            cmd.arg(1).arg(charges.len());
        }
        write_charges(&mut cmd, &mut text, charges, 1);
        cmd
    }

    fn write_verb(&self, cmd: &mut Cmd, by: By) {
        match by {
            By::Hash => cmd.arg("EVALSHA").arg(&self.hash),
            By::Source => cmd.arg("EVAL").arg(SOURCE),
        };
    }

    /// A call of `lua/pace.lua`, by its hash or with the script itself.
    fn pace(&self, verb: &str, script: &str, pacing: &Pacing) -> Cmd {
        let Pacing { limit, key, settings, ask } = pacing;
        let name = Charge::new(limit.clone(), *key, Quota::per_second(1), Amount::Peek);
        let mut text = String::with_capacity(128);
        self.write_key(&mut text, &name);
        // No limit's name: a bucket of another kind.
        text.push_str(":rate");
        let (kind, amount, random) = match ask {
            PaceAsk::Take(tokens) => ("take", i64::try_from(*tokens).unwrap_or(i64::MAX), 0),
            PaceAsk::Look => ("look", 0, 0),
            PaceAsk::Refused { hint_us: Some(hint), .. } => ("refused", i64::try_from(*hint).unwrap_or(i64::MAX), 0),
            PaceAsk::Refused { hint_us: None, random_ppm } => ("refused", -1, *random_ppm),
            PaceAsk::Pause { hint_us } => ("pause", i64::try_from(*hint_us).unwrap_or(i64::MAX), 0),
        };
        let mut cmd = Cmd::new();
        cmd.arg(verb).arg(script).arg(1).arg(text).arg(kind).arg(amount).arg(random);
        for setting in
            [settings.capacity, settings.ceiling, settings.floor, settings.decrease_ppm, settings.increase_ppm]
        {
            cmd.arg(setting);
        }
        cmd
    }

    /// `tb:v1:{identity}:limit`: the identity is the hash tag, so that all limits on it share a slot.
    fn write_key(&self, text: &mut String, charge: &Charge) {
        let _ = write!(text, "{}:v1:{{{}}}:{}", self.prefix, self.identity(charge), charge.limit());
    }

    fn identity(&self, charge: &Charge) -> BucketKey {
        match &self.secret {
            Some(secret) => charge.key().under(secret),
            None => *charge.key(),
        }
    }

    /// The slot of a charge's bucket in a cluster: that of its hash tag
    /// ([specification](https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags)).
    pub(super) fn slot(&self, charge: &Charge) -> usize {
        let tag = self.identity(charge).to_string();
        usize::from(crc16::State::<crc16::XMODEM>::calculate(tag.as_bytes())) % 16_384
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script")
            .field("hash", &self.hash)
            .field("prefix", &self.prefix)
            .field("secret", &self.secret.is_some())
            .finish()
    }
}

/// One question about a rate that adapts.
#[derive(Clone)]
pub(super) struct PaceCall {
    pub(super) script: Arc<Script>,
    pub(super) pacing: Pacing,
}

impl PaceCall {
    pub(super) fn slot(&self) -> usize {
        let Pacing { limit, key, .. } = &self.pacing;
        self.script.slot(&Charge::new(limit.clone(), *key, Quota::per_second(1), Amount::Peek))
    }
}

impl Call for PaceCall {
    type Answer = PaceReply;

    fn command(&self, by: By) -> Cmd {
        match by {
            By::Hash => self.script.pace("EVALSHA", &self.script.pace_hash, &self.pacing),
            By::Source => self.script.pace("EVAL", PACE, &self.pacing),
        }
    }

    fn read(&self, answer: &Value) -> Result<PaceReply, RedisError> {
        let reply = || {
            let Value::Array(values) = answer else { return None };
            let [Value::Int(allowed), Value::Int(level), Value::Int(ahead), Value::Int(rate), Value::Int(floored)] =
                values[..]
            else {
                return None;
            };
            let settings = &self.pacing.settings;
            let rate = u64::try_from(rate).ok().filter(|rate| (settings.floor..=settings.ceiling).contains(rate))?;
            let (ahead_us, floored_us) = (u64::try_from(ahead).ok()?, u64::try_from(floored).ok());
            Some(PaceReply { allowed: allowed == 1, level, ahead_us, rate, floored_us })
        };
        reply().ok_or(RedisError::new(RedisErrorKind::Reply))
    }
}

/// The values of each charge in ARGV. A charge by itself may be that of several requests.
fn write_charges(cmd: &mut Cmd, text: &mut String, charges: &[Charge], times: usize) {
    for charge in charges {
        let quota = charge.quota();
        let (kind, tokens) = match charge.amount() {
            Amount::Take(_) if charge.is_too_dear() => ("refuse", 0),
            Amount::Take(tokens) => ("take", tokens),
            Amount::Spend(tokens) => ("spend", tokens),
            Amount::Give(tokens) => ("give", tokens),
            Amount::Peek => ("peek", 0),
        };
        text.clear();
        let _ = write!(text, "{}{kind}", if charge.is_shadow() { "shadow " } else { "" });
        if times > 1 {
            let _ = write!(text, " {times}");
        }
        cmd.arg(&*text).arg(bucket::units(tokens, &quota));
        text.clear();
        let _ = write!(text, ":{}:{}:{}:", quota.capacity(), quota.tokens(), quota.per_us());
        cmd.arg(&*text).arg(quota.full()).arg(quota.tokens());
    }
}

/// A call for many requests, and which part of its answer is each one's. The result is that of a call for each, in order:
/// what is changed is only the order of those that have no bucket in common.
pub(super) fn call_for_all(by: By, requests: &[&Acquire]) -> (Cmd, Vec<Part>) {
    let total = requests.iter().map(|request| request.charges.len()).sum();
    if let [request] = requests {
        return (request.script.call(by, &request.charges), vec![Part { place: 0, total, nth: None }]);
    }
    let mut text = String::with_capacity(64 * total);
    let mut ends = Vec::with_capacity(total);
    for request in requests {
        for charge in request.charges.iter() {
            request.script.write_key(&mut text, charge);
            ends.push(text.len());
        }
    }
    let key = |i: usize| &text[i.checked_sub(1).map_or(0, |before| ends[before])..ends[i]];
    // Buckets by number, in the order in which they are named first.
    let mut numbers = HashMap::with_capacity(total);
    let buckets: Vec<usize> = (0..total)
        .map(|i| {
            let next = numbers.len();
            *numbers.entry(key(i)).or_insert(next)
        })
        .collect();

    // Requests that make the same charges are a run. One joins an earlier run where none after that names its buckets.
    let mut runs: Vec<Vec<(usize, usize)>> = Vec::new();
    let mut last = vec![0; numbers.len()];
    let mut first = 0;
    for (i, request) in requests.iter().enumerate() {
        let of_it = &buckets[first..first + request.charges.len()];
        let from = of_it.iter().map(|bucket| last[*bucket]).max().unwrap_or(0);
        let same = |run: &usize| is_same(&requests[runs[*run][0].0].charges, &request.charges);
        let run = (from..runs.len()).find(same).unwrap_or(runs.len());
        if run == runs.len() {
            runs.push(Vec::new());
        }
        runs[run].push((i, first));
        of_it.iter().for_each(|bucket| last[*bucket] = run);
        first += of_it.len();
    }

    // What is named, one after the other, and for how many requests each.
    let mut named: Vec<(Vec<usize>, usize, &[Charge])> = Vec::new();
    let mut parts = vec![Part { place: 0, total: 0, nth: None }; requests.len()];
    let mut place = 0;
    for run in &mut runs {
        let charges = &*requests[run[0].0].charges;
        if !matches!(charges, [charge] if is_plain_take(charge)) {
            let mut keys = Vec::new();
            for (request, first) in run {
                parts[*request].place = place + keys.len();
                keys.extend(*first..*first + charges.len());
            }
            place += keys.len();
            named.push((keys, 1, charges));
            continue;
        }
        // Those of one bucket are named once, and those of as many requests together.
        run.sort_by_key(|(_, first)| buckets[*first]);
        let mut groups: Vec<&[(usize, usize)]> = run.chunk_by(|a, b| buckets[a.1] == buckets[b.1]).collect();
        groups.sort_by_key(|group| group.len());
        for alike in groups.chunk_by(|a, b| a.len() == b.len()) {
            for (i, group) in alike.iter().enumerate() {
                for (nth, (request, _)) in group.iter().enumerate() {
                    parts[*request].place = place + i;
                    parts[*request].nth = (group.len() > 1).then_some(nth as u32);
                }
            }
            place += alike.len();
            named.push((alike.iter().map(|group| group[0].1).collect(), alike[0].len(), charges));
        }
    }
    parts.iter_mut().for_each(|part| part.total = place);

    let mut cmd = Cmd::with_capacity(3 + place + 7 * named.len(), text.len() + 128 * named.len() + 128);
    requests[0].script.write_verb(&mut cmd, by);
    cmd.arg(place);
    named.iter().flat_map(|(keys, ..)| keys).for_each(|i| _ = cmd.arg(key(*i)));
    let mut text = String::with_capacity(64);
    for (keys, times, charges) in named {
        if place > 1 {
            cmd.arg(keys.len() / charges.len()).arg(charges.len());
        }
        write_charges(&mut cmd, &mut text, charges, times);
    }
    (cmd, parts)
}

/// A take that can pass, and may refuse.
fn is_plain_take(charge: &Charge) -> bool {
    matches!(charge.amount(), Amount::Take(_)) && !charge.is_shadow() && !charge.is_too_dear()
}

/// Whether these are the same charges, on whatever buckets.
fn is_same(some: &[Charge], others: &[Charge]) -> bool {
    let what = |charge: &Charge| (charge.amount(), charge.is_shadow(), charge.quota());
    some.len() == others.len() && some.iter().zip(others).all(|(a, b)| what(a) == what(b))
}

/// Which charges of an answer are meant: all of a call for one request, some of a call for many.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The first.
    pub(super) place: usize,
    /// How many replies there are.
    pub(super) total: usize,
    /// Of equal takes from one bucket, which have one reply, the one after so many.
    pub(super) nth: Option<u32>,
}

/// What is said to one of equal takes, of which the first found `level` units.
fn nth_take(level: i64, units: i64, nth: u32) -> (i64, bool) {
    let made = (level.max(0) / units).min(i64::from(nth));
    let left = level - made * units;
    if left >= units && made == i64::from(nth) { (left - units, true) } else { (left, false) }
}

/// What an answer says to these charges. An error in the place of a reply is theirs alone.
pub(super) fn decision(charges: &[Charge], answer: &Value, part: Part) -> Result<Decision, RedisError> {
    let wrong = || RedisError::new(RedisErrorKind::Reply);
    let texts: SmallVec<[&str; 2]> = match answer {
        Value::BulkString(text) if part.total == 2 => {
            std::str::from_utf8(text).map_err(|_| wrong())?.split(' ').collect()
        }
        _ => SmallVec::new(),
    };
    let values = if let Value::Array(values) = answer { values } else { std::slice::from_ref(answer) };
    let count = values.len().max(texts.len());
    let is_ahead = count == 2 * part.total;
    if count != part.total && !is_ahead {
        return Err(wrong());
    }
    let number = |place: usize| match (texts.get(place), values.get(place)) {
        (Some(text), _) => text.parse().map_err(|_| wrong()),
        (None, Some(Value::Int(number))) => Ok(*number),
        (None, Some(Value::ServerError(error))) => Err(RedisError::sent(error.clone().into())),
        (None, _) => Err(wrong()),
    };
    let mut replies: SmallVec<[Reply; 2]> = SmallVec::new();
    for (place, charge) in (part.place..).zip(charges) {
        let reply: i64 = number(place)?;
        let ahead = if is_ahead { number(part.total + place)? } else { 0 };
        let (mut level, mut allowed) = (reply.div_euclid(2), reply.rem_euclid(2) == 1);
        let full = charge.quota().full();
        if !(-full..=full).contains(&level) {
            return Err(wrong());
        }
        if let Some(nth) = part.nth {
            (level, allowed) = nth_take(level, bucket::units(charge.cost(), &charge.quota()), nth);
        }
        replies.push(Reply::new(level, allowed, u64::try_from(ahead).map_err(|_| wrong())?));
    }
    Decision::new(charges, &replies).ok_or_else(wrong)
}
