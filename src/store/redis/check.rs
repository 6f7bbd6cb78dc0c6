//! One check of a bucket on one server: from the breaker over a place on the wire to its answer, whoever waits for that.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::breaker::Ticket;
use super::connection::Generation;
use super::error::{RedisError, RedisErrorKind};
use super::gather::{Gather, Joined, Told, Waiting};
use super::node::{Boxed, Node, Place};
use super::script::{self, By, Part, Script};
use crate::charge::Charges;
use crate::decision::Decision;

/// Without a deadline of its own a check that is given up after this long is late.
const PATIENCE: Duration = Duration::from_millis(50);
/// After this long without an answer a connection is taken for dead.
pub(super) const SILENCE: Duration = Duration::from_secs(5);

/// A call of a script.
pub(super) trait Call: Clone + Unpin + Send + Sync + 'static {
    type Answer: Unpin + Send + 'static;

    /// What is sent.
    fn command(&self, by: By) -> Cmd;

    /// What the answer means.
    fn read(&self, answer: &Value) -> Result<Self::Answer, RedisError>;

    /// The answer, where there is no question.
    fn unasked(&self) -> Option<Self::Answer> {
        None
    }

    /// Waits for the next call for many, where there are such.
    fn join(_: &Arc<Node>, question: Question<Self>, _: Ticket) -> Joined<Self> {
        Joined::Alone(question)
    }
}

/// The charges of one request.
#[derive(Clone)]
pub(super) struct Acquire {
    pub(super) script: Arc<Script>,
    pub(super) charges: Charges,
}

impl Acquire {
    /// The slot of its first bucket.
    pub(super) fn slot(&self) -> usize {
        self.charges.first().map_or(0, |charge| self.script.slot(charge))
    }
}

impl Call for Acquire {
    type Answer = Decision;

    fn command(&self, by: By) -> Cmd {
        self.script.call(by, &self.charges)
    }

    fn read(&self, answer: &Value) -> Result<Decision, RedisError> {
        script::decision(&self.charges, answer, Part { place: 0, total: self.charges.len(), nth: None })
    }

    fn unasked(&self) -> Option<Decision> {
        if self.charges.is_empty() { Decision::new(&[], &[]) } else { None }
    }

    fn join(node: &Arc<Node>, question: Question<Self>, ticket: Ticket) -> Joined<Self> {
        Gather::join(node, question, ticket)
    }
}

/// What is asked of the server.
pub(super) struct Question<C> {
    pub(super) call: C,
    /// The slot of its keys in a cluster; elsewhere all are one.
    pub(super) slot: usize,
    pub(super) way: Way,
}

/// How a check is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// With others, where they wait.
    Any,
    Alone,
    /// Alone, to where a server has said that the keys are on their way to.
    Moving,
}

impl<C: Call> Question<C> {
    async fn send(&self, by: By, place: &mut Place) -> RedisResult<Value> {
        let cmd = self.call.command(by);
        if self.way == Way::Moving { place.wire.ask_for_a_moving_key(cmd).await } else { place.wire.ask(cmd).await }
    }
}

/// What came of a call.
enum Asked<C: Call> {
    Answered(Result<C::Answer, RedisError>),
    /// The server does not know the script, which proves that nothing ran.
    NoScript(Question<C>, Place),
}

/// A check whose caller has gone.
#[derive(Clone, Copy)]
struct GivenUp {
    ticket: Ticket,
    late_at: Instant,
    /// The answers that the server had given when it began.
    answers: u64,
}

impl Node {
    fn answered<C: Call>(&self, question: &Question<C>, place: &Place, answer: RedisResult<Value>) -> Asked<C> {
        let answer = answer.map_err(|error| self.failed(error, place.wire.generation()));
        Asked::Answered(answer.and_then(|answer| question.call.read(&answer)))
    }

