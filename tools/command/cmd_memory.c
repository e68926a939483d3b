/* cmd_memory.c - chunkflow memory: the memory that training needs on each GPU, term by term. */

#include "modelling.h"
#include "packing.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

typedef struct memory_options {
    modelling_options modelling;
    int64_t chunk_size, k, context, live;
    int local_replay;
    int64_t stream;
    term_options terms;
    int unfused_attention;
    const char *gpu, *fit;
    int64_t reserve;
    int tsv;
    const char *json;
} memory_options;

static const memory_options defaults = {.k = 1, .terms = TERM_DEFAULTS, .reserve = CF_TUNE_RESERVE};

static const cli_option options[] = {
    MODELLING_OPTIONS(memory_options, modelling),
    {.name = "--chunk-size", .alias = "--chunk-sizes", .value = "N",
     .kind = CLI_NUMBER, .offset = offsetof(memory_options, chunk_size),
     .min = 1, .max = CF_MAX_CHUNK_SIZE, .required = 1, .help = "most tokens in a chunk; required"},
    {.name = "--k", .alias = "--ks", .value = "K", .kind = CLI_NUMBER, .offset = offsetof(memory_options, k), .min = 1,
     .max = INT32_MAX, .help = "chunks of a chain that keep their activations; default 1"},
    {.name = "--context", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(memory_options, context), .min = 1,
     .max = CF_MAX_LENGTH, .help = "longest sequence; default one chunk, or what the list has"},
    {.name = "--live", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(memory_options, live), .min = 1,
     .max = INT32_MAX,
     .help = "chunks that keep their activations on every stage; default K,\n"
     "or as many as 1F1B has in flight there, if more"},
    {.name = "--local-replay", .kind = CLI_FLAG, .offset = offsetof(memory_options, local_replay),
     .help = "stages keep the inputs of dropped chunks, as with --outputs"},
    STREAM_OPTION(memory_options, stream),
    TERM_OPTIONS(memory_options, terms),
    {.name = "--unfused-attention", .kind = CLI_FLAG, .offset = offsetof(memory_options, unfused_attention),
     .help = "attention that writes out its scores"},
    {.name = "--gpu", .value = "NAME", .kind = CLI_TEXT, .offset = offsetof(memory_options, gpu),
     .help = "compare with this GPU's memory, less the reserve"},
    RESERVE_OPTION(memory_options, reserve),
    {.name = "--fit", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(memory_options, fit),
     .help = "take --runtime and --fragmentation from peaks that you measured\n"
     "with this model and split: a line each, CHUNK_SIZE K CONTEXT BYTES"},
    TABLE_OPTION(memory_options, tsv, "the terms, a line for each stage"),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(memory_options, json),
     .help = "write the report as JSON; with - nothing else is printed"},
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   What is held
   ---------------------------------------------------------------------------------------------------------------- */

/* State of the longest sequence, or of a tree's path with the most bytes. */
typedef struct memory_path {
    int64_t context;  /* tokens from the root to its end */
    int64_t chunks;   /* that they lie in */
    int64_t state;    /* tokens of state when the last chunk runs, and of their gradients */
    int64_t gradient;
} memory_path;

static memory_path path_of_context(const memory_options *asked) {
    int64_t context = asked->context > 0 ? asked->context : asked->chunk_size, c = asked->chunk_size;
    memory_path path = {context, context / c + (context % c != 0), 0, 0};

    if (path.chunks > 1) path.state = context;
    if (path.chunks > 1) path.gradient = context - c;
    return path;
}

/* Returns the path of a list's plan with the most bytes. In a tree, leaves add nothing to the state that they see, and
   share their path. */
static memory_path path_of_plan(const cf_plan *plan) {
    memory_path path = {0, 0, 0, 0};
    cf_plan_stats stats;
    int64_t i;

    cf_plan_measure(plan, NULL, &stats);
    path.context = stats.longest_sequence;
    path.chunks = stats.longest_chain > 0 ? stats.longest_chain : 1;
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *chunk = &plan->chunks[i];
        int64_t state = chunk->chain < 0 ? 0 : chunk->prefix + plan->chunks[i].state;
        if (state > path.state) path.state = state;
        if (chunk->chain >= 0 && chunk->prefix > path.gradient) path.gradient = chunk->prefix;
    }
    return path;
}

