/* Preloaded into a broker: its wall clock is ahead by what the file CLOCK_STATE says, an i64 of ns.
   What it is forked from has the library, and no such file: so it is looked for until it is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

static void set_up(void) {
    const char *path = getenv("CLOCK_STATE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof *ahead_ns, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (memory != MAP_FAILED) ahead_ns = memory;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(clock, now);
    if (failed || clock != CLOCK_REALTIME) return failed;
    if (!ahead_ns) set_up();
    if (!ahead_ns) return 0;
    int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + *ahead_ns;
    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &found)) return -1;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (kept) *kept = found.tv_sec;
    return found.tv_sec;
}
