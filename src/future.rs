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
use crate::rejection::{Rejection, ResponseForRejection, Verdict, respond};
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
        // The ready service and its request: one option, so that a refusal frees both at once. Beside the state, so that
        // they are moved once.
        call: Option<(S, Parts, ReqBody)>,
        charges: Charges,
        // While the inner service is called: it goes into the response.
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
            verdict: Option<Verdict>,
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
    pub(crate) fn asking(shared: Arc<Shared<St, R>>, call: (S, Parts, ReqBody), charges: Charges) -> Self {
        Self { shared, call: Some(call), charges, decision: None, state: State::Asking }
    }

    pub(crate) fn decided(shared: Arc<Shared<St, R>>, call: (S, Parts, ReqBody), verdict: Verdict) -> Self {
        let state = State::Decided { verdict: Some(verdict) };
        Self { shared, call: Some(call), charges: Charges::None, decision: None, state }
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
        loop {
            // … => Calling | Done
            let verdict = match this.state.as_mut().project() {
                // Asking => Acquiring
                StateProject::Asking => {
                    let began = Began::now();
                    let acquire = settings.checks.acquire(this.charges);
                    this.state.set(State::Acquiring { acquire, began, deadline: None });
                    continue;
                }
                StateProject::Acquiring { acquire, began, deadline } => match acquire.poll(cx) {
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
                },
                StateProject::Decided { verdict } => verdict.take().expect("polled after completion"),
                // Calling => Done
                StateProject::Calling { response } => {
                    let result = ready!(response.poll(cx));
                    let decision = this.decision.take();
                    this.state.set(State::Done);
                    return Poll::Ready(result.map(|mut response| {
                        if let Some(decision) = decision {
                            write_fields(response.headers_mut(), &decision, settings.headers);
                            // A layer further in may have refused: that decision is the one to see.
                            if response.extensions().get::<Decision>().is_none_or(Decision::is_allowed) {
                                response.extensions_mut().insert(decision);
                            }
                        }
                        response
                    }));
                }
                StateProject::Done => panic!("polled after completion"),
            };
            let (mut inner, mut parts, body) = this.call.take().expect("polled after completion");
            metrics::decided(&verdict, this.charges, &parts, &settings.limits);
            log::decided(&verdict);
            let Verdict { decision, refused } = verdict;
            if let Some(hook) = &settings.on_decision {
                hook(&decision);
            }
            if let Some(reason) = refused {
                let rejection = Rejection::new(reason, decision, &parts);
                // What they hold is free before the response is made.
                drop((inner, parts, body));
                this.state.set(State::Done);
                return Poll::Ready(Ok(respond(&this.shared.rejection, rejection, settings.headers)));
            }
            if settings.settle {
                Settle::insert(&mut parts.extensions, settings, this.charges, &decision);
            }
            // Those that the verdict is about are no longer needed.
            *this.charges = Charges::None;
            parts.extensions.insert(decision.clone());
            *this.decision = Some(decision);
            let response = inner.call(Request::from_parts(parts, body));
            this.state.set(State::Calling { response });
        }
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
