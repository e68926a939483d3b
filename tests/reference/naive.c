#include "naive.h"

#include "exact.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ---- plans ---- */

static cf_plan *pack(const int64_t *lengths, int64_t n, int64_t chunk_size, int64_t max_slices) {
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    desc.chunk_size = chunk_size;
    desc.max_slices = max_slices;
    CHECK_INT(cf_pack(lengths, n, &desc, &plan, NULL), CF_OK);
    return plan;
}

cf_plan *naive_pack(const int64_t *lengths, int64_t n, int64_t chunk_size) { return pack(lengths, n, chunk_size, 0); }

cf_plan *naive_pack_alone(const int64_t *lengths, int64_t n, int64_t chunk_size) {
    return pack(lengths, n, chunk_size, 1);
}

/* ---- schedules as data ---- */

cf_schedule *naive_new(int64_t n_stages, int64_t n_actions) {
    cf_schedule *s = (cf_schedule *)calloc(1, sizeof *s);
    if (!s) abort();
    s->shape.n_stages = n_stages;
    s->n_actions = n_actions;
    s->first = (int64_t *)calloc((size_t)n_stages + 1, sizeof *s->first);
    s->actions = (cf_action *)calloc(n_actions > 0 ? (size_t)n_actions : 1, sizeof *s->actions);
    if (!s->first || !s->actions) abort();
    return s;
}

cf_schedule *naive_copy(const cf_schedule *schedule) {
    cf_schedule *s = naive_new(schedule->shape.n_stages, schedule->n_actions);
    int64_t *first = s->first;
    cf_action *actions = s->actions;
    *s = *schedule;
    s->first = first;
    s->actions = actions;
    s->limits.chunks_by_stage = NULL; /* they are in the other's block, and no rule reads them */
    memset(&s->block, 0, sizeof s->block);
    memcpy(first, schedule->first, ((size_t)schedule->shape.n_stages + 1) * sizeof *first);
    if (schedule->n_actions > 0) memcpy(actions, schedule->actions, (size_t)schedule->n_actions * sizeof *actions);
    return s;
}

void naive_free(cf_schedule *schedule) {
    if (!schedule) return;
    free(schedule->first);
    free(schedule->actions);
    free(schedule);
}

cf_schedule *naive_insert(cf_schedule *schedule, int64_t stage, int64_t position, cf_action action) {
    int64_t at = schedule->first[stage] + position, i;
    cf_schedule *s;
    cf_action *grown = (cf_action *)malloc(((size_t)schedule->n_actions + 1) * sizeof *grown);
    if (!grown) abort();
    for (i = 0; i < at; i++) grown[i] = schedule->actions[i];
    grown[at] = action;
    for (i = at; i < schedule->n_actions; i++) grown[i + 1] = schedule->actions[i];
    s = naive_copy(schedule);
    naive_free(schedule);
    free(s->actions);
    s->actions = grown;
    s->n_actions++;
    for (i = stage + 1; i <= s->shape.n_stages; i++) s->first[i]++;
    return s;
}

cf_schedule *naive_remove(cf_schedule *schedule, int64_t stage, int64_t position) {
    int64_t at = schedule->first[stage] + position, i;
    cf_schedule *s = naive_new(schedule->shape.n_stages, schedule->n_actions - 1);
    int64_t *first = s->first;
    cf_action *actions = s->actions;
    *s = *schedule;
    s->n_actions--;
    s->first = first;
    s->actions = actions;
    for (i = 0; i < s->n_actions; i++) actions[i] = schedule->actions[i < at ? i : i + 1];
    for (i = 0; i <= s->shape.n_stages; i++) first[i] = schedule->first[i] - (i > stage);
    naive_free(schedule);
    return s;
}

/* ---- the generator ---- */

#define MOST_CELLS 4096

typedef struct maker {
    const cf_plan *plan;
    naive_shape shape;
    int64_t v, n, first;            /* virtual stages; chunks of the rank, and the first of them */
    unsigned char done[5][MOST_CELLS];
    unsigned char split[MOST_CELLS];
    /* for each chain's first chunk: how many of its last chunks are kept on that stage */
    int64_t kept[MOST_CELLS];
} maker;

static int64_t chain_size(const cf_plan *plan, int64_t chunk) {
    return plan->chunks[chunk].chain < 0 ? 1 : plan->chains[plan->chunks[chunk].chain].n_chunks;
}

static int64_t cell(const maker *m, int64_t chunk, int64_t v) { return v * m->n + chunk - m->first; }

static int is_kept(const maker *m, int64_t chunk, int64_t v) {
    int64_t index = m->plan->chunks[chunk].index;
    return index >= chain_size(m->plan, chunk) - m->kept[cell(m, chunk - index, v)];
}

static int backward_done(const maker *m, int64_t chunk, int64_t v) {
    return m->done[CF_B][cell(m, chunk, v)] || m->done[CF_I][cell(m, chunk, v)];
}

