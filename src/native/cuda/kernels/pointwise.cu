// Norms, gates and rotations with their backwards, one pass each over tensors of bf16 or f16 (KVTUNE_F16: 1 for f16, 0 for bf16), with
// the arithmetic in f32 and a rounding where the published models round; a rotation rounds once. Compiled at run time; NVRTC has no
// headers, so none is used.
//
// All are bound by memory: each number is read once and written once, 16 bytes at a time. A row of a norm stays in registers between
// the sum of its squares and its use, up to 8192 numbers.

using Narrow = unsigned short;

#ifndef KVTUNE_EMULATED

__device__ __forceinline__ float wide(Narrow x) {
#if KVTUNE_F16
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
#else
  return __uint_as_float(static_cast<unsigned>(x) << 16);
#endif
}

// To the nearest, of two equally near ones to the even one.
__device__ __forceinline__ Narrow narrow(float x) {
  Narrow y;
#if KVTUNE_F16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#endif
  return y;
}

#endif

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
// Pieces of a row that a thread keeps.
constexpr int KEPT = 4;

struct alignas(16) Eight {
  Narrow at[8];
};

// Eight numbers at a multiple of 16 bytes.
__device__ __forceinline__ Eight load(const Narrow* from, long long piece) {
  uint4 words = __ldg(reinterpret_cast<const uint4*>(from) + piece);
  return reinterpret_cast<const Eight&>(words);
}

__device__ __forceinline__ void store(Narrow* to, long long piece, const Eight& numbers) { reinterpret_cast<Eight*>(to)[piece] = numbers; }

// The sum over a block, in the same order each time, for all its threads.
__device__ __forceinline__ float sum_of_block(float mine, float* of_warp) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, mask);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < WARPS; ++warp) sum += of_warp[warp];
  return sum;
}

// Rows (rows, width), contiguous; width is a multiple of 8.
struct Norm {
  const Narrow* x;
  const Narrow* weight;  // (width)
  const Narrow* dy;      // of the backward
  float* rstd;           // (rows): one over the root of each row; written forward, read backward
  Narrow* out;           // y, or dx
  int width;
  float eps;
};
static_assert(sizeof(Norm) == 48, "as whoever launches it has it");

__device__ __forceinline__ float squares(const Eight& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += wide(x.at[i]) * wide(x.at[i]);
  return sum;
}

__device__ __forceinline__ Eight normed(const Eight& x, const Eight& weight, float factor) {
  Eight y;
#pragma unroll
  for (int i = 0; i < 8; ++i) y.at[i] = narrow(wide(narrow(wide(x.at[i]) * factor)) * wide(weight.at[i]));
  return y;
}

// y = weight · x / sqrt(mean(x²) + eps); one block a row.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rows(const Norm p) {
  __shared__ float of_warp[WARPS];
  int pieces = p.width / 8, mine = threadIdx.x;
  const Narrow* x = p.x + static_cast<long long>(blockIdx.x) * p.width;
  Narrow* y = p.out + static_cast<long long>(blockIdx.x) * p.width;
  Eight kept[KEPT] = {};
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < KEPT; ++turn) {
    if (mine + turn * THREADS < pieces) kept[turn] = load(x, mine + turn * THREADS);
    sum += squares(kept[turn]);
  }
  for (int piece = mine + KEPT * THREADS; piece < pieces; piece += THREADS) sum += squares(load(x, piece));
  float factor = 1.0f / sqrtf(sum_of_block(sum, of_warp) / static_cast<float>(p.width) + p.eps);
  if (threadIdx.x == 0) p.rstd[blockIdx.x] = factor;
#pragma unroll
  for (int turn = 0; turn < KEPT; ++turn) {
    int piece = mine + turn * THREADS;
    if (piece < pieces) store(y, piece, normed(kept[turn], load(p.weight, piece), factor));
  }
  for (int piece = mine + KEPT * THREADS; piece < pieces; piece += THREADS) store(y, piece, normed(load(x, piece), load(p.weight, piece), factor));
}

__device__ __forceinline__ float along(const Eight& dy, const Eight& weight, const Eight& x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += wide(dy.at[i]) * wide(weight.at[i]) * wide(x.at[i]);
  return sum;
}

__device__ __forceinline__ Eight turned_back(const Eight& dy, const Eight& weight, const Eight& x, float factor, float shift) {
  Eight dx;
#pragma unroll
  for (int i = 0; i < 8; ++i) dx.at[i] = narrow((wide(dy.at[i]) * wide(weight.at[i]) - wide(x.at[i]) * shift) * factor);
  return dx;
}

