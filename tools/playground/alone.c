/* alone.c - workers.h where there are no threads: one piece of work after the other. */

#include "../command/workers.h"

void workers_lock(void) {}

void workers_unlock(void) {}

int64_t workers_available(void) { return 1; }

void workers_run(int64_t n_workers, int64_t n, cf_tune_task task, void *context) {
    int64_t i;

    (void)n_workers;
    for (i = 0; i < n; i++) task(context, i);
}
