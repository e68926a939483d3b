/* >>base: result codes, their texts, version, the error record, memory. */

#include "chunkflow.h"
#include "../harness.h"

#include <math.h>
#include <stdlib.h>
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
    {CF_ERROR_TEXT, "CF_ERROR_TEXT"},
    {CF_ERROR_DEVICE, "CF_ERROR_DEVICE"},
};
#define N_CODES (sizeof codes / sizeof codes[0])

TEST(every_code_has_a_name) {
    size_t i;
    CHECK_INT(CF_OK, 0);
    CHECK_INT(N_CODES, CF_RESULT_COUNT); /* this table is whole */
    for (i = 0; i < N_CODES; i++) {
        CHECK_INT(codes[i].code, i); /* an ABI: codes may be added at the end, not moved */
        CHECK_STR(cf_result_name(codes[i].code), codes[i].name);
    }
}

TEST(unknown_codes_have_a_name) {
    const int unknown[] = {-1, CF_RESULT_COUNT, CF_RESULT_COUNT + 1, 9999, INT32_MAX, INT32_MIN};
    size_t i, j;
    for (i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        /* Set through memory, because converting such a number to the enum is undefined in some language modes. */
        cf_result code = {0};
        const char *name;
        memcpy(&code, &unknown[i], sizeof code < sizeof unknown[i] ? sizeof code : sizeof unknown[i]);
        name = cf_result_name(code);
        REQUIRE(name != NULL && name[0] != 0);
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

/* Schedules have millions of actions, and the header promises the size of one. */
TEST(an_action_takes_12_bytes) {
    CHECK_INT(sizeof(cf_action), 12);
}

/* ---- failing ---- */

static void check_record(const cf_error *error, cf_result code, int64_t item, int64_t wanted, int64_t got,
                         const char *text) {
    CHECK_INT(error->code, code);
    CHECK_STR(error->field, "layers");
    CHECK_INT(error->item, item);
    CHECK_INT(error->wanted, wanted);
    CHECK_INT(error->got, got);
    CHECK_STR(error->text, text);
}

TEST(a_failure_is_a_whole_record) {
    cf_error error;
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_fail(&error, CF_ERROR_LIMIT, "layers", 3, 7, INT64_MIN, "is wrong"), CF_ERROR_LIMIT);
    check_record(&error, CF_ERROR_LIMIT, 3, 7, INT64_MIN,
                 "layers[3]: is wrong (wanted 7, got -9223372036854775808)");
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_fail(&error, CF_ERROR_PLAN, "layers", -1, 0, 9, "is wrong"), CF_ERROR_PLAN);
    check_record(&error, CF_ERROR_PLAN, -1, 0, 9, "layers: is wrong (wanted 0, got 9)");
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_refuse(&error, CF_ERROR_SCHEDULE, "layers", 0, "must rise"), CF_ERROR_SCHEDULE);
    check_record(&error, CF_ERROR_SCHEDULE, 0, 0, 0, "layers[0]: must rise");
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_fail_null(&error, "layers"), CF_ERROR_ARGUMENT);
    check_record(&error, CF_ERROR_ARGUMENT, -1, 0, 0, "layers: must not be NULL");
}

TEST(a_real_number_is_called_what_it_is) {
    static const struct {
        double got;
        const char *text;
    } cases[] = {{-0.5, "layers[2]: is bad (got -0.5)"},
                 {0.1, "layers[2]: is bad (got 0.10000000000000001)"},
                 {1.7976931348623157e308, "layers[2]: is bad (got 1.7976931348623157e+308)"},
                 {INFINITY, "layers[2]: is bad (got infinity)"},
                 {-INFINITY, "layers[2]: is bad (got -infinity)"},
                 {NAN, "layers[2]: is bad (got NaN)"}};
    cf_error error;
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        harness_poison(&error, sizeof error);
        CHECK_INT(cf_fail_real(&error, CF_ERROR_OVERFLOW, "layers", 2, cases[i].got, "is bad"), CF_ERROR_OVERFLOW);
        check_record(&error, CF_ERROR_OVERFLOW, 2, 0, 0, cases[i].text);
    }
}

TEST(a_failure_needs_no_record_and_no_short_words) {
    char why[1000];
    cf_error error;
    memset(why, 'w', sizeof why);
    why[sizeof why - 1] = 0;
    CHECK_INT(cf_fail(NULL, CF_ERROR_LIMIT, "layers", 3, 7, 8, why), CF_ERROR_LIMIT);
    CHECK_INT(cf_fail_real(NULL, CF_ERROR_PLAN, "layers", 3, NAN, why), CF_ERROR_PLAN);
    CHECK_INT(cf_fail_null(NULL, "layers"), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_refuse(NULL, CF_ERROR_TEXT, "layers", 3, why), CF_ERROR_TEXT);
    CHECK_INT(cf_fail(&error, CF_ERROR_LIMIT, "layers", -1, 7, 8, why), CF_ERROR_LIMIT);
    CHECK_INT(strlen(error.text), sizeof error.text - 1);
    CHECK(strncmp(error.text, "layers: www", 11) == 0);
}

/* ---- memory ---- */

