/* >>graph: every node and edge against the definitions, and what an executor can do with them. */

#include "chunkflow.h"
#include "../reference/exact.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"
#include "../reference/random_schedule.h"

#include <stdlib.h>
#include <string.h>

/* Draws the options of a random schedule. */
static cf_schedule_desc draw_desc(harness_rng *rng, cf_timing *timing) {
    cf_schedule_desc desc = {0};
    desc.shape.n_stages = harness_between(rng, 1, 4);
    desc.shape.n_virtual = harness_chance(rng, 0.6) ? 1 : harness_between(rng, 1, 3);
    desc.shape.placement = harness_chance(rng, 0.4) ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
    desc.shape.k = harness_between(rng, 1, 4);
    desc.shape.replay = harness_chance(rng, 0.5) ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
    desc.split_backward = (int)harness_between(rng, 0, 1);
    memset(timing, 0, sizeof *timing);
    if (harness_chance(rng, 0.5)) {
        timing->all.forward.constant = (double)harness_between(rng, 0, 3);
        timing->all.forward.per_token = (double)harness_between(rng, 0, 3);
        timing->all.backward.per_pair = (double)harness_between(rng, 0, 3);
        timing->latency = (double)harness_between(rng, 0, 5);
        timing->seconds_per_token = (double)harness_between(rng, 0, 2);
        desc.timing = timing;
    }
    return desc;
}

static const cf_plan *draw_plan(harness_rng *rng, int64_t sequences, int64_t ranks, problem *p) {
    problem_wants wants = {0};
    wants.small = 1;
    wants.sequences = sequences;
    wants.ranks = ranks;
    problem_draw(rng, &wants, p);
    return p->plan;
}

static cf_graph *make(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing) {
    cf_graph *graph = NULL;
    cf_error error = {0};
    if (cf_graph_make(plan, schedule, timing, NULL, &graph, &error) != CF_OK) FAIL("cf_graph_make: %s", error.text);
    return graph;
}

/* ---- the definitions ---- */

/* Returns the action of a pass, or -1. */
static int64_t find(const cf_schedule *s, int pass, int64_t chunk, int64_t v) {
    int64_t i;
    for (i = 0; i < s->n_actions; i++)
        if (s->actions[i].pass == pass && s->actions[i].chunk == chunk && s->actions[i].stage == v) return i;
    return -1;
}

/* Counts the earlier passes of a chunk's chain on its virtual stage that take one of K places (`taken`), or that give
   one back. */
static int64_t n_before(const cf_plan *plan, const cf_schedule *s, const cf_action *a, int taken) {
    int64_t n = 0, i, end = find(s, a->pass, a->chunk, a->stage), chain = plan->chunks[a->chunk].chain;
    for (i = 0; i < end; i++) {
        const cf_action *b = &s->actions[i];
        if (b->stage != a->stage || plan->chunks[b->chunk].chain != chain) continue;
        n += taken ? b->keep : b->pass == CF_B || b->pass == CF_W;
    }
    return n;
}

static int is_back(const cf_action *a) { return a->pass == CF_B || a->pass == CF_I; }

/* Returns why b waits for a, or -1 if it does not. */
static int why(const cf_plan *plan, const cf_graph *g, const cf_schedule *s, const cf_action *a, const cf_action *b) {
    int same = a->chunk == b->chunk && a->stage == b->stage;
    int together = plan->chunks[a->chunk].chain >= 0 && plan->chunks[a->chunk].chain == plan->chunks[b->chunk].chain;
    if (a->chunk == b->chunk && a->stage + 1 == b->stage && a->pass == b->pass &&
        (a->pass == CF_F || (a->pass == CF_R && g->shape.replay == CF_REPLAY_PIPELINE)))
        return CF_EDGE_ACTIVATION;
    if (a->chunk == b->chunk && a->stage == b->stage + 1 && is_back(a) && is_back(b)) return CF_EDGE_GRADIENT;
    if (a->stage == b->stage && together && a->chunk + 1 == b->chunk && a->pass == CF_F && b->pass == CF_F)
        return CF_EDGE_STATE;
    if (a->stage == b->stage && together && a->chunk == b->chunk + 1 && is_back(a) && is_back(b))
        return CF_EDGE_STATE_GRADIENT;
    if (same && a->pass == CF_F && b->pass == CF_R) return CF_EDGE_REPLAY;
    if (same && is_back(b) && a->pass == (find(s, CF_R, a->chunk, a->stage) >= 0 ? CF_R : CF_F))
        return CF_EDGE_OWN;
    if (same && a->pass == CF_I && b->pass == CF_W) return CF_EDGE_OWN;
    if (a->stage == b->stage && together && b->pass == CF_R && (a->pass == CF_B || a->pass == CF_W) &&
        n_before(plan, s, a, 0) == n_before(plan, s, b, 1) - g->shape.k)
        return CF_EDGE_SLOT;
    return -1;
}

