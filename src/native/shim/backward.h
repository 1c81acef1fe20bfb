// The gradients of a chunk's attention, from its output and log-sum-exp.
#pragma once
#include "block.h"
#include "gemm.h"
#include "softmax.h"
#include "tasks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace kvtune {

template <class S, class T> struct Backward {
  const Shape& s;
  const at::Tensor &dout, &q, &out, &lse;
  const Parts& parts;
  double scale;
  at::Tensor& dq;
  std::vector<at::Tensor>&dk, &dv;

  Blocks of;
  // Numbers of one of a block's matrices.
  int64_t matrix() const { return of.lanes * s.width; }
  Block block(int64_t b, int64_t g, int64_t n) const { return {s, b, g, n * of.tokens, std::min(of.tokens, s.tokens - n * of.tokens)}; }

  // What each tile needs of a block's queries.
  struct Queries {
    Block block;
    T *query, *query_t, *gradient, *gradient_t;
    std::vector<T> lse, delta;
  };

  Queries queries(const Block& block, Scratch<T>& scratch) const {
    int64_t lanes = block.lanes(), d = s.width;
    T *query = scratch.take(matrix()), *query_t = scratch.take(matrix()), *gradient = scratch.take(matrix()), *gradient_t = scratch.take(matrix());
    // For a moment the output stands where the transposed queries come.
    block.gather<S>(out, T(1), query_t);
    block.gather<S>(dout, T(1), gradient);
    std::vector<T> delta(lanes, 0);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      for (int64_t i = 0; i < d; ++i) delta[lane] += query_t[lane * d + i] * gradient[lane * d + i];
    }
    block.gather<S>(q, static_cast<T>(scale * LOG2_E), query);
    transposed(query_t, lanes, query, d, lanes, d);
    transposed(gradient_t, lanes, gradient, d, lanes, d);
    return {block, query, query_t, gradient, gradient_t, block.numbers(lse, static_cast<T>(LOG2_E)), std::move(delta)};
  }

  // Tiles [first, last) of a head: writes their gradients, and adds to that of all queries `dq_t`, (D, lanes) block by block.
  void tiles(int64_t b, int64_t g, int64_t first, int64_t last, T* dq_t, Scratch<T> scratch) const {
    int64_t d = s.width;
    Visible visible(parts, b, g);
    T *x = scratch.take(TILE * of.lanes), *dx = scratch.take(TILE * of.lanes);
    T *k_rows = scratch.take(TILE * d), *v_rows = scratch.take(TILE * d), *k_t = scratch.take(TILE * d), *dk_rows = scratch.take(TILE * d), *dv_rows = scratch.take(TILE * d);
    std::vector<Queries> all;
    for (int64_t n = 0; n < of.count; ++n) all.push_back(queries(block(b, g, n), scratch));
    std::vector<int64_t> from;
    for (int64_t index = first; index < std::min(last, visible.tiles()); ++index) {
      Stretch whole = visible.stretch(index, visible.seen_before(s.tokens));
      auto [k, k_apart] = visible.rows<S>(parts.k, whole, k_rows);
      auto [v, v_apart] = visible.rows<S>(parts.v, whole, v_rows);
      transposed(k_t, TILE, k, k_apart, whole.rows(), d);
      std::fill(dk_rows, dk_rows + TILE * d, T(0));
      std::fill(dv_rows, dv_rows + TILE * d, T(0));
      for (size_t n = 0; n < all.size(); ++n) {
        const Queries& from_block = all[n];
        Stretch keys = visible.stretch(index, visible.seen_before(from_block.block.end()));
        if (keys.count <= 0) continue;
        int64_t lanes = from_block.block.lanes(), rows = keys.rows();
        multiply({rows, lanes, d}, {k_apart, lanes, lanes}, k, from_block.query_t, x, false);
        multiply({rows, lanes, d}, {v_apart, lanes, lanes}, v, from_block.gradient_t, dx, false);
        to_score_gradient(x, dx, from_block.lse.data(), from_block.delta.data(), {rows, lanes, visible.from(keys, from_block.block.start, s.per_group(), lanes, from)});
        multiply({rows, d, lanes}, {lanes, d, d}, x, from_block.gradient, dv_rows, true);
        multiply({rows, d, lanes}, {lanes, d, d}, dx, from_block.query, dk_rows, true);
        multiply({d, lanes, rows}, {TILE, lanes, lanes}, k_t, dx, dq_t + n * matrix(), true);
      }
      // The queries carried log2(e) for the powers.
      visible.write(dk, whole, dk_rows, static_cast<T>(1.0 / LOG2_E));
      visible.write(dv, whole, dv_rows, T(1));
    }
  }

  void run() const {
    int64_t numbers = of.count * matrix();
    at::Tensor dq_t = at::zeros({s.backward_shared()}, lse.options());
    T* first = dq_t.data_ptr<T>();
    int64_t tasks = s.all() * of.splits, threads = threads_for(tasks, s.grain(of.splits));
    at::Tensor memory = at::empty({threads, s.backward_task()}, lse.options());
    share_out(tasks, threads, [&](int64_t task, int64_t thread) {
      int64_t split = task % of.splits, g = task / of.splits % s.groups, b = task / of.splits / s.groups;
      tiles(b, g, s.tiles() * split / of.splits, s.tiles() * (split + 1) / of.splits, first + task * numbers,
            Scratch<T>(memory.data_ptr<T>() + thread * memory.size(1)));
    });
    share_out(s.all(), threads_for(s.all(), LEAST_WORK / (numbers * of.splits)), [&](int64_t head, int64_t) {
      T* sum = first + head * of.splits * numbers;
      for (const T* part = sum + numbers; part < sum + of.splits * numbers; part += numbers) {
        for (int64_t i = 0; i < numbers; ++i) sum[i] += part[i];
      }
      std::vector<T> factors(of.lanes, static_cast<T>(scale)), rows(matrix());
      for (int64_t n = 0; n < of.count; ++n) block(head / s.groups, head % s.groups, n).template scatter<S>(sum + n * matrix(), factors.data(), rows.data(), dq);
    });
  }
};

}  // namespace kvtune
