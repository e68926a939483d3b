#include "pipeline.h"

#include "naive.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* ---- the options of a schedule ---- */

/* Returns the largest number of chunks that a stage may keep, by cf_schedule_desc's comments; 0: any number. */
static int64_t limit_of(const cf_plan *plan, const cf_schedule *s, const cf_schedule_desc *desc, int64_t stage) {
    int64_t limit = desc->limits.chunks, longest = 1, i, v;
    int by_bytes = desc->limits.bytes > 0 || desc->limits.bytes_by_stage;
    if (s->shape.forward_only) return 0;
    if (desc->limits.chunks_by_stage && desc->limits.chunks_by_stage[stage] != 0)
        limit = desc->limits.chunks_by_stage[stage];
    if (limit != 0 || by_bytes || s->kind != CF_SCHEDULE_BEST) return limit > 0 ? limit : 0;
    for (i = s->shape.rank * plan->chunks_per_rank; i < (s->shape.rank + 1) * plan->chunks_per_rank; i++) {
        int64_t n = 0, at;
        for (at = i; at >= 0; at = plan->chunks[at].up) n++;
        if (n > longest) longest = n;
    }
    for (v = 0, limit = 0; v < s->shape.n_stages * s->shape.n_virtual; v++)
        if (naive_stage(s, v) == stage)
            limit += (s->shape.k < longest ? s->shape.k : longest) + s->shape.n_stages - 1 - v % s->shape.n_stages;
    return limit;
}

/* Counts the kept chunks along one stage's list. */
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

/* Returns the largest number of inputs of standalone chunks that a stage keeps for local replays. */
static int64_t most_inputs(const cf_plan *plan, const cf_schedule *s, int64_t stage) {
    int64_t held = 0, most = 0, i;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        if (plan->chunks[a->chunk].chain >= 0) continue;
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
        int64_t state = desc->limits.state_by_stage ? desc->limits.state_by_stage[stage] : 0;
        if (bytes == 0) bytes = desc->limits.bytes;
        if (state == 0) state = desc->limits.state;
        fault = kept_fault(plan, s, desc, stage);
        if (!fault && (s->limits.bytes_by_stage ? s->limits.bytes_by_stage[stage] : 0) != (bytes > 0 ? bytes : 0))
            fault = "another limit of bytes is written in the schedule";
        if (!fault && bytes > 0 && memcmp(&s->limits.per_token, &desc->limits.per_token, sizeof(cf_held_bytes)) != 0)
            fault = "what bytes count is not written in the schedule";
        if (!fault && bytes > 0 && naive_peak_bytes(plan, s, stage, &desc->limits.per_token) > bytes)
            fault = "more bytes than the limit";
        if (!fault && state > 0 && (!s->limits.state_by_stage || s->limits.state_by_stage[stage] != state))
            fault = "another limit of state is written in the schedule";
        if (!fault && state > 0 && naive_peaks_of(plan, s, stage, &desc->limits.per_token).state_of_one > state)
            fault = "more state than the limit";
        if (!fault && s->kind == CF_SCHEDULE_BEST && s->shape.replay == CF_REPLAY_LOCAL && !s->shape.forward_only &&
            most_inputs(plan, s, stage) > 2 * s->shape.n_stages * s->shape.n_virtual + limit_of(plan, s, desc, stage))
            fault = "more inputs of standalone chunks than there may be";
    }
    return fault;
}

/* ---- the naive simulator ---- */

static double sum_of(const cf_pass_cost *cost, const cf_chunk *c) {
    return cost->constant + cost->per_token * (double)c->rows + cost->per_pair * (double)c->pairs;
}

static int is_given(const cf_pass_cost *cost) {
    return cost->constant > 0 || cost->per_token > 0 || cost->per_pair > 0;
}

