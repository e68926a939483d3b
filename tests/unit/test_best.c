/* Tests the kind `best` against the exact solver, the fixed schedules and the bounds. */

#include "chunkflow.h"
#include "../reference/exact.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"
#include "../reference/suite.h"

#include <math.h>
#include <string.h>

/* Makes a schedule, validates it and simulates it. Returns the makespan. */
static double makespan_of(const cf_plan *plan, const cf_schedule_desc *desc, double *bound) {
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_simulate_desc simulate = {0};
    cf_error error = {0};
    const char *fault;
    double makespan;
    simulate.timing = desc->timing;
    simulate.limits.chunks = desc->limits.chunks;
    simulate.limits.chunks_by_stage = desc->limits.chunks_by_stage;
    simulate.no_bounds = bound == NULL;
    if (cf_schedule_make(plan, desc, &schedule, &error) != CF_OK ||
        cf_simulate(plan, schedule, &simulate, &timeline, &error) != CF_OK) {
        FAIL("%s", error.text);
        cf_schedule_free(schedule);
        return -1;
    }
    fault = plan->chunks_per_rank <= 40 ? pipeline_fault(plan, schedule, desc) : NULL;
    if (fault) FAIL("broken rule: %s", fault);
    makespan = timeline->makespan;
    if (bound) *bound = timeline->bound;
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    return makespan;
}

/* Draws batch i of the suite and the options of its schedule. */
static cf_plan *draw_batch(int i, suite_batch *batch, cf_schedule_desc *desc) {
    cf_plan *plan = NULL;
    suite_draw(i, batch);
    CHECK_INT(cf_pack(batch->lengths, batch->n, &batch->pack, &plan, NULL), CF_OK);
    *desc = batch->schedule;
    desc->timing = &batch->timing;
    return plan;
}

TEST(paper_example) {
    const int64_t lengths[] = {1, 1, 2, 4}, caps[] = {4, 4, 3, 2};
    const struct {
        int64_t k;
        double most;
    } cases[] = {{1, 46}, {2, 42}};
    cf_plan *plan = naive_pack(lengths, 4, 2);
    cf_schedule_desc desc;
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double bound;
        memset(&desc, 0, sizeof desc);
        desc.kind = CF_SCHEDULE_BEST;
        desc.shape.n_stages = 4;
        desc.shape.k = cases[i].k;
        harness_note("K %d", (int)desc.shape.k);
        CHECK(makespan_of(plan, &desc, &bound) <= cases[i].most);
    }
    memset(&desc, 0, sizeof desc);
    desc.kind = CF_SCHEDULE_BEST;
    desc.shape.n_stages = 4;
    desc.shape.k = 2;
    desc.limits.chunks_by_stage = caps;
    CHECK_INT(makespan_of(plan, &desc, NULL), 42); /* 42.86 %, with 4, 4, 3, 2 chunks */
    cf_plan_free(plan);
}

/* ---- all small pipelines ---- */

typedef struct tally {
    int64_t solved, optimal;
    double worst; /* makespan / optimum - 1 */
} tally;

static void compare(const cf_plan *plan, cf_schedule_desc *desc, tally *sum) {
    cf_search_report report;
    exact_answer exact;
    double ratio;
    desc->report = &report;
    makespan_of(plan, desc, NULL);
    exact = exact_makespan(plan, desc, report.makespan, 100000);
    if (exact.makespan < 0) return;
    ratio = report.makespan / exact.makespan - 1;
    CHECK(report.bound <= exact.makespan * (1 + 1e-12));
    sum->solved++;
    sum->optimal += ratio < 1e-9;
    if (ratio > sum->worst) sum->worst = ratio;
}

/* Every batch of up to 3 sequences of 1, 2, 3 or 5 tokens in chunks of 2, on 2 and 3 stages, K = 1 and 2;
   quick: each batch on a third of these. */
static void compare_all(int64_t limit, int split, tally *sum) {
    static const int64_t sizes[] = {1, 2, 3, 5, 0}; /* 0: no sequence */
    int a, b, c, combination;
    for (a = 0; a < 4; a++)
        for (b = a; b < 5; b++)
            for (c = b; c < 5; c++) {
                const int64_t lengths[3] = {sizes[a], sizes[b], sizes[c]};
                cf_plan *plan = naive_pack_alone(lengths, 3, 2);
                combination = harness_rounds(0, (a + b + c) % 3);
                for (; combination < 4 && plan->n_chunks <= 5; combination += harness_rounds(1, 3)) {
                    cf_schedule_desc desc = {0};
                    desc.kind = CF_SCHEDULE_BEST;
                    desc.shape.n_stages = 2 + combination % 2;
                    desc.shape.k = 1 + combination / 2 % 2;
                    desc.limits.chunks = limit > 0 ? limit : CF_NO_LIMIT;
                    desc.split_backward = split;
                    harness_note("lengths %d %d %d, %d stages, K %d, limit %d", (int)sizes[a], (int)sizes[b],
                                 (int)sizes[c], (int)desc.shape.n_stages, (int)desc.shape.k, (int)limit);
                    compare(plan, &desc, sum);
                }
                cf_plan_free(plan);
            }
}

/* All schedules are optimal without a limit, and nearly all with one. */
static void check_small_pipelines(int64_t limit, int split_backward) {
    tally sum = {0, 0, 0};
    compare_all(limit, split_backward, &sum);
    CHECK(sum.solved > harness_rounds(75, 25));
    CHECK(sum.optimal * 100 >= sum.solved * (limit > 0 ? 98 : 100));
    CHECK(sum.worst <= 0.03);
    harness_report("%d of %d optimal, at worst %.1f %% off", (int)sum.optimal, (int)sum.solved, sum.worst * 100);
}

TEST(optimal_on_small_pipelines) { check_small_pipelines(0, 0); }
TEST(optimal_on_small_pipelines_under_limits) { check_small_pipelines(2, 0); }
TEST(optimal_on_small_pipelines_with_split_backwards) { check_small_pipelines(0, 1); }

/* ---- the suite of batches ---- */

static const cf_schedule_kind fixed_kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B};

/* Returns the length of the critical path if the last K chunks of each chain are kept, as the fixed kinds do. This does
   not bound other schedules, which may drop other chunks. But for long chains hardly any schedule is shorter. */
