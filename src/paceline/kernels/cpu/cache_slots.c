/* Copies slots of many paged caches: all are read before any is written. */
#include "pool.h"
#include <string.h>

EXPORT void paceline_copy_slots(char *const *caches, int64_t num_caches, const int64_t *sources, const int64_t *targets,
                                int64_t count, int64_t bytes) {
    char *held = scratch(SCRATCH_PASS, count * bytes);
    for (int64_t c = 0; c < num_caches; c++) {
        for (int64_t i = 0; i < count; i++) memcpy(held + i * bytes, caches[c] + sources[i] * bytes, (size_t)bytes);
        for (int64_t i = 0; i < count; i++) memcpy(caches[c] + targets[i] * bytes, held + i * bytes, (size_t)bytes);
    }
}

/* Copies rows of many planes: row from[i] of each source becomes row to[i] of its target. Strides are in bytes. */
EXPORT void paceline_copy_rows(const int64_t *sources, int64_t source_stride, const int64_t *targets, int64_t target_stride,
                               int64_t num_planes, const int64_t *from, const int64_t *to, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t p = 0; p < num_planes; p++)
            memcpy((char *)targets[p] + to[i] * target_stride, (const char *)sources[p] + from[i] * source_stride,
                   (size_t)bytes);
}
