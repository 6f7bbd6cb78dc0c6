//! What an operator sees: `cargo run --example metrics --features metrics` sends a few requests and prints all
//! series as Prometheus reads them.
//!
//! A service has a recorder such as that of `metrics-exporter-prometheus`; the one here is short, so that nothing else need
//! be built. It keeps of a histogram the count and the sum.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::routing::get;
use axum::{Router, http::Request};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use tower::ServiceExt;
use tower_token_bucket::{CostTable, Global, Limit, MemoryStore, Quota, TokenBucketLayer};

/// The series, by name and labels.
#[derive(Clone, Default)]
struct Text(Arc<Mutex<BTreeMap<String, f64>>>);

/// A line of it, or for a histogram the count, beside which is the sum.
struct Line(Text, Key);

impl Line {
    fn change(&self, suffix: &str, change: impl FnOnce(f64) -> f64) {
        // The values of labels here have nothing that would have to be escaped.
        let labels: Vec<_> = self.1.labels().map(|label| format!("{}=\"{}\"", label.key(), label.value())).collect();
        let name = format!("{}{suffix}{{{}}}", self.1.name(), labels.join(","));
        let mut lines = self.0.0.lock().expect("nothing panics under this lock");
        let value = lines.entry(name).or_default();
        *value = change(*value);
    }
}

impl CounterFn for Line {
    fn increment(&self, more: u64) {
        self.change("", |sum| sum + more as f64);
    }
    fn absolute(&self, sum: u64) {
        self.change("", |_| sum as f64);
    }
}

impl GaugeFn for Line {
    fn increment(&self, more: f64) {
        self.change("", |value| value + more);
    }
    fn decrement(&self, less: f64) {
        self.change("", |value| value - less);
    }
    fn set(&self, value: f64) {
        self.change("", |_| value);
    }
}

impl HistogramFn for Line {
    fn record(&self, value: f64) {
        self.change("_count", |count| count + 1.0);
        self.change("_sum", |sum| sum + value);
    }
}

impl Recorder for Text {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(Line(self.clone(), key.clone())))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(Line(self.clone(), key.clone())))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(Line(self.clone(), key.clone())))
    }
}

#[tokio::main]
async fn main() {
    let text = Text::default();
    // Before the first layer, so that the gauges are seen that it sets.
    metrics::set_global_recorder(text.clone()).expect("there is no other recorder");
    let costs = CostTable::new(1).route("GET /search", 3);
    let limit = Limit::new("everybody", Quota::per_minute(7)).key_by(Global).cost(costs);
    let app = Router::new()
        .route("/search", get(|| async { "found" }))
        .route("/users/{id}", get(|| async { "a user" }))
        .layer(TokenBucketLayer::new(MemoryStore::new(), limit));
    for path in ["/search", "/search", "/users/1", "/users/2", "/users/3"] {
        let request = Request::get(path).body(Body::empty()).expect("a request");
        let response = app.clone().oneshot(request).await.expect("infallible");
        eprintln!("{path}: {}", response.status());
    }
    for (series, value) in text.0.lock().expect("nothing panics under this lock").iter() {
        println!("{series} {value}");
    }
}
