/* Tests everything that can be drawn, from lengths to steps: lists, trees, ranks in lockstep and cp groups, with all
   kinds of schedules and random ones. The library's own validators must agree. The judge itself is tested with damage,
   which it must name. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/problem.h"

#include <stdlib.h>
#include <string.h>

/* ---- all of it ---- */

/* Makes the same plan in the caller's memory, of the size that cf_pack_size gives. */
static void check_into(const problem *p) {
    cf_plan *same = NULL;
    size_t bytes = 0;
    void *memory;
    REQUIRE(cf_pack_size(p->lengths, p->n, &p->pack, &bytes, NULL) == CF_OK);
    memory = harness_guard_new(bytes);
    if (CHECK_INT(cf_pack_into(p->lengths, p->n, &p->pack, memory, bytes, &same, NULL), CF_OK)) {
        CHECK(same->n_slices == p->plan->n_slices && same->n_chunks == p->plan->n_chunks);
        CHECK(memcmp(same->chunks, p->plan->chunks, (size_t)same->n_chunks * sizeof *same->chunks) == 0);
        CHECK(memcmp(same->slices, p->plan->slices, (size_t)same->n_slices * sizeof *same->slices) == 0);
        CHECK(memcmp(same->chains, p->plan->chains, (size_t)same->n_chains * sizeof *same->chains) == 0);
    }
    harness_guard_free(memory);
}

/* Compares the load of a stage at each moment. */
static void check_loads(const problem *p, const cf_schedule *s) {
    int64_t stage;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        int64_t count = (s->first[stage + 1] - s->first[stage]) * s->shape.n_virtual;
        size_t bytes = (size_t)(count + 1) * sizeof(cf_memory_load);
        cf_memory_load *got = (cf_memory_load *)malloc(bytes), *wanted = (cf_memory_load *)malloc(bytes);
        cf_error error = {0};
        REQUIRE(got != NULL && wanted != NULL);
        harness_poison(got, bytes);
        naive_loads(p->plan, s, stage, wanted);
        if (cf_schedule_loads(p->plan, s, stage, got, count, &error) != CF_OK) FAIL("loads: %s", error.text);
        CHECK(memcmp(got, wanted, bytes - sizeof *got) == 0);
        CHECK_POISON(&got[count], sizeof *got);
        free(got);
        free(wanted);
    }
}

/* No pass starts before the passes that it waits for, including those for slots. Transfers in the lists change only the
   numbers of nodes. */
static void check_graph(const problem *p, const problem_rank *r) {
    cf_graph *g = NULL, *again = NULL;
    double *earliest;
    int64_t i, e;
    REQUIRE(cf_graph_make(p->plan, r->schedule, p->desc.timing, NULL, &g, NULL) == CF_OK);
    REQUIRE(cf_graph_make(p->plan, r->lowered, p->desc.timing, NULL, &again, NULL) == CF_OK);
    CHECK_STR(naive_graph_fault(g), NULL);
    earliest = (double *)harness_guard_new((size_t)(g->n_nodes + 1) * sizeof *earliest);
    CHECK(naive_longest(g, NULL, 1, earliest) <= r->times->makespan * (1 + 1e-9));
    for (i = 0; i < g->n_nodes; i++) {
        double start = r->times->start[i] * (1 + 1e-9);
        CHECK(start >= earliest[i]);
        for (e = g->first_in[i]; e < g->first_in[i + 1]; e++)
            CHECK(start >= r->times->end[g->edges[e].from] + g->edges[e].seconds * (1 - 1e-9));
    }
    CHECK(g->n_nodes == again->n_nodes && g->n_edges == again->n_edges);
    CHECK(memcmp(g->nodes, again->nodes, (size_t)g->n_nodes * sizeof *g->nodes) == 0);
    CHECK(memcmp(g->edges, again->edges, (size_t)g->n_edges * sizeof *g->edges) == 0);
    harness_guard_free(earliest);
    cf_graph_free(again);
    cf_graph_free(g);
}

/* Checks the slots for all stages: of each kind, the largest number that any stage has. */
static void check_capacity(const problem *p, cf_steps *const *steps) {
    cf_capacity most = {0, 0, 0, 0, 0, 0, 0};
    int64_t slots = 0, states = 0, boundaries = 0, stage;
    for (stage = 0; stage < PROBLEM_MOST_STAGES && steps[stage] != NULL; stage++) {
        if (steps[stage]->n_slots > slots) slots = steps[stage]->n_slots;
        if (steps[stage]->n_states > states) states = steps[stage]->n_states;
        if (steps[stage]->n_boundaries > boundaries) boundaries = steps[stage]->n_boundaries;
        CHECK_INT(cf_steps_capacity(p->plan, steps[stage], &most, NULL), CF_OK);
    }
    CHECK(most.activations == slots && most.states == states && most.boundaries == boundaries);
}

