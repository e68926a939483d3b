/* Boundary values. Every number of every description and every numeric argument is set in turn to 0, 1, -1, the
   documented limit, one past it, the limits of its type, NaN, infinities and denormals. All else in the description is
   valid. Each call must end soon and ask for little memory. It succeeds, or names the member at fault and leaves its
   outputs unchanged.

   The members are not listed here. members.h has all of them, generated from the declarations by
   tests/unit/members.awk, and the test fails for a member that it does not reach. */

#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"

#include "tools/chunkflow_tune.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- what the header declares ---- */

typedef struct declared {
    const char *record, *member, *type;
    size_t offset;
} declared;

#define MEMBER(record, member, type) {#record, #member, type, offsetof(record, member)},
#define ARGUMENT(function, argument)
static const declared members[] = {
#include "members.h"
};
#undef MEMBER
#undef ARGUMENT
#define MEMBER(record, member, type)
#define ARGUMENT(function, argument) {#function, #argument},
static const struct {
    const char *function, *name;
} arguments[] = {
#include "members.h"
};

enum { N_MEMBERS = sizeof members / sizeof members[0], N_ARGUMENTS = sizeof arguments / sizeof arguments[0] };

static unsigned char visited[N_MEMBERS];

/* The structs that are not tried here. tests/fuzz/fuzz_hostile.c damages objects. A cf_memory_block says how much
   memory there is, which nobody can check. */
static const char *const objects[] = {"cf_plan", "cf_chunk", "cf_slice", "cf_chain", "cf_schedule", "cf_action",
                                      "cf_graph", "cf_node", "cf_edge", "cf_block"};
static const char *const outputs[] = {
    "cf_error",          "cf_plan_stats",    "cf_metadata", "cf_parameters", "cf_shard",     "cf_token_bytes",
    "cf_memory_report",  "cf_search_report", "cf_bound",    "cf_need",       "cf_timeline",  "cf_fit",
    "cf_attention_call", "cf_token_rows",
    "cf_tune_candidate", "cf_tune_progress", "cf_tuning",   "cf_kv_source",      "cf_steps",     "cf_step",
    "cf_path"};

/* ---- documented limits ---- */

typedef struct bound {
    const char *record, *member; /* member NULL: all members of the record that have no entry of their own */
    int64_t limit;               /* the largest allowed value, if it is less than the type's */
    int counts;                  /* 1: the length of an array of the caller's, which nobody can check. 2: an amount of
                                    work, so that a large number rightly takes long */
    /* other members that an error may blame for a value of this one, between blanks; or NULL */
    const char *also;
} bound;

static const bound bounds[] = {
    {"cf_pack_desc", "chunk_size", CF_MAX_CHUNK_SIZE, 0, " align lengths "},
    {"cf_pack_desc", "n_ranks", CF_MAX_RANKS, 0, NULL},
    {"cf_pack_desc", "lockstep", 1, 0, " method cp group "},
    {"cf_pack_desc", "max_cp", CF_MAX_RANKS, 0, " method "},
    {"cf_pass_cost", NULL, 0, 0, " timing cost all "},
    {"cf_timing", NULL, 0, 0, " timing "},
    {"cf_loss_weights_desc", "mean", 0, 0, " prompts "},
    {"cf_capacity", "rows", INT32_MAX, 0, " prefix "},
    {"cf_capacity", "prefix", INT32_MAX, 0, NULL},
    {"cf_capacity", "n_seqs", INT32_MAX, 0, " rows "}, /* which may not fit in memory, where that has 32 bits */
    {"cf_model", "layers", CF_MAX_LAYERS, 0, " pp limit_bytes "},
    {"cf_model", "hidden", CF_MAX_WIDTH, 0, " head_dim limit_bytes "},
    {"cf_model", "heads", CF_MAX_WIDTH, 0, " hidden kv_heads tp head_dim limit_bytes "},
    {"cf_model", "kv_heads", CF_MAX_WIDTH, 0, " tp limit_bytes "},
    {"cf_model", "head_dim", CF_MAX_WIDTH, 0, " limit_bytes "},
    {"cf_model", "ffn", CF_MAX_FFN, 0, " tp limit_bytes "},
    {"cf_model", "vocab", CF_MAX_VOCAB, 0, " limit_bytes "},
    {"cf_model", "mtp", CF_MAX_LAYERS, 0, " limit_bytes "},
    {"cf_model", "norms", CF_MAX_KINDS, 0, NULL},
    {"cf_layer", NULL, 0, 0, " heads kv_heads head_dim value_dim rope_dim window latent tail active parameters model "
                          "experts shared shared_gate gate sinks "},
    {"cf_parallel", "tp", CF_MAX_RANKS, 0, NULL},
    {"cf_parallel", "ep", CF_MAX_EXPERTS, 0, NULL},
    {"cf_parallel", "imbalance", 1000, 0, NULL},
    {"cf_parallel", "pp", CF_MAX_LAYERS, 1, " n_virtual n_loads layers "},
    {"cf_parallel", "n_virtual", CF_MAX_LAYERS, 1, " pp n_loads layers "},
    {"cf_parallel", "dp", CF_MAX_RANKS, 1, NULL},
    {"cf_parallel", "zero", 3, 0, NULL},
    {"cf_parallel", "recompute_layers", CF_MAX_LAYERS, 0, NULL},
    {"cf_parallel", "vocab_multiple", CF_MAX_VOCAB, 0, " limit_bytes "},
    {"cf_memory_desc", NULL, 1024, 0, " loads chunk_tokens limit_bytes parameters "}, /* bytes of a number */
    {"cf_memory_desc", "fragmentation", 1000, 0, " loads chunk_tokens limit_bytes parameters "},
    {"cf_memory_desc", "state_window", CF_MAX_LENGTH, 0, " loads chunk_tokens limit_bytes parameters "},
    {"cf_memory_desc", "gathered", CF_MAX_LENGTH, 0, " loads chunk_tokens limit_bytes parameters "},
    {"cf_memory_desc", "lora_experts", 0, 0, " lora_rank parameters limit_bytes "},
    {"cf_memory_desc", "lora_rank", CF_MAX_WIDTH, 0, " loads chunk_tokens limit_bytes parameters "},
    {"cf_memory_desc", "chunk_size", CF_MAX_CHUNK_SIZE, 0, NULL},
    {"cf_memory_desc", "outputs", 2, 0, " outputs "},
    {"cf_memory_desc", "offload", CF_OFFLOAD_ALL, 0, " offload "},
    {"cf_memory_desc", "runtime_bytes", INT64_MAX, 0, " loads chunk_tokens limit_bytes parameters "},
    {"cf_memory_load", NULL, 0, 0, " loads "},
    {"cf_shape", "n_stages", CF_MAX_STAGES, 1, " n_virtual n_nodes n_actions "},
    {"cf_shape", "n_virtual", CF_MAX_STAGES, 1, " n_stages n_nodes n_actions "},
    {"cf_schedule_desc", "max_tries", INT64_MAX, 2, NULL},
    {"cf_limits", "bytes_by_stage", 0, 0, " bytes "},
    {"cf_limits", "chunks_by_stage", 0, 0, " chunks "},
    {"cf_held_bytes", NULL, 0, 0, " bytes per_token limit_bytes "},
    {"cf_shared_prefix", NULL, 0, 0, " shares "},
    {"cf_sample", NULL, 0, 0, " samples "},
    {"cf_gpu", NULL, 0, 0, " gpu timing limit_bytes "},
    {"cf_gpu", "memory", INT64_MAX / 1000, 0, " gpu timing limit_bytes "},
    {"cf_cost_desc", "gpus_per_node", CF_MAX_RANKS, 0, NULL},
    {"cf_cost_desc", "chunk_size", CF_MAX_CHUNK_SIZE, 0, NULL},
    {"cf_cost_desc", "max_cp", CF_MAX_RANKS, 0, NULL},
    {"cf_cost_desc", "outputs", 1, 0, " outputs "},
    {"cf_cost_desc", "offload", CF_OFFLOAD_ALL, 0, " offload "},
    {"cf_tune_desc", "chunk_sizes", CF_MAX_CHUNK_SIZE, 0, NULL},
    {"cf_tune_desc", "ks", CF_MAX_CHUNKS, 0, NULL},
    {"cf_tune_desc", "n_gpus", CF_MAX_RANKS, 2, NULL},
    {"cf_tune_desc", "gpus_per_node", CF_MAX_RANKS, 0, NULL},
    {"cf_tune_desc", "limit_bytes", INT64_MAX / 1000, 0, NULL},
    {"cf_stage_bytes", NULL, CF_MAX_STAGE_BYTES, 0, " limit_bytes "},
    {"cf_stage_bytes", "fixed", CF_MAX_STAGE_BYTES, 0, " limit_bytes "},
    {"cf_tune_desc", "max_tries", INT64_MAX, 2, NULL},
    {"cf_tune_desc", "n_chunk_sizes", CF_MAX_CANDIDATES, 1, NULL},
    {"cf_tune_desc", "n_ks", CF_MAX_CANDIDATES, 1, NULL},
    {"cf_tune_desc", "n_kinds", CF_SCHEDULE_COUNT - 1, 1, NULL},
    {"cf_tune_desc", "n_replays", CF_REPLAY_COUNT - 1, 1, NULL},
    {"cf_tune_desc", "batch", CF_MAX_SEQUENCES, 2, NULL},
    {"cf_tune_desc", "n_batches", CF_MAX_TUNE_BATCHES, 2, NULL},
    {"cf_tune_desc", "n_exact", CF_MAX_CANDIDATES, 0, NULL},
    {"cf_tune_desc", "reserve", 99, 0, " limit_bytes "},
    {"cf_tune_desc", "context", CF_MAX_LENGTH, 2, " limit_bytes parameters lengths "},
};

