#include "random_schedule.h"

#include "naive.h"
#include "pipeline.h"

#include <stdlib.h>
#include <string.h>

/* The style in which one schedule is made, drawn for each. */
typedef struct style {
    double keep;       /* chance that a forward keeps although it may drop */
    int rule;          /* DROP_... */
    /* chance that a replay may run before its backward can follow; 1: it goes before everything else */
    double early;
    double laziness;   /* chance that a pass is put off although it could run now */
    double noise;      /* noise added to the urgency, in seconds */
    int forward_first; /* forwards go before backwards */
    int64_t ahead;     /* chunks that may be in progress on the last virtual stage; one more on each before it */
    int safe;          /* replays only chunks whose backward can run at once, and keeps nothing at a forward */
} style;

enum { DROP_AT_RANDOM, DROP_IF_FULL, DROP_FIRST_OF_CHAIN, DROP_ON_SOME_STAGES, DROP_RULES };

typedef struct maker {
    harness_rng *rng;
    const cf_plan *plan;
    const cf_schedule_desc *desc;
    exact_placement placement;
    style style;
    int64_t n_stages, n_v, n, first; /* virtual stages; chunks of the rank, and the first of them */
    int64_t k;
    int local;
    /* by cell, v x n + chunk */
    unsigned char *done;             /* a bit for each pass that has run */
    unsigned char *kept, *dropped;   /* F has run and kept; F has run and dropped */
    unsigned char *split, *averse;   /* backwards to be split; chunks rather dropped (DROP_ON_SOME_STAGES) */
    double *end;                     /* (5 x cells) of each pass */
    double *tail;                    /* rough length of the path from the backward to the end */
    double *rank;                    /* by chunk: the order in which sequences are taken */
    double *now;                     /* (n_stages) */
    int64_t *held;                   /* (n_stages) chunks kept */
    int64_t *under_way;              /* (n_v) chunks between F and the backward, kept or not */
    cf_action *order;
    int64_t n_order;
} maker;

typedef struct candidate {
    int64_t cell;
    int pass, keep;
    double start, urgency;
} candidate;

static int64_t cells_of(const maker *m) { return m->n_v * m->n; }
static const cf_chunk *chunk_of(const maker *m, int64_t cell) { return &m->plan->chunks[m->first + cell % m->n]; }
static int has(const maker *m, int64_t cell, int pass) { return m->done[cell] >> pass & 1; }
static int returned(const maker *m, int64_t cell) { return has(m, cell, CF_B) || has(m, cell, CF_I); }
static int freed(const maker *m, int64_t cell) { return has(m, cell, CF_B) || has(m, cell, CF_W); }
static int is_held(const maker *m, int64_t cell) { return (m->kept[cell] || has(m, cell, CF_R)) && !freed(m, cell); }
static int64_t stage_of(const maker *m, int64_t cell) { return m->placement(cell / m->n, m->n_stages); }

static int64_t size_of(const maker *m, int64_t cell) {
    int64_t chain = chunk_of(m, cell)->chain;
    return chain >= 0 ? m->plan->chains[chain].n_chunks : 1;
}

static int64_t index_of(const maker *m, int64_t cell) {
    return chunk_of(m, cell)->chain >= 0 ? chunk_of(m, cell)->index : 0;
}

static double seconds_of(const maker *m, int64_t cell, int pass) {
    return pipeline_seconds(m->plan, m->desc->timing, m->desc->shape.outputs, cell / m->n, chunk_of(m, cell) - m->plan->chunks, pass);
}

/* Returns the transfer time between two neighbouring virtual stages. */
static double transfer_of(const maker *m, int64_t cell, int64_t other) {
    const cf_timing *timing = m->desc->timing;
    if (timing == NULL || stage_of(m, cell) == stage_of(m, other)) return 0;
    return timing->latency + timing->seconds_per_token * (double)chunk_of(m, cell)->rows;
}

/* ---- room ---- */

static int64_t limit_of(const maker *m, int64_t stage) {
    const cf_limits *limits = &m->desc->limits;
    return limits->chunks_by_stage && limits->chunks_by_stage[stage] != 0 ? limits->chunks_by_stage[stage]
                                                                          : limits->chunks;
}

static int64_t held_of_chain(const maker *m, int64_t cell) {
    int64_t first = cell - index_of(m, cell), n = 0, i;
    for (i = first; i < first + size_of(m, cell); i++) n += is_held(m, i);
    return n;
}

static int has_room(const maker *m, int64_t cell) {
    int64_t stage = stage_of(m, cell), limit = limit_of(m, stage);
    return held_of_chain(m, cell) < m->k && (limit == 0 || m->held[stage] < limit);
}

