// What a layer does number by number between its products, on the CPU: root-mean-square norms, gates and rotations, each in one pass
// over its inputs, and their backward from these inputs alone.
//
// Numbers of 16 bits are widened in the loop, computed with in f32, and rounded once where they are written. What is computed for a
// row or a number does not depend on how many threads share them out.
#include "guarded.h"
#include "kinds.h"
#include "tasks.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace kvtune {
namespace {

// Rows of `width` numbers: y = weight · x / sqrt(mean(x²) + eps), x over the root being rounded before the product.
template <class S> INLINE void normed_rows(const S* x, const S* weight, S* y, Wide<S>* rstd, int64_t rows, int64_t width, Wide<S> eps) {
  using T = Wide<S>;
  for (int64_t r = 0; r < rows; ++r, x += width, y += width) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += wide(x[i]) * wide(x[i]);
    T factor = T(1) / std::sqrt(sum / static_cast<T>(width) + eps);
    rstd[r] = factor;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) y[i] = Rounded<S>::of(wide(Rounded<S>::of(wide(x[i]) * factor)) * wide(weight[i]));
  }
}

// dx = (g − x̂ · mean(g · x̂)) / rms with g = dy · weight and x̂ = x / rms; either of dx and dweight may be null. Adds to dweight.
template <class S>
INLINE void normed_rows_back(const S* dy, const S* x, const S* weight, const Wide<S>* rstd, S* dx, Wide<S>* dweight, int64_t rows,
                             int64_t width) {
  using T = Wide<S>;
  for (int64_t r = 0; r < rows; ++r, x += width, dy += width) {
    T factor = rstd[r];
    if (dx != nullptr) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < width; ++i) sum += wide(dy[i]) * wide(weight[i]) * wide(x[i]);
      T shift = sum * factor / static_cast<T>(width) * factor;
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) dx[i] = Rounded<S>::of((wide(dy[i]) * wide(weight[i]) - wide(x[i]) * shift) * factor);
      dx += width;
    }
    if (dweight != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) dweight[i] += wide(dy[i]) * wide(Rounded<S>::of(wide(x[i]) * factor));
    }
  }
}

// 1 / (1 + e^-x), and what it lacks of 1, both without cancellation.
template <class T> struct Sigmoid {
  T open, closed;
  INLINE Sigmoid of(T x) {
    T power = exponential(x < T(0) ? x : -x), most = T(1) / (T(1) + power), least = power * most;
    return x < T(0) ? Sigmoid{least, most} : Sigmoid{most, least};
  }
};

// y = silu(gate) · up, the former being rounded before the product.
template <class S> INLINE void gated(const S* gate, const S* up, S* y, int64_t n) {
  using T = Wide<S>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    T x = wide(gate[i]);
    y[i] = Rounded<S>::of(wide(Rounded<S>::of(x * Sigmoid<T>::of(x).open)) * wide(up[i]));
  }
}

template <class S> INLINE void gated_back(const S* dy, const S* gate, const S* up, S* dgate, S* dup, int64_t n) {
  using T = Wide<S>;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    T x = wide(gate[i]), d = wide(dy[i]);
    Sigmoid<T> sigmoid = Sigmoid<T>::of(x);
    dgate[i] = Rounded<S>::of(d * wide(up[i]) * (sigmoid.open * (T(1) + x * sigmoid.closed)));
    dup[i] = Rounded<S>::of(d * (x * sigmoid.open));
  }
}

// Where the channels of a head of a token lie, in numbers: they stand together.
struct Lies {
  int64_t head, token;
};

// Turns the pairs of channel i and channel half + i of all heads of some tokens.
template <class S>
INLINE void turned(const S* x, Lies from, const S* cos, const S* sin, S* y, Lies to, int64_t tokens, int64_t heads, int64_t half,
                   bool back) {
  using T = Wide<S>;
  T sign = back ? T(-1) : T(1);
  for (int64_t t = 0; t < tokens; ++t, cos += half, sin += half) {
    for (int64_t h = 0; h < heads; ++h) {
      const S *low = x + t * from.token + h * from.head, *high = low + half;
      S *new_low = y + t * to.token + h * to.head, *new_high = new_low + half;
#pragma omp simd
      for (int64_t i = 0; i < half; ++i) {
        T a = wide(low[i]), b = wide(high[i]), c = wide(cos[i]), s = sign * wide(sin[i]);
        new_low[i] = Rounded<S>::of(a * c - b * s);
        new_high[i] = Rounded<S>::of(b * c + a * s);
      }
    }
  }
}

