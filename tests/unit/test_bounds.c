/* Lower bounds, tried on schedules that no generator of the library would make, and on optima. */

#include "chunkflow.h"
#include "../reference/exact.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/random_schedule.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MOST_STAGES 5

/* A plan and the limits and options of its schedules. `desc` points into this struct. */
typedef struct problem {
    cf_plan *plan;
    cf_schedule_desc desc;
    cf_timing timing;
    cf_stage_cost stages[2 * MOST_STAGES];
    int64_t limits[MOST_STAGES];
    uint64_t seed;
} problem;

/* ---- drawing ---- */

/* Moves the borders between the slices of each chain, so that slices of varying length follow each other. */
static void move_borders(harness_rng *rng, cf_plan *plan) {
    int64_t i, j;
    for (i = plan->n_chunks - 2; i >= 0; i--) {
        cf_chunk *c = &plan->chunks[i], *next = c + 1;
        cf_slice *ours = &plan->slices[c->first_slice], *theirs = &plan->slices[next->first_slice];
        int64_t room = plan->chunk_size - next->rows, by;
        if (next->index == 0) continue;
        by = harness_between(rng, 0, room < ours->length - 1 ? room : ours->length - 1);
        c->pairs -= cf_slice_pairs(ours->begin, ours->length) - cf_slice_pairs(ours->begin, ours->length - by);
        next->pairs += cf_slice_pairs(theirs->begin - by, theirs->length + by) -
                       cf_slice_pairs(theirs->begin, theirs->length);
        c->tokens = c->rows = c->state = c->tokens - by;
        ours->length = (int32_t)c->tokens;
        theirs->begin = next->prefix = next->prefix - by;
        theirs->length += (int32_t)by;
        next->state += by;
        next->tokens = next->rows = next->tokens + by;
        for (j = 1; j < next->n_slices; j++) theirs[j].offset += (int32_t)by;
    }
}

