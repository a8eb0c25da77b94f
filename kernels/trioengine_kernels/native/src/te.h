/* What the files of the native backend share: data layouts, the thread pool, the table of a processor's kernels. */
#ifndef TE_H
#define TE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TE_API __declspec(dllexport)
#else
#define TE_API __attribute__((visibility("default")))
#endif

#define TE_GROUP 32        /* columns that share a scale */
#define TE_TILE_ROWS 8     /* rows of a quantized tile */
#define TE_FLOAT_ROWS 16   /* rows of a float tile */
#define TE_PANEL_STRIPS 4  /* strips of quantized tiles that some processors compute side by side... */
#define TE_PANEL_MIN_TOKENS 8 /* ...for at least so many tokens */
#define TE_KV_TOKENS 16    /* tokens of a key or value block */
#define TE_KV_SPLIT 256    /* keys whose softmax is worked out at once: fixed, so that results depend on nothing else */
#define TE_MAX_OPS 4096

#define TE_MIN(a, b) ((a) < (b) ? (a) : (b))
#define TE_MAX(a, b) ((a) > (b) ? (a) : (b))

/* ---- thread pool (pool.c) ---- */

typedef struct TePool TePool;

/* Works out chunk `chunk` of operation `op`. `thread` is below the pool's number of threads. */
typedef void (*TeRun)(void *context, int32_t op, int32_t chunk, int32_t thread);

TE_API TePool *te_pool_create(int32_t num_threads);
TE_API void te_pool_destroy(TePool *pool);
TE_API int32_t te_pool_num_threads(const TePool *pool);

/* Runs `num_ops` operations of `chunks[op]` chunks, one operation after the other, chunks in any order on any thread.
 * The caller works too. Returns when all is done. One caller at a time. */
TE_API void te_pool_run(TePool *pool, TeRun run, void *context, int32_t num_ops, const int32_t *chunks);

/* ---- weights ---- */

typedef enum {
    TE_INT4 = 0,        /* 8 rows x 32 columns: 8 pairs of scale and minimum, 16 bits each, 128 bytes of nibbles */
    TE_INT8 = 1,        /* 8 half scales, 256 bytes: value + 128 */
    TE_INT8_AFFINE = 2, /* 8 half scales, 8 half minimums, 256 bytes: value + 128 */
    TE_F16 = 3,         /* 16 rows x 1 column */
    TE_F32 = 4,
    TE_NUM_TILE_KINDS
} TeTileKind;

/* Tiles of one row strip are consecutive; strips follow each other. The byte of row r, column 4j + i in a quantized
 * tile is 32j + 4r + i; INT4 keeps columns 0 to 15 in the low nibbles of its 128 bytes and 16 to 31 in the high.
 *
 * A strip of INT4 begins with its rows' units, 8 floats: a nibble n stands for unit * (scale * (n - 8) + 8 * minimum).
 * Scales and minimums are whole numbers, up to TE_INT4_LIMIT, so that a group's part of a product is one, too. */
typedef struct {
    const uint8_t *data;
    int32_t kind;
    int32_t rows;
    int32_t columns;
    int32_t groups; /* of quantized kinds: columns / 32, rounded up */
} TeTiles;

#define TE_INT4_LIMIT 32767
#define TE_INT4_UNITS_BYTES (TE_TILE_ROWS * 4)

/* Of the scales and minimums before a quantized tile's numbers, and of the whole tile. */
static inline int te_tile_header_bytes(int32_t kind)
{
    return kind == TE_INT8 ? 16 : 32;
}

static inline int te_tile_bytes(int32_t kind)
{
    return te_tile_header_bytes(kind) + (kind == TE_INT4 ? 128 : 256);
}

static inline size_t te_tile_strip_bytes(int32_t kind, int32_t columns)
{
    const size_t groups = (size_t)(columns + TE_GROUP - 1) / TE_GROUP, width = (size_t)columns;
    if (kind == TE_F16 || kind == TE_F32)
        return width * TE_FLOAT_ROWS * (kind == TE_F16 ? 2 : 4);
    return (kind == TE_INT4 ? TE_INT4_UNITS_BYTES : 0) + groups * (size_t)te_tile_bytes(kind);
}

