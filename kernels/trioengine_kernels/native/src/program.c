/* Runs a model's list of operations for the tokens of one step.
 *
 * Before a step the operations are cut into chunks by the number of its tokens; the pool does the rest. Python has
 * checked every size and index (program.py): nothing is checked again here. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "program.h"

#define MAX_SPLIT_TOKENS 16   /* steps of at most so many tokens are cut along their keys, too */
#define QUERY_ROWS 24         /* query rows times heads per KV head that an attention task aims at */
#define WORK_PER_CHUNK 1200000 /* multiplications: about ten microseconds */
#define MIN_WORK_PER_CHUNK 30000 /* a microsecond: less is not worth taking, however many threads there are */
#define GATED_COLUMNS 512
#define JOINED_FLOATS 4096 /* results of a product of up to JOINED_TOKENS tokens that go through a gate right away */
#define JOINED_TOKENS 64
#define MAX_FETCHED_BYTES (8 << 20) /* keys and values of one layer that are fetched ahead: part of a common last cache */
#define ACTIVATED_COLUMNS 128 /* at most so many outputs, a multiple of 32, of so many tokens... */
#define ACTIVATED_TOKENS 64   /* ...are floats at a time, 32 KiB, before an activation */

/* How a step's queries are cut in the layers of one KV group. */
typedef struct {
    int32_t num_tasks;
    int32_t num_merges;
    size_t task_bytes; /* allocated */
    TeAttentionTask *tasks;
    size_t piece_bytes;     /* allocated */
    int64_t *pieces;        /* each thread's: of a head's keys and values of TE_KV_TOKENS tokens, bytes from a layer's start */
    size_t piece_start_bytes; /* allocated */
    int32_t *piece_starts;    /* [threads + 1] */
    int32_t merge_row[MAX_SPLIT_TOKENS];
    int32_t merge_partial[MAX_SPLIT_TOKENS + 1];
} AttentionPlan;

/* What follows a product: the next one, and what part of the next attention's keys and values it fetches meanwhile. */
typedef struct {
    int32_t linear;    /* or -1 */
    int32_t attention; /* or -1 */
    double first_part; /* of all such products before that attention, by their work: 0 to 1 */
    double end_part;
} Following;

struct TeProgram {
    TeOp *ops;
    int32_t num_ops;
    Following *following;
    int32_t *chunks;
    int32_t num_kv_groups;
    /* Of the step that runs: */
    int32_t num_threads;
    TeStep step;
    AttentionPlan *plans; /* [KV groups] */
    float *partials;
    size_t partials_capacity;
    float *scratch; /* of all threads */
    size_t scratch_floats;
    size_t scratch_capacity;
};

typedef struct {
    int32_t strips;
    int32_t tokens;
} LinearBlock;

TE_API size_t te_op_bytes(void)
{
    return sizeof(TeOp);
}

TE_API size_t te_step_bytes(void)
{
    return sizeof(TeStep);
}

size_t te_attention_scratch_floats(int32_t max_query_rows, int32_t padded_dim)
{
    size_t rows = (size_t)max_query_rows;
    return rows * 2 + rows * (size_t)padded_dim * 3 + rows * TE_KV_SPLIT + 64;
}

size_t te_full_attention_scratch_floats(int32_t max_tokens, int32_t head_dim)
{
    size_t tokens = (size_t)max_tokens + TE_KV_TOKENS, padded = (size_t)head_dim + 16;
    return tokens * 2 * padded + TE_FULL_QUERIES * (tokens + padded);
}

static int is_quantized_linear(const TeOp *op)
{
    return op->kind == TE_OP_LINEAR && op->linear.tiles.kind <= TE_INT8_AFFINE;
}

static void find_following(TeProgram *program)
{
    Following next = {-1, -1, 0, 0};
    double work = 0;
    for (int32_t op = program->num_ops - 1; op >= 0; op--) {
        program->following[op] = next;
        if (program->ops[op].kind == TE_OP_ATTENTION) {
            next.attention = op;
            work = 0;
        } else if (is_quantized_linear(&program->ops[op])) {
            const TeTiles *tiles = &program->ops[op].linear.tiles;
            program->following[op].end_part = work;
            work += (double)tiles->rows * tiles->columns;
            program->following[op].first_part = work;
            next.linear = op;
        }
    }
    /* So far the parts are what comes after, absolute. */
    double all = 0;
    for (int32_t op = 0; op < program->num_ops; op++) {
        Following *following = &program->following[op];
        if (program->ops[op].kind == TE_OP_ATTENTION)
            all = 0;
        if (!is_quantized_linear(&program->ops[op]))
            continue;
        all = TE_MAX(all, following->first_part);
        following->first_part = (all - following->first_part) / all;
        following->end_part = (all - following->end_part) / all;
    }
}

TE_API TeProgram *te_program_create(const TeOp *ops, int32_t num_ops)
{
    TeProgram *program = calloc(1, sizeof *program);
    if (!program)
        return NULL;
    for (int32_t op = 0; op < num_ops; op++)
        if (ops[op].kind == TE_OP_ATTENTION)
            program->num_kv_groups = TE_MAX(program->num_kv_groups, ops[op].attention.kv_group + 1);
    program->ops = malloc((size_t)TE_MAX(num_ops, 1) * sizeof *ops);
    program->following = malloc((size_t)TE_MAX(num_ops, 1) * sizeof *program->following);
    program->chunks = malloc((size_t)TE_MAX(num_ops, 1) * sizeof *program->chunks);
    program->plans = calloc((size_t)TE_MAX(program->num_kv_groups, 1), sizeof *program->plans);
    if (!program->ops || !program->following || !program->chunks || !program->plans) {
        free(program->ops);
        free(program->following);
        free(program->chunks);
        free(program->plans);
        free(program);
        return NULL;
    }
    memcpy(program->ops, ops, (size_t)num_ops * sizeof *ops);
    program->num_ops = num_ops;
    find_following(program);
    return program;
}

