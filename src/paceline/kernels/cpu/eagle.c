/* A pass of an EAGLE head in one call. The kernels are those of single calls, so that the bits are too. */
#include "eagle.h"
#include "pool.h"

void paceline_embedding(const weight_t *w, const int64_t *ids, float *out, int64_t rows);

void eagle_pass(const head_t *h, pass_t *p, const int64_t *tokens, const int64_t *positions) {
    const decoder_t *d = h->decoder;
    const int64_t rows = p->rows, D = d->hidden_size, half = d->width / 2;
    float *embedded = scratch(SCRATCH_HEAD, rows * (2 * D + 2 * half) * (int64_t)sizeof(float));
    float *normed = embedded + rows * D, *cos = normed + rows * D, *sin = cos + rows * half;
    paceline_embedding(h->embedding, tokens, embedded, rows);
    paceline_rms_norm(embedded, NULL, h->input_norm, embedded, NULL, rows, D, d->eps);
    paceline_rms_norm(p->hidden, NULL, h->hidden_norm, normed, NULL, rows, D, d->eps);
    for (int64_t r = 0; r < rows; r++) {
        memcpy(p->normed + r * 2 * D, embedded + r * D, (size_t)D * sizeof(float));
        memcpy(p->normed + r * 2 * D + D, normed + r * D, (size_t)D * sizeof(float));
        memcpy(cos + r * half, h->cos + positions[r] * half, (size_t)half * sizeof(float));
        memcpy(sin + r * half, h->sin + positions[r] * half, (size_t)half * sizeof(float));
    }
    if (h->is_residual_normed) memcpy(p->hidden, normed, (size_t)(rows * D) * sizeof(float));
    float *nowhere[MAX_HEAD_LAYERS] = {NULL};
    p->cos[0] = cos, p->sin[0] = sin, p->states = nowhere;
    paceline_decoder(d, h->layer, p);
    if (h->is_output_normed) memcpy(p->hidden, p->normed, (size_t)(rows * D) * sizeof(float));
}

/* inner [T, num_inner]: rows of the target's states, whose first D columns `fc` joins to p->hidden; num_inner 0: p->hidden is
 * given */
EXPORT void paceline_eagle(const head_t *h, pass_t *p, const int64_t *tokens, const int64_t *positions,
                           const float *const *inner, int64_t num_inner) {
    const int64_t rows = p->rows, D = h->decoder->hidden_size, widest = num_inner > 2 ? num_inner : 2;
    float *joined = p->normed = scratch(SCRATCH_GROWTH, rows * widest * D * (int64_t)sizeof(float));
    for (int64_t i = 0; i < rows * num_inner; i++) memcpy(joined + i * D, inner[i], (size_t)D * sizeof(float));
    if (num_inner) paceline_linear(h->fc, joined, NULL, p->hidden, rows);
    eagle_pass(h, p, tokens, positions);
}
