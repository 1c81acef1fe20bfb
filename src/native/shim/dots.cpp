#include "dots.h"

#include "vectors.h"

#include <algorithm>

namespace kvtune {
namespace {

// Adds in each stretch of 2 · `step` numbers its halves; the sums of `a` stand before those of `b`.
template <int step, class V> INLINE typename V::Row add_halves(typename V::Row a, typename V::Row b) {
  constexpr int N = sizeof(a) / sizeof(a[0]);
  typename V::Places left, right;
  for (int i = 0; i < N; ++i) {
    int half = i / step * 2 * step + i % step;
    left[i] = half;
    right[i] = half + step;
  }
  return V::pick(a, b, left) + V::pick(a, b, right);
}

// Four rows are summed at a time, as the sums of one would wait for each other, and brought together in one vector.
template <class T> INLINE void dots(T* to, const T* x, int64_t apart, const T* y, int64_t y_apart, int64_t rows, int64_t count) {
  using V = Vector<T, 16>;
  constexpr int64_t AT_ONCE = 4, N = 16;
  int64_t whole = count / N * N;
  for (int64_t first = 0; first < rows; first += AT_ONCE) {
    const T *xs[AT_ONCE], *ys[AT_ONCE];
    typename V::Row sums[AT_ONCE];
    for (int64_t r = 0; r < AT_ONCE; ++r) {
      // Where there are fewer rows, the last one is summed again, in vain.
      int64_t row = std::min(first + r, rows - 1);
      xs[r] = x + row * apart;
      ys[r] = y + row * y_apart;
      sums[r] = typename V::Row{};
    }
    for (int64_t i = 0; i < whole; i += N) {
      for (int64_t r = 0; r < AT_ONCE; ++r) sums[r] += V::at(xs[r] + i) * V::at(ys[r] + i);
    }
    auto all = add_halves<4, V>(add_halves<8, V>(sums[0], sums[1]), add_halves<8, V>(sums[2], sums[3]));
    all = add_halves<2, V>(all, all);
    all = add_halves<1, V>(all, all);
    for (int64_t r = 0; r < std::min(AT_ONCE, rows - first); ++r) {
      T sum = all[r];
      for (int64_t i = whole; i < count; ++i) sum += xs[r][i] * ys[r][i];
      to[first + r] += sum;
    }
  }
}

}  // namespace

#define FOR_KIND(T)                                                                                                    \
  VARIANTS void add_dots(T* to, const T* x, int64_t apart, const T* y, int64_t y_apart, int64_t rows, int64_t count) { \
    /* One row for all is read once for four of the others. */                                                         \
    y_apart == 0 ? dots<T>(to, x, apart, y, 0, rows, count) : dots<T>(to, x, apart, y, y_apart, rows, count);          \
  }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

}  // namespace kvtune
