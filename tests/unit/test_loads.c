/* Tests the functions of >>simulate that need no timeline. The load at every moment is compared with counts from the
   definitions, and bounds with schedules. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
    s->actions[3].chunk += (int32_t)plan->chunks_per_rank; /* of the other rank */
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions.chunk", 3);
    s->actions[3].chunk -= (int32_t)plan->chunks_per_rank;
    s->actions[3].stage = 1;
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions.stage", 3);
    s->actions[3].stage = 0;
    s->actions[3].pass = 99;
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions.pass", 3);
    s->actions[0].pass = CF_B; /* of a chunk that has had no forward */
    s->actions[3].pass = CF_F;
    refuse_loads(plan, s, 0, 1000, CF_ERROR_SCHEDULE, "actions", 0);
    naive_free(s);
    cf_plan_free(plan);
}

/* ---- bounds ---- */

/* Returns the simulator's bound for a schedule of that description. */
static double bound_of(const problem *p) {
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

/* If backwards may be split or whole, the weaker of the two bounds holds. If passes stream their state, a still weaker
   one does, because one chunk may be faster whole and another split. */
TEST(bounds_of_either_form) {
    uint64_t seed;
    for (seed = 1; seed <= 40; seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_search_report report = {0};
        double whole, split, least;
        problem_draw(&rng, NULL, &p);
        p.desc.limits.chunks = 0;
        p.desc.limits.chunks_by_stage = p.desc.limits.bytes_by_stage = NULL;
        p.desc.limits.bytes = 0;
        p.desc.shape.n_virtual = 1;
        p.desc.shape.placement = CF_PLACEMENT_LOOP;
        p.desc.shape.replay = CF_REPLAY_LOCAL;
        p.desc.kind = CF_SCHEDULE_PAPER;
        p.desc.split_backward = 0;
        whole = bound_of(&p);
        p.desc.kind = CF_SCHEDULE_ZERO_BUBBLE;
        split = bound_of(&p);
        p.desc.kind = CF_SCHEDULE_BEST;
        p.desc.split_backward = 1;
        p.desc.max_tries = 1;
        p.desc.report = &report;
        CHECK(bound_of(&p) >= report.bound);
        least = whole < split ? whole : split;
        CHECK(report.bound <= least);
        CHECK(p.timing.stream_backward > 0 || report.bound >= least);
        problem_free(&p);
    }
}

SUITE(loads, CASE(bad_loads_are_named), CASE(bounds_of_either_form));
