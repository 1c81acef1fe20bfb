// Norms of head vectors, and their cosines with the mean of their directions, on the CPU; src/ops/head_vectors.rs has both in libtorch's
// operations.
#include "dots.h"
#include "guarded.h"
#include "kinds.h"
#include "powers.h"
#include "tasks.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvtune {
namespace {

// Below every norm that matters; as in src/ops/head_vectors.rs.
constexpr double TINY = 1e-12;

// Adds the directions of the rows that have a position.
template <class T>
INLINE void directions(T* to, const T* x, int64_t apart, const T* norm, const int64_t* position, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r, x += apart) {
    if (position[r] < 0) continue;
    T factor = T(1) / norm[r];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) to[i] += x[i] * factor;
  }
}

#define FOR_KIND(T)                                                                                                               \
  VARIANTS void add_directions(T* to, const T* x, int64_t apart, const T* norm, const int64_t* position, int64_t rows,            \
                               int64_t width) {                                                                                   \
    directions<T>(to, x, apart, norm, position, rows, width);                                                                     \
  }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

// Rows of numbers that stand together.
template <class T> struct Rows {
  const T* first;
  int64_t apart, count, width;

  // No norm is below `least`.
  void norms(T* to, T least = 0) const {
    std::fill(to, to + count, T(0));
    add_dots(to, first, apart, first, apart, count, width);
    for (int64_t r = 0; r < count; ++r) to[r] = std::max(std::sqrt(to[r]), least);
  }

  void cosines(T* to, const int64_t* position) const {
    std::vector<T> norm(count), mean(width, T(0));
    norms(norm.data(), static_cast<T>(TINY));
    add_directions(mean.data(), first, apart, norm.data(), position, count, width);
    T length;
    Rows{mean.data(), 0, 1, width}.norms(&length, static_cast<T>(TINY));
    std::fill(to, to + count, T(0));
    add_dots(to, first, apart, mean.data(), 0, count, width);
    for (int64_t r = 0; r < count; ++r) to[r] /= length * norm[r];
  }
};

// As many numbers are worth waking a thread.
constexpr int64_t kGrain = 1 << 16;

// Calls `body(to, rows, head)` with each head of a new tensor (B, G, n) and its rows in x (B, G, n, D), on several threads where that is worth
// it.
template <class T, class F> at::Tensor by_head(const at::Tensor& x, F body) {
  at::Tensor result = at::empty(x.sizes().slice(0, 3), x.options());
  T *to = data<T>(result), *from = data<T>(x);
  int64_t groups = x.size(1), rows = x.size(2), heads = x.size(0) * groups;
  int64_t grain = at::ceil_div(kGrain, std::max<int64_t>(1, rows * x.size(3)));
  share_out(heads, threads_for(heads, grain), [&](int64_t head, int64_t) {
    const T* first = from + head / groups * x.stride(0) + head % groups * x.stride(1);
    body(to + head * rows, Rows<T>{first, x.stride(2), rows, x.size(3)}, head);
  });
  return result;
}

at::Tensor checked(const at::Tensor& x) {
  TORCH_CHECK(x.is_cpu() && x.dim() == 4 && is_wide(x), "head vectors (B, G, n, D) in f32 or f64 are looked for, not a tensor of size ",
              x.sizes());
  return with_channels_together(x);
}

template <class T> at::Tensor all_norms(const at::Tensor& x) {
  return by_head<T>(x, [](T* to, Rows<T> rows, int64_t) { rows.norms(to); });
}

template <class T> at::Tensor all_cosines(const at::Tensor& x, const at::Tensor& position) {
  const int64_t* held = position.data_ptr<int64_t>();
  return by_head<T>(x, [&](T* to, Rows<T> rows, int64_t head) { rows.cosines(to, held + head * rows.count); });
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
