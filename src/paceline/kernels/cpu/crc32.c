/* The CRC-32 of zlib and PNG, optionally while copying: reflected, P = x^32 + x^26 + x^23 + x^22 + x^16 + x^12 + x^11 +
 * x^10 + x^8 + x^7 + x^5 + x^4 + x^2 + x + 1, inverted at start and end. */
#include "pool.h"
#include <string.h>

#if defined(__PCLMUL__) && defined(__SSE4_1__)
#include <immintrin.h>
#define FOLDS 1
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

enum { STRIDE = 64, WIDE_STRIDE = 256 };

static uint32_t advance(uint32_t crc, const uint8_t *data, int64_t size) {
    static const uint32_t nibbles[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                         0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                         0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
#if defined(__ARM_FEATURE_CRC32)
    for (; size >= 8; size -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, sizeof word);
        crc = __crc32d(crc, word);
    }
#endif
    for (int64_t i = 0; i < size; i++) {
        crc ^= data[i];
        crc = crc >> 4 ^ nibbles[crc & 15];
        crc = crc >> 4 ^ nibbles[crc & 15];
    }
    return crc;
}

#ifdef FOLDS
/* Replaces x by x * x^distance mod P: a carry-less product of each half with x^(distance +- 32) mod P. */
static inline __m128i fold(__m128i x, __m128i by, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(x, by, 0x00), high = _mm_clmulepi64_si128(x, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* `size` is a positive multiple of STRIDE. `copy` may be NULL. */
static uint32_t advance_folded(uint32_t crc, const uint8_t *data, int64_t size, uint8_t *copy) {
    const __m128i by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i x[4];
    for (int64_t at = 0; at < size; at += STRIDE)
        for (int i = 0; i < 4; i++) {
            const __m128i next = _mm_loadu_si128((const __m128i *)(data + at) + i);
            if (copy) _mm_storeu_si128((__m128i *)(copy + at) + i, next);
            x[i] = at ? fold(x[i], by_64, next) : i ? next : _mm_xor_si128(next, _mm_cvtsi32_si128((int)crc));
        }
    for (int i = 1; i < 4; i++) x[0] = fold(x[0], by_16, x[i]);
    uint8_t last[16];
    _mm_storeu_si128((__m128i *)last, x[0]);
    return advance(0, last, sizeof last);
}
#endif

#if defined(FOLDS) && defined(__VPCLMULQDQ__) && defined(__AVX512F__)
#define FOLDS_WIDE 1
static inline __m512i fold_wide(__m512i x, __m128i by, __m512i next) {
    const __m512i factors = _mm512_broadcast_i32x4(by);
    const __m512i low = _mm512_clmulepi64_epi128(x, factors, 0x00), high = _mm512_clmulepi64_epi128(x, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* xor of all three */
}

/* The same with `size` a positive multiple of WIDE_STRIDE. */
static uint32_t advance_wide(uint32_t crc, const uint8_t *data, int64_t size, uint8_t *copy) {
    const __m128i by_256 = _mm_set_epi64x(0x1322d1430, 0x11542778a), by_64 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4),
                  by_16 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m512i x[4];
    for (int64_t at = 0; at < size; at += WIDE_STRIDE)
        for (int i = 0; i < 4; i++) {
            const __m512i next = _mm512_loadu_si512(data + at + 64 * i);
            if (copy) _mm512_storeu_si512(copy + at + 64 * i, next);
            if (at)
                x[i] = fold_wide(x[i], by_256, next);
            else
                x[i] = i ? next : _mm512_xor_si512(next, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
        }
    for (int i = 1; i < 4; i++) x[0] = fold_wide(x[0], by_64, x[i]);
    __m128i lanes[4];
    _mm512_storeu_si512(lanes, x[0]);
    for (int i = 1; i < 4; i++) lanes[0] = fold(lanes[0], by_16, lanes[i]);
    uint8_t last[16];
    _mm_storeu_si128((__m128i *)last, lanes[0]);
    return advance(0, last, sizeof last);
}
#endif

/* `copy` may be NULL; it does not overlap `data`. */
EXPORT void paceline_crc32(const uint8_t *data, int64_t size, uint8_t *copy, uint32_t *out) {
    uint32_t crc = ~0u;
    int64_t whole = 0;
#ifdef FOLDS_WIDE
    whole = size / WIDE_STRIDE * WIDE_STRIDE;
    if (whole) crc = advance_wide(crc, data, whole, copy);
#endif
#ifdef FOLDS
    const int64_t rest = (size - whole) / STRIDE * STRIDE;
    if (rest) crc = advance_folded(crc, data + whole, rest, copy ? copy + whole : copy);
    whole += rest;
#endif
    if (copy) memcpy(copy + whole, data + whole, (size_t)(size - whole));
    *out = ~advance(crc, data + whole, size - whole);
}
