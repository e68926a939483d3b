#include "pipeline.h"

#include "naive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- drawing ---- */

static void draw_plan(harness_rng *rng, pipeline_problem *problem) {
    int64_t lengths[24], n = harness_between(rng, 0, 16), i;
    cf_pack_desc pack = {0};
    cf_error error = {0};
    pack.chunk_size = harness_between(rng, 3, 20);
    pack.n_ranks = harness_between(rng, 1, 2);
    pack.method = harness_chance(rng, 0.3) ? CF_PACK_NEXT_FIT : CF_PACK_BEST_FIT;
    pack.no_tails = harness_chance(rng, 0.3);
    for (i = 0; i < n; i++)
        lengths[i] = harness_between(rng, 0, (harness_chance(rng, 0.2) ? 10 : 1) * pack.chunk_size);
    problem->plan = NULL;
    if (cf_pack(lengths, n, &pack, &problem->plan, &error) != CF_OK) FAIL("cf_pack: %s", error.text);
}

static void draw_timing(harness_rng *rng, pipeline_problem *problem) {
    int64_t i;
    memset(&problem->timing, 0, sizeof problem->timing);
    memset(problem->stages, 0, sizeof problem->stages);
    if (harness_chance(rng, 0.3)) return;
    problem->desc.timing = &problem->timing;
    problem->timing.latency =
        harness_chance(rng, 0.5) ? (double)harness_between(rng, 0, harness_chance(rng, 0.25) ? 200 : 12) / 4 : 0;
    problem->timing.seconds_per_token = harness_chance(rng, 0.5) ? 0.125 : 0;
    problem->timing.all.forward.per_token = 1;
    problem->timing.all.forward.per_pair = harness_chance(rng, 0.5) ? 0.0625 : 0;
    if (harness_chance(rng, 0.3)) { /* no pass, some of them or all wait for their stream */
        problem->timing.stream_forward = (double)harness_between(rng, 0, 4) / 8;
        problem->timing.stream_backward = (double)harness_between(rng, 0, 8) / 8;
        problem->timing.stream_exposed = (double)harness_between(rng, 0, 4) / 4;
    }
    if (harness_chance(rng, 0.5)) return;
    problem->timing.stages = problem->stages;
    for (i = 0; i < PIPELINE_MOST_STAGES * 3; i++) {
        cf_stage_cost *cost = &problem->stages[i];
        cost->forward.per_token = (double)harness_between(rng, 0, 3);
        cost->forward.constant = (double)harness_between(rng, 0, 2);
        if (harness_chance(rng, 0.3)) cost->input.per_token = cost->weight.per_token = 2;
        if (harness_chance(rng, 0.3)) cost->replay.per_token = 0.75;
    }
}

static void draw_limits(harness_rng *rng, pipeline_problem *problem) {
    cf_schedule_desc *desc = &problem->desc;
    int64_t i;
    for (i = 0; i < PIPELINE_MOST_STAGES; i++) {
        problem->limits[i] = harness_between(rng, 0, 8);
        problem->limits_bytes[i] = harness_between(rng, 0, 6000);
    }
    if (harness_chance(rng, 0.3)) desc->limits.chunks = harness_between(rng, 1, 8);
    if (harness_chance(rng, 0.2)) desc->limits.chunks_by_stage = problem->limits;
    desc->limits.per_token.activations = harness_between(rng, 0, 9);
    desc->limits.per_token.state = harness_between(rng, 0, 3);
    desc->limits.per_token.state_gradient = harness_between(rng, 0, 3);
    desc->limits.per_token.boundary = harness_between(rng, 0, harness_chance(rng, 0.25) ? 20 : 2);
    if (harness_chance(rng, 0.2)) desc->limits.bytes = harness_between(rng, 1, 6000);
    if (harness_chance(rng, 0.2)) desc->limits.bytes_by_stage = problem->limits_bytes;
    if (desc->limits.chunks == 0 && harness_chance(rng, 0.4)) desc->limits.chunks = CF_NO_LIMIT;
    if (desc->limits.per_token.activations + desc->limits.per_token.state + desc->limits.per_token.state_gradient +
            desc->limits.per_token.boundary == 0)
        desc->limits.per_token.activations = 1; /* a limit of bytes that nothing takes is refused */
}

