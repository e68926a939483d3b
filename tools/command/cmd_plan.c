/* cmd_plan.c - chunkflow plan: packs a list of lengths, orders the passes of its chunks and simulates them. */

#include "chart.h"
#include "graph_dot.h"
#include "held.h"
#include "pipeline.h"
#include "schedule_csv.h"
#include "svg.h"
#include "table.h"
#include "trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Files that can be written. */
enum { JSON, PLAN_JSON, CSV, MICROBATCHES, DOT, TRACE, SVG, MEMORY_SVG, N_OUTPUTS };
static const char *const output_options[N_OUTPUTS] = {"--json", "--plan-json", "--csv", "--microbatches", "--dot",
                                                      "--trace", "--svg", "--memory-svg"};

typedef struct plan_options {
    packing_options packing;
    pipeline_options pipeline;
    chart_options chart;
    int64_t k;
    int64_t kind;
    int64_t n_virtual;
    int64_t placement;
    int64_t replay;
    int split_backward;
    int forwards_first;
    int forward_only;
    int lower;
    int no_list;
    int summary;
    int tsv;
    int csv_extensions;
    const char *torch; /* a version */
    int microbatch_order;
    int metadata;
    int all_ranks;
    int64_t max_nodes;
    svg_style svg;
    const char *paths[N_OUTPUTS];
} plan_options;

static const plan_options defaults = {.pipeline = PIPELINE_DEFAULTS};

static const cli_option options[] = {
    PACKING_OPTIONS(plan_options, packing),
    PACKING_LOCKSTEP_OPTION(plan_options, packing),
    PACKING_GANG_OPTION(plan_options, packing),
    {.name = "--k", .alias = "--ks", .value = "K",
     .kind = CLI_NUMBER, .offset = offsetof(plan_options, k), .min = 1, .max = INT32_MAX,
     .help = "most chunks of a chain that keep their activations;\n" PIPELINE_K_DEFAULT},
    {.name = "--schedule", .value = "paper|gpipe|1f1b|interleaved|zero-bubble|best", .kind = CLI_CHOICE,
     .offset = offsetof(plan_options, kind), .help = "the order of the passes; default best"},
    {.name = "--virtual", .value = "V", .kind = CLI_NUMBER, .offset = offsetof(plan_options, n_virtual), .min = 1,
     .max = CF_MAX_STAGES,
     .help = "virtual stages of each stage, for interleaved (default 2),\n"
     "zero-bubble and best (default 1)"},
    {.name = "--placement", .value = "loop|v", .kind = CLI_CHOICE, .offset = offsetof(plan_options, placement),
     .help = "where they lie: in loops (the default), or there and back in a\n"
     "V (zero-bubble and best)"},
    {.name = "--replay", .value = "pipeline|local", .kind = CLI_CHOICE, .offset = offsetof(plan_options, replay),
     .help = "how dropped activations come back: through all stages again\n"
     "(paper alone), or on each stage alone (the default)"},
    {.name = "--split-backward", .kind = CLI_FLAG, .offset = offsetof(plan_options, split_backward),
     .help = "best may cut backwards into I and W, as zero-bubble does"},
    {.name = "--forwards-first", .kind = CLI_FLAG, .offset = offsetof(plan_options, forwards_first),
     .help = "gpipe runs every first forward before any backward, for losses\n"
     "that need the whole batch, and holds the whole batch's state"},
    {.name = "--forward-only", .kind = CLI_FLAG, .offset = offsetof(plan_options, forward_only),
     .help = "forwards and no backwards, for log-probabilities and evaluation"},
    PIPELINE_OPTIONS(plan_options, pipeline),
    {.name = "--lower", .kind = CLI_FLAG, .offset = offsetof(plan_options, lower),
     .help = "list and write the transfers between stages too (in --json\n"
     "there are no times then)"},
    CHART_OPTIONS(plan_options, chart),
    {.name = "--no-list", .kind = CLI_FLAG, .offset = offsetof(plan_options, no_list),
     .help = "print the chart and the summary, not the passes"},
    {.name = "--summary", .kind = CLI_FLAG, .offset = offsetof(plan_options, summary),
     .help = "print only the summary"},
    TABLE_OPTION(plan_options, tsv, "the passes or, with --summary, the stages"),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[JSON]),
     .help = "write the simulated schedule as JSON. With - for any of\n"
     "these files nothing else is printed"},
    {.name = "--all-ranks", .kind = CLI_FLAG, .offset = offsetof(plan_options, all_ranks),
     .help = "with the schedules of all ranks, not only of --rank"},
    {.name = "--plan-json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[PLAN_JSON]),
     .help = "write the plan as JSON, all ranks"},
    {.name = "--metadata", .kind = CLI_FLAG, .offset = offsetof(plan_options, metadata),
     .help = "with cu_seqlens, positions and targets of every chunk"},
    {.name = "--csv", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[CSV]),
     .help = "write the passes as PyTorch's pipelining loads them with\n"
     "format=\"compute_only\". Its microbatches have one shape: pad\n"
     "each chunk to ChunkSize"},
    {.name = "--torch", .value = "VERSION", .kind = CLI_TEXT, .offset = offsetof(plan_options, torch),
     .help = "write --csv with transfers, for format=\"compute_comms\" of that\n"
     "version of PyTorch, as in 2.14: not all read the same"},
    {.name = "--csv-extensions", .needs = "--csv", .kind = CLI_FLAG, .offset = offsetof(plan_options, csv_extensions),
     .help = "allow in --csv what PyTorch cannot run: split sequences,\n"
     "replays"},
    {.name = "--microbatches", .value = "FILE|-", .kind = CLI_TEXT,
     .offset = offsetof(plan_options, paths[MICROBATCHES]),
     .help = "write which chunk each microbatch of --csv is; they are\n"
     "numbered in the order of the last stage's forwards"},
    {.name = "--microbatch-order", .kind = CLI_FLAG, .offset = offsetof(plan_options, microbatch_order),
     .help = "number the chunks like that everywhere, in --plan-json too;\n"
     "without split sequences only"},
    {.name = "--dot", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[DOT]),
     .help = "write which pass waits for which, for Graphviz"},
    {.name = "--max-nodes", .needs = "--dot", .value = "N", .kind = CLI_NUMBER,
     .offset = offsetof(plan_options, max_nodes), .min = 1, .max = CF_MAX_ACTIONS,
     .help = "most passes in --dot; default 500"},
    {.name = "--trace", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[TRACE]),
     .help = "write a trace for Perfetto or chrome://tracing"},
    {.name = "--svg", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[SVG]),
     .help = "draw the passes over time, for a paper or a page"},
    SVG_STYLE_OPTIONS(plan_options, svg),
    {.name = "--memory-svg", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(plan_options, paths[MEMORY_SVG]),
     .help = "and what each stage holds over time: bytes with --model or\n"
     "--token-bytes, else tokens whose activations are kept"},
    {.name = NULL}};

