/* All layers of a decoder in one call. The kernels are those of single calls, so that the bits are too. */
#include "linear.h"
#include "pool.h"
#include "simd.h"

void paceline_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows);
void paceline_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum, int64_t rows,
                       int64_t width, float eps);
void paceline_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width);
void paceline_rotary(const float *qkv, const float *cos, const float *sin, float *query, float *keys, float *values,
                     const int64_t *slots, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width);
void paceline_attention(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                        const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors, int64_t rows,
                        int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t width, int64_t window,
                        float scale);

typedef struct {
    const weight_t *qkv, *output, *gate_up, *down;
    const float *qkv_bias, *post_attention_norm, *next_norm; /* bias NULL: none; next_norm: the norm after the layer */
    float *keys, *values;
} layer_t;

typedef struct {
    int64_t num_layers, hidden_size, ffn_size, heads, kv_heads, width, window;
    float eps, scale;
} decoder_t;

typedef struct {
    int64_t rows, sequences, max_blocks;
    const float *cos, *sin;
    const int64_t *slots;
    const int32_t *starts, *context_lens, *tables;
    const int64_t *ancestors;
    float *hidden, *normed; /* [T, D]: the input of layer 0 and its norm; at the end, the last hidden state and its norm */
    float *const *states;   /* per layer: where the hidden state that enters it is copied to; NULL: nowhere */
} pass_t;

EXPORT void paceline_decoder(const decoder_t *d, const layer_t *layers, const pass_t *p) {
    const int64_t rows = p->rows, D = d->hidden_size, Q = d->heads * d->width, QKV = Q + 2 * d->kv_heads * d->width;
    float *at = scratch(SCRATCH_PASS, rows * (QKV + 2 * Q + D + 3 * d->ffn_size) * (int64_t)sizeof(float));
    float *qkv = at, *query = qkv + rows * QKV, *attended = query + rows * Q, *out = attended + rows * Q;
    float *gate_up = out + rows * D, *active = gate_up + 2 * rows * d->ffn_size;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const layer_t *l = layers + i;
        if (p->states[i]) memcpy(p->states[i], p->hidden, (size_t)(rows * D) * sizeof(float));
        paceline_linear(l->qkv, p->normed, l->qkv_bias, qkv, rows);
        paceline_rotary(qkv, p->cos, p->sin, query, l->keys, l->values, p->slots, rows, d->heads, d->kv_heads, d->width);
        paceline_attention(query, l->keys, l->values, attended, p->starts, p->context_lens, p->tables, p->ancestors, rows,
                           p->sequences, p->max_blocks, d->heads, d->kv_heads, d->width, d->window, d->scale);
        paceline_linear(l->output, attended, NULL, out, rows);
        paceline_rms_norm(out, p->hidden, l->post_attention_norm, p->normed, p->hidden, rows, D, d->eps);
        paceline_linear(l->gate_up, p->normed, NULL, gate_up, rows);
        paceline_silu_mul(gate_up, active, rows, d->ffn_size);
        paceline_linear(l->down, active, NULL, out, rows);
        paceline_rms_norm(out, p->hidden, l->next_norm, p->normed, p->hidden, rows, D, d->eps);
    }
}
