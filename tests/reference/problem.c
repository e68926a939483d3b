#include "problem.h"

#include "forest.h"
#include "naive.h"
#include "oracle.h"
#include "pipeline.h"
#include "steps.h"

#include <stdlib.h>
#include <string.h>

/* ---- drawing ---- */

static int64_t below(harness_rng *rng, int64_t n) { return harness_between(rng, 0, n - 1); }

static int64_t or_else(int64_t given, int64_t otherwise) { return given > 0 ? given : otherwise; }

/* A list with few options. */
static void draw_plain(harness_rng *rng, const problem_wants *wants, problem *p) {
    int64_t i;
    p->n = harness_between(rng, 0, or_else(wants->sequences, 16));
    p->pack.chunk_size = harness_between(rng, 3, 20);
    p->pack.n_ranks = harness_between(rng, 1, or_else(wants->ranks, 2));
    p->pack.method = harness_chance(rng, 0.3) ? CF_PACK_NEXT_FIT : CF_PACK_BEST_FIT;
    p->pack.no_tails = harness_chance(rng, 0.3);
    for (i = 0; i < p->n; i++)
        p->lengths[i] = harness_between(rng, 0, (harness_chance(rng, 0.2) ? 10 : 1) * p->pack.chunk_size);
}

static void draw_shares(harness_rng *rng, problem *p) {
    int64_t i, most;
    for (i = 1; i < p->n; i++) {
        p->shares[i].with = below(rng, 2) ? i - 1 : below(rng, i);
        most = p->lengths[p->shares[i].with] < p->lengths[i] ? p->lengths[p->shares[i].with] : p->lengths[i];
        p->shares[i].tokens = below(rng, 6) > 0 ? below(rng, most + 1) : 0;
    }
    p->pack.shared_prefixes = p->shares;
    p->pack.min_shared_prefix = 1 + below(rng, 4);
    p->pack.no_copies = below(rng, 2) == 0;
}

static void draw_ranks_in_step(harness_rng *rng, problem *p, int cp_groups) {
    static const int64_t even[] = {2, 4, 6, 8, 12};
    p->pack.n_ranks = cp_groups ? even[below(rng, COUNT(even))] : 1 + below(rng, 8);
    p->pack.lockstep = 1;
    p->pack.cost.constant = (double)below(rng, 2) * 10;
    p->pack.cost.per_token = 1;
    p->pack.cost.per_pair = (double)below(rng, 3) / 32;
    p->pack.cp_row_seconds = (double)below(rng, 2) / 100;
    if (cp_groups) p->pack.max_cp = 2 + below(rng, p->pack.n_ranks - 1);
}

/* Draws a list, a tree, ranks in lockstep or cp groups, with all options of packing. */
static void draw_wide(harness_rng *rng, const problem_wants *wants, problem *p) {
    int64_t kind, i;
    do kind = below(rng, 4);
    while ((kind == 1 && !wants->trees) || (kind == 2 && !wants->lockstep) || (kind == 3 && !wants->cp_groups));
    p->n = 1 + below(rng, or_else(wants->sequences, 24));
    p->pack.align = (int64_t)1 << below(rng, 3);
    p->pack.chunk_size = p->pack.align * (1 + below(rng, 12));
    p->pack.max_slices = below(rng, 4) == 0 ? 1 + below(rng, 4) : 0;
    p->pack.split = (cf_split_method)below(rng, CF_SPLIT_COUNT);
    p->pack.no_tails = below(rng, 6) == 0;
    for (i = 0; i < p->n; i++)
        p->lengths[i] = below(rng, p->pack.chunk_size * (below(rng, 3) > 0 ? 1 : kind == 3 ? 15 : 6) + 1);
    if (kind == 0) p->pack.method = (cf_pack_method)below(rng, CF_PACK_COUNT);
    if (kind <= 1) p->pack.n_ranks = below(rng, 3) == 0 ? 1 + below(rng, or_else(wants->ranks, 4)) : 1;
    if (kind == 1) draw_shares(rng, p);
    if (kind >= 2) draw_ranks_in_step(rng, p, kind == 3);
}

