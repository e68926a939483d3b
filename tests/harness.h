/* harness.h - a small test harness in one header - MIT or public domain

   In ONE file:

       #define HARNESS_IMPLEMENTATION
       #include "harness.h"
       extern const harness_suite suite_sums;
       int main(int argc, char **argv) {
           static const harness_suite *const suites[] = {&suite_sums};
           return harness_main(argc, argv, suites, sizeof suites / sizeof suites[0]);
       }

   and in each file of tests:

       #include "harness.h"
       TEST(two_and_two) { CHECK_INT(2 + 2, 4); }
       SUITE(sums, CASE(two_and_two));

   A test that is not listed in its SUITE is an unused function, which the compiler reports. A test that checks nothing
   counts as failed. Every test's name is printed and flushed before it runs, so a crash names its test.

   Command line: substrings of "suite.test" choose what runs (any of them; none: everything); --list prints the names.
   FULL=1 in the environment: every repetition of the tests that take harness_rounds; otherwise fewer of them.
   The last line is "N passed, N failed", with ", N skipped" only if there were any. Exit status: 0 if nothing failed
   and at least one test was chosen, 1 otherwise, 2 for a bad option.

   Sections: >>checks >>compare >>memory >>heap >>text >>random >>rounds >>runner. */

#ifndef HARNESS_H
#define HARNESS_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __FAST_MATH__
#error "harness.h: build tests without -ffast-math or -Ofast; they delete the checks for NaN"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define HARNESS__PRINTF(format_at, arguments_at) __attribute__((format(printf, format_at, arguments_at)))
#else
#define HARNESS__PRINTF(format_at, arguments_at)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================================
   >>checks    what a test says
   ================================================================================================================ */