#define FOR_KIND(S)                                                                                                                  \
  VARIANTS void norm_rows(const S* x, const S* weight, S* y, Wide<S>* rstd, int64_t rows, int64_t width, Wide<S> eps) {              \
    normed_rows<S>(x, weight, y, rstd, rows, width, eps);                                                                            \
  }                                                                                                                                  \
  VARIANTS void norm_rows_back(const S* dy, const S* x, const S* weight, const Wide<S>* rstd, S* dx, Wide<S>* dweight, int64_t rows, \
                               int64_t width) {                                                                                      \
    normed_rows_back<S>(dy, x, weight, rstd, dx, dweight, rows, width);                                                              \
  }                                                                                                                                  \
  VARIANTS void gate_range(const S* gate, const S* up, S* y, int64_t n) { gated<S>(gate, up, y, n); }                                \
  VARIANTS void gate_range_back(const S* dy, const S* gate, const S* up, S* dgate, S* dup, int64_t n) {                              \
    gated_back<S>(dy, gate, up, dgate, dup, n);                                                                                      \
  }                                                                                                                                  \
  VARIANTS void turn_tokens(const S* x, Lies from, const S* cos, const S* sin, S* y, Lies to, int64_t tokens, int64_t heads,         \
                            int64_t half, bool back) {                                                                               \
    turned<S>(x, from, cos, sin, y, to, tokens, heads, half, back);                                                                  \
  }
FOR_KIND(float)
FOR_KIND(double)
FOR_KIND(Half)
#undef FOR_KIND

// Rows of a block whose part of a weight's gradient is summed up alone, whatever the number of threads.
constexpr int64_t ROWS_OF_BLOCK = 64;

