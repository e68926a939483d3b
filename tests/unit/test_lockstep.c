/* Tests ranks in lockstep: plans in columns, one list for all ranks, and the validator over all of them. (test_problem
   has undamaged ones.) */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"

#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 16

/* ---- the judge ---- */

/* Returns the fault in the schedules of all ranks, or NULL. */
static const char *fault(const cf_plan *plan, cf_schedule *const *schedules) {
    const char *own = NULL;
    int64_t rank;
    for (rank = 0; rank < plan->n_ranks && !own; rank++) own = naive_fault(plan, schedules[rank]);
    return own ? own : naive_rendezvous(plan, (const cf_schedule *const *)schedules, plan->n_ranks);
}

/* ---- what is drawn ---- */

typedef struct in_step {
    int64_t lengths[40], n;
    cf_pack_desc pack;
    cf_schedule_desc order;
    cf_plan *plan, *columns;
    cf_schedule *list, *schedules[MOST_RANKS];
    cf_error error;
} in_step;

static void draw(harness_rng *rng, in_step *t) {
    static const int64_t ks[] = {1, 2, 4};
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST,
                                             CF_SCHEDULE_BEST, CF_SCHEDULE_ZERO_BUBBLE};
    int64_t i;
    memset(t, 0, sizeof *t);
    t->n = harness_between(rng, 0, 12);
    for (i = 0; i < t->n; i++) t->lengths[i] = harness_between(rng, 0, harness_between(rng, 0, 3) == 0 ? 150 : 32);
    t->pack.chunk_size = 32;
    t->pack.align = harness_between(rng, 0, 3) == 0 ? 4 : 0;
    t->pack.max_slices = harness_between(rng, 0, 3) == 0 ? 3 : 0;
    t->pack.no_tails = harness_between(rng, 0, 3) == 0;
    t->pack.n_ranks = harness_between(rng, 1, harness_between(rng, 0, 1) ? 4 : MOST_RANKS);
    t->pack.lockstep = harness_between(rng, 0, 7) != 0; /* any plan has columns */
    t->pack.split = (cf_split_method)harness_between(rng, 0, CF_SPLIT_COUNT - 1);
    t->pack.cost.constant = (double)harness_between(rng, 0, 1) * 10;
    t->pack.cost.per_token = 1;
    t->pack.cost.per_pair = (double)harness_between(rng, 0, 2) / 32;
    t->order.kind = kinds[harness_between(rng, 0, 5)];
    t->order.shape.n_stages = harness_between(rng, 1, 4);
    t->order.shape.k = ks[harness_between(rng, 0, 2)];
    if (harness_between(rng, 0, 1) && t->order.kind == CF_SCHEDULE_PAPER) t->order.shape.replay = CF_REPLAY_PIPELINE;
    if (t->order.kind == CF_SCHEDULE_BEST) {
        t->order.shape.n_virtual = harness_between(rng, 1, 2);
        t->order.split_backward = (int)harness_between(rng, 0, 1);
        t->order.shape.forward_only = harness_between(rng, 0, 7) == 0;
        problem_settle(&t->order);
        t->order.max_tries = 40;
        if (harness_between(rng, 0, 2) == 0) {
            t->order.limits.bytes = harness_between(rng, 1000, 3000);
            t->order.limits.per_token.activations = 5;
            t->order.limits.per_token.state = t->order.limits.per_token.state_gradient = 2;
            t->order.limits.per_token.boundary = 1;
        }
    }
    if (harness_between(rng, 0, 1)) t->pack.max_cp = harness_between(rng, 0, t->pack.n_ranks);
    t->pack.cp_row_seconds = (double)harness_between(rng, 0, 1) / 100;
}

/* Makes plan, list and schedules; `list` is NULL if the limits allow none. */
static int make(in_step *t, int lowers) {
    cf_schedule *lowered = NULL;
    int64_t rank;
    if (cf_pack(t->lengths, t->n, &t->pack, &t->plan, &t->error) != CF_OK) return 0;
    if (cf_lockstep_plan(t->plan, &t->pack.cost, NULL, &t->columns, &t->error) != CF_OK) return 0;
    if (cf_schedule_make(t->columns, &t->order, &t->list, &t->error) != CF_OK)
        return t->error.code == CF_ERROR_INFEASIBLE;
    if (lowers) {
        if (cf_schedule_lower(t->columns, t->list, NULL, &lowered, &t->error) != CF_OK) return 0;
        cf_schedule_free(t->list);
        t->list = lowered;
    }
    for (rank = 0; rank < t->plan->n_ranks; rank++)
        if (cf_lockstep_schedule(t->plan, t->list, rank, NULL, &t->schedules[rank], &t->error) != CF_OK) return 0;
    return 1;
}