/* Guesses a load without a schedule. A stage of 1F1B that is `depth` from the end has that many chunks in flight; a
   path of more than K chunks keeps K. The load has the larger number. */
static cf_memory_load guess_load(const memory_options *asked, const memory_path *path, int64_t depth) {
    int64_t context = path->context, c = asked->chunk_size, kept = asked->k < path->chunks ? asked->k : path->chunks;
    cf_memory_load load;

    memset(&load, 0, sizeof load);
    if (kept < depth) kept = depth;
    if (asked->live > 0) kept = asked->live;
    load.live_tokens = kept * c;
    load.chunk_tokens = c;
    load.state_tokens = path->state;
    load.state_gradient_tokens = path->gradient;
    /* all chunks but the last K are dropped */
    if ((asked->local_replay || asked->terms.outputs > 0) && path->chunks > asked->k) {
        load.input_tokens = (path->chunks - asked->k) * c;
        if (load.input_tokens > path->state) load.input_tokens = path->state;
    }
    if (asked->unfused_attention) {
        load.chunk_scores = context < INT64_MAX / c ? c * context : INT64_MAX; /* the library refuses larger sums */
        load.live_scores = load.chunk_scores < INT64_MAX / kept ? kept * load.chunk_scores : INT64_MAX;
    }
    return load;
}

static int fill_desc(const memory_options *asked, const modelling *m, cf_memory_desc *desc) {
    memset(desc, 0, sizeof *desc);
    desc->model = &m->model;
    desc->parallel = m->parallel;
    desc->chunk_size = asked->chunk_size;
    modelling_take_terms(&asked->terms, desc);
    desc->unfused_attention = asked->unfused_attention;
    if (asked->context / asked->chunk_size >= INT32_MAX)
        return cli_usage("memory", "--context: more than %d chunks of --chunk-size", INT32_MAX);
    return modelling_take_stream("memory", asked->stream, desc);
}

/* ----------------------------------------------------------------------------------------------------------------
   Output
   ---------------------------------------------------------------------------------------------------------------- */

#define MOST_COLUMNS 8 /* with more stages than this, only the fullest one, first and last are shown */

static int64_t fullest_stage(const cf_memory_report *reports, int64_t n) {
    int64_t s, fullest = 0;
    for (s = 1; s < n; s++)
        if (reports[s].total > reports[fullest].total) fullest = s;
    return fullest;
}

static int is_shown(int64_t stage, int64_t n, int64_t fullest) {
    return n <= MOST_COLUMNS || stage == 0 || stage == n - 1 || stage == fullest;
}

static void add_term(table *t, const char *text, size_t offset, const cf_memory_report *reports, int64_t n) {
    int64_t s, value, fullest = fullest_stage(reports, n);

    table_text(t, text);
    for (s = 0; s < n; s++) {
        if (!is_shown(s, n, fullest)) continue;
        memcpy(&value, (const char *)&reports[s] + offset, sizeof value);
        table_real(t, modelling_gib(value));
    }
}

/* Prints a line per term, with stages as columns. */
static int print_terms(const cf_memory_report *reports, int64_t n) {
    table_column columns[1 + MOST_COLUMNS];
    char numbers[1 + MOST_COLUMNS][24];
    int64_t s, fullest = fullest_stage(reports, n);
    int n_columns = 1;
    table t;

    memset(columns, 0, sizeof columns);
    columns[0].heading = "GiB on each GPU, stage";
    columns[0].left = 1;
    for (s = 0; s < n; s++) {
        if (!is_shown(s, n, fullest)) continue;
        snprintf(numbers[n_columns], sizeof numbers[0], "%lld", (long long)s);
        columns[n_columns].heading = numbers[n_columns];
        columns[n_columns++].decimals = 3;
    }
    table_begin(&t, columns, n_columns, 0, 0);
#define ADD_TERM(name, text) add_term(&t, text, offsetof(cf_memory_report, name), reports, n);
    CF_MEMORY_TERMS(ADD_TERM)
#undef ADD_TERM
    add_term(&t, "total", offsetof(cf_memory_report, total), reports, n);
    if (reports[fullest].host > 0) add_term(&t, "in host memory", offsetof(cf_memory_report, host), reports, n);
    return table_end(&t);
}