void pipeline_draw(harness_rng *rng, pipeline_problem *problem) {
    cf_schedule_desc *desc = &problem->desc;
    memset(desc, 0, sizeof *desc);
    draw_plan(rng, problem);
    desc->kind = (cf_schedule_kind)harness_between(rng, CF_SCHEDULE_PAPER, CF_SCHEDULE_BEST);
    desc->shape.replay = (cf_replay)harness_between(rng, CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL);
    if (desc->kind != CF_SCHEDULE_PAPER) desc->shape.replay = CF_REPLAY_LOCAL;
    desc->shape.n_stages = harness_between(rng, 1, 6);
    if (desc->kind == CF_SCHEDULE_INTERLEAVED || (desc->kind > CF_SCHEDULE_INTERLEAVED && harness_chance(rng, 0.3)))
        desc->shape.n_virtual = harness_between(rng, 1, 3);
    if (desc->kind == CF_SCHEDULE_ZERO_BUBBLE)
        desc->shape.placement = (cf_placement)harness_between(rng, 0, CF_PLACEMENT_V);
    if (desc->kind == CF_SCHEDULE_BEST) desc->shape.placement = (cf_placement)harness_between(rng, 0, CF_PLACEMENT_V);
    desc->shape.k = harness_between(rng, 1, 5);
    desc->shape.rank = problem->plan->n_ranks - 1;
    desc->split_backward = harness_chance(rng, 0.3);
    desc->budget = 20;
    draw_timing(rng, problem);
    draw_limits(rng, problem);
}

cf_plan *pipeline_sixteen(cf_timing *timing) {
    int64_t lengths[16], i;
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    memset(timing, 0, sizeof *timing);
    desc.chunk_size = 1;
    timing->all.forward.per_token = 0.5;
    for (i = 0; i < 16; i++) lengths[i] = 1;
    CHECK_INT(cf_pack(lengths, 16, &desc, &plan, NULL), CF_OK);
    return plan;
}

void pipeline_note(uint64_t seed, const pipeline_problem *problem) {
    const cf_schedule_desc *d = &problem->desc;
    harness_note("seed %llu: %s, %d stages x %d (%s), K %d, %s replay, limit %d%s, bytes %d%s, %d chunks, %d groups",
                 (unsigned long long)seed, cf_schedule_kind_name(d->kind), (int)d->shape.n_stages,
                 (int)d->shape.n_virtual, cf_placement_name(d->shape.placement), (int)d->shape.k,
                 cf_replay_name(d->shape.replay), (int)d->limits.chunks, d->limits.chunks_by_stage ? " (by stage)" : "",
                 (int)d->limits.bytes, d->limits.bytes_by_stage ? " (by stage)" : "", (int)problem->plan->n_chunks,
                 (int)problem->plan->n_groups);
}

/* ---- what a schedule was asked for ---- */

/* Most chunks that a stage may keep, by the words of cf_schedule_desc; 0: any number. */
static int64_t limit_of(const cf_plan *plan, const cf_schedule *s, const cf_schedule_desc *desc, int64_t stage) {
    int64_t limit = desc->limits.chunks, longest = 1, i, v;
    int by_bytes = desc->limits.bytes > 0 || desc->limits.bytes_by_stage;
    if (desc->limits.chunks_by_stage && desc->limits.chunks_by_stage[stage] != 0)
        limit = desc->limits.chunks_by_stage[stage];
    if (limit != 0 || by_bytes || s->kind != CF_SCHEDULE_BEST) return limit > 0 ? limit : 0;
    for (i = s->shape.rank * plan->n_steps; i < (s->shape.rank + 1) * plan->n_steps; i++)
        if (plan->chunks[i].group >= 0 && plan->chunks[i].index >= longest) longest = plan->chunks[i].index + 1;
    for (v = 0, limit = 0; v < s->shape.n_stages * s->shape.n_virtual; v++)
        if (naive_stage(s, v) == stage)
            limit += (s->shape.k < longest ? s->shape.k : longest) + s->shape.n_stages - 1 - v % s->shape.n_stages;
    return limit;
}

