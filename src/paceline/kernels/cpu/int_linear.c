/* out[t, n] = sum_k x[t, k] w[n, k] (+ bias[n]) over packed codes, with x rounded to int8 in blocks of 32 inputs. See int_rows.h
 * for the arithmetic. Threads split tiles of outputs and bands of rows, so that no sum crosses threads. */
#include "linear.h"
#include "int_rows.h"
#include "pool.h"

/* Vectors of outputs per pass over the inputs: their sums for all rows should fit in registers. */
#if LANES == 16
#define VECTORS_FOR(rows) 2
#elif LANES == 8
#define VECTORS_FOR(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#else
#define VECTORS_FOR(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : (rows) <= 5 ? 2 : 1)
#endif

#define INT_FN(format, rows)                                                                                          \
    static void int_##format##_##rows(const int_args *a) {                                                            \
        if (a->w->group == BLOCK) int_rows(format, 4, rows, VECTORS_FOR(rows), a);                                    \
        else int_rows(format, 2, rows, VECTORS_FOR(rows), a);                                                         \
    }
#define INT_FNS4(a, b, c, d, format) INT_FN(format, a) INT_FN(format, b) INT_FN(format, c) INT_FN(format, d)
#define INT_NAMES4(a, b, c, d, format) int_##format##_##a, int_##format##_##b, int_##format##_##c, int_##format##_##d
INT_FNS4(1, 2, 3, 4, CODES4) INT_FNS4(5, 6, 7, 8, CODES4) INT_FNS4(1, 2, 3, 4, CODES8) INT_FNS4(5, 6, 7, 8, CODES8)
static const int_fn INT_FUNCTIONS[][INT_ROWS] = {{INT_NAMES4(1, 2, 3, 4, CODES4), INT_NAMES4(5, 6, 7, 8, CODES4)},
                                                 {INT_NAMES4(1, 2, 3, 4, CODES8), INT_NAMES4(5, 6, 7, 8, CODES8)}};

/* Tasks per thread: several, so that one slow core does not delay the job. Claiming a task takes longer with more threads, so
 * that a small job of many threads has one task each. */
enum { MANY_CHUNKS = 4, LONG_JOB = 1 << 21, FEW_THREADS = 4 }; /* LONG_JOB: products per thread */
enum { BLOCKS_PER_BAND = 16 };  /* blocks of rows per visit of a tile; their codes should stay in the second-level cache */

typedef struct {
    const weight_t *w;
    const float *x, *bias;
    float *out;
    int_block x_codes; /* of all blocks of rows; the blocks are contiguous */
    int64_t rows, rows_per_block, row_blocks, tiles, chunk, chunks;
} int_job;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t rows_of(const int_job *j, int64_t block) {
    return smaller(j->rows - block * j->rows_per_block, j->rows_per_block);
}

static int_block block_of(const int_job *j, int64_t block) {
    const int64_t inputs = block * j->rows_per_block * blocks_of(j->w) * BLOCK, groups = inputs / j->w->group;
    const int_block *x = &j->x_codes;
    return (int_block){x->codes + inputs, x->scales + groups, x->sums + groups, x->totals + groups};
}

/* Round 32 values to code * scale, scale = largest magnitude / 127, ties to even. A NaN makes the scale NaN. */
INLINE float quantize_32(const float *x, int8_t *codes) {
    vi most = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        const vi size = (vi)vf_load(x + i) & 0x7fffffff, above = size > most; /* as integers, magnitudes have the same order */
        most = (size & above) | (most & ~above);
    }
    int32_t lanes[LANES], largest = 0, whole[BLOCK];
    memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    const int is_tiny = magnitude < 0x1p-100f; /* its inverse might overflow */
    const vf inverse = vf_of(is_tiny ? 0.0f : 127.0f / magnitude), magic = vf_of(12582912.0f); /* adding it rounds */
    for (int i = 0; i < BLOCK; i += LANES) {
        const vi rounded = (vi)(vf_load(x + i) * inverse + magic) - 0x4B400000;
        memcpy(whole + i, &rounded, sizeof rounded);
    }
    for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)whole[i];
    return is_tiny ? 0.0f : magnitude / 127.0f;
}

