//! Autograd nodes whose backward is a Rust closure, and backward from explicit output gradients.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::{self, Display};
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

use tch::Tensor;
use torch_sys::C_tensor;

/// A tensor as the shim takes and gives it.
pub(super) type Raw = *mut C_tensor;
/// How the shim lets go of what it was given.
pub(super) type DropUser = extern "C" fn(*mut c_void);

/// What libtorch, or a backward closure, said when a backward failed.
#[derive(Debug)]
pub struct BackwardError(pub String);

impl Display for BackwardError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "libtorch: {}", self.0)
    }
}

impl std::error::Error for BackwardError {}

/// Gradients of the outputs in (`None` where undefined), gradients of the inputs out (`None` where not needed). A node owns it until it has run.
type Backward = Box<dyn FnOnce(Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, String> + Send>;

unsafe extern "C" {
    fn kvtune_last_error() -> *const c_char;
    fn kvtune_attach_node(
        inputs: *const Raw,
        num_inputs: usize,
        outputs: *const Raw,
        num_outputs: usize,
        callback: extern "C" fn(*mut c_void, *const Raw, usize, *mut Raw, usize, *mut c_char, usize) -> c_int,
        drop: DropUser,
        user: *mut c_void,
    ) -> c_int;
    fn kvtune_backward(roots: *const Raw, grads: *const Raw, count: usize) -> c_int;
    fn kvtune_take_gradient(leaf: Raw, result: *mut Raw) -> c_int;
    fn kvtune_grad(
        roots: *const Raw,
        grads: *const Raw,
        count: usize,
        inputs: *const Raw,
        results: *mut Raw,
        num_inputs: usize,
    ) -> c_int;
}

pub(super) fn pointer(tensor: &Tensor) -> Raw {
    tensor.as_ptr().cast_mut()
}

/// A tensor that the shim has made; `None` of null.
///
/// # Safety
/// A pointer that is not null is a new `at::Tensor` that nobody else owns.
pub(super) unsafe fn owned(tensor: Raw) -> Option<Tensor> {
    // SAFETY: the caller's promise.
    (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor) })
}

fn pointers(tensors: &[&Tensor]) -> Vec<Raw> {
    tensors.iter().copied().map(pointer).collect()
}

/// New tensors that `fill` writes; `None` where it leaves null.
pub(super) fn tensors<const N: usize>(fill: impl FnOnce(*mut Raw) -> c_int) -> Result<[Option<Tensor>; N], BackwardError> {
    let made = written([null_mut(); N], |made| fill(made.cast()))?;
    // SAFETY: the call has succeeded, so each pointer is null or a new `at::Tensor` that is ours to own.
    Ok(made.map(|tensor| unsafe { owned(tensor) }))
}

/// What a call of the shim writes in the place of `value`.
pub(super) fn written<T>(mut value: T, call: impl FnOnce(*mut T) -> c_int) -> Result<T, BackwardError> {
    check(call(&raw mut value)).map(|()| value)
}

pub(super) fn check(rc: c_int) -> Result<(), BackwardError> {
    if rc == 0 {
        return Ok(());
    }
    // SAFETY: the shim returns a NUL-terminated string owned by this thread, valid until its next error.
    let message = unsafe { CStr::from_ptr(kvtune_last_error()) };
    Err(BackwardError(message.to_string_lossy().into_owned()))
}

/// What an operation on tensors does with an error: it panics with libtorch's text, as libtorch's own do. The engine's door makes an error of it.
pub(crate) fn or_panic<T, E: Display>(done: Result<T, E>) -> T {
    #[allow(clippy::panic, reason = "there is no other way out of an operation on tensors")]
    done.unwrap_or_else(|error| panic!("{error}"))
}

