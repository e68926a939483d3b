/* What >>simulate says without a timeline: the load of every moment against counts made anew from the definitions, and
   bounds against schedules. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The load of virtual stage v while action `at` runs: every chunk is looked at anew, from its passes so far. */
static cf_memory_load load_at(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, int64_t at, int64_t v) {
    cf_memory_load load = {0};
    int64_t c, id;
    for (c = schedule->shape.rank * plan->n_steps; c < (schedule->shape.rank + 1) * plan->n_steps; c++) {
        const cf_chunk *chunk = &plan->chunks[c];
        int64_t rows = cf_chunk_state_tokens(plan, c), scores = chunk->padded * (chunk->prefix + chunk->padded);
        int kept = 0, saved = 0, state = 0, gradient = 0;
        for (id = schedule->first[stage]; id <= at; id++) {
            const cf_action *a = &schedule->actions[id];
            const cf_chunk *other = &plan->chunks[a->chunk];
            int over = id < at, back = a->pass == CF_B || a->pass == CF_I;
            int of_last = other->group >= 0 && other->index == plan->groups[other->group].n_chunks - 1;
            if (a->stage != v) continue;
            if (back && chunk->group >= 0 && other->group == chunk->group && of_last) gradient = 1;
            if (a->chunk != c) continue;
            if (a->pass == CF_F || a->pass == CF_R) kept = a->keep;
            if (a->pass == CF_F) state = 1, saved = !a->keep && schedule->shape.replay == CF_REPLAY_LOCAL;
            if (a->pass == CF_R) saved = 0;
            if (back && over) state = gradient = 0;
            if ((a->pass == CF_B || a->pass == CF_W) && over) kept = 0;
        }
        load.live_tokens += kept ? chunk->padded : 0;
        load.live_scores += kept ? scores : 0;
        load.input_tokens += saved ? chunk->padded : 0;
        load.state_tokens += state ? rows : 0;
        load.state_gradient_tokens += gradient ? rows : 0;
        if (schedule->actions[at].chunk == c && schedule->actions[at].stage == v &&
            schedule->actions[at].pass < CF_COMPUTE_PASS_COUNT) {
            load.chunk_tokens = chunk->padded;
            load.chunk_scores = scores;
        }
    }
    return load;
}

/* The virtual stage of a stage in row j: the one of n_stages that lies on it. */
static int64_t in_row(const cf_schedule *schedule, int64_t j, int64_t stage) {
    int64_t v = j * schedule->shape.n_stages;
    while (naive_stage(schedule, v) != stage) v++;
    return v;
}

/* Compares all stages. */
static void check_loads(const cf_plan *plan, const cf_schedule *schedule) {
    int64_t s, i, j;
    for (s = 0; s < schedule->shape.n_stages; s++) {
        int64_t n = schedule->first[s + 1] - schedule->first[s], count = n * schedule->shape.n_virtual;
        size_t bytes = (size_t)(count + 1) * sizeof(cf_memory_load);
        cf_memory_load *loads = (cf_memory_load *)malloc(bytes);
        cf_error error;
        REQUIRE(loads != NULL);
        harness_poison(loads, bytes);
        if (cf_schedule_loads(plan, schedule, s, loads, count, &error) != CF_OK) FAIL("%s", error.text);
        for (i = 0; i < n; i++)
            for (j = 0; j < schedule->shape.n_virtual; j++) {
                cf_memory_load wanted =
                    load_at(plan, schedule, s, schedule->first[s] + i, in_row(schedule, j, s));
                if (memcmp(&loads[i * schedule->shape.n_virtual + j], &wanted, sizeof wanted) != 0)
                    FAIL("stage %d, action %d, virtual stage %d", (int)s, (int)i, (int)j);
            }
        CHECK_POISON(&loads[count], sizeof *loads);
        free(loads);
    }
}

