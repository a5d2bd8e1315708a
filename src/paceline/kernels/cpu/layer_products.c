#include "layer_products.h"
#include "activation.h"

enum { MAX_WIDTH = MAX_UNIT_TILES * TILE };

typedef struct {
    const decoder_t *d;
    const layer_t *l;
    const pass_t *p;
    float *query;
} heads_data;

/* acc [tiles, rows, TILE] -> one row of values */
INLINE void gather(const float *acc, int64_t tiles, int64_t rows, int64_t r, float *to) {
    for (int64_t i = 0; i < tiles; i++) memcpy(to + i * TILE, acc + (i * rows + r) * TILE, TILE * sizeof(float));
}

static void finish_head(const void *data, int64_t head, int64_t block, int64_t first, int64_t rows, const float *acc) {
    (void)block;
    const heads_data *h = data;
    const decoder_t *d = h->d;
    const layer_t *l = h->l;
    const int64_t width = d->width, half = width / 2, kv_head = (head - d->heads) % d->kv_heads;
    const float *norm = head < d->heads ? l->q_norm : l->k_norm;
    float values[MAX_WIDTH];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t row = first + r, at = (h->p->slots[row] * d->kv_heads + kv_head) * width;
        gather(acc, width / TILE, rows, r, values);
        for (int64_t i = 0; l->qkv_bias && i < width; i++) values[i] += l->qkv_bias[head * width + i];
        if (head >= d->heads + d->kv_heads) {
            memcpy(l->values + at, values, (size_t)width * sizeof(float));
            continue;
        }
        if (l->q_norm) normalize(values, norm, values, width, d->eps);
        rotate(values, h->p->cos[l->rotary] + row * half, h->p->sin[l->rotary] + row * half,
               head < d->heads ? h->query + (row * d->heads + head) * width : l->keys + at, half);
    }
}

int joins_heads(const decoder_t *d, const layer_t *l) {
    return l->qkv->rounds_activations && d->width % TILE == 0 && d->width <= MAX_WIDTH && !d->joins_norms;
}

void product_heads(const decoder_t *d, const layer_t *l, const pass_t *p, const int_input *in, float *query) {
    const heads_data data = {d, l, p, query};
    const int64_t tiles = d->width / TILE;
    int_product(l->qkv, in, &(int_outputs){d->heads + 2 * d->kv_heads, tiles, tiles, 1, finish_head, &data});
}

typedef struct {
    const int_input *next;
    int64_t kind;
} gated_data;

static void finish_gated(const void *data, int64_t tile, int64_t block, int64_t first, int64_t rows, const float *acc) {
    (void)first;
    const gated_data *g = data;
    float active[TILE] __attribute__((aligned(64)));
    for (int64_t r = 0; r < rows; r++) {
        gate(acc + r * TILE, acc + (rows + r) * TILE, active, TILE, g->kind);
        const int_row to = row_at(g->next, block, r); /* both products have the same blocks of rows */
        round_blocks(&to, tile, 1, active);
    }
}

int joins_gate(const decoder_t *d, const layer_t *l) {
    return l->gate_up->rounds_activations && l->down->rounds_activations && d->ffn_size % TILE == 0;
}

void product_gated(const decoder_t *d, const layer_t *l, const int_input *in, const int_input *next) {
    const gated_data data = {next, d->activation};
    const int64_t tiles = d->ffn_size / TILE;
    int_product(l->gate_up, in, &(int_outputs){tiles, 2, 1, tiles, finish_gated, &data});
}
