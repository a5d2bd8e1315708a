/* Draft trees of an EAGLE head, grown level by level in one call: the children of the best nodes of each level are ranked, and a
 * tree ends when no further level can be among its best nodes. The value of a node is the product of the confidences on its path,
 * and that of a child is at most its parent's: see speculation/trees/growth.py, which gives the same trees.
 *
 * The slots of a tree follow the cached slots of its sequence. A row attends to these and to its ancestors. */
#include "eagle.h"
#include "pool.h"
#include "top.h"
#include <math.h>

enum { BLOCK_SIZE = 16, MAX_SLOTS = 64, MAX_BRANCHES = 8, MAX_NODES = 63, CANDIDATES = (MAX_SLOTS + 1) * MAX_BRANCHES };
enum { LOGIT_ROWS = 64 }; /* rows whose logits are in memory at once */

void paceline_top(const float *x, int64_t *columns, float *values, float *totals, int64_t rows, int64_t width, int64_t count);
void paceline_sample(const float *x, const float *temperatures, const float *floors, const double *top_p, const int64_t *top_k,
                     const uint64_t *streams, const uint64_t *positions, int64_t *picks, const int64_t *ids,
                     const int32_t *is_noisy, int64_t *columns, float *confidences, int64_t rows, int64_t width, int64_t count);

/* A sequence whose committed slots are in the cache, and the parameters by which its tokens are ranked; see sampling.c */
typedef struct {
    int64_t budget, max_levels;      /* nodes of the draft, levels */
    int64_t num_cached, position;    /* position: of the last cached slot, rotary */
    int64_t next_token;              /* position of the token after the last committed one */
    int64_t is_greedy, is_noisy, top_k;
    uint64_t stream;
    double top_p, temperature, floor;
} rooted_t;

typedef struct {
    int64_t sequences, max_blocks, width, branches; /* width: nodes of a level that get children */
    const rooted_t *roots;                          /* [S] */
    const int32_t *tables;                          /* [S, max_blocks]: room for the cached slots and those of the trees */
    const float *states;                            /* [S, D], of the last cached slots */
    int64_t *counts, *tokens, *parents;             /* [S], [S, MAX_NODES] each: the drafts, best nodes first */
} trees_t;

typedef struct {
    int64_t count, num_slots, num_best;
    int64_t tokens[CANDIDATES];
    double values[CANDIDATES]; /* logarithms */
    int32_t parents[CANDIDATES], levels[CANDIDATES], rows[CANDIDATES], slots[CANDIDATES]; /* rows: in the pass of its slot */
    int64_t masks[MAX_SLOTS];   /* by slot: itself and its ancestors */
    int32_t best[MAX_NODES];    /* the most valuable nodes; equal values in the order of creation */
} tree_t;

/* The rows of a level: one for each node that gets children */
typedef struct {
    int64_t rows;
    int64_t *sequences, *nodes, *from, *tokens, *positions, *slots, *masks; /* [T]; from: the row of its parent before */
    int32_t *starts, *contexts, *earlier;                                   /* [S + 1], [S], [S] */
    float *temperatures, *floors;
    double *top_p;
    int64_t *top_k, *columns;
    uint64_t *streams, *noise_positions;
    int32_t *is_noisy;
    float *confidences, *totals;
    float *states, *next_states, *normed; /* [T, D], [T, D], [T, 2 D] */
} level_t;

static void add_child(tree_t *t, int64_t budget, int64_t parent, int64_t token, double confidence) {
    const int64_t node = t->count++;
    const double value = (parent < 0 ? 0.0 : t->values[parent]) + (confidence < 0.0 ? confidence : 0.0);
    t->tokens[node] = token, t->parents[node] = (int32_t)parent, t->values[node] = value;
    t->levels[node] = parent < 0 ? 1 : t->levels[parent] + 1;
    int64_t at = t->num_best;
    while (at > 0 && t->values[t->best[at - 1]] < value) at--;
    if (at == budget) return;
    const int64_t last = t->num_best < budget ? t->num_best++ : budget - 1;
    memmove(t->best + at + 1, t->best + at, (size_t)(last - at) * sizeof *t->best);
    t->best[at] = (int32_t)node;
}

