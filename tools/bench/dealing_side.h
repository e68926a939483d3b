/* The questions of bench_dealing.c to a header. */

#ifndef DEALING_SIDE_H
#define DEALING_SIDE_H

#include <stdint.h>

typedef struct dealing_case {
    const int64_t *lengths;
    int64_t n, n_ranks, chunk_size;
    double constant, per_token, per_pair;
    int64_t lockstep, max_cp;
} dealing_case;

/* The results for a plan: seconds of its most expensive rank or, in lockstep, of all columns; chunks of a rank, and of
   all ranks. */
typedef struct dealing_result {
    double seconds, mean;
    int64_t steps, chunks;
} dealing_result;

typedef struct dealing_side {
    dealing_result (*pack)(const dealing_case *of);
    double (*time)(const dealing_case *of, double *validate); /* returns the processor seconds of one call of cf_pack;
                                                                 *validate: those of cf_plan_validate */
} dealing_side;

extern const dealing_side dealing_this, dealing_other;

#endif
