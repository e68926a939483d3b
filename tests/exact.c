#include "exact.h"

#include <stdlib.h>
#include <string.h>

typedef struct pass {
    int machine;
    int takes;        /* slots that it takes from its machine when it starts */
    int gives;        /* slots that it gives back when it ends */
    double seconds;
    double tail;      /* longest way from its end to the end of all */
    uint64_t before;  /* passes that must have ended */
} pass;

typedef struct state {
    struct state *next;       /* in the same bucket */
    uint64_t done, barred;
    double start[EXACT_MOST_PASSES]; /* earliest start of each pass that is not done */
} state;

#define MOST_MACHINES 16
#define N_BUCKETS 65536

typedef struct solver {
    pass passes[EXACT_MOST_PASSES];
    int n, n_machines;
    int64_t slots[MOST_MACHINES]; /* limits; 0: none */
    double best;
    int64_t n_nodes, most_nodes;
    int gave_up;
    state *buckets[N_BUCKETS];
} solver;

static uint64_t bit(int i) { return (uint64_t)1 << i; }

/* ---- the passes of a problem ---- */

static int costs_nothing(const cf_pass_cost *cost) {
    return cost->constant <= 0 && cost->per_token <= 0 && cost->per_pair <= 0;
}

static double cost_of(const cf_pass_cost *cost, const cf_chunk *c) {
    return cost->constant + cost->per_token * (double)c->padded + cost->per_pair * (double)c->pairs;
}

/* F, R, B, I, W: from the costs given, as the comment of cf_stage_cost says. */
static void costs_of_chunk(const cf_timing *timing, int64_t v, const cf_chunk *c, double out[5]) {
    static const cf_stage_cost unit = {{0, 1, 0}, {0, 1, 0}, {0, 2, 0}, {0, 1, 0}, {0, 1, 0}};
    cf_stage_cost s = timing == NULL ? unit : timing->stages != NULL ? timing->stages[v] : timing->all;
    int none = costs_nothing(&s.forward) && costs_nothing(&s.replay) && costs_nothing(&s.backward) &&
               costs_nothing(&s.input) && costs_nothing(&s.weight);
    if (none) s = unit;
    out[0] = cost_of(&s.forward, c);
    out[1] = costs_nothing(&s.replay) ? out[0] : cost_of(&s.replay, c);
    out[2] = cost_of(&s.backward, c);
    if (costs_nothing(&s.backward)) {
        int parts = !costs_nothing(&s.input) || !costs_nothing(&s.weight);
        out[2] = parts ? cost_of(&s.input, c) + cost_of(&s.weight, c) : 2 * out[0];
    }
    out[3] = costs_nothing(&s.input) ? out[2] / 2 : cost_of(&s.input, c);
    out[4] = costs_nothing(&s.weight) ? out[2] / 2 : cost_of(&s.weight, c);
}

static int add_pass(solver *s, int machine, double seconds, int takes, int gives) {
    pass *p;
    if (s->n == EXACT_MOST_PASSES) return -1;
    p = &s->passes[s->n];
    memset(p, 0, sizeof *p);
    p->machine = machine;
    p->seconds = seconds;
    p->takes = takes;
    p->gives = gives;
    return s->n++;
}

static void must_follow(solver *s, int later, int earlier) {
    if (later >= 0 && earlier >= 0) s->passes[later].before |= bit(earlier);
}

/* Passes of the n chunks from `first` on, of which the last k are kept. f, r, b (ends of the backward's input part), w (what
   frees the slot): ids by [virtual stage][chunk of the unit]. Returns 0 if there are too many. */
static int add_unit(solver *s, const cf_plan *plan, const cf_schedule_desc *desc, int64_t first, int n, int k) {
    enum { MOST = 32 };
    static int f[MOST][MOST], r[MOST][MOST], b[MOST][MOST], w[MOST][MOST];
    int n_v = (int)(desc->n_stages * (desc->n_virtual > 0 ? desc->n_virtual : 1)), v, i;
    if (n > MOST || n_v > MOST) return 0;
    for (v = 0; v < n_v; v++) {
        int machine = v % (int)desc->n_stages;
        for (i = 0; i < n; i++) {
            double seconds[5];
            int dropped = i < n - k;
            costs_of_chunk(desc->timing, v, &plan->chunks[first + i], seconds);
            f[v][i] = add_pass(s, machine, seconds[0], !dropped, 0);
            r[v][i] = dropped ? add_pass(s, machine, seconds[1], 1, 0) : -1;
            b[v][i] = add_pass(s, machine, desc->split_backward ? seconds[3] : seconds[2], 0, !desc->split_backward);
            w[v][i] = desc->split_backward ? add_pass(s, machine, seconds[4], 0, 1) : b[v][i];
            if (w[v][i] < 0) return 0;
        }
    }
    for (v = 0; v < n_v; v++) {
        for (i = 0; i < n; i++) {
            must_follow(s, b[v][i], f[v][i]);
            must_follow(s, b[v][i], r[v][i]);
            if (w[v][i] != b[v][i]) must_follow(s, w[v][i], b[v][i]);
            if (v > 0) must_follow(s, f[v][i], f[v - 1][i]);
            if (v > 0) must_follow(s, b[v - 1][i], b[v][i]);
            if (i > 0) must_follow(s, f[v][i], f[v][i - 1]);
            if (i > 0) must_follow(s, b[v][i - 1], b[v][i]);
            must_follow(s, r[v][i], f[v][i]);
            if (r[v][i] >= 0) must_follow(s, r[v][i], w[v][i + k]);
            if (i > 0) must_follow(s, r[v][i - 1], r[v][i]);
            if (v > 0 && desc->replay != CF_REPLAY_LOCAL) must_follow(s, r[v][i], r[v - 1][i]);
        }
    }
    return 1;
}

