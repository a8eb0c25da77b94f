/* Matrix products with packed weights.
 *
 * Each output is one sequence of operations, whatever else is computed beside it: for tiles of 8 bits, groups in order
 * of k, each an exact integer dot product, then
 *     sum = fma(float(dot), scale_w * scale_x, sum);  sum = fma(min_w, sum_x, sum);
 * for INT4, whose scales and minimums are integers,
 *     sum = fma(float(scale_w * dot + min_w * eight_sums), scale_x, sum),
 * times the row's unit in the end; for float tiles, one fma per column in order of k. The bias is added last. Blocks of
 * tokens and strips only decide how often a tile is loaded.
 *
 * Of INT4, `dot`, of nibbles less 8, fits into 16 bits, and so does 8 times the sum of the activations: one 32-bit number
 * holds both, since a group's `start` is what the sum of nibbles times activations begins with, and one instruction
 * multiplies its halves with the two integers of the tile. Where dot is below 0 it borrows one from the upper half:
 * eight_sums is one less there, an eighth of the least that a sum of activations can change by. */
#ifndef TE_PRODUCTS_H
#define TE_PRODUCTS_H

#include "simd.h"
#include "te.h"

/* Tokens that share a tile in registers. Elsewhere one at a time: less to compile. */
#if defined(__AVX2__) || defined(__aarch64__)
#define TE_MAX_TOKENS 4
#else
#define TE_MAX_TOKENS 1
#endif

#define CACHED_BYTES (256 << 10)

/* ---- one group: 8 rows x 32 columns as 8 vectors of 8 rows x 4 columns ---- */

#if defined(__AVX2__)
typedef __m256i Quad;

#if defined(__AVX512VNNI__)
#define TE_DPBUSD _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define TE_DPBUSD _mm256_dpbusd_avx_epi32
#endif

TE_INLINE __m256i four_columns(const TeGroup *x, int j)
{
    int32_t bytes;
    memcpy(&bytes, x->q + 4 * j, 4);
    return _mm256_set1_epi32(bytes);
}

TE_INLINE void load_quads(int kind, const uint8_t *bytes, Quad w[8])
{
    if (kind == TE_INT4) {
        const __m256i low = _mm256_set1_epi8(15);
        for (int j = 0; j < 4; j++) {
            __m256i both = _mm256_loadu_si256((const __m256i *)(bytes + 32 * j));
            w[j] = _mm256_and_si256(both, low);
            w[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        }
        return;
    }
    for (int j = 0; j < 8; j++) {
        w[j] = _mm256_loadu_si256((const __m256i *)(bytes + 32 * j));
#if !defined(TE_DPBUSD)
        w[j] = _mm256_xor_si256(w[j], _mm256_set1_epi8((char)0x80));
#endif
    }
}

TE_INLINE vi dot(int kind, const Quad w[8], const TeGroup *x)
{
#if defined(TE_DPBUSD)
    __m256i sum = _mm256_set1_epi32(kind == TE_INT4 ? x->start : x->offset);
    for (int j = 0; j < 8; j++)
        sum = TE_DPBUSD(sum, w[j], four_columns(x, j));
#else
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum;
    if (kind == TE_INT4) {
        /* No overflow: 8 * 2 * 15 * 127 = 30480. */
        __m256i pairs = _mm256_maddubs_epi16(w[0], four_columns(x, 0));
        for (int j = 1; j < 8; j++)
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[j], four_columns(x, j)));
        sum = _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), _mm256_set1_epi32(x->start));
    } else {
        /* Magnitudes times signed activations; no overflow: 2 * 128 * 127 = 32512. */
        sum = _mm256_setzero_si256();
        for (int j = 0; j < 8; j++) {
            __m256i signed_x = _mm256_sign_epi8(four_columns(x, j), w[j]);
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), signed_x);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
#endif
    return (vi)sum;
}

TE_INLINE vi multiply_halves(vi a, vi b)
{
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

#elif defined(__ARM_FEATURE_DOTPROD)
typedef struct {
    int8x16_t low, high;
} Quad;

TE_INLINE void load_quads(int kind, const uint8_t *bytes, Quad w[8])
{
    if (kind == TE_INT4) {
        for (int j = 0; j < 4; j++) {
            uint8x16_t first = vld1q_u8(bytes + 32 * j), second = vld1q_u8(bytes + 32 * j + 16);
            w[j].low = vreinterpretq_s8_u8(vandq_u8(first, vdupq_n_u8(15)));
            w[j].high = vreinterpretq_s8_u8(vandq_u8(second, vdupq_n_u8(15)));
            w[j + 4].low = vreinterpretq_s8_u8(vshrq_n_u8(first, 4));
            w[j + 4].high = vreinterpretq_s8_u8(vshrq_n_u8(second, 4));
        }
        return;
    }
    for (int j = 0; j < 8; j++) {
        w[j].low = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(bytes + 32 * j), vdupq_n_u8(0x80)));
        w[j].high = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(bytes + 32 * j + 16), vdupq_n_u8(0x80)));
    }
}

