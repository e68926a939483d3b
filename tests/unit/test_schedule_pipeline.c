/* Tests >>schedule for several stages: the fixed kinds. pipeline.c judges the lists, and published numbers the
   makespans. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"

#include <stdlib.h>
#include <string.h>

static cf_plan *pack(const int64_t *lengths, int64_t n, int64_t chunk_size, int64_t max_slices, cf_pack_method method) {
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error = {0};
    desc.chunk_size = chunk_size;
    desc.max_slices = max_slices;
    desc.method = method;
    if (cf_pack(lengths, n, &desc, &plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
    return plan;
}

static cf_schedule_desc describe(cf_schedule_kind kind, int64_t n_stages, int64_t k) {
    cf_schedule_desc desc = {0};
    desc.kind = kind;
    if (kind == CF_SCHEDULE_PAPER) desc.shape.replay = CF_REPLAY_PIPELINE;
    desc.shape.n_stages = n_stages;
    desc.shape.k = k;
    return desc;
}

/* Makes and judges a schedule. Returns NULL after a failure, which it has counted. */
static cf_schedule *make(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = NULL;
    cf_error error = {0};
    const char *fault;
    if (cf_schedule_make(plan, desc, &schedule, &error) != CF_OK) {
        FAIL("cf_schedule_make: %s", error.text);
        return NULL;
    }
    fault = pipeline_fault(plan, schedule, desc);
    if (fault) FAIL("broken rule: %s", fault);
    CHECK(fault == NULL);
    return schedule;
}

static double makespan_of(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = make(plan, desc);
    double makespan = schedule ? pipeline_makespan(plan, schedule, desc->timing, NULL, NULL) : -1;
    cf_schedule_free(schedule);
    return makespan;
}

/* Returns 1 - work / (stages x makespan), in hundredths of a percent, rounded. */
static int64_t bubble(double work, int64_t n_stages, double makespan) {
    return (int64_t)((1 - work / ((double)n_stages * makespan)) * 10000 + 0.5);
}

/* ---- published numbers ---- */

/* Figures 2 and 6 of the paper: 4 stages, lengths 1, 1, 2, 4, F = length, B = 2 x length. */
TEST(paper_example_of_1f1b) {
    const int64_t lengths[] = {1, 1, 2, 4}, equal[] = {2, 2, 2, 2};
    const cf_pack_method methods[] = {CF_PACK_BEST_FIT, CF_PACK_NEXT_FIT};
    cf_schedule_desc desc = describe(CF_SCHEDULE_1F1B, 4, 1);
    cf_plan *plan;
    int i;
    for (i = 0; i < 2; i++) { /* unsplit micro-batches, in any order */
        plan = pack(lengths, 4, 4, 1, methods[i]);
        CHECK_INT(bubble(4 * 24, 4, makespan_of(plan, &desc)), 5714);
        cf_plan_free(plan);
    }
    plan = pack(equal, 4, 2, 1, CF_PACK_BEST_FIT);
    CHECK_INT(bubble(4 * 24, 4, makespan_of(plan, &desc)), 4286);
    cf_plan_free(plan);
    plan = pack(lengths, 4, 4, 0, CF_PACK_BEST_FIT); /* ChunkSize 4: two chunks of 4 */
    CHECK_INT(plan->n_chunks, 2);
    CHECK_INT(bubble(4 * 24, 4, makespan_of(plan, &desc)), 6000);
    cf_plan_free(plan);
}

TEST(paper_example_of_state_aware_1f1b) {
    const int64_t lengths[] = {1, 1, 2, 4};
    cf_plan *plan = pack(lengths, 4, 2, 0, CF_PACK_BEST_FIT);
    cf_schedule_desc desc = describe(CF_SCHEDULE_PAPER, 4, 2);
    CHECK_INT(plan->n_chunks, 4);
    CHECK(bubble(4 * 24, 4, makespan_of(plan, &desc)) <= 4783); /* 47.8 % in the paper: makespan 46 */
    desc.shape.k = 1;
    CHECK(bubble(4 * 24, 4, makespan_of(plan, &desc)) <= 5410);
    CHECK(makespan_of(plan, &desc) >= 50); /* the path F1 F2 B2 R1 B1 */
    desc.shape.replay = CF_REPLAY_LOCAL;
    CHECK(makespan_of(plan, &desc) <= 46);
    cf_plan_free(plan);
}

