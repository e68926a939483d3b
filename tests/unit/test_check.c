/* >>check: cf_schedule_validate against a judge written from the definitions (naive.c). */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/problem.h"
#include "../reference/steps.h"

#include <stdlib.h>
#include <string.h>

static cf_result validate(const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    memset(error, 0, sizeof *error);
    return cf_schedule_validate(plan, schedule, NULL, NULL, error);
}

/* A plan of known chunks: one chain of n full chunks of 2 tokens, then one-chunk sequences. */
static cf_plan *plan_of(int64_t n_dependent, int64_t n_single) {
    int64_t lengths[32], i;
    cf_plan *plan = NULL;
    lengths[0] = 2 * n_dependent;
    for (i = 1; i <= n_single; i++) lengths[i] = 2;
    plan = naive_pack(lengths, 1 + n_single, 2);
    return plan;
}

/* Appends a list such as "F0 F1* R0" ("*": the activations are dropped, "@2": virtual stage 2) to those before it. */
static cf_schedule *schedule_of(const cf_plan *plan, int64_t n_virtual, int64_t k, cf_replay replay,
                                const char *const *lists, int64_t n_lists) {
    static const char *const names[CF_PASS_COUNT] = {"F",      "R",      "B",      "I",      "W",     "SEND_F",
                                                     "RECV_F", "SEND_R", "RECV_R", "SEND_B", "RECV_B"};
    cf_schedule *s = naive_new(n_lists, 400);
    int64_t stage, n = 0;
    s->kind = CF_SCHEDULE_PAPER;
    s->shape.replay = replay;
    s->shape.n_virtual = n_virtual;
    s->shape.k = k;
    s->n_chunks = plan->n_chunks;
    for (stage = 0; stage < n_lists; stage++) {
        const char *at = lists[stage];
        while (*at) {
            cf_action *a = &s->actions[n++];
            size_t word = strspn(at, "ABCDEFGHIJKLMNOPQRSTUVWXYZ_");
            char *end;
            int pass;
            for (pass = 0; pass < CF_PASS_COUNT; pass++)
                if (strlen(names[pass]) == word && memcmp(names[pass], at, word) == 0) a->pass = (uint8_t)pass;
            a->chunk = (int32_t)strtol(at + word, &end, 10);
            a->stage = (int32_t)stage;
            a->keep = a->pass <= CF_R;
            if (*end == '*') a->keep = 0, end++;
            if (*end == '@') a->stage = (int32_t)strtol(end + 1, &end, 10);
            if (a->pass > CF_W) s->lowered = 1;
            at = end + (*end == ' ');
        }
        s->first[stage + 1] = n;
    }
    s->n_actions = n;
    return s;
}

/* Returns the validator's message for such lists, or NULL if it accepts them. */
static const char *verdict(const cf_plan *plan, int64_t n_virtual, int64_t k, cf_replay replay,
                           const char *const *lists, int64_t n_lists, cf_error *error) {
    cf_schedule *s = schedule_of(plan, n_virtual, k, replay, lists, n_lists);
    cf_result result = validate(plan, s, error);
    const char *fault = naive_fault(plan, s);
    if ((result == CF_OK) != (fault == NULL)) FAIL("validator: %s; judge: %s", error->text, fault ? fault : "sound");
    naive_free(s);
    if (result != CF_OK) CHECK_STR(oracle_error_fault(error), NULL);
    return result == CF_OK ? NULL : error->field;
}

static void accepts(const cf_plan *plan, int64_t n_virtual, int64_t k, cf_replay replay, const char *const *lists,
                    int64_t n) {
    cf_error error;
    if (verdict(plan, n_virtual, k, replay, lists, n, &error) != NULL) FAIL("refused: %s", error.text);
}

/* One list, one stage. */
static void refuses(const cf_plan *plan, int64_t k, const char *list, const char *field, int64_t position,
                    const char *words) {
    cf_error error;
    const char *lists[1], *got;
    lists[0] = list;
    got = verdict(plan, 1, k, CF_REPLAY_PIPELINE, lists, 1, &error);
    harness_note("%s", list);
    if (!CHECK_STR(got, field)) return;
    CHECK_INT(error.code, CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, position);
    if (!CHECK(strstr(error.text, words) != NULL)) FAIL("text: %s", error.text);
    CHECK(strstr(error.text, "stage 0") != NULL);
    harness_note("%s", "");
}

TEST(one_stage_rules) {
    cf_plan *plan = plan_of(3, 1); /* chunks 0, 1, 2 form a chain; 3 is standalone */
    static const char *const good[] = {"F0* F1* F2 B2 R1 B1 R0 B0 F3 B3", "F3 F0* F1* F2 B2 R1 B1 R0 B0 B3",
                                       "F0* F1* F2 I2 W2 R1 I1 W1 R0 B0 F3 I3 W3",
                                       "F3* F0* F1* F2 B2 R3 R1 B1 B3 R0 B0"};
    size_t i;
    for (i = 0; i < sizeof good / sizeof good[0]; i++) accepts(plan, 1, 1, CF_REPLAY_PIPELINE, &good[i], 1);
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0", "actions", -1, "F of chunk 3 on virtual stage 0 is missing");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 F3", "actions.pass", 9,
            "F of chunk 3 on virtual stage 0 comes twice");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 B3 B3", "actions.pass", 10, "second backward");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 B3 W3", "actions.pass", 10, "before its I");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 I3", "actions", -1, "W of chunk 3");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3", "actions", -1, "B of chunk 3 on virtual stage 0 is missing");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 I3 W3 W3", "actions.pass", 11, "comes twice");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 W3 I3", "actions.pass", 9, "before its I");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 B3 F3", "actions.pass", 8, "before its F");
    refuses(plan, 1, "F1* F0* F2 B2 R1 B1 R0 B0 F3 B3", "actions.chunk", 0, "before F of the chunk that it continues");
    refuses(plan, 3, "F0 F1 F2 B1 B2 B0 F3 B3", "actions.chunk", 3, "a chunk that continues it");
    refuses(plan, 1, "F0* F1* F2 B2 B1 R0 B0 F3 B3", "actions.pass", 4, "R is missing");
    refuses(plan, 1, "F0* F1* R1 F2 B2 B1 R0 B0 F3 B3", "shape.k", 3, "more than K");
    refuses(plan, 2, "F0 F1 F2 B2 B1 B0 F3 B3", "shape.k", 2, "more than K");
    refuses(plan, 1, "R0 F0* F1* F2 B2 R1 B1 B0 F3 B3", "actions.pass", 0, "before its F");
    refuses(plan, 1, "F0* F1* F2 B2 R1 B1 R0 B0 F3 R3 B3", "actions.pass", 9, "needless");
    refuses(plan, 1, "F0* F1* F2 B2 R1* B1 R0 B0 F3 B3", "actions.keep", 4, "keeps nothing");
    refuses(plan, 1, "F0* F1* F2 B2 R1 R1 B1 R0 B0 F3 B3", "actions.pass", 5, "comes twice");
    cf_plan_free(plan);
}

