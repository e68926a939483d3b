/* Tests tools/command/schedule_csv.h: schedules written to CSV and read back. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"
#include "tools/command/schedule_csv.h"
#include "tools/command/schedule_new.h"
#include "tools/command/text_out.h"

#include <stdlib.h>
#include <string.h>

/* Packs a chain of n_dependent chunks (0: none) and n sequences that fill a chunk each. */
static cf_plan *plan_of(int64_t n_dependent, int64_t n) {
    int64_t lengths[40], i;
    cf_plan *plan = NULL;
    lengths[0] = 2 * n_dependent;
    for (i = 1; i <= n; i++) lengths[i] = 2;
    plan = naive_pack(lengths, n + 1, 2);
    return plan;
}

static cf_schedule *read(const cf_plan *plan, const char *csv, const schedule_csv_desc *desc) {
    cf_schedule *s = NULL;
    cf_error error = {0};
    if (schedule_csv_read(csv, strlen(csv), plan, desc, &s, NULL, &error) != CF_OK) FAIL("%s", error.text);
    return s;
}

/* Compares a list with text such as "F0@0 B0*@2": pass, chunk, virtual stage; "*" if nothing is kept. */
static void check_list(const cf_schedule *s, int64_t stage, const char *wanted) {
    char got[900];
    int64_t i, n = 0;
    got[0] = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        n += snprintf(got + n, sizeof got - (size_t)n, "%s%s%d%s@%d", n ? " " : "", cf_pass_name((cf_pass)a->pass),
                      (int)a->chunk, a->pass <= CF_R && !a->keep ? "*" : "", (int)a->stage);
    }
    CHECK_STR(got, wanted);
}

/* ---- goldens ---- */

/* Placement as in PyTorch's ZBV files: of 2 ranks, rank r has the virtual stages r and 3 - r. Nothing is sent where the
   V turns. */
TEST(reads_and_writes_rows_in_a_v) {
    static const char csv[] = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1\r\n"
                              "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\r\n";
    static const char *const elsewhere = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1\n"
                                         "1F0,1F1,2F0,0F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n";
    static const char *const both = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1\n"
                                    "1F0,1F1,3F0,3F1,3I0,1I0,3I1,1I1,3W0,1W0,3W1,1W1\n";
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = read(plan, csv, NULL), *low = NULL, *again = NULL;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    schedule_csv_desc desc;
    cf_error error;
    REQUIRE(s != NULL);
    memset(&desc, 0, sizeof desc);
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK(s->shape.n_stages == 2 && s->shape.n_virtual == 2 && s->shape.placement == CF_PLACEMENT_V && s->lowered == 0);
    check_list(s, 0, "F0@0 F1@0 F0@3 I0@3 F1@3 I1@3 I0@0 W0@3 W1@3 I1@0 W0@0 W1@0");
    check_list(s, 1, "F0@1 F0@2 F1@1 F1@2 I0@2 I0@1 I1@2 I1@1 W0@2 W0@1 W1@2 W1@1");
    CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, csv);
    REQUIRE(cf_schedule_lower(plan, s, NULL, &low, &error) == CF_OK);
    t.n = 0;
    CHECK_INT(schedule_csv_write(plan, low, &desc, harness_collect, &t, &error), CF_OK);
    CHECK(strstr(t.at, "0SEND_F") != NULL && strstr(t.at, "1SEND_F") == NULL && strstr(t.at, "2RECV_F") == NULL &&
          strstr(t.at, "2SEND_B") == NULL);
    again = read(plan, t.at, NULL);
    REQUIRE(again != NULL);
    CHECK(again->shape.placement == CF_PLACEMENT_V && again->lowered == 1 && again->n_actions == low->n_actions);
    CHECK(memcmp(again->actions, low->actions, (size_t)low->n_actions * sizeof *low->actions) == 0);
    cf_schedule_free(again);
    again = NULL;
    CHECK_INT(schedule_csv_read(elsewhere, strlen(elsewhere), plan, NULL, &again, NULL, &error), CF_ERROR_TEXT);
    CHECK(error.item == 2 && error.got == 13 && strstr(error.text, "another row") != NULL);
    CHECK_INT(schedule_csv_read(both, strlen(both), plan, NULL, &again, NULL, &error), CF_ERROR_TEXT);
    CHECK(error.item == 2 && error.got == 9 && strstr(error.text, "\"3F0\"") != NULL);
    CHECK(again == NULL);
    free(t.at);
    cf_schedule_free(low);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* The beginning of a PyTorch zero-bubble file (two ranks, two stages each, empty cells), with B for the gradient of the
   inputs. */
TEST(reads_a_zero_bubble_file_of_the_older_kind) {
    static const char csv[] = "0F0,0F1,2F0,,2F1,2B0,2W0,2B1,0B0,0W0,2W1,0B1,0W1\r\n"
                              ",1F0,1F1,3F0,3B0,3F1,3B1,3W0,1B0,1W0,3W1,1B1,1W1\r\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc = {0};
    cf_schedule *s;
    cf_error error;
    desc.legacy = 1;
    s = read(plan, csv, &desc);
    REQUIRE(s != NULL);
    CHECK(s->shape.n_stages == 2 && s->shape.n_virtual == 2 && s->shape.k == 1 && s->lowered == 0 &&
          s->kind == CF_SCHEDULE_DEFAULT);
    check_list(s, 0, "F0@0 F1@0 F0@2 F1@2 I0@2 W0@2 I1@2 I0@0 W0@0 W1@2 I1@0 W1@0");
    check_list(s, 1, "F0@1 F1@1 F0@3 I0@3 F1@3 I1@3 W0@3 I0@1 W0@1 W1@3 I1@1 W1@1");
    cf_schedule_free(s);
    s = NULL;
    /* In today's dialect B is a whole backward, so a W after it is refused. */
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, NULL, &s, NULL, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "actions.pass");
    CHECK(s == NULL);
    cf_plan_free(plan);
}

TEST(bw_is_the_whole_backward_of_older_files) {
    static const char csv[] = "0F0,0BW0,0F1,0B1,0W1\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc = {0};
    cf_schedule *s = NULL;
    cf_error error;
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, NULL, &error), CF_ERROR_TEXT);
    CHECK(error.item == 1 && error.got == 5 && strstr(error.text, "\"0BW0\"") != NULL &&
          strstr(error.text, "legacy") != NULL);
    desc.legacy = 1;
    s = read(plan, csv, &desc);
    REQUIRE(s != NULL);
    check_list(s, 0, "F0@0 B0@0 F1@0 I1@0 W1@0");
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* Writes one schedule in both dialects. The owner of a transfer is the stage that runs it. */
TEST(reads_and_writes_both_dialects) {
    static const char compute[] = "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n";
    static const char comms[] = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\r\n"
                                "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\r\n";
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = read(plan, compute, NULL), *low = NULL, *again;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    schedule_csv_desc desc;
    cf_error error;
    REQUIRE(s != NULL);
    memset(&desc, 0, sizeof desc);
    CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, compute);
    REQUIRE(cf_schedule_lower(plan, s, NULL, &low, &error) == CF_OK);
    t.n = 0;
    CHECK_INT(schedule_csv_write(plan, low, NULL, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, compute);
    t.n = 0;
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK_INT(schedule_csv_write(plan, low, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, comms);
    again = read(plan, comms, NULL);
    REQUIRE(again != NULL);
    CHECK_INT(again->lowered, 1);
    CHECK(memcmp(again->actions, low->actions, (size_t)low->n_actions * sizeof *low->actions) == 0);
    cf_schedule_free(again);
    t.n = 0;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "format");
    CHECK_INT(error.item, -1);
    CHECK_INT((int64_t)t.n, 0);
    free(t.at);
    cf_schedule_free(low);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(replay_is_an_extension) {
    static const char csv[] = "0F0,0F1,0B1,0R0,0B0,0F2,0B2\r\n";
    cf_plan *plan = plan_of(2, 1);
    cf_schedule_desc order = {0};
    cf_schedule *s = NULL, *again;
    schedule_csv_desc desc = {0};
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_PIPELINE;
    REQUIRE(cf_schedule_make(plan, &order, &s, &error) == CF_OK);
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "chunks") == 0 && error.item == 0 && strstr(error.text, "split sequence") != NULL);
    CHECK_INT((int64_t)t.n, 0);
    desc.extensions = 1;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, csv);
    desc.replay = CF_REPLAY_LOCAL;
    desc.kind = CF_SCHEDULE_PAPER;
    again = read(plan, csv, &desc);
    REQUIRE(again != NULL);
    check_list(again, 0, "F0*@0 F1@0 B1@0 R0@0 B0@0 F2@0 B2@0");
    CHECK(again->shape.replay == CF_REPLAY_LOCAL && again->kind == CF_SCHEDULE_PAPER);
    free(t.at);
    cf_schedule_free(again);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* The last stage runs its forwards in a different order from the chunks. */
