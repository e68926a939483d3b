/* Plans, schedules and timelines that nobody has validated. A sound one is made, copied into blocks of just its
   size, and damaged; then every public function gets it that says it stands such objects. Counts may come to say less
   than there is, never more: how long an array is, nothing but the count can say. */

#include "fuzz.h"

#include "../reference/naive.h"
#include "../reference/oracle.h"

#include <stdlib.h>
#include <string.h>

typedef struct hostile {
    fuzz_input in;
    fuzz_batch batch;
    cf_plan plan;         /* its arrays, like those below, are blocks of their own */
    cf_schedule schedule;
    int plan_is_sound, only_actions; /* 1: at most the actions of the schedule are damaged */
} hostile;

/* n items, where n is not below 0; one block more than nothing, so that NULL means that there is no memory. */
static void *copy_of(const void *array, int64_t n, size_t size) {
    size_t bytes = (size_t)n * size;
    void *copy = malloc(bytes > 0 ? bytes : 1);
    if (copy == NULL) abort();
    if (bytes > 0) memcpy(copy, array, bytes);
    return copy;
}

/* ---- making ---- */

static void copy_plan(hostile *h, const cf_plan *plan) {
    h->plan = *plan;
    h->plan.chunks = (cf_chunk *)copy_of(plan->chunks, plan->n_chunks, sizeof *plan->chunks);
    h->plan.slices = (cf_slice *)copy_of(plan->slices, plan->n_slices, sizeof *plan->slices);
    h->plan.chains = (cf_chain *)copy_of(plan->chains, plan->n_chains, sizeof *plan->chains);
}

static void copy_schedule(hostile *h, const cf_schedule *s) {
    h->schedule = *s;
    h->schedule.first = (int64_t *)copy_of(s->first, s->shape.n_stages + 1, sizeof *s->first);
    h->schedule.actions = (cf_action *)copy_of(s->actions, s->n_actions, sizeof *s->actions);
    h->schedule.limits.chunks_by_stage =
        s->limits.chunks_by_stage
            ? (int64_t *)copy_of(s->limits.chunks_by_stage, s->shape.n_stages, sizeof *s->limits.chunks_by_stage)
            : NULL;
}

static void forget(hostile *h) {
    free(h->plan.chunks);
    free(h->plan.slices);
    free(h->plan.chains);
    free(h->schedule.first);
    free(h->schedule.actions);
    free((void *)h->schedule.limits.chunks_by_stage);
}

/* Chunks of as many tokens as it takes for there to be few: what is damaged is found as well in a small object, and a
   hundred times as soon. */
static void widen_chunks(fuzz_batch *batch) {
    int64_t tokens = 0, i;
    for (i = 0; i < batch->n; i++) tokens += batch->lengths[i];
    while (tokens > 12 * batch->pack.chunk_size) batch->pack.chunk_size *= 2;
    if (batch->pack.align > 0) batch->pack.chunk_size *= batch->pack.align;
}

/* Makes a schedule; with cp groups it is made from columns. */
static cf_schedule *make_schedule(const cf_plan *plan, const cf_schedule_desc *order, int64_t cp) {
    cf_plan *columns = NULL;
    cf_schedule *schedule = NULL, *list = NULL;
    cf_schedule_desc lockstep = *order;
    if (cp <= 1) {
        if (cf_schedule_make(plan, order, &schedule, NULL) != CF_OK) abort();
        return schedule;
    }
    lockstep.shape.rank = 0;
    if (cf_lockstep_plan(plan, NULL, NULL, &columns, NULL) != CF_OK ||
        cf_schedule_make(columns, &lockstep, &list, NULL) != CF_OK ||
        cf_lockstep_schedule(plan, list, order->shape.rank, NULL, &schedule, NULL) != CF_OK)
        abort();
    cf_schedule_free(list);
    cf_plan_free(columns);
    return schedule;
}