TEST(rules_between_stages) {
    cf_plan *plan = plan_of(2, 1); /* 0 1 and 2 */
    static const char *const good[] = {"F0 F1 F2 B1 B0 B2", "F0 F1 B1 B0 F2 B2"};
    static const char *const crossed[] = {"F0 F1 B1 B0 F2 B2", "F2 B2 F0 F1 B1 B0"};
    static const char *const pipeline[] = {"F0* F1 B1 R0 B0 F2 B2", "F0* F1 B1 R0 B0 F2 B2"};
    static const char *const first_only[] = {"F0* F1 B1 R0 B0 F2 B2", "F0 F1 B1 B0 F2 B2"};
    static const char *const second_only[] = {"F0 F1 B1 B0 F2 B2", "F0* F1 B1 R0 B0 F2 B2"};
    static const char *const foreign[] = {"F0 F1 F2 B1 B0 B2", "F0 F1 F2@0 B1 B0 B2"};
    static const char *const loops[] = {"F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 B1@2 B0@2 B2@2 B1@0 B0@0 B2@0",
                                        "F0@1 F1@1 F2@1 F0@3 F1@3 F2@3 B1@3 B0@3 B2@3 B1@1 B0@1 B2@1"};
    static const char *const own_deadlock[] = {"F0@1 F0@0 F1@0 F1@1 B1@1 B0@1 B1@0 B0@0 F2@0 F2@1 B2@1 B2@0"};
    cf_error error;
    accepts(plan, 1, 2, CF_REPLAY_PIPELINE, good, 2);
    CHECK_STR(verdict(plan, 1, 2, CF_REPLAY_PIPELINE, crossed, 2, &error), "actions");
    CHECK(strstr(error.text, "stage 0") != NULL && strstr(error.text, "B of chunk 1") != NULL);
    CHECK(strstr(error.text, "deadlock") != NULL);
    CHECK_INT(error.item, 2);
    accepts(plan, 1, 1, CF_REPLAY_PIPELINE, pipeline, 2);
    accepts(plan, 1, 2, CF_REPLAY_PIPELINE, first_only, 2);
    CHECK_STR(verdict(plan, 1, 2, CF_REPLAY_PIPELINE, second_only, 2, &error), "actions");
    CHECK(strstr(error.text, "R of chunk 0 on virtual stage 0 is missing") != NULL);
    accepts(plan, 1, 2, CF_REPLAY_LOCAL, second_only, 2);
    CHECK_STR(verdict(plan, 1, 2, CF_REPLAY_PIPELINE, foreign, 2, &error), "actions.stage");
    CHECK(strstr(error.text, "stage 1: ") != NULL);
    CHECK_INT(error.item, 2);
    accepts(plan, 2, 2, CF_REPLAY_PIPELINE, loops, 2);
    CHECK_STR(verdict(plan, 2, 2, CF_REPLAY_PIPELINE, own_deadlock, 1, &error), "actions");
    CHECK_INT(error.item, 0);
    cf_plan_free(plan);
}

/* Returns the validator's message for two lists of two virtual stages each, in a V: 0 and 3 on one stage, 1 and 2 on
   the other. */
static const char *verdict_of_v(const cf_plan *plan, cf_replay replay, const char *const *lists, cf_error *error) {
    cf_schedule *s = schedule_of(plan, 2, 2, replay, lists, 2);
    const char *fault;
    cf_result result;
    s->shape.placement = CF_PLACEMENT_V;
    result = validate(plan, s, error);
    fault = naive_fault(plan, s);
    if ((result == CF_OK) != (fault == NULL)) FAIL("validator: %s; judge: %s", error->text, fault ? fault : "sound");
    naive_free(s);
    return result == CF_OK ? NULL : error->field;
}

