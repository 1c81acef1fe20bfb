// What is said by nobody else, in one line: that memory does not suffice before the program begins, that a library gives up, which ends in
// SIGABRT, and that a file was shortened while it was mapped, or its disk has failed, which ends in SIGBUS.

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace {

// Exit codes: data that are wrong, and too little memory.
constexpr int kData = 3, kNoMemory = 4;

// To stderr by one system call: for handlers of signals, and where nothing may be allocated.
void say(const char* text) {
  ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
  (void)ignored;
}

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

// From here to `on_bus_error` everything may be called in a handler of signals: no allocation, no locks, nothing but system calls.

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