/* The stage of a virtual stage. */
static int64_t stage_of(const cf_graph *g, int64_t v) {
    return g->shape.placement == CF_PLACEMENT_V ? exact_v(v, g->shape.n_stages) : exact_loop(v, g->shape.n_stages);
}

static void check_edges(const cf_plan *plan, const cf_graph *g, const cf_schedule *schedule,
                        const cf_timing *timing) {
    int64_t a, b, e, n = 0;
    CHECK_STR(naive_graph_fault(g), NULL);
    for (b = 0; b < g->n_nodes; b++) {
        int64_t n_in = 0;
        for (a = 0; a < g->n_nodes; a++) {
            const cf_action *from = &g->nodes[a].action, *to = &g->nodes[b].action;
            int wanted = why(plan, g, schedule, from, to), found = 0;
            int hops = stage_of(g, from->stage) != stage_of(g, to->stage);
            double seconds = 0;
            if (wanted < 0) continue;
            n_in++;
            if (hops && timing)
                seconds = timing->latency + timing->seconds_per_token * (double)plan->chunks[from->chunk].rows;
            for (e = g->first_in[b]; e < g->first_in[b + 1]; e++) {
                if (g->edges[e].from != a) continue;
                CHECK_INT(g->edges[e].why, wanted);
                CHECK(g->edges[e].seconds == seconds);
                found++;
            }
            CHECK_INT(found, 1);
            for (e = g->first_out[a], found = 0; e < g->first_out[a + 1]; e++) found += g->edges[g->out[e]].to == b;
            CHECK_INT(found, 1);
        }
        CHECK_INT(g->first_in[b + 1] - g->first_in[b], n_in);
        n += n_in;
    }
    CHECK_INT(g->n_edges, n);
}

/* Draws a valid schedule that may drop any chunk on any stage. */
static cf_schedule *draw_schedule(harness_rng *rng, const cf_plan *plan, const cf_schedule_desc *desc) {
    return random_schedule(rng, plan, desc, desc->shape.placement == CF_PLACEMENT_V ? exact_v : exact_loop,
                           harness_chance(rng, 0.5));
}

/* Checks the longest-path function that this and other tests measure with: a chain, the longer of two paths, and a
   cycle. */
TEST(the_relaxer_relaxes) {
    const double seconds[] = {2, 3, 1};
    naive_wait waits[] = {{1, 2, 0}, {0, 1, 0.5}, {0, 2, 5}};
    double start[3];
    CHECK(naive_relax(3, seconds, waits, 3, start) == 8 && start[0] == 0 && start[1] == 2.5 && start[2] == 7);
    waits[2].delay = 1;
    CHECK(naive_relax(3, seconds, waits, 3, start) == 6.5 && start[2] == 5.5);
    waits[2].from = 2;
    waits[2].to = 0;
    CHECK(naive_relax(3, seconds, waits, 3, start) == -1);
}

/* The nodes are the schedule's passes, and the edges those of the definitions. The simulated makespan is the longest
   path of graph and lists together, if transfers take no time and so never queue. */
