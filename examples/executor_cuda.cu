/* executor_cuda.cu - a decoder divided into stages and trained chunk by chunk on GPUs - MIT or public domain

       nvcc -O3 -std=c++17 -arch=native examples/executor_cuda.cu chunkflow_cuda.cu -lcublas -o executor_cuda
       ./executor_cuda --stages 2 --schedule 1f1b --k 2 docs/        trains; --devices 2: a device a stage
       ./executor_cuda --check --type fp32 --chunk-size 128 --synthetic 900,40,300    against unchunked gradients
       ./executor_cuda --ranks 4                                     a process a stage: -DCHUNKFLOW_NCCL, -lnccl

   A trainer uses the executor in four places:
       executor_make    once: bytes that each stage needs for a token, the two callbacks, streams and devices
       load_batch       for each batch: pack, schedule, load; nothing is allocated after that
       on_forward, on_backward    put one pass of one chunk on a stream (model_cuda.h)
       train_step       runs the batch; what must come before or after it goes on the same streams

   The model is in model_cuda.h, --check in check_cuda.h; documents, batches and options are those of train_cpu.c. */

#define _POSIX_C_SOURCE 200809L
#define OWN_END_PROGRAM
#define TRAIN_FLOAT64 /* weights on the host, and model.h's gradients for --check, are doubles */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"

#include "arguments.h"
#include "check_cuda.h"
#include "optimizer.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifdef CHUNKFLOW_NCCL
#include <nccl.h>
#else
typedef struct ncclUniqueId {
    char internal[1];
} ncclUniqueId;
#endif