/* Returns the seconds of a pass that waits for no stream, as cf_stage_cost defines them. */
static double compute_of(const cf_timing *timing, int outputs, int64_t v, const cf_chunk *c, int pass) {
    const cf_stage_cost *s = timing == NULL ? NULL : timing->stages ? &timing->stages[v] : &timing->all;
    double forward, backward, input, weight;
    if (s == NULL || (!is_given(&s->forward) && !is_given(&s->replay) && !is_given(&s->backward) &&
                      !is_given(&s->input) && !is_given(&s->weight)))
        return (double)(pass == CF_B ? 2 * c->rows : c->rows);
    forward = sum_of(&s->forward, c);
    input = sum_of(&s->input, c);
    weight = sum_of(&s->weight, c);
    backward = sum_of(&s->backward, c);
    if (!is_given(&s->backward)) backward = is_given(&s->input) || is_given(&s->weight) ? input + weight : 2 * forward;
    if (!is_given(&s->input)) input = backward / 2;
    if (!is_given(&s->weight)) weight = backward / 2;
    switch (pass) {
        case CF_F: return forward;
        case CF_R:
            if (is_given(&s->replay)) return sum_of(&s->replay, c);
            return forward - (outputs ? s->forward.per_pair * (double)c->pairs : 0);
        case CF_B: return backward;
        case CF_I: return input;
        default: return weight;
    }
}

static int is_shared(const cf_plan *plan, const cf_chunk *c) {
    return c->chain >= 0 && plan->chains[c->chain].cp > 0;
}

/* Returns the rows of a chunk's sequence before it on other ranks. */
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

/* Returns the exposed part of a transfer, plus the longer of the pass and the rest of the transfer. */
static double beside(double pass, double moved, double part) {
    double exposed = moved * part;
    return pass > moved - exposed ? exposed + pass : moved;
}

/* Adds transfers and scans, as cf_timing defines them. */
static double alone_seconds(const cf_plan *plan, const cf_timing *timing, int outputs, int64_t v, const cf_chunk *c,
                            int pass) {
    double seconds = compute_of(timing, outputs, v, c, pass);
    int forward = pass == CF_F || pass == CF_R;
    if (timing == NULL || pass == CF_W || (pass == CF_R && outputs)) return seconds;
    seconds = beside(seconds, (double)c->prefix * (forward ? timing->stream_forward : timing->stream_backward),
                     timing->stream_exposed);
    if (!is_shared(plan, c)) return seconds;
    if (timing->gather_forward > 0 || timing->gather_backward > 0)
        seconds = beside(seconds, (double)rows_of_others(plan, c) *
                                      (forward ? timing->gather_forward : timing->gather_backward),
                         timing->stream_exposed);
    return seconds + (pass == CF_R ? 0 : forward ? timing->scan_forward : timing->scan_backward);
}

/* Returns the seconds of a pass, over all ranks that run it together. */
double pipeline_seconds(const cf_plan *plan, const cf_timing *timing, int outputs, int64_t v, int64_t chunk,
                        int pass) {
    const cf_chunk *c = &plan->chunks[chunk], *mate;
    double most = alone_seconds(plan, timing, outputs, v, c, pass), other;
    int64_t g;
    for (g = 0; is_shared(plan, c) && pass != CF_W && g < plan->n_chains; g++) {
        if (plan->chains[g].sequence != plan->chains[c->chain].sequence) continue;
        mate = &plan->chunks[plan->chains[g].first_chunk + c->index];
        other = alone_seconds(plan, timing, outputs, v, mate, pass);
        if (other > most) most = other;
    }
    return most;
}

/* The waits in naive_relax's form. Of n actions, action i is node i, and node n + i is the transfer of its result if
   its reader is on another stage. In a lowered schedule a SEND sets its time; otherwise it follows its pass. */
typedef struct network {
    const cf_plan *plan;
    const cf_schedule *s;            /* the first rank's schedule */
    const cf_schedule *const *ranks; /* those of all ranks in lockstep */
    int64_t n_ranks;
    const cf_timing *timing;
    double *seconds;
    naive_wait *waits;
    /* for each pass: the pass whose result it reads, and the reader of its own; -1: none */
    int64_t n_waits, *input, *reader;
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
    return timing == NULL ? 0 : timing->latency + timing->seconds_per_token * (double)plan->chunks[chunk].rows;
}

