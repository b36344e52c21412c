// Attention of requests with one query each, over the blocks of a paged cache.
#include "attention.h"

INLINE float dot(const float *a, const float *b, long dim) {
    floats total = {0};
    for (long i = 0; i < dim; i += WIDTH) total += load(a + i) * load(b + i);
    return sum(total);
}

// The heads that share the keys of head h; scores is a scratch for each of them.
INLINE void one_head(const struct attention *of, long request, long token, long h, long end, long dim, float *scores) {
    const long shared = of->heads / of->kv_heads, first = first_seen(of, end - 1), room = padded(end - first, WIDTH);
    const float *q = of->q + (token * of->heads + h * shared) * dim;
    float *out = of->out + (token * of->heads + h * shared) * dim;
    for (long t = first; t < end; t++) {
        const float *key = key_at(of, request, t) + h * dim;
        for (long g = 0; g < shared; g++) scores[g * room + t - first] = of->scale * dot(q + g * dim, key, dim);
    }
    for (long g = 0; g < shared; g++) {
        float *weights = scores + g * room;
        const float total = weigh(weights, end - first);
        floats sums[dim / WIDTH];
        for (long i = 0; i < dim / WIDTH; i++) sums[i] = (floats){0};
        for (long t = first; t < end; t++) {
            const float *value = key_at(of, request, t) + plane_of(of) + h * dim;
            for (long i = 0; i < dim / WIDTH; i++) sums[i] += weights[t - first] * load(value + i * WIDTH);
        }
        for (long i = 0; i < dim / WIDTH; i++) store(out + g * dim + i * WIDTH, sums[i] / total);
    }
}

// Request requests[i] has one query, token tokens[i], the last of lengths[request] positions, of which `longest` is the
// largest. dim is a multiple of WIDTH. Returns 0, and has done nothing, if a block is not in the cache; -1: no memory.
int attend_one_each(const struct attention *of, const int32_t *lengths, const int64_t *requests, const int64_t *tokens,
                    long n, long longest) {
    for (long i = 0; i < n; i++) {
        const long end = lengths[requests[i]];
        if (!are_blocks(of, requests[i], first_seen(of, end - 1), end)) return 0;
    }
    const long room = of->heads / of->kv_heads * padded(longest, WIDTH);
    float *scratch = malloc((size_t)(of->threads * room) * sizeof(float));
    if (!scratch) return -1;
#pragma omp parallel for schedule(dynamic) num_threads(of->threads) if (n * longest * of->kv_heads > 256)
    for (long i = 0; i < n * of->kv_heads; i++) {
        const long h = i % of->kv_heads, r = requests[i / of->kv_heads], token = tokens[i / of->kv_heads];
        float *scores = scratch + omp_get_thread_num() * room;
        if (of->dim == 64) one_head(of, r, token, h, lengths[r], 64, scores);
        else if (of->dim == 128) one_head(of, r, token, h, lengths[r], 128, scores);
        else one_head(of, r, token, h, lengths[r], of->dim, scores);
    }
    free(scratch);
    return 1;
}
