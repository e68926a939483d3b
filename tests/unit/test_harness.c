/* Tests the harness with itself: every check that can fail is shown to fail. */

#include "../harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the comparator ---- */

TEST(comparator_accepts_what_is_near) {
    const double wanted[] = {1.0, -2.0, 0.0, 1e300};
    const double same[] = {1.0, -2.0, 0.0, 1e300};
    const double near[] = {1.0 + 1e-12, -2.0 - 1e-12, 1e-13, 1e300 * (1 + 1e-13)};
    CHECK(harness_compare(same, 4, wanted, 4, 0.0, 0.0).ok);
    CHECK(harness_compare(near, 4, wanted, 4, 1e-11, 1e-12).ok);
    /* item 2 has a wanted value of 0, so only the absolute tolerance applies */
    CHECK(!harness_compare(near, 4, wanted, 4, 1e-11, 1e-14).ok);
    CHECK(!harness_compare(near, 4, wanted, 4, 1e-14, 1e-12).ok);
    CHECK_INT(harness_compare(near, 4, wanted, 4, 1e-11, 1e-14).first_bad, 2);
}

TEST(comparator_rejects_nan_and_infinity) {
    const double values[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    const double wanted[] = {1.0, 2.0, 3.0};
    double got[3];
    size_t i, j;
    for (i = 0; i < 3; i++) {
        for (j = 0; j < 3; j++) {
            harness_difference d;
            memcpy(got, wanted, sizeof got);
            got[j] = values[i];
            d = harness_compare(got, 3, wanted, 3, 0.5, 1e30);
            CHECK(!d.ok);
            CHECK_INT(d.n_bad, 1);
            CHECK_INT(d.n_nonfinite, 1);
            CHECK_INT(d.first_bad, j);
            /* a reference with a NaN or an infinity never agrees */
            CHECK(!harness_compare(wanted, 3, got, 3, 0.5, 1e30).ok);
            CHECK(!harness_compare(got, 3, got, 3, 0.5, 1e30).ok);    /* nor do two equal infinities agree */
        }
    }
}

TEST(comparator_rejects_stale_poison) {
    double got[5], wanted[5] = {0, 0, 0, 0, 0};
    float got_float[5];
    harness_poison(got, sizeof got);
    harness_poison(got_float, sizeof got_float);
    CHECK_INT(harness_compare(got, 5, wanted, 5, 1.0, 1e300).n_bad, 5);
    CHECK_INT(harness_compare_float(got_float, 5, wanted, 5, 1.0, 1e300).n_bad, 5);
    got[0] = got[1] = got[2] = got[3] = 0; /* all items except the last are written */
    CHECK_INT(harness_compare(got, 5, wanted, 5, 0.0, 0.0).first_bad, 4);
}

TEST(comparator_rejects_off_by_one) {
    double wanted[7], got[7];
    size_t i;
    for (i = 0; i < 7; i++) wanted[i] = (double)(i * i) + 1.0;
    for (i = 0; i < 7; i++) got[i] = wanted[(i + 1) % 7];
    CHECK_INT(harness_compare(got, 7, wanted, 7, 1e-3, 1e-3).n_bad, 7);
    memcpy(got, wanted, sizeof got);
    got[6] += 0.5;
    CHECK_INT(harness_compare(got, 7, wanted, 7, 1e-3, 1e-3).n_bad, 1);
}

TEST(comparator_rejects_wrong_counts) {
    const double numbers[3] = {1, 2, 3};
    CHECK(!harness_compare(numbers, 2, numbers, 3, 0.0, 0.0).ok);
    CHECK(!harness_compare(numbers, 3, numbers, 2, 0.0, 0.0).ok);
    CHECK(!harness_compare(numbers, 0, numbers, 0, 0.0, 0.0).ok);
}

TEST(comparator_rejects_useless_tolerances) {
    const double one = 1.0, two = 2.0, huge = 1e308;
    CHECK(!harness_compare(&one, 1, &two, 1, (double)INFINITY, 0.0).ok);
    CHECK(!harness_compare(&one, 1, &two, 1, 0.0, (double)INFINITY).ok);
    CHECK(!harness_compare(&one, 1, &one, 1, (double)NAN, 0.0).ok);
    CHECK(!harness_compare(&one, 1, &one, 1, -1e-9, 0.0).ok);
    CHECK(!harness_compare(&one, 1, &huge, 1, 1e10, 0.0).ok); /* relative x |wanted| overflows */
}

TEST(comparator_lets_no_average_outweigh_an_item) {
    static double got[10000], wanted[10000];
    harness_difference d;
    size_t i;
    for (i = 0; i < 10000; i++) got[i] = wanted[i] = 1.0;
    got[7321] = 1.001;
    d = harness_compare(got, 10000, wanted, 10000, 1e-6, 0.0);
    CHECK(!d.ok);
    CHECK_INT(d.first_bad, 7321);
    CHECK(d.largest_relative > 0.9e-3 && d.largest_relative < 1.1e-3);
}

TEST(comparator_of_floats) {
    const float got[2] = {1.0f, 3.0000002f};
    const double wanted[2] = {1.0, 3.0};
    CHECK(harness_compare_float(got, 2, wanted, 2, 1e-6, 0.0).ok);
    CHECK(!harness_compare_float(got, 2, wanted, 2, 1e-9, 0.0).ok);
}

/* ---- inner runs: a suite runs inside a test, and its output goes to a file ---- */

static void inner_passes(void) { CHECK(1); }
static void inner_fails_check(void) { CHECK(0 > 1); }
static void inner_fails_int(void) { CHECK_INT(2 + 2, 5); }
static void inner_fails_str(void) { CHECK_STR("a", "b"); }
static void inner_fails_null_str(void) { CHECK_STR(NULL, "b"); }
static void inner_fails_poisoned_str(void) {
    const char *text;
    harness_poison(&text, sizeof text);
    CHECK_STR(text, "b");
}
static void inner_fails_fail(void) { FAIL("%s", "on purpose"); }
static void inner_fails_then_passes(void) {
    CHECK(0);
    CHECK(1);
}
static void inner_checks_nothing(void) {}
static void inner_skips(void) { SKIP("no such device"); }
static void inner_fails_then_skips(void) {
    CHECK(0);
    SKIP("too late to hide");
}
static int inner_went_on;
static void inner_requires(void) {
    REQUIRE(0);
    inner_went_on = 1;
}
static void inner_fails_near(void) {
    const double got = 1.0, wanted = (double)NAN;
    CHECK_NEAR(harness_compare(&got, 1, &wanted, 1, 1.0, 1.0));
}
static void inner_fails_poison(void) {
    unsigned char bytes[3] = {HARNESS_POISON, 0, HARNESS_POISON};
    CHECK_POISON(bytes, sizeof bytes);
}

static char inner_output[8000];

/* Runs one function as the test "inner.one". Its output is in inner_output. */
static harness_counts run_inner(void (*function)(void), const char *const *filters, size_t n_filters) {
    harness_case one;
    harness_suite suite;
    const harness_suite *suites[1];
    harness_counts counts = {-1, -1, -1};
    FILE *out = tmpfile();
    size_t bytes;
    inner_output[0] = 0;
    if (!CHECK(out != NULL)) return counts;
    one.name = "one";
    one.run = function;
    suite.name = "inner";
    suite.cases = &one;
    suite.n_cases = 1;
    suites[0] = &suite;
    counts = harness_run(suites, 1, filters, n_filters, out);
    rewind(out);
    bytes = fread(inner_output, 1, sizeof inner_output - 1, out);
    inner_output[bytes] = 0;
    fclose(out);
    return counts;
}

static void check_inner(void (*function)(void), int passed, int failed, int skipped, const char *last_line) {
    harness_counts counts = run_inner(function, NULL, 0);
    size_t length = strlen(inner_output), tail = strlen(last_line);
    CHECK_INT(counts.passed, passed);
    CHECK_INT(counts.failed, failed);
    CHECK_INT(counts.skipped, skipped);
    CHECK(length > tail && strcmp(inner_output + length - tail, last_line) == 0);
    CHECK(strstr(inner_output, "inner.one") != NULL);
}

TEST(failing_checks_are_counted) {
    void (*const failing[])(void) = {inner_fails_check, inner_fails_int,         inner_fails_str,
                                     inner_fails_fail,  inner_fails_then_passes, inner_fails_near,
                                     inner_fails_null_str, inner_fails_poisoned_str, inner_fails_poison};
    size_t i;
    check_inner(inner_passes, 1, 0, 0, "\n1 passed, 0 failed\n");
    for (i = 0; i < sizeof failing / sizeof failing[0]; i++) {
        check_inner(failing[i], 0, 1, 0, "\n0 passed, 1 failed\n");
        CHECK(strstr(inner_output, "test_harness.c:") != NULL);
    }
    check_inner(inner_fails_int, 0, 1, 0, "\n0 passed, 1 failed\n");
    CHECK(strstr(inner_output, "got 4, wanted 5") != NULL);
}

TEST(a_test_that_checks_nothing_fails) {
    check_inner(inner_checks_nothing, 0, 1, 0, "\n0 passed, 1 failed\n");
}

TEST(require_leaves_the_test) {
    inner_went_on = 0;
    check_inner(inner_requires, 0, 1, 0, "\n0 passed, 1 failed\n");
    CHECK_INT(inner_went_on, 0);
}

TEST(skipped_is_said_only_when_so) {
    check_inner(inner_skips, 0, 0, 1, "\n0 passed, 0 failed, 1 skipped\n");
    CHECK(strstr(inner_output, "no such device") != NULL);
    check_inner(inner_fails_then_skips, 0, 1, 0, "\n0 passed, 1 failed\n");
}

static void inner_fails_often(void) {
    int i;
    for (i = 0; i < 1000; i++) CHECK_INT(i, -1);
}

TEST(many_failures_do_not_flood) {
    check_inner(inner_fails_often, 0, 1, 0, "\n0 passed, 1 failed\n");
    CHECK(strlen(inner_output) < 3000);
    CHECK(strstr(inner_output, "1000 of 1000 checks") != NULL);
}

static void inner_notes(void) {
    harness_note("seed %d", 77);
    CHECK(0);
}

TEST(a_note_is_printed_with_the_failure) {
    check_inner(inner_notes, 0, 1, 0, "\n0 passed, 1 failed\n");
    CHECK(strstr(inner_output, "seed 77") != NULL);
    check_inner(inner_fails_check, 0, 1, 0, "\n0 passed, 1 failed\n"); /* a note ends with its test */
    CHECK(strstr(inner_output, "seed 77") == NULL);
}

TEST(filters_choose) {
    const char *const hit[] = {"nothing like it", "ner.o"};
    const char *const miss[] = {"nothing like it"};
    harness_counts counts = run_inner(inner_passes, hit, 2);
    CHECK_INT(counts.passed, 1);
    counts = run_inner(inner_passes, miss, 1);
    CHECK_INT(counts.passed + counts.failed + counts.skipped, 0);
    CHECK(strstr(inner_output, "no test matches") != NULL);
}

/* The name must be flushed before the test runs, so that a crash shows which test it was. */
static FILE *crash_out;
static char crash_seen[64];
static void inner_looks_at_the_output(void) {
    size_t bytes;
    rewind(crash_out);
    bytes = fread(crash_seen, 1, sizeof crash_seen - 1, crash_out);
    crash_seen[bytes] = 0;
    fseek(crash_out, 0, SEEK_END);
    CHECK(1);
}

TEST(the_name_is_out_before_the_test_runs) {
    harness_case one;
    harness_suite suite;
    const harness_suite *suites[1];
    one.name = "looks";
    one.run = inner_looks_at_the_output;
    suite.name = "inner";
    suite.cases = &one;
    suite.n_cases = 1;
    suites[0] = &suite;
    crash_out = tmpfile();
    REQUIRE(crash_out != NULL);
    harness_run(suites, 1, NULL, 0, crash_out);
    fclose(crash_out);
    CHECK(strncmp(crash_seen, "inner.looks", 11) == 0);
}

/* Runs a whole program with one passing test and, if wanted, a failing one. Its output is in inner_output. */
static int run_program(int argc, char **argv, size_t n_cases) {
    static const harness_case cases[] = {{"good", inner_passes}, {"bad", inner_fails_check}};
    harness_suite suite;
    const harness_suite *suites[1];
    FILE *out = tmpfile();
    size_t bytes;
    int status;
    inner_output[0] = 0;
    if (!CHECK(out != NULL)) return -1;
    suite.name = "inner";
    suite.cases = cases;
    suite.n_cases = n_cases;
    suites[0] = &suite;
    status = harness_main_to(argc, argv, suites, 1, out, out);
    rewind(out);
    bytes = fread(inner_output, 1, sizeof inner_output - 1, out);
    inner_output[bytes] = 0;
    fclose(out);
    return status;
}

TEST(exit_status) {
    char program[] = "program", list[] = "--list", unknown[] = "--lst", good[] = "inner.g", none[] = "no such name";
    char *arguments[] = {program, NULL, NULL};
    CHECK_INT(run_program(1, arguments, 1), 0);
    CHECK_INT(run_program(1, arguments, 2), 1);
    CHECK(strstr(inner_output, "\n1 passed, 1 failed\n") != NULL);
    arguments[1] = good; /* chooses the passing test */
    CHECK_INT(run_program(2, arguments, 2), 0);
    arguments[1] = none; /* a misspelt name is a failure */
    CHECK_INT(run_program(2, arguments, 2), 1);
    arguments[1] = unknown;
    CHECK_INT(run_program(2, arguments, 2), 2);
    CHECK(strstr(inner_output, "unknown option --lst") != NULL);
    arguments[1] = list;
    CHECK_INT(run_program(2, arguments, 2), 0);
    CHECK_STR(inner_output, "inner.good\ninner.bad\n");
}

/* ---- guard bands and poison ---- */

TEST(poison_is_told_from_data) {
    unsigned char bytes[9];
    double number;
    size_t i;
    harness_poison(bytes, sizeof bytes);
    CHECK_POISON(bytes, sizeof bytes);
    for (i = 0; i < sizeof bytes; i++) {
        harness_poison(bytes, sizeof bytes);
        bytes[i] = 0xFE;
        CHECK(!harness_is_poison(bytes, sizeof bytes));
    }
    harness_poison(&number, sizeof number);
    CHECK(number != number);
}

/* Frees a block whose guard bands are broken, in an inner run that must fail. */
static void *broken_block;
static void inner_frees_broken_block(void) {
    CHECK(1);
    harness_guard_free(broken_block);
}

static void check_guard_detects(size_t bytes, ptrdiff_t at) {
    unsigned char *p = (unsigned char *)harness_guard_new(bytes);
    harness_note("block of %d, write at %d", (int)bytes, (int)at);
    CHECK(harness_guard_ok(p));
    p[at] = 0x11;
    CHECK(!harness_guard_ok(p));
    broken_block = p;
    check_inner(inner_frees_broken_block, 0, 1, 0, "\n0 passed, 1 failed\n");
    harness_note("%s", "");
}

TEST(guards_detect_overruns) {
    const size_t sizes[] = {0, 1, 7, 16, 1000};
    size_t i;
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        ptrdiff_t size = (ptrdiff_t)sizes[i];
        check_guard_detects(sizes[i], size);
        check_guard_detects(sizes[i], size + 63);
        check_guard_detects(sizes[i], -1);
        check_guard_detects(sizes[i], -64);
    }
}

