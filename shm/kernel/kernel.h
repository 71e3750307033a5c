/* What Cython cannot say: byte order, atomics, and CRC-32 folded with carry-less multiplication. */
#ifndef COMETMQ_KERNEL_H
#define COMETMQ_KERNEL_H

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static inline uint16_t load_be16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return __builtin_bswap16(v); }
static inline uint32_t load_be32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return __builtin_bswap32(v); }
static inline uint64_t load_be64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return __builtin_bswap64(v); }
static inline void store_be16(uint8_t *p, uint16_t v) { v = __builtin_bswap16(v); memcpy(p, &v, 2); }
static inline void store_be32(uint8_t *p, uint32_t v) { v = __builtin_bswap32(v); memcpy(p, &v, 4); }
static inline void store_be64(uint8_t *p, uint64_t v) { v = __builtin_bswap64(v); memcpy(p, &v, 8); }

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the store's integers are big-endian; the helpers above assume a little-endian machine"
#endif

static inline uint64_t load_acquire64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void store_release64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline void full_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline uint8_t exchange8(uint8_t *p, uint8_t v) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); }
static inline uint64_t load_relaxed64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }

/* Aligned words of a file; one that is torn would name an entry that is none. */
static inline uint32_t load_acquire_be32(const uint8_t *p) {
    return __builtin_bswap32(__atomic_load_n((const uint32_t *)p, __ATOMIC_ACQUIRE));
}
static inline void store_release_be32(uint8_t *p, uint32_t v) {
    __atomic_store_n((uint32_t *)p, __builtin_bswap32(v), __ATOMIC_RELEASE);
}
/* The empty statements keep the calls: gcc drops that of a function that does nothing but prefetch. */
static inline void prefetch_to_write(const uint8_t *p) { __builtin_prefetch(p, 1); __asm__ volatile("" : : "r"(p)); }
static inline void prefetch_to_read(const uint8_t *p) { __builtin_prefetch(p, 0); __asm__ volatile("" : : "r"(p)); }

/* For texts of a few bytes, for which a call of the C library costs more than what it does. */
static inline int same_bytes(const uint8_t *a, const uint8_t *b, ptrdiff_t count) {
    uint64_t left, right;
    for (; count >= 8; a += 8, b += 8, count -= 8) {
        memcpy(&left, a, 8);
        memcpy(&right, b, 8);
        if (left != right)
            return 0;
    }
    for (; count > 0; a++, b++, count--)
        if (*a != *b)
            return 0;
    return 1;
}
/* The first byte of that value, or `stop`. */
static inline const uint8_t *find_byte(const uint8_t *at, const uint8_t *stop, uint8_t value) {
    uint64_t word, zeros;
    for (; stop - at >= 8; at += 8) {
        memcpy(&word, at, 8);
        word ^= value * 0x0101010101010101u; /* what is looked for becomes 0 */
        zeros = (word - 0x0101010101010101u) & ~word & 0x8080808080808080u;
        if (zeros)
            return at + (__builtin_ctzll(zeros) >> 3); /* those above the first may be wrong */
    }
    while (at < stop && *at != value)
        at++;
    return at;
}

/* Java's String.hashCode, eight characters a step: h * 31^8 + c0 * 31^7 + ... + c7. */
static inline int is_ascii8(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, 8);
    return (word & 0x8080808080808080u) == 0;
}
static inline uint32_t hash_ascii8(uint32_t h, const uint8_t *p) {
    uint32_t high = ((p[0] * 31u + p[1]) * 31u + p[2]) * 31u + p[3];
    uint32_t low = ((p[4] * 31u + p[5]) * 31u + p[6]) * 31u + p[7];
    return h * 2487512833u + high * 923521u + low;
}

static inline int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* CLOCK_BOOTTIME, not before now: it goes on while the machine sleeps, and nobody sets it. */
static inline int64_t up_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    return (int64_t)now.tv_sec * 1000 + (now.tv_nsec + 999999) / 1000000;
}

/* The time of the last call where that was at most some microseconds ago: to read the clock costs as
   much as to lay down a small record. */
#define RECENT_CYCLES 8192
struct recent { uint64_t cycles; int64_t ms; };

static inline int64_t recent_ms(struct recent *last) {
#if defined(__x86_64__)
    uint64_t cycles = __builtin_ia32_rdtsc();
    if (cycles - last->cycles < RECENT_CYCLES) return last->ms;
    last->cycles = cycles;
#endif
    return last->ms = now_ms();
}

/* A word that a fork of this process finds at 0, however it was forked. NULL where it cannot be had. */
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
static inline uint32_t *word_wiped_on_fork(void) {
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return NULL;
    if (madvise(page, 4096, MADV_WIPEONFORK) == 0) return page;
    munmap(page, 4096);
    return NULL;
}
static inline void free_word(uint32_t *word) { munmap(word, 4096); }

/* Threads that sleep on one doorbell: one of them polls it, and tells the others that it rang.
   Who sleeps takes `rings`, arms and looks at its counter, and then waits for another ring. */
struct sleepers {
    pthread_mutex_t lock;
    pthread_cond_t rang;
    uint64_t rings;
    int led;
};

static inline void sleepers_begin(struct sleepers *s) {
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->rang, &clock);
    pthread_condattr_destroy(&clock);
    s->rings = 0;
    s->led = 0;
}

static inline void sleepers_end(struct sleepers *s) {
    pthread_cond_destroy(&s->rang);
    pthread_mutex_destroy(&s->lock);
}

static inline uint64_t sleepers_rings(struct sleepers *s) { return __atomic_load_n(&s->rings, __ATOMIC_SEQ_CST); }

