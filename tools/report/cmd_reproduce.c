/* cmd_reproduce.c - chunkflow reproduce: compares the ChunkFlow paper's numbers with those of the models and schedules
   here.

   The paper is arXiv 2503.02356 (ICML 2025). Its numbers are quoted as published; nothing is fitted to them unless a
   note says so. */

#include "report.h"
#include "../command/draw.h"
#include "../command/modelling.h"
#include "../command/progress.h"
#include "../command/sheet.h"
#include "../command/table.h"
#include "../chunkflow_tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { N_DRAWS = 1000000, BATCH = 256, CONTEXT_SHORT = 32768, CONTEXT_LONG = 262144 };

typedef struct reproduce_options {
    int64_t batches;
    int with_longest;
    int tsv;
    const char *json, *html;
} reproduce_options;

static const reproduce_options defaults = {.batches = 8};

static const cli_option options[] = {
    {.name = "--batches", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(reproduce_options, batches), .min = 1,
     .max = 64, .help = "speedup: random batches whose times are added up; default 8"},
    {.name = "--with-longest", .kind = CLI_FLAG, .offset = offsetof(reproduce_options, with_longest),
     .help = "speedup: put a sequence as long as the context in each batch,\nwhich is rare in this distribution"},
    TABLE_OPTION(reproduce_options, tsv, "the rows of one table"),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(reproduce_options, json),
     .help = "write everything as JSON; with - nothing else is printed"},
    {.name = "--html", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(reproduce_options, html),
     .help = "write a page with the tables and charts; it loads nothing"},
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
    char mark;
} example;

static const example examples[] = {
    {"1F1B, sequences of equal length", {2, 2, 2, 2}, 2, 1, 1, 42.8, ' '},
    {"1F1B, 1, 1, 2 and 4 units", {1, 1, 2, 4}, 4, 1, 1, 57.14, ' '},
    {"ChunkSize 4, K = 1", {1, 1, 2, 4}, 4, 1, 0, 60.0, ' '},
    {"ChunkSize 2, K = 1", {1, 1, 2, 4}, 2, 1, 0, 54.1, '*'},
    {"ChunkSize 2, K = 2", {1, 1, 2, 4}, 2, 2, 0, 47.8, ' '},
};