/* Tails, by relaxing until nothing changes. */
static void find_tails(solver *s) {
    int i, j, changed = 1;
    while (changed) {
        changed = 0;
        for (i = 0; i < s->n; i++)
            for (j = 0; j < s->n; j++) {
                double tail = s->passes[j].tail + s->passes[j].seconds;
                if ((s->passes[j].before & bit(i)) == 0 || s->passes[i].tail >= tail) continue;
                s->passes[i].tail = tail;
                changed = 1;
            }
    }
}

/* ---- branch and bound ---- */

/* No completion of the state is shorter. */
static double bound_of(const solver *s, const state *at) {
    double bound = 0;
    int m, i;
    for (m = 0; m < s->n_machines; m++) {
        double head = 1e300, tail = 1e300, work = 0;
        for (i = 0; i < s->n; i++) {
            const pass *p = &s->passes[i];
            if ((at->done & bit(i)) || p->machine != m) continue;
            if (at->start[i] < head) head = at->start[i];
            if (p->tail < tail) tail = p->tail;
            work += p->seconds;
            if (at->start[i] + p->seconds + p->tail > bound) bound = at->start[i] + p->seconds + p->tail;
        }
        if (work > 0 && head + work + tail > bound) bound = head + work + tail;
    }
    return bound;
}

