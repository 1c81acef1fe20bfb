// Attention of a chunk to its past and, causally, to itself, on the CPU: forward, backward, and the sums of the attention paid.
//
// Queries are taken in blocks of some tokens with all heads of a group, so that a block's scores of all keys stay in a core's cache
// (of very many keys they do not, but never fewer than 32 tokens are taken: a product of fewer is slower still) and every product is
// one of matrices. Scores become weights in one pass over them; nothing of the size of (queries × keys) is kept.
#include "guarded.h"
#include "product.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VARIANTS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VARIANTS
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr double LOG2_E = 1.4426950408889634074;

// How 2^x is made in a kind: the number whose addition rounds to an integer (1.5 · 2^mantissa), the exponent's bias and place, the
// integer of the same size, and the last term of the series that is not below the rounding.
template <class T> struct Powers;
template <> struct Powers<float> {
  using Bits = int32_t;
  static constexpr float SHIFT = 12582912.f;
  static constexpr int BIAS = 127, MANTISSA = 23, TERMS = 7;
};
template <> struct Powers<double> {
  using Bits = int64_t;
  static constexpr double SHIFT = 6755399441055744.0;
  static constexpr int BIAS = 1023, MANTISSA = 52, TERMS = 13;
};

// Taylor series of 2^f: ln(2)^k / k!.
constexpr double SERIES[] = {1.0,
                             6.9314718055994531e-1,
                             2.4022650695910072e-1,
                             5.5504108664821580e-2,
                             9.6181291076284772e-3,
                             1.3333558146428443e-3,
                             1.5403530393381609e-4,
                             1.5252733804059841e-5,
                             1.3215486790144309e-6,
                             1.0178086009239700e-7,
                             7.0549116208011233e-9,
                             4.4455382718708114e-10,
                             2.5678435993488202e-11,
                             1.3691488853904128e-12};

// Its terms from the k-th on, over f^k.
template <class T, int k> INLINE T series_from(T f) {
  if constexpr (k == Powers<T>::TERMS) {
    return static_cast<T>(SERIES[k]);
  } else {
    return series_from<T, k + 1>(f) * f + static_cast<T>(SERIES[k]);
  }
}

// 2^x for x at most a little above 0; 0 below the smallest normal number. Rounds to a whole power and expands the rest, |f| <= 1/2.
template <class T> INLINE T power(T x) {
  using P = Powers<T>;
  constexpr T least = 1 - P::BIAS;
  T held = x < least ? least : x;
  T whole = (held + P::SHIFT) - P::SHIFT;
  typename P::Bits bits = (static_cast<typename P::Bits>(whole) + P::BIAS) << P::MANTISSA;
  T scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < least ? T(0) : series_from<T, 0>(held - whole) * scale;
}

template <class T> INLINE T largest_of(const T* x, int64_t n) {
  T most = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// x becomes 2^(x - top); the sum of it is returned.
template <class T> INLINE T weights_of(T* x, int64_t n, T top) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    T w = power(x[i] - top);
    x[i] = w;
    sum += w;
  }
  return sum;
}

// paid += 2^(x - lse).
template <class T> INLINE void pay(T* paid, const T* x, int64_t n, T lse) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) paid[i] += power(x[i] - lse);
}

// sums += factor · x.
template <class T> INLINE void add_times(T* sums, const T* x, int64_t n, T factor) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) sums[i] += factor * x[i];
}

// x becomes the weights 2^(x - lse), and dx, which was the gradient of the weights, that of the scores.
template <class T> INLINE void scores_back(T* x, T* dx, int64_t n, T lse, T delta) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    T w = power(x[i] - lse);
    x[i] = w;
    dx[i] = w * (dx[i] - delta);
  }
}

#define FOR_KIND(T)                                                                                            \
  VARIANTS T largest(const T* x, int64_t n) { return largest_of<T>(x, n); }                                    \
  VARIANTS T to_weights(T* x, int64_t n, T top) { return weights_of<T>(x, n, top); }                           \
  VARIANTS void add_paid(T* paid, const T* x, int64_t n, T lse) { pay<T>(paid, x, n, lse); }                   \
  VARIANTS void add_weighted(T* sums, const T* x, int64_t n, T factor) { add_times<T>(sums, x, n, factor); }    \
  VARIANTS void to_score_gradient(T* x, T* dx, int64_t n, T lse, T delta) { scores_back<T>(x, dx, n, lse, delta); }