TEST(guards_let_the_block_be_used) {
    unsigned char *p = (unsigned char *)harness_guard_new(33);
    CHECK_INT((uintptr_t)p % 16, 0);
    CHECK_POISON(p, 33);
    memset(p, 0, 33);
    CHECK(harness_guard_ok(p));
    harness_guard_free(p);
}

/* ---- the heap ---- */

TEST(heap_counts) {
    harness_heap heap = {0};
    void *a = harness_alloc(10, &heap), *b = harness_alloc(0, &heap);
    CHECK(a && b && a != b);
    CHECK_INT((uintptr_t)a % 16, 0);
    CHECK_POISON(a, 10);
    CHECK_INT(heap.calls, 2);
    CHECK_INT(heap.live, 2);
    harness_release(NULL, &heap);
    CHECK_INT(heap.live, 2);
    harness_release(a, &heap);
    harness_release(b, &heap);
    CHECK_INT(heap.live, 0);
    CHECK_INT(heap.faults, 0);
    CHECK_INT(heap.failed, 0);
}

TEST(heap_fails_when_told) {
    harness_heap heap = {0}, once = {0};
    void *blocks[4];
    int i;
    heap.fail_at = once.fail_at = 3;
    once.only_once = 1;
    for (i = 0; i < 4; i++) blocks[i] = harness_alloc(8, &heap);
    CHECK(blocks[0] && blocks[1] && !blocks[2] && !blocks[3]);
    CHECK_INT(heap.failed, 2);
    CHECK_INT(heap.live, 2);
    for (i = 0; i < 4; i++) harness_release(blocks[i], &heap);
    for (i = 0; i < 4; i++) blocks[i] = harness_alloc(8, &once);
    CHECK(blocks[0] && blocks[1] && !blocks[2] && blocks[3]);
    for (i = 0; i < 4; i++) harness_release(blocks[i], &once);
    CHECK_INT(heap.live + once.live, 0);
}