/* Checks the library's own validators, and its other answers about a schedule. */
static void check_validators(const problem *p) {
    const cf_schedule *schedules[PROBLEM_MOST_RANKS], *lowered[PROBLEM_MOST_RANKS];
    cf_validate_desc rules = {0};
    cf_error error = {0};
    int64_t rank;
    rules.limits = p->desc.limits;
    if (p->is_random) memset(&rules, 0, sizeof rules);
    if (cf_plan_validate(p->plan, p->lengths, p->n, NULL, &error) != CF_OK) FAIL("plan: %s", error.text);
    for (rank = 0; rank < p->plan->n_ranks; rank++) {
        const problem_rank *r = &p->ranks[rank];
        schedules[rank] = r->schedule;
        lowered[rank] = r->lowered;
        if (r->schedule == NULL) continue;
        if (!p->is_random) CHECK_INT(r->schedule->kind, p->desc.kind);
        check_loads(p, rank % 2 ? r->lowered : r->schedule);
        check_capacity(p, r->lowered_steps);
        if (p->list == NULL) check_graph(p, r);
        if (cf_schedule_validate(p->plan, r->schedule, &rules, NULL, &error) != CF_OK) FAIL("%s", error.text);
        if (cf_schedule_validate(p->plan, r->lowered, &rules, NULL, &error) != CF_OK) FAIL("lowered: %s", error.text);
    }
    if (p->list == NULL) return;
    if (cf_lockstep_validate(p->plan, schedules, NULL, NULL, &error) != CF_OK) FAIL("ranks: %s", error.text);
    if (cf_lockstep_validate(p->plan, lowered, NULL, NULL, &error) != CF_OK) FAIL("lowered ranks: %s", error.text);
}

/* Counts the plans and schedules that were made, by kind. */
typedef struct tally {
    int made, refused, n_trees, n_step, n_cp_groups, n_forwards, kinds[CF_SCHEDULE_COUNT];
} tally;

static void count(tally *t, const problem *p) {
    int64_t i;
    int cp_groups = 0;
    for (i = 0; i < p->plan->n_chains; i++) {
        CHECK(p->plan->chains[i].cp <= p->pack.max_cp && p->plan->chains[i].cp != 1);
        cp_groups |= p->plan->chains[i].cp > 0;
    }
    t->made++;
    t->n_trees += p->pack.shared_prefixes != NULL;
    t->n_step += p->list != NULL;
    t->n_cp_groups += cp_groups;
    t->n_forwards += p->desc.shape.forward_only != 0;
    t->kinds[p->is_random ? 0 : p->desc.kind]++;
}

static tally judge_all(uint64_t first, int rounds, const problem_wants *wants) {
    tally t = {0};
    int round;
    for (round = 0; round < rounds; round++) {
        harness_rng rng = {first + (uint64_t)round};
        const char *fault;
        problem p;
        problem_draw(&rng, wants, &p);
        if (round % 4 == 0) check_into(&p);
        if (problem_make(&p) == CF_OK) {
            check_validators(&p);
            count(&t, &p);
        } else {
            t.refused++;
        }
        if ((fault = problem_judge(&p)) != NULL) FAIL("%s", fault);
        CHECK(1);
        problem_free(&p);
    }
    harness_report("%d judged, %d limits refused", t.made, t.refused);
    return t;
}

TEST(lists_of_all_kinds) {
    const int rounds = harness_rounds(3000, 200);
    tally t = judge_all(1000, rounds, NULL);
    int kind;
    for (kind = CF_SCHEDULE_PAPER; kind < CF_SCHEDULE_COUNT; kind++) CHECK(t.kinds[kind] > rounds / 20);
    CHECK(t.refused > rounds / 100);
}

TEST(orders_of_no_kind) {
    problem_wants wants = {0};
    wants.random = 1;
    CHECK(judge_all(2000, harness_rounds(4000, 300), &wants).made > 0);
}

/* Three tests, so that each is quick enough to run against planted faults. */
TEST(lists_and_trees) {
    const int rounds = harness_rounds(3000, 200);
    problem_wants wants = {0};
    tally t;
    wants.trees = 1;
    t = judge_all(3000, rounds, &wants);
    CHECK(t.n_trees > rounds / 4 && t.n_forwards > rounds / 40);
}