/* Returns the largest seconds of action i on any rank or, with `sends`, of the transfer of its result. */
static double slowest(const network *w, int64_t i, int sends) {
    double most = 0, own;
    int64_t rank;
    for (rank = 0; rank < w->n_ranks; rank++) {
        const cf_action *a = &w->ranks[rank]->actions[i];
        own = sends ? pipeline_transfer(w->plan, w->timing, a->chunk)
                    : pipeline_seconds(w->plan, w->timing, w->s->shape.outputs, a->stage, a->chunk, a->pass);
        if (own > most) most = own;
    }
    return most;
}

static int64_t stage_of(const network *w, int64_t i) { return naive_stage(w->s, w->s->actions[i].stage); }

static void add_wait(network *w, int64_t from, int64_t to) {
    const naive_wait wait = {from, to, 0};
    if (from >= 0) w->waits[w->n_waits++] = wait;
}

/* Sends the result of pass `maker`; last: the previous transfers, down and up. */
static void send_on(network *w, int64_t maker, int64_t last[2]) {
    const cf_schedule *s = w->s;
    int64_t to = w->reader[maker], node = s->n_actions + maker;
    /* In loops the stage after the last one is the first. */
    int up = s->shape.placement == CF_PLACEMENT_V ? stage_of(w, to) > stage_of(w, maker)
                                                  : s->actions[to].stage > s->actions[maker].stage;
    w->seconds[node] = slowest(w, maker, 1);
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
        w->seconds[i] = slowest(w, i, 0);
        add_wait(w, input >= 0 && stage_of(w, input) != stage ? s->n_actions + input : input, i);
        add_wait(w, before, i);
        before = i;
        if (!s->lowered && w->reader[i] >= 0 && stage_of(w, w->reader[i]) != stage) send_on(w, i, sent);
    }
}

/* Returns the node of an action; a SEND and its RECV share the transfer's node. */
static int64_t node_of(const cf_schedule *s, int64_t i) {
    const cf_action *a = &s->actions[i];
    int64_t other = a->pass == CF_RECV_B ? a->stage + 1 : a->stage - 1;
    if (a->pass == CF_RECV_F || a->pass == CF_RECV_R || a->pass == CF_RECV_B)
        a = &s->actions[pipeline_find(s, a->pass - 1, a->chunk, other)];
    return is_send(a->pass) ? s->n_actions + pipeline_maker(s, a) : i;
}

