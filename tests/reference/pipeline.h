/* pipeline.h - judges of schedules with several stages: slow code written from the definitions.

   Nothing here calls the library's schedules or its simulator; only their structs are read. */

#ifndef PIPELINE_H
#define PIPELINE_H

#include "chunkflow.h"
#include "../harness.h"

/* Packs 16 chunks of one token each, whose forward takes half a second. The caller frees the plan. */
cf_plan *pipeline_sixteen(cf_timing *timing);

/* Checks every rule on the lists of a schedule: each pass of each chunk once, on its stage, order in chains, replays,
   at most K kept chunks of a chain, limits in chunks and bytes. Returns NULL, or the broken rule. */
const char *pipeline_fault(const cf_plan *plan, const cf_schedule *schedule, const cf_schedule_desc *desc);

/* Finds starts and ends of all actions, of lowered schedules as well, by repeating the lists until no time changes.
   Returns the makespan, or -1 if times grow without end (a deadlock). start, end: (n_actions), or both NULL. In
   lockstep the ranks have the same list of passes; each pass begins when all ranks can and takes as long as on the
   slowest. */
double pipeline_makespan(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing, double *start,
                         double *end);
double pipeline_in_step(const cf_plan *plan, const cf_schedule *const *schedules, int64_t n_ranks,
                        const cf_timing *timing, double *start, double *end);

/* Returns an action's number, -1: there is none. Below: the pass whose result a SEND sends; the seconds of a chunk's
   transfer. */
int64_t pipeline_find(const cf_schedule *schedule, int pass, int64_t chunk, int64_t v);
int64_t pipeline_maker(const cf_schedule *schedule, const cf_action *send);
double pipeline_transfer(const cf_plan *plan, const cf_timing *timing, int64_t chunk);

/* Returns the seconds of a pass of a chunk on virtual stage v, as cf_stage_cost and cf_timing define them. */
double pipeline_seconds(const cf_plan *plan, const cf_timing *timing, int outputs, int64_t v, int64_t chunk,
                        int pass);

/* Judges a timeline: each action's times, all sums and bounds, and each stage's peaks, in bytes as well. */
const char *pipeline_times_fault(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing,
                                 const cf_held_bytes *bytes, const cf_timeline *timeline);

/* Checks a lowered schedule. It has the schedule's passes in its order, and one transfer for each tensor that crosses
   stages. Its passes run at the same times to the last bit. */
const char *pipeline_lowered_fault(const cf_schedule *schedule, const cf_schedule *lowered);
const char *pipeline_same_times_fault(const cf_schedule *schedule, const cf_timeline *times, const cf_schedule *lowered,
                                      const cf_timeline *lowered_times);

/* Returns the largest state in tokens that any virtual stage of a stage holds, over the default limit: two of the
   longest chain, and a chunk for each virtual stage after its first. */
double pipeline_state_over_default(const cf_plan *plan, const cf_schedule *schedule);

#endif /* PIPELINE_H */