static int freed(const maker *m, int64_t chunk, int64_t v) {
    return m->done[CF_B][cell(m, chunk, v)] || m->done[CF_W][cell(m, chunk, v)];
}

static int may_run(const maker *m, int pass, int64_t chunk, int64_t v) {
    int64_t at = cell(m, chunk, v), index = m->plan->chunks[chunk].index, size = chain_size(m->plan, chunk);
    int64_t kept = m->kept[cell(m, chunk - index, v)], i, held = 0;
    if (m->done[pass][at]) return 0;
    for (i = chunk - index; i < chunk - index + size; i++)
        held += !freed(m, i, v) && ((m->done[CF_F][cell(m, i, v)] && is_kept(m, i, v)) || m->done[CF_R][cell(m, i, v)]);
    switch (pass) {
        case CF_F:
            if (v > 0 && !m->done[CF_F][cell(m, chunk, v - 1)]) return 0;
            return index == 0 || m->done[CF_F][cell(m, chunk - 1, v)];
        case CF_R:
            if (is_kept(m, chunk, v) || !m->done[CF_F][at]) return 0;
            if (m->shape.replay != CF_REPLAY_LOCAL && v > 0 && !m->done[CF_R][cell(m, chunk, v - 1)]) return 0;
            return held < kept && index + kept < size && freed(m, chunk + kept, v);
        case CF_B:
        case CF_I:
            if ((pass == CF_I) != m->split[at]) return 0;
            if (!m->done[is_kept(m, chunk, v) ? CF_F : CF_R][at]) return 0;
            if (v + 1 < m->v && !backward_done(m, chunk, v + 1)) return 0;
            return index + 1 == size || backward_done(m, chunk + 1, v);
        default:
            return m->split[at] && m->done[CF_I][at];
    }
}

static void choose(harness_rng *rng, maker *m) {
    int64_t v, chunk;
    for (v = 0; v < m->v; v++) {
        for (chunk = m->first; chunk < m->first + m->n; chunk++) {
            int64_t at = cell(m, chunk, v), low = v > 0 ? m->kept[cell(m, chunk, v - 1)] : 1;
            m->split[at] = (unsigned char)(m->shape.split == 2 ? harness_chance(rng, 0.5) : m->shape.split);
            if (m->plan->chunks[chunk].index > 0) continue;
            /* Pipeline replay needs R on all stages before one that replays, so later stages keep no fewer chunks. */
            if (m->shape.replay == CF_REPLAY_LOCAL) low = 1;
            m->kept[at] = m->shape.uneven ? harness_between(rng, low, m->shape.k) : m->shape.k;
        }
    }
}

naive_shape naive_draw_shape(harness_rng *rng) {
    naive_shape shape = {0};
    shape.n_stages = harness_between(rng, 1, 5);
    shape.n_virtual = harness_chance(rng, 0.6) ? 1 : harness_between(rng, 1, 3);
    shape.placement = harness_chance(rng, 0.5) ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
    shape.k = harness_between(rng, 1, 4);
    shape.replay = harness_chance(rng, 0.5) ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
    shape.split = (int)harness_between(rng, 0, 2);
    shape.uneven = harness_chance(rng, 0.5);
    return shape;
}

int64_t naive_stage(const cf_schedule *schedule, int64_t v) {
    return (schedule->shape.placement == CF_PLACEMENT_V ? exact_v : exact_loop)(v, schedule->shape.n_stages);
}

cf_schedule *naive_schedule(harness_rng *rng, const cf_plan *plan, const naive_shape *shape) {
    static maker m; /* large */
    int64_t most, n = 0, i, s, v, chunk;
    int pass;
    cf_action *order;
    cf_schedule *schedule;
    memset(&m, 0, sizeof m);
    m.plan = plan;
    m.shape = *shape;
    m.v = shape->n_stages * shape->n_virtual;
    m.n = plan->chunks_per_rank;
    m.first = shape->rank * plan->chunks_per_rank;
    if (m.v * m.n > MOST_CELLS) {
        FAIL("too large for the naive generator");
        return NULL;
    }
    choose(rng, &m);
    most = 4 * m.v * m.n;
    order = (cf_action *)calloc((size_t)most + 1, sizeof *order);
    if (!order) abort();
    for (;;) { /* picks one of the passes that may run now, with equal chances */
        cf_action next = {0};
        int64_t ready = 0;
        for (pass = CF_F; pass <= CF_W; pass++)
            for (v = 0; v < m.v; v++)
                for (chunk = m.first; chunk < m.first + m.n; chunk++)
                    if (may_run(&m, pass, chunk, v) && harness_between(rng, 0, ready++) == 0) {
                        next.chunk = (int32_t)chunk;
                        next.stage = (int32_t)v;
                        next.pass = (uint8_t)pass;
                        next.keep = (uint8_t)(pass == CF_R || (pass == CF_F && is_kept(&m, chunk, v)));
                    }
        if (ready == 0) break;
        m.done[next.pass][cell(&m, next.chunk, next.stage)] = 1;
        order[n++] = next;
    }
    schedule = naive_new(shape->n_stages, n);
    schedule->kind = CF_SCHEDULE_PAPER;
    schedule->shape.replay = shape->replay;
    schedule->shape.n_virtual = shape->n_virtual;
    schedule->shape.placement = shape->placement;
    schedule->shape.k = shape->k;
    schedule->shape.rank = shape->rank;
    schedule->n_chunks = plan->n_chunks;
    for (s = 0, n = 0; s < shape->n_stages; s++) {
        for (i = 0; i < schedule->n_actions; i++)
            if (naive_stage(schedule, order[i].stage) == s) schedule->actions[n++] = order[i];
        schedule->first[s + 1] = n;
    }
    free(order);
    for (v = 0; v < m.v; v++)
        for (chunk = m.first; chunk < m.first + m.n; chunk++)
            if (!freed(&m, chunk, v)) {
                FAIL("the naive generator is stuck");
                naive_free(schedule);
                return NULL;
            }
    return schedule;
}

