/* bench_fit.c - does the time model hold? Times the passes of the CPU trainer and fits the three terms of each to half
   of the shapes. Prints how far the fit is off on the other half.

       cc -std=c99 -O3 -funroll-loops tools/bench/bench_fit.c -lm -o bench_fit
       bench_fit [REPEATS]

   A shape is the tokens of a chunk and the tokens before it. The trainer runs as usual, sequence by sequence; each time
   is the median of REPEATS (default 9) runs. Shapes are left out in two ways: every second shape, and every second
   ChunkSize, which tests the constant term more. Prints tables, and judges nothing; if the machine is busy, the spread
   is large. */

#define _POSIX_C_SOURCE 200809L

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "../../chunkflow.h"

#define CHUNKFLOW_TUNE_STATIC
#include "../chunkflow_tune.h"

#include "../../examples/check.h"
#include "../../examples/optimizer.h"

#include <time.h>

enum { CHUNKS = 8, PASSES = 3, MOST_REPEATS = 101 };

static const int64_t chunk_sizes[] = {48, 64, 96, 128, 192, 256, 384};

enum { SIZES = sizeof chunk_sizes / sizeof chunk_sizes[0], SHAPES = SIZES * CHUNKS };

static const model_config config = {VOCABULARY, 2, 128, 4, 2, 256, 0, 0, 1e4, 1e-6, 0};

/* One pass of one shape. */
typedef struct timed {
    int64_t tokens, prefix, pairs;
    double seconds[MOST_REPEATS];
    int n;
} timed;

typedef struct timing_run {
    chunk_runner *runner;
    timed (*shapes)[PASSES]; /* of this ChunkSize, by chunk */
} timing_run;

/* Returns processor time. The one thread waits for nothing, so this is the time on a machine without other work. */
static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static cf_result time_step(timing_run *run, const cf_step *step, cf_error *error) {
    const cf_chunk *chunk = &run->runner->plan->chunks[step->action.chunk];
    timed *t = &run->shapes[chunk->index][step->action.pass];
    begin_step(run->runner, step);
    double begin = seconds_now();
    cf_result result = run_pass(run->runner, step, error);
    t->tokens = chunk->tokens;
    t->prefix = chunk->prefix;
    t->pairs = chunk->pairs;
    if (t->n < MOST_REPEATS) t->seconds[t->n++] = seconds_now() - begin;
    end_step(run->runner, step);
    return result;
}

/* Runs one training step on one sequence of CHUNKS chunks with K = 1, so that there are replays. */
static cf_result train_once(timing_run *run, const batch *b, const weights *w, weights *gradient, cf_error *error) {
    chunk_runner *r = run->runner;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_steps *steps = NULL;
    cf_result result = cf_pack(b->length, b->count, &r->packing, &plan, error);
    if (result == CF_OK) result = cf_schedule_make(plan, &r->order, &schedule, error);
    if (result == CF_OK) result = chunk_runner_begin(r, plan, b, w, gradient, error);
    if (result == CF_OK) result = cf_steps_make(plan, schedule, 0, 0, NULL, &steps, error);
    if (result == CF_OK) result = chunk_runner_reserve(r, plan, steps, error);
    for (int64_t i = 0; result == CF_OK && i < steps->n; i++) result = time_step(run, &steps->steps[i], error);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return result;
}