/* For m equal chunks on p stages the literature has a closed form for each kind. */
TEST(closed_forms_for_equal_chunks) {
    int64_t lengths[64], p, m, i;
    for (i = 0; i < 64; i++) lengths[i] = 1;
    for (p = 1; p <= 16; p = p < 4 ? p + 1 : 2 * p) {
        for (m = p; m <= 4 * p; m += p) {
            cf_plan *plan = pack(lengths, m, 1, 1, CF_PACK_BEST_FIT);
            cf_schedule_desc desc = describe(CF_SCHEDULE_1F1B, p, 1);
            harness_note("%d stages, %d chunks", (int)p, (int)m);
            CHECK_INT(makespan_of(plan, &desc), 3 * (m + p - 1));
            desc.kind = CF_SCHEDULE_GPIPE;
            CHECK_INT(makespan_of(plan, &desc), 3 * (m + p - 1));
            desc.kind = CF_SCHEDULE_PAPER;
            CHECK_INT(makespan_of(plan, &desc), 3 * (m + p - 1));
            desc.kind = CF_SCHEDULE_ZERO_BUBBLE; /* ZB-H1 with F = I = W: (p - 1) (F + I - W) more than the work */
            CHECK_INT(makespan_of(plan, &desc), 3 * m + p - 1);
            desc.kind = CF_SCHEDULE_INTERLEAVED; /* (p - 1) (F + B) of one virtual stage more than the work */
            desc.shape.n_virtual = 2;
            if (p > 1 && p <= 4) CHECK_INT(makespan_of(plan, &desc), 2 * 3 * m + 3 * (p - 1));
            if (p > 4) CHECK(makespan_of(plan, &desc) <= 1.05 * (double)(2 * 3 * m + 3 * (p - 1)));
            cf_plan_free(plan);
        }
    }
}

/* Each kind holds the number of chunks known from the literature, with m equal chunks. */
TEST(memory_of_equal_chunks) {
    int64_t lengths[32], i, s;
    const int64_t p = 4, m = 16;
    cf_held_bytes one;
    cf_plan *plan;
    for (i = 0; i < 32; i++) lengths[i] = 1;
    memset(&one, 0, sizeof one);
    one.activations = 1;
    plan = pack(lengths, m, 1, 1, CF_PACK_BEST_FIT);
    for (i = CF_SCHEDULE_PAPER; i < CF_SCHEDULE_BEST; i++) {
        cf_schedule_desc desc = describe((cf_schedule_kind)i, p, 1);
        cf_schedule *schedule = make(plan, &desc);
        REQUIRE(schedule != NULL);
        for (s = 0; s < p; s++) {
            int64_t peak = naive_peak_bytes(plan, schedule, s, &one);
            harness_note("%s, stage %d", cf_schedule_kind_name((cf_schedule_kind)i), (int)s);
            if (i == CF_SCHEDULE_PAPER || i == CF_SCHEDULE_1F1B) CHECK_INT(peak, p - s);
            if (i == CF_SCHEDULE_GPIPE) CHECK_INT(peak, m);
            /* Megatron's warm-up, plus one for a pass of a later virtual stage that runs early */
            if (i == CF_SCHEDULE_INTERLEAVED) CHECK(peak <= 2 * (p - 1 - s) + p + 2);
            if (i == CF_SCHEDULE_ZERO_BUBBLE) CHECK(peak <= p);
        }
        cf_schedule_free(schedule);
    }
    cf_plan_free(plan);
}

/* ---- every rule, on random pipelines ---- */

static int has_limit(const cf_schedule_desc *desc) {
    return desc->limits.chunks > 0 || desc->limits.chunks_by_stage != NULL || desc->limits.bytes > 0 ||
           desc->limits.bytes_by_stage != NULL;
}

/* A refused limit comes with the smallest that would do: that one works, one less does not. */
/* With forwards_first each list is first all F, none of which keeps anything, and then R and B of one chunk after
   another. */
static void check_forwards_first(const problem *p, const cf_schedule *schedule, const cf_timeline *timeline) {
    int64_t n = p->plan->chunks_per_rank, state = 0, s, i;
    for (i = 0; i < n; i++) state += p->plan->chunks[p->desc.shape.rank * n + i].state;
    for (s = 0; s < schedule->shape.n_stages; s++) {
        const cf_action *a = &schedule->actions[schedule->first[s]];
        REQUIRE(CHECK_INT(schedule->first[s + 1] - schedule->first[s], 3 * n));
        for (i = 0; i < n; i++) CHECK(a[i].pass == CF_F && !a[i].keep);
        for (i = n; i < 3 * n; i += 2)
            CHECK(a[i].pass == CF_R && a[i + 1].pass == CF_B && a[i].chunk == a[i + 1].chunk);
        CHECK_INT(timeline->peak_live[s], n > 0);
        CHECK_INT(timeline->peak_state_tokens[s], state);
    }
}

