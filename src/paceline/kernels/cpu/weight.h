/* A packed weight. Eight inputs of an output are adjacent: a word of 4-bit codes, or two words of 8-bit codes. In a word of 4-bit
 * codes, byte b holds input b in its low half and input 4 + b in its high half.
 *
 * For products with float32 activations, 4-bit codes keep their place in the word: code * 2^shift. The other factor is
 * multiplied by 2^-shift beforehand, which gives the same number without a shift. */
#pragma once
#include "simd.h"

enum { CODES4, CODES8, HALF, BFLOAT, FLOAT };
enum { TILE = 32, BLOCK = 32 }; /* outputs of a tile, inputs of a block */

typedef struct {
    int64_t num_outputs, num_inputs; /* N, K without padding */
    int64_t format, group;           /* group 16 or 32; 32 for dense formats */
    int64_t has_half_scales;         /* scales and offsets are float16 */
    int64_t rounds_activations;      /* products round activations to int8; only with codes */
    const uint8_t *codes;            /* CODES4 [N/32, K/8, 32] u32, CODES8 [N/32, K/4, 32, 4], else [N/32, K, 32] of the element */
    const void *scales, *offsets;    /* [N/32, K/group, 32] float32 or float16; NULL: none */
} weight_t;

INLINE int64_t blocks_of(const weight_t *w) { return (w->num_inputs + BLOCK - 1) / BLOCK; }
INLINE int64_t parts_of(const weight_t *w) { return BLOCK / w->group; } /* groups of a block */

INLINE int64_t bytes_of(int64_t format, int64_t inputs) { /* of one tile */
    static const int64_t nibbles[] = {1, 2, 4, 4, 8};
    return inputs * TILE * nibbles[format] / 2;
}

/* weights of input 8 * octet + j, outputs lane.. of the tile */
INLINE vf weights_at(const int format, const uint8_t *codes, int64_t octet, const int j, const int lane) {
    const int64_t at = (octet * 8 + j) * TILE + lane;
    switch (format) {
    case CODES4: {
        vu words = vu_load((const uint32_t *)codes + octet * TILE + lane);
        return vf_of_ints(j == 7 ? (vi)(words >> 28) : (vi)(words & (UINT32_C(15) << (8 * (j % 4) + 4 * (j / 4)))));
    }
    case CODES8: {
        vu words = vu_load((const uint32_t *)codes + (octet * 2 + j / 4) * TILE + lane);
        return vf_of_ints((vi)(words << (24 - 8 * (j % 4))) >> 24);
    }
    case HALF: return vf_load_f16((const uint16_t *)codes + at);
    case BFLOAT: return vf_load_bf16((const uint16_t *)codes + at);
    default: return vf_load((const float *)codes + at);
    }
}

INLINE vf half_or_float(const weight_t *w, const void *values, int64_t at) {
    return w->has_half_scales ? vf_load_f16((const uint16_t *)values + at) : vf_load((const float *)values + at);
}
/* 1 without scales: fma(1, s, acc) is acc + s */
INLINE vf scale_at(const weight_t *w, int64_t at) { return w->scales ? half_or_float(w, w->scales, at) : vf_of(1.0f); }
INLINE vf offset_at(const weight_t *w, int64_t at) { return half_or_float(w, w->offsets, at); }

/* The hardware prefetcher stops at page boundaries. */
INLINE void prefetch(const int format, const uint8_t *codes, int64_t octet) {
    enum { AHEAD = 4096 };
    const int64_t bytes = bytes_of(format, 8);
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(codes + octet * bytes + AHEAD + line);
}