/* ---- the judge ---- */

/* The positions of one chunk's passes on one virtual stage in its stage's list; -1: none, -2: more than one. */
typedef struct places {
    int64_t at[CF_PASS_COUNT];
    int keep;
} places;

/* The position of every pass. Actions on a wrong stage have none. */
typedef struct book {
    const cf_plan *plan;
    const cf_schedule *s;
    int64_t n_v, first, n; /* virtual stages; the rank's first chunk, and its number of chunks */
    places *all;           /* (n_v x n) */
} book;

static book open_book(const cf_plan *plan, const cf_schedule *s) {
    book b = {plan, s, s->shape.n_stages * s->shape.n_virtual, s->shape.rank * plan->chunks_per_rank,
              plan->chunks_per_rank, NULL};
    int64_t stage, i, j;
    b.all = (places *)calloc((size_t)(b.n_v * b.n) + 1, sizeof *b.all);
    if (!b.all) abort();
    for (i = 0; i < b.n_v * b.n; i++)
        for (j = 0; j < CF_PASS_COUNT; j++) b.all[i].at[j] = -1;
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
            const cf_action *a = &s->actions[i];
            places *p = &b.all[a->stage * b.n + a->chunk - b.first];
            if (naive_stage(s, a->stage) != stage) continue;
            if (a->pass == CF_F) p->keep = a->keep;
            p->at[a->pass] = p->at[a->pass] == -1 ? i : -2;
        }
    return b;
}

static const places *find(const book *b, int64_t chunk, int64_t v) { return &b->all[v * b->n + chunk - b->first]; }

static int64_t backward_at(const places *p) { return p->at[CF_B] >= 0 ? p->at[CF_B] : p->at[CF_I]; }

static const char *fields_fault(const cf_plan *plan, const cf_schedule *s) {
    int64_t stage, i;
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
            const cf_action *a = &s->actions[i];
            if (a->reserved) return "reserved";
            if (a->pass >= (s->lowered ? CF_PASS_COUNT : CF_COMPUTE_PASS_COUNT)) return "pass";
            if (a->chunk < 0 || a->chunk >= plan->n_chunks ||
                a->chunk / plan->chunks_per_rank != s->shape.rank) return "chunk";
            if (a->stage < 0 || a->stage >= s->shape.n_stages * s->shape.n_virtual) return "stage";
            if (naive_stage(s, a->stage) != stage) return "stage";
            if (a->keep > 1 || (a->keep && a->pass != CF_F && a->pass != CF_R)) return "keep";
            if (a->pass == CF_R && !a->keep) return "R that keeps nothing";
            if (s->shape.forward_only && (a->keep || (a->pass != CF_F && a->pass != CF_SEND_F && a->pass != CF_RECV_F)))
                return "more than forwards";
        }
    return NULL;
}

/* Returns the previous chunk among those that continue the same chunk; -1: there is none. */
static int64_t sibling_of(const cf_plan *plan, int64_t chunk) {
    int64_t up = plan->chunks[chunk].up, i = chunk - 1;
    while (up >= 0 && i > up && plan->chunks[i].up != up) i--;
    return up >= 0 && i > up ? i : -1;
}

/* Checks that forwards run down the chain and backwards up, and that siblings run one after another in both. */
static const char *order_fault(const book *b, int64_t chunk, int64_t v) {
    const places *p = find(b, chunk, v), *q;
    int64_t up = b->plan->chunks[chunk].up, sibling = sibling_of(b->plan, chunk);
    if (up < 0) return NULL;
    q = find(b, up, v);
    if (q->at[CF_F] < 0 || q->at[CF_F] > p->at[CF_F]) return "order of F";
    if (!b->s->shape.forward_only && backward_at(q) < backward_at(p)) return "order of B";
    q = find(b, b->s->shape.forward_only ? chunk - 1 : sibling, v); /* forwards alone run in the order of the plan */
    if (sibling < 0) return NULL;
    if (q->at[CF_F] < 0 || q->at[CF_F] > p->at[CF_F]) return "order of F of siblings";
    if (!b->s->shape.forward_only && backward_at(q) > backward_at(p)) return "order of B of siblings";
    return NULL;
}

