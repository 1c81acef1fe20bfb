// Products of matrices on the CPU, by the fastest library that libtorch carries.
#pragma once
#include <ATen/core/Tensor.h>

namespace kvtune {

// `x (m, i) · w (o, i)ᵀ` as a new tensor (m, o); `w` may be a transposed view.
at::Tensor product(const at::Tensor& x, const at::Tensor& w);

}  // namespace kvtune
