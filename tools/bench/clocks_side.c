/* See clocks_side.h. HEADER: the header's path in quotes; MEASURE: the function's name. */

#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 199309L
#endif
#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_API static
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-function"
#endif
#include HEADER
#include "old_names.h"

#include "clocks_side.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void must(cf_result result, const cf_error *error) {
    if (result == CF_OK) return;
    fprintf(stderr, "bench_clocks: %s: %s\n", HEADER, error->text);
    exit(2);
}

static void *must_have(void *memory) {
    if (memory == NULL) exit(2);
    return memory;
}

/* ---- the clocks ---- */

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static double normal(uint64_t key) {
    double u = ((double)(mix(key) >> 11) + 0.5) / 9007199254740992.0;
    double v = (double)(mix(key ^ 0xabcdef12345u) >> 11) / 9007199254740992.0;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* The costs of the passes F, R, B, I, W, and of transfers, by one clock. */
typedef struct clock_costs {
    double of[CF_COMPUTE_PASS_COUNT][3];
    double latency, per_row, noise;
    int64_t slow_stage; /* -1: none */
    uint64_t seed;
} clock_costs;

static clock_costs costs_of(const clocks_case *it, const cf_plan *plan, int clock, int run) {
    static const double noise[] = {0, .05, .10, .20};
    clock_costs costs;
    double mean = 0;
    int64_t i;
    int pass, j;
    for (j = 0; j < 3; j++) {
        costs.of[CF_F][j] = costs.of[CF_R][j] = it->forward[j];
        costs.of[CF_I][j] = it->input[j];
        costs.of[CF_W][j] = it->weight[j];
        costs.of[CF_B][j] = it->input[j] + it->weight[j];
    }
    costs.latency = it->latency;
    costs.per_row = it->per_row;
    costs.noise = clock <= CLOCK_NOISE_20 ? noise[clock] : 0;
    costs.slow_stage = clock == CLOCK_SLOW_STAGE ? run * (it->n_stages - 1) / 2 : -1;
    costs.seed = (uint64_t)run + 1;
    for (i = 0; i < plan->chunks_per_rank; i++)
        mean += (it->forward[0] + it->forward[1] * (double)plan->chunks[i].rows +
                 it->forward[2] * (double)plan->chunks[i].pairs) / (double)plan->chunks_per_rank;
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
        if (clock == CLOCK_HALF_ATTENTION) costs.of[pass][2] *= 0.5;
        if (clock == CLOCK_TWICE_ATTENTION) costs.of[pass][2] *= 2;
        if (clock == CLOCK_CONSTANT) costs.of[pass][0] += (pass == CF_B ? 0.4 : 0.2) * mean;
        for (j = 0; j < 3 && pass >= CF_B; j++)
            costs.of[pass][j] *= clock == CLOCK_RATIO_1_8 ? 0.9 : clock == CLOCK_RATIO_2_4 ? 1.2 : 1;
    }
    if (clock == CLOCK_SLOW_TRANSFERS) {
        costs.latency *= 3;
        costs.per_row *= 3;
    }
    return costs;
}

static double pass_seconds(const clock_costs *costs, const cf_schedule *s, const cf_chunk *c, const cf_action *a) {
    const double *of = costs->of[a->pass];
    double seconds = of[0] + of[1] * (double)c->rows + of[2] * (double)c->pairs;
    int as = a->pass == CF_I ? CF_B : a->pass; /* a backward has the same noise, whole or cut */
    uint64_t key = costs->seed * 1000003u + (uint64_t)a->chunk * 524288u + (uint64_t)a->stage * 8 + (uint64_t)as;
    if (cf_placement_stage(s->shape.placement, s->shape.n_stages, a->stage) == costs->slow_stage) seconds *= 1.1;
    if (!(costs->noise > 0)) return seconds;
    return seconds * exp(costs->noise * normal(key) - costs->noise * costs->noise / 2);
}

/* ---- a fixed order by a clock ---- */

/* One stage on its way through its list. */
typedef struct replay_stage {
    int64_t next;
    double free_at, link_free[2];
} replay_stage;

/* A run of a schedule. arrives: the times at which the input of a pass arrives from another virtual stage, by virtual
   stage, chunk and direction (the forward's input and the backward's). Below 0: not yet. */
typedef struct replay_state {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const clock_costs *costs;
    replay_stage *stages;
    double *arrives;
    double makespan;
} replay_state;

static double *arrival_of(const replay_state *r, const cf_action *a, int64_t v) {
    return &r->arrives[(v * r->plan->n_chunks + a->chunk) * 2 + (a->pass != CF_F)];
}

/* Sends the result of a forward to the next virtual stage, and of a backward to the previous one. */
static void hand_on(replay_state *r, int64_t stage, const cf_action *a, double end) {
    const cf_shape *shape = &r->schedule->shape;
    int64_t to = a->stage + (a->pass == CF_F ? 1 : -1);
    int goes_down = (a->pass == CF_F) != (shape->placement == CF_PLACEMENT_V && a->stage / shape->n_stages % 2 == 1);
    double *link = &r->stages[stage].link_free[goes_down];
    if (to < 0 || to >= shape->n_stages * shape->n_virtual) return;
    if (cf_placement_stage(shape->placement, shape->n_stages, to) == stage) {
        *arrival_of(r, a, to) = end;
        return;
    }
    *link = (end > *link ? end : *link) + r->costs->latency +
            r->costs->per_row * (double)r->plan->chunks[a->chunk].rows;
    *arrival_of(r, a, to) = *link;
}

