/* The largest values of each row with their columns, largest first; equal values by column. NaN counts as the largest, as in
 * torch. `totals`: the logarithm of the sum of exponentials of each row. */
#include "pool.h"
#include "simd.h"
#include "top.h"
#include <math.h>

typedef struct {
    const float *x;                /* [T, width] */
    int64_t *columns;              /* [T, count] */
    float *values, *totals;        /* [T, count], [T]; NULL: not wanted */
    int64_t rows, width, count;    /* count <= width */
} top_job;

/* Integers in the order of the floats; 0 and -0 are equal */
INLINE int32_t order_of(float x) {
    if (x != x) return INT32_MAX;
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? bits ^ INT32_MAX : bits;
}

/* All columns: a radix sort of inverted orders, which keeps the order of equal values */
static void rank_all(const float *x, int64_t width, int64_t *columns) {
    uint32_t *keys = scratch(SCRATCH_KEYS, 4 * width * (int64_t)sizeof *keys), *ids = keys + width;
    uint32_t *next_keys = ids + width, *next_ids = next_keys + width, *swapped;
    for (int64_t i = 0; i < width; i++) keys[i] = ~((uint32_t)order_of(x[i]) ^ 0x80000000u), ids[i] = (uint32_t)i;
    for (int shift = 0; shift < 32; shift += 8) {
        int64_t ends[257] = {0};
        for (int64_t i = 0; i < width; i++) ends[(keys[i] >> shift & 255) + 1]++;
        for (int digit = 0; digit < 256; digit++) ends[digit + 1] += ends[digit];
        for (int64_t i = 0; i < width; i++) {
            const int64_t at = ends[keys[i] >> shift & 255]++;
            next_keys[at] = keys[i], next_ids[at] = ids[i];
        }
        swapped = keys, keys = next_keys, next_keys = swapped;
        swapped = ids, ids = next_ids, next_ids = swapped;
    }
    for (int64_t i = 0; i < width; i++) columns[i] = ids[i];
}

void find_top(const float *x, int64_t width, int64_t count, int64_t *columns) {
    int64_t filled = 0;
    if (count == width && width > CHUNK) {
        rank_all(x, width, columns);
        return;
    }
    for (int64_t first = 0; first < width; first += CHUNK) {
        const int64_t end = first + CHUNK < width ? first + CHUNK : width;
        if (filled == count && end - first == CHUNK && !has_above(x + first, x[columns[count - 1]])) continue;
        for (int64_t i = first; i < end; i++) {
            const int32_t order = order_of(x[i]);
            if (filled == count && order <= order_of(x[columns[count - 1]])) continue;
            const int64_t last = filled < count ? filled++ : count - 1;
            int64_t at = 0;
            for (int64_t end = last; at < end;) { /* behind those that are larger or equal */
                const int64_t middle = (at + end) / 2;
                if (order_of(x[columns[middle]]) < order) end = middle;
                else at = middle + 1;
            }
            memmove(columns + at + 1, columns + at, (size_t)(last - at) * sizeof *columns);
            columns[at] = i;
        }
    }
}

static float log_total(const float *x, int64_t width, float most) {
    if (!(most > -INFINITY && most < INFINITY)) return most;
    wide sum = {{{0}}};
    const int64_t whole = width / WIDE * WIDE;
    for (int64_t i = 0; i < whole; i += WIDE)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) sum.part[p] += vf_exp(vf_load(x + i + p * LANES) - most);
    float total = vf_sum(wide_fold(sum));
    for (int64_t i = whole; i < width; i++) total += expf(x[i] - most);
    return most + logf(total);
}

static void top_row(const void *job, int64_t row) {
    const top_job *j = job;
    const float *x = j->x + row * j->width;
    int64_t *columns = j->columns + row * j->count;
    find_top(x, j->width, j->count, columns);
    for (int64_t i = 0; j->values && i < j->count; i++) j->values[row * j->count + i] = x[columns[i]];
    if (j->totals) j->totals[row] = log_total(x, j->width, x[columns[0]]);
}

EXPORT void paceline_top(const float *x, int64_t *columns, float *values, float *totals, int64_t rows, int64_t width,
                         int64_t count) {
    top_job job = {x, columns, values, totals, rows, width, count};
    parallel(top_row, &job, rows);
}
