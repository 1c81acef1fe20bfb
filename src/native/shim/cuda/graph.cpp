// Operations that a CUDA device is handed as one. libtorch's own class captures them, since its allocator must know of a capture; its
// methods are found by their names in whatever CUDA half is loaded, so that neither a header of CUDA's nor its library is needed.
#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "../guarded.h"

namespace {

using kvtune::guarded;

// As at::cuda's MempoolId_t.
using Pool = std::pair<unsigned long long, unsigned long long>;

// CUDA's cudaStreamCaptureModeThreadLocal: what other threads ask of a device meanwhile is no fault.
constexpr unsigned kThreadLocal = 1;

template <class F> F find(const char* name) {
  auto* found = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  TORCH_CHECK(found, "this libtorch has no `", name, "`");
  return found;
}

// Methods of at::cuda::CUDAGraph, which take the object as any function would, and the function that numbers pools.
struct Calls {
  void (*make)(void*, bool) = find<decltype(make)>("_ZN2at4cuda9CUDAGraphC1Eb");
  void (*drop)(void*) = find<decltype(drop)>("_ZN2at4cuda9CUDAGraphD1Ev");
  void (*begin)(void*, Pool, unsigned) = find<decltype(begin)>("_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode");
  void (*end)(void*) = find<decltype(end)>("_ZN2at4cuda9CUDAGraph11capture_endEv");
  void (*replay)(void*) = find<decltype(replay)>("_ZN2at4cuda9CUDAGraph6replayEv");
  Pool (*new_pool)() = find<decltype(new_pool)>("_ZN2at4cuda17graph_pool_handleEv");

  static const Calls& get() {
    static const Calls calls;
    return calls;
  }
};

}  // namespace

// A graph, from the beginning of its capture on.
struct KvtuneGraph {
  KvtuneGraph() { Calls::get().make(object.data(), /*keep_graph=*/false); }
  KvtuneGraph(const KvtuneGraph&) = delete;
  KvtuneGraph& operator=(const KvtuneGraph&) = delete;
  ~KvtuneGraph() { Calls::get().drop(object.data()); }

  // Several times what libtorch's object takes.
  alignas(std::max_align_t) std::array<std::byte, 1024> object{};
};

extern "C" {

// A pool of the allocator's of which captures take their memory; both numbers of its name.
int kvtune_graph_pool(uint64_t* out) {
  return guarded([&] { std::tie(out[0], out[1]) = Calls::get().new_pool(); });
}

// What this thread asks its stream for is captured from now on, and not done. A graph that fails here stays for ever: the allocator may
// have been told to ask it whether it captures.
int kvtune_graph_begin(const uint64_t* pool, KvtuneGraph** out) {
  return guarded([&] {
    *out = new KvtuneGraph;
    Calls::get().begin((*out)->object.data(), Pool(pool[0], pool[1]), kThreadLocal);
  });
}

int kvtune_graph_end(KvtuneGraph* graph) {
  return guarded([&] { Calls::get().end(graph->object.data()); });
}

int kvtune_graph_replay(KvtuneGraph* graph) {
  return guarded([&] { Calls::get().replay(graph->object.data()); });
}

void kvtune_graph_free(KvtuneGraph* graph) { delete graph; }

}  // extern "C"
