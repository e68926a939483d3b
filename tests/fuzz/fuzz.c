/* The driver, and what the targets share. */

#define _XOPEN_SOURCE 700 /* opendir */
#include "fuzz.h"

#define HARNESS_IMPLEMENTATION /* for the tests' judges, which draw with it */
#include "../harness.h"

#include <dirent.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Judging
   ---------------------------------------------------------------------------------------------------------------- */

void fuzz_fail(const char *file, int line, const char *condition, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "\n%s:%d: not true: %s\n    ", file, line, condition);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

cf_error fuzz_error(void) {
    cf_error error;
    memset(&error, 0xff, sizeof error);
    return error;
}

int fuzz_result(cf_result result, const cf_error *error) {
    cf_error untouched = fuzz_error();
    const char *at;
    if (result == CF_OK) {
        FUZZ_CHECK(memcmp(error, &untouched, sizeof untouched) == 0, "a call that went well wrote its record");
        return 1;
    }
    FUZZ_CHECK(result > CF_OK && result < CF_RESULT_COUNT, "result %d", (int)result);
    FUZZ_CHECK(error->code == result, "result %d, record %d", (int)result, (int)error->code);
    FUZZ_CHECK(memcmp(&error->field, &untouched.field, sizeof error->field) != 0 && error->field != NULL &&
                   error->field[0] != '\0', "no field");
    FUZZ_CHECK(error->item >= -1, "item %lld of %s", (long long)error->item, error->field);
    FUZZ_CHECK(memchr(error->text, '\0', sizeof error->text) != NULL, "the text has no end");
    FUZZ_CHECK(error->text[0] != '\0', "no text for %s", error->field);
    for (at = error->text; *at; at++) FUZZ_CHECK(*at >= 32 && *at < 127, "not fit to be printed: %s", error->text);
    return 0;
}

/* ----------------------------------------------------------------------------------------------------------------
   Bytes into numbers
   ---------------------------------------------------------------------------------------------------------------- */

fuzz_input fuzz_input_of(const uint8_t *data, size_t size) {
    fuzz_input in = {data, NULL};
    in.end = size > 0 ? data + size : data;
    return in;
}

static uint64_t take(fuzz_input *in, int bytes) {
    uint64_t sum = 0;
    while (bytes-- > 0 && in->at < in->end) sum = sum << 8 | *in->at++;
    return sum;
}

int64_t fuzz_between(fuzz_input *in, int64_t low, int64_t high) {
    uint64_t range = (uint64_t)high - (uint64_t)low;
    uint64_t drawn = take(in, range < 256 ? 1 : range < 65536 ? 2 : 8);
    return (int64_t)((uint64_t)low + (range == UINT64_MAX ? drawn : drawn % (range + 1)));
}

int fuzz_chance(fuzz_input *in, int one_in) { return in->at < in->end && *in->at++ % one_in == one_in - 1; }

int64_t fuzz_number(fuzz_input *in) {
    int64_t kind = fuzz_between(in, 0, 7), power;
    if (kind == 0) return fuzz_between(in, -2, 8);
    if (kind == 1) return fuzz_between(in, INT64_MIN, INT64_MAX);
    if (kind == 2) return INT64_MAX - fuzz_between(in, 0, 2);
    if (kind == 3) return INT64_MIN + fuzz_between(in, 0, 2);
    power = (int64_t)1 << fuzz_between(in, 0, 62);
    if (kind == 4) return power + fuzz_between(in, -1, 1);
    if (kind == 5) return -power + fuzz_between(in, -1, 1);
    return fuzz_between(in, 0, 300);
}

double fuzz_real(fuzz_input *in) {
    static const double odd[] = {0.0,      -0.0,    1.0,      -1.0,    0.5,        1e-300, 1e300,      1.7e308,
                                 INFINITY, -INFINITY, NAN,    5e-324,  2.2250738585072014e-308, 1e154, 1e307, 0.1};
    int64_t kind = fuzz_between(in, 0, 7);
    uint64_t bits;
    double real;
    if (kind == 0) return odd[fuzz_between(in, 0, (int64_t)(sizeof odd / sizeof odd[0]) - 1)];
    if (kind > 1) return (double)fuzz_between(in, 0, 200) / 16;
    bits = take(in, 8);
    memcpy(&real, &bits, sizeof real);
    return real;
}

