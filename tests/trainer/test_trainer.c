/* test_trainer.c - the CPU trainer of examples/, in float64 - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined -DTRAIN_FLOAT64 tests/trainer/test_trainer.c \
           tests/implementation.c -lm

   Tests gradients of chunks against those of whole sequences, and memory, files, options and checkpoints, all with
   sanitizers. test_trainer_whole.c compares with a second trainer, and train_check.sh tests the programs. */

#define _XOPEN_SOURCE 700

#ifndef TRAIN_FLOAT64
#define TRAIN_FLOAT64
#endif

#include "../../chunkflow.h"

/* Allocations are counted. */
#include <stdlib.h>

static int64_t bytes_taken;

static void *counted_calloc(size_t count, size_t bytes) {
    bytes_taken += (int64_t)(count * bytes);
    return calloc(count, bytes);
}

#define calloc counted_calloc
#include "../../examples/model.h"
#undef calloc

/* The chunk runner calls this instead of model_forward. */
static int64_t rows_through_the_head;

static double counted_forward(const pass *p) {
    if (p->stage.has_head) rows_through_the_head += p->rows->rows;
    return model_forward(p);
}

#define model_forward counted_forward
#include "../../examples/chunked.h"
#include "../../examples/pipeline.h"
#undef model_forward

#include "../../examples/check.h"

/* The writer of checkpoints calls these instead of the system. They record the calls in order, and fail or send a
   signal when a test requests it. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static struct {
    char calls[16];     /* m: permissions, f: flushed, s: a file to the disk, d: a directory to it, r: renamed */
    int n, fails, signals;
    int64_t synced;     /* bytes of the file that were synced to disk */
    struct stat folder; /* the directory that did */
} asked;

static int ask(char call, int signals) {
    if (asked.n < 15) asked.calls[asked.n++] = call;
    if (signals && asked.signals) raise(asked.signals);
    errno = EIO;
    return asked.n == asked.fails;
}

static int asked_fchmod(int file, mode_t mode) { return ask('m', 0) ? -1 : fchmod(file, mode); }
static int asked_fflush(FILE *file) { return ask('f', 1) ? EOF : fflush(file); }
static int asked_rename(const char *from, const char *to) { return ask('r', 0) ? -1 : rename(from, to); }

static int asked_fsync(int file) {
    struct stat status;
    const int directory = fstat(file, &status) == 0 && S_ISDIR(status.st_mode);
    if (directory) asked.folder = status;
    else asked.synced = (int64_t)status.st_size;
    return ask(directory ? 'd' : 's', 0) ? -1 : fsync(file);
}

#define CHECKPOINT_PIECE 2
#define fchmod asked_fchmod
#define fflush asked_fflush
#define rename asked_rename
#define fsync asked_fsync
#include "../../examples/checkpoint.h"
#undef fchmod
#undef fflush
#undef rename
#undef fsync

#include "../../examples/options.h"
#include "../../examples/tokens.h"

#include <sys/wait.h>

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#include "world.h"

/* ================================================================================================================
   >>files    and programs that end
   ================================================================================================================ */

static void write_file(const char *path, const void *bytes, size_t count) {
    FILE *file = fopen(path, "wb");
    REQUIRE(file != NULL);
    CHECK(fwrite(bytes, 1, count, file) == count);
    CHECK(fclose(file) == 0);
}

static char folder[200]; /* a new one below $BUILD */

static const char *in_folder(const char *name) {
    static char paths[4][256]; /* the latest four hold */
    static int at;
    at = (at + 1) % 4;
    snprintf(paths[at], sizeof paths[at], "%s/%s", folder, name);
    return paths[at];
}

/* The output of a call that runs in its own process, and its exit status; 0 if it returned. */
typedef struct ending {
    int status;
    char out[16384], err[1100];
} ending;

static void read_text(const char *name, char *text, size_t most) {
    FILE *file = fopen(in_folder(name), "rb");
    text[0] = 0;
    REQUIRE(file != NULL);
    text[fread(text, 1, most - 1, file)] = 0;
    fclose(file);
    remove(in_folder(name));
}

static ending ended(void (*call)(const void *user), const void *user) {
    ending e = {0, "", ""};
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (!freopen(in_folder("out"), "wb", stdout) || !freopen(in_folder("err"), "wb", stderr)) _exit(99);
        call(user);
        exit(0);
    }
    CHECK(child > 0 && waitpid(child, &e.status, 0) == child && WIFEXITED(e.status));
    e.status = WEXITSTATUS(e.status);
    read_text("out", e.out, sizeof e.out);
    read_text("err", e.err, sizeof e.err);
    return e;
}

/* Checks that the call exits as for bad input, with one line that contains `why`. */
static void check_ends(void (*call)(const void *user), const void *user, const char *why) {
    const ending e = ended(call, user);
    if (!CHECK(e.status == EXIT_BAD_INPUT && e.out[0] == 0 && strstr(e.err, why) && strchr(e.err, '\n') == strrchr(e.err, '\n')))
        FAIL("status %d, wanted \"%s\": %s", e.status, why, e.err);
}

/* ================================================================================================================
   >>comparator    the check of the checks
   ================================================================================================================ */

TEST(comparator_rejects_what_is_not_a_number) {
    real good[3] = {1, -2, 3}, bad[3] = {1, -2, 3};
    CHECK(relative_difference(good, bad, 3) == 0);
    for (int i = 0; i < 3; i++) {
        const real odd[] = {(real)NAN, (real)INFINITY, (real)-INFINITY};
        for (int j = 0; j < 3; j++) {
            bad[i] = odd[j];
            CHECK(!is_rounding(relative_difference(good, bad, 3)));
            CHECK(!is_rounding(relative_difference(bad, good, 3)));
            CHECK(!is_rounding(relative_difference(bad, bad, 3)));
            CHECK(!is_rounding(relative_difference_of_losses((double)odd[j], 1)));
            CHECK(!is_rounding(relative_difference_of_losses(1, (double)odd[j])));
            CHECK(!is_rounding(relative_difference_of_losses((double)odd[j], (double)odd[j])));
        }
        bad[i] = good[i];
    }
    CHECK(!is_rounding(NAN));
    CHECK(!is_rounding(INFINITY));
}

TEST(comparator_sees_small_and_stale_differences) {
    real good[4] = {1, -2, 3, 1e-12}, other[4] = {1, -2, 3, 1e-12}, zero[4] = {0, 0, 0, 0};
    other[1] = -2 * (1 + 1e-9);
    CHECK(!is_rounding(relative_difference(other, good, 4)));
    other[1] = -2 * (1 + 1e-15);
    CHECK(is_rounding(relative_difference(other, good, 4)));
    CHECK(!is_rounding(relative_difference(zero, good, 4)));
    CHECK(!is_rounding(relative_difference(good, zero, 4)));
    CHECK(is_rounding(relative_difference(zero, zero, 4)));
    CHECK(!is_rounding(relative_difference(good + 1, good, 3))); /* off by one */
    CHECK(!is_rounding(relative_difference_of_losses(1, 0)));
    CHECK(!is_rounding(relative_difference_of_losses(0, 1)));
    CHECK(relative_difference_of_losses(0, 0) == 0 && relative_difference_of_losses(3, 3) == 0);
    CHECK(largest_of(good, 4) == 3 && largest_of(good + 1, 1) == 2 && largest_of(good, 0) == 0 && largest_of(zero, 4) == 0);
    CHECK(relative_difference_of_losses(3, 2) == 0.5 && relative_difference_of_losses(-2, 2) == 2);
}

