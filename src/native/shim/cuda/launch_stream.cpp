// The stream on which libtorch's next operation on a CUDA device will run: a kernel launched there waits for what came before.
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guarded.h"

extern "C" int kvtune_launch_stream(int64_t device, void** stream) {
  return kvtune::guarded([&] {
    c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    *stream = guard.getStream(c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device))).native_handle();
  });
}
