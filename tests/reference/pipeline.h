/* pipeline.h - what schedules of several stages are judged by: slow code written from the definitions.

   Nothing here calls the library's schedules or its simulator; it only reads their structs. */

#ifndef PIPELINE_H
#define PIPELINE_H

#include "chunkflow.h"
#include "../harness.h"

/* 16 chunks of one token each, a forward of which takes half a second. The caller frees the plan. */
cf_plan *pipeline_sixteen(cf_timing *timing);

/* Every rule that the lists of a schedule must keep by themselves: each pass of each chunk once, on its stage, order in
   chains, replays, at most K chunks of a chain kept, limits in chunks and bytes. NULL, or the rule that is broken. */
const char *pipeline_fault(const cf_plan *plan, const cf_schedule *schedule, const cf_schedule_desc *desc);

/* Starts and ends of all actions, of lowered schedules too, by going over the lists again and again until no time
   changes; returns the makespan, or -1 if times grow without end (a deadlock). start, end: (n_actions), or both
   NULL. In step: of ranks with the same list of passes, each of which begins when all ranks can and takes as long as on
   the slowest. */
double pipeline_makespan(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing, double *start,
                         double *end);
double pipeline_in_step(const cf_plan *plan, const cf_schedule *const *schedules, int64_t n_ranks,
                        const cf_timing *timing, double *start, double *end);

/* An action's number, -1: there is none. The pass whose result a SEND sends. Seconds that a chunk's transfer takes. */
int64_t pipeline_find(const cf_schedule *schedule, int pass, int64_t chunk, int64_t v);
int64_t pipeline_maker(const cf_schedule *schedule, const cf_action *send);
double pipeline_transfer(const cf_plan *plan, const cf_timing *timing, int64_t chunk);

/* Seconds of a pass of a chunk on virtual stage v, by the words of cf_stage_cost and cf_timing. */
double pipeline_seconds(const cf_plan *plan, const cf_timing *timing, int outputs, int64_t v, int64_t chunk,
                        int pass);

/* Judges a timeline: of each action its times, of all of them their sums and bounds, of each stage its peaks, in bytes
   as well. */
const char *pipeline_times_fault(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing,
                                 const cf_held_bytes *bytes, const cf_timeline *timeline);

/* A lowered schedule has the passes of the schedule, in its order, and as many transfers as tensors that cross stages.
   Its passes run when those of the schedule do, to the last bit. */
const char *pipeline_lowered_fault(const cf_schedule *schedule, const cf_schedule *lowered);
const char *pipeline_same_times_fault(const cf_schedule *schedule, const cf_timeline *times, const cf_schedule *lowered,
                                      const cf_timeline *lowered_times);

/* The most tokens of state that any virtual stage of a stage holds at once, over what it may hold by default: two of
   the longest chain, and a chunk for each virtual stage behind its first. */
double pipeline_state_over_default(const cf_plan *plan, const cf_schedule *schedule);

#endif /* PIPELINE_H */
