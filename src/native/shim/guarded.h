// What every call from Rust goes through: no C++ exception leaves the shim. What a call does, and of which shapes its tensors are, stands at the
// Rust function that makes it, in native/ and native/cuda/.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <exception>
#include <string>
#include <vector>

namespace kvtune {

inline thread_local std::string last_error;

// 0, or 1 with the message in `last_error`.
template <class F> int guarded(F&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const c10::Error& e) {
    last_error = e.what_without_backtrace();
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "unknown C++ exception";
  }
  return 1;
}

using Tensors = std::vector<at::Tensor>;

// Calls `body`, and hands its tensors to Rust, in order; what is undefined becomes null.
template <class F> int giving(at::Tensor** results, F&& body) noexcept {
  return guarded([&] {
    for (at::Tensor& made : body()) *results++ = made.defined() ? new at::Tensor(std::move(made)) : nullptr;
  });
}

}  // namespace kvtune
