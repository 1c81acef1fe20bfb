// The keys and values that a chunk attends to, tile by tile, as dense matrices.
#pragma once
#include "powers.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

namespace kvtune {

// Keys of a tile. Where there are fewer, zeros that nobody sees fill them up to whole steps: the product's library makes a kernel for
// every size that it meets, and keeps it.
constexpr int64_t TILE = 256, STEP = 64;

// Parts of keys and values (B, G, ·, D), the chunk's own last, and which of their slots are in use (B, G, ·), undefined where all are.
struct Parts {
  std::vector<at::Tensor> k, v, in_use;
};

// Slots of a part that stand side by side; `start` counts all slots in use before them.
struct Run {
  size_t part;
  int64_t slot, start, count;
};

// Some keys of a tile, and rows of their matrices.
struct Stretch {
  int64_t first, count;
  int64_t end() const { return first + count; }
  int64_t rows() const { return (count + STEP - 1) / STEP * STEP; }
};

// What the queries of one row and head may see.
class Visible {
 public:
  Visible(const Parts& parts, int64_t b, int64_t g) : parts_(parts), b_(b), g_(g) {
    for (size_t part = 0; part < parts.k.size(); ++part) {
      if (part + 1 == parts.k.size()) past_ = count_;
      int64_t slots = parts.k[part].size(2);
      if (!parts.in_use[part].defined()) {
        add(part, 0, slots);
        continue;
      }
      const bool* used = parts.in_use[part].data_ptr<bool>() + (b * parts.k[part].size(1) + g) * slots;
      for (int64_t slot = 0; slot < slots; ++slot) {
        if (used[slot]) add(part, slot, 1);
      }
    }
  }

  int64_t tiles() const { return (count_ + TILE - 1) / TILE; }

  // How many keys are seen by some query of the tokens before `end`: they come first.
  int64_t seen_before(int64_t end) const {
    int64_t seen = past_;
    for (const Run& run : runs_) {
      if (run.start >= past_) seen += std::clamp<int64_t>(end - run.slot, 0, run.count);
    }
    return seen;
  }

  // The stretch of tile `tile` that lies before key `end`.
  Stretch stretch(int64_t tile, int64_t end) const { return {tile * TILE, std::min(TILE, end - tile * TILE)}; }

  // Of a stretch's keys the first among `lanes` queries that sees each, `per_token` for each token from `start` on; null where all see all.
  const int64_t* from(Stretch keys, int64_t start, int64_t per_token, int64_t lanes, std::vector<int64_t>& scratch) const {
    if (keys.count == keys.rows() && keys.end() <= past_) return nullptr;
    scratch.assign(keys.rows(), lanes);
    std::fill_n(scratch.begin(), std::clamp<int64_t>(past_ - keys.first, 0, keys.count), 0);
    each(std::max(keys.first, past_), keys.end(), [&](const Run&, int64_t slot, int64_t at, int64_t count) {
      for (int64_t i = 0; i < count; ++i) scratch[at - keys.first + i] = std::clamp<int64_t>((slot + i - start) * per_token, 0, lanes);
    });
    return scratch.data();
  }

  // Keys or values of a stretch as rows of `width` numbers, filled up with zeros: where they lie, if they lie there as they should, or
  // copied to `scratch`; and how far apart they are.
  template <class S, class T> std::pair<const T*, int64_t> rows(const std::vector<at::Tensor>& of, Stretch keys, T* scratch) const {
    int64_t width = of[0].size(3);
    if constexpr (std::is_same_v<S, T>) {
      const Run& run = at(keys.first);
      int64_t stride = of[run.part].stride(2);
      if (keys.first + keys.rows() <= run.start + run.count) return {head<S>(of, run.part) + (run.slot + keys.first - run.start) * stride, stride};
    }
    T* to = scratch;
    each(keys.first, keys.end(), [&](const Run& run, int64_t slot, int64_t, int64_t count) {
      for (int64_t i = 0; i < count; ++i, to += width) {
        const S* from = head<S>(of, run.part) + (slot + i) * of[run.part].stride(2);
        for (int64_t d = 0; d < width; ++d) to[d] = static_cast<T>(from[d]);
      }
    });
    std::fill(to, scratch + keys.rows() * width, T(0));
    return {scratch, width};
  }

  // Writes rows of a stretch, times `factor`, to its slots of tensors that are dense.
  template <class T> void write(const std::vector<at::Tensor>& to, Stretch keys, const T* rows, T factor) const {
    int64_t width = to[0].size(3);
    each(keys.first, keys.end(), [&](const Run& run, int64_t slot, int64_t, int64_t count) {
      T* out = head<T>(to, run.part) + slot * width;
      for (int64_t i = 0; i < count * width; ++i) out[i] = rows[i] * factor;
      rows += count * width;
    });
  }

  // Adds one number for each of the first `count` keys to those of all slots of all parts.
  template <class T> void add(T* sums, const T* of_keys, int64_t count) const {
    std::vector<int64_t> before(1, 0);
    for (const at::Tensor& part : parts_.k) before.push_back(before.back() + part.size(2));
    each(0, count, [&](const Run& run, int64_t slot, int64_t key, int64_t count) {
      for (int64_t i = 0; i < count; ++i) sums[before[run.part] + slot + i] += of_keys[key + i];
    });
  }

 private:
  void add(size_t part, int64_t slot, int64_t count) {
    if (!runs_.empty() && runs_.back().part == part && runs_.back().slot + runs_.back().count == slot) {
      runs_.back().count += count;
    } else {
      runs_.push_back({part, slot, count_, count});
    }
    count_ += count;
  }

  template <class S> S* head(const std::vector<at::Tensor>& of, size_t part) const {
    return of[part].data_ptr<S>() + b_ * of[part].stride(0) + g_ * of[part].stride(1);
  }

  const Run& at(int64_t key) const {
    return *std::prev(std::upper_bound(runs_.begin(), runs_.end(), key, [](int64_t key, const Run& run) { return key < run.start; }));
  }

  // Calls `body(run, slot, key, count)` for the stretches of runs that keys [first, end) lie in.
  template <class F> void each(int64_t first, int64_t end, F body) const {
    while (first < end) {
      const Run& run = at(first);
      int64_t count = std::min(end, run.start + run.count) - first;
      body(run, run.slot + first - run.start, first, count);
      first += count;
    }
  }

  const Parts& parts_;
  int64_t b_, g_, count_ = 0, past_ = 0;
  std::vector<Run> runs_;
};

// (rows, width) to (width, rows), of rows `stride` apart to rows `apart`.
template <class T> INLINE void transposed(T* to, int64_t apart, const T* from, int64_t stride, int64_t rows, int64_t width) {
  constexpr int64_t LINES = 16;
  for (int64_t first = 0; first < rows; first += LINES) {
    int64_t lines = std::min(LINES, rows - first);
    for (int64_t d = 0; d < width; ++d) {
      for (int64_t i = 0; i < lines; ++i) to[d * apart + first + i] = from[(first + i) * stride + d];
    }
  }
}

}  // namespace kvtune
