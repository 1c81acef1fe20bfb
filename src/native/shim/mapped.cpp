// Tensors over memory that Rust owns, and the version of libtorch.
#include <ATen/ops/from_blob.h>
#include <torch/version.h>

using Drop = void (*)(void* user);

extern "C" {

const char* kvtune_libtorch_version() { return TORCH_VERSION; }

// A tensor of so many bytes. Takes ownership of `user` in every case: it is dropped with the tensor's storage, or here on failure (null is
// returned).
at::Tensor* kvtune_bytes_over(void* data, int64_t length, Drop drop, void* user) {
  bool owned_by_tensor = false;
  try {
    auto deleter = [drop, user](void*) { drop(user); };
    at::Tensor over = at::from_blob(data, {length}, deleter, at::kByte);
    owned_by_tensor = true;
    return new at::Tensor(std::move(over));
  } catch (...) {
    if (!owned_by_tensor) drop(user);
    return nullptr;
  }
}

}  // extern "C"
