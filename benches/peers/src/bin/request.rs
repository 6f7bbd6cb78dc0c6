fn main() {
    if !peers::child() {
        peers::request::main();
    }
}
