// Products with a weight in panels, y [n, out] = x [n, in] times its transpose.
#include <stdlib.h>

#include "panels.h"

enum { MOST_BYTES = 1 << 20 }; // of x that are multiplied by a panel before the next one: what a cache keeps

// A tile of sums, straight from what is stored.
INLINE void few(int kind, int rows, const float *x, long in, const uint8_t *panel, floats *left, floats *right) {
    floats l[TILE], r[TILE];
    for (int i = 0; i < rows; i++) l[i] = left[i], r[i] = right[i];
    for (long start = 0; start < in; start += BLOCK, panel += block_bytes[kind]) {
        const struct scales of = scales_of(kind, (const float *)panel);
        const long n = in - start < BLOCK ? in - start : BLOCK;
        for (long k = 0; k < n; k++) {
            floats a, b;
            decode(kind, panel, k, &of, &a, &b);
            for (int i = 0; i < rows; i++) {
                l[i] += x[i * in + start + k] * a;
                r[i] += x[i * in + start + k] * b;
            }
        }
    }
    for (int i = 0; i < rows; i++) left[i] = l[i], right[i] = r[i];
}

INLINE void decoded(int kind, const uint8_t *panel, long in, float *numbers) {
    for (long start = 0; start < in; start += BLOCK, panel += block_bytes[kind]) {
        const struct scales of = scales_of(kind, (const float *)panel);
        for (long k = 0; k < BLOCK && start + k < in; k++, numbers += PANEL) {
            floats a, b;
            decode(kind, panel, k, &of, &a, &b);
            store(numbers, a);
            store(numbers + WIDTH, b);
        }
    }
}

INLINE void put(float *y, long columns, floats left, floats right) {
    float both[PANEL];
    if (columns >= PANEL) {
        store(y, left);
        store(y + WIDTH, right);
        return;
    }
    store(both, left);
    store(both + WIDTH, right);
    memcpy(y, both, (size_t)columns * sizeof(float));
}

struct product {
    const uint8_t *panels;
    const float *x, *bias;
    float *y;
    long n, in, out; // y is [n, out]
    int kind, is_gated, threads;
};

// Rows `first` to `end` of y, the columns of one panel; where it is gated, those of a gate and of what it lets through.
INLINE void one_panel(int kind, const struct product *of, long p, long first, long end, float *scratch) {
    const long in = of->in, bytes = (in + BLOCK - 1) / BLOCK * block_bytes[kind];
    const uint8_t *panel = of->panels + p * bytes, *up = of->panels + (p + of->out / PANEL) * bytes;
    const int is_decoded = kind != FLOAT32 && end - first > TILE;
    if (is_decoded) {
        decoded(kind, panel, in, scratch);
        if (of->is_gated) decoded(kind, up, in, scratch + in * PANEL);
    }
    for (long m = first; m < end; m += TILE) {
        const int rows = end - m < TILE ? (int)(end - m) : TILE;
        const float *x = of->x + m * in;
        floats left[TILE] = {{0}}, right[TILE] = {{0}}, up_left[TILE] = {{0}}, up_right[TILE] = {{0}};
        if (is_decoded) {
            WITH_ROWS(rows, add_products(ROWS, x, in, scratch, PANEL, in, left, right));
            if (of->is_gated)
                WITH_ROWS(rows, add_products(ROWS, x, in, scratch + in * PANEL, PANEL, in, up_left, up_right));
        } else {
            WITH_ROWS(rows, few(kind, ROWS, x, in, panel, left, right));
            if (of->is_gated) WITH_ROWS(rows, few(kind, ROWS, x, in, up, up_left, up_right));
        }
        for (int r = 0; r < rows; r++) {
            if (of->is_gated) left[r] = silu(left[r]) * up_left[r], right[r] = silu(right[r]) * up_right[r];
            float *y = of->y + (m + r) * of->out + p * PANEL;
            put(y, of->out - p * PANEL, left[r], right[r]);
            for (long c = 0; of->bias && c < PANEL && p * PANEL + c < of->out; c++) y[c] += of->bias[p * PANEL + c];
        }
    }
}

// y [n, out] = x [n, in] times the transpose of a weight in panels, plus bias if there is one; where is_gated, the weight
// is [gate, up], out a multiple of PANEL, and y = silu(gate) * up. A row's bits do not depend on n. 0: no memory.
int multiply(const struct product *of) {
    const long most = MOST_BYTES / 4 / of->in / TILE * TILE, chunk = most > TILE ? most : TILE;
    const long room = of->n > TILE && of->kind != FLOAT32 ? 2 * of->in * PANEL : 0;
    float *scratch = malloc((size_t)(of->threads * room + 1) * sizeof(float));
    if (!scratch) return 0;
    for (long first = 0; first < of->n; first += chunk) {
        const long end = first + chunk < of->n ? first + chunk : of->n;
#pragma omp parallel for schedule(static) num_threads(of->threads)
        for (long p = 0; p < (of->out + PANEL - 1) / PANEL; p++) {
            float *own = scratch + omp_get_thread_num() * room;
            switch (of->kind) {
            case FLOAT32: one_panel(FLOAT32, of, p, first, end, own); break;
            case BFLOAT16: one_panel(BFLOAT16, of, p, first, end, own); break;
            case EIGHT_BITS: one_panel(EIGHT_BITS, of, p, first, end, own); break;
            case FOUR_BITS: one_panel(FOUR_BITS, of, p, first, end, own); break;
            }
        }
    }
    free(scratch);
    return 1;
}
