/* Compares plans of two headers for data-parallel ranks, side by side in one run.

       make bench-dealing OTHER=/path/to/another/chunkflow.h [ARGS='FILE' or ARGS=--time]

   Sixty cases with ChunkSize 8K, in which a pair costs 2.84e-5 of a row. Lengths are 256, 1,024 and 4,096 of a service
   trace (those of FILE in their order, or drawn like them), 256 and 1,024 of chats, and 512 of 1K to 24K. There are 4,
   8, 16, 32 and 64 ranks. A chunk costs nothing in addition to its rows, or as much as 500 rows. "most expensive" is
   the most expensive rank over the mean of the ranks, by this header; "ratio" compares it with the other header's. Then
   come the steps of a rank and all chunks, of both headers.

   Then 4,000 random batches of each of three kinds, 20 to 320 sequences on 2 to 32 ranks in chunks of 1K to 8K. Printed
   are the number of batches with over two steps more than the other header's, the largest excess, and the ratio of the
   most expensive ranks, mean and worst.

   Then batches in step like those of bench_ranks.c, without cp groups and with cp groups of any width. Printed is the
   time of all columns, with replays at K 1, of this header over the other's: mean and worst of 20 batches. Last, or
   alone with --time, comes the processor time of cf_pack and cf_plan_validate on one rank, medians of 15 calls by
   turns. Prints tables, and judges nothing. */

#include "dealing_side.h"
#include "../command/draw.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 30000, BATCHES = 20, CALLS = 15, MILLION = 1000000, RANDOM = 4000 };

static uint64_t draws = 1;

static double draw(void) { /* in [0, 1) */
    draws = draws * 6364136223846793005u + 1442695040888963407u;
    return (double)(draws >> 11) / 9007199254740992.0;
}

static double draw_normal(void) {
    double size = draw() + 1e-12, turn = draw();
    return sqrt(-2 * log(size)) * cos(6.283185307 * turn);
}

static void draw_lengths(int64_t *lengths, int64_t n, double mean, double spread, double most) {
    int64_t i;
    for (i = 0; i < n; i++) {
        double length = exp(mean + spread * draw_normal());
        lengths[i] = length < 1 ? 1 : length > most ? (int64_t)most : (int64_t)length;
    }
}

static int64_t read_lengths(const char *path, int64_t *lengths) {
    char text[256];
    int64_t n = 0;
    FILE *file = fopen(path, "r");
    while (file != NULL && n < MOST && fgets(text, sizeof text, file) != NULL)
        if (text[0] != '#' && strtoll(text, NULL, 10) > 0) lengths[n++] = strtoll(text, NULL, 10);
    if (file == NULL || n < 4096) {
        fprintf(stderr, "bench_dealing: %s has not 4096 lengths\n", path);
        exit(1);
    }
    fclose(file);
    return n;
}

/* ---- ranks that run free ---- */

static double ratios, worst_ratio, best_ratio = 1;
static int64_t n_cases, most_steps;

static void deal(const char *name, const int64_t *lengths, int64_t n, double constant) {
    static const int64_t ranks[] = {4, 8, 16, 32, 64};
    int i;
    for (i = 0; i < 5; i++) {
        const dealing_case of = {lengths, n, ranks[i], 8192, constant, 1, 2.84e-5, 0, 0};
        const dealing_result ours = dealing_this.pack(&of), theirs = dealing_other.pack(&of);
        double ratio = ours.seconds / theirs.seconds;
        printf("  %-16s %5d  %8.0f  %8.4f  %7.4f  %6d %6d  %7d %7d\n", name, (int)ranks[i], constant,
               ours.seconds / ours.mean, ratio, (int)ours.steps, (int)theirs.steps, (int)ours.chunks,
               (int)theirs.chunks);
        ratios += ratio;
        n_cases++;
        worst_ratio = fmax(worst_ratio, ratio);
        best_ratio = fmin(best_ratio, ratio);
        if (ours.steps - theirs.steps > most_steps) most_steps = ours.steps - theirs.steps;
    }
}