TEST(microbatches_are_numbered_as_the_last_stage_runs_them) {
    static const char csv[] = "0F1,0F0,0F2,0B0,0B1,0B2\r\n1F0,1B0,1F1,1B1,1F2,1B2\r\n";
    static const char mapping[] = "microbatch,chunk\r\n0,2\r\n1,0\r\n2,1\r\n";
    static const int32_t order[] = {2, 0, 1};
    const int64_t lengths[] = {5, 3, 4};
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    schedule_csv_desc desc = {0};
    cf_schedule *s;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    int32_t chunks[3] = {9, 9, 9};
    cf_error error;
    pack.chunk_size = 6;
    pack.max_slices = 1;
    REQUIRE(cf_pack(lengths, 3, &pack, &plan, NULL) == CF_OK && plan->n_chunks == 3);
    desc.chunks = order;
    s = read(plan, csv, &desc);
    REQUIRE(s != NULL);
    check_list(s, 0, "F0@0 F2@0 F1@0 B2@0 B0@0 B1@0");
    check_list(s, 1, "F2@1 B2@1 F0@1 B0@1 F1@1 B1@1");
    CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, csv);
    CHECK_INT(schedule_csv_microbatches(plan, s, chunks, &error), CF_OK);
    CHECK(memcmp(chunks, order, sizeof order) == 0);
    t.n = 0;
    CHECK_INT(schedule_csv_write_microbatches(plan, s, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, mapping);
    memset(chunks, 0, sizeof chunks);
    CHECK_INT(schedule_csv_read_microbatches(mapping, strlen(mapping), plan, 0, chunks, &error), CF_OK);
    CHECK(memcmp(chunks, order, sizeof order) == 0);
    { /* the plan with its chunks in that order */
        const int64_t was[] = {plan->chunks[2].tokens, plan->chunks[0].tokens, plan->chunks[1].tokens};
        CHECK_INT(schedule_csv_renumber(plan, s, NULL, &error), CF_OK);
        CHECK(plan->chunks[0].tokens == was[0] && plan->chunks[1].tokens == was[1] && plan->chunks[2].tokens == was[2]);
        CHECK_INT(cf_plan_validate(plan, lengths, 3, NULL, &error), CF_OK);
        check_list(s, 1, "F0@1 B0@1 F1@1 B1@1 F2@1 B2@1");
        t.n = 0;
        CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &t, &error), CF_OK);
        CHECK_STR(t.at, csv);
    }
    free(t.at);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(bad_microbatches_are_refused_with_their_place) {
    static const struct {
        const char *csv;
        int64_t line, column;
        const char *words;
    } bad[] = {{"", 0, 0, "first line"},
               {"chunk,microbatch\n0,0\n1,1\n", 1, 1, "first line"},
               {"microbatch,chunk,\n0,0\n1,1\n", 1, 12, "first line"},
               {"microbatch\nchunk\n0,0\n1,1\n", 1, 1, "first line"},
               {"microbatch,chunk\n,0\n1,1\n", 2, 1, "a line is"},
               {"microbatch,chunk\n0,\n1,1\n", 2, 3, "a line is"},
               {"microbatch,chunk\n0\n0\n1,1\n", 2, 1, "two numbers"},
               {"microbatch,chunk\n0,0\n1", 3, 1, "two numbers"},
               {"microbatch,chunk\n0,0\n", 2, 3, "a line is"},
               {"microbatch,chunk\n0,0,1\n1,1\n", 2, 3, "two numbers"},
               {"microbatch,chunk\n1,0\n0,1\n", 2, 3, "counted up"},
               {"microbatch,chunk\n0,0\n1,0\n", 3, 3, "already"},
               {"microbatch,chunk\n0,0\n1,2\n", 3, 3, "no chunk of the rank"},
               {"microbatch,chunk\n0,0\n1,x\n", 3, 3, "a line is"},
               {"microbatch,chunk\n0,0\n1,1\n2,2\n", 4, 1, "no more"}};
    cf_plan *plan = plan_of(0, 2);
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        int32_t chunks[2] = {7, 7};
        cf_error error = {0};
        harness_note("%s", bad[i].csv);
        CHECK_INT(schedule_csv_read_microbatches(bad[i].csv, strlen(bad[i].csv), plan, 0, chunks, &error),
                  CF_ERROR_TEXT);
        if (bad[i].line > 0) CHECK(error.item == bad[i].line && error.got == bad[i].column);
        if (!CHECK(strstr(error.text, bad[i].words) != NULL)) FAIL("%s", error.text);
        CHECK_INT(schedule_csv_read_microbatches(bad[i].csv, strlen(bad[i].csv), plan, 0, chunks, NULL), CF_ERROR_TEXT);
        CHECK(chunks[0] == 7 && chunks[1] == 7);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

/* Each version of PyTorch gets the cells that it needs besides the transfers. */
TEST(transfers_are_written_for_a_version) {
    static const char *const wanted[SCHEDULE_CSV_TORCH_COUNT] = {
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\r\n"
        "1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1\r\n",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
        "1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD\r\n",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,"
        "0WAIT_REDUCE_GRAD\r\n"
        "1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,"
        "1WAIT_SEND_B1\r\n"};
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = read(plan, wanted[0], NULL), *again;
    schedule_csv_extras *extras = NULL;
    schedule_csv_desc desc;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    int version;
    REQUIRE(s != NULL);
    memset(&desc, 0, sizeof desc);
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    for (version = 0; version < SCHEDULE_CSV_TORCH_COUNT; version++) {
        t.n = 0;
        desc.torch = (schedule_csv_torch)version;
        CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
        CHECK_STR(t.at, wanted[version]);
        again = NULL;
        CHECK_INT(schedule_csv_read(t.at, t.n, plan, NULL, &again, &extras, &error), CF_OK);
        REQUIRE(again != NULL);
        CHECK_INT(extras->n, version == 0 ? 0 : version == 1 ? 2 : 8);
        CHECK(again->n_actions == s->n_actions &&
              memcmp(again->actions, s->actions, (size_t)s->n_actions * sizeof *s->actions) == 0);
        cf_schedule_free(again);
        schedule_csv_extras_free(extras);
    }
    desc.torch = SCHEDULE_CSV_TORCH_COUNT;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "torch");
    free(t.at);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(what_is_no_pass_here_is_kept) {
    static const char csv[] = "0UNSHARD,,0F0,0F1,,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD,\r\n"
                              ",1F0,1B0,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\r\n";
    static const char bare[] = "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n";
    static const char full[] =
        "0UNSHARD,0F0,0F1,0B0,0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\r\n"
        "1F0,1B0,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD\r\n"; /* no empty cells among transfers */
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = NULL;
    schedule_csv_extras *extras = NULL;
    schedule_csv_desc desc;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    REQUIRE(schedule_csv_read(csv, strlen(csv), plan, NULL, &s, &extras, &error) == CF_OK);
    memset(&desc, 0, sizeof desc);
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, bare);
    t.n = 0;
    desc.extras = extras;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, csv);
    t.n = 0;
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, full);
    t.n = 0;
    desc.format = SCHEDULE_CSV_DEFAULT;
