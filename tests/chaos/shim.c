/* Fails the n-th system call of a kind on files below a folder, for the test of errors (LD_PRELOAD).

   shim_arm(folder, kind, first, times, number) is called by the test in the same process; calls of that kind are counted
   from 1, and those from `first` on fail `times` times with errno `number`. shim_count() returns the calls so far.

   The first process that a supervisor starts is armed by the variable SHIM, "folder kind number mark": all calls fail in
   the process that creates the file `mark`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, FSYNC, RENAME };
static char folder[4096];
static int kind = -1, number;
static long first, times;
static atomic_long count;

void shim_arm(const char *where, int what, long from, long how_often, int with) {
  kind = -1;
  snprintf(folder, sizeof folder, "%s", where);
  first = from, times = how_often, number = with;
  atomic_store(&count, 0);
  kind = what;
}

long shim_count(void) { return atomic_load(&count); }

__attribute__((constructor)) static void arm_by_variable(void) {
  char where[2048], mark[2048];
  int what, with;
  const char *text = getenv("SHIM");
  if (!text || !getenv("MESHWRIGHT_BEATS")) return;
  if (sscanf(text, "%2047s %d %d %2047s", where, &what, &with, mark) != 4) return;
  int made = open(mark, O_CREAT | O_EXCL | O_WRONLY, 0644);
  if (made < 0) return;
  close(made);
  shim_arm(where, what, 1, 1L << 40, with);
}

static int fails_at(const char *path, int what) {
  if (kind != what || strncmp(path, folder, strlen(folder))) return 0;
  long n = atomic_fetch_add(&count, 1) + 1;
  if (n < first || n >= first + times) return 0;
  errno = number;
  return 1;
}

static int fails(int fd, int what) {
  if (kind != what) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return fails_at(path, what);
}

#define NEXT(name) \
  static __typeof__(name) *next; \
  if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define MODE \
  mode_t mode = 0; \
  if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }

int open(const char *path, int flags, ...) { MODE NEXT(open); return fails_at(path, OPEN) ? -1 : next(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE NEXT(open64); return fails_at(path, OPEN) ? -1 : next(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE NEXT(openat); return fails_at(path, OPEN) ? -1 : next(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE NEXT(openat64); return fails_at(path, OPEN) ? -1 : next(at, path, flags, mode); }
ssize_t read(int fd, void *to, size_t size) { NEXT(read); return fails(fd, READ) ? -1 : next(fd, to, size); }
ssize_t pread(int fd, void *to, size_t size, off_t at) { NEXT(pread); return fails(fd, READ) ? -1 : next(fd, to, size, at); }
ssize_t pread64(int fd, void *to, size_t size, off64_t at) { NEXT(pread64); return fails(fd, READ) ? -1 : next(fd, to, size, at); }
ssize_t preadv(int fd, const struct iovec *to, int n, off_t at) { NEXT(preadv); return fails(fd, READ) ? -1 : next(fd, to, n, at); }
ssize_t preadv64(int fd, const struct iovec *to, int n, off64_t at) { NEXT(preadv64); return fails(fd, READ) ? -1 : next(fd, to, n, at); }
ssize_t preadv2(int fd, const struct iovec *to, int n, off_t at, int f) { NEXT(preadv2); return fails(fd, READ) ? -1 : next(fd, to, n, at, f); }
ssize_t preadv64v2(int fd, const struct iovec *to, int n, off64_t at, int f) { NEXT(preadv64v2); return fails(fd, READ) ? -1 : next(fd, to, n, at, f); }
ssize_t write(int fd, const void *from, size_t size) { NEXT(write); return fails(fd, WRITE) ? -1 : next(fd, from, size); }
ssize_t writev(int fd, const struct iovec *from, int n) { NEXT(writev); return fails(fd, WRITE) ? -1 : next(fd, from, n); }
ssize_t pwrite(int fd, const void *from, size_t size, off_t at) { NEXT(pwrite); return fails(fd, WRITE) ? -1 : next(fd, from, size, at); }
ssize_t pwrite64(int fd, const void *from, size_t size, off64_t at) { NEXT(pwrite64); return fails(fd, WRITE) ? -1 : next(fd, from, size, at); }
int fsync(int fd) { NEXT(fsync); return fails(fd, FSYNC) ? -1 : next(fd); }
int fdatasync(int fd) { NEXT(fdatasync); return fails(fd, FSYNC) ? -1 : next(fd); }
int rename(const char *from, const char *to) { NEXT(rename); return fails_at(to, RENAME) ? -1 : next(from, to); }
int renameat(int a, const char *from, int b, const char *to) { NEXT(renameat); return fails_at(to, RENAME) ? -1 : next(a, from, b, to); }
int renameat2(int a, const char *from, int b, const char *to, unsigned f) { NEXT(renameat2); return fails_at(to, RENAME) ? -1 : next(a, from, b, to, f); }