    /// What an error means that came on that connection.
    pub(super) fn failed(&self, error: redis::RedisError, generation: Option<Generation>) -> RedisError {
        let error = RedisError::sent(error);
        if error.ends_the_connection() {
            self.lost(generation);
        }
        error
    }

    /// Whether a check that was given up is late by now: that is a failure, unless the server has answered others since.
    /// Given back where it is not late yet: a client that hangs up says nothing of the server.
    fn is_late(&self, given_up: GivenUp, generation: Option<Generation>) -> Option<GivenUp> {
        let GivenUp { ticket, late_at, answers } = given_up;
        let now = Instant::now();
        if now < late_at {
            return Some(given_up);
        }
        self.counts.add(RedisErrorKind::Late);
        if ticket.probe {
            // It may be the connection that is dead, and not the server.
            self.lost(generation);
        } else if self.answers.load(Ordering::Relaxed) != answers {
            return None;
        }
        if let Some(change) = self.breaker.failed(ticket, now) {
            self.tell(change, &RedisErrorKind::Late);
        }
        None
    }

    /// Waits for the answer to a check whose caller has gone, as long as it may come; `asking` says whether it will not.
    async fn attend(
        self: Arc<Self>,
        asking: impl Future<Output = bool> + Send + 'static,
        generation: Option<Generation>,
        mut given_up: Option<GivenUp>,
    ) {
        let lost = self.until_lost(generation);
        let silence = sleep(SILENCE);
        let late = sleep_until(given_up.map_or(Instant::now(), |given_up| given_up.late_at));
        tokio::pin!(asking, lost, silence, late);
        std::future::poll_fn(|cx| {
            let asked = asking.as_mut().poll(cx);
            if let Some(early) = given_up {
                if asked == Poll::Ready(true) {
                    given_up = None;
                    if let Some(change) = self.breaker.answered(early.ticket) {
                        self.tell(change, &"");
                    }
                } else if late.as_mut().poll(cx).is_ready() {
                    given_up = self.is_late(early, generation);
                }
            }
            if silence.as_mut().poll(cx).is_ready() {
                self.lost(generation);
            }
            // The connection closes when the last of those that use it has gone.
            if asked.is_ready() || lost.as_mut().poll(cx).is_ready() {
                if let Some(early) = given_up.take() {
                    self.breaker.said_nothing(early.ticket, Instant::now());
                }
                return Poll::Ready(());
            }
            Poll::Pending
        })
        .await;
    }
}

/// One check, on its way.
pub(super) struct Check<C: Call> {
    node: Arc<Node>,
    ticket: Option<Ticket>,
    /// After that it is late.
    patience: Duration,
    /// The answers that the server had given when it began.
    answers: u64,
    /// The caller waits for longer than a connection may be silent.
    outwaits: bool,
    silence: Option<Pin<Box<Sleep>>>,
    /// Redirections are followed.
    follows: bool,
    stage: Stage<C>,
}

