//! CPU time of Redis per decision, of each design's script; `cargo bench --bench script` of the crate has more variants.

use crate::calls::{ALLOWED, DENIED, FLOOR, FLOOR_NAME, TOKEN_BUCKET, Variant, measure as run, one, peers};
use crate::chart::{Chart, Form, Series};
use crate::peer::OURS;
use crate::request::bars;
use crate::table::{Row, Target, median};

pub(crate) fn measure(rounds: usize) -> Vec<Variant> {
    let ours = [
        Variant::new(FLOOR_NAME, FLOOR, 1, false, one("floor", ALLOWED)),
        Variant::new(FLOOR_NAME, FLOOR, 1, true, one("floor-denied", DENIED)),
        Variant::new(OURS, TOKEN_BUCKET, 1, false, one("allowed", ALLOWED)),
        Variant::new(OURS, TOKEN_BUCKET, 1, true, one("denied", DENIED)),
    ];
    let mut all: Vec<_> = ours.into_iter().chain(peers()).collect();
    run(&mut all, rounds);
    all
}

fn find<'a>(all: &'a [Variant], name: &str, denied: bool) -> Option<&'a Variant> {
    all.iter().find(|it| it.name == name && it.denied == denied)
}

/// For the table of all.
pub(crate) fn rows(all: &[Variant]) -> Vec<Row> {
    let target = |name: &str, denied: bool| match (name, denied) {
        (FLOOR_NAME, false) => Target::AtMost(1.5),
        (FLOOR_NAME, true) => Target::AtMost(0.9),
        ("redis_rate's design" | "the usual script", _) => Target::AtMost(1.0),
        _ => Target::AtMost(0.8),
    };
    let others = all.iter().filter(|it| it.name != OURS);
    others
        .filter_map(|other| {
            let ours = find(all, OURS, other.denied)?;
            Some(Row {
                what: format!("us of Redis CPU per script call, {}", if other.denied { "denied" } else { "allowed" }),
                ours: median(ours.costs.clone()),
                peer: (other.name.clone(), other.cost()),
                ratio: ours.ratio(other),
                target: Some(target(&other.name, other.denied)),
            })
        })
        .collect()
}

/// Each design's cost, in relation to ours.
pub(crate) fn chart(all: &[Variant]) -> Chart {
    let shown = [OURS, "redis_rate's design", "Traefik's design", "Spring's design", "the usual script"];
    let series = |denied: bool| {
        let of = |name| find(all, name, denied).zip(find(all, OURS, denied)).map_or(0.0, |(of, ours)| of.ratio(ours));
        let shift = if denied { 0.19 } else { -0.19 };
        let points = shown.iter().enumerate().map(|(at, name)| (at as f64 + shift, of(name))).collect();
        let name = if denied { "denied" } else { "allowed" };
        Series { name: name.to_owned(), form: Form::Bars(0.36), colour: usize::from(denied), points }
    };
    bars(
        "CPU time of Redis for one decision; ours is 1",
        &["ours", "redis_rate", "Traefik", "Spring", "the usual script"],
        "CPU time, times ours",
        vec![series(false), series(true)],
    )
}
