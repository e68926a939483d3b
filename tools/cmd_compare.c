/* cmd_compare.c - chunkflow compare: all schedules for one list of lengths, side by side. */

#include "json_write.h"
#include "baseline.h"

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

#define PIPELINE_LIMIT_DEFAULT "for best what paper keeps with that K, else none"

static const compare_options defaults = {.pipeline = PIPELINE_DEFAULTS, .k = "1"};

static const cli_option options[] = {
    PACKING_OPTIONS(compare_options, packing),
    {.name = "--k", .value = "K,...", .kind = CLI_TEXT, .offset = offsetof(compare_options, k),
     .help = "most chunks of a group that keep their activations;\n"
     "default 1. More than one number: a row for each"},
    {.name = "--virtual", .value = "V", .kind = CLI_NUMBER, .offset = offsetof(compare_options, n_virtual), .min = 1,
     .max = CF_MAX_STAGES, .help = "virtual stages of each stage, for interleaved; default 2"},
    {.name = "--placement", .value = "loop|v|any", .kind = CLI_CHOICE, .offset = offsetof(compare_options, placement),
     .help = "zero-bubble and best have virtual stages, too: in loops, in a\n"
     "V, or (best) in whichever is faster"},
    {.name = "--replay", .value = "pipeline|local|both", .kind = CLI_CHOICE,
     .offset = offsetof(compare_options, replay),
     .help = "how dropped activations come back: through all stages again,\n"
     "on each stage alone (the default), or a row for each"},
    PIPELINE_OPTIONS(compare_options, pipeline),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(compare_options, json),
     .help = "write the table as JSON; with - nothing else is printed"},
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   The rows
   ---------------------------------------------------------------------------------------------------------------- */

/* The forms of the baseline: every sequence is a micro-batch of its own, or they share some as long as the longest. */
enum { UNSPLIT = 1, PACKED };

typedef struct row {
    pipeline_case what;
    int unsplit;          /* the baseline: UNSPLIT or PACKED, else 0 */
    cf_result result;
    char why[200];        /* where it failed */
    int64_t n_virtual;    /* from here on: where it did not */
    cf_placement placement;
    double makespan, bubble_useful, bubble_busy, bound;
    const char *strongest;
    int64_t peak_live, peak_tokens, peak_bytes; /* the most of all stages */
    cf_recompute recompute; /* with a model, as what follows */
    int64_t memory, stage;  /* bytes of the fullest GPU */
    int too_large;          /* 1: more than it has */
    int replays;
} row;

typedef struct table {
    const compare_options *asked;
    pipeline pipe;
    packing packed;
    row *rows;
    int64_t n_rows;
    double best; /* the least makespan of what fits; 0: no row has one */
} table;

static void measure(const table *t, const pipeline_run *run, row *r) {
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
    r->replays = timeline->replayed > 0;
    if (!run->memory) return;
    r->recompute = r->what.recompute ? r->what.recompute : t->pipe.model.parallel.recompute;
    r->stage = run->fullest;
    r->memory = run->memory[run->fullest].total;
    r->too_large = !pipeline_fits(&t->pipe, run);
}

static void fill_case(const table *t, const cf_plan *plan, row *r) {
    pipeline_run run;
    cf_error error;

    r->result = pipeline_run_make(&t->pipe, plan, &r->what, &run, &error);
    if (r->result == CF_OK) {
        measure(t, &run, r);
        pipeline_run_free(&run);
    } else {
        memcpy(r->why, error.text, sizeof r->why);
    }
}

