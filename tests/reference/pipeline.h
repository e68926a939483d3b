/* pipeline.h - pipelines to test with, and what they are judged by: slow code written from the definitions.

   Nothing here calls the library's schedules or its simulator; it only reads their structs. */

#ifndef PIPELINE_H
#define PIPELINE_H

#include "chunkflow.h"
#include "../harness.h"

#define PIPELINE_MOST_STAGES 8

/* A random plan and what to schedule of it. `desc` points into this struct. */
typedef struct pipeline_problem {
    cf_plan *plan;
    cf_schedule_desc desc;
    cf_timing timing;
    cf_stage_cost stages[PIPELINE_MOST_STAGES * 3];
    int64_t limits[PIPELINE_MOST_STAGES], limits_bytes[PIPELINE_MOST_STAGES];
} pipeline_problem;

/* All kinds, 1 .. 6 stages, groups of 1 .. 10 chunks, both replays, limits in chunks and bytes, uneven costs,
   transfers. The caller frees the plan. */
void pipeline_draw(harness_rng *rng, pipeline_problem *problem);

/* Sets the harness's note to the problem. */
void pipeline_note(uint64_t seed, const pipeline_problem *problem);

/* 16 chunks of one token each, a forward of which takes half a second. The caller frees the plan. */
cf_plan *pipeline_sixteen(cf_timing *timing);

/* Every rule that the lists of a schedule must keep by themselves: each pass of each chunk once, on its stage, order in
   groups, replays, at most K chunks of a group kept, limits in chunks and bytes. NULL, or the rule that is broken. */
const char *pipeline_fault(const cf_plan *plan, const cf_schedule *schedule, const cf_schedule_desc *desc);

/* Starts and ends of all actions, of lowered schedules too, by going over the lists again and again until no time
   changes; returns the makespan, or -1 if times grow without end (a deadlock). start, end: (n_actions), or both
   NULL. */
double pipeline_makespan(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing, double *start,
                         double *end);

/* An action's number, -1: there is none. The pass whose result a SEND sends. Seconds that a chunk's transfer takes. */
int64_t pipeline_find(const cf_schedule *schedule, int pass, int64_t chunk, int64_t v);
int64_t pipeline_maker(const cf_schedule *schedule, const cf_action *send);
double pipeline_transfer(const cf_plan *plan, const cf_timing *timing, int64_t chunk);

/* Seconds of a pass of a chunk on virtual stage v, by the words of cf_stage_cost and cf_timing. */
double pipeline_seconds(const cf_plan *plan, const cf_timing *timing, int64_t v, int64_t chunk, int pass);

/* Most bytes held at once on a stage, counted from scratch at each action. */
int64_t pipeline_peak_bytes(const cf_plan *plan, const cf_schedule *schedule, const cf_bytes *bytes, int64_t stage);

/* Most tokens of state that a virtual stage holds at once. */
int64_t pipeline_peak_state(const cf_plan *plan, const cf_schedule *s, int64_t v);

/* The most tokens of state that any virtual stage of a stage holds at once, over what it may hold by default: two of
   the longest group, and a chunk for each virtual stage behind its first. */
double pipeline_state_over_default(const cf_plan *plan, const cf_schedule *schedule);

#endif /* PIPELINE_H */