/* Each yields 1 if its check held and 0 if not. REQUIRE also leaves the test, which must be a void function. */
#define CHECK(condition) harness_check(!!(condition), __FILE__, __LINE__, #condition)
#define CHECK_INT(got, wanted) \
    harness_check_int((int64_t)(got), (int64_t)(wanted), __FILE__, __LINE__, #got " == " #wanted)
#define CHECK_STR(got, wanted) harness_check_str((got), (wanted), __FILE__, __LINE__, #got)
#define CHECK_NEAR(difference) harness_check_near((difference), __FILE__, __LINE__, #difference)
#define CHECK_POISON(memory, bytes) \
    harness_check(harness_is_poison((memory), (bytes)), __FILE__, __LINE__, #memory " is untouched")
#define REQUIRE(condition)             \
    do {                               \
        if (!CHECK(condition)) return; \
    } while (0)
/* Leaves the test and counts it as skipped. `why` is printed. */
#define SKIP(why)          \
    do {                   \
        harness_skip(why); \
        return;            \
    } while (0)
/* Fails the test with a message of your own. */
#define FAIL(...) harness_fail(__FILE__, __LINE__, __VA_ARGS__)

int harness_check(int ok, const char *file, int line, const char *text);
int harness_check_int(int64_t got, int64_t wanted, const char *file, int line, const char *text);
int harness_check_str(const char *got, const char *wanted, const char *file, int line, const char *text);
int harness_fail(const char *file, int line, const char *format, ...) HARNESS__PRINTF(3, 4);
void harness_skip(const char *why);

/* A note that is printed with each later failure of this test, such as the seed of the case at hand. "" ends it. */
void harness_note(const char *format, ...) HARNESS__PRINTF(1, 2);

/* Prints a measurement that no check covers, after the test's result. Only the last call of a test counts. */
void harness_report(const char *format, ...) HARNESS__PRINTF(1, 2);

/* ================================================================================================================
   >>compare    arrays of numbers against a reference
   ================================================================================================================ */

typedef struct harness_difference {
    int ok;
    size_t n_bad;            /* items out of tolerance, the non-finite ones included */
    size_t n_nonfinite;      /* items that are NaN or infinite, on either side */
    size_t first_bad;        /* index of the first of them */
    double largest_absolute; /* over the finite items */
    double largest_relative; /* |got - wanted| / |wanted|, over finite items with wanted != 0 */
    char text[200];
} harness_difference;

/* Item i is good if |got - wanted| <= absolute + relative x |wanted|. These are never good: a NaN or an infinity on
   either side (poisoned memory reads as NaN, so this finds stale outputs), different numbers of items, no items at all,
   and a tolerance that is negative or not finite. One bad item fails the comparison, whatever the average. */
harness_difference harness_compare(const double *got, size_t n_got, const double *wanted, size_t n_wanted,
                                   double relative, double absolute);
harness_difference harness_compare_float(const float *got, size_t n_got, const double *wanted, size_t n_wanted,
                                         double relative, double absolute);
int harness_check_near(harness_difference difference, const char *file, int line, const char *text);

/* ================================================================================================================
   >>memory    poison and guard bands
   ================================================================================================================ */

/* Every byte 0xFF: NaN as a float or a double, -1 as an integer, an impossible pointer. */
#define HARNESS_POISON 0xFF
void harness_poison(void *memory, size_t bytes);
int harness_is_poison(const void *memory, size_t bytes);

/* Returns poisoned memory, aligned to 16, with a guard band before it and another right after its last byte. _ok
   returns whether both bands are intact. _free checks them as well, and fails the test if they are not. */
void *harness_guard_new(size_t bytes);
int harness_guard_ok(const void *memory);
void harness_guard_free(void *memory);

/* ================================================================================================================
   >>heap    an allocator that counts, and fails when told to
   ================================================================================================================ */

/* Pass harness_alloc and harness_release, with `user` = a harness_heap, to the library under test. Blocks are poisoned
   when allocated and when released. A block fails the test if it is released twice, does not belong to the heap, or was
   written to outside its bounds. */
typedef struct harness_heap {
    int64_t fail_at; /* this call to harness_alloc (from 1) and all later ones return NULL; 0: none does */
    int only_once;   /* 1: only call `fail_at` returns NULL */
    int64_t calls;   /* to harness_alloc, the failed ones included */
    int64_t failed;  /* calls that returned NULL */
    int64_t live;    /* blocks not yet released */
    int64_t faults;  /* wrong releases and damaged blocks */
    void *blocks;    /* private */
} harness_heap;

void *harness_alloc(size_t bytes, void *heap);
void harness_release(void *memory, void *heap);

/* ================================================================================================================
   >>text    a callback that collects what is written, and refuses it when told to
   ================================================================================================================ */

typedef struct harness_text {
    /* the text so far, with a zero byte at its end; NULL if nothing was written. Release it with free */
    char *at;
    size_t n, room;             /* bytes of it; bytes that there is room for */
    int64_t fail_at;            /* this call (from 1) is refused; 0: none is */
    int64_t calls;              /* the refused one included */
    int64_t calls_after_failure;
} harness_text;

#define HARNESS_REFUSAL 91 /* the result of harness_collect when it refuses a call */

/* Appends a piece to a harness_text. A piece of no bytes fails the test, and so does running out of memory. */
int harness_collect(const char *piece, size_t bytes, void *text);

/* ================================================================================================================
   >>random    splitmix64
   ================================================================================================================ */

typedef struct harness_rng {
    uint64_t state; /* any number */
} harness_rng;

uint64_t harness_random(harness_rng *rng);
int64_t harness_between(harness_rng *rng, int64_t low, int64_t high); /* both ends included; low <= high */
double harness_unit(harness_rng *rng);                                /* in [0, 1) */
int harness_chance(harness_rng *rng, double probability);

/* ================================================================================================================
   >>rounds    how often a long test repeats
   ================================================================================================================ */

/* Returns `full` if the environment variable FULL is 1, and `quick` otherwise. A quick run leaves out repetitions, but
   no kind of case: checks of the totals at a test's end must hold in both. */
int harness_rounds(int full, int quick);

/* ================================================================================================================
   >>runner
   ================================================================================================================ */

typedef struct harness_case {
    const char *name;
    void (*run)(void);
} harness_case;

typedef struct harness_suite {
    const char *name;
    const harness_case *cases;
    size_t n_cases;
} harness_suite;

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0]))) /* entries of an array */
#define TEST(name) static void test_##name(void)
#define CASE(name) {#name, test_##name}
#define SUITE(name, ...)                                            \
    static const harness_case cases_##name[] = {__VA_ARGS__};       \
    extern const harness_suite suite_##name;                        \
    const harness_suite suite_##name = {#name, cases_##name,        \
                                        sizeof cases_##name / sizeof cases_##name[0]}

typedef struct harness_counts {
    int passed, failed, skipped;
} harness_counts;

/* Runs the suites and returns the exit status for main. harness_main_to writes to the given files instead of standard
   output and standard error. */
