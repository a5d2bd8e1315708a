/* Softmax attention over the paged cache, one (row, kv head) at a time.
 *
 * A row's visible keys are put in a list first, context before ancestors, and all sums run over ranks in that list, never over
 * cache positions. So a row's result depends on what it sees alone: a node of a tree gets the bits that its path would get as a
 * chain, and how a prompt is cut into passes changes nothing. A dot product is a chain over vectors of the head, folded by one
 * tree; the sum of exponentials goes by rank modulo LANES; the weighted values are one chain in rank order. */
#include "pool.h"
#include "simd.h"

enum { BLOCK_SIZE = 16, MAX_GROUP = 4, CHUNK = LANES == 8 ? 2 : 4 }; /* CHUNK: vectors of a head held in registers */

typedef struct {
    const float *query, *keys, *values; /* [T, H, hd], [slots, KV, hd] */
    float *out;                         /* [T, H * hd] */
    const int32_t *starts, *context_lens, *tables;
    const int64_t *ancestors; /* [T] or NULL */
    int64_t rows, sequences, max_blocks, heads, kv_heads, width, window;
    float scale;
    int64_t heads_per_task;
} attention_job;

/* Offsets of the visible keys in the cache, in floats; returns how many. */
static int64_t list_visible(const attention_job *j, int64_t row, int64_t *offsets) {
    int64_t low = 0, high = j->sequences; /* the last sequence that starts at or before row */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (j->starts[middle] <= row) low = middle;
        else high = middle;
    }
    const int64_t own = row - j->starts[low], context = j->context_lens[low], token = j->kv_heads * j->width;
    const int32_t *table = j->tables + low * j->max_blocks;
    const int64_t mask = j->ancestors ? j->ancestors[row] : -1;
    int64_t count = 0;
    for (int64_t i = 0; i < context + own + 1; i++) {
        const int64_t mine = i - context; /* beyond 63 only in chains */
        if (mine >= 0 && mask != -1 && !((uint64_t)mask >> mine & 1)) continue;
        offsets[count++] = ((int64_t)table[i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE) * token;
    }
    if (j->window && count > j->window) {
        memmove(offsets, offsets + count - j->window, (size_t)j->window * sizeof *offsets);
        count = j->window;
    }
    return count;
}

/* scores[r] = scale * q . key[r]; whole vectors of ranks, the last one padded with zeros */
INLINE void dot_keys(const int vectors, const float *q, const float *keys, const int64_t *offsets, int64_t count, float scale,
                     float *scores) {
    for (int64_t first = 0; first < count; first += LANES) {
        vf partial[LANES];
        const int64_t left = count - first;
#pragma GCC unroll 16
        for (int t = 0; t < LANES; t++) {
            const float *key = keys + offsets[first + (t < left ? t : 0)];
            vf sum = vf_load(q) * vf_load(key);
            for (int i = 1; i < vectors; i++) sum = vf_fma(vf_load(q + i * LANES), vf_load(key + i * LANES), sum);
            partial[t] = sum;
        }
        vf_store(scores + first, vf_sums(partial) * scale);
    }
}

static void softmax_weights(float *scores, int64_t count, float *total) {
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < padded; i++) scores[i] = scores[0];
    vf most = vf_load(scores), sum = {0};
    for (int64_t i = LANES; i < padded; i += LANES) most = vf_max(most, vf_load(scores + i));
    float lanes[LANES];
    vf_store(lanes, most);
    float peak = lanes[0];
    for (int i = 1; i < LANES; i++) peak = lanes[i] > peak ? lanes[i] : peak;
    for (int64_t i = 0; i < padded; i += LANES) vf_store(scores + i, vf_exp(vf_load(scores + i) - peak));
    for (int64_t i = count; i < padded; i++) scores[i] = 0.0f;
    for (int64_t i = 0; i < padded; i += LANES) sum += vf_load(scores + i);
    *total = vf_sum(sum);
}

