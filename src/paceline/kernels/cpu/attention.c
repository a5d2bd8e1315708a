/* Softmax attention over the paged cache. A task is a block of rows of one sequence and the heads that share a kv head.
 *
 * A rank is an index in a row's list of visible keys, context before ancestors. All sums run over ranks, never over cache
 * positions. So a row's result depends only on the keys it attends to: a node of a tree has the same bits as the same path in a
 * chain, and chunks of a prefill do not change it. A dot product is a chain over vectors of the head, reduced by one tree. The
 * sum of exponentials runs by rank modulo 16. The weighted values are one chain in rank order, possibly stored in between.
 *
 * With sinks, a head's softmax has one more score, its sink, without a value.
 *
 * The first `shared` ranks are the same keys for all rows of a block. They are processed in chunks that stay in the first-level
 * cache. The keys after them, the tail, differ by row. */
#include "decoder.h"
#include "pool.h"

enum { BLOCK_SIZE = 16, MAX_TREE_ROWS = 64, ROWS = 8, TAIL = MAX_TREE_ROWS + ROWS + LANES };
enum { MAX_GROUP = 4, CHUNK = 64, VECTORS = LANES == 8 ? 2 : 4 }; /* VECTORS: vectors of a head in registers */

typedef struct {
    int64_t sequence, first, rows; /* first: row in the pass */
} row_block;

typedef struct {
    const float *query, *keys, *values; /* [T, H, hd], [slots, KV, hd] */
    float *out;                         /* [T, H * hd] */
    const int32_t *starts, *context_lens, *tables;
    const int64_t *ancestors; /* [T] or NULL */
    const int32_t *earlier;   /* [S] or NULL */
    const float *sinks;       /* [H] or NULL */
    const row_block *blocks;
    int64_t max_blocks, heads, kv_heads, width, window;
    float scale, cap; /* cap 0: none */
    int64_t heads_per_task;
    const int_input *rounded; /* for the product after attention; NULL: none */
} attention_job;

/* Keys that the rows of a block attend to: row r attends to ranks [from[r], to[r]). Offsets are in floats from the start of the
 * cache; every list is followed by LANES offsets that are safe to read. */
typedef struct {
    int64_t *offsets, shared; /* of ranks base..shared - 1 */
    int64_t base, pitch;      /* scores start at rank `base`, a multiple of WIDE; `pitch` per (row, head) */
    int64_t tail[ROWS][TAIL], from[ROWS], to[ROWS];
} view_t;

INLINE int64_t rounded(int64_t count) { return (count + WIDE - 1) / WIDE * WIDE; }

static void find_visible(const attention_job *j, const row_block *block, view_t *view) {
    const int32_t *table = j->tables + block->sequence * j->max_blocks;
    const int64_t context = j->context_lens[block->sequence], token = j->kv_heads * j->width;
    const int64_t own = block->first - j->starts[block->sequence] /* index of the block's first row in its sequence */
                        + (j->earlier ? j->earlier[block->sequence] : 0);
    const int64_t *masks = j->ancestors ? j->ancestors + block->first : 0;
#define OFFSET(i) (((int64_t)table[(i) / BLOCK_SIZE] * BLOCK_SIZE + (i) % BLOCK_SIZE) * token)
    view->shared = context + own;
    for (int64_t r = 0; masks && r < block->rows; r++)
        if (masks[r] != -1) view->shared = context;
    int64_t first = view->shared, last = 0; /* a small window may start in the tail, whose scores are all computed */
    for (int64_t r = 0; r < block->rows; r++) {
        int64_t count = 0;
        for (int64_t i = view->shared; i <= context + own + r; i++) /* i - context exceeds 63 only in chains */
            if (!masks || masks[r] == -1 || (uint64_t)masks[r] >> (i - context) & 1) view->tail[r][count++] = OFFSET(i);
        for (int t = 0; t < LANES; t++) view->tail[r][count + t] = OFFSET(0);
        view->to[r] = view->shared + count;
        view->from[r] = j->window && view->to[r] > j->window ? view->to[r] - j->window : 0;
        first = view->from[r] < first ? view->from[r] : first;
        last = view->to[r] > last ? view->to[r] : last;
    }
    view->base = first / WIDE * WIDE;
    view->pitch = rounded(last - view->base) + LANES; /* dot products are stored as whole vectors from any rank */
    view->offsets = scratch(SCRATCH_OFFSETS, (view->shared + LANES) * (int64_t)sizeof(int64_t));
    for (int64_t i = view->base; i < view->shared + LANES; i++) view->offsets[i] = i < view->shared ? OFFSET(i) : OFFSET(0);
#undef OFFSET
}

