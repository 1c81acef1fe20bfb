// A GPU played on the CPU, for the very text of the kernels: the threads of a block are fibers, which run in any order between two
// barriers; what a warp does together is computed when its last lane arrives, with the layout of fragments that the PTX ISA gives.
//
// It is stricter than a device: it fails on a read or write outside of the buffers that it was told of, on shared memory that is read
// while it is written or before it is copied, on a copy that nobody has waited for, and on a barrier that not all threads reach.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#define KVTUNE_EMULATED 1
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// A section of its own, whose ends the linker names: a block finds no number of the one before it there.
#define __shared__ static __attribute__((section("gpu_shared")))

struct Index3 {
  unsigned x, y, z;
};

extern "C" char __start_gpu_shared[], __stop_gpu_shared[];

namespace gpu {

[[noreturn]] inline void fail(const char* what) {
  std::printf("error: %s\n", what);
  std::fflush(stdout);
  std::_Exit(1);
}

// Memory of the device, as far as a kernel was given it.
struct Memory {
  struct Range {
    const char* begin;
    const char* end;
    bool is_writable;
  };
  std::vector<Range> ranges;

  void check(const void* at, size_t bytes, bool is_write) const {
    auto first = static_cast<const char*>(at);
    for (const Range& range : ranges) {
      if (first >= range.begin && first + bytes <= range.end && (range.is_writable || !is_write)) return;
    }
    fail(is_write ? "a write outside of the output" : "a read outside of the inputs");
  }
};
inline Memory memory;

// Who was last at four bytes of shared memory, and after how many barriers.
struct Visit {
  int written = -1, writer = -1, read = -1, reader = -1;
};

struct Copy {
  char* to;
  const char* from;
  size_t bytes;
  bool is_there;
};

struct Fiber {
  enum State { Ready, AtBarrier, AtCollective, Done } state = Ready;
  bool begun = false;
  unsigned seen = 0;
  ucontext_t context;
  jmp_buf jump;
  std::unique_ptr<char[]> stack;
  std::vector<Copy> copies;
};

struct Warp {
  void* part[32];
  int kind = 0, arrived = 0;
  unsigned done = 0;
};

constexpr size_t STACK = 256 << 10;

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::unordered_map<uintptr_t, Visit> visits;
  std::function<void()> body;
  int current = 0, barriers = 0;
  jmp_buf scheduler;
};
inline Block block;

inline Index3 thread_index, block_index, grid_size;

inline void wait() {
  if (_setjmp(block.fibers[block.current].jump) == 0) _longjmp(block.scheduler, 1);
}

inline void begin_fiber() {
  block.body();
  block.fibers[block.current].state = Fiber::Done;
  _longjmp(block.scheduler, 1);
}

inline void resume(int thread) {
  block.current = thread;
  thread_index = {static_cast<unsigned>(thread), 0, 0};
  Fiber& fiber = block.fibers[thread];
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.jump, 1);
  fiber.begun = true;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = STACK;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, begin_fiber, 0);
  setcontext(&fiber.context);
}

inline bool may_run(const Fiber& fiber, int thread) {
  return fiber.state == Fiber::Ready || (fiber.state == Fiber::AtCollective && block.warps[thread / 32].done != fiber.seen);
}

inline void run_block(int threads, std::mt19937& order_of) {
  if (static_cast<int>(block.fibers.size()) != threads) {
    block.fibers = std::vector<Fiber>(threads);
    for (Fiber& fiber : block.fibers) fiber.stack = std::make_unique<char[]>(STACK);
  }
  for (Fiber& fiber : block.fibers) {
    fiber.state = Fiber::Ready;
    fiber.begun = false;
    fiber.copies.clear();
  }
  block.warps.assign(threads / 32, Warp());
  block.visits.clear();
  block.barriers = 0;
  std::memset(__start_gpu_shared, 0xff, __stop_gpu_shared - __start_gpu_shared);
  std::vector<int> order(threads);
  for (int i = 0; i < threads; ++i) order[i] = i;
  for (;;) {
    std::shuffle(order.begin(), order.end(), order_of);
    bool any = false;
    for (int thread : order) {
      if (!may_run(block.fibers[thread], thread)) continue;
      block.fibers[thread].state = Fiber::Ready;
      resume(thread);
      any = true;
    }
    if (any) continue;
    auto all = [](Fiber::State state) {
      return std::all_of(block.fibers.begin(), block.fibers.end(), [state](const Fiber& f) { return f.state == state; });
    };
    if (all(Fiber::Done)) break;
    if (!all(Fiber::AtBarrier)) fail("threads wait for others that never come");
    ++block.barriers;
    for (Fiber& fiber : block.fibers) fiber.state = Fiber::Ready;
  }
  for (const Fiber& fiber : block.fibers) {
    if (!fiber.copies.empty()) fail("a copy that nobody has waited for");
  }
}

// Runs a kernel over a grid, blocks and threads in an order that is drawn.
template <class Params> void launch(void (*kernel)(Params), Index3 grid, int threads, const Params& params, unsigned seed) {
  std::mt19937 order_of(seed);
  grid_size = grid;
  block.body = [&] { kernel(params); };
  std::vector<unsigned> blocks(grid.x * grid.y * grid.z);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), order_of);
  for (unsigned i : blocks) {
    block_index = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    run_block(threads, order_of);
  }
}

