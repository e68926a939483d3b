/* bench_ranks.c - the cost of running data-parallel ranks in step, compared with ranks that do not wait for each other.

       cc -std=c99 -O2 tools/bench/bench_ranks.c tools/command/draw.c -o bench_ranks
       bench_ranks [FILE]

   Batches are lengths like those of LMSys-Chat-1M, the same with one sequence of 128K or 256K, and the lengths of FILE
   in their order, 64 and 256 at a time. ChunkSize is 8K, K is 1, and there is one stage. Work is that of Qwen2.5-7B: a
   pair costs 2.64e-5 of a row. A forward costs 1, a replay 1, a backward 2. "free" is the most expensive rank, in the
   better of full slices and slices cut by cost. "in step" is the sum of the columns, each as expensive as its most
   expensive chunk. "dummies" is the cost of the free plan with full slices if each rank runs its units in order, and
   ranks with fewer or shorter units run dummies. Printed are means of 20 batches and the worst; planning is in
   processor time.

   Then the same batches with cp groups, which run in step, with ChunkSize 8K and 32K, K 1 and 2. All numbers are
   relative to the mean of the ranks without cp groups. "cp" is the sum of the columns with cp groups of any width, "no
   cp" the same without. "free" is the most expensive rank if ranks do not wait and none shares a sequence. Gathering a
   row takes 0.003 of a row's forward in a forward or replay, and 0.009 in a backward (57 KB a token, 50 GB/s, a tenth
   of it exposed, a row at 400 TFLOP/s). Prints tables, and judges nothing. */

#define _POSIX_C_SOURCE 200809L

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "chunkflow.h"

#include "../command/draw.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCHES = 20, MOST = 256, MOST_RANKS = 64, READ = 20000 };

static const cf_pass_cost cost = {0, 1, 2.64e-5};

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static cf_plan *pack_desc(const int64_t *lengths, int64_t n, cf_pack_desc desc) {
    cf_plan *plan = NULL;
    cf_error error;
    desc.cost = cost;
    if (cf_pack(lengths, n, &desc, &plan, &error) == CF_OK) return plan;
    fprintf(stderr, "bench_ranks: %s\n", error.text);
    exit(1);
}

static cf_plan *pack(const int64_t *lengths, int64_t n, int64_t n_ranks, cf_split_method split, int lockstep) {
    cf_pack_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 8192;
    desc.n_ranks = n_ranks;
    desc.split = split;
    desc.lockstep = lockstep;
    return pack_desc(lengths, n, desc);
}

static double cost_of(const cf_chunk *c) { return c->n_slices > 0 ? cf_cost_seconds(&cost, c->rows, c->pairs) : 0; }

static int64_t k = 1;

/* Returns the cost of a chunk's forward, its backward and, unless it is among the last K chunks of its chain, its
   replay. */
static double passes(const cf_plan *plan, const cf_chunk *c) {
    return 3 + (c->chain >= 0 && c->index + k < plan->chains[c->chain].n_chunks);
}

/* Rows that come from other ranks. */
static double gathered(const cf_plan *plan, const cf_chunk *c) {
    return c->chain >= 0 ? (double)(plan->slices[c->first_slice].begin - c->prefix) : 0;
}

/* Returns the cost of a chunk: all its passes and the rows that they gather. */
static double whole_cost(const cf_plan *plan, const cf_chunk *c) {
    double n = passes(plan, c);
    return cost_of(c) * n + 0.003 * gathered(plan, c) * (n + 1);
}

/* Raises the costs of a forward and a backward of all ranks to those of this chunk. */
static void dearer(const cf_plan *plan, const cf_chunk *c, double *forward, double *backward) {
    double own = cost_of(c), rows = gathered(plan, c);
    if (own + 0.003 * rows > *forward) *forward = own + 0.003 * rows;
    if (2 * own + 0.009 * rows > *backward) *backward = 2 * own + 0.009 * rows;
}

/* The most expensive rank. */
static double free_ranks(const cf_plan *plan) {
    double most = 0, sum = 0;
    int64_t i;
    for (i = 0; i < plan->n_chunks; i++) {
        sum = (i % plan->chunks_per_rank > 0 ? sum : 0) + whole_cost(plan, &plan->chunks[i]);
        if (sum > most) most = sum;
    }
    return most;
}