static double fixed_path(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule_desc fixed = {0};
    cf_schedule *schedule = NULL;
    cf_graph *graph = NULL;
    double *earliest, length;
    fixed.kind = CF_SCHEDULE_PAPER;
    fixed.shape.n_stages = desc->shape.n_stages;
    fixed.shape.k = desc->shape.k;
    fixed.shape.replay = desc->shape.replay;
    CHECK_INT(cf_schedule_make(plan, &fixed, &schedule, NULL), CF_OK);
    CHECK_INT(cf_graph_make(plan, schedule, desc->timing, NULL, &graph, NULL), CF_OK);
    cf_schedule_free(schedule);
    if (graph == NULL) return 0;
    earliest = (double *)harness_guard_new((size_t)(graph->n_nodes + 1) * sizeof *earliest);
    length = naive_longest(graph, NULL, 1, earliest);
    harness_guard_free(earliest);
    cf_graph_free(graph);
    return length;
}

/* Checks the geometric mean of makespan / bound, by class of batches. If the critical path of the fixed kinds is longer
   than the bound, it is used instead. Few candidates are tried, so that the test stays short. */
TEST(suite_is_near_the_bound) {
    double sum[SUITE_CLASSES] = {0};
    char text[200] = "";
    int i;
    for (i = 0; i < SUITE_BATCHES; i++) {
        static suite_batch batch;
        cf_schedule_desc desc;
        cf_plan *plan = NULL;
        double makespan, bound = 0;
        REQUIRE((plan = draw_batch(i, &batch, &desc)) != NULL);
        desc.kind = CF_SCHEDULE_BEST;
        desc.limits.chunks = CF_NO_LIMIT;
        desc.max_tries = plan->n_chunks > 100 ? 12 : 40;
        harness_note("batch %d, %s", i, suite_class_name(batch.class_id));
        makespan = makespan_of(plan, &desc, &bound);
        CHECK(makespan >= bound * (1 - 1e-12));
        sum[batch.class_id] += log(makespan / fmax(bound, fixed_path(plan, &desc)));
        cf_plan_free(plan);
    }
    for (i = 0; i < SUITE_CLASSES; i++) {
        double mean = exp(sum[i] / SUITE_PER_CLASS);
        harness_note("%s", suite_class_name(i));
        CHECK(mean <= 1.05);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s %.3f", i ? ", " : "", suite_class_name(i),
                 mean);
    }
    harness_report("%s", text);
}

/* Returns whether a fixed schedule holds no more state than `best` may by default. */
static int keeps_to_state(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = NULL;
    int keeps;
    if (desc->limits.chunks <= 0 && desc->limits.chunks_by_stage == NULL) return 1;
    CHECK_INT(cf_schedule_make(plan, desc, &schedule, NULL), CF_OK);
    keeps = schedule != NULL && pipeline_state_over_default(plan, schedule) <= 1;
    cf_schedule_free(schedule);
    return keeps;
}

/* Gives `best` the limits that each fixed schedule keeps to. */
TEST(suite_is_never_worse_than_a_fixed_schedule) {
    int i;
    for (i = 0; i < SUITE_BATCHES; i += harness_rounds(3, 11)) {
        static suite_batch batch;
        cf_schedule_desc desc;
        cf_plan *plan = NULL;
        int64_t limits[16], s;
        double best;
        size_t j;
        REQUIRE((plan = draw_batch(i, &batch, &desc)) != NULL);
        desc.max_tries = 6;
        for (s = 0; s < desc.shape.n_stages; s++) limits[s] = desc.shape.n_stages - s + i % 4;
        desc.limits.chunks = CF_NO_LIMIT;
        desc.limits.chunks_by_stage = i % 2 ? limits : NULL;
        desc.kind = CF_SCHEDULE_BEST;
        harness_note("batch %d, %s", i, suite_class_name(batch.class_id));
        best = makespan_of(plan, &desc, NULL);
        for (j = 0; j < 3; j++) {
            desc.kind = fixed_kinds[j];
            if (keeps_to_state(plan, &desc)) CHECK(best <= makespan_of(plan, &desc, NULL) * (1 + 1e-12));
        }
        desc.kind = CF_SCHEDULE_BEST;
        desc.split_backward = 1;
        best = makespan_of(plan, &desc, NULL);
        desc.kind = CF_SCHEDULE_ZERO_BUBBLE;
        if (keeps_to_state(plan, &desc)) CHECK(best <= makespan_of(plan, &desc, NULL) * (1 + 1e-12));
        desc.split_backward = 0;
        desc.limits.chunks_by_stage = NULL;
        desc.shape.n_virtual = 2;
        desc.limits.chunks = i % 2 ? 4 * desc.shape.n_stages : CF_NO_LIMIT;
        desc.kind = CF_SCHEDULE_BEST;
        best = makespan_of(plan, &desc, NULL);
        desc.kind = CF_SCHEDULE_INTERLEAVED;
        if (keeps_to_state(plan, &desc)) CHECK(best <= makespan_of(plan, &desc, NULL) * (1 + 1e-12));
        cf_plan_free(plan);
    }
}

/* ---- limits ---- */

/* 16 equal chunks of one token with split backwards, on a V of two virtual stages a stage. Qi et al. (Pipeline
   Parallelism with Controllable Memory, 2024) show which makespans are possible with half, or three eighths, of 1F1B's
   memory. */
TEST(a_v_under_tight_limits) {
    static const struct {
        int64_t n_stages, limit; /* in halves of a chunk */
        double most;
    } cases[] = {{4, 4, 54}, {8, 8, 60.5}, {8, 6, 69.5}};
    cf_timing timing;
    cf_plan *plan = pipeline_sixteen(&timing);
    int i;
    for (i = 0; i < 3; i++) {
        cf_schedule_desc desc = {0};
        double bound;
        desc.shape.n_stages = cases[i].n_stages;
        desc.limits.chunks = cases[i].limit;
        desc.shape.n_virtual = 2;
        desc.shape.placement = CF_PLACEMENT_V;
        desc.split_backward = 1;
        desc.timing = &timing;
        harness_note("%d stages, limit %d", (int)desc.shape.n_stages, (int)desc.limits.chunks);
        CHECK(makespan_of(plan, &desc, &bound) <= cases[i].most);
    }
    cf_plan_free(plan);
}

/* If each stage keeps its inputs, room for one chunk is enough for any number of virtual stages and of tries. The bytes
   that a refusal asks for are enough as well, even if an input takes more than activations. 31 is the shortest possible
   makespan of four equal chunks on 2 x 2 virtual stages, with room for two chunks on one stage and one on the other. */