TE_INLINE vi dot(int kind, const Quad w[8], const TeGroup *x)
{
    int32x4_t low = vdupq_n_s32(kind == TE_INT4 ? x->start : 0), high = low;
    for (int j = 0; j < 8; j++) {
        int32_t bytes;
        memcpy(&bytes, x->q + 4 * j, 4);
        int8x16_t columns = vreinterpretq_s8_s32(vdupq_n_s32(bytes));
        low = vdotq_s32(low, w[j].low, columns);
        high = vdotq_s32(high, w[j].high, columns);
    }
    int32x4_t both[2] = {low, high};
    vi result;
    memcpy(&result, both, sizeof result);
    return result;
}

TE_INLINE vi multiply_halves(vi a, vi b)
{
    int16x8_t x[2], y[2];
    int32x4_t sums[2];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 2; i++)
        sums[i] = vpaddq_s32(vmull_s16(vget_low_s16(x[i]), vget_low_s16(y[i])), vmull_high_s16(x[i], y[i]));
    vi result;
    memcpy(&result, sums, sizeof result);
    return result;
}

#else
typedef struct {
    int8_t values[32];
} Quad;

TE_INLINE void load_quads(int kind, const uint8_t *bytes, Quad w[8])
{
    for (int j = 0; j < (kind == TE_INT4 ? 4 : 8); j++)
        for (int i = 0; i < 32; i++) {
            uint8_t byte = bytes[32 * j + i];
            if (kind == TE_INT4) {
                w[j].values[i] = (int8_t)(byte & 15);
                w[j + 4].values[i] = (int8_t)(byte >> 4);
            } else {
                w[j].values[i] = (int8_t)(byte ^ 0x80);
            }
        }
}

TE_INLINE vi dot(int kind, const Quad w[8], const TeGroup *x)
{
    vi sums = vi_set(kind == TE_INT4 ? x->start : 0);
    for (int j = 0; j < 8; j++)
        for (int row = 0; row < 8; row++)
            for (int i = 0; i < 4; i++)
                sums[row] += (int32_t)w[j].values[4 * row + i] * (int32_t)x->q[4 * j + i];
    return sums;
}

TE_INLINE vi multiply_halves(vi a, vi b)
{
    vi result;
    for (int i = 0; i < 8; i++)
        result[i] = (int32_t)(int16_t)a[i] * (int16_t)b[i] + (a[i] >> 16) * (b[i] >> 16);
    return result;
}
#endif

/* ---- a strip and a block of tokens, their number a constant after inlining ---- */

TE_INLINE void store_strip(float *out, vf value, const float *bias, int32_t row, int32_t rows)
{
    if (row + TE_TILE_ROWS <= rows) {
        vf_store(out + row, bias ? value + vf_load(bias + row) : value);
        return;
    }
    for (int32_t i = 0; row + i < rows; i++)
        out[row + i] = bias ? value[i] + bias[row + i] : value[i];
}

TE_INLINE void fetch_ahead(TeAhead *ahead)
{
    for (int32_t i = 0; i < ahead->num_lines && ahead->piece < ahead->num_pieces; i++) {
        __builtin_prefetch(ahead->base + ahead->offsets[ahead->piece] + ahead->place, 0, 2);
        ahead->place += 64;
        if (ahead->place >= ahead->piece_bytes) {
            ahead->place = 0;
            ahead->piece++;
        }
    }
}

TE_INLINE void quantized_block(int kind, int num_tokens, const TeTiles *tiles, const TeGroup *x, const float *bias,
                               float *out, int64_t out_stride, int32_t strip, int32_t token, TeAhead *ahead)
{
    const int32_t groups = tiles->groups;
    const int header = te_tile_header_bytes(kind), tile_bytes = te_tile_bytes(kind);
    const uint8_t *strip_start = tiles->data + (size_t)strip * te_tile_strip_bytes(kind, tiles->columns);
    const uint8_t *tile = strip_start + (kind == TE_INT4 ? TE_INT4_UNITS_BYTES : 0);
    const TeGroup *rows = x + (int64_t)token * groups;
    vf sums[TE_MAX_TOKENS];
    for (int t = 0; t < num_tokens; t++)
        sums[t] = vf_zero();
    for (int32_t group = 0; group < groups; group++, tile += tile_bytes, rows++) {
        Quad w[8];
        const vi pairs = vi_load(tile); /* of INT4 */
        const vf scale = vf_load_half((const uint16_t *)tile);
        const vf min = kind == TE_INT8_AFFINE ? vf_load_half((const uint16_t *)tile + TE_TILE_ROWS) : vf_zero();
        load_quads(kind, tile + header, w);
        /* Measured: with little to compute the processor looks ahead by itself, and hints disturb it. */
        for (int line = 0; num_tokens >= 4 && line < tile_bytes; line += 64)
            __builtin_prefetch(tile + 2048 + line);
        if (num_tokens >= 4)
            fetch_ahead(ahead);
#pragma GCC unroll 4
        for (int t = 0; t < num_tokens; t++) {
            const TeGroup *xt = rows + (int64_t)t * groups;
            if (kind == TE_INT4) {
                const vi scaled = multiply_halves(dot(kind, w, xt), pairs);
                sums[t] = vf_fma(vf_from(scaled), vf_set(xt->scale), sums[t]);
                continue;
            }
            sums[t] = vf_fma(vf_from(dot(kind, w, xt)), scale * vf_set(xt->scale), sums[t]);
            if (kind == TE_INT8_AFFINE)
                sums[t] = vf_fma(min, vf_set(xt->sum), sums[t]);
        }
    }
    for (int t = 0; t < num_tokens; t++) {
        if (kind == TE_INT4)
            sums[t] *= vf_load((const float *)strip_start);
        store_strip(out + (token + t) * out_stride, sums[t], bias, strip * TE_TILE_ROWS, tiles->rows);
    }
}