/* Runs one repeat of all shapes of a ChunkSize, after a run that warms up. */
static void time_chunk_size(int64_t chunk_size, timed (*shapes)[PASSES]) {
    memory_meter meter = {{0}, {0}};
    chunk_runner runner;
    timing_run run = {&runner, shapes};
    documents d;
    batch b = batch_new(1);
    weights w = weights_new(&config), gradient = weights_new(&config);
    cf_error error;
    memset(&runner, 0, sizeof runner);
    memset(&d, 0, sizeof d);
    add_synthetic(&d, CHUNKS * chunk_size, 5);
    batch_put(&b, 0, &d, 0, 0, 0);
    weights_init(&w, &config, 11, 0.02);
    runner.config = &config;
    runner.stage = stage_of(&config, 0, 1);
    runner.packing.chunk_size = chunk_size;
    runner.order.shape.k = 1;
    runner.meter = &meter;
    for (int warm = 0; warm < 2; warm++) {
        int before = shapes[0][CF_F].n;
        if (train_once(&run, &b, &w, &gradient, &error) != CF_OK) fail(EXIT_CHECK_FAILED, "%s", error.text);
        for (int c = 0; !warm && c < CHUNKS; c++)
            for (int which = 0; which < PASSES; which++) shapes[c][which].n -= shapes[c][which].n > before;
    }
    chunk_runner_free(&runner);
    weights_free(&w);
    weights_free(&gradient);
    batch_free(&b);
    documents_free(&d);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n) {
    if (n == 0) return 0;
    qsort(values, (size_t)n, sizeof *values, compare_doubles);
    return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

/* Whether a shape is left out of the fit. */
static int left_out(int shape, int by_chunk_size) {
    return (by_chunk_size ? shape / CHUNKS : shape) % 2 == 1;
}

static const cf_pass_cost *cost_of(const cf_stage_cost *cost, int which) {
    return which == CF_F ? &cost->forward : which == CF_R ? &cost->replay : &cost->backward;
}

/* Fits to one half of the shapes, and compares with the other half. */
static void fit_and_test(timed (*shapes)[PASSES], int by_chunk_size) {
    static cf_sample samples[SHAPES * PASSES];
    cf_stage_cost cost;
    cf_fit fits[CF_COMPUTE_PASS_COUNT];
    cf_error error;
    double all[SHAPES * PASSES];
    int64_t n = 0;
    int n_all = 0;
    for (int which = 0; which < PASSES; which++)
        for (int i = 0; i < SHAPES; i++) {
            timed *t = &shapes[i][which];
            if (t->n == 0 || left_out(i, by_chunk_size)) continue;
            samples[n].pass = which;
            samples[n].rows = t->tokens;
            samples[n].pairs = t->pairs;
            samples[n++].seconds = median(t->seconds, t->n);
        }
    if (cf_cost_fit(samples, n, &cost, fits, &error) != CF_OK) fail(EXIT_CHECK_FAILED, "%s", error.text);
    printf("\nfitted to %s, tested on the others\n%-5s %8s %12s %12s %12s %10s %8s %10s %10s\n",
           by_chunk_size ? "every second ChunkSize" : "every second shape", "pass", "fitted", "constant us",
           "us a token", "ns a pair", "fit", "tested", "median", "worst");
    for (int which = 0; which < PASSES; which++) {
        const cf_pass_cost *c = cost_of(&cost, which);
        double errors[SHAPES], worst = 0;
        int tested = 0;
        for (int i = 0; i < SHAPES; i++) {
            timed *t = &shapes[i][which];
            double off;
            if (t->n == 0 || !left_out(i, by_chunk_size)) continue;
            off = cf_cost_seconds(c, t->tokens, t->pairs) / median(t->seconds, t->n) - 1;
            if (off * off > worst * worst) worst = off;
            errors[tested] = off < 0 ? -off : off;
            all[n_all++] = errors[tested++];
        }
        printf("%-5s %8lld %12.2f %12.4f %12.4f %9.2f%% %8d %9.2f%% %+9.2f%%\n", cf_pass_name((cf_pass)which),
               (long long)fits[which].n_samples, 1e6 * c->constant, 1e6 * c->per_token, 1e9 * c->per_pair,
               100 * fits[which].mean_absolute, tested, 100 * median(errors, tested), 100 * worst);
    }
    printf("held-out shapes, all passes: median error %.2f %%\n", 100 * median(all, n_all));
}

/* Returns the distance between the quartiles of the repeats, as a median over shapes and passes. */
static double noise(timed (*shapes)[PASSES]) {
    double spreads[SHAPES * PASSES];
    int n = 0;
    for (int i = 0; i < SHAPES; i++)
        for (int which = 0; which < PASSES; which++) {
            timed *t = &shapes[i][which];
            if (t->n < 4) continue;
            double middle = median(t->seconds, t->n);
            spreads[n++] = (t->seconds[t->n * 3 / 4] - t->seconds[t->n / 4]) / middle;
        }
    return median(spreads, n);
}

int main(int argc, char **argv) {
    static timed shapes[SHAPES][PASSES];
    int repeats = argc > 1 ? atoi(argv[1]) : 9;
    if (repeats < 1 || repeats > MOST_REPEATS) {
        fprintf(stderr, "bench_fit: REPEATS must be 1 .. %d\n", MOST_REPEATS);
        return EXIT_BAD_INPUT;
    }
    /* all shapes by turns, so that a slow moment of the machine affects no single shape */
    for (int r = 0; r < repeats; r++)
        for (int i = 0; i < SIZES; i++) time_chunk_size(chunk_sizes[i], &shapes[i * CHUNKS]);
    printf("CPU trainer, " REAL_NAME
           ": %d layers, hidden %d, one thread; %d shapes (chunks of %lld to %lld tokens behind up to\n"
           "%lld), medians of %d; half of the repeats lie within %.1f %% of each other\n",
           (int)config.layers, (int)config.hidden, SHAPES, (long long)chunk_sizes[0], (long long)chunk_sizes[SIZES - 1],
           (long long)(chunk_sizes[SIZES - 1] * (CHUNKS - 1)), repeats, 100 * noise(shapes));
    fit_and_test(shapes, 0);
    fit_and_test(shapes, 1);
    return 0;
}