static cf_plan *draw_plan(harness_rng *rng, int64_t most_sequences, int64_t most_chunks) {
    int64_t lengths[8], n = harness_between(rng, 1, most_sequences), i;
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error = {0};
    desc.chunk_size = harness_between(rng, 1, 9);
    desc.n_ranks = harness_between(rng, 1, 2);
    desc.no_tails = harness_chance(rng, 0.3);
    desc.split = (cf_split_method)harness_between(rng, CF_SPLIT_FULL, CF_SPLIT_COST);
    for (i = 0; i < n; i++)
        lengths[i] = harness_between(rng, 0, (harness_chance(rng, 0.4) ? most_chunks : 1) * desc.chunk_size);
    if (cf_pack(lengths, n, &desc, &plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
    else if (harness_chance(rng, 0.7)) move_borders(rng, plan);
    CHECK_INT(cf_plan_validate(plan, lengths, n, NULL, &error), CF_OK);
    return plan;
}

static void draw_timing(harness_rng *rng, problem *p) {
    int i;
    if (harness_chance(rng, 0.4)) return;
    p->desc.timing = &p->timing;
    if (harness_chance(rng, 0.4)) {
        p->timing.latency = (double)harness_between(rng, 0, 8) / 4;
        p->timing.seconds_per_token = harness_chance(rng, 0.5) ? 0.125 : 0;
    }
    p->timing.all.forward.per_token = 1;
    p->timing.all.forward.per_pair = harness_chance(rng, 0.5) ? 0.0625 : 0;
    if (harness_chance(rng, 0.3)) {
        p->timing.stream_forward = (double)harness_between(rng, 0, 4) / 8;
        p->timing.stream_backward = (double)harness_between(rng, 0, 8) / 8;
        p->timing.stream_exposed = (double)harness_between(rng, 0, 4) / 4;
        if (!(p->timing.stream_forward + p->timing.stream_backward > 0)) p->timing.stream_exposed = 0;
    }
    if (harness_chance(rng, 0.5)) return;
    memset(&p->timing.all, 0, sizeof p->timing.all);
    p->timing.stages = p->stages;
    for (i = 0; i < 2 * MOST_STAGES; i++) {
        cf_stage_cost *cost = &p->stages[i];
        cost->forward.per_token = (double)harness_between(rng, 0, 3);
        cost->forward.constant = (double)harness_between(rng, 0, 2);
        if (harness_chance(rng, 0.3)) cost->input.per_token = cost->weight.per_token = 2;
        if (harness_chance(rng, 0.2)) cost->backward.per_token = (double)harness_between(rng, 1, 6);
        if (harness_chance(rng, 0.3)) cost->replay.per_token = 0.75;
    }
}

/* With pipeline replay, all virtual stages of a stage may have to keep a chunk at the same time. */
static void draw_limits(harness_rng *rng, problem *p) {
    int64_t least = p->desc.shape.n_virtual, i;
    for (i = 0; i < MOST_STAGES; i++)
        p->limits[i] = harness_chance(rng, 0.2) ? 0 : harness_between(rng, least, 3 * least);
    if (harness_chance(rng, 0.5)) p->desc.limits.chunks = harness_between(rng, least, 3 * least);
    if (harness_chance(rng, 0.2)) p->desc.limits.chunks_by_stage = p->limits;
}

/* some_split: each backward may be split or not; otherwise all are split, or none. */
static void draw_options(harness_rng *rng, problem *p, int64_t most_stages, int some_split) {
    memset(&p->desc, 0, sizeof p->desc);
    memset(&p->timing, 0, sizeof p->timing);
    memset(p->stages, 0, sizeof p->stages);
    p->desc.kind = CF_SCHEDULE_BEST;
    p->desc.shape.n_stages = harness_between(rng, 1, most_stages);
    p->desc.shape.n_virtual = harness_chance(rng, 0.7) ? 1 : 2;
    p->desc.shape.placement = harness_chance(rng, 0.5) ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
    p->desc.shape.k = harness_between(rng, 1, 4);
    p->desc.shape.replay = harness_chance(rng, 0.5) ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
    p->desc.shape.rank = p->plan->n_ranks - 1;
    p->desc.split_backward = some_split ? 2 : harness_chance(rng, 0.3);
    draw_timing(rng, p);
    draw_limits(rng, p);
}

/* ---- judging ---- */

/* Counts how often each bound exceeded a makespan. */
typedef struct tally {
    int64_t n_schedules, n_problems, n_broken[CF_MAX_BOUNDS];
    const char *names[CF_MAX_BOUNDS];
    double worst[CF_MAX_BOUNDS], log_ratio, bound; /* bound: that of the last schedule */
    char example[CF_MAX_BOUNDS][256]; /* the worst */
} tally;

static exact_placement placement_of(const problem *p) {
    return p->desc.shape.placement == CF_PLACEMENT_V ? exact_v : exact_loop;
}

/* Describes a problem, for a report at the end. */
static void tell(char *text, size_t bytes, const problem *p) {
    const cf_schedule_desc *d = &p->desc;
    snprintf(text, bytes, "seed %d: %d chunks, %d stages x %d (%s), K %d, %s, limit %d%s, split %d, %s costs%s",
             (int)p->seed, (int)p->plan->chunks_per_rank, (int)d->shape.n_stages, (int)d->shape.n_virtual,
             cf_placement_name(d->shape.placement), (int)d->shape.k, cf_replay_name(d->shape.replay),
             (int)d->limits.chunks, d->limits.chunks_by_stage ? " (by stage)" : "", d->split_backward,
             d->timing == NULL   ? "unit"
             : d->timing->stages ? "uneven"
                                 : "even",
             d->timing != NULL && d->timing->latency + d->timing->seconds_per_token > 0 ? ", transfers" : "");
}

static void judge(tally *sum, const problem *p, const cf_bound *bounds, int64_t n, double makespan) {
    int64_t i;
    for (i = 0; i < n; i++) {
        char text[160];
        if (CHECK(bounds[i].value <= DBL_MAX) && bounds[i].value <= makespan * (1 + 1e-12)) continue;
        sum->n_broken[i]++;
        sum->names[i] = bounds[i].name;
        if (bounds[i].value / makespan <= sum->worst[i]) continue;
        sum->worst[i] = bounds[i].value / makespan;
        tell(text, sizeof text, p);
        snprintf(sum->example[i], sizeof sum->example[i], "%g against %g, %s", bounds[i].value, makespan, text);
    }
}

/* Returns the makespan of a schedule that must be sound, or -1. Counts each bound that exceeds it. */
static double try_schedule(const problem *p, const cf_schedule *schedule, tally *sum) {
    cf_validate_desc rules = {0};
    cf_simulate_desc simulate = {0};
    cf_timeline *timeline = NULL;
    cf_error error = {0};
    double makespan;
    rules.limits.chunks = simulate.limits.chunks = p->desc.limits.chunks;
    rules.limits.chunks_by_stage = simulate.limits.chunks_by_stage = p->desc.limits.chunks_by_stage;
    simulate.timing = p->desc.timing;
    if (cf_schedule_validate(p->plan, schedule, &rules, NULL, &error) != CF_OK ||
        cf_simulate(p->plan, schedule, &simulate, &timeline, &error) != CF_OK) {
        FAIL("%s", error.text);
        return -1;
    }
    makespan = timeline->makespan;
    judge(sum, p, timeline->bounds, timeline->n_bounds, makespan);
    sum->bound = timeline->bound;
    sum->n_schedules++;
    cf_timeline_free(timeline);
    return makespan;
}

/* Returns the shortest makespan of n random schedules, at least half of them greedy; -1 if there is none. */
static double try_random_schedules(harness_rng *rng, const problem *p, int n, tally *sum) {
    double shortest = -1;
    int i;
    for (i = 0; i < n; i++) {
        cf_schedule *schedule = random_schedule(rng, p->plan, &p->desc, placement_of(p), i % 3 != 2);
        double makespan;
        CHECK(schedule != NULL);
        if (schedule == NULL) return -1;
        makespan = try_schedule(p, schedule, sum);
        if (shortest < 0 || makespan < shortest) shortest = makespan;
        naive_free(schedule);
    }
    return shortest;
}

static void add_ratio(tally *sum, double makespan) {
    if (makespan <= 0 || sum->bound <= 0) return;
    sum->n_problems++;
    sum->log_ratio += log(makespan / sum->bound);
}

static double mean_ratio(const tally *sum) {
    return sum->n_problems > 0 ? exp(sum->log_ratio / (double)sum->n_problems) : 0;
}

static void report_broken(const tally *sum) {
    int i;
    harness_note("%s", "");
    for (i = 0; i < CF_MAX_BOUNDS; i++)
        if (sum->names[i] != NULL)
            FAIL("\"%s\" is above %d of %d makespans; the worst: %s", sum->names[i], (int)sum->n_broken[i],
                 (int)sum->n_schedules, sum->example[i]);
}

/* ---- tests ---- */

/* Checks that the exact solver's optimum is a sound schedule of this makespan, and that no bound exceeds it. */
static void check_optimum(problem *p, double optimum) {
    tally sum = {0};
    exact_answer exact = exact_optimum(p->plan, &p->desc, placement_of(p), EXACT_UNKNOWN, 100000);
    cf_schedule *schedule = random_schedule_from(p->plan, &p->desc, placement_of(p), exact.actions, exact.n_actions);
    CHECK_INT(exact.makespan, optimum);
    CHECK_INT(try_schedule(p, schedule, &sum), optimum);
    harness_report("optimum %g, bound %g", optimum, sum.bound);
    report_broken(&sum);
    naive_free(schedule);
}

/* Four chunks of one token on three stages with room for one chunk each. The short schedule drops chunks. */
TEST(four_standalone_chunks) {
    const int64_t lengths[] = {1, 1, 1, 1};
    cf_pack_desc pack = {0};
    problem p = {0};
    pack.chunk_size = 1;
    CHECK_INT(cf_pack(lengths, 4, &pack, &p.plan, NULL), CF_OK);
    REQUIRE(p.plan != NULL);
    p.desc.kind = CF_SCHEDULE_BEST;
    p.desc.shape.n_stages = 3;
    p.desc.shape.n_virtual = p.desc.shape.k = p.desc.limits.chunks = 1;
    p.desc.shape.replay = CF_REPLAY_LOCAL;
    check_optimum(&p, 18);
    cf_plan_free(p.plan);
}

/* Slices of 3, 1 and 1 tokens, of which K allows keeping two: the last, which is needed first, and the long one. */
TEST(a_long_chunk_is_kept) {
    const int64_t lengths[] = {5};
    cf_pack_desc pack = {0};
    problem p = {0};
    pack.chunk_size = 3;
    pack.split = CF_SPLIT_COST;
    pack.cost.per_pair = 1;
    CHECK_INT(cf_pack(lengths, 1, &pack, &p.plan, NULL), CF_OK);
    REQUIRE(p.plan != NULL && CHECK_INT(p.plan->n_chunks, 3));
    p.desc.kind = CF_SCHEDULE_BEST;
    p.desc.shape.n_stages = p.desc.shape.n_virtual = 1;
    p.desc.shape.k = 2;
    check_optimum(&p, 16);
    cf_plan_free(p.plan);
}

/* A chunk of eight tokens needs 3 x 24 to go through three stages and back. A chunk of one token delays it by a
   forward, wherever that runs, though no stage has more than 27 to do. */
TEST(a_short_chunk_holds_up_a_long_one) {
    const int64_t lengths[] = {8, 1};
    cf_pack_desc pack = {0};
    problem p = {0};
    pack.chunk_size = 8;
    pack.max_slices = 1;
    CHECK_INT(cf_pack(lengths, 2, &pack, &p.plan, NULL), CF_OK);
    REQUIRE(p.plan != NULL);
    p.desc.kind = CF_SCHEDULE_BEST;
    p.desc.shape.n_stages = 3;
    p.desc.shape.n_virtual = p.desc.shape.k = 1;
    p.desc.limits.chunks = 2;
    p.desc.shape.replay = CF_REPLAY_LOCAL;
    check_optimum(&p, 73);
    cf_plan_free(p.plan);
}

/* Tries random schedules of problems drawn from these seeds. */
static void try_problems(uint64_t first, uint64_t last, int some_split) {
    tally sum = {0};
    uint64_t seed;
    for (seed = first; seed <= last; seed++) {
        harness_rng rng = {seed};
        problem p;
        char text[160];
        double shortest;
        p.plan = draw_plan(&rng, 6, 5);
        REQUIRE(p.plan != NULL);
        draw_options(&rng, &p, MOST_STAGES, some_split);
        p.seed = seed;
        tell(text, sizeof text, &p);
        harness_note("%s", text);
        shortest = try_random_schedules(&rng, &p, 6, &sum);
        add_ratio(&sum, shortest);
        cf_plan_free(p.plan);
    }
    report_broken(&sum);
    CHECK(sum.n_schedules >= 5 * (int64_t)(last - first));
    harness_report("%d schedules; the shortest of each problem is %.3f x the bound", (int)sum.n_schedules,
                   mean_ratio(&sum));
}

/* Tiny pipelines with a known optimum: no bound exceeds it, its schedule is sound, and none is shorter. */
static void try_optima(uint64_t last, int some_split, int64_t most_nodes) {
    tally sum = {0};
    uint64_t seed;
    int64_t reached = 0;
    for (seed = 1; seed <= last; seed++) {
        harness_rng rng = {seed};
        problem p;
        exact_answer exact;
        char text[160];
        double shortest;
        p.plan = draw_plan(&rng, 3, 3);
        REQUIRE(p.plan != NULL);
        draw_options(&rng, &p, 3, some_split);
        p.seed = seed;
        tell(text, sizeof text, &p);
        harness_note("%s", text);
        shortest = try_random_schedules(&rng, &p, 6, &sum);
        exact = exact_optimum(p.plan, &p.desc, placement_of(&p), EXACT_UNKNOWN, most_nodes);
        if (exact.makespan >= 0) {
            cf_schedule *schedule =
                random_schedule_from(p.plan, &p.desc, placement_of(&p), exact.actions, exact.n_actions);
            double makespan = try_schedule(&p, schedule, &sum);
            CHECK(fabs(makespan - exact.makespan) <= 1e-9 * makespan);
            CHECK(exact.makespan <= shortest * (1 + 1e-9));
            reached += shortest <= exact.makespan * (1 + 1e-9);
            add_ratio(&sum, exact.makespan);
            naive_free(schedule);
        }
        cf_plan_free(p.plan);
    }
    report_broken(&sum);
    CHECK(2 * sum.n_problems > (int64_t)last);
    harness_report("%d of %d solved, the optimum is %.3f x the bound; random schedules reach %d", (int)sum.n_problems,
                   (int)last, mean_ratio(&sum), (int)reached);
}

/* A long sequence, and perhaps a short one. When the backwards of a chain begin, its last chunk is kept, so only full
   chunks are replayed. A bound that counted the shorter last chunk as replayed would exceed the optimum, which the
   search finds here. */
TEST(a_chain_s_last_chunk_is_no_replay) {
    int64_t lengths[2], k;
    for (lengths[0] = 5; lengths[0] <= 24; lengths[0]++)
        for (lengths[1] = 0; lengths[1] <= 8; lengths[1] += 4)
            for (k = 2; k <= 3; k++) {
                int64_t n = (lengths[0] + 3) / 4, n_stages;
                for (n_stages = 1; n_stages <= 5; n_stages++) {
                    cf_pack_desc pack = {0};
                    cf_schedule_desc desc = {0};
                    cf_search_report report;
                    cf_schedule *schedule = NULL;
                    cf_plan *plan = NULL;
                    double work = (double)(3 * (lengths[0] + lengths[1]) + 4 * (n > k ? n - k : 0));
                    pack.chunk_size = 4;
                    pack.no_tails = 1;
                    REQUIRE(cf_pack(lengths, 2, &pack, &plan, NULL) == CF_OK);
                    desc.kind = CF_SCHEDULE_BEST;
                    desc.shape.replay = CF_REPLAY_LOCAL;
                    desc.shape.n_stages = n_stages;
                    desc.shape.k = k;
                    desc.limits.chunks = CF_NO_LIMIT;
                    desc.max_tries = 1000;
                    desc.report = &report;
                    REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
                    harness_note("%d and %d tokens, K %d, %d stages", (int)lengths[0], (int)lengths[1], (int)k,
                                 (int)n_stages);
                    CHECK(report.bound == report.makespan && report.n_tried > 0);
                    if (n_stages == 1) CHECK(report.bound == work);
                    cf_schedule_free(schedule);
                    desc.limits.chunks = 1; /* whatever K is, one chunk is kept */
                    REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
                    for (work = 0, schedule->shape.k = k; schedule->shape.k > 0; schedule->shape.k -= k - 1) {
                        cf_timeline *timeline = NULL;
                        REQUIRE(cf_simulate(plan, schedule, NULL, &timeline, NULL) == CF_OK);
                        CHECK(schedule->shape.k == k || timeline->bounds[0].value == work);
                        work = timeline->bounds[0].value;
                        cf_timeline_free(timeline);
                    }
                    cf_schedule_free(schedule);
                    cf_plan_free(plan);
                }
            }
    harness_note("%s", "");
}

TEST(no_random_schedule_beats_a_bound) { try_problems(1, (uint64_t)harness_rounds(250, 80), 0); }
TEST(nor_with_some_backwards_split) { try_problems(1, (uint64_t)harness_rounds(100, 40), 1); }
TEST(no_bound_is_above_an_optimum) { try_optima(60, 0, 500); }

/* The same with far more schedules. */
TEST(no_random_schedule_of_thousands_beats_a_bound) { try_problems(251, (uint64_t)harness_rounds(4000, 1250), 0); }
TEST(nor_of_thousands_with_some_backwards_split) { try_problems(101, (uint64_t)harness_rounds(2000, 600), 1); }
TEST(no_bound_is_above_an_optimum_of_hundreds) { try_optima(600, 0, 4000); }
TEST(nor_of_hundreds_with_some_backwards_split) { try_optima(300, 1, 4000); }

SUITE(bounds, CASE(four_standalone_chunks), CASE(a_long_chunk_is_kept), CASE(a_short_chunk_holds_up_a_long_one),
      CASE(a_chain_s_last_chunk_is_no_replay), CASE(no_random_schedule_beats_a_bound),
      CASE(nor_with_some_backwards_split), CASE(no_bound_is_above_an_optimum));

/* These belong to the program without sanitizers: see the Makefile. */
SUITE(many_bounds, CASE(no_random_schedule_of_thousands_beats_a_bound),
      CASE(nor_of_thousands_with_some_backwards_split), CASE(no_bound_is_above_an_optimum_of_hundreds),
      CASE(nor_of_hundreds_with_some_backwards_split));
