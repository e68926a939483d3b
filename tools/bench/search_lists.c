#include "search_lists.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* A pass in a list: chunk x 3 + pass; pass is CF_F, CF_R or CF_B. */
typedef int32_t item;

static item item_of(int64_t chunk, int pass) { return (item)(3 * chunk + pass); }
static int64_t chunk_of(item i) { return i / 3; }
static int pass_of(item i) { return (int)(i % 3); }

enum { HISTORY = 500, CHECK_CLOCK = 64 };

/* A solution consists of the lists alone: a forward keeps activations if its list has no replay of the chunk. */
typedef struct lists {
    item *items; /* (n_stages x 3 n) the list of stage s starts at s x 3 n */
    int *count;  /* (n_stages) */
} lists;

typedef struct searcher {
    const cf_plan *plan;
    const cf_chunk *chunks;
    int64_t n, n_stages, k;
    int64_t *limits;           /* (n_stages) */
    double *seconds;           /* (n_stages x 3 n) by item */
    double *transfer;          /* (n) */
    lists now, trial, best;
    double makespan, best_makespan;
    double history[HISTORY];   /* late acceptance: makespans of so many steps ago */
    int64_t step;
    uint64_t state;
    double *arrived[2];        /* (n_stages x n) when a chunk's input, and its gradient, arrive; below 0: not yet */
    double *end;               /* (n_stages x 3 n) by place in the list */
    unsigned char *by_link;    /* (n_stages x n) 1: the pass waited for its input, not for its stage */
    int *place;                /* (n_stages x 3 n) by item: its place in its list */
    int *next;                 /* (n_stages) */
    double *free_at, *link[2]; /* (n_stages) */
    int64_t *in_chain;         /* (n) by the chain's first chunk: number of its chunks that are kept */
    signed char *seen;         /* (n) for the check of a list */
    int *critical;             /* passes on the critical path, as stage x 3 n + place in the list; last pass first */
    int n_critical;
} searcher;