TE_API void te_program_destroy(TeProgram *program)
{
    for (int32_t i = 0; i < program->num_kv_groups; i++) {
        free(program->plans[i].tasks);
        free(program->plans[i].pieces);
        free(program->plans[i].piece_starts);
    }
    free(program->ops);
    free(program->following);
    free(program->chunks);
    free(program->plans);
    free(program->partials);
    free(program->scratch);
    free(program);
}

static int32_t divide_up(int64_t a, int64_t b)
{
    return (int32_t)((a + b - 1) / b);
}

static int32_t rows_of(const TeProgram *program, const TeOp *op)
{
    const TeStep *step = &program->step;
    const int32_t rows[] = {step->num_tokens, step->num_logit_rows, step->num_selected_rows};
    return op->rows_per_token * rows[op->row_kind];
}

static int32_t rows_per_strip(const TeTiles *tiles)
{
    return tiles->kind == TE_F16 || tiles->kind == TE_F32 ? TE_FLOAT_ROWS : TE_TILE_ROWS;
}

static int32_t strips_of(const TeTiles *tiles)
{
    return divide_up(tiles->rows, rows_per_strip(tiles));
}

/* Of a head's keys and values of TE_KV_TOKENS tokens, which lie together. */
static int32_t piece_bytes(const TeCache *cache)
{
    return TE_KV_TOKENS * (cache->head_dim + cache->padded_dim) * (int32_t)sizeof(uint16_t);
}

/* How a product is cut: over strips, and where there are many tokens over these too. */
static LinearBlock linear_block(const TeProgram *program, const TeTiles *tiles, int32_t rows)
{
    const int32_t strips = strips_of(tiles);
    if (program->num_threads == 1)
        return (LinearBlock){strips, rows};
    const int32_t block_tokens = rows <= 96 ? rows : 64;
    const int64_t blocks = divide_up(rows, block_tokens);
    const int64_t work = (int64_t)tiles->rows * tiles->columns * rows;
    int64_t chunks = TE_MAX(work / WORK_PER_CHUNK, (rows >= TE_PANEL_MIN_TOKENS ? 8 : 4) * program->num_threads);
    int32_t per_chunk = divide_up(strips, divide_up(chunks, blocks));
    per_chunk = TE_MAX(per_chunk, divide_up(MIN_WORK_PER_CHUNK, divide_up(work, blocks * strips)));
    if (rows >= TE_PANEL_MIN_TOKENS)
        per_chunk = TE_MAX(per_chunk / TE_PANEL_STRIPS, 1) * TE_PANEL_STRIPS;
    return (LinearBlock){TE_MIN(per_chunk, strips), block_tokens};
}

/* The same of a product that ends in an activation: in whole groups of outputs. */
static LinearBlock activated_block(const TeProgram *program, const TeTiles *tiles, int32_t rows)
{
    const int32_t strips_per_group = TE_GROUP / rows_per_strip(tiles);
    LinearBlock block = linear_block(program, tiles, rows);
    const int32_t groups = TE_MIN(divide_up(block.strips, strips_per_group), ACTIVATED_COLUMNS / TE_GROUP);
    return (LinearBlock){groups * strips_per_group, TE_MIN(block.tokens, ACTIVATED_TOKENS)};
}

static int32_t tokens_per_chunk(const TeProgram *program, int32_t rows)
{
    return program->num_threads == 1 ? rows : TE_MAX(1, TE_MIN(16, rows / (4 * program->num_threads)));
}

/* How many strips of an expert's matrix are one chunk: how many rows it gets is not known yet. */
static int32_t expert_strips(const TeProgram *program, const TeTiles *tiles)
{
    const int32_t strips = strips_of(tiles);
    const int64_t work = (int64_t)tiles->rows * tiles->columns;
    const int32_t chunks = program->num_threads == 1 ? 1 : (int32_t)TE_MIN(4, work / MIN_WORK_PER_CHUNK + 1);
    return divide_up(divide_up(strips, chunks), TE_PANEL_STRIPS) * TE_PANEL_STRIPS;
}

/* A product of many tokens does the work of the gate behind it: the results never leave the processor that made them.
 * With few tokens the weights are what takes the time, and gates and values would be two streams of them (measured). */
static int is_joined(const TeProgram *program, int32_t index)
{
    const TeOp *op = &program->ops[index];
    return op->kind == TE_OP_LINEAR && op->linear.has_gate && rows_of(program, op) >= TE_PANEL_MIN_TOKENS;
}

/* How it is cut: strips of gates, and of values as many, in whole groups. */
static LinearBlock joined_block(const TeProgram *program, const TeTiles *tiles, int32_t rows)
{
    const LinearBlock block = linear_block(program, tiles, rows);
    const int32_t tokens = TE_MIN(block.tokens, JOINED_TOKENS);
    const int32_t groups = TE_MIN(block.strips * TE_TILE_ROWS, JOINED_FLOATS / tokens) / (2 * TE_GROUP);
    return (LinearBlock){TE_MIN(TE_MAX(groups, 1) * (TE_GROUP / TE_TILE_ROWS), strips_of(tiles) / 2), tokens};
}

