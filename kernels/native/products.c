// Products with a weight in panels, y [n, out] = x [n, in] times its transpose.
#include <stdlib.h>

#include "panels.h"

enum { MOST_BYTES = 3 << 19 }; // of x that are multiplied by a panel before the next one: what a cache keeps

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

static void add_few(int kind, int rows, const float *x, long in, const uint8_t *panel, floats *left, floats *right) {
    switch (kind) {
    case FLOAT32: WITH_ROWS(rows, few(FLOAT32, ROWS, x, in, panel, left, right)); break;
    case BFLOAT16: WITH_ROWS(rows, few(BFLOAT16, ROWS, x, in, panel, left, right)); break;
    case EIGHT_BITS: WITH_ROWS(rows, few(EIGHT_BITS, ROWS, x, in, panel, left, right)); break;
    case FOUR_BITS: WITH_ROWS(rows, few(FOUR_BITS, ROWS, x, in, panel, left, right)); break;
    }
}

// The numbers of a panel as floats: where they lie, if they are some.
static const float *decoded(int kind, const uint8_t *panel, long in, float *numbers) {
    if (kind == FLOAT32) return (const float *)panel;
    float *to = numbers;
    for (long start = 0; start < in; start += BLOCK, panel += block_bytes[kind]) {
        const struct scales of = scales_of(kind, (const float *)panel);
        for (long k = 0; k < BLOCK && start + k < in; k++, to += PANEL) {
            floats a, b;
            decode(kind, panel, k, &of, &a, &b);
            store(to, a);
            store(to + WIDTH, b);
        }
    }
    return numbers;
}

// x [n, in] as tiles of TILE rows, which lie beside each other WIDTH numbers at a time: in strides of a power of two they
// would have the same places in a cache, and it would fetch as many sequences of numbers as there are rows.
static void pack_tiles(const float *x, float *tiles, long n, long in, int threads) {
    const long size = (in + WIDTH - 1) / WIDTH * WIDTH * TILE;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long r = 0; r < n; r++) {
        const float *row = x + r * in;
        float *to = tiles + r / TILE * size + r % TILE * WIDTH;
        long k = 0;
        for (; k + WIDTH <= in; k += WIDTH) store(to + k * TILE, load(row + k));
        if (k < in) memcpy(to + k * TILE, row + k, (size_t)(in - k) * sizeof(float));
    }
}

static void add_many(int rows, const float *tile, const float *numbers, long in, floats *left, floats *right) {
    WITH_ROWS(rows, products(ROWS, tile, WIDTH, WIDTH, TILE * WIDTH, numbers, PANEL, in, left, right));
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

// Rows `first` to `end` of y, the columns of one panel; where it is gated, `up` is what the panel lets by.
static void one_panel(const struct product *of, const float *tiles, long p, long first, long end, float *scratch) {
    const long in = of->in, bytes = (in + BLOCK - 1) / BLOCK * block_bytes[of->kind];
    const uint8_t *panel = of->panels + p * bytes, *up = of->panels + (p + of->out / PANEL) * bytes;
    const float *numbers = 0, *up_numbers = 0;
    if (tiles) { // few rows are multiplied by what is stored
        numbers = decoded(of->kind, panel, in, scratch);
        if (of->is_gated) up_numbers = decoded(of->kind, up, in, scratch + in * PANEL);
    }
    for (long m = first; m < end; m += TILE) {
        const int rows = end - m < TILE ? (int)(end - m) : TILE;
        const float *x = tiles ? tiles + m * ((in + WIDTH - 1) / WIDTH * WIDTH) : of->x + m * in;
        floats left[TILE] = {{0}}, right[TILE] = {{0}}, up_left[TILE] = {{0}}, up_right[TILE] = {{0}};
        if (tiles) add_many(rows, x, numbers, in, left, right);
        else add_few(of->kind, rows, x, in, panel, left, right);
        if (tiles && of->is_gated) add_many(rows, x, up_numbers, in, up_left, up_right);
        else if (of->is_gated) add_few(of->kind, rows, x, in, up, up_left, up_right);
        for (int r = 0; r < rows; r++) {
            float *y = of->y + (m + r) * of->out + p * PANEL;
            if (of->is_gated) left[r] = silu(left[r]) * up_left[r], right[r] = silu(right[r]) * up_right[r];
            put(y, of->out - p * PANEL, left[r], right[r]);
            for (long c = 0; of->bias && c < PANEL && p * PANEL + c < of->out; c++) y[c] += of->bias[p * PANEL + c];
        }
    }
}

// y [n, out] = x [n, in] times the transpose of a weight in panels, plus bias if there is one; where is_gated, the weight
// is [gate, up], out a multiple of PANEL, and y = silu(gate) * up. A row's bits do not depend on n. 0: no memory.
int multiply(const struct product *of) {
    if (!of->n) return 1;
    const long chunks = (of->n * of->in * 4 + MOST_BYTES - 1) / MOST_BYTES;
    const long chunk = (of->n + chunks * TILE - 1) / (chunks * TILE) * TILE;
    const long room = of->n > TILE && of->kind != FLOAT32 ? 2 * of->in * PANEL : 0;
    const long size = of->n > TILE ? (of->n + TILE - 1) / TILE * TILE * ((of->in + WIDTH - 1) / WIDTH * WIDTH) : 0;
    float *scratch = malloc((size_t)(of->threads * room + size + 1) * sizeof(float));
    if (!scratch) return 0;
    float *tiles = size ? scratch + of->threads * room : 0;
    if (tiles) pack_tiles(of->x, tiles, of->n, of->in, of->threads);
    const long at_once = of->n > TILE ? 1 : 4; // panels that a thread takes: one that is held up takes fewer
    for (long first = 0; first < of->n; first += chunk) {
        const long end = first + chunk < of->n ? first + chunk : of->n;
#pragma omp parallel for schedule(dynamic, at_once) num_threads(of->threads)
        for (long p = 0; p < (of->out + PANEL - 1) / PANEL; p++)
            one_panel(of, tiles, p, first, end, scratch + omp_get_thread_num() * room);
    }
    free(scratch);
    return 1;
}