// All lanes of a warp bring a part; the last one does the work for all.
template <class Part> void together(int kind, Part& mine, void (*work)(Part* const (&)[32])) {
  Fiber& fiber = block.fibers[block.current];
  Warp& warp = block.warps[block.current / 32];
  if (warp.arrived > 0 && warp.kind != kind) fail("the lanes of a warp do different things");
  warp.kind = kind;
  warp.part[block.current % 32] = &mine;
  if (++warp.arrived < 32) {
    fiber.seen = warp.done;
    fiber.state = Fiber::AtCollective;
    wait();
    return;
  }
  Part* parts[32];
  for (int lane = 0; lane < 32; ++lane) parts[lane] = static_cast<Part*>(warp.part[lane]);
  work(parts);
  warp.arrived = 0;
  ++warp.done;
}

inline void visit(const void* at, size_t bytes, bool is_write) {
  for (uintptr_t word = reinterpret_cast<uintptr_t>(at) / 4; word < (reinterpret_cast<uintptr_t>(at) + bytes) / 4; ++word) {
    Visit& last = block.visits[word];
    if (last.written == block.barriers && last.writer != block.current) fail("shared memory used by two threads, one of them writing");
    if (is_write) {
      if (last.read == block.barriers && last.reader != block.current) fail("shared memory written while another thread reads it");
      last.written = block.barriers;
      last.writer = block.current;
    } else {
      if (last.written < 0) fail("shared memory read that nobody has written");
      bool shared = last.read == block.barriers && last.reader != block.current;
      last.read = block.barriers;
      // Two readers are no writer: whoever writes now meets another thread.
      last.reader = shared ? -2 : block.current;
    }
  }
}

inline void begin_copy(void* to, const void* from, size_t bytes, bool is_there) {
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 || reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("a copy that is not aligned");
  if (is_there) memory.check(from, bytes, false);
  visit(to, bytes, true);
  // Not a number in any of the kinds, until it has arrived.
  std::memset(to, 0xff, bytes);
  block.fibers[block.current].copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, is_there});
}

inline float of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float f16(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                    : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                   : std::ldexp(static_cast<float>(mantissa), -24);
  return bits >> 15 ? -magnitude : magnitude;
}

inline float bf16(uint16_t bits) { return of_bits(static_cast<uint32_t>(bits) << 16); }

struct Multiply {
  float* c;
  const unsigned* a;
  unsigned b[2];
};

// mma.m16n8k16: lane l, with g = l / 4 and t = l mod 4, has
//   a0..a1 (g, 2t + i), a2..a3 (g + 8, 2t + i), a4..a5 (g, 2t + 8 + i), a6..a7 (g + 8, 2t + 8 + i)
//   b0..b1 (2t + i, g), b2..b3 (2t + 8 + i, g)         c0..c1 (g, 2t + i), c2..c3 (g + 8, 2t + i)
template <float (*value)(uint16_t)> void multiply(Multiply* const (&lanes)[32]) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i) a[g + (i / 2 % 2) * 8][t * 2 + i % 2 + i / 4 * 8] = value(lanes[lane]->a[i / 2] >> i % 2 * 16);
    for (int i = 0; i < 4; ++i) b[t * 2 + i % 2 + i / 2 * 8][g] = value(lanes[lane]->b[i / 2] >> i % 2 * 16);
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      lanes[lane]->c[i] += sum;
    }
  }
}

struct Load {
  unsigned* part;
  const uint16_t* row;
};

// ldmatrix.x4: lane l says where row l mod 8 of matrix l / 8 is, and gets of each matrix row l / 4, numbers 2 (l mod 4) and the next.
inline void load(Load* const (&lanes)[32]) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const uint16_t* row = lanes[matrix * 8 + lane / 4]->row + lane % 4 * 2;
      lanes[lane]->part[matrix] = row[0] | static_cast<unsigned>(row[1]) << 16;
    }
  }
}

struct Shuffle {
  float value;
  int mask;
};

inline void exchange(Shuffle* const (&lanes)[32]) {
  float values[32];
  for (int lane = 0; lane < 32; ++lane) values[lane] = lanes[lane]->value;
  for (int lane = 0; lane < 32; ++lane) lanes[lane]->value = values[lane ^ lanes[lane]->mask];
}

}  // namespace gpu

#define threadIdx gpu::thread_index
#define blockIdx gpu::block_index
#define gridDim gpu::grid_size

using std::max;
using std::min;
using Narrow = unsigned short;

inline void __syncthreads() {
  gpu::block.fibers[gpu::block.current].state = gpu::Fiber::AtBarrier;
  gpu::wait();
}

inline float __shfl_xor_sync(unsigned, float value, int mask) {
  gpu::Shuffle part{value, mask};
  gpu::together(1, part, gpu::exchange);
  return part.value;
}

template <class T> T __ldg(const T* at) {
  gpu::memory.check(at, sizeof(T), false);
  return *at;
}

inline float __int_as_float(int bits) { return gpu::of_bits(static_cast<uint32_t>(bits)); }

inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  gpu::Multiply part{c, a, {b0, b1}};
  gpu::together(3, part, KVTUNE_F16 ? gpu::multiply<gpu::f16> : gpu::multiply<gpu::bf16>);
}

inline void load_matrices(unsigned (&part)[4], const Narrow* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) gpu::fail("a row of a matrix that is not aligned");
  gpu::visit(row, 16, false);
  gpu::Load mine{part, row};
  gpu::together(2, mine, gpu::load);
}

inline void begin_copy(Narrow* to, const Narrow* from, bool is_there) { gpu::begin_copy(to, from, 16, is_there); }

inline void begin_copy(float* to, const float* from) { gpu::begin_copy(to, from, 4, true); }

inline void end_copies() {
  for (const gpu::Copy& copy : gpu::block.fibers[gpu::block.current].copies) {
    gpu::visit(copy.to, copy.bytes, true);
    if (copy.is_there) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    } else {
      std::memset(copy.to, 0, copy.bytes);
    }
  }
  gpu::block.fibers[gpu::block.current].copies.clear();
}

inline float power_of_2(float x) { return std::exp2(x); }
