/* Tests >>schedule: the order of passes on one stage, against a second version of Algorithm 2 and against its rules. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/oracle.h"

#include <stdlib.h>
#include <string.h>

static cf_plan *plan_of(const int64_t *lengths, int64_t n, int64_t chunk_size, int64_t n_ranks) {
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    desc.chunk_size = chunk_size;
    desc.n_ranks = n_ranks;
    CHECK_INT(cf_pack(lengths, n, &desc, &plan, NULL), CF_OK);
    return plan;
}

static cf_schedule_desc with_k(int64_t k) {
    cf_schedule_desc desc = {0};
    desc.kind = CF_SCHEDULE_PAPER;
    desc.shape.replay = CF_REPLAY_PIPELINE;
    desc.shape.k = k;
    return desc;
}

static cf_schedule *schedule_of(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = NULL;
    cf_error error;
    if (cf_schedule_make(plan, desc, &schedule, &error) != CF_OK) FAIL("cf_schedule_make: %s", error.text);
    return schedule;
}

/* Returns text such as "F0 F1+ B1 R0+ B0"; + if the activations are kept. */
static const char *schedule_text(const cf_schedule *schedule) {
    static char text[4000];
    size_t at = 0;
    int64_t i;
    text[0] = 0;
    for (i = 0; i < schedule->n_actions && at + 40 < sizeof text; i++) {
        const cf_action *a = &schedule->actions[i];
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%s%d%s", i ? " " : "", cf_pass_name((cf_pass)a->pass),
                               (int)a->chunk, a->keep ? "+" : "");
    }
    return text;
}

