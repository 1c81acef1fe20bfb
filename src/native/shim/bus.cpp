// A file that is shortened while it is mapped, or whose disk fails, ends in SIGBUS: then one line says which file it was. Everything here
// may be called in a handler of signals: no allocation, no locks, nothing but system calls.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include "say.h"

namespace {

using kvtune::say;

// The exit code for data that are wrong.
constexpr int kData = 3;

struct sigaction earlier;

// Reads a file byte by byte through a buffer.
struct Reader {
  int fd;
  char buffer[4096];
  ssize_t held = 0, at = 0;

  int next() {
    if (at == held) {
      held = read(fd, buffer, sizeof buffer);
      at = 0;
      if (held <= 0) return -1;
    }
    return static_cast<unsigned char>(buffer[at++]);
  }

  // A number in hexadecimal, and the character behind it.
  uintptr_t number(int& behind) {
    uintptr_t value = 0;
    for (;;) {
      behind = next();
      int digit = behind >= '0' && behind <= '9' ? behind - '0' : behind >= 'a' && behind <= 'f' ? behind - 'a' + 10 : -1;
      if (digit < 0) return value;
      value = value * 16 + static_cast<uintptr_t>(digit);
    }
  }
};

// Puts the name of the file that is mapped at `address` into `name`; false where none is. A line of the kernel's list is
// `from-to rights offset device inode   /a/path`.
bool file_at(uintptr_t address, char* name, size_t room) {
  Reader list{open("/proc/self/maps", O_RDONLY | O_CLOEXEC)};
  if (list.fd < 0) return false;
  for (;;) {
    int c;
    uintptr_t from = list.number(c);
    if (c < 0) return false;
    uintptr_t to = list.number(c);
    size_t length = 0;
    bool is_path = false;
    while ((c = list.next()) >= 0 && c != '\n') {
      is_path = is_path || c == '/';
      // What would steer a terminal is not shown.
      if (is_path && length + 1 < room) name[length++] = c < 32 || c == 127 ? '?' : static_cast<char>(c);
    }
    name[length] = 0;
    if (from <= address && address < to) return length > 0;
  }
}

void on_bus_error(int, siginfo_t* info, void*) {
  char name[1024];
  if (file_at(reinterpret_cast<uintptr_t>(info->si_addr), name, sizeof name)) {
    say("error: `");
    say(name);
    say("` can't be read any more: it was shortened while it was in use, or its disk failed\n"
        "hint: restore the file and begin again; replace files that are in use by renaming, which leaves those who read them alone\n");
    _exit(kData);
  }
  // Whoever was there before sees the fault again when the instruction is repeated.
  sigaction(SIGBUS, &earlier, nullptr);
}

}  // namespace

extern "C" void kvtune_guard_mappings() {
  struct sigaction guard = {};
  guard.sa_sigaction = on_bus_error;
  // On the stack of who reads the file: the one for overflows of stacks has no room for the buffer.
  guard.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &guard, &earlier);
}