enum Stage<C: Call> {
    New(Question<C>),
    /// Waits for a place: dropped, it leaves no trace.
    Entering(Question<C>, Boxed<'static, Result<Place, RedisError>>),
    /// Waits with others, or is on the wire with them.
    Waiting(Waiting<C>),
    /// Sent, on this connection: the tokens may be taken from now on.
    Asking(Boxed<'static, Asked<C>>, Option<Generation>),
    Done,
}

impl<C: Call> Check<C> {
    /// A check whose caller waits for at most `deadline`, if that is known.
    pub(super) fn new(node: Arc<Node>, call: C, deadline: Option<Duration>) -> Self {
        let question = Question { call, slot: 0, way: Way::Any };
        let outwaits = deadline.is_none_or(|deadline| deadline > SILENCE);
        let (patience, stage) = (deadline.unwrap_or(PATIENCE), Stage::New(question));
        Self { node, ticket: None, patience, answers: 0, outwaits, silence: None, follows: false, stage }
    }

    /// The same on a node of a cluster, whose caller follows its redirections.
    pub(super) fn in_a_cluster(mut self, slot: usize, way: Way) -> Self {
        self.follows = true;
        if let Stage::New(question) = &mut self.stage {
            (question.slot, question.way) = (slot, way);
        }
        self
    }

    /// How it goes on, by itself where nobody else is on the wire; none where too many wait.
    fn start(&self, question: Question<C>, ticket: Ticket) -> Option<Stage<C>> {
        let alone = ticket.probe || question.way != Way::Any;
        if (alone || self.node.is_idle())
            && let Some(place) = self.node.enter_now()
        {
            return Some(Stage::asking(&self.node, By::Hash, question, place));
        }
        match if alone { Joined::Alone(question) } else { C::join(&self.node, question, ticket) } {
            Joined::Waits(waiting) => Some(Stage::Waiting(waiting)),
            Joined::Alone(question) => Some(Stage::Entering(question, Box::pin(Arc::clone(&self.node).enter()))),
            Joined::Crowded => None,
        }
    }

    /// The end of a check whose caller is there, on that connection.
    fn end(&mut self, result: &Result<C::Answer, RedisError>, on: Option<Generation>) {
        // Where else the key is does not make this server fail, where that is followed.
        let is_followed = |error: &RedisError| self.follows && error.redirect().is_some();
        let result = match result {
            Err(error) if !is_followed(error) => Err(error),
            Ok(_) | Err(_) => Ok(()),
        };
        if let Err(error) = result {
            self.node.counts.add(error.kind());
        }
        let Some(ticket) = self.ticket.take() else { return };
        let breaker = &self.node.breaker;
        // A connection is lost once, however many checks were on it.
        let is_known = |error: &RedisError| {
            error.kind() == RedisErrorKind::Lost
                && !ticket.probe
                && on.is_some_and(|on| self.node.losses.swap(on, Ordering::Relaxed) == on)
        };
        let change = match result {
            // The load of this instance says nothing of the server.
            Err(error) if error.kind() == RedisErrorKind::Crowded || is_known(error) => {
                breaker.said_nothing(ticket, Instant::now());
                None
            }
            Err(error) if error.kind() != RedisErrorKind::Bucket => breaker.failed(ticket, Instant::now()),
            // What stands in one key does not either, but the server did answer.
            Ok(()) | Err(_) => {
                self.node.answers.fetch_add(1, Ordering::Relaxed);
                breaker.answered(ticket)
            }
        };
        if let Some(change) = change {
            self.node.tell(change, &result.as_ref().err().map_or_else(String::new, ToString::to_string));
        }
    }
}

async fn ask<C: Call>(node: Arc<Node>, by: By, question: Question<C>, mut place: Place) -> Asked<C> {
    let answer = question.send(by, &mut place).await;
    match answer {
        Err(error) if by == By::Hash && is_no_script(&error) => Asked::NoScript(question, place),
        answer => node.answered(&question, &place, answer),
    }
}

pub(super) fn is_no_script(error: &redis::RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

impl<C: Call> Future for Check<C> {
    type Output = Result<C::Answer, RedisError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut on = None;
        let result = loop {
            match mem::replace(&mut this.stage, Stage::Done) {
                // New => Entering | Asking
                Stage::New(question) => {
                    if let Some(answer) = question.call.unasked() {
                        return Poll::Ready(Ok(answer));
                    }
                    match this.node.breaker.enter(Instant::now()) {
                        Ok(ticket) => {
                            this.ticket = Some(ticket);
                            this.answers = this.node.answers.load(Ordering::Relaxed);
                            match this.start(question, ticket) {
                                Some(stage) => this.stage = stage,
                                None => break Err(RedisError::new(RedisErrorKind::Crowded)),
                            }
                        }
                        Err(retry_after) => break Err(RedisError::breaker_open(retry_after)),
                    }
                }
                // Entering => Asking
                Stage::Entering(question, mut entering) => match entering.as_mut().poll(cx) {
                    Poll::Ready(Ok(place)) => {
                        // It may have waited for long.
                        if let Some(ticket) = this.ticket
                            && let Err(retry_after) = this.node.breaker.enter_again(ticket, Instant::now())
                        {
                            this.ticket = None;
                            break Err(RedisError::breaker_open(retry_after));
                        }
                        this.stage = Stage::asking(&this.node, By::Hash, question, place);
                    }
                    Poll::Ready(Err(error)) => break Err(error),
                    Poll::Pending => {
                        this.stage = Stage::Entering(question, entering);
                        return Poll::Pending;
                    }
                },
                // Waiting => New | Done
                Stage::Waiting(mut waiting) => match waiting.poll(cx) {
                    Poll::Ready(Told::End(result, generation)) => {
                        if result.as_ref().is_err_and(|error| error.kind() == RedisErrorKind::BreakerOpen) {
                            this.ticket = None;
                        }
                        on = generation;
                        break result;
                    }
                    Poll::Ready(Told::Again(question)) => this.stage = Stage::New(question),
                    Poll::Pending => {
                        this.stage = Stage::Waiting(waiting);
                        return Poll::Pending;
                    }
                },
                // Asking => Asking | Done
                Stage::Asking(mut asking, generation) => match asking.as_mut().poll(cx) {
                    Poll::Ready(Asked::Answered(result)) => {
                        on = generation;
                        break result;
                    }
                    Poll::Ready(Asked::NoScript(question, place)) => {
                        this.stage = Stage::asking(&this.node, By::Source, question, place);
                    }
                    Poll::Pending => {
                        this.stage = Stage::Asking(asking, generation);
                        // Without a runtime there is no timer.
                        if this.outwaits && Handle::try_current().is_ok() {
                            let silence = this.silence.get_or_insert_with(|| Box::pin(sleep(SILENCE)));
                            ready!(silence.as_mut().poll(cx));
                            this.node.lost(generation);
                            break Err(RedisError::new(RedisErrorKind::Late));
                        }
                        return Poll::Pending;
                    }
                },
                Stage::Done => panic!("polled after completion"),
            }
        };
        this.end(&result, on);
        Poll::Ready(result)
    }
}

impl<C: Call> Stage<C> {
    fn asking(node: &Arc<Node>, by: By, question: Question<C>, place: Place) -> Self {
        let generation = place.wire.generation();
        Self::Asking(Box::pin(ask(Arc::clone(node), by, question, place)), generation)
    }
}

impl<C: Call> Drop for Check<C> {
    fn drop(&mut self) {
        let stage = mem::replace(&mut self.stage, Stage::Done);
        let given_up = self.ticket.take().map(|ticket| GivenUp {
            ticket,
            late_at: ticket.began + self.patience,
            answers: self.answers,
        });
        let late = |generation| given_up.and_then(|given_up| self.node.is_late(given_up, generation));
        let early = match (stage, Handle::try_current()) {
            // What is on the wire keeps its place until it is answered, so that no more than so many are ever charged
            // after their callers have gone.
            (Stage::Asking(asking, generation), Ok(runtime)) => {
                // An error says nothing good of the server, though nobody is there to hear it.
                let asking = async move { matches!(asking.await, Asked::Answered(Ok(_))) };
                runtime.spawn(Arc::clone(&self.node).attend(asking, generation, late(generation)));
                return;
            }
            // Its place is the carrier's.
            (Stage::Waiting(waiting), runtime) => match (waiting.leave(), late(None), runtime) {
                (Some(answered), Some(early), Ok(runtime)) => {
                    runtime.spawn(Arc::clone(&self.node).attend(answered, None, Some(early)));
                    return;
                }
                (_, early, _) => early,
            },
            _ => late(None),
        };
        if let Some(early) = early {
            self.node.breaker.said_nothing(early.ticket, Instant::now());
        }
    }
}
