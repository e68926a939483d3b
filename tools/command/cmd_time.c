/* cmd_time.c - chunkflow time: seconds of the passes, from a GPU's numbers or from measured samples. */

#include "modelling.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

typedef struct time_options {
    modelling_options modelling;
    gpu_options gpu;
    int64_t chunk_size, context;
    const char *fit;
    int64_t outputs, offload;
    int offload_checkpoints, tsv;
    const char *json;
} time_options;

static const time_options defaults = {.gpu = GPU_DEFAULTS};

static const cli_option options[] = {
    MODELLING_OPTIONS(time_options, modelling),
    GPU_OPTIONS(time_options, gpu, "required without --fit"),
    {.name = "--chunk-size", .alias = "--chunk-sizes", .value = "N",
     .kind = CLI_NUMBER, .offset = offsetof(time_options, chunk_size), .min = 1,
     .max = CF_MAX_CHUNK_SIZE, .help = "tokens of a chunk; required without --fit"},
    {.name = "--context", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(time_options, context), .min = 1,
     .max = CF_MAX_LENGTH, .help = "longest sequence: shows its last chunk too"},
    {.name = "--fit", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(time_options, fit),
     .help = "fit the three terms to measured samples instead"},
    OUTPUTS_OPTION(time_options, outputs),
    OFFLOAD_OPTIONS(time_options, offload, offload_checkpoints),
    TABLE_OPTION(time_options, tsv, "the terms"),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(time_options, json),
     .help = "write the terms as JSON; with - nothing else is printed"},
    {.name = NULL}};

static const cf_pass_cost *cost_of(const cf_stage_cost *cost, int pass) {
    switch (pass) {
    case CF_F: return &cost->forward;
    case CF_R: return &cost->replay;
    case CF_B: return &cost->backward;
    case CF_I: return &cost->input;
    default: return &cost->weight;
    }
}

static void write_pass(json_writer *w, int pass, const cf_pass_cost *cost) {
    json_open(w, cf_pass_name((cf_pass)pass), '{');
    json_number_member(w, "constant", cost->constant);
    json_number_member(w, "per_token", cost->per_token);
    json_number_member(w, "per_pair", cost->per_pair);
}

/* ----------------------------------------------------------------------------------------------------------------
   Measured samples
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct sample_list {
    cf_sample *samples;
    int64_t *lines; /* where each came from */
    int64_t n;
    size_t room, lines_room;
} sample_list;

static void free_samples(sample_list *list) {
    free(list->samples);
    free(list->lines);
}

static int add_sample(sample_list *list, const cf_sample *sample, int64_t line) {
    if ((size_t)list->n == list->room) {
        cf_sample *samples = (cf_sample *)cli_grow(list->samples, &list->room, sizeof *samples);
        if (!samples) return CLI_FAILED;
        list->samples = samples;
    }
    if ((size_t)list->n == list->lines_room) {
        int64_t *lines = (int64_t *)cli_grow(list->lines, &list->lines_room, sizeof *lines);
        if (!lines) return CLI_FAILED;
        list->lines = lines;
    }
    list->samples[list->n] = *sample;
    list->lines[list->n++] = line;
    return CLI_OK;
}

/* Returns the next word of a line, with its length in *n; length 0 at the end. */
static const char *next_word(const char *at, size_t *n) {
    at += strspn(at, " \t\r\n");
    *n = strcspn(at, " \t\r\n");
    return at;
}

static int parse_pass(const char *word, size_t n) {
    int pass;
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (n == 1 && *word == *cf_pass_name((cf_pass)pass)) return pass;
    return -1;
}

/* Parses "F 4096 8390656 0.0123"; returns 0 for anything else. */
static int parse_sample(const char *line, cf_sample *out) {
    size_t n;
    char *end;
    const char *word = next_word(line, &n);

    if ((out->pass = parse_pass(word, n)) < 0) return 0;
    word = next_word(word + n, &n);
    if (!cli_parse_number(word, n, &out->rows)) return 0;
    word = next_word(word + n, &n);
    if (!cli_parse_number(word, n, &out->pairs)) return 0;
    word = next_word(word + n, &n);
    if (n == 0 || !strchr("0123456789.", *word)) return 0;
    out->seconds = strtod(word, &end);
    if (end != word + n) return 0;
    (void)next_word(end, &n);
    return n == 0;
}

