#include "exact.h"

#include <stdlib.h>
#include <string.h>

#define MOST_MACHINES 8
#define N_BUCKETS 65536

/* The states of a chunk on a virtual stage. */
enum {
    WAITING,
    DROPPED,        /* F has run and kept nothing */
    REPLAYED,       /* R has run; with pipeline replay the next virtual stage also replays */
    REPLAYED_ALONE, /* R has run, but the next virtual stage keeps the chunk */
    KEPT,           /* F has run and kept */
    RETURNED,       /* I has run */
    DONE
};

typedef struct state {
    struct state *next;              /* in the same bucket */
    double last;                     /* start of the latest pass; nothing may start earlier */
    double free_at[MOST_MACHINES];
    double queue[MOST_MACHINES][2];  /* when the link to the next and to the previous stage is free */
    double output[EXACT_MOST_CELLS]; /* when the activations of F arrive at their reader */
    double replay[EXACT_MOST_CELLS]; /* of R */
    double gradient[EXACT_MOST_CELLS];
    unsigned char progress[EXACT_MOST_CELLS];
    uint32_t needless; /* dropped cells that there was room to keep */
} state;

typedef struct cell {
    int chunk, v, machine;
    int returns;            /* 1: in its row a V runs backwards, so that activations go to the previous stage */
    int index, size;        /* in its chain */
    int twin;               /* the first chunk of an identical sequence whose F starts first; -1: none */
    int free_to_keep;       /* no limit prevents keeping it, so it is never dropped */
    double seconds[5];      /* F .. W */
    double forward_transfer, backward_transfer;
    double tail;            /* longest path from the end of B or I to the end of the schedule */
} cell;

typedef struct move {
    int cell, pass, to; /* the cell's progress after it */
    double start;
} move;

typedef struct solver {
    const cf_plan *plan;
    const cf_schedule_desc *desc;
    cell cells[EXACT_MOST_CELLS];
    int n, n_v, n_cells, n_machines;         /* n: chunks */
    int64_t slots[MOST_MACHINES];            /* limits; 0: none */
    int64_t k;
    int local;
    int fixed_rule, kept[EXACT_MOST_CELLS];  /* by chunk: how many chunks of its chain are kept */
    int split;
    int n_path, gave_up;
    move path[EXACT_MOST_PASSES];
    double best;
    exact_answer *answer;
    int64_t n_nodes, most_nodes;
    state *buckets[N_BUCKETS];
} solver;

int64_t exact_loop(int64_t v, int64_t n_stages) { return v % n_stages; }

int64_t exact_v(int64_t v, int64_t n_stages) {
    return v / n_stages % 2 ? n_stages - 1 - v % n_stages : v % n_stages;
}

static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }

/* ---- the problem ---- */

static int costs_nothing(const cf_pass_cost *cost) {
    return cost->constant <= 0 && cost->per_token <= 0 && cost->per_pair <= 0;
}

static double cost_of(const cf_pass_cost *cost, const cf_chunk *c) {
    return cost->constant + cost->per_token * (double)c->rows + cost->per_pair * (double)c->pairs;
}

/* Computes F, R, B, I and W from the given costs, as the comment of cf_stage_cost defines. */
static void costs_of_chunk(const cf_timing *timing, int outputs, int64_t v, const cf_chunk *c, double out[5]) {
    static const cf_stage_cost unit = {{0, 1, 0}, {0, 1, 0}, {0, 2, 0}, {0, 1, 0}, {0, 1, 0}};
    cf_stage_cost s = timing == NULL ? unit : timing->stages != NULL ? timing->stages[v] : timing->all;
    int none = costs_nothing(&s.forward) && costs_nothing(&s.replay) && costs_nothing(&s.backward) &&
               costs_nothing(&s.input) && costs_nothing(&s.weight);
    int pass;
    if (none) s = unit;
    out[CF_F] = cost_of(&s.forward, c);
    if (timing != NULL && outputs && costs_nothing(&s.replay)) { /* a replay that does not attend */
        s.replay = s.forward;
        s.replay.per_pair = 0;
        out[CF_R] = cost_of(&s.replay, c);
    } else {
        out[CF_R] = costs_nothing(&s.replay) ? out[CF_F] : cost_of(&s.replay, c);
    }
    out[CF_B] = cost_of(&s.backward, c);
    if (costs_nothing(&s.backward)) {
        int parts = !costs_nothing(&s.input) || !costs_nothing(&s.weight);
        out[CF_B] = parts ? cost_of(&s.input, c) + cost_of(&s.weight, c) : 2 * out[CF_F];
    }
    out[CF_I] = costs_nothing(&s.input) ? out[CF_B] / 2 : cost_of(&s.input, c);
    out[CF_W] = costs_nothing(&s.weight) ? out[CF_B] / 2 : cost_of(&s.weight, c);
    for (pass = CF_F; timing != NULL && pass < CF_W; pass++) { /* W reads no state */
        double rate = pass <= CF_R ? timing->stream_forward : timing->stream_backward;
        double stream = rate * (double)c->prefix, first = stream * timing->stream_exposed;
        if (pass == CF_R && outputs) continue;
        out[pass] = first + larger(out[pass], stream - first);
    }
}

