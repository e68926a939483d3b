/* cmd_check.c - chunkflow check: checks a written plan or schedule, and draws a schedule that has times. */

#include "chart.h"
#include "held.h"
#include "pipeline.h"
#include "progress.h"
#include "saved.h"
#include "schedule_csv.h"
#include "trace.h"

#include <stdlib.h>
#include <string.h>

typedef struct check_options {
    const char *plan;
    const char *lengths;
    pipeline_options pipeline; /* limits, and the costs for --time */
    int64_t k;
    int64_t rank;
    int64_t replay;
    int legacy;
    int forward_only;
    int lockstep;
    int buffered;
    const char *microbatches;
    const char *csv;
    cli_reals skew;
    int draw_chart;
    chart_options chart;
    const char *trace;
    int time;
} check_options;

#undef PIPELINE_LIMIT_DEFAULT
#undef PIPELINE_STATE_DEFAULT
#define PIPELINE_LIMIT_DEFAULT "what is written in the schedule, if anything is"
#define PIPELINE_STATE_DEFAULT "what is written in the schedule, if anything is"

static const check_options defaults = {.pipeline = PIPELINE_DEFAULTS, .rank = -1};

static const cli_option options[] = {
    {.name = "--plan", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(check_options, plan),
     .help = "the plan that a schedule is for, as plan --plan-json wrote it"},
    {.name = "--lengths", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(check_options, lengths),
     .help = "the list that the plan must pack; by default the tokens that\n"
     "the plan itself has of each sequence"},
    PIPELINE_LIMIT_OPTIONS(check_options, pipeline),
    {.name = "--clock-skew", .value = "S", .kind = CLI_REALS, .offset = offsetof(check_options, skew), .min = 1,
     .max = 1,
     .help = "seconds by which the clocks of two stages may differ, for times\n"
     "that were measured on several devices or processes"},
    {.name = "--k", .alias = "--ks", .value = "K", .kind = CLI_NUMBER, .offset = offsetof(check_options, k), .min = 1,
     .max = INT32_MAX,
     .help = "of a schedule in CSV: how many chunks of a chain keep their\n"
     "activations; default: as many as it takes"},
    {.name = "--rank", .value = "R", .kind = CLI_NUMBER, .offset = offsetof(check_options, rank),
     .max = CF_MAX_RANKS - 1, .help = "of a schedule in CSV: whose passes; default 0"},
    {.name = "--replay", .value = "pipeline|local", .kind = CLI_CHOICE, .offset = offsetof(check_options, replay),
     .help = "of a schedule in CSV: how an R comes back; default local"},
    {.name = "--legacy", .kind = CLI_FLAG, .offset = offsetof(check_options, legacy),
     .help = "of a schedule in CSV: B is the gradient of the inputs only,\n"
     "BW the whole backward, as old files have it"},
    {.name = "--forward-only", .kind = CLI_FLAG, .offset = offsetof(check_options, forward_only),
     .help = "of a schedule in CSV: there are no backwards, as plan's option\n"
     "of that name leaves them out"},
    {.name = "--lockstep", .kind = CLI_FLAG, .offset = offsetof(check_options, lockstep),
     .help = "of the schedules of all ranks (plan --all-ranks): they must also\n"
     "run the same kinds of passes in the same order"},
    {.name = "--microbatches", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(check_options, microbatches),
     .help = "of a schedule in CSV: which chunk each microbatch is, as plan\n"
     "--microbatches wrote it; default: they have the same numbers"},
    {.name = "--csv", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(check_options, csv),
     .help = "write a sound schedule in CSV back, with all that stands between\n"
     "its passes. With - nothing else is printed"},
    {.name = "--buffered", .kind = CLI_FLAG, .offset = offsetof(check_options, buffered),
     .help = "of a schedule in CSV: sends do not wait for their receivers,\n"
     "as PyTorch's do not: the order of transfers is not checked"},
    {.name = "--chart", .kind = CLI_FLAG, .offset = offsetof(check_options, draw_chart),
     .help = "draw a sound schedule that has times, or gets them from --time,\n"
     "with makespan and bubbles, as plan does"},
    CHART_OPTIONS(check_options, chart),
    {.name = "--trace", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(check_options, trace),
     .help = "write a trace of it for Perfetto or chrome://tracing. With -\n"
     "nothing else is printed"},
    {.name = "--time", .kind = CLI_FLAG, .offset = offsetof(check_options, time),
     .help = "simulate the schedule with the costs that follow, in place of\n"
     "times that it may have; they are plan's"},
    PIPELINE_COST_OPTIONS(check_options, pipeline),
    {.name = NULL}};

