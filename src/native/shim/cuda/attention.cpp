// The attention kernels that come with libtorch, each with its log-sum-exp: one part of keys at a time. All but one are for CUDA; they
// are reached through libtorch's dispatcher, so that nothing here needs CUDA's headers or libraries to be built.
#include "../guarded.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_cudnn_attention_backward.h>
#include <ATen/ops/_cudnn_attention_forward.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>

namespace {

using at::Tensor;
using kvtune::giving;
using kvtune::Tensors;

// As in `TorchKernelMask` of native/cuda/attention.rs, and as the memory-efficient kernel numbers them.
enum Mask { ALL = 0, CAUSAL = 1, CAUSAL_FROM_END = 2 };

// Queries (B, H, n, D), keys and values (B, G, P, D), of one kind and place.
struct Part {
  Tensor q, k, v;
  Mask sight;
  double scale;

  int64_t tokens() const { return q.size(2); }
  int64_t keys() const { return k.size(2); }
  int64_t per_group() const { return q.size(1) / k.size(1); }
};

Part checked(const Tensor& q, const Tensor& k, const Tensor& v, int sight, double scale) {
  TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.sizes() == k.sizes(), "attention is of four dimensions, not of sizes ", q.sizes(), ", ", k.sizes(), " and ", v.sizes());
  TORCH_CHECK(k.size(2) > 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0, "queries of size ", q.sizes(), " do not fit keys of size ", k.sizes());
  TORCH_CHECK(sight != CAUSAL || k.size(2) == q.size(2), "a causal part is a square, not ", q.size(2), " queries by ", k.size(2), " keys");
  TORCH_CHECK(sight != CAUSAL_FROM_END || k.size(2) >= q.size(2), "the last ", q.size(2), " of ", k.size(2), " keys are not there");
  return Part{q, k, v, static_cast<Mask>(sight), scale};
}

// Heads and tokens change places, as the kernels that come from elsewhere want them: (B, tokens, heads, D), and back.
Tensor turned(const Tensor& x) { return x.transpose(1, 2); }

