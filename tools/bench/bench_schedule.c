/* Measures speed and quality of pipeline schedules, in one thread, in processor time.

       cc -std=c99 -O2 -I. -o build/bench_schedule tools/bench/bench_schedule.c tools/bench/search_lists.c \
          tests/reference/suite.c -lm
       build/bench_schedule            all tables but the last; or any of: speed best suite virtual limits[=FILE]
                                       replay[=FILE] longer=SECONDS[,FILE]

   speed: fixed schedules of 10^3 to 10^6 actions, made and simulated; time per action should be flat. best: the default
   tries on 100 chunks and 8 stages. suite: 250 batches (tests/reference/suite.h), makespan over the strongest lower
   bound and over other kinds, by class; without a limit, and under the peaks of `paper` on each stage. limits: batches
   of realistic lengths (and the first lengths of FILE, one a line, `#` for comments) on 4, 8 and 16 stages with the
   costs of a 14B model, without a limit, with as many chunks as stages, and with half as many: `best` over the
   strongest bound. replay: `best` with room for half as many chunks as stages, for several K; to see what free replay
   gains, build it with another header. longer: named cases, those where bounds are weakest without a limit and with as
   many chunks as stages: default `best` against the best schedule that is found in so many seconds of processor time
   for each, half of them by `best` with more tries and half by changing lists (search_lists.h). What a change of the
   search is worth, bench_clocks.c says. Exit status 1 if `best` is worse than a fixed schedule anywhere. */

#if !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 199309L
#endif
#define CHUNKFLOW_IMPLEMENTATION
#include "../../chunkflow.h"
#include "search_lists.h"
#include "../../tests/reference/suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REPEATS 5

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t n) {
    qsort(values, n, sizeof *values, by_size);
    return values[n / 2];
}

static void must(cf_result result, const cf_error *error) {
    if (result == CF_OK) return;
    fprintf(stderr, "bench_schedule: %s\n", error->text);
    exit(2);
}

/* Plans about n chunks of different lengths; with `long_ones`, one sequence in 16 is a chain of 2 to 21 chunks. */
static cf_plan *draw_plan(int64_t n, int long_ones) {
    int64_t *lengths = (int64_t *)malloc((size_t)n * sizeof *lengths), m = 0, left = n;
    uint64_t x = 1;
    cf_pack_desc pack;
    cf_plan *plan = NULL;
    cf_error error;
    if (lengths == NULL) exit(2);
    while (left > 0) {
        int64_t length, chunks;
        x = x * 6364136223846793005u + 1442695040888963407u;
        length = 500 + (int64_t)(x >> 40) % 500;
        if (long_ones && (x >> 60) == 0) length = ((int64_t)(x >> 40) % 20 + 1) * 1000 + length;
        chunks = (length + 999) / 1000;
        if (chunks > left) continue;
        lengths[m++] = length;
        left -= chunks;
    }
    memset(&pack, 0, sizeof pack);
    pack.chunk_size = 1000;
    pack.max_slices = 1;
    must(cf_pack(lengths, m, &pack, &plan, &error), &error);
    free(lengths);
    return plan;
}

static void bench_speed(void) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B,
                                             CF_SCHEDULE_ZERO_BUBBLE};
    int64_t actions;
    size_t kind;
    printf("fixed schedules, 8 stages, chains of up to 21 chunks, K = 4: median of %d runs\n", REPEATS);
    printf("%-12s %10s %10s %10s %10s %12s\n", "kind", "actions", "make ms", "times ms", "ns/action", "+ bounds ms");
    for (kind = 0; kind < sizeof kinds / sizeof kinds[0]; kind++) {
        for (actions = 1000; actions <= 1000000; actions *= 10) {
            cf_plan *plan = draw_plan(actions / (kinds[kind] == CF_SCHEDULE_ZERO_BUBBLE ? 28 : 19), 1);
            double make[REPEATS], times[REPEATS], bounds[REPEATS];
            int64_t made = 0;
            int i;
            for (i = 0; i < REPEATS; i++) {
                cf_schedule_desc desc;
                cf_simulate_desc simulate;
                cf_schedule *schedule = NULL;
                cf_timeline *timeline = NULL;
                cf_error error;
                double start;
                memset(&desc, 0, sizeof desc);
                memset(&simulate, 0, sizeof simulate);
                desc.kind = kinds[kind];
                desc.shape.n_stages = 8;
                desc.shape.k = 4;
                start = now();
                must(cf_schedule_make(plan, &desc, &schedule, &error), &error);
                make[i] = now() - start;
                simulate.no_bounds = 1;
                start = now();
                must(cf_simulate(plan, schedule, &simulate, &timeline, &error), &error);
                times[i] = now() - start;
                cf_timeline_free(timeline);
                simulate.no_bounds = 0;
                start = now();
                must(cf_simulate(plan, schedule, &simulate, &timeline, &error), &error);
                bounds[i] = now() - start - times[i];
                made = schedule->n_actions;
                cf_timeline_free(timeline);
                cf_schedule_free(schedule);
            }
            printf("%-12s %10lld %10.3f %10.3f %10.1f %12.3f\n", cf_schedule_kind_name(kinds[kind]), (long long)made,
                   median(make, REPEATS) * 1e3, median(times, REPEATS) * 1e3,
                   (median(make, REPEATS) + median(times, REPEATS)) / (double)made * 1e9,
                   median(bounds, REPEATS) * 1e3);
            cf_plan_free(plan);
        }
    }
}