TEST(every_first_forward_first) {
    uint64_t seed;
    int64_t n_chunks, n_stages;
    for (seed = 5400; seed < 5400 + (uint64_t)harness_rounds(200, 60); seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_simulate_desc clock = {0};
        cf_schedule *schedule;
        cf_timeline *timeline = NULL;
        int64_t chunks = 0;
        problem_draw(&rng, NULL, &p);
        chunks = harness_chance(&rng, 0.5) ? 1 : CF_NO_LIMIT;
        memset(&p.desc.limits, 0, sizeof p.desc.limits);
        p.desc.limits.chunks = chunks;
        p.desc.kind = CF_SCHEDULE_GPIPE;
        p.desc.shape.n_virtual = 1;
        p.desc.shape.placement = CF_PLACEMENT_LOOP;
        p.desc.shape.replay = CF_REPLAY_LOCAL;
        p.desc.forwards_first = 1;
        p.desc.split_backward = 0;
        schedule = make(p.plan, &p.desc);
        REQUIRE(schedule != NULL && cf_schedule_validate(p.plan, schedule, NULL, NULL, NULL) == CF_OK);
        clock.timing = p.desc.timing;
        REQUIRE(cf_simulate(p.plan, schedule, &clock, &timeline, NULL) == CF_OK);
        check_forwards_first(&p, schedule, timeline);
        cf_timeline_free(timeline);
        cf_schedule_free(schedule);
        problem_free(&p);
    }
    harness_note("%s", "");
    for (n_chunks = 1; n_chunks <= 6; n_chunks++) /* equal ones, with F = R = 1 and B = 2 */
        for (n_stages = 1; n_stages <= 5; n_stages++) {
            const int64_t ones[] = {1, 1, 1, 1, 1, 1};
            cf_plan *plan = pack(ones, n_chunks, 1, 0, CF_PACK_NEXT_FIT);
            cf_schedule_desc desc = describe(CF_SCHEDULE_GPIPE, n_stages, 1);
            desc.shape.replay = CF_REPLAY_LOCAL;
            desc.forwards_first = 1;
            CHECK_INT(makespan_of(plan, &desc), 4 * n_chunks + 3 * (n_stages - 1));
            cf_plan_free(plan);
        }
}

TEST(refused_limits_say_what_would_do) {
    uint64_t seed;
    int64_t refused = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(1500, 200); seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_schedule *schedule = NULL;
        cf_schedule_desc desc;
        cf_error error;
        int64_t *limit;
        problem_draw(&rng, NULL, &p);
        desc = p.desc;
        if (has_limit(&desc) && cf_schedule_make(p.plan, &desc, &schedule, &error) == CF_ERROR_INFEASIBLE) {
            int in_bytes = strcmp(error.field, "limits.bytes") == 0;
            CHECK(in_bytes || strcmp(error.field, "limits.chunks") == 0);
            CHECK(error.got < error.wanted);
            desc.limits.chunks_by_stage = in_bytes ? desc.limits.chunks_by_stage : NULL;
            desc.limits.bytes_by_stage = in_bytes ? NULL : desc.limits.bytes_by_stage;
            limit = in_bytes ? &desc.limits.bytes : &desc.limits.chunks;
            *limit = error.wanted;
            if (cf_schedule_make(p.plan, &desc, &schedule, &error) != CF_OK) {
                CHECK_STR(error.field,
                          in_bytes ? "limits.chunks" : "limits.bytes"); /* the other limit is impossible as well */
            } else if (*limit > 1) {
                cf_schedule_free(schedule);
                schedule = NULL;
                --*limit;
                CHECK_INT(cf_schedule_make(p.plan, &desc, &schedule, &error), CF_ERROR_INFEASIBLE);
            }
            refused++;
        }
        cf_schedule_free(schedule);
        problem_free(&p);
    }
    CHECK(refused > harness_rounds(20, 3));
}

/* Makes a plan whose chains have chunks that are not full before their last one, and last chunks with padded rows. */
static cf_plan *uneven_plan(harness_rng *rng) {
    int64_t lengths[8], n = harness_between(rng, 2, 8), i;
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    desc.align = harness_between(rng, 1, 4);
    desc.chunk_size = desc.align * harness_between(rng, 5, 20);
    desc.split = harness_chance(rng, 0.5) ? CF_SPLIT_EVEN : CF_SPLIT_COST;
    desc.cost.per_token = 1;
    desc.cost.per_pair = 0.25;
    for (i = 0; i < n; i++) lengths[i] = harness_between(rng, 1, (i < 3 ? 6 : 1) * desc.chunk_size);
    CHECK_INT(cf_pack(lengths, n, &desc, &plan, NULL), CF_OK);
    return plan;
}