/* Everything sound and small. */
static void make(hostile *h) {
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL, *lowered = NULL;
    cf_schedule_desc order = {0};
    fuzz_draw_batch(&h->in, &h->batch, 6, 0);
    widen_chunks(&h->batch);
    if (cf_pack(h->batch.lengths, h->batch.n, &h->batch.pack, &plan, NULL) != CF_OK) abort();
    order.kind = (cf_schedule_kind)fuzz_between(&h->in, CF_SCHEDULE_PAPER, CF_SCHEDULE_ZERO_BUBBLE);
    order.shape.replay = (cf_replay)fuzz_between(&h->in, 0, CF_REPLAY_LOCAL);
    if (order.kind != CF_SCHEDULE_PAPER && order.shape.replay == CF_REPLAY_PIPELINE)
        order.shape.replay = CF_REPLAY_LOCAL;
    order.shape.n_stages = fuzz_between(&h->in, 1, 3);
    if (order.kind >= CF_SCHEDULE_INTERLEAVED) order.shape.n_virtual = fuzz_between(&h->in, 1, 2);
    if (order.kind == CF_SCHEDULE_ZERO_BUBBLE)
        order.shape.placement = (cf_placement)fuzz_between(&h->in, 0, CF_PLACEMENT_V);
    if (order.shape.n_virtual < 2) order.shape.placement = CF_PLACEMENT_DEFAULT; /* one row does not turn */
    order.shape.k = fuzz_between(&h->in, 1, 3);
    order.shape.rank = fuzz_between(&h->in, 0, plan->n_ranks - 1);
    schedule = make_schedule(plan, &order, h->batch.pack.max_cp);
    if (h->batch.pack.max_cp <= 1 && fuzz_chance(&h->in, 2) &&
        cf_schedule_lower(plan, schedule, NULL, &lowered, NULL) != CF_OK)
        abort();
    copy_plan(h, plan);
    copy_schedule(h, lowered ? lowered : schedule);
    cf_plan_free(plan);
    cf_schedule_free(schedule);
    cf_schedule_free(lowered);
}

/* ---- damaging ---- */

static int64_t damaged(hostile *h, int64_t value) {
    if (fuzz_chance(&h->in, 2)) return fuzz_number(&h->in);
    return (int64_t)((uint64_t)value + (uint64_t)fuzz_between(&h->in, -2, 2));
}

static int32_t damaged_32(hostile *h, int32_t value) { return (int32_t)(uint32_t)damaged(h, value); }

/* One that says how long an array is. */
static int64_t damaged_count(hostile *h, int64_t count) {
    int64_t value = damaged(h, count);
    return value > count ? count : value;
}

static void damage_plan(hostile *h) {
    cf_plan *p = &h->plan;
    int64_t *members[] = {&p->chunk_size, &p->align, &p->max_slices, &p->n_sequences, &p->n_empty, &p->n_tokens,
                          &p->n_ranks, &p->chunks_per_rank, &p->n_idle, &p->lower_bound};
    int64_t *counts[] = {&p->n_chunks, &p->n_chains, &p->n_slices};
    int64_t which = fuzz_between(&h->in, 0, 20), i;
    oracle_number number;
    h->plan_is_sound = h->only_actions = 0;
    if (which < 10) {
        *members[which] = damaged(h, *members[which]);
    } else if (which < 13) {
        *counts[which - 10] = damaged_count(h, *counts[which - 10]);
    } else if (which < 15) { /* the validator also takes 0, for what nobody has named; the oracle does not */
        int32_t value = damaged_32(h, CF_PACK_NEXT_FIT);
        if (value != 0 && which == 13) p->method = (cf_pack_method)value;
        if (value != 0 && which == 14) p->split = (cf_split_method)value;
    } else if (which < 18 && p->n_chunks > 0) { /* all members of chunks and chains are int64_t */
        i = fuzz_between(&h->in, 0, p->n_chunks * (int64_t)(sizeof *p->chunks / sizeof(int64_t)) - 1);
        ((int64_t *)p->chunks)[i] = damaged(h, ((int64_t *)p->chunks)[i]);
    } else if (which < 20 && p->n_slices > 0) {
        i = fuzz_between(&h->in, 0, p->n_slices * ORACLE_SLICE_NUMBERS - 1);
        number = oracle_slice_number(&p->slices[i / ORACLE_SLICE_NUMBERS], i % ORACLE_SLICE_NUMBERS);
        oracle_write(number, damaged(h, oracle_read(number)));
    } else if (which == 20 && p->n_chains > 0) {
        i = fuzz_between(&h->in, 0, p->n_chains * (int64_t)(sizeof *p->chains / sizeof(int64_t)) - 1);
        ((int64_t *)p->chains)[i] = damaged(h, ((int64_t *)p->chains)[i]);
    }
}

