/* out[t, n] = sum_k x[t, k] w[n, k] (+ bias[n]) over packed codes, with x rounded to int8 in blocks of 32 inputs. See int_rows.h
 * for the arithmetic. Threads split tiles of outputs and bands of rows, so that no sum crosses threads. */
#include "linear.h"
#include "int_rows.h"
#include "pool.h"

#if LANES == 16
enum { ONE_ROW_VECTORS = 2, FEW_ROWS_VECTORS = 2, ROWS_VECTORS = 2 };
#elif LANES == 8
enum { ONE_ROW_VECTORS = 4, FEW_ROWS_VECTORS = 2, ROWS_VECTORS = 2 };
#else
enum { ONE_ROW_VECTORS = 8, FEW_ROWS_VECTORS = 4, ROWS_VECTORS = 2 };
#endif

#define INT_FN(format, rows)                                                                                          \
    static void int_##format##_##rows(const int_args *a) {                                                            \
        int_rows(format, rows, rows == 1 ? ONE_ROW_VECTORS : rows <= 4 ? FEW_ROWS_VECTORS : ROWS_VECTORS, a);         \
    }
#define INT_FNS4(a, b, c, d, format) INT_FN(format, a) INT_FN(format, b) INT_FN(format, c) INT_FN(format, d)
#define INT_NAMES4(a, b, c, d, format) int_##format##_##a, int_##format##_##b, int_##format##_##c, int_##format##_##d
INT_FNS4(1, 2, 3, 4, CODES4) INT_FNS4(1, 2, 3, 4, CODES8)
#if LANES == 8
static const int_fn INT_FUNCTIONS[][INT_ROWS] = {{INT_NAMES4(1, 2, 3, 4, CODES4)}, {INT_NAMES4(1, 2, 3, 4, CODES8)}};
#else
INT_FNS4(5, 6, 7, 8, CODES4) INT_FNS4(5, 6, 7, 8, CODES8)
static const int_fn INT_FUNCTIONS[][INT_ROWS] = {{INT_NAMES4(1, 2, 3, 4, CODES4), INT_NAMES4(5, 6, 7, 8, CODES4)},
                                                 {INT_NAMES4(1, 2, 3, 4, CODES8), INT_NAMES4(5, 6, 7, 8, CODES8)}};
#endif

enum { CHUNKS_PER_THREAD = 4 }; /* few, for long runs of memory; several, so that one slow core does not delay the job */
enum { BAND = 128 };            /* rows per visit of a tile; their codes should stay in the second-level cache */
enum { ROWS_PER_TASK = 4 };     /* quantised by one task */

typedef struct {
    const weight_t *w;
    const float *x, *bias;
    float *out;
    int_rows_t rows_of_x;
    int64_t rows, tiles, chunk, chunks;
} int_job;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Round `inputs` values to code * scale, scale = largest magnitude / 127, ties to even. A NaN or infinity makes the scale one. */
static void quantize_block(const float *x, int64_t inputs, int64_t group, int8_t *codes, float *scale, float *sums,
                           int32_t *totals) {
    float padded[BLOCK];
    if (inputs < BLOCK) x = memcpy(memset(padded, 0, sizeof padded), x, (size_t)inputs * sizeof(float));
    vi most = {0};
    for (int i = 0; i < BLOCK; i += LANES) {
        const vi size = (vi)vf_load(x + i) & 0x7fffffff, above = size > most; /* as integers, magnitudes have the same order */
        most = (size & above) | (most & ~above);
    }
    int32_t lanes[LANES], largest = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    const int is_tiny = magnitude < 0x1p-100f; /* its inverse might overflow */
    *scale = is_tiny ? 0.0f : magnitude / 127.0f;
    const vf inverse = vf_of(is_tiny ? 0.0f : 127.0f / magnitude), magic = vf_of(12582912.0f); /* adding it rounds */
    int32_t whole[BLOCK];
    for (int i = 0; i < BLOCK; i += LANES) {
        const vi rounded = (vi)(vf_load(x + i) * inverse + magic) - 0x4B400000;
        memcpy(whole + i, &rounded, sizeof rounded);
    }
    for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)whole[i];
    for (int64_t first = 0; first < BLOCK; first += group, sums++, totals++) {
        int32_t total = 0;
        for (int64_t i = 0; i < group; i++) total += codes[first + i];
        *totals = total;
        *sums = *scale * (float)total;
    }
}

