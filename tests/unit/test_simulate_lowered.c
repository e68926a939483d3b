/* >>simulate: lowered schedules and measured times, against the slow simulator of pipeline.c. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"

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

static cf_schedule *lower(const cf_plan *plan, const cf_schedule *s, const cf_timing *timing) {
    cf_lower_desc desc = {0};
    cf_schedule *low = NULL;
    desc.timing = timing;
    CHECK_INT(cf_schedule_lower(plan, s, &desc, &low, NULL), CF_OK);
    return low;
}

/* Costs that are no short binary fractions, so that equal times are equal work in equal order. */
static void draw_timing(harness_rng *rng, cf_timing *timing) {
    memset(timing, 0, sizeof *timing);
    timing->all.forward.constant = (double)harness_between(rng, 0, 2);
    timing->all.forward.per_token = harness_unit(rng);
    if (harness_chance(rng, 0.3)) timing->all.backward.per_pair = harness_unit(rng);
    if (harness_chance(rng, 0.5)) timing->latency = 3 * harness_unit(rng);
    if (harness_chance(rng, 0.7)) timing->seconds_per_token = harness_unit(rng);
}

static int same(double a, double b) { return memcmp(&a, &b, sizeof a) == 0; }
static int near(double a, double b) { return fabs(a - b) <= 1e-9 * (1 + fabs(b)); }

/* The passes of a lowered schedule run when those of the unlowered one do, to the last bit. */
static void check_same_times(const cf_schedule *s, const cf_timeline *t, const cf_schedule *low, const cf_timeline *u) {
    int64_t stage, i, j;
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (i = s->first[stage], j = low->first[stage]; j < low->first[stage + 1]; j++) {
            if (low->actions[j].pass > CF_W) continue;
            if (!CHECK(same(t->start[i], u->start[j]) && same(t->end[i], u->end[j]))) return;
            i++;
        }
    CHECK(same(t->makespan, u->makespan) && same(t->busy, u->busy) && same(t->replayed, u->replayed));
    CHECK(same(t->bubble_useful, u->bubble_useful) && same(t->bubble_busy, u->bubble_busy));
    CHECK(t->n_bounds == u->n_bounds && same(t->bound, u->bound));
}

/* Both ends of a transfer have its times. */
static void check_transfers(const cf_plan *plan, const cf_schedule *low, const cf_timing *timing,
                            const cf_timeline *t) {
    int64_t i, j;
    for (i = 0; i < low->n_actions; i++) {
        const cf_action *a = &low->actions[i];
        double transfer = pipeline_transfer(plan, timing, a->chunk);
        if (a->pass != CF_RECV_F && a->pass != CF_RECV_R && a->pass != CF_RECV_B) continue;
        j = pipeline_find(low, a->pass - 1, a->chunk, a->pass == CF_RECV_B ? a->stage + 1 : a->stage - 1);
        CHECK(near(t->end[i], t->start[i] + transfer));
        CHECK(t->start[j] >= t->end[pipeline_maker(low, &low->actions[j])]);
        CHECK(same(t->start[i], t->start[j]) && same(t->end[i], t->end[j]));
    }
}

/* ---- properties ---- */

TEST(transfers_change_no_time) {
    uint64_t seed;
    int64_t judged = 0, crossing = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(700, 80); seed++) {
        harness_rng rng = {seed};
        pipeline_problem problem;
        cf_schedule *s = NULL;
        pipeline_draw(&rng, &problem);
        pipeline_note(seed, &problem);
        if (cf_schedule_make(problem.plan, &problem.desc, &s, NULL) == CF_OK) {
            const cf_timing *timing = problem.desc.timing;
            cf_schedule *low = lower(problem.plan, s, harness_chance(&rng, 0.5) ? timing : NULL);
            cf_simulate_desc desc = plain(timing);
            cf_timeline *t = NULL, *u = NULL;
            desc.limits.chunks = problem.desc.limits.chunks;
            CHECK_INT(cf_simulate(problem.plan, s, &desc, &t, NULL), CF_OK);
            CHECK_INT(cf_simulate(problem.plan, low, &desc, &u, NULL), CF_OK);
            REQUIRE(t != NULL && u != NULL);
            check_same_times(s, t, low, u);
            if (seed % 8 == 0) check_transfers(problem.plan, low, timing, u);
            judged++;
            crossing += low->n_actions > s->n_actions;
            cf_timeline_free(u);
            cf_timeline_free(t);
            cf_schedule_free(low);
        }
        cf_schedule_free(s);
        cf_plan_free(problem.plan);
    }
    CHECK(judged > harness_rounds(500, 56) && crossing > harness_rounds(300, 34));
    harness_note("%s", "");
}

