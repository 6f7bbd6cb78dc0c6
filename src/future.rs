//! From the store's answer to the inner service, or to a refusal.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use tokio::time::Sleep;
use tower_service::Service;

use crate::charge::Charges;
use crate::decision::Decision;
use crate::headers::write_fields;
use crate::rejection::{Rejection, ResponseForRejection, Verdict, respond};
use crate::settings::Shared;
use crate::settle::Settle;
use crate::store::Store;

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
        #[pin]
        state: State<S, S::Future, St::Future, ReqBody>,
    }
}

pin_project! {
    /// Named by what is polled.
    #[project = StateProject]
    enum State<S, F, A, ReqBody> {
        // A future that is never polled asks nobody.
        Asking {
            call: Option<(S, Request<ReqBody>)>,
            charges: Charges,
        },
        Acquiring {
            #[pin]
            acquire: A,
            // The ready service and its request: one option, so that a refusal frees both at once.
            call: Option<(S, Request<ReqBody>)>,
            charges: Charges,
            // Made when the store does not answer at once.
            deadline: Option<Pin<Box<Sleep>>>,
        },
        Decided {
            call: Option<(S, Request<ReqBody>)>,
            verdict: Option<Verdict>,
            // Those that the verdict is about.
            charges: Charges,
        },
        Calling {
            #[pin]
            response: F,
            decision: Option<Decision>,
        },
        Done,
    }
}

impl<S, St, R, ReqBody> ResponseFuture<S, St, R, ReqBody>
where
    S: Service<Request<ReqBody>>,
    St: Store,
{
    pub(crate) fn asking(shared: Arc<Shared<St, R>>, call: (S, Request<ReqBody>), charges: Charges) -> Self {
        Self { shared, state: State::Asking { call: Some(call), charges } }
    }

    pub(crate) fn decided(shared: Arc<Shared<St, R>>, call: (S, Request<ReqBody>), verdict: Verdict) -> Self {
        Self { shared, state: State::Decided { call: Some(call), verdict: Some(verdict), charges: Charges::new() } }
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
            match this.state.as_mut().project() {
                // Asking => Acquiring
                StateProject::Asking { call, charges } => {
                    let acquire = settings.checks.acquire(charges);
                    let (call, charges) = (call.take(), mem::take(charges));
                    this.state.set(State::Acquiring { acquire, call, charges, deadline: None });
                }
                // Acquiring => Decided
                StateProject::Acquiring { acquire, call, charges, deadline } => {
                    let verdict = match acquire.poll(cx) {
                        Poll::Ready(Ok(decision)) => {
                            settings.checks.failures.answered();
                            Verdict::of(decision)
                        }
                        Poll::Ready(Err(error)) => settings.checks.fail(charges, &error),
                        Poll::Pending => {
                            let sleep = || Box::pin(tokio::time::sleep(settings.checks.deadline));
                            ready!(deadline.get_or_insert_with(sleep).as_mut().poll(cx));
                            settings.checks.late(charges)
                        }
                    };
                    let charges = mem::take(charges);
                    let call = call.take();
                    this.state.set(State::Decided { call, verdict: Some(verdict), charges });
                }
                // Decided => Calling | Done
                StateProject::Decided { call, verdict, charges } => {
                    let (mut inner, mut request) = call.take().expect("polled after completion");
                    let Verdict { decision, refused } = verdict.take().expect("polled after completion");
                    if let Some(hook) = &settings.on_decision {
                        hook(&decision);
                    }
                    match refused {
                        None => {
                            if settings.settle {
                                Settle::insert(request.extensions_mut(), settings, charges, &decision);
                            }
                            request.extensions_mut().insert(decision.clone());
                            let response = inner.call(request);
                            this.state.set(State::Calling { response, decision: Some(decision) });
                        }
                        Some(reason) => {
                            let rejection = Rejection::new(reason, decision, &request);
                            // What they hold is free before the response is made.
                            drop((inner, request));
                            this.state.set(State::Done);
                            return Poll::Ready(Ok(respond(&this.shared.rejection, rejection, settings.headers)));
                        }
                    }
                }
                // Calling => Done
                StateProject::Calling { response, decision } => {
                    let result = ready!(response.poll(cx));
                    let decision = decision.take();
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
            }
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
