// A program that has a fork run in its place: with its arguments, variables, directory and standard streams, to the same end. The starter is that of
// the process that has started it, or the one that a variable names.
#define _GNU_SOURCE
#include "request.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>

extern char **environ;

static uint64_t count_of(char **list) {
  uint64_t count = 0;
  while (list[count]) ++count;
  return count;
}

static void add(FILE *texts, const char *text) { fwrite(text, 1, strlen(text) + 1, texts); }

static void ask(int starter, int count, char **arguments) {
  char *bytes, directory[4096];
  size_t length;
  FILE *texts = open_memstream(&bytes, &length);
  if (!texts || !getcwd(directory, sizeof directory)) _exit(125);
  add(texts, "");
  add(texts, "");
  add(texts, directory);
  for (int i = 0; i < count; ++i) add(texts, arguments[i]);
  for (char **variable = environ; *variable; ++variable) add(texts, *variable);
  fclose(texts);
  struct request request = {length, (uint64_t)count, count_of(environ), 0};
  union streams_on_their_way control = {{0}};
  struct iovec parts[] = {{&request, sizeof request}, {bytes, length}};
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = &control, .msg_controllen = sizeof control};
  struct cmsghdr *sent = CMSG_FIRSTHDR(&message);
  *sent = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(STREAMS * sizeof(int))};
  memcpy(CMSG_DATA(sent), (int[STREAMS]){STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}, STREAMS * sizeof(int));
  if (sendmsg(starter, &message, 0) != (ssize_t)(sizeof request + length)) _exit(125);
}

int main(int count, char **arguments) {
  // Of the process that has started this one, unless there are others between them.
  char of_parent[64];
  snprintf(of_parent, sizeof of_parent, "kvtune-starter-%d", (int)getppid());
  const char *name = getenv(STARTER) ? getenv(STARTER) : of_parent;
  struct sockaddr_un address;
  socklen_t size = place_of(name, &address);
  int starter = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (starter < 0 || connect(starter, (struct sockaddr *)&address, size) != 0) return 125;
  ask(starter, count, arguments);
  int32_t fork, status;
  if (!has_read(starter, &fork, sizeof fork) || fork < 0 || !has_read(starter, &status, sizeof status)) return 125;
  if (WIFSIGNALED(status)) {
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
  }
  return WEXITSTATUS(status);
}
