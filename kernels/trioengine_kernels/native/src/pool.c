/* Threads that work through a list of operations together.
 *
 * Of T threads, thread t is to do chunks t, t + T, t + 2 T and so on of each operation, and has a counter for each
 * operation of those that nobody took. Others write it only when they have none of their own left. A thread says once
 * for each operation how many chunks it did; everyone goes on when no chunk is pending. So nobody waits for a thread
 * that took nothing: one that wakes late finds counters at zero and runs through them. All counters are stamped with the
 * epoch (the number of the run): one that sleeps through the end of a run fails its next compare-and-swap, whose epoch
 * is gone. That is also why they belong to the pool and not to the caller's list. */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "te.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define END_OF_OPS 0xffffffffu
#define SPINS_IN_RUN 4000   /* about 50 us: longer than most chunks */
#define SPINS_BETWEEN 2000

typedef struct {
    TePool *pool;
    int32_t index;
} Start;

struct TePool {
    int32_t num_threads;
    int32_t num_started;
    _Atomic uint64_t *left;    /* [threads][operations, and an end]: epoch << 32 | chunks nobody took */
    _Atomic uint64_t *pending; /* [operations]: epoch << 32 | chunks not done */
    pthread_t *threads;
    Start *starts;
    /* Written by the caller before an epoch's counters, read only by a thread that took a chunk of that epoch. */
    TeRun run;
    void *context;
    const int32_t *chunks;
    _Alignas(64) _Atomic uint32_t epoch;
    _Atomic uint32_t is_stopping;
    /* What sleepers wait for: any change. */
    _Alignas(64) _Atomic uint32_t events;
    _Atomic uint32_t num_sleepers;
#if !defined(__linux__)
    pthread_mutex_t mutex;
    pthread_cond_t condition;
#endif
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_until_event(TePool *pool, uint32_t seen)
{
#if defined(__linux__)
    syscall(SYS_futex, &pool->events, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load(&pool->events) == seen)
        pthread_cond_wait(&pool->condition, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

static void wake_sleepers(TePool *pool)
{
    if (atomic_load(&pool->num_sleepers) == 0)
        return;
#if defined(__linux__)
    atomic_fetch_add(&pool->events, 1);
    syscall(SYS_futex, &pool->events, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
#else
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->events, 1);
    pthread_cond_broadcast(&pool->condition);
    pthread_mutex_unlock(&pool->mutex);
#endif
}

#define OPS_STRIDE (TE_MAX_OPS + 8) /* whole cache lines, so that threads share none */

static inline _Atomic uint64_t *left_of(TePool *pool, int32_t thread, int32_t op)
{
    return pool->left + (size_t)thread * OPS_STRIDE + op;
}

/* How many chunks of an operation are a thread's. */
static inline int32_t share_of(const TePool *pool, int32_t chunks, int32_t thread)
{
    return (chunks + pool->num_threads - 1 - thread) / pool->num_threads;
}

static inline int is_done(TePool *pool, int32_t op, uint32_t epoch)
{
    uint64_t pending = atomic_load(&pool->pending[op]);
    return (uint32_t)(pending >> 32) != epoch || (uint32_t)pending == 0;
}

static inline int is_new_epoch(TePool *pool, int32_t op, uint32_t epoch)
{
    (void)op;
    return atomic_load(&pool->epoch) != epoch || atomic_load(&pool->is_stopping);
}

/* Spins for a while, then sleeps, until the condition holds. Whoever makes it true calls wake_sleepers afterwards:
 * either it sees this sleeper, or this thread, having announced itself first, sees the condition. For that, all these
 * loads and stores have one order (memory_order_seq_cst, the default). */
static void wait_until(TePool *pool, int (*holds)(TePool *, int32_t, uint32_t), int32_t op, uint32_t epoch, int32_t spins)
{
    for (int32_t i = 0; i < spins; i++) {
        if (holds(pool, op, epoch))
            return;
        relax();
    }
    atomic_fetch_add(&pool->num_sleepers, 1);
    for (;;) {
        uint32_t seen = atomic_load(&pool->events);
        if (holds(pool, op, epoch))
            break;
        sleep_until_event(pool, seen);
    }
    atomic_fetch_sub(&pool->num_sleepers, 1);
}

/* Takes and does chunks of an operation that are `owner`'s until there are none. Returns how many, or -1 where the epoch
 * or its list of operations has ended. */
static int32_t work_on(TePool *pool, uint32_t epoch, int32_t op, int32_t owner, int32_t thread)
{
    _Atomic uint64_t *counter = left_of(pool, owner, op);
    uint64_t left = atomic_load_explicit(counter, memory_order_acquire);
    for (int32_t done = 0;;) {
        if ((uint32_t)(left >> 32) != epoch || (uint32_t)left == END_OF_OPS)
            return -1;
        if ((uint32_t)left == 0)
            return done;
        if (!atomic_compare_exchange_weak_explicit(counter, &left, left - 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        const int32_t place = share_of(pool, pool->chunks[op], owner) - (int32_t)(uint32_t)left;
        pool->run(pool->context, op, place * pool->num_threads + owner, thread);
        done++;
        left = atomic_load_explicit(counter, memory_order_acquire);
    }
}

static void work(TePool *pool, uint32_t epoch, int32_t thread)
{
    for (int32_t op = 0;; op++) {
        uint32_t done = 0;
        for (int32_t i = 0; i < pool->num_threads; i++) {
            const int32_t owner = (thread + i) % pool->num_threads, count = work_on(pool, epoch, op, owner, thread);
            if (count < 0)
                return; /* while something is not yet said to be done, the epoch does not end */
            done += (uint32_t)count;
        }
        if (done && (uint32_t)atomic_fetch_sub(&pool->pending[op], done) == done)
            wake_sleepers(pool);
        if (!is_done(pool, op, epoch))
            wait_until(pool, is_done, op, epoch, SPINS_IN_RUN);
    }
}

static void *worker(void *argument)
{
    Start *start = argument;
    TePool *pool = start->pool;
    uint32_t epoch = 0;
    for (;;) {
        wait_until(pool, is_new_epoch, 0, epoch, SPINS_BETWEEN);
        if (atomic_load(&pool->is_stopping))
            return NULL;
        epoch = atomic_load_explicit(&pool->epoch, memory_order_acquire);
        work(pool, epoch, start->index);
    }
}

TePool *te_pool_create(int32_t num_threads)
{
    TePool *pool = NULL;
    if (posix_memalign((void **)&pool, 64, sizeof(TePool)))
        return NULL;
    *pool = (TePool){.num_threads = TE_MAX(num_threads, 1)};
    pool->threads = calloc((size_t)pool->num_threads, sizeof(pthread_t));
    pool->starts = calloc((size_t)pool->num_threads, sizeof(Start));
    const size_t num_left = (size_t)pool->num_threads * OPS_STRIDE;
    if (posix_memalign((void **)&pool->left, 64, num_left * sizeof *pool->left))
        pool->left = NULL;
    if (posix_memalign((void **)&pool->pending, 64, OPS_STRIDE * sizeof *pool->pending))
        pool->pending = NULL;
    if (!pool->threads || !pool->starts || !pool->left || !pool->pending) {
        free(pool->threads);
        free(pool->starts);
        free(pool->left);
        free(pool->pending);
        free(pool);
        return NULL;
    }
    for (size_t i = 0; i < num_left; i++)
        atomic_init(&pool->left[i], 0);
    for (int32_t op = 0; op < OPS_STRIDE; op++)
        atomic_init(&pool->pending[op], 0);
#if !defined(__linux__)
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->condition, NULL);
#endif
    for (int32_t i = 1; i < pool->num_threads; i++) {
        pool->starts[i] = (Start){pool, i};
        /* Where the system refuses a thread, the others do its work. */
        if (pthread_create(&pool->threads[i], NULL, worker, &pool->starts[i]))
            break;
        pool->num_started = i;
    }
    return pool;
}

void te_pool_destroy(TePool *pool)
{
    atomic_store(&pool->is_stopping, 1);
    wake_sleepers(pool);
    for (int32_t i = 1; i <= pool->num_started; i++)
        pthread_join(pool->threads[i], NULL);
#if !defined(__linux__)
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->condition);
#endif
    free(pool->threads);
    free(pool->starts);
    free(pool->left);
    free(pool->pending);
    free(pool);
}

int32_t te_pool_num_threads(const TePool *pool)
{
    return pool->num_threads;
}

void te_pool_run(TePool *pool, TeRun run, void *context, int32_t num_ops, const int32_t *chunks)
{
    int32_t total = 0;
    for (int32_t op = 0; op < num_ops; op++)
        total = TE_MAX(total, chunks[op]);
    if (pool->num_started == 0 || total <= 1) {
        for (int32_t op = 0; op < num_ops; op++)
            for (int32_t chunk = 0; chunk < chunks[op]; chunk++)
                run(context, op, chunk, 0);
        return;
    }
    uint32_t epoch = atomic_load_explicit(&pool->epoch, memory_order_relaxed) + 1;
    epoch += epoch == 0;
    pool->run = run;
    pool->context = context;
    pool->chunks = chunks;
    const uint64_t stamp = (uint64_t)epoch << 32;
    for (int32_t op = 0; op < num_ops; op++)
        atomic_store_explicit(&pool->pending[op], stamp | (uint32_t)chunks[op], memory_order_relaxed);
    for (int32_t thread = 0; thread < pool->num_threads; thread++) {
        for (int32_t op = 0; op < num_ops; op++) {
            const uint32_t share = (uint32_t)share_of(pool, chunks[op], thread);
            atomic_store_explicit(left_of(pool, thread, op), stamp | share, memory_order_release);
        }
        atomic_store_explicit(left_of(pool, thread, num_ops), stamp | END_OF_OPS, memory_order_release);
    }
    atomic_store(&pool->epoch, epoch);
    wake_sleepers(pool);
    work(pool, epoch, 0);
}
