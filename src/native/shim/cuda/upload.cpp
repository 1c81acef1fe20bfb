// Bytes of the host on their way to a device, through stretches of pinned memory.
#include "../guarded.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <optional>

extern "C" {

// Copies `bytes` from `from` into the contiguous tensor `to`, through two stretches by turns: while one is on its way, the other is
// filled. All has arrived when it returns.
int kvtune_upload(const uint8_t* from, int64_t bytes, at::Tensor* to, at::Tensor* const* stretches) {
  return kvtune::guarded([&] {
    c10::Device device = to->device();
    bool has_stream = !device.is_cpu();
    at::Tensor flat = to->view({-1}).view(at::kByte);
    std::optional<c10::Event> arrived[2];
    int64_t length = stretches[0]->numel();
    for (int64_t start = 0, turn = 0; start < bytes; start += length, turn ^= 1) {
      int64_t count = std::min(length, bytes - start);
      if (arrived[turn].has_value()) arrived[turn]->synchronize();
      std::memcpy(stretches[turn]->mutable_data_ptr(), from + start, count);
      flat.narrow(0, start, count).copy_(stretches[turn]->narrow(0, 0, count), true);
      if (!has_stream) continue;
      arrived[turn].emplace(device.type());
      arrived[turn]->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
    for (std::optional<c10::Event>& event : arrived) {
      if (event.has_value()) event->synchronize();
    }
  });
}

}  // extern "C"
