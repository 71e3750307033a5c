/* Fails the nth system call that changes the store, or cuts the power there.
 *
 * Preloaded into every process of a broker. Told by the environment, when it is loaded or when
 * fault_set_up is called:
 *
 *   FAULT_STORE   the store; only calls on paths and descriptors below it count
 *   FAULT_PLACE   a folder of it, such as /commitlog/; only what is in that one; empty: all
 *   FAULT_STATE   a file of 4096 bytes that all processes map, see struct state
 *   FAULT_CALLS   the names to be counted, between commas; empty: all of them
 *   FAULT_ERRNO   what a failing call reports; 0: the power is cut instead
 *   FAULT_FOREVER 1: every call from the nth on fails, not only that one
 *   FAULT_MOUNT   where the disk is mounted, for the cut
 *
 * A call that is to fail is not made. At a cut the file system is shut down before the call, and the
 * process stops where it is, until the harness kills it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FS_IOC_SHUTDOWN _IOR('X', 125, uint32_t)
#define NO_LOG_FLUSH 2

struct state {
    _Atomic uint64_t calls; /* counted so far, by all processes */
    _Atomic uint64_t at;    /* the call to fail; 0: only count */
    _Atomic uint64_t hit;   /* how many were failed */
    _Atomic uint64_t when;  /* CLOCK_MONOTONIC of the first of them, ns */
    char what[256];         /* the first of them, in words */
};

static struct state *state;
static char store[PATH_MAX], place[PATH_MAX], calls[512], mount_path[PATH_MAX];
static size_t store_length;
static int fault_errno, forever;