static const char *cell_fault(const book *b, int64_t chunk, int64_t v) {
    const places *p = find(b, chunk, v);
    int64_t i, back = backward_at(p);
    for (i = 0; i <= CF_RECV_B; i++)
        if (p->at[i] == -2) return "twice";
    if (p->at[CF_F] < 0) return "no F";
    if (b->s->shape.forward_only) return order_fault(b, chunk, v);
    if (p->at[CF_B] >= 0 ? p->at[CF_I] >= 0 || p->at[CF_W] >= 0 : p->at[CF_I] < 0 || p->at[CF_W] < p->at[CF_I])
        return "backward";
    if (back < p->at[CF_F]) return "backward before F";
    if (p->keep == (p->at[CF_R] >= 0)) return "R and keep disagree";
    if (p->at[CF_R] >= 0 && (p->at[CF_R] < p->at[CF_F] || p->at[CF_R] > back)) return "R out of place";
    if (b->s->shape.replay == CF_REPLAY_PIPELINE && p->at[CF_R] >= 0 && v > 0 && find(b, chunk, v - 1)->at[CF_R] < 0)
        return "R without R before it";
    return order_fault(b, chunk, v);
}

/* Counts the chunks of a chain with activations while action `at` runs. */
static int64_t held_at(const book *b, int64_t v, int64_t from, int64_t to, int64_t at) {
    int64_t chunk, n = 0;
    for (chunk = from; chunk < to; chunk++) {
        const places *p = find(b, chunk, v);
        int64_t begin = p->keep ? p->at[CF_F] : p->at[CF_R], end = p->at[CF_B] >= 0 ? p->at[CF_B] : p->at[CF_W];
        n += begin <= at && at <= end;
    }
    return n;
}

static const char *k_fault(const book *b) {
    int64_t i;
    for (i = 0; i < b->s->n_actions; i++) {
        const cf_action *a = &b->s->actions[i];
        int64_t first = a->chunk - b->plan->chunks[a->chunk].index;
        int64_t end = first + chain_size(b->plan, a->chunk);
        if (a->keep && held_at(b, a->stage, first, end, i) > b->s->shape.k) return "K";
    }
    return NULL;
}

static int done_on(const book *b, const int64_t *pc, int64_t chunk, int64_t v, int pass) {
    int64_t at = find(b, chunk, v)->at[pass];
    return at >= 0 && at < pc[naive_stage(b->s, v)];
}

/* Runs the lists in sweeps; every finished pass is visible to all stages. */
static const char *progress_fault(const book *b) {
    const cf_schedule *s = b->s;
    int64_t pc[64], stage;
    int moved = 1;
    for (stage = 0; stage < s->shape.n_stages; stage++) pc[stage] = s->first[stage];
    while (moved) {
        moved = 0;
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            const cf_action *a = &s->actions[pc[stage]];
            int ok = 1;
            if (pc[stage] == s->first[stage + 1]) continue;
            if (a->pass == CF_F && a->stage > 0) ok = done_on(b, pc, a->chunk, a->stage - 1, CF_F);
            if (a->pass == CF_R && a->stage > 0 && s->shape.replay == CF_REPLAY_PIPELINE)
                ok = done_on(b, pc, a->chunk, a->stage - 1, CF_R);
            if ((a->pass == CF_B || a->pass == CF_I) && a->stage < b->n_v - 1)
                ok = done_on(b, pc, a->chunk, a->stage + 1, CF_B) || done_on(b, pc, a->chunk, a->stage + 1, CF_I);
            pc[stage] += ok;
            moved |= ok;
        }
    }
    for (stage = 0; stage < s->shape.n_stages; stage++)
        if (pc[stage] < s->first[stage + 1]) return "deadlock";
    return NULL;
}

const char *naive_fault(const cf_plan *plan, const cf_schedule *s) {
    const char *fault = fields_fault(plan, s);
    int64_t chunk, v;
    book b;
    if (fault) return fault;
    b = open_book(plan, s);
    for (v = 0; !fault && v < b.n_v; v++)
        for (chunk = b.first; !fault && chunk < b.first + b.n; chunk++) fault = cell_fault(&b, chunk, v);
    if (!fault && !s->shape.forward_only) fault = k_fault(&b);
    if (!fault) fault = progress_fault(&b);
    if (!fault && s->lowered) fault = naive_rendezvous(plan, &s, 1);
    free(b.all);
    return fault;
}