static void fill_baseline(const table *t, row *r) {
    baseline base;
    cf_error error;

    r->result = baseline_make(&t->pipe, &t->packed, &t->asked->packing, r->unsplit == PACKED, NULL, &base, &error);
    if (r->result == CF_OK) {
        r->what = base.what;
        measure(t, &base.run, r);
        baseline_free(&base);
    } else {
        memcpy(r->why, error.text, sizeof r->why);
    }
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
    int64_t asked = t->asked->replay > 0 ? t->asked->replay : REPLAY_LOCAL;
    int64_t first = asked == REPLAY_LOCAL ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    int64_t last = asked == REPLAY_PIPELINE ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
    int64_t i, replay, kind;

    t->rows = (row *)calloc((size_t)(n_k * 2 * (CF_SCHEDULE_COUNT + 1) + 2), sizeof *t->rows);
    if (!t->rows) return cli_failed("out of memory");
    for (t->n_rows = 0; t->n_rows < 2; t->n_rows++) {
        row *r = &t->rows[t->n_rows];
        r->unsplit = t->n_rows == 0 ? UNSPLIT : PACKED;
        r->what.kind = CF_SCHEDULE_1F1B;
    }
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
        if (r->unsplit) fill_baseline(t, r);
        else fill_case(t, t->packed.plan, r);
        if (r->result == CF_OK && !r->too_large && (t->best == 0 || r->makespan < t->best)) t->best = r->makespan;
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

    if (r->unsplit) return r->unsplit == PACKED ? "1f1b, packed" : "1f1b, unsplit";
    if (r->what.split_backward) return turns ? "best, I + W, V" : "best, I + W";
    if (turns) return r->what.kind == CF_SCHEDULE_BEST ? "best, V" : "zero-bubble, V";
    return cf_schedule_kind_name(r->what.kind);
}

static void print_row(const table *t, const row *r) {
    char k[24] = "-", bytes[48] = "", gib[48] = "";

    if (!r->unsplit) snprintf(k, sizeof k, "%lld", (long long)r->what.k);
    printf("%-16s %4s %-8s ", row_name(r), k,
           r->unsplit ? "-" : cf_replay_name(r->what.replay));
    if (r->result != CF_OK) {
        printf("%14s  %s\n", "-", r->why);
        return;
    }
    if (t->pipe.counts_bytes) snprintf(bytes, sizeof bytes, " %20s", pipeline_share(r->peak_bytes, r->n_virtual));
    if (t->pipe.has_model)
        snprintf(gib, sizeof gib, " %-9s %7.2f%s", cf_recompute_name(r->recompute), modelling_gib(r->memory),
                 r->too_large ? "!" : " ");
    printf("%14s %7.4f %7.2f %7.2f %9s %14s%s%s %14s %8.2f  %s\n", pipeline_time(r->makespan),
           ratio(r->makespan, t->best), 100 * r->bubble_useful, 100 * r->bubble_busy,
           pipeline_share(r->peak_live, r->n_virtual), pipeline_share(r->peak_tokens, r->n_virtual), bytes, gib,
           pipeline_time(r->bound), 100 * (ratio(r->makespan, r->bound) - 1), r->strongest);
}

/* The shortest row of what fits, of the baseline or of the chunks; NULL if there is none. */
static const row *shortest(const table *t, int unsplit) {
    const row *found = NULL;
    int64_t i;

    for (i = 0; i < t->n_rows; i++) {
        const row *r = &t->rows[i];
        if (r->result != CF_OK || r->too_large || (r->unsplit != 0) != unsplit) continue;
        if (!found || r->makespan < found->makespan) found = r;
    }
    return found;
}

static void print_held(const table *t, const row *r) {
    printf("%s %s", pipeline_time(r->makespan), pipeline_unit(t->pipe.unit_cost));
    if (t->pipe.has_model)
        printf(", %.2f GiB, recompute %s", modelling_gib(r->memory), cf_recompute_name(r->recompute));
    else printf(", at most %s tokens kept", pipeline_share(r->peak_tokens, r->n_virtual));
}

/* Why no form of the baseline can be had. */
static void print_no_baseline(const table *t) {
    const row *r = &t->rows[0];

    if (r->result != CF_OK) printf("baseline          cannot be made: %s\n", r->why);
    else
        printf("baseline          does not fit: needs %.2f GiB on stage %lld with full recomputation\n",
               modelling_gib(r->memory), (long long)r->stage);
}