TEST(fewer_places_than_virtual_stages) {
    static const int64_t ones[] = {1, 1, 1, 1}, two_and_one[] = {2, 1};
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    cf_plan *plan = naive_pack(ones, 4, 1);
    cf_error error;
    uint64_t seed;
    int64_t s;
    desc.shape.n_stages = desc.shape.n_virtual = 2;
    desc.limits.chunks_by_stage = two_and_one;
    CHECK(makespan_of(plan, &desc, NULL) <= 31);
    cf_plan_free(plan);
    for (seed = 0; seed < (uint64_t)harness_rounds(600, 60); seed++) {
        problem p;
        harness_rng rng = {seed};
        problem_draw(&rng, NULL, &p);
        memset(&p.desc.limits, 0, sizeof p.desc.limits);
        p.desc.kind = CF_SCHEDULE_BEST;
        p.desc.shape.replay = CF_REPLAY_LOCAL;
        p.desc.shape.n_virtual = harness_between(&rng, 2, 3);
        p.desc.shape.placement = (cf_placement)harness_between(&rng, CF_PLACEMENT_LOOP, CF_PLACEMENT_V);
        p.desc.forwards_first = 0;
        p.desc.max_tries = seed % 2 ? harness_between(&rng, 1, 12) : 30;
        for (s = 0; s < PROBLEM_MOST_STAGES; s++)
            p.limits[s] = harness_between(&rng, 1, p.desc.shape.n_virtual);
        p.limits[0] = 1;
        p.desc.limits.chunks_by_stage = p.limits;
        CHECK(makespan_of(p.plan, &p.desc, NULL) >= 0);
        p.desc.limits.per_token.activations = harness_between(&rng, 0, 8);
        p.desc.limits.per_token.boundary = harness_between(&rng, 1, 16);
        p.desc.limits.bytes = 1;
        if (cf_schedule_make(p.plan, &p.desc, &schedule, &error) == CF_ERROR_INFEASIBLE) {
            CHECK_STR(error.field, "limits.bytes");
            p.desc.limits.bytes = error.wanted;
            CHECK(makespan_of(p.plan, &p.desc, NULL) >= 0);
        } else {
            cf_schedule_free(schedule);
        }
        problem_free(&p);
    }
}

/* Nothing promises that a larger limit never makes a schedule longer, because the search is a heuristic. But for at
   most one limit in thirty, a smaller limit gives a makespan shorter by more than half a percent. Every schedule is
   validated. */
TEST(a_larger_limit_is_hardly_ever_worse) {
    int64_t n_pairs = 0, n_worse = 0, n_much = 0, limit;
    double worst = 1;
    int i;
    for (i = 3; i < SUITE_BATCHES; i += harness_rounds(10, 20)) {
        static suite_batch batch;
        cf_schedule_desc desc;
        cf_plan *plan = NULL;
        double least = 1e300;
        REQUIRE((plan = draw_batch(i, &batch, &desc)) != NULL);
        desc.max_tries = harness_rounds(0, 12); /* 0: the default number */
        for (limit = 1; limit <= 16 && plan->n_chunks <= 64; limit++) {
            double makespan;
            desc.limits.chunks = limit;
            harness_note("batch %d, %s, limit %d", i, suite_class_name(batch.class_id), (int)limit);
            makespan = makespan_of(plan, &desc, NULL);
            n_pairs++;
            n_worse += makespan > least * (1 + 1e-12);
            n_much += makespan > least * 1.005;
            worst = fmax(worst, makespan / least);
            CHECK(makespan <= least * 1.02);
            least = fmin(least, makespan);
        }
        cf_plan_free(plan);
    }
    CHECK(n_pairs > harness_rounds(250, 160));
    CHECK(n_much * harness_rounds(30, 20) <= n_pairs); /* with fewer limits, each exception weighs more */
    harness_report("of %d limits %d are worse than one below, %d by more than 0.5 %%, at worst by %.2f %%",
                   (int)n_pairs, (int)n_worse, (int)n_much, (worst - 1) * 100);
}

/* Without a limit, the schedule is hardly longer than under the default limit. */
TEST(no_limit_is_hardly_worse_than_the_default_one) {
    static const int64_t found[] = {7, 42, 3, 25, 3, 6, 6, 2, 2, 3, 5, 5, 3, 3, 8, 1, 1, 5, 60, 6};
    int64_t n_compared = 0, n_shorter = 0, n_single = 0;
    double ratios = 0; /* sum over the schedules without virtual stages */
    int i;
    for (i = 0; i < harness_rounds(60, 12); i++) {
        static suite_batch batch;
        cf_schedule_desc desc;
        cf_plan *plan = NULL;
        suite_draw(7 * i + 1, &batch);
        if (i > 0) CHECK_INT(cf_pack(batch.lengths, batch.n, &batch.pack, &plan, NULL), CF_OK);
        else plan = naive_pack(found, 20, 8);
        REQUIRE(plan != NULL);
        memset(&desc, 0, sizeof desc);
        desc.shape.n_stages = i > 0 ? batch.schedule.shape.n_stages : 4;
        desc.shape.k = i > 0 ? 1 + i % 4 : 6;
        desc.shape.n_virtual = i % 3 == 0 ? 3 : i % 2 + 1;
        desc.shape.placement = desc.shape.n_virtual == 2 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
        desc.timing = i > 0 ? &batch.timing : NULL;
        desc.max_tries = i > 0 ? 12 : 0;
        if (plan->n_chunks * desc.shape.n_stages * desc.shape.n_virtual <= 1000) {
            double by_default, unlimited;
            harness_note("batch %d", i);
            by_default = makespan_of(plan, &desc, NULL);
            desc.limits.chunks = CF_NO_LIMIT;
            unlimited = makespan_of(plan, &desc, NULL);
            CHECK(unlimited > 0 && unlimited <= by_default * 1.02);
            if (desc.shape.n_virtual == 1) {
                ratios += unlimited / by_default;
                n_single++;
            }
            n_compared++;
            n_shorter += unlimited < by_default * (1 - 1e-12);
        }
        cf_plan_free(plan);
    }
    CHECK(n_compared >= harness_rounds(30, 6));
    CHECK(ratios > 0 && ratios <= (double)n_single);
    harness_report("%d of %d batches are shorter without a limit; on one row they take %.4f of the time",
                   (int)n_shorter, (int)n_compared, ratios / (double)n_single);
}

/* A limit larger than anything that a stage could hold gives the same schedule as no limit, if both try the same number
   of candidates. */
