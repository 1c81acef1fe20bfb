// The runtime's threads are called as a compiler's OpenMP would: it must be the runtime that libtorch has loaded, whichever that is,
// as a second one would have threads of its own. Linked by name it could be another.
#include "tasks.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <dlfcn.h>

#include <atomic>
#include <exception>

namespace kvtune {
namespace {

using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Absent where libtorch computes without OpenMP.
Region region() {
  static const Region found = reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

struct Shared {
  const std::function<void(int64_t, int64_t)>& body;
  int64_t count;
  std::atomic<int64_t> next_task{0}, next_thread{0};
  std::atomic<bool> has_failed{false};
  std::exception_ptr failure;
};

void work(void* data) {
  Shared& shared = *static_cast<Shared*>(data);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  int64_t thread = shared.next_thread++;
  try {
    for (int64_t task = shared.next_task++; task < shared.count && !shared.has_failed; task = shared.next_task++) shared.body(task, thread);
  } catch (...) {
    if (!shared.has_failed.exchange(true)) shared.failure = std::current_exception();
  }
}

}  // namespace

int64_t threads_for(int64_t count, int64_t grain) {
  if (region() == nullptr || at::in_parallel_region()) return 1;
  return std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), count / std::max<int64_t>(1, grain)));
}

int64_t share_out(int64_t count, int64_t threads, const std::function<void(int64_t, int64_t)>& body) {
  Shared shared{body, count};
  if (threads > 1) {
    region()(work, &shared, static_cast<unsigned>(threads), 0);
  } else {
    work(&shared);
  }
  if (shared.failure) std::rethrow_exception(shared.failure);
  return shared.next_thread;
}

}  // namespace kvtune

extern "C" int64_t kvtune_threads_at_work() {
  int64_t threads = kvtune::threads_for(1 << 10, 1);
  return kvtune::share_out(threads, threads, [](int64_t, int64_t) {});
}

// Whether the runtime is GNU's, which waits for less long while it has more threads than there are CPUs; others have its doors too.
extern "C" int kvtune_is_libgomp() { return kvtune::region() != nullptr && dlsym(RTLD_DEFAULT, "__kmpc_fork_call") == nullptr; }

// Gives the calling thread a pool of `count` threads of the runtime's, itself among them; they sleep until it ends.
extern "C" void kvtune_hold_threads(unsigned count) {
  if (kvtune::region() != nullptr) kvtune::region()([](void*) {}, nullptr, count, 0);
}
