// The attention mass to each key, by queries whose log-sum-exp is known.
#pragma once
#include "block.h"
#include "by_head.h"
#include "gemm.h"
#include "softmax.h"

#include <limits>

namespace kvtune {

template <class S> struct Mass {
  using T = Wide<S>;
  const Shape& s;
  const at::Tensor &q, &lse;
  const Parts& parts;
  Scoring scoring;
  // The first token whose attention is summed.
  int64_t from_token;

  // Adds what a block's queries give to `sums`, one number for each key.
  void add(const Block& block, const Visible& visible, Scratch<T> scratch, T* sums) const {
    int64_t lanes = block.lanes(), d = s.width;
    T *query = scratch.take(lanes * d), *query_t = scratch.take(lanes * d);
    T *rows = scratch.take(TILE * d), *x = scratch.take(TILE * lanes);
    block.gather_queries<S>(q, scoring.scale, query, query_t);
    std::vector<T> l = block.binary_lse<T>(lse);
    // Lanes without a query give nothing.
    std::fill(l.begin() + block.used(), l.end(), std::numeric_limits<T>::infinity());
    Sight sight;
    visible.each_tile(block.start, visible.seen_before(block.end()), [&](Stretch keys) {
      auto [k, apart] = visible.rows<S>(parts.k, keys, rows);
      multiply({keys.rows(), lanes, d}, {apart, lanes, lanes}, k, query_t, x, false);
      scoring.apply(x, keys.rows() * lanes);
      Tile tile = visible.tile(keys, keys.count, {block.start, s.per_group(), lanes}, sight);
      add_mass(sums + keys.first, x, l.data(), tile);
    });
  }

  // `mass (B, G, keys)`, zeros at first, receives the sums over the heads of a group and the queries from token `from_token` on.
  void run(at::Tensor& mass) const {
    Blocks blocks = s.mass(from_token);
    at::Tensor by_task = sums_by_task(s, blocks.splits, mass);
    for_tasks<T>(s, blocks.splits, s.mass_task(from_token), [&](const Task& task, Scratch<T> scratch) {
      Visible visible(parts, task.head);
      std::vector<T> sums(visible.keys(), 0);
      for (int64_t n = task.begin(blocks.count); n < task.end(blocks.count); ++n) {
        add(Block::of(s, blocks, task.head, n), visible, scratch, sums.data());
      }
      visible.add(data<T>(by_task) + task.index * s.keys, sums);
    });
    bring_together(by_task, mass);
  }
};

}  // namespace kvtune
