// Autograd nodes whose backward is a Rust closure, and backward with explicit output gradients.
#include "guarded.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using kvtune::giving;
using kvtune::guarded;
using kvtune::Tensors;

// Gradients in (null = undefined) and out (null = none, else owned by the caller); 0 on success, else a message of at most `len` bytes.
using Callback = int (*)(void* user, at::Tensor** grads_in, size_t num_in, at::Tensor** grads_out, size_t num_out, char* message, size_t len);
using Drop = void (*)(void* user);

struct ClosureNode : torch::autograd::Node {
  Callback callback;
  Drop drop;
  void* user = nullptr;
  std::mutex mutex;

  ClosureNode(Callback callback, Drop drop) : callback(callback), drop(drop) {}

  ~ClosureNode() override { release_variables(); }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex);
    if (user != nullptr) {
      drop(user);
      user = nullptr;
    }
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    std::lock_guard<std::mutex> lock(mutex);
    if (user == nullptr) throw std::runtime_error("backward ran twice through a node that keeps nothing after the first time");
    // Its outputs are the gradients of the operation's inputs.
    std::vector<at::Tensor*> in(grads.size(), nullptr), out(num_outputs(), nullptr);
    for (size_t i = 0; i < grads.size(); ++i) in[i] = grads[i].defined() ? &grads[i] : nullptr;
    char message[1024] = {0};
    int failed = callback(user, in.data(), in.size(), out.data(), out.size(), message, sizeof(message) - 1);
    torch::autograd::variable_list result(out.size());
    for (size_t i = 0; i < out.size(); ++i) {
      if (out[i] == nullptr) continue;
      result[i] = std::move(*out[i]);
      delete out[i];
    }
    if (failed != 0) throw std::runtime_error(message);
    return result;
  }

  std::string name() const override { return "kvtune::ClosureNode"; }
};

Tensors gathered(at::Tensor** tensors, size_t count) {
  Tensors list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) list.push_back(tensors[i] ? *tensors[i] : at::Tensor());
  return list;
}

}  // namespace

extern "C" {

const char* kvtune_last_error() { return kvtune::last_error.c_str(); }

// Takes ownership of `user` in every case: it is dropped with the node, or here on failure.
int kvtune_attach_node(at::Tensor** inputs, size_t num_inputs, at::Tensor** outputs, size_t num_outputs, Callback callback, Drop drop,
                       void* user) {
  std::shared_ptr<ClosureNode> node;
  int rc = guarded([&] { node = std::shared_ptr<ClosureNode>(new ClosureNode(callback, drop), torch::autograd::deleteNode); });
  if (rc != 0) {
    drop(user);
    return rc;
  }
  // Only now: had memory run out for the pointer, the node would have dropped it already.
  node->user = user;
  return guarded([&] {
    auto list = gathered(inputs, num_inputs);
    // As autograd does for every operation: while it is off, or without an input that requires grad, there is no history.
    if (!c10::GradMode::is_enabled() || !torch::autograd::any_variable_requires_grad(list)) return;
    node->set_next_edges(torch::autograd::collect_next_edges(list));
    for (size_t i = 0; i < num_outputs; ++i) torch::autograd::set_history(*outputs[i], node);
  });
}

// Accumulates into the `.grad` of the leaves.
int kvtune_backward(at::Tensor** roots, at::Tensor** grads, size_t count) {
  return guarded([&] { torch::autograd::backward(gathered(roots, count), gathered(grads, count)); });
}

// The `.grad` of a leaf, which has none from then on; null where it had none.
int kvtune_take_gradient(at::Tensor* leaf, at::Tensor** result) {
  return giving(result, [&] { return Tensors{std::exchange(leaf->mutable_grad(), at::Tensor())}; });
}

// `results[i]` receives a new tensor, or null where the roots do not depend on `inputs[i]`.
int kvtune_grad(at::Tensor** roots, at::Tensor** grads, size_t count, at::Tensor** inputs, at::Tensor** results, size_t num_inputs) {
  return giving(results, [&] {
    return torch::autograd::grad(gathered(roots, count), gathered(inputs, num_inputs), gathered(grads, count),
                                 /*retain_graph=*/std::nullopt, /*create_graph=*/false, /*allow_unused=*/true);
  });
}

}  // extern "C"