FOR_KIND(float)
FOR_KIND(double)
#undef FOR_KIND

// Scores of one block of queries that should stay in a core's cache, and tokens of a block at least and at most: fewer make the
// product slow, and more waste it above the diagonal.
constexpr int64_t BLOCK_SCORES = 1 << 18;
constexpr int64_t LEAST_TOKENS = 32, MOST_TOKENS = 128;

int64_t tokens_of_block(int64_t tokens, int64_t heads_of_group, int64_t keys) {
  int64_t fit = BLOCK_SCORES / std::max<int64_t>(1, heads_of_group * keys);
  return std::min(tokens, std::clamp(fit, LEAST_TOKENS, MOST_TOKENS));
}

// Within a parallel region every product runs on its own thread alone.
void one_thread_each() {
  using Set = void (*)(int);
  static const Set set = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set != nullptr && at::in_parallel_region()) set(1);
}

// Multiplications below which another thread is not worth waking.
constexpr int64_t LEAST_WORK = 1 << 18;

// Runs `body(task)` for each task of about `work` multiplications, in parallel where there are threads and enough to do. What a task
// does is the same on any number of threads.
template <class F> void for_tasks(int64_t count, int64_t work, F body) {
  at::parallel_for(0, count, std::max<int64_t>(1, LEAST_WORK / std::max<int64_t>(1, work)), [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    one_thread_each();
    for (int64_t task = begin; task < end; ++task) body(task);
  });
}

// One head of one row of a tensor (B, heads, tokens, D): tokens may be apart, the channels of one stand together.
template <class T> struct Head {
  T* data;
  int64_t stride;
  T* token(int64_t i) const { return data + i * stride; }
};

template <class T> Head<T> head_of(const at::Tensor& x, int64_t b, int64_t h) {
  return {x.data_ptr<T>() + b * x.stride(0) + h * x.stride(1), x.stride(2)};
}

// The keys or values of one head (tokens, D).
at::Tensor matrix_of(const at::Tensor& x, int64_t b, int64_t g, int64_t tokens) {
  return x.select(0, b).select(0, g).narrow(0, 0, tokens);
}

// What attends: a chunk of n tokens with H query heads, to `parts` of keys and values with G heads, the last of which is its own.
struct Shape {
  int64_t batch, heads, groups, tokens, width, parts;
  int64_t per_group() const { return heads / groups; }
};

// A block of a group's queries, tokens [start, start + tokens) with all their heads, row by row.
template <class T> struct Block {
  int64_t start, tokens, rows;
  at::Tensor query;  // (rows, D), times scale · log2(e)

  Block(const Shape& s, const at::Tensor& q, int64_t b, int64_t g, int64_t start, int64_t tokens, double factor)
      : start(start), tokens(tokens), rows(tokens * s.per_group()) {
    query = at::empty({rows, s.width}, q.options().memory_format(std::nullopt));
    T* to = query.data_ptr<T>();
    for (int64_t r = 0; r < s.per_group(); ++r) {
      Head<T> head = head_of<T>(q, b, g * s.per_group() + r);
      for (int64_t i = 0; i < tokens; ++i) {
        const T* from = head.token(start + i);
        T* row = to + (i * s.per_group() + r) * s.width;
        for (int64_t d = 0; d < s.width; ++d) row[d] = from[d] * static_cast<T>(factor);
      }
    }
  }
};

// How many keys of a part a query sees: all of the past, and those of its own chunk up to itself.
int64_t seen(bool is_own, int64_t keys, int64_t token) { return is_own ? token + 1 : keys; }
// And how many of them some query of a block sees.
int64_t seen_by_block(bool is_own, int64_t keys, int64_t start, int64_t tokens) { return is_own ? start + tokens : keys; }

// How often the blocks of a head are split up, so that every thread has something to do.
int64_t splits_of(const Shape& s, int64_t blocks) {
  int64_t heads = s.batch * s.groups;
  return std::min(blocks, (4 * at::get_num_threads() + heads - 1) / heads);
}

int64_t all_keys(at::TensorList k) {
  int64_t keys = 0;
  for (const auto& part : k) keys += part.size(2);
  return keys;
}