/* Counts what is kept along one stage's list. */
static const char *kept_fault(const cf_plan *plan, const cf_schedule *s, const cf_schedule_desc *desc, int64_t stage) {
    int64_t limit = limit_of(plan, s, desc, stage), live = 0, i;
    if ((s->limits.chunks_by_stage ? s->limits.chunks_by_stage[stage] : 0) != limit)
        return "another limit is written in the schedule";
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        live += a->keep;
        if (limit > 0 && live > limit) return "more chunks than the limit";
        live -= a->pass == CF_B || a->pass == CF_W;
    }
    return live == 0 ? NULL : "chunks still kept at the end";
}

int64_t pipeline_peak_state(const cf_plan *plan, const cf_schedule *s, int64_t v) {
    int64_t i, stage = naive_stage(s, v), held = 0, most = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        int64_t rows = cf_chunk_state_tokens(plan, a->chunk);
        if (a->stage != v) continue;
        held += a->pass == CF_F ? rows : 0;
        if (held > most) most = held;
        held -= a->pass == CF_B || a->pass == CF_I ? rows : 0;
    }
    return most;
}

/* Most inputs of standalone chunks that a stage keeps for local replays. */
static int64_t most_inputs(const cf_plan *plan, const cf_schedule *s, int64_t stage) {
    int64_t held = 0, most = 0, i;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        if (plan->chunks[a->chunk].group >= 0) continue;
        held += (a->pass == CF_F && !a->keep) - (a->pass == CF_R);
        if (held > most) most = held;
    }
    return most;
}

const char *pipeline_fault(const cf_plan *plan, const cf_schedule *s, const cf_schedule_desc *desc) {
    const char *fault = naive_fault(plan, s);
    int64_t stage;
    for (stage = 0; !fault && stage < s->shape.n_stages; stage++) {
        int64_t bytes = desc->limits.bytes_by_stage ? desc->limits.bytes_by_stage[stage] : 0;
        if (bytes == 0) bytes = desc->limits.bytes;
        fault = kept_fault(plan, s, desc, stage);
        if (!fault && (s->limits.bytes_by_stage ? s->limits.bytes_by_stage[stage] : 0) != (bytes > 0 ? bytes : 0))
            fault = "another limit of bytes is written in the schedule";
        if (!fault && bytes > 0 && memcmp(&s->limits.per_token, &desc->limits.per_token, sizeof(cf_bytes)) != 0)
            fault = "what bytes count is not written in the schedule";
        if (!fault && bytes > 0 && pipeline_peak_bytes(plan, s, &desc->limits.per_token, stage) > bytes)
            fault = "more bytes than the limit";
        if (!fault && s->kind == CF_SCHEDULE_BEST && s->shape.replay == CF_REPLAY_LOCAL &&
            most_inputs(plan, s, stage) > 2 * s->shape.n_stages * s->shape.n_virtual + limit_of(plan, s, desc, stage))
            fault = "more inputs of standalone chunks than there may be";
    }
    return fault;
}

/* Whether an action of that pass, chunk and virtual stage lies in actions[from .. to). */
static int happened(const cf_schedule *s, int64_t from, int64_t to, int64_t chunk, int64_t v, int pass) {
    int64_t i;
    for (i = from; i < to; i++)
        if (s->actions[i].chunk == chunk && s->actions[i].stage == v && s->actions[i].pass == pass) return 1;
    return 0;
}