int harness_main(int argc, char **argv, const harness_suite *const *suites, size_t n_suites);
int harness_main_to(int argc, char **argv, const harness_suite *const *suites, size_t n_suites, FILE *out,
                    FILE *errors);

/* Runs the tests that the filters choose and writes to `out`. May be called inside a test. */
harness_counts harness_run(const harness_suite *const *suites, size_t n_suites, const char *const *filters,
                           size_t n_filters, FILE *out);

#ifdef __cplusplus
}
#endif

#endif /* HARNESS_H */

#ifdef HARNESS_IMPLEMENTATION

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ----------------------------------------------------------------------------------------------------------------
   >>checks
   ---------------------------------------------------------------------------------------------------------------- */

#define HARNESS__SHOWN 10 /* failures printed for one test */

typedef struct harness__state {
    FILE *out;
    int checks;
    int failures;
    int skipped;
    char note[400];
    char report[200];
} harness__state;

static harness__state harness__outside; /* counts checks made outside any test */
static harness__state *harness__now = &harness__outside;

static void harness__record(const char *file, int line, const char *text) {
    harness__state *now = harness__now;
    now->failures++;
    if (!now->out || now->failures > HARNESS__SHOWN + 1) return;
    if (now->failures == HARNESS__SHOWN + 1) {
        fprintf(now->out, "\n    (further failures of this test are counted, not printed)");
        return;
    }
    fprintf(now->out, "\n    %s:%d: %s", file, line, text);
    if (now->note[0]) fprintf(now->out, "\n        with %s", now->note);
    fflush(now->out);
}

int harness_check(int ok, const char *file, int line, const char *text) {
    harness__now->checks++;
    if (!ok) harness__record(file, line, text);
    return ok;
}

int harness_check_int(int64_t got, int64_t wanted, const char *file, int line, const char *text) {
    char buffer[400];
    harness__now->checks++;
    if (got == wanted) return 1;
    snprintf(buffer, sizeof buffer, "%.300s: got %lld, wanted %lld", text, (long long)got, (long long)wanted);
    harness__record(file, line, buffer);
    return 0;
}

int harness_check_str(const char *got, const char *wanted, const char *file, int line, const char *text) {
    char buffer[800];
    harness__now->checks++;
    if (harness_is_poison(&got, sizeof got)) got = "(a poisoned pointer)"; /* a record that nobody has filled in */
    if (got == wanted || (got && wanted && strcmp(got, wanted) == 0)) return 1;
    snprintf(buffer, sizeof buffer, "%.150s: got \"%.250s\", wanted \"%.250s\"", text, got ? got : "(null)",
             wanted ? wanted : "(null)");
    harness__record(file, line, buffer);
    return 0;
}

