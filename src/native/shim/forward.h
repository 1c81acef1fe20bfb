// Attention of a chunk: output and log-sum-exp, and where it is asked for the attention mass to each key.
#pragma once
#include "block.h"
#include "by_head.h"
#include "rows.h"
#include "gemm.h"
#include "softmax.h"

#include <cmath>
#include <limits>

namespace kvtune {

template <class S> struct Forward {
  using T = Wide<S>;
  const Shape& s;
  const at::Tensor& q;
  const Parts& parts;
  Scoring scoring;
  at::Tensor &out, &lse;
  // The first token whose attention is summed.
  int64_t from_token;

  // Output and log-sum-exp of a block; adds the attention that its tokens from `from_token` on pay to `sums`, one number for each key.
  // `values` has a tile of values after the other, each (D, TILE).
  void attend(const Block& block, const Visible& visible, const T* values, Scratch<T> scratch, T* sums) const {
    int64_t lanes = block.lanes(), d = s.width, seen = visible.seen_before(block.end());
    T *query = scratch.take(lanes * d), *query_t = scratch.take(lanes * d), *out_t = scratch.take(lanes * d);
    T *rows = scratch.take(TILE * d), *scores = scratch.take(at::round_up(seen, TILE) * lanes);
    block.gather_queries<S>(q, scoring.scale, query, query_t);
    std::vector<T> top(lanes, -std::numeric_limits<T>::infinity()), sum(lanes, 0);
    Sight sight;
    auto each_tile = [&](auto body) {
      visible.each_tile(block.start, seen, [&](Stretch keys) {
        Tile tile = visible.tile(keys, keys.rows(), {block.start, s.per_group(), lanes}, sight);
        body(keys, scores + keys.first * lanes, tile);
      });
    };
    each_tile([&](Stretch keys, T* x, Tile tile) {
      auto [k, apart] = visible.rows<S>(parts.k, keys, rows);
      multiply({tile.keys, lanes, d}, {apart, lanes, lanes}, k, query_t, x, false);
      scoring.apply(x, tile.keys * lanes);
      raise(top.data(), x, tile);
    });
    std::fill(out_t, out_t + lanes * d, T(0));
    each_tile([&](Stretch keys, T* x, Tile tile) {
      to_weights(x, sum.data(), top.data(), tile);
      multiply({d, lanes, tile.keys}, {TILE, lanes, lanes}, values + keys.first * d, x, out_t, true);
    });
    std::vector<T> share(lanes, 0);
    block.each([&](int64_t lane, int64_t h, int64_t token) {
      // Who sees no key at all has nothing to say.
      share[lane] = sum[lane] > 0 || std::isnan(sum[lane]) ? T(1) / sum[lane] : T(0);
      block.number_of<T>(lse, h, token) = (top[lane] + std::log2(sum[lane])) / static_cast<T>(LOG2_E);
    });
    block.scatter<S>(out_t, share.data(), query, out);
    if (block.end() <= from_token) return;
    int64_t first = std::max<int64_t>(0, from_token - block.start) * s.per_group();
    visible.each_tile(block.start, seen, [&](Stretch keys) {
      add_dots(sums + keys.first, scores + keys.first * lanes + first, lanes, share.data() + first, 0, keys.count, lanes - first);
    });
  }

  // The first `count` values, a tile after the other, but for tiles that no token from `start` on sees.
  void gather_values(const Visible& visible, int64_t start, int64_t count, T* values, Scratch<T> scratch) const {
    T* rows = scratch.take(TILE * s.width);
    visible.each_tile(start, count, [&](Stretch keys) {
      auto [v, apart] = visible.rows<S>(parts.v, keys, rows);
      transposed(values + keys.first * s.width, TILE, v, apart, keys.rows(), s.width);
    });
  }

  // `mass (B, G, keys)`, zeros at first, receives the sums, if it is defined.
  void run(at::Tensor& mass) const {
    Blocks blocks = s.forward();
    at::Tensor by_task = sums_by_task(s, blocks.splits, mass);
    for_tasks<T>(s, blocks.splits, s.forward_task(), [&](const Task& task, Scratch<T> scratch) {
      Visible visible(parts, task.head);
      int64_t begin = task.begin(blocks.count), end = task.end(blocks.count);
      int64_t seen = visible.seen_before(Block::of(s, blocks, task.head, end - 1).end());
      T* values = scratch.take(s.width * s.tiles() * TILE);
      gather_values(visible, Block::of(s, blocks, task.head, begin).start, seen, values, scratch);
      std::vector<T> sums(mass.defined() ? seen : 0, 0);
      for (int64_t n = begin; n < end; ++n) attend(Block::of(s, blocks, task.head, n), visible, values, scratch, sums.data());
      if (mass.defined()) visible.add(data<T>(by_task) + task.index * s.keys, sums);
    });
    bring_together(by_task, mass);
  }
};

}  // namespace kvtune
