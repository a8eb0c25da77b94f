/* What is done to each token by itself: quantization of activations, norms, gates, rope, embedding rows. */
#ifndef TE_ELEMENTWISE_H
#define TE_ELEMENTWISE_H

#include <math.h>

#include "simd.h"
#include "te.h"

/* What a group says of its numbers, whose sum is `sum`. */
TE_INLINE void finish_group(TeGroup *group, float scale, int32_t sum)
{
    group->scale = scale;
    group->sum = scale * (float)sum;
    group->offset = -128 * sum;
    group->start = ((8 << 16) - 8) * sum; /* below 2^31: 32 * 127 is the largest sum */
}

/* The group's largest magnitude becomes 127. A group with a NaN or an infinity is all NaN afterwards (its scale is),
 * so that what went wrong shows in the output. */
TE_INLINE void quantize_group(const vf x[4], TeGroup *group)
{
    vf largest = vf_max(vf_max(vf_abs(x[0]), vf_abs(x[1])), vf_max(vf_abs(x[2]), vf_abs(x[3])));
    float max = vf_largest(largest);
    /* A sum of all, times zero, is NaN if any is not finite; max alone may have dropped a NaN. */
    float poison = vf_sum((x[0] + x[1]) + (x[2] + x[3])) * 0.0f;
    float scale = max / 127.0f;
    int is_usable = poison == 0.0f && scale >= 1e-30f;
    vf inverse = vf_set(is_usable ? 127.0f / max : 0.0f);
    vi sums = vi_set(0);
    for (int i = 0; i < 4; i++) {
        vf safe = is_usable ? x[i] : vf_zero();
        vi q = __builtin_convertvector(vf_round(safe * inverse), vi);
        sums += q;
#if defined(__AVX512VL__)
        _mm_storel_epi64((__m128i *)(group->q + 8 * i), _mm256_cvtepi32_epi8((__m256i)q));
#elif defined(__AVX2__)
        __m128i q16 = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)q), _mm256_extracti128_si256((__m256i)q, 1));
        _mm_storel_epi64((__m128i *)(group->q + 8 * i), _mm_packs_epi16(q16, q16));
#else
        for (int j = 0; j < 8; j++)
            group->q[8 * i + j] = (int8_t)q[j];
#endif
    }
    finish_group(group, is_usable ? scale : poison, vi_sum(sums));
}

#if defined(__AVX512VNNI__)
/* quantize_group of two vectors of sixteen. */
TE_INLINE void wide_quantize_group(__m512 low, __m512 high, TeGroup *group)
{
    const float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
    const float poison = _mm512_reduce_add_ps(_mm512_add_ps(low, high)) * 0.0f;
    const float scale = max / 127.0f;
    const int is_usable = poison == 0.0f && scale >= 1e-30f;
    const __mmask16 usable = is_usable ? 0xffff : 0;
    const __m512 inverse = _mm512_set1_ps(is_usable ? 127.0f / max : 0.0f);
    const __m512i first = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(usable, low, inverse));
    const __m512i second = _mm512_cvtps_epi32(_mm512_maskz_mul_ps(usable, high, inverse));
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    _mm_storeu_si128((__m128i *)group->q, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(group->q + 16), _mm512_cvtepi32_epi8(second));
    finish_group(group, is_usable ? scale : poison, sum);
}
#endif

static void quantize(const float *x, int32_t width, TeGroup *groups)
{
    int32_t first = 0;
    for (; first + TE_GROUP <= width; first += TE_GROUP, groups++) {
        vf values[4] = {vf_load(x + first), vf_load(x + first + 8), vf_load(x + first + 16), vf_load(x + first + 24)};
        quantize_group(values, groups);
    }
    if (first < width) {
        float rest[TE_GROUP] = {0};
        memcpy(rest, x + first, (size_t)(width - first) * sizeof(float));
        vf values[4] = {vf_load(rest), vf_load(rest + 8), vf_load(rest + 16), vf_load(rest + 24)};
        quantize_group(values, groups);
    }
}

