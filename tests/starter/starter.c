// Loaded into the program before its libraries, this makes of it a process that has loaded them, waits, and forks itself for whoever asks: the fork
// goes on in the program's own `main`, with the arguments, the variables and the directory that were asked for.
#define _GNU_SOURCE
#include "request.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int program(int, char **, char **);

extern char **environ;

enum { MOST = 256 };

static program *program_of_the_binary;
// The forks, and whom their ends are told.
static struct {
  pid_t fork;
  int asker;
} running[MOST];

static void give_up(const char *why) {
  perror(why);
  _exit(125);
}

static void tell(int asker, int32_t number) {
  // Whoever is gone needs no answer.
  ssize_t told = write(asker, &number, sizeof number);
  (void)told;
}

static void tell_of_ends(int number) {
  (void)number;
  int before = errno, status;
  for (pid_t fork; (fork = waitpid(-1, &status, WNOHANG)) > 0;)
    for (int i = 0; i < MOST; ++i)
      if (running[i].fork == fork) {
        tell(running[i].asker, status);
        close(running[i].asker);
        running[i].fork = 0;
      }
  errno = before;
}

static void put(int file, int in_place_of) {
  if (file < 0 || dup2(file, in_place_of) < 0) give_up("a standard stream");
  close(file);
}

static const char *next(char **texts) {
  const char *text = *texts;
  *texts += strlen(text) + 1;
  return text;
}

static char **list(char **texts, uint64_t count) {
  char **all = calloc(count + 1, sizeof *all);
  for (uint64_t i = 0; i < count; ++i) all[i] = (char *)next(texts);
  return all;
}

// The asked ones, and those that constructors of libraries have set before there was a `main`.
static void set_variables(char **asked) {
  char **before = environ;
  environ = asked;
  for (; *before; ++before) {
    char *name = strndup(*before, strcspn(*before, "="));
    if (!getenv(name) && strcmp(name, "LD_PRELOAD") != 0 && strcmp(name, STARTER) != 0) putenv(*before);
    free(name);
  }
}

static void become_the_program(const struct request *request, char *texts, const int *streams) {
  const char *out = next(&texts), *err = next(&texts);
  put(streams[0] >= 0 ? streams[0] : open("/dev/null", O_RDONLY), STDIN_FILENO);
  put(streams[1] >= 0 ? streams[1] : open(out, O_WRONLY), STDOUT_FILENO);
  put(streams[2] >= 0 ? streams[2] : open(err, O_WRONLY), STDERR_FILENO);
  if (chdir(next(&texts)) != 0) give_up("the directory");
  char **arguments = list(&texts, request->arguments);
  set_variables(list(&texts, request->variables));
  if (request->addresses > 0) {
    struct rlimit limit = {request->addresses, request->addresses};
    if (setrlimit(RLIMIT_AS, &limit) != 0) give_up("the limit of addresses");
  }
  signal(SIGCHLD, SIG_DFL);
  signal(SIGPIPE, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  exit(program_of_the_binary((int)request->arguments, arguments, environ));
}

// The request, and the streams that may come with it; whether it is whole.
static int has_heard(int asker, struct request *request, char **texts, int *streams) {
  union streams_on_their_way control;
  struct iovec part = {request, sizeof *request};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
  if (recvmsg(asker, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL) != sizeof *request) return 0;
  struct cmsghdr *sent = CMSG_FIRSTHDR(&message);
  if (sent && sent->cmsg_type == SCM_RIGHTS) memcpy(streams, CMSG_DATA(sent), STREAMS * sizeof *streams);
  *texts = malloc(request->bytes);
  return *texts && has_read(asker, *texts, request->bytes);
}

static void serve(int listener, int asker) {
  struct request request;
  char *texts = NULL;
  int streams[STREAMS] = {-1, -1, -1};
  if (!has_heard(asker, &request, &texts, streams)) {
    free(texts);
    close(asker);
    return;
  }
  // An end is told when the fork is known.
  sigset_t ends, before;
  sigemptyset(&ends);
  sigaddset(&ends, SIGCHLD);
  sigprocmask(SIG_BLOCK, &ends, &before);
  int place = 0;
  while (place < MOST && running[place].fork != 0) ++place;
  pid_t forked = place < MOST ? fork() : -1;
  if (forked == 0) {
    for (int i = 0; i < MOST; ++i)
      if (running[i].fork != 0) close(running[i].asker);
    close(listener);
    close(asker);
    become_the_program(&request, texts, streams);
  }
  tell(asker, forked);
  if (forked > 0) {
    running[place].fork = forked;
    running[place].asker = asker;
  } else {
    close(asker);
  }
  sigprocmask(SIG_SETMASK, &before, NULL);
  for (int i = 0; i < STREAMS; ++i)
    if (streams[i] >= 0) close(streams[i]);
  free(texts);
}

// oneDNN compiles its kernels at the first product of a process, which takes as long as many a test: forks have them from here. By the functions that
// libtorch offers to C (torch/csrc/inductor/aoti_torch/c); a library without them is no reason to stop.
static void make_a_product(void) {
  int (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, void **);
  int (*zero)(void *);
  int (*product)(void *, void *, void **, const char *, const double **, int64_t, const char **, void **);
  *(void **)&empty = dlsym(RTLD_DEFAULT, "aoti_torch_empty_strided");
  *(void **)&zero = dlsym(RTLD_DEFAULT, "aoti_torch_zero_");
  *(void **)&product = dlsym(RTLD_DEFAULT, "aoti_torch_cpu__linear_pointwise");
  enum { F32 = 6, CPU = 0, SIDE = 16 };
  int64_t sizes[] = {SIDE, SIDE}, strides[] = {SIDE, 1};
  void *x = NULL, *y = NULL;
  const char *algorithm = "";
  if (!empty || !zero || !product || empty(2, sizes, strides, F32, CPU, 0, &x) != 0) return;
  zero(x);
  product(x, x, NULL, "none", NULL, 0, &algorithm, &y);
}

// In place of the program's `main`: answers until the standard input is closed.
static int wait_for_askers(int count, char **arguments, char **variables) {
  (void)count, (void)arguments, (void)variables;
  struct sockaddr_un address;
  socklen_t size = place_of(getenv(STARTER), &address);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) != 0 || listen(listener, MOST) != 0) give_up("a socket");
  struct sigaction at_ends = {.sa_handler = tell_of_ends, .sa_flags = SA_RESTART};
  sigaction(SIGCHLD, &at_ends, NULL);
  signal(SIGPIPE, SIG_IGN);
  make_a_product();
  puts("ready");
  fflush(stdout);
  for (;;) {
    struct pollfd sources[] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = listener, .events = POLLIN}};
    if (poll(sources, 2, -1) < 0) continue;
    if (sources[0].revents != 0) _exit(0);
    int asker = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (asker >= 0) serve(listener, asker);
  }
}

// What the C library is asked for before there is a `main`.
int __libc_start_main(program *own, int count, char **arguments, program *init, void (*fini)(void), void (*at_end)(void), void *stack) {
  int (*start)(program *, int, char **, program *, void (*)(void), void (*)(void), void *);
  *(void **)&start = dlsym(RTLD_NEXT, "__libc_start_main");
  program_of_the_binary = own;
  return start(getenv(STARTER) ? wait_for_askers : own, count, arguments, init, fini, at_end, stack);
}