/* The baseline against the best row of chunks, in words. */
static void print_verdict(const table *t) {
    const row *base = shortest(t, 1), *ours = shortest(t, 0);
    const cf_plan *plan = t->packed.plan;
    cf_plan_stats stats;

    putchar('\n');
    if (!base) {
        print_no_baseline(t);
        return;
    }
    printf("baseline          %s: ", row_name(base));
    print_held(t, base);
    if (!ours) {
        puts("; no schedule of chunks can be had");
        return;
    }
    printf("\nchunks            %s, K = %s, %s replay: ", row_name(ours), cli_commas(ours->what.k),
           cf_replay_name(ours->what.replay));
    print_held(t, ours);
    printf("; %.4f x the baseline's time\n", ratio(ours->makespan, base->makespan));
    if (!(base->makespan < ours->makespan)) return;
    cf_plan_measure(plan, NULL, &stats);
    printf("                  The baseline is faster:\n                  %s.\n",
           packing_why_unsplit(stats.longest_sequence, plan->chunk_size, (double)plan->n_steps, t->pipe.n_stages,
                               ours->replays));
}

static void print_table(const table *t) {
    const char *bytes = t->pipe.counts_bytes ? "                bytes" : "";
    const char *gib = t->pipe.has_model ? " recompute     GiB " : "";
    const cf_plan *plan = t->packed.plan;
    int64_t i;

    packing_print_input(&t->packed);
    pipeline_print_setting(&t->pipe);
    printf("plan              %s chunks of at most %s tokens, %s groups; rank %s of %s, %s stages\n",
           cli_commas(plan->n_chunks), cli_commas(plan->chunk_size), cli_commas(plan->n_groups),
           cli_commas(t->pipe.rank), cli_commas(plan->n_ranks), cli_commas(t->pipe.n_stages));
    printf("times             in %s. Idle time: waste %%, with replays; busy %%, without them. kept: the most chunks\n"
           "                  and tokens on a stage. bound: the strongest lower bound for that row%s\n\n",
           pipeline_unit(t->pipe.unit_cost),
           t->pipe.estimates ? ". GiB: of the fullest\n                  GPU; with ! more than it has" : "");
    printf("%-16s %4s %-8s %14s %7s %7s %7s %9s %14s%s%s %14s %8s\n", "schedule", "K", "replay", "makespan", "x best",
           "waste %", "busy %", "kept", "kept tokens", bytes, gib, "bound", "gap %");
    for (i = 0; i < t->n_rows && !cli_stdout_failed(); i++) print_row(t, &t->rows[i]);
    print_verdict(t);
}

/* ----------------------------------------------------------------------------------------------------------------
   As JSON
   ---------------------------------------------------------------------------------------------------------------- */

static void write_row(json_writer *w, const table *t, const row *r) {
    json_open(w, NULL, '{');
    json_text_member(w, "schedule", cf_schedule_kind_name(r->what.kind));
    json_bool_member(w, "unsplit", r->unsplit != 0);
    if (r->unsplit) json_bool_member(w, "packed", r->unsplit == PACKED);
    if (!r->unsplit) {
        json_integer_member(w, "k", r->what.k);
        json_text_member(w, "replay", cf_replay_name(r->what.replay));
        json_bool_member(w, "split_backward", r->what.split_backward);
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
        if (t->pipe.has_model) {
            json_text_member(w, "recompute", cf_recompute_name(r->recompute));
            json_integer_member(w, "memory", r->memory);
            json_integer_member(w, "memory_stage", r->stage);
            json_bool_member(w, "fits", !r->too_large);
        }
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
    json_text_member(&w, "unit", t->pipe.unit_cost ? "token times" : "seconds");
    if (t->pipe.has_model) modelling_write(&w, &t->pipe.model);
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
    "The first rows are the baseline, which splits nothing: 1f1b where every sequence is a micro-batch of its own,\n"
    "longest first, and 1f1b where they are packed into micro-batches as long as the longest. No limit of chunks\n"
    "holds for it; with --model and --gpu it recomputes as little as it needs to fit. Where it is faster than all\n"
    "schedules of chunks, the last line says why. A schedule that cannot be made says why, too.\n\n" PIPELINE_HELP CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
