/* Batches of rows to sample: each row's rules, its token, its log probabilities. */
#include "sampling.h"

#include <math.h>
#include <string.h>

extern const TeSamplingKernels te_sampling_kernels_portable;
#if defined(TE_HAVE_AVX2)
extern const TeSamplingKernels te_sampling_kernels_avx2;
#endif
#if defined(TE_HAVE_AVXVNNI)
extern const TeSamplingKernels te_sampling_kernels_avxvnni;
#endif
#if defined(TE_HAVE_VNNI)
extern const TeSamplingKernels te_sampling_kernels_vnni;
#endif
#if defined(TE_HAVE_DOTPROD)
extern const TeSamplingKernels te_sampling_kernels_dotprod;
#endif

static const TeSamplingKernels *sampling_kernels(void)
{
    switch (te_isa()) {
#if defined(TE_HAVE_AVX2)
    case TE_AVX2:
        return &te_sampling_kernels_avx2;
#endif
#if defined(TE_HAVE_AVXVNNI)
    case TE_AVX_VNNI:
        return &te_sampling_kernels_avxvnni;
#endif
#if defined(TE_HAVE_VNNI)
    case TE_VNNI:
        return &te_sampling_kernels_vnni;
#endif
#if defined(TE_HAVE_DOTPROD)
    case TE_DOTPROD:
        return &te_sampling_kernels_dotprod;
#endif
    default:
        return &te_sampling_kernels_portable;
    }
}

/* ---- rules ---- */

static int32_t has_ids(const TeRaggedIds *ragged, int32_t row)
{
    return ragged->starts && ragged->starts[row] < ragged->starts[row + 1];
}

static void penalize(const TeSampling *sampling, int32_t row, float *x, int32_t *counts)
{
    const int32_t *ids = sampling->seen.ids + sampling->seen.starts[row];
    const int64_t num_ids = sampling->seen.starts[row + 1] - sampling->seen.starts[row];
    const float repetition = sampling->repetition_penalty[row];
    const float presence = sampling->presence_penalty[row], frequency = sampling->frequency_penalty[row];
    if (repetition != 1) {
        for (int64_t i = 0; i < num_ids; i++) {
            if (counts[ids[i]]++ == 0)
                x[ids[i]] = x[ids[i]] > 0 ? x[ids[i]] / repetition : x[ids[i]] * repetition;
        }
        for (int64_t i = 0; i < num_ids; i++)
            counts[ids[i]] = 0;
    }
    if (presence != 0 || frequency != 0) {
        for (int64_t i = sampling->num_prompt_tokens[row]; i < num_ids; i++)
            counts[ids[i]]++;
        for (int64_t i = sampling->num_prompt_tokens[row]; i < num_ids; i++) {
            if (counts[ids[i]] == 0)
                continue;
            x[ids[i]] -= presence + frequency * (float)counts[ids[i]];
            counts[ids[i]] = 0;
        }
    }
}

static void keep_allowed(const TeSampling *sampling, int32_t row, float *x, int32_t *counts)
{
    const int64_t first = sampling->allowed.starts[row], end = sampling->allowed.starts[row + 1];
    for (int64_t i = first; i < end; i++)
        counts[sampling->allowed.ids[i]] = 1;
    for (int32_t token = 0; token < sampling->vocab_size; token++)
        x[token] = counts[token] ? x[token] : -INFINITY;
    for (int64_t i = first; i < end; i++)
        counts[sampling->allowed.ids[i]] = 0;
}

/* The row after its rules: itself where it has none, else a copy in `x`. */
static const float *apply_rules(const TeSampling *sampling, const TeSamplingKernels *kernels, int32_t row,
                                const float *logits, float *x, int32_t *counts)
{
    const int32_t size = sampling->vocab_size, mask_row = sampling->mask_rows ? sampling->mask_rows[row] : -1;
    const int32_t has_bias = has_ids(&sampling->bias, row), has_seen = has_ids(&sampling->seen, row);
    const int32_t has_forbidden = has_ids(&sampling->forbidden, row), has_allowed = has_ids(&sampling->allowed, row);
    if (mask_row < 0 && !has_bias && !has_seen && !has_forbidden && !has_allowed)
        return logits;
    if (mask_row < 0)
        memcpy(x, logits, (size_t)size * sizeof(float));
    else
        kernels->copy_masked(sampling->mask_bits + mask_row * sampling->mask_stride, logits, x, size);
    if (has_bias)
        for (int64_t i = sampling->bias.starts[row]; i < sampling->bias.starts[row + 1]; i++)
            x[sampling->bias.ids[i]] += sampling->bias_values[i];
    if (has_seen)
        penalize(sampling, row, x, counts);
    if (has_forbidden)
        for (int64_t i = sampling->forbidden.starts[row]; i < sampling->forbidden.starts[row + 1]; i++)
            x[sampling->forbidden.ids[i]] = -INFINITY;
    if (has_allowed)
        keep_allowed(sampling, row, x, counts);
    return x;
}

/* ---- log probabilities ---- */

static int32_t comes_before(const float *x, int32_t a, int32_t b)
{
    return x[a] > x[b] || (x[a] == x[b] && a < b);
}

