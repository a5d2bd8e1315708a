/* Integer dot products of weight codes and int8 activations for LANES outputs at once: one lane per output, four inputs per
 * step. Sums of one group are exact, so that their order and the instructions do not matter. */
#pragma once
#include "weight.h"

typedef int8_t vb __attribute__((vector_size(LANES * 4), may_alias));   /* [LANES, 4] codes */
typedef uint8_t vub __attribute__((vector_size(LANES * 4), may_alias));

INLINE vb vb_load(const uint8_t *p) { vb v; memcpy(&v, p, sizeof v); return v; }

/* INSTRUCTIONS: name of the chosen instructions, for reports.
 * SHIFTED_CODES8: 8-bit codes are stored as code + 128 in `codes_of` and corrected by the first value of the sum.
 * dot4(format, sum, codes, x, quad): sum + codes . the four inputs x[4 * quad..], per lane. joined(format, a, b): a + b.
 * total(format, sum): the sum as int32 lanes. */
#if defined(PORTABLE)
#define INSTRUCTIONS "portable"
#define SHIFTED_CODES8 0
/* not inlined: the compiler would take minutes */
static __attribute__((noinline)) vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    (void)format;
    for (int lane = 0; lane < LANES; lane++)
        for (int k = 0; k < 4; k++) sum[lane] += codes[4 * lane + k] * x[4 * quad + k];
    return sum;
}
INLINE vi total(const int format, vi sum) { (void)format; return sum; }
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define INSTRUCTIONS "I8MM"
#define HAS_PAIRS 1
#else
#define INSTRUCTIONS "SDOT"
#endif
#define SHIFTED_CODES8 0
INLINE vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    (void)format;
    const int8x8_t inputs = vld1_s8(x);
    return (vi)(quad ? vdotq_lane_s32((int32x4_t)sum, (int8x16_t)codes, inputs, 1)
                     : vdotq_lane_s32((int32x4_t)sum, (int8x16_t)codes, inputs, 0));
}
#elif defined(__aarch64__)
#define INSTRUCTIONS "NEON"
#define SHIFTED_CODES8 0
INLINE vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    (void)format;
    int32_t word;
    memcpy(&word, x + 4 * quad, 4);
    const int8x16_t w = (int8x16_t)codes, inputs = vreinterpretq_s8_s32(vdupq_n_s32(word));
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(inputs)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(w, inputs));
    return sum + (vi)vpaddq_s32(low, high);
}
#else
INLINE int32_t word_at(const int8_t *x) { int32_t word; memcpy(&word, x, 4); return word; }
#if LANES == 16 && defined(__AVX512VNNI__)
#define INSTRUCTIONS "AVX-512 VNNI"
#define SHIFTED_CODES8 1
INLINE vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    if (format == CODES4) { /* Compilers keep inputs in registers, which 3 to 6 rows need for sums; this reads them twice */
        typedef int32_t word __attribute__((may_alias, aligned(1)));
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const word *)(x + 4 * quad)));
        return sum;
    }
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(word_at(x + 4 * quad)));
}
INLINE vi total(const int format, vi sum) { (void)format; return sum; }
#elif LANES == 8 && defined(__AVXVNNI__)
#define INSTRUCTIONS "AVX-VNNI"
#define SHIFTED_CODES8 1
INLINE vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    (void)format;
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(word_at(x + 4 * quad)));
}
INLINE vi total(const int format, vi sum) { (void)format; return sum; }
#elif LANES == 16
#define INSTRUCTIONS "AVX-512"
#define SHIFTED_CODES8 0
#define HAS_JOINED
/* 16-bit sums of pairs cannot overflow: 4-bit codes, 16 pairs of at most 2 * 15 * 127; 8-bit codes, one of 2 * 128 * 127 */
INLINE vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    const __m512i w = (__m512i)codes, inputs = _mm512_set1_epi32(word_at(x + 4 * quad));
    if (format == CODES4) return (vi)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16(w, inputs));
    const __m512i signed_inputs = _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(w), _mm512_setzero_si512(), inputs);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_inputs);
    return sum + (vi)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