static const bound *bound_of(const char *record, const char *member) {
    const bound *of_record = NULL;
    size_t i;
    for (i = 0; i < sizeof bounds / sizeof bounds[0]; i++) {
        if (strcmp(bounds[i].record, record) != 0) continue;
        if (bounds[i].member == NULL) of_record = &bounds[i];
        else if (strcmp(bounds[i].member, member) == 0) return &bounds[i];
    }
    return of_record;
}

/* ---- an allocator that refuses what nobody should ask for ---- */

enum { MOST_BYTES = 1 << 28 };

static int64_t live_blocks, refused;
static harness_heap heap; /* replaces malloc where allocations are to fail */
static int starves;

static void *small_alloc(size_t bytes, void *user) {
    void *memory = bytes > MOST_BYTES ? NULL : starves ? harness_alloc(bytes, &heap) : malloc(bytes);
    (void)user;
    refused += memory == NULL;
    live_blocks += memory != NULL;
    return memory;
}

static void small_release(void *memory, void *user) {
    (void)user;
    live_blocks -= memory != NULL;
    if (starves) harness_release(memory, &heap);
    else free(memory);
}

static const cf_allocator small = {small_alloc, small_release, NULL};

/* ---- the descriptions, all of them valid, and the objects they describe ---- */

enum { N = 5, STAGES = 2 };

static int64_t lengths[N], prompts[N], limits[STAGES], limits_bytes[STAGES], layers[STAGES], chunk_sizes[2], ks[1];
static cf_schedule_kind kinds[1];
static cf_replay replays[1];
static double weights[N];
static cf_stage_cost stages[STAGES];
static cf_stage_bytes stage_bytes[STAGES];
static cf_memory_load loads[STAGES];
static cf_sample samples[4];
static cf_capacity capacity;
static cf_model model;
static cf_layer two_kinds[2]; /* a windowed layer, and experts with latent attention */
static cf_gpu gpu;
static cf_timing timing, plain_timing;
static cf_pass_cost cost;
static cf_held_bytes bytes;
static cf_pack_desc pack;
static cf_shared_prefix shares[N];
static cf_metadata_desc metadata;
static cf_loss_weights_desc loss;
static cf_parallel parallel, plain_parallel;
static cf_memory_desc memory;
static cf_schedule_desc order, plain_order; /* plain: without the arrays that its counts refer to */
static cf_validate_desc validate;
static cf_simulate_desc simulate;
static cf_lower_desc lower;
static cf_write_desc writing;
static cf_cost_desc estimate;
static cf_tune_desc tune, tune_bytes;

static cf_plan *plan;
static cf_schedule *schedule;

#define CLEAR(variable) memset(&variable, 0, sizeof variable)

static void set_models(void) {
    int i;
    model = *cf_model_find("qwen2.5-7b");
    CLEAR(two_kinds);
    two_kinds[0].mixer = CF_MIXER_WINDOW;
    two_kinds[0].window = 512;
    two_kinds[1] = cf_model_find("deepseek-v3")->kinds[0];
    two_kinds[1].heads = two_kinds[1].kv_heads = 28;
    gpu = *cf_gpu_find("h100-80g");
    CLEAR(parallel);
    parallel.tp = 2;
    parallel.pp = STAGES;
    parallel.dp = 2;
    layers[0] = layers[1] = 14;
    plain_parallel = parallel;
    parallel.layers = layers;
    CLEAR(memory);
    memory.model = &model;
    memory.parallel = parallel;
    CLEAR(loads);
    for (i = 0; i < STAGES; i++) loads[i].live_tokens = loads[i].chunk_tokens = 1000;
    CLEAR(estimate);
    estimate.model = &model;
    estimate.gpu = &gpu;
    estimate.parallel = parallel;
    for (i = 0; i < 4; i++) {
        samples[i].pass = CF_F;
        samples[i].rows = 100 + 100 * i * i;
        samples[i].pairs = 5000 * (i + 1);
        samples[i].seconds = 1 + i;
    }
}

static void set_tunes(void) {
    CLEAR(tune);
    chunk_sizes[0] = 4;
    chunk_sizes[1] = 8;
    ks[0] = 1;
    kinds[0] = CF_SCHEDULE_PAPER;
    replays[0] = CF_REPLAY_LOCAL;
    tune.chunk_sizes = chunk_sizes;
    tune.n_chunk_sizes = 2;
    tune.ks = ks;
    tune.kinds = kinds;
    tune.replays = replays;
    tune.n_ks = tune.n_kinds = tune.n_replays = tune.n_batches = 1;
    tune.batch = N;
    tune.allocator = &small;
    tune_bytes = tune;
    tune.model = &model;
    tune.gpu = &gpu;
    tune.parallel = parallel;
    stage_bytes[0].held.activations = stage_bytes[1].held.activations = 10;
    tune_bytes.bytes = stage_bytes;
    tune_bytes.timing = &timing;
    tune_bytes.limit_bytes = 100000;
    tune_bytes.parallel.pp = STAGES;
}

static void set_orders(void) {
    CLEAR(timing);
    CLEAR(stages);
    stages[0].forward.per_token = stages[1].forward.per_token = 1;
    timing.stages = stages;
    CLEAR(order);
    order.shape.n_stages = STAGES;
    order.shape.k = 2;
    order.timing = &timing;
    limits[0] = limits[1] = 9;
    limits_bytes[0] = limits_bytes[1] = 100000;
    order.limits.chunks_by_stage = limits;
    order.limits.bytes_by_stage = limits_bytes;
    order.limits.per_token.activations = 1;
    order.max_tries = 2;
    order.allocator = &small;
    CLEAR(plain_timing);
    plain_timing.all.forward.per_token = 1;
    plain_order = order;
    plain_order.timing = &plain_timing;
    plain_order.limits.chunks_by_stage = plain_order.limits.bytes_by_stage = NULL;
    plain_order.kind = CF_SCHEDULE_1F1B; /* a search over 65,536 stages rightly takes long */
    CLEAR(validate);
    validate.limits.chunks_by_stage = limits;
    validate.limits.bytes_by_stage = limits_bytes;
    validate.limits.per_token.activations = 1;
    CLEAR(simulate);
    simulate.timing = &timing;
    simulate.limits.chunks_by_stage = limits;
    simulate.limits.per_token.activations = 1;
    simulate.allocator = &small;
    CLEAR(lower);
    lower.timing = &timing;
    lower.allocator = &small;
}

/* A chain of three chunks, one of them hybrid, and standalone chunks. */
static void set_up(void) {
    static const int64_t given[N] = {10, 3, 1, 4, 0};
    int i;
    for (i = 0; i < N; i++) lengths[i] = given[i], prompts[i] = i / 2, weights[i] = 0.5;
    CLEAR(pack);
    pack.chunk_size = 4;
    pack.cost.per_token = 1;
    pack.allocator = &small;
    CLEAR(capacity);
    capacity.rows = capacity.n_seqs = 8;
    capacity.prefix = 16;
    metadata.capacity = &capacity;
    metadata.weights = weights;
    loss.mean = CF_MEAN_PROMPTS;
    loss.prompts = prompts;
    loss.allocator = &small;
    writing.metadata = 1;
    writing.allocator = &small;
    set_models();
    set_orders();
    set_tunes();
    if (plan == NULL) REQUIRE(cf_pack(lengths, N, &pack, &plan, NULL) == CF_OK);
    if (schedule == NULL) REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
}