/* Each shape at its limit, and one past it. */
TEST(models_are_refused_by_what_is_wrong) {
    static const struct {
        size_t offset;
        int64_t bad, good;
        const char *why;
    } cases[] = {
#define FIELD(name) offsetof(model_config, name)
        {FIELD(layers), 0, 1, "layers"}, {FIELD(layers), 4097, 4096, "layers"},
        {FIELD(hidden), 0, 4, "hidden must"}, {FIELD(ffn), 0, 1, "ffn"}, {FIELD(ffn), 1048577, 1048576, "ffn"},
        {FIELD(heads), 0, 1, "heads must divide"}, {FIELD(heads), 3, 2, "heads must divide"},
        {FIELD(hidden), 6, 8, "must be even"}, {FIELD(hidden), 516, 512, "at most 256"},
        {FIELD(kv_heads), 0, 1, "kv-heads"}, {FIELD(kv_heads), 4, 2, "kv-heads"},
        {FIELD(window), -1, 0, "window"}, {FIELD(window), (int64_t)INT32_MAX + 1, INT32_MAX, "window"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        model_config c = {VOCABULARY, 2, 20, 2, 1, 34, 0, 0, 1e4, 1e-6, 0, {0}};
        int64_t *at = (int64_t *)(void *)((char *)&c + cases[i].offset);
        CHECK(model_config_fault(&c) == NULL);
        *at = cases[i].bad;
        const char *why = model_config_fault(&c);
        if (!CHECK(why && strstr(why, cases[i].why))) FAIL("case %d: %s", (int)i, why ? why : "accepted");
        *at = cases[i].good;
        CHECK_STR(model_config_fault(&c), NULL);
    }
    model_config wide = {VOCABULARY, 1, 65536, 256, 256, 1, 0, 0, 1e4, 1e-6, 0, {0}};
    CHECK_STR(model_config_fault(&wide), NULL);
    wide.hidden = 65536 + 512;
    CHECK(model_config_fault(&wide) && strstr(model_config_fault(&wide), "hidden must"));
    wide.hidden = 512;
    model_config kinds = tiny_model(); /* the tokens of its loss do not depend on its layers */
    CHECK_STR(parse_pattern(&kinds.kinds, "full,window"), NULL);
    for (kinds.kinds.balance_over = 0; kinds.kinds.balance_over < 5; kinds.kinds.balance_over++) {
        static const char *const whys[] = {"window must", "window must", "over batch", "over call", "over call"};
        const char *why = model_config_fault(&kinds);
        CHECK(why && strstr(why, whys[kinds.kinds.balance_over]));
    }
    const double rates[] = {-1e-9, 1, NAN, 0, 0.999};
    for (int i = 0; i < 5; i++) {
        wide.dropout = rates[i];
        CHECK_INT(model_config_fault(&wide) == NULL, i > 2);
    }
}

/* ================================================================================================================
   >>chunks
   ================================================================================================================ */

TEST(any_chunking_gives_the_same_gradients) {
    harness_rng rng = {2024};
    for (int trial = 0; trial < harness_rounds(100, 12); trial++) {
        int64_t lengths[12], n = harness_between(&rng, 1, 12), chunk_size = harness_between(&rng, 1, 40);
        for (int64_t i = 0; i < n; i++) {
            lengths[i] = harness_chance(&rng, 0.2) ? harness_between(&rng, 0, 160) : harness_between(&rng, 0, 30);
        }
        if (trial % 5 == 0) lengths[0] = chunk_size * harness_between(&rng, 1, 4); /* a whole number of chunks */
        lengths[n - 1] = max_of(lengths[n - 1], 2);                               /* so that there is a target */
        world x;
        model_config c = tiny_model();
        c.untied = harness_chance(&rng, 0.5);
        c.dropout = harness_chance(&rng, 0.3) ? 0.2 : 0;
        c.kv_heads = harness_between(&rng, 1, 2);
        c.window = trial % 2 == 0 ? harness_between(&rng, 1, 70) : 0;
        world_begin(&x, &c, lengths, n, chunk_size, harness_between(&rng, 1, 5), 0);
        cf_pack_desc *p = &x.runner.packing;
        p->align = chunk_size % 4 == 0 && harness_chance(&rng, 0.7) ? 4 : 1;
        p->method = (cf_pack_method)harness_between(&rng, 0, CF_PACK_COUNT - 1);
        p->split = (cf_split_method)harness_between(&rng, 0, 3);
        p->no_tails = harness_chance(&rng, 0.5);
        p->max_slices = harness_chance(&rng, 0.3) ? harness_between(&rng, 1, 3) : 0;
        p->n_ranks = harness_chance(&rng, 0.3) ? harness_between(&rng, 2, 4) : 1;
        harness_note("trial %d: window %d, chunks of %d, K %d, align %d, method %d, split %d, tails %d, slices %d, "
                     "ranks %d", trial, (int)c.window, (int)chunk_size, (int)x.runner.order.shape.k, (int)p->align, (int)p->method, (int)p->split,
                     !p->no_tails, (int)p->max_slices, (int)p->n_ranks);
        check_same_gradients(&x);
        world_end(&x);
        harness_note("%s", "");
    }
}

/* Slots, scratch and state are full of NaN before the passes: no stale value is read, in padding rows either. A second
   run gives the same bits, so a replay repeats its forward. */
TEST(nothing_stale_is_read_and_runs_repeat_bit_by_bit) {
    const int64_t lengths[] = {90, 7, 3, 21, 5};
    world x;
    model_config c = tiny_model();
    chunked_result first, second;
    c.dropout = 0.25;
    world_begin(&x, &c, lengths, 5, 20, 2, 2);
    x.runner.packing.align = 4;
    chunked_loss(&x, &first);
    real *before = TAKE(real, x.gradient.count);
    memcpy(before, x.gradient.flat, (size_t)x.gradient.count * sizeof *before);
    weights_clear(&x.gradient);
    for (int64_t i = 0; i < x.runner.n_slots; i++) {
        memset(x.runner.slots[i].flat, 0xFF, (size_t)x.runner.slots[i].bytes);
    }
    memset(x.runner.passing.flat, 0xFF, (size_t)x.runner.passing.bytes);
    carver all = {0};
    workspace sizes = {0};
    workspace_layout(&sizes, &all, &c, 20);
    memset(x.runner.scratch.flat, 0xFF, (size_t)all.used * sizeof(real));
    chunked_loss(&x, &second);
    CHECK(first.loss == second.loss);
    CHECK(memcmp(before, x.gradient.flat, (size_t)x.gradient.count * sizeof *before) == 0);
    CHECK(first.n_replays > 0);
    CHECK_INT(first.peak_slots, 2);
    free(before);
    world_end(&x);
}

/* A later batch may need more or fewer slots and states than earlier ones: each has the gradients that it has alone. */
TEST(a_runner_grows_from_batch_to_batch) {
    static const int64_t lengths[][3] = {{9, 5, 2}, {100, 70, 33}, {40, 3, 0}, {160, 90, 50}};
    const model_config c = tiny_model();
    chunk_runner runner = {0};
    memory_meter meter = {{0}, {0}};
    for (int i = 0; i < 4; i++) {
        world alone;
        chunked_result wanted, got;
        cf_error error;
        world_begin(&alone, &c, lengths[i], 3, 16, 1 + 2 * i, 0);
        if (i == 0) runner = alone.runner;
        runner.config = &alone.config;
        runner.order = alone.runner.order;
        runner.meter = &meter;
        const double loss = chunked_loss(&alone, &wanted);
        weights together = weights_new(&c);
        REQUIRE(chunked_gradients(&runner, &alone.weights, &together, &alone.batch, alone.seed, &got, &error) == CF_OK);
        CHECK(got.loss == loss && memcmp(together.flat, alone.gradient.flat, (size_t)together.count * sizeof(real)) == 0);
        CHECK_INT(got.peak_slots, wanted.peak_slots);
        CHECK_INT(runner.feed.bytes, (int64_t)runner.feed.metadata_bytes + 16 * (4 * 4 + 8)); /* of the five arrays */
        weights_free(&together);
        world_end(&alone);
    }
    CHECK(runner.n_slots > 1 && runner.n_states > 0);
    chunk_runner_free(&runner);
    for (int kind = 0; kind < MEMORY_KINDS; kind++) CHECK_INT(meter.held[kind], 0);
}

/* A replay is the same forward: dropping more activations changes no bit of the gradients. Only one of a chunk's
   forwards runs the head. */
TEST(k_changes_no_bit) {
    const int64_t lengths[] = {100, 30};
    real *first = NULL;
    double loss = 0;
    for (int64_t k = 1; k <= 8; k++) {
        world x;
        model_config c = tiny_model();
        chunked_result result;
        c.dropout = 0.1;
        world_begin(&x, &c, lengths, 2, 16, k, 0);
        rows_through_the_head = 0;
        chunked_loss(&x, &result);
        CHECK_INT(rows_through_the_head, 130);
        CHECK_INT(result.n_replays, max_of(0, 7 - k) + max_of(0, 2 - k));
        CHECK_INT(result.peak_slots, min_of(k, 7));
        CHECK(result.peak_activation_bytes == min_of(k, 7) * x.runner.slots[0].bytes);
        if (!first) {
            first = TAKE(real, x.gradient.count);
            memcpy(first, x.gradient.flat, (size_t)x.gradient.count * sizeof *first);
            loss = result.loss;
        }
        CHECK(result.loss == loss);
        CHECK(memcmp(first, x.gradient.flat, (size_t)x.gradient.count * sizeof *first) == 0);
        world_end(&x);
    }
    free(first);
}

/* Adds the gradients of a pipeline of one stage, which sends nothing, to those of x. Returns its loss. */
static double stage_loss(world *x) {
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_steps *steps = NULL;
    cf_error error;
    stage_runner r;
    memset(&r, 0, sizeof r);
    cf_result code = cf_pack(x->batch.length, x->batch.count, &x->runner.packing, &plan, &error);
    if (code == CF_OK) code = cf_schedule_make(plan, &x->runner.order, &schedule, &error);
    if (code == CF_OK) code = cf_steps_make(plan, schedule, 0, x->seed, NULL, &steps, &error);
    if (code == CF_OK) {
        code = stage_runner_begin(&r, &x->config, plan, schedule, steps, &x->batch, 0, x->runner.keep_outputs, &error);
    }
    r.weights = &x->weights;
    r.gradient = &x->gradient;
    r.seed = x->seed;
    for (int64_t i = 0; code == CF_OK && i < steps->n; i++) {
        stage_begin_step(&r, &steps->steps[i]);
        code = stage_pass(&r, &steps->steps[i], &error);
        stage_end_step(&r, &steps->steps[i]);
    }
    CHECK_INT(code, CF_OK);
    CHECK_INT(r.peak_outputs, x->runner.keep_outputs ? steps->n_outputs : 0);
    CHECK(r.n_outputs == r.peak_outputs && r.live_outputs == 0);
    const double loss = r.loss;
    stage_runner_end(&r);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return loss;
}

/* The same for a stage of a pipeline; some dropped chunks keep outputs. */
TEST(a_stage_runs_the_head_once_a_chunk) {
    const int64_t lengths[] = {100, 30};
    model_config c = tiny_model();
    for (int64_t k = 1; k <= 8; k += 3) {
        world x, alone;
        chunked_result result;
        world_begin(&x, &c, lengths, 2, 16, k, 0);
        x.runner.keep_outputs = k != 4;
        world_begin(&alone, &c, lengths, 2, 16, k, 0);
        const double wanted = chunked_loss(&alone, &result);
        rows_through_the_head = 0;
        CHECK(relative_difference_of_losses(stage_loss(&x), wanted) < 1e-12);
        CHECK_INT(rows_through_the_head, 130);
        CHECK(is_rounding(worst_difference(&x.gradient, &alone.gradient)));
        world_end(&x);
        world_end(&alone);
    }
}

/* A forward that keeps nothing needs the buffers of one layer; a state holds K, V, dK and dV and nothing else. */
TEST(memory_is_what_it_should_be) {
    const int64_t lengths[] = {64, 3};
    world x;
    model_config c = tiny_model();
    chunked_result result;
    c.layers = 10;
    world_begin(&x, &c, lengths, 2, 16, 1, 0);
    chunked_loss(&x, &result);
    /* besides the layers: residual stream, final norm, probabilities */
    int64_t ends = 16 * (2 * c.hidden + 1 + c.vocabulary) * (int64_t)sizeof(real);
    CHECK_INT(result.peak_slots, 1);
    CHECK_INT(x.runner.slots[0].bytes - ends, 10 * (x.runner.passing.bytes - ends));
    CHECK_INT(x.meter.peak[MEMORY_STATE], 64 * 4 * kv_width_of(&c) * c.layers * (int64_t)sizeof(real));
    CHECK_INT(x.meter.held[MEMORY_STATE], 0);
    const stage front = stage_of(&c, 0, 2), back = stage_of(&c, 1, 2);
    activations first = activations_new(&c, &front, 16, 1, MEMORY_ACTIVATIONS, &x.meter);
    activations last = activations_new(&c, &back, 16, 1, MEMORY_ACTIVATIONS, &x.meter);
    CHECK_INT(front.end_layer, 5);
    CHECK_INT(last.bytes - first.bytes, 16 * (c.hidden + 1 + c.vocabulary) * (int64_t)sizeof(real));
    activations_free(&first, &x.meter);
    activations_free(&last, &x.meter);
    world_end(&x);
}

/* The meter counts all allocated bytes except two lists of pointers to the layers' arrays: one that is kept, and one
   used to find the size. */
TEST(the_meter_counts_what_is_taken) {
    const model_config c = tiny_model();
    const stage all = stage_of(&c, 0, 1);
    const int64_t lists = 2 * all_layers(&c) * (int64_t)sizeof(layer_activations);
    memory_meter meter = {{0}, {0}};
    bytes_taken = 0;
    workspace w = workspace_new(&c, 19, &meter);
    CHECK_INT(w.bytes, bytes_taken);
    CHECK_INT(meter.held[MEMORY_WORKSPACE], bytes_taken);
    bytes_taken = 0;
    activations a = activations_new(&c, &all, 19, 1, MEMORY_ACTIVATIONS, &meter);
    CHECK_INT(a.bytes, bytes_taken - lists);
    CHECK_INT(meter.held[MEMORY_ACTIVATIONS], bytes_taken - lists);
    activations_free(&a, &meter);
    workspace_free(&w, &meter);
    CHECK(meter.held[MEMORY_WORKSPACE] == 0 && meter.held[MEMORY_ACTIVATIONS] == 0);
}

/* The angles of rows have their own places in the scratch, and nothing else there is written. */
TEST(angles_are_put_in_their_places) {
    enum { ROWS = 5 };
    for (int latent = 0; latent < 2; latent++) {
        model_config c = tiny_model();
        int32_t position[ROWS] = {0, 1, 2, 0, 1};
        memory_meter meter = {{0}, {0}};
        if (latent) CHECK_STR(parse_pattern(&c.kinds, "latent"), NULL);
        workspace w = workspace_new(&c, ROWS, &meter);
        const int64_t others = ROWS * (int64_t)(sizeof(double) + sizeof(attention_tile));
        const int64_t n = (w.bytes - others) / (int64_t)sizeof(real);
        const int64_t angles = ROWS * (head_dim_of(&c) + (latent ? rope_of(&c) : 0));
        chunk_rows rows = {ROWS, 1, 0, 0, NULL, NULL, position, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0, 0, NULL,
                           NULL, NULL, NULL, 0};
        const pass p = {&c, NULL, &rows, NULL, NULL, &w, stage_of(&c, 0, 1), 1, 0, NULL, NULL, 0, NULL, NULL,
                        NULL};
        int64_t written = 0;
        for (int64_t i = 0; i < n; i++) w.flat[i] = 7;
        prepare_rows(&p);
        for (int64_t i = 0; i < n; i++) written += w.flat[i] != 7;
        CHECK_INT(written, angles);
        for (int64_t i = 0; i < angles; i++) CHECK(fabs(w.rows.cosine[i]) <= 1); /* they are contiguous */
        workspace_free(&w, &meter);
    }
}

/* Errors of a callback, and of a plan and a schedule that do not match, are returned. */
TEST(errors_of_the_library_come_back) {
    const int64_t lengths[] = {50, 8, 8};
    world x, y;
    model_config c = tiny_model();
    chunked_result result;
    cf_error error = {0};
    cf_schedule *schedule = NULL;
    cf_plan *plan = NULL;
    cf_steps *steps = NULL;
    world_begin(&x, &c, lengths, 3, 10, 2, 0);
    world_begin(&y, &c, lengths, 1, 10, 2, 0);
    chunked_loss(&x, &result);
    REQUIRE(cf_pack(lengths, 3, &x.runner.packing, &plan, NULL) == CF_OK);
    REQUIRE(cf_schedule_make(plan, &x.runner.order, &schedule, NULL) == CF_OK);
    REQUIRE(cf_steps_make(plan, schedule, 0, 0, NULL, &steps, NULL) == CF_OK);
    cf_step step = {0};
    step.slot = step.state = step.path = -1;
    step.action.chunk = (int32_t)plan->n_chunks; /* there is none */
    x.runner.plan = plan;
    CHECK_INT(run_pass(&x.runner, &step, &error), CF_ERROR_ARGUMENT);
    x.runner.plan = NULL;
    plan->n_chunks--; /* so that its counts contradict each other */
    CHECK(chunk_runner_reserve(&x.runner, plan, steps, &error) != CF_OK);
    plan->n_chunks++;
    x.runner.order.shape.n_stages = -1;
    memset(&result, 7, sizeof result);
    CHECK_INT(chunked_gradients(&x.runner, &x.weights, &x.gradient, &x.batch, 1, &result, &error), CF_ERROR_ARGUMENT);
    CHECK(result.n_chunks == 0x0707070707070707); /* untouched */
    x.runner.packing.chunk_size = -1;
    CHECK_INT(chunked_gradients(&x.runner, &x.weights, &x.gradient, &x.batch, 1, &result, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "chunk_size");
    x.batch.length[0] = -1;
    CHECK_INT(chunk_feed_begin(&x.runner.feed, plan, &x.batch, 0, &x.meter, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "lengths");
    volatile sig_atomic_t stop = 1;
    y.runner.stop = &stop;
    CHECK_INT(chunked_gradients(&y.runner, &y.weights, &y.gradient, &y.batch, 1, &result, &error), CF_ERROR_CANCELLED);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    world_end(&x);
    world_end(&y);
}

static void run_check(const void *user) {
    world *x = (world *)(void *)(uintptr_t)user;
    model_config other = x->config;
    other.norm_epsilon *= x->seed == 77 ? 1 : 1e6;
    exit(check_gradients(&x->runner, &other, &x->weights, &x->batch, 3, x->seed == 77) ? 0 : 3);
}

/* The check reports success if both ways agree, and failure if they do not. */
TEST(the_check_tells_right_from_wrong) {
    const int64_t lengths[] = {50, 8, 9};
    model_config c = tiny_model();
    world x;
    char line[160];
    world_begin(&x, &c, lengths, 3, 10, 2, 0);
    ending e = ended(run_check, &x);
    CHECK_INT(e.status, 0);
    snprintf(line, sizeof line, "3 sequences, 67 tokens in 67 rows, 64 targets in %d chunks of 10, K 2: longest chain 5, 0 hybrid, 3", 7);
    if (!CHECK(strstr(e.out, line) && strstr(e.out, "limit 1e-10: ok, it is rounding"))) FAIL("%s", e.out);
    for (int64_t i = 0; i < x.weights.n_tensors; i++) CHECK(strstr(e.out, x.weights.tensors[i].name) != NULL);
    CHECK(strstr(e.out, "largest gradient ") != NULL);
    x.seed = 1;
    e = ended(run_check, &x);
    CHECK_INT(e.status, 3);
    CHECK(strstr(e.out, ": NOT OK") && strstr(e.out, "largest gradient") == NULL);
    x.batch.n_targets = 0;
    check_ends(run_check, &x, "no target tokens");
    world_end(&x);
}

/* Sequences that begin alike are computed once only on request; chunks are counted over all ranks. */
TEST(nothing_is_shared_unasked) {
    const int64_t lengths[] = {140, 135};
    for (int64_t share = 0; share <= CF_MIN_SHARED_PREFIX; share += CF_MIN_SHARED_PREFIX) {
        world x;
        model_config c = tiny_model();
        chunked_result result;
        world_begin(&x, &c, lengths, 2, 70, 8, 0);
        x.batch.tokens[1] = x.batch.tokens[0];
        x.runner.share = share;
        x.runner.packing.n_ranks = share == 0 ? 2 : 1;
        chunked_loss(&x, &result);
        if (share == 0) CHECK(result.n_rows == 275 && result.n_chunks == 4);
        else CHECK(result.n_rows <= 275 - 128 && result.n_rows >= 140);
        world_end(&x);
    }
}

/* ================================================================================================================
   >>stream    states in host memory
   ================================================================================================================ */

/* Trains on the same batch with the state on the device and with a ring of two blocks of `block_rows` rows. */
static void check_stream(const model_config *c, const int64_t *lengths, int64_t n, int64_t chunk_size, int64_t k,
                         int64_t block_rows) {
    world x, y;
    chunked_result resident, streamed;
    int64_t ring = STREAM_SLOTS * block_rows * 4 * kv_width_of(c) * (int64_t)sizeof(real);
    world_begin(&x, c, lengths, n, chunk_size, k, 0);
    world_begin(&y, c, lengths, n, chunk_size, k, 0);
    y.runner.stream_bytes = ring + 7; /* which are no row */
    chunked_loss(&x, &resident);
    chunked_loss(&y, &streamed);
    CHECK(streamed.loss == resident.loss);
    CHECK(memcmp(x.gradient.flat, y.gradient.flat, (size_t)x.gradient.count * sizeof(real)) == 0);
    CHECK_INT(y.meter.peak[MEMORY_STATE], resident.longest_chain > 0 ? ring : 0);
    CHECK_INT(y.meter.peak[MEMORY_HOST], x.meter.peak[MEMORY_STATE]);
    CHECK_INT(x.meter.peak[MEMORY_HOST], 0);
    CHECK_INT(y.meter.peak[MEMORY_WORKSPACE], x.meter.peak[MEMORY_WORKSPACE]);
    weights_clear(&y.gradient);
    check_same_gradients(&y);
    world_end(&x);
    world_end(&y);
}

TEST(a_stream_changes_no_bit) {
    harness_rng rng = {15};
    model_config c = tiny_model();
    c.layers = harness_rounds(6, 3);
    for (int trial = 0; trial < harness_rounds(40, 6); trial++) {
        int64_t lengths[4], chunk_size = harness_between(&rng, 1, 70), k = harness_between(&rng, 1, 4);
        int64_t block_rows = KEY_BLOCK * harness_between(&rng, 1, 3);
        for (int i = 0; i < 4; i++) lengths[i] = harness_between(&rng, 2, i == 0 ? 200 : 40);
        if (chunk_size < 8) lengths[0] = harness_between(&rng, 2, 70); /* chunks enough */
        if (trial % 4 == 0) lengths[0] = KEY_BLOCK * harness_between(&rng, 1, 7) + harness_between(&rng, -1, 1);
        c.kv_heads = harness_between(&rng, 1, 2);
        c.dropout = trial % 3 == 0 ? 0.2 : 0;
        c.window = trial % 2 == 1 ? harness_between(&rng, 1, 150) : 0;
        if (trial % 6 == 1) c.window = trial % 12 == 1 ? 1 : block_rows;
        harness_note("trial %d: %d and others, window %d, chunks of %d, K %d, blocks of %d", trial, (int)lengths[0],
                     (int)c.window, (int)chunk_size, (int)k, (int)block_rows);
        check_stream(&c, lengths, 4, chunk_size, k, block_rows);
        harness_note("%s", "");
    }
}

/* Returns whether a query of a sequence sees a key of it. window 0: no window. */
static int is_seen(int64_t key, int64_t query, int64_t window) {
    return key <= query && (window == 0 || query - key < window);
}

/* Compares the transfers of a training step with a count from the rules. F and R read K and V of the prefix. B reads
   those and the gradients of all rows so far, and sends the prefix's gradients. Only F sends its own K and V. Of all
   these, only rows that a query of a later chunk sees count. If outputs are kept, F of a dropped chunk sends its
   outputs, and R reads those instead of the prefix. */
static void check_what_a_stream_sends(int64_t window, int keep_outputs) {
    enum { CHUNKS = 7, SIZE = 24, K = 2 };
    const int64_t length = CHUNKS * SIZE, n_layers = harness_rounds(6, 3);
    world x;
    model_config c = tiny_model();
    chunked_result result;
    int64_t in = 0, out = 0;
    c.layers = n_layers;
    c.window = window;
    world_begin(&x, &c, &length, 1, SIZE, K, 0);
    x.runner.stream_bytes = stream_ring_bytes(kv_width_of(&c), KEY_BLOCK);
    x.runner.keep_outputs = keep_outputs;
    chunked_loss(&x, &result);
    CHECK_INT(result.n_replays, CHUNKS - K);
    keep_outputs = keep_outputs && window == 0; /* windows as short as these keep none */
    for (int64_t chunk = 0; chunk < CHUNKS; chunk++) {
        int64_t prefix = 0, kept = 0, forwards = chunk < CHUNKS - K && !keep_outputs ? 2 : 1;
        for (int64_t row = 0; row < chunk * SIZE; row++) prefix += is_seen(row, chunk * SIZE, window);
        for (int64_t row = 0; row < SIZE; row++) kept += is_seen(row, SIZE, window);
        in += 2 * prefix * forwards + 2 * prefix + 2 * (prefix + kept);
        out += 2 * kept + 2 * prefix;
    }
    int64_t row = kv_width_of(&c) * n_layers * (int64_t)sizeof(real);
    int64_t outputs = (CHUNKS - K) * SIZE * (c.hidden + c.heads) * n_layers * (int64_t)sizeof(real) * keep_outputs;
    CHECK_INT(x.runner.stream.in.bytes, in * row + outputs);
    CHECK_INT(x.runner.stream.out.bytes, out * row + outputs);
    world_end(&x);
}

TEST(a_stream_sends_what_is_needed_and_no_more) {
    const int64_t windows[] = {0, 1, 2, 24, 25, KEY_BLOCK, 61, 1000};
    for (size_t i = 0; i < sizeof windows / sizeof windows[0]; i++) check_what_a_stream_sends(windows[i], 0);
    check_what_a_stream_sends(0, 1);
    check_what_a_stream_sends(61, 1);
}

/* Walks through a prefix of four blocks by hand, correctly and then with mistakes. tests/trainer/train_check.sh plants
   the same mistakes in the trainer. */
TEST(the_ring_shows_a_wrong_order) {
    enum { WIDTH = 2, ROWS = 4 * KEY_BLOCK };
    memory_meter meter = {{0}, {0}};
    state_stream s = stream_new(WIDTH, stream_ring_bytes(WIDTH, KEY_BLOCK), &meter);
    real *host = TAKE(real, 4 * ROWS * WIDTH);
    key_block prefix = {host, host + ROWS * WIDTH, host + 2 * ROWS * WIDTH, host + 3 * ROWS * WIDTH, 0, ROWS, 0,
                        NULL, 0};
    for (int64_t i = 0; i < 4 * ROWS * WIDTH; i++) host[i] = (real)i;
    stream_begin(&s, &prefix, WIDTH, 1);
    for (int64_t b = 0; b < 4; b++) {
        key_block early = stream_block(&s, b * KEY_BLOCK);
        CHECK(isnan((double)early.k[0]) && isnan((double)early.dv[KEY_BLOCK * WIDTH - 1])); /* not waited for */
        key_block block = stream_next(&s);
        CHECK_INT(block.first, b * KEY_BLOCK);
        CHECK_INT(block.count, KEY_BLOCK);
        CHECK(block.k[0] == prefix.k[block.first * WIDTH] && block.v[3] == prefix.v[block.first * WIDTH + 3]);
        CHECK(block.dk[0] == prefix.dk[block.first * WIDTH] && block.dv[3] == prefix.dv[block.first * WIDTH + 3]);
        block.dk[0] = -1 - (real)b;
        stream_release(&s);
        CHECK(isnan((double)block.k[0]) && isnan((double)block.v[3])); /* released */
        CHECK(b >= 2 || isnan((double)block.dk[0]));                   /* loaded anew */
        CHECK(b < 2 || isnan((double)prefix.dk[b * KEY_BLOCK * WIDTH])); /* on its way out */
    }
    CHECK(stream_is_busy(&s)); /* gradients are being sent, and nothing more is loaded */
    stream_end(&s);
    CHECK(!stream_is_busy(&s));
    copy_issue(&s.in, host, s.ring, 1);
    CHECK(stream_is_busy(&s));
    copy_wait(&s.in, s.in.n_issued);
    host[0] = 0;
    for (int64_t b = 0; b < 4; b++) CHECK(prefix.dk[b * KEY_BLOCK * WIDTH] == -1 - (real)b);
    for (int64_t i = 0; i < ROWS * WIDTH; i++) CHECK(prefix.dv[i] == (real)(3 * ROWS * WIDTH + i));
    stream_free(&s, &meter);
    CHECK_INT(meter.held[MEMORY_STATE], 0);
    free(host);
}

/* ================================================================================================================
   >>targets
   ================================================================================================================ */

TEST(a_batch_without_targets_has_no_loss_and_no_gradient) {
    const int64_t lengths[] = {1, 30, 0, 1};
    world x;
    model_config c = tiny_model();
    chunked_result result;
    world_begin(&x, &c, lengths, 4, 8, 1, 30);
    CHECK_INT(x.batch.n_targets, 0);
    CHECK(chunked_loss(&x, &result) == 0 && plain_loss(&x, NULL) == 0);
    for (int64_t i = 0; i < x.gradient.count; i++) {
        if (!(x.gradient.flat[i] == 0)) FAIL("gradient %d is %g", (int)i, (double)x.gradient.flat[i]);
    }
    world_end(&x);
}

/* ================================================================================================================
   >>ends
   ================================================================================================================ */

/* Frees the structs that no runner copies. */
TEST(what_is_freed_is_empty) {
    const model_config c = tiny_model();
    const stage all = stage_of(&c, 0, 1);
    const int64_t length = 5;
    int64_t *begin = TAKE(int64_t, 2);
    memory_meter meter = {{0}, {0}};
    optimizer o = optimizer_new(9);
    data_order order = data_order_new(9, 1, 0, 0);
    token_set s = random_tokens(&length, 1, 9, 3);
    token_batch b = token_batch_new(2);
    workspace w = workspace_new(&c, 3, &meter);
    activations a = activations_new(&c, &all, 3, 1, MEMORY_ACTIVATIONS, &meter);
    state_stream ring = stream_new(4, stream_ring_bytes(4, KEY_BLOCK), &meter);
    routing r = routing_new(&c, 1, 5, &length, 1);
    chunk_feed f;
    memset(&f, 0, sizeof f);
    f.bytes = f.capacity = 7; /* as if it had contents */
    begin[1] = length;
    memory_count(&meter, MEMORY_WORKSPACE, 7);
    chain_state g = {0};
    g.begin = begin;
    g.chunks = 1;
    g = chain_state_new(&c, &all, &g, NULL, &meter);
    optimizer_free(&o);
    data_order_free(&order);
    token_set_free(&s);
    token_batch_free(&b);
    workspace_free(&w, &meter);
    activations_free(&a, &meter);
    stream_free(&ring, &meter);
    routing_free(&r);
    chunk_feed_free(&f, &meter);
    chain_state_free(&g, &meter);
    CHECK_EMPTY(o, "optimizer");
    CHECK_EMPTY(order, "order");
    CHECK_EMPTY(s, "set of tokens");
    CHECK_EMPTY(b, "batch of tokens");
    CHECK_EMPTY(w, "workspace");
    CHECK_EMPTY(a, "list of activations");
    CHECK_EMPTY(ring, "ring");
    CHECK_EMPTY(r, "routing");
    CHECK_EMPTY(f, "feed");
    CHECK_EMPTY(g, "state");
    CHECK_EMPTY(meter.held, "meter");
}

/* ================================================================================================================
   >>data
   ================================================================================================================ */

/* File sizes around the buffer's; documents, batches and targets must differ between files. */
TEST(long_files_are_whole_and_documents_differ) {
    static const size_t sizes[] = {0, 4095, 4096, 4097, 8192, 8193, 20000};
    static unsigned char bytes[20000];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (unsigned char)mix64(i);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *again = NULL;
        write_file(in_folder("text"), bytes, sizes[i]);
        CHECK_INT(read_file(in_folder("text"), &again), (int64_t)sizes[i]);
        CHECK(memcmp(again, bytes, sizes[i]) == 0);
        free(again);
    }
    remove(in_folder("text"));
    documents d = {0};
    for (int64_t i = 0; i < 40; i++) add_synthetic(&d, i, 1 + (uint64_t)(i / 20));
    for (int64_t i = 0; i < d.first[40]; i++) CHECK(d.tokens[i] < VOCABULARY);
    for (int64_t i = 12; i < 40; i++) /* with another number, or another seed */
        CHECK(memcmp(d.tokens + d.first[i], d.tokens + d.first[i - 1], 10 * sizeof *d.tokens) != 0);
    const uint64_t hash = documents_hash(&d);
    d.tokens[d.first[40] - 1] ^= 1;
    CHECK(documents_hash(&d) != hash);
    d.tokens[d.first[40] - 1] ^= 1;
    d.first[7]++;
    CHECK(documents_hash(&d) != hash);
    d.first[7]--;
    for (int64_t prompt = 0; prompt < 12; prompt++) {
        batch b = batch_new(40);
        int64_t targets = 0, tokens = 0;
        for (int64_t i = 0; i < 40; i++) batch_put(&b, i, &d, i, prompt % 6, prompt < 6 ? 0 : 0.25 * (double)(prompt - 6));
        for (int64_t i = 0; i < 40; i++) {
            for (int64_t t = 0; t < i; t++) {
                const int seen = t + 1 < i && t + 1 >= prompt % 6 && (prompt < 6 || t + 1 >= i * (prompt - 6) / 4);
                CHECK_INT(batch_target(&b, i, t), seen ? d.tokens[d.first[i] + t + 1] : -1);
                targets += seen;
            }
            tokens += i;
        }
        CHECK_INT(b.n_targets, targets);
        CHECK_INT(b.n_tokens, tokens);
        CHECK(batch_loss_weight(&b) == (targets > 0 ? 1 / (double)targets : 0));
        batch_free(&b);
    }
    documents_free(&d);
}

static void read_folder(const void *user) {
    documents d = {0};
    add_path(&d, (const char *)user, 0);
    printf("%d documents", (int)d.count);
    documents_free(&d);
}

static void stop_reading(const void *user) {
    errno = *(const int *)user;
    fail_to_read("what");
}

/* Lack of memory is the machine's fault, an unreadable file the input's. */
TEST(exit_statuses_say_whose_fault_it_is) {
    const int memory = ENOMEM, denied = EACCES;
    const ending a = ended(stop_reading, &memory), b = ended(stop_reading, &denied);
    CHECK(a.status == EXIT_CHECK_FAILED && b.status == EXIT_BAD_INPUT && strstr(b.err, "train_cpu: what: Permission denied\n"));
}

TEST(directories_may_be_deep_but_not_endless) {
    char path[512], root[512];
    size_t n = (size_t)snprintf(path, sizeof path, "%s", in_folder("deep")), end[MAX_DIRECTORY_DEPTH + 2];
    snprintf(root, sizeof root, "%s", path);
    CHECK(mkdir(path, 0700) == 0);
    for (int depth = 0; depth <= MAX_DIRECTORY_DEPTH; depth++) {
        end[depth] = n;
        n += (size_t)snprintf(path + n, sizeof path - n, "/d");
        CHECK(mkdir(path, 0700) == 0);
        if (depth + 1 == MAX_DIRECTORY_DEPTH) {
            snprintf(path + n, sizeof path - n, "/file");
            write_file(path, "x", 1);
            CHECK_STR(ended(read_folder, root).out, "1 documents");
            remove(path);
            path[n] = 0;
        }
    }
    check_ends(read_folder, root, "more than 64 directories deep");
    for (int depth = MAX_DIRECTORY_DEPTH; depth >= 0; depth--) {
        CHECK(rmdir(path) == 0);
        path[end[depth]] = 0;
    }
    CHECK(rmdir(root) == 0);
    check_ends(read_folder, "/no/such/file", "/no/such/file: No such file");
}

/* With whom each document shares, and how much: numbers of any length, as many as documents. */
static void run_check_alike(const void *user) {
    const char *const *text = (const char *const *)user;
    length_list lists[3] = {{NULL, 0}, {NULL, 0}, {NULL, 0}};
    for (int i = 0; i < 3; i++)
        if (text[i]) parse_lengths("list", &lists[i], text[i]);
    check_alike(&lists[0], &lists[1], &lists[2]);
    exit(EXIT_BAD_INPUT + 77);
}

TEST(documents_that_begin_alike_are_checked) {
    static const struct {
        const char *lists[3], *why;
    } cases[] = {{{"9,9", "0,0", "0,9"}, NULL},          {{"9,9", NULL, NULL}, NULL},
                 {{"9,9", "0,0", "0"}, "a number for"},  {{"9,9", "0", "0,0"}, "a number for"},
                 {{"9,9", "0", "0"}, "a number for"},    {{"9,9", NULL, "0,0"}, "a number for"},
                 {{"9,9", "0,0", NULL}, "a number for"}, {{"9,9", "0,0", "0,10"}, "no 10 tokens"},
                 {{"8,9", "0,0", "0,9"}, "no 9 tokens"}, {{"9,9", "0,1", "0,1"}, "no 1 tokens"},
                 {{"9,00000000000000000000000000000009", NULL, NULL}, "list: wanted numbers of at most 31 characters"},
                 {{"9,9", "1,0", "1,0"}, "document 0"},
                 {{"0000000000000000000000000000009,9", "0,0", "0,9"}, NULL}}; /* 31 digits */
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        if (cases[i].why) check_ends(run_check_alike, cases[i].lists, cases[i].why);
        else CHECK_INT(ended(run_check_alike, cases[i].lists).status, EXIT_BAD_INPUT + 77);
    }
}

/* ================================================================================================================
   >>tokens
   ================================================================================================================ */

static void write_tokens(const void *user) {
    const int64_t length = 5;
    token_set s = random_tokens(&length, 1, 9, 3);
    tokens_write((const char *)user, &s);
    token_set_free(&s);
}

static void read_tokens(const void *user) {
    token_set s = tokens_read((const char *)user);
    token_set_free(&s);
}

/* Three documents, written here by hand in the layout of tokens.h. */
typedef struct token_image {
    tokens_head head;
    int64_t first[4];
    int32_t tokens[6];
    unsigned char ignored[6];
} token_image;

static const token_image tokens_image = {
    {{'c', 'f', 't', 'o', 'k', 'e', 'n', '1'}, 0x0102030405060708, 10, 3, 6, 1}, {0, 2, 2, 6}, {3, 9, 0, 1, 2, 9},
    {1, 0, 0, 1, 0, 1}};
enum { TOKENS_BYTES = 48 + 32 + 24 + 6 };

/* The same file without masks is 6 bytes shorter. */
TEST(token_files_are_as_described) {
    for (int masks = 0; masks < 2; masks++) {
        token_image image = tokens_image;
        unsigned char *again = NULL;
        image.head.has_masks = masks;
        write_file(in_folder("tokens"), &image, TOKENS_BYTES - (masks ? 0 : 6));
        token_set s = tokens_read(in_folder("tokens"));
        CHECK_INT(s.count, 3);
        CHECK_INT(s.vocabulary, 10);
        CHECK(memcmp(s.first, image.first, sizeof image.first) == 0 && memcmp(s.tokens, image.tokens, 24) == 0);
        CHECK(masks ? s.ignored && memcmp(s.ignored, image.ignored, 6) == 0 : !s.ignored);
        CHECK_INT(longest_document(&s), 4);
        token_batch b = token_batch_new(3);
        for (int64_t i = 0; i < 3; i++) token_batch_put(&b, i, &s, 2 - i);
        CHECK_INT(b.n_tokens, 6);
        CHECK_INT(b.n_targets, masks ? 2 : 4); /* tokens 1, 3, 4 and 5, of which 3 and 5 are ignored */
        CHECK(b.length[0] == 4 && b.length[1] == 0 && b.tokens[0] == s.tokens + 2 && b.tokens[2] == s.tokens);
        CHECK(masks ? b.ignored[0] == s.ignored + 2 : !b.ignored[0]);
        token_batch_free(&b);
        tokens_write(in_folder("again"), &s);
        const int64_t bytes = read_file(in_folder("again"), &again);
        CHECK(bytes == TOKENS_BYTES - (masks ? 0 : 6) && memcmp(again, &image, (size_t)bytes) == 0);
        free(again);
        token_set_free(&s);
    }
    const int64_t lengths[] = {3, 0, 900};
    token_set s = random_tokens(lengths, 3, 7, 5), t = random_tokens(lengths, 3, 7, 6);
    int count[7] = {0};
    for (int64_t i = 0; i < 903; i++) count[s.tokens[i] % 7] += s.tokens[i] >= 0 && s.tokens[i] < 7;
    for (int i = 0; i < 7; i++) CHECK(abs(count[i] - 129) < 60);
    CHECK(s.first[3] == 903 && token_set_length(&s, 1) == 0 && memcmp(s.tokens, t.tokens, 903 * 4) != 0);
    token_set_free(&s);
    token_set_free(&t);
    remove(in_folder("tokens"));
    remove(in_folder("again"));
    const ending none = ended(write_tokens, "/no/such/file"), full = ended(write_tokens, "/dev/full");
    CHECK(none.status == EXIT_CHECK_FAILED && strstr(none.err, "/no/such/file: No such file"));
    if (access("/dev/full", F_OK) == 0) CHECK(full.status == EXIT_CHECK_FAILED && strstr(full.err, "it cannot be written"));
}

/* Each impossible member is found, and so is every other length of the file. */
TEST(token_files_that_make_no_sense_are_refused) {
    static const struct {
        size_t offset;
        int64_t value; /* of as many bytes */
        size_t bytes;
        const char *why;
    } cases[] = {
#define AT(name) offsetof(token_image, name)
        {AT(head.magic), 0, 1, "no token file"}, {AT(head.byte_order), 0x0807060504030201, 8, "byte order"},
        {AT(head.vocabulary), 0, 8, "vocabulary makes"}, {AT(head.vocabulary), (int64_t)1 << 31, 8, "vocabulary makes"},
        {AT(head.n_documents), 0, 8, "number of documents"}, {AT(head.n_documents), -1, 8, "number of documents"},
        {AT(head.n_documents), 7, 8, "number of documents"}, {AT(head.n_documents), INT64_MAX, 8, "number of documents"},
        {AT(head.n_documents), 2, 8, "size does not fit"}, {AT(head.n_tokens), 5, 8, "size does not fit"},
        {AT(head.n_tokens), 7, 8, "size does not fit"}, {AT(head.n_tokens), -1, 8, "size does not fit"},
        {AT(head.has_masks), 2, 8, "head is damaged"}, {AT(head.has_masks), -1, 8, "head is damaged"},
        {AT(head.has_masks), 0, 8, "size does not fit"}, {AT(first[0]), 1, 8, "begin and end"},
        {AT(first[3]), 5, 8, "begin and end"}, {AT(first[1]), 3, 8, "out of order"}, {AT(first[2]), 1, 8, "out of order"},
        {AT(first[1]), -1, 8, "out of order"}, {AT(tokens[0]), -1, 4, "not in its vocabulary"},
        {AT(tokens[5]), 10, 4, "not in its vocabulary"}, {AT(ignored[5]), 2, 1, "neither 0 nor 1"},
        {AT(ignored[0]), 255, 1, "neither 0 nor 1"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        token_image image = tokens_image;
        const int32_t narrow = (int32_t)cases[i].value;
        const unsigned char byte = (unsigned char)cases[i].value;
        const void *value = cases[i].bytes == 8 ? (const void *)&cases[i].value : cases[i].bytes == 4 ? (const void *)&narrow : &byte;
        memcpy((char *)&image + cases[i].offset, value, cases[i].bytes);
        write_file(in_folder("tokens"), &image, TOKENS_BYTES);
        harness_note("case %d", (int)i);
        check_ends(read_tokens, in_folder("tokens"), cases[i].why);
    }
    for (size_t n = 0; n < TOKENS_BYTES; n += n == 0 ? 47 : n < 50 ? 1 : 11) {
        harness_note("%d bytes", (int)n);
        write_file(in_folder("tokens"), &tokens_image, n);
        check_ends(read_tokens, in_folder("tokens"), n < 48 ? "no token file" : "does not fit its");
    }
    harness_note("%s", "");
    write_file(in_folder("tokens"), &tokens_image, TOKENS_BYTES);
    CHECK_INT(ended(read_tokens, in_folder("tokens")).status, 0);
    remove(in_folder("tokens"));
}

/* ================================================================================================================
   >>options
   ================================================================================================================ */

/* The options of --help, each with its default and its smallest and largest allowed values; LIMIT: the largest is not
   tried. */
#define LIMIT 1000000000000
static const struct {
    const char *help;
    int64_t least, most;
} known_options[] = {
    {"check", 0, 0}, {"memory-table", 0, 0}, {"demo", 0, 0}, {"layers N [2]", 1, 4096}, {"hidden N [64]", 8, 1024},
    {"heads N [4]", 2, 32}, {"kv-heads N [2]", 1, 4}, {"ffn N [176]", 1, 1048576}, {"untied", 0, 0}, {"dropout X [0]", 0, 0},
    {"window N [0]", 0, INT32_MAX}, {"kinds LIST", 0, 0}, {"experts N [4]", 1, 64}, {"active N [2]", 1, 8},
    {"balance X [0]", 0, LIMIT}, {"balance-over WORD: sequence batch call", 0, 0}, {"capacity X [0]", 0, 0},
    {"mtp X [0]", 0, LIMIT},
    {"chunk-size N [256]", 1, CF_MAX_CHUNK_SIZE}, {"k N [1]", 1, LIMIT},
    {"stream N [0]", 0, LIMIT}, {"outputs", 0, 0}, {"method WORD: best next", 0, 0}, {"split WORD: full even cost", 0, 0},
    {"no-tails", 0, 0}, {"align N [1]", 1, CF_MAX_CHUNK_SIZE}, {"max-slices N [0]", 0, LIMIT},
    {"share N [0]", 0, LIMIT}, {"shared-mean", 0, 0}, {"ranks N [1]", 1, CF_MAX_RANKS},
    {"batch N [8]", 1, 1000000}, {"steps N [100]", 1, LIMIT}, {"lr X [0.003]", 0, LIMIT}, {"warmup N [10]", 0, LIMIT},
    {"weight-decay X [0.1]", 0, LIMIT}, {"clip X [1]", 0, LIMIT}, {"seed N [1]", 0, LIMIT}, {"threads N [0]", 0, 4096},
    {"max-length N [4096]", 0, LIMIT}, {"prompt N [0]", 0, LIMIT}, {"prompt-fraction X [0]", 0, 1}, {"advantages", 0, 0},
    {"synthetic LIST", 0, 0}, {"with LIST", 0, 0}, {"shared LIST", 0, 0},
    {"checkpoint FILE", 0, 0}, {"checkpoint-every N [50]", 1, LIMIT}, {"stop-after N [0]", 0, LIMIT},
    {"print-every N [1]", 1, LIMIT}, {"exact", 0, 0}, {"help", 0, 0}};
enum { KNOWN_OPTIONS = sizeof known_options / sizeof known_options[0] };

typedef struct words {
    int n;
    char text[8][40];
} words;

static void parse_and_print(const void *user) {
    const words *w = (const words *)user;
    char *argv[9] = {(char *)(uintptr_t)"train_cpu"};
    for (int i = 0; i < w->n; i++) argv[i + 1] = (char *)(uintptr_t)w->text[i];
    options o = parse_options(w->n + 1, argv);
    print_help(&o);
    for (int64_t i = 0; i < o.n_paths; i++) printf("path %s\n", o.paths[i]);
    for (int64_t i = 0; i < o.synthetic.count; i++) printf("length %d\n", (int)o.synthetic.lengths[i]);
    printf("flags%s%s%s%s%s%s%s%s%s%s\n", o.check ? " check" : "", o.memory_table ? " memory-table" : "", o.demo ? " demo" : "",
           o.shared_mean ? " shared-mean" : "", o.advantages ? " advantages" : "",
           o.model.untied ? " untied" : "", o.packing.no_tails ? " no-tails" : "", o.exact ? " exact" : "", o.help ? " help" : "",
           o.outputs ? " outputs" : "");
    printf("method %d split %d checkpoint %s\n", (int)o.packing.method, (int)o.packing.split, o.checkpoint ? o.checkpoint : "");
    options_free(&o);
}

static words words_of(const char *a, const char *b) {
    words w = {b ? 2 : 1, {{0}}};
    snprintf(w.text[0], sizeof w.text[0], "%s", a);
    snprintf(w.text[1], sizeof w.text[1], "%s", b ? b : "");
    return w;
}

/* Checks that the help has a line for each option, which ends with the default in brackets, if any; `own` has another
   default. */
static void check_help(const char *out, int own, const char *value) {
    const char *line = strstr(out, "\n  --");
    for (int i = 0; i < KNOWN_OPTIONS && CHECK(line != NULL); i++, line = strstr(line + 1, "\n  --")) {
        char name[48], wanted[48], begin[64];
        const char *known = known_options[i].help, *bracket = strchr(known, '['), *end = strchr(line + 1, '\n');
        const char *colon = strchr(known, ':');
        snprintf(name, sizeof name, "%.*s", (int)(bracket ? bracket - known - 1 : colon ? colon - known : (int)strlen(known)), known);
        snprintf(begin, sizeof begin, "\n  --%-20s ", name);
        snprintf(wanted, sizeof wanted, "%s", bracket ? bracket : colon ? colon : "");
        if (i == own) snprintf(wanted, sizeof wanted, "[%s]", value);
        const size_t n = strlen(wanted);
        harness_note("--%s %s: wanted %s", own < 0 ? "" : known_options[own].help, value, wanted);
        CHECK(strncmp(line, begin, strlen(begin)) == 0);
        CHECK(end && strncmp(end - n, wanted, n) == 0 && (n > 0 || end[-1] != ']'));
    }
    harness_note("%s", "");
    CHECK(line == NULL);
}

TEST(options_set_what_they_name) {
    words w = {0, {{0}}};
    ending e = ended(parse_and_print, &w);
    CHECK_INT(e.status, 0);
    check_help(e.out, -1, "");
    CHECK(strstr(e.out, "\nflags\nmethod 1 split 1 checkpoint \n") && strstr(e.out, "usage: train_cpu"));
    for (int i = 0; i < KNOWN_OPTIONS; i++) {
        const char *known = known_options[i].help, *blank = strchr(known, ' ');
        char name[40], value[32], line[64];
        snprintf(name, sizeof name, "--%.*s", (int)(blank ? blank - known : (int)strlen(known)), known);
        if (!blank) {
            const int wants_share = strcmp(name, "--shared-mean") == 0; /* the option before it */
            w = words_of(name, NULL);
            for (const char *more = "--share\0" "1"; wants_share && w.n < 3; more += 8) snprintf(w.text[w.n++], 40, "%s", more);
            snprintf(line, sizeof line, "\nflags %s\n", name + 2);
            e = ended(parse_and_print, &w);
            CHECK(e.status == 0 && strstr(e.out, line));
            check_help(e.out, wants_share ? i - 1 : -1, "1");
            continue;
        }
        w = words_of(name, NULL);
        check_ends(parse_and_print, &w, "wants a value");
        if (!strchr(known, '[')) continue;
        const int64_t tries[] = {known_options[i].least, known_options[i].most};
        for (int k = 0; k < 2 && tries[k] < LIMIT; k++) {
            snprintf(value, sizeof value, "%lld", (long long)tries[k]);
            w = words_of(name, value);
            e = ended(parse_and_print, &w);
            if (!CHECK(e.status == 0)) FAIL("%s %s: %s", name, value, e.err);
            else check_help(e.out, i, value);
        }
        const double past[] = {(double)known_options[i].least - 1, (double)known_options[i].most + 1};
        for (int k = 0; k < 2; k++) {
            snprintf(value, sizeof value, "%.17g", past[k]);
            w = words_of(name, value);
            check_ends(parse_and_print, &w, "");
        }
    }
}

TEST(options_with_words_and_lists) {
    static const char *const good[][3] = {
        {"--method", "best", "method 1 split 1"}, {"--method", "next", "method 2 split 1"}, {"--split", "cost", "method 1 split 3"},
        {"--synthetic", "7", "length 7\nflags"}, {"--synthetic", "0,12,1000000000", "length 0\nlength 12\nlength 1000000000\nflags"},
        {"--checkpoint", "a b", "checkpoint a b\n"}, {"x", "y", "path x\npath y\nflags"}, {"-", "--exact", "path -\nflags exact"},
        {"--dropout", "0.25", "[0.25]"}, {"--max-length", "3", "[3]"}, {"--stream", "65536", "[65536]"}};
    static const char *const bad[][3] = {
        {"--method", "bes", "wanted one of"}, {"--method", "best next", "wanted one of"}, {"--method", "first", "wanted one of"}, {"--method", "", "wanted one of"},
        {"--synthetic", "", "a whole number"}, {"--synthetic", "1,", "a whole number"}, {"--synthetic", "1000000001", "a whole number"},
        {"--with", "0,x", "--with: wanted a whole number"}, {"--with", "0", "a number for each"},
        {"--shared-mean", "--exact", "--shared-mean wants --share 1"}, {"--nothing", "1", "unknown option --nothing"},
        {"--", "1", "unknown option"}, {"--layers", "1.5", "a whole number from 1"},
        {"--layers", "", "a whole number"}, {"--layers", "1x", "got \"1x\""}, {"--lr", "x", "a number from 0"}, {"--lr", "nan", "a number"},
        {"--max-length", "2", "0 or at least 3"}, {"--max-length", "1", "0 or at least 3"}, {"--stream", "65535", "at least 65536: two blocks of 32 rows"}, {"--dropout", "1", "less than 1"}};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        const words w = words_of(good[i][0], good[i][1]);
        const ending e = ended(parse_and_print, &w);
        if (!CHECK(e.status == 0 && strstr(e.out, good[i][2]))) FAIL("%s %s: %s", good[i][0], good[i][1], e.err);
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const words w = words_of(bad[i][0], bad[i][1]);
        check_ends(parse_and_print, &w, bad[i][2]);
    }
    words w = words_of("--synthetic", "5");
    snprintf(w.text[w.n++], sizeof w.text[0], "file");
    check_ends(parse_and_print, &w, "not both");
    const words lists = {8, {"--synthetic", "9,9", "--with", "0,0", "--shared", "0,9", "--share", "1"}};
    const words twice = {4, {"--synthetic", "5", "--synthetic", "6,7"}};
    CHECK_INT(ended(parse_and_print, &lists).status, 0); /* nothing is left after its end */
    const ending e = ended(parse_and_print, &twice);
    CHECK(e.status == 0 && strstr(e.out, "length 6\nlength 7\n") && !strstr(e.out, "length 5"));
}

static void print_in_vain(const void *user) {
    printf("words");
    if (freopen("/dev/full", "wb", stdout)) printf("more");
    if (user) fflush(stdout);
    must_be_printed();
    _exit(77);
}

/* Writing fails at the end, or earlier. */
TEST(what_cannot_be_printed_is_no_success) {
    if (access("/dev/full", F_OK) != 0) SKIP("there is no /dev/full");
    CHECK_INT(ended(print_in_vain, NULL).status, EXIT_CHECK_FAILED);
    CHECK_INT(ended(print_in_vain, "earlier").status, EXIT_CHECK_FAILED);
}

/* ================================================================================================================
   >>checkpoint
   ================================================================================================================ */

typedef struct saved_run {
    checkpoint_setting settings[3];
    int64_t progress[2];
    real arrays[CHECKPOINT_ARRAYS][5];
    checkpoint c;
} saved_run;

static void saved_run_init(saved_run *r, int fill) {
    memset(r, 0, sizeof *r);
    r->settings[0] = setting_int("layers", 2);
    r->settings[1] = setting_double("lr", 0.1);
    r->settings[2] = setting_int("hash", -5);
    for (int i = 0; i < 2; i++) r->progress[i] = fill * 10 + i;
    for (int a = 0; a < CHECKPOINT_ARRAYS; a++) {
        for (int i = 0; i < 5; i++) r->arrays[a][i] = fill * 100 + a * 10 + i;
        r->c.arrays[a] = r->arrays[a];
    }
    r->c.settings = r->settings;
    r->c.n_settings = 3;
    r->c.progress = r->progress;
    r->c.n_progress = 2;
    r->c.count = 5;
}

/* Checks that the file is refused with a text that contains `reason`, and that neither memory nor the file changes. */
static void check_refused(const char *path, const unsigned char *image, size_t bytes, const char *reason) {
    saved_run mine, before;
    char why[CHECKPOINT_WHY] = "";
    int64_t bytes_after;
    saved_run_init(&mine, 7);
    saved_run_init(&before, 7);
    write_file(path, image, bytes);
    CHECK_INT(checkpoint_load(path, &mine.c, why), -1);
    if (!CHECK(strstr(why, reason) != NULL)) FAIL("the reason was \"%s\", wanted \"%s\"", why, reason);
    CHECK(memcmp(mine.progress, before.progress, sizeof mine.progress) == 0);
    CHECK(memcmp(mine.arrays, before.arrays, sizeof mine.arrays) == 0);
    unsigned char *after;
    bytes_after = read_file(path, &after);
    CHECK(bytes_after == (int64_t)bytes && memcmp(after, image, bytes) == 0);
    free(after);
}

static void use_checkpoint(const void *user) {
    const char *const *asks = (const char *const *)user; /* the operation, and its file */
    char why[CHECKPOINT_WHY] = "";
    saved_run run;
    saved_run_init(&run, 1);
    if (asks[0][0] == 'l') checkpoint_lock(asks[1]);
    if (asks[0][0] == 's') checkpoint_save(asks[1], &run.c);
    if (asks[0][0] == 'r') checkpoint_load(asks[1], &run.c, why);
    exit(0);
}

/* An unusable file ends the program with a message. */
TEST(checkpoint_that_cannot_be_used_ends_the_program) {
    static const struct {
        const char *what, *name, *why;
        int status;
    } cases[] = {{"lock", "taken", "another trainer is running", EXIT_BAD_INPUT},
                 {"lock", "none/x", "x.chunkflow-lock: No such file", EXIT_CHECK_FAILED},
                 {"lock", "nowhere", "nowhere: the checkpoint cannot be written: No such", EXIT_CHECK_FAILED},
                 {"save", "none/x", "x: the checkpoint cannot be written: No such", EXIT_CHECK_FAILED},
                 {"read", "file/x", "x: Not a directory", EXIT_BAD_INPUT},
                 {"read", "", "not a regular file", EXIT_BAD_INPUT},
                 {"lock", "file", "", 0}, {"read", "none/x", "", 0}};
    const int other = open_lock(in_folder("taken.chunkflow-lock"));
    REQUIRE(other >= 0 && symlink("gone", in_folder("nowhere")) == 0);
    write_file(in_folder("file"), "x", 1);
    memset(&asked, 0, sizeof asked);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *const asks[] = {cases[i].what, in_folder(cases[i].name)};
        const ending e = ended(use_checkpoint, asks);
        if (!CHECK(e.status == cases[i].status && strstr(e.err, cases[i].why))) FAIL("%s %s: %s", asks[0], asks[1], e.err);
    }
    CHECK(access(in_folder("file.chunkflow-lock"), F_OK) != 0);
    close(other);
    remove(in_folder("taken.chunkflow-lock"));
    remove(in_folder("nowhere"));
    remove(in_folder("file"));
}