static void bench_best(void) {
    int variant;
    printf("best, default tries, 100 chunks, 8 stages, K = 4: median of %d runs\n", REPEATS);
    printf("%-28s %8s %10s %12s %12s\n", "batch", "ms", "candidates", "best/bound", "fixed/best");
    for (variant = 0; variant < 4; variant++) {
        cf_plan *plan = draw_plan(100, variant % 2);
        cf_schedule_desc desc;
        cf_search_report report;
        cf_error error;
        double seconds[REPEATS];
        int i;
        memset(&desc, 0, sizeof desc);
        desc.kind = CF_SCHEDULE_BEST;
        desc.shape.n_stages = 8;
        desc.shape.k = 4;
        desc.limits.chunks = variant < 2 ? CF_NO_LIMIT : 8;
        desc.report = &report;
        for (i = 0; i < REPEATS; i++) {
            cf_schedule *schedule = NULL;
            double start = now();
            must(cf_schedule_make(plan, &desc, &schedule, &error), &error);
            seconds[i] = now() - start;
            cf_schedule_free(schedule);
        }
        printf("%-10s %-17s %8.1f %10lld %12.4f %12.4f\n", variant % 2 ? "chains," : "no chains,",
               desc.limits.chunks > 0 ? "limit 8 chunks" : "no limit", median(seconds, REPEATS) * 1e3,
               (long long)report.n_tried,
               report.makespan / report.bound, report.fixed_makespan / report.makespan);
        cf_plan_free(plan);
    }
}

/* Returns the makespan of a schedule of the batch, and its peaks. */
static double makespan_of(const cf_plan *plan, const cf_schedule_desc *desc, int64_t *peaks) {
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_simulate_desc simulate;
    cf_error error;
    double makespan;
    memset(&simulate, 0, sizeof simulate);
    simulate.timing = desc->timing;
    simulate.no_bounds = 1;
    must(cf_schedule_make(plan, desc, &schedule, &error), &error);
    must(cf_simulate(plan, schedule, &simulate, &timeline, &error), &error);
    makespan = timeline->makespan;
    if (peaks != NULL) memcpy(peaks, timeline->peak_live, (size_t)timeline->n_stages * sizeof *peaks);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    return makespan;
}

typedef enum suite_mode { NO_LIMIT, PEAKS_OF_PAPER, SPLIT, VIRTUAL } suite_mode;

typedef struct class_sums {
    double to_bound, over_paper, over_best_fixed; /* sums of logarithms */
    double worst;
} class_sums;

