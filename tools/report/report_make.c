/* report_make.c - puts a report together, schedule by schedule. */

#include "report.h"

#include <stdlib.h>
#include <string.h>

void report_start(report *r, const packing *packed, const pipeline *pipe, int64_t k) {
    memset(r, 0, sizeof *r);
    r->packed = packed;
    r->pipe = pipe;
    r->k = k;
    r->baseline = r->best = r->predicted = r->measured = -1;
    r->plans[r->n_plans].name = "chunks";
    r->plans[r->n_plans++].plan = packed->plan;
}

void report_free(report *r) {
    int i;

    for (i = 0; i < r->n_schedules; i++) {
        idle_free(&r->schedules[i].idle);
        free(r->schedules[i].held);
        pipeline_run_free(&r->runs[i]);
    }
    baseline_free(&r->unsplit);
    free(r->ranks);
    memset(r, 0, sizeof *r);
}

/* ----------------------------------------------------------------------------------------------------------------
   Schedules
   ---------------------------------------------------------------------------------------------------------------- */

static int transfers_of(const report *r, const report_schedule *s, cf_timing *out, cf_error *error) {
    pipeline_costs costs;

    if (pipeline_costs_make(r->pipe, s->schedule->shape.n_virtual, r->packed->plan->chunk_size, s->recompute, &costs,
                            error) != CF_OK)
        return cli_error(error, NULL);
    *out = costs.timing;
    out->stages = NULL;
    pipeline_costs_free(&costs);
    return CLI_OK;
}

int report_add_run(report *r, const char *name, const cf_plan *plan, const cf_schedule *schedule, pipeline_run *run,
                   cf_recompute recompute, const cf_timeline *measured) {
    report_schedule *s = &r->schedules[r->n_schedules];
    pipeline pipe = *r->pipe;
    cf_error error;
    int code;

    r->runs[r->n_schedules++] = *run;
    snprintf(s->name, sizeof s->name, "%s", name);
    s->plan = plan != r->packed->plan;
    s->measured = measured != NULL;
    s->fits = pipeline_fits(r->pipe, run);
    s->held_down = run->held_down;
    s->recompute = recompute ? recompute : r->pipe->model.parallel.recompute;
    s->schedule = schedule;
    s->timeline = measured ? measured : run->timeline;
    s->memory = run->memory;
    s->fullest = run->fullest;
    pipe.memory.offload |= s->offload;
    if ((code = transfers_of(r, s, &s->timing, &error)) != CLI_OK) return code;
    if (idle_make(plan, schedule, s->timeline, &s->timing, &s->idle, &error) != CF_OK ||
        held_make(&pipe, plan, schedule, s->recompute, &s->held, &error) != CF_OK)
        return cli_error(&error, NULL);
    return CLI_OK;
}

int report_add_baseline(report *r, const packing_options *asked, const baseline_rule *rule) {
    baseline *b = &r->unsplit;
    pipeline_run run;
    cf_error error;
    cf_result result = baseline_find(r->pipe, r->packed, asked, rule, b, &error);

    if (result == CF_ERROR_MEMORY) return cli_error(&error, NULL);
    if (result != CF_OK) {
        snprintf(r->no_baseline, sizeof r->no_baseline, "%s", error.text);
        return CLI_OK;
    }
    run = b->run; /* the list of runs owns it from here on */
    memset(&b->run, 0, sizeof b->run);
    r->plans[r->n_plans].name = "unsplit";
    r->plans[r->n_plans++].plan = b->plan;
    r->schedules[r->n_schedules].unsplit = 1;
    r->schedules[r->n_schedules].offload = b->offload;
    if (pipeline_fits(r->pipe, &run)) r->baseline = r->n_schedules;
    else
        snprintf(r->no_baseline, sizeof r->no_baseline, "%s needs %.2f GiB on stage %lld with full recomputation%s",
                 baseline_name(0), modelling_gib(run.memory[run.fullest].total), (long long)run.fullest,
                 modelling_offload_words(b->offload));
    return report_add_run(r, baseline_name(b->packed), b->plan, run.schedule, &run, b->what.recompute, NULL);
}