static void drop(in_step *t) {
    int64_t rank;
    for (rank = 0; rank < MOST_RANKS; rank++) cf_schedule_free(t->schedules[rank]);
    cf_schedule_free(t->list);
    cf_plan_free(t->columns);
    cf_plan_free(t->plan);
}

static const cf_schedule *const *all(const in_step *t) { return (const cf_schedule *const *)t->schedules; }

/* ---- sound ones ---- */

/* A column's cost, rows and tokens are the largest of its chunks'. It is in a chain if any rank runs a chunk of a chain
   in it, and columns joined by such a chain form one chain. All of this is counted again here. */
TEST(columns_are_what_they_stand_for) {
    int i;
    for (i = 0; i < harness_rounds(2000, 400); i++) {
        harness_rng rng = {39000 + (uint64_t)i};
        in_step t;
        int64_t at, rank, before = 0, chains = 0, idle = 0, index = 0;
        draw(&rng, &t);
        harness_note("seed %d", 39000 + i);
        REQUIRE(cf_pack(t.lengths, t.n, &t.pack, &t.plan, &t.error) == CF_OK);
        REQUIRE(cf_lockstep_plan(t.plan, &t.pack.cost, NULL, &t.columns, &t.error) == CF_OK);
        CHECK_INT(t.columns->n_chunks, t.plan->chunks_per_rank);
        for (at = 0; at < t.plan->chunks_per_rank; at++) {
            const cf_chunk *c = &t.columns->chunks[at];
            int64_t tokens = 0, padded = 0, pairs = 0, state = 0, gathered = 0, others;
            double dearest = 0, cost;
            int runs = 0, goes_on = 0, works = 0, shares = 0;
            for (rank = 0; rank < t.plan->n_ranks; rank++) {
                int64_t id = rank * t.plan->chunks_per_rank + at;
                const cf_chunk *of = &t.plan->chunks[id];
                if (of->n_slices == 0) continue;
                works = 1;
                cost = cf_cost_seconds(&t.pack.cost, of->rows, of->pairs);
                if (cost > dearest) dearest = cost;
                if (of->tokens > tokens) tokens = of->tokens;
                if (of->rows > padded) padded = of->rows;
                if (of->pairs > pairs) pairs = of->pairs;
                if (t.plan->chunks[id].state > state) state = t.plan->chunks[id].state;
                shares |= of->chain >= 0 && t.plan->chains[of->chain].cp > 0;
                others = of->chain >= 0 ? t.plan->slices[of->first_slice].begin - of->prefix : 0;
                if (others > gathered) gathered = others;
                runs |= of->chain >= 0;
                goes_on |= of->chain >= 0 && of->index > 0;
            }
            idle += !works;
            if (runs && !goes_on) chains++, before = index = 0;
            CHECK_INT(c->n_slices, works);
            CHECK_INT(c->tokens, tokens);
            CHECK_INT(c->rows, padded);
            CHECK_INT(c->chain, runs ? chains - 1 : -1);
            CHECK_INT(c->index, runs ? index : 0);
            CHECK_INT(c->prefix, runs ? before : 0);
            CHECK_INT(c->cp, shares);
            CHECK_INT(t.columns->slices[at].begin, c->prefix + gathered);
            CHECK(c->pairs >= 0 && c->pairs <= pairs);
            CHECK(cf_cost_seconds(&t.pack.cost, padded, c->pairs) <= dearest * (1 + 1e-12));
            if (c->pairs < pairs)
                CHECK(cf_cost_seconds(&t.pack.cost, padded, c->pairs + 1) > dearest); /* exact: costs are in 32nds */
            if (!runs) continue;
            before += state;
            index++;
            CHECK_INT(t.columns->chains[c->chain].first_chunk, at + 1 - index);
            if (at + 1 == t.plan->chunks_per_rank || t.columns->chunks[at + 1].chain != c->chain) {
                CHECK_INT(t.columns->chains[c->chain].n_chunks, index);
                CHECK_INT(t.columns->chains[c->chain].tokens, before);
            }
        }
        CHECK_INT(t.columns->n_chains, chains);
        CHECK_INT(t.columns->n_idle, idle);
        drop(&t);
    }
}

/* The time of the columns is that of all ranks, which wait for the slowest rank in every pass. This includes several
   stages, and the gathers and scans of cp groups. The estimate is never less. It is more only if one rank computes most
   and another gathers most. */