/* Returns the shortest time from the start of a backward to its gradient, and that of all its work. */
static double shortest_backward(const solver *s, const cell *c) {
    if (s->split == 0) return c->seconds[CF_B];
    return s->split == 1 ? c->seconds[CF_I] : smaller(c->seconds[CF_B], c->seconds[CF_I]);
}

static double least_backward_work(const solver *s, const cell *c) {
    double parts = c->seconds[CF_I] + c->seconds[CF_W];
    if (s->split == 0) return c->seconds[CF_B];
    return s->split == 1 ? parts : smaller(c->seconds[CF_B], parts);
}

static int is_last_of_chain(const cell *c) { return c->index == c->size - 1; }

static void find_tails(solver *s) {
    int v, i;
    for (v = 0; v < s->n_v; v++)
        for (i = 0; i < s->n; i++) {
            cell *c = &s->cells[v * s->n + i];
            c->tail = least_backward_work(s, c) - shortest_backward(s, c);
            if (c->tail < 0) c->tail = 0;
            if (v > 0)
                c->tail = larger(c->tail, c->backward_transfer + shortest_backward(s, c - s->n) + (c - s->n)->tail);
            if (c->index > 0) c->tail = larger(c->tail, shortest_backward(s, c - 1) + (c - 1)->tail);
        }
}

static int same_chunk(const cf_chunk *a, const cf_chunk *b) {
    return a->tokens == b->tokens && a->rows == b->rows && a->pairs == b->pairs;
}

/* Returns the latest earlier sequence with chunks equal to those from `first` on. */
static int twin_of(const solver *s, const cf_chunk *chunks, int first) {
    int size = s->cells[first].size, other, i;
    for (other = first - 1; other >= 0; other--) {
        if (s->cells[other].index > 0 || s->cells[other].size != size) continue;
        for (i = 0; i < size && same_chunk(&chunks[first + i], &chunks[other + i]); i++) continue;
        if (i == size) return other;
    }
    return -1;
}

static void add_cell(solver *s, exact_placement placement, int v, int i) {
    int64_t id = s->desc->shape.rank * s->plan->chunks_per_rank + i;
    const cf_chunk *chunk = &s->plan->chunks[id];
    const cf_timing *timing = s->desc->timing;
    cell *c = &s->cells[v * s->n + i];
    double transfer = timing == NULL ? 0 : timing->latency + timing->seconds_per_token * (double)chunk->rows;
    memset(c, 0, sizeof *c);
    c->chunk = i;
    c->v = v;
    c->machine = (int)placement(v, s->n_machines);
    c->returns = placement(v - v % s->n_machines, s->n_machines) != 0;
    c->size = chunk->chain >= 0 ? (int)s->plan->chains[chunk->chain].n_chunks : 1;
    c->index = chunk->chain >= 0 ? (int)chunk->index : 0;
    c->free_to_keep = !s->fixed_rule && s->slots[c->machine] == 0 && c->size <= s->k;
    /* a replay on the next stage needs one here */
    if (!s->local && v + 1 < s->n_v) c->free_to_keep &= (c + s->n)->free_to_keep;
    costs_of_chunk(timing, s->desc->shape.outputs, v, chunk, c->seconds);
    if (v > 0 && placement(v - 1, s->n_machines) != c->machine) c->backward_transfer = transfer;
    if (v + 1 < s->n_v && placement(v + 1, s->n_machines) != c->machine) c->forward_transfer = transfer;
    c->twin = -1;
}