/* The strips of a product, or of its gates, and how it is cut. */
static LinearBlock block_of(const TeProgram *program, int32_t op, int32_t *strips)
{
    const TeTiles *tiles = &program->ops[op].linear.tiles;
    const int32_t rows = rows_of(program, &program->ops[op]), joined = is_joined(program, op);
    *strips = strips_of(tiles) / (joined ? 2 : 1);
    return joined ? joined_block(program, tiles, rows) : linear_block(program, tiles, rows);
}

static int32_t num_chunks(const TeProgram *program, int32_t index)
{
    const TeOp *op = &program->ops[index];
    const int32_t rows = rows_of(program, op);
    if (rows == 0 || (op->kind == TE_OP_LORA && !program->step.lora_slots))
        return 0;
    switch (op->kind) {
    case TE_OP_LINEAR: {
        int32_t strips;
        const LinearBlock block = block_of(program, index, &strips);
        return divide_up(strips, block.strips) * divide_up(rows, block.tokens);
    }
    case TE_OP_ACTIVATED_LINEAR: {
        const TeTiles *tiles = &op->activated_linear.tiles;
        LinearBlock block = activated_block(program, tiles, rows);
        return divide_up(strips_of(tiles), block.strips) * divide_up(rows, block.tokens);
    }
    case TE_OP_GATED:
        if (index > 0 && is_joined(program, index - 1))
            return 0;
        if (program->num_threads > 1 && rows < 2 * program->num_threads)
            return rows * divide_up(op->gated.width, GATED_COLUMNS);
        return divide_up(rows, tokens_per_chunk(program, rows));
    case TE_OP_ATTENTION:
        return program->plans[op->attention.kv_group].num_tasks *
               program->step.caches[op->attention.kv_group].num_kv_heads;
    case TE_OP_ATTENTION_MERGE:
        return program->plans[op->attention.kv_group].num_merges;
    case TE_OP_FULL_ATTENTION:
        return program->step.num_sequences * op->full_attention.num_heads;
    case TE_OP_GROUP_BY_EXPERT:
        return 1;
    case TE_OP_EXPERT_LINEAR: {
        const TeTiles *tiles = op->expert_linear.tiles;
        return op->expert_linear.num_experts * divide_up(strips_of(tiles), expert_strips(program, tiles));
    }
    default:
        return divide_up(rows, tokens_per_chunk(program, rows));
    }
}

/* Where the strips of chunk `chunk` begin. */
static const uint8_t *chunk_tiles(const TeProgram *program, int32_t op, int32_t chunk)
{
    const TeTiles *tiles = &program->ops[op].linear.tiles;
    int32_t strips;
    const LinearBlock block = block_of(program, op, &strips);
    const int32_t strip = chunk % divide_up(strips, block.strips) * block.strips;
    return tiles->data + (size_t)strip * te_tile_strip_bytes(tiles->kind, tiles->columns);
}

/* Threads mostly take turns: the chunk that this one will take next, of this product or the following one, and its
 * part of the keys and values that the next attention will read. Attention waits for memory, products do not. */
static TeAhead ahead_of(const TeProgram *program, int32_t op, int32_t rows, int32_t chunk)
{
    const Following *following = &program->following[op];
    const int32_t num_chunks = program->chunks[op], next_chunk = chunk + program->num_threads;
    TeAhead ahead = {0};
    /* Of few rows, memory is what takes the time already. */
    if (rows < TE_PANEL_MIN_TOKENS || !is_quantized_linear(&program->ops[op]))
        return ahead;
    const int32_t next = next_chunk < num_chunks ? op : following->linear;
    if (next >= 0 && program->chunks[next] > 0) {
        const TeTiles *tiles = &program->ops[next].linear.tiles;
        ahead.tiles = chunk_tiles(program, next, next == op ? next_chunk
                                                            : TE_MIN(next_chunk - num_chunks, program->chunks[next] - 1));
        ahead.strip_bytes = te_tile_strip_bytes(tiles->kind, tiles->columns);
    }
    if (following->attention < 0 || program->step.num_tokens < TE_PANEL_MIN_TOKENS)
        return ahead;
    const TeAttention *attention = &program->ops[following->attention].attention;
    const AttentionPlan *plan = &program->plans[attention->kv_group];
    const TeCache *cache = &program->step.caches[attention->kv_group];
    /* Its chunks and pieces are those that the pool gives it. */
    const int32_t thread = chunk % program->num_threads, place = chunk / program->num_threads;
    const double share = (num_chunks - thread + program->num_threads - 1) / program->num_threads;
    const double part = (following->end_part - following->first_part) / share;
    const int32_t start = plan->piece_starts[thread], num_pieces = plan->piece_starts[thread + 1] - start;
    const int32_t first = (int32_t)(num_pieces * (following->first_part + part * place));
    const int32_t end = (int32_t)(num_pieces * (following->first_part + part * (place + 1)));
    const TeTiles *tiles = &program->ops[op].linear.tiles;
    const int64_t blocks = (int64_t)divide_up(strips_of(tiles), TE_PANEL_STRIPS) * divide_up(rows, 4);
    /* Of a joined product, the second half fetches. */
    const int64_t visits = TE_MAX(1, blocks / num_chunks / (is_joined(program, op) ? 2 : 1)) * tiles->groups;
    ahead.base = (const uint8_t *)(cache->data + attention->layer * cache->layer_size);
    ahead.offsets = plan->pieces + start + first;
    ahead.num_pieces = end - first;
    ahead.piece_bytes = piece_bytes(cache);
    ahead.num_lines = divide_up((int64_t)ahead.num_pieces * (ahead.piece_bytes / 64), visits);
    return ahead;
}

