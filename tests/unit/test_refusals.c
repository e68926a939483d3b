/* Tests refusals that no other suite causes, and branches that ordinary batches do not take, as found by `make
   coverage`. Objects are made by the library and then damaged in one place. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "tools/chunkflow_tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The call fails with this code, and names this field. `error` is the caller's record. */
#define REFUSED(call, wanted, name)       \
    do {                                  \
        harness_poison(&error, sizeof error); \
        if (!CHECK_INT(call, wanted)) break; \
        CHECK_INT(error.code, wanted);    \
        CHECK_STR(error.field, name);     \
        CHECK_STR(oracle_error_fault(&error), NULL); \
    } while (0)

/* Sequences of 9, 2 and 5 tokens in chunks of 3: chains of three and two chunks. */
static cf_plan *plan_of_chains(void) {
    static const int64_t lengths[] = {9, 2, 5};
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    pack.chunk_size = 3;
    pack.no_tails = 1;
    CHECK_INT(cf_pack(lengths, COUNT(lengths), &pack, &plan, NULL), CF_OK);
    return plan;
}

static cf_plan *plan_of_nothing(void) {
    cf_plan *plan = naive_pack(NULL, 0, 3);
    return plan;
}

static cf_schedule *paper_of(const cf_plan *plan, int64_t n_stages) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    desc.kind = CF_SCHEDULE_PAPER;
    desc.shape.replay = CF_REPLAY_PIPELINE;
    desc.shape.n_stages = n_stages;
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    return schedule;
}

/* ---- names ---- */

#define CHECK_NAMES(function, type, ...)                                            \
    do {                                                                            \
        static const char *const names[] = {"?", __VA_ARGS__, "?"};                 \
        int item;                                                                   \
        for (item = 0; item < (int)COUNT(names); item++) CHECK_STR(function((type)item), names[item]); \
    } while (0)

TEST(every_item_has_its_name) {
    CHECK_NAMES(cf_pack_method_name, cf_pack_method, "best-fit", "next-fit");
    CHECK_NAMES(cf_split_method_name, cf_split_method, "full", "even", "cost");
    CHECK_NAMES(cf_recompute_name, cf_recompute, "none", "selective", "layernorm", "act", "mlp", "full");
    CHECK_NAMES(cf_placement_name, cf_placement, "loop", "v");
    CHECK_NAMES(cf_replay_name, cf_replay, "pipeline", "local");
    CHECK_NAMES(cf_schedule_kind_name, cf_schedule_kind, "paper", "gpipe", "1f1b", "interleaved", "zero-bubble",
                "best");
    CHECK_STR(cf_edge_name(CF_EDGE_ACTIVATION), "activation");
    CHECK_STR(cf_edge_name(CF_EDGE_STATE_GRADIENT), "state gradient");
    CHECK_STR(cf_edge_name(CF_EDGE_SLOT), "slot");
    CHECK_STR(cf_edge_name(CF_EDGE_COUNT), "?");
}

/* ---- packing ---- */

/* A thousand short sequences fit into a chunk, next to a chain of nearly the largest number of chunks. */
TEST(a_batch_of_too_many_slices) {
    int64_t lengths[1001], i;
    cf_pack_desc desc = {0};
    cf_error error;
    size_t bytes;
    for (i = 0; i < 1001; i++) lengths[i] = 1;
    desc.chunk_size = 1000;
    lengths[0] = ((int64_t)CF_MAX_CHUNKS - 1005) * desc.chunk_size;
    CHECK_INT(cf_pack_size(lengths, 1001, &desc, &bytes, &error), CF_OK);
    lengths[0] += 6 * desc.chunk_size;
    harness_poison(&bytes, sizeof bytes);
    REFUSED(cf_pack_size(lengths, 1001, &desc, &bytes, &error), CF_ERROR_LIMIT, "n_slices");
    CHECK_INT(error.wanted, CF_MAX_SLICES);
    CHECK_INT(error.got, (int64_t)CF_MAX_SLICES + 1);
}

TEST(a_batch_of_too_many_chunks) {
    const int64_t giants[] = {CF_MAX_CHUNKS, CF_MAX_CHUNKS}, one[] = {((int64_t)1 << 22) + 1};
    const int64_t long_one[] = {65536};
    cf_pack_desc desc = {0};
    cf_error error;
    size_t bytes;
    desc.chunk_size = 1;
    harness_poison(&bytes, sizeof bytes);
    REFUSED(cf_pack_size(giants, 2, &desc, &bytes, &error), CF_ERROR_LIMIT, "n_chunks");
    CHECK_INT(error.wanted, CF_MAX_CHUNKS);
    CHECK(error.got >= 2 * (int64_t)CF_MAX_CHUNKS);
    /* Such a long chain on as many ranks might need more idle chunks than are allowed. It is refused before memory is
       allocated for them. */
    desc.n_ranks = CF_MAX_RANKS;
    REQUIRE(cf_pack_size(long_one, 1, &desc, &bytes, &error) == CF_OK);
    CHECK(bytes < (size_t)CF_MAX_CHUNKS * sizeof(cf_chunk) + ((size_t)1 << 26));
    desc.n_ranks = 1;
    harness_poison(&bytes, sizeof bytes);
    desc.split = CF_SPLIT_COST;
    REFUSED(cf_pack_size(one, 1, &desc, &bytes, &error), CF_ERROR_LIMIT, "lengths");
    CHECK_INT(error.item, 0);
    CHECK_INT(error.got, one[0]);
    CHECK_POISON(&bytes, sizeof bytes);
}

/* The length of a shared prompt is known late. Tried in the caller's memory as well. */
TEST(a_prompt_of_too_many_slices) {
    const int64_t lengths[] = {5000000, 5000000}, prompt = lengths[0] - 1000;
    const cf_shared_prefix shares[] = {{0, 0}, {0, prompt}};
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error;
    size_t bytes;
    void *memory;
    desc.chunk_size = 1;
    desc.split = CF_SPLIT_COST;
    desc.cost.per_pair = 1;
    desc.shared_prefixes = shares;
    REFUSED(cf_pack(lengths, 2, &desc, &plan, &error), CF_ERROR_LIMIT, "lengths");
    CHECK_INT(error.got, prompt);
    REQUIRE(cf_pack_size(lengths, 2, &desc, &bytes, &error) == CF_OK);
    memory = malloc(bytes);
    REFUSED(cf_pack_into(lengths, 2, &desc, memory, bytes, &plan, &error),
            memory == NULL ? CF_ERROR_ARGUMENT : CF_ERROR_LIMIT, memory == NULL ? "memory" : "lengths");
    CHECK(plan == NULL);
    free(memory);
}

