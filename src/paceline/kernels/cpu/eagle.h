/* A pass over the layers of an EAGLE head. */
#pragma once
#include "decoder.h"

typedef struct {
    const decoder_t *decoder;
    const layer_t *layer;                        /* the layers; the next_norm of the last is the norm before `vocabulary` */
    const weight_t *embedding, *fc, *vocabulary; /* [V, D], [D, N D], [V', D] */
    const float *input_norm, *hidden_norm;
    const float *cos, *sin;    /* [max_position, hd/2] */
    const int64_t *ids;        /* [V']: the token of each column of `vocabulary`; NULL: the column */
    int64_t is_residual_normed, is_output_normed; /* is_output_normed: the new states are the output after the last norm */
} head_t;

enum { MAX_HEAD_LAYERS = 16 };

/* p->hidden [T, D]: the states, in place; p->normed [T, 2 D]: memory, its first T D values are then the norms of the new states.
 * tokens and positions [T]; cos, sin and states of `p` are set here. */
void eagle_pass(const head_t *h, pass_t *p, const int64_t *tokens, const int64_t *positions);

void paceline_eagle(const head_t *h, pass_t *p, const int64_t *tokens, const int64_t *positions, const float *const *inner,
                    int64_t num_inner);
