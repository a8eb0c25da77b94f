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

#if defined(__AVX512VNNI__)
/* softmax_row with vectors of sixteen: the same operations. Without a soft cap. */
static __attribute__((noinline)) void wide_softmax_row(float *scores, int32_t num_keys, int32_t low, int32_t high,
                                                       float scale, float *max, float *sum)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i lowest = _mm512_set1_epi32(low), highest = _mm512_set1_epi32(high);
    const __m512 nothing = _mm512_set1_ps(-INFINITY), scales = _mm512_set1_ps(scale);
    __mmask16 seen[TE_KV_SPLIT / 16];
    __m512 largest = nothing, total = _mm512_setzero_ps();
    for (int32_t i = 0; i < num_keys; i += 16) {
        const __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32(i));
        seen[i / 16] = _mm512_cmp_epi32_mask(place, lowest, _MM_CMPINT_NLT) &
                       _mm512_cmp_epi32_mask(place, highest, _MM_CMPINT_LE);
        const __m512 score = _mm512_mask_mov_ps(nothing, seen[i / 16], _mm512_mul_ps(_mm512_loadu_ps(scores + i), scales));
        largest = _mm512_max_ps(largest, score);
        _mm512_storeu_ps(scores + i, score);
    }
    const float row_max = vf_largest(vf_max((vf)_mm512_castps512_ps256(largest), (vf)_mm512_extractf32x8_ps(largest, 1)));
    const __m512 maxes = _mm512_set1_ps(row_max);
    for (int32_t i = 0; i < num_keys; i += 16) {
        const __m512 weight = _mm512_maskz_mov_ps(seen[i / 16], vw_exp(_mm512_sub_ps(_mm512_loadu_ps(scores + i), maxes)));
        total = _mm512_add_ps(total, weight);
        _mm512_storeu_ps(scores + i, weight);
    }
    *max = row_max == -INFINITY ? NAN : row_max;
    *sum = vf_sum((vf)_mm512_castps512_ps256(total) + (vf)_mm512_extractf32x8_ps(total, 1));
}
#endif

/* ---- a few rows, such as those of one token: all sums of a split stay in registers ---- */

#if defined(__AVX512VNNI__)
#define FEW_ROWS 6
#else
#define FEW_ROWS 3
#endif

