// Tensors over memory that Rust owns, and the version of libtorch.
#include <ATen/ops/from_blob.h>
#include <torch/version.h>

using Drop = void (*)(void* user);

extern "C" {

const char* kvtune_libtorch_version() { return TORCH_VERSION; }

// Takes ownership of `user` in every case: it is dropped with the tensor's storage, or here on failure (null is returned).
at::Tensor* kvtune_tensor_over(void* data, const int64_t* size, size_t ndim, int kind, Drop drop, void* user) {
  bool owned_by_tensor = false;
  try {
    auto deleter = [drop, user](void*) { drop(user); };
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(kind)).device(at::kCPU);
    at::Tensor over = at::from_blob(data, at::IntArrayRef(size, ndim), deleter, options);
    owned_by_tensor = true;
    return new at::Tensor(std::move(over));
  } catch (...) {
    if (!owned_by_tensor) drop(user);
    return nullptr;
  }
}

}  // extern "C"
