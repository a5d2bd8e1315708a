/* A fixed set of threads that share the tasks 0..num_tasks-1 of one job at a time. Tasks must be independent. */
#pragma once
#include <stdint.h>

#define EXPORT __attribute__((visibility("default"))) /* the rest is hidden: -fvisibility=hidden */

typedef void (*task_fn)(const void *job, int64_t task);

/* Returns when every task is done. A job that finds the pool busy, or has one task, runs on the calling thread. */
void parallel(task_fn fn, const void *job, int64_t num_tasks);

int num_threads(void);

/* At least `bytes` of 64-byte aligned memory that belongs to the calling thread until it asks for `which` again. */
enum { SCRATCH_ROWS, SCRATCH_SUMS, SCRATCH_TILE, SCRATCH_SCORES, SCRATCH_OFFSETS, SCRATCH_BLOCKS, NUM_SCRATCH };
void *scratch(int which, int64_t bytes);