static double all_work(const cf_plan *plan) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < plan->n_chunks; i++) sum += whole_cost(plan, &plan->chunks[i]);
    return sum;
}

/* Returns the time of all columns. Each pass takes as long as that of the most expensive chunk, gathers included. */
static double in_step(const cf_plan *plan) {
    cf_plan *columns = NULL;
    cf_error error;
    double sum = 0;
    int64_t i, rank;
    if (cf_lockstep_plan(plan, &cost, NULL, &columns, &error) != CF_OK) {
        fprintf(stderr, "bench_ranks: %s\n", error.text);
        exit(1);
    }
    for (i = 0; i < plan->chunks_per_rank; i++) {
        double forward = 0, backward = 0;
        for (rank = 0; rank < plan->n_ranks; rank++)
            dearer(plan, &plan->chunks[rank * plan->chunks_per_rank + i], &forward, &backward);
        sum += forward * (passes(columns, &columns->chunks[i]) - 2) + backward;
    }
    cf_plan_free(columns);
    return sum;
}

/* Returns the time unit after unit. The i-th units of all ranks run at the same time, as long as the longest of
   them. */
static double dummies(const cf_plan *plan) {
    int64_t at[MOST_RANKS] = {0}, rank, i, longest;
    double sum = 0;
    do {
        int64_t n[MOST_RANKS];
        for (longest = 0, rank = 0; rank < plan->n_ranks; rank++) {
            const cf_chunk *c = &plan->chunks[rank * plan->chunks_per_rank + at[rank]];
            n[rank] = at[rank] == plan->chunks_per_rank ? 0 : c->chain >= 0 ? plan->chains[c->chain].n_chunks : 1;
            if (n[rank] > longest) longest = n[rank];
        }
        for (i = 0; i < longest; i++) {
            double forward = 0, backward = 0;
            for (rank = 0; rank < plan->n_ranks; rank++)
                if (i < n[rank]) dearer(plan, &plan->chunks[rank * plan->chunks_per_rank + at[rank] + i], &forward,
                                        &backward);
            sum += forward * (1 + (i + k < longest)) + backward;
        }
        for (rank = 0; rank < plan->n_ranks; rank++) at[rank] += n[rank];
    } while (longest > 0);
    return sum;
}

/* lengths: those of all batches, one after the other, n to a batch; repeated from the start when they end. giant:
   replaces the last length of each batch; 0: none. */
static void draw_batch(int64_t *batch, const int64_t *lengths, int64_t n_lengths, int64_t n, int64_t giant, int b) {
    int64_t i;
    for (i = 0; i < n; i++) batch[i] = lengths[(b * n + i) % n_lengths];
    if (giant > 0) batch[n - 1] = giant;
}

/* Ranks in step, of batches like these. */
static void line(const char *name, const int64_t *lengths, int64_t n_lengths, int64_t n, int64_t giant, int64_t ranks) {
    double step = 0, worst = 0, dummy = 0, spread = 0, seconds = 0, n_columns = 0;
    int b;
    for (b = 0; b < BATCHES; b++) {
        int64_t batch[MOST];
        cf_plan *full, *by_cost, *columns;
        double free_cost, other, begin;
        draw_batch(batch, lengths, n_lengths, n, giant, b);
        full = pack(batch, n, ranks, CF_SPLIT_FULL, 0);
        by_cost = pack(batch, n, ranks, CF_SPLIT_COST, 0);
        begin = seconds_now();
        columns = pack(batch, n, ranks, CF_SPLIT_DEFAULT, 1);
        seconds += seconds_now() - begin;
        free_cost = fmin(free_ranks(full), free_ranks(by_cost));
        other = in_step(columns) / free_cost;
        step += other;
        if (other > worst) worst = other;
        dummy += dummies(full) / free_cost;
        spread += free_cost * (double)ranks / all_work(full);
        n_columns += (double)columns->chunks_per_rank;
        cf_plan_free(full);
        cf_plan_free(by_cost);
        cf_plan_free(columns);
    }
    printf("  %-22s %5d  %7.3f  %7.3f  %7.3f  %7.2f  %7.1f  %7.2f\n", name, (int)ranks, step / BATCHES, worst,
           dummy / BATCHES, spread / BATCHES, n_columns / BATCHES, 1e3 * seconds / BATCHES);
}