/* With chunks this large, bins with different room share a bucket. */
TEST(best_fit_among_rooms_that_lie_close) {
    static oracle_packing first, best;
    static oracle_batch batch;
    harness_rng rng = {5};
    int round;
    for (round = 0; round < 12; round++) {
        cf_plan *plan = NULL;
        int64_t i;
        memset(&batch.desc, 0, sizeof batch.desc);
        batch.desc.chunk_size = 1 << 18;
        batch.desc.no_tails = round & 1;
        batch.n = 60;
        for (i = 0; i < batch.n; i++) /* in groups, each of which leaves rooms within a few tokens of each other */
            batch.lengths[i] = (batch.desc.chunk_size >> harness_between(&rng, 1, 4)) + harness_between(&rng, -3, 3);
        batch.lengths[7] = 3 * batch.desc.chunk_size + 5;
        harness_note("round %d", round);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        CHECK(oracle_plan_fault(plan, batch.lengths, batch.n) == NULL);
        oracle_packing_of(plan, batch.lengths, &batch.desc, &first);
        best = first;
        oracle_first_fit(&first);
        oracle_best_fit(&best);
        CHECK_INT(plan->n_chunks, (best.n_bins < first.n_bins ? best.n_bins : first.n_bins) + 4 - first.n_tails);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* Three tokens fit into no bin of their bucket: its bin has room for 2, and one in the next bucket has room for 4. */
TEST(a_room_too_small_is_passed_by) {
    static const struct {
        int64_t n, lengths[3], n_chunks;
    } batches[] = {{2, {199998, 3, 0}, 2}, {2, {199996, 3, 0}, 1}, {3, {199998, 199996, 3}, 2}};
    int64_t i;
    for (i = 0; i < COUNT(batches); i++) {
        cf_plan *plan = NULL;
        harness_note("batch %d", (int)i);
        REQUIRE((plan = naive_pack(batches[i].lengths, batches[i].n, 200000)) != NULL);
        CHECK(oracle_plan_fault(plan, batches[i].lengths, batches[i].n) == NULL);
        CHECK_INT(plan->n_chunks, batches[i].n_chunks);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* Far more sequences than can be searched. Placed by falling cost, they balance the ranks as closely as the cheapest
   ones allow. */
TEST(ranks_of_many_sequences_are_even) {
    static int64_t lengths[1280];
    static const int64_t cases[][2] = {{2, 40}, {2, 80}, {2, 320}, {2, 1280}, {5, 160}, {5, 320}, {8, 160}, {8, 640}};
    harness_rng rng = {7};
    int64_t i, j;
    for (i = 0; i < 2 * COUNT(cases); i++) {
        int64_t n = cases[i / 2][1];
        cf_pack_desc desc = {0};
        cf_plan_stats stats;
        cf_plan *plan = NULL;
        desc.chunk_size = 100;
        desc.n_ranks = cases[i / 2][0];
        desc.method = i % 2 == 0 ? CF_PACK_BEST_FIT : CF_PACK_NEXT_FIT;
        desc.cost.per_pair = 1;
        for (j = 0; j < n; j++)
            lengths[j] = j % 7 == 3 ? harness_between(&rng, 100, 399) : harness_between(&rng, 51, 100);
        harness_note("%d ranks, %d sequences", (int)desc.n_ranks, (int)n);
        REQUIRE(cf_pack(lengths, n, &desc, &plan, NULL) == CF_OK);
        CHECK(oracle_plan_fault(plan, lengths, n) == NULL);
        cf_plan_measure(plan, &desc.cost, &stats);
        CHECK(stats.unit_imbalance < 0.7);
        CHECK(stats.rank_imbalance < 1.01);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* ---- plans from elsewhere ---- */

TEST(a_chain_without_chunks) {
    const int64_t lengths[] = {2, 0};
    cf_chain chain = {1, 1, 1, 0, 0};
    cf_plan *plan = NULL, copy;
    cf_error error;
    REQUIRE((plan = naive_pack(lengths, 2, 3)) != NULL);
    copy = *plan;
    copy.chains = &chain;
    copy.n_chains = 1;
    REFUSED(cf_plan_validate(&copy, lengths, 2, NULL, &error), CF_ERROR_PLAN, "chains.first_chunk");
    copy.n_chains = 0;
    CHECK_INT(cf_plan_validate(&copy, lengths, 2, NULL, NULL), CF_OK);
    cf_plan_free(plan);
}

TEST(a_sequence_left_out_needs_no_record) {
    const int64_t lengths[] = {2, 3}, other[] = {2, 0};
    cf_plan *plan = NULL, copy;
    cf_error error;
    REQUIRE((plan = naive_pack(other, 2, 3)) != NULL);
    copy = *plan;
    copy.n_tokens = 5;
    copy.n_empty = 0;
    REFUSED(cf_plan_validate(&copy, lengths, 2, NULL, &error), CF_ERROR_PLAN, "slices.sequence");
    CHECK(error.wanted == 1 && error.item == -1); /* sequence 1 is in no slice */
    CHECK_INT(cf_plan_validate(&copy, lengths, 2, NULL, NULL), CF_ERROR_PLAN);
    CHECK_INT(cf_plan_validate(plan, other, 2, NULL, NULL), CF_OK);
    cf_plan_free(plan);
}

/* The third chunk of a sequence in chunks of the largest size: its pairs do not fit in 64 bits. Those of a slightly
   shorter slice fit, but not together with those of the next sequence. */
TEST(pairs_that_do_not_fit) {
    const int32_t size = CF_MAX_CHUNK_SIZE;
    const int64_t before = 2 * (int64_t)size;
    int64_t lengths[] = {3 * (int64_t)size, 0};
    cf_slice slices[] = {{0, 0, size, 0, -1, 0, 1}, {size, 0, size, 0, 0, 0, 1}, {before, 0, size, 0, 1, 0, 1}, {0}};
    cf_chunk chunks[] = {{0, 1, size, size, cf_slice_pairs(0, size), 0, 0, 0, 0, -1, 1, 2, size, 0},
                         {1, 1, size, size, cf_slice_pairs(size, size), 0, 1, size, 0, 0, 2, 1, size, 0},
                         {2, 1, size, size, 1, 0, 2, before, 0, 1, -1, 0, size, 0}};
    cf_chain chains[] = {{0, 0, 3, 3 * (int64_t)size, 0}};
    cf_slice behind = {0, 1, 0, 0, -1, 1, 1};
    cf_plan plan = {0};
    cf_error error;
    int32_t fits = 1, step;
    plan.chunk_size = size;
    plan.align = plan.n_ranks = plan.n_chains = plan.n_sequences = 1;
    plan.chunks_per_rank = plan.n_chunks = plan.n_slices = 3;
    plan.n_tokens = lengths[0];
    plan.chunks = chunks;
    plan.slices = slices;
    plan.chains = chains;
    CHECK_INT(cf_slice_pairs(before, size), -1);
    REFUSED(cf_plan_validate(&plan, lengths, 1, NULL, &error), CF_ERROR_PLAN, "chunks.pairs");
    CHECK_INT(error.item, 2);

    for (step = 1 << 30; step > 0; step /= 2)
        if (cf_slice_pairs(before, (int64_t)fits + step) >= 0) fits += step;
    behind.length = size - fits;
    behind.offset = fits;
    slices[2].length = fits;
    slices[3] = behind;
    chunks[2].n_slices = 2;
    chunks[2].state = fits;
    chains[0].tokens = lengths[0] = before + fits;
    lengths[1] = behind.length;
    plan.n_sequences = 2;
    plan.n_slices = 4;
    CHECK(cf_slice_pairs(before, fits) > INT64_MAX - cf_slice_pairs(0, behind.length));
    REFUSED(cf_plan_validate(&plan, lengths, 2, NULL, &error), CF_ERROR_PLAN, "chunks.pairs");
    CHECK_INT(error.item, 2);
}

/* ---- models and memory ---- */

TEST(places_out_of_range) {
    CHECK_INT(cf_placement_stage(CF_PLACEMENT_V, 0, 0), -1);
    CHECK_INT(cf_placement_stage(CF_PLACEMENT_V, 2, -1), -1);
    CHECK_INT(cf_placement_stage(CF_PLACEMENT_V, 2, 3), 0);
    CHECK_INT(cf_placement_stage(CF_PLACEMENT_LOOP, 2, 3), 1);
    CHECK_INT(cf_placement_at(CF_PLACEMENT_LOOP, 2, 0, -1), -1);
    CHECK_INT(cf_placement_at(CF_PLACEMENT_LOOP, 2, 0, 2), -1);
    CHECK_INT(cf_placement_at(CF_PLACEMENT_LOOP, 2, -1, 0), -1);
    CHECK_INT(cf_placement_at(CF_PLACEMENT_LOOP, 2, INT64_MAX / 2, 0), -1);
    CHECK_INT(cf_placement_at(CF_PLACEMENT_LOOP, 2, INT64_MAX / 2 - 1, 1), INT64_MAX - 2);
    CHECK_INT(cf_placement_at(CF_PLACEMENT_V, 2, 1, 0), 3);
}

TEST(splits_and_outputs_of_models) {
    const cf_model *model = cf_model_find("qwen2.5-7b");
    const int64_t layers[] = {29, -1};
    cf_parallel split;
    cf_parameters counted;
    cf_shard shard;
    cf_memory_desc desc;
    cf_error error;
    REQUIRE(model != NULL && model->layers == 28);
    memset(&split, 0, sizeof split);
    memset(&desc, 0, sizeof desc);
    desc.model = model;
    CHECK_INT(cf_stage_shard(model, &split, 0, -1, &shard, &error), CF_OK);
    CHECK_INT(shard.layers, 28);
    REFUSED(cf_stage_shard(model, &split, 0, -1, NULL, &error), CF_ERROR_ARGUMENT, "out");
    REFUSED(cf_stage_parameters(model, &split, 0, NULL, &error), CF_ERROR_ARGUMENT, "out");
    REFUSED(cf_model_parameters(model, NULL, &error), CF_ERROR_ARGUMENT, "out");
    REFUSED(cf_memory_token_bytes(&desc, 0, NULL, &error), CF_ERROR_ARGUMENT, "out");
    split.placement = CF_PLACEMENT_COUNT;
    harness_poison(&counted, sizeof counted);
    REFUSED(cf_stage_parameters(model, &split, 0, &counted, &error), CF_ERROR_ARGUMENT, "parallel.placement");
    split.pp = 2;
    split.placement = CF_PLACEMENT_DEFAULT;
    split.layers = layers;
    REFUSED(cf_stage_parameters(model, &split, 0, &counted, &error), CF_ERROR_ARGUMENT, "parallel.layers");
    CHECK_INT(error.item, 0);
    CHECK_INT(error.got, 29);
    CHECK_POISON(&counted, sizeof counted);
}

/* Bytes per layer and token by the header: 4 f without a gate. Unfused operations add 8 h, and 2 f only if there is a
   gate whose activation is kept. */
TEST(unfused_operations_without_a_gate) {
    cf_model model = *cf_model_find("qwen2.5-7b");
    cf_memory_desc desc = {0};
    cf_token_bytes fused, unfused;
    desc.model = &model;
    desc.parallel.pp = 28; /* a middle stage of one layer */
    REQUIRE(cf_memory_token_bytes(&desc, 5, &fused, NULL) == CF_OK);
    desc.unfused = 1;
    REQUIRE(cf_memory_token_bytes(&desc, 5, &unfused, NULL) == CF_OK);
    CHECK_INT(unfused.activations - fused.activations, 8 * model.hidden + 2 * model.ffn);
    model.no_gate = 1;
    REQUIRE(cf_memory_token_bytes(&desc, 5, &unfused, NULL) == CF_OK);
    desc.unfused = 0;
    REQUIRE(cf_memory_token_bytes(&desc, 5, &fused, NULL) == CF_OK);
    CHECK_INT(unfused.activations - fused.activations, 8 * model.hidden);
}

/* A middle stage in bf16 sends and receives activations and gradients of 2 h / s bytes each. With sequence parallelism
   it also gathers whole rows and their gradient. */
TEST(buffers_of_tensor_parallelism) {
    cf_memory_desc desc = {0};
    cf_token_bytes bytes;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.parallel.pp = 28;
    REQUIRE(desc.model != NULL && desc.model->hidden == 3584);
    REQUIRE(cf_memory_token_bytes(&desc, 5, &bytes, NULL) == CF_OK);
    CHECK_INT(bytes.buffers, 4 * 2 * 3584);
    desc.parallel.tp = 4;
    REQUIRE(cf_memory_token_bytes(&desc, 5, &bytes, NULL) == CF_OK);
    CHECK_INT(bytes.buffers, 4 * 2 * 3584 / 4 + 2 * 2 * 3584);
    desc.parallel.no_sequence = 1;
    REQUIRE(cf_memory_token_bytes(&desc, 5, &bytes, NULL) == CF_OK);
    CHECK_INT(bytes.buffers, 4 * 2 * 3584);
}

TEST(sums_of_memory_that_do_not_fit) {
    const cf_layer windows = {.mixer = CF_MIXER_WINDOW, .window = CF_MAX_CHUNK_SIZE};
    cf_model model = *cf_model_find("qwen2.5-7b");
    cf_memory_desc desc = {0};
    cf_memory_load load = {0};
    cf_memory_report report;
    cf_token_bytes bytes;
    cf_error error;
    desc.model = &model;
    harness_poison(&report, sizeof report);
    harness_poison(&bytes, sizeof bytes);
    desc.runtime_bytes = INT64_MAX; /* alone it fits */
    REFUSED(cf_memory_estimate(&desc, &load, 1, &report, 1, &error), CF_ERROR_OVERFLOW, "loads");
    desc.runtime_bytes = 0;
    model.layers = CF_MAX_LAYERS;
    model.hidden = model.heads = model.kv_heads = CF_MAX_WIDTH;
    model.head_dim = 1;
    model.ffn = CF_MAX_FFN;
    REFUSED(cf_memory_estimate(&desc, &load, 1, &report, 1, &error), CF_ERROR_OVERFLOW, "loads");
    model.kinds = &windows; /* the bytes of a border with all these rows */
    model.n_kinds = 1;
    desc.chunk_size = CF_MAX_CHUNK_SIZE;
    desc.state_bytes = 1024;
    REFUSED(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_OVERFLOW, "model");
    CHECK_POISON(&report, sizeof report);
    CHECK_POISON(&bytes, sizeof bytes);
}

/* ---- costs, and plans whose chains are not sound ---- */

TEST(each_cost_is_named) {
    static const struct {
        size_t member;
        const char *field;
    } members[] = {{offsetof(cf_timing, all.forward.constant), "timing.forward.constant"},
                   {offsetof(cf_timing, all.replay.per_token), "timing.replay.per_token"},
                   {offsetof(cf_timing, all.backward.per_pair), "timing.backward.per_pair"},
                   {offsetof(cf_timing, all.input.constant), "timing.input.constant"},
                   {offsetof(cf_timing, all.weight.per_token), "timing.weight.per_token"},
                   {offsetof(cf_timing, latency), "timing.latency"},
                   {offsetof(cf_timing, seconds_per_token), "timing.seconds_per_token"},
                   {offsetof(cf_timing, stream_forward), "timing.stream_forward"},
                   {offsetof(cf_timing, stream_backward), "timing.stream_backward"},
                   {offsetof(cf_timing, stream_exposed), "timing.stream_exposed"}};
    const double bad[] = {-1, (double)NAN, (double)INFINITY};
    cf_plan *plan = plan_of_chains();
    cf_simulate_desc simulate = {0};
    cf_schedule_desc desc = {0};
    cf_schedule *made = paper_of(plan, 1), *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    int64_t i, j;
    for (i = 0; i < COUNT(members) * COUNT(bad); i++) {
        cf_timing timing = {0};
        desc.timing = simulate.timing = &timing;
        j = i / COUNT(bad);
        memcpy((char *)&timing + members[j].member, &bad[i % COUNT(bad)], sizeof(double));
        REFUSED(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_ARGUMENT, members[j].field);
        REFUSED(cf_simulate(plan, made, &simulate, &timeline, &error), CF_ERROR_ARGUMENT, members[j].field);
    }
    CHECK(schedule == NULL && timeline == NULL);
    cf_schedule_free(made);
    cf_plan_free(plan);
}

/* Calls everything that takes the plan and a schedule of it. */
static void refuse_everywhere(const cf_plan *plan, const cf_schedule *schedule, cf_result code, const char *field) {
    cf_timeline *timeline = NULL;
    cf_memory_load loads[64];
    cf_error error;
    size_t bytes;
    harness_note("%s", field);
    REFUSED(cf_schedule_validate(plan, schedule, NULL, NULL, &error), code, field);
    REFUSED(cf_simulate(plan, schedule, NULL, &timeline, &error), code, field);
    REFUSED(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), code, field);
    REFUSED(cf_steps_size(plan, schedule, 0, &bytes, &error), code, field);
    CHECK(timeline == NULL);
    harness_note("%s", "");
}

TEST(plans_that_do_not_hold_together) {
    cf_plan *plan = plan_of_chains();
    cf_schedule *schedule = paper_of(plan, 2);
    cf_chunk was;
#define DAMAGE(i, change, code, field)                            \
    do {                                                          \
        was = plan->chunks[i];                                    \
        plan->chunks[i].change;                                   \
        refuse_everywhere(plan, schedule, code, field);           \
        plan->chunks[i] = was;                                    \
    } while (0)
    CHECK_INT(plan->chunks[1].chain, 0);
    DAMAGE(1, n_slices = 0, CF_ERROR_PLAN, "chunks.n_slices");
    DAMAGE(1, first_slice = -1, CF_ERROR_PLAN, "chunks.first_slice");
    DAMAGE(1, first_slice = plan->n_slices, CF_ERROR_PLAN, "chunks.n_slices");
    DAMAGE(1, chain = 1, CF_ERROR_PLAN, "chunks.chain");
    DAMAGE(1, index = 2, CF_ERROR_PLAN, "chunks.index");
    DAMAGE(1, chain = (int32_t)plan->n_chains, CF_ERROR_PLAN, "chunks.chain");
    DAMAGE(1, tokens = -1, CF_ERROR_PLAN, "chunks.tokens");
    DAMAGE(1, down = -1, CF_ERROR_PLAN, "chunks.down");
    DAMAGE(1, below = 0, CF_ERROR_PLAN, "chunks.down");
    DAMAGE(1, up = -1, CF_ERROR_PLAN, "chunks.up");
    DAMAGE(1, cp = 2, CF_ERROR_PLAN, "chunks.cp");
    DAMAGE(1, state = 0, CF_ERROR_PLAN, "chunks.state");
    DAMAGE(1, state = plan->chunk_size + 1, CF_ERROR_PLAN, "chunks.state");
#undef DAMAGE
    plan->chains[0].tokens--; /* the last chunk has more tokens than the chain has left */
    refuse_everywhere(plan, schedule, CF_ERROR_PLAN, "chunks.tokens");
    plan->chains[0].tokens++;
    CHECK_INT(cf_schedule_validate(plan, schedule, NULL, NULL, NULL), CF_OK);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* Padded rows that are negative, or whose sum overflows. */
TEST(rows_that_cannot_be_added_up) {
    cf_plan *plan = plan_of_chains();
    cf_schedule *schedule = paper_of(plan, 2);
    cf_timeline *timeline = NULL;
    cf_error error;
    int64_t most;
    plan->chunks[1].rows = -1;
    REFUSED(cf_schedule_validate(plan, schedule, NULL, NULL, &error), CF_ERROR_PLAN, "chunks.rows");
    REFUSED(cf_simulate(plan, schedule, NULL, &timeline, &error), CF_ERROR_PLAN, "chunks.rows");
    plan->chunks[1].rows = INT64_MAX;   /* with its prefix */
    REFUSED(cf_schedule_validate(plan, schedule, NULL, NULL, &error), CF_ERROR_PLAN, "chunks.prefix");
    REFUSED(cf_simulate(plan, schedule, NULL, &timeline, &error), CF_ERROR_PLAN, "chunks.prefix");
    plan->chunks[1].rows = INT64_MAX / 2;
    REFUSED(cf_simulate(plan, schedule, NULL, &timeline, &error), CF_ERROR_PLAN, "chunks.tokens");
    CHECK(timeline == NULL);
    plan->chunks[1].rows = 3;
    for (most = INT64_MAX; most > INT64_MAX / 2; most -= most / 8) { /* for state: K and V, and both gradients */
        plan->chains[0].tokens = most;
        refuse_everywhere(plan, schedule, CF_ERROR_PLAN, "chunks.tokens");
        plan->chunks[0].state = most - 6; /* all of it on the first chunk */
        refuse_everywhere(plan, schedule, CF_ERROR_PLAN, "chunks.state");
        plan->chunks[0].state = 3;
    }
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* A schedule belongs to one rank, and is checked against this rank's chunks. */
TEST(rows_of_another_rank) {
    static const int64_t lengths[] = {9, 9};
    cf_pack_desc pack = {0};
    cf_schedule_desc desc = {0};
    cf_plan *plan = NULL;
    int64_t rank, i;
    pack.chunk_size = 3;
    pack.n_ranks = 2;
    REQUIRE(cf_pack(lengths, 2, &pack, &plan, NULL) == CF_OK);
    for (rank = 0; rank < 2; rank++) {
        cf_schedule *schedule = NULL;
        desc.kind = CF_SCHEDULE_PAPER;
        desc.shape.n_stages = 2;
        desc.shape.rank = rank;
        REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
        for (i = 0; i < plan->n_chunks; i++) {
            const int64_t was = plan->chunks[i].rows;
            plan->chunks[i].rows = -1;
            if (plan->chunks[i].rank == rank) refuse_everywhere(plan, schedule, CF_ERROR_PLAN, "chunks.rows");
            else CHECK_INT(cf_schedule_validate(plan, schedule, NULL, NULL, NULL), CF_OK);
            plan->chunks[i].rows = was;
        }
        cf_schedule_free(schedule);
    }
    cf_plan_free(plan);
}

/* ---- graphs ---- */

TEST(graphs_without_anything) {
    cf_plan *plan = plan_of_nothing();
    cf_schedule *schedule = paper_of(plan, 2);
    cf_schedule copy = *schedule;
    cf_graph *graph = NULL;
    CHECK_INT(schedule->n_actions, 0);
    copy.actions = NULL;
    REQUIRE(cf_graph_make(plan, &copy, NULL, NULL, &graph, NULL) == CF_OK);
    CHECK_INT(graph->n_nodes, 0);
    CHECK_INT(cf_schedule_validate(plan, &copy, NULL, NULL, NULL), CF_OK);
    cf_graph_free(graph);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* ---- schedules ---- */

/* No member alone may be negative, and the bytes of all tokens may not exceed 64 bits. */
TEST(bytes_that_cannot_be_added_up) {
    static const cf_held_bytes many[] = {{INT64_MAX, 1, 0, 0}, {INT64_MAX, 0, 1, 0}, {INT64_MAX, 0, 0, 1},
                                         {INT64_MAX, 0, 0, 0}, {INT64_MAX / 30, 0, 0, 0}};
    cf_plan *plan = plan_of_chains();
    cf_schedule *made = paper_of(plan, 2), *schedule = NULL;
    cf_schedule_desc desc = {0};
    cf_simulate_desc simulate = {0};
    cf_timeline *timeline = NULL;
    cf_error error;
    int64_t i;
    desc.shape.n_stages = 2;
    for (i = 0; i < COUNT(many); i++) {
        cf_result wanted = i < COUNT(many) - 1 ? CF_ERROR_OVERFLOW : CF_OK; /* 16 tokens 30 times are too many */
        desc.limits.per_token = simulate.limits.per_token = many[i];
        CHECK_INT(cf_simulate(plan, made, &simulate, &timeline, &error), wanted);
        if (wanted != CF_OK) CHECK_STR(error.field, "limits.per_token");
        cf_timeline_free(timeline);
        timeline = NULL;
        if (wanted != CF_OK)
            REFUSED(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_OVERFLOW, "limits.per_token");
    }
    desc.kind = CF_SCHEDULE_INTERLEAVED;
    desc.shape.n_virtual = 2;
    REFUSED(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_OVERFLOW,
            "limits.per_token"); /* twice as many */
    memset(&desc.limits.per_token, 0, sizeof desc.limits.per_token);
    plan->chunks[0].rows = INT64_MAX - 100;   /* and so would the rows themselves */
    REFUSED(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_OVERFLOW, "limits.per_token");
    CHECK(schedule == NULL);
    cf_schedule_free(made);
    cf_plan_free(plan);
}

/* gpipe keeps all 16 tokens, unless bytes are limited: for all stages alike, for each, or both. */
TEST(limits_on_bytes_bind_in_either_form) {
    const int64_t each[] = {6, 6};
    const cf_held_bytes one_a_token = {1, 0, 0, 0};
    cf_plan *plan = plan_of_chains();
    int form;
    for (form = 0; form < 4; form++) {
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        desc.kind = CF_SCHEDULE_GPIPE;
        desc.shape.n_stages = 2;
        desc.shape.k = 3;
        desc.limits.per_token = one_a_token;
        if (form & 1) desc.limits.bytes = 6;
        if (form & 2) desc.limits.bytes_by_stage = each;
        harness_note("form %d", form);
        REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
        CHECK(naive_fault(plan, schedule) == NULL);
        CHECK_INT(naive_peak_bytes(plan, schedule, 1, &one_a_token) <= 6, form > 0);
        cf_schedule_free(schedule);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

/* A byte limit needs the bytes per token. Without them it used to lift all other limits and bind nothing. */
TEST(bytes_need_what_they_count) {
    const int64_t each[] = {0, 6}, none[] = {CF_NO_LIMIT, 0};
    cf_plan *plan = plan_of_chains();
    cf_schedule_desc desc = {0};
    cf_validate_desc asked = {0};
    cf_simulate_desc simulate = {0};
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    size_t bytes;
    desc.shape.n_stages = 2;
    REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
    asked.limits.bytes = simulate.limits.bytes = desc.limits.bytes = 1;
    REFUSED(cf_schedule_size(plan, &desc, &bytes, &error), CF_ERROR_ARGUMENT, "limits.per_token");
    REFUSED(cf_schedule_validate(plan, schedule, &asked, NULL, &error), CF_ERROR_ARGUMENT, "limits.per_token");
    REFUSED(cf_simulate(plan, schedule, &simulate, &timeline, &error), CF_ERROR_ARGUMENT, "limits.per_token");
    desc.limits.bytes = 0;
    desc.limits.bytes_by_stage = each;
    REFUSED(cf_schedule_size(plan, &desc, &bytes, &error), CF_ERROR_ARGUMENT, "limits.per_token");
    desc.limits.bytes_by_stage = none; /* no limit counts nothing */
    CHECK_INT(cf_schedule_size(plan, &desc, &bytes, NULL), CF_OK);
    schedule->limits.bytes = 1;
    REFUSED(cf_schedule_validate(plan, schedule, NULL, NULL, &error), CF_ERROR_SCHEDULE, "limits.per_token");
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* A number past all choices is answered with one that this kind has, if only some kinds have it. */
TEST(what_is_wanted_would_do) {
    const struct {
        cf_schedule_kind kind;
        cf_shape shape;
        const char *field;
        int64_t wanted;
    } cases[] = {{CF_SCHEDULE_1F1B, {.n_virtual = CF_MAX_STAGES + 1}, "shape.n_virtual", 1},
                 {CF_SCHEDULE_PAPER, {.placement = (cf_placement)99}, "shape.placement", CF_PLACEMENT_LOOP},
                 {CF_SCHEDULE_ZERO_BUBBLE, {.placement = (cf_placement)99}, "shape.placement", CF_PLACEMENT_LOOP},
                 {CF_SCHEDULE_ZERO_BUBBLE, {.n_virtual = 2, .placement = (cf_placement)99}, "shape.placement",
                  CF_PLACEMENT_V},
                 {CF_SCHEDULE_GPIPE, {.forward_only = 5}, "shape.forward_only", 0},
                 {CF_SCHEDULE_BEST, {.forward_only = 5}, "shape.forward_only", 1}};
    const int64_t length = 9, primes[] = {2147483647, 2147483629};
    cf_plan *plan = plan_of_chains();
    cf_pack_desc pack = {0};
    cf_error error;
    size_t bytes;
    int64_t i, chunk_size, align;
    for (i = 0; i < COUNT(cases); i++) {
        cf_schedule_desc desc = {0};
        desc.kind = cases[i].kind;
        desc.shape = cases[i].shape;
        REFUSED(cf_schedule_size(plan, &desc, &bytes, &error), CF_ERROR_ARGUMENT, cases[i].field);
        CHECK_INT(error.wanted, cases[i].wanted);
    }
    for (chunk_size = 1; chunk_size <= 60; chunk_size++)
        for (align = 1; align <= 70; align++) {
            int64_t nearest = align < chunk_size ? align : chunk_size;
            while (chunk_size % nearest != 0) nearest--;
            pack.chunk_size = chunk_size;
            pack.align = align;
            if (cf_pack_size(&length, 1, &pack, &bytes, &error) == CF_OK) CHECK_INT(nearest, align);
            else CHECK(strcmp(error.field, "align") == 0 && error.wanted == nearest && error.got == align);
        }
    for (i = 0; i < COUNT(primes); i++) { /* found without trying every divisor */
        pack.chunk_size = primes[i];
        pack.align = primes[i] - 1;
        REFUSED(cf_pack_size(&length, 1, &pack, &bytes, &error), CF_ERROR_ARGUMENT, "align");
        CHECK_INT(error.wanted, 1);
    }
    cf_plan_free(plan);
}

/* Adapters of experts need adapters at all. */
TEST(adapters_of_experts_need_a_rank) {
    cf_memory_desc desc = {0};
    cf_token_bytes bytes;
    cf_error error;
    desc.model = cf_model_find("qwen3-30b-a3b");
    desc.lora_experts = 1;
    REFUSED(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT, "lora_rank");
    desc.lora_rank = error.wanted;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_OK);
}

/* The first chain's 9 tokens of state must be held at the same time, and nothing else is counted. */
TEST(the_state_of_the_first_chain_needs_its_bytes) {
    cf_plan *plan = plan_of_chains();
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    cf_error error;
    desc.kind = CF_SCHEDULE_1F1B;
    desc.limits.per_token.state = 1;
    desc.limits.bytes = 8;
    REFUSED(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_INFEASIBLE, "limits.bytes");
    CHECK_INT(error.wanted, 9);
    desc.limits.bytes = 9;
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), CF_OK);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

TEST(placements_are_for_some_kinds) {
    static const struct {
        cf_schedule_kind kind;
        int placement, allowed;
    } cases[] = {{CF_SCHEDULE_1F1B, CF_PLACEMENT_V, 0},          {CF_SCHEDULE_INTERLEAVED, CF_PLACEMENT_V, 0},
                 {CF_SCHEDULE_ZERO_BUBBLE, CF_PLACEMENT_V, 1},   {CF_SCHEDULE_ZERO_BUBBLE, CF_PLACEMENT_COUNT, 0},
                 {CF_SCHEDULE_BEST, CF_PLACEMENT_V, 1},        {CF_SCHEDULE_BEST, CF_PLACEMENT_COUNT, 0},
                 {CF_SCHEDULE_BEST, -1, 0},                      {CF_SCHEDULE_PAPER, CF_PLACEMENT_LOOP, 1}};
    cf_plan *plan = plan_of_chains();
    int64_t i;
    for (i = 0; i < COUNT(cases); i++) {
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        cf_error error;
        size_t bytes;
        desc.kind = cases[i].kind;
        desc.shape.n_stages = 2;
        desc.shape.n_virtual = desc.kind >= CF_SCHEDULE_INTERLEAVED ? 2 : 1;
        desc.shape.placement = (cf_placement)cases[i].placement;
        desc.max_tries = 3;
        harness_note("case %d", (int)i);
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), cases[i].allowed ? CF_OK : CF_ERROR_ARGUMENT);
        if (!cases[i].allowed) CHECK_STR(error.field, "shape.placement");
        if (!cases[i].allowed) CHECK_STR(oracle_error_fault(&error), NULL);
        desc.shape.placement = CF_PLACEMENT_DEFAULT; /* and rows: the kinds from interleaved on have them */
        desc.shape.n_virtual = 3;
        if (desc.kind < CF_SCHEDULE_INTERLEAVED) {
            REFUSED(cf_schedule_size(plan, &desc, &bytes, &error), CF_ERROR_ARGUMENT, "shape.n_virtual");
            CHECK_INT(error.got, 3);
        }
        cf_schedule_free(schedule);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

/* ---- the validator ---- */

/* Held bytes exceed 64 bits, by each of the four terms: that is above any limit. */
TEST(bytes_past_64_bits_are_past_the_limit) {
    static const cf_held_bytes many[] = {{INT64_MAX, 0, 0, 0},         {0, INT64_MAX, 0, 0},
                                         {0, 0, INT64_MAX, 0},         {0, 0, 0, INT64_MAX},
                                         {INT64_MAX / 3, 1000, 0, 0},  {INT64_MAX / 3, 0, 1000, 0},
                                         {INT64_MAX / 3, 0, 0, INT64_MAX / 9}};
    const cf_held_bytes few = {1, 1, 1, 1};
    cf_plan *plan = plan_of_chains();
    cf_schedule_desc order = {0};
    cf_schedule *schedule = NULL;
    cf_validate_desc desc = {0};
    cf_error error;
    int64_t i;
    order.kind = CF_SCHEDULE_PAPER; /* local replay, which saves inputs */
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    desc.limits.bytes = INT64_MAX - 1;
    for (i = 0; i < COUNT(many); i++) {
        harness_note("case %d", (int)i);
        desc.limits.per_token = many[i];
        REFUSED(cf_schedule_validate(plan, schedule, &desc, NULL, &error), CF_ERROR_SCHEDULE, "limits.bytes");
        CHECK_INT(error.wanted, INT64_MAX - 1);
        CHECK_INT(error.got, INT64_MAX);
    }
    harness_note("%s", "");
    desc.limits.per_token = few;
    CHECK_INT(cf_schedule_validate(plan, schedule, &desc, NULL, &error), CF_OK);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

TEST(a_schedules_own_limits_bind) {
    cf_plan *plan = plan_of_chains();
    cf_schedule *schedule = paper_of(plan, 2);
    int64_t limits[2];
    cf_validate_desc desc = {0};
    cf_schedule copy = *schedule;
    cf_error error;
    copy.limits.chunks_by_stage = limits;
    limits[0] = naive_peak_chunks(plan, schedule, 0);
    limits[1] = 0;
    CHECK_INT(cf_schedule_validate(plan, &copy, NULL, NULL, &error), CF_OK);
    REQUIRE(limits[0] > 1);
    limits[0]--;
    REFUSED(cf_schedule_validate(plan, &copy, NULL, NULL, &error), CF_ERROR_SCHEDULE, "limits.chunks");
    CHECK_INT(error.wanted, limits[0]);
    REFUSED(cf_schedule_validate(plan, &copy, &desc, NULL, &error), CF_ERROR_SCHEDULE, "limits.chunks");
    desc.limits.chunks = CF_NO_LIMIT;
    CHECK_INT(cf_schedule_validate(plan, &copy, &desc, NULL, &error), CF_OK);
    desc.limits.chunks = limits[0];
    REFUSED(cf_schedule_validate(plan, &copy, &desc, NULL, &error), CF_ERROR_SCHEDULE, "limits.chunks");
    limits[1] = -2;
    REFUSED(cf_schedule_validate(plan, &copy, NULL, NULL, &error), CF_ERROR_SCHEDULE, "limits.chunks_by_stage");
    CHECK_INT(error.item, 1);
    CHECK_INT(error.got, -2);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* ---- transfers that meet nobody ---- */

/* Chunks that stage 1 keeps after all, so that no R uses what it receives. */
TEST(what_is_received_and_not_read) {
    cf_plan *plan = plan_of_chains();
    cf_schedule *schedule = paper_of(plan, 2), *lowered = NULL, *copy;
    cf_timeline *timeline = NULL;
    cf_error error;
    int64_t i;
    REQUIRE(cf_schedule_lower(plan, schedule, NULL, &lowered, NULL) == CF_OK);
    copy = naive_copy(lowered);
    copy->shape.k = 3;
    for (i = copy->first[1]; i < copy->n_actions; i++) copy->actions[i].keep |= copy->actions[i].pass == CF_F;
    for (i = copy->first[1]; i < copy->n_actions; i++)
        if (copy->actions[i].pass == CF_R) copy = naive_remove(copy, 1, i-- - copy->first[1]);
    REQUIRE(naive_fault(plan, copy) != NULL);
    REFUSED(cf_schedule_validate(plan, copy, NULL, NULL, &error), CF_ERROR_SCHEDULE, "actions");
    CHECK_INT(error.item, -1);
    CHECK(strstr(error.text, "R of chunk") != NULL && strstr(error.text, "is missing") != NULL);
    REFUSED(cf_simulate(plan, copy, NULL, &timeline, &error), CF_ERROR_SCHEDULE, "actions");
    CHECK(strstr(error.text, "R of chunk") != NULL && strstr(error.text, "is missing") != NULL);
    CHECK(timeline == NULL);
    naive_free(copy);
    cf_schedule_free(lowered);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* A list that ends before another stage's transfers have found their counterparts. */
TEST(a_list_that_ends_too_early) {
    cf_plan *plan = plan_of_chains();
    cf_schedule *schedule = paper_of(plan, 2), *lowered = NULL, *copy;
    int64_t left;
    REQUIRE(cf_schedule_lower(plan, schedule, NULL, &lowered, NULL) == CF_OK);
    for (left = 0; left < lowered->first[2] - lowered->first[1]; left++) {
        cf_timeline *timeline = NULL;
        cf_error error;
        harness_note("%d left", (int)left);
        copy = naive_copy(lowered);
        copy->n_actions = copy->first[2] = copy->first[1] + left;
        CHECK_INT(cf_schedule_validate(plan, copy, NULL, NULL, &error), CF_ERROR_SCHEDULE);
        CHECK_INT(cf_simulate(plan, copy, NULL, &timeline, &error), CF_ERROR_SCHEDULE);
        CHECK(naive_rendezvous(plan, (const cf_schedule *const *)&copy, 1) != NULL);
        CHECK(timeline == NULL);
        naive_free(copy);
    }
    harness_note("%s", "");
    cf_schedule_free(lowered);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* ---- loads ---- */

/* A hand-made plan of one rank whose chunks, late in their sequence, have more scores than can be counted. */
TEST(scores_that_do_not_fit) {
    cf_plan *plan = plan_of_chains();
    cf_schedule_desc order = {0};
    cf_schedule *schedule = NULL;
    cf_memory_load loads[64];
    cf_error error;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.k = 3;
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    harness_poison(loads, sizeof loads);
    plan->chunks[1].prefix = INT64_MAX;
    REFUSED(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), CF_ERROR_PLAN, "chunks.prefix");
    plan->chunks[1].prefix = INT64_MAX / 2;
    REFUSED(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), CF_ERROR_OVERFLOW, "loads.live_scores");
    plan->chunks[1].prefix = INT64_MAX / 4;
    REFUSED(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), CF_ERROR_OVERFLOW, "loads.live_scores");
    plan->chunks[0].prefix = plan->chunks[1].prefix = plan->chunks[2].prefix = INT64_MAX / 13; /* each fits */
    REFUSED(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), CF_ERROR_OVERFLOW, "loads");
    CHECK_POISON(loads, sizeof loads);
    plan->chunks[0].prefix = plan->chunks[1].prefix = plan->chunks[2].prefix = 3;
    CHECK_INT(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), CF_OK);
    CHECK_INT(loads[0].live_scores, 3 * 6);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* A second backward gives back what the first has already given back. */
TEST(loads_of_what_is_given_back_twice) {
    cf_plan *plan = plan_of_chains(), *nothing = plan_of_nothing();
    cf_schedule *schedule = paper_of(plan, 1), *empty = paper_of(nothing, 1);
    cf_memory_load loads[64];
    cf_error error;
    int64_t i = schedule->n_actions - 1;
    harness_poison(loads, sizeof loads);
    while (schedule->actions[i].pass != CF_F && schedule->actions[i].pass != CF_R) i--;
    schedule->actions[i].keep = 0;
    schedule->actions[i].pass = CF_B; /* for the chunk whose backward comes next */
    REFUSED(cf_schedule_loads(plan, schedule, 0, loads, COUNT(loads), &error), CF_ERROR_SCHEDULE, "actions");
    CHECK_POISON(loads, sizeof loads);
    CHECK_INT(cf_schedule_loads(nothing, empty, 0, NULL, 0, &error), CF_OK);
    cf_schedule_free(empty);
    cf_schedule_free(schedule);
    cf_plan_free(nothing);
    cf_plan_free(plan);
}

/* ---- writers ---- */

/* Counts the calls, and stops at one of them. */
typedef struct stopper {
    int64_t calls, stop_at, bytes;
} stopper;

static int stop_writing(const char *text, size_t bytes, void *user) {
    stopper *s = (stopper *)user;
    (void)text;
    s->bytes += (int64_t)bytes;
    return ++s->calls == s->stop_at ? 9 : 0;
}

/* Counts of many stages and rows of many tokens, which take more than one piece. No call follows the one that
   failed. */
TEST(long_arrays_stop_where_they_are_told_to) {
    const int64_t lengths[] = {3000};
    const cf_write_desc with_rows = {1, NULL};
    cf_plan *plan = NULL;
    cf_schedule *schedule;
    cf_timeline *timeline = NULL;
    stopper s = {0, 0, 0};
    int64_t i, n;
    REQUIRE((plan = naive_pack(lengths, 1, 3000)) != NULL);
    schedule = paper_of(plan, 3000);
    REQUIRE(cf_simulate(plan, schedule, NULL, &timeline, NULL) == CF_OK);
    CHECK_INT(cf_write_plan_json(plan, &with_rows, stop_writing, &s, NULL), CF_OK);
    n = s.calls;
    CHECK(n > 5);
    for (i = 1; i <= n; i++) {
        s.calls = 0;
        s.stop_at = i;
        CHECK_INT(cf_write_plan_json(plan, &with_rows, stop_writing, &s, NULL), CF_ERROR_WRITE);
        CHECK_INT(s.calls, i);
    }
    s.calls = s.stop_at = 0;
    CHECK_INT(cf_write_schedule_json(schedule, timeline, stop_writing, &s, NULL), CF_OK);
    for (i = 1; i <= 20; i++) {
        s.calls = 0;
        s.stop_at = i;
        CHECK_INT(cf_write_schedule_json(schedule, timeline, stop_writing, &s, NULL), CF_ERROR_WRITE);
        CHECK_INT(s.calls, i);
    }
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

TEST(writers_of_what_does_not_go_together) {
    harness_heap heap = {0};
    cf_allocator half = {harness_alloc, NULL, NULL};
    cf_write_desc desc = {0, NULL};
    cf_plan *plan = plan_of_chains();
    cf_schedule *one = paper_of(plan, 1), *two = paper_of(plan, 2);
    cf_timeline *timeline = NULL, copy;
    stopper s = {0, 0, 0};
    int64_t plain;
    cf_error error;
    half.user = &heap;
    REQUIRE(cf_simulate(plan, two, NULL, &timeline, NULL) == CF_OK);
    REFUSED(cf_write_schedule_json(one, timeline, stop_writing, &s, &error), CF_ERROR_ARGUMENT, "timeline");
    copy = *timeline;
    copy.n_stages = 1;
    REFUSED(cf_write_schedule_json(two, &copy, stop_writing, &s, &error), CF_ERROR_ARGUMENT, "timeline");
    desc.metadata = 1;
    desc.allocator = &half;
    REFUSED(cf_write_plan_json(plan, &desc, stop_writing, &s, &error), CF_ERROR_ARGUMENT, "allocator.release");
    desc.allocator = NULL;
    plan->chunks[2].prefix = INT32_MAX;
    REFUSED(cf_write_plan_json(plan, &desc, stop_writing, &s, &error), CF_ERROR_LIMIT, "cu_seqlens_k");
    CHECK_INT(s.calls, 0);
    CHECK_INT(cf_write_plan_json(plan, NULL, stop_writing, &s, &error), CF_OK);
    plain = s.bytes;
    desc.metadata = 0;
    CHECK_INT(cf_write_plan_json(plan, &desc, stop_writing, &s, &error), CF_OK);
    CHECK_INT(s.bytes, 2 * plain);
    cf_timeline_free(timeline);
    cf_schedule_free(two);
    cf_schedule_free(one);
    cf_plan_free(plan);
}

SUITE(refusals, CASE(every_item_has_its_name), CASE(a_batch_of_too_many_slices), CASE(a_batch_of_too_many_chunks), CASE(a_prompt_of_too_many_slices),
      CASE(best_fit_among_rooms_that_lie_close), CASE(a_room_too_small_is_passed_by),
      CASE(ranks_of_many_sequences_are_even), CASE(a_chain_without_chunks), CASE(a_sequence_left_out_needs_no_record),
      CASE(pairs_that_do_not_fit), CASE(places_out_of_range),
      CASE(splits_and_outputs_of_models), CASE(unfused_operations_without_a_gate), CASE(buffers_of_tensor_parallelism),
      CASE(sums_of_memory_that_do_not_fit), CASE(each_cost_is_named), CASE(plans_that_do_not_hold_together),
      CASE(rows_that_cannot_be_added_up), CASE(rows_of_another_rank), CASE(graphs_without_anything),
      CASE(bytes_that_cannot_be_added_up),
      CASE(limits_on_bytes_bind_in_either_form), CASE(bytes_need_what_they_count), CASE(what_is_wanted_would_do),
      CASE(adapters_of_experts_need_a_rank), CASE(the_state_of_the_first_chain_needs_its_bytes),
      CASE(placements_are_for_some_kinds), CASE(bytes_past_64_bits_are_past_the_limit),
      CASE(a_schedules_own_limits_bind), CASE(what_is_received_and_not_read), CASE(a_list_that_ends_too_early),
      CASE(scores_that_do_not_fit), CASE(loads_of_what_is_given_back_twice),
      CASE(long_arrays_stop_where_they_are_told_to), CASE(writers_of_what_does_not_go_together));
