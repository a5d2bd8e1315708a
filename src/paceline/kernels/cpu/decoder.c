/* All layers of a decoder in one call. The kernels are those of single calls, so that the bits are too. Where a product rounds
 * its activations, the kernel before it stores them rounded: fewer waits of all threads, and fewer bytes between cores. */
#include "activation.h"
#include "decoder.h"
#include "layer_products.h"
#include "pool.h"

/* Activations of the next product. Those of the product before stay valid: the two memories take turns. */
typedef struct {
    int_input inputs[2];
    int current;
} rounding;

/* Memory for the rounded activations of `w`; NULL: they are not rounded */
static const int_input *next_input(rounding *r, const weight_t *w, int64_t rows) {
    if (!w || !w->rounds_activations) return NULL;
    r->current = !r->current;
    int_input *in = r->inputs + r->current;
    *in = int_input_of(w, rows, r->current ? SCRATCH_NEXT_INPUT : SCRATCH_INPUT, wants_amx(rows));
    return in;
}

/* in: the rounded activations; NULL: x */
static void multiply(const weight_t *w, const int_input *in, const float *x, const float *bias, float *out, int64_t rows) {
    if (in) int_store(w, in, bias, out);
    else paceline_linear(w, x, bias, out, rows);
}

/* hidden += norm(out), and normed = norm(hidden); NULL: no norm */
static void add(const decoder_t *d, const pass_t *p, float *out, const float *out_norm, const float *norm,
                const int_input *rounded) {
    if (out_norm) paceline_rms_norm(out, NULL, out_norm, out, NULL, p->rows, d->hidden_size, d->eps);
    norm_and_round(out, p->hidden, norm, p->normed, p->hidden, p->rows, d->hidden_size, d->eps, d->residual_scale,
                   rounded);
}

EXPORT void paceline_decoder(const decoder_t *d, const layer_t *layers, const pass_t *p) {
    const int64_t rows = p->rows, D = d->hidden_size, Q = d->heads * d->width, QKV = Q + 2 * d->kv_heads * d->width;
    const int64_t inner = d->ffn_size; /* experts have their own memory */
    if (rows == 0) return;
    float *at = scratch(SCRATCH_PASS, rows * (QKV + 2 * Q + D + 3 * inner) * (int64_t)sizeof(float));
    float *qkv = at, *query = qkv + rows * QKV, *attended = query + rows * Q, *out = attended + rows * Q;
    float *gate_up = out + rows * D, *active = gate_up + 2 * rows * inner;
    rounding r = {.current = 0};
    const int_input *in = next_input(&r, layers->qkv, rows), *next;
    if (in) round_rows(in, p->normed);
    for (int64_t i = 0; i < d->num_layers; i++) {
        const layer_t *l = layers + i;
        const float *cos = p->cos[l->rotary], *sin = p->sin[l->rotary];
        if (p->states[i]) memcpy(p->states[i], p->hidden, (size_t)(rows * D) * sizeof(float));
        if (joins_heads(d, l)) {
            product_heads(d, l, p, in, query);
        } else {
            multiply(l->qkv, in, p->normed, l->qkv_bias, qkv, rows);
            if (l->q_norm)
                (d->joins_norms ? paceline_joined_head_norm : paceline_head_norm)(qkv, l->q_norm, l->k_norm, rows, d->heads,
                                                                                 d->kv_heads, d->width, d->eps);
            paceline_rotary(qkv, cos, sin, query, l->keys, l->values, p->slots, rows, d->heads, d->kv_heads, d->width);
        }
        in = d->width % BLOCK ? NULL : next_input(&r, l->output, rows);
        attend_and_round(query, l->keys, l->values, attended, p->starts, p->context_lens, p->tables, p->ancestors,
                         p->earlier, l->sinks, rows, p->sequences, p->max_blocks, d->heads, d->kv_heads, d->width,
                         l->window, d->scale, d->cap, in);
        multiply(l->output, in, attended, l->output_bias, out, rows);
        in = l->experts ? NULL : next_input(&r, l->gate_up, rows);
        add(d, p, out, l->attention_norm, l->post_attention_norm, in);
        if (l->experts) {
            paceline_experts(l->experts, p->normed, out, rows);
        } else if (joins_gate(d, l)) {
            next = next_input(&r, l->down, rows);
            product_gated(d, l, in, next);
            int_store(l->down, next, NULL, out);
        } else {
            multiply(l->gate_up, in, p->normed, NULL, gate_up, rows);
            paceline_gated(gate_up, active, rows, d->ffn_size, d->activation);
            paceline_linear(l->down, active, NULL, out, rows);
        }
        in = i + 1 < d->num_layers ? next_input(&r, layers[i + 1].qkv, rows) : NULL;
        add(d, p, out, l->feed_forward_norm, l->next_norm, in);
    }
}
