// The kernels of norms, gates and rotations on the played GPU, beside plain loops in double precision. KVTUNE_KERNEL names the kernels'
// file, KVTUNE_F16 is what they are compiled for. Prints the number of cases and the worst error, in units of the last place.
#include "gpu.h"

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float wide(Narrow x) { return KVTUNE_F16 ? gpu::f16(x) : gpu::bf16(x); }

// To the nearest, of two equally near ones to the even one: by trying the neighbours.
inline Narrow narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (!KVTUNE_F16) return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if (std::fabs(x) >= 65520.0f) return bits >> 31 << 15 | 0x7c00;
  Narrow sign = bits >> 31 << 15, least = 0, most = 0x7c00;
  while (most - least > 1) {
    Narrow middle = (least + most) / 2;
    (gpu::f16(middle) <= std::fabs(x) ? least : most) = middle;
  }
  float below = std::fabs(x) - gpu::f16(least), above = gpu::f16(most) - std::fabs(x);
  return sign | (below < above || (below == above && least % 2 == 0) ? least : most);
}

#include KVTUNE_KERNEL

namespace {

std::mt19937 random_bits(1);
double worst = 0;
int count = 0;

float normal() { return std::normal_distribution<float>()(random_bits); }

// Begins at a multiple of 16 bytes, and ends with a zone that nobody may read or write.
struct Numbers {
  std::vector<Eight> pieces;

  Numbers(size_t size, bool is_output) : pieces(size / 8 + 2) {
    for (size_t i = 0; i < pieces.size() * 8; ++i) at(i) = is_output || i >= size ? 0xffff : narrow(normal());
    auto begin = reinterpret_cast<const char*>(pieces.data());
    gpu::memory.ranges.push_back({begin, begin + size * 2, is_output});
    this->size = size;
  }

