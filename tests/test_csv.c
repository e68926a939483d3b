/* tools/schedule_csv.h: schedules as CSV, out and in. */

#include "chunkflow.h"
#include "harness.h"
#include "naive.h"
#include "tools/schedule_csv.h"

#include <stdlib.h>
#include <string.h>

typedef struct text {
    char *at;
    size_t n, room;
    int64_t pieces_left; /* -1: any number */
} text;

static int collect(const char *piece, size_t bytes, void *user) {
    text *t = (text *)user;
    if (t->pieces_left == 0) return 9;
    if (t->pieces_left > 0) t->pieces_left--;
    if (t->n + bytes + 1 > t->room) {
        t->room = 2 * (t->n + bytes + 1);
        t->at = (char *)realloc(t->at, t->room);
        if (!t->at) abort();
    }
    memcpy(t->at + t->n, piece, bytes);
    t->n += bytes;
    t->at[t->n] = 0;
    return 0;
}

/* n sequences that fill a chunk each, and before them a group of n_dependent chunks (0: none). */
static cf_plan *plan_of(int64_t n_dependent, int64_t n) {
    int64_t lengths[40], i;
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 2;
    lengths[0] = 2 * n_dependent;
    for (i = 1; i <= n; i++) lengths[i] = 2;
    CHECK_INT(cf_pack(lengths, n + 1, &desc, &plan, NULL), CF_OK);
    return plan;
}

static cf_schedule *read(const cf_plan *plan, const char *csv, const schedule_csv_desc *desc) {
    cf_schedule *s = NULL;
    cf_error error;
    memset(&error, 0, sizeof error);
    if (schedule_csv_read(csv, strlen(csv), plan, desc, &s, &error) != CF_OK) FAIL("%s", error.text);
    return s;
}

/* A list as "F0@0 B0*@2": pass, chunk, virtual stage; "*" where nothing is kept. */
static void check_list(const cf_schedule *s, int64_t stage, const char *wanted) {
    char got[900];
    int64_t i, n = 0;
    got[0] = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        n += snprintf(got + n, sizeof got - (size_t)n, "%s%s%d%s@%d", n ? " " : "", cf_pass_name((cf_pass)a->pass), (int)a->chunk,
                      a->pass <= CF_R && !a->keep ? "*" : "", (int)a->stage);
    }
    CHECK_STR(got, wanted);
}

/* ---- goldens ---- */

/* As PyTorch's ZBV files have it: of 2 ranks, rank r has the virtual stages r and 3 - r, and nothing is sent where the V
   turns. */
