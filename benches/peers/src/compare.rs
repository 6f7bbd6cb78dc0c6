//! Everything, briefly: tables, one table with ratios and targets, and the pictures in `docs/`.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::table::Row;
use crate::{request, script, shards, whole};

/// The program.
pub fn main() {
    let began = Instant::now();
    let requests = request::measure(crate::number("ROUNDS", 101));
    request::print(&requests);
    let growth = request::measure_growth(101);
    request::print_growth(&growth);
    let scripts = script::measure(31);
    let servers = whole::measure(5, Duration::from_millis(250));
    let instructions = whole::instructions();
    whole::print(&servers, &instructions);
    let (cases, memory) = (shards::measure(3, Duration::from_millis(300)), shards::memory());
    shards::print(&cases, &memory);

    println!("{}", Row::heading());
    let rows = request::rows(&requests, &growth).into_iter().chain(script::rows(&scripts));
    let rows = rows.chain(whole::rows(&servers, &instructions)).chain(shards::rows(&cases, &memory));
    rows.for_each(|row| println!("{}", row.line()));

    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    std::fs::create_dir_all(&docs).expect("the repository is writable");
    let pictures = [
        ("request.svg", request::chart(&requests)),
        ("growth.svg", request::chart_growth(&growth)),
        ("script.svg", script::chart(&scripts)),
        ("server-memory.svg", whole::chart(&servers, false)),
        ("server-redis.svg", whole::chart(&servers, true)),
    ];
    for (name, picture) in pictures {
        picture.write(&docs.join(name)).expect("the repository is writable");
    }
    println!("\npictures are in docs/; {:?} in all", began.elapsed());
}
