// Attention of one request with many queries: keys are turned into panels, then tiles of queries are multiplied by them.
#include "attention.h"

enum { QUERIES = 4 * TILE }; // rows of queries whose scores are kept at once

struct prompt {
    long request, token, queries, length; // the first query is of token `token`; the last one at position length - 1
    long begin, end;                      // positions that any query sees, from a multiple of PANEL on
    float *keys;                          // [kv_heads, panels, dim, PANEL], 0 where none is
    float *values;                        // [kv_heads, end - begin, dim]
};

// Scores of a tile of queries, which lie as those of a product.
static void add_scores(int rows, const float *q, const float *keys, long dim, floats *left, floats *right) {
    WITH_ROWS(rows, products(ROWS, q, WIDTH, WIDTH, TILE * WIDTH, keys, PANEL, dim, left, right));
}

static void add_values(int rows, const float *weights, long step, const float *values, long dim, long n, floats *left,
                       floats *right) {
    WITH_ROWS(rows, products(ROWS, weights, step, n, 0, values, dim, n, left, right));
}

static void gather(const struct attention *of, const struct prompt *at) {
    const long dim = of->dim, size = at->end - at->begin, first = first_seen(of, at->length - at->queries);
#pragma omp parallel for schedule(static) num_threads(of->threads)
    for (long t = 0; t < size; t++)
        for (long h = 0; h < of->kv_heads; h++) {
            const float *key = at->begin + t < first ? 0 : key_at(of, at->request, at->begin + t) + h * dim;
            float *to = at->keys + h * padded(size, PANEL) * dim + t / PANEL * PANEL * dim + t % PANEL;
            for (long i = 0; i < dim; i++) to[i * PANEL] = key ? key[i] : 0;
            if (key) memcpy(at->values + (h * size + t) * dim, key + plane_of(of), (size_t)dim * sizeof(float));
        }
}

// Up to QUERIES rows, which are of one head of keys, from row `first` on; a row is a token's head of those that share.
static void some_rows(const struct attention *of, const struct prompt *at, long h, long first, float *scratch) {
    const long dim = of->dim, shared = of->heads / of->kv_heads, all = at->queries * shared;
    const long rows = all - first < QUERIES ? all - first : QUERIES, size = at->end - at->begin;
    const long start = at->length - at->queries; // the first query's position
    const long low = first_seen(of, start + first / shared), last = start + (first + rows - 1) / shared + 1;
    const long from = (low - at->begin) / PANEL * PANEL, room = padded(size, PANEL), wide = room + WIDTH;
    float *q = scratch, *scores = scratch + QUERIES * dim, totals[QUERIES];
    const float *keys = at->keys + h * room * dim, *values = at->values + h * size * dim;

    for (long r = 0; r < rows; r++) {
        const float *x = of->q + ((at->token + (first + r) / shared) * of->heads + h * shared + (first + r) % shared) * dim;
        float *to = q + r / TILE * TILE * dim + r % TILE * WIDTH;
        for (long i = 0; i < dim; i += WIDTH) store(to + i * TILE, load(x + i) * of->scale);
    }
    for (long t = from; t < last - at->begin; t += PANEL)
        for (long r = 0; r < rows; r += TILE) {
            const int tile = rows - r < TILE ? (int)(rows - r) : TILE;
            floats left[TILE] = {{0}}, right[TILE] = {{0}};
            add_scores(tile, q + r * dim, keys + t * dim, dim, left, right);
            for (int i = 0; i < tile; i++) {
                store(scores + (r + i) * wide + t, left[i]);
                store(scores + (r + i) * wide + t + WIDTH, right[i]);
            }
        }
    for (long r = 0; r < rows; r++) {
        const long position = start + (first + r) / shared, begin = first_seen(of, position);
        float *row = scores + r * wide - at->begin;
        for (long t = low; t < begin; t++) row[t] = 0;
        totals[r] = weigh(row + begin, position + 1 - begin);
        for (long t = position + 1; t < last; t++) row[t] = 0;
    }
    for (long r = 0; r < rows; r += TILE)
        for (long d = 0; d < dim; d += PANEL) {
            const int tile = rows - r < TILE ? (int)(rows - r) : TILE;
            floats left[TILE] = {{0}}, right[TILE] = {{0}};
            const long skip = low - at->begin;
            add_values(tile, scores + r * wide + skip, wide, values + skip * dim + d, dim, last - low, left, right);
            for (int i = 0; i < tile; i++) {
                const long row = first + r + i;
                float *out = of->out + ((at->token + row / shared) * of->heads + h * shared + row % shared) * dim + d;
                store(out, left[i] / totals[r + i]);
                store(out + WIDTH, right[i] / totals[r + i]);
            }
        }
}

// `queries` tokens from `token` on are the last of a request's `length` positions. dim is a multiple of PANEL. Returns 0,
// and has done nothing, if a block is not in the cache; -1: no memory.
int attend_prompt(const struct attention *of, long request, long token, long queries, long length) {
    struct prompt at = {request, token, queries, length, first_seen(of, length - queries) / PANEL * PANEL, length, 0, 0};
    if (!are_blocks(of, request, first_seen(of, length - queries), length)) return 0;
    const long size = length - at.begin, room = padded(size, PANEL), shared = of->heads / of->kv_heads;
    const long scratch = QUERIES * (of->dim + room + WIDTH), parts = (queries * shared + QUERIES - 1) / QUERIES;
    at.keys = calloc((size_t)(of->kv_heads * room * of->dim), sizeof(float));
    at.values = malloc((size_t)(of->kv_heads * size * of->dim) * sizeof(float));
    float *scratches = malloc((size_t)(of->threads * scratch) * sizeof(float));
    if (at.keys && at.values && scratches) {
        gather(of, &at);
#pragma omp parallel for schedule(dynamic) num_threads(of->threads)
        for (long i = 0; i < parts * of->kv_heads; i++) { // the last queries see most: they begin
            const long part = parts - 1 - i / of->kv_heads;
            some_rows(of, &at, i % of->kv_heads, part * QUERIES, scratches + omp_get_thread_num() * scratch);
        }
    }
    const int is_done = at.keys && at.values && scratches;
    free(at.keys), free(at.values), free(scratches);
    return is_done ? 1 : -1;
}
