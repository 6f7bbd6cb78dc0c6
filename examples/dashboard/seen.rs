//! What has been decided lately, for the page.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;
use tower_token_bucket::{BucketKey, Decision, Outcome};

use super::ROUTES;

const SECONDS: usize = 60;
const BUCKETS_MAX: usize = 20;

/// Requests of one second that were allowed, allowed though a shadow limit would have refused them, and denied.
type Counts = [u32; 3];

pub(super) struct Seen {
    began: Instant,
    /// The seconds in which something came, by number, with the counts of each route; the last is all the rest.
    seconds: VecDeque<(u64, [Counts; ROUTES.len() + 1])>,
    /// How many decisions came from where.
    sources: BTreeMap<String, u64>,
    /// What is known of a limit's bucket: how often it was asked for, and what it said last, and when.
    buckets: HashMap<(String, BucketKey), (u64, Outcome, Instant)>,
}

impl Default for Seen {
    fn default() -> Self {
        let (seconds, sources, buckets) = Default::default();
        Self { began: Instant::now(), seconds, sources, buckets }
    }
}

impl Seen {
    pub(super) fn count(&mut self, route: Option<&str>, key: Option<BucketKey>, decision: &Decision) {
        let second = self.began.elapsed().as_secs();
        if self.seconds.back().is_none_or(|(last, _)| *last < second) {
            self.seconds.push_back((second, Default::default()));
        }
        let would_refuse = |of: &Outcome| of.is_shadow() && (of.is_too_dear() || of.retry_after().is_some());
        let which = match decision.is_allowed() {
            true => usize::from(decision.outcomes().iter().any(would_refuse)),
            false => 2,
        };
        if let Some((_, counts)) = self.seconds.back_mut() {
            counts[ROUTES.iter().position(|(name, _)| route == Some(name)).unwrap_or(ROUTES.len())][which] += 1;
        }
        if self.seconds.len() > SECONDS {
            self.seconds.pop_front();
        }
        *self.sources.entry(format!("{:?}", decision.source()).to_lowercase()).or_default() += 1;
        // An outcome without a level is of a bucket that was not asked.
        for outcome in decision.outcomes().iter().filter(|outcome| outcome.remaining().is_some()) {
            let Some(key) = key else { continue };
            let name = (outcome.limit().to_owned(), key);
            let asked = self.buckets.get(&name).map_or(0, |(asked, ..)| *asked);
            self.buckets.insert(name, (asked + 1, outcome.clone(), Instant::now()));
        }
        while self.buckets.len() > BUCKETS_MAX {
            let fullest = self.buckets.iter().min_by_key(|(_, (_, outcome, at))| full_in(outcome, *at));
            let Some(fullest) = fullest.map(|(name, _)| name.clone()) else { break };
            self.buckets.remove(&fullest);
        }
    }

    pub(super) fn stats(&self) -> Value {
        let now = self.began.elapsed().as_secs();
        let mut history = [[Counts::default(); SECONDS]; ROUTES.len() + 1];
        for (second, counts) in self.seconds.iter().filter(|(second, _)| second + SECONDS as u64 > now) {
            for (route, counts) in counts.iter().enumerate() {
                history[route][SECONDS - 1 - now.saturating_sub(*second) as usize] = *counts;
            }
        }
        let routes = ROUTES.iter().chain(&[("other", 1)]).zip(&history);
        let routes: Vec<_> = routes
            .map(|((route, cost), seconds)| json!({ "route": route, "cost": cost, "seconds": &seconds[..] }))
            .collect();
        let mut buckets: Vec<_> = self.buckets.iter().collect();
        buckets.sort_by(|(a, (a_asked, ..)), (b, (b_asked, ..))| (b_asked, &a.0).cmp(&(a_asked, &b.0)));
        let buckets = buckets.into_iter().map(|((limit, key), (asked, outcome, at))| {
            let (tokens, per) = outcome.quota().refill();
            json!({ "key": key.to_string(), "limit": limit, "shadow": outcome.is_shadow(), "asked": asked,
                "capacity": outcome.quota().capacity(), "rate": tokens as f64 / per.as_secs_f64(),
                "full_in": full_in(outcome, *at).as_secs_f64() })
        });
        json!({ "routes": routes, "buckets": buckets.collect::<Vec<_>>(), "sources": self.sources })
    }
}

/// Time until a bucket is full, which at `at` was as `outcome` says.
fn full_in(outcome: &Outcome, at: Instant) -> Duration {
    outcome.reset_after().unwrap_or_default().saturating_sub(at.elapsed())
}
