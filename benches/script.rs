//! What a decision costs the server: `lua/token_bucket.lua` against the least that any script costs, and against the
//! designs of other limiters.
//!
//! Run with `cargo bench --bench script`; `ROUNDS=401` for quieter figures. Four connections with 16 commands on the wire
//! each; CPU time of the server's process; all variants in turn, round after round, on one server. Times depend on the
//! machine and its mood, so a ratio is taken in each round, against the floor of that round, and the median is shown.

#[path = "support/calls.rs"]
mod calls;

use calls::{
    ALLOWED, Args, DENIED, FLOOR, FLOOR_NAME, TOKEN_BUCKET, Variant, key, measure, one, peers, rounds, several, texts,
};

const ONE: &str = include_str!("scripts/one.lua");

/// `requests` requests with one charge each to a call, on `keys` different keys.
fn many(requests: usize, keys: usize, charge: [&'static str; 5], kind: &'static str) -> impl Fn(usize) -> Args {
    move |i| {
        let keys = (0..requests).map(|j| key(kind, i * keys + j * keys / requests)).collect();
        let mut args = texts([&requests.to_string(), "1"]);
        args.extend(texts(charge));
        (keys, args)
    }
}

fn variants() -> Vec<Variant> {
    let ours = vec![
        Variant::new("return 1", ONE, 1, false, one("allowed", ALLOWED)),
        Variant::new(FLOOR_NAME, FLOOR, 1, false, one("floor", ALLOWED)),
        Variant::new(FLOOR_NAME, FLOOR, 1, true, one("floor-denied", DENIED)),
        Variant::new("one charge", TOKEN_BUCKET, 1, false, one("allowed", ALLOWED)),
        Variant::new("one charge", TOKEN_BUCKET, 1, true, one("denied", DENIED)),
        Variant::new("2 charges in a request", TOKEN_BUCKET, 2, false, several(2, ALLOWED, "allowed")),
        Variant::new("2 charges in a request", TOKEN_BUCKET, 2, true, several(2, DENIED, "denied")),
        Variant::new("4 charges in a request", TOKEN_BUCKET, 4, false, several(4, ALLOWED, "allowed")),
        Variant::new("4 charges in a request", TOKEN_BUCKET, 4, true, several(4, DENIED, "denied")),
        Variant::new("4 requests in a call", TOKEN_BUCKET, 4, false, many(4, 4, ALLOWED, "allowed")),
        Variant::new("4 requests in a call", TOKEN_BUCKET, 4, true, many(4, 4, DENIED, "denied")),
        Variant::new("16 requests in a call", TOKEN_BUCKET, 16, false, many(16, 16, ALLOWED, "allowed")),
        Variant::new("16 requests in a call", TOKEN_BUCKET, 16, true, many(16, 16, DENIED, "denied")),
        Variant::new("64 requests in a call", TOKEN_BUCKET, 64, false, many(64, 64, ALLOWED, "allowed")),
        Variant::new("64 requests in a call", TOKEN_BUCKET, 64, true, many(64, 64, DENIED, "denied")),
        Variant::new("64 requests, 4 hot keys", TOKEN_BUCKET, 64, false, many(64, 4, ALLOWED, "allowed")),
        Variant::new("64 requests, 4 hot keys", TOKEN_BUCKET, 64, true, many(64, 4, DENIED, "denied")),
    ];
    ours.into_iter().chain(peers()).collect()
}

fn main() {
    let rounds = rounds(101);
    let mut variants = variants();
    let took = measure(&mut variants, rounds);

    println!("server CPU per decision, {rounds} rounds in {took:?}, medians\n");
    println!("| variant | allowed us | x floor | denied us | x floor |\n|---|---|---|---|---|");
    let find = |name: &str, denied| variants.iter().find(|v| v.name == name && v.denied == denied);
    let against = |other: &str, variant: &Variant| {
        find(other, variant.denied).map_or(String::new(), |other| format!("{:.2}", variant.ratio(other)))
    };
    let mut names: Vec<_> = variants.iter().map(|variant| variant.name.as_str()).collect();
    names.dedup();
    for name in names {
        let column = |denied| match find(name, denied) {
            Some(variant) => format!("{:.2} | {}", variant.cost(), against(FLOOR_NAME, variant)),
            None => " | ".to_owned(),
        };
        println!("| {name} | {} | {} |", column(false), column(true));
    }
    println!("\n| one charge to a call costs, against | allowed | denied |\n|---|---|---|");
    let peers = ["redis_rate's design", "Spring's design", "Traefik's design", "the usual script"];
    for other in peers.into_iter().chain(["64 requests in a call", "64 requests, 4 hot keys"]) {
        let column = |denied| find("one charge", denied).map_or(String::new(), |variant| against(other, variant));
        println!("| {other} | {} | {} |", column(false), column(true));
    }
}