static void check_text(const int64_t *lengths, int64_t n, int64_t chunk_size, int64_t k, const char *wanted) {
    cf_plan *plan = plan_of(lengths, n, chunk_size, 1);
    cf_schedule_desc desc = with_k(k);
    cf_schedule *schedule = plan ? schedule_of(plan, &desc) : NULL;
    if (schedule) CHECK_STR(schedule_text(schedule), wanted);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* ---- known answers ---- */

TEST(paper_example_of_four_sequences) {
    /* at ChunkSize 2: chunks 0 and 1 are the long sequence, 2 and 3 are standalone */
    const int64_t lengths[] = {1, 1, 2, 4};
    check_text(lengths, 4, 2, 1, "F0 F1+ B1 R0+ B0 F2+ B2 F3+ B3");
    check_text(lengths, 4, 2, 2, "F0+ F1+ B1 B0 F2+ B2 F3+ B3");
}

/* ---- random plans ---- */

/* Algorithm 2 from its description: run all forwards, then go back from the last chunk to the first. A chunk that is
   not among the last K has lost its activations, so its forward runs again before its backward. */
static int64_t naive_unit(int64_t first, int64_t n, int64_t k, cf_action *actions) {
    int64_t i, count = 0;
    for (i = 0; i < 2 * n; i++) {
        int forward = i < n;
        int64_t chunk = first + (forward ? i : 2 * n - 1 - i);
        int among_last_k = first + n - chunk <= k;
        cf_action action = {0};
        action.chunk = (int32_t)chunk;
        action.pass = (uint8_t)(forward ? CF_F : CF_R);
        action.keep = (uint8_t)(!forward || among_last_k);
        if (forward || !among_last_k) actions[count++] = action;
        if (forward) continue;
        action.pass = CF_B;
        action.keep = 0;
        actions[count++] = action;
    }
    return count;
}

static int64_t naive_schedule(const cf_plan *plan, int64_t rank, int64_t k, cf_action *actions) {
    int64_t c, count = 0;
    for (c = 0; c < plan->n_chunks; c++) {
        const cf_chunk *chunk = &plan->chunks[c];
        if (chunk->rank != rank || (chunk->chain >= 0 && chunk->index > 0)) continue;
        count += naive_unit(c, chunk->chain >= 0 ? plan->chains[chunk->chain].n_chunks : 1, k, actions + count);
    }
    return count;
}

/* Checks the rules of a schedule action by action, independently of how it was made. */
static void check_rules(const cf_plan *plan, const cf_schedule *schedule, int64_t k) {
    /* for each chain: chunks that hold activations, and forwards and backwards that have run */
    int64_t *kept = (int64_t *)calloc((size_t)plan->n_chains + 1, sizeof *kept);
    int64_t *forwards = (int64_t *)calloc((size_t)plan->n_chains + 1, sizeof *forwards);
    int64_t *backwards = (int64_t *)calloc((size_t)plan->n_chains + 1, sizeof *backwards);
    char *done = (char *)calloc((size_t)plan->n_chunks + 1, 4); /* F, R, B ran; activations held */
    int64_t i, n_done = 0;
    REQUIRE(kept && forwards && backwards && done);
    for (i = 0; i < schedule->n_actions; i++) {
        const cf_action *a = &schedule->actions[i];
        const cf_chunk *chunk;
        char *state;
        REQUIRE(a->chunk >= 0 && a->chunk < plan->n_chunks);
        chunk = &plan->chunks[a->chunk];
        state = done + 4 * a->chunk;
        CHECK_INT(chunk->rank, schedule->shape.rank);
        CHECK(a->stage == 0 && a->reserved == 0 && a->keep <= 1);
        switch (a->pass) {
            case CF_F:
                CHECK(!state[0] && !state[1] && !state[2]);
                if (chunk->chain >= 0) CHECK_INT(chunk->index, forwards[chunk->chain]++); /* ascending */
                state[0] = 1;
                state[3] = (char)a->keep;
                break;
            case CF_R:
                CHECK(state[0] && !state[1] && !state[2] && !state[3] && a->keep); /* after F, before B, once */
                state[1] = 1;
                state[3] = 1;
                break;
            case CF_B:
                CHECK(state[0] && !state[2] && state[3]);
                if (chunk->chain >= 0) /* descending, and only after all forwards of the chain */
                    CHECK(chunk->index == plan->chains[chunk->chain].n_chunks - 1 - backwards[chunk->chain]++ &&
                          forwards[chunk->chain] == plan->chains[chunk->chain].n_chunks);
                state[2] = 1;
                state[3] = 0;
                n_done++;
                break;
            default: FAIL("pass %d", (int)a->pass);
        }
        if (chunk->chain >= 0) {
            kept[chunk->chain] += a->keep;
            kept[chunk->chain] -= a->pass == CF_B;
            CHECK(kept[chunk->chain] >= 0 && kept[chunk->chain] <= k);
        }
    }
    CHECK_INT(n_done, plan->chunks_per_rank); /* each chunk of the rank, once */
    free(kept);
    free(forwards);
    free(backwards);
    free(done);
}

/* Passes take arbitrary seconds, whose sums differ by rounding. */
TEST(random_plans_follow_algorithm_2) {
    static oracle_batch batch;
    static cf_action actions[20000];
    const cf_timing timing = {.all = {.forward.constant = 0.1, .backward.constant = 0.2}};
    int i;
    for (i = 0; i < 3000; i++) {
        uint64_t seed = 40000000 + (uint64_t)i;
        harness_rng rng = {seed};
        cf_plan *plan = NULL;
        int64_t rank, k = harness_chance(&rng, 0.1) ? INT64_MAX : harness_between(&rng, 1, 6);
        oracle_draw(&rng, &batch, 20);
        oracle_note(seed, &batch);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        for (rank = 0; rank < plan->n_ranks; rank++) {
            cf_schedule_desc desc = with_k(k);
            cf_schedule *schedule;
            int64_t count = naive_schedule(plan, rank, k, actions);
            desc.shape.rank = rank;
            if (i % 2 == 1) desc.timing = &timing;
            schedule = schedule_of(plan, &desc);
            REQUIRE(schedule != NULL);
            CHECK(schedule->kind == CF_SCHEDULE_PAPER && schedule->shape.replay == CF_REPLAY_PIPELINE);
            CHECK(schedule->shape.n_stages == 1 && schedule->shape.n_virtual == 1 && schedule->shape.k == k &&
                  schedule->shape.rank == rank);
            CHECK_INT(schedule->n_chunks, plan->n_chunks);
            CHECK_INT(schedule->first[0], 0);
            CHECK_INT(schedule->first[1], schedule->n_actions);
            if (CHECK_INT(schedule->n_actions, count) && count > 0)
                CHECK(memcmp(schedule->actions, actions, (size_t)count * sizeof *actions) == 0);
            check_rules(plan, schedule, k);
            cf_schedule_free(schedule);
        }
        cf_plan_free(plan);
    }
}

static void check_refused(const cf_plan *plan, const cf_schedule_desc *desc, cf_result code, const char *field,
                          int64_t got) {
    cf_schedule *schedule;
    size_t bytes;
    cf_error error;
    unsigned char *memory = (unsigned char *)harness_guard_new(4096);
    harness_poison(&schedule, sizeof schedule);
    harness_poison(&bytes, sizeof bytes);
    harness_note("%s = %lld", field, (long long)got);
    CHECK_INT(cf_schedule_make(plan, desc, &schedule, &error), code);
    CHECK_INT(error.code, code);
    CHECK_STR(error.field, field);
    CHECK_INT(error.got, got);
    CHECK_INT(error.item, -1);
    CHECK(strstr(error.text, field) != NULL);
    CHECK_INT(cf_schedule_size(plan, desc, &bytes, &error), code);
    CHECK_STR(error.field, field);
    CHECK_INT(cf_schedule_into(plan, desc, memory, 4096, &schedule, &error), code);
    CHECK_STR(error.field, field);
    CHECK_INT(cf_schedule_make(plan, desc, &schedule, NULL), code);
    CHECK_INT(cf_schedule_size(plan, desc, &bytes, NULL), code);
    CHECK_INT(cf_schedule_into(plan, desc, memory, 4096, &schedule, NULL), code);
    CHECK_POISON(&schedule, sizeof schedule);
    CHECK_POISON(&bytes, sizeof bytes);
    CHECK_POISON(memory, 4096);
    harness_guard_free(memory);
}

TEST(schedule_refuses_bad_arguments) {
    const int64_t lengths[] = {40, 3, 3, 17};
    cf_plan *plan = plan_of(lengths, 4, 8, 2);
    cf_schedule *schedule;
    cf_schedule_desc desc;
    cf_error error;
    size_t need;
    unsigned char *memory;
    REQUIRE(plan != NULL);
    desc = with_k(-1);
    check_refused(plan, &desc, CF_ERROR_ARGUMENT, "shape.k", -1);
    desc = with_k(1);
    desc.shape.replay = (cf_replay)-1;
    check_refused(plan, &desc, CF_ERROR_ARGUMENT, "shape.replay", (int)desc.shape.replay);
    desc = with_k(1);
    check_refused(NULL, &desc, CF_ERROR_ARGUMENT, "plan", 0);
    check_refused(plan, NULL, CF_ERROR_ARGUMENT, "desc", 0);
    harness_note("%s", "");
    CHECK_INT(cf_schedule_make(plan, &desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    CHECK_INT(cf_schedule_size(plan, &desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "bytes");
    REQUIRE(cf_schedule_size(plan, &desc, &need, &error) == CF_OK);
    memory = (unsigned char *)harness_guard_new(need + 16);
    CHECK_INT(cf_schedule_into(plan, &desc, memory, need, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    harness_poison(&schedule, sizeof schedule);
    CHECK_INT(cf_schedule_into(plan, &desc, NULL, need, &schedule, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "memory");
    CHECK_POISON(&schedule, sizeof schedule);
    CHECK_POISON(memory, need + 16);
    harness_guard_free(memory);
    cf_plan_free(plan);
}

TEST(schedule_defaults_are_filled_in) {
    cf_schedule_desc desc, full;
    memset(&desc, 0, sizeof desc);
    full = cf_schedule_defaults(&desc);
    CHECK(full.kind == CF_SCHEDULE_BEST && full.shape.replay == CF_REPLAY_LOCAL && full.shape.n_stages == 1 &&
          full.shape.n_virtual == 1 && full.shape.k == 1);
    CHECK(full.shape.rank == 0 && full.allocator == NULL);
    desc.kind = CF_SCHEDULE_INTERLEAVED;
    CHECK_INT(cf_schedule_defaults(&desc).shape.n_virtual, 2);
    desc.kind = CF_SCHEDULE_PAPER;
    desc.shape.replay = CF_REPLAY_PIPELINE;
    desc.shape.n_stages = 1;
    desc.shape.k = 7;
    desc.shape.rank = 3;
    full = cf_schedule_defaults(&desc);
    CHECK(full.kind == CF_SCHEDULE_PAPER && full.shape.replay == CF_REPLAY_PIPELINE && full.shape.k == 7 &&
          full.shape.rank == 3);
}

SUITE(schedule, CASE(paper_example_of_four_sequences), CASE(random_plans_follow_algorithm_2),
      CASE(schedule_refuses_bad_arguments),
      CASE(schedule_defaults_are_filled_in));
