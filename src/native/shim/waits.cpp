// Counts the operations that make the host wait for a device, by a callback of libtorch's before each operation, and by CUDA's own
// warnings where they can be had.
#include "waits.h"
#include "guarded.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>

namespace {

using kvtune::Wait;
constexpr size_t kinds = static_cast<size_t>(Wait::count);
// A place that libtorch leaves to tests; it follows a backward to the thread that runs it.
constexpr auto place = c10::DebugInfoKind::TEST_INFO;

struct Counts : c10::DebugInfoBase {
  std::array<std::atomic<int64_t>, kinds> counts{};
};

Counts* counting() { return static_cast<Counts*>(c10::ThreadLocalDebugInfo::get(place)); }

// Operations that bring numbers to the host, whatever the device: their results, or the sizes of them, are known only there.
const struct {
  const char* name;
  Wait wait;
} operations[] = {
    {"aten::_local_scalar_dense", Wait::number}, {"aten::nonzero", Wait::places},    {"aten::masked_select", Wait::places},
    {"aten::_unique2", Wait::places},            {"aten::unique_dim", Wait::places}, {"aten::equal", Wait::comparison},
};

// Between the host and a device: whether it waits by order, or because the host's memory is not pinned.
void note_copy(c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.size() < 3 || !inputs[0].isTensor() || !inputs[1].isTensor() || !inputs[2].isBool()) return;
  const at::Tensor &to = inputs[0].toTensor(), &from = inputs[1].toTensor();
  if (!to.defined() || !from.defined() || to.device() == from.device()) return;
  const at::Tensor& host = to.device().is_cpu() ? to : from;
  if (!inputs[2].toBool()) {
    kvtune::note_wait(Wait::blocking_copy);
  } else if (host.device().is_cpu() && !host.is_pinned()) {
    kvtune::note_wait(Wait::pageable_copy);
  }
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  const char* name = function.name();
  if (std::strcmp(name, "aten::copy_") == 0) note_copy(function.inputs());
  for (const auto& operation : operations)
    if (std::strcmp(name, operation.name) == 0) kvtune::note_wait(operation.wait);
  return nullptr;
}

// Counts CUDA's warnings about operations that wait, and passes others on.
struct Listener : c10::WarningHandler {
  c10::WarningHandler* other;

  explicit Listener(c10::WarningHandler* other) : other(other) {}

  void process(const c10::Warning& warning) override {
    if (warning.msg().find("synchronizing CUDA operation") == std::string::npos) return other->process(warning);
    kvtune::note_wait(Wait::cuda);
  }
};

// The mode in which CUDA's half of libtorch warns of them; null where it is not loaded.
int* mode_of_cuda() { return static_cast<int*>(dlsym(RTLD_DEFAULT, "_ZZN3c104cuda13warning_stateEvE14warning_state_")); }

struct Counter {
  std::shared_ptr<Counts> counts = std::make_shared<Counts>();
  at::CallbackHandle callback = 0;
  Listener listener{c10::WarningUtils::get_warning_handler()};
  int mode_before = 0;
};

}  // namespace

void kvtune::note_wait(Wait wait) {
  if (Counts* counts = counting()) counts->counts[static_cast<size_t>(wait)].fetch_add(1, std::memory_order_relaxed);
}

extern "C" {

int kvtune_waits_start(Counter** out) {
  return kvtune::guarded([&] {
    auto counter = std::make_unique<Counter>();
    c10::ThreadLocalDebugInfo::_push(place, counter->counts);
    counter->callback = at::addThreadLocalCallback(at::RecordFunctionCallback(before).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    c10::WarningUtils::set_warning_handler(&counter->listener);
    if (int* mode = mode_of_cuda()) {
      counter->mode_before = *mode;
      *mode = 1;
    }
    *out = counter.release();
  });
}

// By the order of `Wait`.
void kvtune_waits_read(const Counter* counter, int64_t* out) {
  for (const auto& count : counter->counts->counts) *out++ = count.load(std::memory_order_relaxed);
}

void kvtune_waits_stop(Counter* handle) {
  std::unique_ptr<Counter> counter(handle);
  if (int* mode = mode_of_cuda()) *mode = counter->mode_before;
  c10::WarningUtils::set_warning_handler(counter->listener.other);
  at::removeCallback(counter->callback);
  // It fails where another count was begun in between and not ended: that stands in front of this one, which goes on for nobody.
  kvtune::guarded([] { c10::ThreadLocalDebugInfo::_pop(place); });
}

}  // extern "C"
