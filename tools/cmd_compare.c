/* cmd_compare.c - chunkflow compare: all schedules for one list of lengths, side by side. */

#include "json_write.h"
#include "pipeline.h"

#include <stdlib.h>
#include <string.h>

enum { REPLAY_PIPELINE = 1, REPLAY_LOCAL, REPLAY_BOTH };

typedef struct compare_options {
    packing_options packing;
    pipeline_options pipeline;
    const char *k;
    int64_t n_virtual;
    int64_t placement;
    int64_t replay;
    const char *json;
} compare_options;

static const compare_options defaults = {.pipeline = PIPELINE_DEFAULTS, .k = "1"};

static const cli_option options[] = {
    PACKING_OPTIONS(compare_options, packing),
    {.name = "--k", .value = "K,...", .kind = CLI_TEXT, .offset = offsetof(compare_options, k),
     .help = "how many chunks of a group keep their activations;\n"
     "default 1. More than one number: a row for each"},
    {.name = "--virtual", .value = "V", .kind = CLI_NUMBER, .offset = offsetof(compare_options, n_virtual), .min = 1,
     .max = CF_MAX_STAGES, .help = "virtual stages of each stage, for interleaved; default 2"},
    {.name = "--placement", .value = "loop|v|any", .kind = CLI_CHOICE, .offset = offsetof(compare_options, placement),
     .help = "zero-bubble and best have virtual stages, too: in loops, in a\n"
     "V, or (best) in whichever is faster"},
    {.name = "--replay", .value = "pipeline|local|both", .kind = CLI_CHOICE,
     .offset = offsetof(compare_options, replay),
     .help = "how dropped activations come back: through all stages again\n"
     "(the default), on each stage alone, or a row for each"},
    PIPELINE_OPTIONS(compare_options, pipeline),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(compare_options, json),
     .help = "write the table as JSON; with - nothing else is printed"},
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   The rows
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct row {
    pipeline_case what;
    int unsplit;          /* the baseline: every sequence is a micro-batch of its own */
    cf_result result;
    char why[200];        /* where it failed */
    int64_t n_virtual;    /* from here on: where it did not */
    cf_placement placement;
    double makespan, bubble_useful, bubble_busy, bound;
    const char *strongest;
    int64_t peak_live, peak_tokens, peak_bytes; /* the most of all stages */
} row;

typedef struct table {
    const compare_options *asked;
    pipeline pipe;
    packing packed;
    row *rows;
    int64_t n_rows;
    double best; /* the least makespan; 0: no row has one */
} table;

static void measure(const pipeline_run *run, row *r) {
    const cf_timeline *timeline = run->timeline;
    int64_t i;

    r->n_virtual = run->schedule->n_virtual;
    r->placement = run->schedule->placement;
    r->makespan = timeline->makespan;
    r->bubble_useful = timeline->bubble_useful;
    r->bubble_busy = timeline->bubble_busy;
    r->bound = timeline->bound;
    r->strongest = pipeline_strongest(timeline);
    for (i = 0; i < timeline->n_stages; i++) {
        if (timeline->peak_live[i] > r->peak_live) r->peak_live = timeline->peak_live[i];
        if (timeline->peak_tokens[i] > r->peak_tokens) r->peak_tokens = timeline->peak_tokens[i];
        if (timeline->peak_bytes[i] > r->peak_bytes) r->peak_bytes = timeline->peak_bytes[i];
    }
}

/* Chunks as long as the longest sequence, and one sequence in each. */
static cf_result pack_unsplit(const table *t, cf_plan **plan, cf_error *error) {
    cf_pack_desc desc;
    int64_t i, n = t->packed.list.n_sequences;

    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 1;
    desc.max_slices = 1;
    desc.n_ranks = t->asked->packing.ranks;
    for (i = 0; i < n; i++)
        if (t->packed.lengths[i] > desc.chunk_size) desc.chunk_size = t->packed.lengths[i];
    return cf_pack(t->packed.lengths, n, &desc, plan, error);
}

static void fill_row(const table *t, row *r) {
    cf_plan *unsplit = NULL;
    pipeline_run run;
    cf_error error;

    if (r->unsplit) r->result = pack_unsplit(t, &unsplit, &error);
    if (r->result == CF_OK)
        r->result = pipeline_run_make(&t->pipe, unsplit ? unsplit : t->packed.plan, &r->what, &run, &error);
    if (r->result == CF_OK) {
        measure(&run, r);
        pipeline_run_free(&run);
    } else {
        memcpy(r->why, error.text, sizeof r->why);
    }
    cf_plan_free(unsplit);
}