/* Whether a state seen before, with the same passes done, is at least as good everywhere. Notes this one if not. */
static int seen_better(solver *s, const state *at) {
    uint64_t hash = (at->done ^ at->barred * 0x9e3779b97f4a7c15u) * 0xff51afd7ed558ccdu;
    state **bucket = &s->buckets[hash >> 48], *old;
    int i;
    for (old = *bucket; old != NULL; old = old->next) {
        if (old->done != at->done || old->barred != at->barred) continue;
        for (i = 0; i < s->n; i++)
            if (!(at->done & bit(i)) && old->start[i] > at->start[i]) break;
        if (i == s->n) return 1;
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

static int64_t slots_in_use(const solver *s, const state *at, int machine) {
    int64_t used = 0;
    int i;
    for (i = 0; i < s->n; i++)
        if ((at->done & bit(i)) && s->passes[i].machine == machine) used += s->passes[i].takes - s->passes[i].gives;
    return used;
}

static int may_run(const solver *s, const state *at, int i) {
    const pass *p = &s->passes[i];
    if ((at->done | at->barred) & bit(i) || (p->before & ~at->done)) return 0;
    return !p->takes || s->slots[p->machine] == 0 || slots_in_use(s, at, p->machine) < s->slots[p->machine];
}

/* The state after pass i has run as early as it can. Earliest starts of what comes later go up with it. */
static state after(const solver *s, const state *at, int i) {
    state next = *at;
    double end = at->start[i] + s->passes[i].seconds;
    int j, changed = 1;
    next.done |= bit(i);
    for (j = 0; j < s->n; j++) {
        if (s->passes[j].machine == s->passes[i].machine) next.barred &= ~bit(j);
        if (next.done & bit(j)) continue;
        if ((s->passes[j].machine == s->passes[i].machine || (s->passes[j].before & bit(i))) && next.start[j] < end)
            next.start[j] = end;
    }
    while (changed) {
        int k;
        changed = 0;
        for (j = 0; j < s->n; j++)
            for (k = 0; k < s->n; k++) {
                double least = next.start[k] + s->passes[k].seconds;
                if ((next.done & bit(j)) || (next.done & bit(k)) || !(s->passes[j].before & bit(k))) continue;
                if (next.start[j] >= least) continue;
                next.start[j] = least;
                changed = 1;
            }
    }
    return next;
}

static uint64_t all_passes(const solver *s) { return s->n == 64 ? ~(uint64_t)0 : bit(s->n) - 1; }

/* Makespan of a state in which all has been done: starts stay what they were. */
static double end_of(const solver *s, const state *at) {
    double end = 0;
    int i;
    for (i = 0; i < s->n; i++)
        if (end < at->start[i] + s->passes[i].seconds) end = at->start[i] + s->passes[i].seconds;
    return end;
}

static void branch(solver *s, const state *at) {
    double first_end = 1e300;
    int i, first = -1, all_take = 1;
    uint64_t rivals = 0;
    state next;
    if (s->gave_up || bound_of(s, at) >= s->best * (1 - 1e-12) || seen_better(s, at)) return;
    if (++s->n_nodes > s->most_nodes) {
        s->gave_up = 1;
        return;
    }
    for (i = 0; i < s->n; i++) {
        if (!may_run(s, at, i) || at->start[i] + s->passes[i].seconds >= first_end) continue;
        first = i;
        first_end = at->start[i] + s->passes[i].seconds;
    }
    if (first < 0) return; /* a dead end: slots, or everything barred */
    for (i = 0; i < s->n; i++) {
        if (!may_run(s, at, i) || s->passes[i].machine != s->passes[first].machine) continue;
        if (i != first && at->start[i] >= first_end) continue;
        rivals |= bit(i);
        if (!s->passes[i].takes) all_take = 0;
    }
    for (i = 0; i < s->n; i++) {
        if (!(rivals & bit(i))) continue;
        next = after(s, at, i);
        if (next.done == all_passes(s)) {
            if (end_of(s, &next) < s->best) s->best = end_of(s, &next);
            continue;
        }
        branch(s, &next);
    }
    if (all_take && s->slots[s->passes[first].machine] > 0) {
        next = *at;
        next.barred |= rivals;
        branch(s, &next);
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

/* ---- all ways to keep fewer chunks than K ---- */

typedef struct unit_choice {
    int64_t first;
    int n, k;
} unit_choice;

static int solve_choice(solver *s, const cf_plan *plan, const cf_schedule_desc *desc, const unit_choice *units, int n) {
    state root;
    int i;
    s->n = 0;
    for (i = 0; i < n; i++)
        if (!add_unit(s, plan, desc, units[i].first, units[i].n, units[i].k)) return 0;
    find_tails(s);
    memset(&root, 0, sizeof root);
    /* Earliest starts along the graph alone. */
    for (;;) {
        int j, changed = 0;
        for (i = 0; i < s->n; i++)
            for (j = 0; j < s->n; j++) {
                double least = root.start[j] + s->passes[j].seconds;
                if (!(s->passes[i].before & bit(j)) || root.start[i] >= least) continue;
                root.start[i] = least;
                changed = 1;
            }
        if (!changed) break;
    }
    if (s->n > 0 && bound_of(s, &root) < s->best * (1 - 1e-12)) branch(s, &root);
    forget(s);
    return 1;
}

exact_answer exact_makespan(const cf_plan *plan, const cf_schedule_desc *desc, double known, int64_t most_nodes) {
    static solver s;
    unit_choice units[EXACT_MOST_PASSES];
    exact_answer answer = {-1, 0};
    int64_t id = desc->rank * plan->n_steps, end = id + plan->n_steps, k = desc->k > 0 ? desc->k : 1;
    int n = 0, i, limited = desc->limit > 0 || desc->limits != NULL;
    memset(&s, 0, sizeof s);
    s.best = known;
    s.most_nodes = most_nodes;
    s.n_machines = (int)desc->n_stages;
    if (desc->n_stages > MOST_MACHINES) return answer;
    for (i = 0; i < s.n_machines; i++) s.slots[i] = desc->limits != NULL ? desc->limits[i] : desc->limit;
    for (; id < end; id += units[n - 1].n) {
        if (n == EXACT_MOST_PASSES) return answer;
        units[n].first = id;
        units[n].n = plan->chunks[id].group >= 0 ? (int)plan->groups[plan->chunks[id].group].n_chunks : 1;
        units[n].k = units[n].n < k ? units[n].n : (int)k;
        n++;
    }
    for (;;) { /* an odometer over the k of the units */
        if (!solve_choice(&s, plan, desc, units, n) || s.gave_up) return answer;
        if (!limited) break;
        for (i = 0; i < n && units[i].k == 1; i++) units[i].k = units[i].n < k ? units[i].n : (int)k;
        if (i == n) break;
        units[i].k--;
    }
    answer.makespan = s.best;
    answer.n_nodes = s.n_nodes;
    return answer;
}