#if defined(__AVX512VNNI__)
/* ---- panels: the tiles of four strips, unpacked once for many tokens into vectors of 16 rows ---- */

#define PANEL_ROWS (TE_PANEL_STRIPS * TE_TILE_ROWS)
#define PANEL_HALVES 2
/* Measured: with so many groups and tokens a panel and its activations stay in the first cache. */
#define PANEL_GROUPS 12
#define PANEL_TOKENS 64
#define STREAMED_BYTES (4 << 20) /* results of at least so many bytes, such as logits, go past the caches */
#define PANEL_BLOCK 4 /* tokens that share a vector of weights; 16 chains of sums, half of the registers */

typedef struct {
    uint8_t quads[PANEL_HALVES][8][64];
    float scale[PANEL_ROWS]; /* of INT4, pairs of integers */
    float min[PANEL_ROWS];   /* of INT8_AFFINE */
} __attribute__((aligned(64))) PanelTile;

TE_INLINE void unpack_tile(int kind, const uint8_t *tile, int strip, PanelTile *panel)
{
    Quad w[8];
    float *scale = panel->scale + strip * TE_TILE_ROWS;
    if (kind == TE_INT4)
        memcpy(scale, tile, TE_TILE_ROWS * 4);
    else
        vf_store(scale, vf_load_half((const uint16_t *)tile));
    if (kind == TE_INT8_AFFINE)
        vf_store(panel->min + strip * TE_TILE_ROWS, vf_load_half((const uint16_t *)tile + TE_TILE_ROWS));
    load_quads(kind, tile + te_tile_header_bytes(kind), w);
    for (int j = 0; j < 8; j++)
        _mm256_store_si256((__m256i *)(panel->quads[strip / 2][j] + strip % 2 * 32), w[j]);
}

/* sums[token][row] goes on over the panel's groups with the operations of quantized_block. Here all tokens go through
 * column after column: a broadcast serves 32 rows, and the dot products, each a chain of eight, advance together.
 * Meanwhile `num_next` strips of tiles are fetched, of which the next panel will be made, and what `ahead` says. */
TE_INLINE void panel_block(int kind, int num_tokens, const PanelTile *panel, int32_t num_groups, const TeGroup *x,
                           int64_t x_stride, float *sums, const uint8_t *next, size_t next_stride, int32_t num_next,
                           TeAhead *ahead)
{
    const int tile_bytes = te_tile_bytes(kind);
    __m512 acc[PANEL_BLOCK][PANEL_HALVES];
#pragma GCC unroll 4
    for (int t = 0; t < num_tokens; t++)
#pragma GCC unroll 2
        for (int h = 0; h < PANEL_HALVES; h++)
            acc[t][h] = _mm512_loadu_ps(sums + t * PANEL_ROWS + 16 * h);
    for (int32_t group = 0; group < num_groups; group++, x++, panel++, next += tile_bytes) {
        __m512i dots[PANEL_BLOCK][PANEL_HALVES];
#pragma GCC unroll 4
        for (int t = 0; t < num_tokens; t++)
#pragma GCC unroll 2
            for (int h = 0; h < PANEL_HALVES; h++)
                dots[t][h] = _mm512_set1_epi32(kind == TE_INT4 ? x[t * x_stride].start : x[t * x_stride].offset);
        for (int32_t strip = 0; strip < num_next; strip++)
            for (int line = 0; line < tile_bytes; line += 64)
                __builtin_prefetch(next + (size_t)strip * next_stride + line);
        fetch_ahead(ahead);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m512i low = _mm512_load_si512(panel->quads[0][j]), high = _mm512_load_si512(panel->quads[1][j]);
#pragma GCC unroll 4
            for (int t = 0; t < num_tokens; t++) {
                int32_t bytes;
                memcpy(&bytes, x[t * x_stride].q + 4 * j, 4);
                const __m512i columns = _mm512_set1_epi32(bytes);
                dots[t][0] = _mm512_dpbusd_epi32(dots[t][0], low, columns);
                dots[t][1] = _mm512_dpbusd_epi32(dots[t][1], high, columns);
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < num_tokens; t++) {
            const __m512 x_scale = _mm512_set1_ps(x[t * x_stride].scale), x_sum = _mm512_set1_ps(x[t * x_stride].sum);
#pragma GCC unroll 2
            for (int h = 0; h < PANEL_HALVES; h++) {
                if (kind == TE_INT4) {
                    const __m512i scaled = _mm512_madd_epi16(dots[t][h], _mm512_load_si512(panel->scale + 16 * h));
                    acc[t][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(scaled), x_scale, acc[t][h]);
                    continue;
                }
                const __m512 scale = _mm512_mul_ps(_mm512_load_ps(panel->scale + 16 * h), x_scale);
                acc[t][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t][h]), scale, acc[t][h]);
                if (kind == TE_INT8_AFFINE)
                    acc[t][h] = _mm512_fmadd_ps(_mm512_load_ps(panel->min + 16 * h), x_sum, acc[t][h]);
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < num_tokens; t++)
#pragma GCC unroll 2
        for (int h = 0; h < PANEL_HALVES; h++)
            _mm512_storeu_ps(sums + t * PANEL_ROWS + 16 * h, acc[t][h]);
}

