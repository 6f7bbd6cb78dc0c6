fn main() {
    peers::load::main();
}