/* ---- rendezvous ---- */

/* A stage's tensors of a chunk on a virtual stage: results not yet sent, and inputs received but not yet read. */
typedef struct tensors {
    unsigned char made[3], there[3]; /* by F, R, backward */
} tensors;

static int kind_of(int pass) {
    if (pass == CF_F || pass == CF_SEND_F || pass == CF_RECV_F) return 0;
    return pass == CF_R || pass == CF_SEND_R || pass == CF_RECV_R ? 1 : 2;
}

/* Returns whether another virtual stage is next to v, on another stage. */
static int leads_away(const cf_schedule *s, int64_t v, int64_t next) {
    return next >= 0 && next < s->shape.n_stages * s->shape.n_virtual && naive_stage(s, v) != naive_stage(s, next);
}

static int is_send(int pass) { return pass == CF_SEND_F || pass == CF_SEND_R || pass == CF_SEND_B; }
static int is_receive(int pass) { return pass == CF_RECV_F || pass == CF_RECV_R || pass == CF_RECV_B; }

/* A run of all lists at the same time. Each stage of each rank is a process. */
typedef struct processes {
    const cf_plan *plan;
    const cf_schedule *const *schedules;
    int64_t n_ranks, at[64][64]; /* at: by rank and stage, the position of the next action */
    tensors *all;                /* by chunk and virtual stage */
    const char *fault;
    int moved;
} processes;

static tensors *tensors_of(const processes *p, int64_t chunk, int64_t v) {
    return &p->all[chunk * p->schedules[0]->shape.n_stages * p->schedules[0]->shape.n_virtual + v];
}

/* Returns the next action of a process; NULL: none. */
static const cf_action *next_of(const processes *p, int64_t rank, int64_t stage) {
    const cf_schedule *s = p->schedules[rank];
    return p->at[rank][stage] < s->first[stage + 1] ? &s->actions[p->at[rank][stage]] : NULL;
}

/* A send completes when the process at the other end waits for it. If that process waits for another message from here,
   it would get the wrong one. */
static void send_one(processes *p, int64_t rank, int64_t stage) {
    const cf_schedule *s = p->schedules[rank];
    const cf_action *a = next_of(p, rank, stage), *b;
    int64_t to = a->pass == CF_SEND_B ? a->stage - 1 : a->stage + 1, other;
    int kind = kind_of(a->pass);
    tensors *there;
    if (!leads_away(s, a->stage, to)) {
        p->fault = "a send to nowhere";
        return;
    }
    if (tensors_of(p, a->chunk, a->stage)->made[kind] != 1) p->fault = "a send of nothing, or twice";
    other = naive_stage(s, to);
    b = next_of(p, rank, other);
    if (b == NULL || !is_receive(b->pass)) return;
    if (b->pass != a->pass + 1 || b->chunk != a->chunk || b->stage != to) {
        int64_t from = b->pass == CF_RECV_B ? b->stage + 1 : b->stage - 1;
        if (leads_away(s, b->stage, from) && naive_stage(s, from) == stage) p->fault = "a message of another tensor";
        return;
    }
    there = tensors_of(p, a->chunk, to);
    if (there->there[kind]) p->fault = "received twice";
    tensors_of(p, a->chunk, a->stage)->made[kind] = 2;
    there->there[kind] = 1;
    p->at[rank][stage]++;
    p->at[rank][other]++;
    p->moved = 1;
}

/* Returns whether a pass has its inputs from other stages. Without transfers in the lists it waits for the pass that
   makes them. */
static int has_input(processes *p, int64_t rank, const cf_action *a) {
    const cf_schedule *s = p->schedules[rank];
    int64_t from = a->pass == CF_B || a->pass == CF_I ? a->stage + 1 : a->stage - 1;
    if (a->pass == CF_W || !leads_away(s, a->stage, from)) return 1;
    if (a->pass == CF_R && s->shape.replay == CF_REPLAY_LOCAL) return 1;
    if (!s->lowered) return tensors_of(p, a->chunk, from)->made[kind_of(a->pass)];
    if (!tensors_of(p, a->chunk, a->stage)->there[kind_of(a->pass)]) p->fault = "a pass without its input";
    tensors_of(p, a->chunk, a->stage)->there[kind_of(a->pass)] = 2;
    return 1;
}

/* Returns the fault if all ranks of a stage now run these passes together. They must be of one kind, and the ranks of a
   cp group must run the same pass of the same column. */