static void rms_norm(const float *x, float *residual, const float *weight, float epsilon, int32_t width, float *out,
                     TeGroup *groups)
{
    vf sums[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    float rest = 0.0f;
    const float *source = residual ? residual : x;
    int32_t i = 0;
    for (int lane = 0; i + 8 <= width; i += 8, lane = (lane + 1) & 3) {
        vf value = vf_load(x + i);
        if (residual) {
            value = value + vf_load(residual + i);
            vf_store(residual + i, value);
        }
        sums[lane] = vf_fma(value, value, sums[lane]);
    }
    for (; i < width; i++) {
        float value = residual ? residual[i] += x[i] : x[i];
        rest += value * value;
    }
    float total = vf_sum((sums[0] + sums[1]) + (sums[2] + sums[3])) + rest;
    float factor = 1.0f / sqrtf(total / (float)width + epsilon);
    vf factors = vf_set(factor);
    for (i = 0; i < width; i += TE_GROUP) {
        int32_t end = TE_MIN(i + TE_GROUP, width);
        if (end - i == TE_GROUP) {
            vf values[4];
            for (int j = 0; j < 4; j++)
                values[j] = vf_load(source + i + 8 * j) * factors * vf_load(weight + i + 8 * j);
            if (out)
                for (int j = 0; j < 4; j++)
                    vf_store(out + i + 8 * j, values[j]);
            if (groups)
                quantize_group(values, groups + i / TE_GROUP);
        } else {
            float values[TE_GROUP];
            for (int32_t j = i; j < end; j++)
                values[j - i] = source[j] * factor * weight[j];
            if (out)
                memcpy(out + i, values, (size_t)(end - i) * sizeof(float));
            if (groups)
                quantize(values, end - i, groups + i / TE_GROUP);
        }
    }
}

static void add(const float *x, float *residual, int32_t width)
{
    for (int32_t i = 0; i < width; i++)
        residual[i] += x[i];
}

static void soft_cap(float *x, int32_t width, float cap)
{
    const vf caps = vf_set(cap);
    int32_t i = 0;
    for (; i + 8 <= width; i += 8)
        vf_store(x + i, caps * vf_tanh(vf_load(x + i) / caps));
    if (i < width) {
        float rest[8] = {0};
        memcpy(rest, x + i, (size_t)(width - i) * sizeof(float));
        vf_store(rest, caps * vf_tanh(vf_load(rest) / caps));
        memcpy(x + i, rest, (size_t)(width - i) * sizeof(float));
    }
}

/* x (1 + erf(x / sqrt 2)) / 2 as max(x, 0) - a Q(a), a = |x|: to 9e-7, absolute. Q is a polynomial in 2 a / 5.25 - 1,
 * fitted so that the largest error of a Q(a) below 5.25 is as small as can be; behind that the product is below 5e-7.
 * Four vectors in step: one by one they would wait for their own chains of additions (measured). */
TE_INLINE void gelu_group(vf x[4])
{
    static const float coefficients[] = {
        -0.019899580627679825f, -0.00596570922061801f, 0.07773378491401672f,  -0.06784999370574951f,
        -0.08363175392150879f,  0.19733908772468567f,  -0.10119843482971191f, -0.1209007278084755f,
        0.257595419883728f,     -0.22596773505210876f, 0.11505130678415298f,  -0.03340025991201401f,
        0.004332652781158686f,
    };
    vf sizes[4], t[4], p[4];
    for (int j = 0; j < 4; j++) {
        sizes[j] = vf_min(vf_abs(x[j]), vf_set(5.25f));
        t[j] = vf_fma(sizes[j], vf_set(2.0f / 5.25f), vf_set(-1.0f));
        p[j] = vf_set(0.00676191970705986f);
    }
#pragma GCC unroll 13
    for (int i = 0; i < 13; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            p[j] = vf_fma(p[j], t[j], vf_set(coefficients[i]));
    for (int j = 0; j < 4; j++)
        x[j] = vf_fma(-sizes[j], p[j], vf_select(x[j] < vf_zero(), vf_zero(), x[j])); /* a NaN stays */
}

/* All but TE_GELU. */
TE_INLINE vf activated(vf gate, int32_t activation)
{
    if (activation == TE_SILU)
        return gate * vf_sigmoid(gate);
    if (activation == TE_RELU)
        return vf_select(gate < vf_zero(), vf_zero(), gate);
    /* 0.5 x (1 + tanh y) = x sigmoid(2 y) */
    vf cubed = gate * gate * gate;
    return gate * vf_sigmoid(vf_set(2.0f * 0.7978845608f) * vf_fma(vf_set(0.044715f), cubed, gate));
}

TE_INLINE void activate_group(vf x[4], int32_t activation)
{
    if (activation == TE_GELU)
        gelu_group(x);
    else
        for (int j = 0; j < 4; j++)
            x[j] = activated(x[j], activation);
}

#if defined(__AVX512VNNI__)
TE_INLINE __m512 wide_silu(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 negative = (__m512)_mm512_xor_si512((__m512i)x, _mm512_set1_epi32(INT32_MIN));
    return _mm512_mul_ps(x, _mm512_div_ps(one, _mm512_add_ps(one, vw_exp(negative))));
}
#endif

static void gated(const float *gate_up, int32_t width, int32_t activation, int32_t first, int32_t end, float *out,
                  TeGroup *groups)
{
    const float *up = gate_up + width;
#if defined(__AVX512VNNI__)
    if (activation == TE_SILU && groups && !out)
        for (; first + TE_GROUP <= end; first += TE_GROUP)
            wide_quantize_group(
                _mm512_mul_ps(wide_silu(_mm512_loadu_ps(gate_up + first)), _mm512_loadu_ps(up + first)),
                _mm512_mul_ps(wide_silu(_mm512_loadu_ps(gate_up + first + 16)), _mm512_loadu_ps(up + first + 16)),
                groups + first / TE_GROUP);
#endif
    for (int32_t i = first; i < end; i += TE_GROUP) {
        float gates[TE_GROUP] = {0}, ups[TE_GROUP] = {0};
        const float *gate_group = gate_up + i, *up_group = up + i;
        int32_t count = TE_MIN(TE_GROUP, end - i);
        if (count < TE_GROUP) {
            memcpy(gates, gate_group, (size_t)count * sizeof(float));
            memcpy(ups, up_group, (size_t)count * sizeof(float));
            gate_group = gates;
            up_group = ups;
        }
        vf values[4];
        for (int j = 0; j < 4; j++)
            values[j] = vf_load(gate_group + 8 * j);
        activate_group(values, activation);
        for (int j = 0; j < 4; j++)
            values[j] = values[j] * vf_load(up_group + 8 * j);
        if (out) {
            float results[TE_GROUP];
            memcpy(results, values, sizeof results);
            memcpy(out + i, results, (size_t)count * sizeof(float));
        }
        if (groups)
            quantize_group(values, groups + i / TE_GROUP);
    }
}

static void store_value(uint16_t *p, const float *x, int32_t count)
{
    const vf limit = vf_set(65504.0f);
    int32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        vf value = vf_load(x + i);
        value = vf_select(value > limit, limit, value); /* NaN stays */
        vf_store_half(p + i, vf_select(value < -limit, -limit, value));
    }
    for (; i < count; i++) {
        float value = x[i] > 65504.0f ? 65504.0f : x[i];
        p[i] = te_float_to_half(value < -65504.0f ? -65504.0f : value);
    }
}

static int has_nan(const float *x, int32_t count)
{
    vi found = {0};
    int32_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const vf value = vf_load(x + i);
        found |= value != value;
    }
    int is_found = vi_sum(found) != 0;
    for (; i < count; i++)
        is_found |= x[i] != x[i];
    return is_found;
}

