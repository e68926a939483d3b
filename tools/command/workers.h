/* workers.h - runs pieces of work concurrently, in threads. */

#ifndef CHUNKFLOW_WORKERS_H
#define CHUNKFLOW_WORKERS_H

#include "../chunkflow_tune.h"

enum { WORKERS_MOST = 64 };

/* Returns the number of processors for this process, 1 .. WORKERS_MOST. */
int64_t workers_available(void);

/* Calls task(context, i) for i of 0 .. n - 1 in at most n_workers threads, including this one, and returns when all are
   done. If a thread cannot be started, the others do its work. */
void workers_run(int64_t n_workers, int64_t n, cf_tune_task task, void *context);

/* Lock and unlock: only one thread at a time is between these two calls. */
void workers_lock(void);
void workers_unlock(void);

#endif /* CHUNKFLOW_WORKERS_H */
