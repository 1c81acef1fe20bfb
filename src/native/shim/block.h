// Some tokens of a chunk with all heads of a group, as dense matrices.
#pragma once
#include "shape.h"

#include <vector>

namespace kvtune {

template <class S> S* token_of(const at::Tensor& x, int64_t b, int64_t h, int64_t token) {
  return x.data_ptr<S>() + b * x.stride(0) + h * x.stride(1) + token * x.stride(2);
}

// Tokens [start, start + tokens) of a group's queries. Lane i · heads + r is token i's head r; the last lanes may be nobody's.
struct Block {
  const Shape& s;
  int64_t b, g, start, tokens;

  int64_t used() const { return tokens * s.per_group(); }
  int64_t lanes() const { return padded(used()); }
  int64_t end() const { return start + tokens; }

  // Calls `body(lane, head, token)` for each lane in use.
  template <class F> void each(F body) const {
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t r = 0; r < s.per_group(); ++r) body(i * s.per_group() + r, g * s.per_group() + r, start + i);
    }
  }

  // x (B, H, n, D) times a factor as (lanes, D).
  template <class S, class T> void gather(const at::Tensor& x, T factor, T* to) const {
    each([&](int64_t lane, int64_t h, int64_t token) {
      const S* from = token_of<S>(x, b, h, token);
      for (int64_t d = 0; d < s.width; ++d) to[lane * s.width + d] = static_cast<T>(from[d]) * factor;
    });
    std::fill(to + used() * s.width, to + lanes() * s.width, T(0));
  }

  // The way back, from (D, lanes) by way of `rows` (lanes, D), with a factor for each lane.
  template <class S, class T> void scatter(const T* from, const T* factors, T* rows, const at::Tensor& x) const {
    transposed(rows, s.width, from, lanes(), s.width, lanes());
    each([&](int64_t lane, int64_t h, int64_t token) {
      S* to = token_of<S>(x, b, h, token);
      for (int64_t d = 0; d < s.width; ++d) to[d] = static_cast<S>(rows[lane * s.width + d] * factors[lane]);
    });
  }

  // One number for each lane of x (B, H, n); 0 where a lane is nobody's.
  template <class T> std::vector<T> numbers(const at::Tensor& x, T factor) const {
    std::vector<T> to(lanes(), T(0));
    each([&](int64_t lane, int64_t h, int64_t token) { to[lane] = x.data_ptr<T>()[(b * s.heads + h) * s.tokens + token] * factor; });
    return to;
  }
};

// The memory of a task, handed out piece by piece.
template <class T> class Scratch {
 public:
  explicit Scratch(T* memory) : next_(memory) {}
  T* take(int64_t numbers) {
    T* taken = next_;
    next_ += numbers;
    return taken;
  }

 private:
  T* next_;
};

}  // namespace kvtune
