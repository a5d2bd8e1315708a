/* out[t] = sum over the experts of row t of weight * down(act(gate_up(x[t]))), and the same of a shared layer.
 *
 * A row's experts are those with the largest router logits, or sums of score and bias, in descending order; of equal ones the
 * first is larger. Rows are grouped by expert for the products, whose bits do not depend on the number of rows. The outputs of a
 * row's experts are added in the order of their choice. So a row's result depends on nothing but the row. */
#include "activation.h"
#include "experts.h"
#include "pool.h"
#include <math.h>

enum { ROWS_AT_ONCE = 512, MAX_EXPERTS = 4096 }; /* the first bounds the scratch memory */

void paceline_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows);

typedef struct {
    const float *logits;
    int32_t *ids;
    float *weights;
    const float *choice_bias;
    int64_t num_experts, per_token, is_normalized, is_sigmoid, num_groups, kept_groups;
    float scale;
} route_job;

INLINE float exponential(float x) {
    float lanes[LANES];
    vf_store(lanes, vf_exp(vf_of(x)));
    return lanes[0];
}

/* choices[e] = -infinity for the experts of all groups but those with the highest choice, or sum of the two highest if there is a
 * bias; of equal ones the first is higher */
static void keep_groups(const route_job *j, float *choices) {
    const int64_t size = j->num_experts / j->num_groups;
    float best[MAX_EXPERTS];
    for (int64_t g = 0; g < j->num_groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = g * size; e < (g + 1) * size; e++)
            if (choices[e] > first) second = first, first = choices[e];
            else if (choices[e] > second) second = choices[e];
        best[g] = j->choice_bias ? first + second : first;
    }
    for (int64_t g = 0; g < j->num_groups; g++) {
        int64_t higher = 0;
        for (int64_t o = 0; o < j->num_groups; o++) higher += best[o] > best[g] || (best[o] == best[g] && o < g);
        for (int64_t e = g * size; higher >= j->kept_groups && e < (g + 1) * size; e++) choices[e] = -INFINITY;
    }
}

static void route_row(const void *job, int64_t row) {
    const route_job *j = job;
    const float *logits = j->logits + row * j->num_experts;
    int32_t *ids = j->ids + row * j->per_token;
    float *weights = j->weights + row * j->per_token, total = 0.0f, scores[MAX_EXPERTS], choices[MAX_EXPERTS];
    for (int64_t e = 0; e < j->num_experts; e++) {
        scores[e] = j->is_sigmoid ? 1.0f / (1.0f + exponential(-logits[e])) : logits[e];
        choices[e] = j->choice_bias ? scores[e] + j->choice_bias[e] : scores[e];
    }
    if (j->num_groups > 1) keep_groups(j, choices);
    for (int64_t slot = 0; slot < j->per_token; slot++) {
        int64_t best = -1;
        for (int64_t e = 0; e < j->num_experts; e++) {
            int is_taken = 0;
            for (int64_t s = 0; s < slot; s++) is_taken |= ids[s] == e;
            if (!is_taken && (best < 0 || choices[e] > choices[best])) best = e;
        }
        ids[slot] = (int32_t)best;
        weights[slot] = j->is_sigmoid ? scores[best] : exponential(logits[best] - logits[ids[0]]);
        total += weights[slot];
    }
    if (j->is_sigmoid) {
        total = j->is_normalized ? total + 1e-20f : 1.0f;
    } else if (!j->is_normalized) {
        total = 0.0f;
        for (int64_t e = 0; e < j->num_experts; e++) total += exponential(logits[e] - logits[ids[0]]);
    }
    for (int64_t slot = 0; slot < j->per_token; slot++) weights[slot] = weights[slot] / total * j->scale;
}

/* logits [rows, E] -> ids, weights [rows, per_token] */
EXPORT void paceline_route(const float *logits, int32_t *ids, float *weights, const float *choice_bias, int64_t rows,
                           int64_t num_experts, int64_t per_token, int64_t is_normalized, int64_t is_sigmoid,
                           int64_t num_groups, int64_t kept_groups, float scale) {
    route_job job = {logits, ids, weights, choice_bias, num_experts, per_token, is_normalized, is_sigmoid, num_groups, kept_groups,
                     scale};
    parallel(route_row, &job, rows);
}

/* The matrix of one expert, of `outputs` rows */
static weight_t of_expert(const weight_t *w, int64_t expert, int64_t outputs) {
    const int64_t blocks = blocks_of(w), tiles = expert * outputs / TILE;
    const int64_t scales = tiles * blocks * parts_of(w) * TILE * (w->has_half_scales ? 2 : 4);
    weight_t one = *w;
    one.num_outputs = outputs;
    one.codes = w->codes + tiles * bytes_of(w->format, blocks * BLOCK);
    if (w->scales) one.scales = (const uint8_t *)w->scales + scales;
    if (w->offsets) one.offsets = (const uint8_t *)w->offsets + scales;
    return one;
}