static void tear_down(void) {
    cf_plan_free(plan);
    cf_schedule_free(schedule);
    plan = NULL;
    schedule = NULL;
    CHECK_INT(live_blocks, 0);
}

/* ---- the calls ----

   Each returns the library's result, and has checked the output of a success. The memory for outputs is poisoned first,
   and must still be poisoned after a failure. */

static unsigned char out[4096];

#define POISON() harness_poison(out, sizeof out)

static int untouched(cf_result result) { return result == CF_OK || CHECK_POISON(out, sizeof out); }

/* Returns whether an object was made: the heap then has one block more than after set_up. */
static int is_made(cf_result result) {
    if (!untouched(result) || result != CF_OK) return 0;
    CHECK_INT(live_blocks, 1 + (plan != NULL) + (schedule != NULL));
    return 1;
}

static cf_result call_pack(cf_error *error) {
    cf_plan **made = (cf_plan **)(void *)out;
    cf_result result = (POISON(), cf_pack(lengths, N, &pack, made, error));
    size_t needed = 0;
    CHECK_INT(cf_pack_size(lengths, N, &pack, &needed, NULL) == CF_OK, result == CF_OK || result == CF_ERROR_MEMORY);
    if (!is_made(result)) return result;
    CHECK_INT(cf_plan_validate(*made, lengths, N, NULL, NULL), CF_OK);
    cf_plan_free(*made);
    return result;
}

static cf_result call_shared_pack(cf_error *error) {
    cf_plan **made = (cf_plan **)(void *)out;
    cf_pack_desc desc = {0};
    cf_result result;
    desc.chunk_size = 8;
    desc.min_shared_prefix = 1;
    desc.shared_prefixes = shares;
    desc.allocator = &small;
    result = (POISON(), cf_pack(lengths, N, &desc, made, error));
    if (!is_made(result)) return result;
    CHECK_INT(cf_plan_validate(*made, lengths, N, NULL, NULL), CF_OK);
    cf_plan_free(*made);
    return result;
}

static cf_result call_measure(cf_error *error) {
    cf_plan_stats stats;
    (void)error;
    (void)cf_cost_seconds(&cost, 7, 100);
    cf_plan_measure(plan, &cost, &stats);
    CHECK_INT(stats.longest_chain, 3);
    return CF_OK;
}

static cf_result call_metadata(cf_error *error) {
    size_t needed = 0;
    cf_result result = cf_metadata_size(plan, -1, &metadata, &needed, error);
    void *room = result == CF_OK && needed < MOST_BYTES ? malloc(needed) : NULL;
    POISON();
    if (room != NULL) result = cf_metadata_fill(plan, 1, &metadata, room, needed, (cf_metadata *)(void *)out, error);
    untouched(room != NULL ? result : CF_ERROR_SPACE);
    free(room);
    return result;
}

static cf_result call_loss(cf_error *error) {
    cf_result result = (POISON(), cf_loss_weights(lengths, N, &loss, (double *)(void *)out, error));
    untouched(result);
    return result;
}

static cf_result call_model(cf_error *error) {
    cf_result result = (POISON(), cf_model_parameters(&model, (cf_parameters *)(void *)out, error));
    CHECK_INT(cf_model_validate(&model, NULL) == CF_OK, result == CF_OK);
    untouched(result);
    return result;
}

/* Counts, sizes and times a model of two kinds. Sizing computes products that counting parameters does not. */
static cf_result call_kinds(cf_error *error) {
    cf_memory_desc sizing;
    cf_token_bytes sized;
    cf_cost_desc cost_of;
    cf_timing timed;
    cf_stage_cost stage_cost;
    cf_parameters parameters;
    cf_model two = model;
    cf_result result;
    memset(&sizing, 0, sizeof sizing);
    memset(&cost_of, 0, sizeof cost_of);
    two.kinds = two_kinds;
    two.n_kinds = 2;
    two.pattern = "ab";
    two.mtp = 1;
    result = cf_model_validate(&two, error);
    sizing.model = cost_of.model = &two;
    cost_of.gpu = estimate.gpu;
    cost_of.chunk_size = 4096;
    if (result == CF_OK) result = cf_model_parameters(&two, &parameters, error);
    if (result == CF_OK) result = cf_memory_token_bytes(&sizing, 0, &sized, error);
    if (result == CF_OK) CHECK_INT(cf_cost_estimate(&cost_of, &stage_cost, 1, &timed, NULL, NULL), CF_OK);
    return result;
}

static cf_result split_with(const cf_parallel *split, cf_error *error) {
    cf_result result = (POISON(), cf_stage_shard(&model, split, 0, -1, (cf_shard *)(void *)out, error));
    cf_parameters parameters;
    CHECK_INT(cf_parallel_validate(&model, split, NULL), result);
    CHECK_INT(cf_stage_parameters(&model, split, 0, &parameters, NULL), result);
    untouched(result);
    return result;
}

static cf_result call_parallel(cf_error *error) { return split_with(&parallel, error); }

static cf_result call_plain_parallel(cf_error *error) { return split_with(&plain_parallel, error); }

static cf_result call_memory(cf_error *error) {
    cf_memory_report *reports = (cf_memory_report *)(void *)out;
    cf_result result = (POISON(), cf_memory_estimate(&memory, loads, STAGES, reports, STAGES, error));
    cf_token_bytes tokens;
    (void)cf_memory_token_bytes(&memory, 0, &tokens, NULL);
    untouched(result);
    if (result == CF_OK) CHECK(reports[0].total >= 0);
    return result;
}

static cf_result call_schedule_memory(cf_error *error) {
    cf_memory_report *reports = (cf_memory_report *)(void *)out;
    cf_result result = (POISON(), cf_schedule_memory(&memory, plan, schedule, reports, STAGES, &small, error));
    untouched(result);
    return result;
}

static cf_result call_graph(cf_error *error) {
    cf_graph **made = (cf_graph **)(void *)out;
    cf_result result = (POISON(), cf_graph_make(plan, schedule, &plain_timing, &small, made, error));
    if (!is_made(result)) return result;
    CHECK_STR(naive_graph_fault(*made), NULL);
    cf_graph_free(*made);
    return result;
}

static cf_result order_with(const cf_schedule_desc *desc, cf_error *error) {
    cf_schedule **made = (cf_schedule **)(void *)out;
    cf_result result = (POISON(), cf_schedule_make(plan, desc, made, error));
    size_t needed;
    if (cf_schedule_size(plan, desc, &needed, NULL) != CF_OK) CHECK(result != CF_OK);
    if (!is_made(result)) return result;
    CHECK_INT(cf_schedule_validate(plan, *made, NULL, NULL, NULL), CF_OK);
    cf_schedule_free(*made);
    return result;
}

static cf_result call_order(cf_error *error) { return order_with(&order, error); }

static cf_result call_plain_order(cf_error *error) { return order_with(&plain_order, error); }

static cf_result call_validate(cf_error *error) {
    return cf_schedule_validate(plan, schedule, &validate, &small, error);
}

static cf_result call_simulate(cf_error *error) {
    cf_timeline **made = (cf_timeline **)(void *)out;
    cf_result result = (POISON(), cf_simulate(plan, schedule, &simulate, made, error));
    if (!is_made(result)) return result;
    CHECK((*made)->makespan >= 0 && (*made)->makespan <= DBL_MAX);
    cf_timeline_free(*made);
    return result;
}

static cf_result call_measured(cf_error *error) {
    static double start[512], end[512];
    cf_timeline **made = (cf_timeline **)(void *)out;
    cf_simulate_desc desc = {0};
    cf_result result;
    desc.limits.per_token = bytes;
    desc.start = start;
    desc.end = end;
    desc.allocator = &small;
    result = (POISON(), cf_simulate(plan, schedule, &desc, made, error));
    if (is_made(result)) cf_timeline_free(*made);
    return result;
}

static cf_result call_lower(cf_error *error) {
    cf_schedule **made = (cf_schedule **)(void *)out;
    cf_result result = (POISON(), cf_schedule_lower(plan, schedule, &lower, made, error));
    if (is_made(result)) cf_schedule_free(*made);
    return result;
}

static cf_result call_steps(cf_error *error) {
    cf_steps **made = (cf_steps **)(void *)out;
    cf_result result = (POISON(), cf_steps_make(plan, schedule, 0, 0, &small, made, error));
    if (is_made(result)) cf_steps_free(*made);
    return result;
}