static int take_line(void *list, const char *path, int64_t number, const char *line) {
    size_t first;
    cf_sample sample;

    (void)next_word(line, &first);
    if (first == 0) return CLI_OK;
    if (!parse_sample(line, &sample))
        return cli_at_line(path, number, "wanted PASS ROWS PAIRS SECONDS, PASS one of F R B I W");
    return add_sample((sample_list *)list, &sample, number);
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the median of one pass's relative errors without their signs; -1 if there is no memory. */
static double median_error(const sample_list *list, int pass, const cf_pass_cost *cost) {
    double *errors = (double *)malloc((size_t)(list->n > 0 ? list->n : 1) * sizeof *errors), median = -1;
    int64_t i;
    size_t n = 0;

    if (!errors) return -1;
    for (i = 0; i < list->n; i++) {
        const cf_sample *s = &list->samples[i];
        double error = cf_cost_seconds(cost, s->rows, s->pairs) / s->seconds - 1;
        if (s->pass == pass) errors[n++] = error < 0 ? -error : error;
    }
    qsort(errors, n, sizeof *errors, compare_doubles);
    if (n > 0) median = n % 2 ? errors[n / 2] : (errors[n / 2 - 1] + errors[n / 2]) / 2;
    free(errors);
    return median;
}

static const table_column fit_columns[] = {
    {.heading = "pass", .name = "pass", .left = 1},
    {.heading = "samples", .name = "samples"},
    {.heading = "constant s", .name = "constant_s"},
    {.heading = "s a row", .name = "s_per_row"},
    {.heading = "s a pair", .name = "s_per_pair"},
    {.heading = "mean", .name = "mean_error", .decimals = 2, .scale = 100, .sign = 1, .suffix = "%"},
    {.heading = "absolute", .name = "mean_absolute_error", .decimals = 2, .scale = 100, .suffix = "%"},
    {.heading = "median", .name = "median_absolute_error", .decimals = 2, .scale = 100, .suffix = "%"},
    {.heading = "worst", .name = "worst_error", .decimals = 2, .scale = 100, .sign = 1, .suffix = "%"},
    {.heading = "in line", .name = "worst_line", .decimals = TABLE_PLAIN}};

static void add_fit(table *t, const sample_list *list, int pass, const cf_pass_cost *cost, const cf_fit *fit) {
    table_text(t, cf_pass_name((cf_pass)pass));
    table_integer(t, fit->n_samples);
    table_real(t, cost->constant);
    table_real(t, cost->per_token);
    table_real(t, cost->per_pair);
    table_real(t, fit->mean_error);
    table_real(t, fit->mean_absolute);
    table_real(t, median_error(list, pass, cost));
    table_real(t, fit->worst_error);
    table_integer(t, list->lines[fit->worst_sample]);
}

static int print_fit(const sample_list *list, const cf_stage_cost *cost, const cf_fit *fits, int tsv) {
    table t;
    int pass, code;

    if (!tsv) printf("samples           %s\n\n", cli_commas(list->n));
    table_begin(&t, fit_columns, (int)(sizeof fit_columns / sizeof fit_columns[0]), tsv, 0);
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (fits[pass].n_samples > 0) add_fit(&t, list, pass, cost_of(cost, pass), &fits[pass]);
    code = table_end(&t);
    if (!tsv) puts("\nErrors are predicted / measured - 1. A pass that was not measured follows from the others.");
    return code;
}

static void write_fit(cli_output *to, const cf_stage_cost *cost, const cf_fit *fits) {
    json_writer w;
    int pass;

    json_write_begin(&w, to, "chunkflow-fit");
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
        if (fits[pass].n_samples == 0) continue;
        write_pass(&w, pass, cost_of(cost, pass));
        json_integer_member(&w, "samples", fits[pass].n_samples);
        json_number_member(&w, "mean_error", fits[pass].mean_error);
        json_number_member(&w, "mean_absolute", fits[pass].mean_absolute);
        json_number_member(&w, "worst_error", fits[pass].worst_error);
        json_close(&w, '}');
    }
    json_write_end(&w);
}

static int fit_error(const sample_list *list, const char *path, const cf_error *error) {
    int about_pass = error->item >= 0 && error->item < CF_COMPUTE_PASS_COUNT;

    /* samples read from a file have known passes and no negative numbers, so only a single sample's seconds can be at
       fault */
    if (error->code == CF_ERROR_ARGUMENT && error->item >= 0 && strcmp(error->field, "samples.seconds") == 0)
        return cli_at_line(cli_input_name(path), list->lines[error->item], "%s", error->text);
    return cli_wrong("%s: %s%s%s", cli_input_name(path), about_pass ? cf_pass_name((cf_pass)error->item) : "",
                     about_pass ? ": " : "", error->text);
}