/* Bytes for one chunk on one virtual stage while action `now` runs: each term by its own definition. */
static int64_t cell_bytes(const cf_plan *plan, const cf_schedule *s, const cf_bytes *bytes, int64_t first, int64_t now,
                          int64_t chunk, int64_t v) {
    const cf_chunk *c = &plan->chunks[chunk];
    int64_t tokens = c->group >= 0 ? plan->slices[c->first_slice].length : 0, sum = 0;
    int started_f = happened(s, first, now + 1, chunk, v, CF_F),
        started_r = happened(s, first, now + 1, chunk, v, CF_R);
    int ended = happened(s, first, now, chunk, v, CF_B) || happened(s, first, now, chunk, v, CF_I);
    int freed = happened(s, first, now, chunk, v, CF_B) || happened(s, first, now, chunk, v, CF_W);
    int dropped = happened(s, first, s->first[naive_stage(s, v) + 1], chunk, v, CF_R);
    if ((dropped ? started_r : started_f) && !freed) sum += c->padded * bytes->activations;
    if (dropped && started_f && !started_r && s->shape.replay == CF_REPLAY_LOCAL) sum += c->padded * bytes->boundary;
    if (c->group >= 0 && started_f && !ended) {
        int64_t last = plan->groups[c->group].first_chunk + plan->groups[c->group].n_chunks - 1;
        sum += tokens * bytes->state;
        if (happened(s, first, now + 1, last, v, CF_B) || happened(s, first, now + 1, last, v, CF_I))
            sum += tokens * bytes->state_gradient;
    }
    return sum;
}

int64_t pipeline_peak_bytes(const cf_plan *plan, const cf_schedule *s, const cf_bytes *bytes, int64_t stage) {
    int64_t peak = 0, now, chunk, v;
    for (now = s->first[stage]; now < s->first[stage + 1]; now++) {
        int64_t sum = 0;
        for (chunk = s->shape.rank * plan->n_steps; chunk < (s->shape.rank + 1) * plan->n_steps; chunk++)
            for (v = 0; v < s->shape.n_stages * s->shape.n_virtual; v++)
                if (naive_stage(s, v) == stage) sum += cell_bytes(plan, s, bytes, s->first[stage], now, chunk, v);
        if (sum > peak) peak = sum;
    }
    return peak;
}

/* ---- the naive simulator ---- */

static double sum_of(const cf_pass_cost *cost, const cf_chunk *c) {
    return cost->constant + cost->per_token * (double)c->padded + cost->per_pair * (double)c->pairs;
}

static int is_given(const cf_pass_cost *cost) {
    return cost->constant > 0 || cost->per_token > 0 || cost->per_pair > 0;
}

/* Seconds of a pass that waits for no stream, by the words of cf_stage_cost. */
static double compute_of(const cf_timing *timing, int64_t v, const cf_chunk *c, int pass) {
    const cf_stage_cost *s = timing == NULL ? NULL : timing->stages ? &timing->stages[v] : &timing->all;
    double forward, backward, input, weight;
    if (s == NULL || (!is_given(&s->forward) && !is_given(&s->replay) && !is_given(&s->backward) &&
                      !is_given(&s->input) && !is_given(&s->weight)))
        return (double)(pass == CF_B ? 2 * c->padded : c->padded);
    forward = sum_of(&s->forward, c);
    input = sum_of(&s->input, c);
    weight = sum_of(&s->weight, c);
    backward = sum_of(&s->backward, c);
    if (!is_given(&s->backward)) backward = is_given(&s->input) || is_given(&s->weight) ? input + weight : 2 * forward;
    if (!is_given(&s->input)) input = backward / 2;
    if (!is_given(&s->weight)) weight = backward / 2;
    switch (pass) {
        case CF_F: return forward;
        case CF_R: return is_given(&s->replay) ? sum_of(&s->replay, c) : forward;
        case CF_B: return backward;
        case CF_I: return input;
        default: return weight;
    }
}

static int is_shared(const cf_plan *plan, const cf_chunk *c) {
    return c->group >= 0 && plan->groups[c->group].gang > 0;
}

/* Rows of a chunk's sequence that lie before it on other ranks. */
static int64_t rows_of_others(const cf_plan *plan, const cf_chunk *c) {
    const cf_slice *own = &plan->slices[c->first_slice];
    int64_t i, rows = 0;
    for (i = 0; is_shared(plan, c) && i < plan->n_chunks; i++) {
        const cf_slice *s = &plan->slices[plan->chunks[i].first_slice];
        if (is_shared(plan, &plan->chunks[i]) && plan->chunks[i].rank != c->rank && s->sequence == own->sequence &&
            s->begin < own->begin)
            rows += s->length;
    }
    return rows;
}