static const char *together_fault(const processes *p, int64_t stage) {
    const cf_action *lead = next_of(p, 0, stage);
    int64_t rank, mate, cp, per_rank = p->plan->chunks_per_rank;
    for (rank = 0; rank < p->n_ranks; rank++) {
        const cf_action *a = next_of(p, rank, stage);
        int forwards = (a->pass == CF_F || a->pass == CF_R) && (lead->pass == CF_F || lead->pass == CF_R);
        if (a->stage != lead->stage || (a->pass != lead->pass && !forwards)) return "not in step";
    }
    for (rank = 0; rank < p->n_ranks; rank++) {
        const cf_action *a = next_of(p, rank, stage), *b;
        if (a->pass == CF_W || p->plan->chunks[a->chunk].chain < 0) continue;
        cp = p->plan->chains[p->plan->chunks[a->chunk].chain].cp;
        if (cp == 0 || p->n_ranks == 1) continue;
        for (mate = rank / cp * cp; mate < rank / cp * cp + cp; mate++) {
            b = next_of(p, mate, stage);
            if (a->pass != b->pass || a->chunk % per_rank != b->chunk % per_rank) return "a round does not meet";
        }
    }
    return NULL;
}

/* Runs a pass on all ranks of a stage once each of them can. */
static void run_together(processes *p, int64_t stage) {
    int64_t rank;
    for (rank = 0; rank < p->n_ranks; rank++) {
        const cf_action *a = next_of(p, rank, stage);
        if (a == NULL || is_send(a->pass) || is_receive(a->pass)) return;
    }
    p->fault = together_fault(p, stage);
    for (rank = 0; rank < p->n_ranks; rank++)
        if (p->fault || !has_input(p, rank, next_of(p, rank, stage)) || p->fault) return;
    for (rank = 0; rank < p->n_ranks; rank++) {
        const cf_action *a = next_of(p, rank, stage);
        if (a->pass != CF_W) tensors_of(p, a->chunk, a->stage)->made[kind_of(a->pass)] = 1;
        p->at[rank][stage]++;
    }
    p->moved = 1;
}

const char *naive_rendezvous(const cf_plan *plan, const cf_schedule *const *schedules, int64_t n_ranks) {
    int64_t n_stages = schedules[0]->shape.n_stages, n_tensors, rank, stage, i;
    processes p = {.plan = plan, .schedules = schedules, .n_ranks = n_ranks, .moved = 1};
    n_tensors = plan->n_chunks * n_stages * schedules[0]->shape.n_virtual;
    p.all = (tensors *)calloc((size_t)n_tensors + 1, sizeof *p.all);
    if (!p.all) abort();
    for (rank = 0; rank < n_ranks; rank++)
        for (stage = 0; stage < n_stages; stage++) p.at[rank][stage] = schedules[rank]->first[stage];
    while (p.moved && !p.fault) {
        p.moved = 0;
        for (stage = 0; stage < n_stages && !p.fault; stage++) {
            for (rank = 0; rank < n_ranks && !p.fault; rank++) {
                const cf_action *a = next_of(&p, rank, stage);
                if (a != NULL && is_send(a->pass)) send_one(&p, rank, stage);
            }
            if (!p.fault) run_together(&p, stage);
        }
    }
    for (rank = 0; rank < n_ranks && !p.fault; rank++)
        for (stage = 0; stage < n_stages && !p.fault; stage++)
            if (next_of(&p, rank, stage) != NULL) p.fault = "the processes wait for each other for ever";
    for (i = 0; i < n_tensors && !p.fault; i++) /* a pass has read everything that was received */
        if (p.all[i].there[1] == 1) p.fault = "RECV_R without R";
    free(p.all);
    return p.fault;
}

/* ---- memory ---- */

/* Returns 1 if a chunk reads or writes the state of a chain: its own, or one that it continues. */
static int reads_chain(const cf_plan *plan, int64_t chunk, int64_t chain) {
    while (chunk >= 0 && plan->chunks[chunk].chain != chain) chunk = plan->chunks[chunk].up;
    return chunk >= 0;
}

/* Returns the last F that reads the state of a chain, in a schedule of forwards alone. */
static int64_t last_read(const book *b, int64_t chain, int64_t v) {
    int64_t chunk, last = -1;
    for (chunk = b->first; chunk < b->first + b->n; chunk++) {
        int64_t at = find(b, chunk, v)->at[CF_F];
        if (at > last && reads_chain(b->plan, chunk, chain)) last = at;
    }
    return last;
}

/* Returns the action from which gradients of a chain's K and V exist: the backward of its last chunk or, if other
   chains continue it, the F of the first of them. */
static int64_t gradient_from(const book *b, const cf_chain *chain, int64_t v) {
    int64_t last = chain->first_chunk + chain->n_chunks - 1, i;
    for (i = last + 1; i < b->first + b->n; i++)
        if (b->plan->chunks[i].up == last) return find(b, i, v)->at[CF_F];
    return backward_at(find(b, last, v));
}

typedef struct span {
    cf_memory_load *loads; /* of row j of a stage's virtual stages, at action 0 */
    int64_t rows, n;       /* virtual stages of the stage, and its actions */
} span;

