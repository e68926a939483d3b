/* Tests schedules without backwards, of lists and trees: their validity, times, graphs and texts. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"

#include <stdlib.h>
#include <string.h>

/* Sums in another order differ by rounding. */
static int close_to(double a, double b) { return a <= b * (1 + 1e-12) && b <= a * (1 + 1e-12); }

static int64_t below(harness_rng *rng, int64_t n) { return harness_between(rng, 0, n - 1); }

/* Lists and trees. */
static void draw(harness_rng *rng, problem *p) {
    problem_wants wants = {0};
    wants.trees = 1;
    problem_draw(rng, &wants, p);
}

static cf_schedule_desc describe(harness_rng *rng, const cf_plan *plan) {
    cf_schedule_desc desc = {0};
    desc.shape.n_stages = 1 + below(rng, 5);
    desc.shape.n_virtual = 1 + below(rng, 3);
    desc.shape.placement = (cf_placement)below(rng, CF_PLACEMENT_COUNT);
    if (below(rng, 2)) desc.shape.replay = CF_REPLAY_LOCAL;
    desc.shape.k = 1 + below(rng, 3);
    desc.shape.rank = below(rng, plan->n_ranks);
    desc.shape.forward_only = 1;
    if (desc.shape.n_virtual == 1) desc.shape.placement = CF_PLACEMENT_DEFAULT;
    return desc;
}

/* ---- the makespan, from the lists ---- */

static void check_time(const cf_plan *plan, const cf_schedule *s, const cf_timeline *t,
                       const cf_search_report *report) {
    double sum = 0, most = 0;
    int64_t i;
    for (i = s->shape.rank * plan->chunks_per_rank; i < (s->shape.rank + 1) * plan->chunks_per_rank; i++) {
        double rows = (double)plan->chunks[i].rows;
        sum += rows;
        most = rows > most ? rows : most;
    }
    CHECK(close_to(t->makespan, pipeline_makespan(plan, s, NULL, NULL, NULL)));
    CHECK(close_to(report->makespan, t->makespan));
    CHECK(close_to(t->busy, sum * (double)(s->shape.n_stages * s->shape.n_virtual)));
    CHECK(t->replayed <= 0 && t->bound <= t->makespan * (1 + 1e-12) && report->bound <= t->makespan * (1 + 1e-12));
    CHECK(t->bound >= sum * (double)s->shape.n_virtual);
    CHECK_INT(t->n_bounds, 2);
    if (s->shape.n_virtual > 1) return;
    CHECK(close_to(t->makespan, sum + (double)(s->shape.n_stages - 1) * most));
    CHECK(t->makespan <= 2 * t->bound);
}

/* ---- graph, needs, text ---- */

/* All edges lead from an F to an F, and a schedule that keeps to them in the lists' order ends with every F. */
static void check_graph(const cf_plan *plan, const cf_schedule *s) {
    cf_graph *graph = NULL;
    cf_schedule_index *index = NULL;
    int64_t n_v = s->shape.n_stages * s->shape.n_virtual, i, edges = 0;
    REQUIRE(cf_graph_make(plan, s, NULL, NULL, &graph, NULL) == CF_OK);
    REQUIRE(cf_schedule_index_make(plan, s, NULL, &index, NULL) == CF_OK);
    CHECK_INT(graph->n_nodes, n_v * plan->chunks_per_rank);
    for (i = 0; i < graph->n_nodes; i++) CHECK(graph->nodes[i].action.pass == CF_F && !graph->nodes[i].action.keep);
    for (i = 0; i < s->n_actions; i++) {
        cf_need found[CF_MAX_NEEDS];
        int n = s->actions[i].pass == CF_F ? cf_schedule_needs(index, i, found) : 0, j;
        for (j = 0; j < n; j++) CHECK(s->actions[found[j].action].pass == CF_F);
        edges += n;
    }
    CHECK_INT(graph->n_edges, edges);
    cf_schedule_index_free(index);
    cf_graph_free(graph);
}

static int count_text(const char *text, size_t bytes, void *user) {
    static const char mark[] = "\"forward_only\": 1";
    size_t i;
    for (i = 0; i + sizeof mark - 1 <= bytes; i++) *(int *)user += memcmp(text + i, mark, sizeof mark - 1) == 0;
    return 0;
}

static void check_written(const cf_schedule *s, int wanted) {
    int n = 0;
    REQUIRE(cf_write_schedule_json(s, NULL, count_text, &n, NULL) == CF_OK);
    CHECK_INT(n, wanted);
}

TEST(forwards_alone_are_sound_and_let_everything_go) {
    int64_t round, n = harness_rounds(150, 30);
    for (round = 0; round < n; round++) {
        harness_rng rng = {20261126 + (uint64_t)round};
        problem p;
        problem_rank *r;
        cf_search_report report;
        draw(&rng, &p);
        memset(&report, 0, sizeof report);
        p.desc = describe(&rng, p.plan);
        p.desc.report = &report;
        REQUIRE(problem_make(&p) == CF_OK);
        CHECK_STR(problem_judge(&p), NULL);
        r = problem_own(&p);
        CHECK(r->schedule->shape.forward_only == 1 && report.n_tried >= 1);
        if (p.plan->chunks_per_rank > 0) check_time(p.plan, r->schedule, r->times, &report);
        check_graph(p.plan, r->schedule);
        check_written(r->schedule, 1);
        problem_free(&p);
    }
}