template <class T> struct Forward {
  const Shape& s;
  const at::Tensor& q;
  at::TensorList k, v;
  double scale;
  at::Tensor &out, &lse;
  // The first token whose attention is summed.
  int64_t paying;

  // Output and log-sum-exp of a block; adds the attention that its tokens from `paying` on pay to `sums`, one number for each key.
  void block(int64_t b, int64_t g, int64_t start, int64_t tokens, T* sums) const {
    Block<T> block(s, q, b, g, start, tokens, scale * LOG2_E);
    std::vector<at::Tensor> scores(s.parts);
    std::vector<T> top(block.rows, -std::numeric_limits<T>::infinity()), sum(block.rows, 0);
    for (int64_t p = 0; p < s.parts; ++p) {
      bool own = p + 1 == s.parts;
      int64_t width = seen_by_block(own, k[p].size(2), start, tokens);
      scores[p] = kvtune::product(block.query, matrix_of(k[p], b, g, width));
      const T* x = scores[p].data_ptr<T>();
      for (int64_t r = 0; r < block.rows; ++r) top[r] = std::max(top[r], largest(x + r * width, seen(own, width, start + r / s.per_group())));
    }
    at::Tensor product;
    for (int64_t p = 0; p < s.parts; ++p) {
      bool own = p + 1 == s.parts;
      int64_t width = scores[p].size(1);
      T* x = scores[p].data_ptr<T>();
      for (int64_t r = 0; r < block.rows; ++r) {
        int64_t visible = seen(own, width, start + r / s.per_group());
        sum[r] += to_weights(x + r * width, visible, top[r]);
        std::fill(x + r * width + visible, x + (r + 1) * width, T(0));
      }
      at::Tensor part = kvtune::product(scores[p], matrix_of(v[p], b, g, width).t());
      if (product.defined()) product.add_(part); else product = part;
    }
    const T* from = product.data_ptr<T>();
    for (int64_t r = 0; r < block.rows; ++r) {
      int64_t h = g * s.per_group() + r % s.per_group(), i = start + r / s.per_group();
      T* to = head_of<T>(out, b, h).token(i);
      T inverse = T(1) / sum[r];
      for (int64_t d = 0; d < s.width; ++d) to[d] = from[r * s.width + d] * inverse;
      lse.data_ptr<T>()[(b * s.heads + h) * s.tokens + i] = (top[r] + std::log2(sum[r])) / static_cast<T>(LOG2_E);
    }
    for (int64_t p = 0; p < s.parts && start + tokens > paying; ++p) {
      int64_t width = scores[p].size(1);
      const T* x = scores[p].data_ptr<T>();
      for (int64_t r = std::max<int64_t>(0, paying - start) * s.per_group(); r < block.rows; ++r) add_weighted(sums, x + r * width, width, T(1) / sum[r]);
      sums += k[p].size(2);
    }
  }

  // `paid (B, G, keys)` receives the sums, if it is defined.
  void run(at::Tensor& paid) const {
    int64_t keys = all_keys(k), step = tokens_of_block(s.tokens, s.per_group(), keys), blocks = (s.tokens + step - 1) / step;
    int64_t splits = splits_of(s, blocks);
    at::Tensor partial = at::zeros({s.batch * s.groups, splits, paid.defined() ? keys : 0}, lse.options());
    for_tasks(s.batch * s.groups * splits, s.tokens * s.per_group() * keys * s.width / splits, [&](int64_t task) {
      int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
      for (int64_t n = blocks * split / splits; n < blocks * (split + 1) / splits; ++n) {
        block(b, g, n * step, std::min(step, s.tokens - n * step), partial.data_ptr<T>() + task * partial.size(2));
      }
    });
    if (paid.defined()) paid.copy_(partial.sum(1).view(paid.sizes()));
  }
};