double pipeline_in_step(const cf_plan *plan, const cf_schedule *const *ranks, int64_t n_ranks, const cf_timing *timing,
                        double *start, double *end) {
    const cf_schedule *s = ranks[0];
    int64_t n = s->n_actions, i, stage;
    double *seconds = (double *)calloc((size_t)(4 * n + 1), sizeof *seconds), *at = seconds + 2 * n, makespan;
    int64_t *others = (int64_t *)calloc((size_t)(2 * n + 1), sizeof *others);
    naive_wait *waits = (naive_wait *)calloc((size_t)(4 * n + 1), sizeof *waits);
    network w = {plan, s, ranks, n_ranks, timing, seconds, waits, 0, others, others + n};
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

double pipeline_makespan(const cf_plan *plan, const cf_schedule *s, const cf_timing *timing, double *start,
                         double *end) {
    return pipeline_in_step(plan, &s, 1, timing, start, end);
}

/* ---- times and lowered lists ---- */

static int near(double a, double b) { return fabs(a - b) <= 1e-9 * (1 + fabs(b)); }
static int same(double a, double b) { return memcmp(&a, &b, sizeof a) == 0; }

/* Checks which passes wait for streamed bytes, and how long, against the same passes without a stream. Skipped if ranks
   share sequences, because a pass may then wait for another rank. */
static const char *streams_fault(const cf_plan *plan, const cf_schedule *s, const cf_timing *timing,
                                 const cf_timeline *t) {
    cf_timing plain = {0};
    double seconds = 0;
    int64_t i, waits = 0;
    if (timing != NULL) plain = *timing;
    plain.stream_forward = plain.stream_backward = 0;
    for (i = 0; i < plan->n_chains; i++)
        if (plan->chains[i].cp > 0) return NULL;
    for (i = 0; i < s->n_actions; i++) {
        const cf_action *a = &s->actions[i];
        double more;
        if (a->pass >= CF_COMPUTE_PASS_COUNT) continue;
        more = pipeline_seconds(plan, timing, s->shape.outputs, a->stage, a->chunk, a->pass) -
               pipeline_seconds(plan, &plain, s->shape.outputs, a->stage, a->chunk, a->pass);
        waits += more > 0;
        seconds += more;
    }
    return t->stream_waits == waits && near(t->stream_seconds, seconds) ? NULL : "passes wait for their stream";
}

static const char *sums_fault(const cf_schedule *s, const cf_timeline *t) {
    double busy = 0, replayed = 0, area = t->makespan * (double)s->shape.n_stages, strongest = 0;
    int64_t i;
    for (i = 0; i < s->n_actions; i++) {
        double seconds = s->actions[i].pass < CF_COMPUTE_PASS_COUNT ? t->end[i] - t->start[i] : 0;
        busy += seconds;
        if (s->actions[i].pass == CF_R) replayed += seconds;
    }
    if (!near(t->busy, busy) || !near(t->replayed, replayed)) return "busy and replayed are other sums";
    if (area > 0 && (!near(t->bubble_busy, 1 - busy / area) || !near(t->bubble_useful, 1 - (busy - replayed) / area)))
        return "the bubble is another one";
    for (i = 0; i < t->n_bounds; i++)
        if (t->bounds[i].value > strongest) strongest = t->bounds[i].value;
    if (t->n_bounds != 2 || !same(t->bound, strongest)) return "the bound is not the strongest";
    return strongest <= t->makespan * (1 + 1e-9) ? NULL : "a bound is above the makespan";
}

static const char *held_fault(const cf_plan *plan, const cf_schedule *s, const cf_held_bytes *bytes,
                              const cf_timeline *t) {
    int64_t stage, i, live;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        naive_peaks peaks = naive_peaks_of(plan, s, stage, bytes);
        if (t->peak_live[stage] != peaks.chunks || t->peak_tokens[stage] != peaks.tokens ||
            t->peak_state_tokens[stage] != peaks.state)
            return "a peak is another one";
        if (t->peak_bytes[stage] != peaks.bytes) return "the peak of bytes is another one";
        for (i = s->first[stage], live = 0; i < s->first[stage + 1]; i++) {
            live += s->actions[i].keep;
            if (t->live[i] != live) return "other chunks are kept";
            live -= s->actions[i].pass == CF_B || s->actions[i].pass == CF_W;
        }
    }
    return NULL;
}

const char *pipeline_times_fault(const cf_plan *plan, const cf_schedule *s, const cf_timing *timing,
                                 const cf_held_bytes *bytes, const cf_timeline *t) {
    double *start = (double *)calloc((size_t)(2 * s->n_actions) + 1, sizeof *start), *end = start + s->n_actions;
    const char *fault = NULL;
    int64_t i;
    if (!start) abort();
    if (t->n_actions != s->n_actions || t->n_stages != s->shape.n_stages) fault = "the timeline is of another schedule";
    if (!fault && !near(t->makespan, pipeline_makespan(plan, s, timing, start, end))) fault = "another makespan";
    for (i = 0; i < s->n_actions && !fault; i++)
        if (!near(t->start[i], start[i]) || !near(t->end[i], end[i])) fault = "an action runs at another time";
    free(start);
    if (!fault) fault = sums_fault(s, t);
    if (!fault) fault = streams_fault(plan, s, timing, t);
    return fault ? fault : held_fault(plan, s, bytes, t);
}

