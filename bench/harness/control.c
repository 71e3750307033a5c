/* Bare loops that the figures are held against: what memory and disk cost without any broker.
 *
 *   control memcpy BYTES COUNT            copies into resident memory: nanoseconds of all
 *   control fdatasync PATH BYTES COUNT    pwrite and fdatasync: nanoseconds of each, one a line
 *   control write PATH BYTES direct|cached  one after the other, then fdatasync: nanoseconds of all
 *   control pages PATH BYTES              first stores into each page of a new file, and the same
 *                                         into what is resident now: nanoseconds of both
 *   control read PATH...                  reads files from begin to end: bytes, nanoseconds
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { ARENA = 256 << 20, FILE_BYTES = 16 << 20, PAGE = 4096, READ_BYTES = 1 << 20, WRITE_BYTES = 4 << 20 };

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int copy(size_t bytes, long count) {
    char *arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (arena == MAP_FAILED) fail("mmap");
    char *record = malloc(bytes);
    memset(record, 7, bytes);
    volatile uint64_t wrote = 0;
    size_t at = 0;
    int64_t began = now_ns();
    for (long each = 0; each < count; each++) {
        if (at + bytes > ARENA) at = 0;
        memcpy(arena + at, record, bytes);
        at += bytes;
        __atomic_store_n(&wrote, wrote + bytes, __ATOMIC_RELEASE);
    }
    printf("%lld\n", (long long)(now_ns() - began));
    return 0;
}

static int commit(const char *path, size_t bytes, long count) {
    static char page[PAGE];
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0) fail(path);
    for (off_t at = 0; at < FILE_BYTES; at += PAGE)
        if (pwrite(file, page, PAGE, at) != PAGE) fail("pwrite");
    if (fsync(file)) fail("fsync");
    char *record = calloc(1, bytes);
    off_t at = 0;
    for (long each = 0; each < count; each++) {
        int64_t began = now_ns();
        if (pwrite(file, record, bytes, at) != (ssize_t)bytes) fail("pwrite");
        if (fdatasync(file)) fail("fdatasync");
        printf("%lld\n", (long long)(now_ns() - began));
        at = (at + bytes) % (FILE_BYTES - bytes);
    }
    unlink(path);
    return 0;
}

static int write_all(const char *path, long long bytes, int direct) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | (direct ? O_DIRECT : 0), 0600);
    if (file < 0) fail(path);
    char *buffer = aligned_alloc(PAGE, WRITE_BYTES);
    for (int each = 0; each < WRITE_BYTES; each++) buffer[each] = rand();
    int64_t began = now_ns();
    for (long long at = 0; at < bytes; at += WRITE_BYTES)
        if (write(file, buffer, WRITE_BYTES) != WRITE_BYTES) fail("write");
    if (fdatasync(file)) fail("fdatasync");
    printf("%lld\n", (long long)(now_ns() - began));
    unlink(path);
    return 0;
}

/* A byte into each page through a new mapping: without and with the page in the page cache. */
static int64_t store_all(int file, long long bytes) {
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) fail("mmap");
    int64_t began = now_ns();
    for (long long at = 0; at < bytes; at += PAGE) *(volatile char *)(memory + at) = 7;
    int64_t took = now_ns() - began;
    munmap(memory, bytes);
    return took;
}

static int store_pages(const char *path, long long bytes) {
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0) fail(path);
    if (fallocate(file, 0, 0, bytes)) fail("fallocate");
    int64_t fresh = store_all(file, bytes);
    printf("%lld %lld\n", (long long)fresh, (long long)store_all(file, bytes));
    unlink(path);
    return 0;
}

static int read_all(int count, char **paths) {
    char *buffer = malloc(READ_BYTES);
    long long bytes = 0;
    int64_t began = now_ns();
    for (int each = 0; each < count; each++) {
        int file = open(paths[each], O_RDONLY);
        if (file < 0) fail(paths[each]);
        posix_fadvise(file, 0, 0, POSIX_FADV_SEQUENTIAL);
        ssize_t got;
        while ((got = read(file, buffer, READ_BYTES)) > 0) bytes += got;
        if (got < 0) fail(paths[each]);
        close(file);
    }
    printf("%lld %lld\n", bytes, (long long)(now_ns() - began));
    return 0;
}

int main(int count, char **words) {
    if (count == 4 && !strcmp(words[1], "memcpy")) return copy(atol(words[2]), atol(words[3]));
    if (count == 5 && !strcmp(words[1], "fdatasync"))
        return commit(words[2], atol(words[3]), atol(words[4]));
    if (count == 5 && !strcmp(words[1], "write"))
        return write_all(words[2], atoll(words[3]), !strcmp(words[4], "direct"));
    if (count == 4 && !strcmp(words[1], "pages")) return store_pages(words[2], atoll(words[3]));
    if (count > 2 && !strcmp(words[1], "read")) return read_all(count - 2, words + 2);
    fprintf(stderr, "usage: control memcpy BYTES COUNT | fdatasync PATH BYTES COUNT |"
                    " write PATH BYTES direct|cached | pages PATH BYTES | read PATH...\n");
    return 2;
}
