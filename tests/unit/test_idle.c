/* Tests tools/command/idle.h. The causes partition the idle time of every stage, each moment has its cause by the
   header's definitions, and the critical path goes from the start to the end. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/problem.h"
#include "tools/command/idle.h"
#include "tools/command/schedule_csv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the causes again, from the definitions in idle.h, by looking at every pass for every moment ---- */

typedef struct book {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    const cf_timing *timing;
} book;

static const cf_action *at(const book *b, int64_t id) { return &b->schedule->actions[id]; }

static int64_t stage_of(const book *b, int64_t v) {
    int64_t row = v / b->schedule->shape.n_stages, column = v % b->schedule->shape.n_stages;
    if (b->schedule->shape.placement == CF_PLACEMENT_V && row % 2 == 1) return b->schedule->shape.n_stages - 1 - column;
    return column;
}

static int64_t look_for(const book *b, int pass, int64_t chunk, int64_t v) {
    int64_t i;
    for (i = 0; i < b->schedule->n_actions; i++)
        if (at(b, i)->pass == pass && at(b, i)->chunk == chunk && at(b, i)->stage == v) return i;
    return -1;
}

static int64_t backward_of(const book *b, int64_t chunk, int64_t v) {
    int64_t found = look_for(b, CF_B, chunk, v);
    return found >= 0 ? found : look_for(b, CF_I, chunk, v);
}

/* Returns whether a pass sends its result to another stage. */
static int goes(const book *b, int64_t id) {
    const cf_action *a = at(b, id);
    int64_t to = a->pass >= CF_B ? a->stage - 1 : a->stage + 1;
    if (a->pass == CF_W || (a->pass == CF_R && b->schedule->shape.replay == CF_REPLAY_LOCAL)) return 0;
    if (to < 0 || to >= b->schedule->shape.n_stages * b->schedule->shape.n_virtual) return 0;
    return stage_of(b, to) != stage_of(b, a->stage) && (a->pass != CF_R || look_for(b, CF_R, a->chunk, to) >= 0);
}

/* Returns when the queues of a stage have delivered the result of `id`. If sent is not NULL, *sent gets the time at
   which sending began. */
static double arrival_of(const book *b, int64_t id, double *sent) {
    int64_t s = stage_of(b, at(b, id)->stage), i;
    double free_at[2] = {0, 0}, begin = goes(b, id) && b->timing ? b->timeline->end[id] : -1;
    double arrived = b->timeline->end[id];
    for (i = b->schedule->first[s]; begin >= 0 && i <= id; i++) {
        const cf_action *a = at(b, i);
        int turned = b->schedule->shape.placement == CF_PLACEMENT_V && a->stage / b->schedule->shape.n_stages % 2;
        int way = (a->pass < CF_B) != turned;
        double seconds = b->timing->latency + b->timing->seconds_per_token * (double)b->plan->chunks[a->chunk].rows;
        if (!goes(b, i)) continue;
        begin = fmax(free_at[way], b->timeline->end[i]);
        arrived = free_at[way] = begin + seconds;
    }
    if (sent) *sent = begin;
    return arrived;
}

/* Counts the chunks kept on a stage just before an action: all of them, or those of one chain on one virtual stage. */
static int64_t kept_before(const book *b, int64_t stage, int64_t id, int64_t chain, int64_t v) {
    int64_t i, n = 0;
    for (i = b->schedule->first[stage]; i < id; i++) {
        const cf_action *a = at(b, i);
        if (chain >= 0 && (b->plan->chunks[a->chunk].chain != chain || a->stage != v)) continue;
        n += (a->pass <= CF_R && a->keep) - (a->pass == CF_B || a->pass == CF_W);
    }
    return n;
}

/* Returns when the place that a replay takes was given back; 0 if other places were free. Places are taken in the order
   in which they were given back. */
