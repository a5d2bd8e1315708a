/* Rotates q and k of every row, with dimensions paired as (i, i + hd/2), and stores k and v in the paged cache. */
#include "decoder.h"
#include "pool.h"

typedef struct {
    const float *qkv, *cos, *sin;    /* [T, (H + 2 KV) hd], [T, hd/2] */
    float *query, *keys, *values;    /* [T, H, hd], [slots, KV, hd] */
    const int64_t *slots;            /* [T] */
    int64_t rows, heads, kv_heads, width, rows_per_task;
} rotary_job;

void rotate(const float *x, const float *cos, const float *sin, float *restrict out, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
}

static void rotate_rows(const void *job, int64_t task) {
    const rotary_job *j = job;
    const int64_t half = j->width / 2;
    for (int64_t i = 0, row = task * j->rows_per_task; i < j->rows_per_task && row < j->rows; i++, row++) {
        const float *x = j->qkv + row * (j->heads + 2 * j->kv_heads) * j->width;
        const float *cos = j->cos + row * half, *sin = j->sin + row * half;
        const int64_t at = j->slots[row] * j->kv_heads * j->width;
        for (int64_t h = 0; h < j->heads; h++, x += j->width)
            rotate(x, cos, sin, j->query + (row * j->heads + h) * j->width, half);
        for (int64_t h = 0; h < j->kv_heads; h++, x += j->width) rotate(x, cos, sin, j->keys + at + h * j->width, half);
        memcpy(j->values + at, x, (size_t)(j->kv_heads * j->width) * sizeof(float));
    }
}

EXPORT void paceline_rotary(const float *qkv, const float *cos, const float *sin, float *query, float *keys, float *values,
                            const int64_t *slots, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width) {
    rotary_job job = {qkv, cos, sin, query, keys, values, slots, rows, heads, kv_heads, width, rows_per_task(rows)};
    parallel(rotate_rows, &job, num_row_tasks(rows));
}