/* A failure to write a checkpoint is reported with the system's reason, and leaves no file. */
TEST(checkpoint_that_cannot_be_written) {
    saved_run run;
    char path[256];
    saved_run_init(&run, 1);
    CHECK_INT(replace_file(in_folder("none/point"), &run.c), ENOENT);
    CHECK_INT(replace_file(folder, &run.c), EISDIR);
    snprintf(path, sizeof path, "%s", in_folder("link"));
    CHECK(symlink("nowhere", path) == 0);
    CHECK_INT(replace_file(path, &run.c), ENOENT);
    remove(path);
    snprintf(path, sizeof path, "%s.chunkflow-tmp0", folder);
    CHECK(access(path, F_OK) != 0);
}

TEST(checkpoint_comes_back_whole) {
    saved_run written, read;
    char why[CHECKPOINT_WHY] = "", path[256];
    snprintf(path, sizeof path, "%s", in_folder("point"));
    saved_run_init(&written, 1);
    saved_run_init(&read, 2);
    CHECK_INT(checkpoint_load(path, &read.c, why), 0); /* none yet */
    checkpoint_save(path, &written.c);
    CHECK(fopen(in_folder("point.chunkflow-tmp0"), "rb") == NULL);
    CHECK_INT(checkpoint_load(path, &read.c, why), 1);
    CHECK(memcmp(written.progress, read.progress, sizeof read.progress) == 0);
    CHECK(memcmp(written.arrays, read.arrays, sizeof read.arrays) == 0);
    saved_run_init(&written, 3); /* the next one replaces it */
    checkpoint_save(path, &written.c);
    CHECK_INT(checkpoint_load(path, &read.c, why), 1);
    CHECK(memcmp(written.arrays, read.arrays, sizeof read.arrays) == 0);
    remove(path);
}

