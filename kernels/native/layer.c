// What stands between the products of a layer: norms, activations, turning by position, writing to the cache.
#include "vectors.h"

// out = x / rms(x) * gain over rows of `width`; where there is a residual, x is x + residual, which goes to total.
INLINE void rms_norm_row(const float *x, const float *residual, const float *gain, float eps, float *total,
                         float *out, long width) {
    floats squares = {0};
    float tail = 0;
    long i = 0;
    if (residual) {
        for (; i + WIDTH <= width; i += WIDTH) {
            const floats at = load(x + i) + load(residual + i);
            store(total + i, at);
            squares += at * at;
        }
        for (; i < width; i++) total[i] = x[i] + residual[i], tail += total[i] * total[i];
        x = total;
    } else {
        for (; i + WIDTH <= width; i += WIDTH) squares += load(x + i) * load(x + i);
        for (; i < width; i++) tail += x[i] * x[i];
    }
    const float scale = 1 / sqrtf((sum(squares) + tail) / (float)width + eps);
    for (i = 0; i + WIDTH <= width; i += WIDTH) store(out + i, load(x + i) * scale * load(gain + i));
    for (; i < width; i++) out[i] = x[i] * scale * gain[i];
}

void rms_norm(const float *x, const float *residual, const float *gain, float eps, float *total, float *out, long n,
              long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n * width > 16384)
    for (long r = 0; r < n; r++)
        rms_norm_row(x + r * width, residual ? residual + r * width : 0, gain, eps, total ? total + r * width : 0,
                     out + r * width, width);
}

// y [n, width] = silu(gate) * up of gate_up [n, gate | up].
void silu_and_mul(const float *gate_up, float *y, long n, long width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (n * width > 4096)
    for (long r = 0; r < n; r++) {
        const float *gate = gate_up + 2 * r * width, *up = gate + width;
        long i = 0;
        for (; i + WIDTH <= width; i += WIDTH) store(y + r * width + i, silu(load(gate + i)) * load(up + i));
        for (; i < width; i++) y[r * width + i] = silu((floats){0} + gate[i])[0] * up[i];
    }
}

// The pairs (i, i + half) of a head turned by their angles.
INLINE void turn(const float *x, const float *cosine, const float *sine, float *y, long half) {
    long i = 0;
    for (; i + WIDTH <= half; i += WIDTH) {
        const floats low = load(x + i), high = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(y + i, low * c - high * s);
        store(y + half + i, high * c + low * s);
    }
    for (; i < half; i++) {
        const float low = x[i], high = x[half + i];
        y[i] = low * cosine[i] - high * sine[i];
        y[half + i] = high * cosine[i] + low * sine[i];
    }
}

struct turning { // how heads are laid out
    long tokens, heads, kv_heads, dim, blocks, block_size;
    float eps;
    int threads;
};

// Heads of qkv [tokens, heads + 2 * kv_heads, dim], normed if there are gains and turned: queries go to q [tokens,
// heads, dim], keys and values to their slots of kv [blocks, 2, block_size, kv_heads, dim]. x is turned by cosine and
// sine [tokens, dim / 2]. A slot of several tokens holds one of them or a mixture. Returns 0, and has written nothing,
// if a slot is not in the cache.
int turn_and_write(const float *qkv, const float *cosine, const float *sine, const float *q_gain, const float *k_gain,
                   const int64_t *slots, float *q, float *kv, const struct turning *of) {
    const long heads = of->heads, kv_heads = of->kv_heads, dim = of->dim, size = of->block_size, token = kv_heads * dim;
    for (long t = 0; t < of->tokens; t++)
        if (slots[t] < 0 || slots[t] >= of->blocks * size) return 0;
#pragma omp parallel for schedule(static) num_threads(of->threads) if (of->tokens > 8)
    for (long t = 0; t < of->tokens; t++) {
        const float *from = qkv + t * (heads + 2 * kv_heads) * dim;
        const float *c = cosine + t * dim / 2, *s = sine + t * dim / 2;
        float *key = kv + (slots[t] / size * size + slots[t]) * token;
        for (long h = 0; h < heads + kv_heads; h++, from += dim) {
            const float *gain = h < heads ? q_gain : k_gain;
            float *to = h < heads ? q + (t * heads + h) * dim : key + (h - heads) * dim;
            float normed[gain ? dim : 1];
            if (gain) rms_norm_row(from, 0, gain, of->eps, 0, normed, dim);
            turn(gain ? normed : from, c, s, to, dim / 2);
        }
        memcpy(key + size * token, from, (size_t)token * sizeof(float));
    }
    return 1;
}
