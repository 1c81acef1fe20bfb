// What attends to what, and how it is cut into blocks and tasks.
#pragma once
#include "keys.h"

#include <algorithm>

namespace kvtune {

// Queries of a block at most, and how many scores of all keys it should have: of many keys fewer queries, but never less than a quarter.
constexpr int64_t LANES = 128, BLOCK_SCORES = 1 << 18;

// Multiplications below which another thread is not worth waking.
constexpr int64_t LEAST_WORK = 1 << 18;

// So many queries of a block with those that fill it up: few sizes, for each has kernels of its own.
inline int64_t padded(int64_t lanes) {
  for (int64_t size : {16, 32, 64}) {
    if (lanes <= size) return size;
  }
  return (lanes + 63) / 64 * 64;
}

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Queries of a block at a time, and how they are divided among tasks.
struct Blocks {
  // Tokens and lanes of a block, how many there are, and into how many tasks a head's work is divided.
  int64_t tokens, lanes, count, splits;
};

// What attends: a chunk of `tokens` with `heads` query heads, to parts of keys and values with `groups` heads.
struct Shape {
  int64_t batch, heads, groups, tokens, width, keys, threads;
  int64_t per_group() const { return heads / groups; }
  // Rows of the batch and their heads of keys.
  int64_t all() const { return batch * groups; }
  // The size of every head's work.
  int64_t work() const { return tokens * per_group() * keys * width; }
  int64_t tiles() const { return (keys + TILE - 1) / TILE; }
  // Into how many tasks a head is divided, so that every thread has something to do.
  int64_t splits(int64_t at_most) const { return std::min(at_most, (threads + all() - 1) / all()); }
  // Of `divided` tasks a head, how many are worth a thread.
  int64_t grain(int64_t divided) const { return LEAST_WORK * divided / std::max<int64_t>(1, work()); }

  // Blocks of `count` tokens that have scores of so many keys at a time.
  Blocks blocks(int64_t count, int64_t keys_at_a_time) const {
    int64_t lanes = std::clamp(BLOCK_SCORES / std::max<int64_t>(1, keys_at_a_time), LANES / 4, LANES);
    int64_t step = std::min(count, std::max<int64_t>(1, lanes / per_group()));
    int64_t blocks = (count + step - 1) / step;
    return {step, padded(step * per_group()), blocks, splits(blocks)};
  }
  Blocks forward() const { return blocks(tokens, keys); }
  Blocks backward() const {
    Blocks all_blocks = blocks(tokens, TILE);
    all_blocks.splits = splits(tiles());
    return all_blocks;
  }

  // Numbers that a task has of its own, and that all tasks share.
  int64_t forward_task() const {
    int64_t lanes = forward().lanes, padded_keys = tiles() * TILE;
    return width * (padded_keys + 3 * lanes + TILE) + padded_keys * lanes;
  }
  int64_t backward_task() const {
    Blocks of = backward();
    return 4 * of.count * of.lanes * width + 2 * TILE * of.lanes + 5 * TILE * width;
  }
  int64_t backward_shared() const {
    Blocks of = backward();
    return all() * of.splits * of.count * of.lanes * width;
  }
};

}  // namespace kvtune