TEST(a_limit_beyond_all_chunks) {
    static const int64_t lengths[] = {7, 42, 3, 25, 3, 6};
    cf_plan *plan = naive_pack(lengths, 6, 8);
    cf_search_report reports[3];
    cf_schedule *schedules[3] = {NULL, NULL, NULL};
    int64_t n_virtual;
    for (n_virtual = 1; n_virtual <= 2; n_virtual++) {
        cf_schedule_desc desc;
        int64_t i, enough = 1;
        while (enough < 2 * plan->n_chunks * n_virtual) enough *= 2;
        memset(&desc, 0, sizeof desc);
        memset(reports, 0, sizeof reports);
        desc.shape.n_stages = 4;
        desc.shape.n_virtual = n_virtual;
        desc.shape.k = 3;
        desc.max_tries = n_virtual == 1 ? 0 : 40;
        for (i = 0; i < 3; i++) {
            desc.limits.chunks = i == 0 ? CF_NO_LIMIT : i == 1 ? enough : enough << 40;
            desc.report = &reports[i];
            CHECK_INT(cf_schedule_make(plan, &desc, &schedules[i], NULL), CF_OK);
            REQUIRE(schedules[i] != NULL);
        }
        CHECK(reports[0].n_tried > 0);
        for (i = 1; i < 3; i++) {
            CHECK_INT(reports[0].n_tried, reports[i].n_tried);
            CHECK_INT(schedules[0]->n_actions, schedules[i]->n_actions);
            CHECK(memcmp(schedules[0]->actions, schedules[i]->actions,
                         (size_t)schedules[0]->n_actions * sizeof(cf_action)) == 0);
        }
        for (i = 0; i < 3; i++) cf_schedule_free(schedules[i]);
    }
    cf_plan_free(plan);
}

/* On so many stages, one dispatch takes as long as the whole search should. `best` then tries only the fixed schedules
   and, because there is a limit, two dispatches. */