TEST(a_schedules_graph_has_its_passes) {
    harness_rng rng = {41};
    int round, n_partly = 0, n_timed = 0, n_pipeline = 0;
    for (round = 0; round < 250; round++) {
        problem p;
        const cf_plan *plan = draw_plan(&rng, 4, 2, &p);
        cf_timing timing;
        cf_schedule_desc desc = draw_desc(&rng, &timing);
        cf_schedule *schedule;
        cf_simulate_desc simulate;
        cf_timeline *timeline = NULL;
        cf_graph *g;
        int64_t i, v, n_v;
        int plain = desc.timing == NULL || (timing.latency == 0 && timing.seconds_per_token == 0);
        desc.shape.rank = harness_between(&rng, 0, plan->n_ranks - 1);
        schedule = draw_schedule(&rng, plan, &desc);
        REQUIRE(schedule != NULL);
        g = make(plan, schedule, desc.timing);
        REQUIRE(g != NULL);
        CHECK_INT(g->n_nodes, schedule->n_actions);
        for (i = 0; i < schedule->n_actions; i++) {
            const cf_action *a = &schedule->actions[i];
            CHECK(memcmp(&g->nodes[i].action, a, sizeof *a) == 0);
            CHECK(g->nodes[i].seconds == pipeline_seconds(plan, desc.timing, g->shape.outputs, a->stage, a->chunk, a->pass));
        }
        n_v = g->shape.n_stages * g->shape.n_virtual;
        for (i = g->shape.rank * plan->chunks_per_rank; i < (g->shape.rank + 1) * plan->chunks_per_rank; i++) {
            int64_t there = 0;
            for (v = 0; v < n_v; v++) there += find(schedule, CF_R, i, v) >= 0;
            n_partly += there > 0 && there < n_v;
            n_pipeline += there > 0 && g->shape.replay == CF_REPLAY_PIPELINE && n_v > 1;
        }
        check_edges(plan, g, schedule, desc.timing);
        memset(&simulate, 0, sizeof simulate);
        simulate.timing = desc.timing;
        REQUIRE(cf_simulate(plan, schedule, &simulate, &timeline, NULL) == CF_OK);
        if (plain) {
            double *earliest = (double *)harness_guard_new((size_t)(g->n_nodes + 1) * sizeof *earliest);
            CHECK(naive_longest(g, schedule, 0, earliest) == timeline->makespan);
            harness_guard_free(earliest);
            n_timed++;
        }
        cf_timeline_free(timeline);
        cf_graph_free(g);
        naive_free(schedule);
        problem_free(&p);
    }
    CHECK(n_partly > 50 && n_timed > 50 && n_pipeline > 50);
}

/* ---- critical path ---- */

/* Draws a stage's cost in multiples of 2^-10, so that all sums are exact. */
static cf_pass_cost draw_cost(harness_rng *rng) {
    cf_pass_cost cost;
    cost.constant = (double)harness_between(rng, 0, 4000) / 1024;
    cost.per_token = (double)harness_between(rng, 0, 4000) / 1024;
    cost.per_pair = (double)harness_between(rng, 0, 400) / 1024;
    return cost;
}

static int64_t longest_chain(const cf_plan *plan) {
    int64_t most = 1, i;
    for (i = 0; i < plan->n_chunks; i++)
        if (plan->chunks[i].chain >= 0 && plan->chunks[i].index >= most) most = plan->chunks[i].index + 1;
    return most;
}

/* If K leaves no choice of dropped chunks, the longest path of a graph is the simulator's bound "critical-path".
   Otherwise the graph drops more than the bound does. The schedule is `paper`; with split backwards or virtual stages
   it is zero-bubble or interleaved. */
TEST(critical_path_is_the_simulators_bound) {
    harness_rng rng = {15};
    int round, n_slots = 0, n_equal = 0, n_below = 0;
    for (round = 0; round < 3000; round++) {
        problem p;
        const cf_plan *plan = draw_plan(&rng, 12, 1, &p);
        cf_stage_cost stages[12] = {0};
        cf_timing timing = {0};
        cf_schedule_desc order = {0};
        cf_simulate_desc simulate = {0};
        cf_graph *g;
        cf_schedule *schedule = NULL;
        cf_timeline *timeline = NULL;
        double *earliest, length;
        int64_t v;
        for (v = 0; v < 12; v++) {
            stages[v].forward = draw_cost(&rng);
            stages[v].backward = draw_cost(&rng);
            if (harness_chance(&rng, 0.5)) stages[v].replay = draw_cost(&rng);
        }
        if (harness_chance(&rng, 0.8)) timing.stages = stages;
        timing.latency = (double)harness_between(&rng, 0, 9000) / 1024;
        timing.seconds_per_token = (double)harness_between(&rng, 0, 900) / 1024;
        order.shape.k = harness_between(&rng, 1, 4);
        order.shape.n_stages = harness_between(&rng, 1, 4);
        order.shape.n_virtual = harness_chance(&rng, 0.3) ? harness_between(&rng, 1, 3) : 1;
        order.kind = order.shape.n_virtual > 1   ? CF_SCHEDULE_INTERLEAVED
                     : harness_chance(&rng, 0.4) ? CF_SCHEDULE_ZERO_BUBBLE
                                                 : CF_SCHEDULE_PAPER;
        if (harness_chance(&rng, 0.5) && order.kind == CF_SCHEDULE_PAPER) order.shape.replay = CF_REPLAY_PIPELINE;
        order.timing = simulate.timing = &timing;
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        g = make(plan, schedule, &timing);
        REQUIRE(g != NULL);
        earliest = (double *)harness_guard_new((size_t)(g->n_nodes + 1) * sizeof *earliest);
        n_slots += naive_longest(g, NULL, 0, earliest) < naive_longest(g, NULL, 1, earliest);
        length = naive_longest(g, NULL, 1, earliest);
        REQUIRE(cf_simulate(plan, schedule, &simulate, &timeline, NULL) == CF_OK);
        CHECK_STR(timeline->bounds[0].name, "critical-path");
        if (plan->n_chunks > 0 && (order.shape.k == 1 || order.shape.k >= longest_chain(plan))) {
            CHECK(length == timeline->bounds[0].value); /* there is no choice of dropped chunks */
            n_equal++;
        } else if (plan->n_chunks > 0) {
            CHECK(timeline->bounds[0].value <= length);
            n_below += timeline->bounds[0].value < length;
        }
        cf_timeline_free(timeline);
        cf_schedule_free(schedule);
        harness_guard_free(earliest);
        cf_graph_free(g);
        problem_free(&p);
    }
    CHECK(n_equal > 1000 && n_below > 100);
    CHECK(n_slots > 50); /* edges for slots make the difference in many of them */
}