int64_t fuzz_mostly(fuzz_input *in, int64_t low, int64_t high, int one_in) {
    if (one_in > 0 && fuzz_chance(in, one_in)) return fuzz_number(in);
    return fuzz_between(in, low, high);
}

/* ----------------------------------------------------------------------------------------------------------------
   Objects
   ---------------------------------------------------------------------------------------------------------------- */

static double draw_cost(fuzz_input *in, int wild) {
    if (wild > 0 && fuzz_chance(in, wild)) return fuzz_real(in);
    return (double)fuzz_between(in, 0, 16) / 4;
}

static cf_pass_cost draw_pass_cost(fuzz_input *in, int wild) {
    cf_pass_cost cost = {0, 0, 0};
    if (!fuzz_chance(in, 2)) return cost;
    cost.constant = draw_cost(in, wild);
    cost.per_token = draw_cost(in, wild);
    cost.per_pair = draw_cost(in, wild);
    return cost;
}

void fuzz_draw_batch(fuzz_input *in, fuzz_batch *batch, int64_t most, int wild) {
    cf_pack_desc *pack = &batch->pack;
    int64_t i;
    memset(batch, 0, sizeof *batch);
    pack->chunk_size = fuzz_mostly(in, 1, 24, wild);
    pack->method = (cf_pack_method)fuzz_between(in, 0, wild > 0 ? CF_PACK_COUNT : CF_PACK_COUNT - 1);
    pack->split = (cf_split_method)fuzz_between(in, 0, wild > 0 ? CF_SPLIT_COUNT : CF_SPLIT_COUNT - 1);
    pack->no_tails = fuzz_chance(in, 3);
    if (fuzz_chance(in, 4)) pack->align = fuzz_mostly(in, 0, 4, wild);
    if (fuzz_chance(in, 4)) pack->max_slices = fuzz_mostly(in, 0, 4, wild);
    if (fuzz_chance(in, 4)) pack->n_ranks = fuzz_mostly(in, 0, 3, wild);
    if (pack->n_ranks > 1 && (wild > 0 || pack->method <= CF_PACK_BEST_FIT) && fuzz_chance(in, 3))
        pack->max_cp = fuzz_mostly(in, 0, pack->n_ranks, wild);
    if (fuzz_chance(in, 4)) pack->cost = draw_pass_cost(in, wild);
    batch->n = fuzz_between(in, 0, most);
    for (i = 0; i < batch->n; i++) batch->lengths[i] = fuzz_mostly(in, 0, fuzz_chance(in, 4) ? 120 : 24, wild);
}

const cf_timing *fuzz_draw_timing(fuzz_input *in, cf_timing *timing, cf_stage_cost *stages, int64_t n_stages,
                                  int wild) {
    int64_t i;
    int by_stage;
    memset(timing, 0, sizeof *timing);
    if (!fuzz_chance(in, 2)) return NULL;
    timing->latency = draw_cost(in, wild);
    timing->seconds_per_token = draw_cost(in, wild);
    by_stage = fuzz_chance(in, 3);
    for (i = 0; i < (by_stage ? n_stages : 1); i++) {
        cf_stage_cost *cost = by_stage ? &stages[i] : &timing->all;
        cost->forward = draw_pass_cost(in, wild);
        cost->replay = draw_pass_cost(in, wild);
        cost->backward = draw_pass_cost(in, wild);
        cost->input = draw_pass_cost(in, wild);
        cost->weight = draw_pass_cost(in, wild);
    }
    if (by_stage) timing->stages = stages;
    return timing;
}

