/* A whole pass of a decoder in one call, from token ids to logits or to the tokens picked from them. The kernels are those of
 * single calls, so that the bits are too. */
#include "decoder.h"
#include "pool.h"

enum { LOGIT_ROWS = 64 }; /* rows whose logits are in memory at once, if only picks are wanted */

void paceline_embedding(const weight_t *w, const int64_t *ids, float *out, int64_t rows);
void paceline_top(const float *x, int64_t *columns, float *values, float *totals, int64_t rows, int64_t width, int64_t count);
void paceline_sample(const float *x, const float *temperatures, const float *floors, const double *top_p, const int64_t *top_k,
                     const uint64_t *streams, const uint64_t *positions, int64_t *picks, const int64_t *ids,
                     const int32_t *is_noisy, int64_t *columns, float *confidences, int64_t rows, int64_t width, int64_t count);

typedef struct {
    const decoder_t *decoder;
    const layer_t *layers;
    const weight_t *embedding, *head; /* [V, D] each */
    const float *first_norm;
    const float *cos[2], *sin[2]; /* [max_position, hd/2]; the second may be absent */
} model_t;

/* How the tokens of a sequence are picked; see sampling.c */
typedef struct {
    int64_t is_greedy, top_k;
    uint64_t stream;
    double top_p, temperature, floor;
} sampler_t;

typedef struct {
    const int64_t *tokens, *positions; /* [T] each */
    const int64_t *logit_rows;         /* [R]: rows with logits, ascending */
    int64_t num_logits;
    float *logits;             /* [R, V]; NULL: not wanted */
    const sampler_t *samplers; /* [S]; NULL: no picks are wanted */
    int64_t *picks;            /* [R]: the token after each of these rows, with the noise of its position */
} outputs_t;

/* Picks from logits [count, V] of the rows first, first + 1, … of those with logits, which are all greedy or all sampled */
static void pick(const outputs_t *o, const float *logits, const int64_t *owners, int64_t first, int64_t count, int64_t width) {
    if (o->samplers[owners[0]].is_greedy) {
        paceline_top(logits, o->picks + first, NULL, NULL, count, width, 1);
        return;
    }
    float temperatures[LOGIT_ROWS], floors[LOGIT_ROWS];
    double top_p[LOGIT_ROWS];
    int64_t top_k[LOGIT_ROWS];
    uint64_t streams[LOGIT_ROWS], positions[LOGIT_ROWS];
    for (int64_t i = 0; i < count; i++) {
        const sampler_t *s = o->samplers + owners[i];
        temperatures[i] = (float)s->temperature, floors[i] = (float)s->floor;
        top_p[i] = s->top_p, top_k[i] = s->top_k;
        streams[i] = s->stream, positions[i] = (uint64_t)o->positions[o->logit_rows[first + i]] + 1;
    }
    paceline_sample(logits, temperatures, floors, top_p, top_k, streams, positions, o->picks + first, NULL, NULL, NULL, NULL,
                    count, width, 0);
}

static void pick_rows(const pass_t *p, const outputs_t *o, const float *logits, int64_t first, int64_t count, int64_t width) {
    int64_t owners[LOGIT_ROWS];
    for (int64_t i = 0, s = 0; i < count; i++) {
        while (o->logit_rows[first + i] >= p->starts[s + 1]) s++;
        owners[i] = s;
    }
    for (int64_t begin = 0, end; begin < count; begin = end) {
        for (end = begin + 1; end < count; end++)
            if (!o->samplers[owners[end]].is_greedy != !o->samplers[owners[begin]].is_greedy) break;
        pick(o, logits + begin * width, owners + begin, first + begin, end - begin, width);
    }
}

static void compute_logits(const model_t *m, const pass_t *p, const outputs_t *o, float *rows) {
    const int64_t D = m->decoder->hidden_size, width = m->head->num_outputs, most = o->samplers ? LOGIT_ROWS : o->num_logits;
    for (int64_t first = 0, count; first < o->num_logits; first += count) {
        count = o->num_logits - first < most ? o->num_logits - first : most;
        const int64_t begin = o->logit_rows[first];
        const float *normed = p->normed + begin * D;
        if (o->logit_rows[first + count - 1] - begin != count - 1) {
            for (int64_t i = 0; i < count; i++)
                memcpy(rows + i * D, p->normed + o->logit_rows[first + i] * D, (size_t)D * sizeof(float));
            normed = rows;
        }
        float *logits = o->logits ? o->logits + first * width
                                  : scratch(SCRATCH_LOGITS, count * width * (int64_t)sizeof(float));
        paceline_linear(m->head, normed, NULL, logits, count);
        if (o->samplers) pick_rows(p, o, logits, first, count, width);
    }
}

/* p->hidden and p->normed may be NULL: their results are not wanted. cos and sin of `p` are set here. */
EXPORT void paceline_decoder_pass(const model_t *m, pass_t *p, const outputs_t *o) {
    const decoder_t *d = m->decoder;
    const int64_t rows = p->rows, D = d->hidden_size, half = d->width / 2, R = o->num_logits;
    float *at = scratch(SCRATCH_DECODER, (rows * (2 * D + 4 * half) + R * D) * (int64_t)sizeof(float));
    float *chosen = at + 2 * rows * D, *angles = chosen + R * D;
    if (!p->hidden) p->hidden = at;
    if (!p->normed) p->normed = at + rows * D;
    for (int table = 0; table < 2 && m->cos[table]; table++) {
        float *cos = angles + 2 * table * rows * half, *sin = cos + rows * half;
        for (int64_t r = 0; r < rows; r++) {
            memcpy(cos + r * half, m->cos[table] + o->positions[r] * half, (size_t)half * sizeof(float));
            memcpy(sin + r * half, m->sin[table] + o->positions[r] * half, (size_t)half * sizeof(float));
        }
        p->cos[table] = cos, p->sin[table] = sin;
    }
    paceline_embedding(m->embedding, o->tokens, p->hidden, rows);
    paceline_rms_norm(p->hidden, NULL, m->first_norm, p->normed, NULL, rows, D, d->eps);
    paceline_decoder(d, m->layers, p);
    compute_logits(m, p, o, chosen);
}
