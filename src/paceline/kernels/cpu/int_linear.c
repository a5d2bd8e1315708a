/* out[t, n] = sum_k x[t, k] w[n, k] (+ bias[n]) over packed codes, with x rounded to int8 in blocks of 32 inputs. See int_rows.h
 * for the arithmetic. Threads split tiles of outputs and bands of rows, so that no sum crosses threads. */
#include "linear.h"
#include "int_amx.h"
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
    int is_amx;
} int_job;

static int uses_amx; /* set once, by paceline_instructions */

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t rows_of(const int_job *j, int64_t block) {
    return smaller(j->rows - block * j->rows_per_block, j->rows_per_block);
}

static int_block block_of(const int_job *j, int64_t block) {
    const int64_t inputs = block * j->rows_per_block * blocks_of(j->w) * BLOCK, groups = inputs / j->w->group;
    const int_block *x = &j->x_codes;
    return (int_block){x->codes + inputs, x->scales + groups, x->sums + groups, x->totals + groups};
}

INLINE int32_t largest_lane(vi v) {
#if LANES == 16
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t lanes[LANES], largest = 0;
    memcpy(lanes, &v, sizeof lanes);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
#endif
}

/* 16 integers, rounded, as codes. Returns their sum. */
INLINE int32_t narrow_16(const vi *whole, int8_t *codes) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8((__m512i)*whole));
    return _mm512_reduce_add_epi32((__m512i)*whole);
#else
    int32_t values[16], total = 0;
    memcpy(values, whole, sizeof values);
    for (int i = 0; i < 16; i++) codes[i] = (int8_t)values[i], total += values[i];
    return total;
#endif
}

/* Round 32 values to code * scale, scale = largest magnitude / 127, ties to even. A NaN makes the scale NaN. `totals`: sums of
 * the codes of each half. */
INLINE float quantize_32(const float *x, int8_t *codes, int32_t totals[2]) {
    vi most = {0}, whole[BLOCK / LANES];
    for (int i = 0; i < BLOCK; i += LANES) {
        const vi size = (vi)vf_load(x + i) & 0x7fffffff, above = size > most; /* as integers, magnitudes have the same order */
        most = (size & above) | (most & ~above);
    }
    const int32_t largest = largest_lane(most);
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    const int is_tiny = magnitude < 0x1p-100f; /* its inverse might overflow */
    const vf inverse = vf_of(is_tiny ? 0.0f : 127.0f / magnitude), magic = vf_of(12582912.0f); /* adding it rounds */
    for (int i = 0; i < BLOCK / LANES; i++) whole[i] = (vi)(vf_load(x + i * LANES) * inverse + magic) - 0x4B400000;
    for (int half = 0; half < 2; half++) totals[half] = narrow_16(whole + half * (16 / LANES), codes + half * 16);
    return is_tiny ? 0.0f : magnitude / 127.0f;
}

static void quantize_row(const void *job, int64_t row) {
    const int_job *j = job;
    const int64_t blocks = blocks_of(j->w), inputs = j->w->num_inputs, parts = parts_of(j->w);
    const int64_t block = row / j->rows_per_block, r = row % j->rows_per_block, rows = rows_of(j, block);
    const int_block to = block_of(j, block);
    for (int64_t b = 0; b < blocks; b++) {
        const float *x = j->x + row * inputs + b * BLOCK;
        float padded[BLOCK] = {0};
        if (inputs - b * BLOCK < BLOCK) x = memcpy(padded, x, (size_t)(inputs - b * BLOCK) * sizeof(float));
        int8_t codes[BLOCK];
        int32_t totals[2];
        const float scale = quantize_32(x, codes, totals);
        if (j->is_amx) memcpy(to.codes + (r * blocks + b) * BLOCK, codes, BLOCK);
        else
            for (int64_t o = 0; o < BLOCK / 8; o++) memcpy(to.codes + ((b * 4 + o) * rows + r) * 8, codes + o * 8, 8);
        if (parts == 1) totals[0] += totals[1];
        for (int64_t part = 0; part < parts; part++) {
            const int64_t at = (b * parts + part) * rows + r;
            to.scales[at] = scale, to.totals[at] = totals[part], to.sums[at] = scale * (float)totals[part];
        }
    }
}

/* int8 [K/4, TILE, 4]: the codes of a tile, for AMX */
static const int8_t *int8_codes(const weight_t *w, int64_t tile) {
    const int64_t inputs = blocks_of(w) * BLOCK;
    if (w->format == CODES8) return (const int8_t *)w->codes + tile * inputs * TILE;
    int8_t *codes = scratch(SCRATCH_TILE, inputs * TILE);
#if HAS_AMX
    amx_widen(w, tile, codes);
#endif
    return codes;
}

