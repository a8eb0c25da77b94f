/* Attention over the paged cache, for one KV head and the query heads that share it.
 *
 * Keys are worked on in splits of 256 tokens, counted from the start of the sequence: the scores of a split, its
 * maximum, exponentials, their sum and the weighted values, then the split is merged into the result so far. The order
 * of all this depends on the query's place in its sequence only. A key that a query must not see has the weight
 * exactly 0, which changes no bit of a sum, so the other queries and the batch it was computed with leave no trace. */
#ifndef TE_ATTENTION_H
#define TE_ATTENTION_H

#include <math.h>

#include "elementwise.h"
#include "products.h"

/* What is known of a query after some splits: the values are weighted by exp(score - max), `sum` is those weights'. */
typedef struct {
    float max;
    float sum;
} Softmax;

/* Adds (max, sum, values) of the next split. */
TE_INLINE void merge_split(Softmax *state, float *values, float max, float sum, const float *split_values, int32_t dim)
{
    if (max == -INFINITY) /* the query sees nothing of it */
        return;
    float new_max = max > state->max ? max : state->max;
    float old_factor = vf_exp(vf_set(state->max - new_max))[0], factor = vf_exp(vf_set(max - new_max))[0];
    vf old_factors = vf_set(old_factor), factors = vf_set(factor);
    for (int32_t i = 0; i < dim; i += 8)
        vf_store(values + i, vf_fma(vf_load(split_values + i), factors, vf_load(values + i) * old_factors));
    state->sum = state->sum * old_factor + sum * factor;
    state->max = new_max;
}

static void finish_row(const TeAttention *attention, const TeCache *cache, int64_t row, int32_t head, float sum,
                       const float *values)
{
    const int32_t dim = cache->head_dim, width = attention->num_heads * dim;
    float result[dim + 8];
    const vf inverse = vf_set(1.0f / sum);
    for (int32_t i = 0; i < dim; i += 8)
        vf_store(result + i, vf_load(values + i) * inverse);
    if (attention->out)
        memcpy(attention->out + row * width + (int64_t)head * dim, result, (size_t)dim * sizeof(float));
    if (attention->groups) /* only where dim is a multiple of 32 */
        quantize(result, dim, attention->groups + row * (width / TE_GROUP) + (int64_t)head * dim / TE_GROUP);
}

/* Scores to weights for one row; keys [low, high] are seen, counted from the split's start. */
TE_INLINE void softmax_row(float *scores, int32_t num_keys, int32_t low, int32_t high, float scale, float soft_cap,
                           float *max, float *sum)
{
    const vf nothing = vf_set(-INFINITY), scales = vf_set(scale), caps = vf_set(soft_cap);
    const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    vf largest = nothing;
    if (low > high) {
        memset(scores, 0, (size_t)num_keys * sizeof(float));
        *max = -INFINITY;
        *sum = 0.0f;
        return;
    }
    for (int32_t i = 0; i < num_keys; i += 8) {
        vf score = vf_load(scores + i) * scales;
        if (soft_cap > 0.0f)
            score = caps * vf_tanh(score / caps);
        vi place = lanes + vi_set(i);
        vi is_seen = (place >= vi_set(low)) & (place <= vi_set(high));
        score = vf_select(is_seen, score, nothing);
        largest = vf_max(largest, score);
        vf_store(scores + i, score);
    }
    float row_max = vf_largest(largest);
    /* If all that is seen is -infinity or NaN, the exponentials are NaN, as they are to be. */
    vf maxes = vf_set(row_max), sums[2] = {vf_zero(), vf_zero()};
    for (int32_t i = 0; i < num_keys; i += 16)
        for (int half = 0; half < 2; half++) {
            vi place = lanes + vi_set(i + 8 * half);
            vi is_seen = (place >= vi_set(low)) & (place <= vi_set(high));
            vf weight = vf_select(is_seen, vf_exp(vf_load(scores + i + 8 * half) - maxes), vf_zero());
            sums[half] = sums[half] + weight;
            vf_store(scores + i + 8 * half, weight);
        }
    *max = row_max == -INFINITY ? NAN : row_max;
    *sum = vf_sum(sums[0] + sums[1]);
}

