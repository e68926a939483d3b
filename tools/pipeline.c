/* pipeline.c - from a plan to a simulated schedule. */

#include "pipeline.h"

#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Options
   ---------------------------------------------------------------------------------------------------------------- */

static int is_zero(const cli_reals *cost) {
    return cost->value[0] == 0 && cost->value[1] == 0 && cost->value[2] == 0;
}

static int take_cost(const char *command, const char *option, const cli_reals *given, cf_pass_cost *out) {
    if (given->n == 0) return CLI_OK;
    /* To the library a cost of nothing means "derive it". */
    if (is_zero(given)) return cli_usage(command, "%s: got 0,0,0, wanted a cost above 0", option);
    out->constant = given->value[0];
    out->per_token = given->value[1];
    out->per_pair = given->value[2];
    return CLI_OK;
}

static int take_timing(const char *command, const pipeline_options *asked, pipeline *p) {
    const struct {
        const char *option;
        const cli_reals *given;
        cf_pass_cost *out;
    } costs[] = {{"--cost", &asked->forward, &p->timing.all.forward},
                 {"--replay-cost", &asked->replay, &p->timing.all.replay},
                 {"--backward-cost", &asked->backward, &p->timing.all.backward},
                 {"--input-cost", &asked->input, &p->timing.all.input},
                 {"--weight-cost", &asked->weight, &p->timing.all.weight}};
    size_t i;
    int code = CLI_OK;

    for (i = 0; i < sizeof costs / sizeof costs[0] && code == CLI_OK; i++) {
        if (costs[i].given->n > 0 && asked->forward.n == 0)
            return cli_usage(command, "%s needs --cost", costs[i].option);
        if (costs[i].given->n > 0 && asked->unit_cost)
            return cli_usage(command, "%s and --unit-cost exclude each other", costs[i].option);
        code = take_cost(command, costs[i].option, costs[i].given, costs[i].out);
    }
    p->unit_cost = asked->forward.n == 0;
    p->timing.latency = asked->latency.value[0];
    p->timing.seconds_per_token = asked->seconds_per_token.value[0];
    p->timing.offload_seconds_per_token = asked->offload_seconds_per_token.value[0];
    p->timing.no_overlap = asked->no_overlap;
    return code;
}

static int take_token_bytes(const char *command, const pipeline_options *asked, pipeline *p) {
    int64_t *numbers, n;
    int code;

    if (!asked->token_bytes)
        return asked->limit_bytes > 0 ? cli_usage(command, "--limit-bytes needs --token-bytes") : CLI_OK;
    code = cli_take_numbers(command, "--token-bytes", asked->token_bytes, 0, INT64_MAX, &numbers, &n);
    if (code != CLI_OK) return code;
    if (n == 4) {
        p->bytes.per_token_activations = numbers[0];
        p->bytes.per_token_state = numbers[1];
        p->bytes.per_token_state_gradient = numbers[2];
        p->bytes.per_token_boundary = numbers[3];
        p->counts_bytes = 1;
    } else {
        code = cli_usage(command, "--token-bytes: got %lld numbers, wanted 4", (long long)n);
    }
    free(numbers);
    return code;
}

static int take_limits(const char *command, const pipeline_options *asked, pipeline *p) {
    int64_t n;
    int code;

    p->limit = asked->limit;
    p->limit_bytes = asked->limit_bytes;
    if (!asked->limits) return CLI_OK;
    if (asked->limit > 0) return cli_usage(command, "--limit and --limits exclude each other");
    code = cli_take_numbers(command, "--limits", asked->limits, 1, INT32_MAX, &p->limits, &n);
    if (code == CLI_OK && n != asked->stages)
        code = cli_usage(command, "--limits: got %lld numbers, wanted one for each of %lld stages", (long long)n,
                         (long long)asked->stages);
    return code;
}

