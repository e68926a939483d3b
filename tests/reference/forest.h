/* forest.h - a plan as one relation, `up`, and two judges of it.

   `up` names the rows that come directly before these. A slice's up is the slice that ends where it begins: one of its
   own chunk, of a chunk above, or of another rank's share of a cp group. A chunk's up is the chunk of its rank that it
   continues. Lists, trees and cp groups then have one form:

       a list, chunks of 8      sequence 0: 20 tokens          slice     0    1    2
                                                               rows     0-7 8-15 16-19
                                                               up       -1    0    1

       a tree                   1 and 2 share 6 tokens         slice     0    1    2
                                                               rows     0-5  6-9  6-7
                                                               up       -1    0    0

   forest_fault reads each slice once, and counts with arrays of differences. forest_slow_fault follows `up` for each
   token. Neither calls the library. Both return NULL if the plan is sound, or the broken rule. */

#ifndef FOREST_H
#define FOREST_H

#include "chunkflow.h"

typedef struct forest_slice {
    int64_t sequence, begin, length, offset;
    int64_t up;       /* -1: none, its sequences begin here */
    int64_t first, n; /* the sequences order[first .. first + n) run through it */
} forest_slice;

typedef struct forest_chunk {
    int64_t first_slice, n_slices, tokens, rows, pairs;
    int64_t up;     /* -1: none */
    int64_t prefix; /* rows above it on its rank */
    int64_t state;  /* its first rows, which chunks below see */
    int64_t rank;
    int64_t cp;     /* ranks that share its sequence; 0: one */
} forest_chunk;

typedef struct forest_plan {
    int64_t chunk_size, align, max_slices, n_sequences, n_ranks, chunks_per_rank, n_chunks, n_slices;
    int64_t *order, *common; /* (n_sequences) as in cf_plan; for a list, which has none: 0, 1, 2 ... and zeros */
    forest_chunk *chunks;
    forest_slice *slices;
} forest_plan;

/* Converts a plan; release with forest_free. The plan must be sound, and trees must not be in cp groups. */
forest_plan *forest_of(const cf_plan *plan);
void forest_free(forest_plan *forest);

/* Returns the chunk whose rows come directly before those of this one; -1: none. In a cp group it is on another
   rank. */
int64_t forest_before(const forest_plan *forest, int64_t chunk);

const char *forest_fault(const forest_plan *forest, const int64_t *lengths);
const char *forest_slow_fault(const forest_plan *forest, const int64_t *lengths);

#endif /* FOREST_H */
