// Tensors over memory that Rust owns, and the version of libtorch.
#include "guarded.h"

#include <ATen/ops/from_blob.h>
#include <torch/version.h>

#include <memory>

using Drop = void (*)(void* user);

extern "C" {

const char* kvtune_libtorch_version() { return TORCH_VERSION; }

// A tensor of so many bytes. Takes ownership of `user` in every case: it is dropped with the tensor's storage, or here on failure.
int kvtune_bytes_over(void* data, int64_t length, Drop drop, void* user, at::Tensor** result) {
  return kvtune::giving(result, [&] {
    // The one owner, also while memory runs out halfway.
    std::shared_ptr<void> owner(user, drop);
    return kvtune::Tensors{at::from_blob(data, {length}, [owner](void*) {}, at::kByte)};
  });
}

}  // extern "C"
