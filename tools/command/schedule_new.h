/* schedule_new.h - makes a schedule as the library does, in one block from the caller's allocator; for readers of
   files. */

#ifndef CHUNKFLOW_SCHEDULE_NEW_H
#define CHUNKFLOW_SCHEDULE_NEW_H

#include "../../chunkflow.h"

/* Makes a schedule with the counts, labels and limits of `header` and room for its lists, which are all zero. Free *out
   with cf_schedule_free; it is untouched on failure. Errors: CF_ERROR_ARGUMENT (half an allocator), CF_ERROR_OVERFLOW,
   CF_ERROR_MEMORY. */
cf_result schedule_new(const cf_schedule *header, const cf_allocator *allocator, cf_schedule **out, cf_error *error);

#endif /* CHUNKFLOW_SCHEDULE_NEW_H */
