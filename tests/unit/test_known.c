/* Tests schedules known from publications: `best` and the fixed kinds reach their makespans, and no bound exceeds
   them. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"
#include "../reference/suite.h"

#include <string.h>

/* Makes a schedule, checks it against the rules and with the validator, and times it without the library's simulator.
   The library's bound may not exceed the time. */
static double makespan_of(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_simulate_desc simulate = {0};
    cf_error error = {0};
    const char *fault;
    double makespan = -1;
    simulate.timing = desc->timing;
    if (cf_schedule_make(plan, desc, &schedule, &error) != CF_OK ||
        cf_schedule_validate(plan, schedule, NULL, NULL, &error) != CF_OK ||
        cf_simulate(plan, schedule, &simulate, &timeline, &error) != CF_OK) {
        FAIL("%s", error.text);
    } else {
        fault = pipeline_fault(plan, schedule, desc);
        if (fault) FAIL("broken rule: %s", fault);
        makespan = pipeline_makespan(plan, schedule, desc->timing, NULL, NULL);
        CHECK(timeline->bound <= makespan * (1 + 1e-9));
    }
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    return makespan;
}

/* Draws `n` lengths like those of a chat service, from one of the suite's batches, and replaces the first with 256K. */
static void draw_chat(int batch, int64_t giant, int64_t *lengths) {
    static suite_batch suite;
    suite_draw(batch, &suite);
    CHECK_STR(suite_class_name(suite.class_id), "lmsys");
    memcpy(lengths, suite.lengths, sizeof suite.lengths);
    if (giant > 0) lengths[0] = giant;
}

/* Seconds of a 7B model on one of so many stages. */
static cf_timing costs_of_7b(int64_t n_stages) {
    cf_timing timing = {0};
    timing.all.forward.constant = 1e-3;
    timing.all.forward.per_token = 1.12e-4 / (double)n_stages;
    timing.all.forward.per_pair = 3.9e-9 / (double)n_stages;
    return timing;
}

/* A description with only the stages set, against 1F1B on unsplit sequences. With one long sequence among short ones,
   1F1B waits for the long one on every stage in turn. */
TEST(defaults_beat_unsplit_sequences) {
    int64_t lengths[SUITE_MOST_SEQUENCES];
    cf_timing timing = costs_of_7b(4);
    double least = 1e300;
    int batch;
    for (batch = 0; batch < 6; batch++) {
        cf_schedule_desc ours, theirs;
        cf_plan *chunks, *whole;
        double ratio;
        draw_chat(batch, 262144, lengths);
        chunks = naive_pack(lengths, SUITE_MOST_SEQUENCES, 8192);
        whole = naive_pack_alone(lengths, SUITE_MOST_SEQUENCES, 303000);
        memset(&ours, 0, sizeof ours);
        ours.shape.n_stages = 4;
        ours.timing = &timing;
        theirs = ours;
        theirs.kind = CF_SCHEDULE_1F1B;
        harness_note("batch %d", batch);
        ratio = makespan_of(whole, &theirs) / makespan_of(chunks, &ours);
        CHECK(ratio > 2);
        least = ratio < least ? ratio : least;
        cf_plan_free(chunks);
        cf_plan_free(whole);
    }
    harness_report("at least %.2f x as fast", least);
}

/* K is a cap, not a quota: with room for four chunks on a stage, a larger K makes a schedule hardly longer. Allowing
   split backwards makes none longer. */
TEST(more_k_is_hardly_longer) {
    int64_t lengths[SUITE_MOST_SEQUENCES], k;
    int i;
    for (i = 0; i < 4; i++) {
        cf_schedule_desc desc;
        double before = 1e300, makespan;
        cf_plan *plan;
        draw_chat(i, i % 2 ? 65536 : 32768, lengths);
        plan = naive_pack(lengths, 96, 2048);
        memset(&desc, 0, sizeof desc);
        desc.shape.n_stages = 8;
        desc.limits.chunks = 4;
        desc.max_tries = 12;
        for (k = 1; k <= 8; k *= 2) {
            desc.shape.k = k;
            harness_note("batch %d, K %d", i, (int)k);
            makespan = makespan_of(plan, &desc);
            CHECK(makespan <= before * 1.01);
            before = makespan;
        }
        desc.split_backward = 1;
        CHECK(makespan_of(plan, &desc) <= before * (1 + 1e-12));
        cf_plan_free(plan);
    }
}

/* Four chunks of one token on three stages with room for one. Replays of standalone chunks allow 18. Replaying every
   chunk except on the last stage takes 19, and no bound may exceed that. */
TEST(standalone_chunks_are_dropped) {
    const int64_t lengths[] = {1, 1, 1, 1};
    cf_plan *plan = naive_pack(lengths, 4, 1);
    cf_schedule_desc desc = {0};
    cf_search_report report;
    desc.shape.n_stages = 3;
    desc.limits.chunks = 1;
    desc.report = &report;
    CHECK_INT(makespan_of(plan, &desc), 18);
    CHECK(report.bound <= 18);
    cf_plan_free(plan);
}

