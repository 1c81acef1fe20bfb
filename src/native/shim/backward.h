// The gradients of a chunk's attention, from its output and log-sum-exp.
#pragma once
#include "block.h"
#include "by_head.h"
#include "rows.h"
#include "gemm.h"
#include "softmax.h"

#include <ATen/ops/zeros.h>

namespace kvtune {

template <class S> struct Backward {
  using T = Wide<S>;
  const Shape& s;
  const at::Tensor &dout, &q, &out, &lse;
  const Parts& parts;
  Scoring scoring;
  at::Tensor& dq;
  std::vector<at::Tensor>&dk, &dv;

  Blocks blocks = s.backward();
  // Numbers of one of a block's matrices.
  int64_t matrix() const { return blocks.lanes * s.width; }

  // What each tile needs of a block's queries, and how many keys they see.
  struct Queries {
    Block block;
    int64_t seen;
    T *query, *query_t, *gradient, *gradient_t;
    std::vector<T> lse, delta;
  };

  Queries queries(const Block& block, const Visible& visible, Scratch<T>& scratch) const {
    int64_t d = s.width;
    T *query = scratch.take(matrix()), *query_t = scratch.take(matrix());
    T *gradient = scratch.take(matrix()), *gradient_t = scratch.take(matrix());
    block.gather_both<S>(dout, T(1), gradient, gradient_t);
    // For a moment the output stands where the queries come.
    block.gather<S>(out, T(1), query);
    std::vector<T> delta(block.lanes(), 0);
    add_dots(delta.data(), query, d, gradient, d, block.lanes(), d);
    block.gather_queries<S>(q, scoring.scale, query, query_t);
    int64_t seen = visible.seen_before(block.end());
    return {block, seen, query, query_t, gradient, gradient_t, block.binary_lse<T>(lse), std::move(delta)};
  }

  // A task's tiles: writes their gradients, and adds to that of all the head's queries `dq_t`, (D, lanes) block by block.
  void tiles(const Task& task, T* dq_t, Scratch<T> scratch) const {
    int64_t d = s.width;
    Visible visible(parts, task.head);
    T *x = scratch.take(TILE * blocks.lanes), *dx = scratch.take(TILE * blocks.lanes);
    T *k_rows = scratch.take(TILE * d), *v_rows = scratch.take(TILE * d), *k_t = scratch.take(TILE * d);
    T *dk_rows = scratch.take(TILE * d), *dv_rows = scratch.take(TILE * d);
    std::vector<Queries> all;
    for (int64_t n = 0; n < blocks.count; ++n) all.push_back(queries(Block::of(s, blocks, task.head, n), visible, scratch));
    Sight sight;
    // Where slots are not in use, there are fewer tiles than tasks were made for.
    int64_t end = std::min(task.end(s.tiles()), at::ceil_div(visible.keys(), TILE));
    for (int64_t index = task.begin(s.tiles()); index < end; ++index) {
      Stretch whole = visible.stretch(index, visible.keys());
      auto [k, k_apart] = visible.rows<S>(parts.k, whole, k_rows);
      auto [v, v_apart] = visible.rows<S>(parts.v, whole, v_rows);
      transposed(k_t, TILE, k, k_apart, whole.rows(), d);
      std::fill(dk_rows, dk_rows + TILE * d, T(0));
      std::fill(dv_rows, dv_rows + TILE * d, T(0));
      for (size_t n = 0; n < all.size(); ++n) {
        const Queries& of_block = all[n];
        Stretch keys = visible.stretch(index, of_block.seen);
        if (keys.count <= 0 || !visible.is_seen_from(of_block.block.start, index)) continue;
        int64_t lanes = of_block.block.lanes(), rows = keys.rows();
        multiply({rows, lanes, d}, {k_apart, lanes, lanes}, k, of_block.query_t, x, false);
        scoring.apply(x, rows * lanes);
        multiply({rows, lanes, d}, {v_apart, lanes, lanes}, v, of_block.gradient_t, dx, false);
        Tile tile = visible.tile(keys, rows, {of_block.block.start, s.per_group(), lanes}, sight);
        to_score_gradient(x, dx, of_block.lse.data(), of_block.delta.data(), scoring.most<T>(), tile);
        multiply({rows, d, lanes}, {lanes, d, d}, x, of_block.gradient, dv_rows, true);
        multiply({rows, d, lanes}, {lanes, d, d}, dx, of_block.query, dk_rows, true);
        multiply({d, lanes, rows}, {TILE, lanes, lanes}, k_t, dx, dq_t + n * matrix(), true);
      }
      // The queries carried log2(e) for the powers.
      visible.write(dk, whole, dk_rows, static_cast<T>(1.0 / LOG2_E));
      visible.write(dv, whole, dv_rows, T(1));
    }
  }

  void run() const {
    int64_t numbers = blocks.count * matrix();
    at::Tensor dq_t = at::zeros({s.backward_shared()}, at::dtype<T>());
    T* first = data<T>(dq_t);
    for_tasks<T>(s, blocks.splits, s.backward_task(), [&](const Task& task, Scratch<T> scratch) {
      tiles(task, first + task.index * numbers, scratch);
    });
    share_out(s.all(), threads_for(s.all(), LEAST_WORK / (numbers * blocks.splits)), [&](int64_t index, int64_t) {
      T* sum = first + index * blocks.splits * numbers;
      for (const T* part = sum + numbers; part < sum + blocks.splits * numbers; part += numbers) {
        for (int64_t i = 0; i < numbers; ++i) sum[i] += part[i];
      }
      std::vector<T> factors(blocks.lanes, static_cast<T>(scoring.scale)), rows(matrix());
      for (int64_t n = 0; n < blocks.count; ++n) {
        Block::of(s, blocks, s.head(index), n).scatter<S>(sum + n * matrix(), factors.data(), rows.data(), dq);
      }
    });
  }
};

}  // namespace kvtune