static harness_heap misused_heap;
static void inner_releases_twice(void) {
    void *block = harness_alloc(8, &misused_heap);
    CHECK(block != NULL);
    harness_release(block, &misused_heap);
    harness_release(block, &misused_heap);
}

static void inner_releases_foreign(void) {
    harness_heap other = {0};
    void *block = harness_alloc(8, &other);
    CHECK(block != NULL);
    harness_release(block, &misused_heap);
    harness_release(block, &other);
}

static void inner_writes_before_block(void) {
    unsigned char *block = (unsigned char *)harness_alloc(8, &misused_heap);
    CHECK(block != NULL);
    block[-1] = 0x11;
    harness_release(block, &misused_heap);
}

TEST(heap_detects_misuse) {
    memset(&misused_heap, 0, sizeof misused_heap);
    check_inner(inner_releases_twice, 0, 1, 0, "\n0 passed, 1 failed\n");
    check_inner(inner_releases_foreign, 0, 1, 0, "\n0 passed, 1 failed\n");
    check_inner(inner_writes_before_block, 0, 1, 0, "\n0 passed, 1 failed\n");
    CHECK_INT(misused_heap.faults, 3);
    CHECK_INT(misused_heap.live, 0);
}

/* ---- what is written ---- */

TEST(text_is_collected_and_refused) {
    harness_text text = {0};
    char digits[] = "0123456789";
    int i;
    for (i = 0; i < 100; i++) CHECK_INT(harness_collect(digits + i % 10, 1, &text), 0);
    CHECK_INT(text.n, 100);
    CHECK_INT(strlen(text.at), 100);
    for (i = 0; i < 100; i++) CHECK(text.at[i] == digits[i % 10]);
    text.calls = 0;
    text.fail_at = 2;
    CHECK_INT(harness_collect("a", 1, &text), 0);
    CHECK_INT(harness_collect("b", 1, &text), HARNESS_REFUSAL);
    CHECK_INT(text.calls_after_failure, 0);
    CHECK_INT(harness_collect("c", 1, &text), 0);
    CHECK_INT(text.calls_after_failure, 1);
    CHECK_STR(text.at + 100, "ac");
    free(text.at);
}