int report_add_context(report *r, const packing_options *asked) {
    double than = r->baseline >= 0 ? r->schedules[r->baseline].timeline->makespan : 0;
    baseline_tuned recipe;
    cf_error error;

    if (baseline_find_context(r->pipe, r->packed, asked, than, &r->context, &recipe, &error) != CF_OK)
        return cli_error(&error, NULL);
    return CLI_OK;
}

double report_seconds(const report *r, const report_schedule *s) {
    const pipeline_run *run = &r->runs[s - r->schedules];

    return run->timeline ? pipeline_makespan(run) : s->timeline->makespan;
}

int report_add_case(report *r, const char *name, const pipeline_case *what) {
    pipeline_run run;
    cf_error error;
    int code, i = r->n_schedules;

    if (pipeline_run_make(r->pipe, r->packed->plan, what, &run, &error) != CF_OK) return cli_error(&error, NULL);
    code = report_add_run(r, name, r->packed->plan, run.schedule, &run, what->recompute, NULL);
    if (code == CLI_OK && r->schedules[i].fits &&
        (r->best < 0 || report_seconds(r, &r->schedules[i]) < report_seconds(r, &r->schedules[r->best])))
        r->best = i;
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   Ranks
   ---------------------------------------------------------------------------------------------------------------- */

static int simulate_rank(const report *r, int64_t rank, report_rank_fn simulate, void *user, report_rank *out) {
    pipeline pipe = *r->pipe;
    pipeline_run run;
    cf_result result;

    out->makespan = -1;
    pipe.every_rank = 0;
    pipe.rank = rank;
    if (rank >= REPORT_MOST_RANKS) return CLI_OK;
    result = simulate(user, &pipe, &run);
    if (result == CF_ERROR_MEMORY) return cli_failed("out of memory");
    if (result != CF_OK) return CLI_OK;
    out->makespan = run.timeline->makespan;
    out->bubble_useful = run.timeline->bubble_useful;
    if (run.memory) out->memory = run.memory[run.fullest].total;
    pipeline_run_free(&run);
    return CLI_OK;
}

/* Returns the slowest rank, or one that cannot be scheduled. */
static int64_t slowest_of(const report *r) {
    int64_t i, most = r->n_ranks < REPORT_MOST_RANKS ? r->n_ranks : REPORT_MOST_RANKS, slowest = 0;

    for (i = 0; i < most; i++) {
        if (r->ranks[i].makespan < 0) return i;
        if (r->ranks[i].makespan > r->ranks[slowest].makespan) slowest = i;
    }
    return slowest;
}

int report_add_ranks(report *r, pipeline *pipe, const char *name, report_rank_fn simulate, void *user) {
    const cf_plan *plan = r->packed->plan;
    int64_t i;
    int code = CLI_OK;

    r->slowest = pipe->every_rank;
    if (plan->n_ranks < 2) pipe->every_rank = 0;
    if (plan->n_ranks < 2) return CLI_OK;
    r->ranks = (report_rank *)calloc((size_t)plan->n_ranks, sizeof *r->ranks);
    if (!r->ranks) return cli_failed("out of memory");
    r->n_ranks = plan->n_ranks;
    r->rank_schedule = name;
    for (i = 0; i < plan->n_chunks; i++) {
        report_rank *rank = &r->ranks[plan->chunks[i].rank];
        rank->tokens += plan->chunks[i].tokens;
        rank->pairs += plan->chunks[i].pairs;
        rank->n_chunks += plan->chunks[i].n_slices > 0;
    }
    for (i = 0; i < r->n_ranks && code == CLI_OK; i++) code = simulate_rank(r, i, simulate, user, &r->ranks[i]);
    if (r->slowest) pipe->rank = slowest_of(r);
    pipe->every_rank = 0;
    return code;
}