/* If a kept input costs more than the activations that it replaces, dropping a chunk saves nothing until its replay.
   Limits between a chain's need and the unlimited peak are kept or refused. */
TEST(inputs_that_cost_more_than_activations) {
    uint64_t seed;
    int64_t made = 0, dropped = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(600, 150); seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_schedule_desc desc;
        cf_schedule *schedule = NULL;
        cf_error error;
        int64_t s, most = 0, i;
        problem_draw(&rng, NULL, &p);
        desc = p.desc;
        if (seed % 2 == 0) {
            cf_plan_free(p.plan);
            p.plan = uneven_plan(&rng);
            REQUIRE(p.plan != NULL);
            desc.kind = p.desc.kind = CF_SCHEDULE_BEST;
            desc.shape.rank = p.desc.shape.rank = 0;
        }
        desc.shape.replay = CF_REPLAY_LOCAL;
        desc.limits.chunks = CF_NO_LIMIT;
        desc.limits.bytes = 0;
        desc.limits.chunks_by_stage = desc.limits.bytes_by_stage = NULL;
        desc.limits.per_token.activations = harness_between(&rng, 0, 3);
        desc.limits.per_token.boundary = harness_between(&rng, 4, 20);
        REQUIRE(cf_schedule_make(p.plan, &desc, &schedule, NULL) == CF_OK);
        for (s = 0; s < schedule->shape.n_stages; s++) {
            int64_t peak = naive_peak_bytes(p.plan, schedule, s, &desc.limits.per_token);
            most = peak > most ? peak : most;
        }
        cf_schedule_free(schedule);
        schedule = NULL;
        desc.limits.bytes = most * harness_between(&rng, 5, 20) / 20;
        memset(&error, 0, sizeof error);
        if (desc.limits.bytes > 0 && cf_schedule_make(p.plan, &desc, &schedule, &error) == CF_ERROR_INFEASIBLE) {
            desc.limits.bytes = error.wanted; /* the smallest limit that is enough */
            CHECK_INT(cf_schedule_make(p.plan, &desc, &schedule, NULL), CF_OK);
        }
        if (schedule != NULL) {
            const char *fault = pipeline_fault(p.plan, schedule, &desc);
            if (fault) FAIL("broken rule: %s", fault);
            made++;
            for (i = 0; i < schedule->n_actions; i++) dropped += schedule->actions[i].pass == CF_R;
        }
        cf_schedule_free(schedule);
        problem_free(&p);
    }
    CHECK(made > harness_rounds(400, 100) && dropped > harness_rounds(400, 100));
    harness_report("%d schedules, %d replays", (int)made, (int)dropped);
}

/* Every kind keeps to a limit of state, for all stages or for each, records it, and refuses one too small for the
   longest chain. The validator reports a virtual stage that holds more, at the first action that does. */
TEST(limits_of_state) {
    int64_t n_made = 0, n_refused = 0;
    uint64_t seed;
    for (seed = 1; seed <= 300; seed++) {
        harness_rng rng = {seed};
        int64_t by_stage[PROBLEM_MOST_STAGES], longest = 0, peak = 0, given, v, g;
        problem p;
        cf_schedule *schedule = NULL;
        cf_schedule_desc desc;
        cf_validate_desc rules;
        cf_error error;
        cf_result result;
        problem_draw(&rng, NULL, &p);
        desc = p.desc;
        for (g = 0; g < p.plan->n_chains; g++)
            if (p.plan->chunks[p.plan->chains[g].first_chunk].rank == desc.shape.rank &&
                p.plan->chains[g].tokens > longest)
                longest = p.plan->chains[g].tokens;
        desc.limits.state = given = longest > 0 ? harness_between(&rng, longest / 2, 2 * longest) : 7;
        for (v = 0; v < PROBLEM_MOST_STAGES; v++) by_stage[v] = v % 2 ? 0 : given;
        if (harness_chance(&rng, 0.3)) desc.limits.state_by_stage = by_stage;
        result = cf_schedule_make(p.plan, &desc, &schedule, &error);
        if (result != CF_OK) {
            CHECK_INT(result, CF_ERROR_INFEASIBLE);
            if (strcmp(error.field, "limits.state") == 0) CHECK(given < longest && error.wanted == longest);
            n_refused += given < longest;
        } else {
            memset(&rules, 0, sizeof rules);
            CHECK(given >= longest);
            CHECK_INT(cf_schedule_validate(p.plan, schedule, NULL, NULL, &error), CF_OK);
            for (v = 0; v < schedule->shape.n_stages; v++)
                CHECK_INT(schedule->limits.state_by_stage[v], given);
            for (v = 0; v < schedule->shape.n_stages; v++) {
                int64_t held = naive_peaks_of(p.plan, schedule, v, &desc.limits.per_token).state_of_one;
                if (held > peak) peak = held;
            }
            CHECK(peak <= given);
            rules.limits.state = peak;
            CHECK(peak == 0 || cf_schedule_validate(p.plan, schedule, &rules, NULL, &error) == CF_OK);
            rules.limits.state = peak - 1;
            if (peak > 1) {
                CHECK_INT(cf_schedule_validate(p.plan, schedule, &rules, NULL, &error), CF_ERROR_SCHEDULE);
                CHECK_STR(error.field, "limits.state");
                CHECK_INT(error.wanted, peak - 1);
            }
            n_made++;
        }
        cf_schedule_free(schedule);
        problem_free(&p);
    }
    CHECK(n_made > 100 && n_refused > 10);
}

