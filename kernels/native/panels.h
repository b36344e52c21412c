// A weight in panels of 32 rows, whose numbers take as few bytes as hold every one of them.
//
// A product of few rows takes as long as reading the weight, and weights that come from a file of fewer bits need not
// be read as float32. A panel is a sequence of numbers along the input, 32 at a time; those of 32 inputs share scales:
//   FLOAT32     32 floats an input
//   BFLOAT16    32 upper halves of floats an input, the first 16 in lower bits, the last 16 in upper ones
//   EIGHT_BITS  32 scales, then 32 codes an input; a number is its code times its scale
//   FOUR_BITS   32 scales and 32 offsets, then 32 codes an input, the first 16 in lower bits; code times scale plus offset
#pragma once

#include "vectors.h"

enum { FLOAT32, BFLOAT16, EIGHT_BITS, FOUR_BITS, KINDS };
enum { BLOCK = 32 }; // inputs that share scales

static const long block_bytes[KINDS] = {BLOCK * PANEL * 4, BLOCK * PANEL * 2, (4 + BLOCK) * PANEL, (8 + BLOCK / 2) * PANEL};

typedef uint8_t bytes __attribute__((vector_size(16), aligned(1)));
typedef int32_t ints_at __attribute__((vector_size(64), aligned(4)));

INLINE floats numbers(bytes codes) { return __builtin_convertvector(__builtin_convertvector(codes, ints), floats); }

struct scales {
    floats left, right, left_offset, right_offset;
};

INLINE struct scales scales_of(int kind, const float *block) {
    struct scales of = {{0}, {0}, {0}, {0}};
    if (kind == FLOAT32 || kind == BFLOAT16) return of;
    of.left = load(block), of.right = load(block + WIDTH);
    if (kind == FOUR_BITS) of.left_offset = load(block + PANEL), of.right_offset = load(block + PANEL + WIDTH);
    else of.left_offset = -128 * of.left, of.right_offset = -128 * of.right;
    return of;
}

// The PANEL numbers of input k of a block. A code times a scale of 11 bits is exact: only the sum is rounded.
INLINE void decode(int kind, const uint8_t *block, long k, const struct scales *of, floats *left, floats *right) {
    if (kind == FLOAT32) {
        *left = load((const float *)block + k * PANEL);
        *right = load((const float *)block + k * PANEL + WIDTH);
    } else if (kind == BFLOAT16) {
        const ints both = *(const ints_at *)(block + k * 2 * PANEL);
        *left = of_bits(both << 16);
        *right = of_bits(both & ~0xffff);
    } else if (kind == EIGHT_BITS) {
        const bytes *codes = (const bytes *)(block + (4 + k) * PANEL);
        *left = numbers(codes[0] ^ 128) * of->left + of->left_offset; // from -128 to 127 to 0 to 255
        *right = numbers(codes[1] ^ 128) * of->right + of->right_offset;
    } else {
        const bytes codes = *(const bytes *)(block + 8 * PANEL + k * WIDTH);
        *left = numbers(codes & 15) * of->left + of->left_offset;
        *right = numbers(codes >> 4) * of->right + of->right_offset;
    }
}
