/* cmd_report.c - chunkflow report: a batch, its chunks and its schedules as one HTML file. */

#include "report.h"
#include "../command/progress.h"
#include "../command/saved.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct report_options {
    packing_options packing;
    pipeline_options pipeline;
    int64_t k;
    int64_t kind;
    int split_backward;
    int64_t replay;
    int64_t n_virtual;
    int64_t placement;
    const char *measured;
    cli_reals skew;
    int no_cp;
    const char *output;
    const char *json;
} report_options;

static const report_options defaults = {.pipeline = PIPELINE_DEFAULTS};

static const cli_option options[] = {
    {.name = "-o", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(report_options, output),
     .help = "the HTML file to write"},
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(report_options, json),
     .help = "write the numbers of the page as JSON; -o, --json or both"},
    PACKING_OPTIONS(report_options, packing),
    PACKING_GANG_OPTION(report_options, packing),
    {.name = "--k", .alias = "--ks", .value = "K", .kind = CLI_NUMBER, .offset = offsetof(report_options, k), .min = 1,
     .max = INT32_MAX, .help = "most chunks of a chain that keep their activations;\n" PIPELINE_K_DEFAULT},
    {.name = "--schedule", .value = "paper|gpipe|1f1b|interleaved|zero-bubble|best", .kind = CLI_CHOICE,
     .offset = offsetof(report_options, kind),
     .help = "this schedule alone beside whole sequences, as plan makes it,\n"
     "and no other options tried; default: several, compared"},
    {.name = "--split-backward", .needs = "--schedule", .kind = CLI_FLAG,
     .offset = offsetof(report_options, split_backward),
     .help = "that best may cut backwards into I and W"},
    {.name = "--replay", .value = "pipeline|local", .kind = CLI_CHOICE, .offset = offsetof(report_options, replay),
     .help = "how dropped activations come back: through all stages again\n"
     "(paper alone), or on each stage alone (the default)"},
    VIRTUAL_OPTIONS(report_options),
    {.name = "--measured", .value = "FILE", .kind = CLI_TEXT, .offset = offsetof(report_options, measured),
     .help = "a schedule of these chunks with times that were measured, to\n"
     "be shown beside what the costs predict for it"},
    {.name = "--clock-skew", .value = "S", .kind = CLI_REALS, .offset = offsetof(report_options, skew), .min = 1,
     .max = 1, .help = "seconds by which the clocks of two of its stages may differ"},
    NO_CP_OPTION(report_options),
    PIPELINE_OPTIONS(report_options, pipeline),
    {.name = NULL}};

/* Objects that are made for a report and freed after it. */
typedef struct maker {
    const report_options *asked;
    packing_options priced;
    int64_t k;
    packing packed;
    pipeline pipe;
    saved_schedule saved;
    json_document document; /* of the file of --measured */
    report out;
} maker;

/* ----------------------------------------------------------------------------------------------------------------
   Schedules and ranks
   ---------------------------------------------------------------------------------------------------------------- */

static pipeline_case case_of(const maker *m, cf_schedule_kind kind, int split) {
    pipeline_case what;

    memset(&what, 0, sizeof what);
    what.kind = kind;
    what.k = m->k;
    what.split_backward = split;
    /* A single schedule gets all options, and is refused if it does not support them. Several get those that they
       support. */
    if (m->asked->kind || kind == CF_SCHEDULE_PAPER) what.replay = (cf_replay)m->asked->replay;
    if (m->asked->kind) {
        what.n_virtual = m->asked->n_virtual;
        what.placement = (cf_placement)m->asked->placement;
    } else pipeline_place(&what, m->asked->n_virtual, (cf_placement)m->asked->placement);
    return what;
}

static int add_case(maker *m, const char *name, cf_schedule_kind kind, int split) {
    pipeline_case what = case_of(m, kind, split);
    return report_add_case(&m->out, name, &what);
}

/* Returns the kind of the main schedule: the requested one; with cp groups on one stage, paper; else best. */
static cf_schedule_kind main_kind(const maker *m) {
    if (m->asked->kind) return (cf_schedule_kind)m->asked->kind;
    return pipeline_takes_paper(&m->pipe) ? CF_SCHEDULE_PAPER : CF_SCHEDULE_BEST;
}