/* Adds tokens to a member, given by its offset, during actions from .. to. */
static void add_load(const span *s, size_t member, int64_t from, int64_t to, int64_t tokens) {
    int64_t i;
    for (i = from; i <= to && i < s->n; i++)
        *(int64_t *)(void *)((unsigned char *)&s->loads[i * s->rows] + member) += tokens;
}

static void add_cell(const book *b, const span *all, int64_t first, int64_t chunk, int64_t v, int64_t state) {
    const cf_chunk *c = &b->plan->chunks[chunk];
    const places *p = find(b, chunk, v);
    int shared = c->chain >= 0 && b->plan->chains[c->chain].cp > 0;   /* it sees the rows of other ranks as well */
    int64_t scores = c->rows * ((shared ? b->plan->slices[c->first_slice].begin : c->prefix) + c->rows), i;
    int64_t f = p->at[CF_F] - first, back = backward_at(p) - first;
    int64_t kept = (p->keep ? p->at[CF_F] : p->at[CF_R]) - first, end = p->at[CF_W] - first;
    if (p->at[CF_B] >= 0) end = back;
    for (i = CF_F; i < CF_COMPUTE_PASS_COUNT; i++) {
        if (p->at[i] < 0) continue;
        add_load(all, offsetof(cf_memory_load, chunk_tokens), p->at[i] - first, p->at[i] - first, c->rows);
        add_load(all, offsetof(cf_memory_load, chunk_scores), p->at[i] - first, p->at[i] - first, scores);
    }
    if (b->s->shape.forward_only) {
        if (state > 0)
            add_load(all, offsetof(cf_memory_load, state_tokens), f, last_read(b, c->chain, v) - first, state);
        return;
    }
    add_load(all, offsetof(cf_memory_load, live_tokens), kept, end, c->rows);
    add_load(all, offsetof(cf_memory_load, live_scores), kept, end, scores);
    if (!p->keep && b->s->shape.replay == CF_REPLAY_LOCAL)
        add_load(all, offsetof(cf_memory_load, input_tokens), f, kept - (b->s->shape.outputs == 0), c->rows);
    if (c->chain < 0) return;
    add_load(all, offsetof(cf_memory_load, state_tokens), f, back, state);
    add_load(all, offsetof(cf_memory_load, state_gradient_tokens),
             gradient_from(b, &b->plan->chains[c->chain], v) - first, back, state);
    add_load(all, offsetof(cf_memory_load, carries), gradient_from(b, &b->plan->chains[c->chain], v) - first, back,
             c->index == 0 && b->plan->chains[c->chain].tokens > 0);
}

int64_t naive_state(const cf_plan *plan, int64_t chunk) {
    const cf_chunk *c = &plan->chunks[chunk];
    const cf_chain *g = c->chain >= 0 ? &plan->chains[c->chain] : NULL;
    if (g == NULL || g->tokens == 0) return 0;
    return c->index + 1 < g->n_chunks ? c[1].prefix - c->prefix
                                      : plan->chunks[g->first_chunk].prefix + g->tokens - c->prefix;
}

void naive_loads(const cf_plan *plan, const cf_schedule *s, int64_t stage, cf_memory_load *loads) {
    book b = open_book(plan, s);
    span all = {loads, s->shape.n_virtual, s->first[stage + 1] - s->first[stage]};
    int64_t v, chunk;
    memset(loads, 0, (size_t)(all.n * all.rows) * sizeof *loads);
    for (v = 0; v < b.n_v; v++) {
        if (naive_stage(s, v) != stage) continue;
        for (chunk = b.first; chunk < b.first + b.n; chunk++)
            add_cell(&b, &all, s->first[stage], chunk, v, naive_state(plan, chunk));
        all.loads++;
    }
    free(b.all);
}

naive_peaks naive_peaks_of(const cf_plan *plan, const cf_schedule *s, int64_t stage, const cf_held_bytes *bytes) {
    int64_t n = s->first[stage + 1] - s->first[stage], rows = s->shape.n_virtual, i, j, live = 0;
    cf_memory_load *loads = (cf_memory_load *)calloc((size_t)(n * rows) + 1, sizeof *loads);
    naive_peaks peaks = {0, 0, 0, 0, 0};
    if (!loads) abort();
    naive_loads(plan, s, stage, loads);
    for (i = 0; i < n; i++) {
        const cf_action *a = &s->actions[s->first[stage] + i];
        naive_peaks now = {0, 0, 0, 0, 0};
        for (j = 0; j < rows; j++) {
            const cf_memory_load *l = &loads[i * rows + j];
            now.tokens += l->live_tokens;
            now.state += l->state_tokens;
            if (l->state_tokens > now.state_of_one) now.state_of_one = l->state_tokens;
            now.bytes += bytes->activations * l->live_tokens + bytes->state * l->state_tokens +
                         bytes->state_gradient * l->state_gradient_tokens + bytes->boundary * l->input_tokens;
        }
        now.chunks = live += a->keep;
        live -= a->pass == CF_B || a->pass == CF_W;
        if (now.chunks > peaks.chunks) peaks.chunks = now.chunks;
        if (now.tokens > peaks.tokens) peaks.tokens = now.tokens;
        if (now.state > peaks.state) peaks.state = now.state;
        if (now.state_of_one > peaks.state_of_one) peaks.state_of_one = now.state_of_one;
        if (now.bytes > peaks.bytes) peaks.bytes = now.bytes;
    }
    free(loads);
    return peaks;
}