/* Random sound schedules: whole, split and mixed backwards, virtual stages, both replays. */
TEST(loads_are_those_of_the_definitions) {
    uint64_t seed;
    for (seed = 1; seed <= 60; seed++) {
        harness_rng rng = {seed};
        cf_plan *plan = naive_plan(&rng, 8, 1 + (int64_t)(seed % 2));
        naive_shape shape = naive_draw_shape(&rng);
        cf_schedule *schedule;
        shape.rank = seed % 4 == 1 ? 1 : 0;
        REQUIRE(plan != NULL);
        schedule = naive_schedule(&rng, plan, &shape);
        harness_note("seed %d", (int)seed);
        if (schedule != NULL) check_loads(plan, schedule);
        naive_free(schedule);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* Transfers hold nothing of their own. */
TEST(loads_of_lowered_schedules) {
    const int64_t lengths[] = {9000, 300, 500, 7000, 200};
    cf_schedule_desc order = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL, *lowered = NULL;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_PIPELINE;
    order.shape.n_stages = 3;
    REQUIRE((plan = naive_pack(lengths, 5, 1000)) != NULL);
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    REQUIRE(cf_schedule_lower(plan, schedule, NULL, &lowered, NULL) == CF_OK);
    check_loads(plan, lowered);
    cf_schedule_free(lowered);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* The heaviest moment has the bytes that the simulator's tests count from scratch. */
TEST(loads_have_the_peak_bytes) {
    const cf_bytes bytes = {7, 3, 5, 2};
    uint64_t seed;
    for (seed = 1; seed <= 30; seed++) {
        harness_rng rng = {seed};
        cf_plan *plan = naive_plan(&rng, 8, 1);
        naive_shape shape = naive_draw_shape(&rng);
        cf_schedule *schedule;
        int64_t s, i, j;
        shape.rank = 0;
        REQUIRE(plan != NULL);
        schedule = naive_schedule(&rng, plan, &shape);
        for (s = 0; schedule != NULL && s < schedule->shape.n_stages; s++) {
            int64_t n = schedule->first[s + 1] - schedule->first[s], most = 0, v = schedule->shape.n_virtual;
            cf_memory_load *loads = (cf_memory_load *)malloc((size_t)(n * v + 1) * sizeof *loads);
            REQUIRE(loads != NULL && cf_schedule_loads(plan, schedule, s, loads, n * v, NULL) == CF_OK);
            for (i = 0; i < n; i++) {
                int64_t sum = 0;
                for (j = 0; j < v; j++) {
                    const cf_memory_load *l = &loads[i * v + j];
                    sum += 7 * l->live_tokens + 3 * l->state_tokens + 5 * l->state_gradient_tokens +
                           2 * l->input_tokens;
                }
                if (sum > most) most = sum;
            }
            CHECK_INT(most, naive_peak_bytes(plan, schedule, s, &bytes));
            free(loads);
        }
        naive_free(schedule);
        cf_plan_free(plan);
    }
}

static void refuse_loads(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, int64_t count, cf_result code,
                         const char *field, int64_t item) {
    static cf_memory_load loads[1000];
    cf_error error;
    harness_poison(loads, sizeof loads);
    harness_note("%s", field);
    CHECK_INT(cf_schedule_loads(plan, schedule, stage, loads, count, &error), code);
    CHECK_INT(error.code, code);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
    CHECK_POISON(loads, sizeof loads);
    harness_note("%s", "");
}

TEST(bad_loads_are_named) {
    const int64_t lengths[] = {3500, 300};
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    cf_plan *plan = NULL;
    cf_schedule *made = NULL, *s;
    cf_error error;
    int64_t n;
    pack.chunk_size = 1000;
    pack.n_ranks = 2;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_PIPELINE;
    order.shape.n_stages = 2;
    REQUIRE(cf_pack(lengths, 2, &pack, &plan, NULL) == CF_OK);
    REQUIRE(cf_schedule_make(plan, &order, &made, NULL) == CF_OK);
    s = naive_copy(made);
    cf_schedule_free(made);
    REQUIRE(s != NULL);
    n = s->first[2] - s->first[1];
    refuse_loads(NULL, s, 0, 1000, CF_ERROR_ARGUMENT, "plan", -1);
    refuse_loads(plan, NULL, 0, 1000, CF_ERROR_ARGUMENT, "schedule", -1);
    refuse_loads(plan, s, -1, 1000, CF_ERROR_ARGUMENT, "stage", -1);
    refuse_loads(plan, s, 2, 1000, CF_ERROR_ARGUMENT, "stage", -1);
    refuse_loads(plan, s, 1, n - 1, CF_ERROR_ARGUMENT, "count", -1);
    CHECK_INT(cf_schedule_loads(plan, s, 1, NULL, n, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "loads");
    s->actions[3].chunk += (int32_t)plan->n_steps; /* of the other rank */
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions.chunk", 3);
    s->actions[3].chunk -= (int32_t)plan->n_steps;
    s->actions[3].stage = 1;
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions.stage", 3);
    s->actions[3].stage = 0;
    s->actions[3].pass = 99;
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions.pass", 3);
    s->actions[0].pass = CF_B; /* of what has had no forward */
    s->actions[3].pass = CF_F;
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions", 0);
    naive_free(s);
    cf_plan_free(plan);
}

/* ---- bounds ---- */

/* Of a schedule of that description, by the simulator. */
static double bound_of(const pipeline_problem *p) {
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_simulate_desc simulate = {0};
    double bound = -1;
    simulate.timing = p->desc.timing;
    CHECK_INT(cf_schedule_make(p->plan, &p->desc, &schedule, NULL), CF_OK);
    if (schedule != NULL && CHECK_INT(cf_simulate(p->plan, schedule, &simulate, &timeline, NULL), CF_OK))
        bound = timeline->bound;
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    return bound;
}

/* Where backwards may be split or not, the weaker of both claims is the one that holds; and a still weaker one where
   passes stream their state, since then one chunk may take less time whole and another one split. */
TEST(bounds_of_either_form) {
    uint64_t seed;
    for (seed = 1; seed <= 40; seed++) {
        harness_rng rng = {seed};
        pipeline_problem p;
        cf_search_report report = {0};
        double whole, split, least;
        pipeline_draw(&rng, &p);
        p.desc.limits.chunks = 0;
        p.desc.limits.chunks_by_stage = p.desc.limits.bytes_by_stage = NULL;
        p.desc.limits.bytes = 0;
        p.desc.shape.n_virtual = 1;
        p.desc.shape.placement = CF_PLACEMENT_LOOP;
        p.desc.shape.replay = CF_REPLAY_LOCAL;
        p.desc.kind = CF_SCHEDULE_PAPER;
        whole = bound_of(&p);
        p.desc.kind = CF_SCHEDULE_ZERO_BUBBLE;
        split = bound_of(&p);
        p.desc.kind = CF_SCHEDULE_BEST;
        p.desc.split_backward = 1;
        p.desc.budget = 1;
        p.desc.report = &report;
        CHECK(bound_of(&p) >= report.bound);
        least = whole < split ? whole : split;
        CHECK(report.bound <= least);
        CHECK(p.timing.stream_backward > 0 || report.bound >= least);
        cf_plan_free(p.plan);
    }
}

SUITE(loads, CASE(loads_are_those_of_the_definitions), CASE(loads_of_lowered_schedules),
      CASE(loads_have_the_peak_bytes), CASE(bad_loads_are_named), CASE(bounds_of_either_form));