static double place_of_replay(const book *b, int64_t stage, int64_t id) {
    const cf_action *a = at(b, id);
    int64_t chain = b->plan->chunks[a->chunk].chain, i, back = kept_before(b, stage, id, chain, a->stage);
    if (a->pass != CF_R || chain < 0) return 0;
    for (i = id - 1; i >= b->schedule->first[stage]; i--)
        if (b->plan->chunks[at(b, i)->chunk].chain == chain && at(b, i)->stage == a->stage &&
            (at(b, i)->pass == CF_B || at(b, i)->pass == CF_W) && ++back == b->schedule->shape.k)
            return b->timeline->end[i];
    return 0;
}

enum { WITH_ALL, WITHOUT_ROOM, WITHOUT_TRANSFERS, WITHOUT_STATE };

static double raise(const book *b, double so_far, int64_t id) {
    return id >= 0 ? fmax(so_far, b->timeline->end[id]) : so_far;
}

static double could_run(const book *b, int64_t stage, int64_t id, int how) {
    const cf_action *a = at(b, id);
    const cf_chunk *chunk = &b->plan->chunks[a->chunk];
    int64_t maker = -1, state = -1, n_chunks = chunk->chain >= 0 ? b->plan->chains[chunk->chain].n_chunks : 1;
    double when = how == WITHOUT_ROOM ? 0 : place_of_replay(b, stage, id);
    if (a->pass == CF_F) {
        maker = look_for(b, CF_F, a->chunk, a->stage - 1);
        if (chunk->chain >= 0 && chunk->index > 0) state = look_for(b, CF_F, a->chunk - 1, a->stage);
    } else if (a->pass == CF_R) {
        if (b->schedule->shape.replay == CF_REPLAY_PIPELINE) maker = look_for(b, CF_R, a->chunk, a->stage - 1);
        when = raise(b, when, look_for(b, CF_F, a->chunk, a->stage));
    } else if (a->pass == CF_W) {
        when = raise(b, when, look_for(b, CF_I, a->chunk, a->stage));
    } else {
        maker = backward_of(b, a->chunk, a->stage + 1);
        if (chunk->chain >= 0 && chunk->index + 1 < n_chunks) state = backward_of(b, a->chunk + 1, a->stage);
        when = raise(b, when, look_for(b, CF_F, a->chunk, a->stage));
        when = raise(b, when, look_for(b, CF_R, a->chunk, a->stage));
    }
    if (how != WITHOUT_STATE) when = raise(b, when, state);
    if (maker >= 0) when = fmax(when, how == WITHOUT_TRANSFERS ? b->timeline->end[maker] : arrival_of(b, maker, NULL));
    return when;
}

static int takes_room(const book *b, int64_t id) { return at(b, id)->pass <= CF_R && at(b, id)->keep; }

static double mean_of(const book *b, int pass) {
    double sum = 0;
    int64_t i, n = 0;
    for (i = 0; i < b->schedule->n_actions; i++)
        if (at(b, i)->pass == pass) sum += b->timeline->end[i] - b->timeline->start[i], n++;
    return sum / (double)n;
}

/* Returns whether any pass from `from` on could run at that moment, in the given sense. */
static int some_could(const book *b, int64_t stage, int64_t from, double moment, int how, int only_takers) {
    int64_t i;
    for (i = from; i < b->schedule->first[stage + 1]; i++)
        if ((!only_takers || takes_room(b, i)) && could_run(b, stage, i, how) <= moment) return 1;
    return 0;
}

static int order_is_to_blame(const book *b, int64_t stage, int64_t next, double moment) {
    int64_t limit = b->schedule->limits.chunks_by_stage ? b->schedule->limits.chunks_by_stage[stage] : 0, i;
    int full = limit > 0 && kept_before(b, stage, next, -1, 0) >= limit;
    for (i = next + 1; i < b->schedule->first[stage + 1]; i++)
        if (!(full && takes_room(b, i)) && could_run(b, stage, i, WITH_ALL) <= moment) return 1;
    return 0;
}

static int is_uneven(const book *b, int64_t next, double moment) {
    const cf_action *a = at(b, next);
    int64_t maker = -1;
    if (a->pass == CF_F || (a->pass == CF_R && b->schedule->shape.replay == CF_REPLAY_PIPELINE))
        maker = look_for(b, a->pass, a->chunk, a->stage - 1);
    if (a->pass == CF_B || a->pass == CF_I) maker = backward_of(b, a->chunk, a->stage + 1);
    if (maker < 0 || b->timeline->end[maker] <= moment) return 0;
    return b->timeline->start[maker] + mean_of(b, at(b, maker)->pass) <= moment;
}