static int add_cases(maker *m) {
    int splits = pipeline_splits_backwards(&m->pipe), split = m->asked->split_backward, code;

    if (m->asked->kind)
        return add_case(m,
                        split && main_kind(m) == CF_SCHEDULE_BEST ? "best, I + W" : cf_schedule_kind_name(main_kind(m)),
                        main_kind(m), split);
    code = add_case(m, "paper", CF_SCHEDULE_PAPER, 0);
    if (pipeline_takes_paper(&m->pipe)) return code;
    if (code == CLI_OK && splits) code = add_case(m, "zero-bubble", CF_SCHEDULE_ZERO_BUBBLE, 0);
    if (code == CLI_OK) code = add_case(m, "best", CF_SCHEDULE_BEST, 0);
    if (code == CLI_OK && splits) code = add_case(m, "best, I + W", CF_SCHEDULE_BEST, 1);
    return code;
}

/* A report_rank_fn. */
static cf_result simulate_rank(void *user, const pipeline *rank, pipeline_run *out) {
    const maker *m = (const maker *)user;
    pipeline_case what = case_of(m, main_kind(m), m->asked->split_backward);
    cf_error error;

    return pipeline_run_make(rank, m->packed.plan, &what, out, &error);
}

/* ----------------------------------------------------------------------------------------------------------------
   A measured timeline
   ---------------------------------------------------------------------------------------------------------------- */

static int read_measured(maker *m) {
    const char *path = m->asked->measured;
    saved_format format;
    int code = json_file_read(path, JSON_MAX_BYTES, &m->document);

    if (code == CLI_OK) code = saved_format_of(&m->document, &format);
    if (code == CLI_OK && format != SAVED_SCHEDULE)
        code = cli_usage("report", "--measured: %s is a plan", cli_input_name(path));
    if (code == CLI_OK) code = saved_schedule_read(&m->document, 0, &m->saved);
    return code;
}

/* Checks a measured schedule: it must be a sound schedule of exactly these chunks, with times. */
static int check_measured(const maker *m) {
    const char *path = cli_input_name(m->asked->measured);
    cf_validate_desc desc;
    cf_error error;
    char why[200];
    int holds;

    memset(&desc, 0, sizeof desc);
    if (!m->saved.has_times) return cli_wrong("%s: has no times", path);
    if (m->saved.schedule->shape.n_stages != m->pipe.n_stages || m->saved.schedule->shape.rank != m->pipe.rank)
        return cli_wrong("%s: is for %lld stages and rank %lld, wanted %lld and %lld", path,
                         (long long)m->saved.schedule->shape.n_stages, (long long)m->saved.schedule->shape.rank,
                         (long long)m->pipe.n_stages, (long long)m->pipe.rank);
    if (cf_schedule_validate(m->packed.plan, m->saved.schedule, &desc, NULL, &error) != CF_OK)
        return cli_wrong("%s: no schedule of these chunks: %s", path, error.text);
    holds = saved_times_hold(m->packed.plan, &m->saved, m->asked->skew.value[0], NULL, why, sizeof why);
    if (holds < 0) return cli_failed("out of memory for %s", path);
    return holds ? CLI_OK : cli_wrong("%s: breaks a rule: %s", path, why);
}

static void compare_times(report *r, const cf_schedule *schedule, const cf_timeline *predicted,
                          const cf_timeline *measured) {
    int64_t i, timed[CF_COMPUTE_PASS_COUNT] = {0};
    int pass;

    for (i = 0; i < schedule->n_actions; i++) {
        double wanted = measured->end[i] - measured->start[i], got = predicted->end[i] - predicted->start[i];
        report_error *e = &r->errors[schedule->actions[i].pass % CF_COMPUTE_PASS_COUNT];
        if (schedule->actions[i].pass >= CF_COMPUTE_PASS_COUNT) continue;
        e->n++;
        e->predicted += got;
        e->measured += wanted;
        if (!(wanted > 0)) continue;
        e->off += fabs(got - wanted) / wanted;
        timed[schedule->actions[i].pass]++;
    }
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (timed[pass] > 0) r->errors[pass].off /= (double)timed[pass];
}