TEST(reads_and_writes_rows_in_a_v) {
    static const char csv[] = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1\r\n"
                              "1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\r\n";
    static const char *const elsewhere = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1\n"
                                         "1F0,1F1,2F0,0F1,2I0,1I0,2I1,1I1,2W0,1W0,2W1,1W1\n";
    static const char *const both = "0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,3W1,0I1,0W0,0W1\n"
                                    "1F0,1F1,3F0,3F1,3I0,1I0,3I1,1I1,3W0,1W0,3W1,1W1\n";
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = read(plan, csv, NULL), *low = NULL, *again = NULL;
    text t = {NULL, 0, 0, -1};
    cf_error error;
    REQUIRE(s != NULL);
    CHECK(s->n_stages == 2 && s->n_virtual == 2 && s->placement == CF_PLACEMENT_V && s->lowered == 0);
    check_list(s, 0, "F0@0 F1@0 F0@3 I0@3 F1@3 I1@3 I0@0 W0@3 W1@3 I1@0 W0@0 W1@0");
    check_list(s, 1, "F0@1 F0@2 F1@1 F1@2 I0@2 I0@1 I1@2 I1@1 W0@2 W0@1 W1@2 W1@1");
    CHECK_INT(schedule_csv_write(plan, s, NULL, collect, &t, &error), CF_OK);
    CHECK_STR(t.at, csv);
    REQUIRE(cf_schedule_lower(plan, s, NULL, &low, &error) == CF_OK);
    t.n = 0;
    CHECK_INT(schedule_csv_write(plan, low, NULL, collect, &t, &error), CF_OK);
    CHECK(strstr(t.at, "1SEND_F") == NULL && strstr(t.at, "2RECV_F") == NULL && strstr(t.at, "2SEND_B") == NULL);
    again = read(plan, t.at, NULL);
    REQUIRE(again != NULL);
    CHECK(again->placement == CF_PLACEMENT_V && again->lowered == 1 && again->n_actions == low->n_actions);
    CHECK(memcmp(again->actions, low->actions, (size_t)low->n_actions * sizeof *low->actions) == 0);
    cf_schedule_free(again);
    again = NULL;
    CHECK_INT(schedule_csv_read(elsewhere, strlen(elsewhere), plan, NULL, &again, &error), CF_ERROR_TEXT);
    CHECK(error.item == 2 && error.got == 13 && strstr(error.text, "another row") != NULL);
    CHECK_INT(schedule_csv_read(both, strlen(both), plan, NULL, &again, &error), CF_ERROR_TEXT);
    CHECK(error.item == 2 && error.got == 9 && strstr(error.text, "\"3F0\"") != NULL);
    CHECK(again == NULL);
    free(t.at);
    cf_schedule_free(low);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* As PyTorch's zero-bubble files begin (two ranks, two stages each, empty cells), with B for the gradient of the inputs. */
TEST(reads_a_zero_bubble_file_of_the_older_kind) {
    static const char csv[] = "0F0,0F1,2F0,,2F1,2B0,2W0,2B1,0B0,0W0,2W1,0B1,0W1\r\n"
                              ",1F0,1F1,3F0,3B0,3F1,3B1,3W0,1B0,1W0,3W1,1B1,1W1\r\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc;
    cf_schedule *s;
    cf_error error;
    memset(&desc, 0, sizeof desc);
    desc.legacy = 1;
    s = read(plan, csv, &desc);
    REQUIRE(s != NULL);
    CHECK(s->n_stages == 2 && s->n_virtual == 2 && s->k == 1 && s->lowered == 0 && s->kind == CF_SCHEDULE_DEFAULT);
    check_list(s, 0, "F0@0 F1@0 F0@2 F1@2 I0@2 W0@2 I1@2 I0@0 W0@0 W1@2 I1@0 W1@0");
    check_list(s, 1, "F0@1 F1@1 F0@3 I0@3 F1@3 I1@3 W0@3 I0@1 W0@1 W1@3 I1@1 W1@1");
    cf_schedule_free(s);
    s = NULL;
    /* Today's B is whole, and a W after it is one too many. */
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, NULL, &s, &error), CF_ERROR_SCHEDULE);
    CHECK_STR(error.field, "actions.pass");
    CHECK(s == NULL);
    cf_plan_free(plan);
}