/* Sets up the solver. Returns 0 if the problem is too large. */
static int set_up(solver *s, const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement) {
    int64_t n_virtual = desc->shape.n_virtual > 0 ? desc->shape.n_virtual : 1,
            n_stages = desc->shape.n_stages > 0 ? desc->shape.n_stages : 1;
    int i, v;
    s->plan = plan;
    s->desc = desc;
    if (n_stages > MOST_MACHINES || plan->chunks_per_rank * n_stages * n_virtual > EXACT_MOST_CELLS) return 0;
    s->n = (int)plan->chunks_per_rank;
    s->n_machines = (int)n_stages;
    s->n_v = (int)(n_stages * n_virtual);
    s->n_cells = s->n * s->n_v;
    s->k = desc->shape.k > 0 ? desc->shape.k : 1;
    s->local = desc->shape.replay == CF_REPLAY_LOCAL;
    s->split = desc->split_backward;
    for (i = 0; i < s->n_machines; i++) {
        const int64_t *by_stage = desc->limits.chunks_by_stage;
        s->slots[i] = by_stage != NULL && by_stage[i] != 0 ? by_stage[i] : desc->limits.chunks;
    }
    for (v = s->n_v - 1; v >= 0; v--)
        for (i = 0; i < s->n; i++) add_cell(s, placement, v, i);
    for (i = 0; i < s->n; i++)
        if (s->cells[i].index == 0) s->cells[i].twin =
            twin_of(s, &plan->chunks[desc->shape.rank * plan->chunks_per_rank], i);
    find_tails(s);
    return 1;
}

/* ---- what may run ---- */

static int holds(int progress) { return progress >= REPLAYED && progress <= RETURNED; }

static uint32_t bit(int i) { return (uint32_t)1 << i; }

/* Returns whether the stage and the chain have a place for the chunk. */
static int has_room(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    int64_t on_machine = 0, of_chain = 0;
    int j;
    for (j = 0; j < s->n_cells; j++) on_machine += s->cells[j].machine == c->machine && holds(at->progress[j]);
    for (j = i - c->index; j < i - c->index + c->size; j++) of_chain += holds(at->progress[j]);
    return of_chain < s->k && (s->slots[c->machine] == 0 || on_machine < s->slots[c->machine]);
}

static int may_drop(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    int before = c->v > 0 ? at->progress[i - s->n] : DROPPED;
    if (s->fixed_rule) return c->index < c->size - s->kept[c->chunk];
    return !c->free_to_keep && (s->local || before == DROPPED || before == REPLAYED);
}

/* Returns whether the chunk's pass may keep. If the chunk was replayed on the previous stage, that replay was either
   sent on or not. */
static int may_keep(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    if (s->fixed_rule) return c->index >= c->size - s->kept[c->chunk];
    return s->local || c->v == 0 || at->progress[i - s->n] != REPLAYED;
}

static int fixed_rule_allows_replay(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    int k = s->kept[c->chunk];
    if (at->progress[i + k] != DONE) return 0;
    return c->index + 1 >= c->size - k || at->progress[i + 1] > DROPPED;
}

static int may_go_forward(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    if (c->v == 0 && c->twin >= 0 && at->progress[c->twin] == WAITING) return 0;
    if (c->v > 0 && at->progress[i - s->n] == WAITING) return 0;
    return c->index == 0 || at->progress[i - 1] != WAITING;
}

static int may_replay(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    if (s->fixed_rule && !fixed_rule_allows_replay(s, at, i)) return 0;
    if (!s->local && c->v > 0 && at->progress[i - s->n] == DROPPED) return 0;
    return has_room(s, at, i);
}

/* Returns whether keeping the cell would have been no worse. */
static int is_needless(const solver *s, const state *at, int i) { return !s->fixed_rule && (at->needless & bit(i)); }

static int may_go_backward(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    if (c->v + 1 < s->n_v && at->progress[i + s->n] < RETURNED) return 0;
    return is_last_of_chain(c) || at->progress[i + 1] >= RETURNED;
}