/* The data is synced to disk before the file is renamed, and the directory at the end. Whatever fails, the old file
   remains, the system's reason is returned, and no other file is left. */
TEST(checkpoint_is_on_the_disk_or_the_old_one_is) {
    const int here = open(".", O_RDONLY);
    struct stat status;
    REQUIRE(here >= 0 && stat(folder, &status) == 0);
    for (int bare = 0; bare < 2; bare++) { /* by its path, and by its name within its folder */
        char path[256], temporary[300], why[CHECKPOINT_WHY] = "";
        if (bare) REQUIRE(chdir(folder) == 0);
        snprintf(path, sizeof path, "%s", bare ? "synced" : in_folder("synced"));
        snprintf(temporary, sizeof temporary, "%s.chunkflow-tmp0", path);
        for (int fails = 0; fails < 6; fails++) {
            saved_run old, new, read;
            saved_run_init(&old, 1);
            saved_run_init(&new, 2);
            saved_run_init(&read, 3);
            CHECK_INT(replace_file(path, &old.c), 0);
            memset(&asked, 0, sizeof asked);
            asked.fails = fails;
            const int code = replace_file(path, &new.c);
            asked.fails = 0;
            CHECK_INT(code, fails == 0 || fails == 5 ? 0 : EIO); /* failing to sync a directory is not an error */
            CHECK_STR(asked.calls, fails == 0 || fails == 5 ? "mfsrd" : fails == 1 ? "m" : fails == 2 ? "mf" :
                      fails == 3 ? "mfs" : "mfsr");
            if (fails == 0 || fails > 2) CHECK_INT(asked.synced, 48 + 3 * 40 + 16 + CHECKPOINT_ARRAYS * 5 * 8 + 8);
            if (fails == 0) CHECK(asked.folder.st_ino == status.st_ino && asked.folder.st_dev == status.st_dev);
            CHECK_INT(checkpoint_load(path, &read.c, why), 1);
            CHECK(memcmp(read.arrays, code == 0 ? new.arrays : old.arrays, sizeof read.arrays) == 0);
            CHECK(access(temporary, F_OK) != 0);
        }
        remove(path);
        memset(&asked, 0, sizeof asked);
        saved_run first;
        saved_run_init(&first, 1);
        CHECK(replace_file(path, &first.c) == 0 && asked.folder.st_ino == status.st_ino); /* there was none before */
        remove(path);
        if (bare) REQUIRE(fchdir(here) == 0);
    }
    close(here);
}