TEST(very_many_stages) {
    const int64_t lengths[] = {1, 2, 3};
    cf_plan *plan = naive_pack_alone(lengths, 3, 2);
    cf_schedule_desc desc = {0};
    cf_search_report report;
    cf_schedule *schedule = NULL;
    cf_validate_desc validate = {0};
    desc.shape.n_stages = 65536;
    desc.limits.chunks = 2;
    desc.report = &report;
    validate.limits.chunks = 2;
    CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
    REQUIRE(schedule != NULL);
    CHECK_INT(cf_schedule_validate(plan, schedule, &validate, NULL, NULL), CF_OK);
    CHECK(report.n_tried <= 4 + 2);
    CHECK(report.makespan <= report.fixed_makespan);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* ---- how good ---- */

/* The quality of one kind of small batches. It has the geometric mean of makespan / bound of 24 batches, for `best`
   with one to sixteen candidates, and the mean bytes allocated. The limits are measured and may not rise: a policy that
   makes schedules a little longer on average is seen only here. If you change the search or a kind, measure again and
   say why it changed. */
typedef struct quality {
    const char *name;
    cf_schedule_kind kind; /* 0: best */
    cf_replay replay;
    int64_t n_virtual;
    cf_placement placement;
    int split;
    int64_t limit; /* limits.chunks: CF_NO_LIMIT; 0: default; more: so many halves of n_stages x n_virtual */
    int by_bytes;  /* 1: some_bytes is the limit, instead of chunks */
    int in_trees;  /* 1: sequences begin alike */
    double mean;
    int64_t bytes;
} quality;

#define LOCAL CF_REPLAY_LOCAL, 1, CF_PLACEMENT_LOOP
#define THROUGH CF_REPLAY_PIPELINE, 1, CF_PLACEMENT_LOOP
#define ROWS CF_REPLAY_LOCAL, 2, CF_PLACEMENT_LOOP
#define IN_A_V CF_REPLAY_LOCAL, 2, CF_PLACEMENT_V

static const quality qualities[] = {
    {"no limit", CF_SCHEDULE_BEST, LOCAL, 0, CF_NO_LIMIT, 0, 0, 1.061194, 29035},
    {"default", CF_SCHEDULE_BEST, LOCAL, 0, 0, 0, 0, 1.068490, 29106},
    {"a chunk a stage", CF_SCHEDULE_BEST, LOCAL, 0, 2, 0, 0, 1.086651, 29104},
    {"half of that", CF_SCHEDULE_BEST, LOCAL, 0, 1, 0, 0, 1.333611, 29106},
    {"bytes", CF_SCHEDULE_BEST, LOCAL, 0, 0, 1, 0, 1.202072, 29070},
    {"split", CF_SCHEDULE_BEST, LOCAL, 1, 2, 0, 0, 1.063869, 33695},
    {"two rows", CF_SCHEDULE_BEST, ROWS, 0, 0, 0, 0, 1.149020, 55058},
    {"a V without a limit", CF_SCHEDULE_BEST, IN_A_V, 0, CF_NO_LIMIT, 0, 0, 1.042073, 54988},
    {"a split V", CF_SCHEDULE_BEST, IN_A_V, 1, 2, 0, 0, 1.046476, 64287},
    {"a split V in bytes", CF_SCHEDULE_BEST, IN_A_V, 1, 0, 1, 0, 1.092885, 64254},
    {"trees", CF_SCHEDULE_BEST, LOCAL, 0, 0, 0, 1, 1.135035, 27160},
    {"trees in bytes", CF_SCHEDULE_BEST, LOCAL, 0, 0, 1, 1, 1.157117, 27125},
    {"split trees on two rows", CF_SCHEDULE_BEST, ROWS, 1, 2, 0, 1, 1.093809, 59805},
    {"paper", CF_SCHEDULE_PAPER, LOCAL, 0, 0, 0, 0, 1.086569, 9223},
    {"paper through the pipeline in bytes", CF_SCHEDULE_PAPER, THROUGH, 0, 0, 1, 0, 1.714951, 9258},
    {"paper in trees", CF_SCHEDULE_PAPER, LOCAL, 0, 2, 0, 1, 1.216893, 8936},
    {"gpipe", CF_SCHEDULE_GPIPE, LOCAL, 0, 2, 0, 0, 1.298581, 3041},
    {"gpipe of trees in bytes", CF_SCHEDULE_GPIPE, LOCAL, 0, 0, 1, 1, 1.298983, 2951},
    {"1f1b", CF_SCHEDULE_1F1B, LOCAL, 0, 0, 1, 0, 1.276387, 3048},
    {"1f1b without a limit", CF_SCHEDULE_1F1B, LOCAL, 0, 0, 0, 0, 1.154891, 3006},
    {"interleaved", CF_SCHEDULE_INTERLEAVED, ROWS, 0, 0, 0, 0, 1.054660, 40810},
    {"interleaved in bytes", CF_SCHEDULE_INTERLEAVED, ROWS, 0, 0, 1, 0, 1.140214, 40846},
    {"interleaved trees", CF_SCHEDULE_INTERLEAVED, ROWS, 0, 2, 0, 1, 1.130431, 38020},
    {"zero-bubble", CF_SCHEDULE_ZERO_BUBBLE, LOCAL, 0, 0, 0, 0, 1.105644, 24653},
    {"zero-bubble in a V", CF_SCHEDULE_ZERO_BUBBLE, IN_A_V, 0, 2, 0, 0, 1.071166, 46562},
};

/* Draws lengths, one in five of them up to eight chunks long. Every second batch has costs of pairs, every third has
   transfers, and every fourth has a slower first stage. In trees, each sequence except the long ones begins like the
   one before it. */
static cf_plan *draw_quality(harness_rng *rng, int i, int in_trees, cf_schedule_desc *desc, cf_timing *timing,
                             cf_stage_cost *stages) {
    int64_t lengths[16], n = harness_between(rng, 6, 16), j;
    cf_shared_prefix shares[16] = {{0, 0}};
    cf_pack_desc how = {0};
    cf_plan *plan = NULL;
    for (j = 0; j < n; j++) lengths[j] = harness_between(rng, 1, j % 5 == 0 ? 64 : 8);
    memset(timing, 0, sizeof *timing);
    timing->all.forward.per_token = 1;
    timing->all.forward.per_pair = i % 2 ? 1.0 / 32 : 0;
    timing->latency = i % 3 == 2 ? 0.5 : 0;
    timing->seconds_per_token = i % 3 == 2 ? 1.0 / 16 : 0;
    desc->shape.n_stages = harness_between(rng, 2, 6);
    desc->shape.k = harness_between(rng, 1, 3);
    for (j = 0; j < desc->shape.n_stages * desc->shape.n_virtual; j++) stages[j] = timing->all;
    stages[0].forward.per_token = 1.5;
    if (i % 4 == 1) {
        timing->stages = stages;
        memset(&timing->all, 0, sizeof timing->all);
    }
    desc->timing = timing;
    how.chunk_size = 8;
    if (in_trees) how.min_shared_prefix = 1;
    for (j = 1; j < n && in_trees; j++) {
        int64_t most = lengths[j - 1] < lengths[j] ? lengths[j - 1] : lengths[j];
        shares[j].with = j - 1;
        shares[j].tokens = j % 5 == 0 ? 0 : harness_between(rng, 0, most);
    }
    if (in_trees) how.shared_prefixes = shares;
    CHECK_INT(cf_pack(lengths, n, &how, &plan, NULL), CF_OK);
    return plan;
}

/* Returns bytes for the activations of n_stages / 2 + 2 chunks and twice the longest chain's state. In trees, it has
   room for all state. */
static int64_t some_bytes(const cf_plan *plan, const cf_schedule_desc *desc) {
    int64_t longest = 0, all = 0, i;
    for (i = 0; i < plan->n_chunks; i++) {
        int64_t tokens = plan->chunks[i].state;
        if (tokens > longest) longest = tokens;
        all += tokens;
    }
    if (plan->order != NULL) longest = all / 2;
    return desc->shape.n_virtual * (2 * 2 * (longest + 8) + (desc->shape.n_stages + 4) / 2 * 64);
}

/* Makespan over bound of a sound schedule. */
static double ratio_of(const cf_plan *plan, const cf_schedule_desc *desc) {
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_simulate_desc simulate = {0};
    cf_validate_desc validate = {0};
    cf_error error = {0};
    double ratio = 0;
    simulate.timing = desc->timing;
    simulate.limits = validate.limits = desc->limits;
    if (cf_schedule_make(plan, desc, &schedule, &error) != CF_OK ||
        cf_schedule_validate(plan, schedule, &validate, NULL, &error) != CF_OK ||
        cf_simulate(plan, schedule, &simulate, &timeline, &error) != CF_OK)
        FAIL("%s", error.text);
    else ratio = timeline->makespan / timeline->bound;
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    return ratio;
}

static void check_quality(const quality *q) {
    static const int64_t all_tries[] = {1, 2, 3, 4, 6, 16};
    double sum = 0;
    int64_t bytes = 0;
    int i;
    for (i = 0; i < 24; i++) {
        harness_rng rng = {(uint64_t)(1000 * (i + 1))};
        cf_stage_cost stages[16];
        size_t needed = 0;
        cf_schedule_desc desc = {0};
        cf_timing timing;
        cf_plan *plan;
        double ratio;
        desc.kind = q->kind;
        desc.shape.replay = q->replay;
        desc.shape.n_virtual = q->n_virtual;
        desc.shape.placement = q->placement;
        plan = draw_quality(&rng, i, q->in_trees, &desc, &timing, stages);
        desc.split_backward = q->split;
        desc.limits.chunks = q->limit > 0 ? (q->limit * desc.shape.n_stages * q->n_virtual + 1) / 2 : q->limit;
        if (q->by_bytes) {
            desc.limits.per_token.activations = 8;
            desc.limits.per_token.state = 1;
            desc.limits.per_token.state_gradient = 1;
            desc.limits.per_token.boundary = 1;
            desc.limits.bytes = some_bytes(plan, &desc);
        }
        desc.max_tries = all_tries[i % 6];
        harness_note("%s, batch %d", q->name, i);
        ratio = ratio_of(plan, &desc);
        CHECK(ratio >= 1 - 1e-12);
        sum += log(ratio);
        CHECK_INT(cf_schedule_size(plan, &desc, &needed, NULL), CF_OK);
        bytes += (int64_t)needed;
        cf_plan_free(plan);
    }
    harness_note("%s: %.6f, %lld", q->name, exp(sum / 24), (long long)bytes / 24);
    CHECK(exp(sum / 24) <= q->mean + 1e-6);
    CHECK(bytes / 24 <= q->bytes || sizeof(void *) < 8);
}

TEST(is_as_good_as_it_was) {
    size_t i;
    for (i = 0; i < sizeof qualities / sizeof qualities[0]; i++) check_quality(&qualities[i]);
}

/* Above 2^18 passes few candidates are tried. The default call is then as near to its bound as below. */
TEST(large_batches_lose_nothing) {
    static const int64_t n_lengths[] = {1300, 5000, 6500};
    double ratios[3];
    int i;
    for (i = 0; i < 3; i++) {
        static int64_t lengths[6500];
        harness_rng rng = {7};
        cf_schedule_desc desc = {0};
        cf_search_report report = {0};
        cf_schedule *schedule = NULL;
        cf_plan *plan;
        int64_t j;
        for (j = 0; j < n_lengths[i]; j++) lengths[j] = harness_between(&rng, 1, 20) + (j % 50 == 0 ? 100 : 0);
        plan = naive_pack(lengths, n_lengths[i], 10);
        REQUIRE(plan != NULL);
        desc.shape.n_stages = 12;
        desc.report = &report;
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
        harness_note("%d chunks", (int)plan->n_chunks);
        CHECK((3 * plan->n_chunks * desc.shape.n_stages > 1 << 18) == (i == 2));
        ratios[i] = report.makespan / report.bound;
        if (i > 0) CHECK(ratios[i] <= ratios[i - 1] * 1.002);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    harness_report("%.4f, %.4f and %.4f of the bound", ratios[0], ratios[1], ratios[2]);
}

/* ---- the report, the number of tries, determinism ---- */

TEST(report_says_what_was_done) {
    uint64_t seed;
    for (seed = 1; seed <= (uint64_t)harness_rounds(300, 25); seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_search_report report;
        cf_schedule *once = NULL, *twice = NULL;
        cf_timeline *timeline = NULL;
        cf_simulate_desc simulate;
        problem_draw(&rng, NULL, &p);
        p.desc.kind = CF_SCHEDULE_BEST;
        p.desc.shape.replay = CF_REPLAY_LOCAL;
        p.desc.max_tries = 15 + (int64_t)seed % 40;
        p.desc.report = &report;
        memset(&simulate, 0, sizeof simulate);
        memset(&report, 0, sizeof report);
        simulate.timing = p.desc.timing;
        if (cf_schedule_make(p.plan, &p.desc, &once, NULL) == CF_OK) {
            CHECK_INT(cf_simulate(p.plan, once, &simulate, &timeline, NULL), CF_OK);
            REQUIRE(timeline != NULL);
            CHECK(fabs(report.makespan - timeline->makespan) <= 1e-9 * timeline->makespan);
            CHECK(report.bound <= report.makespan * (1 + 1e-12));
            CHECK(report.bound <= timeline->bound * (1 + 1e-12));
            if (!p.desc.split_backward)
                CHECK(report.bound >= timeline->bound * (1 - 1e-12)); /* the bound for all such schedules, and the bound
                                                                         for this one */
            CHECK(report.makespan <= report.fixed_makespan);
            CHECK(report.bound > 0 ? fabs(report.gap - (report.makespan / report.bound - 1)) < 1e-12 : report.gap <= 0);
            CHECK_INT(report.max_tries, p.desc.max_tries);
            CHECK(report.n_tried <= report.max_tries * (1 + p.desc.split_backward) && report.n_tried > 0);
            CHECK(report.best_fixed > CF_SCHEDULE_DEFAULT && report.best_fixed < CF_SCHEDULE_BEST);
            CHECK_INT(cf_schedule_make(p.plan, &p.desc, &twice, NULL), CF_OK);
            CHECK_INT(once->n_actions, twice->n_actions);
            CHECK(memcmp(once->actions, twice->actions, (size_t)once->n_actions * sizeof(cf_action)) == 0);
        }
        cf_timeline_free(timeline);
        cf_schedule_free(once);
        cf_schedule_free(twice);
        problem_free(&p);
    }
}

/* A schedule that reaches a bound cannot be made shorter. Equal chunks, for which the fixed kinds are optimal, need no
   search. */
TEST(a_search_ends_at_its_bound) {
    int64_t lengths[16], i;
    int which;
    for (which = 0; which < 8; which++) {
        cf_schedule_desc desc = {0};
        cf_search_report report;
        cf_plan *plan;
        for (i = 0; i < 16; i++) lengths[i] = which & 1 ? 3 : 1;
        plan = naive_pack(lengths, 16, 1);
        memset(&report, 0, sizeof report);
        desc.shape.n_stages = which & 2 ? 4 : 1;
        desc.shape.k = 3;
        desc.limits.chunks = which & 4 ? CF_NO_LIMIT : 0;
        desc.report = &report;
        harness_note("case %d", which);
        CHECK(makespan_of(plan, &desc, NULL) == report.bound);
        CHECK(report.n_tried > 0 && report.n_tried <= 8);
        cf_plan_free(plan);
    }
}

/* More candidates never make it worse. */
TEST(more_tries_are_no_worse) {
    int i;
    for (i = 10; i < SUITE_BATCHES; i += harness_rounds(50, 130)) {
        static suite_batch batch;
        cf_schedule_desc desc;
        cf_plan *plan = NULL;
        double before = 1e300;
        REQUIRE((plan = draw_batch(i, &batch, &desc)) != NULL);
        desc.kind = CF_SCHEDULE_BEST;
        for (desc.max_tries = 1; desc.max_tries <= 64; desc.max_tries *= 4) {
            double makespan = makespan_of(plan, &desc, NULL);
            CHECK(makespan <= before * (1 + 1e-12));
            before = makespan;
        }
        cf_plan_free(plan);
    }
}

/* Two sequences of two chunks, in whole seconds, with little room. An idle stage has time for a requested replay, but
   the chunk after it still waits for its W. */
TEST(replays_wait_for_the_place_that_a_weight_pass_frees) {
    static const struct {
        cf_placement placement;
        int64_t limit, max_tries;
        double seconds[4][3]; /* F, I, W */
    } cases[] = {{CF_PLACEMENT_LOOP, 3, 3, {{3, 2, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 2}}},
                 {CF_PLACEMENT_V, CF_NO_LIMIT, 6, {{3, 1, 1}, {1, 2, 1}, {1, 3, 1}, {1, 1, 2}}}};
    const int64_t lengths[] = {8, 8};
    size_t i, v;
    for (i = 0; i < COUNT(cases); i++) {
        cf_pack_desc pack = {.chunk_size = 4};
        cf_stage_cost stages[4] = {{{0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}}};
        cf_timing timing = {.stages = stages};
        cf_schedule_desc desc = {.shape = {.n_stages = 2, .n_virtual = 2, .k = 1}, .split_backward = 1};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        desc.shape.placement = cases[i].placement;
        desc.limits.chunks = cases[i].limit;
        desc.max_tries = cases[i].max_tries;
        desc.timing = &timing;
        for (v = 0; v < 4; v++) {
            stages[v].forward.constant = cases[i].seconds[v][0];
            stages[v].input.constant = cases[i].seconds[v][1];
            stages[v].weight.constant = cases[i].seconds[v][2];
            stages[v].backward.constant = cases[i].seconds[v][1] + cases[i].seconds[v][2];
        }
        REQUIRE(cf_pack(lengths, 2, &pack, &plan, NULL) == CF_OK);
        REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
        CHECK_STR(naive_fault(plan, schedule), NULL);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

/* The header's rule: each virtual stage adds min(K, longest chain), and 1 for each stage after it in its row. */
TEST(chunks_kept_by_default) {
    const int64_t lengths[] = {40, 16, 8, 8, 8, 8, 8, 8};
    const cf_pack_desc pack = {.chunk_size = 8};
    cf_plan *plan = NULL;
    int64_t p, rows, k, s, r;
    int v;
    REQUIRE(cf_pack(lengths, COUNT(lengths), &pack, &plan, NULL) == CF_OK);
    for (v = 0; v < 2; v++)
        for (p = 1; p <= 4; p++)
            for (rows = v + 1; rows <= 4; rows++)
                for (k = 1; k <= 7; k += 2) {
                    cf_schedule_desc desc = {0};
                    cf_schedule *schedule = NULL;
                    desc.shape.n_stages = p;
                    desc.shape.n_virtual = rows;
                    desc.shape.k = k;
                    desc.shape.placement = v ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
                    desc.max_tries = 1;
                    harness_note("%s, %d x %d, K %d", v ? "v" : "loop", (int)p, (int)rows, (int)k);
                    REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
                    for (s = 0; s < p; s++) {
                        int64_t most = 0;
                        for (r = 0; r < rows; r++)
                            most += (k < 5 ? k : 5) + (r + 1) * p - 1 - cf_placement_at(desc.shape.placement, p, r, s);
                        CHECK_INT(schedule->limits.chunks_by_stage[s], most);
                    }
                    cf_schedule_free(schedule);
                }
    cf_plan_free(plan);
}

static double ratio_to_bound(const cf_plan *plan, const cf_schedule *schedule) {
    cf_timeline *timeline = NULL;
    double ratio;
    if (!CHECK_INT(cf_simulate(plan, schedule, NULL, &timeline, NULL), CF_OK)) return HUGE_VAL;
    ratio = timeline->makespan / timeline->bound;
    cf_timeline_free(timeline);
    return ratio;
}

/* A tree of up to three levels over some other sequences. */
static cf_plan *draw_trees(harness_rng *rng) {
    int64_t lengths[16], n = harness_between(rng, 3, 16), i;
    cf_shared_prefix shares[16];
    cf_pack_desc pack = {.chunk_size = 16, .min_shared_prefix = 1};
    cf_plan *plan = NULL;
    for (i = 0; i < n; i++) {
        lengths[i] = harness_between(rng, 1, harness_chance(rng, 0.4) ? 90 : 14);
        shares[i].with = i > 0 ? harness_between(rng, 0, i - 1) : 0;
        shares[i].tokens = 0;
        if (i > 0 && harness_chance(rng, 0.6))
            shares[i].tokens = harness_between(rng, 0, lengths[i] < lengths[shares[i].with]
                                                           ? lengths[i] : lengths[shares[i].with]);
    }
    pack.shared_prefixes = shares;
    CHECK_INT(cf_pack(lengths, n, &pack, &plan, NULL), CF_OK);
    return plan;
}

/* Trees under byte limits. The least that a refusal asks for is enough and one byte less is not. Every limit between it
   and twice as much is kept, as the validator counts bytes. */
TEST(trees_keep_to_their_bytes) {
    int round, made = 0, dropped = 0;
    for (round = 0; round < harness_rounds(1500, 250); round++) {
        harness_rng rng = {81000 + (uint64_t)round};
        cf_plan *plan = draw_trees(&rng);
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        cf_error error = {0};
        cf_validate_desc asked = {0};
        int64_t least, i;
        int turn;
        desc.shape.n_stages = harness_between(&rng, 1, 3);
        desc.shape.k = harness_between(&rng, 1, 3);
        desc.max_tries = 20;
        desc.split_backward = harness_chance(&rng, 0.3);
        desc.limits.per_token.activations = harness_between(&rng, 1, 5);
        desc.limits.per_token.state = harness_between(&rng, 0, 3);
        desc.limits.per_token.state_gradient = harness_between(&rng, 0, 3);
        desc.limits.per_token.boundary = harness_between(&rng, 0, 3);
        desc.limits.bytes = 1;
        harness_note("seed %d", 81000 + round);
        REQUIRE(plan != NULL);
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_INFEASIBLE);
        CHECK_STR(error.field, "limits.bytes");
        least = error.wanted;
        desc.limits.bytes = least - 1;
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_ERROR_INFEASIBLE);
        for (turn = 0; turn < 2; turn++) {
            desc.limits.bytes = turn ? harness_between(&rng, least, 2 * least) : least;
            if (!CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), CF_OK)) FAIL("%s", error.text);
            REQUIRE(schedule != NULL);
            CHECK_STR(naive_fault(plan, schedule), NULL);
            asked.limits = desc.limits;
            CHECK_INT(cf_schedule_validate(plan, schedule, &asked, NULL, &error), CF_OK);
            for (i = 0; i < schedule->n_actions; i++) dropped += schedule->actions[i].pass == CF_R;
            made++;
            cf_schedule_free(schedule);
            schedule = NULL;
        }
        cf_plan_free(plan);
    }
    harness_report("%d made, %d replays", made, dropped);
    CHECK(dropped > made);
}