static void damage_action(hostile *h) {
    cf_schedule *s = &h->schedule;
    cf_action *a, *b, swap;
    if (s->n_actions <= 0) return;
    a = &s->actions[fuzz_between(&h->in, 0, s->n_actions - 1)];
    b = &s->actions[fuzz_between(&h->in, 0, s->n_actions - 1)];
    swap = *a;
    switch (fuzz_between(&h->in, 0, 5)) {
    case 0: a->chunk = damaged_32(h, a->chunk); break;
    case 1: a->stage = damaged_32(h, a->stage); break;
    case 2: a->pass = (uint8_t)damaged(h, a->pass); break;
    case 3: a->keep = (uint8_t)damaged(h, a->keep); break;
    case 4: *a = *b; break;
    default:
        *a = *b;
        *b = swap;
    }
}

static void damage_schedule(hostile *h) {
    cf_schedule *s = &h->schedule;
    int64_t *members[] = {&s->shape.n_virtual, &s->shape.k, &s->shape.rank, &s->n_chunks};
    int64_t which = fuzz_between(&h->in, 0, 10);
    h->only_actions = 0;
    if (which < 4) *members[which] = damaged(h, *members[which]);
    else if (which == 4) s->shape.n_stages = damaged_count(h, s->shape.n_stages);
    else if (which == 5) s->n_actions = damaged_count(h, s->n_actions);
    else if (which == 6) s->kind = (cf_schedule_kind)damaged_32(h, (int32_t)s->kind);
    else if (which == 7) s->shape.replay = (cf_replay)damaged_32(h, (int32_t)s->shape.replay);
    else if (which == 8) s->shape.placement = (cf_placement)damaged_32(h, (int32_t)s->shape.placement);
    else if (which == 9) s->lowered = damaged_32(h, s->lowered);
    else if (s->shape.n_stages > 0) {
        int64_t i = fuzz_between(&h->in, 0, s->shape.n_stages);
        s->first[i] = damaged(h, s->first[i]);
        if (s->limits.chunks_by_stage && i < s->shape.n_stages) {
            int64_t *limit = (int64_t *)&s->limits.chunks_by_stage[i];
            *limit = damaged(h, *limit);
        }
    }
}

/* ---- what must stand it ---- */

static int plan_stands(hostile *h) {
    cf_error error = fuzz_error();
    int64_t n = h->batch.n;
    int sound = fuzz_result(cf_plan_validate(&h->plan, h->batch.lengths, n, NULL, &error), &error);
    const char *fault = oracle_plan_fault(&h->plan, h->batch.lengths, n);
    FUZZ_CHECK(sound == (fault == NULL), "cf_plan_validate: %s; the oracle: %s", sound ? "sound" : error.text,
               fault ? fault : "sound");
    return sound;
}

/* Steps of any schedule name slots and states that are there. */
static void steps_stand(const cf_steps *steps) {
    int64_t i;
    for (i = 0; i < steps->n; i++) {
        const cf_step *step = &steps->steps[i];
        FUZZ_CHECK(step->slot < steps->n_slots && step->state < steps->n_states && step->path < steps->n_paths &&
                       step->input < steps->n_boundaries && step->output < steps->n_boundaries,
                   "step %lld uses what is not there", (long long)i);
    }
    for (i = 0; i < steps->n_paths; i++) {
        const cf_path *path = &steps->paths[i];
        FUZZ_CHECK(path->up < i && path->state < steps->n_states && path->first <= path->last && path->last < steps->n,
                   "state %lld is out of order", (long long)i);
    }
}