/* With one stage, all virtual stages are on the same stage as their successors. */
TEST(rules_of_virtual_stages_on_one_stage) {
    cf_plan *plan = plan_of(1, 0);
    cf_schedule_desc desc = {0};
    cf_schedule *s = NULL;
    cf_error error;
    cf_action first;
    desc.shape.k = 1;
    desc.shape.n_virtual = 2;
    REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK);
    CHECK_INT(cf_schedule_validate(plan, s, NULL, NULL, &error), CF_OK);
    first = s->actions[0];
    s->actions[0] = s->actions[1];
    s->actions[1] = first;
    CHECK_INT(cf_schedule_validate(plan, s, NULL, NULL, &error), CF_ERROR_SCHEDULE);
    CHECK(strstr(error.text, "F of chunk 0 on virtual stage 1 comes before that of the virtual stage before") != NULL);
    CHECK_INT(error.item, 0);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(rules_where_a_v_turns) {
    cf_plan *plan = plan_of(2, 0);
    static const char *const good[] = {"F0@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 B0@0",
                                       "F0@1 F0@2 F1@1 F1@2 B1@2 B1@1 B0@2 B0@1"};
    static const char *const loops[] = {"F0@0 F1@0 F0@2 F1@2 B1@2 B0@2 B1@0 B0@0",
                                        "F0@1 F1@1 F0@3 F1@3 B1@3 B0@3 B1@1 B0@1"};
    static const char *const early_f[] = {"F0@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 B0@0",
                                          "F0@2 F0@1 F1@1 F1@2 B1@2 B1@1 B0@2 B0@1"};
    static const char *const early_b[] = {"F0@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 B0@0",
                                          "F0@1 F0@2 F1@1 F1@2 B1@1 B1@2 B0@2 B0@1"};
    static const char *const replayed[] = {"F0*@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 R0@0 B0@0",
                                           "F0*@1 F0*@2 F1@1 F1@2 B1@2 B1@1 R0@1 R0@2 B0@2 B0@1"};
    static const char *const early_r[] = {"F0*@0 F1@0 F0@3 F1@3 B1@3 B0@3 B1@0 R0@0 B0@0",
                                          "F0*@1 F0*@2 F1@1 F1@2 B1@2 B1@1 R0@2 R0@1 B0@2 B0@1"};
    static const char *const lowered[] = {
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_F0@3 F0@3 RECV_F1@3 F1@3 B1@3 SEND_B1@3 B0@3 SEND_B0@3 RECV_B1@0 B1@0 "
        "RECV_B0@0 B0@0",
        "RECV_F0@1 F0@1 F0@2 RECV_F1@1 SEND_F0@2 F1@1 F1@2 SEND_F1@2 RECV_B1@2 B1@2 B1@1 RECV_B0@2 B0@2 SEND_B1@1 B0@1 "
        "SEND_B0@1"};
    static const char *const sent[] = {
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_F0@3 F0@3 RECV_F1@3 F1@3 B1@3 SEND_B1@3 B0@3 SEND_B0@3 RECV_B1@0 B1@0 "
        "RECV_B0@0 B0@0",
        "RECV_F0@1 F0@1 SEND_F0@1 RECV_F0@2 F0@2 RECV_F1@1 SEND_F0@2 F1@1 F1@2 SEND_F1@2 RECV_B1@2 B1@2 B1@1 RECV_B0@2 "
        "B0@2 "
        "SEND_B1@1 B0@1 SEND_B0@1"};
    static const char *const unsent[] = {
        "F0@0 SEND_F0@0 F1@0 SEND_F1@0 RECV_F0@3 F0@3 RECV_F1@3 F1@3 B1@3 SEND_B1@3 B0@3 RECV_B1@0 B1@0 RECV_B0@0 B0@0",
        "RECV_F0@1 F0@1 F0@2 RECV_F1@1 SEND_F0@2 F1@1 F1@2 SEND_F1@2 RECV_B1@2 B1@2 B1@1 RECV_B0@2 B0@2 SEND_B1@1 B0@1 "
        "SEND_B0@1"};
    cf_error error;
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, good, &error), NULL);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, loops, &error), "actions.stage");
    CHECK_INT(error.item, 2);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, early_f, &error), "actions");
    CHECK(strstr(error.text,
                 "stage 1: F of chunk 0 on virtual stage 2 comes before that of the virtual stage before") != NULL);
    CHECK_INT(error.item, 0);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, early_b, &error), "actions");
    CHECK(strstr(error.text,
                 "stage 1: B of chunk 1 on virtual stage 1 comes before that of the virtual stage behind") != NULL);
    CHECK_INT(error.item, 4);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, replayed, &error), NULL);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, early_r, &error), "actions");
    CHECK(strstr(error.text, "R of chunk 0 on virtual stage 2 comes before") != NULL);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_LOCAL, early_r, &error), NULL);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, lowered, &error), NULL);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, sent, &error), "actions.pass");
    CHECK(strstr(error.text, "SEND_F of chunk 0 on virtual stage 1 has no other stage") != NULL);
    CHECK_STR(verdict_of_v(plan, CF_REPLAY_PIPELINE, unsent, &error), "actions");
    CHECK(strstr(error.text, "SEND_B of chunk 0 on virtual stage 3 is missing") != NULL);
    cf_plan_free(plan);
}