/* With several virtual stages a stage and few bytes, a tree's sequences leave later virtual stages the bytes of a path.
   If too little is left, dispatching cannot finish and sequences run one by one, which took 2.0 to 3.3 times the bound
   here. */
TEST(later_rows_have_the_bytes_of_a_path) {
    static const int seeds[] = {35, 119, 241, 264, 782, 839, 1019};
    int64_t i;
    for (i = 0; i < COUNT(seeds); i++) {
        harness_rng rng = {(uint64_t)seeds[i]};
        cf_plan *plan = draw_trees(&rng);
        cf_schedule_desc desc = {.kind = CF_SCHEDULE_INTERLEAVED};
        cf_schedule *schedule = NULL;
        cf_error error = {0};
        desc.shape.n_stages = harness_between(&rng, 2, 4);
        desc.shape.n_virtual = harness_between(&rng, 2, 3);
        desc.shape.k = harness_between(&rng, 1, 3);
        desc.limits.per_token.activations = harness_between(&rng, 1, 5);
        desc.limits.per_token.state = harness_between(&rng, 1, 3);
        desc.limits.per_token.state_gradient = harness_between(&rng, 0, 3);
        desc.limits.bytes = 1;
        harness_note("seed %d", seeds[i]);
        REQUIRE(plan != NULL);
        CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_INFEASIBLE);
        desc.limits.bytes = error.wanted * harness_between(&rng, 2, 6) / 2;
        REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
        CHECK(ratio_to_bound(plan, schedule) < 1.75);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

/* Each stage keeps the inputs of at most 2 x n_stages x n_virtual dropped standalone chunks, plus as many as it may
   keep whole. Any chunk may be dropped, so a stage with fewer places than virtual stages can work with one. */
TEST(inputs_of_dropped_chunks_are_few) {
    int round, most_seen = 0;
    double sum = 0;
    for (round = 0; round < harness_rounds(800, 120); round++) {
        harness_rng rng = {82000 + (uint64_t)round};
        int64_t lengths[60], n = harness_between(&rng, 10, 60), i, s, bound;
        const cf_pack_desc pack = {.chunk_size = 16};
        cf_schedule_desc desc = {0};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        cf_error error = {0};
        for (i = 0; i < n; i++) lengths[i] = harness_between(&rng, 12, harness_chance(&rng, 0.1) ? 60 : 16);
        desc.shape.n_stages = harness_between(&rng, 1, 4);
        desc.shape.n_virtual = harness_between(&rng, 1, 3);
        desc.limits.chunks = harness_between(&rng, 1, 3);
        desc.max_tries = 20;
        harness_note("seed %d", 82000 + round);
        REQUIRE(cf_pack(lengths, n, &pack, &plan, NULL) == CF_OK);
        if (!CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), CF_OK)) FAIL("%s", error.text);
        REQUIRE(schedule != NULL);
        bound = 2 * desc.shape.n_stages * desc.shape.n_virtual + desc.limits.chunks;
        for (s = 0; s < desc.shape.n_stages; s++) {
            int64_t held = 0;
            for (i = schedule->first[s]; i < schedule->first[s + 1]; i++) {
                const cf_action *a = &schedule->actions[i];
                if (plan->chunks[a->chunk].chain >= 0) continue;
                held += (a->pass == CF_F && !a->keep) - (a->pass == CF_R);
                CHECK(held <= bound);
                if (held > most_seen) most_seen = (int)held;
            }
        }
        sum += ratio_to_bound(plan, schedule); /* keeping fewer inputs than that would cost time */
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    harness_report("at most %d inputs at once, %.3f x the bound", most_seen, sum / round);
    CHECK(most_seen > 1);
    CHECK(sum / round < 1.17);
}

