// Vectors in few bits, as src/store/vectors.rs has them: a minimum and a scale of 16 bits, and levels, in one pass each way.
// Compiled at run time for a kind (KVTUNE_KIND: 0 for f32, 1 for bf16, 2 for f16) and bits of a level (KVTUNE_BITS: 4, 5, 8 or 9).
//
// A warp has a vector of up to 256 values, each lane every 32nd. Every operation rounds as libtorch's does on a GPU, one by one and in
// f32, so that the bits are the same: no product is fused with a sum, and what is divided by a number of the host is multiplied with its
// reciprocal. (On the CPU libtorch divides, which may give a scale its neighbour.) What bounds it is memory: a value is read once,
// and its level is written.

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int VECTORS = THREADS / LANES;
constexpr int WIDEST = 256;
constexpr int EACH = WIDEST / LANES;
constexpr int BITS = KVTUNE_BITS;
constexpr int STEPS = (1 << BITS) - 1;
// Of a level with an odd number of bits the last stands apart.
constexpr bool HAS_LAST = BITS % 2 == 1;
constexpr int UPPER_BITS = BITS / 2 * 2;

#if KVTUNE_KIND == 0
using Value = float;
#else
using Value = unsigned short;
#endif

#ifndef KVTUNE_EMULATED

__device__ __forceinline__ float of_f16(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ unsigned short to_f16(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

#endif

__device__ __forceinline__ float of_bf16(unsigned short bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

// To the nearest, of two as near to the even one; what is not a number stays none.
__device__ __forceinline__ unsigned short to_bf16(float x) {
  unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ __forceinline__ float of_value(float x) { return x; }
__device__ __forceinline__ void put(float* to, float x) { *to = x; }

#if KVTUNE_KIND == 1
__device__ __forceinline__ float of_value(unsigned short bits) { return of_bf16(bits); }
__device__ __forceinline__ void put(unsigned short* to, float x) { *to = to_bf16(x); }
#else
__device__ __forceinline__ float of_value(unsigned short bits) { return of_f16(bits); }
__device__ __forceinline__ void put(unsigned short* to, float x) { *to = to_f16(x); }
#endif

struct Quantise {
  const Value* x;         // (N, width), contiguous
  unsigned char* level;   // (N, level_bytes)
  unsigned short* range;  // (N, 2): minimum and scale
  long long vectors;
  int width, level_bytes;
};
static_assert(sizeof(Quantise) == 40, "as whoever launches it has it");

struct Restore {
  Value* x;                     // (N, width), contiguous
  const unsigned char* level;   // (N, level_bytes)
  const unsigned short* range;  // (N, 2)
  long long vectors;
  int width, level_bytes;
};
static_assert(sizeof(Restore) == 40, "as whoever launches it has it");

// What rounding to 16 bits can cost, relative and near zero, with a hundredth more for the arithmetic's own rounding.
struct Narrowed {
  float relative, absolute;
};
__device__ constexpr Narrowed F16 = {static_cast<float>(1.0 / 2048.0 * 1.01), static_cast<float>(1.0 / (1 << 25) * 1.01)};
__device__ constexpr Narrowed BF16 = {static_cast<float>(1.0 / 256.0 * 1.01), static_cast<float>(1e-37 * 1.01)};
__device__ constexpr float F16_ABOVE = static_cast<float>(1.0 + 1.0 / 2048.0 * 1.01);
__device__ constexpr float BF16_ABOVE = static_cast<float>(1.0 + 1.0 / 256.0 * 1.01);
constexpr float F16_LIMIT = 60000.0f;

// Minimum and scale, and their bits; a scale with a sign says that both are bf16.
struct Range {
  float low, scale;
  unsigned short low_bits, scale_bits;
};

__device__ __forceinline__ Range covering(float minimum, float maximum) {
  constexpr float PER_STEP = 1.0f / static_cast<float>(STEPS);
  Range range;
  if (fabsf(minimum) > F16_LIMIT || maximum - minimum > F16_LIMIT * static_cast<float>(STEPS)) {
    range.low_bits = to_bf16(minimum - __fmul_rn(fabsf(minimum), BF16.relative) - BF16.absolute);
    range.low = of_bf16(range.low_bits);
    unsigned short scale = to_bf16(__fmul_rn((maximum - range.low) * PER_STEP, BF16_ABOVE) + BF16.absolute);
    range.scale = of_bf16(scale);
    range.scale_bits = scale | 0x8000u;
  } else {
    range.low_bits = to_f16(minimum - __fmul_rn(fabsf(minimum), F16.relative) - F16.absolute);
    range.low = of_f16(range.low_bits);
    range.scale_bits = to_f16(__fmul_rn((maximum - range.low) * PER_STEP, F16_ABOVE) + F16.absolute);
    range.scale = of_f16(range.scale_bits);
  }
  return range;
}

// So many values share a byte, those of a vector's first part in its upper bits; what is missing in the last part is 0.
__device__ __forceinline__ int part_of(int width, int parts) { return (width + parts - 1) / parts; }

extern "C" __global__ void __launch_bounds__(THREADS) quantise(const Quantise p) {
  __shared__ unsigned short levels[VECTORS][WIDEST];
  int lane = threadIdx.x % LANES, own = threadIdx.x / LANES;
  long long vector = static_cast<long long>(blockIdx.x) * VECTORS + own;
  bool is_there = vector < p.vectors;
  const Value* x = p.x + (is_there ? vector : 0) * p.width;

  // The first value where a lane has none: it changes neither minimum nor maximum.
  float value[EACH];
  float minimum = of_value(__ldg(x)), maximum = minimum;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (i * LANES >= p.width) break;
    int at = i * LANES + lane;
    value[i] = of_value(__ldg(x + (at < p.width ? at : 0)));
    minimum = fminf(minimum, value[i]);
    maximum = fmaxf(maximum, value[i]);
  }
#pragma unroll
  for (int mask = LANES / 2; mask > 0; mask /= 2) {
    minimum = fminf(minimum, __shfl_xor_sync(0xffffffffu, minimum, mask));
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, mask));
  }

  Range range = covering(minimum, maximum);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (i * LANES >= p.width) break;
    float level = fminf(fmaxf(rintf((value[i] - range.low) / range.scale), 0.0f), static_cast<float>(STEPS));
    levels[own][i * LANES + lane] = static_cast<unsigned short>(level);
  }
  __syncthreads();
  if (!is_there) return;

  if (lane == 0) {
    p.range[vector * 2] = range.low_bits;
    p.range[vector * 2 + 1] = range.scale_bits;
  }
  const unsigned short* mine = levels[own];
  unsigned char* out = p.level + vector * p.level_bytes;
  int half = part_of(p.width, 2);
  int upper_bytes = UPPER_BITS == 8 ? p.width : half;
  for (int at = lane; at < upper_bytes; at += LANES) {
    unsigned first = mine[at] >> (HAS_LAST ? 1 : 0);
    if (UPPER_BITS == 4) {
      unsigned second = at + half < p.width ? mine[at + half] >> (HAS_LAST ? 1 : 0) : 0u;
      first = first << 4 | second;
    }
    out[at] = static_cast<unsigned char>(first);
  }
  if constexpr (HAS_LAST) {
    for (int at = lane; at < part_of(p.width, 8); at += LANES) {
      unsigned bits = 0;
      for (int part = 0; part < 8; ++part) {
        int from = part * part_of(p.width, 8) + at;
        bits = bits << 1 | (from < p.width ? mine[from] & 1u : 0u);
      }
      out[upper_bytes + at] = static_cast<unsigned char>(bits);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) restore(const Restore p) {
  int lane = threadIdx.x % LANES;
  long long vector = static_cast<long long>(blockIdx.x) * VECTORS + threadIdx.x / LANES;
  if (vector >= p.vectors) return;
  const unsigned char* bytes = p.level + vector * p.level_bytes;
  unsigned short low_bits = __ldg(p.range + vector * 2), scale_bits = __ldg(p.range + vector * 2 + 1);
  bool is_wide = (scale_bits & 0x8000u) != 0;
  unsigned short magnitude = scale_bits & 0x7fffu;
  float low = is_wide ? of_bf16(low_bits) : of_f16(low_bits);
  float scale = is_wide ? of_bf16(magnitude) : of_f16(magnitude);
  int half = part_of(p.width, 2), eighth = part_of(p.width, 8);
  int upper_bytes = UPPER_BITS == 8 ? p.width : half;
  for (int at = lane; at < p.width; at += LANES) {
    unsigned level;
    if (UPPER_BITS == 8) {
      level = __ldg(bytes + at);
    } else {
      level = at < half ? __ldg(bytes + at) >> 4 : __ldg(bytes + (at - half)) & 15u;
    }
    if (HAS_LAST) level = level << 1 | (__ldg(bytes + (upper_bytes + at % eighth)) >> (7 - at / eighth) & 1u);
    put(p.x + (vector * p.width + at), __fmul_rn(static_cast<float>(level), scale) + low);
  }
}
