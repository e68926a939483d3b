/* Plans as one relation, `up`: a judge over it, a slow one that follows it token by token, and cf_plan_validate. Lists,
   trees and gangs, with ranks and in lockstep; sound ones, and ones of which a number was changed. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/forest.h"
#include "../reference/oracle.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 24 };

typedef struct problem {
    int64_t n, lengths[MOST];
    cf_share shares[MOST];
    cf_pack_desc desc;
} problem;

static int64_t below(harness_rng *rng, int64_t n) { return harness_between(rng, 0, n - 1); }

static void draw_shares(harness_rng *rng, problem *p) {
    int64_t i, most;
    for (i = 1; i < p->n; i++) {
        p->shares[i].with = below(rng, 2) ? i - 1 : below(rng, i);
        most = p->lengths[p->shares[i].with] < p->lengths[i] ? p->lengths[p->shares[i].with] : p->lengths[i];
        p->shares[i].tokens = below(rng, 6) > 0 ? below(rng, most + 1) : 0;
    }
    p->desc.shares = p->shares;
    p->desc.share_least = 1 + below(rng, 4);
    p->desc.no_copies = below(rng, 2) == 0;
}

/* A list, a tree, ranks in lockstep, or gangs. */
static problem draw(harness_rng *rng) {
    static const int64_t ranks[] = {2, 4, 6, 8};
    problem p;
    int64_t kind = below(rng, 4), i;
    memset(&p, 0, sizeof p);
    p.n = 1 + below(rng, MOST);
    p.desc.align = (int64_t)1 << below(rng, 3);
    p.desc.chunk_size = p.desc.align * (1 + below(rng, 12));
    p.desc.max_slices = below(rng, 4) == 0 ? 1 + below(rng, 4) : 0;
    p.desc.split = (cf_split_method)below(rng, CF_SPLIT_COUNT);
    p.desc.no_tails = below(rng, 6) == 0;
    for (i = 0; i < p.n; i++) p.lengths[i] = below(rng, p.desc.chunk_size * (below(rng, 3) == 0 ? 6 : 1) + 1);
    if (kind == 0) p.desc.method = (cf_pack_method)below(rng, CF_PACK_COUNT);
    if (kind <= 1) p.desc.n_ranks = below(rng, 3) == 0 ? 1 + below(rng, 4) : 1;
    if (kind == 1) draw_shares(rng, &p);
    if (kind >= 2) {
        p.desc.n_ranks = ranks[below(rng, 4)];
        p.desc.lockstep = 1;
        p.desc.cost.per_token = 1;
        p.desc.cost.per_pair = (double)below(rng, 3) / 32;
    }
    if (kind == 3) p.desc.gang = 2 + below(rng, p.desc.n_ranks - 1);
    return p;
}

