// Cross-entropy of rows of scores, and its gradient, on the CPU: a row is gone through while it is in a core's cache.
#include "guarded.h"
#include "kinds.h"
#include "tasks.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvtune {
namespace {

// Powers that are summed up in their own kind, before the sum goes on in f64: a vocabulary has too many for f32.
constexpr int64_t kPowers = 1024;
// Scores below which another thread is not worth waking.
constexpr int64_t kLeastScores = 1 << 15;

template <class T> INLINE T largest_of(const T* x, int64_t count) {
  T top = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// The sum of e^(x - top), which is kept where `to` is not null.
template <class T> INLINE double powers_of(const T* x, T top, T* to, int64_t count) {
  double sum = 0;
  for (int64_t first = 0; first < count; first += kPowers) {
    int64_t end = std::min(count, first + kPowers);
    T part = 0;
    if (to == nullptr) {
#pragma omp simd reduction(+ : part)
      for (int64_t i = first; i < end; ++i) part += exponential(x[i] - top);
    } else {
#pragma omp simd reduction(+ : part)
      for (int64_t i = first; i < end; ++i) {
        T power = exponential(x[i] - top);
        to[i] = power;
        part += power;
      }
    }
    sum += part;
  }
  return sum;
}

template <class T> INLINE void multiplied(T* x, T factor, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

#define FOR_KIND(T)                                                                                                 \
  VARIANTS T top_of(const T* x, int64_t count) { return largest_of<T>(x, count); }                                  \
  VARIANTS double sum_powers(const T* x, T top, T* to, int64_t count) { return powers_of<T>(x, top, to, count); }   \
  VARIANTS void scale(T* x, T factor, int64_t count) { multiplied<T>(x, factor, count); }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

struct RowResult {
  double loss;
  bool is_correct;
};

// Of one row; its gradient times `weight` to `gradient`, where that is not null.
template <class T> RowResult row_loss(const T* x, int64_t count, int64_t target, double weight, T* gradient) {
  T top = top_of(x, count), own = x[target];
  double sum = sum_powers(x, top, gradient, count);
  if (gradient != nullptr) {
    scale(gradient, static_cast<T>(weight / sum), count);
    gradient[target] -= static_cast<T>(weight);
  }
  // Of several that are largest the first counts.
  bool is_correct = own == top && !std::isnan(sum) && std::find(x, x + target, top) == x + target;
  return {std::log(sum) + (static_cast<double>(top) - static_cast<double>(own)), is_correct};
}

template <class T>
void all_rows(const at::Tensor& scores, const at::Tensor& targets, double weight, at::Tensor& figures, at::Tensor& gradient) {
  int64_t rows = scores.size(0), count = scores.size(1);
  const T* x = data<T>(scores);
  const int64_t* target = targets.data_ptr<int64_t>();
  T* to = gradient.defined() ? data<T>(gradient) : nullptr;
  double* out = figures.data_ptr<double>();
  for (int64_t row = 0; row < rows; ++row) {
    TORCH_CHECK(target[row] >= 0 && target[row] < count, "target ", target[row], " is none of ", count, " choices");
  }
  share_out_ranges(rows, std::max<int64_t>(1, kLeastScores / std::max<int64_t>(1, count)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int64_t at = row * count;
      RowResult of_row = row_loss(x + at, count, target[row], weight, to == nullptr ? nullptr : to + at);
      out[row] = of_row.loss;
      out[rows + row] = of_row.is_correct ? 1 : 0;
    }
  });
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

// scores (N, K), f32 or f64; targets (N), i64. `results` receives figures (2, N), f64: the losses, and 1 where the target is the first of
// the largest scores; and, if `has_gradient`, the gradient (N, K) of `weight` times the sum of the losses.
int kvtune_cross_entropy(at::Tensor* scores, at::Tensor* targets, int has_gradient, double weight, at::Tensor** results) {
  return guarded([&] {
    bool is_served = scores->is_cpu() && targets->is_cpu() && is_wide(*scores) && targets->scalar_type() == at::kLong;
    bool fits = scores->dim() == 2 && targets->dim() == 1 && targets->size(0) == scores->size(0);
    TORCH_CHECK(is_served && fits, "targets of size ", targets->sizes(), " do not fit scores of size ", scores->sizes());
    at::Tensor x = scores->contiguous(), target = targets->contiguous(), gradient;
    at::Tensor figures = at::empty({2, x.size(0)}, at::dtype(at::kDouble));
    if (has_gradient != 0) gradient = at::empty(x.sizes(), x.options());
    x.scalar_type() == at::kFloat ? all_rows<float>(x, target, weight, figures, gradient)
                                  : all_rows<double>(x, target, weight, figures, gradient);
    results[0] = new at::Tensor(std::move(figures));
    if (gradient.defined()) results[1] = new at::Tensor(std::move(gradient));
  });
}

}  // extern "C"
