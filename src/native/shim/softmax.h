// The softmax's part in attention, for a tile of scores: keys one below the other, and beside each other the queries, so that a vector
// unit works on several of them at once.
#pragma once
#include <cstdint>

namespace kvtune {

// `keys` rows of `lanes` scores each. A key is seen by the queries from `from` on, `lanes` if none does, up to and without `until`; null
// where all from the first on, or all up to the last, see all keys.
struct Tile {
  int64_t keys, lanes;
  const int64_t *from, *until;
};

#define FOR_KIND(T)                                                                                                \
  /* x becomes most · tanh(x / most). */                                                                           \
  void cap(T* x, T most, int64_t count);                                                                           \
  /* top becomes the largest score that a query has seen so far. */                                                \
  void raise(T* top, const T* x, Tile tile);                                                                       \
  /* x becomes 2^(x - top), 0 where it is not seen, and adds to each query's sum. */                               \
  void to_weights(T* x, T* sum, const T* top, Tile tile);                                                          \
  /* x becomes the weights 2^(x - lse), and dx, the gradient of the weights, becomes that of the scores before     \
     they were capped at `most`, or as they are where that is 0. */                                                \
  void to_score_gradient(T* x, T* dx, const T* lse, const T* delta, T most, Tile tile);                            \
  /* Adds to each key's number what all queries pay it: 2^(x - lse). */                                            \
  void add_mass(T* mass, const T* x, const T* lse, Tile tile);
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

}  // namespace kvtune
