/* random_schedule.h - sound schedules made at random, to try claims about all schedules on. Written from the words of
   cf_schedule_validate; of chunkflow.h it uses the structs only.

   Any chunk may be dropped on any virtual stage. Passes are placed one after the other where time has got to, so some
   schedules are as good as a greedy scheduler makes them, and others put passes off, replay early, take units in
   another order or drop on some stages only. */

#ifndef RANDOM_SCHEDULE_H
#define RANDOM_SCHEDULE_H

#include "chunkflow.h"
#include "exact.h"
#include "../harness.h"

/* Reads n_stages, n_virtual, k, replay, rank, timing, limit, limits and split_backward (0: no backward is split, 1:
   every one, 2: any) from desc; zeros mean what they mean there. greedy: 1 where every stage shall run what it can as
   soon as it can. NULL where nothing was found that ends, which happens only if a limit is too small for any schedule.
   To be given to naive_free. */
cf_schedule *random_schedule(harness_rng *rng, const cf_plan *plan, const cf_schedule_desc *desc,
                             exact_placement placement, int greedy);

/* A schedule of actions in an order in which they can run, as made from that description. */
cf_schedule *random_schedule_from(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement,
                                  const cf_action *order, int64_t n);

#endif /* RANDOM_SCHEDULE_H */