/* An input file and its contents. */
typedef struct source {
    const char *path;
    char *text;
    size_t bytes;
    json_document document; /* if it is JSON */
} source;

static void close_source(source *file) {
    json_free(&file->document);
    free(file->text);
    memset(file, 0, sizeof *file);
}

static int open_source(const char *path, source *file) {
    file->path = path;
    return cli_file_read(path, JSON_MAX_BYTES, &file->text, &file->bytes);
}

static int parse_source(source *file) {
    return json_parse(file->path, file->text, file->bytes, &file->document);
}

static int breaks(const source *file, const char *why) {
    progress_clear();
    cli_put(cli_input_name(file->path), stderr);
    fprintf(stderr, ": breaks a rule: %s\n", why);
    return CLI_FAILED;
}

/* ----------------------------------------------------------------------------------------------------------------
   Plans
   ---------------------------------------------------------------------------------------------------------------- */

/* Checks a plan against the list, or against its own slices. */
static int check_plan(const source *file, const saved_plan *saved, const char *lengths_path) {
    cf_error error;
    cli_list list;
    int64_t *lengths;
    cf_result result;
    int code;

    if (!lengths_path) {
        result = cf_plan_validate(&saved->plan, saved->lengths, saved->plan.n_sequences, NULL, &error);
    } else {
        code = cli_list_read(lengths_path, CLI_MAX_SEQUENCES, &list);
        if (code != CLI_OK) return code;
        lengths = cli_list_lengths(&list);
        if (lengths) result = cf_plan_validate(&saved->plan, lengths, list.n_sequences, NULL, &error);
        free(lengths);
        cli_list_free(&list);
        if (!lengths) return cli_failed("out of memory for %s", cli_input_name(lengths_path));
    }
    if (result == CF_OK) return CLI_OK;
    return result == CF_ERROR_MEMORY ? cli_failed("%s", error.text) : breaks(file, error.text);
}

static int say_plan(const source *file, const cf_plan *plan) {
    cli_put(cli_input_name(file->path), stdout);
    printf(": sound plan: %s, %s, %s of at most %s, %s, %s\n", cli_counted(plan->n_sequences, "sequence"),
           cli_counted(plan->n_tokens, "token"), cli_counted(plan->n_chunks, "chunk"),
           cli_counted(plan->chunk_size, "token"), cli_counted(plan->n_chains, "chain"),
           cli_counted(plan->n_ranks, "rank"));
    return CLI_OK;
}