/* Only the open file's name leads to it, and no file stays open after a checkpoint. */
TEST(checkpoint_names_and_files_belong_together) {
    char *path = joined_name(in_folder("checkpoint"), "", -1), *other = joined_name(path, ".other", -1);
    write_file(path, "a", 1);
    write_file(other, "b", 1);
    const int file = open(path, O_RDONLY), here = open(".", O_RDONLY);
    REQUIRE(file >= 0 && here >= 0);
    CHECK(leads_to(path, file) && !leads_to(other, file) && !leads_to(".", here));
    REQUIRE(remove(other) == 0 && symlink(path, other) == 0);
    CHECK(!leads_to(other, file));
    remove(other);
    CHECK(!leads_to(other, file));
    close(here);
    close(file);
    const int before = dup(0);
    close(before);
    saved_run run;
    saved_run_init(&run, 1);
    memset(&asked, 0, sizeof asked);
    for (int fails = 0; fails < 4; fails++) { /* well, and badly */
        memset(&asked, 0, sizeof asked);
        asked.fails = fails;
        CHECK_INT(replace_file(path, &run.c) == 0, fails == 0);
        const int after = dup(0);
        CHECK_INT(after, before);
        close(after);
    }
    remove(path);
    free(other);
    free(path);
}

/* A link changes its target while a trainer runs. The lock moves to the new target. If another trainer holds that lock,
   its file is unchanged. */
