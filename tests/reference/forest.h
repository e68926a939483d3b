/* forest.h - a plan as one relation, `up`, and two judges of it.

   `up` answers whose rows come right before mine. A slice's up is the slice that ends where it begins: one of its own
   chunk, of a chunk above, or of another rank's share of a cp group. A chunk's up is the chunk of its rank that it
   continues. Lists, trees and cp groups are then one thing:

       a list, chunks of 8      sequence 0: 20 tokens          slice     0    1    2
                                                               rows     0-7 8-15 16-19
                                                               up       -1    0    1

       a tree                   1 and 2 share 6 tokens         slice     0    1    2
                                                               rows     0-5  6-9  6-7
                                                               up       -1    0    0

   forest_fault reads each slice once, and counts with arrays of differences. forest_slow_fault follows `up` for each
   token. Neither calls the library. Both return NULL for "sound", or the rule that is broken. */

#ifndef FOREST_H
#define FOREST_H

#include "chunkflow.h"

typedef struct forest_slice {
    int64_t sequence, begin, length, offset;
    int64_t up;       /* -1: none, it begins its sequences */
    int64_t first, n; /* order[first .. first + n) run through it */
} forest_slice;

typedef struct forest_chunk {
    int64_t first_slice, n_slices, tokens, rows, pairs;
    int64_t up;     /* -1: none */
    int64_t prefix; /* rows above it, on its rank */
    int64_t state;  /* rows, its first ones, that chunks below see */
    int64_t rank;
    int64_t cp;     /* ranks that its sequence is spread over; 0: one */
} forest_chunk;

typedef struct forest_plan {
    int64_t chunk_size, align, max_slices, n_sequences, n_ranks, chunks_per_rank, n_chunks, n_slices;
    int64_t *order, *common; /* (n_sequences) as in cf_plan; of a list, which has none: 0, 1, 2 ... and zeros */
    forest_chunk *chunks;
    forest_slice *slices;
} forest_plan;

/* The same plan, to be given to forest_free. The plan must be sound, and trees must not be spread over cp groups. */
forest_plan *forest_of(const cf_plan *plan);
void forest_free(forest_plan *forest);

/* The chunk whose rows come right before those of this one: -1, or on another rank where it is of a cp group. */
int64_t forest_before(const forest_plan *forest, int64_t chunk);

const char *forest_fault(const forest_plan *forest, const int64_t *lengths);
const char *forest_slow_fault(const forest_plan *forest, const int64_t *lengths);

#endif /* FOREST_H */