/* ---- the validator ---- */

static int64_t root_of(const cf_plan *plan, int64_t chunk) {
    while (plan->chunks[chunk].up >= 0) chunk = plan->chunks[chunk].up;
    return chunk;
}

/* Checks a list of forwards on one stage by the definition: every chunk once, with those of a chain or tree in the
   plan's order. */
static int is_sound(const cf_plan *plan, const cf_action *list, int64_t n) {
    int64_t i, j;
    for (i = 0; i < n; i++)
        for (j = i + 1; j < n; j++)
            if (list[i].chunk >= list[j].chunk && root_of(plan, list[i].chunk) == root_of(plan, list[j].chunk))
                return 0;
    return 1;
}

TEST(the_validator_takes_sound_orders_of_forwards_and_no_others) {
    harness_rng rng = {20261127};
    int64_t round, n = harness_rounds(3000, 600), sound = 0, unsound = 0;
    for (round = 0; round < n; round++) {
        problem p;
        const cf_plan *plan;
        cf_schedule_desc desc = {0};
        cf_schedule *s = NULL;
        int64_t swaps;
        int wanted;
        cf_error error = {0};
        draw(&rng, &p);
        plan = p.plan;
        desc.shape.forward_only = 1;
        REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK);
        for (swaps = s->n_actions > 1 ? below(&rng, 3) : 0; swaps > 0; swaps--) {
            cf_action *a = &s->actions[below(&rng, s->n_actions)], *other = &s->actions[below(&rng, s->n_actions)];
            cf_action held = *a;
            *a = *other;
            *other = held;
        }
        wanted = is_sound(plan, s->actions, s->n_actions);
        if ((cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_OK) != wanted) FAIL("%d: %s", wanted, error.text);
        sound += wanted;
        unsound += !wanted;
        cf_schedule_free(s);
        problem_free(&p);
    }
    CHECK(sound > n / 20 && unsound > n / 20);
    harness_report("%d sound, %d not", (int)sound, (int)unsound);
}

/* Forward-only schedules are refused together with any option that does not apply to them. */
TEST(forwards_alone_with_anything_else_are_refused) {
    const int64_t lengths[] = {40, 7};
    cf_pack_desc pack = {0};
    cf_schedule_desc desc = {0};
    cf_schedule *s = NULL;
    cf_plan *plan = NULL;
    cf_steps *steps = NULL;
    cf_error error = {0};
    int pass;
    pack.chunk_size = 10;
    REQUIRE(cf_pack(lengths, 2, &pack, &plan, NULL) == CF_OK);
    desc.shape.forward_only = 1;
    REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK);
    for (pass = CF_R; pass < CF_PASS_COUNT; pass++) {
        s->actions[1].pass = (uint8_t)pass;
        CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_ERROR_SCHEDULE);
        CHECK_STR(error.field, "actions.pass");
    }
    s->actions[1].pass = CF_F;
    s->actions[1].keep = 1;
    CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "actions.keep");
    CHECK(cf_steps_make(plan, s, 0, 0, NULL, &steps, &error) == CF_ERROR_SCHEDULE);
    s->actions[1].keep = 0;
    s->shape.forward_only = 0; /* the backwards are missing */
    CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_ERROR_SCHEDULE);
    check_written(s, 0);
    s->shape.forward_only = 2;
    CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "shape.forward_only");
    s->shape.forward_only = 1;
    s->actions[3] = s->actions[4];
    s->n_actions = s->first[1] = 4;
    CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_ERROR_SCHEDULE);
    CHECK_INT(error.wanted, 5);
    CHECK(strstr(error.text, "needs a pass") != NULL);
    CHECK(cf_steps_make(plan, s, 0, 0, NULL, &steps, &error) == CF_ERROR_SCHEDULE); /* one chunk is left out */
    cf_schedule_free(s);
    s = NULL;
    desc.kind = CF_SCHEDULE_PAPER;
    CHECK(cf_schedule_make(plan, &desc, &s, &error) == CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "shape.forward_only");
    desc.kind = CF_SCHEDULE_BEST;
    desc.shape.forward_only = -1;
    CHECK(cf_schedule_make(plan, &desc, &s, &error) == CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "shape.forward_only");
    cf_plan_free(plan);
}