/* A byte limit equal to the fixed schedule's unlimited peak is kept. */
TEST(limits_at_the_peak_and_below) {
    uint64_t seed;
    for (seed = 1; seed <= 300; seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_schedule *schedule;
        cf_schedule_desc desc;
        int64_t s, step;
        problem_draw(&rng, NULL, &p);
        if (seed % 2 == 0) {
            cf_plan_free(p.plan);
            p.plan = uneven_plan(&rng);
            REQUIRE(p.plan != NULL);
            p.desc.shape.rank = 0;
        }
        desc = p.desc;
        desc.limits.chunks = desc.limits.bytes = 0;
        desc.limits.chunks_by_stage = desc.limits.bytes_by_stage = NULL;
        desc.kind = (cf_schedule_kind)harness_between(&rng, CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B);
        if (desc.kind != CF_SCHEDULE_PAPER) desc.shape.replay = CF_REPLAY_LOCAL;
        desc.shape.n_virtual = 1;
        desc.split_backward = 0;
        desc.shape.placement = CF_PLACEMENT_LOOP;
        schedule = make(p.plan, &desc);
        REQUIRE(schedule != NULL);
        for (step = 0; step < 3; step++) {
            cf_schedule *tight;
            for (s = 0; s < desc.shape.n_stages; s++) {
                int64_t live = naive_peak_bytes(p.plan, schedule, s, &desc.limits.per_token);
                p.limits_bytes[s] = step == 1 && live > 1 ? live - 1 : live * (4 - step) / 4 + 1;
            }
            desc.limits.bytes_by_stage = p.limits_bytes;
            if (cf_schedule_make(p.plan, &desc, &tight, NULL) != CF_OK) break;
            CHECK(pipeline_fault(p.plan, tight, &desc) == NULL);
            cf_schedule_free(tight);
        }
        cf_schedule_free(schedule);
        problem_free(&p);
    }
}

/* ---- options, memory, determinism ---- */

static void check_refused(const cf_plan *plan, const cf_schedule_desc *desc, cf_result code, const char *field) {
    cf_schedule *schedule = NULL;
    cf_error error = {0};
    harness_note("field %s", field);
    CHECK_INT(cf_schedule_make(plan, desc, &schedule, &error), code);
    CHECK(schedule == NULL);
    if (error.field) CHECK_STR(error.field, field);
    CHECK(error.field != NULL);
    cf_schedule_free(schedule);
}