/* scratch: states, values so far, values of the split, scores, queries; see te_attention_scratch_floats. */
static void attention(const TeAttention *attention, const TeStep *step, const TeAttentionTask *task, int32_t kv_head,
                      float *scratch)
{
    const TeCache *cache = &step->caches[attention->kv_group];
    const int32_t group = attention->num_heads / cache->num_kv_heads, dim = cache->head_dim, padded = cache->padded_dim;
    const int32_t num_rows = task->num_rows * group;
    const int32_t *blocks = step->block_table + ((int64_t)attention->kv_group * step->num_sequences + task->sequence) *
                                                    step->max_blocks;
    const int32_t first_place = step->seq_lens[task->sequence] -
                                (step->query_start[task->sequence + 1] - task->first_row);
    const int32_t last_place = first_place + task->num_rows - 1;
    Softmax *states = (Softmax *)scratch;
    float *values = scratch + 2 * num_rows, *split_values = values + (int64_t)num_rows * padded;
    float *scores = split_values + (int64_t)num_rows * padded, *queries = scores + (int64_t)num_rows * TE_KV_SPLIT;
    for (int32_t i = 0; i < task->num_rows; i++)
        memcpy(queries + (int64_t)i * group * dim,
               attention->query + (task->first_row + i) * attention->query_stride + (int64_t)kv_head * group * dim,
               (size_t)(group * dim) * sizeof(float));
    for (int32_t r = 0; r < num_rows; r++)
        states[r] = (Softmax){-INFINITY, 0.0f};
    memset(values, 0, (size_t)num_rows * (size_t)padded * sizeof(float));
    for (int32_t split = task->first_split; split < task->end_split; split++) {
        const int32_t start = split * TE_KV_SPLIT;
        int32_t num_keys = TE_MIN(last_place + 1 - start, TE_KV_SPLIT), low = 0;
        if (attention->window)
            low = TE_MAX(first_place - attention->window + 1 - start, 0);
        const int32_t first_unit = low / TE_KV_TOKENS, end_unit = (num_keys + TE_KV_TOKENS - 1) / TE_KV_TOKENS;
        if (first_unit >= end_unit)
            continue;
        const int32_t unit_keys = (end_unit - first_unit) * TE_KV_TOKENS;
        memset(scores, 0, (size_t)num_rows * TE_KV_SPLIT * sizeof(float));
        memset(split_values, 0, (size_t)num_rows * (size_t)padded * sizeof(float));
        const uint16_t *keys[TE_KV_SPLIT / TE_KV_TOKENS];
        for (int32_t unit = first_unit; unit < end_unit; unit++) {
            int32_t place = start + unit * TE_KV_TOKENS;
            int64_t slot = (int64_t)blocks[place / cache->block_size] * cache->block_size + place % cache->block_size;
            keys[unit] = te_cache_keys(cache, attention->layer, slot, kv_head);
            __builtin_prefetch(keys[unit]);
        }
        for (int32_t unit = first_unit; unit < end_unit; unit++)
            half_product(num_rows, 1, queries, dim, keys[unit], TE_KV_TOKENS, 0, dim,
                          scores + (unit - first_unit) * TE_KV_TOKENS, TE_KV_SPLIT, 0);
        float maxes[num_rows], sums[num_rows];
        for (int32_t r = 0; r < num_rows; r++) {
            int32_t place = first_place + r / group - start - first_unit * TE_KV_TOKENS;
            int32_t lowest = attention->window ? TE_MAX(place - attention->window + 1, 0) : 0;
            softmax_row(scores + (int64_t)r * TE_KV_SPLIT, unit_keys, lowest, TE_MIN(place, unit_keys - 1),
                        attention->scale, attention->soft_cap, &maxes[r], &sums[r]);
        }
        for (int32_t unit = first_unit; unit < end_unit; unit++)
            /* Places behind the last key hold anything, NaN too, which a weight of 0 would not undo. */
            half_product(num_rows, padded / TE_KV_TOKENS, scores + (unit - first_unit) * TE_KV_TOKENS, TE_KV_SPLIT,
                          keys[unit] + (int64_t)dim * TE_KV_TOKENS, padded, TE_KV_TOKENS,
                          TE_MIN(TE_KV_TOKENS, num_keys - unit * TE_KV_TOKENS), split_values, padded, TE_KV_TOKENS);
        for (int32_t r = 0; r < num_rows; r++)
            merge_split(&states[r], values + (int64_t)r * padded, maxes[r], sums[r], split_values + (int64_t)r * padded,
                        padded);
    }
    for (int32_t r = 0; r < num_rows; r++) {
        const float *row_values = values + (int64_t)r * padded;
        const int32_t head = kv_head * group + r % group;
        if (task->partial < 0) {
            finish_row(attention, cache, task->first_row + r / group, head, states[r].sum, row_values);
        } else {
            float *partial = attention->partials +
                             ((int64_t)task->partial * attention->num_heads + head) * (2 + padded);
            partial[0] = states[r].max;
            partial[1] = states[r].sum;
            memcpy(partial + 2, row_values, (size_t)padded * sizeof(float));
        }
    }
}

static void merge(const TeAttention *attention, const TeStep *step, int32_t row, int32_t partial, int32_t num_partials)
{
    const TeCache *cache = &step->caches[attention->kv_group];
    const int64_t size = 2 + cache->padded_dim;
    float values[cache->padded_dim];
    for (int32_t head = 0; head < attention->num_heads; head++) {
        Softmax state = {-INFINITY, 0.0f};
        memset(values, 0, (size_t)cache->padded_dim * sizeof(float));
        for (int32_t i = 0; i < num_partials; i++) {
            const float *p = attention->partials + ((int64_t)(partial + i) * attention->num_heads + head) * size;
            merge_split(&state, values, p[0], p[1], p + 2, cache->padded_dim);
        }
        finish_row(attention, cache, row, head, state.sum, values);
    }
}

#endif
