// The kernel of the attention mass per slot on the simulated GPU, beside a plain double loop. KVTUNE_KERNEL names the kernel's file,
// KVTUNE_WIDTH and KVTUNE_F16 are what it is compiled for. Prints the number of cases and the worst relative error.
#include "gpu.h"

#include KVTUNE_KERNEL

namespace {

struct Case {
  int batch, groups, per_group, tokens, slots;
  int first, causal, splits;
  bool has_mask, has_pads;
  unsigned seed;
};

std::mt19937 random_bits(1);

float normal() { return std::normal_distribution<float>()(random_bits); }

float value(uint16_t bits) { return KVTUNE_F16 ? gpu::f16(bits) : gpu::bf16(bits); }

// Rounded towards zero, which is as good as any number here.
uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (!KVTUNE_F16) return bits >> 16;
  int exponent = static_cast<int>(bits >> 23 & 255) - 112;
  if (exponent <= 0) return bits >> 31 << 15;
  return bits >> 31 << 15 | exponent << 10 | (bits >> 13 & 1023);
}

// A view (batch, heads, rows, WIDTH) of a larger buffer, tokens before heads; what is not of the view is not a number.
struct View {
  std::vector<uint16_t> data;
  long long batch, head, row;

  View(int batches, int heads, int rows, int more_rows) : data(), head(WIDTH + 8), row(heads * (WIDTH + 8)) {
    batch = (rows + more_rows) * row;
    // The last row ends where the buffer ends.
    data.assign((batches - 1) * batch + (heads - 1) * head + (rows - 1) * row + WIDTH, 0xffff);
    for (int b = 0; b < batches; ++b) {
      for (int h = 0; h < heads; ++h) {
        for (int i = 0; i < rows; ++i) {
          for (int d = 0; d < WIDTH; ++d) data[b * batch + h * head + i * row + d] = narrow(normal());
        }
      }
    }
  }

  double dot(const View& other, long long mine, long long its) const {
    double sum = 0;
    for (int d = 0; d < WIDTH; ++d) sum += static_cast<double>(value(data[mine + d])) * value(other.data[its + d]);
    return sum;
  }
};

template <class T> void show(const std::vector<T>& data, bool is_writable = false) {
  auto begin = reinterpret_cast<const char*>(data.data());
  gpu::memory.ranges.push_back({begin, begin + data.size() * sizeof(T), is_writable});
}

constexpr float UNTOUCHED = -7.0f;

