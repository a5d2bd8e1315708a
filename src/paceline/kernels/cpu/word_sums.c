/* Sum of words, each times an odd factor by its place, modulo 2^64. */
#include "pool.h"

EXPORT void paceline_word_sum(const uint64_t *words, int64_t count, uint64_t *out) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += words[i] * (uint64_t)(2 * i + 1);
    *out = sum;
}
