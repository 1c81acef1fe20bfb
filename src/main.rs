//! The binary `kvtune`.

/// Its unprefixed `malloc` serves libtorch too. A step allocates and frees tensors of many sizes, and with the system's allocator what
/// is freed between others stays resident: more with every token, and nobody can say how much.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ! {
    kvtune::cli::main()
}
