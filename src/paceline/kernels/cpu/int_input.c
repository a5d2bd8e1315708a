/* Rounds activations to int8 in blocks of 32 inputs: x = code * scale. */
#include "int_product.h"
#include "pool.h"

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

/* Codes of 32 integers, and the sums of each of their `parts` parts, 1 or 2 */
INLINE void narrow_32(const vi *whole, int8_t *codes, int64_t parts, int32_t totals[2]) {
#if LANES == 16
    const __m512i low = (__m512i)whole[0], high = (__m512i)whole[1];
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(low));
    _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtepi32_epi8(high));
    totals[0] = _mm512_reduce_add_epi32(parts == 1 ? _mm512_add_epi32(low, high) : low);
    if (parts == 2) totals[1] = _mm512_reduce_add_epi32(high);
#else
    int32_t values[BLOCK];
    memcpy(values, whole, sizeof values);
    totals[0] = totals[1] = 0;
    for (int i = 0; i < BLOCK; i++) codes[i] = (int8_t)values[i], totals[i / 16] += values[i];
    if (parts == 1) totals[0] += totals[1];
#endif
}

/* Round 32 values to code * scale, scale = largest magnitude / 127, ties to even. A NaN makes the scale NaN. `totals`: sums of
 * the codes of each part. */
INLINE float quantize_32(const float *x, int8_t *codes, int64_t parts, int32_t totals[2]) {
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
    narrow_32(whole, codes, parts, totals);
    return is_tiny ? 0.0f : magnitude / 127.0f;
}

int_input int_input_of(const weight_t *w, int64_t rows, int which, int is_amx) {
    const int64_t most = is_amx ? AMX_ROWS : INT_ROWS, even = (rows + most - 1) / most;
    const int64_t per_block = is_amx ? AMX_ROWS : (rows + even - 1) / even, row_blocks = (rows + per_block - 1) / per_block;
    const int64_t padded = is_amx ? row_blocks * AMX_ROWS : rows, blocks = padded * blocks_of(w);
    const int64_t groups = (blocks * parts_of(w) + 15) / 16 * 16, codes = (blocks * BLOCK + 63) / 64 * 64;
    int8_t *memory = scratch(which, codes + 3 * groups * (int64_t)sizeof(float));
    float *scales = (float *)(memory + codes);
    return (int_input){{memory, scales, scales + groups, (int32_t *)(scales + 2 * groups)},
                       rows,
                       per_block,
                       row_blocks,
                       w->num_inputs,
                       blocks_of(w),
                       parts_of(w),
                       is_amx,
                       w->offsets != NULL,
                       w->format == CODES8 && SHIFTED_CODES8};
}

void round_blocks(const int_row *row, int64_t first, int64_t count, const float *x) {
    const int_input *in = row->in;
    const int_block *to = &row->to;
    const int64_t rows = row->rows, r = row->r, parts = in->parts;
    int8_t *codes = to->codes + (in->is_amx ? r * in->blocks + first : first * rows + r) * BLOCK;
    const int64_t step = (in->is_amx ? 1 : rows) * BLOCK;
    for (int64_t i = 0; i < count; i++, codes += step) {
        int32_t totals[2];
        const float scale = quantize_32(x + i * BLOCK, codes, parts, totals);
        for (int64_t part = 0; part < parts; part++) {
            const int64_t at = ((first + i) * parts + part) * rows + r;
            to->scales[at] = scale;
            if (in->has_sums) to->sums[at] = scale * (float)totals[part];
            if (in->has_firsts) to->firsts[at] = -128 * totals[part];
        }
    }
}

void round_row(const int_input *in, int64_t row, const float *x) {
    const int64_t whole = in->inputs / BLOCK, rest = in->inputs % BLOCK;
    const int_row to = row_of(in, row);
    round_blocks(&to, 0, whole, x);
    if (rest) {
        float padded[BLOCK] = {0};
        memcpy(padded, x + whole * BLOCK, (size_t)rest * sizeof(float));
        round_blocks(&to, whole, 1, padded);
    }
}

typedef struct {
    const int_input *in;
    const float *x;
    int64_t rows_per_task;
} round_job;

static void round_some(const void *job, int64_t task) {
    const round_job *j = job;
    for (int64_t i = 0, row = task * j->rows_per_task; i < j->rows_per_task && row < j->in->rows; i++, row++)
        round_row(j->in, row, j->x + row * j->in->inputs);
}

void round_rows(const int_input *in, const float *x) {
    const round_job job = {in, x, rows_per_task(in->rows)};
    parallel(round_some, &job, num_row_tasks(in->rows));
}