/* Compares the schedules of one batch. Returns how many of the fixed ones are better than best. */
static int compare_batch(int index, suite_mode mode, class_sums *sums) {
    static suite_batch batch;
    static const cf_schedule_kind plain[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B,
                                             CF_SCHEDULE_ZERO_BUBBLE};
    cf_schedule_desc desc;
    cf_search_report report;
    cf_plan *plan = NULL;
    cf_error error;
    int64_t peaks[16];
    double paper, best, best_fixed = DBL_MAX;
    int n_kinds = mode == SPLIT ? 4 : mode == VIRTUAL ? 1 : 3, n_better = 0, i;
    suite_draw(index, &batch);
    must(cf_pack(batch.lengths, batch.n, &batch.pack, &plan, &error), &error);
    desc = batch.schedule;
    desc.timing = &batch.timing;
    desc.kind = CF_SCHEDULE_PAPER;
    paper = makespan_of(plan, &desc, peaks);
    /* by default state is limited if chunks are, but `paper` keeps no limit of state */
    desc.limits.state = CF_NO_LIMIT;
    if (mode == PEAKS_OF_PAPER) desc.limits.chunks_by_stage = peaks;
    else desc.limits.chunks = CF_NO_LIMIT;
    if (mode == VIRTUAL) desc.shape.n_virtual = 2;
    for (i = 0; i < n_kinds; i++) {
        double makespan;
        desc.kind = mode == VIRTUAL ? CF_SCHEDULE_INTERLEAVED : plain[i];
        makespan = makespan_of(plan, &desc, NULL);
        if (makespan < best_fixed) best_fixed = makespan;
    }
    if (mode == VIRTUAL) paper = best_fixed;
    desc.kind = CF_SCHEDULE_BEST;
    desc.split_backward = mode == SPLIT;
    desc.report = &report;
    best = makespan_of(plan, &desc, NULL);
    n_better = best > best_fixed * (1 + 1e-12);
    sums->to_bound += log(best / report.bound);
    sums->over_paper += log(paper / best);
    sums->over_best_fixed += log(best_fixed / best);
    if (best / report.bound > sums->worst) sums->worst = best / report.bound;
    cf_plan_free(plan);
    return n_better;
}

static int bench_suite(suite_mode mode) {
    static const char *const titles[] = {"without a limit", "under the peaks of `paper`",
                                         "split backwards allowed, no limit",
                                         "2 virtual stages (paper: interleaved), no limit"};
    int c, i, worse = 0;
    printf("suite, %s: geometric means of %d batches each\n", titles[mode], SUITE_PER_CLASS);
    printf("%-12s %12s %12s %12s %16s\n", "class", "best/bound", "worst", "paper/best", "best fixed/best");
    for (c = 0; c < SUITE_CLASSES; c++) {
        class_sums sums = {0, 0, 0, 0};
        for (i = 0; i < SUITE_PER_CLASS; i++) worse += compare_batch(c * SUITE_PER_CLASS + i, mode, &sums);
        printf("%-12s %12.4f %12.4f %12.4f %16.4f\n", suite_class_name(c), exp(sums.to_bound / SUITE_PER_CLASS),
               sums.worst,
               exp(sums.over_paper / SUITE_PER_CLASS), exp(sums.over_best_fixed / SUITE_PER_CLASS));
    }
    printf("worse than a fixed schedule: %d\n", worse);
    return worse;
}

/* ---- limits ---- */

enum { MOST_LENGTHS = 512, N_BATCHES = 8, N_CONFIGS = 3, N_LIMITS = 3 };

static uint64_t draws;

static double draw(void) { /* in [0, 1) */
    draws = draws * 6364136223846793005u + 1442695040888963407u;
    return (double)(draws >> 11) * (1.0 / 9007199254740992.0);
}

/* Log-uniform within the buckets of LMSys-Chat-1M's published length table. */
static int64_t draw_chat(void) {
    static const double share[] = {.90499, .0904, .00369, .00079, .00009, .00004};
    static const double ends[] = {16, 1024, 4096, 8192, 32768, 131072, 303000};
    double u = draw();
    int i = 0;
    while (i < 5 && u >= share[i]) u -= share[i++];
    return (int64_t)(ends[i] * pow(ends[i + 1] / ends[i], draw()));
}

/* Draws log-normal lengths with median 4096, by a sum of uniform numbers. */
static int64_t draw_normal(void) {
    double sum = 0;
    int i;
    for (i = 0; i < 12; i++) sum += draw();
    return 1 + (int64_t)(4096 * exp(1.3 * (sum - 6)));
}

static int64_t read_lengths(const char *path, int64_t skip, int64_t n, int64_t *lengths) {
    char line[256];
    int64_t m = 0;
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        fprintf(stderr, "bench_schedule: cannot read %s\n", path);
        exit(2);
    }
    while (m < n && fgets(line, sizeof line, file) != NULL)
        if (line[0] >= '0' && line[0] <= '9' && skip-- <= 0) lengths[m++] = strtoll(line, NULL, 10);
    fclose(file);
    return m;
}

