// The kernels of selection on the played GPU, beside a plain sort by the rule: lowest score first, ties by smaller position, NaN as the
// largest, what stays behind everything else (`Score::ByEntry` in src/cache/policy.rs; docs/METHOD.md, section 2), and the moves as
// src/cache/moves.rs says them. KVTUNE_KERNEL names the kernels' file; the argument, where there is one, is a file of choices that the
// cache made with libtorch's operations.
#include "gpu.h"

#include KVTUNE_KERNEL

#include <numeric>
#include <tuple>

namespace {

std::mt19937 drawn(11);

// What a kernel writes to, with room behind it that must stay as it is; scratch is of it too.
template <class T> struct Guarded {
  size_t count;
  std::vector<T> data;

  explicit Guarded(size_t size) : count(size), data(size + 64) {
    std::memset(data.data(), 0xa5, data.size() * sizeof(T));
    auto begin = reinterpret_cast<const char*>(data.data());
    gpu::memory.ranges.push_back({begin, begin + count * sizeof(T), true});
  }
};

template <class T> void show(const std::vector<T>& data) {
  auto begin = reinterpret_cast<const char*>(data.data());
  gpu::memory.ranges.push_back({begin, begin + data.size() * sizeof(T), false});
}

// The entries of all rows; a batch has `groups` rows.
struct Scene {
  int batch, groups, slots, taken;
  long long sinks, young, region;
  std::vector<float> score;
  std::vector<long long> position, bounds;

  int rows() const { return batch * groups; }

  bool stays(int row, int slot) const {
    long long p = position[row * slots + slot];
    int b = row / groups;
    bool is_protected = !bounds.empty() && p >= bounds[b * 2] && p < bounds[b * 2 + 1];
    return (p >= 0 && p < sinks) || p >= young || is_protected;
  }

  // By what the entries of a row are sorted. Of what stays all is the same.
  std::tuple<bool, float, long long, int> rank(int row, int slot) const {
    if (stays(row, slot)) return {true, 0.0f, 0, slot};
    float s = score[row * slots + slot];
    return {false, std::isnan(s) ? INFINITY : s + 0.0f, std::max(position[row * slots + slot], 0LL), slot};
  }
};

// Counts cases and choices from 1.
unsigned number = 0;

void fail(const char* what, const Scene& s) {
  std::printf("error: case %u, %d x %d rows of %d slots, %d taken: %s\n", number, s.batch, s.groups, s.slots, s.taken, what);
  std::exit(1);
}

std::vector<long long> keys(const Scene& s, unsigned seed) {
  Guarded<long long> key(s.score.size());
  Entries p{};
  p.score = s.score.data(), p.position = s.position.data(), p.bounds = s.bounds.empty() ? nullptr : s.bounds.data(), p.key = key.data.data();
  p.score_batch = p.position_batch = static_cast<long long>(s.groups) * s.slots;
  p.score_group = p.position_group = s.slots;
  p.sinks = s.sinks, p.young = s.young, p.groups = s.groups, p.slots = s.slots;
  unsigned blocks = (s.slots + EACH_OWN - 1) / EACH_OWN;
  gpu::launch(rank_entries, {blocks, static_cast<unsigned>(s.rows()), 1}, EACH_OWN, p, seed);
  return {key.data.begin(), key.data.begin() + key.count};
}

std::vector<long long> lowest(const Scene& s, const std::vector<long long>& key, unsigned seed) {
  show(key);
  Guarded<long long> slot(static_cast<size_t>(s.rows()) * s.taken);
  Guarded<unsigned> scratch(slot.count * 2);
  Lowest p{key.data(), slot.data.data(), scratch.data.data(), s.slots, s.taken};
  gpu::launch(take_lowest, {static_cast<unsigned>(s.rows()), 1, 1}, THREADS, p, seed);
  return {slot.data.begin(), slot.data.begin() + slot.count};
}

// By a plain sort.
std::vector<long long> expected(const Scene& s) {
  std::vector<long long> all;
  for (int row = 0; row < s.rows(); ++row) {
    std::vector<int> order(s.slots);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int a, int b) { return s.rank(row, a) < s.rank(row, b); });
    all.insert(all.end(), order.begin(), order.begin() + s.taken);
  }
  return all;
}

