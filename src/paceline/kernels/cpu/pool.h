/* A pool of threads that runs the tasks 0..num_tasks-1 of one job at a time. Tasks must be independent. */
#pragma once
#include <stdint.h>

#define EXPORT __attribute__((visibility("default"))) /* other symbols are hidden: -fvisibility=hidden */

typedef void (*task_fn)(const void *job, int64_t task);

/* Returns when all tasks are done. If the pool is busy, or there is one task, the calling thread runs them. */
void parallel(task_fn fn, const void *job, int64_t num_tasks);

int num_threads(void);

/* Rows of a task and number of tasks where rows are split among threads: two rows at least, which share cache lines, and several
 * tasks per thread where there are many rows */
static inline int64_t rows_per_task(int64_t rows) {
    const int64_t even = rows / (4 * num_threads());
    return even < 2 ? 2 : even;
}
static inline int64_t num_row_tasks(int64_t rows) { return (rows + rows_per_task(rows) - 1) / rows_per_task(rows); }

/* At least `bytes` of 64-byte aligned memory of the calling thread, valid until its next call with the same `which`. */
enum {
    SCRATCH_ROWS, SCRATCH_SUMS, SCRATCH_TILE, SCRATCH_INPUT, SCRATCH_NEXT_INPUT, SCRATCH_SCORES, SCRATCH_OFFSETS, SCRATCH_BLOCKS,
    SCRATCH_PASS, SCRATCH_EXPERTS, SCRATCH_SAMPLE, SCRATCH_RANKED, SCRATCH_KEYS, SCRATCH_HEAD,
    SCRATCH_GROWTH, SCRATCH_LOGITS, SCRATCH_DECODER, SCRATCH_STATES, NUM_SCRATCH
};
void *scratch(int which, int64_t bytes);
