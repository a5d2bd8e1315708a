/* Tokens drawn from rows of logits, and the best tokens of a draft, by the rules of speculation/verification: scores are
 * (x - max x) / T; min-p, top-k and top-p keep a prefix of the ranking by score, equal scores by column; the pick is the argmax of
 * score + Gumbel noise. The bits of the noise are those of noise.py; logarithms and exponentials may differ in the last place. The
 * first NaN is picked. */
#include "pool.h"
#include "simd.h"
#include "top.h"
#include <math.h>

enum { FEW = 16, MANY = 256, MOST = 64 }; /* candidates ranked first; from MANY on, all are ranked; the most that a draft ranks */
static const float RANGE = 10.0f;         /* a draft leaves out tokens that are e^10 times less likely than the best */

typedef struct {
    const float *x, *temperatures, *floors; /* [T, width], [T], [T]: log of min-p, -inf: off */
    const double *top_p;                    /* [T]; above 1: off */
    const int64_t *top_k;                   /* [T]; the width: off */
    const uint64_t *streams, *positions;    /* [T] each: the key of a row's noise */
    int64_t width;
    int64_t *picks;                         /* [T] */
    const int64_t *ids;                     /* [width]: the token of each column; NULL: the column */
    const int32_t *is_noisy;                /* [T] */
    int64_t count, *columns;                /* columns: [T, count] */
    float *confidences;                     /* [T, count] */
} sample_job;

INLINE uint64_t splitmix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

INLINE uint32_t avalanche(uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0xD35A2D97u;
    return x ^ x >> 15;
}

INLINE uint32_t noise_bits(const uint32_t *words, int64_t token) {
    return avalanche((avalanche((uint32_t)token) ^ words[0]) * (words[1] | 1)) ^ words[2];
}

/* -log(-log1p(-u)), u = (bits + 1/2) / 2^32 */
static float gumbel(uint32_t bits) {
    const float minus_u = (float)bits * -0x1p-32f - 0x1p-33f, least = 0x1p-24f - 1.0f;
    return -logf(-log1pf(minus_u < least ? least : minus_u));
}

/* At least gumbel(bits): -log1p(-u) >= u, and u >= 2^exponent of its first 24 bits. Far more if those are 0. */
INLINE float gumbel_limit(uint32_t bits) {
    const float value = (float)(int32_t)(bits >> 8);
    uint32_t pattern;
    memcpy(&pattern, &value, sizeof pattern);
    return (float)(25 + 127 - (int32_t)(pattern >> 23)) * 0.6931473f;
}

/* The logarithms are computed for the few tokens whose limit is above the best so far */
static int64_t pick_whole(const float *scores, int64_t width, const uint32_t *words) {
    float best = -INFINITY;
    int64_t pick = 0;
    for (int64_t first = 0; first < width; first += CHUNK) {
        const int64_t count = width - first < CHUNK ? width - first : CHUNK;
        float limits[CHUNK];
        for (int64_t i = 0; i < count; i++) limits[i] = scores[first + i] + gumbel_limit(noise_bits(words, first + i));
        if (count == CHUNK && !has_above(limits, best)) continue;
        for (int64_t i = 0; i < count; i++) {
            if (limits[i] <= best) continue;
            const float value = scores[first + i] + gumbel(noise_bits(words, first + i));
            if (value > best) best = value, pick = first + i;
        }
    }
    return pick;
}

/* The sum of exp(scores) that are not below the floor: 16 partial sums, as in `wide`, in double precision */
static double mass_above(const float *scores, int64_t width, float floor) {
    typedef double vd __attribute__((vector_size(LANES * 8)));
    const int64_t whole = width / WIDE * WIDE;
    double sums[WIDE];
    vd parts[PARTS];
    memset(parts, 0, sizeof parts);
    for (int64_t i = 0; i < whole; i += WIDE)
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
            const vf values = vf_load(scores + i + p * LANES);
            parts[p] += __builtin_convertvector((vf)((vi)vf_exp(values) & ~(vi)(values < vf_of(floor))), vd);
        }
    memcpy(sums, parts, sizeof sums);
    for (int half = WIDE / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    for (int64_t i = whole; i < width; i++) sums[0] += scores[i] < floor ? 0.0 : exp((double)scores[i]);
    return sums[0];
}

/* Number of kept tokens among the `count` best; if it is `count`, there may be more. `limit`: the mass that top-p keeps */
static int64_t num_kept(const float *scores, const int64_t *ranked, int64_t count, float floor, double limit) {
    double before = 0.0;
    for (int64_t i = 0; i < count; i++) {
        const float score = scores[ranked[i]];
        if (!(score >= floor && score > -INFINITY && before < limit)) return i;
        before += exp((double)score);
    }
    return count;
}

/* Ranks the columns that a row keeps; returns their number, 0 if none has a finite score */
static int64_t keep(const float *scores, const sample_job *j, int64_t row, int64_t **columns) {
    const int64_t width = j->width, top_k = j->top_k[row];
    const float floor = j->floors[row];
    const double top_p = j->top_p[row];
    int64_t count = top_k < width ? top_k : FEW < width ? FEW : width, kept, *ranked;
    double limit = INFINITY;
    if (top_p <= 1.0 && top_k == width) limit = top_p * mass_above(scores, width, floor);
    for (;; count = count * 8 <= MANY && count * 8 < width ? count * 8 : width) {
        ranked = scratch(SCRATCH_RANKED, count * (int64_t)sizeof *ranked);
        find_top(scores, width, count, ranked);
        kept = num_kept(scores, ranked, count, floor, limit);
        if (top_k < width || kept < count || count == width) break;
    }
    if (top_p <= 1.0 && top_k < width) { /* a share of the mass of the top-k */
        double total = 0.0;
        for (int64_t i = 0; i < kept; i++) total += exp((double)scores[ranked[i]]);
        kept = num_kept(scores, ranked, kept, floor, top_p * total);
    }
    *columns = ranked;
    return kept;
}

