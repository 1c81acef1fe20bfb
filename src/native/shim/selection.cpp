// Which entries leave a cache, and in which order, on the CPU: what src/cache/victims.rs has in libtorch's operations, in one pass over the
// entries of a row, which is a KV head of a sequence.
#include "guarded.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace kvtune {
namespace {

constexpr int64_t LARGEST = std::numeric_limits<int64_t>::max();
// Above every position.
constexpr int64_t LAST = int64_t(1) << 40;

// Scores as integers of the same order: -0 is 0, and what is no number is as large as any.
int64_t ordered(float score) {
  score = std::isnan(score) ? std::numeric_limits<float>::infinity() : score + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  return bits < 0 ? static_cast<int64_t>(bits) ^ 0x7fffffff : bits;
}

using Key = std::pair<int64_t, int64_t>;

// Puts the `count` first keys to the front, in order. Equal ones come in the order in which libtorch's own choice would bring them.
void sort_first(std::vector<Key>& keys, int64_t count) {
  auto is_lower = [](const Key& a, const Key& b) { return a.first < b.first; };
  if (count == 0) return;
  if (count * 64 <= static_cast<int64_t>(keys.size())) {
    std::partial_sort(keys.begin(), keys.begin() + count, keys.end(), is_lower);
  } else {
    std::nth_element(keys.begin(), keys.begin() + count - 1, keys.end(), is_lower);
    std::sort(keys.begin(), keys.begin() + count - 1, is_lower);
  }
}

// Where the rows of a tensor (B, G, n) begin; one row or head may serve all.
struct Rows {
  int64_t batch, group;

  explicit Rows(const at::Tensor& x)
      : batch(x.size(0) == 1 ? 0 : x.stride(0)), group(x.size(1) == 1 ? 0 : x.stride(1)) {}
};

at::Tensor rank(const at::Tensor& score, const at::Tensor& position, const int64_t* bounds, int64_t sinks, int64_t young) {
  bool fits = score.is_cpu() && position.is_cpu() && score.dim() == 3 && position.dim() == 3 && score.size(2) == position.size(2) &&
              score.scalar_type() == at::kFloat && position.scalar_type() == at::kLong;
  TORCH_CHECK(fits, "scores of size ", score.sizes(), " do not fit positions of size ", position.sizes());
  at::Tensor scores = score.stride(2) == 1 ? score : score.contiguous();
  at::Tensor positions = position.stride(2) == 1 ? position : position.contiguous();
  int64_t batch = std::max(score.size(0), position.size(0)), groups = std::max(score.size(1), position.size(1)), slots = score.size(2);
  at::Tensor key = at::empty({batch, groups, slots}, position.options());
  Rows of_score(scores), of_position(positions);
  int64_t* to = key.data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t g = 0; g < groups; ++g, to += slots) {
      const float* s = scores.data_ptr<float>() + b * of_score.batch + g * of_score.group;
      const int64_t* p = positions.data_ptr<int64_t>() + b * of_position.batch + g * of_position.group;
      int64_t begin = bounds == nullptr ? 0 : bounds[2 * b], end = bounds == nullptr ? 0 : bounds[2 * b + 1];
      for (int64_t i = 0; i < slots; ++i) {
        bool stays = (0 <= p[i] && p[i] < sinks) || p[i] >= young || (begin <= p[i] && p[i] < end);
        to[i] = stays ? LARGEST : ordered(s[i]) * (int64_t(1) << 32) + std::max<int64_t>(p[i], 0);
      }
    }
  }
  return key;
}

at::Tensor take_lowest(const at::Tensor& key, int64_t count) {
  bool fits = key.is_cpu() && key.dim() == 3 && key.scalar_type() == at::kLong && 0 <= count && count <= key.size(2);
  TORCH_CHECK(fits, "there are no ", count, " lowest of keys of size ", key.sizes());
  at::Tensor keys = key.contiguous(), slot = at::empty({key.size(0), key.size(1), count}, key.options());
  int64_t slots = key.size(2), rows = key.size(0) * key.size(1);
  std::vector<Key> row(slots);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t* from = keys.data_ptr<int64_t>() + r * slots;
    int64_t* to = slot.data_ptr<int64_t>() + r * count;
    for (int64_t i = 0; i < slots; ++i) row[i] = {from[i], i};
    sort_first(row, count);
    for (int64_t i = 0; i < count; ++i) to[i] = row[i].second;
  }
  return slot;
}

