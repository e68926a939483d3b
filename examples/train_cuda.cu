/* train_cuda.cu - trains a Qwen2.5 decoder on one GPU, chunk by chunk - MIT or public domain

       make build/train_cuda
       build/train_cuda --model qwen2.5-1.5b --data docs.tokens --chunk-size 8192 --k 1
       build/train_cuda --load Qwen2.5-0.5B/ --data docs.tokens --save tuned/        Hugging Face's files in and out
       build/train_cuda --model qwen2.5-0.5b --synthetic 200,30000,9 --steps 5       random weights and tokens
       build/train_cuda --check --type fp32 --layers 2 --hidden 64 ...    against the CPU in float64, and unchunked

   The executor packs, schedules and runs every batch (executor_cuda.cu shows that step by step, with stages and ranks).
   The model is in decoder_cuda.h, its products in products_cuda.h, the data in tokens.h. Two other ways to train are
   settings here: --chunk-size 0 makes chunks as long as the longest document, so nothing is split (packing), and with
   --max-slices 1 each has one document. Speed and memory on an H200 are in tools/bench/results/h200.txt;
   tests/cuda/train_cuda_check.sh runs the program under the emulation. */

#define _XOPEN_SOURCE 700
#define OWN_END_PROGRAM
#define TRAIN_FLOAT64 /* model.h's gradients, for --check, are doubles */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION /* for its table of models */
#include "../tools/chunkflow_tune.h"

/* This program uses only parts of model_cuda.h and check_cuda.h. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wunneeded-internal-declaration"
#endif

#include "arguments.h"
#include "check_cuda.h"
#include "checkpoint.h"
#include "decoder_cuda.h"
#include "hf_model.h"
#include "optimizer.h"
#include "tokens.h"
#ifdef TRAIN_CUDNN
#include "cudnn_attention.h"
#endif

#include <signal.h>
#include <time.h>

static volatile sig_atomic_t stop_asked = 0;

static void ask_to_stop(int signal_number) {
    (void)signal_number;
    stop_asked = 1;
}

static void end_program(int exit_code, const char *why) {
    fflush(stdout);
    fprintf(stderr, "train_cuda: %s\n", why);
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
    cf_recompute recompute;
    cf_mean mean;
    int64_t chunk_size; /* 0: the longest document of the batch */
    int64_t stream, part_bytes, batch, loss_rows, seed, checkpoint_every, stop_after;
    double peak_tflops;
    length_list synthetic, with, shared; /* see share_documents */
    const char *model_name, *data, *lengths, *load, *save, *checkpoint, *times;
    hf_model *from;     /* what --load names */
    int outputs; /* as in cf_executor_desc */
    int check, memory_table, exact, headless, cudnn, help;
} settings;

static int64_t list_settings(settings *s, option list[MAX_OPTIONS]) {
    const option all[] = {
        {"model", TEXT, &s->model_name, 0, 0, NULL, "a model of the table; the sizes below change it"},
        {"load", TEXT, &s->load, 0, 0, NULL, "a Hugging Face folder: the model and its first weights"},
        {"save", TEXT, &s->save, 0, 0, NULL, "a folder for the weights at the end, in the same form"},
        {"part-bytes", INTEGER, &s->part_bytes, 1, 1e15, NULL, "most bytes of a file of weights that --save writes"},
        {"layers", INTEGER, &s->model.layers, 0, MANY, NULL, "layers; 0, here and below: the model's"},
        {"hidden", INTEGER, &s->model.hidden, 0, MANY, NULL, "width of the residual stream"},
        {"heads", INTEGER, &s->model.heads, 0, MANY, NULL, "query heads"},
        {"kv-heads", INTEGER, &s->model.kv_heads, 0, MANY, NULL, "key and value heads"},
        {"ffn", INTEGER, &s->model.ffn, 0, MANY, NULL, "width of the feed-forward part"},
        {"vocabulary", INTEGER, &s->model.vocabulary, 0, MANY, NULL, "tokens that there are"},
        {"sinks", FLAG, &s->model.kinds.pattern[0].sinks, 0, 0, NULL, "give each head's softmax a learnt term more"},
        {"untied", FLAG, &s->model.untied, 0, 0, NULL, "give the head a weight of its own"},
        {"type", CHOICE, &s->type, 0, 0, "bf16 fp16 fp32", "of parameters and activations; not fp16"},
        {"attention", CHOICE, &s->path, 0, 0, "unfused mma wgmma",
         "path of attention; default: the last of these that can do it"},
#ifdef TRAIN_CUDNN
        {"cudnn", FLAG, &s->cudnn, 0, 0, NULL, "cuDNN attends to chunks of one slice (cudnn_attention.h)"},
#endif
        {"recompute", CHOICE, &s->recompute, 0, 0, "none selective layernorm act mlp full",
         "none, or full: layers keep their input alone"},
        {"loss-rows", INTEGER, &s->loss_rows, 128, 1 << 20, NULL, "rows of logits at a time, a multiple of 128"},
        {"chunk-size", INTEGER, &s->chunk_size, 0, CF_MAX_CHUNK_SIZE, NULL, "most tokens of a chunk, 0: none is split"},
        {"max-slices", INTEGER, &s->packing.max_slices, 0, MANY, NULL, "most slices of a chunk, 0: any"},
        {"split", CHOICE, &s->packing.split, 0, 0, "full even cost", "how to cut long documents"},
        {"k", INTEGER, &s->order.shape.k, 1, MANY, NULL, "chunks of a chain that keep their activations at once"},
        {"data", TEXT, &s->data, 0, 0, NULL, "token file to train on (make_tokens writes such)"},
        {"lengths", TEXT, &s->lengths, 0, 0, NULL, "list of lengths: random documents, --batch of them each step"},
        {"synthetic", LENGTHS, &s->synthetic, 0, 0, NULL, "LEN,LEN,...: one batch of random documents, each step"},
        {"with", LENGTHS, &s->with, 0, 0, NULL, WITH_HELP},
        {"shared", LENGTHS, &s->shared, 0, 0, NULL, SHARED_HELP},
        {"batch", INTEGER, &s->batch, 1, 1e6, NULL, "documents of a training step"},
        {"mean", CHOICE, &s->mean, 0, 0, "tokens sequences", "what the loss is the mean of"},
        {"steps", INTEGER, &s->optimizer.steps, 0, MANY, NULL, "training steps of the whole run"},
        {"lr", NUMBER, &s->optimizer.learning_rate, 0, MANY, NULL, "learning rate after the warm-up"},
        {"warmup", INTEGER, &s->optimizer.warmup, 0, MANY, NULL, "steps of the warm-up"},
        {"weight-decay", NUMBER, &s->optimizer.weight_decay, 0, MANY, NULL, "AdamW's weight decay"},
        {"clip", NUMBER, &s->optimizer.clip, 0, MANY, NULL, "longest gradient, 0: any"},
        {"seed", INTEGER, &s->seed, 0, MANY, NULL, "of weights and data order"},
        {"peak-tflops", NUMBER, &s->peak_tflops, 0, MANY, NULL, "the device's, for the utilisation; 0: not printed"},
        {"checkpoint", TEXT, &s->checkpoint, 0, 0, NULL, "file to go on from, if it is there, and to write to"},
        {"checkpoint-every", INTEGER, &s->checkpoint_every, 1, MANY, NULL, "steps between two checkpoints"},
        {"stop-after", INTEGER, &s->stop_after, 0, MANY, NULL, "end after so many steps now, 0: when all are done"},
        {"memory-table", FLAG, &s->memory_table, 0, 0, NULL, "print device memory by term, of the last batch"},
        {"stream", INTEGER, &s->stream, 0, MANY, NULL, "bytes of a ring for states in host memory, 0: they stay"},
        {"outputs", CHOICE, &s->outputs, 0, 0, "gpu host", "replays take attention's outputs from there and attend not"},
        {"times", TEXT, &s->times, 0, 0, NULL, "file for what each pass took, which chunkflow time --fit reads"},
        {"headless", FLAG, &s->headless, 0, 0, NULL, "leave out head and loss: a stage's times, not training"},
        {"exact", FLAG, &s->exact, 0, 0, NULL, "the same bits in every run; print losses with all of theirs"},
        {"check", FLAG, &s->check, 0, 0, NULL, "compare one batch's gradients with the CPU's in float64, and end"},
        {"help", FLAG, &s->help, 0, 0, NULL, "this"},
    };
    memcpy(list, all, sizeof all);
    return (int64_t)(sizeof all / sizeof all[0]);
}