TEST(columns_take_as_long_as_all_ranks_in_step) {
    double worst = 1;
    int i, gathers = 0;
    for (i = 0; i < harness_rounds(400, 100); i++) {
        harness_rng rng = {34000 + (uint64_t)i};
        in_step t;
        cf_timing timing = {.latency = i % 3, .seconds_per_token = i % 2 ? 0.125 : 0};
        cf_simulate_desc simulate = {0};
        cf_timeline *line = NULL;
        double wanted, ratio;
        int64_t j, shared = 0;
        draw(&rng, &t);
        memset(&t.order.limits, 0, sizeof t.order.limits);
        if (i % 2) t.lengths[t.n++] = 300, t.pack.n_ranks = t.pack.max_cp = 4;
        timing.all.forward = t.pack.cost;
        if (i % 8 < 6) timing.gather_forward = 0.5, timing.gather_backward = 1, timing.stream_exposed = 0.25;
        if (i % 8 < 4) timing.scan_forward = 3, timing.scan_backward = 5;
        if (i % 8 < 2) timing.stream_forward = timing.stream_backward = 0.5;
        t.order.timing = simulate.timing = &timing;
        REQUIRE(make(&t, 0));
        REQUIRE(cf_simulate(t.columns, t.list, &simulate, &line, NULL) == CF_OK);
        wanted = pipeline_in_step(t.plan, all(&t), t.plan->n_ranks, &timing, NULL, NULL);
        for (j = 0; j < t.plan->n_chains; j++) shared += t.plan->chains[j].cp > 0;
        harness_note("seed %d: %g for %g", 34000 + i, line->makespan, wanted);
        /* pairs are integers: rounding takes less than one pair from each pass */
        CHECK(line->makespan >= wanted * (1 - 1e-9) - 2 * t.pack.cost.per_pair * (double)t.list->n_actions);
        ratio = wanted > 0 ? line->makespan / wanted : 1;
        if (shared == 0 && i % 8 >= 2) CHECK(ratio <= 1 + 1e-9); /* a column streams what the longest chain has */
        if (ratio > worst) worst = ratio;
        gathers += shared > 0 && t.order.shape.n_stages > 1;
        cf_timeline_free(line);
        drop(&t);
    }
    harness_report("at most %.3f of all ranks in step; %d with cp groups over stages", worst, gathers);
    CHECK(gathers > i / 10 && worst < 1.15);
}

/* The example of five sequences: 32K and four of 8K on two ranks, K = 1. */
TEST(a_plain_plan_is_not_in_step) {
    in_step t = {.lengths = {32, 8, 8, 8, 8}, .n = 5, .pack = {.chunk_size = 8, .n_ranks = 2}};
    cf_error error = {0};
    int64_t rank;
    t.order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(cf_pack(t.lengths, t.n, &t.pack, &t.plan, NULL) == CF_OK);
    for (rank = 0; rank < 2; rank++) {
        t.order.shape.rank = rank;
        REQUIRE(cf_schedule_make(t.plan, &t.order, &t.schedules[rank], NULL) == CF_OK);
    }
    CHECK_STR(fault(t.plan, t.schedules), "not in step");
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "actions");
    CHECK_INT(error.item, 1); /* F F on rank 0, F B on rank 1 */
    CHECK(strstr(error.text, "rank 1, stage 0: B on virtual stage 0, where rank 0 has F on 0") != NULL);
    drop(&t);
    t = (in_step){.lengths = {32, 8, 8, 8, 8}, .n = 5, .pack = {.chunk_size = 8, .n_ranks = 2, .lockstep = 1}};
    t.order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(make(&t, 0));
    CHECK_INT(t.plan->chunks_per_rank, 4); /* the four run beside the long one and add no columns */
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &error), CF_OK);
    drop(&t);
}