/* Draws batch `id`. Returns the number of lengths; 0: it needs a file, and there is none. */
static int64_t draw_lengths(int id, const char *path, int64_t *lengths) {
    int64_t n = id < 2 ? 256 : 255, i;
    draws = (uint64_t)id + 1;
    if (id >= 4 && id < 6) return path != NULL ? read_lengths(path, (id - 4) * 64, 64, lengths) : 0;
    if (id >= 6) n = 96;
    for (i = 0; i < n; i++) lengths[i] = id < 4 ? draw_chat() : draw_normal();
    if (id == 2 || id == 3) lengths[n++] = 262144;
    return n;
}

/* Returns the seconds of a pass, a token and a pair on one of n_stages stages of a 14B model. */
static cf_timing timing_of(int64_t n_stages) {
    cf_timing timing;
    memset(&timing, 0, sizeof timing);
    timing.all.forward.constant = 1e-3;
    timing.all.forward.per_token = 2.24e-4 / (double)n_stages;
    timing.all.forward.per_pair = 7.8e-9 / (double)n_stages;
    timing.latency = 2e-5;
    timing.seconds_per_token = 2e-7;
    return timing;
}

/* Adds the logarithms of makespan / bound of one batch on n_stages stages. Returns how often `best` is worse than a
   fixed schedule. */
static int bench_one(const cf_plan *plan, int64_t n_stages, double sums[N_LIMITS][N_CONFIGS]) {
    static const int64_t ks[N_CONFIGS] = {1, 4, 2};
    const int64_t limits[N_LIMITS] = {CF_NO_LIMIT, n_stages, n_stages / 2};
    cf_timing timing = timing_of(n_stages);
    int l, c, worse = 0;
    for (l = 0; l < N_LIMITS; l++)
        for (c = 0; c < N_CONFIGS; c++) {
            cf_schedule_desc desc;
            cf_search_report report;
            cf_schedule *schedule = NULL;
            cf_error error;
            memset(&desc, 0, sizeof desc);
            desc.kind = CF_SCHEDULE_BEST;
            desc.shape.n_stages = n_stages;
            desc.shape.k = ks[c];
            desc.limits.chunks = limits[l];
            desc.timing = &timing;
            desc.report = &report;
            must(cf_schedule_make(plan, &desc, &schedule, &error), &error);
            sums[l][c] += log(report.makespan / report.bound);
            worse += report.makespan > report.fixed_makespan * (1 + 1e-12);
            cf_schedule_free(schedule);
        }
    return worse;
}

static int bench_limits(const char *path) {
    static const char *const names[N_LIMITS] = {"none", "as stages", "half"};
    double sums[N_LIMITS][N_CONFIGS] = {{0}};
    int64_t lengths[MOST_LENGTHS], n_stages;
    int id, l, c, n_runs = 0, worse = 0;
    for (id = 0; id < N_BATCHES; id++) {
        cf_pack_desc pack;
        cf_plan *plan = NULL;
        cf_error error;
        int64_t n = draw_lengths(id, path, lengths);
        if (n == 0) continue;
        memset(&pack, 0, sizeof pack);
        pack.chunk_size = 8192;
        must(cf_pack(lengths, n, &pack, &plan, &error), &error);
        for (n_stages = 4; n_stages <= 16; n_stages *= 2, n_runs++) worse += bench_one(plan, n_stages, sums);
        cf_plan_free(plan);
    }
    printf("limits: best / bound, geometric means of %d runs (%s)\n", n_runs,
           path != NULL ? "all batches" : "without the batches of a file");
    printf("%-10s %14s %14s %14s\n", "limit", "K 1", "K 4", "K 2");
    for (l = 0; l < N_LIMITS; l++) {
        printf("%-10s", names[l]);
        for (c = 0; c < N_CONFIGS; c++) printf(" %14.4f", exp(sums[l][c] / n_runs));
        printf("\n");
    }
    printf("worse than a fixed schedule: %d\n", worse);
    return worse;
}

/* ---- free replay ---- */

/* Prints makespans of `best`, in millions of token times, for K = 1, 2, 4 and 8, and the bound for the last. There are
   eight stages with room for four chunks, unit costs and local replay. */