/* Up to TE_PANEL_STRIPS strips and PANEL_TOKENS tokens. `after` are the strips that come next, or null. */
TE_INLINE void panel_product(int kind, const TeTiles *tiles, const TeGroup *x, const float *bias, float *out,
                             int64_t out_stride, int32_t strip, int32_t num_strips, int32_t first, int32_t count,
                             const uint8_t *after, size_t after_stride, TeAhead *ahead)
{
    PanelTile panel[PANEL_GROUPS];
    float sums[PANEL_TOKENS * PANEL_ROWS];
    const int32_t groups = tiles->groups, num_panels = (groups + PANEL_GROUPS - 1) / PANEL_GROUPS;
    const int32_t groups_per_panel = (groups + num_panels - 1) / num_panels;
    const size_t tile_bytes = (size_t)te_tile_bytes(kind), strip_bytes = te_tile_strip_bytes(kind, tiles->columns);
    const uint8_t *first_strip = tiles->data + (size_t)strip * strip_bytes;
    const uint8_t *tile = first_strip + (kind == TE_INT4 ? TE_INT4_UNITS_BYTES : 0);
    const int32_t fetched_per_block = count >= 4 * PANEL_BLOCK ? 1 : 2;
    memset(sums, 0, (size_t)count * PANEL_ROWS * sizeof(float));
    for (int32_t group = 0; group < groups; group += groups_per_panel) {
        const int32_t num_groups = TE_MIN(groups_per_panel, groups - group);
        for (int32_t s = 0; s < TE_PANEL_STRIPS; s++)
            for (int32_t g = 0; g < num_groups; g++)
                /* Where there are fewer strips the last one comes again: its sums are not used. */
                unpack_tile(kind, tile + (size_t)TE_MIN(s, num_strips - 1) * strip_bytes + (size_t)g * tile_bytes, s,
                            panel + g);
        const int is_last = group + groups_per_panel >= groups;
        tile += (size_t)num_groups * tile_bytes;
        const uint8_t *next = is_last ? after : tile;
        const size_t next_stride = is_last ? after_stride : strip_bytes;
        const TeGroup *columns = x + (int64_t)first * groups + group;
        for (int32_t token = 0, fetched = 0; token < count; fetched += fetched_per_block) {
            const int32_t num_next = next ? TE_MAX(0, TE_MIN(fetched_per_block, TE_PANEL_STRIPS - fetched)) : 0;
#define TE_TOKENS(n)                                                                                                   \
    panel_block(kind, n, panel, num_groups, columns + (int64_t)token * groups, groups, sums + token * PANEL_ROWS,      \
                next + (size_t)fetched * next_stride, next_stride, num_next, ahead);                                   \
    token += n
            if (count - token >= 4) {
                TE_TOKENS(4);
            } else if (count - token >= 2) {
                TE_TOKENS(2);
            } else {
                TE_TOKENS(1);
            }
#undef TE_TOKENS
        }
    }
    if (kind == TE_INT4)
        for (int32_t s = 0; s < num_strips; s++) {
            const vf units = vf_load((const float *)(first_strip + (size_t)s * strip_bytes));
            for (int32_t t = 0; t < count; t++) {
                float *rows = sums + t * PANEL_ROWS + s * TE_TILE_ROWS;
                vf_store(rows, vf_load(rows) * units);
            }
        }
    out += (int64_t)first * out_stride;
    float *first_out = out + strip * TE_TILE_ROWS;
    const int is_aligned = (uintptr_t)first_out % 64 == 0 && out_stride % 16 == 0;
    const int is_whole = num_strips == TE_PANEL_STRIPS && strip * TE_TILE_ROWS + PANEL_ROWS <= tiles->rows;
    const int64_t bytes = (int64_t)count * tiles->rows * (int64_t)sizeof(float);
    if (bytes >= STREAMED_BYTES && is_aligned && is_whole && !bias) {
        for (int32_t t = 0; t < count; t++)
            for (int32_t h = 0; h < PANEL_HALVES; h++)
                _mm512_stream_ps(first_out + t * out_stride + 16 * h, _mm512_loadu_ps(sums + t * PANEL_ROWS + 16 * h));
        _mm_sfence(); /* others may read them when they see that this chunk is done */
        return;
    }
    for (int32_t t = 0; t < count; t++)
        for (int32_t s = 0; s < num_strips; s++)
            store_strip(out + t * out_stride, vf_load(sums + t * PANEL_ROWS + s * TE_TILE_ROWS), bias,
                        (strip + s) * TE_TILE_ROWS, tiles->rows);
}
#endif

