//! Checks that come while others are on the wire travel together in the next call.
//!
//! A check that finds nobody on the wire is sent at once, by whoever polls it. Others join a queue. A carrier, which is a
//! task of its own and so depends on no caller, takes all that wait into one call, and once that is answered the next, until
//! nobody waits. What each of them is told is what a call of its own would have given.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::mem;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use redis::{RedisResult, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use super::breaker::Ticket;
use super::check::{Acquire, Call, Question, SILENCE, Way, is_no_script};
use super::connection::Generation;
use super::error::{RedisError, RedisErrorKind};
use super::node::{Boxed, Node, Place, WAITING};
use super::script::{self, By, Part};

/// The script cannot take more keys than about twice as many.
const KEYS_MAX: usize = 4000;
/// A call that takes longer no longer keeps others waiting: another goes beside it.
const HOLD: Duration = Duration::from_millis(2);
/// The same for a carrier that does not come to send, such as one that nobody runs.
const HOLD_UNSENT: Duration = Duration::from_millis(10);

/// Those that wait on one server.
pub(super) struct Gather {
    queue: Mutex<Queue>,
    /// Held while a carrier takes what waits and sends it, so that nobody overtakes an earlier check.
    order: Mutex<()>,
    /// The server has slots, though it was not named as one of a cluster.
    by_slot: AtomicBool,
}

struct Queue {
    /// By number, in the order in which they came.
    waiting: BTreeMap<u64, Waiter>,
    next: u64,
    /// While any wait there is at least one.
    carriers: usize,
    /// Until then another carrier is not needed, for the sake of that one.
    held_until: Instant,
    holder: u64,
    /// How many carriers there have been.
    made: u64,
}

/// A check that waits, or is on the wire with others.
struct Waiter {
    question: Question<Acquire>,
    ticket: Ticket,
    told: oneshot::Sender<Told<Acquire>>,
    /// Closed when the caller has gone.
    caller: oneshot::Receiver<Infallible>,
}

/// What a check that has waited is told.
pub(super) enum Told<C: Call> {
    /// The end, on that connection.
    End(Result<C::Answer, RedisError>, Option<Generation>),
    /// Nothing ran: the carrier's runtime has ended, or the call named keys of several slots. It goes by itself.
    Again(Question<C>),
}

/// A check's end of that.
pub(super) struct Waiting<C: Call> {
    node: Arc<Node>,
    number: u64,
    told: oneshot::Receiver<Told<C>>,
    _caller: oneshot::Sender<Infallible>,
}

/// How a check goes on that is not sent at once.
pub(super) enum Joined<C: Call> {
    Waits(Waiting<C>),
    /// By itself.
    Alone(Question<C>),
    Crowded,
}

impl Gather {
    pub(super) fn new(now: Instant) -> Self {
        let queue = Queue { waiting: BTreeMap::new(), next: 0, carriers: 0, held_until: now, holder: 0, made: 0 };
        Self { queue: Mutex::new(queue), order: Mutex::new(()), by_slot: AtomicBool::new(false) }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing under this lock can leave it half done.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether nobody waits, nor is on the wire with others.
    pub(super) fn is_idle(&self) -> bool {
        self.queue().carriers == 0
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue().waiting.len()
    }

    /// Waits for the next call.
    pub(super) fn join(node: &Arc<Node>, question: Question<Acquire>, ticket: Ticket) -> Joined<Acquire> {
        // Without a runtime there is no task.
        let Ok(runtime) = Handle::try_current() else { return Joined::Alone(question) };
        let (told, waits) = oneshot::channel();
        let (here, caller) = oneshot::channel();
        let free = node.places.available_permits();
        let mut queue = node.gather.queue();
        if queue.waiting.len() + node.waiting() >= WAITING + free {
            return Joined::Crowded;
        }
        let number = queue.next;
        queue.next += 1;
        queue.waiting.insert(number, Waiter { question, ticket, told, caller });
        let is_needed = queue.carriers == 0 || free > 0 && queue.held_until <= Instant::now();
        let carrier = is_needed.then(|| queue.carrier(node));
        drop(queue);
        if let Some(carrier) = carrier {
            runtime.spawn(carrier.carry());
        }
        Joined::Waits(Waiting { node: Arc::clone(node), number, told: waits, _caller: here })
    }
}

impl Queue {
    /// One more carrier, to be spawned when the queue is not locked: a runtime that ends drops it at once.
    fn carrier(&mut self, node: &Arc<Node>) -> Carrier {
        self.carriers += 1;
        self.made += 1;
        self.hold(self.made, Instant::now() + HOLD_UNSENT);
        Carrier { node: Arc::clone(node), number: self.made, is_over: false }
    }

