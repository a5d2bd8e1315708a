/* A feed-forward layer of routed experts. */
#pragma once
#include "weight.h"

typedef struct {
    const weight_t *router;        /* [E, D] */
    const weight_t *gate_up, *down; /* [E 2F, D] and [E D, F]: expert after expert; 2F and D are multiples of TILE */
    const float *router_bias, *gate_up_bias, *down_bias; /* NULL: none */
    const float *choice_bias;              /* [E], of the choice of experts, not of their weights; NULL: none */
    const weight_t *shared_gate_up, *shared_down; /* [2S, D] and [D, S], of all rows; NULL: none */
    int64_t num_experts, per_token;
    int64_t is_normalized; /* the weights of a row's experts add up to 1; otherwise those of all experts do */
    int64_t activation;
    int64_t is_sigmoid; /* the scores are sigmoids of the logits; otherwise their softmax */
    int64_t num_groups, kept_groups; /* the experts of a row are of so many groups, those with the best ones */
    float scale;                     /* of the weights */
} experts_t;

/* x [rows, D] -> out [rows, D] */
void paceline_experts(const experts_t *e, const float *x, float *out, int64_t rows);