static void draw_timing(harness_rng *rng, problem *p) {
    int64_t i;
    if (harness_chance(rng, 0.3)) return;
    p->desc.timing = &p->timing;
    p->timing.latency =
        harness_chance(rng, 0.5) ? (double)harness_between(rng, 0, harness_chance(rng, 0.25) ? 200 : 12) / 4 : 0;
    p->timing.seconds_per_token = harness_chance(rng, 0.5) ? 0.125 : 0;
    p->timing.all.forward.per_token = 1;
    p->timing.all.forward.per_pair = harness_chance(rng, 0.5) ? 0.0625 : 0;
    if (harness_chance(rng, 0.3)) { /* no passes wait for their stream, or some, or all */
        p->timing.stream_forward = (double)harness_between(rng, 0, 4) / 8;
        p->timing.stream_backward = (double)harness_between(rng, 0, 8) / 8;
        p->timing.stream_exposed = (double)harness_between(rng, 0, 4) / 4;
        if (!(p->timing.stream_forward + p->timing.stream_backward > 0)) p->timing.stream_exposed = 0;
    }
    if (harness_chance(rng, 0.5)) return;
    memset(&p->timing.all, 0, sizeof p->timing.all);
    p->timing.stages = p->stages;
    for (i = 0; i < COUNT(p->stages); i++) {
        cf_stage_cost *cost = &p->stages[i];
        cost->forward.per_token = (double)harness_between(rng, 0, 3);
        cost->forward.constant = (double)harness_between(rng, 0, 2);
        if (harness_chance(rng, 0.3)) cost->input.per_token = cost->weight.per_token = 2;
        if (harness_chance(rng, 0.3)) cost->replay.per_token = 0.75;
    }
}

static void draw_limits(harness_rng *rng, problem *p) {
    cf_limits *limits = &p->desc.limits;
    cf_held_bytes *bytes = &limits->per_token;
    int64_t i;
    for (i = 0; i < PROBLEM_MOST_STAGES; i++) {
        p->limits[i] = harness_between(rng, 0, 8);
        p->limits_bytes[i] = harness_between(rng, 0, 6000);
    }
    if (harness_chance(rng, 0.3)) limits->chunks = harness_between(rng, 1, 8);
    if (harness_chance(rng, 0.2)) limits->chunks_by_stage = p->limits;
    bytes->activations = harness_between(rng, 0, 9);
    bytes->state = harness_between(rng, 0, 3);
    bytes->state_gradient = harness_between(rng, 0, 3);
    bytes->boundary = harness_between(rng, 0, harness_chance(rng, 0.25) ? 20 : 2);
    if (harness_chance(rng, 0.2)) limits->bytes = harness_between(rng, 1, 6000);
    if (harness_chance(rng, 0.2)) limits->bytes_by_stage = p->limits_bytes;
    if (limits->chunks == 0 && harness_chance(rng, 0.4)) limits->chunks = CF_NO_LIMIT;
    if (bytes->activations + bytes->state + bytes->state_gradient + bytes->boundary == 0)
        bytes->activations = 1; /* a byte limit that counts nothing is refused */
}

static void draw_order(harness_rng *rng, problem *p) {
    cf_schedule_desc *desc = &p->desc;
    desc->kind = (cf_schedule_kind)harness_between(rng, CF_SCHEDULE_PAPER, CF_SCHEDULE_BEST);
    desc->shape.replay = (cf_replay)harness_between(rng, CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL);
    if (desc->kind != CF_SCHEDULE_PAPER) desc->shape.replay = CF_REPLAY_LOCAL;
    desc->shape.n_stages = harness_between(rng, 1, 6);
    if (desc->kind == CF_SCHEDULE_INTERLEAVED || (desc->kind > CF_SCHEDULE_INTERLEAVED && harness_chance(rng, 0.3)))
        desc->shape.n_virtual = harness_between(rng, 1, 3);
    if (desc->kind >= CF_SCHEDULE_ZERO_BUBBLE)
        desc->shape.placement = (cf_placement)harness_between(rng, 0, CF_PLACEMENT_V);
    desc->shape.k = harness_between(rng, 1, 5);
    desc->shape.rank = p->plan->n_ranks - 1;
    desc->split_backward = harness_chance(rng, 0.3);
    desc->max_tries = 20;
    draw_timing(rng, p);
    draw_limits(rng, p);
    problem_settle(desc);
}

/* Sometimes draws forwards alone, or all forwards first. Ranks in lockstep have one list, which is rank 0's. */
static void draw_more(harness_rng *rng, problem *p) {
    cf_schedule_desc *desc = &p->desc;
    desc->shape.rank = p->pack.lockstep ? 0 : below(rng, p->plan->n_ranks);
    if (desc->kind == CF_SCHEDULE_BEST && below(rng, 3) == 0) desc->shape.forward_only = 1;
    problem_settle(desc);
    if (desc->kind == CF_SCHEDULE_GPIPE && below(rng, 3) == 0) {
        desc->forwards_first = 1;
        desc->limits.bytes = 0;
        desc->limits.bytes_by_stage = NULL;
    } else if (below(rng, 4) == 0) {
        desc->limits.state = harness_between(rng, 40, 400);
    }
}

