/* Errors and schedules for lockstep_mpi.c and cp_groups_mpi.c. */

#ifndef RANKS_MPI_H
#define RANKS_MPI_H

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#include <math.h>
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void give_up(int signal) {
    (void)signal;
    MPI_Abort(MPI_COMM_WORLD, 4);
}

static void need(cf_result result, const cf_error *error) {
    if (result == CF_OK) return;
    fprintf(stderr, "%s\n", error->text);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* Makes a rank's schedule: its part of the columns' list of this kind; with `alone`, by `paper` for this rank only. */
static cf_schedule *schedule_of(const cf_plan *plan, int rank, int64_t k, int alone, cf_schedule_kind kind) {
    cf_schedule_desc desc = {0};
    cf_plan *columns = NULL;
    cf_schedule *list = NULL, *own = NULL;
    cf_error error;
    desc.shape.k = k;
    desc.kind = alone ? CF_SCHEDULE_PAPER : kind;
    if (alone) {
        desc.shape.rank = rank;
        need(cf_schedule_make(plan, &desc, &own, &error), &error);
        return own;
    }
    need(cf_lockstep_plan(plan, NULL, NULL, &columns, &error), &error);
    need(cf_schedule_make(columns, &desc, &list, &error), &error);
    need(cf_lockstep_schedule(plan, list, rank, NULL, &own, &error), &error);
    cf_schedule_free(list);
    cf_plan_free(columns);
    return own;
}

#endif
