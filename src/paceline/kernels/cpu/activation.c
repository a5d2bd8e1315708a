/* out = silu(gate) * up = gate / (1 + e^-gate) * up; gate and up are the halves of each row of gate_up. */
#include "pool.h"
#include "simd.h"

enum { ROWS_PER_TASK = 4 };

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, width;
} silu_job;

INLINE vf silu_mul(vf gate, vf up) { return gate / (vf_exp(-gate) + 1.0f) * up; }

static void silu_rows(const void *job, int64_t task) {
    const silu_job *j = job;
    for (int64_t row = task * ROWS_PER_TASK; row < j->rows && row < (task + 1) * ROWS_PER_TASK; row++) {
        const float *gate = j->gate_up + row * 2 * j->width, *up = gate + j->width;
        float *out = j->out + row * j->width;
        const int64_t whole = j->width / LANES * LANES, rest = j->width - whole;
        for (int64_t i = 0; i < whole; i += LANES) vf_store(out + i, silu_mul(vf_load(gate + i), vf_load(up + i)));
        if (rest) {
            float tail[2][LANES] = {{0}};
            memcpy(tail[0], gate + whole, (size_t)rest * sizeof(float));
            memcpy(tail[1], up + whole, (size_t)rest * sizeof(float));
            vf_store(tail[0], silu_mul(vf_load(tail[0]), vf_load(tail[1])));
            memcpy(out + whole, tail[0], (size_t)rest * sizeof(float));
        }
    }
}

EXPORT void paceline_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width) {
    silu_job job = {gate_up, out, rows, width};
    parallel(silu_rows, &job, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK);
}
