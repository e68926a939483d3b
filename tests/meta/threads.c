/* Four threads that share a plan, for ThreadSanitizer: all that reads a plan, a schedule or a graph at the same time
   must give what one thread gives. Part of `make check-deep`. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, ROUNDS = 20 };

static const int64_t lengths[] = {900, 14000, 350, 2600, 70, 5000, 33, 1200};
#define N_LENGTHS ((int64_t)(sizeof lengths / sizeof lengths[0]))

/* What all threads read. */
typedef struct common {
    cf_plan *plan;
    cf_schedule *schedule;
    cf_graph *graph;
} common;

/* What a thread has found. */
typedef struct findings {
    const common *shared;
    uint64_t sum; /* of all text and numbers */
    int failed;
} findings;

static void add(findings *f, const void *bytes, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) f->sum = (f->sum ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
}

static int add_text(const char *text, size_t bytes, void *user) {
    add((findings *)user, text, bytes);
    return 0;
}

static void expect(findings *f, cf_result result) { f->failed += result != CF_OK; }

static void run_stages(findings *f, const cf_plan *plan, const cf_schedule *schedule) {
    int64_t stage, i;
    for (stage = 0; stage < schedule->shape.n_stages; stage++) {
        cf_steps *steps = NULL;
        expect(f, cf_steps_make(plan, schedule, stage, 1, NULL, &steps, NULL));
        for (i = 0; steps != NULL && i < steps->n; i++) add(f, &steps->steps[i], sizeof steps->steps[i]);
        cf_steps_free(steps);
    }
}

static void once(findings *f) {
    const common *shared = f->shared;
    const cf_write_desc with_rows = {1, NULL};
    cf_schedule_desc order = {0};
    cf_schedule *own = NULL;
    cf_timeline *timeline = NULL;
    order.shape.n_stages = 3;
    order.shape.k = 2;
    order.max_tries = 20;
    expect(f, cf_plan_validate(shared->plan, lengths, N_LENGTHS, NULL, NULL));
    expect(f, cf_write_plan_json(shared->plan, &with_rows, add_text, f, NULL));
    expect(f, cf_schedule_validate(shared->plan, shared->schedule, NULL, NULL, NULL));
    expect(f, cf_simulate(shared->plan, shared->schedule, NULL, &timeline, NULL));
    if (timeline != NULL) expect(f, cf_write_schedule_json(shared->schedule, timeline, add_text, f, NULL));
    add(f, shared->graph->edges, (size_t)shared->graph->n_edges * sizeof *shared->graph->edges);
    expect(f, cf_schedule_make(shared->plan, &order, &own, NULL));
    if (own != NULL) add(f, own->actions, (size_t)own->n_actions * sizeof *own->actions);
    run_stages(f, shared->plan, shared->schedule);
    cf_schedule_free(own);
    cf_timeline_free(timeline);
}

static void *work(void *user) {
    int round;
    for (round = 0; round < ROUNDS; round++) once((findings *)user);
    return NULL;
}

static int share(common *shared) {
    cf_pack_desc pack;
    cf_schedule_desc order;
    memset(shared, 0, sizeof *shared);
    memset(&pack, 0, sizeof pack);
    memset(&order, 0, sizeof order);
    pack.chunk_size = 2048;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.n_stages = 3;
    order.shape.k = 2;
    return cf_pack(lengths, N_LENGTHS, &pack, &shared->plan, NULL) == CF_OK &&
           cf_schedule_make(shared->plan, &order, &shared->schedule, NULL) == CF_OK &&
           cf_graph_make(shared->plan, shared->schedule, NULL, NULL, &shared->graph, NULL) == CF_OK;
}

int main(void) {
    common shared;
    findings found[THREADS + 1] = {0};
    pthread_t threads[THREADS];
    int i, failed = 0;
    if (!share(&shared)) return puts("0 passed, 1 failed"), 1;
    for (i = 0; i <= THREADS; i++) found[i].shared = &shared;
    for (i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, work, &found[i]) != 0) return puts("0 passed, 1 failed"), 1;
    for (i = 0; i < THREADS; i++) (void)pthread_join(threads[i], NULL);
    (void)work(&found[THREADS]); /* alone */
    for (i = 0; i < THREADS; i++)
        failed += found[i].failed > 0 || found[i].sum != found[THREADS].sum || found[THREADS].failed > 0;
    cf_graph_free(shared.graph);
    cf_schedule_free(shared.schedule);
    cf_plan_free(shared.plan);
    printf("%d passed, %d failed\n", THREADS - failed, failed);
    return failed > 0;
}