static cf_plan *pack(problem *p) {
    cf_plan *plan = NULL;
    cf_error error = {0};
    if (p->desc.shares != NULL) p->desc.shares = p->shares;
    if (cf_pack(p->lengths, p->n, &p->desc, &plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
    return plan;
}

TEST(sound_plans_are_sound_forests) {
    int64_t round, n = harness_rounds(20000, 2000), n_trees = 0, n_gangs = 0, n_deep = 0, i;
    for (round = 0; round < n; round++) {
        harness_rng rng = {31000 + (uint64_t)round};
        problem p = draw(&rng);
        cf_plan *plan = pack(&p);
        forest_plan *forest = forest_of(plan);
        const char *fault = forest_fault(forest, p.lengths), *slow = forest_slow_fault(forest, p.lengths);
        if (fault != NULL || slow != NULL)
            FAIL("round %d: %s; %s", (int)round, fault ? fault : "sound", slow ? slow : "sound");
        CHECK_INT(cf_plan_validate(plan, p.lengths, p.n, NULL, NULL), CF_OK);
        n_trees += plan->branches != NULL;
        n_gangs += plan->n_groups > 0 && plan->groups[0].gang > 0;
        for (i = 0; i < forest->n_chunks; i++) n_deep += forest->chunks[i].up >= 0;
        forest_free(forest);
        cf_plan_free(plan);
    }
    CHECK(n_trees > n / 8 && n_gangs > n / 16 && n_deep > n);
    printf("(%d trees, %d with gangs, %d chunks below others) ", (int)n_trees, (int)n_gangs, (int)n_deep);
}

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

/* A number of a plan and the same one of its forest. `ours` is NULL where only the forest has it. */
typedef struct both {
    int64_t *ours, *theirs;
    const char *name;
} both;

static both choose_slice(harness_rng *rng, cf_plan *plan, forest_plan *f) {
    int64_t i = below(rng, f->n_slices), what = below(rng, 7);
    cf_slice *s = &plan->slices[i];
    forest_slice *t = &f->slices[i];
    const both all[] = {{&s->sequence, &t->sequence, "sequence"}, {&s->begin, &t->begin, "begin"},
                        {&s->length, &t->length, "length"},       {&s->offset, &t->offset, "offset"},
                        {&s->up, &t->up, "slice.up"},             {&s->first, &t->first, "first"},
                        {&s->n, &t->n, "n"}};
    return all[what];
}

static both choose_chunk(harness_rng *rng, cf_plan *plan, forest_plan *f) {
    int64_t i = below(rng, f->n_chunks);
    cf_chunk *c = &plan->chunks[i];
    forest_chunk *d = &f->chunks[i];
    const both all[] = {{&c->first_slice, &d->first_slice, "first_slice"},
                        {&c->n_slices, &d->n_slices, "n_slices"},
                        {&c->tokens, &d->tokens, "tokens"},
                        {&c->padded, &d->padded, "padded"},
                        {&c->pairs, &d->pairs, "pairs"},
                        {&c->prefix, &d->prefix, "prefix"},
                        {&c->rank, &d->rank, "rank"},
                        {&c->up, &d->up, "chunk.up"},
                        {NULL, &d->state, "state"},
                        {NULL, &d->gang, "gang"}};
    return all[below(rng, (int64_t)(sizeof all / sizeof all[0]))];
}

static both choose(harness_rng *rng, cf_plan *plan, forest_plan *f) {
    int64_t what = below(rng, plan->branches != NULL ? 10 : 8), i = below(rng, f->n_sequences);
    both order = {NULL, NULL, "order"}, common = {NULL, NULL, "common"};
    if (what < 4) return choose_slice(rng, plan, f);
    if (what < 8) return choose_chunk(rng, plan, f);
    order.ours = plan->order + i, order.theirs = f->order + i;
    common.ours = plan->common + i, common.theirs = f->common + i;
    return what == 8 ? order : common;
}

/* One or two numbers of a sound plan are changed. The two judges of forests agree on every one. Where both have the
   numbers, cf_plan_validate agrees, except where two sequences of a list that are equally long change places, of whom
   only the forest says a second time which they are. */
TEST(damaged_plans_are_judged_alike) {
    int64_t round, n = harness_rounds(200000, 12000), refused = 0, taken = 0, differ = 0, own = 0, i;
    for (round = 0; round < n;) {
        harness_rng rng = {57000 + (uint64_t)round};
        problem p = draw(&rng);
        cf_plan *plan = pack(&p);
        forest_plan *forest = forest_of(plan);
        for (i = 0; i < 20 && forest->n_slices > 0; i++, round++) {
            both first = choose(&rng, plan, forest), second = choose(&rng, plan, forest);
            int64_t was[2] = {*first.theirs, *second.theirs};
            const char *fault, *slow;
            int shared = first.ours != NULL, twice = below(&rng, 3) == 0, sound;
            *first.theirs = draw_value(&rng, *first.theirs, plan->align);
            if (twice) *second.theirs = draw_value(&rng, *second.theirs, plan->align), shared &= second.ours != NULL;
            if (first.ours != NULL) *first.ours = *first.theirs;
            if (twice && second.ours != NULL) *second.ours = *second.theirs;
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
            *second.theirs = was[1];
            if (second.ours != NULL) *second.ours = was[1];
            *first.theirs = was[0];
            if (first.ours != NULL) *first.ours = was[0];
        }
        if (forest->n_slices == 0) round++;
        forest_free(forest);
        cf_plan_free(plan);
    }
    CHECK(differ <= n / 10000);
    CHECK(refused > n / 4 && taken > n / 100 && own > n / 20);
    printf("(%d refused, %d taken, %d of members of forests alone, %d differ) ", (int)refused, (int)taken, (int)own,
           (int)differ);
}

SUITE(forest, CASE(sound_plans_are_sound_forests), CASE(damaged_plans_are_judged_alike));
