// Attention of a chunk to its past and, causally, to itself, on the CPU: forward, backward, and the sums of the attention paid.
//
// Keys are taken in tiles and queries in blocks of some tokens with all heads of a group, so that what is worked on stays in a core's
// cache: scores stand key below key, the queries beside each other. The forward keeps a block's scores of all keys, as sums of the
// attention are made of them; the backward goes through the keys once, and through all queries for each tile. Nothing of the size of
// (queries × keys) is kept. Slots that are not in use are left out when tiles are gathered.
#include "gemm.h"
#include "guarded.h"
#include "keys.h"
#include "powers.h"
#include "softmax.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <dlfcn.h>

#include <cmath>
#include <limits>

namespace kvtune {
namespace {

// Queries of a block at most, and how many scores of all keys it should have: of many keys fewer queries, but never less than a quarter.
constexpr int64_t LANES = 128, BLOCK_SCORES = 1 << 18;

// Multiplications below which another thread is not worth waking.
constexpr int64_t LEAST_WORK = 1 << 18;

// So many queries of a block with those that fill it up: few sizes, for each has kernels of its own.
int64_t padded(int64_t lanes) {
  for (int64_t size : {16, 32, 64}) {
    if (lanes <= size) return size;
  }
  return (lanes + 63) / 64 * 64;
}

// Within a parallel region every product runs on its own thread alone.
void one_thread_each() {
  using Set = void (*)(int);
  static const Set set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set != nullptr && at::in_parallel_region()) set(1);
}

// Runs `body(task)` for each task of about `work` multiplications, in parallel where there are threads and enough to do.
template <class F> void for_tasks(int64_t count, int64_t work, F body) {
  at::parallel_for(0, count, std::max<int64_t>(1, LEAST_WORK / std::max<int64_t>(1, work)), [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    one_thread_each();
    for (int64_t task = begin; task < end; ++task) body(task);
  });
}

int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

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
  int64_t splits(int64_t at_most) const { return all() % threads == 0 ? 1 : std::min(at_most, (2 * threads + all() - 1) / all()); }

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

template <class S> S* token_of(const at::Tensor& x, int64_t b, int64_t h, int64_t token) {
  return x.data_ptr<S>() + b * x.stride(0) + h * x.stride(1) + token * x.stride(2);
}

// Tokens [start, start + tokens) of a group's queries. Lane i · heads + r is token i's head r; the last lanes may be nobody's.
struct Block {
  const Shape& s;
  int64_t b, g, start, tokens;

  int64_t used() const { return tokens * s.per_group(); }
  int64_t lanes() const { return padded(used()); }
  int64_t end() const { return start + tokens; }

  // Calls `body(lane, head, token)` for each lane in use.
  template <class F> void each(F body) const {
    for (int64_t i = 0; i < tokens; ++i) {
      for (int64_t r = 0; r < s.per_group(); ++r) body(i * s.per_group() + r, g * s.per_group() + r, start + i);
    }
  }

  // x (B, H, n, D) times a factor as (lanes, D).
  template <class S, class T> void gather(const at::Tensor& x, T factor, T* to) const {
    each([&](int64_t lane, int64_t h, int64_t token) {
      const S* from = token_of<S>(x, b, h, token);
      for (int64_t d = 0; d < s.width; ++d) to[lane * s.width + d] = static_cast<T>(from[d]) * factor;
    });
    std::fill(to + used() * s.width, to + lanes() * s.width, T(0));
  }

  // The way back, from (D, lanes) by way of `rows` (lanes, D), with a factor for each lane.
  template <class S, class T> void scatter(const T* from, const T* factors, T* rows, const at::Tensor& x) const {
    transposed(rows, s.width, from, lanes(), s.width, lanes());
    each([&](int64_t lane, int64_t h, int64_t token) {
      S* to = token_of<S>(x, b, h, token);
      for (int64_t d = 0; d < s.width; ++d) to[d] = static_cast<S>(rows[lane * s.width + d] * factors[lane]);
    });
  }