#define SPOILT(member, value)                                                                         \
    do {                                                                                              \
        schedule_csv_extra was = extras->items[3];                                                    \
        extras->items[3].member = value;                                                              \
        CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_ERROR_ARGUMENT);        \
        CHECK(strcmp(error.field, "extras.items") == 0 && error.item >= 3 && error.item <= 4 && t.n == 0); \
        extras->items[3] = was;                                                                       \
    } while (0)
    SPOILT(kind, SCHEDULE_CSV_EXTRA_COUNT);
    SPOILT(kind, -1);
    SPOILT(row, 2);
    SPOILT(row, -1);
    SPOILT(row, 1);
    SPOILT(stage, -1);
    SPOILT(before, 5);
    SPOILT(before, -1);
    SPOILT(before, 1);
    CHECK_INT(extras->items[3].kind, SCHEDULE_CSV_REDUCE_GRAD);
    extras->items[3].chunk = 2;
    SPOILT(kind, SCHEDULE_CSV_WAIT_SEND_F);
    /* an action alone: set on its row, which is run to its end */
    for (extras->items[0].row = 0; extras->items[0].row < 2; extras->items[0].row++) {
        const int32_t row = extras->items[0].row;
        const int64_t n = extras->n;
        extras->n = 1;
        for (extras->items[0].before = 0; extras->items[0].before < 10; extras->items[0].before++) {
            int lies = extras->items[0].before >= 4 * row && extras->items[0].before <= 4 * row + 4;
            CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, NULL), lies ? CF_OK : CF_ERROR_ARGUMENT);
        }
        extras->n = n;
    }
    free(t.at);
    schedule_csv_extras_free(extras);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* Only the rank's own chunks count. Each of two ranks has a chain, or only one of them, or none. */
TEST(chains_of_other_ranks_are_no_hindrance) {
    static const int64_t lengths[][4] = {{8, 8, 0, 0}, {8, 4, 4, 0}, {4, 4, 4, 4}};
    int which, rank, n_refused = 0;
    for (which = 0; which < 3; which++) {
        cf_pack_desc pack = {0};
        cf_plan *plan = NULL;
        pack.chunk_size = 4;
        pack.n_ranks = 2;
        REQUIRE(cf_pack(lengths[which], 4, &pack, &plan, NULL) == CF_OK);
        for (rank = 0; rank < 2; rank++) {
            cf_schedule_desc order = {0};
            cf_schedule *s = NULL;
            harness_text t = {NULL, 0, 0, 0, 0, 0};
            cf_error error = {0};
            int64_t i, item = -1;
            order.kind = CF_SCHEDULE_GPIPE;
            order.shape.k = 2;
            order.shape.n_stages = 2;
            order.shape.rank = rank;
            REQUIRE(cf_schedule_make(plan, &order, &s, NULL) == CF_OK);
            for (i = (rank + 1) * plan->chunks_per_rank - 1; i >= rank * plan->chunks_per_rank; i--)
                if (plan->chunks[i].chain >= 0) item = i;
            n_refused += item >= 0;
            CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &t, &error),
                      item >= 0 ? CF_ERROR_ARGUMENT : CF_OK);
            if (item >= 0) CHECK(strcmp(error.field, "chunks") == 0 && error.item == item && t.n == 0);
            CHECK_INT(schedule_csv_renumber(plan, s, NULL, &error), item >= 0 ? CF_ERROR_ARGUMENT : CF_OK);
            free(t.at);
            cf_schedule_free(s);
        }
        cf_plan_free(plan);
    }
    CHECK_INT(n_refused, 3);
}

TEST(what_pytorch_cannot_run_is_refused) {
    static const char replayed[] = "0F0,0F1,0B1,0R0,0B0\r\n";
    cf_plan *plan = plan_of(0, 2), *split = plan_of(2, 1);
    cf_schedule *s = read(plan, replayed, NULL), *grouped = read(split, "0F0,0F1,0B1,0B0,0F2,0B2\r\n", NULL);
    schedule_csv_desc desc;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    REQUIRE(s != NULL && grouped != NULL);
    memset(&desc, 0, sizeof desc);
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "actions.pass") == 0 && error.item == 3 && strstr(error.text, "is a replay") != NULL);
    CHECK_INT(schedule_csv_write(split, grouped, &desc, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "chunks") == 0 && error.item == 0 && strstr(error.text, "keys and values") != NULL);
    CHECK_INT(schedule_csv_renumber(split, grouped, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "chunks") == 0 && strstr(error.text, "dependent chunk") != NULL);
    CHECK_INT((int64_t)t.n, 0);
    desc.extensions = 1;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, replayed);
    CHECK_INT(schedule_csv_write(split, grouped, &desc, harness_collect, &t, &error), CF_OK);
    free(t.at);
    cf_schedule_free(s);
    cf_schedule_free(grouped);
    cf_plan_free(plan);
    cf_plan_free(split);
}

/* ---- what PyTorch writes ---- */

/* Loads a file that tests/torch/dump.py made with the two versions. A file that both versions write alike is kept once,
   with the later version. */
static char *load_dump(const char *version, const char *kind, int ranks, int n, const char *what, size_t *bytes) {
    char path[160], *data;
    FILE *file;
    snprintf(path, sizeof path, "tests/torch/%s/%s_p%d_n%d_%s.csv", version, kind, ranks, n, what);
    harness_note("%s", path);
    file = fopen(path, "rb");
    if (!file && strcmp(version, "2.15") != 0) return load_dump("2.15", kind, ranks, n, what, bytes);
    if (!file) {
        FAIL("%s is not there; run in the project's folder", path);
        return NULL;
    }
    data = (char *)calloc(1, 1 << 16);
    if (!data) abort();
    *bytes = fread(data, 1, (1 << 16) - 1, file);
    CHECK(*bytes > 0 && *bytes < (1 << 16) - 1);
    fclose(file);
    return data;
}

/* Drops cells that the writer never makes, because only sharded parameters need them. Drops receives as well, around
   which PyTorch places other cells without a fixed order. */
static void drop_others(char *csv) {
    static const char *const words[] = {"UNSHARD", "RESHARD", "RECV_F", "RECV_B"};
    int i;
    for (i = 0; i < 4; i++) {
        char *at;
        while ((at = strstr(csv, words[i])) != NULL) {
            char *begin = at, *end = at + strlen(words[i]);
            while (begin > csv && begin[-1] >= '0' && begin[-1] <= '9') begin--;
            while (*end >= '0' && *end <= '9') end++;
            if (*end == ',') end++;
            else if (begin > csv && begin[-1] == ',') begin--;
            memmove(begin, end, strlen(end) + 1);
        }
    }
}

/* Reads a dump, times it, and writes it back cell for cell. Deferred receives deadlock if a send waits for its
   receiver. The writer puts its added cells where PyTorch's lowering puts them. */