TEST(checkpoint_is_locked_where_its_link_leads_now) {
    char link_name[256], a[256], b[256], a_lock[300], b_lock[300], why[CHECKPOINT_WHY] = "";
    saved_run run;
    int mode;
    snprintf(link_name, sizeof link_name, "%s", in_folder("moving"));
    snprintf(a, sizeof a, "%s", in_folder("a"));
    snprintf(b, sizeof b, "%s", in_folder("b"));
    snprintf(a_lock, sizeof a_lock, "%s.chunkflow-lock", a);
    snprintf(b_lock, sizeof b_lock, "%s.chunkflow-lock", b);
    memset(&asked, 0, sizeof asked);
    saved_run_init(&run, 1);
    CHECK(replace_file(a, &run.c) == 0 && replace_file(b, &run.c) == 0);
    REQUIRE(symlink("a", link_name) == 0);
    char *target = file_behind(link_name, &mode);
    CHECK_INT(lock_target(target), 0);
    free(target);
    saved_run_init(&run, 2);
    CHECK(replace_file(link_name, &run.c) == 0 && access(a_lock, F_OK) == 0 && access(b_lock, F_OK) != 0);
    REQUIRE(remove(link_name) == 0 && symlink("b", link_name) == 0);
    const int other = open_lock(b_lock);
    saved_run_init(&run, 3);
    CHECK(other >= 0 && replace_file(link_name, &run.c) == EWOULDBLOCK && access(a_lock, F_OK) == 0);
    CHECK(checkpoint_load(b, &run.c, why) == 1 && run.progress[0] == 10);
    close(other);
    saved_run_init(&run, 4);
    CHECK(replace_file(link_name, &run.c) == 0 && access(a_lock, F_OK) != 0 && access(b_lock, F_OK) == 0);
    CHECK(checkpoint_load(b, &run.c, why) == 1 && run.progress[0] == 40);
    CHECK(checkpoint_load(a, &run.c, why) == 1 && run.progress[0] == 20);
    CHECK(open_lock(b_lock) < 0 && errno == EWOULDBLOCK);
    checkpoint_unlock();
    checkpoint_lock_name = NULL;
    CHECK(access(b_lock, F_OK) != 0);
    remove(link_name);
    remove(a);
    remove(b);
}

