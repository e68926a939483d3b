/* bench_replay.c - a training step of the CPU trainer in chunks, beside one sequence at a time: seconds and bytes

       make build/bench_replay
       build/bench_replay [ROUNDS [LONGEST]]

   As in bench_chunks.py, the batch is one sequence of LONGEST tokens (default 12288) and 20 short ones, and K is 1. The
   model has 3 layers of 128. The ways take turns, and the table has medians of ROUNDS (default 3), in seconds of one
   processor. Bytes are the most that the trainer held in addition to the model and its gradients, by its own meter.
   Gradients of chunks are compared with those of whole sequences. */

#define _POSIX_C_SOURCE 200809L

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "../../chunkflow.h"

#include "../../examples/check.h"

#include <time.h>

enum { SHORT = 20, MOST_ROUNDS = 101, WAYS = 3 };

static const struct {
    const char *name;
    int64_t chunk_size; /* 0: one sequence at a time */
    int keep_outputs;
} ways[WAYS] = {{"one at a time", 0, 0},
                {"chunks of 1,024", 1024, 0},
                {"chunks of 1,024, outputs kept", 1024, 1}};

static const model_config config = {2048, 3, 128, 2, 2, 384, 0, 0, 1e4, 1e-6, 0, {0}};

/* Returns processor time. The one thread waits for nothing, so this is the time on a machine without other work. */
static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs one step and returns its seconds. */
static double run_step(int way, const weights *w, weights *gradient, const batch *b, memory_meter *meter) {
    const double begin = seconds_now();
    chunk_runner runner = {0};
    chunked_result result;
    cf_error error;
    weights_clear(gradient);
    memset(meter, 0, sizeof *meter);
    if (ways[way].chunk_size == 0) {
        unchunked_gradients(&config, w, gradient, b, 1, meter);
        return seconds_now() - begin;
    }
    runner.config = &config;
    runner.stage = stage_of(&config, 0, 1);
    runner.packing.chunk_size = ways[way].chunk_size;
    runner.order.shape.k = 1;
    runner.keep_outputs = ways[way].keep_outputs;
    runner.meter = meter;
    if (chunked_gradients(&runner, w, gradient, b, 1, &result, &error) != CF_OK) fail(EXIT_BAD_INPUT, "%s", error.text);
    chunk_runner_free(&runner);
    return seconds_now() - begin;
}

static double mebibytes(const memory_meter *meter) {
    int64_t bytes = 0;
    for (int kind = 0; kind < MEMORY_KINDS; kind++) bytes += meter->peak[kind];
    return (double)bytes / 1048576;
}

static double worst_difference(const weights *a, const weights *b) {
    double worst = 0;
    for (int64_t i = 0; i < b->n_tensors; i++) {
        const tensor *t = &b->tensors[i];
        worst = fmax(worst, relative_difference(a->flat + t->offset, b->flat + t->offset, t->count));
    }
    return worst;
}

static batch make_batch(documents *d, int64_t longest) {
    batch b = batch_new(SHORT + 1);
    add_synthetic(d, longest, 1);
    for (int64_t i = 0; i < SHORT; i++) add_synthetic(d, 50 + (int64_t)(mix64((uint64_t)i) % 350), 1);
    for (int64_t i = 0; i <= SHORT; i++) batch_put(&b, i, d, i, 0, 0);
    return b;
}

int main(int argc, char **argv) {
    static double seconds[WAYS][MOST_ROUNDS], held[WAYS], off[WAYS];
    const int rounds = argc > 1 ? atoi(argv[1]) : 3;
    const int64_t longest = argc > 2 ? atoll(argv[2]) : 12288;
    documents d = {0};
    memory_meter meter;
    if (rounds < 1 || rounds > MOST_ROUNDS || longest < 2) fail(EXIT_BAD_INPUT, "usage: bench_replay [ROUNDS [LONGEST]]");
    batch b = make_batch(&d, longest);
    weights w = weights_new(&config), gradient = weights_new(&config), whole = weights_new(&config);
    weights_init(&w, &config, 1, 0);
    for (int round = 0; round < rounds; round++) {
        for (int way = 0; way < WAYS; way++) {
            seconds[way][round] = run_step(way, &w, way == 0 ? &whole : &gradient, &b, &meter);
            held[way] = mebibytes(&meter);
            if (way > 0) off[way] = worst_difference(&gradient, &whole);
        }
    }
    printf("one sequence of %lld and %d short ones, %d rounds\n", (long long)longest, SHORT, rounds);
    for (int way = 0; way < WAYS; way++) {
        qsort(seconds[way], (size_t)rounds, sizeof(double), ascending);
        const double median = seconds[way][rounds / 2];
        printf("  %-38s %7.2f s  %5.2f  %7.0f MiB  %5.2f  gradients %.1e off\n", ways[way].name, median,
               median / seconds[0][rounds / 2], held[way], held[way] / held[0], off[way]);
    }
    weights_free(&w);
    weights_free(&gradient);
    weights_free(&whole);
    batch_free(&b);
    documents_free(&d);
    return 0;
}