static void add_move(const solver *s, const state *at, move *moves, int *n, int i, int pass, int to) {
    const cell *c = &s->cells[i];
    move *m = &moves[(*n)++];
    m->cell = i;
    m->pass = pass;
    m->to = to;
    m->start = at->free_at[c->machine];
    if (pass == CF_F && c->v > 0) m->start = larger(m->start, at->output[i - s->n]);
    if (pass == CF_R && c->v > 0 && !s->local) m->start = larger(m->start, at->replay[i - s->n]);
    if ((pass == CF_B || pass == CF_I) && c->v + 1 < s->n_v) m->start = larger(m->start, at->gradient[i + s->n]);
}

static void add_replays(const solver *s, const state *at, move *moves, int *n, int i) {
    int next = s->cells[i].v + 1 < s->n_v && !s->local ? at->progress[i + s->n] : KEPT;
    if (next == DROPPED || (next == WAITING && (!s->fixed_rule || may_drop(s, at, i + s->n))))
        add_move(s, at, moves, n, i, CF_R, REPLAYED);
    if (is_needless(s, at, i)) return;
    if (next >= KEPT || (next == WAITING && (!s->fixed_rule || may_keep(s, at, i + s->n))))
        add_move(s, at, moves, n, i, CF_R, REPLAYED_ALONE);
}

static int collect_moves(const solver *s, const state *at, move *moves) {
    int n = 0, i;
    for (i = 0; i < s->n_cells; i++) {
        switch (at->progress[i]) {
            case WAITING:
                if (!may_go_forward(s, at, i)) break;
                if (may_keep(s, at, i) && has_room(s, at, i)) add_move(s, at, moves, &n, i, CF_F, KEPT);
                if (may_drop(s, at, i)) add_move(s, at, moves, &n, i, CF_F, DROPPED);
                break;
            case DROPPED:
                if (may_replay(s, at, i)) add_replays(s, at, moves, &n, i);
                break;
            case REPLAYED: case REPLAYED_ALONE: case KEPT:
                if (!may_go_backward(s, at, i)) break;
                if (s->split != 1) add_move(s, at, moves, &n, i, CF_B, DONE);
                if (s->split != 0) add_move(s, at, moves, &n, i, CF_I, RETURNED);
                break;
            case RETURNED: add_move(s, at, moves, &n, i, CF_W, DONE); break;
            default: break;
        }
    }
    return n;
}

/* ---- running a pass ---- */

static double end_of_move(const solver *s, const move *m) {
    return m->start + s->cells[m->cell].seconds[m->pass];
}

/* Returns when a tensor made at `now` arrives in that direction. */
static double arrival(state *at, int machine, int way, double now, double transfer) {
    if (transfer <= 0) return now;
    at->queue[machine][way] = larger(at->queue[machine][way], now) + transfer;
    return at->queue[machine][way];
}

static void raise_all(double *values, int n, double least) {
    int i;
    for (i = 0; i < n; i++)
        if (values[i] < least) values[i] = least;
}

/* A dropped chunk counts as needlessly dropped until the stage or the chain is full. */
static void note_needs(const solver *s, state *at, const move *m) {
    int i;
    if (m->to == DROPPED) at->needless |= bit(m->cell);
    for (i = 0; i < s->n_cells; i++)
        if ((at->needless & bit(i)) && s->cells[i].machine == s->cells[m->cell].machine && !has_room(s, at, i))
            at->needless &= ~bit(i);
    if (m->pass == CF_R) at->needless &= ~bit(m->cell);
}

/* Runs a pass. Times in the past are raised to the last start: they no longer matter, and states then compare
   better. */
static void run(const solver *s, state *at, const move *m) {
    const cell *c = &s->cells[m->cell];
    double end = end_of_move(s, m);
    at->progress[m->cell] = (unsigned char)m->to;
    at->free_at[c->machine] = end;
    if (m->pass == CF_F) at->output[m->cell] = arrival(at, c->machine, c->returns, end, c->forward_transfer);
    if (m->pass == CF_R && m->to == REPLAYED)
        at->replay[m->cell] = arrival(at, c->machine, c->returns, end, c->forward_transfer);
    if (m->pass == CF_B || m->pass == CF_I)
        at->gradient[m->cell] = arrival(at, c->machine, !c->returns, end, c->backward_transfer);
    note_needs(s, at, m);
    at->last = m->start;
    raise_all(at->free_at, s->n_machines, at->last);
    raise_all(at->queue[0], 2 * s->n_machines, at->last);
    raise_all(at->output, s->n_cells, at->last);
    raise_all(at->replay, s->n_cells, at->last);
    raise_all(at->gradient, s->n_cells, at->last);
}

