/* suite.h - batches for comparing pipeline schedules, generated from fixed seeds.

   Five classes of 50 batches: lengths like those of LMSys-Chat-1M, log-normal lengths, long sequences only, none longer
   than a chunk, and one giant among short ones. Stages vary over 2 .. 16, K over 1 .. 16, with both forms of replay,
   plain and attention-heavy costs, with and without transfer times. Integer arithmetic only, so every platform has the
   same batches. */

#ifndef SUITE_H
#define SUITE_H

#include "chunkflow.h"

#define SUITE_CLASSES 5
#define SUITE_PER_CLASS 50
#define SUITE_BATCHES (SUITE_CLASSES * SUITE_PER_CLASS)
#define SUITE_MOST_SEQUENCES 256

typedef struct suite_batch {
    int class_id;
    int64_t n;
    int64_t lengths[SUITE_MOST_SEQUENCES];
    cf_pack_desc pack;
    cf_timing timing;
    cf_schedule_desc schedule; /* stages, K and replay; its timing is NULL: set it to the member above */
} suite_batch;

/* "lmsys", "lognormal", "all-long", "no-long", "one-giant". */
const char *suite_class_name(int class_id);

/* Batch `index` of SUITE_BATCHES. */
void suite_draw(int index, suite_batch *batch);

#endif /* SUITE_H */