static void replay_dump(const char *version, const char *kind, int ranks, int n, const char *what, int as_torch) {
    size_t bytes = 0;
    char *data = load_dump(version, kind, ranks, n, what, &bytes);
    cf_plan *plan = plan_of(0, n);
    cf_schedule *s = NULL;
    schedule_csv_extras *extras = NULL;
    schedule_csv_desc desc = {0};
    cf_timeline *timeline = NULL;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error = {0};
    if (!data) goto done;
    desc.buffered = strcmp(what, "deferred-recv") == 0;
    if (!CHECK_INT(schedule_csv_read(data, bytes, plan, &desc, &s, &extras, &error), CF_OK)) FAIL("%s", error.text);
    if (!s) goto done;
    CHECK(s->shape.n_stages == ranks && s->lowered == (strstr(data, "SEND") != NULL && !desc.buffered));
    CHECK_INT(s->shape.placement, strcmp(kind, "zbv") == 0 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP);
    if (CHECK_INT(cf_simulate(plan, s, NULL, &timeline, &error), CF_OK))
        CHECK(timeline->makespan == pipeline_makespan(plan, s, NULL, NULL, NULL));
    desc.extras = extras;
    if (strstr(data, "SEND") != NULL) desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, data);
    if (as_torch) {
        t.n = 0;
        desc.extras = NULL;
        desc.torch = strcmp(version, "2.14") == 0 ? SCHEDULE_CSV_TORCH_2_14 : SCHEDULE_CSV_TORCH_2_15;
        CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
        drop_others(t.at);
        drop_others(data);
        CHECK_STR(t.at, data);
    }
done:
    free(t.at);
    free(data);
    cf_timeline_free(timeline);
    schedule_csv_extras_free(extras);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

static const char *const versions[] = {"2.14", "2.15"};

TEST(dumps_of_pytorch_are_taken_and_written_back) {
    static const char *const kinds[] = {"gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble",
                                        "zbv"};
    static const char *const variants[] = {"deferred-recv", "deferred-wait", "one-send"};
    int v, k, ranks, i;
    for (v = 0; v < 2; v++) {
        for (k = 0; k < 6; k++) {
            for (ranks = 2; ranks <= 4; ranks += 2) {
                replay_dump(versions[v], kinds[k], ranks, 2 * ranks, k == 1 ? "mended" : "order", 0);
                replay_dump(versions[v], kinds[k], ranks, 2 * ranks, "comms", 1);
            }
            for (i = 0; i < (v == 0 ? 1 : 3) && k >= 2; i++) replay_dump(versions[v], kinds[k], 2, 4, variants[i], 0);
        }
    }
    harness_note("%s", "");
}

/* DualPipeV runs two passes as one. 1F1B's _get_pipeline_order numbers the last rank's forwards from 1, which PyTorch's
   own validation refuses as well. */
TEST(dumps_of_pytorch_that_are_refused) {
    static const struct {
        const char *kind, *what, *words;
    } bad[] = {{"dualpipev", "order", "OVERLAP_F_B"},
               {"dualpipev", "comms", "OVERLAP_F_B"},
               {"1f1b", "order", "no chunk for this microbatch"},
               {"zbv", "deferred-recv", "deadlock"}};
    int v, i, ranks;
    for (v = 0; v < 2; v++) {
        for (i = 0; i < 4; i++) {
            for (ranks = 2; ranks <= (i < 3 ? 4 : 2); ranks += 2) {
                size_t bytes = 0;
                char *data = load_dump(versions[v], bad[i].kind, ranks, 2 * ranks, bad[i].what, &bytes);
                cf_plan *plan = plan_of(0, 2 * ranks);
                cf_schedule *s = NULL;
                cf_error error = {0};
                if (data) CHECK_INT(schedule_csv_read(data, bytes, plan, NULL, &s, NULL, &error),
                                    i < 3 ? CF_ERROR_TEXT : CF_ERROR_SCHEDULE);
                if (!CHECK(strstr(error.text, bad[i].words) != NULL)) FAIL("%s", error.text);
                CHECK(s == NULL);
                cf_plan_free(plan);
                free(data);
            }
        }
    }
    harness_note("%s", "");
}

/* ---- what is taken ---- */