static idle_cause cause_of(const book *b, int64_t stage, double moment) {
    int64_t first = b->schedule->first[stage], end = b->schedule->first[stage + 1], next = first;
    while (next < end && b->timeline->start[next] < moment) next++;
    if (next == first) return IDLE_WARM_UP;
    if (next == end) return IDLE_DRAIN;
    if (could_run(b, stage, next, WITH_ALL) <= moment) return IDLE_OVERHEAD;
    if (order_is_to_blame(b, stage, next, moment)) return IDLE_ORDER;
    if (some_could(b, stage, next, moment, WITHOUT_ROOM, 1)) return IDLE_MEMORY;
    if (some_could(b, stage, next, moment, WITHOUT_TRANSFERS, 0)) return IDLE_TRANSFER;
    if (some_could(b, stage, next, moment, WITHOUT_STATE, 0)) return IDLE_STATE;
    if (is_uneven(b, next, moment)) return IDLE_IMBALANCE;
    return at(b, next)->pass <= CF_R ? IDLE_ACTIVATION : IDLE_GRADIENT;
}

/* ---- the properties of every report ---- */

static double busy_of(const book *b, int64_t stage) {
    double busy = 0;
    int64_t i;
    for (i = b->schedule->first[stage]; i < b->schedule->first[stage + 1]; i++)
        busy += b->timeline->end[i] - b->timeline->start[i];
    return busy;
}

/* Checks the idle time by intervals and by causes. No interval overlaps a pass or another interval. */
static void check_sums(const book *b, const idle_report *r, int64_t stage) {
    double by_piece = 0, by_cause = 0, idle = b->timeline->makespan - busy_of(b, stage), at_most = 0;
    int64_t i, j = b->schedule->first[stage];
    int cause;
    for (i = r->first[stage]; i < r->first[stage + 1]; i++) {
        const idle_piece *p = &r->pieces[i];
        by_piece += p->end - p->start;
        CHECK(p->end > p->start && p->start >= at_most && p->end <= b->timeline->makespan);
        at_most = p->end;
        while (j < b->schedule->first[stage + 1] && b->timeline->end[j] <= p->start) j++;
        CHECK(j == b->schedule->first[stage + 1] || b->timeline->start[j] >= p->end);
    }
    for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) by_cause += r->stages[stage].seconds[cause];
    CHECK(fabs(by_piece - idle) <= 1e-9 * b->timeline->makespan);
    CHECK(fabs(by_cause - idle) <= 1e-9 * b->timeline->makespan);
}

static void check_causes(const book *b, const idle_report *r, int64_t stage, int64_t seen[IDLE_CAUSE_COUNT]) {
    int64_t i;
    for (i = r->first[stage]; i < r->first[stage + 1]; i++) {
        static const double parts[] = {0.001, 0.999}; /* just after its beginning and before its end */
        const idle_piece *p = &r->pieces[i];
        int k;
        if (p->end - p->start < 1e-9 * b->timeline->makespan) continue; /* nothing but rounding */
        for (k = 0; k < 2; k++)
            if (!CHECK_INT(p->cause, cause_of(b, stage, p->start + (p->end - p->start) * parts[k])))
                FAIL("%s", idle_cause_name(p->cause));
        seen[p->cause]++;
    }
}

/* Checks the transfers to other stages, and their times. */
static void check_transfers(const book *b, const idle_report *r) {
    int64_t i;
    CHECK(r->n_actions == b->schedule->n_actions && r->n_stages == b->schedule->shape.n_stages);
    for (i = 0; i < r->n_actions; i++) {
        double sent, arrived = arrival_of(b, i, &sent);
        CHECK(r->sent[i] == sent && r->arrived[i] == arrived);
    }
}