static void rope_write(float *qkv, const float *cos_sin, int32_t half, int32_t num_heads, const TeCache *cache,
                       int32_t layer, int32_t slot)
{
    const int32_t dim = cache->head_dim;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    for (int32_t head = 0; head < num_heads + cache->num_kv_heads; head++) {
        float *x = qkv + (int64_t)head * dim;
        int32_t i = 0;
        for (; i + 8 <= half; i += 8) {
            vf first = vf_load(x + i), second = vf_load(x + half + i), c = vf_load(cosines + i), s = vf_load(sines + i);
            vf_store(x + i, first * c - second * s);
            vf_store(x + half + i, second * c + first * s);
        }
        for (; i < half; i++) {
            float first = x[i], second = x[half + i];
            x[i] = first * cosines[i] - second * sines[i];
            x[half + i] = second * cosines[i] + first * sines[i];
        }
    }
    const float *keys = qkv + (int64_t)num_heads * dim, *values = keys + (int64_t)cache->num_kv_heads * dim;
    const int32_t lane = slot % TE_KV_TOKENS;
    for (int32_t head = 0; head < cache->num_kv_heads; head++) {
        uint16_t *key_block = te_cache_keys(cache, layer, slot, head), halves[8];
        const float *key = keys + (int64_t)head * dim;
        for (int32_t i = 0; i < dim; i += 8) {
            int32_t count = TE_MIN(8, dim - i);
            store_value(halves, key + i, count);
            for (int32_t j = 0; j < count; j++)
                key_block[(i + j) * TE_KV_TOKENS + lane] = halves[j];
        }
        uint16_t *value_block = key_block + (int64_t)dim * TE_KV_TOKENS + (int64_t)lane * cache->padded_dim;
        const float *value = values + (int64_t)head * dim;
        if (!has_nan(value, dim)) {
            store_value(value_block, value, dim);
            continue;
        }
        /* A weight of 0 would not undo it, so that it would reach queries that do not see it. Its key is NaN instead:
           that makes the weight NaN, where it is seen. */
        memset(value_block, 0, (size_t)dim * sizeof(uint16_t));
        for (int32_t i = 0; i < dim; i++)
            key_block[i * TE_KV_TOKENS + lane] = 0x7e00;
    }
}