TEST(an_allocator_is_whole_or_refused) {
    const cf_allocator zero = {NULL, NULL, NULL}, no_release = {harness_alloc, NULL, NULL};
    const cf_allocator no_alloc = {NULL, harness_release, NULL};
    harness_heap heap;
    const cf_allocator own = {harness_alloc, harness_release, &heap};
    cf_allocator found;
    cf_error error;
    REQUIRE(cf_allocator_resolve(&own, &found, &error) == CF_OK);
    CHECK(found.alloc == own.alloc && found.release == own.release && found.user == own.user);
    REQUIRE(cf_allocator_resolve(NULL, &found, &error) == CF_OK);
    CHECK(found.alloc != NULL && found.release != NULL);
    REQUIRE(cf_allocator_resolve(&zero, &found, &error) == CF_OK);
    CHECK(found.alloc != NULL && found.release != NULL);
    harness_poison(&found, sizeof found);
    CHECK_INT(cf_allocator_resolve(&no_release, &found, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "allocator.release");
    CHECK_STR(error.text, "allocator.release: must not be NULL");
    CHECK_INT(cf_allocator_resolve(&no_alloc, &found, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "allocator.alloc");
    CHECK_INT(cf_allocator_resolve(&no_alloc, &found, NULL), CF_ERROR_ARGUMENT);
    CHECK_POISON(&found, sizeof found);
}

TEST(memory_is_there_or_named) {
    harness_heap heap = {0};
    const cf_allocator own = {harness_alloc, harness_release, &heap};
    cf_allocator standard;
    cf_error error;
    void *memory = NULL, *none = NULL;
    REQUIRE(cf_allocate(&own, 40, &memory, &error) == CF_OK);
    REQUIRE(cf_allocate(&own, 0, &none, &error) == CF_OK);
    memset(memory, 1, 40);
    memset(none, 1, 1); /* a byte at least */
    CHECK(none != memory);
    own.release(none, own.user);
    own.release(memory, own.user);
    CHECK_INT(heap.live, 0);
    CHECK_INT(heap.faults, 0);
    heap.fail_at = heap.calls + 1;
    harness_poison(&memory, sizeof memory);
    CHECK_INT(cf_allocate(&own, 77, &memory, &error), CF_ERROR_MEMORY);
    CHECK_INT(error.code, CF_ERROR_MEMORY);
    CHECK_STR(error.field, "allocator");
    CHECK_INT(error.item, -1);
    CHECK_INT(error.wanted, 77);
    CHECK_INT(error.got, 0);
    CHECK_STR(error.text, "allocator: gave no memory (wanted 77 bytes)");
    CHECK_INT(cf_allocate(&own, 77, &memory, NULL), CF_ERROR_MEMORY);
    CHECK_POISON(&memory, sizeof memory);
    REQUIRE(cf_allocator_resolve(NULL, &standard, NULL) == CF_OK);
    REQUIRE(cf_allocate(&standard, 40, &memory, NULL) == CF_OK);
    memset(memory, 1, 40);
    standard.release(memory, standard.user);
}

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN
#endif
#endif

#ifdef WITH_ASAN
int __asan_address_is_poisoned(void const volatile *address);
void *__asan_region_is_poisoned(void *begin, size_t bytes);

/* The sanitizer catches a write one past an array inside a shared block, as it would if the array had its own block. */
TEST(sanitizers_see_the_end_of_every_array) {
    static const int64_t lengths[] = {900, 14000, 350};
    cf_pack_desc pack;
    cf_plan *plan = NULL;
    size_t bytes;
    unsigned char *memory;
    memset(&pack, 0, sizeof pack);
    pack.chunk_size = 2048;
    REQUIRE(cf_pack(lengths, 3, &pack, &plan, NULL) == CF_OK);
    CHECK(!__asan_address_is_poisoned(&plan->chunks[plan->n_chunks - 1]));
    CHECK(__asan_address_is_poisoned(&plan->chunks[plan->n_chunks]));
    CHECK(__asan_address_is_poisoned(&plan->slices[plan->n_slices]));
    CHECK(__asan_address_is_poisoned(&plan->chains[plan->n_chains]));
    CHECK(__asan_address_is_poisoned(plan + 1));
    cf_plan_free(plan);
    /* In the caller's memory, the poisoned gaps are lifted when the object is released and when creating it fails. */
    REQUIRE(cf_pack_size(lengths, 3, &pack, &bytes, NULL) == CF_OK);
    memory = (unsigned char *)malloc(bytes);
    REQUIRE(memory != NULL);
    REQUIRE(cf_pack_into(lengths, 3, &pack, memory, bytes, &plan, NULL) == CF_OK);
    CHECK(__asan_region_is_poisoned(memory, bytes) != NULL);
    cf_plan_free(plan);
    CHECK(__asan_region_is_poisoned(memory, bytes) == NULL);
    free(memory);
}
#define SANITIZED_CASES , CASE(sanitizers_see_the_end_of_every_array)
#else
#define SANITIZED_CASES
#endif

SUITE(base, CASE(every_code_has_a_name), CASE(unknown_codes_have_a_name),
      CASE(version_numbers_agree), CASE(names_of_passes_kinds_and_replays), CASE(an_action_takes_12_bytes),
      CASE(a_failure_is_a_whole_record), CASE(a_real_number_is_called_what_it_is),
      CASE(a_failure_needs_no_record_and_no_short_words), CASE(an_allocator_is_whole_or_refused),
      CASE(memory_is_there_or_named) SANITIZED_CASES);