/* Each stage keeps some inputs of many such chunks, but not all. pipeline_fault counts them. */
TEST(inputs_of_many_chunks) {
    int64_t lengths[64], limit, i;
    cf_plan *plan;
    for (i = 0; i < 64; i++) lengths[i] = 1;
    plan = naive_pack(lengths, 64, 1);
    for (limit = 1; limit <= 2; limit++) {
        cf_schedule_desc desc = {0};
        desc.shape.n_stages = 4;
        desc.limits.chunks = limit;
        desc.max_tries = 40;
        CHECK(makespan_of(plan, &desc) <= (limit == 1 ? 261 : 239)); /* as measured */
    }
    cf_plan_free(plan);
}

/* Lengths of a chat service in some 138 chunks, on eight stages with room for four. Without dropping standalone chunks,
   schedules stay a quarter above the possible. `best` is within a tenth of a bound that holds for any choice of dropped
   chunks. */
TEST(a_chat_service_in_138_chunks) {
    int64_t lengths[SUITE_MOST_SEQUENCES];
    cf_plan *plan;
    cf_schedule_desc desc;
    cf_search_report report;
    double makespan;
    draw_chat(2, 0, lengths);
    plan = naive_pack(lengths, SUITE_MOST_SEQUENCES, 790);
    memset(&desc, 0, sizeof desc);
    desc.shape.n_stages = 8;
    desc.limits.chunks = 4;
    desc.report = &report;
    makespan = makespan_of(plan, &desc);
    CHECK(makespan <= 1.1 * report.bound);
    harness_report("%d chunks: %.0f, bound %.0f", (int)plan->n_chunks, makespan, report.bound);
    cf_plan_free(plan);
}

/* Seq1F1B (Sun et al., 2024) runs equal splits, keeping n_stages - 1 + splits chunks on the first stage, with no idle
   time except at fill and drain of the pipeline. So do `paper` and `best`. */
TEST(equal_splits_of_seq1f1b) {
    static const struct {
        int64_t n_stages, sequences, splits, makespan;
    } cases[] = {{4, 4, 4, 57}, {8, 8, 4, 117}, {4, 16, 4, 201}, {8, 16, 8, 405}};
    int64_t lengths[16], i, s;
    for (i = 0; i < 4; i++) {
        int64_t limits[8];
        cf_schedule_desc desc;
        cf_plan *plan;
        for (s = 0; s < cases[i].sequences; s++) lengths[s] = cases[i].splits;
        for (s = 0; s < cases[i].n_stages; s++) limits[s] = cases[i].n_stages - 1 - s + cases[i].splits;
        plan = naive_pack(lengths, cases[i].sequences, 1);
        memset(&desc, 0, sizeof desc);
        desc.shape.n_stages = cases[i].n_stages;
        desc.shape.k = cases[i].splits;
        desc.limits.chunks_by_stage = limits;
        harness_note("%d stages, %d x %d", (int)desc.shape.n_stages, (int)cases[i].sequences, (int)cases[i].splits);
        CHECK_INT(makespan_of(plan, &desc), cases[i].makespan);
        desc.kind = CF_SCHEDULE_PAPER;
        CHECK_INT(makespan_of(plan, &desc), cases[i].makespan);
        cf_plan_free(plan);
    }
}

/* 16 equal chunks in two rows of half a stage each: 48 of work, and (n_stages - 1) x 1.5 of fill and drain. */
TEST(interleaved_in_the_order_of_megatron) {
    cf_schedule_desc desc = {0};
    cf_timing timing;
    cf_plan *plan = pipeline_sixteen(&timing);
    desc.kind = CF_SCHEDULE_INTERLEAVED;
    desc.shape.n_stages = 8;
    desc.shape.n_virtual = 2;
    desc.timing = &timing;
    CHECK(makespan_of(plan, &desc) == 58.5);
    cf_plan_free(plan);
}

/* The same chunks with split backwards, in a loop, as a crude search finds them. search.a_v_under_tight_limits has the
   V. */
TEST(loops_under_tight_limits) {
    static const struct {
        int64_t n_stages, limit; /* in halves of a chunk */
        double most;
    } cases[] = {{4, 4, 67.5}, {8, 8, 66.5}, {8, 6, 80.5}};
    cf_timing timing;
    cf_plan *plan = pipeline_sixteen(&timing);
    int i;
    for (i = 0; i < 3; i++) {
        cf_schedule_desc desc = {0};
        desc.shape.n_stages = cases[i].n_stages;
        desc.limits.chunks = cases[i].limit;
        desc.shape.n_virtual = 2;
        desc.split_backward = 1;
        desc.timing = &timing;
        desc.max_tries = 200;
        harness_note("%d stages, limit %d", (int)desc.shape.n_stages, (int)desc.limits.chunks);
        CHECK(makespan_of(plan, &desc) <= cases[i].most);
    }
    cf_plan_free(plan);
}

