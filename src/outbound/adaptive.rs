//! A rate that adapts to what a peer says, in a limiter.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::error::AcquireError;
use super::event::{Event, RateState};
use super::heard::Heard;
use super::limiter::{Limiter, Shared};
use super::queue::{Known, random};
use super::rates::{AdaptiveStore, Pacing, Rates};
use crate::checks::Checks;
use crate::error::{ConfigError, or_panic};
use crate::failure::{OnStoreFailure, RETRY_AFTER};
use crate::key::BucketKey;
use crate::metrics::{self, Began, End};
use crate::pace::{AdaptiveRate, PaceAsk, PaceReply, PaceSettings};
use crate::store::Store;
use crate::store::memory::MemoryStore;

/// How the rate adapts, and where that is kept.
#[derive(Clone)]
pub(super) struct Adaptive {
    settings: PaceSettings,
    rates: Rates,
    /// Where it is kept while the store fails.
    local: MemoryStore,
    pub(super) heard: Arc<Heard>,
}

impl<St: AdaptiveStore> Limiter<St> {
    /// Adapts the rate of each key to what its peer says, for all senders that share the store. The bucket keeps the
    /// capacity of the quota; the rate is [`AdaptiveRate`]'s in the place of the quota's, so that
    /// [`AdaptiveRate::of(quota)`](AdaptiveRate::of) never exceeds it. To obey `Retry-After` at a constant rate, let floor and
    /// ceiling be the same.
    ///
    /// All senders to a peer adapt, or none does: the buckets of those that do are others. What a peer has said outlasts the
    /// store, in this process: its cooldown and the rate that it has led to hold while the store fails, and a cooldown that
    /// begins then is told to the store when it is back.
    ///
    /// # Panics
    ///
    /// When the rate cannot adapt so; [`try_adaptive`](Self::try_adaptive) returns the error.
    #[must_use]
    #[track_caller]
    pub fn adaptive(self, rate: AdaptiveRate) -> Self {
        or_panic(self.try_adaptive(rate))
    }

    /// Adapts the rate, like [`adaptive`](Self::adaptive).
    ///
    /// # Errors
    ///
    /// [`ConfigError::AdaptiveRate`] for settings out of their ranges, and for a capacity above 2,251,799.
    pub fn try_adaptive(self, rate: AdaptiveRate) -> Result<Self, ConfigError> {
        let settings = PaceSettings::try_new(self.shared.quota.capacity(), rate)?;
        let rates = self.shared.checks.store().rates();
        let (local, heard) = (MemoryStore::new(), Arc::default());
        Ok(self.set(|shared| shared.adaptive = Some(Adaptive { settings, rates, local, heard })))
    }
}

impl<St> Limiter<St> {
    #[cfg(feature = "ratelimit-fields")]
    pub(super) fn is_adaptive(&self) -> bool {
        self.shared.adaptive.is_some()
    }
}

impl<St: Store> Limiter<St> {
    /// The rate of a key at the moment, in tokens per second: what it has adapted to, or the quota's.
    ///
    /// # Errors
    ///
    /// [`AcquireError::StoreFailed`], under [`OnStoreFailure::Deny`].
    pub async fn rate(&self, key: BucketKey) -> Result<f64, AcquireError> {
        self.rate_state(key).await.map(|state| state.rate)
    }

    /// The rate of a key at the moment, its cooldown, and the time at the floor.
    ///
    /// # Errors
    ///
    /// [`AcquireError::StoreFailed`], under [`OnStoreFailure::Deny`].
    pub async fn rate_state(&self, key: BucketKey) -> Result<RateState, AcquireError> {
        match &self.shared.adaptive {
            Some(adaptive) => {
                let (reply, _) = self.shared.pace(adaptive, key, PaceAsk::Look).await?;
                Ok(RateState::of(&reply))
            }
            None => {
                let (tokens, per) = self.shared.quota.refill();
                Ok(RateState { rate: tokens as f64 / per.as_secs_f64(), cooldown: Duration::ZERO, at_floor: None })
            }
        }
    }

    /// The peer has refused: with a time to wait, or without. The bucket of the key is empty until that is over, and its
    /// rate is lowered. [`ThrottleLayer`](super::ThrottleLayer) calls this itself. Without
    /// [`adaptive`](Self::adaptive) nothing happens.
    ///
    /// More than an hour counts as an hour. A peer that gives no time is left alone for half a second to a second at random,
    /// which at most doubles each time that it answers nothing in between, up to a minute.
    ///
    /// # Errors
    ///
    /// [`AcquireError::StoreFailed`], under [`OnStoreFailure::Deny`].
    pub async fn refused(&self, key: BucketKey, retry_after: Option<Duration>) -> Result<(), AcquireError> {
        metrics::refused(self.shared.limit.as_str());
        let ask = PaceAsk::Refused { hint_us: retry_after.map(micros), random_ppm: (random() * 1e6) as u64 };
        self.cool_down(key, ask, Event::Refused).await
    }