// The sums of a group over its heads and the queries from token `first` on.
template <class T> void paid(const Shape& s, const at::Tensor& q, at::TensorList k, const at::Tensor& lse, double scale, int64_t first, at::Tensor& sums) {
  int64_t keys = sums.size(2), count = s.tokens - first;
  int64_t step = tokens_of_block(count, s.per_group(), keys), blocks = (count + step - 1) / step, splits = splits_of(s, blocks);
  at::Tensor partial = at::zeros({s.batch * s.groups, splits, keys}, sums.options());
  for_tasks(s.batch * s.groups * splits, count * s.per_group() * keys * s.width / splits, [&](int64_t task) {
    int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
    T* to = partial.data_ptr<T>() + task * keys;
    for (int64_t n = blocks * split / splits; n < blocks * (split + 1) / splits; ++n) {
      int64_t start = first + n * step;
      Block<T> block(s, q, b, g, start, std::min(step, s.tokens - start), scale * LOG2_E);
      int64_t before = 0;
      for (int64_t p = 0; p < s.parts; ++p) {
        bool own = p + 1 == s.parts;
        int64_t width = seen_by_block(own, k[p].size(2), start, block.tokens);
        at::Tensor scores = kvtune::product(block.query, matrix_of(k[p], b, g, width));
        for (int64_t r = 0; r < block.rows; ++r) {
          int64_t h = g * s.per_group() + r % s.per_group(), i = start + r / s.per_group();
          T l = lse.data_ptr<T>()[(b * s.heads + h) * s.tokens + i] * static_cast<T>(LOG2_E);
          add_paid(to + before, scores.data_ptr<T>() + r * width, seen(own, width, i), l);
        }
        before += k[p].size(2);
      }
    }
  });
  sums.copy_(partial.sum(1).view(sums.sizes()));
}

template <class T> struct Backward {
  const Shape& s;
  const at::Tensor &dout, &q, &out, &lse;
  at::TensorList k, v;
  double scale;
  at::Tensor& dq;

  // Adds a block's part to the transposed gradients (D, keys) of each part's keys and values, and writes its dq.
  void block(int64_t b, int64_t g, int64_t start, int64_t tokens, std::vector<at::Tensor>& dk, std::vector<at::Tensor>& dv) const {
    Block<T> block(s, q, b, g, start, tokens, scale * LOG2_E), gradient(s, dout, b, g, start, tokens, 1.0);
    int64_t rows = block.rows;
    std::vector<T> l(rows), delta(rows);
    for (int64_t r = 0; r < rows; ++r) {
      int64_t h = g * s.per_group() + r % s.per_group(), i = start + r / s.per_group();
      l[r] = lse.data_ptr<T>()[(b * s.heads + h) * s.tokens + i] * static_cast<T>(LOG2_E);
      const T *from = head_of<T>(out, b, h).token(i), *with = gradient.query.template data_ptr<T>() + r * s.width;
      T sum = 0;
      for (int64_t d = 0; d < s.width; ++d) sum += from[d] * with[d];
      delta[r] = sum;
    }
    at::Tensor query_t = block.query.t().contiguous(), gradient_t = gradient.query.t().contiguous(), own_dq;
    for (int64_t p = 0; p < s.parts; ++p) {
      bool own = p + 1 == s.parts;
      int64_t width = seen_by_block(own, k[p].size(2), start, tokens);
      at::Tensor keys = matrix_of(k[p], b, g, width);
      at::Tensor scores = kvtune::product(block.query, keys), dscores = kvtune::product(gradient.query, matrix_of(v[p], b, g, width));
      T *x = scores.data_ptr<T>(), *dx = dscores.data_ptr<T>();
      for (int64_t r = 0; r < rows; ++r) {
        int64_t visible = seen(own, width, start + r / s.per_group());
        to_score_gradient(x + r * width, dx + r * width, visible, l[r], delta[r]);
        std::fill(x + r * width + visible, x + (r + 1) * width, T(0));
        std::fill(dx + r * width + visible, dx + (r + 1) * width, T(0));
      }
      dv[p].narrow(1, 0, width).add_(kvtune::product(gradient_t, scores.t()));
      dk[p].narrow(1, 0, width).add_(kvtune::product(query_t, dscores.t()));
      at::Tensor part = kvtune::product(dscores, keys.t());
      if (own_dq.defined()) own_dq.add_(part); else own_dq = part;
    }
    for (int64_t r = 0; r < rows; ++r) {
      T* to = head_of<T>(dq, b, g * s.per_group() + r % s.per_group()).token(start + r / s.per_group());
      const T* from = own_dq.data_ptr<T>() + r * s.width;
      for (int64_t d = 0; d < s.width; ++d) to[d] = from[d] * static_cast<T>(scale);
    }
  }

  void run(at::TensorList dk_out, at::TensorList dv_out) const {
    int64_t keys = all_keys(k), step = tokens_of_block(s.tokens, s.per_group(), keys), blocks = (s.tokens + step - 1) / step;
    int64_t splits = std::min<int64_t>(blocks, std::max<int64_t>(1, at::get_num_threads() / (s.batch * s.groups)));
    using Parts = std::vector<at::Tensor>;
    std::vector<Parts> dk(s.batch * s.groups * splits), dv(s.batch * s.groups * splits);
    for_tasks(s.batch * s.groups * splits, s.tokens * s.per_group() * keys * s.width / splits, [&](int64_t task) {
      int64_t split = task % splits, g = task / splits % s.groups, b = task / splits / s.groups;
      for (const auto& part : k) {
        dk[task].push_back(at::zeros({s.width, part.size(2)}, lse.options()));
        dv[task].push_back(at::zeros({s.width, part.size(2)}, lse.options()));
      }
      for (int64_t n = blocks * split / splits; n < blocks * (split + 1) / splits; ++n) block(b, g, n * step, std::min(step, s.tokens - n * step), dk[task], dv[task]);
    });
    for_tasks(s.batch * s.groups, keys * s.width, [&](int64_t head) {
      int64_t g = head % s.groups, b = head / s.groups;
      for (int64_t p = 0; p < s.parts; ++p) {
        at::Tensor &k_sum = dk[head * splits][p], &v_sum = dv[head * splits][p];
        for (int64_t split = 1; split < splits; ++split) {
          k_sum.add_(dk[head * splits + split][p]);
          v_sum.add_(dv[head * splits + split][p]);
        }
        // The queries carried log2(e) for the powers.
        matrix_of(dk_out[p], b, g, k_sum.size(1)).copy_(k_sum.t()).mul_(1.0 / LOG2_E);
        matrix_of(dv_out[p], b, g, v_sum.size(1)).copy_(v_sum.t());
      }
    });
  }
};