/* Returns whether the chunks whose backwards must come before this one's still find a place after it has taken one. */
static int leaves_room(const maker *m, int64_t cell) {
    int64_t stage = stage_of(m, cell), limit = limit_of(m, stage);
    return held_of_chain(m, cell) + 1 < m->k && (limit == 0 || m->held[stage] + 1 < limit);
}

/* ---- what may run ---- */

static int forward_is_open(const maker *m, int64_t cell) {
    if (has(m, cell, CF_F) || (cell >= m->n && !has(m, cell - m->n, CF_F))) return 0;
    return index_of(m, cell) == 0 || has(m, cell - 1, CF_F);
}

static int gradient_is_there(const maker *m, int64_t cell) {
    if (cell + m->n < cells_of(m) && !returned(m, cell + m->n)) return 0;
    return index_of(m, cell) == size_of(m, cell) - 1 || returned(m, cell + 1);
}

/* Returns whether no other chunk in the whole pipeline is in its backward. */
static int is_alone(const maker *m, int64_t cell) {
    int64_t i;
    for (i = 0; i < cells_of(m); i++)
        if (i % m->n != cell % m->n && is_held(m, i)) return 0;
    return index_of(m, cell) == size_of(m, cell) - 1 || freed(m, cell % m->n + 1);
}

static int replay_is_open(const maker *m, int64_t cell) {
    if (!m->dropped[cell] || has(m, cell, CF_R) || !has_room(m, cell)) return 0;
    if (!m->local && cell >= m->n && !has(m, cell - m->n, CF_R)) return 0;
    if (m->style.safe) return m->local ? gradient_is_there(m, cell) : is_alone(m, cell);
    return 1;
}

/* Checks the rules alone: with pipeline replay a chunk is dropped on the virtual stages 0 .. d - 1. */
static int may_drop(const maker *m, int64_t cell) { return m->local || cell < m->n || m->dropped[cell - m->n]; }

static int wants_to_drop(const maker *m, int64_t cell) {
    int64_t most = m->k;
    int is_last = index_of(m, cell) == size_of(m, cell) - 1;
    if (m->style.safe) return 1;
    if (!is_last && held_of_chain(m, cell) + 1 >= m->k) return 1; /* otherwise the last one could hardly be kept */
    switch (m->style.rule) {
        case DROP_IF_FULL: return !has_room(m, cell);
        case DROP_FIRST_OF_CHAIN:
            if (limit_of(m, stage_of(m, cell)) > 0 && limit_of(m, stage_of(m, cell)) < most)
                most = limit_of(m, stage_of(m, cell));
            return index_of(m, cell) + most < size_of(m, cell);
        case DROP_ON_SOME_STAGES: return m->averse[cell];
        default: return !harness_chance(m->rng, m->style.keep);
    }
}

/* Decides whether the forward may run, and if so whether it keeps. */
static int choose_keep(const maker *m, int64_t cell, int *keep) {
    int drop = may_drop(m, cell), room = has_room(m, cell);
    *keep = room && !(drop && wants_to_drop(m, cell));
    return *keep || drop;
}

static double ready_at(const maker *m, int64_t cell, int pass) {
    double at = m->now[stage_of(m, cell)], there = 0;
    int64_t other = pass == CF_B || pass == CF_I ? cell + m->n : cell - m->n;
    if (pass == CF_W || (pass == CF_R && m->local) || other < 0 || other >= cells_of(m)) return at;
    if (pass == CF_F || pass == CF_R) there = m->end[5 * other + pass];
    else there = m->end[5 * other + (has(m, other, CF_B) ? CF_B : CF_I)];
    there += transfer_of(m, cell, other);
    return there > at ? there : at;
}

/* Returns the urgency; the larger runs first. Backwards and replays come before forwards, or the reverse; then the
   sequence with the lower rank; then the longer path. */
static double urgency_of(const maker *m, int64_t cell, int pass) {
    double urgency = m->tail[cell] + m->style.noise * harness_unit(m->rng);
    int forward = pass == CF_F;
    if (pass == CF_W) return -1e6;
    if (pass == CF_R && m->style.early >= 1) return urgency + 2e5;
    return urgency - m->rank[cell % m->n] + (forward == m->style.forward_first ? 1e5 : 0);
}