static void sift_down(const float *x, int32_t *ids, int32_t root, int32_t num)
{
    for (int32_t child; (child = 2 * root + 1) < num; root = child) {
        if (child + 1 < num && comes_before(x, ids[child], ids[child + 1]))
            child++;
        if (comes_before(x, ids[child], ids[root]))
            return;
        const int32_t id = ids[root];
        ids[root] = ids[child];
        ids[child] = id;
    }
}

/* Heapsort: largest logit first, equal ones by id. */
static void sort_ids(const float *x, int32_t *ids, int32_t num)
{
    for (int32_t root = num / 2 - 1; root >= 0; root--)
        sift_down(x, ids, root, num);
    for (int32_t last = num - 1; last > 0; last--) {
        const int32_t id = ids[0];
        ids[0] = ids[last];
        ids[last] = id;
        sift_down(x, ids, 0, last);
    }
}

static float logprob(float x, float largest, double log_total)
{
    if (largest == -INFINITY)
        return TE_MIN_LOGPROB;
    if (x == largest)
        return (float)-log_total;
    return TE_MAX((float)((double)x - largest - log_total), TE_MIN_LOGPROB);
}

static void write_logprobs(const TeSampling *sampling, const TeSamplingKernels *kernels, int32_t row, const float *x,
                           int32_t largest, float *maxima)
{
    const int32_t size = sampling->vocab_size, token = sampling->token_ids[row];
    const int32_t wanted = sampling->status[row] == TE_IS_NAN ? -1 : sampling->num_logprobs[row];
    const int32_t num = TE_MAX(TE_MIN(wanted, size), 0);
    float *top = sampling->top + (int64_t)row * sampling->max_top;
    int32_t *ids = sampling->top_token_ids + (int64_t)row * sampling->max_top;
    for (int32_t i = num; i < sampling->max_top; i++) {
        top[i] = TE_MIN_LOGPROB;
        ids[i] = -1;
    }
    sampling->chosen[row] = TE_MIN_LOGPROB;
    sampling->rank[row] = 0;
    if (wanted < 0)
        return;
    const float max = x[largest];
    const double log_total = isinf(max) ? 0 : kernels->log_total(x, size, max);
    sampling->chosen[row] = logprob(x[token], max, log_total);
    sampling->rank[row] = kernels->rank(x, size, token);
    if (num == 0)
        return;
    kernels->top_ids(x, size, num, maxima, ids);
    sort_ids(x, ids, num);
    for (int32_t i = 0; i < num; i++)
        top[i] = logprob(x[ids[i]], max, log_total);
}

/* ---- batches ---- */

static void run_row(void *context, int32_t op, int32_t row, int32_t thread)
{
    (void)op;
    const TeSampling *sampling = context;
    const TeSamplingKernels *kernels = sampling_kernels();
    const int32_t size = sampling->vocab_size, forced = sampling->forced ? sampling->forced[row] : -1;
    float *scratch = sampling->scratch + (int64_t)thread * te_sampling_scratch_floats(size), *maxima = scratch + size;
    const float *logits = sampling->logits + (int64_t)row * sampling->row_stride, *x = logits;
    const int32_t raw_largest = kernels->argmax(logits, size);
    int32_t largest = raw_largest;
    if (forced < 0 && !isnan(logits[raw_largest])) {
        if (sampling->changed_rows && sampling->changed_rows[row] >= 0) {
            x = sampling->changed + (int64_t)sampling->changed_rows[row] * size;
            largest = kernels->argmax(x, size);
        }
        if (!isnan(x[largest])) {
            int32_t *counts = sampling->counts + (int64_t)thread * size;
            const float *ruled = apply_rules(sampling, kernels, row, x, scratch, counts);
            if (ruled != x)
                largest = kernels->argmax(ruled, size);
            x = ruled;
        }
    }
    const int32_t is_drawn = forced < 0 && sampling->temperature[row] > 0 && isfinite(x[largest]);
    sampling->token_ids[row] = forced < 0 ? largest : forced;
    sampling->status[row] = isnan(x[largest])                       ? TE_IS_NAN
                            : forced < 0 && x[largest] == -INFINITY ? TE_NOTHING_ALLOWED
                                                                    : TE_SAMPLED;
    if (is_drawn)
        sampling->token_ids[row] = kernels->sample_row(sampling, row, x, largest, maxima);
    if (!sampling->num_logprobs)
        return;
    if (forced >= 0 || !sampling->logprobs_are_processed) {
        write_logprobs(sampling, kernels, row, logits, raw_largest, maxima);
        return;
    }
    if (is_drawn && sampling->num_logprobs[row] >= 0) {
        kernels->limit_row(sampling, row, x, largest, maxima, scratch);
        x = scratch;
    }
    write_logprobs(sampling, kernels, row, x, largest, maxima);
}

int64_t te_sampling_scratch_floats(int32_t vocab_size)
{
    return (int64_t)vocab_size + vocab_size / 64 + 32;
}

int64_t te_sampling_struct_bytes(void)
{
    return (int64_t)sizeof(TeSampling);
}

void te_sample(TePool *pool, const TeSampling *sampling)
{
    if (pool) {
        te_pool_run(pool, run_row, (void *)(uintptr_t)sampling, 1, &sampling->num_rows);
        return;
    }
    for (int32_t row = 0; row < sampling->num_rows; row++)
        run_row((void *)(uintptr_t)sampling, 0, row, 0);
}