const char *pipeline_same_times_fault(const cf_schedule *s, const cf_timeline *t, const cf_schedule *low,
                                      const cf_timeline *u) {
    int64_t stage, i, j;
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (i = s->first[stage], j = low->first[stage]; j < low->first[stage + 1]; j++) {
            if (low->actions[j].pass >= CF_COMPUTE_PASS_COUNT) continue;
            if (!same(t->start[i], u->start[j]) || !same(t->end[i], u->end[j])) return "a pass is moved by transfers";
            i++;
        }
    if (!same(t->makespan, u->makespan) || !same(t->busy, u->busy) || !same(t->replayed, u->replayed) ||
        !same(t->bubble_useful, u->bubble_useful) || !same(t->bubble_busy, u->bubble_busy))
        return "transfers change a sum";
    return t->n_bounds == u->n_bounds && same(t->bound, u->bound) ? NULL : "transfers change a bound";
}

/* Returns 1 if a tensor that moves `way` virtual stages goes to another stage. */
static int leaves(const cf_schedule *s, const cf_action *a, int way) {
    int64_t to = a->stage + way;
    return to >= 0 && to < s->shape.n_stages * s->shape.n_virtual && naive_stage(s, to) != naive_stage(s, a->stage);
}

/* Counts required transfers less existing ones, by pass. */
static const char *transfers_fault(const cf_schedule *s, const cf_schedule *low) {
    int64_t n[CF_PASS_COUNT] = {0}, i;
    for (i = 0; i < s->n_actions; i++) {
        const cf_action *a = &s->actions[i];
        int replays = a->pass == CF_R && s->shape.replay == CF_REPLAY_PIPELINE && leaves(s, a, 1) &&
                      pipeline_find(s, CF_R, a->chunk, a->stage + 1) >= 0;
        n[CF_SEND_F] += a->pass == CF_F && leaves(s, a, 1);
        n[CF_SEND_R] += replays;
        n[CF_SEND_B] += (a->pass == CF_B || a->pass == CF_I) && leaves(s, a, -1);
    }
    n[CF_RECV_F] = n[CF_SEND_F], n[CF_RECV_R] = n[CF_SEND_R], n[CF_RECV_B] = n[CF_SEND_B];
    for (i = 0; i < low->n_actions; i++) n[low->actions[i].pass] -= low->actions[i].pass >= CF_COMPUTE_PASS_COUNT;
    for (i = 0; i < CF_PASS_COUNT; i++)
        if (n[i] != 0) return "a transfer too many or too few";
    return NULL;
}

const char *pipeline_lowered_fault(const cf_schedule *s, const cf_schedule *low) {
    int64_t stage, i, j;
    if (!low->lowered || memcmp(&low->shape, &s->shape, sizeof s->shape) != 0) return "a lowered one of another shape";
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        for (i = s->first[stage], j = low->first[stage]; j < low->first[stage + 1]; j++) {
            if (low->actions[j].pass >= CF_COMPUTE_PASS_COUNT) continue;
            if (i == s->first[stage + 1] || memcmp(&low->actions[j], &s->actions[i], sizeof(cf_action)) != 0)
                return "another pass than before";
            i++;
        }
        if (i != s->first[stage + 1]) return "another pass than before";
    }
    return transfers_fault(s, low);
}

double pipeline_state_over_default(const cf_plan *plan, const cf_schedule *s) {
    const cf_held_bytes none = {0, 0, 0, 0};
    int64_t longest = 0, g, stage;
    double most = 0;
    for (g = 0; g < plan->n_chains; g++)
        if (plan->chains[g].tokens > longest) longest = plan->chains[g].tokens;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        double behind = (double)(s->shape.n_stages * s->shape.n_virtual - 1 - stage);
        double over = (double)naive_peaks_of(plan, s, stage, &none).state_of_one /
                      (2.0 * (double)longest + behind * (double)plan->chunk_size);
        if (over > most) most = over;
    }
    return most;
}
