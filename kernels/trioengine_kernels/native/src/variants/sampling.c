/* The passes over one row of logits that sampling is made of. Compiled once for each kind of processor; the loops over
 * the BLOCK values of a block are written so that compilers vectorise them.
 *
 * Why the tokens are those of the reference:
 * - Logits over temperature, the top-k threshold and every comparison are single float32 operations that IEEE defines.
 * - Probabilities that top-p sums are integers, rint(exp(x) * 2^44), so that sums have no rounding and no order.
 * - Noise, and the logarithm of min_p, are computed in double and then rounded to float32.
 * So results could differ only where two libraries' double exp or log differ in the last place *and* that decides: for
 * noise one token in 2^28 is rounded to the other float32, which matters only in a tie to within that rounding; for top-p
 * a sum would have to hit the limit to within 2^-44 of the most probable token.
 *
 * Why tokens may be passed over: noise grows as the hash shrinks, so a cheap bound from above tells for nearly all
 * tokens that they cannot beat the best so far. The others are computed exactly: 2 to 14 of 49,152. */
#include "../sampling.h"

#include <math.h>
#include <string.h>

#define BLOCK 64
#define WEIGHT_BITS 44
#define LIGHTEST (-32.0f)  /* exp(-32) * 2^44 rounds to 0 */
#define NUM_CANDIDATES 256 /* how many of the largest values top-p tries first */
#define MAX_NOISE 22.9f    /* -log(-log1p(-2^-33)) is 22.87 */

