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
    TE_OP_SELECT_ROWS = 10
} TeOpKind;

typedef struct {
    TeTiles tiles;
    float *out; /* [tokens, columns] */
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
    TeGroup *groups;
    int32_t width;
} TeQuantize;

typedef struct {
    TeTiles tiles;
    const void *x; /* TeGroup rows for quantized tiles, else float rows */
    const float *bias;
    float *out;
    int64_t out_stride;
} TeLinear;

typedef struct {
    const float *x;
    float *residual;
    int32_t width;
} TeAdd;

typedef struct {
    const float *inverse_frequencies;
    float *out; /* [tokens, 2 * half] */
    int32_t half;
} TeRopeTable;

typedef struct {
    float *qkv;
    const float *cos_sin;
    int64_t qkv_stride;
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
    int32_t kind;
    int32_t is_for_logits; /* its rows are the step's logit rows, else its tokens */
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
    };
} TeOp;

typedef struct TeProgram TeProgram;

TE_API TeProgram *te_program_create(const TeOp *ops, int32_t num_ops);
TE_API void te_program_destroy(TeProgram *program);
TE_API int32_t te_program_run(TeProgram *program, TePool *pool, const TeStep *step);

#endif
