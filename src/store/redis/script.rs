//! What is sent to `lua/token_bucket.lua`, and what its answer means.

use std::fmt::{self, Write as _};

use redis::{Cmd, Value};
use smallvec::SmallVec;

use crate::bucket;
use crate::charge::{Amount, Charge};
use crate::decision::{Decision, Reply};
use crate::error::ConfigError;
use crate::key::{BucketKey, SecretKey};

const SOURCE: &str = include_str!("../../../lua/token_bucket.lua");

/// The script, and how buckets are named.
pub(super) struct Script {
    hash: String,
    prefix: Box<str>,
    secret: Option<SecretKey>,
}

impl Script {
    pub(super) fn new() -> Self {
        Self { hash: redis::Script::new(SOURCE).get_hash().to_owned(), prefix: "tb".into(), secret: None }
    }

    pub(super) fn with_prefix(&self, prefix: &str) -> Result<Self, ConfigError> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b':');
        if prefix.is_empty() || prefix.len() > 64 || !prefix.bytes().all(allowed) {
            return Err(ConfigError::Prefix { prefix: prefix.to_owned() });
        }
        Ok(Self { hash: self.hash.clone(), prefix: prefix.into(), secret: self.secret.clone() })
    }

    pub(super) fn with_secret(&self, secret: &[u8]) -> Self {
        Self { hash: self.hash.clone(), prefix: self.prefix.clone(), secret: Some(SecretKey::new(secret)) }
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