__attribute__((constructor)) void fault_set_up(void) {
    const char *path = getenv("FAULT_STATE"), *wanted = getenv("FAULT_STORE");
    if (!path || !wanted)
        return;
    int file = (int)(intptr_t)((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open"))(
        path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return;
    void *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED)
        return;
    snprintf(store, sizeof store, "%s", wanted);
    store_length = strlen(store);
    snprintf(calls, sizeof calls, ",%s,", getenv("FAULT_CALLS") ? getenv("FAULT_CALLS") : "");
    snprintf(mount_path, sizeof mount_path, "%s", getenv("FAULT_MOUNT") ? getenv("FAULT_MOUNT") : "");
    snprintf(place, sizeof place, "%s", getenv("FAULT_PLACE") ? getenv("FAULT_PLACE") : "");
    fault_errno = getenv("FAULT_ERRNO") ? atoi(getenv("FAULT_ERRNO")) : EIO;
    forever = getenv("FAULT_FOREVER") && atoi(getenv("FAULT_FOREVER"));
    state = memory;
}

static int below(const char *path) {
    return path && strncmp(path, store, store_length) == 0 &&
           (path[store_length] == '/' || path[store_length] == 0) &&
           strncmp(path + store_length, place, strlen(place)) == 0;
}

static int wanted(const char *name) {
    char between[64];
    snprintf(between, sizeof between, ",%s,", name);
    return strcmp(calls, ",,") == 0 || strstr(calls, between) != NULL;
}

static void cut_power(void) {
    int folder = (int)((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open"))(
        mount_path, O_RDONLY | O_DIRECTORY);
    uint32_t how = NO_LOG_FLUSH;
    ioctl(folder, FS_IOC_SHUTDOWN, &how);
    for (;;)
        pause(); /* dark */
}

/* Whether this call has to fail; errno is set then. */
static int fails(const char *name, const char *path) {
    int before = errno;
    if (!state || !below(path) || !wanted(name))
        return 0;
    uint64_t number = atomic_fetch_add(&state->calls, 1) + 1, at = atomic_load(&state->at);
    errno = before;
    if (!at || (forever ? number < at : number != at))
        return 0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t none = 0;
    atomic_compare_exchange_strong(&state->when, &none, now.tv_sec * 1000000000ull + now.tv_nsec);
    if (atomic_fetch_add(&state->hit, 1) == 0)
        snprintf(state->what, sizeof state->what, "%s %.200s", name, path + store_length);
    if (!fault_errno)
        cut_power();
    errno = fault_errno;
    return 1;
}

static int fails_at(const char *name, int file) {
    char link[64], path[PATH_MAX];
    if (!state)
        return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(name, path);
}

/* The same for the file that is mapped at an address. */
static int fails_in(const char *name, const void *where) {
    char line[PATH_MAX + 128], path[PATH_MAX];
    unsigned long begin, end;
    if (!state)
        return 0;
    int before = errno, found = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && !found && fgets(line, sizeof line, maps))
        found = sscanf(line, "%lx-%lx %*s %*s %*s %*s %4095[^\n]", &begin, &end, path) == 3 &&
                begin <= (unsigned long)where && (unsigned long)where < end;
    if (maps)
        fclose(maps);
    errno = before;
    return found && fails(name, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                                 \
    int name(const char *path, int flags, ...) {                                                   \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = va_arg(rest, mode_t);                                                        \
        va_end(rest);                                                                              \
        if ((flags & O_CREAT) && fails("create", path))                                            \
            return -1;                                                                             \
        return REAL(name)(path, flags, mode);                                                      \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                               \
    int name(int folder, const char *path, int flags, ...) {                                       \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode_t mode = va_arg(rest, mode_t);                                                        \
        va_end(rest);                                                                              \
        if ((flags & O_CREAT) && fails("create", path))                                            \
            return -1;                                                                             \
        return REAL(name)(folder, path, flags, mode);                                              \
    }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *data, size_t count) {
    return fails_at("write", file) ? -1 : REAL(write)(file, data, count);
}
ssize_t pwrite(int file, const void *data, size_t count, off_t at) {
    return fails_at("write", file) ? -1 : REAL(pwrite)(file, data, count, at);
}
ssize_t pwrite64(int file, const void *data, size_t count, off64_t at) {
    return fails_at("write", file) ? -1 : REAL(pwrite64)(file, data, count, at);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    return fails_at("write", file) ? -1 : REAL(writev)(file, parts, count);
}
int fsync(int file) { return fails_at("fsync", file) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return fails_at("fdatasync", file) ? -1 : REAL(fdatasync)(file); }
int msync(void *where, size_t count, int flags) {
    return fails_in("msync", where) ? -1 : REAL(msync)(where, count, flags);
}
int sync_file_range(int file, off64_t at, off64_t count, unsigned int flags) {
    return fails_at("sync_file_range", file) ? -1 : REAL(sync_file_range)(file, at, count, flags);
}
int ftruncate(int file, off_t size) {
    return fails_at("ftruncate", file) ? -1 : REAL(ftruncate)(file, size);
}
int ftruncate64(int file, off64_t size) {
    return fails_at("ftruncate", file) ? -1 : REAL(ftruncate64)(file, size);
}
int fallocate(int file, int mode, off_t at, off_t count) {
    return fails_at("fallocate", file) ? -1 : REAL(fallocate)(file, mode, at, count);
}
int fallocate64(int file, int mode, off64_t at, off64_t count) {
    return fails_at("fallocate", file) ? -1 : REAL(fallocate64)(file, mode, at, count);
}
/* These two return the error, and leave errno alone. */
int posix_fallocate(int file, off_t at, off_t count) {
    return fails_at("fallocate", file) ? errno : REAL(posix_fallocate)(file, at, count);
}
int posix_fallocate64(int file, off64_t at, off64_t count) {
    return fails_at("fallocate", file) ? errno : REAL(posix_fallocate64)(file, at, count);
}
int rename(const char *from, const char *to) {
    return fails("rename", from) ? -1 : REAL(rename)(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
    return fails("rename", from) ? -1 : REAL(renameat)(a, from, b, to);
}
int link(const char *from, const char *to) { return fails("link", from) ? -1 : REAL(link)(from, to); }
int linkat(int a, const char *from, int b, const char *to, int flags) {
    return fails("link", from) ? -1 : REAL(linkat)(a, from, b, to, flags);
}
int unlink(const char *path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags) {
    return fails("unlink", path) ? -1 : REAL(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) { return fails("unlink", path) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) {
    return fails("mkdir", path) ? -1 : REAL(mkdir)(path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    return fails("mkdir", path) ? -1 : REAL(mkdirat)(folder, path, mode);
}
void *mmap(void *where, size_t count, int protection, int flags, int file, off_t at) {
    if (file >= 0 && state && fails_at("mmap", file))
        return MAP_FAILED;
    return REAL(mmap)(where, count, protection, flags, file, at);
}
void *mmap64(void *where, size_t count, int protection, int flags, int file, off64_t at) {
    if (file >= 0 && state && fails_at("mmap", file))
        return MAP_FAILED;
    return REAL(mmap64)(where, count, protection, flags, file, at);
}
