/* exact.h - the shortest schedule of a tiny pipeline, by trying everything that matters. Shares no code with
   chunkflow.h.

   Branch and bound over the starts of passes in rising order of time: a state is what each chunk has got to on each
   virtual stage, and when each stage, transfer and tensor is ready. A forward keeps or drops as it runs, so all sets of
   drops are tried. States that are nowhere better than one seen before, with the same passes done, are cut off. */

#ifndef EXACT_H
#define EXACT_H

#include "chunkflow.h"

#define EXACT_MOST_CELLS 32 /* chunks x virtual stages */
#define EXACT_MOST_PASSES (4 * EXACT_MOST_CELLS)
#define EXACT_UNKNOWN 1e300 /* for `known`, where no schedule is known */

/* The stage on which a virtual stage lies: in loops, or in a V. */
typedef int64_t (*exact_placement)(int64_t v, int64_t n_stages);
int64_t exact_loop(int64_t v, int64_t n_stages);
int64_t exact_v(int64_t v, int64_t n_stages);

typedef struct exact_answer {
    double makespan;   /* negative: the problem is too large, more than `most_nodes` states had to be seen, or no
                          schedule is sound */
    int64_t n_nodes;   /* states seen */
    int64_t n_actions; /* the schedule that was found, by rising start; 0 where `known` was not beaten */
    cf_action actions[EXACT_MOST_PASSES];
} exact_answer;

/* The optimum over everything that cf_schedule_validate accepts of the rank's chunks: any chunk may be dropped on any
   virtual stage (with pipeline replay only on 0 .. d - 1), at most K of a chain are kept at once, and no stage keeps
   more than its limit. Reads n_stages, n_virtual, k, replay, rank, timing, limit, limits and split_backward (0: no
   backward is split, 1: every one, 2: any) from desc; zeros mean what they mean there. A transfer between virtual
   stages of one stage takes no time. `known`: a makespan that some schedule reaches, or EXACT_UNKNOWN; the answer is at
   most that. */
exact_answer exact_optimum(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement, double known,
                           int64_t most_nodes);

/* The optimum over the schedules in which each chain keeps its last chunks, as many on all stages, and replays fill
   their places in falling order; standalone chunks are kept. Where there is a limit, every number of kept chunks up to
   K is tried for each chain. Virtual stages lie in loops. */
exact_answer exact_makespan(const cf_plan *plan, const cf_schedule_desc *desc, double known, int64_t most_nodes);

#endif /* EXACT_H */
