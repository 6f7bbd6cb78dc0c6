//! The nodes of a cluster: which of them has a bucket, and how charges on several are one.

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::breaker::Health;
use super::check::{Acquire, Call, Check, Way};
use super::connection::{Access, Connection, Target};
use super::error::{Address, Counts, Redirect, RedisError, RedisErrorKind};
use super::node::Node;
use super::script::Script;
use crate::bucket;
use crate::charge::{Amount, Charge, Charges};
use crate::decision::{Decision, Outcome, Reply};
use crate::error::ConfigError;
use crate::log;

const SLOTS: usize = 16_384;
/// How long one node has to tell who has which slots.
const PATIENCE: Duration = Duration::from_millis(300);
/// At least so long passes from one look at the slots to the next.
const PAUSE: Duration = Duration::from_millis(100);
/// After this long another look may begin beside one that hangs, or that nobody runs.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// How often a check follows where it is sent: each time the answer proves that nothing ran.
const REDIRECTS: u32 = 3;
/// How long each turn of charges on several slots may take, where no deadline is known: nobody drops them.
const TURN_MAX: Duration = Duration::from_secs(1);
/// Before a check asks once more for keys of which some have moved.
const TRY_AGAIN: Duration = Duration::from_millis(5);

/// A cluster.
pub(super) struct Cluster {
    /// Where to ask when no known node answers.
    seeds: Vec<Access>,
    slots: ArcSwap<Slots>,
    state: Mutex<State>,
    /// Counts the looks that have ended.
    looked: watch::Sender<u64>,
    counts: Arc<Counts>,
}

/// Who has which slots, as far as is known.
#[derive(Clone, Default)]
struct Slots {
    nodes: Vec<Arc<Node>>,
    /// For each slot its owner's place among the nodes. Empty before the first look.
    owners: Vec<Option<u16>>,
}

struct State {
    /// All that have been heard of, so that each has one connection and one breaker.
    nodes: HashMap<Address, Arc<Node>>,
    /// Since when a look is under way.
    looking: Option<Instant>,
    /// When the last look ended, and why it failed.
    last: Option<Instant>,
    failed: Option<RedisError>,
}

impl Slots {
    fn owner(&self, slot: usize) -> Option<Arc<Node>> {
        let place = (*self.owners.get(slot)?)?;
        self.nodes.get(usize::from(place)).cloned()
    }

    fn set(&mut self, slots: RangeInclusive<usize>, node: &Arc<Node>) -> Option<()> {
        let place = self.nodes.iter().position(|known| Arc::ptr_eq(known, node)).unwrap_or_else(|| {
            self.nodes.push(Arc::clone(node));
            self.nodes.len() - 1
        });
        self.owners.get_mut(slots)?.fill(Some(u16::try_from(place).ok()?));
        Some(())
    }
}

impl Cluster {
    pub(super) fn new(seeds: Vec<Access>, counts: Arc<Counts>) -> Result<Self, ConfigError> {
        let refused = |reason: &str| Err(ConfigError::RedisUrl { reason: reason.to_owned() });
        if seeds.is_empty() {
            return refused("there is no node: the URL of at least one is needed");
        }
        if seeds.iter().any(|seed| seed.host().is_none()) {
            return refused("a node of a cluster has a host and a port, and no path");
        }
        if seeds.iter().any(Access::has_database) {
            return refused("a cluster has no database but the first");
        }
        let state = State { nodes: HashMap::new(), looking: None, last: None, failed: None };
        let (slots, looked) = (ArcSwap::default(), watch::Sender::new(0));
        Ok(Self { seeds, slots, state: Mutex::new(state), looked, counts })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can leave it half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The nodes that have slots.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        self.slots.load().nodes.clone()
    }

    fn node(&self, address: &Address) -> Arc<Node> {
        let make = || {
            let access = self.seeds[0].at(&address.0, address.1);
            Arc::new(Node::own(Connection::new(Target::Server(access)), Arc::clone(&self.counts)))
        };
        Arc::clone(self.state().nodes.entry(address.clone()).or_insert_with(make))
    }

