//! Notes what makes the host wait for a device: each such wait lets the device run dry.

use std::ffi::{c_char, c_int, c_void};

use super::facts::text;
use super::shim_object::ShimObject;

unsafe extern "C" {
    fn kvtune_waits_start(out: *mut *mut c_void) -> c_int;
    fn kvtune_waits_read(watch: *const c_void, index: usize) -> *const c_char;
    fn kvtune_waits_stop(watch: *mut c_void);
}

/// Notes for the thread that started it, and for the backwards that this thread runs, until it is dropped there.
#[derive(Debug)]
pub struct SyncNotes(ShimObject);

impl SyncNotes {
    /// Begins to take notes; `None` if libtorch does not let us.
    pub fn start() -> Option<Self> {
        // SAFETY: a new object is written.
        unsafe { ShimObject::made(kvtune_waits_stop, |out| kvtune_waits_start(out)) }.ok().map(Self)
    }

    /// What there was so far, in words: operations whose result the host must know, which count on any device, also on the CPU, where they cost
    /// nothing; and what happens between the host and a device only. CUDA's own count has some of these once more.
    pub fn read(&self) -> Vec<String> {
        // SAFETY: the object is alive, and gives texts of the shim's own, behind the last of which is null.
        (0..).map_while(|index| text(unsafe { kvtune_waits_read(self.0.get(), index) })).collect()
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    fn noted<T>(work: impl FnOnce() -> T) -> Vec<String> {
        let notes = SyncNotes::start().unwrap();
        let _ = work();
        notes.read()
    }

    #[test]
    fn what_the_host_must_know_is_noted() {
        let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        assert_eq!(noted(|| x.sum(Kind::Float).double_value(&[])), ["number read"]);
        assert_eq!(noted(|| x.gt(3.0).nonzero()), ["places looked for"]);
        assert_eq!(noted(|| x.index(&[Some(x.gt(3.0))])), ["places looked for"], "a mask as an index");
        assert_eq!(noted(|| x.detach().equal(&x.detach())), ["tensors compared"]);
        assert!(noted(|| (&x * 2.0).softmax(0, Kind::Float).topk(2, 0, true, true)).is_empty());
        // No notes are taken any more.
        x.sum(Kind::Float).double_value(&[]);
        assert!(noted(|| ()).is_empty());
    }

    #[test]
    fn a_backward_is_noted_and_other_threads_are_not() {
        let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let y = &x * 1.0;
        let read = x.detach();
        crate::native::attach_backward(&[&x], &[&y], move |grads| {
            read.double_value(&[3]);
            Ok(grads)
        })
        .unwrap();
        let found = noted(|| {
            std::thread::spawn(|| Tensor::from(1.0).double_value(&[])).join().unwrap();
            y.sum(Kind::Float).backward();
        });
        assert_eq!(found, ["number read"]);
    }
}