/* A refused limit comes with the smallest limit that is enough, which is the state of the deepest path. */
TEST(forwards_alone_keep_to_limits_of_state_and_bytes) {
    harness_rng rng = {20261128};
    int64_t round, n = harness_rounds(400, 80), tight = 0;
    for (round = 0; round < n; round++) {
        problem p;
        const cf_plan *plan;
        cf_schedule_desc desc;
        cf_schedule *s = NULL;
        cf_timeline *t = NULL;
        cf_error error = {0};
        int64_t most = 0, stage, bytes = below(&rng, 2);
        draw(&rng, &p);
        plan = p.plan, desc = describe(&rng, plan);
        REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK && cf_simulate(plan, s, NULL, &t, NULL) == CF_OK);
        if (desc.shape.n_virtual == 1)
            for (stage = 0; stage < s->shape.n_stages; stage++)
                most = t->peak_state_tokens[stage] > most ? t->peak_state_tokens[stage] : most;
        cf_schedule_free(s);
        cf_timeline_free(t);
        s = NULL;
        desc.limits.per_token.state = 3;
        desc.limits.chunks = 1; /* which does not apply, because nothing is held */
        if (most > 1) {
            *(bytes ? &desc.limits.bytes : &desc.limits.state) = bytes ? 3 * most - 1 : most - 1;
            CHECK(cf_schedule_make(plan, &desc, &s, &error) == CF_ERROR_INFEASIBLE);
            CHECK_INT(error.wanted, bytes ? 3 * most : most);
            *(bytes ? &desc.limits.bytes : &desc.limits.state) = error.wanted;
            CHECK(cf_schedule_make(plan, &desc, &s, &error) == CF_OK);
            CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_OK);
            if (bytes) ((int64_t *)s->limits.bytes_by_stage)[0]--;
            else ((int64_t *)s->limits.state_by_stage)[0]--;
            CHECK(cf_schedule_validate(plan, s, NULL, NULL, &error) == CF_ERROR_SCHEDULE);
            tight++;
            cf_schedule_free(s);
        }
        problem_free(&p);
    }
    CHECK(tight > n / 8);
}

/* 16 answers of 2K to a prompt of 32K take eight forwards, and hold no more state than the prompt. */
TEST(forwards_of_a_shared_prompt) {
    int64_t lengths[16], i;
    cf_shared_prefix shares[16];
    cf_pack_desc pack = {0};
    cf_schedule_desc desc = {0};
    cf_schedule *s = NULL;
    cf_timeline *t = NULL;
    cf_plan *plan = NULL;
    for (i = 0; i < 16; i++) {
        lengths[i] = 34 * 1024;
        shares[i].with = 0;
        shares[i].tokens = i > 0 ? 32 * 1024 : 0;
    }
    pack.chunk_size = 8 * 1024;
    pack.shared_prefixes = shares;
    REQUIRE(cf_pack(lengths, 16, &pack, &plan, NULL) == CF_OK);
    desc.shape.n_stages = 4;
    desc.shape.forward_only = 1;
    REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK && cf_simulate(plan, s, NULL, &t, NULL) == CF_OK);
    CHECK_INT(s->n_actions, 4 * 8);
    CHECK_INT(t->peak_state_tokens[0], 32 * 1024);
    CHECK(close_to(t->makespan, 11 * 8192));
    cf_timeline_free(t);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* Forwards run in rounds of as many chunks as stages. Each round goes through all virtual stages of a stage. Chunks of
   chains count like any other, and the last round may be smaller. */
TEST(forwards_alone_go_in_rounds) {
    const int64_t lengths[] = {40, 8, 8, 24, 8, 8, 8, 8, 8};
    const cf_pack_desc pack = {.chunk_size = 8};
    cf_plan *plan = NULL;
    int64_t p, rows, n, s, begin, row, i;
    REQUIRE(cf_pack(lengths, sizeof lengths / sizeof lengths[0], &pack, &plan, NULL) == CF_OK);
    n = plan->n_chunks;
    for (p = 1; p <= 4; p++)
        for (rows = 1; rows <= 3; rows++) {
            cf_schedule_desc desc = {0};
            cf_schedule *schedule = NULL;
            desc.shape.n_stages = p;
            desc.shape.n_virtual = rows;
            desc.shape.forward_only = 1;
            harness_note("%d x %d", (int)p, (int)rows);
            REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
            CHECK_INT(schedule->n_actions, p * rows * n);
            for (s = 0; s < p; s++) {
                const cf_action *a = &schedule->actions[schedule->first[s]];
                CHECK_INT(schedule->first[s + 1] - schedule->first[s], rows * n);
                for (begin = 0; begin < n; begin += p)
                    for (row = 0; row < rows; row++)
                        for (i = begin; i < n && i < begin + p; i++, a++)
                            CHECK(a->pass == CF_F && a->chunk == i && a->stage == row * p + s && !a->keep);
            }
            cf_schedule_free(schedule);
        }
    cf_plan_free(plan);
}

SUITE(forward, CASE(forwards_alone_go_in_rounds), CASE(forwards_alone_are_sound_and_let_everything_go),
      CASE(the_validator_takes_sound_orders_of_forwards_and_no_others),
      CASE(forwards_alone_with_anything_else_are_refused), CASE(forwards_alone_keep_to_limits_of_state_and_bytes),
      CASE(forwards_of_a_shared_prompt));
