// Products of matrices on the CPU: oneDNN's for f32, which uses all vector units of CPUs by any maker, and libtorch's default for the rest. Where oneDNN
// has no products of bf16, which is so without AVX-512, libtorch's take ten times as long as those of f32: there factors are widened first.
#include "gemm.h"
#include "guarded.h"
#include "kinds.h"
#include "tasks.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <algorithm>
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

bool has_bf16_products() {
  static const bool has = [] {
    auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return found.has_value() && at::Context::hasMKLDNN() && found->typed<bool()>().call();
  }();
  return has;
}

// Rows of x that libtorch's own product of bf16 serves as fast, as it reads half the bytes.
constexpr int64_t FEW_ROWS = 2;
// Numbers of f32 that are made for a moment of a matrix and of what comes of it.
constexpr int64_t TILE = 1 << 21;

// Rows of a matrix that are widened at a time, for a product of so many rows of `inner` numbers.
int64_t rows_at_once(int64_t rows, int64_t inner) { return std::max<int64_t>(TILE / (rows + inner), 1); }

bool is_widened(const at::Tensor& x, const at::Tensor& w) {
  bool is_narrow = x.scalar_type() == at::kBFloat16 && w.scalar_type() == at::kBFloat16 && x.device().is_cpu() && x.dim() == 2;
  return is_narrow && x.size(0) > FEW_ROWS && w.numel() > 0 && !has_bf16_products();
}

at::Tensor product(const at::Tensor& x, const at::Tensor& w);

// Calls `take(start, part)` with x · w[start..]ᵀ in f32, some rows of w at a time.
template <typename Take>
void in_tiles(const at::Tensor& x, const at::Tensor& w, Take take) {
  at::Tensor wide = x.to(at::kFloat);
  int64_t rows = w.size(0), at_once = rows_at_once(x.size(0), x.size(1));
  for (int64_t start = 0; start < rows; start += at_once) {
    take(start, product(wide, w.narrow(0, start, std::min(at_once, rows - start)).to(at::kFloat)));
  }
}

// x (m, i) · w (o, i)ᵀ as a new tensor (m, o); `w` may be a transposed view.
at::Tensor product(const at::Tensor& x, const at::Tensor& w) {
  if (is_widened(x, w)) {
    at::Tensor out = at::empty({x.size(0), w.size(0)}, x.options());
    in_tiles(x, w, [&](int64_t start, const at::Tensor& part) { out.narrow(1, start, part.size(1)).copy_(part); });
    return out;
  }
  const auto& fast = pointwise();
  bool is_served = x.scalar_type() == at::kFloat && w.scalar_type() == at::kFloat && x.device().is_cpu();
  if (!fast.has_value() || !is_served || x.numel() == 0 || w.numel() == 0) return at::linear(x, w);
  static const Attributes none;
  return fast->call(x, w, std::nullopt, "none", none, "");
}

// Rows that are multiplied at a time by a kernel which is kept for every size: that of a few rows more or less must not be another one.
constexpr int64_t ROWS = 64;

// y (m, o) + x (m, i) · w (i, o) in place, for the first rows of y; returns how many. Where x is thin, as LoRA's is, libtorch's addmm takes up to twice
// as long.
int64_t add_thin_product(at::Tensor& y, const at::Tensor& x, const at::Tensor& w) {
  int64_t columns = w.size(1), inner = w.size(0), blocks = x.size(0) / ROWS;
  auto is_served = [](const at::Tensor& t) { return t.is_cpu() && t.scalar_type() == at::kFloat && t.numel() > 0; };
  bool fits = x.size(1) == inner && y.sizes() == at::IntArrayRef({x.size(0), columns}) && x.is_contiguous() && y.is_contiguous();
  if (blocks == 0 || !fits || inner > ROWS || !is_served(y) || !is_served(x) || !is_served(w)) return 0;
  at::Tensor factor = w.contiguous();
  share_out_ranges(blocks, grain(ROWS * columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * ROWS; row < end * ROWS; row += ROWS) {
      multiply({ROWS, columns, inner}, {inner, columns, columns}, data<float>(x) + row * inner, data<float>(factor),
               data<float>(y) + row * columns, true);
    }
  });
  return blocks * ROWS;
}

// y (m, o) + x (m, i) · w (i, o) in place.
void add_product(at::Tensor& y, const at::Tensor& x, const at::Tensor& w) {
  if (!is_widened(x, w)) {
    int64_t done = add_thin_product(y, x, w);
    if (done == 0 || done < y.size(0)) y.slice(0, done).addmm_(x.slice(0, done), w);
    return;
  }
  in_tiles(x, w.t(), [&](int64_t start, const at::Tensor& part) { y.narrow(1, start, part.size(1)).add_(part); });
}

}  // namespace
}  // namespace kvtune

extern "C" {

int kvtune_product(at::Tensor* x, at::Tensor* w, at::Tensor** result) {
  return kvtune::giving(result, [&] { return kvtune::Tensors{kvtune::product(*x, *w)}; });
}

int64_t kvtune_widened_bytes(int64_t rows, int64_t inner, int64_t outer) {
  if (rows <= kvtune::FEW_ROWS || kvtune::has_bf16_products()) return 0;
  return 4 * (rows * inner + std::min(kvtune::rows_at_once(rows, inner), outer) * (rows + inner));
}

int kvtune_add_product(at::Tensor* y, at::Tensor* x, at::Tensor* w) {
  return kvtune::guarded([&] { kvtune::add_product(*y, *x, *w); });
}

}  // extern "C"