double run(const Case& c) {
  int heads = c.groups * c.per_group, rows = c.batch * c.groups;
  View q(c.batch, heads, c.tokens, 3), k(c.batch, c.groups, c.slots, 5);
  double scale = 1.0 / std::sqrt(WIDTH);
  std::vector<unsigned char> in_use(c.has_mask ? rows * c.slots : 0);
  for (auto& used : in_use) used = random_bits() % 4 != 0;

  // Log-sum-exps of all that a query sees, and a little more that it sees elsewhere.
  std::vector<float> level(c.batch * heads * c.tokens);
  std::vector<double> expected(rows * c.slots);
  for (int b = 0; b < c.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      int g = h / c.per_group;
      for (int i = 0; i < c.tokens; ++i) {
        int seen = c.causal ? std::min(i + 1, c.slots) : c.slots;
        std::vector<double> score(seen);
        double sum = std::exp(normal());
        for (int s = 0; s < seen; ++s) {
          score[s] = scale * q.dot(k, b * q.batch + h * q.head + i * q.row, b * k.batch + g * k.head + s * k.row);
          sum += std::exp(score[s]);
        }
        bool is_pad = c.has_pads && random_bits() % 3 == 0;
        float l = is_pad ? INFINITY : static_cast<float>(std::log(sum));
        level[(b * heads + h) * c.tokens + i] = l * 1.4426950408889634f;
        if (is_pad || i < c.first) continue;
        for (int s = 0; s < seen; ++s) expected[(b * c.groups + g) * c.slots + s] += std::exp(score[s] - l);
      }
    }
  }

  long long out_row = c.slots + 3;
  std::vector<float> out(rows * out_row, UNTOUCHED), part(c.splits > 1 ? c.splits * rows * c.slots : 0, NAN);
  gpu::memory.ranges.clear();
  show(q.data);
  show(k.data);
  show(level);
  show(in_use);
  show(part);
  MassParams p{};
  p.q = q.data.data();
  p.k = k.data.data();
  p.level = level.data();
  p.in_use = c.has_mask ? in_use.data() : nullptr;
  p.out = c.splits > 1 ? part.data() : out.data();
  p.q_batch = q.batch, p.q_head = q.head, p.q_token = q.row;
  p.k_batch = k.batch, p.k_group = k.head, p.k_slot = k.row;
  p.out_split = static_cast<long long>(rows) * c.slots;
  p.out_row = c.splits > 1 ? c.slots : out_row;
  p.groups = c.groups, p.per_group = c.per_group, p.tokens = c.tokens, p.slots = c.slots;
  p.first = c.first, p.causal = c.causal;
  p.rows_per_split = ((c.tokens - c.first) * c.per_group + c.splits - 1) / c.splits;
  p.factor = static_cast<float>(scale * 1.4426950408889634);
  unsigned tiles = (c.slots + KEYS - 1) / KEYS;
  gpu::launch(attention_mass, {tiles, static_cast<unsigned>(rows), static_cast<unsigned>(c.splits)}, THREADS, p, c.seed);
  if (c.splits > 1) {
    Splits s{part.data(), out.data(), out_row, c.splits, c.slots};
    unsigned blocks = (c.slots + THREADS - 1) / THREADS;
    gpu::launch(sum_attention_mass, {blocks, static_cast<unsigned>(rows), 1}, THREADS, s, c.seed);
  }

  double worst = 0;
  for (int r = 0; r < rows; ++r) {
    for (int s = 0; s < out_row; ++s) {
      float found = out[r * out_row + s];
      bool counts = s < c.slots && (!c.has_mask || in_use[r * c.slots + s]);
      double wanted = s >= c.slots ? UNTOUCHED : counts ? expected[r * c.slots + s] : 0.0;
      double error = wanted == 0.0 ? (found == 0.0f ? 0.0 : INFINITY) : std::fabs(found - wanted) / std::fabs(wanted);
      // What is not a number is no small error.
      worst = error <= worst ? worst : std::isnan(error) ? INFINITY : error;
    }
  }
  return worst;
}

}  // namespace

int main() {
  const Case cases[] = {
      // B, G, R, n, P, first, causal, splits, mask, pads
      {1, 1, 1, 1, 1, 0, 0, 1, false, false, 1},      // one of everything
      {1, 1, 1, 1, 1, 0, 1, 1, false, false, 2},
      {2, 2, 7, 1, 300, 0, 0, 1, true, false, 3},     // one token, as in generation
      {1, 2, 1, 64, 256, 0, 0, 1, false, false, 4},   // whole tiles
      {1, 1, 3, 65, 257, 0, 0, 1, false, true, 5},    // one more than whole tiles
      {2, 1, 2, 37, 130, 11, 0, 1, true, true, 6},    // a first paying token in the middle
      {1, 1, 4, 50, 40, 49, 0, 1, false, false, 7},   // the last token alone
      {1, 1, 1, 290, 290, 0, 1, 1, false, false, 8},  // squares: a tile of keys that the first tiles of queries do not see
      {2, 1, 2, 70, 70, 0, 1, 1, true, true, 9},
      {1, 2, 3, 280, 280, 270, 1, 1, false, false, 10},  // a tile of keys that some pay, and one that none may see
      {1, 1, 7, 19, 19, 5, 1, 1, false, true, 11},
      {1, 1, 5, 90, 70, 3, 0, 3, false, true, 12},  // queries in splits, which end within tiles
      {2, 2, 1, 270, 270, 0, 1, 4, true, false, 13},
      {1, 1, 2, 5, 33, 0, 0, 10, false, false, 14},  // as many splits as rows
  };
  double worst = 0;
  int count = 0;
  for (const Case& c : cases) {
    double error = run(c);
    if (!(error <= 1e-5)) {
      std::printf("error: case %u is off by %.1e\n", c.seed, error);
      return 1;
    }
    worst = std::max(worst, error);
    ++count;
  }
  std::printf("%d cases, worst %.1e\n", count, worst);
}