/* scores[r] = scale * q . key[r]; whole vectors are written */
INLINE void dot_keys(const int width, const float *q, const float *keys, const int64_t *offsets, int64_t count, float scale,
                     float *scores) {
    for (int64_t first = 0; first < count; first += LANES) {
        vf partial[LANES];
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) {
            const float *key = keys + offsets[first + t];
            wide sum;
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) sum.part[p] = vf_load(q + p * LANES) * vf_load(key + p * LANES);
            for (int i = WIDE; i < width; i += WIDE)
#pragma GCC unroll 4
                for (int p = 0; p < PARTS; p++)
                    sum.part[p] = vf_fma(vf_load(q + i + p * LANES), vf_load(key + i + p * LANES), sum.part[p]);
            partial[t] = wide_fold(sum);
        }
        vf_store(scores + first, vf_sums(partial) * scale);
    }
}

static void dot(const attention_job *j, const float *q, const float *keys, const int64_t *offsets, int64_t count,
                float *scores) {
    if (j->width == 64) dot_keys(64, q, keys, offsets, count, j->scale, scores);
    else if (j->width == 128) dot_keys(128, q, keys, offsets, count, j->scale, scores);
    else dot_keys((int)j->width, q, keys, offsets, count, j->scale, scores);
}

/* Replace scores [from, to) by e^(score - peak), and the rest of their vectors by 0. Returns the sum. `sink`: one more score, or
 * NULL. `cap`: of the scores, or 0. */
static float exponentials(float *scores, int64_t from, int64_t to, const float *sink, float cap) {
    const int64_t first = from / WIDE * WIDE, end = rounded(to);
    for (int64_t i = first; i < from; i++) scores[i] = scores[from];
    for (int64_t i = to; i < end; i++) scores[i] = scores[from];
    if (cap > 0.0f)
        for (int64_t i = first; i < end; i += LANES) vf_store(scores + i, vf_tanh(vf_load(scores + i) / cap) * cap);
    vf most = vf_load(scores + first);
    wide sum = {{{0}}};
    for (int64_t i = first; i < end; i += LANES) most = vf_max(most, vf_load(scores + i));
    float lanes[LANES];
    vf_store(lanes, most);
    float peak = lanes[0];
    for (int i = 1; i < LANES; i++) peak = lanes[i] > peak ? lanes[i] : peak;
    if (sink && *sink > peak) peak = *sink;
    for (int64_t i = first; i < end; i += LANES) vf_store(scores + i, vf_exp(vf_load(scores + i) - peak));
    for (int64_t i = first; i < from; i++) scores[i] = 0.0f;
    for (int64_t i = to; i < end; i++) scores[i] = 0.0f;
    for (int64_t i = first; i < end; i += WIDE)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) sum.part[p] += vf_load(scores + i + p * LANES);
    const float total = vf_sum(wide_fold(sum));
    if (!sink) return total;
    vf_store(lanes, vf_exp(vf_of(*sink - peak)));
    return total + lanes[0];
}

/* out[h] += sum_r scores[h][r] value[r], for `group` heads that share their values */
INLINE void weigh_some(const int group, const int vectors, const float *values, const int64_t *offsets, int64_t count,
                       const float *scores, int64_t pitch, int64_t width, float *out) {
    vf acc[MAX_GROUP][VECTORS];
#pragma GCC unroll 4
    for (int h = 0; h < group; h++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) acc[h][i] = vf_load(out + h * width + i * LANES);
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int h = 0; h < group; h++) {
            const vf weight = vf_of(scores[h * pitch + r]);
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                acc[h][i] = vf_fma(weight, vf_load(values + offsets[r] + i * LANES), acc[h][i]);
        }
#pragma GCC unroll 4
    for (int h = 0; h < group; h++)
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) vf_store(out + h * width + i * LANES, acc[h][i]);
}

INLINE void weigh_group(const int group, const float *values, const int64_t *offsets, int64_t count, const float *scores,
                        int64_t pitch, int64_t width, float *out) {
    int64_t d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
        weigh_some(group, VECTORS, values + d, offsets, count, scores, pitch, width, out + d);
    for (; d < width; d += LANES) weigh_some(group, 1, values + d, offsets, count, scores, pitch, width, out + d);
}

static void weigh(int64_t group, const float *values, const int64_t *offsets, int64_t count, const float *scores, int64_t pitch,
                  int64_t width, float *out) {
    switch (group) {
    case 1: weigh_group(1, values, offsets, count, scores, pitch, width, out); break;
    case 2: weigh_group(2, values, offsets, count, scores, pitch, width, out); break;
    case 3: weigh_group(3, values, offsets, count, scores, pitch, width, out); break;
    default: weigh_group(4, values, offsets, count, scores, pitch, width, out);
    }
}

