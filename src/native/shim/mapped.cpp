// Tensors over memory that Rust owns.
#include "guarded.h"

#include <ATen/ops/from_blob.h>

#include <memory>

using Drop = void (*)(void* user);

extern "C" {

// A tensor of so many bytes. Takes ownership of `user` in every case: it is dropped with the tensor's storage, or here on failure.
int kvtune_bytes_over(void* data, int64_t length, Drop drop, void* user, at::Tensor** result) {
  return kvtune::giving(result, [&] {
    // The one owner, also while memory runs out halfway.
    std::shared_ptr<void> owner(user, drop);
    return kvtune::Tensors{at::from_blob(data, {length}, [owner](void*) {}, at::kByte)};
  });
}

}  // extern "C"