static void run_joined(const TeProgram *program, int32_t index, int32_t rows, int32_t chunk, float *scratch)
{
    const TeLinear *linear = &program->ops[index].linear;
    const TeGated *gated = &program->ops[index + 1].gated;
    int32_t all_strips;
    const LinearBlock block = block_of(program, index, &all_strips);
    const int32_t strip_chunks = divide_up(all_strips, block.strips), width = gated->width;
    const int32_t strip = chunk % strip_chunks * block.strips, token = chunk / strip_chunks * block.tokens;
    const int32_t strips = TE_MIN(block.strips, all_strips - strip), num_tokens = TE_MIN(block.tokens, rows - token);
    const int32_t column = strip * TE_TILE_ROWS, num_columns = strips * TE_TILE_ROWS;
    const size_t strip_bytes = te_tile_strip_bytes(linear->tiles.kind, linear->tiles.columns);
    const TeGroup *x = (const TeGroup *)linear->x + (int64_t)token * linear->tiles.groups;
    const TeAhead values = {.tiles = linear->tiles.data + (size_t)(all_strips + strip) * strip_bytes,
                            .strip_bytes = strip_bytes};
    const TeAhead ahead = ahead_of(program, index, rows, chunk);
    TeTiles tiles = linear->tiles;
    tiles.rows = num_columns;
    tiles.data += (size_t)strip * strip_bytes;
    te_kernels()->linear(&tiles, x, linear->bias ? linear->bias + column : NULL, scratch, 2 * num_columns, 0, strips, 0,
                         num_tokens, &values);
    tiles.data = values.tiles;
    te_kernels()->linear(&tiles, x, linear->bias ? linear->bias + width + column : NULL, scratch + num_columns,
                         2 * num_columns, 0, strips, 0, num_tokens, &ahead);
    for (int64_t i = 0; i < num_tokens; i++) {
        const int64_t place = (token + i) * width + column; /* the width is whole groups */
        te_kernels()->gated(scratch + i * 2 * num_columns, num_columns, gated->activation, 0, num_columns,
                            linear->gated_out ? linear->gated_out + place : NULL,
                            linear->gated_groups ? linear->gated_groups + place / TE_GROUP : NULL);
    }
}

static void run_linear(const TeProgram *program, int32_t index, int32_t rows, int32_t chunk)
{
    const TeLinear *linear = &program->ops[index].linear;
    const LinearBlock block = linear_block(program, &linear->tiles, rows);
    const int32_t strips = strips_of(&linear->tiles), strip_chunks = divide_up(strips, block.strips);
    const int32_t strip = chunk % strip_chunks * block.strips, token = chunk / strip_chunks * block.tokens;
    const int32_t end_strip = TE_MIN(strip + block.strips, strips), end = TE_MIN(token + block.tokens, rows);
    const TeAhead ahead = ahead_of(program, index, rows, chunk);
    if (linear->may_round)
        te_kernels()->rounded_linear(&linear->tiles, linear->x, linear->bias, linear->out, linear->out_stride, strip,
                                     end_strip, token, end);
    else
        te_kernels()->linear(&linear->tiles, linear->x, linear->bias, linear->out, linear->out_stride, strip, end_strip,
                             token, end, &ahead);
}

static void run_activated_linear(const TeProgram *program, const TeOp *op, int32_t rows, int32_t chunk, float *scratch)
{
    const TeActivatedLinear *linear = &op->activated_linear;
    const int32_t width = linear->tiles.rows, groups = divide_up(width, TE_GROUP);
    const LinearBlock block = activated_block(program, &linear->tiles, rows);
    const int32_t strips = strips_of(&linear->tiles), strip_chunks = divide_up(strips, block.strips);
    const int32_t strip = chunk % strip_chunks * block.strips, token = chunk / strip_chunks * block.tokens;
    const int32_t column = strip * rows_per_strip(&linear->tiles), num_tokens = TE_MIN(block.tokens, rows - token);
    const int32_t num_columns = TE_MIN(block.strips * rows_per_strip(&linear->tiles), width - column);
    const size_t x_bytes = rows_per_strip(&linear->tiles) == TE_TILE_ROWS ? (size_t)linear->tiles.groups * sizeof(TeGroup)
                                                                 : (size_t)linear->tiles.columns * sizeof(float);
    TeTiles tiles = linear->tiles;
    tiles.data += (size_t)strip * te_tile_strip_bytes(tiles.kind, tiles.columns);
    tiles.rows = num_columns;
    float *out = linear->out ? linear->out + (int64_t)token * width + column : scratch;
    const int64_t stride = linear->out ? width : ACTIVATED_COLUMNS;
    te_kernels()->linear(&tiles, (const char *)linear->x + (size_t)token * x_bytes,
                         linear->bias ? linear->bias + column : NULL, out, stride, 0, strips_of(&tiles), 0, num_tokens,
                         NULL);
    for (int32_t i = 0; i < num_tokens; i++)
        te_kernels()->activate(out + i * stride, num_columns, linear->activation, linear->out ? out + i * stride : NULL,
                               linear->groups ? linear->groups + (int64_t)(token + i) * groups + column / TE_GROUP
                                              : NULL);
}

