/* A pass over the layers of a decoder, and the kernels that it consists of. */
#pragma once
#include "experts.h"
#include "int_product.h"

void paceline_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows);
void paceline_rms_norm(const float *x, const float *residual, const float *weight, float *out, float *sum, int64_t rows,
                       int64_t width, float eps);
void paceline_head_norm(float *qkv, const float *q_weight, const float *k_weight, int64_t rows, int64_t heads,
                        int64_t kv_heads, int64_t width, float eps);
void paceline_joined_head_norm(float *qkv, const float *q_weight, const float *k_weight, int64_t rows, int64_t heads,
                               int64_t kv_heads, int64_t width, float eps);
void paceline_rotary(const float *qkv, const float *cos, const float *sin, float *query, float *keys, float *values,
                     const int64_t *slots, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width);
void paceline_attention(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                        const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors, const int32_t *earlier,
                        const float *sinks, int64_t rows, int64_t sequences, int64_t max_blocks, int64_t heads,
                        int64_t kv_heads, int64_t width, int64_t window, float scale, float cap);

/* As above, in the calling thread: one head; `out` of a norm may be `x` */
void normalize(const float *x, const float *weight, float *out, int64_t width, float eps);
void rotate(const float *x, const float *cos, const float *sin, float *restrict out, int64_t half);
/* As above, and round the results for the product after them; rounded NULL: none */
void norm_and_round(const float *x, const float *residual, const float *weight, float *out, float *sum, int64_t rows,
                    int64_t width, float eps, float factor, const int_input *rounded);
void attend_and_round(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                      const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors, const int32_t *earlier,
                      const float *sinks, int64_t rows, int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads,
                      int64_t width, int64_t window, float scale, float cap, const int_input *rounded);

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
    int64_t joins_norms;   /* q_norm and k_norm are of all heads together */
    float eps, scale, cap; /* of attention scores; cap 0: none */
    float residual_scale;  /* of what attention and feed-forward layer add to the hidden state */
} decoder_t;

typedef struct {
    int64_t rows, sequences, max_blocks;
    const float *cos[2], *sin[2]; /* of each rotary table; the second may be absent */
    const int64_t *slots;
    const int32_t *starts, *context_lens, *tables;
    const int64_t *ancestors;
    const int32_t *earlier; /* per sequence: rows of its tree that earlier passes stored after the context; NULL: none */
    float *hidden, *normed; /* [T, D]: the input of layer 0 and its norm; at the end, the last hidden state and its norm */
    float *const *states;   /* per layer: where the hidden state that enters it is copied to; NULL: nowhere */
} pass_t;

void paceline_decoder(const decoder_t *d, const layer_t *layers, const pass_t *p);
