// Attention of a chunk: output and log-sum-exp, and where it is asked for the attention paid to each key.
#pragma once
#include "block.h"
#include "gemm.h"
#include "softmax.h"
#include "tasks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

namespace kvtune {

template <class S, class T> struct Forward {
  const Shape& s;
  const at::Tensor& q;
  const Parts& parts;
  double scale;
  at::Tensor &out, &lse;
  // The first token whose attention is summed.
  int64_t paying;

  // Output and log-sum-exp of a block; adds the attention that its tokens from `paying` on pay to `sums`, one number for each key.
  // `values` has a tile of values after the other, each (D, TILE).
  void block(const Block& block, const Visible& visible, const T* values, Scratch<T> scratch, T* sums) const {
    int64_t lanes = block.lanes(), d = s.width, seen = visible.seen_before(block.end());
    T *query = scratch.take(lanes * d), *query_t = scratch.take(lanes * d), *out_t = scratch.take(lanes * d), *rows = scratch.take(TILE * d);
    T* scores = scratch.take(round_up(seen, TILE) * lanes);
    block.gather<S>(q, static_cast<T>(scale * LOG2_E), query);
    transposed(query_t, lanes, query, d, lanes, d);
    std::vector<T> top(lanes, -std::numeric_limits<T>::infinity()), sum(lanes, 0);
    std::vector<int64_t> first;
    auto each_tile = [&](auto body) {
      for (int64_t tile = 0; tile * TILE < seen; ++tile) {
        Stretch keys = visible.stretch(tile, seen);
        body(tile, keys, scores + tile * TILE * lanes, Tile{keys.rows(), lanes, visible.from(keys, block.start, s.per_group(), lanes, first)});
      }
    };
    each_tile([&](int64_t, Stretch keys, T* x, Tile tile) {
      auto [k, apart] = visible.rows<S>(parts.k, keys, rows);
      multiply({tile.keys, lanes, d}, {apart, lanes, lanes}, k, query_t, x, false);
      raise(top.data(), x, tile);
    });
    std::fill(out_t, out_t + lanes * d, T(0));
    each_tile([&](int64_t index, Stretch, T* x, Tile tile) {
      to_weights(x, sum.data(), top.data(), tile);
      multiply({d, lanes, tile.keys}, {TILE, lanes, lanes}, values + index * TILE * d, x, out_t, true);
    });
    std::vector<T> share(lanes, 0);
    block.each([&](int64_t lane, int64_t h, int64_t token) {
      // Who sees no key at all has nothing to say.
      share[lane] = sum[lane] > 0 || std::isnan(sum[lane]) ? T(1) / sum[lane] : T(0);
      lse.data_ptr<T>()[(block.b * s.heads + h) * s.tokens + token] = (top[lane] + std::log2(sum[lane])) / static_cast<T>(LOG2_E);
    });
    block.template scatter<S>(out_t, share.data(), query, out);
    if (block.end() > paying) {
      std::fill_n(share.begin(), std::max<int64_t>(0, paying - block.start) * s.per_group(), T(0));
      each_tile([&](int64_t, Stretch keys, T* x, Tile tile) { add_shares(sums + keys.first, x, share.data(), {keys.count, tile.lanes, tile.from}); });
    }
  }

  // `paid (B, G, keys)` receives the sums, if it is defined.
  void run(at::Tensor& paid) const {
    auto [step, lanes, blocks, splits] = s.forward();
    at::Tensor partial = at::zeros({s.all(), splits, paid.defined() ? s.keys : 0}, lse.options());
    int64_t tasks = s.all() * splits, threads = threads_for(tasks, s.grain(splits));
    at::Tensor memory = at::empty({threads, s.forward_task()}, lse.options());
    share_out(tasks, threads, [&, step = step, blocks = blocks, splits = splits](int64_t task, int64_t thread) {
      int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
      Visible visible(parts, b, g);
      int64_t first = blocks * split / splits, last = blocks * (split + 1) / splits;
      int64_t seen = visible.seen_before(std::min(last * step, s.tokens));
      Scratch<T> scratch(memory.data_ptr<T>() + thread * memory.size(1));
      T* values = scratch.take(s.width * s.tiles() * TILE);
      for (int64_t tile = 0; tile * TILE < seen; ++tile) {
        Scratch<T> rest = scratch;
        Stretch stretch = visible.stretch(tile, seen);
        auto [v, apart] = visible.rows<S>(parts.v, stretch, rest.take(TILE * s.width));
        transposed(values + tile * TILE * s.width, TILE, v, apart, stretch.rows(), s.width);
      }
      std::vector<T> sums(paid.defined() ? seen : 0, 0);
      for (int64_t n = first; n < last; ++n) block({s, b, g, n * step, std::min(step, s.tokens - n * step)}, visible, values, scratch, sums.data());
      if (paid.defined()) visible.add(partial.data_ptr<T>() + task * s.keys, sums.data(), sums.size());
    });
    if (paid.defined()) paid.copy_(partial.sum(1).view(paid.sizes()));
  }
};

// The sums of a group over its heads and the queries from token `first` on.
template <class S, class T> void paid(const Shape& s, const at::Tensor& q, const Parts& parts, const at::Tensor& lse, double scale, int64_t first, at::Tensor& sums) {
  auto [step, most, blocks, splits] = s.blocks(s.tokens - first, TILE);
  at::Tensor partial = at::zeros({s.all(), splits, s.keys}, sums.options());
  int64_t tasks = s.all() * splits, threads = threads_for(tasks, s.grain(splits));
  at::Tensor memory = at::empty({threads, 2 * most * s.width + TILE * (most + s.width)}, sums.options());
  share_out(tasks, threads, [&, step = step, most = most, blocks = blocks, splits = splits](int64_t task, int64_t thread) {
    int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
    Visible visible(parts, b, g);
    Scratch<T> scratch(memory.data_ptr<T>() + thread * memory.size(1));
    T *query = scratch.take(most * s.width), *query_t = scratch.take(most * s.width), *rows = scratch.take(TILE * s.width), *x = scratch.take(TILE * most);
    std::vector<T> of_keys(visible.seen_before(s.tokens), 0);
    std::vector<int64_t> from;
    for (int64_t n = blocks * split / splits; n < blocks * (split + 1) / splits; ++n) {
      int64_t start = first + n * step;
      Block block{s, b, g, start, std::min(step, s.tokens - start)};
      int64_t lanes = block.lanes(), seen = visible.seen_before(block.end());
      block.gather<S>(q, static_cast<T>(scale * LOG2_E), query);
      transposed(query_t, lanes, query, s.width, lanes, s.width);
      std::vector<T> l = block.numbers(lse, static_cast<T>(LOG2_E));
      // Nobody's lanes pay nothing.
      std::fill(l.begin() + block.used(), l.end(), std::numeric_limits<T>::infinity());
      for (int64_t tile = 0; tile * TILE < seen; ++tile) {
        Stretch keys = visible.stretch(tile, seen);
        auto [k, apart] = visible.rows<S>(parts.k, keys, rows);
        multiply({keys.rows(), lanes, s.width}, {apart, lanes, lanes}, k, query_t, x, false);
        add_paid(of_keys.data() + keys.first, x, l.data(), {keys.count, lanes, visible.from(keys, start, s.per_group(), lanes, from)});
      }
    }
    visible.add(partial.data_ptr<T>() + task * s.keys, of_keys.data(), of_keys.size());
  });
  sums.copy_(partial.sum(1).view(sums.sizes()));
}

}  // namespace kvtune