TE_INLINE void quantized_linear(int kind, const TeTiles *tiles, const TeGroup *x, const float *bias, float *out,
                                int64_t out_stride, int32_t first_strip, int32_t end_strip, int32_t first, int32_t end,
                                TeAhead *ahead)
{
    int32_t token = first;
#if defined(__AVX512VNNI__)
    const size_t strip_bytes = te_tile_strip_bytes(kind, tiles->columns);
    for (; end - token >= TE_PANEL_MIN_TOKENS; token = TE_MIN(token + PANEL_TOKENS, end))
        for (int32_t strip = first_strip; strip < end_strip; strip += TE_PANEL_STRIPS) {
            const int32_t following = strip + TE_PANEL_STRIPS, is_last = following >= end_strip;
            panel_product(kind, tiles, x, bias, out, out_stride, strip, TE_MIN(TE_PANEL_STRIPS, end_strip - strip),
                          token, TE_MIN(PANEL_TOKENS, end - token),
                          is_last ? ahead->tiles : tiles->data + (size_t)following * strip_bytes,
                          is_last ? ahead->strip_bytes : strip_bytes, ahead);
        }
#endif
    while (token < end) {
        int32_t count = end - token;
        /* One strip after the other: two at once would be two streams from memory, at half the speed (measured), and
         * one is enough to keep the processor busy, since the dot products of its groups do not wait for each other. */
#define TE_TOKENS(n)                                                                                                   \
    for (int32_t strip = first_strip; strip < end_strip; strip++)                                                      \
        quantized_block(kind, n, tiles, x, bias, out, out_stride, strip, token, ahead);                                \
    token += n
        if (TE_MAX_TOKENS >= 4 && count >= 4) {
            TE_TOKENS(4);
        } else if (TE_MAX_TOKENS >= 4 && count >= 2) {
            TE_TOKENS(2);
        } else {
            TE_TOKENS(1);
        }
#undef TE_TOKENS
    }
}

#define TE_QUANTIZED(name, kind)                                                                                       \
    static __attribute__((noinline)) void name(const TeTiles *tiles, const TeGroup *x, const float *bias, float *out,  \
                                               int64_t out_stride, int32_t first_strip, int32_t end_strip,             \
                                               int32_t first, int32_t end, TeAhead *ahead)                             \
    {                                                                                                                  \
        quantized_linear(kind, tiles, x, bias, out, out_stride, first_strip, end_strip, first, end, ahead);            \
    }
TE_QUANTIZED(linear_int4, TE_INT4)
TE_QUANTIZED(linear_int8, TE_INT8)
TE_QUANTIZED(linear_int8_affine, TE_INT8_AFFINE)
#undef TE_QUANTIZED

/* ---- float rows times halves or floats: weights, keys and values ---- */

TE_INLINE vf load_column(int is_half, const void *b, int64_t i)
{
    return is_half ? vf_load_half((const uint16_t *)b + i) : vf_load((const float *)b + i);
}

/* sums[row][16 w + c] += sum over k of a[row][k] * b[k * b_stride + w * b_width + c], one fma after the other. */
TE_INLINE void float_block(int is_half, int num_rows, int num_wide, const float *a, int64_t a_stride, const void *b,
                           int64_t b_stride, int64_t b_width, int32_t count, float *sums, int64_t sum_stride,
                           int64_t sum_width)
{
    vf acc[6][4][2];
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < num_wide; w++)
            for (int h = 0; h < 2; h++)
                acc[r][w][h] = vf_load(sums + r * sum_stride + w * sum_width + 8 * h);
    for (int32_t k = 0; k < count; k++) {
#pragma GCC unroll 4
        for (int w = 0; w < num_wide; w++) {
            vf low = load_column(is_half, b, k * b_stride + w * b_width);
            vf high = load_column(is_half, b, k * b_stride + w * b_width + 8);
#pragma GCC unroll 6
            for (int r = 0; r < num_rows; r++) {
                vf x = vf_set(a[r * a_stride + k]);
                acc[r][w][0] = vf_fma(x, low, acc[r][w][0]);
                acc[r][w][1] = vf_fma(x, high, acc[r][w][1]);
            }
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int w = 0; w < num_wide; w++)
            for (int h = 0; h < 2; h++)
                vf_store(sums + r * sum_stride + w * sum_width + 8 * h, acc[r][w][h]);
}

#if defined(__AVX512VNNI__)
/* float_block with pieces of 16 columns as vectors: the same operations. A weight serves all rows, a broadcast both
 * pieces, so that for 12 rows and two pieces the additions, not the loads, are what takes the time. */
