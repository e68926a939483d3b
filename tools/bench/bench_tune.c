/* bench_tune.c - the time of planning: packing and scheduling each batch, and a whole tune.

       cc -std=c99 -O2 tools/bench/bench_tune.c tools/command/cli.c tools/command/cli_files.c tools/command/draw.c \
           -o bench_tune
       bench_tune [FILE ...]

   Qwen2.5-7B on 16 GPUs (tensor 4, pipeline 4), with batches of 256 sequences: lengths like those of LMSys-Chat-1M, the
   same with a sequence of 256K in every batch, and the lists in FILEs. One thread. Times are processor time, so that
   other work on the machine matters little: medians and the worst of the batches. Prints tables, and judges nothing. */

#define _POSIX_C_SOURCE 200809L

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "../command/cli.h"

#define CHUNKFLOW_TUNE_STATIC
#include "../chunkflow_tune.h"

#include "../command/draw.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCH = 256, BATCHES = 32, DRAWN = 100000, SIZES = 8 };

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void stop(const cf_error *error) {
    fprintf(stderr, "bench_tune: %s\n", error->text);
    exit(1);
}

/* Measures the seconds of packing and of scheduling one batch, as cf_tune does both. */
static void plan_batch(const int64_t *lengths, int64_t chunk_size, int64_t k, double *seconds, double *gap) {
    cf_cost_desc cost;
    cf_stage_cost stages[4];
    cf_timing timing;
    cf_pack_desc pack;
    cf_schedule_desc order;
    cf_search_report report;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_error error;
    double begin;
    memset(&cost, 0, sizeof cost);
    memset(&pack, 0, sizeof pack);
    memset(&order, 0, sizeof order);
    cost.model = cf_model_find("qwen2.5-7b");
    cost.gpu = cf_gpu_find("h100-80g");
    cost.parallel.tp = cost.parallel.pp = 4;
    cost.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    cost.chunk_size = pack.chunk_size = chunk_size;
    if (cf_cost_estimate(&cost, stages, 4, &timing, NULL, &error) != CF_OK) stop(&error);
    order.kind = CF_SCHEDULE_BEST;
    order.shape.n_stages = 4;
    order.shape.k = k;
    order.timing = &timing;
    order.report = &report;
    begin = seconds_now();
    if (cf_pack(lengths, BATCH, &pack, &plan, &error) != CF_OK) stop(&error);
    order.max_tries = cf_tune_max_tries(plan, 4, 1);
    if (cf_schedule_make(plan, &order, &schedule, &error) != CF_OK) stop(&error);
    *seconds = seconds_now() - begin;
    *gap = report.gap;
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

static void time_plans(const int64_t *lengths, int64_t n) {
    int64_t size, b, i, at = 0;
    printf("%12s %10s %10s %10s   %s\n", "ChunkSize", "median ms", "worst ms", "worst gap",
           "pack and best schedule, K = 4");
    for (size = 0; size < SIZES; size++) {
        double seconds[BATCHES], gap, worst_gap = 0;
        for (b = 0; b < BATCHES; b++) {
            int64_t batch[BATCH];
            for (i = 0; i < BATCH; i++) batch[i] = lengths[at++ % n];
            plan_batch(batch, 1024LL << size, 4, &seconds[b], &gap);
            if (gap > worst_gap) worst_gap = gap;
        }
        qsort(seconds, BATCHES, sizeof *seconds, compare_doubles);
        printf("%12s %10.3f %10.3f %9.1f%%\n", cli_commas(1024LL << size), 1e3 * seconds[BATCHES / 2],
               1e3 * seconds[BATCHES - 1], 100 * worst_gap);
    }
}

static void time_tune(const int64_t *lengths, int64_t n) {
    cf_tune_desc desc;
    cf_tuning *tuning = NULL;
    cf_error error;
    double begin;
    memset(&desc, 0, sizeof desc);
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = cf_gpu_find("h100-80g");
    desc.parallel.tp = desc.parallel.pp = 4;
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    begin = seconds_now();
    if (cf_tune(lengths, n, &desc, &tuning, &error) != CF_OK) stop(&error);
    printf("tune: 8 or 9 ChunkSizes x 6 K, %lld candidates, %lld batches of %d: %.3f s, %lld schedules simulated",
           (long long)tuning->n_candidates, (long long)tuning->n_batches, BATCH, seconds_now() - begin,
           (long long)tuning->n_simulated);
    if (tuning->winner >= 0)
        printf("; best ChunkSize %s, K %lld", cli_commas(tuning->candidates[tuning->winner].chunk_size),
               (long long)tuning->candidates[tuning->winner].k);
    puts("\n");
    cf_tuning_free(tuning);
}

static void time_list(const char *name, const int64_t *lengths, int64_t n) {
    printf("%s\n", name);
    time_plans(lengths, n);
    time_tune(lengths, n);
}

int main(int argc, char **argv) {
    static int64_t lengths[DRAWN];
    draw_source source;
    int i;
    source.state = 1;
    for (i = 0; i < DRAWN; i++)
        do lengths[i] = draw_lmsys(&source);
        while (lengths[i] > 262144);
    time_list("like LMSys-Chat-1M, none longer than 256K", lengths, DRAWN);
    for (i = 0; i < DRAWN; i += BATCH) lengths[i] = 262144;
    time_list("the same with a sequence of 256K in every 256", lengths, DRAWN);
    for (i = 1; i < argc; i++) {
        cli_list list;
        int64_t *own;
        if (cli_list_read(argv[i], CLI_MAX_SEQUENCES, &list) != CLI_OK) return 2;
        own = cli_list_lengths(&list);
        if (!own || list.n_sequences == 0) return cli_failed("%s: nothing to plan", argv[i]);
        time_list(strrchr(argv[i], '/') ? strrchr(argv[i], '/') + 1 : argv[i], own, list.n_sequences);
        free(own);
        cli_list_free(&list);
    }
    return 0;
}
