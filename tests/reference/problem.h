/* problem.h - draws problems for the suites, from lengths to steps, with one judge of everything.

       problem_wants wants = {0};
       problem p;
       wants.trees = wants.cp groups = 1;
       problem_draw(&rng, &wants, &p);                // lengths, options, and the plan that cf_pack makes of them
       problem_make(&p);                              // schedules, lowered, timed, and the steps of each stage
       CHECK_STR(problem_judge(&p), NULL);            // or the rule that is broken
       problem_free(&p);

   A draw sets the harness's note, so that a failure can be repeated from its output. You may change anything between
   draw and make. Make and judge skip what you leave NULL. */

#ifndef PROBLEM_H
#define PROBLEM_H

#include "chunkflow.h"
#include "../harness.h"

#define PROBLEM_MOST_SEQUENCES 64
#define PROBLEM_MOST_STAGES 8
#define PROBLEM_MOST_RANKS 16

/* The kinds of problems to draw. All zero: lists of up to 16 sequences on 1 or 2 ranks and up to 6 stages, and
   schedules of all kinds with costs and limits. */
typedef struct problem_wants {
    int64_t sequences;    /* the most. 0: 16 */
    int64_t ranks;        /* the most. 0: 2 */
    int trees;            /* 1: plans may share rows. Any of these three also draws all options of packing */
    int lockstep, cp_groups; /* 1: ranks may be in lockstep, or share sequences */
    int small;            /* 1: small lists, of up to 6 sequences by default */
    int random;           /* 1: small lists, a sound schedule in random order instead of a kind, and uneven costs */
} problem_wants;

/* Everything of one rank. NULL: not made. */
typedef struct problem_rank {
    cf_schedule *schedule, *lowered;
    cf_timeline *times, *lowered_times;
    cf_steps *steps[PROBLEM_MOST_STAGES], *lowered_steps[PROBLEM_MOST_STAGES];
} problem_rank;

/* Descriptions point into this struct: do not copy it. */
typedef struct problem {
    uint64_t seed;  /* state of the generator before the draw */
    int64_t n, lengths[PROBLEM_MOST_SEQUENCES];
    cf_shared_prefix shares[PROBLEM_MOST_SEQUENCES];
    cf_pack_desc pack;
    cf_schedule_desc desc;
    cf_timing timing;
    cf_stage_cost stages[PROBLEM_MOST_STAGES * 3];
    int64_t limits[PROBLEM_MOST_STAGES], limits_bytes[PROBLEM_MOST_STAGES];
    int is_random;  /* the schedule is naive_schedule's */
    cf_plan *plan;
    cf_plan *columns;                            /* if ranks are in lockstep, else NULL */
    cf_schedule *list, *lowered_list;            /* of these */
    problem_rank ranks[PROBLEM_MOST_RANKS];      /* in lockstep all of them, else that of desc.shape */
} problem;

/* wants: NULL is all zeros. */
void problem_draw(harness_rng *rng, const problem_wants *wants, problem *p);

/* Clears options that were drawn for another kind or shape and would be refused. */
static inline void problem_settle(cf_schedule_desc *desc) {
    if (desc->kind != CF_SCHEDULE_DEFAULT && desc->kind < CF_SCHEDULE_ZERO_BUBBLE) desc->split_backward = 0;
    if (desc->shape.forward_only) desc->split_backward = 0;
    if (desc->shape.n_virtual < 2) desc->shape.placement = CF_PLACEMENT_DEFAULT;
}

/* Makes schedules and lowered ones; problem_make also makes times and steps. Returns CF_OK, CF_ERROR_INFEASIBLE if the
   limits allow no schedule, or another code, which fails the test. Everything can be freed in any case. */
cf_result problem_order(problem *p);
cf_result problem_make(problem *p);

/* Returns NULL, or the first broken rule: of the plan and of its forest, of each rank's lists, of ranks together, of
   times, and of steps. Skips what is NULL. */
const char *problem_judge(const problem *p);

void problem_free(problem *p);

/* Returns the rank of desc. */
problem_rank *problem_own(problem *p);

#endif /* PROBLEM_H */