TEST(ranks_in_step) {
    const int rounds = harness_rounds(2000, 130);
    problem_wants wants = {0};
    wants.lockstep = 1;
    CHECK(judge_all(13000, rounds, &wants).n_step > rounds / 4);
}

TEST(ranks_that_share_sequences) {
    const int rounds = harness_rounds(2000, 130);
    problem_wants wants = {0};
    wants.cp_groups = 1;
    CHECK(judge_all(23000, rounds, &wants).n_cp_groups > rounds / 10);
}

/* ---- the judge ---- */

/* Changes one thing: the judge names the rule, and accepts the problem again once the thing is restored. */
#define BREAK(thing, value, rule)                     \
    do {                                              \
        unsigned char was[sizeof(thing)];             \
        memcpy(was, &(thing), sizeof was);            \
        (thing) = (value);                            \
        CHECK_STR(problem_judge(&p), rule);           \
        memcpy(&(thing), was, sizeof was);            \
        CHECK_STR(problem_judge(&p), NULL);           \
    } while (0)

static void pack_and_make(problem *p, int64_t n, int64_t n_stages, int64_t k) {
    p->n = n;
    p->pack.chunk_size = 8;
    p->desc.kind = CF_SCHEDULE_PAPER;
    p->desc.shape.n_stages = n_stages;
    p->desc.shape.k = k;
    p->desc.limits.chunks = 4;
    p->desc.limits.per_token.activations = 2;
    CHECK_INT(cf_pack(p->lengths, p->n, &p->pack, &p->plan, NULL), CF_OK);
    CHECK_INT(problem_make(p), CF_OK);
    CHECK_STR(problem_judge(p), NULL);
}

/* Exchanges two neighbours of a list, checks, and exchanges them back. */
static void exchange(problem *p, cf_action *a, const char *rule) {
    const cf_action first = a[0];
    a[0] = a[1], a[1] = first;
    CHECK_STR(problem_judge(p), rule);
    a[1] = a[0], a[0] = first;
}

/* Returns the first action, or step, of a pass in a list of n. */
static int64_t first_of(const cf_action *actions, int64_t n, int pass) {
    int64_t i = 0;
    while (i < n && actions[i].pass != pass) i++;
    CHECK(i < n);
    return i;
}

/* A chain of five chunks and two standalone ones on two stages; K is 2, so there are replays. */
TEST(broken_plans_and_lists_are_seen) {
    problem p = {.lengths = {38, 8, 7, 2, 5}};
    problem_rank *r = &p.ranks[0];
    cf_action *list, *low;
    pack_and_make(&p, 5, 2, 2);
    REQUIRE(r->schedule != NULL && r->lowered != NULL);
    list = r->schedule->actions, low = r->lowered->actions;
    BREAK(p.plan->n_tokens, 61, "p->n_tokens == total");
    BREAK(p.plan->chunks[1].pairs, 3, "chunk->pairs == pairs");
    BREAK(p.plan->slices[2].begin, 15, "p->chains[chunk->chain].cp > 0 || slice->begin == chunk->prefix");
    BREAK(p.plan->chains[0].tokens, 37, "chain->cp > 0 || chain->tokens == lengths[chain->sequence]");
    BREAK(p.pack.max_slices, 9, "p->max_slices == desc->max_slices");
    BREAK(list[0].reserved, 1, "reserved");
    BREAK(list[0].pass, CF_B, "twice");
    BREAK(list[0].keep, 1, "R and keep disagree");
    BREAK(list[0].chunk, 9, "chunk");
    BREAK(list[0].stage, 1, "stage");
    BREAK(r->schedule->shape.k, 1, "K");
    BREAK(r->schedule->limits.chunks_by_stage, NULL, "another limit is written in the schedule");
    BREAK(p.desc.limits.chunks_by_stage, r->times->peak_live, "another limit is written in the schedule");
    BREAK(r->lowered->shape.k, 9, "a lowered one of another shape");
    exchange(&p, &list[0], "order of F");
    exchange(&p, &low[first_of(low, r->lowered->n_actions, CF_SEND_F) - 1], "a send of nothing, or twice");
    exchange(&p, &low[first_of(low, r->lowered->n_actions, CF_RECV_B)], "a pass without its input");
    problem_free(&p);
}