int harness_fail(const char *file, int line, const char *format, ...) {
    char buffer[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    harness__now->checks++;
    harness__record(file, line, buffer);
    return 0;
}

void harness_skip(const char *why) {
    harness__now->skipped = 1;
    harness_report("%s", why);
}

void harness_note(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(harness__now->note, sizeof harness__now->note, format, arguments);
    va_end(arguments);
}

void harness_report(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(harness__now->report, sizeof harness__now->report, format, arguments);
    va_end(arguments);
}

/* ----------------------------------------------------------------------------------------------------------------
   >>compare
   ---------------------------------------------------------------------------------------------------------------- */

static int harness__finite(double x) {
    return x - x == 0.0;
}

static void harness__compare_item(harness_difference *d, size_t i, double got, double wanted, double relative,
                                  double absolute) {
    double gap = fabs(got - wanted);
    double limit = absolute + relative * fabs(wanted);
    int finite = harness__finite(got) && harness__finite(wanted);
    if (!finite) {
        d->n_nonfinite++;
    } else {
        if (gap > d->largest_absolute) d->largest_absolute = gap;
        if (wanted != 0.0 && gap / fabs(wanted) > d->largest_relative) d->largest_relative = gap / fabs(wanted);
    }
    /* "not (gap <= limit)", because every comparison with a NaN is false. */
    if (finite && harness__finite(limit) && gap <= limit) return;
    if (d->n_bad == 0) {
        d->first_bad = i;
        snprintf(d->text, sizeof d->text, "item %llu: got %.17g, wanted %.17g, tolerance %.3g", (unsigned long long)i,
                 got, wanted, limit);
    }
    d->n_bad++;
}

static harness_difference harness__compare(const double *got, const float *got_float, size_t n_got,
                                           const double *wanted, size_t n_wanted, double relative, double absolute) {
    harness_difference d;
    size_t i;
    memset(&d, 0, sizeof d);
    if (n_got != n_wanted) {
        snprintf(d.text, sizeof d.text, "got %llu items, wanted %llu", (unsigned long long)n_got,
                 (unsigned long long)n_wanted);
        return d;
    }
    if (n_got == 0) {
        snprintf(d.text, sizeof d.text, "no items to compare");
        return d;
    }
    if (!(relative >= 0.0 && absolute >= 0.0 && harness__finite(relative) && harness__finite(absolute))) {
        snprintf(d.text, sizeof d.text, "bad tolerance: relative %g, absolute %g", relative, absolute);
        return d;
    }
    for (i = 0; i < n_got; i++)
        harness__compare_item(&d, i, got ? got[i] : (double)got_float[i], wanted[i], relative, absolute);
    d.ok = d.n_bad == 0;
    return d;
}

harness_difference harness_compare(const double *got, size_t n_got, const double *wanted, size_t n_wanted,
                                   double relative, double absolute) {
    return harness__compare(got, NULL, n_got, wanted, n_wanted, relative, absolute);
}

harness_difference harness_compare_float(const float *got, size_t n_got, const double *wanted, size_t n_wanted,
                                         double relative, double absolute) {
    return harness__compare(NULL, got, n_got, wanted, n_wanted, relative, absolute);
}

int harness_check_near(harness_difference difference, const char *file, int line, const char *text) {
    char buffer[600];
    harness__now->checks++;
    if (difference.ok) return 1;
    snprintf(buffer, sizeof buffer, "%.200s: %llu bad items; %s", text, (unsigned long long)difference.n_bad,
             difference.text);
    harness__record(file, line, buffer);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------------
   >>memory
   ---------------------------------------------------------------------------------------------------------------- */

void harness_poison(void *memory, size_t bytes) {
    memset(memory, HARNESS_POISON, bytes);
}

int harness_is_poison(const void *memory, size_t bytes) {
    const unsigned char *p = (const unsigned char *)memory;
    size_t i;
    for (i = 0; i < bytes; i++)
        if (p[i] != HARNESS_POISON) return 0;
    return 1;
}

#define HARNESS__BAND 64 /* a multiple of 16, so that the memory behind the first band stays aligned */

/* A block: header, band, the caller's bytes, band. The header is padded to the size of a band. */
typedef struct harness__block {
    size_t bytes;
    struct harness__block *next, *previous; /* live blocks of a heap */
    size_t tail;                            /* bytes of the second band */
    uint32_t mark;
} harness__block;

#define HARNESS__LIVE 0x6C697665u
#define HARNESS__DEAD 0x64656164u
#define HARNESS__BAND_BYTE 0xA5

static void *harness__block_new(size_t bytes, size_t tail) {
    unsigned char *p;
    harness__block *block;
    if (bytes > SIZE_MAX - 3 * HARNESS__BAND) return NULL;
    p = (unsigned char *)malloc(2 * HARNESS__BAND + bytes + tail);
    if (!p) return NULL;
    block = (harness__block *)p;
    memset(p, 0, HARNESS__BAND);
    block->bytes = bytes;
    block->tail = tail;
    block->mark = HARNESS__LIVE;
    memset(p + HARNESS__BAND, HARNESS__BAND_BYTE, HARNESS__BAND);
    harness_poison(p + 2 * HARNESS__BAND, bytes);
    memset(p + 2 * HARNESS__BAND + bytes, HARNESS__BAND_BYTE, tail);
    return p + 2 * HARNESS__BAND;
}

static harness__block *harness__block_of(const void *memory) {
    return (harness__block *)((unsigned char *)(uintptr_t)memory - 2 * HARNESS__BAND);
}

static int harness__band_ok(const unsigned char *band, size_t bytes) {
    size_t i;
    for (i = 0; i < bytes; i++)
        if (band[i] != HARNESS__BAND_BYTE) return 0;
    return 1;
}

void *harness_guard_new(size_t bytes) {
    void *memory = harness__block_new(bytes, HARNESS__BAND);
    if (!memory) {
        fprintf(stderr, "harness: out of memory\n");
        abort();
    }
    return memory;
}

int harness_guard_ok(const void *memory) {
    const harness__block *block = harness__block_of(memory);
    const unsigned char *p = (const unsigned char *)memory;
    if (!harness__band_ok(p - HARNESS__BAND, HARNESS__BAND)) return 0;
    return block->mark == HARNESS__LIVE && harness__band_ok(p + block->bytes, block->tail);
}

void harness_guard_free(void *memory) {
    if (!memory) return;
    harness_check(harness_guard_ok(memory), __FILE__, __LINE__, "guard bands are whole");
    free(harness__block_of(memory));
}

/* ----------------------------------------------------------------------------------------------------------------
   >>heap
   ---------------------------------------------------------------------------------------------------------------- */

/* Under AddressSanitizer the block ends where malloc's does, so that a read past the end is seen as well. */
#if defined(__SANITIZE_ADDRESS__)
#define HARNESS__HEAP_TAIL 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HARNESS__HEAP_TAIL 0
#endif
#endif
#ifndef HARNESS__HEAP_TAIL
#define HARNESS__HEAP_TAIL HARNESS__BAND
#endif

void *harness_alloc(size_t bytes, void *user) {
    harness_heap *heap = (harness_heap *)user;
    harness__block *block;
    void *memory;
    heap->calls++;
    if (heap->fail_at > 0 && (heap->only_once ? heap->calls == heap->fail_at : heap->calls >= heap->fail_at)) {
        heap->failed++;
        return NULL;
    }
    memory = harness__block_new(bytes, HARNESS__HEAP_TAIL);
    if (!memory) return NULL;
    block = harness__block_of(memory);
    block->next = (harness__block *)heap->blocks;
    if (block->next) block->next->previous = block;
    heap->blocks = block;
    heap->live++;
    return memory;
}

/* Returns whether the heap holds this block, found without reading the block itself. */
static int harness__heap_holds(const harness_heap *heap, const harness__block *wanted) {
    const harness__block *block;
    for (block = (const harness__block *)heap->blocks; block; block = block->next)
        if (block == wanted) return 1;
    return 0;
}

void harness_release(void *memory, void *user) {
    harness_heap *heap = (harness_heap *)user;
    harness__block *block;
    if (!memory) return;
    block = harness__block_of(memory);
    if (!harness__heap_holds(heap, block)) {
        heap->faults++;
        harness_fail(__FILE__, __LINE__, "released a block that is not live on this heap");
        return;
    }
    if (!harness_guard_ok(memory)) {
        heap->faults++;
        harness_fail(__FILE__, __LINE__, "a block of %llu bytes was written to outside its bounds",
                     (unsigned long long)block->bytes);
    }
    if (block->next) block->next->previous = block->previous;
    if (block->previous) block->previous->next = block->next;
    if (heap->blocks == block) heap->blocks = block->next;
    heap->live--;
    block->mark = HARNESS__DEAD;
    harness_poison(memory, block->bytes);
    free(block);
}

int harness_collect(const char *piece, size_t bytes, void *user) {
    harness_text *text = (harness_text *)user;
    text->calls++;
    if (text->fail_at > 0 && text->calls > text->fail_at) text->calls_after_failure++;
    if (text->calls == text->fail_at) return HARNESS_REFUSAL;
    if (!CHECK(piece != NULL && bytes > 0)) return HARNESS_REFUSAL;
    if (text->n + bytes + 1 > text->room) {
        size_t room = 2 * (text->n + bytes + 1);
        char *longer = (char *)realloc(text->at, room);
        if (!CHECK(longer != NULL)) return HARNESS_REFUSAL;
        text->at = longer;
        text->room = room;
    }
    memcpy(text->at + text->n, piece, bytes);
    text->n += bytes;
    text->at[text->n] = 0;
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------------
   >>random
   ---------------------------------------------------------------------------------------------------------------- */

uint64_t harness_random(harness_rng *rng) {
    uint64_t z = (rng->state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* The remainder favours small numbers by at most span / 2^64, which no test here can notice. */
int64_t harness_between(harness_rng *rng, int64_t low, int64_t high) {
    uint64_t span = (uint64_t)high - (uint64_t)low + 1u;
    uint64_t r = harness_random(rng);
    return (int64_t)((uint64_t)low + (span ? r % span : r));
}

double harness_unit(harness_rng *rng) {
    return (double)(harness_random(rng) >> 11) / 9007199254740992.0;
}

int harness_chance(harness_rng *rng, double probability) {
    return harness_unit(rng) < probability;
}

/* ----------------------------------------------------------------------------------------------------------------
   >>rounds
   ---------------------------------------------------------------------------------------------------------------- */

int harness_rounds(int full, int quick) {
    static int is_full = -1;
    if (is_full < 0) {
        const char *value = getenv("FULL");
        is_full = value && strcmp(value, "1") == 0;
    }
    return is_full ? full : quick;
}

/* ----------------------------------------------------------------------------------------------------------------
   >>runner
   ---------------------------------------------------------------------------------------------------------------- */

static int harness__chosen(const char *name, const char *const *filters, size_t n_filters) {
    size_t i;
    for (i = 0; i < n_filters; i++)
        if (strstr(name, filters[i])) return 1;
    return n_filters == 0;
}

static void harness__full_name(char *name, size_t bytes, const harness_suite *suite, const harness_case *one) {
    snprintf(name, bytes, "%s.%s", suite->name, one->name);
}

static void harness__run_case(const char *name, const harness_case *one, FILE *out, harness_counts *counts) {
    harness__state state, *outer = harness__now;
    clock_t start = clock();
    double seconds;
    memset(&state, 0, sizeof state);
    state.out = out;
    harness__now = &state;
    fprintf(out, "%s ...", name);
    fflush(out);
    one->run();
    if (state.checks == 0 && !state.skipped) harness_fail(__FILE__, __LINE__, "the test checked nothing");
    harness__now = outer;
    seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    if (state.failures) {
        counts->failed++;
        fprintf(out, "\n    FAILED %s, %d of %d checks", name, state.failures, state.checks);
    } else if (state.skipped) {
        counts->skipped++;
        fprintf(out, " skipped");
    } else {
        counts->passed++;
        fprintf(out, " ok");
    }
    if (state.report[0]) fprintf(out, " (%s)", state.report);
    if (seconds >= 0.5) fprintf(out, " %.1f s", seconds);
    fprintf(out, "\n");
    fflush(out);
}

harness_counts harness_run(const harness_suite *const *suites, size_t n_suites, const char *const *filters,
                           size_t n_filters, FILE *out) {
    harness_counts counts = {0, 0, 0};
    char name[200];
    size_t i, j;
    for (i = 0; i < n_suites; i++) {
        for (j = 0; j < suites[i]->n_cases; j++) {
            harness__full_name(name, sizeof name, suites[i], &suites[i]->cases[j]);
            if (harness__chosen(name, filters, n_filters)) harness__run_case(name, &suites[i]->cases[j], out, &counts);
        }
    }
    if (counts.passed + counts.failed + counts.skipped == 0) fprintf(out, "no test matches\n");
    fprintf(out, "%d passed, %d failed", counts.passed, counts.failed);
    if (counts.skipped) fprintf(out, ", %d skipped", counts.skipped);
    fprintf(out, "\n");
    fflush(out);
    return counts;
}

static void harness__list(const harness_suite *const *suites, size_t n_suites, FILE *out) {
    char name[200];
    size_t i, j;
    for (i = 0; i < n_suites; i++) {
        for (j = 0; j < suites[i]->n_cases; j++) {
            harness__full_name(name, sizeof name, suites[i], &suites[i]->cases[j]);
            fprintf(out, "%s\n", name);
        }
    }
}

int harness_main_to(int argc, char **argv, const harness_suite *const *suites, size_t n_suites, FILE *out,
                    FILE *errors) {
    int n_filters = argc > 0 ? argc - 1 : 0, i;
    const char *const *filters = (const char *const *)(argv + (argc - n_filters));
    harness_counts counts;
    for (i = 0; i < n_filters; i++) {
        if (strcmp(filters[i], "--list") == 0) {
            harness__list(suites, n_suites, out);
            return 0;
        }
        if (filters[i][0] == '-') {
            fprintf(errors, "%s: unknown option %s; usage: %s [--list] [part of a test's name ...]\n", argv[0],
                    filters[i], argv[0]);
            return 2;
        }
    }
    counts = harness_run(suites, n_suites, filters, (size_t)n_filters, out);
    return counts.failed > 0 || counts.passed + counts.skipped == 0;
}

int harness_main(int argc, char **argv, const harness_suite *const *suites, size_t n_suites) {
    return harness_main_to(argc, argv, suites, n_suites, stdout, stderr);
}

#endif /* HARNESS_IMPLEMENTATION */