static int print_reports(const cf_memory_report *reports, int64_t n) {
    int64_t fullest = fullest_stage(reports, n);
    int code;

    putchar('\n');
    code = print_terms(reports, n);
    printf("\npeak              stage %lld: %s bytes = %.2f GiB, %s\n", (long long)fullest,
           cli_commas(reports[fullest].total), modelling_gib(reports[fullest].total),
           reports[fullest].at_loss ? "at the loss" : "in a layer's backward");
    return code;
}

/* Prints the terms for scripts, with a line per stage. */
static int print_table(const cf_memory_report *reports, int64_t n) {
#define TERM_COLUMN(term, text) {.name = #term "_bytes"},
    static const table_column columns[] = {{.name = "stage"}, CF_MEMORY_TERMS(TERM_COLUMN) {.name = "total_bytes"},
                                           {.name = "host_bytes"}, {.name = "at_loss"}};
#undef TERM_COLUMN
    table t;
    int64_t s;

    table_begin(&t, columns, (int)(sizeof columns / sizeof columns[0]), 1, 0);
    for (s = 0; s < n; s++) {
        table_integer(&t, s);
#define ADD_TERM(name, text) table_integer(&t, reports[s].name);
        CF_MEMORY_TERMS(ADD_TERM)
#undef ADD_TERM
        table_integer(&t, reports[s].total);
        table_integer(&t, reports[s].host);
        table_integer(&t, reports[s].at_loss);
    }
    return table_end(&t);
}

/* Prints the bytes that windows and recurrent layers hand on, for the stage with most of them. Other models have
   none. */
static int print_borders(const cf_memory_desc *desc) {
    int64_t s, n = desc->parallel.pp * desc->parallel.n_virtual;
    cf_token_bytes bytes, most = {0};

    for (s = 0; s < n; s++)
        if (cf_memory_token_bytes(desc, s, &bytes, NULL) == CF_OK && bytes.border > most.border) most = bytes;
    if (most.border == 0) return CLI_OK;
    printf("\nof that state, %s bytes a border of two chunks (windows, snapshots), a part for each token; in backward, "
           "%s once\n", cli_commas(most.border), cli_commas(most.carry));
    return CLI_OK;
}

static int print_token_bytes(const cf_memory_desc *desc) {
    static const table_column columns[] = {
        {.heading = "stage"}, {.heading = "activations"}, {.heading = "state"},
        {.heading = "state gradient"}, {.heading = "boundary"}, {.heading = "dropped"},
        {.heading = "logits"}, {.heading = "working"}, {.heading = "buffers"}};
    int64_t s, n = desc->parallel.pp * desc->parallel.n_virtual;
    table t;

    puts("\nbytes a token");
    table_begin(&t, columns, (int)(sizeof columns / sizeof columns[0]), 0, 0);
    t.hidden = desc->outputs ? 0 : 1u << 5; /* without outputs these rows belong to a boundary */
    for (s = 0; s < n; s++) {
        cf_token_bytes bytes;
        if (n > MOST_COLUMNS && s > 1 && s < n - 1) continue;
        if (cf_memory_token_bytes(desc, s, &bytes, NULL) != CF_OK) break;
        table_integer(&t, s);
        table_integer(&t, bytes.activations);
        table_integer(&t, bytes.state);
        table_integer(&t, bytes.state_gradient);
        table_integer(&t, bytes.boundary);
        table_integer(&t, bytes.dropped);
        table_integer(&t, bytes.logits);
        table_integer(&t, bytes.working);
        table_integer(&t, bytes.buffers);
    }
    return table_end(&t) || print_borders(desc);
}

