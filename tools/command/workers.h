/* workers.h - pieces of work that run at the same time, in threads. */

#ifndef CHUNKFLOW_WORKERS_H
#define CHUNKFLOW_WORKERS_H

#include "../chunkflow_tune.h"

enum { WORKERS_MOST = 64 };

/* Returns how many processors there are for this process, 1 .. WORKERS_MOST. */
int64_t workers_available(void);

/* Calls task(context, i) for i of 0 .. n - 1 in at most so many threads, this one among them, and returns when all are
   done. Where there is no thread to be had, the others do its work. */
void workers_run(int64_t n_workers, int64_t n, cf_tune_task task, void *context);

/* Between these two calls no other thread is between them. */
void workers_lock(void);
void workers_unlock(void);

#endif /* CHUNKFLOW_WORKERS_H */
