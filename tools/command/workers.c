/* workers.c - runs pieces of work concurrently, in threads. */

#define _POSIX_C_SOURCE 200809L

#include "workers.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

typedef struct pool {
    pthread_mutex_t lock;
    int64_t next, n;
    cf_tune_task task;
    void *context;
} pool;

static pthread_mutex_t common = PTHREAD_MUTEX_INITIALIZER;

void workers_lock(void) { pthread_mutex_lock(&common); }

void workers_unlock(void) { pthread_mutex_unlock(&common); }

int64_t workers_available(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n < WORKERS_MOST ? n : WORKERS_MOST;
}

/* Does one piece after another until none is left. */
static void *work(void *of) {
    pool *p = (pool *)of;

    for (;;) {
        int64_t i;
        pthread_mutex_lock(&p->lock);
        i = p->next++;
        pthread_mutex_unlock(&p->lock);
        if (i >= p->n) return NULL;
        p->task(p->context, i);
    }
}

/* Starts threads, which leave signals to the first thread. */
static int64_t start(pool *p, pthread_t *threads, int64_t n) {
    sigset_t all, before;
    int64_t i;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (i = 0; i < n && pthread_create(&threads[i], NULL, work, p) == 0; i++) continue;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return i;
}

void workers_run(int64_t n_workers, int64_t n, cf_tune_task task, void *context) {
    pthread_t threads[WORKERS_MOST];
    int64_t others = n < n_workers ? n : n_workers, i;
    pool p;

    p.next = 0;
    p.n = n;
    p.task = task;
    p.context = context;
    pthread_mutex_init(&p.lock, NULL);
    others = others > WORKERS_MOST ? WORKERS_MOST - 1 : others > 1 ? others - 1 : 0;
    others = start(&p, threads, others);
    (void)work(&p);
    for (i = 0; i < others; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&p.lock);
}