/* ---- cutting off ---- */

typedef struct heads {
    double forward[EXACT_MOST_CELLS], ready[EXACT_MOST_CELLS], backward[EXACT_MOST_CELLS];
} heads;

/* Finds the earliest starts of all remaining passes, if stages could run any number at once. ready: when the
   activations arrive. */
static void find_heads(const solver *s, const state *at, heads *h) {
    int i;
    for (i = 0; i < s->n_cells; i++) {
        const cell *c = &s->cells[i];
        double start = at->free_at[c->machine], replay = start;
        if (c->v > 0) {
            const cell *before = c - s->n;
            int waits = at->progress[i - s->n] == WAITING;
            start = larger(start, waits ? h->forward[i - s->n] + before->seconds[CF_F] + before->forward_transfer
                                        : at->output[i - s->n]);
            if (!s->local && at->progress[i - s->n] == DROPPED) replay = larger(replay, h->ready[i - s->n]);
        }
        if (c->index > 0 && at->progress[i - 1] == WAITING)
            start = larger(start, h->forward[i - 1] + (c - 1)->seconds[CF_F]);
        h->forward[i] = start;
        h->ready[i] = at->progress[i] == WAITING   ? start + c->seconds[CF_F]
                      : at->progress[i] == DROPPED ? replay + c->seconds[CF_R]
                                                   : at->last;
    }
    for (i = s->n_cells - 1; i >= 0; i--) {
        const cell *c = &s->cells[i];
        double start = larger(at->free_at[c->machine], h->ready[i]);
        if (c->v + 1 < s->n_v) {
            const cell *behind = c + s->n;
            int waits = at->progress[i + s->n] < RETURNED;
            double there = h->backward[i + s->n] + shortest_backward(s, behind) + behind->backward_transfer;
            start = larger(start, waits ? there : at->gradient[i + s->n]);
        }
        if (!is_last_of_chain(c) && at->progress[i + 1] < RETURNED)
            start = larger(start, h->backward[i + 1] + shortest_backward(s, c + 1));
        h->backward[i] = start;
    }
}

typedef struct load {
    double head, work, tail;
} load;

static void add_load(load *l, double head, double work, double tail) {
    l->head = smaller(l->head, head);
    l->tail = smaller(l->tail, tail);
    l->work += work;
}

/* At the first backward of a chain all its forwards have run, and only a limited number of them are kept. Returns the
   seconds of replays that this forces on a virtual stage, beyond those of the chunks dropped so far. The chain starts
   at cell i. */
static double forced_replays(const solver *s, const state *at, int i) {
    const cell *c = &s->cells[i];
    int64_t most = s->slots[c->machine] > 0 && s->slots[c->machine] < s->k ? s->slots[c->machine] : s->k;
    double least = 1e300;
    int j, more = c->size - (int)most;
    if (s->k >= c->size && most == s->k) return 0;
    for (j = i; j < i + c->size; j++) {
        int progress = at->progress[j];
        if (progress == DROPPED || progress == REPLAYED || progress == REPLAYED_ALONE) more--;
        if (progress == WAITING) least = smaller(least, s->cells[j].seconds[CF_R]);
    }
    return more > 0 && at->progress[i + c->size - 1] == WAITING ? more * least : 0;
}