static void write_reports(cli_output *to, const memory_options *asked, const memory_path *path, const modelling *m,
                          int64_t state_window, const cf_memory_report *reports) {
    json_writer w;
    int64_t s;

    json_write_begin(&w, to, "chunkflow-memory");
    modelling_write(&w, m);
    json_integer_member(&w, "chunk_size", asked->chunk_size);
    json_integer_member(&w, "k", asked->k);
    json_integer_member(&w, "context", path->context);
    if (asked->stream > 0) json_integer_member(&w, "state_window", state_window);
    if (asked->terms.outputs > 0) json_integer_member(&w, "outputs", asked->terms.outputs);
    json_open(&w, "stages", '[');
    for (s = 0; s < m->parallel.pp; s++) {
        json_open(&w, NULL, '{');
        modelling_write_terms(&w, &reports[s]);
        json_integer_member(&w, "total", reports[s].total);
        json_integer_member(&w, "host", reports[s].host);
        json_integer_member(&w, "at_loss", reports[s].at_loss);
        json_close(&w, '}');
    }
    json_close(&w, ']');
    json_write_end(&w);
}

static void print_comparison(const cf_gpu *gpu, int64_t reserve, const cf_memory_report *fullest) {
    double left = modelling_gib(gpu->memory - gpu->memory / 100 * reserve - fullest->total);

    printf("%-17s %.2f GiB less the reserve of %lld %%: %.2f GiB %s\n", gpu->name, modelling_gib(gpu->memory),
           (long long)reserve, left < 0 ? -left : left, left < 0 ? "too little" : "to spare");
}

/* ----------------------------------------------------------------------------------------------------------------
   Measured peaks
   ---------------------------------------------------------------------------------------------------------------- */

enum { MOST_PEAKS = 64 };

/* A measured peak and its estimate: the part that no fit changes, and the part of which fragmentation is a
   percentage. */
typedef struct measured_peak {
    int64_t number[4]; /* chunk size, K, context, bytes */
    double fixed, moving;
} measured_peak;

typedef struct peak_list {
    measured_peak peaks[MOST_PEAKS];
    int n;
    double runtime, percent; /* as fitted */
} peak_list;

static int take_peak(void *user, const char *path, int64_t at, const char *line) {
    static const int64_t most[4] = {CF_MAX_CHUNK_SIZE, INT32_MAX, CF_MAX_LENGTH, INT64_MAX / 1000};
    peak_list *list = (peak_list *)user;
    int64_t *number = list->peaks[list->n].number;
    int i, n = 0;

    for (line += strspn(line, " \t"); *line; line += strspn(line, " \t"), n++) {
        size_t length = strcspn(line, " \t");
        if (n == 4 || list->n == MOST_PEAKS || !cli_parse_number(line, length, &number[n])) n = 4;
        line += length;
    }
    for (i = 0; i < 4 && n == 4; i++)
        if (number[i] < 1 || number[i] > most[i]) n = 5;
    if (n == 0) return CLI_OK;
    if (n != 4)
        return cli_at_line(path, at, "wanted CHUNK_SIZE K CONTEXT BYTES, and at most %d such lines", MOST_PEAKS);
    list->n++;
    return CLI_OK;
}

/* Estimates a peak's two parts on the fullest stage. */
static int weigh_peak(const memory_options *asked, const modelling *m, cf_memory_load *loads, cf_memory_report *reports,
                      measured_peak *peak) {
    memory_options of = *asked;
    int64_t s, n = m->parallel.pp * m->parallel.n_virtual;
    const cf_memory_report *fullest;
    memory_path path;
    cf_memory_desc desc;
    cf_error error;
    int code;

    of.chunk_size = peak->number[0];
    of.k = peak->number[1];
    of.context = peak->number[2];
    of.terms.runtime = 1;
    of.terms.fragmentation = 0;
    code = fill_desc(&of, m, &desc);
    if (code != CLI_OK) return code;
    path = path_of_context(&of);
    for (s = 0; s < n; s++) loads[s] = guess_load(&of, &path, n - s);
    if (cf_memory_estimate(&desc, loads, n, reports, m->parallel.pp, &error) != CF_OK) return cli_error(&error, NULL);
    fullest = &reports[fullest_stage(reports, m->parallel.pp)];
    peak->fixed = (double)fullest->total - 1;
    peak->moving = (double)fullest->activations + (double)fullest->logits + (double)fullest->working +
                   (double)fullest->state + (double)fullest->state_gradient + (double)fullest->inputs;
    return CLI_OK;
}

