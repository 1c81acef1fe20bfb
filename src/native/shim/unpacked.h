// What is done with numbers of packed weights once they are f32. Who includes it is compiled without fused products.
#pragma once
#include "kinds.h"

namespace kvtune {
namespace {

// Numbers that stay in the nearest cache until they are rounded.
constexpr int64_t NUMBERS_AT_ONCE = 1024;
// Numbers below which another thread is not worth waking.
constexpr int64_t LEAST_NUMBERS = 1 << 15;

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

}  // namespace
}  // namespace kvtune
