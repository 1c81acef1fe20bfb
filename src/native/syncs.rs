//! Counts what makes the host wait for a device: each such wait lets the device run dry.

use std::ffi::{c_int, c_void};

use super::shim_object::ShimObject;

unsafe extern "C" {
    fn kvtune_waits_start(out: *mut *mut c_void) -> c_int;
    fn kvtune_waits_read(handle: *const c_void, out: *mut i64);
    fn kvtune_waits_stop(handle: *mut c_void);
}

/// How many of each kind there were, in the order of [`Syncs::KINDS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Syncs([i64; 7]);

impl Syncs {
    /// What is counted, in the words of tables. The first three are operations whose result the host must know, and count on any device,
    /// also on the CPU, where they cost nothing; the others happen between the host and a device only. CUDA's own count has some of
    /// the others once more.
    pub const KINDS: [&'static str; 7] = [
        "numbers read",
        "places looked for",
        "tensors compared",
        "blocking copies",
        "copies of pageable memory",
        "events waited for",
        "waits by CUDA's own count",
    ];

    pub fn rows(self) -> impl Iterator<Item = (&'static str, i64)> {
        Self::KINDS.into_iter().zip(self.0)
    }

    pub fn since(self, earlier: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] - earlier.0[i]))
    }
}

/// Counts for the thread that started it, and for the backwards that this thread runs, until it is dropped. It ends on the thread on which it
/// began, as a `ShimObject` goes to no other.
#[derive(Debug)]
pub struct SyncCounter(ShimObject);

impl SyncCounter {
    /// Begins to count; `None` if libtorch does not let us.
    pub fn start() -> Option<Self> {
        // SAFETY: a new counter is written.
        unsafe { ShimObject::made(kvtune_waits_stop, |out| kvtune_waits_start(out)) }.ok().map(Self)
    }

    pub fn read(&self) -> Syncs {
        let mut counts = [0; 7];
        // SAFETY: the handle is alive until `drop`, and there is room for one number of each kind.
        unsafe { kvtune_waits_read(self.0.get(), counts.as_mut_ptr()) };
        Syncs(counts)
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    fn counted<T>(work: impl FnOnce() -> T) -> Vec<i64> {
        let counter = SyncCounter::start().unwrap();
        let _ = work();
        counter.read().rows().map(|(_, count)| count).collect()
    }

    #[test]
    fn what_the_host_must_know_is_counted() {
        let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        assert_eq!(counted(|| x.sum(Kind::Float).double_value(&[]))[..3], [1, 0, 0]);
        assert_eq!(counted(|| x.gt(3.0).nonzero())[..3], [0, 1, 0]);
        assert_eq!(counted(|| x.index(&[Some(x.gt(3.0))]))[..3], [0, 1, 0], "a mask as an index");
        assert_eq!(counted(|| x.detach().equal(&x.detach()))[..3], [0, 0, 1]);
        assert_eq!(counted(|| (&x * 2.0).softmax(0, Kind::Float).topk(2, 0, true, true)), [0; 7]);
        // The count is over.
        x.sum(Kind::Float).double_value(&[]);
        assert_eq!(counted(|| ()), [0; 7]);
    }

    #[test]
    fn a_backward_is_counted_and_other_threads_are_not() {
        let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let y = &x * 1.0;
        let read = x.detach();
        crate::native::attach_backward(&[&x], &[&y], move |grads| {
            read.double_value(&[3]);
            Ok(grads)
        })
        .unwrap();
        let found = counted(|| {
            std::thread::spawn(|| Tensor::from(1.0).double_value(&[])).join().unwrap();
            y.sum(Kind::Float).backward();
        });
        assert_eq!(found[0], 1);
    }
}
