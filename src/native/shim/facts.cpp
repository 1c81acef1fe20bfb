// What libtorch says of itself and of the CPU.
#include "guarded.h"

#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <torch/version.h>

namespace {

// What libtorch tells; null on failure. Valid until this thread's next call.
const char* told(std::string (*tell)()) {
  thread_local std::string said;
  return kvtune::guarded([&] { said = tell(); }) == 0 ? said.c_str() : nullptr;
}

}  // namespace

extern "C" {

const char* kvtune_libtorch_version() { return TORCH_VERSION; }

// How the library that is loaded was built.
const char* kvtune_libtorch_config() { return told(at::show_config); }

// The widest vector units that libtorch's own kernels use: AVX512, AVX2, …
const char* kvtune_cpu_capability() { return told(at::get_cpu_capability); }

int kvtune_cpu_has(const char* feature) {
  int has = 0;
  kvtune::guarded([&] {
    auto all = at::cpu::get_cpu_capabilities();
    auto found = all.find(feature);
    has = found != all.end() && found->second.isBool() && found->second.toBool();
  });
  return has;
}

}  // extern "C"
