/* exact.h - the shortest schedule of a tiny pipeline, by trying everything that matters. Shares no code with chunkflow.h.

   Branch and bound over active schedules (Giffler and Thompson, 1960), widened for memory: where the pass that could end
   first takes a slot, there is one more branch in which its stage waits for another pass. States that are no better than one
   seen before, for the same passes done, are cut off. */

#ifndef EXACT_H
#define EXACT_H

#include "chunkflow.h"

#define EXACT_MOST_PASSES 64

typedef struct exact_answer {
    double makespan;   /* negative: the problem is too large, or more than `most_nodes` states had to be seen */
    int64_t n_nodes;   /* states seen */
} exact_answer;

/* The optimum over all schedules of the rank's chunks that keep to K, the group order and the limit in chunks. Where there is
   a limit, every number of kept chunks up to K is tried for each group (the same on all stages). Reads n_stages, n_virtual,
   k, replay, rank, timing (costs; transfers must be free), limit, limits and split_backward (1: every backward is split)
   from desc; zeros mean what they mean there. `known`: a makespan that some schedule reaches; the answer is at most that. */
exact_answer exact_makespan(const cf_plan *plan, const cf_schedule_desc *desc, double known, int64_t most_nodes);

#endif /* EXACT_H */