    fn hold(&mut self, carrier: u64, until: Instant) {
        (self.holder, self.held_until) = (carrier, until);
    }

    /// The next, if it fits into a call that has so many keys.
    fn take(&mut self, keys: usize) -> Option<Waiter> {
        let first = self.waiting.first_entry()?;
        let more = first.get().question.call.charges.len();
        (keys == 0 || keys + more <= KEYS_MAX).then(|| first.remove())
    }
}

impl<C: Call> Waiting<C> {
    /// What it is told.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Told<C>> {
        // A carrier that was on its way has ended with its runtime.
        let lost = |_| Told::End(Err(RedisError::new(RedisErrorKind::Lost)), None);
        Pin::new(&mut self.told).poll(cx).map(|told| told.unwrap_or_else(lost))
    }

    /// Leaves the queue. Where it has been sent already: whether it will be answered, to be waited for.
    pub(super) fn leave(self) -> Option<impl Future<Output = bool> + Send + 'static> {
        let Self { node, number, told, _caller } = self;
        let left = node.gather.queue().waiting.remove(&number);
        left.is_none().then_some(async { matches!(told.await, Ok(Told::End(Ok(_), _))) })
    }
}

impl Waiter {
    fn is_here(&mut self) -> bool {
        matches!(self.caller.try_recv(), Err(oneshot::error::TryRecvError::Empty))
    }

    /// It goes by itself.
    fn go_alone(self) {
        let _ = self.told.send(Told::Again(Question { way: Way::Alone, ..self.question }));
    }

    fn tell(self, result: Result<<Acquire as Call>::Answer, RedisError>, on: Option<Generation>) {
        // Its caller may have gone.
        let _ = self.told.send(Told::End(result, on));
    }
}

/// Takes those that wait to the server and tells them what came of it.
struct Carrier {
    node: Arc<Node>,
    number: u64,
    /// Others carry on.
    is_over: bool,
}

/// One that is on the wire: which call it is in, and where.
struct Sent {
    waiter: Waiter,
    call: usize,
    part: Part,
}

/// The answers to calls that were sent together, and their place.
type Answers = (Place, Vec<RedisResult<Value>>);

impl Carrier {
    async fn carry(mut self) {
        loop {
            match self.node.enter_for_others().await {
                Ok(place) => self.ask(place).await,
                // Whoever asked by itself now would get the same.
                Err(error) => {
                    let waiting = mem::take(&mut self.node.gather.queue().waiting);
                    waiting.into_values().for_each(|waiter| waiter.tell(Err(error.clone()), None));
                }
            }
            if self.is_over {
                return;
            }
            // Those who have just been answered often ask again at once: in the next call, instead of in one of their own
            // that would take turns with it.
            yield_now().await;
            if self.ends() {
                return;
            }
        }
    }

    /// Whether nobody waits, or none but those that another carrier is about to take.
    fn ends(&mut self) -> bool {
        let (now, mut queue) = (Instant::now(), self.node.gather.queue());
        let is_held = queue.holder != self.number && queue.held_until > now;
        if queue.waiting.is_empty() || queue.carriers > 1 && is_held {
            queue.carriers -= 1;
            self.is_over = true;
        } else {
            queue.hold(self.number, now + HOLD_UNSENT);
        }
        self.is_over
    }