static int swallow(const char *text, size_t n, void *user) {
    (void)text, (void)n, (void)user;
    return 0;
}

static cf_result call_write(cf_error *error) { return cf_write_plan_json(plan, &writing, swallow, NULL, error); }

static cf_result call_fit(cf_error *error) {
    cf_result result = (POISON(), cf_cost_fit(samples, 4, (cf_stage_cost *)(void *)out, NULL, error));
    untouched(result);
    return result;
}

static cf_result call_estimate(cf_error *error) {
    cf_timing made;
    cf_stage_cost *costs = (cf_stage_cost *)(void *)out;
    double step;
    cf_result result = (POISON(), cf_cost_estimate(&estimate, costs, STAGES, &made, &step, error));
    untouched(result);
    if (result != CF_OK) return result;
    CHECK(costs[1].forward.constant + costs[1].backward.per_token + costs[1].weight.per_pair <= DBL_MAX);
    CHECK(made.latency + made.seconds_per_token <= DBL_MAX && step <= DBL_MAX);
    return result;
}

static cf_result tune_with(const cf_tune_desc *desc, cf_error *error) {
    cf_tuning **made = (cf_tuning **)(void *)out;
    cf_result result = (POISON(), cf_tune(lengths, N, desc, made, error));
    if (untouched(result) && result == CF_OK) cf_tuning_free(*made);
    return result;
}

static cf_result call_tune(cf_error *error) { return tune_with(&tune, error); }

static cf_result call_tune_bytes(cf_error *error) { return tune_with(&tune_bytes, error); }

static const struct {
    const char *name, *record;
    void *root;
    cf_result (*call)(cf_error *error);
    int plain; /* 1: without the arrays that its counts refer to, so that these may have any value */
} calls[] = {
    {"pack", "cf_pack_desc", &pack, call_pack, 1},
    {"pack with shares", "cf_shared_prefix", &shares[1], call_shared_pack, 1},
    {"measure", "cf_pass_cost", &cost, call_measure, 1},
    {"metadata", "cf_metadata_desc", &metadata, call_metadata, 1},
    {"loss weights", "cf_loss_weights_desc", &loss, call_loss, 1},
    {"model", "cf_model", &model, call_model, 1},
    {"a kind with experts", "cf_layer", &two_kinds[1], call_kinds, 1},
    {"parallel", "cf_parallel", &parallel, call_parallel, 0},
    {"parallel, even", "cf_parallel", &plain_parallel, call_plain_parallel, 1},
    {"memory", "cf_memory_desc", &memory, call_memory, 0},
    {"memory", "cf_memory_load", &loads[1], call_memory, 1},
    {"memory of a schedule", "cf_memory_desc", &memory, call_schedule_memory, 0},
    {"graph", "cf_timing", &plain_timing, call_graph, 1},
    {"order", "cf_schedule_desc", &order, call_order, 0},
    {"order, plain", "cf_schedule_desc", &plain_order, call_plain_order, 1},
    {"validate", "cf_validate_desc", &validate, call_validate, 1},
    {"simulate", "cf_simulate_desc", &simulate, call_simulate, 1},
    {"measured", "cf_held_bytes", &bytes, call_measured, 1},
    {"lower", "cf_lower_desc", &lower, call_lower, 1},
    {"write", "cf_write_desc", &writing, call_write, 1},
    {"fit", "cf_sample", &samples[2], call_fit, 1},
    {"estimate", "cf_cost_desc", &estimate, call_estimate, 0},
    {"tune", "cf_tune_desc", &tune, call_tune, 0},
    {"tune by bytes", "cf_tune_desc", &tune_bytes, call_tune_bytes, 0},
};

/* ---- memory that there is not ---- */

/* Lets each allocation of a call fail in turn, together with all later ones. The call must say so, write nothing and
   leak nothing. */
static void starve(const char *name, cf_result (*call)(cf_error *error), int most) {
    int64_t fail_at;
    harness_note("%s", name);
    for (fail_at = 1;; fail_at++) {
        cf_error error;
        cf_result result;
        memset(&heap, 0, sizeof heap);
        heap.fail_at = fail_at;
        harness_poison(&error, sizeof error);
        starves = 1;
        result = call(&error);
        starves = 0;
        CHECK(heap.live == 0 && heap.faults == 0);
        if (result == CF_OK) CHECK_POISON(&error, sizeof error);
        else CHECK(result == CF_ERROR_MEMORY && error.code == CF_ERROR_MEMORY);
        if (heap.failed == 0) break;
        /* at later allocations the call may already have succeeded */
        if (fail_at == 1) CHECK_INT(result, CF_ERROR_MEMORY);
        REQUIRE(fail_at < most);
    }
    harness_note("%s", "");
    memset(&heap, 0, sizeof heap);
}

static cf_result call_plan_validate(cf_error *error) { return cf_plan_validate(plan, lengths, N, &small, error); }

TEST(every_call_survives_every_failed_allocation) {
    cf_schedule *lowered = NULL, *own;
    size_t i;
    int kind;
    set_up();
    for (i = 0; i < sizeof calls / sizeof calls[0]; i++) starve(calls[i].name, calls[i].call, 1000);
    for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind++) {
        plain_order.kind = (cf_schedule_kind)kind;
        starve(cf_schedule_kind_name(plain_order.kind), call_plain_order, 20);
    }
    starve("steps", call_steps, 10);
    starve("validate a plan", call_plan_validate, 20);
    plan->chunks[1].pairs++; /* a refusal must not leak either */
    CHECK_INT(call_plan_validate(NULL), CF_ERROR_PLAN);
    plan->chunks[1].pairs--;
    REQUIRE(cf_schedule_lower(plan, schedule, &lower, &lowered, NULL) == CF_OK);
    own = schedule;
    schedule = lowered;
    lowered = own;
    live_blocks--;
    starve("simulate, lowered", call_simulate, 10);
    starve("measured, lowered", call_measured, 10);
    starve("steps, lowered", call_steps, 10);
    live_blocks++;
    cf_schedule_free(lowered);
    tear_down();
}

/* ---- one value in one place ---- */

typedef struct place {
    cf_result (*call)(cf_error *error);
    const char *call_name, *record, *member;
    void *at;
    int plain;
} place;

/* The last part of "timing.forward.constant". */
static const char *last_part(const char *field) {
    const char *dot = strrchr(field, '.');
    return dot != NULL ? dot + 1 : field;
}

static int may_blame(const place *p, const char *field) {
    const bound *b = bound_of(p->record, p->member);
    char name[80];
    if (strcmp(last_part(field), p->member) == 0) return 1;
    snprintf(name, sizeof name, " %s ", last_part(field));
    return b != NULL && b->also != NULL && strstr(b->also, name) != NULL;
}

/* Checks that the record has the number that is blamed, and past a documented limit that limit. */
static void check_numbers(const cf_error *e, const char *name, int64_t value, int64_t limit) {
    CHECK_STR(oracle_error_fault(e), NULL);
    static const char *const others[] = {"is not that of", "must add up", " of chunk ", "bytes.held",
                                         "the one before"}; /* the kind of value: its replacement, a sum, a neighbour */
    size_t i;
    if (strcmp(last_part(e->field), name) != 0 || strstr(e->text, "(wanted ") == NULL) return;
    for (i = 0; i < COUNT(others); i++)
        if (strstr(e->text, others[i]) != NULL) return;
    CHECK_INT(e->got, value);
    if (limit == 0 && e->code == CF_ERROR_LIMIT && value > 0) FAIL("this limit is not known here: %s", e->text);
    if (limit > 0 && value > limit && e->code == CF_ERROR_LIMIT)
        CHECK(e->wanted == limit || (e->wanted < limit && strstr(" prefix head_dim n_virtual ep ", name) != NULL));
}

/* Calls again with the value that the error wanted, if it belongs to this member. Something else may then be wrong, but
   not this member. */
static void try_wanted(const place *p, const cf_error *e, const char *name, size_t size, int64_t value) {
    const bound *b = bound_of(p->record, p->member);
    int skips = b != NULL && (b->counts == 2 || (b->counts && !p->plain)) && e->wanted > 1;
    unsigned char before[8];
    int32_t narrow = (int32_t)e->wanted;
    cf_error again = {0};
    cf_result result;
    /* each chunk has a different one, */
    if (strcmp(p->record, "cf_capacity") == 0) return;
    if (strcmp(name, "align") == 0 && strncmp(p->call_name, "tune", 4) == 0) return; /* and so has each ChunkSize */
    if (skips || strcmp(last_part(e->field), name) != 0 || e->got != value) return;
    if (strstr(e->text, "(wanted ") == NULL) return;
    memcpy(before, p->at, size);
    if (size == sizeof e->wanted) memcpy(p->at, &e->wanted, size);
    else memcpy(p->at, &narrow, size);
    refused = 0;
    result = p->call(&again);
    memcpy(p->at, before, size);
    if (result != CF_OK && again.item == e->item && strcmp(again.field, e->field) == 0)
        FAIL("%s, and with that: %s", e->text, again.text);
}