/* Returns a lower bound on every completion of the state. */
static double bound_of(const solver *s, const state *at) {
    double bound = 0;
    load loads[MOST_MACHINES];
    heads h;
    int i;
    find_heads(s, at, &h);
    for (i = 0; i < s->n_machines; i++) {
        loads[i].head = loads[i].tail = 1e300;
        loads[i].work = 0;
    }
    for (i = 0; i < s->n_cells; i++) {
        const cell *c = &s->cells[i];
        load *l = &loads[c->machine];
        int progress = at->progress[i];
        double tail = s->split == 0 ? c->tail : 0;
        if (c->index == 0) l->work += forced_replays(s, at, i);
        if (progress == DONE) continue;
        if (progress == RETURNED) add_load(l, at->free_at[c->machine], c->seconds[CF_W], 0);
        if (progress == RETURNED) continue;
        bound = larger(bound, h.backward[i] + shortest_backward(s, c) + c->tail);
        add_load(l, h.backward[i], least_backward_work(s, c), tail);
        if (progress == WAITING) add_load(l, h.forward[i], c->seconds[CF_F], tail);
        if (progress == DROPPED) add_load(l, h.ready[i] - c->seconds[CF_R], c->seconds[CF_R], tail);
    }
    for (i = 0; i < s->n_machines; i++)
        if (loads[i].work > 0) bound = larger(bound, loads[i].head + loads[i].work + loads[i].tail);
    return bound;
}

static int none_later(const double *a, const double *b, int n) {
    int i;
    for (i = 0; i < n; i++)
        if (a[i] > b[i]) return 0;
    return 1;
}

static int at_least_as_good(const solver *s, const state *a, const state *b) {
    return a->last <= b->last && (a->needless & ~b->needless) == 0 &&
           none_later(a->free_at, b->free_at, s->n_machines) &&
           none_later(a->queue[0], b->queue[0], 2 * s->n_machines) && none_later(a->output, b->output, s->n_cells) &&
           none_later(a->replay, b->replay, s->n_cells) && none_later(a->gradient, b->gradient, s->n_cells);
}

/* Returns whether an earlier state with the same finished passes is at least as good in everything. If not, stores this
   one. */
static int seen_better(solver *s, const state *at) {
    uint64_t hash = 0xcbf29ce484222325u;
    state **bucket, **link, *old;
    int i;
    for (i = 0; i < s->n_cells; i++) hash = (hash ^ at->progress[i]) * 0x100000001b3u;
    hash = (hash ^ hash >> 29) * 0xff51afd7ed558ccdu;
    bucket = &s->buckets[hash >> 48];
    for (link = bucket; (old = *link) != NULL;) {
        if (memcmp(old->progress, at->progress, (size_t)s->n_cells) != 0) {
            link = &old->next;
            continue;
        }
        if (at_least_as_good(s, old, at)) return 1;
        if (at_least_as_good(s, at, old)) {
            *link = old->next;
            free(old);
            continue;
        }
        link = &old->next;
    }
    old = (state *)malloc(sizeof *old);
    if (old == NULL) {
        s->gave_up = 1;
        return 1;
    }
    *old = *at;
    old->next = *bucket;
    *bucket = old;
    return 0;
}

/* Leaves out moves that start late. A backward takes no place, and neither does a forward that no limit prevents from
   being kept. If such a pass could end before another starts, it may as well run first, unless its transfer then delays
   another. */
static int leave_out_late(const solver *s, move *moves, int n) {
    double first_end = 1e300;
    int first = -1, i, m = 0;
    for (i = 0; i < n; i++) {
        const cell *c = &s->cells[moves[i].cell];
        double end = end_of_move(s, &moves[i]);
        if (moves[i].pass == CF_R || (moves[i].pass == CF_F && !c->free_to_keep)) continue;
        if (moves[i].pass == CF_F ? c->forward_transfer > 0 : c->backward_transfer > 0) continue;
        if (s->split == 2 && moves[i].pass != CF_W)
            end += larger(0, larger(c->seconds[CF_B], c->seconds[CF_I]) - c->seconds[moves[i].pass]);
        if (end >= first_end) continue;
        first_end = end;
        first = moves[i].cell;
    }
    for (i = 0; i < n; i++)
        if (moves[i].cell == first || moves[i].start < first_end) moves[m++] = moves[i];
    return m;
}

/* ---- the search ---- */

static void note_schedule(solver *s) {
    exact_answer *a = s->answer;
    int64_t first = s->desc->shape.rank * s->plan->chunks_per_rank;
    int i;
    a->n_actions = s->n_path;
    for (i = 0; i < s->n_path; i++) {
        const move *m = &s->path[i];
        memset(&a->actions[i], 0, sizeof a->actions[i]);
        a->actions[i].chunk = (int32_t)(first + s->cells[m->cell].chunk);
        a->actions[i].stage = (int32_t)s->cells[m->cell].v;
        a->actions[i].pass = (uint8_t)m->pass;
        a->actions[i].keep = m->pass == CF_R || (m->pass == CF_F && m->to == KEPT);
    }
}