// The last dimension in one piece; other strides may be anything.
Tensor dense(const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

namespace flash {

std::tuple<Tensor, Tensor> forward(const Part& p) {
  auto made = at::_flash_attention_forward(turned(dense(p.q)), turned(dense(p.k)), turned(dense(p.v)), std::nullopt, std::nullopt, p.tokens(),
                                           p.keys(), 0.0, p.sight != ALL, false, p.scale);
  return {turned(std::get<0>(made)), std::get<1>(made)};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Part& p, const Tensor& dout, const Tensor& out, const Tensor& lse) {
  // States of a generator that nothing is drawn from, so that nobody reads them.
  Tensor state = at::empty({2}, p.q.options().dtype(at::kUInt64)), unused = at::empty({}, state.options()), none;
  auto [dq, dk, dv] =
      at::_flash_attention_backward(turned(dout), turned(dense(p.q)), turned(dense(p.k)), turned(dense(p.v)), turned(out), lse.contiguous(), none,
                                    none, p.tokens(), p.keys(), 0.0, p.sight != ALL, state, unused, p.scale);
  return {turned(dq), turned(dk), turned(dv)};
}

}  // namespace flash

namespace efficient {

// Of the log-sum-exps: the backward reads them in whole blocks.
constexpr int64_t ALIGNMENT = 32;

// It knows no groups: each query head gets keys of its own.
Tensor for_each_head(const Part& p, const Tensor& x) {
  return turned(dense(p.per_group() == 1 ? x : x.repeat_interleave(p.per_group(), 1)));
}

std::tuple<Tensor, Tensor> forward(const Part& p) {
  auto made = at::_efficient_attention_forward(turned(dense(p.q)), for_each_head(p, p.k), for_each_head(p, p.v), std::nullopt, std::nullopt,
                                               std::nullopt, std::nullopt, std::nullopt, 0.0, p.sight, true, p.scale);
  return {turned(std::get<0>(made)), std::get<1>(made).narrow(2, 0, p.tokens())};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Part& p, const Tensor& dout, const Tensor& out, const Tensor& lse) {
  int64_t padded = (p.tokens() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  Tensor whole = at::empty({p.q.size(0), p.q.size(1), padded}, lse.options());
  whole.narrow(2, 0, p.tokens()).copy_(lse);
  whole.narrow(2, p.tokens(), padded - p.tokens()).fill_(std::numeric_limits<float>::infinity());
  Tensor state = at::empty({}, p.q.options().dtype(at::kLong));
  auto splits = at::globalContext().deterministicAlgorithms() ? std::optional<int64_t>(1) : std::nullopt;
  auto made = at::_efficient_attention_backward(turned(dout).contiguous(), turned(dense(p.q)), for_each_head(p, p.k), for_each_head(p, p.v),
                                                std::nullopt, turned(out).contiguous(), std::nullopt, std::nullopt, p.tokens(), p.keys(), whole, 0.0,
                                                state, state, p.sight, false, p.scale, splits);
  auto of_group = [&](const Tensor& grad) {
    Tensor heads = turned(grad);
    return p.per_group() == 1 ? heads : heads.reshape({p.k.size(0), p.k.size(1), p.per_group(), p.keys(), p.k.size(3)}).sum(2);
  };
  return {turned(std::get<0>(made)), of_group(std::get<1>(made)), of_group(std::get<2>(made))};
}

}  // namespace efficient

namespace cudnn {

Part checked(const Part& p) {
  TORCH_CHECK(p.sight != CAUSAL_FROM_END || p.keys() == p.tokens(), "cuDNN's causal mask begins at the first key");
  return Part{dense(p.q), dense(p.k), dense(p.v), p.sight, p.scale};
}

std::tuple<Tensor, Tensor> forward(const Part& given) {
  Part p = checked(given);
  auto made = at::_cudnn_attention_forward(p.q, p.k, p.v, std::nullopt, std::nullopt, std::nullopt, p.tokens(), p.keys(), true, 0.0,
                                           p.sight != ALL, false, p.scale);
  return {std::get<0>(made), std::get<1>(made).view({p.q.size(0), p.q.size(1), p.tokens()})};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Part& given, const Tensor& dout, const Tensor& out, const Tensor& lse) {
  Part p = checked(given);
  // State of a generator that nothing is drawn from, so that nobody reads it.
  Tensor state = at::empty({}, p.q.options().dtype(at::kLong)), none;
  return at::_cudnn_attention_backward(dout.contiguous(), p.q, p.k, p.v, out.contiguous(), lse.contiguous().unsqueeze(-1), state, state, none,
                                       none, none, p.tokens(), p.keys(), 0.0, p.sight != ALL, p.scale);
}

}  // namespace cudnn

// For tests of what is made of parts, where there is no GPU.
namespace cpu {

std::optional<Tensor> mask(const Part& p) {
  if (p.sight != CAUSAL_FROM_END) return std::nullopt;
  Tensor later = at::ones({p.tokens(), p.keys()}, p.q.options().dtype(at::kBool)).tril(p.keys() - p.tokens()).logical_not();
  return at::zeros({p.tokens(), p.keys()}, p.q.options()).masked_fill(later, -std::numeric_limits<double>::infinity());
}

std::tuple<Tensor, Tensor> forward(const Part& p) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(p.q, p.k, p.v, 0.0, p.sight == CAUSAL, mask(p), p.scale);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Part& p, const Tensor& dout, const Tensor& out, const Tensor& lse) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(dout, p.q, p.k, p.v, out, lse, 0.0, p.sight == CAUSAL, mask(p), p.scale);
}

}  // namespace cpu

// By the numbers of `TorchKernel` in native/cuda/attention.rs.
constexpr struct {
  std::tuple<Tensor, Tensor> (*forward)(const Part&);
  std::tuple<Tensor, Tensor, Tensor> (*backward)(const Part&, const Tensor& dout, const Tensor& out, const Tensor& lse);
} KERNELS[] = {
    {flash::forward, flash::backward},
    {efficient::forward, efficient::backward},
    {cudnn::forward, cudnn::backward},
    {cpu::forward, cpu::backward},
};

}  // namespace

extern "C" {

int kvtune_vendor_attend(int kernel, Tensor* q, Tensor* k, Tensor* v, int sight, double scale, Tensor** results) {
  return giving(results, [&] {
    auto [out, lse] = KERNELS[kernel].forward(checked(*q, *k, *v, sight, scale));
    return Tensors{out, lse};
  });
}

int kvtune_vendor_attend_backward(int kernel, const std::array<Tensor*, 6>* inputs, int sight, double scale, Tensor** results) {
  return giving(results, [&] {
    auto [dout, q, k, v, out, lse] = *inputs;
    auto [dq, dk, dv] = KERNELS[kernel].backward(checked(*q, *k, *v, sight, scale), *dout, *out, *lse);
    return Tensors{dq, dk, dv};
  });
}

}  // extern "C"