static void run_expert_linear(const TeProgram *program, const TeOp *op, int32_t chunk)
{
    const TeExpertLinear *linear = &op->expert_linear;
    const int32_t strips = strips_of(linear->tiles), per_chunk = expert_strips(program, linear->tiles);
    const int32_t chunks = divide_up(strips, per_chunk), expert = chunk / chunks, strip = chunk % chunks * per_chunk;
    const int32_t first = linear->starts[expert], end = linear->starts[expert + 1];
    if (first < end)
        te_kernels()->linear(&linear->tiles[expert], linear->x, NULL, linear->out, linear->out_stride, strip,
                             TE_MIN(strip + per_chunk, strips), first, end, NULL);
}

/* The experts of one token with the largest logits; of equal ones those with lower numbers. Softmax over all. */
static void choose_experts(const TeChooseExperts *choose, int64_t row)
{
    const float *logits = choose->logits + row * choose->num_experts;
    int32_t *chosen = choose->chosen + row * choose->num_chosen;
    float *weights = choose->weights + row * choose->num_chosen;
    for (int32_t i = 0; i < choose->num_chosen; i++) {
        int32_t best = -1;
        for (int32_t expert = 0; expert < choose->num_experts; expert++) {
            int is_free = 1;
            for (int32_t j = 0; j < i; j++)
                is_free &= chosen[j] != expert;
            /* A NaN is no larger than anything: the first free one is taken then, and the weights are NaN. */
            if (is_free && (best < 0 || logits[expert] > logits[best]))
                best = expert;
        }
        chosen[i] = best;
    }
    float sum = 0.0f, max = logits[chosen[0]];
    for (int32_t expert = 0; expert < choose->num_experts && !choose->is_normalized; expert++)
        sum += expf(logits[expert] - max);
    for (int32_t i = 0; i < choose->num_chosen; i++) {
        weights[i] = expf(logits[chosen[i]] - max);
        if (choose->is_normalized)
            sum += weights[i];
    }
    for (int32_t i = 0; i < choose->num_chosen; i++)
        weights[i] /= sum;
}

static void group_by_expert(const TeGroupByExpert *group, int32_t num_tokens)
{
    const int32_t num_pairs = num_tokens * group->num_chosen;
    memset(group->starts, 0, (size_t)(group->num_experts + 1) * sizeof(int32_t));
    for (int32_t pair = 0; pair < num_pairs; pair++)
        group->starts[group->chosen[pair] + 1]++;
    for (int32_t expert = 0; expert < group->num_experts; expert++)
        group->starts[expert + 1] += group->starts[expert];
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        /* Each start moves to its expert's end, which is where the next one's was... */
        int32_t place = group->starts[group->chosen[pair]]++;
        group->rows[place] = pair / group->num_chosen;
        group->places[pair] = place;
    }
    /* ...and back. */
    memmove(group->starts + 1, group->starts, (size_t)group->num_experts * sizeof(int32_t));
    group->starts[0] = 0;
}

static void mix_experts(const TeMixExperts *mix, int64_t row)
{
    float *out = mix->out + row * mix->width;
    for (int32_t i = 0; i < mix->num_chosen; i++) {
        const int64_t pair = row * mix->num_chosen + i;
        const float *x = mix->x + (int64_t)mix->places[pair] * mix->width, weight = mix->weights[pair];
        for (int32_t column = 0; column < mix->width; column++)
            out[column] = i ? out[column] + weight * x[column] : weight * x[column];
    }
}

static void run_gated(const TeProgram *program, const TeOp *op, int32_t rows, int32_t chunk)
{
    const TeGated *gated = &op->gated;
    const int32_t width = gated->width, groups = divide_up(width, TE_GROUP);
    int32_t first, end, column = 0, end_column = width;
    if (program->num_threads > 1 && rows < 2 * program->num_threads) {
        int32_t pieces = divide_up(width, GATED_COLUMNS);
        first = chunk / pieces;
        end = first + 1;
        column = chunk % pieces * GATED_COLUMNS;
        end_column = TE_MIN(column + GATED_COLUMNS, width);
    } else {
        int32_t count = tokens_per_chunk(program, rows);
        first = chunk * count;
        end = TE_MIN(first + count, rows);
    }
    for (int32_t row = first; row < end; row++)
        te_kernels()->gated(gated->x + (int64_t)row * 2 * width, width, gated->activation, column, end_column,
                            gated->out ? gated->out + (int64_t)row * width : NULL,
                            gated->groups ? gated->groups + (int64_t)row * groups : NULL);
}

/* cos(x) of a float angle, as the reference computes it: position * frequency is rounded to a float. */
static void rope_table_row(const TeRopeTable *table, int32_t position, float *out)
{
    for (int32_t i = 0; i < table->half; i++) {
        float angle = (float)position * table->inverse_frequencies[i];
        out[i] = (float)cos((double)angle) * table->factor;
        out[table->half + i] = (float)sin((double)angle) * table->factor;
    }
}

static void norm_heads(float *x, int32_t width, const float *weight, int32_t size, float epsilon)
{
    for (int32_t first = 0; first < width; first += size)
        te_kernels()->rms_norm(x + first, NULL, weight, epsilon, size, x + first, NULL);
}

static void rope_write_row(const TeRopeWrite *rope, const TeStep *step, int64_t row)
{
    const TeCache *cache = &step->caches[rope->kv_group];
    float *qkv = rope->qkv + row * rope->qkv_stride;
    if (rope->query_norm) {
        const int32_t query_width = rope->num_heads * cache->head_dim, key_width = cache->num_kv_heads * cache->head_dim;
        norm_heads(qkv, query_width, rope->query_norm, rope->query_norm_size, rope->epsilon);
        norm_heads(qkv + query_width, key_width, rope->key_norm, rope->key_norm_size, rope->epsilon);
    }
    te_kernels()->rope_write(qkv, rope->cos_sin + row * 2 * rope->half, rope->half, rope->num_heads, cache, rope->layer,
                             step->slots[(int64_t)rope->kv_group * step->num_tokens + row]);
}