static volatile sig_atomic_t signals_seen;
static char renamed_before; /* whether the checkpoint was renamed before the signal was delivered */

static void see_signal(int number) {
    (void)number;
    signals_seen++;
    renamed_before = asked.calls[3];
}

/* A signal during writing is delivered after the rename, and the earlier signal handlers are restored. */
TEST(checkpoint_is_finished_before_a_signal_comes) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGXCPU};
    for (int i = 0; i < 5; i++) {
        struct sigaction mine, before, after;
        saved_run run;
        saved_run_init(&run, i);
        memset(&mine, 0, sizeof mine);
        mine.sa_handler = see_signal;
        REQUIRE(sigaction(signals[i], &mine, &before) == 0);
        memset(&asked, 0, sizeof asked);
        asked.signals = signals[i];
        signals_seen = 0;
        CHECK_INT(replace_file(in_folder("signalled"), &run.c), 0);
        asked.signals = 0;
        CHECK(signals_seen == 1 && renamed_before == 'r');
        CHECK_INT(replace_file(in_folder("signalled"), &run.c), 0);
        CHECK(signals_seen == 1); /* it is not handed on again */
        CHECK(sigaction(signals[i], &before, &after) == 0 && after.sa_handler == see_signal);
        remove(in_folder("signalled"));
    }
}

