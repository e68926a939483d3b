/* Tests members that mean something only together with another one. Alone, each is refused by name, and the message
   says what it needs. With that member it is accepted. Prices and upper limits may be set alone. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/oracle.h"
#include "tools/chunkflow_tune.h"

#include <string.h>

/* The call is refused, blames this member, and mentions `needs`. `error` is the caller's record. */
#define ALONE(call, name, needs)                                                          \
    do {                                                                                  \
        harness_poison(&error, sizeof error);                                             \
        if (!CHECK_INT(call, CF_ERROR_ARGUMENT)) break;                                   \
        CHECK_STR(error.field, name);                                                     \
        if (strstr(error.text, needs) == NULL) FAIL("'%s' not in: %s", needs, error.text); \
        CHECK_STR(oracle_error_fault(&error), NULL);                                      \
    } while (0)

#define FINE(call)                                           \
    do {                                                     \
        if ((call) != CF_OK) FAIL("%s: %s", #call, error.text); \
    } while (0)

static cf_error error;
static const int64_t lengths[] = {9, 2, 5};

static cf_plan *plan_of(void) {
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    desc.chunk_size = 3;
    CHECK_INT(cf_pack(lengths, COUNT(lengths), &desc, &plan, NULL), CF_OK);
    return plan;
}

/* ---- packing ---- */

static cf_result pack(const cf_pack_desc *desc) {
    cf_plan *plan = NULL;
    cf_result result = cf_pack(lengths, COUNT(lengths), desc, &plan, &error);
    size_t bytes;
    CHECK_INT(cf_pack_size(lengths, COUNT(lengths), desc, &bytes, NULL), result);
    CHECK((plan != NULL) == (result == CF_OK));
    cf_plan_free(plan);
    return result;
}

TEST(of_packing) {
    static const cf_shared_prefix shares[] = {{0, 0}, {0, 2}, {0, 0}};
    cf_pack_desc desc = {0}, again;
    cf_plan *plan = NULL;
    desc.chunk_size = 3;
    desc.min_shared_prefix = 2;
    ALONE(pack(&desc), "min_shared_prefix", "shared_prefixes");
    desc.shared_prefixes = shares;
    FINE(pack(&desc));
    desc.min_shared_prefix = 0;
    desc.no_copies = 1;
    FINE(pack(&desc));
    again = cf_pack_defaults(&desc); /* defaults that are written out are accepted as well */
    CHECK_INT(again.min_shared_prefix, CF_MIN_SHARED_PREFIX);
    FINE(pack(&again));
    desc.shared_prefixes = NULL;
    ALONE(pack(&desc), "no_copies", "shared_prefixes");
    CHECK_INT(cf_pack(lengths, 0, &desc, &plan, &error), CF_OK); /* an empty batch has no array */
    cf_plan_free(plan);
    desc.shared_prefixes = shares;
    desc.no_copies = 2;
    ALONE(pack(&desc), "no_copies", "0 nor 1");
    desc.shared_prefixes = NULL;
    desc.no_copies = 0;
    desc.no_tails = -1;
    ALONE(pack(&desc), "no_tails", "0 nor 1");
    desc.no_tails = 0;
    desc.cp_row_seconds = 1; /* a price */
    FINE(pack(&desc));
    again = cf_pack_defaults(&desc);
    FINE(pack(&again));
}

/* ---- metadata and loss ---- */

TEST(of_metadata) {
    const double weights[] = {1, 1, 1};
    cf_plan *plan = plan_of();
    cf_metadata_desc desc = {0};
    size_t bytes;
    desc.shared_mean = 1;
    ALONE(cf_metadata_size(plan, -1, &desc, &bytes, &error), "shared_mean", "weights");
    ALONE(cf_metadata_fill(plan, 0, &desc, NULL, 0, NULL, &error), "shared_mean", "weights");
    desc.weights = weights;
    FINE(cf_metadata_size(plan, -1, &desc, &bytes, &error));
    desc.shared_mean = 2;
    ALONE(cf_metadata_size(plan, -1, &desc, &bytes, &error), "shared_mean", "0 nor 1");
    desc.shared_mean = 0;
    desc.shifted = 7;
    ALONE(cf_metadata_size(plan, -1, &desc, &bytes, &error), "shifted", "0 nor 1");
    cf_plan_free(plan);
}

TEST(of_loss_weights) {
    const int64_t prompts[] = {0, 0, 1};
    const cf_mean means[] = {CF_MEAN_DEFAULT, CF_MEAN_TOKENS, CF_MEAN_SEQUENCES};
    cf_loss_weights_desc desc = {0};
    double weights[3];
    int64_t i;
    desc.prompts = prompts;
    for (i = 0; i < COUNT(means); i++) {
        desc.mean = means[i];
        ALONE(cf_loss_weights(lengths, 3, &desc, weights, &error), "prompts", "CF_MEAN_PROMPTS");
    }
    desc.mean = CF_MEAN_PROMPTS;
    FINE(cf_loss_weights(lengths, 3, &desc, weights, &error));
}

/* ---- models ---- */

static cf_result split(const cf_model *model, const cf_parallel *parallel) {
    cf_parameters counted;
    cf_result result = cf_parallel_validate(model, parallel, &error);
    CHECK_INT(cf_stage_parameters(model, parallel, 0, &counted, NULL), result);
    return result;
}

/* Checks a kind with one member set to 1: refused alone, and accepted with the members that it needs. */
TEST(of_kinds_of_layers) {
    cf_model model = *cf_model_find("qwen3-8b");
    cf_layer plain = {0}, routed = {0}, kind;
    int mixer, i;
    routed.experts = 8;
    routed.active = 2;
    routed.ffn = 64;
    model.kinds = &kind;
    model.n_kinds = 1;
    model.qk_norm = 0; /* which some of these kinds could not have */
    kind = plain;
    kind.shared = 64;
    ALONE(cf_model_validate(&model, &error), "kinds.shared", "experts");
    kind = routed;
    kind.shared_gate = 1;
    ALONE(cf_model_validate(&model, &error), "kinds.shared_gate", "shared");
    kind.shared = 64;
    FINE(cf_model_validate(&model, &error));
    kind.no_ffn = 1;
    ALONE(cf_model_validate(&model, &error), "kinds.experts", "no_ffn");
    for (mixer = 0; mixer < CF_MIXER_COUNT; mixer++) {
        const int attends = mixer <= CF_MIXER_CHUNKED;
        kind = plain;
        kind.mixer = (cf_mixer)mixer;
        kind.window = mixer == CF_MIXER_WINDOW || mixer == CF_MIXER_CHUNKED ? 64 : 0;
        kind.latent = mixer == CF_MIXER_LATENT ? 64 : 0;
        kind.tail = mixer >= CF_MIXER_DELTA && mixer <= CF_MIXER_MAMBA2 ? 4 : 0;
        FINE(cf_model_validate(&model, &error));
        kind.gate = 1;
        if (attends) FINE(cf_model_validate(&model, &error));
        else ALONE(cf_model_validate(&model, &error), "kinds.gate", "full, window or chunked");
        kind.gate = 0;
        kind.sinks = 1;
        if (attends) FINE(cf_model_validate(&model, &error));
        else ALONE(cf_model_validate(&model, &error), "kinds.sinks", "full, window or chunked");
    }
    kind = plain;
    kind.gate = 2;
    ALONE(cf_model_validate(&model, &error), "kinds.gate", "out of range");
    for (i = 0; i < 7; i++) {
        const char *names[] = {"window", "latent", "q_latent", "rope_dim", "tail", "active", "reach"};
        const char *needed[] = {"window or chunked", "latent", "latent", "latent", "recurrent", "experts", "experts"};
        int64_t *members[] = {&kind.window, &kind.latent, &kind.q_latent, &kind.rope_dim, &kind.tail, &kind.active,
                              &kind.reach};
        char field[32];
        kind = plain;
        *members[i] = 1;
        snprintf(field, sizeof field, "kinds.%s", names[i]);
        ALONE(cf_model_validate(&model, &error), field, needed[i]);
        CHECK(strstr(error.text, "needs") != NULL);
    }
}

TEST(of_models) {
    cf_model model = *cf_model_find("qwen3-8b");
    cf_layer kinds[2] = {{0}};
    int *flags[5], i;
    model.n_kinds = 2;
    ALONE(cf_model_validate(&model, &error), "model.n_kinds", "kinds");
    model.kinds = kinds;
    ALONE(cf_model_validate(&model, &error), "model.pattern", "each kind");
    model.pattern = "ab";
    FINE(cf_model_validate(&model, &error));
    model.first_dense = 1;
    ALONE(cf_model_validate(&model, &error), "model.first_dense", "experts");
    kinds[1].experts = kinds[1].active = 4;
    FINE(cf_model_validate(&model, &error));
    kinds[0].mixer = kinds[1].mixer = CF_MIXER_DELTA;
    kinds[0].tail = kinds[1].tail = 4;
    model.qk_norm = 1;
    ALONE(cf_model_validate(&model, &error), "model.qk_norm", "full, window or chunked");
    model.qk_norm = 0;
    model.qkv_bias = 1;
    ALONE(cf_model_validate(&model, &error), "model.qkv_bias", "full, window or chunked");
    model.qkv_bias = 0;
    model.out_bias = 1;
    ALONE(cf_model_validate(&model, &error), "model.out_bias", "full, window or chunked");
    model.out_bias = 0;
    FINE(cf_model_validate(&model, &error));
    model = *cf_model_find("qwen3-8b");
    model.first_dense = 1;
    ALONE(cf_model_validate(&model, &error), "model.first_dense", "experts");
    model.first_dense = 0;
    model.qk_norm = 3;
    ALONE(cf_model_validate(&model, &error), "model.qk_norm", "no such choice");
    CHECK_INT(error.wanted, 2);
    model.qk_norm = 2;
    flags[0] = &model.tied, flags[1] = &model.qkv_bias, flags[2] = &model.out_bias, flags[3] = &model.mlp_bias;
    flags[4] = &model.no_gate;
    for (i = 0; i < 5; i++) {
        *flags[i] = 2;
        CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
        CHECK(strstr(error.text, "0 nor 1") != NULL);
        *flags[i] = 1;
        FINE(cf_model_validate(&model, &error));
    }
}

TEST(of_splits) {
    const cf_model *dense = cf_model_find("qwen3-8b"), *routed = cf_model_find("qwen3-30b-a3b");
    cf_parallel p = {0}, again;
    cf_memory_desc desc = {0};
    cf_token_bytes bytes;
    p.placement = CF_PLACEMENT_V;
    p.pp = 2;
    ALONE(split(dense, &p), "parallel.placement", "n_virtual");
    CHECK_INT(error.wanted, CF_PLACEMENT_LOOP);
    p.n_virtual = 2;
    FINE(split(dense, &p));
    p.recompute_layers = 3;
    ALONE(split(dense, &p), "parallel.recompute_layers", "recompute");
    p.recompute = CF_RECOMPUTE_NONE;
    ALONE(split(dense, &p), "parallel.recompute_layers", "recompute");
    p.recompute = CF_RECOMPUTE_MLP;
    FINE(split(dense, &p));
    again = cf_parallel_defaults(&p);
    FINE(split(dense, &again));
    p.dp = 2;
    p.imbalance = 20; /* a price */
    FINE(split(dense, &p));
    p.ep = 2;
    ALONE(split(dense, &p), "parallel.ep", "experts");
    FINE(split(routed, &p));
    p.no_sequence = 2;
    ALONE(split(routed, &p), "parallel.no_sequence", "0 nor 1");
    desc.model = dense;
    desc.lora_rank = 8;
    desc.lora_experts = 1;
    ALONE(cf_memory_token_bytes(&desc, 0, &bytes, &error), "lora_experts", "experts");
    desc.model = routed;
    FINE(cf_memory_token_bytes(&desc, 0, &bytes, &error));
    desc.lora_experts = 2;
    ALONE(cf_memory_token_bytes(&desc, 0, &bytes, &error), "lora_experts", "0 nor 1");
    desc.lora_experts = 1;
    desc.unfused = 3;
    ALONE(cf_memory_token_bytes(&desc, 0, &bytes, &error), "unfused", "0 nor 1");
}

/* ---- schedules ---- */

static cf_result order(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = NULL;
    cf_result result = cf_schedule_make(plan, desc, &schedule, &error);
    size_t bytes;
    CHECK_INT(cf_schedule_size(plan, desc, &bytes, NULL), result);
    CHECK((schedule != NULL) == (result == CF_OK));
    cf_schedule_free(schedule);
    return result;
}

TEST(of_schedules) {
    cf_plan *plan = plan_of();
    cf_schedule_desc desc = {0};
    int kind;
    desc.shape.n_stages = 2;
    desc.max_tries = 3; /* an upper limit */
    for (kind = CF_SCHEDULE_DEFAULT; kind < CF_SCHEDULE_COUNT; kind++) {
        const int cuts = kind == CF_SCHEDULE_DEFAULT || kind >= CF_SCHEDULE_ZERO_BUBBLE;
        desc.kind = (cf_schedule_kind)kind;
        desc.split_backward = 1;
        if (cuts) FINE(order(plan, &desc));
        else ALONE(order(plan, &desc), "split_backward", "best or zero-bubble");
        desc.split_backward = 2;
        ALONE(order(plan, &desc), "split_backward", cuts ? "0 nor 1" : "best or zero-bubble");
        desc.split_backward = 0;
        FINE(order(plan, &desc));
    }
    desc.kind = CF_SCHEDULE_BEST;
    desc.shape.forward_only = desc.split_backward = 1;
    ALONE(order(plan, &desc), "split_backward", "forward_only");
    desc.shape.forward_only = desc.split_backward = 0;
    for (kind = CF_SCHEDULE_ZERO_BUBBLE; kind <= CF_SCHEDULE_BEST; kind++) {
        desc.kind = (cf_schedule_kind)kind;
        desc.shape.placement = CF_PLACEMENT_V;
        desc.shape.n_virtual = 0;
        ALONE(order(plan, &desc), "shape.placement", "n_virtual");
        desc.shape.n_virtual = 2;
        FINE(order(plan, &desc));
    }
    desc = cf_schedule_defaults(&desc);
    FINE(order(plan, &desc));
    cf_plan_free(plan);
}

/* A timing, in every call that takes one. */
static cf_result time_it(const cf_plan *plan, const cf_timing *timing) {
    cf_schedule_desc desc = {0}, bare = {0};
    cf_simulate_desc simulate = {0};
    cf_lower_desc lower = {0};
    cf_schedule *schedule = NULL, *lowered = NULL;
    cf_timeline *timeline = NULL;
    cf_graph *graph = NULL;
    cf_result result;
    desc.kind = bare.kind = CF_SCHEDULE_1F1B;
    desc.shape.n_stages = bare.shape.n_stages = 2;
    desc.timing = simulate.timing = lower.timing = timing;
    result = order(plan, &desc);
    CHECK_INT(cf_schedule_make(plan, &bare, &schedule, NULL), CF_OK);
    CHECK_INT(cf_simulate(plan, schedule, &simulate, &timeline, NULL), result);
    CHECK_INT(cf_schedule_lower(plan, schedule, &lower, &lowered, NULL), result);
    CHECK_INT(cf_graph_make(plan, schedule, timing, NULL, &graph, NULL), result);
    cf_schedule_free(schedule);
    cf_schedule_free(lowered);
    cf_timeline_free(timeline);
    cf_graph_free(graph);
    return result;
}

TEST(of_timings) {
    cf_plan *plan = plan_of();
    cf_stage_cost stages[2];
    cf_timing timing = {0};
    double *moves[4];
    int64_t i;
    memset(stages, 0, sizeof stages);
    stages[0].forward.per_token = stages[1].forward.per_token = 1;
    timing.stream_exposed = 0.5;
    ALONE(time_it(plan, &timing), "timing.stream_exposed", "stream_forward");
    moves[0] = &timing.stream_forward, moves[1] = &timing.stream_backward;
    moves[2] = &timing.gather_forward, moves[3] = &timing.gather_backward;
    for (i = 0; i < 4; i++) {
        *moves[i] = 1;
        FINE(time_it(plan, &timing));
        *moves[i] = 0;
    }
    timing.stream_exposed = 0;
    timing.gather_forward = timing.latency = 1; /* prices */
    FINE(time_it(plan, &timing));
    timing.stages = stages;
    FINE(time_it(plan, &timing));
    timing.all.weight.constant = 1;
    ALONE(time_it(plan, &timing), "timing.all", "stages");
    timing.stages = NULL;
    FINE(time_it(plan, &timing));
    cf_plan_free(plan);
}

/* Timings from cf_cost_estimate are accepted: with streams, without, and for models without state to stream. */
TEST(of_estimates) {
    cf_plan *plan = plan_of();
    cf_layer recurrent = {0};
    cf_model model = *cf_model_find("qwen3-8b");
    cf_cost_desc desc = {0};
    cf_stage_cost stages[2];
    cf_timing timing;
    int i;
    recurrent.mixer = CF_MIXER_DELTA;
    recurrent.tail = 4;
    for (i = 0; i < 4; i++) {
        model.kinds = i & 1 ? &recurrent : NULL;
        model.n_kinds = i & 1;
        model.qk_norm = !(i & 1);
        desc.model = &model;
        desc.gpu = cf_gpu_find("h100-80g");
        desc.parallel.pp = 2;
        desc.stream = i >> 1;
        FINE(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error));
        FINE(time_it(plan, &timing));
    }
    desc.stream = 2;
    ALONE(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), "stream", "too large");
    desc.stream = 0;
    desc.unfused = -1;
    ALONE(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), "unfused", "too small");
    cf_plan_free(plan);
}

