// How CUDA's libraries compute: settings of libtorch that hold for the process.
#include "../guarded.h"

#include <ATen/Context.h>

#include <cstdlib>

extern "C" {

// Sums of products in bf16 and f16 are always made in f32. Set before CUDA's matrix library starts: it reads its workspace then, and
// only one of a fixed size lets it compute the same every time.
int kvtune_set_numerics(int allows_tf32, int is_deterministic) {
  return kvtune::guarded([&] {
    if (is_deterministic) setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 0);
    at::Context& context = at::globalContext();
    context.setAllowTF32CuBLAS(allows_tf32);
    context.setAllowTF32CuDNN(allows_tf32);
    context.setAllowBF16ReductionCuBLAS(false);
    context.setAllowFP16ReductionCuBLAS(false);
    context.setAllowFP16AccumulationCuBLAS(false);
    context.setBenchmarkCuDNN(false);
    context.setDeterministicCuDNN(is_deterministic);
    context.setDeterministicAlgorithms(is_deterministic, false);
    // New memory is always written before it is read: filling it would only take time.
    context.setDeterministicFillUninitializedMemory(false);
  });
}

// What holds: TF32, reductions of bf16 in f32, deterministic algorithms.
int kvtune_numerics(int* out) {
  return kvtune::guarded([&] {
    const at::Context& context = at::globalContext();
    out[0] = context.allowTF32CuBLAS() || context.allowTF32CuDNN(at::Float32Op::CONV);
    out[1] = context.allowBF16ReductionCuBLAS() == at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK;
    out[2] = context.deterministicAlgorithms();
  });
}

}  // extern "C"
