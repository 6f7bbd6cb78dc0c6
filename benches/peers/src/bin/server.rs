fn main() {
    if !peers::child() {
        peers::whole::main();
    }
}