TEST(rules_of_lowered_lists) {
    cf_plan *plan = plan_of(1, 1); /* two standalone chunks */
    static const char *const good[] = {"F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
                                       "RECV_F0 F0 B0 RECV_F1 SEND_B0 F1 B1 SEND_B1"};
    static const char *const order[] = {"F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
                                        "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1"};
    static const char *const early[] = {"SEND_F0 F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
                                        "RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1"};
    static const char *const late[] = {"F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
                                       "F0 RECV_F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1"};
    static const char *const lost[] = {"F0 SEND_F0 F1 RECV_B0 B0 RECV_B1 B1",
                                       "RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1"};
    static const char *const edge[] = {"F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1 SEND_B1",
                                       "RECV_F0 F0 RECV_F1 F1 B0 SEND_B0 B1 SEND_B1"};
    static const char *const replays[] = {"F0* SEND_F0 F1 SEND_F1 RECV_B1 B1 R0 RECV_B0 B0",
                                          "RECV_F0 F0 RECV_F1 F1 B1 SEND_B1 B0 SEND_B0"};
    static const char *const needless[] = {"F0* SEND_F0 F1 SEND_F1 RECV_B1 B1 R0 SEND_R0 RECV_B0 B0",
                                           "RECV_F0 F0 RECV_F1 F1 B1 SEND_B1 RECV_R0 B0 SEND_B0"};
    static const char *const both[] = {"F0* SEND_F0 F1 SEND_F1 RECV_B1 B1 R0 SEND_R0 RECV_B0 B0",
                                       "RECV_F0 F0* RECV_F1 F1 B1 SEND_B1 RECV_R0 R0 B0 SEND_B0"};
    static const char *const unread[] = {"F0* SEND_F0 F1 SEND_F1 RECV_B1 B1 R0 SEND_R0 RECV_B0 B0",
                                         "RECV_F0 F0 RECV_F1 F1 B1 SEND_B1 B0 SEND_B0"};
    static const char *const unsent[] = {"F0* SEND_F0 F1 SEND_F1 RECV_B1 B1 R0 RECV_B0 B0",
                                         "RECV_F0 F0* RECV_F1 F1 B1 SEND_B1 RECV_R0 R0 B0 SEND_B0"};
    cf_plan *chain = plan_of(2, 0);
    cf_error error;
    accepts(chain, 1, 1, CF_REPLAY_PIPELINE, both, 2);
    CHECK_STR(verdict(chain, 1, 2, CF_REPLAY_PIPELINE, unread, 2, &error), "actions");
    CHECK(strstr(error.text, "RECV_R of chunk 0 on virtual stage 1 is missing") != NULL);
    CHECK_STR(verdict(chain, 1, 1, CF_REPLAY_PIPELINE, unsent, 2, &error), "actions");
    CHECK(strstr(error.text, "SEND_R of chunk 0 on virtual stage 0 is missing") != NULL);
    CHECK_STR(verdict(chain, 1, 1, CF_REPLAY_LOCAL, both, 2, &error), "actions.pass");
    CHECK(strstr(error.text, "no place in local replay") != NULL);
    /* Stage 1 keeps both chunks, so nothing waits for R on stage 0. */
    accepts(chain, 1, 2, CF_REPLAY_PIPELINE, replays, 2);
    CHECK_STR(verdict(chain, 1, 2, CF_REPLAY_PIPELINE, needless, 2, &error), "actions");
    CHECK(strstr(error.text, "R of chunk 0 on virtual stage 1 is missing") != NULL);
    cf_plan_free(chain);
    accepts(plan, 1, 1, CF_REPLAY_PIPELINE, good, 2);
    CHECK_STR(verdict(plan, 1, 1, CF_REPLAY_PIPELINE, order, 2, &error), "transfers");
    CHECK(strstr(error.text, "stage 0: SEND_F of chunk 1 on virtual stage 0 waits for ever") != NULL);
    CHECK_INT(error.item, 3);
    CHECK_STR(verdict(plan, 1, 1, CF_REPLAY_PIPELINE, early, 2, &error), "actions.pass");
    CHECK_INT(error.item, 0);
    CHECK_STR(verdict(plan, 1, 1, CF_REPLAY_PIPELINE, late, 2, &error), "actions.pass");
    CHECK(strstr(error.text, "before its RECV_F") != NULL);
    CHECK_STR(verdict(plan, 1, 1, CF_REPLAY_PIPELINE, lost, 2, &error), "actions");
    CHECK(strstr(error.text, "SEND_F of chunk 1 on virtual stage 0 is missing") != NULL);
    CHECK_STR(verdict(plan, 1, 1, CF_REPLAY_PIPELINE, edge, 2, &error), "actions.pass");
    CHECK(strstr(error.text, "no other stage") != NULL);
    cf_plan_free(plan);
}

/* ---- limits ---- */

TEST(limits_bind_exactly) {
    problem_wants wants = {0};
    int round;
    wants.random = 1;
    for (round = 0; round < 150; round++) {
        harness_rng rng = {1100 + (uint64_t)round};
        problem p;
        const cf_plan *plan;
        const cf_schedule *s;
        cf_validate_desc desc;
        cf_error error;
        int64_t stage, most = 0, most_bytes = 0, chunks[8], bytes[8];
        problem_draw(&rng, &wants, &p);
        plan = p.plan, s = problem_own(&p)->schedule;
        REQUIRE(s != NULL);
        memset(&desc, 0, sizeof desc);
        desc.limits.per_token = p.desc.limits.per_token;
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            const naive_peaks peaks = naive_peaks_of(plan, s, stage, &desc.limits.per_token);
            chunks[stage] = peaks.chunks;
            bytes[stage] = peaks.bytes;
            most = chunks[stage] > most ? chunks[stage] : most;
            most_bytes = bytes[stage] > most_bytes ? bytes[stage] : most_bytes;
        }
        desc.limits.chunks = most;
        desc.limits.bytes = most_bytes;
        CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, &error), CF_OK);
        desc.limits.chunks = 0;
        desc.limits.bytes = 0;
        desc.limits.chunks_by_stage = chunks;
        desc.limits.bytes_by_stage = bytes;
        CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, &error), CF_OK);
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            if (chunks[stage] > 1) {
                chunks[stage]--;
                CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, &error), CF_ERROR_SCHEDULE);
                CHECK_STR(error.field, "limits.chunks");
                CHECK_INT(error.got, chunks[stage] + 1);
                chunks[stage]++;
            }
            if (bytes[stage] > 1) {
                bytes[stage]--;
                CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, &error), CF_ERROR_SCHEDULE);
                CHECK_STR(error.field, "limits.bytes");
                CHECK_INT(error.wanted, bytes[stage]);
                bytes[stage]++;
            }
        }
        desc.limits.chunks_by_stage = NULL;
        desc.limits.bytes_by_stage = NULL;
        if (most > 1) {
            desc.limits.chunks = most - 1;
            CHECK_INT(cf_schedule_validate(plan, s, &desc, NULL, &error), CF_ERROR_SCHEDULE);
            CHECK_STR(error.field, "limits.chunks");
        }
        desc.limits.chunks = 0;
        desc.limits.bytes = INT64_MAX;
        desc.limits.per_token.activations = INT64_MAX;
        if (most_bytes > 0 && plan->n_idle < plan->n_chunks && plan->n_tokens > 1) {
            cf_result result = cf_schedule_validate(plan, s, &desc, NULL, &error);
            if (result != CF_OK) CHECK_STR(error.field, "limits.bytes");
        }
        problem_free(&p);
    }
}