static void quantize_row(const void *job, int64_t row) {
    const int_job *j = job;
    const int64_t blocks = blocks_of(j->w), inputs = j->w->num_inputs, group = j->w->group;
    const int64_t block = row / j->rows_per_block, r = row % j->rows_per_block, rows = rows_of(j, block);
    const int_block to = block_of(j, block);
    for (int64_t b = 0; b < blocks; b++) {
        const float *x = j->x + row * inputs + b * BLOCK;
        float padded[BLOCK] = {0};
        if (inputs - b * BLOCK < BLOCK) x = memcpy(padded, x, (size_t)(inputs - b * BLOCK) * sizeof(float));
        int8_t codes[BLOCK];
        const float scale = quantize_32(x, codes);
        for (int64_t o = 0; o < BLOCK / 8; o++) memcpy(to.codes + ((b * 4 + o) * rows + r) * 8, codes + o * 8, 8);
        for (int64_t first = 0; first < BLOCK; first += group) {
            const int64_t at = (b * BLOCK + first) / group * rows + r;
            int32_t total = 0;
            for (int64_t i = 0; i < group; i++) total += codes[first + i];
            to.scales[at] = scale, to.totals[at] = total, to.sums[at] = scale * (float)total;
        }
    }
}

static void multiply(const void *job, int64_t task) {
    const int_job *j = job;
    const int64_t first = task / j->chunks * BLOCKS_PER_BAND, last = smaller(j->row_blocks, first + BLOCKS_PER_BAND);
    const int64_t begin = task % j->chunks * j->chunk, end = smaller(begin + j->chunk, j->tiles), outputs = j->w->num_outputs;
    float acc[INT_ROWS * TILE] __attribute__((aligned(64)));
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t count = smaller(outputs - tile * TILE, TILE);
        for (int64_t block = first; block < last; block++) {
            const int64_t rows = rows_of(j, block);
            INT_FUNCTIONS[j->w->format][rows - 1](&(int_args){j->w, tile, block_of(j, block), acc});
            for (int64_t r = 0; r < rows; r++) {
                float *out = j->out + (block * j->rows_per_block + r) * outputs + tile * TILE;
                memcpy(out, acc + r * TILE, (size_t)count * sizeof(float));
                for (int64_t i = 0; j->bias && i < count; i++) out[i] += j->bias[tile * TILE + i];
            }
        }
    }
}

void int_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    const int64_t tiles = (w->num_outputs + TILE - 1) / TILE, threads = num_threads();
    const int is_long = rows * w->num_outputs * w->num_inputs / threads > LONG_JOB;
    const int64_t tasks = threads * (is_long || threads <= FEW_THREADS ? MANY_CHUNKS : 1), chunk = (tiles + tasks - 1) / tasks;
    const int64_t inputs = rows * blocks_of(w) * BLOCK, groups = inputs / w->group * (int64_t)sizeof(float);
    int_job job = {w, x, bias, out, .rows = rows, .tiles = tiles, .chunk = chunk};
    job.chunks = (tiles + job.chunk - 1) / job.chunk;
    job.row_blocks = (rows + INT_ROWS - 1) / INT_ROWS;
    job.rows_per_block = (rows + job.row_blocks - 1) / job.row_blocks;
    job.row_blocks = (rows + job.rows_per_block - 1) / job.rows_per_block;
    job.x_codes = (int_block){scratch(SCRATCH_CODES, inputs), scratch(SCRATCH_ROWS, groups), scratch(SCRATCH_SUMS, groups),
                              scratch(SCRATCH_TOTALS, groups)};
    parallel(quantize_row, &job, rows);
    parallel(multiply, &job, (job.row_blocks + BLOCKS_PER_BAND - 1) / BLOCKS_PER_BAND * job.chunks);
}

EXPORT const char *paceline_instructions(void) { return INSTRUCTIONS; }
