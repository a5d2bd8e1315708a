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