static void offer(const maker *m, candidate *best, int64_t cell, int pass, int keep, int idle) {
    candidate c;
    c.cell = cell;
    c.pass = pass;
    c.keep = keep;
    c.start = ready_at(m, cell, pass);
    c.urgency = urgency_of(m, cell, pass);
    if (!idle && best->cell >= 0 && harness_chance(m->rng, m->style.laziness)) return;
    if (best->cell >= 0 && (c.start > best->start || (c.start >= best->start && c.urgency <= best->urgency))) return;
    *best = c;
}

/* Chooses the next pass to run; `idle`: nothing else could run, so nothing is postponed. */
static candidate choose(const maker *m, int idle) {
    candidate best = {-1, 0, 0, 0, 0};
    int64_t cell;
    int keep;
    for (cell = 0; cell < cells_of(m); cell++) {
        int64_t v = cell / m->n;
        if (forward_is_open(m, cell) && (idle || m->under_way[v] < m->style.ahead + m->n_v - 1 - v) &&
            choose_keep(m, cell, &keep))
            offer(m, &best, cell, CF_F, keep, idle);
        if (replay_is_open(m, cell) &&
            (idle || gradient_is_there(m, cell) || (leaves_room(m, cell) && harness_chance(m->rng, m->style.early))))
            offer(m, &best, cell, CF_R, 1, idle);
        if (is_held(m, cell) && !returned(m, cell) && gradient_is_there(m, cell))
            offer(m, &best, cell, m->split[cell] ? CF_I : CF_B, 0, idle);
        if (has(m, cell, CF_I) && !has(m, cell, CF_W)) offer(m, &best, cell, CF_W, 0, idle);
    }
    return best;
}

static void run(maker *m, const candidate *c) {
    cf_action *a = &m->order[m->n_order++];
    double end = c->start + seconds_of(m, c->cell, c->pass);
    memset(a, 0, sizeof *a);
    a->chunk = (int32_t)(m->first + c->cell % m->n);
    a->stage = (int32_t)(c->cell / m->n);
    a->pass = (uint8_t)c->pass;
    a->keep = (uint8_t)c->keep;
    m->done[c->cell] |= (unsigned char)(1 << c->pass);
    if (c->pass == CF_F && c->keep) m->kept[c->cell] = 1;
    if (c->pass == CF_F && !c->keep) m->dropped[c->cell] = 1;
    m->end[5 * c->cell + c->pass] = end;
    m->now[stage_of(m, c->cell)] = end;
    m->held[stage_of(m, c->cell)] += c->keep - (c->pass == CF_B || c->pass == CF_W);
    m->under_way[c->cell / m->n] += (c->pass == CF_F) - (c->pass == CF_B || c->pass == CF_I);
}

/* ---- a whole schedule ---- */

static void draw_style(maker *m, int greedy, int try) {
    harness_rng *rng = m->rng;
    style *s = &m->style;
    memset(s, 0, sizeof *s);
    s->rule = (int)harness_between(rng, 0, DROP_RULES - 1);
    s->keep = harness_chance(rng, 0.3) ? 1 : harness_unit(rng) / (1 + try / 4);
    s->early = harness_chance(rng, 0.4) ? 0 : harness_chance(rng, 0.3) ? 1 : harness_unit(rng);
    s->forward_first = harness_chance(rng, 0.3);
    s->ahead = harness_chance(rng, 0.4) ? m->n : harness_between(rng, 1, 4);
    s->noise = harness_chance(rng, 0.5) ? 0 : 20 * harness_unit(rng);
    s->laziness = greedy || harness_chance(rng, 0.2) ? 0 : 0.7 * harness_unit(rng);
    if (greedy && harness_chance(rng, 0.5)) s->rule = DROP_IF_FULL;
    if (greedy && harness_chance(rng, 0.5)) s->early = 0;
}

/* Draws each cell's and chunk's numbers, and estimates the path left after each backward. */
static void draw_cells(maker *m) {
    int64_t cell, by_unit = harness_between(m->rng, 0, 2);
    for (cell = 0; cell < cells_of(m); cell++) {
        m->split[cell] = (unsigned char)(m->desc->split_backward == 2 ? harness_chance(m->rng, 0.5)
                                                                      : m->desc->split_backward);
        m->averse[cell] = (unsigned char)harness_chance(m->rng, 0.4);
        m->tail[cell] = cell >= m->n ? m->tail[cell - m->n] + seconds_of(m, cell - m->n, CF_B) : 0;
    }
    for (cell = 0; cell < m->n; cell++) {
        double drawn = by_unit == 0 ? 0 : by_unit == 1 ? 1e3 * harness_unit(m->rng) : -(double)size_of(m, cell) * 10;
        m->rank[cell] = index_of(m, cell) > 0 ? m->rank[cell - 1] : drawn;
    }
}

