/* What encoders need besides: layer norms, activations without a gate, and attention in which each token sees all of its
 * sequence. Their keys and values are read where the projection has left them: nothing is cached. */
#ifndef TE_ENCODER_H
#define TE_ENCODER_H

#include "attention.h"

static void layer_norm(const float *x, const float *residual, const float *weight, const float *bias, float epsilon,
                       int32_t width, float *out, TeGroup *groups)
{
    vf sums[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    float rest = 0.0f;
    const int32_t whole = width / TE_GROUP * TE_GROUP;
    for (int32_t i = 0; i < whole; i += TE_GROUP)
        for (int j = 0; j < 4; j++) {
            vf value = vf_load(x + i + 8 * j);
            if (residual)
                value = value + vf_load(residual + i + 8 * j);
            vf_store(out + i + 8 * j, value);
            sums[j] = sums[j] + value;
        }
    for (int32_t i = whole; i < width; i++) {
        out[i] = residual ? x[i] + residual[i] : x[i];
        rest += out[i];
    }
    const float mean = (vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / (float)width;
    const vf means = vf_set(mean);
    sums[0] = sums[1] = sums[2] = sums[3] = vf_zero();
    rest = 0.0f;
    for (int32_t i = 0; i < whole; i += TE_GROUP)
        for (int j = 0; j < 4; j++) {
            vf value = vf_load(out + i + 8 * j) - means;
            sums[j] = vf_fma(value, value, sums[j]);
        }
    for (int32_t i = whole; i < width; i++)
        rest += (out[i] - mean) * (out[i] - mean);
    const float variance = (vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest) / (float)width;
    const float factor = 1.0f / sqrtf(variance + epsilon);
    const vf factors = vf_set(factor);
    for (int32_t i = 0; i < whole; i += TE_GROUP) {
        vf values[4];
        for (int j = 0; j < 4; j++) {
            const int32_t place = i + 8 * j;
            values[j] = (vf_load(out + place) - means) * factors;
            values[j] = vf_fma(values[j], vf_load(weight + place), vf_load(bias + place));
            vf_store(out + place, values[j]);
        }
        if (groups)
            quantize_group(values, groups + i / TE_GROUP);
    }
    for (int32_t i = whole; i < width; i++)
        out[i] = (out[i] - mean) * factor * weight[i] + bias[i];
    if (groups && whole < width)
        quantize(out + whole, width - whole, groups + whole / TE_GROUP);
}

static void activate(const float *x, int32_t width, int32_t activation, float *out, TeGroup *groups)
{
    for (int32_t i = 0; i < width; i += TE_GROUP) {
        const int32_t count = TE_MIN(TE_GROUP, width - i);
        float rest[TE_GROUP] = {0};
        const float *source = x + i;
        vf values[4];
        if (count < TE_GROUP) {
            memcpy(rest, source, (size_t)count * sizeof(float));
            source = rest;
        }
        for (int j = 0; j < 4; j++)
            values[j] = vf_load(source + 8 * j);
        activate_group(values, activation);
        if (out && count == TE_GROUP) {
            for (int j = 0; j < 4; j++)
                vf_store(out + i + 8 * j, values[j]);
        } else if (out) {
            memcpy(rest, values, sizeof rest);
            memcpy(out + i, rest, (size_t)count * sizeof(float));
        }
        if (groups)
            quantize_group(values, groups + i / TE_GROUP);
    }
}

/* Keys of 16 tokens side by side, [dim][16]; keys behind the last are zeros. */
static void pack_keys(const float *keys, int64_t stride, int32_t count, int32_t dim, float *out)
{
    int32_t first = 0;
#if defined(__AVX2__)
    for (; first + 8 <= count && dim % 8 == 0; first += 8) {
        float *unit = out + (int64_t)(first / TE_KV_TOKENS) * TE_KV_TOKENS * dim + first % TE_KV_TOKENS;
        for (int32_t j = 0; j < dim; j += 8) {
            /* Eight numbers of eight keys: exchanged in pairs, in pairs of pairs, and in halves of vectors. */
            __m256 a[8], b[8];
            for (int i = 0; i < 8; i++)
                a[i] = _mm256_loadu_ps(keys + (first + i) * stride + j);
            for (int i = 0; i < 8; i += 2) {
                b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
                b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
            }
            for (int i = 0; i < 8; i += 4)
                for (int half = 0; half < 2; half++) {
                    a[i + 2 * half] = _mm256_shuffle_ps(b[i + half], b[i + half + 2], 0x44);
                    a[i + 2 * half + 1] = _mm256_shuffle_ps(b[i + half], b[i + half + 2], 0xee);
                }
            for (int i = 0; i < 4; i++) {
                _mm256_storeu_ps(unit + (j + i) * TE_KV_TOKENS, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
                _mm256_storeu_ps(unit + (j + i + 4) * TE_KV_TOKENS, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
            }
        }
    }
#endif
    for (; first % TE_KV_TOKENS || first < count; first++) {
        float *column = out + (int64_t)(first / TE_KV_TOKENS) * TE_KV_TOKENS * dim + first % TE_KV_TOKENS;
        for (int32_t j = 0; j < dim; j++)
            column[j * TE_KV_TOKENS] = first < count ? keys[first * stride + j] : 0.0f;
    }
}

/* Values with their heads filled up by zeros to a multiple of 16. */
static void pack_values(const float *values, int64_t stride, int32_t count, int32_t dim, int32_t padded, float *out)
{
    for (int32_t i = 0; i < count; i++, values += stride, out += padded) {
        int32_t j = 0;
        for (; j + 8 <= dim; j += 8)
            vf_store(out + j, vf_load(values + j));
        for (; j < padded; j++)
            out[j] = j < dim ? values[j] : 0.0f;
    }
}

/* e^x of x <= 0, to 2e-7, relative, above -10, and 1e-37 or less for all below -86. NaN stays NaN. As vf_exp. */
TE_INLINE vf exp_of_negative(vf x)
{
    const vf magic = vf_set(12582912.0f), bounded = vf_max(vf_set(-86.0f), x);
    const vf shifted = vf_fma(bounded, vf_set(1.44269504088896341f), magic); /* its lowest bits are those of n */
    const vf r = vf_fma(shifted - magic, vf_set(-0.69314718055994531f), bounded);
    return vf_exp_series(r) * (vf)(((vi)shifted << 23) + vi_set(127 << 23));
}

/* A row's scores to weights, the largest of which is 1; returns their sum. Those of whole units of 16 keys are written;
 * those behind the last key count for nothing. */
TE_INLINE float full_softmax(float *scores, int32_t count, float scale)
{
    const int32_t num_keys = (count + TE_KV_TOKENS - 1) / TE_KV_TOKENS * TE_KV_TOKENS;
    for (int32_t i = count; i < num_keys; i++)
        scores[i] = -INFINITY;
    vf largest[2] = {vf_load(scores), vf_load(scores + 8)};
    for (int32_t i = 16; i < num_keys; i += 16)
        for (int half = 0; half < 2; half++)
            largest[half] = vf_max(largest[half], vf_load(scores + i + 8 * half));
    const vf scales = vf_set(scale), offset = vf_set(-scale * vf_largest(vf_max(largest[0], largest[1])));
    vf sums[2] = {vf_zero(), vf_zero()};
    for (int32_t i = 0; i < num_keys; i += 16)
        for (int half = 0; half < 2; half++) {
            const vf weight = exp_of_negative(vf_fma(vf_load(scores + i + 8 * half), scales, offset));
            sums[half] = sums[half] + weight;
            vf_store(scores + i + 8 * half, weight);
        }
    return vf_sum(sums[0] + sums[1]);
}

/* One head of one sequence, `start` to `end - 1`. scratch: see te_full_attention_scratch_floats. */
static void full_attention(const TeFullAttention *attention, int32_t start, int32_t end, int32_t head, float *scratch)
{
    const int32_t dim = attention->head_dim, padded = (dim + 15) / 16 * 16, count = end - start;
    const int32_t num_units = (count + TE_KV_TOKENS - 1) / TE_KV_TOKENS, num_keys = num_units * TE_KV_TOKENS;
    const int32_t width = attention->num_heads * dim;
    const int64_t stride = 2 * (int64_t)width;
    const float *query = attention->query_key + start * stride + (int64_t)head * dim;
    float *keys = scratch, *values = keys + (int64_t)num_keys * dim, *scores = values + (int64_t)count * padded;
    float *results = scores + (int64_t)TE_FULL_QUERIES * num_keys;
    pack_keys(query + width, stride, count, dim, keys);
    pack_values(attention->value + (int64_t)start * width + (int64_t)head * dim, width, count, dim, padded, values);
    for (int32_t first = 0; first < count; first += TE_FULL_QUERIES) {
        const int32_t num_rows = TE_MIN(TE_FULL_QUERIES, count - first);
        memset(scores, 0, (size_t)num_rows * (size_t)num_keys * sizeof(float));
        memset(results, 0, (size_t)num_rows * (size_t)padded * sizeof(float));
        single_product(num_rows, num_units, query + first * stride, stride, keys, TE_KV_TOKENS, TE_KV_TOKENS * dim, dim,
                       scores, num_keys, TE_KV_TOKENS);
        float sums[TE_FULL_QUERIES];
        for (int32_t r = 0; r < num_rows; r++)
            sums[r] = full_softmax(scores + (int64_t)r * num_keys, count, attention->scale);
        single_product(num_rows, padded / 16, scores, num_keys, values, padded, 16, count, results, padded, 16);
        for (int32_t r = 0; r < num_rows; r++) {
            const int64_t row = start + first + r;
            float *result = results + (int64_t)r * padded;
            const vf inverse = vf_set(1.0f / sums[r]);
            for (int32_t i = 0; i < padded; i += 8)
                vf_store(result + i, vf_load(result + i) * inverse);
            if (attention->out)
                memcpy(attention->out + row * width + (int64_t)head * dim, result, (size_t)dim * sizeof(float));
            if (attention->groups) /* only where dim is a multiple of 32 */
                quantize(result, dim, attention->groups + (row * width + (int64_t)head * dim) / TE_GROUP);
        }
    }
}

#endif