/* Computes the percentage of the four stages' time without useful work; a replay is not useful. */
static int example_bubble(const example *e, cf_schedule_kind kind, cf_replay replay, double *bubble) {
    cf_pack_desc pack;
    cf_schedule_desc order;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    cf_result result;

    memset(&pack, 0, sizeof pack);
    memset(&order, 0, sizeof order);
    pack.chunk_size = e->chunk_size;
    pack.max_slices = e->unsplit;
    pack.no_tails = 1;
    order.shape.n_stages = 4;
    order.kind = kind;
    order.shape.replay = replay;
    order.shape.k = e->k;
    result = cf_pack(e->lengths, 4, &pack, &plan, &error);
    if (result == CF_OK) result = cf_schedule_make(plan, &order, &schedule, &error);
    if (result == CF_OK) result = cf_simulate(plan, schedule, NULL, &timeline, &error);
    if (result == CF_OK) *bubble = 100 * timeline->bubble_useful;
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return result == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

static int fill_example(const reproduce_options *asked, sheet *s) {
    static const sheet_column columns[] = {
        {.key = "case", .title = "", .left = 1},
        {.key = "paper", .title = "paper", .digits = 2},
        {.key = "order", .title = "paper's order", .digits = 2},
        {.key = "residual", .title = "difference", .digits = 2, .sign = 1},
        {.key = "best", .title = "best", .digits = 2}};
    size_t i;

    (void)asked;
    sheet_begin(s, "Bubbles of the worked example, 4 stages, F = length, B = 2 x length (per cent; a replay is waste)",
                columns, sizeof columns / sizeof columns[0]);
    for (i = 0; i < sizeof examples / sizeof examples[0]; i++) {
        const example *e = &examples[i];
        double order = 0, best = 0;
        int code = e->unsplit ? example_bubble(e, CF_SCHEDULE_1F1B, CF_REPLAY_LOCAL, &order) /* replays nothing */
                              : example_bubble(e, CF_SCHEDULE_PAPER, CF_REPLAY_PIPELINE, &order);
        if (code == CLI_OK) code = example_bubble(e, CF_SCHEDULE_BEST, CF_REPLAY_LOCAL, &best);
        if (code != CLI_OK) return code;
        {
            sheet_cell cells[5] = {sheet_text(e->text), sheet_marked(e->paper, 2, e->mark), sheet_number(order),
                                   sheet_number(order - e->paper), sheet_number(best)};
            sheet_row(s, cells);
        }
    }
    return sheet_end(s,
         "assumptions\n"
         "  `paper's order` replays through the whole pipeline; `best` is the default: local replay, and on stage s "
         "at\n"
         "  most min(K, 2) + 3 - s chunks kept. Both are orders of their own where the paper's is not printed in "
         "full:\n"
         "  its K = 2 makespan is 46 units, and 42 is the bound. *: what the 54.1 counts cannot be recovered; 24 of "
         "52\n"
         "  units would be 53.8 %, and no order that keeps one chunk and replays through the pipeline is below 50 "
         "units.");
}

/* ----------------------------------------------------------------------------------------------------------------
   Peak memory of 7B
   ---------------------------------------------------------------------------------------------------------------- */

/* A measurement of Qwen2.5-7B, <TP 4, SP 4, PP 1, selective>, four GPUs. context 0: plain training of one sequence of
   `chunk` tokens. */
typedef struct measurement {
    int64_t chunk, context;
    double gib;
} measurement;

static const measurement measurements[] = {{2048, 32768, 41.6},  {4096, 32768, 47.5},  {8192, 32768, 59.3},
                                           {2048, 262144, 45.6}, {4096, 262144, 50.8}, {8192, 262144, 63.8},
                                           {32768, 0, 75.0}};

/* Models a measurement. live: chunks with activations at the peak. */
static int model_measurement(const measurement *at, int64_t live, cf_memory_report *memory) {
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
    return cf_memory_estimate(&desc, &load, 1, memory, 1, &error) == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

/* Computes the share of a million conversations, without those of more than 32K, whose plain training stays below
   `gib`. */
static int share_below(double gib, double *share) {
    measurement at = {0, 0, 0};
    cf_memory_report memory;
    draw_source source;
    int64_t low = 0, high = 32768, below = 0, n = 0, i;
    int code = CLI_OK;

    while (code == CLI_OK && high - low > 1) {
        at.chunk = low + (high - low) / 2;
        code = model_measurement(&at, 1, &memory);
        if (modelling_gib(memory.total) < gib) low = at.chunk;
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

/* Draws memory against the longest sequence: it is flat with chunks, but not with whole sequences. */
static int draw_peaks(sheet *s) {
    static const int64_t longest[] = {4096, 8192, 16384, 32768, 65536, 131072, 262144}, sizes[] = {2048, 4096, 8192, 0};
    enum { N_LONGEST = sizeof longest / sizeof longest[0], N_SIZES = sizeof sizes / sizeof sizes[0] };
    int i, j;

    sheet_axes(s, "longest sequence, tokens", "GiB");
    for (i = 0; i < N_SIZES; i++) {
        double x[N_LONGEST], y[N_LONGEST];
        char name[SHEET_TEXT] = "whole sequences";
        int n = 0;
        for (j = 0; j < N_LONGEST; j++) {
            measurement at = {sizes[i] ? sizes[i] : longest[j], sizes[i] ? longest[j] : 0, 0};
            cf_memory_report memory;
            if (longest[j] < at.chunk) continue;
            if (model_measurement(&at, 2, &memory) != CLI_OK) return CLI_FAILED;
            x[n] = (double)longest[j];
            y[n++] = modelling_gib(memory.total);
        }
        if (sizes[i]) snprintf(name, sizeof name, "ChunkSize %s", cli_commas(sizes[i]));
        sheet_add_series(s, "Peak memory", sizes[i] ? "ours" : "unsplit", name, n, x, y);
    }
    for (i = 0; i < (int)(sizeof measurements / sizeof measurements[0]); i++) {
        const measurement *at = &measurements[i];
        double x = (double)(at->context > 0 ? at->context : at->chunk);
        char name[SHEET_TEXT];
        snprintf(name, sizeof name, at->context > 0 ? "measured, ChunkSize "
                                                      "%s" : "measured, plain", cli_commas(at->chunk));
        sheet_add_series(s, "Peak memory", "paper", name, 1, &x, &at->gib);
    }
    return CLI_OK;
}

static int fill_peak_row(const measurement *at, sheet *s, double *worst) {
    cf_memory_report two, one;
    double residual;
    int code = model_measurement(at, 2, &two);

    if (code == CLI_OK) code = model_measurement(at, 1, &one);
    if (code != CLI_OK) return code;
    residual = 100 * (modelling_gib(two.total) / at->gib - 1);
    if (residual * residual > *worst * *worst) *worst = residual;
    {
        sheet_cell cells[6] = {at->context > 0 ? sheet_count(at->chunk) : sheet_text("plain"),
                               sheet_count(at->context > 0 ? at->context : at->chunk), sheet_number(at->gib),
                               sheet_number(modelling_gib(two.total)), sheet_number(residual),
                               sheet_number(modelling_gib(one.total))};
        sheet_row(s, cells);
    }
    return CLI_OK;
}

static sheet_cell percent(double value, const char *format) {
    sheet_cell cell = sheet_number(value);

    snprintf(cell.text, sizeof cell.text, format, value);
    return cell;
}

static int fill_peaks(const reproduce_options *asked, sheet *s) {
    static const sheet_column columns[] = {
        {.key = "chunk_size", .title = "ChunkSize"},
        {.key = "context", .title = "context", .key_of_rows = 1},
        {.key = "paper", .title = "measured", .digits = 1},
        {.key = "model", .title = "model", .digits = 2},
        {.key = "residual", .title = "residual", .digits = 1, .sign = 1, .suffix = "%"},
        {.key = "one_live", .title = "one chunk live", .digits = 2}};
    double worst = 0, share = 0;
    size_t i;

    (void)asked;
    sheet_begin(s, "Peak memory of Qwen2.5-7B, tensor and sequence parallel 4, no pipeline, selective recompute, K = "
                   "1 (GiB)",
                columns, sizeof columns / sizeof columns[0]);
    for (i = 0; i < sizeof measurements / sizeof measurements[0]; i++) {
        int code = fill_peak_row(&measurements[i], s, &worst);
        if (code != CLI_OK) return code;
    }
    if (share_below(45, &share) != CLI_OK || draw_peaks(s) != CLI_OK) return CLI_FAILED;
    sheet_note(s, "largest residual", sheet_text(""), percent(worst, "%+.1f %%"));
    sheet_note(s, "plain, below 45", percent(97.7, "%.1f %% of micro-steps"), percent(share, "%.1f %%"));
    return sheet_end(s,
         "assumptions, the same for every line\n"
         "  18 bytes a parameter (bf16, float gradients, master copy and Adam; four GPUs, so nothing to divide over);\n"
         "  fused attention, norms and SwiGLU; a loss that works on bf16 logits in place; K and V in bf16; 2 GiB for\n"
         "  the runtime and 10 % of what comes and goes lost in gaps. Chunked: the peak is the last chunk's forward,\n"
         "  with the state of the whole sequence, no state gradient yet, and two chunks' activations: its own, and\n"
         "  those of the chunk before it, which is dropped only when the next loss takes its place. The two are\n"
         "  inferred from the slope of the measurements (2.95 MiB a token, against at most 1.3 in plain training);\n"
         "  the last column shows the model with one. Plain: Figure 1 of the paper, given as 75 GB; read as GiB here.");
}

/* ----------------------------------------------------------------------------------------------------------------
   Batches, and what an iteration takes
   ---------------------------------------------------------------------------------------------------------------- */

/* Draws a batch of conversations of at most `context` tokens. with_longest: the first one has exactly that length. */
static void draw_batch(uint64_t seed, int64_t context, int with_longest, int64_t lengths[BATCH]) {
    draw_source source;
    int64_t i;

    source.state = seed;
    for (i = 0; i < BATCH; i++)
        do lengths[i] = draw_lmsys(&source);
        while (lengths[i] > context);
    if (with_longest) lengths[0] = context;
}

/* Returns H100 numbers, because the paper does not give its GPUs' rates. */
static cf_gpu gpu_with_launch(double launch) {
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    gpu.launch = launch;
    return gpu;
}

/* Returns the description from which all searches here start. It has no memory limit, because memory is not compared
   here. *gpu must outlive it. */
static cf_tune_desc tune_desc(const char *model, const cf_gpu *gpu, int64_t tp, int64_t pp, cf_recompute recompute) {
    cf_tune_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.model = cf_model_find(model);
    desc.gpu = gpu;
    desc.parallel.tp = tp;
    desc.parallel.pp = pp;
    desc.parallel.recompute = recompute;
    desc.limit_bytes = (int64_t)1 << 40;
    desc.tolerance = -1; /* the paper's table has the fastest settings */
    desc.pack.no_tails = 1;
    desc.no_stream = desc.no_outputs = 1;
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
    static const cf_replay replays[] = {CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL};
    cf_tune_desc desc = tune_desc("qwen2.5-7b", gpu, 4, 4, CF_RECOMPUTE_SELECTIVE);
    int64_t lengths[BATCH], i, j;
    cf_tuning *tuning = NULL;
    cf_error error;
    cf_result result;

    draw_batch(seed, CONTEXT_LONG, 1, lengths);
    desc.chunk_sizes = chunk_sizes;
    desc.ks = ks;
    desc.kinds = &kind;
    desc.replays = replays;
    desc.n_chunk_sizes = desc.n_ks = TRADE_OFFS;
    desc.n_kinds = 1;
    desc.n_replays = 2;
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

static void draw_trade_off(sheet *s, double sums[2][TRADE_OFFS]) {
    double x[TRADE_OFFS], y[3][TRADE_OFFS];
    int i;

    for (i = 0; i < TRADE_OFFS; i++) {
        x[i] = (double)trade_offs[i].chunk_size;
        y[0][i] = trade_offs[i].paper / trade_offs[1].paper;
        y[1][i] = sums[1][i] / sums[1][1];
        y[2][i] = sums[0][i] / sums[0][1];
    }
    sheet_axes(s, "ChunkSize, with K = 32K / ChunkSize", "time, of that at 8K");
    sheet_add_series(s, "Time of an iteration", "paper", "paper", TRADE_OFFS, x, y[0]);
    sheet_add_series(s, "Time of an iteration", "ours", "local replay", TRADE_OFFS, x, y[1]);
    sheet_add_series(s, "Time of an iteration", "best", "pipeline replay", TRADE_OFFS, x, y[2]);
}

static void fill_trade_off_rows(sheet *s, double sums[2][TRADE_OFFS]) {
    int i;

    for (i = 0; i < TRADE_OFFS; i++) {
        const trade_off *at = &trade_offs[i];
        sheet_cell cells[8] = {sheet_count(at->chunk_size), sheet_count(at->k), sheet_number(at->paper),
                               sheet_number(at->paper / trade_offs[1].paper),
                               sheet_number(1e3 * sums[1][i] / TRADE_BATCHES), sheet_number(sums[1][i] / sums[1][1]),
                               sheet_number(1e3 * sums[0][i] / TRADE_BATCHES), sheet_number(sums[0][i] / sums[0][1])};
        sheet_row(s, cells);
    }
}

static int fill_trade_off(const reproduce_options *asked, sheet *s) {
    static const sheet_column columns[] = {
        {.key = "chunk_size", .title = "ChunkSize"},
        {.key = "k", .title = "K"},
        {.key = "paper", .title = "paper"},
        {.key = "paper_ratio", .title = "ratio", .digits = 3},
        {.key = "local", .title = "local replay"},
        {.key = "local_ratio", .title = "ratio", .digits = 3},
        {.key = "pipeline", .title = "pipeline replay"},
        {.key = "pipeline_ratio", .title = "ratio", .digits = 3}};
    double sums[2][TRADE_OFFS] = {{0, 0, 0}, {0, 0, 0}};
    cf_gpu gpu = gpu_with_launch(40e-6);
    char text[2048];
    int i, code = CLI_OK;

    (void)asked;
    for (i = 0; i < TRADE_BATCHES && code == CLI_OK; i++) code = simulate_trade_off((uint64_t)i + 1, &gpu, sums);
    if (code != CLI_OK) return code;
    sheet_begin(s, "Qwen2.5-7B, 256K context, tensor and sequence parallel 4, pipeline 4, ChunkSize x K = 32K: ms an "
                   "iteration",
                columns, sizeof columns / sizeof columns[0]);
    fill_trade_off_rows(s, sums);
    draw_trade_off(s, sums);
    snprintf(text, sizeof text,
           "assumptions\n"
           "  %d batches of %d sequences: lengths like those of LMSys-Chat-1M (chunkflow gen lmsys, seeds 1 to %d, "
           "none\n"
           "  longer than 256K), the first of each batch 256K long; without it, most batches have no long sequence.\n"
           "  The paper's schedule and packing (no tails filled), selective recompute, bf16. H100 numbers (the paper\n"
           "  does not give its GPUs' rates), 40 microseconds lost around each kernel: a trainer in Python. With 30 "
           "or\n"
           "  less, (8K,4) stays best but (32K,1) becomes the worst. Replays without communication (local) give the\n"
           "  paper's order; if they run through the whole pipeline again, (32K,1), which replays seven of eight "
           "chunks\n"
           "  one by one, is worst by far. Absolute times depend on the batches, of which the paper gives no more "
           "than\n"
           "  their distribution: compare ratios.",
           TRADE_BATCHES, BATCH, TRADE_BATCHES);
    return sheet_end(s, text);
}

/* ----------------------------------------------------------------------------------------------------------------
   Lengths
   ---------------------------------------------------------------------------------------------------------------- */

static int fill_lengths(const reproduce_options *asked, sheet *s) {
    static const struct { int64_t below; double paper; } shares[] = {
        {1024, 90.499}, {4096, 99.539}, {8192, 99.908}, {32768, 99.987}, {131072, 99.996}};
    static const sheet_column columns[] = {
        {.key = "tokens", .title = "tokens"},
        {.key = "paper", .title = "paper", .digits = 3},
        {.key = "drawn", .title = "drawn", .digits = 3},
        {.key = "residual", .title = "difference", .digits = 3, .sign = 1}};
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
    sheet_begin(s, "Lengths of LMSys-Chat-1M, and of what `chunkflow gen lmsys` draws (per cent of sequences)", columns,
                sizeof columns / sizeof columns[0]);
    for (j = 0; j <= N_SHARES; j++) {
        char text[SHEET_TEXT] = "longest";
        double share = j < N_SHARES ? 100 * (double)below[j] / N_DRAWS : 0, paper = j < N_SHARES ? shares[j].paper : 0;
        if (j < N_SHARES) snprintf(text, sizeof text, "below %7s", cli_commas(shares[j].below));
        {
            sheet_cell cells[4] = {sheet_text(text), j < N_SHARES ? sheet_number(paper) : sheet_text("303K"),
                                   j < N_SHARES ? sheet_number(share) : sheet_count(longest),
                                   j < N_SHARES ? sheet_number(share - paper) : sheet_text("")};
            sheet_row(s, cells);
        }
    }
    return sheet_end(s,
         "assumptions\n"
         "  A million draws, seed 1. The shares are what the generator was given, so they agree by construction;\n"
         "  within a bucket, lengths are uniform in the logarithm, from 16 tokens on, which the paper does not say.");
}

/* ----------------------------------------------------------------------------------------------------------------
   End-to-end speedups
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct setting {
    const char *model;
    int64_t context, tp, pp;
    cf_recompute recompute; /* Megatron-LM's; chunks take `selective` everywhere */
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
    cf_tune_desc desc = tune_desc(at->model, gpu, at->tp, at->pp, at->recompute);

    baseline_take_form(&desc, 0, &at->context);
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

/* Computes the speedups. ratios: with the paper's schedule, with the best. */
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

/* Draws one model's chart: the ratios against the cost of a launch, and the paper's ratio, for which no launch cost is
   given. */
static void draw_speedup(sheet *s, const setting *at, double ratios[N_LAUNCHES][2]) {
    double x[N_LAUNCHES], y[3][N_LAUNCHES];
    char chart[SHEET_TEXT];
    int i;

    for (i = 0; i < N_LAUNCHES; i++) {
        x[i] = 1e6 * launches[i];
        y[0][i] = at->paper;
        y[1][i] = ratios[i][0];
        y[2][i] = ratios[i][1];
    }
    snprintf(chart, sizeof chart, "%s, %lldK", at->model, (long long)at->context / 1024);
    sheet_add_series(s, chart, "paper", "paper", N_LAUNCHES, x, y[0]);
    sheet_add_series(s, chart, "ours", "paper's schedule", N_LAUNCHES, x, y[1]);
    sheet_add_series(s, chart, "best", "best", N_LAUNCHES, x, y[2]);
}

static int fill_speedup_row(const reproduce_options *asked, const setting *at, sheet *s) {
    double ratios[N_LAUNCHES][2];
    sheet_cell cells[5 + 2 * N_LAUNCHES + 1];
    char text[SHEET_TEXT];
    int i;

    for (i = 0; i < N_LAUNCHES; i++) {
        int code = find_speedups(at, launches[i], asked, ratios[i]);
        if (code != CLI_OK) return code;
    }
    cells[0] = sheet_text(at->model);
    snprintf(text, sizeof text, "%lldK", (long long)at->context / 1024);
    cells[1] = sheet_text(text);
    snprintf(text, sizeof text, "%lld, %lld", (long long)at->tp, (long long)at->pp);
    cells[2] = sheet_text(text);
    cells[3] = sheet_text(cf_recompute_name(at->recompute));
    cells[4] = sheet_number(at->paper);
    for (i = 0; i < 2 * N_LAUNCHES; i++) cells[5 + i] = sheet_number(ratios[i % N_LAUNCHES][i / N_LAUNCHES]);
    cells[5 + i] = sheet_number(100 * (ratios[1][0] / at->paper - 1));
    sheet_row(s, cells);
    draw_speedup(s, at, ratios);
    return CLI_OK;
}

static int fill_speedups(const reproduce_options *asked, sheet *s) {
    static const sheet_column columns[] = {
        {.key = "model", .title = "model", .left = 1},
        {.key = "context", .title = "context", .key_of_rows = 1},
        {.key = "split", .title = "TP, PP"},
        {.key = "recompute", .group = "its", .title = "recompute", .left = 1},
        {.key = "paper", .title = "paper", .group = "", .digits = 2},
        {.key = "order_5us", .group = "paper's schedule at", .title = "5 us", .heading = "order, 5 us", .digits = 2},
        {.key = "order_20us", .title = "20 us", .heading = "order, 20 us", .digits = 2},
        {.key = "order_40us", .title = "40 us", .heading = "order, 40 us", .digits = 2},
        {.key = "best_5us", .group = "best at", .title = "5 us", .heading = "best, 5 us", .digits = 2},
        {.key = "best_20us", .title = "20 us", .heading = "best, 20 us", .digits = 2},
        {.key = "best_40us", .title = "40 us", .heading = "best, 40 us", .digits = 2},
        {.key = "residual", .group = "paper's schedule", .title = "at 20 us, off",
         .heading = "order off, 20 us", .digits = 1, .sign = 1, .suffix = "%"}};
    char text[2048];
    size_t i;

    sheet_begin(s, "Speedup over 1F1B on whole sequences with the paper's recomputation", columns,
                sizeof columns / sizeof columns[0]);
    sheet_axes(s, "microseconds lost around a kernel", "times as fast");
    for (i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        int code = fill_speedup_row(asked, &settings[i], s);
        if (code != CLI_OK) return code;
    }
    snprintf(text, sizeof text,
           "assumptions\n"
           "  %lld batch%s of %d sequences, drawn as for trade-off%s.\n"
           "  H100 numbers; the columns differ in the microseconds that are lost around each kernel, which the paper "
           "does\n"
           "  not give and on which these ratios depend most: a trainer in Python has 20 to 40. Chunks: selective\n"
           "  recompute, the fastest ChunkSize (2K to 32K), K (1 to 16) and form of replay within 80 GB, batch by "
           "batch.\n"
           "  All of it is a model; none was measured.",
           (long long)asked->batches, asked->batches == 1 ? "" : "es", BATCH,
           asked->with_longest ? ", the first of each as long as the context" : "; few have a long sequence");
    return sheet_end(s, text);
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct topic {
    const char *name;
    int (*fill)(const reproduce_options *asked, sheet *s);
} topic;

static const topic topics[] = {{"example", fill_example},
                               {"peaks", fill_peaks},
                               {"trade-off", fill_trade_off},
                               {"lengths", fill_lengths},
                               {"speedup", fill_speedups}};
enum { N_TOPICS = sizeof topics / sizeof topics[0] };

/* The requested topics, filled in. */
typedef struct reproduction {
    const reproduce_options *asked;
    sheet sheets[N_TOPICS];
    int n;
} reproduction;

static int fill_sheets(reproduction *r, const char *name, int prints) {
    int code = CLI_OK, i;

    for (i = 0; i < N_TOPICS && code == CLI_OK; i++) {
        sheet *s = &r->sheets[r->n];
        if (name && strcmp(name, topics[i].name) != 0) continue;
        s->name = topics[i].name;
        s->prints = prints;
        if (prints && r->n > 0) puts("\n");
        code = topics[i].fill(r->asked, s);
        r->n++;
    }
    return code;
}

/* Writes JSON, which is also the data of a page. */
static void write_json(const void *of, cli_output *to) {
    const reproduction *r = (const reproduction *)of;
    json_writer w;
    int i;

    json_write_begin(&w, to, "chunkflow-reproduction");
    json_integer_member(&w, "batches", r->asked->batches);
    json_bool_member(&w, "with_longest", r->asked->with_longest);
    json_open(&w, "sheets", '[');
    for (i = 0; i < r->n; i++) sheet_write(&w, &r->sheets[i]);
    json_close(&w, ']');
    json_write_end(&w);
}

static int reproduce(reproduction *r, const char *name) {
    report_data parts[REPORT_PAGE_PARTS] = {{0}};
    cli_output outputs[2] = {{0}, {0}};
    int code = cli_output_open(&outputs[0], r->asked->json);

    if (code == CLI_OK) code = cli_output_open(&outputs[1], r->asked->html);
    if (code == CLI_OK)
        code = fill_sheets(r, name, !r->asked->tsv && outputs[0].stream != stdout && outputs[1].stream != stdout);
    if (code == CLI_OK && r->asked->tsv) code = sheet_print_table(&r->sheets[0]);
    if (code == CLI_OK && outputs[0].stream) write_json(r, &outputs[0]);
    parts[REPORT_PAGE_REPRODUCTION].write = write_json;
    parts[REPORT_PAGE_REPRODUCTION].of = r;
    if (code == CLI_OK && outputs[1].stream) report_write_page(parts, &outputs[1]);
    return cli_outputs_finish(outputs, 2, code);
}

static int run(const void *given, char **operands, int n_operands) {
    const reproduce_options *asked = (const reproduce_options *)given;
    reproduction *r;
    int found = 0, code, i;

    for (i = 0; i < N_TOPICS; i++) found += n_operands > 0 && strcmp(operands[0], topics[i].name) == 0;
    if (n_operands > 0 && !found)
        return cli_usage("reproduce", "got '%s', wanted example, peaks, trade-off, lengths or speedup", operands[0]);
    if (asked->tsv && !found)
        return cli_usage("reproduce", "--tsv prints one table: example, peaks, trade-off, lengths or speedup");
    code = table_check("reproduce", asked->tsv, "--json", asked->json);
    if (code == CLI_OK) code = table_check("reproduce", asked->tsv, "--html", asked->html);
    if (code != CLI_OK) return code;
    if (asked->json && asked->html && strcmp(asked->json, asked->html) == 0)
        return cli_usage("reproduce", "--json and --html both name %s", asked->json);
    r = (reproduction *)calloc(1, sizeof *r);
    if (!r) return cli_failed("out of memory");
    r->asked = asked;
    code = reproduce(r, found ? operands[0] : NULL);
    free(r);
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
    "Without one, all of them. Each table ends with what was assumed; nothing is fitted but what it names. Left out "
    "is\n"
    "that sequences below 32K run 65 % slower on 16 GPUs than on 4: what was held equal there is not known.\n"
    "--html writes the same tables as a page, with charts.\n",
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
