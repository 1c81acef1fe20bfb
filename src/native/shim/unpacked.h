// What is done with numbers of packed weights once they are f32. Who includes it is compiled without fused products.
#pragma once
#include "kinds.h"
#include "tasks.h"

#include <vector>

namespace kvtune {
namespace {

// Numbers that stay in the nearest cache until they are rounded.
constexpr int64_t NUMBERS_AT_ONCE = 1024;

VARIANTS void convert(const float* from, int64_t count, float* to) { std::memcpy(to, from, count * sizeof *to); }

VARIANTS void convert(const float* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

VARIANTS void convert(const float* from, int64_t count, Half* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = Rounded<Half>::of(from[i]);
}

// What each of `count` vectors gives with one.
VARIANTS void dots(const float* one, const float* x, int64_t width, int64_t count, float* to, int64_t stride) {
  for (int64_t row = 0; row < count; ++row, x += width, to += stride) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += one[i] * x[i];
    *to = sum;
  }
}

// x (n, width) of f32 with few rows, and packed ones, of which `unpack(row, numbers)` makes one: the product (n, rows). No more than a row is
// unpacked at a time.
template <class F> at::Tensor product_of_rows(const at::Tensor& x, int64_t rows, int64_t width, F unpack) {
  TORCH_CHECK(width > 0 && x.dim() == 2 && x.size(1) == width, "a product of ", x.sizes(), " with packed rows of ", width);
  int64_t count = x.size(0);
  at::Tensor vectors = x.contiguous(), out = at::empty({count, rows}, x.options());
  const float* data = vectors.data_ptr<float>();
  float* to = out.data_ptr<float>();
  share_out_ranges(rows, grain(width), [&](int64_t begin, int64_t end) {
    std::vector<float> whole(width);
    for (int64_t row = begin; row < end; ++row) {
      unpack(row, whole.data());
      dots(whole.data(), data, width, count, to + row, rows);
    }
  });
  return out;
}

}  // namespace
}  // namespace kvtune
