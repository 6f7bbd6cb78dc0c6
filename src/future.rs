//! From the store's answer to the inner service, or to a refusal.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use crate::charge::Charges;
use crate::decision::Decision;
use crate::headers::write_fields;
use crate::metrics::{Began, End};
use crate::rejection::{Reason, Rejection, ResponseForRejection, Verdict, respond};
use crate::settings::Shared;
use crate::settle::Settle;
use crate::store::Store;
use crate::{log, metrics};

pin_project! {
    /// The response to come of [`TokenBucket`](crate::TokenBucket).
    ///
    /// Dropped while the store decides, it never calls the inner service; tokens that were taken by then are spent.
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<S, St, R, ReqBody>
    where
        S: Service<Request<ReqBody>>,
        St: Store,
    {
        shared: Arc<Shared<St, R>>,
        // The ready service and its request, until it is called or a refusal frees them. Beside the state and in parts, so
        // that they are moved into their place at once.
        inner: Option<S>,
        parts: Option<Parts>,
        body: Option<ReqBody>,
        charges: Charges,
        // From the verdict on: it goes into the response.
        decision: Option<Decision>,
        #[pin]
        state: State<S::Future, St::Future>,
    }
}

pin_project! {
    /// Named by what is polled.
    #[project = StateProject]
    enum State<F, A> {
        // A future that is never polled asks nobody.
        Asking,
        Acquiring {
            #[pin]
            acquire: A,
            began: Began,
            // Made when the store does not answer at once.
            deadline: Option<Pin<Box<Sleep>>>,
        },
        // No store need be asked.
        Decided {
            refused: Option<Reason>,
        },
        Calling {
            #[pin]
            response: F,
        },
        Done,
    }
}

impl<S, St, R, ReqBody> ResponseFuture<S, St, R, ReqBody>
where
    S: Service<Request<ReqBody>>,
    St: Store,
{
    #[inline]
    pub(crate) fn asking(shared: Arc<Shared<St, R>>, inner: S, parts: Parts, body: ReqBody, charges: Charges) -> Self {
        let (inner, parts, body) = (Some(inner), Some(parts), Some(body));
        Self { shared, inner, parts, body, charges, decision: None, state: State::Asking }
    }

    pub(crate) fn decided(shared: Arc<Shared<St, R>>, inner: S, parts: Parts, body: ReqBody, verdict: Verdict) -> Self {
        let (inner, parts, body) = (Some(inner), Some(parts), Some(body));
        let Verdict { decision, refused } = verdict;
        let state = State::Decided { refused };
        Self { shared, inner, parts, body, charges: Charges::None, decision: Some(decision), state }
    }
}

impl<S, St, R, ReqBody, ResBody> Future for ResponseFuture<S, St, R, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    St: Store,
    R: ResponseForRejection<ResBody>,
{
    type Output = Result<Response<ResBody>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let settings = &this.shared.settings;
        if !matches!(*this.state, State::Calling { .. }) {
            // … => Calling | Done
            let reason = loop {
                match this.state.as_mut().project() {
                    // Asking => Acquiring, but for a store that answers at once.
                    StateProject::Asking => {
                        let began = Began::now();
                        *this.decision = settings.checks.acquire_at_once(this.charges);
                        if let Some(decision) = &*this.decision {
                            began.ended(End::Answered);
                            settings.checks.failures.answered();
                            break (!decision.is_allowed()).then_some(Reason::Denied);
                        }
                        let acquire = settings.checks.acquire(this.charges);
                        this.state.set(State::Acquiring { acquire, began, deadline: None });
                    }
                    StateProject::Acquiring { acquire, began, deadline } => {
                        let Verdict { decision, refused } = match acquire.poll(cx) {
                            Poll::Ready(Ok(decision)) => {
                                began.ended(End::Answered);
                                settings.checks.failures.answered();
                                Verdict::of(decision)
                            }
                            Poll::Ready(Err(error)) => {
                                began.ended(End::Failed);
                                settings.checks.fail(this.charges, &error)
                            }
                            Poll::Pending => {
                                let sleep = || Box::pin(tokio::time::sleep(settings.checks.deadline));
                                ready!(deadline.get_or_insert_with(sleep).as_mut().poll(cx));
                                began.ended(End::Late);
                                settings.checks.late(this.charges)
                            }
                        };
                        *this.decision = Some(decision);
                        break refused;
                    }
                    StateProject::Decided { refused } => break refused.take(),
                    StateProject::Calling { .. } | StateProject::Done => panic!("polled after completion"),
                }
            };
            let (Some(decision), Some(parts)) = (&*this.decision, &mut *this.parts) else {
                panic!("polled after completion")
            };
            metrics::decided(decision, reason.as_ref(), this.charges, parts, &settings.limits);
            log::decided(decision, reason.as_ref());
            if let Some(hook) = &settings.on_decision {
                hook(decision);
            }
            if let Some(reason) = reason {
                let Some(decision) = this.decision.take() else { panic!("polled after completion") };
                let rejection = Rejection::new(reason, decision, parts);
                // What they hold is free before the response is made.
                *this.inner = None;
                *this.parts = None;
                *this.body = None;
                this.state.set(State::Done);
                return Poll::Ready(Ok(respond(&this.shared.rejection, rejection, settings.headers)));
            }
            if settings.settle {
                Settle::insert(&mut parts.extensions, settings, this.charges, decision);
            }
            // Those that the verdict is about are no longer needed.
            *this.charges = Charges::None;
            parts.extensions.insert(decision.clone());
            let Some(mut inner) = this.inner.take() else { unreachable!("taken with the rest of the request") };
            let Some(body) = this.body.take() else { unreachable!("taken with the rest of the request") };
            let Some(parts) = this.parts.take() else { unreachable!("borrowed above") };
            this.state.set(State::Calling { response: inner.call(Request::from_parts(parts, body)) });
        }
        // Calling => Done
        let StateProject::Calling { response } = this.state.as_mut().project() else { unreachable!() };
        // Not taken apart, so that it is moved once.
        let mut output = response.poll(cx);
        if let Poll::Ready(result) = &mut output {
            this.state.set(State::Done);
            if let (Ok(response), Some(decision)) = (result, this.decision.take()) {
                write_fields(response.headers_mut(), &decision, settings.headers);
                // A layer further in may have refused: that decision is the one to see.
                if response.extensions().get::<Decision>().is_none_or(Decision::is_allowed) {
                    response.extensions_mut().insert(decision);
                }
            }
        }
        output
    }
}

impl<S, St, R, ReqBody> fmt::Debug for ResponseFuture<S, St, R, ReqBody>
where
    S: Service<Request<ReqBody>>,
    St: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
