// The keys and values that a chunk attends to, tile by tile, as dense matrices.
#pragma once
#include "kinds.h"
#include "softmax.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace kvtune {

// Keys of a tile. Where there are fewer, zeros that nobody sees fill them up to whole steps: the product's library makes a kernel for
// every size that it meets, and keeps it.
constexpr int64_t TILE = 256, STEP = 64;

// Parts of keys and values (B, G, ·, D), the chunk's own last; which of their slots are in use (B, G, ·), undefined where all are; and
// how many of the chunk's tokens, from the first on, see each slot (B, G, ·), undefined where all do.
struct Parts {
  std::vector<at::Tensor> k, v, in_use, seen_until;
};

// A block of queries: its first token, and how many queries a token and the block have.
struct Lanes {
  int64_t start, per_token, count;
};

// Where the sight of the keys of a tile begins and ends, in queries.
struct Sight {
  std::vector<int64_t> from, until;
};

// A row of the batch and a head of its keys: what is worked on alone.
struct Head {
  int64_t b, g;
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
  int64_t rows() const { return at::round_up(count, STEP); }
};

// What the queries of one row and head may see.
class Visible {
 public:
  Visible(const Parts& parts, Head head) : parts_(parts), head_(head) {
    bool is_any_masked = false;
    for (size_t part = 0; part < parts.k.size(); ++part) {
      is_any_masked |= parts.seen_until[part].defined();
      if (part + 1 == parts.k.size()) past_ = count_;
      int64_t slots = parts.k[part].size(2);
      const bool* used = mask<bool>(parts.in_use, part);
      const int64_t* until = mask<int64_t>(parts.seen_until, part);
      if (used == nullptr && until == nullptr) {
        append(part, 0, slots);
        continue;
      }
      for (int64_t slot = 0; slot < slots; ++slot) {
        if ((used == nullptr || used[slot]) && (until == nullptr || until[slot] > 0)) append(part, slot, 1);
      }
    }
    if (is_any_masked) find_ends();
  }

  int64_t keys() const { return count_; }

  // How many keys are seen by some query of the tokens before `end`: they come first.
  int64_t seen_before(int64_t end) const {
    int64_t seen = past_;
    for (const Run& run : runs_) {
      if (run.start >= past_) seen += std::clamp<int64_t>(end - run.slot, 0, run.count);
    }
    return seen;
  }

  // What of a tile lies before key `end`.
  static Stretch stretch(int64_t tile, int64_t end) { return {tile * TILE, std::min(TILE, end - tile * TILE)}; }

  // Whether any query of the tokens from `start` on may see a key of a tile: behind a window none does.
  bool is_seen_from(int64_t start, int64_t tile) const { return ends_.empty() || ends_[tile] > start; }

  // Calls `body(stretch)` for the tiles of the keys before `end` that queries of the tokens from `start` on may see.
  template <class F> void each_tile(int64_t start, int64_t end, F body) const {
    for (int64_t tile = 0; tile * TILE < end; ++tile) {
      if (is_seen_from(start, tile)) body(stretch(tile, end));
    }
  }

  // The first `rows` rows of a stretch as some queries see them. `sight` must live as long as the tile.
  Tile tile(Stretch keys, int64_t rows, Lanes lanes, Sight& sight) const {
    return {rows, lanes.count, from(keys, lanes, sight.from), until(keys, lanes, sight.until)};
  }

  // Keys or values of a stretch as rows of `width` numbers, filled up with zeros: where they lie, if they lie there as they should, or
  // copied to `scratch`; and how far apart they are.
  template <class S> std::pair<const Wide<S>*, int64_t> rows(const std::vector<at::Tensor>& of, Stretch keys, Wide<S>* scratch) const {
    int64_t width = of[0].size(3);
    if constexpr (std::is_same_v<S, Wide<S>>) {
      const Run& run = at(keys.first);
      int64_t stride = of[run.part].stride(2), slot = run.slot + keys.first - run.start;
      if (keys.first + keys.rows() <= run.start + run.count) return {head_of<S>(of, run.part) + slot * stride, stride};
    }
    Wide<S>* to = scratch;
    each(keys.first, keys.end(), [&](const Run& run, int64_t slot, int64_t, int64_t count) {
      for (int64_t i = 0; i < count; ++i, to += width) {
        const S* from = head_of<S>(of, run.part) + (slot + i) * of[run.part].stride(2);
        for (int64_t d = 0; d < width; ++d) to[d] = wide(from[d]);
      }
    });
    std::fill(to, scratch + keys.rows() * width, Wide<S>(0));
    return {scratch, width};
  }

