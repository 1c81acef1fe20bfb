// The kernels of the quantiser on the played GPU, beside what libtorch's operations made of the same vectors on the CPU. KVTUNE_KERNEL
// names the kernels' file, KVTUNE_KIND and KVTUNE_BITS are what they are compiled for; the argument is a file of cases.
#include "gpu.h"

#include KVTUNE_KERNEL

namespace {

template <class T> std::vector<T> read(std::FILE* file, size_t count) {
  std::vector<T> data(count);
  if (std::fread(data.data(), sizeof(T), count, file) != count) gpu::fail("the file of cases ends too early");
  return data;
}

template <class T> void show(const std::vector<T>& data) {
  auto begin = reinterpret_cast<const char*>(data.data());
  gpu::memory.ranges.push_back({begin, begin + data.size() * sizeof(T), false});
}

// What a kernel writes to, with room behind it that must stay as it is.
template <class T> struct Guarded {
  size_t count;
  std::vector<T> data;

  explicit Guarded(size_t size) : count(size), data(size + 64) { std::memset(data.data(), 0xa5, data.size() * sizeof(T)); }

  void check() const {
    T untouched;
    std::memset(&untouched, 0xa5, sizeof(T));
    for (size_t i = count; i < data.size(); ++i) {
      if (std::memcmp(&data[i], &untouched, sizeof(T)) != 0) gpu::fail("a write behind the end");
    }
  }

  bool is(const std::vector<T>& other, size_t at, size_t size) const {
    return std::memcmp(&data[at], &other[at], size * sizeof(T)) == 0;
  }
};

// How many vectors differ in their levels or range.
int run(std::FILE* file, int width, int vectors, int level_bytes, unsigned seed) {
  auto x = read<Value>(file, width * vectors);
  auto level = read<unsigned char>(file, level_bytes * vectors);
  auto range = read<unsigned short>(file, 2 * vectors);
  auto restored = read<Value>(file, width * vectors);
  Guarded<unsigned char> own_level(level.size());
  Guarded<unsigned short> own_range(range.size());
  Guarded<Value> own_restored(restored.size());
  gpu::memory.ranges.clear();
  show(x);
  show(level);
  show(range);
  unsigned blocks = (vectors + VECTORS - 1) / VECTORS;
  gpu::launch(quantise, {blocks, 1, 1}, THREADS, Quantise{x.data(), own_level.data.data(), own_range.data.data(), vectors, width, level_bytes}, seed);
  gpu::launch(restore, {blocks, 1, 1}, THREADS, Restore{own_restored.data.data(), level.data(), range.data(), vectors, width, level_bytes}, seed);
  own_level.check();
  own_range.check();
  own_restored.check();
  if (!own_restored.is(restored, 0, restored.size())) gpu::fail("what is restored differs");
  int different = 0;
  for (int v = 0; v < vectors; ++v) {
    if (!own_level.is(level, v * level_bytes, level_bytes) || !own_range.is(range, 2 * v, 2)) ++different;
  }
  return different;
}

}  // namespace

int main(int, char** arguments) {
  std::FILE* file = std::fopen(arguments[1], "rb");
  if (!file) gpu::fail("no file of cases");
  int header[3], vectors = 0, different = 0;
  unsigned seed = 0;
  while (std::fread(header, sizeof(int), 3, file) == 3) {
    different += run(file, header[0], header[1], header[2], ++seed);
    vectors += header[1];
  }
  std::printf("%d of %d vectors differ\n", different, vectors);
}