TEST(bad_options_are_named) {
    const int64_t lengths[] = {1, 1, 2, 4}, negative[] = {1, -2, 1, 1};
    cf_plan *plan = pack(lengths, 4, 2, 0, CF_PACK_BEST_FIT);
    const cf_schedule_desc good = describe(CF_SCHEDULE_PAPER, 4, 1);
    cf_schedule_desc bad, first = describe(CF_SCHEDULE_GPIPE, 4, 1);
    cf_timing timing = {0};
    cf_stage_cost stages[4] = {0};
    first.forwards_first = 1;
#define REFUSED(change, code, field) \
    do {                             \
        bad = good;                  \
        change;                      \
        check_refused(plan, &bad, code, field); \
    } while (0)
    REFUSED(bad.kind = (cf_schedule_kind)99, CF_ERROR_ARGUMENT, "kind");
    REFUSED(bad.shape.replay = (cf_replay)9, CF_ERROR_ARGUMENT, "shape.replay");
    REFUSED(bad.shape.n_stages = -1, CF_ERROR_ARGUMENT, "shape.n_stages");
    REFUSED(bad.shape.n_stages = CF_MAX_STAGES + 1, CF_ERROR_LIMIT, "shape.n_stages");
    REFUSED(bad.shape.n_virtual = 2, CF_ERROR_ARGUMENT, "shape.n_virtual");
    for (bad = good; bad.kind < CF_SCHEDULE_BEST;) { /* `good` replays through the pipeline */
        bad.kind = (cf_schedule_kind)((int)bad.kind + 1);
        check_refused(plan, &bad, CF_ERROR_ARGUMENT, "shape.replay");
    }
    REFUSED(bad.kind = CF_SCHEDULE_BEST; bad.shape.replay = CF_REPLAY_LOCAL;
            bad.shape.n_virtual = CF_MAX_STAGES / 4 + 1, CF_ERROR_LIMIT, "shape.n_virtual");
    REFUSED(bad.shape.k = -1, CF_ERROR_ARGUMENT, "shape.k");
    REFUSED(bad.shape.rank = 1, CF_ERROR_ARGUMENT, "shape.rank");
    REFUSED(bad.limits.chunks = -2, CF_ERROR_ARGUMENT, "limits.chunks");
    REFUSED(bad.limits.chunks_by_stage = negative, CF_ERROR_ARGUMENT, "limits.chunks_by_stage");
    REFUSED(bad.limits.bytes = -2, CF_ERROR_ARGUMENT, "limits.bytes");
    REFUSED(bad.limits.bytes_by_stage = negative, CF_ERROR_ARGUMENT, "limits.bytes_by_stage");
    REFUSED(bad.limits.per_token.state = -1, CF_ERROR_ARGUMENT, "limits.per_token.state");
    REFUSED(bad.limits.per_token.state = INT64_MAX / 2, CF_ERROR_OVERFLOW, "limits.per_token");
    REFUSED(bad.max_tries = -1, CF_ERROR_ARGUMENT, "max_tries");
    REFUSED(bad.forwards_first = 1; bad.shape.replay = CF_REPLAY_LOCAL, CF_ERROR_ARGUMENT, "forwards_first");
    REFUSED(bad = first; bad.forwards_first = 2, CF_ERROR_ARGUMENT, "forwards_first");
    REFUSED(bad = first; bad.limits.state = 9, CF_ERROR_ARGUMENT, "forwards_first");
    REFUSED(bad = first; bad.limits.state_by_stage = negative, CF_ERROR_ARGUMENT, "forwards_first");
    REFUSED(bad = first; bad.limits.bytes = 9, CF_ERROR_ARGUMENT, "forwards_first");
    bad = good;
    bad.timing = &timing;
    timing.latency = -1;
    check_refused(plan, &bad, CF_ERROR_ARGUMENT, "timing.latency");
    timing.latency = 1e308;
    check_refused(plan, &bad, CF_ERROR_OVERFLOW, "timing");
    timing.latency = 0;
    timing.stages = stages;
    stages[2].weight.per_pair = -2;
    check_refused(plan, &bad, CF_ERROR_ARGUMENT, "timing.weight.per_pair");
#undef REFUSED
    cf_plan_free(plan);
}

/* In the caller's memory: one byte less than asked for is refused, the exact size is enough, and the schedule is the
   same. */
TEST(into_memory_of_the_size_asked) {
    uint64_t seed;
    for (seed = 1; seed <= (uint64_t)harness_rounds(200, 60); seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_schedule *made = NULL, *placed = NULL;
        cf_error error;
        size_t bytes;
        void *memory;
        problem_draw(&rng, NULL, &p);
        if (cf_schedule_size(p.plan, &p.desc, &bytes, &error) == CF_OK) {
            memory = harness_guard_new(bytes);
            CHECK_INT(cf_schedule_into(p.plan, &p.desc, memory, bytes - 1, &placed, &error),
                      CF_ERROR_SPACE);
            CHECK(strcmp(error.field, "bytes") == 0 && error.wanted == (int64_t)bytes && error.got == error.wanted - 1);
            CHECK(placed == NULL);
            CHECK_POISON(memory, bytes);
            CHECK_INT(cf_schedule_into(p.plan, &p.desc, memory, bytes, &placed, &error), CF_OK);
            CHECK(harness_guard_ok(memory) && (void *)placed == memory);
            CHECK_INT(cf_schedule_make(p.plan, &p.desc, &made, &error), CF_OK);
            REQUIRE(placed != NULL && made != NULL);
            CHECK_INT(placed->n_actions, made->n_actions);
            CHECK(memcmp(placed->actions, made->actions, (size_t)made->n_actions * sizeof(cf_action)) == 0);
            CHECK(memcmp(placed->first, made->first, (size_t)(made->shape.n_stages + 1) * sizeof(int64_t)) == 0);
            cf_schedule_free(placed);
            cf_schedule_free(made);
            harness_guard_free(memory);
        } else {
            CHECK_INT(error.code, CF_ERROR_INFEASIBLE);
        }
        problem_free(&p);
    }
}

