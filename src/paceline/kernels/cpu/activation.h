/* Gated activations, by the numbers in kernels/activation.py. */
#pragma once
#include <stdint.h>

enum {
    SILU,          /* silu(gate) * up */
    GELU_TANH,     /* gelu(gate) * up, with the tanh approximation */
    CLAMPED_SWIGLU /* gate sigmoid(1.702 gate) (up + 1), gate at most 7, up within -7..7 */
};

/* `width` values of gate and up -> out, in the calling thread */
void gate(const float *gate, const float *up, float *out, int64_t width, int64_t kind);

/* gate_up [rows, 2 width] -> out [rows, width] */
void paceline_gated(const float *gate_up, float *out, int64_t rows, int64_t width, int64_t kind);