/* Of zero-bubble's own choice there is none: with `any` it takes the V that it was made for. */
static void place_row(const compare_options *asked, row *r) {
    if (r->what.kind == CF_SCHEDULE_INTERLEAVED) r->what.n_virtual = asked->n_virtual;
    if (asked->placement == CF_PLACEMENT_DEFAULT || r->what.kind <= CF_SCHEDULE_INTERLEAVED) return;
    r->what.n_virtual = asked->n_virtual > 0 ? asked->n_virtual : 2;
    r->what.placement = (cf_placement)asked->placement;
    if (r->what.kind == CF_SCHEDULE_ZERO_BUBBLE && r->what.placement == CF_PLACEMENT_ANY)
        r->what.placement = CF_PLACEMENT_V;
}

/* Every kind, with every K and form of replay; best twice, with whole backwards and with cut ones. */
static int add_rows(table *t, const int64_t *k, int64_t n_k) {
    int64_t first = t->asked->replay == REPLAY_LOCAL ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    int64_t last = t->asked->replay == REPLAY_BOTH ? CF_REPLAY_LOCAL : first;
    int64_t i, replay, kind;

    t->rows = (row *)calloc((size_t)(n_k * 2 * (CF_SCHEDULE_COUNT + 1) + 1), sizeof *t->rows);
    if (!t->rows) return cli_failed("out of memory");
    t->rows[0].unsplit = 1;
    t->rows[0].what.kind = CF_SCHEDULE_1F1B;
    t->n_rows = 1;
    for (i = 0; i < n_k; i++)
        for (replay = first; replay <= last; replay++)
            for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_COUNT; kind++) {
                row *r = &t->rows[t->n_rows++];
                r->what.kind = (cf_schedule_kind)(kind < CF_SCHEDULE_COUNT ? kind : CF_SCHEDULE_BEST);
                r->what.replay = (cf_replay)replay;
                r->what.k = k[i];
                r->what.split_backward = kind == CF_SCHEDULE_COUNT;
                place_row(t->asked, r);
            }
    return CLI_OK;
}

