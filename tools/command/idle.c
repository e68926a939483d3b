/* idle.c - finds the causes of idle time.

   For every pass it finds when the pass could have run: at the latest arrival of its inputs. It also finds when it
   could have run if memory, transfers or state did not matter. The minimum of these times over the rest of a stage's
   list gives the moment from which some later pass could have filled a gap. So each cause begins to hold at one moment
   of a gap, and a gap has at most a handful of pieces. */

#include "idle.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#define NEVER DBL_MAX

const char *idle_cause_name(idle_cause cause) {
#define IDLE_ITEM(name, text) text,
    static const char *const names[] = {IDLE_CAUSES(IDLE_ITEM)};
#undef IDLE_ITEM
    return (unsigned)cause < IDLE_CAUSE_COUNT ? names[cause] : "?";
}

/* The times at which a pass could have run. */
typedef struct moments {
    double ready;       /* with all its inputs, and a place among the K of its chain */
    double roomy;       /* if there were room for its activations; NEVER if it takes none */
    double instant;     /* if transfers took no time */
    double stateless;   /* if it did not need K and V of its chain, or their gradients */
} moments;

typedef struct finder {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const cf_timing *timing;
    cf_schedule_index *index; /* the passes that each pass waits for */
    int32_t *taker;          /* (n_actions) the pass on another virtual stage that takes a pass's result; -1: none */
    moments *own;            /* (n_actions) */
    moments *behind;         /* (n_actions) the earliest times over this pass and later ones on its stage */
    double *takers;          /* (n_actions) the earliest `ready` of those passes that take room */
    double *others;          /* (n_actions) the earliest `ready` of those passes that take no room */
    double mean[CF_COMPUTE_PASS_COUNT]; /* mean seconds of a pass of each kind */
    idle_report out;
    int64_t n_pieces;
} finder;

static double later(double a, double b) { return a > b ? a : b; }
static double sooner(double a, double b) { return a < b ? a : b; }

static const cf_action *action_of(const finder *f, int64_t id) { return &f->schedule->actions[id]; }
static const cf_chunk *chunk_of(const finder *f, int64_t id) { return &f->plan->chunks[action_of(f, id)->chunk]; }
static int is_pass(const finder *f, int64_t id) { return action_of(f, id)->pass < CF_COMPUTE_PASS_COUNT; }
static int takes_room(const finder *f, int64_t id) { return action_of(f, id)->pass <= CF_R && action_of(f, id)->keep; }

static int64_t physical(const finder *f, int64_t v) {
    return cf_placement_stage(f->schedule->shape.placement, f->schedule->shape.n_stages, v);
}

/* ----------------------------------------------------------------------------------------------------------------
   What a pass needs
   ---------------------------------------------------------------------------------------------------------------- */

/* The passes that a pass waits for, besides the previous one in its stage's list. All except `slot` are the same for
   any list; `slot` depends on this one. -1: none. */
typedef struct needs {
    int64_t from_stage; /* the neighbour's pass whose result it takes */
    int64_t state;      /* the pass of its chain on its own virtual stage */
    int64_t own;        /* the pass of its own chunk there */
    int64_t slot;       /* the pass that freed its place among the K of its chain */
} needs;

static needs needs_of(const finder *f, int64_t id) {
    cf_need found[CF_MAX_NEEDS];
    needs n = {-1, -1, -1, -1};
    int i, n_found = cf_schedule_needs(f->index, id, found);

    for (i = 0; i < n_found; i++)
        switch (found[i].why) {
        case CF_EDGE_ACTIVATION: case CF_EDGE_GRADIENT: n.from_stage = found[i].action; break;
        case CF_EDGE_STATE: case CF_EDGE_STATE_GRADIENT: n.state = found[i].action; break;
        case CF_EDGE_SLOT: n.slot = found[i].action; break;
        default: n.own = found[i].action;
        }
    return n;
}

