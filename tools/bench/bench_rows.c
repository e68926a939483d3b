/* bench_rows.c - the time of making, simulating, checking and running schedules, for two versions of chunkflow.h side
   by side.

       cc -std=c99 -O2 -IFOLDER -o rows tools/bench/bench_rows.c -lm     FOLDER has the chunkflow.h to measure
       rows [ACTIONS [REPEATS]]                                          about so many actions in each schedule

   A line for each row has milliseconds of processor time, the least of REPEATS. If built with -DROWS_COUNT and run by
   `valgrind --tool=callgrind --collect-atstart=no --callgrind-out-file=out`, each row gives a file out.N with its
   number of instructions. That number does not depend on other work of the machine. Uses only what the header has had
   from the start: 8 stages, K = 4, pipeline replay, chains of up to 21 chunks (rounds: none). */

#define _POSIX_C_SOURCE 199309L
#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef ROWS_COUNT
#include <valgrind/callgrind.h>
#else
#define CALLGRIND_TOGGLE_COLLECT (void)0
#define CALLGRIND_DUMP_STATS_AT(name) (void)(name)
#endif

enum { STAGES = 8 };

/* What the rows work on. */
static cf_plan *plan;
static cf_schedule *schedule, *lowered;
static cf_timeline *timeline;
static cf_graph *graph;
static cf_schedule_desc order;
static cf_simulate_desc simulate;
static int64_t *lengths, n_lengths;
static cf_error error;

static void must(cf_result result) {
    if (result == CF_OK) return;
    fprintf(stderr, "bench_rows: %s\n", error.text);
    exit(2);
}

/* ---- rows: what is measured, and how its results are freed ---- */

static void pack(void) {
    cf_pack_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 1000;
    desc.max_slices = 1;
    must(cf_pack(lengths, n_lengths, &desc, &plan, &error));
}

static void drop_plan(void) { cf_plan_free(plan); }
static void make(void) { must(cf_schedule_make(plan, &order, &schedule, &error)); }
static void drop_schedule(void) { cf_schedule_free(schedule); }
static void time_it(void) { must(cf_simulate(plan, schedule, &simulate, &timeline, &error)); }
static void time_lowered(void) { must(cf_simulate(plan, lowered, &simulate, &timeline, &error)); }
static void drop_timeline(void) { cf_timeline_free(timeline); }
static void validate(void) { must(cf_schedule_validate(plan, schedule, NULL, NULL, &error)); }
static void drop_nothing(void) {}

static void lower(void) {
    cf_lower_desc desc;
    memset(&desc, 0, sizeof desc);
    must(cf_schedule_lower(plan, schedule, &desc, &lowered, &error));
}

static void drop_lowered(void) { cf_schedule_free(lowered); }

static void make_steps(void) {
    int64_t stage;
    for (stage = 0; stage < STAGES; stage++) {
        cf_steps *steps = NULL;
        must(cf_steps_make(plan, lowered, stage, 0, NULL, &steps, &error));
        cf_steps_free(steps);
    }
}

static void make_graph(void) { must(cf_graph_make(plan, schedule, NULL, NULL, &graph, &error)); }

static void drop_graph(void) { cf_graph_free(graph); }

/* ---- measuring ---- */

/* Runs it `repeats` times, and keeps the results of the last time. */
static void row(const char *kind, const char *what, int repeats, void (*run)(void), void (*drop)(void)) {
    double best = 1e9;
    char name[64];
    int i;
    snprintf(name, sizeof name, "%s %s", kind, what);
    for (i = 0; i < repeats; i++) {
        struct timespec from, to;
        double ms;
        if (i > 0) drop();
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
        CALLGRIND_TOGGLE_COLLECT;
        run();
        CALLGRIND_TOGGLE_COLLECT;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
        ms = 1e3 * (double)(to.tv_sec - from.tv_sec) + 1e-6 * (double)(to.tv_nsec - from.tv_nsec);
        if (ms < best) best = ms;
    }
    CALLGRIND_DUMP_STATS_AT(name);
    printf("%-24s %12.4f\n", name, best);
}

/* Draws lengths that make about this many chunks of 1000 tokens; with `chains`, one sequence in 16 makes 2 to 21
   chunks. */
static void draw_lengths(int64_t n, int chains) {
    uint64_t x = 1;
    n_lengths = 0;
    while (n > 0) {
        int64_t length;
        x = x * 6364136223846793005u + 1442695040888963407u;
        length = 500 + (int64_t)(x >> 40) % 500;
        if (chains && x >> 60 == 0) length += ((int64_t)(x >> 40) % 20 + 1) * 1000;
        if ((length + 999) / 1000 > n) continue;
        lengths[n_lengths++] = length;
        n -= (length + 999) / 1000;
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        cf_schedule_kind kind;
        int per_chunk, chains; /* about so many actions for each chunk */
    } kinds[] = {{"paper", CF_SCHEDULE_PAPER, 19, 1},
                 {"gpipe", CF_SCHEDULE_GPIPE, 19, 1},
                 {"1f1b", CF_SCHEDULE_1F1B, 19, 1},
                 {"interleaved", CF_SCHEDULE_INTERLEAVED, 38, 1},
                 {"rounds", CF_SCHEDULE_INTERLEAVED, 32, 0},
                 {"zero-bubble", CF_SCHEDULE_ZERO_BUBBLE, 28, 1}};
    int64_t actions = argc > 1 ? strtoll(argv[1], NULL, 10) : 100000;
    int repeats = argc > 2 ? atoi(argv[2]) : 5;
    size_t i;
    lengths = (int64_t *)malloc((size_t)(actions + STAGES) * sizeof *lengths);
    if (lengths == NULL || repeats < 1) return 2;
    order.shape.n_stages = STAGES;
    order.shape.k = 4;
    order.shape.replay = CF_REPLAY_PIPELINE;
    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        const char *name = kinds[i].name;
        draw_lengths(actions / kinds[i].per_chunk / STAGES * STAGES, kinds[i].chains);
        order.kind = kinds[i].kind;
        row(name, "packed", repeats, pack, drop_plan);
        row(name, "made", repeats, make, drop_schedule);
        simulate.no_bounds = 1;
        row(name, "timed", repeats, time_it, drop_timeline);
        drop_timeline();
        simulate.no_bounds = 0;
        row(name, "timed, bounds", repeats, time_it, drop_timeline);
        drop_timeline();
        row(name, "validated", repeats, validate, drop_nothing);
        if (i == 0) {
            simulate.no_bounds = 1;
            row(name, "lowered", repeats, lower, drop_lowered);
            row(name, "lowered, timed", repeats, time_lowered, drop_timeline);
            drop_timeline();
            row(name, "lowered, steps", repeats, make_steps, drop_nothing);
            drop_lowered();
            row(name, "graph", repeats, make_graph, drop_graph);
            drop_graph();
        }
        drop_schedule();
        drop_plan();
    }
    free(lengths);
    return 0;
}