/* ---- hostile sizes ---- */

TEST(a_million_chunks) {
    const int64_t n = 1000000;
    int64_t *lengths = (int64_t *)malloc((size_t)n * sizeof *lengths), i;
    cf_plan *plan;
    int kind;
    REQUIRE(lengths != NULL);
    for (i = 0; i < n; i++) lengths[i] = 1;
    plan = pack(lengths, n, 1, 0, CF_PACK_BEST_FIT);
    REQUIRE(plan != NULL);
    CHECK_INT(plan->n_chunks, n);
    for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind += harness_rounds(1, 9)) {
        cf_schedule_desc desc = describe((cf_schedule_kind)kind, 1, 1);
        cf_schedule *schedule = NULL;
        if (kind == CF_SCHEDULE_INTERLEAVED || kind == CF_SCHEDULE_ZERO_BUBBLE) continue; /* longer, and nothing new */
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
        REQUIRE(schedule != NULL);
        CHECK_INT(schedule->n_actions, 2 * n);
        cf_schedule_free(schedule);
        desc.shape.n_stages = 1000;
        check_refused(plan, &desc, CF_ERROR_LIMIT, "n_actions");
    }
    cf_plan_free(plan);
    free(lengths);
}

TEST(one_sequence_of_2_to_the_40_tokens) {
    const int64_t lengths[] = {(int64_t)1 << 40};
    const int n = harness_rounds(20, 18); /* 2^n chunks */
    cf_plan *plan = pack(lengths, 1, (int64_t)1 << (40 - n), 0, CF_PACK_BEST_FIT);
    cf_schedule_desc desc = describe(CF_SCHEDULE_PAPER, 2, 1);
    cf_schedule *schedule = NULL;
    REQUIRE(plan != NULL);
    CHECK_INT(plan->n_chunks, 1 << n);
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    REQUIRE(schedule != NULL);
    CHECK_INT(schedule->n_actions, 2 * (3 * ((int64_t)1 << n) - 1));
    cf_schedule_free(schedule);
    desc.limits.per_token.activations = (int64_t)1 << 30;
    check_refused(plan, &desc, CF_ERROR_OVERFLOW, "limits.per_token");
    cf_plan_free(plan);
}

TEST(a_thousand_stages) {
    const int64_t n = harness_rounds(20, 8);
    int64_t lengths[20], i;
    cf_plan *plan;
    int kind;
    for (i = 0; i < n; i++) lengths[i] = 1 + i % 3 + (i == 7 ? 30 : 0);
    plan = pack(lengths, n, 3, 1, CF_PACK_BEST_FIT);
    for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind++) {
        cf_schedule_desc desc = describe((cf_schedule_kind)kind, 1000, 2);
        cf_schedule *schedule = NULL;
        desc.max_tries = harness_rounds(8, 2);
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
        REQUIRE(schedule != NULL);
        CHECK_INT(schedule->shape.n_stages, 1000);
        CHECK_INT(schedule->first[1000], schedule->n_actions);
        cf_schedule_free(schedule);
    }
    cf_plan_free(plan);
}

/* An order does not depend on the unit of time. If all costs are multiplied by a power of two, all passes stay in their
   places, however small the seconds are. */