void fuzz_draw_stream(fuzz_input *in, cf_timing *timing, int wild) {
    if (!fuzz_chance(in, 3)) return;
    timing->stream_forward = draw_cost(in, wild);
    timing->stream_backward = draw_cost(in, wild);
    timing->gather_forward = draw_cost(in, wild);
    timing->gather_backward = draw_cost(in, wild);
    timing->scan_forward = draw_cost(in, wild);
    timing->scan_backward = draw_cost(in, wild);
    timing->stream_exposed = wild > 0 && fuzz_chance(in, wild) ? fuzz_real(in) : (double)fuzz_between(in, 0, 8) / 8;
}

/* One stage that may keep no more bytes of trees than it must keeps as many, but for what one chunk is not full. */
static void check_least(const cf_plan *plan, const cf_schedule_desc *desc, const cf_schedule *schedule) {
    const cf_held_bytes *each = &desc->limits.per_token;
    cf_simulate_desc how = {0};
    cf_timeline *timeline = NULL;
    int64_t chunk;
    if (plan->order == NULL || schedule->shape.n_stages * schedule->shape.n_virtual > 1) return;
    how.limits.per_token = desc->limits.per_token;
    if (cf_simulate(plan, schedule, &how, &timeline, NULL) != CF_OK) return;
    chunk = plan->chunk_size * (each->activations + each->state + each->state_gradient + each->boundary);
    FUZZ_CHECK(timeline->peak_bytes[0] + chunk >= desc->limits.bytes, "%lld bytes are kept, %lld are said to be needed",
               (long long)timeline->peak_bytes[0], (long long)desc->limits.bytes);
    cf_timeline_free(timeline);
}

cf_result fuzz_make_schedule(const cf_plan *plan, cf_schedule_desc *desc, cf_schedule **schedule, cf_error *error) {
    cf_limits *limits = &desc->limits;
    int64_t *raised = NULL;
    int tries;
    for (tries = 0;; tries++) {
        cf_result result = cf_schedule_make(plan, desc, schedule, error);
        int64_t *limit = NULL;
        if (result == CF_OK && raised == &limits->bytes) check_least(plan, desc, *schedule);
        if (result != CF_ERROR_INFEASIBLE) return result;
        if (strcmp(error->field, "limits.chunks") == 0 && limits->chunks_by_stage == NULL) limit = &limits->chunks;
        if (strcmp(error->field, "limits.state") == 0 && limits->state_by_stage == NULL) limit = &limits->state;
        if (strcmp(error->field, "limits.bytes") == 0 && limits->bytes_by_stage == NULL) limit = &limits->bytes;
        if (limit == NULL || *limit <= 0) return result;
        FUZZ_CHECK(tries < 3 && error->wanted > *limit, "%s: %lld is too little, %lld is said to be enough",
                   error->field, (long long)*limit, (long long)error->wanted);
        *limit = error->wanted;
        raised = limit;
        *error = fuzz_error();
    }
}

int fuzz_write(const char *text, size_t bytes, void *to) {
    fuzz_text *out = (fuzz_text *)to;
    if (out->bytes + bytes + 1 > out->room) {
        out->room = 2 * (out->bytes + bytes) + 1024;
        out->text = (char *)realloc(out->text, out->room);
        if (out->text == NULL) abort();
    }
    memcpy(out->text + out->bytes, text, bytes);
    out->bytes += bytes;
    out->text[out->bytes] = '\0';
    return 0;
}

void fuzz_text_free(fuzz_text *text) {
    free(text->text);
    memset(text, 0, sizeof *text);
}

/* ----------------------------------------------------------------------------------------------------------------
   The driver
   ---------------------------------------------------------------------------------------------------------------- */

#define FUZZ_ADDRESS(name) &fuzz_##name,
static const fuzz_target *const targets[] = {FUZZ_TARGETS(FUZZ_ADDRESS)};
enum { N_TARGETS = sizeof targets / sizeof targets[0] };

static const fuzz_target *find_target(const char *name) {
    int i;
    for (i = 0; i < N_TARGETS; i++)
        if (strcmp(targets[i]->name, name) == 0) return targets[i];
    return NULL;
}