/* Fits the difference from the estimates by least squares: a constant, and whole percents of the moving part, neither
   below 0. With one peak, or with equal moving parts, it fits only the constant. */
static void fit_peaks(peak_list *list, double percent) {
    double x = 0, y = 0, xx = 0, xy = 0, n = list->n;
    int i;

    for (i = 0; i < list->n; i++) x += list->peaks[i].moving / n;
    for (i = 0; i < list->n; i++) y += ((double)list->peaks[i].number[3] - list->peaks[i].fixed) / n;
    for (i = 0; i < list->n; i++) {
        double dx = list->peaks[i].moving - x, dy = (double)list->peaks[i].number[3] - list->peaks[i].fixed - y;
        xx += dx * dx;
        xy += dx * dy;
    }
    if (xx > 0) percent = 100 * xy / xx;
    if (percent > 100 * y / x) percent = 100 * y / x;
    if (!(percent > 0)) percent = 0;
    list->percent = percent < 1000 ? (double)(int64_t)(percent + 0.5) : 1000;
    list->runtime = y - list->percent / 100 * x;
    if (list->runtime < 1) list->runtime = 1;
}

static int print_peaks(const peak_list *list) {
    static const table_column columns[] = {
        {.heading = "chunk size"}, {.heading = "K"}, {.heading = "context"},
        {.heading = "measured GiB", .decimals = 2}, {.heading = "estimated", .decimals = 2},
        {.heading = "off by %", .decimals = 1}};
    table t;
    int i;

    printf("fitted            --runtime %.0f --fragmentation %.0f, to %s peaks\n\n", list->runtime, list->percent,
           cli_commas(list->n));
    table_begin(&t, columns, (int)(sizeof columns / sizeof columns[0]), 0, 0);
    for (i = 0; i < list->n; i++) {
        const measured_peak *p = &list->peaks[i];
        double estimated = p->fixed + list->runtime + list->percent / 100 * p->moving;
        table_integer(&t, p->number[0]);
        table_integer(&t, p->number[1]);
        table_integer(&t, p->number[2]);
        table_real(&t, (double)p->number[3] / 1073741824.0);
        table_real(&t, estimated / 1073741824.0);
        table_real(&t, 100 * (estimated / (double)p->number[3] - 1));
    }
    i = table_end(&t);
    putchar('\n');
    return i;
}

/* Applies the fit of the peaks to the terms. */
static int take_fit(memory_options *asked, const modelling *m, cf_memory_load *loads, cf_memory_report *reports) {
    peak_list list;
    int i, code;

    memset(&list, 0, sizeof list);
    code = cli_lines_read(asked->fit, take_peak, &list);
    if (code == CLI_OK && list.n == 0) code = cli_usage("memory", "--fit: %s has no line", cli_input_name(asked->fit));
    for (i = 0; i < list.n && code == CLI_OK; i++) code = weigh_peak(asked, m, loads, reports, &list.peaks[i]);
    if (code != CLI_OK) return code;
    fit_peaks(&list, (double)asked->terms.fragmentation);
    asked->terms.runtime = (int64_t)list.runtime;
    asked->terms.fragmentation = (int64_t)list.percent;
    return asked->tsv || asked->json ? CLI_OK : print_peaks(&list);
}

/* ---------------------------------------------------------------------------------------------------------------- */

