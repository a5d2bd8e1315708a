/* out[t, n] = sum_k x[t, k] w[n, k] (+ bias[n]) over packed weights. Rows are cut into blocks of MAX_ROWS; threads split tiles
 * of outputs only, so no sum ever crosses a thread. linear_block.h has the arithmetic. */
#include "linear_block.h"
#include "pool.h"

#define DECODE_FN(name, format)                                                                                       \
    static void name##_decode(const uint8_t *codes, int64_t block, float *to) { decode(format, codes, block, to); }
#define BLOCK_FN(name, direct, format, group, rows)                                                                   \
    static void name##_##rows(const block_args *a, decode_fn decode_block) {                                          \
        for (int lane = 0; lane < TILE; lane += VECTORS * LANES)                                                      \
            block(direct, format, group, rows, a, decode_block, lane);                                                \
    }
#define ROWS_FNS(name, direct, format, group)                                                                          \
    BLOCK_FN(name, direct, format, group, 1) BLOCK_FN(name, direct, format, group, 2)                                 \
    BLOCK_FN(name, direct, format, group, 3) BLOCK_FN(name, direct, format, group, 4)                                 \
    BLOCK_FN(name, direct, format, group, 5) BLOCK_FN(name, direct, format, group, 6)                                 \
    BLOCK_FN(name, direct, format, group, 7) BLOCK_FN(name, direct, format, group, 8)                                 \
    static const block_fn name[] = {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, name##_7, name##_8};
#define DIRECT(name, format, group) ROWS_FNS(name, 1, format, group)
#define STAGED(name, group) ROWS_FNS(name, 0, FLOAT, group)

DECODE_FN(codes4, CODES4)
DECODE_FN(codes8, CODES8)
DECODE_FN(half, HALF)
DECODE_FN(bfloat, BFLOAT)
DECODE_FN(dense, FLOAT)
DIRECT(codes4_16, CODES4, 16)
DIRECT(codes4_32, CODES4, 32)
DIRECT(codes8_16, CODES8, 16)
DIRECT(codes8_32, CODES8, 32)
DIRECT(half, HALF, 0)
DIRECT(bfloat, BFLOAT, 0)
DIRECT(dense, FLOAT, 0)
STAGED(grouped16, 16)
STAGED(grouped32, 32)
STAGED(ungrouped, 0)

/* [format][group == 32], then [rows - 1] */
static const block_fn *const DIRECTS[][2] = {
    {codes4_16, codes4_32}, {codes8_16, codes8_32}, {half, half}, {bfloat, bfloat}, {dense, dense}};
static const block_fn *const STAGES[][2] = {
    {grouped16, grouped32}, {grouped16, grouped32}, {0, ungrouped}, {0, ungrouped}, {0, ungrouped}};
static const decode_fn DECODES[] = {codes4_decode, codes8_decode, half_decode, bfloat_decode, dense_decode};

enum { STAGED_ROWS = 24 };      /* from here on, decoding a tile once for all row blocks pays for the detour through memory */
enum { CHUNKS_PER_THREAD = 4 }; /* few, for long runs of memory; several, so that a slow core holds nobody up */

/* 16^-j; the eighth code of a word is shifted down instead, for its sign bit */
static const float POWERS[8] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f};

typedef struct {
    const weight_t *w;
    const float *x, *bias;
    float *out, *packed, *sums; /* per row block: packed [K/32, rows, 32], sums [K/group, rows] */
    int64_t rows, blocks, tiles, chunk;
} linear_job;

static void pack_rows(const void *job, int64_t row_block) {
    const linear_job *j = job;
    const int64_t first = row_block * MAX_ROWS, inputs = j->w->num_inputs, group = j->w->group, parts = BLOCK / group;
    const int64_t rows = j->rows - first < MAX_ROWS ? j->rows - first : MAX_ROWS;
    float *packed = j->packed + first * j->blocks * BLOCK, *sums = j->sums + first * j->blocks * parts;
    for (int64_t b = 0; b < j->blocks; b++)
        for (int64_t r = 0; r < rows; r++, packed += BLOCK) {
            float padded[BLOCK] = {0};
            const float *from = j->x + (first + r) * inputs + b * BLOCK;
            if (inputs - b * BLOCK < BLOCK) from = memcpy(padded, from, (size_t)(inputs - b * BLOCK) * sizeof(float));
            if (j->w->format == CODES4)
                for (int i = 0; i < BLOCK; i++) packed[i] = from[i] * POWERS[i % 8];
            else
                memcpy(packed, from, sizeof padded);
            for (int64_t part = 0; j->w->offsets && part < parts; part++) {
                vf sum = {0};
                for (int64_t i = 0; i < group; i += LANES) sum += vf_load(from + part * group + i);
                sums[(b * parts + part) * rows + r] = vf_sum(sum);
            }
        }
}

static void multiply(const void *job, int64_t chunk) {
    const linear_job *j = job;
    const int64_t end = (chunk + 1) * j->chunk < j->tiles ? (chunk + 1) * j->chunk : j->tiles;
    const int is_staged = j->rows >= STAGED_ROWS;
    const block_fn *blocks = (is_staged ? STAGES : DIRECTS)[j->w->format][j->w->group == 32];
    block_args a = {.w = j->w, .bias = j->bias};
    if (is_staged) a.decoded = scratch(SCRATCH_TILE, j->blocks * BLOCK * TILE * (int64_t)sizeof(float));
    for (a.tile = chunk * j->chunk; a.tile < end; a.tile++)
        for (int64_t first = 0; first < j->rows; first += MAX_ROWS) {
            const int64_t rows = j->rows - first < MAX_ROWS ? j->rows - first : MAX_ROWS;
            a.x = j->packed + first * j->blocks * BLOCK;
            a.sums = j->sums + first * j->blocks * (BLOCK / j->w->group);
            a.out = j->out + first * j->w->num_outputs;
            a.is_fresh = first == 0;
            blocks[rows - 1](&a, DECODES[j->w->format]);
        }
}

EXPORT void paceline_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    const int64_t blocks = (w->num_inputs + BLOCK - 1) / BLOCK, tiles = (w->num_outputs + TILE - 1) / TILE;
    const int64_t even = tiles / (num_threads() * CHUNKS_PER_THREAD);
    linear_job job = {.w = w, .x = x, .bias = bias, .out = out, .rows = rows, .blocks = blocks, .tiles = tiles};
    job.packed = scratch(SCRATCH_ROWS, rows * blocks * BLOCK * (int64_t)sizeof(float));
    job.sums = scratch(SCRATCH_SUMS, rows * blocks * (BLOCK / w->group) * (int64_t)sizeof(float));
    job.chunk = even < 1 ? 1 : even;
    parallel(pack_rows, &job, (rows + MAX_ROWS - 1) / MAX_ROWS);
    parallel(multiply, &job, (tiles + job.chunk - 1) / job.chunk);
}