/* And with what is moved, by those of cf_timing: the exposed part, then whichever of the two is done later. */
static double alone_seconds(const cf_plan *plan, const cf_timing *timing, int64_t v, const cf_chunk *c, int pass) {
    double compute = compute_of(timing, v, c, pass), moved = 0, alone;
    int forward = pass == CF_F || pass == CF_R;
    if (timing == NULL || pass == CF_W) return compute;
    moved = (double)c->prefix * (forward ? timing->stream_forward : timing->stream_backward);
    if (timing->gather_forward > 0 || timing->gather_backward > 0)
        moved += (double)rows_of_others(plan, c) * (forward ? timing->gather_forward : timing->gather_backward);
    alone = moved * timing->stream_exposed;
    return compute > moved - alone ? alone + compute : moved;
}

/* Of all ranks that run it at once. */
double pipeline_seconds(const cf_plan *plan, const cf_timing *timing, int64_t v, int64_t chunk, int pass) {
    const cf_chunk *c = &plan->chunks[chunk], *mate;
    double most = alone_seconds(plan, timing, v, c, pass), other;
    int64_t g;
    for (g = 0; is_shared(plan, c) && pass != CF_W && g < plan->n_groups; g++) {
        if (plan->groups[g].sequence != plan->groups[c->group].sequence) continue;
        mate = &plan->chunks[plan->groups[g].first_chunk + c->index];
        other = alone_seconds(plan, timing, v, mate, pass);
        if (other > most) most = other;
    }
    return most;
}

/* What waits for what, as naive_relax wants it. Of n actions, action i is node i, and n + i is the transfer of its result,
   if the pass that reads it is on another stage. In a lowered schedule a SEND says when; in any other it follows its
   pass. */
typedef struct network {
    const cf_plan *plan;
    const cf_schedule *s;
    const cf_timing *timing;
    double *seconds;
    naive_wait *waits;
    int64_t n_waits, *input, *reader; /* of a pass: whose result it reads, and who reads its own; -1: none */
} network;

int64_t pipeline_find(const cf_schedule *s, int pass, int64_t chunk, int64_t v) {
    int64_t i;
    for (i = 0; i < s->n_actions; i++)
        if (s->actions[i].pass == pass && s->actions[i].chunk == chunk && s->actions[i].stage == v) return i;
    return -1;
}

static int is_send(int pass) { return pass == CF_SEND_F || pass == CF_SEND_R || pass == CF_SEND_B; }

static int64_t backward_of(const cf_schedule *s, int64_t chunk, int64_t v) {
    int64_t b = pipeline_find(s, CF_B, chunk, v);
    return b >= 0 ? b : pipeline_find(s, CF_I, chunk, v);
}

int64_t pipeline_maker(const cf_schedule *s, const cf_action *send) {
    if (send->pass == CF_SEND_B) return backward_of(s, send->chunk, send->stage);
    return pipeline_find(s, send->pass == CF_SEND_F ? CF_F : CF_R, send->chunk, send->stage);
}

static int64_t reader_of(const cf_schedule *s, const cf_action *a) {
    switch (a->pass) {
        case CF_F: return pipeline_find(s, CF_F, a->chunk, a->stage + 1);
        case CF_R: return s->shape.replay == CF_REPLAY_LOCAL ? -1 : pipeline_find(s, CF_R, a->chunk, a->stage + 1);
        case CF_B: case CF_I: return backward_of(s, a->chunk, a->stage - 1);
        default: return -1;
    }
}

double pipeline_transfer(const cf_plan *plan, const cf_timing *timing, int64_t chunk) {
    return timing == NULL ? 0 : timing->latency + timing->seconds_per_token * (double)plan->chunks[chunk].padded;
}

static int64_t stage_of(const network *w, int64_t i) { return naive_stage(w->s, w->s->actions[i].stage); }

static void add_wait(network *w, int64_t from, int64_t to) {
    const naive_wait wait = {from, to, 0};
    if (from >= 0) w->waits[w->n_waits++] = wait;
}