TEST(line_ends_blanks_and_empty_cells) {
    static const char *const good[] = {
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",       "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\n",
        "0F0,,0F1,,,0B0,0B1,\n,1F0,1B0,1F1,1B1,,", " 0F0 ,\t0F1,0B0,0B1 \r\n1F0,1B0,1F1, ,1B1\r\n",
        ",0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1,"};
    cf_plan *plan = plan_of(0, 2);
    size_t i;
    for (i = 0; i < sizeof good / sizeof good[0]; i++) {
        cf_schedule *s;
        harness_note("text %d", (int)i);
        s = read(plan, good[i], NULL);
        if (s == NULL) continue;
        check_list(s, 0, "F0@0 F1@0 B0@0 B1@0");
        check_list(s, 1, "F0@1 B0@1 F1@1 B1@1");
        cf_schedule_free(s);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

TEST(an_empty_plan_has_empty_lines) {
    cf_plan *plan = NULL;
    cf_schedule *s;
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    REQUIRE((plan = naive_pack(NULL, 0, 2)) != NULL);
    s = read(plan, "\r\n\r\n", NULL);
    REQUIRE(s != NULL);
    CHECK(s->shape.n_stages == 2 && s->n_actions == 0 && s->shape.n_virtual == 1);
    CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &t, NULL), CF_OK);
    CHECK_STR(t.at, "\r\n\r\n");
    free(t.at);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* ---- what is not ---- */

TEST(bad_text_is_refused_with_its_place) {
    static const struct {
        const char *csv;
        int64_t line, column;
        const char *words;
    } bad[] = {
        {"", 1, 1, "no rows"},
        {"0F0,0B0x", 1, 5, "\"0B0x\""},
        {"0F0,0B0 0F1", 1, 5, "ends with the number"},
        {"0F0,0B", 1, 5, "ends with the number"},
        {"0F0,B0", 1, 5, "starts with the number"},
        {"0F0,-1B0", 1, 5, "starts with the number"},
        {"0F0,+1B0", 1, 5, "starts with the number"},
        {"0F0,00B0", 1, 5, "starts with the number"},
        {"0F0,0B01", 1, 5, "ends with the number"},
        {"0F0,0B2", 1, 5, "no chunk for this"},
        {"0F0,0B4294967296", 1, 5, "ends with the number"},
        {"0F0,99999999999999999999B0", 1, 5, "starts with the number"},
        {"0F0,0f0", 1, 5, "no such pass"},
        {"0F0,0Q0", 1, 5, "no such pass"},
        {"0F0,0BI0", 1, 5, "no such pass"},
        {"0F0,0BW0", 1, 5, "legacy"},
        {"0F0,0", 1, 5, "no such pass"},
        {"0F0,\"0B0\"", 1, 5, "starts with the number"},
        {"0F0;0B0", 1, 1, "ends with the number"},
        {"0F0,0UNSHARD0", 1, 5, "ends with its name"},
        {"0F0,0REDUCE_GRADS", 1, 5, "no such pass"},
        {"0F0,0WAIT_SEND_F", 1, 5, "ends with the number"},
        {"0F0,0WAIT_SEND_B2", 1, 5, "no chunk for this"},
        {"0F0,0WAIT0", 1, 5, "no such pass"},
        {"0F0,0B0,0F1,0B1,1RESHARD\n1F0,1B0,1F1,1B1", 1, 17, "another row"},
        {"0F0,0B0,0F1,0B1,\n1F0,1B0,1F1,1B1,1WAIT_SEND_F0", 1, 17, "empty cell"},
        {"0F0,(0F1;0B0)OVERLAP_F_B", 1, 5, "OVERLAP_F_B, two passes"},
        {"0F0,(0F1;0B0)", 1, 5, "starts with the number"},
        {"0F0,0B0,0F1,0B1\n\r1F0", 2, 1, "starts with the number"},
        {"0F0,0B0,0F1,0B1\n1F0,  1X1", 2, 7, "\"1X1\""},
        {"\xEF\xBB\xBF" "0F0,0B0,0F1,0B1", 1, 1, "\"???0F0\""},
        {"0F0,0SEND_F0,0F1,,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0", 1, 18, "empty cell"},
        {",0F0,0SEND_F0", 1, 1, "empty cell"},
        {"0F0,0B0,0F1,0B1,0F0,0B0,0F1,0B1\n0F0,1B0,1F1,1B1,1F0,1B0,1F1,1B1", 2, 1, "another row"}};
    cf_plan *plan = plan_of(0, 2);
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cf_schedule *s = NULL;
        cf_error error;
        size_t n = strlen(bad[i].csv);
        char *exact = (char *)malloc(n + 1); /* so that the sanitizer sees a read past the end */
        if (!exact) abort();
        memcpy(exact, bad[i].csv, n);
        memset(&error, 0, sizeof error);
        harness_note("%s", bad[i].csv);
        CHECK_INT(schedule_csv_read(exact, n, plan, NULL, &s, NULL, &error), CF_ERROR_TEXT);
        CHECK_STR(error.field, "csv");
        CHECK_INT(error.item, bad[i].line);
        CHECK_INT(error.got, bad[i].column);
        if (!CHECK(strstr(error.text, bad[i].words) != NULL)) FAIL("%s", error.text);
        CHECK(s == NULL);
        free(exact);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

/* Any number as a virtual stage or a microbatch is read correctly, or refused. */
TEST(numbers_of_any_size) {
    static const char *const numbers[] = {"1073741823", "1073741824", "2147483646", "2147483647", "2147483648",
                                          "4294967295", "4294967296", "4294967297", "9223372036854775807",
                                          "9223372036854775808", "18446744073709551615", "18446744073709551616"};
    cf_plan *plan = plan_of(0, 2);
    size_t i;
    int microbatch;
    for (i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        for (microbatch = 0; microbatch < 2; microbatch++) {
            char text[80];
            const char *why = microbatch ? "ends with the number" : "starts with the number";
            cf_schedule *s = NULL;
            cf_error error = {0};
            snprintf(text, sizeof text, microbatch ? "0F0,0B0,0F1,0B%s" : "0F0,0B0,0F1,%sB1", numbers[i]);
            if (i < 4) why = microbatch ? "no chunk for this" : "";
            harness_note("%s", text);
            CHECK(schedule_csv_read(text, strlen(text), plan, NULL, &s, NULL, &error) != CF_OK);
            if (!CHECK(strstr(error.text, why) != NULL)) FAIL("%s", error.text);
            CHECK(s == NULL);
        }
    harness_note("%s", "");
    cf_plan_free(plan);
}

/* Has one empty cell more than there may be actions. It takes 128 MiB of commas, so it runs only with FULL=1. */
TEST(more_cells_than_actions_are_refused) {
    const size_t n = (size_t)harness_rounds((int)CF_MAX_ACTIONS, 0);
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = NULL;
    cf_error error = {0};
    char *text = n > 0 ? (char *)malloc(n) : NULL;
    if (text) {
        memset(text, ',', n);
        CHECK_INT(schedule_csv_read(text, n, plan, NULL, &s, NULL, &error), CF_ERROR_LIMIT);
        CHECK(strcmp(error.field, "n_actions") == 0 && error.wanted == CF_MAX_ACTIONS &&
              error.got == CF_MAX_ACTIONS + 1);
    }
    free(text);
    cf_plan_free(plan);
}

TEST(sound_text_of_an_unsound_schedule_is_refused) {
    static const struct {
        const char *csv, *field;
        int64_t wanted, got; /* for a number of the whole schedule */
    } bad[] = {{"0F0,0B0,0F1", "n_actions", 4, 3},
               {"0F0,0B0,0F1,0F1", "actions.pass", 0, 0},
               {"0F0,0B0,0B1,0F1", "actions.pass", 0, 0},
               {"0F0,0B0,0F1,0B1\n\n", "n_virtual", 2, 1},
               {"0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", NULL, 0, 0},
               {"0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "actions", 0, 0},
               {"0F0,0B0,0F1,0B1,2F0,2B0,2F1,2B1\n1F0,1B0,1F1,1B1\n", "n_virtual", 2, 3},
               {"2147483647F0,0B0,0F1,0B1", "n_actions", (int64_t)1 << 33, 4},
               {"0F0,0SEND_F0,0B0,0F1,0B1\n", "actions.pass", 0, 0}};
    cf_plan *plan = plan_of(0, 2);
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cf_schedule *s = NULL;
        cf_error error = {0};
        cf_result result;
        harness_note("%s", bad[i].csv);
        result = schedule_csv_read(bad[i].csv, strlen(bad[i].csv), plan, NULL, &s, NULL, &error);
        if (bad[i].field == NULL) {
            CHECK_INT(result, CF_OK);
            cf_schedule_free(s);
            continue;
        }
        CHECK_INT(result, CF_ERROR_SCHEDULE);
        CHECK_STR(error.field, bad[i].field);
        CHECK_STR(oracle_error_fault(&error), NULL);
        if (bad[i].wanted > 0) CHECK(error.item == -1 && error.wanted == bad[i].wanted && error.got == bad[i].got);
        CHECK(s == NULL);
    }
    harness_note("%s", "");
    cf_plan_free(plan);
}

TEST(formats_are_enforced_when_asked_for) {
    static const char compute[] = "0F0,,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n";
    static const char comms[] = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
                                "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc = {0};
    cf_schedule *s = NULL;
    cf_error error;
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK_INT(schedule_csv_read(compute, strlen(compute), plan, &desc, &s, NULL, &error), CF_ERROR_TEXT);
    CHECK(error.item == 1 && error.got == 5 && strstr(error.text, "empty cell") != NULL);
    CHECK_INT(schedule_csv_read(comms, strlen(comms), plan, &desc, &s, NULL, &error), CF_OK);
    cf_schedule_free(s);
    s = NULL;
    desc.format = SCHEDULE_CSV_COMPUTE_ONLY;
    CHECK_INT(schedule_csv_read(comms, strlen(comms), plan, &desc, &s, NULL, &error), CF_ERROR_TEXT);
    CHECK(error.item == 1 && error.got == 5 && strstr(error.text, "\"0SEND_F0\"") != NULL);
    CHECK_INT(schedule_csv_read(compute, strlen(compute), plan, &desc, &s, NULL, &error), CF_OK);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* Chunks of the second of two ranks. Their numbers continue those of the first. */
TEST(the_second_rank_has_its_own_chunks) {
    static const int64_t lengths[] = {4, 3, 2, 4, 3, 1};
    static const char *const other_rank[] = {"microbatch,chunk\n0,3\n1,4\n2,2\n", "microbatch,chunk\n0,3\n1,4\n2,6\n"};
    cf_plan *plan = NULL;
    cf_pack_desc pack = {0};
    int64_t rank;
    size_t i;
    pack.chunk_size = 4;
    pack.max_slices = 1;
    pack.n_ranks = 2;
    REQUIRE(cf_pack(lengths, 6, &pack, &plan, NULL) == CF_OK && plan->chunks_per_rank == 3);
    for (rank = 0; rank < 2; rank++) {
        cf_schedule_desc order = {0};
        schedule_csv_desc desc = {0};
        cf_schedule *s = NULL, *again = NULL;
        harness_text rows = {NULL, 0, 0, 0, 0, 0}, twice = {NULL, 0, 0, 0, 0, 0}, numbers = {NULL, 0, 0, 0, 0, 0};
        int32_t chunks[3], back[3] = {-1, -1, -1};
        cf_error error;
        order.kind = CF_SCHEDULE_INTERLEAVED;
        order.shape.n_stages = order.shape.n_virtual = 2;
        order.shape.rank = desc.rank = rank;
        REQUIRE(cf_schedule_make(plan, &order, &s, NULL) == CF_OK);
        CHECK_INT(schedule_csv_microbatches(plan, s, chunks, &error), CF_OK);
        CHECK_INT(schedule_csv_write_microbatches(plan, s, harness_collect, &numbers, &error), CF_OK);
        CHECK_INT(schedule_csv_read_microbatches(numbers.at, numbers.n, plan, rank, back, &error), CF_OK);
        CHECK(memcmp(chunks, back, sizeof back) == 0 && chunks[0] / 3 == rank && chunks[2] / 3 == rank);
        CHECK_INT(schedule_csv_read_microbatches(numbers.at, numbers.n, plan, 1 - rank, back, &error), CF_ERROR_TEXT);
        CHECK_INT(schedule_csv_read_microbatches(other_rank[rank], strlen(other_rank[rank]), plan, 1, back, &error),
                  CF_ERROR_TEXT);
        CHECK_INT(error.item, 4);
        desc.chunks = chunks;
        CHECK_INT(schedule_csv_write(plan, s, NULL, harness_collect, &rows, &error), CF_OK);
        CHECK_INT(schedule_csv_read(rows.at, rows.n, plan, &desc, &again, NULL, &error), CF_OK);
        if (again) CHECK(again->n_actions == s->n_actions && again->shape.rank == rank && again->shape.n_virtual == 2 &&
                         memcmp(again->actions, s->actions, (size_t)s->n_actions * sizeof *s->actions) == 0);
        if (again) CHECK_INT(schedule_csv_write(plan, again, &desc, harness_collect, &twice, &error), CF_OK);
        CHECK_STR(twice.at, rows.at);
        cf_schedule_free(again);
        again = NULL;
        desc.chunks = NULL; /* without the list they get the rank's own numbers, 0 to 2 */
        CHECK_INT(schedule_csv_read("0F0,0B0,0F1,0B1,0F2,0B2", 23, plan, &desc, &again, NULL, &error), CF_OK);
        for (i = 0; again && i < 6; i++) CHECK_INT(again->actions[i].chunk, 3 * rank + (int64_t)i / 2);
        CHECK_INT(schedule_csv_read("0F0,0B0,0F1,0B1,0F3,0B3", 23, plan, &desc, &s, NULL, &error), CF_ERROR_TEXT);
        CHECK(strstr(error.text, "no chunk for this microbatch") != NULL && error.got == 17);
        s->actions[1].chunk = 6; /* of no rank */
        CHECK_INT(schedule_csv_write_microbatches(plan, s, harness_collect, &numbers, &error), CF_ERROR_SCHEDULE);
        CHECK_STR(error.field, "actions.chunk");
        free(rows.at);
        free(twice.at);
        free(numbers.at);
        cf_schedule_free(s);
        cf_schedule_free(again);
    }
    for (i = 0; i < 4; i++) { /* extra cells must lie on a row, and with one stage there is nothing to send */
        static const int32_t rows[] = {-1, 1, 0, 0};
        cf_plan *own = plan_of(0, 2);
        cf_schedule *s = read(own, "0F0,0B0,0F1,0B1\n", NULL);
        schedule_csv_extra extra = {0, 0, 0, 0, SCHEDULE_CSV_UNSHARD};
        schedule_csv_extras extras;
        schedule_csv_desc desc = {0};
        harness_text t = {NULL, 0, 0, 0, 0, 0};
        memset(&extras, 0, sizeof extras);
        extra.row = rows[i];
        extras.n = 1;
        extras.items = &extra;
        desc.extras = i < 3 ? &extras : NULL;
        desc.format = i < 3 ? SCHEDULE_CSV_DEFAULT : SCHEDULE_CSV_COMPUTE_COMMS;
        CHECK_INT(schedule_csv_write(own, s, &desc, harness_collect, &t, NULL), i < 2 ? CF_ERROR_ARGUMENT : CF_OK);
        CHECK_STR(t.at, i < 2 ? NULL : i == 2 ? "0UNSHARD,0F0,0B0,0F1,0B1\r\n" : "0F0,0B0,0F1,0B1\r\n");
        free(t.at);
        cf_schedule_free(s);
        cf_plan_free(own);
    }
    cf_plan_free(plan);
}

/* Makes a schedule from a header's counts, labels and limits, in one block of exactly the size that the header
   gives. */
TEST(a_new_schedule_has_what_its_header_says) {
    static const int64_t chunks[] = {1, 2, 3}, states[] = {4, 5, 6}, bytes[] = {7, 8, 9};
    harness_heap heap = {0};
    const cf_allocator own = {harness_alloc, harness_release, &heap}, half = {harness_alloc, NULL, &heap};
    cf_schedule header, *s = NULL;
    cf_error error;
    int which, k;
    memset(&header, 0, sizeof header);
    header.shape.n_stages = 3;
    header.shape.k = 11;
    header.n_actions = 5;
    for (which = 0; which < 8; which++) {
        header.limits.chunks_by_stage = which & 1 ? chunks : NULL;
        header.limits.state_by_stage = which & 2 ? states : NULL;
        header.limits.bytes_by_stage = which & 4 ? bytes : NULL;
        REQUIRE(schedule_new(&header, &own, &s, &error) == CF_OK);
        CHECK(s->shape.k == 11 && s->first[0] == 0 && s->first[3] == 0 && s->actions[4].chunk == 0);
        memset(s->first, 1, 4 * sizeof *s->first);
        memset(s->actions, 1, 5 * sizeof *s->actions);
        for (k = 0; k < 3; k++) {
            if (which & 1) CHECK_INT(s->limits.chunks_by_stage[k], chunks[k]);
            if (which & 2) CHECK_INT(s->limits.state_by_stage[k], states[k]);
            if (which & 4) CHECK_INT(s->limits.bytes_by_stage[k], bytes[k]);
        }
        CHECK(s->limits.chunks_by_stage != chunks && s->limits.bytes_by_stage != bytes);
        k = 4 + 3 * ((which & 1) + (which >> 1 & 1) + (which >> 2));
        CHECK_INT((int64_t)s->block.bytes, (int64_t)(sizeof *s + (size_t)k * sizeof(int64_t) + 5 * sizeof(cf_action)));
        cf_schedule_free(s);
    }
    harness_poison(&s, sizeof s);
    CHECK_INT(schedule_new(&header, &half, &s, &error), CF_ERROR_ARGUMENT);
    header.shape.n_stages = INT64_MAX;
    CHECK_INT(schedule_new(&header, &own, &s, &error), CF_ERROR_OVERFLOW);
    header.shape.n_stages = 3;
    header.n_actions = INT64_MAX;
    CHECK_INT(schedule_new(&header, &own, &s, &error), CF_ERROR_OVERFLOW);
    CHECK_POISON(&s, sizeof s);
    CHECK_INT(heap.live, 0);
}

static int count_pieces(const char *text, size_t bytes, void *user) {
    int *counts = (int *)user;
    (void)text;
    counts[0]++;
    counts[1] += (int)bytes;
    return counts[0] == counts[2] ? 77 : 0;
}

/* No text makes no piece. Long texts come in several pieces, and truncated ones have 255 characters. Nothing follows a
   refusal. */
TEST(text_goes_out_in_pieces) {
    char word[400];
    int fails, i;
    memset(word, 'w', sizeof word);
    word[sizeof word - 1] = 0;
    for (fails = 0; fails < 4; fails++) {
        int counts[3] = {0, 0, fails};
        text_out to;
        cf_error error;
        CHECK_INT(text_out_begin(&to, count_pieces, counts, &error), CF_OK);
        CHECK_INT(text_out_end(&to, &error), CF_OK);
        CHECK_INT(counts[0], 0);
        for (i = 0; i < 40; i++) text_out_put(&to, "%s", word);
        CHECK_INT(text_out_end(&to, &error), fails ? CF_ERROR_WRITE : CF_OK);
        CHECK(fails ? counts[0] == fails && error.got == 77 : counts[0] == 3 && counts[1] == 40 * 255);
    }
}

TEST(csv_arguments_are_checked) {
    static const char csv[] = "0F0,0B0,0F1,0B1\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc;
    cf_schedule *s = NULL, *good = read(plan, csv, NULL);
    schedule_csv_extras *extras = NULL;
    int32_t beside[2] = {0, 2};
    cf_error error;
    harness_text t = {NULL, 0, 0, 1, 0, 0};
    harness_heap heap;
    cf_allocator allocator;
    int64_t fail;
    REQUIRE(good != NULL);
    memset(&desc, 0, sizeof desc);
    memset(&heap, 0, sizeof heap);
#define REFUSE(member, value, nearest, name) \
    do { \
        memset(&desc, 0, sizeof desc); \
        desc.member = value; \
        CHECK(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, NULL, &error) != CF_OK && \
              strcmp(error.field, name) == 0); \
        CHECK_STR(oracle_error_fault(&error), NULL); \
        CHECK(error.item == -1 && error.wanted == (nearest) && error.got == (int64_t)(value)); \
    } while (0)
    REFUSE(format, SCHEDULE_CSV_FORMAT_COUNT, SCHEDULE_CSV_FORMAT_COUNT - 1, "format");
    REFUSE(kind, CF_SCHEDULE_COUNT, CF_SCHEDULE_COUNT - 1, "kind");
    REFUSE(replay, CF_REPLAY_COUNT, CF_REPLAY_COUNT - 1, "shape.replay");
    REFUSE(k, -1, 0, "k");
    REFUSE(rank, 1, 0, "shape.rank");
    REFUSE(rank, -1, 0, "shape.rank");
    memset(&desc, 0, sizeof desc);
    desc.chunks = beside;
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "chunks") == 0 && error.item == 1);
    CHECK_INT(schedule_csv_microbatches(plan, good, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read_microbatches("", 0, plan, 1, beside, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read_microbatches("", 0, plan, 0, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(NULL, 4, plan, NULL, &s, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(csv, strlen(csv), NULL, NULL, &s, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, NULL, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(NULL, 0, plan, NULL, &s, NULL, &error), CF_ERROR_TEXT);
    CHECK_INT(schedule_csv_write(NULL, good, NULL, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_write(plan, NULL, NULL, harness_collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_write(plan, good, NULL, NULL, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_write(plan, good, NULL, harness_collect, &t, &error), CF_ERROR_WRITE);
    CHECK_INT(error.got, HARNESS_REFUSAL);
    good->actions[2].chunk = 2;
    t.fail_at = 0;
    CHECK_INT(schedule_csv_write(plan, good, NULL, harness_collect, &t, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 2 && strcmp(error.field, "actions.chunk") == 0 && t.n == 0);
    allocator.alloc = harness_alloc;
    allocator.release = harness_release;
    allocator.user = &heap;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    for (fail = 1; fail <= 4; fail++) { /* the schedule, the extras, the scratch of the reader and of the validator */
        heap.calls = 0;
        heap.fail_at = fail;
        CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, &extras, &error), CF_ERROR_MEMORY);
        CHECK_INT(heap.live, 0);
    }
    CHECK(s == NULL && extras == NULL);
    heap.fail_at = 0;
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, NULL, &error), CF_OK);
    for (fail = 1; fail <= 2; fail++) { /* the validator's, because the output is valid, and the writer's */
        heap.fail_at = heap.calls + fail;
        CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_ERROR_MEMORY);
        heap.fail_at = heap.calls + fail;
        CHECK_INT(schedule_csv_renumber(plan, s, &allocator, &error), CF_ERROR_MEMORY);
    }
    CHECK_INT((int64_t)t.n, 0);
    heap.fail_at = 0;
    cf_schedule_free(s);
    CHECK_INT(heap.live, 0);
    free(t.at);
    cf_schedule_free(good);
    cf_plan_free(plan);
}

/* ---- round trips, and damage ---- */

/* A random schedule, lowered or not. */
static cf_schedule *draw(harness_rng *rng, int64_t sequences, int64_t ranks, problem *p) {
    problem_wants wants = {0};
    wants.random = 1;
    wants.sequences = sequences;
    wants.ranks = ranks;
    problem_draw(rng, &wants, p);
    if (harness_chance(rng, 0.5)) return naive_copy(problem_own(p)->schedule);
    CHECK_INT(problem_order(p), CF_OK);
    return naive_copy(problem_own(p)->lowered);
}

/* Checks a schedule that PyTorch could run: with its plan in microbatch order it is valid and gives the same text. */
static int renumber(cf_plan *plan, cf_schedule *s, const schedule_csv_desc *desc, const char *wanted) {
    int64_t lengths[8] = {0}, i, first = s->shape.rank * plan->chunks_per_rank;
    int32_t chunks[64];
    harness_text t = {NULL, 0, 0, 0, 0, 0};
    cf_error error;
    for (i = first; i < first + plan->chunks_per_rank; i++)
        if (plan->chunks[i].chain >= 0) return 0;
    if (!CHECK(plan->n_sequences <= 8)) return 0;
    for (i = 0; i < plan->n_slices; i++) lengths[plan->slices[i].sequence] += plan->slices[i].length;
    CHECK_INT(schedule_csv_renumber(plan, s, NULL, &error), CF_OK);
    CHECK_INT(cf_plan_validate(plan, lengths, plan->n_sequences, NULL, &error), CF_OK);
    CHECK_INT(schedule_csv_microbatches(plan, s, chunks, &error), CF_OK);
    for (i = 0; i < plan->chunks_per_rank; i++) CHECK_INT(chunks[i], first + i);
    CHECK_INT(schedule_csv_write(plan, s, desc, harness_collect, &t, &error), CF_OK);
    CHECK_STR(t.at, wanted);
    free(t.at);
    return plan->chunks_per_rank > 1;
}

TEST(round_trips) {
    harness_rng rng = {31};
    int round, renumbered = 0;
    for (round = 0; round < harness_rounds(1000, 300); round++) {
        problem p;
        cf_schedule *s = draw(&rng, 6, 2, &p), *again = NULL;
        cf_plan *plan = p.plan;
        schedule_csv_desc desc;
        schedule_csv_extras *extras = NULL;
        int32_t chunks[64];
        harness_text t = {NULL, 0, 0, 0, 0, 0};
        cf_error error;
        REQUIRE(s != NULL && plan->chunks_per_rank <= 64);
        memset(&desc, 0, sizeof desc);
        CHECK_INT(schedule_csv_microbatches(plan, s, chunks, &error), CF_OK);
        desc.chunks = chunks;
        desc.torch = (schedule_csv_torch)harness_between(&rng, 0, SCHEDULE_CSV_TORCH_COUNT - 1);
        desc.extensions = 1;
        desc.k = s->shape.k;
        desc.rank = s->shape.rank;
        desc.replay = s->shape.replay;
        desc.kind = s->kind;
        if (s->lowered) desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
        CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
        if (!CHECK_INT(schedule_csv_read(t.at, t.n, plan, &desc, &again, &extras, &error), CF_OK))
            FAIL("%s\n%s", error.text, t.at);
        REQUIRE(again != NULL);
        { /* again, with the extras that were read with the schedule */
            harness_text twice = {NULL, 0, 0, 0, 0, 0};
            desc.extras = extras;
            CHECK_INT(schedule_csv_write(plan, again, &desc, harness_collect, &twice, &error), CF_OK);
            CHECK_STR(twice.at, t.at);
            desc.extras = NULL;
            free(twice.at);
            schedule_csv_extras_free(extras);
        }
        CHECK(again->shape.n_stages == s->shape.n_stages && again->n_actions == s->n_actions &&
              again->shape.k == s->shape.k && again->shape.rank == s->shape.rank);
        CHECK(again->shape.replay == s->shape.replay && again->kind == s->kind && again->lowered == s->lowered);
        if (s->n_actions > 0) CHECK_INT(again->shape.n_virtual, s->shape.n_virtual);
        if (s->n_actions > 0 && s->shape.n_stages > 1 && s->shape.n_virtual > 1)
            CHECK_INT(again->shape.placement, s->shape.placement);
        CHECK(memcmp(again->first, s->first, ((size_t)s->shape.n_stages + 1) * sizeof *s->first) == 0);
        CHECK(s->n_actions == 0 || memcmp(again->actions, s->actions, (size_t)s->n_actions * sizeof *s->actions) == 0);
        cf_schedule_free(again);
        again = NULL;
        desc.k = 0; /* the smallest K that is enough */
        CHECK_INT(schedule_csv_read(t.at, t.n, plan, &desc, &again, NULL, &error), CF_OK);
        REQUIRE(again != NULL);
        CHECK(again->shape.k >= 1 && again->shape.k <= s->shape.k);
        if (again->shape.k > 1) {
            again->shape.k--;
            CHECK_INT(cf_schedule_validate(plan, again, NULL, NULL, &error), CF_ERROR_SCHEDULE);
            CHECK_STR(error.field, "shape.k");
        }
        cf_schedule_free(again);
        renumbered += renumber(plan, s, &desc, t.at);
        free(t.at);
        naive_free(s);
        problem_free(&p);
    }
    CHECK(renumbered >= 50);
    harness_report("%d plans were renumbered", renumbered);
}

TEST(damaged_text_is_survived) {
    static const char letters[] = "0123456789FBIWR_SENDRECVAITGUH,,\r\n \t\"-;(\x80\xFF";
    harness_rng rng = {32};
    int round, accepted = 0;
    for (round = 0; round < harness_rounds(6000, 750); round++) {
        problem p;
        cf_schedule *s = draw(&rng, 4, 1, &p), *again = NULL;
        const cf_plan *plan = p.plan;
        schedule_csv_desc desc;
        schedule_csv_extras *extras = NULL;
        int32_t chunks[64];
        harness_text t = {NULL, 0, 0, 0, 0, 0};
        cf_error error;
        cf_result result;
        char *exact;
        size_t n, i;
        int64_t n_forwards;
        int edits = (int)harness_between(&rng, 1, 4);
        REQUIRE(s != NULL);
        memset(&desc, 0, sizeof desc);
        desc.extensions = 1;
        desc.replay = s->shape.replay;
        if (s->lowered && harness_chance(&rng, 0.7)) desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
        desc.torch = (schedule_csv_torch)harness_between(&rng, 0, SCHEDULE_CSV_TORCH_COUNT - 1);
        REQUIRE(plan->chunks_per_rank <= 64);
        CHECK_INT(schedule_csv_microbatches(plan, s, chunks, &error), CF_OK);
        CHECK_INT(schedule_csv_write(plan, s, &desc, harness_collect, &t, &error), CF_OK);
        desc.format = SCHEDULE_CSV_DEFAULT;
        desc.chunks = chunks;
        desc.legacy = harness_chance(&rng, 0.2);
        desc.forward_only = harness_chance(&rng, 0.1);
        n = t.n;
        exact = (char *)malloc(n + 5);
        if (!exact) abort();
        memcpy(exact, t.at, n);
        for (; edits > 0 && n > 0; edits--) {
            size_t at = (size_t)harness_between(&rng, 0, (int64_t)n - 1);
            /* includes the 0 at the end */
            char letter = letters[harness_between(&rng, 0, (int64_t)sizeof letters - 1)];
            switch (harness_between(&rng, 0, 3)) {
                case 0: exact[at] = letter; break;
                case 1: memmove(exact + at, exact + at + 1, n - at - 1), n--; break;
                case 2: memmove(exact + at + 1, exact + at, n - at), n++, exact[at] = letter; break;
                default: n = at; break;
            }
        }
        { /* a block that ends with the text, so that the sanitizer sees a read past its end */
            char *cut = (char *)malloc(n > 0 ? n : 1);
            if (!cut) abort();
            memcpy(cut, exact, n);
            memset(&error, 0, sizeof error);
            result = schedule_csv_read(cut, n, plan, &desc, &again, &extras, &error);
            free(cut);
        }
        if (result == CF_OK) {
            accepted++;
            for (i = 0; i < (size_t)again->n_actions; i++) CHECK(again->actions[i].reserved == 0);
            for (n_forwards = 0, i = 0; i < (size_t)again->n_actions; i++) n_forwards += again->actions[i].pass == CF_F;
            if (again->shape.forward_only) CHECK_INT(n_forwards, (int64_t)again->n_actions);
            else if (again->shape.n_stages <= 60) CHECK_STR(naive_fault(plan, again), NULL);
            desc.extras = extras;
            desc.format = again->lowered ? SCHEDULE_CSV_COMPUTE_COMMS : SCHEDULE_CSV_COMPUTE_ONLY;
            CHECK_INT(schedule_csv_write(plan, again, &desc, harness_collect, &t, &error), CF_OK);
            cf_schedule_free(again);
            schedule_csv_extras_free(extras);
        } else {
            CHECK(result == CF_ERROR_TEXT || result == CF_ERROR_SCHEDULE);
            CHECK(again == NULL && extras == NULL && error.code == result && error.text[0] != 0);
        }
        free(exact);
        free(t.at);
        naive_free(s);
        problem_free(&p);
    }
    CHECK(accepted > harness_rounds(50, 6));
    harness_report("%d of %d damaged texts were still sound", accepted, round);
}

SUITE(csv, CASE(reads_and_writes_rows_in_a_v), CASE(reads_a_zero_bubble_file_of_the_older_kind),
      CASE(bw_is_the_whole_backward_of_older_files), CASE(reads_and_writes_both_dialects), CASE(replay_is_an_extension),
      CASE(microbatches_are_numbered_as_the_last_stage_runs_them), CASE(bad_microbatches_are_refused_with_their_place),
      CASE(transfers_are_written_for_a_version), CASE(what_is_no_pass_here_is_kept),
      CASE(chains_of_other_ranks_are_no_hindrance), CASE(what_pytorch_cannot_run_is_refused),
      CASE(dumps_of_pytorch_are_taken_and_written_back), CASE(dumps_of_pytorch_that_are_refused),
      CASE(line_ends_blanks_and_empty_cells), CASE(an_empty_plan_has_empty_lines),
      CASE(bad_text_is_refused_with_its_place), CASE(numbers_of_any_size), CASE(more_cells_than_actions_are_refused),
      CASE(sound_text_of_an_unsound_schedule_is_refused), CASE(formats_are_enforced_when_asked_for),
      CASE(the_second_rank_has_its_own_chunks), CASE(a_new_schedule_has_what_its_header_says),
      CASE(text_goes_out_in_pieces), CASE(csv_arguments_are_checked), CASE(round_trips),
      CASE(damaged_text_is_survived));