/* A lowered schedule in some order that the rules allow: neighbours in the lists change places. */
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

static void check_books(const cf_plan *plan, const cf_schedule *s, const cf_timeline *t) {
    int64_t stage;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        cf_steps *steps = NULL;
        REQUIRE(cf_steps_make(plan, s, stage, 0, NULL, &steps, NULL) == CF_OK);
        CHECK_INT(t->peak_live[stage], steps->n_slots);
        CHECK_INT(t->peak_tokens[stage], steps->peak_tokens);
        CHECK_INT(t->peak_state_tokens[stage], steps->peak_state_tokens);
        cf_steps_free(steps);
    }
}

/* The validator's own count of bytes: the peak is the least limit that it lets pass. */
static void check_bytes(const cf_plan *plan, const cf_schedule *s, const cf_timeline *t, const cf_bytes *bytes) {
    int64_t limits[8], stage, i;
    cf_validate_desc desc = {0};
    desc.limits.per_token = *bytes;
    desc.limits.bytes_by_stage = limits;
    for (i = 0; i < s->shape.n_stages; i++) limits[i] = t->peak_bytes[i];
    CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, NULL), CF_OK);
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        for (i = 0; i < s->shape.n_stages; i++) limits[i] = i == stage ? t->peak_bytes[i] - 1 : 0;
        if (limits[stage] > 0) CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, NULL), CF_ERROR_SCHEDULE);
    }
}

