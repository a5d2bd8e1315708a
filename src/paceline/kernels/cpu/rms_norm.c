/* y = x / sqrt(mean(x^2) + eps) * weight, row by row. With a residual, x + residual is normalised and stored in `sum`, which may
 * be the residual. */
#include "pool.h"
#include "simd.h"
#include <math.h>

enum { ROWS_PER_TASK = 8 };

typedef struct {
    const float *x, *residual, *weight;
    float *out, *sum;
    int64_t rows, width;
    float eps;
} norm_job;

static void norm_row(const norm_job *j, int64_t row) {
    const float *x = j->x + row * j->width;
    float *out = j->out + row * j->width;
    const int64_t whole = j->width / WIDE * WIDE;
    if (j->residual) {
        const float *residual = j->residual + row * j->width;
        float *sum = j->sum + row * j->width;
        for (int64_t i = 0; i < j->width; i++) sum[i] = x[i] + residual[i];
        x = sum;
    }
    wide squares = {{{0}}};
    for (int64_t i = 0; i < whole; i += WIDE)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            const vf part = vf_load(x + i + p * LANES);
            squares.part[p] = vf_fma(part, part, squares.part[p]);
        }
    float total = vf_sum(wide_fold(squares));
    for (int64_t i = whole; i < j->width; i++) total += x[i] * x[i];
    const float inverse = 1.0f / sqrtf(total / (float)j->width + j->eps);
    for (int64_t i = 0; i < j->width; i++) out[i] = x[i] * inverse * j->weight[i];
}

static void norm_rows(const void *job, int64_t task) {
    const norm_job *j = job;
    for (int64_t row = task * ROWS_PER_TASK; row < j->rows && row < (task + 1) * ROWS_PER_TASK; row++) norm_row(j, row);
}

/* residual and sum NULL: plain norm */
EXPORT void paceline_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum,
                              int64_t rows, int64_t width, float eps) {
    norm_job job = {x, residual, weight, out, sum, rows, width, eps};
    parallel(norm_rows, &job, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK);
}
