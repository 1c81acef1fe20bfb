// Streams beside the one that computes, the events by which they wait for each other, and memory of the host that a device copies
// from and to by itself. Through libc10's interface for any device, so that no header of CUDA's is needed.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "../guarded.h"

namespace {

using kvtune::guarded;

c10::impl::VirtualGuardImpl door() { return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA); }

c10::Device device_of(int index) { return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)); }

// The given stream, or the one that this thread computes on.
c10::Stream stream_or_current(const c10::Stream* stream, int index) { return stream ? *stream : door().getStream(device_of(index)); }

}  // namespace

extern "C" {

int kvtune_stream_new(int index, c10::Stream** out) {
  return guarded([&] { *out = new c10::Stream(door().getStreamFromGlobalPool(device_of(index))); });
}

void kvtune_stream_free(c10::Stream* stream) { delete stream; }

int kvtune_stream_enter(const c10::Stream* stream, c10::StreamGuard** out) {
  return guarded([&] { *out = new c10::StreamGuard(*stream); });
}

void kvtune_stream_leave(c10::StreamGuard* guard) { delete guard; }

int kvtune_stream_copy(const c10::Stream* stream, at::Tensor* to, at::Tensor* from) {
  return guarded([&] {
    c10::NoGradGuard no_grad;
    c10::StreamGuard guard(*stream);
    to->copy_(*from, /*non_blocking=*/true);
  });
}

int kvtune_stream_holds(const c10::Stream* stream, at::Tensor* tensor) {
  return guarded([&] { door().recordDataPtrOnStream(tensor->storage().data_ptr(), *stream); });
}

int kvtune_launch_stream(int index, void** stream) {
  return guarded([&] { *stream = door().getStream(device_of(index)).native_handle(); });
}

// An event behind all that a stream (without one: the stream that computes) has been asked for so far.
int kvtune_event_record(const c10::Stream* stream, int index, int is_timed, c10::Event** out) {
  return guarded([&] {
    auto flag = is_timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
    auto event = std::make_unique<c10::Event>(c10::DeviceType::CUDA, flag);
    event->record(stream_or_current(stream, index));
    *out = event.release();
  });
}

void kvtune_event_free(c10::Event* event) { delete event; }

int kvtune_event_block(const c10::Event* event, const c10::Stream* stream, int index) {
  return guarded([&] { event->block(stream_or_current(stream, index)); });
}

int kvtune_event_query(const c10::Event* event, int* is_done) {
  return guarded([&] { *is_done = event->query() ? 1 : 0; });
}

int kvtune_event_synchronize(const c10::Event* event) {
  return guarded([&] {
    if (event->query()) return;
    RECORD_FUNCTION("kvtune::event_synchronize", {});
    event->synchronize();
  });
}

int kvtune_event_elapsed(const c10::Event* from, const c10::Event* to, double* milliseconds) {
  return guarded([&] { *milliseconds = from->elapsedTime(*to); });
}

int kvtune_pinned_bytes(int64_t count, at::Tensor** out) {
  return kvtune::giving(out, [&] { return kvtune::Tensors{at::empty({count}, at::TensorOptions().dtype(at::kByte).pinned_memory(true))}; });
}

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