    /// Sends what waits, and tells each what came of it.
    async fn ask(&mut self, place: Place) {
        let generation = place.wire.generation();
        let mut place = Some(place);
        let sent = poll_fn(|cx| Poll::Ready(place.take().and_then(|place| self.send(place, cx)))).await;
        let Some((mut sent, asking, answers)) = sent else { return };
        let answers = match answers {
            Some(answers) => Some(answers),
            None => self.answers(asking, generation, &mut sent).await,
        };
        let Some((place, answers)) = answers else { return };
        let unknown = self.tell(sent, answers, generation, By::Hash);
        if !unknown.is_empty() {
            let (mut sent, asking) = calls(unknown, By::Source, place);
            if let Some((_place, answers)) = self.answers(asking, generation, &mut sent).await {
                self.tell(sent, answers, generation, By::Source);
            }
        }
    }

    /// Takes what waits, as much as there are places for, and sends it.
    fn send(
        &self,
        mut place: Place,
        cx: &mut Context<'_>,
    ) -> Option<(Vec<Sent>, Boxed<'static, Answers>, Option<Answers>)> {
        let gather = &self.node.gather;
        let _order = gather.order.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut waiters, mut refused, mut keys) = (Vec::new(), Vec::new(), 0);
        {
            let now = Instant::now();
            let mut queue = gather.queue();
            queue.hold(self.number, now + HOLD);
            let most = self.node.widen(&mut place, queue.waiting.len());
            while waiters.len() < most
                && let Some(waiter) = queue.take(keys)
            {
                match self.node.breaker.enter_again(waiter.ticket, now) {
                    Ok(()) => {
                        keys += waiter.question.call.charges.len();
                        waiters.push(waiter);
                    }
                    Err(retry_after) => refused.push((waiter, retry_after)),
                }
            }
        }
        for (waiter, retry_after) in refused {
            waiter.tell(Err(RedisError::breaker_open(retry_after)), None);
        }
        if waiters.is_empty() {
            return None;
        }
        place.narrow(waiters.len());
        if gather.by_slot.load(Ordering::Relaxed) {
            waiters.iter_mut().for_each(|waiter| waiter.question.slot = waiter.question.call.slot());
        }
        // In a cluster a call has the keys of one slot. Those of one slot stay in their order.
        waiters.sort_by_key(|waiter| waiter.question.slot);
        let (sent, mut asking) = calls(waiters, By::Hash, place);
        let answers = match asking.as_mut().poll(cx) {
            Poll::Ready(answers) => Some(answers),
            Poll::Pending => None,
        };
        Some((sent, asking, answers))
    }

    /// Waits for the answers, as long as they may come.
    async fn answers(
        &mut self,
        mut asking: Boxed<'static, Answers>,
        generation: Option<Generation>,
        sent: &mut Vec<Sent>,
    ) -> Option<Answers> {
        let node = Arc::clone(&self.node);
        let (lost, silence, hold) = (node.until_lost(generation), sleep(SILENCE), sleep(HOLD));
        tokio::pin!(lost, silence, hold);
        let (mut is_lost, mut is_slow) = (false, false);
        poll_fn(|cx| {
            if let Poll::Ready(answers) = asking.as_mut().poll(cx) {
                return Poll::Ready(Some(answers));
            }
            if !is_slow && hold.as_mut().poll(cx).is_ready() {
                is_slow = true;
                self.is_slow();
            }
            if silence.as_mut().poll(cx).is_ready() {
                node.lost(generation);
                for sent in sent.drain(..) {
                    sent.waiter.tell(Err(RedisError::new(RedisErrorKind::Late)), generation);
                }
                self.hand_over();
            }
            is_lost = is_lost || lost.as_mut().poll(cx).is_ready();
            if is_lost {
                self.hand_over();
                // The connection closes when the last of those that use it has gone.
                sent.retain_mut(|sent| Pin::new(&mut sent.waiter.caller).poll(cx).is_pending());
                if sent.is_empty() {
                    return Poll::Ready(None);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Tells each its part of the answers. Gives those back that are to be sent with the script.
    fn tell(
        &self,
        sent: Vec<Sent>,
        answers: Vec<RedisResult<Value>>,
        generation: Option<Generation>,
        by: By,
    ) -> Vec<Waiter> {
        let answers: Vec<_> = answers
            .into_iter()
            .map(|answer| match answer {
                // That proves that nothing ran.
                Err(error) if by == By::Hash && is_no_script(&error) => None,
                answer => Some(answer.map_err(|error| self.node.failed(error, generation))),
            })
            .collect();
        let mut unknown = Vec::new();
        for Sent { mut waiter, call, part } in sent {
            match &answers[call] {
                Some(Ok(answer)) => {
                    let result = script::decision(&waiter.question.call.charges, answer, part);
                    waiter.tell(result, generation);
                }
                // One server of a cluster, or what stands before several: that proves that nothing ran. By itself each is
                // within one slot, or is told the same.
                Some(Err(error)) if error.is_cross_slot() => {
                    self.node.gather.by_slot.store(true, Ordering::Relaxed);
                    waiter.go_alone();
                }
                Some(Err(error)) => waiter.tell(Err(error.clone()), generation),
                // Nothing is sent for one that has gone.
                None => {
                    if waiter.is_here() {
                        unknown.push(waiter);
                    }
                }
            }
        }
        unknown
    }

    /// The call takes long: what waits by now goes beside it. Who comes later looks for itself.
    fn is_slow(&self) {
        let mut queue = self.node.gather.queue();
        let is_needed = !queue.waiting.is_empty() && queue.held_until <= Instant::now();
        let next = (is_needed && self.node.places.available_permits() > 0).then(|| queue.carrier(&self.node));
        drop(queue);
        if let Some(next) = next {
            tokio::spawn(next.carry());
        }
    }

    /// What waits is for another carrier: the call of this one may take long.
    fn hand_over(&mut self) {
        if mem::replace(&mut self.is_over, true) {
            return;
        }
        let mut queue = self.node.gather.queue();
        queue.carriers -= 1;
        let is_needed = queue.carriers == 0 && !queue.waiting.is_empty();
        let next = is_needed.then(|| queue.carrier(&self.node));
        drop(queue);
        if let Some(next) = next {
            tokio::spawn(next.carry());
        }
    }
}

/// Ends with its runtime, at any point.
impl Drop for Carrier {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let mut queue = self.node.gather.queue();
        queue.carriers -= 1;
        if queue.carriers > 0 {
            return;
        }
        let waiting = mem::take(&mut queue.waiting);
        drop(queue);
        // They may be another runtime's, and this one may be all that they have.
        waiting.into_values().for_each(Waiter::go_alone);
    }
}

/// The calls that these are in, one for each slot, on their way.
fn calls(waiters: Vec<Waiter>, by: By, mut place: Place) -> (Vec<Sent>, Boxed<'static, Answers>) {
    let (mut commands, mut places) = (Vec::new(), Vec::with_capacity(waiters.len()));
    for of_a_slot in waiters.chunk_by(|a, b| a.question.slot == b.question.slot) {
        let requests: Vec<&Acquire> = of_a_slot.iter().map(|waiter| &waiter.question.call).collect();
        let (command, parts) = script::call_for_all(by, &requests);
        places.extend(parts.into_iter().map(|part| (commands.len(), part)));
        commands.push(command);
    }
    let sent = waiters.into_iter().zip(places).map(|(waiter, (call, part))| Sent { waiter, call, part }).collect();
    let asking = Box::pin(async move {
        let answers = place.wire.ask_all(commands).await;
        (place, answers)
    });
    (sent, asking)
}