// Channels of a token must stand together; tokens, heads and rows may lie anywhere.
at::Tensor gathered(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 4, "attention is about tensors of rows, heads, tokens and channels, not of size ", x.sizes());
  return x.stride(3) == 1 ? x : x.contiguous();
}

std::vector<at::Tensor> gathered(at::Tensor** tensors, size_t count) {
  std::vector<at::Tensor> list;
  for (size_t i = 0; i < count; ++i) list.push_back(gathered(*tensors[i]));
  return list;
}

// Everything below reads by these numbers: what does not have them is refused.
Shape shape_of(const at::Tensor& q, at::TensorList k, at::TensorList v) {
  TORCH_CHECK(!k.empty() && k.size() == v.size(), "attention needs keys and as many values");
  Shape s{q.size(0), q.size(1), k.back().size(1), q.size(2), q.size(3), static_cast<int64_t>(k.size())};
  TORCH_CHECK(s.tokens > 0 && s.groups > 0 && s.heads % s.groups == 0, "queries of size ", q.sizes(), " do not fit keys of size ", k.back().sizes());
  for (size_t p = 0; p < k.size(); ++p) {
    bool fits = k[p].sizes() == v[p].sizes() && k[p].size(0) == s.batch && k[p].size(1) == s.groups && k[p].size(2) > 0 && k[p].size(3) == s.width;
    TORCH_CHECK(fits && k[p].scalar_type() == q.scalar_type() && v[p].scalar_type() == q.scalar_type(), "keys of size ", k[p].sizes(), " and values of size ", v[p].sizes(), " do not fit queries of size ", q.sizes());
  }
  TORCH_CHECK(k.back().size(2) == s.tokens, "the last keys are the chunk's own: ", s.tokens, ", not ", k.back().size(2));
  return s;
}

void check_lse(const Shape& s, const at::Tensor& lse, const at::Tensor& q) {
  TORCH_CHECK(lse.sizes() == at::IntArrayRef({s.batch, s.heads, s.tokens}) && lse.scalar_type() == q.scalar_type(), "a log-sum-exp of size ", lse.sizes(), " does not fit queries of size ", q.sizes());
}

}  // namespace

#define BY_KIND(tensor, ...)                                   \
  do {                                                         \
    if ((tensor).scalar_type() == at::kFloat) {                \
      using T = float;                                         \
      __VA_ARGS__;                                             \
    } else if ((tensor).scalar_type() == at::kDouble) {        \
      using T = double;                                        \
      __VA_ARGS__;                                             \
    } else {                                                   \
      TORCH_CHECK(false, "the CPU's attention is for f32 and f64"); \
    }                                                          \
  } while (false)

