/* naive.h - pipelines the slow way, for tests: a generator of sound schedules in random order, a judge, and a run in
   which every transfer is a rendezvous. Everything is written from the definitions and shares only the structs with
   chunkflow.h (the library packs the plans). Meant for a few hundred passes: everything is quadratic or worse. */

#ifndef NAIVE_H
#define NAIVE_H

#include "chunkflow.h"
#include "../harness.h"

/* Packs n sequences into chunks of that size with the defaults, or with one slice a chunk. Returns NULL, and fails the
   test, if packing fails. */
cf_plan *naive_pack(const int64_t *lengths, int64_t n, int64_t chunk_size);
cf_plan *naive_pack_alone(const int64_t *lengths, int64_t n, int64_t chunk_size);

typedef struct naive_shape {
    int64_t n_stages, n_virtual, k, rank;
    cf_placement placement;
    cf_replay replay;
    int split;  /* 0: B; 1: I and W; 2: either, for each chunk and stage */
    int uneven; /* 1: some chains keep fewer than K chunks on some stages */
} naive_shape;

naive_shape naive_draw_shape(harness_rng *rng);

/* Returns the stage of a virtual stage of the schedule. */
int64_t naive_stage(const cf_schedule *schedule, int64_t v);

/* Makes a sound schedule: runs all passes in a random order within the rules, and records each stage's order. Returns
   NULL, and fails the test, if no pass can run. Release with naive_free. */
cf_schedule *naive_schedule(harness_rng *rng, const cf_plan *plan, const naive_shape *shape);

/* Allocates a schedule with these counts; the arrays are separate blocks of exactly their size. */
cf_schedule *naive_new(int64_t n_stages, int64_t n_actions);
cf_schedule *naive_copy(const cf_schedule *schedule);
void naive_free(cf_schedule *schedule);

/* Inserts an action at a position of a stage's list; naive_remove takes one out. Both return a new schedule and free
   the old one. */
cf_schedule *naive_insert(cf_schedule *schedule, int64_t stage, int64_t position, cf_action action);
cf_schedule *naive_remove(cf_schedule *schedule, int64_t stage, int64_t position);

/* Returns NULL if the schedule keeps every rule, or the broken rule. The counts and pointers of the schedule must be
   sound; its actions may hold anything. */
const char *naive_fault(const cf_plan *plan, const cf_schedule *schedule);

/* Runs the schedules of the first n_ranks ranks together, each stage of each rank as a process. A send waits until the
   process at the other end reaches a receive from here. All ranks of a stage run each pass together, as collectives
   require. In lists without transfers a pass waits for those that make its inputs. One schedule may be of any rank.

   Returns NULL if all lists end, or the broken rule: passes that run together are of one kind (F and R count as one)
   and, in a cp group, of one column; no receive gets another's message; every pass finds its tensors. */
const char *naive_rendezvous(const cf_plan *plan, const cf_schedule *const *schedules, int64_t n_ranks);

/* Returns the fault in a graph's lists of edges, or NULL: both directions hold each edge once, and every node can run
   once everything that it waits for has run. */
const char *naive_graph_fault(const cf_graph *graph);

/* Node `to` starts at least so many seconds after node `from` ends. */
typedef struct naive_wait {
    int64_t from, to;
    double delay;
} naive_wait;

/* Finds when each of n nodes starts, by repeating all waits until nothing changes. Returns when the last one ends, or
   -1 if times grow without end. */
double naive_relax(int64_t n, const double *seconds, const naive_wait *waits, int64_t n_waits, double *start);

/* Returns the seconds of the longest path. earliest: (n_nodes) filled with each node's earliest start. lists: the
   graph's schedule if its stages also run nodes in order, or NULL. slots: 0 leaves out the edges of slots. */
double naive_longest(const cf_graph *graph, const cf_schedule *lists, int slots, double *earliest);

/* Returns the rows of a chunk that its continuations see: its chain's, between its prefix and the next one's. */
int64_t naive_state(const cf_plan *plan, int64_t chunk);

/* Counts a stage's load during each action of its list, as cf_schedule_loads does: (actions x n_virtual) records. The
   schedule must be sound. */
void naive_loads(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, cf_memory_load *loads);

/* The largest load of a stage. */
typedef struct naive_peaks {
    int64_t chunks, tokens; /* kept chunks, and their rows */
    int64_t state;          /* rows of K and V */
    int64_t state_of_one;   /* the largest of any of its virtual stages */
    int64_t bytes;
} naive_peaks;

naive_peaks naive_peaks_of(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_held_bytes *bytes);
int64_t naive_peak_chunks(const cf_plan *plan, const cf_schedule *schedule, int64_t stage);
int64_t naive_peak_bytes(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_held_bytes *bytes);

#endif
