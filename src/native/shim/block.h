// Some tokens of a chunk with all heads of a group, as dense matrices.
#pragma once
#include "shape.h"
#include "rows.h"

#include <vector>

namespace kvtune {

template <class S> S* token_of(const at::Tensor& x, int64_t b, int64_t h, int64_t token) {
  return data<S>(x) + b * x.stride(0) + h * x.stride(1) + token * x.stride(2);
}

// Tokens [start, start + tokens) of a group's queries. Lane i · heads + r is token i's head r; the last lanes may be nobody's.
struct Block {
  const Shape& s;
  Head head;
  int64_t start, tokens;

  // The n-th of a head's blocks.
  static Block of(const Shape& s, const Blocks& blocks, Head head, int64_t n) {
    int64_t start = blocks.first + n * blocks.tokens;
    return {s, head, start, std::min(blocks.tokens, s.tokens - start)};
  }

  int64_t used() const { return tokens * s.per_group(); }
  int64_t lanes() const { return padded(used()); }
  int64_t end() const { return start + tokens; }

  // Calls `body(lane, head, token)` for each lane in use.
  template <class F> void each(F body) const {
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t r = 0; r < s.per_group(); ++r) body(i * s.per_group() + r, head.g * s.per_group() + r, start + i);
    }
  }

  // x (B, H, n, D) times a factor as (lanes, D).
  template <class S> void gather(const at::Tensor& x, Wide<S> factor, Wide<S>* to) const {
    each([&](int64_t lane, int64_t h, int64_t token) {
      const S* from = token_of<S>(x, head.b, h, token);
      for (int64_t d = 0; d < s.width; ++d) to[lane * s.width + d] = wide(from[d]) * factor;
    });
    std::fill(to + used() * s.width, to + lanes() * s.width, Wide<S>(0));
  }

  // The same, and as (D, lanes).
  template <class S> void gather_both(const at::Tensor& x, Wide<S> factor, Wide<S>* to, Wide<S>* to_t) const {
    gather<S>(x, factor, to);
    transposed(to_t, lanes(), to, s.width, lanes(), s.width);
  }

  // Queries so that their scores are of powers of 2.
  template <class S> void gather_queries(const at::Tensor& q, double scale, Wide<S>* to, Wide<S>* to_t) const {
    gather_both<S>(q, static_cast<Wide<S>>(scale * LOG2_E), to, to_t);
  }

  // The way back, from (D, lanes) by way of `rows` (lanes, D), with a factor for each lane.
  template <class S> void scatter(const Wide<S>* from, const Wide<S>* factors, Wide<S>* rows, const at::Tensor& x) const {
    transposed(rows, s.width, from, lanes(), s.width, lanes());
    each([&](int64_t lane, int64_t h, int64_t token) {
      S* to = token_of<S>(x, head.b, h, token);
      for (int64_t d = 0; d < s.width; ++d) to[d] = Rounded<S>::of(rows[lane * s.width + d] * factors[lane]);
    });
  }

  // The log-sum-exp (B, H, n) of each lane, for powers of 2; 0 where a lane is nobody's.
  template <class T> std::vector<T> binary_lse(const at::Tensor& lse) const {
    std::vector<T> to(lanes(), T(0));
    each([&](int64_t lane, int64_t h, int64_t token) { to[lane] = number_of<T>(lse, h, token) * static_cast<T>(LOG2_E); });
    return to;
  }

  // A query's number in x (B, H, n), which is dense.
  template <class T> T& number_of(const at::Tensor& x, int64_t h, int64_t token) const {
    return data<T>(x)[(head.b * s.heads + h) * s.tokens + token];
  }
};

}  // namespace kvtune
