/* random_schedule.h - sound schedules made at random, to test claims about all schedules. Written from the rules of
   cf_schedule_validate; uses only the structs of chunkflow.h.

   Any chunk may be dropped on any virtual stage. Passes are placed one after another as time advances. So some
   schedules are as good as a greedy scheduler's, and others postpone passes, replay early, take sequences in another
   order or drop on some stages only. */

#ifndef RANDOM_SCHEDULE_H
#define RANDOM_SCHEDULE_H

#include "chunkflow.h"
#include "exact.h"
#include "../harness.h"

/* Makes a schedule. Reads n_stages, n_virtual, k, replay, rank, timing, limit, limits and split_backward (0: no
   backward is split, 1: every one, 2: any) from desc; zeros have their usual meaning. greedy: 1 if every stage runs
   what it can as soon as it can. Returns NULL if no schedule was found, which happens only if a limit is too small for
   any. Release with naive_free. */
cf_schedule *random_schedule(harness_rng *rng, const cf_plan *plan, const cf_schedule_desc *desc,
                             exact_placement placement, int greedy);

/* Makes a schedule of that description from actions in an order in which they can run. */
cf_schedule *random_schedule_from(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement,
                                  const cf_action *order, int64_t n);

#endif /* RANDOM_SCHEDULE_H */
