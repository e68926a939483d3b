/* Tests plans as a relation `up` between rows. A judge over it, a slow one that follows it token by token, and
   cf_plan_validate must agree. Lists, trees and cp groups, with ranks and in lockstep, each have a number changed.
   (test_problem has undamaged ones.) */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/forest.h"
#include "../reference/oracle.h"
#include "../reference/problem.h"

#include <stdlib.h>
#include <string.h>

static int64_t below(harness_rng *rng, int64_t n) { return harness_between(rng, 0, n - 1); }

/* ---- damage ---- */

static int64_t draw_value(harness_rng *rng, int64_t old, int64_t align) {
    switch (below(rng, 7)) {
        case 0: return old + 1;
        case 1: return old - 1;
        case 2: return old + align;
        case 3: return old - align;
        case 4: return 0;
        case 5: return -1;
        default: return below(rng, 24);
    }
}

/* The same number in a plan and in its forest. `ours` is NULL if only the forest has it. */
typedef struct both {
    oracle_number ours;
    int64_t *theirs;
    const char *name;
} both;

/* Sets both; in the plan some numbers have 32 bits. */
static void set_both(const both *of, int64_t value) {
    *of->theirs = value;
    if (of->ours.at != NULL) oracle_write(of->ours, value);
    if (of->ours.at != NULL) *of->theirs = oracle_read(of->ours);
}

static both choose_slice(harness_rng *rng, cf_plan *plan, forest_plan *f) {
    int64_t i = below(rng, f->n_slices), what = below(rng, 7);
    cf_slice *s = &plan->slices[i];
    forest_slice *t = &f->slices[i];
    const both all[] = {{{NULL, 0}, &t->begin, "begin"},   {{NULL, 0}, &t->sequence, "sequence"},
                        {{NULL, 0}, &t->length, "length"}, {{NULL, 0}, &t->offset, "offset"},
                        {{NULL, 0}, &t->up, "slice.up"},   {{NULL, 0}, &t->first, "first"},
                        {{NULL, 0}, &t->n, "n"}};
    both chosen = all[what];
    chosen.ours = oracle_slice_number(s, what);
    return chosen;
}

static both choose_chunk(harness_rng *rng, cf_plan *plan, forest_plan *f) {
    int64_t i = below(rng, f->n_chunks);
    cf_chunk *c = &plan->chunks[i];
    forest_chunk *d = &f->chunks[i];
    const size_t bytes = sizeof(int64_t);
    const both all[] = {{{&c->first_slice, bytes}, &d->first_slice, "first_slice"},
                        {{&c->n_slices, bytes}, &d->n_slices, "n_slices"},
                        {{&c->tokens, bytes}, &d->tokens, "tokens"},
                        {{&c->rows, bytes}, &d->rows, "rows"},
                        {{&c->pairs, bytes}, &d->pairs, "pairs"},
                        {{&c->prefix, bytes}, &d->prefix, "prefix"},
                        {{&c->rank, bytes}, &d->rank, "rank"},
                        {{&c->up, bytes}, &d->up, "chunk.up"},
                        {{NULL, 0}, &d->state, "state"},
                        {{NULL, 0}, &d->cp, "cp"}};
    return all[below(rng, (int64_t)(sizeof all / sizeof all[0]))];
}

static both choose(harness_rng *rng, cf_plan *plan, forest_plan *f) {
    int64_t what = below(rng, plan->order != NULL ? 10 : 8), i = below(rng, f->n_sequences);
    both order = {{NULL, sizeof(int64_t)}, f->order + i, "order"};
    both common = {{NULL, sizeof(int64_t)}, f->common + i, "common"};
    if (what < 4) return choose_slice(rng, plan, f);
    if (what < 8) return choose_chunk(rng, plan, f);
    order.ours.at = plan->order + i;
    common.ours.at = plan->common + i;
    return what == 8 ? order : common;
}

/* Changes one or two numbers of a valid plan. The two judges of forests always agree. If plan and forest both have the
   numbers, cf_plan_validate agrees as well, with one exception: two equally long sequences of a list change places.
   Only the forest records separately which sequences they are. */
TEST(damaged_plans_are_judged_alike) {
    int64_t round, n = harness_rounds(200000, 12000), refused = 0, taken = 0, differ = 0, own = 0, i;
    problem_wants wants = {0};
    wants.trees = wants.lockstep = wants.cp_groups = 1;
    for (round = 0; round < n;) {
        harness_rng rng = {57000 + (uint64_t)round};
        problem p;
        cf_plan *plan;
        forest_plan *forest;
        problem_draw(&rng, &wants, &p);
        plan = p.plan, forest = forest_of(plan);
        for (i = 0; i < 20 && forest->n_slices > 0; i++, round++) {
            both first = choose(&rng, plan, forest), second = choose(&rng, plan, forest);
            int64_t was[2] = {*first.theirs, *second.theirs};
            const char *fault, *slow;
            int shared = first.ours.at != NULL, twice = below(&rng, 3) == 0, sound;
            set_both(&first, draw_value(&rng, *first.theirs, plan->align));
            if (twice) set_both(&second, draw_value(&rng, *second.theirs, plan->align)), shared &= second.ours.at != NULL;
            fault = forest_fault(forest, p.lengths);
            slow = forest_slow_fault(forest, p.lengths);
            sound = cf_plan_validate(plan, p.lengths, p.n, NULL, NULL) == CF_OK;
            if ((fault != NULL) != (slow != NULL))
                FAIL("round %d, %s to %d, %s: %s; slow: %s", (int)round, first.name, (int)*first.theirs,
                     twice ? second.name : "alone", fault ? fault : "sound", slow ? slow : "sound");
            if (shared && sound != (fault == NULL)) {
                differ++;
                if (getenv("FOREST_DIFFERENCES"))
                    printf("%s to %d, %s: plan %s, forest %s\n", first.name, (int)*first.theirs,
                           twice ? second.name : "alone", sound ? "sound" : "refused", fault ? fault : "sound");
            }
            refused += fault != NULL;
            taken += fault == NULL;
            own += !shared;
            set_both(&second, was[1]);
            set_both(&first, was[0]);
        }
        if (forest->n_slices == 0) round++;
        forest_free(forest);
        problem_free(&p);
    }
    CHECK(differ <= n / 10000);
    CHECK(refused > n / 4 && taken > n / 100 && own > n / 20);
    printf("(%d refused, %d taken, %d of members of forests alone, %d differ) ", (int)refused, (int)taken, (int)own,
           (int)differ);
}

SUITE(forest, CASE(damaged_plans_are_judged_alike));