/* Checks that the path goes from 0 to the end, and that each pass on it waits for the one before. */
static void check_path(const book *b, const idle_report *r) {
    int64_t i;
    REQUIRE(r->n_path > 0);
    CHECK(b->timeline->start[r->path[0]] == 0);
    CHECK(b->timeline->end[r->path[r->n_path - 1]] == b->timeline->makespan);
    for (i = 1; i < r->n_path; i++) {
        CHECK_INT(r->waited_for[r->path[i]], r->path[i - 1]);
        CHECK(b->timeline->start[r->path[i]] >= b->timeline->end[r->path[i - 1]]);
        CHECK(b->timeline->start[r->path[i]] == r->arrived[r->path[i - 1]] ||
              b->timeline->start[r->path[i]] == b->timeline->end[r->path[i - 1]]);
    }
}

/* Adds transfers to the lists, at meaningless times: only the numbers of actions change. */
static void check_lowered(const book *b, const idle_report *r) {
    cf_timeline moved = *b->timeline;
    cf_schedule *low = NULL;
    idle_report again;
    int64_t s, i, j;
    if (cf_schedule_lower(b->plan, b->schedule, NULL, &low, NULL) != CF_OK) return;
    moved.start = (double *)calloc((size_t)low->n_actions + 1, sizeof(double));
    moved.end = (double *)calloc((size_t)low->n_actions + 1, sizeof(double));
    moved.live = (int32_t *)calloc((size_t)low->n_actions + 1, sizeof(int32_t));
    if (!moved.start || !moved.end || !moved.live) abort();
    for (s = 0; s < low->shape.n_stages; s++)
        for (i = low->first[s], j = b->schedule->first[s]; i < low->first[s + 1]; i++) {
            const int is_pass = low->actions[i].pass < CF_COMPUTE_PASS_COUNT;
            moved.start[i] = is_pass ? b->timeline->start[j] : 0;
            moved.end[i] = is_pass ? b->timeline->end[j] : 2 * b->timeline->makespan;
            moved.live[i] = is_pass ? b->timeline->live[j] : 0;
            j += is_pass;
        }
    REQUIRE(idle_make(b->plan, low, &moved, b->timing, &again, NULL) == CF_OK);
    for (s = 0; s <= low->shape.n_stages; s++) CHECK_INT(again.first[s], r->first[s]);
    for (i = 0; i < r->first[low->shape.n_stages]; i++)
        CHECK(again.pieces[i].start == r->pieces[i].start && again.pieces[i].cause == r->pieces[i].cause);
    CHECK_INT(again.n_path, r->n_path);
    idle_free(&again);
    free(moved.start);
    free(moved.end);
    free(moved.live);
    cf_schedule_free(low);
}

static void check_report(const book *b, int64_t seen[IDLE_CAUSE_COUNT]) {
    idle_report r;
    cf_error error;
    int64_t stage;
    REQUIRE(idle_make(b->plan, b->schedule, b->timeline, b->timing, &r, &error) == CF_OK);
    for (stage = 0; stage < b->schedule->shape.n_stages; stage++) {
        check_sums(b, &r, stage);
        check_causes(b, &r, stage, seen);
    }
    check_transfers(b, &r);
    check_path(b, &r);
    check_lowered(b, &r);
    idle_free(&r);
}