at::Tensor like(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

void check_alike(const at::Tensor& x, const at::Tensor& other) {
  bool fits = other.is_cpu() && x.is_cpu() && other.scalar_type() == x.scalar_type() && other.sizes() == x.sizes();
  TORCH_CHECK(fits, "a tensor of size ", other.sizes(), " and kind ", other.scalar_type(), " does not fit one of size ", x.sizes(),
              " and kind ", x.scalar_type());
}

struct Rows {
  int64_t count, width;
};

Rows check_rows(const at::Tensor& x, const at::Tensor& weight) {
  bool is_alike = x.is_cpu() && weight.is_cpu() && weight.scalar_type() == x.scalar_type();
  bool fits = x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(-1);
  TORCH_CHECK(is_alike && fits, "a norm's weight of size ", weight.sizes(), " does not fit rows of size ", x.sizes());
  int64_t width = x.size(-1);
  return {width > 0 ? x.numel() / width : 0, width};
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

int kvtune_rms_norm(at::Tensor* x, at::Tensor* weight, double eps, at::Tensor** results) {
  return giving(results, [&] {
    const Rows rows = check_rows(*x, *weight);
    at::Tensor from = x->contiguous(), factors = weight->contiguous(), out = like(from);
    std::vector<int64_t> size = x->sizes().vec();
    size.back() = 1;
    at::Tensor rstd = at::empty(size, wide_options(from));
    BY_KIND(from, share_out_ranges(rows.count, grain(rows.width), [&](int64_t begin, int64_t end) {
      int64_t at = begin * rows.width;
      norm_rows(data<S>(from) + at, data<S>(factors), data<S>(out) + at, data<Wide<S>>(rstd) + begin, end - begin, rows.width,
                static_cast<Wide<S>>(eps));
    }));
    return Tensors{out, rstd};
  });
}

int kvtune_rms_norm_backward(at::Tensor* dout, at::Tensor* x, at::Tensor* weight, at::Tensor* rstd, const bool* needs, at::Tensor** results) {
  return giving(results, [&] {
    bool needs_x = needs[0], needs_weight = needs[1];
    const Rows rows = check_rows(*x, *weight);
    int64_t blocks = at::ceil_div(rows.count, ROWS_OF_BLOCK);
    check_alike(*x, *dout);
    bool fits = rstd->numel() == rows.count && rstd->dtype() == wide_options(*x).dtype();
    TORCH_CHECK(fits, "roots of size ", rstd->sizes(), " do not fit rows of size ", x->sizes());
    at::Tensor d = dout->contiguous(), from = x->contiguous(), factors = weight->contiguous(), roots = rstd->contiguous(), dx, dweight, parts;
    if (needs_x) dx = like(from);
    if (needs_weight) parts = at::zeros({std::max<int64_t>(1, blocks), rows.width}, wide_options(from));
    BY_KIND(from, {
      share_out_ranges(blocks, grain(ROWS_OF_BLOCK * rows.width), [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          int64_t row = block * ROWS_OF_BLOCK, at = row * rows.width;
          norm_rows_back(data<S>(d) + at, data<S>(from) + at, data<S>(factors), data<Wide<S>>(roots) + row,
                         needs_x ? data<S>(dx) + at : nullptr, needs_weight ? data<Wide<S>>(parts) + block * rows.width : nullptr,
                         std::min(ROWS_OF_BLOCK, rows.count - row), rows.width);
        }
      });
      if (needs_weight) {
        dweight = like(factors);
        Wide<S>* sums = data<Wide<S>>(parts);
        for (int64_t block = 1; block < blocks; ++block) {
          for (int64_t i = 0; i < rows.width; ++i) sums[i] += sums[block * rows.width + i];
        }
        for (int64_t i = 0; i < rows.width; ++i) data<S>(dweight)[i] = Rounded<S>::of(sums[i]);
      }
    });
    return Tensors{dx, dweight};
  });
}

int kvtune_swiglu(at::Tensor* gate, at::Tensor* up, at::Tensor** result) {
  return giving(result, [&] {
    check_alike(*gate, *up);
    at::Tensor g = gate->contiguous(), u = up->contiguous(), out = like(g);
    BY_KIND(g, share_out_ranges(g.numel(), grain(1), [&](int64_t begin, int64_t end) {
      gate_range(data<S>(g) + begin, data<S>(u) + begin, data<S>(out) + begin, end - begin);
    }));
    return Tensors{out};
  });
}

int kvtune_swiglu_backward(at::Tensor* dout, at::Tensor* gate, at::Tensor* up, at::Tensor** results) {
  return giving(results, [&] {
    check_alike(*gate, *up);
    check_alike(*gate, *dout);
    at::Tensor d = dout->contiguous(), g = gate->contiguous(), u = up->contiguous(), dgate = like(g), dup = like(g);
    BY_KIND(g, share_out_ranges(g.numel(), grain(1), [&](int64_t begin, int64_t end) {
      gate_range_back(data<S>(d) + begin, data<S>(g) + begin, data<S>(u) + begin, data<S>(dgate) + begin, data<S>(dup) + begin,
                      end - begin);
    }));
    return Tensors{dgate, dup};
  });
}

int kvtune_rotate(at::Tensor* x, at::Tensor* cos, at::Tensor* sin, int back, at::Tensor** result) {
  return giving(result, [&] {
    bool has_pairs = x->dim() == 4 && x->size(3) % 2 == 0;
    TORCH_CHECK(has_pairs, "a rotation is of tensors of rows, heads, tokens and an even number of channels, not of size ", x->sizes());
    int64_t batch = x->size(0), heads = x->size(1), tokens = x->size(2), width = x->size(3), half = width / 2;
    TORCH_CHECK(cos->dim() == 4, "cosines are of rows, one head, tokens and half the channels, not of size ", cos->sizes());
    bool is_shared = cos->size(0) == 1;
    bool fits = cos->numel() == (is_shared ? 1 : batch) * tokens * half && cos->size(3) == half && cos->scalar_type() == x->scalar_type();
    TORCH_CHECK(x->is_cpu() && fits, "cosines of size ", cos->sizes(), " do not fit heads of size ", x->sizes());
    check_alike(*cos, *sin);
    at::Tensor from = with_channels_together(*x), c = cos->contiguous(), s = sin->contiguous();
    at::Tensor out = back ? empty_by_token(x->sizes(), *x) : like(*x);
    Lies source{from.stride(1), from.stride(2)}, target{out.stride(1), out.stride(2)};
    BY_KIND(from, share_out_ranges(batch * tokens, grain(heads * width), [&](int64_t begin, int64_t end) {
      for (int64_t at = begin; at < end;) {
        // As many tokens as there are of one row.
        int64_t b = at / tokens, t = at % tokens, count = std::min(end - at, tokens - t);
        int64_t angle = ((is_shared ? 0 : b * tokens) + t) * half;
        turn_tokens(data<S>(from) + b * from.stride(0) + t * source.token, source, data<S>(c) + angle, data<S>(s) + angle,
                    data<S>(out) + b * out.stride(0) + t * target.token, target, count, heads, half, back != 0);
        at += count;
      }
    }));
    return Tensors{out};
  });
}

}  // extern "C"
