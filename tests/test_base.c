/* >>base: result codes, their texts, version, linkage of the error record. */

#include "chunkflow.h"
#include "harness.h"

#include <string.h>

typedef struct named_code {
    cf_result code;
    const char *name;
} named_code;

static const named_code codes[] = {
    {CF_OK, "CF_OK"},
    {CF_ERROR_ARGUMENT, "CF_ERROR_ARGUMENT"},
    {CF_ERROR_LIMIT, "CF_ERROR_LIMIT"},
    {CF_ERROR_OVERFLOW, "CF_ERROR_OVERFLOW"},
    {CF_ERROR_MEMORY, "CF_ERROR_MEMORY"},
    {CF_ERROR_SPACE, "CF_ERROR_SPACE"},
    {CF_ERROR_PLAN, "CF_ERROR_PLAN"},
    {CF_ERROR_SCHEDULE, "CF_ERROR_SCHEDULE"},
    {CF_ERROR_CALLBACK, "CF_ERROR_CALLBACK"},
    {CF_ERROR_CANCELLED, "CF_ERROR_CANCELLED"},
    {CF_ERROR_WRITE, "CF_ERROR_WRITE"},
    {CF_ERROR_INFEASIBLE, "CF_ERROR_INFEASIBLE"},
    {CF_ERROR_GRAPH, "CF_ERROR_GRAPH"},
    {CF_ERROR_TEXT, "CF_ERROR_TEXT"},
    {CF_ERROR_DEVICE, "CF_ERROR_DEVICE"},
};
#define N_CODES (sizeof codes / sizeof codes[0])

TEST(every_code_has_a_name_and_a_text) {
    size_t i, j;
    CHECK_INT(CF_OK, 0);
    CHECK_INT(N_CODES, CF_RESULT_COUNT); /* this table is whole */
    for (i = 0; i < N_CODES; i++) {
        const char *text = cf_result_text(codes[i].code);
        CHECK_INT(codes[i].code, i); /* an ABI: codes may be added at the end, not moved */
        CHECK_STR(cf_result_name(codes[i].code), codes[i].name);
        REQUIRE(text != NULL && text[0] != 0);
        CHECK(strchr(text, '\n') == NULL);
        for (j = 0; j < i; j++) CHECK(strcmp(text, cf_result_text(codes[j].code)) != 0);
    }
}

TEST(unknown_codes_have_a_name_and_a_text) {
    const int unknown[] = {-1, CF_RESULT_COUNT, CF_RESULT_COUNT + 1, 9999, INT32_MAX, INT32_MIN};
    size_t i, j;
    for (i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        /* Through memory: a conversion of such a number to the enum may not be defined in every language mode. */
        cf_result code;
        const char *name, *text;
        memset(&code, 0, sizeof code);
        memcpy(&code, &unknown[i], sizeof code < sizeof unknown[i] ? sizeof code : sizeof unknown[i]);
        name = cf_result_name(code);
        text = cf_result_text(code);
        REQUIRE(name != NULL && text != NULL && name[0] != 0 && text[0] != 0);
        for (j = 0; j < N_CODES; j++) CHECK(strcmp(name, codes[j].name) != 0);
    }
}

TEST(version_numbers_agree) {
    char text[64];
    snprintf(text, sizeof text, "%d.%d.%d", CHUNKFLOW_VERSION_MAJOR, CHUNKFLOW_VERSION_MINOR, CHUNKFLOW_VERSION_PATCH);
    CHECK_STR(CHUNKFLOW_VERSION, text);
}

TEST(names_of_passes_kinds_and_replays) {
    CHECK_STR(cf_pass_name(CF_F), "F");
    CHECK_STR(cf_pass_name(CF_R), "R");
    CHECK_STR(cf_pass_name(CF_B), "B");
    CHECK_STR(cf_pass_name(CF_I), "I");
    CHECK_STR(cf_pass_name(CF_W), "W");
    CHECK_STR(cf_pass_name(CF_PASS_COUNT), "?");
    CHECK_STR(cf_pass_name((cf_pass)255), "?");
    CHECK_STR(cf_schedule_kind_name(CF_SCHEDULE_PAPER), "paper");
    CHECK_STR(cf_schedule_kind_name(CF_SCHEDULE_COUNT), "?");
    CHECK_STR(cf_replay_name(CF_REPLAY_PIPELINE), "pipeline");
    CHECK_STR(cf_replay_name(CF_REPLAY_LOCAL), "local");
    CHECK_STR(cf_replay_name(CF_REPLAY_COUNT), "?");
}

/* An action is written by the million; the header promises its size. */
TEST(an_action_takes_12_bytes) {
    CHECK_INT(sizeof(cf_action), 12);
}

SUITE(base, CASE(every_code_has_a_name_and_a_text), CASE(unknown_codes_have_a_name_and_a_text),
      CASE(version_numbers_agree), CASE(names_of_passes_kinds_and_replays), CASE(an_action_takes_12_bytes));
