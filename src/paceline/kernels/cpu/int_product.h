/* Products of packed codes with activations that are rounded to int8, in parts that other kernels can join: what computes the
 * activations rounds them, and what uses the outputs takes them from the thread that computed them. */
#pragma once
#include "int_rows.h"

enum { AMX_ROWS = 16, MAX_UNIT_TILES = 8 };

/* Activations, rounded for one weight */
typedef struct {
    int_block x; /* of all blocks of rows; the blocks are contiguous */
    int64_t rows, rows_per_block, row_blocks;
    int64_t inputs, blocks, parts; /* inputs without padding; blocks of 32 inputs; groups of a block */
    int is_amx, has_sums, has_firsts;
} int_input;

/* Memory for `rows` rows in `which` scratch of the calling thread */
int_input int_input_of(const weight_t *w, int64_t rows, int which, int is_amx);
INLINE int_block rows_of_block(const int_input *in, int64_t block) {
    const int64_t blocks = block * in->rows_per_block * in->blocks, groups = blocks * in->parts;
    return (int_block){in->x.codes + blocks * BLOCK, in->x.scales + groups, in->x.sums + groups, in->x.firsts + groups};
}
INLINE int64_t num_rows_of(const int_input *in, int64_t block) {
    const int64_t left = in->rows - block * in->rows_per_block;
    return left < in->rows_per_block ? left : in->rows_per_block;
}

/* Where one row is stored */
typedef struct {
    const int_input *in;
    int_block to;    /* of its block of rows */
    int64_t r, rows; /* its number in that block, rows of the block */
} int_row;

INLINE int_row row_at(const int_input *in, int64_t block, int64_t r) {
    return (int_row){in, rows_of_block(in, block), r, num_rows_of(in, block)};
}
INLINE int_row row_of(const int_input *in, int64_t row) {
    const uint32_t each = (uint32_t)in->rows_per_block; /* 64-bit divisions are slow */
    return row_at(in, (uint32_t)row / each, (uint32_t)row % each);
}

/* Round `count` blocks of 32 values, the inputs from 32 * first on. Any thread may call it. */
void round_blocks(const int_row *row, int64_t first, int64_t count, const float *x);
void round_row(const int_input *in, int64_t row, const float *x); /* all inputs */
void round_rows(const int_input *in, const float *x);             /* x [rows, inputs], in parallel */

/* Outputs in units: tile i of unit u is u * step + i * stride. `finish` gets acc [tiles, rows, TILE], the outputs of one unit for
 * a block of rows, those from `first` on. */
typedef struct {
    int64_t units, tiles, step, stride;
    void (*finish)(const void *data, int64_t unit, int64_t block, int64_t first, int64_t rows, const float *acc);
    const void *data;
} int_outputs;

/* Whether a product of this many rows uses AMX */
int wants_amx(int64_t rows);
void int_product(const weight_t *w, const int_input *in, const int_outputs *outputs);
/* out [rows, N] = the product + bias; bias [N] or NULL */
void int_store(const weight_t *w, const int_input *in, const float *bias, float *out);