static void print_replay(const char *name, const int64_t *lengths, int64_t n) {
    cf_pack_desc pack;
    cf_schedule_desc desc;
    cf_search_report report;
    cf_plan *plan = NULL;
    cf_error error;
    memset(&pack, 0, sizeof pack);
    memset(&desc, 0, sizeof desc);
    pack.chunk_size = 8192;
    must(cf_pack(lengths, n, &pack, &plan, &error), &error);
    desc.kind = CF_SCHEDULE_BEST;
    desc.shape.replay = CF_REPLAY_LOCAL;
    desc.shape.n_stages = 8;
    desc.limits.chunks = 4;
    desc.report = &report;
    printf("%-16s %6lld", name, (long long)plan->n_chunks);
    for (desc.shape.k = 1; desc.shape.k <= 8; desc.shape.k *= 2) printf(" %9.4f", makespan_of(plan, &desc, NULL) / 1e6);
    printf(" %9.4f\n", report.bound / 1e6);
    fflush(stdout);
    cf_plan_free(plan);
}

static void bench_replay(const char *path) {
    static const char *const names[] = {"chat + 256K", "chat + 256K", "file, first 64", "file, next 64"};
    int64_t lengths[MOST_LENGTHS];
    int id;
    printf("replay: 8 stages, limit 4, ChunkSize 8192, unit costs, millions of token times\n");
    printf("%-16s %6s %9s %9s %9s %9s %9s\n", "batch", "chunks", "K 1", "K 2", "K 4", "K 8", "bound");
    if (path != NULL) print_replay("file, first 96", lengths, read_lengths(path, 0, 96, lengths));
    for (id = 2; id < 6; id++) {
        int64_t n = draw_lengths(id, path, lengths);
        if (n > 0) print_replay(names[id - 2], lengths, n);
    }
}

/* ---- longer searches ---- */

/* The cases of `limits` that are farthest from their bounds with K of 2 and 4: the five worst without a limit, and the
   eight worst with as many chunks as stages. */
static const struct longer_case {
    const char *name;
    int batch; /* of draw_lengths */
    int64_t n_stages, k;
    int limited;
} longer_cases[] = {{"log-normal 1", 6, 16, 4, 0}, {"log-normal 1", 6, 16, 2, 0}, {"file 2", 5, 16, 2, 0},
                    {"file 2", 5, 16, 4, 0},       {"file 1", 4, 16, 4, 0},       {"log-normal 1", 6, 16, 4, 1},
                    {"log-normal 1", 6, 16, 2, 1}, {"file 1", 4, 16, 4, 1},       {"log-normal 2", 7, 16, 4, 1},
                    {"log-normal 2", 7, 8, 4, 1},  {"file 1", 4, 8, 4, 1},        {"log-normal 2", 7, 4, 4, 1},
                    {"file 1", 4, 4, 4, 1}};

/* Times a schedule, after the validator has accepted it under the description's own K and limit. */
static double checked_makespan(const cf_plan *plan, const cf_schedule_desc *desc, const cf_schedule *schedule) {
    cf_validate_desc validate;
    cf_simulate_desc simulate;
    cf_timeline *timeline = NULL;
    cf_error error;
    double makespan;
    memset(&validate, 0, sizeof validate);
    memset(&simulate, 0, sizeof simulate);
    validate.limits.chunks = desc->limits.chunks;
    simulate.timing = desc->timing;
    simulate.no_bounds = 1;
    must(cf_schedule_validate(plan, schedule, &validate, NULL, &error), &error);
    must(cf_simulate(plan, schedule, &simulate, &timeline, &error), &error);
    makespan = timeline->makespan;
    cf_timeline_free(timeline);
    return makespan;
}

static double processor_seconds(void) { return (double)clock() / CLOCKS_PER_SEC; }

/* Runs `best` with numbers of tries that double until the time ends. The schedule of the last run is the shortest. */
static cf_schedule *search_longer(const cf_plan *plan, cf_schedule_desc desc, double seconds) {
    cf_schedule *found = NULL;
    double start = processor_seconds(), begun, took = 0;
    desc.max_tries = desc.report->max_tries;
    do {
        cf_error error;
        cf_schedule_free(found);
        begun = processor_seconds();
        must(cf_schedule_make(plan, &desc, &found, &error), &error);
        took = processor_seconds() - begun;
        desc.max_tries *= 2;
    } while (processor_seconds() - start + 2 * took < seconds && !(desc.report->gap <= 0));
    return found;
}

