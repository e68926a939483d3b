/* idle.h - the causes of idle time: every idle moment of a timeline has one cause. Also the pass that each pass waited
   for last, and the critical path that follows from this. */

#ifndef CHUNKFLOW_IDLE_H
#define CHUNKFLOW_IDLE_H

#include "../../chunkflow.h"

/* The causes, in order of precedence: a moment has the first cause that holds. "Could run" means any pass that the
   stage has not run yet, if everything else stayed the same. */
#define IDLE_CAUSES(X)                                                                                              \
    X(IDLE_WARM_UP, "warm-up")       /* the stage has run nothing yet */                                            \
    X(IDLE_DRAIN, "drain")           /* the stage has run everything */                                             \
    X(IDLE_OVERHEAD, "overhead")     /* its next pass could run and has not begun: launches, clocks (measured only; \
                                        with transfers that occupy the stage it is IDLE_TRANSFER) */                \
    X(IDLE_ORDER, "order")           /* a later pass could run: the schedule puts it behind one that waits */       \
    X(IDLE_MEMORY, "memory")         /* one could run if the stage, or K, left room for its activations */          \
    X(IDLE_TRANSFER, "transfer")     /* one could run if transfers took no time */                                  \
    X(IDLE_STATE, "state")           /* one could run if it did not need K and V, or their gradients, of its chain */ \
    X(IDLE_IMBALANCE, "imbalance")   /* the pass that the next one waits for runs longer than the mean of its kind */ \
    X(IDLE_GRADIENT, "gradient")     /* the next pass is a backward, whose gradient is not there */                 \
    X(IDLE_ACTIVATION, "activation") /* the next pass is a forward or replay, whose input is not there */

#define IDLE_ITEM(name, text) name,
typedef enum idle_cause { IDLE_CAUSES(IDLE_ITEM) IDLE_CAUSE_COUNT } idle_cause;
#undef IDLE_ITEM

const char *idle_cause_name(idle_cause cause);

/* A piece of idle time on a stage, all of it with one cause. */
typedef struct idle_piece {
    double start, end;
    int64_t before; /* the action that the stage runs next; -1: none, it has run everything */
    idle_cause cause;
} idle_piece;

typedef struct idle_stage {
    double seconds[IDLE_CAUSE_COUNT]; /* their sum is makespan - time of the stage's passes */
} idle_stage;

/* All arrays lie in one block of memory. */
typedef struct idle_report {
    int64_t n_actions, n_stages;
    int64_t *first;      /* (n_stages + 1) stage s has the pieces first[s] .. first[s + 1), by time */
    idle_piece *pieces;
    idle_stage *stages;  /* (n_stages) */
    double *sent;        /* (n_actions) when a pass's result begins to go to another stage; -1: it stays */
    double *arrived;     /* (n_actions) when the result arrives; the end of the pass if it stays on the stage */
    int32_t *waited_for; /* (n_actions) the action that determined an action's start: the previous pass on its stage, or
                            a pass whose result came later than that; -1: none, or the action is not a pass */
    int32_t *path;       /* (n_path) the critical path in order of time: it follows waited_for back from the pass that
                            ends last */
    int64_t n_path;
    void *memory;
} idle_report;

/* Makes a report for a schedule that cf_schedule_validate accepts, with its timeline, simulated or measured. Transfers
   of a lowered schedule are left out; they are computed from `timing` (NULL: they take no time), as in cf_simulate.
   Free it with idle_free; on failure *out is untouched. Errors: those of cf_schedule_index_make. */
cf_result idle_make(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline,
                    const cf_timing *timing, idle_report *out, cf_error *error);
void idle_free(idle_report *report);

#endif /* CHUNKFLOW_IDLE_H */