/* One product per expert that has rows: x [P, K] sorted by expert -> out [P, N] */
static void multiply_each(const experts_t *e, const weight_t *w, const float *bias, const int64_t *starts, const float *x,
                          float *out) {
    const int64_t inputs = w->num_inputs, outputs = w->num_outputs / e->num_experts;
    for (int64_t i = 0; i < e->num_experts; i++) {
        if (starts[i] == starts[i + 1]) continue;
        const weight_t one = of_expert(w, i, outputs);
        paceline_linear(&one, x + starts[i] * inputs, bias ? bias + i * outputs : NULL, out + starts[i] * outputs,
                        starts[i + 1] - starts[i]);
    }
}

typedef struct {
    const float *fed, *weights; /* [P, D] sorted by expert, [rows, per_token] */
    const int64_t *places;      /* [rows, per_token]: rows of `fed` */
    float *out;
    int64_t width, per_token;
} combine_job;

static void combine_row(const void *job, int64_t row) {
    const combine_job *j = job;
    const int64_t *places = j->places + row * j->per_token;
    const float *weights = j->weights + row * j->per_token;
    float *out = j->out + row * j->width; /* the width is a multiple of TILE */
    for (int64_t d = 0; d < j->width; d += LANES) {
        vf sum = {0};
        for (int64_t s = 0; s < j->per_token; s++)
            sum = vf_fma(vf_of(weights[s]), vf_load(j->fed + places[s] * j->width + d), sum);
        vf_store(out + d, sum);
    }
}

static void some_rows(const experts_t *e, const float *x, float *out, int64_t rows) {
    const int64_t D = e->router->num_inputs, F = e->down->num_inputs, E = e->num_experts, k = e->per_token, pairs = rows * k;
    const int64_t floats = pairs * (2 * D + 3 * F) + rows * E + pairs, whole = (floats + 1) / 2 * 2;
    float *gathered = scratch(SCRATCH_EXPERTS, whole * 4 + (pairs + E + 1) * 8 + pairs * 4);
    float *gate_up = gathered + pairs * D, *active = gate_up + pairs * 2 * F, *fed = active + pairs * F;
    float *logits = fed + pairs * D, *weights = logits + rows * E;
    int64_t *places = (int64_t *)(gathered + whole), *starts = places + pairs;
    int32_t *ids = (int32_t *)(starts + E + 1);
    paceline_linear(e->router, x, e->router_bias, logits, rows);
    paceline_route(logits, ids, weights, e->choice_bias, rows, E, k, e->is_normalized, e->is_sigmoid, e->num_groups,
                   e->kept_groups, e->scale);
    memset(starts, 0, (size_t)(E + 1) * sizeof *starts);
    for (int64_t i = 0; i < pairs; i++) starts[ids[i] + 1]++;
    for (int64_t i = 0; i < E; i++) starts[i + 1] += starts[i];
    for (int64_t i = 0; i < pairs; i++) {
        places[i] = starts[ids[i]]++;
        memcpy(gathered + places[i] * D, x + i / k * D, (size_t)D * sizeof(float));
    }
    for (int64_t i = E; i > 0; i--) starts[i] = starts[i - 1];
    starts[0] = 0;
    multiply_each(e, e->gate_up, e->gate_up_bias, starts, gathered, gate_up);
    paceline_gated(gate_up, active, pairs, F, e->activation);
    multiply_each(e, e->down, e->down_bias, starts, active, fed);
    combine_job job = {fed, weights, places, out, D, k};
    parallel(combine_row, &job, rows);
}

/* out += down(act(gate_up(x))) of the shared layer */
static void add_shared(const experts_t *e, const float *x, float *out, int64_t rows) {
    const int64_t D = e->router->num_inputs, S = e->shared_down->num_inputs;
    float *gate_up = scratch(SCRATCH_EXPERTS, rows * (3 * S + D) * (int64_t)sizeof(float));
    float *active = gate_up + rows * 2 * S, *fed = active + rows * S;
    paceline_linear(e->shared_gate_up, x, NULL, gate_up, rows);
    paceline_gated(gate_up, active, rows, S, e->activation);
    paceline_linear(e->shared_down, active, NULL, fed, rows);
    for (int64_t i = 0; i < rows * D; i++) out[i] += fed[i];
}

EXPORT void paceline_experts(const experts_t *e, const float *x, float *out, int64_t rows) {
    const int64_t D = e->router->num_inputs;
    for (int64_t first = 0; first < rows; first += ROWS_AT_ONCE) {
        const int64_t left = rows - first, count = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        some_rows(e, x + first * D, out + first * D, count);
        if (e->shared_down) add_shared(e, x + first * D, out + first * D, count);
    }
}
