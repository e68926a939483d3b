/* world.h - a small model and a batch, for tests of the CPU trainer - MIT or public domain

   A test includes examples/chunked.h, with its settings, and examples/check.h before this file, and then the
   harness. */

#ifndef TESTS_TRAINER_WORLD_H
#define TESTS_TRAINER_WORLD_H

/* ================================================================================================================
   >>fixtures
   ================================================================================================================ */

static model_config tiny_model(void) {
    /* matrices of more than one GRADIENT_BLOCK */
    model_config c = {VOCABULARY, 2, 20, 2, 1, 34, 0, 0, 1e4, 1e-6, 0, {0}};
    return c;
}

typedef struct world {
    model_config config;
    documents documents;
    batch batch;
    weights weights, gradient;
    memory_meter meter;
    chunk_runner runner;
    uint64_t seed;
} world;

static void world_begin(world *x, const model_config *c, const int64_t *lengths, int64_t n, int64_t chunk_size,
                        int64_t k, int64_t prompt) {
    memset(x, 0, sizeof *x);
    x->config = *c;
    x->seed = 77;
    x->batch = batch_new(n);
    for (int64_t i = 0; i < n; i++) add_synthetic(&x->documents, lengths[i], 5);
    for (int64_t i = 0; i < n; i++) batch_put(&x->batch, i, &x->documents, i, prompt, 0);
    x->weights = weights_new(c);
    x->gradient = weights_new(c);
    weights_init(&x->weights, c, 11, 0.1);
    x->runner.config = &x->config;
    x->runner.stage = stage_of(c, 0, 1);
    x->runner.packing.chunk_size = chunk_size;
    x->runner.order.shape.k = k;
    x->runner.meter = &x->meter;
}

/* Checks that a freed struct is as it was when empty. */
static void check_empty(const void *freed, size_t bytes, const char *what) {
    const char *at = (const char *)freed;
    size_t n = 0;
    while (n < bytes && at[n] == 0) n++;
    if (!CHECK(n == bytes)) FAIL("byte %d of a freed %s is %d", (int)n, what, at[n]);
}
#define CHECK_EMPTY(freed, what) check_empty(&(freed), sizeof(freed), what)

static void world_end(world *x) {
    chunk_runner_free(&x->runner);
    for (int kind = 0; kind < MEMORY_KINDS; kind++) CHECK_INT(x->meter.held[kind], 0);
    weights_free(&x->gradient);
    weights_free(&x->weights);
    batch_free(&x->batch);
    documents_free(&x->documents);
    CHECK_EMPTY(x->runner, "runner");
    CHECK_EMPTY(x->gradient, "gradient");
    CHECK_EMPTY(x->batch, "batch");
    CHECK_EMPTY(x->documents, "documents");
}

static double chunked_loss(world *x, chunked_result *result) {
    cf_error error = {0};
    memset(result, 0xFF, sizeof *result);
    cf_result code =
        chunked_gradients(&x->runner, &x->weights, &x->gradient, &x->batch, x->seed, result, &error);
    if (code != CF_OK) FAIL("chunked_gradients: %s", error.text);
    return result->loss;
}

static double plain_loss(world *x, weights *gradient) {
    memory_meter meter = {{0}, {0}};
    return unchunked_gradients(&x->config, &x->weights, gradient, &x->batch, x->seed, &meter);
}

/* Returns the largest relative difference of two gradients' tensors. */
static double worst_difference(const weights *a, const weights *b) {
    double worst = 0;
    for (int64_t i = 0; i < b->n_tensors; i++) {
        const tensor *t = &b->tensors[i];
        const double d = relative_difference(a->flat + t->offset, b->flat + t->offset, t->count);
        if (!is_rounding(d)) harness_note("%s differs by %g", t->name, d);
        worst = fmax(worst, d);
    }
    return worst;
}

/* Checks that gradients of both ways agree, tensor by tensor. Returns the largest difference. */
static double check_same_gradients(world *x) {
    chunked_result result;
    weights plain = weights_new(&x->config);
    const double loss = chunked_loss(x, &result), wanted = plain_loss(x, &plain);
    const double worst = fmax(worst_difference(&x->gradient, &plain), relative_difference_of_losses(loss, wanted));
    CHECK(is_rounding(worst));
    weights_free(&plain);
    return worst;
}

#endif /* TESTS_TRAINER_WORLD_H */
