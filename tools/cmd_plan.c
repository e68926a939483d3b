/* cmd_plan.c - chunkflow plan: pack a list of lengths and order the passes of its chunks. */

#include "packing.h"

#include <string.h>

typedef struct plan_options {
    packing_options packing;
    int64_t k;
    int64_t rank;
    int64_t replay;
    int summary;
    const char *json;
    const char *plan_json;
} plan_options;

static const plan_options defaults = {PACKING_DEFAULTS, 0, 0, 0, 0, NULL, NULL};

static const cli_option options[] = {
    PACKING_OPTIONS(plan_options, packing),
    {"--k", "K", CLI_NUMBER, offsetof(plan_options, k), 1, INT32_MAX, 1,
     "how many chunks of a group keep their activations; required"},
    {"--rank", "R", CLI_NUMBER, offsetof(plan_options, rank), 0, CF_MAX_RANKS - 1, 0,
     "whose passes, of the D ranks; default 0"},
    {"--replay", "pipeline|local", CLI_CHOICE, offsetof(plan_options, replay), 0, 0, 0,
     "how dropped activations come back: through all stages again\n(the default), or on each stage alone"},
    {"--summary", NULL, CLI_FLAG, offsetof(plan_options, summary), 0, 0, 0, "print no line per pass, only the summary"},
    {"--json", "FILE|-", CLI_TEXT, offsetof(plan_options, json), 0, 0, 0,
     "write the schedule as JSON; with - nothing else is printed"},
    {"--plan-json", "FILE|-", CLI_TEXT, offsetof(plan_options, plan_json), 0, 0, 0,
     "write the plan as JSON; with - nothing else is printed"},
    {NULL, NULL, CLI_FLAG, 0, 0, 0, 0, NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   The action list, printed by a dry run of the interpreter: what it counts is what a trainer will see
   ---------------------------------------------------------------------------------------------------------------- */

static void print_action_header(void) {
    printf("%9s  %-4s  %9s  %-10s  %-16s %12s %14s %7s %6s %14s\n", "position", "pass", "chunk", "kind",
           "part of group", "tokens", "prefix", "slot", "live", "state tokens");
}

static int print_action(void *user, const cf_progress *progress) {
    const cf_step *step = progress->step;
    const cf_chunk *chunk = step->chunk;
    const char *keep = step->action.pass > CF_R ? "" : step->action.keep ? "+" : "-";
    char part[56] = "-", slot[24] = "-";

    (void)user;
    if (chunk->group >= 0)
        snprintf(part, sizeof part, "%lld: %lld/%lld", (long long)chunk->group, (long long)chunk->index + 1,
                 (long long)step->plan->groups[chunk->group].n_chunks);
    if (step->slot >= 0) snprintf(slot, sizeof slot, "%lld", (long long)step->slot);
    printf("%9lld  %s%-3s  %9lld  %-10s  %-16s %12lld %14lld %7s %6lld %14lld\n", (long long)step->position,
           cf_pass_name((cf_pass)step->action.pass), keep, (long long)step->action.chunk, packing_chunk_kind(chunk),
           part, (long long)chunk->tokens, (long long)chunk->prefix, slot, (long long)progress->live_slots,
           (long long)progress->live_state_tokens);
    return cli_stdout_failed();
}

/* Actions by pass. */
static void print_counts(const cf_schedule *schedule) {
    int64_t counts[CF_PASS_COUNT] = {0};
    int64_t i;
    int pass;

    for (i = 0; i < schedule->n_actions; i++) counts[schedule->actions[i].pass]++;
    printf("actions           %s", cli_commas(schedule->n_actions));
    for (pass = 0; pass < CF_PASS_COUNT; pass++)
        if (counts[pass] > 0)
            printf("%s %s %s", pass == 0 ? ":" : ",", cli_commas(counts[pass]), cf_pass_name((cf_pass)pass));
    putchar('\n');
}

static void print_summary(const packing *packed, const cf_schedule *schedule, const cf_run_stats *stats) {
    const cf_plan *plan = packed->plan;

    printf("input             %s: %s sequences, %s tokens\n", cli_input_name(packed->list.path),
           cli_commas(plan->n_sequences), cli_commas(plan->n_tokens));
    printf("plan              %s chunks of at most %s tokens, %s groups, %s ranks with %s steps each\n",
           cli_commas(plan->n_chunks), cli_commas(plan->chunk_size), cli_commas(plan->n_groups),
           cli_commas(plan->n_ranks), cli_commas(plan->n_steps));
    printf("schedule          %s, K = %s, %s replay, rank %s, %s stage%s\n", cf_schedule_kind_name(schedule->kind),
           cli_commas(schedule->k), cf_replay_name(schedule->replay), cli_commas(schedule->rank),
           cli_commas(schedule->n_stages), schedule->n_stages == 1 ? "" : "s");
    print_counts(schedule);
    printf("peak activations  %s chunks, %s tokens\n", cli_commas(stats->peak_slots), cli_commas(stats->peak_tokens));
    printf("peak state        %s groups, %s tokens\n", cli_commas(stats->peak_states),
           cli_commas(stats->peak_state_tokens));
}

static int print_schedule(const packing *packed, const cf_schedule *schedule, int only_summary) {
    cf_run_desc dry;
    cf_run_stats stats;
    cf_error error;

    memset(&dry, 0, sizeof dry);
    if (!only_summary) {
        dry.progress = print_action;
        print_action_header();
    }
    if (cf_run(packed->plan, schedule, 0, &dry, &stats, &error) != CF_OK) {
        /* A cancelled run met a failing standard output, which is reported when that is closed. */
        return error.code == CF_ERROR_CANCELLED ? CLI_OK : packing_error(&error, NULL);
    }
    if (!only_summary) putchar('\n');
    print_summary(packed, schedule, &stats);
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

enum { SCHEDULE_OUTPUT, PLAN_OUTPUT, N_OUTPUTS };

/* A failing file is reported when it is closed. */
static int write_json(const packing *packed, const cf_schedule *schedule, cli_output *outputs) {
    cli_output *to_schedule = &outputs[SCHEDULE_OUTPUT], *to_plan = &outputs[PLAN_OUTPUT];
    cf_result result = CF_OK;
    cf_error error;

    if (to_schedule->stream) result = cf_write_schedule_json(schedule, NULL, cli_write, to_schedule, &error);
    if (result == CF_OK && to_plan->stream) result = cf_write_plan_json(packed->plan, cli_write, to_plan, &error);
    return result == CF_OK || result == CF_ERROR_WRITE ? CLI_OK : packing_error(&error, NULL);
}

static int write_all(const plan_options *asked, const packing *packed, const cf_schedule *schedule) {
    cli_output outputs[N_OUTPUTS] = {{0}, {0}};
    int code = cli_output_open(&outputs[SCHEDULE_OUTPUT], asked->json);

    if (code == CLI_OK) code = cli_output_open(&outputs[PLAN_OUTPUT], asked->plan_json);
    if (code == CLI_OK) code = write_json(packed, schedule, outputs);
    if (code == CLI_OK && outputs[SCHEDULE_OUTPUT].stream != stdout && outputs[PLAN_OUTPUT].stream != stdout)
        code = print_schedule(packed, schedule, asked->summary);
    return cli_outputs_finish(outputs, N_OUTPUTS, code);
}

static int run(const void *given, char **operands, int n_operands) {
    const plan_options *asked = (const plan_options *)given;
    cf_schedule_desc desc;
    cf_schedule *schedule = NULL;
    cf_error error;
    packing packed;
    int code;

    (void)n_operands;
    if (asked->json && asked->plan_json && strcmp(asked->json, asked->plan_json) == 0)
        return cli_usage("plan", "--json and --plan-json both name %s", asked->json);
    if (asked->rank >= (asked->packing.ranks ? asked->packing.ranks : 1))
        return cli_usage("plan", "--rank: got %lld, wanted 0 .. %lld, below --ranks", (long long)asked->rank,
                         (long long)(asked->packing.ranks ? asked->packing.ranks - 1 : 0));
    code = packing_make(&asked->packing, operands[0], &packed);
    if (code != CLI_OK) return code;

    memset(&desc, 0, sizeof desc);
    desc.k = asked->k;
    desc.rank = asked->rank;
    desc.replay = (cf_replay)asked->replay;
    if (cf_schedule_make(packed.plan, &desc, &schedule, &error) == CF_OK) code = write_all(asked, &packed, schedule);
    else code = packing_error(&error, NULL);
    cf_schedule_free(schedule);
    packing_free(&packed);
    return code;
}

const cli_command cmd_plan = {
    "plan", "FILE|-", 1, 1,
    "pack a list of lengths and order the passes of its chunks",
    "The text is one line per pass: F forward, R replay, B backward, F+ and R+ where the activations are kept for the\n"
    "backward and F- where they are dropped, with the activation slot, the chunks whose activations are live after\n"
    "it, and the tokens whose K and V are held after it.\n\n" CLI_LIST_HELP,
    options, &defaults, sizeof defaults, run};