static int is_done(const solver *s, const state *at) {
    int i;
    for (i = 0; i < s->n_cells; i++)
        if (at->progress[i] != DONE) return 0;
    return 1;
}

static int comes_first(const solver *s, const move *a, const move *b) {
    if (a->start < b->start) return 1;
    if (a->start > b->start) return 0;
    return s->cells[a->cell].tail > s->cells[b->cell].tail;
}

static void sort_moves(const solver *s, move *moves, int n) {
    int i, j;
    for (i = 1; i < n; i++) {
        move m = moves[i];
        for (j = i; j > 0 && comes_first(s, &m, &moves[j - 1]); j--) moves[j] = moves[j - 1];
        moves[j] = m;
    }
}

static void branch(solver *s, const state *at) {
    move moves[4 * EXACT_MOST_CELLS];
    int n, i;
    if (s->gave_up || bound_of(s, at) >= s->best * (1 - 1e-12)) return;
    if (is_done(s, at)) {
        double end = 0;
        for (i = 0; i < s->n_path; i++) end = larger(end, end_of_move(s, &s->path[i]));
        if (end >= s->best) return;
        s->best = end;
        note_schedule(s);
        return;
    }
    if (seen_better(s, at)) return;
    if (++s->n_nodes > s->most_nodes) {
        s->gave_up = 1;
        return;
    }
    n = leave_out_late(s, moves, collect_moves(s, at, moves));
    sort_moves(s, moves, n);
    for (i = 0; i < n; i++) {
        state next = *at;
        run(s, &next, &moves[i]);
        s->path[s->n_path++] = moves[i];
        branch(s, &next);
        s->n_path--;
    }
}

static void forget(solver *s) {
    int i;
    for (i = 0; i < N_BUCKETS; i++)
        while (s->buckets[i] != NULL) {
            state *next = s->buckets[i]->next;
            free(s->buckets[i]);
            s->buckets[i] = next;
        }
}

static void search(solver *s) {
    state root = {0};
    branch(s, &root);
    forget(s);
}

/* Counts through the numbers of chunks that the chains keep, like an odometer. Returns 0 after the last setting. */
static int next_setting(solver *s) {
    int i, j;
    for (i = 0; i < s->n; i += s->cells[i].size) {
        int size = s->cells[i].size, most = size < s->k ? size : (int)s->k;
        int now = s->kept[i] > 1 ? s->kept[i] - 1 : most;
        int carries = s->kept[i] == 1;
        for (j = i; j < i + size; j++) s->kept[j] = now;
        if (!carries) return 1;
    }
    return 0;
}

static exact_answer solve(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement, int fixed_rule,
                          double known, int64_t most_nodes) {
    static solver s;
    static exact_answer answer;
    int limited = desc->limits.chunks > 0 || desc->limits.chunks_by_stage != NULL, i;
    memset(&s, 0, sizeof s);
    memset(&answer, 0, sizeof answer);
    answer.makespan = -1;
    s.answer = &answer;
    s.best = known;
    s.most_nodes = most_nodes;
    s.fixed_rule = fixed_rule;
    if (!set_up(&s, plan, desc, placement)) return answer;
    for (i = 0; i < s.n; i++) s.kept[i] = s.cells[i].size < s.k ? s.cells[i].size : (int)s.k;
    do search(&s);
    while (fixed_rule && limited && !s.gave_up && next_setting(&s));
    answer.n_nodes = s.n_nodes;
    if (!s.gave_up && s.best < EXACT_UNKNOWN) answer.makespan = s.best;
    return answer;
}

exact_answer exact_optimum(const cf_plan *plan, const cf_schedule_desc *desc, exact_placement placement, double known,
                           int64_t most_nodes) {
    return solve(plan, desc, placement, 0, known, most_nodes);
}

exact_answer exact_makespan(const cf_plan *plan, const cf_schedule_desc *desc, double known, int64_t most_nodes) {
    return solve(plan, desc, exact_loop, 1, known, most_nodes);
}
