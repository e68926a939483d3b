/* Tests >>simulate: lowered schedules and measured times, against the slow simulator of pipeline.c. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- what to simulate ---- */

static cf_simulate_desc plain(const cf_timing *timing) {
    cf_simulate_desc desc = {0};
    desc.timing = timing;
    desc.limits.per_token.activations = 5;
    desc.limits.per_token.state = 3;
    desc.limits.per_token.state_gradient = 2;
    desc.limits.per_token.boundary = 1;
    return desc;
}

static int same(double a, double b) { return memcmp(&a, &b, sizeof a) == 0; }
static int near(double a, double b) { return fabs(a - b) <= 1e-9 * (1 + fabs(b)); }

/* ---- properties ---- */

/* Returns a lowered schedule in another order that the rules allow: neighbours in the lists change places. */
static cf_schedule *shuffle(harness_rng *rng, const cf_plan *plan, const cf_schedule *low, int64_t *moved) {
    cf_schedule *s = naive_copy(low);
    int64_t round;
    for (round = harness_between(rng, 0, 12); round > 0 && s->n_actions > 1; round--) {
        int64_t stage = harness_between(rng, 0, s->shape.n_stages - 1), first = s->first[stage],
                end = s->first[stage + 1], i;
        cf_action swap;
        if (end - first < 2) continue;
        i = harness_between(rng, first, end - 2);
        swap = s->actions[i];
        s->actions[i] = s->actions[i + 1];
        s->actions[i + 1] = swap;
        if (cf_schedule_validate(plan, s, NULL, NULL, NULL) == CF_OK) {
            ++*moved;
            continue;
        }
        s->actions[i + 1] = s->actions[i];
        s->actions[i] = swap;
    }
    return s;
}

/* Lists in orders that cf_schedule_lower would not choose take as long as in the slow simulator. */
TEST(agrees_with_the_slow_simulator) {
    problem_wants wants = {0};
    int64_t moved = 0;
    int round;
    wants.random = 1;
    for (round = 0; round < harness_rounds(600, 75); round++) {
        harness_rng rng = {7100 + (uint64_t)round};
        problem p;
        cf_simulate_desc desc;
        cf_schedule *other;
        cf_timeline *t = NULL;
        const char *fault;
        problem_draw(&rng, &wants, &p);
        REQUIRE(problem_order(&p) == CF_OK);
        desc = plain(p.desc.timing);
        other = shuffle(&rng, p.plan, problem_own(&p)->lowered, &moved);
        REQUIRE(CHECK_INT(cf_simulate(p.plan, other, &desc, &t, NULL), CF_OK));
        fault = pipeline_times_fault(p.plan, other, desc.timing, &desc.limits.per_token, t);
        CHECK_STR(fault, NULL);
        cf_timeline_free(t);
        naive_free(other);
        problem_free(&p);
    }
    CHECK(moved > harness_rounds(1000, 125));
    harness_report("%d swaps", (int)moved);
}

/* ---- by hand ---- */

/* Two chunks of 2 tokens on two stages; F 2 s, B 4 s, a transfer 1 s + 0.5 s a token = 2 s. */
static cf_plan *two_chunks(void) {
    const int64_t lengths[] = {2, 2};
    cf_plan *plan = naive_pack(lengths, 2, 2);
    return plan;
}

static cf_schedule *lists(const cf_plan *plan, const char *const *text, int64_t n_stages) {
    static const char *const names[] = {"F", "R", "B", "I", "W", "SF", "RF", "SR", "RR", "SB", "RB", "?"};
    cf_schedule *s = naive_new(n_stages, 256);
    int64_t stage, n = 0;
    s->shape.replay = CF_REPLAY_PIPELINE;
    s->shape.n_virtual = 1;
    s->shape.k = 4;
    s->n_chunks = plan->n_chunks;
    s->lowered = 1;
    for (stage = 0; stage < n_stages; stage++) {
        const char *at = text[stage];
        while (*at) {
            size_t letters = strcspn(at, "0123456789");
            int pass = 0;
            while (strlen(names[pass]) != letters || strncmp(names[pass], at, letters) != 0) pass++;
            s->actions[n].pass = (uint8_t)pass;
            s->actions[n].stage = (int32_t)stage;
            s->actions[n].chunk = at[letters] - '0';
            s->actions[n++].keep = at[letters + 1] == '+';
            at += letters + 1 + (at[letters + 1] == '+');
            at += *at == ' ';
        }
        s->first[stage + 1] = n;
    }
    s->n_actions = n;
    return s;
}

