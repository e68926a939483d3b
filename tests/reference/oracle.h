/* oracle.h - references to compare chunkflow.h with: slow code written from the definitions, sharing nothing with it.

   Nothing here calls the library; only its structs are read. Functions that judge return NULL if all is sound, or the
   broken rule. */

#ifndef ORACLE_H
#define ORACLE_H

#include "chunkflow.h"
#include "../harness.h"

/* ---- batches ---- */

#define ORACLE_MOST_SEQUENCES 400

typedef struct oracle_batch {
    int64_t n;
    int64_t lengths[ORACLE_MOST_SEQUENCES];
    cf_pack_desc desc;
} oracle_batch;

/* Draws a batch: all methods, splits, alignments, caps, ranks, tails on and off; short, long, empty, equal, exact and
   ragged lengths. It has at most `most` sequences (>= 1). */
void oracle_draw(harness_rng *rng, oracle_batch *batch, int64_t most);

/* Sets the harness's note to the batch, so that a failure can be repeated from the output alone. */
void oracle_note(uint64_t seed, const oracle_batch *batch);

int64_t oracle_round_up(int64_t n, int64_t multiple);
int64_t oracle_divide_up(int64_t n, int64_t divisor);

/* Returns the (query, key) pairs of a slice, counted query by query. */
int64_t oracle_pairs(int64_t prefix, int64_t length);

/* ---- judging a plan ---- */

/* Checks every rule that a plan of these lengths must keep, for any options. The counts of the plan must not exceed its
   arrays; any other damage is survived. */
const char *oracle_plan_fault(const cf_plan *plan, const int64_t *lengths, int64_t n);

/* Returns where a sound plan contradicts its options (sizes, kinds, order, splits, hybrid chunks, ranks), or NULL. */
const char *oracle_option_fault(const cf_plan *plan, const int64_t *lengths, const cf_pack_desc *desc);

/* Returns the fault in the record of an error, or NULL. The text agrees with the members, and an item is named if there
   are items. If the reason says "too small" or "more than", the two numbers compare that way. */
const char *oracle_error_fault(const cf_error *error);

/* The same after one number of a sound object was changed, item `item` of `field`. A record that names this field must
   have found the changed value, and wanted one nearer to the original. */
const char *oracle_change_fault(const cf_error *error, const char *field, int64_t item, int64_t was, int64_t now);

/* A number of a plan, to be damaged. Members of chunks and chains have 64 bits, most of a slice 32: they take a value's
   low bits. */
typedef struct oracle_number {
    void *at;
    size_t bytes;
} oracle_number;

#define ORACLE_SLICE_NUMBERS 7
oracle_number oracle_slice_number(cf_slice *slice, int64_t which); /* in the order in which they are declared */
int64_t oracle_read(oracle_number number);
void oracle_write(oracle_number number, int64_t value);

/* ---- packing ---- */

/* One-dimensional bin packing with initial bins: the tails, one per bin. Weights are padded lengths. */
typedef struct oracle_packing {
    int64_t capacity;
    int64_t max_slices;                     /* 0: no cap */
    int64_t n_tails, n_items;
    int64_t tails[ORACLE_MOST_SEQUENCES];
    int64_t items[ORACLE_MOST_SEQUENCES];   /* in input order */
    int64_t n_bins;                         /* results; bins 0 .. n_tails - 1 are those of the tails */
    int64_t used[2 * ORACLE_MOST_SEQUENCES];
    int64_t count[2 * ORACLE_MOST_SEQUENCES];
    int64_t bin_of[ORACLE_MOST_SEQUENCES];  /* of each item */
} oracle_packing;

/* Builds the packing problem of a plan: its tails (empty bins if the options leave tails alone) and its short
   sequences. */
void oracle_packing_of(const cf_plan *plan, const int64_t *lengths, const cf_pack_desc *desc, oracle_packing *packing);

void oracle_first_fit(oracle_packing *packing); /* decreasing; O(n^2) */
void oracle_best_fit(oracle_packing *packing);  /* decreasing; O(n^2) */
int64_t oracle_optimum(const oracle_packing *packing); /* fewest bins, by trying everything: at most 9 items */
int64_t oracle_bound(const oracle_packing *packing);   /* the best of the textbook lower bounds, by direct sums */

/* Returns the chunks that next fit makes of a whole batch in input order, with full slices only. */
int64_t oracle_next_fit(const int64_t *lengths, int64_t n, const cf_pack_desc *desc);

/* ---- splitting ---- */

typedef double (*oracle_cost)(int64_t begin, int64_t length, void *user);

/* Returns the lowest possible cost of the most expensive slice, over all ways to split `length` tokens into `parts`
   slices of 1 .. most tokens, at multiples of `unit`. Dynamic programming, O(parts x (length / unit)^2). Infinite if
   there is no way. */
double oracle_best_split(int64_t length, int64_t parts, int64_t most, int64_t unit, oracle_cost cost, void *user);

/* ---- ranks ---- */

/* Distributes units (a chain, or one standalone chunk) over ranks. best[0]: the fewest columns possible. best[1]: the
   lowest possible cost of the most expensive rank, with at most `steps` chunks on each. Tries everything: at most 9
   units. */
void oracle_best_ranks(const int64_t *chunks, const double *cost, int64_t n_units, int64_t n_ranks, int64_t steps,
                       double best[2]);

#endif /* ORACLE_H */