/* A quantized group of activations. */
typedef struct {
    int8_t q[TE_GROUP];
    float scale;
    float sum;      /* scale * sum of q */
    int32_t offset; /* -128 * sum of q: undoes the offset of INT8 weights */
    int32_t start;  /* (8 << 16) - 8 times the sum of q: products.h says what for */
} TeGroup;

/* ---- attention ---- */

typedef struct {
    uint16_t *data;     /* [layers][num_blocks * block_size / 16][kv_heads][K: dim x 16, V: 16 x padded dim], halves */
    int64_t layer_size; /* halves */
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t padded_dim; /* head_dim rounded up to 16 */
    int32_t block_size; /* a multiple of 16 */
} TeCache;

static inline uint16_t *te_cache_keys(const TeCache *cache, int32_t layer, int64_t slot, int32_t head)
{
    int64_t unit = (int64_t)TE_KV_TOKENS * (cache->head_dim + cache->padded_dim);
    return cache->data + layer * cache->layer_size + ((slot / TE_KV_TOKENS) * cache->num_kv_heads + head) * unit;
}

/* One sequence's queries `first_row` to `first_row + num_rows - 1` against its keys of splits
 * `first_split` to `end_split - 1`. */
typedef struct {
    int32_t sequence;
    int32_t first_row;
    int32_t num_rows;
    int32_t first_split;
    int32_t end_split;
    int32_t partial; /* where its result goes, when others work on other splits of the same query; or -1 */
} TeAttentionTask;

typedef struct {
    const float *query; /* rows `query_stride` apart, heads consecutive */
    float *out;         /* [tokens, heads * head_dim]; null where only `groups` is wanted */
    TeGroup *groups;    /* null where the result is not wanted quantized */
    float *partials;    /* [partial][head][2 + padded_dim] */
    int64_t query_stride;
    int32_t kv_group; /* layers whose keys and values lie in the same blocks: its cache, slots and block table */
    int32_t layer;    /* of the group's cache */
    int32_t num_heads;
    int32_t window; /* 0: none */
    float scale;
    float soft_cap; /* 0: none */
} TeAttention;

#define TE_FULL_QUERIES 24 /* queries whose scores are worked out at once */

/* Each token sees all of its sequence. */
typedef struct {
    const float *query_key; /* [tokens, 2 * heads * head_dim]: queries, keys */
    const float *value;     /* [tokens, heads * head_dim] */
    float *out;             /* [tokens, heads * head_dim]; null where only `groups` is wanted */
    TeGroup *groups;        /* null where the result is not wanted quantized */
    int32_t num_heads;
    int32_t head_dim;
    float scale;
} TeFullAttention;

typedef struct {
    int32_t num_tokens;
    int32_t num_sequences;
    int32_t num_logit_rows;
    int32_t num_selected_rows;
    int32_t max_blocks;
    const int32_t *token_ids;
    const int32_t *positions;
    const int32_t *slots; /* [KV groups][tokens] */
    const int32_t *query_start;
    const int32_t *seq_lens;
    const int32_t *block_table; /* [KV groups][sequences][max_blocks] */
    const int32_t *selected_rows; /* those of logits first */
    const TeCache *caches; /* [KV groups] */
    const int32_t *lora_slots; /* [tokens]: 0 is no adapter; null where that holds for all */
} TeStep;

/* What a thread will want soon, and fetches into its caches while it multiplies. Only hints: results do not depend on it. */
typedef struct {
    const uint8_t *tiles; /* of the quantized strips with which it will go on, most likely; or null */
    size_t strip_bytes;
    const uint8_t *base;    /* then pieces: keys and values of the next attention */
    const int64_t *offsets; /* of each, bytes */
    int32_t num_pieces;
    int32_t piece_bytes;
    int32_t num_lines;   /* so many lines of 64 bytes at a time */
    int32_t piece;       /* where it is */
    int32_t place;
} TeAhead;

/* What an adapter adds to `num_rows` outputs of a product of so many columns: b^T (a^T x). */
typedef struct {
    const float *a; /* [columns][rank, rounded up to 16] */
    const float *b; /* [rank][num_rows] */
    int32_t rank;   /* 0: nothing */
    int32_t first_row;
    int32_t num_rows;
} TeLoraPart;