TEST(broken_times_are_seen) {
    problem p = {.lengths = {38, 8, 7, 2, 5}};
    problem_rank *r = &p.ranks[0];
    cf_timeline *t, *u;
    pack_and_make(&p, 5, 2, 2);
    t = r->times, u = r->lowered_times;
    REQUIRE(t != NULL && u != NULL);
    BREAK(t->n_stages, 3, "the timeline is of another schedule");
    BREAK(t->makespan, 1000, "another makespan");
    BREAK(t->start[3], 1000, "an action runs at another time");
    BREAK(t->end[3], 0, "an action runs at another time");
    BREAK(t->busy, 7, "busy and replayed are other sums");
    BREAK(t->replayed, 7, "busy and replayed are other sums");
    BREAK(t->bubble_useful, 0.001, "the bubble is another one");
    BREAK(t->bubble_busy, 0.001, "the bubble is another one");
    BREAK(t->n_bounds, 1, "the bound is not the strongest");
    BREAK(t->bound, 1, "the bound is not the strongest");
    BREAK(t->stream_waits, 1, "passes wait for their stream");
    BREAK(t->stream_seconds, 1, "passes wait for their stream");
    BREAK(t->live[2], 7, "other chunks are kept");
    BREAK(t->peak_live[1], 9, "a peak is another one");
    BREAK(t->peak_tokens[1], 9, "a peak is another one");
    BREAK(t->peak_state_tokens[0], 9, "a peak is another one");
    BREAK(t->peak_bytes[0], 9, "the peak of bytes is another one");
    BREAK(u->start[first_of(r->lowered->actions, u->n_actions, CF_SEND_F)], 77, "an action runs at another time");
    BREAK(u->end[0], u->end[0] * (1 + 1e-15), "a pass is moved by transfers");
    BREAK(u->makespan, u->makespan * (1 + 1e-15), "transfers change a sum");
    problem_free(&p);
}

TEST(broken_steps_are_seen) {
    problem p = {.lengths = {38, 8, 7, 2, 5}};
    problem_rank *r = &p.ranks[0];
    cf_steps *plain, *s;
    cf_path *path;
    int64_t f, b, send, receive;
    pack_and_make(&p, 5, 2, 2);
    plain = r->steps[0], s = r->lowered_steps[0];
    REQUIRE(plain != NULL && s != NULL);
    path = &s->paths[0];
    f = first_of(r->lowered->actions, s->n, CF_F), b = first_of(r->lowered->actions, s->n, CF_B);
    send = first_of(r->lowered->actions, s->n, CF_SEND_F), receive = first_of(r->lowered->actions, s->n, CF_RECV_B);
    BREAK(s->n, 3, "another count of steps");
    BREAK(s->transfers, 0, "tensors cross, and it says that they do not");
    BREAK(s->n_slots, 9, "another count of slots");
    BREAK(s->n_states, 9, "another count of states");
    BREAK(s->n_boundaries, 9, "another count of boundaries");
    BREAK(s->peak_tokens, 9, "another peak");
    BREAK(s->peak_state_tokens, 9, "another peak");
    BREAK(s->steps[f].position, 9, "a step of another action");
    BREAK(s->steps[f].action.chunk, 4, "a step of another action");
    BREAK(s->steps[f].seed, 4, "another seed");
    BREAK(s->steps[f].wants_loss, 1, "a loss that is taken twice or nowhere");
    BREAK(s->steps[b].last_backward, 1, "the last backward is another one");
    BREAK(s->steps[b].clear_state_gradient, 0, "a chain's own gradient is another one's");
    BREAK(s->steps[b].slot, 1 - s->steps[b].slot, "activations of another chunk");
    BREAK(s->steps[b].live, 9, "another count of chunks is left");
    BREAK(s->steps[b].state_tokens, 9, "another count of state is left");
    BREAK(s->steps[b].state, 1, "the state slot of another chain");
    BREAK(s->steps[b].path, -1, "a state slot without a path");
    BREAK(s->steps[b].input, 1 + s->steps[b].input, "an input of another");
    BREAK(s->steps[b].peer, 1, "a pass with a peer");
    BREAK(s->steps[f].output, 9, "a slot is taken out of turn");
    BREAK(s->steps[send].output, 9, "an output of another");
    BREAK(s->steps[send].slot, 0, "a transfer with a slot");
    BREAK(s->steps[send].peer, 0, "a send to no other stage");
    BREAK(s->steps[receive].peer, 0, "the stages wait for each other");
    BREAK(plain->steps[0].input, 0, "a boundary although nothing crosses");
    BREAK(plain->steps[0].peer, 1, "a boundary although nothing crosses");
    BREAK(path->first, 1, "a path that is not in use");
    BREAK(path->last, path->last - 1, "a path that is not in use");
    BREAK(path->rows, 37, "a path with other rows than its chain");
    BREAK(path->begin, 1, "a path is too short");
    BREAK(path->stage, 1, "a path on another virtual stage");
    BREAK(path->clear, -1, "a gradient is cleared at the wrong time");
    problem_free(&p);
}