/// Makes `outputs`, which were computed without autograd, depend on `inputs` through `backward`; without an input that requires
/// grad they stay constants, and the closure is dropped.
///
/// The closure runs at most once, possibly on another thread, and is dropped as soon as backward has passed. It must own
/// detached tensors only, else the graph would own itself; and as these share memory with what they come from, which libtorch then
/// does not watch, nobody may write there before the backward. An `Err` or a panic inside it fails the backward.
///
/// # Shapes
/// The closure receives one gradient per output, of the output's shape, and returns one per input, of the input's shape.
pub fn attach_backward<F>(inputs: &[&Tensor], outputs: &[&Tensor], backward: F) -> Result<(), BackwardError>
where
    F: FnOnce(Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>, String> + Send + 'static,
{
    let (inputs, outputs) = (pointers(inputs), pointers(outputs));
    let user = Box::into_raw(Box::<Option<Backward>>::new(Some(Box::new(backward)))).cast();
    let free: DropUser = drop_boxed::<Option<Backward>>;
    // SAFETY: all pointers are live `at::Tensor`s; the shim takes ownership of `user` and lets go of it by `free`.
    check(unsafe { kvtune_attach_node(inputs.as_ptr(), inputs.len(), outputs.as_ptr(), outputs.len(), run_closure, free, user) })
}

/// Runs backward from `roots`, whose gradients are `grads`, into the `.grad` of the leaves.
///
/// # Shapes
/// `grads[i]` has the shape of `roots[i]`.
pub fn run_backward(roots: &[&Tensor], grads: &[&Tensor]) -> Result<(), BackwardError> {
    let (roots, grads) = (pointers(roots), pointers(grads));
    // SAFETY: both lists hold live tensors and have the same length.
    check(unsafe { kvtune_backward(roots.as_ptr(), grads.as_ptr(), roots.len().min(grads.len())) })
}

/// Takes the gradient out of a leaf, which has none afterwards; `None` where it had none.
///
/// # Shapes
/// The leaf's.
pub fn take_gradient(leaf: &Tensor) -> Result<Option<Tensor>, BackwardError> {
    // SAFETY: the leaf is a live tensor; one result is written.
    tensors(|result| unsafe { kvtune_take_gradient(pointer(leaf), result) }).map(|[gradient]| gradient)
}

/// The gradients of `inputs`, given those of `roots`; `None` where the roots do not depend on an input.
///
/// # Shapes
/// `grads[i]` has the shape of `roots[i]`, each result that of its input.
pub fn gradients_of(roots: &[&Tensor], grads: &[&Tensor], inputs: &[&Tensor]) -> Result<Vec<Option<Tensor>>, BackwardError> {
    let (roots, grads, inputs) = (pointers(roots), pointers(grads), pointers(inputs));
    let mut results = vec![null_mut(); inputs.len()];
    let count = roots.len().min(grads.len());
    // SAFETY: all lists hold live tensors; `results` has room for one pointer per input.
    check(unsafe { kvtune_grad(roots.as_ptr(), grads.as_ptr(), count, inputs.as_ptr(), results.as_mut_ptr(), inputs.len()) })?;
    // SAFETY: each non-null result is a new `at::Tensor` that is ours to own.
    Ok(results.into_iter().map(|tensor| unsafe { owned(tensor) }).collect())
}

/// Drops what the shim was given as a `Box<T>`.
pub(super) extern "C" fn drop_boxed<T>(user: *mut c_void) {
    // SAFETY: `user` came from `Box::into_raw`, and the shim drops it exactly once.
    let owned = unsafe { Box::from_raw(user.cast::<T>()) };
    // A panic must not cross into C++; what a destructor could not free is lost, nothing else.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(owned)));
}

extern "C" fn run_closure(
    user: *mut c_void,
    grads_in: *const Raw,
    num_in: usize,
    grads_out: *mut Raw,
    num_out: usize,
    message: *mut c_char,
    len: usize,
) -> c_int {
    let result = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the node owns the closure and holds its lock while it calls.
        let closure = unsafe { &mut *user.cast::<Option<Backward>>() };
        // SAFETY: the shim passes `num_in` pointers, null or to live tensors.
        let incoming = unsafe { std::slice::from_raw_parts(grads_in, num_in) };
        // SAFETY: non-null pointers are live tensors; `clone_from_ptr` makes a new reference to the same storage.
        let shared = |&grad: &Raw| (!grad.is_null()).then(|| unsafe { Tensor::clone_from_ptr(grad) });
        let grads = incoming.iter().map(shared).collect();
        let backward = closure.take().ok_or_else(|| "backward ran twice".to_owned())?;
        let outgoing = backward(grads)?;
        if outgoing.len() != num_out {
            return Err(format!("the closure returned {} gradients for {num_out} inputs", outgoing.len()));
        }
        Ok(outgoing)
    }));
    let text = match result {
        Ok(Ok(outgoing)) => {
            for (i, grad) in outgoing.into_iter().enumerate().filter_map(|(i, grad)| Some((i, grad?))) {
                // SAFETY: `grads_out` has room for `num_out` pointers; ownership of the tensor passes to the shim.
                unsafe { *grads_out.add(i) = ManuallyDrop::new(grad).as_mut_ptr() };
            }
            return 0;
        }
        Ok(Err(text)) => text,
        Err(panic) => panic_text(&*panic).unwrap_or(SILENT).to_owned(),
    };
    let bytes = &text.as_bytes()[..text.len().min(len)];
    // SAFETY: the buffer has `len` bytes and one more for the terminating zero, which the shim has set.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), message.cast::<u8>(), bytes.len()) };
    1
}

