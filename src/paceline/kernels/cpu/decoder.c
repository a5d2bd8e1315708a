/* All layers of a decoder in one call. The kernels are those of single calls, so that the bits are too. */
#include "activation.h"
#include "decoder.h"
#include "pool.h"
#include "simd.h"

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
        paceline_attention(query, l->keys, l->values, attended, p->starts, p->context_lens, p->tables, p->ancestors,
                           p->earlier, l->sinks, rows, p->sequences, p->max_blocks, d->heads, d->kv_heads, d->width,
                           l->window, d->scale);
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