static void note(const problem *p) {
    const cf_schedule_desc *d = &p->desc;
    harness_note("seed %llu: %d sequences, chunks of %d, %d ranks%s; %s%s, %d stages x %d (%s), K %d, %s replay, limit "
                 "%d%s, bytes %d%s; %d chunks, %d chains",
                 (unsigned long long)p->seed, (int)p->n, (int)p->pack.chunk_size, (int)p->plan->n_ranks,
                 p->pack.shared_prefixes     ? ", trees"
                 : p->pack.max_cp     ? ", cp groups"
                 : p->pack.lockstep ? ", in step"
                                    : "",
                 p->is_random ? "a random order" : cf_schedule_kind_name(d->kind),
                 d->shape.forward_only ? " of forwards" : "", (int)d->shape.n_stages, (int)d->shape.n_virtual,
                 cf_placement_name(d->shape.placement), (int)d->shape.k, cf_replay_name(d->shape.replay),
                 (int)d->limits.chunks, d->limits.chunks_by_stage ? " (by stage)" : "", (int)d->limits.bytes,
                 d->limits.bytes_by_stage ? " (by stage)" : "", (int)p->plan->n_chunks, (int)p->plan->n_chains);
}

problem_rank *problem_own(problem *p) { return &p->ranks[p->desc.shape.rank]; }

/* Draws a small list: long and short sequences, hybrid and standalone chunks, and idle ones on several ranks. */
static void draw_small(harness_rng *rng, const problem_wants *wants, problem *p) {
    int64_t i;
    p->pack.n_ranks = harness_between(rng, 1, or_else(wants->ranks, 2));
    p->n = harness_between(rng, 1, or_else(wants->sequences, 6));
    p->pack.chunk_size = harness_between(rng, 1, 12);
    p->pack.no_tails = harness_chance(rng, 0.3);
    if (p->pack.chunk_size % 2 == 0 && harness_chance(rng, 0.3)) p->pack.align = 2;
    for (i = 0; i < p->n; i++)
        p->lengths[i] = harness_between(rng, 0, (harness_chance(rng, 0.4) ? 5 : 1) * p->pack.chunk_size);
}

/* Draws costs that are not short binary fractions, so that times are equal only for equal work in equal order. If many
   passes begin at the same time, some take no time. */
static void draw_uneven_timing(harness_rng *rng, problem *p) {
    cf_timing *timing = &p->timing;
    if (harness_chance(rng, 0.2)) return;
    p->desc.timing = timing;
    timing->all.forward.constant = (double)harness_between(rng, 0, 2);
    timing->all.forward.per_token = harness_unit(rng);
    if (harness_chance(rng, 0.3)) timing->all.backward.per_pair = harness_unit(rng);
    if (harness_chance(rng, 0.5)) timing->latency = 3 * harness_unit(rng);
    if (harness_chance(rng, 0.7)) timing->seconds_per_token = harness_unit(rng);
    if (harness_chance(rng, 0.6)) return;
    timing->latency = (double)harness_between(rng, 0, 1);
    timing->seconds_per_token = timing->all.backward.per_pair = timing->all.forward.constant = 0;
    timing->all.forward.per_token = (double)harness_between(rng, 0, 1);
    timing->all.input.per_token = (double)harness_between(rng, 0, 1);
    timing->all.weight.per_token = (double)harness_between(rng, 0, 1);
    timing->all.backward.per_token = (double)harness_between(rng, 0, 2);
}

/* Makes a sound schedule of one rank that follows no kind. */
static void draw_random(harness_rng *rng, problem *p) {
    cf_held_bytes *bytes = &p->desc.limits.per_token;
    naive_shape shape = naive_draw_shape(rng);
    shape.rank = harness_between(rng, 0, p->plan->n_ranks - 1);
    p->is_random = 1;
    p->desc.shape.rank = shape.rank;
    problem_own(p)->schedule = naive_schedule(rng, p->plan, &shape);
    if (problem_own(p)->schedule != NULL) p->desc.shape = problem_own(p)->schedule->shape;
    bytes->activations = harness_between(rng, 0, 9);
    bytes->state = harness_between(rng, 0, 5);
    bytes->state_gradient = harness_between(rng, 0, 5);
    bytes->boundary = harness_between(rng, 0, 3);
}