static int add_measured(maker *m) {
    report *r = &m->out;
    pipeline_run run, none;
    cf_error error;
    int code;

    if (!m->asked->measured) return CLI_OK;
    if (m->pipe.unit_cost) return cli_usage("report", "--measured needs costs in seconds: --cost, --costs or --gpu");
    code = read_measured(m);
    if (code == CLI_OK) code = check_measured(m);
    if (code != CLI_OK) return code;
    if (pipeline_run_of(&m->pipe, m->packed.plan, m->saved.schedule, &run, &error) != CF_OK)
        return cli_error(&error, NULL);
    r->predicted = r->n_schedules;
    code = report_add_run(r, "predicted", m->packed.plan, m->saved.schedule, &run, CF_RECOMPUTE_DEFAULT, NULL);
    if (code != CLI_OK) return code;
    none = run;
    none.timeline = NULL;
    none.memory = NULL;
    r->measured = r->n_schedules;
    compare_times(r, m->saved.schedule, run.timeline, &m->saved.timeline);
    code = report_add_run(r, "measured", m->packed.plan, m->saved.schedule, &run, CF_RECOMPUTE_DEFAULT,
                          &m->saved.timeline);
    r->runs[r->measured] = none; /* the prediction owns them */
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

static void free_all(maker *m) {
    report_free(&m->out);
    saved_schedule_free(&m->saved);
    json_free(&m->document);
    packing_free(&m->packed);
    pipeline_close(&m->pipe);
}

static int make(maker *m) {
    pipeline_case best;
    int code;

    m->k = m->asked->k > 0 ? m->asked->k
           : pipeline_default_k(&m->pipe, m->packed.plan, (cf_replay)m->asked->replay);
    best = case_of(m, main_kind(m), pipeline_splits_backwards(&m->pipe));
    report_start(&m->out, &m->packed, &m->pipe, m->k);
    m->out.k_words = m->asked->k > 0 ? NULL : pipeline_default_k_words(&m->pipe);
    code = report_add_baseline(&m->out, &m->asked->packing, NULL);
    if (code == CLI_OK && !m->asked->no_cp) code = report_add_context(&m->out, &m->asked->packing);
    if (code == CLI_OK)
        code = report_add_ranks(&m->out, &m->pipe, cf_schedule_kind_name(main_kind(m)), simulate_rank, m);
    if (code == CLI_OK) code = add_cases(m);
    if (code == CLI_OK && !m->asked->kind) code = report_try_changes(&m->out, &best, &m->priced);
    if (code == CLI_OK) code = add_measured(m);
    return code;
}

static int write_files(const maker *m) {
    cli_output outputs[2] = {{0}, {0}};
    char text[1024];
    int code = cli_output_open(&outputs[0], m->asked->output), i;

    if (code == CLI_OK) code = cli_output_open(&outputs[1], m->asked->json);
    if (code == CLI_OK && outputs[0].stream) report_write_report(&m->out, &outputs[0]);
    if (code == CLI_OK && outputs[1].stream) report_write_json(&m->out, &outputs[1]);
    if (code == CLI_OK && outputs[0].stream != stdout && outputs[1].stream != stdout) {
        report_sentence(&m->out, text, sizeof text);
        puts(text);
        for (i = 0; report_advice(&m->out, i, text, sizeof text); i++) puts(text);
    }
    return cli_outputs_finish(outputs, 2, code);
}

static int run(const void *given, char **operands, int n_operands) {
    maker m;
    int code;

    (void)n_operands;
    memset(&m, 0, sizeof m);
    m.asked = (const report_options *)given;
    if (!m.asked->output && !m.asked->json) return cli_usage("report", "-o or --json is required");
    if (m.asked->output && m.asked->json && strcmp(m.asked->json, m.asked->output) == 0)
        return cli_usage("report", "-o and --json both name %s", m.asked->output);
    code = pipeline_open("report", &m.asked->pipeline, m.asked->packing.ranks, &m.pipe);
    if (code != CLI_OK) return code;
    m.priced = m.asked->packing;
    m.pipe.every_rank = m.asked->pipeline.rank < 0 && !m.asked->measured;
    code = pipeline_pack(&m.pipe, &m.priced, operands[0], &m.packed);
    progress_begin("reporting");
    if (code == CLI_OK) code = make(&m);
    progress_end();
    if (code == CLI_OK) code = write_files(&m);
    free_all(&m);
    return code;
}

const cli_command cmd_report = {
    .name = "report", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "a batch, its chunks and its schedules as one HTML file",
    .details =
    "The file needs no network and no other file. It shows what chunks gain against 1F1B on unsplit sequences, the\n"
    "lengths and what packing made of them, the schedules on one time axis, memory over time, and why stages are\n"
    "idle; for data-parallel ranks how even they are, and for a measured schedule how far the prediction was off. "
    "With\n"
    "--model and --gpu it tries other ChunkSizes, --k, --limit, --recompute, --virtual and --stage-layers on the\n"
    "best schedule, and advises what is shorter by 1 % or more and fits.\n\n"
    "    chunkflow report --chunk-size 8K --k 4 --stages 4 --model qwen2.5-7b --gpu h100-80g --tp 4 \\\n"
    "        lengths.txt -o report.html\n\n" PIPELINE_HELP CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