/* ---- every sound schedule, and every damaged one ---- */

/* Damages a schedule in one way. May replace the schedule. */
static cf_schedule *damage(harness_rng *rng, cf_schedule *s) {
    int64_t i = harness_between(rng, 0, s->n_actions - 1), j, stage = 0;
    cf_action *a = &s->actions[i], swap;
    while (s->first[stage + 1] <= i) stage++;
    switch (harness_between(rng, 0, 10)) {
        case 0: a->chunk += (int32_t)harness_between(rng, -2, 2); break;
        case 1: a->stage += (int32_t)(harness_between(rng, -2, 2) * s->shape.n_stages); break;
        case 2: a->stage += (int32_t)harness_between(rng, -1, 1); break;
        case 3: a->pass = (uint8_t)harness_between(rng, 0, CF_PASS_COUNT); break;
        case 4: a->keep = (uint8_t)harness_between(rng, 0, 2); break;
        case 9: *a = s->actions[harness_between(rng, 0, s->n_actions - 1)]; break;
        case 5: a->reserved = (uint16_t)harness_between(rng, 0, 1); break;
        case 6: return naive_remove(s, stage, i - s->first[stage]);
        case 7: return naive_insert(s, stage, harness_between(rng, 0, s->first[stage + 1] - s->first[stage]), *a);
        case 8:
            j = harness_between(rng, s->first[stage], s->first[stage + 1] - 1);
            swap = *a;
            *a = s->actions[j];
            s->actions[j] = swap;
            break;
        default:
            if (i + 1 < s->first[stage + 1]) {
                swap = *a;
                *a = a[1];
                a[1] = swap;
            }
            if (harness_chance(rng, 0.1)) s->shape.k = harness_between(rng, 1, s->shape.k);
            break;
    }
    return s;
}

/* Checks the value that the error wanted of an action's member, if only one is right. */
static void check_wanted(const cf_plan *plan, const cf_schedule *s, const cf_error *e) {
    const int64_t n_v = s->shape.n_stages * s->shape.n_virtual;
    const char *place = strstr(e->text, "]: stage ");
    const int64_t stage = place != NULL ? strtol(place + strlen("]: stage "), NULL, 10) : -1;
    /* the item of an error is an index in the stage's list */
    const cf_action *a = stage >= 0 ? &s->actions[s->first[stage] + e->item] : NULL;
    CHECK_STR(oracle_error_fault(e), NULL);
    if (strstr(e->text, "no such virtual stage") != NULL) CHECK(a && e->wanted == n_v - 1 && e->got == a->stage);
    if (strstr(e->text, "another rank's") != NULL)
        CHECK(a && e->wanted == s->shape.rank * plan->chunks_per_rank && e->got == a->chunk);
    if (strstr(e->text, "no such pass") != NULL)
        CHECK(a && e->wanted == (s->lowered ? CF_PASS_COUNT : CF_COMPUTE_PASS_COUNT) - 1 && e->got == a->pass);
    if (strstr(e->text, "lies on another stage") != NULL) CHECK(a && e->wanted == stage && e->got == a->stage);
    if (strcmp(e->field, "shape.k") == 0) CHECK_INT(e->wanted, s->shape.k);
}

/* Whatever the lists contain, the simulation ends and steps are made or refused. Both accept exactly what the validator
   accepts. */
static void check_survivors(const cf_plan *plan, const cf_schedule *s, int sound) {
    cf_timeline *t = NULL;
    cf_result result = cf_simulate(plan, s, NULL, &t, NULL);
    int64_t stage;
    CHECK(result == CF_OK || result == CF_ERROR_SCHEDULE);
    CHECK(!sound || result == CF_OK);
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        cf_steps *steps = NULL;
        cf_result made = cf_steps_make(plan, s, stage, 0, NULL, &steps, NULL);
        CHECK(made == CF_OK || made == CF_ERROR_SCHEDULE);
        CHECK(result != CF_OK || made == CF_OK);
        CHECK((steps != NULL) == (made == CF_OK));
        if (steps != NULL) CHECK_STR(steps_slots_fault(s, steps), NULL);
        if (steps != NULL && t != NULL)
            CHECK(t->peak_state_tokens[stage] == steps->peak_state_tokens && t->peak_live[stage] == steps->n_slots);
        cf_steps_free(steps);
    }
    cf_timeline_free(t);
}

/* Random schedules, or schedules of trees, lowered or not. */
static void mutate(uint64_t seed, int lowered, int trees, int rounds) {
    problem_wants wants = {0};
    int round, refused = 0, accepted = 0;
    wants.random = !trees;
    wants.trees = trees;
    wants.sequences = trees ? 10 : 5;
    for (round = 0; round < rounds; round++) {
        harness_rng rng = {seed + (uint64_t)round};
        problem p;
        cf_schedule *s;
        const char *fault;
        cf_error error;
        cf_result result;
        problem_draw(&rng, &wants, &p);
        if (problem_order(&p) == CF_OK) {
            s = naive_copy(lowered ? problem_own(&p)->lowered : problem_own(&p)->schedule);
            if (s->n_actions > 0) s = damage(&rng, s);
            if (harness_chance(&rng, 0.2) && s->n_actions > 0) s = damage(&rng, s);
            memset(&s->limits, 0, sizeof s->limits);
            fault = naive_fault(p.plan, s);
            result = validate(p.plan, s, &error);
            if ((result == CF_OK) != (fault == NULL))
                FAIL("validator: %s; judge: %s", error.text, fault ? fault : "sound");
            if (CHECK_INT(result, fault == NULL ? CF_OK : CF_ERROR_SCHEDULE) && result != CF_OK)
                check_wanted(p.plan, s, &error);
            check_survivors(p.plan, s, fault == NULL);
            refused += result != CF_OK;
            accepted += result == CF_OK;
            naive_free(s);
        }
        problem_free(&p);
    }
    CHECK(refused > rounds / 4 && accepted > rounds / 20); /* both verdicts are tried */
    harness_report("%d refused, %d accepted", refused, accepted);
}