void problem_draw(harness_rng *rng, const problem_wants *wants, problem *p) {
    static const problem_wants few = {0, 0, 0, 0, 0, 0, 0};
    cf_error error = {0};
    int wide;
    if (wants == NULL) wants = &few;
    memset(p, 0, sizeof *p);
    p->seed = rng->state;
    wide = !wants->random && !wants->small && (wants->trees || wants->lockstep || wants->cp_groups);
    if (wants->random || wants->small) draw_small(rng, wants, p);
    else if (wide) draw_wide(rng, wants, p);
    else draw_plain(rng, wants, p);
    if (cf_pack(p->lengths, p->n, &p->pack, &p->plan, &error) != CF_OK) {
        FAIL("cf_pack: %s", error.text);
        abort();
    }
    if (wants->random) draw_random(rng, p);
    else draw_order(rng, p);
    if (wants->random) draw_uneven_timing(rng, p);
    if (wide) draw_more(rng, p);
    /* replays that do not attend */
    p->desc.shape.outputs = p->desc.shape.replay != CF_REPLAY_PIPELINE && p->seed % 3 == 0;
    note(p);
}

/* ---- making ---- */

/* Simulates a rank's schedules and makes their steps. */
static cf_result make_rank(const problem *p, problem_rank *r, cf_error *error) {
    cf_simulate_desc how = {0};
    cf_result result;
    int64_t stage;
    how.timing = p->desc.timing;
    how.limits.per_token = p->desc.limits.per_token;
    how.limits.chunks = p->desc.limits.chunks;
    how.limits.chunks_by_stage = p->desc.limits.chunks_by_stage;
    result = cf_simulate(p->plan, r->schedule, &how, &r->times, error);
    if (result == CF_OK) result = cf_simulate(p->plan, r->lowered, &how, &r->lowered_times, error);
    for (stage = 0; stage < r->schedule->shape.n_stages && result == CF_OK; stage++) {
        result = cf_steps_make(p->plan, r->schedule, stage, p->seed, NULL, &r->steps[stage], error);
        if (result == CF_OK)
            result = cf_steps_make(p->plan, r->lowered, stage, p->seed, NULL, &r->lowered_steps[stage], error);
    }
    return result;
}

static cf_result order_in_step(problem *p, const cf_lower_desc *lower, cf_error *error) {
    cf_result result = cf_lockstep_plan(p->plan, &p->pack.cost, NULL, &p->columns, error);
    int64_t rank;
    if (result == CF_OK) result = cf_schedule_make(p->columns, &p->desc, &p->list, error);
    if (result == CF_OK) result = cf_schedule_lower(p->columns, p->list, lower, &p->lowered_list, error);
    for (rank = 0; rank < p->plan->n_ranks && result == CF_OK; rank++) {
        problem_rank *r = &p->ranks[rank];
        result = cf_lockstep_schedule(p->plan, p->list, rank, NULL, &r->schedule, error);
        if (result == CF_OK) result = cf_lockstep_schedule(p->plan, p->lowered_list, rank, NULL, &r->lowered, error);
    }
    return result;
}

cf_result problem_order(problem *p) {
    problem_rank *own = problem_own(p);
    cf_lower_desc lower = {0};
    cf_result result = CF_OK;
    cf_error error = {0};
    lower.timing = p->desc.timing;
    if (p->pack.lockstep) {
        result = order_in_step(p, &lower, &error);
    } else {
        if (!p->is_random) result = cf_schedule_make(p->plan, &p->desc, &own->schedule, &error);
        if (result == CF_OK) result = cf_schedule_lower(p->plan, own->schedule, &lower, &own->lowered, &error);
    }
    if (result != CF_OK && (result != CF_ERROR_INFEASIBLE || strncmp(error.field, "limits.", 7) != 0))
        FAIL("%s", error.text);
    return result;
}

cf_result problem_make(problem *p) {
    cf_result result = problem_order(p);
    cf_error error = {0};
    int64_t rank;
    for (rank = 0; rank < p->plan->n_ranks && result == CF_OK; rank++)
        if (p->ranks[rank].schedule != NULL && (result = make_rank(p, &p->ranks[rank], &error)) != CF_OK)
            FAIL("%s", error.text);
    return result;
}

void problem_free(problem *p) {
    int64_t rank, stage;
    for (rank = 0; rank < PROBLEM_MOST_RANKS; rank++) {
        problem_rank *r = &p->ranks[rank];
        for (stage = 0; stage < PROBLEM_MOST_STAGES && r->times != NULL; stage++) {
            cf_steps_free(r->steps[stage]);
            cf_steps_free(r->lowered_steps[stage]);
        }
        cf_timeline_free(r->times);
        cf_timeline_free(r->lowered_times);
        cf_schedule_free(r->lowered);
        if (p->is_random) naive_free(r->schedule);
        else cf_schedule_free(r->schedule);
    }
    cf_schedule_free(p->lowered_list);
    cf_schedule_free(p->list);
    cf_plan_free(p->columns);
    cf_plan_free(p->plan);
    memset(p, 0, sizeof *p);
    harness_note("%s", "");
}