/* Two chunks change places in a list. */
static void relabel(cf_schedule *s, int64_t one, int64_t other) {
    int64_t i;
    for (i = 0; i < s->n_actions; i++) {
        cf_action *a = &s->actions[i];
        if (a->chunk == one || a->chunk == other) a->chunk = (int32_t)(one + other - a->chunk);
    }
}

TEST(broken_trees_are_seen) {
    problem p = {.lengths = {24, 22, 22}, .shares = {{0, 0}, {0, 16}, {0, 16}}, .pack = {.min_shared_prefix = 1}};
    p.pack.shared_prefixes = p.shares;
    pack_and_make(&p, 3, 1, 2); /* a prompt of two chunks, and three answers of one chunk each */
    REQUIRE(p.plan->n_chunks == 5 && p.plan->common != NULL);
    BREAK(p.plan->common[1], 15, "tokens == length && pairs == pairs_of(0, length) && shared == j->f->common[i]");
    BREAK(p.plan->order[1], 0, "f->order[i] >= 0 && f->order[i] < f->n_sequences && !seen[f->order[i]]");
    relabel(p.ranks[0].schedule, 2, 3);
    CHECK_STR(problem_judge(&p), "order of F of siblings");
    relabel(p.ranks[0].schedule, 2, 3);
    p.ranks[0].schedule->shape.forward_only = 1;
    CHECK_STR(problem_judge(&p), "more than forwards");
    problem_free(&p);

    p = (problem){.lengths = {40, 44, 38}, .shares = {{0, 0}, {0, 16}, {0, 16}}, .pack = {.min_shared_prefix = 1}};
    p.pack.shared_prefixes = p.shares;
    pack_and_make(&p, 3, 1, 2); /* and three answers of several chunks, whose state continues the prompt's */
    REQUIRE(p.ranks[0].steps[0] != NULL && p.ranks[0].steps[0]->n_paths > 1);
    BREAK(p.ranks[0].steps[0]->paths[1].up, -1, "a path leaves the tree");
    problem_free(&p);
}

TEST(broken_ranks_in_step_are_seen) {
    static const int64_t ones[] = {1, 1};
    problem p = {.lengths = {200, 8, 7, 2, 5, 60, 8, 3}, .pack = {.n_ranks = 2, .max_cp = 2, .lockstep = 1}};
    const cf_schedule *both[2];
    cf_schedule *other;
    cf_action *first, *second;
    p.pack.cost.per_token = 1;
    pack_and_make(&p, 8, 2, 1);
    REQUIRE(p.ranks[1].schedule != NULL && p.plan->chains[0].cp == 2 && p.plan->chains[0].n_chunks > 2);
    BREAK(p.list->limits.state_by_stage, ones, "a rank has more state than its column may");
    both[0] = p.ranks[0].schedule;
    both[1] = other = naive_copy(p.ranks[1].schedule);
    relabel(other, p.plan->chunks_per_rank, p.plan->chunks_per_rank + 1);
    CHECK_STR(naive_rendezvous(p.plan, both, 2), "a round does not meet");
    other->actions[0].pass = CF_B;
    CHECK_STR(naive_rendezvous(p.plan, both, 2), "not in step");
    naive_free(other);
    other = p.ranks[1].lowered; /* two receives of one rank change places */
    first = &other->actions[first_of(other->actions, other->n_actions, CF_RECV_F)];
    second = first + 1 + first_of(first + 1, other->n_actions, CF_RECV_F);
    first->chunk++, second->chunk--;
    CHECK_STR(problem_judge(&p), "a message of another tensor");
    first->chunk--, second->chunk++;
    CHECK_STR(problem_judge(&p), NULL);
    problem_free(&p);
}

SUITE(problem, CASE(lists_of_all_kinds), CASE(orders_of_no_kind), CASE(lists_and_trees), CASE(ranks_in_step),
      CASE(ranks_that_share_sequences),
      CASE(broken_plans_and_lists_are_seen), CASE(broken_times_are_seen), CASE(broken_steps_are_seen),
      CASE(broken_trees_are_seen), CASE(broken_ranks_in_step_are_seen));
