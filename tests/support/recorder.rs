//! What this thread records.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};

/// All series, by their text: `name{label="value",…}`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series(Arc<Mutex<BTreeMap<String, Arc<Values>>>>, Arc<Mutex<BTreeMap<String, Option<Unit>>>>);

/// Of a counter the sum, of a gauge the last, of a histogram all.
#[derive(Debug, Default)]
struct Values(Mutex<Vec<f64>>);

impl Series {
    /// Each series of this name without it, and its values.
    pub(crate) fn of(&self, name: &str) -> Vec<(String, Vec<f64>)> {
        let all = self.0.lock().unwrap();
        let of = all.iter().filter_map(|(text, values)| {
            let labels = text.strip_prefix(name).filter(|rest| rest.starts_with('{'))?;
            Some((labels.to_owned(), values.0.lock().unwrap().clone()))
        });
        of.collect()
    }

    /// Of counters and gauges, whose labels are left out but for their values.
    pub(crate) fn values(&self, name: &str) -> Vec<(String, f64)> {
        let short = |labels: String| labels.split('"').skip(1).step_by(2).collect::<Vec<_>>().join(" ");
        self.of(name).into_iter().map(|(labels, values)| (short(labels), values[0])).collect()
    }

    /// That of one counter or gauge, by the values of its labels.
    pub(crate) fn value(&self, name: &str, labels: &str) -> Option<f64> {
        self.values(name).into_iter().find(|(of, _)| of == labels).map(|(_, value)| value)
    }

    pub(crate) fn texts(&self) -> Vec<String> {
        self.0.lock().unwrap().keys().cloned().collect()
    }

    /// Which have been described, and their units.
    pub(crate) fn units(&self) -> BTreeMap<String, Option<Unit>> {
        self.1.lock().unwrap().clone()
    }

    fn values_of(&self, key: &Key) -> Arc<Values> {
        let labels: Vec<_> = key.labels().map(|label| format!("{}=\"{}\"", label.key(), label.value())).collect();
        let text = format!("{}{{{}}}", key.name(), labels.join(","));
        Arc::clone(self.0.lock().unwrap().entry(text).or_default())
    }

    fn describe(&self, name: &KeyName, unit: Option<Unit>) {
        self.1.lock().unwrap().insert(name.as_str().to_owned(), unit);
    }
}

impl CounterFn for Values {
    fn increment(&self, more: u64) {
        let mut values = self.0.lock().unwrap();
        let sum = values.first().copied().unwrap_or_default() + more as f64;
        *values = vec![sum];
    }

    fn absolute(&self, _: u64) {
        unimplemented!("a counter only counts")
    }
}

impl GaugeFn for Values {
    fn increment(&self, _: f64) {
        unimplemented!("a gauge is set, so that it is right whenever the recorder came")
    }

    fn decrement(&self, _: f64) {
        unimplemented!("a gauge is set, so that it is right whenever the recorder came")
    }

    fn set(&self, value: f64) {
        *self.0.lock().unwrap() = vec![value];
    }
}

impl HistogramFn for Values {
    fn record(&self, value: f64) {
        self.0.lock().unwrap().push(value);
    }
}

impl Recorder for Series {
    fn describe_counter(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&name, unit);
    }

    fn describe_gauge(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&name, unit);
    }

    fn describe_histogram(&self, name: KeyName, unit: Option<Unit>, _: SharedString) {
        self.describe(&name, unit);
    }

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.values_of(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.values_of(key))
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.values_of(key))
    }
}
