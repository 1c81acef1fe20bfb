// Tensors over memory that Rust owns, and the version of libtorch.
#include <ATen/ops/from_blob.h>
#include <torch/version.h>

#include <memory>

using Drop = void (*)(void* user);

extern "C" {

const char* kvtune_libtorch_version() { return TORCH_VERSION; }

// A tensor of so many bytes. Takes ownership of `user` in every case: it is dropped with the tensor's storage, or here on failure (null is
// returned).
at::Tensor* kvtune_bytes_over(void* data, int64_t length, Drop drop, void* user) {
  try {
    // The one owner, also while memory runs out halfway: a deleter that drops would have done so already when `catch` is reached.
    std::shared_ptr<void> owner(user, drop);
    return new at::Tensor(at::from_blob(data, {length}, [owner](void*) {}, at::kByte));
  } catch (...) {
    return nullptr;
  }
}

}  // extern "C"