/* ---- kernels of one kind of processor (variants/kernels.c, compiled once for each) ---- */

typedef enum { TE_PORTABLE = 0, TE_AVX2 = 1, TE_AVX_VNNI = 2, TE_VNNI = 3, TE_DOTPROD = 4, TE_NUM_ISAS } TeIsa;

typedef enum { TE_SILU = 0, TE_GELU_TANH = 1, TE_GELU = 2, TE_RELU = 3, TE_NUM_ACTIVATIONS } TeActivation;

typedef struct {
    /* groups[ceil(width / 32)] of one row; the last is filled up with zeros. */
    void (*quantize)(const float *x, int32_t width, TeGroup *groups);
    /* Row strips [first_strip, end_strip) of tokens [first, end). `x` are TeGroup rows of tiles->groups for quantized
     * tiles, else float rows of tiles->columns. `ahead` may be null. */
    void (*linear)(const TeTiles *tiles, const void *x, const float *bias, float *out, int64_t out_stride,
                   int32_t first_strip, int32_t end_strip, int32_t first, int32_t end, const TeAhead *ahead);
    /* The same of float tiles, whose numbers and those of x may be rounded to bfloat16 before they are multiplied. */
    void (*rounded_linear)(const TeTiles *tiles, const float *x, const float *bias, float *out, int64_t out_stride,
                           int32_t first_strip, int32_t end_strip, int32_t first, int32_t end);
    void (*embedding)(const TeTiles *tiles, int32_t row, float *out);
    /* residual (may be null) += x, then out = norm of it; else out = norm of x. `out` or `groups` may be null. */
    void (*rms_norm)(const float *x, float *residual, const float *weight, float epsilon, int32_t width, float *out,
                     TeGroup *groups);
    void (*add)(const float *x, float *residual, int32_t width);
    void (*lora)(const TeLoraPart *part, const float *x, int32_t columns, float *out);
    /* x = cap * tanh(x / cap) */
    void (*soft_cap)(float *x, int32_t width, float cap);
    /* Columns [first, end), multiples of 32 or the width. */
    void (*gated)(const float *gate_up, int32_t width, int32_t activation, int32_t first, int32_t end, float *out,
                  TeGroup *groups);
    /* One token: rotates queries and keys, stores keys and values. cos_sin: cosines, then sines, of `half` pairs. */
    void (*rope_write)(float *qkv, const float *cos_sin, int32_t half, int32_t num_heads, const TeCache *cache,
                       int32_t layer, int32_t slot);
    void (*attention)(const TeAttention *attention, const TeStep *step, const TeAttentionTask *task, int32_t kv_head,
                      float *scratch);
    /* Puts together the `num_partials` results of one token, [partial][head][2 + padded_dim]. */
    void (*merge)(const TeAttention *attention, const TeStep *step, int32_t row, int32_t partial, int32_t num_partials);
    /* The norm of x + residual, which may be null; `groups` too. */
    void (*layer_norm)(const float *x, const float *residual, const float *weight, const float *bias, float epsilon,
                       int32_t width, float *out, TeGroup *groups);
    /* `out` may be x, or null; `groups` may be null. */
    void (*activate)(const float *x, int32_t width, int32_t activation, float *out, TeGroup *groups);
    void (*full_attention)(const TeFullAttention *attention, int32_t start, int32_t end, int32_t head, float *scratch);
} TeKernels;

/* Floats of scratch memory that `attention` needs for tasks of up to `max_query_rows` rows times heads per KV head. */
size_t te_attention_scratch_floats(int32_t max_query_rows, int32_t padded_dim);
/* The same of `full_attention` for sequences of up to `max_tokens`. */
size_t te_full_attention_scratch_floats(int32_t max_tokens, int32_t head_dim);

TE_API int32_t te_isa_is_supported(int32_t isa);
TE_API int32_t te_set_isa(int32_t isa); /* 0 where it is not supported */
TE_API int32_t te_isa(void);
/* Whether a processor with TE_VNNI has the products of AVX512_BF16 too. */
int32_t te_has_bf16(void);
const TeKernels *te_kernels(void);

#endif