/* In lockstep, ranks cost hardly more than their best without it: the mean rank, or the most expensive chain. */
TEST(in_step_costs_little) {
    double sum = 0;
    int i, j;
    for (i = 0; i < 40; i++) {
        harness_rng rng = {35000 + (uint64_t)i};
        static int64_t lengths[128];
        cf_pack_desc desc = {.chunk_size = 8192, .n_ranks = 8, .cost = {.per_token = 1, .per_pair = 2.64e-5}};
        cf_plan *plan = NULL, *columns = NULL;
        double mean = 0, chain = 0, dearest = 0, in_columns = 0;
        int64_t at;
        for (j = 0; j < 128; j++) {
            lengths[j] = (int64_t)1 << harness_between(&rng, 7, j % 8 == 0 ? 16 : 13);
            lengths[j] += lengths[j] / (j + 1);
        }
        REQUIRE(cf_pack(lengths, 128, &desc, &plan, NULL) == CF_OK);
        for (at = 0; at < plan->n_chunks; at++) {
            const cf_chunk *c = &plan->chunks[at];
            int replays = c->chain >= 0 && c->index + 1 < plan->chains[c->chain].n_chunks;
            double cost = cf_cost_seconds(&desc.cost, c->rows, c->pairs) * (3 + replays);
            mean += cost / 8;
            chain = (c->index > 0 ? chain : 0) + cost;
            if (chain > dearest) dearest = chain;
        }
        cf_plan_free(plan);
        desc.lockstep = 1;
        REQUIRE(cf_pack(lengths, 128, &desc, &plan, NULL) == CF_OK);
        REQUIRE(cf_lockstep_plan(plan, &desc.cost, NULL, &columns, NULL) == CF_OK);
        for (at = 0; at < columns->n_chunks; at++) {
            const cf_chunk *c = &columns->chunks[at];
            int replays = c->chain >= 0 && c->index + 1 < columns->chains[c->chain].n_chunks;
            in_columns += cf_cost_seconds(&desc.cost, c->rows, c->pairs) * (3 + replays);
        }
        sum += in_columns / (mean > dearest ? mean : dearest);
        cf_plan_free(columns);
        cf_plan_free(plan);
    }
    harness_report("%.4f of the best of free ranks", sum / 40);
    CHECK(sum / 40 <= 1.0035); /* 1.0033 as measured */
}

/* ---- planted faults ---- */

/* One rank runs its columns in another valid order. The rules and the validator both see each difference. */
TEST(ranks_out_of_step_are_refused) {
    int i, refused = 0;
    for (i = 0; i < harness_rounds(1000, 200); i++) {
        harness_rng rng = {38000 + (uint64_t)i};
        in_step t;
        const char *wrong;
        int64_t rank;
        draw(&rng, &t);
        t.pack.max_cp = 0; /* ranks of cp groups would not accept schedules of their own */
        memset(&t.order.limits, 0, sizeof t.order.limits);
        t.order.shape.replay = CF_REPLAY_LOCAL;
        REQUIRE(make(&t, 0));
        rank = harness_between(&rng, 0, t.plan->n_ranks - 1);
        t.order.shape.rank = rank;
        if (t.order.kind != CF_SCHEDULE_BEST) t.order.kind = CF_SCHEDULE_1F1B;
        cf_schedule_free(t.schedules[rank]);
        t.schedules[rank] = NULL;
        REQUIRE(cf_schedule_make(t.plan, &t.order, &t.schedules[rank], NULL) == CF_OK);
        if (t.schedules[rank]->shape.placement == t.list->shape.placement) {
            wrong = fault(t.plan, t.schedules);
            harness_note("seed %d: %s", 38000 + i, wrong ? wrong : "in step");
            CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, NULL), wrong ? CF_ERROR_SCHEDULE : CF_OK);
            refused += wrong != NULL;
        }
        drop(&t);
    }
    harness_report("%d of %d out of step", refused, i);
    CHECK(refused > i / 10);
}

static cf_schedule *by_hand(int64_t rank, const char *const *stages) {
    cf_schedule *s = naive_new(2, 12);
    int64_t stage, i;
    s->shape = (cf_shape){.n_stages = 2, .n_virtual = 1, .placement = CF_PLACEMENT_LOOP, .replay = CF_REPLAY_LOCAL,
                          .k = 1, .rank = rank};
    s->n_chunks = 6;
    for (stage = 0; stage < 2; stage++) {
        s->first[stage + 1] = 6 * (stage + 1);
        for (i = 0; i < 6; i++) {
            cf_action a = {(int32_t)(3 * rank + stages[stage][2 * i + 1] - '1'), (int32_t)stage, CF_F, 1, 0};
            if (stages[stage][2 * i] == 'B') a.pass = CF_B, a.keep = 0;
            s->actions[6 * stage + i] = a;
        }
    }
    return s;
}

/* Each rank by itself ends, and the kinds of passes agree. But the first backward on stage 0 waits, on rank 0, for the
   second on stage 1. That one comes after a forward which waits, on rank 1, for a pass behind that first backward. */
