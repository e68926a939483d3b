/* Declarations first, the implementation further down, and the header once more: all in one file. */

#include "chunkflow.h"

static int count_pass(void *user, const cf_step *step) {
    (void)step;
    ++*(int *)user;
    return 0;
}

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
#include "chunkflow.h"

#include <stdio.h>

int main(void) {
    const int64_t lengths[] = {900, 14000, 350, 2600};
    cf_pack_desc pack;
    cf_schedule_desc order;
    cf_run_desc run;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_error error;
    int passes = 0;
    memset(&pack, 0, sizeof pack);
    memset(&order, 0, sizeof order);
    memset(&run, 0, sizeof run);
    memset(&error, 0, sizeof error);
    pack.chunk_size = 4096;
    run.user = &passes;
    run.forward = run.backward = count_pass;
    if (cf_pack(lengths, 4, &pack, &plan, &error) == CF_OK &&
        cf_schedule_make(plan, &order, &schedule, &error) == CF_OK)
        cf_run(plan, schedule, 0, &run, NULL, &error);
    if (error.code != CF_OK) printf("%s\n", error.text);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    printf("passes %d\n", passes); /* a group of 4 chunks, K = 1: 4 F, 3 R, 4 B; one standalone chunk: F, B */
    return 0;
}
