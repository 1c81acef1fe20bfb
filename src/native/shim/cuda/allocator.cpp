// What the caching allocators of a device, and of the host memory that it copies by itself, say of themselves.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "../guarded.h"

using kvtune::guarded;

extern "C" {

// Bytes handed out, the most of them, bytes held, the most of them; retries after a failure, and failures.
int kvtune_device_stats(int index, int64_t* out) {
  return guarded([&] {
    auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(index));
    const auto& allocated = stats.allocated_bytes[0];
    const auto& reserved = stats.reserved_bytes[0];
    const int64_t all[] = {allocated.current, allocated.peak, reserved.current, reserved.peak, stats.num_alloc_retries, stats.num_ooms};
    std::copy(std::begin(all), std::end(all), out);
  });
}

int kvtune_device_reset_peak(int index) {
  return guarded([&] { c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(index)); });
}

int kvtune_release_cached_memory() {
  return guarded([] {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache();
    if (auto* host = at::getHostAllocator(c10::DeviceType::CUDA)) host->empty_cache();
  });
}

// Bytes of pinned memory that are held, and the most of them.
int kvtune_pinned_stats(int64_t* out) {
  return guarded([&] {
    auto* allocator = at::getHostAllocator(c10::DeviceType::CUDA);
    TORCH_CHECK(allocator != nullptr, "libtorch's CUDA half is not loaded");
    auto stats = allocator->get_stats();
    out[0] = stats.allocated_bytes.current;
    out[1] = stats.allocated_bytes.peak;
  });
}

}  // extern "C"
