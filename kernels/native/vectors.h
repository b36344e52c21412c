// Sixteen floats at a time, in the compiler's own vectors: it makes of them what the processor has.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef float floats_at __attribute__((vector_size(64), aligned(4))); // where memory need not be aligned

enum { WIDTH = 16, PANEL = 2 * WIDTH };
enum { AHEAD = 32 }; // rows of a panel that are fetched before their turn

INLINE floats load(const float *from) { return *(const floats_at *)from; }

INLINE void store(float *to, floats x) { *(floats_at *)to = x; }

INLINE float sum(floats x) {
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
    eight a[2];
    four b[2];
    memcpy(a, &x, sizeof a);
    a[0] += a[1];
    memcpy(b, a, sizeof b);
    b[0] += b[1];
    return (b[0][0] + b[0][2]) + (b[0][1] + b[0][3]);
}

INLINE ints bits_of(floats x) {
    ints bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE floats of_bits(ints bits) {
    floats x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

// One where all bits of is_one are set, other where none is.
INLINE floats choose(ints is_one, floats one, floats other) {
    return of_bits((is_one & bits_of(one)) | (~is_one & bits_of(other)));
}

// e to the x to about one unit in the last place; 0 below -87.3, infinity above 88.3. NaN stays NaN.
INLINE floats exponential(floats x) {
    const floats zero = {0};
    const float rounder = 12582912.0f; // 1.5 * 2^23: what is added to it is rounded to an integer
    const ints is_low = x < -87.3f, is_high = x > 88.3f;
    x = choose(is_low | is_high, zero, x);
    const floats n = (x * 1.44269504088896f + rounder) - rounder;
    const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f; // log 2 in two parts, the first of few bits
    floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    y *= of_bits((__builtin_convertvector(n, ints) + 127) << 23); // two to the n
    return choose(is_high, zero + INFINITY, choose(is_low, zero, y));
}

INLINE floats silu(floats x) { return x / (exponential(-x) + 1.0f); }

#ifdef __AVX512F__
#define TILE 12 // rows whose sums fit the registers: 32 of 16 floats
#else
#define TILE 3 // 16 of 8 floats, or 32 of 4
#endif

// Add to a tile of sums the products of `rows` rows of x and PANEL columns, for k from 0 to n. Rows lie in parts of
// `part` numbers each, part_step apart: x[k / part * part_step + row * row_step + k % part]; columns at panel[k *
// panel_step]. Sums are added up in the order of k, so that a row's bits do not depend on the others.
INLINE void products(int rows, const float *x, long row_step, long part, long part_step, const float *panel,
                     long panel_step, long n, floats *left, floats *right) {
    floats l[TILE], r[TILE]; // of this function alone: these stay in registers
    for (int i = 0; i < rows; i++) l[i] = left[i], r[i] = right[i];
    for (long start = 0; start < n; start += part, x += part_step)
        for (long k = 0; k < part && start + k < n; k++, panel += panel_step) {
            __builtin_prefetch(panel + AHEAD * panel_step); // beyond the end too, which does no harm
            __builtin_prefetch(panel + AHEAD * panel_step + WIDTH);
            const floats a = load(panel), b = load(panel + WIDTH);
            for (int i = 0; i < rows; i++) {
                l[i] += x[i * row_step + k] * a;
                r[i] += x[i * row_step + k] * b;
            }
        }
    for (int i = 0; i < rows; i++) left[i] = l[i], right[i] = r[i];
}

// Run a statement with ROWS, 1 to TILE, known to the compiler.
#define WITH_ROWS(rows, statement)                                                                                     \
    switch (rows) {                                                                                                    \
        ROWS_CASE(1, statement) ROWS_CASE(2, statement) ROWS_CASE(3, statement) MORE_ROWS(statement)                   \
    }
#define ROWS_CASE(n, statement) case n: { enum { ROWS = n }; statement; break; }
#if TILE == 12
#define MORE_ROWS(statement)                                                                                           \
    ROWS_CASE(4, statement) ROWS_CASE(5, statement) ROWS_CASE(6, statement) ROWS_CASE(7, statement)                    \
    ROWS_CASE(8, statement) ROWS_CASE(9, statement) ROWS_CASE(10, statement) ROWS_CASE(11, statement)                  \
    ROWS_CASE(12, statement)
#else
#define MORE_ROWS(statement)
#endif