/* ---- tuning ---- */

static cf_result tune(const cf_tune_desc *desc) {
    static const int64_t few[] = {4000, 300, 200, 900};
    cf_tuning *tuning = NULL;
    cf_result result = cf_tune(few, COUNT(few), desc, &tuning, &error);
    CHECK((tuning != NULL) == (result == CF_OK));
    cf_tuning_free(tuning);
    return result;
}

TEST(of_searches) {
    const int64_t sizes[] = {4096}, one[] = {1};
    const cf_schedule_kind kinds[] = {CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    cf_tune_desc desc = {0}, again;
    int64_t *counts[4], i;
    const char *names[] = {"n_chunk_sizes", "n_ks", "n_kinds", "n_replays"};
    cf_timing timing = {0};
    timing.all.forward.per_token = 1;
    desc.model = cf_model_find("qwen3-8b");
    desc.gpu = cf_gpu_find("h200");
    desc.parallel.tp = 4;
    desc.parallel.pp = 2;
    desc.parallel.recompute = CF_RECOMPUTE_FULL;
    desc.batch = 4;
    desc.n_batches = 1;
    desc.max_tries = 2;
    counts[0] = &desc.n_chunk_sizes, counts[1] = &desc.n_ks, counts[2] = &desc.n_kinds, counts[3] = &desc.n_replays;
    for (i = 0; i < 4; i++) {
        *counts[i] = 1;
        ALONE(tune(&desc), names[i], "needs");
        *counts[i] = 0;
    }
    desc.chunk_sizes = sizes;
    desc.ks = one;
    desc.kinds = kinds;
    desc.n_chunk_sizes = desc.n_ks = desc.n_kinds = 1;
    desc.split_backward = 1;
    ALONE(tune(&desc), "split_backward", "best");
    desc.n_kinds = 2;
    FINE(tune(&desc));
    again = cf_tune_defaults(&desc);
    FINE(tune(&again));
    desc.split_backward = 2;
    ALONE(tune(&desc), "split_backward", "too large");
    desc.split_backward = 0;
    desc.step_seconds = 1;
    ALONE(tune(&desc), "step_seconds", "timing");
    desc.step_seconds = 0;
    desc.no_stream = 1;
    FINE(tune(&desc));
    desc.memory.state_window = CF_TUNE_WINDOW;
    ALONE(tune(&desc), "no_stream", "state_window");
    desc.no_stream = 0;
    FINE(tune(&desc));
    desc.no_outputs = 1;
    FINE(tune(&desc));
    desc.memory.outputs = 1;
    ALONE(tune(&desc), "no_outputs", "outputs");
    desc.no_outputs = desc.memory.outputs = 0;
    desc.pack.no_copies = 1;
    ALONE(tune(&desc), "no_copies", "shared_prefixes");
    desc.pack.no_copies = 0;
    desc.pack.max_cp = 2;
    FINE(tune(&desc));
    desc.timing = &timing;
    ALONE(tune(&desc), "pack.max_cp", "without timing");
    desc.gpu = NULL;
    desc.limit_bytes = INT64_C(100) << 30;
    ALONE(tune(&desc), "pack.max_cp", "a gpu");
    desc.pack.max_cp = 1;
    FINE(tune(&desc));
}

SUITE(needs, CASE(of_packing), CASE(of_metadata), CASE(of_loss_weights), CASE(of_kinds_of_layers), CASE(of_models),
      CASE(of_splits), CASE(of_schedules), CASE(of_timings), CASE(of_estimates), CASE(of_searches));