static int fit_samples(const time_options *asked) {
    sample_list list = {0};
    cli_output json = {0};
    cf_stage_cost cost;
    cf_fit fits[CF_COMPUTE_PASS_COUNT];
    cf_error error;
    int code = cli_lines_read(asked->fit, take_line, &list);

    if (code == CLI_OK && cf_cost_fit(list.samples, list.n, &cost, fits, &error) != CF_OK)
        code = fit_error(&list, asked->fit, &error);
    if (code == CLI_OK) {
        code = cli_output_open(&json, asked->json);
        if (code == CLI_OK && json.stream) write_fit(&json, &cost, fits);
        if (code == CLI_OK && json.stream != stdout) code = print_fit(&list, &cost, fits, asked->tsv);
        code = cli_outputs_finish(&json, 1, code);
    }
    free_samples(&list);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   From a GPU's numbers
   ---------------------------------------------------------------------------------------------------------------- */

static const table_column cost_columns[] = {
    {.heading = "stage"},
    {.name = "stage"},
    {.heading = "pass", .name = "pass", .left = 1, .key = 1},
    {.heading = "constant ms", .name = "constant_s", .decimals = 4, .scale = 1e3},
    {.heading = "us a row", .name = "s_per_row", .decimals = 5, .scale = 1e6},
    {.heading = "ns a pair", .name = "s_per_pair", .decimals = 6, .scale = 1e9},
    {.heading = "first chunk ms", .name = "first_chunk_s", .decimals = 3, .scale = 1e3},
    {.heading = "last chunk ms", .name = "last_chunk_s", .decimals = 3, .scale = 1e3}};
enum { COST_LAST = 7, COST_COLUMNS };

/* Adds the cost of a pass. People see a stage's number only once. */
static void add_cost(table *t, int64_t stage, int pass, const cf_pass_cost *p, const time_options *asked) {
    int64_t c = asked->chunk_size, prefix = asked->context > c ? asked->context - c : 0;
    char text[24] = "";

    if (pass == 0) snprintf(text, sizeof text, "%lld", (long long)stage);
    table_text(t, text);
    table_integer(t, stage);
    table_text(t, cf_pass_name((cf_pass)pass));
    table_real(t, p->constant);
    table_real(t, p->per_token);
    table_real(t, p->per_pair);
    table_real(t, cf_cost_seconds(p, c, cf_slice_pairs(0, c)));
    table_real(t, cf_cost_seconds(p, c, cf_slice_pairs(prefix, c)));
}

/* Prints the costs. People see up to four stages; if there are more, the first two and the last. */
static int print_costs(const time_options *asked, const cf_timing *timing, int64_t n) {
    table t;
    int64_t s;
    int pass;

    table_begin(&t, cost_columns, COST_COLUMNS, asked->tsv, 0);
    t.hidden = asked->context > asked->chunk_size ? 0 : 1u << COST_LAST;
    for (s = 0; s < n; s++)
        for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
            if (asked->tsv || n <= 4 || s < 2 || s == n - 1)
                add_cost(&t, s, pass, cost_of(&timing->stages[s], pass), asked);
    return table_end(&t);
}

/* Prints how long a forward and a backward of one chunk wait for the messages of ZeRO 2 and 3: the longest wait of each
   on any stage. */
static void print_exposed(const time_options *asked, const modelling *m, const cf_gpu *gpu, const cf_timing *timing) {
    int64_t n = m->parallel.pp * m->parallel.n_virtual, s;
    cf_stage_cost *without = (cf_stage_cost *)calloc((size_t)n, sizeof *without);
    cf_cost_desc desc = modelling_costs(m, gpu, &asked->gpu, asked->chunk_size);
    cf_timing unused;
    double f = 0, b = 0;

    desc.parallel.zero = 1;
    if (without && cf_cost_estimate(&desc, without, n, &unused, NULL, NULL) == CF_OK) {
        for (s = 0; s < n; s++) {
            double forward = timing->stages[s].forward.constant - without[s].forward.constant;
            double backward = timing->stages[s].backward.constant - without[s].backward.constant;
            if (forward > f) f = forward;
            if (backward > b) b = backward;
        }
        printf("exposed           F %.3f ms, B %.3f ms of what ZeRO %lld sends beside a pass; in the constants above\n",
               1e3 * f, 1e3 * b, (long long)m->parallel.zero);
    }
    free(without);
}

static int print_estimate(const time_options *asked, const modelling *m, const cf_gpu *gpu, const cf_timing *timing,
                          double step) {
    int64_t n = m->parallel.pp * m->parallel.n_virtual;
    int code;

    if (asked->tsv) return print_costs(asked, timing, n);
    modelling_print(m);
    printf("GPU               %s\n\n", gpu->name);
    code = print_costs(asked, timing, n);
    printf("\nstage to stage    %.1f us and %.5f us a row\n", 1e6 * timing->latency, 1e6 * timing->seconds_per_token);
    printf("once a step       %.3f ms: gradient exchange and optimizer\n", 1e3 * step);
    if (m->parallel.zero > 1 && m->parallel.dp > 1) print_exposed(asked, m, gpu, timing);
    return code;
}

static void write_estimate(cli_output *to, const time_options *asked, const modelling *m, const cf_gpu *gpu,
                           const cf_timing *timing, double step) {
    json_writer w;
    int64_t s;
    int pass;

    json_write_begin(&w, to, "chunkflow-time");
    modelling_write(&w, m);
    json_text_member(&w, "gpu", gpu->name);
    json_integer_member(&w, "chunk_size", asked->chunk_size);
    if (asked->outputs > 0) json_integer_member(&w, "outputs", 1);
    json_number_member(&w, "latency", timing->latency);
    json_number_member(&w, "seconds_per_token", timing->seconds_per_token);
    json_number_member(&w, "step_seconds", step);
    json_open(&w, "stages", '[');
    for (s = 0; s < m->parallel.pp * m->parallel.n_virtual; s++) {
        json_open(&w, NULL, '{');
        for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
            write_pass(&w, pass, cost_of(&timing->stages[s], pass));
            json_close(&w, '}');
        }
        json_close(&w, '}');
    }
    json_close(&w, ']');
    json_write_end(&w);
}

