// Bringing a weight into panels, if the numbers of a kind can be those of the weight.
#include "panels.h"

// x rounded to what a float of 16 bits holds.
static float as_half(float x) {
    if (x < 6.103515625e-5f && x > -6.103515625e-5f) return (x * 16777216 + 12582912.0f - 12582912.0f) / 16777216;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}

static int codes_of(const float *w, float scale, float offset, int most, uint8_t *codes) {
    const float by = scale ? 1 / scale : 0;
    for (int k = 0; k < BLOCK; k++) {
        const float code = (w[k] - offset) * by + 0.5f;
        codes[k] = code >= 0 && code < most + 1 ? (uint8_t)code : 0;
        if (!(codes[k] * scale + offset == w[k])) return 0;
    }
    return 1;
}

static int fits_four_bits(const float *w, float *scale, float *offset, uint8_t *codes) {
    float low = w[0], high = w[0];
    for (int k = 1; k < BLOCK; k++) low = w[k] < low ? w[k] : low, high = w[k] > high ? w[k] : high;
    *offset = low;
    for (int steps = 15; steps; steps--) { // the largest code need not be among those of the block
        *scale = as_half((high - low) / steps);
        if (codes_of(w, *scale, low, 15, codes)) return 1;
    }
    return 0;
}

static int fits_eight_bits(const float *w, float *scale, uint8_t *codes) {
    float most = 0;
    for (int k = 0; k < BLOCK; k++) most = w[k] > most ? w[k] : -w[k] > most ? -w[k] : most;
    *scale = as_half(most / 127);
    return codes_of(w, *scale, -128 * *scale, 255, codes);
}

// Row `column` of a panel, its weights w [BLOCK], in a block. 1 if they fit.
static int put_row(int kind, const float *w, uint8_t *block, int column) {
    float scale, offset;
    uint8_t codes[BLOCK];
    if (kind == FLOAT32) {
        for (int k = 0; k < BLOCK; k++) ((float *)block)[k * PANEL + column] = w[k];
        return 1;
    }
    if (kind == BFLOAT16) {
        uint16_t *halves = (uint16_t *)block + column % WIDTH * 2 + column / WIDTH;
        int rest = 0;
        for (int k = 0; k < BLOCK; k++) {
            uint32_t bits;
            memcpy(&bits, w + k, 4);
            halves[k * PANEL] = (uint16_t)(bits >> 16);
            rest |= bits & 0xffff;
        }
        return !rest;
    }
    if (!(kind == FOUR_BITS ? fits_four_bits(w, &scale, &offset, codes) : fits_eight_bits(w, &scale, codes))) return 0;
    ((float *)block)[column] = scale;
    if (kind == FOUR_BITS) ((float *)block)[PANEL + column] = offset;
    for (int k = 0; k < BLOCK; k++)
        if (kind == EIGHT_BITS) block[(4 + k) * PANEL + column] = codes[k] ^ 128;
        else block[8 * PANEL + k * WIDTH + column % WIDTH] |= codes[k] << (column < WIDTH ? 0 : 4);
    return 1;
}

// Write weight [out, in] to panels, which are all zero before. 1 if every number of it is in them, else 0, soon.
int pack(int kind, const float *weight, uint8_t *panels, long out, long in, int threads) {
    const long blocks = (in + BLOCK - 1) / BLOCK, bytes = block_bytes[kind];
    int fits = 1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long at = 0; at < (out + PANEL - 1) / PANEL * blocks; at++) {
        int any;
#pragma omp atomic read
        any = fits;
        if (!any) continue;
        const long first = at / blocks * PANEL, start = at % blocks * BLOCK;
        const long n = in - start < BLOCK ? in - start : BLOCK, rows = out - first < PANEL ? out - first : PANEL;
        for (int column = 0; column < rows; column++) {
            const float *from = weight + (first + column) * in + start;
            float w[BLOCK] = {0};
            memcpy(w, from, (size_t)n * sizeof(float));
            __builtin_prefetch(from + 2 * BLOCK); // as many sequences as there are rows are not fetched by themselves
            __builtin_prefetch(from + 2 * BLOCK + WIDTH);
            if (!put_row(kind, w, panels + at * bytes, column)) {
#pragma omp atomic write
                fits = 0;
                break;
            }
        }
    }
    return fits;
}
