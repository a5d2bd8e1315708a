/* out[t, n] = sum_k x[t, k] w[n, k] (+ bias[n]) over packed weights.
 *
 * The arithmetic of a (row, output) does not depend on the number of rows. Within a group, s = a chain of fma(x_k, code_k, s)
 * from 0; then acc = fma(scale, s, acc) and acc = fma(offset, sum of the group's x, acc). Dense formats: acc = acc + s every 32
 * inputs. linear_direct.h and linear_panel.h schedule this arithmetic for few rows and for many. Threads split tiles of outputs
 * and bands of rows, so that no sum crosses threads. */
#include "linear.h"
#include "linear_direct.h"
#include "linear_panel.h"
#include "pool.h"

#define DIRECT_FN(format, rows) static void direct_##format##_##rows(const direct_args *a) { direct(format, rows, a); }
#define DIRECT_FNS4(a, b, c, d, format) DIRECT_FN(format, a) DIRECT_FN(format, b) DIRECT_FN(format, c) DIRECT_FN(format, d)
#define DIRECT_NAMES4(a, b, c, d, format)                                                                             \
    direct_##format##_##a, direct_##format##_##b, direct_##format##_##c, direct_##format##_##d
#define PANEL_FN(rows) static void panel_##rows(const panel_args *a) { panel(rows, a); }

#if LANES == 16
#define DEFINE_DIRECT(format) DIRECT_FNS4(1, 2, 3, 4, format) DIRECT_FNS4(5, 6, 7, 8, format)
#define NAME_DIRECT(format) {DIRECT_NAMES4(1, 2, 3, 4, format), DIRECT_NAMES4(5, 6, 7, 8, format)}
PANEL_FN(7) PANEL_FN(8) PANEL_FN(9) PANEL_FN(10) PANEL_FN(11) PANEL_FN(12)
static const panel_fn PANELS[] = {panel_7, panel_8, panel_9, panel_10, panel_11, panel_12};
#else
#define DEFINE_DIRECT(format) DIRECT_FNS4(1, 2, 3, 4, format)
#define NAME_DIRECT(format) {DIRECT_NAMES4(1, 2, 3, 4, format)}
PANEL_FN(4) PANEL_FN(5) PANEL_FN(6)
static const panel_fn PANELS[] = {panel_4, panel_5, panel_6};
#endif
enum { LEAST_PANEL_ROWS = PANEL_ROWS / 2 + 1 }; /* rows of PANELS[0]; an even split of more than DIRECT_ROWS rows has at least as many */

DEFINE_DIRECT(CODES4) DEFINE_DIRECT(CODES8) DEFINE_DIRECT(HALF) DEFINE_DIRECT(BFLOAT) DEFINE_DIRECT(FLOAT)
static const direct_fn DIRECTS[][DIRECT_ROWS] = {
    NAME_DIRECT(CODES4), NAME_DIRECT(CODES8), NAME_DIRECT(HALF), NAME_DIRECT(BFLOAT), NAME_DIRECT(FLOAT)};

enum { CHUNKS_PER_THREAD = 4 }; /* few, for long runs of memory; several, so that one slow core does not delay the job */
enum { BLOCKS_PER_BAND = 8 };   /* row blocks per widened panel; their inputs should stay in the second-level cache */

/* 2^-shift of each code in its word; the eighth code contains the sign bit and is shifted down instead */
#define EIGHT_POWERS 1.0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f
static const float POWERS[16] = {EIGHT_POWERS, EIGHT_POWERS};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    const weight_t *w;
    const float *x, *bias;
    float *out, *packed, *sums;         /* per row block: packed [K/32, rows, 32], sums [K/group, rows] */
    int64_t rows, rows_per_block, band; /* band: rows of BLOCKS_PER_BAND blocks */
    int64_t tiles, chunk, chunks;
} linear_job;

/* sums[g * pitch] = the sum of x over group g: a chain of vectors, reduced by the same tree for every group */
static void sum_groups(const float *x, int64_t groups, int64_t group, float *sums, int64_t pitch) {
    for (int64_t first = 0; first < groups; first += LANES) {
        vf partial[LANES] = {{0}};
        const int64_t count = smaller(groups - first, LANES);
        for (int64_t g = 0; g < count; g++)
            for (int64_t i = 0; i < group; i += LANES) partial[g] += vf_load(x + (first + g) * group + i);
        float lanes[LANES];
        vf_store(lanes, vf_sums(partial));
        for (int64_t g = 0; g < count; g++) sums[(first + g) * pitch] = lanes[g];
    }
}