/* A plan and its schedule, as they are printed and written. */
typedef struct planned {
    const plan_options *asked;
    cf_schedule_kind kind;
    int64_t k;
    packing packed;
    cf_plan *columns;     /* if all ranks have one list; or NULL */
    pipeline pipe;
    pipeline_run run;
    int64_t *held; /* from held_make, if an output needs it */
    int64_t slowest; /* with --all-ranks: the slowest rank, once its schedule is written; -1: not known */
    double longest;  /* its makespan */
} planned;

/* Makes the schedule of pipe->rank. */
static int make_run(const planned *made, const pipeline *pipe, pipeline_run *run) {
    const plan_options *asked = made->asked;
    pipeline_case what;
    cf_error error;

    memset(&what, 0, sizeof what);
    what.kind = made->kind;
    what.replay = (cf_replay)asked->replay;
    what.n_virtual = asked->n_virtual;
    what.placement = (cf_placement)asked->placement;
    what.k = made->k;
    what.split_backward = asked->split_backward;
    what.forwards_first = asked->forwards_first;
    what.forward_only = asked->forward_only;
    what.lower = asked->lower || (asked->torch && made->columns); /* one rank's part can no longer be lowered */
    return pipeline_run_make(pipe, made->packed.plan, &what, run, &error) == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

/* ----------------------------------------------------------------------------------------------------------------
   The action list of one stage, printed from the steps that a trainer walks
   ---------------------------------------------------------------------------------------------------------------- */

static const table_column action_columns[] = {
    {.name = "stage"},
    {.heading = "position", .name = "position", .decimals = TABLE_PLAIN},
    {.name = "virtual_stage"},
    {.heading = "pass", .left = 1},
    {.name = "pass"},
    {.name = "keep"},
    {.name = "start_"},
    {.name = "end_"},
    {.name = "estimated"},
    {.heading = "chunk", .name = "chunk", .decimals = TABLE_PLAIN},
    {.heading = "kind", .name = "kind", .left = 1},
    {.heading = "chain", .left = 1},
    {.name = "chain"},
    {.name = "index_in_chain"},
    {.heading = "tokens", .name = "tokens", .decimals = TABLE_PLAIN},
    {.heading = "prefix", .name = "prefix_tokens", .decimals = TABLE_PLAIN},
    {.heading = "slot", .name = "slot", .decimals = TABLE_PLAIN},
    {.heading = "live", .name = "kept_chunk_copies", .decimals = TABLE_PLAIN},
    {.heading = "state", .name = "state_token_copies", .decimals = TABLE_PLAIN}};

/* A list of steps: its table, plan and times. */
typedef struct action_list {
    table table;
    const cf_plan *plan;
    const cf_timeline *timeline;
    int64_t stage, first; /* its first action */
    int estimated;
} action_list;

static void add_integer_or_none(table *t, int64_t value) {
    if (value >= 0) table_integer(t, value);
    else table_none(t);
}

/* Adds a pass: "F+" if the activations are kept, "F-" if they are dropped; and the chain of its chunk. */
static void add_pass(action_list *list, const cf_step *step) {
    const char *name = cf_pass_name((cf_pass)step->action.pass);
    int keeps = step->action.pass <= CF_R;
    char text[32];

    snprintf(text, sizeof text, "%s%s", name, !keeps ? "" : step->action.keep ? "+" : "-");
    table_text(&list->table, text);
    table_text(&list->table, name);
    add_integer_or_none(&list->table, keeps ? step->action.keep : -1);
    table_real(&list->table, list->timeline->start[list->first + step->position]);
    table_real(&list->table, list->timeline->end[list->first + step->position]);
    table_integer(&list->table, list->estimated);
}

static void add_chunk(action_list *list, const cf_step *step) {
    const cf_chunk *chunk = &list->plan->chunks[step->action.chunk];
    char part[56] = "-";

    if (chunk->chain >= 0)
        snprintf(part, sizeof part, "%lld: %lld/%lld", (long long)chunk->chain, (long long)chunk->index + 1,
                 (long long)list->plan->chains[chunk->chain].n_chunks);
    table_integer(&list->table, step->action.chunk);
    table_text(&list->table, packing_chunk_kind(list->plan, chunk));
    table_text(&list->table, part);
    add_integer_or_none(&list->table, chunk->chain);
    add_integer_or_none(&list->table, chunk->chain >= 0 ? chunk->index : -1);
    table_integer(&list->table, chunk->tokens);
    table_integer(&list->table, chunk->prefix);
}

static void add_step(action_list *list, const cf_step *step) {
    table_integer(&list->table, list->stage);
    table_integer(&list->table, step->position);
    table_integer(&list->table, step->action.stage);
    add_pass(list, step);
    add_chunk(list, step);
    add_integer_or_none(&list->table, step->slot);
    table_integer(&list->table, step->live);
    table_integer(&list->table, step->state_tokens);
}

static int make_steps(const planned *made, int64_t stage, cf_steps **steps) {
    cf_error error;

    if (cf_steps_make(made->packed.plan, made->run.schedule, stage, 0, NULL, steps, &error) == CF_OK) return CLI_OK;
    return cli_error(&error, NULL);
}

/* Prints a line per pass, one stage after the other. */
static int print_actions(const planned *made) {
    action_list list;
    int64_t i;
    int code = CLI_OK, ended;

    table_begin(&list.table, action_columns, (int)(sizeof action_columns / sizeof action_columns[0]), made->asked->tsv,
                made->pipe.unit_cost);
    list.plan = made->packed.plan;
    list.timeline = made->run.timeline;
    list.estimated = !made->pipe.unit_cost;
    for (list.stage = 0; list.stage < made->run.schedule->shape.n_stages && code == CLI_OK; list.stage++) {
        cf_steps *steps = NULL;

        code = make_steps(made, list.stage, &steps);
        list.first = made->run.schedule->first[list.stage];
        for (i = 0; code == CLI_OK && i < steps->n && !cli_stdout_failed(); i++) add_step(&list, &steps->steps[i]);
        cf_steps_free(steps);
    }
    ended = table_end(&list.table);
    return code == CLI_OK ? ended : code;
}

/* Prints the passes: with one stage a line per pass, with more a paragraph per stage. */
static int print_list(const planned *made) {
    int code = CLI_OK;

    if (made->run.schedule->shape.n_stages == 1 && made->run.schedule->shape.n_virtual == 1) code = print_actions(made);
    else chart_list(made->run.schedule, &made->asked->chart);
    putchar('\n');
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   The summary
   ---------------------------------------------------------------------------------------------------------------- */

static void print_counts(const cf_schedule *schedule) {
    int64_t counts[CF_PASS_COUNT] = {0};
    int64_t i;
    int pass, first = 1;

    for (i = 0; i < schedule->n_actions; i++) counts[schedule->actions[i].pass]++;
    printf("actions           %s", cli_commas(schedule->n_actions));
    for (pass = 0; pass < CF_PASS_COUNT; pass++) {
        if (counts[pass] == 0) continue;
        printf("%s %s %s", first ? ":" : ",", cli_commas(counts[pass]), cf_pass_name((cf_pass)pass));
        first = 0;
    }
    putchar('\n');
}

/* Prints the limits of stages in units of n_virtual; if all are equal, only once. Returns whether there are any. */
static int print_limit(const char *name, const char *what, const int64_t *limits, int64_t n_stages, int64_t n_virtual) {
    int64_t n = 1, i;

    if (!limits) return 0;
    for (i = 1; i < n_stages; i++)
        if (limits[i] != limits[0]) n = n_stages;
    printf("%-18s", name);
    for (i = 0; i < n; i++)
        printf("%s%s", i > 0 ? ", " : "", limits[i] > 0 ? pipeline_share(limits[i], n_virtual) : "none");
    printf(" %s%s", what, n == 1 && limits[0] == n_virtual ? "" : "s");
    return 1;
}

/* Prints the limits on chunks and on state under which the schedule was made. */
static void print_limits(const planned *made) {
    const cf_schedule *schedule = made->run.schedule;
    const pipeline_options *asked = &made->asked->pipeline;
    int64_t n_stages = schedule->shape.n_stages;

    if (print_limit("limit", "chunk", schedule->limits.chunks_by_stage, n_stages, schedule->shape.n_virtual))
        puts(asked->limit || asked->limits ? "" : ", which is the default; --limit none for the shortest schedule");
    if (print_limit("state limit", "token", schedule->limits.state_by_stage, n_stages, 1))
        printf("%s%s\n", schedule->shape.n_virtual > 1 ? " on each virtual stage" : "",
               asked->limit_state ? "" : ", which is the default");
    if (made->pipe.gpu_bytes > 0 && (schedule->kind == CF_SCHEDULE_BEST || asked->limit_bytes > 0))
        printf("memory limit      the %.2f GiB %s%s\n", modelling_gib(made->pipe.gpu_bytes),
               pipeline_room_words(&made->pipe), asked->limit_bytes > 0 ? "" : "; --limit-bytes for another");
}

static void print_input(const planned *made) {
    const cf_plan *plan = made->packed.plan;
    const cf_schedule *schedule = made->run.schedule;

    packing_print_input(&made->packed);
    pipeline_print_setting(&made->pipe);
    printf("plan              %s of at most %s, %s, %s with %s each\n", cli_counted(plan->n_chunks, "chunk"),
           cli_counted(plan->chunk_size, "token"), cli_counted(plan->n_chains, "chain"),
           cli_counted(plan->n_ranks, "rank"), cli_counted(plan->chunks_per_rank, "step"));
    if (schedule->shape.forward_only) printf("schedule          forwards alone");
    else
        printf("schedule          %s, K = %s, %s replay", cf_schedule_kind_name(schedule->kind),
               cli_commas(schedule->shape.k), cf_replay_name(schedule->shape.replay));
    printf(", rank %s, %s", cli_commas(schedule->shape.rank), cli_counted(schedule->shape.n_stages, "stage"));
    if (schedule->shape.n_virtual > 1)
        printf(" of %s virtual stages%s", cli_commas(schedule->shape.n_virtual),
               schedule->shape.placement == CF_PLACEMENT_V ? " in a V" : "");
    putchar('\n');
    if (made->asked->k == 0 && !schedule->shape.forward_only)
        printf("                  K is %s; --k for another\n", pipeline_default_k_words(&made->pipe));
    print_limits(made);
    print_counts(schedule);
}

static void print_times(const planned *made) {
    const cf_timeline *timeline = made->run.timeline;
    const cf_search_report *report = &made->run.report;
    int64_t i;

    if (made->columns)
        printf("in step           all ranks take %s; the times that follow are those of this rank alone\n",
               pipeline_duration(made->run.in_step, made->pipe.unit_cost));
    if (made->slowest >= 0 && made->packed.plan->n_ranks > 1 && !made->columns)
        printf("slowest rank      %s, %s; the times that follow are those of rank %s\n", cli_commas(made->slowest),
               pipeline_duration(made->longest, made->pipe.unit_cost), cli_commas(made->pipe.rank));
    else if (made->packed.plan->n_ranks > 1 && !made->columns)
        printf("times             of rank %s alone; --all-ranks finds the slowest, which compare and report time\n",
               cli_commas(made->pipe.rank));
    pipeline_print_times(timeline, made->pipe.unit_cost, 1);
    pipeline_print_speed(&made->pipe, made->packed.plan, timeline->makespan);
    for (i = 0; i < timeline->n_bounds; i++)
        printf("%s%s %s", i == 0 ? "lower bounds      " : ", ", timeline->bounds[i].name,
               pipeline_duration(timeline->bounds[i].value, made->pipe.unit_cost));
    if (timeline->n_bounds > 0) putchar('\n');
    if (timeline->bound > 0)
        printf("gap               %.2f %% above the strongest bound, %s\n",
               fmax(0, 100 * (timeline->makespan / timeline->bound - 1)), /* rounded, it may be less */
               pipeline_strongest(timeline));
    if (made->run.schedule->kind == CF_SCHEDULE_BEST && !made->run.schedule->shape.forward_only)
        printf("search            %s tried, %s a search; %s better than all before; best fixed schedule: %s, %s\n",
               cli_counted(report->n_tried, "candidate"), cli_commas(report->max_tries), cli_commas(report->n_improved),
               cf_schedule_kind_name(report->best_fixed),
               pipeline_duration(report->fixed_makespan, made->pipe.unit_cost));
}

static double stage_busy(const planned *made, int64_t stage) {
    const cf_timeline *timeline = made->run.timeline;
    const cf_schedule *schedule = made->run.schedule;
    double busy = 0;
    int64_t i;

    for (i = schedule->first[stage]; i < schedule->first[stage + 1]; i++)
        if (schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT) busy += timeline->end[i] - timeline->start[i];
    return timeline->makespan > 0 ? busy / timeline->makespan : 1;
}

/* Columns for what a stage holds: people see whole stages, files the copies of all virtual stages. */
static const table_column stage_columns[] = {
    {.heading = "stage", .name = "stage"},
    {.heading = "idle %", .name = "idle", .decimals = 2, .scale = 100},
    {.name = "virtual_stages"},
    {.heading = "kept", .name = "peak_chunk_copies"},
    {.name = "limit_chunk_copies"},
    {.heading = "kept tokens", .name = "peak_token_copies"},
    {.heading = "state tokens", .name = "peak_state_token_copies"},
    {.name = "limit_state_token_copies"},
    {.heading = "bytes", .name = "peak_byte_copies"},
    {.heading = "GiB", .name = "memory_bytes", .decimals = 2, .scale = 1 / 1073741824.0}};
enum { STAGE_BYTES = 8, STAGE_GIB, STAGE_COLUMNS };

/* Adds a limit on each of n_virtual virtual stages: their stage may hold n_virtual times as many copies. */
static void add_limit(table *t, const int64_t *limits, int64_t stage, int64_t n_virtual) {
    add_integer_or_none(t, limits && limits[stage] > 0 ? pipeline_scaled(limits[stage], n_virtual) : -1);
}

static void add_stage(table *t, const planned *made, const cf_steps *steps) {
    const cf_schedule *schedule = made->run.schedule;
    int64_t n_virtual = schedule->shape.n_virtual, stage = steps->stage;

    table_integer(t, stage);
    table_real(t, 1 - stage_busy(made, stage));
    table_integer(t, n_virtual);
    table_share(t, steps->n_slots, n_virtual);
    add_limit(t, schedule->limits.chunks_by_stage, stage, 1);
    table_share(t, steps->peak_tokens, n_virtual);
    table_share(t, steps->peak_state_tokens, n_virtual);
    add_limit(t, schedule->limits.state_by_stage, stage, n_virtual);
    if (made->pipe.counts_bytes) table_share(t, made->run.timeline->peak_bytes[stage], n_virtual);
    else table_none(t);
    add_integer_or_none(t, made->run.memory ? made->run.memory[stage].total : -1);
}

static int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

/* The largest over all stages. */
typedef struct peaks {
    int64_t slots, tokens, states, state_tokens, bytes;
} peaks;

/* Prints a line per stage if there are several, or for scripts. */
static int print_stages(const planned *made, peaks *most) {
    table t;
    int64_t stage, n_stages = made->run.schedule->shape.n_stages;
    int code = CLI_OK, shown = n_stages > 1 || made->asked->tsv, ended = CLI_OK;

    table_begin(&t, stage_columns, STAGE_COLUMNS, made->asked->tsv, made->pipe.unit_cost);
    t.hidden = (made->pipe.counts_bytes ? 0u : 1u << STAGE_BYTES) | (made->run.memory ? 0u : 1u << STAGE_GIB);
    for (stage = 0; stage < n_stages && code == CLI_OK && !cli_stdout_failed(); stage++) {
        cf_steps *steps = NULL;

        code = make_steps(made, stage, &steps);
        if (code != CLI_OK) break;
        if (shown) add_stage(&t, made, steps);
        most->slots = greater(most->slots, steps->n_slots);
        most->tokens = greater(most->tokens, steps->peak_tokens);
        most->states = greater(most->states, steps->n_states);
        most->state_tokens = greater(most->state_tokens, steps->peak_state_tokens);
        most->bytes = greater(most->bytes, made->run.timeline->peak_bytes[stage]);
        cf_steps_free(steps);
    }
    if (shown) ended = table_end(&t);
    return code == CLI_OK ? ended : code;
}

/* Prints the peaks of each stage, and then the highest of them. */
static int print_peaks(const planned *made) {
    int64_t n_virtual = made->run.schedule->shape.n_virtual;
    peaks most;
    int code;

    memset(&most, 0, sizeof most);
    if (made->run.schedule->shape.n_stages > 1) putchar('\n');
    code = print_stages(made, &most);
    if (code != CLI_OK) return code;
    if (made->run.schedule->shape.n_stages > 1) putchar('\n');
    printf("peak activations  %s chunk%s, %s tokens\n", pipeline_share(most.slots, n_virtual),
           most.slots == n_virtual ? "" : "s", pipeline_share(most.tokens, n_virtual));
    printf("peak state        %s chain%s, %s tokens\n", pipeline_share(most.states, n_virtual),
           most.states == n_virtual ? "" : "s",
           pipeline_share(most.state_tokens, n_virtual));
    if (made->pipe.counts_bytes) printf("peak bytes        %s\n", pipeline_share(most.bytes, n_virtual));
    if (n_virtual > 1)
        printf("                  in whole stages: a copy on one of %s virtual stages is 1/%s (files count copies)\n",
               cli_commas(n_virtual), cli_commas(n_virtual));
    pipeline_print_memory(&made->pipe, &made->run);
    return CLI_OK;
}

/* Prints the tables of --tsv, which replace all other output. */
static int print_table(const planned *made) {
    peaks most;

    memset(&most, 0, sizeof most);
    return made->asked->summary ? print_stages(made, &most) : print_actions(made);
}

static int print_all(const planned *made) {
    const plan_options *asked = made->asked;
    int code = CLI_OK;

    if (asked->tsv) return print_table(made);
    if (!asked->summary && !asked->no_list) code = print_list(made);
    if (!asked->summary && code == CLI_OK) {
        code = chart_draw(&made->pipe, made->run.schedule, made->run.timeline, made->held, &asked->chart);
        putchar('\n');
    }
    if (code != CLI_OK) return code;
    print_input(made);
    print_times(made);
    return print_peaks(made);
}

/* ----------------------------------------------------------------------------------------------------------------
   Files
   ---------------------------------------------------------------------------------------------------------------- */

static cf_result write_dot(const planned *made, cli_output *to, cf_error *error) {
    const cf_schedule *schedule = made->run.schedule;
    pipeline_costs costs;
    cf_graph *graph = NULL;
    cf_result result;

    result = pipeline_costs_make(&made->pipe, schedule->shape.n_virtual, made->packed.plan->chunk_size,
                                 CF_RECOMPUTE_DEFAULT, &costs, error);
    if (result != CF_OK) return result;
    result = cf_graph_make(made->packed.plan, schedule, &costs.timing, NULL, &graph, error);
    if (result == CF_OK)
        result = graph_dot_write(graph, made->pipe.estimates ? "s, estimated" : pipeline_unit(made->pipe.unit_cost),
                                 made->asked->max_nodes, cli_write, to, error);
    if (result == CF_ERROR_LIMIT && strcmp(error->field, "n_nodes") == 0)
        snprintf(error->text, sizeof error->text, "--dot: got %lld passes, wanted at most %lld: raise --max-nodes",
                 (long long)error->got, (long long)error->wanted);
    cf_graph_free(graph);
    pipeline_costs_free(&costs);
    return result;
}

/* Checks that readers of the file can tell which chunk a microbatch is. */
static cf_result check_numbering(const planned *made, cf_error *error) {
    const cf_plan *plan = made->packed.plan;
    int64_t first = made->run.schedule->shape.rank * plan->chunks_per_rank, m = 0;
    int32_t *chunks = (int32_t *)malloc(((size_t)plan->chunks_per_rank + 1) * sizeof *chunks);
    cf_result result;

    if (!chunks) return cf_fail(error, CF_ERROR_MEMORY, "chunks", -1, plan->chunks_per_rank, 0, "cannot be had");
    result = schedule_csv_microbatches(plan, made->run.schedule, chunks, error);
    while (result == CF_OK && m < plan->chunks_per_rank && chunks[m] == first + m) m++;
    free(chunks);
    if (result != CF_OK || m == plan->chunks_per_rank || made->asked->paths[MICROBATCHES]) return result;
    (void)cf_refuse(error, CF_ERROR_ARGUMENT, "chunks", m, "");
    snprintf(error->text, sizeof error->text,
             "--csv: the last stage runs the chunks in another order: --microbatches FILE writes which microbatch is "
             "which, --microbatch-order numbers the chunks so");
    return CF_ERROR_ARGUMENT;
}

/* Parses MAJOR.MINOR and any rest after a point or a plus. Returns 0 if it is not a version. *known is 0 for versions
   outside those whose files we have read; they are treated like the nearest known one. */
static int take_torch(const char *text, schedule_csv_torch *out, int *known) {
    size_t major = strspn(text, "0123456789"), minor = text[major] == '.' ? strspn(text + major + 1, "0123456789") : 0;
    char end = text[major + (minor > 0) + minor];
    int64_t numbers[2];

    if (minor == 0 || (end != 0 && end != '.' && end != '+')) return 0;
    if (!cli_parse_number(text, major, &numbers[0]) || !cli_parse_number(text + major + 1, minor, &numbers[1]))
        return 0;
    if (numbers[0] > 2 || (numbers[0] == 2 && numbers[1] >= 15)) *out = SCHEDULE_CSV_TORCH_2_15;
    else *out = numbers[0] == 2 && numbers[1] >= 10 ? SCHEDULE_CSV_TORCH_2_14 : SCHEDULE_CSV_TORCH_2_9;
    *known = numbers[0] == 2 && numbers[1] >= 9 && numbers[1] <= 15;
    return 1;
}

static cf_result write_csv(const planned *made, cli_output *to, cf_error *error) {
    const cf_plan *plan = made->packed.plan;
    const cf_schedule *schedule = made->run.schedule;
    cf_schedule *lowered = NULL;
    schedule_csv_desc desc;
    cf_result result;
    char split[56] = "";
    cf_plan_stats stats;
    cf_error why;
    int known;

    memset(&desc, 0, sizeof desc);
    desc.extensions = made->asked->csv_extensions;
    result = check_numbering(made, error);
    if (result == CF_OK && made->asked->torch) {
        desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
        (void)take_torch(made->asked->torch, &desc.torch, &known); /* checked by check_outputs */
        if (!known)
            fprintf(stderr, "chunkflow plan: PyTorch %s has not been seen; the file is as %s takes it\n",
                    made->asked->torch, desc.torch == SCHEDULE_CSV_TORCH_2_15 ? "2.15" : "2.9");
        if (!schedule->lowered) result = cf_schedule_lower(plan, schedule, NULL, &lowered, error);
    }
    if (result != CF_OK) return result;
    result = schedule_csv_write(plan, lowered ? lowered : schedule, &desc, cli_write, to, error);
    cf_schedule_free(lowered);
    if (result == CF_ERROR_ARGUMENT && !desc.extensions) {
        why = *error;
        cf_plan_measure(plan, NULL, &stats);
        if (stats.longest_sequence > plan->chunk_size)
            snprintf(split, sizeof split, "; --chunk-size %lld splits nothing", (long long)stats.longest_sequence);
        snprintf(error->text, sizeof error->text,
                 "--csv: PyTorch cannot run this schedule: %.110s%s; --csv-extensions writes it all the same", why.text,
                 split);
    }
    return result;
}

/* Writes the schedules of all ranks, each as if alone, and remembers the slowest. */
static int write_schedules(planned *made, cli_output *to) {
    pipeline pipe = made->pipe;
    int64_t n_ranks = made->packed.plan->n_ranks;
    char text[120];
    int n = snprintf(text, sizeof text,
                     "{\n  \"format\": \"chunkflow-schedules\", \"version\": %d, \"n_ranks\": %lld,\n"
                     "  \"schedules\": [\n", CF_JSON_VERSION, (long long)n_ranks);
    int code = CLI_OK;

    (void)cli_write(text, (size_t)n, to);
    for (pipe.rank = 0; pipe.rank < n_ranks && code == CLI_OK; pipe.rank++) {
        pipeline_run run = {0};
        cf_error error;
        if (pipe.rank > 0) (void)cli_write(",\n", 2, to);
        code = make_run(made, &pipe, &run);
        if (code == CLI_OK)
            code = cli_written(cf_write_schedule_json(run.schedule, run.timeline, cli_write, to, &error), &error);
        if (code == CLI_OK && (made->slowest < 0 || run.timeline->makespan > made->longest)) {
            made->slowest = pipe.rank;
            made->longest = run.timeline->makespan;
        }
        pipeline_run_free(&run);
    }
    (void)cli_write("]}\n", 3, to);
    return code;
}

/* Writes the picture of memory. If each virtual stage has its own copy, a limit allows n_virtual times the bytes. */
static cf_result write_memory_svg(const planned *made, cli_output *to, cf_error *error) {
    const pipeline *pipe = &made->pipe;
    int64_t n_virtual = made->run.schedule->shape.n_virtual, limit = pipe->gpu_bytes;

    if (!pipe->has_model) limit = pipeline_scaled(pipe->limit_bytes, n_virtual);
    return svg_memory_write(made->run.schedule, made->run.timeline, made->held, held_unit_of(pipe), limit,
                            pipeline_unit(pipe->unit_cost), &made->asked->svg, cli_write, to, error);
}

static int write_file(planned *made, int which, cli_output *to) {
    cf_write_desc desc = {0, NULL};
    cf_result result = CF_OK;
    cf_error error;

    switch (which) {
    case JSON:
        if (made->asked->all_ranks) return write_schedules(made, to);
        result = cf_write_schedule_json(made->run.schedule, made->run.timeline, cli_write, to, &error);
        break;
    case PLAN_JSON:
        desc.metadata = made->asked->metadata;
        result = cf_write_plan_json(made->packed.plan, &desc, cli_write, to, &error);
        break;
    case CSV: result = write_csv(made, to, &error); break;
    case MICROBATCHES:
        result = schedule_csv_write_microbatches(made->packed.plan, made->run.schedule, cli_write, to, &error);
        break;
    case DOT: result = write_dot(made, to, &error); break;
    case SVG:
        result = svg_chart_write(made->packed.plan, made->run.schedule, made->run.timeline,
                                 pipeline_unit(made->pipe.unit_cost), &made->asked->svg, cli_write, to, &error);
        break;
    case MEMORY_SVG: result = write_memory_svg(made, to, &error); break;
    default: /* seconds stay seconds; a token time becomes a microsecond */
        return trace_write(made->packed.plan, made->run.schedule, made->run.timeline, made->held,
                           held_unit_of(&made->pipe), made->pipe.unit_cost ? 1 : 1e6, to);
    }
    return cli_written(result, &error);
}

static int write_all(planned *made) {
    cli_output outputs[N_OUTPUTS];
    int code = CLI_OK, to_stdout = 0, i;

    memset(outputs, 0, sizeof outputs);
    for (i = 0; i < N_OUTPUTS && code == CLI_OK; i++) code = cli_output_open(&outputs[i], made->asked->paths[i]);
    for (i = 0; i < N_OUTPUTS && code == CLI_OK; i++) {
        if (outputs[i].stream) code = write_file(made, i, &outputs[i]);
        to_stdout |= outputs[i].stream == stdout;
    }
    if (code == CLI_OK && !to_stdout) code = print_all(made);
    return cli_outputs_finish(outputs, N_OUTPUTS, code);
}

static int check_outputs(const plan_options *asked) {
    schedule_csv_torch torch;
    int i, j, known;

    for (i = 0; i < N_OUTPUTS; i++)
        if (table_check("plan", asked->tsv, output_options[i], asked->paths[i]) != CLI_OK) return CLI_WRONG;
    if (asked->metadata && !asked->paths[PLAN_JSON]) return cli_usage("plan", "--metadata wants --plan-json");
    if (asked->all_ranks && !asked->paths[JSON]) return cli_usage("plan", "--all-ranks wants --json, which has them");
    if (asked->all_ranks && asked->microbatch_order)
        return cli_usage("plan", "--microbatch-order numbers the chunks of one rank, --all-ranks wants those of all");
    for (i = 0; i < N_OUTPUTS; i++)
        for (j = i + 1; j < N_OUTPUTS; j++)
            if (asked->paths[i] && asked->paths[j] && strcmp(asked->paths[i], asked->paths[j]) == 0)
                return cli_usage("plan", "%s and %s both name %s", output_options[i], output_options[j],
                                 asked->paths[i]);
    if (asked->torch && !take_torch(asked->torch, &torch, &known))
        return cli_usage("plan", "--torch: got '%s', wanted a version such as 2.14", asked->torch);
    if (asked->torch && !asked->paths[CSV]) return cli_usage("plan", "--torch needs --csv");
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

static int order_microbatches(planned *made) {
    cf_error error;

    if (schedule_csv_renumber(made->packed.plan, made->run.schedule, NULL, &error) == CF_OK) return CLI_OK;
    return cli_error(&error, NULL);
}

/* Counts the bytes that stages hold over time, only if they are shown, because that takes a while. */
static int make_held(planned *made) {
    const plan_options *asked = made->asked;
    int in_chart = !asked->summary && !asked->tsv && held_unit_of(&made->pipe) != HELD_TOKENS;
    cf_error error;

    if (!in_chart && !asked->paths[TRACE] && !asked->paths[MEMORY_SVG]) return CLI_OK;
    if (held_make(&made->pipe, made->packed.plan, made->run.schedule, CF_RECOMPUTE_DEFAULT, &made->held, &error) !=
        CF_OK)
        return cli_error(&error, NULL);
    return CLI_OK;
}

static int run(const void *given, char **operands, int n_operands) {
    const plan_options *asked = (const plan_options *)given;
    pipeline_options pipeline_asked = asked->pipeline;
    packing_options priced = asked->packing;
    planned made;
    cf_error error;
    int code = check_outputs(asked);

    (void)n_operands;
    memset(&made, 0, sizeof made);
    made.slowest = -1;
    made.asked = asked;
    made.kind = (cf_schedule_kind)asked->kind;
    if (pipeline_asked.model.stage_layers) /* of virtual stages */
        pipeline_asked.model.n_virtual = asked->n_virtual;
    if (code == CLI_OK) code = pipeline_open("plan", &pipeline_asked, asked->packing.ranks, &made.pipe);
    if (code != CLI_OK) return code;
    code = pipeline_pack(&made.pipe, &priced, operands[0], &made.packed);
    if (code == CLI_OK && made.pipe.lockstep &&
        pipeline_columns(&made.pipe, made.packed.plan, &made.columns, &error) != CF_OK)
        code = cli_error(&error, NULL);
    if (code == CLI_OK) {
        const cf_plan *plan = made.columns ? made.columns : made.packed.plan;
        pipeline first = made.pipe;
        if (made.columns) first.rank = 0;
        made.k = asked->k > 0         ? asked->k
                 : asked->forward_only ? 1
                 : pipeline_default_k(&first, plan, (cf_replay)asked->replay);
        code = make_run(&made, &made.pipe, &made.run);
        if (code == CLI_OK && asked->microbatch_order) code = order_microbatches(&made);
        if (code == CLI_OK) code = make_held(&made);
        if (code == CLI_OK) code = write_all(&made);
        free(made.held);
        pipeline_run_free(&made.run);
    }
    cf_plan_free(made.columns);
    packing_free(&made.packed);
    pipeline_close(&made.pipe);
    return code;
}

const cli_command cmd_plan = {
    .name = "plan", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "pack a list of lengths, order the passes of its chunks and simulate that",
    .details =
    "Prints the passes of every stage, a chart of them over time, and a summary: makespan, idle share, lower bounds,\n"
    "and what each stage holds at most. F forward, R replay, B backward, I and W its two halves, each with its chunk.\n"
    "With one stage there is a line per pass: F+ and R+ where the activations are kept for the backward, F- where\n"
    "they are dropped, the activation slot, the chunks whose activations are live after it, and the tokens whose K\n"
    "and V are held after it.\n\n"
    PIPELINE_HELP CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
