/* Every number that has a most is taken up to that, and refused one above by name, with the most in the record. Where
   so much of something is more than a machine has, the call gets to what comes next and fails there instead. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"

#include <string.h>

static void *no_memory(size_t bytes, void *user) {
    (void)bytes, (void)user;
    return NULL;
}

static void no_release(void *memory, void *user) { (void)memory, (void)user; }

static const cf_allocator nothing = {no_memory, no_release, NULL};

/* What a call says of a value, all else being usual. */
typedef cf_result (*limits_call)(int64_t value, cf_error *error);

/* `most` is not what the call stumbles over, and one more is; `least` the same from below, unless it is INT64_MIN. */
static void check_range(limits_call call, const char *field, int64_t least, int64_t most) {
    cf_error error = {0};
    harness_note("%s", field);
    if (call(most, &error) != CF_OK) CHECK(strcmp(error.field, field) != 0);
    if (most < INT64_MAX) {
        CHECK_INT(call(most + 1, &error), CF_ERROR_LIMIT);
        CHECK_STR(error.field, field);
        CHECK_INT(error.wanted, most);
        CHECK_INT(error.got, most + 1);
        CHECK_STR(oracle_error_fault(&error), NULL);
    }
    if (least == INT64_MIN) return;
    memset(&error, 0, sizeof error);
    if (call(least, &error) != CF_OK) CHECK(strcmp(error.field, field) != 0);
    CHECK_INT(call(least - 1, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, field);
    CHECK_INT(error.wanted, least);
    CHECK_STR(oracle_error_fault(&error), NULL);
}

/* ---- packing and loss weights ---- */

static cf_pack_desc pack_desc;

static cf_result pack_one(int64_t length, cf_error *error) {
    cf_plan *plan = NULL;
    cf_result result;
    pack_desc.allocator = &nothing;
    result = cf_pack(&length, 1, &pack_desc, &plan, error);
    CHECK(result != CF_OK && plan == NULL);
    memset(&pack_desc, 0, sizeof pack_desc);
    return result;
}

#define PACK_MEMBER(member)                                              \
    static cf_result pack_##member(int64_t value, cf_error *error) {     \
        pack_desc.chunk_size = 64;                                       \
        pack_desc.member = value;                                        \
        return pack_one(1, error);                                       \
    }
PACK_MEMBER(chunk_size)
PACK_MEMBER(n_ranks)

static cf_result pack_length(int64_t value, cf_error *error) {
    pack_desc.chunk_size = CF_MAX_CHUNK_SIZE / 2;
    return pack_one(value, error);
}

/* The first of them is looked at, and is below zero. */
static cf_result pack_n(int64_t value, cf_error *error) {
    const int64_t bad = -1;
    cf_pack_desc desc = {0};
    size_t bytes;
    desc.chunk_size = 64;
    return cf_pack_size(&bad, value, &desc, &bytes, error);
}

static cf_result weigh_n(int64_t value, cf_error *error) {
    const int64_t length = 1;
    cf_loss_weights_desc desc = {0};
    double weight;
    desc.allocator = &nothing;
    return cf_loss_weights(&length, value, &desc, &weight, error);
}

TEST(of_packing) {
    check_range(pack_chunk_size, "chunk_size", 1, CF_MAX_CHUNK_SIZE);
    check_range(pack_n_ranks, "n_ranks", INT64_MIN, CF_MAX_RANKS);
    check_range(pack_length, "lengths", INT64_MIN, CF_MAX_LENGTH);
    check_range(pack_n, "n", 0, CF_MAX_SEQUENCES);
    check_range(weigh_n, "n", 0, CF_MAX_SEQUENCES);
}

/* ---- models and memory ---- */

#define MODEL_MEMBER(name, member)                                            \
    static cf_result name(int64_t value, cf_error *error) {                   \
        cf_memory_desc desc = {0};                                            \
        cf_model model = {0};                                                 \
        cf_token_bytes bytes;                                                 \
        model.layers = model.hidden = model.heads = model.kv_heads = 1;       \
        model.ffn = model.vocab = model.head_dim = 1;                         \
        desc.model = &model;                                                  \
        member = value;                                                       \
        return cf_memory_token_bytes(&desc, 0, &bytes, error);                \
    }
