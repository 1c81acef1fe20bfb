// What every call from Rust goes through: no C++ exception leaves the shim. What a call does, and of which shapes its tensors are, stands at the
// Rust function that makes it, in native/ and native/cuda/.
#pragma once
#include <c10/util/Exception.h>

#include <exception>
#include <string>

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

}  // namespace kvtune
