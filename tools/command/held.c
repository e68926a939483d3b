/* held.c - memory over time. */

#include "held.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>

typedef struct counter {
    const pipeline *pipe;
    const cf_plan *plan;
    const cf_schedule *schedule;
    cf_memory_desc desc;      /* with a model */
    cf_memory_load **moments; /* (n_stages) from cf_schedule_loads */
    cf_memory_load *loads;    /* (virtual stages) one moment of every stage */
    cf_memory_report *reports;
    int64_t *held;
} counter;

held_unit held_unit_of(const pipeline *p) {
    return p->has_model ? HELD_GPU_BYTES : p->counts_bytes ? HELD_TOKEN_BYTES : HELD_TOKENS;
}

static int64_t length_of(const cf_schedule *schedule, int64_t stage) {
    return schedule->first[stage + 1] - schedule->first[stage];
}

/* Returns the bytes, or tokens, of one virtual stage, which cf_simulate has already added up. */
static int64_t weigh(const counter *c, const cf_memory_load *load) {
    const cf_held_bytes *bytes = &c->pipe->bytes;

    if (!c->pipe->counts_bytes) return load->live_tokens;
    return bytes->activations * load->live_tokens + bytes->state * load->state_tokens +
           bytes->state_gradient * load->state_gradient_tokens +
           bytes->boundary * load->input_tokens;
}

static void count_tokens(counter *c, int64_t stage) {
    int64_t n_virtual = c->schedule->shape.n_virtual, n = length_of(c->schedule, stage) * n_virtual, i;

    for (i = 0; i < n; i++)
        c->held[c->schedule->first[stage] + i / n_virtual] += weigh(c, &c->moments[stage][i]);
}

/* Counts the ring of streamed state from the first pass to the last, if it is ever used. */
static void hold_ring(counter *c, int64_t stage) {
    int64_t n_virtual = c->schedule->shape.n_virtual, n = length_of(c->schedule, stage) * n_virtual, i, row;

    for (row = 0; row < n_virtual; row++) {
        int used = 0;
        for (i = row; i < n; i += n_virtual) used = used || c->moments[stage][i].state_tokens > 0;
        for (i = row; i < n && used; i += n_virtual)
            if (c->moments[stage][i].state_tokens == 0) c->moments[stage][i].state_tokens = 1;
    }
}

/* Counts moment i of every stage that has it. */
static cf_result count_moment(counter *c, int64_t i, cf_error *error) {
    const cf_schedule *s = c->schedule;
    int64_t stage, row, n_v = s->shape.n_stages * s->shape.n_virtual;
    cf_result result;

    memset(c->loads, 0, (size_t)n_v * sizeof *c->loads);
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (row = 0; row < s->shape.n_virtual && i < length_of(s, stage); row++)
            c->loads[cf_placement_at(s->shape.placement, s->shape.n_stages, row, stage)] =
                c->moments[stage][i * s->shape.n_virtual + row];
    result = cf_memory_estimate(&c->desc, c->loads, n_v, c->reports, s->shape.n_stages, error);
    for (stage = 0; stage < s->shape.n_stages && result == CF_OK; stage++)
        if (i < length_of(s, stage)) c->held[s->first[stage] + i] = c->reports[stage].total;
    return result;
}

static cf_result count(counter *c, cf_error *error) {
    int64_t stage, i, most = 0;
    cf_result result = CF_OK;

    for (stage = 0; stage < c->schedule->shape.n_stages && result == CF_OK; stage++) {
        int64_t n = length_of(c->schedule, stage);
        if (n > most) most = n;
        c->moments[stage] = (cf_memory_load *)calloc((size_t)(n * c->schedule->shape.n_virtual + 1),
                                                     sizeof **c->moments);
        if (!c->moments[stage]) return cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
        result = cf_schedule_loads(c->plan, c->schedule, stage, c->moments[stage], n * c->schedule->shape.n_virtual,
                                   error);
        if (result == CF_OK && !c->pipe->has_model) count_tokens(c, stage);
        if (result == CF_OK && c->desc.state_window > 0) hold_ring(c, stage);
    }
    for (i = 0; i < most && result == CF_OK && c->pipe->has_model; i++) result = count_moment(c, i, error);
    return result;
}

static void close_counter(counter *c) {
    int64_t stage;

    for (stage = 0; c->moments && stage < c->schedule->shape.n_stages; stage++) free(c->moments[stage]);
    free(c->moments);
    free(c->loads);
    free(c->reports);
}

cf_result held_make(const pipeline *p, const cf_plan *plan, const cf_schedule *schedule, cf_recompute recompute,
                    int64_t **out, cf_error *error) {
    size_t n_stages = (size_t)schedule->shape.n_stages;
    counter c;
    cf_result result;

    memset(&c, 0, sizeof c);
    c.pipe = p;
    c.plan = plan;
    c.schedule = schedule;
    if (p->has_model) c.desc = pipeline_memory_of(p, schedule, recompute);
    c.desc.chunk_size = plan->chunk_size;
    c.moments = (cf_memory_load **)calloc(n_stages, sizeof *c.moments);
    c.loads = (cf_memory_load *)calloc(n_stages * (size_t)schedule->shape.n_virtual, sizeof *c.loads);
    c.reports = (cf_memory_report *)calloc(n_stages, sizeof *c.reports);
    c.held = (int64_t *)calloc((size_t)schedule->n_actions + 1, sizeof *c.held);
    progress_begin("counting memory");
    if (c.moments && c.loads && c.reports && c.held) result = count(&c, error);
    else result = cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
    progress_end();
    close_counter(&c);
    if (result == CF_OK) *out = c.held;
    else free(c.held);
    return result;
}