static void deal_all(const int64_t *trace, double constant) {
    int64_t lengths[1024], i;
    deal("trace 256", trace, 256, constant);
    deal("trace 1024", trace, 1024, constant);
    deal("trace 4096", trace, 4096, constant);
    draws = 1;
    draw_lengths(lengths, 1024, 6.2, 1.2, 32768);
    deal("chat 256", lengths, 256, constant);
    deal("chat 1024", lengths, 1024, constant);
    draws = 9;
    for (i = 0; i < 512; i++) lengths[i] = 1024 + (int64_t)(draw() * 23 * 1024);
    deal("1K to 24K 512", lengths, 512, constant);
}

/* ---- steps ---- */

/* Draws the lengths of one random batch. "giants" have three sequences of 100,000 to 300,000; all others fit into a
   chunk. */
static dealing_case draw_batch(int giants, int by_pairs, int64_t *lengths) {
    dealing_case of = {lengths, 20 + (int64_t)(draw() * 300), 0, 0, 0, 0, 0, 0, 0};
    double mean, spread;
    int64_t i;
    of.chunk_size = (int64_t)1024 << (int)(draw() * 4);
    of.n_ranks = 2 + (int64_t)(draw() * 31);
    mean = 6 + 3 * draw();
    spread = 0.5 + 1.5 * draw();
    draw_lengths(lengths, of.n, mean, spread, 262144);
    for (i = 0; i < of.n && giants; i++)
        lengths[i] = i < 3 ? 100000 + (int64_t)(draw() * 200000) : 1 + (int64_t)(draw() * (double)of.chunk_size);
    if (by_pairs) of.per_pair = 1;
    if (by_pairs) of.per_token = draw() < 0.5 ? 0 : 1;
    return of;
}

static void count_steps(const char *name, int giants, int by_pairs) {
    int64_t lengths[320], over = 0, most = 0;
    double sum = 0, worst = 0;
    int i;
    for (draws = 977, i = 0; i < RANDOM; i++) {
        const dealing_case of = draw_batch(giants, by_pairs, lengths);
        const dealing_result ours = dealing_this.pack(&of), theirs = dealing_other.pack(&of);
        int64_t more = ours.steps - theirs.steps;
        over += more > 2;
        most = more > most ? more : most;
        if (!by_pairs) continue; /* default weights come from the library, so seconds are unknown here */
        sum += ours.seconds / theirs.seconds / RANDOM;
        worst = fmax(worst, ours.seconds / theirs.seconds);
    }
    printf("  %-24s %6d of %d  %6d", name, (int)over, RANDOM, (int)most);
    if (by_pairs) printf("  %8.4f %8.4f", sum, worst);
    printf("\n");
}

static void count_all_steps(void) {
    printf("\n  %-24s %14s  %6s  %8s %8s\n", "random batches", "over 2 more", "most", "ratio", "worst");
    count_steps("pairs alone or with rows", 0, 1);
    count_steps("default weights", 0, 0);
    count_steps("giants, by pairs", 1, 1);
}

/* ---- ranks in step ---- */

static void step(const char *name, const int64_t *from, int64_t n_from, int64_t n, int64_t giant, int64_t ranks,
                 int with_cp_groups, double *sum) {
    double mean = 0, worst = 0;
    int b;
    for (b = 0; b < BATCHES; b++) {
        int64_t lengths[256], i;
        dealing_case of = {lengths, n, ranks, 8192, 0, 1, 2.64e-5, 1, 0};
        double ratio;
        for (i = 0; i < n; i++) lengths[i] = from[(b * n + i) % n_from];
        if (giant > 0) lengths[n - 1] = giant;
        of.max_cp = with_cp_groups ? ranks : 0;
        ratio = dealing_this.pack(&of).seconds / dealing_other.pack(&of).seconds;
        mean += ratio / BATCHES;
        worst = fmax(worst, ratio);
    }
    printf("  %-22s %5d  %-5s  %7.4f  %7.4f\n", name, (int)ranks, with_cp_groups ? "yes" : "no", mean, worst);
    *sum += mean;
}