static void lora_row(const TeLora *lora, const TeStep *step, int64_t row, int64_t token)
{
    const TeLoraPart *parts = lora->parts + (int64_t)step->lora_slots[token] * lora->num_parts;
    for (int32_t i = 0; i < lora->num_parts; i++)
        if (parts[i].rank)
            te_kernels()->lora(&parts[i], lora->x + row * lora->columns, lora->columns, lora->out + row * lora->width);
}

static void run_row(const TeProgram *program, const TeOp *op, int64_t row)
{
    const TeKernels *kernels = te_kernels();
    const TeStep *step = &program->step;
    switch (op->kind) {
    case TE_OP_EMBEDDING: {
        const int32_t width = op->embedding.tiles.columns;
        float *out = op->embedding.out + row * width;
        kernels->embedding(&op->embedding.tiles,
                           op->embedding.is_by_position ? step->positions[row] : step->token_ids[row], out);
        for (int32_t i = 0; i < width && op->embedding.multiplier != 1.0f; i++)
            out[i] *= op->embedding.multiplier;
        break;
    }
    case TE_OP_RMS_NORM: {
        const TeNorm *norm = &op->norm;
        kernels->rms_norm(norm->x + row * norm->width, norm->residual ? norm->residual + row * norm->width : NULL,
                          norm->weight, norm->epsilon, norm->width, norm->out ? norm->out + row * norm->width : NULL,
                          norm->groups ? norm->groups + row * divide_up(norm->width, TE_GROUP) : NULL);
        break;
    }
    case TE_OP_LAYER_NORM: {
        const TeLayerNorm *norm = &op->layer_norm;
        kernels->layer_norm(norm->x + row * norm->width, norm->residual ? norm->residual + row * norm->width : NULL,
                            norm->weight, norm->bias, norm->epsilon, norm->width, norm->out + row * norm->width,
                            norm->groups ? norm->groups + row * divide_up(norm->width, TE_GROUP) : NULL);
        break;
    }
    case TE_OP_QUANTIZE:
        kernels->quantize(op->quantize.x + row * op->quantize.width, op->quantize.width,
                          op->quantize.groups + row * divide_up(op->quantize.width, TE_GROUP));
        break;
    case TE_OP_ADD:
        kernels->add(op->add.x + row * op->add.width, op->add.residual + row * op->add.width, op->add.width);
        break;
    case TE_OP_LORA:
        lora_row(&op->lora, step, row, op->row_kind == TE_ROWS_TOKENS ? row : step->selected_rows[row]);
        break;
    case TE_OP_ROPE_TABLE:
        rope_table_row(&op->rope_table, step->positions[row], op->rope_table.out + row * 2 * op->rope_table.half);
        break;
    case TE_OP_ROPE_WRITE:
        rope_write_row(&op->rope_write, step, row);
        break;
    case TE_OP_SELECT_ROWS:
        memcpy(op->select.out + row * op->select.width,
               op->select.x + (int64_t)step->selected_rows[row] * op->select.width,
               (size_t)op->select.width * sizeof(float));
        break;
    case TE_OP_SOFT_CAP:
        kernels->soft_cap(op->soft_cap.x + row * op->soft_cap.width, op->soft_cap.width, op->soft_cap.cap);
        break;
    case TE_OP_CHOOSE_EXPERTS:
        choose_experts(&op->choose, row);
        break;
    case TE_OP_GATHER_ROWS:
        memcpy(op->gather.out + row * op->gather.row_bytes,
               op->gather.x + (int64_t)op->gather.rows[row] * op->gather.row_bytes, (size_t)op->gather.row_bytes);
        break;
    case TE_OP_MIX_EXPERTS:
        mix_experts(&op->mix, row);
        break;
    default:
        abort();
    }
}

/* Which task and KV head is chunk `chunk`: those with the most keys first, so that the last ones to finish are short. */
static const TeAttentionTask *task_of(const AttentionPlan *plan, const TeCache *cache, int32_t chunk, int32_t *kv_head)
{
    *kv_head = chunk % cache->num_kv_heads;
    return &plan->tasks[plan->num_tasks - 1 - chunk / cache->num_kv_heads];
}

