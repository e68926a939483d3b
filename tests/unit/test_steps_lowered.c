/* Tests >>steps of lowered schedules. problem_judge checks that every tensor is where it is read (test_problem). */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/problem.h"

#include <string.h>

/* Without transfers in the schedule, steps say that nothing crosses between the stages; all else is the same. */
TEST(without_transfers_nothing_crosses) {
    problem_wants wants = {0};
    int round, crossed = 0;
    wants.trees = 1;
    for (round = 0; round < harness_rounds(300, 60); round++) {
        harness_rng rng = {5300 + (uint64_t)round};
        problem p;
        const problem_rank *r;
        int64_t stage, i, j;
        problem_draw(&rng, &wants, &p);
        r = problem_own(&p);
        (void)problem_make(&p);
        for (stage = 0; stage < PROBLEM_MOST_STAGES && r->steps[stage] != NULL; stage++) {
            const cf_steps *before = r->steps[stage], *after = r->lowered_steps[stage];
            CHECK(before->transfers == 0 && before->n_boundaries == 0);
            CHECK(before->n_slots == after->n_slots && before->peak_tokens == after->peak_tokens);
            CHECK(before->n_paths == after->n_paths && before->peak_state_tokens == after->peak_state_tokens);
            for (i = j = 0; i < before->n; i++, j++) {
                const cf_step *a = &before->steps[i], *b;
                while (after->steps[j].action.pass > CF_W) j++;
                b = &after->steps[j];
                CHECK(a->input == -1 && a->output == -1 && a->peer == -1);
                CHECK(memcmp(&a->action, &b->action, sizeof a->action) == 0 && a->slot == b->slot);
                CHECK(a->state == b->state && a->path == b->path && a->seed == b->seed && a->live == b->live);
                CHECK(a->wants_loss == b->wants_loss && a->clear_state_gradient == b->clear_state_gradient);
                CHECK(a->last_backward == b->last_backward && a->state_tokens == b->state_tokens);
                crossed += b->input >= 0;
            }
        }
        problem_free(&p);
    }
    CHECK(crossed > 100);
}

static cf_result list_steps(const cf_plan *plan, const uint8_t *passes, int64_t n, int64_t stage, cf_error *error) {
    cf_schedule *s = naive_new(2, n);
    cf_steps *steps = NULL;
    cf_result result;
    int64_t i;
    s->shape.replay = CF_REPLAY_PIPELINE;
    s->shape.n_virtual = 1;
    s->shape.k = 1;
    s->n_chunks = plan->n_chunks;
    s->lowered = 1;
    for (i = 0; i < n; i++) {
        s->actions[i].pass = passes[i];
        s->actions[i].stage = (int32_t)stage;
        s->actions[i].keep = passes[i] == CF_F;
    }
    s->first[1] = stage == 0 ? n : 0;
    s->first[2] = n;
    memset(error, 0, sizeof *error);
    result = cf_steps_make(plan, s, stage, 0, NULL, &steps, error);
    cf_steps_free(steps);
    naive_free(s);
    return result;
}

TEST(impossible_transfers_are_named) {
    static const uint8_t good[] = {CF_F, CF_SEND_F, CF_RECV_B, CF_B};
    static const uint8_t early[] = {CF_SEND_F, CF_F, CF_RECV_B, CF_B};
    static const uint8_t twice[] = {CF_F, CF_SEND_F, CF_SEND_F, CF_RECV_B, CF_B};
    static const uint8_t again[] = {CF_F, CF_SEND_F, CF_RECV_B, CF_RECV_B, CF_B};
    static const uint8_t late[] = {CF_F, CF_SEND_F, CF_B, CF_RECV_B};
    static const uint8_t edge[] = {CF_RECV_F, CF_F, CF_SEND_F, CF_RECV_B, CF_B};
    static const uint8_t unread[] = {CF_F, CF_SEND_F, CF_RECV_B, CF_B, CF_RECV_R};
    static const int64_t lengths[] = {2};
    cf_plan *plan = NULL;
    cf_error error;
    REQUIRE((plan = naive_pack(lengths, 1, 2)) != NULL);
    CHECK_INT(list_steps(plan, good, 4, 0, &error), CF_OK);
    CHECK_INT(list_steps(plan, early, 4, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 0);
    CHECK_INT(list_steps(plan, twice, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 2);
    CHECK_INT(list_steps(plan, again, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 3);
    CHECK_INT(list_steps(plan, late, 4, 0, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 2 && strstr(error.text, "before its RECV_B") != NULL);
    CHECK_INT(list_steps(plan, edge, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 0 && strstr(error.text, "no other stage") != NULL);
    CHECK_INT(list_steps(plan, unread, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 4);
    cf_plan_free(plan);
}

SUITE(steps_lowered, CASE(without_transfers_nothing_crosses),
      CASE(impossible_transfers_are_named));
