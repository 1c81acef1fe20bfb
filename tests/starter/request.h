// What an asker sends to the starter, and how both find each other.
#pragma once

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { STREAMS = 3 };

// The variable that says where the starter listens.
#define STARTER "KVTUNE_STARTER"

// So many bytes of texts follow, each with a zero behind it: files for output and errors, a directory, arguments, variables. The standard streams
// themselves may come with it; then the files are not opened. Answers are the number of the fork, and, at its end, its status.
struct request {
  uint64_t bytes, arguments, variables, addresses;
};

union streams_on_their_way {
  char bytes[CMSG_SPACE(STREAMS * sizeof(int))];
  struct cmsghdr aligned;
};

// A name that is in no file system.
static inline socklen_t place_of(const char *name, struct sockaddr_un *address) {
  *address = (struct sockaddr_un){.sun_family = AF_UNIX};
  strncpy(address->sun_path + 1, name, sizeof address->sun_path - 2);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(address->sun_path + 1));
}

static inline int has_read(int from, void *to, size_t bytes) {
  for (char *at = to; bytes > 0;) {
    ssize_t count = read(from, at, bytes);
    if (count == 0 || (count < 0 && errno != EINTR)) return 0;
    if (count > 0) at += count, bytes -= (size_t)count;
  }
  return 1;
}