    /// The peer has nothing left for so long, at most an hour, and has refused nothing: the bucket of the key is empty until
    /// that is over, and its rate stays. Without [`adaptive`](Self::adaptive) nothing happens.
    ///
    /// # Example
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_token_bucket::outbound::{AdaptiveRate, Limiter};
    /// use tower_token_bucket::{BucketKey, MemoryStore, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), tower_token_bucket::outbound::AcquireError> {
    /// let quota = Quota::per_second(10);
    /// let limiter = Limiter::new(MemoryStore::new(), "webhooks", quota).adaptive(AdaptiveRate::of(quota));
    /// let endpoint = BucketKey::id("endpoint 7");
    /// limiter.pause(endpoint, Duration::from_secs(60)).await?; // "down for a minute"
    /// limiter.refused(endpoint, Some(Duration::from_secs(90))).await?; // 429 with Retry-After: 90
    /// let state = limiter.rate_state(endpoint).await?;
    /// assert_eq!((state.rate, state.cooldown), (5.0, Duration::from_secs(90)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`AcquireError::StoreFailed`], under [`OnStoreFailure::Deny`].
    pub async fn pause(&self, key: BucketKey, wait: Duration) -> Result<(), AcquireError> {
        self.cool_down(key, PaceAsk::Pause { hint_us: micros(wait) }, Event::Paused).await
    }

    async fn cool_down(
        &self,
        key: BucketKey,
        ask: PaceAsk,
        event: impl FnOnce(RateState) -> Event,
    ) -> Result<(), AcquireError> {
        let Some(adaptive) = &self.shared.adaptive else { return Ok(()) };
        let (reply, _) = self.shared.pace(adaptive, key, ask).await?;
        self.shared.heard(key, Known::of_pace(&reply, Instant::now()));
        self.shared.watcher.tell(&key, || event(RateState::of(&reply)));
        Ok(())
    }
}

impl<St: Store> Shared<St> {
    /// Asks about a rate that adapts; where the store fails, by its policy. And whether this process was on its own.
    pub(super) async fn pace(
        &self,
        adaptive: &Adaptive,
        key: BucketKey,
        ask: PaceAsk,
    ) -> Result<(PaceReply, bool), AcquireError> {
        let Adaptive { settings, local, heard, .. } = adaptive;
        let asked = async {
            // A cooldown that began while the store was away comes first.
            if let Some(wait) = heard.untold(&key, Instant::now()) {
                let untold = PaceAsk::Refused { hint_us: Some(micros(wait)), random_ppm: 0 };
                self.ask_the_store(adaptive, key, untold).await?;
            }
            self.ask_the_store(adaptive, key, ask).await
        };
        let retry_after = match asked.await {
            Ok(reply) => return Ok((reply, false)),
            Err(retry_after) => retry_after.unwrap_or(RETRY_AFTER),
        };
        let Checks { on_store_failure, share, .. } = self.checks;
        let now = Instant::now();
        let mut pacing = Pacing { limit: self.limit.clone(), key, settings: settings.share(share), ask };
        if let Some(word) = heard.for_local(&key, now) {
            local.go_on_from(&pacing, word, share);
        }
        let is_word = matches!(ask, PaceAsk::Refused { .. } | PaceAsk::Pause { .. });
        // More than the share cannot be paid here.
        let is_dear = matches!(ask, PaceAsk::Take(cost) if cost > pacing.settings.capacity);
        if is_word {
            let reply = local.pace_now(&pacing);
            heard.not_told(key, reply, now);
            if on_store_failure != OnStoreFailure::Deny {
                return Ok((reply, true));
            }
        } else if on_store_failure == OnStoreFailure::Local && !is_dear {
            return Ok((local.pace_now(&pacing), true));
        } else if on_store_failure == OnStoreFailure::Allow {
            pacing.ask = PaceAsk::Look;
            let word = local.pace_now(&pacing);
            let allowed = word.ahead_us == 0;
            let level = if allowed { settings.full() } else { 0 };
            return Ok((PaceReply { allowed, level, ..word }, false));
        }
        Err(AcquireError::StoreFailed { retry_after })
    }

    /// Asks the store, or says when it is asked again, if that is known.
    async fn ask_the_store(
        &self,
        adaptive: &Adaptive,
        key: BucketKey,
        ask: PaceAsk,
    ) -> Result<PaceReply, Option<Duration>> {
        let Adaptive { settings, rates, heard, .. } = adaptive;
        let deadline = self.checks.deadline;
        let pacing = Pacing { limit: self.limit.clone(), key, settings: *settings, ask };
        let began = Began::now();
        let answer = timeout(deadline, rates.pace(pacing, deadline)).await;
        began.ended(End::of(&answer));
        match answer {
            Ok(Ok(reply)) => {
                self.checks.failures.answered();
                if rates.may_fail() {
                    heard.store_said(key, reply, settings.ceiling, Instant::now());
                }
                Ok(reply)
            }
            Ok(Err(error)) => Err(self.checks.failed(&*error)),
            Err(_) => Err(self.checks.too_late()),
        }
    }
}

fn micros(wait: Duration) -> u64 {
    u64::try_from(wait.as_micros()).unwrap_or(u64::MAX)
}
