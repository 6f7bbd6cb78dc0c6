//! What is sent to `lua/token_bucket.lua`, and what its answer means.

use std::fmt::{self, Write as _};
use std::sync::Arc;

use redis::{Cmd, Value};
use smallvec::SmallVec;

use super::check::Call;
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

    /// The call by the script's hash.
    pub(super) fn evalsha(&self, charges: &[Charge]) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVALSHA").arg(&self.hash);
        self.arguments(&mut cmd, charges);
        cmd
    }

    /// The same call with the script itself.
    pub(super) fn eval(&self, charges: &[Charge]) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(SOURCE);
        self.arguments(&mut cmd, charges);
        cmd
    }

    /// KEYS and ARGV, as the header of the script says.
    fn arguments(&self, cmd: &mut Cmd, charges: &[Charge]) {
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
            cmd.arg(&text).arg(bucket::units(tokens, &quota));
            text.clear();
            let _ = write!(text, ":{}:{}:{}:", quota.capacity(), quota.tokens(), quota.per_us());
            cmd.arg(&text).arg(quota.full()).arg(quota.tokens());
        }
    }

    /// A call of `lua/pace.lua`, by its hash or with the script itself.
    fn pace(&self, verb: &str, script: &str, pacing: &Pacing) -> Cmd {
        let Pacing { limit, key, settings, ask } = pacing;
        let name = Charge::new(limit.clone(), *key, Quota::per_second(1), Amount::Peek);
        let mut text = String::with_capacity(128);
        self.write_key(&mut text, &name);
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

    fn evalsha(&self) -> Cmd {
        self.script.pace("EVALSHA", &self.script.pace_hash, &self.pacing)
    }

    fn eval(&self) -> Cmd {
        self.script.pace("EVAL", PACE, &self.pacing)
    }

    fn read(&self, answer: &Value) -> Option<PaceReply> {
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
    }
}

/// The decision that an answer gives: `None` for any that the script does not give.
pub(super) fn decision(charges: &[Charge], answer: &Value) -> Option<Decision> {
    let mut numbers: SmallVec<[i64; 4]> = SmallVec::new();
    match answer {
        Value::Int(number) => numbers.push(*number),
        Value::Array(values) => {
            for value in values {
                let Value::Int(number) = value else { return None };
                numbers.push(*number);
            }
        }
        Value::BulkString(text) if charges.len() == 2 => {
            for number in std::str::from_utf8(text).ok()?.split(' ') {
                numbers.push(number.parse().ok()?);
            }
        }
        _ => return None,
    }
    let ahead = if numbers.len() == charges.len() { &[] } else { numbers.get(charges.len()..)? };
    if !ahead.is_empty() && ahead.len() != charges.len() {
        return None;
    }
    let mut replies: SmallVec<[Reply; 2]> = SmallVec::new();
    for (i, charge) in charges.iter().enumerate() {
        let (level, allowed) = (numbers[i].div_euclid(2), numbers[i].rem_euclid(2) == 1);
        let ahead_us = ahead.get(i).map_or(Some(0), |ahead| u64::try_from(*ahead).ok())?;
        let full = charge.quota().full();
        if !(-full..=full).contains(&level) {
            return None;
        }
        replies.push(Reply::new(level, allowed, ahead_us));
    }
    Decision::new(charges, &replies)
}