static uint64_t draw_bits(searcher *s) { /* splitmix64 */
    uint64_t x = s->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int64_t below(searcher *s, int64_t n) { return (int64_t)(draw_bits(s) % (uint64_t)n); }

static item *list_of(const searcher *s, const lists *l, int64_t stage) { return &l->items[stage * 3 * s->n]; }

/* ---- is a list sound, and how long do all lists take? ---- */

/* Returns the chunk before or after a chunk in its chain; -1: none. */
static int64_t neighbour(const searcher *s, int64_t chunk, int on) {
    const cf_chunk *c = &s->chunks[chunk];
    int64_t i = c->index + on;
    return c->chain < 0 || i < 0 || i >= s->plan->chains[c->chain].n_chunks ? -1 : chunk + on;
}

/* Checks a list: F before R before B, a chain forwards and then backwards, and no more kept chunks than allowed. */
static int is_sound(searcher *s, const lists *l, int64_t stage) {
    enum { NOTHING, FORWARD, KEPT, DONE };
    const item *list = list_of(s, l, stage);
    int64_t live = 0;
    int i;
    memset(s->seen, NOTHING, (size_t)s->n);
    memset(s->in_chain, 0, (size_t)s->n * sizeof *s->in_chain);
    for (i = 0; i < l->count[stage]; i++) s->seen[chunk_of(list[i])] |= pass_of(list[i]) == CF_R ? 8 : 0;
    for (i = 0; i < l->count[stage]; i++) {
        int64_t c = chunk_of(list[i]), before = neighbour(s, c, -1), after = neighbour(s, c, 1);
        int64_t first = s->chunks[c].chain < 0 ? c : c - s->chunks[c].index;
        int dropped = s->seen[c] & 8, was = s->seen[c] & 7, keeps = 0;
        switch (pass_of(list[i])) {
            case CF_F:
                if (was != NOTHING || (before >= 0 && (s->seen[before] & 7) == NOTHING)) return 0;
                keeps = !dropped;
                break;
            case CF_R:
                if (was != FORWARD) return 0;
                keeps = 1;
                break;
            default:
                if (was != KEPT || (after >= 0 && (s->seen[after] & 7) != DONE)) return 0;
                s->in_chain[first]--;
                live--;
                s->seen[c] = (signed char)(DONE | dropped);
                continue;
        }
        s->seen[c] = (signed char)((keeps ? KEPT : FORWARD) | dropped);
        live += keeps;
        s->in_chain[first] += keeps;
        if (live > s->limits[stage] || s->in_chain[first] > s->k) return 0;
    }
    return 1;
}

/* Runs a stage as far as its inputs have arrived. Returns the neighbours that received something: 1 the next stage, 2
   the previous one. */
static int advance(searcher *s, const lists *l, int64_t stage) {
    const item *list = list_of(s, l, stage);
    int64_t base = stage * 3 * s->n;
    int sides = 0, i;
    for (i = s->next[stage]; i < l->count[stage]; i++) {
        int64_t c = chunk_of(list[i]);
        int pass = pass_of(list[i]), back = pass == CF_B, to = back ? -1 : 1;
        int crosses = pass != CF_R && stage + to >= 0 && stage + to < s->n_stages;
        double ready = pass == CF_R ? 0 : s->arrived[back][stage * s->n + c], start = s->free_at[stage];
        if (ready < 0) break;
        s->by_link[base + i] = ready > start;
        if (ready > start) start = ready;
        s->end[base + i] = s->free_at[stage] = start + s->seconds[base + list[i]];
        s->place[base + list[i]] = i;
        if (!crosses) continue;
        if (s->link[back][stage] < s->free_at[stage]) s->link[back][stage] = s->free_at[stage];
        s->link[back][stage] += s->transfer[c];
        s->arrived[back][(stage + to) * s->n + c] = s->link[back][stage];
        sides |= back ? 2 : 1;
    }
    s->next[stage] = i;
    return sides;
}

/* Returns the makespan of all lists; DBL_MAX: they wait for each other forever. */
static double measure(searcher *s, const lists *l) {
    int64_t cells = s->n_stages * s->n, i, stage = 0, done = 0, way = 1;
    double makespan = 0;
    for (i = 0; i < cells; i++) s->arrived[0][i] = s->arrived[1][i] = -1;
    for (i = 0; i < s->n; i++) s->arrived[0][i] = s->arrived[1][cells - s->n + i] = 0;
    for (i = 0; i < s->n_stages; i++) {
        s->next[i] = 0;
        s->free_at[i] = s->link[0][i] = s->link[1][i] = 0;
    }
    while (done < 2 * s->n_stages) { /* forth and back over the stages, until a whole round moves nothing */
        int sides = advance(s, l, stage);
        done = sides ? 0 : done + 1;
        if (stage + way < 0 || stage + way >= s->n_stages) way = -way;
        else stage += way;
    }
    for (i = 0; i < s->n_stages; i++) {
        if (s->next[i] < l->count[i]) return DBL_MAX;
        if (s->free_at[i] > makespan) makespan = s->free_at[i];
    }
    return makespan;
}

/* Follows the critical path: from the pass that ends last, back over passes that only the pass before them delayed. A
   transfer that waited for its queue is also followed to its own pass; this is exact enough to choose a move. */
static void trace(searcher *s, const lists *l) {
    int64_t stage = 0, i;
    int at;
    for (i = 1; i < s->n_stages; i++)
        if (s->free_at[i] > s->free_at[stage]) stage = i;
    s->n_critical = 0;
    for (at = l->count[stage] - 1; at >= 0;) {
        int64_t base = stage * 3 * s->n;
        item pass = list_of(s, l, stage)[at];
        s->critical[s->n_critical++] = (int)(base + at);
        if (!s->by_link[base + at]) {
            at--;
            continue;
        }
        stage += pass_of(pass) == CF_B ? 1 : -1;
        at = s->place[stage * 3 * s->n + pass];
    }
}

/* ---- moves ---- */

static void move_item(item *list, int from, int to) {
    item moved = list[from];
    if (from < to) memmove(&list[from], &list[from + 1], (size_t)(to - from) * sizeof *list);
    else memmove(&list[to + 1], &list[to], (size_t)(from - to) * sizeof *list);
    list[to] = moved;
}

static int find(const item *list, int count, item wanted) {
    int i = 0;
    while (i < count && list[i] != wanted) i++;
    return i < count ? i : -1;
}

/* Up to `far` places earlier or later. */
static int shift(searcher *s, lists *l, int64_t stage, int at, int far) {
    int to = at + (int)(below(s, 2) ? 1 + below(s, far) : -1 - below(s, far));
    if (to < 0 || to >= l->count[stage]) return 0;
    move_item(list_of(s, l, stage), at, to);
    return is_sound(s, l, stage);
}

static int far_of(searcher *s) { return below(s, 3) ? 3 : below(s, 3) ? 12 : 60; }

/* A pass of the critical path. */
static int shift_critical(searcher *s, lists *l) {
    int at = s->critical[below(s, s->n_critical)];
    return shift(s, l, at / (3 * s->n), (int)(at % (3 * s->n)), far_of(s));
}

static int shift_any(searcher *s, lists *l) {
    int64_t stage = below(s, s->n_stages);
    return shift(s, l, stage, (int)below(s, l->count[stage]), far_of(s));
}

/* Moves one pass of a chunk on several neighbouring stages, by the same number of places on each. */
static int shift_column(searcher *s, lists *l) {
    int64_t from = below(s, s->n_stages), to = from + below(s, s->n_stages - from), stage;
    item pass = item_of(below(s, s->n), below(s, 2) ? CF_F : CF_B);
    int far = far_of(s), by = (int)(below(s, 2) ? 1 + below(s, far) : -1 - below(s, far));
    for (stage = from; stage <= to; stage++) {
        int at = find(list_of(s, l, stage), l->count[stage], pass);
        if (at + by < 0 || at + by >= l->count[stage]) return 0;
        move_item(list_of(s, l, stage), at, at + by);
        if (!is_sound(s, l, stage)) return 0;
    }
    return 1;
}

static int64_t unit_chunks(const searcher *s, int64_t chunk) {
    return s->chunks[chunk].chain < 0 ? 1 : s->plan->chains[s->chunks[chunk].chain].n_chunks;
}

/* Exchanges two units with equally many chunks, on all stages. */
static int trade(searcher *s, lists *l) {
    int64_t a = below(s, s->n), b = below(s, s->n), n, stage;
    int i;
    if (s->chunks[a].chain >= 0) a -= s->chunks[a].index;
    if (s->chunks[b].chain >= 0) b -= s->chunks[b].index;
    n = unit_chunks(s, a);
    if (a == b || n != unit_chunks(s, b)) return 0;
    for (stage = 0; stage < s->n_stages; stage++) {
        item *list = list_of(s, l, stage);
        for (i = 0; i < l->count[stage]; i++) {
            int64_t c = chunk_of(list[i]);
            if (c >= a && c < a + n) list[i] = item_of(c - a + b, pass_of(list[i]));
            else if (c >= b && c < b + n) list[i] = item_of(c - b + a, pass_of(list[i]));
        }
    }
    return 1;
}

/* Drops a chunk that a stage keeps, with its replay directly before its backward; or keeps a chunk that it drops. */
static int toggle(searcher *s, lists *l, int64_t stage, int64_t chunk) {
    item *list = list_of(s, l, stage);
    int at = find(list, l->count[stage], item_of(chunk, CF_R));
    if (at >= 0) {
        move_item(list, at, --l->count[stage]);
    } else {
        at = find(list, l->count[stage], item_of(chunk, CF_B));
        list[l->count[stage]] = item_of(chunk, CF_R);
        move_item(list, l->count[stage]++, at);
    }
    return is_sound(s, l, stage);
}

static int toggle_any(searcher *s, lists *l) {
    return toggle(s, l, below(s, s->n_stages), below(s, s->n));
}

/* Toggles a chunk of the critical path, on the stage of that path; its forward also moves. */
static int toggle_critical(searcher *s, lists *l) {
    int at = s->critical[below(s, s->n_critical)];
    int64_t stage = at / (3 * s->n), chunk = chunk_of(l->items[at]);
    int forward;
    if (!toggle(s, l, stage, chunk)) return 0;
    forward = find(list_of(s, l, stage), l->count[stage], item_of(chunk, CF_F));
    return below(s, 2) || shift(s, l, stage, forward, 12);
}

static void copy_lists(const searcher *s, lists *to, const lists *from) {
    int64_t i;
    memcpy(to->count, from->count, (size_t)s->n_stages * sizeof *to->count);
    for (i = 0; i < s->n_stages; i++)
        memcpy(list_of(s, to, i), list_of(s, from, i), (size_t)from->count[i] * sizeof(item));
}

static int change(searcher *s, lists *l) {
    switch (below(s, 16)) {
        case 0: case 1: case 2: case 3: case 4: case 5: return shift_critical(s, l);
        case 6: case 7: return shift_any(s, l);
        case 8: case 9: case 10: return shift_column(s, l);
        case 11: case 12: return trade(s, l);
        case 13: return toggle_any(s, l);
        default: return toggle_critical(s, l);
    }
}

/* ---- the search ---- */

/* Takes a step by late acceptance: a change stays if it is not longer than the current solution, or than the one
   HISTORY steps ago. */
static void take_step(searcher *s) {
    double *then = &s->history[s->step++ % HISTORY], makespan;
    copy_lists(s, &s->trial, &s->now);
    if (!change(s, &s->trial)) return;
    makespan = measure(s, &s->trial);
    if (makespan <= s->makespan || makespan <= *then) {
        lists was = s->now;
        s->now = s->trial;
        s->trial = was;
        s->makespan = makespan;
        trace(s, &s->now);
    }
    *then = s->makespan;
    if (!(s->makespan < s->best_makespan)) return;
    s->best_makespan = s->makespan;
    copy_lists(s, &s->best, &s->now);
}

static void start_from(searcher *s, const lists *from) {
    int i;
    copy_lists(s, &s->now, from);
    s->makespan = measure(s, &s->now);
    trace(s, &s->now);
    for (i = 0; i < HISTORY; i++) s->history[i] = s->makespan;
}

/* Searches in ten parts of the time. Each begins with the best so far, and its first steps may lose some. */
static void search_for(searcher *s, double seconds) {
    clock_t start = clock();
    double now = 0, last = 0;
    int i;
    while (now < seconds) {
        for (i = 0; i < CHECK_CLOCK; i++) take_step(s);
        now = (double)(clock() - start) / CLOCKS_PER_SEC;
        if (now - last < seconds / 10) continue;
        last = now;
        start_from(s, &s->best);
        for (i = 0; i < HISTORY; i++) s->history[i] = s->makespan * (1 + 0.02 * (double)below(s, 1000) / 1000);
    }
}

/* ---- memory ---- */

/* Returns the next piece of one block; without a block, only adds up sizes. */
static void *take(char *memory, size_t *used, int64_t count, size_t bytes) {
    char *piece = memory != NULL ? memory + *used : NULL;
    *used += ((size_t)count * bytes + 15) / 16 * 16;
    return piece;
}

static size_t lay_out(searcher *s, char *memory) {
    int64_t cells = s->n_stages * s->n, i;
    lists *all[3];
    size_t used = 0;
    all[0] = &s->now;
    all[1] = &s->trial;
    all[2] = &s->best;
    for (i = 0; i < 3; i++) {
        all[i]->items = (item *)take(memory, &used, 3 * cells, sizeof(item));
        all[i]->count = (int *)take(memory, &used, s->n_stages, sizeof(int));
    }
    for (i = 0; i < 2; i++) {
        s->arrived[i] = (double *)take(memory, &used, cells, sizeof(double));
        s->link[i] = (double *)take(memory, &used, s->n_stages, sizeof(double));
    }
    s->limits = (int64_t *)take(memory, &used, s->n_stages, sizeof(int64_t));
    s->seconds = (double *)take(memory, &used, 3 * cells, sizeof(double));
    s->transfer = (double *)take(memory, &used, s->n, sizeof(double));
    s->end = (double *)take(memory, &used, 3 * cells, sizeof(double));
    s->by_link = (unsigned char *)take(memory, &used, 3 * cells, 1);
    s->place = (int *)take(memory, &used, 3 * cells, sizeof(int));
    s->next = (int *)take(memory, &used, s->n_stages, sizeof(int));
    s->free_at = (double *)take(memory, &used, s->n_stages, sizeof(double));
    s->in_chain = (int64_t *)take(memory, &used, s->n, sizeof(int64_t));
    s->seen = (signed char *)take(memory, &used, s->n, 1);
    s->critical = (int *)take(memory, &used, 3 * cells, sizeof(int));
    return used;
}

static cf_pass_cost cost_of(const cf_schedule_desc *desc, int64_t stage, int pass) {
    static const cf_pass_cost token = {0, 1, 0};
    const cf_timing *timing = desc->timing;
    const cf_stage_cost *c = timing == NULL ? NULL : timing->stages != NULL ? &timing->stages[stage] : &timing->all;
    cf_pass_cost forward = c != NULL ? c->forward : token;
    cf_pass_cost cost = c == NULL ? forward : pass == CF_B ? c->backward : pass == CF_R ? c->replay : forward;
    int given = c != NULL && (cost.constant > 0 || cost.per_token > 0 || cost.per_pair > 0);
    if (given || pass == CF_F) return cost;
    cost = forward;
    if (pass == CF_B) {
        cost.constant *= 2;
        cost.per_token *= 2;
        cost.per_pair *= 2;
    }
    return cost;
}

static void fill_in(searcher *s, const cf_schedule *start, const cf_schedule_desc *desc) {
    int64_t stage, i;
    int pass;
    for (i = 0; i < s->n && desc->timing != NULL; i++)
        s->transfer[i] = desc->timing->latency + desc->timing->seconds_per_token * (double)s->chunks[i].rows;
    for (stage = 0; stage < s->n_stages; stage++) {
        int64_t limit = desc->limits.chunks_by_stage != NULL
                            ? desc->limits.chunks_by_stage[stage] : desc->limits.chunks;
        if (desc->limits.chunks_by_stage == NULL && limit == 0 && start->limits.chunks_by_stage != NULL)
            limit = start->limits.chunks_by_stage[stage];
        s->limits[stage] = limit > 0 ? limit : INT64_MAX;
        for (pass = CF_F; pass <= CF_B; pass++) {
            cf_pass_cost cost = cost_of(desc, stage, pass);
            for (i = 0; i < s->n; i++)
                s->seconds[stage * 3 * s->n + item_of(i, pass)] =
                    cf_cost_seconds(&cost, s->chunks[i].rows, s->chunks[i].pairs);
        }
        for (i = start->first[stage]; i < start->first[stage + 1]; i++)
            list_of(s, &s->best, stage)[s->best.count[stage]++] =
                item_of(start->actions[i].chunk - s->plan->chunks_per_rank * start->shape.rank, start->actions[i].pass);
    }
}

/* The best lists as a schedule. */
static cf_schedule *write_down(const searcher *s, const cf_schedule *start) {
    cf_schedule *out = (cf_schedule *)malloc(sizeof *out);
    int64_t *first = (int64_t *)malloc((size_t)(2 * s->n_stages + 1) * sizeof *first), *limits, stage, i, at = 0;
    cf_action *actions = (cf_action *)calloc((size_t)(3 * s->n_stages * s->n + 1), sizeof *actions);
    if (out != NULL) *out = *start;
    if (out == NULL || first == NULL || actions == NULL) {
        free(out);
        free(first);
        free(actions);
        return NULL;
    }
    memset(&out->block, 0, sizeof out->block);
    out->kind = CF_SCHEDULE_DEFAULT;
    out->first = first;
    out->actions = actions;
    limits = &first[s->n_stages + 1];
    out->limits.chunks_by_stage = limits;
    for (stage = 0; stage < s->n_stages; stage++) {
        const item *list = list_of(s, &s->best, stage);
        first[stage] = at;
        limits[stage] = s->limits[stage] < INT64_MAX ? s->limits[stage] : 0;
        for (i = 0; i < s->best.count[stage]; i++, at++) {
            int pass = pass_of(list[i]);
            int dropped = find(list, s->best.count[stage], item_of(chunk_of(list[i]), CF_R)) >= 0;
            actions[at].chunk = (int32_t)(chunk_of(list[i]) + s->plan->chunks_per_rank * start->shape.rank);
            actions[at].stage = (int32_t)stage;
            actions[at].pass = (uint8_t)pass;
            actions[at].keep = (uint8_t)(pass == CF_R || (pass == CF_F && !dropped));
        }
    }
    out->first[s->n_stages] = out->n_actions = at;
    return out;
}

cf_schedule *search_lists(const cf_plan *plan, const cf_schedule *start, const cf_schedule_desc *desc, double seconds,
                          uint64_t seed) {
    searcher s;
    cf_schedule *found;
    size_t bytes;
    void *memory;
    memset(&s, 0, sizeof s);
    s.plan = plan;
    s.chunks = &plan->chunks[start->shape.rank * plan->chunks_per_rank];
    s.n = plan->chunks_per_rank;
    s.n_stages = start->shape.n_stages;
    s.k = desc->shape.k > 0 ? desc->shape.k : 1;
    s.state = seed;
    bytes = lay_out(&s, NULL);
    memory = calloc(1, bytes);
    if (memory == NULL) return NULL;
    (void)lay_out(&s, (char *)memory);
    fill_in(&s, start, desc);
    start_from(&s, &s.best);
    s.best_makespan = s.makespan;
    search_for(&s, seconds);
    found = write_down(&s, start);
    free(memory);
    return found;
}

void search_lists_free(cf_schedule *schedule) {
    if (schedule == NULL) return;
    free(schedule->first);
    free(schedule->actions);
    free(schedule);
}