TEST(causes_of_random_schedules) {
    int64_t seen[IDLE_CAUSE_COUNT] = {0}, made = 0;
    uint64_t seed;
    int cause;
    for (seed = 1; seed <= (uint64_t)harness_rounds(150, 30); seed++) {
        harness_rng rng = {seed};
        problem p;
        cf_schedule *schedule = NULL;
        cf_simulate_desc desc;
        book b;
        problem_draw(&rng, NULL, &p);
        /* slow links between virtual stages of different rows, so that transfers queue, and padding */
        if (seed % 3 == 0) {
            int64_t i;
            for (i = 0; i < p.plan->n_chunks; i++) p.plan->chunks[i].rows += i % 3;
            p.desc.kind = CF_SCHEDULE_BEST;
            p.desc.shape.replay = CF_REPLAY_LOCAL;
            p.desc.shape.n_virtual = harness_between(&rng, 2, 5);
            p.desc.shape.placement = CF_PLACEMENT_V;
            p.timing.latency = (double)harness_between(&rng, 1, 40);
            p.timing.seconds_per_token = 0.5;
            p.timing.all.forward.per_token = 1;
            p.desc.timing = &p.timing;
        }
        p.desc.max_tries = 5;
        memset(&desc, 0, sizeof desc);
        desc.timing = p.desc.timing;
        desc.no_bounds = 1;
        if (cf_schedule_make(p.plan, &p.desc, &schedule, NULL) == CF_OK && schedule->n_actions < 400) {
            cf_timeline *timeline = NULL;
            CHECK_INT(cf_simulate(p.plan, schedule, &desc, &timeline, NULL), CF_OK);
            b.plan = p.plan, b.schedule = schedule, b.timeline = timeline, b.timing = p.desc.timing;
            if (timeline && timeline->makespan > 0) check_report(&b, seen);
            made++;
            cf_timeline_free(timeline);
        }
        cf_schedule_free(schedule);
        problem_free(&p);
    }
    harness_note("%s", "");
    CHECK(made > harness_rounds(50, 10));
    for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++)
        if (cause != IDLE_OVERHEAD) CHECK(seen[cause] > 0);
    harness_report("%d schedules; pieces: order %d, memory %d, transfer %d, state %d, imbalance %d", (int)made,
                   (int)seen[IDLE_ORDER], (int)seen[IDLE_MEMORY], (int)seen[IDLE_TRANSFER], (int)seen[IDLE_STATE],
                   (int)seen[IDLE_IMBALANCE]);
}

/* ---- examples worked out on paper ---- */

typedef struct example {
    cf_plan *plan;
    cf_schedule *schedule;
    cf_timeline *timeline;
    idle_report report;
} example;

static int example_make(const int64_t *lengths, int64_t n, int64_t chunk_size, const cf_schedule_desc *desc,
                        example *e) {
    cf_pack_desc pack = {0};
    cf_simulate_desc simulation = {0};
    memset(e, 0, sizeof *e);
    pack.chunk_size = chunk_size;
    pack.max_slices = 1;
    simulation.timing = desc->timing;
    return CHECK_INT(cf_pack(lengths, n, &pack, &e->plan, NULL), CF_OK) &&
           CHECK_INT(cf_schedule_make(e->plan, desc, &e->schedule, NULL), CF_OK) &&
           CHECK_INT(cf_simulate(e->plan, e->schedule, &simulation, &e->timeline, NULL), CF_OK) &&
           CHECK_INT(idle_make(e->plan, e->schedule, e->timeline, desc->timing, &e->report, NULL), CF_OK);
}

static void example_free(example *e) {
    idle_free(&e->report);
    cf_timeline_free(e->timeline);
    cf_schedule_free(e->schedule);
    cf_plan_free(e->plan);
}

/* 1F1B, 4 stages, 4 equal chunks, F = 1 and B = 2: the makespan is 21, and every stage idles for 9. Stage s waits s
   before its first forward and 2 s after its last backward. The rest is before backwards. */
TEST(equal_chunks_in_1f1b) {
    static const int64_t lengths[] = {1, 1, 1, 1};
    cf_schedule_desc desc = {0};
    example e;
    int64_t s;
    desc.shape.n_stages = 4;
    desc.kind = CF_SCHEDULE_1F1B;
    if (example_make(lengths, 4, 1, &desc, &e)) {
        CHECK(e.timeline->makespan == 21);
        for (s = 0; s < 4; s++) {
            const double *seconds = e.report.stages[s].seconds;
            CHECK(seconds[IDLE_WARM_UP] == (double)s);
            CHECK(seconds[IDLE_DRAIN] == 2 * (double)s);
            CHECK(seconds[IDLE_WARM_UP] + seconds[IDLE_DRAIN] + seconds[IDLE_GRADIENT] + seconds[IDLE_ORDER] == 9);
        }
        CHECK(e.report.stages[0].seconds[IDLE_GRADIENT] == 9);
    }
    example_free(&e);
}