static inline uint32_t bits32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline int64_t bits64(double x)
{
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double double_of(int64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Integers in the order of floats that are not NaN; the one of -0 is below that of +0. */
static inline uint32_t key_of(float x)
{
    const uint32_t bits = bits32(x);
    return bits ^ ((uint32_t)-(int32_t)(bits >> 31) | 0x80000000u);
}

static inline float from_key(uint32_t key)
{
    const uint32_t bits = key >> 31 ? key ^ 0x80000000u : ~key;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

typedef struct {
    uint32_t first;
    uint32_t second;
} NoiseKey;

/* "lowbias32", C. Wellons, 2018. */
static inline uint32_t mix32(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

static inline NoiseKey noise_key(uint64_t seed, int64_t position)
{
    NoiseKey key;
    key.first = mix32((uint32_t)seed ^ mix32((uint32_t)position + 0x9e3779b9u));
    key.second = mix32((uint32_t)(seed >> 32) ^ mix32(key.first + 0x9e3779b9u));
    return key;
}

static inline uint32_t hash32(NoiseKey key, uint32_t token)
{
    return mix32(mix32(token ^ key.first) + key.second);
}

/* Gumbel noise: -log(-log(1 - v)), v uniform in (0, 1). */
static float noise(NoiseKey key, uint32_t token)
{
    const double v = (hash32(key, token) + 0.5) * 0x1p-32;
    return (float)-log(-log1p(-v));
}

/* Values of a row: (x - shift) / scale. */
typedef struct {
    const float *x;
    int32_t size;
    float shift;
    float scale;
} Row;

/* The block from `start`; past the end of the row minus infinity, which wins nothing and weighs nothing. */
static inline const float *block(const float *x, int32_t size, int32_t start, float *buffer)
{
    if (size - start >= BLOCK)
        return x + start;
    for (int32_t j = 0; j < BLOCK; j++)
        buffer[j] = start + j < size ? x[start + j] : -INFINITY;
    return buffer;
}

static inline float value_of(float x, float shift, float scale)
{
    return (x - shift) / scale;
}

/* The first index of the largest value, or of the first NaN. */
static int32_t argmax(const float *x, int32_t size)
{
    float buffer[BLOCK], best = -INFINITY;
    int32_t index = 0;
    for (int32_t start = 0; start < size; start += BLOCK) {
        const float *p = block(x, size, start, buffer);
        int32_t is_better = 0;
        for (int32_t j = 0; j < BLOCK; j++)
            is_better |= !(p[j] <= best); /* true of NaN */
        if (!is_better)
            continue;
        for (int32_t j = 0; j < BLOCK; j++) {
            if (p[j] != p[j])
                return start + j;
            if (p[j] > best) {
                best = p[j];
                index = start + j;
            }
        }
    }
    return index;
}

/* A copy with minus infinity for tokens whose bit is not set. */
static void copy_masked(const uint32_t *words, const float *x, float *out, int32_t size)
{
    int32_t start = 0;
    for (; start + 32 <= size; start += 32) {
        const uint32_t word = words[start / 32];
        for (int32_t j = 0; j < 32; j++) {
            const float value = x[start + j];
            out[start + j] = word >> j & 1 ? value : -INFINITY;
        }
    }
    for (; start < size; start++)
        out[start] = words[start / 32] >> start % 32 & 1 ? x[start] : -INFINITY;
}

/* rint(exp(x) * 2^44) of a value of at most 0. */
static inline int64_t weight(float value)
{
    const double magic = 6755399441055744.0; /* 1.5 * 2^52: after adding it, the low bits hold the rounded integer */
    const int64_t magic_bits = 0x4338000000000000;
    const double x = value > LIGHTEST ? value : LIGHTEST;
    const double shifted = x * 1.4426950408889634 + magic;
    const double n = shifted - magic;
    const double r = x - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10; /* |r| <= log(2) / 2 */
    /* Taylor's series; the first term left out is below 2^-57. */
    double e = 1.0 / 6227020800;
    e = e * r + 1.0 / 479001600;
    e = e * r + 1.0 / 39916800;
    e = e * r + 1.0 / 3628800;
    e = e * r + 1.0 / 362880;
    e = e * r + 1.0 / 40320;
    e = e * r + 1.0 / 5040;
    e = e * r + 1.0 / 720;
    e = e * r + 1.0 / 120;
    e = e * r + 1.0 / 24;
    e = e * r + 1.0 / 6;
    e = e * r + 1.0 / 2;
    e = e * r + 1.0;
    e = e * r + 1.0;
    const uint64_t exponent = ((uint64_t)bits64(shifted) + 1023 + WEIGHT_BITS) << 52;
    return bits64(e * double_of((int64_t)exponent) + magic) - magic_bits;
}

/* The weights of a block's values that are inside, `num_inside` of them; of others any number. */
static inline void weigh(const float *values, const uint32_t *is_inside, uint32_t num_inside, int64_t *weights)
{
    if (num_inside < BLOCK / 6) {
        for (int32_t j = 0; j < BLOCK; j++)
            if (is_inside[j])
                weights[j] = weight(values[j]);
    } else {
        for (int32_t j = 0; j < BLOCK; j++)
            weights[j] = weight(values[j]);
    }
}

/* The sum of weights of the values that are at least `floor`. */
static int64_t sum_of_weights(const Row *row, float floor)
{
    float buffer[BLOCK], values[BLOCK];
    uint32_t is_inside[BLOCK];
    int64_t weights[BLOCK] = {0}, sum = 0;
    floor = TE_MAX(floor, LIGHTEST);
    for (int32_t start = 0; start < row->size; start += BLOCK) {
        const float *p = block(row->x, row->size, start, buffer);
        uint32_t num_inside = 0;
        for (int32_t j = 0; j < BLOCK; j++) {
            values[j] = value_of(p[j], row->shift, row->scale);
            is_inside[j] = values[j] >= floor;
            num_inside += is_inside[j];
        }
        if (num_inside == 0)
            continue;
        weigh(values, is_inside, num_inside, weights);
        for (int32_t j = 0; j < BLOCK; j++)
            sum += is_inside[j] ? weights[j] : 0;
    }
    return sum;
}

/* The largest value whose equals and betters weigh at least `target` in all; each weighs 1, or its weight. Only values
 * of at least `floor` are looked at, and they must weigh enough. Three passes, each of which settles some bits. */
static float select_value(const Row *row, float floor, int32_t is_weighted, double target)
{
    static const int32_t shifts[3] = {21, 10, 0}, bits[3] = {11, 11, 10};
    float buffer[BLOCK], values[BLOCK];
    uint32_t keys[BLOCK], is_inside[BLOCK], prefix = 0, mask = 0;
    int64_t weights[BLOCK], sums[1 << 11], above = 0;
    for (int32_t level = 0; level < 3; level++) {
        const int32_t shift = shifts[level], num_bins = 1 << bits[level];
        memset(sums, 0, (size_t)num_bins * sizeof(*sums));
        for (int32_t start = 0; start < row->size; start += BLOCK) {
            const float *p = block(row->x, row->size, start, buffer);
            uint32_t num_inside = 0;
            for (int32_t j = 0; j < BLOCK; j++) {
                values[j] = value_of(p[j], row->shift, row->scale);
                keys[j] = key_of(values[j]);
                is_inside[j] = (values[j] >= floor) & ((keys[j] & mask) == prefix);
                num_inside += is_inside[j];
            }
            if (num_inside == 0)
                continue;
            if (is_weighted)
                weigh(values, is_inside, num_inside, weights);
            for (int32_t j = 0; j < BLOCK; j++)
                if (is_inside[j])
                    sums[keys[j] >> shift & (uint32_t)(num_bins - 1)] += is_weighted ? weights[j] : 1;
        }
        int32_t bin = num_bins - 1;
        for (; bin > 0 && (double)(above + sums[bin]) < target; bin--)
            above += sums[bin];
        prefix |= (uint32_t)bin << shift;
        mask |= (uint32_t)(num_bins - 1) << shift;
    }
    return from_key(prefix);
}

/* A number that at least k values reach, and not many more; minus infinity where k is too large for it to help.
 * `maxima` has room for size / 64 floats. */
static float floor_of(const Row *row, int32_t k, float *maxima)
{
    /* Maxima of disjoint parts of 64: k of them are at least the k-th largest of them, so k values of the row are. */
    const int32_t num_maxima = row->size / 1024 * 16;
    if (k > num_maxima)
        return -INFINITY;
    for (int32_t start = 0; start < num_maxima; start += 16) {
        const float *p = row->x + (int64_t)start * 64;
        float best[16];
        for (int32_t lane = 0; lane < 16; lane++)
            best[lane] = p[lane];
        for (int32_t i = 16; i < 1024; i += 16)
            for (int32_t lane = 0; lane < 16; lane++)
                best[lane] = p[i + lane] > best[lane] ? p[i + lane] : best[lane];
        for (int32_t lane = 0; lane < 16; lane++)
            maxima[start + lane] = best[lane];
    }
    const Row parts = {maxima, num_maxima, row->shift, row->scale};
    return select_value(&parts, -INFINITY, 0, k);
}

/* The k-th largest value, 0 < k <= size. */
static float kth_largest(const Row *row, int32_t k, float *maxima)
{
    return select_value(row, floor_of(row, k, maxima), 0, k);
}

/* The smallest value that top-p leaves of those of at least `floor`. The largest value is 0. */
static float nucleus(const Row *row, float floor, float top_p, float *maxima)
{
    const int64_t total = sum_of_weights(row, floor);
    const double target = (double)total * (double)top_p;
    /* In most rows a few tokens are enough. */
    float bound = floor_of(row, NUM_CANDIDATES, maxima);
    if (bound > floor && (double)sum_of_weights(row, bound) < target) {
        /* Values below b weigh at most size * (exp(b) * 2^44 + 1) in all. Where that is less than what top-p leaves
         * out, the threshold is not among them. One part in 1,000 is for rounding. */
        const double share = ldexp((1.0 - top_p) * (double)total * 0.999 / row->size - 1.0, -WEIGHT_BITS);
        bound = share > 0 ? (float)log(share) - 1e-3f : -INFINITY;
    }
    return select_value(row, TE_MAX(bound, floor), 1, target);
}

/* The token whose value plus noise is largest, the first of equals, among values of at least `threshold`. The largest
 * value is 0, at `largest`. */
static int32_t draw(const Row *row, float threshold, int32_t largest, NoiseKey key)
{
    float buffer[BLOCK], values[BLOCK], bounds[BLOCK];
    float best = noise(key, (uint32_t)largest);
    int32_t token = largest;
    for (int32_t start = 0; start < row->size; start += BLOCK) {
        const float *p = block(row->x, row->size, start, buffer);
        const float reach = best - MAX_NOISE;
        int32_t can_win = 0;
        for (int32_t j = 0; j < BLOCK; j++) {
            float value = value_of(p[j], row->shift, row->scale);
            values[j] = value >= threshold ? value : -INFINITY;
            can_win |= values[j] >= reach;
        }
        if (!can_win)
            continue;
        can_win = 0;
        for (int32_t j = 0; j < BLOCK; j++) {
            /* -log(-log(1 - v)) <= -log(v), and the bits of a float, as an integer, are a logarithm from below. The
             * last term is more than all roundings. */
            float v = (float)(int32_t)(hash32(key, (uint32_t)(start + j)) >> 1) * 2.0f + 0.5f;
            float log2_v = (float)(int32_t)bits32(v) * 0x1p-23f - 127.0f;
            bounds[j] = values[j] + (32.0f - log2_v) * 0.69314718f + 1e-3f;
            can_win |= bounds[j] >= best;
        }
        if (!can_win)
            continue;
        for (int32_t j = 0; j < BLOCK; j++) {
            if (!(bounds[j] >= best))
                continue;
            const float score = values[j] + noise(key, (uint32_t)(start + j));
            if (score > best || (score == best && start + j < token)) {
                best = score;
                token = start + j;
            }
        }
    }
    return token;
}

/* A row of logits over its temperature, the largest of which is finite and at `largest`. */
static Row values_of(const TeSampling *sampling, int32_t row, const float *x, int32_t largest)
{
    return (Row){x, sampling->vocab_size, x[largest], TE_MAX(sampling->temperature[row], 1e-6f)};
}

/* The smallest value that the row's limits leave. */
static float threshold_of(const TeSampling *sampling, int32_t row, const Row *values, float *maxima)
{
    const int32_t top_k = sampling->top_k[row];
    const float top_p = sampling->top_p[row], min_p = sampling->min_p[row];
    float threshold = min_p > 0 ? (float)log((double)min_p) : -INFINITY;
    if (top_k > 0 && top_k < values->size) {
        const float kth = kth_largest(values, top_k, maxima);
        threshold = TE_MAX(threshold, kth);
    }
    if (top_p < 1) {
        const float last = nucleus(values, threshold, top_p, maxima);
        threshold = TE_MAX(threshold, last);
    }
    return threshold;
}

/* The token of a row whose first largest logit is finite and at `largest`. */
static int32_t sample_row(const TeSampling *sampling, int32_t row, const float *x, int32_t largest, float *maxima)
{
    const Row values = values_of(sampling, row, x, largest);
    const float threshold = threshold_of(sampling, row, &values, maxima);
    return draw(&values, threshold, largest, noise_key(sampling->seed[row], sampling->position[row]));
}

/* What `sample_row` draws from: logits over temperature relative to the largest, minus infinity for those that the
 * limits leave out. `out` may be `x`. */
static void limit_row(const TeSampling *sampling, int32_t row, const float *x, int32_t largest, float *maxima, float *out)
{
    const Row values = values_of(sampling, row, x, largest);
    const float threshold = threshold_of(sampling, row, &values, maxima);
    for (int32_t i = 0; i < values.size; i++) {
        const float value = value_of(x[i], values.shift, values.scale);
        out[i] = value >= threshold ? value : -INFINITY;
    }
}

/* Token ids of the `num` largest logits, equal ones by id: all that are larger than the last, then its equals. */
static void top_ids(const float *x, int32_t size, int32_t num, float *maxima, int32_t *ids)
{
    const Row row = {x, size, 0.0f, 1.0f};
    const float last = kth_largest(&row, num, maxima);
    int32_t found = 0;
    for (int32_t is_equal = 0; is_equal < 2; is_equal++) {
        for (int32_t start = 0; start < size && found < num; start += BLOCK) {
            const int32_t end = TE_MIN(start + BLOCK, size);
            int32_t is_any = 0;
            for (int32_t i = start; i < end; i++)
                is_any |= x[i] >= last;
            for (int32_t i = start; is_any && i < end && found < num; i++)
                if (is_equal ? x[i] == last : x[i] > last)
                    ids[found++] = i;
        }
    }
}

/* One more than the number of logits that are larger than the token's. */
static int32_t rank_of(const float *x, int32_t size, int32_t token)
{
    const float own = x[token];
    int32_t rank = 1;
    for (int32_t i = 0; i < size; i++)
        rank += x[i] > own;
    return rank;
}

/* The logarithm of the sum of exp(x - largest). */
static double log_total(const float *x, int32_t size, float largest)
{
    const Row row = {x, size, largest, 1.0f};
    return log(ldexp((double)sum_of_weights(&row, -INFINITY), -WEIGHT_BITS));
}

#define TE_PASTE(a, b) a##b
#define TE_TABLE(variant) TE_PASTE(te_sampling_kernels_, variant)

extern const TeSamplingKernels TE_TABLE(TE_VARIANT);
const TeSamplingKernels TE_TABLE(TE_VARIANT) = {
    .argmax = argmax,
    .copy_masked = copy_masked,
    .sample_row = sample_row,
    .limit_row = limit_row,
    .top_ids = top_ids,
    .rank = rank_of,
    .log_total = log_total,
};