/* The same steps in memory of our own. */
static cf_result steps_by_hand(const hostile *h, int64_t stage, const cf_steps *wanted) {
    cf_steps *steps = NULL;
    cf_result result = CF_ERROR_MEMORY;
    size_t bytes = 0;
    void *memory;
    if (cf_steps_size(&h->plan, &h->schedule, stage, &bytes, NULL) != CF_OK) return result;
    memory = malloc(bytes);
    if (memory != NULL) result = cf_steps_into(&h->plan, &h->schedule, stage, 7, memory, bytes, &steps, NULL);
    if (result == CF_OK && wanted != NULL)
        FUZZ_CHECK(steps->n == wanted->n &&
                       memcmp(steps->steps, wanted->steps, (size_t)wanted->n * sizeof *wanted->steps) == 0,
                   "other steps in memory of our own");
    free(memory);
    return result;
}

/* There is an index of a sound schedule alone, and what an action waits for is there. */
static void index_stands(const hostile *h, int sound) {
    cf_schedule_index *index = NULL;
    cf_error error = fuzz_error();
    int64_t i;
    int n, made = fuzz_result(cf_schedule_index_make(&h->plan, &h->schedule, NULL, &index, &error), &error);
    FUZZ_CHECK(made == sound, "an index, or none: %s", error.text);
    for (i = 0; made && i < h->schedule.n_actions; i++) {
        cf_need needs[CF_MAX_NEEDS];
        for (n = cf_schedule_needs(index, i, needs); n > 0; n--)
            FUZZ_CHECK(needs[n - 1].action >= 0 && needs[n - 1].action < h->schedule.n_actions &&
                           needs[n - 1].action != i,
                       "action %lld waits for action %lld", (long long)i, (long long)needs[n - 1].action);
    }
    cf_schedule_index_free(index);
}

static void run_stands(const hostile *h, int sound) {
    cf_capacity needed = {0};
    cf_error refused = fuzz_error();
    int64_t stage;
    (void)fuzz_result(cf_steps_capacity(&h->plan, NULL, &needed, &refused), &refused);
    for (stage = -1; stage <= (h->schedule.shape.n_stages < 4 ? h->schedule.shape.n_stages : 4); stage++) {
        int there = stage >= 0 && stage < h->schedule.shape.n_stages;
        cf_memory_load loads[1024];
        cf_capacity capacity = {0};
        cf_steps *steps = NULL;
        cf_error error = fuzz_error();
        int made = fuzz_result(cf_steps_make(&h->plan, &h->schedule, stage, 7, NULL, &steps, &error), &error);
        FUZZ_CHECK(made == (sound && there) || (made && there), "cf_steps_make of a sound schedule: %s", error.text);
        FUZZ_CHECK(made == (steps_by_hand(h, stage, steps) == CF_OK), "in memory of our own it ends otherwise: %s",
                   error.text);
        if (made) steps_stand(steps);
        error = fuzz_error();
        if (made) (void)fuzz_result(cf_steps_capacity(&h->plan, steps, &capacity, &error), &error);
        cf_steps_free(steps);
        error = fuzz_error();
        (void)fuzz_result(cf_schedule_loads(&h->plan, &h->schedule, stage, loads, 1024, &error), &error);
    }
}