/* Runs a stage until it must wait for another one. Returns the number of passes that it ran. */
static int64_t run_stage(replay_state *r, int64_t stage) {
    replay_stage *own = &r->stages[stage];
    int64_t before = own->next;
    for (; own->next < r->schedule->first[stage + 1]; own->next++) {
        const cf_action *a = &r->schedule->actions[own->next];
        int travels = a->pass == CF_F || a->pass == CF_B || a->pass == CF_I;
        double start = own->free_at, arrives = travels ? *arrival_of(r, a, a->stage) : 0;
        if (arrives < 0) break;
        if (arrives > start) start = arrives;
        own->free_at = start + pass_seconds(r->costs, r->schedule, &r->plan->chunks[a->chunk], a);
        if (own->free_at > r->makespan) r->makespan = own->free_at;
        if (travels) hand_on(r, stage, a, own->free_at);
    }
    return own->next - before;
}

/* Returns the makespan. Within a stage the schedule is sound, so a pass can wait only for other virtual stages. */
static double makespan_by(const cf_plan *plan, const cf_schedule *schedule, const clock_costs *costs) {
    int64_t stages = schedule->shape.n_stages, n_v = stages * schedule->shape.n_virtual, n = plan->n_chunks, i, ran;
    int64_t left = schedule->n_actions;
    replay_state r;
    r.plan = plan;
    r.schedule = schedule;
    r.costs = costs;
    r.makespan = 0;
    r.stages = (replay_stage *)must_have(calloc((size_t)stages, sizeof *r.stages));
    r.arrives = (double *)must_have(malloc((size_t)(n_v * n * 2 + 1) * sizeof *r.arrives));
    for (i = 0; i < n_v * n * 2; i++) r.arrives[i] = -1;
    for (i = 0; i < n; i++) r.arrives[i * 2] = r.arrives[((n_v - 1) * n + i) * 2 + 1] = 0;
    for (i = 0; i < stages; i++) r.stages[i].next = schedule->first[i];
    do {
        for (ran = i = 0; i < stages; i++) ran += run_stage(&r, i);
        left -= ran;
    } while (ran > 0 && left > 0);
    free(r.stages);
    free(r.arrives);
    if (left > 0) {
        fprintf(stderr, "bench_clocks: %s: a schedule waits for ever\n", HEADER);
        exit(2);
    }
    return r.makespan;
}

static double mean_makespan(const clocks_case *it, const cf_plan *plan, const cf_schedule *schedule, int clock) {
    int runs = clock >= CLOCK_NOISE_5 && clock <= CLOCK_NOISE_20 ? 5 : clock == CLOCK_SLOW_STAGE ? 3 : 1, run;
    double sum = 0;
    for (run = 0; run < runs; run++) {
        clock_costs costs = costs_of(it, plan, clock, run);
        sum += log(makespan_by(plan, schedule, &costs));
    }
    return exp(sum / runs);
}

/* ---- a case ---- */

static cf_pass_cost pass_cost(const double cost[3]) {
    cf_pass_cost c;
    c.constant = cost[0];
    c.per_token = cost[1];
    c.per_pair = cost[2];
    return c;
}

void MEASURE(const clocks_case *it, clocks_result *result) {
    cf_pack_desc pack;
    cf_schedule_desc desc;
    cf_timing timing;
    cf_validate_desc validate;
    cf_search_report report;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_error error;
    int clock;
    memset(&pack, 0, sizeof pack);
    memset(&desc, 0, sizeof desc);
    memset(&timing, 0, sizeof timing);
    memset(&validate, 0, sizeof validate);
    pack.chunk_size = it->chunk_size;
    must(cf_pack(it->lengths, it->n_lengths, &pack, &plan, &error), &error);
    timing.all.forward = pass_cost(it->forward);
    timing.all.input = pass_cost(it->input);
    timing.all.weight = pass_cost(it->weight);
    timing.latency = it->latency;
    timing.seconds_per_token = it->per_row;
    desc.shape.n_stages = it->n_stages;
    desc.shape.n_virtual = it->n_virtual;
    desc.shape.k = it->k;
    desc.shape.placement = it->in_v ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
    desc.split_backward = it->split;
    desc.limits.chunks = it->limit;
    desc.timing = &timing;
    desc.report = &report;
    result->seconds = now();
    must(cf_schedule_make(plan, &desc, &schedule, &error), &error);
    result->seconds = now() - result->seconds;
    result->bound = report.bound;
    result->n_actions = schedule->n_actions;
    validate.limits = schedule->limits;
    must(cf_schedule_validate(plan, schedule, &validate, NULL, &error), &error);
    for (clock = 0; clock < N_CLOCKS; clock++) result->makespan[clock] = mean_makespan(it, plan, schedule, clock);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}