static void quantize_rows(const void *job, int64_t task) {
    const int_job *j = job;
    const int64_t blocks = blocks_of(j->w), inputs = j->w->num_inputs, parts = parts_of(j->w);
    for (int64_t row = task * ROWS_PER_TASK; row < smaller(j->rows, (task + 1) * ROWS_PER_TASK); row++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t at = row * blocks + b;
            quantize_block(j->x + row * inputs + b * BLOCK, smaller(inputs - b * BLOCK, BLOCK), j->w->group,
                           j->rows_of_x.codes + at * BLOCK, j->rows_of_x.scales + at, j->rows_of_x.sums + at * parts,
                           j->rows_of_x.totals + at * parts);
        }
}

static void multiply(const void *job, int64_t task) {
    const int_job *j = job;
    const int64_t first = task / j->chunks * BAND, rows = smaller(j->rows - first, BAND), outputs = j->w->num_outputs;
    const int64_t begin = task % j->chunks * j->chunk, end = smaller(begin + j->chunk, j->tiles);
    const int64_t blocks = blocks_of(j->w), groups = blocks * parts_of(j->w);
    const int64_t splits = (rows + INT_ROWS - 1) / INT_ROWS, per_block = (rows + splits - 1) / splits;
    float acc[INT_ROWS * TILE] __attribute__((aligned(64)));
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t count = smaller(outputs - tile * TILE, TILE);
        for (int64_t row = first; row < first + rows; row += per_block) {
            const int64_t some = smaller(first + rows - row, per_block);
            const int_rows_t x = {j->rows_of_x.codes + row * blocks * BLOCK, j->rows_of_x.scales + row * blocks,
                                  j->rows_of_x.sums + row * groups, j->rows_of_x.totals + row * groups};
            INT_FUNCTIONS[j->w->format][some - 1](&(int_args){j->w, tile, x, acc});
            for (int64_t r = 0; r < some; r++) {
                float *out = j->out + (row + r) * outputs + tile * TILE;
                memcpy(out, acc + r * TILE, (size_t)count * sizeof(float));
                for (int64_t i = 0; j->bias && i < count; i++) out[i] += j->bias[tile * TILE + i];
            }
        }
    }
}

void int_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    const int64_t tiles = (w->num_outputs + TILE - 1) / TILE, chunk = tiles / (num_threads() * CHUNKS_PER_THREAD);
    const int64_t blocks = blocks_of(w), groups = rows * blocks * parts_of(w);
    int_job job = {w, x, bias, out, .rows = rows, .tiles = tiles, .chunk = chunk < 1 ? 1 : chunk};
    job.chunks = (tiles + job.chunk - 1) / job.chunk;
    job.rows_of_x.codes = scratch(SCRATCH_CODES, rows * blocks * BLOCK);
    job.rows_of_x.scales = scratch(SCRATCH_ROWS, rows * blocks * (int64_t)sizeof(float));
    job.rows_of_x.sums = scratch(SCRATCH_SUMS, groups * (int64_t)sizeof(float));
    job.rows_of_x.totals = scratch(SCRATCH_TOTALS, groups * (int64_t)sizeof(int32_t));
    parallel(quantize_rows, &job, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK);
    parallel(multiply, &job, (rows + BAND - 1) / BAND * job.chunks);
}

EXPORT const char *paceline_instructions(void) { return INSTRUCTIONS; }