/* Logits of the rows from their norms, and the best children of each */
static void add_children(const head_t *h, const trees_t *j, tree_t *trees, level_t *l) {
    const int64_t width = h->vocabulary->num_outputs, D = h->decoder->hidden_size;
    float *logits = scratch(SCRATCH_LOGITS, (l->rows < LOGIT_ROWS ? l->rows : LOGIT_ROWS) * width * (int64_t)sizeof(float));
    for (int64_t first = 0, rows; first < l->rows; first += rows) {
        const int is_greedy = j->roots[l->sequences[first]].is_greedy != 0;
        for (rows = 0; first + rows < l->rows && rows < LOGIT_ROWS; rows++)
            if ((j->roots[l->sequences[first + rows]].is_greedy != 0) != is_greedy) break;
        float *confidences = l->confidences + first * MAX_BRANCHES;
        int64_t *columns = l->columns + first * MAX_BRANCHES;
        paceline_linear(h->vocabulary, l->normed + first * D, NULL, logits, rows);
        if (is_greedy) {
            paceline_top(logits, columns, confidences, l->totals, rows, width, j->branches);
            for (int64_t i = 0; i < rows * j->branches; i++) confidences[i] -= l->totals[i / j->branches];
        } else {
            paceline_sample(logits, l->temperatures + first, l->floors + first, l->top_p + first, l->top_k + first,
                            l->streams + first, l->noise_positions + first, NULL, h->ids, l->is_noisy + first, columns,
                            confidences, rows, width, j->branches);
        }
        for (int64_t i = 0; i < rows * j->branches; i++) {
            const int64_t row = first + i / j->branches, s = l->sequences[row], column = columns[i];
            if (!(confidences[i] > -INFINITY)) continue; /* impossible, or NaN */
            add_child(trees + s, j->roots[s].budget, l->nodes[row], h->ids ? h->ids[column] : column, confidences[i]);
        }
    }
}

static void set_ranking(const trees_t *j, level_t *l, int64_t row, int64_t s, int64_t level) {
    const rooted_t *root = j->roots + s;
    l->sequences[row] = s;
    l->temperatures[row] = (float)root->temperature, l->floors[row] = (float)root->floor;
    l->top_p[row] = root->top_p, l->top_k[row] = root->top_k;
    l->streams[row] = root->stream, l->noise_positions[row] = (uint64_t)(root->next_token + level);
    l->is_noisy[row] = (int32_t)root->is_noisy;
}

/* The nodes of `level` that may have a child among the best, best first: if `budget` nodes have at least the value of a node,
 * itself included, no child of it is */