/* Packs into chunks of two tokens. */
static cf_plan *in_twos(const int64_t *lengths, int64_t n) {
    cf_plan *plan = naive_pack(lengths, n, 2);
    return plan;
}

/* K is a cap. A schedule that drops chunks although K would not is valid, and then no replay waits for a place that a
   backward gives back. */
TEST(a_k_beyond_any_chain) {
    static const int64_t lengths[] = {10, 3, 6},
                         caps[] = {5, 6, INT32_MAX, (int64_t)INT32_MAX + 1, INT64_MAX - 1, INT64_MAX};
    int i, replay;
    for (replay = CF_REPLAY_PIPELINE; replay <= CF_REPLAY_LOCAL; replay++) {
        cf_plan *plan = in_twos(lengths, 3);
        cf_schedule_desc order = {0};
        cf_schedule *schedule = NULL;
        cf_graph *first = NULL;
        order.kind = CF_SCHEDULE_PAPER;
        order.shape.replay = (cf_replay)replay;
        order.shape.n_stages = 2;
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        for (i = 0; i < (int)(sizeof caps / sizeof caps[0]); i++) {
            cf_graph *g;
            int64_t e;
            schedule->shape.k = caps[i];
            harness_note("K %lld", (long long)caps[i]);
            REQUIRE(cf_schedule_validate(plan, schedule, NULL, NULL, NULL) == CF_OK);
            g = make(plan, schedule, NULL);
            REQUIRE(g != NULL);
            for (e = 0; e < g->n_edges; e++) CHECK(g->edges[e].why != CF_EDGE_SLOT);
            if (first != NULL) {
                REQUIRE(g->n_nodes == first->n_nodes && g->n_edges == first->n_edges);
                CHECK(memcmp(g->nodes, first->nodes, (size_t)g->n_nodes * sizeof *g->nodes) == 0);
                CHECK(memcmp(g->edges, first->edges, (size_t)g->n_edges * sizeof *g->edges) == 0);
                cf_graph_free(g);
            } else {
                first = g;
            }
        }
        cf_graph_free(first);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* The longest path of `paper` on 4 stages. */
static double longest_path(const cf_plan *plan, int64_t k, cf_replay replay) {
    cf_schedule_desc order = {0};
    cf_schedule *schedule = NULL;
    cf_graph *g;
    double *earliest, length;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.n_stages = 4;
    order.shape.k = k;
    order.shape.replay = replay;
    CHECK_INT(cf_schedule_make(plan, &order, &schedule, NULL), CF_OK);
    g = make(plan, schedule, NULL);
    earliest = (double *)harness_guard_new((size_t)(g->n_nodes + 1) * sizeof *earliest);
    length = naive_longest(g, NULL, 1, earliest);
    harness_guard_free(earliest);
    cf_graph_free(g);
    cf_schedule_free(schedule);
    return length;
}

/* The paper's example in chunks of 2: {1, 1}, {2} and a chain of two. F = tokens, B = 2 x tokens, 4 stages. */
TEST(bounds_of_the_papers_example) {
    static const int64_t lengths[] = {1, 1, 2, 4};
    cf_plan *plan = in_twos(lengths, 4);
    REQUIRE(plan != NULL);
    CHECK(longest_path(plan, 1, CF_REPLAY_PIPELINE) == 50); /* no order with K = 1 and pipeline replay is shorter */
    /* F1 down the stages; F2 B2 R1 B1 on the last; B1 up again */
    CHECK(longest_path(plan, 1, CF_REPLAY_LOCAL) == 4 * 2 + 2 + 4 + 2 + 4 + 3 * 4);
    /* F1 down the stages; F2 and B2 on the last; B1 up again */
    CHECK(longest_path(plan, 2, CF_REPLAY_LOCAL) == 4 * 2 + 2 + 4 + 4 * 4);
    cf_plan_free(plan);
}

/* ---- executors ---- */

/* Runs ready nodes in random order, counting what each still waits for, as the comment of cf_graph describes. Checks K
   separately. */
TEST(an_executor_of_your_own) {
    harness_rng rng = {6};
    int round;
    for (round = 0; round < 200; round++) {
        problem p;
        const cf_plan *plan = draw_plan(&rng, 5, 1, &p);
        cf_timing timing;
        cf_schedule_desc desc = draw_desc(&rng, &timing);
        cf_schedule *schedule = draw_schedule(&rng, plan, &desc);
        cf_graph *g;
        int32_t *waiting, *pool;
        unsigned char *done;
        int64_t *held, n = 0, i, j, n_done = 0;
        REQUIRE(schedule != NULL);
        g = make(plan, schedule, desc.timing);
        REQUIRE(g != NULL);
        waiting = (int32_t *)harness_guard_new((size_t)(g->n_nodes + 1) * sizeof *waiting);
        pool = (int32_t *)harness_guard_new((size_t)(g->n_nodes + 1) * sizeof *pool);
        done = (unsigned char *)calloc((size_t)g->n_nodes + 1, 1);
        held = (int64_t *)calloc((size_t)(plan->n_chunks * g->shape.n_stages * g->shape.n_virtual) + 1, sizeof *held);
        if (!done || !held) abort();
        for (i = 0; i < g->n_nodes; i++) {
            waiting[i] = (int32_t)(g->first_in[i + 1] - g->first_in[i]);
            if (waiting[i] == 0) pool[n++] = (int32_t)i;
        }
        while (n > 0) {
            int64_t pick = harness_between(&rng, 0, n - 1), node = pool[pick];
            const cf_action *x = &g->nodes[node].action;
            int64_t *h = &held[x->stage * plan->n_chunks + x->chunk - plan->chunks[x->chunk].index];
            pool[pick] = pool[--n];
            *h += x->keep;
            CHECK(*h <= g->shape.k);
            *h -= x->pass == CF_B || x->pass == CF_W;
            for (j = g->first_in[node]; j < g->first_in[node + 1]; j++) CHECK(done[g->edges[j].from]);
            done[node] = 1;
            n_done++;
            for (j = g->first_out[node]; j < g->first_out[node + 1]; j++) {
                const cf_edge *edge = &g->edges[g->out[j]];
                if (--waiting[edge->to] == 0) pool[n++] = edge->to;
            }
        }
        CHECK_INT(n_done, g->n_nodes);
        free(done);
        free(held);
        harness_guard_free(waiting);
        harness_guard_free(pool);
        cf_graph_free(g);
        naive_free(schedule);
        problem_free(&p);
    }
}

/* ---- options, memory, limits ---- */

/* No graph is made from wrong times, or from a schedule whose actions, counts or shape cf_schedule_validate refuses. */
TEST(a_wrong_schedule_makes_no_graph) {
    static const int64_t lengths[] = {7, 2};
    cf_schedule_desc order = {0};
    cf_plan *plan = in_twos(lengths, 2);
    cf_schedule *schedule = NULL, copy;
    cf_timing timing = {0};
    cf_graph *g = NULL;
    cf_error error;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.n_stages = 2;
    REQUIRE(plan != NULL && cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    copy = *schedule;
#define REFUSE(schedule, code, name)                                                     \
    do {                                                                                 \
        CHECK_INT(cf_graph_make(plan, schedule, &timing, NULL, &g, &error), code);       \
        CHECK_STR(error.field, name);                                                    \
        CHECK_STR(oracle_error_fault(&error), NULL);                                     \
        CHECK(g == NULL);                                                                \
    } while (0)
    copy.n_actions--;
    REFUSE(&copy, CF_ERROR_SCHEDULE, "first");
    copy = *schedule;
    copy.shape.n_stages = 0;
    REFUSE(&copy, CF_ERROR_SCHEDULE, "shape.n_stages");
    REFUSE(NULL, CF_ERROR_ARGUMENT, "schedule");
    timing.latency = -1;
    REFUSE(schedule, CF_ERROR_ARGUMENT, "timing.latency");
    timing.latency = 0;
    timing.all.weight.per_pair = -1;
    REFUSE(schedule, CF_ERROR_ARGUMENT, "timing.weight.per_pair");
    timing.all.weight.per_pair = 0;
    CHECK_INT(cf_graph_make(NULL, schedule, NULL, NULL, &g, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_graph_make(plan, schedule, NULL, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    plan->chunks[1].chain = -2;
    REFUSE(schedule, CF_ERROR_PLAN, "chunks.chain");
    plan->chunks[1].chain = 0;
    schedule->actions[0].chunk = 9;
    REFUSE(schedule, CF_ERROR_SCHEDULE, "actions.chunk");
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* Whole and split backwards in one graph. */
TEST(a_graph_has_backwards_of_both_forms) {
    static const int64_t lengths[] = {2, 2};
    cf_action actions[] = {
        {0, 0, CF_F, 1, 0}, {0, 0, CF_B, 0, 0}, {1, 0, CF_F, 1, 0}, {1, 0, CF_I, 0, 0}, {1, 0, CF_W, 0, 0}};
    int64_t first[] = {0, 5};
    cf_schedule schedule = {0};
    cf_plan *plan = in_twos(lengths, 2);
    cf_graph *g;
    REQUIRE(plan != NULL);
    schedule.shape.replay = CF_REPLAY_LOCAL;
    schedule.shape.n_stages = schedule.shape.n_virtual = schedule.shape.k = 1;
    schedule.n_chunks = 2;
    schedule.n_actions = 5;
    schedule.first = first;
    schedule.actions = actions;
    g = make(plan, &schedule, NULL);
    REQUIRE(g != NULL && g->n_nodes == 5 && g->n_edges == 3); /* B waits for F, I for F and W for I */
    check_edges(plan, g, &schedule, NULL);
    cf_graph_free(g);
    cf_plan_free(plan);
}

/* Times whose sum overflows, because of padding, pairs, a prefix or a transfer alone. The sequence has two chunks of 16
   rows, one of which has 15 rows of padding. */
TEST(each_part_of_a_time_can_be_too_long) {
    const int64_t length = 17;
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    int i;
    pack.chunk_size = pack.align = 16;
    order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(cf_pack(&length, 1, &pack, &plan, NULL) == CF_OK);
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    for (i = 0; i < 10; i++) {
        /* F, R, I and W once and B twice; a stream in F and R; three transfers of each chunk */
        static const double parts[] = {6 * 32, 6 * 17 * 18 / 2, 6 * 2, 2 * 16, 3 * 32};
        cf_timing timing = {0};
        cf_graph *g = NULL;
        double *const at[] = {&timing.all.forward.per_token, &timing.all.forward.per_pair, &timing.all.forward.constant,
                              &timing.stream_forward, &timing.seconds_per_token};
        *at[i % 5] = (i < 5 ? 0.98 : 1.02) * 1.7976931348623157e302 / parts[i % 5];
        harness_note("part %d", i);
        CHECK_INT(cf_graph_make(plan, schedule, &timing, NULL, &g, NULL), i < 5 ? CF_OK : CF_ERROR_OVERFLOW);
        cf_graph_free(g);
    }
    harness_note("%s", "");
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

SUITE(graph, CASE(the_relaxer_relaxes), CASE(a_schedules_graph_has_its_passes),
      CASE(critical_path_is_the_simulators_bound), CASE(a_k_beyond_any_chain), CASE(bounds_of_the_papers_example),
      CASE(an_executor_of_your_own), CASE(a_graph_has_backwards_of_both_forms), CASE(a_wrong_schedule_makes_no_graph),
      CASE(each_part_of_a_time_can_be_too_long));
