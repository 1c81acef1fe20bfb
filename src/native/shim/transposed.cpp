#include "transposed.h"

#include "vectors.h"

namespace kvtune {
namespace {

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

#define FOR_KIND(T)                                                                                               \
  VARIANTS void transposed(T* to, int64_t apart, const T* from, int64_t stride, int64_t rows, int64_t width) {    \
    turned<T>(to, apart, from, stride, rows, width);                                                              \
  }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

}  // namespace kvtune
