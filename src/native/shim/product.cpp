// Products of matrices on the CPU: oneDNN's for f32, which uses all vector units of CPUs by any maker, and libtorch's default for the rest.
#include "guarded.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/linear.h>
#include <cstdlib>

namespace kvtune {
namespace {

using Attributes = c10::List<std::optional<at::Scalar>>;
using Pointwise = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view, Attributes,
                             std::optional<c10::string_view>);

// Absent where libtorch was built without oneDNN.
const std::optional<c10::TypedOperatorHandle<Pointwise>>& pointwise() {
  static const std::optional<c10::TypedOperatorHandle<Pointwise>> handle = []() -> std::optional<c10::TypedOperatorHandle<Pointwise>> {
    if (!at::Context::hasMKLDNN()) return std::nullopt;
    auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    if (!found.has_value()) return std::nullopt;
    return found->typed<Pointwise>();
  }();
  return handle;
}

// oneDNN and libtorch's layer over it each keep 1024 primitives, of one shape each: where samples are of many lengths, hundreds of MiB of
// bf16 products that never come again. A step has some dozens of shapes. Both look at the environment once, at the first product.
__attribute__((constructor)) void bound_primitive_caches() {
  setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128", 0);
  setenv("LRU_CACHE_CAPACITY", "128", 0);
}

// x (m, i) · w (o, i)ᵀ as a new tensor (m, o); `w` may be a transposed view.
at::Tensor product(const at::Tensor& x, const at::Tensor& w) {
  const auto& fast = pointwise();
  bool is_served = x.scalar_type() == at::kFloat && w.scalar_type() == at::kFloat && x.device().is_cpu();
  if (!fast.has_value() || !is_served || x.numel() == 0 || w.numel() == 0) return at::linear(x, w);
  static const Attributes none;
  return fast->call(x, w, std::nullopt, "none", none, "");
}

}  // namespace
}  // namespace kvtune

extern "C" {

int kvtune_product(at::Tensor* x, at::Tensor* w, at::Tensor** result) {
  return kvtune::guarded([&] { *result = new at::Tensor(kvtune::product(*x, *w)); });
}

}  // extern "C"