static int64_t pick_truncated(const float *scores, const sample_job *j, int64_t row, const uint32_t *words) {
    int64_t *ranked;
    const int64_t kept = keep(scores, j, row, &ranked);
    float best = -INFINITY;
    int64_t pick = ranked[0];
    for (int64_t i = 0; i < kept; i++) {
        const float value = scores[ranked[i]] + gumbel(noise_bits(words, ranked[i]));
        if (value > best) best = value, pick = ranked[i];
    }
    return pick;
}

/* Columns of a row without truncation whose value may be within `RANGE` of the best: others hardly count. Returns their number */
static int64_t near_best(const float *scores, const sample_job *j, const uint32_t *words, int64_t *columns, float *values) {
    float best = -INFINITY;
    int64_t found = 0, kept = 0;
    for (int64_t i = 0; i < j->width; i++) {
        const uint32_t bits = words ? noise_bits(words, j->ids ? j->ids[i] : i) : 0;
        if (scores[i] + (words ? gumbel_limit(bits) : 0.0f) <= best - RANGE) continue;
        const float value = scores[i] + (words ? gumbel(bits) : 0.0f);
        best = value > best ? value : best;
        if (value > best - RANGE) columns[found] = i, values[found++] = value;
    }
    for (int64_t i = 0; i < found; i++)
        if (values[i] > best - RANGE) columns[kept] = columns[i], values[kept++] = values[i];
    return kept;
}

/* Scores of a row; NULL if its largest logit, at `largest`, is not finite */
static float *score(const sample_job *j, int64_t row, int64_t *largest) {
    const int64_t width = j->width, whole = width / LANES * LANES;
    const float *x = j->x + row * width;
    float *scores = scratch(SCRATCH_SAMPLE, 2 * width * (int64_t)sizeof *scores);
    find_top(x, width, 1, largest);
    const float most = x[*largest], temperature = j->temperatures[row];
    if (!(most > -INFINITY && most < INFINITY)) return NULL;
    for (int64_t i = 0; i < whole; i += LANES) vf_store(scores + i, (vf_load(x + i) - most) / temperature);
    for (int64_t i = whole; i < width; i++) scores[i] = (x[i] - most) / temperature;
    return scores;
}

INLINE void set_words(const sample_job *j, int64_t row, uint32_t *words) {
    const uint64_t low = splitmix(j->streams[row] ^ j->positions[row]), high = splitmix(low);
    words[0] = (uint32_t)low, words[1] = (uint32_t)(low >> 32), words[2] = (uint32_t)high;
}

INLINE int is_truncated(const sample_job *j, int64_t row) {
    return j->top_k[row] < j->width || j->top_p[row] <= 1.0 || j->floors[row] > -INFINITY;
}

static void sample_row(const void *job, int64_t row) {
    const sample_job *j = job;
    uint32_t words[3];
    const float *scores = score(j, row, j->picks + row);
    if (!scores) return;
    set_words(j, row, words);
    j->picks[row] = is_truncated(j, row) ? pick_truncated(scores, j, row, words) : pick_whole(scores, j->width, words);
}

static void rank_row(const void *job, int64_t row) {
    const sample_job *j = job;
    uint32_t words[3];
    int64_t largest, kept = 0, *ranked = NULL, *columns = j->columns + row * j->count;
    float *confidences = j->confidences + row * j->count, *scores = score(j, row, &largest);
    for (int64_t i = 0; i < j->count; i++) columns[i] = 0, confidences[i] = -INFINITY;
    if (!scores) return;
    float *values = scores + j->width;
    set_words(j, row, words);
    if (is_truncated(j, row)) {
        kept = keep(scores, j, row, &ranked);
        for (int64_t i = 0; i < kept; i++) {
            const int64_t token = j->ids ? j->ids[ranked[i]] : ranked[i];
            values[i] = scores[ranked[i]] + (j->is_noisy[row] ? gumbel(noise_bits(words, token)) : 0.0f);
        }
    } else {
        ranked = scratch(SCRATCH_RANKED, j->width * (int64_t)sizeof *ranked);
        kept = near_best(scores, j, j->is_noisy[row] ? words : NULL, ranked, values);
    }
    int64_t best[MOST], count = j->count < kept ? j->count : kept;
    find_top(values, kept, count, best);
    double total = 0.0;
    for (int64_t i = 0; i < kept; i++) total += exp((double)values[i] - (double)values[best[0]]);
    for (int64_t i = 0; i < count; i++) {
        columns[i] = ranked[best[i]];
        confidences[i] = (float)((double)values[best[i]] - (double)values[best[0]] - log(total));
    }
}

/* NULL for `picks`: the `count` best columns of every row and their log confidences, at most MOST */
EXPORT void paceline_sample(const float *x, const float *temperatures, const float *floors, const double *top_p,
                            const int64_t *top_k, const uint64_t *streams, const uint64_t *positions, int64_t *picks,
                            const int64_t *ids, const int32_t *is_noisy, int64_t *columns, float *confidences, int64_t rows,
                            int64_t width, int64_t count) {
    sample_job job = {x, temperatures, floors, top_p, top_k, streams, positions, width, picks, ids, is_noisy, count, columns,
                      confidences};
    parallel(picks ? sample_row : rank_row, &job, rows);
}