/* Sends what pass `maker` has made; last: the transfers before this one, down and up. */
static void send_on(network *w, int64_t maker, int64_t last[2]) {
    const cf_schedule *s = w->s;
    int64_t to = w->reader[maker], node = s->n_actions + maker;
    /* In loops the stage above the last one is the first. */
    int up = s->shape.placement == CF_PLACEMENT_V ? stage_of(w, to) > stage_of(w, maker)
                                                  : s->actions[to].stage > s->actions[maker].stage;
    w->seconds[node] = pipeline_transfer(w->plan, w->timing, s->actions[maker].chunk);
    add_wait(w, maker, node);
    add_wait(w, last[up], node);
    last[up] = node;
}

static void add_stage(network *w, int64_t stage) {
    const cf_schedule *s = w->s;
    int64_t sent[2] = {-1, -1}, before = -1, i;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        int64_t input = w->input[i];
        if (is_send(a->pass)) send_on(w, pipeline_maker(s, a), sent);
        if (a->pass >= CF_COMPUTE_PASS_COUNT) continue;
        w->seconds[i] = pipeline_seconds(w->plan, w->timing, a->stage, a->chunk, a->pass);
        add_wait(w, input >= 0 && stage_of(w, input) != stage ? s->n_actions + input : input, i);
        add_wait(w, before, i);
        before = i;
        if (!s->lowered && w->reader[i] >= 0 && stage_of(w, w->reader[i]) != stage) send_on(w, i, sent);
    }
}

/* The node of an action: of a SEND and its RECV, the transfer. */
static int64_t node_of(const cf_schedule *s, int64_t i) {
    const cf_action *a = &s->actions[i];
    int64_t other = a->pass == CF_RECV_B ? a->stage + 1 : a->stage - 1;
    if (a->pass == CF_RECV_F || a->pass == CF_RECV_R || a->pass == CF_RECV_B)
        a = &s->actions[pipeline_find(s, a->pass - 1, a->chunk, other)];
    return is_send(a->pass) ? s->n_actions + pipeline_maker(s, a) : i;
}

double pipeline_makespan(const cf_plan *plan, const cf_schedule *s, const cf_timing *timing, double *start,
                         double *end) {
    int64_t n = s->n_actions, i, stage;
    double *seconds = (double *)calloc((size_t)(4 * n + 1), sizeof *seconds), *at = seconds + 2 * n, makespan;
    int64_t *others = (int64_t *)calloc((size_t)(2 * n + 1), sizeof *others);
    naive_wait *waits = (naive_wait *)calloc((size_t)(4 * n + 1), sizeof *waits);
    network w = {plan, s, timing, seconds, waits, 0, others, others + n};
    if (!seconds || !others || !waits) abort();
    for (i = 0; i < n; i++) w.input[i] = -1;
    for (i = 0; i < n; i++)
        if ((w.reader[i] = reader_of(s, &s->actions[i])) >= 0) w.input[w.reader[i]] = i;
    for (stage = 0; stage < s->shape.n_stages; stage++) add_stage(&w, stage);
    makespan = naive_relax(2 * n, seconds, waits, w.n_waits, at);
    for (i = 0; i < n; i++) {
        int64_t node = s->lowered ? node_of(s, i) : i;
        if (start) start[i] = at[node];
        if (end) end[i] = at[node] + seconds[node];
    }
    free(seconds);
    free(others);
    free(waits);
    return makespan;
}

double pipeline_state_over_default(const cf_plan *plan, const cf_schedule *s) {
    int64_t longest = 0, g, stage, v, i;
    double most = 0;
    for (g = 0; g < plan->n_groups; g++)
        if (plan->groups[g].tokens > longest) longest = plan->groups[g].tokens;
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (v = 0; v < s->shape.n_stages * s->shape.n_virtual; v++) {
            double behind = (double)(s->shape.n_stages * s->shape.n_virtual - 1 - stage),
                   limit = 2.0 * (double)longest + behind * (double)plan->chunk_size,
                   held = 0;
            for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
                const cf_action *a = &s->actions[i];
                double tokens = (double)cf_chunk_state_tokens(plan, a->chunk);
                if (a->stage != v) continue;
                held += a->pass == CF_F ? tokens : a->pass == CF_B || a->pass == CF_I ? -tokens : 0;
                if (held > most * limit) most = held / limit;
            }
        }
    return most;
}
