/* train_cpu.c - trains a small decoder on the CPU, chunk by chunk: how a trainer uses chunkflow - MIT or public domain

       cc -std=c99 -O3 -fopenmp examples/train_cpu.c -lm -o train_cpu
       ./train_cpu --demo
       ./train_cpu --check              chunked gradients against unchunked ones; -DTRAIN_FLOAT64 for 1e-10
       ./train_cpu --chunk-size 1024 --k 2 my_texts/

   Read in this order: chunked.h (the use of chunkflow), model.h, kernels.h; this file is the program around them. */

#define _XOPEN_SOURCE 700

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "../chunkflow.h"

#include "check.h"
#include "checkpoint.h"
#include "options.h"

#include <signal.h>
#include <time.h>

static volatile sig_atomic_t stop_asked = 0;

static void ask_to_stop(int signal_number) {
    (void)signal_number;
    stop_asked = 1;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double mebibytes(int64_t bytes) { return (double)bytes / 1048576.0; }

static int64_t device_bytes(const memory_meter *meter) {
    return meter->peak[MEMORY_ACTIVATIONS] + meter->peak[MEMORY_STATE] + meter->peak[MEMORY_WORKSPACE];
}

/* Seeds of everything drawn. */
enum { SEED_WEIGHTS = 1, SEED_ORDER, SEED_DROPOUT, SEED_SYNTHETIC };

static uint64_t seed_of(const options *o, int what) { return mix64_pair((uint64_t)o->seed, (uint64_t)what); }

static chunk_runner runner_new(const options *o, memory_meter *meter) {
    chunk_runner r;
    memset(&r, 0, sizeof r);
    r.config = &o->model;
    r.stage = stage_of(&o->model, 0, 1);
    r.packing = o->packing;
    r.share = o->share;
    r.order = o->order;
    r.stream_bytes = o->stream;
    r.keep_outputs = o->outputs;
    r.order.shape.outputs = o->outputs;
    r.meter = meter;
    r.stop = &stop_asked;
    return r;
}

/* ================================================================================================================
   >>data
   ================================================================================================================ */

static documents load_documents(const options *o) {
    documents d;
    memset(&d, 0, sizeof d);
    for (int64_t i = 0; i < o->synthetic.count; i++) {
        add_synthetic(&d, o->synthetic.lengths[i], seed_of(o, SEED_SYNTHETIC));
        if (o->with.count > 0) make_alike(&d, i, o->with.lengths[i], o->shared.lengths[i]);
    }
    for (int64_t i = 0; i < o->n_paths; i++) add_path(&d, o->paths[i], o->longest);
    if (o->synthetic.count == 0 && o->n_paths == 0) add_path(&d, ".", o->longest);
    if (d.count == 0) fail(EXIT_BAD_INPUT, "there is no file to train on");
    return d;
}

/* Takes the next documents in order; synthetic ones all at once, unchanged. */
static batch next_batch(const options *o, const documents *d, data_order *order) {
    batch b = batch_new(o->synthetic.count > 0 ? d->count : o->batch);
    for (int64_t i = 0; i < b.count; i++) {
        int64_t document = o->synthetic.count > 0 ? i : data_order_next(order);
        batch_put(&b, i, d, document, o->prompt, o->prompt_fraction);
    }
    b.shared_mean = o->shared_mean;
    if (o->advantages) batch_draw_weights(&b, seed_of(o, SEED_WEIGHTS));
    return b;
}

static void print_data(const documents *d) {
    int64_t longest = 0;
    for (int64_t i = 0; i < d->count; i++) longest = max_of(longest, document_length(d, i));
    printf("data: %lld documents, %lld tokens, longest %lld", (long long)d->count, (long long)d->first[d->count],
           (long long)longest);
    if (d->n_cut > 0)
        printf(" (%lld of %lld files, longer than --max-length, were cut at blank lines)", (long long)d->n_cut,
               (long long)d->n_files);
    printf("\n");
}

/* ================================================================================================================
   >>train
   ================================================================================================================ */

typedef struct training {
    const options *options;
    documents documents;
    data_order order;
    weights weights, gradient;
    optimizer optimizer;
    memory_meter meter;
    chunk_runner runner;
    int64_t step;               /* done so far */
    double first_loss, last_loss;
} training;

static void training_begin(training *t, const options *o) {
    memset(t, 0, sizeof *t);
    t->options = o;
    t->documents = load_documents(o);
    t->order = data_order_new(t->documents.count, seed_of(o, SEED_ORDER), 0, 0);
    t->weights = weights_new(&o->model);
    t->gradient = weights_new(&o->model);
    t->optimizer = optimizer_new(t->weights.count);
    t->runner = runner_new(o, &t->meter);
    weights_init(&t->weights, &o->model, seed_of(o, SEED_WEIGHTS), 0);
}

static void training_end(training *t) {
    chunk_runner_free(&t->runner);
    optimizer_free(&t->optimizer);
    weights_free(&t->gradient);
    weights_free(&t->weights);
    data_order_free(&t->order);
    documents_free(&t->documents);
}

enum { PROGRESS_STEP, PROGRESS_EPOCH, PROGRESS_CURSOR, PROGRESS_CHUNKING, PROGRESS_COUNT };

/* Hashes the settings of chunks. They do not change what is computed, only how it is rounded. */
static int64_t chunking_hash(const options *o) {
    const cf_pack_desc *p = &o->packing;
    int64_t all[] = {p->chunk_size, (int64_t)p->method, (int64_t)p->split, p->no_tails,
                     p->align,      p->max_slices,      p->n_ranks,        o->order.shape.k,
                     o->share};
    return (int64_t)(hash_bytes(0, all, sizeof all) >> 1);
}

/* Calls `use`, which saves or loads, on the run's data in a checkpoint's form. */
static int with_checkpoint(training *t, int (*use)(const char *path, checkpoint *c)) {
    const options *o = t->options;
    const checkpoint_setting settings[] = {
        setting_int("vocabulary", o->model.vocabulary), setting_int("layers", o->model.layers),
        setting_int("hidden", o->model.hidden), setting_int("heads", o->model.heads),
        setting_int("kv-heads", o->model.kv_heads), setting_int("ffn", o->model.ffn),
        setting_int("untied", o->model.untied), setting_double("dropout", o->model.dropout),
        setting_double("rope theta", o->model.rope_theta), setting_double("norm epsilon", o->model.norm_epsilon),
        setting_int("window", o->model.window),
        setting_int("kinds of layers", (int64_t)hash_bytes(0, &o->model.kinds, sizeof o->model.kinds)),
        setting_int("batch", o->batch), setting_int("steps", o->optimizer.steps),
        setting_double("lr", o->optimizer.learning_rate), setting_int("warmup", o->optimizer.warmup),
        setting_double("weight-decay", o->optimizer.weight_decay), setting_double("clip", o->optimizer.clip),
        setting_int("seed", o->seed), setting_int("prompt", o->prompt),
        setting_double("prompt-fraction", o->prompt_fraction), setting_int("shared-mean", o->shared_mean),
        setting_int("advantages", o->advantages),
        setting_int("hash of the documents", (int64_t)documents_hash(&t->documents)),
    };
    int64_t progress[PROGRESS_COUNT] = {t->step, t->order.epoch, t->order.cursor, chunking_hash(o)};
    checkpoint c = {settings, sizeof settings / sizeof settings[0], progress, PROGRESS_COUNT,
                    {t->weights.flat, t->optimizer.first, t->optimizer.second}, t->weights.count,
                    NULL, NULL, NULL};
    int result = use(o->checkpoint, &c);
    if (progress[PROGRESS_STEP] < 0 || progress[PROGRESS_EPOCH] < 0 || progress[PROGRESS_CURSOR] < 0 ||
        progress[PROGRESS_CURSOR] > t->documents.count) {
        fail(EXIT_BAD_INPUT, "%s: its step or its place in the data makes no sense", o->checkpoint);
    }
    if (progress[PROGRESS_CHUNKING] != chunking_hash(o)) {
        printf("note: the chunks are others than before, so losses go on alike but not bit by bit\n");
    }
    t->step = progress[PROGRESS_STEP];
    data_order_free(&t->order);
    t->order =
        data_order_new(t->documents.count, seed_of(o, SEED_ORDER), progress[PROGRESS_EPOCH], progress[PROGRESS_CURSOR]);
    return result;
}

static int save_to(const char *path, checkpoint *c) {
    checkpoint_save(path, c);
    return 1;
}

static int load_from(const char *path, checkpoint *c) {
    char why[CHECKPOINT_WHY] = "";
    int result = checkpoint_load(path, c, why);
    if (result < 0) fail(EXIT_BAD_INPUT, "%s: refused, and left as it is: %s", path, why);
    return result;
}

static void print_progress(const training *t, const chunked_result *result, const batch *b, double length,
                           double seconds) {
    const options *o = t->options;
    char loss[40];
    snprintf(loss, sizeof loss, o->exact ? "%a" : "%.4f", result->loss);
    printf("step %4lld/%lld  loss %s  lr %.2e  |gradient| %.3f  %3lld chunks  %6.0f tokens/s  activations %.2f MiB  "
           "state %.2f MiB\n", (long long)t->step, (long long)o->optimizer.steps, loss,
           learning_rate_at(&o->optimizer, t->step - 1), length, (long long)result->n_chunks,
           (double)b->n_tokens / seconds, mebibytes(result->peak_activation_bytes),
           mebibytes(t->meter.peak[MEMORY_STATE]));
    fflush(stdout);
}

/* Runs one training step. Returns 0 if it was interrupted; the weights are then unchanged. */
static int training_step(training *t) {
    const options *o = t->options;
    data_order before = t->order;
    double begin = seconds_now();
    chunked_result result = {0};
    cf_error error;
    memset(&error, 0, sizeof error);
    batch b = next_batch(o, &t->documents, &t->order);
    if (b.n_targets == 0)
        fail(EXIT_BAD_INPUT, "step %lld: the batch has no target tokens, so there is nothing to learn", (long long)t->step + 1);
    weights_clear(&t->gradient);
    t->meter.peak[MEMORY_STATE] = t->meter.held[MEMORY_STATE];
    uint64_t seed = mix64_pair(seed_of(o, SEED_DROPOUT), (uint64_t)t->step);
    cf_result code = chunked_gradients(&t->runner, &t->weights, &t->gradient, &b, seed, &result, &error);
    if (code == CF_ERROR_CANCELLED) {
        int64_t epoch = before.epoch, cursor = before.cursor;
        data_order_free(&t->order);
        t->order = data_order_new(t->documents.count, before.seed, epoch, cursor);
        batch_free(&b);
        return 0;
    }
    if (code != CF_OK) fail(EXIT_BAD_INPUT, "%s", error.text);
    double length = gradient_length(&t->gradient);
    if (!(length - length == 0) || !(result.loss - result.loss == 0)) {
        fail(EXIT_CHECK_FAILED, "step %lld: the loss or its gradient is not a finite number; try a smaller --lr",
             (long long)t->step + 1);
    }
    optimizer_step(&t->optimizer, &o->optimizer, &t->weights, &t->gradient, length, t->step);
    t->step++;
    if (t->first_loss == 0) t->first_loss = result.loss;
    t->last_loss = result.loss;
    if (t->step % o->print_every == 0 || t->step == o->optimizer.steps) {
        print_progress(t, &result, &b, length, seconds_now() - begin);
    }
    batch_free(&b);
    return 1;
}

static void train(training *t) {
    const options *o = t->options;
    if (o->checkpoint && with_checkpoint(t, load_from)) {
        printf("going on from %s, step %lld\n", o->checkpoint, (long long)t->step);
    } else if (o->checkpoint) {
        with_checkpoint(t, save_to); /* so that an unwritable path is reported before any work is done */
    }
    int64_t end = o->stop_after > 0 ? min_of(o->optimizer.steps, t->step + o->stop_after) : o->optimizer.steps;
    int64_t saved = t->step;
    while (t->step < end && !stop_asked && training_step(t)) {
        if (o->checkpoint && t->step % o->checkpoint_every == 0) {
            with_checkpoint(t, save_to);
            saved = t->step;
        }
    }
    if (o->checkpoint && saved != t->step) with_checkpoint(t, save_to);
    if (stop_asked) printf("stopped after step %lld\n", (long long)t->step);
}

static int run_training(const options *o) {
    training t;
    if (o->checkpoint) checkpoint_lock(o->checkpoint);
    training_begin(&t, o);
    print_data(&t.documents);
    printf("model: %lld parameters (" REAL_NAME "), %lld layers, hidden %lld; chunk size %lld, K %lld\n",
           (long long)t.weights.count, (long long)o->model.layers, (long long)o->model.hidden,
           (long long)o->packing.chunk_size, (long long)o->order.shape.k);
    train(&t);
    printf("weights after step %lld: %016llx\n",
           (long long)t.step, /* shows at a glance whether two runs are equal */
           (unsigned long long)hash_bytes(0, t.weights.flat, (size_t)t.weights.count * sizeof(real)));
    if (o->stream > 0) {
        printf("most held: %lld bytes on the device, %lld in host memory\n", (long long)device_bytes(&t.meter),
               (long long)t.meter.peak[MEMORY_HOST]);
    }
    training_end(&t);
    return 0;
}

/* ================================================================================================================
   >>check
   ================================================================================================================ */

static int run_check(const options *o, int all_tensors) {
    documents d = load_documents(o);
    data_order order = data_order_new(d.count, seed_of(o, SEED_ORDER), 0, 0);
    batch b = next_batch(o, &d, &order);
    memory_meter meter;
    memset(&meter, 0, sizeof meter);
    chunk_runner runner = runner_new(o, &meter);
    weights w = weights_new(&o->model);
    weights_init(&w, &o->model, seed_of(o, SEED_WEIGHTS), 0.1);
    int ok = check_gradients(&runner, &o->model, &w, &b, seed_of(o, SEED_DROPOUT), all_tensors);
    weights_free(&w);
    chunk_runner_free(&runner);
    batch_free(&b);
    data_order_free(&order);
    documents_free(&d);
    return ok ? 0 : EXIT_CHECK_FAILED;
}

/* ================================================================================================================
   >>memory    what grows with the longest document, and what does not
   ================================================================================================================ */

typedef struct memory_row {
    int64_t longest, n_chunks;
    memory_meter unchunked, chunked, streamed;
    double difference; /* of the losses */
    int same_bits;     /* whether loss and gradients of the streamed run equal those of the chunked one, bit by bit */
} memory_row;

/* Makes four short documents and a long one. */
static batch memory_batch(const options *o, documents *d, int64_t longest) {
    const int64_t size = o->packing.chunk_size, lengths[] = {size / 2, size / 3, longest, size / 5, size};
    const int64_t n = sizeof lengths / sizeof lengths[0];
    batch b = batch_new(n);
    for (int64_t i = 0; i < n; i++) add_synthetic(d, lengths[i], seed_of(o, SEED_SYNTHETIC));
    for (int64_t i = 0; i < n; i++) batch_put(&b, i, d, i, o->prompt, o->prompt_fraction);
    return b;
}

static chunked_result measure_chunked(const options *o, int64_t stream, const weights *w, weights *gradient,
                                      const batch *b, memory_meter *meter) {
    chunk_runner runner = runner_new(o, meter);
    chunked_result result;
    cf_error error;
    memset(&error, 0, sizeof error);
    runner.stream_bytes = stream;
    if (chunked_gradients(&runner, w, gradient, b, 0, &result, &error) != CF_OK) fail(EXIT_BAD_INPUT, "%s", error.text);
    chunk_runner_free(&runner);
    return result;
}

/* Runs a batch unchunked, chunked, and chunked with a ring of `stream` bytes, and measures the memory of each. */
static memory_row measure_memory(const options *o, int64_t longest, int64_t stream) {
    memory_row row;
    documents d;
    memset(&row, 0, sizeof row);
    memset(&d, 0, sizeof d);
    batch b = memory_batch(o, &d, longest);
    weights w = weights_new(&o->model), gradient = weights_new(&o->model), streamed = weights_new(&o->model);
    weights_init(&w, &o->model, seed_of(o, SEED_WEIGHTS), 0);
    chunked_result chunked = measure_chunked(o, 0, &w, &gradient, &b, &row.chunked);
    chunked_result same = measure_chunked(o, stream, &w, &streamed, &b, &row.streamed);
    row.longest = longest;
    row.n_chunks = chunked.n_chunks;
    row.same_bits = same.loss == chunked.loss &&
                    memcmp(streamed.flat, gradient.flat, (size_t)gradient.count * sizeof(real)) == 0;
    double loss = unchunked_gradients(&o->model, &w, &gradient, &b, 0, &row.unchunked);
    row.difference = relative_difference_of_losses(chunked.loss, loss);
    weights_free(&w);
    weights_free(&gradient);
    weights_free(&streamed);
    batch_free(&b);
    documents_free(&d);
    return row;
}

static void print_memory_row(const memory_row *row) {
    const int64_t *plain = row->unchunked.peak, *ours = row->chunked.peak;
    printf("  %8lld %7lld | %11.2f %10.2f %8.2f | %11.2f %7.2f %10.2f %8.2f | %8.2f %7.2f | %.1e\n",
           (long long)row->longest, (long long)row->n_chunks, mebibytes(plain[MEMORY_ACTIVATIONS]),
           mebibytes(plain[MEMORY_WORKSPACE]), mebibytes(device_bytes(&row->unchunked)),
           mebibytes(ours[MEMORY_ACTIVATIONS]), mebibytes(ours[MEMORY_STATE]), mebibytes(ours[MEMORY_WORKSPACE]),
           mebibytes(device_bytes(&row->chunked)), mebibytes(device_bytes(&row->streamed)),
           mebibytes(row->streamed.peak[MEMORY_HOST]), row->difference);
    fflush(stdout);
}

/* Returns whether row `i` is as expected: chunked training holds `slots` activation slots, with a stream or without,
   and nothing else on the device has grown since the previous row. */
static int memory_row_is_right(const memory_row *rows, int i, int64_t slots) {
    int64_t slot = rows[0].chunked.peak[MEMORY_ACTIVATIONS]; /* the first row has no chain, so one slot */
    const memory_row *row = &rows[i], *before = &rows[i - 1];
    int64_t earlier_slots = before->chunked.peak[MEMORY_ACTIVATIONS] / slot;
    return row->chunked.peak[MEMORY_ACTIVATIONS] == slots * slot &&
           row->unchunked.peak[MEMORY_ACTIVATIONS] > 3 * before->unchunked.peak[MEMORY_ACTIVATIONS] &&
           row->streamed.peak[MEMORY_HOST] == row->chunked.peak[MEMORY_STATE] &&
           (before->streamed.peak[MEMORY_STATE] == 0 || /* it has no chain */
            device_bytes(&row->streamed) - device_bytes(&before->streamed) == (slots - earlier_slots) * slot);
}

/* Prints the table for a longest document of 1, 4 and 16 chunks. From K chunks on, the activations of chunked training
   must stay the same, and with a stream all device bytes must. Those of unchunked training must grow with the
   document. */
static int run_memory_table(const options *o) {
    static const int64_t growth[] = {1, 4, 16};
    memory_row rows[3];
    int64_t half_a_chunk = max_of(1, o->packing.chunk_size / (2 * KEY_BLOCK)) * KEY_BLOCK;
    int64_t stream = o->stream > 0 ? o->stream : stream_ring_bytes(stream_width_of(&o->model), half_a_chunk);
    printf("peak memory held (MiB) as the longest document of a batch grows; %lld layers, chunk size %lld, K %lld, "
           "stream of %.2f MiB\n", (long long)o->model.layers, (long long)o->packing.chunk_size, (long long)o->order.shape.k,
           mebibytes(stream));
    printf("  %8s %7s | %-31s | %-39s | %-16s | %s\n", "longest", "", "unchunked", "chunked", "with the stream",
           "losses");
    printf("  %8s %7s | %11s %10s %8s | %11s %7s %10s %8s | %8s %7s | %s\n", "tokens", "chunks", "activations",
           "workspace", "sum", "activations", "state", "workspace", "sum", "device", "host", "differ by");
    int ok = 1;
    for (int i = 0; i < 3; i++) {
        rows[i] = measure_memory(o, growth[i] * o->packing.chunk_size, stream);
        print_memory_row(&rows[i]);
        ok = ok && is_rounding(rows[i].difference) && rows[i].same_bits;
        ok = ok && (i == 0 || memory_row_is_right(rows, i, min_of(o->order.shape.k, growth[i])));
    }
    printf("%s\n", ok ? "chunked activations stay at K x chunk size; with the document grow only its K and V and their "
                        "gradients, and with a stream those lie in host memory"
                      : "NOT OK: chunked activations do not stay at K x chunk size, or device bytes grow with a "
                        "stream, or the results differ");
    return ok ? 0 : EXIT_CHECK_FAILED;
}

/* ================================================================================================================
   >>demo
   ================================================================================================================ */

static int run_demo(options *o) {
    training t;
    double begin = seconds_now();
    o->optimizer.steps = 40;
    o->optimizer.learning_rate = 1e-2;
    o->optimizer.warmup = 4;
    o->print_every = 5;
    o->longest = 4096;
    o->batch = 8;
    o->packing.chunk_size = 256;
    o->order.shape.k = 2;
    printf("1. Training on the files of this directory, in chunks\n");
    training_begin(&t, o);
    print_data(&t.documents);
    train(&t);
    int failed = !(t.last_loss < 0.8 * t.first_loss);
    printf("loss from %.3f to %.3f in %.1f s: %s\n\n", t.first_loss, t.last_loss, seconds_now() - begin,
           failed ? "NOT OK, it should have fallen" : "it falls");
    training_end(&t);
    if (stop_asked) return EXIT_CHECK_FAILED;
    printf("2. The same model, one batch chunked and unchunked\n");
    failed = run_check(o, 0) || failed;
    printf("\n3. Memory\n");
    o->model.layers = 6; /* a stream has one of them on the device at a time */
    o->packing.chunk_size = 128;
    failed = run_memory_table(o) || failed;
    return failed ? EXIT_CHECK_FAILED : 0;
}

int main(int argc, char **argv) {
    options o = parse_options(argc, argv);
    int code = 0;
    signal(SIGINT, ask_to_stop);
    signal(SIGTERM, ask_to_stop);
#ifdef _OPENMP
    if (o.threads > 0) omp_set_num_threads((int)o.threads);
#else
    if (o.threads > 1) fprintf(stderr, "train_cpu: built without OpenMP, so there is one thread\n");
#endif
    if (o.help) print_help(&o);
    else if (o.check) code = run_check(&o, 1);
    else if (o.memory_table) code = run_memory_table(&o);
    else if (o.demo) code = run_demo(&o);
    else code = run_training(&o);
    options_free(&o);
    must_be_printed();
    return code;
}