TE_INLINE void wide_float_block(int is_half, int num_rows, int num_wide, const float *a, int64_t a_stride, const void *b,
                                int64_t b_stride, int64_t b_width, int32_t count, float *sums, int64_t sum_stride,
                                int64_t sum_width)
{
    __m512 acc[12][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
        for (int w = 0; w < num_wide; w++)
            acc[r][w] = _mm512_loadu_ps(sums + r * sum_stride + w * sum_width);
    for (int32_t k = 0; k < count; k++) {
        __m512 columns[2];
#pragma GCC unroll 2
        for (int w = 0; w < num_wide; w++) {
            const int64_t place = k * b_stride + w * b_width;
            columns[w] = is_half ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)b + place)))
                                 : _mm512_loadu_ps((const float *)b + place);
        }
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            const __m512 x = _mm512_set1_ps(a[r * a_stride + k]);
#pragma GCC unroll 2
            for (int w = 0; w < num_wide; w++)
                acc[r][w] = _mm512_fmadd_ps(x, columns[w], acc[r][w]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
        for (int w = 0; w < num_wide; w++)
            _mm512_storeu_ps(sums + r * sum_stride + w * sum_width, acc[r][w]);
}
#endif

/* The same for any number of rows and of 16-column pieces. */
TE_INLINE void float_blocks(int is_half, int32_t num_rows, int32_t num_wide, const float *a, int64_t a_stride,
                             const void *b, int64_t b_stride, int64_t b_width, int32_t count, float *sums,
                             int64_t sum_stride, int64_t sum_width)
{
    const size_t item = is_half ? 2 : 4;
#define TE_BLOCK(rows, wide)                                                                                           \
    float_block(is_half, rows, wide, a + r * a_stride, a_stride, (const char *)b + (size_t)w * (size_t)b_width * item, \
                b_stride, b_width, count, sums + r * sum_stride + w * sum_width, sum_stride, sum_width)
    for (int32_t r = 0; r < num_rows;) {
        int32_t rows = num_rows - r, w = 0;
#if defined(__AVX512VNNI__)
        if (rows >= 4) {
#define TE_WIDE(rows, wide)                                                                                            \
    wide_float_block(is_half, rows, wide, a + r * a_stride, a_stride,                                                  \
                     (const char *)b + (size_t)w * (size_t)b_width * item, b_stride, b_width, count,                   \
                     sums + r * sum_stride + w * sum_width, sum_stride, sum_width)
            if (rows >= 12) {
                for (; w + 2 <= num_wide; w += 2)
                    TE_WIDE(12, 2);
                for (; w < num_wide; w++)
                    TE_WIDE(12, 1);
                r += 12;
            } else if (rows >= 8) {
                for (; w + 2 <= num_wide; w += 2)
                    TE_WIDE(8, 2);
                for (; w < num_wide; w++)
                    TE_WIDE(8, 1);
                r += 8;
            } else {
                for (; w + 2 <= num_wide; w += 2)
                    TE_WIDE(4, 2);
                for (; w < num_wide; w++)
                    TE_WIDE(4, 1);
                r += 4;
            }
#undef TE_WIDE
            continue;
        }
#endif
        if (rows >= 6 && TE_MAX_TOKENS > 1) {
            for (; w < num_wide; w++)
                TE_BLOCK(6, 1);
            r += 6;
        } else if (rows >= 4 && TE_MAX_TOKENS > 1) {
            for (; w < num_wide; w++)
                TE_BLOCK(4, 1);
            r += 4;
        } else if (rows >= 3 && TE_MAX_TOKENS > 1) {
            for (; w + 2 <= num_wide; w += 2)
                TE_BLOCK(3, 2);
            for (; w < num_wide; w++)
                TE_BLOCK(3, 1);
            r += 3;
        } else if (rows >= 2 && TE_MAX_TOKENS > 1) {
            for (; w + 2 <= num_wide; w += 2)
                TE_BLOCK(2, 2);
            for (; w < num_wide; w++)
                TE_BLOCK(2, 1);
            r += 2;
        } else {
            for (; w + 4 <= num_wide && TE_MAX_TOKENS > 1; w += 4)
                TE_BLOCK(1, 4);
            for (; w < num_wide; w++)
                TE_BLOCK(1, 1);
            r += 1;
        }
    }
#undef TE_BLOCK
}

static __attribute__((noinline)) void half_product(int32_t num_rows, int32_t num_wide, const float *a,
                                                   int64_t a_stride, const void *b, int64_t b_stride, int64_t b_width,
                                                   int32_t count, float *sums, int64_t sum_stride, int64_t sum_width)
{
    float_blocks(1, num_rows, num_wide, a, a_stride, b, b_stride, b_width, count, sums, sum_stride, sum_width);
}

static __attribute__((noinline)) void single_product(int32_t num_rows, int32_t num_wide, const float *a,
                                                     int64_t a_stride, const void *b, int64_t b_stride,
                                                     int64_t b_width, int32_t count, float *sums, int64_t sum_stride,
                                                     int64_t sum_width)
{
    float_blocks(0, num_rows, num_wide, a, a_stride, b, b_stride, b_width, count, sums, sum_stride, sum_width);
}