TEST(bw_is_the_whole_backward_of_older_files) {
    static const char csv[] = "0F0,0BW0,0F1,0B1,0W1\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc;
    cf_schedule *s = NULL;
    cf_error error;
    memset(&desc, 0, sizeof desc);
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, &error), CF_ERROR_TEXT);
    CHECK(error.item == 1 && error.got == 5 && strstr(error.text, "\"0BW0\"") != NULL && strstr(error.text, "legacy") != NULL);
    desc.legacy = 1;
    s = read(plan, csv, &desc);
    REQUIRE(s != NULL);
    check_list(s, 0, "F0@0 B0@0 F1@0 I1@0 W1@0");
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* The same schedule in both dialects; the owner of a transfer is the stage that runs it. */
TEST(reads_and_writes_both_dialects) {
    static const char compute[] = "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n";
    static const char comms[] = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\r\n"
                                "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\r\n";
    cf_plan *plan = plan_of(0, 2);
    cf_schedule *s = read(plan, compute, NULL), *low = NULL, *again;
    text t = {NULL, 0, 0, -1};
    schedule_csv_desc desc;
    cf_error error;
    REQUIRE(s != NULL);
    memset(&desc, 0, sizeof desc);
    CHECK_INT(schedule_csv_write(plan, s, NULL, collect, &t, &error), CF_OK);
    CHECK_STR(t.at, compute);
    REQUIRE(cf_schedule_lower(plan, s, NULL, &low, &error) == CF_OK);
    t.n = 0;
    CHECK_INT(schedule_csv_write(plan, low, NULL, collect, &t, &error), CF_OK);
    CHECK_STR(t.at, comms);
    again = read(plan, comms, NULL);
    REQUIRE(again != NULL);
    CHECK_INT(again->lowered, 1);
    CHECK(memcmp(again->actions, low->actions, (size_t)low->n_actions * sizeof *low->actions) == 0);
    cf_schedule_free(again);
    t.n = 0;
    desc.format = SCHEDULE_CSV_COMPUTE_ONLY;
    CHECK_INT(schedule_csv_write(plan, low, &desc, collect, &t, &error), CF_OK);
    CHECK_STR(t.at, compute);
    t.n = 0;
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK_INT(schedule_csv_write(plan, s, &desc, collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "format");
    CHECK_INT((int64_t)t.n, 0);
    free(t.at);
    cf_schedule_free(low);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(replay_is_an_extension) {
    static const char csv[] = "0F0,0F1,0B1,0R0,0B0,0F2,0B2\r\n";
    cf_plan *plan = plan_of(2, 1);
    cf_schedule_desc order;
    cf_schedule *s = NULL, *again;
    schedule_csv_desc desc;
    text t = {NULL, 0, 0, -1};
    cf_error error;
    memset(&order, 0, sizeof order);
    memset(&desc, 0, sizeof desc);
    order.kind = CF_SCHEDULE_PAPER;
    order.replay = CF_REPLAY_PIPELINE;
    REQUIRE(cf_schedule_make(plan, &order, &s, &error) == CF_OK);
    CHECK_INT(schedule_csv_write(plan, s, &desc, collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "extensions");
    CHECK_INT(error.item, 3);
    CHECK_INT((int64_t)t.n, 0);
    desc.extensions = 1;
    CHECK_INT(schedule_csv_write(plan, s, &desc, collect, &t, &error), CF_OK);
    CHECK_STR(t.at, csv);
    desc.replay = CF_REPLAY_LOCAL;
    desc.kind = CF_SCHEDULE_PAPER;
    again = read(plan, csv, &desc);
    REQUIRE(again != NULL);
    check_list(again, 0, "F0*@0 F1@0 B1@0 R0@0 B0@0 F2@0 B2@0");
    CHECK(again->replay == CF_REPLAY_LOCAL && again->kind == CF_SCHEDULE_PAPER);
    free(t.at);
    cf_schedule_free(again);
    cf_schedule_free(s);
    cf_plan_free(plan);
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
    cf_pack_desc pack;
    cf_schedule *s;
    text t = {NULL, 0, 0, -1};
    memset(&pack, 0, sizeof pack);
    pack.chunk_size = 2;
    REQUIRE(cf_pack(NULL, 0, &pack, &plan, NULL) == CF_OK);
    s = read(plan, "\r\n\r\n", NULL);
    REQUIRE(s != NULL);
    CHECK(s->n_stages == 2 && s->n_actions == 0 && s->n_virtual == 1);
    CHECK_INT(schedule_csv_write(plan, s, NULL, collect, &t, NULL), CF_OK);
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
        {"0F0,0B2", 1, 5, "no such chunk"},
        {"0F0,0B4294967296", 1, 5, "ends with the number"},
        {"0F0,99999999999999999999B0", 1, 5, "starts with the number"},
        {"0F0,0f0", 1, 5, "no such pass"},
        {"0F0,0Q0", 1, 5, "no such pass"},
        {"0F0,0BI0", 1, 5, "no such pass"},
        {"0F0,0BW0", 1, 5, "legacy"},
        {"0F0,0", 1, 5, "no such pass"},
        {"0F0,\"0B0\"", 1, 5, "starts with the number"},
        {"0F0;0B0", 1, 1, "ends with the number"},
        {"0F0,0UNSHARD", 1, 5, "sharding"},
        {"0F0,0REDUCE_GRAD", 1, 5, "sharding"},
        {"0F0,(0F1;0B0)OVERLAP_F_B", 1, 5, "starts with the number"},
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
        char *exact = (char *)malloc(n + 1); /* so that a read past the end is seen */
        if (!exact) abort();
        memcpy(exact, bad[i].csv, n);
        memset(&error, 0, sizeof error);
        harness_note("%s", bad[i].csv);
        CHECK_INT(schedule_csv_read(exact, n, plan, NULL, &s, &error), CF_ERROR_TEXT);
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

TEST(sound_text_of_an_unsound_schedule_is_refused) {
    static const struct {
        const char *csv, *field;
    } bad[] = {{"0F0,0B0,0F1", "n_actions"},
               {"0F0,0B0,0F1,0F1", "actions.pass"},
               {"0F0,0B0,0B1,0F1", "actions.pass"},
               {"0F0,0B0,0F1,0B1\n\n", "n_virtual"},
               {"0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", NULL},
               {"0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "actions"},
               {"0F0,0B0,0F1,0B1,2F0,2B0,2F1,2B1\n1F0,1B0,1F1,1B1\n", "n_virtual"},
               {"2147483647F0,0B0,0F1,0B1", "n_actions"},
               {"0F0,0SEND_F0,0B0,0F1,0B1\n", "actions.pass"}};
    cf_plan *plan = plan_of(0, 2);
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cf_schedule *s = NULL;
        cf_error error;
        cf_result result;
        memset(&error, 0, sizeof error);
        harness_note("%s", bad[i].csv);
        result = schedule_csv_read(bad[i].csv, strlen(bad[i].csv), plan, NULL, &s, &error);
        if (bad[i].field == NULL) {
            CHECK_INT(result, CF_OK);
            cf_schedule_free(s);
            continue;
        }
        CHECK_INT(result, CF_ERROR_SCHEDULE);
        CHECK_STR(error.field, bad[i].field);
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
    schedule_csv_desc desc;
    cf_schedule *s = NULL;
    cf_error error;
    memset(&desc, 0, sizeof desc);
    desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
    CHECK_INT(schedule_csv_read(compute, strlen(compute), plan, &desc, &s, &error), CF_ERROR_TEXT);
    CHECK(error.item == 1 && error.got == 5 && strstr(error.text, "empty cell") != NULL);
    CHECK_INT(schedule_csv_read(comms, strlen(comms), plan, &desc, &s, &error), CF_OK);
    cf_schedule_free(s);
    s = NULL;
    desc.format = SCHEDULE_CSV_COMPUTE_ONLY;
    CHECK_INT(schedule_csv_read(comms, strlen(comms), plan, &desc, &s, &error), CF_ERROR_TEXT);
    CHECK(error.item == 1 && error.got == 5 && strstr(error.text, "\"0SEND_F0\"") != NULL);
    CHECK_INT(schedule_csv_read(compute, strlen(compute), plan, &desc, &s, &error), CF_OK);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(csv_arguments_are_checked) {
    static const char csv[] = "0F0,0B0,0F1,0B1\n";
    cf_plan *plan = plan_of(0, 2);
    schedule_csv_desc desc;
    cf_schedule *s = NULL, *good = read(plan, csv, NULL);
    cf_error error;
    text t = {NULL, 0, 0, 0};
    harness_heap heap;
    cf_allocator allocator;
    int64_t fail;
    REQUIRE(good != NULL);
    memset(&desc, 0, sizeof desc);
    memset(&heap, 0, sizeof heap);
#define REFUSE(member, value, name)                                                                                        \
    do {                                                                                                                   \
        memset(&desc, 0, sizeof desc);                                                                                     \
        desc.member = value;                                                                                               \
        CHECK(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, &error) != CF_OK && strcmp(error.field, name) == 0); \
    } while (0)
    REFUSE(format, SCHEDULE_CSV_FORMAT_COUNT, "format");
    REFUSE(kind, CF_SCHEDULE_COUNT, "kind");
    REFUSE(replay, CF_REPLAY_COUNT, "replay");
    REFUSE(k, -1, "k");
    REFUSE(rank, 1, "rank");
    REFUSE(rank, -1, "rank");
    CHECK_INT(schedule_csv_read(NULL, 4, plan, NULL, &s, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(csv, strlen(csv), NULL, NULL, &s, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_read(NULL, 0, plan, NULL, &s, &error), CF_ERROR_TEXT);
    CHECK_INT(schedule_csv_write(NULL, good, NULL, collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_write(plan, NULL, NULL, collect, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_write(plan, good, NULL, NULL, &t, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(schedule_csv_write(plan, good, NULL, collect, &t, &error), CF_ERROR_WRITE);
    CHECK_INT(error.got, 9);
    good->actions[2].chunk = 2;
    t.pieces_left = -1;
    CHECK_INT(schedule_csv_write(plan, good, NULL, collect, &t, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 2 && strcmp(error.field, "actions.chunk") == 0 && t.n == 0);
    allocator.alloc = harness_alloc;
    allocator.release = harness_release;
    allocator.user = &heap;
    memset(&desc, 0, sizeof desc);
    desc.allocator = &allocator;
    for (fail = 1; fail <= 3; fail++) { /* the schedule, the scratch of the reader and of the validator */
        heap.calls = 0;
        heap.fail_at = fail;
        CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, &error), CF_ERROR_MEMORY);
        CHECK_INT(heap.live, 0);
    }
    CHECK(s == NULL);
    heap.fail_at = 0;
    CHECK_INT(schedule_csv_read(csv, strlen(csv), plan, &desc, &s, &error), CF_OK);
    heap.fail_at = heap.calls + 1; /* the validator's, once more: what is written is sound */
    CHECK_INT(schedule_csv_write(plan, s, &desc, collect, &t, &error), CF_ERROR_MEMORY);
    CHECK_INT((int64_t)t.n, 0);
    cf_schedule_free(s);
    CHECK_INT(heap.live, 0);
    free(t.at);
    cf_schedule_free(good);
    cf_plan_free(plan);
}

/* ---- round trips, and damage ---- */

/* A random schedule, lowered or not. */
static cf_schedule *draw(harness_rng *rng, const cf_plan *plan) {
    naive_shape shape = naive_draw_shape(rng);
    cf_schedule *s, *low = NULL;
    cf_lower_desc desc;
    shape.rank = harness_between(rng, 0, plan->n_ranks - 1);
    s = naive_schedule(rng, plan, &shape);
    if (s == NULL || harness_chance(rng, 0.5)) return s;
    memset(&desc, 0, sizeof desc);
    desc.offload = harness_chance(rng, 0.5);
    if (cf_schedule_lower(plan, s, &desc, &low, NULL) == CF_OK) {
        naive_free(s);
        s = naive_copy(low);
        cf_schedule_free(low);
    }
    return s;
}

TEST(round_trips) {
    harness_rng rng = {31};
    int round;
    for (round = 0; round < 1000; round++) {
        cf_plan *plan = naive_plan(&rng, 6, harness_between(&rng, 1, 2));
        cf_schedule *s = draw(&rng, plan), *again = NULL;
        schedule_csv_desc desc;
        text t = {NULL, 0, 0, -1};
        cf_error error;
        REQUIRE(s != NULL);
        harness_note("round %d", round);
        memset(&desc, 0, sizeof desc);
        desc.extensions = 1;
        desc.k = s->k;
        desc.rank = s->rank;
        desc.replay = s->replay;
        desc.kind = s->kind;
        if (s->lowered) desc.format = SCHEDULE_CSV_COMPUTE_COMMS;
        CHECK_INT(schedule_csv_write(plan, s, &desc, collect, &t, &error), CF_OK);
        if (!CHECK_INT(schedule_csv_read(t.at, t.n, plan, &desc, &again, &error), CF_OK)) FAIL("%s\n%s", error.text, t.at);
        REQUIRE(again != NULL);
        CHECK(again->n_stages == s->n_stages && again->n_actions == s->n_actions && again->k == s->k && again->rank == s->rank);
        CHECK(again->replay == s->replay && again->kind == s->kind && again->lowered == s->lowered);
        if (s->n_actions > 0) CHECK_INT(again->n_virtual, s->n_virtual);
        if (s->n_actions > 0 && s->n_stages > 1 && s->n_virtual > 1) CHECK_INT(again->placement, s->placement);
        CHECK(memcmp(again->first, s->first, ((size_t)s->n_stages + 1) * sizeof *s->first) == 0);
        CHECK(s->n_actions == 0 || memcmp(again->actions, s->actions, (size_t)s->n_actions * sizeof *s->actions) == 0);
        cf_schedule_free(again);
        again = NULL;
        desc.k = 0; /* the least K that will do */
        CHECK_INT(schedule_csv_read(t.at, t.n, plan, &desc, &again, &error), CF_OK);
        REQUIRE(again != NULL);
        CHECK(again->k >= 1 && again->k <= s->k);
        if (again->k > 1) {
            again->k--;
            CHECK_INT(cf_schedule_validate(plan, again, NULL, NULL, &error), CF_ERROR_SCHEDULE);
            CHECK_STR(error.field, "k");
        }
        cf_schedule_free(again);
        free(t.at);
        naive_free(s);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

TEST(damaged_text_is_survived) {
    static const char letters[] = "0123456789FBIWR_SENDRECV,,\r\n \t\"-;(\x80\xFF";
    harness_rng rng = {32};
    int round, accepted = 0;
    for (round = 0; round < 6000; round++) {
        cf_plan *plan = naive_plan(&rng, 4, 1);
        cf_schedule *s = draw(&rng, plan), *again = NULL;
        schedule_csv_desc desc;
        text t = {NULL, 0, 0, -1};
        cf_error error;
        cf_result result;
        char *exact;
        size_t n, i;
        int edits = (int)harness_between(&rng, 1, 4);
        REQUIRE(s != NULL);
        harness_note("round %d", round);
        memset(&desc, 0, sizeof desc);
        desc.extensions = 1;
        desc.replay = s->replay;
        CHECK_INT(schedule_csv_write(plan, s, &desc, collect, &t, &error), CF_OK);
        desc.legacy = harness_chance(&rng, 0.2);
        n = t.n;
        exact = (char *)malloc(n + 5);
        if (!exact) abort();
        memcpy(exact, t.at, n);
        for (; edits > 0 && n > 0; edits--) {
            size_t at = (size_t)harness_between(&rng, 0, (int64_t)n - 1);
            char letter = letters[harness_between(&rng, 0, (int64_t)sizeof letters - 1)]; /* the 0 at the end as well */
            switch (harness_between(&rng, 0, 3)) {
                case 0: exact[at] = letter; break;
                case 1: memmove(exact + at, exact + at + 1, n - at - 1), n--; break;
                case 2: memmove(exact + at + 1, exact + at, n - at), n++, exact[at] = letter; break;
                default: n = at; break;
            }
        }
        { /* a block that ends with the text */
            char *cut = (char *)malloc(n > 0 ? n : 1);
            if (!cut) abort();
            memcpy(cut, exact, n);
            memset(&error, 0, sizeof error);
            result = schedule_csv_read(cut, n, plan, &desc, &again, &error);
            free(cut);
        }
        if (result == CF_OK) {
            accepted++;
            for (i = 0; i < (size_t)again->n_actions; i++) CHECK(again->actions[i].reserved == 0);
            if (again->n_stages <= 60) CHECK_STR(naive_fault(plan, again), NULL);
            cf_schedule_free(again);
        } else {
            CHECK(result == CF_ERROR_TEXT || result == CF_ERROR_SCHEDULE);
            CHECK(again == NULL && error.code == result && error.text[0] != 0);
        }
        free(exact);
        free(t.at);
        naive_free(s);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
    CHECK(accepted > 50);
    harness_report("%d of %d damaged texts were still sound", accepted, round);
}

SUITE(csv, CASE(reads_and_writes_rows_in_a_v), CASE(reads_a_zero_bubble_file_of_the_older_kind), CASE(bw_is_the_whole_backward_of_older_files),
      CASE(reads_and_writes_both_dialects), CASE(replay_is_an_extension), CASE(line_ends_blanks_and_empty_cells),
      CASE(an_empty_plan_has_empty_lines), CASE(bad_text_is_refused_with_its_place),
      CASE(sound_text_of_an_unsound_schedule_is_refused), CASE(formats_are_enforced_when_asked_for),
      CASE(csv_arguments_are_checked), CASE(round_trips), CASE(damaged_text_is_survived));
