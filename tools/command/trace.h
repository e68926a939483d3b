/* trace.h - a simulated or measured schedule as a Chrome trace, for Perfetto or chrome://tracing. */

#ifndef CHUNKFLOW_TRACE_H
#define CHUNKFLOW_TRACE_H

#include "held.h"

/* Writes a process per stage, with a thread for each stream: compute and, for a lowered schedule, one for each
   direction of tensors to and from neighbouring stages. Counters show the chunks that the stage keeps and the amount
   that it holds: bytes, or tokens if a token's bytes are not given. Both count the copies of all virtual stages, except
   bytes of a GPU. Flows connect a chunk's passes through the stages and back, its state from chunk to chunk, and a
   replay with its backward.

   held: (n_actions), from held_make. microseconds: length of a unit of the timeline's time in the trace; it is written
   in whole nanoseconds. Returns an exit code; an error of the file is reported when it is closed. */
int trace_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                held_unit what, double microseconds, cli_output *to);

#endif /* CHUNKFLOW_TRACE_H */