TEST(ranks_that_wait_for_each_other_in_a_circle_are_refused) {
    static const char *const rank0[] = {"F1F2B2F3B1B3", "F1B1F2B2F3B3"};
    static const char *const rank1[] = {"F1F2B1F3B3B2", "F1B1F3B3F2B2"};
    in_step t = {.lengths = {8, 8, 8, 8, 8, 8}, .n = 6, .pack = {.chunk_size = 8, .n_ranks = 2}};
    cf_schedule *schedules[2];
    cf_error error = {0};
    REQUIRE(cf_pack(t.lengths, t.n, &t.pack, &t.plan, NULL) == CF_OK);
    schedules[0] = by_hand(0, rank0);
    schedules[1] = by_hand(1, rank1);
    CHECK_STR(fault(t.plan, schedules), "the processes wait for each other for ever");
    CHECK_INT(cf_lockstep_validate(t.plan, (const cf_schedule *const *)schedules, NULL, NULL, &error),
              CF_ERROR_SCHEDULE);
    CHECK(strstr(error.text, "wait for each other") != NULL);
    naive_free(schedules[1]);
    schedules[1] = by_hand(1, rank0);
    CHECK_INT(cf_lockstep_validate(t.plan, (const cf_schedule *const *)schedules, NULL, NULL, &error), CF_OK);
    naive_free(schedules[0]);
    naive_free(schedules[1]);
    drop(&t);
}

/* ---- refusals ---- */

static void refused(cf_result got, const cf_error *error, cf_result wanted, const char *field) {
    CHECK_INT(got, wanted);
    CHECK_INT(error->code, wanted);
    CHECK_STR(error->field, field);
    CHECK_STR(oracle_error_fault(error), NULL);
}

