/* saved.h - plans and schedules from the JSON that plan --plan-json and plan --json write. */

#ifndef CHUNKFLOW_SAVED_H
#define CHUNKFLOW_SAVED_H

#include "json_read.h"

/* The kind of a file, by its "format". SAVED_SCHEDULES: those of all ranks. */
typedef enum saved_format { SAVED_PLAN, SAVED_SCHEDULE, SAVED_SCHEDULES } saved_format;

/* All of these return an exit code: CLI_WRONG where the file is no such file, CLI_FAILED where it is one that
   contradicts itself (or there is no memory). The message names the line. */
int saved_format_of(const json_document *document, saved_format *out);

/* A plan that nobody has validated yet. Its counts are those of its arrays. */
typedef struct saved_plan {
    cf_plan plan;     /* its arrays are freed by saved_plan_free, not by cf_plan_free */
    int64_t *lengths; /* (plan.n_sequences) the tokens of each sequence that are in some slice */
} saved_plan;

int saved_plan_read(const json_document *document, saved_plan *out);
void saved_plan_free(saved_plan *saved);

/* A schedule that nobody has validated yet, with its timeline if the file has one. The counts are those of the
   arrays. */
typedef struct saved_schedule {
    cf_schedule *schedule;
    int has_times;
    cf_timeline timeline; /* all but `bound`; of what the file leaves out, peaks in tokens or bytes are NULL and there
                             are no bounds */
} saved_schedule;

/* node: that of the schedule: 0, or one of the nodes in the array that saved_schedules_find finds in a file of all
   ranks, where there is one for each rank, in order. */
int saved_schedules_find(const json_document *document, uint32_t *array);
int saved_schedule_read(const json_document *document, uint32_t node, saved_schedule *out);
void saved_schedule_free(saved_schedule *saved);

/* Returns whether the times fit the order: no stage runs two passes at once, nothing starts before what it waits for on
   other stages has ended, no transfer comes before its tensor, the sums are those of the actions, no bound is above the
   makespan, and the peaks are those of the lists. skew: seconds by which the clocks of two stages may differ, for times
   that were measured; 0 for simulated ones. bytes: what a token weighs; NULL: peaks in bytes are not judged. For a
   schedule that cf_schedule_validate accepts. Returns 1; or 0 with what is wrong, as one line, in why; or -1 where
   there is no memory. */
int saved_times_hold(const cf_plan *plan, const saved_schedule *saved, double skew, const cf_held_bytes *bytes,
                     char *why,
                     size_t size);

#endif /* CHUNKFLOW_SAVED_H */
