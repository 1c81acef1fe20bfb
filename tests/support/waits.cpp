// Notes what makes the host wait for a device, by a callback of libtorch's before each operation, and by CUDA's own warnings where they can
// be had.
#include "guarded.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

namespace {

// A place that libtorch leaves to tests; it follows a backward to the thread that runs it.
constexpr auto place = c10::DebugInfoKind::TEST_INFO;

struct Notes : c10::DebugInfoBase {
  std::mutex mutex;
  std::vector<const char*> all;
};

// Operations that bring numbers to the host, whatever the device: their results, or the sizes of them, are known only there. The last
// is the shim's own.
const struct {
  const char *name, *what;
} operations[] = {
    {"aten::_local_scalar_dense", "number read"}, {"aten::nonzero", "places looked for"},    {"aten::masked_select", "places looked for"},
    {"aten::_unique2", "places looked for"},      {"aten::unique_dim", "places looked for"}, {"aten::equal", "tensors compared"},
    {"kvtune::event_synchronize", "event waited for"},
};

void note(const char* what) {
  auto* notes = static_cast<Notes*>(c10::ThreadLocalDebugInfo::get(place));
  if (notes == nullptr) return;
  std::lock_guard<std::mutex> lock(notes->mutex);
  notes->all.push_back(what);
}

// Between the host and a device: whether it waits by order, or because the host's memory is not pinned.
void note_copy(c10::ArrayRef<const c10::IValue> inputs) {
  if (inputs.size() < 3 || !inputs[0].isTensor() || !inputs[1].isTensor() || !inputs[2].isBool()) return;
  const at::Tensor &to = inputs[0].toTensor(), &from = inputs[1].toTensor();
  if (!to.defined() || !from.defined() || to.device() == from.device()) return;
  const at::Tensor& host = to.device().is_cpu() ? to : from;
  if (!inputs[2].toBool()) {
    note("blocking copy");
  } else if (host.device().is_cpu() && !host.is_pinned()) {
    note("copy of pageable memory");
  }
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& function) {
  const char* name = function.name();
  if (std::strcmp(name, "aten::copy_") == 0) note_copy(function.inputs());
  for (const auto& operation : operations)
    if (std::strcmp(name, operation.name) == 0) note(operation.what);
  return nullptr;
}

// Notes CUDA's warnings about operations that wait, and passes others on.
struct Listener : c10::WarningHandler {
  c10::WarningHandler* other;

  explicit Listener(c10::WarningHandler* other) : other(other) {}

  void process(const c10::Warning& warning) override {
    if (warning.msg().find("synchronizing CUDA operation") == std::string::npos) return other->process(warning);
    note("wait by CUDA's own count");
  }
};

// The mode in which CUDA's half of libtorch warns of them; null where it is not loaded.
int* mode_of_cuda() { return static_cast<int*>(dlsym(RTLD_DEFAULT, "_ZZN3c104cuda13warning_stateEvE14warning_state_")); }

struct Watch {
  std::shared_ptr<Notes> notes = std::make_shared<Notes>();
  at::CallbackHandle callback = 0;
  Listener listener{c10::WarningUtils::get_warning_handler()};
  int mode_before = 0;
};

// One a thread: nobody can stop another's.
thread_local std::unique_ptr<Watch> watch;

}  // namespace

extern "C" {

// Fails where this thread takes notes already.
int kvtune_waits_start() {
  return kvtune::guarded([&] {
    TORCH_CHECK(watch == nullptr, "notes of waits are taken already");
    auto begun = std::make_unique<Watch>();
    begun->callback = at::addThreadLocalCallback(at::RecordFunctionCallback(before).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    watch = std::move(begun);
    c10::ThreadLocalDebugInfo::_push(place, watch->notes);
    c10::WarningUtils::set_warning_handler(&watch->listener);
    if (int* mode = mode_of_cuda()) {
      watch->mode_before = *mode;
      *mode = 1;
    }
  });
}

// Null behind the last.
const char* kvtune_waits_read(size_t index) {
  if (watch == nullptr) return nullptr;
  std::lock_guard<std::mutex> lock(watch->notes->mutex);
  return index < watch->notes->all.size() ? watch->notes->all[index] : nullptr;
}

void kvtune_waits_stop() {
  if (watch == nullptr) return;
  if (int* mode = mode_of_cuda()) *mode = watch->mode_before;
  c10::WarningUtils::set_warning_handler(watch->listener.other);
  at::removeCallback(watch->callback);
  kvtune::guarded([] { c10::ThreadLocalDebugInfo::_pop(place); });
  watch.reset();
}

}  // extern "C"