static void note_takers(finder *f) {
    int64_t i;

    for (i = 0; i < f->schedule->n_actions; i++) f->taker[i] = -1;
    for (i = 0; i < f->schedule->n_actions; i++) {
        int64_t maker = is_pass(f, i) ? needs_of(f, i).from_stage : -1;
        if (maker >= 0) f->taker[maker] = (int32_t)i;
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   When results arrive
   ---------------------------------------------------------------------------------------------------------------- */

/* Computes when a pass's result arrives. A stage sends its results in the order in which it makes them, with a queue
   for each direction. */
static void note_arrival(finder *f, int64_t id, double free_at[2]) {
    const cf_action *a = action_of(f, id);
    int64_t to = f->taker[id] >= 0 ? action_of(f, f->taker[id])->stage : -1;
    int64_t row = a->stage / f->schedule->shape.n_stages;
    int turned = f->schedule->shape.placement == CF_PLACEMENT_V && row % 2 == 1, queue = (to < a->stage) != turned;
    double end = f->timeline->end[id], seconds;

    f->out.sent[id] = -1;
    f->out.arrived[id] = end;
    if (to < 0 || physical(f, to) == physical(f, a->stage) || !f->timing) return;
    seconds = f->timing->latency + f->timing->seconds_per_token * (double)chunk_of(f, id)->rows;
    f->out.sent[id] = later(end, free_at[queue]);
    f->out.arrived[id] = free_at[queue] = f->out.sent[id] + seconds;
}

static void note_arrivals(finder *f) {
    int64_t s, i;

    for (s = 0; s < f->schedule->shape.n_stages; s++) {
        double free_at[2] = {0, 0};
        for (i = f->schedule->first[s]; i < f->schedule->first[s + 1]; i++)
            if (is_pass(f, i)) note_arrival(f, i, free_at);
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   When passes could have run
   ---------------------------------------------------------------------------------------------------------------- */

static double time_of(const double *times, int64_t id) { return id >= 0 ? times[id] : 0; }

static void note_moments(finder *f, int64_t id) {
    needs n = needs_of(f, id);
    moments *m = &f->own[id];
    const double *end = f->timeline->end;
    double own = time_of(end, n.own), state = time_of(end, n.state), slot = time_of(end, n.slot);
    double made = time_of(end, n.from_stage), arrived = time_of(f->out.arrived, n.from_stage);

    m->ready = later(later(own, state), later(arrived, slot));
    m->roomy = takes_room(f, id) ? later(later(own, state), arrived) : NEVER;
    m->instant = later(later(own, state), later(made, slot));
    m->stateless = later(later(own, arrived), slot);
}

static void walk_forwards(finder *f, int64_t stage) {
    int64_t i;

    for (i = f->schedule->first[stage]; i < f->schedule->first[stage + 1]; i++)
        if (is_pass(f, i)) note_moments(f, i);
}

static void walk_backwards(finder *f, int64_t stage) {
    moments least = {NEVER, NEVER, NEVER, NEVER};
    double takers = NEVER, others = NEVER;
    int64_t i;

    for (i = f->schedule->first[stage + 1] - 1; i >= f->schedule->first[stage]; i--) {
        if (is_pass(f, i)) {
            const moments *m = &f->own[i];
            least.roomy = sooner(least.roomy, m->roomy);
            least.instant = sooner(least.instant, m->instant);
            least.stateless = sooner(least.stateless, m->stateless);
            if (takes_room(f, i)) takers = sooner(takers, m->ready);
            else others = sooner(others, m->ready);
        }
        f->behind[i] = least;
        f->takers[i] = takers;
        f->others[i] = others;
    }
}

static void note_means(finder *f) {
    int64_t i, n[CF_COMPUTE_PASS_COUNT] = {0};
    int pass;

    for (i = 0; i < f->schedule->n_actions; i++) {
        if (!is_pass(f, i)) continue;
        f->mean[action_of(f, i)->pass] += f->timeline->end[i] - f->timeline->start[i];
        n[action_of(f, i)->pass]++;
    }
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (n[pass] > 0) f->mean[pass] /= (double)n[pass];
}

/* ----------------------------------------------------------------------------------------------------------------
   The pieces of a gap
   ---------------------------------------------------------------------------------------------------------------- */

/* The time span in which a cause holds. */
typedef struct span {
    double from, to;
} span;

static void fill_spans(const finder *f, int64_t stage, int64_t id, span spans[IDLE_CAUSE_COUNT]) {
    const int64_t *limits = f->schedule->limits.chunks_by_stage;
    int64_t limit = limits ? limits[stage] : 0, last = f->schedule->first[stage + 1] - 1;
    int64_t maker = needs_of(f, id).from_stage;
    int pass = action_of(f, id)->pass;

    spans[IDLE_OVERHEAD].from = f->own[id].ready;
    if (id < last) {
        spans[IDLE_ORDER].from = f->others[id + 1];
        if (limit <= 0 || f->timeline->live[id] - takes_room(f, id) < limit)
            spans[IDLE_ORDER].from = sooner(spans[IDLE_ORDER].from, f->takers[id + 1]);
    }
    spans[IDLE_MEMORY].from = f->behind[id].roomy;
    spans[IDLE_TRANSFER].from = f->behind[id].instant;
    spans[IDLE_STATE].from = f->behind[id].stateless;
    if (maker >= 0) {
        spans[IDLE_IMBALANCE].from = f->timeline->start[maker] + f->mean[action_of(f, maker)->pass];
        spans[IDLE_IMBALANCE].to = f->timeline->end[maker];
    }
    spans[pass == CF_F || pass == CF_R ? IDLE_ACTIVATION : IDLE_GRADIENT].from = 0;
}

static void add_piece(finder *f, int64_t stage, double start, double end, int64_t before, idle_cause cause) {
    idle_piece *last = f->n_pieces > f->out.first[stage] ? &f->out.pieces[f->n_pieces - 1] : NULL;

    if (!(end > start)) return;
    if (last && last->cause == cause && last->before == before) {
        last->end = end;
        return;
    }
    last = &f->out.pieces[f->n_pieces++];
    last->start = start;
    last->end = end;
    last->before = before;
    last->cause = cause;
}

/* Returns the first cause that holds at a moment. *until: when that may change. */
static idle_cause cause_at(const span spans[IDLE_CAUSE_COUNT], double moment, double *until) {
    int cause, found = IDLE_CAUSE_COUNT - 1;

    for (cause = IDLE_CAUSE_COUNT - 1; cause >= 0; cause--) {
        if (spans[cause].from > moment) *until = sooner(*until, spans[cause].from);
        else if (spans[cause].to > moment) {
            *until = sooner(*until, spans[cause].to);
            found = cause;
        }
    }
    return (idle_cause)found;
}

static void split_gap(finder *f, int64_t stage, double start, double end, int64_t before) {
    span spans[IDLE_CAUSE_COUNT];
    int cause;

    for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) spans[cause].from = spans[cause].to = NEVER;
    fill_spans(f, stage, before, spans);
    while (start < end) {
        double until = end;
        idle_cause found = cause_at(spans, start, &until);
        add_piece(f, stage, start, until, before, found);
        start = until;
    }
}

static void find_pieces(finder *f, int64_t stage) {
    double free_at = 0;
    int64_t i;
    int begun = 0;

    for (i = f->schedule->first[stage]; i < f->schedule->first[stage + 1]; i++) {
        if (!is_pass(f, i)) continue;
        if (begun) split_gap(f, stage, free_at, f->timeline->start[i], i);
        else add_piece(f, stage, 0, f->timeline->start[i], i, IDLE_WARM_UP);
        begun = 1;
        free_at = later(free_at, f->timeline->end[i]);
    }
    add_piece(f, stage, free_at, f->timeline->makespan, -1, IDLE_DRAIN);
    f->out.first[stage + 1] = f->n_pieces;
    for (i = f->out.first[stage]; i < f->n_pieces; i++)
        f->out.stages[stage].seconds[f->out.pieces[i].cause] += f->out.pieces[i].end - f->out.pieces[i].start;
}

/* ----------------------------------------------------------------------------------------------------------------
   The critical path
   ---------------------------------------------------------------------------------------------------------------- */

static void bind(finder *f, int64_t id, int64_t to, const double *times, double *latest) {
    if (to < 0 || times[to] <= *latest) return;
    *latest = times[to];
    f->out.waited_for[id] = (int32_t)to;
}

static void note_waits(finder *f, int64_t stage) {
    int64_t i, before = -1;

    for (i = f->schedule->first[stage]; i < f->schedule->first[stage + 1]; i++) {
        double latest = -1;
        f->out.waited_for[i] = -1;
        if (!is_pass(f, i)) continue;
        bind(f, i, before, f->timeline->end, &latest);
        bind(f, i, needs_of(f, i).from_stage, f->out.arrived, &latest);
        before = i;
    }
}

static void note_path(finder *f) {
    int64_t i, last = -1, n = 0;

    for (i = 0; i < f->schedule->n_actions; i++)
        if (is_pass(f, i) && (last < 0 || f->timeline->end[i] > f->timeline->end[last])) last = i;
    for (i = last; i >= 0 && n < f->schedule->n_actions; i = f->out.waited_for[i]) n++;
    f->out.n_path = n;
    for (i = last; n > 0; i = f->out.waited_for[i]) f->out.path[--n] = (int32_t)i;
}

/* ----------------------------------------------------------------------------------------------------------------
   Memory
   ---------------------------------------------------------------------------------------------------------------- */

static void *take(char *memory, size_t *used, int64_t n, size_t size) {
    void *at = memory ? memory + *used : NULL;
    *used += ((size_t)n * size + 15) & ~(size_t)15;
    return at;
}

/* Maximum pieces of a gap: every cause except the first two begins once, and one of them ends. */
enum { MOST_PIECES = IDLE_CAUSE_COUNT };

static size_t lay_out(finder *f, char *memory) {
    const cf_schedule *s = f->schedule;
    size_t used = 0;

    f->out.first = (int64_t *)take(memory, &used, s->shape.n_stages + 1, sizeof *f->out.first);
    f->out.stages = (idle_stage *)take(memory, &used, s->shape.n_stages, sizeof *f->out.stages);
    f->out.pieces =
        (idle_piece *)take(memory, &used, MOST_PIECES * s->n_actions + s->shape.n_stages, sizeof *f->out.pieces);
    f->out.sent = (double *)take(memory, &used, s->n_actions, sizeof(double));
    f->out.arrived = (double *)take(memory, &used, s->n_actions, sizeof(double));
    f->out.waited_for = (int32_t *)take(memory, &used, s->n_actions, sizeof(int32_t));
    f->out.path = (int32_t *)take(memory, &used, s->n_actions, sizeof(int32_t));
    f->taker = (int32_t *)take(memory, &used, s->n_actions, sizeof(int32_t));
    f->own = (moments *)take(memory, &used, s->n_actions, sizeof *f->own);
    f->behind = (moments *)take(memory, &used, s->n_actions, sizeof *f->behind);
    f->takers = (double *)take(memory, &used, s->n_actions, sizeof(double));
    f->others = (double *)take(memory, &used, s->n_actions, sizeof(double));
    return used;
}

static void fill(finder *f) {
    int64_t s;

    note_takers(f);
    note_means(f);
    note_arrivals(f);
    for (s = 0; s < f->schedule->shape.n_stages; s++) {
        walk_forwards(f, s);
        walk_backwards(f, s);
        find_pieces(f, s);
        note_waits(f, s);
    }
    note_path(f);
}

cf_result idle_make(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline,
                    const cf_timing *timing, idle_report *out, cf_error *error) {
    cf_result result;
    finder f;

    memset(&f, 0, sizeof f);
    f.plan = plan;
    f.schedule = schedule;
    f.timeline = timeline;
    f.timing = timing;
    f.out.n_actions = schedule->n_actions;
    f.out.n_stages = schedule->shape.n_stages;
    result = cf_schedule_index_make(plan, schedule, NULL, &f.index, error);
    if (result != CF_OK) return result;
    f.out.memory = calloc(1, lay_out(&f, NULL) + 16);
    if (f.out.memory) {
        (void)lay_out(&f, (char *)f.out.memory);
        fill(&f);
    }
    cf_schedule_index_free(f.index);
    if (!f.out.memory) return cf_refuse(error, CF_ERROR_MEMORY, "memory", -1, "out of memory");
    *out = f.out;
    return CF_OK;
}

void idle_free(idle_report *report) {
    free(report->memory);
    memset(report, 0, sizeof *report);
}
