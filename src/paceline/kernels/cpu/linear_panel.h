/* `rows` rows times one tile, over a panel of inputs whose weights were widened into the first-level cache. See linear.c.
 * Registers hold the sums of a group; the running total is in memory and updated once per group. */
#pragma once
#include "weight.h"

enum { PANEL = 4 }; /* blocks of inputs: 16 KiB of weights */
#if LANES == 16
enum { PANEL_VECTORS = 2, PANEL_ROWS = 12 };
#elif LANES == 8
enum { PANEL_VECTORS = 2, PANEL_ROWS = 6 };
#else
enum { PANEL_VECTORS = 4, PANEL_ROWS = 6 };
#endif

typedef struct {
    const weight_t *w;
    int64_t tile, block, count; /* the panel is blocks block..block + count - 1 of the tile */
    const float *weights;       /* [count, 32, TILE] */
    const float *x;             /* [count, rows, 32] */
    const float *sums;          /* [count * 32 / group, rows] */
    float *acc;                 /* [rows, TILE] */
    const uint8_t *ahead;       /* codes of the next panel, which are prefetched, */
    int64_t stride;             /* and their bytes per block */
} panel_args;

typedef void (*panel_fn)(const panel_args *);

/* Widen one block of a tile to [32, TILE] */
INLINE void widen(const int format, const uint8_t *codes, float *to) {
    for (int octet = 0; octet < BLOCK / 8; octet++)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
#pragma GCC unroll 8
            for (int lane = 0; lane < TILE; lane += LANES)
                vf_store(to + (octet * 8 + j) * TILE + lane, weights_at(format, codes, octet, j, lane));
}

INLINE void panel(const int rows, const panel_args *a) {
    const weight_t *w = a->w;
    for (int lane = 0; lane < TILE; lane += PANEL_VECTORS * LANES) {
        const float *sums = a->sums;
        int64_t at = (a->tile * blocks_of(w) + a->block) * parts_of(w) * TILE + lane;
        for (int64_t k = 0; k < a->count * BLOCK; k += w->group, at += TILE, sums += rows) {
            const float *x = a->x + k / BLOCK * rows * BLOCK + k % BLOCK, *weights = a->weights + k * TILE + lane;
            vf s[PANEL_ROWS][PANEL_VECTORS] = {{{0}}};
            if (k % BLOCK == 0 && lane == 0)
                for (int64_t i = 0; i < a->stride; i += 64) __builtin_prefetch(a->ahead + k / BLOCK * a->stride + i);
            for (int64_t i = 0; i < w->group; i++) {
                vf c[PANEL_VECTORS];
#pragma GCC unroll 4
                for (int v = 0; v < PANEL_VECTORS; v++) c[v] = vf_load(weights + i * TILE + v * LANES);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) {
                    const vf xi = vf_of(x[r * BLOCK + i]);
#pragma GCC unroll 4
                    for (int v = 0; v < PANEL_VECTORS; v++) s[r][v] = vf_fma(xi, c[v], s[r][v]);
                }
            }
#pragma GCC unroll 4
            for (int v = 0; v < PANEL_VECTORS; v++) {
                float *acc = a->acc + lane + v * LANES;
                const vf scale = scale_at(w, at + v * LANES);
                vf total[PANEL_ROWS];
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) total[r] = vf_fma(scale, s[r][v], vf_load(acc + r * TILE));
                if (w->offsets) {
                    const vf offset = offset_at(w, at + v * LANES);
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) total[r] = vf_fma(offset, vf_of(sums[r]), total[r]);
                }
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) vf_store(acc + r * TILE, total[r]);
            }
        }
    }
}
