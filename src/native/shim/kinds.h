// The kinds of numbers that the CPU's kernels read and write: f32, f64 and bf16, which is computed in f32.
#pragma once
#include "powers.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <type_traits>

namespace kvtune {

// bf16 as it lies in memory.
using Half = uint16_t;

INLINE float wide(float x) { return x; }
INLINE double wide(double x) { return x; }
INLINE float wide(Half x) { return as<float>(static_cast<uint32_t>(x) << 16); }

// The value of an f16 by its bits.
INLINE float value_of_f16(uint16_t bits) {
  uint32_t whole = static_cast<uint32_t>(bits) << 16, twice = whole + whole;
  float normal = as<float>((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f, small = as<float>(twice >> 17 | 126u << 23) - 0.5f;
  return as<float>((whole & 0x80000000u) | as<uint32_t>(twice < 1u << 27 ? small : normal));
}

// In what a kind is computed.
template <class S> using Wide = decltype(wide(S()));

template <class S> struct Rounded {
  INLINE S of(S x) { return x; }
};
template <> struct Rounded<Half> {
  // To the nearest, of two equally near ones to the even one; what is no number stays none.
  INLINE Half of(float x) {
    uint32_t bits = as<uint32_t>(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<Half>(x != x ? 0x7fc0 : rounded);
  }
};

// The numbers of a tensor, which must be of this kind.
template <class S> S* data(const at::Tensor& x) {
  if constexpr (std::is_same_v<S, Half>) {
    return reinterpret_cast<Half*>(x.data_ptr<at::BFloat16>());
  } else {
    return x.data_ptr<S>();
  }
}

// For tensors of what is computed with `x`.
inline at::TensorOptions wide_options(const at::Tensor& x) {
  return x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

// A new tensor (B, heads, n, D) that lies as a projection does, (B, n, heads, D).
inline at::Tensor empty_by_token(at::IntArrayRef size, const at::Tensor& like) {
  return at::empty({size[0], size[2], size[1], size[3]}, like.options()).transpose(1, 2);
}

// Channels stand together; tokens, heads and rows may lie anywhere.
inline at::Tensor with_channels_together(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

}  // namespace kvtune

// Runs with S, the kind of the tensor's numbers.
#define BY_KIND(tensor, ...)                                                                                \
  do {                                                                                                      \
    if ((tensor).scalar_type() == at::kFloat) {                                                             \
      using S = float;                                                                                      \
      __VA_ARGS__;                                                                                          \
    } else if ((tensor).scalar_type() == at::kDouble) {                                                     \
      using S = double;                                                                                     \
      __VA_ARGS__;                                                                                          \
    } else {                                                                                                \
      TORCH_CHECK((tensor).scalar_type() == at::kBFloat16, "the CPU's kernels are for f32, f64 and bf16");   \
      using S = kvtune::Half;                                                                               \
      __VA_ARGS__;                                                                                          \
    }                                                                                                       \
  } while (false)