TEST(damaged_schedules_are_judged_rightly) { mutate(210000, 0, 0, harness_rounds(3000, 750)); }
TEST(damaged_lowered_schedules_are_judged_rightly) { mutate(220000, 1, 0, harness_rounds(3000, 750)); }
TEST(damaged_schedules_of_trees_are_judged_rightly) { mutate(230000, 0, 1, harness_rounds(2000, 250)); }

/* ---- members of the schedule ---- */

static void expect_field(const cf_plan *plan, const cf_schedule *s, const char *field) {
    cf_error error;
    CHECK_INT(validate(plan, s, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, field);
}

TEST(damaged_members_are_named) {
    harness_rng rng = {5};
    cf_plan *plan = plan_of(3, 2);
    naive_shape shape = {0};
    cf_schedule *s, *t;
    shape.n_stages = 3;
    shape.n_virtual = 1;
    shape.k = 2;
    shape.replay = CF_REPLAY_PIPELINE;
    s = naive_schedule(&rng, plan, &shape);
    REQUIRE(s != NULL);
#define DAMAGE(change, field)          \
    do {                               \
        int64_t *first;                \
        cf_action *actions;            \
        t = naive_copy(s);             \
        first = t->first;              \
        actions = t->actions;          \
        change;                        \
        expect_field(plan, t, field);  \
        t->first = first;              \
        t->actions = actions;          \
        naive_free(t);                 \
    } while (0)
    DAMAGE(t->kind = CF_SCHEDULE_COUNT, "kind");
    DAMAGE(t->shape.replay = CF_REPLAY_DEFAULT, "shape.replay");
    DAMAGE(t->shape.replay = CF_REPLAY_COUNT, "shape.replay");
    DAMAGE(t->shape.n_stages = 0, "shape.n_stages");
    DAMAGE(t->shape.n_stages = INT64_MAX, "shape.n_stages");
    DAMAGE(t->shape.n_stages = INT32_MAX, "n_actions");
    DAMAGE(t->shape.n_stages = 2, "first");
    DAMAGE(t->shape.n_virtual = 0, "shape.n_virtual");
    DAMAGE(t->shape.n_virtual = INT32_MAX, "shape.n_virtual");
    DAMAGE(t->shape.n_virtual = 2, "n_actions");
    DAMAGE(t->shape.placement = CF_PLACEMENT_COUNT, "shape.placement");
    DAMAGE(t->shape.placement = (cf_placement)-1, "shape.placement");
    DAMAGE(t->shape.k = 0, "shape.k");
    DAMAGE(t->shape.k = INT64_MIN, "shape.k");
    DAMAGE(t->shape.rank = 1, "shape.rank");
    DAMAGE(t->shape.rank = -1, "shape.rank");
    DAMAGE(t->n_chunks++, "n_chunks");
    DAMAGE(t->n_actions = -1, "n_actions");
    DAMAGE(t->n_actions = INT64_MAX, "n_actions");
    DAMAGE(t->n_actions--, "first");
    DAMAGE(t->n_actions++, "first");
    DAMAGE(t->lowered = 2, "lowered");
    DAMAGE(t->lowered = 1, "actions.pass");
    DAMAGE(t->first = NULL, "first");
    DAMAGE(t->actions = NULL, "actions");
    DAMAGE(t->first[0] = 1, "first");
    DAMAGE(t->first[1] = -1, "first");
    DAMAGE(t->first[1] = INT64_MAX, "first");
    DAMAGE(t->first[2] = t->first[1] - 1, "first");
    DAMAGE(t->actions[0].reserved = 7, "actions.reserved");
    DAMAGE(t->actions[0].pass = 255, "actions.pass");
    DAMAGE(t->actions[0].chunk = INT32_MIN, "actions.chunk");
    DAMAGE(t->actions[0].stage = INT32_MAX, "actions.stage");
    naive_free(s);
    cf_plan_free(plan);
}

/* A file may claim any shape. The cost of checking it depends only on its actions, and here there are none. */
static void *little_alloc(size_t bytes, void *user) {
    (void)user;
    return bytes <= 1 << 16 ? malloc(bytes) : NULL;
}

static void little_release(void *memory, void *user) {
    (void)user;
    free(memory);
}

TEST(empty_schedules_take_no_memory_for_what_they_claim) {
    const cf_allocator little = {little_alloc, little_release, NULL};
    cf_plan *plan = naive_pack(NULL, 0, 2);
    cf_schedule *s = NULL;
    cf_schedule_desc desc = {0};
    cf_error error = {0};
    desc.shape.n_stages = 3;
    REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK);
    CHECK_INT(s->n_actions, 0);
    s->shape.n_virtual = INT32_MAX / 3;
    CHECK_INT(cf_schedule_validate(plan, s, NULL, &little, &error), CF_OK);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(missing_arguments_are_named_by_validate) {
    cf_plan *plan = plan_of(1, 1);
    cf_schedule *s = NULL;
    cf_schedule_desc desc = {0};
    cf_validate_desc limits = {0};
    cf_error error;
    const int64_t minus[2] = {0, -2};
    desc.shape.n_stages = 2;
    REQUIRE(cf_schedule_make(plan, &desc, &s, NULL) == CF_OK);
    CHECK_INT(cf_schedule_validate(NULL, s, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_schedule_validate(plan, NULL, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_schedule_validate(plan, s, NULL, NULL, NULL), CF_OK);
    limits.limits.chunks = -2;
    CHECK_INT(cf_schedule_validate(plan, s, &limits, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "limits.chunks");
    limits.limits.chunks = 0;
    limits.limits.chunks_by_stage = minus;
    CHECK_INT(cf_schedule_validate(plan, s, &limits, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "limits.chunks_by_stage");
    CHECK_INT(error.item, 1);
    limits.limits.chunks_by_stage = NULL;
    limits.limits.state_by_stage = minus;
    CHECK_INT(cf_schedule_validate(plan, s, &limits, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "limits.state_by_stage");
    limits.limits.state_by_stage = NULL;
    limits.limits.per_token.boundary = -4;
    CHECK_INT(cf_schedule_validate(plan, s, &limits, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "limits.per_token.boundary");
    plan->chunks[0].chain = 5;
    CHECK_INT(cf_schedule_validate(plan, s, NULL, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "chunks.chain");
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* ---- places of passes, and the passes that they wait for ---- */

static int64_t linear_find(const cf_schedule *s, int pass, int64_t chunk, int64_t stage) {
    int64_t i;
    for (i = 0; i < s->n_actions; i++) {
        const cf_action *a = &s->actions[i];
        int same = a->pass == pass || (pass == CF_B && a->pass == CF_I) || (pass == CF_I && a->pass == CF_B);
        if (same && a->chunk == chunk && a->stage == stage) return i;
    }
    return -1;
}

/* Returns the place that an R takes: the n-th chunk that a chain keeps takes the place that its (n - K)-th has given
   back. */
static int64_t slot_by_hand(const cf_plan *plan, const cf_schedule *s, int64_t id) {
    const cf_action *a = &s->actions[id];
    int64_t i, chain = plan->chunks[a->chunk].chain, n_kept = 0, n_freed = 0;
    int again;
    if (chain < 0) return -1;
    for (again = 0; again < 2; again++)
        for (i = s->first[naive_stage(s, a->stage)]; i < id; i++) {
            const cf_action *b = &s->actions[i];
            int frees = b->pass == CF_B || b->pass == CF_W;
            if (b->stage != a->stage || plan->chunks[b->chunk].chain != chain) continue;
            if (!again) n_kept += b->keep;
            else if (frees && n_freed++ == n_kept - s->shape.k && a->pass == CF_R) return i;
        }
    return -1;
}

/* Lists the passes that one action waits for, from the definitions of cf_edge_why. Returns their number. */
static int needs_by_hand(const cf_plan *plan, const cf_schedule *s, int64_t id, cf_need *needs) {
    const cf_action *a = &s->actions[id];
    const cf_chunk *c = &plan->chunks[a->chunk];
    int64_t next = c->chain >= 0 && c->index + 1 < plan->chains[c->chain].n_chunks ? a->chunk + 1 : -1;
    int64_t replay = linear_find(s, CF_R, a->chunk, a->stage), from[4] = {-1, -1, -1, -1},
            slot = slot_by_hand(plan, s, id);
    int whys[4] = {0, 0, 0, CF_EDGE_SLOT}, i, n = 0, way = a->pass == CF_F || a->pass == CF_R ? -1 : 1;
    switch (a->pass) {
        case CF_F:
            from[0] = linear_find(s, CF_F, a->chunk, a->stage - 1), whys[0] = CF_EDGE_ACTIVATION;
            if (c->chain >= 0 && c->index > 0) from[1] = linear_find(s, CF_F, a->chunk - 1, a->stage);
            whys[1] = CF_EDGE_STATE;
            break;
        case CF_R:
            if (s->shape.replay == CF_REPLAY_PIPELINE) from[0] = linear_find(s, CF_R, a->chunk, a->stage - 1);
            whys[0] = CF_EDGE_ACTIVATION;
            from[1] = linear_find(s, CF_F, a->chunk, a->stage), whys[1] = CF_EDGE_REPLAY;
            break;
        case CF_B: case CF_I:
            from[0] = linear_find(s, CF_B, a->chunk, a->stage + 1), whys[0] = CF_EDGE_GRADIENT;
            if (next >= 0) from[1] = linear_find(s, CF_B, next, a->stage);
            whys[1] = CF_EDGE_STATE_GRADIENT;
            from[2] = replay >= 0 ? replay : linear_find(s, CF_F, a->chunk, a->stage), whys[2] = CF_EDGE_OWN;
            break;
        case CF_W: from[0] = linear_find(s, CF_I, a->chunk, a->stage), whys[0] = CF_EDGE_OWN; break;
        case CF_SEND_F: case CF_SEND_R: case CF_SEND_B: case CF_RECV_F: case CF_RECV_R: case CF_RECV_B: {
            int back = a->pass == CF_SEND_B || a->pass == CF_RECV_B, sends = (a->pass - CF_SEND_F) % 2 == 0;
            int pass = back ? CF_B : a->pass == CF_SEND_R || a->pass == CF_RECV_R ? CF_R : CF_F;
            from[0] = linear_find(s, pass, a->chunk, sends ? a->stage : a->stage + (back ? 1 : -1));
            whys[0] = back ? CF_EDGE_GRADIENT : CF_EDGE_ACTIVATION;
            break;
        }
        default: break;
    }
    from[3] = slot;
    for (i = 0; i < 4; i++) {
        if (from[i] < 0) continue;
        needs[n].action = from[i];
        needs[n].why = (cf_edge_why)whys[i];
        needs[n].received = -1;
        if (a->pass < CF_COMPUTE_PASS_COUNT && (whys[i] == CF_EDGE_ACTIVATION || whys[i] == CF_EDGE_GRADIENT) &&
            s->lowered && naive_stage(s, a->stage) != naive_stage(s, a->stage + way))
            needs[n].received =
                linear_find(s, way > 0 ? CF_RECV_B : a->pass == CF_F ? CF_RECV_F : CF_RECV_R, a->chunk, a->stage);
        n++;
    }
    return n;
}

static void check_needs(const cf_plan *plan, const cf_schedule *s) {
    cf_schedule_index *index = NULL;
    int64_t i;
    int j, k, pass;
    CHECK_INT(cf_schedule_index_make(plan, s, NULL, &index, NULL), CF_OK);
    REQUIRE(index != NULL);
    for (i = 0; i < s->n_actions; i++) {
        const cf_action *a = &s->actions[i];
        cf_need needs[CF_MAX_NEEDS], wanted[CF_MAX_NEEDS];
        int n = cf_schedule_needs(index, i, needs), n_wanted = needs_by_hand(plan, s, i, wanted), found = 0;
        for (pass = 0; pass < CF_PASS_COUNT; pass++)
            if (cf_schedule_find(index, (cf_pass)pass, a->chunk, a->stage) != linear_find(s, pass, a->chunk, a->stage))
                FAIL("%s of chunk %d on %d stands elsewhere", cf_pass_name((cf_pass)pass), (int)a->chunk,
                     (int)a->stage);
        for (j = 0; j < n; j++)
            for (k = 0; k < n_wanted; k++)
                found += needs[j].action == wanted[k].action && needs[j].why == wanted[k].why &&
                         needs[j].received == wanted[k].received;
        if (n != n_wanted || found != n) FAIL("%s of chunk %d on %d has other needs", cf_pass_name((cf_pass)a->pass),
                                              (int)a->chunk, (int)a->stage);
    }
    CHECK_INT(cf_schedule_find(index, CF_F, -1, 0), -1);
    CHECK_INT(cf_schedule_find(index, CF_F, s->n_chunks, 0), -1);
    CHECK_INT(cf_schedule_find(index, CF_F, s->shape.rank * plan->chunks_per_rank, -1), -1);
    CHECK_INT(cf_schedule_find(index, CF_F, 0, s->shape.n_stages * s->shape.n_virtual), -1);
    cf_schedule_index_free(index);
}

TEST(needs_are_those_of_the_rules) {
    uint64_t seed;
    int n = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(600, 80); seed++) {
        harness_rng rng = {seed};
        problem p;
        problem_draw(&rng, NULL, &p);
        p.desc.max_tries = 2;
        if (problem_order(&p) == CF_OK && problem_own(&p)->schedule->n_actions < 900) {
            check_needs(p.plan, problem_own(&p)->schedule);
            check_needs(p.plan, problem_own(&p)->lowered);
            n++;
        }
        problem_free(&p);
    }
    CHECK(n > 30);
}

/* An index is refused without leaks, whichever allocation fails and whatever is wrong with the schedule. */
TEST(an_index_that_cannot_be_made) {
    harness_rng rng = {7};
    problem p;
    cf_schedule *s = NULL;
    cf_schedule_index *index = (cf_schedule_index *)&rng, *before = index;
    harness_heap heap;
    cf_allocator allocator;
    cf_need needs[CF_MAX_NEEDS];
    cf_error error;
    int64_t fail;
    int again = 1;
    problem_draw(&rng, NULL, &p);
    p.desc.limits.chunks = p.desc.limits.bytes = 0;
    p.desc.limits.chunks_by_stage = p.desc.limits.bytes_by_stage = NULL;
    REQUIRE(cf_schedule_make(p.plan, &p.desc, &s, NULL) == CF_OK);
    allocator.alloc = harness_alloc;
    allocator.release = harness_release;
    allocator.user = &heap;
    for (fail = 1; again; fail++) {
        memset(&heap, 0, sizeof heap);
        heap.fail_at = fail;
        again = cf_schedule_index_make(p.plan, s, &allocator, &index, &error) != CF_OK;
        if (!again) break;
        CHECK_INT(error.code, CF_ERROR_MEMORY);
        CHECK(index == before && heap.live == 0);
    }
    CHECK(fail > 2);
    CHECK_INT(cf_schedule_needs(index, -1, needs), 0);
    CHECK_INT(cf_schedule_needs(index, s->n_actions, needs), 0);
    CHECK_INT(cf_schedule_needs(NULL, 0, needs), 0);
    CHECK_INT(cf_schedule_find(NULL, CF_F, 0, 0), -1);
    cf_schedule_index_free(index);
    cf_schedule_index_free(NULL);
    CHECK_INT(heap.live, 0);
    CHECK_INT(cf_schedule_index_make(p.plan, s, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    index = before;
    s->shape.k = 0;
    CHECK_INT(cf_schedule_index_make(p.plan, s, NULL, &index, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "shape.k");
    CHECK(index == before);
    cf_schedule_free(s);
    problem_free(&p);
}

SUITE(check, CASE(needs_are_those_of_the_rules), CASE(an_index_that_cannot_be_made),
      CASE(one_stage_rules), CASE(rules_between_stages), CASE(rules_of_virtual_stages_on_one_stage),
      CASE(rules_where_a_v_turns), CASE(rules_of_lowered_lists),
      CASE(limits_bind_exactly), CASE(damaged_schedules_are_judged_rightly),
      CASE(damaged_lowered_schedules_are_judged_rightly), CASE(damaged_schedules_of_trees_are_judged_rightly),
      CASE(damaged_members_are_named),
      CASE(missing_arguments_are_named_by_validate),
      CASE(empty_schedules_take_no_memory_for_what_they_claim));