    /// The node that has a slot; waits for the first look at who has which.
    async fn owner(self: &Arc<Self>, slot: usize) -> Result<Arc<Node>, RedisError> {
        loop {
            // Before the look at the slots, so that one that ends in between is not missed.
            let mut looked = self.looked.subscribe();
            {
                let slots = self.slots.load();
                if let Some(node) = slots.owner(slot) {
                    return Ok(node);
                }
                let failed = self.state().failed.clone();
                self.look();
                let error = if slots.owners.is_empty() {
                    // Once a first look has failed nobody waits for the next.
                    failed
                } else {
                    Some(RedisError::new(RedisErrorKind::Unavailable))
                };
                if let Some(error) = error {
                    self.counts.add(error.kind());
                    return Err(error);
                }
            }
            // The sender is part of `self`. A look that nobody runs does not end.
            let _ = timeout(LOOK_AGAIN, looked.changed()).await;
        }
    }

    /// Waits for the first look.
    pub(super) async fn ready(self: &Arc<Self>) -> Result<(), RedisError> {
        self.owner(0).await.map(drop)
    }

    /// Looks again at who has which slots, in a task of its own, unless that has just been done.
    fn look(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut state = self.state();
        let is_looking = state.looking.is_some_and(|since| since.elapsed() < LOOK_AGAIN);
        if !is_looking && state.last.is_none_or(|last| last.elapsed() >= PAUSE) {
            state.looking = Some(Instant::now());
            // A runtime that ends drops it at once: nothing of the caller's is locked then.
            drop(state);
            runtime.spawn(Arc::clone(self).look_now());
        }
    }

    async fn look_now(self: Arc<Self>) {
        let found = self.find().await;
        let mut state = self.state();
        state.looking = None;
        state.last = Some(Instant::now());
        match found {
            Ok(slots) => {
                state.failed = None;
                // Those without a slot are forgotten; checks that are under way keep theirs.
                state.nodes.retain(|(host, port), node| {
                    let is_owner = slots.nodes.iter().any(|owner| Arc::ptr_eq(owner, node));
                    if !is_owner && node.health() != Health::Closed {
                        log::warning!("Redis at {host}:{port} has no slots any more");
                    }
                    is_owner
                });
                self.slots.store(Arc::new(slots));
            }
            Err(error) => state.failed = Some(error),
        }
        drop(state);
        self.looked.send_modify(|looked| *looked += 1);
    }

    /// Asks one node after the other who has which slots: those that are well, the seeds, and then the others.
    async fn find(&self) -> Result<Slots, RedisError> {
        let known: Vec<_> = self.state().nodes.values().cloned().collect();
        let (well, ill): (Vec<_>, Vec<_>) = known.into_iter().partition(|node| node.health() == Health::Closed);
        let seeds = self.seeds.iter().filter_map(|seed| {
            let (host, port) = seed.host()?;
            Some(self.node(&(host.to_owned(), port)))
        });
        let mut failure = RedisError::new(RedisErrorKind::Unreachable);
        for node in well.into_iter().chain(seeds).chain(ill) {
            let mut question = Cmd::new();
            question.arg("CLUSTER").arg("SLOTS");
            match timeout(PATIENCE, node.command(question)).await {
                Ok(Ok(answer)) => match self.read(&answer, &node) {
                    Some(slots) => return Ok(slots),
                    None => failure = RedisError::new(RedisErrorKind::Reply),
                },
                Ok(Err(error)) => failure = error,
                Err(_) => failure = RedisError::new(RedisErrorKind::Unreachable),
            }
        }
        Err(failure)
    }

    /// Who has which slots, as `node` says: `None` for what is no answer, or where it has not met the others.
    fn read(&self, answer: &Value, node: &Node) -> Option<Slots> {
        let Value::Array(ranges) = answer else { return None };
        let mut slots = Slots { nodes: Vec::new(), owners: vec![None; SLOTS] };
        for range in ranges {
            let Value::Array(range) = range else { return None };
            let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &range[..] else { return None };
            let [host, Value::Int(port), ..] = &primary[..] else { return None };
            let host = match host {
                Value::BulkString(host) => std::str::from_utf8(host).ok()?,
                Value::SimpleString(host) => host,
                Value::Nil => "",
                _ => return None,
            };
            let owner = self.node(&node.resolve((host.to_owned(), u16::try_from(*port).ok()?)));
            slots.set(usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?, &owner)?;
        }
        (!slots.nodes.is_empty()).then_some(slots)
    }

