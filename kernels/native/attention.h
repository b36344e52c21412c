// What both ways to attend have in common.
#pragma once

#include <stdlib.h>

#include "vectors.h"

struct attention {
    const float *q, *kv;     // q [tokens, heads, dim]; kv [blocks, 2, block_size, kv_heads, dim]
    float *out;              // [tokens, heads, dim]
    const int32_t *table;    // [requests, table_width] of blocks
    long heads, kv_heads, dim, blocks, block_size, table_width;
    long window;             // a query sees its last so many positions; 0: all
    float scale;
    int threads;
};

// The first position that is seen from `position`.
INLINE long first_seen(const struct attention *of, long position) {
    return of->window && position >= of->window ? position - of->window + 1 : 0;
}

// The key of the first head at a position; its value lies one plane further on.
INLINE const float *key_at(const struct attention *of, long request, long position) {
    const long block = of->table[request * of->table_width + position / of->block_size];
    return of->kv + (2 * block * of->block_size + position % of->block_size) * of->kv_heads * of->dim;
}

INLINE long plane_of(const struct attention *of) { return of->block_size * of->kv_heads * of->dim; }

INLINE long padded(long n, long by) { return (n + by - 1) / by * by; }

// Whether the blocks of positions first to end are in the table and in the cache.
INLINE int are_blocks(const struct attention *of, long request, long first, long end) {
    if (end > of->table_width * of->block_size) return 0;
    for (long b = first / of->block_size; b * of->block_size < end; b++) {
        const int32_t block = of->table[request * of->table_width + b];
        if (block < 0 || block >= of->blocks) return 0;
    }
    return 1;
}

// Scores to weights, in place: e to the score less the largest. Returns their sum. What follows is 0 up to WIDTH.
static inline float weigh(float *scores, long n) {
    for (long t = n; t % WIDTH; t++) scores[t] = -INFINITY;
    floats mosts = load(scores), total = {0};
    for (long t = WIDTH; t < n; t += WIDTH) mosts = choose(load(scores + t) > mosts, load(scores + t), mosts);
    float most = mosts[0];
    for (int i = 1; i < WIDTH; i++) most = mosts[i] > most ? mosts[i] : most;
    for (long t = 0; t < n; t += WIDTH) {
        const floats weights = exponential(load(scores + t) - most);
        store(scores + t, weights);
        total += weights;
    }
    return sum(total);
}
