// Counts what libtorch's allocators hand out to one thread and take back from it.
#include "guarded.h"

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>

// jemalloc's, where it is linked in.
extern "C" int mallctl(const char* name, void* old, size_t* old_size, void* value, size_t size) __attribute__((weak));

// What a step frees the next one needs again. Given back to the system by time, as jemalloc does of itself, it would have to be zeroed anew:
// a tenth of a long step. And a large free extent serves any request, where jemalloc would map fresh memory beside it.
extern "C" const char* malloc_conf;
const char* malloc_conf = "dirty_decay_ms:-1,lg_extent_max_active_fit:40";

namespace {

// Of the host alone: allocators of devices have statistics of their own.
struct Meter : c10::MemoryReportingInfoBase {
  mutable std::mutex mutex;
  int64_t live = 0, peak = 0;

  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device where) override {
    if (!where.is_cpu()) return;
    std::lock_guard<std::mutex> lock(mutex);
    live += size;
    peak = std::max(peak, live);
  }

  bool memoryProfilingEnabled() const override { return true; }
};

using Shared = std::shared_ptr<Meter>;
constexpr auto kind = c10::DebugInfoKind::PROFILER_STATE;

}  // namespace

extern "C" {

int kvtune_meter_start(Shared** out) {
  return kvtune::guarded([&] {
    auto meter = std::make_shared<Meter>();
    c10::ThreadLocalDebugInfo::_push(kind, meter);
    *out = new Shared(meter);
  });
}

void kvtune_meter_read(const Shared* handle, int64_t* out) {
  const Meter& meter = **handle;
  std::lock_guard<std::mutex> lock(meter.mutex);
  out[0] = meter.live;
  out[1] = meter.peak;
}

void kvtune_meter_reset_peak(const Shared* handle) {
  Meter& meter = **handle;
  std::lock_guard<std::mutex> lock(meter.mutex);
  meter.peak = meter.live;
}

void kvtune_meter_stop(Shared* handle) {
  // It fails where another profiler was begun in between and not ended: that stands in front of this one, which then goes on for nobody.
  kvtune::guarded([] { c10::ThreadLocalDebugInfo::_pop(kind); });
  delete handle;
}

// Of all arenas: MALLCTL_ARENAS_ALL is 4096.
void kvtune_give_free_memory_back() {
  if (mallctl != nullptr) mallctl("arena.4096.purge", nullptr, nullptr, nullptr, 0);
}

}  // extern "C"
