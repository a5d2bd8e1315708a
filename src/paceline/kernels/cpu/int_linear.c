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
enum { BLOCKS_PER_BAND = 16 }; /* blocks of rows per visit of a unit; their codes should stay in the second-level cache */
/* Rows from which on AMX is used. It widens 4-bit codes for each product and applies scales to sums in memory. By the times of a
 * server's host (benchmarks/cpu/README.md), blocks of 8 rows with vector instructions are faster for 16 rows with one thread and as fast
 * with 8 or 16; for 32 rows AMX is faster with 8 and 16 threads. */
enum { AMX_LEAST_ROWS = 32 };

typedef struct {
    const weight_t *w;
    const int_input *in;
    const int_outputs *to;
    int64_t chunk, chunks; /* units of a task; tasks of a band of rows */
} int_job;

static int uses_amx; /* set once, by paceline_instructions */

int wants_amx(int64_t rows) { return uses_amx && rows >= AMX_LEAST_ROWS; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* codes[i]: int8 [K/4, TILE, 4] of tile i of a unit, for AMX */
static void find_codes(const int_job *j, int64_t unit, const int8_t *codes[MAX_UNIT_TILES]) {
    const int64_t bytes = j->in->blocks * BLOCK * TILE, tiles = j->to->tiles;
    int8_t *widened = j->w->format == CODES8 ? NULL : scratch(SCRATCH_TILE, bytes * tiles);
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t tile = unit * j->to->step + i * j->to->stride;
        codes[i] = widened ? widened + i * bytes : (const int8_t *)j->w->codes + tile * bytes;
#if HAS_AMX
        if (widened) amx_widen(j->w, tile, widened + i * bytes);
#endif
    }
}

/* codes: see `find_codes`; NULL without AMX */
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
    const int_input *in = j->in;
    const int_outputs *to = j->to;
    const int64_t first = task / j->chunks * BLOCKS_PER_BAND, last = smaller(in->row_blocks, first + BLOCKS_PER_BAND);
    const int64_t begin = task % j->chunks * j->chunk, end = smaller(begin + j->chunk, to->units);
    float acc[MAX_UNIT_TILES * AMX_ROWS * TILE] __attribute__((aligned(64)));
    const int8_t *codes[MAX_UNIT_TILES] = {NULL};
#if HAS_AMX
    if (in->is_amx) amx_configure(j->w->group);
#endif
    for (int64_t unit = begin; unit < end; unit++) {
        if (in->is_amx) find_codes(j, unit, codes);
        for (int64_t block = first; block < last; block++) {
            const int64_t rows = num_rows_of(in, block);
            for (int64_t i = 0; i < to->tiles; i++) {
                const int64_t tile = unit * to->step + i * to->stride;
                multiply_block(&(int_args){j->w, tile, rows_of_block(in, block), acc + i * rows * TILE}, rows, codes[i]);
            }
            to->finish(to->data, unit, block, block * in->rows_per_block, rows, acc);
        }
    }
#if HAS_AMX
    if (in->is_amx) _tile_release();
#endif
}

void int_product(const weight_t *w, const int_input *in, const int_outputs *outputs) {
    const int64_t threads = num_threads(), units = outputs->units;
    const int is_long = in->rows * w->num_outputs * w->num_inputs / threads > LONG_JOB;
    const int64_t tasks = threads * (is_long || threads <= FEW_THREADS ? MANY_CHUNKS : 1), chunk = (units + tasks - 1) / tasks;
    const int_job job = {w, in, outputs, chunk, (units + chunk - 1) / chunk};
    parallel(multiply, &job, (in->row_blocks + BLOCKS_PER_BAND - 1) / BLOCKS_PER_BAND * job.chunks);
}

typedef struct {
    const float *bias;
    float *out;
    int64_t outputs;
} store_data;

static void store(const void *data, int64_t tile, int64_t block, int64_t first, int64_t rows, const float *acc) {
    (void)block;
    const store_data *d = data;
    const int64_t count = smaller(d->outputs - tile * TILE, TILE);
    for (int64_t r = 0; r < rows; r++) {
        float *out = d->out + (first + r) * d->outputs + tile * TILE;
        if (count == TILE) memcpy(out, acc + r * TILE, TILE * sizeof(float)); /* constant length: inlined */
        else memcpy(out, acc + r * TILE, (size_t)count * sizeof(float));
        for (int64_t i = 0; d->bias && i < count; i++) out[i] += d->bias[tile * TILE + i];
    }
}

void int_store(const weight_t *w, const int_input *in, const float *bias, float *out) {
    const store_data data = {bias, out, w->num_outputs};
    int_product(w, in, &(int_outputs){(w->num_outputs + TILE - 1) / TILE, 1, 1, 0, store, &data});
}

static void int_linear_with(int is_amx, const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    const int_input in = int_input_of(w, rows, SCRATCH_INPUT, is_amx);
    round_rows(&in, x);
    int_store(w, &in, bias, out);
}

void int_linear(const weight_t *w, const float *x, const float *bias, float *out, int64_t rows) {
    int_linear_with(wants_amx(rows), w, x, bias, out, rows);
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