/* Scores of `num_units` units of keys, as half_product works them out. Meanwhile lines of `next` are fetched. */
TE_INLINE void few_scores(int num_rows, int num_units, const float *queries, int32_t dim, const uint16_t *const *keys,
                          const uint16_t *const *next, int64_t next_offset, float *scores)
{
    vw acc[FEW_ROWS][8];
    for (int r = 0; r < num_rows; r++)
        for (int u = 0; u < num_units; u++)
            acc[r][u] = vw_zero();
    for (int32_t k = 0; k < dim; k++) {
        vw x[FEW_ROWS];
        for (int r = 0; r < num_rows; r++)
            x[r] = vw_set(queries[r * dim + k]);
        for (int u = 0; u < num_units; u++) {
            const vw column = vw_load_half(keys[u] + (int64_t)k * TE_KV_TOKENS);
            if ((k ^ u) & 1) /* a line is two columns */
                __builtin_prefetch(next[u] + next_offset + (int64_t)k * TE_KV_TOKENS);
            for (int r = 0; r < num_rows; r++)
                acc[r][u] = vw_fma(x[r], column, acc[r][u]);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int u = 0; u < num_units; u++)
            vw_store(scores + r * TE_KV_SPLIT + u * TE_KV_TOKENS, acc[r][u]);
}

/* Weighted values of all units: `num_wide` pieces of 16 columns, the first `offset` numbers behind the keys' start. */
TE_INLINE void few_values(int num_rows, int num_wide, const float *weights, const uint16_t *const *keys,
                          int32_t num_units, int32_t num_keys, int64_t offset, int32_t padded, float *out)
{
    vw acc[FEW_ROWS][4];
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < num_wide; w++)
            acc[r][w] = vw_zero();
    for (int32_t unit = 0; unit < num_units; unit++) {
        const uint16_t *values = keys[unit] + offset, *next = keys[TE_MIN(unit + 2, num_units - 1)] + offset;
        const int32_t count = TE_MIN(TE_KV_TOKENS, num_keys - unit * TE_KV_TOKENS);
        for (int32_t k = 0; k < count; k++) {
            vw x[FEW_ROWS];
            for (int r = 0; r < num_rows; r++)
                x[r] = vw_set(weights[r * TE_KV_SPLIT + unit * TE_KV_TOKENS + k]);
            for (int w = 0; w < num_wide; w++) {
                const vw column = vw_load_half(values + (int64_t)k * padded + w * 16);
                if (w % 2 == 0)
                    __builtin_prefetch(next + (int64_t)k * padded + w * 16);
                for (int r = 0; r < num_rows; r++)
                    acc[r][w] = vw_fma(x[r], column, acc[r][w]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < num_wide; w++)
            vw_store(out + r * padded + w * 16, acc[r][w]);
}

/* For a number of rows: so many units of keys, and pieces of values, at once, as measured. Chains of sums must be enough
 * to keep the processor busy, and few enough to stay in its registers. */
#define TE_FEW(rows, units, wide)                                                                                      \
    static __attribute__((noinline)) void few_scores_##rows(const float *queries, int32_t dim,                         \
                                                            const uint16_t *const *keys, int32_t num_units,            \
                                                            float *scores)                                             \
    {                                                                                                                  \
        const int64_t values = (int64_t)dim * TE_KV_TOKENS;                                                            \
        int32_t unit = 0;                                                                                              \
        for (; unit + units <= num_units; unit += units) {                                                             \
            const int is_last = unit + 2 * units > num_units;                                                          \
            few_scores(rows, units, queries, dim, keys + unit, is_last ? keys : keys + unit + units,                   \
                       is_last ? values : 0, scores + unit * TE_KV_TOKENS);                                            \
        }                                                                                                              \
        for (; unit + 2 <= num_units && units > 2; unit += 2)                                                          \
            few_scores(rows, 2, queries, dim, keys + unit, keys, values, scores + unit * TE_KV_TOKENS);                \
        for (; unit < num_units; unit++)                                                                               \
            few_scores(rows, 1, queries, dim, keys + unit, keys, values, scores + unit * TE_KV_TOKENS);                \
    }                                                                                                                  \
    static __attribute__((noinline)) void few_values_##rows(const float *weights, const uint16_t *const *keys,         \
                                                            int32_t num_units, int32_t num_keys, int32_t dim,          \
                                                            int32_t padded, float *out)                                \
    {                                                                                                                  \
        const int64_t offset = (int64_t)dim * TE_KV_TOKENS;                                                            \
        int32_t column = 0;                                                                                            \
        for (; column + 16 * wide <= padded; column += 16 * wide)                                                      \
            few_values(rows, wide, weights, keys, num_units, num_keys, offset + column, padded, out + column);         \
        for (; column < padded; column += 16)                                                                          \
            few_values(rows, 1, weights, keys, num_units, num_keys, offset + column, padded, out + column);            \
    }
#if defined(__AVX512VNNI__)
TE_FEW(1, 8, 4)
TE_FEW(2, 4, 4)
TE_FEW(3, 4, 4)
TE_FEW(4, 4, 4)
TE_FEW(5, 4, 4)
TE_FEW(6, 4, 4)
#else
TE_FEW(1, 4, 4)
TE_FEW(2, 2, 2)
TE_FEW(3, 1, 1)
#endif
#undef TE_FEW

static void (*const few_scores_of[FEW_ROWS])(const float *, int32_t, const uint16_t *const *, int32_t, float *) = {
    few_scores_1, few_scores_2, few_scores_3,
#if FEW_ROWS > 3
    few_scores_4, few_scores_5, few_scores_6,
#endif
};
static void (*const few_values_of[FEW_ROWS])(const float *, const uint16_t *const *, int32_t, int32_t, int32_t, int32_t,
                                             float *) = {
    few_values_1, few_values_2, few_values_3,
#if FEW_ROWS > 3
    few_values_4, few_values_5, few_values_6,
#endif
};

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
        const uint16_t *keys[TE_KV_SPLIT / TE_KV_TOKENS];
        for (int32_t unit = first_unit; unit < end_unit; unit++) {
            int32_t place = start + unit * TE_KV_TOKENS;
            int64_t slot = (int64_t)blocks[place / cache->block_size] * cache->block_size + place % cache->block_size;
            keys[unit] = te_cache_keys(cache, attention->layer, slot, kv_head);
            __builtin_prefetch(keys[unit]);
        }
        const int is_few = num_rows <= FEW_ROWS;
        if (is_few) {
            few_scores_of[num_rows - 1](queries, dim, keys + first_unit, end_unit - first_unit, scores);
        } else {
            memset(scores, 0, (size_t)num_rows * TE_KV_SPLIT * sizeof(float));
            for (int32_t unit = first_unit; unit < end_unit; unit++)
                half_product(num_rows, 1, queries, dim, keys[unit], TE_KV_TOKENS, 0, dim,
                             scores + (unit - first_unit) * TE_KV_TOKENS, TE_KV_SPLIT, 0);
        }
        float maxes[num_rows], sums[num_rows];
        for (int32_t r = 0; r < num_rows; r++) {
            int32_t place = first_place + r / group - start - first_unit * TE_KV_TOKENS;
            int32_t lowest = attention->window ? TE_MAX(place - attention->window + 1, 0) : 0;
            int32_t highest = TE_MIN(place, unit_keys - 1);
            float *row = scores + (int64_t)r * TE_KV_SPLIT;
#if defined(__AVX512VNNI__)
            if (attention->soft_cap == 0.0f && lowest <= highest) {
                wide_softmax_row(row, unit_keys, lowest, highest, attention->scale, &maxes[r], &sums[r]);
                continue;
            }
#endif
            softmax_row(row, unit_keys, lowest, highest, attention->scale, attention->soft_cap, &maxes[r], &sums[r]);
        }
        /* Places behind the last key hold anything, NaN too, which a weight of 0 would not undo. */
        if (is_few) {
            few_values_of[num_rows - 1](scores, keys + first_unit, end_unit - first_unit,
                                        num_keys - first_unit * TE_KV_TOKENS, dim, padded, split_values);
        } else {
            memset(split_values, 0, (size_t)num_rows * (size_t)padded * sizeof(float));
            for (int32_t unit = first_unit; unit < end_unit; unit++)
                half_product(num_rows, padded / TE_KV_TOKENS, scores + (unit - first_unit) * TE_KV_TOKENS, TE_KV_SPLIT,
                             keys[unit] + (int64_t)dim * TE_KV_TOKENS, padded, TE_KV_TOKENS,
                             TE_MIN(TE_KV_TOKENS, num_keys - unit * TE_KV_TOKENS), split_values, padded, TE_KV_TOKENS);
        }
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