// dx = (g − x̂ · mean(g · x̂)) · rstd with g = dy · weight and x̂ = x · rstd; one block a row.
extern "C" __global__ void __launch_bounds__(THREADS) norm_rows_back(const Norm p) {
  __shared__ float of_warp[WARPS];
  int pieces = p.width / 8, mine = threadIdx.x;
  const Narrow* x = p.x + static_cast<long long>(blockIdx.x) * p.width;
  const Narrow* dy = p.dy + static_cast<long long>(blockIdx.x) * p.width;
  Narrow* dx = p.out + static_cast<long long>(blockIdx.x) * p.width;
  Eight kept_x[KEPT] = {}, kept_dy[KEPT] = {};
  float sum = 0.0f;
#pragma unroll
  for (int turn = 0; turn < KEPT; ++turn) {
    int piece = mine + turn * THREADS;
    if (piece < pieces) {
      kept_x[turn] = load(x, piece);
      kept_dy[turn] = load(dy, piece);
      sum += along(kept_dy[turn], load(p.weight, piece), kept_x[turn]);
    }
  }
  for (int piece = mine + KEPT * THREADS; piece < pieces; piece += THREADS) sum += along(load(dy, piece), load(p.weight, piece), load(x, piece));
  float factor = __ldg(p.rstd + blockIdx.x);
  float shift = sum_of_block(sum, of_warp) * factor / static_cast<float>(p.width) * factor;
#pragma unroll
  for (int turn = 0; turn < KEPT; ++turn) {
    int piece = mine + turn * THREADS;
    if (piece < pieces) store(dx, piece, turned_back(kept_dy[turn], load(p.weight, piece), kept_x[turn], factor, shift));
  }
  for (int piece = mine + KEPT * THREADS; piece < pieces; piece += THREADS) {
    store(dx, piece, turned_back(load(dy, piece), load(p.weight, piece), load(x, piece), factor, shift));
  }
}

// Tensors of one size, contiguous, of 8 · pieces numbers.
struct Gate {
  const Narrow* gate;
  const Narrow* up;
  const Narrow* dy;  // of the backward
  Narrow* out;       // y, or the gradient of gate
  Narrow* dup;       // of the backward
  long long pieces;
};
static_assert(sizeof(Gate) == 48, "as whoever launches it has it");

// 1 / (1 + e^-x), and what it lacks of 1, both without cancellation.
__device__ __forceinline__ void sigmoid(float x, float& open, float& closed) {
  float power = expf(-fabsf(x)), most = 1.0f / (1.0f + power), least = power * most;
  open = x < 0.0f ? least : most;
  closed = x < 0.0f ? most : least;
}

// y = silu(gate) · up.
extern "C" __global__ void __launch_bounds__(THREADS) gated(const Gate p) {
  long long piece = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (piece >= p.pieces) return;
  Eight gate = load(p.gate, piece), up = load(p.up, piece), y;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = wide(gate.at[i]), open, closed;
    sigmoid(x, open, closed);
    y.at[i] = narrow(wide(narrow(x * open)) * wide(up.at[i]));
  }
  store(p.out, piece, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) gated_back(const Gate p) {
  long long piece = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (piece >= p.pieces) return;
  Eight gate = load(p.gate, piece), up = load(p.up, piece), dy = load(p.dy, piece), dgate, dup;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float x = wide(gate.at[i]), d = wide(dy.at[i]), open, closed;
    sigmoid(x, open, closed);
    dgate.at[i] = narrow(d * wide(up.at[i]) * (open * (1.0f + x * closed)));
    dup.at[i] = narrow(d * (x * open));
  }
  store(p.out, piece, dgate);
  store(p.dup, piece, dup);
}

// Strides count pieces of 8 numbers, of which a head has 2 · half; its channels are neighbours.
struct Turn {
  const Narrow* x;    // (B, heads, tokens, D)
  const Narrow* cos;  // (B or 1, tokens, D / 2), contiguous
  const Narrow* sin;
  Narrow* out;  // as x, with strides of its own
  long long x_batch, x_head, x_token;
  long long out_batch, out_head, out_token;
  long long angle_batch;  // 0 where all rows share their angles
  unsigned count;         // threads that have something to do: B · tokens · heads · half
  int heads, tokens, half;
  float sign;  // −1 turns back
};
static_assert(sizeof(Turn) == 112, "as whoever launches it has it");

// Turns the pairs of channel i and channel D / 2 + i.
extern "C" __global__ void __launch_bounds__(THREADS) turned(const Turn p) {
  unsigned mine = blockIdx.x * THREADS + threadIdx.x;
  if (mine >= p.count) return;
  unsigned piece = mine % p.half, rest = mine / p.half;
  unsigned head = rest % p.heads, row = rest / p.heads;
  unsigned token = row % p.tokens, batch = row / p.tokens;
  long long from = batch * p.x_batch + head * p.x_head + token * p.x_token + piece;
  long long to = batch * p.out_batch + head * p.out_head + token * p.out_token + piece;
  long long angle = batch * p.angle_batch + static_cast<long long>(token) * p.half + piece;
  Eight low = load(p.x, from), high = load(p.x, from + p.half), cos = load(p.cos, angle), sin = load(p.sin, angle), new_low, new_high;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float a = wide(low.at[i]), b = wide(high.at[i]), c = wide(cos.at[i]), s = p.sign * wide(sin.at[i]);
    new_low.at[i] = narrow(a * c - b * s);
    new_high.at[i] = narrow(b * c + a * s);
  }
  store(p.out, to, new_low);
  store(p.out, to + p.half, new_high);
}