static void inner_writes_nothing(void) {
    harness_text text = {0};
    CHECK_INT(harness_collect("", 0, &text), HARNESS_REFUSAL);
}

TEST(text_detects_empty_pieces) { check_inner(inner_writes_nothing, 0, 1, 0, "\n0 passed, 1 failed\n"); }

/* ---- random numbers ---- */

TEST(random_numbers_are_those_of_splitmix64) {
    harness_rng rng = {1234567}; /* first outputs of the reference implementation for this seed */
    CHECK(harness_random(&rng) == 6457827717110365317u);
    CHECK(harness_random(&rng) == 3203168211198807973u);
    CHECK(harness_random(&rng) == 9817491932198370423u);
}

TEST(random_numbers_stay_in_range) {
    harness_rng rng = {5};
    int64_t seen[7] = {0};
    int i;
    for (i = 0; i < 7000; i++) {
        int64_t n = harness_between(&rng, -3, 3);
        double u = harness_unit(&rng);
        REQUIRE(n >= -3 && n <= 3 && u >= 0.0 && u < 1.0);
        seen[n + 3]++;
    }
    for (i = 0; i < 7; i++) CHECK(seen[i] > 800 && seen[i] < 1200);
    CHECK_INT(harness_between(&rng, 9, 9), 9);
    CHECK(harness_between(&rng, INT64_MIN, INT64_MAX) != harness_between(&rng, INT64_MIN, INT64_MAX));
}

SUITE(harness, CASE(comparator_accepts_what_is_near), CASE(comparator_rejects_nan_and_infinity),
      CASE(comparator_rejects_stale_poison), CASE(comparator_rejects_off_by_one),
      CASE(comparator_rejects_wrong_counts), CASE(comparator_rejects_useless_tolerances),
      CASE(comparator_lets_no_average_outweigh_an_item), CASE(comparator_of_floats), CASE(failing_checks_are_counted),
      CASE(a_test_that_checks_nothing_fails), CASE(require_leaves_the_test), CASE(skipped_is_said_only_when_so),
      CASE(many_failures_do_not_flood), CASE(a_note_is_printed_with_the_failure), CASE(filters_choose),
      CASE(the_name_is_out_before_the_test_runs), CASE(exit_status), CASE(poison_is_told_from_data),
      CASE(guards_detect_overruns), CASE(guards_let_the_block_be_used), CASE(heap_counts), CASE(heap_fails_when_told),
      CASE(text_is_collected_and_refused), CASE(text_detects_empty_pieces),
      CASE(heap_detects_misuse), CASE(random_numbers_are_those_of_splitmix64), CASE(random_numbers_stay_in_range));