MODEL_MEMBER(of_layers, model.layers)
MODEL_MEMBER(of_hidden, model.hidden)
MODEL_MEMBER(of_heads, model.heads)
MODEL_MEMBER(of_head_dim, model.head_dim)
MODEL_MEMBER(of_head_dims, model.heads = 3; model.head_dim)
MODEL_MEMBER(of_ffn, model.ffn)
MODEL_MEMBER(of_vocab, model.vocab)
MODEL_MEMBER(of_dp, desc.parallel.dp)
MODEL_MEMBER(of_vocab_multiple, desc.parallel.vocab_multiple)
MODEL_MEMBER(of_fragmentation, desc.fragmentation)
MODEL_MEMBER(of_window, desc.state_window)
MODEL_MEMBER(of_runtime, desc.runtime_bytes)

TEST(of_models) {
    check_range(of_layers, "model.layers", 1, CF_MAX_LAYERS);
    check_range(of_hidden, "model.hidden", 1, CF_MAX_WIDTH);
    check_range(of_heads, "model.heads", 1, CF_MAX_WIDTH);
    check_range(of_head_dim, "model.head_dim", 0, CF_MAX_WIDTH);
    check_range(of_head_dims, "model.head_dim", 0, CF_MAX_WIDTH / 3);
    check_range(of_ffn, "model.ffn", 1, CF_MAX_FFN);
    check_range(of_vocab, "model.vocab", 1, CF_MAX_VOCAB);
    check_range(of_dp, "parallel.dp", INT64_MIN, CF_MAX_RANKS);
    check_range(of_vocab_multiple, "parallel.vocab_multiple", INT64_MIN, CF_MAX_VOCAB);
    check_range(of_fragmentation, "fragmentation", -1, 1000);
    check_range(of_window, "state_window", 0, CF_MAX_LENGTH);
    check_range(of_runtime, "runtime_bytes", INT64_MIN, INT64_MAX);
}

/* ---- schedules ---- */

static cf_plan *plan; /* a standalone chunk, for as long as a test runs */

static cf_result make_of(int64_t n_stages, int64_t n_virtual, int64_t k, int64_t budget, cf_error *error) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    desc.shape.n_stages = n_stages;
    desc.shape.n_virtual = n_virtual;
    desc.shape.k = k;
    desc.budget = budget;
    desc.allocator = &nothing;
    return cf_schedule_make(plan, &desc, &schedule, error);
}

static cf_result make_stages(int64_t value, cf_error *error) { return make_of(value, 1, 1, 0, error); }
static cf_result make_virtual(int64_t value, cf_error *error) { return make_of(3, value, 1, 0, error); }
static cf_result make_k(int64_t value, cf_error *error) { return make_of(1, 1, value, 0, error); }
static cf_result make_budget(int64_t value, cf_error *error) { return make_of(1, 1, 1, value, error); }

static cf_result graph_stages(int64_t value, cf_error *error) {
    cf_graph_desc desc = {0};
    cf_graph *graph = NULL;
    desc.shape.n_stages = value;
    desc.allocator = &nothing;
    return cf_graph_make(plan, &desc, &graph, error);
}

/* Claims: a schedule whose lists are empty but for what they say. */
static cf_schedule claims;
static int64_t claims_first[2];
static cf_action claims_action;

static void claim(int64_t n_virtual, int64_t n_actions) {
    memset(&claims, 0, sizeof claims);
    claims.shape.replay = CF_REPLAY_LOCAL;
    claims.shape.placement = CF_PLACEMENT_LOOP;
    claims.shape.n_stages = claims.shape.k = 1;
    claims.shape.n_virtual = n_virtual;
    claims.n_actions = claims_first[1] = n_actions;
    claims.first = claims_first;
    claims.actions = &claims_action;
    claims.n_chunks = plan->n_chunks;
}

static cf_result simulate_virtual(int64_t value, cf_error *error) {
    cf_simulate_desc desc = {0};
    cf_timeline *timeline = NULL;
    desc.allocator = &nothing;
    claim(value, 0);
    return cf_simulate(plan, &claims, &desc, &timeline, error);
}

static cf_result simulate_actions(int64_t value, cf_error *error) {
    cf_simulate_desc desc = {0};
    cf_timeline *timeline = NULL;
    desc.no_bounds = 1; /* for which all actions would be looked at */
    desc.allocator = &nothing;
    claim(1, value);
    return cf_simulate(plan, &claims, &desc, &timeline, error);
}