static void take_default(int64_t *member, int64_t value) {
    if (*member == 0) *member = value;
}

/* Sets sizes that no option has given, from the folder's model or from the model of this name. */
static void fill_model(settings *s) {
    model_config *c = &s->model, whole = *c;
    if (s->load) {
        hf_read_config(s->from, s->load, &whole);
    } else {
        const cf_model *named = cf_model_find(s->model_name);
        if (!named) fail(EXIT_BAD_INPUT, "--model %s: there is no such model", s->model_name);
        const char *fault = architecture_fault(named);
        if (fault) fail(EXIT_BAD_INPUT, "--model %s: %s", s->model_name, fault);
        model_from(&whole, named);
    }
    take_default(&c->layers, whole.layers);
    take_default(&c->hidden, whole.hidden);
    take_default(&c->heads, whole.heads);
    take_default(&c->kv_heads, whole.kv_heads);
    take_default(&c->ffn, whole.ffn);
    take_default(&c->vocabulary, whole.vocabulary);
    c->untied |= whole.untied;
    c->rope_theta = whole.rope_theta;
    c->norm_epsilon = whole.norm_epsilon;
    const char *fault = decoder_fault(c);
    if (fault) fail(EXIT_BAD_INPUT, "%s", fault);
}

static void print_help(settings *s, const option *list, int64_t n) {
    (void)s;
    printf("usage: train_cuda [options]\n"
           "Trains a decoder of the Qwen2.5 architecture on one device, chunk by chunk.\n\n");
    print_options(list, n);
    printf("\nExit status: 0 done, 1 a check or the device failed, 2 an option or file was not usable.\n");
}

static settings parse_settings(int argc, char **argv, hf_model *from) {
    settings s;
    option list[MAX_OPTIONS];
    memset(&s, 0, sizeof s);
    s.model.rope_theta = 1e6;
    s.model.norm_epsilon = 1e-6;
    s.model_name = "qwen2.5-0.5b";
    s.from = from;
    s.optimizer = {1e-4, 0.1, 10, 100, 0.9, 0.95, 1e-8, 0.1, 1};
    s.type = CF_DTYPE_BF16;
    s.recompute = CF_RECOMPUTE_NONE;
    s.chunk_size = 8192;
    s.loss_rows = 2048;
    s.part_bytes = 5000000000; /* Hugging Face's size */
    s.order.shape.k = s.seed = 1;
    s.checkpoint_every = 50;
    s.batch = 8;
    const int64_t n = list_settings(&s, list);
    parse_arguments(argc, argv, list, n, NULL);
    if (s.help) {
        print_help(&s, list, n);
        return s;
    }
    if (s.type == CF_DTYPE_FP16) fail(EXIT_BAD_INPUT, "--type: bf16 or fp32; fp16 would need its loss scaled");
    if (s.recompute != CF_RECOMPUTE_NONE && s.recompute != CF_RECOMPUTE_FULL)
        fail(EXIT_BAD_INPUT, "--recompute: none or full");
    if (s.stream > 0 && s.recompute == CF_RECOMPUTE_FULL)
        fail(EXIT_BAD_INPUT, "--stream: a backward walks through the state once, so --recompute must be none");
    s.model.kinds.n_pattern = s.model.kinds.pattern[0].sinks;
    if (s.model.kinds.n_pattern > 0 && (s.load || s.save))
        fail(EXIT_BAD_INPUT, "--sinks: the models of --load and --save have none");
    if (s.cudnn && s.type == CF_DTYPE_FP32) fail(EXIT_BAD_INPUT, "--cudnn: --type must be bf16");
    if (s.cudnn && s.model.kinds.n_pattern > 0) fail(EXIT_BAD_INPUT, "--cudnn: its attention has no --sinks");
    if (s.outputs > 0 && s.recompute == CF_RECOMPUTE_FULL)
        fail(EXIT_BAD_INPUT, "--outputs: full recomputation drops them again, so --recompute must be none");
    if (s.headless && (s.check || s.save || s.checkpoint))
        fail(EXIT_BAD_INPUT, "--headless learns nothing: it goes with none of --check, --save and --checkpoint");
    if (s.loss_rows % 128 != 0) fail(EXIT_BAD_INPUT, "--loss-rows must be a multiple of 128");
    const int sources = (s.synthetic.count > 0) + (s.data != NULL) + (s.lengths != NULL);
    if (sources > 1) fail(EXIT_BAD_INPUT, "give one of --data, --lengths and --synthetic");
    if (sources == 0 && s.optimizer.steps > 0)
        fail(EXIT_BAD_INPUT, "give --data FILE, --lengths FILE or --synthetic LEN,LEN,...");
    share_documents(&s.packing, &s.synthetic, &s.with, &s.shared);
    if (s.save && access(s.save, W_OK | X_OK) != 0) /* checked now, not only when training is done */
        fail(EXIT_BAD_INPUT, "--save %s: %s", s.save, strerror(errno));
    fill_model(&s);
    s.order = cf_schedule_defaults(&s.order);
    return s;
}