// The region is that of the last slots, as many as leave.
void check_moves(const Scene& s, const std::vector<long long>& victim, unsigned seed) {
  size_t e = s.taken;
  show(victim);
  Guarded<long long> to(victim.size()), order(victim.size()), from(victim.size());
  Guarded<unsigned> scratch(victim.size() * 3);
  Moves p{victim.data(), to.data.data(), order.data.data(), from.data.data(), scratch.data.data(), s.region, s.taken};
  gpu::launch(plan_moves, {static_cast<unsigned>(s.rows()), 1, 1}, THREADS, p, seed);
  for (int row = 0; row < s.rows(); ++row) {
    std::vector<bool> is_left(s.slots);
    for (size_t i = 0; i < e; ++i) is_left[victim[row * e + i]] = true;
    std::vector<long long> whose(s.slots), right_to, right_from;
    for (size_t i = 0; i < e; ++i) whose[victim[row * e + i]] = i;
    for (int slot = 0; slot < s.slots; ++slot) {
      if (is_left[slot]) right_to.push_back(slot);
    }
    for (bool left : {false, true}) {
      for (int slot = s.region; slot < s.region + s.taken; ++slot) {
        if (is_left[slot] == left) right_from.push_back(slot);
      }
    }
    for (size_t i = 0; i < e; ++i) {
      if (to.data[row * e + i] != right_to[i]) fail("a wrong slot to move to", s);
      if (order.data[row * e + i] != whose[right_to[i]]) fail("a wrong order", s);
      if (from.data[row * e + i] != right_from[i]) fail("a wrong slot to move from", s);
    }
  }
}

// Returns how many entries were chosen.
int run(const Scene& s, const std::vector<long long>* chosen = nullptr) {
  unsigned seed = ++number;
  gpu::memory.ranges.clear();
  show(s.score);
  show(s.position);
  show(s.bounds);
  std::vector<long long> key = keys(s, seed);
  if (s.taken == 0) return 0;
  std::vector<long long> found = lowest(s, key, seed), right = expected(s);
  for (size_t i = 0; chosen && i < right.size(); ++i) {
    int row = static_cast<int>(i / s.taken);
    // Of entries with the same score and position, slots that hold nothing, libtorch takes any.
    auto same = [&](auto a, auto b) { return std::get<0>(a) == std::get<0>(b) && std::get<1>(a) == std::get<1>(b) && std::get<2>(a) == std::get<2>(b); };
    if (!same(s.rank(row, (*chosen)[i]), s.rank(row, right[i]))) fail("the cache chose otherwise than by the rule", s);
  }
  for (size_t i = 0; i < right.size(); ++i) {
    if (found[i] != right[i]) fail("a wrong slot leaves", s);
  }
  check_moves(s, found, seed);
  return static_cast<int>(right.size());
}

enum Kind { NORMAL, ATTENTION, EQUAL, FEW, HALF_LINE, SPECIAL };

float draw(Kind kind) {
  double x = std::normal_distribution<double>()(drawn);
  const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1e-45f, -1e-45f, 3.4e38f, -3.4e38f, 1.0f, -1.0f};
  switch (kind) {
    case NORMAL:
      return static_cast<float>(x);
    case ATTENTION:
      return static_cast<float>(std::exp(2.0 * x));
    case EQUAL:
      return 0.25f;
    case FEW:
      return static_cast<float>(std::floor(x));
    case HALF_LINE:
      return std::max(0.0f, static_cast<float>(x));
    default:
      return special[drawn() % 12];
  }
}

// Which entries may not leave, or hold nothing.
enum Stays { NONE_STAYS, SOME_STAY, ALL_STAY, HOLES };

