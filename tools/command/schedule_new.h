/* schedule_new.h - what a reader of files needs to make a schedule as the library does: in one block from the
   caller's allocator. */

#ifndef CHUNKFLOW_SCHEDULE_NEW_H
#define CHUNKFLOW_SCHEDULE_NEW_H

#include "../../chunkflow.h"

/* A schedule with the counts, labels and limits of `header` and room for its lists, all of it zero. *out: to be given
   to cf_schedule_free; untouched on failure. Errors: CF_ERROR_ARGUMENT (half an allocator), CF_ERROR_OVERFLOW,
   CF_ERROR_MEMORY. */
cf_result schedule_new(const cf_schedule *header, const cf_allocator *allocator, cf_schedule **out, cf_error *error);

#endif /* CHUNKFLOW_SCHEDULE_NEW_H */