    /// A node has said who has this slot.
    fn moved(self: &Arc<Self>, slot: usize, node: &Arc<Node>) {
        self.slots.rcu(|slots| {
            let mut slots = Slots::clone(slots);
            let _ = slots.set(slot..=slot, node);
            slots
        });
        self.look();
    }

    /// Asks the node that has a slot, wherever that leads.
    pub(super) async fn check<C: Call>(
        self: Arc<Self>,
        slot: usize,
        call: C,
        within: Option<Duration>,
    ) -> Result<C::Answer, RedisError> {
        let mut node = self.owner(slot).await?;
        let (mut way, mut redirects) = (Way::Any, 0);
        loop {
            let answer = Check::new(Arc::clone(&node), call.clone(), within).in_a_cluster(slot, way).await;
            let Err(error) = &answer else { return answer };
            redirects += 1;
            match error.redirect().filter(|_| redirects <= REDIRECTS) {
                Some(Redirect::Moved(address)) => {
                    (node, way) = (self.node(&node.resolve(address)), Way::Any);
                    self.moved(slot, &node);
                }
                Some(Redirect::Ask(address)) => (node, way) = (self.node(&node.resolve(address)), Way::Moving),
                Some(Redirect::TryAgain) => {
                    sleep(TRY_AGAIN).await;
                    // Its own keys may be in one place, and only those of others in the call elsewhere.
                    if way == Way::Any {
                        way = Way::Alone;
                    }
                }
                None => {
                    if error.redirect().is_some() {
                        self.counts.add(error.kind());
                    }
                    // Its slots may be another's by now.
                    if !matches!(error.kind(), RedisErrorKind::Bucket | RedisErrorKind::Crowded) {
                        self.look();
                    }
                    return answer;
                }
            }
        }
    }

    /// Makes all charges or none. Those whose keys share a slot are one step. Others are made in turn, by a task that
    /// goes on when its caller gives up, so that what a later one refuses is given back.
    pub(super) async fn acquire(
        self: Arc<Self>,
        script: Arc<Script>,
        charges: Charges,
        within: Option<Duration>,
    ) -> Answer {
        let slot = |charge| script.slot(charge);
        if charges.windows(2).all(|pair| slot(&pair[0]) == slot(&pair[1])) {
            let slot = charges.first().map_or(0, slot);
            return self.check(slot, Acquire { script, charges }, within).await;
        }
        let runtime = Handle::try_current().map_err(|_| RedisError::new(RedisErrorKind::Unreachable))?;
        let turns = Turns { cluster: self, script, within };
        let plan = turns.plan(&charges);
        let mut replies = vec![None; charges.len()];
        // Until something is charged there is nothing to be given back, and a caller that gives up leaves.
        let first = match plan.enforced().next() {
            Some(places) => Some(turns.ask(Turn::Make, &charges, places, &mut replies).await?),
            None => None,
        };
        let (answer, answered) = oneshot::channel();
        runtime.spawn(async move {
            // Nobody may be there to receive it.
            let _ = answer.send(turns.acquire(&charges, &plan, first, replies).await);
        });
        answered.await.unwrap_or(Err(RedisError::new(RedisErrorKind::Lost)))
    }
}

type Answer = Result<Decision, RedisError>;

/// Charges on several slots, in turn.
struct Turns {
    cluster: Arc<Cluster>,
    script: Arc<Script>,
    within: Option<Duration>,
}

/// What to ask of a slot in its turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// The charges themselves.
    Make,
    /// The tokens back that were taken.
    Undo,
    /// Whether the tokens are there.
    Look,
}

impl Turn {
    fn charge(self, charge: &Charge) -> Charge {
        charge.with(match self {
            Self::Make => charge.amount(),
            Self::Undo => Amount::Give(charge.cost()),
            Self::Look => Amount::Peek,
        })
    }

    /// What the reply says of the charge itself.
    fn reply(self, charge: &Charge, reply: Reply) -> Reply {
        let is_allowed = match self {
            Self::Make => reply.is_allowed(),
            Self::Undo => true,
            Self::Look => reply.level() >= bucket::units(charge.cost(), &charge.quota()),
        };
        Reply::new(reply.level(), is_allowed, reply.ahead_us())
    }
}