/* A new file has the permissions of the user's umask; a replaced one keeps its own. One of a hundred temporary names
   must be free. The files with the other names, here one file with many links, are unchanged. */
TEST(checkpoint_has_its_permissions_and_a_name_of_its_own) {
    char path[256], name[300], taken[256], why[CHECKPOINT_WHY] = "";
    struct stat status;
    saved_run run;
    saved_run_init(&run, 1);
    snprintf(path, sizeof path, "%s", in_folder("named"));
    snprintf(taken, sizeof taken, "%s", in_folder("taken"));
    const mode_t mask = umask(027);
    CHECK_INT(replace_file(path, &run.c), 0);
    CHECK(stat(path, &status) == 0 && (status.st_mode & 07777) == 0640);
    CHECK(chmod(path, 0604) == 0);
    CHECK_INT(replace_file(path, &run.c), 0);
    CHECK(stat(path, &status) == 0 && (status.st_mode & 07777) == 0604);
    umask(mask);
    write_file(taken, "mine", 4);
    for (int i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "%s.chunkflow-tmp%d", path, i);
        saved_run_init(&run, i);
        CHECK_INT(replace_file(path, &run.c), 0);
        CHECK(link(taken, name) == 0);
    }
    CHECK_INT(replace_file(path, &run.c), EEXIST);
    CHECK_INT(checkpoint_load(path, &run.c, why), 1);
    CHECK_INT(run.progress[0], 990);
    CHECK(stat(taken, &status) == 0 && status.st_size == 4 && status.st_nlink == 101);
    for (int i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "%s.chunkflow-tmp%d", path, i);
        CHECK(remove(name) == 0);
    }
    remove(taken);
    remove(path);
}

static void move_piece(void *user, int array, int64_t first, int64_t count, real *to, int out) {
    saved_run *r = (saved_run *)user;
    if (out) memcpy(to, r->arrays[array] + first, (size_t)count * sizeof *to);
    else memcpy(r->arrays[array] + first, to, (size_t)count * sizeof *to);
}

static void fetch_numbers(void *user, int array, int64_t first, int64_t count, real *to) {
    move_piece(user, array, first, count, to, 1);
}

static void store_numbers(void *user, int array, int64_t first, int64_t count, real *from) {
    move_piece(user, array, first, count, from, 0);
}

static void make_piecewise(saved_run *r) {
    for (int a = 0; a < CHECKPOINT_ARRAYS; a++) r->c.arrays[a] = NULL;
    r->c.fetch = fetch_numbers;
    r->c.store = store_numbers;
    r->c.user = r;
}

/* Arrays that are written in pieces make the same file. */
TEST(checkpoint_piece_by_piece) {
    saved_run written, read;
    char why[CHECKPOINT_WHY] = "", path[256];
    int64_t bytes[2] = {0, 0};
    unsigned char *image[2];
    snprintf(path, sizeof path, "%s", in_folder("pieces"));
    saved_run_init(&written, 1);
    saved_run_init(&read, 2);
    for (int i = 0; i < 2; i++) {
        if (i == 1) make_piecewise(&written);
        checkpoint_save(path, &written.c);
        bytes[i] = read_file(path, &image[i]);
    }
    CHECK(bytes[0] == bytes[1] && memcmp(image[0], image[1], (size_t)bytes[0]) == 0);
    make_piecewise(&read);
    CHECK_INT(checkpoint_load(path, &read.c, why), 1);
    CHECK(memcmp(written.arrays, read.arrays, sizeof read.arrays) == 0);
    for (int i = 0; i < 2; i++) free(image[i]);
    remove(path);
}

TEST(checkpoint_damaged_anywhere_is_refused) {
    saved_run run;
    char path[256];
    unsigned char *image;
    snprintf(path, sizeof path, "%s", in_folder("point"));
    saved_run_init(&run, 1);
    checkpoint_save(path, &run.c);
    const int64_t bytes = read_file(path, &image);
    for (int64_t n = 0; n < bytes; n++) {
        check_refused(path, image, (size_t)n, n < 48 ? "not a checkpoint" : "truncated");
    }
    unsigned char *longer = TAKE(unsigned char, bytes + 9);
    memcpy(longer, image, (size_t)bytes);
    for (int64_t n = 1; n <= 9; n++) check_refused(path, longer, (size_t)(bytes + n), "damaged");
    for (int64_t i = 0; i < bytes; i++) {
        longer[i] = (unsigned char)(image[i] ^ (1 << i % 8));
        check_refused(path, longer, (size_t)bytes, "");
        longer[i] = image[i];
    }
    const char text[] = "this is a text of another program, and longer than a head of a checkpoint would be";
    check_refused(path, (const unsigned char *)text, sizeof text, "not a checkpoint");
    free(longer);
    free(image);
    remove(path);
}

/* The same for an unchecked image in memory: reads stay within its bytes, and the reasons are the same. */
TEST(images_are_refused_within_their_bytes) {
    saved_run run, before;
    unsigned char *image;
    saved_run_init(&run, 1);
    saved_run_init(&before, 1);
    checkpoint_save(in_folder("point"), &run.c);
    const int64_t bytes = read_file(in_folder("point"), &image);
    for (int64_t n = 0; n <= bytes + 1; n++) {
        unsigned char *part = TAKE(unsigned char, n);
        char why[CHECKPOINT_WHY] = "";
        memcpy(part, image, (size_t)min_of(n, bytes));
        CHECK_INT(checkpoint_take(part, n, &run.c, why), n == bytes);
        CHECK(strstr(why, n < 48 ? "not a checkpoint" : n < bytes ? "truncated" : n > bytes ? "damaged" : "") != NULL);
        free(part);
    }
    CHECK(memcmp(run.arrays, before.arrays, sizeof run.arrays) == 0);
    free(image);
    remove(in_folder("point"));
    CHECK(open_lock(in_folder("none/lock")) < 0 && errno == ENOENT);
    CHECK(open_lock(folder) < 0 && errno == EISDIR);
}

/* A sparse file may be larger than all memory: its beginning is enough to refuse it. */
TEST(checkpoint_of_many_terabytes_is_refused) {
    saved_run run;
    char path[256], why[CHECKPOINT_WHY];
    snprintf(path, sizeof path, "%s", in_folder("hole"));
    for (int text = 0; text < 2; text++) {
        saved_run_init(&run, 1);
        checkpoint_save(path, &run.c);
        if (text) write_file(path, (const unsigned char *)"a text", 6);
        if (truncate(path, (off_t)1 << 43) != 0) SKIP("no such large files here");
        CHECK_INT(checkpoint_load(path, &run.c, why), -1);
        CHECK(strstr(why, text ? "not a checkpoint" : "damaged: 8796093022208 bytes") != NULL);
        remove(path);
    }
}

TEST(checkpoint_of_another_run_is_refused) {
    saved_run run;
    char path[256];
    int64_t bytes;
    unsigned char *image;
    snprintf(path, sizeof path, "%s", in_folder("point"));
    for (int what = 0; what < 6; what++) {
        static const char *const reasons[] = {"its layers is 3, that of this run is 2", "its lr is 0.25",
                                              "another version", "another version", "another version",
                                              "4 parameters, this run 5"};
        saved_run_init(&run, 1);
        if (what == 0) run.settings[0] = setting_int("layers", 3);
        if (what == 1) run.settings[1] = setting_double("lr", 0.25);
        if (what == 2) run.settings[2] = setting_int("other", -5);
        if (what == 3) run.c.n_settings = 2;
        if (what == 4) run.c.n_progress = 1;
        if (what == 5) run.c.count = 4;
        checkpoint_save(path, &run.c);
        bytes = read_file(path, &image);
        check_refused(path, image, (size_t)bytes, reasons[what]);
        free(image);
    }
    remove(path);
}

SUITE(trainer, CASE(models_are_refused_by_what_is_wrong),
      CASE(errors_of_the_library_come_back), CASE(the_check_tells_right_from_wrong),
      CASE(long_files_are_whole_and_documents_differ), CASE(directories_may_be_deep_but_not_endless),
      CASE(exit_statuses_say_whose_fault_it_is),
      CASE(token_files_are_as_described), CASE(token_files_that_make_no_sense_are_refused),
      CASE(options_set_what_they_name), CASE(options_with_words_and_lists), CASE(what_cannot_be_printed_is_no_success), CASE(comparator_rejects_what_is_not_a_number), CASE(comparator_sees_small_and_stale_differences),
      CASE(any_chunking_gives_the_same_gradients), CASE(nothing_stale_is_read_and_runs_repeat_bit_by_bit),
      CASE(k_changes_no_bit), CASE(a_stage_runs_the_head_once_a_chunk),
      CASE(a_runner_grows_from_batch_to_batch), CASE(a_stream_changes_no_bit), CASE(a_stream_sends_what_is_needed_and_no_more), CASE(the_ring_shows_a_wrong_order),
      CASE(memory_is_what_it_should_be), CASE(the_meter_counts_what_is_taken),
      CASE(angles_are_put_in_their_places), CASE(nothing_is_shared_unasked),
      CASE(a_batch_without_targets_has_no_loss_and_no_gradient), CASE(what_is_freed_is_empty), CASE(checkpoint_that_cannot_be_written), CASE(checkpoint_that_cannot_be_used_ends_the_program), CASE(checkpoint_comes_back_whole),
      CASE(checkpoint_names_and_files_belong_together), CASE(documents_that_begin_alike_are_checked),
      CASE(checkpoint_is_on_the_disk_or_the_old_one_is), CASE(checkpoint_is_finished_before_a_signal_comes),
      CASE(checkpoint_is_locked_where_its_link_leads_now),
      CASE(checkpoint_has_its_permissions_and_a_name_of_its_own), CASE(checkpoint_piece_by_piece),
      CASE(checkpoint_damaged_anywhere_is_refused), CASE(images_are_refused_within_their_bytes), CASE(checkpoint_of_many_terabytes_is_refused),
      CASE(checkpoint_of_another_run_is_refused));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer};
    const char *build = getenv("BUILD");
    snprintf(folder, sizeof folder, "%s/test_trainer.XXXXXX", build && *build ? build : "build");
    if (!mkdtemp(folder)) {
        perror(folder);
        return 1;
    }
    int code = harness_main(argc, argv, suites, 1);
    rmdir(folder);
    return code;
}