/* ---- the judge ---- */

static const char *plan_fault(const problem *p) {
    forest_plan *forest = forest_of(p->plan);
    const char *fault = NULL;
    if (p->pack.shared_prefixes == NULL) fault = oracle_plan_fault(p->plan, p->lengths, p->n);
    if (fault == NULL && p->pack.shared_prefixes == NULL && !p->pack.lockstep)
        fault = oracle_option_fault(p->plan, p->lengths, &p->pack);
    if (fault == NULL) fault = forest_fault(forest, p->lengths);
    if (fault == NULL) fault = forest_slow_fault(forest, p->lengths);
    forest_free(forest);
    return fault;
}

/* Checks that every rank keeps to the limits of the columns. */
static const char *room_fault(const problem *p, const cf_schedule *s) {
    int64_t stage;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        const cf_limits *l = &p->list->limits;
        naive_peaks peaks = naive_peaks_of(p->plan, s, stage, &l->per_token);
        if (l->chunks_by_stage && l->chunks_by_stage[stage] > 0 && peaks.chunks > l->chunks_by_stage[stage])
            return "a rank keeps more chunks than its column may";
        if (l->bytes_by_stage && l->bytes_by_stage[stage] > 0 && peaks.bytes > l->bytes_by_stage[stage])
            return "a rank has more bytes than its column may";
        if (l->state_by_stage && l->state_by_stage[stage] > 0 && peaks.state_of_one > l->state_by_stage[stage])
            return "a rank has more state than its column may";
    }
    return NULL;
}

/* Returns whether some transfers are free. Those of idle chunks take no time and others do. In a lowered list a free
   one may come after another, so that passes do not all keep their times. */
static int has_free_transfers(const problem *p) {
    const cf_timing *t = p->desc.timing;
    return p->plan->n_idle > 0 && t != NULL && !(t->latency > 0) && t->seconds_per_token > 0;
}

static const char *rank_fault(const problem *p, const problem_rank *r) {
    const cf_timing *timing = p->desc.timing;
    const cf_held_bytes *bytes = &p->desc.limits.per_token;
    int by_kind = !p->is_random && p->list == NULL;
    const char *fault = by_kind ? pipeline_fault(p->plan, r->schedule, &p->desc) : naive_fault(p->plan, r->schedule);
    if (!fault && p->list) fault = room_fault(p, r->schedule);
    if (!fault && r->lowered) fault = naive_fault(p->plan, r->lowered);
    if (!fault && r->lowered) fault = pipeline_lowered_fault(r->schedule, r->lowered);
    if (!fault && r->times) fault = pipeline_times_fault(p->plan, r->schedule, timing, bytes, r->times);
    if (!fault && r->lowered_times)
        fault = pipeline_times_fault(p->plan, r->lowered, timing, bytes, r->lowered_times);
    if (!fault && r->times && r->lowered_times && !has_free_transfers(p))
        fault = pipeline_same_times_fault(r->schedule, r->times, r->lowered, r->lowered_times);
    if (!fault && r->steps[0]) fault = steps_fault(p->plan, r->schedule, r->steps, p->seed);
    if (!fault && r->lowered_steps[0]) fault = steps_fault(p->plan, r->lowered, r->lowered_steps, p->seed);
    return fault;
}

const char *problem_judge(const problem *p) {
    const cf_schedule *schedules[PROBLEM_MOST_RANKS], *lowered[PROBLEM_MOST_RANKS];
    const char *fault = plan_fault(p);
    int64_t rank;
    if (!fault && p->list) fault = pipeline_fault(p->columns, p->list, &p->desc);
    if (!fault && p->lowered_list) fault = pipeline_lowered_fault(p->list, p->lowered_list);
    for (rank = 0; rank < p->plan->n_ranks && !fault; rank++) {
        schedules[rank] = p->ranks[rank].schedule;
        lowered[rank] = p->ranks[rank].lowered;
        if (schedules[rank]) fault = rank_fault(p, &p->ranks[rank]);
    }
    if (!fault && p->list) fault = naive_rendezvous(p->plan, schedules, p->plan->n_ranks);
    if (!fault && p->lowered_list) fault = naive_rendezvous(p->plan, lowered, p->plan->n_ranks);
    return fault;
}
