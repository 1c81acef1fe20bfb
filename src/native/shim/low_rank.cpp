// What a low-rank addition to a linear adds, on the CPU in one pass over the rows: its two thin products and its factor need a block of rows
// at a time, which stays in a core's cache. The rest has libtorch's operations.
#include "gemm.h"
#include "guarded.h"
#include "kinds.h"
#include "product.h"
#include "tasks.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

namespace kvtune {
namespace {

// Rows of a block, and numbers of a row of x that are taken at a time: with more of them at once the rows drive each other out of the cache.
constexpr int64_t kRows = 64, kDepth = 256;
// As many numbers of x and y are worth waking a thread.
constexpr int64_t kGrain = 1 << 16;

template <class T> at::Tensor add_by_block(at::Tensor& y, const at::Tensor& x, const at::Tensor& first, const at::Tensor& second, double scale) {
  int64_t rows = x.size(0), in = x.size(1), rank = first.size(1), out = y.size(1);
  at::Tensor inner = at::empty({rows, rank}, x.options());
  const T *from = data<T>(x), *down = data<T>(first), *up = data<T>(second);
  T *middle = data<T>(inner), *to = data<T>(y);
  int64_t blocks = at::ceil_div(rows, kRows), grain = at::ceil_div(kGrain, kRows * (in + out));
  share_out(blocks, threads_for(blocks, grain), [&](int64_t block, int64_t) {
    int64_t begin = block * kRows, count = std::min(kRows, rows - begin);
    T* own = middle + begin * rank;
    for (int64_t done = 0; done < in; done += kDepth) {
      multiply({count, rank, std::min(kDepth, in - done)}, {in, rank, rank}, from + begin * in + done, down + done * rank, own, done > 0);
    }
    for (int64_t i = 0; i < count * rank; ++i) own[i] *= static_cast<T>(scale);
    multiply({count, out, rank}, {rank, out, out}, own, up, to + begin * out, true);
  });
  return inner;
}

// y (m, o) += inner · second (r, o) with inner = scale · x (m, i) · first (i, r), which is the result.
at::Tensor add_low_rank(at::Tensor& y, const at::Tensor& x, const at::Tensor& first, const at::Tensor& second, double scale) {
  bool is_wide = x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble;
  // For few rows, copies of the matrices would cost as much as the products.
  bool are_enough = x.dim() == 2 && x.size(0) >= kRows && x.numel() > 0 && y.numel() > 0 && first.numel() > 0;
  bool is_served = is_wide && are_enough && x.is_cpu() && y.is_contiguous();
  if (!is_served) {
    at::Tensor inner = product(x, first.t()).mul_(scale);
    y.addmm_(inner, second);
    return inner;
  }
  auto fits = [&](const at::Tensor& of, int64_t rows, int64_t columns) {
    return of.sizes() == at::IntArrayRef({rows, columns}) && of.scalar_type() == x.scalar_type() && of.is_cpu();
  };
  bool fit = y.dim() == 2 && first.dim() == 2 && fits(y, x.size(0), y.size(1)) &&
             fits(first, x.size(1), first.size(1)) && fits(second, first.size(1), y.size(1));
  TORCH_CHECK(fit, "matrices of size ", first.sizes(), " and ", second.sizes(), " do not lead from ", x.sizes(), " to ", y.sizes());
  at::Tensor rows = x.contiguous(), down = first.contiguous(), up = second.contiguous();
  return x.scalar_type() == at::kFloat ? add_by_block<float>(y, rows, down, up, scale)
                                       : add_by_block<double>(y, rows, down, up, scale);
}

}  // namespace
}  // namespace kvtune

extern "C" {

// `result` receives a new tensor (m, r).
int kvtune_add_low_rank(at::Tensor* y, at::Tensor* x, at::Tensor* first, at::Tensor* second, double scale, at::Tensor** result) {
  return kvtune::guarded([&] { *result = new at::Tensor(kvtune::add_low_rank(*y, *x, *first, *second, scale)); });
}

}  // extern "C"
