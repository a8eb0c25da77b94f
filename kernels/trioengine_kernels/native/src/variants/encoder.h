/* What encoders need besides: layer norms, activations without a gate, and attention in which each token sees all of its
 * sequence. Their keys and values are read where the projection has left them: nothing is cached. */
#ifndef TE_ENCODER_H
#define TE_ENCODER_H

#include "attention.h"

static void layer_norm(const float *x, const float *residual, const float *weight, const float *bias, float epsilon,
                       int32_t width, float *out, TeGroup *groups)
{
    vf sums[2] = {vf_zero(), vf_zero()};
    float rest = 0.0f;
    const int32_t whole = width / 8 * 8;
    for (int32_t i = 0; i < whole; i += 8) {
        vf value = vf_load(x + i);
        if (residual)
            value = value + vf_load(residual + i);
        vf_store(out + i, value);
        sums[i / 8 & 1] = sums[i / 8 & 1] + value;
    }
    for (int32_t i = whole; i < width; i++) {
        out[i] = residual ? x[i] + residual[i] : x[i];
        rest += out[i];
    }
    const float mean = (vf_sum(sums[0] + sums[1]) + rest) / (float)width;
    const vf means = vf_set(mean);
    sums[0] = sums[1] = vf_zero();
    rest = 0.0f;
    for (int32_t i = 0; i < whole; i += 8) {
        vf value = vf_load(out + i) - means;
        sums[i / 8 & 1] = vf_fma(value, value, sums[i / 8 & 1]);
    }
    for (int32_t i = whole; i < width; i++)
        rest += (out[i] - mean) * (out[i] - mean);
    const float factor = 1.0f / sqrtf((vf_sum(sums[0] + sums[1]) + rest) / (float)width + epsilon);
    const vf factors = vf_set(factor);
    for (int32_t i = 0; i < whole; i += 8) {
        vf value = (vf_load(out + i) - means) * factors;
        vf_store(out + i, vf_fma(value, vf_load(weight + i), vf_load(bias + i)));
    }
    for (int32_t i = whole; i < width; i++)
        out[i] = (out[i] - mean) * factor * weight[i] + bias[i];
    if (groups)
        quantize(out, width, groups);
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
            values[j] = activated(vf_load(source + 8 * j), activation);
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
    /* Keys of 16 tokens side by side, values with their heads filled up. */
    memset(keys + (int64_t)(num_units - 1) * TE_KV_TOKENS * dim, 0, (size_t)(TE_KV_TOKENS * dim) * sizeof(float));
    for (int32_t i = 0; i < count; i++) {
        const float *key = query + i * stride + width;
        const float *value = attention->value + (int64_t)(start + i) * width + (int64_t)head * dim;
        float *column = keys + (int64_t)(i / TE_KV_TOKENS) * TE_KV_TOKENS * dim + i % TE_KV_TOKENS;
        for (int32_t j = 0; j < dim; j++)
            column[j * TE_KV_TOKENS] = key[j];
        memcpy(values + (int64_t)i * padded, value, (size_t)dim * sizeof(float));
        for (int32_t j = dim; j < padded; j++)
            values[(int64_t)i * padded + j] = 0.0f;
    }
    for (int32_t first = 0; first < count; first += TE_FULL_QUERIES) {
        const int32_t num_rows = TE_MIN(TE_FULL_QUERIES, count - first);
        memset(scores, 0, (size_t)num_rows * (size_t)num_keys * sizeof(float));
        memset(results, 0, (size_t)num_rows * (size_t)padded * sizeof(float));
        single_product(num_rows, num_units, query + first * stride, stride, keys, TE_KV_TOKENS, TE_KV_TOKENS * dim, dim,
                       scores, num_keys, TE_KV_TOKENS);
        float sums[TE_FULL_QUERIES];
        for (int32_t r = 0; r < num_rows; r++) {
            float max;
            softmax_row(scores + (int64_t)r * num_keys, num_keys, 0, count - 1, attention->scale, 0.0f, &max, &sums[r]);
        }
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