INLINE vi joined(const int format, vi a, vi b) {
    if (format == CODES4) return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b);
    return a + b;
}
INLINE vi total(const int format, vi sum) {
    return format == CODES4 ? (vi)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1)) : sum;
}
#else
#define INSTRUCTIONS "AVX2"
#define SHIFTED_CODES8 0
#define HAS_JOINED
/* 16-bit sums of pairs cannot overflow: 4-bit codes, 16 pairs of at most 2 * 15 * 127; 8-bit codes, one of 2 * 128 * 127 */
INLINE vi dot4(const int format, vi sum, vb codes, const int8_t *x, const int quad) {
    const __m256i w = (__m256i)codes, inputs = _mm256_set1_epi32(word_at(x + 4 * quad));
    if (format == CODES4) return (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(w, inputs));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(inputs, w));
    return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE vi joined(const int format, vi a, vi b) {
    if (format == CODES4) return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b);
    return a + b;
}
INLINE vi total(const int format, vi sum) {
    return format == CODES4 ? (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) : sum;
}
#endif
#endif

/* HAS_PAIRS: one instruction multiplies two rows of eight inputs with two outputs. While a group is summed, `low` has the outputs
 * 0 and 1 of both rows and `high` the outputs 2 and 3; `unpair` turns them into the first and the second row. */
#ifdef HAS_PAIRS
INLINE void pair_codes(const vb quads[2], vb pairs[2]) {
    const int32x4_t a = (int32x4_t)quads[0], b = (int32x4_t)quads[1];
    pairs[0] = (vb)vzip1q_s32(a, b);
    pairs[1] = (vb)vzip2q_s32(a, b);
}
INLINE void dot_pair(vi *low, vi *high, const vb pairs[2], const int8_t *x, const int8_t *next_x) {
    const int8x16_t inputs = vcombine_s8(vld1_s8(x), vld1_s8(next_x));
    *low = (vi)vmmlaq_s32((int32x4_t)*low, inputs, (int8x16_t)pairs[0]);
    *high = (vi)vmmlaq_s32((int32x4_t)*high, inputs, (int8x16_t)pairs[1]);
}
INLINE void unpair(vi *low, vi *high) {
    const int64x2_t a = (int64x2_t)*low, b = (int64x2_t)*high;
    *low = (vi)vzip1q_s64(a, b);
    *high = (vi)vzip2q_s64(a, b);
}
#else
#define HAS_PAIRS 0
INLINE void pair_codes(const vb quads[2], vb pairs[2]) { (void)quads, (void)pairs; }
INLINE void dot_pair(vi *low, vi *high, const vb pairs[2], const int8_t *x, const int8_t *next_x) {
    (void)low, (void)high, (void)pairs, (void)x, (void)next_x;
}
INLINE void unpair(vi *low, vi *high) { (void)low, (void)high; }
#endif

#ifndef HAS_JOINED
INLINE vi joined(const int format, vi a, vi b) { (void)format; return a + b; }
#endif

/* Codes of inputs 8 * octet.. +3 and +4.. +7 of outputs lane.. of a tile */
INLINE void codes_of(const int format, const uint8_t *codes, int64_t octet, const int lane, vb quads[2]) {
    if (format == CODES4) {
        const vub pairs = (vub)vb_load(codes + (octet * TILE + lane) * 4);
        quads[0] = (vb)(pairs & 15);
        quads[1] = (vb)(pairs >> 4);
    } else {
        for (int quad = 0; quad < 2; quad++) {
            quads[quad] = vb_load(codes + ((octet * 2 + quad) * TILE + lane) * 4);
            if (SHIFTED_CODES8) quads[quad] ^= (int8_t)-128;
        }
    }
}

/* `first_sum`: the value from which `dot4` counts; `first` is that of shifted codes. `float_of`: the sum as float. */
#if defined(__aarch64__) && !defined(PORTABLE)
/* Conversions are slow here. A sum is below 2^22, so that 1.5 * 2^23 + sum is the float whose bits count sums in steps of 1. */
INLINE vi first_sum(const int format, const int32_t *first) {
    (void)format, (void)first;
    return (vi){0} + 0x4B400000;
}
INLINE vf float_of(const int format, vi sum) { (void)format; return (vf)sum - 12582912.0f; }
#else
INLINE vi first_sum(const int format, const int32_t *first) {
    return (vi){0} + (format == CODES8 && SHIFTED_CODES8 ? *first : 0);
}
INLINE vf float_of(const int format, vi sum) { return vf_of_ints(total(format, sum)); }
#endif
