/* Choosing one token per row of logits. The rules are those of trioengine_kernels/sampling/reference.py, and so are the
 * tokens: see variants/sampling.c for why they agree. */
#ifndef TE_SAMPLING_H
#define TE_SAMPLING_H

#include "te.h"

#define TE_MAX_SAMPLED_VOCAB (1 << 19) /* sums of this many weights fit 64 bits */
#define TE_MIN_LOGPROB (-9999.0f)      /* stands for the logarithm of 0, which JSON cannot carry */

typedef enum {
    TE_SAMPLED = 0,
    TE_IS_NAN = 1,          /* the row has NaN: the token is the first one, where none is forced */
    TE_NOTHING_ALLOWED = 2, /* every logit is minus infinity: the token is 0 */
} TeSampledStatus;

/* Token ids for each row: those of row r are ids[starts[r]] to ids[starts[r + 1] - 1]. `starts` is null where no row
 * has any. */
typedef struct {
    const int64_t *starts; /* [num_rows + 1] */
    const int32_t *ids;
} TeRaggedIds;

typedef struct {
    const float *logits; /* not changed */
    int64_t row_stride;
    int32_t num_rows;
    int32_t vocab_size;
    /* One entry for each row. */
    const float *temperature;
    const int32_t *top_k;
    const float *top_p;
    const float *min_p;
    const uint64_t *seed;
    const int64_t *position;
    /* Rules, in the order in which they apply. Null where no row has one. */
    const float *changed;         /* [.., vocab_size]: logits that take the place of a row's */
    const int32_t *changed_rows;  /* which of `changed`; below 0 is none */
    const uint32_t *mask_bits;    /* token t may be chosen where bit t % 32 of word t / 32 is set */
    int64_t mask_stride;          /* words */
    const int32_t *mask_rows;     /* which of the masks; below 0 is none */
    TeRaggedIds bias;             /* no id twice in a row */
    const float *bias_values; /* one for each id */
    TeRaggedIds seen;         /* prompt, then output */
    const int64_t *num_prompt_tokens;
    const float *repetition_penalty;
    const float *presence_penalty;
    const float *frequency_penalty;
    TeRaggedIds forbidden;
    TeRaggedIds allowed;   /* a row without any may choose all */
    const int32_t *forced; /* the row's token, whatever the rules say, which do not apply; below 0 is none */
    /* Log probabilities. Null where no row wants them. */
    const int32_t *num_logprobs;    /* below 0: none, not even the chosen token's */
    int32_t logprobs_are_processed; /* of what is drawn from; else, and in forced rows, of `logits` */
    int32_t max_top;                /* the width of `top` */
    /* Results. Where a row wants less than they hold, they get TE_MIN_LOGPROB, rank 0 and token id -1. */
    int32_t *token_ids;
    uint8_t *status;
    float *chosen;
    int32_t *rank;
    float *top;             /* [num_rows, max_top] */
    int32_t *top_token_ids; /* [num_rows, max_top] */
    /* Memory of te_sampling_scratch_floats(vocab_size) floats and vocab_size integers for each thread. The integers are
     * zero before and after. */
    float *scratch;
    int32_t *counts;
} TeSampling;

/* ---- passes over a row, for one kind of processor (variants/sampling.c) ---- */

typedef struct {
    int32_t (*argmax)(const float *x, int32_t size);
    void (*copy_masked)(const uint32_t *words, const float *x, float *out, int32_t size);
    int32_t (*sample_row)(const TeSampling *sampling, int32_t row, const float *x, int32_t largest, float *maxima);
    void (*limit_row)(const TeSampling *sampling, int32_t row, const float *x, int32_t largest, float *maxima, float *out);
    void (*top_ids)(const float *x, int32_t size, int32_t num, float *maxima, int32_t *ids);
    int32_t (*rank)(const float *x, int32_t size, int32_t token);
    double (*log_total)(const float *x, int32_t size, float largest);
} TeSamplingKernels;

TE_API int64_t te_sampling_scratch_floats(int32_t vocab_size);
TE_API int64_t te_sampling_struct_bytes(void);

/* Samples all rows, each one as a whole on one thread. Without a pool the caller works alone. */
TE_API void te_sample(TePool *pool, const TeSampling *sampling);

#endif