#ifdef FUZZ_LIBFUZZER

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
const char *__asan_default_options(void);

/* An input allocates a few kilobytes hundreds of times, and half of its time would go into remembering who allocated
   them and keeping what was freed. A finding that is replayed without libFuzzer says who did. */
const char *__asan_default_options(void) { return "malloc_context_size=0:quarantine_size_mb=8"; }

static const fuzz_target *chosen;

/* The first argument names the target; the others are libFuzzer's. */
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    chosen = *argc > 1 ? find_target((*argv)[1]) : NULL;
    if (chosen == NULL) {
        int i;
        fprintf(stderr, "usage: %s TARGET [libFuzzer's arguments]; targets:", (*argv)[0]);
        for (i = 0; i < N_TARGETS; i++) fprintf(stderr, " %s", targets[i]->name);
        fputc('\n', stderr);
        exit(2);
    }
    (*argv)[1] = (*argv)[0];
    ++*argv;
    --*argc;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    chosen->run(data, size);
    return 0;
}

#else

/* Runs one file. Its bytes lie in a block of just their size, so that reading past their end is seen. */
static int replay_file(const fuzz_target *target, const char *path) {
    FILE *file = fopen(path, "rb");
    long size = -1;
    uint8_t *data = NULL;
    if (file != NULL && fseek(file, 0, SEEK_END) == 0) size = ftell(file);
    if (size >= 0) data = (uint8_t *)malloc(size > 0 ? (size_t)size : 1);
    if (data == NULL || fseek(file, 0, SEEK_SET) != 0 || fread(data, 1, (size_t)size, file) != (size_t)size) size = -1;
    if (file != NULL) fclose(file);
    if (size < 0) printf("cannot read %s\n", path);
    else target->run(data, (size_t)size);
    free(data);
    return size >= 0;
}

/* Inputs that are drawn, for a target that takes any bytes for a problem. */
static void run_drawn(const fuzz_target *target) {
    harness_rng random = {20261127};
    const int n = harness_rounds(target->n_drawn, target->n_drawn / 3);
    int i;
    for (i = 0; i < n; i++) {
        const size_t size = (size_t)harness_between(&random, 16, 240);
        uint8_t *data = (uint8_t *)malloc(size);
        size_t at;
        if (data == NULL) abort();
        for (at = 0; at < size; at++) data[at] = (uint8_t)harness_between(&random, 0, 255);
        printf("%s", i == 0 ? " drawn" : "");
        fflush(stdout);
        target->run(data, size);
        free(data);
    }
}

/* Names each file before it runs it, so that a crash has a name. Returns how many ran, or -1. */
static int replay_folder(const fuzz_target *target, const char *folder) {
    char path[1024];
    const struct dirent *entry;
    DIR *directory;
    int n = 0, ok = 1;
    snprintf(path, sizeof path, "%s/%s", folder, target->name);
    printf("%s:", target->name);
    directory = opendir(path);
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s/%s", folder, target->name, entry->d_name);
        printf(" %.12s", entry->d_name);
        fflush(stdout);
        ok &= replay_file(target, path);
        n++;
    }
    run_drawn(target);
    printf("%s\n", n == 0 ? " there is no corpus" : "");
    if (directory != NULL) closedir(directory);
    return n > 0 && ok ? n : -1;
}

int main(int argc, char **argv) {
    int passed = 0, failed = 0, i;
    if (argc > 1 && find_target(argv[1]) != NULL) { /* a target alone, or files for it */
        const fuzz_target *target = find_target(argv[1]);
        if (argc == 2) ++*(replay_folder(target, "tests/fuzz/corpus") > 0 ? &passed : &failed);
        for (i = 2; i < argc; i++) ++*(replay_file(target, argv[i]) ? &passed : &failed);
    } else {
        for (i = 0; i < N_TARGETS; i++)
            ++*(replay_folder(targets[i], argc > 1 ? argv[1] : "tests/fuzz/corpus") > 0 ? &passed : &failed);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}

#endif