/* Writes `size` bytes to the place and makes the call. whole: the integer in these bytes, if it is one. */
static void try_value(const place *p, const void *value, size_t size, const char *text, const int64_t *whole) {
    const bound *b = bound_of(p->record, p->member);
    unsigned char before[8];
    cf_error error;
    cf_result result;
    clock_t start = clock();
    harness_note("%s: %s.%s = %s", p->call_name, p->record, p->member, text);
    memcpy(before, p->at, size);
    memcpy(p->at, value, size);
    harness_poison(&error, sizeof error);
    refused = 0;
    result = p->call(&error);
    memcpy(p->at, before, size);
    CHECK(clock() - start < 5 * CLOCKS_PER_SEC);
    CHECK_INT(refused, 0);
    if (result == CF_OK) return;
    CHECK_INT(error.code, result);
    if (whole != NULL) check_numbers(&error, p->member, *whole, b != NULL ? b->limit : 0);
    CHECK_STR(oracle_error_fault(&error), NULL);
    if (!may_blame(p, error.field)) FAIL("%s is blamed: %s", error.field, error.text);
    if (whole != NULL) try_wanted(p, &error, p->member, size, *whole);
}

static void try_whole(const place *p, size_t size) {
    const bound *b = bound_of(p->record, p->member);
    const int64_t limit = b != NULL ? b->limit : 0;
    const int64_t past = limit < INT64_MAX ? limit + 1 : 0;
    const int64_t values[] = {0, 1, -1, limit, past, INT32_MAX, INT32_MIN, (int64_t)INT32_MAX + 1, INT64_MAX,
                              INT64_MAX - 1, INT64_MIN, INT64_MIN + 1};
    char text[32];
    size_t i;
    for (i = 0; i < sizeof values / sizeof values[0]; i++) {
        int32_t narrow = (int32_t)(uint32_t)(uint64_t)values[i];
        int skips = b != NULL && (b->counts == 2 || (b->counts && !p->plain));
        if (skips && values[i] > 1 && values[i] <= limit) continue;
        snprintf(text, sizeof text, "%lld", (long long)values[i]);
        if (size == sizeof values[i]) try_value(p, &values[i], size, text, &values[i]);
        else if (narrow == values[i]) try_value(p, &narrow, size, text, &values[i]);
    }
}

static void try_real(const place *p) {
    const double values[] = {0, -0.0, 1, -1, 5e-324, -5e-324, DBL_MIN / 2, DBL_MIN, DBL_MAX, -DBL_MAX, 1e307, INFINITY,
                             -INFINITY, NAN};
    char text[32];
    size_t i;
    for (i = 0; i < sizeof values / sizeof values[0]; i++) {
        snprintf(text, sizeof text, "%g", values[i]);
        try_value(p, &values[i], sizeof values[i], text, NULL);
    }
}

/* ---- all places ---- */

static int is_in(const char *name, const char *const *list, size_t n) {
    while (n-- > 0)
        if (strcmp(list[n], name) == 0) return 1;
    return 0;
}

#define IS_IN(name, list) is_in(name, list, sizeof list / sizeof list[0])

/* Writes the name of the record in a type, between blanks or stars, such as cf_timing in "const cf_timing *". */
static void plain_type(const char *type, char plain[64]) {
    size_t n;
    if (strncmp(type, "const ", 6) == 0) type += 6;
    n = strcspn(type, " *");
    snprintf(plain, 64, "%.*s", (int)n, type);
}

static int is_record(const char *name) {
    int i;
    for (i = 0; i < N_MEMBERS; i++)
        if (strcmp(members[i].record, name) == 0) return 1;
    return 0;
}

static void try_number(place *p, const char *type) {
    if (strcmp(type, "double") == 0) try_real(p);
    else if (strcmp(type, "size_t") == 0) try_whole(p, sizeof(size_t));
    else if (strcmp(type, "int64_t") == 0 || strcmp(type, "uint64_t") == 0) try_whole(p, sizeof(int64_t));
    else try_whole(p, sizeof(int)); /* int, and enums */
}

/* Tries the members of a record, and those of the records that it contains or points to. */
static void try_record(const char *record, unsigned char *at, place *p) {
    int i;
    for (i = 0; i < N_MEMBERS; i++) {
        const declared *d = &members[i];
        unsigned char *target = at + d->offset;
        char type[64];
        if (strcmp(d->record, record) != 0) continue;
        visited[i] = 1;
        plain_type(d->type, type);
        if (strchr(d->type, '*') != NULL) memcpy(&target, at + d->offset, sizeof target);
        if (target == NULL || strcmp(type, "cf_allocator") == 0) continue;
        if (IS_IN(type, objects) || IS_IN(type, outputs)) continue;
        if (is_record(type)) {
            try_record(type, target, p);
            continue;
        }
        p->record = d->record;
        p->member = d->member;
        p->at = target;
        try_number(p, type);
    }
}

static void check_no_member_is_forgotten(void) {
    size_t k;
    int i;
    for (i = 0; i < N_MEMBERS; i++) {
        const char *record = members[i].record;
        if (IS_IN(record, objects) || IS_IN(record, outputs)) continue;
        if (!visited[i]) FAIL("%s.%s was not tried", record, members[i].member);
    }
    for (k = 0; k < sizeof bounds / sizeof bounds[0]; k++) {
        int found = 0;
        for (i = 0; i < N_MEMBERS; i++)
            found |= bounds[k].member && strcmp(members[i].record, bounds[k].record) == 0 &&
                     strcmp(members[i].member, bounds[k].member) == 0;
        if (!found && bounds[k].member) FAIL("there is no %s.%s any more", bounds[k].record, bounds[k].member);
    }
    CHECK(N_MEMBERS > 100);
}

TEST(every_member_takes_any_number) {
    size_t i;
    set_up();
    for (i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        place p = {0};
        cf_error error;
        p.call = calls[i].call;
        p.call_name = calls[i].name;
        p.plain = calls[i].plain;
        harness_note("%s", calls[i].name);
        harness_poison(&error, sizeof error);
        if (p.call(&error) != CF_OK) FAIL("%s does not work as it is: %s", calls[i].name, error.text);
        try_record(calls[i].record, (unsigned char *)calls[i].root, &p);
    }
    harness_note("%s", "");
    tear_down();
    check_no_member_is_forgotten();
}

/* ---- arguments ----

   function, argument, number of existing items, limit, and the call with `number`. A count above the existing items is
   tried only if it also exceeds the limit. */

static int64_t number;

static cf_result fine(int64_t any) {
    (void)any;
    return CF_OK;
}

static cf_result named(const char *name) { return name != NULL && name[0] != '\0' ? CF_OK : CF_ERROR_TEXT; }

/* Releases the object that a successful call has made. */
static cf_result made(cf_result result, void (*release)(void)) {
    if (untouched(result) && result == CF_OK) release();
    return result;
}

static void release_plan(void) { cf_plan_free(*(cf_plan **)(void *)out); }
static void release_schedule(void) { cf_schedule_free(*(cf_schedule **)(void *)out); }
static void release_steps(void) { cf_steps_free(*(cf_steps **)(void *)out); }
static void release_timeline(void) { cf_timeline_free(*(cf_timeline **)(void *)out); }
static void release_graph(void) { cf_graph_free(*(cf_graph **)(void *)out); }
static void release_tuning(void) { cf_tuning_free(*(cf_tuning **)(void *)out); }

/* Makes the schedule of a candidate, for a plan of the first candidate. */
static cf_result tuned(int64_t candidate, int64_t rank, cf_error *error) {
    cf_schedule **chosen = (cf_schedule **)(void *)out;
    cf_tuning *tuning = NULL;
    cf_plan *packed = NULL;
    cf_pack_desc like;
    cf_result result = cf_tune(lengths, N, &tune, &tuning, error);
    CHECK_INT(result, CF_OK);
    if (result != CF_OK) return result;
    memset(&like, 0, sizeof like);
    like.chunk_size = tuning->candidates[0].chunk_size;
    like.n_ranks = tuning->splits[tuning->candidates[0].split].dp;
    CHECK_INT(cf_pack(lengths, N, &like, &packed, NULL), CF_OK);
    result = (POISON(), cf_tune_schedule(&tune, tuning, candidate, packed, rank, chosen, error));
    if (untouched(result) && result == CF_OK) cf_schedule_free(*chosen);
    cf_plan_free(packed);
    cf_tuning_free(tuning);
    return result;
}

