//! What all programs print with.

pub(crate) fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of.get(of.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The median of the ratios of figures that were taken in the same rounds.
pub(crate) fn ratio(of: &[f64], to: &[f64]) -> f64 {
    median(of.iter().zip(to).map(|(of, to)| of / to).collect())
}

/// A figure with about three digits; nothing where there is none.
pub(crate) fn figure(value: f64) -> String {
    match value {
        value if !value.is_finite() => "-".to_owned(),
        value if value.abs() >= 100.0 => format!("{value:.0}"),
        value if value.abs() >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// A line of the table of [`compare`](crate::compare).
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) ours: f64,
    /// Who it is compared with, and that figure.
    pub(crate) peer: (String, f64),
    /// Ours in relation to the peer's.
    pub(crate) ratio: f64,
    /// The ratio that was aimed at, at most or at least.
    pub(crate) target: Option<Target>,
}

#[derive(Clone, Copy)]
pub(crate) enum Target {
    AtMost(f64),
    AtLeast(f64),
}

impl Row {
    pub(crate) fn heading() -> &'static str {
        "| what | ours | peer | its figure | ours / peer | target | holds |\n|---|---|---|---|---|---|---|"
    }

    pub(crate) fn line(&self) -> String {
        let (target, holds) = match self.target {
            Some(Target::AtMost(target)) => (format!("≤ {}", figure(target)), Some(self.ratio <= target)),
            Some(Target::AtLeast(target)) => (format!("≥ {}", figure(target)), Some(self.ratio >= target)),
            None => (String::new(), None),
        };
        let holds = holds.map_or("", |holds| if holds { "yes" } else { "NO" });
        let (name, peer) = (&self.peer.0, figure(self.peer.1));
        let ours = figure(self.ours);
        format!("| {} | {ours} | {name} | {peer} | {} | {target} | {holds} |", self.what, figure(self.ratio))
    }
}