/* A byte limit counts as set by the caller: the search tries more candidates than under default limits. */
TEST(bytes_alone_are_a_given_limit) {
    int64_t lengths[48], i;
    cf_search_report plain, given;
    cf_schedule_desc desc = {0};
    cf_plan *plan;
    for (i = 0; i < 48; i++) lengths[i] = 8;
    plan = naive_pack(lengths, 48, 8);
    desc.shape.n_stages = 4;
    desc.report = &plain;
    makespan_of(plan, &desc, NULL);
    desc.limits.bytes = (int64_t)1 << 40;
    desc.limits.per_token.activations = 1;
    desc.report = &given;
    makespan_of(plan, &desc, NULL);
    CHECK(given.max_tries > plain.max_tries && plain.max_tries > 0);
    cf_plan_free(plan);
}

/* A caller who tries one kind after the other finds each makespan in its report. A fixed kind has tried no
   candidates. */
TEST(every_kind_reports_its_makespan) {
    harness_rng rng = {4711};
    int round, kind, n_made = 0;
    for (round = 0; round < 40; round++) {
        problem p;
        problem_draw(&rng, NULL, &p);
        p.desc.shape.replay = CF_REPLAY_LOCAL;
        p.desc.shape.placement = CF_PLACEMENT_DEFAULT;
        p.desc.split_backward = 0;
        for (kind = CF_SCHEDULE_PAPER; kind < CF_SCHEDULE_COUNT; kind++) {
            cf_simulate_desc simulate = {.timing = p.desc.timing};
            cf_search_report report;
            cf_schedule *schedule = NULL, *bare = NULL;
            cf_timeline *timeline = NULL;
            p.desc.kind = (cf_schedule_kind)kind;
            p.desc.shape.n_virtual = kind < CF_SCHEDULE_INTERLEAVED ? 1 : 1 + round % 2;
            p.desc.report = &report;
            harness_poison(&report, sizeof report);
            if (cf_schedule_make(p.plan, &p.desc, &schedule, NULL) != CF_OK) {
                CHECK_POISON(&report, sizeof report);
                continue;
            }
            p.desc.report = NULL; /* which changes nothing else */
            CHECK_INT(cf_schedule_make(p.plan, &p.desc, &bare, NULL), CF_OK);
            REQUIRE(bare != NULL && cf_simulate(p.plan, schedule, &simulate, &timeline, NULL) == CF_OK);
            CHECK_INT(bare->n_actions, schedule->n_actions);
            CHECK(memcmp(bare->actions, schedule->actions, (size_t)bare->n_actions * sizeof *bare->actions) == 0);
            CHECK(fabs(report.makespan - timeline->makespan) <= 1e-9 * timeline->makespan);
            if (kind < CF_SCHEDULE_BEST) {
                CHECK_INT(report.best_fixed, kind);
                CHECK(memcmp(&report.fixed_makespan, &report.makespan, sizeof report.makespan) == 0);
                CHECK(report.max_tries == 0 && !(report.bound > 0) && !(report.gap > 0));
            }
            if (kind != CF_SCHEDULE_PAPER) CHECK((report.n_tried == 0) == (kind < CF_SCHEDULE_BEST));
            n_made++;
            cf_timeline_free(timeline);
            cf_schedule_free(schedule);
            cf_schedule_free(bare);
        }
        problem_free(&p);
    }
    CHECK(n_made > 100);
}