#define MUST_NCCL(call)                                                                                       \
    do {                                                                                                      \
        ncclResult_t status_ = (call);                                                                        \
        if (status_ != ncclSuccess && status_ != ncclInProgress)                                              \
            fail(EXIT_CHECK_FAILED, "%s: %s", #call, ncclGetErrorString(status_));                            \
    } while (0)

static int rank_of_process = -1; /* -1: there is only one */

static void end_program(int exit_code, const char *why) {
    fflush(stdout);
    if (rank_of_process >= 0) fprintf(stderr, "executor_cuda: rank %d: %s\n", rank_of_process, why);
    else fprintf(stderr, "executor_cuda: %s\n", why);
    exit(exit_code);
}

/* ================================================================================================================
   >>settings
   ================================================================================================================ */

typedef struct settings {
    model_config model;
    optimizer_config optimizer;
    cf_pack_desc packing;
    cf_schedule_desc order;
    cf_dtype type;
    cf_attention_path path;
    int64_t devices, ranks, batch, prompt, longest, seed;
    int64_t window;          /* keys that a query sees; 0: all */
    int64_t stream;          /* bytes of the ring for states in host memory; 0: they are on the device */
    int64_t stream_rows;     /* of a block of it */
    int outputs;             /* replays do not attend: cf_executor_desc.outputs */
    length_list synthetic;
    length_list with, shared; /* prefixes of synthetic documents: see share_documents */
    const char **paths;
    int64_t n_paths;
    const char *plan, *timeline;
    int check, reference, blocking, help;
} settings;

static int64_t list_settings(settings *s, option list[MAX_OPTIONS]) {
    const option all[] = {
        {"layers", INTEGER, &s->model.layers, 1, MANY, NULL, "layers, at least one for each (virtual) stage"},
        {"hidden", INTEGER, &s->model.hidden, 1, MANY, NULL, "width of the residual stream"},
        {"heads", INTEGER, &s->model.heads, 1, MANY, NULL, "query heads"},
        {"kv-heads", INTEGER, &s->model.kv_heads, 1, MANY, NULL, "key and value heads"},
        {"ffn", INTEGER, &s->model.ffn, 1, MANY, NULL, "width of the feed-forward part"},
        {"type", CHOICE, &s->type, 0, 0, "bf16 fp16 fp32", "of weights and activations"},
        {"attention", CHOICE, &s->path, 0, 0, "unfused mma wgmma",
         "path of attention; default: the last of these that can do it"},
        {"chunk-size", INTEGER, &s->packing.chunk_size, 1, CF_MAX_CHUNK_SIZE, NULL, "most tokens of a chunk"},
        {"split", CHOICE, &s->packing.split, 0, 0, "full even cost", "how to cut long sequences"},
        {"no-tails", FLAG, &s->packing.no_tails, 0, 0, NULL, "no hybrid chunks: a chain's last chunk stays alone"},
        {"align", INTEGER, &s->packing.align, 1, CF_MAX_CHUNK_SIZE, NULL, "slices start at multiples of this"},
        {"k", INTEGER, &s->order.shape.k, 1, MANY, NULL, "chunks of a chain that keep their activations at once"},
        {"schedule", CHOICE, &s->order.kind, 0, 0, "paper gpipe 1f1b interleaved zero-bubble best", "which schedule"},
        {"replay", CHOICE, &s->order.shape.replay, 0, 0, "pipeline local", "how dropped activations come back"},
        {"stages", INTEGER, &s->order.shape.n_stages, 1, CF_MAX_STAGES, NULL, "stages of the pipeline"},
        {"virtual", INTEGER, &s->order.shape.n_virtual, 0, CF_MAX_STAGES, NULL,
         "parts of the model a stage, 0: as is usual"},
        {"placement", CHOICE, &s->order.shape.placement, 0, 0, "loop v",
         "in which order those parts lie on the stages"},
        {"limit", INTEGER, &s->order.limits.chunks, 0, MANY, NULL,
         "most chunks that a stage keeps at once, 0: the default"},
        {"split-backward", FLAG, &s->order.split_backward, 0, 0, NULL, "best may cut backward into I and W"},
        {"stream", INTEGER, &s->stream, 0, MANY, NULL, "bytes of a ring for states in host memory, 0: they stay"},
        {"outputs", CHOICE, &s->outputs, 0, 0, "gpu host", "replays take attention's outputs from there and attend not"},
        {"window", INTEGER, &s->window, 0, MANY, NULL, "keys that a query sees, its own included, 0: all before it"},
        {"devices", INTEGER, &s->devices, 1, 1024, NULL, "devices that the stages are spread over"},
        {"ranks", INTEGER, &s->ranks, 0, 1024, NULL, "processes, one for each stage, over NCCL; 0: one for all"},
        {"synthetic", LENGTHS, &s->synthetic, 0, 0, NULL, "LEN,LEN,...: one batch of made-up documents"},
        {"with", LENGTHS, &s->with, 0, 0, NULL, WITH_HELP},
        {"shared", LENGTHS, &s->shared, 0, 0, NULL, SHARED_HELP},
        {"batch", INTEGER, &s->batch, 1, 1e6, NULL, "documents of a training step"},
        {"max-length", INTEGER, &s->longest, 0, MANY, NULL, "cut longer files at blank lines to this, 0: never"},
        {"prompt", INTEGER, &s->prompt, 0, MANY, NULL, "first tokens of each document that are no targets"},
        {"steps", INTEGER, &s->optimizer.steps, 1, MANY, NULL, "training steps"},
        {"lr", NUMBER, &s->optimizer.learning_rate, 0, MANY, NULL, "Adam's learning rate after the warm-up"},
        {"warmup", INTEGER, &s->optimizer.warmup, 0, MANY, NULL, "steps of the warm-up"},
        {"seed", INTEGER, &s->seed, 0, MANY, NULL, "of weights and data order"},
        {"check", FLAG, &s->check, 0, 0, NULL, "compare the first batch's gradients with unchunked ones, and end"},
        {"reference", FLAG, &s->reference, 0, 0, NULL, "with --check: also with float64 ones from the CPU"},
        {"timeline", TEXT, &s->timeline, 0, 0, NULL, "write the last batch's measured schedule (JSON)"},
        {"plan", TEXT, &s->plan, 0, 0, NULL, "write its plan (JSON)"},
        {"blocking", FLAG, &s->blocking, 0, 0, NULL, "wait after every action: finds the one that a device fails at"},
        {"help", FLAG, &s->help, 0, 0, NULL, "this"},
    };
    memcpy(list, all, sizeof all);
    return (int64_t)(sizeof all / sizeof all[0]);
}

static cf_attention_desc attention_of(const settings *s, int deterministic) {
    cf_attention_desc a = attention_desc_of(&s->model, s->type, s->path, deterministic);
    a.window = s->window;
    return a;
}

static settings parse_settings(int argc, char **argv) {
    settings s;
    option list[MAX_OPTIONS];
    memset(&s, 0, sizeof s);
    s.model = {VOCABULARY, 4, 512, 8, 4, 1408, 1, 0, 1e6, 1e-6};
    s.optimizer = {1e-3, 0.1, 5, 20, 0.9, 0.95, 1e-8, 0, 0};
    s.type = CF_DTYPE_BF16;
    s.packing.chunk_size = 1024;
    s.order.shape.k = s.order.shape.n_stages = s.devices = s.seed = 1;
    s.batch = 8;
    s.longest = 16384;
    s.paths = TAKE(const char *, argc);
    const int64_t n = list_settings(&s, list);
    if (argc == 2 && strcmp(argv[1], "--help") == 0) s.help = 1;
    else s.n_paths = parse_arguments(argc, argv, list, n, s.paths);
    if (s.help) {
        printf("usage: executor_cuda [options] [FILE|DIRECTORY ...]\n"
               "Trains a small byte-level decoder on one or more devices, cut into stages, chunk by chunk.\n\n");
        print_options(list, n);
        printf("\nExit status: 0 done, 1 a check or a device failed, 2 an option or file was not usable.\n");
        return s;
    }
    const char *fault = model_config_fault(&s.model);
    if (fault) fail(EXIT_BAD_INPUT, "%s", fault);
    s.stream_rows = block_rows_of(&s.model, s.type, s.stream);
    if (s.reference && !s.check) fail(EXIT_BAD_INPUT, "--reference is for --check");
    if (s.reference && s.window > 0) fail(EXIT_BAD_INPUT, "--reference knows no --window");
    if (s.synthetic.count > 0 && s.n_paths > 0) fail(EXIT_BAD_INPUT, "give --synthetic or files, not both");
    share_documents(&s.packing, &s.synthetic, &s.with, &s.shared);
    if (s.longest > 0 && s.longest < 3) fail(EXIT_BAD_INPUT, "--max-length must be 0 or at least 3");
    if (s.ranks > 0 && s.order.shape.n_stages > 1 && s.order.shape.n_stages != s.ranks)
        fail(EXIT_BAD_INPUT, "--ranks %lld wants as many stages", (long long)s.ranks);
    if (s.ranks > 0) s.order.shape.n_stages = s.ranks;
    s.order.shape.outputs = s.outputs > 0;
    s.order = cf_schedule_defaults(&s.order);
    if (s.model.layers / s.order.shape.n_stages < s.order.shape.n_virtual)
        fail(EXIT_BAD_INPUT, "%lld stages x %lld virtual ones want as many layers, the model has %lld",
             (long long)s.order.shape.n_stages, (long long)s.order.shape.n_virtual, (long long)s.model.layers);
    if (s.synthetic.count == 0 && s.n_paths == 0) parse_lengths("synthetic", &s.synthetic, "3000,120,90,533,64,1700,300,45,11");
    return s;
}

/* ================================================================================================================
   >>executor
   ================================================================================================================ */

typedef struct trainer {
    const struct settings *settings;
    int64_t n_stages, n_parts; /* stages, virtual stages */
    int rank;                  /* the stage that this process runs; -1: all */
    int *devices;              /* (n_stages) */
    cublasHandle_t *cublas;    /* (n_stages) */
    part *parts;               /* (n_parts); all zero if another process has the part */
    cf_cuda_stage *needs;      /* (n_parts) */
    struct weights weights;    /* initial values of the parts */
    cf_executor *executor;
    struct ncclComm *nccl;

    struct documents documents;
    data_order order;
    struct batch batch;        /* loaded, like everything below */
    cf_plan *plan;
    cf_schedule *schedule;
    cf_token_rows rows;        /* of all chunks, on the host ... */
    void *row_memory;          /* ... where they lie */
} trainer;

static int runs_here(const trainer *t, int64_t stage_index) { return t->rank < 0 || t->rank == stage_index; }
static part *part_here(const trainer *t, int64_t v) { return t->parts[v].config ? &t->parts[v] : NULL; }
static int64_t stage_of_part(const trainer *t, int64_t v) {
    return cf_placement_stage(t->settings->order.shape.placement, t->n_stages, v);
}
static cudaStream_t stream_of(const trainer *t, int64_t v) {
    return cf_executor_stream(t->executor, stage_of_part(t, v));
}

/* The callbacks; the step says which part of the model to run. */
template <typename T> static int on_forward(void *user, const cf_cuda_step *step) {
    return part_forward<T>(&((trainer *)user)->parts[step->step->action.stage], step);
}

template <typename T> static int on_backward(void *user, const cf_cuda_step *step) {
    return part_backward<T>(&((trainer *)user)->parts[step->step->action.stage], step);
}

/* slots: blocks of the ring, if the state streams. */
template <typename T> static void executor_make(trainer *t, int64_t slots) {
    const settings *s = t->settings;
    cf_executor_desc desc;
    cf_error error;
    memset(&desc, 0, sizeof desc);
    memset(&error, 0, sizeof error);
    desc.user = t;
    desc.forward = on_forward<T>;
    desc.backward = on_backward<T>;
    desc.n_stages = t->n_stages;
    desc.n_virtual = s->order.shape.n_virtual;
    desc.stages = t->needs;
    desc.devices = t->devices;
    desc.attention = attention_of(s, 1);
    desc.boundary_bytes_per_token = s->model.hidden * (int64_t)sizeof(T);
    desc.state_block_rows = s->stream_rows;
    desc.state_slots = slots;
    desc.outputs = s->outputs;
    desc.timeline = s->timeline != NULL;
    desc.blocking = s->blocking;
    desc.seed = (uint64_t)s->seed;
    desc.nccl = t->nccl;
    const cf_result result = cf_executor_create(&desc, &t->executor, &error);
    if (result != CF_OK) fail(exit_code_of(result), "%s", error.text);
    for (int64_t stage_index = 0; stage_index < t->n_stages; stage_index++) {
        if (!runs_here(t, stage_index)) continue;
        MUST_CUDA(cudaSetDevice(t->devices[stage_index]));
        MUST_CUBLAS(cublasSetStream(t->cublas[stage_index], cf_executor_stream(t->executor, stage_index)));
    }
}

/* Fills in tokens, targets and weights of the plan's chunks. A shared token counts for every sequence that has it. */
static void fill_rows(trainer *t) {
    double *ones = TAKE(double, t->batch.count);
    cf_metadata_desc desc;
    size_t bytes = 0;
    memset(&desc, 0, sizeof desc);
    desc.ignored = t->batch.ignored;
    desc.weights = ones;
    for (int64_t i = 0; i < t->batch.count; i++) ones[i] = 1;
    free(t->row_memory);
    MUST(cf_token_rows_size(t->plan, &desc, &bytes, &error));
    t->row_memory = take_memory((int64_t)bytes, 1);
    MUST(cf_token_rows_fill(t->plan, &desc, (const void *const *)t->batch.tokens, sizeof **t->batch.tokens,
                            t->row_memory, bytes, &t->rows, &error));
    free(ones);
}

/* Uploads tokens for the first stage and targets for the last one. */
static void upload_rows(trainer *t) {
    const cf_token_rows &r = t->rows;
    for (int64_t v = 0; v < t->n_parts; v++) {
        part *p = part_here(t, v);
        if (!p) continue;
        MUST_CUDA(cudaSetDevice(p->device));
        p->first_row = r.first_row;
        if (p->range.has_embedding) replace_on_device(&p->tokens, r.tokens, r.n_rows);
        if (!p->range.has_head) continue;
        replace_on_device(&p->first_target, r.first_target, r.n_rows + 1);
        replace_on_device(&p->targets, r.targets, r.n_targets);
        replace_on_device(&p->target_weights, r.weights, r.n_targets);
        replace_on_device<float>(&p->loss, NULL, r.n_rows);
    }
}

/* Packs, schedules and loads the next batch. Every process does the same, so all have the same plan and schedule. */
static void load_batch(trainer *t) {
    const settings *s = t->settings;
    cf_plan *old_plan = t->plan; /* the executor uses these until the next load */
    cf_schedule *old_schedule = t->schedule;
    batch_free(&t->batch);
    t->batch = batch_new(s->synthetic.count > 0 ? t->documents.count : s->batch);
    for (int64_t i = 0; i < t->batch.count; i++)
        batch_put(&t->batch, i, &t->documents, s->synthetic.count > 0 ? i : data_order_next(&t->order), s->prompt, 0);
    if (t->batch.n_targets == 0) fail(EXIT_BAD_INPUT, "the batch has no target tokens, so there is nothing to learn");
    MUST(cf_pack(t->batch.length, t->batch.count, &s->packing, &t->plan, &error));
    MUST(cf_schedule_make(t->plan, &s->order, &t->schedule, &error));
    fill_rows(t);
    upload_rows(t);
    MUST(cf_executor_load(t->executor, t->plan, t->schedule, &error));
    cf_schedule_free(old_schedule);
    cf_plan_free(old_plan);
}

/* Computes loss (the mean over the targets) and gradients (sums over them) of the loaded batch. The loss is 0 if
   another process has the head. */
static double run_batch(trainer *t) {
    cf_error error;
    double loss = 0;
    memset(&error, 0, sizeof error);
    for (int64_t v = 0; v < t->n_parts; v++) {
        const part *p = part_here(t, v);
        if (!p) continue;
        MUST_CUDA(cudaSetDevice(p->device));
        MUST_CUDA(cudaMemsetAsync(p->gradient, 0, (size_t)p->at.count * sizeof(float), stream_of(t, v)));
    }
    const cf_result result = cf_executor_run(t->executor, &error);
    if (result != CF_OK) fail(exit_code_of(result), "%s", error.text);
    const part *last = part_here(t, t->n_parts - 1);
    if (!last) return 0;
    MUST_CUDA(cudaSetDevice(last->device));
    float *losses = download(last->loss, t->rows.n_rows);
    for (int64_t row = 0; row < t->rows.n_rows; row++) loss += (double)losses[row];
    free(losses);
    return loss * batch_loss_weight(&t->batch);
}

/* Runs Adam on the stages' streams, which order it before the next batch. */
template <typename T> static void update_weights(trainer *t, int64_t step) {
    const optimizer_config *c = &t->settings->optimizer;
    const double n = (double)(step + 1);
    const adam_numbers numbers = {(float)learning_rate_at(c, step), (float)c->beta1, (float)c->beta2, (float)c->epsilon,
                                  (float)(1 / (1 - pow(c->beta1, n))), (float)(1 / (1 - pow(c->beta2, n))),
                                  (float)batch_loss_weight(&t->batch)};
    for (int64_t v = 0; v < t->n_parts; v++) {
        const part *p = part_here(t, v);
        if (!p) continue;
        MUST_CUDA(cudaSetDevice(p->device));
        MUST_CUDA(launch(adam_kernel<T>, (p->at.count + 255) / 256, dim3(256), stream_of(t, v), p->at.count,
                         (T *)p->parameters, p->master, p->first, p->second, (const float *)p->gradient, numbers));
    }
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

template <typename T> static void train_step(trainer *t, int64_t step) {
    const double begin = seconds_now();
    load_batch(t);
    const double loss = run_batch(t);
    update_weights<T>(t, step);
    if (!part_here(t, t->n_parts - 1)) return;
    printf("step %4lld/%lld  loss %.4f  %3lld chunks  %.0f tokens/s\n", (long long)step + 1,
           (long long)t->settings->optimizer.steps, loss, (long long)t->plan->n_chunks,
           (double)t->plan->n_tokens / (seconds_now() - begin));
    fflush(stdout);
    if (!(loss - loss == 0)) fail(EXIT_CHECK_FAILED, "the loss is not a finite number; try a smaller --lr");
}

/* ================================================================================================================
   >>reports
   ================================================================================================================ */

static double mebibytes(int64_t bytes) { return (double)bytes / 1048576.0; }

static void print_memory(const trainer *t) {
    cf_executor_memory *all = TAKE(cf_executor_memory, t->n_stages);
    MUST(cf_executor_memory_of(t->executor, NULL, NULL, all, &error));
    for (int64_t stage_index = 0; stage_index < t->n_stages; stage_index++) {
        const cf_executor_memory &m = all[stage_index];
        if (!runs_here(t, stage_index)) continue;
        printf("stage %lld on device %d: %.3f MiB = activations and boundaries %.3f (in use %.3f), state %.3f, its "
               "gradient in chains %.3f, workspace %.3f, metadata %.3f; host %.3f; %lld chunks kept at most\n",
               (long long)stage_index, t->devices[stage_index], mebibytes(m.total), mebibytes(m.arena),
               mebibytes(m.arena_live), mebibytes(m.state), mebibytes(m.gradient), mebibytes(m.workspace),
               mebibytes(m.metadata), mebibytes(m.host), (long long)m.n_slots);
    }
    free(all);
    fflush(stdout);
}

static int write_text(const char *text, size_t bytes, void *file) {
    return fwrite(text, 1, bytes, (FILE *)file) == bytes ? 0 : 1;
}

static FILE *open_to_write(const char *path) {
    FILE *file = fopen(path, "w");
    if (!file) fail(EXIT_CHECK_FAILED, "%s: %s", path, strerror(errno));
    return file;
}

static void close_written(FILE *file, const char *path) {
    if (fclose(file) != 0) fail(EXIT_CHECK_FAILED, "%s: %s", path, strerror(errno));
}

/* All processes make the timeline; the first one writes it. */
static void write_files(const trainer *t) {
    const settings *s = t->settings;
    cf_timeline *timeline = NULL;
    if (s->timeline) MUST(cf_executor_timeline(t->executor, NULL, &timeline, &error));
    if (s->timeline && t->rank <= 0) {
        FILE *file = open_to_write(s->timeline);
        MUST(cf_write_schedule_json(cf_executor_schedule(t->executor), timeline, write_text, file, &error));
        close_written(file, s->timeline);
        printf("measured: makespan %.3f ms, bubble %.1f %%\n", 1e3 * timeline->makespan, 100 * timeline->bubble_busy);
    }
    if (s->plan && t->rank <= 0) {
        FILE *file = open_to_write(s->plan);
        MUST(cf_write_plan_json(t->plan, NULL, write_text, file, &error));
        close_written(file, s->plan);
    }
    cf_timeline_free(timeline);
}

static int64_t count_passes(const cf_schedule *schedule, int kind) {
    int64_t n = 0;
    for (int64_t i = 0; i < schedule->n_actions; i++) n += schedule->actions[i].pass == kind;
    return n;
}

/* Returns the allowed difference of gradients, relative to each tensor's length as a vector.

   fp32: chunks only change the order of sums. With unit roundoff 6e-8, sums of n tokens in another order differ by
   about sqrt(n) of it, through all layers: 1e-5 leaves room for several thousand tokens.

   16 bits: such a difference moves some activations to a neighbouring number, 2^-8 (bf16) or 2^-11 (fp16) away; two of
   those if all moved.

   rounded_anew: against float64 every activation is off by that much, and each layer adds its dozen. So is it with a
   state that streams, because attention that takes its keys in another order rounds every probability relative to
   another maximum. */
static double limit_of(cf_dtype type, int rounded_anew) {
    if (type == CF_DTYPE_FP32) return 1e-5;
    return (type == CF_DTYPE_FP16 ? 1.0 / 2048 : 1.0 / 256) * (rounded_anew ? 12 : 2);
}

/* Runs the loaded batch and downloads the gradients. Returns the loss. */
static double run_and_download(trainer *t, const weights *gradient) {
    const double loss = run_batch(t);
    for (int64_t v = 0; v < t->n_parts; v++)
        if (part_here(t, v)) download_gradient(part_here(t, v), gradient, &t->batch);
    return loss;
}

/* Checks that the same blocks in rings of other lengths give the same bits. */
template <typename T>
static int check_rings(trainer *t, const weights *own, const weights *again, const char *owned, double loss) {
    int ok = 1;
    if (t->settings->stream == 0) return ok;
    for (const int64_t slots : {2, 8, CF_STATE_SLOTS}) {
        char what[64];
        (void)snprintf(what, sizeof what, "a ring of %lld blocks, bit by bit:", (long long)slots);
        cf_executor_free(t->executor);
        t->executor = NULL;
        executor_make<T>(t, slots);
        MUST(cf_executor_load(t->executor, t->plan, t->schedule, &error));
        const double other = run_and_download(t, again);
        ok &= compare_gradients(what, again, own, owned, other, loss, 0);
    }
    return ok;
}

/* Loads a batch, runs it twice and compares the bits; then compares with unchunked gradients. */
template <typename T> static int check_batch(trainer *t) {
    static const char *const types[] = {"", "bf16", "fp16", "fp32"};
    const settings *s = t->settings;
    const int has_loss = part_here(t, t->n_parts - 1) != NULL;
    weights *w = &t->weights, own = weights_new(&s->model), again = weights_new(&s->model);
    weights other = weights_new(&s->model);
    char *owned = TAKE(char, w->n_tensors);
    piece *pieces = TAKE(piece, w->n_tensors);
    for (int64_t v = 0; v < t->n_parts; v++)
        for (int64_t i = part_here(t, v) ? list_pieces(part_here(t, v), pieces) - 1 : -1; i >= 0; i--)
            owned[pieces[i].tensor] = 1;
    load_batch(t);
    double losses[2];
    losses[0] = run_and_download(t, &own);
    losses[1] = run_and_download(t, &again);
    cf_plan_stats stats;
    cf_plan_measure(t->plan, NULL, &stats);
    printf("check %s: %lld sequences, %lld tokens in %lld chunks of %lld (%lld hybrid), longest chain %lld, K %lld; "
           "%s, %lld stages x %lld (%s); %lld replays, %lld split backwards\n",
           types[s->type], (long long)t->batch.count, (long long)t->batch.n_tokens, (long long)t->plan->n_chunks,
           (long long)s->packing.chunk_size, (long long)stats.n_hybrid, (long long)stats.longest_chain,
           (long long)s->order.shape.k, cf_schedule_kind_name(t->schedule->kind), (long long)t->n_stages,
           (long long)s->order.shape.n_virtual, cf_placement_name(t->schedule->shape.placement),
           (long long)count_passes(t->schedule, CF_R), (long long)count_passes(t->schedule, CF_W));
    int ok = compare_gradients("a second run, bit by bit:", &again, &own, owned, losses[1], losses[0], 0);
    ok &= check_rings<T>(t, &own, &again, owned, losses[0]);
    const int device = t->devices[max_of(t->rank, 0)];
    cf_attention_desc attention = attention_of(s, 1);
    double loss = unchunked_on_device<T>(&s->model, w, &other, &t->batch, device, &attention);
    if (!has_loss) losses[0] = loss;
    ok &= compare_gradients("unchunked, without the executor:", &own, &other, owned, losses[0], loss,
                            limit_of(s->type, s->stream > 0 || s->with.count > 0));
    if (s->type != CF_DTYPE_FP32 && s->path != CF_ATTENTION_UNFUSED) { /* tests the other kernel for dq */
        attention = attention_of(s, 0);
        loss = unchunked_on_device<T>(&s->model, w, &other, &t->batch, device, &attention);
        ok &= compare_gradients("unchunked, dq by atomic sums:", &own, &other, owned, losses[0], loss,
                                limit_of(s->type, s->stream > 0 || s->with.count > 0));
    }
    if (s->reference) {
        memory_meter meter;
        memset(&meter, 0, sizeof meter);
        weights_clear(&other);
        loss = unchunked_gradients(&s->model, w, &other, &t->batch, 0, &meter);
        if (!has_loss) losses[0] = loss;
        ok &= compare_gradients("float64 on the CPU:", &own, &other, owned, losses[0], loss, limit_of(s->type, 1));
    }
    weights_free(&own);
    weights_free(&again);
    weights_free(&other);
    free(pieces);
    free(owned);
    return ok;
}

/* ================================================================================================================
   >>program
   ================================================================================================================ */

static void load_documents(trainer *t) {
    const settings *s = t->settings;
    for (int64_t i = 0; i < s->synthetic.count; i++)
        add_synthetic(&t->documents, s->synthetic.lengths[i], mix64_pair((uint64_t)s->seed, 1));
    copy_shared(t->documents.tokens, t->documents.first, s->packing.shared_prefixes, s->synthetic.count);
    for (int64_t i = 0; i < s->n_paths; i++) add_path(&t->documents, s->paths[i], s->longest);
    if (t->documents.count == 0) fail(EXIT_BAD_INPUT, "there is no file to train on");
    t->order = data_order_new(t->documents.count, mix64_pair((uint64_t)s->seed, 2), 0, 0);
}

template <typename T> static void trainer_begin(trainer *t) {
    const settings *s = t->settings;
    int n_devices = 0;
    int64_t longest = 1;
    MUST_CUDA(cudaGetDeviceCount(&n_devices));
    if (s->devices > n_devices)
        fail(EXIT_BAD_INPUT, "--devices %lld: there %s %d", (long long)s->devices, n_devices == 1 ? "is" : "are",
             n_devices);
    for (int64_t i = 0; i < t->documents.count; i++) longest = max_of(longest, document_length(&t->documents, i));
    t->n_stages = s->order.shape.n_stages;
    t->n_parts = t->n_stages * s->order.shape.n_virtual;
    t->devices = TAKE(int, t->n_stages);
    t->cublas = TAKE(cublasHandle_t, t->n_stages);
    t->parts = TAKE(part, t->n_parts);
    t->needs = TAKE(cf_cuda_stage, t->n_parts);
    t->weights = weights_new(&s->model);
    weights_init(&t->weights, &s->model, mix64_pair((uint64_t)s->seed, 3), s->check ? 0.1 : 0);
    for (int64_t i = 0; i < t->n_stages; i++) {
        t->devices[i] = (int)(s->ranks > 0 ? i % s->devices : i * s->devices / t->n_stages);
        if (!runs_here(t, i)) continue;
        MUST_CUDA(cudaSetDevice(t->devices[i]));
        MUST_CUBLAS(cublasCreate(&t->cublas[i]));
    }
    for (int64_t v = 0; v < t->n_parts; v++) {
        const int64_t stage_index = stage_of_part(t, v);
        const stage range = stage_of(&s->model, v, t->n_parts);
        part without_memory;
        memset(&without_memory, 0, sizeof without_memory);
        without_memory.config = &s->model;
        without_memory.range = range;
        t->needs[v] = stage_needs<T>(&without_memory);
        if (runs_here(t, stage_index))
            t->parts[v] = part_new<T>(&s->model, range, t->devices[stage_index], s->type, t->cublas[stage_index],
                                      &t->weights, longest);
    }
}

static void trainer_end(trainer *t) {
    cf_executor_free(t->executor);
    for (int64_t v = 0; v < t->n_parts; v++)
        if (part_here(t, v)) part_free(&t->parts[v]);
    for (int64_t i = 0; i < t->n_stages; i++)
        if (t->cublas[i]) MUST_CUBLAS(cublasDestroy(t->cublas[i]));
    cf_schedule_free(t->schedule);
    cf_plan_free(t->plan);
    free(t->row_memory);
    batch_free(&t->batch);
    data_order_free(&t->order);
    documents_free(&t->documents);
    weights_free(&t->weights);
    free(t->needs);
    free(t->parts);
    free(t->cublas);
    free(t->devices);
}

template <typename T> static int run(const settings *s, int rank, const ncclUniqueId *id) {
    trainer t;
    int ok = 1;
    memset(&t, 0, sizeof t);
    t.settings = s;
    t.rank = rank;
    load_documents(&t);
    trainer_begin<T>(&t);
#ifdef CHUNKFLOW_NCCL
    if (rank >= 0) {
        MUST_CUDA(cudaSetDevice(t.devices[rank]));
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.maxCTAs = CF_NCCL_CHANNELS;
        config.blocking = 0; /* so that a process that dies blocks no other */
        MUST_NCCL(ncclCommInitRankConfig(&t.nccl, (int)t.n_stages, *id, rank, &config));
    }
#else
    (void)id;
#endif
    executor_make<T>(&t, CF_STATE_SLOTS);
    if (s->check) ok = check_batch<T>(&t);
    for (int64_t step = 0; step < s->optimizer.steps && !s->check; step++) train_step<T>(&t, step);
    print_memory(&t);
    write_files(&t);
    trainer_end(&t);
#ifdef CHUNKFLOW_NCCL
    if (t.nccl) MUST_NCCL(ncclCommDestroy(t.nccl));
#endif
    return ok ? 0 : EXIT_CHECK_FAILED;
}

static int run_type(const settings *s, int rank, const ncclUniqueId *id) {
    if (s->type == CF_DTYPE_FP32) return run<float>(s, rank, id);
    return s->type == CF_DTYPE_FP16 ? run<__half>(s, rank, id) : run<__nv_bfloat16>(s, rank, id);
}

#ifdef CHUNKFLOW_NCCL
#define GRACE 10 /* seconds for the other processes to report, once one has failed */

/* Waits for all processes; kills those that do not end after another has failed. Returns the highest status. */
static int wait_for_ranks(const pid_t *children, int n) {
    int worst = 0, status = 0;
    double deadline = INFINITY;
    for (int left = n; left > 0;) {
        const pid_t ended = waitpid(-1, &status, WNOHANG);
        if (ended > 0) {
            const int code = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_CHECK_FAILED;
            if (code != 0 && worst == 0) deadline = seconds_now() + GRACE;
            worst = code > worst ? code : worst;
            left--;
        } else if (seconds_now() > deadline) {
            for (int i = 0; i < n; i++) kill(children[i], SIGKILL);
            deadline = INFINITY;
        } else {
            usleep(10000);
        }
    }
    return worst;
}

/* Forks a process for each stage before any CUDA call, because CUDA does not survive a fork. Each has a pipe for the
   communicator's id, which the first process sends. */
static int run_ranks(const settings *s) {
    const int n = (int)s->ranks;
    pid_t *children = TAKE(pid_t, n);
    int(*pipes)[2] = (int(*)[2])take_memory(n, sizeof *pipes), code = -1;
    for (int i = 0; i < n; i++)
        if (pipe(pipes[i]) != 0) fail(EXIT_CHECK_FAILED, "pipe: %s", strerror(errno));
    fflush(stdout);
    for (int i = 0; i < n && code < 0; i++) {
        children[i] = fork();
        if (children[i] < 0) fail(EXIT_CHECK_FAILED, "fork: %s", strerror(errno));
        if (children[i] > 0) continue;
        ncclUniqueId id;
        rank_of_process = i;
        if (i == 0) {
            MUST_NCCL(ncclGetUniqueId(&id));
            for (int other = 1; other < n; other++)
                if (write(pipes[other][1], &id, sizeof id) != (ssize_t)sizeof id)
                    fail(EXIT_CHECK_FAILED, "pipe: %s", strerror(errno));
        } else if (close(pipes[i][1]) != 0 || read(pipes[i][0], &id, sizeof id) != (ssize_t)sizeof id) {
            fail(EXIT_CHECK_FAILED, "rank 0 sent no NCCL id");
        }
        code = run_type(s, i, &id);
    }
    if (rank_of_process < 0) code = wait_for_ranks(children, n);
    free(pipes);
    free(children);
    return code;
}
#endif

int main(int argc, char **argv) {
    settings s = parse_settings(argc, argv);
    int code = 0;
#ifdef CHUNKFLOW_NCCL
    if (s.ranks > 0 && !s.help) code = run_ranks(&s);
#else
    if (s.ranks > 0) fail(EXIT_BAD_INPUT, "--ranks: this program was built without CHUNKFLOW_NCCL");
#endif
    if (s.ranks == 0 && !s.help) code = run_type(&s, -1, NULL);
    free(s.synthetic.lengths);
    free(s.with.lengths);
    free(s.shared.lengths);
    free((void *)s.packing.shared_prefixes);
    free((void *)s.paths);
    must_be_printed();
    return code;
}