/// In which order slots are asked: the places of the charges on each.
struct Plan {
    /// First what can refuse, so that nothing else ever has to be undone: a debt or a refund may have been cut off at its
    /// bound.
    takes: Vec<Vec<usize>>,
    others: Vec<Vec<usize>>,
    /// Made when all the others are.
    shadows: Vec<Vec<usize>>,
}

impl Plan {
    fn enforced(&self) -> impl Iterator<Item = &Vec<usize>> {
        self.takes.iter().chain(&self.others)
    }
}

impl Turns {
    fn plan(&self, charges: &[Charge]) -> Plan {
        Plan {
            takes: self.by_slot(charges, |charge| !charge.is_shadow() && charge.cost() > 0),
            others: self.by_slot(charges, |charge| !charge.is_shadow() && charge.cost() == 0),
            shadows: self.by_slot(charges, Charge::is_shadow),
        }
    }

    /// Goes on with the plan, of which the first slot has said whether it allows its charges.
    async fn acquire(
        &self,
        charges: &[Charge],
        plan: &Plan,
        mut first: Option<bool>,
        mut replies: Vec<Option<Reply>>,
    ) -> Answer {
        let (mut made, mut refused, mut failure) = (0, false, None);
        for places in plan.enforced() {
            let said = match first.take() {
                Some(said) => Ok(said),
                None => self.ask(Turn::Make, charges, places, &mut replies).await,
            };
            match said {
                Ok(true) => made += 1,
                Ok(false) => refused = true,
                Err(error) => failure = Some(error),
            }
            if refused || failure.is_some() {
                break;
            }
        }
        if refused || failure.is_some() {
            // What does not reach its bucket is lost: never over the limit, briefly under it.
            for places in plan.takes.iter().take(made) {
                let _ = self.ask(Turn::Undo, charges, places, &mut replies).await;
            }
        }
        if let Some(error) = failure {
            return Err(error);
        }
        let unasked = plan.enforced().skip(made + 1).filter(|_| refused).map(|places| (Turn::Look, places));
        let shadows = plan.shadows.iter().map(|places| (if refused { Turn::Look } else { Turn::Make }, places));
        for (turn, places) in unasked.chain(shadows) {
            // The verdict is clear. Of what does not answer nothing is known.
            let _ = self.ask(turn, charges, places, &mut replies).await;
        }
        Ok(Decision::of_replies(charges, replies))
    }

    /// The places of the charges that `are` meant, slot by slot in order of the first of each.
    fn by_slot(&self, charges: &[Charge], are: impl Fn(&Charge) -> bool) -> Vec<Vec<usize>> {
        let mut slots: Vec<(usize, Vec<usize>)> = Vec::new();
        for (place, charge) in charges.iter().enumerate().filter(|(_, charge)| are(charge)) {
            let slot = self.script.slot(charge);
            match slots.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, places)) => places.push(place),
                None => slots.push((slot, vec![place])),
            }
        }
        slots.into_iter().map(|(_, places)| places).collect()
    }

    /// Asks one slot, and keeps what it says of the charges at these places. Whether it allows them.
    async fn ask(
        &self,
        turn: Turn,
        charges: &[Charge],
        places: &[usize],
        replies: &mut [Option<Reply>],
    ) -> Result<bool, RedisError> {
        let asked: Charges = places.iter().map(|place| turn.charge(&charges[*place])).collect();
        let slot = asked.first().map_or(0, |charge| self.script.slot(charge));
        let call = Acquire { script: Arc::clone(&self.script), charges: asked };
        let check = Arc::clone(&self.cluster).check(slot, call, self.within);
        let within = self.within.unwrap_or(TURN_MAX);
        let decision = timeout(within, check).await.unwrap_or(Err(RedisError::new(RedisErrorKind::Late)))?;
        for (i, place) in places.iter().enumerate() {
            let charge = &charges[*place];
            // Of a bucket that is given back twice, what it holds in the end.
            let same = |other: &usize| turn == Turn::Undo && charges[places[*other]].is_same_bucket(charge);
            let last = (i + 1..places.len()).rev().find(same).unwrap_or(i);
            let reply = decision.outcomes().get(last).and_then(Outcome::reply);
            replies[*place] = reply.map(|reply| turn.reply(charge, reply));
        }
        Ok(decision.is_allowed())
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.nodes()).finish()
    }
}
