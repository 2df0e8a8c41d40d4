/* A file system that is ill for a moment: LD_PRELOAD this library, and calls on paths below a directory fail.
 *
 * Where the error is 0 each of them takes a second longer instead.
 *
 * CHAOS_TROUBLE names a file of the layout below (see trouble.py). It is mapped, so a process need not be told: calls
 * fail from begin_s to end_s of CLOCK_MONOTONIC, in every process that has the variable in its environment. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, SYNC = 4, NAME = 8, LOOK = 16, READ = 32 };

struct trouble {
    double begin_s, end_s;
    int error, kinds, per_mille, failed;
    char below[4096];
};

static struct trouble *trouble;

static struct trouble *find(void) {
    const char *path = getenv("CHAOS_TROUBLE");
    if (trouble || !path) return trouble;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return NULL;
    void *here = mmap(NULL, sizeof *trouble, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    return trouble = here == MAP_FAILED ? NULL : here;
}

static int now_ill(int kind) {
    int before = errno;
    struct trouble *t = find();
    errno = before;
    if (!t || !(t->kinds & kind) || t->begin_s == 0) return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double now_s = now.tv_sec + now.tv_nsec / 1e9;
    return now_s >= t->begin_s && now_s < t->end_s && (now.tv_nsec / 1000) % 1000 < t->per_mille;
}

static int is_below(const char *path) {
    size_t length = strlen(trouble->below);
    return path && !strncmp(path, trouble->below, length) && (path[length] == '/' || !path[length]);
}

static int fails_at(int kind, const char *path) {
    if (!now_ill(kind) || !is_below(path)) return 0;
    __sync_fetch_and_add(&trouble->failed, 1);
    if (!trouble->error) {
        struct timespec pause = {1, 0};
        nanosleep(&pause, NULL);
        return 0;
    }
    errno = trouble->error;
    return 1;
}

static int fails_on(int kind, int fd) {
    char link[64], path[4096];
    if (!now_ill(kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails_at(kind, path);
}

#define REAL(name) \
    ({ \
        static __typeof__(&name) real; \
        if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        real; \
    })
#define BY_PATH(type, bad, kind, name, path, arguments, values) \
    type name arguments { return fails_at(kind, path) ? (bad) : REAL(name) values; }
#define BY_FD(type, kind, name, arguments, values) \
    type name arguments { return fails_on(kind, fd) ? -1 : REAL(name) values; }
#define OPENS(name, arguments, values) \
    int name arguments { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        return fails_at(OPEN, path) ? -1 : REAL(name) values; \
    }

OPENS(open, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPENS(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
BY_PATH(DIR *, NULL, LOOK, opendir, path, (const char *path), (path))
BY_PATH(int, -1, LOOK, stat, path, (const char *path, struct stat *out), (path, out))
BY_PATH(int, -1, LOOK, stat64, path, (const char *path, struct stat64 *out), (path, out))
BY_PATH(int, -1, LOOK, lstat, path, (const char *path, struct stat *out), (path, out))
BY_PATH(int, -1, LOOK, lstat64, path, (const char *path, struct stat64 *out), (path, out))
BY_PATH(int, -1, LOOK, fstatat, path, (int at, const char *path, struct stat *out, int how), (at, path, out, how))
BY_PATH(int, -1, LOOK, fstatat64, path, (int at, const char *path, struct stat64 *out, int how), (at, path, out, how))
BY_PATH(int, -1, NAME, mkdir, path, (const char *path, mode_t mode), (path, mode))
BY_PATH(int, -1, NAME, rename, to, (const char *from, const char *to), (from, to))
BY_PATH(int, -1, NAME, renameat2, to, (int a, const char *from, int b, const char *to, unsigned how),
        (a, from, b, to, how))
BY_PATH(int, -1, NAME, link, to, (const char *from, const char *to), (from, to))
BY_PATH(int, -1, NAME, unlink, path, (const char *path), (path))
BY_PATH(int, -1, NAME, rmdir, path, (const char *path), (path))
BY_FD(ssize_t, WRITE, write, (int fd, const void *data, size_t size), (fd, data, size))
BY_FD(ssize_t, WRITE, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
BY_FD(ssize_t, WRITE, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
BY_FD(int, WRITE, fallocate, (int fd, int how, off_t at, off_t size), (fd, how, at, size))
BY_FD(int, WRITE, ftruncate64, (int fd, off64_t size), (fd, size))
BY_FD(int, SYNC, fsync, (int fd), (fd))
BY_FD(int, SYNC, fdatasync, (int fd), (fd))
BY_FD(ssize_t, READ, read, (int fd, void *data, size_t size), (fd, data, size))
BY_FD(ssize_t, READ, preadv, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
BY_FD(ssize_t, READ, preadv64, (int fd, const struct iovec *parts, int count, off64_t at), (fd, parts, count, at))
BY_FD(ssize_t, READ, preadv2, (int fd, const struct iovec *parts, int count, off_t at, int how),
      (fd, parts, count, at, how))
BY_FD(ssize_t, READ, preadv64v2, (int fd, const struct iovec *parts, int count, off64_t at, int how),
      (fd, parts, count, at, how))