static void start_over(maker *m) {
    size_t cells = (size_t)cells_of(m);
    memset(m->done, 0, cells);
    memset(m->kept, 0, cells);
    memset(m->dropped, 0, cells);
    memset(m->now, 0, (size_t)m->n_stages * sizeof *m->now);
    memset(m->held, 0, (size_t)m->n_stages * sizeof *m->held);
    memset(m->under_way, 0, (size_t)m->n_v * sizeof *m->under_way);
    m->n_order = 0;
}

static int all_done(const maker *m) {
    int64_t cell;
    for (cell = 0; cell < cells_of(m); cell++)
        if (!freed(m, cell)) return 0;
    return 1;
}

/* Returns 0 if no pass can run: the places are taken by chunks that wait for others. */
static int make_one(maker *m) {
    start_over(m);
    draw_cells(m);
    for (;;) {
        candidate c = choose(m, 0);
        if (c.cell < 0) c = choose(m, 1);
        if (c.cell < 0) return all_done(m);
        run(m, &c);
    }
}

static void *room_for(int64_t n, size_t size) {
    void *memory = calloc((size_t)n + 1, size);
    if (memory == NULL) abort();
    return memory;
}

static void prepare(maker *m) {
    int64_t cells = cells_of(m);
    m->done = (unsigned char *)room_for(cells, 1);
    m->kept = (unsigned char *)room_for(cells, 1);
    m->dropped = (unsigned char *)room_for(cells, 1);
    m->split = (unsigned char *)room_for(cells, 1);
    m->averse = (unsigned char *)room_for(cells, 1);
    m->end = (double *)room_for(5 * cells, sizeof(double));
    m->tail = (double *)room_for(cells, sizeof(double));
    m->rank = (double *)room_for(m->n, sizeof(double));
    m->now = (double *)room_for(m->n_stages, sizeof(double));
    m->held = (int64_t *)room_for(m->n_stages, sizeof(int64_t));
    m->under_way = (int64_t *)room_for(m->n_v, sizeof(int64_t));
    m->order = (cf_action *)room_for(4 * cells, sizeof(cf_action));
}

static void clean_up(maker *m) {
    free(m->done);
    free(m->kept);
    free(m->dropped);
    free(m->split);
    free(m->averse);
    free(m->end);
    free(m->tail);
    free(m->rank);
    free(m->now);
    free(m->held);
    free(m->under_way);
    free(m->order);
}

cf_schedule *random_schedule_from(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement,
                                  const cf_action *order, int64_t n) {
    int64_t n_stages = desc->shape.n_stages > 0 ? desc->shape.n_stages : 1, s, i, at = 0;
    cf_schedule *schedule = naive_new(n_stages, n);
    schedule->shape.replay = desc->shape.replay == CF_REPLAY_LOCAL ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    schedule->shape.n_virtual = desc->shape.n_virtual > 0 ? desc->shape.n_virtual : 1;
    schedule->shape.placement = placement == exact_v ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
    schedule->shape.k = desc->shape.k > 0 ? desc->shape.k : 1;
    schedule->shape.rank = desc->shape.rank;
    schedule->n_chunks = plan->n_chunks;
    for (s = 0; s < n_stages; s++) {
        for (i = 0; i < n; i++)
            if (placement(order[i].stage, n_stages) == s) schedule->actions[at++] = order[i];
        schedule->first[s + 1] = at;
    }
    return schedule;
}

cf_schedule *random_schedule(harness_rng *rng, const cf_plan *plan, const cf_schedule_desc *desc,
                             exact_placement placement, int greedy) {
    enum { MOST_TRIES = 20 };
    cf_schedule *schedule = NULL;
    maker m = {0};
    int try;
    m.rng = rng;
    m.plan = plan;
    m.desc = desc;
    m.placement = placement;
    m.n_stages = desc->shape.n_stages > 0 ? desc->shape.n_stages : 1;
    m.n_v = m.n_stages * (desc->shape.n_virtual > 0 ? desc->shape.n_virtual : 1);
    m.n = plan->chunks_per_rank;
    m.first = desc->shape.rank * plan->chunks_per_rank;
    m.k = desc->shape.k > 0 ? desc->shape.k : 1;
    m.local = desc->shape.replay == CF_REPLAY_LOCAL;
    prepare(&m);
    for (try = 0; try <= MOST_TRIES && schedule == NULL; try++) {
        draw_style(&m, greedy, try);
        m.style.safe = try == MOST_TRIES;
        if (make_one(&m)) schedule = random_schedule_from(plan, desc, placement, m.order, m.n_order);
    }
    clean_up(&m);
    return schedule;
}
