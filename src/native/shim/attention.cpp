// Attention of a chunk to its past and, causally, to itself, on the CPU: forward, backward, and the sums of the attention mass.
//
// Keys are taken in tiles and queries in blocks of some tokens with all heads of a group, so that what is worked on stays in a core's
// cache: scores stand key below key, the queries beside each other. The forward keeps a block's scores of all keys, as sums of the
// attention are made of them; the backward goes through the keys once, and through all queries for each tile. Nothing of the size of
// (queries × keys) is kept. Slots that are not in use are left out when tiles are gathered.
#include "backward.h"
#include "forward.h"
#include "guarded.h"
#include "mass.h"

#include <ATen/Parallel.h>

namespace kvtune {
namespace {

at::Tensor gathered(const at::Tensor& x) {
  TORCH_CHECK(x.dim() == 4, "attention is about tensors of rows, heads, tokens and channels, not of size ", x.sizes());
  TORCH_CHECK(x.is_cpu(), "the CPU's attention got a tensor on ", x.device());
  return with_channels_together(x);
}

at::Tensor mask_of(const at::Tensor* mask) {
  if (mask == nullptr) return {};
  TORCH_CHECK(mask->is_cpu(), "the CPU's attention got a mask on ", mask->device());
  return mask->contiguous();
}

// As in native/kernels.rs; masks may be null.
struct RawPart {
  at::Tensor *k, *v, *in_use, *seen_until;
};
struct RawKeys {
  const RawPart* parts;
  size_t count;
  Scoring scoring;
};

Parts parts_of(const RawKeys& raw) {
  Parts parts;
  for (const RawPart* part = raw.parts; part < raw.parts + raw.count; ++part) {
    parts.k.push_back(gathered(*part->k));
    parts.v.push_back(gathered(*part->v));
    parts.in_use.push_back(mask_of(part->in_use));
    parts.seen_until.push_back(mask_of(part->seen_until));
  }
  return parts;
}

// Everything above reads by these numbers: what does not have them is refused.
Shape shape_of(const at::Tensor& q, const Parts& parts) {
  TORCH_CHECK(!parts.k.empty(), "attention needs keys");
  Shape s{q.size(0), q.size(1), parts.k.back().size(1), q.size(2), q.size(3), 0, at::get_num_threads()};
  bool is_something = s.batch > 0 && s.heads > 0 && s.groups > 0 && s.tokens > 0 && s.width > 0;
  TORCH_CHECK(is_something && s.heads % s.groups == 0, "queries of size ", q.sizes(), " do not fit keys of size ",
              parts.k.back().sizes());
  for (size_t p = 0; p < parts.k.size(); ++p) {
    const at::Tensor &k = parts.k[p], &v = parts.v[p], &in_use = parts.in_use[p];
    bool fits = k.sizes() == v.sizes() && k.size(0) == s.batch && k.size(1) == s.groups && k.size(2) > 0 && k.size(3) == s.width;
    s.keys += k.size(2);
    bool is_alike = k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type();
    TORCH_CHECK(fits && is_alike, "keys of size ", k.sizes(), " and values of size ", v.sizes(), " do not fit queries of size ",
                q.sizes());
    auto fits_mask = [&](const at::Tensor& mask, at::ScalarType kind) {
      return !mask.defined() || (mask.scalar_type() == kind && mask.sizes() == k.sizes().slice(0, 3));
    };
    TORCH_CHECK(fits_mask(in_use, at::kBool), "slots in use do not fit keys of size ", k.sizes());
    TORCH_CHECK(fits_mask(parts.seen_until[p], at::kLong), "the ends of sight do not fit keys of size ", k.sizes());
  }
  TORCH_CHECK(parts.k.back().size(2) == s.tokens, "the last keys are the chunk's own: ", s.tokens, ", not ", parts.k.back().size(2));
  return s;
}

void check_lse(const Shape& s, const at::Tensor& lse, const at::Tensor& q) {
  bool fits = lse.is_cpu() && lse.sizes() == at::IntArrayRef({s.batch, s.heads, s.tokens}) && lse.dtype() == wide_options(q).dtype();
  TORCH_CHECK(fits, "a log-sum-exp of size ", lse.sizes(), " does not fit queries of size ", q.sizes());
}

}  // namespace
}  // namespace kvtune

