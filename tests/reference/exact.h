/* exact.h - the shortest schedule of a tiny pipeline, by exhaustive search. Shares no code with chunkflow.h.

   Branch and bound over the starts of passes in rising order of time. A state has the progress of each chunk on each
   virtual stage, and when each stage, transfer and tensor is ready. A forward keeps or drops as it runs, so all sets of
   dropped chunks are tried. States are cut off that are nowhere better than an earlier one with the same finished
   passes. */

#ifndef EXACT_H
#define EXACT_H

#include "chunkflow.h"

#define EXACT_MOST_CELLS 32 /* chunks x virtual stages */
#define EXACT_MOST_PASSES (4 * EXACT_MOST_CELLS)
#define EXACT_UNKNOWN 1e300 /* value of `known` if no schedule is known */

/* Returns the stage of a virtual stage: in loops, or in a V. */
typedef int64_t (*exact_placement)(int64_t v, int64_t n_stages);
int64_t exact_loop(int64_t v, int64_t n_stages);
int64_t exact_v(int64_t v, int64_t n_stages);

typedef struct exact_answer {
    double makespan;   /* negative if the problem is too large, more than `most_nodes` states were visited, or no
                          schedule is sound */
    int64_t n_nodes;   /* states seen */
    int64_t n_actions; /* the schedule that was found, by rising start; 0 if none beat `known` */
    cf_action actions[EXACT_MOST_PASSES];
} exact_answer;

/* Finds the optimum over every schedule of the rank's chunks that cf_schedule_validate accepts. Any chunk may be
   dropped on any virtual stage (with pipeline replay only on 0 .. d - 1). At most K of a chain are kept at a time, and
   no stage keeps more than its limit. A transfer between virtual stages of one stage takes no time.

   Reads n_stages, n_virtual, k, replay, rank, timing, limit, limits and split_backward (0: no backward is split, 1:
   every one, 2: any) from desc; zeros have their usual meaning. known: the makespan of some schedule, or EXACT_UNKNOWN;
   the answer is at most that. */
exact_answer exact_optimum(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement, double known,
                           int64_t most_nodes);

/* Finds the optimum over restricted schedules. Each chain keeps its last chunks, equally many on all stages, and
   replays fill their places in falling order; standalone chunks are kept. With a limit, every number of kept chunks up
   to K is tried for each chain. Virtual stages are placed in loops. */
exact_answer exact_makespan(const cf_plan *plan, const cf_schedule_desc *desc, double known, int64_t most_nodes);

#endif /* EXACT_H */
