/* naive.h - pipelines the slow way, for tests: a generator of sound schedules in random order, a judge, and a run in
   which every transfer is a rendezvous. All of it is written from the definitions and shares nothing with chunkflow.h
   but the structs (plans are packed by the library). Made for a few hundred passes: everything is quadratic or
   worse. */

#ifndef NAIVE_H
#define NAIVE_H

#include "chunkflow.h"
#include "../harness.h"

/* n sequences packed into chunks of that size, with the defaults, or with one slice to a chunk. NULL, and a failure of
   the test, where that fails. */
cf_plan *naive_pack(const int64_t *lengths, int64_t n, int64_t chunk_size);
cf_plan *naive_pack_alone(const int64_t *lengths, int64_t n, int64_t chunk_size);

typedef struct naive_shape {
    int64_t n_stages, n_virtual, k, rank;
    cf_placement placement;
    cf_replay replay;
    int split;  /* 0: B; 1: I and W; 2: either, chunk by chunk and stage by stage */
    int uneven; /* 1: some chains keep fewer than K chunks on some stages */
} naive_shape;

naive_shape naive_draw_shape(harness_rng *rng);

/* The stage that a virtual stage of the schedule lies on. */
int64_t naive_stage(const cf_schedule *schedule, int64_t v);

/* A sound schedule: runs all passes in a random order that keeps to every rule, and notes which stage ran what. NULL,
   and a failure of the test, where it gets stuck. To be given to naive_free. */
cf_schedule *naive_schedule(harness_rng *rng, const cf_plan *plan, const naive_shape *shape);

/* Room for a schedule with these counts; the arrays are separate blocks of exactly their size. */
cf_schedule *naive_new(int64_t n_stages, int64_t n_actions);
cf_schedule *naive_copy(const cf_schedule *schedule);
void naive_free(cf_schedule *schedule);

/* Puts an action in at a position of a stage's list, or takes one out. Returns a new schedule, the old one is freed. */
cf_schedule *naive_insert(cf_schedule *schedule, int64_t stage, int64_t position, cf_action action);
cf_schedule *naive_remove(cf_schedule *schedule, int64_t stage, int64_t position);

/* NULL if the schedule keeps every rule, or what is broken. The counts and pointers of the schedule must be sound, its
   actions may hold anything. */
const char *naive_fault(const cf_plan *plan, const cf_schedule *schedule);

/* Runs the schedules of the first n_ranks ranks at once, each stage of each rank as a process of its own. A send waits
   until the process at the other end stands at a receive from here, and all ranks of a stage run each pass together, as
   their collectives make them. NULL if all lists end, passes that meet are of one kind (F and R are one), each round of
   a cp group is one, no receive gets another's message, and every pass finds the tensors that it needs. In lists
   without transfers a pass waits for those that make what it reads. One schedule may be of any rank. */
const char *naive_rendezvous(const cf_plan *plan, const cf_schedule *const *schedules, int64_t n_ranks);

/* Returns what is wrong with a graph's lists of edges, or NULL: both directions hold each edge once, and every node can
   run once all that it waits for have run. */
const char *naive_graph_fault(const cf_graph *graph);

/* Node `to` starts no sooner than so long after node `from` ends. */
typedef struct naive_wait {
    int64_t from, to;
    double delay;
} naive_wait;

/* Fills in when each of n nodes starts, by going over all waits until nothing changes. Returns when the last one ends,
   or -1 where that grows without end. */
double naive_relax(int64_t n, const double *seconds, const naive_wait *waits, int64_t n_waits, double *start);

/* Seconds of the longest path. earliest: (n_nodes) filled with when each node can start. lists: the graph's schedule, if its
   stages also take nodes in order, or NULL. slots: 0: without the edges of slots. */
double naive_longest(const cf_graph *graph, const cf_schedule *lists, int slots, double *earliest);

/* Rows of a chunk that those which continue it see: its chain's, between its prefix and the next one's. */
int64_t naive_state(const cf_plan *plan, int64_t chunk);

/* Counts what a stage holds while each action of its list runs, as cf_schedule_loads does: (actions x n_virtual)
   records. The schedule must be sound. */
void naive_loads(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, cf_memory_load *loads);

/* The most that a stage holds at once. */
typedef struct naive_peaks {
    int64_t chunks, tokens; /* whose activations are kept, and their rows */
    int64_t state;          /* rows of K and V */
    int64_t state_of_one;   /* the most of any of its virtual stages */
    int64_t bytes;
} naive_peaks;

naive_peaks naive_peaks_of(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_held_bytes *bytes);
int64_t naive_peak_chunks(const cf_plan *plan, const cf_schedule *schedule, int64_t stage);
int64_t naive_peak_bytes(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_held_bytes *bytes);

#endif