/* One chunk, two stages, a latency of 5: the first stage is idle from 1 to 14. The gradient is made at 9. */
TEST(the_way_back_is_transfer) {
    static const int64_t lengths[] = {1};
    cf_schedule_desc desc = {0};
    cf_timing timing = {0};
    example e;
    timing.latency = 5;
    desc.shape.n_stages = 2;
    desc.timing = &timing;
    desc.kind = CF_SCHEDULE_1F1B;
    if (example_make(lengths, 1, 1, &desc, &e)) {
        CHECK(e.report.stages[0].seconds[IDLE_TRANSFER] == 5);
        CHECK(e.report.stages[0].seconds[IDLE_GRADIENT] == 8);
        CHECK(e.report.stages[1].seconds[IDLE_WARM_UP] == 6);
        CHECK(e.report.stages[1].seconds[IDLE_DRAIN] == 7);
        CHECK_INT(e.report.n_path, 4);
        CHECK(e.report.sent[e.report.path[0]] == 1 && e.report.arrived[e.report.path[0]] == 6);
    }
    example_free(&e);
}

/* Two chunks, and room for one on each stage. The second forward waits for room while the first chunk is on the other
   stage. */
TEST(a_limit_is_memory) {
    static const int64_t lengths[] = {1, 1};
    cf_schedule_desc desc = {0};
    example e;
    desc.shape.n_stages = 2;
    desc.kind = CF_SCHEDULE_1F1B;
    desc.limits.chunks = 1;
    if (example_make(lengths, 2, 1, &desc, &e)) {
        CHECK(e.timeline->makespan == 12);
        CHECK(e.report.stages[0].seconds[IDLE_MEMORY] == 3);
        CHECK(e.report.stages[0].seconds[IDLE_GRADIENT] == 3);
        CHECK(e.report.stages[1].seconds[IDLE_WARM_UP] == 1);
    }
    example_free(&e);
}

/* Two dependent chunks; the first stage is three times as slow as the second. From 4 to 6, the backward of the first
   chunk there only lacks the gradients of K and V from the second chunk. */
TEST(a_chain_is_state) {
    static const int64_t lengths[] = {2};
    cf_stage_cost stages[2] = {0};
    cf_schedule_desc desc = {0};
    cf_timing timing = {0};
    example e;
    stages[0].forward.per_token = 3;
    stages[1].forward.per_token = 1;
    timing.stages = stages;
    desc.shape.n_stages = 2;
    desc.shape.k = 2;
    desc.timing = &timing;
    desc.kind = CF_SCHEDULE_1F1B;
    if (example_make(lengths, 1, 1, &desc, &e)) {
        CHECK(e.report.stages[1].seconds[IDLE_WARM_UP] == 3);
        CHECK(e.report.stages[1].seconds[IDLE_STATE] == 2);
    }
    example_free(&e);
}

/* W of the second stage ends second to last: the path ends with the pass that ends last. An invalid schedule is
   refused. */
TEST(the_path_ends_with_the_last) {
    static const int64_t lengths[] = {1, 1};
    cf_stage_cost stages[2] = {0};
    cf_schedule_desc desc = {0};
    cf_timing timing = {0};
    idle_report none;
    cf_error error;
    example e;
    stages[0].forward.per_token = stages[0].input.per_token = stages[0].weight.per_token = 1;
    stages[1] = stages[0];
    stages[0].backward.per_token = 2;
    stages[1].backward.per_token = 3;
    stages[0].weight.per_token = 3; /* it starts before the other pass ends */
    stages[1].weight.per_token = 2;
    timing.stages = stages;
    desc.shape.n_stages = 2;
    desc.timing = &timing;
    desc.kind = CF_SCHEDULE_ZERO_BUBBLE;
    if (example_make(lengths, 2, 1, &desc, &e)) {
        const int64_t last = e.report.path[e.report.n_path - 1];
        CHECK(e.timeline->end[last] == e.timeline->makespan);
        e.schedule->actions[0].chunk = 7;
        harness_poison(&none, sizeof none);
        CHECK_INT(idle_make(e.plan, e.schedule, e.timeline, &timing, &none, &error), CF_ERROR_SCHEDULE);
        CHECK_POISON(&none, sizeof none);
    }
    example_free(&e);
    CHECK_STR(idle_cause_name(IDLE_CAUSE_COUNT), "?");
    CHECK_STR(idle_cause_name((idle_cause)-1), "?");
    CHECK(strcmp(idle_cause_name(IDLE_WARM_UP), "?") != 0 &&
          strcmp(idle_cause_name(IDLE_WARM_UP), idle_cause_name(IDLE_DRAIN)) != 0);
}

