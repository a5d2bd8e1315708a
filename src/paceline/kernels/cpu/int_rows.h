/* Up to INT_ROWS rows of int8 activations times one tile of codes, over all inputs. The arithmetic of a (row, output), for each
 * group of inputs in order, with s the exact integer sum of code * x: acc = fma(scale * x_scale, s, acc), then
 * acc = fma(offset, x_scale * sum of x, acc). It is the same for every number of rows and every instruction set. */
#pragma once
#include "int_dot.h"

enum { INT_ROWS = 8 };

/* A block of rows of activations, quantised in blocks of 32 inputs: x = code * scale */
typedef struct {
    int8_t *codes;   /* [K/32, rows, 32] with K padded to 32 */
    float *scales;   /* [K/group, rows] */
    float *sums;     /* [K/group, rows]: scale * sum of the group's codes; only for weights with offsets */
    int32_t *firsts; /* [K/group, rows]: -128 * sum of the group's codes; only for 8-bit codes that are stored as code + 128 */
} int_block;

typedef struct {
    const weight_t *w;
    int64_t tile;
    int_block x;
    float *acc; /* [rows, TILE] */
} int_args;

typedef void (*int_fn)(const int_args *);

/* octets: inputs of a group / 8 */
INLINE void int_rows(const int format, const int octets, const int rows, const int vectors, const int_args *a) {
    enum { MAX_VECTORS = TILE / LANES };
    const int chains = rows * vectors < 6 ? 2 : 1; /* sums per (row, vector): few would wait for each other */
    const int paired = HAS_PAIRS ? rows & ~1 : 0;  /* the first rows, in twos */
    const weight_t *w = a->w;
    const int64_t blocks = blocks_of(w), groups = blocks * 4 / octets;
    const uint8_t *codes = w->codes + a->tile * bytes_of(format, blocks * BLOCK);
    for (int lane = 0; lane < TILE; lane += vectors * LANES) {
        vf acc[INT_ROWS][MAX_VECTORS] = {{{0}}};
        const float *x_scales = a->x.scales, *x_sums = a->x.sums;
        const int32_t *x_firsts = a->x.firsts;
        int64_t at = a->tile * groups * TILE + lane, octet = 0;
        for (int64_t g = 0; g < groups; g++, at += TILE, x_scales += rows, x_sums += rows, x_firsts += rows) {
            const int8_t *x = a->x.codes + g * octets / 4 * rows * BLOCK + g * octets % 4 * 8;
            vi s[2][INT_ROWS][MAX_VECTORS];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) {
                    s[0][r][v] = first_sum(format, x_firsts + r);
                    s[1][r][v] = (vi){0};
                }
#pragma GCC unroll 4
            for (int i = 0; i < octets; i++, octet++) {
                vb quads[MAX_VECTORS][2], pairs[MAX_VECTORS][2];
                if (lane == 0) prefetch(format, codes, octet);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++) {
                    codes_of(format, codes, octet, lane + v * LANES, quads[v]);
                    if (paired) pair_codes(quads[v], pairs[v]);
                }
#pragma GCC unroll 4
                for (int r = 0; r < paired; r += 2)
#pragma GCC unroll 8
                    for (int v = 0; v < vectors; v++) {
                        const int8_t *inputs = x + r * BLOCK + i * 8;
                        dot_pair(&s[0][r][v], &s[0][r + 1][v], pairs[v], inputs, inputs + BLOCK);
                    }
#pragma GCC unroll 8
                for (int r = paired; r < rows; r++)
#pragma GCC unroll 2
                    for (int quad = 0; quad < 2; quad++)
#pragma GCC unroll 8
                        for (int v = 0; v < vectors; v++) {
                            vi *sum = &s[quad % chains][r][v];
                            *sum = dot4(format, *sum, quads[v][quad], x + r * BLOCK + i * 8, quad);
                        }
            }
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) {
                const vf scale = scale_at(w, at + v * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < paired; r += 2) unpair(&s[0][r][v], &s[0][r + 1][v]);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    vi sum = s[0][r][v];
                    if (chains == 2) sum = joined(format, sum, s[1][r][v]);
                    acc[r][v] = vf_fma(scale * x_scales[r], float_of(format, sum), acc[r][v]);
                }
                if (!w->offsets) continue;
                const vf offset = offset_at(w, at + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) acc[r][v] = vf_fma(offset, vf_of(x_sums[r]), acc[r][v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) vf_store(a->acc + r * TILE + lane + v * LANES, acc[r][v]);
    }
}
