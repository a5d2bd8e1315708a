/* The register block of linear.c: up to MAX_ROWS rows by VECTORS * LANES outputs, over all inputs.
 *
 * For every (row, output), whatever the number of rows: within a group, s = a chain of fma(x_k, code_k, s) from 0; then
 * acc = fma(scale, s, acc) and acc = fma(offset, sum of the group's x, acc); dense formats: acc = acc + s. 4-bit codes are
 * left where they stand in their word, code * 16^j, and x_k is multiplied by 16^-j beforehand: the product is the same
 * number, without a shift. */
#pragma once
#include "simd.h"

enum { CODES4, CODES8, HALF, BFLOAT, FLOAT };
enum { TILE = 32, BLOCK = 32, PREFETCH = 4096 };
#if LANES == 16
enum { VECTORS = 2, MAX_ROWS = 8 };
#elif LANES == 8
enum { VECTORS = 2, MAX_ROWS = 4 };
#else
enum { VECTORS = 4, MAX_ROWS = 4 };
#endif

typedef struct {
    int64_t num_outputs, num_inputs; /* N, K as the caller sees them */
    int64_t format, group;           /* group 16 or 32; 32 for dense formats */
    const uint8_t *codes;            /* CODES4 [N/32, K/8, 32] u32, else [N/32, K, 32] of the element */
    const float *scales, *offsets;   /* [N/32, K/group, 32]; NULL: none */
} weight_t;

typedef struct {
    const weight_t *w;
    int64_t tile;
    const float *x;    /* [K/32, rows, 32] */
    const float *sums; /* [K/group, rows] */
    const float *bias; /* [N] or NULL */
    float *out;        /* row 0, output 0 */
    float *decoded;    /* [K/32, 32, 32]: the tile's codes as floats */
    int is_fresh;      /* fill `decoded` on the way; otherwise it is ready */
} block_args;

typedef void (*decode_fn)(const uint8_t *codes, int64_t block, float *decoded);
typedef void (*block_fn)(const block_args *, decode_fn);

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
        return vf_of_ints(j == 7 ? (vi)(words >> 28) : (vi)(words & (UINT32_C(15) << 4 * j)));
    }
    case CODES8: return vf_load_i8((const int8_t *)codes + at);
    case HALF: return vf_load_f16((const uint16_t *)codes + at);
    case BFLOAT: return vf_load_bf16((const uint16_t *)codes + at);
    default: return vf_load((const float *)codes + at);
    }
}

/* The hardware's own prefetch stops at every page. */
INLINE void prefetch(const int format, const uint8_t *codes, int64_t octet) {
    const int64_t bytes = bytes_of(format, 8);
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(codes + octet * bytes + PREFETCH + line);
}

INLINE void decode(const int format, const uint8_t *codes, int64_t block, float *decoded) {
    for (int o = 0; o < BLOCK / 8; o++) {
        prefetch(format, codes, block * 4 + o);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 8
            for (int lane = 0; lane < TILE; lane += LANES)
                vf_store(decoded + (o * 8 + j) * TILE + lane, weights_at(format, codes, block * 4 + o, j, lane));
    }
}

/* `direct` decodes in registers, otherwise through `decoded`: the same numbers in the same order. `format` matters to direct
 * blocks only; for the others a group of 0 means dense. */
INLINE void block(const int direct, const int format, const int group, const int rows, const block_args *a,
                  decode_fn decode_block, const int lane) {
    const weight_t *w = a->w;
    const int span = group ? group : BLOCK;
    const int64_t blocks = (w->num_inputs + BLOCK - 1) / BLOCK, groups = blocks * (BLOCK / span);
    const uint8_t *codes = w->codes + a->tile * bytes_of(w->format, blocks * BLOCK);
    const float *scales = group ? w->scales + a->tile * groups * TILE + lane : 0;
    const float *offsets = group && w->offsets ? w->offsets + a->tile * groups * TILE + lane : 0;
    const float *x = a->x, *sums = a->sums;
    vf acc[8][VECTORS] = {{{0}}};
    for (int64_t b = 0; b < blocks; b++, x += rows * BLOCK) {
        float *decoded = a->decoded + b * BLOCK * TILE;
        if (!direct && a->is_fresh && lane == 0) decode_block(codes, b, decoded);
        for (int part = 0; part < BLOCK / span; part++) {
            vf s[8][VECTORS] = {{{0}}};
            for (int o = part * (span / 8); o < (part + 1) * (span / 8); o++) {
                if (direct && lane == 0) prefetch(format, codes, b * 4 + o);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    vf c[VECTORS];
#pragma GCC unroll 4
                    for (int v = 0; v < VECTORS; v++)
                        c[v] = direct ? weights_at(format, codes, b * 4 + o, j, lane + v * LANES)
                                      : vf_load(decoded + (o * 8 + j) * TILE + lane + v * LANES);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        vf xk = vf_of(x[r * BLOCK + o * 8 + j]);
#pragma GCC unroll 4
                        for (int v = 0; v < VECTORS; v++) s[r][v] = vf_fma(xk, c[v], s[r][v]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                if (!group) {
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) acc[r][v] += s[r][v];
                    continue;
                }
                vf scale = vf_load(scales + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) acc[r][v] = vf_fma(scale, s[r][v], acc[r][v]);
                if (!offsets) continue;
                vf offset = vf_load(offsets + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) acc[r][v] = vf_fma(offset, vf_of(sums[r]), acc[r][v]);
            }
            scales = group ? scales + TILE : 0;
            offsets = offsets ? offsets + TILE : 0;
            sums += rows;
        }
    }
    const int64_t first = a->tile * TILE + lane, left = w->num_outputs - first;
    const int64_t count = left < VECTORS * LANES ? left : VECTORS * LANES;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        float result[VECTORS * LANES];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) vf_store(result + v * LANES, acc[r][v]);
        float *to = a->out + r * w->num_outputs + first;
        for (int64_t i = 0; i < count; i++) to[i] = a->bias ? result[i] + a->bias[first + i] : result[i];
    }
}