/* Measured times, with a pass that begins 2 later than it could. */
TEST(a_late_start_is_overhead) {
    static const int64_t lengths[] = {1};
    cf_schedule_desc desc = {0};
    cf_timing timing = {0};
    idle_report late;
    example e;
    int i;
    if (example_make(lengths, 1, 1, &desc, &e)) {
        e.timeline->start[1] += 2;
        e.timeline->end[1] += 2;
        e.timeline->makespan += 2;
        for (i = 0; i < 2; i++) {
            CHECK_INT(idle_make(e.plan, e.schedule, e.timeline, i > 0 ? &timing : NULL, &late, NULL), CF_OK);
            CHECK(late.stages[0].seconds[IDLE_OVERHEAD] == 2);
            CHECK_INT(late.first[1], 1);
            idle_free(&late);
        }
    }
    example_free(&e);
}

static void check_example(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing) {
    int64_t seen[IDLE_CAUSE_COUNT] = {0};
    cf_simulate_desc simulation = {0};
    cf_timeline *timeline = NULL;
    book b;
    simulation.timing = timing;
    REQUIRE(cf_simulate(plan, schedule, &simulation, &timeline, NULL) == CF_OK);
    b.plan = plan, b.schedule = schedule, b.timeline = timeline, b.timing = timing;
    check_report(&b, seen);
    cf_timeline_free(timeline);
}

/* In a V, each row of virtual stages runs in the opposite direction of the one before, for any number of rows and
   stages. */
TEST(transfers_in_a_v) {
    static const int64_t lengths[] = {3, 1, 2, 3, 2};
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    int64_t n_stages, n_virtual;
    pack.chunk_size = 3;
    pack.max_slices = 1;
    REQUIRE(cf_pack(lengths, 5, &pack, &plan, NULL) == CF_OK);
    for (n_stages = 2; n_stages < 6; n_stages++)
        for (n_virtual = 2; n_virtual < 5; n_virtual++) {
            cf_schedule_desc desc = {0};
            cf_schedule *schedule = NULL;
            cf_timing timing = {0};
            timing.latency = 5;
            timing.all.forward.per_token = 1;
            desc.kind = CF_SCHEDULE_BEST;
            desc.shape.n_stages = n_stages;
            desc.shape.n_virtual = n_virtual;
            desc.shape.placement = CF_PLACEMENT_V;
            desc.timing = &timing;
            desc.max_tries = 1;
            REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
            check_example(plan, schedule, &timing);
            cf_schedule_free(schedule);
        }
    cf_plan_free(plan);
}

/* The first stage's last pass could run while the one before it waits. */
TEST(the_last_pass_may_be_out_of_order) {
    static const char csv[] = "0F0,0F1,0I0,0B1,0W0\n1F0,1B0,1F1,1B1\n";
    static const int64_t lengths[] = {1, 1};
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    pack.chunk_size = 1;
    REQUIRE(cf_pack(lengths, 2, &pack, &plan, NULL) == CF_OK);
    REQUIRE(schedule_csv_read(csv, sizeof csv - 1, plan, NULL, &schedule, NULL, NULL) == CF_OK);
    check_example(plan, schedule, NULL);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

SUITE(idle, CASE(causes_of_random_schedules), CASE(transfers_in_a_v), CASE(the_last_pass_may_be_out_of_order),
      CASE(equal_chunks_in_1f1b), CASE(the_way_back_is_transfer), CASE(a_limit_is_memory), CASE(a_chain_is_state),
      CASE(the_path_ends_with_the_last), CASE(a_late_start_is_overhead));