/* out[h] = sum_r scores[h][r] value[r] / total[h] for `group` heads that share their values */
INLINE void weigh_values(const int group, const float *values, const int64_t *offsets, int64_t count, const float *scores,
                         int64_t pitch, const float *totals, int64_t width, float *out) {
    for (int64_t d = 0; d < width; d += CHUNK * LANES) {
        const int vectors = (int)(width - d < CHUNK * LANES ? (width - d) / LANES : CHUNK);
        vf acc[MAX_GROUP][CHUNK] = {{{0}}};
        if (vectors == CHUNK)
            for (int64_t r = 0; r < count; r++) {
                const float *value = values + offsets[r] + d;
#pragma GCC unroll 4
                for (int h = 0; h < group; h++) {
                    vf weight = vf_of(scores[h * pitch + r]);
#pragma GCC unroll 4
                    for (int i = 0; i < CHUNK; i++) acc[h][i] = vf_fma(weight, vf_load(value + i * LANES), acc[h][i]);
                }
            }
        else
            for (int64_t r = 0; r < count; r++)
                for (int h = 0; h < group; h++)
                    for (int i = 0; i < vectors; i++) {
                        const float *value = values + offsets[r] + d + i * LANES;
                        acc[h][i] = vf_fma(vf_of(scores[h * pitch + r]), vf_load(value), acc[h][i]);
                    }
        for (int h = 0; h < group; h++)
            for (int i = 0; i < vectors; i++) vf_store(out + h * width + d + i * LANES, acc[h][i] / totals[h]);
    }
}

static void attend(const void *job, int64_t task) {
    const attention_job *j = job;
    const int64_t per_row = j->heads / j->heads_per_task, row = task / per_row, head = task % per_row * j->heads_per_task;
    const int64_t longest = j->max_blocks * BLOCK_SIZE, kv_head = head / (j->heads / j->kv_heads);
    int64_t *offsets = scratch(SCRATCH_OFFSETS, longest * (int64_t)sizeof(int64_t));
    const int64_t count = list_visible(j, row, offsets), pitch = (count + LANES - 1) / LANES * LANES;
    float *scores = scratch(SCRATCH_SCORES, MAX_GROUP * (longest + LANES) * (int64_t)sizeof(float));
    const float *keys = j->keys + kv_head * j->width, *values = j->values + kv_head * j->width;
    for (int64_t first = 0; first < j->heads_per_task; first += MAX_GROUP) {
        const int64_t left = j->heads_per_task - first, group = left < MAX_GROUP ? left : MAX_GROUP;
        const int64_t at = (row * j->heads + head + first) * j->width;
        float totals[MAX_GROUP];
        for (int64_t h = 0; h < group; h++) {
            const float *q = j->query + at + h * j->width;
            float *mine = scores + h * pitch;
            if (j->width == 64) dot_keys(64 / LANES, q, keys, offsets, count, j->scale, mine);
            else if (j->width == 128) dot_keys(128 / LANES, q, keys, offsets, count, j->scale, mine);
            else dot_keys((int)(j->width / LANES), q, keys, offsets, count, j->scale, mine);
            softmax_weights(mine, count, &totals[h]);
        }
        float *out = j->out + at;
        switch (group) {
        case 1: weigh_values(1, values, offsets, count, scores, pitch, totals, j->width, out); break;
        case 2: weigh_values(2, values, offsets, count, scores, pitch, totals, j->width, out); break;
        case 3: weigh_values(3, values, offsets, count, scores, pitch, totals, j->width, out); break;
        default: weigh_values(4, values, offsets, count, scores, pitch, totals, j->width, out);
        }
    }
}

/* window 0: none */
EXPORT void paceline_attention(const float *query, const float *keys, const float *values, float *out, const int32_t *starts,
                               const int32_t *context_lens, const int32_t *tables, const int64_t *ancestors, int64_t rows,
                               int64_t sequences, int64_t max_blocks, int64_t heads, int64_t kv_heads, int64_t width,
                               int64_t window, float scale) {
    attention_job job = {query, keys, values, out, starts, context_lens, tables, ancestors, rows, sequences, max_blocks,
                         heads, kv_heads, width, window, scale, heads / kv_heads};
    if (rows * kv_heads < 4 * num_threads()) job.heads_per_task = 1; /* too few for an even split */
    parallel(attend, &job, rows * (heads / job.heads_per_task));
}
