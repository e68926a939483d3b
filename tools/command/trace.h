/* trace.h - a simulated or measured schedule as a Chrome trace, to be opened in Perfetto or chrome://tracing. */

#ifndef CHUNKFLOW_TRACE_H
#define CHUNKFLOW_TRACE_H

#include "held.h"

/* A process per stage with a thread for each stream: compute and, of a lowered schedule, one for each way that tensors
   take to and from the stages beside it. Counters of the chunks that the stage keeps
   and of what it holds: bytes, or tokens where nobody said what a token weighs. Both count every virtual stage's copy,
   except for bytes of a GPU. Flows lead a chunk through the stages and back, its state from chunk to chunk, and from a
   replay to its backward. held: (n_actions), of held_make. microseconds: what a unit of the timeline's time lasts in
   the trace; it is written in whole nanoseconds. Returns an exit code; a failing file is reported when it
   is closed. */
int trace_write(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline, const int64_t *held,
                held_unit what, double microseconds, cli_output *to);

#endif /* CHUNKFLOW_TRACE_H */
