/* One vector width per target, chosen at compile time. Fused multiply-adds are explicit and contraction is off
 * (-ffp-contract=off), so that all instantiations of a kernel round in the same places. Batch invariance depends on this. */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(PORTABLE) /* plain C, for tests: the same bits as every instruction set */
#include <math.h>
#define LANES 4
#elif defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define LANES 8
#elif defined(__aarch64__)
#include <arm_neon.h>
#define LANES 4
#else
#error "needs AVX-512, AVX2 with FMA and F16C, or AArch64"
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(LANES * 4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), may_alias));

INLINE vf vf_load(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vf_store(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu vu_load(const uint32_t *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf vf_of(float x) { return x - (vf){0}; }
INLINE vf vf_of_ints(vi v) { return __builtin_convertvector(v, vf); }

#if defined(PORTABLE)
#define EACH_LANE(expression) ((vf){expression(0), expression(1), expression(2), expression(3)})
INLINE vf vf_fma(vf a, vf b, vf c) {
#define FMA(i) fmaf(a[i], b[i], c[i])
    return EACH_LANE(FMA);
}
INLINE vf vf_max(vf a, vf b) {
#define MAX(i) (a[i] > b[i] ? a[i] : b[i])
    return EACH_LANE(MAX);
}
INLINE vf vf_min(vf a, vf b) {
#define MIN(i) (a[i] < b[i] ? a[i] : b[i])
    return EACH_LANE(MIN);
}
INLINE float wide_f16(uint16_t bits) { /* magnitude * 2^-112 as float, then scaled: also right for subnormal numbers */
    uint32_t magnitude = (uint32_t)(bits & 0x7fff) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, 4);
    value = magnitude >= 0x0f800000 ? value * INFINITY : value * 0x1p112f;
    memcpy(&magnitude, &value, 4);
    magnitude |= sign;
    memcpy(&value, &magnitude, 4);
    return value;
}
INLINE float wide_bf16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}
INLINE vf vf_load_f16(const uint16_t *p) { return (vf){wide_f16(p[0]), wide_f16(p[1]), wide_f16(p[2]), wide_f16(p[3])}; }
INLINE vf vf_load_bf16(const uint16_t *p) { return (vf){wide_bf16(p[0]), wide_bf16(p[1]), wide_bf16(p[2]), wide_bf16(p[3])}; }
#define INTERLEAVE_LOW 0, 4, 1, 5
#define INTERLEAVE_HIGH 2, 6, 3, 7
INLINE void cpu_relax(void) {}
#elif LANES == 16
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_load_bf16(const uint16_t *p) {
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
#define INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
INLINE void cpu_relax(void) { _mm_pause(); }
#elif LANES == 8
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_load_bf16(const uint16_t *p) {
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
#define INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
INLINE void cpu_relax(void) { _mm_pause(); }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
INLINE vf vf_max(vf a, vf b) { return (vf)vmaxq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf vf_min(vf a, vf b) { return (vf)vminq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE vf vf_load_f16(const uint16_t *p) { return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE vf vf_load_bf16(const uint16_t *p) { return (vf)vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16); }
#define INTERLEAVE_LOW 0, 4, 1, 5
#define INTERLEAVE_HIGH 2, 6, 3, 7
INLINE void cpu_relax(void) { __asm__ __volatile__("yield"); }
#endif

/* c[2i] = a[i] + a[i + LANES/2], c[2i+1] = b[i] + b[i + LANES/2] */
INLINE vf vf_fold(vf a, vf b) {
    return __builtin_shufflevector(a, b, INTERLEAVE_LOW) + __builtin_shufflevector(a, b, INTERLEAVE_HIGH);
}

/* lane t of the result is the sum of v[t]; the same tree for every t. Overwrites v. */
INLINE vf vf_sums(vf v[LANES]) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int t = 0; t < half; t++) v[t] = vf_fold(v[t], v[t + half]);
    return v[0];
}

INLINE float vf_sum(vf v) {
    float t[LANES];
    vf_store(t, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
}

/* 16 partial sums on every target, so that sums over a row have the same bits on all of them */
enum { WIDE = 16, PARTS = WIDE / LANES };
typedef struct { vf part[PARTS]; } wide;

/* The first steps of the tree that adds 16 lanes: i and i + 8, then i and i + 4, until a vector is left */
INLINE vf wide_fold(wide w) {
#pragma GCC unroll 2
    for (int half = PARTS / 2; half; half /= 2)
#pragma GCC unroll 2
        for (int t = 0; t < half; t++) w.part[t] += w.part[t + half];
    return w.part[0];
}

/* e^x within 2 ulp for x in [-87, 88]; about 1e-38 below. NaN gives NaN. */
INLINE vf vf_exp(vf x) {
    x = vf_max(vf_of(-87.3f), vf_min(vf_of(88.3f), x));
    const vf magic = vf_of(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf shifted = vf_fma(x, vf_of(1.44269504f), magic);
    vf n = shifted - magic;
    vf r = vf_fma(n, vf_of(-0.693359375f), x);
    r = vf_fma(n, vf_of(2.12194440e-4f), r);
    vf p = vf_of(1.9875691500e-4f);
    p = vf_fma(p, r, vf_of(1.3981999507e-3f));
    p = vf_fma(p, r, vf_of(8.3334519073e-3f));
    p = vf_fma(p, r, vf_of(4.1665795894e-2f));
    p = vf_fma(p, r, vf_of(1.6666665459e-1f));
    p = vf_fma(p, r, vf_of(5.0000001201e-1f));
    p = vf_fma(p * r, r, r) + 1.0f;
    vi exponent = ((vi)shifted - 0x4B400000) << 23;
    return (vf)((vi)p + exponent);
}

/* A polynomial near 0, where 1 - 2 / (e^2x + 1) would lose digits */
INLINE vf vf_tanh(vf x) {
    const vf square = x * x;
    vf p = vf_of(-5.70498872745e-3f);
    p = vf_fma(p, square, vf_of(2.06390887954e-2f));
    p = vf_fma(p, square, vf_of(-5.37397155531e-2f));
    p = vf_fma(p, square, vf_of(1.33314422036e-1f));
    p = vf_fma(p, square, vf_of(-3.33332819422e-1f));
    p = vf_fma(p * square, x, x);
    const vf far = 1.0f - 2.0f / (vf_exp(x + x) + 1.0f);
    const vi is_near = square < 0.390625f; /* 0.625^2 */
    return (vf)(((vi)p & is_near) | ((vi)far & ~is_near));
}