static void choose_rows(const trees_t *j, tree_t *trees, level_t *l, int64_t level) {
    l->rows = 0;
    for (int64_t s = 0; s < j->sequences; s++) {
        const rooted_t *root = j->roots + s;
        tree_t *t = trees + s;
        l->starts[s] = (int32_t)l->rows, l->contexts[s] = (int32_t)root->num_cached, l->earlier[s] = (int32_t)t->num_slots;
        const int64_t most = t->num_best < root->budget - 1 ? t->num_best : root->budget - 1;
        int64_t chosen = 0;
        for (int64_t i = 0; i < most && chosen < j->width && t->num_slots < MAX_SLOTS && level < root->max_levels; i++) {
            const int64_t node = t->best[i], parent = t->parents[node], row = l->rows;
            if (t->levels[node] != level) continue;
            const int64_t slot = t->num_slots++, at = root->num_cached + slot;
            l->rows++, chosen++;
            l->nodes[row] = node, l->from[row] = parent < 0 ? s : t->rows[parent];
            l->tokens[row] = t->tokens[node], l->positions[row] = root->position + level;
            l->slots[row] = (int64_t)j->tables[s * j->max_blocks + at / BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE;
            t->slots[node] = (int32_t)slot, t->rows[node] = (int32_t)row;
            t->masks[slot] = (int64_t)((uint64_t)1 << slot) | (parent < 0 ? 0 : t->masks[t->slots[parent]]);
            l->masks[row] = t->masks[slot];
            set_ranking(j, l, row, s, level);
        }
    }
    l->starts[j->sequences] = (int32_t)l->rows;
}

/* The states of the rows, from those of their parents */
static void compute_rows(const head_t *h, const trees_t *j, level_t *l) {
    const int64_t D = h->decoder->hidden_size;
    for (int64_t r = 0; r < l->rows; r++)
        memcpy(l->next_states + r * D, l->states + l->from[r] * D, (size_t)D * sizeof(float));
    float *before = l->states;
    l->states = l->next_states, l->next_states = before;
    pass_t pass = {.rows = l->rows, .sequences = j->sequences, .max_blocks = j->max_blocks, .slots = l->slots,
                   .starts = l->starts, .context_lens = l->contexts, .tables = j->tables, .ancestors = l->masks,
                   .earlier = l->earlier, .hidden = l->states, .normed = l->normed};
    eagle_pass(h, &pass, l->tokens, l->positions);
}

static void write_draft(const tree_t *t, int64_t *count, int64_t *tokens, int64_t *parents) {
    int64_t place[CANDIDATES];
    *count = 0;
    for (int64_t i = 0; i < t->num_best; i++) {
        const int64_t node = t->best[i], parent = t->parents[node];
        if (!(t->values[node] > -INFINITY)) continue;
        place[node] = *count;
        tokens[*count] = t->tokens[node], parents[(*count)++] = parent < 0 ? -1 : place[parent];
    }
}

/* Memory of a level of `rows` rows: all arrays of 8 bytes, then those of 4, then the states */
static void *take(char **at, int64_t bytes) {
    void *taken = *at;
    *at += (bytes + 63) / 64 * 64;
    return taken;
}

static tree_t *reserve(const head_t *h, const trees_t *j, level_t *l) {
    const int64_t D = h->decoder->hidden_size, S = j->sequences, T = S * j->width, ranked = T * MAX_BRANCHES;
    const int64_t bytes = S * (int64_t)sizeof(tree_t) + T * 11 * 8 + ranked * 12 + (T * 4 + 3 * (S + 1)) * 4 + T * 4 * D * 4;
    char *at = scratch(SCRATCH_GROWTH, bytes + 64 * 24);
    tree_t *trees = take(&at, S * (int64_t)sizeof(tree_t));
    int64_t **longs[] = {&l->sequences, &l->nodes, &l->from, &l->tokens, &l->positions, &l->slots, &l->masks, &l->top_k};
    for (int i = 0; i < 8; i++) *longs[i] = take(&at, T * 8);
    l->streams = take(&at, T * 8), l->noise_positions = take(&at, T * 8), l->top_p = take(&at, T * 8);
    l->columns = take(&at, ranked * 8), l->confidences = take(&at, ranked * 4);
    l->temperatures = take(&at, T * 4), l->floors = take(&at, T * 4), l->totals = take(&at, T * 4);
    l->is_noisy = take(&at, T * 4);
    l->starts = take(&at, (S + 1) * 4), l->contexts = take(&at, S * 4), l->earlier = take(&at, S * 4);
    l->states = take(&at, T * D * 4), l->next_states = take(&at, T * D * 4), l->normed = take(&at, T * 2 * D * 4);
    for (int64_t s = 0; s < S; s++) trees[s].count = trees[s].num_slots = trees[s].num_best = 0;
    return trees;
}

EXPORT void paceline_eagle_trees(const head_t *h, const trees_t *j) {
    const decoder_t *d = h->decoder;
    level_t l;
    tree_t *trees = reserve(h, j, &l);
    memcpy(l.states, j->states, (size_t)(j->sequences * d->hidden_size) * sizeof(float));
    const layer_t *last = h->layer + d->num_layers - 1;
    if (h->is_output_normed) memcpy(l.normed, l.states, (size_t)(j->sequences * d->hidden_size) * sizeof(float));
    else paceline_rms_norm(l.states, NULL, last->next_norm, l.normed, NULL, j->sequences, d->hidden_size, d->eps);
    for (int64_t s = 0; s < j->sequences; s++) {
        l.nodes[s] = -1;
        set_ranking(j, &l, s, s, 0);
    }
    l.rows = j->sequences;
    for (int64_t level = 1; l.rows; level++) {
        add_children(h, j, trees, &l);
        choose_rows(j, trees, &l, level);
        if (l.rows) compute_rows(h, j, &l);
    }
    for (int64_t s = 0; s < j->sequences; s++)
        write_draft(trees + s, j->counts + s, j->tokens + s * MAX_NODES, j->parents + s * MAX_NODES);
}

/* `paceline_eagle` over committed tokens, then the trees from its states of `last_rows` [S]; p->hidden is not used */
EXPORT void paceline_eagle_draft(const head_t *h, pass_t *p, const int64_t *tokens, const int64_t *positions,
                                 const float *const *inner, int64_t num_inner, const int64_t *last_rows, trees_t *j) {
    const int64_t D = h->decoder->hidden_size;
    float *hidden = p->hidden = scratch(SCRATCH_STATES, (p->rows + j->sequences) * D * (int64_t)sizeof(float));
    float *states = hidden + p->rows * D;
    paceline_eagle(h, p, tokens, positions, inner, num_inner);
    for (int64_t s = 0; s < j->sequences; s++)
        memcpy(states + s * D, hidden + last_rows[s] * D, (size_t)D * sizeof(float));
    j->states = states;
    paceline_eagle_trees(h, j);
}