TEST(order_is_that_of_any_unit_of_time) {
    const int64_t lengths[] = {3, 7, 1, 5, 2, 8, 4, 6, 21, 2, 13};
    cf_plan *plan = pack(lengths, 11, 8, 1, CF_PACK_NEXT_FIT);
    int kind;
    for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind++) {
        cf_schedule *schedules[2];
        cf_timing timings[2];
        int i;
        for (i = 0; i < 2; i++) {
            cf_schedule_desc desc = describe((cf_schedule_kind)kind, 3, 2);
            memset(&timings[i], 0, sizeof timings[i]);
            timings[i].all.forward.per_token = i ? 1.0 / ((int64_t)1 << 62) : 1;
            timings[i].all.backward.per_token = 2 * timings[i].all.forward.per_token;
            timings[i].latency = timings[i].all.forward.per_token / 4;
            desc.timing = &timings[i];
            desc.max_tries = 20;
            schedules[i] = make(plan, &desc);
        }
        harness_note("%s", cf_schedule_kind_name((cf_schedule_kind)kind));
        REQUIRE(schedules[0] != NULL && schedules[1] != NULL);
        if (CHECK_INT(schedules[1]->n_actions, schedules[0]->n_actions))
            CHECK(memcmp(schedules[1]->actions, schedules[0]->actions,
                         (size_t)schedules[0]->n_actions * sizeof *schedules[0]->actions) == 0);
        cf_schedule_free(schedules[0]);
        cf_schedule_free(schedules[1]);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

/* CF_MAX_ACTIONS are allowed, and then memory fails. One stage more is refused before any memory is allocated. */
TEST(just_as_many_passes_as_there_may_be) {
    enum { CHUNKS = 1 << 12 };
    static int64_t lengths[CHUNKS];
    cf_plan *plan;
    int64_t i, more;
    for (i = 0; i < CHUNKS; i++) lengths[i] = 1;
    plan = pack(lengths, CHUNKS, 1, 0, CF_PACK_NEXT_FIT);
    REQUIRE(plan != NULL && plan->n_chunks == CHUNKS);
    for (more = 0; more < 2; more++) {
        cf_schedule_desc desc = describe(CF_SCHEDULE_1F1B, CF_MAX_ACTIONS / 2 / CHUNKS + more, 1);
        harness_heap heap = {0};
        cf_allocator allocator = {harness_alloc, harness_release, NULL};
        cf_schedule *schedule = NULL;
        heap.fail_at = 1;
        allocator.user = &heap;
        desc.allocator = &allocator;
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), more ? CF_ERROR_LIMIT : CF_ERROR_MEMORY);
        CHECK_INT(heap.failed, !more);
    }
    cf_plan_free(plan);
}

/* Counts the passes before the first backward in the last stage's list, and the most passes that any backward needs
   before it, less those that earlier backwards have used. In local replay an R belongs to its backward. */
static void count_ahead(const cf_schedule *s, int64_t *first, int64_t *most) {
    int64_t stage = s->shape.n_stages - 1, i, j, n, need, n_back = 0, local = s->shape.replay == CF_REPLAY_LOCAL;
    *first = *most = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        if (s->actions[i].pass != CF_B) {
            *first += n_back == 0 && !(local && s->actions[i].pass == CF_R);
            continue;
        }
        for (j = s->first[stage], n = need = 0; j < i; j++) {
            if (s->actions[j].pass == CF_B || (local && s->actions[j].pass == CF_R)) continue;
            n++;
            if (s->actions[j].chunk == s->actions[i].chunk && (local || s->actions[j].keep)) need = n;
        }
        if (need - n_back > *most) *most = need - n_back;
        n_back++;
    }
}

/* Whichever of its two orders `paper` takes, the last stage starts with no more passes than some backward needs. It
   starts with fewer if K or the other order limits it. */
TEST(the_last_stage_of_paper_runs_no_further_ahead_than_needed) {
    uint64_t seed;
    int64_t fewer = 0, exactly = 0, first, most;
    for (seed = 1; seed <= 200; seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_schedule *s = NULL;
        problem_draw(&rng, NULL, &p);
        p.desc.kind = CF_SCHEDULE_PAPER;
        p.desc.shape.n_virtual = 1;
        p.desc.shape.placement = CF_PLACEMENT_LOOP;
        p.desc.shape.replay = seed % 2 ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
        p.desc.shape.outputs = 0;
        p.desc.limits.chunks = CF_NO_LIMIT;
        p.desc.limits.chunks_by_stage = p.desc.limits.bytes_by_stage = NULL;
        p.desc.limits.bytes = 0;
        p.desc.split_backward = 0;
        REQUIRE(cf_schedule_make(p.plan, &p.desc, &s, NULL) == CF_OK);
        count_ahead(s, &first, &most);
        CHECK(first <= most);
        exactly += first == most;
        fewer += first < most;
        cf_schedule_free(s);
        problem_free(&p);
    }
    harness_note("%s", "");
    CHECK(exactly > 10 && fewer > 10);
}

SUITE(schedule_pipeline, CASE(paper_example_of_1f1b), CASE(paper_example_of_state_aware_1f1b),
      CASE(closed_forms_for_equal_chunks), CASE(memory_of_equal_chunks), CASE(every_first_forward_first),
      CASE(refused_limits_say_what_would_do), CASE(inputs_that_cost_more_than_activations),
      CASE(limits_at_the_peak_and_below), CASE(limits_of_state), CASE(bad_options_are_named),
      CASE(into_memory_of_the_size_asked), CASE(a_million_chunks), CASE(one_sequence_of_2_to_the_40_tokens),
      CASE(a_thousand_stages), CASE(order_is_that_of_any_unit_of_time), CASE(just_as_many_passes_as_there_may_be),
      CASE(the_last_stage_of_paper_runs_no_further_ahead_than_needed));
