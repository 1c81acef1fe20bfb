/* Stands between kvtune and the C library, by LD_PRELOAD: counts the calls that touch files below one directory, lets one of them or all
 * from it on fail, and notes what files are made and whether a socket is asked for.
 *
 *   FAULT_DIR      files below it count
 *   FAULT_KIND     an errno by its number, `short`, or `count` (nothing fails)
 *   FAULT_CALLS    `change` (what changes files), `read` (what reads them)
 *   FAULT_NTH      the call that fails, from 1
 *   FAULT_LASTING  all later ones fail, too
 *   FAULT_COUNTER  a file of 4096 bytes, into which the number of calls is counted
 *   FAULT_NOTES    a file to which `made PATH` and `socket N` are appended
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CHANGE = 1, READ = 2 };

static const char *directory;
static int error, is_short, calls, notes = -1;
static long nth;
static int is_lasting;
static _Atomic long own_count;
static _Atomic long *count = &own_count;

__attribute__((constructor)) static void begin(void) {
    const char *kind = getenv("FAULT_KIND"), *which = getenv("FAULT_CALLS"), *n = getenv("FAULT_NTH");
    const char *counter = getenv("FAULT_COUNTER"), *noted = getenv("FAULT_NOTES");
    directory = getenv("FAULT_DIR");
    is_short = kind && !strcmp(kind, "short");
    error = kind && !is_short ? atoi(kind) : 0;
    calls = which && !strcmp(which, "read") ? READ : CHANGE;
    nth = n ? atol(n) : 0;
    is_lasting = getenv("FAULT_LASTING") != NULL;
    if (counter) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, counter, O_RDWR | O_CLOEXEC);
        void *page = fd < 0 ? MAP_FAILED : mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (page == MAP_FAILED) {
            static const char words[] = "interposer: FAULT_COUNTER cannot be mapped\n";
            syscall(SYS_write, 2, words, sizeof words - 1);
            _exit(99);
        }
        count = page;
    }
    if (noted) notes = (int)syscall(SYS_openat, AT_FDCWD, noted, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static void note(const char *what, const char *path) {
    char line[PATH_MAX + 16];
    if (notes < 0) return;
    int length = snprintf(line, sizeof line, "%s %s\n", what, path);
    syscall(SYS_write, notes, line, (size_t)length);
}

/* The path as one that begins at the root; a relative one begins at the working directory, which kvtune never leaves. */
static void absolute(const char *path, char *out) {
    char here[PATH_MAX];
    if (path[0] == '/' || syscall(SYS_getcwd, here, sizeof here) < 0) snprintf(out, PATH_MAX, "%s", path);
    else snprintf(out, PATH_MAX, "%.2000s/%.2000s", here, path);
}

// What only begins with the directory's name is beside it: the words of the binary are.
static int is_below(const char *full, const char *directory) {
    size_t length = strlen(directory);
    return !strncmp(full, directory, length) && (full[length] == '/' || full[length] == 0);
}

static int counts_path(const char *path) {
    char full[PATH_MAX];
    if (!directory || !path) return 0;
    absolute(path, full);
    return is_below(full, directory);
}

static int counts_fd(int fd) {
    char link[64], full[PATH_MAX];
    if (!directory) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, full, sizeof full - 1);
    if (length < 0) return 0;
    full[length] = 0;
    return is_below(full, directory);
}

/* Counts a call; whether it is to fail. Signals interrupt only what waits. */
static int fails(int kind, int counted, int waits) {
    if (!(calls & kind) || !counted || (error == EINTR && !waits)) return 0;
    long now = atomic_fetch_add(count, 1) + 1;
    return nth && (now == nth || (is_lasting && now > nth));
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define FAIL(kind, counted, waits) \
    if (!is_short && fails(kind, counted, waits)) { \
        errno = error; \
        return -1; \
    }

/* The call that stands for the C library's: fails where it is to, or gives what `outcome` does with the real one. */
#define CALL(kind, type, name, parameters, counted, waits, outcome) \
    type name parameters { \
        REAL(name); \
        FAIL(kind, counted, waits); \
        return outcome; \
    }

#define HALVED(n, counted) (is_short && (n) > 1 && fails(CHANGE, counted, 1) ? (n) / 2 : (n))

/* Notes what is there since a call that went well. */
static int made(int result, const char *path) {
    char full[PATH_MAX];
    absolute(path, full);
    if (result >= 0) note("made", full);
    return result;
}

CALL(CHANGE, ssize_t, write, (int fd, const void *data, size_t n), counts_fd(fd), 1, real(fd, data, HALVED(n, counts_fd(fd))))
CALL(CHANGE, ssize_t, pwrite64, (int fd, const void *data, size_t n, off64_t at), counts_fd(fd), 1,
     real(fd, data, HALVED(n, counts_fd(fd)), at))
CALL(CHANGE, ssize_t, writev, (int fd, const struct iovec *parts, int n), counts_fd(fd), 1, real(fd, parts, n))
CALL(READ, ssize_t, read, (int fd, void *data, size_t n), counts_fd(fd), 1, real(fd, data, n))
CALL(READ, ssize_t, pread64, (int fd, void *data, size_t n, off64_t at), counts_fd(fd), 1, real(fd, data, n, at))
CALL(CHANGE, int, fsync, (int fd), counts_fd(fd), 1, real(fd))
CALL(CHANGE, int, fdatasync, (int fd), counts_fd(fd), 1, real(fd))
CALL(CHANGE, int, ftruncate64, (int fd, off64_t length), counts_fd(fd), 1, real(fd, length))
CALL(CHANGE, int, rename, (const char *from, const char *to), counts_path(to), 0, made(real(from, to), to))
CALL(CHANGE, int, mkdir, (const char *path, mode_t mode), counts_path(path), 0, made(real(path, mode), path))
CALL(CHANGE, int, unlink, (const char *path), counts_path(path), 0, real(path))
CALL(CHANGE, int, unlinkat, (int at, const char *path, int flags), at == AT_FDCWD ? counts_path(path) : counts_fd(at), 0,
     real(at, path, flags))
CALL(CHANGE, int, rmdir, (const char *path), counts_path(path), 0, real(path))

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        FAIL(flags &(O_WRONLY | O_RDWR | O_CREAT) ? CHANGE : READ, counts_path(path), 1); \
        int result = real(path, flags, mode); \
        return flags & O_CREAT ? made(result, path) : result; \
    }

OPEN(open)
OPEN(open64)

int socket(int domain, int type, int protocol) {
    REAL(socket);
    char words[32];
    snprintf(words, sizeof words, "%d", domain);
    note("socket", words);
    return real(domain, type, protocol);
}