Scene scene(int batch, int groups, int slots, int taken, Kind kind, Stays stays) {
  Scene s{batch, groups, slots, taken, 0, 1LL << 40, slots - taken, {}, {}, {}};
  for (int i = 0; i < s.rows() * slots; ++i) s.score.push_back(draw(kind));
  for (int row = 0; row < s.rows(); ++row) {
    std::vector<long long> positions(slots);
    // With gaps, so that they have more digits than slots.
    std::iota(positions.begin(), positions.end(), 0);
    for (auto& position : positions) position = position * 37 + row;
    std::shuffle(positions.begin(), positions.end(), drawn);
    s.position.insert(s.position.end(), positions.begin(), positions.end());
  }
  if (stays == ALL_STAY) s.young = 0;
  if (stays == HOLES) {
    // The first token stands before slots that hold nothing, and that are as old.
    for (int i = 0; i < s.rows() * slots; ++i) {
      if (i % slots == 1) s.position[i] = 0;
      if (i % slots > slots / 2 && i % 2 == 0) s.position[i] = -1;
    }
  }
  if (stays != SOME_STAY) return s;
  s.sinks = 5 * 37;
  s.young = slots * 37LL * 9 / 10;
  for (int b = 0; b < batch; ++b) s.bounds.insert(s.bounds.end(), {slots * 4LL, slots * 4LL + (b + 1) * 100});
  // A slot that holds nothing.
  s.position[slots / 2] = -1;
  return s;
}

unsigned own_cases() {
  struct Case {
    int batch, groups, slots, taken;
    Kind kind;
    Stays stays;
  };
  const Case cases[] = {
      {1, 1, 1, 1, NORMAL, NONE_STAYS},           {1, 1, 5, 0, NORMAL, NONE_STAYS},         {1, 1, 5, 5, NORMAL, NONE_STAYS},
      {2, 3, 31, 7, SPECIAL, NONE_STAYS},         {1, 2, 33, 32, SPECIAL, NONE_STAYS},      {1, 1, 200, 200, SPECIAL, SOME_STAY},
      {1, 1, 1023, 300, NORMAL, NONE_STAYS},      {1, 2, 1024, 1, ATTENTION, NONE_STAYS},   {1, 1, 1025, 1024, NORMAL, SOME_STAY},
      {2, 2, 1500, 700, EQUAL, NONE_STAYS},       {1, 1, 2500, 2500, EQUAL, SOME_STAY},     {1, 2, 3000, 1111, FEW, SOME_STAY},
      {1, 2, 2100, 10, NORMAL, ALL_STAY},         {1, 1, 700, 300, EQUAL, HOLES},           {1, 1, 4096, 2048, HALF_LINE, NONE_STAYS},
      {1, 1, 4097, 300, HALF_LINE, SOME_STAY},    {1, 1, 18432, 2048, ATTENTION, SOME_STAY}, {1, 1, 18433, 2047, FEW, SOME_STAY},
      {1, 1, 69632, 4096, ATTENTION, SOME_STAY},  {1, 1, 66000, 65000, NORMAL, NONE_STAYS},
  };
  for (const Case& c : cases) run(scene(c.batch, c.groups, c.slots, c.taken, c.kind, c.stays));
  return number;
}

template <class T> std::vector<T> read(std::FILE* file, size_t count) {
  std::vector<T> data(count);
  if (count > 0 && std::fread(data.data(), sizeof(T), count, file) != count) gpu::fail("the file of choices ends too early");
  return data;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::printf("%u cases\n", own_cases());
    return 0;
  }
  std::FILE* file = std::fopen(arguments[1], "rb");
  if (!file) gpu::fail("no file of choices");
  long long header[7], entries = 0;
  while (std::fread(header, sizeof(long long), 7, file) == 7) {
    auto size = [&](int i) { return static_cast<int>(header[i]); };
    Scene s{size(0), size(1), size(2), size(3), header[4], header[5], header[2] - header[3], {}, {}, {}};
    s.score = read<float>(file, s.rows() * s.slots);
    s.position = read<long long>(file, s.rows() * s.slots);
    s.bounds = read<long long>(file, header[6]);
    auto chosen = read<long long>(file, s.rows() * s.taken);
    entries += run(s, &chosen);
  }
  std::printf("%u choices of %lld entries\n", number, entries);
}