static void check_list_times(const cf_schedule *s, const cf_timeline *t, int64_t stage, const double (*wanted)[2]) {
    int64_t i, n = s->first[stage + 1] - s->first[stage];
    for (i = 0; i < n; i++) {
        harness_note("stage %d, position %d", (int)stage, (int)i);
        CHECK(same(t->start[s->first[stage] + i], wanted[i][0]));
        CHECK(same(t->end[s->first[stage] + i], wanted[i][1]));
    }
    harness_note("%s", "");
}

TEST(times_by_hand) {
    static const char *const text[] = {"F0+ SF0 F1+ SF1 RB0 B0 RB1 B1", "RF0 F0+ RF1 B0 SB0 F1+ B1 SB1"};
    const double beside[2][8][2] = {{{0, 2}, {2, 4}, {2, 4}, {4, 6}, {10, 12}, {12, 16}, {16, 18}, {18, 22}},
                                    {{2, 4}, {4, 6}, {4, 6}, {6, 10}, {10, 12}, {10, 12}, {12, 16}, {16, 18}}};
    cf_plan *plan = two_chunks();
    cf_schedule *s = lists(plan, text, 2);
    cf_timeline *t = NULL;
    cf_timing timing = {0};
    cf_simulate_desc desc;
    timing.all.forward.per_token = 1;
    timing.latency = 1;
    timing.seconds_per_token = 0.5;
    desc = plain(&timing);
    CHECK_INT(cf_simulate(plan, s, &desc, &t, NULL), CF_OK);
    REQUIRE(t != NULL);
    check_list_times(s, t, 0, beside[0]);
    check_list_times(s, t, 1, beside[1]);
    CHECK(same(t->makespan, 22) && same(t->busy, 24));
    cf_timeline_free(t);
    naive_free(s);
    cf_plan_free(plan);
}

/* ---- what is refused ---- */

static void check_refused(const cf_plan *plan, const char *first, const char *second, int64_t item, const char *why) {
    const char *text[2];
    cf_schedule *s;
    cf_timeline *t = NULL;
    cf_error error;
    text[0] = first;
    text[1] = second;
    s = lists(plan, text, 2);
    memset(&error, 0, sizeof error);
    harness_note("%s | %s", first, second);
    CHECK_INT(cf_simulate(plan, s, NULL, &t, &error), CF_ERROR_SCHEDULE);
    CHECK(t == NULL);
    CHECK_INT(error.item, item);
    if (!CHECK(strstr(error.text, why) != NULL)) FAIL("%s", error.text);
    harness_note("%s", "");
    naive_free(s);
}

TEST(broken_lowered_lists_are_named) {
    cf_plan *plan = two_chunks();
    const char *first = "F0+ SF0 F1+ SF1 RB0 B0 RB1 B1", *second = "RF0 F0+ RF1 B0 SB0 F1+ B1 SB1";
    check_refused(plan, "SF0 F0+ F1+ SF1 RB0 B0 RB1 B1", second, 0, "before the pass that makes its tensor");
    check_refused(plan, "F0+ SF0 F1+ SF1 B0 RB0 RB1 B1", second, 4, "before its RECV_");
    check_refused(plan, first, "F0+ RF0 RF1 B0 SB0 F1+ B1 SB1", 8, "before its RECV_");
    check_refused(plan, "F0+ SF0 F1+ SF1 RF0 RB0 B0 RB1 B1", second, 4, "no other stage");
    check_refused(plan, first, "RF0 F0+ SF0 RF1 B0 SB0 F1+ B1 SB1", 10, "no other stage");
    check_refused(plan, "F0+ SF0 F1+ SF1 SF1 RB0 B0 RB1 B1", second, 4, "comes twice");
    check_refused(plan, "F0+ SF0 F1+ SF1 ?0 RB0 B0 RB1 B1", second, 4, "no such pass");
    /* sends that wait for their receivers never end here, though each stage by itself is in order */
    check_refused(plan, "F0+ F1+ SF1 SF0 RB0 B0 RB1 B1", second, 2, "deadlock");
    check_refused(plan, first, "RF0 F0+ B0 SB0 RF1 F1+ B1 SB1", 3, "deadlock");
    check_refused(plan, "F0+ SF0 F1+ SF1 RB0 B0 RB1 B1 SR0", second, 8, "before the pass that makes its tensor");
    cf_plan_free(plan);
}

