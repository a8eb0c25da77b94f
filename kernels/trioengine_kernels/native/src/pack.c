/* Packs weight matrices into tiles (te.h): from GGUF's quantized blocks, whose numbers are kept, or from floats.
 *
 * Block layouts are those of ggml's ggml-common.h. Q4_K and Q5_K hold products of two numbers as scales; these are
 * rounded to halves here. Q6_K has a scale for 16 columns; its values are rounded again to 8 bits with one for 32. */
#include <math.h>
#include <string.h>

#include "half.h"
#include "te.h"

/* Values are those of ggml_type. */
enum {
    GGML_F32 = 0,
    GGML_F16 = 1,
    GGML_Q4_0 = 2,
    GGML_Q4_1 = 3,
    GGML_Q5_0 = 6,
    GGML_Q5_1 = 7,
    GGML_Q8_0 = 8,
    GGML_Q4_K = 12,
    GGML_Q5_K = 13,
    GGML_Q6_K = 14,
    GGML_BF16 = 30
};

/* 32 values of one row: value = scale * q + min. */
typedef struct {
    int32_t q[TE_GROUP];
    float scale;
    float min;
} Group;

size_t te_tile_strip_bytes(int32_t kind, int32_t columns)
{
    size_t groups = (size_t)(columns + TE_GROUP - 1) / TE_GROUP, width = (size_t)columns;
    switch (kind) {
    case TE_INT4:
        return groups * 160;
    case TE_INT8:
        return groups * 272;
    case TE_INT8_AFFINE:
        return groups * 288;
    case TE_F16:
        return width * TE_FLOAT_ROWS * 2;
    default:
        return width * TE_FLOAT_ROWS * 4;
    }
}

static float half_at(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    return te_half_to_float(bits);
}

static void unpack_nibbles(const uint8_t *bytes, Group *group)
{
    for (int i = 0; i < 16; i++) {
        group->q[i] = bytes[i] & 15;
        group->q[i + 16] = bytes[i] >> 4;
    }
}

static void add_fifth_bits(const uint8_t *bytes, Group *group)
{
    uint32_t bits;
    memcpy(&bits, bytes, 4);
    for (int i = 0; i < TE_GROUP; i++)
        group->q[i] |= (int32_t)(bits >> i & 1) << 4;
}

/* The six-bit scale and minimum of group `index` of a Q4_K or Q5_K block. */
static void k_scale_and_min(const uint8_t *block, int index, Group *group)
{
    const uint8_t *packed = block + 4;
    int scale, min;
    if (index < 4) {
        scale = packed[index] & 63;
        min = packed[index + 4] & 63;
    } else {
        scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6 << 4);
        min = packed[index + 4] >> 4 | (packed[index] >> 6 << 4);
    }
    group->scale = half_at(block) * (float)scale;
    group->min = -half_at(block + 2) * (float)min;
}

/* Whole numbers times one scale to 8 bits with another. */
static void requantize(Group *group, const float *values)
{
    float largest = 0.0f;
    int is_finite = 1;
    for (int i = 0; i < TE_GROUP; i++) {
        is_finite &= isfinite(values[i]) != 0;
        largest = TE_MAX(largest, fabsf(values[i]));
    }
    group->min = 0.0f;
    group->scale = is_finite ? te_half_to_float(te_float_to_half(largest / 127.0f)) : NAN;
    float inverse = group->scale > 0.0f && isfinite(group->scale) ? 1.0f / group->scale : 0.0f;
    for (int i = 0; i < TE_GROUP; i++) {
        float q = inverse > 0.0f ? rintf(values[i] * inverse) : 0.0f;
        group->q[i] = (int32_t)TE_MAX(TE_MIN(q, 127.0f), -127.0f);
    }
}

static void unpack_q6_k(const uint8_t *block, int index, Group *group)
{
    const int half = index / 4, quarter = index % 4;
    const uint8_t *low = block + 64 * half + 32 * (quarter & 1), *high = block + 128 + 32 * half;
    const int8_t *scales = (const int8_t *)block + 192 + 8 * half + 2 * quarter;
    const float factor = half_at(block + 208);
    float values[TE_GROUP];
    for (int i = 0; i < TE_GROUP; i++) {
        int nibble = quarter < 2 ? low[i] & 15 : low[i] >> 4;
        int q = (nibble | (high[i] >> 2 * quarter & 3) << 4) - 32;
        values[i] = factor * (float)(q * scales[i / 16]);
    }
    requantize(group, values);
}