/* ================================================================================================================
   >>batch
   ================================================================================================================ */

typedef struct trainer {
    const struct settings *settings;
    int device;
    cublasHandle_t cublas;  /* for attention, if it is unfused */
#ifdef TRAIN_CUDNN
    cudnn_attention *cudnn;
#endif
    products lt;
    decoder model;
    cf_cuda_stage needs;
    cf_executor *executor;
    token_set data;
    data_order order;
    int64_t step;           /* done so far */
    double used[3];         /* bytes of the device in use: at the start, with the products', with the model */

    token_batch batch;      /* loaded, like everything below */
    cf_plan *plan;
    cf_schedule *schedule;
    cf_token_rows rows;     /* of all chunks, on the host ... */
    void *row_memory;       /* ... where they lie */
    int64_t *first_run;     /* (n_chunks + 1) */
} trainer;

/* The rows of each chunk by token, for the gradient of the embedding. */
typedef struct sorted_rows {
    int64_t n_runs;
    int32_t *rows;
    token_run *runs;
} sorted_rows;

static int compare_keys(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Sorts the rows of one chunk by token, then by row, and finds where each token's begin; padding is left out. */
static void sort_rows(sorted_rows *s, const int32_t *tokens, int64_t first, int64_t rows) {
    uint64_t *keys = TAKE(uint64_t, rows);
    int64_t n = 0;
    for (int64_t row = 0; row < rows; row++)
        if (tokens[first + row] >= 0) keys[n++] = (uint64_t)tokens[first + row] << 32 | (uint64_t)row;
    qsort(keys, (size_t)n, sizeof *keys, compare_keys);
    for (int64_t i = 0; i < n; i++) {
        const int32_t token = (int32_t)(keys[i] >> 32);
        s->rows[first + i] = (int32_t)(keys[i] & UINT32_MAX);
        if (i == 0 || token != (int32_t)(keys[i - 1] >> 32)) s->runs[s->n_runs++] = {token, (int32_t)i};
    }
    s->runs[s->n_runs++] = {-1, (int32_t)n};
    free(keys);
}

/* Fills in tokens, targets and weights of the plan's chunks. */
static void fill_rows(trainer *t) {
    cf_loss_weights_desc mean;
    cf_metadata_desc desc;
    size_t bytes = 0;
    double *of_sequences = TAKE(double, t->batch.count);
    memset(&mean, 0, sizeof mean);
    memset(&desc, 0, sizeof desc);
    mean.mean = t->settings->mean;
    mean.ignored = desc.ignored = t->batch.ignored;
    desc.weights = of_sequences;
    MUST(cf_loss_weights(t->batch.length, t->batch.count, &mean, of_sequences, &error));
    MUST(cf_token_rows_size(t->plan, &desc, &bytes, &error));
    t->row_memory = take_memory((int64_t)bytes, 1);
    MUST(cf_token_rows_fill(t->plan, &desc, (const void *const *)t->batch.tokens, sizeof **t->batch.tokens,
                            t->row_memory, bytes, &t->rows, &error));
    free(of_sequences);
}

static void upload_rows(trainer *t) {
    const cf_token_rows &r = t->rows;
    const int64_t n_chunks = t->plan->n_chunks;
    decoder *d = &t->model;
    sorted_rows sorted = {0, TAKE(int32_t, r.n_rows), TAKE(token_run, r.n_rows + n_chunks)};
    t->first_run = TAKE(int64_t, n_chunks + 1);
    for (int64_t i = 0; i < n_chunks; i++) {
        sort_rows(&sorted, r.tokens, r.first_row[i], r.first_row[i + 1] - r.first_row[i]);
        t->first_run[i + 1] = sorted.n_runs;
    }
    replace_on_device(&d->tokens, r.tokens, r.n_rows);
    replace_on_device(&d->first_target, r.first_target, r.n_rows + 1);
    replace_on_device(&d->targets, r.targets, r.n_targets);
    replace_on_device(&d->target_weights, r.weights, r.n_targets);
    replace_on_device(&d->sorted, sorted.rows, r.n_rows);
    replace_on_device(&d->runs, sorted.runs, sorted.n_runs);
    replace_on_device<float>(&d->loss, NULL, r.n_rows);
    if (t->settings->headless) MUST_CUDA(cudaMemset(d->loss, 0, (size_t)r.n_rows * sizeof *d->loss));
    d->first_row = r.first_row;
    d->first_run = t->first_run;
    free(sorted.rows);
    free(sorted.runs);
}

static void free_batch(trainer *t) {
    cf_schedule_free(t->schedule);
    cf_plan_free(t->plan);
    free(t->row_memory);
    free(t->first_run);
    t->schedule = NULL;
    t->plan = NULL;
    t->row_memory = NULL;
    t->first_run = NULL;
}

/* Plans the batch. Chunk size 0 means the longest document's length, so the plan depends on the batch. */
static void plan_batch(const trainer *t, int64_t chunk_size, int64_t k, cf_plan **plan, cf_schedule **schedule) {
    cf_pack_desc packing = t->settings->packing;
    cf_schedule_desc order = t->settings->order;
    int64_t longest = 1;
    for (int64_t i = 0; i < t->batch.count; i++) longest = max_of(longest, t->batch.length[i]);
    packing.chunk_size = chunk_size > 0 ? chunk_size : longest;
    order.shape.k = k;
    order.shape.outputs = t->settings->outputs > 0;
    MUST(cf_pack(t->batch.length, t->batch.count, &packing, plan, &error));
    MUST(cf_schedule_make(*plan, &order, schedule, &error));
}

/* ================================================================================================================
   >>memory    what the device holds, by term, and what would fit
   ================================================================================================================ */

static double mebibytes(double bytes) { return bytes / 1048576.0; }

static double device_bytes_used(double *free_now) {
    size_t free_bytes = 0, all_bytes = 0;
    MUST_CUDA(cudaMemGetInfo(&free_bytes, &all_bytes));
    if (free_now) *free_now = (double)free_bytes;
    return (double)(all_bytes - free_bytes);
}

static void print_term(const char *what, double predicted, double actual) {
    char text[2][24] = {"-", "-"};
    if (predicted >= 0) snprintf(text[0], sizeof text[0], "%.3f", mebibytes(predicted));
    if (actual >= 0) snprintf(text[1], sizeof text[1], "%.3f", mebibytes(actual));
    printf("  %-44s %10s %10s\n", what, text[0], text[1]);
}

static void print_model_terms(const trainer *t) {
    const double n = (double)t->model.at.count, number = t->settings->type == CF_DTYPE_FP32 ? 4 : 2;
    print_term("CUDA and its libraries, and other programs", -1, t->used[0]);
    print_term("products: workspace", (double)PRODUCT_WORKSPACE, t->used[1] - t->used[0]);
    print_term("parameters", number * n, -1);
    print_term("master weights and moments", 12 * n, -1);
    print_term("gradients", 4 * n, -1);
    print_term("model, these together", (16 + number) * n, t->used[2] > 0 ? t->used[2] - t->used[1] : -1);
}

/* m: the executor's memory for the batch. */
static void print_memory_table(const trainer *t, const cf_executor_memory *m, int is_loaded) {
    printf("memory (MiB)%34s %10s %10s\n", "", "predicted", "actual");
    print_model_terms(t);
    print_term("activations", (double)m->arena, -1);
    print_term("state (K and V)", (double)m->state, -1);
    print_term("state gradient", (double)m->gradient, -1);
    if (m->host > 0) print_term("host memory: state, its gradient, outputs", (double)m->host, -1);
    print_term("workspace of a pass", (double)m->workspace, -1);
    print_term("metadata", (double)m->metadata, -1);
    print_term("batch, these together and its tokens", (double)m->total,
               is_loaded ? device_bytes_used(NULL) - t->used[2] : -1);
    fflush(stdout);
}

static cf_executor_memory memory_of_plan(const trainer *t, int64_t chunk_size, int64_t k) {
    cf_executor_memory m;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    plan_batch(t, chunk_size, k, &plan, &schedule);
    MUST(cf_executor_memory_of(t->executor, plan, schedule, &m, &error));
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return m;
}

#define SMALLEST_CHUNK 128

/* Ends the program because the batch does not fit on the device. Prints the table, the largest chunk size that would
   fit and, for that, the largest K. */
static void explain_memory(const trainer *t, const char *why) {
    const settings *s = t->settings;
    double room;
    device_bytes_used(&room);
    const cf_executor_memory whole = memory_of_plan(t, s->chunk_size, s->order.shape.k);
    print_memory_table(t, &whole, 0);
    for (int64_t size = t->plan->chunk_size; size >= SMALLEST_CHUNK; size /= 2) {
        for (int64_t k = s->order.shape.k; k >= 1; k /= 2) {
            const cf_executor_memory m = memory_of_plan(t, size, k);
            if ((double)m.total > room) continue;
            fail(EXIT_CHECK_FAILED, "%s; --chunk-size %lld --k %lld would fit: %.3f of %.3f MiB", why, (long long)size,
                 (long long)k, mebibytes((double)m.total), mebibytes(room));
        }
    }
    fail(EXIT_CHECK_FAILED, "%s; no chunk size from %d on would fit: try --recompute full", why, SMALLEST_CHUNK);
}

/* The same if not even the model fits. */
static void explain_model(const trainer *t, double wanted, double room) {
    printf("memory (MiB)%34s %10s %10s\n", "", "predicted", "actual");
    print_model_terms(t);
    fail(EXIT_CHECK_FAILED, "the model takes %.3f MiB, the device has %.3f left: try fewer --layers", mebibytes(wanted),
         mebibytes(room));
}

/* ================================================================================================================
   >>step
   ================================================================================================================ */

/* Packs, schedules and loads the batch; nothing is allocated after that. */
static void load_batch(trainer *t) {
    const settings *s = t->settings;
    cf_plan *old_plan = t->plan; /* the executor uses these until the next load */
    cf_schedule *old_schedule = t->schedule;
    cf_error error;
    memset(&error, 0, sizeof error);
    if (t->batch.n_targets == 0) fail(EXIT_BAD_INPUT, "the batch has no target tokens, so there is nothing to learn");
    free(t->row_memory);
    free(t->first_run);
    plan_batch(t, s->chunk_size, s->order.shape.k, &t->plan, &t->schedule);
    fill_rows(t);
    upload_rows(t);
    const cf_result result = cf_executor_load(t->executor, t->plan, t->schedule, &error);
    if (result == CF_ERROR_MEMORY) explain_memory(t, error.text);
    if (result != CF_OK) fail(exit_code_of(result), "%s", error.text);
    cf_schedule_free(old_schedule);
    cf_plan_free(old_plan);
}

/* Takes the next documents in order; synthetic ones all at once, unchanged. */
static void next_batch(trainer *t) {
    const int all = t->settings->synthetic.count > 0;
    token_batch_free(&t->batch);
    t->batch = token_batch_new(all ? t->data.count : t->settings->batch);
    for (int64_t i = 0; i < t->batch.count; i++)
        token_batch_put(&t->batch, i, &t->data, all ? i : data_order_next(&t->order));
}

template <typename T> static int on_forward(void *user, const cf_cuda_step *step) {
    return decoder_forward<T>(&((trainer *)user)->model, step);
}

template <typename T> static int on_backward(void *user, const cf_cuda_step *step) {
    return decoder_backward<T>(&((trainer *)user)->model, step);
}

template <typename T> static void executor_make(trainer *t) {
    const settings *s = t->settings;
    cf_executor_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.user = t;
    desc.forward = on_forward<T>;
    desc.backward = on_backward<T>;
    desc.stages = &t->needs;
    desc.devices = &t->device;
    desc.attention = attention_desc_of(&s->model, s->type, s->path, s->check || s->exact);
    desc.seed = (uint64_t)s->seed;
    desc.timeline = s->times != NULL;
    desc.state_block_rows = block_rows_of(&s->model, s->type, s->stream);
    desc.outputs = s->outputs;
    MUST(cf_executor_create(&desc, &t->executor, &error));
    MUST_CUBLAS(cublasSetStream(t->cublas, cf_executor_stream(t->executor, 0)));
}

/* Loss of the batch, and length of its gradient. */
typedef struct step_result {
    double loss, length;
} step_result;

/* Computes gradients of the mean loss of the loaded batch. */
static step_result run_batch(trainer *t) {
    const decoder *d = &t->model;
    const cudaStream_t stream = cf_executor_stream(t->executor, 0);
    double *const loss = d->totals + TOTAL_BLOCKS, *const squares = loss + 1, both[2];
    MUST_CUDA(cudaMemsetAsync(d->gradient, 0, (size_t)d->at.count * sizeof(float), stream));
    MUST(cf_executor_run(t->executor, &error));
    add_up(d, loss, d->loss, t->rows.n_rows, 0, stream);
    add_up(d, squares, d->gradient, d->at.count, 1, stream);
    MUST_CUDA(cudaStreamSynchronize(stream));
    MUST_CUDA(cudaMemcpy(both, loss, sizeof both, cudaMemcpyDeviceToHost));
    const step_result result = {both[0], sqrt(both[1])};
    return result;
}

/* Runs AdamW on the executor's stream, which orders it before the next batch. */
template <typename T> static void update_weights(trainer *t) {
    const optimizer_config *c = &t->settings->optimizer;
    const decoder *d = &t->model;
    const double n = (double)(t->step + 1);
    const adam_numbers k = {(float)learning_rate_at(c, t->step), (float)c->beta1, (float)c->beta2, (float)c->epsilon,
                            (float)(1 / (1 - pow(c->beta1, n))), (float)(1 / (1 - pow(c->beta2, n))), 1};
    for (int64_t i = 0; i < d->n_tensors; i++) {
        const decoder_tensor *own = &d->tensors[i];
        const int64_t at = own->offset;
        MUST_CUDA(launch(adamw_kernel<T>, (tensor_count(own) + 255) / 256, dim3(256),
                         cf_executor_stream(t->executor, 0), tensor_count(own), (T *)d->parameters + at, d->master + at,
                         d->first + at, d->second + at, (const float *)d->gradient + at,
                         (const double *)d->totals + TOTAL_BLOCKS + 1, k,
                         (float)(own->columns > 0 ? c->weight_decay : 0), (float)c->clip));
    }
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Returns the useful floating-point operations of training on the batch, without recomputation: six for each token and
   parameter of a product, and three times those of attention's forward. */
static double useful_flops(const trainer *t) {
    const model_config *c = &t->settings->model;
    const double table = (double)(c->vocabulary * c->hidden), all = (double)t->model.at.count;
    const double in_products = c->untied ? all - table : all;
    double pairs = 0;
    for (int64_t i = 0; i < t->plan->n_chunks; i++) pairs += (double)t->plan->chunks[i].pairs;
    return 6 * in_products * (double)t->plan->n_tokens + 12 * pairs * (double)(c->hidden * c->layers);
}

static void print_progress(const trainer *t, step_result result, double seconds) {
    const settings *s = t->settings;
    char loss[40];
    snprintf(loss, sizeof loss, s->exact ? "%a" : "%.4f", result.loss);
    printf("step %4lld/%lld  loss %s  lr %.2e  |gradient| %.3f  %3lld chunks  %.0f tokens/s", (long long)t->step,
           (long long)s->optimizer.steps, loss, learning_rate_at(&s->optimizer, t->step - 1), result.length,
           (long long)t->plan->n_chunks, (double)t->plan->n_tokens / seconds);
    if (s->peak_tflops > 0) printf("  utilisation %.1f %%", 100 * useful_flops(t) / seconds / (1e12 * s->peak_tflops));
    printf("  memory %.1f MiB  left %.0f s\n", mebibytes(device_bytes_used(NULL)),
           seconds * (double)(s->optimizer.steps - t->step));
    fflush(stdout);
}

/* Writes PASS ROWS PAIRS SECONDS of each pass. The first step, which warms up, leaves an empty file. A forward that
   keeps nothing runs no head; its replay does. So such forwards count only if no forward runs the head. */
static void write_times(const trainer *t) {
    const settings *s = t->settings;
    const cf_schedule *schedule = cf_executor_schedule(t->executor);
    cf_timeline *timeline = NULL;
    MUST(cf_executor_timeline(t->executor, NULL, &timeline, &error));
    FILE *file = fopen(s->times, t->step == 0 ? "w" : "a");
    if (!file) fail(EXIT_CHECK_FAILED, "%s: %s", s->times, strerror(errno));
    for (int64_t i = 0; t->step > 0 && i < schedule->n_actions; i++) {
        const cf_action *a = &schedule->actions[i];
        const cf_chunk *c = &t->plan->chunks[a->chunk];
        if (a->pass == CF_F && !a->keep && !s->headless) continue;
        fprintf(file, "%s %lld %lld %.9g\n", cf_pass_name((cf_pass)a->pass), (long long)c->rows, (long long)c->pairs,
                timeline->end[i] - timeline->start[i]);
    }
    const int failed = ferror(file);
    if (fclose(file) != 0 || failed) fail(EXIT_CHECK_FAILED, "%s cannot be written", s->times);
    cf_timeline_free(timeline);
}

template <typename T> static void train_step(trainer *t) {
    const double begin = seconds_now();
    next_batch(t);
    load_batch(t);
    const step_result result = run_batch(t);
    if (!(result.loss - result.loss == 0) || !(result.length - result.length == 0))
        fail(EXIT_CHECK_FAILED, "step %lld: the loss or its gradient is not a finite number; try a smaller --lr",
             (long long)t->step + 1);
    update_weights<T>(t);
    MUST_CUDA(cudaStreamSynchronize(cf_executor_stream(t->executor, 0)));
    if (t->settings->times) write_times(t);
    t->step++;
    print_progress(t, result, seconds_now() - begin);
}

/* ================================================================================================================
   >>checkpoint    as train_cpu.c has it
   ================================================================================================================ */

enum { PROGRESS_STEP, PROGRESS_EPOCH, PROGRESS_CURSOR, PROGRESS_CHUNKING, PROGRESS_COUNT };

static uint64_t token_set_hash(const token_set *s) {
    const size_t n = (size_t)s->first[s->count];
    uint64_t hash = hash_bytes((uint64_t)s->count, s->first, (size_t)(s->count + 1) * sizeof *s->first);
    hash = hash_bytes(hash, s->tokens, n * sizeof *s->tokens);
    return s->ignored ? hash_bytes(hash, s->ignored, n) : hash;
}

/* Hashes the settings of chunks. They do not change what is computed, only how it is rounded. */
static int64_t chunking_hash(const settings *s) {
    const int64_t all[] = {s->chunk_size, s->packing.max_slices, (int64_t)s->packing.split, s->order.shape.k,
                           s->loss_rows};
    return (int64_t)(hash_bytes(0, all, sizeof all) >> 1);
}

/* Returns the master weights or moments, on the device. The checkpoint sees floats as bytes, two of them in one of its
   numbers. */
static float *checkpoint_array(void *user, int array) {
    const decoder *d = &((trainer *)user)->model;
    float *const arrays[CHECKPOINT_ARRAYS] = {d->master, d->first, d->second};
    return arrays[array];
}

static void fetch_piece(void *user, int array, int64_t first, int64_t count, real *to) {
    MUST_CUDA(cudaMemcpy(to, checkpoint_array(user, array) + 2 * first, (size_t)count * sizeof *to,
                         cudaMemcpyDeviceToHost));
}

static void store_piece(void *user, int array, int64_t first, int64_t count, real *from) {
    MUST_CUDA(cudaMemcpy(checkpoint_array(user, array) + 2 * first, from, (size_t)count * sizeof *from,
                         cudaMemcpyHostToDevice));
}

/* Calls `use`, which saves or loads, on the run's data in a checkpoint's form. */
static int use_checkpoint(trainer *t, int (*use)(const char *path, checkpoint *c)) {
    const settings *s = t->settings;
    const model_config *m = &s->model;
    const optimizer_config *o = &s->optimizer;
    const checkpoint_setting all[] = {
        setting_int("vocabulary", m->vocabulary), setting_int("layers", m->layers), setting_int("hidden", m->hidden),
        setting_int("heads", m->heads), setting_int("kv-heads", m->kv_heads), setting_int("ffn", m->ffn),
        setting_int("untied", m->untied), setting_int("sinks", m->kinds.n_pattern),
        setting_double("rope theta", m->rope_theta), setting_double("norm epsilon", m->norm_epsilon), setting_int("type", (int64_t)s->type),
        setting_int("mean", (int64_t)s->mean), setting_int("batch", s->batch), setting_int("steps", o->steps),
        setting_double("lr", o->learning_rate), setting_int("warmup", o->warmup),
        setting_double("weight-decay", o->weight_decay), setting_double("clip", o->clip), setting_int("seed", s->seed),
        setting_int("hash of the documents", (int64_t)token_set_hash(&t->data)),
    };
    int64_t progress[PROGRESS_COUNT] = {t->step, t->order.epoch, t->order.cursor, chunking_hash(s)};
    checkpoint c = {all, sizeof all / sizeof all[0], progress, PROGRESS_COUNT, {}, t->model.at.count / 2,
                    fetch_piece, store_piece, t};
    const int result = use(s->checkpoint, &c);
    if (progress[PROGRESS_STEP] < 0 || progress[PROGRESS_EPOCH] < 0 || progress[PROGRESS_CURSOR] < 0 ||
        progress[PROGRESS_CURSOR] > t->data.count)
        fail(EXIT_BAD_INPUT, "%s: its step or its place in the data makes no sense", s->checkpoint);
    if (progress[PROGRESS_CHUNKING] != chunking_hash(s))
        printf("note: the chunks are others than before, so losses go on alike but not bit by bit\n");
    t->step = progress[PROGRESS_STEP];
    data_order_free(&t->order);
    t->order = data_order_new(t->data.count, mix64_pair((uint64_t)s->seed, 2), progress[PROGRESS_EPOCH],
                              progress[PROGRESS_CURSOR]);
    return result;
}

static int save_to(const char *path, checkpoint *c) {
    checkpoint_save(path, c);
    return 1;
}

static int load_from(const char *path, checkpoint *c) {
    char why[CHECKPOINT_WHY] = "";
    const int result = checkpoint_load(path, c, why);
    if (result < 0) fail(EXIT_BAD_INPUT, "%s: refused, and left as it is: %s", path, why);
    return result;
}

static void save_checkpoint(trainer *t) { use_checkpoint(t, save_to); }

/* Returns whether there was a checkpoint to continue from. */
template <typename T> static int load_checkpoint(trainer *t) {
    const int found = use_checkpoint(t, load_from);
    if (found) round_parameters<T>(&t->model);
    return found;
}

template <typename T> static void train(trainer *t) {
    const settings *s = t->settings;
    if (s->checkpoint && load_checkpoint<T>(t))
        printf("going on from %s, step %lld\n", s->checkpoint, (long long)t->step);
    else if (s->checkpoint) save_checkpoint(t); /* so that an unwritable path is reported before any work is done */
    const int64_t end = s->stop_after > 0 ? min_of(s->optimizer.steps, t->step + s->stop_after) : s->optimizer.steps;
    int64_t saved = t->step;
    while (t->step < end && !stop_asked) {
        train_step<T>(t);
        if (!s->checkpoint || t->step % s->checkpoint_every != 0) continue;
        save_checkpoint(t);
        saved = t->step;
    }
    if (s->checkpoint && saved != t->step) save_checkpoint(t);
    if (stop_asked) printf("stopped after step %lld\n", (long long)t->step);
    if (!s->exact) return;
    float *master = download(t->model.master, t->model.at.count);
    printf("weights after step %lld: %016llx\n", (long long)t->step,
           (unsigned long long)hash_bytes(0, master, (size_t)t->model.at.count * sizeof *master));
    free(master);
}

/* ================================================================================================================
   >>check    chunked gradients against float64 ones from the CPU, and against unchunked ones from the device
   ================================================================================================================ */

/* Calls `use` on every number of model.h's weights and the corresponding one of an array in the decoder's layout. The
   tensors have the same order; matrices of layers are (inputs, outputs) in model.h. */
template <typename N, typename F> static void each_weight(const decoder *d, const weights *host, N *flat, F use) {
    for (int64_t i = 0; i < host->n_tensors; i++) {
        const tensor *t = &host->tensors[i];
        const decoder_tensor *own = &d->tensors[i];
        const int turned = own->columns > 0 && strncmp(own->name, "model.layers.", 13) == 0;
        for (int64_t j = 0; j < t->count; j++) {
            const int64_t at = turned ? j % own->rows * own->columns + j / own->rows : j;
            use(&host->flat[t->offset + j], &flat[own->offset + at]);
        }
    }
}

/* Copies the weights to the device, and back as the device has rounded them. */
template <typename T> static void put_weights(const decoder *d, const weights *w) {
    float *flat = TAKE(float, d->at.count);
    each_weight(d, w, flat, [](real *host, float *own) {
        *own = (float)*host;
        *host = to_float(from_float<T>(*own));
    });
    upload(d->master, flat, d->at.count);
    round_parameters<T>(d);
    free(flat);
}

/* Copies a device array in the weights' layout to the host. */
static void take_array(const decoder *d, const float *from, const weights *to) {
    float *flat = download(from, d->at.count);
    each_weight(d, to, flat, [](real *host, const float *own) { *host = (real)*own; });
    free(flat);
}

static step_result take_gradients(trainer *t, const weights *to) {
    const step_result result = run_batch(t);
    take_array(&t->model, t->model.gradient, to);
    return result;
}

/* Returns the batch in the form of model.h's trainer. */
static batch batch_for_cpu(const trainer *t, uint16_t **tokens) {
    batch b = batch_new(t->batch.count);
    int64_t n = 0;
    *tokens = TAKE(uint16_t, t->batch.n_tokens);
    for (int64_t i = 0; i < b.count; i++) {
        unsigned char *ignored = TAKE(unsigned char, t->batch.length[i]);
        b.length[i] = t->batch.length[i];
        b.tokens[i] = *tokens + n;
        b.ignored[i] = ignored;
        for (int64_t k = 0; k < b.length[i]; k++) {
            (*tokens)[n++] = (uint16_t)t->batch.tokens[i][k];
            ignored[k] = t->batch.ignored[i] && t->batch.ignored[i][k];
        }
    }
    b.n_tokens = t->batch.n_tokens;
    b.n_targets = t->batch.n_targets;
    return b;
}

static double cpu_gradients(const trainer *t, weights *w, weights *to) {
    uint16_t *tokens;
    memory_meter meter;
    memset(&meter, 0, sizeof meter);
    batch b = batch_for_cpu(t, &tokens);
    const double loss = unchunked_gradients(&t->settings->model, w, to, &b, 0, &meter);
    batch_free(&b);
    free(tokens);
    return loss;
}

/* Returns the allowed difference of gradients: limit_of of executor_cuda.cu has the reasons. */
static double limit_of(cf_dtype type, int rounded_anew) {
    if (type == CF_DTYPE_FP32) return 1e-5;
    return (rounded_anew ? 12 : 2) / 256.0;
}

/* Returns the allowed difference of chunked gradients from float64. With bf16 every activation is rounded, with chunks
   or without, and chunks may at most double that error. */
static double limit_of_chunked(const settings *s, const weights *unchunked, const weights *exact, const char *all,
                               double loss, double loss_exact) {
    const char *whose;
    if (s->type == CF_DTYPE_FP32) return limit_of(s->type, 1);
    return 2 * largest_difference(unchunked, exact, all, loss, loss_exact, &whose);
}

/* Four ways to the gradients of a batch. */
typedef struct checked {
    weights chunked, again, unchunked, exact;
    double loss, loss_again, loss_unchunked, loss_exact;
} checked;

template <typename T> static void fill_checked(trainer *t, checked *of, weights *w) {
    const settings *const chunked = t->settings;
    settings unchunked = *chunked;
    put_weights<T>(&t->model, w);
    next_batch(t);
    load_batch(t);
    printf("check: %lld documents, %lld tokens in %lld chunks of %lld, K %lld, %lld chains\n",
           (long long)t->batch.count, (long long)t->batch.n_tokens, (long long)t->plan->n_chunks,
           (long long)t->plan->chunk_size, (long long)chunked->order.shape.k, (long long)t->plan->n_chains);
    of->loss = take_gradients(t, &of->chunked).loss;
    of->loss_again = take_gradients(t, &of->again).loss;
    unchunked.chunk_size = 0;
    unchunked.packing.max_slices = 1;
    unchunked.packing.shared_prefixes = NULL;
    unchunked.packing.min_shared_prefix = 0;
    t->settings = &unchunked;
    load_batch(t);
    t->settings = chunked;
    of->loss_unchunked = take_gradients(t, &of->unchunked).loss;
    of->loss_exact = cpu_gradients(t, w, &of->exact);
}

/* Makes one update with the device's gradients, and compares it with the CPU trainer's. With a high --lr and a low
   --clip it tests every part of the update. */
template <typename T> static int check_update(trainer *t, weights *w, const weights *gradient, const char *all) {
    const optimizer_config *c = &t->settings->optimizer;
    optimizer moments = optimizer_new(w->count);
    weights after = weights_new(&t->settings->model);
    take_array(&t->model, t->model.master, w);
    optimizer_step(&moments, c, w, gradient, gradient_length(gradient), t->step);
    update_weights<T>(t);
    MUST_CUDA(cudaStreamSynchronize(cf_executor_stream(t->executor, 0)));
    take_array(&t->model, t->model.master, &after);
    const int ok = compare_gradients("weights after a step of AdamW:", &after, w, all, 1, 1, 1e-5);
    weights_free(&after);
    optimizer_free(&moments);
    return ok;
}

template <typename T> static int check_batch(trainer *t) {
    const settings *s = t->settings;
    const model_config *c = &s->model;
    if (c->vocabulary > 65536) fail(EXIT_BAD_INPUT, "--check: the vocabulary must be 65536 at most");
    if (s->mean == CF_MEAN_SEQUENCES) fail(EXIT_BAD_INPUT, "--check compares means over tokens");
    checked of = {weights_new(c), weights_new(c), weights_new(c), weights_new(c), 0, 0, 0, 0};
    weights w = weights_new(c), *const every[] = {&w, &of.chunked, &of.again, &of.unchunked, &of.exact};
    char *all = TAKE(char, w.n_tensors);
    memset(all, 1, (size_t)w.n_tensors);
    weights_init(&w, c, mix64_pair((uint64_t)s->seed, 3), 0.1);
    fill_checked<T>(t, &of, &w);
    int ok = compare_gradients("a second run, bit by bit:", &of.again, &of.chunked, all, of.loss_again, of.loss, 0);
    ok &= compare_gradients("unchunked on the device:", &of.chunked, &of.unchunked, all, of.loss, of.loss_unchunked,
                            limit_of(s->type, s->stream > 0 || s->with.count > 0 || s->cudnn));
    ok &= compare_gradients("unchunked, from float64 on the CPU:", &of.unchunked, &of.exact, all, of.loss_unchunked,
                            of.loss_exact, limit_of(s->type, 1));
    const double limit = limit_of_chunked(s, &of.unchunked, &of.exact, all, of.loss_unchunked, of.loss_exact);
    ok &= compare_gradients("chunked, from float64 on the CPU:", &of.chunked, &of.exact, all, of.loss, of.loss_exact,
                            limit);
    ok &= check_update<T>(t, &w, &of.unchunked, all);
    for (weights *one : every) weights_free(one);
    free(all);
    return ok;
}

/* ================================================================================================================
   >>program
   ================================================================================================================ */

#define MOST_DOCUMENTS 10000000

/* Makes random documents with the lengths of a list, which is read as the chunkflow command reads one. */
static token_set listed_data(const settings *s) {
    cli_list list;
    if (cli_list_read(s->lengths, MOST_DOCUMENTS, &list) != CLI_OK) fail(EXIT_BAD_INPUT, "there are no lengths to use");
    int64_t *lengths = cli_list_lengths(&list);
    if (!lengths) fail(EXIT_CHECK_FAILED, "out of memory: %lld lengths", (long long)list.n_sequences);
    const token_set data = random_tokens(lengths, list.n_sequences, s->model.vocabulary,
                                         mix64_pair((uint64_t)s->seed, 1));
    if (data.count == 0) fail(EXIT_BAD_INPUT, "%s: there is no length in it", s->lengths);
    free(lengths);
    cli_list_free(&list);
    return data;
}

static token_set load_data(const settings *s) {
    if (s->synthetic.count > 0) {
        const token_set made = random_tokens(s->synthetic.lengths, s->synthetic.count, s->model.vocabulary,
                                             mix64_pair((uint64_t)s->seed, 1));
        copy_shared(made.tokens, made.first, s->packing.shared_prefixes, made.count);
        return made;
    }
    if (s->lengths) return listed_data(s);
    if (!s->data) return random_tokens(NULL, 0, s->model.vocabulary, 0);
    token_set data = tokens_read(s->data);
    if (data.vocabulary > s->model.vocabulary)
        fail(EXIT_BAD_INPUT, "%s: its vocabulary has %lld tokens, the model's %lld", s->data,
             (long long)data.vocabulary, (long long)s->model.vocabulary);
    return data;
}

template <typename T> static void trainer_begin(trainer *t) {
    const settings *s = t->settings;
    double room;
    t->data = load_data(s);
    t->order = data_order_new(t->data.count, mix64_pair((uint64_t)s->seed, 2), 0, 0);
    MUST_CUDA(cudaGetDevice(&t->device));
    MUST_CUBLAS(cublasCreate(&t->cublas));
    t->used[0] = device_bytes_used(NULL);
    t->lt = products_new();
    t->used[1] = device_bytes_used(&room);
    const double wanted = decoder_bytes<T>(&s->model, &t->model);
    if (wanted > room) explain_model(t, wanted, room);
    t->model = decoder_new<T>(&s->model, s->type, &t->lt, max_of(1, longest_document(&t->data)));
    t->used[2] = device_bytes_used(NULL);
    t->model.cublas = t->cublas;
#ifdef TRAIN_CUDNN
    if (s->cudnn) t->model.backend = t->cudnn = cudnn_attention_new();
#endif
    t->model.recompute = s->recompute == CF_RECOMPUTE_FULL;
    t->model.loss_rows = s->loss_rows;
    t->model.range.has_head = !s->headless;
    t->needs = decoder_needs<T>(&t->model);
    if (s->load) hf_load<T>(s->from, &t->model);
    else draw_values<T>(&t->model, mix64_pair((uint64_t)s->seed, 3));
    executor_make<T>(t);
}

static void trainer_end(trainer *t) {
    cf_executor_free(t->executor);
    free_batch(t);
#ifdef TRAIN_CUDNN
    delete t->cudnn;
#endif
    decoder_free(&t->model);
    products_free(&t->lt);
    MUST_CUBLAS(cublasDestroy(t->cublas));
    token_batch_free(&t->batch);
    data_order_free(&t->order);
    token_set_free(&t->data);
}

template <typename T> static int run(const settings *s) {
    trainer t = {};
    int ok = 1;
    t.settings = s;
    if (s->checkpoint && !s->check) checkpoint_lock(s->checkpoint);
    trainer_begin<T>(&t);
    if (s->check) ok = check_batch<T>(&t);
    else train<T>(&t);
    if (s->memory_table && t.plan) {
        cf_executor_memory m;
        MUST(cf_executor_memory_of(t.executor, NULL, NULL, &m, &error));
        print_memory_table(&t, &m, 1);
    }
    if (s->save) hf_save<T>(s->from, &t.model, s->save, s->part_bytes);
    trainer_end(&t);
    return ok ? 0 : EXIT_CHECK_FAILED;
}

int main(int argc, char **argv) {
    hf_model from;
    memset(&from, 0, sizeof from);
    settings s = parse_settings(argc, argv, &from);
    int code = 0;
    cli_signals_catch(); /* for incomplete files; these two signals only ask to stop */
    signal(SIGINT, ask_to_stop);
    signal(SIGTERM, ask_to_stop);
    if (!s.help) code = s.type == CF_DTYPE_FP32 ? run<float>(&s) : run<__nv_bfloat16>(&s);
    hf_model_free(&from);
    free(s.synthetic.lengths);
    free(s.with.lengths);
    free(s.shared.lengths);
    free((void *)s.packing.shared_prefixes);
    must_be_printed();
    return code;
}