/* Reads and checks the plan in a parsed file. After CLI_OK call saved_plan_free. */
static int load_plan(const source *file, const char *lengths_path, saved_plan *out) {
    int code = saved_plan_read(&file->document, out);

    if (code != CLI_OK) return code;
    code = check_plan(file, out, lengths_path);
    if (code != CLI_OK) saved_plan_free(out);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   Schedules
   ---------------------------------------------------------------------------------------------------------------- */

/* Checks the times of a schedule. bytes: per token; NULL: not given. */
static int check_times(const source *file, const cf_plan *plan, const saved_schedule *saved, double skew,
                       const cf_held_bytes *bytes) {
    char why[200];
    int holds = saved->has_times ? saved_times_hold(plan, saved, skew, bytes, why, sizeof why) : 1;

    if (holds < 0) return cli_failed("out of memory for %s", cli_input_name(file->path));
    return holds ? CLI_OK : breaks(file, why);
}

/* Validates a schedule. saved: with its times; NULL: it has none, or they are ignored. */
static int validate_schedule(const check_options *asked, const pipeline *pipe, const source *file, const cf_plan *plan,
                             const cf_schedule *schedule, const saved_schedule *saved) {
    cf_validate_desc desc;
    cf_error error;
    cf_result result;
    int64_t *scaled;
    int code = pipeline_limits(pipe, schedule->shape.n_virtual > 0 ? schedule->shape.n_virtual : 1, &desc, &scaled);

    progress_begin("checking");
    if (code == CLI_OK) {
        result = cf_schedule_validate(plan, schedule, &desc, NULL, &error);
        if (result == CF_ERROR_MEMORY) code = cli_failed("%s", error.text);
        else if (result != CF_OK) code = breaks(file, error.text);
    }
    if (code == CLI_OK && saved)
        code = check_times(file, plan, saved, asked->skew.value[0], pipe->counts_bytes ? &pipe->bytes : NULL);
    progress_end();
    free(scaled);
    return code;
}

static int say_schedule(const source *file, const cf_schedule *s, const char *times) {
    const char *kind = s->kind ? cf_schedule_kind_name(s->kind) : "of no named kind";

    cli_put(cli_input_name(file->path), stdout);
    if (s->shape.forward_only) printf(": sound schedule: forwards alone");
    else
        printf(": sound schedule: %s, K = %s, %s replay", kind, cli_commas(s->shape.k),
               cf_replay_name(s->shape.replay));
    printf(", rank %s, %s of %s%s, %s%s\n", cli_commas(s->shape.rank), cli_counted(s->shape.n_stages, "stage"),
           cli_counted(s->shape.n_virtual, "virtual stage"), s->shape.placement == CF_PLACEMENT_V ? " in a V" : "",
           cli_counted(s->n_actions, "action"), times);
    return CLI_OK;
}

static int wants_drawing(const check_options *asked) { return asked->draw_chart || asked->trace; }

static int nothing_to_draw(const source *file) {
    return cli_usage("check",
                     "--chart and --trace want a schedule with times in JSON, and %s is none: --time simulates one",
                     cli_input_name(file->path));
}

/* A sound schedule and its times: the file's or, with a run, simulated ones. */
typedef struct timed {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline; /* NULL: there are none */
    const pipeline *pipe;
    const pipeline_run *run;     /* of --time, or NULL */
    int unit_cost;
} timed;

/* Returns whether every pass takes exactly as long as its number of rows: the file's times are then token times.
   Measured seconds are never that exact. */
static int has_unit_costs(const cf_plan *plan, const cf_schedule *s, const cf_timeline *timeline) {
    int64_t i;

    for (i = 0; i < s->n_actions; i++) {
        double rows = (double)plan->chunks[s->actions[i].chunk].rows / (double)s->shape.n_virtual;
        double unit = s->actions[i].pass == CF_B ? 2 * rows : rows, seconds = timeline->end[i] - timeline->start[i];
        if (s->actions[i].pass >= CF_COMPUTE_PASS_COUNT) continue;
        if (seconds < unit * (1 - 1e-6) || seconds > unit * (1 + 1e-6)) return 0;
    }
    return 1;
}

static int print_chart(const check_options *asked, const timed *t, const int64_t *held) {
    int code;

    putchar('\n');
    code = chart_draw(t->pipe, t->schedule, t->timeline, held, &asked->chart);
    putchar('\n');
    return code;
}

/* Describes, draws and writes a sound schedule. The trace's unit is that of plan --trace: a token time becomes a
   microsecond. */
static int show_schedule(const check_options *asked, const source *file, const timed *t) {
    cli_output trace;
    int64_t *held = NULL;
    cf_error error;
    int code;

    memset(&trace, 0, sizeof trace);
    if (wants_drawing(asked) &&
        held_make(t->pipe, t->plan, t->schedule, CF_RECOMPUTE_DEFAULT, &held, &error) != CF_OK)
        return cli_error(&error, NULL);
    code = cli_output_open(&trace, asked->trace);
    if (code == CLI_OK && trace.stream)
        code = trace_write(t->plan, t->schedule, t->timeline, held, held_unit_of(t->pipe), t->unit_cost ? 1 : 1e6,
                           &trace);
    if (code == CLI_OK && trace.stream != stdout) {
        say_schedule(file, t->schedule, t->timeline && !t->run ? "; its times hold" : "");
        if (asked->draw_chart) code = print_chart(asked, t, held);
        if (t->run) pipeline_print_setting(t->pipe);
        if (asked->draw_chart || t->run) pipeline_print_times(t->timeline, t->unit_cost, t->run != NULL);
        if (t->run) pipeline_print_memory(t->pipe, t->run);
    }
    free(held);
    return cli_outputs_finish(&trace, 1, code);
}

/* With --time. */
static int simulate_and_show(const check_options *asked, const source *file, timed *t) {
    pipeline_run run;
    cf_error error;
    int code;

    if (pipeline_run_of(t->pipe, t->plan, t->schedule, &run, &error) != CF_OK) return cli_error(&error, NULL);
    t->timeline = run.timeline;
    t->run = &run;
    t->unit_cost = t->pipe->unit_cost;
    code = show_schedule(asked, file, t);
    pipeline_run_free(&run);
    return code;
}

/* Checks one schedule. saved: the schedule as it was read, with its times, or NULL. */
static int check_one(const check_options *asked, const source *file, const cf_plan *plan, const cf_schedule *schedule,
                     const saved_schedule *saved) {
    pipeline_options wanted = asked->pipeline;
    timed t = {plan, schedule, NULL, NULL, NULL, 0};
    pipeline pipe;
    int code;

    if (asked->time) saved = NULL;
    if (wants_drawing(asked) && !asked->time && !(saved && saved->has_times)) return nothing_to_draw(file);
    wanted.stages = schedule->shape.n_stages;
    code = pipeline_open("check", &wanted, plan->n_ranks, &pipe);
    if (code != CLI_OK) return code;
    if (schedule->shape.outputs && pipe.has_model && pipe.memory.outputs == 0) {
        pipeline_close(&pipe);
        return cli_usage("check", "%s: its replays take attention's outputs: --outputs must say where they lie",
                         cli_input_name(file->path));
    }
    pipe.rank = schedule->shape.rank;
    t.pipe = &pipe;
    code = validate_schedule(asked, &pipe, file, plan, schedule, saved);
    if (code == CLI_OK && saved && saved->has_times) {
        t.timeline = &saved->timeline;
        t.unit_cost = wanted.unit_cost || has_unit_costs(plan, schedule, t.timeline);
    }
    if (code == CLI_OK) code = asked->time ? simulate_and_show(asked, file, &t) : show_schedule(asked, file, &t);
    pipeline_close(&pipe);
    return code;
}

/* Checks the schedule at a node of the file. rank: the rank to which it must belong; -1: any. */
static int check_json_node(const check_options *asked, const source *file, const cf_plan *plan, uint32_t node,
                           int64_t rank) {
    saved_schedule saved;
    int code = saved_schedule_read(&file->document, node, &saved);

    if (code != CLI_OK) return code;
    if (rank >= 0 && saved.schedule->shape.rank != rank) {
        json_wrong(&file->document, node, "rank: got %lld, wanted %lld: there is one schedule for each rank, in order",
                   (long long)saved.schedule->shape.rank, (long long)rank);
        saved_schedule_free(&saved);
        return CLI_FAILED;
    }
    code = check_one(asked, file, plan, saved.schedule, &saved);
    saved_schedule_free(&saved);
    return code;
}

static int has_cp_groups(const cf_plan *plan) {
    int64_t i;

    for (i = 0; i < plan->n_chains; i++)
        if (plan->chains[i].cp > 0) return 1;
    return 0;
}

/* Checks all schedules in the array together, in lockstep; there must be one per rank. A wrong number of schedules is
   reported elsewhere. */
static int check_together(const source *file, const cf_plan *plan, uint32_t array) {
    const json_document *document = &file->document;
    size_t n = (size_t)plan->n_ranks;
    saved_schedule *saved = (saved_schedule *)calloc(n, sizeof *saved);
    const cf_schedule **schedules = (const cf_schedule **)calloc(n, sizeof *schedules);
    int code = saved && schedules ? CLI_OK : cli_failed("out of memory for %s", cli_input_name(file->path));
    uint32_t node = array + 1;
    size_t rank, n_read = 0;
    cf_error error;

    for (; n_read < n && node < document->nodes[array].next && code == CLI_OK; node = document->nodes[node].next) {
        code = saved_schedule_read(document, node, &saved[n_read]);
        if (code == CLI_OK) schedules[n_read] = saved[n_read].schedule, n_read++;
    }
    if (code == CLI_OK && n_read == n && cf_lockstep_validate(plan, schedules, NULL, NULL, &error) != CF_OK)
        code = error.code == CF_ERROR_MEMORY ? cli_failed("%s", error.text) : breaks(file, error.text);
    for (rank = 0; rank < n_read; rank++) saved_schedule_free(&saved[rank]);
    free(schedules);
    free(saved);
    if (code != CLI_OK || n_read < n) return code;
    cli_put(cli_input_name(file->path), stdout);
    printf(": %s in step\n", cli_counted(plan->n_ranks, "rank"));
    return CLI_OK;
}

static int check_json_schedule(const check_options *asked, const source *file, const cf_plan *plan) {
    const json_document *document = &file->document;
    saved_format format;
    uint32_t array, node;
    int64_t rank = 0;
    int code = saved_format_of(document, &format);

    if (asked->k > 0 || asked->rank >= 0 || asked->replay > 0 || asked->legacy || asked->forward_only)
        return cli_usage("check", "--k, --rank, --replay, --legacy and --forward-only are only for schedules in CSV");
    if (asked->buffered || asked->microbatches || asked->csv)
        return cli_usage("check", "--buffered, --microbatches and --csv are only for schedules in CSV");
    if (code == CLI_OK && format == SAVED_SCHEDULE && asked->lockstep)
        return cli_usage("check", "--lockstep wants the schedules of all ranks");
    if (code == CLI_OK && format == SAVED_SCHEDULE) return check_json_node(asked, file, plan, 0, -1);
    if (wants_drawing(asked)) return cli_usage("check", "--chart and --trace want the schedule of one rank");
    if (code == CLI_OK) code = saved_schedules_find(document, &array);
    if (code == CLI_OK && (asked->lockstep || has_cp_groups(plan)))
        code = check_together(file, plan, array);
    if (code != CLI_OK) return code;
    for (node = array + 1; node < document->nodes[array].next && code == CLI_OK; node = document->nodes[node].next)
        code = check_json_node(asked, file, plan, node, rank++);
    if (code == CLI_OK && rank != plan->n_ranks)
        code = json_wrong(document, 0, "n_ranks: got %lld, the plan has %lld", (long long)rank,
                          (long long)plan->n_ranks);
    return code;
}

static int csv_error(const source *file, const cf_error *error) {
    switch (error->code) {
    case CF_ERROR_TEXT: return cli_at_line(file->path, error->item > 0 ? error->item : 1, "%s", error->text);
    case CF_ERROR_SCHEDULE: return breaks(file, error->text);
    default: return cli_error(error, NULL);
    }
}

/* Reports why a CSV file was refused. A file in which sends do not wait for their receivers looks like one that
   deadlocks, so it checks for that as well. */
static int csv_refused(const source *file, const cf_plan *plan, const schedule_csv_desc *desc, const cf_error *error) {
    schedule_csv_desc buffered = *desc;
    cf_schedule *schedule = NULL;
    char why[2 * sizeof error->text];

    buffered.buffered = 1;
    if (desc->buffered || error->code != CF_ERROR_SCHEDULE ||
        schedule_csv_read(file->text, file->bytes, plan, &buffered, &schedule, NULL, NULL) != CF_OK)
        return csv_error(file, error);
    cf_schedule_free(schedule);
    snprintf(why, sizeof why, "%s; with --buffered, where sends do not wait, it is sound", error->text);
    return breaks(file, why);
}

/* Reads the file of microbatches. Free *chunks; it is NULL if the file was not requested. */
static int read_microbatches(const check_options *asked, const cf_plan *plan, int64_t rank, int32_t **chunks) {
    cf_error error;
    source file;
    int code;

    *chunks = NULL;
    if (!asked->microbatches) return CLI_OK;
    memset(&file, 0, sizeof file);
    code = open_source(asked->microbatches, &file);
    if (code != CLI_OK) return code;
    *chunks = (int32_t *)malloc(((size_t)plan->chunks_per_rank + 1) * sizeof **chunks);
    if (!*chunks) code = cli_failed("out of memory for %s", cli_input_name(file.path));
    else if (schedule_csv_read_microbatches(file.text, file.bytes, plan, rank, *chunks, &error) != CF_OK)
        code = csv_error(&file, &error);
    close_source(&file);
    return code;
}

/* Writes each cell as it was read. */
static int write_back(const source *file, const cf_plan *plan, const cf_schedule *schedule, schedule_csv_desc desc,
                      const schedule_csv_extras *extras, cli_output *to) {
    cf_error error;

    desc.extensions = 1;
    desc.extras = extras;
    desc.format = strstr(file->text, "SEND") ? SCHEDULE_CSV_COMPUTE_COMMS : SCHEDULE_CSV_COMPUTE_ONLY;
    return cli_written(schedule_csv_write(plan, schedule, &desc, cli_write, to, &error), &error);
}

static int check_csv_schedule(const check_options *asked, const source *file, const cf_plan *plan) {
    cli_output csv = {0};
    schedule_csv_desc desc;
    schedule_csv_extras *extras = NULL;
    cf_schedule *schedule = NULL;
    int32_t *chunks;
    cf_error error;
    int code;

    if (wants_drawing(asked) && !asked->time) return nothing_to_draw(file);
    if (asked->lockstep) return cli_usage("check", "--lockstep wants the schedules of all ranks");
    memset(&desc, 0, sizeof desc);
    desc.legacy = asked->legacy;
    desc.forward_only = asked->forward_only;
    desc.buffered = asked->buffered;
    desc.replay = asked->replay > 0 ? (cf_replay)asked->replay : CF_REPLAY_LOCAL; /* as plan makes them */
    desc.k = asked->k;
    desc.rank = asked->rank > 0 ? asked->rank : 0;
    if (desc.rank >= plan->n_ranks)
        return cli_usage("check", "--rank: got %lld, wanted 0 .. %lld", (long long)desc.rank,
                         (long long)plan->n_ranks - 1);
    code = read_microbatches(asked, plan, desc.rank, &chunks);
    desc.chunks = chunks;
    if (code == CLI_OK && schedule_csv_read(file->text, file->bytes, plan, &desc, &schedule, &extras, &error) != CF_OK)
        code = csv_refused(file, plan, &desc, &error);
    if (code == CLI_OK) code = cli_output_open(&csv, asked->csv);
    if (code == CLI_OK && csv.stream) code = write_back(file, plan, schedule, desc, extras, &csv);
    if (code == CLI_OK && csv.stream != stdout) code = check_one(asked, file, plan, schedule, NULL);
    code = cli_outputs_finish(&csv, 1, code);
    schedule_csv_extras_free(extras);
    cf_schedule_free(schedule);
    free(chunks);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

static int looks_like_json(const source *file) {
    size_t blanks = strspn(file->text, " \t\r\n");
    return file->text[blanks] == '{';
}

/* Returns whether a file begins with a number alone, unlike any plan or schedule. */
static int looks_like_lengths(const source *file) {
    const char *word = file->text + strspn(file->text, " \t\r\n");
    size_t n = strcspn(word, " \t\r\n,+#");
    int64_t number;

    return word[n] != ',' && cli_parse_number(word, n, &number);
}

static int load_named_plan(const check_options *asked, source *file, saved_plan *out) {
    saved_format format;
    int code = open_source(asked->plan, file);

    if (code == CLI_OK) code = parse_source(file);
    if (code == CLI_OK) code = saved_format_of(&file->document, &format);
    if (code == CLI_OK && format != SAVED_PLAN)
        code = cli_usage("check", "--plan: %s is a schedule", cli_input_name(asked->plan));
    return code == CLI_OK ? load_plan(file, asked->lengths, out) : code;
}

static int check_schedule(const check_options *asked, const source *file, int is_json) {
    source plan_file;
    saved_plan plan;
    int code;

    memset(&plan_file, 0, sizeof plan_file);
    if (!asked->plan) return cli_usage("check", "%s is a schedule and needs --plan", cli_input_name(file->path));
    code = load_named_plan(asked, &plan_file, &plan);
    if (code == CLI_OK) {
        code = is_json ? check_json_schedule(asked, file, &plan.plan) : check_csv_schedule(asked, file, &plan.plan);
        saved_plan_free(&plan);
    }
    close_source(&plan_file);
    return code;
}

static int check_plan_file(const check_options *asked, const source *file) {
    saved_plan plan;
    int code;

    if (asked->plan) return cli_usage("check", "%s is a plan and takes no --plan", cli_input_name(file->path));
    if (asked->lockstep) return cli_usage("check", "--lockstep wants the schedules of all ranks");
    if (wants_drawing(asked) || asked->time) return nothing_to_draw(file);
    code = load_plan(file, asked->lengths, &plan);
    if (code != CLI_OK) return code;
    say_plan(file, &plan.plan);
    saved_plan_free(&plan);
    return CLI_OK;
}

static int check(const check_options *asked, source *file) {
    saved_format format = SAVED_SCHEDULE;
    int is_json = looks_like_json(file), code = CLI_OK;

    if (strspn(file->text, " \t\r\n") == file->bytes)
        return cli_wrong("%s: is empty, and neither plan nor schedule", cli_input_name(file->path));
    if (is_json) {
        code = parse_source(file);
        if (code == CLI_OK) code = saved_format_of(&file->document, &format);
    }
    if (code != CLI_OK) return code;
    if (looks_like_lengths(file))
        return cli_usage("check", "%s is a list of lengths, and neither plan nor schedule", cli_input_name(file->path));
    return format == SAVED_PLAN ? check_plan_file(asked, file) : check_schedule(asked, file, is_json);
}

static int names_costs(const pipeline_options *p) {
    return p->forward.n > 0 || p->costs || p->gpu.name || p->model.model || p->model.config;
}

static int run(const void *given, char **operands, int n_operands) {
    const check_options *asked = (const check_options *)given;
    source file;
    int from_stdin = strcmp(operands[0], "-") == 0, code;

    (void)n_operands;
    from_stdin += asked->plan && strcmp(asked->plan, "-") == 0;
    from_stdin += asked->lengths && strcmp(asked->lengths, "-") == 0;
    from_stdin += asked->microbatches && strcmp(asked->microbatches, "-") == 0;
    if ((asked->chart.width > 0 || asked->chart.colour > 0) && !asked->draw_chart)
        return cli_usage("check", "--width and --color need --chart");
    if (names_costs(&asked->pipeline) && !asked->time) return cli_usage("check", "costs, models and GPUs need --time");
    if (asked->pipeline.unit_cost && !asked->time && !wants_drawing(asked))
        return cli_usage("check", "--unit-cost needs --chart or --trace, or --time");
    if (from_stdin > 1) return cli_usage("check", "only one file can be standard input");
    memset(&file, 0, sizeof file);
    code = open_source(operands[0], &file);
    if (code == CLI_OK) code = check(asked, &file);
    close_source(&file);
    return code;
}

const cli_command cmd_check = {
    .name = "check", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "whether a written plan or schedule is sound; draws a schedule that has times",
    .details =
    "FILE is a plan (plan --plan-json), or a schedule (plan --json, plan --csv, or from elsewhere) with --plan. Every\n"
    "rule is checked by code that shares nothing with what made the file; of times that a schedule has, that they fit\n"
    "its order, its sums and its bounds, and that the peaks are those of the lists (in bytes: with --token-bytes).\n"
    "Exit code 0: sound; 1: a rule is broken, and one line names the first violation; 2: the file cannot be read.\n\n"
    "    chunkflow plan --chunk-size 8K --k 2 --stages 4 --plan-json plan.json --json schedule.json lengths\n"
    "    chunkflow check plan.json --lengths lengths\n"
    "    chunkflow check --plan plan.json schedule.json\n"
    "    chunkflow check --plan plan.json measured.json --clock-skew 1e-5 --chart --trace trace.json\n"
    "    chunkflow check --plan plan.json edited.csv --time --model qwen2.5-7b --gpu h100-80g --tp 4\n\n"
    "Times of a file are token times where every pass takes just as long as its rows say, and seconds elsewhere.\n\n"
    MODELLING_NAMES MODELLING_GPUS,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