/* A block has rows_per_block rows; rows beyond the last row of the job are zeros. */
static void pack_rows(const void *job, int64_t row_block) {
    const linear_job *j = job;
    const weight_t *w = j->w;
    const int64_t rows = j->rows_per_block, first = row_block * rows, given = smaller(j->rows - first, rows);
    const int64_t blocks = blocks_of(w), inputs = w->num_inputs, groups = blocks * parts_of(w);
    const float *x = j->x + first * inputs;
    for (int64_t b = 0; b < blocks; b++) {
        float *packed = j->packed + (first * blocks + b * rows) * BLOCK;
        const int64_t width = smaller(inputs - b * BLOCK, BLOCK);
        if (given < rows || width < BLOCK) memset(packed, 0, (size_t)(rows * BLOCK) * sizeof(float));
        for (int64_t r = 0; r < given; r++)
            if (width < BLOCK) memcpy(packed + r * BLOCK, x + r * inputs + b * BLOCK, (size_t)width * sizeof(float));
            else memcpy(packed + r * BLOCK, x + r * inputs + b * BLOCK, BLOCK * sizeof(float)); /* constant length: inlined */
        for (int64_t i = 0; w->format == CODES4 && i < rows * BLOCK; i += LANES)
            vf_store(packed + i, vf_load(packed + i) * vf_load(POWERS + i % 16));
    }
    if (!w->offsets) return;
    float *sums = memset(j->sums + first * groups, 0, (size_t)(rows * groups) * sizeof(float));
    for (int64_t r = 0; r < given; r++) sum_groups(x + r * inputs, inputs / w->group, w->group, sums + r, rows);
}

static void widen_block(const weight_t *w, const uint8_t *codes, float *to) {
    switch (w->format) {
    case CODES4: widen(CODES4, codes, to); break;
    case CODES8: widen(CODES8, codes, to); break;
    case HALF: widen(HALF, codes, to); break;
    case BFLOAT: widen(BFLOAT, codes, to); break;
    default: widen(FLOAT, codes, to);
    }
}

/* acc [rows, TILE] = whole row blocks, from row `first` on, times one tile */
static void multiply_panels(const linear_job *j, int64_t tile, int64_t first, int64_t rows, float *acc) {
    const int64_t blocks = blocks_of(j->w), stride = bytes_of(j->w->format, BLOCK), per_block = j->rows_per_block;
    float weights[PANEL * BLOCK * TILE] __attribute__((aligned(64)));
    memset(acc, 0, (size_t)(rows * TILE) * sizeof(float));
    for (int64_t block = 0; block < blocks; block += PANEL) {
        const int64_t count = smaller(blocks - block, PANEL);
        const uint8_t *codes = j->w->codes + (tile * blocks + block) * stride;
        for (int64_t b = 0; b < count; b++) widen_block(j->w, codes + b * stride, weights + b * BLOCK * TILE);
        for (int64_t r = 0; r < rows; r += per_block) {
            const int64_t at = (first + r) * blocks + block * per_block; /* in rows of `packed` */
            panel_args a = {j->w, tile, block, count, weights, j->packed + at * BLOCK, j->sums + at * parts_of(j->w),
                            acc + r * TILE, codes + count * stride, r == 0 ? stride : 0};
            PANELS[per_block - LEAST_PANEL_ROWS](&a);
        }
    }
}

static void multiply(const void *job, int64_t task) {
    const linear_job *j = job;
    const int64_t first = task / j->chunks * j->band, rows = smaller(j->rows - first, j->band);
    const int64_t padded = (rows + j->rows_per_block - 1) / j->rows_per_block * j->rows_per_block;
    const int64_t begin = task % j->chunks * j->chunk, end = smaller(begin + j->chunk, j->tiles), outputs = j->w->num_outputs;
    float *acc = scratch(SCRATCH_TILE, padded * TILE * (int64_t)sizeof(float));
    for (int64_t tile = begin; tile < end; tile++) {
        if (j->rows > DIRECT_ROWS) multiply_panels(j, tile, first, padded, acc);
        else DIRECTS[j->w->format][rows - 1](&(direct_args){j->w, tile, j->packed, j->sums, acc});
        const int64_t count = smaller(outputs - tile * TILE, TILE);
        for (int64_t r = 0; r < rows; r++) {
            float *out = j->out + (first + r) * outputs + tile * TILE;
            memcpy(out, acc + r * TILE, (size_t)count * sizeof(float));
            for (int64_t i = 0; j->bias && i < count; i++) out[i] += j->bias[tile * TILE + i];
        }
    }
}

EXPORT void paceline_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    if (rows == 0) return;
    if (w->rounds_activations) {
        int_linear(w, x, bias, out, rows);
        return;
    }
    const int64_t most = rows > DIRECT_ROWS ? PANEL_ROWS : DIRECT_ROWS, even = (rows + most - 1) / most;
    const int64_t per_block = (rows + even - 1) / even, row_blocks = (rows + per_block - 1) / per_block;
    const int64_t tiles = (w->num_outputs + TILE - 1) / TILE, chunk = tiles / (num_threads() * CHUNKS_PER_THREAD);
    const int64_t packed = row_blocks * per_block * blocks_of(w);
    linear_job job = {w, x, bias, out, .rows = rows, .rows_per_block = per_block, .band = per_block * BLOCKS_PER_BAND,
                      .tiles = tiles, .chunk = chunk < 1 ? 1 : chunk};
    job.chunks = (tiles + job.chunk - 1) / job.chunk;
    job.packed = scratch(SCRATCH_ROWS, packed * BLOCK * (int64_t)sizeof(float));
    job.sums = scratch(SCRATCH_SUMS, packed * parts_of(w) * (int64_t)sizeof(float));
    parallel(pack_rows, &job, row_blocks);
    parallel(multiply, &job, (rows + job.band - 1) / job.band * job.chunks);
}