static cf_result allocate(cf_error *error) {
    void *block = NULL;
    cf_result result = number < 0 || number > MOST_BYTES ? CF_OK : cf_allocate(&small, (size_t)number, &block, error);
    small_release(block, NULL);
    return result;
}

/* Makes an object in the caller's memory, given this size. */
static cf_result into(cf_result (*call)(void *room, size_t room_bytes, cf_error *error), cf_error *error) {
    static double room[1 << 12];
    return number >= 0 && number <= (int64_t)sizeof room ? call(room, (size_t)number, error) : CF_OK;
}

static cf_result into_plan(void *room, size_t n, cf_error *error) {
    cf_plan *unused;
    return cf_pack_into(lengths, N, &pack, room, n, &unused, error);
}

static cf_result into_schedule(void *room, size_t n, cf_error *error) {
    cf_schedule *unused;
    return cf_schedule_into(plan, &order, room, n, &unused, error);
}

static cf_result into_steps(void *room, size_t n, cf_error *error) {
    cf_steps *unused;
    return cf_steps_into(plan, schedule, 0, 0, room, n, &unused, error);
}

static cf_result into_metadata(void *room, size_t n, cf_error *error) {
    cf_metadata unused;
    return cf_metadata_fill(plan, 0, NULL, room, n, &unused, error);
}

static cf_result into_rows(void *room, size_t n, cf_error *error) {
    static const int32_t tokens[1000];
    const void *of_sequences[N];
    cf_token_rows unused;
    for (int i = 0; i < N; i++) of_sequences[i] = tokens;
    return cf_token_rows_fill(plan, NULL, of_sequences, 4, room, n, &unused, error);
}

static cf_timing scratch_timing;

static cf_result untouched_by(cf_result result) {
    (void)untouched(result);
    return result;
}

static cf_result max_tries(int64_t got) {
    CHECK(got == (number < 1 ? 0 : got) && (got == 0 || (got >= 8 && got <= 64)));
    return CF_OK;
}

/* Packs cp groups with a backward in which pairs cost more. */
static cf_result column_cost(int64_t max_cp, int64_t count) {
    const cf_timing priced = {.all = {.forward = {1, 2, 3}, .backward = {2, 4, 9}}};
    CHECK(cf_column_cost(&priced, max_cp, count).constant == (max_cp > 1 ? 2 : 1));
    return CF_OK;
}

/* Asks an index for a pass and for an action. */
static cf_result asked(int64_t pass, int64_t chunk, int64_t stage, int64_t action) {
    cf_schedule_index *index = NULL;
    cf_need needs[CF_MAX_NEEDS];
    int64_t at;
    int n;
    if (!CHECK_INT(cf_schedule_index_make(plan, schedule, NULL, &index, NULL), CF_OK)) return CF_OK;
    at = cf_schedule_find(index, (cf_pass)(int)pass, chunk, stage);
    n = cf_schedule_needs(index, action, needs);
    CHECK(at >= -1 && at < schedule->n_actions && n >= 0 && n <= CF_MAX_NEEDS);
    cf_schedule_index_free(index);
    return CF_OK;
}

/* Finds shared prefixes of sequences without tokens, and of nodes without tokens. */
static cf_result find_shares(int64_t n, int64_t token_bytes, cf_error *error) {
    static const void *tokens[N];
    static int64_t nothing[N];
    static cf_shared_prefix found[N];
    return cf_shared_prefixes_find(tokens, token_bytes, nothing, n, found, &small, error);
}

#define ROOM ((void *)out)

static cf_limits scratch_limits;
static const double three[3] = {1, 2, 4};
#define ENUM(type) ((type)(int)number)

