//! The binary `kvtune`.

#[global_allocator]
static ALLOCATOR: kvtune::native::Allocator = kvtune::native::Allocator;

fn main() -> ! {
    kvtune::cli::main()
}