/* Small batches on virtual stages, and the makespans of 64 candidates. The first uses replays that wait for the W of
   their own chain's chunk K behind them. Waiting for the chunk K before them instead gives 174 and reads in front of an
   array. The second uses the rhythm of whole backwards, which take twice as long as forwards; the rhythm of split ones
   gives 95. */
TEST(virtual_stages_in_rhythm) {
    static const struct {
        int64_t lengths[5], n, chunk_size, n_stages, k;
        int split;
        double most;
    } cases[] = {{{4, 10, 1, 4, 2}, 5, 2, 4, 1, 1, 167}, {{1, 4, 4, 2}, 4, 2, 3, 1, 0, 92}};
    int i;
    for (i = 0; i < 2; i++) {
        cf_plan *plan = naive_pack(cases[i].lengths, cases[i].n, cases[i].chunk_size);
        cf_schedule_desc desc = {0};
        desc.shape.n_stages = cases[i].n_stages;
        desc.shape.n_virtual = 2;
        desc.shape.k = cases[i].k;
        desc.split_backward = cases[i].split;
        desc.max_tries = 64;
        harness_note("case %d", i);
        CHECK(makespan_of(plan, &desc) <= cases[i].most);
        cf_plan_free(plan);
    }
}

/* Equal chunks in a V of two rows, where F, I and W take 1, 1.21 and 0.645 and a transfer 0.024. The makespans are
   those of ZB-V (Qi et al., 2024), of V-Half with less room, and of 1F1B-V with whole backwards. Orders that suit equal
   passes also suit these. The last two are ZB-H1's on one row, where passes take 1 and a transfer 0.2. */
TEST(a_v_of_unequal_passes) {
    static const struct {
        int64_t n_stages, n, limit;
        double published;
        int split;
    } cases[] = {{4, 8, 8, 49.670, 1},    {6, 12, 12, 75.170, 1}, {8, 16, 16, 101.226, 1}, {6, 12, 8, 85.923, 1},
                 {8, 16, 10, 117.021, 1}, {4, 8, 6, 61.593, 0},   {6, 12, 10, 90.805, 0},  {8, 16, 12, 126.186, 0},
                 {4, 4, 4, 16.200, 1},    {16, 16, 16, 69.000, 1}};
    const int64_t lengths[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    cf_timing timing = {0};
    int i;
    timing.all.forward.per_token = 1;
    timing.all.backward.per_token = 1.855;
    timing.all.input.per_token = 1.21;
    timing.all.weight.per_token = 0.645;
    timing.latency = 0.024;
    for (i = 0; i < 10; i++) {
        cf_schedule_desc desc = {0};
        cf_plan *plan = naive_pack(lengths, cases[i].n, 1);
        if (i == 8) timing.all.input.per_token = timing.all.weight.per_token = 1;
        if (i == 8) timing.latency = 0.2;
        desc.shape.n_stages = cases[i].n_stages;
        desc.shape.n_virtual = i < 8 ? 2 : 1;
        desc.shape.placement = i < 8 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
        desc.limits.chunks = cases[i].limit;
        desc.split_backward = cases[i].split;
        desc.timing = &timing;
        desc.max_tries = 60;
        harness_note("%d stages, limit %d", (int)desc.shape.n_stages, (int)desc.limits.chunks);
        CHECK(makespan_of(plan, &desc) <= 1.045 * cases[i].published);
        cf_plan_free(plan);
    }
}

/* The largest possible K replays nothing, like K equal to the longest chain. */
TEST(the_largest_k) {
    const int64_t lengths[] = {100, 900, 300, 200};
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    cf_plan *plan = naive_pack(lengths, 4, 100);
    int i;
    for (i = 0; i < 3; i++) {
        cf_schedule_desc desc = {0};
        double makespan;
        desc.kind = kinds[i];
        desc.shape.n_stages = 4;
        desc.limits.chunks = CF_NO_LIMIT;
        desc.shape.k = 9;
        makespan = makespan_of(plan, &desc);
        desc.shape.k = INT64_MAX;
        harness_note("%s", cf_schedule_kind_name(kinds[i]));
        CHECK(makespan_of(plan, &desc) == makespan);
    }
    cf_plan_free(plan);
}

SUITE(known, CASE(defaults_beat_unsplit_sequences), CASE(more_k_is_hardly_longer), CASE(standalone_chunks_are_dropped),
      CASE(inputs_of_many_chunks), CASE(a_chat_service_in_138_chunks), CASE(equal_splits_of_seq1f1b),
      CASE(interleaved_in_the_order_of_megatron), CASE(loops_under_tight_limits), CASE(virtual_stages_in_rhythm),
      CASE(a_v_of_unequal_passes), CASE(the_largest_k));