/* Prints one line. Returns the logarithm of the default makespan over the best one found. */
static double compare_longer(const struct longer_case *what, const cf_plan *plan, double seconds) {
    cf_timing timing = timing_of(what->n_stages);
    cf_schedule *usual = NULL, *searched, *listed;
    cf_search_report report;
    cf_schedule_desc desc;
    cf_error error;
    double makespan, by_tries, by_lists, least, start, ms;
    memset(&desc, 0, sizeof desc);
    desc.shape.n_stages = what->n_stages;
    desc.shape.k = what->k;
    desc.limits.chunks = what->limited ? what->n_stages : CF_NO_LIMIT;
    desc.timing = &timing;
    desc.report = &report;
    start = processor_seconds();
    must(cf_schedule_make(plan, &desc, &usual, &error), &error);
    ms = 1e3 * (processor_seconds() - start);
    makespan = checked_makespan(plan, &desc, usual);
    start = processor_seconds();
    searched = search_longer(plan, desc, seconds / 2);
    by_tries = checked_makespan(plan, &desc, searched);
    listed = search_lists(plan, searched, &desc, seconds - (processor_seconds() - start), 1);
    if (listed == NULL) exit(2);
    by_lists = checked_makespan(plan, &desc, listed);
    least = by_lists < by_tries ? by_lists : by_tries;
    printf("%-13s %6lld %6lld %2lld %5s %6.0f %9.4f %9.4f %9.4f %9.4f %8.4f %8.4f %8.4f\n", what->name,
           (long long)plan->n_chunks, (long long)what->n_stages, (long long)what->k,
           what->limited ? "P" : "none", ms, report.bound, makespan, by_tries,
           by_lists, makespan / report.bound, least / report.bound, makespan / least);
    fflush(stdout);
    cf_schedule_free(usual);
    cf_schedule_free(searched);
    search_lists_free(listed);
    return log(makespan / least);
}

/* text: "SECONDS" or "SECONDS,FILE". */
static void bench_longer(const char *text) {
    const char *path = strchr(text, ',');
    double seconds = strtod(text, NULL), sum = 0;
    int64_t lengths[MOST_LENGTHS];
    int i, n_runs = 0;
    printf("longer: local replay, ChunkSize 8192, costs of a 14B model, %g s of processor time a case\n", seconds);
    printf("%-13s %6s %6s %2s %5s %6s %9s %9s %9s %9s %8s %8s %8s\n", "batch", "chunks", "stages", "K", "limit", "ms",
           "bound", "default", "max_tries", "lists", "/bound", "found/b", "/found");
    for (i = 0; i < (int)(sizeof longer_cases / sizeof longer_cases[0]); i++) {
        const struct longer_case *what = &longer_cases[i];
        int64_t n = draw_lengths(what->batch, path != NULL ? path + 1 : NULL, lengths);
        cf_pack_desc pack;
        cf_plan *plan = NULL;
        cf_error error;
        if (n == 0) continue;
        memset(&pack, 0, sizeof pack);
        pack.chunk_size = 8192;
        must(cf_pack(lengths, n, &pack, &plan, &error), &error);
        sum += compare_longer(what, plan, seconds);
        n_runs++;
        cf_plan_free(plan);
    }
    printf("default / best found, geometric mean of %d: %.4f\n", n_runs, exp(sum / n_runs));
}

static int wanted(int argc, char **argv, const char *name) {
    int i;
    for (i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0) return 1;
    return argc < 2;
}

int main(int argc, char **argv) {
    int worse = 0, i;
    if (wanted(argc, argv, "speed")) bench_speed();
    if (wanted(argc, argv, "best")) bench_best();
    if (wanted(argc, argv, "suite")) worse = bench_suite(NO_LIMIT) + bench_suite(PEAKS_OF_PAPER);
    if (wanted(argc, argv, "virtual")) worse += bench_suite(SPLIT) + bench_suite(VIRTUAL);
    for (i = 1; i < argc; i++) {
        if (strncmp(argv[i], "limits=", 7) == 0) worse += bench_limits(argv[i] + 7);
        if (strncmp(argv[i], "replay=", 7) == 0) bench_replay(argv[i] + 7);
        if (strncmp(argv[i], "longer=", 7) == 0) bench_longer(argv[i] + 7);
    }
    if (wanted(argc, argv, "limits")) worse += bench_limits(NULL);
    if (wanted(argc, argv, "replay")) bench_replay(NULL);
    return worse > 0;
}
