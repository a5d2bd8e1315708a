/* Workers spin for a while after their last task, then sleep. One 64-bit word holds the state of a job, generation:20 |
 * num_tasks:22 | next:22. Threads claim tasks by adding 1, and `next` may pass num_tasks by one per thread. A worker that wakes
 * late finds no task left, or a task of a newer job, so that a job never waits for a sleeping worker. */
#define _GNU_SOURCE
#include "pool.h"
#include "simd.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define MAX_THREADS 256
#define FIELD_BITS 22
#define FIELD ((UINT64_C(1) << FIELD_BITS) - 1)

static pthread_mutex_t owner = PTHREAD_MUTEX_INITIALIZER; /* held while a job runs or the pool changes size */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake_up = PTHREAD_COND_INITIALIZER;
static pthread_t workers[MAX_THREADS];
static int num_workers, num_pool_threads = 1;
/* Cache lines of their own, in pairs as they are prefetched: idle workers read job_state while others write num_done */
#define OWN_LINE __attribute__((aligned(128)))
static OWN_LINE _Atomic uint64_t job_state;
static OWN_LINE _Atomic int64_t num_done;
static OWN_LINE _Atomic(task_fn) job_fn;
static _Atomic(const void *) job_data;
static OWN_LINE _Atomic int num_asleep, stopping;
static _Atomic int64_t spin_ns = 100000;

static int has_tasks(uint64_t t) { return (t & FIELD) < ((t >> FIELD_BITS) & FIELD); }

static void run_tasks(void) {
    int64_t done = 0;
    while (has_tasks(atomic_load(&job_state))) {
        const uint64_t t = atomic_fetch_add(&job_state, 1);
        if (!has_tasks(t)) break;
        /* a claimed task keeps its job from ending, so that these belong to it */
        task_fn fn = atomic_load_explicit(&job_fn, memory_order_relaxed);
        const void *data = atomic_load_explicit(&job_data, memory_order_relaxed);
        fn(data, (int64_t)(t & FIELD));
        done++;
    }
    if (done) atomic_fetch_add(&num_done, done);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static int is_idle(void) { return !has_tasks(atomic_load(&job_state)) && !atomic_load(&stopping); }

static void *worker(void *unused) {
    (void)unused;
    for (;;) {
        run_tasks();
        int64_t deadline = now_ns() + atomic_load_explicit(&spin_ns, memory_order_relaxed);
        while (is_idle() && now_ns() < deadline)
            for (int i = 0; i < 16 && is_idle(); i++) cpu_relax();
        if (is_idle()) {
            pthread_mutex_lock(&sleep_lock);
            atomic_fetch_add(&num_asleep, 1);
            while (is_idle()) pthread_cond_wait(&wake_up, &sleep_lock);
            atomic_fetch_sub(&num_asleep, 1);
            pthread_mutex_unlock(&sleep_lock);
        }
        if (atomic_load(&stopping)) return NULL;
    }
}

static void wake(void) {
    if (atomic_load(&num_asleep)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake_up);
        pthread_mutex_unlock(&sleep_lock);
    }
}

static void reset_after_fork(void) { /* in the child of a fork only the forking thread exists */
    num_workers = 0;
    atomic_store(&num_asleep, 0);
    atomic_store(&stopping, 0);
    atomic_store(&job_state, 0);
    pthread_mutex_init(&owner, NULL);
    pthread_mutex_init(&sleep_lock, NULL);
    pthread_cond_init(&wake_up, NULL);
}

static void start_workers(void) {
    static int has_fork_handler;
    if (!has_fork_handler) has_fork_handler = !pthread_atfork(NULL, NULL, reset_after_fork);
    while (num_workers < num_pool_threads - 1 && !pthread_create(&workers[num_workers], NULL, worker, NULL)) num_workers++;
    if (num_workers < num_pool_threads - 1) num_pool_threads = num_workers + 1;
}

EXPORT void paceline_set_threads(int64_t count) {
    pthread_mutex_lock(&owner);
    atomic_store(&stopping, 1);
    wake();
    for (int i = 0; i < num_workers; i++) pthread_join(workers[i], NULL);
    atomic_store(&stopping, 0);
    num_workers = 0;
    num_pool_threads = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : (int)count;
    pthread_mutex_unlock(&owner);
}

EXPORT void paceline_set_spin(int64_t nanoseconds) { atomic_store(&spin_ns, nanoseconds); }

int num_threads(void) { return num_pool_threads; }

void parallel(task_fn fn, const void *job, int64_t num_tasks) {
    if (num_tasks < 2 || num_pool_threads < 2 || num_tasks > (int64_t)FIELD - MAX_THREADS || pthread_mutex_trylock(&owner)) {
        for (int64_t i = 0; i < num_tasks; i++) fn(job, i);
        return;
    }
    if (num_workers < num_pool_threads - 1) start_workers();
    atomic_store_explicit(&job_fn, fn, memory_order_relaxed);
    atomic_store_explicit(&job_data, job, memory_order_relaxed);
    atomic_store(&num_done, 0);
    uint64_t generation = (atomic_load(&job_state) >> 2 * FIELD_BITS) + 1;
    atomic_store(&job_state, generation << 2 * FIELD_BITS | (uint64_t)num_tasks << FIELD_BITS);
    wake();
    run_tasks();
    for (int spins = 0; atomic_load(&num_done) < num_tasks; spins++)
        if (spins < 4096) cpu_relax();
        else sched_yield();
    pthread_mutex_unlock(&owner);
}

void *scratch(int which, int64_t bytes) {
    static _Thread_local struct { void *data; int64_t size; } buffers[NUM_SCRATCH];
    if (buffers[which].size < bytes) {
        free(buffers[which].data);
        int64_t size = (bytes + bytes / 2 + 63) / 64 * 64;
        buffers[which].data = aligned_alloc(64, (size_t)size);
        if (!buffers[which].data) abort();
        buffers[which].size = size;
    }
    return buffers[which].data;
}