/// What is said of a panic without a text.
pub(super) const SILENT: &str = "an operation has failed";

/// The text of a caught panic, if it has one.
pub(crate) fn panic_text(panic: &dyn Any) -> Option<&str> {
    panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tch::{Device, Kind, Tensor, no_grad};

    use super::*;

    fn leaf(values: &[f64]) -> Tensor {
        Tensor::from_slice(values).set_requires_grad(true)
    }

    #[test]
    fn a_closure_differentiates_and_is_dropped_after_backward() {
        let x = leaf(&[1.0, 2.0]);
        let alive = Arc::new(());
        let kept = alive.clone();
        let y = no_grad(|| x.square());
        let saved = x.detach();
        attach_backward(&[&x], &[&y], move |grads| {
            drop(kept);
            Ok(vec![grads[0].as_ref().map(|g| g * &saved * 2.0)])
        })
        .unwrap();
        let seed = Tensor::ones([2], (Kind::Double, Device::Cpu));
        run_backward(&[&y], &[&seed]).unwrap();
        assert_eq!(Vec::<f64>::try_from(x.grad()).unwrap(), [2.0, 4.0]);
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn errors_and_panics_in_a_closure_fail_the_backward() {
        let seed = Tensor::ones([1], (Kind::Double, Device::Cpu));
        for panics in [false, true] {
            let x = leaf(&[1.0]);
            let y = no_grad(|| &x * 1.0);
            attach_backward(&[&x], &[&y], move |_| if panics { panic!("no good") } else { Err("no good".to_owned()) }).unwrap();
            let error = run_backward(&[&y], &[&seed]).unwrap_err();
            assert!(error.0.contains("no good"), "{error}");
        }
    }

    #[test]
    fn without_an_input_that_requires_grad_there_is_no_node() {
        let alive = Arc::new(());
        let (x, kept) = (Tensor::from_slice(&[1.0]), alive.clone());
        let y = &x * 2.0;
        attach_backward(&[&x], &[&y], move |_| Err(format!("ran with {kept:?}"))).unwrap();
        assert!(!y.requires_grad());
        assert_eq!(Arc::strong_count(&alive), 1);
    }

    #[test]
    fn gradients_of_unrelated_inputs_are_none() {
        let (x, z) = (leaf(&[3.0]), leaf(&[1.0]));
        let y = &x * 2.0;
        let seed = Tensor::ones([1], (Kind::Double, Device::Cpu));
        let grads = gradients_of(&[&y], &[&seed], &[&x, &z]).unwrap();
        assert_eq!(grads[0].as_ref().map(|g| g.double_value(&[0])), Some(2.0));
        assert!(grads[1].is_none());
    }
}