  // One number for each lane of x (B, H, n); 0 where a lane is nobody's.
  template <class T> std::vector<T> numbers(const at::Tensor& x, T factor) const {
    std::vector<T> to(lanes(), T(0));
    each([&](int64_t lane, int64_t h, int64_t token) { to[lane] = x.data_ptr<T>()[(b * s.heads + h) * s.tokens + token] * factor; });
    return to;
  }
};

// The memory of a task, handed out piece by piece.
template <class T> class Scratch {
 public:
  explicit Scratch(int64_t numbers) : memory_(at::empty({numbers}, at::TensorOptions(c10::CppTypeToScalarType<T>::value))), next_(memory_.data_ptr<T>()) {}
  T* take(int64_t numbers) {
    T* taken = next_;
    next_ += numbers;
    return taken;
  }

 private:
  at::Tensor memory_;
  T* next_;
};

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
    for_tasks(s.all() * splits, s.work() / splits, [&, step = step, blocks = blocks, splits = splits](int64_t task) {
      int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
      Visible visible(parts, b, g);
      int64_t first = blocks * split / splits, last = blocks * (split + 1) / splits;
      int64_t seen = visible.seen_before(std::min(last * step, s.tokens));
      Scratch<T> scratch(s.forward_task());
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
  for_tasks(s.all() * splits, s.work() / splits, [&, step = step, most = most, blocks = blocks, splits = splits](int64_t task) {
    int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
    Visible visible(parts, b, g);
    Scratch<T> scratch(2 * most * s.width + TILE * (most + s.width));
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
  void tiles(int64_t b, int64_t g, int64_t first, int64_t last, T* dq_t) const {
    int64_t d = s.width;
    Visible visible(parts, b, g);
    Scratch<T> scratch(s.backward_task());
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
    for_tasks(s.all() * of.splits, s.work() / of.splits, [&](int64_t task) {
      int64_t split = task % of.splits, g = task / of.splits % s.groups, b = task / of.splits / s.groups;
      tiles(b, g, s.tiles() * split / of.splits, s.tiles() * (split + 1) / of.splits, first + task * numbers);
    });
    for_tasks(s.all(), numbers * of.splits, [&](int64_t head) {
      T* sum = first + head * of.splits * numbers;
      for (const T* part = sum + numbers; part < sum + of.splits * numbers; part += numbers) {
        for (int64_t i = 0; i < numbers; ++i) sum[i] += part[i];
      }
      std::vector<T> factors(of.lanes, static_cast<T>(scale)), rows(matrix());
      for (int64_t n = 0; n < of.count; ++n) block(head / s.groups, head % s.groups, n).template scatter<S>(sum + n * matrix(), factors.data(), rows.data(), dq);
    });
  }
};

// Channels of a token must stand together; tokens, heads and rows may lie anywhere.
at::Tensor gathered(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 4, "attention is about tensors of rows, heads, tokens and channels, not of size ", x.sizes());
  return x.stride(3) == 1 ? x : x.contiguous();
}

Parts parts_of(at::Tensor** k, at::Tensor** v, at::Tensor** in_use, size_t count) {
  Parts parts;
  for (size_t i = 0; i < count; ++i) {
    parts.k.push_back(gathered(*k[i]));
    parts.v.push_back(gathered(*v[i]));
    parts.in_use.push_back(in_use[i] == nullptr ? at::Tensor() : in_use[i]->contiguous());
  }
  return parts;
}

// Everything above reads by these numbers: what does not have them is refused.
Shape shape_of(const at::Tensor& q, const Parts& parts) {
  TORCH_CHECK(!parts.k.empty(), "attention needs keys");
  Shape s{q.size(0), q.size(1), parts.k.back().size(1), q.size(2), q.size(3), 0, at::get_num_threads()};
  TORCH_CHECK(s.tokens > 0 && s.groups > 0 && s.heads % s.groups == 0, "queries of size ", q.sizes(), " do not fit keys of size ", parts.k.back().sizes());
  for (size_t p = 0; p < parts.k.size(); ++p) {
    const at::Tensor &k = parts.k[p], &v = parts.v[p], &in_use = parts.in_use[p];
    bool fits = k.sizes() == v.sizes() && k.size(0) == s.batch && k.size(1) == s.groups && k.size(2) > 0 && k.size(3) == s.width;
    TORCH_CHECK(fits && k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "keys of size ", k.sizes(), " and values of size ", v.sizes(), " do not fit queries of size ", q.sizes());
    TORCH_CHECK(!in_use.defined() || (in_use.scalar_type() == at::kBool && in_use.sizes() == k.sizes().slice(0, 3)), "slots in use of size ", in_use.sizes(), " do not fit keys of size ", k.sizes());
    s.keys += k.size(2);
  }
  TORCH_CHECK(parts.k.back().size(2) == s.tokens, "the last keys are the chunk's own: ", s.tokens, ", not ", parts.k.back().size(2));
  return s;
}

at::TensorOptions wide(const at::Tensor& x) {
  return at::TensorOptions(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

void check_lse(const Shape& s, const at::Tensor& lse, const at::Tensor& q) {
  TORCH_CHECK(lse.sizes() == at::IntArrayRef({s.batch, s.heads, s.tokens}) && lse.dtype() == wide(q).dtype(), "a log-sum-exp of size ", lse.sizes(), " does not fit queries of size ", q.sizes());
}

}  // namespace
}  // namespace kvtune

// Runs with S, the kind of queries, keys and values, and T, in which it is computed.
#define BY_KIND(tensor, ...)                                                \
  do {                                                                      \
    switch ((tensor).scalar_type()) {                                       \
      case at::kFloat: { using S = float; using T = float; __VA_ARGS__; break; }                \
      case at::kDouble: { using S = double; using T = double; __VA_ARGS__; break; }             \
      case at::kBFloat16: { using S = at::BFloat16; using T = float; __VA_ARGS__; break; }      \
      default: TORCH_CHECK(false, "the CPU's attention is for f32, f64 and bf16"); \
    }                                                                       \
  } while (false)

using namespace kvtune;

extern "C" {

// q (B, H, n, D); keys and values (B, G, ., D) of `parts` parts, the chunk's own last, and which slots are in use (B, G, .), or null;
// `results` receives new tensors: the output (B, H, n, D), in memory (B, n, H, D), the log-sum-exp (B, H, n), and, unless `paying`
// is negative, the attention paid by the tokens from `paying` on (B, G, all keys), summed over them and the heads of a group.
int kvtune_attend(at::Tensor* q, at::Tensor** k, at::Tensor** v, at::Tensor** in_use, size_t count, double scale, int64_t paying, at::Tensor** results) {
  return kvtune::guarded([&] {
    Parts parts = parts_of(k, v, in_use, count);
    at::Tensor queries = gathered(*q);
    Shape s = shape_of(queries, parts);
    at::Tensor out = at::empty({s.batch, s.tokens, s.heads, s.width}, queries.options().memory_format(std::nullopt)).transpose(1, 2);
    at::Tensor lse = at::empty({s.batch, s.heads, s.tokens}, wide(queries)), paid;
    if (paying >= 0) paid = at::empty({s.batch, s.groups, s.keys}, lse.options());
    BY_KIND(queries, Forward<S, T>{s, queries, parts, scale, out, lse, paying < 0 ? s.tokens : paying}.run(paid));
    results[0] = new at::Tensor(std::move(out));
    results[1] = new at::Tensor(std::move(lse));
    if (paid.defined()) results[2] = new at::Tensor(std::move(paid));
  });
}

// `results` receives dq, then dk of each part, then dv of each part; these two in f32 for bf16.
int kvtune_attend_backward(at::Tensor* dout, at::Tensor* q, at::Tensor** k, at::Tensor** v, at::Tensor** in_use, size_t count, at::Tensor* out,
                           at::Tensor* lse, double scale, at::Tensor** results) {
  return kvtune::guarded([&] {
    Parts parts = parts_of(k, v, in_use, count);
    at::Tensor queries = gathered(*q), doutput = gathered(*dout), output = gathered(*out);
    Shape s = shape_of(queries, parts);
    check_lse(s, *lse, queries);
    TORCH_CHECK(doutput.sizes() == queries.sizes() && output.sizes() == queries.sizes() && doutput.scalar_type() == queries.scalar_type() && output.scalar_type() == queries.scalar_type(), "an output of size ", output.sizes(), " and its gradient of size ", doutput.sizes(), " do not fit queries of size ", queries.sizes());
    at::Tensor dq = at::empty({s.batch, s.tokens, s.heads, s.width}, queries.options().memory_format(std::nullopt)).transpose(1, 2);
    std::vector<at::Tensor> dk, dv;
    for (size_t p = 0; p < count; ++p) {
      // What is not in use has no gradient.
      auto made = [&] { return parts.in_use[p].defined() ? at::zeros(parts.k[p].sizes(), wide(queries)) : at::empty(parts.k[p].sizes(), wide(queries)); };
      dk.push_back(made());
      dv.push_back(made());
    }
    at::Tensor dense_lse = lse->contiguous();
    BY_KIND(queries, Backward<S, T>{s, doutput, queries, output, dense_lse, parts, scale, dq, dk, dv, s.backward()}.run());
    results[0] = new at::Tensor(std::move(dq));
    for (size_t p = 0; p < count; ++p) {
      results[1 + p] = new at::Tensor(std::move(dk[p]));
      results[1 + count + p] = new at::Tensor(std::move(dv[p]));
    }
  });
}

// Sums over the heads of a group and the queries from token `first` on (B, G, all keys).
int kvtune_attention_paid(at::Tensor* q, at::Tensor** k, at::Tensor** in_use, size_t count, at::Tensor* lse, double scale, int64_t first, at::Tensor** result) {
  return kvtune::guarded([&] {
    Parts parts = parts_of(k, k, in_use, count);
    at::Tensor queries = gathered(*q);
    Shape s = shape_of(queries, parts);
    check_lse(s, *lse, queries);
    at::Tensor sums = at::zeros({s.batch, s.groups, s.keys}, wide(queries));
    at::Tensor dense_lse = lse->contiguous();
    if (first < s.tokens) BY_KIND(queries, paid<S, T>(s, queries, parts, dense_lse, scale, std::max<int64_t>(0, first), sums));
    *result = new at::Tensor(std::move(sums));
  });
}

// Numbers that attention has for a moment beside its inputs and results.
int64_t kvtune_attention_scratch(int64_t batch, int64_t heads, int64_t groups, int64_t tokens, int64_t width, int64_t keys, int64_t threads, int is_backward) {
  Shape s{batch, heads, groups, tokens, width, keys, std::max<int64_t>(1, threads)};
  if (tokens < 1 || groups < 1 || heads < groups) return 0;
  Blocks of = is_backward != 0 ? s.backward() : s.forward();
  int64_t busy = std::min(s.threads, s.all() * of.splits);
  return is_backward != 0 ? busy * s.backward_task() + s.backward_shared() : busy * s.forward_task() + s.all() * of.splits * keys;
}

}  // extern "C"
