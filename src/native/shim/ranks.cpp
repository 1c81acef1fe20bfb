// c10d for Rust: a TCPStore, and a process group over Gloo.
#include "guarded.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/Logging.h>

#include <cstdlib>

C10_DECLARE_int(caffe2_log_level);

namespace {

using Millis = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

thread_local std::vector<uint8_t> value;

c10d::ProcessGroupGloo& connected(GroupPtr* group) {
  TORCH_CHECK(group, "the connections are closed");
  return **group;
}

// c10d's flight recorder keeps the last exchanges, each with a traceback, for a dump that nobody asks for here, and where several groups of
// a process use it at once it writes before it locks. It looks at the environment once; only before there are threads may that be changed.
__attribute__((constructor)) void turn_flight_recorder_off() { setenv("TORCH_FR_BUFFER_SIZE", "0", 1); }

}  // namespace

extern "C" {

int kvtune_store_open(const char* host, uint16_t port, int listener, int64_t timeout, StorePtr** out) {
  return kvtune::guarded([&] {
    // c10d's own lines would stand among ours: what is wrong comes as an exception.
    FLAGS_caffe2_log_level = 3;
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = listener >= 0;
    options.waitWorkers = false;
    options.timeout = Millis(timeout);
    if (listener >= 0) options.masterListenFd = listener;
    *out = new StorePtr(c10::make_intrusive<c10d::TCPStore>(host, options));
  });
}

void kvtune_store_close(StorePtr* store) { delete store; }

int kvtune_store_set(StorePtr* store, const char* key, const uint8_t* bytes, size_t count) {
  return kvtune::guarded([&] { (*store)->set(key, std::vector<uint8_t>(bytes, bytes + count)); });
}

// Waits for the key up to the store's time-out. What comes out is valid until this thread's next call.
int kvtune_store_get(StorePtr* store, const char* key, const uint8_t** bytes, size_t* count) {
  return kvtune::guarded([&] {
    value = (*store)->get(key);
    *bytes = value.data();
    *count = value.size();
  });
}

int kvtune_store_add(StorePtr* store, const char* key, int64_t by, int64_t* out) {
  return kvtune::guarded([&] { *out = (*store)->add(key, by); });
}

int kvtune_store_has(StorePtr* store, const char* key, int* out) {
  return kvtune::guarded([&] { *out = (*store)->check({key}); });
}

// Connects with all ranks of `prefix` in the store, by the local `interface` or, where that is null, the local `address`.
int kvtune_gloo_open(StorePtr* store, const char* prefix, int rank, int size, const char* interface, const char* address,
                     int64_t timeout, GroupPtr** out) {
  return kvtune::guarded([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(Millis(timeout));
    options->devices.push_back(interface ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                         : c10d::ProcessGroupGloo::createDeviceForHostname(address));
    StorePtr own = c10::make_intrusive<c10d::PrefixStore>(prefix, *store);
    *out = new GroupPtr(c10::make_intrusive<c10d::ProcessGroupGloo>(own, rank, size, options));
  });
}

void kvtune_gloo_close(GroupPtr* group) { delete group; }

int kvtune_gloo_sum(GroupPtr* group, at::Tensor* tensor, int64_t timeout, WorkPtr** work) {
  return kvtune::guarded([&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::AllreduceOptions options;
    options.timeout = Millis(timeout);
    *work = new WorkPtr(connected(group).allreduce(tensors, options));
  });
}

int kvtune_gloo_broadcast(GroupPtr* group, at::Tensor* tensor, int from, int64_t timeout, WorkPtr** work) {
  return kvtune::guarded([&] {
    std::vector<at::Tensor> tensors{*tensor};
    c10d::BroadcastOptions options;
    options.rootRank = from;
    options.timeout = Millis(timeout);
    *work = new WorkPtr(connected(group).broadcast(tensors, options));
  });
}

int kvtune_gloo_gather(GroupPtr* group, at::Tensor* output, at::Tensor* input, int64_t timeout, WorkPtr** work) {
  return kvtune::guarded([&] {
    std::vector<std::vector<at::Tensor>> outputs{output->unbind(0)};
    std::vector<at::Tensor> inputs{*input};
    c10d::AllgatherOptions options;
    options.timeout = Millis(timeout);
    *work = new WorkPtr(connected(group).allgather(outputs, inputs, options));
  });
}

int kvtune_work_wait(WorkPtr* work, int64_t timeout, int* done) {
  return kvtune::guarded([&] {
    *done = 0;
    try {
      (*work)->wait(Millis(timeout));
    } catch (...) {
      // Either its own failure, or that the time has passed.
      if (!(*work)->isCompleted()) return;
      (*work)->wait();
    }
    *done = 1;
  });
}

void kvtune_work_drop(WorkPtr* work) { delete work; }

}  // extern "C"