static void run_chunk(void *context, int32_t index, int32_t chunk, int32_t thread)
{
    TeProgram *program = context;
    const TeOp *op = &program->ops[index];
    const int32_t rows = rows_of(program, op);
    switch (op->kind) {
    case TE_OP_LINEAR:
        if (is_joined(program, index))
            run_joined(program, index, rows, chunk, program->scratch + (size_t)thread * program->scratch_floats);
        else
            run_linear(program, index, rows, chunk);
        break;
    case TE_OP_ACTIVATED_LINEAR:
        run_activated_linear(program, op, rows, chunk, program->scratch + (size_t)thread * program->scratch_floats);
        break;
    case TE_OP_GATED:
        run_gated(program, op, rows, chunk);
        break;
    case TE_OP_EXPERT_LINEAR:
        run_expert_linear(program, op, chunk);
        break;
    case TE_OP_GROUP_BY_EXPERT:
        group_by_expert(&op->group, rows);
        break;
    case TE_OP_FULL_ATTENTION: {
        const int32_t *starts = program->step.query_start, heads = op->full_attention.num_heads;
        const int32_t sequence = chunk / heads;
        te_kernels()->full_attention(&op->full_attention, starts[sequence], starts[sequence + 1], chunk % heads,
                                     program->scratch + (size_t)thread * program->scratch_floats);
        break;
    }
    case TE_OP_ATTENTION: {
        const AttentionPlan *plan = &program->plans[op->attention.kv_group];
        int32_t kv_head;
        const TeAttentionTask *task = task_of(plan, &program->step.caches[op->attention.kv_group], chunk, &kv_head);
        TeAttention attention = op->attention;
        attention.partials = program->partials;
        te_kernels()->attention(&attention, &program->step, task, kv_head,
                                program->scratch + (size_t)thread * program->scratch_floats);
        break;
    }
    case TE_OP_ATTENTION_MERGE: {
        const AttentionPlan *plan = &program->plans[op->attention.kv_group];
        TeAttention attention = op->attention;
        attention.partials = program->partials;
        te_kernels()->merge(&attention, &program->step, plan->merge_row[chunk], plan->merge_partial[chunk],
                            plan->merge_partial[chunk + 1] - plan->merge_partial[chunk]);
        break;
    }
    default: {
        int32_t count = tokens_per_chunk(program, rows), first = chunk * count;
        for (int32_t row = first; row < TE_MIN(first + count, rows); row++)
            run_row(program, op, row);
    }
    }
}

static int reserve(void **memory, size_t *capacity, size_t bytes)
{
    if (bytes <= *capacity)
        return 1;
    void *larger = NULL;
    if (posix_memalign(&larger, 64, bytes))
        return 0;
    free(*memory);
    *memory = larger;
    *capacity = bytes;
    return 1;
}

static int32_t first_split_of(int32_t place, int32_t window)
{
    return window ? TE_MAX(place - window + 1, 0) / TE_KV_SPLIT : 0;
}

/* Cuts the step's queries into tasks: a few tokens each; where the step is so small that threads would idle, each
 * token's keys into splits. Fills in `tasks` when it is there, else only counts. */
static void plan_tasks(const TeProgram *program, AttentionPlan *plan, int32_t group, int32_t window,
                       TeAttentionTask *tasks)
{
    const TeStep *step = &program->step;
    const int32_t tokens_per_task = TE_MAX(1, QUERY_ROWS / group);
    const int32_t is_cut = program->num_threads > 1 && step->num_tokens <= MAX_SPLIT_TOKENS;
    int32_t count = 0, partial = 0;
    plan->num_merges = 0;
    for (int32_t sequence = 0; sequence < step->num_sequences; sequence++) {
        const int32_t start = step->query_start[sequence], end = step->query_start[sequence + 1];
        for (int32_t row = start; row < end;) {
            const int32_t num_rows = is_cut ? 1 : TE_MIN(tokens_per_task, end - row);
            const int32_t place = step->seq_lens[sequence] - (end - row), last = place + num_rows - 1;
            const int32_t first_split = first_split_of(place, window), end_split = last / TE_KV_SPLIT + 1;
            TeAttentionTask task = {sequence, row, num_rows, first_split, end_split, -1};
            if (is_cut && end_split - first_split > 1) {
                if (tasks) {
                    plan->merge_row[plan->num_merges] = row;
                    plan->merge_partial[plan->num_merges] = partial;
                    plan->merge_partial[plan->num_merges + 1] = partial + end_split - first_split;
                }
                plan->num_merges++;
                for (int32_t split = first_split; split < end_split; split++, count++, partial++)
                    if (tasks)
                        tasks[count] = (TeAttentionTask){sequence, row, num_rows, split, split + 1, partial};
            } else {
                if (tasks)
                    tasks[count] = task;
                count++;
            }
            row += num_rows;
        }
    }
    plan->num_tasks = count;
}

/* Which keys and values each thread reads in a step of many tokens, as far as a cache may hold them. */
static int plan_pieces(const TeProgram *program, AttentionPlan *plan, int32_t kv_group, int32_t window)
{
    const TeStep *step = &program->step;
    const TeCache *cache = &step->caches[kv_group];
    const int32_t bytes = piece_bytes(cache), num_threads = program->num_threads;
    const int32_t most = MAX_FETCHED_BYTES / bytes / num_threads;
    if (step->num_tokens < TE_PANEL_MIN_TOKENS)
        return 1;
    if (!reserve((void **)&plan->pieces, &plan->piece_bytes, (size_t)(most * num_threads) * sizeof(int64_t)) ||
        !reserve((void **)&plan->piece_starts, &plan->piece_start_bytes, (size_t)(num_threads + 1) * sizeof(int32_t)))
        return 0;
    int32_t count = 0;
    for (int32_t thread = 0; thread < num_threads; thread++) {
        const int32_t num_chunks = plan->num_tasks * cache->num_kv_heads, most_count = count + most;
        plan->piece_starts[thread] = count;
        for (int32_t chunk = thread; chunk < num_chunks && count < most_count; chunk += num_threads) {
            int32_t head;
            const TeAttentionTask *task = task_of(plan, cache, chunk, &head);
            const int32_t *blocks =
                step->block_table + ((int64_t)kv_group * step->num_sequences + task->sequence) * step->max_blocks;
            const int32_t end = step->query_start[task->sequence + 1], length = step->seq_lens[task->sequence];
            const int32_t first_place = length - (end - task->first_row), num_keys = first_place + task->num_rows;
            int32_t place = task->first_split * TE_KV_SPLIT;
            if (task->first_row != step->query_start[task->sequence])
                continue; /* nearly the same keys as the rows before */
            if (window)
                place = TE_MAX(place, TE_MAX(first_place - window + 1, 0) / TE_KV_TOKENS * TE_KV_TOKENS);
            const int32_t end_place = TE_MIN(num_keys, task->end_split * TE_KV_SPLIT);
            for (; place < end_place && count < most_count; place += TE_KV_TOKENS) {
                const int64_t slot = (int64_t)blocks[place / cache->block_size] * cache->block_size + place % cache->block_size;
                plan->pieces[count++] = (slot / TE_KV_TOKENS * cache->num_kv_heads + head) * bytes;
            }
        }
    }
    plan->piece_starts[num_threads] = count;
    return 1;
}

