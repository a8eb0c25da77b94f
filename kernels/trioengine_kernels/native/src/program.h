/* The operations of a program. Python builds these structures with ctypes: program.py mirrors them. */
#ifndef TE_PROGRAM_H
#define TE_PROGRAM_H

#include "te.h"

typedef enum {
    TE_OP_EMBEDDING = 0,
    TE_OP_RMS_NORM = 1,
    TE_OP_QUANTIZE = 2,
    TE_OP_LINEAR = 3,
    TE_OP_ADD = 4,
    TE_OP_ROPE_TABLE = 5,
    TE_OP_ROPE_WRITE = 6,
    TE_OP_ATTENTION = 7,
    TE_OP_ATTENTION_MERGE = 8,
    TE_OP_GATED = 9,
    TE_OP_SELECT_ROWS = 10,
    TE_OP_SOFT_CAP = 11,
    TE_OP_CHOOSE_EXPERTS = 12,
    TE_OP_GROUP_BY_EXPERT = 13,
    TE_OP_GATHER_ROWS = 14,
    TE_OP_EXPERT_LINEAR = 15,
    TE_OP_MIX_EXPERTS = 16,
    TE_OP_LORA = 17,
    TE_OP_LAYER_NORM = 18,
    TE_OP_ACTIVATED_LINEAR = 19,
    TE_OP_FULL_ATTENTION = 20
} TeOpKind;

/* Of a step. Selected rows are the logit rows, and behind them those whose hidden states are wanted. */
typedef enum { TE_ROWS_TOKENS = 0, TE_ROWS_LOGITS = 1, TE_ROWS_SELECTED = 2 } TeRowKind;

typedef struct {
    TeTiles tiles;
    float *out; /* [tokens, columns] */
    float multiplier;
    int32_t is_by_position; /* its rows are those of the tokens' positions, else of their ids */
} TeEmbedding;

typedef struct {
    const float *x;
    float *residual; /* may be null; x is added to it first */
    const float *weight;
    float *out;      /* may be null */
    TeGroup *groups; /* may be null */
    int32_t width;
    float epsilon;
} TeNorm;

typedef struct {
    const float *x;
    const float *residual; /* may be null; x is added to it first */
    const float *weight;
    const float *bias;
    float *out;
    TeGroup *groups; /* may be null */
    int32_t width;
    float epsilon;
} TeLayerNorm;

typedef struct {
    const float *x;
    TeGroup *groups;
    int32_t width;
} TeQuantize;

typedef struct {
    TeTiles tiles;
    const void *x; /* TeGroup rows for quantized tiles, else float rows */
    const float *bias;
    float *out;
    int64_t out_stride;
    int32_t may_round; /* of float tiles: see rounded_linear */
    int32_t has_gate;  /* the next operation is a gate, in whole groups, and nobody else reads `out`... */
    float *gated_out;  /* ...so that of many tokens, these are written instead, which are the gate's */
    TeGroup *gated_groups;
} TeLinear;

/* A product whose results go through an activation before they leave the processor's cache. */
typedef struct {
    TeTiles tiles;
    const void *x;     /* as in TeLinear */
    const float *bias; /* may be null */
    float *out;        /* [tokens, rows of the matrix]; null where only `groups` is wanted */
    TeGroup *groups;   /* may be null */
    int32_t activation;
} TeActivatedLinear;

typedef struct {
    const float *x;
    float *residual;
    int32_t width;
} TeAdd;

typedef struct {
    const float *inverse_frequencies;
    float *out; /* [tokens, 2 * half] */
    int32_t half;
    float factor; /* multiplies cosines and sines */
} TeRopeTable;

typedef struct {
    float *qkv;
    const float *cos_sin;
    const float *query_norm; /* null: queries and keys stay as they are */
    const float *key_norm;
    int64_t qkv_stride;
    int32_t query_norm_size; /* of one head or of all */
    int32_t key_norm_size;
    float epsilon;
    int32_t half;
    int32_t num_heads;
    int32_t kv_group;
    int32_t layer; /* of the group's cache */
} TeRopeWrite;

typedef struct {
    const float *x; /* [tokens, 2 * width] */
    float *out;     /* may be null */
    TeGroup *groups;
    int32_t width;
    int32_t activation;
} TeGated;

typedef struct {
    const float *x;
    float *out;
    int32_t width;
} TeSelectRows;

typedef struct {
    float *x; /* changed in place */
    int32_t width;
    float cap;
} TeSoftCap;

typedef struct {
    const float *x; /* [tokens, columns] */
    float *out;     /* [tokens, width]; what adapters say is added */
    const TeLoraPart *parts; /* [slots + 1][num_parts] */
    int32_t columns;
    int32_t width;
    int32_t num_parts;
} TeLora;

/* ---- mixtures of experts: rows of tokens are put beside each other by the experts that they go through ---- */

typedef struct {
    const float *logits; /* [tokens, experts] */
    int32_t *chosen;     /* [tokens, num_chosen], by falling weight */
    float *weights;      /* [tokens, num_chosen] */
    int32_t num_experts;
    int32_t num_chosen; /* for each token */
    int32_t is_normalized;
} TeChooseExperts;

typedef struct {
    const int32_t *chosen; /* [tokens, num_chosen] */
    int32_t *starts;       /* [experts + 1]: an expert's rows begin here */
    int32_t *rows;         /* [tokens * num_chosen]: which token each is of */
    int32_t *places;       /* [tokens, num_chosen]: where among them each choice is */
    int32_t num_experts;
    int32_t num_chosen;
} TeGroupByExpert;

typedef struct {
    const uint8_t *x;
    const int32_t *rows; /* [out's rows] */
    uint8_t *out;
    int64_t row_bytes;
} TeGatherRows;

typedef struct {
    const TeTiles *tiles; /* [experts], all of one shape */
    const int32_t *starts;
    const void *x; /* TeGroup rows for quantized tiles, else float rows */
    float *out;
    int64_t out_stride;
    int32_t num_experts;
} TeExpertLinear;

typedef struct {
    const float *x;        /* [tokens * num_chosen, width] */
    const int32_t *places; /* [tokens, num_chosen] */
    const float *weights;  /* [tokens, num_chosen] */
    float *out;            /* [tokens, width] */
    int32_t width;
    int32_t num_chosen;
} TeMixExperts;

typedef struct {
    int32_t kind;
    int32_t row_kind;       /* TeRowKind: its rows are these of the step... */
    int32_t rows_per_token; /* ...each so many times */
    union {
        TeEmbedding embedding;
        TeNorm norm;
        TeQuantize quantize;
        TeLinear linear;
        TeAdd add;
        TeRopeTable rope_table;
        TeRopeWrite rope_write;
        TeAttention attention;
        TeGated gated;
        TeSelectRows select;
        TeLayerNorm layer_norm;
        TeActivatedLinear activated_linear;
        TeFullAttention full_attention;
        TeSoftCap soft_cap;
        TeChooseExperts choose;
        TeGroupByExpert group;
        TeGatherRows gather;
        TeExpertLinear expert_linear;
        TeMixExperts mix;
        TeLora lora;
    };
} TeOp;

typedef struct TeProgram TeProgram;

TE_API TeProgram *te_program_create(const TeOp *ops, int32_t num_ops);
TE_API void te_program_destroy(TeProgram *program);
TE_API int32_t te_program_run(TeProgram *program, TePool *pool, const TeStep *step);

#endif