TEST(agrees_with_the_slow_simulator) {
    harness_rng rng = {71};
    int64_t moved = 0;
    int round;
    for (round = 0; round < harness_rounds(600, 75); round++) {
        cf_plan *plan = naive_plan(&rng, 6, harness_between(&rng, 1, 2));
        naive_shape shape = naive_draw_shape(&rng);
        cf_timing drawn, *timing = harness_chance(&rng, 0.8) ? &drawn : NULL;
        cf_simulate_desc desc;
        cf_schedule *s, *low, *other;
        cf_timeline *t = NULL, *u = NULL;
        double *start, *end;
        int64_t i;
        shape.rank = harness_between(&rng, 0, plan->n_ranks - 1);
        draw_timing(&rng, &drawn);
        desc = plain(timing);
        harness_note("round %d", round);
        s = naive_schedule(&rng, plan, &shape);
        REQUIRE(s != NULL);
        low = lower(plan, s, timing);
        REQUIRE(low != NULL);
        if (round % 2 == 0) { /* uneven ones, too, where a stage keeps what the one before it replays */
            CHECK_INT(cf_simulate(plan, s, &desc, &t, NULL), CF_OK);
            CHECK_INT(cf_simulate(plan, low, &desc, &u, NULL), CF_OK);
            REQUIRE(t != NULL && u != NULL);
            check_same_times(s, t, low, u);
            cf_timeline_free(t);
            cf_timeline_free(u);
            t = NULL;
        }
        other = shuffle(&rng, plan, low, &moved);
        if (!CHECK_INT(cf_simulate(plan, other, &desc, &t, NULL), CF_OK)) return;
        start = (double *)calloc((size_t)other->n_actions + 1, sizeof *start);
        end = (double *)calloc((size_t)other->n_actions + 1, sizeof *end);
        REQUIRE(start != NULL && end != NULL);
        CHECK(near(t->makespan, pipeline_makespan(plan, other, timing, start, end)));
        for (i = 0; i < other->n_actions; i++)
            if (!CHECK(near(t->start[i], start[i]) && near(t->end[i], end[i]))) break;
        check_books(plan, other, t);
        check_bytes(plan, other, t, &desc.limits.per_token);
        if (round % 8 == 0) check_transfers(plan, other, timing, t);
        free(start);
        free(end);
        cf_timeline_free(t);
        naive_free(other);
        cf_schedule_free(low);
        naive_free(s);
        cf_plan_free(plan);
    }
    CHECK(moved > harness_rounds(1000, 125));
    harness_report("%d swaps", (int)moved);
    harness_note("%s", "");
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

/* Whatever is in the lists: the simulation ends, accepts what the validator accepts, and what it accepts can be run. */
TEST(damaged_lowered_lists_are_judged) {
    harness_rng rng = {73};
    int64_t round, refused = 0, accepted = 0;
    for (round = 0; round < harness_rounds(2500, 625); round++) {
        cf_plan *plan = naive_plan(&rng, 5, harness_between(&rng, 1, 2));
        naive_shape shape = naive_draw_shape(&rng);
        cf_schedule *drawn, *low, *s;
        cf_timeline *t = NULL;
        int64_t edits, i;
        cf_result result;
        shape.rank = harness_between(&rng, 0, plan->n_ranks - 1);
        drawn = naive_schedule(&rng, plan, &shape);
        REQUIRE(drawn != NULL);
        harness_note("round %d", (int)round);
        low = lower(plan, drawn, NULL);
        s = naive_copy(low);
        for (edits = harness_between(&rng, 0, 2); edits > 0 && s->n_actions > 1; edits--) {
            cf_action *a = &s->actions[harness_between(&rng, 0, s->n_actions - 1)], *b, swap;
            switch (harness_between(&rng, 0, 5)) {
                case 0: a->pass = (uint8_t)harness_between(&rng, 0, CF_PASS_COUNT); break;
                case 1: a->chunk = (int32_t)harness_between(&rng, -1, plan->n_chunks); break;
                case 2: a->stage = (int32_t)harness_between(&rng, -1, s->shape.n_stages * s->shape.n_virtual); break;
                case 3: a->keep = (uint8_t)harness_between(&rng, 0, 2); break;
                case 4: *a = s->actions[harness_between(&rng, 0, s->n_actions - 1)]; break;
                default:
                    b = &s->actions[harness_between(&rng, 0, s->n_actions - 1)];
                    swap = *a;
                    *a = *b;
                    *b = swap;
                    break;
            }
        }
        result = cf_simulate(plan, s, NULL, &t, NULL);
        CHECK(result == CF_OK || result == CF_ERROR_SCHEDULE);
        if (cf_schedule_validate(plan, s, NULL, NULL, NULL) == CF_OK) CHECK_INT(result, CF_OK);
        for (i = 0; i < s->shape.n_stages && result == CF_OK; i++) {
            cf_steps *steps = NULL;
            REQUIRE(cf_steps_make(plan, s, i, 0, NULL, &steps, NULL) == CF_OK);
            CHECK_INT(t->peak_state_tokens[i], steps->peak_state_tokens);
            CHECK_INT(t->peak_live[i], steps->n_slots);
            cf_steps_free(steps);
        }
        refused += result != CF_OK;
        accepted += result == CF_OK;
        cf_timeline_free(t);
        naive_free(s);
        cf_schedule_free(low);
        naive_free(drawn);
        cf_plan_free(plan);
    }
    CHECK(refused > harness_rounds(800, 200) && accepted > harness_rounds(500, 125));
    harness_report("%d refused, %d accepted", (int)refused, (int)accepted);
    harness_note("%s", "");
}

/* ---- measured times ---- */

/* Times that a clock might have shown: the simulated ones on another clock, and not quite so. */
static void disturb(harness_rng *rng, const cf_timeline *t, double *start, double *end) {
    int64_t i;
    for (i = 0; i < t->n_actions; i++) {
        start[i] = 1000 + t->start[i] + 0.25 * harness_unit(rng);
        end[i] = start[i] + (t->end[i] - t->start[i]) * (1 + harness_unit(rng));
    }
}

TEST(measured_times_are_added_up) {
    harness_rng rng = {75};
    int round;
    for (round = 0; round < 300; round++) {
        cf_plan *plan = naive_plan(&rng, 6, 1);
        naive_shape shape = naive_draw_shape(&rng);
        cf_schedule *drawn = naive_schedule(&rng, plan, &shape), *s;
        cf_timeline *t = NULL, *m = NULL;
        cf_simulate_desc desc = plain(NULL);
        double *start, *end, first = 1e300, last = -1e300, busy = 0, replayed = 0, area;
        int64_t i;
        cf_error error;
        REQUIRE(drawn != NULL);
        harness_note("round %d", round);
        s = lower(plan, drawn, NULL);
        s->lowered = 1;
        CHECK_INT(cf_simulate(plan, s, &desc, &t, NULL), CF_OK);
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
        CHECK_INT(cf_simulate(plan, s, &desc, &m, &error), CF_OK);
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
        cf_schedule_free(s);
        naive_free(drawn);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* Of nothing, no times are missing. */
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

SUITE(simulate_lowered, CASE(transfers_change_no_time), CASE(agrees_with_the_slow_simulator),
      CASE(times_by_hand),
      CASE(broken_lowered_lists_are_named), CASE(damaged_lowered_lists_are_judged),
      CASE(measured_times_are_added_up), CASE(measured_times_that_cannot_be_are_refused),
      CASE(a_measured_timeline_is_written));
