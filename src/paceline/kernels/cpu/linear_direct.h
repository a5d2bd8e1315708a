/* Up to DIRECT_ROWS rows times one tile, over all inputs: weights are loaded to registers and used there. See linear.c. */
#pragma once
#include "weight.h"

#if LANES == 16
enum { DIRECT_VECTORS = 2, DIRECT_ROWS = 8 };
#elif LANES == 8
enum { DIRECT_VECTORS = 2, DIRECT_ROWS = 4 };
#else
enum { DIRECT_VECTORS = 4, DIRECT_ROWS = 4 };
#endif

typedef struct {
    const weight_t *w;
    int64_t tile;
    const float *x;    /* [K/32, rows, 32] */
    const float *sums; /* [K/group, rows] */
    float *acc;        /* [rows, TILE] */
} direct_args;

typedef void (*direct_fn)(const direct_args *);

INLINE void direct(const int format, const int rows, const direct_args *a) {
    const weight_t *w = a->w;
    const int64_t blocks = blocks_of(w), octets = w->group / 8;
    const uint8_t *codes = w->codes + a->tile * bytes_of(format, blocks * BLOCK);
    for (int lane = 0; lane < TILE; lane += DIRECT_VECTORS * LANES) {
        const float *sums = a->sums;
        int64_t at = a->tile * blocks * parts_of(w) * TILE + lane;
        vf acc[DIRECT_ROWS][DIRECT_VECTORS] = {{{0}}};
        for (int64_t octet = 0; octet < blocks * 4; at += TILE, sums += rows) {
            vf s[DIRECT_ROWS][DIRECT_VECTORS] = {{{0}}};
            for (const int64_t end = octet + octets; octet < end; octet++) {
                if (lane == 0) prefetch(format, codes, octet);
                const float *x = a->x + octet / 4 * rows * BLOCK + octet % 4 * 8;
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    vf c[DIRECT_VECTORS];
#pragma GCC unroll 4
                    for (int v = 0; v < DIRECT_VECTORS; v++) c[v] = weights_at(format, codes, octet, j, lane + v * LANES);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        const vf xj = vf_of(x[r * BLOCK + j]);
#pragma GCC unroll 4
                        for (int v = 0; v < DIRECT_VECTORS; v++) s[r][v] = vf_fma(xj, c[v], s[r][v]);
                    }
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < DIRECT_VECTORS; v++) {
                const vf scale = scale_at(w, at + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) acc[r][v] = vf_fma(scale, s[r][v], acc[r][v]);
                if (!w->offsets) continue;
                const vf offset = offset_at(w, at + v * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) acc[r][v] = vf_fma(offset, vf_of(sums[r]), acc[r][v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < DIRECT_VECTORS; v++) vf_store(a->acc + r * TILE + lane + v * LANES, acc[r][v]);
    }
}