/* Of the two virtual stages of a stage while its four actions run. */
static cf_result count_loads(int64_t value, cf_error *error) {
    cf_memory_load loads[8];
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    cf_result result;
    desc.kind = CF_SCHEDULE_INTERLEAVED;
    desc.shape.n_stages = desc.shape.n_virtual = 2;
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    harness_poison(loads, sizeof loads);
    CHECK_INT(cf_schedule_loads(plan, schedule, 0, NULL, value, NULL), CF_ERROR_ARGUMENT);
    result = cf_schedule_loads(plan, schedule, 0, loads, value, error);
    if (result != CF_OK) CHECK_POISON(loads, sizeof loads);
    cf_schedule_free(schedule);
    return result;
}

TEST(of_schedules) {
    const int64_t one = 1;
    REQUIRE((plan = naive_pack(&one, 1, 1)) != NULL);
    check_range(make_stages, "shape.n_stages", INT64_MIN, CF_MAX_STAGES);
    check_range(make_virtual, "shape.n_virtual", INT64_MIN, CF_MAX_STAGES / 3);
    check_range(make_k, "shape.k", INT64_MIN, INT64_MAX);
    check_range(make_budget, "budget", 0, INT64_MAX);
    check_range(graph_stages, "shape.n_stages", INT64_MIN, CF_MAX_STAGES);
    /* With 32 bits, the times of so many fill more than could be pointed to. */
    if (sizeof(size_t) >= 8) check_range(simulate_actions, "n_actions", INT64_MIN, CF_MAX_ACTIONS);
    check_range(count_loads, "count", 8, INT64_MAX);
    cf_plan_free(plan);
    REQUIRE((plan = naive_pack(NULL, 0, 1)) != NULL);
    check_range(simulate_virtual, "shape.n_stages", INT64_MIN, CF_MAX_STAGES);
    cf_plan_free(plan);
}

/* Nodes of a graph, of as many chunks and virtual stages as make just so many, and of one chunk more. */
TEST(of_graphs) {
    const int64_t most = CF_MAX_NODES / 2 / CF_MAX_STAGES;
    static int64_t lengths[CF_MAX_NODES / 2 / CF_MAX_STAGES + 1];
    int64_t more, split, i;
    for (i = 0; i <= most; i++) lengths[i] = 1;
    for (split = 0; split < 2; split++)
        for (more = 0; more < 2; more++) {
            int64_t chunks = (split ? most * 2 / 3 : most) + more, nodes = (2 + split) * chunks * CF_MAX_STAGES;
            cf_graph_desc desc = {0};
            cf_graph *graph = NULL;
            cf_error error;
            desc.shape.n_stages = CF_MAX_STAGES;
            desc.split = (int)split;
            desc.allocator = &nothing;
            REQUIRE((plan = naive_pack(lengths, chunks, 1)) != NULL);
            harness_note("%d chunks, split %d", (int)chunks, (int)split);
            CHECK(cf_graph_make(plan, &desc, &graph, &error) == (more ? CF_ERROR_LIMIT : CF_ERROR_MEMORY) ||
                  (!more && sizeof(size_t) < 8));
            if (more) CHECK_STR(error.field, "n_nodes");
            if (more) CHECK(error.got == nodes && error.wanted == CF_MAX_NODES);
            cf_plan_free(plan);
        }
}

/* Cells of a stage, of which each may have six tensors on their way: they are counted with 32 bits. */
TEST(of_runs) {
    const int64_t one = 1, most = INT32_MAX / 6;
    int more;
    REQUIRE((plan = naive_pack(&one, 1, 1)) != NULL);
    for (more = 0; more < 2; more++) {
        cf_error error;
        size_t bytes;
        claim(most + more, 0);
        CHECK_INT(cf_run_size(plan, &claims, &bytes, &error), more ? CF_ERROR_LIMIT : CF_ERROR_SCHEDULE);
        CHECK_STR(error.field, more ? "shape.n_virtual" : "n_actions");
        CHECK_STR(oracle_error_fault(&error), NULL);
    }
    cf_plan_free(plan);
}

/* A schedule of no passes has no loads, and nothing is written. */
TEST(no_passes_have_no_loads) {
    cf_memory_load loads[3];
    cf_error error;
    REQUIRE((plan = naive_pack(NULL, 0, 1)) != NULL);
    harness_poison(loads, sizeof loads);
    claim(3, 0);
    CHECK_INT(cf_schedule_loads(plan, &claims, 0, NULL, 0, &error), CF_OK);
    CHECK_INT(cf_schedule_loads(plan, &claims, 0, loads, 3, &error), CF_OK);
    CHECK_POISON(loads, sizeof loads);
    cf_plan_free(plan);
}

SUITE(limits, CASE(of_packing), CASE(of_models), CASE(of_schedules), CASE(of_graphs), CASE(of_runs),
      CASE(no_passes_have_no_loads));
