/* out = act(gate) * up; gate and up are the halves of each row of gate_up. See activation.h for the kinds. */
#include "activation.h"
#include "pool.h"
#include "simd.h"

typedef struct {
    const float *gate_up;
    float *out;
    int64_t rows, width, kind, rows_per_task;
} gated_job;

INLINE vf gated(const int kind, vf gate, vf up) {
    if (kind == GELU_TANH) { /* x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) */
        const vf cubic = vf_fma(gate * gate * gate, vf_of(0.044715f), gate);
        return gate / (vf_exp(cubic * -1.5957691216f) + 1.0f) * up; /* 2 sqrt(2 / pi) */
    }
    if (kind == CLAMPED_SWIGLU) {
        const vf limit = vf_of(7.0f);
        gate = vf_min(limit, gate); /* in this order a NaN stays */
        up = vf_max(-limit, vf_min(limit, up));
        return gate / (vf_exp(gate * -1.702f) + 1.0f) * (up + 1.0f);
    }
    return gate / (vf_exp(-gate) + 1.0f) * up;
}

INLINE void gated_row(const int kind, const float *gate, const float *up, float *out, int64_t width) {
    const int64_t whole = width / LANES * LANES, rest = width - whole;
    for (int64_t i = 0; i < whole; i += LANES) vf_store(out + i, gated(kind, vf_load(gate + i), vf_load(up + i)));
    if (rest) {
        float tail[2][LANES] = {{0}};
        memcpy(tail[0], gate + whole, (size_t)rest * sizeof(float));
        memcpy(tail[1], up + whole, (size_t)rest * sizeof(float));
        vf_store(tail[0], gated(kind, vf_load(tail[0]), vf_load(tail[1])));
        memcpy(out + whole, tail[0], (size_t)rest * sizeof(float));
    }
}

void gate(const float *gate, const float *up, float *out, int64_t width, int64_t kind) {
    switch (kind) {
    case SILU: gated_row(SILU, gate, up, out, width); break;
    case GELU_TANH: gated_row(GELU_TANH, gate, up, out, width); break;
    default: gated_row(CLAMPED_SWIGLU, gate, up, out, width);
    }
}

static void gated_rows(const void *job, int64_t task) {
    const gated_job *j = job;
    for (int64_t i = 0, row = task * j->rows_per_task; i < j->rows_per_task && row < j->rows; i++, row++) {
        const float *x = j->gate_up + row * 2 * j->width;
        gate(x, x + j->width, j->out + row * j->width, j->width, j->kind);
    }
}

EXPORT void paceline_gated(const float *gate_up, float *out, int64_t rows, int64_t width, int64_t kind) {
    gated_job job = {gate_up, out, rows, width, kind, rows_per_task(rows)};
    parallel(gated_rows, &job, num_row_tasks(rows));
}