static int estimate(const time_options *asked, const modelling *m, const cf_gpu *gpu, cf_stage_cost *stages) {
    cli_output json = {0};
    cf_cost_desc desc = modelling_costs(m, gpu, &asked->gpu, asked->chunk_size);
    cf_timing timing;
    cf_error error;
    double step;
    int code;

    desc.outputs = (int)asked->outputs;
    desc.offload = modelling_offload(asked->offload, asked->offload_checkpoints);
    if (cf_cost_estimate(&desc, stages, m->parallel.pp * m->parallel.n_virtual, &timing, &step, &error) != CF_OK)
        return cli_error(&error, NULL);
    code = cli_output_open(&json, asked->json);
    if (code == CLI_OK && json.stream) write_estimate(&json, asked, m, gpu, &timing, step);
    if (code == CLI_OK && json.stream != stdout) code = print_estimate(asked, m, gpu, &timing, step);
    return cli_outputs_finish(&json, 1, code);
}

static int run(const void *given, char **operands, int n_operands) {
    const time_options *asked = (const time_options *)given;
    cf_gpu gpu;
    cf_stage_cost *stages;
    modelling m;
    int code;

    (void)operands;
    (void)n_operands;
    code = table_check("time", asked->tsv, "--json", asked->json);
    if (code != CLI_OK) return code;
    if (asked->fit) return fit_samples(asked);
    if (!asked->gpu.name) return cli_usage("time", "--gpu NAME or --fit FILE is missing");
    if (asked->chunk_size == 0) return cli_usage("time", "--chunk-size N is missing");
    if (asked->context > 0 && cf_slice_pairs(asked->context, asked->chunk_size) < 0)
        return cli_usage("time", "--context: so many pairs do not fit in 64 bits");
    code = modelling_take_gpu("time", &asked->gpu, &gpu);
    if (code == CLI_OK) code = modelling_make("time", &asked->modelling, &m);
    if (code != CLI_OK) return code;
    stages = (cf_stage_cost *)calloc((size_t)(m.parallel.pp * m.parallel.n_virtual), sizeof *stages);
    code = stages ? estimate(asked, &m, &gpu, stages) : cli_failed("out of memory");
    free(stages);
    modelling_free(&m);
    return code;
}

const cli_command cmd_time = {
    .name = "time", .operands = "", .min_operands = 0, .max_operands = 0,
    .summary = "say how long the passes of a chunk take",
    .details =
    "samples\n"
    "  a line for each measured pass: PASS ROWS PAIRS SECONDS, where PASS is F, R, B, I or W, ROWS counts the\n"
    "  tokens of the chunk, padding included, and PAIRS its attention pairs, prefix included. '#' starts a comment.\n"
    "  Each pass needs three samples at least, with sizes and prefixes that differ.\n"
    "\n" MODELLING_NAMES MODELLING_GPUS,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