// Runs with P, the integers of a kind in which slots are kept.
template <class F> void by_width(at::ScalarType kind, F run) {
  if (kind == at::kByte) return run(uint8_t());
  if (kind == at::kShort) return run(int16_t());
  TORCH_CHECK(kind == at::kInt, "slots are kept in 8, 16 or 32 bits");
  run(int32_t());
}

// Slots (i64) as integers of a kind, a zero of which stands for `offset`; and back.
at::Tensor packed(const at::Tensor& slot, at::ScalarType kind, int64_t offset) {
  TORCH_CHECK(slot.is_cpu() && slot.scalar_type() == at::kLong, "slots are whole numbers of the host");
  at::Tensor from = slot.contiguous(), to = at::empty(slot.sizes(), slot.options().dtype(kind));
  by_width(kind, [&](auto narrow) {
    using P = decltype(narrow);
    const int64_t* in = from.data_ptr<int64_t>();
    P* out = to.data_ptr<P>();
    for (int64_t i = 0, count = from.numel(); i < count; ++i) out[i] = static_cast<P>(in[i] - offset);
  });
  return to;
}

at::Tensor unpacked(const at::Tensor& slot, int64_t offset) {
  TORCH_CHECK(slot.is_cpu(), "slots are whole numbers of the host");
  at::Tensor from = slot.contiguous(), to = at::empty(slot.sizes(), slot.options().dtype(at::kLong));
  by_width(slot.scalar_type(), [&](auto narrow) {
    using P = decltype(narrow);
    const P* in = from.data_ptr<P>();
    int64_t* out = to.data_ptr<int64_t>();
    for (int64_t i = 0, count = from.numel(); i < count; ++i) out[i] = static_cast<int64_t>(in[i]) + offset;
  });
  return to;
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

// score (B, G, n), f32, and position (B, G, n), i64, each with 1 for B or G where all share it; bounds (B, 2) or null. Out (B, G, n).
int kvtune_rank_entries(at::Tensor* score, at::Tensor* position, const int64_t* bounds, int64_t sinks, int64_t young, at::Tensor** key) {
  return guarded([&] { *key = new at::Tensor(rank(*score, *position, bounds, sinks, young)); });
}

// key (B, G, n), i64; out (B, G, count).
int kvtune_take_lowest(at::Tensor* key, int64_t count, at::Tensor** slot) {
  return guarded([&] { *slot = new at::Tensor(take_lowest(*key, count)); });
}

// `bytes` are those of an integer: 1, 2 or 4.
int kvtune_pack_slots(at::Tensor* slot, int64_t bytes, int64_t offset, at::Tensor** result) {
  at::ScalarType kind = bytes == 1 ? at::kByte : bytes == 2 ? at::kShort : at::kInt;
  return guarded([&] { *result = new at::Tensor(packed(*slot, kind, offset)); });
}

int kvtune_unpack_slots(at::Tensor* slot, int64_t offset, at::Tensor** result) {
  return guarded([&] { *result = new at::Tensor(unpacked(*slot, offset)); });
}

// Up to `count` slots out (1, 1, ·): those of the smallest positions below `young` and not within the bounds; the first `keep_first`
// tokens follow last, the youngest of them first.
int kvtune_leave_by_position(const int64_t* position, int64_t slots, int64_t young, int64_t begin, int64_t end, int64_t keep_first,
                             int64_t count, at::Tensor** slot) {
  return guarded([&] {
    std::vector<Key> keys;
    keys.reserve(slots);
    for (int64_t i = 0; i < slots; ++i) {
      int64_t p = position[i];
      if (p < young && !(begin <= p && p < end)) keys.push_back({p < keep_first ? LAST - p : p, i});
    }
    count = std::min<int64_t>(count, keys.size());
    sort_first(keys, count);
    at::Tensor out = at::empty({1, 1, count}, at::kLong);
    for (int64_t i = 0; i < count; ++i) out.data_ptr<int64_t>()[i] = keys[i].second;
    *slot = new at::Tensor(std::move(out));
  });
}

}  // extern "C"
