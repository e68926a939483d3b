/* One header's answers for bench_dealing.c. It is compiled twice: with -DSIDE=dealing_this, and with the other header
   and -DSIDE=dealing_other. */

#define _POSIX_C_SOURCE 200809L

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include HEADER
#include "old_names.h"

#include "dealing_side.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static cf_plan *plan_of(const dealing_case *of) {
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_error error;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = of->chunk_size;
    desc.n_ranks = of->n_ranks;
    desc.lockstep = of->lockstep;
    desc.max_cp = of->max_cp;
    if (of->max_cp > 0) desc.cp_row_seconds = 0.004;
    desc.cost.constant = of->constant;
    desc.cost.per_token = of->per_token;
    desc.cost.per_pair = of->per_pair;
    if (cf_pack(of->lengths, of->n, &desc, &plan, &error) == CF_OK) return plan;
    fprintf(stderr, "bench_dealing: %s\n", error.text);
    exit(1);
}

/* Returns the cost of a chunk's forward, with the rows that it gathers from other ranks. */
static double cost_of(const cf_plan *plan, const dealing_case *of, const cf_chunk *c) {
    const cf_pass_cost cost = {of->constant, of->per_token, of->per_pair};
    double seconds = c->n_slices > 0 ? cf_cost_seconds(&cost, c->rows, c->pairs) : 0;
    if (c->chain < 0 || plan->chains[c->chain].cp == 0) return seconds;
    return seconds + 0.003 * (double)(plan->slices[c->first_slice].begin - c->prefix);
}

/* Returns the sum of the columns. Columns that are replayed at K 1, all of a chain except its last, cost a third
   more. */
static double in_step(const cf_plan *plan, const dealing_case *of) {
    const cf_pass_cost cost = {of->constant, of->per_token, of->per_pair};
    cf_plan *columns = NULL;
    double sum = 0;
    int64_t i, rank;
    if (cf_lockstep_plan(plan, &cost, NULL, &columns, NULL) != CF_OK) exit(1);
    for (i = 0; i < plan->chunks_per_rank; i++) {
        const cf_chunk *c = &columns->chunks[i];
        double most = 0;
        for (rank = 0; rank < plan->n_ranks; rank++) {
            double own = cost_of(plan, of, &plan->chunks[rank * plan->chunks_per_rank + i]);
            most = own > most ? own : most;
        }
        sum += most;
        if (c->chain >= 0 && c->index + 1 < columns->chains[c->chain].n_chunks) sum += most / 3;
    }
    cf_plan_free(columns);
    return sum;
}

static dealing_result pack(const dealing_case *of) {
    cf_plan *plan = plan_of(of);
    dealing_result out = {0, 0, plan->chunks_per_rank, plan->n_chunks - plan->n_idle};
    double rank = 0;
    int64_t i;
    for (i = 0; i < plan->n_chunks; i++) {
        double own = cost_of(plan, of, &plan->chunks[i]);
        rank = (i % plan->chunks_per_rank > 0 ? rank : 0) + own;
        out.mean += own / (double)plan->n_ranks;
        if (rank > out.seconds) out.seconds = rank;
    }
    if (of->lockstep) out.seconds = in_step(plan, of);
    cf_plan_free(plan);
    return out;
}

static double time_pack(const dealing_case *of, double *validate) {
    double begin = seconds_now();
    cf_plan *plan = plan_of(of);
    double end = seconds_now();
    cf_error error;
    if (cf_plan_validate(plan, of->lengths, of->n, NULL, &error) != CF_OK) {
        fprintf(stderr, "bench_dealing: %s\n", error.text);
        exit(1);
    }
    *validate = seconds_now() - end;
    cf_plan_free(plan);
    return end - begin;
}

const dealing_side SIDE = {pack, time_pack};