/* The same batches, with cp groups. */
static void cp_line(const char *name, const int64_t *lengths, int64_t n_lengths, int64_t n, int64_t giant,
                    int64_t ranks, int64_t chunk_size) {
    double cp_groups = 0, worst = 0, alone = 0, apart = 0, seconds = 0, n_columns = 0;
    int b;
    for (b = 0; b < BATCHES; b++) {
        int64_t batch[MOST];
        cf_pack_desc desc;
        cf_plan *plain, *columns;
        double begin, mean, one;
        draw_batch(batch, lengths, n_lengths, n, giant, b);
        memset(&desc, 0, sizeof desc);
        desc.chunk_size = chunk_size;
        desc.n_ranks = ranks;
        plain = pack_desc(batch, n, desc);
        mean = all_work(plain) / (double)ranks;
        apart += free_ranks(plain) / mean;
        desc.lockstep = 1;
        columns = pack_desc(batch, n, desc);
        alone += in_step(columns) / mean;
        cf_plan_free(columns);
        desc.max_cp = ranks;
        desc.cp_row_seconds = 0.004;
        begin = seconds_now();
        columns = pack_desc(batch, n, desc);
        seconds += seconds_now() - begin;
        one = in_step(columns) / mean;
        cp_groups += one;
        if (one > worst) worst = one;
        n_columns += (double)columns->chunks_per_rank;
        cf_plan_free(plain);
        cf_plan_free(columns);
    }
    printf("  %-22s %5d  %4dK  %2d  %7.3f  %7.3f  %8.3f  %7.3f  %7.1f  %7.2f\n", name, (int)ranks,
           (int)(chunk_size / 1024), (int)k, cp_groups / BATCHES, worst, alone / BATCHES, apart / BATCHES,
           n_columns / BATCHES, 1e3 * seconds / BATCHES);
}

typedef struct batches {
    const char *name;
    const int64_t *lengths;
    int64_t n_lengths, n, giant;
} batches;

int main(int argc, char **argv) {
    static int64_t chat[BATCHES * MOST], read[READ];
    int64_t i, n_read = 0, ranks, j, size;
    draw_source source = {1};
    for (i = 0; i < BATCHES * MOST; i++)
        do chat[i] = draw_lmsys(&source);
        while (chat[i] > 262144);
    if (argc > 1) {
        char text[256];
        FILE *file = fopen(argv[1], "r");
        while (file != NULL && n_read < READ && fgets(text, sizeof text, file) != NULL)
            if (text[0] != '#' && strtoll(text, NULL, 10) > 0) read[n_read++] = strtoll(text, NULL, 10);
        if (file == NULL || n_read < MOST) return fprintf(stderr, "bench_ranks: cannot read %s\n", argv[1]), 1;
        fclose(file);
    }
    printf("  %-22s %5s  %7s  %7s  %7s  %7s  %7s  %7s\n", "batch", "ranks", "in step", "worst", "dummies", "free",
           "columns", "plan");
    printf("  %-22s %5s  %7s  %7s  %7s  %7s  %7s  %7s\n", "", "", "/ free", "/ free", "/ free", "/ mean", "", "ms");
    {
        const batches all[] = {{"256 chat", chat, BATCHES * MOST, 256, 0},
                               {"255 chat, one of 128K", chat, BATCHES * MOST, 256, 131072},
                               {"255 chat, one of 256K", chat, BATCHES * MOST, 256, 262144},
                               {"64 of the file", read, n_read, 64, 0},
                               {"256 of the file", read, n_read, 256, 0}};
        int64_t n = n_read > 0 ? 5 : 3;
        for (ranks = 8; ranks <= MOST_RANKS; ranks *= 2)
            for (j = 0; j < n; j++)
                line(all[j].name, all[j].lengths, all[j].n_lengths, all[j].n, all[j].giant, ranks);
        printf("\n  %-22s %5s  %5s  %2s  %7s  %7s  %8s  %7s  %7s  %7s\n", "batch", "ranks", "chunk", "K", "cp",
               "worst", "no cp", "free", "columns", "ms");
        for (k = 1; k <= 2; k++)
            for (size = 8192; size <= 32768; size *= 4)
                for (ranks = 8; ranks <= MOST_RANKS; ranks *= 2)
                    for (j = 0; j < n; j++)
                        cp_line(all[j].name, all[j].lengths, all[j].n_lengths, all[j].n, all[j].giant, ranks, size);
    }
    return 0;
}
