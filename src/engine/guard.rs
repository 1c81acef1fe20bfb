//! The door at which libtorch's panics become errors: `tch`'s infallible operations panic when libtorch throws.

use crate::native::{BackwardError, panic_text};
use crate::units::{Exit, Fault, FaultKind, abridged};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `body`; a panic inside becomes an error that tells out-of-memory from the rest.
pub fn guarded<T>(body: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Err(error)) => Err(error.payload::<BackwardError>().map(|said| classify(&said.0)).unwrap_or(error)),
        Ok(Ok(made)) => Ok(made),
        Err(panic) => Err(error_of_panic(&*panic)),
    }
}

/// Guards a part of a training step, whose tiling has keys that lower what it takes.
pub(super) fn guarded_step<T>(body: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
    let hint = "lower `train.micro_batch_size`, `grad.layers_per_cell` or `grad.chunks_per_cell_multiplier`, or set \
                `grad.layer_checkpoints = \"int8\"`; where the host's memory is short, `grad.layer_checkpoints_place = \"file\"`";
    guarded(body).map_err(|error| if error.kind() == FaultKind::OutOfMemory { error.with_hint(hint) } else { error })
}

/// What a panic says: that memory ran out, or something else of libtorch's.
pub fn error_of_panic(panic: &dyn Any) -> Fault {
    classify(panic_text(panic).unwrap_or("unknown panic"))
}

fn classify(text: &str) -> Fault {
    let memory = ["out of memory", "can't allocate memory", "not enough memory", "DefaultCPUAllocator", "ALLOC_FAILED"];
    if memory.iter().any(|m| text.contains(m)) {
        let hint = "take fewer or shorter texts at a time, lower `kv_cache.cache_length` or `kv_cache.chunk_size`, or load smaller weights with \
                    `model.dtype = \"bf16\"` or `model.quantize`; in training there is `train.offload`, too";
        Fault::new(Exit::Memory, format!("out of memory: {}", abridged(text))).with_hint(hint).of_kind(FaultKind::OutOfMemory)
    } else {
        let hint = "see whether `kvtune doctor` finds a cause; else please report it with the command";
        // In full, as whoever mends it needs all lines.
        Fault::failed(format!("libtorch: {text}")).with_hint(hint).of_kind(FaultKind::Torch)
    }
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
        assert_eq!(bad_shape.unwrap_err().kind(), FaultKind::Torch);
        let too_large = || {
            let _ = tch::Tensor::ones([1 << 60], tch::kind::FLOAT_CPU);
            Ok(())
        };
        for (said, is_step) in [(guarded(too_large), false), (guarded_step(too_large), true)] {
            let error = said.unwrap_err();
            assert_eq!((error.kind(), error.hint().unwrap().contains("`grad.")), (FaultKind::OutOfMemory, is_step));
        }
        for text in
            ["CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"]
        {
            assert_eq!(classify(text).kind(), FaultKind::OutOfMemory, "{text}");
        }
    }
}