static void unpack_group(int32_t type, const uint8_t *row, int32_t index, Group *group)
{
    const uint8_t *block;
    group->min = 0.0f;
    switch (type) {
    case GGML_Q4_0:
        block = row + (size_t)index * 18;
        group->scale = half_at(block);
        group->min = -8.0f * group->scale;
        unpack_nibbles(block + 2, group);
        break;
    case GGML_Q4_1:
        block = row + (size_t)index * 20;
        group->scale = half_at(block);
        group->min = half_at(block + 2);
        unpack_nibbles(block + 4, group);
        break;
    case GGML_Q5_0:
        block = row + (size_t)index * 22;
        group->scale = half_at(block);
        unpack_nibbles(block + 6, group);
        add_fifth_bits(block + 2, group);
        for (int i = 0; i < TE_GROUP; i++)
            group->q[i] -= 16;
        break;
    case GGML_Q5_1:
        block = row + (size_t)index * 24;
        group->scale = half_at(block);
        group->min = half_at(block + 2);
        unpack_nibbles(block + 8, group);
        add_fifth_bits(block + 4, group);
        break;
    case GGML_Q8_0:
        block = row + (size_t)index * 34;
        group->scale = half_at(block);
        for (int i = 0; i < TE_GROUP; i++)
            group->q[i] = (int8_t)block[2 + i];
        break;
    case GGML_Q4_K:
    case GGML_Q5_K: {
        const int is_five = type == GGML_Q5_K, in_block = index % 8;
        block = row + (size_t)(index / 8) * (is_five ? 176 : 144);
        k_scale_and_min(block, in_block, group);
        const uint8_t *nibbles = block + (is_five ? 48 : 16) + 32 * (in_block / 2);
        for (int i = 0; i < TE_GROUP; i++) {
            group->q[i] = in_block % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
            if (is_five)
                group->q[i] |= (block[16 + i] >> in_block & 1) << 4;
        }
        break;
    }
    default:
        unpack_q6_k(row + (size_t)(index / 8) * 210, index % 8, group);
    }
}

/* Row `lane` of a tile. */
static void store_group(int32_t kind, uint8_t *tile, int lane, const Group *group)
{
    uint16_t half = te_float_to_half(group->scale);
    memcpy(tile + 2 * lane, &half, 2);
    uint8_t *bytes = tile + 16;
    if (kind != TE_INT8) {
        half = te_float_to_half(group->min);
        memcpy(tile + 16 + 2 * lane, &half, 2);
        bytes = tile + 32;
    }
    for (int i = 0; i < TE_GROUP; i++) {
        int place = i % 16 / 4 * 32 + 4 * lane + i % 4;
        if (kind == TE_INT4 && i < 16)
            bytes[place] = (uint8_t)group->q[i];
        else if (kind == TE_INT4)
            bytes[place] |= (uint8_t)(group->q[i] << 4);
        else
            bytes[i / 4 * 32 + 4 * lane + i % 4] = (uint8_t)(group->q[i] + 128);
    }
}

static void quantize_floats(int32_t kind, const float *values, Group *group)
{
    if (kind == TE_INT8) {
        requantize(group, values);
        return;
    }
    float low = values[0], high = values[0];
    int is_finite = 1;
    for (int i = 0; i < TE_GROUP; i++) {
        is_finite &= isfinite(values[i]) != 0;
        low = TE_MIN(low, values[i]);
        high = TE_MAX(high, values[i]);
    }
    group->scale = is_finite ? te_half_to_float(te_float_to_half((high - low) / 15.0f)) : NAN;
    group->min = te_half_to_float(te_float_to_half(low));
    for (int i = 0; i < TE_GROUP; i++) {
        float q = group->scale > 0.0f ? rintf((values[i] - group->min) / group->scale) : 0.0f;
        group->q[i] = q > 0.0f ? (int32_t)TE_MIN(q, 15.0f) : 0;
    }
}

static float plain_value(int32_t type, const uint8_t *row, int32_t column)
{
    uint32_t bits = 0;
    float value;
    if (type == GGML_F16)
        return half_at(row + 2 * (size_t)column);
    if (type == GGML_BF16)
        memcpy((uint8_t *)&bits + 2, row + 2 * (size_t)column, 2); /* little-endian */
    else
        memcpy(&bits, row + 4 * (size_t)column, 4);
    memcpy(&value, &bits, 4);
    return value;
}

