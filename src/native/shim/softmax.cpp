#include "softmax.h"

#include "powers.h"

#include <algorithm>

namespace kvtune {
namespace {

INLINE int64_t first_of(Tile tile, int64_t key) { return tile.from == nullptr ? 0 : tile.from[key]; }
// Never before the first.
INLINE int64_t end_of(Tile tile, int64_t key) {
  return tile.until == nullptr ? tile.lanes : std::max(first_of(tile, key), tile.until[key]);
}

// Calls `body(key, first, end)` with the queries that see each key. Most tiles are seen as a whole, and are asked nothing key by key.
template <class F> INLINE void each_key(Tile tile, F body) {
  if (tile.from == nullptr && tile.until == nullptr) {
    for (int64_t key = 0; key < tile.keys; ++key) body(key, int64_t(0), tile.lanes);
    return;
  }
  for (int64_t key = 0; key < tile.keys; ++key) body(key, first_of(tile, key), end_of(tile, key));
}

#define BODY __attribute__((always_inline))

// What is not seen becomes 0. Not called for nothing: these rows are short.
template <class T> INLINE void clear(T* x, int64_t first, int64_t end, int64_t lanes) {
  if (first > 0) std::fill(x, x + first, T(0));
  if (end < lanes) std::fill(x + end, x + lanes, T(0));
}

template <class T> INLINE void capped(T* x, T most, int64_t count) {
  T share = T(1) / most;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] = most * hyperbolic_tangent(x[i] * share);
}

template <class T> INLINE T larger(T a, T b) { return a > b ? a : b; }

template <class T> INLINE void raised(T* top, const T* all, Tile tile) {
  int64_t lanes = tile.lanes, done = 0;
  if (tile.from == nullptr && tile.until == nullptr) {
    // Four keys at a time: their queries' largest scores are read and written once for all of them.
    for (; done + 4 <= tile.keys; done += 4) {
      const T* x = all + done * lanes;
#pragma omp simd
      for (int64_t i = 0; i < lanes; ++i) {
        T most = larger(larger(x[i], x[lanes + i]), larger(x[2 * lanes + i], x[3 * lanes + i]));
        top[i] = larger(most, top[i]);
      }
    }
  }
  for (int64_t key = done; key < tile.keys; ++key) {
    const T* x = all + key * lanes;
    int64_t first = first_of(tile, key), end = end_of(tile, key);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) top[i] = larger(x[i], top[i]);
  }
}

template <class T> INLINE void weights(T* all, T* sum, const T* top, Tile tile) {
  each_key(tile, [=](int64_t key, int64_t first, int64_t end) BODY {
    T* x = all + key * tile.lanes;
    clear(x, first, end, tile.lanes);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) {
      T w = power(x[i] - top[i]);
      x[i] = w;
      sum[i] += w;
    }
  });
}

// Where nothing is capped the factor costs nothing. A loop of its own: in `each_key` compilers make a slower one of these two rows.
template <bool IS_CAPPED, class T>
INLINE void score_gradient(T* x, T* dx, const T* lse, const T* delta, T most, Tile tile) {
  T per_most = IS_CAPPED ? T(1) / most : T(0);
  for (int64_t key = 0; key < tile.keys; ++key, x += tile.lanes, dx += tile.lanes) {
    int64_t first = first_of(tile, key), end = end_of(tile, key);
    clear(x, first, end, tile.lanes);
    clear(dx, first, end, tile.lanes);
#pragma omp simd
    for (int64_t i = first; i < end; ++i) {
      T w = power(x[i] - lse[i]), share = x[i] * per_most;
      x[i] = w;
      dx[i] = w * (dx[i] - delta[i]);
      if constexpr (IS_CAPPED) dx[i] *= 1 - share * share;
    }
  }
}

template <class T> INLINE void payments(T* mass, const T* all, const T* lse, Tile tile) {
  each_key(tile, [=](int64_t key, int64_t first, int64_t end) BODY {
    const T* x = all + key * tile.lanes;
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < end; ++i) sum += power(x[i] - lse[i]);
    mass[key] += sum;
  });
}

}  // namespace

#define FOR_KIND(T)                                                                                                                  \
  VARIANTS void cap(T* x, T most, int64_t count) { capped<T>(x, most, count); }                                                      \
  VARIANTS void raise(T* top, const T* x, Tile tile) { raised<T>(top, x, tile); }                                                    \
  VARIANTS void to_weights(T* x, T* sum, const T* top, Tile tile) { weights<T>(x, sum, top, tile); }                                 \
  VARIANTS void to_score_gradient(T* x, T* dx, const T* lse, const T* delta, T most, Tile tile) {                                    \
    most > 0 ? score_gradient<true>(x, dx, lse, delta, most, tile) : score_gradient<false>(x, dx, lse, delta, most, tile);           \
  }                                                                                                                                  \
  VARIANTS void add_mass(T* mass, const T* x, const T* lse, Tile tile) { payments<T>(mass, x, lse, tile); }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

}  // namespace kvtune
