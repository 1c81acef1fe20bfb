// Numbers side by side in one vector, which compilers cut to what the CPU has.
#pragma once
#include "powers.h"

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

}  // namespace kvtune
