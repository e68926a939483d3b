/* bench_stream.c - the time that streaming the state costs for one long sequence, by context and speed of the host's
   link

       cc -std=c99 -O2 -I. tools/bench/bench_stream.c -lm -o build/bench_stream && build/bench_stream

   All numbers come from the time model; nothing is measured. The makespan with the state streamed layer by layer is
   compared with the makespan with all state on the GPU, even if it has no room for it. */

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "chunkflow.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#define CHUNKFLOW_TUNE_STATIC
#include "tools/chunkflow_tune.h"

#include <stdio.h>
#include <stdlib.h>

#define MOST_STAGES 8

static const double links[] = {12e9, 25e9, 55e9, 100e9, 200e9}; /* bytes/s that are reached */

typedef struct setup {
    const char *model, *gpu;
    int64_t tp, pp;
} setup;

static void give_up(const cf_error *error) {
    fprintf(stderr, "bench_stream: %s\n", error->text);
    exit(1);
}

static cf_timeline *simulate(const setup *s, const cf_plan *plan, double link) {
    cf_gpu gpu = *cf_gpu_find(s->gpu);
    cf_stage_cost stages[MOST_STAGES];
    cf_cost_desc cost = {0};
    cf_schedule_desc order = {0};
    cf_simulate_desc simulation = {0};
    cf_timing timing;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    cost.model = cf_model_find(s->model);
    cost.gpu = &gpu;
    cost.parallel.tp = s->tp;
    cost.parallel.pp = s->pp;
    cost.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    cost.chunk_size = plan->chunk_size;
    cost.stream = link > 0;
    if (link > 0) gpu.pcie = link / gpu.link;
    if (cf_cost_estimate(&cost, stages, s->pp, &timing, NULL, &error) != CF_OK) give_up(&error);
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_LOCAL;
    order.shape.n_stages = s->pp;
    order.shape.k = 1;
    order.timing = simulation.timing = &timing;
    simulation.no_bounds = 1;
    if (cf_schedule_make(plan, &order, &schedule, &error) != CF_OK) give_up(&error);
    if (cf_simulate(plan, schedule, &simulation, &timeline, &error) != CF_OK) give_up(&error);
    cf_schedule_free(schedule);
    return timeline;
}

/* Prints one row: the makespan without a stream, and the increase with one, for each link. */
static void print_row(const setup *s, int64_t context, int64_t chunk_size) {
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    cf_error error;
    size_t i;
    pack.chunk_size = chunk_size;
    if (cf_pack(&context, 1, &pack, &plan, &error) != CF_OK) give_up(&error);
    cf_timeline *plain = simulate(s, plan, 0);
    printf("%-12s %2d %2d %6dK %5dK %9.2f", s->model, (int)s->tp, (int)s->pp, (int)(context / 1024),
           (int)(chunk_size / 1024), plain->makespan);
    for (i = 0; i < sizeof links / sizeof links[0]; i++) {
        cf_timeline *streamed = simulate(s, plan, links[i]);
        printf(" %+8.1f %%", 100 * (streamed->makespan / plain->makespan - 1));
        cf_timeline_free(streamed);
    }
    printf("\n");
    cf_timeline_free(plain);
    cf_plan_free(plan);
}

int main(void) {
    static const setup setups[] = {{"qwen2.5-7b", "h100-80g", 4, 1},  {"qwen2.5-7b", "h100-80g", 4, 4},
                                   {"qwen2.5-14b", "h100-80g", 4, 4}, {"qwen2.5-32b", "h100-80g", 8, 4},
                                   {"qwen2.5-72b", "h100-80g", 8, 8}};
    static const int64_t contexts[] = {32768, 131072, 262144, 1048576}, chunk_sizes[] = {2048, 8192, 32768};
    size_t i, j, k;
    printf("model        tp pp context chunk   all on GPU, s; longer with a stream at 12, 25, 55, 100 and 200 GB/s\n");
    for (i = 0; i < sizeof setups / sizeof setups[0]; i++)
        for (k = 0; k < 3; k++)
            for (j = 0; j < 4; j++) print_row(&setups[i], contexts[j], chunk_sizes[k]);
    return 0;
}
