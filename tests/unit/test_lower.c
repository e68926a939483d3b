/* Tests >>lower: cf_schedule_lower. Its output runs on an independent rendezvous executor (naive.c). */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"

#include <stdlib.h>
#include <string.h>

static void check_list(const cf_schedule *s, int64_t stage, const char *wanted) {
    char text[600];
    int64_t i, n = 0;
    text[0] = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%s%d", n ? " " : "",
                      cf_pass_name((cf_pass)s->actions[i].pass), (int)s->actions[i].chunk);
    CHECK_STR(text, wanted);
}

static cf_plan *pack(const int64_t *lengths, int64_t n, int64_t chunk_size) {
    cf_plan *plan = naive_pack(lengths, n, chunk_size);
    return plan;
}

static cf_schedule *lists(const cf_plan *plan, int64_t n_stages, int64_t k, const int8_t (*actions)[3], int64_t n) {
    cf_schedule *s = naive_new(n_stages, n);
    int64_t i, stage = 0;
    s->shape.replay = CF_REPLAY_PIPELINE;
    s->shape.n_virtual = 1;
    s->shape.k = k;
    s->n_chunks = plan->n_chunks;
    for (i = 0; i < n; i++) {
        while (stage < actions[i][0]) s->first[++stage] = i;
        s->actions[i].stage = actions[i][0];
        s->actions[i].pass = (uint8_t)actions[i][1];
        s->actions[i].chunk = actions[i][2];
        s->actions[i].keep = s->actions[i].pass <= CF_R;
    }
    while (stage < n_stages) s->first[++stage] = n;
    return s;
}

/* Two chunks of one token on two stages, F = 1, B = 2. Worked out by hand. */
TEST(a_small_example) {
    static const int64_t lengths[] = {1, 1};
    static const int8_t actions[][3] = {{0, CF_F, 0}, {0, CF_F, 1}, {0, CF_B, 0}, {0, CF_B, 1},
                                        {1, CF_F, 0}, {1, CF_B, 0}, {1, CF_F, 1}, {1, CF_B, 1}};
    cf_plan *plan = pack(lengths, 2, 1);
    cf_schedule *s = lists(plan, 2, 1, actions, 8), *low = NULL;
    REQUIRE(cf_schedule_lower(plan, s, NULL, &low, NULL) == CF_OK);
    /* Chunk 1's activations are ready at 2, while stage 1 runs B0 from 2 to 4. B1 starts at 5. */
    check_list(low, 0, "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1");
    check_list(low, 1, "RECV_F0 F0 RECV_F1 B0 SEND_B0 F1 B1 SEND_B1");
    cf_schedule_free(low);
    naive_free(s);
    cf_plan_free(plan);
}

/* The gradient of chunk 0 is ready at 4, when stage 0 begins F4: it is received first. */
TEST(a_transfer_comes_before_a_pass_that_begins_at_the_same_time) {
    static const int64_t lengths[] = {1, 1, 1, 1, 1};
    static const int8_t actions[][3] = {{0, CF_F, 0}, {0, CF_F, 1}, {0, CF_F, 2}, {0, CF_F, 3}, {0, CF_F, 4},
                                        {0, CF_B, 0}, {0, CF_B, 1}, {0, CF_B, 2}, {0, CF_B, 3}, {0, CF_B, 4},
                                        {1, CF_F, 0}, {1, CF_B, 0}, {1, CF_F, 1}, {1, CF_B, 1}, {1, CF_F, 2},
                                        {1, CF_B, 2}, {1, CF_F, 3}, {1, CF_B, 3}, {1, CF_F, 4}, {1, CF_B, 4}};
    cf_plan *plan = pack(lengths, 5, 1);
    cf_schedule *s = lists(plan, 2, 1, actions, 20), *low = NULL;
    REQUIRE(cf_schedule_lower(plan, s, NULL, &low, NULL) == CF_OK);
    check_list(low, 0,
               "F0 SEND_F0 F1 SEND_F1 F2 SEND_F2 F3 SEND_F3 RECV_B0 F4 SEND_F4 B0 RECV_B1 B1 RECV_B2 B2 RECV_B3 B3 "
               "RECV_B4 B4");
    cf_schedule_free(low);
    naive_free(s);
    cf_plan_free(plan);
}

/* ---- refusals ---- */

TEST(lower_refuses_what_is_not_sound) {
    static const int64_t lengths[] = {1, 1};
    static const int8_t actions[][3] = {{0, CF_F, 0}, {0, CF_F, 1}, {0, CF_B, 0}, {0, CF_B, 1},
                                        {1, CF_F, 0}, {1, CF_B, 0}, {1, CF_F, 1}, {1, CF_B, 1}};
    cf_plan *plan = pack(lengths, 2, 1);
    cf_schedule *s = lists(plan, 2, 1, actions, 8), *low = NULL, *twice = NULL;
    cf_lower_desc desc = {0};
    cf_timing timing = {0};
    cf_error error;
    harness_heap heap = {0};
    cf_allocator allocator;
    int64_t fail;
    CHECK_INT(cf_schedule_lower(NULL, s, &desc, &low, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_schedule_lower(plan, NULL, &desc, &low, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_schedule_lower(plan, s, &desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    desc.timing = &timing;
    timing.latency = -1;
    CHECK_INT(cf_schedule_lower(plan, s, &desc, &low, &error), CF_ERROR_ARGUMENT);
    timing.latency = 1.7e308;
    timing.all.forward.constant = 1.7e308;
    CHECK_INT(cf_schedule_lower(plan, s, &desc, &low, &error), CF_ERROR_OVERFLOW);
    desc.timing = NULL;
    s->actions[0].pass = CF_B;
    CHECK_INT(cf_schedule_lower(plan, s, &desc, &low, &error), CF_ERROR_SCHEDULE);
    s->actions[0].pass = CF_F;
    CHECK(low == NULL);
    allocator.alloc = harness_alloc;
    allocator.release = harness_release;
    allocator.user = &heap;
    desc.allocator = &allocator;
    for (fail = 1; fail <= 3; fail++) { /* the validator's working space, the function's own, and the result */
        heap.calls = 0;
        heap.fail_at = fail;
        CHECK_INT(cf_schedule_lower(plan, s, &desc, &low, &error), CF_ERROR_MEMORY);
        CHECK(low == NULL && heap.live == 0);
    }
    heap.fail_at = 0;
    CHECK_INT(cf_schedule_lower(plan, s, &desc, &low, &error), CF_OK);
    CHECK_INT(heap.live, 1);
    CHECK_INT(cf_schedule_lower(plan, low, &desc, &twice, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "lowered");
    CHECK(twice == NULL);
    cf_schedule_free(low);
    CHECK_INT(heap.live, 0);
    naive_free(s);
    cf_plan_free(plan);
}

SUITE(lower, CASE(a_small_example),
      CASE(a_transfer_comes_before_a_pass_that_begins_at_the_same_time),
      CASE(lower_refuses_what_is_not_sound));