  // Writes rows of a stretch, times `factor`, to its slots of tensors that are dense.
  template <class T> void write(const std::vector<at::Tensor>& to, Stretch keys, const T* rows, T factor) const {
    int64_t width = to[0].size(3);
    each(keys.first, keys.end(), [&](const Run& run, int64_t slot, int64_t, int64_t count) {
      T* out = head_of<T>(to, run.part) + slot * width;
      for (int64_t i = 0; i < count * width; ++i) out[i] = rows[i] * factor;
      rows += count * width;
    });
  }

  // Adds one number for each of the first keys to those of all slots of all parts.
  template <class T> void add(T* sums, const std::vector<T>& of_keys) const {
    std::vector<int64_t> before(1, 0);
    for (const at::Tensor& part : parts_.k) before.push_back(before.back() + part.size(2));
    each(0, of_keys.size(), [&](const Run& run, int64_t slot, int64_t key, int64_t count) {
      for (int64_t i = 0; i < count; ++i) sums[before[run.part] + slot + i] += of_keys[key + i];
    });
  }

 private:
  // Of a stretch's keys the first query that sees each; null where all see all from the first on.
  const int64_t* from(Stretch keys, Lanes lanes, std::vector<int64_t>& scratch) const {
    if (keys.count == keys.rows() && keys.end() <= past_) return nullptr;
    scratch.assign(keys.rows(), lanes.count);
    std::fill_n(scratch.begin(), std::clamp<int64_t>(past_ - keys.first, 0, keys.count), 0);
    each(std::max(keys.first, past_), keys.end(), [&](const Run&, int64_t slot, int64_t key, int64_t count) {
      for (int64_t i = 0; i < count; ++i) scratch[key - keys.first + i] = lanes_before(slot + i, lanes);
    });
    return scratch.data();
  }

  // The query behind the last one that sees each; null where all see all up to the last.
  const int64_t* until(Stretch keys, Lanes lanes, std::vector<int64_t>& scratch) const {
    if (ends_.empty()) return nullptr;
    scratch.assign(keys.rows(), lanes.count);
    each(keys.first, keys.end(), [&](const Run& run, int64_t slot, int64_t key, int64_t count) {
      const int64_t* until = mask<int64_t>(parts_.seen_until, run.part);
      if (until == nullptr) return;
      for (int64_t i = 0; i < count; ++i) scratch[key - keys.first + i] = lanes_before(until[slot + i], lanes);
    });
    return scratch.data();
  }

  // Finds up to which token each tile is seen.
  void find_ends() {
    ends_.assign(at::ceil_div(count_, TILE), 0);
    each(0, count_, [&](const Run& run, int64_t slot, int64_t key, int64_t count) {
      const int64_t* until = mask<int64_t>(parts_.seen_until, run.part);
      for (int64_t i = 0; i < count; ++i) {
        int64_t& end = ends_[(key + i) / TILE];
        end = std::max(end, until == nullptr ? std::numeric_limits<int64_t>::max() : until[slot + i]);
      }
    });
  }

  // How many of the queries belong to tokens before `token`.
  static int64_t lanes_before(int64_t token, Lanes lanes) {
    return std::clamp<int64_t>((token - lanes.start) * lanes.per_token, 0, lanes.count);
  }

  // What a mask of a part says of this row and head; null without a mask.
  template <class T> const T* mask(const std::vector<at::Tensor>& of, size_t part) const {
    if (!of[part].defined()) return nullptr;
    return of[part].data_ptr<T>() + (head_.b * of[part].size(1) + head_.g) * of[part].size(2);
  }

  void append(size_t part, int64_t slot, int64_t count) {
    if (!runs_.empty() && runs_.back().part == part && runs_.back().slot + runs_.back().count == slot) {
      runs_.back().count += count;
    } else {
      runs_.push_back({part, slot, count_, count});
    }
    count_ += count;
  }

  template <class S> S* head_of(const std::vector<at::Tensor>& of, size_t part) const {
    return data<S>(of[part]) + head_.b * of[part].stride(0) + head_.g * of[part].stride(1);
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
  Head head_;
  int64_t count_ = 0, past_ = 0;
  std::vector<Run> runs_;
  // The token behind the last one that sees a key of each tile; empty where all tokens see all keys before them.
  std::vector<int64_t> ends_;
};

}  // namespace kvtune