TEST(what_cannot_be_in_step_is_named) {
    in_step t = {.lengths = {20, 8, 8}, .n = 3, .pack = {.chunk_size = 8, .n_ranks = 2, .lockstep = 2}};
    const cf_shared_prefix shares[3] = {{0, 0}, {0, 0}, {0, 0}};
    const int64_t too_long = 8 * ((int64_t)1 << 22) + 1;
    cf_schedule *none = NULL, *broken, incomplete;
    cf_plan *no_plan = NULL, tree;
    int64_t order[3] = {0, 1, 2};
    cf_error e = {0};
    refused(cf_pack(t.lengths, t.n, &t.pack, &no_plan, &e), &e, CF_ERROR_ARGUMENT, "lockstep");
    t.pack.lockstep = 1;
    t.pack.method = CF_PACK_NEXT_FIT;
    refused(cf_pack(t.lengths, t.n, &t.pack, &no_plan, &e), &e, CF_ERROR_ARGUMENT, "method");
    t.pack.method = CF_PACK_DEFAULT;
    t.pack.shared_prefixes = shares;
    refused(cf_pack(t.lengths, t.n, &t.pack, &no_plan, &e), &e, CF_ERROR_ARGUMENT, "lockstep");
    t.pack.shared_prefixes = NULL;
    t.pack.split = CF_SPLIT_COST;
    refused(cf_pack(&too_long, 1, &t.pack, &no_plan, &e), &e, CF_ERROR_LIMIT, "lengths");
    t.pack.split = CF_SPLIT_DEFAULT;
    t.order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(make(&t, 0));
    tree = *t.plan;
    tree.order = order;
    refused(cf_lockstep_plan(&tree, NULL, NULL, &no_plan, &e), &e, CF_ERROR_ARGUMENT, "plan");
    refused(cf_lockstep_plan(NULL, NULL, NULL, &no_plan, &e), &e, CF_ERROR_ARGUMENT, "plan");
    refused(cf_lockstep_plan(t.plan, NULL, NULL, NULL, &e), &e, CF_ERROR_ARGUMENT, "out");
    CHECK(no_plan == NULL);
    refused(cf_lockstep_schedule(NULL, t.list, 0, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "plan");
    refused(cf_lockstep_schedule(t.plan, NULL, 0, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "columns");
    refused(cf_lockstep_schedule(t.plan, t.list, 0, NULL, NULL, &e), &e, CF_ERROR_ARGUMENT, "out");
    refused(cf_lockstep_schedule(t.plan, t.list, 2, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "rank");
    refused(cf_lockstep_schedule(t.plan, t.list, -1, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "rank");
    refused(cf_lockstep_schedule(t.plan, t.schedules[1], 1, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "n_chunks");
    refused(cf_lockstep_schedule(t.columns, t.schedules[1], 0, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "n_chunks");
    broken = naive_copy(t.list);
    broken->shape.rank = 1;
    refused(cf_lockstep_schedule(t.plan, broken, 1, NULL, &none, &e), &e, CF_ERROR_ARGUMENT, "shape.rank");
    broken->shape.rank = 0;
    broken->actions[2].chunk = (int32_t)t.plan->chunks_per_rank;
    refused(cf_lockstep_schedule(t.plan, broken, 1, NULL, &none, &e), &e, CF_ERROR_SCHEDULE, "actions.chunk");
    CHECK_INT(e.item, 2);
    broken->first[1]--;
    refused(cf_lockstep_schedule(t.plan, broken, 1, NULL, &none, &e), &e, CF_ERROR_SCHEDULE, "first");
    incomplete = *t.list;
    incomplete.first = NULL;
    refused(cf_lockstep_schedule(t.plan, &incomplete, 1, NULL, &none, &e), &e, CF_ERROR_SCHEDULE, "first");
    incomplete = *t.list;
    incomplete.actions = NULL;
    refused(cf_lockstep_schedule(t.plan, &incomplete, 1, NULL, &none, &e), &e, CF_ERROR_SCHEDULE, "actions");
    CHECK(none == NULL);
    naive_free(broken);
    refused(cf_lockstep_validate(NULL, all(&t), NULL, NULL, &e), &e, CF_ERROR_ARGUMENT, "plan");
    refused(cf_lockstep_validate(t.plan, NULL, NULL, NULL, &e), &e, CF_ERROR_ARGUMENT, "schedules");
    none = t.schedules[1];
    t.schedules[1] = NULL;
    refused(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &e), &e, CF_ERROR_ARGUMENT, "schedules");
    CHECK_INT(e.item, 1);
    t.schedules[1] = t.schedules[0];
    refused(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &e), &e, CF_ERROR_SCHEDULE, "schedules");
    t.schedules[1] = none;
    none->shape.replay = CF_REPLAY_PIPELINE;
    refused(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &e), &e, CF_ERROR_SCHEDULE, "schedules");
    CHECK_INT(e.item, 1);
    drop(&t);
}

/* Each rank's schedule, lowered by itself, has its own order of transfers, and here each rank waits for the other to
   receive. So lowering it is refused. If the list is lowered before it is divided among the ranks, it ends. */
TEST(a_ranks_part_of_columns_is_not_lowered) {
    in_step t = {.lengths = {18}, .n = 1, .pack = {.chunk_size = 8, .n_ranks = 2, .lockstep = 1}};
    cf_schedule *lowered = NULL, *hidden[2];
    const cf_schedule *both[2];
    int64_t rank;
    cf_error e = {0};
    t.order.kind = CF_SCHEDULE_1F1B;
    t.order.shape.n_stages = 2;
    REQUIRE(make(&t, 0));
    CHECK_INT(t.list->lockstep, 0);
    for (rank = 0; rank < 2; rank++) {
        CHECK_INT(t.schedules[rank]->lockstep, 1);
        refused(cf_schedule_lower(t.plan, t.schedules[rank], NULL, &lowered, &e), &e, CF_ERROR_ARGUMENT, "lockstep");
        CHECK(lowered == NULL);
        t.schedules[rank]->lockstep = 0;   /* the schedules that lowering would give */
        CHECK_INT(cf_schedule_lower(t.plan, t.schedules[rank], NULL, &hidden[rank], &e), CF_OK);
        t.schedules[rank]->lockstep = 1;
        both[rank] = hidden[rank];
    }
    refused(cf_lockstep_validate(t.plan, both, NULL, NULL, &e), &e, CF_ERROR_SCHEDULE, "actions");
    CHECK(strstr(e.text, "wait for each other for ever") != NULL);
    CHECK_STR(fault(t.plan, hidden), "the processes wait for each other for ever");
    for (rank = 0; rank < 2; rank++) cf_schedule_free(hidden[rank]);
    t.schedules[0]->lockstep = 2;
    refused(cf_schedule_validate(t.plan, t.schedules[0], NULL, NULL, &e), &e, CF_ERROR_SCHEDULE, "lockstep");
    drop(&t);
    REQUIRE(make(&t, 1));
    CHECK_INT(t.schedules[1]->lowered, 1);
    CHECK_INT(t.schedules[1]->lockstep, 1);
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &e), CF_OK);
    drop(&t);
}

/* One rank's schedule has another shape than rank 0's. Each is valid, but together they cannot run. */
TEST(ranks_of_different_shapes_are_refused) {
    static const cf_shape shapes[] = {
        {.n_stages = 2, .n_virtual = 2}, /* rank 0's */
        {.n_stages = 4, .n_virtual = 2},
        {.n_stages = 2, .n_virtual = 1},
        {.n_stages = 2, .n_virtual = 2, .placement = CF_PLACEMENT_V},
        {.n_stages = 2, .n_virtual = 2, .forward_only = 1},
        {.n_stages = 2, .n_virtual = 2}, /* lowered */
        {.n_stages = 2, .n_virtual = 2}, /* like rank 0's */
    };
    const int n = (int)(sizeof shapes / sizeof shapes[0]);
    in_step t[7];
    int i;
    for (i = 0; i < n; i++) {
        const cf_schedule *two[2];
        cf_error e = {0};
        t[i] = (in_step){.lengths = {8, 8, 8, 8}, .n = 4, .pack = {.chunk_size = 8, .n_ranks = 2, .lockstep = 1},
                         .order = {.kind = CF_SCHEDULE_BEST, .shape = shapes[i]}};
        REQUIRE(make(&t[i], i == 5));
        two[0] = t[0].schedules[0];
        two[1] = t[i].schedules[1];
        if (i > 0 && i + 1 < n) {
            refused(cf_lockstep_validate(t[i].plan, two, NULL, NULL, &e), &e, CF_ERROR_SCHEDULE, "schedules");
            CHECK_INT(e.item, 1);
            CHECK(strstr(e.text, "shape") != NULL);
        } else CHECK_INT(cf_lockstep_validate(t[i].plan, two, NULL, NULL, &e), CF_OK);
    }
    for (i = 0; i < n; i++) drop(&t[i]);
}

/* Sequences with columns of their own are distributed over the fewest possible chunks: most expensive first, each to
   the cheapest chunk. Here that fails: 6 | 4 4, then 9 | 8, and a 3 fits nowhere. Best fit succeeds, so its chunks
   stay. */
TEST(what_cannot_be_dealt_evenly_stays_where_it_fits) {
    in_step t = {.lengths = {6, 4, 4, 3, 3}, .n = 5, .pack = {.chunk_size = 10, .n_ranks = 2, .lockstep = 1}};
    t.order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(make(&t, 0));
    CHECK_STR(oracle_plan_fault(t.plan, t.lengths, t.n), NULL);
    CHECK_INT(t.plan->chunks_per_rank, 1);
    CHECK_INT(t.plan->chunks[0].tokens, 10);
    CHECK_INT(t.plan->chunks[1].tokens, 10);
    drop(&t);
}

/* Without chunks, each rank gets a list without actions. */
TEST(an_empty_batch_has_empty_columns) {
    in_step t = {.n = 0, .pack = {.chunk_size = 8, .n_ranks = 2, .lockstep = 1}};
    cf_schedule without;
    t.order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(make(&t, 0));
    CHECK_INT(t.list->n_actions, 0);
    CHECK_INT(t.schedules[1]->n_actions, 0);
    without = *t.list;
    without.actions = NULL;
    cf_schedule_free(t.schedules[1]);
    t.schedules[1] = NULL;
    CHECK_INT(cf_lockstep_schedule(t.plan, &without, 1, NULL, &t.schedules[1], &t.error), CF_OK);
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &t.error), CF_OK);
    drop(&t);
}

