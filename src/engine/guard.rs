//! The door at which libtorch's panics become errors: `tch`'s infallible operations panic when libtorch throws.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::EngineError;

/// Runs `body`; a panic inside becomes an error that tells out-of-memory from the rest.
pub fn guarded<T>(body: impl FnOnce() -> Result<T, EngineError>) -> Result<T, EngineError> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Err(EngineError::Backward(e))) => Err(classify(e.0)),
        Ok(result) => result,
        Err(panic) => Err(error_of_panic(&*panic)),
    }
}

/// What a panic says: that memory ran out, or something else of libtorch's.
pub fn error_of_panic(panic: &(dyn Any + Send)) -> EngineError {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    classify(text.unwrap_or("unknown panic").to_owned())
}

fn classify(text: String) -> EngineError {
    let memory = ["out of memory", "can't allocate memory", "not enough memory", "DefaultCPUAllocator", "ALLOC_FAILED"];
    if memory.iter().any(|m| text.contains(m)) { EngineError::OutOfMemory(text) } else { EngineError::Torch(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtorch_panics_become_errors() {
        let bad_shape = guarded(|| {
            let _ = tch::Tensor::zeros([2, 3], tch::kind::FLOAT_CPU).matmul(&tch::Tensor::zeros([2, 3], tch::kind::FLOAT_CPU));
            Ok(())
        });
        assert!(matches!(bad_shape, Err(EngineError::Torch(_))));
        let too_large = guarded(|| {
            let _ = tch::Tensor::ones([1 << 60], tch::kind::FLOAT_CPU);
            Ok(())
        });
        assert!(matches!(too_large, Err(EngineError::OutOfMemory(_))), "{too_large:?}");
        for text in
            ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"]
        {
            assert!(matches!(classify(text.to_owned()), EngineError::OutOfMemory(_)), "{text}");
        }
    }
}
