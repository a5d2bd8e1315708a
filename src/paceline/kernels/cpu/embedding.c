/* Rows of a packed weight, dequantised as code * scale + offset with rounding after each operation, as `dequantize` does. */
#include "pool.h"
#include "weight.h"

typedef struct {
    const weight_t *w;
    const int64_t *ids;
    float *out;
} embedding_job;

/* The value of input k and output `lane`, before scaling; `codes`: of their tile */
INLINE float value(const int format, const uint8_t *codes, int64_t k, int64_t lane) {
    if (format == CODES4) return (float)(((const uint32_t *)codes)[k / 8 * TILE + lane] >> (8 * (k % 4) + k % 8 / 4 * 4) & 15);
    if (format == CODES8) return (float)((const int8_t *)codes)[(k / 4 * TILE + lane) * 4 + k % 4];
    if (format == FLOAT) return ((const float *)codes)[k * TILE + lane];
    const uint16_t bits[LANES] = {((const uint16_t *)codes)[k * TILE + lane]};
    return (format == HALF ? vf_load_f16(bits) : vf_load_bf16(bits))[0];
}

static float scale(const weight_t *w, const void *scales, int64_t at) {
    const uint16_t bits[LANES] = {w->has_half_scales ? ((const uint16_t *)scales)[at] : 0};
    return w->has_half_scales ? vf_load_f16(bits)[0] : ((const float *)scales)[at];
}

INLINE void gather_row(const int format, const weight_t *w, int64_t id, float *out) {
    const int64_t tile = id / TILE, lane = id % TILE, blocks = blocks_of(w), groups = blocks * parts_of(w);
    const uint8_t *codes = w->codes + tile * bytes_of(format, blocks * BLOCK);
    for (int64_t first = 0; first < w->num_inputs; first += w->group) {
        const int64_t at = (tile * groups + first / w->group) * TILE + lane;
        const int64_t end = first + w->group < w->num_inputs ? first + w->group : w->num_inputs;
        const float by = w->scales ? scale(w, w->scales, at) : 1.0f, plus = w->offsets ? scale(w, w->offsets, at) : 0.0f;
        for (int64_t k = first; k < end; k++) {
            float x = value(format, codes, k, lane);
            if (w->scales) x *= by;
            if (w->offsets) x += plus;
            out[k] = x;
        }
    }
}

static void gather(const void *job, int64_t row) {
    const embedding_job *j = job;
    float *out = j->out + row * j->w->num_inputs;
    switch (j->w->format) {
    case CODES4: gather_row(CODES4, j->w, j->ids[row], out); break;
    case CODES8: gather_row(CODES8, j->w, j->ids[row], out); break;
    case HALF: gather_row(HALF, j->w, j->ids[row], out); break;
    case BFLOAT: gather_row(BFLOAT, j->w, j->ids[row], out); break;
    default: gather_row(FLOAT, j->w, j->ids[row], out);
    }
}

EXPORT void paceline_embedding(const weight_t *w, const int64_t *ids, float *out, int64_t rows) {
    embedding_job job = {w, ids, out};
    parallel(gather, &job, rows);
}
