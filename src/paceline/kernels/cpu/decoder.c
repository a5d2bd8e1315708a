/* All layers of a decoder in one call. The kernels are those of single calls, so that the bits are too. */
#include "activation.h"
#include "experts.h"
#include "linear.h"
#include "pool.h"
#include "simd.h"

void paceline_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows);
void paceline_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum, int64_t rows,
                       int64_t width, float eps);
void paceline_head_norm(float *qkv, const float *q_weight, const float *k_weight, int64_t rows, int64_t heads,
                        int64_t kv_heads, int64_t width, float eps);
void paceline_rotary(const float *qkv, const float *cos, const float *sin, float *query, float *keys, float *values,
                     const int64_t *slots, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width);
void paceline_attention(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                        const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors, const float *sinks,
                        int64_t rows, int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t width,
                        int64_t window, float scale);

/* NULL: the architecture has no such weight */
typedef struct {
    const weight_t *qkv, *output, *gate_up, *down;
    const experts_t *experts; /* NULL: one feed-forward layer, of `gate_up` and `down` */
    const float *qkv_bias, *output_bias, *q_norm, *k_norm, *sinks;
    const float *attention_norm, *feed_forward_norm; /* of what attention and feed-forward layer add to the hidden state */
    const float *post_attention_norm, *next_norm;    /* next_norm: the norm after the layer */
    float *keys, *values;
    int64_t window; /* 0: none */
    int64_t rotary; /* number of the rotary table */
} layer_t;

typedef struct {
    int64_t num_layers, hidden_size, ffn_size, heads, kv_heads, width, activation;
    float eps, scale;
} decoder_t;

typedef struct {
    int64_t rows, sequences, max_blocks;
    const float *cos[2], *sin[2]; /* of each rotary table; the second may be absent */
    const int64_t *slots;
    const int32_t *starts, *context_lens, *tables;
    const int64_t *ancestors;
    float *hidden, *normed; /* [T, D]: the input of layer 0 and its norm; at the end, the last hidden state and its norm */
    float *const *states;   /* per layer: where the hidden state that enters it is copied to; NULL: nowhere */
} pass_t;

/* hidden += norm(out), and normed = norm(hidden); out_norm NULL: no norm of `out` */
static void add(const decoder_t *d, const pass_t *p, float *out, const float *out_norm, const float *norm) {
    if (out_norm) paceline_rms_norm(out, NULL, out_norm, out, NULL, p->rows, d->hidden_size, d->eps);
    paceline_rms_norm(out, p->hidden, norm, p->normed, p->hidden, p->rows, d->hidden_size, d->eps);
}

EXPORT void paceline_decoder(const decoder_t *d, const layer_t *layers, const pass_t *p) {
    const int64_t rows = p->rows, D = d->hidden_size, Q = d->heads * d->width, QKV = Q + 2 * d->kv_heads * d->width;
    const int64_t inner = layers->experts ? 0 : d->ffn_size; /* experts have their own memory */
    float *at = scratch(SCRATCH_PASS, rows * (QKV + 2 * Q + D + 3 * inner) * (int64_t)sizeof(float));
    float *qkv = at, *query = qkv + rows * QKV, *attended = query + rows * Q, *out = attended + rows * Q;
    float *gate_up = out + rows * D, *active = gate_up + 2 * rows * inner;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const layer_t *l = layers + i;
        const float *cos = p->cos[l->rotary], *sin = p->sin[l->rotary];
        if (p->states[i]) memcpy(p->states[i], p->hidden, (size_t)(rows * D) * sizeof(float));
        paceline_linear(l->qkv, p->normed, l->qkv_bias, qkv, rows);
        if (l->q_norm) paceline_head_norm(qkv, l->q_norm, l->k_norm, rows, d->heads, d->kv_heads, d->width, d->eps);
        paceline_rotary(qkv, cos, sin, query, l->keys, l->values, p->slots, rows, d->heads, d->kv_heads, d->width);
        paceline_attention(query, l->keys, l->values, attended, p->starts, p->context_lens, p->tables, p->ancestors, l->sinks,
                           rows, p->sequences, p->max_blocks, d->heads, d->kv_heads, d->width, l->window, d->scale);
        paceline_linear(l->output, attended, l->output_bias, out, rows);
        add(d, p, out, l->attention_norm, l->post_attention_norm);
        if (l->experts) {
            paceline_experts(l->experts, p->normed, out, rows);
        } else {
            paceline_linear(l->gate_up, p->normed, NULL, gate_up, rows);
            paceline_gated(gate_up, active, rows, d->ffn_size, d->activation);
            paceline_linear(l->down, active, NULL, out, rows);
        }
        add(d, p, out, l->feed_forward_norm, l->next_norm);
    }
}
