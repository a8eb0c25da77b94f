/* Packs weight matrices into tiles (te.h): from GGUF's quantized blocks, whose numbers are kept, or from floats.
 *
 * Block layouts are those of ggml's ggml-common.h. Q5_K holds products of two numbers as scales; these are
 * rounded to halves here, and what belongs to 4 bits to multiples of a row's unit. Q6_K has a scale for 16 columns; its
 * values are rounded again to 8 bits with one for 32. */
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
    GGML_BF16 = 30,
    TE_Q8_1 = 1000 /* our own: half scale, half minimum, 32 whole numbers of 8 bits */
};

/* 32 values of one row: value = scale * q + min, where q is the byte for INT4 (0 to 15), and the byte less 128 for 8
 * bits: bytes are what tiles hold, so most types need no arithmetic. */
typedef struct {
    uint8_t bytes[TE_GROUP];
    float scale; /* of 8 bits, a half's value */
    float min;
} Group;

static float half_at(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, 2);
    return te_half_to_float(bits);
}

static void unpack_nibbles(const uint8_t *bytes, Group *group)
{
    for (int i = 0; i < 16; i++) {
        group->bytes[i] = bytes[i] & 15;
        group->bytes[i + 16] = bytes[i] >> 4;
    }
}

static void add_fifth_bits(const uint8_t *bytes, Group *group)
{
    uint32_t bits;
    memcpy(&bits, bytes, 4);
    for (int i = 0; i < TE_GROUP; i++)
        group->bytes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

static void add_to_bytes(Group *group, uint8_t offset)
{
    for (int i = 0; i < TE_GROUP; i++)
        group->bytes[i] = (uint8_t)(group->bytes[i] + offset);
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

/* To nearest, ties to even, for what is below 2^22: rintf is a call on processors without an instruction for it. */
static float rounded(float value)
{
    return (value + 0x1.8p23f) - 0x1.8p23f;
}

/* As whole numbers, the bits of magnitudes have their order, and infinities and NaN come last. */
static int32_t magnitude_bits(float value)
{
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits & 0x7fffffff;
}

/* Of TE_GROUP floats; NaN where one is not finite. */
static float largest_magnitude(const float *values)
{
    int32_t most = 0;
    float largest;
    for (int i = 0; i < TE_GROUP; i++)
        most = TE_MAX(most, magnitude_bits(values[i]));
    memcpy(&largest, &most, 4);
    return isfinite(largest) ? largest : NAN;
}

/* Floats to 8 bits and a scale. */
static void requantize(Group *group, const float *values)
{
    const float scale = te_half_to_float(te_float_to_half(largest_magnitude(values) / 127.0f));
    const float inverse = scale > 0.0f && isfinite(scale) ? 1.0f / scale : 0.0f;
    group->min = 0.0f;
    group->scale = scale;
    if (inverse == 0.0f) {
        memset(group->bytes, 128, TE_GROUP);
        return;
    }
    for (int i = 0; i < TE_GROUP; i++) {
        float q = TE_MAX(TE_MIN(values[i] * inverse, 127.0f), -127.0f);
        group->bytes[i] = (uint8_t)((int32_t)rounded(q) + 128);
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
        add_to_bytes(group, 128 - 16);
        break;
    case GGML_Q5_1:
        block = row + (size_t)index * 24;
        group->scale = half_at(block);
        group->min = half_at(block + 2);
        unpack_nibbles(block + 8, group);
        add_fifth_bits(block + 4, group);
        add_to_bytes(group, 128);
        break;
    case GGML_Q8_0:
        block = row + (size_t)index * 34;
        group->scale = half_at(block);
        memcpy(group->bytes, block + 2, TE_GROUP);
        add_to_bytes(group, 128);
        break;
    case TE_Q8_1:
        block = row + (size_t)index * 36;
        group->scale = half_at(block);
        group->min = half_at(block + 2);
        memcpy(group->bytes, block + 4, TE_GROUP);
        add_to_bytes(group, 128);
        break;
    case GGML_Q4_K:
    case GGML_Q5_K: {
        const int is_five = type == GGML_Q5_K, in_block = index % 8;
        block = row + (size_t)(index / 8) * (is_five ? 176 : 144);
        k_scale_and_min(block, in_block, group);
        const uint8_t *nibbles = block + (is_five ? 48 : 16) + 32 * (in_block / 2);
        for (int i = 0; i < TE_GROUP; i++) {
            group->bytes[i] = in_block % 2 ? nibbles[i] >> 4 : nibbles[i] & 15;
            if (is_five)
                group->bytes[i] = (uint8_t)(group->bytes[i] + ((block[16 + i] >> in_block & 1) << 4) + 128);
        }
        break;
    }
    default:
        unpack_q6_k(row + (size_t)(index / 8) * 210, index % 8, group);
    }
}

/* Row `lane` of a tile of 8 bits: four columns are one word. */
static void store_group8(int32_t kind, uint8_t *tile, int lane, const Group *group)
{
    const uint16_t scale = te_float_to_half(group->scale), min = te_float_to_half(group->min);
    memcpy(tile + 2 * lane, &scale, 2);
    if (kind == TE_INT8_AFFINE)
        memcpy(tile + 16 + 2 * lane, &min, 2);
    uint8_t *bytes = tile + te_tile_header_bytes(kind) + 4 * lane;
    for (int j = 0; j < 8; j++)
        memcpy(bytes + 32 * j, group->bytes + 4 * j, 4);
}

static void store_group4(uint8_t *tile, int lane, const Group *group)
{
    uint8_t *bytes = tile + te_tile_header_bytes(TE_INT4) + 4 * lane;
    for (int j = 0; j < 4; j++) {
        uint32_t word, high;
        memcpy(&word, group->bytes + 4 * j, 4);
        memcpy(&high, group->bytes + 16 + 4 * j, 4);
        word |= high << 4;
        memcpy(bytes + 32 * j, &word, 4);
    }
}

/* Row `lane` of a strip of INT4: its unit, and its groups' scales and minimums in it. The largest number that products
 * make of these fits into 32 bits: 8 * 127 * 32 * (limit + 1) for each of both. */
static void store_int4_scales(uint8_t *strip, int lane, int32_t groups, const float *scales, float *mins)
{
    int32_t most = 0;
    for (int32_t g = 0; g < groups; g++) {
        mins[g] = (mins[g] + 8.0f * scales[g]) * 0.125f;
        most = TE_MAX(most, TE_MAX(magnitude_bits(scales[g]), magnitude_bits(mins[g])));
    }
    float largest;
    memcpy(&largest, &most, 4);
    const float unit = isfinite(largest) ? largest / TE_INT4_LIMIT : NAN;
    memcpy(strip + 4 * lane, &unit, 4);
    if (!(unit > 1e-34f)) /* all of it is zero, or nothing is a number */
        return;
    const float inverse = TE_INT4_LIMIT / largest;
    uint8_t *pair = strip + TE_INT4_UNITS_BYTES + 4 * lane;
    for (int32_t g = 0; g < groups; g++, pair += te_tile_bytes(TE_INT4)) {
        const int16_t numbers[2] = {(int16_t)rounded(scales[g] * inverse), (int16_t)rounded(mins[g] * inverse)};
        memcpy(pair, numbers, 4);
    }
}

static void quantize_floats(int32_t kind, const float *values, Group *group)
{
    if (kind == TE_INT8) {
        requantize(group, values);
        return;
    }
    float lows[8], highs[8];
    memcpy(lows, values, sizeof lows);
    memcpy(highs, values, sizeof highs);
    for (int i = 8; i < TE_GROUP; i += 8)
        for (int j = 0; j < 8; j++) {
            lows[j] = TE_MIN(lows[j], values[i + j]);
            highs[j] = TE_MAX(highs[j], values[i + j]);
        }
    for (int j = 1; j < 8; j++) {
        lows[0] = TE_MIN(lows[0], lows[j]);
        highs[0] = TE_MAX(highs[0], highs[j]);
    }
    const float scale = isfinite(largest_magnitude(values)) ? (highs[0] - lows[0]) / 15.0f : NAN, min = lows[0];
    group->scale = scale;
    group->min = min;
    if (!(scale > 0.0f)) {
        memset(group->bytes, 0, TE_GROUP);
        return;
    }
    for (int i = 0; i < TE_GROUP; i++)
        group->bytes[i] = (uint8_t)(int32_t)rounded(TE_MAX(TE_MIN((values[i] - min) / scale, 15.0f), 0.0f));
}

/* The floats of group `index`; those behind the last column repeat it, since activations are 0 there. */
static void plain_group(int32_t type, const uint8_t *row, int32_t index, int32_t columns, float *values)
{
    const int32_t first = index * TE_GROUP, count = TE_MIN(TE_GROUP, columns - first);
    if (type == GGML_F32) {
        memcpy(values, row + 4 * (size_t)first, 4 * (size_t)count);
    } else if (type == GGML_BF16) {
        uint16_t upper[TE_GROUP] = {0};
        memcpy(upper, row + 2 * (size_t)first, 2 * (size_t)count);
        for (int i = 0; i < TE_GROUP; i++) {
            uint32_t bits = (uint32_t)upper[i] << 16;
            memcpy(values + i, &bits, 4);
        }
    } else {
        for (int i = 0; i < count; i++)
            values[i] = half_at(row + 2 * (size_t)(first + i));
    }
    for (int i = count; i < TE_GROUP; i++)
        values[i] = values[count - 1];
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

static void pack_quantized_strip(const Packing *p, int32_t strip, uint8_t *out)
{
    const int32_t groups = (p->columns + TE_GROUP - 1) / TE_GROUP;
    const int is_plain = p->type == GGML_F32 || p->type == GGML_F16 || p->type == GGML_BF16;
    const size_t tile_bytes = (size_t)te_tile_bytes(p->kind);
    uint8_t *tiles = out + (p->kind == TE_INT4 ? TE_INT4_UNITS_BYTES : 0);
    float scales[groups], mins[groups];
    for (int lane = 0; lane < TE_TILE_ROWS && strip * TE_TILE_ROWS + lane < p->rows; lane++) {
        const uint8_t *row = p->raw + (size_t)(strip * TE_TILE_ROWS + lane) * p->row_bytes;
        for (int32_t index = 0; index < groups; index++) {
            Group group;
            if (is_plain) {
                float values[TE_GROUP];
                plain_group(p->type, row, index, p->columns, values);
                quantize_floats(p->kind, values, &group);
            } else {
                unpack_group(p->type, row, index, &group);
            }
            if (p->kind == TE_INT4)
                store_group4(tiles + (size_t)index * tile_bytes, lane, &group);
            else
                store_group8(p->kind, tiles + (size_t)index * tile_bytes, lane, &group);
            scales[index] = group.scale;
            mins[index] = group.min;
        }
        if (p->kind == TE_INT4)
            store_int4_scales(out, lane, groups, scales, mins);
    }
}

static void pack_float_strip(const Packing *p, int32_t strip, uint8_t *out)
{
    for (int lane = 0; lane < TE_FLOAT_ROWS && strip * TE_FLOAT_ROWS + lane < p->rows; lane++) {
        const uint8_t *row = p->raw + (size_t)(strip * TE_FLOAT_ROWS + lane) * p->row_bytes;
        for (int32_t first = 0; first < p->columns; first += TE_GROUP) {
            const int32_t count = TE_MIN(TE_GROUP, p->columns - first);
            const size_t place = (size_t)first * TE_FLOAT_ROWS + (size_t)lane;
            float values[TE_GROUP];
            if (p->kind == TE_F16 && p->type == GGML_F16) {
                for (int i = 0; i < count; i++)
                    memcpy(out + 2 * (place + (size_t)i * TE_FLOAT_ROWS), row + 2 * (size_t)(first + i), 2);
                continue;
            }
            plain_group(p->type, row, first / TE_GROUP, p->columns, values);
            for (int i = 0; i < count; i++) {
                const size_t at = place + (size_t)i * TE_FLOAT_ROWS;
                const uint16_t half = p->kind == TE_F16 ? te_float_to_half(values[i]) : 0;
                if (p->kind == TE_F16)
                    memcpy(out + 2 * at, &half, 2);
                else
                    memcpy(out + 4 * at, values + i, 4);
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

/* Quantized types go to the kind that holds them (Q4: INT4; Q8_0, Q5_0, Q6_K: INT8; Q5_1, Q5_K, TE_Q8_1:
 * INT8_AFFINE), plain ones to INT4, INT8, F16 or F32. `pool` may be null. */
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
