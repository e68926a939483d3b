/* Tests >>simulate: times against a relaxation over explicit edges, memory counts against the steps, bounds against the
   exact solver. */

#include "chunkflow.h"
#include "../reference/exact.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static cf_simulate_desc simulation_of(const cf_schedule_desc *desc) {
    cf_simulate_desc simulate = {0};
    simulate.timing = desc->timing;
    simulate.limits.per_token = desc->limits.per_token;
    simulate.limits.chunks = desc->limits.chunks;
    simulate.limits.chunks_by_stage = desc->limits.chunks_by_stage;
    return simulate;
}

/* Packs the paper's example: lengths 1, 1, 2, 4 in chunks of 2. */
static cf_plan *example(void) {
    const int64_t lengths[] = {1, 1, 2, 4};
    cf_plan *plan = naive_pack(lengths, 4, 2);
    return plan;
}

static cf_schedule *schedule_of(const cf_plan *plan, cf_schedule_kind kind, int64_t n_stages, int64_t k) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    desc.kind = kind;
    if (kind == CF_SCHEDULE_PAPER) desc.shape.replay = CF_REPLAY_PIPELINE;
    desc.shape.n_stages = n_stages;
    desc.shape.k = k;
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    return schedule;
}

/* ---- known answers ---- */

/* 100, 37 and 61 tokens at multiples of 64 are 128 + 64 + 64 rows of one chunk, and 19 tokens are 64 rows of another. A
   forward over r rows takes 10 + 2 r and 1 / 16 for each pair, a backward twice as long. */