static inline void sleepers_ring(struct sleepers *s) {
    pthread_mutex_lock(&s->lock);
    __atomic_fetch_add(&s->rings, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&s->rang);
    pthread_mutex_unlock(&s->lock);
}

static void sleepers_wait(struct sleepers *s, int doorbell, uint64_t rings, int64_t until_ns) {
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000}, now, left;
    struct pollfd bell = {doorbell, POLLIN, 0};
    uint64_t count;
    int late = 0;
    pthread_mutex_lock(&s->lock);
    while (s->rings == rings && s->led && !late)
        late = pthread_cond_timedwait(&s->rang, &s->lock, &until) == ETIMEDOUT;
    if (s->rings != rings || late) {
        pthread_mutex_unlock(&s->lock);
        return;
    }
    s->led = 1;
    pthread_mutex_unlock(&s->lock);
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t left_ns = until_ns - now.tv_sec * 1000000000 - now.tv_nsec;
    if (left_ns < 0) left_ns = 0;
    left.tv_sec = left_ns / 1000000000;
    left.tv_nsec = left_ns % 1000000000;
    if (ppoll(&bell, 1, &left, NULL) > 0 && read(doorbell, &count, 8) < 0) { /* nobody else reads it */ }
    pthread_mutex_lock(&s->lock);
    s->led = 0;
    __atomic_fetch_add(&s->rings, 1, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&s->rang);
    pthread_mutex_unlock(&s->lock);
}

/* CRC-32 of IEEE 802.3, reflected, as zlib's. Eight tables take eight bytes a step. */
static uint32_t crc_tables[8][256];

__attribute__((constructor)) static void crc_prepare(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ (0xEDB88320u & (0u - (crc & 1)));
        crc_tables[0][byte] = crc;
    }
    for (int table = 1; table < 8; table++)
        for (int byte = 0; byte < 256; byte++)
            crc_tables[table][byte] = (crc_tables[table - 1][byte] >> 8)
                ^ crc_tables[0][crc_tables[table - 1][byte] & 0xFF];
}

static inline uint32_t crc_by_table(uint32_t crc, const uint8_t *p, size_t bytes) {
    while (bytes >= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        word ^= crc;
        crc = crc_tables[7][word & 0xFF] ^ crc_tables[6][(word >> 8) & 0xFF]
            ^ crc_tables[5][(word >> 16) & 0xFF] ^ crc_tables[4][(word >> 24) & 0xFF]
            ^ crc_tables[3][(word >> 32) & 0xFF] ^ crc_tables[2][(word >> 40) & 0xFF]
            ^ crc_tables[1][(word >> 48) & 0xFF] ^ crc_tables[0][word >> 56];
        p += 8;
        bytes -= 8;
    }
    while (bytes--) crc = (crc >> 8) ^ crc_tables[0][(crc ^ *p++) & 0xFF];
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Folds 64 bytes a step (Gopal et al., "Fast CRC Computation Using PCLMULQDQ", 2009; the constants
   are x^n mod P for the reflected polynomial). Takes at least 64 bytes, a multiple of 16. */
__attribute__((target("pclmul,sse4.1")))
static uint32_t crc_by_folding(uint32_t crc, const uint8_t *p, size_t bytes) {
    const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_64 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low_words = _mm_setr_epi32(-1, 0, -1, 0);
    __m128i lane[4];
    for (int i = 0; i < 4; i++) lane[i] = _mm_loadu_si128((const __m128i *)p + i);
    lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
    p += 64;
    bytes -= 64;
    while (bytes >= 64) {
        for (int i = 0; i < 4; i++) {
            __m128i low = _mm_clmulepi64_si128(lane[i], by_512, 0x00);
            __m128i high = _mm_clmulepi64_si128(lane[i], by_512, 0x11);
            __m128i next = _mm_loadu_si128((const __m128i *)p + i);
            lane[i] = _mm_xor_si128(_mm_xor_si128(low, high), next);
        }
        p += 64;
        bytes -= 64;
    }
    __m128i sum = lane[0];
    for (int i = 1; i < 4; i++) {
        __m128i low = _mm_clmulepi64_si128(sum, by_128, 0x00);
        __m128i high = _mm_clmulepi64_si128(sum, by_128, 0x11);
        sum = _mm_xor_si128(_mm_xor_si128(low, high), lane[i]);
    }
    while (bytes >= 16) {
        __m128i low = _mm_clmulepi64_si128(sum, by_128, 0x00);
        __m128i high = _mm_clmulepi64_si128(sum, by_128, 0x11);
        sum = _mm_xor_si128(_mm_xor_si128(low, high), _mm_loadu_si128((const __m128i *)p));
        p += 16;
        bytes -= 16;
    }
    __m128i part = _mm_clmulepi64_si128(sum, by_128, 0x10);
    sum = _mm_xor_si128(_mm_srli_si128(sum, 8), part);
    part = _mm_srli_si128(sum, 4);
    sum = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low_words), by_64, 0x00), part);
    part = _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), barrett, 0x10);
    part = _mm_clmulepi64_si128(_mm_and_si128(part, low_words), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, part), 1);
}

static int crc_can_fold;
__attribute__((constructor)) static void crc_detect(void) {
    __builtin_cpu_init();
    crc_can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
#else
#define crc_can_fold 0
static uint32_t crc_by_folding(uint32_t crc, const uint8_t *p, size_t bytes) {
    return crc_by_table(crc, p, bytes);
}
#endif

static inline uint32_t crc_of(uint32_t crc, const uint8_t *p, size_t bytes) {
    crc = ~crc;
    if (bytes >= 64 && crc_can_fold) {
        size_t folded = bytes & ~(size_t)15;
        crc = crc_by_folding(crc, p, folded);
        p += folded;
        bytes -= folded;
    }
    return ~crc_by_table(crc, p, bytes);
}

#endif