#define TRY_ARGUMENTS(X) \
    X(cf_result_name, code, INT32_MAX, 0, named(cf_result_name(ENUM(cf_result)))) \
    X(cf_fail, code, INT32_MAX, 0, fine(cf_fail(NULL, ENUM(cf_result), "f", 0, 0, 0, "why"))) \
    X(cf_fail, item, INT64_MAX, 0, fine(cf_fail(error, CF_ERROR_PLAN, "f", number, 0, 0, "why"))) \
    X(cf_fail, wanted, INT64_MAX, 0, fine(cf_fail(error, CF_ERROR_PLAN, "f", 0, number, 0, "why"))) \
    X(cf_fail, got, INT64_MAX, 0, fine(cf_fail(error, CF_ERROR_PLAN, "f", 0, 0, number, "why"))) \
    X(cf_fail_real, code, INT32_MAX, 0, fine(cf_fail_real(NULL, ENUM(cf_result), "f", 0, 0, "why"))) \
    X(cf_fail_real, item, INT64_MAX, 0, fine(cf_fail_real(error, CF_ERROR_PLAN, "f", number, 0, "why"))) \
    X(cf_fail_real, got, INT64_MAX, 0, fine(cf_fail_real(error, CF_ERROR_PLAN, "f", 0, (double)number, "why"))) \
    X(cf_refuse, code, INT32_MAX, 0, fine(cf_refuse(NULL, ENUM(cf_result), "f", 0, "why"))) \
    X(cf_refuse, item, INT64_MAX, 0, fine(cf_refuse(error, CF_ERROR_PLAN, "f", number, "why"))) \
    X(cf_allocate, bytes, INT64_MAX, 0, allocate(error)) \
    X(cf_cost_seconds, rows, INT64_MAX, 0, fine(cf_cost_seconds(&cost, number, 1) > 0)) \
    X(cf_cost_seconds, pairs, INT64_MAX, 0, fine(cf_cost_seconds(&cost, 1, number) > 0)) \
    X(cf_slice_pairs, prefix, INT64_MAX, 0, cf_slice_pairs(number, 1) >= -1 ? CF_OK : CF_ERROR_TEXT) \
    X(cf_slice_pairs, length, INT64_MAX, 0, cf_slice_pairs(1, number) >= -1 ? CF_OK : CF_ERROR_TEXT) \
    X(cf_pack_method_name, method, INT32_MAX, 0, named(cf_pack_method_name(ENUM(cf_pack_method)))) \
    X(cf_split_method_name, split, INT32_MAX, 0, named(cf_split_method_name(ENUM(cf_split_method)))) \
    X(cf_pack, n, N, CF_MAX_SEQUENCES, made(cf_pack(lengths, number, &pack, ROOM, error), release_plan)) \
    X(cf_pack_size, n, N, CF_MAX_SEQUENCES, untouched_by(cf_pack_size(lengths, number, &pack, ROOM, error))) \
    X(cf_pack_into, n, N, CF_MAX_SEQUENCES, untouched_by(cf_pack_into(lengths, number, &pack, NULL, 0, ROOM, error))) \
    X(cf_pack_into, bytes, INT64_MAX, 0, into(into_plan, error)) \
    X(cf_shared_prefixes_find, n, N, CF_MAX_SEQUENCES, find_shares(number, 4, error)) \
    X(cf_shared_prefixes_find, token_bytes, 1024, 1024, find_shares(N, number, error)) \
    X(cf_plan_validate, n, N, CF_MAX_SEQUENCES, cf_plan_validate(plan, lengths, number, &small, error)) \
    X(cf_kv_sources, chunk, INT64_MAX, 0, fine(cf_kv_sources(plan, number, NULL)))   \
    X(cf_metadata_size, chunk, INT64_MAX, 0, untouched_by(cf_metadata_size(plan, number, NULL, ROOM, error))) \
    X(cf_metadata_fill, chunk, INT64_MAX, 0, untouched_by(cf_metadata_fill(plan, number, NULL, NULL, 0, ROOM, error))) \
    X(cf_metadata_fill, bytes, INT64_MAX, 0, into(into_metadata, error)) \
    X(cf_token_rows_fill, token_bytes, 4, 0, \
      untouched_by(cf_token_rows_fill(plan, NULL, NULL, number, NULL, 0, ROOM, error))) \
    X(cf_token_rows_fill, bytes, INT64_MAX, 0, into(into_rows, error)) \
    X(cf_loss_weights, n, N, CF_MAX_SEQUENCES, untouched_by(cf_loss_weights(lengths, number, NULL, ROOM, error))) \
    X(cf_recompute_name, recompute, INT32_MAX, 0, named(cf_recompute_name(ENUM(cf_recompute)))) \
    X(cf_placement_name, placement, INT32_MAX, 0, named(cf_placement_name(ENUM(cf_placement)))) \
    X(cf_placement_stage, placement, INT32_MAX, 0, fine(cf_placement_stage(ENUM(cf_placement), 2, 3))) \
    X(cf_placement_stage, n_stages, INT64_MAX, 0, fine(cf_placement_stage(CF_PLACEMENT_V, number, 3))) \
    X(cf_placement_stage, v, INT64_MAX, 0, fine(cf_placement_stage(CF_PLACEMENT_V, 3, number))) \
    X(cf_placement_at, placement, INT32_MAX, 0, fine(cf_placement_at(ENUM(cf_placement), 2, 1, 1))) \
    X(cf_placement_at, n_stages, INT64_MAX, 0, fine(cf_placement_at(CF_PLACEMENT_V, number, 3, 1))) \
    X(cf_placement_at, row, INT64_MAX, 0, fine(cf_placement_at(CF_PLACEMENT_V, 3, number, 1))) \
    X(cf_placement_at, stage, INT64_MAX, 0, fine(cf_placement_at(CF_PLACEMENT_V, 3, 1, number))) \
    X(cf_stage_parameters, stage, INT64_MAX, 0, \
      untouched_by(cf_stage_parameters(&model, &parallel, number, ROOM, error))) \
    X(cf_stage_shard, stage, INT64_MAX, 0, untouched_by(cf_stage_shard(&model, &parallel, number, -1, ROOM, error))) \
    X(cf_stage_shard, kind, INT64_MAX, 0, untouched_by(cf_stage_shard(&model, &parallel, 0, number, ROOM, error))) \
    X(cf_memory_token_bytes, stage, INT64_MAX, 0, untouched_by(cf_memory_token_bytes(&memory, number, ROOM, error))) \
    X(cf_memory_estimate, n_loads, INT64_MAX, 0, \
      untouched_by(cf_memory_estimate(&memory, loads, number, ROOM, STAGES, error))) \
    X(cf_memory_estimate, n_reports, INT64_MAX, 0, \
      untouched_by(cf_memory_estimate(&memory, loads, STAGES, ROOM, number, error))) \
    X(cf_pass_name, pass, INT32_MAX, 0, named(cf_pass_name(ENUM(cf_pass)))) \
    X(cf_replay_name, replay, INT32_MAX, 0, named(cf_replay_name(ENUM(cf_replay)))) \
    X(cf_edge_name, why, INT32_MAX, 0, named(cf_edge_name(ENUM(cf_edge_why)))) \
    X(cf_schedule_kind_name, kind, INT32_MAX, 0, named(cf_schedule_kind_name(ENUM(cf_schedule_kind)))) \
    X(cf_schedule_into, bytes, INT64_MAX, 0, into(into_schedule, error)) \
    X(cf_schedule_loads, stage, INT64_MAX, 0, \
      untouched_by(cf_schedule_loads(plan, schedule, number, ROOM, 60, error))) \
    X(cf_schedule_loads, count, 60, 0, untouched_by(cf_schedule_loads(plan, schedule, 0, ROOM, number, error))) \
    X(cf_lockstep_schedule, rank, INT64_MAX, 0,\
      made(cf_lockstep_schedule(plan, schedule, number, NULL, ROOM, error), release_schedule))\
    X(cf_schedule_find, pass, INT32_MAX, 0, asked(number, 0, 0, 0)) \
    X(cf_schedule_find, chunk, INT64_MAX, 0, asked(0, number, 0, 0)) \
    X(cf_schedule_find, stage, INT64_MAX, 0, asked(0, 0, number, 0)) \
    X(cf_schedule_needs, action, INT64_MAX, 0, asked(0, 0, 0, number)) \
    X(cf_steps_make, stage, INT64_MAX, 0, \
      made(cf_steps_make(plan, schedule, number, 0, NULL, ROOM, error), release_steps)) \
    X(cf_steps_make, seed, INT64_MAX, 0, \
      made(cf_steps_make(plan, schedule, 0, (uint64_t)number, NULL, ROOM, error), release_steps)) \
    X(cf_steps_size, stage, INT64_MAX, 0, untouched_by(cf_steps_size(plan, schedule, number, ROOM, error))) \
    X(cf_steps_into, stage, INT64_MAX, 0, \
      untouched_by(cf_steps_into(plan, schedule, number, 0, NULL, 0, ROOM, error))) \
    X(cf_steps_into, seed, INT64_MAX, 0, \
      untouched_by(cf_steps_into(plan, schedule, 0, (uint64_t)number, NULL, 0, ROOM, error))) \
    X(cf_steps_into, bytes, INT64_MAX, 0, into(into_steps, error)) \
    X(cf_chunk_seed, seed, INT64_MAX, 0, fine((int64_t)cf_chunk_seed((uint64_t)number, 0, 0))) \
    X(cf_chunk_seed, chunk, INT64_MAX, 0, fine((int64_t)cf_chunk_seed(0, number, 0))) \
    X(cf_chunk_seed, stage, INT64_MAX, 0, fine((int64_t)cf_chunk_seed(0, 0, number))) \
    X(cf_cost_fit, n, 4, 0, untouched_by(cf_cost_fit(samples, number, ROOM, NULL, error))) \
    X(cf_cost_estimate, count, INT64_MAX, 0, \
      untouched_by(cf_cost_estimate(&estimate, ROOM, number, &scratch_timing, NULL, error))) \
    X(cf_schedule_memory, n_reports, INT64_MAX, 0, \
      untouched_by(cf_schedule_memory(&memory, plan, schedule, ROOM, number, &small, error))) \
    X(cf_memory_limits, limit_bytes, INT64_MAX, CF_MAX_STAGE_BYTES, \
      untouched_by(cf_memory_limits(&memory, plan, &schedule->shape, number, ROOM, &scratch_limits, &small, error))) \
    X(cf_tune_status_name, status, INT32_MAX, 0, named(cf_tune_status_name(ENUM(cf_tune_status)))) \
    X(cf_tune, n, N, CF_MAX_SEQUENCES, made(cf_tune(lengths, number, &tune, ROOM, error), release_tuning)) \
    X(cf_tune_schedule, candidate, INT64_MAX, 0, tuned(number, 0, error)) \
    X(cf_tune_schedule, rank, INT64_MAX, 0, tuned(0, number, error)) \
    X(cf_tune_max_tries, n_stages, INT64_MAX, 0, max_tries(cf_tune_max_tries(plan, number, 1))) \
    X(cf_tune_max_tries, n_virtual, INT64_MAX, 0, max_tries(cf_tune_max_tries(plan, 2, number))) \
    X(cf_tune_confidence, n, 3, 0, fine((int64_t)cf_tune_confidence(three, NULL, number))) \
    X(cf_column_cost, max_cp, INT64_MAX, 0, column_cost(number, 2)) \
    X(cf_column_cost, count, INT64_MAX, 0, column_cost(2, number))

#define DEFINE_TRY(function, argument, most, limit, expression)                  \
    static cf_result try_##function##_##argument(cf_error *error) {              \
        (void)error;                                                             \
        return expression;                                                       \
    }
TRY_ARGUMENTS(DEFINE_TRY)