using namespace kvtune;

extern "C" {

// `results` receives the output, in memory (B, n, H, D), the log-sum-exp, and, unless `from_token` is negative, the attention mass.
int kvtune_attend(at::Tensor* q, const RawKeys* keys, int64_t from_token, at::Tensor** results) {
  return giving(results, [&] {
    Parts parts = parts_of(*keys);
    at::Tensor queries = gathered(*q);
    Shape s = shape_of(queries, parts);
    at::Tensor out = empty_by_token(queries.sizes(), queries);
    at::Tensor lse = at::empty({s.batch, s.heads, s.tokens}, wide_options(queries)), mass;
    if (from_token >= 0) mass = at::zeros({s.batch, s.groups, s.keys}, lse.options());
    BY_KIND(queries, Forward<S>{s, queries, parts, keys->scoring, out, lse, from_token < 0 ? s.tokens : from_token}.run(mass));
    return Tensors{out, lse, mass};
  });
}

// `results` receives dq, then dk of each part, then dv of each part; these two in f32 for bf16.
int kvtune_attend_backward(at::Tensor* dout, at::Tensor* q, const RawKeys* keys, at::Tensor* out, at::Tensor* lse, at::Tensor** results) {
  return giving(results, [&] {
    Parts parts = parts_of(*keys);
    at::Tensor queries = gathered(*q), doutput = gathered(*dout), output = gathered(*out);
    Shape s = shape_of(queries, parts);
    check_lse(s, *lse, queries);
    auto fits = [&](const at::Tensor& x) { return x.sizes() == queries.sizes() && x.scalar_type() == queries.scalar_type(); };
    TORCH_CHECK(fits(output) && fits(doutput), "an output of size ", output.sizes(), " and its gradient of size ", doutput.sizes(),
                " do not fit queries of size ", queries.sizes());
    at::Tensor dq = empty_by_token(queries.sizes(), queries), dense_lse = lse->contiguous();
    Tensors dk, dv;
    for (size_t p = 0; p < keys->count; ++p) {
      // What is not in use, or not seen, has no gradient.
      for (auto* gradients : {&dk, &dv}) {
        gradients->push_back(at::empty(parts.k[p].sizes(), wide_options(queries)));
        if (parts.in_use[p].defined() || parts.seen_until[p].defined()) gradients->back().zero_();
      }
    }
    BY_KIND(queries, Backward<S>{s, doutput, queries, output, dense_lse, parts, keys->scoring, dq, dk, dv}.run());
    Tensors all{dq};
    for (const Tensors& gradients : {dk, dv}) all.insert(all.end(), gradients.begin(), gradients.end());
    return all;
  });
}

int kvtune_attention_mass(at::Tensor* q, const RawKeys* keys, at::Tensor* lse, int64_t first, at::Tensor** result) {
  return giving(result, [&] {
    Parts parts = parts_of(*keys);
    at::Tensor queries = gathered(*q);
    Shape s = shape_of(queries, parts);
    check_lse(s, *lse, queries);
    at::Tensor sums = at::zeros({s.batch, s.groups, s.keys}, wide_options(queries)), dense_lse = lse->contiguous();
    if (first < s.tokens) BY_KIND(queries, Mass<S>{s, queries, dense_lse, parts, keys->scoring, std::max<int64_t>(0, first)}.run(sums));
    return Tensors{sums};
  });
}

int64_t kvtune_attention_scratch(const Shape* shape, int is_backward) {
  Shape s = *shape;
  if (s.batch < 1 || s.tokens < 1 || s.groups < 1 || s.heads < s.groups || s.threads < 1) return 0;
  return is_backward != 0 ? s.backward_numbers() : s.forward_numbers();
}

}  // extern "C"
