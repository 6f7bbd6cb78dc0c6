fn main() {
    if !peers::child() {
        peers::compare::main();
    }
}
