/* Tests the limits of numbers. Every number with a largest value is accepted up to it. One above is refused by name,
   with the largest value in the record. If so much of something would exceed a machine's memory, the call gets past
   this check and fails at the next. */

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

/* Calls with one value; all else is usual. */
typedef cf_result (*limits_call)(int64_t value, cf_error *error);

/* Checks that the call accepts `most` for the field and refuses one more with the code `above`. Checks `least` and one
   less in the same way, unless it is INT64_MIN. */
static void check_range_as(limits_call call, const char *field, int64_t least, int64_t most, cf_result above) {
    cf_error error = {0};
    harness_note("%s", field);
    if (call(most, &error) != CF_OK) CHECK(strcmp(error.field, field) != 0);
    if (most < INT64_MAX) {
        CHECK_INT(call(most + 1, &error), above);
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

static void check_range(limits_call call, const char *field, int64_t least, int64_t most) {
    check_range_as(call, field, least, most, CF_ERROR_LIMIT);
}

/* Checks a member in which 0 means the default and 1 is another value. */
static void check_default(limits_call call, const char *field, int64_t most) {
    cf_error error = {0};
    check_range(call, field, INT64_MIN, most);
    CHECK_INT(call(1, &error), CF_OK);
    CHECK_INT(call(-1, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, field);
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

/* The first length is read, and is negative. */
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

/* Asks for the shares of so many sequences. The first length is bad. */
static cf_result find_n(int64_t value, cf_error *error) {
    const int64_t bad = -1;
    const void *tokens = &bad;
    cf_shared_prefix share;
    return cf_shared_prefixes_find(&tokens, 4, &bad, value, &share, &nothing, error);
}

static cf_result find_of(int64_t token_bytes, int64_t length, cf_error *error) {
    const void *tokens = &length;
    cf_shared_prefix share;
    return cf_shared_prefixes_find(&tokens, token_bytes, &length, 1, &share, &nothing, error);
}

static cf_result find_token_bytes(int64_t value, cf_error *error) { return find_of(value, 1, error); }
static cf_result find_length(int64_t value, cf_error *error) { return find_of(4, value, error); }

TEST(of_shares) {
    check_range(find_n, "n", 0, CF_MAX_SEQUENCES);
    check_range(find_token_bytes, "token_bytes", 1, 1024);
    check_range_as(find_length, "lengths", 0, CF_MAX_LENGTH, CF_ERROR_ARGUMENT);
}

TEST(of_packing) {
    check_range(pack_chunk_size, "chunk_size", 1, CF_MAX_CHUNK_SIZE);
    check_range(pack_n_ranks, "n_ranks", INT64_MIN, CF_MAX_RANKS);
    check_range(pack_length, "lengths", INT64_MIN, CF_MAX_LENGTH);
    check_range(pack_n, "n", 0, CF_MAX_SEQUENCES);
    check_range(weigh_n, "n", 0, CF_MAX_SEQUENCES);
}

/* Asks for the metadata of a chunk of one token, in arrays of these sizes. */
static cf_result size_of(int64_t rows, int64_t prefix, int64_t n_seqs, cf_error *error) {
    const int64_t length = 1;
    const cf_capacity most = {rows, prefix, n_seqs, 0, 0, 0, 0};
    const cf_metadata_desc desc = {.capacity = &most};
    cf_plan *one = naive_pack(&length, 1, 1);
    size_t bytes = 0;
    cf_result result = cf_metadata_size(one, 0, &desc, &bytes, error);
    CHECK((result == CF_OK) == (bytes > 0));
    cf_plan_free(one);
    return result;
}

static cf_result size_rows(int64_t value, cf_error *error) { return size_of(value, 0, 9, error); }
static cf_result size_prefix(int64_t value, cf_error *error) { return size_of(7, value, 9, error); }
static cf_result size_n_seqs(int64_t value, cf_error *error) { return size_of(1, 0, value, error); }

TEST(of_capacities) {
    if (sizeof(size_t) >= 8) check_range(size_rows, "capacity.rows", 1, INT32_MAX);
    check_range(size_prefix, "capacity.prefix", 0, INT32_MAX - 7);
    if (sizeof(size_t) >= 8) check_range(size_n_seqs, "capacity.n_seqs", 1, INT32_MAX);
}

/* ---- models and memory ---- */

static const cf_layer an_expert = {.experts = CF_MAX_EXPERTS, .active = 1};

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
MODEL_MEMBER(of_first_dense, model.kinds = &an_expert; model.n_kinds = 1; model.layers = 7; model.first_dense)
MODEL_MEMBER(of_kv_heads, model.heads = 12; model.kv_heads)
MODEL_MEMBER(of_tp, model.heads = model.kv_heads = model.ffn = 12; desc.parallel.tp)
MODEL_MEMBER(of_pp, model.layers = 12; desc.parallel.pp)
MODEL_MEMBER(of_n_virtual, model.layers = 11; desc.parallel.pp = 4; desc.parallel.n_virtual)
MODEL_MEMBER(of_mtp, model.mtp)
MODEL_MEMBER(of_norms, model.norms)
MODEL_MEMBER(of_ep, model.kinds = &an_expert; model.n_kinds = 1; desc.parallel.dp = CF_MAX_EXPERTS; desc.parallel.ep)
MODEL_MEMBER(of_imbalance, desc.parallel.imbalance)
MODEL_MEMBER(of_recompute_layers, desc.parallel.recompute = CF_RECOMPUTE_FULL; desc.parallel.recompute_layers)
MODEL_MEMBER(of_gathered, desc.gathered)
MODEL_MEMBER(of_lora_rank, desc.lora_rank)
MODEL_MEMBER(of_chunk_size, desc.chunk_size)
MODEL_MEMBER(of_activation_bytes, desc.activation_bytes)
MODEL_MEMBER(of_parameter_bytes, desc.parameter_bytes)
MODEL_MEMBER(of_gradient_bytes, desc.gradient_bytes)
MODEL_MEMBER(of_optimizer_bytes, desc.matrix_bytes = 8; desc.optimizer_bytes)
MODEL_MEMBER(of_matrix_bytes, desc.matrix_bytes)
MODEL_MEMBER(of_state_bytes, desc.state_bytes)
MODEL_MEMBER(of_gradients_of_state, desc.state_gradient_bytes)

/* Returns the first n letters of the alphabet, one for each kind. */
static const char *letters(int64_t n) {
    static char text[CF_MAX_KINDS + 2];
    int64_t i;
    for (i = 0; i < CF_MAX_KINDS + 1; i++) text[i] = i == 0 || i < n ? (char)('a' + i) : '\0';
    return text;
}

/* The same for the only kind of a model. `with` sets other members of it. */
#define KIND_MEMBER(name, with, member)                                       \
    static cf_result kind_##name(int64_t value, cf_error *error) {            \
        static cf_layer kinds[CF_MAX_KINDS + 1];                              \
        cf_layer *kind = kinds;                                               \
        cf_model model = {0};                                                 \
        memset(kinds, 0, sizeof kinds);                                       \
        model.layers = model.hidden = model.heads = model.kv_heads = 1;       \
        model.ffn = model.vocab = model.head_dim = model.n_kinds = 1;         \
        model.kinds = kinds;                                                  \
        with;                                                                 \
        member = value;                                                       \
        return cf_model_validate(&model, error);                              \
    }
KIND_MEMBER(count, (void)kind; model.pattern = letters(value), model.n_kinds)
KIND_MEMBER(heads, (void)kind, kind->heads)
KIND_MEMBER(kv_heads, kind->heads = 12, kind->kv_heads)
KIND_MEMBER(head_dim, kind->heads = 3, kind->head_dim)
KIND_MEMBER(value_dim, kind->heads = 3, kind->value_dim)
KIND_MEMBER(window, (void)kind, kind->window)
KIND_MEMBER(a_window, kind->mixer = CF_MIXER_WINDOW, kind->window)
KIND_MEMBER(pieces, kind->mixer = CF_MIXER_CHUNKED, kind->window)
KIND_MEMBER(latent, (void)kind, kind->latent)
KIND_MEMBER(a_latent, kind->mixer = CF_MIXER_LATENT; kind->head_dim = 8, kind->latent)
KIND_MEMBER(q_latent, (void)kind, kind->q_latent)
KIND_MEMBER(rope_dim, kind->head_dim = 8, kind->rope_dim)
KIND_MEMBER(q_of_latent, kind->mixer = CF_MIXER_LATENT; kind->latent = 1, kind->q_latent)
KIND_MEMBER(latent_rope, kind->mixer = CF_MIXER_LATENT; kind->latent = 1; kind->head_dim = 8, kind->rope_dim)
KIND_MEMBER(tail, (void)kind, kind->tail)
KIND_MEMBER(delta_tail, kind->mixer = CF_MIXER_DELTA, kind->tail)
KIND_MEMBER(mamba_tail, kind->mixer = CF_MIXER_MAMBA2, kind->tail)
KIND_MEMBER(ffn, (void)kind, kind->ffn)
KIND_MEMBER(experts, kind->active = 1, kind->experts)
KIND_MEMBER(active, kind->experts = 2000, kind->active)
KIND_MEMBER(active_of_few, kind->experts = 5, kind->active)
KIND_MEMBER(shared, kind->experts = kind->active = 1, kind->shared)

TEST(of_kinds) {
    const cf_result bad = CF_ERROR_ARGUMENT;
    const int64_t any = INT64_MIN; /* values below mean the default, or the error names another member */
    check_range(kind_count, "model.n_kinds", 1, CF_MAX_KINDS);
    check_range_as(kind_heads, "kinds.heads", any, CF_MAX_WIDTH, bad);
    check_range_as(kind_kv_heads, "kinds.kv_heads", any, 12, bad);
    check_range_as(kind_head_dim, "kinds.head_dim", any, CF_MAX_WIDTH / 3, bad);
    check_range_as(kind_value_dim, "kinds.value_dim", any, CF_MAX_WIDTH / 3, bad);
    check_range_as(kind_window, "kinds.window", 0, 0, bad); /* others have none */
    check_range_as(kind_a_window, "kinds.window", 1, CF_MAX_CHUNK_SIZE, bad);
    check_range_as(kind_pieces, "kinds.window", 1, CF_MAX_CHUNK_SIZE, bad);
    check_range_as(kind_latent, "kinds.latent", 0, 0, bad);
    check_range_as(kind_a_latent, "kinds.latent", 1, CF_MAX_WIDTH, bad);
    check_range_as(kind_q_latent, "kinds.q_latent", 0, 0, bad);
    check_range_as(kind_rope_dim, "kinds.rope_dim", 0, 0, bad);
    check_range_as(kind_q_of_latent, "kinds.q_latent", 0, CF_MAX_WIDTH, bad);
    check_range_as(kind_latent_rope, "kinds.rope_dim", 0, 7, bad);
    check_range_as(kind_tail, "kinds.tail", 0, 0, bad);
    check_range_as(kind_delta_tail, "kinds.tail", 1, CF_MAX_ACTIVE, bad);
    check_range_as(kind_mamba_tail, "kinds.tail", 1, CF_MAX_ACTIVE, bad);
    check_range_as(kind_ffn, "kinds.ffn", any, CF_MAX_FFN, bad);
    check_range_as(kind_experts, "kinds.experts", any, CF_MAX_EXPERTS, bad);
    check_range_as(kind_active, "kinds.active", 1, CF_MAX_ACTIVE, bad);
    check_range_as(kind_active_of_few, "kinds.active", 1, 5, bad);
    check_range_as(kind_shared, "kinds.shared", 0, CF_MAX_FFN, bad);
}

TEST(of_models) {
    check_range(of_layers, "model.layers", 1, CF_MAX_LAYERS);
    check_range(of_hidden, "model.hidden", 1, CF_MAX_WIDTH);
    check_range(of_heads, "model.heads", 1, CF_MAX_WIDTH);
    check_range(of_head_dim, "model.head_dim", 0, CF_MAX_WIDTH);
    check_range(of_head_dims, "model.head_dim", 0, CF_MAX_WIDTH / 3);
    check_range(of_ffn, "model.ffn", 1, CF_MAX_FFN);
    check_range(of_vocab, "model.vocab", 1, CF_MAX_VOCAB);
    check_default(of_dp, "parallel.dp", CF_MAX_RANKS);
    check_default(of_vocab_multiple, "parallel.vocab_multiple", CF_MAX_VOCAB);
    check_range(of_fragmentation, "fragmentation", -1, 1000);
    check_range(of_window, "state_window", 0, CF_MAX_LENGTH);
    check_default(of_runtime, "runtime_bytes", INT64_MAX);
    check_range_as(of_first_dense, "model.first_dense", 0, 7, CF_ERROR_ARGUMENT);
    check_range_as(of_kv_heads, "model.kv_heads", 1, 12, CF_ERROR_ARGUMENT);
    check_range_as(of_tp, "parallel.tp", INT64_MIN, 12, CF_ERROR_ARGUMENT);
    check_range_as(of_pp, "parallel.pp", INT64_MIN, 12, CF_ERROR_ARGUMENT);
    check_range_as(of_n_virtual, "parallel.n_virtual", INT64_MIN, 2, CF_ERROR_ARGUMENT);
    check_range(of_mtp, "model.mtp", 0, CF_MAX_LAYERS);
    check_range(of_norms, "model.norms", 0, CF_MAX_KINDS);
    check_default(of_ep, "parallel.ep", CF_MAX_EXPERTS);
    check_range(of_imbalance, "parallel.imbalance", 0, 1000);
    check_range(of_recompute_layers, "parallel.recompute_layers", 0, CF_MAX_LAYERS);
    check_range(of_gathered, "gathered", 0, CF_MAX_LENGTH);
    check_range(of_lora_rank, "lora_rank", 0, CF_MAX_WIDTH);
    check_default(of_chunk_size, "chunk_size", CF_MAX_CHUNK_SIZE);
    check_default(of_activation_bytes, "activation_bytes", 1024);
    check_default(of_parameter_bytes, "parameter_bytes", 1024);
    check_default(of_gradient_bytes, "gradient_bytes", 1024);
    check_default(of_optimizer_bytes, "optimizer_bytes", 1024);
    check_default(of_matrix_bytes, "matrix_bytes", 1024);
    check_default(of_state_bytes, "state_bytes", 1024);
    check_default(of_gradients_of_state, "state_gradient_bytes", 1024);
}

/* ---- schedules ---- */

static cf_plan *plan; /* a standalone chunk, kept while a test runs */

static cf_result make_of(int64_t n_stages, int64_t n_virtual, int64_t k, int64_t max_tries, cf_error *error) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    desc.shape.n_stages = n_stages;
    desc.shape.n_virtual = n_virtual;
    desc.shape.k = k;
    desc.max_tries = max_tries;
    desc.allocator = &nothing;
    return cf_schedule_make(plan, &desc, &schedule, error);
}

static cf_result make_stages(int64_t value, cf_error *error) { return make_of(value, 1, 1, 0, error); }
static cf_result make_virtual(int64_t value, cf_error *error) { return make_of(3, value, 1, 0, error); }
static cf_result make_k(int64_t value, cf_error *error) { return make_of(1, 1, value, 0, error); }
static cf_result make_max_tries(int64_t value, cf_error *error) { return make_of(1, 1, 1, value, error); }

/* A schedule whose empty lists claim to have actions. */
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
    desc.no_bounds = 1; /* which would look at all actions */
    desc.allocator = &nothing;
    claim(1, value);
    return cf_simulate(plan, &claims, &desc, &timeline, error);
}

/* Counts loads of a stage's two virtual stages while its four actions run. */
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
    check_range(make_max_tries, "max_tries", 0, INT64_MAX);
    /* On 32-bit machines the times of so many actions would exceed the address space. */
    if (sizeof(size_t) >= 8) check_range(simulate_actions, "n_actions", INT64_MIN, CF_MAX_ACTIONS);
    check_range(count_loads, "count", 8, INT64_MAX);
    cf_plan_free(plan);
    REQUIRE((plan = naive_pack(NULL, 0, 1)) != NULL);
    check_range(simulate_virtual, "shape.n_stages", INT64_MIN, CF_MAX_STAGES);
    cf_plan_free(plan);
}

/* Counts the cells of a stage. Each may have six tensors on their way, and all are counted in 32 bits. */
TEST(of_runs) {
    const int64_t one = 1, most = INT32_MAX / 6;
    int more;
    REQUIRE((plan = naive_pack(&one, 1, 1)) != NULL);
    for (more = 0; more < 2; more++) {
        cf_error error;
        size_t bytes;
        claim(most + more, 0);
        CHECK_INT(cf_steps_size(plan, &claims, 0, &bytes, &error), more ? CF_ERROR_LIMIT : CF_ERROR_SCHEDULE);
        CHECK_STR(error.field, more ? "shape.n_virtual" : "n_actions");
        CHECK_STR(oracle_error_fault(&error), NULL);
    }
    cf_plan_free(plan);
}

/* A schedule without passes has no loads, and nothing is written. */
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

SUITE(limits, CASE(of_packing), CASE(of_shares), CASE(of_capacities), CASE(of_models), CASE(of_kinds),
      CASE(of_schedules), CASE(of_runs), CASE(no_passes_have_no_loads));
