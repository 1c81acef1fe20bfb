//! The allocator of the program: jemalloc, and one line and exit code 4 in place of an abort where there is no memory.

use std::alloc::{GlobalAlloc, Layout};

use tikv_jemallocator::Jemalloc;

use super::bounded::{charge, end};

/// The unprefixed `malloc` of jemalloc serves libtorch too. A step allocates and frees tensors of many sizes, and with the system's allocator what
/// is freed between others stays resident: more with every token, and nobody can say how much.
#[derive(Debug)]
pub struct Allocator;

fn had(memory: *mut u8, bytes: usize) -> *mut u8 {
    const NO_MEMORY: i32 = 4;
    const HINT: &str = "raise the limit of memory (`ulimit -v`), or ask for less";
    if memory.is_null() {
        end(NO_MEMORY, format_args!("memory does not suffice: {bytes} bytes more were not to be had"), HINT)
    }
    memory
}

// SAFETY: jemalloc's own, but that what it returns is never null.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        charge(layout.size() as isize);
        // SAFETY: the caller's promises are jemalloc's.
        had(unsafe { Jemalloc.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        charge(layout.size() as isize);
        // SAFETY: as above.
        had(unsafe { Jemalloc.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        charge(size as isize - layout.size() as isize);
        // SAFETY: as above.
        had(unsafe { Jemalloc.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        charge(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { Jemalloc.dealloc(memory, layout) }
    }
}
