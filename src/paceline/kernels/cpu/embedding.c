/* Rows of a packed weight, dequantised as code * scale + offset with rounding after each operation, as `dequantize` does. */
#include "pool.h"
#include "weight.h"

typedef struct {
    const weight_t *w;
    const int64_t *ids;
    float *out;
} embedding_job;

static float value(const weight_t *w, int64_t tile, int64_t lane, int64_t blocks, int64_t k) {
    const int64_t at = (tile * blocks * BLOCK + k) * TILE + lane;
    if (w->format == CODES4) {
        uint32_t word = ((const uint32_t *)w->codes)[(tile * blocks * BLOCK + k) / 8 * TILE + lane];
        return (float)(word >> (8 * (k % 4) + k % 8 / 4 * 4) & 15);
    }
    if (w->format == CODES8) return (float)((const int8_t *)w->codes)[((tile * blocks * BLOCK + k) / 4 * TILE + lane) * 4 + k % 4];
    if (w->format == FLOAT) return ((const float *)w->codes)[at];
    const uint16_t bits[LANES] = {((const uint16_t *)w->codes)[at]};
    return (w->format == HALF ? vf_load_f16(bits) : vf_load_bf16(bits))[0];
}

static float scale(const weight_t *w, const void *scales, int64_t at) {
    const uint16_t bits[LANES] = {w->has_half_scales ? ((const uint16_t *)scales)[at] : 0};
    return w->has_half_scales ? vf_load_f16(bits)[0] : ((const float *)scales)[at];
}

static void gather(const void *job, int64_t row) {
    const embedding_job *j = job;
    const weight_t *w = j->w;
    const int64_t blocks = blocks_of(w), groups = blocks * parts_of(w);
    const int64_t tile = j->ids[row] / TILE, lane = j->ids[row] % TILE;
    for (int64_t k = 0; k < w->num_inputs; k++) {
        const int64_t at = (tile * groups + k / w->group) * TILE + lane;
        float x = value(w, tile, lane, blocks, k);
        if (w->scales) x *= scale(w, w->scales, at);
        if (w->offsets) x += scale(w, w->offsets, at);
        j->out[row * w->num_inputs + k] = x;
    }
}

EXPORT void paceline_embedding(const weight_t *w, const int64_t *ids, float *out, int64_t rows) {
    embedding_job job = {w, ids, out};
    parallel(gather, &job, rows);
}
