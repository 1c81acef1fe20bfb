#include "rows.h"

#include "powers.h"

#include <algorithm>
#include <type_traits>

namespace kvtune {
namespace {

// Numbers side by side in one vector, which compilers cut to what the CPU has.
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

// Numbers of a square's side: a square is turned in registers.
constexpr int64_t SIDE = 8;

template <class T> using Square = Vector<T, SIDE>;

// Exchanges numbers `step` columns to the right of a row with those as many rows below it, for all such pairs of rows.
template <int step, class T> INLINE void exchange(typename Square<T>::Row* rows) {
  typename Square<T>::Places upper, lower;
  for (int i = 0; i < SIDE; ++i) {
    upper[i] = (i & step) == 0 ? i : SIDE + i - step;
    lower[i] = (i & step) == 0 ? i + step : SIDE + i;
  }
  for (int i = 0; i < SIDE; ++i) {
    if ((i & step) != 0) continue;
    auto a = rows[i], b = rows[i + step];
    rows[i] = Square<T>::pick(a, b, upper);
    rows[i + step] = Square<T>::pick(a, b, lower);
  }
}

template <class T> INLINE void turn_square(T* to, int64_t apart, const T* from, int64_t stride) {
  typename Square<T>::Row rows[SIDE];
  for (int i = 0; i < SIDE; ++i) rows[i] = Square<T>::at(from + i * stride);
  exchange<1, T>(rows);
  exchange<2, T>(rows);
  exchange<4, T>(rows);
  for (int i = 0; i < SIDE; ++i) std::memcpy(to + i * apart, &rows[i], sizeof rows[i]);
}

template <class T> INLINE void turned(T* to, int64_t apart, const T* from, int64_t stride, int64_t rows, int64_t width) {
  int64_t whole_rows = rows / SIDE * SIDE, whole_width = width / SIDE * SIDE;
  for (int64_t i = 0; i < whole_rows; i += SIDE) {
    for (int64_t d = 0; d < whole_width; d += SIDE) turn_square<T>(to + d * apart + i, apart, from + i * stride + d, stride);
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = i < whole_rows ? whole_width : 0; d < width; ++d) to[d * apart + i] = from[i * stride + d];
  }
}

}  // namespace

#define FOR_KIND(T)                                                                                                    \
  VARIANTS void add_dots(T* to, const T* x, int64_t apart, const T* y, int64_t y_apart, int64_t rows, int64_t count) { \
    /* One row for all is read once for four of the others. */                                                         \
    y_apart == 0 ? dots<T>(to, x, apart, y, 0, rows, count) : dots<T>(to, x, apart, y, y_apart, rows, count);          \
  }                                                                                                                    \
  VARIANTS void transposed(T* to, int64_t apart, const T* from, int64_t stride, int64_t rows, int64_t width) {         \
    turned<T>(to, apart, from, stride, rows, width);                                                                   \
  }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

}  // namespace kvtune
