/* Declarations first, the implementation further down, and the header once more: all in one file. */

#include "chunkflow.h"

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
#include "chunkflow.h"

#include <stdio.h>

int main(void) {
    const int64_t lengths[] = {900, 14000, 350, 2600};
    cf_pack_desc pack;
    cf_schedule_desc order;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_steps *steps = NULL;
    cf_error error;
    memset(&pack, 0, sizeof pack);
    memset(&order, 0, sizeof order);
    memset(&error, 0, sizeof error);
    pack.chunk_size = 4096;
    if (cf_pack(lengths, 4, &pack, &plan, &error) == CF_OK &&
        cf_schedule_make(plan, &order, &schedule, &error) == CF_OK)
        cf_steps_make(plan, schedule, 0, 0, NULL, &steps, &error);
    if (error.code != CF_OK) printf("%s\n", error.text);
    /* a chain of 4 chunks, K = 1: 4 F, 3 R, 4 B; one standalone chunk: F, B */
    printf("passes %d\n", steps != NULL ? (int)steps->n : 0);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return 0;
}
