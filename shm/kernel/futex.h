/* Sleeping on words that another process writes: futexes, of which Linux 5.16 waits for several. */
#ifndef COMETMQ_FUTEX_H
#define COMETMQ_FUTEX_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

/* struct futex_waitv and FUTEX_32, which older headers lack. */
typedef struct { uint64_t value, address; uint32_t flags, reserved; } wait_entry;
enum { WAIT_32_BITS = 2 };

static inline void fill_entry(wait_entry *entry, const void *word, uint32_t value, int shared) {
    entry->value = value;
    entry->address = (uint64_t)(uintptr_t)word;
    entry->flags = WAIT_32_BITS | (shared ? 0 : FUTEX_PRIVATE_FLAG);
    entry->reserved = 0;
}

static inline long wake_all(const void *word, int shared) {
    return syscall(SYS_futex, word, FUTEX_WAKE | (shared ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX,
                   NULL, NULL, 0);
}

/* A wake word: odd while anybody sleeps on it. Whoever makes it even moves it on as well, so that a
   sleeper that had not come to sleep finds another value than it made odd. */
static inline uint32_t load32(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline uint32_t make_odd(uint32_t *word) { return __atomic_fetch_or(word, 1, __ATOMIC_SEQ_CST) | 1; }
static inline int make_even(uint32_t *word) {
    uint32_t value = load32(word);
    return (value & 1) && __atomic_compare_exchange_n(word, &value, value + 1, 0, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_ACQUIRE);
}
static inline void move_on(uint32_t *word) {
    uint32_t value = load32(word);
    while (!__atomic_compare_exchange_n(word, &value, (value & ~1u) + 2, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_ACQUIRE)) {}
}

static inline int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* 0 when woken, else the errno: EAGAIN (a word differs), ETIMEDOUT, EINTR, ENOSYS. */
static inline int wait_for_any(wait_entry *entries, unsigned count, int64_t until_ns) {
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    long woken = syscall(SYS_futex_waitv, entries, count, 0, &until, CLOCK_MONOTONIC);
    return woken < 0 ? errno : 0;
}

/* The same for one word, which is shared; every kernel has it. */
static inline int wait_for_one(const uint32_t *word, uint32_t value, int64_t until_ns) {
    int64_t left_ns = until_ns - monotonic_ns();
    struct timespec left = {left_ns / 1000000000, left_ns % 1000000000};
    if (left_ns <= 0) return ETIMEDOUT;
    return syscall(SYS_futex, word, FUTEX_WAIT, value, &left, NULL, 0) < 0 ? errno : 0;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#endif
