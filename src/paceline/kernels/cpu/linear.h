/* Products with packed weights. */
#pragma once
#include "weight.h"

/* x [rows, K] -> out [rows, N]; bias [N] or NULL. Rounds x to int8: `w` has codes. */
void int_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows);