typedef struct {
    int32_t type;
    int32_t kind;
    const uint8_t *raw;
    size_t row_bytes;
    int32_t rows;
    int32_t columns;
    uint8_t *out;
} Packing;

static void pack_quantized_strip(const Packing *p, int32_t strip, uint8_t *tile)
{
    const int32_t groups = (p->columns + TE_GROUP - 1) / TE_GROUP;
    const int is_plain = p->type == GGML_F32 || p->type == GGML_F16 || p->type == GGML_BF16;
    const size_t tile_bytes = te_tile_strip_bytes(p->kind, TE_GROUP);
    for (int lane = 0; lane < TE_TILE_ROWS && strip * TE_TILE_ROWS + lane < p->rows; lane++) {
        const uint8_t *row = p->raw + (size_t)(strip * TE_TILE_ROWS + lane) * p->row_bytes;
        for (int32_t index = 0; index < groups; index++) {
            Group group;
            if (is_plain) {
                float values[TE_GROUP];
                for (int32_t i = 0; i < TE_GROUP; i++) {
                    int32_t column = index * TE_GROUP + i;
                    /* The activations behind the last column are 0: its value may be repeated. */
                    values[i] = plain_value(p->type, row, TE_MIN(column, p->columns - 1));
                }
                quantize_floats(p->kind, values, &group);
            } else {
                unpack_group(p->type, row, index, &group);
            }
            store_group(p->kind, tile + (size_t)index * tile_bytes, lane, &group);
        }
    }
}

static void pack_float_strip(const Packing *p, int32_t strip, uint8_t *out)
{
    for (int lane = 0; lane < TE_FLOAT_ROWS && strip * TE_FLOAT_ROWS + lane < p->rows; lane++) {
        const uint8_t *row = p->raw + (size_t)(strip * TE_FLOAT_ROWS + lane) * p->row_bytes;
        for (int32_t column = 0; column < p->columns; column++) {
            float value = plain_value(p->type, row, column);
            size_t place = (size_t)column * TE_FLOAT_ROWS + (size_t)lane;
            if (p->kind == TE_F16) {
                uint16_t half = te_float_to_half(value);
                memcpy(out + 2 * place, &half, 2);
            } else {
                memcpy(out + 4 * place, &value, 4);
            }
        }
    }
}

static void pack_strip(void *context, int32_t op, int32_t strip, int32_t thread)
{
    const Packing *p = context;
    const size_t strip_bytes = te_tile_strip_bytes(p->kind, p->columns);
    uint8_t *out = p->out + (size_t)strip * strip_bytes;
    (void)op;
    (void)thread;
    memset(out, 0, strip_bytes); /* rows behind the last: scale 0 */
    if (p->kind == TE_F16 || p->kind == TE_F32)
        pack_float_strip(p, strip, out);
    else
        pack_quantized_strip(p, strip, out);
}

TE_API size_t te_packed_bytes(int32_t kind, int32_t rows, int32_t columns)
{
    int32_t per_strip = kind == TE_F16 || kind == TE_F32 ? TE_FLOAT_ROWS : TE_TILE_ROWS;
    return (size_t)((rows + per_strip - 1) / per_strip) * te_tile_strip_bytes(kind, columns);
}

/* Quantized types go to the kind that holds them (Q4: INT4, Q8_0, Q5_0, Q6_K: INT8, Q5_1, Q5_K: INT8_AFFINE), plain
 * ones to INT4, INT8, F16 or F32. `pool` may be null. */
TE_API void te_pack(TePool *pool, int32_t type, const uint8_t *raw, int64_t row_bytes, int32_t rows, int32_t columns,
                    int32_t kind, uint8_t *out)
{
    Packing packing = {type, kind, raw, (size_t)row_bytes, rows, columns, out};
    int32_t per_strip = kind == TE_F16 || kind == TE_F32 ? TE_FLOAT_ROWS : TE_TILE_ROWS;
    int32_t strips = (rows + per_strip - 1) / per_strip;
    if (pool)
        te_pool_run(pool, pack_strip, &packing, 1, &strips);
    else
        for (int32_t strip = 0; strip < strips; strip++)
            pack_strip(&packing, 0, strip, 0);
}