int pipeline_open(const char *command, const pipeline_options *asked, int64_t n_ranks, pipeline *out) {
    pipeline fresh;
    int code;

    memset(&fresh, 0, sizeof fresh);
    fresh.n_stages = asked->stages;
    fresh.rank = asked->rank;
    fresh.budget = asked->budget;
    if (n_ranks == 0) n_ranks = 1;
    if (asked->rank >= n_ranks)
        return cli_usage(command, "--rank: got %lld, wanted 0 .. %lld, below --ranks", (long long)asked->rank,
                         (long long)(n_ranks - 1));
    code = take_timing(command, asked, &fresh);
    if (code == CLI_OK) code = take_token_bytes(command, asked, &fresh);
    if (code == CLI_OK) code = take_limits(command, asked, &fresh);
    if (code == CLI_OK) *out = fresh;
    else pipeline_close(&fresh);
    return code;
}

void pipeline_close(pipeline *p) {
    free(p->limits);
    memset(p, 0, sizeof *p);
}

/* ----------------------------------------------------------------------------------------------------------------
   Virtual stages: the library counts each by itself, the options speak of whole stages
   ---------------------------------------------------------------------------------------------------------------- */

static void divide_cost(cf_pass_cost *cost, int64_t n) {
    cost->constant /= (double)n;
    cost->per_token /= (double)n;
    cost->per_pair /= (double)n;
}

cf_timing pipeline_timing(const pipeline *p, int64_t n_virtual) {
    cf_timing timing = p->timing;

    if (n_virtual <= 1) return timing;
    if (p->unit_cost) {
        timing.all.forward.per_token = 1;
        timing.all.backward.per_token = 2;
    }
    divide_cost(&timing.all.forward, n_virtual);
    divide_cost(&timing.all.replay, n_virtual);
    divide_cost(&timing.all.backward, n_virtual);
    divide_cost(&timing.all.input, n_virtual);
    divide_cost(&timing.all.weight, n_virtual);
    timing.offload_seconds_per_token /= (double)n_virtual;
    return timing;
}

static int64_t scale_limit(int64_t limit, int64_t n_virtual) {
    return limit > INT64_MAX / n_virtual ? INT64_MAX : limit * n_virtual;
}

/* NULL where there is no memory for them. */
static int64_t *scale_limits(const pipeline *p, int64_t n_virtual) {
    int64_t *scaled = (int64_t *)malloc((size_t)p->n_stages * sizeof *scaled);
    int64_t s;

    for (s = 0; scaled && s < p->n_stages; s++) scaled[s] = scale_limit(p->limits[s], n_virtual);
    return scaled;
}

