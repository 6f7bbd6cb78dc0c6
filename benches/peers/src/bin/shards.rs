fn main() {
    if !peers::child() {
        peers::shards::main();
    }
}