TEST(padded_rows_take_time) {
    const int64_t lengths[] = {100, 37, 61, 19};
    const double pairs = 5050 + 703 + 1891, large = 10 + 2 * 256 + pairs / 16, small = 10 + 2 * 64 + 190.0 / 16;
    cf_pack_desc pack = {0};
    cf_timing timing = {0};
    cf_simulate_desc simulate = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule;
    cf_timeline *timeline = NULL;
    int64_t i;
    pack.chunk_size = 256;
    pack.align = 64;
    timing.all.forward.constant = 10;
    timing.all.forward.per_token = 2;
    timing.all.forward.per_pair = 1.0 / 16;
    simulate.timing = &timing;
    CHECK_INT(cf_pack(lengths, 4, &pack, &plan, NULL), CF_OK);
    REQUIRE(plan != NULL);
    CHECK_INT(plan->n_chunks, 2);
    CHECK_INT(plan->chunks[0].rows, 256);
    CHECK_INT(plan->chunks[1].rows, 64);
    schedule = schedule_of(plan, CF_SCHEDULE_GPIPE, 1, 1);
    REQUIRE(schedule != NULL);
    CHECK_INT(cf_simulate(plan, schedule, &simulate, &timeline, NULL), CF_OK);
    REQUIRE(timeline != NULL);
    for (i = 0; i < schedule->n_actions; i++) {
        double wanted = (schedule->actions[i].chunk == 0 ? large : small) * (schedule->actions[i].pass == CF_B ? 2 : 1);
        CHECK(timeline->end[i] - timeline->start[i] == wanted);
    }
    CHECK(timeline->makespan == 3 * (large + small));
    CHECK(timeline->bound == timeline->makespan);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

TEST(the_paper_example_by_numbers) {
    cf_plan *plan = example();
    cf_schedule *schedule = schedule_of(plan, CF_SCHEDULE_PAPER, 4, 1);
    cf_timeline *timeline = NULL;
    int64_t i;
    REQUIRE(schedule != NULL);
    CHECK_INT(cf_simulate(plan, schedule, NULL, &timeline, NULL), CF_OK);
    REQUIRE(timeline != NULL);
    CHECK_INT(timeline->n_actions, schedule->n_actions);
    CHECK_INT(timeline->n_stages, 4);
    CHECK_INT(timeline->makespan, 50);
    CHECK_INT(timeline->busy, 4 * 26); /* F 8, R 2, B 16 on each stage */
    CHECK_INT(timeline->replayed, 4 * 2);
    CHECK(fabs(timeline->bubble_useful - 0.52) < 1e-12);
    CHECK(fabs(timeline->bubble_busy - 0.48) < 1e-12);
    CHECK_INT(timeline->n_bounds, 2);
    CHECK_STR(timeline->bounds[0].name, "critical-path");
    CHECK_INT(timeline->bounds[0].value, 50); /* F1 F2 B2 R1 B1 */
    CHECK_STR(timeline->bounds[1].name, "stage-load");
    CHECK_INT(timeline->bounds[1].value, 50);
    CHECK_INT(timeline->bound, 50);
    for (i = 0; i < 4; i++) CHECK(timeline->peak_live[i] >= 1 && timeline->peak_live[i] <= 4);
    CHECK_INT(timeline->peak_bytes[0], 0);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* Two chunks on two stages, worked out by hand. F = 3, B = 6, transfers of 2. */
TEST(transfers_by_hand) {
    const int64_t lengths[] = {3, 3};
    const struct {
        double latency, per_token;
        double makespan;
    } cases[] = {
        /* stage 1: F 3-6, B 6-12, F 12-15, B 15-21; stage 0: last B 21-27 */
        {0, 0, 27},
        /* stage 1: F 5-8, B 8-14, F 14-17, B 17-23; stage 0: last B 25-31 */
        {2, 0, 31},
        {0.5, 0.5, 31},
    };
    cf_plan *plan = NULL;
    cf_schedule *schedule;
    size_t i;
    plan = naive_pack(lengths, 2, 3);
    schedule = schedule_of(plan, CF_SCHEDULE_1F1B, 2, 1);
    REQUIRE(schedule != NULL);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cf_simulate_desc desc = {0};
        cf_timing timing = {0};
        cf_timeline *timeline = NULL;
        harness_note("case %d", (int)i);
        timing.latency = cases[i].latency;
        timing.seconds_per_token = cases[i].per_token;
        desc.timing = &timing;
        CHECK_INT(cf_simulate(plan, schedule, &desc, &timeline, NULL), CF_OK);
        REQUIRE(timeline != NULL);
        CHECK_INT(timeline->makespan, cases[i].makespan);
        cf_timeline_free(timeline);
    }
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* One sequence of four chunks of 4 tokens, K = 1, one stage: F F F F B, then R B three times. F and R take 4, B takes
   8. A token of the prefix streams for 0.5 in F and 2 in B, a quarter of it exposed. Prefixes are 0, 4, 8 and 12.

     prefix   F: stream  exposed  pass      B: stream  exposed  pass
     4              2     0.5    4.5              8      2      2 + 8 = 10
     8              4     1      5               16      4      4 + 12 = 16
     12             6     1.5    1.5 + 4.5 = 6   24      6      6 + 18 = 24 */
TEST(streams_by_hand) {
    const int64_t length = 16;
    cf_simulate_desc desc = {0};
    cf_timing timing = {0};
    cf_plan *plan = NULL;
    cf_timeline *timeline = NULL;
    cf_schedule *schedule;
    plan = naive_pack(&length, 1, 4);
    schedule = schedule_of(plan, CF_SCHEDULE_PAPER, 1, 1);
    REQUIRE(schedule != NULL);
    timing.stream_forward = 0.5;
    timing.stream_backward = 2;
    timing.stream_exposed = 0.25;
    desc.timing = &timing;
    CHECK_INT(cf_simulate(plan, schedule, &desc, &timeline, NULL), CF_OK);
    REQUIRE(timeline != NULL);
    CHECK(fabs(timeline->makespan - (4 + 4.5 + 5 + 6 + 24 + 5 + 16 + 4.5 + 10 + 4 + 8)) < 1e-12);
    CHECK(fabs(timeline->busy - timeline->makespan) < 1e-12);
    CHECK_INT(timeline->stream_waits, 8);
    CHECK(fabs(timeline->stream_seconds - (timeline->makespan - 7 * 4 - 4 * 8)) < 1e-12);
    CHECK(timeline->bound <= timeline->makespan * (1 + 1e-12));
    cf_timeline_free(timeline);
    timing.stream_forward = timing.stream_backward = timing.stream_exposed = 0;
    timeline = NULL;
    CHECK_INT(cf_simulate(plan, schedule, &desc, &timeline, NULL), CF_OK);
    REQUIRE(timeline != NULL);
    CHECK_INT(timeline->makespan, 7 * 4 + 4 * 8);
    CHECK_INT(timeline->stream_waits, 0);
    CHECK(!(timeline->stream_seconds > 0));
    cf_timeline_free(timeline);
    timing.stream_exposed = 1.5;
    timeline = NULL;
    CHECK_INT(cf_simulate(plan, schedule, &desc, &timeline, NULL), CF_ERROR_ARGUMENT);
    CHECK(timeline == NULL);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* ---- against the exact solver ---- */

/* No bound exceeds the optimum, with and without split backwards and limits. */
TEST(bounds_hold_against_the_exact_optimum) {
    uint64_t seed;
    int64_t solved = 0, tight = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(400, 60); seed++) {
        harness_rng rng = {seed};
        int64_t lengths[4], n = harness_between(&rng, 1, 3), i;
        cf_pack_desc pack = {0};
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        cf_timeline *timeline = NULL;
        cf_simulate_desc simulate;
        cf_plan *plan = NULL;
        exact_answer exact;
        pack.chunk_size = 3;
        pack.max_slices = 1;
        for (i = 0; i < n; i++) lengths[i] = harness_between(&rng, 1, 7);
        CHECK_INT(cf_pack(lengths, n, &pack, &plan, NULL), CF_OK);
        REQUIRE(plan != NULL);
        desc.shape.n_stages = harness_between(&rng, 1, 3);
        desc.shape.k = harness_between(&rng, 1, 2);
        desc.limits.chunks = harness_chance(&rng, 0.5) ? harness_between(&rng, 1, 3) : 0;
        desc.kind = harness_chance(&rng, 0.3) ? CF_SCHEDULE_ZERO_BUBBLE : CF_SCHEDULE_PAPER;
        if (harness_chance(&rng, 0.5) && desc.kind == CF_SCHEDULE_PAPER) desc.shape.replay = CF_REPLAY_PIPELINE;
        desc.split_backward = desc.kind == CF_SCHEDULE_ZERO_BUBBLE;
        harness_note("seed %d: %d chunks, %d stages, K %d, limit %d", (int)seed, (int)plan->n_chunks,
                     (int)desc.shape.n_stages, (int)desc.shape.k, (int)desc.limits.chunks);
        simulate = simulation_of(&desc);
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
        CHECK_INT(cf_simulate(plan, schedule, &simulate, &timeline, NULL), CF_OK);
        REQUIRE(timeline != NULL);
        exact = exact_makespan(plan, &desc, timeline->makespan, 20000);
        if (exact.makespan >= 0) {
            CHECK(timeline->bound <= exact.makespan * (1 + 1e-12));
            CHECK(exact.makespan <= timeline->makespan);
            tight += timeline->bound >= exact.makespan * (1 - 1e-12);
            solved++;
        }
        cf_timeline_free(timeline);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    CHECK(solved > harness_rounds(200, 30));
    CHECK(2 * tight > solved);
    harness_report("%d solved, the bound is the optimum in %d", (int)solved, (int)tight);
}

/* ---- what is refused ---- */

/* ---- memory ---- */

/* ---- the written form ---- */

static int64_t count(const char *where, const char *what) {
    int64_t n = 0;
    for (; (where = strstr(where, what)) != NULL; where += strlen(what)) n++;
    return n;
}

TEST(json_carries_the_timeline) {
    const char *wanted[] = {"\"makespan\": 50", "\"bubble_useful\": 0.52", "\"bubble_busy\": 0.4", "\"busy\": 104",
                            "\"replayed\": 8", "\"critical-path\": 50", "\"stage-load\": 50",
                            "\"peak_live\": [", "\"peak_tokens\": [", "\"peak_state_tokens\": [4, 4, 4, 4]",
                            "\"peak_bytes\": [0, 0, 0, 0]", "\"pass\": \"R\""};
    cf_plan *plan = example();
    cf_schedule *schedule = schedule_of(plan, CF_SCHEDULE_PAPER, 4, 1),
                *other = schedule_of(plan, CF_SCHEDULE_PAPER, 2, 1);
    cf_timeline *timeline = NULL;
    harness_text with = {NULL, 0, 0, 0, 0, 0}, without = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    size_t i;
    REQUIRE(schedule != NULL && other != NULL);
    CHECK_INT(cf_simulate(plan, schedule, NULL, &timeline, NULL), CF_OK);
    CHECK_INT(cf_write_schedule_json(schedule, timeline, harness_collect, &with, NULL), CF_OK);
    CHECK_INT(cf_write_schedule_json(schedule, NULL, harness_collect, &without, NULL), CF_OK);
    REQUIRE(with.at != NULL && without.at != NULL);
    for (i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        harness_note("%s", wanted[i]);
        CHECK(strstr(with.at, wanted[i]) != NULL);
    }
    CHECK_INT(count(with.at, "\"start\": "), schedule->n_actions);
    CHECK_INT(count(with.at, "\"end\": "), schedule->n_actions);
    CHECK_INT(count(without.at, "\"pass\": "), schedule->n_actions);
    CHECK_INT(count(without.at, "\"start\""), 0);
    CHECK_INT(count(without.at, "makespan"), 0);
    CHECK_INT(count(with.at, "{"), count(with.at, "}"));
    for (i = 0; i < 5; i++) { /* limits of the schedule, if any, and the cost of streams */
        static const int64_t by_stage[] = {9, 0, CF_NO_LIMIT, 7};
        static const char *const limits[] = {",\n  \"limits\": [3, 3, 3, 3]", ",\n  \"state_limits\": [50, 50, 50, 50]",
                                             ",\n  \"byte_limits\": [1000, 1000, 1000, 1000]",
                                             ",\n  \"byte_limits\": [9, 1000, 0, 7]",
                                             ",\n  \"byte_limits\": [9, 0, 0, 7]"};
        static const char cost[] =
            ",\n  \"token_bytes\": {\"activations\": 11, \"state\": 12, \"state_gradient\": 13, \"boundary\": 14}";
        cf_schedule limited = *schedule;
        cf_timeline streamed = *timeline;
        const cf_held_bytes per_token = {11, 12, 13, 14};
        size_t k;
        harness_text text = {NULL, 0, 0, 0, 0, 0};
        if (i == 0) limited.limits.chunks = 3;
        if (i == 1) limited.limits.state = 50;
        if (i == 2 || i == 3) limited.limits.bytes = 1000;
        if (i >= 3) limited.limits.bytes_by_stage = by_stage;
        limited.limits.per_token = per_token;
        streamed.stream_waits = (int64_t)i;
        streamed.stream_seconds = 0.125;
        CHECK_INT(cf_write_schedule_json(&limited, &streamed, harness_collect, &text, NULL), CF_OK);
        for (k = 0; k < 5; k++) CHECK_INT(count(text.at, limits[k]), k == i);
        CHECK_INT(count(text.at, cost), i >= 2);
        CHECK_INT(count(text.at, ", \"stream_waits\": "), i > 0);
        CHECK_INT(count(text.at, ", \"stream_seconds\": 0.125,\n"), i > 0);
        free(text.at);
    }
    CHECK_INT(cf_write_schedule_json(other, timeline, harness_collect, &with, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "timeline");
    free(with.at);
    free(without.at);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_schedule_free(other);
    cf_plan_free(plan);
}

/* Measured times of one pass, and of none, for which there are no times. */
TEST(measured_times_of_few_passes) {
    const int64_t length = 7;
    const double start = 5, end = 7.5;
    int64_t n;
    for (n = 0; n < 2; n++) {
        cf_pack_desc pack = {0};
        cf_schedule_desc order = {0};
        cf_simulate_desc desc = {0};
        cf_timeline *timeline = NULL;
        cf_schedule *schedule = NULL;
        cf_plan *plan = NULL;
        pack.chunk_size = 10;
        order.shape.forward_only = 1;
        desc.start = &start;
        if (n > 0) desc.end = &end;
        REQUIRE(cf_pack(&length, n, &pack, &plan, NULL) == CF_OK);
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK && schedule->n_actions == n);
        REQUIRE(cf_simulate(plan, schedule, &desc, &timeline, NULL) == CF_OK);
        CHECK(timeline->makespan == (n > 0 ? 2.5 : 0) && timeline->busy == timeline->makespan);
        cf_timeline_free(timeline);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

/* The same four chunks, with 10, 26, 42 and 58 pairs; F takes a sixteenth for a pair. With outputs an R takes the 4 of
   its rows, whatever its prefix, and waits for no stream. If its own cost is given, it takes that. */
TEST(replays_with_outputs_by_hand) {
    const int64_t length = 16;
    cf_schedule_desc order = {.kind = CF_SCHEDULE_PAPER};
    cf_simulate_desc desc = {0};
    cf_timing timing = {0};
    cf_plan *plan = naive_pack(&length, 1, 4);
    cf_schedule *schedule = schedule_of(plan, CF_SCHEDULE_PAPER, 1, 1);
    cf_error error;
    int given;
    REQUIRE(schedule != NULL);
    schedule->shape.replay = CF_REPLAY_LOCAL;
    schedule->shape.outputs = 1;
    timing.all.forward.per_token = timing.stream_exposed = 1;
    timing.all.forward.per_pair = 0.0625;
    timing.stream_forward = 0.5;
    desc.timing = &timing;
    for (given = 0; given < 2; given++) {
        cf_timeline *timeline = NULL;
        if (given) timing.all.replay.per_token = timing.all.replay.per_pair = 0.5;
        CHECK_INT(cf_simulate(plan, schedule, &desc, &timeline, NULL), CF_OK);
        REQUIRE(timeline != NULL);
        CHECK(fabs(timeline->replayed - (given ? 3 * 2 + 0.5 * (10 + 26 + 42) : 3 * 4)) < 1e-12);
        CHECK_INT(timeline->stream_waits, 3); /* the three forwards with a prefix */
        CHECK(fabs(timeline->stream_seconds - 0.5 * (4 + 8 + 12)) < 1e-12);
        cf_timeline_free(timeline);
    }
    schedule->shape.outputs = 2;
    CHECK_INT(cf_simulate(plan, schedule, &desc, NULL, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "shape.outputs");
    schedule->shape.outputs = 1;
    schedule->shape.replay = CF_REPLAY_PIPELINE;
    CHECK_INT(cf_simulate(plan, schedule, &desc, NULL, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "shape.outputs");
    order.shape = schedule->shape;
    CHECK_INT(cf_schedule_make(plan, &order, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.text, "shape.outputs: are for local replay");
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* Chunks of 4, 4, 4 and 2 rows. A kept one has 1 byte a row and a dropped one 10. Without outputs the last F is the
   peak, with the 12 dropped rows. With outputs the peak is the third chunk's replay, which still holds them all. */
TEST(outputs_stay_until_a_replay_ends) {
    const int64_t length = 14;
    cf_plan *plan = naive_pack(&length, 1, 4);
    int outputs;
    for (outputs = 0; outputs < 2; outputs++) {
        cf_simulate_desc desc = {.limits = {.per_token = {.activations = 1, .boundary = 10}}};
        cf_schedule_desc order = {.limits = {.bytes = 122 + 2 * outputs, .per_token = desc.limits.per_token}};
        cf_schedule *schedule = NULL;
        cf_timeline *timeline = NULL;
        cf_steps *steps = NULL;
        cf_error error;
        order.shape.outputs = outputs;
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        REQUIRE(cf_simulate(plan, schedule, &desc, &timeline, NULL) == CF_OK);
        REQUIRE(cf_steps_make(plan, schedule, 0, 1, NULL, &steps, NULL) == CF_OK);
        CHECK_INT(timeline->peak_bytes[0], order.limits.bytes);
        CHECK_INT(steps->peak_dropped_tokens, 12);
        order.limits.bytes--;
        CHECK_INT(cf_schedule_make(plan, &order, &schedule, &error), CF_ERROR_INFEASIBLE);
        CHECK_INT(error.wanted, order.limits.bytes + 1);
        cf_steps_free(steps);
        cf_timeline_free(timeline);
        cf_schedule_free(schedule);
    }
    cf_plan_free(plan);
}

SUITE(simulate, CASE(padded_rows_take_time), CASE(measured_times_of_few_passes), CASE(the_paper_example_by_numbers),
      CASE(transfers_by_hand),
      CASE(streams_by_hand), CASE(replays_with_outputs_by_hand), CASE(outputs_stay_until_a_replay_ends), CASE(bounds_hold_against_the_exact_optimum),
      CASE(json_carries_the_timeline));