int pipeline_limits(const pipeline *p, int64_t n_virtual, cf_validate_desc *out, int64_t **limits) {
    *limits = NULL;
    memset(out, 0, sizeof *out);
    if (p->limits && !(*limits = scale_limits(p, n_virtual))) return cli_failed("out of memory");
    out->limit = scale_limit(p->limit, n_virtual);
    out->limits = *limits;
    out->bytes = p->bytes;
    out->limit_bytes = scale_limit(p->limit_bytes, n_virtual);
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Schedule and timeline
   ---------------------------------------------------------------------------------------------------------------- */

static cf_result no_memory(cf_error *error) {
    memset(error, 0, sizeof *error);
    error->code = CF_ERROR_MEMORY;
    error->item = -1;
    error->field = "memory";
    strcpy(error->text, "out of memory");
    return error->code;
}

/* In place of a schedule, the same with its transfers. */
static cf_result lower(const cf_plan *plan, const cf_timing *timing, int offload, cf_schedule **schedule,
                       cf_error *error) {
    cf_lower_desc desc;
    cf_schedule *lowered = NULL;
    cf_result result;

    memset(&desc, 0, sizeof desc);
    desc.timing = timing;
    desc.offload = offload;
    result = cf_schedule_lower(plan, *schedule, &desc, &lowered, error);
    if (result != CF_OK) return result;
    cf_schedule_free(*schedule);
    *schedule = lowered;
    return CF_OK;
}

static cf_result make(const pipeline *p, const cf_plan *plan, const pipeline_case *what, const cf_schedule_desc *desc,
                      pipeline_run *run, cf_error *error) {
    cf_simulate_desc simulate;
    cf_result result = cf_schedule_make(plan, desc, &run->schedule, error);

    if (result == CF_OK && (what->lower || what->offload))
        result = lower(plan, desc->timing, what->offload, &run->schedule, error);
    if (result != CF_OK) return result;
    memset(&simulate, 0, sizeof simulate);
    simulate.timing = desc->timing;
    simulate.bytes = p->bytes;
    simulate.limit = desc->limit;
    simulate.limits = desc->limits;
    return cf_simulate(plan, run->schedule, &simulate, &run->timeline, error);
}

/* The library counts virtual stages one by one. */
static void explain_limit(cf_error *error, int64_t n_virtual) {
    int about_bytes = strcmp(error->field, "limit_bytes") == 0;

    snprintf(error->text, sizeof error->text, "%s: stage %lld may keep %s, and needs %s at least",
             about_bytes ? "--limit-bytes" : "--limit", (long long)error->item, pipeline_share(error->got, n_virtual),
             cli_commas((error->wanted + n_virtual - 1) / n_virtual));
}

cf_result pipeline_run_make(const pipeline *p, const cf_plan *plan, const pipeline_case *what, pipeline_run *out,
                            cf_error *error) {
    pipeline_run fresh;
    cf_schedule_desc desc;
    cf_timing timing;
    int64_t *limits = NULL, n_virtual;
    cf_result result;

    memset(&fresh, 0, sizeof fresh);
    memset(&desc, 0, sizeof desc);
    desc.kind = what->kind;
    desc.replay = what->replay;
    desc.n_stages = p->n_stages;
    desc.n_virtual = what->n_virtual;
    desc.placement = what->placement;
    desc.k = what->k;
    desc.rank = p->rank;
    desc = cf_schedule_defaults(&desc);
    n_virtual = desc.n_virtual;

    if (p->limits && !(limits = scale_limits(p, n_virtual))) return no_memory(error);
    timing = pipeline_timing(p, n_virtual);
    desc.timing = &timing;
    desc.limit = scale_limit(p->limit, n_virtual);
    desc.limits = limits;
    desc.bytes = p->bytes;
    desc.limit_bytes = scale_limit(p->limit_bytes, n_virtual);
    desc.split_backward = what->split_backward;
    desc.budget = p->budget;
    desc.report = &fresh.report;
    result = make(p, plan, what, &desc, &fresh, error);
    free(limits);
    if (result == CF_ERROR_INFEASIBLE) explain_limit(error, n_virtual);
    if (result == CF_OK) *out = fresh;
    else pipeline_run_free(&fresh);
    return result;
}

void pipeline_run_free(pipeline_run *run) {
    cf_timeline_free(run->timeline);
    cf_schedule_free(run->schedule);
    memset(run, 0, sizeof *run);
}

/* ----------------------------------------------------------------------------------------------------------------
   Words
   ---------------------------------------------------------------------------------------------------------------- */

const char *pipeline_time(double time) {
    char *out;

    if (time >= 0 && time < 9e15 && time == (double)(int64_t)time) return cli_commas((int64_t)time);
    out = cli_scratch();
    snprintf(out, CLI_SCRATCH_BYTES, time >= 1e5 && time < 1e15 ? "%.1f" : "%.6g", time);
    return out;
}

const char *pipeline_strongest(const cf_timeline *timeline) {
    const char *name = "none";
    int64_t i;

    for (i = 0; i < timeline->n_bounds; i++)
        if (timeline->bounds[i].value == timeline->bound) name = timeline->bounds[i].name;
    return name;
}

void pipeline_print_times(const cf_timeline *timeline, int unit_cost) {
    printf("makespan          %s %s\n", pipeline_time(timeline->makespan), unit_cost ? "token times" : "s");
    printf("bubble            %.2f %% where replays are waste, %.2f %% where they are work\n",
           100 * timeline->bubble_useful, 100 * timeline->bubble_busy);
}

const char *pipeline_share(int64_t count, int64_t n_virtual) {
    if (count % n_virtual == 0) return cli_commas(count / n_virtual);
    return pipeline_time((double)count / (double)n_virtual);
}
