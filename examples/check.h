/* check.h - compares loss and gradients of chunked and unchunked training - MIT or public domain */

#ifndef TRAIN_CHECK_H
#define TRAIN_CHECK_H

#include "chunked.h"
#include "unchunked.h"

/* A larger difference is not rounding. It is relative to the largest number of each tensor. */
#ifdef TRAIN_FLOAT64
#define CHECK_LIMIT 1e-10
#else
#define CHECK_LIMIT 1e-4
#endif

/* Returns the largest |a - b| over the largest |b|. Infinite if a number on either side is not finite, or if a differs
   from a b that is all zero. */
static inline double relative_difference(const real *a, const real *b, int64_t count) {
    double largest = 0, difference = 0;
    for (int64_t i = 0; i < count; i++) {
        double x = (double)a[i], y = (double)b[i];
        if (!(x - x == 0) || !(y - y == 0)) return INFINITY;
        if (fabs(y) > largest) largest = fabs(y);
        if (fabs(x - y) > difference) difference = fabs(x - y);
    }
    if (difference == 0) return 0;
    return largest > 0 ? difference / largest : INFINITY;
}

static inline double relative_difference_of_losses(double a, double b) {
    if (!(a - a == 0) || !(b - b == 0)) return INFINITY;
    if (a == b) return 0;
    return b != 0 ? fabs(a - b) / fabs(b) : INFINITY;
}

/* Returns whether `difference` is rounding; false for NaN. */
static inline int is_rounding(double difference) { return difference <= CHECK_LIMIT; }

static inline double largest_of(const real *x, int64_t count) {
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs((double)x[i]));
    return largest;
}

/* Runs the batch both ways with the same weights, prints the differences (of each tensor if `all`), and returns whether
   they are rounding. */
static inline int check_gradients(chunk_runner *runner, const model_config *config, const weights *w, const batch *b,
                                  uint64_t seed, int all) {
    if (b->n_targets == 0) fail(EXIT_BAD_INPUT, "the batch has no target tokens, so there is nothing to check");
    memory_meter unchunked_memory = {{0}, {0}};
    weights chunked = weights_new(config), unchunked = weights_new(config);
    chunked_result result;
    cf_error error = {CF_OK, 0, NULL, 0, 0, {0}};
    if (chunked_gradients(runner, w, &chunked, b, seed, &result, &error) != CF_OK) {
        fail(EXIT_BAD_INPUT, "%s", error.text);
    }
    double loss = unchunked_gradients(config, w, &unchunked, b, seed, &unchunked_memory);
    printf("check " REAL_NAME ": %lld sequences, %lld tokens in %lld rows, %lld targets in %lld chunks of %lld, "
           "K %lld: longest chain %lld, %lld hybrid, %lld replays\n",
           (long long)b->count, (long long)b->n_tokens, (long long)result.n_rows, (long long)b->n_targets,
           (long long)result.n_chunks, (long long)runner->packing.chunk_size, (long long)runner->order.shape.k,
           (long long)result.longest_chain, (long long)result.n_hybrid, (long long)result.n_replays);

    double worst = relative_difference_of_losses(result.loss, loss);
    const char *worst_name = "loss";
    printf("  %-22s %14s %14s  %s\n", all ? "largest gradient" : "", "chunked", "unchunked", "relative difference");
    printf("  %-22s %14.9f %14.9f  %.2e\n", "loss", result.loss, loss, worst);
    for (int64_t i = 0; i < w->n_tensors; i++) {
        const tensor *t = &w->tensors[i];
        double difference = relative_difference(chunked.flat + t->offset, unchunked.flat + t->offset, t->count);
        if (all) {
            printf("  %-22s %14.6e %14.6e  %.2e\n", t->name, largest_of(chunked.flat + t->offset, t->count),
                   largest_of(unchunked.flat + t->offset, t->count), difference);
        }
        if (!(difference <= worst)) {
            worst = difference;
            worst_name = t->name;
        }
    }
    int ok = is_rounding(worst);
    printf("largest relative difference %.2e (%s), limit %.0e: %s\n", worst, worst_name, CHECK_LIMIT,
           ok ? "ok, it is rounding" : "NOT OK");
    weights_free(&chunked);
    weights_free(&unchunked);
    return ok;
}

#endif /* TRAIN_CHECK_H */
