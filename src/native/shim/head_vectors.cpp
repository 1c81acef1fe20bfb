// Norms of head vectors, and their cosines with the mean of their directions, on the CPU; src/ops/head_vectors.rs has both in libtorch's
// operations.
#include "guarded.h"
#include "kinds.h"
#include "tasks.h"
#include "vectors.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <vector>

namespace kvtune {
namespace {

// Below every norm that matters; as in src/ops/head_vectors.rs.
constexpr double TINY = 1e-12;

template <class T> INLINE void norms_of(T* to, const T* x, int64_t apart, int64_t rows, int64_t width) {
  std::fill(to, to + rows, T(0));
  add_dots<T>(to, x, apart, x, apart, rows, width);
  for (int64_t r = 0; r < rows; ++r) to[r] = std::sqrt(to[r]);
}

// `mean` has room for a row, and `norm` for all norms.
template <class T>
INLINE void cosines_of(T* to, const T* x, int64_t apart, const int64_t* position, int64_t rows, int64_t width, T* mean, T* norm) {
  norms_of(norm, x, apart, rows, width);
  std::fill(mean, mean + width, T(0));
  for (int64_t r = 0; r < rows; ++r) {
    norm[r] = std::max(norm[r], static_cast<T>(TINY));
    if (position[r] < 0) continue;
    T factor = T(1) / norm[r];
    const T* row = x + r * apart;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) mean[i] += row[i] * factor;
  }
  T length;
  norms_of(&length, mean, 0, 1, width);
  length = std::max(length, static_cast<T>(TINY));
  std::fill(to, to + rows, T(0));
  add_dots<T>(to, x, apart, mean, 0, rows, width);
  for (int64_t r = 0; r < rows; ++r) to[r] /= length * norm[r];
}

#define FOR_KIND(T)                                                                                                              \
  VARIANTS void norms(T* to, const T* x, int64_t apart, int64_t rows, int64_t width) { norms_of<T>(to, x, apart, rows, width); } \
  VARIANTS void cosines(T* to, const T* x, int64_t apart, const int64_t* position, int64_t rows, int64_t width, T* mean,         \
                        T* norm) {                                                                                               \
    cosines_of<T>(to, x, apart, position, rows, width, mean, norm);                                                              \
  }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

// As many numbers are worth waking a thread.
constexpr int64_t kGrain = 1 << 16;

// Calls `body(to, rows, head)` with each head of a new tensor (B, G, n) and of x (B, G, n, D), on several threads where that is worth it.
template <class T, class F> at::Tensor by_head(const at::Tensor& x, F body) {
  at::Tensor result = at::empty(x.sizes().slice(0, 3), x.options());
  T *to = data<T>(result), *from = data<T>(x);
  int64_t groups = x.size(1), rows = x.size(2), heads = x.size(0) * groups;
  int64_t grain = at::ceil_div(kGrain, std::max<int64_t>(1, rows * x.size(3)));
  share_out(heads, threads_for(heads, grain), [&](int64_t head, int64_t) {
    body(to + head * rows, from + head / groups * x.stride(0) + head % groups * x.stride(1), head);
  });
  return result;
}

at::Tensor checked(const at::Tensor& x) {
  TORCH_CHECK(x.is_cpu() && x.dim() == 4 && is_wide(x), "head vectors (B, G, n, D) in f32 or f64 are looked for, not a tensor of size ",
              x.sizes());
  return with_channels_together(x);
}

template <class T> at::Tensor all_norms(const at::Tensor& x) {
  return by_head<T>(x, [&](T* to, const T* rows, int64_t) { norms(to, rows, x.stride(2), x.size(2), x.size(3)); });
}

template <class T> at::Tensor all_cosines(const at::Tensor& x, const at::Tensor& position) {
  const int64_t* held = position.data_ptr<int64_t>();
  return by_head<T>(x, [&](T* to, const T* rows, int64_t head) {
    std::vector<T> mean(x.size(3)), norm(x.size(2));
    cosines(to, rows, x.stride(2), held + head * x.size(2), x.size(2), x.size(3), mean.data(), norm.data());
  });
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

// x (B, G, n, D), f32 or f64; out (B, G, n).
int kvtune_norms(at::Tensor* x, at::Tensor** result) {
  return guarded([&] {
    at::Tensor rows = checked(*x);
    *result = new at::Tensor(rows.scalar_type() == at::kFloat ? all_norms<float>(rows) : all_norms<double>(rows));
  });
}

// The same, and position (B, G, n), i64: a vector whose position is negative does not count in the mean.
int kvtune_cosines(at::Tensor* x, at::Tensor* position, at::Tensor** result) {
  return guarded([&] {
    at::Tensor rows = checked(*x), held = position->contiguous();
    bool fits = held.is_cpu() && held.scalar_type() == at::kLong && held.sizes() == rows.sizes().slice(0, 3);
    TORCH_CHECK(fits, "positions of size ", held.sizes(), " do not fit head vectors of size ", rows.sizes());
    *result = new at::Tensor(rows.scalar_type() == at::kFloat ? all_cosines<float>(rows, held) : all_cosines<double>(rows, held));
  });
}

}  // extern "C"
