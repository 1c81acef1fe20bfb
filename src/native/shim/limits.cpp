// What a process without memory says, before it begins and when a library gives up: one line, and the exit code of too little memory.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fcntl.h>
#include <new>
#include <sys/resource.h>
#include <unistd.h>

#include "say.h"

namespace {

using kvtune::say;

constexpr int kNoMemory = 4;
// The address space that libtorch takes beyond what is mapped before it begins, with a small model and two threads.
constexpr rlim_t kNeeded = 256ul << 20;

// What is mapped, of /proc/self/statm; 0 if nobody knows.
rlim_t mapped() {
  char text[64] = {};
  int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    return 0;
  }
  ssize_t length = read(file, text, sizeof text - 1);
  close(file);
  return length > 0 ? strtoul(text, nullptr, 10) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) : 0;
}

[[noreturn]] void on_terminate() {
  if (std::exception_ptr failure = std::current_exception()) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::bad_alloc&) {
      say("error: memory does not suffice\n\nhint: raise the limit of memory (`ulimit -v`), or ask for less\n");
      _exit(kNoMemory);
    } catch (const std::exception& error) {
      say("error: a library gave up: ");
      say(error.what());
      say("\n");
    } catch (...) {
    }
  }
  abort();
}

// Runs before the constructors of all libraries, which end the process with SIGABRT where they get no memory.
void before_libraries(int, char**, char**) {
  std::set_terminate(on_terminate);
  rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < mapped() + kNeeded) {
    char text[200];
    snprintf(text, sizeof text,
             "error: the process may have %lu MiB of address space, expected at least %lu MiB\n\nhint: raise the limit with `ulimit -v`\n",
             static_cast<unsigned long>(limit.rlim_cur >> 20), static_cast<unsigned long>((mapped() + kNeeded) >> 20));
    say(text);
    _exit(kNoMemory);
  }
}

__attribute__((section(".preinit_array"), used)) void (*const first)(int, char**, char**) = before_libraries;

}  // namespace