static void times_stand(hostile *h, int sound) {
    cf_simulate_desc desc = {0};
    cf_timeline *timeline = NULL;
    cf_error error = fuzz_error();
    int64_t n = h->schedule.n_actions > 0 ? h->schedule.n_actions : 0, i;
    double *times = (double *)calloc((size_t)(2 * n + 1), sizeof *times);
    fuzz_text text = {NULL, 0, 0};
    if (times == NULL) abort();
    if (fuzz_result(cf_simulate(&h->plan, &h->schedule, NULL, &timeline, &error), &error)) {
        FUZZ_CHECK(cf_write_schedule_json(&h->schedule, timeline, fuzz_write, &text, NULL) == CF_OK, "not written");
        cf_timeline_free(timeline);
        fuzz_text_free(&text);
    } else if (sound) { /* an empty schedule may claim more virtual stages than a simulation takes */
        FUZZ_CHECK(
            error.code == CF_ERROR_LIMIT && h->schedule.shape.n_stages * h->schedule.shape.n_virtual > CF_MAX_STAGES,
            "cf_simulate of a sound schedule: %s", error.text);
    }
    for (i = 0; i < 2 * n; i++) times[i] = fuzz_real(&h->in);
    error = fuzz_error();
    desc.start = times;
    desc.end = times + n;
    if (fuzz_result(cf_simulate(&h->plan, &h->schedule, &desc, &timeline, &error), &error)) cf_timeline_free(timeline);
    free(times);
}

/* The schedule as that of columns, and as that of every rank. */
static void ranks_stand(hostile *h) {
    const cf_schedule *schedules[8];
    cf_validate_desc desc = {0};
    cf_schedule *own = NULL;
    cf_error error = fuzz_error();
    int64_t i;
    if (fuzz_result(cf_lockstep_schedule(&h->plan, &h->schedule, fuzz_between(&h->in, -1, 3), NULL, &own, &error),
                    &error))
        cf_schedule_free(own);
    for (i = 0; i < 8; i++) schedules[i] = i == 7 && fuzz_between(&h->in, 0, 1) ? NULL : &h->schedule;
    if (h->plan.n_ranks > 8) return; /* that is how many schedules are read */
    error = fuzz_error();
    (void)fuzz_result(cf_lockstep_validate(&h->plan, schedules, &desc, NULL, &error), &error);
}

static void schedule_stands(hostile *h) {
    cf_schedule *lowered = NULL;
    cf_graph *graph = NULL;
    cf_error error = fuzz_error();
    int sound = fuzz_result(cf_schedule_validate(&h->plan, &h->schedule, NULL, NULL, &error), &error);
    if (h->only_actions && h->schedule.n_actions <= 80) { /* the tests' judge is cubic */
        const char *fault = naive_fault(&h->plan, &h->schedule);
        FUZZ_CHECK(sound == (fault == NULL), "cf_schedule_validate: %s; the tests' judge: %s",
                   sound ? "sound" : error.text, fault ? fault : "sound");
    }
    times_stand(h, sound);
    index_stands(h, sound);
    run_stands(h, sound);
    ranks_stand(h);
    error = fuzz_error();
    if (fuzz_result(cf_schedule_lower(&h->plan, &h->schedule, NULL, &lowered, &error), &error))
        cf_schedule_free(lowered);
    else
        FUZZ_CHECK(!sound || h->schedule.lowered || h->schedule.lockstep, "a sound schedule is not lowered: %s",
                   error.text);
    error = fuzz_error();
    if (fuzz_result(cf_graph_make(&h->plan, &h->schedule, NULL, NULL, &graph, &error), &error)) cf_graph_free(graph);
}

static void run_hostile(const uint8_t *data, size_t size) {
    hostile h = {0};
    int64_t n;
    h.in = fuzz_input_of(data, size);
    h.plan_is_sound = h.only_actions = 1;
    make(&h);
    for (n = fuzz_between(&h.in, 1, 3); n > 0; n--) {
        switch (fuzz_between(&h.in, 0, 6)) {
        case 0: case 1: case 3: damage_plan(&h); break;
        case 2: damage_schedule(&h); break;
        default: damage_action(&h);
        }
    }
    (void)plan_stands(&h);
    schedule_stands(&h);
    forget(&h);
}

const fuzz_target fuzz_hostile = {"hostile", run_hostile, 3000};
