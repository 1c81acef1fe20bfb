// Numbers side by side in one vector, which compilers cut to what the CPU has, and sums along rows that are made of them.
#pragma once
#include "powers.h"

#include <algorithm>
#include <type_traits>

namespace kvtune {

template <class T, int N> struct Vector {
  typedef T Row __attribute__((vector_size(N * sizeof(T))));
  using Place = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef Place Places __attribute__((vector_size(N * sizeof(T))));

  INLINE Row at(const T* x) {
    Row row;
    std::memcpy(&row, x, sizeof row);
    return row;
  }

  // The numbers at these places of `a` and, behind it, `b`.
  INLINE Row pick(Row a, Row b, Places from) {
#ifdef __clang__
    Row picked;
    for (int i = 0; i < N; ++i) picked[i] = from[i] < N ? a[from[i]] : b[from[i] - N];
    return picked;
#else
    return __builtin_shuffle(a, b, from);
#endif
  }
};

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

// to[r] += x_r · y_r, the products of `rows` rows of `count` numbers; those of x and y are so many numbers apart, at 0 they are one and the
// same row. Four rows are summed at a time, as the sums of one would wait for each other, and brought together in one vector.
template <class T> INLINE void add_dots(T* to, const T* x, int64_t apart, const T* y, int64_t y_apart, int64_t rows, int64_t count) {
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

}  // namespace kvtune