/* ---- measured times ---- */

/* Disturbs times as measurements would: the simulated ones on another clock, and inexact. */
static void disturb(harness_rng *rng, const cf_timeline *t, double *start, double *end) {
    int64_t i;
    for (i = 0; i < t->n_actions; i++) {
        start[i] = 1000 + t->start[i] + 0.25 * harness_unit(rng);
        end[i] = start[i] + (t->end[i] - t->start[i]) * (1 + harness_unit(rng));
    }
}

TEST(measured_times_are_added_up) {
    problem_wants wants = {0};
    int round;
    wants.random = 1;
    for (round = 0; round < 300; round++) {
        harness_rng rng = {7500 + (uint64_t)round};
        problem p;
        const cf_schedule *s;
        cf_timeline *t = NULL, *m = NULL;
        cf_simulate_desc desc = plain(NULL);
        double *start, *end, first = 1e300, last = -1e300, busy = 0, replayed = 0, area;
        int64_t i;
        cf_error error;
        problem_draw(&rng, &wants, &p);
        REQUIRE(problem_order(&p) == CF_OK);
        s = problem_own(&p)->lowered;
        CHECK_INT(cf_simulate(p.plan, s, &desc, &t, NULL), CF_OK);
        start = (double *)calloc((size_t)s->n_actions + 1, sizeof *start);
        end = (double *)calloc((size_t)s->n_actions + 1, sizeof *end);
        REQUIRE(t != NULL && start != NULL && end != NULL);
        disturb(&rng, t, start, end);
        for (i = 0; i < s->n_actions; i++) {
            first = fmin(first, start[i]);
            last = fmax(last, end[i]);
            if (s->actions[i].pass <= CF_W) busy += end[i] - start[i];
            if (s->actions[i].pass == CF_R) replayed += end[i] - start[i];
        }
        if (s->n_actions == 0) first = last = 0;
        harness_poison(&error, sizeof error);
        desc.start = start;
        desc.end = end;
        CHECK_INT(cf_simulate(p.plan, s, &desc, &m, &error), CF_OK);
        REQUIRE(m != NULL);
        CHECK_POISON(&error, sizeof error);
        for (i = 0; i < s->n_actions; i++)
            CHECK(same(m->start[i], start[i] - first) && same(m->end[i], end[i] - first));
        CHECK(near(m->makespan, last - first) && near(m->busy, busy) && near(m->replayed, replayed));
        area = (last - first) * (double)s->shape.n_stages;
        if (area > 0) CHECK(near(m->bubble_busy, 1 - busy / area));
        if (area > 0) CHECK(near(m->bubble_useful, 1 - (busy - replayed) / area));
        CHECK(m->n_bounds == 0 && same(m->bound, 0));
        CHECK(m->n_actions == s->n_actions && m->n_stages == s->shape.n_stages);
        CHECK(memcmp(m->live, t->live, (size_t)s->n_actions * sizeof *m->live) == 0);
        for (i = 0; i < s->shape.n_stages; i++) {
            CHECK_INT(m->peak_live[i], t->peak_live[i]);
            CHECK_INT(m->peak_tokens[i], t->peak_tokens[i]);
            CHECK_INT(m->peak_state_tokens[i], t->peak_state_tokens[i]);
            CHECK_INT(m->peak_bytes[i], t->peak_bytes[i]);
        }
        free(start);
        free(end);
        cf_timeline_free(m);
        cf_timeline_free(t);
        problem_free(&p);
    }
}