TE_INLINE void float_linear(int is_half, const TeTiles *tiles, const float *x, const float *bias, float *out,
                            int64_t out_stride, int32_t first_strip, int32_t end_strip, int32_t first, int32_t end)
{
    enum { MAX_ROWS = 12, MAX_WIDE = 2, WIDTH = MAX_WIDE * TE_FLOAT_ROWS };
    float sums[MAX_ROWS * WIDTH];
    const size_t strip_bytes = te_tile_strip_bytes(tiles->kind, tiles->columns);
    for (int32_t token = first; token < end; token += MAX_ROWS) {
        const int32_t num_rows = TE_MIN(end - token, MAX_ROWS);
        /* For few rows memory is what takes the time, and two streams from it are slower than one. */
        const int32_t step = num_rows >= 4 ? MAX_WIDE : 1;
        for (int32_t strip = first_strip; strip < end_strip; strip += step) {
            const int32_t num_wide = TE_MIN(end_strip - strip, step);
            memset(sums, 0, sizeof sums);
            (is_half ? half_product : single_product)(
                num_rows, num_wide, x + (int64_t)token * tiles->columns, tiles->columns,
                tiles->data + (size_t)strip * strip_bytes, TE_FLOAT_ROWS, (int64_t)tiles->columns * TE_FLOAT_ROWS,
                tiles->columns, sums, WIDTH, TE_FLOAT_ROWS);
            for (int32_t r = 0; r < num_rows; r++)
                for (int32_t part = 0; part < 2 * num_wide; part++)
                    store_strip(out + (token + r) * out_stride, vf_load(sums + r * WIDTH + 8 * part), bias,
                                strip * TE_FLOAT_ROWS + part * TE_TILE_ROWS, tiles->rows);
        }
    }
}

static __attribute__((noinline)) void linear_f16(const TeTiles *tiles, const float *x, const float *bias, float *out,
                                                 int64_t out_stride, int32_t first_strip, int32_t end_strip,
                                                 int32_t first, int32_t end)
{
    float_linear(1, tiles, x, bias, out, out_stride, first_strip, end_strip, first, end);
}

static __attribute__((noinline)) void linear_f32(const TeTiles *tiles, const float *x, const float *bias, float *out,
                                                 int64_t out_stride, int32_t first_strip, int32_t end_strip,
                                                 int32_t first, int32_t end)
{
    float_linear(0, tiles, x, bias, out, out_stride, first_strip, end_strip, first, end);
}

static void linear_piece(const TeTiles *tiles, const void *x, const float *bias, float *out, int64_t out_stride,
                         int32_t first_strip, int32_t end_strip, int32_t first, int32_t end, TeAhead *ahead)
{
    switch (tiles->kind) {
    case TE_INT4:
        linear_int4(tiles, x, bias, out, out_stride, first_strip, end_strip, first, end, ahead);
        break;
    case TE_INT8:
        linear_int8(tiles, x, bias, out, out_stride, first_strip, end_strip, first, end, ahead);
        break;
    case TE_INT8_AFFINE:
        linear_int8_affine(tiles, x, bias, out, out_stride, first_strip, end_strip, first, end, ahead);
        break;
    case TE_F16:
        linear_f16(tiles, x, bias, out, out_stride, first_strip, end_strip, first, end);
        break;
    default:
        linear_f32(tiles, x, bias, out, out_stride, first_strip, end_strip, first, end);
    }
}

/* Weights that all tokens go through, a few at a time, should stay in the processor's own cache meanwhile. */
static void linear(const TeTiles *tiles, const void *x, const float *bias, float *out, int64_t out_stride,
                   int32_t first_strip, int32_t end_strip, int32_t first, int32_t end, const TeAhead *ahead)
{
    TeAhead own = ahead ? *ahead : (TeAhead){0};
    const uint8_t *after = own.tiles;
    const size_t after_bytes = own.strip_bytes, strip_bytes = te_tile_strip_bytes(tiles->kind, tiles->columns);
    const int32_t panels_in_cache = TE_MAX(1, (int32_t)(CACHED_BYTES / strip_bytes / TE_PANEL_STRIPS));
    const int32_t step = end - first <= TE_MAX_TOKENS ? end_strip - first_strip : panels_in_cache * TE_PANEL_STRIPS;
    for (int32_t strip = first_strip; strip < end_strip; strip += step) {
        const int is_last = strip + step >= end_strip;
        own.tiles = is_last ? after : tiles->data + (size_t)(strip + step) * strip_bytes;
        own.strip_bytes = is_last ? after_bytes : strip_bytes;
        linear_piece(tiles, x, bias, out, out_stride, strip, TE_MIN(strip + step, end_strip), first, end, &own);
    }
}

/* ---- float tiles and rows rounded to bfloat16, in pairs of columns: twice as many products in an instruction ---- */

#if defined(__AVX512VNNI__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10)
#define TE_HAVE_BF16
#define TE_BF16 __attribute__((target("avx512bf16")))
#define PAIR_TOKENS 12
#define PAIRS 256 /* at a time; a multiple of 16 */