/* codes: see `int8_codes`; NULL without AMX */
static void multiply_block(const int_args *a, int64_t rows, const int8_t *codes) {
#if HAS_AMX
    if (codes) {
        amx_rows(a, rows, codes);
        return;
    }
#endif
    (void)codes;
    INT_FUNCTIONS[a->w->format][rows - 1](a);
}

static void multiply(const void *job, int64_t task) {
    const int_job *j = job;
    const int64_t first = task / j->chunks * BLOCKS_PER_BAND, last = smaller(j->row_blocks, first + BLOCKS_PER_BAND);
    const int64_t begin = task % j->chunks * j->chunk, end = smaller(begin + j->chunk, j->tiles), outputs = j->w->num_outputs;
    float acc[AMX_ROWS * TILE] __attribute__((aligned(64)));
    const int8_t *codes = NULL;
#if HAS_AMX
    if (j->is_amx) amx_configure(j->w->group);
#endif
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t count = smaller(outputs - tile * TILE, TILE);
        if (j->is_amx) codes = int8_codes(j->w, tile);
        for (int64_t block = first; block < last; block++) {
            const int64_t rows = rows_of(j, block);
            multiply_block(&(int_args){j->w, tile, block_of(j, block), acc}, rows, codes);
            for (int64_t r = 0; r < rows; r++) {
                float *out = j->out + (block * j->rows_per_block + r) * outputs + tile * TILE;
                memcpy(out, acc + r * TILE, (size_t)count * sizeof(float));
                for (int64_t i = 0; j->bias && i < count; i++) out[i] += j->bias[tile * TILE + i];
            }
        }
    }
#if HAS_AMX
    if (j->is_amx) _tile_release();
#endif
}

static void int_linear_with(int is_amx, const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    const int64_t tiles = (w->num_outputs + TILE - 1) / TILE, threads = num_threads();
    const int is_long = rows * w->num_outputs * w->num_inputs / threads > LONG_JOB;
    const int64_t tasks = threads * (is_long || threads <= FEW_THREADS ? MANY_CHUNKS : 1), chunk = (tiles + tasks - 1) / tasks;
    const int64_t most = is_amx ? AMX_ROWS : INT_ROWS, padded = is_amx ? (rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS : rows;
    const int64_t inputs = padded * blocks_of(w) * BLOCK, groups = inputs / w->group * (int64_t)sizeof(float);
    int_job job = {w, x, bias, out, .rows = rows, .tiles = tiles, .chunk = chunk, .is_amx = is_amx};
    job.chunks = (tiles + job.chunk - 1) / job.chunk;
    job.row_blocks = (rows + most - 1) / most;
    job.rows_per_block = is_amx ? AMX_ROWS : (rows + job.row_blocks - 1) / job.row_blocks;
    job.row_blocks = (rows + job.rows_per_block - 1) / job.rows_per_block;
    job.x_codes = (int_block){scratch(SCRATCH_CODES, inputs), scratch(SCRATCH_ROWS, groups), scratch(SCRATCH_SUMS, groups),
                              scratch(SCRATCH_TOTALS, groups)};
    parallel(quantize_row, &job, rows);
    parallel(multiply, &job, (job.row_blocks + BLOCKS_PER_BAND - 1) / BLOCKS_PER_BAND * job.chunks);
}

void int_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    int_linear_with(uses_amx && rows >= AMX_ROWS, w, x, bias, out, rows);
}

#if HAS_AMX
/* Whether AMX is permitted and gives the bits of the other instructions */
static int amx_works(void) {
    enum { OUTPUTS = 40, INPUTS = 96, ROWS = 21 };
    static uint8_t codes[2 * TILE * INPUTS + 8192];
    static float scales[2 * TILE * INPUTS / 16], x[ROWS * INPUTS], out[2][ROWS * OUTPUTS];
    if (!amx_permitted()) return 0;
    for (int i = 0; i < (int)sizeof codes; i++) codes[i] = (uint8_t)(i * 37 + i / 256);
    for (int i = 0; i < 2 * TILE * INPUTS / 16; i++) scales[i] = (float)(i % 61 - 30) / 64.0f;
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = (float)(i * 29 % 251 - 125) / 32.0f;
    for (int format = CODES4; format <= CODES8; format++)
        for (int group = 16; group <= 32; group += 16) {
            const weight_t w = {OUTPUTS, INPUTS, format, group, 0, 1, codes, scales, scales};
            for (int is_amx = 0; is_amx < 2; is_amx++) int_linear_with(is_amx, &w, x, NULL, out[is_amx], ROWS);
            if (memcmp(out[0], out[1], sizeof out[0])) return 0;
        }
    return 1;
}
#endif

/* Chooses the instructions of integer products. Call it once, before threads start. */
EXPORT const char *paceline_instructions(void) {
#if HAS_AMX
    uses_amx = amx_works();
    if (uses_amx) return INSTRUCTIONS ", AMX";
#endif
    return INSTRUCTIONS;
}