extern "C" {

// q (B, H, n, D); keys and values (B, G, ., D) of `parts` parts, the chunk's own last; `results` receives new tensors: the output
// (B, H, n, D), in memory (B, n, H, D), the log-sum-exp (B, H, n), and, unless `paying` is negative, the attention paid by
// the tokens from `paying` on (B, G, all keys), summed over them and the heads of a group.
int kvtune_attend(at::Tensor* q, at::Tensor** k, at::Tensor** v, size_t parts, double scale, int64_t paying, at::Tensor** results) {
  return kvtune::guarded([&] {
    auto keys = gathered(k, parts), values = gathered(v, parts);
    at::Tensor queries = gathered(*q);
    Shape s = shape_of(queries, keys, values);
    at::Tensor out = at::empty({s.batch, s.tokens, s.heads, s.width}, queries.options().memory_format(std::nullopt)).transpose(1, 2);
    at::Tensor lse = at::empty({s.batch, s.heads, s.tokens}, out.options()), paid;
    if (paying >= 0) paid = at::empty({s.batch, s.groups, all_keys(keys)}, out.options());
    BY_KIND(queries, Forward<T>{s, queries, keys, values, scale, out, lse, paying < 0 ? s.tokens : paying}.run(paid));
    results[0] = new at::Tensor(std::move(out));
    results[1] = new at::Tensor(std::move(lse));
    if (paid.defined()) results[2] = new at::Tensor(std::move(paid));
  });
}

// `results` receives dq, then dk of each part, then dv of each part.
int kvtune_attend_backward(at::Tensor* dout, at::Tensor* q, at::Tensor** k, at::Tensor** v, size_t parts, at::Tensor* out, at::Tensor* lse,
                           double scale, at::Tensor** results) {
  return kvtune::guarded([&] {
    auto keys = gathered(k, parts), values = gathered(v, parts);
    at::Tensor queries = gathered(*q), doutput = gathered(*dout), output = gathered(*out);
    Shape s = shape_of(queries, keys, values);
    check_lse(s, *lse, queries);
    TORCH_CHECK(doutput.sizes() == queries.sizes() && output.sizes() == queries.sizes() && doutput.scalar_type() == queries.scalar_type() && output.scalar_type() == queries.scalar_type(), "an output of size ", output.sizes(), " and its gradient of size ", doutput.sizes(), " do not fit queries of size ", queries.sizes());
    at::Tensor dq = at::empty({s.batch, s.tokens, s.heads, s.width}, queries.options().memory_format(std::nullopt)).transpose(1, 2);
    std::vector<at::Tensor> dk, dv;
    for (const auto& part : keys) {
      dk.push_back(at::empty(part.sizes(), dq.options()));
      dv.push_back(at::empty(part.sizes(), dq.options()));
    }
    at::Tensor dense_lse = lse->contiguous();
    BY_KIND(queries, Backward<T>{s, doutput, queries, output, dense_lse, keys, values, scale, dq}.run(dk, dv));
    results[0] = new at::Tensor(std::move(dq));
    for (size_t p = 0; p < parts; ++p) {
      results[1 + p] = new at::Tensor(std::move(dk[p]));
      results[1 + parts + p] = new at::Tensor(std::move(dv[p]));
    }
  });
}

// Tokens of a block of queries.
int64_t kvtune_attention_block(int64_t tokens, int64_t heads_of_group, int64_t keys) { return tokens_of_block(tokens, heads_of_group, keys); }

// Sums over the heads of a group and the queries from token `first` on (B, G, all keys).
int kvtune_attention_paid(at::Tensor* q, at::Tensor** k, size_t parts, at::Tensor* lse, double scale, int64_t first, at::Tensor** result) {
  return kvtune::guarded([&] {
    auto keys = gathered(k, parts);
    at::Tensor queries = gathered(*q);
    Shape s = shape_of(queries, keys, keys);
    check_lse(s, *lse, queries);
    at::Tensor sums = at::zeros({s.batch, s.groups, all_keys(keys)}, queries.options().memory_format(std::nullopt));
    at::Tensor dense_lse = lse->contiguous();
    if (first < s.tokens) BY_KIND(queries, paid<T>(s, queries, keys, dense_lse, scale, std::max<int64_t>(0, first), sums));
    *result = new at::Tensor(std::move(sums));
  });
}

}  // extern "C"