/* Rows of up to 2 * PAIRS floats; what is missing in the last sixteen pairs becomes zeros. */
TE_BF16 static void pair_row(const float *x, int32_t count, uint32_t *pairs)
{
    for (int32_t i = 0; i < count; i += 32) {
        const int32_t low = TE_MIN(16, count - i), high = TE_MAX(0, TE_MIN(16, count - i - 16));
        const __m512 first = _mm512_maskz_loadu_ps((__mmask16)((1u << low) - 1), x + i);
        const __m512 second = _mm512_maskz_loadu_ps((__mmask16)((1u << high) - 1), x + i + (high ? 16 : 0));
        _mm512_storeu_si512(pairs + i / 2, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

/* Two columns of a strip of float tiles: 16 rows side by side. */
TE_BF16 static __m512i pair_columns(__m512 first, __m512 second)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* sums[row][0 to 31] += the products of a[row] and b[pair][32]. */
TE_BF16 static inline __attribute__((always_inline)) void pair_block(int num_rows, const uint32_t *a, int64_t a_stride,
                                                                     const uint32_t *b, int32_t num_pairs, float *sums)
{
    __m512 acc[PAIR_TOKENS][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
        for (int w = 0; w < 2; w++)
            acc[r][w] = _mm512_loadu_ps(sums + r * 32 + w * 16);
    for (int32_t k = 0; k < num_pairs; k++) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(b + k * 32);
        const __m512bh high = (__m512bh)_mm512_loadu_si512(b + k * 32 + 16);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32((int32_t)a[r * a_stride + k]);
            acc[r][0] = _mm512_dpbf16_ps(acc[r][0], low, x);
            acc[r][1] = _mm512_dpbf16_ps(acc[r][1], high, x);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
        for (int w = 0; w < 2; w++)
            _mm512_storeu_ps(sums + r * 32 + w * 16, acc[r][w]);
}

TE_BF16 static __attribute__((noinline)) void pair_product(int32_t num_rows, const uint32_t *a, int64_t a_stride,
                                                           const uint32_t *b, int32_t num_pairs, float *sums)
{
    for (; num_rows >= 12; num_rows -= 12, a += 12 * a_stride, sums += 12 * 32)
        pair_block(12, a, a_stride, b, num_pairs, sums);
    for (; num_rows >= 4; num_rows -= 4, a += 4 * a_stride, sums += 4 * 32)
        pair_block(4, a, a_stride, b, num_pairs, sums);
    for (; num_rows > 0; num_rows--, a += a_stride, sums += 32)
        pair_block(1, a, a_stride, b, num_pairs, sums);
}

/* Two strips, and up to PANEL_TOKENS tokens. */
TE_BF16 static void pair_linear(const TeTiles *tiles, const float *x, const float *bias, float *out, int64_t out_stride,
                                int32_t strip, int32_t num_strips, int32_t first, int32_t count)
{
    uint32_t panel[PAIRS][2][16], rows[PAIR_TOKENS][PAIRS];
    float sums[PANEL_TOKENS * 32];
    const int32_t columns = tiles->columns;
    const size_t strip_bytes = te_tile_strip_bytes(tiles->kind, columns);
    memset(sums, 0, (size_t)count * 32 * sizeof(float));
    for (int32_t column = 0; column < columns; column += 2 * PAIRS) {
        const int32_t num_columns = TE_MIN(2 * PAIRS, columns - column), num_pairs = (num_columns + 1) / 2;
        for (int32_t s = 0; s < 2; s++) {
            /* Where there is one strip it comes again: its sums are not used. */
            const float *tile = (const float *)(tiles->data + (size_t)(strip + TE_MIN(s, num_strips - 1)) * strip_bytes);
            for (int32_t k = 0; k < num_pairs; k++) {
                const float *low = tile + (int64_t)(column + 2 * k) * TE_FLOAT_ROWS;
                const __m512 high = 2 * k + 1 < num_columns ? _mm512_loadu_ps(low + TE_FLOAT_ROWS) : _mm512_setzero_ps();
                _mm512_storeu_si512(panel[k][s], pair_columns(_mm512_loadu_ps(low), high));
            }
        }
        for (int32_t token = 0; token < count; token += PAIR_TOKENS) {
            const int32_t num_rows = TE_MIN(PAIR_TOKENS, count - token);
            for (int32_t r = 0; r < num_rows; r++)
                pair_row(x + (int64_t)(first + token + r) * columns + column, num_columns, rows[r]);
            pair_product(num_rows, rows[0], PAIRS, panel[0][0], num_pairs, sums + token * 32);
        }
    }
    for (int32_t t = 0; t < count; t++)
        for (int32_t part = 0; part < 2 * num_strips; part++)
            store_strip(out + (first + t) * out_stride, vf_load(sums + t * 32 + 8 * part), bias,
                        strip * TE_FLOAT_ROWS + part * TE_TILE_ROWS, tiles->rows);
}
#endif

static void rounded_linear(const TeTiles *tiles, const float *x, const float *bias, float *out, int64_t out_stride,
                           int32_t first_strip, int32_t end_strip, int32_t first, int32_t end)
{
#if defined(TE_HAVE_BF16)
    if (te_has_bf16() && tiles->kind == TE_F32) {
        for (int32_t token = first; token < end; token += PANEL_TOKENS)
            for (int32_t strip = first_strip; strip < end_strip; strip += 2)
                pair_linear(tiles, x, bias, out, out_stride, strip, TE_MIN(2, end_strip - strip), token,
                            TE_MIN(PANEL_TOKENS, end - token));
        return;
    }
#endif
    linear(tiles, x, bias, out, out_stride, first_strip, end_strip, first, end, NULL);
}

#endif
