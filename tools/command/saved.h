/* saved.h - reads plans and schedules from the JSON that plan --plan-json and plan --json write. */

#ifndef CHUNKFLOW_SAVED_H
#define CHUNKFLOW_SAVED_H

#include "json_read.h"

/* The kind of a file, by its "format". SAVED_SCHEDULES: the schedules of all ranks. */
typedef enum saved_format { SAVED_PLAN, SAVED_SCHEDULE, SAVED_SCHEDULES } saved_format;

/* Returns the kind of a file. This and the functions below return an exit code: CLI_WRONG for a file of another format,
   CLI_FAILED for one that contradicts itself, or if memory runs out. The message names the line. */
int saved_format_of(const json_document *document, saved_format *out);

/* A plan that is not validated yet. Its counts match its arrays. */
typedef struct saved_plan {
    cf_plan plan;     /* free its arrays with saved_plan_free, not with cf_plan_free */
    int64_t *lengths; /* (plan.n_sequences) the tokens of each sequence in the slices */
} saved_plan;

int saved_plan_read(const json_document *document, saved_plan *out);
void saved_plan_free(saved_plan *saved);

/* A schedule that is not validated yet, with its timeline if the file has one. The counts match the arrays. */
typedef struct saved_schedule {
    cf_schedule *schedule;
    int has_times;
    cf_timeline timeline; /* everything except `bound`; what the file lacks is NULL (peaks in tokens or bytes) or absent
                             (bounds) */
} saved_schedule;

/* The second reads the schedule at `node`: 0 or, in a file of all ranks, one of the nodes of the array that
   saved_schedules_find finds. That array has one schedule per rank, in order. */
int saved_schedules_find(const json_document *document, uint32_t *array);
int saved_schedule_read(const json_document *document, uint32_t node, saved_schedule *out);
void saved_schedule_free(saved_schedule *saved);

/* Checks that the times of a schedule are possible; cf_schedule_validate must accept the schedule. No stage may run two
   passes at the same time, nothing may start before its inputs from other stages are finished, and no transfer may come
   before its tensor. Sums must be those of the actions, bounds at most the makespan, and peaks those of the lists.

   skew: seconds by which the clocks of two stages may differ, for measured times; 0 for simulated ones. bytes: per
   token; NULL: peaks in bytes are not checked. Returns 1; 0 with the error as one line in `why`; or -1 if memory runs
   out. */
int saved_times_hold(const cf_plan *plan, const saved_schedule *saved, double skew, const cf_held_bytes *bytes,
                     char *why,
                     size_t size);

#endif /* CHUNKFLOW_SAVED_H */
