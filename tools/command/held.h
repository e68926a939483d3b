/* held.h - counts what each stage holds while its actions run: memory over time. */

#ifndef CHUNKFLOW_HELD_H
#define CHUNKFLOW_HELD_H

#include "pipeline.h"

/* The unit of the counts. With a model: bytes of a GPU, everything included. With --token-bytes: these bytes. Else:
   tokens whose activations are kept. The last two count the copies of all virtual stages. */
typedef enum held_unit { HELD_GPU_BYTES, HELD_TOKEN_BYTES, HELD_TOKENS } held_unit;

held_unit held_unit_of(const pipeline *p);

/* Makes *out: (n_actions), parallel to schedule->actions: the amount that the action's stage holds while it runs. Free
   it. */
cf_result held_make(const pipeline *p, const cf_plan *plan, const cf_schedule *schedule, cf_recompute recompute,
                    int64_t **out, cf_error *error);

#endif /* CHUNKFLOW_HELD_H */
