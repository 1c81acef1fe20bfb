// What attends to what, and how it is cut into blocks and tasks.
#pragma once
#include "keys.h"

#include <algorithm>

namespace kvtune {

// Queries of a block at most, and how many scores of all keys it should have: of many keys fewer queries, but never less than half.
// Keys and values come from memory once for each block, its scores a few times.
constexpr int64_t LANES = 128, BLOCK_SCORES = 1 << 20;

// Multiplications below which another thread is not worth waking.
constexpr int64_t LEAST_WORK = 1 << 18;

// How scores come about: q · k · scale, and where `cap` is not 0 cap · tanh(that / cap).
struct Scoring {
  double scale, cap;

  // Scores of `count` products, of powers of 2 already.
  template <class T> void apply(T* x, int64_t count) const {
    if (cap != 0) kvtune::cap(x, most<T>(), count);
  }
  // What no such score exceeds; 0 where nothing holds it.
  template <class T> T most() const { return static_cast<T>(cap * LOG2_E); }
};

// So many queries of a block with those that fill it up: few sizes, for each has kernels of its own.
inline int64_t padded(int64_t lanes) {
  for (int64_t size : {16, 32, 64}) {
    if (lanes <= size) return size;
  }
  return at::round_up<int64_t>(lanes, 64);
}

// A chunk's queries from token `first` on in blocks of so many tokens and lanes, and into how many tasks a head's work is divided.
struct Blocks {
  int64_t first, tokens, lanes, count, splits;
};

// What attends: a chunk of `tokens` with `heads` query heads, to parts of keys and values with `groups` heads. As `AttentionShape` in Rust.
struct Shape {
  int64_t batch, heads, groups, tokens, width, keys, threads;
  int64_t per_group() const { return heads / groups; }
  // Rows of the batch and their heads of keys.
  int64_t all() const { return batch * groups; }
  // The size of every head's work.
  int64_t work() const { return tokens * per_group() * keys * width; }
  int64_t tiles() const { return at::ceil_div(keys, TILE); }
  // One of all().
  Head head(int64_t index) const { return {index / groups, index % groups}; }
  // Into how many tasks a head is divided, so that every thread has something to do.
  int64_t splits(int64_t at_most) const { return std::min(at_most, at::ceil_div(threads, all())); }
  // Of `divided` tasks a head, how many are worth a thread.
  int64_t grain(int64_t divided) const { return LEAST_WORK * divided / std::max<int64_t>(1, work()); }

  // Blocks of the tokens from `first` on that have scores of so many keys at a time, and as many queries as fit lanes without more room.
  Blocks blocks(int64_t first, int64_t keys_at_a_time) const {
    int64_t lanes = padded(std::clamp(BLOCK_SCORES / std::max<int64_t>(1, keys_at_a_time), LANES / 2, LANES));
    int64_t step = std::min(tokens - first, std::max<int64_t>(1, lanes / per_group()));
    int64_t count = at::ceil_div(tokens - first, step);
    return {first, step, padded(step * per_group()), count, splits(count)};
  }
  Blocks forward() const { return blocks(0, keys); }
  Blocks backward() const {
    Blocks of = blocks(0, TILE);
    of.splits = splits(tiles());
    return of;
  }
  Blocks mass(int64_t first) const { return blocks(first, TILE); }

  // Numbers that a task has of its own, and that all tasks share.
  int64_t forward_task() const {
    int64_t lanes = forward().lanes, padded_keys = tiles() * TILE;
    return width * (padded_keys + 3 * lanes + TILE) + padded_keys * lanes;
  }
  // Where a head is one task, it sums straight into the result.
  int64_t forward_shared() const {
    int64_t splits = forward().splits;
    return splits > 1 ? all() * splits * keys : 0;
  }
  int64_t backward_task() const {
    Blocks of = backward();
    return 4 * of.count * of.lanes * width + 2 * TILE * of.lanes + 5 * TILE * width;
  }
  int64_t backward_shared() const {
    Blocks of = backward();
    return all() * of.splits * of.count * of.lanes * width;
  }
  int64_t mass_task(int64_t first) const {
    int64_t lanes = mass(first).lanes;
    return width * (2 * lanes + TILE) + TILE * lanes;
  }
  // What is needed on all threads that have something to do.
  int64_t forward_numbers() const { return busy(forward()) * forward_task() + forward_shared(); }
  int64_t backward_numbers() const { return busy(backward()) * backward_task() + backward_shared(); }

 private:
  int64_t busy(Blocks of) const { return std::min(threads, all() * of.splits); }
};
static_assert(sizeof(Shape) == 56);

}  // namespace kvtune
