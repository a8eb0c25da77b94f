/* How fast this machine's memory is: what the speed of a decode step is compared with. */
#include <stdatomic.h>
#include <string.h>

#include "te.h"

#define CHUNK_BYTES (1 << 20)

typedef struct {
    uint8_t *to; /* null: only read */
    const uint8_t *from;
    int64_t num_bytes;
    _Atomic uint64_t sum;
} Transfer;

static void transfer_chunk(void *context, int32_t op, int32_t chunk, int32_t thread)
{
    Transfer *transfer = context;
    int64_t start = (int64_t)chunk * CHUNK_BYTES, count = TE_MIN(transfer->num_bytes - start, CHUNK_BYTES);
    (void)op;
    (void)thread;
    if (transfer->to) {
        memcpy(transfer->to + start, transfer->from + start, (size_t)count);
        return;
    }
    uint64_t sums[16] = {0};
    const uint8_t *p = transfer->from + start;
    for (int64_t i = 0; i + (int64_t)sizeof sums <= count; i += (int64_t)sizeof sums) {
        uint64_t words[16];
        memcpy(words, p + i, sizeof words);
        for (int j = 0; j < 16; j++)
            sums[j] += words[j];
    }
    for (int j = 1; j < 16; j++)
        sums[0] += sums[j];
    atomic_fetch_add(&transfer->sum, sums[0]);
}

/* Reads `num_bytes`, and copies them where `to` is not null. The sum keeps the compiler from leaving it out. */
TE_API uint64_t te_transfer(TePool *pool, uint8_t *to, const uint8_t *from, int64_t num_bytes)
{
    Transfer transfer = {to, from, num_bytes, 0};
    int32_t chunks = (int32_t)((num_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES);
    te_pool_run(pool, transfer_chunk, &transfer, 1, &chunks);
    return atomic_load(&transfer.sum);
}