static int fill_table(table *t) {
    int64_t *k = NULL, n_k, i;
    int code = cli_take_numbers("compare", "--k", t->asked->k, 1, INT32_MAX, &k, &n_k);

    if (code == CLI_OK) code = add_rows(t, k, n_k);
    free(k);
    for (i = 0; code == CLI_OK && i < t->n_rows; i++) {
        row *r = &t->rows[i];
        fill_row(t, r);
        if (r->result == CF_OK && (t->best == 0 || r->makespan < t->best)) t->best = r->makespan;
        if (r->result == CF_ERROR_MEMORY) code = cli_failed("%s", r->why);
    }
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   As text
   ---------------------------------------------------------------------------------------------------------------- */

static double ratio(double value, double to) {
    return to > 0 ? value / to : 1;
}

static const char *row_name(const row *r) {
    int turns = r->result == CF_OK && r->placement == CF_PLACEMENT_V && r->n_virtual > 1;

    if (r->unsplit) return "1f1b, unsplit";
    if (r->what.split_backward) return turns ? "best, I + W, V" : "best, I + W";
    if (turns) return r->what.kind == CF_SCHEDULE_BEST ? "best, V" : "zero-bubble, V";
    return cf_schedule_kind_name(r->what.kind);
}

static void print_row(const table *t, const row *r) {
    char k[24] = "-", bytes[48] = "";

    if (!r->unsplit) snprintf(k, sizeof k, "%lld", (long long)r->what.k);
    printf("%-16s %4s %-8s ", row_name(r), k,
           r->unsplit ? "-" : cf_replay_name(r->what.replay));
    if (r->result != CF_OK) {
        printf("%14s  %s\n", "-", r->why);
        return;
    }
    if (t->pipe.counts_bytes) snprintf(bytes, sizeof bytes, " %20s", pipeline_share(r->peak_bytes, r->n_virtual));
    printf("%14s %7.4f %7.2f %7.2f %9s %14s%s %14s %8.2f  %s\n", pipeline_time(r->makespan),
           ratio(r->makespan, t->best), 100 * r->bubble_useful, 100 * r->bubble_busy,
           pipeline_share(r->peak_live, r->n_virtual), pipeline_share(r->peak_tokens, r->n_virtual), bytes,
           pipeline_time(r->bound), 100 * (ratio(r->makespan, r->bound) - 1), r->strongest);
}

static void print_table(const table *t) {
    const char *bytes = t->pipe.counts_bytes ? "                bytes" : "";
    const cf_plan *plan = t->packed.plan;
    int64_t i;

    packing_print_input(&t->packed);
    printf("plan              %s chunks of at most %s tokens, %s groups; rank %s of %s, %s stages\n",
           cli_commas(plan->n_chunks), cli_commas(plan->chunk_size), cli_commas(plan->n_groups),
           cli_commas(t->pipe.rank), cli_commas(plan->n_ranks), cli_commas(t->pipe.n_stages));
    printf("times             in %s. Idle time: waste %%, with replays; busy %%, without them. kept: the most chunks\n"
           "                  and tokens on a stage. bound: the strongest lower bound for that row\n\n",
           t->pipe.unit_cost ? "token times" : "s");
    printf("%-16s %4s %-8s %14s %7s %7s %7s %9s %14s%s %14s %8s\n", "schedule", "K", "replay", "makespan", "x best",
           "waste %", "busy %", "kept", "kept tokens", bytes, "bound", "gap %");
    for (i = 0; i < t->n_rows && !cli_stdout_failed(); i++) print_row(t, &t->rows[i]);
}

/* ----------------------------------------------------------------------------------------------------------------
   As JSON
   ---------------------------------------------------------------------------------------------------------------- */

static void write_row(json_writer *w, const table *t, const row *r) {
    json_open(w, NULL, '{');
    json_text_member(w, "schedule", cf_schedule_kind_name(r->what.kind));
    json_bool_member(w, "unsplit", r->unsplit);
    if (!r->unsplit) {
        json_integer_member(w, "k", r->what.k);
        json_text_member(w, "replay", cf_replay_name(r->what.replay));
    }
    if (r->result != CF_OK) {
        json_text_member(w, "error", cf_result_name(r->result));
        json_text_member(w, "why", r->why);
    } else {
        json_integer_member(w, "virtual_stages", r->n_virtual);
        json_text_member(w, "placement", cf_placement_name(r->placement));
        json_number_member(w, "makespan", r->makespan);
        json_number_member(w, "ratio", ratio(r->makespan, t->best));
        json_number_member(w, "bubble_useful", r->bubble_useful);
        json_number_member(w, "bubble_busy", r->bubble_busy);
        json_integer_member(w, "peak_live", r->peak_live);
        json_integer_member(w, "peak_tokens", r->peak_tokens);
        json_integer_member(w, "peak_bytes", r->peak_bytes);
        json_number_member(w, "bound", r->bound);
        json_text_member(w, "bound_name", r->strongest);
    }
    json_close(w, '}');
}

static void write_json(const table *t, cli_output *to) {
    json_writer w;
    int64_t i;

    json_write_begin(&w, to, "chunkflow-comparison");
    json_integer_member(&w, "chunk_size", t->packed.plan->chunk_size);
    json_integer_member(&w, "stages", t->pipe.n_stages);
    json_integer_member(&w, "rank", t->pipe.rank);
    json_open(&w, "rows", '[');
    for (i = 0; i < t->n_rows; i++) write_row(&w, t, &t->rows[i]);
    json_close(&w, ']');
    json_write_end(&w);
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

static int compare(table *t) {
    cli_output json = {0};
    int code = fill_table(t);

    if (code == CLI_OK) code = cli_output_open(&json, t->asked->json);
    if (code == CLI_OK && json.stream) write_json(t, &json);
    if (code == CLI_OK && json.stream != stdout) print_table(t);
    return cli_outputs_finish(&json, 1, code);
}

static int run(const void *given, char **operands, int n_operands) {
    table t;
    int code;

    (void)n_operands;
    memset(&t, 0, sizeof t);
    t.asked = (const compare_options *)given;
    code = pipeline_open("compare", &t.asked->pipeline, t.asked->packing.ranks, &t.pipe);
    if (code != CLI_OK) return code;
    code = packing_make(&t.asked->packing, operands[0], &t.packed);
    if (code == CLI_OK) {
        code = compare(&t);
        free(t.rows);
        packing_free(&t.packed);
    }
    pipeline_close(&t.pipe);
    return code;
}

const cli_command cmd_compare = {
    .name = "compare", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "all schedules for one list of lengths, side by side",
    .details =
    "The first row is the baseline: 1f1b where every sequence is a micro-batch of its own, longest first, not split\n"
    "and not packed. A schedule that cannot be made says why.\n\n" PIPELINE_HELP CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
