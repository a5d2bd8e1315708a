/* y = x / sqrt(mean(x^2) + eps) * weight, row by row. With a residual, x + residual is normalised and stored in `sum`, which may
 * be the residual. */
#include "decoder.h"
#include "pool.h"
#include <math.h>

typedef struct {
    const float *x, *residual, *weight;
    float *out, *sum;
    int64_t rows, width, rows_per_task;
    float eps, factor;        /* of x before the residual is added */
    const int_input *rounded; /* for the product after the norm; NULL: none */
} norm_job;

/* `out` may be `x` */
void normalize(const float *x, const float *weight, float *out, int64_t width, float eps) {
    const int64_t whole = width / WIDE * WIDE;
    wide squares = {{{0}}};
    for (int64_t i = 0; i < whole; i += WIDE)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            const vf part = vf_load(x + i + p * LANES);
            squares.part[p] = vf_fma(part, part, squares.part[p]);
        }
    float total = vf_sum(wide_fold(squares));
    for (int64_t i = whole; i < width; i++) total += x[i] * x[i];
    const float inverse = 1.0f / sqrtf(total / (float)width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * inverse * weight[i];
}

static void norm_row(const norm_job *j, int64_t row) {
    const float *x = j->x + row * j->width;
    if (j->residual) {
        const float *residual = j->residual + row * j->width;
        float *sum = j->sum + row * j->width;
        for (int64_t i = 0; i < j->width; i++) sum[i] = x[i] * j->factor + residual[i];
        x = sum;
    }
    if (j->weight) normalize(x, j->weight, j->out + row * j->width, j->width, j->eps);
    else memcpy(j->out + row * j->width, x, (size_t)j->width * sizeof(float));
    if (j->rounded) round_row(j->rounded, row, j->out + row * j->width);
}

static void norm_rows(const void *job, int64_t task) {
    const norm_job *j = job;
    for (int64_t i = 0, row = task * j->rows_per_task; i < j->rows_per_task && row < j->rows; i++, row++) norm_row(j, row);
}

void norm_and_round(const float *x, const float *residual, const float *weight, float *out, float *sum, int64_t rows,
                    int64_t width, float eps, float factor, const int_input *rounded) {
    norm_job job = {x, residual, weight, out, sum, rows, width, rows_per_task(rows), eps, factor, rounded};
    parallel(norm_rows, &job, num_row_tasks(rows));
}

/* residual and sum NULL: plain norm. weight NULL: no norm, `out` is a copy */
EXPORT void paceline_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum,
                              int64_t rows, int64_t width, float eps) {
    norm_and_round(x, residual, weight, out, sum, rows, width, eps, 1.0f, NULL);
}

typedef struct {
    float *qkv;
    const float *q_weight, *k_weight;
    int64_t rows, heads, kv_heads, width, rows_per_task;
    float eps;
} head_norm_job;

static void norm_heads(const void *job, int64_t task) {
    const head_norm_job *j = job;
    for (int64_t i = 0, row = task * j->rows_per_task; i < j->rows_per_task && row < j->rows; i++, row++) {
        float *x = j->qkv + row * (j->heads + 2 * j->kv_heads) * j->width;
        for (int64_t h = 0; h < j->heads + j->kv_heads; h++, x += j->width)
            normalize(x, h < j->heads ? j->q_weight : j->k_weight, x, j->width, j->eps);
    }
}

/* qkv [rows, (H + 2 KV) width]: the norm of each head of q and k, in place */
EXPORT void paceline_head_norm(float *qkv, const float *q_weight, const float *k_weight, int64_t rows, int64_t heads,
                               int64_t kv_heads, int64_t width, float eps) {
    head_norm_job job = {qkv, q_weight, k_weight, rows, heads, kv_heads, width, rows_per_task(rows), eps};
    parallel(norm_heads, &job, num_row_tasks(rows));
}

static void norm_joined(const void *job, int64_t task) {
    const head_norm_job *j = job;
    const int64_t queries = j->heads * j->width, keys = j->kv_heads * j->width;
    for (int64_t i = 0, row = task * j->rows_per_task; i < j->rows_per_task && row < j->rows; i++, row++) {
        float *x = j->qkv + row * (queries + 2 * keys);
        normalize(x, j->q_weight, x, queries, j->eps);
        normalize(x + queries, j->k_weight, x + queries, keys, j->eps);
    }
}

/* qkv [rows, (H + 2 KV) width]: the norm of all heads of q, and that of all heads of k, in place */
EXPORT void paceline_joined_head_norm(float *qkv, const float *q_weight, const float *k_weight, int64_t rows, int64_t heads,
                                      int64_t kv_heads, int64_t width, float eps) {
    head_norm_job job = {qkv, q_weight, k_weight, rows, heads, kv_heads, width, rows_per_task(rows), eps};
    parallel(norm_joined, &job, num_row_tasks(rows));
}