/* One token: sixteen ranks at a time, whose values are the sums of four, each of every fourth column. */
static void lora(const TeLoraPart *part, const float *x, int32_t columns, float *out)
{
    const int32_t stride = (part->rank + 15) / 16 * 16;
    out += part->first_row;
    for (int32_t first = 0; first < part->rank; first += 16) {
        const float *a = part->a + first;
        vf sums[4][2];
        for (int32_t i = 0; i < 4; i++)
            sums[i][0] = sums[i][1] = vf_zero();
        int32_t column = 0;
        for (; column + 4 <= columns; column += 4)
            for (int32_t i = 0; i < 4; i++, a += stride) {
                const vf value = vf_set(x[column + i]);
                sums[i][0] = vf_fma(value, vf_load(a), sums[i][0]);
                sums[i][1] = vf_fma(value, vf_load(a + 8), sums[i][1]);
            }
        for (; column < columns; column++, a += stride) {
            const vf value = vf_set(x[column]);
            sums[0][0] = vf_fma(value, vf_load(a), sums[0][0]);
            sums[0][1] = vf_fma(value, vf_load(a + 8), sums[0][1]);
        }
        float hidden[16];
        vf_store(hidden, (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]));
        vf_store(hidden + 8, (sums[0][1] + sums[1][1]) + (sums[2][1] + sums[3][1]));
        const int32_t count = TE_MIN(16, part->rank - first);
        const float *b = part->b + (int64_t)first * part->num_rows;
        int32_t row = 0;
        for (; row + 8 <= part->num_rows; row += 8) {
            vf sum = vf_load(out + row);
            for (int32_t i = 0; i < count; i++)
                sum = vf_fma(vf_set(hidden[i]), vf_load(b + (int64_t)i * part->num_rows + row), sum);
            vf_store(out + row, sum);
        }
        for (; row < part->num_rows; row++)
            for (int32_t i = 0; i < count; i++)
                out[row] += hidden[i] * b[(int64_t)i * part->num_rows + row];
    }
}

static void embedding(const TeTiles *tiles, int32_t row, float *out)
{
    const size_t strip_bytes = te_tile_strip_bytes(tiles->kind, tiles->columns);
    if (tiles->kind == TE_F16 || tiles->kind == TE_F32) {
        const uint8_t *strip = tiles->data + (size_t)(row / TE_FLOAT_ROWS) * strip_bytes;
        const int32_t lane = row % TE_FLOAT_ROWS;
        for (int32_t i = 0; i < tiles->columns; i++) {
            if (tiles->kind == TE_F32)
                out[i] = ((const float *)strip)[i * TE_FLOAT_ROWS + lane];
            else
                out[i] = te_half_to_float(((const uint16_t *)strip)[i * TE_FLOAT_ROWS + lane]);
        }
        return;
    }
    const uint8_t *tile = tiles->data + (size_t)(row / TE_TILE_ROWS) * strip_bytes;
    const int32_t lane = row % TE_TILE_ROWS;
    float unit = 1.0f;
    if (tiles->kind == TE_INT4) {
        memcpy(&unit, tile + 4 * lane, 4);
        tile += TE_INT4_UNITS_BYTES;
    }
    for (int32_t group = 0; group < tiles->groups; group++, tile += te_tile_bytes(tiles->kind)) {
        const uint8_t *bytes = tile + te_tile_header_bytes(tiles->kind) + 4 * lane;
        const int32_t count = TE_MIN(TE_GROUP, tiles->columns - group * TE_GROUP);
        int16_t pair[2];
        uint16_t halves[2] = {0};
        memcpy(pair, tile + 4 * lane, 4);
        memcpy(halves, tile + 2 * lane, 2);
        if (tiles->kind == TE_INT8_AFFINE)
            memcpy(halves + 1, tile + 16 + 2 * lane, 2);
        const float scale = te_half_to_float(halves[0]), min = te_half_to_float(halves[1]);
        for (int32_t i = 0; i < count; i++) {
            float *value = out + group * TE_GROUP + i;
            if (tiles->kind == TE_INT4) {
                const int32_t q = (bytes[(i % 16) / 4 * 32 + i % 4] >> (i < 16 ? 0 : 4) & 15) - 8;
                *value = unit * (float)(pair[0] * q + 8 * pair[1]);
            } else {
                const float scaled = scale * (float)((int32_t)bytes[i / 4 * 32 + i % 4] - 128);
                *value = tiles->kind == TE_INT8 ? scaled : scaled + min;
            }
        }
    }
}

#endif