  Narrow& at(size_t i) { return pieces[i / 8].at[i % 8]; }
  double value(size_t i) { return wide(at(i)); }
  Narrow* data() { return pieces[0].at; }
  size_t size;
};

double rounded(double x) { return wide(narrow(static_cast<float>(x))); }

// Of a number that was rounded once: half a unit in the last place, and what f32 adds to it.
void expect(const char* what, Numbers& found, size_t i, double wanted, double reach) {
  double unit = (KVTUNE_F16 ? 1.0 / 1024 : 1.0 / 128) * std::max(std::fabs(wanted), reach);
  // The smallest numbers of f16 are this far apart.
  if (KVTUNE_F16) unit = std::max(unit, 0x1p-24);
  double error = std::fabs(found.value(i) - wanted) / unit;
  if (!(error <= 1.05)) {
    std::printf("error: %s, number %zu is %g instead of %g\n", what, i, found.value(i), wanted);
    std::exit(1);
  }
  worst = std::max(worst, error);
}

void untouched(const char* what, Numbers& found) {
  for (size_t i = found.size; i < found.pieces.size() * 8; ++i) {
    if (found.at(i) != 0xffff) {
      std::printf("error: %s writes behind its end\n", what);
      std::exit(1);
    }
  }
}

void norm(int rows, int width, unsigned seed) {
  gpu::memory.ranges.clear();
  Numbers x(rows * width, false), weight(width, false), dy(rows * width, false), y(rows * width, true), dx(rows * width, true);
  std::vector<float> rstd(rows, NAN);
  auto begin = reinterpret_cast<const char*>(rstd.data());
  gpu::memory.ranges.push_back({begin, begin + rows * 4, true});
  Norm p{x.data(), weight.data(), dy.data(), rstd.data(), y.data(), width, 1e-5f};
  gpu::launch(norm_rows, {static_cast<unsigned>(rows), 1, 1}, THREADS, p, seed);
  p.out = dx.data();
  gpu::launch(norm_rows_back, {static_cast<unsigned>(rows), 1, 1}, THREADS, p, seed);
  for (int r = 0; r < rows; ++r) {
    double squares = 0, along = 0;
    for (int i = 0; i < width; ++i) squares += x.value(r * width + i) * x.value(r * width + i);
    double factor = 1 / std::sqrt(squares / width + 1e-5);
    if (!(std::fabs(rstd[r] - factor) <= 1e-5 * factor)) gpu::fail("one over the root of a row is wrong");
    for (int i = 0; i < width; ++i) along += dy.value(r * width + i) * weight.value(i) * x.value(r * width + i) * factor;
    for (int i = 0; i < width; ++i) {
      size_t at = r * width + i;
      double turned = x.value(at) * factor, g = dy.value(at) * weight.value(i);
      // The rounding within may fall to either side.
      expect("norm", y, at, rounded(turned) * weight.value(i), std::fabs(weight.value(i)) * std::fabs(turned));
      expect("backward of norm", dx, at, (g - turned * along / width) * factor, 0.02);
    }
  }
  untouched("norm", y), untouched("backward of norm", dx);
  ++count;
}

void gate(int pieces, unsigned seed) {
  gpu::memory.ranges.clear();
  size_t size = pieces * 8;
  Numbers gates(size, false), up(size, false), dy(size, false), y(size, true), dgate(size, true), dup(size, true);
  // Far out, where one of two exponentials overflows.
  gates.at(0) = narrow(-30000.0f), gates.at(1) = narrow(30000.0f), gates.at(2) = narrow(-20.0f), gates.at(3) = 0;
  Gate p{gates.data(), up.data(), dy.data(), y.data(), nullptr, pieces};
  unsigned blocks = (pieces + THREADS - 1) / THREADS;
  gpu::launch(gated, {blocks, 1, 1}, THREADS, p, seed);
  p.out = dgate.data(), p.dup = dup.data();
  gpu::launch(gated_back, {blocks, 1, 1}, THREADS, p, seed);
  for (size_t i = 0; i < size; ++i) {
    double x = gates.value(i), d = dy.value(i), open = 1 / (1 + std::exp(-x)), silu = x * open;
    expect("gate", y, i, rounded(silu) * up.value(i), 1e-3 * std::fabs(up.value(i)));
    expect("gradient of gate", dgate, i, d * up.value(i) * open * (1 + x * (1 - open)), 0.02);
    expect("gradient of up", dup, i, d * silu, 1e-3);
  }
  untouched("gate", y), untouched("gradient of gate", dgate), untouched("gradient of up", dup);
  ++count;
}

void turn(int batch, int heads, int tokens, int width, bool shares, bool back, unsigned seed) {
  gpu::memory.ranges.clear();
  int half = width / 2, angles = shares ? 1 : batch;
  size_t size = static_cast<size_t>(batch) * heads * tokens * width;
  Numbers x(size, false), cos(angles * tokens * half, false), sin(angles * tokens * half, false), y(size, true);
  // Tokens before heads in the one, heads before tokens in the other.
  Turn p{};
  p.x = x.data(), p.cos = cos.data(), p.sin = sin.data(), p.out = y.data();
  p.half = half / 8, p.heads = heads, p.tokens = tokens;
  p.x_batch = p.out_batch = static_cast<long long>(heads) * tokens * width / 8;
  long long before = width / 8, heads_first = static_cast<long long>(tokens) * width / 8, tokens_first = static_cast<long long>(heads) * width / 8;
  p.x_head = back ? heads_first : before, p.x_token = back ? before : tokens_first;
  p.out_head = back ? before : heads_first, p.out_token = back ? tokens_first : before;
  p.angle_batch = shares ? 0 : static_cast<long long>(tokens) * half / 8;
  p.count = batch * tokens * heads * (half / 8);
  p.sign = back ? -1.0f : 1.0f;
  gpu::launch(turned, {(p.count + THREADS - 1) / THREADS, 1, 1}, THREADS, p, seed);
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < half; ++i) {
          size_t from = (b * p.x_batch + h * p.x_head + t * p.x_token) * 8 + i, to = (b * p.out_batch + h * p.out_head + t * p.out_token) * 8 + i;
          size_t angle = b * p.angle_batch * 8 + t * half + i;
          double low = x.value(from), high = x.value(from + half), c = cos.value(angle), s = p.sign * sin.value(angle);
          expect("rotation", y, to, low * c - high * s, 0.01);
          expect("rotation", y, to + half, high * c + low * s, 0.01);
        }
      }
    }
  }
  untouched("rotation", y);
  ++count;
}

}  // namespace

int main() {
  // Less than a warp, a piece more than a block, what a thread keeps, and more than that.
  norm(3, 8, 1), norm(2, 64, 2), norm(5, 2056, 3), norm(1, 8192, 4), norm(2, 8200, 5), norm(1, 20000, 6);
  gate(1, 7), gate(256, 8), gate(300, 9);
  turn(1, 1, 1, 16, true, false, 10), turn(2, 3, 5, 64, true, true, 11), turn(2, 7, 9, 128, false, false, 12), turn(3, 2, 4, 80, false, true, 13);
  std::printf("%d cases, worst %.2f\n", count, worst);
}