static void step_all(const int64_t *trace, int64_t n_trace) {
    static int64_t chat[BATCHES * 256];
    draw_source source = {1};
    double sum = 0;
    int64_t i, ranks;
    int cp_groups, n = 0;
    for (i = 0; i < BATCHES * 256; i++)
        do chat[i] = draw_lmsys(&source);
        while (chat[i] > 262144);
    printf("\n  %-22s %5s  %-5s  %7s  %7s\n", "batch", "ranks", "cp groups", "ratio", "worst");
    for (cp_groups = 0; cp_groups < 2; cp_groups++)
        for (ranks = 8; ranks <= 64; ranks *= 2, n += 5) {
            step("256 chat", chat, BATCHES * 256, 256, 0, ranks, cp_groups, &sum);
            step("255 chat, one of 128K", chat, BATCHES * 256, 256, 131072, ranks, cp_groups, &sum);
            step("255 chat, one of 256K", chat, BATCHES * 256, 256, 262144, ranks, cp_groups, &sum);
            step("64 of the trace", trace, n_trace, 64, 0, ranks, cp_groups, &sum);
            step("256 of the trace", trace, n_trace, 256, 0, ranks, cp_groups, &sum);
        }
    printf("  all: %.4f\n", sum / n);
}

/* ---- time ---- */

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void time_both(const char *name, const int64_t *lengths, int64_t n, int calls) {
    const dealing_case of = {lengths, n, 1, 8192, 0, 0, 0, 0, 0};
    double seconds[4][CALLS] = {{0}}; /* this header's pack and validate, and the other's */
    int i, j;
    for (i = 0; i < CALLS; i++)
        for (j = 0; j < calls; j++) {
            double ours, theirs;
            seconds[0][i] += dealing_this.time(&of, &ours) / calls;
            seconds[2][i] += dealing_other.time(&of, &theirs) / calls;
            seconds[1][i] += ours / calls;
            seconds[3][i] += theirs / calls;
        }
    for (i = 0; i < 4; i++) qsort(seconds[i], CALLS, sizeof seconds[i][0], by_size);
    printf("  %-18s", name);
    for (i = 0; i < 2; i++)
        printf("  %10.2f us %7.3f", 1e6 * seconds[i][CALLS / 2], seconds[i][CALLS / 2] / seconds[i + 2][CALLS / 2]);
    printf("  %7d %7d\n", (int)dealing_this.pack(&of).chunks, (int)dealing_other.pack(&of).chunks);
}

static void time_all(void) {
    static int64_t chat[MILLION];
    draw_source source = {7};
    int64_t i;
    for (i = 0; i < MILLION; i++) chat[i] = draw_lmsys(&source);
    printf("  %-18s  %13s %7s  %13s %7s  %7s %7s\n", "lengths", "cf_pack", "ratio", "validate", "ratio", "chunks",
           "other");
    time_both("256 chat lengths", chat, 256, 200);
    time_both("65,536", chat, 65536, 1);
    time_both("a million", chat, MILLION, 1);
}

int main(int argc, char **argv) {
    static int64_t trace[MOST];
    int64_t n_trace = MOST;
    if (argc > 1 && strcmp(argv[1], "--time") == 0) {
        time_all();
        return 0;
    }
    draws = 5;
    draw_lengths(trace, MOST, 8.6, 1.3, 131072);
    if (argc > 1) n_trace = read_lengths(argv[1], trace);
    printf("  %-16s %5s  %8s  %8s  %7s  %6s %6s  %7s %7s\n", "lengths", "ranks", "constant", "dearest", "ratio",
           "steps", "other", "chunks", "other");
    deal_all(trace, 0);
    deal_all(trace, 500);
    printf("  %d cases: ratio %.4f, worst %.4f, best %.4f, at most %d steps more\n", (int)n_cases,
           ratios / (double)n_cases, worst_ratio, best_ratio, (int)most_steps);
    count_all_steps();
    step_all(trace, n_trace);
    printf("\n");
    time_all();
    return 0;
}