static int print_all(const memory_options *asked, const packing *list, const modelling *m, const cf_gpu *gpu,
                     const cf_memory_desc *desc, const cf_memory_report *reports) {
    int64_t n = m->parallel.pp;
    int code;

    if (asked->tsv) return print_table(reports, n);
    if (list->plan) packing_print_input(list);
    modelling_print(m);
    modelling_print_stream(desc);
    code = print_reports(reports, n);
    if (asked->live == 0 && n > 1 && m->parallel.n_virtual == 1)
        printf("chunks            stage s keeps K or %lld - s, whichever is more, as in 1f1b; in paper K + %lld - s.\n"
               "                  plan and tune count what a schedule really keeps\n", (long long)n, (long long)n - 1);
    if (gpu) print_comparison(gpu, asked->reserve, &reports[fullest_stage(reports, n)]);
    return code == CLI_OK ? print_token_bytes(desc) : code;
}

/* Prints the report. list: packed, or without a plan if no list was given. */
static int report(const memory_options *asked, const packing *list, const modelling *m, const cf_gpu *gpu,
                  cf_memory_load *loads, cf_memory_report *reports) {
    memory_path path = list->plan ? path_of_plan(list->plan) : path_of_context(asked);
    int64_t s, n = m->parallel.pp * m->parallel.n_virtual;
    cli_output json = {0};
    cf_memory_desc desc;
    cf_error error;
    int code = fill_desc(asked, m, &desc);

    if (code != CLI_OK) return code;
    for (s = 0; s < n; s++) loads[s] = guess_load(asked, &path, n - s);
    if (cf_memory_estimate(&desc, loads, n, reports, m->parallel.pp, &error) != CF_OK)
        return cli_error(&error, NULL);
    code = cli_output_open(&json, asked->json);
    if (code == CLI_OK && json.stream) write_reports(&json, asked, &path, m, desc.state_window, reports);
    if (code == CLI_OK && json.stream != stdout) code = print_all(asked, list, m, gpu, &desc, reports);
    return cli_outputs_finish(&json, 1, code);
}

static int run(const void *given, char **operands, int n_operands) {
    const memory_options *asked = (const memory_options *)given;
    cf_gpu named;
    const cf_gpu *gpu = NULL;
    const packing_options chunks = {.chunk_size = asked->chunk_size};
    memory_options fitted = *asked;
    packing list = {{0}, NULL, NULL, NULL};
    cf_memory_report *reports;
    cf_memory_load *loads;
    modelling m;
    int code;

    if (n_operands > 0 && asked->context > 0) return cli_usage("memory", "--context stands in place of a list");
    if (asked->gpu && (code = modelling_find_gpu("memory", asked->gpu, &named)) != CLI_OK) return code;
    if (asked->gpu) gpu = &named;
    code = table_check("memory", asked->tsv, "--json", asked->json);
    if (code == CLI_OK) code = modelling_make("memory", &asked->modelling, &m);
    if (code != CLI_OK) return code;
    if (n_operands > 0) code = packing_make(&chunks, operands[0], &list);
    m.keeps_scores = asked->unfused_attention;
    loads = (cf_memory_load *)calloc((size_t)(m.parallel.pp * m.parallel.n_virtual), sizeof *loads);
    reports = (cf_memory_report *)calloc((size_t)m.parallel.pp, sizeof *reports);
    if (code == CLI_OK && !(loads && reports)) code = cli_failed("out of memory");
    if (code == CLI_OK && asked->fit) code = take_fit(&fitted, &m, loads, reports);
    if (code == CLI_OK) code = report(&fitted, &list, &m, gpu, loads, reports);
    packing_free(&list);
    free(reports);
    free(loads);
    modelling_free(&m);
    return code;
}

const cli_command cmd_memory = {
    .name = "memory", .operands = "[FILE|-]", .min_operands = 0, .max_operands = 1,
    .summary = "say what a training set-up needs on each GPU, term by term",
    .details =
    "The chunks in flight are counted as 1F1B has them, without a simulated schedule: stage s of S holds K chunks or\n"
    "S - s of them, whichever is more, and the state of one sequence of --context tokens, or of that sequence of a list\n"
    "which takes most: in a tree the state is that of the deepest path, for what is beyond the last parting has none.\n"
    "\n" CLI_LIST_HELP "\n" MODELLING_NAMES MODELLING_GPUS,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
