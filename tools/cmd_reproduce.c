/* cmd_reproduce.c - chunkflow reproduce: the ChunkFlow paper's numbers beside what models and schedules here give.

   The paper is arXiv 2503.02356 (ICML 2025). A number stands here as it is quoted in public; nothing is fitted to it
   unless a note says so. */

#include "chunkflow_tune.h"
#include "draw.h"
#include "modelling.h"
#include "progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_DRAWS = 1000000, BATCH = 256, CONTEXT_SHORT = 32768, CONTEXT_LONG = 262144 };

typedef struct reproduce_options {
    int64_t batches;
    int with_longest;
} reproduce_options;

static const reproduce_options defaults = {.batches = 8};

static const cli_option options[] = {
    {.name = "--batches", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(reproduce_options, batches), .min = 1,
     .max = 64, .help = "speedup: random batches whose times are added up; default 8"},
    {.name = "--with-longest", .kind = CLI_FLAG, .offset = offsetof(reproduce_options, with_longest),
     .help = "speedup: put a sequence as long as the context in each batch,\nwhich is rare in this distribution"},
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   The worked example: Figures 2 and 6
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct example {
    const char *text;
    int64_t lengths[4];
    int64_t chunk_size, k;
    int unsplit;
    double paper;
    const char *mark;
} example;

static const example examples[] = {
    {"1F1B, sequences of equal length", {2, 2, 2, 2}, 2, 1, 1, 42.8, ""},
    {"1F1B, 1, 1, 2 and 4 units", {1, 1, 2, 4}, 4, 1, 1, 57.14, ""},
    {"ChunkSize 4, K = 1", {1, 1, 2, 4}, 4, 1, 0, 60.0, ""},
    {"ChunkSize 2, K = 1", {1, 1, 2, 4}, 2, 1, 0, 54.1, "*"},
    {"ChunkSize 2, K = 2", {1, 1, 2, 4}, 2, 2, 0, 47.8, ""},
};

/* Per cent of the four stages' time that nothing useful fills; a replay is not useful. */
static int example_bubble(const example *e, cf_schedule_kind kind, cf_replay replay, double *bubble) {
    cf_pack_desc packing;
    cf_schedule_desc order;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    cf_result result;

    memset(&packing, 0, sizeof packing);
    memset(&order, 0, sizeof order);
    packing.chunk_size = e->chunk_size;
    packing.max_slices = e->unsplit;
    packing.no_tails = 1;
    order.n_stages = 4;
    order.kind = kind;
    order.replay = replay;
    order.k = e->k;
    result = cf_pack(e->lengths, 4, &packing, &plan, &error);
    if (result == CF_OK) result = cf_schedule_make(plan, &order, &schedule, &error);
    if (result == CF_OK) result = cf_simulate(plan, schedule, NULL, &timeline, &error);
    if (result == CF_OK) *bubble = 100 * timeline->bubble_useful;
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return result == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

static int print_example(const reproduce_options *asked) {
    size_t i;

    (void)asked;
    puts("Bubbles of the worked example, 4 stages, F = length, B = 2 x length (per cent; a replay is waste)\n");
    printf("%-34s %8s %14s %10s %6s\n", "", "paper", "paper's order", "difference", "best");
    for (i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        const example *e = &examples[i];
        double order = 0, best = 0;
        int code = example_bubble(e, e->unsplit ? CF_SCHEDULE_1F1B : CF_SCHEDULE_PAPER, CF_REPLAY_PIPELINE, &order);
        if (code == CLI_OK) code = example_bubble(e, CF_SCHEDULE_BEST, CF_REPLAY_LOCAL, &best);
        if (code != CLI_OK) return code;
        printf("%-34s %7.2f%-1s %14.2f %+10.2f %6.2f\n", e->text, e->paper, e->mark, order, order - e->paper, best);
    }
    puts("\nassumptions\n"
         "  `paper's order` replays through the whole pipeline; `best` is the default: local replay, and on stage s at\n"
         "  most min(K, 2) + 3 - s chunks kept. Both are orders of their own where the paper's is not printed in full:\n"
         "  its K = 2 makespan is 46 units, and 42 is the bound. *: what the 54.1 counts cannot be recovered; 24 of 52\n"
         "  units would be 53.8 %, and no order that keeps one chunk and replays through the pipeline is below 50 units.");
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Peak memory of 7B
   ---------------------------------------------------------------------------------------------------------------- */

/* Qwen2.5-7B, <TP 4, SP 4, PP 1, selective>, four GPUs. context 0: plain training of one sequence of `chunk` tokens. */
typedef struct measurement {
    int64_t chunk, context;
    double gib;
} measurement;

static const measurement measurements[] = {{2048, 32768, 41.6},  {4096, 32768, 47.5},  {8192, 32768, 59.3},
                                           {2048, 262144, 45.6}, {4096, 262144, 50.8}, {8192, 262144, 63.8},
                                           {32768, 0, 75.0}};

/* live: chunks whose activations are there at the peak. */
static int model_measurement(const measurement *at, int64_t live, cf_memory_report *report) {
    cf_memory_desc desc;
    cf_memory_load load;
    cf_error error;

    memset(&desc, 0, sizeof desc);
    memset(&load, 0, sizeof load);
    desc.model = cf_model_find("qwen2.5-7b");
    desc.parallel.tp = 4;
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    desc.loss = CF_LOSS_FUSED;
    load.live_tokens = (at->context > 0 ? live : 1) * at->chunk;
    load.chunk_tokens = at->chunk;
    load.state_tokens = at->context;
    return cf_memory_estimate(&desc, &load, 1, report, 1, &error) == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

/* The share of a million conversations, those of more than 32K left out, whose plain training stays below `gib`. */
static int share_below(double gib, double *share) {
    measurement at = {0, 0, 0};
    cf_memory_report report;
    draw_source source;
    int64_t low = 0, high = 32768, below = 0, n = 0, i;
    int code = CLI_OK;

    while (code == CLI_OK && high - low > 1) {
        at.chunk = low + (high - low) / 2;
        code = model_measurement(&at, 1, &report);
        if (modelling_gib(report.total) < gib) low = at.chunk;
        else high = at.chunk;
    }
    source.state = 1;
    for (i = 0; code == CLI_OK && i < N_DRAWS; i++) {
        int64_t length = draw_lmsys(&source);
        n += length <= 32768;
        below += length <= low;
    }
    *share = 100 * (double)below / (double)n;
    return code;
}

static int print_peaks(const reproduce_options *asked) {
    double worst = 0, share = 0;
    size_t i;

    (void)asked;
    puts("Peak memory of Qwen2.5-7B, tensor and sequence parallel 4, no pipeline, selective recompute, K = 1 (GiB)\n");
    printf("%10s %10s %10s %10s %10s %14s\n", "ChunkSize", "context", "measured", "model", "residual",
           "one chunk live");
    for (i = 0; i < sizeof measurements / sizeof measurements[0]; i++) {
        const measurement *at = &measurements[i];
        cf_memory_report two, one;
        double residual;
        int code = model_measurement(at, 2, &two);
        if (code == CLI_OK) code = model_measurement(at, 1, &one);
        if (code != CLI_OK) return code;
        residual = 100 * (modelling_gib(two.total) / at->gib - 1);
        if (residual * residual > worst * worst) worst = residual;
        printf("%10s %10s %10.1f %10.2f %+9.1f%% %14.2f\n", at->context > 0 ? cli_commas(at->chunk) : "plain",
               cli_commas(at->context > 0 ? at->context : at->chunk), at->gib, modelling_gib(two.total), residual,
               modelling_gib(one.total));
    }
    if (share_below(45, &share) != CLI_OK) return CLI_FAILED;
    printf("\nlargest residual  %+.1f %%\n", worst);
    printf("plain, below 45   97.7 %% of micro-steps in the paper, %.1f %% here\n", share);
    puts("\nassumptions, the same for every line\n"
         "  18 bytes a parameter (bf16, float gradients, master copy and Adam; four GPUs, so nothing to divide over);\n"
         "  fused attention, norms and SwiGLU; a loss that works on bf16 logits in place; K and V in bf16; 2 GiB for\n"
         "  the runtime and 10 % of what comes and goes lost in gaps. Chunked: the peak is the last chunk's forward,\n"
         "  with the state of the whole sequence, no state gradient yet, and two chunks' activations: its own, and\n"
         "  those of the chunk before it, which is dropped only when the next loss takes its place. The two are\n"
         "  inferred from the slope of the measurements (2.95 MiB a token, against at most 1.3 in plain training);\n"
         "  the last column shows the model with one. Plain: Figure 1 of the paper, given as 75 GB; read as GiB here.");
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Batches, and what an iteration takes
   ---------------------------------------------------------------------------------------------------------------- */

/* A batch of conversations, none longer than `context`; with_longest: the first is as long as that. */
static void draw_batch(uint64_t seed, int64_t context, int with_longest, int64_t lengths[BATCH]) {
    draw_source source;
    int64_t i;

    source.state = seed;
    for (i = 0; i < BATCH; i++)
        do lengths[i] = draw_lmsys(&source);
        while (lengths[i] > context);
    if (with_longest) lengths[0] = context;
}

/* H100 numbers, because the paper does not give its GPUs' rates. */
static cf_gpu gpu_with_launch(double launch) {
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    gpu.launch = launch;
    return gpu;
}

/* What all searches here have in common. The memory is not what is asked about, so it has no end; `gpu` stays the
   caller's. */
static cf_tune_desc tune_desc(const char *model, const cf_gpu *gpu, int64_t tp, int64_t pp, cf_recompute recompute) {
    cf_tune_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.model = cf_model_find(model);
    desc.gpu = gpu;
    desc.parallel.tp = tp;
    desc.parallel.pp = pp;
    desc.parallel.recompute = recompute;
    desc.limit_bytes = (int64_t)1 << 40;
    desc.pack.no_tails = 1;
    desc.no_offload = 1;
    desc.batch = BATCH;
    desc.n_batches = 1;
    return desc;
}

/* ----------------------------------------------------------------------------------------------------------------
   ChunkSize x K at a constant product
   ---------------------------------------------------------------------------------------------------------------- */

enum { TRADE_OFFS = 3, TRADE_BATCHES = 8 };

typedef struct trade_off {
    int64_t chunk_size, k;
    double paper;
} trade_off;

static const trade_off trade_offs[TRADE_OFFS] = {{2048, 16, 29811}, {8192, 4, 23775}, {32768, 1, 28942}};

/* Adds the seconds of one batch: by replay (local second), then by ChunkSize. */
static int simulate_trade_off(uint64_t seed, const cf_gpu *gpu, double sums[2][TRADE_OFFS]) {
    static const int64_t chunk_sizes[TRADE_OFFS] = {2048, 8192, 32768}, ks[TRADE_OFFS] = {1, 4, 16};
    static const cf_schedule_kind kind = CF_SCHEDULE_PAPER;
    cf_tune_desc desc = tune_desc("qwen2.5-7b", gpu, 4, 4, CF_RECOMPUTE_SELECTIVE);
    int64_t lengths[BATCH], i, j;
    cf_tuning *tuning = NULL;
    cf_error error;
    cf_result result;

    draw_batch(seed, CONTEXT_LONG, 1, lengths);
    desc.chunk_sizes = chunk_sizes;
    desc.ks = ks;
    desc.kinds = &kind;
    desc.n_chunk_sizes = desc.n_ks = TRADE_OFFS;
    desc.n_kinds = 1;
    desc.n_exact = CF_MAX_CANDIDATES;
    progress_begin("reproducing");
    result = cf_tune(lengths, BATCH, &desc, &tuning, &error);
    progress_end();
    if (result != CF_OK) return cli_error(&error, NULL);
    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        double seconds = tuning->candidates[c->same_as >= 0 ? c->same_as : i].seconds;
        for (j = 0; j < TRADE_OFFS; j++)
            if (c->chunk_size == trade_offs[j].chunk_size && c->k == trade_offs[j].k)
                sums[c->replay == CF_REPLAY_LOCAL][j] += seconds;
    }
    cf_tuning_free(tuning);
    return CLI_OK;
}

static int print_trade_off(const reproduce_options *asked) {
    double sums[2][TRADE_OFFS] = {{0, 0, 0}, {0, 0, 0}};
    cf_gpu gpu = gpu_with_launch(40e-6);
    int i, code = CLI_OK;

    (void)asked;
    for (i = 0; i < TRADE_BATCHES && code == CLI_OK; i++) code = simulate_trade_off((uint64_t)i + 1, &gpu, sums);
    if (code != CLI_OK) return code;
    puts(
        "Qwen2.5-7B, 256K context, tensor and sequence parallel 4, pipeline 4, ChunkSize x K = 32K: ms an iteration\n");
    printf("%10s %4s %10s %7s   %13s %7s   %16s %7s\n", "ChunkSize", "K", "paper", "ratio", "local replay", "ratio",
           "pipeline replay", "ratio");
    for (i = 0; i < TRADE_OFFS; i++)
        printf("%10s %4lld %10.0f %7.3f   %13.0f %7.3f   %16.0f %7.3f\n", cli_commas(trade_offs[i].chunk_size),
               (long long)trade_offs[i].k, trade_offs[i].paper, trade_offs[i].paper / trade_offs[1].paper,
               1e3 * sums[1][i] / TRADE_BATCHES, sums[1][i] / sums[1][1], 1e3 * sums[0][i] / TRADE_BATCHES,
               sums[0][i] / sums[0][1]);
    printf("\nassumptions\n"
           "  %d batches of %d sequences: lengths like those of LMSys-Chat-1M (chunkflow gen lmsys, seeds 1 to %d, none\n"
           "  longer than 256K), the first of each batch 256K long; without it, most batches have no long sequence.\n"
           "  The paper's schedule and packing (no tails filled), selective recompute, bf16. H100 numbers (the paper\n"
           "  does not give its GPUs' rates), 40 microseconds lost around each kernel: a trainer in Python. With 30 or\n"
           "  less, (8K,4) stays best but (32K,1) becomes the worst. Replays without communication (local) give the\n"
           "  paper's order; if they run through the whole pipeline again, (32K,1), which replays seven of eight chunks\n"
           "  one by one, is worst by far. Absolute times depend on the batches, of which the paper gives no more than\n"
           "  their distribution: compare ratios.\n",
           TRADE_BATCHES, BATCH, TRADE_BATCHES);
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Lengths
   ---------------------------------------------------------------------------------------------------------------- */

static int print_lengths(const reproduce_options *asked) {
    static const struct { int64_t below; double paper; } shares[] = {
        {1024, 90.499}, {4096, 99.539}, {8192, 99.908}, {32768, 99.987}, {131072, 99.996}};
    enum { N_SHARES = sizeof shares / sizeof shares[0] };
    int64_t below[N_SHARES] = {0}, longest = 0, i, j;
    draw_source source;

    (void)asked;
    source.state = 1;
    for (i = 0; i < N_DRAWS; i++) {
        int64_t length = draw_lmsys(&source);
        if (length > longest) longest = length;
        for (j = 0; j < N_SHARES; j++) below[j] += length < shares[j].below;
    }
    puts("Lengths of LMSys-Chat-1M, and of what `chunkflow gen lmsys` draws (per cent of sequences)\n");
    printf("%14s %10s %10s %12s\n", "tokens", "paper", "drawn", "difference");
    for (j = 0; j < N_SHARES; j++) {
        double share = 100 * (double)below[j] / N_DRAWS;
        printf("%6s %7s %10.3f %10.3f %+12.3f\n", "below", cli_commas(shares[j].below), shares[j].paper, share,
               share - shares[j].paper);
    }
    printf("%14s %10s %10s\n", "longest", "303K", cli_commas(longest));
    puts("\nassumptions\n"
         "  A million draws, seed 1. The shares are what the generator was given, so they agree by construction;\n"
         "  within a bucket, lengths are uniform in the logarithm, from 16 tokens on, which the paper does not say.");
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   End-to-end speedups
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct setting {
    const char *model;
    int64_t context, tp, pp;
    cf_recompute recompute; /* of Megatron-LM; chunks take `selective` everywhere */
    double paper;
} setting;

static const setting settings[] = {
    {"qwen2.5-7b", CONTEXT_SHORT, 4, 1, CF_RECOMPUTE_SELECTIVE, 2.38},
    {"qwen2.5-7b", CONTEXT_LONG, 4, 4, CF_RECOMPUTE_FULL, 4.53},
    {"qwen2.5-14b", CONTEXT_LONG, 4, 4, CF_RECOMPUTE_FULL, 3.76},
    {"qwen2.5-32b", CONTEXT_LONG, 4, 4, CF_RECOMPUTE_FULL, 3.21},
    {"qwen2.5-72b", CONTEXT_LONG, 8, 4, CF_RECOMPUTE_SELECTIVE, 1.67},
};

static const double launches[] = {5e-6, 20e-6, 40e-6};
enum { N_LAUNCHES = sizeof launches / sizeof launches[0] };

/* Adds the seconds of the fastest candidate. */
static int add_fastest(const int64_t *lengths, const cf_tune_desc *desc, double *sum) {
    cf_tuning *tuning = NULL;
    cf_error error;

    if (cf_tune(lengths, BATCH, desc, &tuning, &error) != CF_OK) return cli_error(&error, NULL);
    if (tuning->winner >= 0) *sum += tuning->candidates[tuning->winner].seconds;
    else *sum = INFINITY;
    cf_tuning_free(tuning);
    return CLI_OK;
}

/* Whole sequences, one a micro-batch. */
static int add_unsplit(const setting *at, const cf_gpu *gpu, const int64_t *lengths, double *sum) {
    static const int64_t k = 1;
    static const cf_schedule_kind kind = CF_SCHEDULE_1F1B;
    static const cf_replay replay = CF_REPLAY_PIPELINE;
    cf_tune_desc desc = tune_desc(at->model, gpu, at->tp, at->pp, at->recompute);

    desc.pack.max_slices = 1;
    desc.chunk_sizes = &at->context;
    desc.ks = &k;
    desc.kinds = &kind;
    desc.replays = &replay;
    desc.n_chunk_sizes = desc.n_ks = desc.n_kinds = desc.n_replays = desc.n_exact = 1;
    return add_fastest(lengths, &desc, sum);
}

static int add_chunked(const setting *at, const cf_gpu *gpu, cf_schedule_kind kind, const int64_t *lengths,
                       double *sum) {
    static const int64_t chunk_sizes[] = {2048, 4096, 8192, 16384, 32768}, ks[] = {1, 2, 4, 8, 16};
    cf_tune_desc desc = tune_desc(at->model, gpu, at->tp, at->pp, CF_RECOMPUTE_SELECTIVE);

    desc.limit_bytes = gpu->memory;
    desc.chunk_sizes = chunk_sizes;
    desc.ks = ks;
    desc.kinds = &kind;
    desc.n_chunk_sizes = desc.n_ks = 5;
    desc.n_kinds = desc.n_exact = 1;
    return add_fastest(lengths, &desc, sum);
}

/* ratios: with the paper's schedule, with the best. */
static int find_speedups(const setting *at, double launch, const reproduce_options *asked, double ratios[2]) {
    cf_gpu gpu = gpu_with_launch(launch);
    double unsplit = 0, paper = 0, best = 0;
    int64_t lengths[BATCH], seed;
    int code = CLI_OK;

    progress_begin("reproducing");
    for (seed = 1; seed <= asked->batches && code == CLI_OK; seed++) {
        progress_set(seed - 1, asked->batches, at->model);
        draw_batch((uint64_t)seed, at->context, asked->with_longest, lengths);
        code = add_unsplit(at, &gpu, lengths, &unsplit);
        if (code == CLI_OK) code = add_chunked(at, &gpu, CF_SCHEDULE_PAPER, lengths, &paper);
        if (code == CLI_OK) code = add_chunked(at, &gpu, CF_SCHEDULE_BEST, lengths, &best);
    }
    progress_end();
    ratios[0] = unsplit / paper;
    ratios[1] = unsplit / best;
    return code;
}

static int print_speedups(const reproduce_options *asked) {
    size_t i, j;

    puts("Speedup over 1F1B on whole sequences with the paper's recomputation\n");
    printf("%-12s %8s %6s %-10s %6s   %-20s   %-20s\n", "", "", "", "its", "", "paper's schedule at", "best at");
    printf("%-12s %8s %6s %-10s %6s", "model", "context", "TP, PP", "recompute", "paper");
    for (i = 0; i < 2 * N_LAUNCHES; i++)
        printf("%s%4.0f us", i % N_LAUNCHES == 0 ? "   " : " ", 1e6 * launches[i % N_LAUNCHES]);
    putchar('\n');
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        const setting *at = &settings[i];
        double ratios[N_LAUNCHES][2];
        for (j = 0; j < N_LAUNCHES; j++) {
            int code = find_speedups(at, launches[j], asked, ratios[j]);
            if (code != CLI_OK) return code;
        }
        printf("%-12s %7lldK %3lld, %lld %-10s %6.2f", at->model, (long long)at->context / 1024, (long long)at->tp,
               (long long)at->pp, cf_recompute_name(at->recompute), at->paper);
        for (j = 0; j < 2 * N_LAUNCHES; j++)
            printf("%s%7.2f", j % N_LAUNCHES == 0 ? "   " : "", ratios[j % N_LAUNCHES][j / N_LAUNCHES]);
        putchar('\n');
        fflush(stdout);
    }
    printf("\nassumptions\n"
           "  %lld batch%s of %d sequences, drawn as for trade-off%s.\n"
           "  H100 numbers; the columns differ in the microseconds that are lost around each kernel, which the paper does\n"
           "  not give and on which these ratios depend most: a trainer in Python has 20 to 40. Chunks: selective\n"
           "  recompute, the fastest ChunkSize (2K to 32K), K (1 to 16) and form of replay within 80 GB, batch by batch.\n"
           "  All of it is a model; none was measured.\n",
           (long long)asked->batches, asked->batches == 1 ? "" : "es", BATCH,
           asked->with_longest ? ", the first of each as long as the context" : "; few have a long sequence");
    return CLI_OK;
}

/* ---------------------------------------------------------------------------------------------------------------- */

typedef struct topic {
    const char *name;
    int (*print)(const reproduce_options *asked);
} topic;

static const topic topics[] = {{"example", print_example},
                               {"peaks", print_peaks},
                               {"trade-off", print_trade_off},
                               {"lengths", print_lengths},
                               {"speedup", print_speedups}};
enum { N_TOPICS = sizeof topics / sizeof topics[0] };

static int run(const void *given, char **operands, int n_operands) {
    int found = 0, code = CLI_OK, i;

    for (i = 0; i < N_TOPICS; i++) found += n_operands > 0 && strcmp(operands[0], topics[i].name) == 0;
    if (n_operands > 0 && !found)
        return cli_usage("reproduce", "got '%s', wanted example, peaks, trade-off, lengths or speedup", operands[0]);
    for (i = 0; i < N_TOPICS && code == CLI_OK; i++) {
        if (found && strcmp(operands[0], topics[i].name) != 0) continue;
        if (!found && i > 0) puts("\n");
        code = topics[i].print((const reproduce_options *)given);
    }
    return code;
}

const cli_command cmd_reproduce = {
    .name = "reproduce", .operands = "[example|peaks|trade-off|lengths|speedup]", .max_operands = 1,
    .summary = "the ChunkFlow paper's numbers beside what models and schedules here give",
    .details =
    "  example                 bubbles of the worked example, Figures 2 and 6\n"
    "  peaks                   peak memory of 7B by ChunkSize and context\n"
    "  trade-off               ChunkSize x K at a constant product, 7B at 256K\n"
    "  lengths                 shares of LMSys-Chat-1M\n"
    "  speedup                 7B to 72B against 1F1B on whole sequences, by the cost of a kernel's launch\n\n"
    "Without one, all of them. Each table ends with what was assumed; nothing is fitted but what it names. Left out is\n"
    "that sequences below 32K run 65 % slower on 16 GPUs than on 4: what was held equal there is not known.\n",
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