static const struct {
    const char *function, *argument;
    int64_t most, limit;
    cf_result (*call)(cf_error *error);
} tries[] = {
#define LIST_TRY(function, argument, most, limit, expression) \
    {#function, #argument, most, limit, try_##function##_##argument},
    TRY_ARGUMENTS(LIST_TRY)};

enum { N_TRIES = sizeof tries / sizeof tries[0] };

static void try_argument(int i, int64_t value) {
    cf_error error;
    cf_result result;
    clock_t start = clock();
    if (value > tries[i].most && (tries[i].limit == 0 || value <= tries[i].limit)) return;
    harness_note("%s: %s = %lld", tries[i].function, tries[i].argument, (long long)value);
    number = value;
    POISON();
    harness_poison(&error, sizeof error);
    refused = 0;
    result = tries[i].call(&error);
    CHECK(clock() - start < 5 * CLOCKS_PER_SEC && refused == 0);
    if (result == CF_OK) return;
    CHECK_INT(error.code, result);
    check_numbers(&error, tries[i].argument, value, tries[i].limit);
}

TEST(every_argument_takes_any_number) {
    int i;
    size_t k;
    set_up();
    for (i = 0; i < N_TRIES; i++) {
        const int64_t values[] = {0, 1, -1, 2, tries[i].limit, tries[i].limit + 1, INT32_MAX, INT32_MIN, INT64_MAX,
                                  INT64_MAX - 1, INT64_MIN, INT64_MIN + 1, (int64_t)1 << 62};
        for (k = 0; k < sizeof values / sizeof values[0]; k++) try_argument(i, values[k]);
    }
    harness_note("%s", "");
    tear_down();
}

TEST(no_argument_is_forgotten) {
    int i, k, found;
    for (i = 0; i < N_ARGUMENTS; i++) {
        for (found = k = 0; k < N_TRIES; k++)
            found |= strcmp(tries[k].function, arguments[i].function) == 0 &&
                     strcmp(tries[k].argument, arguments[i].name) == 0;
        if (!found) FAIL("%s: %s was not tried", arguments[i].function, arguments[i].name);
    }
    CHECK((int)N_ARGUMENTS >= (int)N_TRIES);
}

/* An invalid number is set on each virtual stage in turn. It is found there, and nothing past the last stage is
   read. */
TEST(times_of_every_stage_are_looked_at) {
    cf_stage_cost *exact = (cf_stage_cost *)calloc(6, sizeof *exact);
    cf_schedule_desc loops = {0};
    cf_schedule *s = NULL;
    cf_timing each = {0};
    cf_error error;
    int v, k;
    set_up();
    if (!exact) abort();
    loops.kind = CF_SCHEDULE_INTERLEAVED;
    loops.shape.n_stages = 3;
    loops.shape.n_virtual = 2;
    each.stages = exact;
    REQUIRE(cf_schedule_make(plan, &loops, &s, NULL) == CF_OK);
    for (v = 0; v <= 6; v++)
        for (k = 0; k < 4; k++) {
            const cf_result wanted = v < 6 ? CF_ERROR_ARGUMENT : CF_OK;
            cf_simulate_desc simulation = {0};
            cf_lower_desc lowering = {0};
            cf_schedule_desc ordering = loops;
            harness_note("virtual stage %d, call %d", v, k);
            POISON();
            if (v < 6) exact[v].backward.per_token = NAN;
            simulation.timing = lowering.timing = ordering.timing = &each;
            if (k == 0) CHECK_INT(made(cf_simulate(plan, s, &simulation, ROOM, &error), release_timeline), wanted);
            if (k == 1) CHECK_INT(made(cf_schedule_lower(plan, s, &lowering, ROOM, &error), release_schedule), wanted);
            if (k == 2) CHECK_INT(made(cf_graph_make(plan, s, &each, &small, ROOM, &error), release_graph), wanted);
            if (k == 3) CHECK_INT(made(cf_schedule_make(plan, &ordering, ROOM, &error), release_schedule), wanted);
            if (v < 6) CHECK_STR(error.field, "timing.backward.per_token");
            if (v < 6) CHECK_INT(error.item, v);
            if (v < 6) exact[v].backward.per_token = 0;
        }
    harness_note("%s", "");
    cf_schedule_free(s);
    free(exact);
    tear_down();
}

/* Counts that a schedule merely claims. Refusing them takes memory in proportion to what is there, not to the claim. */
TEST(claims_take_no_memory) {
    static int64_t first[2] = {0, 2};
    static cf_action actions[2];
    const int64_t one = 1;
    cf_plan *single = NULL;
    cf_schedule claims;
    cf_steps *steps = NULL;
    cf_error error;
    size_t needed = 0;
    set_up();
    REQUIRE(cf_pack(&one, 1, &pack, &single, NULL) == CF_OK);
    CLEAR(claims);
    actions[1].pass = CF_B;
    claims.shape.replay = CF_REPLAY_LOCAL;
    claims.shape.n_stages = claims.shape.k = claims.n_chunks = 1;
    claims.shape.n_virtual = 50000000;
    claims.n_actions = 2;
    claims.first = first;
    claims.actions = actions;
    refused = 0;
    CHECK_INT(cf_steps_make(single, &claims, 0, 0, &small, &steps, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "n_actions");
    CHECK_INT(cf_steps_size(single, &claims, 0, &needed, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(cf_schedule_validate(single, &claims, NULL, &small, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(refused, 0);
    cf_plan_free(single);
    tear_down();
}

/* Seconds that each fit into a double, but whose sum does not. Graphs and simulations refuse them as schedules do. */
TEST(seconds_that_do_not_add_up) {
    cf_simulate_desc simulating = {0};
    cf_error error;
    set_up();
    plain_timing.latency = plain_timing.seconds_per_token = 1e307;
    simulating.timing = &plain_timing;
    POISON();
    CHECK_INT(made(cf_simulate(plan, schedule, &simulating, ROOM, &error), release_timeline), CF_ERROR_OVERFLOW);
    CHECK_STR(error.field, "timing");
    CHECK_INT(cf_simulate(plan, schedule, &simulating, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    CHECK_INT(call_graph(&error), CF_ERROR_OVERFLOW);
    CHECK_STR(error.field, "timing");
    CHECK_INT(order_with(&plain_order, &error), CF_ERROR_OVERFLOW);
    CHECK_STR(error.field, "timing");
    tear_down();
}

/* A standalone chunk has no index in a chain. A large index would lead outside every array. */
TEST(a_standalone_chunk_with_an_index) {
    const int64_t places[] = {1, 1 << 20, INT64_MAX, -1, INT64_MIN};
    cf_error error;
    size_t i;
    set_up();
    for (i = 0; i < sizeof places / sizeof places[0]; i++) {
        cf_chunk *last = &plan->chunks[plan->n_chunks - 1];
        REQUIRE(last->chain == -1);
        last->index = places[i];
        CHECK_INT(cf_schedule_validate(plan, schedule, NULL, NULL, &error), CF_ERROR_PLAN);
        CHECK_STR(error.field, "chunks.index");
        CHECK_INT(call_simulate(&error), CF_ERROR_PLAN);
        CHECK_INT(call_steps(&error), CF_ERROR_PLAN);
        CHECK_INT(call_lower(&error), CF_ERROR_PLAN);
        last->index = 0;
    }
    tear_down();
}

TEST(a_prefix_that_no_chunk_has) {
    const int64_t prefixes[] = {-1, INT64_MIN, INT64_MAX};
    cf_memory_load held[400];
    cf_error error;
    size_t i;
    set_up();
    for (i = 0; i < sizeof prefixes / sizeof prefixes[0]; i++) {
        int64_t before = plan->chunks[1].prefix;
        plan->chunks[1].prefix = prefixes[i];
        CHECK_INT(cf_schedule_loads(plan, schedule, 0, held, 400, &error), CF_ERROR_PLAN);
        CHECK_STR(error.field, "chunks.prefix");
        CHECK_INT(call_steps(&error), CF_ERROR_PLAN);
        plan->chunks[1].prefix = before;
    }
    tear_down();
}

TEST(tries_for_no_plan) {
    set_up();
    CHECK_INT(cf_tune_max_tries(NULL, 1, 1), 0);
    CHECK_INT(cf_tune_max_tries(plan, 0, 1), 0);
    CHECK_INT(cf_tune_max_tries(plan, 1, 1), 64);
    CHECK_INT(cf_tune_max_tries(plan, 100, 1), 10000 / (100 * plan->chunks_per_rank));
    CHECK_INT(cf_tune_max_tries(plan, (int64_t)1 << 62, 4), 8);
    tear_down();
}

/* A search that reaches the bound stops, whatever max_tries is. */
TEST(max_tries_takes_any_number) {
    const int64_t all_tries[] = {INT32_MAX, INT64_MAX - 1, INT64_MAX};
    size_t i;
    set_up();
    for (i = 0; i < 3; i++) {
        cf_schedule *found = NULL;
        plain_order.kind = CF_SCHEDULE_BEST;
        plain_order.shape.n_stages = 1;
        plain_order.shape.k = 3; /* nothing has to be replayed, so the bound is reached */
        plain_order.max_tries = all_tries[i];
        CHECK_INT(cf_schedule_make(plan, &plain_order, &found, NULL), CF_OK);
        cf_schedule_free(found);
    }
    tear_down();
}

SUITE(boundaries, CASE(every_member_takes_any_number), CASE(every_call_survives_every_failed_allocation),
      CASE(max_tries_takes_any_number),
      CASE(every_argument_takes_any_number), CASE(no_argument_is_forgotten), CASE(claims_take_no_memory),
      CASE(times_of_every_stage_are_looked_at),
      CASE(seconds_that_do_not_add_up), CASE(a_standalone_chunk_with_an_index),
      CASE(a_prefix_that_no_chunk_has), CASE(tries_for_no_plan));