/* A column in which all ranks idle costs nothing, even if a chunk has a constant cost. */
TEST(columns_without_chunks_cost_nothing) {
    in_step t = {.lengths = {8, 8}, .n = 2, .pack = {.chunk_size = 8, .n_ranks = 2}};
    const cf_pass_cost cost = {.constant = 10};
    cf_chunk chunks[4];
    cf_plan idle;
    int64_t i;
    cf_error e = {0};
    REQUIRE(cf_pack(t.lengths, t.n, &t.pack, &t.plan, &t.error) == CF_OK && t.plan->n_chunks == 2);
    memset(chunks, 0, sizeof chunks);
    for (i = 0; i < 4; i++) {
        chunks[i].rank = (int32_t)(i / 2);
        chunks[i].chain = chunks[i].up = chunks[i].down = -1;
        chunks[i].first_slice = t.plan->n_slices;
        if (i % 2 == 0) chunks[i] = t.plan->chunks[i / 2];
    }
    idle = *t.plan;
    idle.chunks = chunks;
    idle.n_chunks = 4;
    idle.chunks_per_rank = idle.n_idle = 2;
    REQUIRE(cf_lockstep_plan(&idle, &cost, NULL, &t.columns, &e) == CF_OK);
    CHECK_INT(t.columns->n_chunks, 2);
    CHECK_INT(t.columns->n_idle, 1);
    CHECK_INT(t.columns->chunks[0].n_slices, 1);
    CHECK_INT(t.columns->chunks[1].n_slices, 0);
    CHECK_INT(t.columns->chunks[1].rows, 0);
    CHECK_INT(t.columns->chunks[1].pairs, 0);
    drop(&t);
}