/* Plans the attention of one KV group's layers, and reserves memory for it. */
static int prepare_group(TeProgram *program, int32_t kv_group)
{
    AttentionPlan *plan = &program->plans[kv_group];
    const TeCache *cache = &program->step.caches[kv_group];
    int32_t num_heads = 0, window = 0, all_windows = 1;
    for (int32_t op = 0; op < program->num_ops; op++)
        if (program->ops[op].kind == TE_OP_ATTENTION && program->ops[op].attention.kv_group == kv_group) {
            num_heads = TE_MAX(num_heads, program->ops[op].attention.num_heads);
            window = TE_MAX(window, program->ops[op].attention.window);
            all_windows &= program->ops[op].attention.window > 0;
        }
    if (!num_heads)
        return 1;
    if (!all_windows)
        window = 0; /* layers without see all keys; those with a window skip what they do not see */
    const int32_t group = num_heads / cache->num_kv_heads;
    plan_tasks(program, plan, group, window, NULL);
    if (!reserve((void **)&plan->tasks, &plan->task_bytes, (size_t)plan->num_tasks * sizeof(TeAttentionTask)))
        return 0;
    plan_tasks(program, plan, group, window, plan->tasks);
    if (!plan_pieces(program, plan, kv_group, window))
        return 0;
    size_t num_partials = plan->num_merges ? (size_t)plan->merge_partial[plan->num_merges] : 0;
    size_t partial_bytes = num_partials * (size_t)num_heads * (2 + (size_t)cache->padded_dim) * sizeof(float);
    size_t scratch_floats = te_attention_scratch_floats(TE_MAX(QUERY_ROWS, group), cache->padded_dim);
    program->scratch_floats = TE_MAX(program->scratch_floats, (scratch_floats + 15) / 16 * 16);
    return reserve((void **)&program->partials, &program->partials_capacity, partial_bytes);
}

static int prepare_scratch(TeProgram *program)
{
    for (int32_t kv_group = 0; kv_group < program->num_kv_groups; kv_group++)
        if (!prepare_group(program, kv_group))
            return 0;
    int32_t longest = 0;
    for (int32_t i = 0; i < program->step.num_sequences; i++)
        longest = TE_MAX(longest, program->step.query_start[i + 1] - program->step.query_start[i]);
    for (int32_t op = 0; op < program->num_ops; op++) {
        size_t floats = 0;
        if (program->ops[op].kind == TE_OP_FULL_ATTENTION)
            floats = te_full_attention_scratch_floats(longest, program->ops[op].full_attention.head_dim);
        else if (program->ops[op].kind == TE_OP_ACTIVATED_LINEAR)
            floats = ACTIVATED_TOKENS * ACTIVATED_COLUMNS;
        else if (program->ops[op].kind == TE_OP_LINEAR && program->ops[op].linear.has_gate)
            floats = TE_MAX(JOINED_FLOATS, 2 * JOINED_TOKENS * TE_GROUP);
        program->scratch_floats = TE_MAX(program->scratch_floats, (floats + 15) / 16 * 16);
    }
    return reserve((void **)&program->scratch, &program->scratch_capacity,
                   (size_t)program->num_threads * program->scratch_floats * sizeof(float));
}

/* Returns 0 where memory for the step is not to be had. */
static int32_t prepare_step(TeProgram *program, TePool *pool, const TeStep *step)
{
    program->num_threads = te_pool_num_threads(pool);
    program->step = *step;
    if (!prepare_scratch(program))
        return 0;
    for (int32_t op = 0; op < program->num_ops; op++)
        program->chunks[op] = num_chunks(program, op);
    return 1;
}

TE_API int32_t te_program_run(TeProgram *program, TePool *pool, const TeStep *step)
{
    if (!prepare_step(program, pool, step))
        return 0;
    te_pool_run(pool, run_chunk, program, program->num_ops, program->chunks);
    return 1;
}

typedef struct {
    TeProgram *program;
    int32_t op;
} SingleOp;

static void run_single(void *context, int32_t index, int32_t chunk, int32_t thread)
{
    (void)index;
    const SingleOp *single = context;
    run_chunk(single->program, single->op, chunk, thread);
}

/* The same, one operation after the other, which costs some microseconds each: `ns` gets the time before the first
 * and after each, num_ops + 1 numbers. */
TE_API int32_t te_program_run_timed(TeProgram *program, TePool *pool, const TeStep *step, int64_t *ns)
{
    if (!prepare_step(program, pool, step))
        return 0;
    for (int32_t op = 0; op <= program->num_ops; op++) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        ns[op] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
        SingleOp single = {program, op};
        if (op < program->num_ops)
            te_pool_run(pool, run_single, &single, 1, program->chunks + op);
    }
    return 1;
}