int64_t naive_peak_chunks(const cf_plan *plan, const cf_schedule *s, int64_t stage) {
    const cf_held_bytes none = {0, 0, 0, 0};
    return naive_peaks_of(plan, s, stage, &none).chunks;
}

int64_t naive_peak_bytes(const cf_plan *plan, const cf_schedule *s, int64_t stage, const cf_held_bytes *bytes) {
    return naive_peaks_of(plan, s, stage, bytes).bytes;
}

/* ---- graphs ---- */

/* Returns whether all nodes can run one after another. */
static int all_run(const cf_graph *g) {
    int32_t *waiting = (int32_t *)calloc((size_t)g->n_nodes + 1, sizeof *waiting);
    int32_t *ready = (int32_t *)calloc((size_t)g->n_nodes + 1, sizeof *ready);
    int64_t i, e, n = 0;
    if (waiting == NULL || ready == NULL) abort();
    for (e = 0; e < g->n_edges; e++) waiting[g->edges[e].to]++;
    for (i = 0; i < g->n_nodes; i++)
        if (waiting[i] == 0) ready[n++] = (int32_t)i;
    for (i = 0; i < n; i++)
        for (e = g->first_out[ready[i]]; e < g->first_out[ready[i] + 1]; e++)
            if (--waiting[g->edges[g->out[e]].to] == 0) ready[n++] = g->edges[g->out[e]].to;
    free(waiting);
    free(ready);
    return n == g->n_nodes;
}

const char *naive_graph_fault(const cf_graph *g) {
    int64_t i, e;
    if (g->first_in[0] != 0 || g->first_in[g->n_nodes] != g->n_edges) return "first_in does not hold all edges";
    if (g->first_out[0] != 0 || g->first_out[g->n_nodes] != g->n_edges) return "first_out does not hold all edges";
    for (i = 0; i < g->n_nodes; i++) {
        for (e = g->first_in[i]; e < g->first_in[i + 1]; e++)
            if (g->edges[e].to != i || g->edges[e].from < 0 || g->edges[e].from >= g->n_nodes) return "a wrong edge";
        for (e = g->first_out[i]; e < g->first_out[i + 1]; e++) {
            if (g->edges[g->out[e]].from != i) return "an edge leaves another node";
            if (e > g->first_out[i] && g->out[e] <= g->out[e - 1]) return "the edges that leave a node do not rise";
        }
    }
    return all_run(g) ? NULL : "a node waits for itself";
}

double naive_relax(int64_t n, const double *seconds, const naive_wait *waits, int64_t n_waits, double *start) {
    double end = 0;
    int64_t round, i;
    int changed = 1;
    for (i = 0; i < n; i++) start[i] = 0;
    for (round = 0; changed && round <= n; round++)
        for (changed = 0, i = 0; i < n_waits; i++) {
            const naive_wait *w = &waits[i];
            double at = start[w->from] + seconds[w->from] + w->delay;
            if (!(at > start[w->to])) continue;
            start[w->to] = at;
            changed = 1;
        }
    for (i = 0; i < n; i++)
        if (start[i] + seconds[i] > end) end = start[i] + seconds[i];
    return changed ? -1 : end;
}

double naive_longest(const cf_graph *graph, const cf_schedule *lists, int slots, double *earliest) {
    int64_t n_waits = 0, stage, i;
    naive_wait *waits = (naive_wait *)calloc((size_t)(graph->n_edges + graph->n_nodes + 1), sizeof *waits);
    double *seconds = (double *)calloc((size_t)graph->n_nodes + 1, sizeof *seconds), length;
    if (!waits || !seconds) abort();
    for (i = 0; i < graph->n_nodes; i++) seconds[i] = graph->nodes[i].seconds;
    for (i = 0; i < graph->n_edges; i++) {
        const cf_edge *e = &graph->edges[i];
        const naive_wait wait = {e->from, e->to, e->seconds};
        if (slots || e->why != CF_EDGE_SLOT) waits[n_waits++] = wait;
    }
    for (stage = 0; lists && stage < lists->shape.n_stages; stage++)
        for (i = lists->first[stage] + 1; i < lists->first[stage + 1]; i++) {
            const naive_wait wait = {i - 1, i, 0};
            waits[n_waits++] = wait;
        }
    length = naive_relax(graph->n_nodes, seconds, waits, n_waits, earliest);
    free(waits);
    free(seconds);
    return length;
}
