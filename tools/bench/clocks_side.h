/* One header's side of bench_clocks.c: makes a schedule, and times it by other clocks. It is compiled once for each of
   the two headers, so this file must not depend on either. */

#if !defined(CLOCKS_SIDE_H)
#define CLOCKS_SIDE_H

#include <stdint.h>

/* The clocks: the estimates themselves; random errors of some per cent; attention that takes half or twice as long; a
   fifth of the mean pass added to each pass; one slow stage; slow transfers; and other ratios of backward and
   forward. */
#define CLOCKS(X)                                                                                                     \
    X(NOMINAL) X(NOISE_5) X(NOISE_10) X(NOISE_20) X(HALF_ATTENTION) X(TWICE_ATTENTION) X(CONSTANT) X(SLOW_STAGE)      \
    X(SLOW_TRANSFERS) X(RATIO_1_8) X(RATIO_2_4)

#define CLOCK_AS_ITEM(name) CLOCK_##name,
enum { CLOCKS(CLOCK_AS_ITEM) N_CLOCKS };

typedef struct clocks_case {
    const int64_t *lengths;
    int64_t n_lengths, chunk_size;
    int64_t n_stages, n_virtual, k, limit; /* limit: chunks; 0: the default ones, -1: none */
    int in_v, split;
    double forward[3], input[3], weight[3]; /* seconds of a pass, of a row and of a pair */
    double latency, per_row;                /* seconds of a transfer */
} clocks_case;

typedef struct clocks_result {
    double seconds;           /* of the search */
    double bound;             /* by the estimates */
    double makespan[N_CLOCKS]; /* geometric mean of several runs with one clock */
    int64_t n_actions;
} clocks_result;

typedef void clocks_measure(const clocks_case *it, clocks_result *result);

clocks_measure clocks_this, clocks_other;

#endif