/* If rows cost nothing, or more than a double can hold, layouts differ only in their chunks. Slices are then full, and
   all sequences are there. */
TEST(in_step_without_costs) {
    in_step t = {.lengths = {20, 8, 8, 3, 30}, .n = 5, .pack = {.chunk_size = 8, .n_ranks = 3, .lockstep = 1}};
    int turn;
    t.pack.cost.constant = 1;
    t.pack.split = CF_SPLIT_COST;
    t.order.kind = CF_SCHEDULE_PAPER;
    for (turn = 0; turn < 2; turn++, t.pack.cost.per_token = 1e308) {
        REQUIRE(make(&t, 0));
        CHECK_STR(oracle_plan_fault(t.plan, t.lengths, t.n), NULL);
        CHECK_STR(fault(t.plan, t.schedules), NULL);
        CHECK_INT(t.plan->n_chains, 2);
        drop(&t);
    }
}

/* The last pair costs so much more than the first that no slice reaches its target cost. */
TEST(in_step_with_one_endless_sequence) {
    const int64_t length = 16000;
    const cf_pack_desc desc = {.chunk_size = 2, .n_ranks = 2, .lockstep = 1, .cost = {0, 0, 1}};
    cf_plan *plan = NULL;
    REQUIRE(cf_pack(&length, 1, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(cf_plan_validate(plan, &length, 1, NULL, NULL), CF_OK);
    CHECK(plan->n_chains == 1 && plan->chains[0].n_chunks >= 8000);
    cf_plan_free(plan);
}

/* Every allocation fails once. */
TEST(lockstep_survives_without_memory) {
    in_step t = {.lengths = {20, 8, 8, 3, 30}, .n = 5, .pack = {.chunk_size = 8, .n_ranks = 3, .lockstep = 1}};
    int64_t fail_at;
    int call, failed = 0;
    t.order.kind = CF_SCHEDULE_PAPER;
    REQUIRE(make(&t, 0));
    for (call = 0; call < 4; call++)
        for (fail_at = 1; fail_at < 30; fail_at++) {
            harness_heap heap = {0};
            cf_allocator allocator = {harness_alloc, harness_release, NULL};
            cf_plan *plan = NULL;
            cf_schedule *schedule = NULL;
            cf_error error = {0};
            cf_result result;
            allocator.user = &heap;
            heap.fail_at = fail_at;
            t.pack.allocator = &allocator;
            if (call == 0) result = cf_pack(t.lengths, t.n, &t.pack, &plan, &error);
            else if (call == 1) result = cf_lockstep_plan(t.plan, NULL, &allocator, &plan, &error);
            else if (call == 2) result = cf_lockstep_schedule(t.plan, t.list, 1, &allocator, &schedule, &error);
            else result = cf_lockstep_validate(t.plan, all(&t), NULL, &allocator, &error);
            t.pack.allocator = NULL;
            CHECK(result == CF_OK || (result == CF_ERROR_MEMORY && plan == NULL && schedule == NULL));
            failed += result == CF_ERROR_MEMORY;
            cf_plan_free(plan);
            cf_schedule_free(schedule);
            CHECK(heap.live == 0 && heap.faults == 0);
            if (result == CF_OK) break;
        }
    CHECK(failed >= 8);
    drop(&t);
}

SUITE(lockstep, CASE(columns_are_what_they_stand_for),
      CASE(columns_take_as_long_as_all_ranks_in_step),
      CASE(a_plain_plan_is_not_in_step), CASE(in_step_costs_little), CASE(ranks_out_of_step_are_refused),
      CASE(ranks_that_wait_for_each_other_in_a_circle_are_refused), CASE(what_cannot_be_in_step_is_named),
      CASE(ranks_of_different_shapes_are_refused), CASE(a_ranks_part_of_columns_is_not_lowered),
      CASE(what_cannot_be_dealt_evenly_stays_where_it_fits),
      CASE(in_step_without_costs), CASE(in_step_with_one_endless_sequence), CASE(columns_without_chunks_cost_nothing),
      CASE(an_empty_batch_has_empty_columns),
      CASE(lockstep_survives_without_memory));