/* Attention of `group` heads of a block, from `head` on; keys and values are those of their kv head */
static void attend_group(const attention_job *j, const row_block *block, const view_t *view, int64_t head, int64_t group,
                         const float *keys, const float *values) {
    const int64_t width = j->width, pitch = view->pitch, shared = view->shared;
    float *all = scratch(SCRATCH_SCORES, block->rows * group * pitch * (int64_t)sizeof(float));
    float *out = j->out + (block->first * j->heads + head) * width, totals[ROWS][MAX_GROUP];
    const float *query = j->query + (block->first * j->heads + head) * width;
#define SCORES(r, h, rank) (all + ((r) * group + (h)) * pitch + (rank) - view->base)
    for (int64_t rank = view->base; rank < shared; rank += CHUNK)
        for (int64_t r = 0; r < block->rows; r++)
            for (int64_t h = 0; h < group; h++)
                dot(j, query + (r * j->heads + h) * width, keys, view->offsets + rank,
                    shared - rank < CHUNK ? shared - rank : CHUNK, SCORES(r, h, rank));
    for (int64_t r = 0; r < block->rows; r++)
        for (int64_t h = 0; h < group; h++) {
            dot(j, query + (r * j->heads + h) * width, keys, view->tail[r], view->to[r] - shared, SCORES(r, h, shared));
            totals[r][h] = exponentials(SCORES(r, h, view->base), view->from[r] - view->base, view->to[r] - view->base,
                                        j->sinks ? j->sinks + head + h : NULL, j->cap);
            memset(out + (r * j->heads + h) * width, 0, (size_t)width * sizeof(float));
        }
    for (int64_t rank = view->base; rank < shared; rank += CHUNK) {
        const int64_t end = shared - rank < CHUNK ? shared : rank + CHUNK;
        for (int64_t r = 0; r < block->rows; r++) {
            const int64_t from = view->from[r] > rank ? view->from[r] : rank;
            weigh(group, values, view->offsets + from, end - from, SCORES(r, 0, from), pitch, width,
                  out + r * j->heads * width);
        }
    }
    for (int64_t r = 0; r < block->rows; r++) {
        const int64_t from = view->from[r] > shared ? view->from[r] : shared;
        weigh(group, values, view->tail[r] + from - shared, view->to[r] - from, SCORES(r, 0, from), pitch, width,
              out + r * j->heads * width);
        for (int64_t h = 0; h < group; h++) {
            float *result = out + (r * j->heads + h) * width;
            for (int64_t d = 0; d < width; d++) result[d] /= totals[r][h];
            if (!j->rounded) continue;
            const int_row to = row_of(j->rounded, block->first + r);
            round_blocks(&to, (head + h) * width / BLOCK, width / BLOCK, result);
        }
    }
#undef SCORES
}

static void attend(const void *job, int64_t task) {
    const attention_job *j = job;
    const int64_t tasks_per_block = j->heads / j->heads_per_task, head = task % tasks_per_block * j->heads_per_task;
    const row_block *block = j->blocks + task / tasks_per_block;
    const int64_t kv_head = head / (j->heads / j->kv_heads);
    view_t view;
    find_visible(j, block, &view);
    for (int64_t first = 0; first < j->heads_per_task; first += MAX_GROUP) {
        const int64_t left = j->heads_per_task - first, group = left < MAX_GROUP ? left : MAX_GROUP;
        attend_group(j, block, &view, head + first, group, j->keys + kv_head * j->width, j->values + kv_head * j->width);
    }
}

/* rounded: only if a head is a whole number of blocks */
void attend_and_round(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                      const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors, const int32_t *earlier,
                      const float *sinks, int64_t rows, int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads,
                      int64_t width, int64_t window, float scale, float cap, const int_input *rounded) {
    row_block *blocks = scratch(SCRATCH_BLOCKS, rows * (int64_t)sizeof(row_block));
    int64_t count = 0, most = ROWS;
    if ((rows + ROWS - 1) / ROWS * heads < 2 * num_threads()) most = ROWS / 2; /* few rows: more tasks, for an even split */
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t row = starts[s]; row < starts[s + 1]; row += most)
            blocks[count++] = (row_block){s, row, starts[s + 1] - row < most ? starts[s + 1] - row : most};
    attention_job job = {query, keys, values, out, starts, context_lens, tables, ancestors, earlier, sinks, blocks,
                         max_blocks, heads, kv_heads, width, window, scale, cap, heads / kv_heads, rounded};
    if (count * kv_heads < 4 * num_threads()) job.heads_per_task = 1; /* too few tasks for an even split */
    parallel(attend, &job, count * (heads / job.heads_per_task));
}

/* window 0: no window. cap 0: no cap of scores. earlier: rows of each sequence that earlier passes stored after its context */
EXPORT void paceline_attention(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                               const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors,
                               const int32_t *earlier, const float *sinks, int64_t rows, int64_t sequences,
                               int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t width, int64_t window,
                               float scale, float cap) {
    attend_and_round(query, keys, values, out, starts, context_lens, tables, ancestors, earlier, sinks, rows, sequences,
                     max_blocks, heads, kv_heads, width, window, scale, cap, NULL);
}
