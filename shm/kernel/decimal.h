/* Numbers with a point in text, as Java's Double.valueOf takes them, whatever the process's locale. */
#ifndef COMETMQ_DECIMAL_H
#define COMETMQ_DECIMAL_H

#include <locale.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define DECIMAL_BYTES_MAX 511

static locale_t decimal_locale; /* the "C" locale; made when the kernel is loaded */

static inline void decimal_prepare(void) { decimal_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0); }

/* Digits of a base from `at` on; where they end. */
static inline size_t decimal_digits(const uint8_t *text, size_t at, size_t count, int hex) {
    while (at < count && ((text[at] >= '0' && text[at] <= '9') ||
                          (hex && (text[at] | 32) >= 'a' && (text[at] | 32) <= 'f')))
        at++;
    return at;
}

/* Whether strtod's text has Java's form: strtod also takes "inf", "nan" and hexadecimal without p. */
static inline int decimal_is_formed(const uint8_t *text, size_t count) {
    size_t at = 0, end, digits;
    int hex;
    if (at < count && (text[at] == '+' || text[at] == '-')) at++;
    if (count - at == 3 && memcmp(text + at, "NaN", 3) == 0) return 1;
    if (count - at == 8 && memcmp(text + at, "Infinity", 8) == 0) return 1;
    hex = count - at > 2 && text[at] == '0' && (text[at + 1] | 32) == 'x';
    if (hex) at += 2;
    end = decimal_digits(text, at, count, hex);
    digits = end - at;
    at = end;
    if (at < count && text[at] == '.') {
        end = decimal_digits(text, at + 1, count, hex);
        digits += end - at - 1;
        at = end;
    }
    if (digits == 0) return 0;
    if (at < count && (text[at] | 32) == (hex ? 'p' : 'e')) {
        at++;
        if (at < count && (text[at] == '+' || text[at] == '-')) at++;
        end = decimal_digits(text, at, count, 0);
        if (end == at) return 0;
        return end == count;
    }
    return !hex && at == count;
}

static inline double decimal_of(const uint8_t *text, size_t count, int *bad) {
    char copy[DECIMAL_BYTES_MAX + 1];
    uint64_t whole = 0;
    size_t at;
    *bad = 0;
    while (count && text[0] <= ' ') text++, count--;
    while (count && text[count - 1] <= ' ') count--;
    if (count && count <= 15) { /* plain digits are exact */
        for (at = 0; at < count && text[at] >= '0' && text[at] <= '9'; at++) whole = 10 * whole + (text[at] - '0');
        if (at == count) return (double)whole;
    }
    if (count > 1 && memchr("fFdD", text[count - 1], 4) && text[count - 2] != 'x' && text[count - 2] != 'X') {
        if (decimal_is_formed(text, count - 1)) count--; /* Java's suffix */
    }
    if (count > DECIMAL_BYTES_MAX || !decimal_is_formed(text, count)) {
        *bad = 1;
        return 0;
    }
    memcpy(copy, text, count);
    copy[count] = 0;
    return strtod_l(copy, NULL, decimal_locale);
}

#endif
