/* The largest values of a row. */
#pragma once
#include "simd.h"

enum { CHUNK = 64 };

/* Columns of the `count` largest of x [width], largest first; equal values by column. NaN counts as the largest. */
void find_top(const float *x, int64_t width, int64_t count, int64_t *columns);

/* Whether a value of the chunk may be larger than `limit` */
INLINE int has_above(const float *x, float limit) {
    vi above = {0};
    for (int i = 0; i < CHUNK; i += LANES) above |= ~(vi)(vf_load(x + i) <= vf_of(limit));
    int32_t lanes[LANES], any = 0;
    memcpy(lanes, &above, sizeof lanes);
    for (int i = 0; i < LANES; i++) any |= lanes[i];
    return any;
}