/* Without actions there are no times to miss. */
static void check_times_of_nothing(void) {
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    cf_simulate_desc desc = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    const int64_t no_length = 0;
    const double end = 0;
    pack.chunk_size = 4;
    order.shape.k = 1;
    REQUIRE(cf_pack(&no_length, 0, &pack, &plan, NULL) == CF_OK);
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    desc.end = &end;
    CHECK_INT(cf_simulate(plan, schedule, &desc, &timeline, NULL), CF_OK);
    REQUIRE(timeline != NULL);
    CHECK_INT(timeline->n_actions, 0);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

static void check_bad_times(const cf_plan *plan, const cf_schedule *s, const double *start, const double *end,
                            const char *field, int64_t item) {
    cf_simulate_desc desc = {0};
    cf_timeline *t;
    cf_error error;
    harness_poison(&t, sizeof t);
    memset(&error, 0, sizeof error);
    desc.start = start;
    desc.end = end;
    CHECK_INT(cf_simulate(plan, s, &desc, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
    CHECK_POISON(&t, sizeof t);
}

TEST(measured_times_that_cannot_be_are_refused) {
    static const char *const text[] = {"F0+ SF0 F1+ SF1 RB0 B0 RB1 B1", "RF0 F0+ RF1 B0 SB0 F1+ B1 SB1"};
    cf_plan *plan = two_chunks();
    cf_schedule *s = lists(plan, text, 2);
    double start[16], end[16];
    int i;
    for (i = 0; i < 16; i++) start[i] = end[i] = i;
    check_times_of_nothing();
    check_bad_times(plan, s, NULL, end, "start", -1);
    check_bad_times(plan, s, start, NULL, "end", -1);
    start[3] = NAN;
    check_bad_times(plan, s, start, end, "start", 3);
    start[3] = -INFINITY;
    check_bad_times(plan, s, start, end, "start", 3);
    start[3] = INFINITY;
    check_bad_times(plan, s, start, end, "start", 3);
    start[3] = 3;
    end[5] = INFINITY;
    check_bad_times(plan, s, start, end, "end", 5);
    end[5] = NAN;
    check_bad_times(plan, s, start, end, "end", 5);
    end[5] = 4.5;
    check_bad_times(plan, s, start, end, "end", 5);
    end[5] = 1e308;
    start[4] = -1e308;
    check_bad_times(plan, s, start, end, "end", -1);
    end[5] = 5;
    start[4] = 4;
    naive_free(s);
    cf_plan_free(plan);
}

typedef struct text {
    char bytes[8192];
    size_t n;
} text;

static int append(const char *piece, size_t bytes, void *user) {
    text *t = (text *)user;
    if (t->n + bytes >= sizeof t->bytes) return 1;
    memcpy(t->bytes + t->n, piece, bytes);
    t->n += bytes;
    t->bytes[t->n] = 0;
    return 0;
}

TEST(a_measured_timeline_is_written) {
    static const char *const lines[] = {"F0+ SF0 F1+ SF1 RB0 B0 RB1 B1", "RF0 F0+ RF1 B0 SB0 F1+ B1 SB1"};
    static text written;
    cf_plan *plan = two_chunks();
    cf_schedule *s = lists(plan, lines, 2);
    double start[16], end[16];
    cf_simulate_desc desc = {0};
    cf_timeline *t = NULL;
    int i;
    for (i = 0; i < 16; i++) start[i] = end[i] = 7 + i;
    end[15] = 24;
    desc.start = start;
    desc.end = end;
    CHECK_INT(cf_simulate(plan, s, &desc, &t, NULL), CF_OK);
    CHECK_INT(cf_write_schedule_json(s, t, append, &written, NULL), CF_OK);
    CHECK(strstr(written.bytes, "\"makespan\": 17, \"busy\": 0, ") != NULL);
    CHECK(strstr(written.bytes, "\"bounds\": {}") != NULL);
    CHECK(strstr(written.bytes, "{\"pass\": \"SEND_B\", \"chunk\": 1, \"stage\": 1, "
                                "\"start\": 15, \"end\": 17, \"live\": 0}") != NULL);
    cf_timeline_free(t);
    naive_free(s);
    cf_plan_free(plan);
}

SUITE(simulate_lowered, CASE(agrees_with_the_slow_simulator), CASE(times_by_hand),
      CASE(broken_lowered_lists_are_named), CASE(measured_times_are_added_up),
      CASE(measured_times_that_cannot_be_are_refused), CASE(a_measured_timeline_is_written));