SUITE(best, CASE(bytes_alone_are_a_given_limit), CASE(every_kind_reports_its_makespan), CASE(paper_example),
      CASE(chunks_kept_by_default), CASE(trees_keep_to_their_bytes),
      CASE(later_rows_have_the_bytes_of_a_path),
      CASE(inputs_of_dropped_chunks_are_few), CASE(report_says_what_was_done), CASE(a_search_ends_at_its_bound),
      CASE(more_tries_are_no_worse), CASE(replays_wait_for_the_place_that_a_weight_pass_frees));

/* These searches take so long that they are a program of their own, without sanitizers: see the Makefile. */
SUITE(search, CASE(optimal_on_small_pipelines), CASE(optimal_on_small_pipelines_under_limits),
      CASE(optimal_on_small_pipelines_with_split_backwards), CASE(suite_is_near_the_bound),
      CASE(suite_is_never_worse_than_a_fixed_schedule), CASE(a_v_under_tight_limits),
      CASE(fewer_places_than_virtual_stages),
      CASE(a_larger_limit_is_hardly_ever_worse), CASE(no_limit_is_hardly_worse_than_the_default_one),
      CASE(a_limit_beyond_all_chunks), CASE(very_many_stages),
      CASE(large_batches_lose_nothing), CASE(is_as_good_as_it_was));
