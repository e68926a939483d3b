/* chunkflow.h - v0.1.0, 2026-11-29 - long-context training in chunks: plans, schedules, runs - MIT or public domain

   What it is. Fine-tuning data is long-tailed: most sequences are short, a few are enormous. chunkflow reorganises a
   batch into chunks of at most ChunkSize tokens. Short sequences are packed together. Long ones are cut into dependent
   chunks that hand on their attention state: K, V and the gradients of both.

   A schedule that knows of this state orders the chunks. A pipeline stage then keeps the activations of about K chunks,
   and of one more for each later stage, however long the longest sequence is. Loss and gradients equal those of the
   unchunked batch.

   The method is ChunkFlow (Yuan et al., ICML 2025, arXiv 2503.02356). This file does more than the paper, and comments
   say where: each stage replays alone, its replay need not attend, state may stream from host memory, and schedules are
   searched for.

   How to use it. In ONE C or C++ file:

       #define CHUNKFLOW_IMPLEMENTATION
       #include "chunkflow.h"

   and everywhere else just #include "chunkflow.h". Define CHUNKFLOW_STATIC instead to make all functions private to the
   file; this includes the implementation. Define CHUNKFLOW_API yourself (for example as a DLL export) to override the
   linkage. Only libc is needed. Compile that one file with any optimisation except -Ofast, -ffast-math and the options
   that these set; it refuses them.

   The functions by task. Functions on lines marked ~ may change before 1.0. All others are stable until then: a
   function keeps its arguments and meaning, and a struct of options keeps its members but may gain new ones.
       pack a batch            cf_pack, cf_pack_size + cf_pack_into (your memory), cf_pack_defaults, cf_plan_free
         find shared prefixes  cf_shared_prefixes_find (from tokens)
       measure a plan          cf_plan_measure (fill, bounds, balance), cf_slice_pairs
       feed kernels and loss   cf_metadata_size + cf_metadata_fill (cu_seqlens, positions, targets), cf_loss_weights
     ~   all chunks' tokens    cf_token_rows_size + cf_token_rows_fill (with targets, weights)
     ~   other ranks' K and V  cf_kv_sources
       order the passes        cf_schedule_make, cf_schedule_size + cf_schedule_into, cf_schedule_defaults,
                               cf_schedule_free
       time them               cf_simulate, cf_timeline_free
     ~ ranks in step           cf_lockstep_plan, cf_lockstep_schedule, cf_lockstep_validate
       add the transfers       cf_schedule_lower
       run them                cf_steps_make, cf_steps_size + cf_steps_into, cf_steps_free, cf_chunk_seed
         size their buffers    cf_steps_capacity
       check                   cf_plan_validate, cf_schedule_validate (of any source)
     ~ query a schedule        cf_schedule_index_make, cf_schedule_index_free, cf_schedule_find (where a pass stands),
                               cf_schedule_needs (what it waits for), cf_schedule_loads (memory over time)
       write                   cf_write_plan_json, cf_write_schedule_json
     ~ passes as a graph       cf_graph_make, cf_graph_free
       names of enum items     cf_pass_name, cf_edge_name, cf_placement_name, cf_replay_name, cf_schedule_kind_name,
                               cf_pack_method_name, cf_split_method_name, cf_recompute_name
       errors                  cf_result_name, the cf_error record
     ~   raise your own        cf_fail, cf_fail_real, cf_fail_null, cf_refuse
       your own memory         cf_allocator
     ~   in your functions     cf_allocator_resolve, cf_allocate
       cost numbers            cf_cost_seconds
       describe a model        cf_model_validate, cf_model_parameters, cf_stage_parameters,
         and its split         cf_stage_shard, cf_parallel_validate, cf_parallel_defaults
         and where stages lie  cf_placement_stage, cf_placement_at
     ~ size its memory         cf_memory_estimate, cf_memory_token_bytes, cf_memory_defaults

   Attention, carried state and a pipeline on GPUs are in a companion with its own declarations, chunkflow_cuda.cu.

   A second library of the same kind, tools/chunkflow_tune.h, makes decisions that are needed once, not for every batch.
   It has models by name (cf_model_find), estimates seconds from a model and a GPU, or fits them to measurements, sizes
   the memory of a schedule (cf_schedule_memory), and searches for ChunkSize and K.

   What it does not do. It runs no model, owns no tensor, starts no thread, opens no file, prints nothing and never
   aborts. It never truncates, drops or reorders tokens inside a sequence.

   Determinism. The same input gives the same output bytes, on every compiler and platform with IEEE 754 doubles and
   two's complement integers. Decisions depend only on integers and on products of doubles, each rounded separately.

   Threads. There is no global state. Threads may call functions on different objects at the same time; any number of
   threads may read a finished object.

   Untrusted input. Every number that comes from the caller is checked, in release builds as well. Sizes are 64-bit, and
   arithmetic is overflow-checked. A bad value gives a result code and a cf_error record, never a crash. Two things
   cannot be checked: that a pointer has as many items as you say, and that an object is still as this library built it.
   Validate an object from elsewhere before you pass it to a function that requires a sound one.

   A complete program (examples/hello.c is a longer one; C++ people write {} for {0})

       #define CHUNKFLOW_IMPLEMENTATION
       #include "chunkflow.h"
       #include <stdio.h>
       static void pass(const cf_step *step) {      // your forward or backward goes here
           printf("%s chunk %d\n", cf_pass_name((cf_pass)step->action.pass), step->action.chunk);
       }
       int main(void) {
           int64_t lengths[] = {900, 14000, 350, 2600};   // tokens of each sequence of the batch
           cf_pack_desc pack = {0}; pack.chunk_size = 4096;
           cf_schedule_desc order = {0}; order.shape.k = 1;
           cf_plan *plan = NULL; cf_schedule *schedule = NULL; cf_steps *steps = NULL; cf_error error = {0};
           if (cf_pack(lengths, 4, &pack, &plan, &error) == CF_OK &&
               cf_schedule_make(plan, &order, &schedule, &error) == CF_OK &&
               cf_steps_make(plan, schedule, 0, 0, NULL, &steps, &error) == CF_OK)
               for (int64_t i = 0; i < steps->n; i++) pass(&steps->steps[i]);
           if (error.code != CF_OK) printf("%s\n", error.text);
           cf_steps_free(steps); cf_schedule_free(schedule); cf_plan_free(plan);
           return (int)error.code;
       }

   Words
       sequence          one training sample
       chunk             at most chunk_size tokens that go through the model together
       slice             a contiguous piece of one sequence inside a chunk
       standalone chunk  a chunk of whole sequences only
       chain             the chunks of one split sequence, in order; they are dependent chunks
       prefix            the tokens of a chain that come before a chunk
       hybrid chunk      a chain's last chunk, if its free space holds whole short sequences
       state             K and V of a chain's tokens so far
       K                 the maximum number of chunks of one chain that keep their activations at once
       pass              F forward, R replay (a second forward, if the activations were dropped), B backward; or
                         I + W, if backward is split into the gradients of the inputs and of the weights
       attention pairs   the (query, key) pairs that a causal mask leaves visible
       stage, rank       a part of the model; a data-parallel copy of it
       cp group          neighbouring ranks that split one long sequence (context parallelism); each has a part of it
       round             the i-th chunks of all parts of a cp group's sequence, which run at once
       column            the i-th chunks of all ranks, where ranks run in step (>>lockstep)
       tree, path, leaf  sequences with a common beginning; the rows from its root to a chunk; rows that none continue

   Sections. Each is found by its tag. They are declared and then implemented in this order: >>base >>tree >>pack >>plan
   >>metadata >>model >>memory >>pipeline >>schedule >>clock >>bounds >>dispatch >>search >>check >>lockstep >>simulate
   >>lower >>steps >>write >>graph. A section calls only sections above it. >>tree, >>plan, >>clock, >>bounds,
   >>dispatch and >>search have no declarations here. */

#ifndef CHUNKFLOW_H
#define CHUNKFLOW_H

#include <stddef.h>
#include <stdint.h>

#define CHUNKFLOW_VERSION_MAJOR 0
#define CHUNKFLOW_VERSION_MINOR 1
#define CHUNKFLOW_VERSION_PATCH 0
#define CHUNKFLOW_VERSION "0.1.0"
#define CHUNKFLOW_DATE "2026-11-29" /* of this version */

#if defined(CHUNKFLOW_STATIC) && !defined(CHUNKFLOW_IMPLEMENTATION)
#define CHUNKFLOW_IMPLEMENTATION
#endif

#ifndef CHUNKFLOW_API
#if defined(CHUNKFLOW_STATIC)
#if defined(__GNUC__) || defined(__clang__)
#define CHUNKFLOW_API __attribute__((unused)) static
#else
#define CHUNKFLOW_API static
#endif
#else
#define CHUNKFLOW_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================================
   >>base    results, error record, allocator
   ================================================================================================================ */

/* Every function that can fail returns one of these. CF_OK is 0, all others are positive. */
#define CF_RESULTS(X)                                                                                    \
    X(CF_OK, "CF_OK")                             /* ok */                                               \
    X(CF_ERROR_ARGUMENT, "CF_ERROR_ARGUMENT")     /* an argument or option is missing or out of range */ \
    X(CF_ERROR_LIMIT, "CF_ERROR_LIMIT")           /* the request exceeds a documented limit */           \
    X(CF_ERROR_OVERFLOW, "CF_ERROR_OVERFLOW")     /* a size or sum does not fit in 64 bits */            \
    X(CF_ERROR_MEMORY, "CF_ERROR_MEMORY")         /* the allocator returned no memory */                 \
    X(CF_ERROR_SPACE, "CF_ERROR_SPACE")           /* the caller's memory is too small or misaligned */   \
    X(CF_ERROR_PLAN, "CF_ERROR_PLAN")             /* the plan breaks a rule */                           \
    X(CF_ERROR_SCHEDULE, "CF_ERROR_SCHEDULE")     /* the schedule breaks a rule */                       \
    X(CF_ERROR_CALLBACK, "CF_ERROR_CALLBACK")     /* a callback reported an error */                     \
    X(CF_ERROR_CANCELLED, "CF_ERROR_CANCELLED")   /* the progress callback asked to stop */              \
    X(CF_ERROR_WRITE, "CF_ERROR_WRITE")           /* the write callback reported an error */             \
    X(CF_ERROR_INFEASIBLE, "CF_ERROR_INFEASIBLE") /* no schedule keeps within the memory limit */        \
    X(CF_ERROR_TEXT, "CF_ERROR_TEXT")             /* the text breaks its format */                       \
    X(CF_ERROR_DEVICE, "CF_ERROR_DEVICE")         /* the device reported an error */

/* Declares an enum from a table with one row per item. `count` is the number of items and not an item itself. A
   function returns an item's name, which is the string in its row; "?" for any other value. Both macros are undefined
   again at the end of the declarations. */
#define CF_ENUM_OF(type, ITEMS, count) typedef enum type { ITEMS(CF_ENUM_ITEM) count } type
#define CF_ENUM_ITEM(name, text) name,

CF_ENUM_OF(cf_result, CF_RESULTS, CF_RESULT_COUNT);

/* The record of a failure, owned by the caller. Every function that can fail takes a pointer to one, or NULL. It is
   written only on failure, and then completely. */
typedef struct cf_error {
    int64_t item;      /* index of the sequence, slice, chunk, chain, action ... at fault; -1: none in particular */
    cf_result code;    /* the code that the function also returns */
    const char *field; /* name of the argument, option or member at fault; a static string */
    int64_t wanted;    /* the nearest acceptable value, or the limit; 0 if there is no such number */
    int64_t got;       /* the value found; 0 if it is not an integer */
    char text[256];    /* place, reason and value in one line, without a line end */
} cf_error;

/* Returns the name of a code, for example "CF_ERROR_PLAN". */
CHUNKFLOW_API const char *cf_result_name(cf_result code);

/* Report errors from your own functions in the library's format. Each function fills in the record, unless `error` is
   NULL, and returns the code. The text is "field[item]: why (wanted 1, got 0)", without [item] if item is -1. `field`
   must be a static string.

   cf_fail_real reports a double, also NaN and infinity. cf_refuse reports no number. cf_fail_null reports a missing
   argument, with CF_ERROR_ARGUMENT. */
CHUNKFLOW_API cf_result cf_fail(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted,
                                int64_t got, const char *why);
CHUNKFLOW_API cf_result cf_fail_real(cf_error *error, cf_result code, const char *field, int64_t item, double got,
                                     const char *why);
CHUNKFLOW_API cf_result cf_refuse(cf_error *error, cf_result code, const char *field, int64_t item, const char *why);
CHUNKFLOW_API cf_result cf_fail_null(cf_error *error, const char *field);

/* The source of memory. Give both callbacks or neither; NULL, or an all-zero record, means malloc and free. alloc
   returns memory aligned like malloc's (16 bytes). If alloc returns NULL, the call fails with CF_ERROR_MEMORY. An
   object remembers its allocator; `user` must live as long as the object. */
typedef struct cf_allocator {
    void *(*alloc)(size_t bytes, void *user);
    void (*release)(void *memory, void *user);
    void *user;
} cf_allocator;

/* Use these in your own functions that take an allocator. cf_allocator_resolve returns the one to use, with both
   callbacks set; an allocator with only one callback is CF_ERROR_ARGUMENT. cf_allocate asks a resolved allocator for
   memory, for at least one byte even if bytes is 0, and fails with CF_ERROR_MEMORY. *out is untouched on failure. */
CHUNKFLOW_API cf_result cf_allocator_resolve(const cf_allocator *given, cf_allocator *out, cf_error *error);
CHUNKFLOW_API cf_result cf_allocate(const cf_allocator *allocator, size_t bytes, void **out, cf_error *error);

/* Alignment, in bytes, of all memory that the library uses. */
#define CF_MEMORY_ALIGNMENT 16

/* The memory of an object, as recorded in the object itself; its free function frees it. All zero: the memory is the
   caller's, and nothing is freed. Fill it in if you build an object yourself, for example from a file. */
typedef struct cf_block {
    cf_allocator allocator; /* all zero if the memory is the caller's */
    size_t bytes;
} cf_block;

/* Objects and options, in all sections. A function that makes an object puts its address into *out. Free the object
   with the free function of its kind, which also takes NULL. *out is untouched on failure. A function ending in
   _defaults returns a copy of its options with every default filled in; cf_pack_defaults and cf_schedule_defaults take
   NULL for options that are all zeros. A flag is 1 or 0.

   Objects hold no pointers to each other, so they may be freed in any order. Only an index of a schedule reads plan and
   schedule as long as it lives.

   A member that needs another one is refused without it, and the message names both. Some members are allowed even
   where they have no effect, so that one record fits many batches:
   - prices and upper limits;
   - sizes and biases of parts that a layer lacks;
   - zero with one rank; no_sequence with tp 1; unfused with full recomputation; gathered rows, or outputs where none
     are kept; shape.outputs with forward_only.

   Objects from elsewhere. A plan, schedule or graph is sound if the library has made it or the validator of its kind
   accepts it. Every function that takes one says whether it must be sound or may be unvalidated. A function that takes
   unvalidated objects never reads beyond the counts stated in them, and its time and memory are in proportion to these
   counts. A free function takes only objects that the library has made. */

/* ================================================================================================================
   >>pack    lengths -> plan
   ================================================================================================================ */

/* Time of one pass over one chunk: constant + per_token x rows + per_pair x attention pairs, in seconds or any other
   unit. rows are the chunk's tokens and padding, because kernels run over all of them. The last term makes a late chunk
   of a long sequence more expensive than an early one. */
typedef struct cf_pass_cost {
    double constant;
    double per_token;
    double per_pair;
} cf_pass_cost;

/* Evaluates the formula above; 0 if cost is NULL. For a chunk, pass its `rows` and `pairs`. Each product and sum is
   rounded to double separately, so all platforms give equal bits. */
CHUNKFLOW_API double cf_cost_seconds(const cf_pass_cost *cost, int64_t rows, int64_t pairs);

/* Returns the visible (query, key) pairs of a slice of `length` tokens that follows `prefix` tokens of its own
   sequence, under a causal mask: length x prefix + length x (length + 1) / 2. Returns -1 if an argument is negative or
   the result does not fit in 64 bits. */
CHUNKFLOW_API int64_t cf_slice_pairs(int64_t prefix, int64_t length);

#define CF_MAX_CHUNK_SIZE INT32_MAX      /* cu_seqlens are int32 */
#define CF_MAX_SEQUENCES INT32_MAX       /* sequences in a batch */
#define CF_MAX_CHUNKS INT32_MAX          /* chunks of a plan; an action names its chunk with 32 bits */
#define CF_MAX_SLICES INT32_MAX          /* slices of a plan */
#define CF_MAX_LENGTH ((int64_t)1 << 48) /* tokens of one sequence */
#define CF_MAX_RANKS 65536

#define CF_PACK_METHODS(X)                                                                                        \
    X(CF_PACK_DEFAULT, "?")           /* CF_PACK_BEST_FIT */                                                      \
    X(CF_PACK_BEST_FIT, "best-fit")   /* Longest first, into the fullest chunk with room. On one rank it never needs  \
                                         more chunks than first fit decreasing, whose packing it takes if smaller. */ \
    X(CF_PACK_NEXT_FIT, "next-fit")   /* in input order, into the last chunk or a new one: sequences stay in order */

CF_ENUM_OF(cf_pack_method, CF_PACK_METHODS, CF_PACK_COUNT);
CHUNKFLOW_API const char *cf_pack_method_name(cf_pack_method method);

#define CF_SPLIT_METHODS(X)                                                                                       \
    X(CF_SPLIT_DEFAULT, "?")          /* CF_SPLIT_FULL */                                                         \
    X(CF_SPLIT_FULL, "full")          /* slices of chunk_size tokens, the remainder last (the paper's Algorithm 1) */ \
    X(CF_SPLIT_EVEN, "even")          /* The same number of slices as "full", equal in tokens to within one token (or \
                                         one alignment unit). */                                                  \
    X(CF_SPLIT_COST, "cost")          /* Slices of at most chunk_size tokens, cut at multiples of the alignment. The  \
                                         most expensive slice is as cheap as possible, so late slices, which see  \
                                         more keys, are shorter. At most about twice as many slices as "full". A  \
                                         search: a few microseconds per slice. */

CF_ENUM_OF(cf_split_method, CF_SPLIT_METHODS, CF_SPLIT_COUNT);
CHUNKFLOW_API const char *cf_split_method_name(cf_split_method split);

/* A beginning that one sequence shares with another: its first `tokens` tokens equal those of sequence `with`, and the
   model must compute the same from both. So tokens after different images are not shared, nor tokens that a mixture of
   experts must route differently. */
typedef struct cf_shared_prefix {
    int64_t with;   /* index of the other sequence in the batch */
    int64_t tokens; /* 0: it shares nothing, and `with` is ignored */
} cf_shared_prefix;

#define CF_MIN_SHARED_PREFIX 128

/* Options of packing. Zero means default in every member; only chunk_size must be given. */
typedef struct cf_pack_desc {
    int64_t chunk_size;           /* maximum tokens per chunk, alignment padding included; 1 .. CF_MAX_CHUNK_SIZE */
    cf_pack_method method;        /* 0: best fit */
    cf_split_method split;        /* 0: full slices; by cost with lockstep */
    int no_tails;                 /* 0: whole short sequences fill the free space of a chain's last chunk, which makes
                                     it a hybrid chunk (not in the paper); 1: they do not */
    int64_t align;                /* every slice starts at a multiple of this in its chunk; divides chunk_size. 0: 1 */
    int64_t max_slices;           /* maximum slices per chunk. 0: no limit */
    int64_t n_ranks;              /* data-parallel ranks to spread the chunks over. 0: 1 */
    int64_t lockstep;             /* 1: arranges chunks in columns, for ranks that run in lockstep (cf_lockstep_plan).
                                     The i-th chunks of all ranks are column i and cost about the same. There may be
                                     more chunks than without lockstep, and some may be idle. Needs best fit, without
                                     shared prefixes */
    int64_t max_cp;               /* maximum ranks of a cp group (see below), at most n_ranks. 0, 1: no cp groups. Above
                                     1, lockstep is implied. A larger max_cp never makes all columns together take
                                     longer; this counts the replays of K = 1 */
    double cp_row_seconds;        /* extra cost of a pass per row of K and V from another rank, beyond the part hidden
                                     by other work. In units of `cost`. Ignored without max_cp */
    double cp_chunk_seconds;      /* extra cost of each chunk of a cp group, for the scan of recurrent layers. In units
                                     of `cost`. Ignored without max_cp */
    cf_pass_cost cost;            /* for CF_SPLIT_COST and for balancing ranks. All zero: default weights, by which all
                                     rows of the batch cost as much as all its attention pairs */
    const cf_shared_prefix *shared_prefixes; /* (n) the beginnings that sequences share; their rows are computed once.
                                                NULL: none. Needs best fit */
    int64_t min_shared_prefix;    /* a shared beginning with fewer tokens is computed once per sequence; a longer one is
                                     rounded down to a multiple of align. 0: CF_MIN_SHARED_PREFIX. Needs
                                     shared_prefixes */
    int no_copies;                /* 0: a tree too expensive for one rank is split over several ranks, each of which
                                     computes the rows above its split; 1: no row is computed twice. Set 1 with
                                     cf_metadata_desc.shared_mean, which would count a row once per copy. Needs
                                     shared_prefixes */
    const cf_allocator *allocator;
} cf_pack_desc;

/* A contiguous piece of a sequence in a chunk. A plan may have millions of slices, and writing them takes most of the
   time of packing, so members have 32 bits where limits allow it. Widen a length to 64 bits before you multiply it. */
typedef struct cf_slice {
    int64_t begin;    /* first token, counted in the sequence */
    int32_t sequence; /* index into the caller's lengths. If several sequences share these rows: the first of them in
                         `order` */
    int32_t length;   /* tokens */
    int32_t offset;   /* where it starts in the chunk, in tokens; a multiple of the plan's align */
    int32_t up;       /* the slice whose rows come directly before this one's: earlier in the same chunk, in a chunk
                         above (cf_chunk.up), or in a cp group on another rank. -1: none, its sequences begin here */
    int32_t first, n; /* plan->order[first .. first + n) are the sequences that share these rows. Without an order: only
                         sequence `first` */
} cf_slice;

typedef struct cf_chunk {
    int64_t first_slice; /* its slices are plan->slices[first_slice .. first_slice + n_slices); in a dependent chunk the
                            slice of the split sequence comes first */
    int64_t n_slices;    /* 0: the chunk is idle, and only evens out the ranks' numbers of chunks */
    int64_t tokens;      /* sum of its slices' lengths */
    int64_t rows;        /* tokens and alignment padding; at most chunk_size */
    int64_t pairs;       /* attention pairs, the prefix included */
    int64_t chain;       /* index into plan->chains; -1: standalone or idle */
    int64_t index;       /* its place in the chain, from 0; 0 without a chain */
    int64_t prefix;      /* tokens of the chain before this chunk; in a tree, rows of its path before it; in a cp group,
                            only rows on its own rank */
    int64_t rank;        /* data-parallel rank that runs it */
    int64_t up;          /* the chunk of its rank that it continues: the previous one in its chain, or the last one of
                            the chain above. -1: none */
    int64_t down;        /* the last chunk that continues this one; the first is the next chunk. -1: none */
    int64_t below;       /* number of chunks on the longest path that continues it. 0: none */
    int64_t state;       /* its first rows, whose K and V belong to its chain: those of the split sequence, also in its
                            last chunk. 0 without a chain, and in a tree if no chunk continues it */
    /* ranks of its cp group; 0: none. In a column (>>lockstep): 1 if some rank's chunk has a cp group */
    int64_t cp;
} cf_chunk;

/* The dependent chunks of one split sequence: plan->chunks[first_chunk .. first_chunk + n_chunks). */
typedef struct cf_chain {
    int64_t sequence;
    int64_t first_chunk;
    int64_t n_chunks;
    int64_t tokens; /* length of the sequence. In a tree: rows of the chain's own state (0 if no chunk continues it). In
                       a cp group: rows of this rank's part of the sequence */
    int64_t cp;     /* ranks of its cp group; 0: none */
} cf_chain;

/* Trees. Sequences that begin alike form a tree. A small tree is within one chunk and has no chains. In larger ones the
   rows are in chains, and a chain may continue another chain.

   The path of a chunk is all rows from the tree's root to the chunk's beginning. They are in the states of its own
   chain and of the chains above it, and the chunk sees all of them. A chunk comes before those that continue it, on the
   same rank, subtree by subtree.

   A leaf is a chain of one chunk without a state. It holds the rows of several sequences beyond their common path.

   Cp groups (context parallelism). With max_cp an expensive sequence may be spread over cp = 2, 4, 8 ... neighbouring
   ranks. The first of them is a multiple of cp, and cp divides n_ranks. Each rank has a part of the sequence, as a
   chain with this `cp`: rank r has part r % cp. A part has at least 512 tokens, or chunk_size / 8 if that is less.

   All parts have the same number of chunks, in the same columns. Their i-th chunks are a round: neighbouring slices of
   about the same cost, in the order of the ranks. Each round continues the one before. With cp 2 and four slices, the
   first rank has slices 0 and 2, and the second has 1 and 3. So a chunk sees more rows than its chain has: `prefix`
   counts those of its own rank, slices.begin those of all ranks (cf_kv_sources). Short sequences may follow in a part's
   last chunk. The ranks run the passes of a round at the same time, so their schedules come from one list
   (cf_lockstep_plan). */

/* The packed batch. Plain data in one block of memory: read it, do not resize it. Rank r owns the chunks [r x
   chunks_per_rank, (r + 1) x chunks_per_rank).

   A chain's chunks are consecutive. Chains come first, in the input order of their first sequences, then standalone
   chunks in order of creation. Next fit keeps input order throughout. With lockstep the columns determine the order. */
typedef struct cf_plan {
    int64_t chunk_size;     /* as in the options */
    int64_t align;          /* as in the options; 1 if not given */
    int64_t max_slices;     /* as in the options; 0: no limit */
    cf_pack_method method;
    cf_split_method split;
    int64_t n_sequences;
    int64_t n_empty;        /* sequences of length 0; they are in no slice */
    int64_t n_tokens;
    int64_t n_ranks;
    int64_t chunks_per_rank; /* chunks of each rank */
    int64_t n_chunks;       /* n_ranks x chunks_per_rank */
    int64_t n_idle;         /* chunks without a slice */
    int64_t n_chains;
    int64_t n_slices;
    int64_t lower_bound;    /* a lower bound on the chunks for these slices. It is the largest of total tokens /
                               chunk_size; the number of sequences of which no two fit into one chunk; Martello and
                               Toth's L2 (Knapsack Problems, 1990, section 8.3); slices / max_slices; and dependent
                               chunks */
    cf_chunk *chunks;       /* (n_chunks) */
    cf_slice *slices;       /* (n_slices) */
    cf_chain *chains;       /* (n_chains) */
    /* NULL unless sequences share rows: */
    int64_t *order;         /* (n_sequences) all sequences; those that share rows are neighbours */
    int64_t *common;        /* (n_sequences) rows that order[i] shares with order[i - 1] */
    int64_t *lengths;       /* (n_sequences) as given */
    cf_block block;         /* the memory of this object */
} cf_plan;

/* Packs a batch: splits every sequence longer than chunk_size into a chain of chunks, and packs the others whole.
   Extends the paper's Algorithm 1. Takes nearly linear time: tens of milliseconds for a million lengths, a second with
   max_cp. CF_SPLIT_COST takes a few microseconds more per slice of a long sequence.

   lengths: n token counts, 0 .. CF_MAX_LENGTH. A sequence of length 0 is in no slice. A sequence of exactly chunk_size
   tokens is a standalone chunk; the padding of `align` does not count here.

   With n_ranks > 1 every rank gets chunks_per_rank chunks. A chain is on one rank, unless it is part of a cp group.
   Whole sequences and trees go to ranks by cost: the most expensive first, each to the rank with the lowest cost so
   far. Each rank then packs its own, and idle chunks fill the rest.

   The plan depends only on the arguments, so every rank can compute it independently. No rank gets more tokens than 1.5
   x the mean of all ranks + the longest sequence or tree, where a chain counts as n_chunks x chunk_size. Without align
   and max_slices, chunks_per_rank is at most 2 x that limit / chunk_size + 1.

   Errors: CF_ERROR_ARGUMENT (names the member, or "lengths" and the sequence), CF_ERROR_LIMIT, CF_ERROR_OVERFLOW
   ("lengths": their sum does not fit; "pairs": the attention pairs of a chunk of that sequence do not),
   CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_pack(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, cf_plan **out,
                                cf_error *error);

/* Pack without any allocation, for a data loader that reuses one block of memory. cf_pack_size returns how many bytes
   are enough for these lengths (plan and working space). cf_pack_into packs into `memory` and puts the plan at its
   start. Memory must be aligned to CF_MEMORY_ALIGNMENT; too few bytes are CF_ERROR_SPACE. The plan lives as long as
   `memory`; cf_plan_free on it does nothing.

   cf_pack_size reads each length once, with two exceptions: max_cp > 1, and shared prefixes with n_ranks > 1. In these
   cases the size is known only after packing. cf_pack_size then packs in working space that it allocates and frees, and
   can return every error of cf_pack. To avoid this, keep a block and enlarge it when cf_pack_into returns
   CF_ERROR_SPACE. */
CHUNKFLOW_API cf_result cf_pack_size(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, size_t *bytes,
                                     cf_error *error);
CHUNKFLOW_API cf_result cf_pack_into(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, void *memory,
                                     size_t bytes, cf_plan **out, cf_error *error);

CHUNKFLOW_API cf_pack_desc cf_pack_defaults(const cf_pack_desc *desc);
CHUNKFLOW_API void cf_plan_free(cf_plan *plan);

/* Finds the shared prefixes of a batch by comparing tokens. tokens[i] has the lengths[i] tokens of sequence i, of
   token_bytes bytes each. Takes n log n steps, plus time in proportion to the equal tokens (Ng and Kakehi, Merging
   string sequences by longest common prefixes, 2008).

   You do not need this call if the sequences are sorted by their tokens and you know how many tokens sequence i shares
   with sequence i - 1: prefixes[i] is then {i - 1, common[i]}.

   Errors: CF_ERROR_ARGUMENT (names the argument and the item), CF_ERROR_LIMIT, CF_ERROR_MEMORY (working space). */
CHUNKFLOW_API cf_result cf_shared_prefixes_find(const void *const *tokens, int64_t token_bytes, const int64_t *lengths,
                                                int64_t n, cf_shared_prefix *prefixes, const cf_allocator *allocator,
                                                cf_error *error);

/* Checks a plan from any source against the lengths that it claims to pack. Every token of every sequence must be in
   exactly one slice, and a sequence's slices must be in order. No chunk may exceed chunk_size or max_slices. Alignment,
   chains and prefixes, pairs, ranks and totals must be right. Of lower_bound it only checks that the number of chunks
   used is not below it.

   Returns CF_OK, or CF_ERROR_PLAN for the first violation, with the member in error->field and the index of the chunk,
   slice, chain or sequence in error->item. Scratch comes from `allocator` (NULL: malloc): 1 byte per sequence and 8 per
   chunk, with trees 33 and 16; CF_ERROR_MEMORY if there is none. The plan may be unvalidated. */
CHUNKFLOW_API cf_result cf_plan_validate(const cf_plan *plan, const int64_t *lengths, int64_t n,
                                         const cf_allocator *allocator, cf_error *error);

/* The quality of a plan. Ratios are 1 at best. */
typedef struct cf_plan_stats {
    int64_t n_standalone;         /* chunks by kind; the four add up to n_chunks */
    int64_t n_dependent;          /* dependent chunks that are not hybrid */
    int64_t n_hybrid;
    int64_t n_idle;
    int64_t excess;               /* number of chunks with slices, minus lower_bound */
    int64_t longest_chain;        /* chunks of the longest chain, or of the longest path of a tree; 0 if none */
    int64_t longest_sequence;     /* tokens */
    int64_t most_slices;          /* in one chunk */
    int64_t rows;                 /* computed rows: tokens less shared ones */
    double fill;                  /* rows / (chunks with slices x chunk_size) */
    double pairs;                 /* attention pairs of the whole batch */
    double unshared_pairs;        /* attention pairs without sharing */
    double chunk_imbalance;       /* most expensive chunk / mean, over chunks with slices (0 if there are none) */
    double rank_token_imbalance;  /* fullest rank / mean */
    double rank_pair_imbalance;
    double rank_imbalance;        /* Cost of the most expensive rank / mean. All ranks wait for it, so an iteration
                                     takes this much longer than with even ranks. */
    double unit_imbalance;        /* cost of the most expensive chain or standalone chunk / mean of the ranks. A chain
                                     stays on one rank, so rank_imbalance cannot be less */
} cf_plan_stats;

/* Measures a plan. `cost` gives the weights as in cf_pack_desc; NULL and all zeros mean the default weights. If plan is
   NULL all numbers are 0. The plan must be sound. */
CHUNKFLOW_API void cf_plan_measure(const cf_plan *plan, const cf_pass_cost *cost, cf_plan_stats *stats);

/* ================================================================================================================
   >>metadata    plan -> inputs of a chunk's kernels and of its loss
   ================================================================================================================ */

/* Sizes of a trainer's buffers: the needs of one batch, or their maximum over many batches (cf_steps_capacity). Start
   with all zeros. */
typedef struct cf_capacity {
    int64_t rows;        /* maximum rows of a chunk, padding included. It sizes an activation slot, a boundary slot, and
                            the scratch of a pass that keeps nothing */
    int64_t prefix;      /* longest prefix of a chunk: a state slot needs prefix + rows rows. In a cp group it counts
                            rows of all ranks, which are gathered next to the state */
    int64_t n_seqs;      /* an upper bound of the sequences in a chunk's cu_seqlens */
    int64_t activations; /* activation slots of the stage */
    int64_t states;      /* its state slots */
    int64_t boundaries;  /* its boundary slots */
    int64_t outputs;     /* outputs slots of the stage, for a trainer whose replays use kept attention outputs */
} cf_capacity;

/* Options of a chunk's metadata. Zero means default in every member; NULL is all zeros. */
typedef struct cf_metadata_desc {
    const cf_capacity *capacity;         /* NULL: arrays are as long as the chunk needs. Otherwise its rows, prefix and
                                            n_seqs set the lengths. Shapes and offsets in the block are then the same
                                            for every chunk (as CUDA graphs need), and unused rows are padding */
    const unsigned char *const *ignored; /* (n_sequences) one byte per token of each sequence; non-zero: the token is
                                            not predicted (for example in a prompt). NULL, here or for a sequence: all
                                            tokens are. Give cf_loss_weights the same array, or the mean is wrong */
    const double *weights;               /* (n_sequences) weight of each sequence's targets, from cf_loss_weights. NULL:
                                            no loss_weights */
    int shifted;                         /* 0: a row's target is the next token of the sequence. 1: the trainer has
                                            separate arrays of inputs and of targets, of equal length, with the targets
                                            one token ahead. Every row then has a target, at its own position, and
                                            `ignored` is indexed by target. Give cf_loss_weights the same value */
    int shared_mean;                     /* weight of a token that several sequences share. 0: the sum of their weights,
                                            so that every sequence counts as it would without sharing; 1: the mean of
                                            their weights. Needs weights */
    int wants_loss_rows;                 /* 1: also fill loss_rows */
    int wants_key_ends;                  /* 1: also fill key_ends */
} cf_metadata_desc;

/* One extra call of attention, for sequences that share rows. Their keys are in several places, and each place needs
   its own call. The call with cu_seqlens comes first: in it each slice sees only itself. Each further place has one of
   these calls, without a mask. A sequence of a call may have no queries or no keys.

   Merge the results by their LSE (log-sum-exp). In backward, give every call the merged result and LSE, and add up the
   dQ of all calls. */
typedef struct cf_attention_call {
    int64_t chain;                /* the chain whose state has the keys; -1: they are rows of this chunk, from row 0 */
    int64_t first;                /* the first key's row in that state */
    int64_t n_seqs;
    const int32_t *cu_seqlens_q;  /* (n_seqs + 1) from 0 to the metadata's rows */
    const int32_t *cu_seqlens_k;  /* (n_seqs + 1) from 0 */
    int32_t max_seqlen_q, max_seqlen_k;
} cf_attention_call;

/* One chunk. Its tensors have `rows` rows: tokens, and padding if `align` or a capacity leaves some. Keys and values
   are in this order: the prefix, then the chunk, prefix + rows in all.

   cu_seqlens and max_seqlen are arguments for flash_attn_varlen_func and similar functions, causal and aligned
   bottom-right. The first slice of a dependent chunk has `prefix` more keys than queries, so it sees the prefix and
   itself. All other slices see only themselves. In a cp group the prefix also has the rows of other ranks, in order
   (cf_kv_sources).

   A run of padding rows counts as a separate sequence. So no token sees padding, and every row of a result is written.
   Padding needs finite numbers in Q, K and V. It has no loss, so its gradients are zero. Only the last chunk of a chain
   has padding, so a state has no padding between tokens.

   A loop of your own over rows needs no cu_seqlens, unless sequences share rows. Number the keys so that key 0 is the
   chunk's first row, and the prefix is at -prefix .. -1. Row t then sees the keys t - position_ids[t] .. t.

   With a capacity, unused sequences have length 0. All rows from chunk->rows on are padding without a place in the
   chain's state: do not write their K and V there, and take no dK and dV from there. Those rows of the state may hold
   other chunks' numbers. Set the state to zero once, when it is allocated, so that all of it is finite. */
typedef struct cf_metadata {
    int64_t chunk;
    int64_t tokens;
    int64_t rows;                    /* chunk->rows, or the capacity's rows */
    int64_t prefix;
    int64_t pairs;                   /* attention pairs, without those of padding */
    int64_t n_seqs;                  /* slices and runs of padding rows, or the capacity's n_seqs */
    int32_t max_seqlen_q;            /* queries of the longest sequence; with a capacity: rows */
    int32_t max_seqlen_k;            /* keys of the longest sequence; with a capacity: its prefix + rows */
    const int32_t *cu_seqlens_q;     /* (n_seqs + 1) from 0 */
    const int32_t *cu_seqlens_k;     /* (n_seqs + 1) from 0 */
    const int32_t *sequence_ids;     /* (rows) index of the row's sequence in the batch; -1: padding */
    const int32_t *position_ids;     /* (rows) position in that sequence, for RoPE; 0 in padding */
    const int32_t *target_positions; /* (rows) position of the token to predict, even if that token is in the next
                                        chunk; -1: none, or ignored. With `shifted`: the row's own position */
    const double *loss_weights;      /* (rows) factor of the row's loss; 0 without a target. NULL: not wanted */
    /* Only if rows are shared; otherwise 0 and NULL. The last row before sequences diverge has one target per branch.
       The first is above, for the sequence in sequence_ids; the others are here, by rising row. Each target has its own
       loss, from the same logits. */
    int64_t n_calls, n_extra;
    const cf_attention_call *calls;  /* (n_calls) extra calls; 0: the call with cu_seqlens is enough */
    const double *extra_weights;     /* (n_extra) NULL: not wanted */
    const int32_t *extra_rows, *extra_sequences, *extra_targets; /* (n_extra) row, sequence, position of the token */
    int64_t n_loss_rows;
    const int32_t *loss_rows;        /* (n_loss_rows) rows that have a target whose weight is not 0. NULL: not wanted */
    const int32_t *key_ends;         /* (prefix + rows) for kernels that take a mask. Key j, counted from the start of
                                        the prefix, is seen by exactly the rows max(j - prefix, 0) .. key_ends[j] - 1.
                                        NULL: not wanted */
} cf_metadata;

/* cf_metadata_size returns how many bytes cf_metadata_fill needs for this chunk or, if chunk is -1, for any chunk of
   the plan. cf_metadata_fill puts the arrays into `memory` (aligned to CF_MEMORY_ALIGNMENT) and their addresses into
   *out: loss_weights first, then the others as listed above. Arrays for shared rows vary in size even with a capacity,
   so in such plans offsets from `calls` on vary. Everything is untouched on failure. The plan must be sound.

   Errors: CF_ERROR_ARGUMENT (chunk; capacity.rows, capacity.prefix or capacity.n_seqs if the chunk needs more; weights,
   with the sequence, if one is not finite), CF_ERROR_SPACE (memory, bytes), CF_ERROR_LIMIT if prefix + rows exceeds
   INT32_MAX, CF_ERROR_OVERFLOW. */
CHUNKFLOW_API cf_result cf_metadata_size(const cf_plan *plan, int64_t chunk, const cf_metadata_desc *desc,
                                         size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_metadata_fill(const cf_plan *plan, int64_t chunk, const cf_metadata_desc *desc, void *memory,
                                         size_t bytes, cf_metadata *out, cf_error *error);

/* Tokens, targets and weights of all chunks of a plan, chunk after chunk. The targets of a row are first_target[row] ..
   first_target[row + 1] - 1: none, one, or several where sequences diverge. Each target has its own loss, from the same
   logits. */
typedef struct cf_token_rows {
    int64_t n_rows, n_targets;
    const int64_t *first_row;    /* (n_chunks + 1) the first row of each chunk, and the end of the last */
    const int32_t *tokens;       /* (n_rows) -1: padding */
    const int32_t *first_target; /* (n_rows + 1) */
    const int32_t *targets;      /* (n_targets) the tokens to predict */
    const float *weights;        /* (n_targets) factors of their losses, rounded to float; cf_metadata.loss_weights has
                                    doubles. NULL without cf_metadata_desc.weights */
} cf_token_rows;

/* Look up tokens at the positions from cf_metadata_fill, for all chunks of a plan in one call. The size includes room
   for one chunk's metadata. tokens: those of each sequence of the plan, token_bytes each: 2 (unsigned) or 4. Everything
   except `memory` is untouched on failure. The plan must be sound.

   Errors: as cf_metadata_fill; CF_ERROR_ARGUMENT (token_bytes; "tokens", with the sequence whose tokens are NULL);
   CF_ERROR_LIMIT if there may be more than INT32_MAX targets. */
CHUNKFLOW_API cf_result cf_token_rows_size(const cf_plan *plan, const cf_metadata_desc *desc, size_t *bytes,
                                           cf_error *error);
CHUNKFLOW_API cf_result cf_token_rows_fill(const cf_plan *plan, const cf_metadata_desc *desc, const void *const *tokens,
                                           int64_t token_bytes, void *memory, size_t bytes, cf_token_rows *out,
                                           cf_error *error);

/* Rows of K and V that a chunk of a cp group sees before its own, and the rank whose state has them. */
typedef struct cf_kv_source {
    int64_t rank;
    int64_t chunk;  /* the chunk of that rank that makes the rows; they are in its chain's state */
    int64_t row;    /* their first row in that state */
    int64_t begin;  /* first row within the sequence */
    int64_t tokens; /* number of rows. Multiplied by a row's bytes, it is the traffic from rank to rank */
} cf_kv_source;

/* Lists the rows of K and V before this chunk in its cp group's sequence, by rising position, without gaps from the
   sequence's first row to the chunk's first slice. Rows of earlier rounds are already in states. The last entries are
   rows of the chunk's own round: lower ranks compute them during the same pass, layer by layer.

   In each layer of a forward the ranks of a round compute K and V of their rows, and each receives its sources' rows:
   all of them together, or one after another from its neighbour in a ring. Attention that merges blocks by their LSE
   takes them in any order. In a backward, gradients go back to the ranks that own the rows. A rank continues with its
   own rows once all higher ranks have sent their gradients.

   sources: room for all entries, or NULL to only count them. Returns their number; 0 for a chunk without a cp group.
   The plan must be sound. */
CHUNKFLOW_API int64_t cf_kv_sources(const cf_plan *plan, int64_t chunk, cf_kv_source *sources);

typedef enum cf_mean {
    CF_MEAN_DEFAULT = 0, /* CF_MEAN_TOKENS */
    CF_MEAN_TOKENS,      /* every target of the batch has the same weight */
    CF_MEAN_SEQUENCES,   /* every sequence with a target has the same weight, shared evenly by its targets */
    CF_MEAN_PROMPTS,     /* every prompt has the same weight, shared evenly by the targets of all its answers (the
                            groups of reinforcement learning) */
    CF_MEAN_COUNT
} cf_mean;

/* The mean over targets that forms the loss. Zero means default in every member; NULL is all zeros. */
typedef struct cf_loss_weights_desc {
    cf_mean mean;                        /* 0: over tokens */
    const unsigned char *const *ignored; /* as in cf_metadata_desc */
    int shifted;                         /* as in cf_metadata_desc */
    const int64_t *prompts;              /* (n) the prompt of each sequence, 0 .. n - 1; only for CF_MEAN_PROMPTS */
    const cf_allocator *allocator;       /* for n counts, freed at the end */
} cf_loss_weights_desc;

/* Finds for each sequence the weight of its targets. The sum of all weighted losses is then the wanted mean. Add up
   losses and gradients over chunks and ranks, and let nothing divide them (DDP would). Chunks and ranks have different
   numbers of targets, so a mean over one of them would be another loss.

   lengths: all n lengths of the batch, as given to cf_pack, for all ranks. Every token except a sequence's first is a
   target, unless it is ignored; with `shifted`, every token is. Without any target, all weights are 0.

   Errors: CF_ERROR_ARGUMENT ("lengths", "prompts": with the sequence), CF_ERROR_LIMIT, CF_ERROR_OVERFLOW,
   CF_ERROR_MEMORY. The weights are untouched on failure. */
CHUNKFLOW_API cf_result cf_loss_weights(const int64_t *lengths, int64_t n, const cf_loss_weights_desc *desc,
                                        double *weights, cf_error *error);

/* ================================================================================================================
   >>model    models as data, and the part of a model on one GPU
   ================================================================================================================ */

#define CF_MAX_LAYERS 65536
#define CF_MAX_WIDTH ((int64_t)1 << 24) /* of hidden, and of heads x head_dim */
#define CF_MAX_FFN ((int64_t)1 << 26)
#define CF_MAX_VOCAB ((int64_t)1 << 28)

#define CF_MAX_EXPERTS 65536 /* per layer; a token goes to at most CF_MAX_ACTIVE of them */
#define CF_MAX_ACTIVE 1024
#define CF_MAX_KINDS 26
#define CF_MIN_OUTPUT_WINDOW 2048 /* rows: attention in a smaller window costs too little for its outputs to be worth
                                     keeping */

/* The part of a layer that mixes tokens, with the state that each hands on from chunk to chunk. */
typedef enum cf_mixer {
    CF_MIXER_FULL = 0, /* causal attention. State: K and V of all rows */
    CF_MIXER_WINDOW,   /* attention to the last `window` rows, a row's own included. State: K and V of window - 1
                          rows */
    CF_MIXER_CHUNKED,  /* attention to the rows since the last multiple of `window` (Llama 4). State: their K and V */
    CF_MIXER_LATENT,   /* multi-head latent attention (DeepSeek-V2, 2024). State: latents of all rows */
    CF_MIXER_DELTA,    /* gated delta rule (Yang et al., 2024). State: at each border between chunks a snapshot, and the
                          last tail - 1 rows of the convolution */
    CF_MIXER_KDA,      /* delta rule with one gate per channel (Kimi Linear, 2025). State: like CF_MIXER_DELTA */
    CF_MIXER_MAMBA2,   /* Mamba-2 (Dao and Gu, 2024): head_dim is its state size, kv_heads its groups. State: like
                          CF_MIXER_DELTA */
    CF_MIXER_NONE,     /* no mixer and no state: a layer with only a feed-forward part (Nemotron-H) */
    CF_MIXER_COUNT
} cf_mixer;

/* One kind of layer. Zero means the model's own number; if the model has none, the layer lacks that part. */
typedef struct cf_layer {
    cf_mixer mixer;
    int gate;          /* 1: attention's output is multiplied by a gate of as many columns as Q. Only full, window or
                          chunked layers */
    int sinks;         /* 1: softmax has one extra learned logit per head (attention sink). Only full, window or
                          chunked */
    int no_ffn;        /* 1: the layer has neither MLP nor experts */
    int64_t heads, kv_heads; /* query and key heads; in a recurrent layer heads of values and of keys */
    int64_t head_dim;  /* of Q and K; in a latent layer rope_dim included */
    int64_t value_dim; /* of V; 0: head_dim */
    int64_t window;
    int64_t latent, q_latent; /* widths of compressed K and V, and of compressed Q (0: Q is not compressed) */
    int64_t rope_dim;  /* latent layer: width of the part of K that all heads share */
    int64_t tail;      /* recurrent layer: rows that its convolution sees, a row's own included */
    /* number of experts from which a token chooses (DeepSeek-V3: those in half of the groups); 0: all */
    int64_t reach;
    int64_t ffn;       /* width of the MLP, or of one routed expert */
    int64_t experts, active; /* routed experts, and how many of them process each token. No token is dropped */
    int64_t shared;    /* width of all shared experts together, which process every token. Needs experts */
    int64_t shared_gate; /* 1: one number per token scales the output of the shared experts. Needs shared */
} cf_layer;

/* A decoder: RMSNorm, a mixer, a gated MLP or experts. Without kinds all layers have grouped-query attention and an
   MLP. */
typedef struct cf_model {
    const char *name;
    int64_t layers;
    int64_t hidden;
    int64_t heads;    /* query heads */
    int64_t kv_heads; /* key and value heads; must divide heads */
    int64_t head_dim; /* 0: hidden / heads. Else heads x head_dim need not equal hidden (as in Qwen3) */
    int64_t ffn;      /* width of the MLP */
    int64_t vocab;
    int tied;         /* 1: the output head is the embedding */
    int qkv_bias;     /* 1: biases on the Q, K and V projections */
    int out_bias;     /* 1: a bias on the attention output projection */
    int mlp_bias;     /* 1: biases in the MLP */
    int qk_norm;      /* 1: an RMSNorm over each head of Q and K; 2: one over all of Q, and one over all of K */
    int no_gate;      /* 1: two MLP matrices; 0: three (SwiGLU) */
    const cf_layer *kinds; /* NULL: all layers are alike, with the numbers above */
    int64_t n_kinds;
    const char *pattern;   /* "aaab": the kinds of layers 0, 1, ..., repeated; a is kinds[0]. NULL: "a" */
    int64_t first_dense;   /* number of first layers with an MLP of width `ffn` instead of experts. Needs experts */
    int64_t mtp;           /* extra layers that predict tokens further ahead (DeepSeek-V3, 2024). Each has the last
                              layer's kind, and adds a projection of two rows to one, three norms, and a head and
                              loss */
    int64_t norms;         /* norms per layer, not counting those of heads; 0: one before the mixer, one before the
                              MLP */
} cf_model;

/* Checks a model. Errors: CF_ERROR_ARGUMENT or CF_ERROR_LIMIT with the member ("model.kv_heads") and, in `wanted`, the
   nearest valid value. */
CHUNKFLOW_API cf_result cf_model_validate(const cf_model *model, cf_error *error);

/* Numbers of parameters. */
typedef struct cf_parameters {
    int64_t embedding;
    int64_t attention; /* projections and their biases */
    int64_t mlp;       /* with biases, experts, routers, and projections of prediction layers */
    int64_t norms;
    int64_t head;      /* 0 if it is tied to an embedding in the same place */
    int64_t total;     /* sum of the five above */
    int64_t experts;   /* routed experts; a part of mlp */
    int64_t active;    /* total minus the experts that a token does not use; some publishers also leave out the
                          embedding */
} cf_parameters;

/* Counts the parameters of the whole model, exactly. */
CHUNKFLOW_API cf_result cf_model_parameters(const cf_model *model, cf_parameters *out, cf_error *error);

/* ---- splitting a model over GPUs ---- */

/* Activations that a trainer drops in each forward and recomputes in backward. (The schedule decides separately which
   whole chunks are dropped.) */
#define CF_RECOMPUTES(X)                                                                                          \
    X(CF_RECOMPUTE_DEFAULT, "?")           /* CF_RECOMPUTE_NONE */                                                \
    X(CF_RECOMPUTE_NONE, "none")                                                                                  \
    X(CF_RECOMPUTE_SELECTIVE, "selective") /* the inside of attention (Megatron's core_attn): scores, or with     \
                                              fused attention its row statistics, which saves almost nothing */   \
    X(CF_RECOMPUTE_LAYERNORM, "layernorm") /* the outputs of both norms (Megatron's layernorm) */                 \
    X(CF_RECOMPUTE_ACT, "act")             /* layernorm, and the product of gate and up (moe_act of a dense MLP) */ \
    X(CF_RECOMPUTE_MLP, "mlp")             /* act, and gate and up (Megatron's mlp) */                            \
    X(CF_RECOMPUTE_FULL, "full")           /* whole layers; each keeps only its input */

CF_ENUM_OF(cf_recompute, CF_RECOMPUTES, CF_RECOMPUTE_COUNT);
CHUNKFLOW_API const char *cf_recompute_name(cf_recompute recompute);

/* Placements of virtual stages on stages. */
#define CF_PLACEMENTS(X)                                                                                          \
    X(CF_PLACEMENT_DEFAULT, "?")   /* CF_PLACEMENT_LOOP */                                                        \
    X(CF_PLACEMENT_LOOP, "loop")   /* virtual stage v is on stage v mod n_stages */                               \
    X(CF_PLACEMENT_V, "v")         /* there and back again: 0 .. n_stages - 1, n_stages - 1 .. 0, and so on (Qi et   \
                                      al., Pipeline Parallelism with Controllable Memory, 2024) */

CF_ENUM_OF(cf_placement, CF_PLACEMENTS, CF_PLACEMENT_COUNT);
CHUNKFLOW_API const char *cf_placement_name(cf_placement placement);

/* Returns the stage of virtual stage v; both count from 0. Every placement except CF_PLACEMENT_V is a loop. Returns -1
   if n_stages is below 1 or v below 0. */
CHUNKFLOW_API int64_t cf_placement_stage(cf_placement placement, int64_t n_stages, int64_t v);

/* Returns the virtual stage that a stage has in one row: the inverse of cf_placement_stage. A row is n_stages
   consecutive virtual stages; row 0 begins with virtual stage 0. Returns -1 if a number is out of range. */
CHUNKFLOW_API int64_t cf_placement_at(cf_placement placement, int64_t n_stages, int64_t row, int64_t stage);

/* The split of a model over GPUs. Zero means default in every member. */
typedef struct cf_parallel {
    int64_t tp;              /* tensor parallelism; 0: 1. Must divide heads and ffn. Must divide kv_heads, or be a
                                multiple of it, in which case K and V heads are replicated */
    int64_t pp;              /* pipeline stages; 0: 1 */
    int64_t n_virtual;       /* virtual stages per stage; 0: 1 */
    cf_placement placement;  /* of virtual stages on stages; 0: loop. A V needs n_virtual above 1 */
    int64_t dp;              /* data-parallel ranks; 0: 1 */
    int64_t zero;            /* ZeRO level over the dp ranks: 0 none, 1 optimizer states (Megatron's distributed
                                optimizer), 2 also gradients, 3 also parameters */
    int no_sequence;         /* 0: sequence parallelism: norms and residuals, which tensor parallelism does not divide,
                                are divided over tp by tokens. 1: they are not */
    cf_recompute recompute;  /* 0: none */
    int64_t recompute_layers; /* number of layers per virtual stage that recompute anything; 0: all. Needs recompute */
    const int64_t *layers;   /* (pp x n_virtual) layers of each virtual stage. NULL: even. A remainder is given, one
                                layer each, to virtual stages 1, 2, ..., then 0, but not to the last one, which has the
                                output head */
    int64_t vocab_multiple;  /* vocab is padded to a multiple of this x tp (Megatron: 128); 0: 1 */
    int64_t ep;              /* expert parallelism: the routed experts of a layer are divided over ep of the tp x dp
                                GPUs of a stage. Each GPU has whole experts, and receives the rows for them. 0: 1, and
                                each GPU has a tp-th of every expert's width. Must divide tp x dp and the experts of
                                each kind. Above 1, the model must have experts */
    int64_t imbalance;       /* percent by which the experts of the fullest GPU get more rows than the mean; 0: none. A
                                price: allowed without ep */
} cf_parallel;

CHUNKFLOW_API cf_parallel cf_parallel_defaults(const cf_parallel *parallel);

/* Checks a split of a model. Errors name the member ("parallel.tp") and give the nearest valid value. */
CHUNKFLOW_API cf_result cf_parallel_validate(const cf_model *model, const cf_parallel *parallel, cf_error *error);

/* Counts the parameters that one GPU of a virtual stage holds, before ZeRO divides them. A tied head on another stage
   than the embedding is a copy, and counts as head. Replicated norms, biases and K and V heads count on each GPU that
   has them. Errors: those of cf_parallel_validate, and "stage". */
CHUNKFLOW_API cf_result cf_stage_parameters(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                            cf_parameters *out, cf_error *error);

/* The widths of the matrices on one GPU of a virtual stage. Time and memory are computed from them. */
typedef struct cf_shard {
    int64_t layers;
    int64_t hidden;
    int64_t heads;        /* query heads on this GPU */
    int64_t q;            /* heads x head_dim */
    int64_t kv;           /* K (or V) heads on this GPU x head_dim, replicas included */
    int64_t ffn;
    int64_t vocab;        /* rows of the embedding and of the head, padding included */
    int64_t sequence;     /* number of GPUs that divide the rows of norms and residuals */
    int64_t mlp_matrices; /* 3, or 2 without a gate */
    int first, last;      /* 1 if the virtual stage has the embedding; 1 if it has the output head */
    /* All members from here on describe one layer of a kind; ffn above is then the width of MLP or shared experts. */
    cf_mixer mixer;
    int64_t out;          /* heads x value_dim */
    int64_t value;        /* V heads x value_dim. In a latent layer kv and value are the widths during attention */
    int64_t elements;     /* elements per row that the mixer keeps for backward: inputs, Q, K, V, output, gates */
    int64_t window;
    int64_t state_row;    /* elements that a row adds to the state */
    /* latent layer: weights that expand a row of state to K and V, in every pass that reads the row */
    int64_t expand;
    int64_t window_row;   /* elements that a row adds to the state of a windowed or chunked layer, until the row leaves
                             it */
    int64_t snapshot;     /* elements of a recurrent layer's state (float), for any number of rows */
    int64_t effect;       /* elements (float) of the map that rows apply to that state: a d_k x d_k matrix per head, or
                             one number in Mamba-2. Ranks of a cp group exchange them */
    int64_t tail_row;     /* columns of a recurrent layer's convolution */
    int64_t tail;         /* rows of that convolution that are handed on */
    int64_t mixer_weights, mixer_vectors; /* parameters in matrices; in biases and the like */
    int64_t mlp_weights, mlp_vectors;     /* the same of MLP, shared experts and router */
    int64_t experts, active, expert_ffn, expert_size; /* routed experts: number on this GPU, number that a token uses,
                                                         width of one on this GPU, and its parameters */
    int64_t reach;        /* experts of a layer, on all GPUs, from which a token may choose */
    int64_t expert_share; /* number of GPUs that divide the rows before these go to experts */
    int64_t norms;        /* parameters */
    int outputs;          /* 1: the layer may keep attention's outputs for a replay (cf_memory_desc.outputs): full and
                             latent attention, and windows of at least CF_MIN_OUTPUT_WINDOW rows */
} cf_shard;

/* Finds the widths of one kind of layer. Kinds count from 0; the stage may have no layer of that kind. A model without
   `kinds` has one kind. With first_dense its kinds are numbered twice: as they are, then with an MLP instead of
   experts. Prediction layers belong to the last virtual stage. Kind -1 adds up all layers of the stage; members that
   differ between kinds are then those of kind 0.

   Errors: those of cf_stage_parameters; CF_ERROR_ARGUMENT for a kind past the last one. *out is untouched on
   failure. */
CHUNKFLOW_API cf_result cf_stage_shard(const cf_model *model, const cf_parallel *parallel, int64_t stage, int64_t kind,
                                       cf_shard *out, cf_error *error);

/* ================================================================================================================
   >>memory    bytes of a stage
   ================================================================================================================ */

/* Ways to compute the loss: the bytes per logit that each keeps for backward, and its bytes per logit at the peak. */
typedef enum cf_loss {
    CF_LOSS_DEFAULT = 0, /* CF_LOSS_CHUNKED */
    CF_LOSS_PARALLEL,    /* vocabulary-parallel, as in Megatron-LM: bf16 logits, a float copy, and a float softmax,
                            which is kept. Keeps 4, peak 10 */
    CF_LOSS_EAGER,       /* separate operations, as in plain PyTorch: a float log-softmax is kept; backward makes two
                            float gradients in addition to it and the bf16 logits. Keeps 4, peak 14 */
    CF_LOSS_FUSED,       /* one kernel that turns the bf16 logits into their gradient in place. Keeps 2, peak 2 */
    CF_LOSS_CHUNKED,     /* head and loss together, a few rows at a time, so that whole logits never exist. Keeps only
                            the gradient of the head's input (2 bytes x hidden) */
    CF_LOSS_COUNT
} cf_loss;

#define CF_RUNTIME_BYTES ((int64_t)2 << 30) /* context, loaded kernels, buffers of libraries and of NCCL */
#define CF_FRAGMENTATION 10                 /* percent */
#define CF_STATE_SLOTS 3                    /* default number of blocks in a ring of streamed state: one in use by
                                               attention, one being loaded, one being sent out */
#define CF_BORDER_TOKENS 4096

/* Parts stored in host memory: cf_memory_desc.offload is a sum of these. */
#define CF_OFFLOAD_CHECKPOINTS 1 /* the inputs that layers with full recomputation keep, as in TRL's and Axolotl's
                                    long-context recipes. Needs full recomputation */
#define CF_OFFLOAD_OPTIMIZER 2   /* optimizer states and, with ZeRO 2 and 3, gradients except those of two layers */
#define CF_OFFLOAD_PARAMETERS 4  /* the rank's own parameters; two gathered layers stay. Needs ZeRO 3 */
#define CF_OFFLOAD_ALL 7

/* A training run whose memory is estimated. Zero means default in every member; model must be given. */
typedef struct cf_memory_desc {
    const cf_model *model;
    cf_parallel parallel;
    cf_loss loss;                 /* 0: chunked */
    int unfused;                  /* 1: norms and SwiGLU are separate operations, each of which keeps its results: float
                                     copies of the norms' inputs, normalised rows, the activated gate */
    int unfused_attention;        /* 1: attention writes out its scores; also set cf_memory_load.live_scores */
    int64_t activation_bytes;     /* per element of activations, boundaries and logits; 0: 2 (bf16) */
    int64_t parameter_bytes;      /* per parameter; 0: 2 (bf16) */
    int64_t gradient_bytes;       /* per parameter; 0: 4 (float) */
    int64_t optimizer_bytes;      /* per parameter; 0: 12 (float master copy, two float Adam moments). With two 8-bit
                                     moments: 6 */
    int64_t matrix_bytes;         /* optimizer bytes per parameter of attention and MLP, biases included; 0:
                                     optimizer_bytes. Muon keeps one moment for these: 8 */
    int64_t lora_rank;            /* rank of LoRA adapters on each matrix of attention, MLP and shared experts. Only
                                     adapters then have gradients and optimizer states. 0: all parameters are trained */
    int64_t lora_experts;         /* 1: adapters on each routed expert's matrices as well. Needs lora_rank and
                                     experts */
    int64_t state_bytes;          /* per element of K and V in the state; 0: 2 */
    int64_t state_gradient_bytes; /* per element of dK and dV in the state; 0: 4 (float accumulators); 2 for bf16 */
    int64_t runtime_bytes;        /* bytes that no formula here covers: measure an idle process of your own. 0:
                                     CF_RUNTIME_BYTES */
    int64_t fragmentation;        /* percent of activations, logits, working memory, state and inputs that the allocator
                                     loses in gaps. 0: CF_FRAGMENTATION; -1: none (one arena, divided once) */
    int64_t state_window;         /* rows of a ring on the device, through which passes stream a state from host memory,
                                     layer by layer and block by block (CF_STATE_SLOTS blocks by default). The ring has
                                     K and V of one layer, and their gradients. Kept stage inputs are then in host
                                     memory as well. 0: the whole state stays on the device */
    int64_t gathered;             /* rows of the longest sequence of a cp group; 0: no cp group. Buffers then hold, for
                                     one layer, K and V of all these rows, their gradients, and the scan of a recurrent
                                     layer. A load's state_tokens count only the rank's own rows */
    int64_t chunk_size;           /* for models with windows or recurrent layers: one border is counted per chunk_size
                                     tokens of state. 0: CF_BORDER_TOKENS */
    int outputs;                  /* 1: a dropped chunk keeps attention's outputs and log-sum-exps in addition to its
                                     stage input, so that its replay computes no attention (not in the paper). 2: the
                                     same, with both in host memory, wherever the state is. Needs local replay. Not with
                                     full recomputation or unfused attention */
    int offload;                  /* sum of CF_OFFLOAD_CHECKPOINTS and so on; 0: everything is on the device */
} cf_memory_desc;

CHUNKFLOW_API cf_memory_desc cf_memory_defaults(const cf_memory_desc *desc);

/* Bytes on one GPU of a virtual stage. Each member is in bytes per token of the thing in its comment. */
typedef struct cf_token_bytes {
    int64_t activations;    /* a chunk with kept activations; without checkpoints */
    int64_t checkpoints;    /* the same chunk in host memory, with CF_OFFLOAD_CHECKPOINTS; else 0 */
    int64_t state;          /* state: K and V of this stage's layers (0 with a state_window), routes, and `border` /
                               chunk_size, rounded up */
    int64_t state_gradient; /* state with gradients (0 with a state_window) */
    int64_t boundary;       /* a tensor passed from stage to stage */
    int64_t dropped;        /* a chunk dropped in local replay: its stage input, which is one `boundary`, and its
                               outputs if it keeps any. Until its replay begins or, with cf_shape.outputs, until its
                               replay ends */
    int64_t staged;         /* the largest chunk, doubled, if dropped chunks are in host memory: a stage input, and the
                               outputs of one layer, because outputs are moved layer by layer */
    /* the chunk at its loss, beyond the bytes that the loss keeps (last virtual stage; 0 elsewhere) */
    int64_t logits;
    int64_t working;        /* the chunk in backward: gradients of one layer's activations, and that layer's recomputed
                               activations; with a state_window, also attention's sums over blocks */
    int64_t buffers;        /* the chunk in any pass: gathered rows of tensor parallelism, sends and receives; if
                               checkpoints are in host memory, two of them, one in use and one being moved */
    int64_t routes;         /* part of `state`: in each layer two bytes for each expert that the token uses, so that its
                               replay uses the same experts */
    /* Not per token: */
    int64_t border;         /* bytes of a border between two chunks of a chain: the last rows of windowed layers; and
                               for a recurrent layer its state there (float) and the last rows of its convolution */
    int64_t carry;          /* bytes of the gradients of one border, which a chain holds during backward */
} cf_token_bytes;

/* Activations, in bytes per layer and token, with two bytes per element. h = hidden, q = heads x head_dim / tp, kv = K
   heads on this GPU x head_dim, f = ffn / tp; s = tp with sequence parallelism, else 1:

       8 h / s            inputs of both norms, and of the projections after them
       4 q                Q, attention output
       4 kv               K, V (also if they are in the state)
       4 heads / tp       float row statistics of attention (not with selective recompute)
       6 f                gate, up, product (4 f without gate)
       unfused            8 h / s extra (each norm: float input instead of bf16, and normalised rows), 2 f extra
                          (activated gate)
       unfused attention  2 heads / tp per score, instead of the row statistics (nothing with selective recompute)

   With recomputation, layers keep

       layernorm          4 h / s less, and no unfused parts of norms
       act                another 2 f less, and no activated gate
       mlp                as layernorm, and no f at all
       full               only 2 h / s, counted as `checkpoints` if those lie in host memory

   recompute_layers counts layers of the first kinds first. The first stage also has 8 (token ids); the last stage has 4
   h / s (final norm) and what the loss keeps.

   This is Korthikanti et al., Reducing Activation Recomputation (2022), Table 2, without dropout masks, with grouped
   heads and a gate. Kinds of layers differ from it:

       heads            q and kv of the kind's own heads
       output gate      2 q + 2 out extra
       latent layer     its latents, and K and V of each head
       recurrent layer  4 per column of its convolution (its rows before and after), 6 out (three rows of values), 128
                        per head (a block of 64; not mamba2), as in fla's source; not measured
       experts          per active expert a copy of the row (2 h) and 6 f of the expert's width, with ep `imbalance`
                        percent more; 8 per expert of the layer (logits and probabilities of the router, float). All of
                        these are gone with mlp. The buffers of a pass have 4 h per active expert, sent and received
   */

/* Other bytes. Outputs of a dropped chunk: 2 heads x value_dim + 4 heads per layer whose shard has `outputs`. In a
   latent layer, value_dim is that of each head's expanded V. A trainer that attends in latent space, like the examples,
   keeps heads x (latent + rotated) numbers a row instead of heads x value_dim.

   A border of a windowed layer has min(chunk_size, window - 1) rows of K and V. A border of chunked attention has
   min(chunk_size, window) rows, or none if window divides chunk_size.

   With a state_window, attention reads its prefix one block of keys at a time. `working` then also has 4 q + 8 heads /
   tp: a layer's sums of dQ in fp32 and two numbers per row of a head, which carry over from block to block. The kernels
   of chunkflow_cuda.cu need the same, or more if they split tiles to keep a GPU busy. */

/* Finds bytes per token, by the formulas above. Errors: those of cf_memory_estimate. */
CHUNKFLOW_API cf_result cf_memory_token_bytes(const cf_memory_desc *desc, int64_t stage, cf_token_bytes *out,
                                              cf_error *error);

/* Tokens that one virtual stage holds at one moment: peaks of a simulated timeline, or your own counts. None is
   negative. */
typedef struct cf_memory_load {
    int64_t live_tokens;           /* padded tokens of all chunks whose activations are kept */
    int64_t chunk_tokens;          /* padded tokens of the largest chunk that may be in a pass */
    int64_t state_tokens;          /* tokens whose K and V are in device memory, or in host memory and streamed
                                      (state_window) */
    int64_t state_gradient_tokens; /* tokens whose dK and dV are held in the same memory */
    int64_t carries;               /* chains with such tokens, each of which has a carry (cf_token_bytes.carry). 0 with
                                      such tokens: 1 */
    int64_t input_tokens;          /* padded tokens of dropped chunks, whose stage inputs (local replay) and outputs are
                                      kept */
    int64_t live_scores;           /* unfused attention: sum over live chunks of tokens x (prefix + tokens) */
    int64_t chunk_scores;          /* unfused attention: tokens x (prefix + tokens) of the largest chunk in a pass */
} cf_memory_load;

/* The parts of a stage's memory, in bytes on one GPU. */
#define CF_MEMORY_TERMS(X)                                                                   \
    X(parameters, "parameters")                                                              \
    X(gradients, "gradients")                                                                \
    X(optimizer, "optimizer states")                                                         \
    X(activations, "activations")                                                            \
    X(logits, "logits and loss")                                                             \
    X(working, "backward of one layer")                                                      \
    X(state, "state (K, V)")                                                                 \
    X(state_gradient, "state gradient")                                                      \
    X(inputs, "kept inputs, outputs")                                                        \
    X(buffers, "communication buffers")                                                      \
    X(runtime, "runtime, fragmentation")

typedef struct cf_memory_report {
#define CF_MEMBER_ITEM(name, text) int64_t name;
    CF_MEMORY_TERMS(CF_MEMBER_ITEM)
#undef CF_MEMBER_ITEM
    int64_t total;    /* sum of all above */
    int64_t host;     /* in host memory; not part of total. With a state_window: state, its gradient, kept inputs and
                         outputs. Also the parts named by `offload` */
    int at_loss;      /* 1: the peak is at the loss, when logits exist and `working` is 0; 0: it is in a layer's
                         backward, when `logits` is 0 */
} cf_memory_report;

/* Estimates the memory of every stage. loads: one per virtual stage; n_loads is pp x n_virtual. reports: one per stage,
   the sum over its virtual stages; n_reports is pp. Reports are untouched on failure. Errors: those of
   cf_model_validate and cf_parallel_validate, CF_ERROR_ARGUMENT with the member, or CF_ERROR_OVERFLOW.

   Parameters, gradients and optimizer states are bytes x cf_stage_parameters, divided over dp according to
   parallel.zero (rounded up). ZeRO divides routed experts over tp x dp / ep GPUs with ep, and over dp without. With
   ZeRO 3 the buffers hold two gathered layers.

   With a state_window, a stage that has any state on any of its virtual stages has

       state           state_window x 2 kv x state_bytes, one ring for all virtual stages
       state gradient  state_window x 2 kv x state_gradient_bytes, likewise
       inputs          kept inputs and outputs, but no more than two chunks of the largest size hold (chunk_tokens x
                       cf_token_bytes.staged each): one in use, one on its way
       host            state, state gradient, kept inputs and outputs of all its virtual stages, as without a window

   With desc->outputs 2, inputs and their share of host are counted in the same way without a window. With offload, host
   also has the offloaded parts. Some state does not stream: borders (cf_token_bytes.border) stay on the device, and so
   does a carry (cf_token_bytes.carry) for each chain with gradients of state. */
CHUNKFLOW_API cf_result cf_memory_estimate(const cf_memory_desc *desc, const cf_memory_load *loads, int64_t n_loads,
                                           cf_memory_report *reports, int64_t n_reports, cf_error *error);

/* ================================================================================================================
   >>pipeline    passes, their dependencies and their costs
   ================================================================================================================ */

/* The passes. SEND_F and those after it are only in lowered schedules. */
#define CF_PASSES(X)                                                                                              \
    X(CF_F, "F")                /* forward */                                                                     \
    X(CF_R, "R")                /* replay: the forward again, because its activations were dropped */             \
    X(CF_B, "B")                /* backward, whole */                                                             \
    X(CF_I, "I")                /* backward, gradient of the inputs only */                                       \
    X(CF_W, "W")                /* backward, gradient of the weights only */                                      \
    X(CF_SEND_F, "SEND_F")      /* boundary activations of F to the next virtual stage */                         \
    X(CF_RECV_F, "RECV_F")      /* the tensor of SEND_F, from the previous virtual stage */                       \
    X(CF_SEND_R, "SEND_R")      /* boundary activations of R (pipeline replay) to the next virtual stage */       \
    X(CF_RECV_R, "RECV_R")                                                                                        \
    X(CF_SEND_B, "SEND_B")      /* gradient of the boundary activations (of B or I) to the previous stage */      \
    X(CF_RECV_B, "RECV_B")      /* the tensor of SEND_B, from the next virtual stage */

CF_ENUM_OF(cf_pass, CF_PASSES, CF_PASS_COUNT);

#define CF_COMPUTE_PASS_COUNT 5 /* F .. W */

CHUNKFLOW_API const char *cf_pass_name(cf_pass pass);

/* Ways to replay a dropped forward. */
#define CF_REPLAYS(X)                                                                                             \
    X(CF_REPLAY_DEFAULT, "?")          /* CF_REPLAY_LOCAL */                                                      \
    X(CF_REPLAY_PIPELINE, "pipeline")  /* through all stages again, as in the paper; only for `paper` */          \
    X(CF_REPLAY_LOCAL, "local")        /* each stage keeps its input and replays alone (not in the paper) */

CF_ENUM_OF(cf_replay, CF_REPLAYS, CF_REPLAY_COUNT);
CHUNKFLOW_API const char *cf_replay_name(cf_replay replay);

/* The shape of a pipeline, in options and in a schedule or graph. In options, zero means default in every member. */
typedef struct cf_shape {
    int64_t n_stages;       /* 0: 1 */
    int64_t n_virtual;      /* virtual stages per stage. 0: 1, and 2 for interleaved schedules */
    cf_placement placement; /* of virtual stages on stages. 0: loop. In options, a V needs n_virtual above 1 */
    cf_replay replay;       /* 0: local */
    int64_t k;              /* maximum chunks of one chain that keep activations at once on a virtual stage. 0: 1 */
    int64_t rank;           /* the rank of the plan whose chunks run */
    int forward_only;       /* 1: each chunk has only its F, which keeps nothing (for old and reference
                               log-probabilities, or evaluation). A chain's state is freed after the last F that reads
                               it */
    int outputs;            /* 1: an R takes attention's outputs from its F and computes no attention, so it streams and
                               gathers nothing (cf_memory_desc.outputs; not in the paper). Outputs and stage input of a
                               dropped chunk are kept until the end of its R. Only with local replay */
} cf_shape;

/* Bytes that a stage holds, per token of the thing in each member's comment. All zero: bytes are not counted. */
typedef struct cf_held_bytes {
    int64_t activations;    /* a chunk with kept activations, padding included */
    int64_t state;          /* a chain: its K and V, from the start of the token's F to the end of its B (or I) */
    int64_t state_gradient; /* a chain: its dK and dV, from the start of the chain's first backward (if other chains
                               continue it, from the start of their first F) to the end of the token's B (or I) */
    int64_t boundary;       /* a chunk whose activations local replay drops: its saved input, and its outputs if it
                               keeps any (cf_token_bytes.dropped). From the start of its F to the start of its R or,
                               with cf_shape.outputs, to the end of its R */
} cf_held_bytes;

#define CF_NO_LIMIT (-1) /* no limit: it replaces a default limit or a schedule's */

/* The maximum that a stage may hold at one time. In every member and array entry, 0 means "not given" and CF_NO_LIMIT
   means "none". Functions that take limits document their defaults. An array entry that is given overrides the member
   for all stages. */
typedef struct cf_limits {
    int64_t chunks;     /* chunks whose activations a stage keeps, on all of its virtual stages together */
    int64_t state;      /* tokens whose K and V are held, on each virtual stage of a stage */
    int64_t bytes;      /* all bytes that a stage holds */
    const int64_t *chunks_by_stage, *state_by_stage, *bytes_by_stage; /* (n_stages) one limit per stage, or NULL */
    cf_held_bytes per_token; /* the bytes that `bytes` counts; must be given with it */
} cf_limits;

/* The reasons why a pass waits for another pass. */
#define CF_EDGES(X)                                                                                               \
    X(CF_EDGE_ACTIVATION, "activation")          /* F or R on the previous virtual stage: its output is the input */ \
    X(CF_EDGE_GRADIENT, "gradient")              /* B or I on the next virtual stage: its gradient */             \
    X(CF_EDGE_STATE, "state")                    /* F of the previous chunk in the chain or, for the first child    \
                                                    of another chunk, of that chunk: its K and V */               \
    X(CF_EDGE_STATE_GRADIENT, "state gradient")  /* B or I of the next chunk in the chain, or of the first chunk    \
                                                    of the last child: its part of dK and dV */                   \
    X(CF_EDGE_REPLAY, "replay")                  /* R: its own F, which kept nothing */                           \
    X(CF_EDGE_OWN, "own")                        /* B or I: its own F or R with the activations; W: its own I */  \
    X(CF_EDGE_SLOT, "slot")                      /* R: B or W of a later chunk of the chain, which freed the slot   \
                                                    that R takes */                                               \
    X(CF_EDGE_ORDER, "order")                    /* the same pass of the previous sibling in a tree: siblings take  \
                                                    turns */

CF_ENUM_OF(cf_edge_why, CF_EDGES, CF_EDGE_COUNT);
CHUNKFLOW_API const char *cf_edge_name(cf_edge_why why);

/* The costs of the passes of one virtual stage. All zero: unit costs as in the paper's figures, where F = R = rows, B =
   2 x rows, I = W = rows, and a chunk's rows include padding. Otherwise a member that is all zero is derived: R = F
   (without its pairs, if cf_shape.outputs), B = I + W or 2 x F, I = W = B / 2. */
typedef struct cf_stage_cost {
    cf_pass_cost forward, replay, backward, input, weight;
} cf_stage_cost;

/* The costs of a pipeline. Zero means default in every member: unit costs, and transfers that take no time. Passes and
   transfers between stages take time for all rows of a chunk, padding included. Transfers run beside compute, and a
   stage has one queue for each of its two directions. */
typedef struct cf_timing {
    cf_stage_cost all;            /* every virtual stage */
    const cf_stage_cost *stages;  /* (n_stages x n_virtual), by virtual stage, instead of `all`; NULL: all alike */
    double latency;               /* seconds per transfer between stages */
    double seconds_per_token;     /* extra seconds per row of boundary activations or their gradient (bytes /
                                     bandwidth) */
    double stream_forward;        /* seconds per token of the prefix in F and R, over all layers of a virtual stage, to
                                     stream a state from host memory (cf_memory_desc.state_window). 0: no stream */
    double stream_backward;       /* the same in B and I, which also stream gradients in and out */
    double stream_exposed;        /* the share of the stream's time that no compute hides, 0 .. 1: the first layer's. A
                                     pass takes this share, plus the larger of its compute and the rest of its stream.
                                     Needs a stream or a gather */
    double gather_forward;        /* cp groups: seconds in F and R per row that another rank has before the chunk
                                     (cf_kv_sources). The same share is exposed, and the rest is hidden by the pass and
                                     its stream. The ranks of a group run every pass except W together, so each waits
                                     for the slowest */
    double gather_backward;       /* the same in B and I */
    double scan_forward;          /* cp groups with recurrent layers: extra seconds of F of a group's chunk, for the
                                     scan that finds the state from which each rank begins. It hides nothing, and
                                     nothing hides it. R reuses the states from F */
    double scan_backward;         /* the same in B and I */
} cf_timing;

/* ================================================================================================================
   >>schedule    plan -> order of passes
   ================================================================================================================ */

#define CF_MAX_STAGES 65536                    /* virtual stages of a pipeline */
#define CF_MAX_ACTIONS ((int64_t)1 << 27)      /* actions of a schedule: 1.5 GiB */

/* The kinds of schedule. */
#define CF_SCHEDULE_KINDS(X)                                                                                          \
    X(CF_SCHEDULE_DEFAULT, "?")               /* CF_SCHEDULE_BEST */                                                  \
    X(CF_SCHEDULE_PAPER, "paper")             /* State-aware 1F1B: the shorter of two orders. In both, a stage        \
                                                 runs ahead of the last one by its distance from it, and other        \
                                                 work fills the wait for a replay. In one, the last stage takes       \
                                                 forwards until its next backward can run. In the other, it stays a   \
                                                 constant number of forwards ahead: as many as any backward needs. */ \
    X(CF_SCHEDULE_GPIPE, "gpipe")             /* all forwards, then all backwards; under a limit, in rounds that fit  \
                                                 into it */                                                           \
    X(CF_SCHEDULE_1F1B, "1f1b")               /* stage s keeps at most n_stages - s chunks, and more only if a chain  \
                                                 needs them */                                                        \
    X(CF_SCHEDULE_INTERLEAVED, "interleaved") /* 1F1B over several virtual stages on each stage */                    \
    X(CF_SCHEDULE_ZERO_BUBBLE, "zero-bubble") /* backwards are split into I and W, and W fills the gaps; no stage     \
                                                 keeps more than the fullest one of 1f1b */                           \
    X(CF_SCHEDULE_BEST, "best")               /* the shortest that a search finds */

CF_ENUM_OF(cf_schedule_kind, CF_SCHEDULE_KINDS, CF_SCHEDULE_COUNT);
CHUNKFLOW_API const char *cf_schedule_kind_name(cf_schedule_kind kind);

/* One pass of one chunk on one (virtual) stage. Takes 12 bytes. */
typedef struct cf_action {
    int32_t chunk;     /* index into plan->chunks */
    int32_t stage;     /* virtual stage, 0 .. n_stages x n_virtual - 1 */
    uint8_t pass;      /* a cf_pass */
    uint8_t keep;      /* F and R: 1 if the activations stay for a backward. 0 in other passes */
    uint16_t reserved; /* 0 */
} cf_action;

/* The order in which each stage runs its passes. Stage s runs actions[first[s] .. first[s + 1]) one after another. */
typedef struct cf_schedule {
    cf_schedule_kind kind; /* the generator that made it; 0: no generator of this library */
    cf_shape shape;        /* only rank and forward_only may be 0; placement is CF_PLACEMENT_LOOP or CF_PLACEMENT_V */
    int64_t n_chunks;      /* chunks of the plan */
    int64_t n_actions;
    int lowered;           /* 1: the lists also hold SEND_* and RECV_* actions (cf_schedule_lower) */
    int lockstep;          /* 1: one rank's part of a list for all ranks (cf_lockstep_schedule); cannot be lowered */
    int64_t *first;        /* (n_stages + 1) */
    cf_action *actions;    /* (n_actions) */
    cf_limits limits;      /* the limits under which it was made, defaults included; not given: none */
    cf_block block;        /* the memory of this object */
} cf_schedule;

/* A report of a search. CF_SCHEDULE_BEST always tries the fixed kinds as well, and stops when it reaches the bound. For
   a fixed kind, best_fixed is the kind itself, both makespans are its own, and other members are 0. Only
   CF_SCHEDULE_PAPER, which tries two orders, also sets n_tried and n_improved. */
typedef struct cf_search_report {
    int64_t max_tries;           /* candidates allowed in its largest search, as in cf_schedule_desc */
    int64_t n_tried;             /* candidates built and timed, in all searches together */
    int64_t n_improved;          /* times that a candidate was better than all before */
    cf_schedule_kind best_fixed; /* the best fixed kind under the same limits. 0: no fixed kind keeps them */
    double fixed_makespan;       /* makespan of best_fixed; if that is 0, of the schedule returned */
    double makespan;             /* makespan of the schedule returned */
    double bound;                /* the strongest known lower bound */
    double gap;                  /* makespan / bound - 1 */
} cf_search_report;

/* Options of a schedule. Zero means default in every member. */
typedef struct cf_schedule_desc {
    cf_shape shape;              /* pipeline replay only for paper; more than one virtual stage only for interleaved,
                                    zero-bubble and best; placement v only for zero-bubble and best; forward_only only
                                    for best */
    cf_schedule_kind kind;       /* 0: best */
    const cf_timing *timing;     /* NULL: unit costs */
    cf_limits limits;            /* not given: none; `best` has the defaults described below */
    int split_backward;          /* 1: best may split backwards into I and W. Zero-bubble always does. Other kinds, and
                                    forward_only, refuse it */
    int forwards_first;          /* only for gpipe with local replay. 1: on each stage all first forwards run before any
                                    backward, for any K, and keep nothing (cf_schedule_make) */
    int64_t max_tries;           /* only for best: maximum candidates with whole backwards, and again with split ones.
                                    0: up to 10^5 passes, as many as take some tenths of a second in total; for more
                                    passes, as many as take a few microseconds per pass */
    cf_search_report *report;    /* filled in on success; or NULL */
    const cf_allocator *allocator;
} cf_schedule_desc;

/* The order of passes on one stage. Chains and standalone chunks run in plan order, each as one unit:

       standalone chunk    F B. An idle chunk too, with no tokens, so that all ranks run the same number of steps
       chain of N <= K     F1 .. FN, BN .. B1
       chain of N > K      F1 .. F(N-K), which keep nothing; F(N-K+1) .. FN, which keep their activations;
                           BN .. B(N-K+1); then R(i) B(i) for i = N-K down to 1

   This is Algorithm 2 with two errors corrected. As printed, its index test keeps the wrong chunks. Its third pass runs
   upwards, but dK and dV of a chunk are complete only after the backwards of all later chunks.

   On several stages the fixed kinds (all except `best`) follow these rules on each virtual stage and keep the memory
   limits. If a limit is below K, they keep fewer chunks of a chain and replay more. `1f1b` takes the most expensive
   units first, the other fixed kinds take them in plan order. No kind can deadlock. If a kind's rules find no room,
   units run one by one: each stage keeps one chunk at a time, and replays all others. That is possible whenever one
   chunk fits.

   With forwards_first all forwards run and keep nothing, not even that of a standalone chunk; then R and B of one chunk
   after another. Use it for losses that need the whole batch before its gradients: a contrastive loss, a balance over
   all tokens, a normaliser. A stage keeps one chunk at a time. But after the forwards it holds the state of every chain
   and the inputs of all chunks. These grow with the batch, so limits on state and bytes are refused.

   With shape.forward_only each stage runs its forwards in plan order; with several virtual stages, in rounds of
   n_stages chunks. Only limits on state and bytes apply. */

/* The kind `best` searches for a shorter schedule. It may drop any chunk on any stage, standalone ones included. A
   chain keeps at most its last K chunks, or fewer if that shortens the schedule. Each stage keeps the inputs of at most
   2 x n_stages x n_virtual dropped standalone chunks, plus as many as it may keep whole. The inputs of a chain's
   dropped chunks never have more tokens than its state.

   Two default limits keep the memory of `best` from growing with the batch. With L = min(K, chunks of the longest
   chain), they allow at most

       chunks  on stage s, the sum over its virtual stages of L + the number of stages after it in the row. In a loop
               that is (L + n_stages - 1 - s) x n_virtual, in a V with two rows 2 L + n_stages - 1. `paper` keeps no
               more when it runs a constant number ahead
       state   on each virtual stage of stage s, 2 x (tokens of the longest chain) +
               (n_stages x n_virtual - 1 - s) x chunk_size tokens

   For 4 stages, one row and L = 2 the chunk limits are 5, 4, 3 and 2. A limit on bytes replaces both defaults.
   CF_NO_LIMIT as limits.state lifts the second. As limits.chunks it lifts both, and asks for the shortest schedule
   whatever memory it takes.

   Promises of `best`, within the same limits:
   - it is never longer than itself with fewer tries, or than itself without split_backward;
   - it is never longer than a fixed kind with as many virtual stages: `paper`, `gpipe` and `1f1b` with one,
     `interleaved` with more, and with split_backward also `zero-bubble`;
   - it never holds more than its limits, and a limit within which all chunks of the rank fit changes nothing;
   - the same max_tries gives the same schedule. */

/* Orders the passes of one rank's chunks, by the rules above. The plan must be sound.

   Errors: CF_ERROR_ARGUMENT, CF_ERROR_PLAN (its counts are not sound), CF_ERROR_LIMIT (CF_MAX_ACTIONS, CF_MAX_STAGES),
   CF_ERROR_INFEASIBLE (error->wanted: the smallest limit of that kind with which this function succeeds),
   CF_ERROR_OVERFLOW, CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error);

/* Make a schedule in the caller's memory. cf_schedule_size returns how many bytes are enough for the schedule and
   working space; a schedule may need less in the end. The rules are those of cf_pack_into. The plan must be sound. */
CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error);
CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error);

CHUNKFLOW_API cf_schedule_desc cf_schedule_defaults(const cf_schedule_desc *desc);
CHUNKFLOW_API void cf_schedule_free(cf_schedule *schedule);

/* ================================================================================================================
   >>check    is a schedule sound?
   ================================================================================================================ */

/* Limits that a schedule must keep in addition to the rules. Zero means default in every member. */
typedef struct cf_validate_desc {
    cf_limits limits; /* not given: the schedule's own */
} cf_validate_desc;

/* Checks a schedule from any source, lowered or not. It restates the rules independently of the generators, and shares
   no code with them. On every virtual stage of the rank:
   - every chunk must have one F, one B (or one I and then one W), and one R if and only if its F kept nothing;
   - if forward_only, every chunk must have only one F, which keeps nothing, and the forwards of a tree must run in plan
     order;
   - a chain's forwards must run upwards and its backwards downwards, R after F, and each backward with its activations;
   - at most K chunks of a chain may keep their activations at one time;
   - no stage may hold more chunks, state or bytes than its limits allow;
   - with pipeline replay, a chunk that is replayed must also be replayed on the previous virtual stage.

   The lists must run to their end, so that no stage waits for another forever. In a lowered schedule every tensor that
   crosses stages must be sent once and received once, after it was made and before it is used. The lists must then end
   even if every send waits for its receiver, with no buffer anywhere.

   desc: NULL means the schedule's own limits, if it has any. Scratch in proportion to the passes comes from `allocator`
   (NULL: malloc). Plan and schedule may be unvalidated.

   Returns CF_OK, or CF_ERROR_SCHEDULE for the first violation. error->field names the member, error->text the stage,
   and error->item is the position in that stage's list, or -1 if an action is missing. Returns CF_ERROR_PLAN if chunks
   and chains disagree. */
CHUNKFLOW_API cf_result cf_schedule_validate(const cf_plan *plan, const cf_schedule *schedule,
                                             const cf_validate_desc *desc, const cf_allocator *allocator,
                                             cf_error *error);

/* An index of a schedule: finds each action, and the passes that each action waits for. */
typedef struct cf_schedule_index cf_schedule_index;

/* An action that another action waits for. */
typedef struct cf_need {
    int64_t action;   /* the pass to wait for, an index into schedule->actions */
    int64_t received; /* index of the RECV that brings its result to the waiting stage; -1: no transfer is needed, or
                         the schedule is not lowered */
    cf_edge_why why;
} cf_need;

#define CF_MAX_NEEDS 4 /* maximum passes that one action waits for */

/* Makes an index. Plan and schedule may be unvalidated: the schedule is validated first, under its own limits, so the
   errors are those of cf_schedule_validate. Neither may change while the index lives. It takes 20 bytes per chunk and
   virtual stage, and 24 more if the schedule is lowered. */
CHUNKFLOW_API cf_result cf_schedule_index_make(const cf_plan *plan, const cf_schedule *schedule,
                                               const cf_allocator *allocator, cf_schedule_index **out, cf_error *error);
CHUNKFLOW_API void cf_schedule_index_free(cf_schedule_index *index);

/* Returns the index into schedule->actions of a pass, SEND or RECV of a chunk (an index into plan->chunks) on a virtual
   stage; -1 if there is none. For a backward, both CF_B and CF_I find the chunk's B or I. */
CHUNKFLOW_API int64_t cf_schedule_find(const cf_schedule_index *index, cf_pass pass, int64_t chunk, int64_t stage);

/* Finds the passes that an action (an index into schedule->actions) waits for, apart from those before it on its own
   stage. A SEND and a RECV wait for the pass that makes their tensor. An R also waits for a slot if its chain has
   already kept K chunks: replays take slots in the order in which backwards free them. needs: room for CF_MAX_NEEDS.
   Returns their number; 0 for an action that does not exist. */
CHUNKFLOW_API int cf_schedule_needs(const cf_schedule_index *index, int64_t action, cf_need *needs);

/* ================================================================================================================
   >>lockstep    ranks that run the same kinds of passes in the same order
   ================================================================================================================ */

/* Under FSDP, ZeRO-3 or expert parallelism every pass of a model calls collectives. All ranks must run the same kinds
   of passes in the same order (in lockstep, or "in step"), or they hang. Two passes are of one kind if they are on the
   same virtual stage and both are forwards (F or R), or both B, I or W.

   In step every forward runs every module: even a dropped F runs the last layer and the head. The passes of an idle
   chunk run the model on some rows with weight 0. cf_step.last_backward says when to reduce gradients.

   Pack with cf_pack_desc.lockstep, then make one list for all ranks, and take each rank's schedule from it:

       cf_pack(lengths, n, &pack_desc, &plan, &error);                              // n_ranks, lockstep = 1
       cf_lockstep_plan(plan, &pack_desc.cost, NULL, &columns, &error);
       cf_schedule_make(columns, &schedule_desc, &list, &error);                    // any kind; shape.rank is 0
       cf_schedule_lower(columns, list, NULL, &lowered, &error);                    // only for several stages
       cf_lockstep_schedule(plan, lowered, rank, NULL, &schedule, &error);           // runs with `plan`

   Lower the common list, not the ranks' schedules. Each rank would order its sends differently, and ranks that wait for
   each other both in step and across stages would hang. So cf_schedule_lower refuses a rank's schedule.

   Columns are a plan of one rank: column i represents the i-th chunks of all ranks. It has the maximum rows and tokens
   of these chunks, and enough pairs to cost as much as the most expensive of them. If one of them belongs to a cp
   group, the column has cp 1, and its slice begins after the most rows that any of them gathers. So simulating the
   columns' list gives the time of all ranks, gathers and scans included, over any number of stages. Limits that hold
   for the columns hold for every rank.

   If a chain of any rank joins columns, they form one chain, which is dropped and replayed as a whole. A single rank
   may have a shorter chain there, or several; its standalone chunks there are dropped like the others. */

/* Makes the columns of a plan. `cost` gives the weights, as in cf_plan_measure. A plan packed without lockstep also has
   columns, but they are expensive. Columns do not name sequences, so use the plan itself for metadata and
   cf_steps_make. Free *out with cf_plan_free. The plan must be sound and without trees. Errors: CF_ERROR_ARGUMENT
   ("plan"), CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_lockstep_plan(const cf_plan *plan, const cf_pass_cost *cost, const cf_allocator *allocator,
                                         cf_plan **out, cf_error *error);

/* Makes the schedule of one rank from the schedule of the columns, lowered or not. Free *out with cf_schedule_free.
   Plan and columns may be unvalidated: only the lists are read. Errors: CF_ERROR_ARGUMENT (rank; n_chunks, if it is not
   plan->chunks_per_rank), CF_ERROR_SCHEDULE (the lists are inconsistent), CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_lockstep_schedule(const cf_plan *plan, const cf_schedule *columns, int64_t rank,
                                             const cf_allocator *allocator, cf_schedule **out, cf_error *error);

/* Checks the schedules of all ranks of a plan, from any source. Each is first checked alone by cf_schedule_validate,
   with `desc`. Then all must have the same shape and be in step:
   - on every stage the i-th passes of all ranks, not counting transfers, must be of one kind;
   - the lists must run to their end even if each of these passes waits for those of all other ranks, and each transfer
     for its other end;
   - all ranks of a cp group must run each pass of a round, except W, at the same time.

   schedules: (n_ranks), by rank. Plan and schedules may be unvalidated. Errors: those of cf_schedule_validate;
   CF_ERROR_SCHEDULE with "actions" (error->item: the position, not counting transfers; rank and stage are in the text)
   or "schedules" (the item has a different rank or shape); CF_ERROR_ARGUMENT ("schedules": the item is NULL). */
CHUNKFLOW_API cf_result cf_lockstep_validate(const cf_plan *plan, const cf_schedule *const *schedules,
                                             const cf_validate_desc *desc, const cf_allocator *allocator,
                                             cf_error *error);

/* ================================================================================================================
   >>simulate    schedule -> time of each pass, and memory over time
   ================================================================================================================ */

#define CF_MAX_BOUNDS 2

/* A lower bound of the makespan: no schedule of these chunks is shorter, whichever chunks it drops and however it
   orders its passes. It holds for every schedule that cf_schedule_validate accepts with the same K, limits on chunks
   and form of replay. If the simulated schedule has only whole backwards, the bound holds only for schedules with whole
   backwards. */
typedef struct cf_bound {
    const char *name; /* a static string; cf_simulate lists the names */
    double value;
} cf_bound;

/* Options of a simulation. Zero means default in every member. */
typedef struct cf_simulate_desc {
    const cf_timing *timing;  /* NULL: unit costs */
    cf_limits limits;         /* limits on chunks, for the bounds; not given: the schedule's own. Limits on state and
                                 bytes do not change the bounds. per_token: the bytes counted in peak_bytes; all zero:
                                 none */
    int no_bounds;            /* 1: leaves out the bounds, which take longer than everything else */
    const double *start, *end; /* (n_actions) measured times, parallel to schedule->actions and on one clock. The
                                  timeline then has these times, checked and shifted so that the earliest start is 0,
                                  and no bounds. It can be drawn like a simulated one. NULL: times are simulated */
    const cf_allocator *allocator;
} cf_simulate_desc;

/* A simulated or measured run. One block of memory, like a plan. */
typedef struct cf_timeline {
    int64_t n_actions;
    int64_t n_stages;
    double makespan;             /* end of the last action; the first one starts at 0 */
    double busy;                 /* time of all passes on all stages, without transfers and copies */
    double replayed;             /* the part of busy that is R */
    double bubble_useful;        /* 1 - (busy - replayed) / (n_stages x makespan): counts replays as waste */
    double bubble_busy;          /* 1 - busy / (n_stages x makespan) */
    /* passes that take longer because of their stream, gather or scan of state (cf_timing) */
    int64_t stream_waits;
    double stream_seconds;       /* the total of these delays; a part of busy */
    int64_t n_bounds;
    cf_bound bounds[CF_MAX_BOUNDS];
    double bound;                /* the largest of the bounds; 0 if there are none */
    double *start, *end;         /* (n_actions) parallel to schedule->actions */
    int32_t *live;               /* (n_actions) chunks kept on the action's stage while it runs */
    int64_t *peak_live;          /* (n_stages) maximum chunks kept at once */
    int64_t *peak_tokens;        /* (n_stages) maximum tokens, padding included, whose activations are kept at once */
    int64_t *peak_state_tokens;  /* (n_stages) maximum tokens whose K and V are held at once */
    int64_t *peak_bytes;         /* (n_stages) maximum bytes held at once; zeros if per_token is not given */
    cf_block block;              /* the memory of this object */
} cf_timeline;

/* Simulates a schedule. Each stage takes its actions in order, each as soon as its input has arrived: the previous
   stage's activations (F, and R in pipeline replay) or the next stage's gradient (B, I), after the transfer. Time is
   linear in the actions; the bounds take n log n.

   Bounds, by name:

       critical-path  the longest path of dependent passes. It has replays only if K, or the limit of every stage, is
                      1, because otherwise no single replay is necessary
       stage-load     the work of a stage, plus the shortest way to it and the shortest way from it. Also tried for
                      only those passes of a stage that come late or have much behind them

   Lowered schedules: all transfers and passes keep the times of the schedule before lowering. A SEND begins when its
   tensor is made and the channel is free, whatever its place in the list after that pass. Its RECV has the same times.
   Transfers do not count as busy.

   With measured times, `live` and the peaks are counted along the lists, which is right if each stage ran its passes in
   order.

   Plan and schedule may be unvalidated. Errors: CF_ERROR_SCHEDULE, with the index of the action in error->item, if the
   schedule deadlocks (lowered: if a send waits for its receiver), repeats or leaves out a pass, or violates a
   dependency. CF_ERROR_ARGUMENT if a measured time is not finite or an action ends before it starts. */
CHUNKFLOW_API cf_result cf_simulate(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                    cf_timeline **out, cf_error *error);

CHUNKFLOW_API void cf_timeline_free(cf_timeline *timeline);

/* Counts a stage's loads at every moment, for cf_memory_estimate or for your own sums. A moment is an action of the
   stage's list, from its start to its end; there are n = schedule->first[stage + 1] - schedule->first[stage]. Loads
   depend only on the order of the list, so they hold for simulated and for measured times. Moment i begins at
   timeline->start[first[stage] + i].

   loads: (n x n_virtual), with room for `count` records. loads[i x n_virtual + j] is the load of the stage's virtual
   stage in row j (cf_placement_at) while action first[stage] + i runs. chunk_tokens and chunk_scores are set on the
   virtual stage of a pass, for its chunk; they are 0 on other virtual stages, and in transfers.

   loads are untouched on failure. Plan and schedule may be unvalidated: this does not check that they are sound.
   Errors: CF_ERROR_ARGUMENT ("stage", or "count" with the number of records needed); CF_ERROR_PLAN; CF_ERROR_OVERFLOW;
   CF_ERROR_SCHEDULE with the index of an action that belongs to another stage or rank, or that frees memory that is not
   held. */
CHUNKFLOW_API cf_result cf_schedule_loads(const cf_plan *plan, const cf_schedule *schedule, int64_t stage,
                                          cf_memory_load *loads, int64_t count, cf_error *error);

/* ================================================================================================================
   >>lower    schedule -> schedule with transfers
   ================================================================================================================ */

/* Options of lowering. Zero means default in every member; NULL is all zeros. */
typedef struct cf_lower_desc {
    const cf_timing *timing; /* NULL: unit costs, free transfers */
    const cf_allocator *allocator;
} cf_lower_desc;

/* Adds the transfers to a schedule: makes a copy whose lists also hold SEND_* and RECV_* actions, with `lowered` 1.
   Virtual stages on one stage need no transfer. The copy cannot deadlock, even if a send blocks until it is received:
   all passes and transfers have one order, by their start in cf_simulate with this `timing`, and every stage follows
   this order.

   Plan and schedule may be unvalidated; the schedule is validated first, under its own limits. Errors: those of
   cf_schedule_validate; CF_ERROR_ARGUMENT if it is lowered already, or is one rank's schedule of columns (>>lockstep);
   CF_ERROR_OVERFLOW if the sum of all passes' times is too large; CF_ERROR_LIMIT if the lists exceed CF_MAX_ACTIONS. */
CHUNKFLOW_API cf_result cf_schedule_lower(const cf_plan *plan, const cf_schedule *schedule, const cf_lower_desc *desc,
                                          cf_schedule **out, cf_error *error);

/* ================================================================================================================
   >>steps    schedule -> steps of one stage
   ================================================================================================================ */

/* Your passes. cf_metadata_fill describes the rows, labels and attention of a chunk, which are the same in each of its
   passes. A state slot has K, V, dK and dV of a chain, each of them for every layer of the virtual stage.

   F    In each layer, K and V of the chunk's rows go into the state from row chunk->prefix on, behind those of the
        prefix. Queries see [prefix | chunk] there. If the chunk has no chain, K and V stay in its activation slot.
        Everything that backward needs stays in activation slot `slot`. The result goes to boundary `output`.
        An F without a slot keeps no activations; it only produces K, V and `output`. On the last virtual stage it may
        end with K and V of the last layer. It works in scratch of `rows` rows, which is in no slot.
   R    Runs the forward again, with the same seed, from boundary `input` (local replay: that of F); it keeps
        everything. wants_loss says in which one of F and R the head runs and the loss is taken, each row's times its
        loss_weights. It is never set in both, and in an idle chunk in neither.
        With local replay R need not attend (not in the paper): F also copies each layer's attention output (before a
        gate and the output projection) and log-sum-exps to outputs slot `outputs`, and R reads them from there. Then R
        reads no prefix, and F must attend in the last layer as well. The slot is in use until R has ended, and so are
        its bytes in limits and estimates (cf_shape.outputs). A trainer that does not do this ignores `outputs`.
   B    The gradient of the output comes from the loss or from boundary `input`. If clear_state_gradient is set, dK and
        dV are first set to zero, because the slot has those of another chain. Then, from the last layer to the first,
        the attention's backward adds to dK and dV of all rows that it saw, the prefix included. Only now are dK and dV
        of the chunk's own rows complete, because later chunks, whose backwards came before, have added their share.
        They are taken from the state and go on through the projections of K and V. Gradients of weights are added to
        those of earlier passes. The gradient of the input goes to `output`.
        If the chunk has no chain, dK and dV are scratch, and start from zero in each layer.
   I, W The two halves of B, if the schedule splits it: I leaves in the slot everything that W needs for the gradients
        of the weights. At W the state may be gone.

   A chunk without slices is idle: its passes have nothing to do.

   Buffers. cf_steps_capacity gives the number and sizes of slots for the passes of a batch. Called with the same
   cf_capacity for every batch, it keeps the maximum of each member, so buffers grow in the first batches and then stay.
   Nothing in a slot outlives a batch, so to grow a buffer, free it and allocate a larger one:

       static cf_capacity need;                       // all zeros at first, kept over the whole training
       cf_capacity before = need;                     // and for every batch, once it has a plan and steps:
       if (cf_steps_capacity(plan, steps, &need, &error) != CF_OK) return 1;
       if (memcmp(&before, &need, sizeof need) != 0) {
           grow(&activations, need.activations * need.rows);             // rows; slot i starts at i x need.rows
           grow(&state, need.states * (need.prefix + need.rows));        // of K, V, dK and dV, in every layer
           grow(&boundaries, need.boundaries * need.rows);               // of the tensor between stages
           grow(&outputs, need.outputs * need.rows);                     // of attention's outputs, in every layer
           grow(&scratch, need.rows);                                    // for a pass that keeps nothing
       }

   If you also use &need as cf_metadata_desc.capacity, all chunks have need.rows rows. Kernels then read rows of the
   state past the chunk's own, so set newly allocated state to zero once, which makes them finite. Write no K and V of
   rows from chunk->rows on, and do not read their dK and dV.

   In a tree a state slot has only the rows of its chain, and the prefix of a chunk is in several slots: step->path is
   the lowest of their paths, and paths[].up leads to the root. F and R put K and V of their chunk's rows behind those
   of the chain's earlier chunks. In a leaf (step->state is -1) K and V stay in the activation slot, as in a chunk
   without a chain. cf_metadata says which rows see which. B adds to dK and dV of everything on its path:

       for (i = step->path; i >= 0; i = steps->paths[i].up) {
           const cf_path *path = &steps->paths[i];
           if (path->clear == step->position) set_to_zero(path->state);  // dK and dV, of all rows of path->chain
           see_rows(path->state, min(path->rows, chunk->prefix - path->begin));
       }

   A recurrent layer keeps no rows, but snapshots of its state. Without trees there is one at the end of each chunk
   except the last; with trees, at the end of each slice that slices of later chunks continue (slices.up). F begins
   every slice from the snapshot of the slice that it continues, and R and B begin there again. The gradient of a
   slice's end is the sum over all slices that continue it. In a cp group, ranks run their parts of a round at the same
   time, and a scan finds the states between them. Part p of the round is chunk + (p - rank % cp) x chunks_per_rank.
   examples/recurrent.h does all this in C.

   Transfers. A boundary slot holds a received tensor from its RECV until the end of the pass that reads it (in local
   replay, of the R, if F keeps nothing). It holds a tensor to be sent from the start of the pass that makes it until
   the end of its SEND. Where a V turns, a tensor stays on the stage: its slot is the output of one pass and the input
   of the other. Both ends of a link see its transfers in the same order, in which even blocking sends work, so
   transfers need no tags. A stage that fails must tell its peers, which may be waiting for it. */

/* One action of a stage's list, with all the numbers that your pass or transfer needs. Slots are small numbers. A free
   slot is reused, the one that has been free longest first. A number that does not apply is -1, a flag 0. */
typedef struct cf_step {
    cf_action action;
    int32_t position;     /* index of the step */
    int32_t slot;         /* activation slot of the chunk, in use from the step with action.keep to the end of B or W;
                             -1 in an F that keeps nothing, and in transfers */
    int32_t state;        /* state slot of the chunk's chain; -1: there is none, or the step is a W or a
                             transfer */
    int32_t path;         /* index into `paths`: the lowest state that this pass reads or adds to. paths[].up leads to
                             the states above it */
    int32_t input;        /* boundary slot of the tensor that a receive fills, or that F, R, B or I reads */
    int32_t output;       /* boundary slot of the tensor that F, R, B or I makes, or that a send reads */
    int32_t outputs;      /* local replay: outputs slot of the chunk, for a trainer that keeps attention's outputs. In
                             use from an F that keeps nothing to the end of its R; -1 in all other steps */
    int32_t peer;         /* the stage at the other end of a transfer */
    int32_t live;         /* chunks still kept on the stage after the step */
    uint8_t wants_loss;   /* F, R: 1 if this forward runs the head and its loss counts. Set on the last virtual stage,
                             in the forward that keeps the chunk's activations, or in its only forward */
    uint8_t clear_state_gradient; /* B, I: 1 in the first backward of a chain on this virtual stage, when dK and dV of
                                     the state slot are undefined. Zero all rows before the pass */
    uint8_t last_backward; /* B, W: 1 in the last one on its virtual stage. Gradients of weights are then complete, and
                              data-parallel ranks reduce them */
    int64_t state_tokens; /* tokens whose K and V are still held, over all chains, after the step */
    uint64_t seed;        /* for dropout and similar uses; the same in every pass of this chunk on this virtual stage */
} cf_step;

/* A chain's state on one virtual stage. A chunk with a prefix of p rows sees its first min(rows, p - begin) rows. */
typedef struct cf_path {
    int64_t chain;
    int64_t begin, rows;  /* the state has rows begin .. begin + rows - 1 of the path from the tree's root; without
                             trees begin is 0 */
    int32_t stage;        /* virtual stage */
    int32_t state;        /* state slot: row 0 is row `begin` of the path */
    int32_t first, last;  /* the slot is in use from the start of step `first` to the end of step `last` */
    int32_t clear;        /* position of the first step that adds to dK and dV of the chain, which are undefined before
                             it: zero all rows of the chain. -1: there is no backward */
    int32_t up;           /* index of the chain above, whose rows come before; -1: none, and always -1 without trees */
} cf_path;

/* The work of one stage for one batch. One block of memory, like a plan. */
typedef struct cf_steps {
    int64_t stage;
    int64_t transfers;         /* 1: made from a lowered schedule of several stages, so steps include the transfers. 0:
                                  every `input` and `output` is -1, and you move tensors between virtual stages
                                  yourself */
    int64_t n;
    int64_t n_paths;
    int64_t n_slots, n_states, n_boundaries; /* slots of activations, states and boundaries: maximum in use at once */
    int64_t n_outputs;         /* the same of outputs slots */
    /* maximum tokens (padding included) of dropped chunks, which a load has as input_tokens */
    int64_t peak_dropped_tokens;
    int64_t peak_tokens;       /* maximum tokens (padding included) whose activations are kept at once */
    int64_t peak_state_tokens; /* maximum tokens whose K and V are held at once */
    cf_step *steps;            /* (n) */
    cf_path *paths;            /* (n_paths) in order of first use */
    cf_block block;            /* the memory of this object */
} cf_steps;

/* Makes the steps of one stage: for (i = 0; i < steps->n; i++) my_pass(&steps->steps[i]) runs it. `seed` enters every
   step's seed. Free *out with cf_steps_free; *out is untouched on failure. Time and memory are linear in the actions of
   the stage and the chunks of the rank.

   Plan and schedule may be unvalidated. Errors: CF_ERROR_SCHEDULE, with the position in error->item, if the list is
   impossible: a backward without activations or before that of a later chunk of its chain, a forward whose prefix is
   missing, a chunk out of range and so on. If the list leaves a chunk out, the item is -1. Also CF_ERROR_ARGUMENT,
   CF_ERROR_PLAN, CF_ERROR_LIMIT (CF_MAX_ACTIONS), CF_ERROR_OVERFLOW, CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_steps_make(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, uint64_t seed,
                                      const cf_allocator *allocator, cf_steps **out, cf_error *error);

/* Finds the bytes that cf_steps_into needs for these arguments: the exact number, including working space. Plan and
   schedule may be unvalidated. */
CHUNKFLOW_API cf_result cf_steps_size(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, size_t *bytes,
                                      cf_error *error);

/* Makes the steps in your own memory: `bytes` of it, at a multiple of CF_MEMORY_ALIGNMENT. *out is at its start and
   needs no cf_steps_free. CF_ERROR_SPACE if the memory is too small or misaligned. Plan and schedule may be
   unvalidated. */
CHUNKFLOW_API cf_result cf_steps_into(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, uint64_t seed,
                                      void *memory, size_t bytes, cf_steps **out, cf_error *error);

CHUNKFLOW_API void cf_steps_free(cf_steps *steps);

/* Raises each member of *capacity to the needs of the plan and the steps. Called once per batch, it finds the maximum
   over many. If steps is NULL it raises only rows, prefix and n_seqs, which depend on the plan alone. *capacity is
   untouched on failure. The plan may be unvalidated; the steps must be unchanged, and made from this plan. */
CHUNKFLOW_API cf_result cf_steps_capacity(const cf_plan *plan, const cf_steps *steps, cf_capacity *capacity,
                                          cf_error *error);

/* Returns a step's seed: a 64-bit mix (splitmix64's finaliser) of the common seed, chunk and virtual stage. */
CHUNKFLOW_API uint64_t cf_chunk_seed(uint64_t seed, int64_t chunk, int64_t stage);

/* ================================================================================================================
   >>write    plans and schedules as text
   ================================================================================================================ */

/* Receives the text piece by piece, in order. Returns 0 to continue, or any other number to stop. */
typedef int (*cf_write_fn)(const char *text, size_t bytes, void *user);

/* Options for writing a plan. Zero means default in every member; NULL is all zeros. */
typedef struct cf_write_desc {
    int metadata;                  /* 1: also writes the metadata of each chunk */
    const cf_allocator *allocator; /* for the metadata of one chunk, freed at the end */
} cf_write_desc;

#define CF_JSON_VERSION 3 /* the version of all files; files of an earlier version must be made again */

/* Writes a plan as JSON, one chunk per line. Names and indices are those of the structs:

       plan      format "chunkflow-plan", version, chunk_size, align, max_slices, method, split, n_sequences, n_empty,
                 n_tokens, n_ranks, chunks_per_rank, n_chunks, n_idle, n_chains, n_slices, lower_bound, excess, fill
       chains[]  id, sequence, first_chunk, n_chunks, tokens, cp
       chunks[]  id, chain, index, prefix, tokens, rows, pairs, rank, up, down, below, state, cp, slices[]
       slices[]  sequence, begin, length, offset, up

   If sequences share rows, the plan also has order[], common[] and lengths[], and slices also have first and n.

   With desc->metadata each chunk also has metadata{max_seqlen_q, max_seqlen_k, cu_seqlens_q[], cu_seqlens_k[],
   sequence_ids[], position_ids[], target_positions[]}, as in cf_metadata. If sequences share rows, metadata also has
   {extra_rows[], extra_sequences[], extra_targets[], calls[] of {chain, first, max_seqlen_q, max_seqlen_k,
   cu_seqlens_q[], cu_seqlens_k[]}}.

   The plan must be sound. Errors: CF_ERROR_WRITE, with the callback's number; with metadata also those of
   cf_metadata_fill, and CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_write_plan_json(const cf_plan *plan, const cf_write_desc *desc, cf_write_fn write,
                                           void *user, cf_error *error);

/* Writes a schedule as JSON, one action per line:

       schedule  format "chunkflow-schedule", version, kind, replay, placement, stages, virtual_stages, k, rank,
                 n_chunks, n_actions, lowered, lockstep; forward_only and outputs if they are 1; limits[stage] if it has
                 any
       actions[stage][]  pass, chunk, stage, keep (F and R only)

   With its timeline (NULL: without) it also has

       schedule  makespan, busy, replayed, bubble_useful, bubble_busy, bounds{name: value}, peak_live[stage],
                 peak_tokens[stage], peak_state_tokens[stage], peak_bytes[stage]; stream_waits and stream_seconds if
                 there are any
       actions[stage][]  start, end, live

   The schedule must be sound. Errors: CF_ERROR_ARGUMENT (a timeline of another schedule), CF_ERROR_WRITE. */
CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, const cf_timeline *timeline,
                                               cf_write_fn write, void *user, cf_error *error);

/* ================================================================================================================
   >>graph    schedule -> graph of which pass waits for which
   ================================================================================================================ */

/* A pass of a schedule. */
typedef struct cf_node {
    double seconds;
    cf_action action;
} cf_node;

/* Pass `to` starts at least `seconds` after pass `from` has ended. seconds: of a transfer between stages; 0 for other
   edges. */
typedef struct cf_edge {
    double seconds;
    int32_t from, to;
    int32_t why; /* a cf_edge_why */
} cf_edge;

/* All passes of a schedule, and the passes that each waits for (cf_schedule_needs), in both directions. Nodes are in
   the order of the schedule's actions, without its transfers. Plain data in one block of memory: read it as you like,
   and overwrite the seconds with measured ones.

   Your own executor needs one number per node: how many passes the node still waits for. Nodes with 0 can start.

       for (i = 0; i < graph->n_nodes; i++) waiting[i] = graph->first_in[i + 1] - graph->first_in[i];

   and when node i has ended:

       for (j = graph->first_out[i]; j < graph->first_out[i + 1]; j++) {
           const cf_edge *edge = &graph->edges[graph->out[j]];
           if (--waiting[edge->to] == 0) start(edge->to);
       }

   It may run the passes in any order that the edges allow. The slot edges ensure that it keeps at most K chunks of a
   chain on every virtual stage. */
typedef struct cf_graph {
    cf_shape shape;         /* that of the schedule */
    int64_t n_nodes;
    int64_t n_edges;
    cf_node *nodes;         /* (n_nodes) */
    int64_t *first_in;      /* (n_nodes + 1) node i waits for edges[first_in[i] .. first_in[i + 1]) */
    cf_edge *edges;         /* (n_edges) by rising `to` */
    /* (n_nodes + 1) edges[out[first_out[i] .. first_out[i + 1])] lead to the nodes that wait for node i */
    int64_t *first_out;
    int32_t *out;           /* (n_edges) */
    cf_block block;         /* the memory of this object */
} cf_graph;

/* Builds the graph of a schedule, lowered or not, in time and space linear in its passes. timing: NULL for unit costs
   and free transfers. Plan and schedule may be unvalidated; the schedule is validated first, under its own limits.
   Errors: as cf_schedule_validate; CF_ERROR_ARGUMENT (timing); CF_ERROR_OVERFLOW (the sum of all passes' times is too
   large). */
CHUNKFLOW_API cf_result cf_graph_make(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing,
                                      const cf_allocator *allocator, cf_graph **out, cf_error *error);

CHUNKFLOW_API void cf_graph_free(cf_graph *graph);

#undef CF_ENUM_OF
#undef CF_ENUM_ITEM

#ifdef __cplusplus
}
#endif

#endif /* CHUNKFLOW_H */

/* ================================================================================================================
   ================================================================================================================
   IMPLEMENTATION. Stop here if you only want the API.

   Its own words
       unit          a chain or a standalone chunk, which is packed or scheduled as a whole
       row           of virtual stages: n_stages neighbouring ones, one on each stage
       cell          a chunk on a virtual stage
       place         of a stage: room for the activations of one chunk; of a pass: its number within its cell
       slot          a numbered buffer; for a chain, one of its K places, which chunks take and free in turn
       item          in >>pack a short sequence; in >>schedule an F or R in the order that all stages share
       head, tail    the longest sequence of passes that must come before a pass, and after it
       candidate     a schedule that a search builds and times
       next, previous virtual stage: the one that takes activations from this one, and the one that sends them
   ================================================================================================================ */

#if defined(CHUNKFLOW_IMPLEMENTATION) && !defined(CHUNKFLOW_IMPLEMENTED)
#define CHUNKFLOW_IMPLEMENTED

#include <float.h>

/* IEEE 754 arithmetic is required: every operation as written, and rounded to a double. Otherwise NaN is not detected,
   and plans differ between machines. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "chunkflow.h needs IEEE 754 arithmetic: compile its implementation in a file of its own, without -Ofast"
#endif
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 2 || FLT_EVAL_METHOD < 0)
#error "chunkflow.h needs doubles that are computed as doubles: compile its implementation with -msse2 -mfpmath=sse"
#endif
typedef char cf__constants_are_doubles[sizeof 0.1 == sizeof(double) ? 1 : -1]; /* no -fsingle-precision-constant */

/* The implementation is C that also compiles as C++, so warnings about C++ style do not apply to it. */
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunknown-warning-option"
#pragma clang diagnostic ignored "-Wbad-function-cast"
#pragma clang diagnostic ignored "-Wc++98-compat-pedantic"
#pragma clang diagnostic ignored "-Wdeclaration-after-statement"
#pragma clang diagnostic ignored "-Wformat-nonliteral"
#pragma clang diagnostic ignored "-Wold-style-cast"
#pragma clang diagnostic ignored "-Wpadded"
#pragma clang diagnostic ignored "-Wreserved-identifier"
#pragma clang diagnostic ignored "-Wreserved-macro-identifier"
#pragma clang diagnostic ignored "-Wswitch-enum"
#pragma clang diagnostic ignored "-Wunsafe-buffer-usage"
#pragma clang diagnostic ignored "-Wzero-as-null-pointer-constant"
/* clang defines no macro for options like -fassociative-math, but it lets a file undo them. */
#pragma clang diagnostic ignored "-Wignored-pragmas"
#pragma float_control(push)
#pragma float_control(precise, on)
#elif defined(__GNUC__)
#pragma GCC diagnostic push
#ifdef __cplusplus
#pragma GCC diagnostic ignored "-Wold-style-cast"
#pragma GCC diagnostic ignored "-Wuseless-cast"
#pragma GCC diagnostic ignored "-Wzero-as-null-pointer-constant"
#endif
#endif

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================================
   >>base
   ================================================================================================================ */

/* A case of a switch that names the items of an enum. */
#define CF__NAME(name, text) case name: return text;

/* Defines a public function that returns the text of each item of an enum, and `unknown` for any other value. */
#define CF__NAMES(function, type, ITEMS, unknown) \
    CHUNKFLOW_API const char *function(type item) { \
        switch ((int)item) { ITEMS(CF__NAME) }    \
        return unknown;                           \
    }

CF__NAMES(cf_result_name, cf_result, CF_RESULTS, "?")

/* ---- failing ---- */

/* Returns the result of `call` from the enclosing function, unless it is CF_OK. */
#define CF__TRY(call)                            \
    do {                                         \
        cf_result cf__result = (call);           \
        if (cf__result != CF_OK) return cf__result; \
    } while (0)

/* Marks code that needs no speed, because it reports failures or lays out memory. Kept out of line, it makes the
   compiled library a tenth smaller, and the code around it slightly faster. */
#if defined(__GNUC__) || defined(__clang__)
#define CF__COLD __attribute__((cold))
#define CF__APART __attribute__((noinline))
#else
#define CF__COLD
#define CF__APART
#endif

/* A condition that no test can cause: it needs objects of terabytes, a size_t of 32 bits, or a fault in another check.
   Normal builds test it, because the code behind it writes memory. Coverage builds leave it out, so that every branch
   which they report as never taken lacks a test. The tests' own builds stop if it is ever true. The condition must have
   no side effects. */
#if defined(CHUNKFLOW_COVERAGE)
#define CF__NEVER(condition) (sizeof(condition) == 0)
#elif defined(CHUNKFLOW_TESTED)
#define CF__NEVER(condition) ((condition) ? (abort(), 1) : 0)
#else
#define CF__NEVER(condition) (condition)
#endif

/* Fills in an error record; no other function does. found: " (wanted 1, got 0)" or similar, or "". */
static void cf__record(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted, int64_t got,
                       const char *why, const char *found) {
    char place[32] = "";
    if (item >= 0) (void)snprintf(place, sizeof place, "[%lld]", (long long)item);
    error->code = code;
    error->item = item;
    error->field = field;
    error->wanted = wanted;
    error->got = got;
    (void)snprintf(error->text, sizeof error->text, "%s%s: %s%s", field, place, why, found);
}

CHUNKFLOW_API CF__COLD cf_result cf_fail(cf_error *error, cf_result code, const char *field, int64_t item,
                                         int64_t wanted, int64_t got, const char *why) {
    char found[64];
    if (error == NULL) return code;
    (void)snprintf(found, sizeof found, " (wanted %lld, got %lld)", (long long)wanted, (long long)got);
    cf__record(error, code, field, item, wanted, got, why, found);
    return code;
}

CHUNKFLOW_API CF__COLD cf_result cf_fail_real(cf_error *error, cf_result code, const char *field, int64_t item,
                                              double got, const char *why) {
    char found[48] = " (got NaN)";
    if (error == NULL) return code;
    if (got > DBL_MAX || got < -DBL_MAX) (void)snprintf(found, sizeof found, " (got %sinfinity)", got < 0 ? "-" : "");
    else if (got >= -DBL_MAX) (void)snprintf(found, sizeof found, " (got %.17g)", got);
    cf__record(error, code, field, item, 0, 0, why, found);
    return code;
}

CHUNKFLOW_API CF__COLD cf_result cf_refuse(cf_error *error, cf_result code, const char *field, int64_t item,
                                           const char *why) {
    if (error != NULL) cf__record(error, code, field, item, 0, 0, why, "");
    return code;
}

CHUNKFLOW_API CF__COLD cf_result cf_fail_null(cf_error *error, const char *field) {
    return cf_refuse(error, CF_ERROR_ARGUMENT, field, -1, "must not be NULL");
}

/* The same functions as macros, for the implementation. They show the compiler that the code is not CF_OK, so that it
   does not warn of outputs used before they are set. */
#define cf__fail(error, code, field, item, wanted, got, why) \
    ((void)cf_fail(error, code, field, item, wanted, got, why), code)
#define cf__fail_real(error, code, field, item, got, why) ((void)cf_fail_real(error, code, field, item, got, why), code)
#define cf__refuse(error, code, field, item, why) ((void)cf_refuse(error, code, field, item, why), code)
#define cf__fail_null(error, field) ((void)cf_fail_null(error, field), CF_ERROR_ARGUMENT)

/* Report that a size or sum is too large. */
#define cf__fail_size(error, field) cf__refuse(error, CF_ERROR_OVERFLOW, field, -1, "does not fit in 64 bits")
#define cf__too_large(error, field) cf__refuse(error, CF_ERROR_OVERFLOW, field, -1, "does not fit in memory")

/* Checks a cost, rate or time: it must be finite and not negative. */
static cf_result cf__check_real(double x, const char *field, int64_t item, cf_error *error) {
    if (x >= 0 && x <= DBL_MAX) return CF_OK; /* false for a NaN */
    return cf__fail_real(error, CF_ERROR_ARGUMENT, field, item, x, "must be finite and not negative");
}

/* ---- ranges ---- */

#define CF__COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

/* Checks that a number is in a range. past, why: the code and the text for a number above the range. */
CF__APART static cf_result cf__within(int64_t value, int64_t least, int64_t most, const char *field, cf_result code,
                                      cf_result past, const char *why, cf_error *error) {
    if (value < least) return cf__fail(error, code, field, -1, least, value, "is too small");
    if (value > most) return cf__fail(error, past, field, -1, most, value, why);
    return CF_OK;
}

/* Checks a range that ends at a documented limit; a number above it is CF_ERROR_LIMIT. */
CF__APART static cf_result cf__range(int64_t value, int64_t least, int64_t most, const char *field, cf_error *error) {
    return cf__within(value, least, most, field, CF_ERROR_ARGUMENT, CF_ERROR_LIMIT, "is too large", error);
}

/* Checks a range whose end follows from another argument, which `why` names; a number above it is CF_ERROR_ARGUMENT. */
CF__APART static cf_result cf__bounded(int64_t value, int64_t least, int64_t most, const char *field, const char *why,
                                       cf_error *error) {
    return cf__within(value, least, most, field, CF_ERROR_ARGUMENT, CF_ERROR_ARGUMENT, why, error);
}

/* A number to be checked, with its range. */
typedef struct cf__member {
    const char *field;
    int64_t value, least, most;
    cf_result past; /* the code for a value above the range */
} cf__member;

/* Checks several numbers. code: for a value below its range. */
static cf_result cf__check_members(const cf__member *members, int64_t n, cf_result code, cf_error *error) {
    int64_t i;
    for (i = 0; i < n; i++) {
        const cf__member *m = &members[i];
        CF__TRY(cf__within(m->value, m->least, m->most, m->field, code, m->past, "is too large", error));
    }
    return CF_OK;
}

/* Refuses a number other than 0 unless the member that it needs is given; `why` names that member. */
CF__APART static cf_result cf__needs(int64_t given, int there, const char *field, int64_t item, const char *why,
                                     cf_error *error) {
    return given == 0 || there ? CF_OK : cf__fail(error, CF_ERROR_ARGUMENT, field, item, 0, given, why);
}

/* Checks a range. A number on either side of it is the same error, which `why` names. */
static inline cf_result cf__inside(int64_t value, int64_t least, int64_t most, cf_result code, const char *field,
                                   int64_t item, const char *why, cf_error *error) {
    if (value >= least && value <= most) return CF_OK;
    return cf__fail(error, code, field, item, value < least ? least : most, value, why);
}

/* Checks a choice among existing things. A number above the last one is an error, not a limit. Callers cast an enum to
   int: compilers may make it unsigned, and -1 would be reported as 4294967295. */
CF__APART static cf_result cf__choice(int64_t value, int64_t first, int64_t last, const char *field, cf_error *error) {
    return cf__inside(value, first, last, CF_ERROR_ARGUMENT, field, -1, "there is no such choice", error);
}

CF__APART static cf_result cf__check_flag(int64_t value, const char *field, int64_t item, cf_error *error) {
    return cf__inside(value, 0, 1, CF_ERROR_ARGUMENT, field, item, "is neither 0 nor 1", error);
}

/* ---- arithmetic ---- */

#define CF__GOLDEN 0x9e3779b97f4a7c15u /* the step of splitmix64: 2^64 / the golden ratio, odd */

/* Returns splitmix64's finaliser of x: every bit of the result depends on every bit of x. */
static uint64_t cf__mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns the next random number: splitmix64. */
static uint64_t cf__draw(uint64_t *state) { return cf__mix(*state += CF__GOLDEN); }

/* Checked arithmetic on numbers that are not negative. These set *out and return 1, or return 0 if the result does not
   fit. */
static int cf__add(int64_t a, int64_t b, int64_t *out) {
    if (a > INT64_MAX - b) return 0;
    *out = a + b;
    return 1;
}

static int cf__mul(int64_t a, int64_t b, int64_t *out) {
    /* division is slow: only done for large factors */
    if ((a | b) > INT32_MAX && b != 0 && a > INT64_MAX / b) return 0;
    *out = a * b;
    return 1;
}

static int64_t cf__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t cf__max(int64_t a, int64_t b) { return a > b ? a : b; }
static double cf__most(double a, double b) { return a > b ? a : b; }
static int64_t cf__div_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

static int64_t cf__gcd(int64_t a, int64_t b) { return b == 0 ? a : cf__gcd(b, a % b); }

/* Returns the largest divisor of `whole` that is at most `most`; both are above 0. */
static int64_t cf__divisor_below(int64_t whole, int64_t most) {
    int64_t low, found = 1;
    for (low = 1; low <= whole / low; low++) {
        int64_t high = whole / low; /* divisors come in pairs, so the loop may stop at the square root */
        if (whole % low != 0) continue;
        if (low <= most) found = cf__max(found, low);
        if (high <= most) found = cf__max(found, high);
    }
    return found;
}

/* Rounds up to a multiple. Skips the division for the usual multiple of 1, because packing spends its time here. */
static int64_t cf__round_up(int64_t a, int64_t multiple) {
    return multiple == 1 ? a : cf__div_up(a, multiple) * multiple;
}

/* Returns a x b, rounded. Without `volatile` a compiler may fuse the product with a following addition, and plans would
   differ between machines with and without that instruction. */
static double cf__product(double a, double b) {
    volatile double product = a * b;
    return product;
}

/* ---- memory ---- */

/* Sanitizer builds leave a poisoned gap after every array of a block. It reveals a write past the end of an array,
   which would otherwise go into the next one. */
#if defined(__SANITIZE_ADDRESS__)
#define CF__GAP 16
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CF__GAP 16
#endif
#endif

#ifdef CF__GAP
void __asan_poison_memory_region(void const volatile *memory, size_t bytes);
void __asan_unpoison_memory_region(void const volatile *memory, size_t bytes);
static void cf__poison(void *memory, size_t bytes) { __asan_poison_memory_region(memory, bytes); }
static void cf__unpoison(void *memory, size_t bytes) { __asan_unpoison_memory_region(memory, bytes); }
#else
#define CF__GAP 0
static void cf__poison(void *memory, size_t bytes) { (void)memory; (void)bytes; }
static void cf__unpoison(void *memory, size_t bytes) { (void)memory; (void)bytes; }
#endif

/* Divides one block into arrays. With base == NULL it only adds up sizes, so the size query and the real layout are one
   function and cannot differ. `overflow` stays set once a size does not fit. */
typedef struct cf__carver {
    unsigned char *base;
    size_t used;
    int overflow;
} cf__carver;

CF__APART static void *cf__take(cf__carver *carver, int64_t count, size_t item_bytes) {
    size_t start = carver->used, bytes, padded;
    if (CF__NEVER((uint64_t)count > (SIZE_MAX / 2 - start) / item_bytes)) { /* the cast also catches a negative count */
        carver->overflow = 1;
        return NULL;
    }
    bytes = (size_t)count * item_bytes;
    padded = (bytes + CF_MEMORY_ALIGNMENT - 1) / CF_MEMORY_ALIGNMENT * CF_MEMORY_ALIGNMENT + CF__GAP;
    carver->used = start + padded;
    if (carver->base == NULL) return NULL;
    if (CF__GAP > 0) cf__poison(carver->base + start + bytes, padded - bytes);
    return carver->base + start;
}

static void *cf__malloc(size_t bytes, void *user) {
    (void)user;
    return malloc(bytes);
}

static void cf__free(void *memory, void *user) {
    (void)user;
    free(memory);
}

CHUNKFLOW_API cf_result cf_allocator_resolve(const cf_allocator *given, cf_allocator *out, cf_error *error) {
    const cf_allocator standard = {cf__malloc, cf__free, NULL};
    const cf_allocator *found = given != NULL && (given->alloc != NULL || given->release != NULL) ? given : &standard;
    if (found->alloc == NULL) return cf__fail_null(error, "allocator.alloc");
    if (found->release == NULL) return cf__fail_null(error, "allocator.release");
    *out = *found;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_allocate(const cf_allocator *allocator, size_t bytes, void **out, cf_error *error) {
    void *memory = allocator->alloc(bytes > 0 ? bytes : 1, allocator->user); /* alloc(0) may return NULL without
                                                                                failing */
    char found[48];
    if (memory != NULL) {
        *out = memory;
        return CF_OK;
    }
    if (error == NULL) return CF_ERROR_MEMORY;
    (void)snprintf(found, sizeof found, " (wanted %llu bytes)", (unsigned long long)bytes);
    cf__record(error, CF_ERROR_MEMORY, "allocator", -1, (int64_t)bytes, 0, "gave no memory", found);
    return CF_ERROR_MEMORY;
}

/* Checks the caller's memory: present, aligned, large enough. */
static cf_result cf__check_memory(const void *memory, size_t bytes, size_t needed, cf_error *error) {
    uintptr_t off = (uintptr_t)memory % CF_MEMORY_ALIGNMENT;
    if (memory == NULL) return cf__fail_null(error, "memory");
    if (off != 0)
        return cf__fail(error, CF_ERROR_SPACE, "memory", -1, CF_MEMORY_ALIGNMENT, (int64_t)off, "is misaligned");
    if (bytes < needed)
        return cf__fail(error, CF_ERROR_SPACE, "bytes", -1, (int64_t)needed, (int64_t)bytes, "is too small");
    return CF_OK;
}

/* ---- making objects ----

   Every object is made in the same steps: working space is laid out, `prepare` finds the object's size, the object is
   laid out, and `fill` writes it. A job is a section's data about the object; it is the argument of a recipe's
   functions. Functions that a recipe does not need are NULL. A check has only working space and no object. */
typedef struct cf__recipe {
    const char *field;                                  /* the field to name if the sizes do not fit in memory */
    int zeroed;                                         /* 1: working space is zeroed at the start, and always
                                                           allocated */
    void (*scratch)(void *job, cf__carver *carver);     /* lays out the working space */
    cf_result (*prepare)(void *job);
    cf_block *(*object)(void *job, cf__carver *carver); /* lays out the object, puts its address into the job, and
                                                           returns the address of its cf_block. Without memory, before
                                                           `prepare`, it measures the largest possible object, or the
                                                           smallest if the size depends on `prepare` */
    cf_result (*fill)(void *job);
} cf__recipe;

/* Measures the bytes of the object, as known before `prepare`, and of the working space. */
static cf_result cf__measure_job(const cf__recipe *recipe, void *job, size_t *object, size_t *scratch,
                                 cf_error *error) {
    cf__carver block = {NULL, 0, 0}, space = {NULL, 0, 0};
    (void)recipe->object(job, &block);
    recipe->scratch(job, &space);
    if (CF__NEVER(block.overflow || space.overflow || block.used > SIZE_MAX / 2 - space.used))
        return cf__too_large(error, recipe->field);
    *object = block.used;
    *scratch = space.used;
    return CF_OK;
}

/* Implements a *_size function. */
static cf_result cf__size_job(const cf__recipe *recipe, void *job, size_t *bytes, cf_error *error) {
    size_t object, scratch;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    CF__TRY(cf__measure_job(recipe, job, &object, &scratch, error));
    *bytes = object + scratch;
    return CF_OK;
}

/* Runs every step before the object, in the given working space. */
static cf_result cf__prepare_job(const cf__recipe *recipe, void *job, void *memory, size_t bytes) {
    cf__carver space = {(unsigned char *)memory, 0, 0};
    if (recipe->zeroed) memset(memory, 0, bytes);
    if (recipe->scratch != NULL) recipe->scratch(job, &space);
    return recipe->prepare != NULL ? recipe->prepare(job) : CF_OK;
}

/* Adds the bytes of the object, known once `prepare` has run, to those of the working space. */
static cf_result cf__add_object(const cf__recipe *recipe, void *job, size_t *bytes, cf_error *error) {
    cf__carver block = {NULL, 0, 0};
    (void)recipe->object(job, &block);
    if (CF__NEVER(block.overflow || block.used > SIZE_MAX / 2 - *bytes)) return cf__too_large(error, recipe->field);
    *bytes += block.used;
    return CF_OK;
}

/* Makes the object itself. memory: where the object goes; NULL: allocates memory, because its size is now known. */
static cf_result cf__write_object(const cf__recipe *recipe, void *job, void *memory, const cf_allocator *allocator,
                                  cf_error *error) {
    cf__carver block = {(unsigned char *)memory, 0, 0};
    size_t bytes = 0;
    cf_block *own;
    void *made;
    cf_result result;
    if (recipe->object == NULL) return recipe->fill(job);
    if (memory == NULL) {
        CF__TRY(cf__add_object(recipe, job, &bytes, error));
        CF__TRY(cf_allocate(allocator, bytes, &made, error));
        block.base = (unsigned char *)made;
    }
    own = recipe->object(job, &block);
    memset(own, 0, sizeof *own);
    own->bytes = block.used;
    if (memory == NULL) own->allocator = *allocator;
    result = recipe->fill(job);
    if (result == CF_OK) return CF_OK;
    cf__unpoison(block.base, block.used);
    if (memory == NULL) allocator->release(block.base, allocator->user);
    return result;
}

/* Implements a *_into function: everything is in the caller's memory, the object at its start and working space at its
   end. */
static cf_result cf__make_into(const cf__recipe *recipe, void *job, void *memory, size_t bytes, cf_error *error) {
    size_t object, scratch, needed;
    unsigned char *space;
    cf_result result;
    CF__TRY(cf__measure_job(recipe, job, &object, &scratch, error));
    CF__TRY(cf__check_memory(memory, bytes, object + scratch, error));
    cf__unpoison(memory, bytes); /* an earlier object here may not have been freed */
    space = (unsigned char *)memory + (bytes - scratch) / CF_MEMORY_ALIGNMENT * CF_MEMORY_ALIGNMENT;
    result = cf__prepare_job(recipe, job, space, needed = scratch);
    if (result == CF_OK) result = cf__add_object(recipe, job, &needed, error);
    if (result == CF_OK) result = cf__check_memory(memory, bytes, needed, error);
    if (result == CF_OK) result = cf__write_object(recipe, job, memory, NULL, error);
    cf__unpoison(space, scratch);
    return result;
}

/* Makes an object. The object, and working space until it is done, come from the allocator. If bytes is not NULL, only
   measures the bytes of both. */
static cf_result cf__make_or_measure(const cf__recipe *recipe, void *job, const cf_allocator *given, size_t *bytes,
                                     cf_error *error) {
    cf_allocator allocator;
    cf__carver space = {NULL, 0, 0};
    void *scratch = NULL;
    size_t needed;
    cf_result result;
    CF__TRY(cf_allocator_resolve(given, &allocator, error));
    if (recipe->scratch != NULL) recipe->scratch(job, &space);
    if (CF__NEVER(space.overflow)) return cf__too_large(error, recipe->field);
    if (space.used > 0) CF__TRY(cf_allocate(&allocator, space.used, &scratch, error));
    result = cf__prepare_job(recipe, job, scratch, needed = space.used);
    if (result == CF_OK && bytes == NULL) result = cf__write_object(recipe, job, NULL, &allocator, error);
    if (result == CF_OK && bytes != NULL) result = cf__add_object(recipe, job, &needed, error);
    if (result == CF_OK && bytes != NULL) *bytes = needed;
    if (scratch != NULL) {
        cf__unpoison(scratch, space.used);
        allocator.release(scratch, allocator.user);
    }
    return result;
}

static cf_result cf__make(const cf__recipe *recipe, void *job, const cf_allocator *given, cf_error *error) {
    return cf__make_or_measure(recipe, job, given, NULL, error);
}

/* Frees an object's block. block: a member of the object. */
static void cf__free_object(void *object, const cf_block *block) {
    cf_block own = *block;
    cf__unpoison(object, own.bytes);
    if (own.allocator.release != NULL) own.allocator.release(object, own.allocator.user);
}

/* Adds a x b to *sum; none of them is negative. *overflow is set, and stays set, if something does not fit. */
CF__APART static void cf__add_product(int64_t *sum, int64_t a, int64_t b, int *overflow) {
    int64_t product;
    if (!cf__mul(a, b, &product) || !cf__add(*sum, product, sum)) *overflow = 1;
}

/* ---- a set of bits, a radix sort, a heap ---- */

/* A set of numbers below n with a fast search for the next member: a tree of bits, 64 ways. */
typedef struct cf__bits {
    uint64_t *words[6]; /* words[0]: one bit per number; words[i]: one bit per word of words[i - 1] */
    int64_t n_words[6];
    int n_levels;
} cf__bits;

static void cf__bits_layout(cf__bits *bits, int64_t n, cf__carver *carver) {
    bits->n_levels = 0;
    do {
        n = cf__div_up(n, 64);
        bits->n_words[bits->n_levels] = n;
        bits->words[bits->n_levels++] = (uint64_t *)cf__take(carver, n, sizeof(uint64_t));
    } while (n > 1);
}

static void cf__bits_clear(cf__bits *bits) {
    int i;
    for (i = 0; i < bits->n_levels; i++) memset(bits->words[i], 0, (size_t)bits->n_words[i] * sizeof(uint64_t));
}

static int cf__bits_lowest(uint64_t word) { /* word != 0 */
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(word);
#else
    int n = 0;
    while ((word & 255) == 0) word >>= 8, n += 8;
    while ((word & 1) == 0) word >>= 1, n++;
    return n;
#endif
}

static int cf__bits_has(const cf__bits *bits, int64_t i) { return (int)(bits->words[0][i >> 6] >> (i & 63) & 1); }

/* Returns the first member at or after i, or -1. */
static int64_t cf__bits_next(const cf__bits *bits, int64_t i) {
    int level;
    for (level = 0; level < bits->n_levels; level++) {
        int64_t word = i >> 6;
        uint64_t rest = word < bits->n_words[level] ? bits->words[level][word] >> (i & 63) : 0;
        if (rest != 0) {
            i += cf__bits_lowest(rest);
            while (level-- > 0) i = i << 6 | cf__bits_lowest(bits->words[level][i]);
            return i;
        }
        i = word + 1;
    }
    return -1;
}

static void cf__bits_put(cf__bits *bits, int64_t i, int is_member) {
    int level;
    for (level = 0; level < bits->n_levels; level++, i >>= 6) {
        uint64_t *word = &bits->words[level][i >> 6], bit = (uint64_t)1 << (i & 63), before = *word;
        *word = is_member ? before | bit : before & ~bit;
        if (is_member ? before != 0 : *word != 0) return; /* higher levels do not change */
    }
}

/* Returns an item's sort key: its upper 32 bits or, with `keys`, the bits of keys[item]. The bits of non-negative
   doubles sort in the order of their values. */
static inline uint64_t cf__sort_bits(uint64_t item, const double *keys) {
    uint64_t bits = item >> 32;
    if (keys != NULL) memcpy(&bits, &keys[item], sizeof bits);
    return bits;
}

/* Sorts items by rising key, or by falling key if flip is all ones. Equal items keep their order. It is a radix sort
   over the bits that differ; the two arrays swap roles with every pass. */
static void cf__sort(uint64_t **items, uint64_t **spare, int64_t n, const double *keys, uint64_t flip) {
    int64_t start[1 << 11], i, sum;
    uint64_t differ = 0, mask;
    int shift, end = 0, width = n < 4096 ? 8 : 11;
    for (i = 1; i < n; i++) differ |= cf__sort_bits((*items)[i], keys) ^ cf__sort_bits((*items)[0], keys);
    while (end < 64 && differ >> end != 0) end++;
    width = (int)cf__div_up(end, cf__max(1, cf__div_up(end, width))); /* the same number of passes, of equal width */
    mask = ((uint64_t)1 << width) - 1;
    for (shift = 0; shift < end; shift += (differ >> shift & 1) != 0 ? width : 1) {
        uint64_t *from = *items, *to = *spare;
        if ((differ >> shift & 1) == 0) continue;
        memset(start, 0, sizeof start[0] << width);
        for (i = 0; i < n; i++) start[(cf__sort_bits(from[i], keys) ^ flip) >> shift & mask]++;
        for (i = 0, sum = 0; i <= (int64_t)mask; i++) {
            int64_t count = start[i];
            start[i] = sum;
            sum += count;
        }
        for (i = 0; i < n; i++) to[start[(cf__sort_bits(from[i], keys) ^ flip) >> shift & mask]++] = from[i];
        *items = to;
        *spare = from;
    }
}

/* Compares ids in a heap with the least key on top. The lower id wins a tie, so the order is total. */
static int cf__heap_less(const double *keys, int32_t a, int32_t b) {
    return keys[a] < keys[b] || (keys[a] <= keys[b] && a < b);
}

static void cf__heap_sink(int32_t *heap, int64_t n, int64_t i, const double *keys) {
    int32_t id = heap[i];
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child + 1 < n && cf__heap_less(keys, heap[child + 1], heap[child])) child++;
        if (child >= n || !cf__heap_less(keys, heap[child], id)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = id;
}

static void cf__heap_push(int32_t *heap, int64_t n, int32_t id, const double *keys) {
    while (n > 0 && cf__heap_less(keys, id, heap[(n - 1) / 2])) {
        heap[n] = heap[(n - 1) / 2];
        n = (n - 1) / 2;
    }
    heap[n] = id;
}

static int32_t cf__heap_pop(int32_t *heap, int64_t n, const double *keys) {
    int32_t top = heap[0];
    heap[0] = heap[n - 1];
    if (n > 1) cf__heap_sink(heap, n - 1, 0, keys);
    return top;
}

/* Sorts ids by falling key. */
static void cf__sort_by_key(int32_t *ids, int64_t n, const double *keys) {
    int64_t i;
    for (i = n / 2 - 1; i >= 0; i--) cf__heap_sink(ids, n, i, keys);
    for (i = n; i > 1; i--) ids[i - 1] = cf__heap_pop(ids, i, keys);
}

/* ================================================================================================================
   >>tree    shares -> trees of rows

   Each sequence leaves another one after a number of tokens, or is a root. A sequence's own rows are cut into nodes
   wherever others leave it, so that all rows of a node have the same sequences. A node is small if its rows and all
   rows below it fit into one chunk. A small node without a small parent, together with everything below it, is a bush:
   packing moves it as a whole. All other nodes form stems, which begin at a root or where a tree branches, and become
   chains.
   ================================================================================================================
   */

typedef struct cf__tree_node {
    int64_t begin, length; /* rows of its sequence */
    uint32_t rows;         /* rows of the node and all nodes below it, padding included; counted up to chunk_size + 1 */
    int32_t sequence, parent;
    int32_t end;           /* nodes id + 1 .. end - 1 are below it */
    int32_t first, n;      /* the node's sequences, in order */
    int32_t stem;          /* -1: the node is part of a bush */
    int32_t follower;      /* the node that continues the stem; negative: there is none, or there are several */
    int32_t slice;         /* the last slice of the node that was written to the plan */
} cf__tree_node;

typedef struct cf__tree {
    const cf_pack_desc *desc; /* with defaults */
    const int64_t *lengths;
    const cf_shared_prefix *shares; /* NULL: nothing is shared */
    int64_t n;
    int may_part;           /* 1: rows may be copied, for trees over several ranks */
    int64_t n_rows;         /* n_rows: computed rows; most_rows: their upper bound with padding */
    int64_t most_rows;
    int64_t most_nodes, most_stems;
    cf_error *error;
    /* for each sequence: the one that it leaves (-1: none), after how many tokens, and two arrays for finding these */
    int32_t *with, *jump, *rank;
    double *depth;
    int32_t *child, *next;  /* for each sequence: the first that leaves it; the next that leaves the same sequence, by
                               rising depth */
    int32_t *at;            /* for each sequence: the node after which it leaves */
    int32_t *order;         /* (n) the plan's order */
    int32_t *stack;
    uint64_t *items, *spare; /* (n) */
    cf__tree_node *nodes;   /* (most_nodes) in preorder */
    int32_t *stems;         /* (most_stems) in preorder. A stem is a run of nodes that will become a chain; this is the
                               first node of each */
    int64_t n_nodes, n_stems;
} cf__tree;

/* Returns the number of tokens that a sequence shares, after rounding. */
static int64_t cf__tree_depth(const cf__tree *t, int64_t i) {
    int64_t depth = t->shares[i].tokens - t->shares[i].tokens % t->desc->align;
    return depth >= t->desc->min_shared_prefix ? depth : 0;
}

/* Checks each share separately, counts rows, and bounds nodes and stems. A node ends where sequences diverge, or with
   its sequence. A stem ends where sequences diverge, or with a sequence that has more than a chunk of rows of its
   own. */
static cf_result cf__tree_measure(cf__tree *t) {
    int64_t i, partings = 0, n_long = 0;
    for (i = 0; i < t->n; i++) {
        const cf_shared_prefix *share = &t->shares[i];
        int64_t most = t->lengths[i], depth, own;
        if (share->tokens != 0) {
            CF__TRY(cf__inside(share->with, 0, t->n - 1, CF_ERROR_ARGUMENT, "shared_prefixes.with", i,
                               "there is no such sequence", t->error));
            most = cf__min(most, t->lengths[share->with]);
        }
        CF__TRY(cf__inside(share->tokens, 0, most, CF_ERROR_ARGUMENT, "shared_prefixes.tokens", i,
                           "is not in both of the sequences", t->error));
        depth = cf__tree_depth(t, i);
        own = t->lengths[i] - (t->may_part ? 0 : depth);
        t->n_rows += own;
        n_long += own > t->desc->chunk_size;
        partings += depth > 0 &&
                    (t->may_part || i == 0 || share->with != share[-1].with || share->tokens != share[-1].tokens);
    }
    if (!cf__add(t->n_rows, t->n * (t->desc->align - 1), &t->most_rows)) return cf__fail_size(t->error, "lengths");
    CF__TRY(cf__inside(t->most_rows / t->desc->chunk_size, 0, CF_MAX_CHUNKS, CF_ERROR_LIMIT, "n_chunks", -1,
                       "the batch may need too many chunks", t->error));
    t->most_nodes = t->n + partings;
    t->most_stems = partings + n_long;
    /* A stem that ends or branches has more than a chunk of its own rows below the last branch. */
    if (t->desc->max_slices == 0) t->most_stems = cf__min(t->most_stems, 2 * (t->most_rows / t->desc->chunk_size));
    if (partings == 0) t->shares = NULL;
    return cf__range(t->n, 0, CF_MAX_SEQUENCES / 2, "n", t->error);
}

static void cf__tree_layout(cf__tree *t, cf__carver *carver) {
    int64_t n = t->n;
    t->with = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->jump = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->rank = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->depth = (double *)cf__take(carver, n, sizeof(double));
    t->child = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->next = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->at = t->jump; /* jump and rank are not used after all sequences are attached */
    t->order = t->rank;
    t->stack = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->nodes = (cf__tree_node *)cf__take(carver, t->most_nodes, sizeof(cf__tree_node));
    t->stems = (int32_t *)cf__take(carver, t->most_stems, sizeof(int32_t));
}

/* Attaches sequence i to `to`, or to an ancestor of `to`. It moves up to a parent while it shares no more tokens with a
   sequence than that sequence shares with its own parent. It finds its place in steps that double (Myers, 1983). */
static void cf__tree_attach(cf__tree *t, int32_t i, int32_t to) {
    int64_t depth = cf__tree_depth(t, i);
    t->depth[i] = (double)depth;
    t->with[i] = -1;
    t->jump[i] = i;
    t->rank[i] = 0;
    if (depth == 0) return;
    while (t->depth[i] <= t->depth[to]) to = t->depth[i] <= t->depth[t->jump[to]] ? t->jump[to] : t->with[to];
    t->with[i] = to;
    t->rank[i] = t->rank[to] + 1;
    t->jump[i] = to;
    if (t->rank[to] - t->rank[t->jump[to]] == t->rank[t->jump[to]] - t->rank[t->jump[t->jump[to]]])
        t->jump[i] = t->jump[t->jump[to]];
}

/* Attaches all sequences, each after the one with which it shares. While a sequence is on the stack, its rank is -2. */
static cf_result cf__tree_attach_all(cf__tree *t) {
    int64_t i, n;
    int32_t at;
    for (i = 0; i < t->n; i++) t->rank[i] = -1;
    for (i = 0; i < t->n; i++) {
        for (n = 0, at = (int32_t)i; t->rank[at] < 0; at = (int32_t)t->shares[at].with) {
            if (t->rank[at] == -2)
                return cf__refuse(t->error, CF_ERROR_ARGUMENT, "shared_prefixes", at,
                                  "leads back to itself; the one that others share with must itself share nothing");
            t->rank[at] = -2;
            t->stack[n++] = at;
            if (t->shares[at].tokens == 0) break;
        }
        for (; n > 0; n--) cf__tree_attach(t, t->stack[n - 1], (int32_t)t->shares[t->stack[n - 1]].with);
    }
    return CF_OK;
}

/* Lists each sequence's children by rising depth. Of children that leave at the same token, the later ones come
   first. */
static void cf__tree_list_children(cf__tree *t) {
    int64_t i, n = 0;
    for (i = 0; i < t->n; i++) {
        t->child[i] = -1;
        if (t->with[i] >= 0) t->items[n++] = (uint64_t)i;
    }
    cf__sort(&t->items, &t->spare, n, t->depth, ~(uint64_t)0);
    for (i = 0; i < n; i++) {
        int64_t id = (int64_t)t->items[i];
        t->next[id] = t->child[t->with[id]];
        t->child[t->with[id]] = (int32_t)id;
    }
}

/* Adds a node for rows *begin .. end - 1 of a sequence and returns it. If there are no such rows, returns `parent`. */
static int32_t cf__tree_cut(cf__tree *t, int32_t sequence, int64_t first, int64_t *begin, int64_t end, int32_t parent) {
    int32_t id = (int32_t)t->n_nodes;
    const cf__tree_node node = {*begin, end - *begin, 0, sequence, parent, id + 1, (int32_t)first, 0, -1, -1, -1};
    if (end == *begin) return parent;
    *begin = end;
    t->nodes[t->n_nodes++] = node;
    return id;
}

/* Makes all nodes of a tree. A sequence comes before the sequences that leave it, and of these the last to leave comes
   first. So the sequences that run through a node are adjacent. */
static void cf__tree_grow(cf__tree *t, int32_t root, int64_t *n_order) {
    int64_t n = 0;
    t->at[root] = -1;
    t->stack[n++] = root;
    while (n > 0) {
        int32_t i = t->stack[--n], child, last = t->at[i];
        int64_t begin = (int64_t)t->depth[i];
        for (child = t->child[i]; child >= 0; child = t->next[child]) {
            last = cf__tree_cut(t, i, *n_order, &begin, (int64_t)t->depth[child], last);
            t->at[child] = last;
            t->stack[n++] = child;
        }
        last = cf__tree_cut(t, i, *n_order, &begin, t->lengths[i], last);
        if (last >= 0) t->nodes[last].n++; /* a sequence without tokens is in no node */
        t->order[(*n_order)++] = i;
    }
}

static int cf__tree_is_small(const cf__tree *t, const cf__tree_node *node, int32_t id) {
    return node->rows <= t->desc->chunk_size && (t->desc->max_slices == 0 || node->end == id + 1);
}

/* Adds up each node's rows, sequences and end, including everything below it. A stem continues if only one child needs
   chunks of its own. With limited slices it ends, because each node would be another slice. */
static void cf__tree_add_up(cf__tree *t) {
    const int64_t most = t->desc->chunk_size + 1;
    int32_t i;
    for (i = (int32_t)t->n_nodes - 1; i >= 0; i--) {
        cf__tree_node *node = &t->nodes[i], *parent = node->parent >= 0 ? &t->nodes[node->parent] : NULL;
        node->rows = (uint32_t)cf__min(node->rows + cf__round_up(node->length, t->desc->align), most);
        if (parent == NULL) continue;
        parent->rows = (uint32_t)cf__min((int64_t)parent->rows + node->rows, most);
        parent->end = (int32_t)cf__max(parent->end, node->end);
        parent->n += node->n;
        if (cf__tree_is_small(t, node, i)) continue;
        parent->follower = parent->follower == -1 && t->desc->max_slices == 0 ? i : -2;
    }
}

static void cf__tree_make_stems(cf__tree *t) {
    int32_t i;
    for (i = 0; i < t->n_nodes; i++) {
        cf__tree_node *node = &t->nodes[i], *parent = node->parent >= 0 ? &t->nodes[node->parent] : NULL;
        if (cf__tree_is_small(t, node, i)) continue;
        node->stem = parent != NULL && parent->follower == i ? parent->stem : (int32_t)t->n_stems;
        if (node->stem == t->n_stems) t->stems[t->n_stems++] = i;
    }
}

static void cf__tree_build(cf__tree *t) {
    int64_t n_order = 0;
    int32_t i;
    t->n_nodes = t->n_stems = 0;
    cf__tree_list_children(t);
    for (i = 0; i < t->n; i++)
        if (t->with[i] < 0) cf__tree_grow(t, i, &n_order);
    cf__tree_add_up(t);
    cf__tree_make_stems(t);
}

/* ---- shares of tokens ---- */

typedef struct cf__share_finder {
    const void *const *tokens;
    int64_t token_bytes;
    const int64_t *lengths;
    int64_t n;
    cf_shared_prefix *shares;
    int64_t *ids, *common;          /* ids: (n) sorted within each run. common: tokens that a sequence shares with the
                                       previous one of its run */
    int64_t *new_ids, *new_common;  /* (n) ids and common for runs twice as long */
} cf__share_finder;

static void cf__share_scratch(void *job, cf__carver *carver) {
    cf__share_finder *f = (cf__share_finder *)job;
    f->ids = (int64_t *)cf__take(carver, f->n, sizeof(int64_t));
    f->common = (int64_t *)cf__take(carver, f->n, sizeof(int64_t));
    f->new_ids = (int64_t *)cf__take(carver, f->n, sizeof(int64_t));
    f->new_common = (int64_t *)cf__take(carver, f->n, sizeof(int64_t));
}

/* Counts the tokens that two sequences have in common, at least *common. Returns whether the first one sorts first. */
static int cf__share_compare(const cf__share_finder *f, int64_t a, int64_t b, int64_t *common) {
    const unsigned char *x = (const unsigned char *)f->tokens[a], *y = (const unsigned char *)f->tokens[b];
    int64_t most = cf__min(f->lengths[a], f->lengths[b]), size = f->token_bytes, at = *common, step = 64;
    for (; step > 0; step = step > 1 ? 1 : 0)
        while (at + step <= most && memcmp(x + at * size, y + at * size, (size_t)(step * size)) == 0) at += step;
    *common = at;
    if (at == most) return f->lengths[a] <= f->lengths[b];
    return memcmp(x + at * size, y + at * size, (size_t)size) < 0;
}

/* Merges two runs. The next sequences of both are compared by the tokens that each has in common with the last one
   taken. If these counts are equal, the following tokens decide. */
static void cf__share_merge(const cf__share_finder *f, int64_t first, int64_t middle, int64_t end) {
    int64_t a = first, b = middle, of_a = 0, of_b = 0, at;
    for (at = first; at < end; at++) {
        int takes_a = b == end || (a < middle && of_a > of_b);
        int64_t had = of_a;
        if (a < middle && b < end && of_a == of_b) {
            int64_t common = of_a;
            takes_a = cf__share_compare(f, f->ids[a], f->ids[b], &common);
            if (takes_a) of_b = common;
            else of_a = common;
        }
        f->new_common[at] = takes_a ? had : of_b;
        f->new_ids[at] = takes_a ? f->ids[a++] : f->ids[b++];
        if (takes_a && a < middle) of_a = f->common[a];
        if (!takes_a && b < end) of_b = f->common[b];
    }
}

static cf_result cf__share_sort(void *job) {
    cf__share_finder *f = (cf__share_finder *)job;
    int64_t i, run, *swap;
    for (i = 0; i < f->n; i++) {
        f->ids[i] = i;
        f->common[i] = 0;
    }
    for (run = 1; run < f->n; run *= 2) {
        for (i = 0; i < f->n; i += 2 * run) cf__share_merge(f, i, cf__min(i + run, f->n), cf__min(i + 2 * run, f->n));
        swap = f->ids, f->ids = f->new_ids, f->new_ids = swap;
        swap = f->common, f->common = f->new_common, f->new_common = swap;
    }
    for (i = 0; i < f->n; i++) {
        cf_shared_prefix *share = &f->shares[f->ids[i]];
        share->with = i > 0 ? f->ids[i - 1] : 0;
        share->tokens = f->common[i];
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_shared_prefixes_find(const void *const *tokens, int64_t token_bytes, const int64_t *lengths,
                                                int64_t n, cf_shared_prefix *prefixes, const cf_allocator *allocator,
                                                cf_error *error) {
    static const cf__recipe recipe = {"n", 1, cf__share_scratch, NULL, NULL, cf__share_sort};
    cf__share_finder f = {tokens, token_bytes, lengths, n, prefixes, NULL, NULL, NULL, NULL};
    int64_t i;
    CF__TRY(cf__range(token_bytes, 1, 1024, "token_bytes", error));
    CF__TRY(cf__range(n, 0, CF_MAX_SEQUENCES, "n", error));
    if (n > 0 && tokens == NULL) return cf__fail_null(error, "tokens");
    if (n > 0 && lengths == NULL) return cf__fail_null(error, "lengths");
    if (n > 0 && prefixes == NULL) return cf__fail_null(error, "prefixes");
    for (i = 0; i < n; i++) {
        CF__TRY(cf__inside(lengths[i], 0, CF_MAX_LENGTH, CF_ERROR_ARGUMENT, "lengths", i, "is out of range", error));
        if (lengths[i] > 0 && tokens[i] == NULL)
            return cf__refuse(error, CF_ERROR_ARGUMENT, "tokens", i, "must not be NULL");
    }
    return cf__make(&recipe, &f, allocator, error);
}

/* ================================================================================================================
   >>pack

   Steps: resolve the options, measure the lengths, split long sequences into chains, sort the short ones, give whole
   sequences to ranks, let each rank assign its short ones to units, number the chunks, write the plan.

   A unit is a chain or a standalone chunk, and goes to a rank as a whole. Units 0 .. n_chains - 1 are the chains (their
   room is the free space of the last chunk); all other units are standalone chunks. An item is a short sequence.
   ================================================================================================================
   */

CHUNKFLOW_API double cf_cost_seconds(const cf_pass_cost *cost, int64_t rows, int64_t pairs) {
    double seconds;
    if (cost == NULL) return 0;
    seconds = cost->constant + cf__product(cost->per_token, (double)rows);
    return seconds + cf__product(cost->per_pair, (double)pairs);
}

CHUNKFLOW_API int64_t cf_slice_pairs(int64_t prefix, int64_t length) {
    int64_t before, own, sum, odd = length % 2;
    if (prefix < 0 || length < 0 || length == INT64_MAX || !cf__mul(length, prefix, &before)) return -1;
    if (!cf__mul(odd ? length : length / 2, odd ? length / 2 + 1 : length + 1, &own)) return -1;
    return cf__add(before, own, &sum) ? sum : -1;
}

typedef struct cf__pack_unit {
    int32_t room;        /* free tokens of its open chunk */
    int32_t slices_left; /* slices that its open chunk may still take */
    int32_t n_items;     /* short sequences in it */
    int32_t n_chunks;
    int32_t rank;
    int32_t next;        /* in the bins: first unit of the next larger room in the bucket, -1: none */
    int32_t same;        /* in the bins: next unit with the same room, -1: none */
    int32_t lead;        /* the unit with the root of its tree; without a tree, the unit itself. The lead has the cost
                            of the whole tree and, while ranks are chosen, the tree's chunks */
    int32_t column;      /* in lockstep: column of its first chunk */
    int64_t next_slice;  /* while writing: place of its next item in plan->slices; in trees, its first item */
} cf__pack_unit;

/* A unit that is a chain of a tree. */
typedef struct cf__pack_kin {
    int32_t parent, child, next; /* units: the parent; the last child; the previous child of the same parent */
    int32_t below;               /* as in the plan */
    int32_t chain;               /* its number in the plan */
} cf__pack_kin;

/* Neighbours after sorting: items of one padded size, or chains with equally many chunks. */
typedef struct cf__pack_run {
    int32_t first; /* first item. First fit takes items from here: it raises `first` and lowers `left` */
    int32_t left;
    int32_t next;  /* first fit: this run while it has items left, then the index of a later run that may have some */
    int32_t size;  /* padded tokens, or chunks, per item */
} cf__pack_run;

/* In lockstep: a range of columns in which one rank has no chunk yet. */
typedef struct cf__pack_row {
    int32_t rank, column, n;
} cf__pack_row;

/* Open chunks, sorted by free room: best fit takes the one with the least room that is enough. Rooms are grouped in
   buckets of 2^shift. Within a bucket the distinct rooms form an ascending list, each with a stack of chunks. Usually
   shift is 0, and a bucket is one room. Very large chunks get wider buckets, so that space stays in proportion to the
   items. */
typedef struct cf__pack_bins {
    cf__bits used; /* buckets with a chunk in them */
    int32_t *head; /* (buckets) unit with the least room; valid if the bucket is used */
    int shift;
} cf__pack_bins;

/* CF_SPLIT_COST searches; the limit keeps one sequence from taking minutes */
#define CF__PACK_MAX_COST_SLICES ((int64_t)1 << 22)
#define CF__PACK_LEVELS 17 /* CF_MAX_RANKS, half as many ... 1 */

typedef struct cf__packer {
    cf_pack_desc desc; /* defaults filled in */
    const int64_t *lengths;
    int64_t n;
    cf_error *error;
    cf_pass_cost weights;
    double target;         /* CF_SPLIT_COST: no slice is more expensive, unless it is one alignment unit */
    double chunk_constant; /* while units are given to ranks: constant cost of a chunk, which is then left out of its
                              slices */
    cf__tree tree;
    int64_t from;          /* begin of the stem that is being split; 0 for a sequence */
    /* measured */
    cf_plan head; /* known members of the plan; n_chunks is an upper bound until ranks have their chunks */
    int64_t n_items, n_dependent, longest_chain;
    int64_t max_units, most_chains, most_dependent;
    int64_t item_tokens; /* padded tokens of all items */
    int64_t most_parts;    /* upper bound of the number of parts of cp groups */
    double mean_cost;      /* cost of a rank if all are equal and no sequence is spread */
    /* working space */
    cf_chain *chains;       /* (n_chains) first_chunk counts only dependent chunks here, as in cuts */
    int32_t *cuts;          /* (n_dependent) lengths of the slices of all chains */
    uint64_t *items;        /* (n_items) length << 32 | sequence. Longest first; for next fit in input order. Has room
                               for n_chains more, for the lower bound */
    uint64_t *spare;        /* as large as items */
    cf__pack_run *runs;     /* (n_items + 1), or (chunk_size + 1) if that is less; in lockstep at least (n_chains +
                               1) */
    int32_t *unit_of;       /* (n_items) the unit of each item */
    cf__pack_unit *units;   /* (max_units) */
    int32_t *order;         /* (max_units) units in the order of their chunks */
    int32_t *sorted;        /* (max_units) */
    double *item_costs;     /* (n_items) cost of each item; this and the next five only with more than one rank */
    double *costs;          /* (max_units) cost of each unit */
    double *loads;          /* (n_ranks) cost of each rank */
    int32_t *heap;          /* (n_ranks) */
    int32_t *starts;        /* (n_ranks) */
    int64_t *steps;         /* (n_ranks) chunks of each rank */
    /* only in lockstep */
    cf__pack_row *rows;     /* (n_chains + n_ranks) ranges of columns in which chains leave a rank free */
    double *last_costs;     /* (n_chains) cost of each chain's last chunk */
    double *columns;        /* (most_columns) cost of each column's most expensive chunk */
    int64_t most_columns, most_rows;
    int64_t n_rows, n_bands, first_extra; /* n_bands: number of columns in all bands (see "in step"); first_extra: first
                                             unit that is in no band */
    int32_t levels[CF__PACK_LEVELS + 1]; /* first run of each width: the widest cp groups, half as wide, ..., no cp
                                            group; last, the end of the runs */
    /* only with cp groups; by sequence, except begins */
    double *whole_costs;    /* (n) cost without the constant of its chunks */
    int32_t *by_cost;       /* (n) most expensive first */
    int32_t *widths;        /* (n) number of ranks over which a sequence is spread */
    int64_t *begins;        /* (n_dependent) begin of each slice of a part of a cp group */
    double slice_target;    /* CF_SPLIT_COST: no slice is more expensive; DBL_MAX: slices are full */
    cf__pack_bins bins;     /* best fit: open chunks by room */
    /* only with shared rows; an item is then a bush: length << 32 | node */
    cf__pack_kin *kin;      /* (max_units) */
    int32_t *next_item;     /* (n_items) next item of the same unit; -1: none */
    double *trunks;         /* (n) cost of the rows that a split of a tree copies; only with more than one rank */
    uint64_t *third;        /* (n) third array beside items and spare */
    /* results */
    int64_t n_runs, n_units;
    int64_t n_parts, n_part_cuts;   /* units 0 .. n_parts - 1 are parts of cp groups' sequences */
    int64_t n_wide;         /* by_cost[0 .. n_wide) has all sequences of cp groups */
    int64_t first_free;     /* items before this one stay in their tree's units */
    cf_plan *plan;
} cf__packer;

/* ---- options ---- */

CHUNKFLOW_API cf_pack_desc cf_pack_defaults(const cf_pack_desc *desc) {
    cf_pack_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    if (full.method == CF_PACK_DEFAULT) full.method = CF_PACK_BEST_FIT;
    if (full.max_cp > 1) full.lockstep = 1;
    if (full.split == CF_SPLIT_DEFAULT) full.split = full.lockstep ? CF_SPLIT_COST : CF_SPLIT_FULL;
    if (full.align == 0) full.align = 1;
    if (full.n_ranks == 0) full.n_ranks = 1;
    if (full.min_shared_prefix == 0 && full.shared_prefixes != NULL) full.min_shared_prefix = CF_MIN_SHARED_PREFIX;
    return full;
}

CF__NAMES(cf_pack_method_name, cf_pack_method, CF_PACK_METHODS, "?")
CF__NAMES(cf_split_method_name, cf_split_method, CF_SPLIT_METHODS, "?")

static cf_result cf__pack_check_desc(const cf_pack_desc *desc, cf_error *error) {
    const cf__member members[] = {{"chunk_size", desc->chunk_size, 1, CF_MAX_CHUNK_SIZE, CF_ERROR_LIMIT},
                                  {"align", desc->align, 1, desc->chunk_size, CF_ERROR_ARGUMENT},
                                  {"max_slices", desc->max_slices, 0, INT64_MAX, CF_ERROR_LIMIT},
                                  {"n_ranks", desc->n_ranks, 1, CF_MAX_RANKS, CF_ERROR_LIMIT},
                                  {"max_cp", desc->max_cp, 0, desc->n_ranks, CF_ERROR_ARGUMENT},
                                  {"min_shared_prefix", desc->min_shared_prefix, 0, INT64_MAX, CF_ERROR_LIMIT}};
    CF__TRY(cf__check_members(members, CF__COUNT(members), CF_ERROR_ARGUMENT, error));
    CF__TRY(cf__choice((int)desc->method, CF_PACK_DEFAULT, CF_PACK_COUNT - 1, "method", error));
    CF__TRY(cf__choice((int)desc->split, CF_SPLIT_DEFAULT, CF_SPLIT_COUNT - 1, "split", error));
    CF__TRY(cf__check_flag(desc->lockstep, "lockstep", -1, error));
    CF__TRY(cf__check_flag(desc->no_tails, "no_tails", -1, error));
    CF__TRY(cf__check_flag(desc->no_copies, "no_copies", -1, error));
    if (desc->chunk_size % desc->align != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "align", -1, cf__divisor_below(desc->chunk_size, desc->align),
                        desc->align, "must divide chunk_size");
    if (desc->lockstep && desc->method != CF_PACK_BEST_FIT)
        return cf__fail(error, CF_ERROR_ARGUMENT, "method", -1, CF_PACK_BEST_FIT, (int)desc->method,
                        "ranks in step, and cp groups, are packed by best fit");
    if (desc->max_cp > 1 && desc->shared_prefixes != NULL)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "max_cp", -1, "trees are not spread over several ranks");
    if (desc->lockstep && desc->shared_prefixes != NULL)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "lockstep", -1, "trees are not laid out for ranks in step");
    CF__TRY(cf__check_real(desc->cp_row_seconds, "cp_row_seconds", -1, error));
    CF__TRY(cf__check_real(desc->cp_chunk_seconds, "cp_chunk_seconds", -1, error));
    CF__TRY(cf__check_real(desc->cost.constant, "cost.constant", -1, error));
    CF__TRY(cf__check_real(desc->cost.per_token, "cost.per_token", -1, error));
    return cf__check_real(desc->cost.per_pair, "cost.per_pair", -1, error);
}

/* ---- cutting long sequences ---- */

static int cf__pack_in_step(const cf__packer *p) { return p->desc.lockstep && p->desc.n_ranks > 1; }

static int64_t cf__pack_padded(const cf__packer *p, int64_t length) { return cf__round_up(length, p->desc.align); }

/* Returns the tokens that a short sequence occupies in a chunk: at least the chunk's size divided by its maximum number
   of slices. */
static int64_t cf__pack_item_extent(const cf__packer *p, int64_t length) {
    int64_t least = p->desc.max_slices > 0 ? cf__div_up(p->desc.chunk_size, p->desc.max_slices) : 0;
    return cf__max(cf__pack_padded(p, length), least);
}

static double cf__pack_slice_cost(const cf__packer *p, int64_t begin, int64_t length) {
    return cf_cost_seconds(&p->weights, cf__pack_padded(p, length), cf_slice_pairs(begin, length));
}

/* Guesses how many alignment units from `begin` on cost as much as the target: Newton's method, from above, for the
   root of a parabola. */
static int64_t cf__pack_guess_units(const cf__packer *p, int64_t begin, int64_t most) {
    double unit = (double)p->desc.align, left = p->target - p->weights.constant, units;
    double each = (p->weights.per_token + p->weights.per_pair * ((double)begin + 0.5)) * unit;
    double growth = p->weights.per_pair * unit * unit;
    int i;
    for (units = left / each, i = 0; i < 2; i++)
        units = (left + growth * units * units / 2) / (each + growth * units);
    return units >= 1 && units < (double)most ? (int64_t)units : most; /* rounding does not harm a guess */
}

/* Returns the length of the longest slice from `begin` that does not cost more than the target: at most chunk_size, at
   least one alignment unit. */
static int64_t cf__pack_cut_by_cost(cf__packer *p, const cf_chain *chain, int64_t begin) {
    int64_t rest = chain->tokens - begin, unit = p->desc.align, guess = 0;
    int64_t low = 1, high = cf__div_up(cf__min(rest, p->desc.chunk_size), unit);
    int tries;
    /* In alignment units: `low` fits (or is the minimum), high + 1 does not. It tries all units first, then the guess,
       then the guess's neighbour. */
    for (tries = 0; low < high; tries++) {
        int64_t middle = tries == 0 ? high : low + (high - low + 1) / 2;
        if (tries == 1) guess = cf__pack_guess_units(p, p->from + begin, high);
        if (tries == 1 || tries == 2) middle = cf__max(low + 1, cf__min(guess + tries - 1, high));
        if (cf__pack_slice_cost(p, p->from + begin, cf__min(middle * unit, rest)) <= p->target) low = middle;
        else high = middle - 1;
    }
    return low * unit; /* or the rest of the sequence, if that is less */
}

/* Splits a long sequence and returns the number of slices, but stops beyond `most`. lengths: receives the slices'
   lengths; may be NULL. */
static int64_t cf__pack_make_cuts(cf__packer *p, const cf_chain *chain, int64_t most, int32_t *lengths) {
    int64_t begin = 0, i, n = chain->n_chunks, units = cf__div_up(chain->tokens, p->desc.align);
    for (i = 0; begin < chain->tokens && i <= most; i++) {
        int64_t length = p->desc.chunk_size;
        if (p->desc.split == CF_SPLIT_COST) length = cf__pack_cut_by_cost(p, chain, begin);
        /* The last slices get the units that are left over. The very last one may be shorter by part of a unit. */
        if (p->desc.split == CF_SPLIT_EVEN) length = (units / n + (i >= n - units % n)) * p->desc.align;
        length = cf__min(length, chain->tokens - begin);
        if (lengths != NULL && !CF__NEVER(i >= most)) lengths[i] = (int32_t)length;
        begin += length;
    }
    return i;
}

/* Finds the target cost of CF_SPLIT_COST. It starts slightly above the mean cost of full slices, so that rounding
   cannot push it below the cost of equal slices. Each slice is then full or costs at least about the mean, so there are
   at most about twice as many slices. Bisection lowers the target while their number stays the same. Its steps are
   capped: a sequence of millions of slices must not take seconds. */
static cf_result cf__pack_find_target(cf__packer *p, cf_chain *chain) {
    int64_t full = chain->n_chunks, size = p->desc.chunk_size, i, n, steps;
    double sum = 0, low = 0, high;
    CF__TRY(cf__inside(full, 0, CF__PACK_MAX_COST_SLICES, CF_ERROR_LIMIT, "lengths", chain->sequence,
                       "makes more slices than the cost can be evened out over", p->error));
    for (i = 0; i < full; i++)
        sum += cf__pack_slice_cost(p, p->from + i * size, cf__min(size, chain->tokens - i * size));
    high = sum / (double)full;
    high += cf__product(high, 1e-9);
    p->target = high;
    n = cf__pack_make_cuts(p, chain, INT64_MAX - 1, NULL);
    steps = cf__max(2, cf__min(48, (4 * CF__PACK_MAX_COST_SLICES) / n));
    for (i = 0; i < steps && high - low > cf__product(high, 1e-7); i++) {
        p->target = low + (high - low) / 2;
        if (cf__pack_make_cuts(p, chain, n, NULL) <= n) high = p->target;
        else low = p->target;
    }
    p->target = high;
    chain->n_chunks = n;
    return CF_OK;
}

/* Splits a chain in lockstep, where one target for all chains makes neighbouring slices cost alike. The target is at
   least the cost of a full slice at the start of a sequence. */
static cf_result cf__pack_cut_in_step(cf__packer *p, cf_chain *chain) {
    p->target = cf__most(p->slice_target, cf__pack_slice_cost(p, 0, p->desc.chunk_size));
    if (chain->n_chunks <= CF__PACK_MAX_COST_SLICES)
        chain->n_chunks = cf__pack_make_cuts(p, chain, CF__PACK_MAX_COST_SLICES, NULL);
    return cf__inside(chain->n_chunks, 0, CF__PACK_MAX_COST_SLICES, CF_ERROR_LIMIT, "lengths", chain->sequence,
                      "makes more slices than may be cut by cost", p->error);
}

/* Decides how many slices a long sequence gets. */
static cf_result cf__pack_plan_chain(cf__packer *p, int64_t sequence, int64_t tokens, cf_chain *chain) {
    chain->sequence = sequence;
    chain->tokens = tokens;
    chain->cp = 0;
    chain->n_chunks = cf__div_up(chain->tokens, p->desc.chunk_size);
    CF__TRY(cf__inside(chain->n_chunks, 0, CF_MAX_CHUNKS, CF_ERROR_LIMIT, "lengths", sequence, "makes too many chunks",
                       p->error));
    if (p->desc.split != CF_SPLIT_COST) return CF_OK;
    return cf__pack_in_step(p) ? cf__pack_cut_in_step(p, chain) : cf__pack_find_target(p, chain);
}

/* Returns the maximum rounds of a cp group of `width` ranks for a sequence. After half of them, slices are full. */
static int64_t cf__pack_most_rounds(const cf__packer *p, int64_t length, int64_t width) {
    return length <= p->desc.chunk_size ? 1 : 2 * cf__div_up(length, width * p->desc.chunk_size) + 6;
}

/* ---- measuring ---- */

/* Adds a length to the sum of the earlier ones. */
static cf_result cf__pack_add_length(const int64_t *lengths, int64_t i, int64_t *sum, cf_error *error) {
    if (lengths[i] < 0) return cf__fail(error, CF_ERROR_ARGUMENT, "lengths", i, 0, lengths[i], "is negative");
    if (cf__add(*sum, lengths[i], sum)) return CF_OK;
    return cf__refuse(error, CF_ERROR_OVERFLOW, "lengths", i,
                      "the sum of the lengths up to here does not fit in 64 bits");
}

static cf_result cf__pack_check_lengths(cf__packer *p) {
    int64_t i;
    CF__TRY(cf__range(p->n, 0, CF_MAX_SEQUENCES, "n", p->error));
    if (p->n > 0 && p->lengths == NULL) return cf__fail_null(p->error, "lengths");
    for (i = 0; i < p->n; i++) {
        int64_t length = p->lengths[i];
        if (length > CF_MAX_LENGTH)
            return cf__fail(p->error, CF_ERROR_LIMIT, "lengths", i, CF_MAX_LENGTH, length, "is too long");
        CF__TRY(cf__pack_add_length(p->lengths, i, &p->head.n_tokens, p->error));
        if (length > p->desc.chunk_size && cf_slice_pairs(length, p->desc.chunk_size) < 0)
            return cf__refuse(p->error, CF_ERROR_OVERFLOW, "pairs", i,
                              "the attention pairs of a chunk of this sequence do not fit in 64 bits");
    }
    return CF_OK;
}

/* Returns the caller's cost. Without one, returns a cost with which all rows together cost as much as all pairs. */
static cf_pass_cost cf__pack_weights(const cf_pass_cost *given, double rows, double pairs) {
    cf_pass_cost weights = *given;
    if (weights.constant > 0 || weights.per_token > 0 || weights.per_pair > 0 || !(rows > 0)) return weights;
    weights.per_token = 1 / rows;
    weights.per_pair = 1 / pairs;
    return weights;
}

/* Bounds the memory that cp groups need, and limits their parts to most_parts. Each width of group has one last band of
   columns. Returns an upper bound on the columns of all these last bands together. */
static int64_t cf__pack_bound_cp_groups(cf__packer *p) {
    int64_t i, size = p->desc.chunk_size, longest = 0;
    if (p->desc.max_cp < 2) return 0;
    p->most_parts = cf__min(16 * p->desc.n_ranks, p->n * p->desc.max_cp);
    for (i = 0; i < p->n; i++) {
        longest = cf__max(longest, p->lengths[i]);
        if (p->lengths[i] > size) p->n_dependent += 2 * cf__div_up(p->lengths[i], size);
    }
    p->n_dependent += 8 * p->most_parts;
    p->head.n_chains += p->most_parts;
    return 2 * cf__div_up(longest, size) + 8 * CF__PACK_LEVELS;
}

/* Returns the maximum chunks of a rank. A rank has no more tokens than 1.5 times the mean plus the longest sequence
   (cf__pack_give_things). Any two of its open chunks together hold more than one chunk's tokens, as in
   cf__pack_bound_counts. */
static int64_t cf__pack_most_steps(const cf__packer *p) {
    int64_t size = p->desc.chunk_size, longest = p->longest_chain * size, tokens = p->n_dependent * size, i;
    for (i = 0; i < p->n; i++) {
        if (p->lengths[i] == 0 || p->lengths[i] > size) continue;
        tokens += cf__pack_item_extent(p, p->lengths[i]);
        longest = cf__max(longest, cf__pack_item_extent(p, p->lengths[i]));
    }
    tokens = cf__div_up(tokens, p->desc.n_ranks);
    tokens += tokens / 2 + longest;
    return cf__min(tokens / size * 2 + tokens % size * 2 / size + 1, p->n_dependent + p->n_items);
}

/* Returns 1 if the plan's size is known only after packing: for trees on several ranks, and for cp groups, whose widths
   decide how many chunks all ranks have. Bounds would be a hundred times too high. */
static int cf__pack_tells_size(const cf__packer *p) {
    return p->desc.max_cp > 1 || (p->tree.shares != NULL && p->desc.n_ranks > 1);
}

/* Finds upper bounds of units and chunks. */
static cf_result cf__pack_bound_counts(cf__packer *p) {
    int64_t ranks = p->desc.n_ranks, n_bins, cp_steps = cf__pack_bound_cp_groups(p);
    /* Any two chunks that are not full by count hold more than chunk_size together; otherwise one would have taken the
       content of the other (next fit: any two neighbours). In next fit a long sequence may close one more chunk. */
    n_bins = 2 * cf__div_up(p->item_tokens, p->desc.chunk_size) + p->head.n_chains + 1;
    if (p->desc.max_slices > 0) n_bins += p->n_items / p->desc.max_slices;
    if (ranks > 1) n_bins = p->n_items; /* before ranks are chosen, each item is a unit */
    n_bins = cf__min(n_bins, p->n_items);
    p->max_units = p->head.n_chains + n_bins + (cf__pack_in_step(p) ? 2 * p->n_items : 0);
    CF__TRY(cf__inside(p->max_units + p->n_dependent, 0, CF_MAX_CHUNKS, CF_ERROR_LIMIT, "n_chunks", -1,
                       "the batch may need too many chunks", p->error));
    CF__TRY(cf__inside(p->n_dependent + p->n_items, 0, CF_MAX_SLICES, CF_ERROR_LIMIT, "n_slices", -1,
                       "the batch may need too many slices", p->error));
    p->head.n_chunks = p->n_dependent + n_bins;
    if (ranks > 1 && !p->desc.lockstep) p->head.n_chunks = ranks * cf__pack_most_steps(p);
    /* In lockstep, all bands of a level except the last are at least half filled by its chains. */
    if (cf__pack_in_step(p))
        p->head.n_chunks = ranks * (cf__div_up(p->head.n_chunks, ranks) + p->longest_chain +
                                    cf__div_up(p->n_dependent, ranks) + 1 + cp_steps);
    p->most_columns = p->head.n_chunks / ranks;
    p->most_chains = p->head.n_chains;
    p->most_dependent = p->n_dependent;
    p->head.n_chunks = cf__pack_tells_size(p) ? 0 : cf__min(p->head.n_chunks, CF_MAX_CHUNKS);
    return CF_OK;
}

/* Finds upper bounds of every array that trees need, before they are built. After packing, all open chunks of a stem or
   rank except one are half full, or full by count. */
static cf_result cf__pack_measure_trees(cf__packer *p) {
    cf__tree *t = &p->tree;
    int64_t rows = t->most_rows / p->desc.chunk_size, full = rows + t->most_stems, n_bins, i;
    for (i = 0; i < p->n; i++) p->head.n_empty += p->lengths[i] == 0;
    if (p->desc.method != CF_PACK_BEST_FIT)
        return cf__fail(p->error, CF_ERROR_ARGUMENT, "method", -1, CF_PACK_BEST_FIT, (int)p->desc.method,
                        "trees are packed by best fit");
    p->n_items = p->n;
    p->n_dependent = p->desc.split == CF_SPLIT_COST ? 2 * full + 1 : full;
    n_bins = 2 * rows + t->most_stems + 3;
    if (p->desc.max_slices > 0) n_bins += p->n / p->desc.max_slices;
    n_bins = cf__min(p->n, n_bins);
    CF__TRY(cf__inside(p->n_dependent + n_bins, 0, CF_MAX_CHUNKS, CF_ERROR_LIMIT, "n_chunks", -1,
                       "the batch may need too many chunks", p->error));
    CF__TRY(cf__inside(p->n_dependent + t->most_nodes, 0, CF_MAX_SLICES, CF_ERROR_LIMIT, "n_slices", -1,
                       "the batch may need too many slices", p->error));
    /* plus all the things that are given to ranks */
    p->max_units = t->most_stems + (p->desc.n_ranks > 1 ? p->n : n_bins);
    if (cf__pack_tells_size(p)) return CF_OK;
    p->head.n_slices = t->most_nodes + p->n_dependent;
    p->head.n_chains = p->max_units;
    p->head.n_chunks = p->n_dependent + n_bins;
    return CF_OK;
}

static cf_result cf__pack_measure(cf__packer *p) {
    double rows = 0, pairs = 0;
    int64_t i;
    CF__TRY(cf__pack_check_lengths(p));
    if (p->tree.shares != NULL) CF__TRY(cf__tree_measure(&p->tree));
    if (p->desc.n_ranks > 1 || p->desc.split == CF_SPLIT_COST) {
        for (i = 0; i < p->n; i++) {
            rows += (double)cf__pack_padded(p, p->lengths[i]);
            pairs += cf__product((double)p->lengths[i], (double)p->lengths[i] + 1) / 2;
        }
        p->weights = cf__pack_weights(&p->desc.cost, rows, pairs);
    }
    if (p->tree.shares != NULL) return cf__pack_measure_trees(p);
    for (i = 0; i < p->n; i++) {
        cf_chain chain;
        int64_t length = p->lengths[i];
        if (length == 0) {
            p->head.n_empty++;
        } else if (length <= p->desc.chunk_size) {
            p->n_items++;
            p->item_tokens += cf__pack_padded(p, length);
        } else {
            CF__TRY(cf__pack_plan_chain(p, i, length, &chain));
            p->head.n_chains++;
            p->n_dependent += chain.n_chunks;
            p->longest_chain = cf__max(p->longest_chain, chain.n_chunks);
        }
    }
    return cf__pack_bound_counts(p);
}

/* Lays out the bins. There are at most 65536 + 16 buckets per item, so the bins take no more memory than the items. */
static void cf__pack_layout_bins(cf__packer *p, cf__carver *carver) {
    cf__pack_bins *bins = &p->bins;
    int64_t most = 65536 + 16 * p->n_items, n;
    for (bins->shift = 0; (p->desc.chunk_size >> bins->shift) >= most; bins->shift++) continue;
    n = (p->desc.chunk_size >> bins->shift) + 1;
    bins->head = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    cf__bits_layout(&bins->used, n, carver);
}

static void cf__pack_layout_trees(cf__packer *p, cf__carver *carver) {
    if (p->tree.shares == NULL) return;
    cf__tree_layout(&p->tree, carver);
    p->kin = (cf__pack_kin *)cf__take(carver, p->max_units, sizeof(cf__pack_kin));
    p->next_item = (int32_t *)cf__take(carver, p->n_items, sizeof(int32_t));
    p->trunks = (double *)cf__take(carver, p->desc.n_ranks > 1 ? p->n : 0, sizeof(double));
    p->third = (uint64_t *)cf__take(carver, p->n, sizeof(uint64_t));
    p->tree.items = p->spare; /* trees no longer use this array when items and units need it */
    p->tree.spare = p->third;
}

static void cf__pack_scratch(void *job, cf__carver *carver) {
    cf__packer *p = (cf__packer *)job;
    int64_t ranks = p->desc.n_ranks > 1 ? p->desc.n_ranks : 0;
    int64_t n_cut = p->tree.shares != NULL ? p->tree.most_stems : p->head.n_chains;
    int64_t n_runs = cf__max(cf__min(p->n_items, p->desc.chunk_size), cf__pack_in_step(p) ? p->head.n_chains : 0);
    p->chains = (cf_chain *)cf__take(carver, n_cut, sizeof(cf_chain));
    p->cuts = (int32_t *)cf__take(carver, p->n_dependent, sizeof(int32_t));
    p->items = (uint64_t *)cf__take(carver, p->n_items + n_cut, sizeof(uint64_t));
    p->spare = (uint64_t *)cf__take(carver, p->n_items + n_cut, sizeof(uint64_t));
    p->runs = (cf__pack_run *)cf__take(carver, n_runs + 1, sizeof(cf__pack_run));
    p->unit_of = (int32_t *)cf__take(carver, p->n_items, sizeof(int32_t));
    p->units = (cf__pack_unit *)cf__take(carver, p->max_units, sizeof(cf__pack_unit));
    p->order = (int32_t *)cf__take(carver, p->max_units, sizeof(int32_t));
    p->sorted = (int32_t *)cf__take(carver, p->max_units, sizeof(int32_t));
    p->item_costs = (double *)cf__take(carver, ranks > 0 ? p->n_items : 0, sizeof(double));
    p->costs = (double *)cf__take(carver, ranks > 0 ? p->max_units : 0, sizeof(double));
    p->loads = (double *)cf__take(carver, ranks, sizeof(double));
    p->heap = (int32_t *)cf__take(carver, ranks, sizeof(int32_t));
    p->starts = (int32_t *)cf__take(carver, ranks, sizeof(int32_t));
    p->steps = (int64_t *)cf__take(carver, ranks, sizeof(int64_t));
    if (cf__pack_in_step(p)) {
        p->most_rows = p->head.n_chains + ranks;
        p->rows = (cf__pack_row *)cf__take(carver, p->most_rows, sizeof(cf__pack_row));
        p->last_costs = (double *)cf__take(carver, p->head.n_chains, sizeof(double));
        p->columns = (double *)cf__take(carver, p->most_columns, sizeof(double));
    }
    if (p->desc.max_cp > 1) {
        p->whole_costs = (double *)cf__take(carver, p->n, sizeof(double));
        p->begins = (int64_t *)cf__take(carver, p->n_dependent, sizeof(int64_t));
        p->by_cost = (int32_t *)cf__take(carver, p->n, sizeof(int32_t));
        p->widths = (int32_t *)cf__take(carver, p->n, sizeof(int32_t));
    }
    cf__pack_layout_bins(p, carver);
    cf__pack_layout_trees(p, carver);
}

/* ---- units and items ---- */

static int64_t cf__pack_item_length(uint64_t item) { return (int64_t)(item >> 32); }
static int64_t cf__pack_item_sequence(uint64_t item) { return (int64_t)(item & 0xffffffffu); }

static int32_t cf__pack_item_size(const cf__packer *p, int64_t i) {
    return (int32_t)cf__pack_padded(p, cf__pack_item_length(p->items[i]));
}

/* Returns 1 if a sequence is spread over a cp group. */
static int cf__pack_is_spread(const cf__packer *p, int64_t sequence) {
    return p->widths != NULL && p->widths[sequence] > 1;
}

/* Returns the index into cuts of a chain's i-th slice. In a cp group the cuts of all parts alternate. */
static int64_t cf__pack_cut(const cf_chain *chain, int64_t i) {
    return chain->first_chunk + i * cf__max(chain->cp, 1);
}

/* Returns a unit without items: an empty chunk, or the space after a chain's last slice in its chunk. */
static cf__pack_unit cf__pack_empty_unit(const cf__packer *p, int64_t id) {
    cf__pack_unit unit;
    memset(&unit, 0, sizeof unit);
    unit.room = (int32_t)p->desc.chunk_size;
    unit.slices_left = p->desc.max_slices > 0 ? (int32_t)cf__min(p->desc.max_slices, INT32_MAX) : INT32_MAX;
    unit.n_chunks = 1;
    unit.column = -1;
    unit.lead = (int32_t)id;
    if (id < p->head.n_chains) {
        const cf_chain *chain = &p->chains[id];
        unit.n_chunks = (int32_t)chain->n_chunks;
        unit.room -= (int32_t)cf__pack_padded(p, p->cuts[cf__pack_cut(chain, chain->n_chunks - 1)]);
        unit.slices_left = p->desc.no_tails ? 0 : unit.slices_left - 1;
    }
    return unit;
}

static int32_t cf__pack_open_unit(cf__packer *p) {
    p->units[p->n_units] = cf__pack_empty_unit(p, p->n_units);
    return (int32_t)p->n_units++;
}

/* Splits a planned chain, and opens a unit for it. */
static void cf__pack_cut_chain(cf__packer *p, cf_chain *chain, int64_t *n_cuts) {
    chain->first_chunk = *n_cuts;
    *n_cuts += chain->n_chunks;
    (void)cf__pack_make_cuts(p, chain, chain->n_chunks, &p->cuts[chain->first_chunk]);
    (void)cf__pack_open_unit(p);
}

/* Fills in chains and cuts, and opens a unit for each chain. The cuts fit: at least as many slices were counted when
   the batch was measured. */
static void cf__pack_collect_chains(cf__packer *p) {
    int64_t i, n_cuts = p->n_part_cuts;
    for (i = 0; i < p->n && p->n_units < p->head.n_chains; i++) {
        cf_chain *chain = &p->chains[p->n_units];
        if (p->lengths[i] <= p->desc.chunk_size || cf__pack_is_spread(p, i)) continue;
        (void)cf__pack_plan_chain(p, i, p->lengths[i], chain);
        if (CF__NEVER(n_cuts + chain->n_chunks > p->n_dependent)) break;
        cf__pack_cut_chain(p, chain, &n_cuts);
    }
    p->head.n_chains = p->n_units;
    p->n_dependent = n_cuts;
}

/* Fills in items, in input order. */
static void cf__pack_collect_items(cf__packer *p) {
    int64_t i, n = 0;
    for (i = 0; i < p->n; i++) {
        int64_t length = p->lengths[i];
        if (length > 0 && length <= p->desc.chunk_size && !cf__pack_is_spread(p, i))
            p->items[n++] = (uint64_t)length << 32 | (uint64_t)i;
    }
    p->n_items = n;
}

/* Adds item or chain i to the last run if that began at `first` or later and has this size; otherwise begins a run.
   They come sorted by falling size. */
static inline void cf__pack_extend_runs(cf__packer *p, int64_t first, int64_t i, int32_t size) {
    if (p->n_runs == first || p->runs[p->n_runs - 1].size != size) {
        const cf__pack_run run = {(int32_t)i, 0, (int32_t)p->n_runs, size};
        p->runs[p->n_runs++] = run;
        p->runs[p->n_runs].next = (int32_t)p->n_runs; /* ends every search */
    }
    p->runs[p->n_runs - 1].left++;
}

/* Groups sorted items, first .. end - 1, into runs of one padded size. */
static void cf__pack_find_runs(cf__packer *p, int64_t first, int64_t end) {
    int64_t i;
    p->n_runs = p->runs[0].next = 0;
    for (i = first; i < end; i++) cf__pack_extend_runs(p, 0, i, cf__pack_item_size(p, i));
}

/* ---- lower bound ---- */

/* Returns Martello and Toth's L2 bound, the best over all thresholds t <= C / 2, with chunks of C tokens. A size above
   C - t shares its chunk with nothing of size t or more. A size above C / 2, up to C - t, opens its own chunk, whose
   room sizes of t .. C / 2 may fill; the remaining ones need more chunks. Smaller sizes are ignored. t = 0 gives total
   / C. `sizes` is in descending order. */
static int64_t cf__pack_l2_bound(const uint64_t *sizes, int64_t n, int64_t chunk_size) {
    int64_t big = 0, alone, i, free_space = 0, best = 0, small_sum = 0;
    while (big < n && (int64_t)sizes[big] * 2 > chunk_size) big++;
    alone = big; /* sizes[alone .. big) may share with sizes of at least the threshold */
    for (i = big; i < n; i++) {
        int64_t t = (int64_t)sizes[i];
        small_sum += t;
        while (alone > 0 && (int64_t)sizes[alone - 1] <= chunk_size - t)
            free_space += chunk_size - (int64_t)sizes[--alone];
        if (small_sum > free_space) best = cf__max(best, cf__div_up(small_sum - free_space, chunk_size));
    }
    return big + best;
}

#define CF__PACK_TAIL ((uint64_t)1 << 31) /* no sequence has this bit */

/* Sorts the items, longest first, and finds the lower bound. Items share chunks with each other and with the last
   chunks of chains, if these may be filled. So the tails are included while the bound is computed. */
static void cf__pack_sort_and_bound(cf__packer *p) {
    int64_t i, kept = 0, n_tails = p->desc.no_tails ? 0 : p->head.n_chains, n = p->n_items + n_tails, bound;
    for (i = 0; i < n_tails; i++)
        p->items[p->n_items + i] = (uint64_t)(p->desc.chunk_size - p->units[i].room) << 32 | CF__PACK_TAIL;
    cf__sort(&p->items, &p->spare, n, NULL, ~(uint64_t)0);
    for (i = 0; i < n; i++) {
        p->spare[i] = (uint64_t)cf__pack_item_size(p, i);
        if ((p->items[i] & CF__PACK_TAIL) == 0) p->items[kept++] = p->items[i];
    }
    bound = cf__pack_l2_bound(p->spare, n, p->desc.chunk_size);
    if (p->desc.max_slices > 0) bound = cf__max(bound, cf__div_up(n, p->desc.max_slices));
    p->head.lower_bound = cf__max(p->n_dependent - n_tails + bound, p->n_dependent);
}

/* ---- bins: open chunks by room ---- */

/* Inserts a unit, unless it is full. */
static void cf__pack_bins_insert(cf__packer *p, int32_t id) {
    cf__pack_unit *unit = &p->units[id], *units = p->units;
    int32_t room = unit->room, *link;
    int64_t bucket = room >> p->bins.shift;
    int is_known;
    if (room == 0 || unit->slices_left == 0) return;
    link = &p->bins.head[bucket];
    if (!cf__bits_has(&p->bins.used, bucket)) {
        *link = -1;
        cf__bits_put(&p->bins.used, bucket, 1);
    }
    while (*link >= 0 && units[*link].room < room) link = &units[*link].next;
    is_known = *link >= 0 && units[*link].room == room;
    unit->same = is_known ? *link : -1;
    unit->next = is_known ? units[*link].next : *link;
    *link = id;
}

/* Removes the unit with the least room of at least `size`, and returns it; -1 if there is none. */
static int32_t cf__pack_bins_take(cf__packer *p, int32_t size) {
    cf__pack_unit *units = p->units;
    int64_t bucket = cf__bits_next(&p->bins.used, size >> p->bins.shift);
    for (; bucket >= 0; bucket = cf__bits_next(&p->bins.used, bucket + 1)) {
        int32_t *link = &p->bins.head[bucket], id, same;
        while (*link >= 0 && units[*link].room < size) link = &units[*link].next;
        id = *link;
        if (id < 0) continue; /* all rooms of the first bucket may be too small */
        same = units[id].same;
        if (same >= 0) units[same].next = units[id].next;
        *link = same >= 0 ? same : units[id].next;
        if (p->bins.head[bucket] < 0) cf__bits_put(&p->bins.used, bucket, 0);
        return id;
    }
    return -1;
}

/* ---- assigning items to units ---- */

/* Returns how many of `left` items of one size fit into a unit. */
static int32_t cf__pack_fit(const cf__pack_unit *unit, int32_t size, int32_t left) {
    return (int32_t)cf__min(cf__min(left, unit->slices_left), unit->room / size);
}

static void cf__pack_fill(cf__pack_unit *unit, int32_t size, int32_t count) {
    unit->room -= size * count;
    unit->slices_left -= count;
    unit->n_items += count;
}

static void cf__pack_assign(cf__packer *p, int32_t first_item, int32_t count, int32_t unit) {
    int32_t i;
    for (i = 0; i < count; i++) p->unit_of[first_item + i] = unit;
}

/* Packs all runs by best fit, longest first, into the units in the bins and new ones. Items of one size are placed
   together: after one of them, its unit has the least room of all that are large enough, so the next item would go
   there as well. */
static void cf__pack_best_fit(cf__packer *p) {
    int64_t i;
    for (i = 0; i < p->n_runs; i++) {
        int32_t item = p->runs[i].first, left = p->runs[i].left, size = p->runs[i].size;
        while (left > 0) {
            int32_t unit = cf__pack_bins_take(p, size), count;
            if (unit < 0) unit = cf__pack_open_unit(p);
            count = cf__pack_fit(&p->units[unit], size, left);
            cf__pack_assign(p, item, count, unit);
            cf__pack_fill(&p->units[unit], size, count);
            item += count;
            left -= count;
            cf__pack_bins_insert(p, unit);
        }
    }
}

/* Returns the first of the runs low .. high - 1, by falling size, that fits into `room` and has items left; high or
   more if there is none. An empty run points to a later run; every walk shortens the way to the next run with items. */
static inline int32_t cf__pack_largest_run(cf__packer *p, int32_t low, int32_t high, int64_t room) {
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (p->runs[middle].size <= room) high = middle;
        else low = middle + 1;
    }
    while (p->runs[low].next != low) low = p->runs[low].next = p->runs[p->runs[low].next].next;
    return low;
}

/* Takes items or chains out of a run. Returns the first of them. */
static inline int32_t cf__pack_use_run(cf__packer *p, int32_t at, int32_t count) {
    cf__pack_run *run = &p->runs[at];
    run->first += count;
    run->left -= count;
    if (run->left == 0) run->next = at + 1;
    return run->first - count;
}

/* Fills a unit from the runs, always with the largest item that fits. Returns the number of items. With `dry` nothing
   is recorded except in the runs. */
static int32_t cf__pack_fill_largest(cf__packer *p, int32_t id, cf__pack_unit *unit, int dry) {
    int32_t placed = unit->n_items, at;
    while (unit->slices_left > 0 && (at = cf__pack_largest_run(p, 0, (int32_t)p->n_runs, unit->room)) < p->n_runs) {
        int32_t size = p->runs[at].size, count = cf__pack_fit(unit, size, p->runs[at].left);
        int32_t first = cf__pack_use_run(p, at, count);
        if (!dry) cf__pack_assign(p, first, count, id);
        cf__pack_fill(unit, size, count);
    }
    return unit->n_items - placed;
}

/* Packs by first fit, longest first. It fills unit 0, then unit 1, ... from the runs, which gives the same packing as
   placing items one by one. Returns the number of units; with `dry` it only counts. Uses up the runs. */
static int64_t cf__pack_first_fit(cf__packer *p, int dry) {
    int64_t placed = 0, id;
    for (id = 0; placed < p->n_items || id < p->head.n_chains; id++) {
        cf__pack_unit unit = cf__pack_empty_unit(p, id);
        placed += cf__pack_fill_largest(p, (int32_t)id, &unit, dry);
        if (!dry) p->units[id] = unit;
    }
    if (!dry) p->n_units = id;
    return id;
}

/* Packs by next fit. It takes all sequences in order. A long one closes the previous chunk of its rank, and may offer
   the free space of its last chunk. */
static void cf__pack_next_fit(cf__packer *p) {
    int64_t i, chain = 0, n_order = 0;
    int32_t item = 0, one = -1;
    for (i = 0; i < p->desc.n_ranks && p->desc.n_ranks > 1; i++) p->starts[i] = -1;
    for (i = 0; i < p->n; i++) {
        int is_long = p->lengths[i] > p->desc.chunk_size;
        int32_t rank, *open = &one, before;
        if (p->lengths[i] == 0) continue;
        rank = p->desc.n_ranks == 1 ? 0 : is_long ? p->units[chain].rank : p->unit_of[item];
        if (p->desc.n_ranks > 1) open = &p->starts[rank];
        before = *open;
        if (is_long) *open = (int32_t)chain++;
        else if (before < 0 || cf__pack_fit(&p->units[before], cf__pack_item_size(p, item), 1) == 0)
            *open = cf__pack_open_unit(p);
        if (*open != before) p->order[n_order++] = *open;
        p->units[*open].rank = rank;
        if (is_long) continue;
        cf__pack_fill(&p->units[*open], cf__pack_item_size(p, item), 1);
        cf__pack_assign(p, item++, 1, *open);
    }
}

/* ---- trees: assigning bushes to units ---- */

/* Groups the items from p->first_free on by owner, and keeps their order within a group. unit_of has the owners,
   numbers below n. first: receives the index at which each owner's items begin. */
static void cf__pack_part_items(cf__packer *p, int32_t *first, int64_t n) {
    int64_t i;
    int32_t sum = (int32_t)p->first_free;
    memset(first, 0, (size_t)n * sizeof *first);
    for (i = p->first_free; i < p->n_items; i++) first[p->unit_of[i]]++;
    for (i = 0; i < n; i++) {
        sum += first[i];
        first[i] = sum - first[i];
    }
    memcpy(p->spare, p->items, (size_t)p->n_items * sizeof *p->items);
    for (i = p->first_free; i < p->n_items; i++) p->items[first[p->unit_of[i]]++] = p->spare[i];
    for (i = n - 1; i > 0; i--) first[i] = first[i - 1];
    first[0] = (int32_t)p->first_free;
}

/* Fills in items (bushes, see >>tree), grouped by the stem that they hang on, and longest first within a group. Whole
   trees are the last group. first: receives the index at which each group begins. */
static void cf__pack_collect_bushes(cf__packer *p, int32_t *first) {
    const cf__tree *t = &p->tree;
    int64_t i;
    for (p->n_items = 0, i = 0; i < t->n_nodes; i++) {
        const cf__tree_node *node = &t->nodes[i];
        if (node->stem < 0 && (node->parent < 0 || t->nodes[node->parent].stem >= 0))
            p->items[p->n_items++] = (uint64_t)node->rows << 32 | (uint64_t)i;
    }
    cf__pack_sort_and_bound(p);
    for (i = 0; i < p->n_items; i++) {
        int32_t parent = t->nodes[cf__pack_item_sequence(p->items[i])].parent;
        p->unit_of[i] = parent >= 0 ? t->nodes[parent].stem : (int32_t)t->n_stems;
    }
    cf__pack_part_items(p, first, t->n_stems + 1);
    p->first_free = first[t->n_stems];
}

/* Assigns the bushes of each stem to its last chunk, and to new leaf chunks. */
static void cf__pack_assign_bushes(cf__packer *p) {
    int32_t *first = p->sorted; /* not used yet */
    int64_t n_stems = p->tree.n_stems, i;
    cf__pack_collect_bushes(p, first);
    cf__bits_clear(&p->bins.used);
    for (i = 0; i < n_stems; i++) {
        int64_t leaf = p->n_units;
        cf__pack_find_runs(p, first[i], first[i + 1]);
        (void)cf__pack_fill_largest(p, (int32_t)i, &p->units[i], 0);
        cf__pack_best_fit(p);
        while (cf__pack_bins_take(p, 1) >= 0) continue;
        for (; leaf < p->n_units; leaf++) p->kin[leaf].parent = (int32_t)i;
    }
    p->head.n_slices = p->tree.n_nodes + p->n_dependent;
    p->n_dependent += p->n_units - n_stems;
    p->head.n_chains = p->n_units;
}

/* Links parents and children: leaves first, then stems. The stem with the longest path below it comes last, because it
   ends the tree. Parents have lower numbers than children. */
static void cf__pack_link_chains(cf__packer *p) {
    int32_t *tallest = p->sorted, n = (int32_t)p->head.n_chains, id, parent;
    int turn;
    for (id = 0; id < n; id++) {
        const cf__pack_kin kin = {parent = p->kin[id].parent, -1, -1, 0, 0};
        p->kin[id] = kin;
        if (parent >= 0) p->units[id].lead = p->units[parent].lead;
        tallest[id] = -1;
    }
    for (id = n - 1; id >= 0; id--) {
        int32_t height = p->kin[id].below + p->units[id].n_chunks;
        if ((parent = p->kin[id].parent) < 0 || height <= p->kin[parent].below) continue;
        p->kin[parent].below = height;
        tallest[parent] = id;
    }
    for (turn = 0; turn < 3; turn++)
        for (id = 0; id < n; id++) {
            if ((parent = p->kin[id].parent) < 0) continue;
            if (turn != (id >= p->tree.n_stems ? 0 : tallest[parent] == id ? 2 : 1)) continue;
            p->kin[id].next = p->kin[parent].child;
            p->kin[parent].child = id;
        }
}

/* Orders the units: trees first, each chain before its children, then the rest. */
static void cf__pack_order_trees(cf__packer *p) {
    int32_t *stack = p->sorted, root, id;
    int64_t n = 0, n_left;
    for (root = 0; root < p->head.n_chains; root++) {
        stack[0] = root;
        for (n_left = p->kin[root].parent < 0; n_left > 0;) {
            id = stack[--n_left];
            p->kin[id].chain = (int32_t)n;
            p->order[n++] = id;
            for (id = p->kin[id].child; id >= 0; id = p->kin[id].next) stack[n_left++] = id;
        }
    }
    for (; n < p->n_units; n++) p->order[n] = (int32_t)n;
}

/* ---- ranks first ----

   Whole sequences and whole trees go to ranks by their cost: the most expensive first, each to the rank with the lowest
   cost so far. Then each rank packs its own as if it were alone. With costs 9, 5, 4, 4, 3, 3 and two ranks, one rank
   gets 9 and 4; the other gets 5, 4, 3 and 3. */

/* Returns the rank of a unit, which is its tree's. */
static int32_t cf__pack_rank(const cf__packer *p, int64_t unit) { return p->units[p->units[unit].lead].rank; }

/* Returns 1 if a unit has a chain with cuts; leaves of a tree have none. */
static int cf__pack_is_cut(const cf__packer *p, int64_t unit) {
    return unit < (p->tree.shares != NULL ? p->tree.n_stems : p->head.n_chains);
}

static int64_t cf__pack_own_chunks(const cf__packer *p, int64_t unit) {
    return cf__pack_is_cut(p, unit) ? p->chains[unit].n_chunks : 1;
}

/* Adds up the chunks of each tree at the unit of its root. */
static void cf__pack_gather_trees(cf__packer *p) {
    int64_t i;
    for (i = 0; i < p->head.n_chains; i++) {
        if (p->units[i].lead == i) continue;
        p->units[p->units[i].lead].n_chunks += p->units[i].n_chunks;
        p->units[i].n_chunks = 0;
    }
}

static double cf__pack_item_cost(cf__packer *p, uint64_t item) {
    int64_t id = cf__pack_item_sequence(item), i;
    double cost = 0;
    if (p->tree.shares == NULL) return cf__pack_slice_cost(p, 0, cf__pack_item_length(item));
    for (i = id; i < p->tree.nodes[id].end; i++) {
        const cf__tree_node *node = &p->tree.nodes[i];
        cost += cf__pack_slice_cost(p, node->begin, node->length);
    }
    return cost;
}

/* Returns the begin of a slice in its sequence. cut: its index into cuts. own: rows of the sequence that the chain has
   before the slice. */
static int64_t cf__pack_begin(const cf__packer *p, const cf_chain *chain, int64_t cut, int64_t own) {
    return chain->cp > 0 ? p->begins[cut] : own;
}

/* Returns the cost of a chain's i-th slice, including its cp group's exchange. own: rows that the chain has before
   it. */
static double cf__pack_chunk_cost(cf__packer *p, const cf_chain *chain, int64_t i, int64_t own) {
    int64_t cut = cf__pack_cut(chain, i), begin = cf__pack_begin(p, chain, cut, own);
    double exchange = cf__product(p->desc.cp_row_seconds, (double)(begin - own));
    if (chain->cp > 0) exchange += p->desc.cp_chunk_seconds;
    return cf__pack_slice_cost(p, begin, p->cuts[cut]) + exchange;
}

/* Computes p->costs for everything that goes to ranks: first units (a tree's cost is at its lead unit), then items that
   are in no unit. A chunk's constant cost counts once per chunk, or for the used part of one. */
static void cf__pack_cost_things(cf__packer *p) {
    double size = (double)p->desc.chunk_size;
    int64_t i, j;
    for (i = 0; i < p->n_units; i++) {
        const cf_chain *chain = cf__pack_is_cut(p, i) ? &p->chains[i] : NULL;
        int64_t from = chain != NULL && p->tree.shares != NULL ? p->tree.nodes[p->tree.stems[i]].begin : 0;
        double *cost = &p->costs[p->units[i].lead];
        p->costs[i] = 0;
        for (j = 0; chain != NULL && j < chain->n_chunks; from += p->cuts[chain->first_chunk + j++])
            *cost += cf__pack_slice_cost(p, from, p->cuts[chain->first_chunk + j]);
        *cost += cf__product(p->chunk_constant, (double)p->units[i].n_chunks);
    }
    for (i = 0; i < p->n_items; i++) {
        double cost = cf__pack_item_cost(p, p->items[i]);
        if (i < p->first_free) p->costs[p->units[p->unit_of[i]].lead] += cost;
        else p->costs[p->n_units + i - p->first_free] =
                 cost + cf__product(p->chunk_constant, (double)cf__pack_item_size(p, i) / size);
    }
}

/* Returns the room of a unit or item: for a unit all its chunks, filled or not; for an item its padded tokens. */
static int64_t cf__pack_extent(const cf__packer *p, int64_t i) {
    if (i < p->n_units) return p->units[i].n_chunks * p->desc.chunk_size;
    return cf__pack_item_extent(p, cf__pack_item_length(p->items[p->first_free + i - p->n_units]));
}

static double cf__pack_dearest(const cf__packer *p) {
    double dearest = 0;
    int64_t i;
    for (i = 0; i < p->desc.n_ranks; i++) dearest = cf__most(dearest, p->loads[i]);
    return dearest;
}

/* Gives n units and items to ranks, the most expensive first, each to the rank with the lowest cost so far. A rank
   leaves the heap and gets no more if it has at least the mean number of tokens, and would now exceed 1.5 times the
   mean plus the tokens of the largest unit or item. A stricter cap would save chunks on cheap ranks, but raise the cost
   of the most expensive one. */
static void cf__pack_give_things(cf__packer *p, int64_t n) {
    int64_t i, n_heap, most = 0, mean = 0;
    memset(p->steps, 0, (size_t)p->desc.n_ranks * sizeof *p->steps); /* counts tokens here */
    memset(p->loads, 0, (size_t)p->desc.n_ranks * sizeof *p->loads);
    for (i = 0; i < n; i++) {
        p->sorted[i] = (int32_t)i;
        mean += cf__pack_extent(p, i);
        most = cf__max(most, cf__pack_extent(p, i));
    }
    mean = cf__div_up(mean, p->desc.n_ranks);
    most += mean + mean / 2;
    cf__sort_by_key(p->sorted, n, p->costs);
    for (n_heap = 0; n_heap < p->desc.n_ranks; n_heap++) cf__heap_push(p->heap, n_heap, (int32_t)n_heap, p->loads);
    for (i = 0; i < n; i++) {
        int32_t id = p->sorted[i], rank = p->heap[0];
        int64_t tokens = cf__pack_extent(p, id);
        for (; p->steps[rank] >= mean && tokens > 0 && p->steps[rank] + tokens > most; rank = p->heap[0])
            (void)cf__heap_pop(p->heap, n_heap--, p->loads);
        p->steps[rank] += tokens;
        p->loads[rank] += p->costs[id];
        cf__heap_sink(p->heap, n_heap, 0, p->loads);
        if (id < p->n_units) p->units[id].rank = rank;
        else p->unit_of[p->first_free + id - p->n_units] = rank;
    }
}

/* Sorts order by rank, keeping the order within a rank. */
static void cf__pack_order_by_rank(cf__packer *p) {
    int64_t i;
    int32_t rank, first = 0, *start = p->starts;
    memset(start, 0, (size_t)p->desc.n_ranks * sizeof *start);
    for (i = 0; i < p->n_units; i++) start[p->units[i].rank = cf__pack_rank(p, i)]++;
    for (rank = 0; rank < p->desc.n_ranks; rank++) {
        first += start[rank];
        start[rank] = first - start[rank];
    }
    for (i = 0; i < p->n_units; i++) p->sorted[start[p->units[p->order[i]].rank]++] = p->order[i];
    memcpy(p->order, p->sorted, (size_t)p->n_units * sizeof *p->order);
}

static cf_result cf__pack_count_chunks(cf__packer *p) {
    p->head.n_chunks = p->head.chunks_per_rank * p->desc.n_ranks;
    return cf__inside(p->head.n_chunks, 0, CF_MAX_CHUNKS, CF_ERROR_LIMIT, "n_chunks", -1,
                      "the batch needs too many chunks", p->error);
}

/* Gives whole sequences and trees to ranks, and orders the existing units by rank. */
static void cf__pack_deal_out(cf__packer *p) {
    int64_t i;
    for (i = 0; i < p->n_units; i++) p->order[i] = (int32_t)i;
    if (p->desc.n_ranks == 1) return;
    cf__pack_gather_trees(p);
    p->chunk_constant = p->weights.constant;
    p->weights.constant = 0;
    cf__pack_cost_things(p);
    cf__pack_give_things(p, p->n_units + p->n_items - p->first_free);
    cf__pack_order_by_rank(p);
}

/* Packs each rank's items by best fit, into the room left by its units and into new units. */
static void cf__pack_fill_ranks(cf__packer *p) {
    int64_t rank, ranks = p->desc.n_ranks, at = 0, n = p->n_units, opened;
    if (ranks > 1) cf__pack_part_items(p, p->starts, ranks);
    cf__bits_clear(&p->bins.used);
    for (rank = 0; rank < ranks; rank++) {
        int64_t first = ranks > 1 ? p->starts[rank] : p->first_free, end = p->n_items;
        if (rank + 1 < ranks) end = p->starts[rank + 1];
        for (; at < n && p->units[p->order[at]].rank == rank; at++)
            if (first < end) cf__pack_bins_insert(p, p->order[at]);
        cf__pack_find_runs(p, first, end);
        opened = p->n_units;
        cf__pack_best_fit(p);
        for (; opened < p->n_units; opened++) p->units[opened].rank = (int32_t)rank;
        while (ranks > 1 && cf__pack_bins_take(p, 1) >= 0) continue;
    }
}

/* Packs the short sequences of each rank by the requested method. On one rank, first fit replaces best fit if it needs
   fewer chunks; it is tried only if that is possible. */
static void cf__pack_assign_items(cf__packer *p) {
    /* Chunks that take no items: all except the last of each chain. */
    int64_t i, n_closed = p->n_dependent - p->head.n_chains;
    cf__pack_collect_items(p);
    cf__pack_sort_and_bound(p);
    if (p->desc.method == CF_PACK_NEXT_FIT) cf__pack_collect_items(p);
    cf__pack_deal_out(p);
    if (p->desc.method == CF_PACK_NEXT_FIT) {
        cf__pack_next_fit(p);
        return;
    }
    cf__pack_fill_ranks(p);
    if (p->desc.n_ranks == 1 && n_closed + p->n_units > p->head.lower_bound &&
        cf__pack_first_fit(p, 1) < p->n_units) {
        cf__pack_find_runs(p, 0, p->n_items);
        (void)cf__pack_first_fit(p, 0);
    }
    for (i = 0; i < p->n_units; i++) p->order[i] = (int32_t)i;
}

/* Counts the chunks of the fullest rank, and orders all units by rank. */
static cf_result cf__pack_settle(cf__packer *p) {
    int64_t i;
    p->head.chunks_per_rank = p->n_dependent + p->n_units - p->head.n_chains;
    if (p->desc.n_ranks == 1) return cf__pack_count_chunks(p);
    memset(p->steps, 0, (size_t)p->desc.n_ranks * sizeof *p->steps);
    for (i = 0; i < p->n_units; i++) p->steps[cf__pack_rank(p, i)] += p->units[i].n_chunks;
    for (p->head.chunks_per_rank = 0, i = 0; i < p->desc.n_ranks; i++)
        p->head.chunks_per_rank = cf__max(p->head.chunks_per_rank, p->steps[i]);
    cf__pack_order_by_rank(p);
    return cf__pack_count_chunks(p);
}

/* ---- trees over ranks ----

   A tree is on one rank. A tree too expensive for one rank is split: some of the sequences that leave its root form a
   new tree. The root of the new tree is the sequence that leaves the old root last, so that only rows of the old root
   are copied. */

/* Adds up the cost of each sequence and everything that branches off it. */
static void cf__pack_cost_branches(cf__packer *p) {
    cf__tree *t = &p->tree;
    double constant = p->weights.constant;
    int64_t i, depth;
    p->weights.constant = 0; /* chunks are not known yet */
    for (i = 0; i < t->n; i++) {
        depth = (int64_t)t->depth[i];
        p->item_costs[i] = depth < t->lengths[i] ? cf__pack_slice_cost(p, depth, t->lengths[i] - depth) : 0;
        t->items[i] = (uint64_t)t->rank[i] << 32 | (uint64_t)i;
    }
    cf__sort(&t->items, &t->spare, t->n, NULL, ~(uint64_t)0);
    for (i = 0; i < t->n; i++) {
        int64_t id = cf__pack_item_sequence(t->items[i]);
        if (t->with[id] >= 0) p->item_costs[t->with[id]] += p->item_costs[id];
    }
    p->weights.constant = constant;
}

/* Splits parts off a tree, or off a part of one, until the rest costs at most `most`. A part is one or more
   neighbouring children of the root, with a copy of the trunk, which is the root's rows that they share. With `dry`
   only the costs of parts are recorded, as if these were units. If a single child is a part, its trunk's cost is
   recorded as well, because the part may be split again. */
static void cf__pack_part_tree(cf__packer *p, int32_t root, double most, int dry) {
    cf__tree *t = &p->tree;
    double left = p->trunks[root] + p->item_costs[root], part = 0;
    int32_t id = t->child[root], first = id, next;
    for (; id >= 0 && left > most; id = next) {
        double trunk = cf__pack_slice_cost(p, 0, (int64_t)t->depth[id]);
        next = t->next[id];
        part += p->item_costs[id];
        if (next >= 0 && trunk + part + p->item_costs[next] <= most) continue;
        if (first == id) p->trunks[id] = trunk;
        else p->costs[p->n_units++] = trunk + part;
        for (; first != next; first = t->next[first]) {
            if (dry) continue;
            t->with[first] = first == id ? -1 : id;
            if (first == id) t->depth[id] = 0;
        }
        left -= part;
        part = 0;
    }
    p->costs[p->n_units++] = left;
}

/* Splits all trees that cost more than `most`, roots first. Returns the cost of the most expensive rank. */
static double cf__pack_part_all(cf__packer *p, double most, int dry) {
    int64_t i;
    for (i = 0; i < p->n; i++) {
        p->trunks[i] = p->tree.rank[i] == 0 ? 0 : -1;
        p->units[i].n_chunks = 0; /* chunks of parts are not known yet */
    }
    for (p->n_units = 0; i > 0;) {
        int32_t id = (int32_t)cf__pack_item_sequence(p->tree.items[--i]);
        if (p->trunks[id] >= 0) cf__pack_part_tree(p, id, most, dry);
    }
    cf__pack_give_things(p, p->n_units);
    p->n_units = 0;
    return cf__pack_dearest(p);
}

/* Splits trees if that makes the most expensive rank at least 5 % cheaper. Each part repeats the rows of the trunk.
   Parts that cost less than the mean rank repeat more rows, but fill ranks more evenly. Returns 1 if trees were split;
   their parts may then be split again. */
static int cf__pack_part_trees(cf__packer *p) {
    double mean = 0, most, best_most = DBL_MAX, whole, best;
    int64_t i;
    cf__tree_list_children(&p->tree);
    cf__pack_cost_branches(p);
    for (i = 0; i < p->n; i++)
        if (p->tree.rank[i] == 0) mean += p->item_costs[i] / (double)p->desc.n_ranks;
    whole = best = cf__pack_part_all(p, DBL_MAX, 1);
    for (most = mean / 4; most > 0 && most < whole; most = most < mean ? 2 * most : cf__most(most * 1.1, whole / 64)) {
        double dearest = cf__pack_part_all(p, most, 1);
        /* Larger parts copy fewer rows, so they win at equal cost. They also win at up to 5 % more if the best parts so
           far cost less than the mean. */
        if (dearest > whole * 0.95 || dearest > best * (best_most < mean ? 1.05 : 1)) continue;
        best = dearest;
        best_most = most;
    }
    if (!(best_most < DBL_MAX)) return 0;
    (void)cf__pack_part_all(p, best_most, 0);
    for (i = 0; i < p->n; i++)
        if (p->tree.with[i] < 0) p->tree.rank[i] = 0;
    return 1;
}

/* ---- cp groups ----

   A cp group is an aligned block of ranks that share a sequence, in lockstep. */

/* Returns the width of the widest possible cp group. */
static int64_t cf__pack_widest(const cf__packer *p) {
    int64_t width = 1;
    while (2 * width <= p->desc.max_cp && p->desc.n_ranks % (2 * width) == 0) width *= 2;
    return width;
}

/* Returns the maximum ranks of a sequence's cp group. Slices must not be too short, and each round except the last
   needs an alignment unit for each rank. */
static int64_t cf__pack_most_ranks(const cf__packer *p, int64_t sequence) {
    int64_t least = cf__max(cf__min(512, p->desc.chunk_size / 8), 2 * p->desc.align);
    return p->desc.chunk_size >= 2 * p->desc.align ? cf__min(p->lengths[sequence] / least, cf__pack_widest(p)) : 1;
}

/* Estimates the cost of one rank's part of a sequence. It includes replays, as if K were 1 and a backward cost two
   forwards. It includes transfers: a round gathers the rows of earlier rounds that other ranks have, and half of those
   of its own round. */
static double cf__pack_share_cost(const cf__packer *p, int64_t sequence, int64_t width) {
    int64_t rows = p->lengths[sequence];
    double n = (double)width, length = (double)rows, cost = p->whole_costs[sequence] / n;
    double rounds = (double)cf__div_up(rows, width * p->desc.chunk_size);
    double chunks = width > 1 ? rounds : length / (double)p->desc.chunk_size;
    double gathered = cf__product(length / n, (n - 1) * rounds / 2);
    if (width > 1) cost += cf__product(p->desc.cp_chunk_seconds, rounds);
    if (rounds > 1) cost += cf__product(cost, (rounds - 1) / (3 * rounds));
    return cost + cf__product(p->chunk_constant, chunks) + cf__product(p->desc.cp_row_seconds, gathered);
}

/* Gives each sequence the fewest ranks with which a part costs at most `most`, or as many as reduce its cost. Returns 1
   if some sequence has the widest cp group, and some sequence another width than before. */
static int cf__pack_choose_widths(cf__packer *p, double most) {
    int64_t i, left = p->most_parts, width, ranks;
    int is_widest = 0, differs = 0;
    for (p->n_wide = i = 0; i < p->n; i++) {
        int32_t id = p->by_cost[i];
        double cost = cf__pack_share_cost(p, id, 1), wider;
        ranks = cf__pack_most_ranks(p, id);
        for (width = 1; cost > most && 2 * width <= ranks; cost = wider, width *= 2)
            if (!((wider = cf__pack_share_cost(p, id, 2 * width)) < cost)) break;
        if (width > left) width = 1;
        if (width > 1) left -= width, p->n_wide = i + 1;
        is_widest |= width == cf__pack_widest(p);
        differs |= width != p->widths[id];
        p->widths[id] = (int32_t)width;
    }
    return is_widest && differs;
}

/* Cuts the slices of one round from the rest of a sequence. None costs more than the target, and each has at least one
   alignment unit. last: 1 if nothing may be left after them; otherwise enough for another round must be left. Returns
   the tokens. */
static int64_t cf__pack_cut_round(cf__packer *p, const cf_chain *rest, int last, int64_t cut) {
    int64_t size = p->desc.align, begin = 0, left = rest->cp;
    int64_t end = (cf__div_up(rest->tokens, size) - (last ? 0 : left)) * size;
    while (left-- > 0) {
        int64_t length = cf__min(cf__pack_cut_by_cost(p, rest, begin), end - begin - left * size);
        if (last) length = cf__max(length, end - begin - left * p->desc.chunk_size);
        p->begins[cut] = p->from + begin;
        p->cuts[cut++] = (int32_t)cf__min(length, rest->tokens - begin);
        begin += length;
    }
    return cf__min(begin, rest->tokens);
}

/* Returns 1 if the slices of one round cover the rest of a sequence, and none costs more than the target. */
static int cf__pack_covers(cf__packer *p, const cf_chain *rest, double target) {
    int64_t begin = 0, left = rest->cp;
    for (p->target = target; left > 0 && begin < rest->tokens; left--) begin += cf__pack_cut_by_cost(p, rest, begin);
    return begin >= rest->tokens;
}

/* Cuts the next round: its first slice is full, and the others cost the same. The last round, with the rest, is divided
   evenly. full: 1 if many rounds brought little progress; all slices are then full. Returns the tokens. */
static int64_t cf__pack_next_round(cf__packer *p, const cf_chain *rest, int full, int64_t cut) {
    int64_t most = rest->cp * p->desc.chunk_size;
    double low = 0, high = cf__pack_slice_cost(p, p->from, cf__min(rest->tokens, p->desc.chunk_size));
    int last = cf__pack_covers(p, rest, high) || cf__div_up(rest->tokens, p->desc.align) < 2 * rest->cp, tries;
    if (!last && full) {
        p->target = DBL_MAX;
        return cf__pack_cut_round(p, rest, rest->tokens <= most, cut);
    }
    if (last) /* costs are additive, so a target slightly above the mean is enough */
        low = cf_cost_seconds(&p->weights, rest->tokens, cf_slice_pairs(p->from, rest->tokens)) / (double)rest->cp;
    for (tries = 0; last && tries < 40 && high - low > high * 1e-3; tries++) {
        double middle = tries == 0 ? cf__product(low, 1.0005) : low + (high - low) / 2;
        if (cf__pack_covers(p, rest, middle)) high = middle;
        else low = middle;
    }
    p->target = high;
    return cf__pack_cut_round(p, rest, last, cut);
}

/* Splits a sequence for its cp group, and opens a unit for each part. */
static void cf__pack_cut_cp_group(cf__packer *p, int64_t sequence) {
    cf_chain rest = {sequence, 0, 0, p->lengths[sequence], p->widths[sequence]};
    int64_t rounds, part, i, first = p->n_part_cuts, most = cf__pack_most_rounds(p, rest.tokens, rest.cp);
    for (rounds = 0; rest.tokens > 0; rounds++, p->n_part_cuts += rest.cp) {
        int64_t tokens = cf__pack_next_round(p, &rest, rounds >= most / 2, p->n_part_cuts);
        p->from += tokens;
        rest.tokens -= tokens;
    }
    p->from = 0;
    for (part = 0; part < rest.cp; part++) {
        cf_chain *share = &p->chains[p->n_units];
        *share = rest;
        share->first_chunk = first + part;
        share->n_chunks = rounds;
        for (i = 0; i < rounds; i++) share->tokens += p->cuts[cf__pack_cut(share, i)];
        (void)cf__pack_open_unit(p);
    }
    p->n_parts = p->n_units;
}

/* Computes the cost of each sequence, and finds the most expensive ones. */
static void cf__pack_cost_wholes(cf__packer *p) {
    int64_t i, begin, size = p->desc.chunk_size;
    p->weights.constant = 0;
    for (i = 0; i < p->n; i++) {
        p->whole_costs[i] = 0;
        for (begin = 0; begin < p->lengths[i]; begin += size)
            p->whole_costs[i] += cf__pack_slice_cost(p, begin, cf__min(size, p->lengths[i] - begin));
        p->mean_cost += p->whole_costs[i] / (double)p->desc.n_ranks;
        p->by_cost[i] = (int32_t)i;
        p->widths[i] = 1;
    }
    cf__sort_by_key(p->by_cost, p->n, p->whole_costs);
}

/* Splits all sequences of cp groups, the widest group first. */
static void cf__pack_cut_cp_groups(cf__packer *p) {
    int64_t i, width;
    p->weights.constant = 0;
    p->n_units = p->n_parts = p->n_part_cuts = 0;
    p->head.n_chains = p->most_chains;
    for (width = cf__pack_widest(p); width > 1; width /= 2)
        for (i = 0; i < p->n_wide; i++)
            if (p->widths[p->by_cost[i]] == width) cf__pack_cut_cp_group(p, p->by_cost[i]);
}

/* Fills chains and cuts of trees, and opens a unit for each stem. */
static cf_result cf__pack_collect_stems(cf__packer *p) {
    const cf__tree_node *nodes = p->tree.nodes;
    int64_t i, n_cuts = 0;
    for (i = 0; i < p->tree.n_stems; i++) {
        const cf__tree_node *node = &nodes[p->tree.stems[i]], *last = node;
        int64_t tokens = node->length;
        for (; last->follower >= 0; tokens += last->length) last = &nodes[last->follower];
        p->from = node->begin;
        p->kin[i].parent = node->parent >= 0 ? nodes[node->parent].stem : -1;
        CF__TRY(cf__pack_plan_chain(p, node->sequence, tokens, &p->chains[i]));
        if (CF__NEVER(n_cuts + p->chains[i].n_chunks > p->n_dependent)) return cf__too_large(p->error, "lengths");
        cf__pack_cut_chain(p, &p->chains[i], &n_cuts);
    }
    p->n_dependent = n_cuts;
    return CF_OK;
}

/* ---- in step ----

   A column is the i-th chunks of all ranks. They run at the same time, so a column costs as much as its most expensive
   chunk. Chains are placed in bands of columns. A band has as many columns as the longest remaining chain has chunks.
   Each rank fills its row of the band with the longest chains that fit, and of equally long ones with the most
   expensive, so that neighbours cost alike. The parts of a cp group are next to each other, in an aligned block of
   ranks. If a narrower group comes next, the block is halved.

   Short sequences fill the cells that chains leave free, but never make a column more expensive. Those without room are
   spread evenly over new columns, or over the last column of the bands.

   Expensive slices make expensive columns, and many slices make many replays. So many layouts are tried, and the one
   whose columns take the least time wins. The target cost of a slice starts at that of a full slice at the start of a
   sequence. Each next target is 1.25 times the last, up to the most expensive slice; at most 42. With cp groups that is
   repeated for each power of two up to max_cp, each with eleven choices of widths. */

/* Sorts chains by falling width of the cp group, then by falling length, then by the cost of their last chunk. The
   first part of a cp group represents all. A run has chains of one width and length; `levels` has the first run of each
   width. */
static void cf__pack_sort_chains(cf__packer *p) {
    int64_t i, n = 0, width, next = 0;
    int32_t *level = p->levels;
    double full = p->chunk_constant + cf__pack_slice_cost(p, 0, p->desc.chunk_size);
    for (i = 0; i < p->head.n_chains; i++) {
        const cf_chain *chain = &p->chains[i];
        int64_t last = chain->n_chunks - 1, before = chain->tokens - p->cuts[cf__pack_cut(chain, last)];
        double cost = p->last_costs[i] = p->chunk_constant + cf__pack_chunk_cost(p, chain, last, before);
        if (i < next) continue;
        width = cf__max(chain->cp, 1);
        next += width;
        p->sorted[n++] = (int32_t)i;
        p->costs[i] = (double)(width * CF_MAX_CHUNKS + last);
        if (cost <= DBL_MAX) p->costs[i] += cost / (cost + full) / 2;
    }
    cf__sort_by_key(p->sorted, n, p->costs);
    p->n_runs = p->runs[0].next = 0;
    for (i = 0, width = cf__pack_widest(p); width > 0; width /= 2) {
        for (*level = (int32_t)p->n_runs; i < n && cf__max(p->chains[p->sorted[i]].cp, 1) == width; i++)
            cf__pack_extend_runs(p, *level, i, p->units[p->sorted[i]].n_chunks);
        *++level = (int32_t)p->n_runs;
    }
}

/* Returns the run of the most expensive chain that fits into a block of ranks as wide as the cp groups of the level;
   n_runs if none does. The chain may be narrower. */
static int32_t cf__pack_next_chain(cf__packer *p, int64_t level, int64_t room) {
    int64_t width = cf__pack_widest(p) >> level;
    int32_t best = (int32_t)p->n_runs, at;
    double most = -1, key;
    for (; width > 0; width /= 2, level++) {
        at = cf__pack_largest_run(p, p->levels[level], p->levels[level + 1], room);
        if (at >= p->levels[level + 1]) continue;
        key = p->costs[p->sorted[p->runs[at].first]] - (double)(width * CF_MAX_CHUNKS);
        if (key > most) best = at;
        most = cf__most(most, key);
    }
    return best;
}

/* Gives a chain its rank and columns. Each column then costs at least as much as the chain's slice. */
static void cf__pack_lay_chain(cf__packer *p, int64_t id, int64_t rank, int64_t column) {
    const cf_chain *chain = &p->chains[id];
    int64_t i, own = 0;
    p->units[id].rank = (int32_t)rank;
    p->units[id].column = (int32_t)column;
    for (i = 0; i < chain->n_chunks; own += p->cuts[cf__pack_cut(chain, i++)], column++)
        p->columns[column] = cf__most(p->columns[column], p->chunk_constant + cf__pack_chunk_cost(p, chain, i, own));
}

/* Fills columns of a block of ranks until a narrower chain comes next. Then it fills the remaining columns of both
   halves of the block. */
static void cf__pack_fill_block(cf__packer *p, int64_t level, int64_t rank, int64_t column, int64_t end) {
    int64_t width = cf__pack_widest(p) >> level, i;
    int32_t at;
    while ((at = cf__pack_next_chain(p, level, end - column)) < p->levels[level + 1]) {
        int32_t id = p->sorted[cf__pack_use_run(p, at, 1)];
        for (i = 0; i < width; i++) cf__pack_lay_chain(p, id + i, rank + i, column);
        column += p->units[id].n_chunks;
    }
    if (width > 1) {
        cf__pack_fill_block(p, level + 1, rank, column, end);
        cf__pack_fill_block(p, level + 1, rank + width / 2, column, end);
    } else {
        const cf__pack_row row = {(int32_t)rank, (int32_t)column, (int32_t)(end - column)};
        p->rows[p->n_rows++] = row;
    }
}

/* Lays out all chains. n_bands is -1 if there are too few columns. */
static void cf__pack_fill_bands(cf__packer *p) {
    int64_t ranks = p->desc.n_ranks, rank, end;
    int32_t at;
    cf__pack_sort_chains(p);
    for (p->n_rows = p->n_bands = 0; (at = cf__pack_next_chain(p, 0, INT32_MAX)) < p->n_runs; p->n_bands = end) {
        end = p->n_bands + p->runs[at].size;
        if (CF__NEVER(p->n_rows + ranks > p->most_rows || end + cf__div_up(p->n_items, ranks) > p->most_columns)) {
            p->n_bands = -1;
            return;
        }
        memset(&p->columns[p->n_bands], 0, (size_t)p->runs[at].size * sizeof *p->columns);
        for (rank = 0; rank < ranks; rank += cf__pack_widest(p)) cf__pack_fill_block(p, 0, rank, p->n_bands, end);
    }
}

/* Returns a pointer to the cost of the column of a unit's last chunk, the only one that takes items. */
static double *cf__pack_last_column(const cf__packer *p, const cf__pack_unit *unit) {
    return &p->columns[unit->column + unit->n_chunks - 1];
}

/* Returns the tokens of short sequences that a chunk of this cost may take without making its column more expensive. */
static int32_t cf__pack_column_room(const cf__packer *p, const cf__pack_unit *unit, double cost, double full) {
    double left = *cf__pack_last_column(p, unit) - cost, size = (double)p->desc.chunk_size;
    double tokens = full > 0 ? cf__product(left, size) / full : size;
    return tokens < (double)unit->room ? (int32_t)tokens : unit->room;
}

/* Adds to the bins the last chunks of chains, and chunks in the cells that bands leave free. */
static void cf__pack_open_cells(cf__packer *p) {
    double full = cf__pack_slice_cost(p, 0, p->desc.chunk_size);
    int64_t row, left = p->n_items;
    int32_t i;
    cf__bits_clear(&p->bins.used);
    for (i = 0; i < p->head.n_chains; i++) {
        p->units[i].room = cf__pack_column_room(p, &p->units[i], p->last_costs[i], full);
        cf__pack_bins_insert(p, i);
    }
    for (row = p->n_rows; row-- > 0;)
        for (i = 0; i < p->rows[row].n && left > 0; i++, left--) {
            int32_t id = cf__pack_open_unit(p);
            cf__pack_unit *unit = &p->units[id];
            unit->rank = p->rows[row].rank;
            unit->column = p->rows[row].column + i;
            unit->room = cf__pack_column_room(p, unit, p->chunk_constant, full);
            cf__pack_bins_insert(p, id);
        }
    p->first_extra = p->n_units;
}

/* Removes all items of a unit. Its cost is then that of its last chunk alone: the chain's slice, or an empty chunk. */
static void cf__pack_empty(cf__packer *p, int64_t id) {
    const cf__pack_unit empty = cf__pack_empty_unit(p, id);
    p->units[id].room = empty.room;
    p->units[id].slices_left = empty.slices_left;
    p->units[id].n_items = 0;
    p->costs[id] = id < p->head.n_chains ? p->last_costs[id] : p->chunk_constant;
}

/* Spreads short sequences over the units that end with column end - 1: those that are in no band, and those already in
   these units. The most expensive come first, each to the cheapest unit with room. If a sequence fits nowhere, or makes
   a chunk cost more than `most`, all stay where they were. */
static int cf__pack_deal(cf__packer *p, int64_t end, double most) {
    int32_t *heap = p->order, *aside = p->sorted, smallest = cf__pack_item_size(p, p->n_items - 1), id;
    int64_t i, n_heap = 0, n_aside;
    for (id = 0; id < p->n_units; id++) {
        if (p->units[id].column + p->units[id].n_chunks != end) continue;
        cf__pack_empty(p, id);
        cf__heap_push(heap, n_heap++, id, p->costs);
    }
    memcpy(p->spare, p->unit_of, (size_t)p->n_items * sizeof *p->unit_of);
    for (i = 0; i < p->n_items; i++) {
        const cf__pack_unit *from = &p->units[p->unit_of[i]];
        int32_t size = cf__pack_item_size(p, i);
        if (p->unit_of[i] < p->first_extra && from->column + from->n_chunks != end) continue;
        for (n_aside = 0, id = -1; id < 0 && n_heap > 0;) {
            id = cf__heap_pop(heap, n_heap--, p->costs);
            if (cf__pack_fit(&p->units[id], size, 1) > 0) break;
            if (cf__pack_fit(&p->units[id], smallest, 1) > 0) aside[n_aside++] = id; /* may take a smaller item */
            id = -1;
        }
        if (id < 0 || p->costs[id] + p->item_costs[i] > most) break;
        cf__pack_assign(p, (int32_t)i, 1, id);
        cf__pack_fill(&p->units[id], size, 1);
        p->costs[id] += p->item_costs[i];
        cf__heap_push(heap, n_heap++, id, p->costs);
        while (n_aside > 0) cf__heap_push(heap, n_heap++, aside[--n_aside], p->costs);
    }
    if (i < p->n_items) memcpy(p->unit_of, p->spare, (size_t)p->n_items * sizeof *p->unit_of);
    return i == p->n_items;
}

/* Spreads the items that are in no band. If one new column would hold them, it first tries to put them into the last
   column of the last band, where they must cost no more than a new column. Otherwise they go to new columns, the most
   expensive chunks first. */
static void cf__pack_add_columns(cf__packer *p) {
    int64_t i, n_dealt = 0, ranks = p->desc.n_ranks, first = p->n_units;
    int64_t n = cf__div_up(first - p->first_extra, ranks) * ranks;
    double dearest = 0;
    for (i = 0; i < p->n_items; i++) {
        if (p->unit_of[i] < p->first_extra) continue;
        dearest = cf__most(dearest, p->chunk_constant + p->item_costs[i]);
        n_dealt++;
    }
    if (n == ranks && p->n_bands > 0 && cf__pack_deal(p, p->n_bands, dearest + p->columns[p->n_bands - 1])) {
        p->first_extra = first;
    } else if (n > 0) {
        while (p->n_units < first + cf__min(n, n_dealt)) p->units[cf__pack_open_unit(p)].column = (int32_t)p->n_bands;
        if (cf__pack_deal(p, p->n_bands + 1, DBL_MAX)) p->first_extra = first;
        else p->n_units = first;
    }
    for (i = 0; i < p->n_units; i++) cf__pack_empty(p, i);
    for (i = 0; i < p->n_items; i++) {
        cf__pack_fill(&p->units[p->unit_of[i]], cf__pack_item_size(p, i), 1);
        p->costs[p->unit_of[i]] += p->item_costs[i];
    }
    n = p->n_units - p->first_extra;
    p->head.chunks_per_rank = p->n_bands + cf__div_up(n, ranks);
    for (i = p->n_bands; i < p->head.chunks_per_rank; i++) p->columns[i] = 0;
    for (i = 0; i < n; i++) p->sorted[i] = (int32_t)(p->first_extra + i);
    cf__sort_by_key(p->sorted, n, p->costs);
    for (i = 0; i < n; i++) {
        p->units[p->sorted[i]].rank = (int32_t)(i % ranks);
        p->units[p->sorted[i]].column = (int32_t)(p->n_bands + i / ranks);
    }
    for (i = 0; i < p->n_units; i++) {
        double *column = cf__pack_last_column(p, &p->units[i]);
        if (i < p->head.n_chains || p->units[i].n_items > 0) *column = cf__most(*column, p->costs[i]);
    }
}

/* Returns the cost of the first n columns and of their replays with K = 1. A replay costs a third of its column, as a
   forward does. Every column of a band of chains is replayed, except the band's last. */
static double cf__pack_price(const cf__packer *p, int64_t n) {
    double sum = 0, replays = 0;
    int64_t i, row;
    for (i = 0; i < n; i++) sum += p->columns[i];
    for (i = 0; i < p->n_bands; i++) replays += p->columns[i];
    for (row = 0; row < p->n_rows; row += p->desc.n_ranks)
        replays -= p->columns[p->rows[row].column + p->rows[row].n - 1];
    return sum + replays / 3;
}

/* Lays out all chunks, with slices that cost at most the target. Returns the cost, or DBL_MAX if chains alone cost more
   than `most`. */
static double cf__pack_lay_out(cf__packer *p, double target, double most) {
    int64_t i;
    p->slice_target = target;
    p->weights.constant = p->chunk_constant;
    p->head.n_chains = p->most_chains;
    for (p->n_units = 0; p->n_units < p->n_parts;) (void)cf__pack_open_unit(p);
    p->n_dependent = p->most_dependent;
    cf__pack_collect_chains(p);
    p->weights.constant = 0; /* counts once per chunk, not per slice */
    cf__pack_collect_items(p);
    cf__pack_fill_bands(p);
    if (CF__NEVER(p->n_bands < 0) || cf__pack_price(p, p->n_bands) > most) return DBL_MAX;
    cf__pack_sort_and_bound(p);
    for (i = 0; i < p->n_items; i++) p->item_costs[i] = cf__pack_item_cost(p, p->items[i]);
    cf__pack_find_runs(p, 0, p->n_items);
    cf__pack_open_cells(p);
    cf__pack_best_fit(p);
    cf__pack_add_columns(p);
    return cf__pack_price(p, p->head.chunks_per_rank);
}

/* A layout in lockstep: maximum ranks of a cp group, maximum costs of a part and of a slice, and the resulting cost. */
typedef struct cf__pack_layout {
    int64_t max_cp;
    double most, target, price;
} cf__pack_layout;

/* Lays out cp groups and then the rest. Returns the cost, or DBL_MAX if chains alone cost more than `most`. */
static double cf__pack_try_layout(cf__packer *p, const cf__pack_layout *layout, double most) {
    p->desc.max_cp = layout->max_cp;
    if (p->widths != NULL) (void)cf__pack_choose_widths(p, layout->most);
    if (p->widths != NULL) cf__pack_cut_cp_groups(p);
    return cf__pack_lay_out(p, layout->target, most);
}

/* Finds the best layout whose widest cp groups have `cp` ranks, and stores it in *best if it is better. Returns whether
   any sequence would have a cp group of this width. */
static int cf__pack_find_layout(cf__packer *p, int64_t cp, cf__pack_layout *best) {
    cf__pack_layout own = {cp, DBL_MAX, DBL_MAX, DBL_MAX}, layout = own;
    double dearest = 0;
    int tries, is_used = cp == 1;
    int64_t i;
    p->desc.max_cp = cp;
    for (tries = 0; tries < (cp > 1 ? 11 : 1); tries++, layout.most = tries == 1 ? p->mean_cost : layout.most * 0.7) {
        if (cp > 1 && !cf__pack_choose_widths(p, layout.most)) continue;   /* an earlier layout had these widths */
        is_used = 1;
        layout.price = cf__pack_try_layout(p, &layout, own.price);
        if (layout.price < own.price) own = layout;
    }
    if (!is_used) return 0;
    layout = own;
    (void)cf__pack_try_layout(p, &layout, DBL_MAX);
    for (i = 0; i < p->n_bands && p->desc.split == CF_SPLIT_COST; i++) dearest = cf__most(dearest, p->columns[i]);
    layout.target = p->chunk_constant + cf__pack_slice_cost(p, 0, p->desc.chunk_size);
    for (tries = 0; tries < 40 && layout.target > 0 && layout.target < dearest; tries++, layout.target *= 1.25) {
        layout.price = cf__pack_lay_out(p, layout.target, own.price);
        if (layout.price < own.price) own = layout;
    }
    if (own.price < best->price) *best = own;
    return 1;
}

/* Finds the best layout in lockstep. A larger max_cp is never worse than a smaller one, because everything that the
   smaller allows is tried as well. */
static cf_result cf__pack_prepare_in_step(cf__packer *p) {
    cf__pack_layout best = {1, DBL_MAX, DBL_MAX, DBL_MAX};
    int64_t widest = cf__pack_widest(p), cp, i;
    p->chunk_constant = p->weights.constant;
    if (p->widths != NULL) cf__pack_cost_wholes(p);
    for (cp = 1; cp <= widest; cp *= 2)
        if (!cf__pack_find_layout(p, cp, &best)) break;
    (void)cf__pack_try_layout(p, &best, DBL_MAX);
    if (CF__NEVER(p->n_bands < 0)) return cf__too_large(p->error, "lengths");
    for (i = 0; i < p->n_units; i++) {
        p->order[i] = (int32_t)i;
        p->costs[i] = -((double)p->units[i].rank * (double)p->head.chunks_per_rank + (double)p->units[i].column);
    }
    cf__sort_by_key(p->order, p->n_units, p->costs);
    return cf__pack_count_chunks(p);
}

/* ---- writing the plan ---- */

/* Writes a chain, its chunks and its slices. */
static void cf__pack_write_chain(const cf__packer *p, int64_t id, int64_t first_chunk, cf_slice *slices) {
    cf_chain *chain = &p->plan->chains[id];
    int64_t i, own = 0;
    *chain = p->chains[id];
    chain->first_chunk = first_chunk;
    for (i = 0; i < chain->n_chunks; own += slices[i++].length) {
        cf_chunk *chunk = &p->plan->chunks[first_chunk + i];
        int64_t at = cf__pack_cut(&p->chains[id], i);
        slices[i].sequence = (int32_t)chain->sequence;
        slices[i].begin = cf__pack_begin(p, chain, at, own);
        slices[i].length = p->cuts[at];
        chunk->index = i;
        chunk->prefix = own;
        chunk->chain = id;
        chunk->state = slices[i].length;
        chunk->cp = chain->cp;
        chunk->n_slices = 1;
    }
}

/* Returns the chunk, on any rank, whose rows come directly before those of this chunk; -1: none. */
static int64_t cf__pack_before(const cf_plan *plan, const cf_chunk *c) {
    if (c->cp > 0 && c->rank % c->cp > 0) return c - plan->chunks - plan->chunks_per_rank;
    return c->up < 0 || c->cp == 0 ? c->up : c->up + (c->cp - 1) * plan->chunks_per_rank;
}

/* Links a chunk without trees, and its slices, to those that they continue. Trees are linked as they are written. */
static void cf__pack_finish_list(cf_plan *plan, cf_chunk *chunk, int64_t id) {
    int64_t j;
    chunk->up = chunk->index > 0 ? id - 1 : -1;
    for (j = chunk->first_slice; j < chunk->first_slice + chunk->n_slices; j++) {
        plan->slices[j].up = j == chunk->first_slice && chunk->up >= 0 ? (int32_t)chunk[-1].first_slice : -1;
        plan->slices[j].first = plan->slices[j].sequence;
        plan->slices[j].n = 1;
    }
}

/* Links chunks with those that continue them. */
static void cf__pack_link_chunks(cf_plan *plan) {
    int64_t i;
    for (i = plan->n_chunks - 1; i >= 0; i--) {
        cf_chunk *up = plan->chunks[i].up >= 0 ? &plan->chunks[plan->chunks[i].up] : NULL;
        if (up == NULL) continue;
        if (up->down < 0) up->down = i;
        up->below = cf__max(up->below, plan->chunks[i].below + 1);
    }
}

/* Fills in where each chunk's slices are, their offsets, and the sums over them. */
static void cf__pack_finish_chunks(cf_plan *plan) {
    int64_t i, j, first = 0;
    for (i = 0; i < plan->n_chunks; i++) {
        cf_chunk *chunk = &plan->chunks[i];
        chunk->first_slice = first;
        chunk->rank = i / plan->chunks_per_rank;
        for (j = 0; j < chunk->n_slices; j++) {
            cf_slice *slice = &plan->slices[first + j];
            slice->offset = (int32_t)chunk->rows;
            chunk->tokens += slice->length;
            chunk->rows += cf__round_up(slice->length, plan->align);
            chunk->pairs += cf_slice_pairs(slice->begin, slice->length);
        }
        if (plan->order == NULL) cf__pack_finish_list(plan, chunk, i);
        first += chunk->n_slices;
        plan->n_idle += chunk->n_slices == 0;
    }
    cf__pack_link_chunks(plan);
}

/* Links the first slices of a cp group's chunks, which continue slices on other ranks. */
static void cf__pack_link_cp_groups(cf_plan *plan) {
    int64_t i, before;
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        if (c->cp == 0) continue;
        before = cf__pack_before(plan, c);
        plan->slices[c->first_slice].up = before >= 0 ? (int32_t)plan->chunks[before].first_slice : -1;
    }
}

/* ---- writing trees ---- */

/* Builds each unit's list of items. Items of its own tree come first; of these, the ones that begin later, at nodes
   with higher numbers. Items are linked at the front, so the last one linked comes first. */
static void cf__pack_link_items(cf__packer *p) {
    int64_t i, n_free = p->n_items - p->first_free;
    for (i = 0; i < p->n_units; i++) p->units[i].next_slice = -1;
    for (i = 0; i < p->n_items; i++) {
        int64_t item = i < n_free ? p->n_items - 1 - i : i - n_free;
        int32_t parent = p->tree.nodes[cf__pack_item_sequence(p->items[item])].parent;
        p->spare[i] = (uint64_t)(parent + 1) << 32 | (uint64_t)item;
    }
    cf__sort(&p->spare, &p->third, p->n_items, NULL, 0);
    for (i = 0; i < p->n_items; i++) {
        int64_t item = cf__pack_item_sequence(p->spare[i]);
        cf__pack_unit *unit = &p->units[p->unit_of[item]];
        p->next_item[item] = (int32_t)unit->next_slice;
        unit->next_slice = item;
    }
}

/* Adds a slice to a chunk: rows begin .. end - 1 of a node. It continues the node's last slice so far or, if there is
   none, its parent's. */
static void cf__pack_put_slice(cf__packer *p, cf_chunk *chunk, cf__tree_node *node, int64_t begin, int64_t end) {
    int32_t above = node->parent >= 0 ? p->tree.nodes[node->parent].slice : -1;
    const cf_slice slice = {begin, node->sequence, (int32_t)(end - begin), 0, begin > node->begin ? node->slice : above,
                            node->first, node->n};
    p->plan->slices[p->plan->n_slices] = slice;
    chunk->n_slices++;
    node->slice = (int32_t)p->plan->n_slices++;
}

/* Fills in the chunks of a stem. */
static void cf__pack_put_stem(cf__packer *p, int64_t id, cf_chunk *chunks) {
    cf__tree_node *node = &p->tree.nodes[p->tree.stems[id]];
    int64_t at = node->begin, i;
    for (i = 0; i < p->chains[id].n_chunks; i++) {
        int64_t end = at + p->cuts[p->chains[id].first_chunk + i];
        chunks[i].prefix = at;
        chunks[i].index = i;
        chunks[i].chain = p->kin[id].chain;
        chunks[i].state = p->plan->chains[p->kin[id].chain].tokens > 0 ? end - at : 0;
        while (at < end) {
            int64_t to = cf__min(end, node->begin + node->length);
            if (at >= to) {
                node = &p->tree.nodes[node->follower];
                continue;
            }
            cf__pack_put_slice(p, &chunks[i], node, at, to);
            at = to;
        }
    }
}

static void cf__pack_put_bush(cf__packer *p, cf_chunk *chunk, int64_t id) {
    cf__tree_node *nodes = p->tree.nodes;
    int64_t i;
    for (i = id; i < nodes[id].end; i++)
        cf__pack_put_slice(p, chunk, &nodes[i], nodes[i].begin, nodes[i].begin + nodes[i].length);
}

/* Fills in a chain of a tree, and links its chunks to the chunks that they continue. */
static void cf__pack_put_chain(cf__packer *p, int64_t id, int64_t first_chunk) {
    const cf__pack_kin *kin = &p->kin[id];
    cf_chain *chain = &p->plan->chains[kin->chain], *above;
    int64_t i;
    memset(chain, 0, sizeof *chain);
    if (id < p->tree.n_stems) *chain = p->chains[id];
    chain->first_chunk = first_chunk;
    chain->n_chunks = cf__pack_own_chunks(p, id);
    if (chain->n_chunks == 1 && kin->parent >= 0 && kin->child < 0) chain->tokens = 0; /* a leaf */
    for (i = first_chunk + 1; i < first_chunk + chain->n_chunks; i++) p->plan->chunks[i].up = i - 1;
    if (kin->parent < 0) return;
    above = &p->plan->chains[p->kin[kin->parent].chain];
    p->plan->chunks[first_chunk].up = above->first_chunk + above->n_chunks - 1;
}

static void cf__pack_write_unit(cf__packer *p, int64_t id, int64_t first_chunk) {
    cf_plan *plan = p->plan;
    cf_chunk *chunk = &plan->chunks[first_chunk];
    int64_t item = p->units[id].next_slice, first = plan->n_slices;
    if (id < p->head.n_chains) cf__pack_put_chain(p, id, first_chunk);
    if (cf__pack_is_cut(p, id)) {
        cf__pack_put_stem(p, id, chunk);
        chunk += p->chains[id].n_chunks - 1;
    }
    for (; item >= 0; item = p->next_item[item]) cf__pack_put_bush(p, chunk, cf__pack_item_sequence(p->items[item]));
    if (id >= p->head.n_chains) return;
    plan->chains[p->kin[id].chain].sequence = plan->slices[first].sequence;
    if (id < p->tree.n_stems) return;
    chunk->chain = p->kin[id].chain;
    chunk->prefix = plan->slices[first].begin;
}

/* Writes a chain of a list, and makes room for the unit's items. */
static void cf__pack_write_listed(cf__packer *p, int64_t id, int64_t first_chunk) {
    cf_plan *plan = p->plan;
    cf__pack_unit *unit = &p->units[id];
    if (id < p->head.n_chains) {
        cf__pack_write_chain(p, id, first_chunk, &plan->slices[plan->n_slices]);
        plan->n_slices += unit->n_chunks;
    }
    plan->chunks[first_chunk + unit->n_chunks - 1].n_slices += unit->n_items;
    unit->next_slice = plan->n_slices;
    plan->n_slices += unit->n_items;
}

/* Writes everything outside units: whole items, or the order of sequences that share rows. */
static void cf__pack_write_rest(cf__packer *p) {
    cf_plan *plan = p->plan;
    int64_t i;
    for (i = 0; i < p->n_items && p->tree.shares == NULL; i++) {
        cf_slice *slice = &plan->slices[p->units[p->unit_of[i]].next_slice++];
        slice->sequence = (int32_t)cf__pack_item_sequence(p->items[i]);
        slice->begin = 0;
        slice->length = (int32_t)cf__pack_item_length(p->items[i]);
    }
    for (i = 0; i < plan->n_sequences && p->tree.shares != NULL; i++) {
        plan->order[i] = p->tree.order[i];
        plan->common[i] = (int64_t)p->tree.depth[plan->order[i]];
        plan->lengths[i] = p->lengths[i];
    }
}

static cf_result cf__pack_write(void *job) {
    cf__packer *p = (cf__packer *)job;
    const cf_chunk none = {0, 0, 0, 0, 0, -1, 0, 0, 0, -1, -1, 0, 0, 0};
    cf_plan *plan = p->plan;
    int64_t i, chunk = 0;
    for (i = 0; i < plan->n_chunks; i++) plan->chunks[i] = none;
    if (p->tree.shares != NULL) cf__pack_link_items(p);
    plan->n_slices = 0; /* counts them again */
    for (i = 0; i < p->n_units; i++) {
        int32_t id = p->order[i];
        const cf__pack_unit *unit = &p->units[id];
        if (id >= p->head.n_chains && unit->n_items == 0) continue; /* in lockstep, an empty cell */
        chunk = cf__max(chunk, unit->rank * plan->chunks_per_rank);
        if (cf__pack_in_step(p)) chunk = unit->rank * plan->chunks_per_rank + unit->column;
        (p->tree.shares != NULL ? cf__pack_write_unit : cf__pack_write_listed)(p, id, chunk);
        chunk += cf__pack_own_chunks(p, id);
    }
    cf__pack_write_rest(p);
    cf__pack_finish_chunks(plan);
    if (p->desc.max_cp > 1) cf__pack_link_cp_groups(plan);
    return CF_OK;
}

/* ---- all steps, and the public functions ---- */

/* Starts packing. All errors are reported here, before any memory is requested. */
static cf_result cf__pack_start(cf__packer *p, const int64_t *lengths, int64_t n, const cf_pack_desc *desc,
                                cf_error *error) {
    int shares;
    memset(p, 0, sizeof *p);
    if (desc == NULL) return cf__fail_null(error, "desc");
    p->desc = cf_pack_defaults(desc);
    p->lengths = lengths;
    p->n = p->head.n_sequences = n;
    p->error = error;
    p->head.chunk_size = p->desc.chunk_size;
    p->head.align = p->desc.align;
    p->head.max_slices = p->desc.max_slices;
    p->head.split = p->desc.split;
    p->head.n_ranks = p->desc.n_ranks;
    shares = n == 0 || p->desc.shared_prefixes != NULL; /* an empty batch needs no array */
    CF__TRY(cf__needs(p->desc.min_shared_prefix, shares, "min_shared_prefix", -1, "needs shared_prefixes", error));
    CF__TRY(cf__needs(p->desc.no_copies, shares, "no_copies", -1, "needs shared_prefixes", error));
    CF__TRY(cf__pack_check_desc(&p->desc, error));
    p->tree.desc = &p->desc;
    p->tree.lengths = lengths;
    p->tree.shares = n > 0 ? p->desc.shared_prefixes : NULL;
    p->tree.n = n;
    p->tree.may_part = p->desc.n_ranks > 1 && !p->desc.no_copies;
    p->tree.error = error;
    return cf__pack_measure(p);
}

/* Makes units of trees from shares, in the order in which they are written. */
static cf_result cf__pack_prepare_trees(cf__packer *p) {
    CF__TRY(cf__tree_attach_all(&p->tree));
    while (p->tree.may_part && cf__pack_part_trees(p)) continue;
    cf__tree_build(&p->tree);
    p->head.n_chains = p->tree.n_stems;
    CF__TRY(cf__pack_collect_stems(p));
    cf__pack_assign_bushes(p);
    cf__pack_link_chains(p);
    cf__pack_deal_out(p);
    cf__pack_fill_ranks(p);
    cf__pack_order_trees(p);
    return cf__pack_settle(p);
}

static cf_result cf__pack_prepare(void *job) {
    cf__packer *p = (cf__packer *)job;
    if (p->tree.shares != NULL) return cf__pack_prepare_trees(p);
    if (cf__pack_in_step(p)) return cf__pack_prepare_in_step(p);
    cf__pack_collect_chains(p);
    cf__pack_assign_items(p);
    return cf__pack_settle(p);
}

static cf_block *cf__pack_object(void *job, cf__carver *carver) {
    cf__packer *p = (cf__packer *)job;
    cf_plan plan = p->head;
    plan.method = p->desc.method;
    if (p->tree.shares == NULL) plan.n_slices = p->n_dependent + p->n_items;
    if (plan.n_chunks == 0) plan.n_slices = plan.n_chains = 0; /* unknown before packing, or none */
    p->plan = (cf_plan *)cf__take(carver, 1, sizeof(cf_plan));
    plan.chunks = (cf_chunk *)cf__take(carver, plan.n_chunks, sizeof(cf_chunk));
    plan.slices = (cf_slice *)cf__take(carver, plan.n_slices, sizeof(cf_slice));
    plan.chains = (cf_chain *)cf__take(carver, plan.n_chains, sizeof(cf_chain));
    if (p->tree.shares != NULL) {
        plan.order = (int64_t *)cf__take(carver, plan.n_sequences, sizeof(int64_t));
        plan.common = (int64_t *)cf__take(carver, plan.n_sequences, sizeof(int64_t));
        plan.lengths = (int64_t *)cf__take(carver, plan.n_sequences, sizeof(int64_t));
    }
    if (p->plan == NULL) return NULL;
    *p->plan = plan;
    return &p->plan->block;
}

static const cf__recipe cf__pack_recipe = {
    "lengths", 0, cf__pack_scratch, cf__pack_prepare, cf__pack_object, cf__pack_write};

CHUNKFLOW_API cf_result cf_pack(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, cf_plan **out,
                                cf_error *error) {
    cf__packer p;
    CF__TRY(cf__pack_start(&p, lengths, n, desc, error));
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__make(&cf__pack_recipe, &p, desc->allocator, error));
    *out = p.plan;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_pack_size(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, size_t *bytes,
                                     cf_error *error) {
    cf__packer p;
    CF__TRY(cf__pack_start(&p, lengths, n, desc, error));
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    if (cf__pack_tells_size(&p)) return cf__make_or_measure(&cf__pack_recipe, &p, desc->allocator, bytes, error);
    return cf__size_job(&cf__pack_recipe, &p, bytes, error);
}

CHUNKFLOW_API cf_result cf_pack_into(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, void *memory,
                                     size_t bytes, cf_plan **out, cf_error *error) {
    cf__packer p;
    CF__TRY(cf__pack_start(&p, lengths, n, desc, error));
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__make_into(&cf__pack_recipe, &p, memory, bytes, error));
    *out = p.plan;
    return CF_OK;
}

CHUNKFLOW_API void cf_plan_free(cf_plan *plan) {
    if (plan != NULL) cf__free_object(plan, &plan->block);
}

/* ================================================================================================================
   >>plan    asking a plan, and checking one from elsewhere

   `up` is the slice whose rows come directly before those of a slice, in lists, trees and cp groups alike. In this
   example chunks have 8 tokens. Sequence 0 has 20 tokens; sequence 1 has 11, of which it shares 9 with sequence 0:

       chunk    slice   rows      up   runs through it
       0        0        0 ..  7  -1   0 and 1
       1        1        8         0   0 and 1
                2        9 .. 15   1   0
       2        3       16 .. 19   2   0
                4        9 .. 10   1   1

   A slice begins where its `up` ends, so the rows that lead to a token have no gap. In a list a sequence is one chain
   or one slice, which must occur once. In trees two sums show that a sequence has each token once. Its slices have as
   many tokens as it has (sequence 1: 8 + 1 + 2 = 11) and as many attention pairs (36 + 9 + 21 = 66 = 11 x 12 / 2). Both
   sums are computed for all sequences in one walk, as differences: added at the first sequence of a slice, and
   subtracted after its last.
   ================================================================================================================
   */

/* Returns the rows before a chunk that its first slice sees; in a cp group these include rows on other ranks. */
static int64_t cf__plan_prefix(const cf_plan *plan, const cf_chunk *c) {
    return c->cp > 0 ? cf__max(plan->slices[c->first_slice].begin, 0) : c->prefix;
}

/* Returns the slice in the same chunk that a slice continues; -1: none. */
static inline int64_t cf__plan_parent(const cf_plan *plan, const cf_chunk *c, int64_t id) {
    int64_t up = plan->slices[id].up;
    return up >= c->first_slice && up < id ? up : -1;
}

/* Returns the chain that a chain continues; -1: none. */
static inline int64_t cf__plan_chain_above(const cf_plan *plan, int64_t chain) {
    int64_t up = plan->chunks[plan->chains[chain].first_chunk].up;
    return up >= 0 ? plan->chunks[up].chain : -1;
}

/* Returns the previous sibling: the chunk before this one among those that continue the same chunk. -1: this is the
   first, or continues none. The sibling is on the way up from chunk id - 1. */
static int64_t cf__plan_previous(const cf_plan *plan, int64_t id) {
    int64_t up = plan->chunks[id].up, at = id - 1;
    if (up < 0 || up == at) return -1;
    while (plan->chunks[at].up != up) at = plan->chunks[at].up;
    return at;
}

/* Returns the next sibling of a chunk, which comes directly after all chunks below this one; -1: none. */
static int64_t cf__plan_next(const cf_plan *plan, int64_t id) {
    if (plan->chunks[id].up < 0 || plan->chunks[plan->chunks[id].up].down == id) return -1;
    while (plan->chunks[id].down >= 0) id = plan->chunks[id].down;
    return id + 1;
}

static double cf__plan_imbalance(double most, double sum, int64_t n) { return sum > 0 ? most / (sum / (double)n) : 0; }

/* Returns 1 if a dependent chunk also holds short sequences outside its chain. */
static int cf__plan_is_hybrid(const cf_plan *plan, const cf_chunk *chunk) {
    int64_t i = chunk->first_slice + chunk->n_slices - 1;
    if (plan->order == NULL) return chunk->n_slices > 1;
    while (cf__plan_parent(plan, chunk, i) >= 0) i = plan->slices[i].up; /* short sequences come last */
    return i > chunk->first_slice && plan->slices[i].begin == 0;
}

/* Counts the chunks by kind, and computes fullest rank / mean, in tokens and in pairs. */
static void cf__plan_measure_ranks(const cf_plan *plan, cf_plan_stats *stats) {
    double most_tokens = 0, most_pairs = 0;
    int64_t rank, i;
    for (rank = 0; rank < plan->n_ranks; rank++) {
        double tokens = 0, pairs = 0;
        for (i = rank * plan->chunks_per_rank; i < (rank + 1) * plan->chunks_per_rank; i++) {
            const cf_chunk *chunk = &plan->chunks[i];
            stats->most_slices = cf__max(stats->most_slices, chunk->n_slices);
            if (chunk->chain < 0) stats->n_standalone += chunk->n_slices > 0;
            else if (cf__plan_is_hybrid(plan, chunk)) stats->n_hybrid++;
            else stats->n_dependent++;
            tokens += (double)chunk->tokens;
            pairs += (double)chunk->pairs;
        }
        most_tokens = cf__most(most_tokens, tokens);
        most_pairs = cf__most(most_pairs, pairs);
        stats->pairs += pairs;
    }
    stats->rank_token_imbalance = cf__plan_imbalance(most_tokens, (double)stats->rows, plan->n_ranks);
    stats->rank_pair_imbalance = cf__plan_imbalance(most_pairs, stats->pairs, plan->n_ranks);
}

/* Compares the most expensive chunk, rank and unit (chain or standalone chunk) with the mean. */
static void cf__plan_measure_costs(const cf_plan *plan, cf_pass_cost cost, cf_plan_stats *stats) {
    double rows = 0, sum = 0, unit = 0, rank = 0, most = 0, most_unit = 0, most_rank = 0;
    int64_t i;
    for (i = 0; i < plan->n_chunks; i++) rows += (double)plan->chunks[i].rows;
    if (stats->pairs > 0) cost = cf__pack_weights(&cost, rows, stats->pairs);
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *chunk = &plan->chunks[i];
        double seconds = chunk->n_slices > 0 ? cf_cost_seconds(&cost, chunk->rows, chunk->pairs) : 0;
        unit = (chunk->up >= 0 ? unit : 0) + seconds;
        rank = (i % plan->chunks_per_rank > 0 ? rank : 0) + seconds;
        sum += seconds;
        most = cf__most(most, seconds);
        most_unit = cf__most(most_unit, unit);
        most_rank = cf__most(most_rank, rank);
    }
    stats->chunk_imbalance = cf__plan_imbalance(most, sum, plan->n_chunks - plan->n_idle);
    stats->rank_imbalance = cf__plan_imbalance(most_rank, sum, plan->n_ranks);
    stats->unit_imbalance = cf__plan_imbalance(most_unit, sum, plan->n_ranks);
}

CHUNKFLOW_API void cf_plan_measure(const cf_plan *plan, const cf_pass_cost *cost, cf_plan_stats *stats) {
    const cf_pass_cost none = {0, 0, 0};
    int64_t i, n_used;
    if (stats == NULL) return;
    memset(stats, 0, sizeof *stats);
    if (plan == NULL) return;
    n_used = plan->n_chunks - plan->n_idle;
    stats->n_idle = plan->n_idle;
    stats->excess = n_used - plan->lower_bound;
    for (i = 0; i < plan->n_slices; i++) {
        const cf_slice *s = &plan->slices[i];
        double pairs = (double)cf_slice_pairs(s->begin, s->length);
        stats->longest_sequence = cf__max(stats->longest_sequence, s->begin + s->length);
        stats->rows += s->length;
        stats->unshared_pairs += cf__product(pairs, (double)s->n);
    }
    for (i = 0; i < plan->n_chains; i++)
        stats->longest_chain = cf__max(stats->longest_chain, plan->chunks[plan->chains[i].first_chunk].below + 1);
    if (n_used > 0) stats->fill = (double)stats->rows / ((double)n_used * (double)plan->chunk_size);
    cf__plan_measure_ranks(plan, stats);
    cf__plan_measure_costs(plan, cost != NULL ? *cost : none, stats);
}

/* ---- checking a plan ---- */

/* Sums over the slices of a sequence, minus those of the previous sequence in order. */
typedef struct cf__plan_sum {
    uint64_t tokens;
    uint64_t shared;          /* tokens of slices that run through both this and the previous sequence */
    uint64_t low, high;       /* attention pairs: low + high x 2^32 */
} cf__plan_sum;

typedef struct cf__plan_check {
    const cf_plan *plan;
    const int64_t *lengths;
    /* (n_sequences) trees: 1 if it is already in the order; lists: 1 if a chain or slice has all its tokens */
    unsigned char *seen;
    int64_t *below;      /* (n_chunks) number of chunks of the longest path below each */
    /* of trees */
    int64_t *ends;       /* (n_chunks) chunks id + 1 .. ends[id] - 1 are below chunk id */
    cf__plan_sum *sums;  /* (n_sequences + 1) in order */
    cf_error *error;
} cf__plan_check;

/* Check that a number of a plan is in a range, or equals the known one. Most checks are of these two kinds. */
static inline cf_result cf__plan_within(const cf__plan_check *check, const char *field, int64_t item, int64_t least,
                                        int64_t most, int64_t got, const char *why) {
    return cf__inside(got, least, most, CF_ERROR_PLAN, field, item, why, check->error);
}

static inline cf_result cf__plan_is(const cf__plan_check *check, const char *field, int64_t item, int64_t wanted,
                                    int64_t got, const char *why) {
    return cf__plan_within(check, field, item, wanted, wanted, got, why);
}

/* Checks counts and pointers, on which every loop over a plan relies. */
static cf_result cf__plan_check_counts(const cf_plan *plan, cf_error *error) {
    const cf__plan_check check = {plan, NULL, NULL, NULL, NULL, NULL, error};
    const cf_result bad = CF_ERROR_PLAN;
    if (plan == NULL) return cf__fail_null(error, "plan");
    const int many = plan->order != NULL || plan->n_ranks > 1; /* trees, or cp groups */
    const int64_t most_chains = many ? plan->n_chunks : plan->n_sequences;
    const cf__member members[] = {{"chunk_size", plan->chunk_size, 1, CF_MAX_CHUNK_SIZE, bad},
                                  {"align", plan->align, 1, plan->chunk_size, bad},
                                  {"max_slices", plan->max_slices, 0, INT64_MAX, bad},
                                  {"method", (int)plan->method, 0, CF_PACK_COUNT - 1, bad},
                                  {"split", (int)plan->split, 0, CF_SPLIT_COUNT - 1, bad},
                                  {"n_sequences", plan->n_sequences, 0, CF_MAX_SEQUENCES, bad},
                                  {"n_empty", plan->n_empty, 0, plan->n_sequences, bad},
                                  {"n_tokens", plan->n_tokens, 0, INT64_MAX, bad},
                                  {"n_ranks", plan->n_ranks, 1, CF_MAX_RANKS, bad},
                                  {"chunks_per_rank", plan->chunks_per_rank, 0, CF_MAX_CHUNKS, bad},
                                  {"n_chunks", plan->n_chunks, 0, CF_MAX_CHUNKS, bad},
                                  {"n_idle", plan->n_idle, 0, plan->n_chunks, bad},
                                  {"n_chains", plan->n_chains, 0, most_chains, bad},
                                  {"n_slices", plan->n_slices, 0, CF_MAX_SLICES, bad}};
    CF__TRY(cf__check_members(members, CF__COUNT(members), bad, error));
    CF__TRY(cf__plan_within(&check, "lower_bound", -1, 0, plan->n_chunks - plan->n_idle, plan->lower_bound,
                            "is out of range"));
    CF__TRY(cf__plan_is(&check, "n_chunks", -1, plan->n_ranks * plan->chunks_per_rank, plan->n_chunks,
                        "must be n_ranks x chunks_per_rank"));
    if (plan->n_chunks > 0 && plan->chunks == NULL) return cf__refuse(error, bad, "chunks", -1, "is NULL");
    if (plan->n_slices > 0 && plan->slices == NULL) return cf__refuse(error, bad, "slices", -1, "is NULL");
    if (plan->n_chains > 0 && plan->chains == NULL) return cf__refuse(error, bad, "chains", -1, "is NULL");
    if (plan->order == NULL) return CF_OK;
    if (plan->common == NULL) return cf__refuse(error, bad, "common", -1, "is NULL");
    if (plan->lengths == NULL) return cf__refuse(error, bad, "lengths", -1, "is NULL");
    return CF_OK;
}

static cf_result cf__plan_check_lengths(const cf__plan_check *check, int64_t n) {
    const cf_plan *plan = check->plan;
    int64_t i, n_empty = 0, n_tokens = 0;
    CF__TRY(cf__plan_is(check, "n_sequences", -1, n, plan->n_sequences, "the plan is of another number of lengths"));
    if (n > 0 && check->lengths == NULL) return cf__fail_null(check->error, "lengths");
    for (i = 0; i < n; i++) {
        CF__TRY(cf__pack_add_length(check->lengths, i, &n_tokens, check->error));
        n_empty += check->lengths[i] == 0;
    }
    CF__TRY(cf__plan_is(check, "n_empty", -1, n_empty, plan->n_empty, "is the wrong count"));
    return cf__plan_is(check, "n_tokens", -1, n_tokens, plan->n_tokens, "is the wrong sum");
}

/* Checks a part of a cp group against the part on the next rank (for the last rank, the first): it must have as many
   chunks, in the same columns. So no part can be missing. */
static cf_result cf__plan_check_part(const cf__plan_check *check, int64_t id) {
    const cf_plan *plan = check->plan;
    const cf_chain *g = &plan->chains[id], *next;
    int64_t part = g->first_chunk / plan->chunks_per_rank % g->cp, first;
    first = g->first_chunk + (part + 1 < g->cp ? 1 : -part) * plan->chunks_per_rank;
    CF__TRY(cf__plan_within(check, "chunks.chain", first, 0, plan->n_chains - 1, plan->chunks[first].chain,
                            "is no part of its cp group"));
    next = &plan->chains[plan->chunks[first].chain];
    CF__TRY(cf__plan_is(check, "chains.cp", id, next->cp, g->cp, "does not agree with the next part"));
    CF__TRY(cf__plan_is(check, "chains.n_chunks", id, next->n_chunks, g->n_chunks, "is not the next part's"));
    CF__TRY(cf__plan_is(check, "chains.first_chunk", id, next->first_chunk, first, "is at another step than the next"));
    return cf__plan_is(check, "chains.sequence", id, next->sequence, g->sequence, "is not the next part's");
}

/* ---- the chunks that a plan's chains are made of ---- */

/* Checks a chunk's links to the chunk that it continues and to those that continue it. Chunks of a tree are in
   preorder, so a chunk continues the previous chunk, or one above that. */
static cf_result cf__plan_check_link(const cf_plan *plan, int64_t id, cf_error *error) {
    const cf_result bad = CF_ERROR_PLAN;
    const cf_chunk *c = &plan->chunks[id], *up;
    int64_t last = id - id % plan->chunks_per_rank + plan->chunks_per_rank - 1, at = id - 1;
    int begins = c->index == 0 && (plan->order == NULL || c->chain < 0), goes_on = c->below > 0;
    CF__TRY(cf__inside(c->up, c->index > 0 ? at : -1, begins ? -1 : at, bad, "chunks.up", id,
                       "is not the chunk that it continues", error));
    CF__TRY(cf__inside(c->below, 0, c->chain >= 0 ? last - id : 0, bad, "chunks.below", id, "is out of range", error));
    CF__TRY(cf__inside(c->down, goes_on ? id + 1 : -1, goes_on ? last : -1, bad, "chunks.down", id,
                       "is no chunk that continues it", error));
    if (goes_on)
        CF__TRY(cf__inside(plan->chunks[c->down].up, id, id, bad, "chunks.up", c->down, "is not what it continues",
                           error));
    if (c->up < 0) return CF_OK;
    while (at > c->up) at = plan->chunks[at].up;
    CF__TRY(cf__inside(c->up, at, at, bad, "chunks.up", id, "is not above the chunk before it", error));
    up = &plan->chunks[c->up];
    CF__TRY(cf__inside(up->state, 1, INT64_MAX, bad, "chunks.state", c->up, "is nothing to continue", error));
    CF__TRY(cf__inside(up->down, id, last, bad, "chunks.down", c->up, "is not the last that continues it", error));
    CF__TRY(cf__inside(up->below, c->below + 1, last, bad, "chunks.below", c->up, "is less than what is below", error));
    at = plan->chains[up->chain].n_chunks - 1;
    if (c->index > 0) return CF_OK;
    return cf__inside(up->index, at, at, bad, "chunks.up", id, "is not the last chunk of its chain", error);
}

/* Checks the facts on which a walk over the chunks of these ranks relies, in a plan from any source. The chunks of a
   chain must follow each other on one rank and name their chain. Their slices must exist. No number of tokens may be
   negative. */
static cf_result cf__plan_check_units(const cf_plan *plan, int64_t rank, int64_t end_rank, cf_error *error) {
    const cf_result bad = CF_ERROR_PLAN;
    int64_t id, end, left = 0, chain = -1, index = 0, cp;
    int is_leaf;
    for (id = 0; id < plan->n_chains; id++) {
        cp = plan->chains[id].cp;
        CF__TRY(cf__inside(plan->chains[id].first_chunk, 0, plan->n_chunks - 1, bad, "chains.first_chunk", id,
                           "there is no such chunk", error));
        if (cp == 0) continue;
        if (plan->order != NULL)
            return cf__fail(error, bad, "chains.cp", id, 0, cp, "trees are not spread over several ranks");
        CF__TRY(cf__inside(cp, 2, plan->n_ranks, bad, "chains.cp", id, "is no number of ranks", error));
        CF__TRY(cf__inside(plan->n_ranks % cp, 0, 0, bad, "chains.cp", id, "does not divide the ranks", error));
        rank = 0; /* a pass of a cp group also reads chunks of the group's other ranks */
        end_rank = plan->n_ranks;
    }
    end = end_rank * plan->chunks_per_rank;
    for (id = rank * plan->chunks_per_rank; id < end; id++, left--, index++) {
        const cf_chunk *c = &plan->chunks[id];
        CF__TRY(cf__inside(c->chain, -1, plan->n_chains - 1, bad, "chunks.chain", id, "there is no such chain", error));
        if (left > 0 ? c->chain != chain : c->chain >= 0 && plan->chains[c->chain].first_chunk != id)
            return cf__refuse(error, bad, "chunks.chain", id, "is not the chain that holds this chunk");
        if (left == 0) {
            chain = c->chain;
            left = chain >= 0 ? plan->chains[chain].n_chunks : 1;
            index = 0;
            CF__TRY(cf__inside(left, 1, plan->chunks_per_rank - id % plan->chunks_per_rank, bad, "chains.n_chunks",
                               chain,
                               "counts chunks of the next rank, or none", error));
        }
        CF__TRY(cf__inside(c->index, index, index, bad, "chunks.index", id, "is the wrong place in its chain", error));
        CF__TRY(cf__plan_check_link(plan, id, error));
        cp = chain >= 0 ? plan->chains[chain].cp : 0;
        CF__TRY(cf__inside(c->cp, cp, cp == 0 && chain >= 0 && plan->n_ranks == 1 ? 1 : cp, bad, "chunks.cp", id,
                           "is not that of its chain", error)); /* columns have 1 */
        CF__TRY(cf__inside(c->first_slice, 0, plan->n_slices, bad, "chunks.first_slice", id,
                           "there is no such slice", error));
        CF__TRY(cf__inside(c->n_slices, chain >= 0, plan->n_slices - c->first_slice, bad, "chunks.n_slices", id,
                           "is out of range", error));
        CF__TRY(cf__inside(c->tokens, 0, INT64_MAX, bad, "chunks.tokens", id, "is negative", error));
        is_leaf = c->up >= 0 && index == 0 && left == 1 && plan->order != NULL;
        CF__TRY(cf__inside(c->state, chain >= 0 && !is_leaf, chain >= 0 ? plan->chunk_size : 0, bad,
                           "chunks.state", id, "is out of range", error));
        CF__TRY(cf__inside(c->rows, 0, INT64_MAX, bad, "chunks.rows", id, "is negative", error));
        CF__TRY(cf__inside(c->prefix, 0, INT64_MAX - c->rows, bad, "chunks.prefix", id, "is out of range", error));
        CF__TRY(cf__inside(c->rank, id / plan->chunks_per_rank, id / plan->chunks_per_rank, bad, "chunks.rank", id,
                           "is the wrong rank", error));
    }
    return CF_OK;
}

/* Checks that a chunk of a chain begins where the state of the chunk that it continues ends. A leaf may leave its path
   earlier. */
static cf_result cf__plan_check_prefix(const cf__plan_check *check, int64_t id) {
    const cf_plan *plan = check->plan;
    const cf_chunk *c = &plan->chunks[id];
    int64_t end = c->up < 0 ? 0 : plan->chunks[c->up].prefix + plan->chunks[c->up].state;
    int leaf = c->up >= 0 && c->state == 0;
    if (c->chain < 0)
        return cf__plan_is(check, "chunks.prefix", id, 0, c->prefix, "must be 0 in a chunk that is in no chain");
    return cf__plan_within(check, "chunks.prefix", id, leaf ? 1 : end, end, c->prefix,
                           "is not where the rows before it end");
}

/* Records that a slice of a list, or its chain, has all tokens of its sequence. */
static cf_result cf__plan_see(const cf__plan_check *check, int64_t slice) {
    int32_t sequence = check->plan->slices[slice].sequence;
    if (check->seen[sequence])
        return cf__refuse(check->error, CF_ERROR_PLAN, "slices.sequence", slice, "its sequence has tokens twice");
    check->seen[sequence] = 1;
    return CF_OK;
}

static cf_result cf__plan_check_chain(const cf__plan_check *check, int64_t id) {
    const cf_plan *plan = check->plan;
    const cf_chain *g = &plan->chains[id];
    int64_t i, rows = 0, cp = cf__max(g->cp, 1), part = g->first_chunk / plan->chunks_per_rank % cp;
    int64_t first = plan->chunks[g->first_chunk].first_slice;
    const cf_slice *last = &plan->slices[plan->chunks[g->first_chunk + g->n_chunks - 1].first_slice];
    CF__TRY(cf__plan_is(check, "chains.sequence", id, plan->slices[first].sequence, g->sequence,
                        "is not the sequence of its first slice"));
    for (i = g->first_chunk; i < g->first_chunk + g->n_chunks; i++) rows += plan->chunks[i].state;
    if (plan->order == NULL && part == cp - 1)
        CF__TRY(cf__plan_is(check, "chains.n_chunks", id, check->lengths[g->sequence], last->begin + last->length,
                            "leaves out tokens at the end of its sequence"));
    CF__TRY(cf__plan_is(check, "chains.tokens", id, rows, g->tokens, "is the wrong sum"));
    if (plan->order == NULL && part == 0) CF__TRY(cf__plan_see(check, first));
    return g->cp > 0 ? cf__plan_check_part(check, id) : CF_OK;
}

/* Checks the length of the longest path below each chunk. */
static cf_result cf__plan_check_below(const cf__plan_check *check) {
    const cf_plan *plan = check->plan;
    int64_t i, up;
    for (i = plan->n_chunks - 1; i >= 0; i--) {
        CF__TRY(cf__plan_is(check, "chunks.below", i, check->below[i], plan->chunks[i].below,
                            "is not the longest path below it"));
        if ((up = plan->chunks[i].up) >= 0) check->below[up] = cf__max(check->below[up], check->below[i] + 1);
    }
    return CF_OK;
}

/* Returns the chunk that has a slice. */
static int64_t cf__plan_chunk_of(const cf_plan *plan, int64_t slice) {
    int64_t low = 0, high = plan->n_chunks - 1, middle;
    while (low < high) {
        middle = low + (high - low + 1) / 2;
        if (plan->chunks[middle].first_slice <= slice) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Checks a slice alone: its sequences exist and have its tokens. */
static cf_result cf__plan_check_slice(const cf__plan_check *check, int64_t id) {
    const cf_plan *plan = check->plan;
    const cf_slice *s = &plan->slices[id];
    int64_t most = plan->order != NULL ? plan->n_sequences - s->first : 1, at, length;
    CF__TRY(cf__plan_within(check, "slices.sequence", id, 0, plan->n_sequences - 1, s->sequence,
                            "there is no such sequence"));
    CF__TRY(cf__plan_within(check, "slices.first", id, 0, plan->n_sequences - 1, s->first, "is no place in order"));
    CF__TRY(cf__plan_within(check, "slices.n", id, 1, most, s->n, "is no number of sequences"));
    at = plan->order != NULL ? plan->order[s->first] : s->first;
    CF__TRY(cf__plan_is(check, "slices.sequence", id, at, s->sequence, "is not the first in order"));
    length = check->lengths[at];
    CF__TRY(cf__plan_within(check, "slices.begin", id, 0, length - 1, s->begin, "is outside of its sequence"));
    CF__TRY(cf__plan_within(check, "slices.length", id, 1, length - s->begin, s->length, "is outside of its sequence"));
    CF__TRY(cf__plan_within(check, "slices.length", id, 1, plan->chunk_size, s->length, "is more than chunk_size"));
    return cf__plan_within(check, "slices.up", id, -1, plan->n_slices - 1, s->up, "there is no such slice");
}

/* Checks a slice of a tree that continues a slice of another chunk, which must be on the path. *sees: rows of the path
   that the previous slice sees. */
static cf_result cf__plan_check_path(const cf__plan_check *check, int64_t chunk, int64_t id, int64_t *sees) {
    const cf_plan *plan = check->plan;
    const cf_slice *s = &plan->slices[id];
    int64_t above;
    CF__TRY(cf__plan_within(check, "slices.begin", id, 0, *sees, s->begin, "sees more of the path than one before it"));
    *sees = s->begin;
    if (s->up < 0) return CF_OK;
    above = cf__plan_chunk_of(plan, s->up);
    if (above >= chunk || check->ends[above] <= chunk || plan->slices[s->up].offset >= plan->chunks[above].state)
        return cf__refuse(check->error, CF_ERROR_PLAN, "slices.up", id, "is not on the path of its chunk");
    return CF_OK;
}

/* Checks the slice that a slice continues. In a list it is the first slice of the previous chunk, in a cp group
   possibly on another rank. Within a chunk of a tree, it must be the previous slice or one above that. It ends where
   this slice begins, and all sequences of this slice run through it. */
static cf_result cf__plan_check_up(const cf__plan_check *check, int64_t chunk, int64_t id, int64_t *sees) {
    const cf_plan *plan = check->plan;
    const cf_chunk *c = &plan->chunks[chunk];
    const cf_slice *s = &plan->slices[id], *up = s->up >= 0 ? &plan->slices[s->up] : NULL;
    int64_t wanted = s->up, end = 0, first = 0, n = plan->n_sequences;
    int is_inside = plan->order != NULL && cf__plan_parent(plan, c, id) >= 0;
    if (is_inside)
        for (wanted = id - 1; wanted > s->up;) wanted = plan->slices[wanted].up;
    if (plan->order == NULL) {
        wanted = id == c->first_slice ? cf__pack_before(plan, c) : -1;
        if (wanted >= 0) wanted = plan->chunks[wanted].first_slice;
    }
    CF__TRY(cf__plan_is(check, "slices.up", id, wanted, s->up, "is not the slice before it, or has been left"));
    if (up != NULL) { /* slices of later ranks are not checked yet */
        end = (int64_t)((uint64_t)up->begin + (uint64_t)up->length);
        first = up->first;
        n = up->n;
    }
    CF__TRY(cf__plan_is(check, "slices.begin", id, end, s->begin, "is not where the slice that it goes on from ends"));
    if (s->begin % plan->align != 0)
        return cf__fail(check->error, CF_ERROR_PLAN, "slices.begin", id, s->begin - s->begin % plan->align, s->begin,
                        "is no multiple of the alignment");
    if (plan->order != NULL && !is_inside) CF__TRY(cf__plan_check_path(check, chunk, id, sees));
    CF__TRY(cf__plan_within(check, "slices.first", id, first, first + n - 1, s->first, "is not of those before it"));
    return cf__plan_within(check, "slices.n", id, 1, first + n - s->first, s->n, "is more than there are before it");
}

/* Checks a chunk and its slices, after cf__plan_check_units has checked its other members. Slices of its state come
   first, then slices that see some of the path, then others. In a list one slice has the state, and whole sequences
   follow. */
static cf_result cf__plan_check_chunk(const cf__plan_check *check, int64_t id) {
    const cf_plan *plan = check->plan;
    const cf_chunk *c = &plan->chunks[id];
    int64_t i, tokens = 0, rows = 0, pairs = 0, sees = c->prefix;
    int is_list = plan->order == NULL, is_last = c->chain < 0 || c->index + 1 == plan->chains[c->chain].n_chunks;
    CF__TRY(cf__plan_check_prefix(check, id));
    CF__TRY(cf__plan_is(check, "chunks.cp", id, c->chain >= 0 ? plan->chains[c->chain].cp : 0, c->cp,
                        "is not that of its chain"));
    CF__TRY(cf__plan_within(check, "chunks.n_slices", id, 0, plan->max_slices > 0 ? plan->max_slices : INT64_MAX,
                            c->n_slices, "is more than max_slices"));
    /* A loop of its own is faster: slices read `lengths` at random places, and a processor overlaps several cache
       misses of so short a loop. */
    for (i = c->first_slice; i < c->first_slice + c->n_slices; i++) CF__TRY(cf__plan_check_slice(check, i));
    for (i = c->first_slice; i < c->first_slice + c->n_slices; i++) {
        const cf_slice *s = &plan->slices[i];
        int64_t own;
        if (tokens >= c->state && !is_last)
            return cf__fail(check->error, CF_ERROR_PLAN, "chunks.n_slices", id, i - c->first_slice, c->n_slices,
                            "counts what is not its chain's, which only a chain's last chunk may hold");
        CF__TRY(cf__plan_is(check, "slices.offset", i, rows, s->offset, "is the wrong place in its chunk"));
        if (i == c->first_slice && c->cp == 0)
            CF__TRY(cf__plan_is(check, "slices.begin", i, sees, s->begin, "is not where the chunk begins"));
        if (tokens > 0 && tokens < c->state)
            CF__TRY(cf__plan_is(check, "slices.up", i, i - 1, s->up, "leaves the chain before its rows are complete"));
        if (tokens < c->state && is_list)
            CF__TRY(cf__plan_is(check, "chunks.state", id, s->length, c->state, "is not its chain's slice"));
        if (tokens < c->state)
            CF__TRY(cf__plan_within(check, "slices.length", i, 1, c->state - tokens, s->length,
                                    "is more than its chain has"));
        CF__TRY(cf__plan_check_up(check, id, i, &sees));
        if (is_list && tokens >= c->state)
            CF__TRY(cf__plan_is(check, "slices.length", i, check->lengths[s->sequence], s->length,
                                "must cover its whole sequence"));
        if (is_list && tokens >= c->state) CF__TRY(cf__plan_see(check, i));
        own = cf_slice_pairs(s->begin, s->length);
        if (own < 0 || !cf__add(pairs, own, &pairs))
            return cf__refuse(check->error, CF_ERROR_PLAN, "chunks.pairs", id, "does not fit in 64 bits");
        tokens += s->length;
        rows += cf__round_up(s->length, plan->align);
        CF__TRY(cf__plan_within(check, "chunks.rows", id, 1, plan->chunk_size, rows, "is more than chunk_size"));
    }
    CF__TRY(cf__plan_is(check, "chunks.tokens", id, tokens, c->tokens, "is the wrong sum"));
    CF__TRY(cf__plan_within(check, "chunks.state", id, 0, tokens, c->state, "is more than its slices have"));
    CF__TRY(cf__plan_is(check, "chunks.rows", id, rows, c->rows, "is the wrong sum"));
    return cf__plan_is(check, "chunks.pairs", id, pairs, c->pairs, "is the wrong sum");
}

/* Checks the order of sequences, and finds which chunks are below which. */
static cf_result cf__plan_check_order(const cf__plan_check *check) {
    const cf_plan *plan = check->plan;
    int64_t i, before = 0;
    for (i = 0; i < plan->n_sequences; i++) {
        CF__TRY(cf__plan_within(check, "order", i, 0, plan->n_sequences - 1, plan->order[i],
                                "there is no such sequence"));
        if (check->seen[plan->order[i]]) return cf__refuse(check->error, CF_ERROR_PLAN, "order", i, "is there twice");
        check->seen[plan->order[i]] = 1;
        CF__TRY(cf__plan_is(check, "lengths", i, check->lengths[i], plan->lengths[i], "is not what was given"));
        CF__TRY(cf__plan_within(check, "common", i, 0, cf__min(before, check->lengths[plan->order[i]]), plan->common[i],
                                "is more than one of the two has"));
        before = check->lengths[plan->order[i]];
    }
    for (i = plan->n_chunks - 1; i >= 0; i--) {
        int64_t up = plan->chunks[i].up;
        check->ends[i] = cf__max(check->ends[i], i + 1);
        if (up >= 0) check->ends[up] = cf__max(check->ends[up], check->ends[i]);
    }
    return CF_OK;
}

/* ---- every token once ---- */

/* Adds a slice to the sum of its first sequence, and subtracts it after its last. */
static void cf__plan_add_slice(cf__plan_sum *sums, const cf_slice *s) {
    uint64_t tokens = (uint64_t)s->length, pairs = (uint64_t)cf_slice_pairs(s->begin, s->length);
    cf__plan_sum *first = &sums[s->first], *end = first + s->n;
    first->tokens += tokens;
    first->low += pairs & UINT32_MAX;
    first->high += pairs >> 32;
    first[1].shared += tokens; /* cancels out if the slice has only one sequence */
    end->shared -= tokens;
    end->tokens -= tokens;
    end->low -= pairs & UINT32_MAX;
    end->high -= pairs >> 32;
}

/* Compares a sum of pairs with the pairs of a whole sequence, length x (length + 1) / 2, which 64 bits may not hold. */
static int cf__plan_has_all_pairs(const cf__plan_sum *sum, int64_t length) {
    uint64_t a = (uint64_t)length, b = a + 1, low, high;
    if (a % 2 == 0) a /= 2;
    else b /= 2;
    low = (a & UINT32_MAX) * (b & UINT32_MAX);
    high = (a >> 32) * (b & UINT32_MAX) + (a & UINT32_MAX) * (b >> 32) + (low >> 32) + ((a >> 32) * (b >> 32) << 32);
    return (sum->low & UINT32_MAX) == (low & UINT32_MAX) && sum->high + (sum->low >> 32) == high;
}

/* Reports that sequence order[at] has too many or too few tokens; names its last slice. */
static cf_result cf__plan_wrong_sum(const cf__plan_check *check, int64_t at) {
    const cf_slice *slices = check->plan->slices;
    int64_t i = check->plan->n_slices - 1;
    while (i >= 0 && (at < slices[i].first || at >= slices[i].first + slices[i].n)) i--;
    if (i < 0)
        return cf__fail(check->error, CF_ERROR_PLAN, "slices.sequence", -1, check->plan->order[at], 0,
                        "is nowhere the one wanted");
    return cf__refuse(check->error, CF_ERROR_PLAN, "slices.sequence", i,
                      "its sequence has tokens twice, or not all of them");
}

/* Checks that each sequence has each token once. Slices that continue each other leave no gap. So if the slices of a
   sequence have as many tokens and pairs as the sequence, they go from its first token to its last. (If a token
   occurred twice, a later token would be missing, and a later token has more pairs.) Also checks `common`: neighbours
   in order share the slices that both run through. */
static cf_result cf__plan_check_sums(const cf__plan_check *check) {
    const cf_plan *plan = check->plan;
    cf__plan_sum sum = {0, 0, 0, 0};
    int64_t i;
    for (i = 0; i < plan->n_slices; i++) cf__plan_add_slice(check->sums, &plan->slices[i]);
    for (i = 0; i < plan->n_sequences; i++) {
        int64_t length = check->lengths[plan->order[i]];
        sum.tokens += check->sums[i].tokens;
        sum.shared += check->sums[i].shared;
        sum.low += check->sums[i].low;
        sum.high += check->sums[i].high;
        if (sum.tokens != (uint64_t)length || !cf__plan_has_all_pairs(&sum, length))
            return cf__plan_wrong_sum(check, i);
        CF__TRY(cf__plan_is(check, "common", i, (int64_t)sum.shared, plan->common[i], "is not what slices share"));
    }
    return CF_OK;
}

/* Checks that each sequence of a list has all its tokens: in a chain, or in one slice. */
static cf_result cf__plan_check_seen(const cf__plan_check *check) {
    int64_t i;
    for (i = 0; i < check->plan->n_sequences; i++)
        if (check->lengths[i] > 0 && !check->seen[i])
            return cf__fail(check->error, CF_ERROR_PLAN, "slices.sequence", -1, i, 0, "is nowhere the one wanted");
    return CF_OK;
}

static cf_result cf__plan_check_body(void *job) {
    const cf__plan_check *check = (const cf__plan_check *)job;
    const cf_plan *plan = check->plan;
    int64_t i, first = 0, n_idle = 0;
    if (plan->chunk_size % plan->align != 0)
        return cf__refuse(check->error, CF_ERROR_PLAN, "align", -1, "does not divide chunk_size");
    CF__TRY(cf__plan_check_units(plan, 0, plan->n_ranks, check->error));
    if (plan->order != NULL) CF__TRY(cf__plan_check_order(check));
    for (i = 0; i < plan->n_chunks; i++) {
        CF__TRY(cf__plan_is(check, "chunks.first_slice", i, first, plan->chunks[i].first_slice,
                            "leaves a gap or overlaps"));
        CF__TRY(cf__plan_check_chunk(check, i));
        first += plan->chunks[i].n_slices;
        n_idle += plan->chunks[i].n_slices == 0;
    }
    CF__TRY(cf__plan_is(check, "n_slices", -1, first, plan->n_slices, "counts slices that are in no chunk"));
    CF__TRY(cf__plan_is(check, "n_idle", -1, n_idle, plan->n_idle, "is the wrong count"));
    for (i = 0; i < plan->n_chains; i++)
        CF__TRY(cf__plan_is(check, "chunks.chain", plan->chains[i].first_chunk, i,
                            plan->chunks[plan->chains[i].first_chunk].chain,
                            "names another chain than the one that holds the chunk"));
    for (i = 0; i < plan->n_chains; i++) CF__TRY(cf__plan_check_chain(check, i));
    CF__TRY(cf__plan_check_below(check));
    return plan->order != NULL ? cf__plan_check_sums(check) : cf__plan_check_seen(check);
}

static void cf__plan_check_scratch(void *job, cf__carver *carver) {
    cf__plan_check *check = (cf__plan_check *)job;
    const cf_plan *plan = check->plan;
    int64_t trees = plan->order != NULL;
    check->seen = (unsigned char *)cf__take(carver, plan->n_sequences, 1);
    check->below = (int64_t *)cf__take(carver, plan->n_chunks, sizeof(int64_t));
    check->ends = (int64_t *)cf__take(carver, trees * plan->n_chunks, sizeof(int64_t));
    check->sums = (cf__plan_sum *)cf__take(carver, trees * (plan->n_sequences + 1), sizeof(cf__plan_sum));
}

CHUNKFLOW_API cf_result cf_plan_validate(const cf_plan *plan, const int64_t *lengths, int64_t n,
                                         const cf_allocator *allocator, cf_error *error) {
    static const cf__recipe recipe = {"n_sequences", 1, cf__plan_check_scratch, NULL, NULL, cf__plan_check_body};
    cf__plan_check check = {plan, lengths, NULL, NULL, NULL, NULL, error};
    CF__TRY(cf__plan_check_counts(plan, error));
    CF__TRY(cf__plan_check_lengths(&check, n));
    return cf__make(&recipe, &check, allocator, error);
}

/* ================================================================================================================
   >>metadata
   ================================================================================================================ */

/* The sequences of one call: cu_seqlens, and the longest. Without memory they are only counted. */
typedef struct cf__metadata_seqs {
    int64_t n;
    int32_t *cu_q, *cu_k;
    int32_t max_q, max_k;
} cf__metadata_seqs;

/* A chunk whose metadata is being made: its sizes, its arrays, and how much of them is filled. */
typedef struct cf__metadata_job {
    cf_metadata_desc desc;
    cf_metadata out;
    cf__metadata_seqs seqs;
    double *weights;
    int32_t *sequences, *positions, *targets;
    /* of trees */
    int64_t n_path_calls, n_depths;  /* calls */
    int64_t n_call_seqs, most_more;  /* sequences of all calls; maximum number of further targets of rows */
    cf_attention_call *calls;
    double *extra_weights;
    int32_t *extra_rows, *extra_sequences, *extra_targets, *loss_rows, *key_ends, *call_q, *call_k;
} cf__metadata_job;

/* Adds the next sequence, unless it is empty. */
static void cf__metadata_add(cf__metadata_seqs *seqs, int64_t queries, int64_t keys) {
    int64_t i = seqs->n;
    if (queries == 0 && keys == 0) return;
    seqs->n++;
    if (seqs->cu_q == NULL) return;
    if (i == 0) seqs->cu_q[0] = seqs->cu_k[0] = 0;
    seqs->cu_q[i + 1] = seqs->cu_q[i] + (int32_t)queries;
    seqs->cu_k[i + 1] = seqs->cu_k[i] + (int32_t)keys;
    seqs->max_q = (int32_t)cf__max(seqs->max_q, queries);
    seqs->max_k = (int32_t)cf__max(seqs->max_k, keys);
}

/* Writes first, first + step, first + 2 x step ... Compilers vectorise the blocks of 16 at -O2. */
static void cf__metadata_fill_rows(int32_t *row, int64_t n, int32_t first, int32_t step) {
    int64_t t = 0;
    uint32_t value = (uint32_t)first, by = (uint32_t)step, i; /* unsigned, because they step once past the last row */
    for (; t + 16 <= n; t += 16, value += 16 * by)
        for (i = 0; i < 16; i++) row[t + i] = (int32_t)(value + i * by);
    for (; t < n; t++, value += by) row[t] = (int32_t)value;
}

/* Fills in rows [first, end) as padding. */
static void cf__metadata_add_padding(cf__metadata_job *job, int64_t first, int64_t end) {
    int64_t n = end - first, i;
    if (n <= 0) return;
    cf__metadata_add(&job->seqs, n, n);
    if (job->targets == NULL) return;
    cf__metadata_fill_rows(job->sequences + first, n, -1, 0);
    cf__metadata_fill_rows(job->positions + first, n, 0, 0);
    cf__metadata_fill_rows(job->targets + first, n, -1, 0);
    for (i = first; i < end && job->weights != NULL; i++) job->weights[i] = 0;
}

/* Returns whether any of n sequences with the same token at `position` predicts that token. *weight: the token's weight
   in the loss. */
static int cf__metadata_target(const cf__metadata_job *job, const int64_t *sequences, int64_t n, int64_t position,
                               double *weight) {
    int64_t i, wanted = 0;
    *weight = 0;
    if (job->desc.ignored == NULL && job->desc.weights == NULL) return 1;
    for (i = 0; i < n; i++) {
        const unsigned char *ignored = job->desc.ignored != NULL ? job->desc.ignored[sequences[i]] : NULL;
        if (ignored != NULL && ignored[position]) continue;
        if (job->desc.weights != NULL) *weight += job->desc.weights[sequences[i]];
        wanted++;
    }
    if (job->desc.shared_mean && wanted > 0) *weight /= (double)wanted;
    return wanted > 0;
}

/* Fills in the rows of a slice that belongs to n sequences. The first n_targets rows have targets. */
static void cf__metadata_fill_slice(const cf__metadata_job *job, const cf_slice *s, const int64_t *sequences, int64_t n,
                                    int64_t n_targets) {
    int64_t ahead = !job->desc.shifted, i;
    int32_t *targets = job->targets + s->offset;
    double weight = 0;
    int wanted = 1;
    cf__metadata_fill_rows(job->sequences + s->offset, s->length, s->sequence, 0);
    cf__metadata_fill_rows(job->positions + s->offset, s->length, (int32_t)s->begin, 1);
    cf__metadata_fill_rows(targets, n_targets, (int32_t)(s->begin + ahead), 1);
    for (i = 0; i < n_targets && (job->desc.ignored != NULL || job->weights != NULL); i++) {
        if (i == 0 || job->desc.ignored != NULL)
            wanted = cf__metadata_target(job, sequences, n, s->begin + ahead + i, &weight);
        if (!wanted) targets[i] = -1;
        if (job->weights != NULL) job->weights[s->offset + i] = weight;
    }
    if (n_targets == s->length) return;
    targets[s->length - 1] = -1;
    if (job->weights != NULL) job->weights[s->offset + s->length - 1] = 0;
}

/* ---- trees ---- */

/* Returns 1 if a slice, other than the first of its chunk, is directly after the slice that it continues. Attention
   treats these two as one. A slice that others continue fills whole alignment units. */
static int cf__metadata_continues(const cf_plan *plan, int64_t id) { return plan->slices[id].up == id - 1; }

static int64_t cf__metadata_run(const cf_plan *plan, int64_t id, int64_t end) {
    while (id + 1 < end && cf__metadata_continues(plan, id + 1)) id++;
    return id + 1;
}

static int64_t cf__metadata_row_end(const cf_plan *plan, int64_t end) {
    return plan->slices[end - 1].offset + plan->slices[end - 1].length;
}

/* Lists the calls of the path: ranges of its rows that are in one state and are seen by the same first rows of the
   chunk. If there is no memory it only counts them. They are filled in from the last: slices that see more of the path
   come before those that see less. */
static void cf__metadata_list_path(cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c) {
    int64_t id = c->first_slice, end = id + c->n_slices, chain = c->chain, last, first, at, rows;
    cf_attention_call *call = job->calls != NULL ? job->calls + job->n_path_calls : NULL;
    job->n_path_calls = 0;
    for (last = job->out.prefix; last > 0; last = first) {
        while (id < end && (cf__plan_parent(plan, c, id) >= 0 || plan->slices[id].begin >= last)) id++;
        while ((at = plan->chunks[plan->chains[chain].first_chunk].prefix) >= last)
            chain = cf__plan_chain_above(plan, chain);
        first = cf__max(at, id < end ? plan->slices[id].begin : 0);
        rows = cf__metadata_row_end(plan, id);
        job->n_path_calls++;
        job->n_call_seqs += 1 + (rows < job->out.rows);
        if (call == NULL) continue;
        call--;
        call->chain = chain;
        call->first = first - at;
        call->n_seqs = 1 + (rows < job->out.rows);
        call->max_seqlen_q = (int32_t)rows;  /* until cf__metadata_place_calls */
        call->max_seqlen_k = (int32_t)(last - first);
    }
}

/* Adds a sequence, unless it is empty, to a call whose arrays have been placed. */
static void cf__metadata_add_to_call(const cf__metadata_job *job, cf_attention_call *call, int64_t queries,
                                     int64_t keys) {
    cf__metadata_seqs seqs = {call->n_seqs, NULL, NULL, call->max_seqlen_q, call->max_seqlen_k};
    seqs.cu_q = job->call_q + (call->cu_seqlens_q - job->call_q);
    seqs.cu_k = job->call_k + (call->cu_seqlens_k - job->call_k);
    cf__metadata_add(&seqs, queries, keys);
    call->n_seqs = seqs.n;
    call->max_seqlen_q = seqs.max_q;
    call->max_seqlen_k = seqs.max_k;
}

/* Returns the call of the slices that have `depth` other slices above them in the chunk; NULL if there is no memory. */
static cf_attention_call *cf__metadata_depth(const cf__metadata_job *job, int64_t depth) {
    return job->calls != NULL ? job->calls + job->n_path_calls + depth : NULL;
}

/* Begins a sequence in the call of depth `depth`. Its keys are the rows of slice `id`; its queries are the rows of the
   slices below that one, which begin with slice `next`. Rows that no sequence of this call has yet come before it, in
   two sequences: one with only queries, one with only keys. While the call has no arrays, only counts sequences. */
static void cf__metadata_open(cf__metadata_job *job, const cf_plan *plan, int64_t id, int64_t depth, int64_t next) {
    int64_t offset = plan->slices[id].offset, *n;
    cf_attention_call *call = cf__metadata_depth(job, depth);
    if (call == NULL || call->cu_seqlens_q == NULL) {
        n = call != NULL ? &call->n_seqs : &job->n_call_seqs;
        *n += 2 + (offset > 0) + (depth >= job->n_depths); /* 1 more for rows after the last sequence of the call */
        return;
    }
    cf__metadata_add_to_call(job, call, plan->slices[next].offset - call->cu_seqlens_q[call->n_seqs], 0);
    cf__metadata_add_to_call(job, call, 0, offset - call->cu_seqlens_k[call->n_seqs]);
}

/* Ends the sequence of a slice's call before slice `end`, which is not below the slice. */
static void cf__metadata_close(cf__metadata_job *job, const cf_plan *plan, int64_t id, int64_t depth, int64_t end) {
    int64_t rows = cf__metadata_row_end(plan, end), *n;
    cf_attention_call *call = cf__metadata_depth(job, depth);
    if (call == NULL || call->cu_seqlens_q == NULL) {
        n = call != NULL ? &call->n_seqs : &job->n_call_seqs;
        *n -= rows == job->out.rows; /* no rows come after it */
        return;
    }
    cf__metadata_add_to_call(job, call, rows - call->cu_seqlens_q[call->n_seqs], plan->slices[id].length);
}

/* Lists the calls of depths, in one walk over the slices, which are in preorder. `depth` is that of the previous slice;
   the first `open` slices on the way down to it have begun a sequence. The walk goes up as often as down, so the time
   is linear. */
static void cf__metadata_list_depths(cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c) {
    int64_t end = c->first_slice + c->n_slices, depth = 0, open = 0, id, at, up, d;
    job->n_depths = 0;
    for (id = c->first_slice + 1; id <= end; id++, depth++) {
        up = id < end ? cf__plan_parent(plan, c, id) : -1;
        for (at = id - 1; at != up; at = cf__plan_parent(plan, c, at), depth--)
            if (depth < open) cf__metadata_close(job, plan, at, open = depth, id);
        if (up == id - 1) continue;
        for (d = depth; d >= open; d--, at = plan->slices[at].up) cf__metadata_open(job, plan, at, d, id);
        open = cf__max(open, depth + 1);
        job->n_depths = cf__max(job->n_depths, open);
    }
}

/* Places the arrays of the calls one after another; their sequences have been counted. Calls of the path are filled in;
   the other calls stay empty. */
static void cf__metadata_place_calls(cf__metadata_job *job) {
    int64_t i, at = 0;
    for (i = 0; i < job->out.n_calls; i++) {
        cf_attention_call *call = &job->calls[i];
        int64_t n = call->n_seqs, queries = call->max_seqlen_q, keys = call->max_seqlen_k;
        call->cu_seqlens_q = job->call_q + at;
        call->cu_seqlens_k = job->call_k + at;
        job->call_q[at] = job->call_k[at] = 0;
        at += n + 1;
        call->n_seqs = call->max_seqlen_q = call->max_seqlen_k = 0;
        if (i >= job->n_path_calls) call->chain = -1;
        cf__metadata_add_to_call(job, call, queries, keys);
        if (queries > 0) cf__metadata_add_to_call(job, call, job->out.rows - queries, 0);
    }
}

/* Returns 1 if one call of attention is enough: each slice sees either only itself, or all rows of the chunk's own
   chain. */
static int cf__metadata_is_plain(const cf_plan *plan, const cf_chunk *c) {
    int64_t id, end = c->first_slice + c->n_slices;
    if (c->chain >= 0 && c->prefix > 0 && cf__plan_chain_above(plan, c->chain) >= 0) return 0;
    for (id = c->first_slice; id < end; id++)
        if (plan->slices[id].begin > 0 && id > c->first_slice && !cf__metadata_continues(plan, id)) return 0;
    return 1;
}

static void cf__metadata_add_calls(cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c) {
    int64_t n = job->out.n_calls, i;
    job->out.n_calls = job->n_call_seqs = 0;
    if (plan->order == NULL || cf__metadata_is_plain(plan, c)) return;
    if (job->calls != NULL) memset(job->calls, 0, (size_t)n * sizeof *job->calls);
    cf__metadata_list_path(job, plan, c);
    cf__metadata_list_depths(job, plan, c);
    job->out.n_calls = job->n_path_calls + job->n_depths;
    if (job->calls == NULL) return;
    cf__metadata_place_calls(job);
    cf__metadata_list_depths(job, plan, c);
    for (i = job->n_path_calls; i < n; i++) {
        cf_attention_call *call = &job->calls[i];
        cf__metadata_add_to_call(job, call, job->out.rows - call->cu_seqlens_q[call->n_seqs], 0);
    }
}

/* Returns the end, in plan->order, of the sequences from `from` on that share the row after slice `id`. It searches
   from *child, in doubling steps, for a slice of this chunk with exactly these sequences. If there is none, or slices
   below `id` are not ordered by sequence, it compares sequences. */
static int64_t cf__metadata_way_end(const cf_plan *plan, const cf_chunk *c, int64_t id, int64_t from, int64_t *child) {
    const cf_slice *t = plan->slices;
    int64_t low = *child, high, step, middle, end = c->first_slice + c->n_slices, first = t[id].first;
    int64_t position = plan->slices[id].begin + plan->slices[id].length;
    for (step = 1; (high = low + step - 1) < end && t[high].first >= first && t[high].first < from; step *= 2)
        low = high + 1;
    for (high = cf__min(high, end); low < high;) {
        middle = low + (high - low) / 2;
        if (t[middle].first >= first && t[middle].first < from) low = middle + 1;
        else high = middle;
    }
    *child = low;
    if (low < end && t[low].up == id && t[low].first == from) return from + t[low].n;
    while (++from < first + t[id].n && plan->common[from] > position) continue;
    return from;
}

/* Sets the targets of a slice's last row: one for each different continuation of its sequences. While sizes are
   measured there are no arrays yet, and it only counts those beyond the first. */
static void cf__metadata_fill_parting(cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c, int64_t id) {
    const cf_slice *s = &plan->slices[id];
    int64_t first = s->first, end = first + s->n, child = id + 1, from, next;
    int64_t row = s->offset + s->length - 1, target = s->begin + s->length - (job->desc.shifted != 0);
    for (from = first; from < end; from = next) {
        double weight = 0;
        int wanted;
        next = cf__metadata_way_end(plan, c, id, from, &child);
        job->most_more += from > first;
        wanted = job->targets != NULL && target < plan->lengths[plan->order[from]] &&
                 cf__metadata_target(job, &plan->order[from], next - from, target, &weight);
        if (wanted && from == first) {
            job->targets[row] = (int32_t)target;
            if (job->weights != NULL) job->weights[row] = weight;
        } else if (wanted) {
            int64_t at = job->out.n_extra++;
            job->extra_rows[at] = (int32_t)row;
            job->extra_sequences[at] = (int32_t)plan->order[from];
            job->extra_targets[at] = (int32_t)target;
            if (job->extra_weights != NULL) job->extra_weights[at] = weight;
        }
    }
}

/* ---- rows with a loss, and keys ---- */

static void cf__metadata_list_losses(cf__metadata_job *job) {
    int64_t row, more = 0;
    for (row = 0; row < job->out.rows; row++) {
        int any = job->targets[row] >= 0 && (job->weights == NULL || job->weights[row] < 0 || job->weights[row] > 0);
        for (; more < job->out.n_extra && job->extra_rows[more] == row; more++)
            any |= job->extra_weights == NULL || job->extra_weights[more] < 0 || job->extra_weights[more] > 0;
        if (any) job->loss_rows[job->out.n_loss_rows++] = (int32_t)row;
    }
}

/* Fills in key_ends, from the last slice to the first. Each slice passes its end up to the first entry of the slice
   above it, which comes later in this order. So every slice knows the ends of the slices below it. */
static void cf__metadata_list_keys(const cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c) {
    int32_t *ends = job->key_ends + job->out.prefix;
    int64_t id, seen = 0;
    cf__metadata_fill_rows(ends, job->out.rows, 1, 1); /* padding sees itself */
    for (id = c->first_slice + c->n_slices - 1; id >= c->first_slice; id--) {
        const cf_slice *s = &plan->slices[id];
        int64_t up = cf__plan_parent(plan, c, id);
        int32_t last = (int32_t)cf__max(ends[s->offset], s->offset + s->length);
        cf__metadata_fill_rows(ends + s->offset, s->length, last, 0);
        if (up >= 0) {
            int32_t *above = &ends[plan->slices[up].offset];
            *above = (int32_t)cf__max(*above, last);
            continue;
        }
        cf__metadata_fill_rows(job->key_ends + seen, s->begin - seen, last, 0);
        seen = s->begin;
    }
}

/* Adds the rows of a slice. If its sequence ends here, the last row has no target. */
static void cf__metadata_add_slice(cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c, int64_t id) {
    const cf_slice *s = &plan->slices[id];
    const cf_chain *g = id == c->first_slice && c->chain >= 0 ? &plan->chains[c->chain] : NULL;
    int goes_on = g != NULL && (c->index + 1 < g->n_chunks || (g->cp > 0 && (c->rank + 1) % g->cp != 0));
    int64_t sequence = s->sequence;
    if (plan->order == NULL && job->targets != NULL) {
        cf__metadata_fill_slice(job, s, &sequence, 1, s->length - !(goes_on || job->desc.shifted));
    } else if (plan->order != NULL) {
        if (job->targets != NULL) cf__metadata_fill_slice(job, s, &plan->order[s->first], s->n, s->length - 1);
        cf__metadata_fill_parting(job, plan, c, id);
    }
}

/* Adds all slices, and the padding between and after them. */
static void cf__metadata_add_rows(cf__metadata_job *job, const cf_plan *plan, const cf_chunk *c) {
    int64_t i, first = c->first_slice, last = first + c->n_slices, end = 0;
    job->most_more = job->out.n_extra = 0;
    cf__metadata_add_calls(job, plan, c);
    for (i = first; i < last; i++) {
        const cf_slice *s = &plan->slices[i];
        cf__metadata_add_padding(job, end, s->offset);
        if (i == first || !cf__metadata_continues(plan, i)) {
            int64_t rows = cf__metadata_row_end(plan, cf__metadata_run(plan, i, last)) - s->offset;
            cf__metadata_add(&job->seqs, rows, rows + (i == first && job->out.n_calls == 0 ? job->out.prefix : 0));
        }
        cf__metadata_add_slice(job, plan, c, i);
        end = s->offset + s->length;
    }
    cf__metadata_add_padding(job, end, job->out.rows);
}

/* Measures the sizes of a chunk's arrays. */
static cf_result cf__metadata_measure(cf__metadata_job *job, const cf_plan *plan, int64_t chunk, cf_error *error) {
    const cf_chunk *c = &plan->chunks[chunk];
    const cf_capacity *most = job->desc.capacity;
    job->out.chunk = chunk;
    job->out.tokens = c->tokens;
    job->out.prefix = cf__plan_prefix(plan, c);
    job->out.pairs = c->pairs;
    job->out.rows = c->rows;
    if (job->out.prefix + c->rows > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "cu_seqlens_k", chunk, INT32_MAX, job->out.prefix + c->rows,
                        "the prefix and the chunk together pass 32 bits");
    if (most != NULL) {
        CF__TRY(cf__range(most->rows, c->rows, INT32_MAX, "capacity.rows", error));
        CF__TRY(cf__range(most->prefix, job->out.prefix, INT32_MAX - most->rows, "capacity.prefix", error));
        job->out.rows = most->rows;
    }
    job->seqs.n = 0;
    cf__metadata_add_rows(job, plan, c);
    job->out.n_seqs = job->seqs.n;
    if (most == NULL) return CF_OK;
    CF__TRY(cf__range(most->n_seqs, job->seqs.n, INT32_MAX, "capacity.n_seqs", error));
    job->out.n_seqs = most->n_seqs;
    return CF_OK;
}

/* Returns the next n items of the block, or NULL if there is no memory. */
static void *cf__metadata_take(unsigned char *memory, int64_t *used, int64_t n, size_t item_bytes) {
    unsigned char *at = memory != NULL ? memory + *used : NULL;
    *used += n * (int64_t)item_bytes;
    return at;
}

/* Lays out the arrays that only trees have, and those that exist on request. */
static void cf__metadata_layout_more(cf__metadata_job *job, unsigned char *memory, int64_t *used) {
    const size_t ints = sizeof(int32_t);
    cf_metadata *m = &job->out;
    int64_t n = job->most_more, n_cu = job->n_call_seqs + m->n_calls;
    int64_t n_losses = job->desc.wants_loss_rows ? m->rows : 0;
    int64_t n_keys = job->desc.wants_key_ends ? m->prefix + m->rows : 0;
    if (m->n_calls + n == 0 && !job->desc.wants_loss_rows && !job->desc.wants_key_ends) return;
    *used = cf__round_up(*used, 8);
    m->calls = job->calls = (cf_attention_call *)cf__metadata_take(memory, used, m->n_calls, sizeof(cf_attention_call));
    if (job->desc.weights != NULL)
        m->extra_weights = job->extra_weights = (double *)cf__metadata_take(memory, used, n, sizeof(double));
    m->extra_rows = job->extra_rows = (int32_t *)cf__metadata_take(memory, used, n, ints);
    m->extra_sequences = job->extra_sequences = (int32_t *)cf__metadata_take(memory, used, n, ints);
    m->extra_targets = job->extra_targets = (int32_t *)cf__metadata_take(memory, used, n, ints);
    job->call_q = (int32_t *)cf__metadata_take(memory, used, n_cu, ints);
    job->call_k = (int32_t *)cf__metadata_take(memory, used, n_cu, ints);
    if (n_losses > 0) m->loss_rows = job->loss_rows = (int32_t *)cf__metadata_take(memory, used, n_losses, ints);
    if (n_keys > 0) m->key_ends = job->key_ends = (int32_t *)cf__metadata_take(memory, used, n_keys, ints);
}

/* Measures the bytes of the arrays and, if there is memory, places them. */
static cf_result cf__metadata_layout(cf__metadata_job *job, unsigned char *memory, size_t *bytes, cf_error *error) {
    const size_t ints = sizeof(int32_t);
    cf_metadata *m = &job->out;
    int64_t used = 0, ends = m->n_seqs + 1;
    if (job->desc.weights != NULL)
        m->loss_weights = job->weights = (double *)cf__metadata_take(memory, &used, m->rows, sizeof(double));
    m->cu_seqlens_q = job->seqs.cu_q = (int32_t *)cf__metadata_take(memory, &used, ends, ints);
    m->cu_seqlens_k = job->seqs.cu_k = (int32_t *)cf__metadata_take(memory, &used, ends, ints);
    m->sequence_ids = job->sequences = (int32_t *)cf__metadata_take(memory, &used, m->rows, ints);
    m->position_ids = job->positions = (int32_t *)cf__metadata_take(memory, &used, m->rows, ints);
    m->target_positions = job->targets = (int32_t *)cf__metadata_take(memory, &used, m->rows, ints);
    cf__metadata_layout_more(job, memory, &used);
    if (CF__NEVER((uint64_t)used > SIZE_MAX / 2)) return cf__too_large(error, "rows");
    *bytes = (size_t)used;
    return CF_OK;
}

static cf_result cf__metadata_start(cf__metadata_job *job, const cf_plan *plan, int64_t chunk, int64_t least,
                                    const cf_metadata_desc *desc, cf_error *error) {
    memset(job, 0, sizeof *job);
    if (desc != NULL) job->desc = *desc;
    if (plan == NULL) return cf__fail_null(error, "plan");
    CF__TRY(cf__needs(job->desc.shared_mean, job->desc.weights != NULL, "shared_mean", -1, "needs weights", error));
    CF__TRY(cf__check_flag(job->desc.shared_mean, "shared_mean", -1, error));
    CF__TRY(cf__check_flag(job->desc.shifted, "shifted", -1, error));
    CF__TRY(cf__check_flag(job->desc.wants_loss_rows, "wants_loss_rows", -1, error));
    CF__TRY(cf__check_flag(job->desc.wants_key_ends, "wants_key_ends", -1, error));
    return cf__bounded(chunk, least, plan->n_chunks - 1, "chunk", "there is no such chunk", error);
}

/* Checks the caller's arrays for each sequence of a chunk: its weight, unless weights is NULL, and its tokens, unless
   tokens is NULL. most: receives the largest weight. */
static cf_result cf__metadata_check_sequences(const cf_plan *plan, const cf_chunk *c, const double *weights,
                                              double most, const void *const *tokens, cf_error *error) {
    int64_t i, j;
    for (i = c->first_slice; i < c->first_slice + c->n_slices && (weights != NULL || tokens != NULL); i++) {
        const cf_slice *s = &plan->slices[i];
        for (j = 0; j < (plan->order != NULL ? s->n : 1); j++) {
            int64_t sequence = plan->order != NULL ? plan->order[s->first + j] : s->sequence;
            if (weights != NULL && !(weights[sequence] >= -most && weights[sequence] <= most))
                return cf__fail_real(error, CF_ERROR_ARGUMENT, "weights", sequence, weights[sequence],
                                     "must be finite and in the range of the type that it is written in");
            if (tokens != NULL && tokens[sequence] == NULL)
                return cf__refuse(error, CF_ERROR_ARGUMENT, "tokens", sequence, "is NULL");
        }
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_metadata_size(const cf_plan *plan, int64_t chunk, const cf_metadata_desc *desc,
                                         size_t *bytes, cf_error *error) {
    cf__metadata_job job;
    size_t one = 0, most = 0;
    int64_t i;
    CF__TRY(cf__metadata_start(&job, plan, chunk, -1, desc, error));
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    for (i = chunk < 0 ? 0 : chunk; i < (chunk < 0 ? plan->n_chunks : chunk + 1); i++) {
        CF__TRY(cf__metadata_measure(&job, plan, i, error));
        CF__TRY(cf__metadata_layout(&job, NULL, &one, error));
        most = one > most ? one : most;
    }
    *bytes = most;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_metadata_fill(const cf_plan *plan, int64_t chunk, const cf_metadata_desc *desc, void *memory,
                                         size_t bytes, cf_metadata *out, cf_error *error) {
    cf__metadata_job job;
    size_t needed = 0;
    CF__TRY(cf__metadata_start(&job, plan, chunk, 0, desc, error));
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__metadata_measure(&job, plan, chunk, error));
    CF__TRY(cf__metadata_layout(&job, NULL, &needed, error));
    CF__TRY(cf__check_memory(memory, bytes, needed, error));
    CF__TRY(cf__metadata_check_sequences(plan, &plan->chunks[chunk], job.desc.weights, DBL_MAX, NULL, error));
    CF__TRY(cf__metadata_layout(&job, (unsigned char *)memory, &needed, error));
    job.seqs.n = job.seqs.cu_q[0] = job.seqs.cu_k[0] = 0;
    cf__metadata_add_rows(&job, plan, &plan->chunks[chunk]);
    if (job.loss_rows != NULL) cf__metadata_list_losses(&job);
    if (job.key_ends != NULL) cf__metadata_list_keys(&job, plan, &plan->chunks[chunk]);
    for (; job.seqs.n < job.out.n_seqs; job.seqs.n++) {
        job.seqs.cu_q[job.seqs.n + 1] = job.seqs.cu_q[job.seqs.n];
        job.seqs.cu_k[job.seqs.n + 1] = job.seqs.cu_k[job.seqs.n];
    }
    job.out.max_seqlen_q = job.desc.capacity != NULL ? (int32_t)job.out.rows : job.seqs.max_q;
    job.out.max_seqlen_k =
        job.desc.capacity != NULL ? (int32_t)(job.desc.capacity->prefix + job.out.rows) : job.seqs.max_k;
    *out = job.out;
    return CF_OK;
}

/* ---- tokens of all chunks ---- */

/* Rows that are being filled, and memory for one chunk's metadata. */
typedef struct cf__metadata_rows {
    cf_token_rows out;
    int64_t *first_row;
    int32_t *tokens, *first_target, *targets;
    float *weights;
    unsigned char *arrays;
    size_t array_bytes;
} cf__metadata_rows;

/* Measures the arrays, and places them if there is memory. Every row may have a target. */
static cf_result cf__metadata_lay_rows(cf__metadata_rows *r, const cf_plan *plan, const cf_metadata_desc *desc,
                                       unsigned char *memory, size_t *bytes, cf_error *error) {
    cf__metadata_job job;
    int64_t i, rows = 0, targets = 0, used = 0;
    CF__TRY(cf_metadata_size(plan, -1, desc, &r->array_bytes, error));
    for (i = 0; i < plan->n_chunks; i++) {
        CF__TRY(cf__metadata_start(&job, plan, i, 0, desc, error));
        CF__TRY(cf__metadata_measure(&job, plan, i, error));
        rows += job.out.rows;
        targets += job.out.rows + job.most_more;
        if (targets > INT32_MAX)
            return cf__fail(error, CF_ERROR_LIMIT, "targets", -1, INT32_MAX, targets, "there may be too many");
    }
    r->first_row = (int64_t *)cf__metadata_take(memory, &used, plan->n_chunks + 1, sizeof(int64_t));
    r->tokens = (int32_t *)cf__metadata_take(memory, &used, rows, sizeof(int32_t));
    r->first_target = (int32_t *)cf__metadata_take(memory, &used, rows + 1, sizeof(int32_t));
    r->targets = (int32_t *)cf__metadata_take(memory, &used, targets, sizeof(int32_t));
    r->weights = (float *)cf__metadata_take(memory, &used, desc != NULL && desc->weights != NULL ? targets : 0,
                                            sizeof(float));
    used = cf__round_up(used, CF_MEMORY_ALIGNMENT);
    r->arrays = (unsigned char *)cf__metadata_take(memory, &used, (int64_t)r->array_bytes, 1);
    if (CF__NEVER((uint64_t)used > SIZE_MAX / 2)) return cf__too_large(error, "rows");
    *bytes = (size_t)used;
    return CF_OK;
}

static int32_t cf__metadata_token(const void *tokens, int64_t token_bytes, int32_t position) {
    return token_bytes == 2 ? ((const uint16_t *)tokens)[position] : ((const int32_t *)tokens)[position];
}

static void cf__metadata_add_target(cf__metadata_rows *r, const void *tokens, int64_t token_bytes, int32_t position,
                                    const double *weight) {
    if (weight != NULL) r->weights[r->out.n_targets] = (float)*weight;
    r->targets[r->out.n_targets++] = cf__metadata_token(tokens, token_bytes, position);
}

/* Adds the rows of one chunk. */
static void cf__metadata_add_tokens(cf__metadata_rows *r, const cf_metadata *m, const void *const *tokens,
                                    int64_t token_bytes) {
    int64_t row, more = 0;
    for (row = 0; row < m->rows; row++) {
        const void *of = m->sequence_ids[row] < 0 ? NULL : tokens[m->sequence_ids[row]];
        r->tokens[r->out.n_rows] = of != NULL ? cf__metadata_token(of, token_bytes, m->position_ids[row]) : -1;
        r->first_target[r->out.n_rows++] = (int32_t)r->out.n_targets;
        if (m->target_positions[row] >= 0)
            cf__metadata_add_target(r, of, token_bytes, m->target_positions[row],
                                    m->loss_weights != NULL ? &m->loss_weights[row] : NULL);
        for (; more < m->n_extra && m->extra_rows[more] == row; more++)
            cf__metadata_add_target(r, tokens[m->extra_sequences[more]], token_bytes, m->extra_targets[more],
                                    m->extra_weights != NULL ? &m->extra_weights[more] : NULL);
    }
    r->first_target[r->out.n_rows] = (int32_t)r->out.n_targets;
    r->first_row[m->chunk + 1] = r->out.n_rows;
}

CHUNKFLOW_API cf_result cf_token_rows_size(const cf_plan *plan, const cf_metadata_desc *desc, size_t *bytes,
                                           cf_error *error) {
    cf__metadata_rows r;
    size_t needed = 0;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    CF__TRY(cf__metadata_lay_rows(&r, plan, desc, NULL, &needed, error));
    *bytes = needed;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_token_rows_fill(const cf_plan *plan, const cf_metadata_desc *desc, const void *const *tokens,
                                           int64_t token_bytes, void *memory, size_t bytes, cf_token_rows *out,
                                           cf_error *error) {
    cf__metadata_rows r;
    cf_metadata m;
    size_t needed = 0;
    int64_t i;
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__metadata_lay_rows(&r, plan, desc, NULL, &needed, error));
    if (token_bytes != 2 && token_bytes != 4)
        return cf__fail(error, CF_ERROR_ARGUMENT, "token_bytes", -1, 4, token_bytes, "must be 2 or 4");
    if (plan->n_slices > 0 && tokens == NULL) return cf__fail_null(error, "tokens");
    for (i = 0; i < plan->n_chunks; i++)
        CF__TRY(cf__metadata_check_sequences(plan, &plan->chunks[i], desc != NULL ? desc->weights : NULL,
                                             (double)FLT_MAX, tokens, error));
    CF__TRY(cf__check_memory(memory, bytes, needed, error));
    CF__TRY(cf__metadata_lay_rows(&r, plan, desc, (unsigned char *)memory, &needed, error));
    memset(&r.out, 0, sizeof r.out);
    r.first_row[0] = r.first_target[0] = 0;
    for (i = 0; i < plan->n_chunks; i++) {
        (void)cf_metadata_fill(plan, i, desc, r.arrays, r.array_bytes, &m, NULL); /* cannot fail: its size was found */
        cf__metadata_add_tokens(&r, &m, tokens, token_bytes);
    }
    r.out.first_row = r.first_row;
    r.out.tokens = r.tokens;
    r.out.first_target = r.first_target;
    r.out.targets = r.targets;
    r.out.weights = desc != NULL && desc->weights != NULL ? r.weights : NULL;
    *out = r.out;
    return CF_OK;
}

/* ---- cp groups ---- */

CHUNKFLOW_API int64_t cf_kv_sources(const cf_plan *plan, int64_t chunk, cf_kv_source *sources) {
    const cf_chunk *c = plan != NULL && chunk >= 0 && chunk < plan->n_chunks ? &plan->chunks[chunk] : NULL;
    int64_t n, i;
    if (c == NULL || c->cp == 0) return 0;
    n = c->index * c->cp + c->rank % c->cp;
    for (i = n - 1; i >= 0 && sources != NULL; i--) {
        const cf_slice *s;
        c = &plan->chunks[chunk = cf__pack_before(plan, c)];
        s = &plan->slices[c->first_slice];
        sources[i].rank = c->rank;
        sources[i].chunk = chunk;
        sources[i].row = c->prefix;
        sources[i].begin = s->begin;
        sources[i].tokens = s->length;
    }
    return n;
}

/* ---- weights of the loss ---- */

/* Returns the set to which a sequence belongs. All targets of a set have the same weight, and all sets have the same
   total weight. */
static int64_t cf__metadata_set(const cf_loss_weights_desc *d, int64_t sequence) {
    if (d->mean == CF_MEAN_SEQUENCES) return sequence;
    return d->mean == CF_MEAN_PROMPTS ? d->prompts[sequence] : 0;
}

static int64_t cf__metadata_count_targets(int64_t length, const unsigned char *ignored, int shifted) {
    int64_t first = !shifted, n = cf__max(0, length - first), t;
    for (t = first; t < length && ignored != NULL; t++) n -= ignored[t] != 0;
    return n;
}

/* Adds up the targets of each set. totals: zero before. */
static cf_result cf__metadata_add_targets(const int64_t *lengths, int64_t n, const cf_loss_weights_desc *d,
                                          int64_t *totals, cf_error *error) {
    int64_t i, set, sum = 0;
    for (i = 0; i < n; i++) {
        CF__TRY(cf__pack_add_length(lengths, i, &sum, error));
        set = cf__metadata_set(d, i);
        CF__TRY(cf__inside(set, 0, n - 1, CF_ERROR_ARGUMENT, "prompts", i, "is no prompt", error));
        totals[set] += cf__metadata_count_targets(lengths[i], d->ignored != NULL ? d->ignored[i] : NULL,
                                                   d->shifted);
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_loss_weights(const int64_t *lengths, int64_t n, const cf_loss_weights_desc *desc,
                                        double *weights, cf_error *error) {
    cf_loss_weights_desc d;
    cf_allocator allocator;
    cf_result result;
    void *memory = NULL;
    int64_t i, n_sets = 0, *totals;
    memset(&d, 0, sizeof d);
    if (desc != NULL) d = *desc;
    CF__TRY(cf__range(n, 0, CF_MAX_SEQUENCES, "n", error));
    CF__TRY(cf__choice((int)d.mean, CF_MEAN_DEFAULT, CF_MEAN_PROMPTS, "mean", error));
    if (n > 0 && lengths == NULL) return cf__fail_null(error, "lengths");
    if (n > 0 && weights == NULL) return cf__fail_null(error, "weights");
    if (d.mean == CF_MEAN_PROMPTS && d.prompts == NULL) return cf__fail_null(error, "prompts");
    if (d.mean != CF_MEAN_PROMPTS && d.prompts != NULL)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "prompts", -1, "need the mean over prompts (CF_MEAN_PROMPTS)");
    CF__TRY(cf__check_flag(d.shifted, "shifted", -1, error));
    CF__TRY(cf_allocator_resolve(d.allocator, &allocator, error));
    CF__TRY(cf_allocate(&allocator, (size_t)n * sizeof *totals, &memory, error));
    totals = (int64_t *)memory;
    memset(totals, 0, (size_t)n * sizeof *totals);
    result = cf__metadata_add_targets(lengths, n, &d, totals, error);
    for (i = 0; i < n; i++) n_sets += totals[i] > 0;
    for (i = 0; i < n && result == CF_OK; i++) {
        int64_t total = totals[cf__metadata_set(&d, i)];
        weights[i] = total > 0 ? 1 / ((double)n_sets * (double)total) : 0;
    }
    allocator.release(memory, allocator.user);
    return result;
}

/* ================================================================================================================
   >>model
   ================================================================================================================ */

/* Returns the number of kinds of layers in a model. */
static int64_t cf__model_kinds(const cf_model *model) {
    int64_t n = model->kinds == NULL ? 1 : model->n_kinds;
    return model->first_dense > 0 ? 2 * n : n;
}

/* Returns a kind, in which numbers left 0 are replaced by the model's. */
static cf_layer cf__model_kind(const cf_model *model, int64_t k) {
    int64_t n = model->kinds == NULL ? 1 : model->n_kinds;
    cf_layer kind;
    memset(&kind, 0, sizeof kind);
    if (model->kinds != NULL) kind = model->kinds[k % n];
    if (k >= n) kind.experts = kind.active = kind.shared = kind.ffn = 0;
    if (kind.heads == 0) kind.heads = model->heads;
    if (kind.kv_heads == 0) kind.kv_heads = model->kv_heads;
    if (kind.head_dim == 0) kind.head_dim = model->head_dim != 0 ? model->head_dim : model->hidden / model->heads;
    if (kind.value_dim == 0) kind.value_dim = kind.head_dim;
    if (kind.ffn == 0) kind.ffn = model->ffn;
    return kind;
}

/* Counts the layers of a kind among first .. end - 1. */
static int64_t cf__model_count_layers(const cf_model *model, int64_t of, int64_t first, int64_t end) {
    int64_t n = model->kinds == NULL ? 1 : model->n_kinds, i, count = 0;
    const char *pattern = model->pattern != NULL ? model->pattern : "a";
    int64_t period = (int64_t)strlen(pattern);
    for (i = first; i < end; i++) count += pattern[i % period] - 'a' + (i < model->first_dense ? n : 0) == of;
    return count;
}

/* Checks the ranges of members that only some kinds have. */
static cf_result cf__model_check_kind(const cf_layer *kind, int64_t k, cf_error *error) {
    int windowed = kind->mixer == CF_MIXER_WINDOW || kind->mixer == CF_MIXER_CHUNKED;
    int latent = kind->mixer == CF_MIXER_LATENT;
    int recurrent = kind->mixer >= CF_MIXER_DELTA && kind->mixer <= CF_MIXER_MAMBA2;
    const char *not_latent = latent ? NULL : "needs a mixer that is latent";
    const char *no_experts = kind->experts != 0 ? NULL : "needs experts";
    const struct {
        const char *field;
        int64_t value, least, most;
        const char *needs; /* the text if the kind lacks the part that the member needs */
    } members[] = {{"kinds.mixer", (int)kind->mixer, 0, CF_MIXER_COUNT - 1, NULL},
                   {"kinds.gate", kind->gate, 0, 1, NULL},
                   {"kinds.sinks", kind->sinks, 0, 1, NULL},
                   {"kinds.no_ffn", kind->no_ffn, 0, 1, NULL},
                   {"kinds.shared_gate", kind->shared_gate, 0, 1, NULL},
                   {"kinds.heads", kind->heads, 1, CF_MAX_WIDTH, NULL},
                   {"kinds.kv_heads", kind->kv_heads, 1, kind->heads, NULL},
                   {"kinds.head_dim", kind->head_dim, 1, CF_MAX_WIDTH / cf__max(kind->heads, 1), NULL},
                   {"kinds.value_dim", kind->value_dim, 1, CF_MAX_WIDTH / cf__max(kind->heads, 1), NULL},
                   {"kinds.window", kind->window, windowed, windowed * CF_MAX_CHUNK_SIZE,
                    windowed ? NULL : "needs a mixer that is window or chunked"},
                   {"kinds.latent", kind->latent, latent, latent * CF_MAX_WIDTH, not_latent},
                   {"kinds.q_latent", kind->q_latent, 0, latent * CF_MAX_WIDTH, not_latent},
                   {"kinds.rope_dim", kind->rope_dim, 0, latent * (cf__max(kind->head_dim, 1) - 1), not_latent},
                   {"kinds.tail", kind->tail, recurrent, recurrent * CF_MAX_ACTIVE,
                    recurrent ? NULL : "needs a mixer that is recurrent"},
                   {"kinds.ffn", kind->ffn, 1, CF_MAX_FFN, NULL},
                   {"kinds.experts", kind->experts, 0, CF_MAX_EXPERTS, NULL},
                   {"kinds.active", kind->active, kind->experts > 0, cf__min(kind->experts, CF_MAX_ACTIVE),
                    no_experts},
                   {"kinds.reach", kind->reach, kind->reach != 0 ? kind->active : 0, kind->experts, no_experts},
                   {"kinds.shared", kind->shared, 0, CF_MAX_FFN, NULL}};
    int attends = kind->mixer <= CF_MIXER_CHUNKED;
    int64_t i;
    CF__TRY(cf__needs(kind->gate, attends, "kinds.gate", k, "needs a mixer that is full, window or chunked", error));
    CF__TRY(cf__needs(kind->sinks, attends, "kinds.sinks", k, "need a mixer that is full, window or chunked", error));
    CF__TRY(cf__needs(kind->experts, !kind->no_ffn, "kinds.experts", k, "need no_ffn to be 0", error));
    CF__TRY(cf__needs(kind->shared, kind->experts != 0, "kinds.shared", k, "needs experts", error));
    CF__TRY(cf__needs(kind->shared_gate, kind->shared != 0, "kinds.shared_gate", k, "needs shared", error));
    for (i = 0; i < CF__COUNT(members); i++)
        CF__TRY(cf__inside(members[i].value, members[i].least, members[i].most, CF_ERROR_ARGUMENT, members[i].field, k,
                           members[i].needs != NULL ? members[i].needs : "is out of range for its kind", error));
    if (kind->heads % kind->kv_heads == 0) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, "kinds.kv_heads", k, cf__divisor_below(kind->heads, kind->kv_heads),
                    kind->kv_heads, "must divide heads");
}

/* Returns whether some kind of layers has experts. */
static int cf__model_has_experts(const cf_model *model) {
    int64_t k;
    for (k = 0; model->kinds != NULL && k < model->n_kinds; k++)
        if (model->kinds[k].experts > 0) return 1;
    return 0;
}

/* Returns whether some kind has projections of Q, K and V, to which biases and norms of heads belong. */
static int cf__model_attends(const cf_model *model) {
    int64_t k;
    for (k = 0; model->kinds != NULL && k < model->n_kinds; k++)
        if (model->kinds[k].mixer <= CF_MIXER_CHUNKED) return 1;
    return model->kinds == NULL;
}

static cf_result cf__model_check_kinds(const cf_model *model, cf_error *error) {
    int64_t k;
    CF__TRY(cf__needs(model->first_dense, cf__model_has_experts(model), "model.first_dense", -1,
                      "needs a kind that has experts", error));
    CF__TRY(cf__bounded(model->first_dense, 0, model->layers, "model.first_dense", "must not be more than layers",
                        error));
    CF__TRY(cf__range(model->mtp, 0, CF_MAX_LAYERS, "model.mtp", error));
    CF__TRY(cf__range(model->norms, 0, CF_MAX_KINDS, "model.norms", error));
    if (model->kinds != NULL) CF__TRY(cf__range(model->n_kinds, 1, CF_MAX_KINDS, "model.n_kinds", error));
    CF__TRY(cf__needs(model->n_kinds, model->kinds != NULL, "model.n_kinds", -1, "needs kinds", error));
    for (k = 0; model->pattern != NULL && (k == 0 || model->pattern[k] != 0); k++)
        CF__TRY(cf__inside(model->pattern[k], 'a', 'a' + (model->kinds == NULL ? 1 : model->n_kinds) - 1,
                           CF_ERROR_ARGUMENT, "model.pattern", k, "must be a letter of a kind", error));
    for (k = 0; model->kinds != NULL && k < model->n_kinds; k++) {
        cf_layer kind = cf__model_kind(model, k);
        CF__TRY(cf__model_check_kind(&kind, k, error));
        if (strchr(model->pattern != NULL ? model->pattern : "a", (int)('a' + k)) == NULL)
            return cf__refuse(error, CF_ERROR_ARGUMENT, "model.pattern", -1, "must have the letter of each kind");
    }
    return CF_OK;
}

/* Checks flags, which are 0 or 1, and the norms of Q and K. */
static cf_result cf__model_check_flags(const cf_model *model, cf_error *error) {
    const char *why = "needs a kind whose mixer is full, window or chunked";
    int attends = cf__model_attends(model);
    CF__TRY(cf__needs(model->qkv_bias, attends, "model.qkv_bias", -1, why, error));
    CF__TRY(cf__needs(model->out_bias, attends, "model.out_bias", -1, why, error));
    CF__TRY(cf__needs(model->qk_norm, attends, "model.qk_norm", -1, why, error));
    CF__TRY(cf__check_flag(model->tied, "model.tied", -1, error));
    CF__TRY(cf__check_flag(model->qkv_bias, "model.qkv_bias", -1, error));
    CF__TRY(cf__check_flag(model->out_bias, "model.out_bias", -1, error));
    CF__TRY(cf__check_flag(model->mlp_bias, "model.mlp_bias", -1, error));
    CF__TRY(cf__check_flag(model->no_gate, "model.no_gate", -1, error));
    return cf__choice(model->qk_norm, 0, 2, "model.qk_norm", error);
}

CHUNKFLOW_API cf_result cf_model_validate(const cf_model *model, cf_error *error) {
    int64_t fitting;
    if (model == NULL) return cf__fail_null(error, "model");
    CF__TRY(cf__range(model->layers, 1, CF_MAX_LAYERS, "model.layers", error));
    CF__TRY(cf__range(model->hidden, 1, CF_MAX_WIDTH, "model.hidden", error));
    CF__TRY(cf__range(model->heads, 1, CF_MAX_WIDTH, "model.heads", error));
    CF__TRY(cf__bounded(model->kv_heads, 1, model->heads, "model.kv_heads", "must not be more than heads", error));
    CF__TRY(cf__range(model->head_dim, 0, CF_MAX_WIDTH / model->heads, "model.head_dim", error));
    CF__TRY(cf__range(model->ffn, 1, CF_MAX_FFN, "model.ffn", error));
    CF__TRY(cf__range(model->vocab, 1, CF_MAX_VOCAB, "model.vocab", error));
    if (model->heads % model->kv_heads != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "model.kv_heads", -1,
                        cf__divisor_below(model->heads, model->kv_heads), model->kv_heads, "must divide heads");
    fitting = model->heads; /* a multiple of kv_heads */
    while (model->head_dim == 0 && fitting > 0 && model->hidden % fitting != 0) fitting -= model->kv_heads;
    if (fitting == 0)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "model.head_dim", -1,
                          "must be given, for no multiple of kv_heads divides hidden");
    if (fitting < model->heads)
        return cf__fail(error, CF_ERROR_ARGUMENT, "model.heads", -1, fitting, model->heads,
                        "must divide hidden, or head_dim must be given");
    CF__TRY(cf__model_check_kinds(model, error));
    return cf__model_check_flags(model, error);
}

/* ---- splitting ---- */

CF__NAMES(cf_recompute_name, cf_recompute, CF_RECOMPUTES, "?")
CF__NAMES(cf_placement_name, cf_placement, CF_PLACEMENTS, "?")

CHUNKFLOW_API int64_t cf_placement_stage(cf_placement placement, int64_t n_stages, int64_t v) {
    if (n_stages < 1 || v < 0) return -1;
    if (v < n_stages) return v;
    return placement == CF_PLACEMENT_V && v / n_stages % 2 == 1 ? n_stages - 1 - v % n_stages : v % n_stages;
}

CHUNKFLOW_API int64_t cf_placement_at(cf_placement placement, int64_t n_stages, int64_t row, int64_t stage) {
    if (stage < 0 || stage >= n_stages || row < 0 || row > INT64_MAX / n_stages - 1) return -1;
    return row * n_stages + cf_placement_stage(placement, n_stages, row * n_stages + stage);
}

CHUNKFLOW_API cf_parallel cf_parallel_defaults(const cf_parallel *parallel) {
    cf_parallel full;
    memset(&full, 0, sizeof full);
    if (parallel != NULL) full = *parallel;
    if (full.tp == 0) full.tp = 1;
    if (full.pp == 0) full.pp = 1;
    if (full.n_virtual == 0) full.n_virtual = 1;
    if (full.placement == CF_PLACEMENT_DEFAULT) full.placement = CF_PLACEMENT_LOOP;
    if (full.dp == 0) full.dp = 1;
    if (full.recompute == CF_RECOMPUTE_DEFAULT) full.recompute = CF_RECOMPUTE_NONE;
    if (full.vocab_multiple == 0) full.vocab_multiple = 1;
    if (full.ep == 0) full.ep = 1;
    return full;
}

static int cf__model_tp_fits(const cf_model *model, int64_t tp, int64_t ep) {
    int64_t k;
    for (k = 0; k < cf__model_kinds(model); k++) {
        cf_layer kind = cf__model_kind(model, k);
        int whole = kind.no_ffn || (kind.experts > 0 && ep > 1); /* tp need not divide ffn */
        int heads = kind.mixer == CF_MIXER_LATENT || kind.kv_heads % tp == 0 || tp % kind.kv_heads == 0;
        if (kind.heads % tp != 0 || !heads || kind.shared % tp != 0 || (!whole && kind.ffn % tp != 0)) return 0;
    }
    return 1;
}

static cf_result cf__model_check_ep(const cf_model *model, const cf_parallel *parallel, cf_error *error) {
    int64_t k, shared = parallel->tp * parallel->dp;
    CF__TRY(cf__range(parallel->imbalance, 0, 1000, "parallel.imbalance", error));
    CF__TRY(cf__needs(parallel->ep, cf__model_has_experts(model) || parallel->ep == 1, "parallel.ep", -1,
                      "above 1 needs experts", error));
    CF__TRY(cf__range(parallel->ep, 1, INT64_MAX, "parallel.ep", error));
    for (k = 0; k < cf__model_kinds(model); k++) shared = cf__gcd(shared, cf__model_kind(model, k).experts);
    if (parallel->ep <= CF_MAX_EXPERTS && shared % parallel->ep == 0) return CF_OK;
    return cf__fail(error, parallel->ep > CF_MAX_EXPERTS ? CF_ERROR_LIMIT : CF_ERROR_ARGUMENT, "parallel.ep", -1,
                    cf__divisor_below(shared, cf__min(parallel->ep, CF_MAX_EXPERTS)), parallel->ep,
                    "must divide tp x dp, and the experts of each kind");
}

/* Checks the given layers of each stage: no stage may be empty, and their sum must be the model's layers. */
static cf_result cf__model_check_layers(const cf_model *model, const cf_parallel *parallel, cf_error *error) {
    int64_t s, sum = 0;
    for (s = 0; s < parallel->pp * parallel->n_virtual; s++) {
        if (parallel->layers[s] < 1 || parallel->layers[s] > model->layers)
            return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.layers", s, 1, parallel->layers[s],
                            "a stage must have at least one layer, and no more than the model");
        sum += parallel->layers[s];
    }
    if (sum == model->layers) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.layers", -1, model->layers, sum,
                    "must add up to the model's layers");
}

/* Checks that a V has more than one row of virtual stages. */
static cf_result cf__model_check_v(cf_placement placement, int64_t n_virtual, const char *field, cf_error *error) {
    if ((int)placement <= CF_PLACEMENT_LOOP || n_virtual != 1) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, CF_PLACEMENT_LOOP, (int)placement,
                    "a V needs n_virtual above 1");
}

/* Checks model and split. *full: the split with its defaults. */
static cf_result cf__model_resolve(const cf_model *model, const cf_parallel *given, cf_parallel *full,
                                   cf_error *error) {
    int64_t fitting;
    CF__TRY(cf_model_validate(model, error));
    if (given == NULL) return cf__fail_null(error, "parallel");
    *full = cf_parallel_defaults(given);
    CF__TRY(cf__range(full->tp, 1, INT64_MAX, "parallel.tp", error));
    fitting = cf__min(full->tp, model->heads);
    while (!cf__model_tp_fits(model, fitting, full->ep)) fitting--; /* 1 always fits */
    if (fitting < full->tp)
        return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.tp", -1, fitting, full->tp,
                        "must divide heads and ffn, and divide kv_heads or be a multiple of it");
    CF__TRY(cf__bounded(full->pp, 1, model->layers, "parallel.pp", "must not be more than layers", error));
    CF__TRY(cf__bounded(full->n_virtual, 1, model->layers / full->pp, "parallel.n_virtual",
                        "must leave each virtual stage a layer", error));
    CF__TRY(cf__model_check_v(full->placement, full->n_virtual, "parallel.placement", error));
    CF__TRY(cf__choice((int)full->placement, CF_PLACEMENT_LOOP, CF_PLACEMENT_V, "parallel.placement", error));
    CF__TRY(cf__check_flag(full->no_sequence, "parallel.no_sequence", -1, error));
    CF__TRY(cf__range(full->dp, 1, CF_MAX_RANKS, "parallel.dp", error));
    CF__TRY(cf__choice(full->zero, 0, 3, "parallel.zero", error));
    CF__TRY(cf__choice((int)full->recompute, 0, CF_RECOMPUTE_COUNT - 1, "parallel.recompute", error));
    CF__TRY(cf__needs(full->recompute_layers, full->recompute != CF_RECOMPUTE_NONE, "parallel.recompute_layers", -1,
                      "needs recompute, of which it is a number of layers", error));
    CF__TRY(cf__range(full->recompute_layers, 0, CF_MAX_LAYERS, "parallel.recompute_layers", error));
    CF__TRY(cf__range(full->vocab_multiple, 1, CF_MAX_VOCAB, "parallel.vocab_multiple", error));
    CF__TRY(cf__model_check_ep(model, full, error));
    return full->layers != NULL ? cf__model_check_layers(model, full, error) : CF_OK;
}

CHUNKFLOW_API cf_result cf_parallel_validate(const cf_model *model, const cf_parallel *parallel, cf_error *error) {
    cf_parallel full;
    return cf__model_resolve(model, parallel, &full, error);
}

/* Returns the layers of a virtual stage if layers are divided evenly: the remainder goes to stages 1, 2, ... and then
   to 0. */
static int64_t cf__model_even_layers(int64_t layers, int64_t n_stages, int64_t stage) {
    int64_t left = layers % n_stages;
    if (stage == 0) return layers / n_stages + (left == n_stages - 1 && left > 0);
    return layers / n_stages + (stage <= left && stage < n_stages - 1);
}

/* Returns the index of a virtual stage's first layer; `stage` may also be one past the last. */
static int64_t cf__model_first_layer(const cf_model *model, const cf_parallel *parallel, int64_t stage) {
    int64_t n_stages = parallel->pp * parallel->n_virtual, s, first = 0;
    for (s = 0; s < stage; s++)
        first += parallel->layers != NULL ? parallel->layers[s] : cf__model_even_layers(model->layers, n_stages, s);
    return first;
}

/* Sets widths and parameters of attention. With tensor parallelism, latent parts are whole on each GPU. */
static void cf__model_set_attention(const cf_model *model, const cf_layer *kind, cf_shard *s) {
    int64_t h = s->hidden, row = kind->latent + kind->rope_dim;
    int64_t part = kind->head_dim - kind->rope_dim + kind->value_dim; /* columns of each head's K and V that are
                                                                         computed from the latent */
    s->elements = s->q + s->out + s->kv + s->value + (kind->gate ? s->q + s->out : 0);
    s->mixer_weights = h * (s->q + s->kv + s->value + s->out + (kind->gate ? s->q : 0));
    if (model->qkv_bias) s->mixer_vectors += s->q + s->kv + s->value + (kind->gate ? s->q : 0);
    if (model->out_bias) s->mixer_vectors += h;
    if (kind->sinks) s->mixer_vectors += s->heads;
    if (model->qk_norm && kind->mixer != CF_MIXER_LATENT)
        s->norms += model->qk_norm == 2 ? s->q + s->kv : 2 * kind->head_dim;
    s->outputs = kind->window == 0 || kind->window >= CF_MIN_OUTPUT_WINDOW;
    if (kind->mixer == CF_MIXER_FULL) s->state_row = s->kv + s->value;
    else if (kind->mixer != CF_MIXER_LATENT) s->window_row = s->kv + s->value;
    if (kind->mixer != CF_MIXER_LATENT) return;
    s->kv = s->q; /* each head has its own K */
    s->value = s->out;
    s->elements = 2 * (s->q + s->out) + kind->q_latent + row;
    s->expand = kind->latent * s->heads * part;
    s->mixer_weights = h * (row + s->out) + s->expand;
    s->mixer_weights += kind->q_latent > 0 ? kind->q_latent * (h + s->q) : h * s->q;
    s->mixer_vectors = 0;
    s->norms += kind->latent + kind->q_latent;
    s->state_row = row;
}

/* Sets widths and parameters of a recurrent layer, as fla, transformers and mamba_ssm build them. q: its queries, as
   many as its keys. A head is gated by two numbers (delta: decay and rate) or one (mamba2). In kda each channel of keys
   has a gate, through a projection of width head_dim. */
static void cf__model_set_recurrence(const cf_layer *kind, cf_shard *s) {
    int64_t h = s->hidden, n = s->heads, mamba = kind->mixer == CF_MIXER_MAMBA2, kda = kind->mixer == CF_MIXER_KDA;
    s->q = s->kv;
    s->value = s->out;
    s->tail_row = 2 * s->kv + s->out;
    s->tail = kind->tail - 1;
    s->snapshot = n * kind->head_dim * kind->value_dim;
    s->effect = mamba ? n : n * kind->head_dim * kind->head_dim;
    s->elements = 2 * s->tail_row + 3 * s->out + (mamba ? 0 : 64 * n); /* plus a block of 64 x 64 per head */
    s->mixer_weights = h * (s->tail_row + 2 * s->out + (mamba || kda ? 1 : 2) * n);
    if (kda) s->mixer_weights += kind->value_dim * (2 * h + s->kv + s->out) - h * s->out;
    s->mixer_vectors = s->tail_row * (kind->tail + mamba) + (mamba ? 3 : 2) * n + (mamba ? s->out : kind->value_dim);
    if (kda) s->mixer_vectors += s->kv - n;
}

/* Sets widths and parameters of MLP or experts. The router and its bias are on every GPU. */
static void cf__model_set_mlp(const cf_model *model, const cf_layer *kind, const cf_parallel *parallel, cf_shard *s) {
    int64_t h = s->hidden, m = s->mlp_matrices, tp = parallel->tp;
    s->ffn = kind->no_ffn ? 0 : (kind->experts > 0 ? kind->shared : kind->ffn) / tp;
    s->mlp_weights = m * h * s->ffn + h * kind->experts;
    if (model->mlp_bias && s->ffn > 0) s->mlp_vectors = (m - 1) * s->ffn + h;
    if (kind->experts == 0) return;
    if (model->mlp_bias) s->mlp_vectors += kind->experts;
    if (kind->shared_gate) s->mlp_vectors += h;
    s->experts = kind->experts / parallel->ep;
    s->active = kind->active;
    s->reach = kind->reach > 0 ? kind->reach : kind->experts;
    s->expert_ffn = kind->ffn / (parallel->ep > 1 ? 1 : tp);
    s->expert_size = m * h * s->expert_ffn + (model->mlp_bias ? (m - 1) * s->expert_ffn + h : 0);
    s->expert_share = parallel->ep > 1 ? s->sequence : 1;
}

/* Returns the shard of one kind or, for -1, the layers of all kinds with the widths of the first. model and parallel
   have been checked. */
static cf_shard cf__model_shard(const cf_model *model, const cf_parallel *parallel, int64_t stage, int64_t of) {
    int64_t n_stages = parallel->pp * parallel->n_virtual, tp = parallel->tp;
    cf_layer kind = cf__model_kind(model, cf__max(of, 0));
    cf_shard shard;
    memset(&shard, 0, sizeof shard);
    shard.first = stage == 0;
    shard.last = stage == n_stages - 1;
    shard.layers = cf__model_even_layers(model->layers, n_stages, stage);
    if (parallel->layers != NULL) shard.layers = parallel->layers[stage];
    if (of >= 0 && cf__model_kinds(model) > 1) {
        int64_t at = cf__model_first_layer(model, parallel, stage);
        shard.layers = cf__model_count_layers(model, of, at, at + shard.layers);
    }
    if (shard.last && (of < 0 || cf__model_count_layers(model, of, model->layers - 1, model->layers) > 0))
        shard.layers += model->mtp;
    shard.hidden = model->hidden;
    shard.heads = kind.heads / tp;
    shard.q = shard.heads * kind.head_dim;
    shard.out = shard.heads * kind.value_dim;
    shard.kv = cf__max(kind.kv_heads / tp, 1) * kind.head_dim;
    shard.value = cf__max(kind.kv_heads / tp, 1) * kind.value_dim;
    shard.vocab = cf__div_up(cf__div_up(model->vocab, tp), parallel->vocab_multiple) * parallel->vocab_multiple;
    shard.sequence = parallel->no_sequence ? 1 : tp;
    shard.mlp_matrices = model->no_gate ? 2 : 3;
    shard.mixer = kind.mixer;
    shard.window = kind.window;
    shard.norms = model->hidden * (model->norms > 0 ? model->norms : (kind.mixer != CF_MIXER_NONE) + !kind.no_ffn);
    if (kind.mixer <= CF_MIXER_LATENT) cf__model_set_attention(model, &kind, &shard);
    else if (kind.mixer != CF_MIXER_NONE) cf__model_set_recurrence(&kind, &shard);
    else shard.heads = shard.q = shard.out = shard.kv = shard.value = 0;
    cf__model_set_mlp(model, &kind, parallel, &shard);
    return shard;
}

/* Counts the parameters of a virtual stage. Returns 0 if a count does not fit; widths are limited, so only the matrices
   of all layers together can be too large. */
static int cf__model_count_parameters(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                      cf_parameters *out) {
    cf_shard shard = cf__model_shard(model, parallel, stage, -1);
    int64_t h = shard.hidden, k;
    int overflow = 0;
    memset(out, 0, sizeof *out);
    if (shard.first) out->embedding = shard.vocab * h;
    if (shard.last && !(model->tied && cf_placement_stage(parallel->placement, parallel->pp, stage) == 0))
        out->head = shard.vocab * h; /* otherwise the head is the embedding, which is on the same stage */
    if (shard.last) out->norms = h + 3 * h * model->mtp;
    if (shard.last) cf__add_product(&out->mlp, model->mtp, 2 * h * h, &overflow);
    for (k = 0; k < cf__model_kinds(model); k++) {
        int64_t a_layer = 0, active = 0;
        shard = cf__model_shard(model, parallel, stage, k);
        cf__add_product(&a_layer, shard.experts, shard.expert_size, &overflow);
        cf__add_product(&active, shard.active, shard.expert_size, &overflow);
        cf__add_product(&out->norms, shard.layers, shard.norms, &overflow);
        cf__add_product(&out->attention, shard.layers, shard.mixer_weights + shard.mixer_vectors, &overflow);
        cf__add_product(&out->mlp, shard.layers, shard.mlp_weights + shard.mlp_vectors, &overflow);
        cf__add_product(&out->experts, shard.layers, a_layer, &overflow);
        cf__add_product(&out->active, shard.layers, active, &overflow);
    }
    cf__add_product(&out->total, out->attention, 1, &overflow);
    cf__add_product(&out->total, out->mlp, 1, &overflow);
    cf__add_product(&out->total, out->embedding + out->norms + out->head, 1, &overflow);
    cf__add_product(&out->active, out->total, 1, &overflow);
    cf__add_product(&out->mlp, out->experts, 1, &overflow);
    cf__add_product(&out->total, out->experts, 1, &overflow);
    return !overflow;
}

CHUNKFLOW_API cf_result cf_stage_shard(const cf_model *model, const cf_parallel *parallel, int64_t stage, int64_t kind,
                                       cf_shard *out, cf_error *error) {
    cf_parallel full;
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__model_resolve(model, parallel, &full, error));
    CF__TRY(cf__bounded(stage, 0, full.pp * full.n_virtual - 1, "stage", "there is no such virtual stage", error));
    CF__TRY(cf__bounded(kind, -1, cf__model_kinds(model) - 1, "kind", "there is no such kind", error));
    *out = cf__model_shard(model, &full, stage, kind);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_stage_parameters(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                            cf_parameters *out, cf_error *error) {
    cf_parallel full;
    cf_parameters counted;
    cf_shard shard;
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf_stage_shard(model, parallel, stage, -1, &shard, error));
    full = cf_parallel_defaults(parallel);
    if (!cf__model_count_parameters(model, &full, stage, &counted)) return cf__fail_size(error, "parameters");
    *out = counted;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_model_parameters(const cf_model *model, cf_parameters *out, cf_error *error) {
    cf_parallel whole;
    memset(&whole, 0, sizeof whole);
    return cf_stage_parameters(model, &whole, 0, out, error);
}

/* ================================================================================================================
   >>memory
   ================================================================================================================ */

/* Bytes of one element of each kind, and their defaults. */
#define CF__MEMORY_ELEMENTS(X)                                                               \
    X(activation_bytes, 2) X(parameter_bytes, 2) X(gradient_bytes, 4) X(optimizer_bytes, 12) \
    X(matrix_bytes, full.optimizer_bytes) X(state_bytes, 2) X(state_gradient_bytes, 4)

#define CF__MEMORY_MAX_ELEMENT 1024

CHUNKFLOW_API cf_memory_desc cf_memory_defaults(const cf_memory_desc *desc) {
    cf_memory_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    full.parallel = cf_parallel_defaults(&full.parallel);
    if (full.loss == CF_LOSS_DEFAULT) full.loss = CF_LOSS_CHUNKED;
#define CF__MEMORY_DEFAULT(name, usual) if (full.name == 0) full.name = usual;
    CF__MEMORY_ELEMENTS(CF__MEMORY_DEFAULT)
    if (full.runtime_bytes == 0) full.runtime_bytes = CF_RUNTIME_BYTES;
    if (full.chunk_size == 0) full.chunk_size = CF_BORDER_TOKENS;
    if (full.fragmentation == 0) full.fragmentation = CF_FRAGMENTATION;
    if (full.fragmentation == -1) full.fragmentation = 0;
    return full;
}

/* Returns the sum of all parts that can be in host memory. */
static int cf__memory_may_offload(const cf_parallel *parallel) {
    return CF_OFFLOAD_OPTIMIZER | (parallel->recompute == CF_RECOMPUTE_FULL ? CF_OFFLOAD_CHECKPOINTS : 0) |
           (parallel->zero > 2 ? CF_OFFLOAD_PARAMETERS : 0);
}

static cf_result cf__memory_check_desc(const cf_memory_desc *given, cf_memory_desc *full, cf_error *error) {
    if (given == NULL) return cf__fail_null(error, "desc");
    CF__TRY(cf_parallel_validate(given->model, &given->parallel, error));
    CF__TRY(cf__range(given->fragmentation, -1, 1000, "fragmentation", error));
    *full = cf_memory_defaults(given);
    CF__TRY(cf__choice((int)full->loss, 0, CF_LOSS_COUNT - 1, "loss", error));
#define CF__MEMORY_CHECK(name, usual) CF__TRY(cf__range(full->name, 1, CF__MEMORY_MAX_ELEMENT, #name, error));
    CF__MEMORY_ELEMENTS(CF__MEMORY_CHECK)
    CF__TRY(cf__range(full->state_window, 0, CF_MAX_LENGTH, "state_window", error));
    CF__TRY(cf__range(full->gathered, 0, CF_MAX_LENGTH, "gathered", error));
    CF__TRY(cf__range(full->lora_rank, 0, CF_MAX_WIDTH, "lora_rank", error));
    if (full->lora_experts != 0 && full->lora_rank == 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "lora_rank", -1, 1, 0, "must be given with lora_experts");
    CF__TRY(cf__needs(full->lora_experts, cf__model_has_experts(full->model), "lora_experts", -1,
                      "needs a model with experts", error));
    CF__TRY(cf__check_flag(full->lora_experts, "lora_experts", -1, error));
    CF__TRY(cf__check_flag(full->unfused, "unfused", -1, error));
    CF__TRY(cf__check_flag(full->unfused_attention, "unfused_attention", -1, error));
    CF__TRY(cf__range(full->chunk_size, 1, CF_MAX_CHUNK_SIZE, "chunk_size", error));
    if (full->offload < 0 || full->offload > CF_OFFLOAD_ALL)
        return cf__fail(error, CF_ERROR_ARGUMENT, "offload", -1, cf__memory_may_offload(&full->parallel), full->offload,
                        "there is no such choice");
    if (full->offload & CF_OFFLOAD_CHECKPOINTS && full->parallel.recompute != CF_RECOMPUTE_FULL)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "offload", -1, "checkpoints need full recomputation");
    if (full->offload & CF_OFFLOAD_PARAMETERS && full->parallel.zero < 3)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "offload", -1, "parameters need ZeRO 3, which gathers them");
    CF__TRY(cf__choice(full->outputs, 0, 2, "outputs", error));
    if (full->outputs && full->parallel.recompute == CF_RECOMPUTE_FULL)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "outputs", -1, "are dropped again with full recomputation");
    if (full->outputs && full->unfused_attention)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "outputs", -1, "need attention that does not write out its scores");
    return cf__range(full->runtime_bytes, 1, INT64_MAX, "runtime_bytes", error);
}

/* ---- bytes per token ---- */

/* Returns the bytes, per row, of the row's copies for its experts. bytes: of one copy. */
static int64_t cf__memory_dispatched(const cf_memory_desc *desc, const cf_shard *shard, int64_t bytes) {
    int64_t more = desc->parallel.ep > 1 ? desc->parallel.imbalance : 0;
    if (shard->active == 0) return 0;
    return cf__div_up(cf__div_up(shard->active * bytes, shard->expert_share) * (100 + more), 100);
}

/* Returns the bytes of a row in MLP and experts. matrices: number of results per row that are as wide as the MLP or an
   expert. */
static int64_t cf__memory_mlp_rows(const cf_memory_desc *desc, const cf_shard *shard, int64_t matrices) {
    int64_t element = desc->activation_bytes;
    int64_t router = cf__div_up(8 * shard->experts * desc->parallel.ep, shard->sequence);
    int64_t copy = element * (shard->hidden + matrices * shard->expert_ffn);
    return matrices * element * shard->ffn + cf__memory_dispatched(desc, shard, copy) + router;
}

static int64_t cf__memory_mlp_bytes(const cf_memory_desc *desc, const cf_shard *shard) {
    return cf__memory_mlp_rows(desc, shard, shard->mlp_matrices + (desc->unfused && !desc->model->no_gate));
}

/* Returns the bytes per token that a layer keeps for backward with recomputation `again`. */
static int64_t cf__memory_layer_bytes(const cf_memory_desc *desc, const cf_shard *shard, cf_recompute again) {
    int64_t element = desc->activation_bytes, mlp = cf__memory_mlp_bytes(desc, shard);
    int64_t rows = 4 * element * shard->hidden;  /* inputs of two norms, and their outputs */
    int64_t mixer = element * shard->elements;   /* Q, output; K, V */
    if (again == CF_RECOMPUTE_FULL) return cf__div_up(element * shard->hidden, shard->sequence);
    if (again != CF_RECOMPUTE_SELECTIVE && !desc->unfused_attention && shard->mixer <= CF_MIXER_LATENT)
        mixer += 4 * shard->heads;
    if (desc->unfused) rows += 8 * shard->hidden; /* each norm keeps its input as float instead, and its normalised
                                                     rows */
    if (again >= CF_RECOMPUTE_LAYERNORM) rows = 2 * element * shard->hidden;
    if (again == CF_RECOMPUTE_ACT) mlp = cf__memory_mlp_rows(desc, shard, shard->mlp_matrices - 1);
    if (again == CF_RECOMPUTE_MLP) mlp = 0;
    return cf__div_up(rows, shard->sequence) + mixer + mlp;
}

/* Returns the bytes per token of one layer's gradients in backward: the larger of MLP and attention, plus the residual
   and a norm's output. Adds recomputed activations, except the row statistics of attention. */
static int64_t cf__memory_working_bytes(const cf_memory_desc *desc, const cf_shard *shard) {
    int64_t element = desc->activation_bytes, bytes = cf__div_up(2 * element * shard->hidden, shard->sequence);
    cf_recompute again = desc->parallel.recompute;
    bytes += cf__max(cf__memory_mlp_bytes(desc, shard), element * shard->elements);
    if (again > CF_RECOMPUTE_SELECTIVE) bytes += cf__memory_layer_bytes(desc, shard, CF_RECOMPUTE_NONE);
    if (again > CF_RECOMPUTE_SELECTIVE && again < CF_RECOMPUTE_FULL)
        bytes -= cf__memory_layer_bytes(desc, shard, again);
    if (desc->state_window > 0 && shard->state_row > 0) /* sums carried from block to block of keys */
        bytes += 4 * (shard->q + 2 * shard->heads);
    return bytes;
}

/* A stage's bytes per token, and other numbers of the stage. */
typedef struct cf__memory_stage_bytes {
    cf_shard shard;       /* with all layers of the stage */
    cf_token_bytes bytes; /* `state` without `share` */
    int64_t share;        /* the rest of `state`: routes, and a token's share of a border */
    int64_t row;          /* elements of a row of state in the layer where it is largest */
    int64_t heads_kept;   /* heads of all layers that keep their scores */
    int64_t heads;        /* maximum heads of one layer */
    int overflow;         /* 1: something does not fit */
} cf__memory_stage_bytes;

/* Adds the state of the layers of one kind. */
static void cf__memory_add_state(const cf_memory_desc *desc, const cf_shard *s, cf__memory_stage_bytes *out) {
    /* rows that are handed on at a border */
    int64_t chunked = s->mixer == CF_MIXER_CHUNKED, ends = s->window - !chunked;
    int64_t rows = cf__min(desc->chunk_size, ends), tail = s->tail * s->tail_row;
    cf_token_bytes *bytes = &out->bytes;
    if (chunked && desc->chunk_size % s->window == 0) rows = ends = 0;
    bytes->state += s->layers * s->state_row * desc->state_bytes;
    bytes->state_gradient += s->layers * s->state_row * desc->state_gradient_bytes;
    out->row = cf__max(out->row, s->state_row);
    cf__add_product(&bytes->border, s->layers * desc->state_bytes, rows * s->window_row, &out->overflow);
    cf__add_product(&bytes->border, s->layers, 4 * s->snapshot + tail * desc->state_bytes, &out->overflow);
    cf__add_product(&bytes->carry, s->layers * desc->state_gradient_bytes, ends * s->window_row, &out->overflow);
    cf__add_product(&bytes->carry, s->layers, 4 * s->snapshot + tail * desc->state_gradient_bytes, &out->overflow);
    bytes->routes += s->layers * cf__div_up(2 * s->active, s->expert_share > 0 ? s->expert_share : 1);
}

/* Adds the bytes of the layers of one kind. left: number of the stage's remaining layers that recompute. */
static void cf__memory_add_kind(const cf_memory_desc *desc, const cf_shard *s, int64_t *left,
                                cf__memory_stage_bytes *out) {
    cf_recompute what = desc->parallel.recompute;
    int64_t again = cf__min(*left, s->layers), heads = s->mixer <= CF_MIXER_LATENT ? s->heads : 0;
    int drops = what == CF_RECOMPUTE_SELECTIVE || what == CF_RECOMPUTE_FULL;
    *left -= again;
    cf__add_product(desc->offload & CF_OFFLOAD_CHECKPOINTS ? &out->bytes.checkpoints : &out->bytes.activations, again,
                    cf__memory_layer_bytes(desc, s, what), &out->overflow);
    cf__add_product(&out->bytes.activations, s->layers - again, cf__memory_layer_bytes(desc, s, CF_RECOMPUTE_NONE),
                    &out->overflow);
    out->heads_kept += heads * (s->layers - (drops ? again : 0));
    if (s->layers == 0) return;
    out->heads = cf__max(out->heads, heads);
    if (desc->outputs && s->outputs) {
        int64_t outputs = desc->activation_bytes * s->out + 4 * s->heads;
        cf__add_product(&out->bytes.dropped, s->layers, outputs, &out->overflow);
        out->bytes.staged = cf__max(out->bytes.staged, outputs);
    }
    out->bytes.working = cf__max(out->bytes.working, cf__memory_working_bytes(desc, s));
    out->bytes.buffers = cf__max(out->bytes.buffers,
                                 cf__memory_dispatched(desc, s, 2 * desc->activation_bytes * s->hidden));
    cf__memory_add_state(desc, s, out);
}

static void cf__memory_weigh_stage(const cf_memory_desc *desc, int64_t stage, cf__memory_stage_bytes *out) {
    cf_shard *shard = &out->shard, of;
    cf_token_bytes *bytes = &out->bytes;
    int64_t element = desc->activation_bytes, row, left, k, ends, losses = 1 + desc->model->mtp;
    int whole = desc->loss == CF_LOSS_PARALLEL || desc->loss == CF_LOSS_EAGER; /* a float softmax is kept */
    int64_t kept = whole ? 4 : desc->loss == CF_LOSS_FUSED ? element : 0;
    memset(out, 0, sizeof *out);
    *shard = cf__model_shard(desc->model, &desc->parallel, stage, -1);
    row = cf__div_up(element * shard->hidden, shard->sequence);
    left = cf__min(shard->layers, desc->parallel.recompute_layers > 0 ? desc->parallel.recompute_layers : INT64_MAX);
    for (k = 0; k < cf__model_kinds(desc->model); k++) {
        of = cf__model_shard(desc->model, &desc->parallel, stage, k);
        cf__memory_add_kind(desc, &of, &left, out);
    }
    if (shard->first) bytes->activations += 8;
    if (shard->last) {
        bytes->activations += losses * (cf__div_up(2 * element * shard->hidden, shard->sequence) + kept * shard->vocab);
        if (desc->loss == CF_LOSS_CHUNKED) bytes->activations += losses * row;
        if (whole) /* at the peak also the logits, and their float copy or two float gradients */
            bytes->logits = (element + (desc->loss == CF_LOSS_EAGER ? 8 : 4)) * shard->vocab;
    }
    bytes->boundary = row;
    bytes->dropped += row;
    bytes->staged += row;
    ends = (shard->first != 0) + (shard->last != 0);
    if (desc->offload & CF_OFFLOAD_CHECKPOINTS) bytes->buffers += 2 * row;
    bytes->buffers += (4 - 2 * ends) * row; /* in and out, for activations and for gradients */
    if (desc->parallel.tp > 1 && !desc->parallel.no_sequence)
        bytes->buffers += 2 * element * shard->hidden; /* gathered; gradient */
    out->share = bytes->routes + (bytes->border > 0 ? cf__div_up(bytes->border, desc->chunk_size) : 0);
}

CHUNKFLOW_API cf_result cf_memory_token_bytes(const cf_memory_desc *desc, int64_t stage, cf_token_bytes *out,
                                              cf_error *error) {
    cf_memory_desc full;
    cf__memory_stage_bytes weighed;
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__memory_check_desc(desc, &full, error));
    CF__TRY(cf__bounded(stage, 0, full.parallel.pp * full.parallel.n_virtual - 1, "stage",
                        "there is no such virtual stage", error));
    cf__memory_weigh_stage(&full, stage, &weighed);
    if (weighed.overflow) return cf__fail_size(error, "model");
    *out = weighed.bytes;
    if (full.state_window > 0) out->state = out->state_gradient = 0;
    out->state += weighed.share;
    return CF_OK;
}

/* ---- stages ---- */

/* Members of cf_memory_load. */
#define CF__MEMORY_LOADS(X)                                                                 \
    X(live_tokens) X(chunk_tokens) X(state_tokens) X(state_gradient_tokens) X(carries) \
    X(input_tokens) X(live_scores) X(chunk_scores)

static cf_result cf__memory_check_load(const cf_memory_load *load, int64_t item, cf_error *error) {
#define CF__MEMORY_CHECK_LOAD(name) \
    CF__TRY(cf__inside(load->name, 0, INT64_MAX, CF_ERROR_ARGUMENT, "loads." #name, item, "is negative", error));
    CF__MEMORY_LOADS(CF__MEMORY_CHECK_LOAD)
    return CF_OK;
}

/* Sums of a stage over its virtual stages. */
typedef struct cf__memory_sums {
    cf_memory_report terms;   /* logits and working are each at their own peak; parameters, gradients and optimizer are
                                 filled in later */
    int64_t parameters;       /* number of parameters, without routed experts */
    int64_t matrices;         /* attention's and MLP's share of these */
    int64_t experts;          /* parameters of routed experts */
    int64_t adapters, expert_adapters; /* parameters of LoRA; expert_adapters: those on routed experts */
    int64_t layer_parameters; /* parameters of the largest layer, but at least the mean of a stage's layers */
    int64_t kept, carry;      /* bytes of state that never stream; carry: of their gradient */
    int64_t layer_row;        /* elements of a row of one layer's K and V */
    int64_t two_inputs;       /* bytes of two stage inputs of the largest chunk, and of outputs of two layers */
    int overflow;             /* 1: something does not fit */
} cf__memory_sums;

/* Returns the bytes of the largest scan of a recurrent layer in a cp group. A rank scans its share of the heads over
   all parts. It then holds as much as for one part of all heads: an effect, and with those that it receives and returns
   four states. Each row of the chunk also has a row of keys per head, which reads the state before the part. */
static int64_t cf__memory_scan(const cf_memory_desc *desc, int64_t stage, int64_t tokens, int *overflow) {
    int64_t k, most = 0;
    for (k = 0; k < cf__model_kinds(desc->model); k++) {
        cf_shard s = cf__model_shard(desc->model, &desc->parallel, stage, k);
        int64_t bytes = 4 * (4 * s.snapshot + s.effect);
        if (s.snapshot == 0 || s.layers == 0) continue;
        cf__add_product(&bytes, tokens, desc->activation_bytes * s.heads * (s.snapshot / s.out), overflow);
        most = cf__max(most, bytes);
    }
    return most;
}

/* Adds the parameters of the largest layer on a stage, with its experts on this GPU, and those of adapters. An adapter
   has rank x (inputs + outputs) parameters, for its matrix on one GPU. If tensor parallelism divides a matrix's
   outputs, adapter matrix A is whole on every GPU; otherwise B is. */
static void cf__memory_add_matrices(const cf_memory_desc *desc, int64_t stage, cf__memory_sums *sums) {
    int64_t k;
    for (k = 0; k < cf__model_kinds(desc->model); k++) {
        cf_shard s = cf__model_shard(desc->model, &desc->parallel, stage, k);
        int64_t layer = s.mixer_weights + s.mixer_vectors + s.mlp_weights + s.mlp_vectors + s.norms;
        int64_t mixer = 4 * s.hidden + s.q + s.kv + s.value + s.out, mlp = s.mlp_matrices * (s.hidden + s.ffn);
        int64_t width = (s.mixer != CF_MIXER_NONE ? mixer : 0) + (s.ffn > 0 ? mlp : 0);
        int64_t routed = desc->lora_experts ? s.experts * s.mlp_matrices * (s.hidden + s.expert_ffn) : 0;
        cf__add_product(&layer, s.experts, s.expert_size, &sums->overflow);
        if (s.layers > 0) sums->layer_parameters = cf__max(sums->layer_parameters, layer);
        cf__add_product(&sums->adapters, s.layers * desc->lora_rank, width, &sums->overflow);
        cf__add_product(&sums->expert_adapters, s.layers * desc->lora_rank, routed, &sums->overflow);
    }
}

static void cf__memory_add_virtual_stage(const cf_memory_desc *desc, int64_t stage, const cf_memory_load *load,
                                         cf__memory_sums *sums) {
    cf__memory_stage_bytes of;
    const cf_token_bytes *bytes = &of.bytes;
    cf_memory_report *terms = &sums->terms;
    int *overflow = &sums->overflow;
    int64_t working = 0, buffers = 0, inputs = 0;
    int64_t element = desc->unfused_attention ? desc->activation_bytes : 0; /* bytes of a score of one head */
    int drops = desc->parallel.recompute == CF_RECOMPUTE_SELECTIVE || desc->parallel.recompute == CF_RECOMPUTE_FULL;
    cf_parameters counted;
    cf__memory_weigh_stage(desc, stage, &of);
    *overflow |= of.overflow;
    if (!cf__model_count_parameters(desc->model, &desc->parallel, stage, &counted)) *overflow = 1;
    cf__add_product(&sums->parameters, counted.total - counted.experts, 1, overflow);
    cf__add_product(&sums->matrices, counted.attention + counted.mlp - counted.experts, 1, overflow);
    cf__add_product(&sums->experts, counted.experts, 1, overflow);
    cf__memory_add_matrices(desc, stage, sums);
    sums->layer_parameters = cf__max(sums->layer_parameters,
                                     (counted.total - counted.embedding - counted.head) / of.shard.layers);
    cf__add_product(&terms->activations, load->live_tokens, bytes->activations, overflow);
    cf__add_product(&terms->host, load->live_tokens, bytes->checkpoints, overflow);
    cf__add_product(&terms->activations, load->live_scores, element * of.heads_kept, overflow); /* softmax */
    cf__add_product(&terms->logits, load->chunk_tokens, bytes->logits, overflow);
    cf__add_product(&terms->state, load->state_tokens, bytes->state, overflow);
    cf__add_product(&sums->kept, load->state_tokens, of.share, overflow);
    cf__add_product(&terms->state_gradient, load->state_gradient_tokens, bytes->state_gradient, overflow);
    cf__add_product(&sums->carry, cf__max(load->carries, load->state_gradient_tokens > 0), bytes->carry, overflow);
    cf__add_product(&terms->inputs, load->input_tokens, bytes->dropped, overflow);
    cf__add_product(&working, load->chunk_tokens, bytes->working, overflow);
    /* The gradient of the scores, and their softmax if it is recomputed. */
    cf__add_product(&working, load->chunk_scores, (drops ? 2 : 1) * element * of.heads, overflow);
    cf__add_product(&buffers, load->chunk_tokens, bytes->buffers, overflow);
    if (desc->gathered > 0)
        cf__add_product(&buffers, 1, cf__memory_scan(desc, stage, load->chunk_tokens, overflow), overflow);
    terms->working = cf__max(terms->working, working); /* one virtual stage is in a pass at a time */
    terms->buffers = cf__max(terms->buffers, buffers);
    sums->layer_row = cf__max(sums->layer_row, of.row);
    cf__add_product(&inputs, load->chunk_tokens, 2 * bytes->staged, overflow);
    sums->two_inputs = cf__max(sums->two_inputs, inputs);
}

/* Moves all state that grows with a chain to host memory, and counts the ring on the device. */
static void cf__memory_stream(const cf_memory_desc *desc, cf__memory_sums *sums) {
    cf_memory_report *terms = &sums->terms;
    int *overflow = &sums->overflow;
    int64_t state = terms->state, gradient = terms->state_gradient;
    if (state > 0 || gradient > 0) {
        terms->state = terms->state_gradient = 0;
        cf__add_product(&terms->state, desc->state_window, sums->layer_row * desc->state_bytes, overflow);
        cf__add_product(&terms->state_gradient, desc->state_window, sums->layer_row * desc->state_gradient_bytes,
                        overflow);
    }
    cf__add_product(&terms->host, state, 1, overflow);
    cf__add_product(&terms->host, gradient, 1, overflow);
}

/* Moves the inputs and outputs of dropped chunks to host memory, except those in transit. */
static void cf__memory_move_inputs(cf__memory_sums *sums) {
    cf_memory_report *terms = &sums->terms;
    cf__add_product(&terms->host, terms->inputs, 1, &sums->overflow);
    terms->inputs = cf__min(terms->inputs, sums->two_inputs);
}

/* Returns the bytes of weights, gradients or optimizer states. bytes, matrix: per parameter outside matrices and inside
   them. trained: with LoRA, only adapters count. shared: ZeRO divides them, so this is one dp-th, rounded up; routed
   experts are divided by their own number of copies. */
static int64_t cf__memory_share(const cf_memory_desc *desc, cf__memory_sums *sums, int64_t bytes, int64_t matrix,
                                int trained, int shared) {
    const cf_parallel *parallel = &desc->parallel;
    int64_t all = 0, experts = 0, copies = parallel->ep > 1 ? parallel->tp * parallel->dp / parallel->ep : parallel->dp;
    cf__add_product(&all, sums->adapters, matrix, &sums->overflow);
    cf__add_product(&experts, sums->expert_adapters, matrix, &sums->overflow);
    if (!trained || desc->lora_rank == 0) {
        cf__add_product(&all, sums->parameters - sums->matrices, bytes, &sums->overflow);
        cf__add_product(&all, sums->matrices, matrix, &sums->overflow);
        cf__add_product(&experts, sums->experts, matrix, &sums->overflow);
    }
    if (shared) all = cf__div_up(all, parallel->dp);
    cf__add_product(&all, shared ? cf__div_up(experts, copies) : experts, 1, &sums->overflow);
    return all;
}

/* Moves a term to host memory, except `stays` bytes of it. */
static void cf__memory_offload(cf_memory_report *out, int64_t *term, int64_t stays, int *overflow) {
    cf__add_product(&out->host, *term, 1, overflow);
    *term = cf__min(*term, stays);
}

static int64_t cf__memory_runtime(const cf_memory_desc *desc, const cf_memory_report *report, int *overflow) {
    const int64_t moving[] = {report->activations, report->logits,         report->working,
                              report->state,       report->state_gradient, report->inputs};
    int64_t lost = 0, runtime = desc->runtime_bytes, i;
    for (i = 0; i < CF__COUNT(moving); i++) cf__add_product(&lost, moving[i], desc->fragmentation, overflow);
    cf__add_product(&runtime, lost / 100, 1, overflow);
    return runtime;
}

/* Fills in the report of a stage. loads: by virtual stage. Returns 0 if something does not fit. */
static int cf__memory_stage(const cf_memory_desc *desc, int64_t stage, const cf_memory_load *loads,
                            cf_memory_report *out) {
    const cf_parallel *parallel = &desc->parallel;
    int64_t v;
    cf__memory_sums sums;
    int *overflow = &sums.overflow;
    memset(&sums, 0, sizeof sums);
    for (v = 0; v < parallel->n_virtual; v++) {
        int64_t at = cf_placement_at(parallel->placement, parallel->pp, v, stage);
        cf__memory_add_virtual_stage(desc, at, &loads[at], &sums);
    }
    if (desc->state_window > 0) cf__memory_stream(desc, &sums);
    if (desc->state_window > 0 || desc->outputs > 1) cf__memory_move_inputs(&sums);
    cf__add_product(&sums.terms.state, sums.kept, 1, overflow);
    cf__add_product(&sums.terms.state_gradient, sums.carry, 1, overflow);
    *out = sums.terms;
    out->parameters =
        cf__memory_share(desc, &sums, desc->parameter_bytes, desc->parameter_bytes, 0, parallel->zero > 2);
    out->gradients = cf__memory_share(desc, &sums, desc->gradient_bytes, desc->gradient_bytes, 1, parallel->zero > 1);
    out->optimizer = cf__memory_share(desc, &sums, desc->optimizer_bytes, desc->matrix_bytes, 1, parallel->zero > 0);
    if (desc->offload & CF_OFFLOAD_PARAMETERS) cf__memory_offload(out, &out->parameters, 0, overflow);
    if (desc->offload & CF_OFFLOAD_OPTIMIZER) cf__memory_offload(out, &out->optimizer, 0, overflow);
    if (desc->offload & CF_OFFLOAD_OPTIMIZER && parallel->zero > 1) {
        int64_t two_layers = 0;
        cf__add_product(&two_layers, sums.layer_parameters, 2 * desc->gradient_bytes, overflow);
        cf__memory_offload(out, &out->gradients, two_layers, overflow);
    }
    out->at_loss = out->logits > out->working;
    if (out->at_loss) out->working = 0;
    else out->logits = 0;
    if (parallel->zero >= 3 && parallel->dp > 1)
        cf__add_product(&out->buffers, sums.layer_parameters, 2 * desc->parameter_bytes, overflow);
    cf__add_product(&out->buffers, desc->gathered,
                    sums.layer_row * (desc->state_bytes + desc->state_gradient_bytes), overflow);
    out->runtime = cf__memory_runtime(desc, out, overflow);
#define CF__MEMORY_ADD_TERM(name, text) cf__add_product(&out->total, out->name, 1, overflow);
    CF_MEMORY_TERMS(CF__MEMORY_ADD_TERM)
#undef CF__MEMORY_ADD_TERM
    return !sums.overflow;
}

CHUNKFLOW_API cf_result cf_memory_estimate(const cf_memory_desc *desc, const cf_memory_load *loads, int64_t n_loads,
                                           cf_memory_report *reports, int64_t n_reports, cf_error *error) {
    cf_memory_desc full;
    cf_memory_report report;
    int64_t s, n_stages;
    if (loads == NULL) return cf__fail_null(error, "loads");
    if (reports == NULL) return cf__fail_null(error, "reports");
    CF__TRY(cf__memory_check_desc(desc, &full, error));
    n_stages = full.parallel.pp * full.parallel.n_virtual;
    if (n_loads != n_stages)
        return cf__fail(error, CF_ERROR_ARGUMENT, "n_loads", -1, n_stages, n_loads,
                        "must be the number of virtual stages");
    if (n_reports != full.parallel.pp)
        return cf__fail(error, CF_ERROR_ARGUMENT, "n_reports", -1, full.parallel.pp, n_reports, "must be parallel.pp");
    for (s = 0; s < n_stages; s++) CF__TRY(cf__memory_check_load(&loads[s], s, error));
    for (s = 0; s < n_reports; s++) /* all are written, or none */
        if (!cf__memory_stage(&full, s, loads, &report)) return cf__fail_size(error, "loads");
    for (s = 0; s < n_reports; s++) (void)cf__memory_stage(&full, s, loads, &reports[s]);
    return CF_OK;
}

/* ================================================================================================================
   >>pipeline
   ================================================================================================================ */

CF__NAMES(cf_pass_name, cf_pass, CF_PASSES, "?")
CF__NAMES(cf_replay_name, cf_replay, CF_REPLAYS, "?")
CF__NAMES(cf_edge_name, cf_edge_why, CF_EDGES, "?")

/* ---- passes of a stage ---- */

/* One cost for each compute pass, by its cf_pass, with defaults filled in. The members of cf_stage_cost have the same
   order. */
typedef struct cf__pipe_costs {
    cf_pass_cost of[CF_COMPUTE_PASS_COUNT];
} cf__pipe_costs;

/* The passes of a chunk on one virtual stage, here called places: F, R, B or I, and W. A backward is either B, or I and
   W, so four numbers are enough. */
enum {
    CF__PIPE_BACK = CF_B, /* B or I */
    CF__PIPE_W,           /* only if backwards are split */
    CF__PIPE_PLACES
};

static int cf__pipe_place(int pass) { return pass - (pass > CF_B); }

static int cf__pipe_pass_at(int place, int split) { return place + (split && place >= CF__PIPE_BACK); }

static int cf__pipe_is_free(const cf_pass_cost *cost) {
    return !(cost->constant > 0) && !(cost->per_token > 0) && !(cost->per_pair > 0);
}

/* Sets a missing cost to (a + b) x scale. */
static void cf__pipe_derive(cf_pass_cost *cost, const cf_pass_cost *a, const cf_pass_cost *b, double scale) {
    if (!cf__pipe_is_free(cost)) return;
    cost->constant = (a->constant + b->constant) * scale;
    cost->per_token = (a->per_token + b->per_token) * scale;
    cost->per_pair = (a->per_pair + b->per_pair) * scale;
}

static cf__pipe_costs cf__pipe_fill_costs(const cf_stage_cost *given, int outputs) {
    static const cf_pass_cost none = {0, 0, 0};
    cf__pipe_costs costs;
    cf_pass_cost *of = costs.of, replay;
    int i = 0;
    memcpy(of, given, sizeof costs);
    while (i < CF_COMPUTE_PASS_COUNT && cf__pipe_is_free(&of[i])) i++;
    if (i == CF_COMPUTE_PASS_COUNT) of[CF_F].per_token = 1;
    replay = of[CF_F];
    if (outputs) replay.per_pair = 0;
    cf__pipe_derive(&of[CF_R], &replay, &none, 1);
    cf__pipe_derive(&of[CF_B], &of[CF_I], &of[CF_W], 1);
    cf__pipe_derive(&of[CF_B], &of[CF_F], &of[CF_F], 1);
    cf__pipe_derive(&of[CF_I], &of[CF_B], &none, 0.5);
    cf__pipe_derive(&of[CF_W], &of[CF_B], &none, 0.5);
    return costs;
}

static cf_result cf__pipe_check_cost(const cf_stage_cost *stage, int64_t v, cf_error *error) {
#define CF__PIPE_COST_FIELDS(pass) {"timing." pass ".constant", "timing." pass ".per_token", "timing." pass ".per_pair"}
    static const char *const fields[CF_COMPUTE_PASS_COUNT][3] = {
        CF__PIPE_COST_FIELDS("forward"), CF__PIPE_COST_FIELDS("replay"), CF__PIPE_COST_FIELDS("backward"),
        CF__PIPE_COST_FIELDS("input"), CF__PIPE_COST_FIELDS("weight")};
#undef CF__PIPE_COST_FIELDS
    cf__pipe_costs costs;
    int i;
    memcpy(costs.of, stage, sizeof costs);
    for (i = 0; i < CF_COMPUTE_PASS_COUNT; i++) {
        CF__TRY(cf__check_real(costs.of[i].constant, fields[i][0], v, error));
        CF__TRY(cf__check_real(costs.of[i].per_token, fields[i][1], v, error));
        CF__TRY(cf__check_real(costs.of[i].per_pair, fields[i][2], v, error));
    }
    return CF_OK;
}

/* Checks a timing. shape: checked, with its defaults. timing: NULL is allowed. */
static cf_result cf__pipe_check_timing(const cf_timing *timing, const cf_shape *shape, cf_error *error) {
    int64_t v, n_v = shape->n_stages * shape->n_virtual;
    cf__pipe_costs all;
    if (timing == NULL) return CF_OK;
    CF__TRY(cf__check_real(timing->latency, "timing.latency", -1, error));
    CF__TRY(cf__check_real(timing->seconds_per_token, "timing.seconds_per_token", -1, error));
    CF__TRY(cf__check_real(timing->stream_forward, "timing.stream_forward", -1, error));
    CF__TRY(cf__check_real(timing->stream_backward, "timing.stream_backward", -1, error));
    CF__TRY(cf__check_real(timing->gather_forward, "timing.gather_forward", -1, error));
    CF__TRY(cf__check_real(timing->gather_backward, "timing.gather_backward", -1, error));
    CF__TRY(cf__check_real(timing->scan_forward, "timing.scan_forward", -1, error));
    CF__TRY(cf__check_real(timing->scan_backward, "timing.scan_backward", -1, error));
    CF__TRY(cf__check_real(timing->stream_exposed, "timing.stream_exposed", -1, error));
    if (timing->stream_exposed > 1)
        return cf__fail_real(error, CF_ERROR_ARGUMENT, "timing.stream_exposed", -1, timing->stream_exposed,
                             "must not be more than 1");
    if (timing->stream_exposed > 0 && !(timing->stream_forward > 0 || timing->stream_backward > 0 ||
                                        timing->gather_forward > 0 || timing->gather_backward > 0))
        return cf__fail_real(error, CF_ERROR_ARGUMENT, "timing.stream_exposed", -1, timing->stream_exposed,
                             "needs stream_forward, or another stream or gather of which it is a part");
    CF__TRY(cf__pipe_check_cost(&timing->all, -1, error));
    if (timing->stages == NULL) return CF_OK;
    memcpy(all.of, &timing->all, sizeof all);
    for (v = 0; v < CF_COMPUTE_PASS_COUNT; v++)
        if (!cf__pipe_is_free(&all.of[v]))
            return cf__refuse(error, CF_ERROR_ARGUMENT, "timing.all", -1, "must be zero where stages are given");
    for (v = 0; v < n_v; v++) CF__TRY(cf__pipe_check_cost(&timing->stages[v], v, error));
    return CF_OK;
}

/* ---- shapes and limits ---- */

static cf_shape cf__pipe_shape_defaults(cf_shape shape, int64_t n_virtual) {
    if (shape.n_stages == 0) shape.n_stages = 1;
    if (shape.n_virtual == 0) shape.n_virtual = n_virtual;
    if (shape.placement == CF_PLACEMENT_DEFAULT) shape.placement = CF_PLACEMENT_LOOP;
    if (shape.replay == CF_REPLAY_DEFAULT) shape.replay = CF_REPLAY_LOCAL;
    if (shape.k == 0) shape.k = 1;
    return shape;
}

/* Checks a shape whose defaults are filled in. */
static cf_result cf__pipe_check_shape(const cf_plan *plan, const cf_shape *shape, cf_error *error) {
    CF__TRY(cf__range(shape->n_stages, 1, CF_MAX_STAGES, "shape.n_stages", error));
    CF__TRY(cf__range(shape->n_virtual, 1, CF_MAX_STAGES / shape->n_stages, "shape.n_virtual", error));
    CF__TRY(cf__choice((int)shape->placement, CF_PLACEMENT_LOOP, CF_PLACEMENT_V, "shape.placement", error));
    CF__TRY(cf__choice((int)shape->replay, CF_REPLAY_PIPELINE, CF_REPLAY_COUNT - 1, "shape.replay", error));
    CF__TRY(cf__range(shape->k, 1, INT64_MAX, "shape.k", error));
    CF__TRY(cf__check_flag(shape->forward_only, "shape.forward_only", -1, error));
    CF__TRY(cf__check_flag(shape->outputs, "shape.outputs", -1, error));
    if (shape->outputs && shape->replay == CF_REPLAY_PIPELINE)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "shape.outputs", -1, "are for local replay");
    return cf__choice(shape->rank, 0, plan->n_ranks - 1, "shape.rank", error);
}

static cf_result cf__pipe_check_by_stage(const int64_t *limits, int64_t n_stages, cf_result code, const char *field,
                                         cf_error *error) {
    int64_t s;
    for (s = 0; limits != NULL && s < n_stages; s++)
        if (limits[s] < CF_NO_LIMIT)
            return cf__fail(error, code, field, s, 0, limits[s], "must not be negative, unless it is CF_NO_LIMIT");
    return CF_OK;
}

/* The room of one stage: its limits on chunks, state and bytes. Once resolved, every member is a number; INT64_MAX
   means no limit. */
typedef struct cf__pipe_room {
    int64_t chunks, state, bytes;
} cf__pipe_room;

static int64_t cf__pipe_given(int64_t all, const int64_t *by_stage, int64_t stage) {
    return by_stage != NULL && by_stage[stage] != 0 ? by_stage[stage] : all;
}

/* Checks that no number is negative, except CF_NO_LIMIT as a limit. code: for a negative number. */
static cf_result cf__pipe_check_limits(const cf_limits *limits, int64_t n_stages, cf_result code, cf_error *error) {
    const cf_held_bytes *bytes = &limits->per_token;
    int64_t s, counts;
    const cf__member members[] = {
        {"limits.chunks", limits->chunks, CF_NO_LIMIT, INT64_MAX, CF_ERROR_LIMIT},
        {"limits.state", limits->state, CF_NO_LIMIT, INT64_MAX, CF_ERROR_LIMIT},
        {"limits.bytes", limits->bytes, CF_NO_LIMIT, INT64_MAX, CF_ERROR_LIMIT},
        {"limits.per_token.activations", bytes->activations, 0, INT64_MAX, CF_ERROR_LIMIT},
        {"limits.per_token.state", bytes->state, 0, INT64_MAX, CF_ERROR_LIMIT},
        {"limits.per_token.state_gradient", bytes->state_gradient, 0, INT64_MAX, CF_ERROR_LIMIT},
        {"limits.per_token.boundary", bytes->boundary, 0, INT64_MAX, CF_ERROR_LIMIT}};
    CF__TRY(cf__check_members(members, CF__COUNT(members), code, error));
    CF__TRY(cf__pipe_check_by_stage(limits->chunks_by_stage, n_stages, code, "limits.chunks_by_stage", error));
    CF__TRY(cf__pipe_check_by_stage(limits->state_by_stage, n_stages, code, "limits.state_by_stage", error));
    CF__TRY(cf__pipe_check_by_stage(limits->bytes_by_stage, n_stages, code, "limits.bytes_by_stage", error));
    counts = bytes->activations | bytes->state | bytes->state_gradient | bytes->boundary;
    for (s = 0; s < n_stages && counts == 0; s++)
        if (cf__pipe_given(limits->bytes, limits->bytes_by_stage, s) > 0)
            return cf__refuse(error, code, "limits.per_token", -1, "must say what the limit of bytes counts");
    return CF_OK;
}

/* Returns the given limits of a stage, 0 for a limit that is not given. */
static cf__pipe_room cf__pipe_given_room(const cf_limits *limits, int64_t stage) {
    cf__pipe_room room;
    room.chunks = cf__pipe_given(limits->chunks, limits->chunks_by_stage, stage);
    room.state = cf__pipe_given(limits->state, limits->state_by_stage, stage);
    room.bytes = cf__pipe_given(limits->bytes, limits->bytes_by_stage, stage);
    return room;
}

/* Returns `given` or, if that is 0, `otherwise`; INT64_MAX if there is no limit. */
static int64_t cf__pipe_limit(int64_t given, int64_t otherwise) {
    int64_t limit = given != 0 ? given : otherwise;
    return limit > 0 ? limit : INT64_MAX;
}

/* Returns the room of a stage: the given limits or, if not given, the schedule's. */
static cf__pipe_room cf__pipe_room_of(const cf_limits *limits, const cf_schedule *schedule, int64_t stage) {
    cf__pipe_room room = cf__pipe_given_room(limits, stage), own = cf__pipe_given_room(&schedule->limits, stage);
    room.chunks = cf__pipe_limit(room.chunks, own.chunks);
    room.state = cf__pipe_limit(room.state, own.state);
    room.bytes = cf__pipe_limit(room.bytes, own.bytes);
    return room;
}

/* ---- the rules: what a pass waits for ----

   The rules are written here and nowhere else; bounds, search, clock and cf_schedule_needs read them. (The validator
   restates them independently, so that a mistake here is found.) A rule names two passes. {CF_F, CF_F, 0, -1,
   CF_EDGE_ACTIVATION} says that F of a chunk waits for F of the same chunk on the previous virtual stage. A rule holds
   if both passes exist. Every chunk has an F and a backward. It also has an R if its activations were dropped. The last
   `kept` chunks of a chain keep theirs, all others drop them. */
enum {
    CF__PIPE_KEEPER = CF__PIPE_PLACES, /* the pass that makes the activations for the backward: R if the chunk was
                                          dropped, otherwise F */
    CF__PIPE_FREER,                    /* the pass that frees their slot: B, or W if backwards are split */
    /* the other chunk of a rule, where 0 is the same chunk; a minus sign reverses each of these */
    CF__PIPE_UP = 1,  /* the chunk that this one continues, if it is the first to do so */
    CF__PIPE_SIBLING, /* the previous chunk among those that continue the same chunk */
    CF__PIPE_DOWN,    /* the last chunk that continues this one */
    CF__PIPE_NEXT,    /* the next chunk of its chain */
    CF__PIPE_KEPT_ON  /* the chunk that is `kept` chunks further in its chain; for a chain that keeps nothing, the last
                         chunk that continues it */
};

typedef struct cf__pipe_rule {
    uint8_t place, waits_for; /* the waiting pass and the other one: a place, or a name from above */
    int8_t chunks, stages;    /* the other chunk, and how many virtual stages further */
    uint8_t why;              /* a cf_edge_why */
} cf__pipe_rule;

static const cf__pipe_rule cf__pipe_rules[] = {
    {CF_F, CF_F, 0, -1, CF_EDGE_ACTIVATION},
    {CF_F, CF_F, CF__PIPE_UP, 0, CF_EDGE_STATE},
    {CF_F, CF_F, CF__PIPE_SIBLING, 0, CF_EDGE_ORDER},
    {CF_R, CF_F, 0, 0, CF_EDGE_REPLAY},
    {CF_R, CF_R, 0, -1, CF_EDGE_ACTIVATION}, /* pipeline replay only */
    {CF_R, CF__PIPE_FREER, CF__PIPE_KEPT_ON, 0, CF_EDGE_SLOT},
    {CF_R, CF_R, CF__PIPE_NEXT, 0, CF_EDGE_SLOT},
    {CF__PIPE_BACK, CF__PIPE_KEEPER, 0, 0, CF_EDGE_OWN},
    {CF__PIPE_BACK, CF__PIPE_BACK, 0, 1, CF_EDGE_GRADIENT},
    {CF__PIPE_BACK, CF__PIPE_BACK, CF__PIPE_DOWN, 0, CF_EDGE_STATE_GRADIENT},
    {CF__PIPE_BACK, CF__PIPE_BACK, CF__PIPE_SIBLING, 0, CF_EDGE_ORDER},
    {CF__PIPE_W, CF__PIPE_BACK, 0, 0, CF_EDGE_OWN}, /* split backwards only */
};

enum {
    CF__PIPE_MOST_NEEDS = 4, /* maximum passes that one pass waits for, or that wait for one */
    CF__PIPE_MOST_EDGES = 5  /* maximum rules about one place, not all of which apply to one pass */
};

/* A pass at the other end of a rule. */
typedef struct cf__pipe_need {
    int32_t chunk; /* counted from the rank's first chunk */
    int32_t stage; /* virtual stage */
    int place;
    cf_edge_why why;
} cf__pipe_need;

/* Returns the pass that a rule means: R if the chunk is dropped, else F, for CF__PIPE_KEEPER; W if backwards are split,
   else B, for CF__PIPE_FREER. All other values are passes already. */
static int cf__pipe_resolve(int name, int split, int dropped) {
    if (name == CF__PIPE_KEEPER) return dropped ? CF_R : CF_F;
    if (name == CF__PIPE_FREER) return split ? CF__PIPE_W : CF__PIPE_BACK;
    return name;
}

/* A rule as seen from one of its two passes. */
typedef struct cf__pipe_edge {
    uint8_t place; /* of the other pass */
    uint8_t why;
    uint8_t kept; /* 1: holds only for a chunk whose activations are kept */
    int8_t chunks, stages;
} cf__pipe_edge;

typedef struct cf__pipe_links {
    cf__pipe_edge at[CF__PIPE_PLACES][CF__PIPE_MOST_EDGES]; /* by place of this pass */
    int n[CF__PIPE_PLACES];
} cf__pipe_links;

/* A chain or a standalone chunk. Its last k chunks are kept, the others dropped. */
typedef struct cf__pipe_unit {
    int32_t first; /* counted from the rank's first chunk */
    int32_t n, k;
} cf__pipe_unit;

/* ---- the pipeline: what is scheduled, and what each pass costs ---- */

/* The chunks of one rank on the virtual stages. Chunks are counted from the rank's first one here. A "cell" is a chunk
   on a virtual stage: v x n + chunk. Arrays of cells are ordered by stage, so that walking a stage reads memory in
   order. */
typedef struct cf__pipeline {
    const cf_plan *plan;
    const cf_chunk *chunks;
    int64_t first_chunk;
    int64_t n;          /* chunks */
    cf_shape shape;
    int64_t n_v;        /* virtual stages */
    int local;          /* 1: local replay: an F that keeps no activations keeps its input */
    cf__pipe_costs all;      /* of every virtual stage, unless by_stage is given */
    cf__pipe_costs *by_stage; /* (n_v) or NULL */
    cf_timing timing;         /* zeros if none is given */
    cf__pipe_links links[2][2]; /* the rules: [1 if backwards are split][CF__PIPE_WAITS_FOR or CF__PIPE_HOLDS_UP] */
    int8_t takes[CF__PIPE_PLACES]; /* the virtual stage that makes a pass's input: the previous one (-1), the next (1),
                                      or neither (0). The output goes the other way */
} cf__pipeline;

enum { CF__PIPE_WAITS_FOR = 0, CF__PIPE_HOLDS_UP }; /* the two directions in which a rule is read */

/* Returns 1 if a pass receives a tensor from the pass that it waits for, on another virtual stage. */
static int cf__pipe_crosses(cf_edge_why why) { return why == CF_EDGE_ACTIVATION || why == CF_EDGE_GRADIENT; }

/* Adds a rule to the list of the pass from which it is read. */
static void cf__pipe_link(cf__pipeline *pipe, const cf__pipe_rule *rule, int way, int split, int dropped) {
    cf__pipe_links *links = &pipe->links[split][way];
    int waiter = rule->place, other = cf__pipe_resolve(rule->waits_for, split, dropped);
    int from = way == CF__PIPE_WAITS_FOR ? waiter : other, to = way == CF__PIPE_WAITS_FOR ? other : waiter;
    cf__pipe_edge *link = &links->at[from][links->n[from]++];
    link->place = (uint8_t)to;
    link->why = rule->why;
    link->kept = rule->waits_for == CF__PIPE_KEEPER && !dropped;
    link->chunks = (int8_t)(way == CF__PIPE_WAITS_FOR ? rule->chunks : -rule->chunks);
    link->stages = (int8_t)(way == CF__PIPE_WAITS_FOR ? rule->stages : -rule->stages);
    if (way == CF__PIPE_WAITS_FOR && cf__pipe_crosses((cf_edge_why)rule->why)) pipe->takes[from] = link->stages;
}

static void cf__pipe_sort_rules(cf__pipeline *pipe) {
    int64_t i;
    int way, split, dropped;
    for (i = 0; i < CF__COUNT(cf__pipe_rules); i++) {
        const cf__pipe_rule *rule = &cf__pipe_rules[i];
        if (pipe->local && rule->place == CF_R && rule->why == CF_EDGE_ACTIVATION) continue;
        if (pipe->plan->order == NULL && rule->chunks == CF__PIPE_SIBLING) continue;
        for (split = rule->place == CF__PIPE_W; split < 2; split++)
            for (way = 0; way < 2; way++)
                for (dropped = 0; dropped <= (rule->waits_for == CF__PIPE_KEEPER); dropped++)
                    cf__pipe_link(pipe, rule, way, split, dropped);
    }
}

static cf__pipeline cf__pipe_of(const cf_plan *plan, const cf_shape *shape, const cf_timing *timing) {
    cf__pipeline pipe;
    memset(&pipe, 0, sizeof pipe);
    pipe.plan = plan;
    pipe.first_chunk = shape->rank * plan->chunks_per_rank;
    pipe.chunks = plan->n_chunks > 0 ? &plan->chunks[pipe.first_chunk] : NULL;
    pipe.n = plan->chunks_per_rank;
    pipe.shape = *shape;
    pipe.n_v = shape->n_stages * shape->n_virtual;
    pipe.local = shape->replay == CF_REPLAY_LOCAL && !shape->forward_only;
    if (timing != NULL) pipe.timing = *timing;
    cf__pipe_sort_rules(&pipe);
    return pipe;
}

/* Returns the stage of a virtual stage. The first row, the most frequent, needs no division. Loops divide 32-bit
   numbers, several times faster than 64-bit ones. */
static inline int64_t cf__pipe_stage(const cf__pipeline *pipe, int64_t v) {
    if (v < pipe->shape.n_stages) return v;
    if (pipe->shape.placement != CF_PLACEMENT_V) return (uint32_t)v % (uint32_t)pipe->shape.n_stages;
    return cf_placement_stage(pipe->shape.placement, pipe->shape.n_stages, v);
}

static int64_t cf__pipe_at(const cf__pipeline *pipe, int64_t row, int64_t stage) {
    return cf_placement_at(pipe->shape.placement, pipe->shape.n_stages, row, stage);
}

static const cf__pipe_costs *cf__pipe_costs_of(const cf__pipeline *pipe, int64_t v) {
    return pipe->by_stage != NULL ? &pipe->by_stage[v] : &pipe->all;
}

/* Returns the seconds of a compute pass of a chunk on a virtual stage, without streams, gathers and scans. */
static inline double cf__pipe_compute_seconds(const cf__pipeline *pipe, int pass, int64_t chunk, int64_t v) {
    const cf_chunk *c = &pipe->chunks[chunk];
    return cf_cost_seconds(&cf__pipe_costs_of(pipe, v)->of[pass], c->rows, c->pairs);
}

/* Returns the rate for a pass; W moves no state. */
static inline double cf__pipe_rate(int pass, double forward, double backward) {
    return pass <= CF_R ? forward : pass <= CF_I ? backward : 0;
}

/* Returns the seconds of a pass during which rows are moved: the exposed share, then the longer of the pass and the
   rest. */
static double cf__pipe_beside(double pass, double moved, double part) {
    double exposed = cf__product(moved, part);
    return exposed + cf__most(pass, moved - exposed);
}

/* Returns the seconds of a rank's own pass, with its stream, gather and scan. */
CF__APART static double cf__pipe_own_seconds(const cf__pipeline *pipe, int pass, int64_t chunk, int64_t v) {
    const cf_chunk *c = &pipe->chunks[chunk];
    const cf_timing *t = &pipe->timing;
    double stream = cf__pipe_rate(pass, t->stream_forward, t->stream_backward);
    double gather = cf__pipe_rate(pass, t->gather_forward, t->gather_backward);
    double seconds = cf__pipe_compute_seconds(pipe, pass, chunk, v);
    if (pass == CF_R && pipe->shape.outputs) return seconds;
    if (stream > 0) seconds = cf__pipe_beside(seconds, cf__product(stream, (double)c->prefix), t->stream_exposed);
    if (c->cp == 0) return seconds;
    gather = cf__product(gather, (double)cf__max(cf__plan_prefix(pipe->plan, c) - c->prefix, 0));
    seconds = cf__pipe_beside(seconds, gather, t->stream_exposed);
    return pass == CF_R ? seconds : seconds + cf__pipe_rate(pass, t->scan_forward, t->scan_backward);
}

/* Returns the seconds of a pass. The ranks of a cp group run a round's passes together, except W. */
static inline double cf__pipe_pass_seconds(const cf__pipeline *pipe, int pass, int64_t chunk, int64_t v) {
    const cf_chunk *c = &pipe->chunks[chunk];
    int64_t cp = pass != CF_W ? c->cp : 0;
    double most = 0;
    if (cp == 0) return cf__pipe_own_seconds(pipe, pass, chunk, v);
    for (chunk -= pipe->shape.rank % cp * pipe->n; cp > 0; cp--, chunk += pipe->n)
        most = cf__most(most, cf__pipe_own_seconds(pipe, pass, chunk, v));
    return most;
}

/* Returns 1 if a tensor changes stages between two neighbouring virtual stages. */
static int cf__pipe_hops(const cf__pipeline *pipe, int64_t v, int64_t to) {
    return cf__pipe_stage(pipe, v) != cf__pipe_stage(pipe, to);
}

/* Returns the queue of a stage, of its two, for tensors that virtual stage v sends in a direction. 0: towards later
   stages. */
static int cf__pipe_queue(const cf__pipeline *pipe, int64_t v, int way) {
    return (way < 0) != (pipe->shape.placement == CF_PLACEMENT_V && v / pipe->shape.n_stages % 2 == 1);
}

/* Returns the seconds for sending a chunk's boundary activations, or their gradient, from one stage to the next. */
static double cf__pipe_transfer_seconds(const cf__pipeline *pipe, int64_t chunk) {
    return pipe->timing.latency + cf__product(pipe->timing.seconds_per_token, (double)pipe->chunks[chunk].rows);
}

/* Returns the seconds of a transfer between two virtual stages, which may be on one stage. */
static inline double cf__pipe_hop_seconds(const cf__pipeline *pipe, int64_t chunk, int64_t v, int64_t to) {
    return cf__pipe_hops(pipe, v, to) ? cf__pipe_transfer_seconds(pipe, chunk) : 0;
}

/* Checks that times stay far from infinity, because infinite times cannot be compared: adds up an upper bound of every
   makespan. */
static cf_result cf__pipe_check_total(const cf__pipeline *pipe, cf_error *error) {
    double tokens = 0, n = (double)pipe->n, total = 0, transfers;
    int64_t v, i;
    int pass;
    if (pipe->n == 0) return CF_OK; /* for any number of stages */
    for (i = 0; i < pipe->n; i++) tokens += (double)pipe->chunks[i].rows;
    for (v = 0; v < pipe->n_v; v++)
        for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
            for (i = 0; i < pipe->n; i++) total += cf__pipe_pass_seconds(pipe, pass, i, v);
    transfers = cf__product(pipe->timing.latency, n) + cf__product(pipe->timing.seconds_per_token, tokens);
    total += cf__product(3 * (double)pipe->n_v, transfers);
    if (total <= DBL_MAX / 1e6) return CF_OK;
    return cf__refuse(error, CF_ERROR_OVERFLOW, "timing", -1, "the passes take too many seconds to be added up");
}

static void cf__pipe_layout(cf__pipeline *pipe, cf__carver *carver) {
    if (pipe->timing.stages == NULL) return;
    pipe->by_stage = (cf__pipe_costs *)cf__take(carver, pipe->n_v, sizeof(cf__pipe_costs));
}

/* Fills in all costs after cf__pipe_layout. */
static void cf__pipe_fill(cf__pipeline *pipe) {
    int64_t v;
    pipe->all = cf__pipe_fill_costs(&pipe->timing.all, pipe->shape.outputs);
    for (v = 0; pipe->by_stage != NULL && v < pipe->n_v; v++)
        pipe->by_stage[v] = cf__pipe_fill_costs(&pipe->timing.stages[v], pipe->shape.outputs);
}

/* Returns the number of chunks in the chain after this one; 0 for a standalone chunk. */
static inline int64_t cf__pipe_after(const cf_plan *plan, const cf_chunk *c) {
    return c->chain >= 0 ? plan->chains[c->chain].n_chunks - 1 - c->index : 0;
}

/* Walks up the chains that end with a chunk; in a schedule of forwards alone, its F is the last to read their state.
   Returns the first of them (before = -1), the chain after `before`, or -1 at the end. */
static int64_t cf__pipe_ended(const cf_plan *plan, const cf_chunk *c, int64_t before) {
    int64_t first, up;
    if (before < 0) return c->below > 0 ? -1 : c->chain;
    first = plan->chains[before].first_chunk;
    up = plan->chunks[first].up;
    return up >= 0 && plan->chunks[up].down == first ? plan->chunks[up].chain : -1;
}

/* Returns the number of chunks on the longest path below this chunk's chain. */
static int64_t cf__pipe_below(const cf__pipeline *pipe, int64_t chunk) {
    const cf_chunk *c = &pipe->chunks[chunk];
    return c->below - cf__pipe_after(pipe->plan, c);
}

/* Returns 1 if the chunk's chain continues another one. */
static int cf__pipe_has_parent(const cf__pipeline *pipe, int64_t chunk) {
    return pipe->chunks[chunk - pipe->chunks[chunk].index].up >= 0;
}

/* ---- following the rules ---- */

/* Returns 1 if chunk i of the unit is dropped in its first forward. */
static int cf__pipe_is_dropped(const cf__pipe_unit *unit, int64_t i) { return i < unit->n - unit->k; }

/* Returns 1 if the unit's chunk has a pass at `place`, which the pipeline must have. */
static int cf__pipe_occurs(const cf__pipe_unit *unit, int place, int64_t chunk) {
    return place != CF_R || cf__pipe_is_dropped(unit, chunk - unit->first);
}

/* Returns 1 if the pass leaves activations behind: F of a kept chunk, or R. */
static int cf__pipe_keeps(const cf__pipe_unit *unit, int place, int64_t chunk) {
    return place == CF_R || (place == CF_F && !cf__pipe_is_dropped(unit, chunk - unit->first));
}

/* Returns the unit of a chunk, of which `kept` chunks are kept. */
static cf__pipe_unit cf__pipe_unit_of(const cf__pipeline *pipe, int64_t chunk, int64_t kept) {
    const cf_chunk *c = &pipe->chunks[chunk];
    cf__pipe_unit unit;
    unit.first = (int32_t)(chunk - c->index);
    unit.n = (int32_t)(chunk + cf__pipe_after(pipe->plan, &pipe->chunks[chunk]) + 1 - unit.first);
    unit.k = (int32_t)cf__min(kept, unit.n);
    return unit;
}

/* Returns the other chunk of a rule, as seen from this chunk; -1: none. Only for names that do not depend on how many
   chunks of the unit are kept. A schedule of forwards alone runs in plan order. */
static int64_t cf__pipe_relative(const cf__pipeline *pipe, int64_t chunk, int name) {
    const cf_plan *plan = pipe->plan;
    const cf_chunk *c = &pipe->chunks[chunk];
    int64_t id = chunk + pipe->first_chunk, other = -1;
    switch (name) {
        case CF__PIPE_UP: other = c->up == id - 1 ? c->up : -1; break;
        case -CF__PIPE_UP: other = c->down >= 0 ? id + 1 : -1; break;
        case CF__PIPE_DOWN: other = c->down; break;
        case -CF__PIPE_DOWN: other = c->up >= 0 && plan->chunks[c->up].down == id ? c->up : -1; break;
        case CF__PIPE_SIBLING:
            other = cf__plan_previous(plan, id);
            if (other >= 0 && pipe->shape.forward_only) other = id - 1;
            break;
        default: other = cf__plan_next(plan, id); break;
    }
    return other >= 0 ? other - pipe->first_chunk : -1;
}

/* Returns the other chunk of a rule if it depends on the unit; -1: none. `place`: of the other pass. If no chunk is
   kept, one slot passes from chunk to chunk, and the last chunk gets it from below the chain. */
static int64_t cf__pipe_in_unit(const cf__pipeline *pipe, const cf__pipe_unit *unit, int64_t chunk, int name,
                                int place) {
    int64_t i = chunk - unit->first, on = name == CF__PIPE_NEXT || name == -CF__PIPE_NEXT ? 1 : cf__max(unit->k, 1);
    if (name == CF__PIPE_KEPT_ON && i + 1 == unit->n) return cf__pipe_relative(pipe, chunk, CF__PIPE_DOWN);
    if (name == -CF__PIPE_KEPT_ON && i == 0) return cf__pipe_relative(pipe, chunk, -CF__PIPE_DOWN);
    i += name > 0 ? on : -on;
    return i >= 0 && i < unit->n && cf__pipe_occurs(unit, place, unit->first + i) ? unit->first + i : -1;
}

/* Lists in `needs` the passes that this pass waits for, or those that wait for it (`way`), in the order of the rules.
   Returns how many. Their stages count from the pass's own one; callers skip those that are outside the pipeline. */
static int cf__pipe_follow(const cf__pipeline *pipe, int split, int way, int place, const cf__pipe_unit *unit,
                           int64_t chunk, cf__pipe_need needs[CF__PIPE_MOST_NEEDS]) {
    const cf__pipe_links *links = &pipe->links[split][way];
    const cf__pipe_edge *link = links->at[place], *end = link + links->n[place];
    int dropped = cf__pipe_is_dropped(unit, chunk - unit->first), n = 0;
    for (; link < end; link++) {
        int64_t other = chunk;
        int name = link->chunks < 0 ? -link->chunks : link->chunks;
        if (name == 0 && (link->kept ? dropped : link->place == CF_R && !dropped)) continue;
        if (name >= CF__PIPE_NEXT) other = cf__pipe_in_unit(pipe, unit, chunk, link->chunks, link->place);
        else if (name != 0) other = cf__pipe_relative(pipe, chunk, link->chunks);
        if (other < 0) continue;
        needs[n].chunk = (int32_t)other;
        needs[n].stage = link->stages;
        needs[n].place = link->place;
        needs[n++].why = (cf_edge_why)link->why;
    }
    return n;
}

/* Finds the passes that a pass waits for, except for slots. Rules about slots come last, and depend on which chunks of
   the chain are kept. All others only depend on whether this chunk is dropped. */
static int cf__pipe_needs(const cf__pipeline *pipe, int split, int place, int64_t chunk, int dropped,
                          cf__pipe_need needs[CF__PIPE_MOST_NEEDS]) {
    cf__pipe_unit unit = cf__pipe_unit_of(pipe, chunk, cf__pipe_after(pipe->plan, &pipe->chunks[chunk]) + !dropped);
    int n = cf__pipe_follow(pipe, split, CF__PIPE_WAITS_FOR, place, &unit, chunk, needs);
    while (n > 0 && needs[n - 1].why == CF_EDGE_SLOT) n--;
    return n;
}

/* ---- tensors that cross virtual stages ----

   A chunk has three on each virtual stage: the activations from F, the same activations again from R, and the gradient
   from B or I. A tensor has the number of the place of the pass that makes it, on both sides: the input of an R is the
   tensor that the previous R makes. */
enum { CF__PIPE_TENSORS = CF__PIPE_BACK + 1 };

/* Returns 1 if virtual stage v has a neighbour in that direction. */
static int cf__pipe_leads(const cf__pipeline *pipe, int way, int64_t v) {
    return way != 0 && (uint64_t)(v + way) < (uint64_t)pipe->n_v;
}

/* For SEND_F .. RECV_B: the tensor that moves, 1 for the sending end, and the direction. */
typedef struct cf__pipe_transfer {
    uint8_t tensor, sends;
    int8_t way;
} cf__pipe_transfer;

static const cf__pipe_transfer cf__pipe_transfers[] = {{CF_F, 1, 1}, {CF_F, 0, 1},  {CF_R, 1, 1},
                                                       {CF_R, 0, 1}, {CF_B, 1, -1}, {CF_B, 0, -1}};

static int cf__pipe_is_transfer(int pass) { return pass >= CF_COMPUTE_PASS_COUNT; }

static const cf__pipe_transfer *cf__pipe_transfer_of(const cf_action *a) {
    return &cf__pipe_transfers[a->pass - CF_SEND_F];
}

/* Returns the RECV of a SEND, or the SEND of a RECV. In a wrong list its virtual stage may not exist. */
static inline cf_action cf__pipe_other_end(const cf_action *a) {
    const cf__pipe_transfer *t = cf__pipe_transfer_of(a);
    cf_action other = *a;
    other.pass = (uint8_t)(t->sends ? a->pass + 1 : a->pass - 1);
    other.stage = t->sends ? a->stage + t->way : a->stage - t->way;
    return other;
}

static int cf__pipe_is_same(const cf_action *a, const cf_action *b) {
    return a->pass == b->pass && a->chunk == b->chunk && a->stage == b->stage;
}

/* ---- what a stage holds while it walks its list ---- */

typedef struct cf__pipe_held {
    int64_t live;        /* kept chunks */
    cf_memory_load load; /* tokens; chunk_tokens and scores are only counted for cf_schedule_loads */
} cf__pipe_held;

/* Returns the bytes of a load; INT64_MAX if they do not fit in 64 bits. */
static int64_t cf__pipe_held_bytes(const cf_memory_load *load, const cf_held_bytes *bytes) {
    int64_t sum, state, gradient, inputs;
    int fits = cf__mul(load->live_tokens, bytes->activations, &sum) &&
               cf__mul(load->state_tokens, bytes->state, &state) && cf__add(sum, state, &sum) &&
               cf__mul(load->state_gradient_tokens, bytes->state_gradient, &gradient) && cf__add(sum, gradient, &sum) &&
               cf__mul(load->input_tokens, bytes->boundary, &inputs) && cf__add(sum, inputs, &sum);
    return fits ? sum : INT64_MAX;
}

/* Returns the rows of dK and dV that an action begins to use. All rows of a chain come into use at once: with the
   backward of its last chunk or, if other chains continue it, with the F of the first of these. Backwards of those
   chains come sooner. */
static int64_t cf__pipe_gradient(const cf__pipeline *pipe, const cf_action *a, const cf_chunk *c) {
    const cf_plan *plan = pipe->plan;
    if (a->pass == CF_F && c->index == 0 && c->up >= 0 && c->up == a->chunk - 1 && !pipe->shape.forward_only)
        return plan->chains[plan->chunks[c->up].chain].tokens;
    return (a->pass == CF_B || a->pass == CF_I) && c->below == 0 ? plan->chains[c->chain].tokens : 0;
}

/* Adds the chunk and the tokens whose use begins with an action. */
static inline void cf__pipe_hold(const cf__pipeline *pipe, cf__pipe_held *held, const cf_action *a,
                                  const cf_chunk *c) {
    int64_t rows;
    if (a->keep) {
        held->live++;
        held->load.live_tokens += c->rows;
    }
    if (pipe->local && a->pass == CF_F && !a->keep) held->load.input_tokens += c->rows;
    if (pipe->local && a->pass == CF_R && !pipe->shape.outputs) held->load.input_tokens -= c->rows;
    if (c->chain < 0) return;
    if (a->pass == CF_F) held->load.state_tokens += c->state;
    rows = cf__pipe_gradient(pipe, a, c);
    held->load.state_gradient_tokens += rows;
    held->load.carries += rows > 0;
}

/* Returns the rows of state that an F frees in a schedule of forwards alone. If its chain ends with it and no other
   continues the chain: those of the chain, and of the chains above that also end with it. */
static int64_t cf__pipe_ended_rows(const cf__pipeline *pipe, const cf_chunk *c) {
    int64_t chain = cf__pipe_ended(pipe->plan, c, -1), rows = 0, i;
    for (; chain >= 0; chain = cf__pipe_ended(pipe->plan, c, chain))
        for (i = 0; i < pipe->plan->chains[chain].n_chunks; i++)
            rows += pipe->plan->chunks[pipe->plan->chains[chain].first_chunk + i].state;
    return rows;
}

/* Subtracts the tokens that the action frees. */
static inline void cf__pipe_let_go(const cf__pipeline *pipe, cf__pipe_held *held, const cf_action *a,
                                    const cf_chunk *c) {
    int backward = a->pass == CF_B || a->pass == CF_I;
    if (pipe->local && a->pass == CF_R && pipe->shape.outputs) held->load.input_tokens -= c->rows;
    if (a->pass == CF_B || a->pass == CF_W) {
        held->live--;
        held->load.live_tokens -= c->rows;
    }
    if (c->chain < 0) return;
    if (pipe->shape.forward_only && a->pass == CF_F) held->load.state_tokens -= cf__pipe_ended_rows(pipe, c);
    if (!backward) return;
    held->load.state_tokens -= c->state;
    held->load.state_gradient_tokens -= c->state;
    held->load.carries -= c->index == 0 && pipe->plan->chains[c->chain].tokens > 0;
}

/* ---- schedules from anywhere ---- */

/* Checks the arrays of a schedule and the beginnings of its lists: the first at 0, none before the previous one; the
   last ends with the actions. Stops at the first bad number, because the number of stages may be wrong. */
static cf_result cf__pipe_check_first(const cf_schedule *s, cf_error *error) {
    int64_t i, least = 0, most = 0;
    if (s->first == NULL) return cf__refuse(error, CF_ERROR_SCHEDULE, "first", -1, "is NULL");
    if (s->actions == NULL && s->n_actions > 0)
        return cf__refuse(error, CF_ERROR_SCHEDULE, "actions", -1, "is NULL");
    for (i = 0; i <= s->shape.n_stages; i++, most = s->n_actions) {
        if (i == s->shape.n_stages) least = s->n_actions;
        CF__TRY(cf__inside(s->first[i], least, most, CF_ERROR_SCHEDULE, "first", i, "is not where a list can begin",
                           error));
        least = s->first[i];
    }
    return CF_OK;
}

/* Checks the tokens of the rank's chunks: no more than their chains have, and few enough that any load can be added
   up. */
static cf_result cf__pipe_check_tokens(const cf_plan *plan, int64_t rank, int64_t n_virtual, cf_error *error) {
    int64_t id, left = 0, sum = 0;
    int overflow = 0;
    for (id = rank * plan->chunks_per_rank; id < (rank + 1) * plan->chunks_per_rank; id++) {
        const cf_chunk *c = &plan->chunks[id];
        int64_t state = c->state;
        if (c->index == 0) left = c->chain >= 0 ? plan->chains[c->chain].tokens : 0;
        if (state < 0 || left < state)
            return cf__refuse(error, CF_ERROR_PLAN, "chunks.tokens", id, "adds more rows to its chain than that has");
        left -= state;
        cf__add_product(&sum, 2 * n_virtual, c->rows, &overflow);   /* of activations, and of saved inputs */
        cf__add_product(&sum, 2 * n_virtual, state + left, &overflow); /* of state and its gradient */
        if (overflow)
            return cf__refuse(error, CF_ERROR_PLAN, "chunks.tokens", id, "their sum does not fit in 64 bits");
    }
    return CF_OK;
}

/* Checks the facts on which every walk over the lists relies: the schedule's counts and arrays, and the chunks of its
   rank in the plan. passes: the minimum number of passes of each chunk on each virtual stage. */
static cf_result cf__pipe_check_schedule(const cf_plan *plan, const cf_schedule *s, int64_t passes, cf_error *error) {
    const cf_result bad = CF_ERROR_SCHEDULE;
    int64_t needed;
    CF__TRY(cf__plan_check_counts(plan, error));
    if (s == NULL) return cf__fail_null(error, "schedule");
    const cf__member members[] = {
        {"kind", (int)s->kind, 0, CF_SCHEDULE_COUNT - 1, bad},
        {"shape.replay", (int)s->shape.replay, CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL, bad},
        {"lowered", s->lowered, 0, 1, bad},
        {"lockstep", s->lockstep, 0, 1, bad},
        {"shape.n_stages", s->shape.n_stages, 1, INT32_MAX, bad},
        {"shape.n_virtual", s->shape.n_virtual, 1, INT32_MAX / cf__max(1, s->shape.n_stages), bad},
        {"shape.placement", (int)s->shape.placement, CF_PLACEMENT_DEFAULT, CF_PLACEMENT_V, bad},
        {"shape.k", s->shape.k, 1, INT64_MAX, bad},
        {"shape.forward_only", s->shape.forward_only, 0, 1, bad},
        {"shape.outputs", s->shape.outputs, 0, s->shape.replay == CF_REPLAY_LOCAL, bad},
        {"shape.rank", s->shape.rank, 0, plan->n_ranks - 1, bad},
        {"n_actions", s->n_actions, 0, INT64_MAX / (int64_t)sizeof(cf_action), bad}};
    CF__TRY(cf__check_members(members, CF__COUNT(members), bad, error));
    if (s->n_chunks != plan->n_chunks)
        return cf__fail(error, bad, "n_chunks", -1, plan->n_chunks, s->n_chunks, "the schedule is of another plan");
    if (s->shape.forward_only) passes = cf__min(passes, 1);
    needed = passes * s->shape.n_stages * s->shape.n_virtual * plan->chunks_per_rank; /* at most 2 x 2^31 x 2^31 */
    if (s->n_actions < needed)
        return cf__fail(error, bad, "n_actions", -1, needed, s->n_actions,
                        passes == 1 ? "every chunk needs a pass on every virtual stage"
                                    : "every chunk needs two passes on every virtual stage");
    CF__TRY(cf__pipe_check_first(s, error));
    CF__TRY(cf__plan_check_units(plan, s->shape.rank, s->shape.rank + 1, error));
    return cf__pipe_check_tokens(plan, s->shape.rank, s->shape.n_virtual, error);
}

/* ================================================================================================================
   >>schedule    fixed patterns, and what every search for a schedule needs to know

   A stage has limits on chunks, tokens of state and bytes. This section finds these limits (cf__schedule_limits_of),
   how much of them each unit takes (cf__schedule_takes), and how many chunks of a unit can be kept
   (cf__schedule_fitting_unit). A unit is a chain or a standalone chunk.

   A unit takes room in two ways. From its start to its own backwards it takes state and, in bytes, state with its
   gradient and the inputs of chunks that it may drop, whether its chunks are kept or not. Each kept chunk also takes a
   place, which is room for a chunk's activations, and frees it at the end of its backward.

   `paper`, `1f1b` and `gpipe` are patterns, made here. All stages have the same sequence of forward items: F of every
   chunk, unit by unit, and in pipeline replay the R of dropped chunks. An R is inserted as soon as the first stage can
   have made room for it, while later units fill the wait. All stages also have the same sequence of backwards, in the
   order in which the forwards make them possible. Each stage merges the two sequences. The kinds differ only in how far
   a stage may run ahead with forwards (cf__pattern_takes_forward). On one stage `paper` is Algorithm 2.

   If units do not find room for a pattern, they run one by one (cf__alone_run), which needs the least room.

   Why a pattern cannot deadlock. Later stages never run further ahead than earlier ones. Forward item i waits for item
   i on the previous stage, and for backwards that its own stage takes before i. These backwards wait, on later stages,
   for items before i. So the index falls each time that the argument passes a backward, and there is no cycle. Units
   start one after another, so when an item finds no room, an earlier unit has a backward to run.
   ================================================================================================================
   */

CF__NAMES(cf_schedule_kind_name, cf_schedule_kind, CF_SCHEDULE_KINDS, "?")

CHUNKFLOW_API cf_schedule_desc cf_schedule_defaults(const cf_schedule_desc *desc) {
    cf_schedule_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    if (full.kind == CF_SCHEDULE_DEFAULT) full.kind = CF_SCHEDULE_BEST;
    full.shape = cf__pipe_shape_defaults(full.shape, full.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1);
    return full;
}

/* Returns whether the schedule may have I and W. */
static int cf__schedule_splits(const cf_schedule_desc *desc) {
    return desc->kind == CF_SCHEDULE_ZERO_BUBBLE || (desc->kind == CF_SCHEDULE_BEST && desc->split_backward);
}

typedef struct cf__pattern_item {
    int32_t chunk;
    int32_t after;  /* backwards that must have run before it on the same stage: an R takes a slot that an earlier
                       backward frees */
    uint8_t pass, keep;
    uint8_t opens;  /* 1: the first item of its unit */
} cf__pattern_item;

typedef struct cf__pattern {
    cf_schedule_kind kind;
    int runs_ahead;           /* 1 (paper): a stage's forwards stay a constant number of items ahead of its backwards */
    int64_t distance;         /* that number on the last stage */
    int64_t ahead;            /* items by which the first stage may be ahead of the last */
    int64_t n_items, n_backwards;
    cf__pattern_item *items;  /* (n + n_replays) */
    int32_t *backwards;       /* (n) chunks, in the order of their backwards */
    int32_t *need;            /* (n) items that run before each backward; gpipe: all items of its round and of earlier
                                 rounds */
    int64_t n_followed;       /* number of backwards whose slot has been given to a replay, if any needs it */
} cf__pattern;

/* Working data for making a schedule. */
typedef struct cf__schedule_maker {
    cf_schedule_desc desc; /* defaults filled in */
    cf__pipeline pipe;
    cf_error *error;
    int64_t most_kept;          /* maximum chunks of one chain kept at once: K, or the longest chain */
    int64_t most_padded;        /* rows of the largest chunk */
    int64_t most_above;         /* maximum bytes, without places, of the chains of a path in a tree */
    cf__pipe_room most;         /* maximum that a unit takes on a virtual stage while it keeps one chunk */
    cf__pipe_room all;          /* load of a stage that holds all chunks */
    int bounds_state;           /* 1: chunks are limited, so state is limited by default unless bytes are */
    int64_t bytes_alone;        /* peak bytes if units run one by one */
    /* limits, which may depend on the placement */
    int shares_places;          /* 1: some stage has fewer places than virtual stages. A chunk is then dropped on all of
                                   them, and replayed on one after another */
    cf__pipe_room tightest;     /* limits of the tightest stage, for one of its virtual stages */
    int64_t n_units, n_replays; /* n_replays: on one virtual stage */
    int64_t n_actions;          /* upper bound */
    /* working space */
    cf__pipe_unit *units;       /* (n_units) in the order in which they start */
    cf__pipe_unit *spare;       /* (n_units) */
    double *unit_seconds;       /* (n_units) by position in plan order */
    int32_t *sorted;            /* (n_units) */
    int32_t *unit_of;           /* (n) by chunk */
    cf__pattern pattern;
} cf__schedule_maker;

/* ---- limits ---- */

static int cf__schedule_has_bytes(const cf_schedule_desc *desc) {
    return desc->limits.bytes > 0 || desc->limits.bytes_by_stage != NULL;
}

/* Returns the number of chunks that a stage keeps by default, as `paper` does: on each of its virtual stages the
   longest chain, plus one chunk for each later stage in the row. In a V every other row runs backwards. */
static int64_t cf__schedule_default_chunks(const cf__schedule_maker *m, int64_t stage) {
    int64_t n_virtual = m->desc.shape.n_virtual, back = m->pipe.shape.placement == CF_PLACEMENT_V ? n_virtual / 2 : 0;
    return m->most_kept * n_virtual + stage * back + (m->desc.shape.n_stages - 1 - stage) * (n_virtual - back);
}

/* Returns the tokens of state that a stage holds by default on each virtual stage: two longest chains, so that one can
   start while another ends, plus a chunk for each virtual stage after its first. */
static int64_t cf__schedule_default_state(const cf__schedule_maker *m, int64_t stage) {
    int64_t state = 0;
    int overflow = 0;
    cf__add_product(&state, 2, m->most.state, &overflow);
    cf__add_product(&state, m->pipe.n_v - 1 - stage, m->pipe.plan->chunk_size, &overflow);
    return overflow ? INT64_MAX : m->most.state > 0 ? state : 0;
}

/* Returns the requested limits of a stage, defaults filled in. 0 or less means unlimited. */
static cf__pipe_room cf__schedule_asked(const cf__schedule_maker *m, int64_t stage) {
    cf__pipe_room asked = cf__pipe_given_room(&m->desc.limits, stage);
    if (m->desc.shape.forward_only) asked.chunks = 0;
    if (m->desc.shape.forward_only || cf__schedule_has_bytes(&m->desc)) return asked;
    if (m->desc.kind != CF_SCHEDULE_BEST) return asked;
    if (asked.chunks == 0) asked.chunks = cf__schedule_default_chunks(m, stage);
    if (asked.state == 0 && m->bounds_state) asked.state = cf__schedule_default_state(m, stage);
    return asked;
}

/* Returns a limit, or INT64_MAX if all chunks fit into it. */
static int64_t cf__schedule_limit(int64_t limit, int64_t all) { return limit > 0 && limit < all ? limit : INT64_MAX; }

/* Returns the limits of a stage. */
static cf__pipe_room cf__schedule_limits_of(const cf__schedule_maker *m, int64_t stage) {
    cf__pipe_room limits = cf__schedule_asked(m, stage);
    limits.chunks = cf__schedule_limit(limits.chunks, m->all.chunks);
    limits.state = cf__schedule_limit(limits.state, m->all.state);
    limits.bytes = cf__schedule_limit(limits.bytes, m->all.bytes);
    return limits;
}

/* Lowers limits to those of a stage. */
static void cf__schedule_tighten(cf__pipe_room *limits, const cf__schedule_maker *m, int64_t stage) {
    cf__pipe_room own = cf__schedule_limits_of(m, stage);
    limits->chunks = cf__min(limits->chunks, own.chunks);
    limits->state = cf__min(limits->state, own.state);
    limits->bytes = cf__min(limits->bytes, own.bytes);
}

/* Sets shares_places and the tightest limits; call it after limits have changed. */
static void cf__schedule_settle(cf__schedule_maker *m) {
    cf__pipe_room least = {INT64_MAX, INT64_MAX, INT64_MAX};
    int64_t s;
    for (s = 0; s < m->desc.shape.n_stages; s++) cf__schedule_tighten(&least, m, s);
    m->shares_places = least.chunks < m->desc.shape.n_virtual;
    if (m->shares_places) least.chunks = 1;
    else if (least.chunks < INT64_MAX) least.chunks /= m->desc.shape.n_virtual;
    if (least.bytes < INT64_MAX) least.bytes /= m->desc.shape.n_virtual;
    m->tightest = least;
}

/* Returns whether chunks or bytes are limited. */
static int cf__schedule_is_limited(const cf__schedule_maker *m) {
    return m->tightest.chunks < INT64_MAX || m->tightest.bytes < INT64_MAX;
}

/* Returns whether every unit, with one chunk kept, has room on each virtual stage in addition to the others. */
static int cf__schedule_fits(const cf__schedule_maker *m) {
    return m->tightest.chunks >= 1 && m->tightest.state >= m->most.state && m->tightest.bytes >= m->most.bytes;
}

/* ---- what units take of it ---- */

static void cf__room_add(cf__pipe_room *room, const cf__pipe_room *more, int64_t times) {
    room->chunks += times * more->chunks;
    room->state += times * more->state;
    room->bytes += times * more->bytes;
}

/* Returns whether `more` fits in addition to `held`. */
static int cf__room_fits(const cf__pipe_room *held, const cf__pipe_room *more, const cf__pipe_room *limits) {
    return held->chunks <= limits->chunks - more->chunks && held->state <= limits->state - more->state &&
           held->bytes <= limits->bytes - more->bytes;
}

/* Returns the bytes of a place per row, if bytes are limited: activations minus the input, which the unit takes from
   its start on. The input is not subtracted if a replay holds both. */
static int64_t cf__schedule_row(const cf__schedule_maker *m) {
    const cf_held_bytes *bytes = &m->desc.limits.per_token;
    if (m->tightest.bytes == INT64_MAX) return 0;
    return cf__max(bytes->activations - (m->pipe.local && !m->desc.shape.outputs ? bytes->boundary : 0), 0);
}

/* Returns whether a unit continues another unit's state, or another unit continues its state. */
static int cf__schedule_in_tree(const cf__schedule_maker *m, const cf__pipe_unit *unit) {
    if (m->pipe.plan->order == NULL) return 0;
    return cf__pipe_has_parent(&m->pipe, unit->first) || cf__pipe_below(&m->pipe, unit->first) > 0;
}

/* Returns the bytes of a place for a chunk of the unit. Chunks of chains count as the largest chunk, because places
   pass from one to another. */
static int64_t cf__schedule_place(const cf__schedule_maker *m, const cf__pipe_unit *unit) {
    int64_t own = m->pipe.chunks[unit->first].rows;
    return (unit->n > 1 || cf__schedule_in_tree(m, unit) ? m->most_padded : own) * cf__schedule_row(m);
}

/* Returns what chunk i of a unit takes in addition to its place. If the last chunk is smaller than the others, a place
   is too large while it is kept. So the last chunk takes less by that difference, but never less than nothing; the next
   chunk needs the full place. */
static cf__pipe_room cf__schedule_beside(const cf__schedule_maker *m, const cf__pipe_unit *unit, int64_t i) {
    const cf_held_bytes *bytes = &m->desc.limits.per_token;
    const cf_chunk *c = &m->pipe.chunks[unit->first + i];
    int is_last = i + 1 == unit->n;
    int64_t input = bytes->boundary;
    cf__pipe_room takes = {0, 0, 0};
    takes.state = c->state;
    if (m->tightest.bytes == INT64_MAX) return takes;
    takes.bytes = takes.state * (bytes->state + bytes->state_gradient);
    if (is_last && cf__pipe_below(&m->pipe, unit->first) == 0 && !m->shares_places && !m->desc.shape.outputs)
        input = cf__min(input, bytes->activations); /* unless it must be dropped, or a replay holds both */
    if (m->pipe.local) takes.bytes += (is_last ? c->rows : m->most_padded) * input;
    if (is_last && unit->n > 1 && !cf__schedule_in_tree(m, unit))
        takes.bytes -= cf__min(takes.bytes, (m->most_padded - c->rows) * cf__schedule_row(m));
    return takes;
}

/* Returns the room that a unit takes from its start on, with a number of places. */
static cf__pipe_room cf__schedule_takes(const cf__schedule_maker *m, const cf__pipe_unit *unit, int64_t places) {
    const cf_held_bytes *bytes = &m->desc.limits.per_token;
    int64_t last = unit->first + unit->n - 1;
    int64_t before = m->pipe.chunks[last].prefix - m->pipe.chunks[unit->first].prefix;
    cf__pipe_room takes = cf__schedule_beside(m, unit, unit->n - 1);
    takes.chunks = places;
    takes.state += before;
    if (m->tightest.bytes == INT64_MAX) return takes;
    takes.bytes += before * (bytes->state + bytes->state_gradient) + places * cf__schedule_place(m, unit);
    if (m->pipe.local) takes.bytes += (unit->n - 1) * m->most_padded * bytes->boundary;
    return takes;
}

/* Returns the room that a unit frees at the end of the backward of its chunk i, with a number of places. */
static cf__pipe_room cf__schedule_gives(const cf__schedule_maker *m, const cf__pipe_unit *unit, int64_t i,
                                        int64_t places) {
    cf__pipe_room gives = cf__schedule_beside(m, unit, i);
    gives.chunks = places;
    gives.bytes += places * cf__schedule_place(m, unit);
    return gives;
}

/* Returns the maximum number of chunks that a path of a tree keeps. */
static int64_t cf__schedule_path_kept(const cf__schedule_maker *m) {
    int64_t k = cf__min(m->desc.shape.k, m->tightest.chunks), place = m->most_padded * cf__schedule_row(m);
    return place > 0 ? cf__min(k, (m->tightest.bytes - m->most_above) / place) : k;
}

/* Returns the unit of a chunk. It keeps as many chunks, up to K, as fit on every virtual stage. In a tree this limit
   applies to a path of chains: chains below use it first, and may leave none for this one. */
static cf__pipe_unit cf__schedule_fitting_unit(const cf__schedule_maker *m, int64_t chunk) {
    cf__pipe_unit unit = cf__pipe_unit_of(&m->pipe, chunk, 0);
    int64_t k = cf__min(m->desc.shape.k, m->tightest.chunks), place = cf__schedule_place(m, &unit);
    int in_tree = cf__schedule_in_tree(m, &unit);
    if (in_tree) k = cf__schedule_path_kept(m);
    k = cf__min(k - cf__pipe_below(&m->pipe, chunk), unit.n);
    if (place > 0 && !in_tree) k = cf__min(k, (m->tightest.bytes - cf__schedule_takes(m, &unit, 0).bytes) / place);
    unit.k = (int32_t)cf__max(k, 0);
    return unit;
}

/* Fills in units, in plan order. */
static void cf__schedule_collect_units(cf__schedule_maker *m) {
    int64_t i, chunk = 0;
    for (i = 0; i < m->n_units; i++) {
        m->units[i] = cf__schedule_fitting_unit(m, chunk);
        chunk += m->units[i].n;
    }
}

/* Sorts units, most expensive first; equal units keep their order, and a tree counts as one. */
static void cf__schedule_sort_units(cf__schedule_maker *m) {
    int64_t i, j, root = 0;
    for (i = 0; i < m->n_units; i++) {
        double seconds = 0;
        for (j = 0; j < m->units[i].n; j++) seconds += cf__pipe_pass_seconds(&m->pipe, CF_F, m->units[i].first + j, 0);
        root = cf__pipe_has_parent(&m->pipe, m->units[i].first) ? root : i;
        if (root < i) m->unit_seconds[root] -= seconds;
        else m->unit_seconds[i] = -seconds;
    }
    for (i = 0; i < m->n_units; i++) {
        root = cf__pipe_has_parent(&m->pipe, m->units[i].first) ? root : i;
        m->unit_seconds[i] = m->unit_seconds[root];
        m->sorted[i] = (int32_t)i;
    }
    cf__sort_by_key(m->sorted, m->n_units, m->unit_seconds); /* cheapest first; of equal units the later one first */
    for (i = 0; i < m->n_units; i++) m->spare[i] = m->units[m->sorted[m->n_units - 1 - i]];
    memcpy(m->units, m->spare, (size_t)m->n_units * sizeof *m->units);
}

/* Records each chunk's unit, in the current order of units. */
static void cf__schedule_number_units(cf__schedule_maker *m) {
    int64_t u, i;
    for (u = 0; u < m->n_units; u++)
        for (i = 0; i < m->units[u].n; i++) m->unit_of[m->units[u].first + i] = (int32_t)u;
}

static const cf__pipe_unit *cf__schedule_unit(const cf__schedule_maker *m, int64_t chunk) {
    return &m->units[m->unit_of[chunk]];
}

/* ---- actions ---- */

static cf_action cf__schedule_action(cf_pass pass, int64_t chunk, int64_t v, int keep) {
    cf_action action;
    action.chunk = (int32_t)chunk;
    action.stage = (int32_t)v;
    action.pass = (uint8_t)pass;
    action.keep = (uint8_t)keep;
    action.reserved = 0;
    return action;
}

/* Adds an action to the list that is being written. */
static void cf__schedule_put(cf_schedule *schedule, cf_pass pass, int64_t chunk, int64_t v, int keep) {
    schedule->actions[schedule->n_actions++] = cf__schedule_action(pass, chunk, v, keep);
}

/* ---- units one by one ---- */

/* A stage that runs units one by one, and its load. schedule: written to, unless NULL. */
typedef struct cf__alone {
    const cf__schedule_maker *maker;
    cf_schedule *schedule;
    int64_t stage, most_bytes;
    cf__pipe_held held;
} cf__alone;

static void cf__alone_put(cf__alone *alone, cf_pass pass, int64_t chunk, int64_t row, int keep) {
    const cf__pipeline *pipe = &alone->maker->pipe;
    const cf_chunk *c = &pipe->chunks[chunk];
    cf_action action = cf__schedule_action(pass, pipe->first_chunk + chunk, cf__pipe_at(pipe, row, alone->stage), keep);
    cf__pipe_hold(pipe, &alone->held, &action, c);
    alone->most_bytes =
        cf__max(alone->most_bytes, cf__pipe_held_bytes(&alone->held.load, &alone->maker->desc.limits.per_token));
    cf__pipe_let_go(pipe, &alone->held, &action, c);
    if (alone->schedule != NULL) alone->schedule->actions[alone->schedule->n_actions++] = action;
}

/* Adds the backwards of a unit. kept: 1 if its last chunk was kept on the last row. */
static void cf__alone_return(cf__alone *alone, const cf__pipe_unit *unit, int kept) {
    int64_t rows = alone->maker->desc.shape.n_virtual, i, row;
    for (i = unit->n - 1; i >= 0; i--)
        for (row = rows - 1; row >= 0; row--) {
            if (!kept || i + 1 < unit->n || row + 1 < rows) cf__alone_put(alone, CF_R, unit->first + i, row, 1);
            cf__alone_put(alone, CF_B, unit->first + i, row, 0);
        }
}

/* Runs all units in plan order, each to its end before the next begins. In a tree a unit's backwards come after those
   of the units that continue it. One chunk is kept at a time: the last forward of a unit, on its last row of virtual
   stages. All others are dropped, and each is replayed directly before its backward. Examples: a unit of three chunks,
   and a unit of two chunks on two rows:

       F1 F2 F3 B3 R2 B2 R1 B1        F1 F1' F2 F2' B2' R2 B2 R1' B1' R1 B1

   No schedule needs less room for chunks; wherever one chunk fits, this schedule does as well. */
static void cf__alone_run(cf__alone *alone) {
    const cf__pipeline *pipe = &alone->maker->pipe;
    int64_t rows = alone->maker->desc.shape.n_virtual, i, row, first, chain;
    cf__pipe_unit unit;
    for (first = 0; first < pipe->n; first += unit.n) {
        unit = cf__pipe_unit_of(pipe, first, 0);
        int turns = cf__pipe_below(pipe, first) == 0;
        for (i = 0; i < unit.n; i++)
            for (row = 0; row < rows; row++)
                cf__alone_put(alone, CF_F, first + i, row, turns && i + 1 == unit.n && row + 1 == rows);
        if (turns) cf__alone_return(alone, &unit, 1);
        if (!turns || !cf__pipe_has_parent(pipe, first)) continue;
        chain = pipe->chunks[first].chain;
        while ((chain = cf__pipe_ended(pipe->plan, NULL, chain)) >= 0) {
            cf__pipe_unit above = cf__pipe_unit_of(pipe, pipe->plan->chains[chain].first_chunk - pipe->first_chunk, 0);
            cf__alone_return(alone, &above, 0);
        }
    }
}

static void cf__alone_write(const cf__schedule_maker *m, cf_schedule *schedule) {
    cf__alone alone;
    int64_t s;
    memset(&alone, 0, sizeof alone);
    alone.maker = m;
    alone.schedule = schedule;
    schedule->n_actions = schedule->first[0] = 0;
    for (s = 0; s < m->desc.shape.n_stages; schedule->first[++s] = schedule->n_actions) {
        alone.stage = s;
        cf__alone_run(&alone);
    }
}

/* ---- building a pattern ---- */

static void cf__schedule_layout_maker(cf__schedule_maker *m, cf__carver *carver) {
    cf__pattern *pattern = &m->pattern;
    m->units = (cf__pipe_unit *)cf__take(carver, m->n_units, sizeof(cf__pipe_unit));
    m->spare = (cf__pipe_unit *)cf__take(carver, m->n_units, sizeof(cf__pipe_unit));
    m->unit_seconds = (double *)cf__take(carver, m->n_units, sizeof(double));
    m->sorted = (int32_t *)cf__take(carver, m->n_units, sizeof(int32_t));
    m->unit_of = (int32_t *)cf__take(carver, m->pipe.n, sizeof(int32_t));
    pattern->items = (cf__pattern_item *)cf__take(carver, m->pipe.n + m->n_replays, sizeof(cf__pattern_item));
    pattern->backwards = (int32_t *)cf__take(carver, m->pipe.n, sizeof(int32_t));
    pattern->need = (int32_t *)cf__take(carver, m->pipe.n, sizeof(int32_t));
}

static cf__pattern_item *cf__pattern_add_item(cf__pattern *pattern, cf_pass pass, int64_t chunk, int keep) {
    cf__pattern_item *item = &pattern->items[pattern->n_items++];
    memset(item, 0, sizeof *item);
    item->chunk = (int32_t)chunk;
    item->pass = (uint8_t)pass;
    item->keep = (uint8_t)keep;
    return item;
}

/* Adds the backward of a chunk, which has become possible. */
static void cf__pattern_add_backward(cf__pattern *pattern, int64_t chunk) {
    pattern->need[pattern->n_backwards] = (int32_t)pattern->n_items;
    pattern->backwards[pattern->n_backwards++] = (int32_t)chunk;
}

/* Returns the chain whose last child begins with this chunk. Its backwards can run once the child's have run. NULL:
   none. */
static const cf__pipe_unit *cf__pattern_ends(const cf__schedule_maker *m, int64_t chunk) {
    int64_t parent = m->pipe.chunks[chunk].index > 0 ? -1 : cf__pipe_relative(&m->pipe, chunk, -CF__PIPE_DOWN);
    return parent >= 0 ? cf__schedule_unit(m, parent) : NULL;
}

/* Adds the backwards that the forwards of a unit made possible: all in local replay, otherwise those of kept chunks. If
   all backwards of the unit are added, and the unit is the last child of its parent chain, goes on with the parent, and
   so on upward. */
static void cf__pattern_close(cf__schedule_maker *m, const cf__pipe_unit *unit) {
    int64_t i;
    do {
        for (i = unit->n - 1; i >= 0 && (m->pipe.local || !cf__pipe_is_dropped(unit, i)); i--)
            cf__pattern_add_backward(&m->pattern, unit->first + i);
        unit = i < 0 ? cf__pattern_ends(m, unit->first) : NULL;
    } while (unit != NULL);
}

/* Adds replays that are due, in pipeline replay. A backward frees the slot for the chunk k before it, if that chunk was
   dropped. The R of that chunk is due once the first stage, `ahead` items in front of the last, can have run this
   backward. A chain that keeps nothing gets its first slot from its last child. all: 1 also adds replays that are not
   due yet. */
static void cf__pattern_add_due(cf__schedule_maker *m, int all) {
    cf__pattern *pattern = &m->pattern;
    for (; pattern->n_followed < pattern->n_backwards; pattern->n_followed++) {
        int64_t place = pattern->n_followed, chunk = pattern->backwards[place];
        const cf__pipe_unit *unit = cf__schedule_unit(m, chunk), *ends = cf__pattern_ends(m, chunk);
        int64_t next = chunk - cf__max(unit->k, 1);
        if (ends != NULL && ends->k == 0) {
            unit = ends;
            next = unit->first + unit->n - 1;
        }
        if (m->pipe.local || next < unit->first) continue;
        if (!all && pattern->need[place] + pattern->ahead > pattern->n_items) return;
        cf__pattern_add_item(pattern, CF_R, next, 1)->after = (int32_t)place + 1;
        cf__pattern_add_backward(pattern, next);
        ends = next == unit->first ? cf__pattern_ends(m, next) : NULL;
        if (ends != NULL) cf__pattern_close(m, ends);
    }
}

static void cf__pattern_add_unit(cf__schedule_maker *m, const cf__pipe_unit *unit) {
    int64_t i;
    for (i = 0; i < unit->n; i++) {
        cf__pattern_add_item(&m->pattern, CF_F, unit->first + i, !cf__pipe_is_dropped(unit, i))->opens = i == 0;
        if (i + 1 < unit->n) cf__pattern_add_due(m, 0);
    }
    if (cf__pipe_below(&m->pipe, unit->first) == 0) cf__pattern_close(m, unit);
}

/* Returns the room held by the chains above a unit in its tree: their state and, if places is 1, also the chunks that
   each keeps. */
static cf__pipe_room cf__pattern_held_above(const cf__schedule_maker *m, const cf__pipe_unit *unit, int places) {
    const cf_plan *plan = m->pipe.plan;
    cf__pipe_room held = {0, 0, 0};
    int64_t chain = m->pipe.chunks[unit->first].chain;
    if (plan->order == NULL || chain < 0) return held;
    while ((chain = cf__plan_chain_above(plan, chain)) >= 0) {
        const cf__pipe_unit *above = cf__schedule_unit(m, plan->chains[chain].first_chunk - m->pipe.first_chunk);
        const cf__pipe_room takes = cf__schedule_takes(m, above, places * above->k);
        cf__room_add(&held, &takes, 1);
    }
    return held;
}

/* Ends a round of gpipe. All of its forwards and replays run before its first backward, `begin`. */
static void cf__pattern_end_round(cf__schedule_maker *m, int64_t begin) {
    cf__pattern *pattern = &m->pattern;
    cf__pattern_add_due(m, 1);
    if (pattern->kind != CF_SCHEDULE_GPIPE) return;
    for (; begin < pattern->n_backwards; begin++) pattern->need[begin] = (int32_t)pattern->n_items;
}

/* Adds all units with their replays. gpipe: a round ends when the next unit does not fit beside the units of the
   round. */
static void cf__pattern_build(cf__schedule_maker *m) {
    cf__pattern *pattern = &m->pattern;
    int gpipe = pattern->kind == CF_SCHEDULE_GPIPE;
    /* Under a limit on bytes or state, a unit may have to wait until earlier units free memory. So all replays of
       earlier units come before it; otherwise it would wait forever. */
    int waits = m->tightest.bytes < INT64_MAX || m->tightest.state < INT64_MAX;
    cf__pipe_room used = {0, 0, 0};
    int64_t i, begin = 0;
    pattern->ahead = gpipe ? INT32_MAX : waits ? 0 : m->desc.shape.n_stages - 1;
    pattern->n_items = pattern->n_backwards = pattern->n_followed = 0;
    for (i = 0; i < m->n_units && m->desc.forwards_first; i++) m->units[i].k = 0;
    cf__schedule_number_units(m);
    for (i = 0; i < m->n_units; i++) {
        const cf__pipe_unit *unit = &m->units[i];
        const cf__pipe_room takes = cf__schedule_takes(m, unit, unit->k);
        if (gpipe && !cf__room_fits(&used, &takes, &m->tightest)) {
            cf__pattern_end_round(m, begin);
            begin = pattern->n_backwards;
            used = cf__pattern_held_above(m, unit, 1);
        }
        cf__room_add(&used, &takes, 1);
        /* Backwards of siblings run in order, so replays due for earlier siblings come first. */
        if (cf__pipe_has_parent(&m->pipe, unit->first)) cf__pattern_add_due(m, 1);
        cf__pattern_add_unit(m, unit);
        cf__pattern_add_due(m, 0);
    }
    cf__pattern_end_round(m, begin);
    for (pattern->distance = i = 0; i < pattern->n_backwards; i++)
        pattern->distance = cf__max(pattern->distance, pattern->need[i] - i);
}

/* The progress of a stage through the pattern. */
typedef struct cf__pattern_merge {
    int64_t stage;
    /* limits of this stage and all earlier ones: no stage may run further ahead than an earlier one */
    cf__pipe_room limits;
    cf__pipe_room held;
    int64_t i, j;         /* next item, next backward */
    cf__pipe_room takes;  /* room that the next item takes */
} cf__pattern_merge;

/* Returns whether a stage takes its next forward item: its next backward needs the item, or the stage may run ahead.
   The first item of a unit takes all room of the unit except its places. An item that keeps activations takes a
   place. */
static int cf__pattern_takes_forward(const cf__schedule_maker *m, cf__pattern_merge *merge) {
    const cf__pattern *pattern = &m->pattern;
    const cf__pattern_item *item = &pattern->items[merge->i];
    int64_t further_down = m->desc.shape.n_stages - 1 - merge->stage, need = pattern->need[merge->j];
    const cf__pipe_unit *unit;
    if (merge->i == pattern->n_items || item->after > merge->j) return 0;
    unit = cf__schedule_unit(m, item->chunk);
    memset(&merge->takes, 0, sizeof merge->takes);
    merge->takes.chunks = item->keep;
    merge->takes.bytes = item->keep * cf__schedule_place(m, unit);
    if (item->opens) merge->takes = cf__schedule_takes(m, unit, item->keep);
    if (!cf__room_fits(&merge->held, &merge->takes, &merge->limits)) return 0;
    if (merge->i < need || pattern->kind == CF_SCHEDULE_GPIPE) return merge->i < need;
    if (pattern->kind == CF_SCHEDULE_1F1B && item->keep) return merge->held.chunks <= further_down;
    if (!pattern->runs_ahead) return merge->i < need + further_down;
    if (item->keep && merge->held.chunks >= cf__min(m->desc.shape.k, m->most_kept) + further_down) return 0;
    return merge->i < merge->j + pattern->distance + further_down;
}

/* Writes the next backward. In local replay R comes directly before B. It takes the slot that the previous backward
   freed: one of its own chain or, if that keeps nothing, of the last chain below it. With forwards_first each R takes
   its own slot, which is not counted. */
static void cf__pattern_put_backward(const cf__schedule_maker *m, cf__pattern_merge *merge, cf_schedule *schedule) {
    int64_t chunk = m->pattern.backwards[merge->j++], id = m->pipe.first_chunk + chunk;
    const cf__pipe_unit *unit = cf__schedule_unit(m, chunk);
    int64_t i = chunk - unit->first;
    const cf__pipe_unit *ends = i == 0 ? cf__pattern_ends(m, chunk) : NULL;
    int hands_on = m->desc.forwards_first || i >= cf__max(unit->k, 1) || (ends != NULL && ends->k == 0);
    cf__pipe_room gives = cf__schedule_gives(m, unit, i, !m->pipe.local || !hands_on);
    if (m->pipe.local && cf__pipe_is_dropped(unit, i)) cf__schedule_put(schedule, CF_R, id, merge->stage, 1);
    cf__schedule_put(schedule, CF_B, id, merge->stage, 0);
    cf__room_add(&merge->held, &gives, -1);
}

/* Writes the lists of all stages. */
static void cf__pattern_write(const cf__schedule_maker *m, cf_schedule *schedule) {
    const cf__pipe_room any = {INT64_MAX, INT64_MAX, INT64_MAX};
    cf__pattern_merge merge;
    memset(&merge, 0, sizeof merge);
    merge.limits = any;
    schedule->n_actions = 0;
    for (; merge.stage < m->desc.shape.n_stages; merge.stage++) {
        cf__schedule_tighten(&merge.limits, m, merge.stage);
        schedule->first[merge.stage] = schedule->n_actions;
        for (merge.i = merge.j = 0; merge.j < m->pattern.n_backwards;) {
            const cf__pattern_item *item = &m->pattern.items[merge.i];
            if (!cf__pattern_takes_forward(m, &merge)) {
                cf__pattern_put_backward(m, &merge, schedule);
                continue;
            }
            cf__room_add(&merge.held, &merge.takes, 1);
            cf__schedule_put(schedule, (cf_pass)item->pass, m->pipe.first_chunk + item->chunk, merge.stage, item->keep);
            merge.i++;
        }
    }
    schedule->first[merge.stage] = schedule->n_actions;
}

/* ---- checking the options ---- */

/* Checks that the bytes of all chunks together, each as large as the largest, fit into 64 bits. */
static cf_result cf__schedule_check_bytes(const cf_plan *plan, const cf_shape *shape, const cf_held_bytes *bytes,
                                          cf_error *error) {
    int64_t i, most = 0, per_token = 0, sum;
    int fits = cf__add(bytes->activations, bytes->state, &per_token) &&
               cf__add(per_token, bytes->state_gradient, &per_token) &&
               cf__add(per_token, bytes->boundary, &per_token);
    for (i = shape->rank * plan->chunks_per_rank; i < (shape->rank + 1) * plan->chunks_per_rank && fits; i++) {
        fits = plan->chunks[i].rows >= 0;
        most = cf__max(most, plan->chunks[i].rows);
    }
    if (fits && cf__mul(most, plan->chunks_per_rank, &sum) && cf__mul(sum, shape->n_virtual, &sum) &&
        cf__mul(sum, per_token, &sum))
        return CF_OK;
    return cf__refuse(error, CF_ERROR_OVERFLOW, "limits.per_token", -1,
                      "the bytes of all tokens together do not fit in 64 bits");
}

static cf_result cf__schedule_check_forwards_first(const cf_schedule_desc *desc, cf_error *error) {
    const char *why = NULL;
    if (desc->kind != CF_SCHEDULE_GPIPE) why = "is for gpipe alone";
    else if (desc->limits.state > 0 || desc->limits.state_by_stage != NULL || cf__schedule_has_bytes(desc))
        why = "holds the whole batch's state and inputs, and takes no limit on state or bytes";
    return why == NULL ? CF_OK : cf__fail(error, CF_ERROR_ARGUMENT, "forwards_first", -1, 0, desc->forwards_first, why);
}

/* Refuses plans with cp groups: their ranks must run passes in the same order, which only one list for all of them
   guarantees. */
static cf_result cf__schedule_check_cp_groups(const cf_plan *plan, cf_error *error) {
    int64_t i;
    for (i = 0; i < plan->n_chains; i++)
        if (plan->chains[i].cp > 0)
            return cf__refuse(error, CF_ERROR_ARGUMENT, "plan", -1,
                              "has cp groups: make one list for all ranks, from columns (cf_lockstep_plan)");
    return CF_OK;
}

static cf_result cf__schedule_check_desc(const cf_plan *plan, const cf_schedule_desc *desc, cf_error *error) {
    int many = desc->kind >= CF_SCHEDULE_INTERLEAVED;
    CF__TRY(cf__choice((int)desc->kind, 0, CF_SCHEDULE_COUNT - 1, "kind", error));
    if (desc->shape.n_virtual > 1 && !many)
        return cf__fail(error, CF_ERROR_ARGUMENT, "shape.n_virtual", -1, 1, desc->shape.n_virtual,
                        "only interleaved, zero-bubble and best have virtual stages");
    if ((int)desc->shape.placement > CF_PLACEMENT_LOOP && desc->kind < CF_SCHEDULE_ZERO_BUBBLE)
        return cf__fail(error, CF_ERROR_ARGUMENT, "shape.placement", -1, CF_PLACEMENT_LOOP, (int)desc->shape.placement,
                        "only zero-bubble and best lay virtual stages in a V");
    if (desc->shape.replay != CF_REPLAY_LOCAL && desc->kind != CF_SCHEDULE_PAPER)
        return cf__fail(error, CF_ERROR_ARGUMENT, "shape.replay", -1, CF_REPLAY_LOCAL, (int)desc->shape.replay,
                        "only paper replays through the pipeline");
    if (desc->shape.forward_only && desc->kind != CF_SCHEDULE_BEST)
        return cf__fail(error, CF_ERROR_ARGUMENT, "shape.forward_only", -1, 0, desc->shape.forward_only,
                        "is for best alone: without backwards all kinds are one");
    CF__TRY(cf__model_check_v(desc->shape.placement, desc->shape.n_virtual, "shape.placement", error));
    CF__TRY(cf__pipe_check_shape(plan, &desc->shape, error));
    CF__TRY(cf__range(desc->max_tries, 0, INT64_MAX, "max_tries", error));
    CF__TRY(cf__needs(desc->split_backward, desc->kind >= CF_SCHEDULE_ZERO_BUBBLE, "split_backward", -1,
                      "needs a kind that cuts backwards: best or zero-bubble", error));
    CF__TRY(cf__needs(desc->split_backward, !desc->shape.forward_only, "split_backward", -1,
                      "needs backwards: the shape is forward_only", error));
    CF__TRY(cf__check_flag(desc->split_backward, "split_backward", -1, error));
    if (desc->forwards_first) CF__TRY(cf__schedule_check_forwards_first(desc, error));
    CF__TRY(cf__check_flag(desc->forwards_first, "forwards_first", -1, error));
    CF__TRY(cf__schedule_check_cp_groups(plan, error));
    CF__TRY(cf__pipe_check_limits(&desc->limits, desc->shape.n_stages, CF_ERROR_ARGUMENT, error));
    CF__TRY(cf__pipe_check_timing(desc->timing, &desc->shape, error));
    return cf__schedule_check_bytes(plan, &desc->shape, &desc->limits.per_token, error);
}

/* Refuses limits that are too small even for units one by one. The error gives their need, and the stage. */
static cf_result cf__schedule_check_room(const cf__schedule_maker *m) {
    int64_t s;
    for (s = 0; s < m->desc.shape.n_stages; s++) {
        cf__pipe_room room = cf__schedule_limits_of(m, s);
        CF__TRY(cf__inside(room.state, m->most.state, INT64_MAX, CF_ERROR_INFEASIBLE, "limits.state", s,
                           "no schedule can keep to it: the longest chain needs more", m->error));
        CF__TRY(cf__inside(room.bytes, m->bytes_alone, INT64_MAX, CF_ERROR_INFEASIBLE, "limits.bytes", s,
                           "is too little even for units that run one by one", m->error));
    }
    return CF_OK;
}

/* Measures the numbers that limits are compared with: the load of all chunks, and the longest chain. */
static void cf__schedule_measure(cf__schedule_maker *m) {
    const cf_held_bytes *bytes = &m->desc.limits.per_token;
    int64_t i, s;
    m->all.chunks = m->pipe.n * m->desc.shape.n_virtual;
    for (i = 0; i < m->pipe.n; i++) {
        const cf_chunk *c = &m->pipe.chunks[i];
        m->all.state += c->rows;
        m->most_padded = cf__max(m->most_padded, c->rows);
        m->most.state = cf__max(m->most.state, c->chain >= 0 ? c->prefix + c->state : 0);
    }
    m->all.bytes = m->all.state * m->desc.shape.n_virtual *
                   (bytes->activations + bytes->state + bytes->state_gradient + bytes->boundary);
    for (s = 0; s < m->desc.shape.n_stages; s++) {
        int64_t given = cf__pipe_given_room(&m->desc.limits, s).chunks;
        m->bounds_state |= given == 0 || (given > 0 && given < m->all.chunks);
    }
}

/* Returns the number of chunks in the longest chain, or path of chains. */
static int64_t cf__schedule_longest(const cf__pipeline *pipe) {
    int64_t i, most = 1;
    for (i = 0; i < pipe->n; i++)
        most = cf__max(most, pipe->chunks[i].below + 1);
    return most;
}

/* Returns the bytes that a unit takes with one place, plus those of the chains above it. *above: bytes of these chains.
   It includes the unit's own bytes while other units continue it, and is 0 again at the end of a tree. */
static int64_t cf__schedule_path_bytes(cf__schedule_maker *m, const cf__pipe_unit *unit, int64_t *above) {
    const cf_plan *plan = m->pipe.plan;
    const cf_chunk *last = &m->pipe.chunks[unit->first + unit->n - 1];
    int64_t own = cf__schedule_takes(m, unit, 0).bytes, chain;
    if (!cf__schedule_in_tree(m, unit)) return cf__schedule_takes(m, unit, 1).bytes;
    *above += own;
    m->most_above = cf__max(m->most_above, *above);
    own = *above;
    for (chain = cf__pipe_ended(plan, last, -1); chain >= 0; chain = cf__pipe_ended(plan, last, chain)) {
        cf__pipe_unit ended = cf__pipe_unit_of(&m->pipe, plan->chains[chain].first_chunk - m->pipe.first_chunk, 0);
        *above -= cf__schedule_takes(m, &ended, 0).bytes;
    }
    return own + cf__schedule_place(m, unit);
}

/* Returns the peak bytes if units run one by one; for forwards alone, the state of the longest chain. */
static int64_t cf__schedule_bytes_alone(const cf__schedule_maker *m) {
    cf__alone alone;
    memset(&alone, 0, sizeof alone);
    alone.maker = m;
    if (m->desc.shape.forward_only) return m->most.state * m->desc.limits.per_token.state * m->desc.shape.n_virtual;
    if (m->tightest.bytes < INT64_MAX) cf__alone_run(&alone);
    return alone.most_bytes;
}

/* Counts units and actions; refuses limits that even units one by one exceed. */
static cf_result cf__schedule_count(cf__schedule_maker *m) {
    int64_t i, per_stage, above = 0;
    int drops_all = 1; /* all chunks are dropped, or may be */
    if (m->desc.shape.forward_only) m->n_units = m->pipe.n;
    for (i = m->n_units; i < m->pipe.n;) {
        cf__pipe_unit unit = cf__pipe_unit_of(&m->pipe, i, 0);
        m->most.bytes = cf__max(m->most.bytes, cf__schedule_path_bytes(m, &unit, &above));
        m->n_units++;
        i += unit.n;
    }
    m->bytes_alone = cf__schedule_bytes_alone(m);
    CF__TRY(cf__schedule_check_room(m));
    if (m->desc.kind < CF_SCHEDULE_INTERLEAVED && !m->desc.forwards_first) drops_all = !cf__schedule_fits(m);
    for (i = m->desc.shape.forward_only ? m->pipe.n : 0; i < m->pipe.n;) {
        cf__pipe_unit unit = cf__schedule_fitting_unit(m, i);
        m->n_replays += unit.n - (drops_all ? 0 : unit.k);
        i += unit.n;
    }
    per_stage = m->desc.shape.forward_only ? m->pipe.n
                                           : (cf__schedule_splits(&m->desc) ? 3 : 2) * m->pipe.n + m->n_replays;
    if (per_stage > 0 && m->pipe.n_v > CF_MAX_ACTIONS / per_stage)
        return cf__refuse(m->error, CF_ERROR_LIMIT, "n_actions", -1, "it would have more than CF_MAX_ACTIONS passes");
    m->n_actions = per_stage * m->pipe.n_v;
    return CF_OK;
}

/* Lays out one array of limits, if the header's pointer is not NULL. */
static void cf__schedule_take_limits(const int64_t **limits, int64_t n_stages, cf__carver *carver) {
    if (*limits != NULL) *limits = (const int64_t *)cf__take(carver, n_stages, sizeof(int64_t));
}

/* Lays out the arrays of a schedule, whose counts are in the header. */
static cf_schedule *cf__schedule_layout(cf_schedule *header, cf__carver *carver) {
    cf_schedule *schedule = (cf_schedule *)cf__take(carver, 1, sizeof(cf_schedule));
    header->first = (int64_t *)cf__take(carver, header->shape.n_stages + 1, sizeof(int64_t));
    header->actions = (cf_action *)cf__take(carver, header->n_actions, sizeof(cf_action));
    cf__schedule_take_limits(&header->limits.chunks_by_stage, header->shape.n_stages, carver);
    cf__schedule_take_limits(&header->limits.state_by_stage, header->shape.n_stages, carver);
    cf__schedule_take_limits(&header->limits.bytes_by_stage, header->shape.n_stages, carver);
    return schedule;
}

/* Marks the limits that will have arrays. */
static void cf__schedule_mark_limits(const cf__schedule_maker *m, cf_limits *limits) {
    int64_t s;
    for (s = 0; s < m->desc.shape.n_stages; s++) {
        cf__pipe_room asked = cf__schedule_asked(m, s);
        if (asked.chunks > 0) limits->chunks_by_stage = &m->most_kept; /* any pointer except NULL */
        if (asked.state > 0) limits->state_by_stage = &m->most_kept;
        if (asked.bytes > 0) limits->bytes_by_stage = &m->most_kept;
        if (asked.bytes > 0) limits->per_token = m->desc.limits.per_token;
    }
}

/* Writes one number into an array of limits of a schedule that is being made. */
static void cf__schedule_put_limit(const int64_t *limits, int64_t stage, int64_t limit) {
    if (limits != NULL) ((int64_t *)limits)[stage] = limit > 0 && limit < INT64_MAX ? limit : 0;
}

/* Writes the limits of a stage into the arrays that exist. */
static void cf__schedule_put_room(cf_schedule *schedule, int64_t stage, const cf__pipe_room *room) {
    cf__schedule_put_limit(schedule->limits.chunks_by_stage, stage, room->chunks);
    cf__schedule_put_limit(schedule->limits.state_by_stage, stage, room->state);
    cf__schedule_put_limit(schedule->limits.bytes_by_stage, stage, room->bytes);
}

/* Returns whether chunks can be taken in rounds of n_stages chunks. The number of chunks must be divisible by n_stages,
   no chunk may be in a chain, no limit may prevent it, and virtual stages must be placed in loops. */
static int cf__schedule_has_rounds(const cf__schedule_maker *m) {
    return m->pipe.n % m->desc.shape.n_stages == 0 && m->n_units == m->pipe.n && !cf__schedule_is_limited(m) &&
           m->pipe.plan->order == NULL && m->pipe.shape.placement == CF_PLACEMENT_LOOP;
}

/* Writes the pass that stage s runs as the i-th of its kind, in rounds of n_stages chunks. Each round goes through all
   virtual stages of a stage before the next round begins: forwards from the first row to the last, backwards from the
   last to the first. The last round may be smaller. */
static void cf__schedule_put_in_round(const cf__schedule_maker *m, cf_schedule *schedule, cf_pass pass, int64_t i,
                                      int64_t s) {
    int64_t p = m->desc.shape.n_stages, rows = m->desc.shape.n_virtual, begin = i / (p * rows) * p;
    int64_t n = cf__min(p, m->pipe.n - begin), in_round = i - begin * rows, row = in_round / n;
    cf__schedule_put(schedule, pass, m->pipe.first_chunk + begin + in_round % n,
                     cf__pipe_at(&m->pipe, pass == CF_F ? row : rows - 1 - row, s),
                     pass == CF_F && !m->desc.shape.forward_only);
}

/* Writes Megatron-LM's interleaved 1F1B (Narayanan et al., 2021): stage s runs 2 x (n_stages - 1 - s) + (n_virtual - 1)
   x n_stages forwards ahead. In a schedule without backwards, all stages have the same order of forwards, so no stage
   waits forever. */
static void cf__schedule_write_rounds(const cf__schedule_maker *m, cf_schedule *schedule) {
    int64_t p = m->desc.shape.n_stages, rows = m->desc.shape.n_virtual, total = m->pipe.n * rows, s, i;
    schedule->n_actions = schedule->first[0] = 0;
    for (s = 0; s < p; schedule->first[++s] = schedule->n_actions) {
        int64_t ahead = m->desc.shape.forward_only ? 0 : cf__min(total, 2 * (p - 1 - s) + (rows - 1) * p);
        for (i = 0; i < total + ahead; i++) {
            if (i < total) cf__schedule_put_in_round(m, schedule, CF_F, i, s);
            if (i >= ahead && !m->desc.shape.forward_only) cf__schedule_put_in_round(m, schedule, CF_B, i - ahead, s);
        }
    }
}

/* ================================================================================================================
   >>clock    when each action of a schedule runs

   Each stage runs its list until it has to wait for another stage. It is visited again once that stage has sent
   something to it. The order of visits does not change any time. Each list alone is known to be in order (>>check has
   walked it, or the library has written it). Lists that wait for each other forever are found here.
   ================================================================================================================
   */

typedef struct cf__clock {
    const cf__pipeline *pipe;
    const cf_schedule *schedule;
    const uint16_t *listed;        /* (cells) a bit for each pass in the lists */
    double *start, *end;           /* (n_actions) */
    double *arrival[CF__PIPE_TENSORS]; /* (cells) when a pass's input has arrived */
    uint8_t *done;                 /* (cells) a bit for each place whose pass has run */
    int64_t *next;                 /* (n_stages) first action that has not run */
    double *free_at;               /* (n_stages) */
    double *link_free[2];          /* (n_stages) when the link to the next (or previous) stage is free */
    int32_t *waiting;              /* (n_stages) stack of the stages to visit */
    uint8_t *is_waiting;           /* (n_stages) */
    int64_t n_waiting;
    double makespan;
    int crosses;                   /* 1: the lists have transfers between stages */
    /* for >>lower, or NULL */
    double *sent;                  /* (n_actions) when a pass's output begins to cross to another stage; or -1 */
    int32_t *order;                /* (n_actions) passes in the order in which they ran */
    int64_t n_run;                 /* number of passes in `order` */
} cf__clock;

static void cf__clock_layout(cf__clock *clock, const cf__pipeline *pipe, cf__carver *carver) {
    int64_t cells = pipe->n * pipe->n_v, n_stages = pipe->shape.n_stages;
    int i;
    for (i = 0; i < CF__PIPE_TENSORS; i++) clock->arrival[i] = (double *)cf__take(carver, cells, sizeof(double));
    clock->done = (uint8_t *)cf__take(carver, cells, sizeof(uint8_t));
    clock->next = (int64_t *)cf__take(carver, n_stages, sizeof(int64_t));
    clock->free_at = (double *)cf__take(carver, n_stages, sizeof(double));
    for (i = 0; i < 2; i++) clock->link_free[i] = (double *)cf__take(carver, n_stages, sizeof(double));
    clock->waiting = (int32_t *)cf__take(carver, n_stages, sizeof(int32_t));
    clock->is_waiting = (uint8_t *)cf__take(carver, n_stages, sizeof(uint8_t));
}

static void cf__clock_look_at(cf__clock *clock, int64_t stage) {
    if (clock->is_waiting[stage]) return;
    clock->is_waiting[stage] = 1;
    clock->waiting[clock->n_waiting++] = (int32_t)stage;
}

/* Sends a tensor, made on virtual stage v of a stage, to a neighbour. made: when it is ready. Returns the time
   at which it begins to move; *arrival is when it arrives. */
static inline double cf__clock_send(cf__clock *clock, int64_t stage, int64_t v, int tensor, double made,
                                    double transfer, double *arrival) {
    double *link_free = &clock->link_free[cf__pipe_queue(clock->pipe, v, -clock->pipe->takes[tensor])][stage];
    double begin = cf__most(made, *link_free);
    *arrival = *link_free = begin + transfer;
    return begin;
}

/* Sends the result of a pass to the virtual stage that takes it. If that stage kept the activations of its F, it does
   not take the result of an R. */
static void cf__clock_hand_on(cf__clock *clock, int64_t stage, const cf_action *a, int64_t chunk, int64_t cell,
                              double made) {
    int place = cf__pipe_place(a->pass), way = -clock->pipe->takes[place];
    double *arrival;
    int64_t taker;
    if (!cf__pipe_leads(clock->pipe, way, a->stage)) return;
    cell += way * clock->pipe->n;
    arrival = &clock->arrival[place][cell];
    *arrival = made;
    taker = cf__pipe_stage(clock->pipe, a->stage + way);
    if (taker == stage || clock->crosses) return; /* a SEND will set the time */
    if (place == CF_R && !(clock->listed[cell] >> CF_R & 1)) return;
    made = cf__clock_send(clock, stage, a->stage, place, made, cf__pipe_transfer_seconds(clock->pipe, chunk), arrival);
    if (clock->sent != NULL) clock->sent[a - clock->schedule->actions] = made;
    cf__clock_look_at(clock, taker);
}

/* Runs a pass, unless its input is not there yet. Returns whether it ran. */
static int cf__clock_pass(cf__clock *clock, int64_t stage, int64_t id, int64_t chunk, int64_t cell) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    int place = cf__pipe_place(a->pass), way = pipe->takes[place];
    double start = clock->free_at[stage], end;
    if (cf__pipe_leads(pipe, way, a->stage)) {
        int64_t from = a->stage + way;
        /* an earlier RECV in the list received it */
        int is_received = clock->crosses && cf__pipe_stage(pipe, from) != stage;
        if (!is_received && !(clock->done[cell + way * pipe->n] >> place & 1)) return 0;
        start = cf__most(start, clock->arrival[place][cell]);
    }
    end = start + cf__pipe_pass_seconds(pipe, a->pass, chunk, a->stage);
    clock->start[id] = start;
    clock->end[id] = clock->free_at[stage] = end;
    if (end > clock->makespan) clock->makespan = end;
    clock->done[cell] |= (uint8_t)(1 << place);
    if (clock->sent != NULL) {
        clock->sent[id] = -1;
        clock->order[clock->n_run++] = (int32_t)id;
    }
    cf__clock_hand_on(clock, stage, a, chunk, cell, end);
    return 1;
}

/* Runs a SEND and its RECV together. Lists continue only when both ends have reached the transfer, because they must
   also end if a send waits for its receiver. The time depends only on tensor and link. */
static int cf__clock_meet(cf__clock *clock, int64_t stage, int64_t id, int64_t chunk) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id], other = cf__pipe_other_end(a);
    const cf__pipe_transfer *t = cf__pipe_transfer_of(a);
    int64_t peer = cf__pipe_stage(pipe, other.stage), at_peer = clock->next[peer];
    int64_t cell = (t->sends ? other.stage : a->stage) * pipe->n + chunk;
    int64_t send = t->sends ? id : at_peer, receive = t->sends ? at_peer : id;
    double transfer, begin, *arrival = &clock->arrival[t->tensor][cell];
    if (at_peer == clock->schedule->first[peer + 1]) return 0;
    if (!cf__pipe_is_same(&clock->schedule->actions[at_peer], &other)) return 0;
    transfer = cf__pipe_transfer_seconds(pipe, chunk);
    begin = cf__clock_send(clock, t->sends ? stage : peer, t->sends ? a->stage : other.stage, t->tensor, *arrival,
                           transfer, arrival);
    clock->start[send] = clock->start[receive] = begin;
    clock->end[send] = clock->end[receive] = begin + transfer;
    clock->next[peer]++;
    cf__clock_look_at(clock, peer);
    return 1;
}

/* Runs a stage until it has to wait for another one. */
static void cf__clock_advance(cf__clock *clock, int64_t stage) {
    int64_t end = clock->schedule->first[stage + 1], id;
    for (id = clock->next[stage]; id < end; id++) {
        const cf_action *a = &clock->schedule->actions[id];
        int64_t chunk = a->chunk - clock->pipe->first_chunk, cell = a->stage * clock->pipe->n + chunk;
        if (!(cf__pipe_is_transfer(a->pass) ? cf__clock_meet(clock, stage, id, chunk)
                                            : cf__clock_pass(clock, stage, id, chunk, cell)))
            break;
    }
    clock->next[stage] = id;
}

/* Records which passes are in lists that >>check has not walked. */
static void cf__clock_list(const cf__clock *clock, uint16_t *listed) {
    const cf__pipeline *pipe = clock->pipe;
    int64_t i;
    memset(listed, 0, (size_t)(pipe->n * pipe->n_v) * sizeof *listed);
    for (i = 0; i < clock->schedule->n_actions; i++) {
        const cf_action *a = &clock->schedule->actions[i];
        listed[a->stage * pipe->n + a->chunk - pipe->first_chunk] |= (uint16_t)(1 << a->pass);
    }
}

/* Fills in start and end. Reads each action once. */
static void cf__clock_run(cf__clock *clock) {
    const cf__pipeline *pipe = clock->pipe;
    int64_t cells = pipe->n * pipe->n_v, s;
    clock->crosses = clock->schedule->lowered && pipe->shape.n_stages > 1;
    clock->n_waiting = clock->n_run = 0;
    clock->makespan = 0;
    memset(clock->done, 0, (size_t)cells);
    memset(clock->is_waiting, 0, (size_t)pipe->shape.n_stages);
    for (s = pipe->shape.n_stages - 1; s >= 0; s--) {
        clock->next[s] = clock->schedule->first[s];
        clock->free_at[s] = clock->link_free[0][s] = clock->link_free[1][s] = 0;
        cf__clock_look_at(clock, s);
    }
    while (clock->n_waiting > 0) {
        int64_t stage = clock->waiting[--clock->n_waiting];
        clock->is_waiting[stage] = 0;
        cf__clock_advance(clock, stage);
    }
}

/* Returns the action that waits forever on the first stage that has not reached the end of its list; -1: all have. */
static int64_t cf__clock_stuck(const cf__clock *clock) {
    int64_t s;
    for (s = 0; s < clock->pipe->shape.n_stages; s++)
        if (clock->next[s] < clock->schedule->first[s + 1]) return clock->next[s];
    return -1;
}

/* ================================================================================================================
   >>bounds    how long a schedule must take

   A bound is a time that no schedule accepted by cf_schedule_validate can beat, no matter which chunks it drops and in
   which order its stages run. There are two: the critical path and the stage load. Both are computed from heads and
   tails.

   Heads and tails. A pass waits for others, these for others again, and transfers take time. The longest such sequence
   that leads to a pass is its head: the pass cannot begin sooner. The longest sequence that follows it is its tail: the
   schedule ends no sooner after it. For one chunk on two stages, where F takes 1, B 2 and a transfer 1:

       stage 0   F . . . . . B B        F: head 0, tail 7    B: head 6, tail 0
       stage 1   . . F B B . . .        F: head 2, tail 5    B: head 3, tail 3

   The critical path is the longest sequence of all: the maximum over all passes of head + pass + tail.

   The stage load: a stage runs one pass at a time. So it needs the seconds of all of its passes, plus the smallest of
   their heads and the smallest of their tails: 0 + 3 + 0 for stage 0 above, and 2 + 3 + 3 for stage 1. The same holds
   for any subset of its passes. A subset of late passes, or of passes with long tails, may give more than all together.
   So the bound takes, for each pass, all passes whose head is at least its own, and does the same with tails.

   A bound may count only what every schedule must do. K is the maximum of chunks of a chain that are kept; a schedule
   may keep fewer. If no stage can keep two chunks of a chain, all of its chunks except the last are dropped, and their
   replays are on the paths. Otherwise only the minimum number of replays is known, and these count as work.
   ================================================================================================================
   */

enum { CF__BOUNDS_EITHER = 2 };

/* Heads and tails of all passes, by their place. W has them only if backwards are split. */
typedef struct cf__bounds_paths {
    const cf__pipeline *pipe;
    int split;    /* 1: backwards are I and W. CF__BOUNDS_EITHER: each may be I and W or B, whichever takes less */
    int64_t kept; /* number of chunks that a chain keeps: its last ones */
    double *seconds[CF__PIPE_PLACES]; /* (cells) */
    double *head[CF__PIPE_PLACES];    /* (cells) */
    double *tail[CF__PIPE_PLACES];    /* (cells) */
} cf__bounds_paths;

/* Returns the minimum time from the start of a pass to the end of the schedule: its seconds and its tail. */
static double cf__bounds_latest_start(const cf__bounds_paths *paths, int place, int64_t cell) {
    return paths->tail[place][cell] + paths->seconds[place][cell];
}

/* Fills in the seconds of all passes. A backward that may be B or I + W gets a lower bound of both: its first part, the
   gradient of the inputs, takes min(I, B), and the whole takes min(B, I + W). */
static void cf__bounds_fill_seconds(cf__bounds_paths *paths) {
    const cf__pipeline *pipe = paths->pipe;
    int64_t v, i, cell = 0;
    for (v = 0; v < pipe->n_v; v++)
        for (i = 0; i < pipe->n; i++, cell++) {
            double whole = cf__pipe_pass_seconds(pipe, CF_B, i, v), back = whole, weight = 0;
            if (paths->split) {
                back = cf__pipe_pass_seconds(pipe, CF_I, i, v);
                weight = cf__pipe_pass_seconds(pipe, CF_W, i, v);
            }
            if (paths->split == CF__BOUNDS_EITHER) {
                double both = back + weight;
                if (whole < back) back = whole;
                weight = (both < whole ? both : whole) - back;
            }
            paths->seconds[CF_F][cell] = cf__pipe_pass_seconds(pipe, CF_F, i, v);
            paths->seconds[CF_R][cell] = cf__pipe_pass_seconds(pipe, CF_R, i, v);
            paths->seconds[CF__PIPE_BACK][cell] = back;
            if (paths->split) paths->seconds[CF__PIPE_W][cell] = weight;
        }
}

/* Finds the heads (CF__PIPE_WAITS_FOR) or tails (CF__PIPE_HOLDS_UP) of one chunk's passes at one place, on all virtual
   stages, from those of the other passes of the rules. The rule between neighbouring virtual stages comes last, because
   it continues from the neighbour's result. */
static void cf__bounds_find_reach(cf__bounds_paths *paths, int way, int place, const cf__pipe_unit *unit,
                                  int64_t chunk) {
    const cf__pipeline *pipe = paths->pipe;
    double **reach = way == CF__PIPE_WAITS_FOR ? paths->head : paths->tail, *own = reach[place] + chunk;
    cf__pipe_need needs[CF__PIPE_MOST_NEEDS];
    int n = cf__pipe_follow(pipe, paths->split != 0, way, place, unit, chunk, needs), crosses, i;
    int rises = (place <= CF_R) == (way == CF__PIPE_WAITS_FOR);
    int64_t step = rises ? pipe->n : -pipe->n, first = rises ? 0 : (pipe->n_v - 1) * pipe->n, j, cell;
    double transfer = cf__pipe_transfer_seconds(pipe, chunk);
    for (j = 0, cell = first; j < pipe->n_v; j++, cell += step) own[cell] = 0;
    for (crosses = 0; crosses < 2; crosses++)
        for (i = 0; i < n; i++) {
            int64_t on = needs[i].stage * pipe->n + needs[i].chunk - chunk;
            const double *there = reach[needs[i].place] + chunk, *seconds = paths->seconds[needs[i].place] + chunk;
            if ((needs[i].stage != 0) != crosses || (needs[i].place != CF_F && pipe->shape.forward_only)) continue;
            if (needs[i].chunk < unit->first || needs[i].chunk >= unit->first + unit->n) continue;
            for (j = crosses, cell = first + crosses * step; j < pipe->n_v; j++, cell += step) {
                int64_t v = rises ? j : pipe->n_v - 1 - j;
                double delay = crosses && cf__pipe_hops(pipe, v, v + needs[i].stage) ? transfer : 0;
                own[cell] = cf__most(own[cell], there[cell + on] + seconds[cell + on] + delay);
            }
        }
}

/* Finds all tails of a unit and the heads of its forwards, each before it is read. A kept chunk also gets a tail of R,
   because a schedule may drop it nevertheless. */
static void cf__bounds_find_tails(cf__bounds_paths *paths, const cf__pipe_unit *unit) {
    cf__pipe_unit dropped = *unit;
    int64_t first = unit->first, last = first + unit->n - 1, i;
    dropped.k = 0;
    for (i = first; i <= last; i++) {
        cf__bounds_find_reach(paths, CF__PIPE_WAITS_FOR, CF_F, unit, i);
        if (paths->split) cf__bounds_find_reach(paths, CF__PIPE_HOLDS_UP, CF__PIPE_W, unit, i);
        cf__bounds_find_reach(paths, CF__PIPE_HOLDS_UP, CF__PIPE_BACK, unit, i);
        cf__bounds_find_reach(paths, CF__PIPE_HOLDS_UP, CF_R, &dropped, i);
    }
    for (i = last; i >= first; i--) cf__bounds_find_reach(paths, CF__PIPE_HOLDS_UP, CF_F, unit, i);
}

/* Finds the heads of a unit's other passes. */
static void cf__bounds_find_heads(cf__bounds_paths *paths, const cf__pipe_unit *unit) {
    int64_t i;
    for (i = unit->first + unit->n - 1; i >= unit->first; i--) {
        if (cf__pipe_occurs(unit, CF_R, i)) cf__bounds_find_reach(paths, CF__PIPE_WAITS_FOR, CF_R, unit, i);
        cf__bounds_find_reach(paths, CF__PIPE_WAITS_FOR, CF__PIPE_BACK, unit, i);
        if (paths->split) cf__bounds_find_reach(paths, CF__PIPE_WAITS_FOR, CF__PIPE_W, unit, i);
    }
}

/* ---- one stage by itself ---- */

/* The passes of one stage, and room to sort them. */
typedef struct cf__bounds_jobs {
    int64_t n;
    double *head, *seconds, *tail; /* (most jobs) */
    uint64_t *order[2];            /* (most jobs) */
} cf__bounds_jobs;

static void cf__bounds_add_job(cf__bounds_jobs *jobs, double head, double seconds, double tail) {
    jobs->head[jobs->n] = head;
    jobs->tail[jobs->n] = tail;
    jobs->seconds[jobs->n++] = seconds;
}

/* Returns whether every schedule drops the chunk: no chain keeps two, and this is not the last chunk of its chain. */
static int cf__bounds_must_drop(const cf__bounds_paths *paths, int64_t chunk) {
    return paths->kept == 1 && cf__pipe_after(paths->pipe->plan, &paths->pipe->chunks[chunk]) > 0;
}

/* Adds the minimum replays of a chain on virtual stage v, where it keeps at most k > 1 chunks at a time. When the
   backward of its chunk j begins (counted from 1), chunk j is kept, and at most k - 1 chunks before it. So at least j -
   k chunks still need a replay. With five chunks and k = 2:

       B5  three replays to come  B4  two  B3  one  B2  B1

   So one replay comes after B of chunk k + 1, another after B of chunk k + 2, and so on; their chunks are unknown. But
   all replays come before B1, and the last t replays take at least as long as the t cheapest. So the cheapest replays
   can replace the real ones in every sum over jobs behind some head. */
static void cf__bounds_add_replays(cf__bounds_jobs *jobs, const cf__bounds_paths *paths, int64_t v,
                                   const cf__pipe_unit *unit, int64_t k) {
    int64_t first = v * paths->pipe->n + unit->first, t;
    int32_t *longest = (int32_t *)jobs->order[0]; /* unused before sorting; the most expensive comes first */
    for (t = 0; t < unit->n - 1; t++) longest[t] = (int32_t)t;
    cf__sort_by_key(longest, unit->n - 1, paths->seconds[CF_R] + first);
    for (t = 0; t < unit->n - k; t++) {
        int64_t cell = first + k + t;
        double seconds = paths->seconds[CF_R][first + longest[unit->n - 2 - t]];
        cf__bounds_add_job(jobs, paths->head[CF__PIPE_BACK][cell] + paths->seconds[CF__PIPE_BACK][cell], seconds,
                           cf__bounds_latest_start(paths, CF__PIPE_BACK, first));
    }
}

/* Adds the jobs of one virtual stage, which keeps at most k chunks of a chain. */
static void cf__bounds_add_stage(cf__bounds_jobs *jobs, const cf__bounds_paths *paths, int64_t v, int64_t k) {
    const cf__pipeline *pipe = paths->pipe;
    int64_t i;
    int place;
    for (i = 0; i < pipe->n; i++)
        for (place = 0; place < (pipe->shape.forward_only ? 1 : 3 + (paths->split != 0)); place++) {
            int64_t cell = v * pipe->n + i;
            if (place == CF_R && !cf__bounds_must_drop(paths, i)) continue;
            cf__bounds_add_job(jobs, paths->head[place][cell], paths->seconds[place][cell], paths->tail[place][cell]);
        }
    for (i = 0; paths->kept > 1 && i < pipe->n;) {
        cf__pipe_unit unit = cf__pipe_unit_of(pipe, i, k);
        if (unit.n > unit.k) cf__bounds_add_replays(jobs, paths, v, &unit, unit.k);
        i += unit.n;
    }
}

/* Collects the jobs of a stage, which keeps at most k chunks of a chain. */
static void cf__bounds_collect_jobs(cf__bounds_jobs *jobs, const cf__bounds_paths *paths, int64_t stage, int64_t k) {
    int64_t i;
    jobs->n = 0;
    for (i = 0; i < paths->pipe->n_v / paths->pipe->shape.n_stages; i++)
        cf__bounds_add_stage(jobs, paths, cf__pipe_at(paths->pipe, i, stage), k);
}

/* Returns the maximum time that any subset of the jobs needs. A subset is one job and all others whose `by` is at least
   its own. `by` holds the heads of all jobs and `other` their tails, or the reverse. */
static double cf__bounds_find_parts(cf__bounds_jobs *jobs, const double *by, const double *other) {
    double most = 0, seconds = 0, least = DBL_MAX;
    int64_t i;
    for (i = 0; i < jobs->n; i++) jobs->order[0][i] = (uint64_t)i;
    cf__sort(&jobs->order[0], &jobs->order[1], jobs->n, by, ~(uint64_t)0);
    for (i = 0; i < jobs->n; i++) {
        uint64_t job = jobs->order[0][i];
        seconds += jobs->seconds[job];
        if (other[job] < least) least = other[job];
        most = cf__most(most, by[job] + seconds + least);
    }
    return most;
}

/* ---- all bounds together ---- */

typedef struct cf__bounds {
    cf__bounds_paths paths;
    cf__bounds_jobs jobs;
    int64_t *limits; /* (n_stages) the caller's limits on chunks per stage; INT64_MAX: none */
    double critical_path, stage_load;
} cf__bounds;

static void cf__bounds_layout(cf__bounds *bounds, const cf__pipeline *pipe, int split, cf__carver *carver) {
    int64_t places = split ? 4 : 3, cells = pipe->n * pipe->n_v, most = pipe->n * pipe->shape.n_virtual * places;
    cf__bounds_paths *paths = &bounds->paths;
    cf__bounds_jobs *jobs = &bounds->jobs;
    int64_t i;
    for (i = 0; i < places; i++) {
        paths->seconds[i] = (double *)cf__take(carver, cells, sizeof(double));
        paths->head[i] = (double *)cf__take(carver, cells, sizeof(double));
        paths->tail[i] = (double *)cf__take(carver, cells, sizeof(double));
    }
    jobs->head = (double *)cf__take(carver, most, sizeof(double));
    jobs->tail = (double *)cf__take(carver, most, sizeof(double));
    jobs->seconds = (double *)cf__take(carver, most, sizeof(double));
    for (i = 0; i < 2; i++) jobs->order[i] = (uint64_t *)cf__take(carver, most, sizeof(uint64_t));
    bounds->limits = (int64_t *)cf__take(carver, pipe->shape.n_stages, sizeof(int64_t));
}

/* Finds the tails and the critical path of schedules that keep the last `kept` chunks of every chain; if `heads` is
   set, also all heads. Takes time linear in the passes. Every longest path begins with an F. */
static void cf__bounds_find_paths(cf__bounds *bounds, const cf__pipeline *pipe, int split, int64_t kept, int heads) {
    cf__bounds_paths *paths = &bounds->paths;
    int64_t i;
    paths->pipe = pipe;
    paths->split = split;
    paths->kept = kept;
    cf__bounds_fill_seconds(paths);
    for (i = 0; i < pipe->n;) {
        cf__pipe_unit unit = cf__pipe_unit_of(pipe, i, kept);
        cf__bounds_find_tails(paths, &unit);
        if (heads) cf__bounds_find_heads(paths, &unit);
        i += unit.n;
    }
    bounds->critical_path = 0;
    for (i = 0; i < pipe->n * pipe->n_v; i++)
        bounds->critical_path =
            cf__most(bounds->critical_path, paths->head[CF_F][i] + cf__bounds_latest_start(paths, CF_F, i));
}

static double cf__bounds_strongest(const cf__bounds *b) {
    return cf__most(b->critical_path, b->stage_load);
}

/* Finds both bounds, or stops once one of them reaches `enough`. */
static void cf__bounds_find(cf__bounds *bounds, const cf__pipeline *pipe, int split, double enough) {
    int64_t s, most = 1;
    bounds->stage_load = 0;
    for (s = 0; s < pipe->shape.n_stages; s++) most = cf__max(most, bounds->limits[s]);
    cf__bounds_find_paths(bounds, pipe, split,
                          pipe->shape.forward_only || cf__min(pipe->shape.k, most) == 1 ? 1 : INT64_MAX, 1);
    for (s = 0; s < pipe->shape.n_stages; s++) {
        cf__bounds_jobs *jobs = &bounds->jobs;
        cf__bounds_collect_jobs(jobs, &bounds->paths, s, cf__min(pipe->shape.k, bounds->limits[s]));
        if (cf__bounds_strongest(bounds) >= enough) return;
        bounds->stage_load = cf__most(bounds->stage_load, cf__bounds_find_parts(jobs, jobs->head, jobs->tail));
        bounds->stage_load = cf__most(bounds->stage_load, cf__bounds_find_parts(jobs, jobs->tail, jobs->head));
    }
}

/* ================================================================================================================
   >>dispatch    schedules by simulated time

   Dispatch simulates the pipeline. Whenever a stage is free, it takes the ready pass that its policy prefers. So every
   choice is made with the facts of that moment.

   A pass is ready when all its inputs by the rules of >>pipeline have arrived. `missing` counts those that it still
   waits for; a pass that is taken supplies the passes that wait for it. Ready passes are in queues of their stage.
   Forwards go in the order of units, other passes by the longest way to the end of the schedule. Backwards go first,
   because they free places. But if the next stage would run out of work, a forward feeds it first (the lead). W goes
   when nothing else can, or when the next forward needs its place.

   Room. Forwards run even if there is no place for their activations. Afterwards the kept chunk whose backward is
   furthest off loses its place (eviction, by Belady's rule). Keeping cost its forward no time, so the only change is a
   replay before its backward. Two chunks on two stages with room for one, where F and R take 1 and B takes 2:

       stage 0   F1 F2 .  .  B1 B1 R2 B2 B2      F2 finds no place. B2 is further off than B1, so chunk 2 is dropped
       stage 1   .  F1 B1 B1 F2 B2 B2            again, and replayed in the place that B1 has freed

   A replay is started just in time for its backward, or sooner if the stage would be idle. On one row of virtual stages
   only replays wait for places, and only until gradients arrive that are already in transit. On several rows a
   candidate may get stuck; units then run one by one. A dropped chunk leaves its input on the stage. The inputs of a
   chain have no more tokens than its state. Inputs of standalone chunks are counted: a stage keeps at most two per
   virtual stage of the pipeline, then drops no more.

   A unit starts on a virtual stage when there is room there for its state. If bytes are limited, it also needs the
   bytes that it takes even with all chunks dropped. Its backwards free both. In a plan with trees, units start in order
   on every virtual stage. So a unit that waits for room waits only for units that have all they need.

   Turns are for fixed kinds, and for split backwards that fill a pipeline (ZB-H1, ZB-V). A stage first takes a number
   of forwards, `turns` on the first stage, and from then on one backward for each forward. A unit starts only when
   places are free for all chunks that it keeps, and for as many on each later row of its stage; so nothing is evicted.
   On three stages with turns of 3 the stages start with 3, 2 and 1 forwards:

       stage 0   F1 F2 F3 .  .  B1 F4 B2        stage 1   .  F1 F2 .  B1 F3 B2        stage 2   .  .  F1 B1 F2 B2

   Beats are for several rows. Chunk i begins on virtual stage v at i + beat x v. Its backward comes back there later,
   by one beat for each virtual stage on its way; passes go in that order. With a beat of 1/2 on four virtual stages
   chunk 0 begins at 0, 1/2, 1 and 3/2, and chunk 1 at 1, 3/2, 2 and 5/2. The longer a beat, the more chunks are in
   progress.

   Split backwards follow that order strictly, because W fills the gaps. Whole backwards go as soon as they can, but
   under a limit no virtual stage has more chunks in progress than its beats allow. With the beat above, virtual stage 0
   of four has at most 5: its backward begins 1/2 x 10 chunks after its forward. On a V, beats may be steep: beats that
   lead to a later stage count twice.
   ================================================================================================================
   */

typedef struct cf__dispatch_policy {
    int split;     /* backwards are split into I and W */
    int64_t turns; /* above 0: the first stage runs this many forwards first; then forwards and backwards alternate */
    /* above 0: passes go by their beats; each virtual stage begins this many chunks after the previous one */
    double beat;
    int steep;     /* in a V, beats to a later stage count twice; 2: backwards also begin 2.5 beats later */
    int starves;   /* 1: no forward goes before a backward to feed the next stage */
} cf__dispatch_policy;

enum {
    CF__DISPATCH_NOT_STARTED = -1, /* in `kept`: the unit has not started there */
    CF__DISPATCH_TAKEN = -1,       /* in `missing`: the pass has been taken */
    CF__DISPATCH_AHEAD = 2,        /* a stage with a backward to run gets at most this many forwards ahead of the next
                                      stage */
    CF__DISPATCH_INPUTS = 2        /* most inputs of dropped standalone chunks that a stage keeps, per virtual stage of
                                      the pipeline */
};

/* A forward goes before a backward while the next stage has less work than this factor times this stage's work, so that
   the next stage need not wait. Several rows divide the factor equally. */
static const double cf__dispatch_lead = 1.5;

/* Passes are numbered cell by cell, and in a cell by their place. */
static int32_t cf__dispatch_id(int64_t cell, int place) { return (int32_t)(cell * CF__PIPE_PLACES + place); }

static int64_t cf__dispatch_cell(int32_t id) { return (int64_t)((uint32_t)id / CF__PIPE_PLACES); }

static int cf__dispatch_place(int32_t id) { return (int)((uint32_t)id % CF__PIPE_PLACES); }

/* The queues of a stage. */
enum {
    CF__DISPATCH_COMING = 0, /* passes that will be ready, by the time at which they will be */
    CF__DISPATCH_PLAN,       /* if the order is strict: all forwards and backwards in that order, ready or not */
    CF__DISPATCH_KEPT,       /* kept cells, the one whose backward is furthest off first */
    CF__DISPATCH_DROPPED,    /* cells whose replay has not been started, the one whose backward comes next first */
    CF__DISPATCH_BEGUN,      /* the first of four queues of ready passes, one for each place, by urgency */
    CF__DISPATCH_REPLAYS,
    CF__DISPATCH_RETURNING,
    CF__DISPATCH_WEIGHTS,
    CF__DISPATCH_FRESH       /* the first of n_virtual queues, one for each row: first forwards of units */
};

/* A heap of passes or of cells. */
typedef struct cf__dispatch_queue {
    int32_t *heap;
    int64_t n;
} cf__dispatch_queue;

/* The state of one stage during dispatch. */
typedef struct cf__dispatch_worker {
    double free_at;
    double ready;               /* seconds of the passes that it could take, or that will soon be ready */
    double left;                /* seconds of the passes that it has not taken, plus the smallest tail of its passes */
    double link_free[2];
    cf__pipe_room room;         /* chunks and bytes that are still free */
    int64_t free_bytes;         /* bytes that would be free if no chunk were kept */
    int64_t n_forwards;         /* forwards taken */
    int64_t n_ahead;            /* forwards without a backward yet, of chunks that are not dropped */
    int64_t n_dropped;          /* standalone chunks that were dropped and have had no backward yet */
    cf__dispatch_queue *queues; /* (CF__DISPATCH_FRESH + n_virtual) */
    int32_t *done;              /* passes in the order in which they were taken */
    int64_t n_done;
} cf__dispatch_worker;

/* The state of one virtual stage during dispatch. */
typedef struct cf__dispatch_row {
    int64_t state;     /* tokens of state that are still free */
    int32_t n_started; /* units that have started there; in plans with trees they start in order */
    int32_t n_open;    /* chunks that have run forward there but not backward */
} cf__dispatch_row;

typedef struct cf__dispatch {
    cf__schedule_maker *maker;
    const cf__pipeline *pipe;
    const cf__bounds_paths *paths;
    cf__dispatch_policy policy;
    int64_t full;         /* above 0: maximum chunks that a stage keeps */
    int32_t *kept;        /* (n_units x n_v) chunks that a unit keeps on a virtual stage */
    cf__dispatch_row *rows; /* (n_v) */
    cf__pipe_room most;   /* maximum that any unit takes on one virtual stage */
    double *place;        /* (n) number of chunks in the units before each chunk's */
    double *back;         /* index of its backward, from 1 on, in the order in which backwards become possible */
    int64_t longest;      /* chunks of the longest unit */
    int8_t *missing;      /* (passes) number of inputs that a pass still waits for */
    double *ready_at;     /* (passes) */
    double *urgency;      /* (passes) the lower, the more urgent */
    double *furthest;     /* (cells) the lower, the further off its backward: keys of the heaps of kept cells */
    double *nearest;      /* (cells) furthest, negated: keys of the heaps of dropped cells */
    int follows;          /* 1: `urgency` is given in advance, and forwards and backwards run in its order */
    double now, give_up_at;
    double least;         /* a lower bound of the makespan */
    int64_t n_left;       /* passes, except R, that have not been taken */
    cf__dispatch_worker *workers; /* (n_stages) */
    int32_t *stage_of;    /* (n_v) stage of each; faster to look up than to divide by the number of stages */
    int32_t *row_of;      /* (n_v) row of each: its index among its stage's virtual stages */
    double *wake;         /* (n_leaves) when to visit the stage again */
    int32_t *winners;     /* (2 x n_leaves) a tournament over wake: winners[1] is the stage to visit next */
    int64_t n_leaves;     /* n_stages, rounded up to a power of 2; leaves past n_stages never wake */
    double makespan;
} cf__dispatch;

/* Returns the virtual stage of a pass, and its chunk. Divides 32 bits, much faster than 64. */
static int64_t cf__dispatch_stage(const cf__dispatch *d, int32_t id, int64_t *chunk) {
    uint32_t cell = (uint32_t)id / CF__PIPE_PLACES, v = cell / (uint32_t)d->pipe->n;
    *chunk = cell - v * (uint32_t)d->pipe->n;
    return v;
}

static int64_t cf__dispatch_passes(const cf__pipeline *pipe) { return pipe->n * pipe->n_v * CF__PIPE_PLACES; }

static int64_t cf__dispatch_queues(const cf__schedule_maker *m) { return CF__DISPATCH_FRESH + m->desc.shape.n_virtual; }

static void cf__dispatch_layout(cf__dispatch *d, const cf__schedule_maker *m, cf__carver *carver) {
    int64_t passes = cf__dispatch_passes(&m->pipe), cells = m->pipe.n * m->desc.shape.n_virtual, s, q;
    for (d->n_leaves = 1; d->n_leaves < m->desc.shape.n_stages;) d->n_leaves *= 2;
    d->kept = (int32_t *)cf__take(carver, m->n_units * m->pipe.n_v, sizeof(int32_t));
    d->rows = (cf__dispatch_row *)cf__take(carver, m->pipe.n_v, sizeof(cf__dispatch_row));
    d->place = (double *)cf__take(carver, m->pipe.n, sizeof(double));
    d->back = (double *)cf__take(carver, m->pipe.n, sizeof(double));
    d->furthest = (double *)cf__take(carver, m->pipe.n * m->pipe.n_v, sizeof(double));
    d->nearest = (double *)cf__take(carver, m->pipe.n * m->pipe.n_v, sizeof(double));
    d->missing = (int8_t *)cf__take(carver, passes, sizeof(int8_t));
    d->ready_at = (double *)cf__take(carver, passes, sizeof(double));
    d->urgency = (double *)cf__take(carver, passes, sizeof(double));
    d->workers = (cf__dispatch_worker *)cf__take(carver, m->desc.shape.n_stages, sizeof(cf__dispatch_worker));
    d->stage_of = (int32_t *)cf__take(carver, m->pipe.n_v, sizeof(int32_t));
    d->row_of = (int32_t *)cf__take(carver, m->pipe.n_v, sizeof(int32_t));
    d->wake = (double *)cf__take(carver, d->n_leaves, sizeof(double));
    d->winners = (int32_t *)cf__take(carver, 2 * d->n_leaves, sizeof(int32_t));
    for (s = 0; s < m->desc.shape.n_stages; s++) {
        cf__dispatch_worker none, *worker = carver->base != NULL ? &d->workers[s] : &none;
        worker->queues = (cf__dispatch_queue *)cf__take(carver, cf__dispatch_queues(m), sizeof(cf__dispatch_queue));
        worker->done = (int32_t *)cf__take(carver, cells * CF__PIPE_PLACES, sizeof(int32_t));
        for (q = 0; q < cf__dispatch_queues(m); q++) {
            int64_t n = q <= CF__DISPATCH_PLAN ? cells * CF__PIPE_PLACES : q < CF__DISPATCH_FRESH ? cells : m->pipe.n;
            int32_t *heap = (int32_t *)cf__take(carver, n, sizeof(int32_t));
            if (carver->base != NULL) worker->queues[q].heap = heap;
        }
    }
}

/* ---- stages that wait ---- */

/* Sets when a stage is to be visited again. Of equal times the lower stage comes first. */
static void cf__dispatch_set_wake(cf__dispatch *d, int64_t stage, double when) {
    int64_t node = (d->n_leaves + stage) / 2;
    d->wake[stage] = when;
    for (; node > 0; node /= 2) {
        int32_t left = d->winners[2 * node], right = d->winners[2 * node + 1];
        d->winners[node] = d->wake[left] <= d->wake[right] ? left : right;
    }
}

/* ---- passes that wait ---- */

static void cf__dispatch_push(cf__dispatch_worker *worker, int64_t queue, int32_t id, const double *keys) {
    cf__dispatch_queue *q = &worker->queues[queue];
    cf__heap_push(q->heap, q->n++, id, keys);
}

static int32_t cf__dispatch_pop(cf__dispatch_worker *worker, int64_t queue, const double *keys) {
    cf__dispatch_queue *q = &worker->queues[queue];
    return cf__heap_pop(q->heap, q->n--, keys);
}

/* Returns the first item of a queue; -1: it is empty. */
static int32_t cf__dispatch_top(const cf__dispatch_worker *worker, int64_t queue) {
    return worker->queues[queue].n > 0 ? worker->queues[queue].heap[0] : -1;
}

/* Points to the number of chunks that the unit of a chunk keeps on virtual stage v. */
static int32_t *cf__dispatch_kept(const cf__dispatch *d, int64_t chunk, int64_t v) {
    return &d->kept[d->maker->unit_of[chunk] * d->pipe->n_v + v];
}

/* Returns the unit of a chunk in its present form on virtual stage v. */
static cf__pipe_unit cf__dispatch_unit(const cf__dispatch *d, int64_t chunk, int64_t v) {
    cf__pipe_unit unit = *cf__schedule_unit(d->maker, chunk);
    int32_t kept = *cf__dispatch_kept(d, chunk, v);
    if (kept >= 0) unit.k = kept;
    return unit;
}

static int cf__dispatch_is_taken(const cf__dispatch *d, int64_t cell, int place) {
    return d->missing[cf__dispatch_id(cell, place)] == CF__DISPATCH_TAKEN;
}

/* Makes a pass one of the choices of its stage. */
static void cf__dispatch_admit(cf__dispatch *d, int64_t stage, int32_t id) {
    int64_t chunk, v = cf__dispatch_stage(d, id, &chunk);
    int place = cf__dispatch_place(id);
    int is_fresh = place == CF_F && chunk == cf__schedule_unit(d->maker, chunk)->first;
    cf__dispatch_push(&d->workers[stage], is_fresh ? CF__DISPATCH_FRESH + d->row_of[v] : CF__DISPATCH_BEGUN + place, id,
                      d->urgency);
}

/* Supplies a pass of virtual stage v with one of the inputs that it waits for, at the time `when`. If that was the last
   one, the pass goes to its stage's queue; if the stage is busy until then, it is a choice at once. If a backward now
   waits only for its replay, the replay is started in time to end when the other inputs have arrived. */
static void cf__dispatch_supply(cf__dispatch *d, int32_t id, int64_t v, double when) {
    int64_t stage = d->stage_of[v], cell = cf__dispatch_cell(id);
    cf__dispatch_worker *worker = &d->workers[stage];
    int place = cf__dispatch_place(id);
    if (when > d->ready_at[id]) d->ready_at[id] = when;
    if (--d->missing[id] == 1 && place == CF__PIPE_BACK) {
        int32_t replay = cf__dispatch_id(cell, CF_R);
        double start = cf__most(d->now, d->ready_at[id] - d->paths->seconds[CF_R][cell]);
        if (d->missing[replay] > 0) cf__dispatch_supply(d, replay, v, start);
    }
    if (d->missing[id] > 0) return;
    worker->ready += d->paths->seconds[place][cell];
    if (d->ready_at[id] <= worker->free_at) cf__dispatch_admit(d, stage, id);
    else cf__dispatch_push(worker, CF__DISPATCH_COMING, id, d->ready_at);
    when = cf__most(d->ready_at[id], worker->free_at);
    if (when < d->wake[stage]) cf__dispatch_set_wake(d, stage, when);
}

/* ---- the start ---- */

/* Counts the inputs that each pass of a unit waits for if all chunks are kept. */
static void cf__dispatch_count(cf__dispatch *d, const cf__pipe_unit *unit) {
    cf__pipe_need needs[CF__PIPE_MOST_NEEDS];
    cf__pipe_unit counted = *unit;
    int64_t i, v;
    int place, split = d->policy.split, n, j;
    counted.k = counted.n;
    for (i = unit->first; i < unit->first + unit->n; i++)
        for (place = n = 0; place < 3 + split; place++, n = 0) {
            if (cf__pipe_occurs(&counted, place, i))
                n = cf__pipe_follow(d->pipe, split, CF__PIPE_WAITS_FOR, place, &counted, i, needs);
            for (v = 0; v < d->pipe->n_v; v++) {
                int8_t *missing = &d->missing[cf__dispatch_id(v * d->pipe->n + i, place)];
                for (*missing = 0, j = 0; j < n; j++)
                    *missing = (int8_t)(*missing + ((uint64_t)(v + needs[j].stage) < (uint64_t)d->pipe->n_v));
            }
        }
}

/* Returns the number of steps on the way to virtual stage v that lead to a later stage of a V, if the beat is steep. */
static int64_t cf__dispatch_steps_down(const cf__dispatch *d, int64_t v) {
    int64_t row = d->row_of[v];
    if (d->policy.steep == 0) return 0;
    return (row + 1) / 2 * (d->pipe->shape.n_stages - 1) + (row % 2 == 0 ? d->stage_of[v] : 0);
}

/* Returns the number of beats before a forward, or before another pass, begins on virtual stage v. A whole backward
   lasts two beats. */
static double cf__dispatch_way_to(const cf__dispatch *d, int place, int64_t v) {
    int64_t last = d->pipe->n_v - 1, steps = last - v, down = cf__dispatch_steps_down(d, v);
    int64_t most = cf__dispatch_steps_down(d, last);
    if (place == CF_F) return (double)(v + down);
    if (d->policy.steep > 0) steps += steps - (most - down);
    return (double)(last + most + 1 + steps * (d->policy.split ? 1 : 2)) + (d->policy.steep == 2 ? 2.5 : 0);
}

/* Returns the time of a pass in beats. Chunks begin one step after another. A unit's forwards go in order. Its
   backwards go in reverse, and start as many steps later as the longest unit has chunks. Each step from one virtual
   stage to the next counts as policy.beat chunks. W fills the gaps. */
static double cf__dispatch_beat(const cf__dispatch *d, int place, int64_t chunk, int64_t v) {
    int64_t step = chunk - cf__schedule_unit(d->maker, chunk)->first;
    if (place != CF_F) step = d->longest - 2 + (int64_t)(d->back[chunk] - d->place[chunk]);
    if (place == CF__PIPE_W) step += 4 * (d->pipe->n + d->pipe->n_v);
    return d->place[chunk] + (double)step + cf__product(d->policy.beat, cf__dispatch_way_to(d, place, v));
}

/* Returns whether forwards and backwards go strictly in the order of their urgency. */
static int cf__dispatch_is_strict(const cf__dispatch *d) {
    return d->follows || (d->policy.beat > 0 && d->policy.split);
}

/* Returns the urgency of a pass; the lowest goes first. Forwards go in the order of units, all other passes by the
   longest way to the end. If d->follows, the urgency is preset. */
static double cf__dispatch_urgency(const cf__dispatch *d, int place, int64_t chunk, int64_t v) {
    if (d->follows) return d->urgency[cf__dispatch_id(v * d->pipe->n + chunk, place)];
    if (d->policy.beat > 0) return cf__dispatch_beat(d, place, chunk, v);
    if (place == CF_F) return d->place[chunk] + (double)(chunk - cf__schedule_unit(d->maker, chunk)->first);
    return -cf__bounds_latest_start(d->paths, place, v * d->pipe->n + chunk);
}

/* Sets the urgency of all passes, and the seconds that each stage has to run. */
static void cf__dispatch_start_passes(cf__dispatch *d) {
    double least_tail = DBL_MAX;
    int64_t s, row, i;
    int place;
    memset(d->ready_at, 0, (size_t)cf__dispatch_passes(d->pipe) * sizeof(double));
    for (s = 0; s < d->pipe->shape.n_stages; d->workers[s++].left += least_tail, least_tail = DBL_MAX)
        for (row = 0; row < d->pipe->shape.n_virtual; row++)
            for (i = 0; i < d->pipe->n; i++) {
                const cf__pipe_unit *unit = cf__schedule_unit(d->maker, i);
                int64_t v = cf__pipe_at(d->pipe, row, s), cell = v * d->pipe->n + i;
                for (place = 0; place < 3 + d->policy.split; place++) {
                    int32_t id = cf__dispatch_id(cell, place);
                    d->urgency[id] = cf__dispatch_urgency(d, place, i, v);
                    if (cf__dispatch_is_strict(d) && (place == CF_F || place == CF__PIPE_BACK))
                        cf__dispatch_push(&d->workers[s], CF__DISPATCH_PLAN, id, d->urgency);
                    if (!cf__pipe_occurs(unit, place, i)) continue;
                    d->workers[s].left += d->paths->seconds[place][cell];
                    if (d->paths->tail[place][cell] < least_tail) least_tail = d->paths->tail[place][cell];
                }
            }
}

static void cf__dispatch_start_workers(cf__dispatch *d) {
    int64_t s, q, v;
    for (s = 0; s < d->pipe->shape.n_stages; s++) {
        cf__dispatch_worker *worker = &d->workers[s];
        worker->free_at = worker->ready = worker->left = worker->link_free[0] = worker->link_free[1] = 0;
        worker->room = cf__schedule_limits_of(d->maker, s);
        if (d->full > 0) worker->room.chunks = cf__min(worker->room.chunks, d->full);
        worker->free_bytes = worker->room.bytes;
        worker->n_forwards = worker->n_done = worker->n_dropped = worker->n_ahead = 0;
        for (q = 0; q < cf__dispatch_queues(d->maker); q++) worker->queues[q].n = 0;
    }
    for (v = 0; v < d->pipe->n_v; v++) {
        d->stage_of[v] = (int32_t)cf__pipe_stage(d->pipe, v);
        d->row_of[v] = (int32_t)(v / d->pipe->shape.n_stages);
        d->rows[v].state = d->workers[d->stage_of[v]].room.state;
        d->rows[v].n_started = d->rows[v].n_open = 0;
    }
}

/* Returns the places that must be free when a unit starts: with turns, one for each chunk that it keeps; otherwise one,
   which eviction can free. */
static int64_t cf__dispatch_places(const cf__dispatch *d, int64_t k) { return d->policy.turns > 0 ? k : 1; }

/* Sets the position of each chunk of a unit in the order, and numbers the backwards that the unit makes possible.
   before: number of chunks before the unit. A backward of a later row is nearer, by the stages of the earlier rows. */
static void cf__dispatch_start_unit(cf__dispatch *d, const cf__pipe_unit *unit, int64_t before, int64_t *n_back) {
    cf__pipe_room takes = cf__schedule_takes(d->maker, unit, cf__dispatch_places(d, unit->k));
    int64_t p = d->pipe->shape.n_stages, i, v;
    for (i = 0; i < unit->n; i++) d->place[unit->first + i] = (double)before;
    d->most.chunks = cf__max(d->most.chunks, takes.chunks);
    d->most.bytes = cf__max(d->most.bytes, takes.bytes);
    if (cf__pipe_below(d->pipe, unit->first) > 0) return;
    for (; unit != NULL; unit = cf__pattern_ends(d->maker, unit->first))
        for (i = unit->first + unit->n - 1; i >= unit->first; i--)
            for (d->back[i] = (double)++*n_back, v = 0; v < d->pipe->n_v; v++) {
                d->furthest[v * d->pipe->n + i] = (double)(v / p * p - *n_back);
                d->nearest[v * d->pipe->n + i] = -d->furthest[v * d->pipe->n + i];
            }
}

static void cf__dispatch_start(cf__dispatch *d) {
    cf__schedule_maker *m = d->maker;
    int64_t u, n = 0, n_back = 0;
    cf__schedule_number_units(m);
    d->longest = cf__schedule_longest(d->pipe);
    d->most.chunks = d->most.bytes = 0;
    for (u = 0; u < m->n_units; n += m->units[u++].n) cf__dispatch_start_unit(d, &m->units[u], n, &n_back);
    for (u = 0; u < m->n_units * m->pipe.n_v; u++) d->kept[u] = CF__DISPATCH_NOT_STARTED;
    if (m->pipe.plan->order != NULL) { /* the units of a path take more than one unit does */
        int64_t path = cf__dispatch_places(d, cf__min(cf__schedule_path_kept(m), d->longest));
        d->most.chunks = cf__max(d->most.chunks, path);
        d->most.bytes = cf__max(d->most.bytes, m->most_above + path * m->most_padded * cf__schedule_row(m));
    }
    d->makespan = d->now = 0;
    d->n_left = m->pipe.n * m->pipe.n_v * (d->policy.split ? 3 : 2);
    cf__dispatch_start_workers(d);
    cf__dispatch_start_passes(d);
    for (u = 0; u < m->n_units; u++) cf__dispatch_count(d, &m->units[u]);
    for (u = 0; u < d->n_leaves; u++) {
        d->wake[u] = DBL_MAX;
        d->winners[d->n_leaves + u] = (int32_t)u;
    }
    for (u = d->n_leaves - 1; u > 0; u--) d->winners[u] = d->winners[2 * u];
    for (u = 0; u < m->n_units; u++) { /* the first pass of a unit, or of a tree, waits only for this supply */
        if (cf__pipe_has_parent(&m->pipe, m->units[u].first)) continue;
        d->missing[cf__dispatch_id(m->units[u].first, CF_F)] = 1;
        cf__dispatch_supply(d, cf__dispatch_id(m->units[u].first, CF_F), 0, 0);
    }
}

/* ---- eviction ---- */

/* Returns whether a unit is a standalone chunk or a leaf of one chunk. No chunk continues these, so the limit on state
   does not limit their inputs. */
static int cf__dispatch_is_lone(const cf__dispatch *d, const cf__pipe_unit *unit) {
    return unit->n == 1 && cf__pipe_below(d->pipe, unit->first) == 0;
}

/* Returns whether a stage may drop a chunk of the unit and keep its input instead. */
static int cf__dispatch_can_drop(const cf__dispatch *d, int64_t stage, const cf__pipe_unit *unit) {
    return !cf__dispatch_is_lone(d, unit) || d->workers[stage].n_dropped < CF__DISPATCH_INPUTS * d->pipe->n_v;
}

/* Returns the cell to evict next; -1: there is none. A cell whose backward could begin is no longer evicted. */
static int32_t cf__dispatch_victim(cf__dispatch *d, int64_t stage) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int32_t cell;
    for (; (cell = cf__dispatch_top(worker, CF__DISPATCH_KEPT)) >= 0;
         cf__dispatch_pop(worker, CF__DISPATCH_KEPT, d->furthest)) {
        int64_t chunk, v = cf__dispatch_stage(d, cf__dispatch_id(cell, CF_F), &chunk);
        const cf__pipe_unit unit = cf__dispatch_unit(d, chunk, v);
        if (cf__pipe_is_dropped(&unit, chunk - unit.first)) continue;
        if (d->missing[cf__dispatch_id(cell, CF__PIPE_BACK)] <= 0) continue;
        return cf__dispatch_can_drop(d, stage, &unit) ? cell : -1;
    }
    return -1;
}

/* Makes the backward of a dropped cell wait for a replay, and the replay wait to be started. I alone frees no place. So
   with split backwards the replay also waits for a W, after which its chain keeps fewer chunks than it may. */
static void cf__dispatch_await_replay(cf__dispatch *d, int64_t stage, int64_t cell) {
    const cf__pipe_unit *unit = cf__schedule_unit(d->maker, cell % d->pipe->n);
    int64_t behind = cf__max(unit->k, 1);
    int waits = d->policy.split && cell % d->pipe->n + behind < unit->first + unit->n &&
                !cf__dispatch_is_taken(d, cell + behind, CF__PIPE_W);
    d->missing[cf__dispatch_id(cell, CF_R)] = (int8_t)(1 + waits);
    d->missing[cf__dispatch_id(cell, CF__PIPE_BACK)]++;
    cf__dispatch_push(&d->workers[stage], CF__DISPATCH_DROPPED, (int32_t)cell, d->nearest);
}

/* Drops kept cells whose forwards have run, until the stage is within its limits. */
static void cf__dispatch_evict(cf__dispatch *d, int64_t stage) {
    cf__dispatch_worker *worker = &d->workers[stage];
    while (worker->room.chunks < 0 || worker->room.bytes < 0) {
        int32_t cell = cf__dispatch_victim(d, stage);
        int64_t chunk, v;
        if (cell < 0) return;
        v = cf__dispatch_stage(d, cf__dispatch_id(cell, CF_F), &chunk);
        worker->room.chunks++;
        worker->room.bytes += cf__schedule_place(d->maker, cf__schedule_unit(d->maker, chunk));
        worker->n_ahead--;
        --*cf__dispatch_kept(d, chunk, v);
        worker->left += d->paths->seconds[CF_R][cell];
        worker->n_dropped += cf__dispatch_is_lone(d, cf__schedule_unit(d->maker, chunk));
        cf__dispatch_await_replay(d, stage, cell);
    }
}

/* Returns whether a stage has a place for a chunk of the unit, or can free one by eviction. */
static int cf__dispatch_has_place(cf__dispatch *d, int64_t stage, const cf__pipe_unit *unit) {
    const cf__pipe_room *room = &d->workers[stage].room;
    return (room->chunks >= 1 && room->bytes >= cf__schedule_place(d->maker, unit)) ||
           cf__dispatch_victim(d, stage) >= 0;
}

/* Returns whether a ready replay may run. It needs a place, and a unit's replays take places in falling order. */
static int cf__dispatch_may_replay(cf__dispatch *d, int64_t stage, int32_t id) {
    int64_t chunk, v = cf__dispatch_stage(d, id, &chunk);
    const cf__pipe_unit unit = cf__dispatch_unit(d, chunk, v);
    if (cf__pipe_is_dropped(&unit, chunk + 1 - unit.first) &&
        !cf__dispatch_is_taken(d, v * d->pipe->n + chunk + 1, CF_R))
        return 0;
    return cf__dispatch_has_place(d, stage, &unit);
}

/* Returns the number of chunks that a unit may keep on virtual stage v in addition to the chains below it: all that its
   path may keep, once those chains have run backward there. 0: they still need places, because their last backward
   there waits for more than the next stage. */
static int64_t cf__dispatch_may_keep(const cf__dispatch *d, const cf__pipe_unit *unit, int64_t v) {
    int64_t last = unit->first + unit->n - 1, k = cf__max(unit->k, 1), child, cell;
    cf__pipe_unit below;
    if (cf__pipe_below(d->pipe, last) == 0) return k;
    child = d->pipe->chunks[last].down - d->pipe->first_chunk;
    cell = v * d->pipe->n + child;
    if (!d->policy.split && cf__dispatch_is_taken(d, cell, CF__PIPE_BACK))
        return cf__max(cf__schedule_path_kept(d->maker), k);
    below = cf__dispatch_unit(d, child, v);
    if (d->missing[cf__dispatch_id(cell, CF__PIPE_BACK)] > 1) return 0;
    return cf__dispatch_is_taken(d, cell, cf__pipe_is_dropped(&below, child - below.first) ? CF_R : CF_F) ? k : 0;
}

/* Starts a replay early if a stage would otherwise be idle and has a spare place: the replay whose backward comes next.
   If virtual stages share places, one more stays free, because that backward may wait for a replay of another row. All
   forwards of the unit must have run, and it must keep fewer chunks than it may. Returns whether a replay was
   started. */
static int cf__dispatch_replays_early(cf__dispatch *d, int64_t stage) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int64_t spare = 1 + d->maker->shares_places, chunk, v, last, behind;
    const cf__pipe_unit *most;
    int frees = d->policy.split ? CF__PIPE_W : CF__PIPE_BACK;
    int32_t cell, replay;
    if (worker->room.chunks < spare) return 0;
    while ((cell = cf__dispatch_top(worker, CF__DISPATCH_DROPPED)) >= 0 &&
           d->missing[cf__dispatch_id(cell, CF_R)] <= 0)
        cf__dispatch_pop(worker, CF__DISPATCH_DROPPED, d->nearest);
    if (cell < 0) return 0;
    replay = cf__dispatch_id(cell, CF_R);
    v = cf__dispatch_stage(d, replay, &chunk);
    most = cf__schedule_unit(d->maker, chunk);
    last = most->first + most->n - 1;
    behind = chunk + cf__dispatch_may_keep(d, most, v);
    if (!cf__dispatch_is_taken(d, cell - chunk + last, CF_F) || behind == chunk) return 0;
    if (behind <= last && !cf__dispatch_is_taken(d, cell - chunk + behind, frees))
        return 0; /* with split backwards it may already have been started, and wait for that W */
    if (!cf__dispatch_may_replay(d, stage, replay)) return 0;
    cf__dispatch_supply(d, replay, v, worker->free_at);
    return 1;
}

/* ---- taking a pass ---- */

/* Sends the result of a pass on virtual stage v to a pass on virtual stage `to`, as cf__clock_send does. */
static void cf__dispatch_pass_on(cf__dispatch *d, int64_t stage, int32_t id, int64_t v, int64_t to, double end,
                                 double transfer) {
    double *link_free = &d->workers[stage].link_free[cf__pipe_queue(d->pipe, v, to < v ? -1 : 1)];
    *link_free = cf__most(end, *link_free) + transfer;
    cf__dispatch_supply(d, id, to, *link_free);
}

/* Supplies the passes that wait for a pass which ends at `end`. Follows the rules as if all chunks were kept: only a
   backward waits for its replay, and replays wait to be started. */
static void cf__dispatch_supply_all(cf__dispatch *d, int64_t stage, const cf__pipe_unit *unit, int place,
                                    int64_t chunk, int64_t v, double end) {
    cf__pipe_need needs[CF__PIPE_MOST_NEEDS];
    cf__pipe_unit shape = *unit;
    int n, i;
    shape.k = place == CF_R ? 0 : shape.n;
    n = cf__pipe_follow(d->pipe, d->policy.split, CF__PIPE_HOLDS_UP, place, &shape, chunk, needs);
    for (i = 0; i < n; i++) {
        int64_t to = v + needs[i].stage;
        int32_t id = cf__dispatch_id(to * d->pipe->n + needs[i].chunk, needs[i].place);
        if (to < 0 || to >= d->pipe->n_v) continue;
        if (needs[i].place == CF_R) continue;
        if (d->stage_of[to] == stage) cf__dispatch_supply(d, id, to, end);
        else cf__dispatch_pass_on(d, stage, id, v, to, end, cf__pipe_transfer_seconds(d->pipe, chunk));
    }
}

/* Counts the place that a pass takes. */
static void cf__dispatch_take_place(cf__dispatch *d, int64_t stage, const cf__pipe_unit *unit, int place,
                                    int64_t chunk, int64_t v) {
    cf__dispatch_worker *worker = &d->workers[stage];
    if (!cf__pipe_keeps(unit, place, chunk)) return;
    worker->room.chunks--;
    worker->room.bytes -= cf__schedule_place(d->maker, unit);
    if (place == CF_F) cf__dispatch_push(worker, CF__DISPATCH_KEPT, (int32_t)(v * d->pipe->n + chunk), d->furthest);
    cf__dispatch_evict(d, stage);
}

/* Frees the place of a chunk and its bytes besides the place. If backwards are split, W frees all bytes, and a replay
   may have waited for that W. */
static void cf__dispatch_give_back(cf__dispatch *d, int64_t stage, const cf__pipe_unit *unit, int64_t chunk, int64_t v,
                                   double end) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int64_t before = chunk - cf__max(cf__schedule_unit(d->maker, chunk)->k, 1);
    int32_t replay = cf__dispatch_id(v * d->pipe->n + before, CF_R);
    worker->room.chunks++;
    if (d->maker->tightest.bytes < INT64_MAX) {
        worker->free_bytes += cf__schedule_beside(d->maker, unit, chunk - unit->first).bytes;
        worker->room.bytes += cf__schedule_gives(d->maker, unit, chunk - unit->first, 1).bytes;
    }
    worker->n_dropped -= unit->k == 0 && cf__dispatch_is_lone(d, unit);
    if (d->policy.split && before >= unit->first && d->missing[replay] > 0) cf__dispatch_supply(d, replay, v, end);
}

/* Runs a pass on a free stage. */
static void cf__dispatch_take(cf__dispatch *d, int64_t stage, int32_t id) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int64_t chunk, v = cf__dispatch_stage(d, id, &chunk), cell = v * d->pipe->n + chunk;
    int place = cf__dispatch_place(id);
    double end = d->now + d->paths->seconds[place][cell];
    cf__pipe_unit unit = cf__dispatch_unit(d, chunk, v);
    cf__dispatch_take_place(d, stage, &unit, place, chunk, v);
    unit = cf__dispatch_unit(d, chunk, v); /* taking the place may have evicted one of its chunks */
    worker->done[worker->n_done++] = id;
    d->missing[id] = CF__DISPATCH_TAKEN;
    d->n_left -= place != CF_R; /* each R comes before a backward that is counted */
    worker->free_at = end;
    worker->ready -= d->paths->seconds[place][cell];
    worker->left -= d->paths->seconds[place][cell];
    d->least = cf__most(d->least, end + worker->left);
    worker->n_forwards += place == CF_F;
    if (place == CF_F || place == CF__PIPE_BACK) {
        d->rows[v].n_open += place == CF_F ? 1 : -1;
        worker->n_ahead += (place == CF_F ? 1 : -1) * cf__pipe_keeps(&unit, CF_F, chunk);
    }
    d->makespan = cf__most(d->makespan, end);
    if (end + d->paths->tail[place][cell] > d->give_up_at || end + worker->left > d->give_up_at * (1 + 1e-9))
        d->makespan = DBL_MAX; /* too late */
    if (place == CF__PIPE_BACK) d->rows[v].state += d->pipe->chunks[chunk].state;
    if (place == (d->policy.split ? CF__PIPE_W : CF__PIPE_BACK))
        cf__dispatch_give_back(d, stage, &unit, chunk, v, end);
    cf__dispatch_supply_all(d, stage, &unit, place, chunk, v, end);
    cf__dispatch_set_wake(d, stage, worker->free_at);
}

/* ---- choosing a pass ---- */

/* Returns the more urgent of two passes, or the first if they are equally urgent; -1 means no pass. */
static int32_t cf__dispatch_prefer(const cf__dispatch *d, int32_t a, int32_t b) {
    if (a < 0 || b < 0) return a < 0 ? b : a;
    return d->urgency[a] <= d->urgency[b] ? a : b;
}

/* Returns whether a stage has as many forwards ahead of its backwards as its turns allow: policy.turns on the first
   stage, one fewer on each later stage or, with several rows, two fewer. In a V all stages have the same number. */
static int cf__dispatch_is_ahead(const cf__dispatch *d, int64_t stage) {
    int64_t less = d->pipe->shape.n_virtual == 1 ? stage : 2 * stage;
    if (d->pipe->shape.placement == CF_PLACEMENT_V) less = 0;
    return d->workers[stage].n_ahead >= cf__max(d->policy.turns - less, 1);
}

/* Returns the room that a unit must leave for later rows when it starts on virtual stage v. Per row it is the room of a
   unit (in trees, of a path) minus the room that the path already holds. A strict order leaves none, because it
   determines which pass comes first. */
static cf__pipe_room cf__dispatch_leaves(const cf__dispatch *d, int64_t stage, int64_t v) {
    const cf__schedule_maker *m = d->maker;
    cf__pipe_room leaves = {0, 0, 0};
    int64_t row = d->row_of[v] + 1, end = cf__dispatch_is_strict(d) ? row : m->desc.shape.n_virtual;
    leaves.chunks = (end - row) * d->most.chunks;
    leaves.bytes = (end - row) * d->most.bytes;
    for (; row < end && d->pipe->plan->order != NULL; row++) {
        int64_t u = d->rows[cf__pipe_at(d->pipe, row, stage)].n_started;
        cf__pipe_room above;
        if (CF__NEVER(u >= m->n_units)) break; /* a later row has never started more units than this one */
        above = cf__pattern_held_above(m, &m->units[u], d->policy.turns > 0);
        cf__room_add(&leaves, &above, -1);
    }
    return leaves;
}

/* Returns whether a unit can start on virtual stage v. It needs its bytes and one place. With trees, all units before
   it must have started. For a standalone chunk that cannot be dropped, that place must already be free. (Its backward
   follows at once on the last virtual stage, so there it is not dropped.) With turns all places must be free. With
   beats, whole backwards and a limit, no virtual stage may have more chunks in progress than its beats allow. */
static int cf__dispatch_may_start(cf__dispatch *d, int64_t stage, const cf__pipe_unit *unit, int64_t v) {
    const cf__dispatch_worker *worker = &d->workers[stage];
    cf__pipe_room takes, leaves;
    if (d->pipe->plan->order != NULL && d->maker->unit_of[unit->first] != d->rows[v].n_started) return 0;
    if (v < d->pipe->shape.n_stages && d->policy.turns > 0 && !d->follows && cf__dispatch_is_ahead(d, stage) &&
        !cf__pipe_has_parent(d->pipe, unit->first))
        return 0;
    if (d->policy.beat > 0 && !d->policy.split && cf__schedule_is_limited(d->maker) &&
        (double)d->rows[v].n_open >=
            cf__product(d->policy.beat, cf__dispatch_way_to(d, CF__PIPE_BACK, v) - cf__dispatch_way_to(d, CF_F, v)))
        return 0;
    takes = cf__schedule_takes(d->maker, unit, cf__dispatch_places(d, unit->k));
    leaves = cf__dispatch_leaves(d, stage, v);
    if (takes.state > d->rows[v].state || takes.bytes > worker->free_bytes - leaves.bytes) return 0;
    if (d->policy.turns > 0)
        return takes.chunks <= worker->room.chunks - leaves.chunks && takes.bytes <= worker->room.bytes - leaves.bytes;
    return !cf__dispatch_is_lone(d, unit) ||
           (v < d->pipe->n_v - 1 && cf__dispatch_can_drop(d, stage, unit)) ||
           cf__dispatch_has_place(d, stage, unit);
}

/* Returns the forward to take next: of a unit that has started, or the first forward of a unit that may start on its
   row; -1: none. */
static int32_t cf__dispatch_best_forward(cf__dispatch *d, int64_t stage) {
    const cf__dispatch_worker *worker = &d->workers[stage];
    int32_t best = cf__dispatch_top(worker, CF__DISPATCH_BEGUN);
    int64_t row;
    for (row = 0; row < d->maker->desc.shape.n_virtual; row++) {
        int32_t id = cf__dispatch_top(worker, CF__DISPATCH_FRESH + row);
        int64_t v, chunk;
        if (id < 0) continue;
        v = cf__dispatch_stage(d, id, &chunk);
        if (cf__dispatch_may_start(d, stage, cf__schedule_unit(d->maker, chunk), v))
            best = cf__dispatch_prefer(d, best, id);
    }
    return best;
}

/* Returns the forward or backward that is next in a strict order; -1: all have been taken. */
static int32_t cf__dispatch_due(const cf__dispatch *d, cf__dispatch_worker *worker) {
    int32_t due;
    while ((due = cf__dispatch_top(worker, CF__DISPATCH_PLAN)) >= 0 && d->missing[due] == CF__DISPATCH_TAKEN)
        cf__dispatch_pop(worker, CF__DISPATCH_PLAN, d->urgency);
    return due;
}

/* Returns whether a stage stays idle instead of running a pass, because a better pass comes soon and the wait delays
   nothing else. If it follows an order, a W waits if the next pass comes before the W would end. Otherwise a pass waits
   for up to half of its own time: any pass for a backward, and a W for any other pass. Only for split backwards, whose
   W fill the gaps. */
static int cf__dispatch_waits(const cf__dispatch *d, int64_t stage, int32_t id) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int place = cf__dispatch_place(id), strict = cf__dispatch_is_strict(d), is_weight = place == CF__PIPE_W;
    double seconds = d->paths->seconds[place][cf__dispatch_cell(id)];
    int32_t next;
    if (!d->policy.split || place == CF__PIPE_BACK || (strict && !(d->follows && is_weight))) return 0;
    next = strict ? cf__dispatch_due(d, worker) : cf__dispatch_top(worker, CF__DISPATCH_COMING);
    if (next < 0 || d->missing[next] != 0 || d->ready_at[next] <= d->now) return 0;
    if (d->ready_at[next] >= d->now + (strict ? seconds : seconds / 2)) return 0;
    if (d->ready_at[next] + worker->left > d->least * (1 + 1e-9)) return 0;
    place = cf__dispatch_place(next);
    if (place == CF_F) return is_weight && worker->room.chunks >= 1;
    return place == CF__PIPE_BACK || (is_weight && place != CF__PIPE_W);
}

/* Returns whether a stage runs a W because the next forward in order has no room. */
static int cf__dispatch_makes_room(const cf__dispatch *d, int64_t stage, int32_t forward) {
    int64_t row;
    if (d->follows || d->policy.turns == 0 || forward >= 0 || cf__dispatch_is_ahead(d, stage)) return 0;
    for (row = 0; row < d->pipe->shape.n_virtual; row++)
        if (cf__dispatch_top(&d->workers[stage], CF__DISPATCH_FRESH + row) >= 0) return 1;
    return 0;
}

/* Returns whether a forward goes before a backward or replay that could run, because the next stage has too little work
   until both have run. If the forward evicts a chunk, it costs a replay, so only a sixth of the lead counts. */
static int cf__dispatch_feeds(const cf__dispatch *d, int64_t stage, int32_t back, int32_t forward) {
    const cf__dispatch_worker *worker = &d->workers[stage], *next = worker + 1;
    int64_t chunk, v = cf__dispatch_stage(d, forward, &chunk);
    const cf__pipe_unit unit = cf__dispatch_unit(d, chunk, v);
    int evicts = worker->room.chunks < 1 && cf__pipe_keeps(&unit, CF_F, chunk);
    double lead = cf__dispatch_lead / (double)d->pipe->shape.n_virtual;
    double at_hand = d->paths->seconds[cf__dispatch_place(back)][cf__dispatch_cell(back)] +
                     d->paths->seconds[CF_F][cf__dispatch_cell(forward)];
    if (stage + 1 == d->pipe->shape.n_stages) return 0;
    if (worker->n_forwards - next->n_forwards >= CF__DISPATCH_AHEAD) return 0;
    return cf__most(next->free_at - d->now, 0) + next->ready <
           cf__product(evicts ? lead / 6 : lead, at_hand);
}

/* Returns whether a backward or replay goes before a forward. */
static int cf__dispatch_goes_first(const cf__dispatch *d, int64_t stage, int32_t id, int32_t forward) {
    if (d->follows || d->policy.beat > 0) return d->urgency[id] <= d->urgency[forward];
    if (d->policy.turns > 0) return cf__dispatch_is_ahead(d, stage);
    return d->policy.starves || !cf__dispatch_feeds(d, stage, id, forward);
}

/* Returns the pass that a free stage prefers; -1: none is ready. Replays go after all ready backwards, because these
   free places. */
static int32_t cf__dispatch_best(cf__dispatch *d, int64_t stage) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int32_t weight = cf__dispatch_top(worker, CF__DISPATCH_WEIGHTS);
    int32_t replay = cf__dispatch_top(worker, CF__DISPATCH_REPLAYS);
    int32_t back = cf__dispatch_top(worker, CF__DISPATCH_RETURNING), best;
    int32_t forward = cf__dispatch_best_forward(d, stage);
    if (weight >= 0 && cf__dispatch_makes_room(d, stage, forward)) return weight;
    if (replay >= 0 && !cf__dispatch_may_replay(d, stage, replay)) replay = -1;
    best = back >= 0 ? back : replay;
    if (best < 0 || (forward >= 0 && !cf__dispatch_goes_first(d, stage, best, forward))) best = forward;
    if (best >= 0 && best != replay && cf__dispatch_is_strict(d) &&
        d->urgency[best] > d->urgency[cf__dispatch_due(d, worker)])
            best = replay; /* another forward or backward is before `best` in the strict order; replays are not in that
                              order */
    if (best >= 0 && best == forward && weight >= 0 && worker->room.chunks < 1) return weight;
    return best >= 0 ? best : weight;
}

/* Removes a chosen pass from its queue. If it is a unit's first forward on a virtual stage, starts the unit there. */
static void cf__dispatch_claim(cf__dispatch *d, int64_t stage, int32_t id) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int64_t chunk, v = cf__dispatch_stage(d, id, &chunk), queue = CF__DISPATCH_BEGUN + cf__dispatch_place(id), i;
    int starts = cf__dispatch_top(worker, queue) != id;
    const cf__pipe_unit *unit = cf__schedule_unit(d->maker, chunk);
    cf__pipe_room takes;
    cf__dispatch_pop(worker, starts ? CF__DISPATCH_FRESH + d->row_of[v] : queue, d->urgency);
    if (!starts) return;
    takes = cf__schedule_takes(d->maker, unit, 0);
    *cf__dispatch_kept(d, chunk, v) = unit->k;
    d->rows[v].state -= takes.state;
    cf__room_add(&worker->room, &takes, -1);
    worker->free_bytes -= takes.bytes;
    d->rows[v].n_started++;
    for (i = 0; i < unit->n - unit->k; i++)
        cf__dispatch_await_replay(d, stage, v * d->pipe->n + unit->first + i);
    cf__dispatch_evict(d, stage);
}

/* Lets a free stage choose among the passes that have arrived: it takes one, or waits for the next to come. */
static void cf__dispatch_decide(cf__dispatch *d, int64_t stage) {
    cf__dispatch_worker *worker = &d->workers[stage];
    int32_t id, coming;
    while ((coming = cf__dispatch_top(worker, CF__DISPATCH_COMING)) >= 0 && d->ready_at[coming] <= d->now)
        cf__dispatch_admit(d, stage, cf__dispatch_pop(worker, CF__DISPATCH_COMING, d->ready_at));
    id = cf__dispatch_best(d, stage);
    if (id < 0 && cf__dispatch_replays_early(d, stage)) id = cf__dispatch_best(d, stage);
    if (id >= 0 && cf__dispatch_waits(d, stage, id)) id = -1;
    if (id >= 0) {
        cf__dispatch_claim(d, stage, id);
        cf__dispatch_take(d, stage, id);
        return;
    }
    coming = cf__dispatch_top(worker, CF__DISPATCH_COMING);
    cf__dispatch_set_wake(d, stage, coming >= 0 ? d->ready_at[coming] : DBL_MAX);
}

/* ---- the whole dispatch ---- */

/* Runs the dispatch; returns whether it finished. It gives up as soon as a pass comes too late for a makespan of
   `give_up_at`, or a stage has too much left to run. */
static int cf__dispatch_run(cf__dispatch *d, double give_up_at) {
    cf__dispatch_start(d);
    d->least = 0;
    d->give_up_at = give_up_at;
    for (;;) {
        int64_t stage = d->winners[1];
        d->now = d->wake[stage];
        if (d->now >= DBL_MAX) return d->n_left == 0;
        cf__dispatch_decide(d, stage);
        if (d->makespan > d->give_up_at) return 0;
    }
}

/* Writes the dispatched passes into a schedule. */
static void cf__dispatch_write(const cf__dispatch *d, cf_schedule *schedule) {
    int64_t s, i;
    schedule->n_actions = schedule->first[0] = 0;
    for (s = 0; s < d->pipe->shape.n_stages; schedule->first[++s] = schedule->n_actions)
        for (i = 0; i < d->workers[s].n_done; i++) {
            int32_t id = d->workers[s].done[i];
            int place = cf__dispatch_place(id);
            int64_t chunk, v = cf__dispatch_stage(d, id, &chunk);
            cf__pipe_unit unit = cf__dispatch_unit(d, chunk, v);
            cf__schedule_put(schedule, (cf_pass)cf__pipe_pass_at(place, d->policy.split), d->pipe->first_chunk + chunk,
                             v, cf__pipe_keeps(&unit, place, chunk));
        }
}

/* ================================================================================================================
   >>search    the best of many schedules

   A core search looks for a schedule with either whole or split backwards. It tries the fixed kinds, then dispatch with
   backwards first, six beats on several rows (and two steep ones in a V), turns for split backwards without chains, and
   a second order of units. From the best of these it takes random steps: a step moves a unit in the order, or changes
   beat or turns, and is kept if the makespan does not grow. With units of 4, 3, 2, 1 chunks, this walk may go

       4 3 2 1: 40    3 4 2 1: 41, undone    4 3 1 2: 38, kept    1 4 3 2: 38, kept    1 3 4 2: 37, kept

   The number of tries only says when to stop: the candidates and their order are always the same. So more tries never
   give a longer schedule. Split backwards, if allowed, come after whole ones, so split_backward never gives a longer
   schedule either. A core search is skipped if its own lower bound says that it cannot win.

   cf__search_keeps counts the load of every candidate, however it was made, and refuses it if any stage exceeds the
   limits. So a mistake about room costs time, but never breaks a limit.
   ================================================================================================================
   */

typedef struct cf__search {
    cf__schedule_maker maker;
    cf_schedule *schedule;  /* the best so far */
    cf_schedule trial;      /* the candidate */
    cf__clock clock;        /* times it */
    uint16_t *listed;       /* (cells) for the clock */
    int64_t *state;         /* (n_v) tokens of state of a candidate */
    cf__bounds bounds;
    cf__dispatch dispatch;
    uint64_t random;
    int64_t max_tries, n_tried; /* of the core search */
    double goal;            /* a lower bound: no core search can find a shorter schedule */
    double makespan;        /* makespan of the core search's best dispatch */
    cf__dispatch_policy best_policy; /* policy of that dispatch */
    cf_search_report report;
} cf__search;

/* Returns the default number of candidates of one core search. Dispatch takes some 150 ns per pass, plus the time of 64
   passes. K = 1 gets more candidates than larger K, whose chains replay less. Limits from the caller get more than
   default ones. If fewer chunks fit than there are stages, the number falls in proportion. Large problems get the fixed
   kinds and two dispatches. */
static int64_t cf__search_default_tries(const cf__schedule_maker *m, int split) {
    int64_t passes = m->pipe.n * m->pipe.n_v * (3 + split) + 64, stages = m->desc.shape.n_stages;
    int64_t room = 0, max_tries, s;
    const cf_limits *given = &m->desc.limits;
    int is_given = given->chunks != 0 || given->chunks_by_stage != NULL || cf__schedule_has_bytes(&m->desc);
    if (m->pipe.n * m->pipe.n_v <= 32) return 5000; /* checkable by hand, so the schedule should be optimal */
    for (s = 0; s < stages; s++) {
        cf__pipe_room limits = cf__schedule_limits_of(m, s);
        if (limits.bytes < INT64_MAX) limits.chunks = cf__min(limits.chunks, limits.bytes / cf__max(m->most.bytes, 1));
        room = cf__max(room, limits.chunks);
    }
    max_tries = (is_given ? 600000 : 360000) / passes;
    max_tries = cf__min(10000, cf__max(max_tries, cf__min(40, 1000000 / passes)));
    if (m->desc.shape.k > 1) max_tries -= max_tries / 4;
    return cf__max(6, max_tries * cf__min(room, stages) / stages);
}

/* Returns whether candidates are timed: to be compared, or for the report of a fixed kind. */
static int cf__search_compares(const cf__schedule_maker *m) {
    return m->desc.kind == CF_SCHEDULE_BEST || m->desc.kind == CF_SCHEDULE_PAPER || m->desc.report != NULL;
}

static void cf__search_scratch(void *job, cf__carver *carver) {
    cf__search *search = (cf__search *)job;
    cf__schedule_maker *m = &search->maker;
    cf__pipe_layout(&m->pipe, carver);
    cf__schedule_layout_maker(m, carver);
    search->state = (int64_t *)cf__take(carver, m->pipe.n_v, sizeof(int64_t));
    if (cf__search_compares(m)) {
        search->trial.first = (int64_t *)cf__take(carver, m->desc.shape.n_stages + 1, sizeof(int64_t));
        search->trial.actions = (cf_action *)cf__take(carver, m->n_actions, sizeof(cf_action));
        search->clock.start = (double *)cf__take(carver, m->n_actions, sizeof(double));
        search->clock.end = (double *)cf__take(carver, m->n_actions, sizeof(double));
        search->listed = (uint16_t *)cf__take(carver, m->pipe.n * m->pipe.n_v, sizeof(uint16_t));
        cf__clock_layout(&search->clock, &m->pipe, carver);
    }
    if (m->desc.kind < CF_SCHEDULE_INTERLEAVED) return;
    cf__bounds_layout(&search->bounds, &m->pipe, cf__schedule_splits(&m->desc), carver);
    if (!m->desc.shape.forward_only) cf__dispatch_layout(&search->dispatch, m, carver);
}

static int64_t cf__search_below(cf__search *search, int64_t n) {
    return (int64_t)(cf__draw(&search->random) % (uint64_t)n);
}

/* Returns whether the best schedule so far is as short as a lower bound. */
static int cf__search_reaches(const cf__search *search, double bound) {
    return search->report.makespan <= bound * (1 + 1e-12);
}

static int cf__search_is_over(const cf__search *search) {
    return search->n_tried >= search->max_tries || cf__search_reaches(search, search->goal);
}

/* ---- candidates ---- */

/* Returns whether the candidate never exceeds the limits. */
static int cf__search_keeps(const cf__search *search, const cf_schedule *trial) {
    const cf__pipeline *pipe = &search->maker.pipe;
    const cf_held_bytes *bytes = &search->maker.desc.limits.per_token;
    int64_t s, i;
    memset(search->state, 0, (size_t)pipe->n_v * sizeof *search->state);
    for (s = 0; s < pipe->shape.n_stages; s++) {
        const cf__pipe_room limits = cf__schedule_limits_of(&search->maker, s);
        cf__pipe_held held;
        if (cf__min(cf__min(limits.chunks, limits.state), limits.bytes) == INT64_MAX) continue;
        memset(&held, 0, sizeof held);
        for (i = trial->first[s]; i < trial->first[s + 1]; i++) {
            const cf_action *a = &trial->actions[i];
            const cf_chunk *c = &pipe->plan->chunks[a->chunk];
            int64_t *state = &search->state[a->stage], before = held.load.state_tokens;
            cf__pipe_hold(pipe, &held, a, c);
            *state += held.load.state_tokens - before;
            if (held.live > limits.chunks || *state > limits.state) return 0;
            if (limits.bytes < INT64_MAX && cf__pipe_held_bytes(&held.load, bytes) > limits.bytes) return 0;
            before = held.load.state_tokens;
            cf__pipe_let_go(pipe, &held, a, c);
            *state += held.load.state_tokens - before;
        }
    }
    return 1;
}

/* Keeps the candidate if it is the best so far. Dispatch sometimes waits, so the clock may find a shorter time. */
static void cf__search_judge(cf__search *search, cf_schedule_kind kind) {
    const cf__pipeline *pipe = &search->maker.pipe;
    cf_search_report *report = &search->report;
    const cf_schedule *trial = &search->trial;
    double makespan;
    if (!cf__search_keeps(search, trial)) return;
    cf__clock_list(&search->clock, search->listed);
    cf__clock_run(&search->clock);
    makespan = search->clock.makespan;
    if (kind != CF_SCHEDULE_BEST && makespan < report->fixed_makespan) {
        report->best_fixed = kind;
        report->fixed_makespan = makespan;
    }
    if (!(makespan < report->makespan)) return;
    report->makespan = makespan;
    report->n_improved++;
    search->schedule->n_actions = trial->n_actions;
    memcpy(search->schedule->first, trial->first, (size_t)(pipe->shape.n_stages + 1) * sizeof *trial->first);
    memcpy(search->schedule->actions, trial->actions, (size_t)trial->n_actions * sizeof *trial->actions);
}

/* Makes dispatch follow the order in which the policy would take passes at equal costs: each pass lasts as long as its
   chunk's forward on the first virtual stage, and transfers take no time. Returns whether there is such an order. */
static int cf__search_plan(cf__search *search) {
    cf__dispatch *d = &search->dispatch;
    cf__pipeline equal = search->maker.pipe;
    const cf__pipe_costs *first = equal.by_stage != NULL ? &equal.by_stage[0] : &equal.all;
    int64_t s, i;
    int made;
    memset(&equal.timing, 0, sizeof equal.timing);
    equal.timing.all.forward = first->of[CF_F];
    equal.by_stage = NULL;
    cf__pipe_fill(&equal);
    cf__bounds_find_paths(&search->bounds, &equal, d->policy.split, equal.shape.k, 0);
    d->pipe = &equal;
    made = cf__dispatch_run(d, DBL_MAX);
    for (s = 0; s < equal.shape.n_stages; s++)
        for (i = 0; i < d->workers[s].n_done; i++) d->urgency[d->workers[s].done[i]] = (double)i;
    d->pipe = &search->maker.pipe;
    d->follows = 1;
    cf__bounds_find_paths(&search->bounds, d->pipe, d->policy.split, equal.shape.k, 0);
    return made;
}

/* Runs dispatch with the present units and policy; returns whether its schedule takes no longer than `most`. */
static int cf__search_try_dispatch(cf__search *search, double most) {
    cf__dispatch *d = &search->dispatch;
    search->n_tried++;
    search->report.n_tried++;
    d->follows = 0;
    if (d->policy.turns > 0 && !cf__search_plan(search)) return 0;
    if (!cf__dispatch_run(d, most)) return 0;
    if (!(d->makespan < search->makespan)) return 1;
    search->makespan = d->makespan;
    search->best_policy = d->policy;
    cf__dispatch_write(d, &search->trial);
    cf__search_judge(search, CF_SCHEDULE_BEST);
    return 1;
}

/* ---- the fixed kinds ---- */

/* Makes a schedule by the rules of a fixed kind with dispatch: forwards and backwards alternate. The number of forwards
   ahead is that of 1F1B or, on several rows, Megatron's warm-up plus one; in a V only room limits it. Returns whether
   dispatch finished. */
static int cf__search_dispatch_fixed(cf__search *search, cf_schedule_kind kind, cf_schedule *schedule) {
    cf__schedule_maker *m = &search->maker;
    cf__dispatch *d = &search->dispatch;
    int64_t p = m->desc.shape.n_stages, rows = m->desc.shape.n_virtual;
    int made;
    memset(&d->policy, 0, sizeof d->policy);
    d->follows = 0;
    d->policy.split = kind == CF_SCHEDULE_ZERO_BUBBLE;
    d->policy.turns = rows == 1 ? p : 2 * (p - 1) + (rows - 1) * p + 1;
    if (m->pipe.shape.placement == CF_PLACEMENT_V) d->policy.turns = p * rows;
    d->full = d->policy.split ? cf__max(m->pipe.n_v, m->most_kept * rows) : 0;
    made = cf__dispatch_run(d, DBL_MAX);
    d->full = 0;
    if (made) cf__dispatch_write(d, schedule);
    return made;
}

/* Writes a fixed schedule: a pattern, or Megatron's rounds, or a dispatch by the kind's rules. If these find no room,
   units run one by one. */
static void cf__search_write_fixed(cf__search *search, cf_schedule_kind kind, int runs_ahead, cf_schedule *schedule) {
    cf__schedule_maker *m = &search->maker;
    int is_made = 1;
    m->pattern.kind = kind;
    m->pattern.runs_ahead = runs_ahead;
    cf__schedule_collect_units(m);
    if (kind == CF_SCHEDULE_INTERLEAVED && cf__schedule_has_rounds(m)) {
        cf__schedule_write_rounds(m, schedule);
    } else if (kind >= CF_SCHEDULE_INTERLEAVED) {
        is_made = cf__search_dispatch_fixed(search, kind, schedule);
    } else if (cf__schedule_fits(m)) {
        if (kind == CF_SCHEDULE_1F1B) cf__schedule_sort_units(m);
        cf__pattern_build(m);
        cf__pattern_write(m, schedule);
    } else {
        is_made = 0;
    }
    if (!is_made || !cf__search_keeps(search, schedule)) cf__alone_write(m, schedule);
}

/* Tries a fixed schedule as a candidate. */
static void cf__search_try_fixed(cf__search *search, cf_schedule_kind kind, int runs_ahead) {
    search->n_tried++;
    search->report.n_tried++;
    cf__search_write_fixed(search, kind, runs_ahead, &search->trial);
    cf__search_judge(search, kind);
}

/* Tries the fixed schedules. On one stage both orders of `paper` take the same time except for rounding, so only one is
   tried. */
static void cf__search_try_all_fixed(cf__search *search, int split) {
    int i;
    for (i = 0; i < 2 && search->maker.desc.shape.n_virtual == 1 && !split; i++) {
        if (i == 0 || search->maker.desc.shape.n_stages > 1) cf__search_try_fixed(search, CF_SCHEDULE_PAPER, i);
        if (search->maker.desc.kind == CF_SCHEDULE_BEST)
            cf__search_try_fixed(search, i == 0 ? CF_SCHEDULE_1F1B : CF_SCHEDULE_GPIPE, 0);
    }
    if (split) cf__search_try_fixed(search, CF_SCHEDULE_ZERO_BUBBLE, 0);
    else if (search->maker.desc.shape.n_virtual > 1) cf__search_try_fixed(search, CF_SCHEDULE_INTERLEAVED, 0);
}

/* ---- where a walk begins ---- */

/* Sets a starting order: the most expensive units first. With `cheap_ends` cheap units go to both ends, because short
   chunks fill and drain the pipeline sooner. */
static void cf__search_set_order(cf__schedule_maker *m, int cheap_ends) {
    int64_t n = m->n_units, i;
    cf__schedule_collect_units(m);
    cf__schedule_sort_units(m);
    if (!cheap_ends || m->pipe.plan->order != NULL) return;
    for (i = 0; i < n; i++) m->spare[i % 2 == 0 ? n - 1 - i / 2 : i / 2] = m->units[n - 1 - i];
    memcpy(m->units, m->spare, (size_t)n * sizeof *m->units);
}

/* Tries a policy. The best policy so far stays set. */
static void cf__search_try_policy(cf__search *search, cf__dispatch_policy policy) {
    if (cf__search_is_over(search)) return;
    search->dispatch.policy = policy;
    (void)cf__search_try_dispatch(search, search->makespan);
    search->dispatch.policy = search->best_policy;
}

/* Tries the policies from which a walk may start:
     - backwards first; if fewer chunks fit than there are stages, also without a lead, because with one equal chunks
       take up to twice as long;
     - on several rows, beats: from the shortest that keeps a stage always busy to four times as long;
     - for split backwards without chains, turns up to the room. In a V also two steep beats, which keep half as much
       as 1F1B (V-Half; Qi et al., Pipeline Parallelism with Controllable Memory, 2024). */
static void cf__search_try_policies(cf__search *search) {
    static const double beats[] = {3, 2, 1, 1.2, 1.5, 4, 1, 1.2}; /* the last two are steep */
    const cf__schedule_maker *m = &search->maker;
    const cf__dispatch_policy plain = search->dispatch.policy;
    cf__dispatch_policy policy = plain;
    int alone = policy.split && m->n_units == m->pipe.n && m->pipe.plan->order == NULL, i;
    int n_beats = alone && m->pipe.shape.placement == CF_PLACEMENT_V ? 8 : 6;
    int64_t most = 0, s;
    cf__search_try_policy(search, policy);
    policy.starves = m->tightest.chunks < m->desc.shape.n_stages;
    if (policy.starves) cf__search_try_policy(search, policy);
    policy.starves = 0;
    for (i = 0; i < n_beats && m->desc.shape.n_virtual > 1; i++) {
        policy.steep = i < 6 ? 0 : 8 - i;
        policy.beat = beats[i] / (double)(3 * m->desc.shape.n_virtual);
        cf__search_try_policy(search, policy);
    }
    policy = plain;
    for (s = 0; s < m->desc.shape.n_stages; s++) most = cf__max(most, cf__schedule_limits_of(m, s).chunks);
    most = cf__min(cf__min(most, m->all.chunks), 2 * m->pipe.n_v);
    for (i = 0; i < 4 && alone; i++) {
        policy.turns = i == 3 ? cf__max(most / 2 + most / 4, 1) : cf__max(most - i, 1);
        cf__search_try_policy(search, policy);
    }
}

/* ---- the walk ---- */

/* Finds the tree of the unit at `at`: its first unit, and the unit after its last. */
static void cf__search_whole(const cf__schedule_maker *m, int64_t at, int64_t *begin, int64_t *end) {
    for (*begin = at; cf__pipe_has_parent(&m->pipe, m->units[*begin].first);) --*begin;
    for (*end = at + 1; *end < m->n_units && cf__pipe_has_parent(&m->pipe, m->units[*end].first);) ++*end;
}

/* Moves the unit at `from`, with its tree, to the place of the unit at `to` and its tree; units between them close up.
   Afterwards `spare` has the old order. */
static void cf__search_shift(cf__schedule_maker *m, int64_t from, int64_t to) {
    const cf__pipe_unit *old = m->spare;
    int64_t begin, end, first, last, n;
    memcpy(m->spare, m->units, (size_t)m->n_units * sizeof *old);
    cf__search_whole(m, from, &begin, &end);
    cf__search_whole(m, to, &first, &last);
    n = end - begin;
    if (begin < first) memcpy(&m->units[begin], &old[end], (size_t)(last - end) * sizeof *old);
    else memcpy(&m->units[first + n], &old[first], (size_t)(begin - first) * sizeof *old);
    memcpy(&m->units[begin < first ? last - n : first], &old[begin], (size_t)n * sizeof *old);
}

/* Changes the beat or the turns. */
static void cf__search_change_policy(cf__search *search) {
    cf__dispatch_policy *policy = &search->dispatch.policy;
    int64_t drawn = cf__search_below(search, 1 << 20);
    if (policy->beat > 0) policy->beat *= 0.75 + (double)drawn / (1 << 21);
    else if (policy->turns > 0) policy->turns = cf__max(policy->turns + (drawn & 1 ? 1 : -1), 1);
}

/* Walks from the present candidate: mostly shifts of units, and sometimes changes of policy. */
static void cf__search_walk(cf__search *search) {
    cf__schedule_maker *m = &search->maker;
    double current = search->makespan;
    int64_t n = m->n_units;
    while (!cf__search_is_over(search)) {
        cf__dispatch_policy policy = search->dispatch.policy;
        int moves = policy.beat > 0 || policy.turns > 0;
        int shift = (cf__search_below(search, 16) < 12 || !moves) && n > 1;
        int64_t from = shift ? cf__search_below(search, n) : 0;
        if (shift) cf__search_shift(m, from, (from + 1 + cf__search_below(search, n - 1)) % n);
        else cf__search_change_policy(search);
        if (cf__search_try_dispatch(search, current)) {
            current = search->dispatch.makespan;
            continue;
        }
        if (shift) memcpy(m->units, m->spare, (size_t)n * sizeof *m->units);
        search->dispatch.policy = policy;
    }
}

/* ---- core searches, and all of them ---- */

/* Returns the strongest bound of the schedules that a core search may find, or a bound that reaches `enough`. */
static double cf__search_find_bound(cf__search *search, int split, double enough) {
    cf__schedule_maker *m = &search->maker;
    int64_t s;
    for (s = 0; s < m->desc.shape.n_stages; s++) search->bounds.limits[s] = cf__schedule_limits_of(m, s).chunks;
    cf__bounds_find(&search->bounds, &m->pipe, split, enough);
    return cf__bounds_strongest(&search->bounds);
}

/* Runs a core search, unless its bound says that it cannot win. */
static void cf__search_core(cf__search *search, int split) {
    cf__schedule_maker *m = &search->maker;
    cf__dispatch_policy policy;
    memset(&policy, 0, sizeof policy);
    if (search->report.makespan < DBL_MAX &&
        cf__search_reaches(search, cf__search_find_bound(search, split, search->report.makespan)))
        return;
    cf__bounds_find_paths(&search->bounds, &m->pipe, split, m->desc.shape.k, 0);
    search->max_tries = m->desc.max_tries > 0 ? m->desc.max_tries : cf__search_default_tries(m, split);
    search->n_tried = 0;
    search->random = 0;
    search->makespan = DBL_MAX;
    cf__search_try_all_fixed(search, split);
    if (cf__search_is_over(search)) return;
    policy.split = split;
    search->dispatch.policy = search->best_policy = policy;
    cf__search_set_order(m, 0);
    cf__search_try_policies(search);
    if (!cf__search_is_over(search)) { /* the better order stays */
        cf__search_set_order(m, 1);
        if (!cf__search_try_dispatch(search, search->makespan * (1 + 1e-9))) cf__search_set_order(m, 0);
    }
    search->dispatch.policy = search->best_policy;
    cf__search_walk(search);
}

static void cf__search_best(cf__search *search) {
    cf__schedule_maker *m = &search->maker;
    cf_search_report *report = &search->report;
    int splits = cf__schedule_splits(&m->desc), split; /* never with forward_only */
    report->max_tries = m->desc.max_tries > 0 ? m->desc.max_tries : cf__search_default_tries(m, splits);
    search->goal = cf__search_find_bound(search, splits ? CF__BOUNDS_EITHER : 0, DBL_MAX);
    if (m->desc.shape.forward_only) { /* forwards alone have only one order */
        report->n_tried++;
        cf__schedule_write_rounds(m, &search->trial);
        cf__search_judge(search, CF_SCHEDULE_BEST);
    } else {
        for (split = 0; split <= splits; split++) cf__search_core(search, split);
    }
    if (report->best_fixed == CF_SCHEDULE_DEFAULT) report->fixed_makespan = report->makespan;
    report->bound = search->goal;
    report->gap = report->bound > 0 ? report->makespan / report->bound - 1 : 0;
}

/* ---- all steps, and the public functions ---- */

/* Opens a search. Reports all errors that need no working space. */
static cf_result cf__search_open(cf__search *search, const cf_plan *plan, const cf_schedule_desc *desc,
                                 cf_error *error) {
    cf__schedule_maker *m = &search->maker;
    memset(search, 0, sizeof *search);
    CF__TRY(cf__plan_check_counts(plan, error));
    if (desc == NULL) return cf__fail_null(error, "desc");
    m->desc = cf_schedule_defaults(desc);
    m->error = error;
    CF__TRY(cf__schedule_check_desc(plan, &m->desc, error));
    CF__TRY(cf__plan_check_units(plan, m->desc.shape.rank, m->desc.shape.rank + 1, error));
    m->pipe = cf__pipe_of(plan, &m->desc.shape, m->desc.timing);
    m->most_kept = cf__min(m->desc.shape.k, cf__schedule_longest(&m->pipe));
    cf__schedule_measure(m);
    cf__schedule_settle(m);
    return cf__schedule_count(m);
}

static cf_block *cf__search_object(void *job, cf__carver *carver) {
    cf__search *search = (cf__search *)job;
    cf__schedule_maker *m = &search->maker;
    cf_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = m->desc.kind;
    schedule.shape = m->desc.shape;
    schedule.n_chunks = m->pipe.plan->n_chunks;
    schedule.n_actions = m->n_actions;
    cf__schedule_mark_limits(m, &schedule.limits);
    search->schedule = cf__schedule_layout(&schedule, carver);
    if (search->schedule == NULL) return NULL;
    *search->schedule = schedule;
    return &search->schedule->block;
}

static void cf__search_write_limits(cf__search *search) {
    cf__schedule_maker *m = &search->maker;
    int64_t s;
    for (s = 0; s < m->desc.shape.n_stages; s++) {
        cf__pipe_room asked = cf__schedule_asked(m, s);
        cf__schedule_put_room(search->schedule, s, &asked);
    }
}

/* Writes actions and first, and sets n_actions to the number written. */
static cf_result cf__search_fill(void *job) {
    cf__search *search = (cf__search *)job;
    cf__schedule_maker *m = &search->maker;
    cf__pipe_fill(&m->pipe);
    CF__TRY(cf__pipe_check_total(&m->pipe, m->error));
    search->dispatch.maker = m;
    search->dispatch.pipe = search->clock.pipe = &m->pipe;
    search->dispatch.paths = &search->bounds.paths;
    search->clock.schedule = &search->trial;
    search->clock.listed = search->listed;
    search->report.makespan = search->report.fixed_makespan = search->makespan = DBL_MAX;
    if (m->desc.kind == CF_SCHEDULE_BEST) {
        cf__search_best(search);
    } else if (m->desc.kind == CF_SCHEDULE_PAPER) {
        cf__search_try_all_fixed(search, 0);
    } else {
        if (m->desc.kind >= CF_SCHEDULE_INTERLEAVED)
            cf__bounds_find_paths(&search->bounds, &m->pipe, cf__schedule_splits(&m->desc), m->desc.shape.k, 0);
        cf__search_write_fixed(search, m->desc.kind, 0, cf__search_compares(m) ? &search->trial : search->schedule);
        if (cf__search_compares(m)) cf__search_judge(search, m->desc.kind);
        search->report.n_improved = 0;
    }
    if (CF__NEVER(cf__search_compares(m) && !(search->report.makespan < DBL_MAX)))
        return cf__refuse(m->error, CF_ERROR_INFEASIBLE, "limit", -1, "no schedule was found that keeps to it");
    if (m->desc.report != NULL) *m->desc.report = search->report;
    cf__search_write_limits(search);
    return CF_OK;
}

static const cf__recipe cf__search_recipe = {"n_actions", 0, cf__search_scratch, NULL, cf__search_object,
                                               cf__search_fill};

CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error) {
    cf__search search;
    CF__TRY(cf__search_open(&search, plan, desc, error));
    return cf__size_job(&cf__search_recipe, &search, bytes, error);
}

CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error) {
    cf__search search;
    CF__TRY(cf__search_open(&search, plan, desc, error));
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__make_into(&cf__search_recipe, &search, memory, bytes, error));
    *out = search.schedule;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error) {
    cf__search search;
    CF__TRY(cf__search_open(&search, plan, desc, error));
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__make(&cf__search_recipe, &search, desc->allocator, error));
    *out = search.schedule;
    return CF_OK;
}

CHUNKFLOW_API void cf_schedule_free(cf_schedule *schedule) {
    if (schedule != NULL) cf__free_object(schedule, &schedule->block);
}

/* ================================================================================================================
   >>check

   First checks each list alone, action by action, in the stage's order. cf_simulate also takes this walk, and counts
   from it what is held at each time. Then checks all lists against each other: they run as far as possible. Every
   finished pass is visible everywhere. If transfers are in the lists, results move only by a rendezvous between two
   stages.
   ================================================================================================================
   */

/* ---- the walk ---- */

/* Bits of a chunk on one virtual stage: one for each pass in the list so far, and these: */
enum {
    CF__CHECK_FORWARDS = 1 << CF_F | 1 << CF_R,
    CF__CHECK_BACKWARDS = 1 << CF_B | 1 << CF_I,
    CF__CHECK_ENDS = 1 << CF_B | 1 << CF_W,  /* passes that free activations */
    CF__CHECK_KEPT_BIT = CF_PASS_COUNT,
    CF__CHECK_KEPT = 1 << CF__CHECK_KEPT_BIT /* a forward has kept the activations */
};

typedef struct cf__checker {
    const cf__pipeline *pipe;     /* only for its counts: this section states the rules independently */
    const cf_schedule *schedule;
    const cf_limits *limits;      /* K and these limits must hold, and error->item is a position in a stage's list.
                                     NULL, for cf_simulate: any K and any memory are allowed, and error->item is an
                                     index into schedule->actions */
    cf_timeline *timeline;        /* if not NULL, gets `live` and the peaks */
    const cf_held_bytes *bytes;   /* per token, for peak_bytes and the limit on bytes; NULL: bytes do not count */
    cf_error *error;
    uint8_t crosses;              /* transfers between stages are in the lists */
    uint8_t n_passes;             /* action.pass must be below this: with transfers if lowered */
    int32_t turn;                 /* virtual stages v - 1 and v are on one stage if v is a multiple of this; 0: never */
    int64_t stage, action;        /* the current place of the walk; action -1: none */
    cf__pipe_held held;
    cf__pipe_room room;           /* the stage's limits */
    uint16_t *cells;              /* (cells) the bits above */
    /* cf_schedule_validate only */
    int32_t *kept;                /* (cells) in the cell of a chain's first chunk: the number of its chunks with live
                                     activations; a standalone chunk has its own number */
    int64_t *state;               /* (virtual stages) tokens of state that each holds */
} cf__checker;

/* Sets the schedule of the walk. */
static void cf__check_take_up(cf__checker *k, const cf_schedule *schedule, cf_error *error) {
    k->schedule = schedule;
    k->error = error;
    k->crosses = schedule->lowered && schedule->shape.n_stages > 1; /* if there are other stages to send to */
    k->n_passes = (uint8_t)(schedule->lowered ? CF_PASS_COUNT : CF_COMPUTE_PASS_COUNT);
    k->turn = schedule->shape.n_stages == 1;
    if (schedule->shape.placement == CF_PLACEMENT_V) k->turn = (int32_t)schedule->shape.n_stages;
}

/* Describes the place of the walk and what is wrong there. a: the action to name, or NULL. */
static void cf__check_tell(const cf__checker *k, const cf_action *a, const char *why, char text[128]) {
    if (a == NULL) (void)snprintf(text, 128, "stage %lld: %s", (long long)k->stage, why);
    else
        (void)snprintf(text, 128, "stage %lld: %s of chunk %d on virtual stage %d %s", (long long)k->stage,
                       cf_pass_name((cf_pass)a->pass), (int)a->chunk, (int)a->stage, why);
}

static int64_t cf__check_item(const cf__checker *k) {
    return k->limits != NULL && k->action >= 0 ? k->action - k->schedule->first[k->stage] : k->action;
}

/* Reports a violation, with numbers or (cf__check_refuse) without. */
CF__COLD static cf_result cf__check_fail(const cf__checker *k, const cf_action *a, const char *field, int64_t wanted,
                                         int64_t got, const char *why) {
    char text[128];
    cf__check_tell(k, a, why, text);
    return cf__fail(k->error, CF_ERROR_SCHEDULE, field, cf__check_item(k), wanted, got, text);
}

CF__COLD static cf_result cf__check_refuse(const cf__checker *k, const cf_action *a, const char *field,
                                           const char *why) {
    char text[128];
    cf__check_tell(k, a, why, text);
    return cf__refuse(k->error, CF_ERROR_SCHEDULE, field, cf__check_item(k), text);
}

static uint16_t *cf__check_cell(const cf__checker *k, int64_t chunk, int64_t stage) {
    return &k->cells[stage * k->pipe->n + chunk - k->pipe->first_chunk];
}

static int cf__check_has(const uint16_t *cell, int pass) { return *cell >> pass & 1; }

/* Returns the stage of a virtual stage: loops start over after the last stage, a V turns and comes back. */
static int64_t cf__check_stage(const cf_schedule *s, int64_t v) {
    uint32_t n = (uint32_t)s->shape.n_stages, at = (uint32_t)v;
    if (s->shape.placement != CF_PLACEMENT_V) return (int64_t)(at % n);
    at %= 2 * n;
    return (int64_t)(at < n ? at : 2 * n - 1 - at);
}

/* Returns 1 if virtual stages v - 1 and v both exist. */
static inline int cf__check_borders(const cf__checker *k, int64_t v) { return v > 0 && v < k->pipe->n_v; }

/* Returns 1 if virtual stages v - 1 and v are on one stage: where a V turns, and in a pipeline of one stage. */
static inline int cf__check_turns(const cf__checker *k, int64_t v) {
    return k->turn > 0 && cf__check_borders(k, v) && v % k->turn == 0;
}

/* Returns 1 if transfers must lead from virtual stage v - 1 to v. */
static inline int cf__check_crosses(const cf__checker *k, int64_t v) {
    return k->crosses && cf__check_borders(k, v) && !cf__check_turns(k, v);
}

/* Checks a virtual stage whose number differs from its stage's. */
static cf_result cf__check_place(const cf__checker *k, int64_t v) {
    if ((uint64_t)v >= (uint64_t)k->pipe->n_v)
        return cf__check_fail(k, NULL, "actions.stage", k->pipe->n_v - 1, v, "there is no such virtual stage");
    if (cf__check_stage(k->schedule, v) != k->stage)
        return cf__check_fail(k, NULL, "actions.stage", k->stage, v, "this virtual stage lies on another stage");
    return CF_OK;
}

static inline cf_result cf__check_fields(const cf__checker *k, const cf_action *a) {
    const cf__pipeline *pipe = k->pipe;
    int keeps;
    if ((uint64_t)(a->chunk - pipe->first_chunk) >= (uint64_t)pipe->n)
        return cf__check_fail(k, NULL, "actions.chunk", pipe->first_chunk, a->chunk, "this chunk is another rank's");
    if (a->stage != k->stage) CF__TRY(cf__check_place(k, a->stage));
    if (a->pass >= k->n_passes)
        return cf__check_fail(k, NULL, "actions.pass", k->n_passes - 1, a->pass,
                              "there is no such pass in such a list");
    if (a->reserved != 0) return cf__check_fail(k, a, "actions.reserved", 0, a->reserved, "has a reserved byte in use");
    if (pipe->shape.forward_only && a->pass != CF_F && a->pass != CF_SEND_F && a->pass != CF_RECV_F)
        return cf__check_refuse(k, a, "actions.pass", "has no place among forwards alone");
    keeps = a->pass <= CF_R && !pipe->shape.forward_only; /* it may be 1 in F and R */
    if (a->keep > keeps) return cf__check_fail(k, a, "actions.keep", keeps, a->keep, "has a wrong keep flag");
    return CF_OK;
}

/* Checks F of a chunk that continues another: it reads that chunk's state, and siblings run one after another. */
static cf_result cf__check_child(const cf__checker *k, const cf_action *a, const cf_chunk *c, const uint16_t *cell) {
    int64_t before = cf__plan_previous(k->pipe->plan, a->chunk);
    if (!cf__check_has(cell + (c->up - a->chunk), CF_F))
        return cf__check_refuse(k, a, "actions.chunk", "comes before F of the chunk that it continues");
    if (k->pipe->shape.forward_only && !cf__check_has(cell - 1, CF_F))
        return cf__check_refuse(k, a, "actions.chunk", "comes before F of the chunk before it in its tree");
    if (before >= 0 && !cf__check_has(cell + (before - a->chunk), CF_F))
        return cf__check_refuse(k, a, "actions.chunk", "comes before F of the sibling before it");
    return CF_OK;
}

/* Checks a backward: all chunks that continue this one have added to dK and dV, each after the previous one. */
static cf_result cf__check_parent(const cf__checker *k, const cf_action *a, const cf_chunk *c, const uint16_t *cell) {
    int64_t before = cf__plan_previous(k->pipe->plan, a->chunk);
    if (c->down >= 0 && !(cell[c->down - a->chunk] & CF__CHECK_BACKWARDS))
        return cf__check_refuse(k, a, "actions.chunk", "comes before that of a chunk that continues it");
    if (before >= 0 && !(cell[before - a->chunk] & CF__CHECK_BACKWARDS))
        return cf__check_refuse(k, a, "actions.chunk", "comes before that of the sibling before it");
    return CF_OK;
}

static inline cf_result cf__check_forward(const cf__checker *k, const cf_action *a, const cf_chunk *c,
                                          const uint16_t *cell) {
    if (c->up >= 0) CF__TRY(cf__check_child(k, a, c, cell));
    if (cf__check_turns(k, a->stage) && !cf__check_has(cell - k->pipe->n, CF_F))
        return cf__check_refuse(k, a, "actions", "comes before that of the virtual stage before it");
    if (cf__check_crosses(k, a->stage) && !cf__check_has(cell, CF_RECV_F))
        return cf__check_refuse(k, a, "actions.pass", "comes before its RECV_F");
    return CF_OK;
}

static cf_result cf__check_replay(const cf__checker *k, const cf_action *a, const uint16_t *cell) {
    if (!cf__check_has(cell, CF_F)) return cf__check_refuse(k, a, "actions.pass", "comes before its F");
    if (*cell & CF__CHECK_KEPT)
        return cf__check_refuse(k, a, "actions.pass", "is needless, because its F kept the activations");
    if (!a->keep) return cf__check_refuse(k, a, "actions.keep", "keeps nothing");
    if (k->pipe->local) return CF_OK;
    if (cf__check_turns(k, a->stage) && !cf__check_has(cell - k->pipe->n, CF_R))
        return cf__check_refuse(k, a, "actions", "comes before that of the virtual stage before it");
    if (cf__check_crosses(k, a->stage) && !cf__check_has(cell, CF_RECV_R))
        return cf__check_refuse(k, a, "actions.pass", "comes before its RECV_R");
    return CF_OK;
}

static inline cf_result cf__check_backward(const cf__checker *k, const cf_action *a, const cf_chunk *c,
                                           const uint16_t *cell) {
    if (!cf__check_has(cell, CF_F)) return cf__check_refuse(k, a, "actions.pass", "comes before its F");
    if (!(*cell & CF__CHECK_KEPT))
        return cf__check_refuse(k, a, "actions.pass", "has no activations; an R is missing before it");
    CF__TRY(cf__check_parent(k, a, c, cell));
    if (cf__check_turns(k, a->stage + 1) && !(cell[k->pipe->n] & CF__CHECK_BACKWARDS))
        return cf__check_refuse(k, a, "actions", "comes before that of the virtual stage behind it");
    if (cf__check_crosses(k, a->stage + 1) && !cf__check_has(cell, CF_RECV_B))
        return cf__check_refuse(k, a, "actions.pass", "comes before its RECV_B");
    return CF_OK;
}

/* Checks that a send or receive has a stage at its other end. */
static inline cf_result cf__check_ends(const cf__checker *k, const cf_action *a) {
    const cf__pipe_transfer *t = cf__pipe_transfer_of(a);
    if (!cf__check_crosses(k, a->stage + ((t->sends != 0) == (t->way > 0))))
        return cf__check_refuse(k, a, "actions.pass", "has no other stage to go to or come from");
    if (t->tensor == CF_R && k->pipe->local)
        return cf__check_refuse(k, a, "actions.pass", "has no place in local replay");
    return CF_OK;
}

/* Checks a transfer. A send must come after the pass that makes its tensor. */
static inline cf_result cf__check_transfer(const cf__checker *k, const cf_action *a, const uint16_t *cell) {
    const cf__pipe_transfer *t = cf__pipe_transfer_of(a);
    CF__TRY(cf__check_ends(k, a));
    if (t->sends && !(*cell & (t->tensor == CF_B ? (int)CF__CHECK_BACKWARDS : 1 << t->tensor)))
        return cf__check_refuse(k, a, "actions.pass", "comes before the pass that makes its tensor");
    return CF_OK;
}

/* Checks an action whose members are valid. `cell` is this chunk's on this virtual stage, whose n cells are adjacent,
   one for each chunk. Of other virtual stages it reads only the one before or after, and only if that is on the same
   stage: n cells away. */
static inline cf_result cf__check_action(cf__checker *k, const cf_action *a, const cf_chunk *c, uint16_t *cell) {
    int backward = (1 << a->pass & CF__CHECK_BACKWARDS) != 0;
    if (*cell & (backward ? (int)CF__CHECK_BACKWARDS : 1 << a->pass))
        return cf__check_refuse(k, a, "actions.pass", backward ? "is a second backward" : "comes twice");
    switch ((cf_pass)a->pass) {
        case CF_F: CF__TRY(cf__check_forward(k, a, c, cell)); break;
        case CF_R: CF__TRY(cf__check_replay(k, a, cell)); break;
        case CF_B: case CF_I: CF__TRY(cf__check_backward(k, a, c, cell)); break;
        case CF_W:
            if (!cf__check_has(cell, CF_I)) return cf__check_refuse(k, a, "actions.pass", "comes before its I");
            break;
        default: CF__TRY(cf__check_transfer(k, a, cell)); break;
    }
    *cell |= (uint16_t)(1 << a->pass | a->keep << CF__CHECK_KEPT_BIT);
    return CF_OK;
}

/* Checks that an action may keep activations. kept: number of kept chunks of its chain, including this one. */
static inline cf_result cf__check_keeps(const cf__checker *k, const cf_action *a, int32_t kept) {
    if (kept > k->schedule->shape.k)
        return cf__check_fail(k, a, "shape.k", k->schedule->shape.k, kept, "keeps more than K chunks of its chain");
    if (k->held.live <= k->room.chunks) return CF_OK;
    return cf__check_fail(k, a, "limits.chunks", k->room.chunks, k->held.live, "keeps more chunks than the limit");
}

/* Counts the state that the action's virtual stage holds, and checks it against the limit. */
static inline cf_result cf__check_state(const cf__checker *k, const cf_action *a, const cf_chunk *c) {
    int64_t *held = &k->state[a->stage], rows = c->state;
    if (1 << a->pass & CF__CHECK_BACKWARDS) *held -= rows;
    if (a->pass == CF_F) *held += rows;
    if (*held > k->room.state)
        return cf__check_fail(k, a, "limits.state", k->room.state, *held, "holds more tokens of state than the limit");
    if (k->pipe->shape.forward_only) *held -= cf__pipe_ended_rows(k->pipe, c);
    return CF_OK;
}

/* Counts what is held while this action runs, and checks it against K and the limits. */
static inline cf_result cf__check_room(const cf__checker *k, const cf_action *a, const cf_chunk *c,
                                       const uint16_t *cell) {
    int64_t bytes;
    int32_t *kept = &k->kept[cell - k->cells - c->index];
    if (a->keep) CF__TRY(cf__check_keeps(k, a, ++*kept));
    if (1 << a->pass & CF__CHECK_ENDS) --*kept; /* this action itself keeps nothing */
    if (c->chain >= 0 && k->room.state < INT64_MAX) CF__TRY(cf__check_state(k, a, c));
    if (k->room.bytes == INT64_MAX) return CF_OK;
    bytes = cf__pipe_held_bytes(&k->held.load, k->bytes);
    if (bytes <= k->room.bytes) return CF_OK;
    return cf__check_fail(k, a, "limits.bytes", k->room.bytes, bytes, "needs more bytes than the limit");
}

/* Sets the stage's limits and their bytes per token. */
static void cf__check_take_limits(cf__checker *k) {
    int own = cf__pipe_given_room(k->limits, k->stage).bytes == 0;
    k->room = cf__pipe_room_of(k->limits, k->schedule, k->stage);
    k->bytes = own ? &k->schedule->limits.per_token : &k->limits->per_token;
}

static inline void cf__check_note(const cf__checker *k, cf__pipe_held *peak, int64_t *peak_bytes) {
    peak->live = cf__max(peak->live, k->held.live);
    peak->load.live_tokens = cf__max(peak->load.live_tokens, k->held.load.live_tokens);
    peak->load.state_tokens = cf__max(peak->load.state_tokens, k->held.load.state_tokens);
    if (k->bytes != NULL) *peak_bytes = cf__max(*peak_bytes, cf__pipe_held_bytes(&k->held.load, k->bytes));
}

static cf_result cf__check_list(cf__checker *k) {
    int64_t end = k->schedule->first[k->stage + 1], peak_bytes = 0;
    cf__pipe_held peak;
    memset(&peak, 0, sizeof peak);
    k->held = peak;
    if (k->limits != NULL) cf__check_take_limits(k);
    for (k->action = k->schedule->first[k->stage]; k->action < end; k->action++) {
        const cf_action *a = &k->schedule->actions[k->action];
        int transfer = cf__pipe_is_transfer(a->pass); /* transfers do not change the load */
        const cf_chunk *c;
        uint16_t *cell;
        CF__TRY(cf__check_fields(k, a));
        c = &k->pipe->plan->chunks[a->chunk];
        cell = cf__check_cell(k, a->chunk, a->stage);
        CF__TRY(cf__check_action(k, a, c, cell));
        if (!transfer) cf__pipe_hold(k->pipe, &k->held, a, c);
        if (k->timeline != NULL) k->timeline->live[k->action] = (int32_t)k->held.live;
        if (transfer) continue;
        if (k->timeline != NULL) cf__check_note(k, &peak, &peak_bytes);
        if (k->limits != NULL) CF__TRY(cf__check_room(k, a, c, cell));
        cf__pipe_let_go(k->pipe, &k->held, a, c);
    }
    if (k->timeline == NULL) return CF_OK;
    k->timeline->peak_live[k->stage] = peak.live;
    k->timeline->peak_tokens[k->stage] = peak.load.live_tokens;
    k->timeline->peak_state_tokens[k->stage] = peak.load.state_tokens;
    k->timeline->peak_bytes[k->stage] = peak_bytes;
    return CF_OK;
}

/* Checks all lists. The cells and the counts of kept chunks must be zero at the start. */
static cf_result cf__check_lists(cf__checker *k) {
    for (k->stage = 0; k->stage < k->schedule->shape.n_stages; k->stage++) CF__TRY(cf__check_list(k));
    return CF_OK;
}

/* ---- what is missing ---- */

/* Reports an error between lists. action: the one to blame; -1: it is missing, and `a` describes it. */
static cf_result cf__check_blame(cf__checker *k, int64_t action, const cf_action *a, const char *field,
                                 const char *why) {
    k->stage = cf__check_stage(k->schedule, a->stage);
    k->action = action;
    return cf__check_refuse(k, a, field, why);
}

CF__COLD static cf_result cf__check_missing(cf__checker *k, cf_pass pass, int64_t chunk, int64_t stage) {
    const cf_action a = {(int32_t)chunk, (int32_t)stage, (uint8_t)pass, 0, 0};
    return cf__check_blame(k, -1, &a, "actions", "is missing");
}

/* Checks that one chunk has all its passes on one virtual stage, once all lists are read. */
static cf_result cf__check_complete(cf__checker *k, int64_t chunk, int64_t stage) {
    const uint16_t *cell = cf__check_cell(k, chunk, stage);
    const uint16_t *behind = stage + 1 < k->pipe->n_v ? cell + k->pipe->n : NULL;
    int backwards = !k->pipe->shape.forward_only;
    if (!cf__check_has(cell, CF_F)) return cf__check_missing(k, CF_F, chunk, stage);
    if (!(*cell & CF__CHECK_BACKWARDS) && backwards) return cf__check_missing(k, CF_B, chunk, stage);
    if (!(*cell & CF__CHECK_ENDS) && backwards) return cf__check_missing(k, CF_W, chunk, stage);
    if (!k->pipe->local && behind != NULL && cf__check_has(behind, CF_R) && !cf__check_has(cell, CF_R))
        return cf__check_missing(k, CF_R, chunk, stage);
    if (!k->crosses) return CF_OK;
    if (!cf__check_crosses(k, stage + 1)) behind = NULL;
    if (behind != NULL && !cf__check_has(cell, CF_SEND_F)) return cf__check_missing(k, CF_SEND_F, chunk, stage);
    if (backwards && cf__check_crosses(k, stage) && !cf__check_has(cell, CF_SEND_B))
        return cf__check_missing(k, CF_SEND_B, chunk, stage);
    if (behind != NULL && cf__check_has(cell, CF_SEND_R) && !cf__check_has(behind, CF_RECV_R))
        return cf__check_missing(k, CF_RECV_R, chunk, stage + 1);
    if (behind != NULL && cf__check_has(behind, CF_RECV_R) && !cf__check_has(cell, CF_SEND_R))
        return cf__check_missing(k, CF_SEND_R, chunk, stage);
    if (cf__check_has(cell, CF_RECV_R) && !cf__check_has(cell, CF_R)) return cf__check_missing(k, CF_R, chunk, stage);
    return CF_OK;
}

static cf_result cf__check_all_complete(cf__checker *k) {
    int64_t chunk, stage;
    for (stage = 0; stage < k->pipe->n_v && k->pipe->n > 0; stage++)
        for (chunk = k->pipe->first_chunk; chunk < k->pipe->first_chunk + k->pipe->n; chunk++)
            CF__TRY(cf__check_complete(k, chunk, stage));
    return CF_OK;
}

/* ---- all lists together ----

   The lists of one rank, or of several, run as far as possible. A pass runs when it is next and its input has been
   made, a transfer when both of its ends are next. Stages are visited upwards and then downwards, as results go, while
   anything moves. Every chunk goes through all stages, so the time is in proportion to the actions. */

typedef struct cf__lists {
    const cf__pipeline *pipe; /* the first rank's; other ranks have different chunks */
    const cf_schedule *const *schedules; /* (n_ranks) */
    int64_t n_ranks;
    int in_step;              /* 1: all ranks run all passes together (lockstep) */
    int64_t *cursor;          /* (n_ranks x n_stages) the next action, an index into actions */
    int64_t *position;        /* (n_stages) passes that have run in lockstep */
    uint16_t *run;            /* (n_ranks x cells) a bit for each pass that has run */
    cf_error *error;
} cf__lists;

static void cf__lists_layout(cf__lists *l, cf__carver *carver) {
    l->cursor = (int64_t *)cf__take(carver, l->n_ranks * l->pipe->shape.n_stages, sizeof(int64_t));
    l->position = (int64_t *)cf__take(carver, l->pipe->shape.n_stages, sizeof(int64_t));
    l->run = (uint16_t *)cf__take(carver, l->n_ranks * l->pipe->n * l->pipe->n_v, sizeof(uint16_t));
}

static int64_t *cf__lists_cursor(const cf__lists *l, int64_t rank, int64_t stage) {
    return &l->cursor[rank * l->pipe->shape.n_stages + stage];
}

/* Returns the next action of a rank's stage, or NULL at the end of its list. */
static const cf_action *cf__lists_head(const cf__lists *l, int64_t rank, int64_t stage) {
    const cf_schedule *s = l->schedules[rank];
    int64_t at = *cf__lists_cursor(l, rank, stage);
    return at < s->first[stage + 1] ? &s->actions[at] : NULL;
}

/* Runs the transfers that are next on a stage of a rank and at their other ends. */
static void cf__lists_meet(const cf__lists *l, int64_t rank, int64_t stage, int *moved) {
    const cf_action *a;
    while ((a = cf__lists_head(l, rank, stage)) != NULL && cf__pipe_is_transfer(a->pass)) {
        const cf_action other = cf__pipe_other_end(a), *at_peer;
        int64_t peer = cf__check_stage(l->schedules[rank], other.stage);
        at_peer = cf__lists_head(l, rank, peer);
        if (at_peer == NULL || !cf__pipe_is_same(at_peer, &other)) return;
        ++*cf__lists_cursor(l, rank, stage);
        ++*cf__lists_cursor(l, rank, peer);
        *moved = 1;
    }
}

static uint16_t *cf__lists_cell(const cf__lists *l, int64_t rank, const cf_action *a, int64_t v) {
    return &l->run[(rank * l->pipe->n_v + v) * l->pipe->n + a->chunk - l->pipe->first_chunk - rank * l->pipe->n];
}

/* Returns 1 if the input of a pass has been made, or no other virtual stage makes it. */
static int cf__lists_has_input(const cf__lists *l, int64_t rank, const cf_action *a) {
    int backward = (1 << a->pass & CF__CHECK_BACKWARDS) != 0;
    int way = backward - (a->pass == CF_F || (a->pass == CF_R && !l->pipe->local));
    if (!cf__pipe_leads(l->pipe, way, a->stage)) return 1;
    return *cf__lists_cell(l, rank, a, a->stage + way) & (backward ? (int)CF__CHECK_BACKWARDS : 1 << a->pass);
}

/* Returns 1 if a pass can run. In lockstep, all ranks of its cp group must be at the same pass of the round, and have
   its input. */
static int cf__lists_is_ready(const cf__lists *l, int64_t rank, int64_t stage, const cf_action *a) {
    const cf_plan *plan = l->pipe->plan;
    const cf_chunk *c = &plan->chunks[a->chunk];
    int64_t cp = l->in_step && a->pass != CF_W ? c->cp : 0;
    int64_t other = cp > 0 ? rank - rank % cp : rank, end = cp > 0 ? other + cp : rank + 1;
    for (; other < end; other++) {
        const cf_action *b = other < l->n_ranks ? cf__lists_head(l, other, stage) : NULL;
        if (b == NULL || b->pass != a->pass || b->stage != a->stage || !cf__lists_has_input(l, other, b) ||
            b->chunk - a->chunk != (other - rank) * l->pipe->n)
            return 0;
    }
    return 1;
}

static void cf__lists_step(const cf__lists *l, int64_t rank, int64_t stage) {
    const cf_action *a = cf__lists_head(l, rank, stage);
    *cf__lists_cell(l, rank, a, a->stage) |= (uint16_t)(1 << a->pass);
    ++*cf__lists_cursor(l, rank, stage);
}

/* Returns the kind of a pass. In lockstep, F and R are of one kind. */
static int cf__lists_kind(const cf_action *a) { return a->pass == CF_R ? (int)CF_F : a->pass; }

static cf_result cf__lists_differ(const cf__lists *l, int64_t rank, int64_t stage, const cf_action *a,
                                  const cf_action *first) {
    char text[128];
    (void)snprintf(text, sizeof text, "rank %lld, stage %lld: %s on virtual stage %d, where rank 0 has %s on %d",
                   (long long)rank, (long long)stage, cf_pass_name((cf_pass)a->pass), (int)a->stage,
                   cf_pass_name((cf_pass)first->pass), (int)first->stage);
    return cf__refuse(l->error, CF_ERROR_SCHEDULE, "actions", l->position[stage], text);
}

/* Runs the next actions of all ranks on a stage: each rank alone or, in lockstep, one pass if all ranks can run it.
   Sound lists that have run the same kinds so far end together, because all have the same number of chunks. */
static cf_result cf__lists_turn(const cf__lists *l, int64_t stage, int *moved) {
    const cf_action *lead;
    int64_t rank;
    int all = 1, transfers = 0;
    for (rank = 0; rank < l->n_ranks; rank++) {
        const cf_action *a;
        int ready;
        cf__lists_meet(l, rank, stage, moved);
        a = cf__lists_head(l, rank, stage);
        transfers |= a != NULL && cf__pipe_is_transfer(a->pass);
        ready = a != NULL && !cf__pipe_is_transfer(a->pass) && cf__lists_is_ready(l, rank, stage, a);
        all &= ready;
        if (l->in_step || !ready) continue;
        cf__lists_step(l, rank, stage);
        *moved = 1;
    }
    if (!l->in_step || transfers) return CF_OK;
    lead = cf__lists_head(l, 0, stage);
    for (rank = 1; rank < l->n_ranks; rank++) {
        const cf_action *a = cf__lists_head(l, rank, stage);
        if (a != NULL && lead != NULL && (a->stage != lead->stage || cf__lists_kind(a) != cf__lists_kind(lead)))
            return cf__lists_differ(l, rank, stage, a, lead);
    }
    for (rank = 0; rank < l->n_ranks && all; rank++) cf__lists_step(l, rank, stage);
    l->position[stage] += all;
    *moved |= all;
    return CF_OK;
}

/* Runs all lists. *stuck: an action that waits forever; NULL: all lists end. The working space must be zero. */
static cf_result cf__lists_run(const cf__lists *l, const cf_action **stuck) {
    int64_t n_stages = l->pipe->shape.n_stages, rank, i;
    int moved, any;
    for (rank = 0; rank < l->n_ranks; rank++)
        memcpy(cf__lists_cursor(l, rank, 0), l->schedules[rank]->first, (size_t)n_stages * sizeof *l->cursor);
    do {
        for (any = 0, i = 0; i < 2 * n_stages; i++)
            for (moved = 1; moved; any |= moved) {
                moved = 0;
                CF__TRY(cf__lists_turn(l, i < n_stages ? i : 2 * n_stages - 1 - i, &moved));
            }
    } while (any);
    for (*stuck = NULL, rank = 0; rank < l->n_ranks; rank++)
        for (i = 0; i < n_stages && *stuck == NULL; i++) *stuck = cf__lists_head(l, rank, i);
    return CF_OK;
}

/* ---- the public function ---- */

typedef struct cf__validation {
    cf__checker check;
    cf__lists lists;
} cf__validation;

static void cf__check_layout(void *job, cf__carver *carver) {
    cf__checker *k = &((cf__validation *)job)->check;
    int64_t cells = k->pipe->n * k->pipe->n_v;
    k->cells = (uint16_t *)cf__take(carver, cells, sizeof(uint16_t));
    k->kept = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
    k->state = (int64_t *)cf__take(carver, k->pipe->n > 0 ? k->pipe->n_v : 0, sizeof(int64_t));
    cf__lists_layout(&((cf__validation *)job)->lists, carver);
}

/* Reports a deadlock: some stage waits forever with this action. */
static cf_result cf__check_deadlock(cf__checker *k, const cf_action *a) {
    return cf__check_blame(k, a - k->schedule->actions, a, cf__pipe_is_transfer(a->pass) ? "transfers" : "actions",
                           "waits for ever: the lists deadlock");
}

static cf_result cf__check_everything(void *job) {
    cf__checker *k = &((cf__validation *)job)->check;
    const cf_action *stuck;
    CF__TRY(cf__check_lists(k));
    CF__TRY(cf__check_all_complete(k));
    CF__TRY(cf__lists_run(&((cf__validation *)job)->lists, &stuck));
    return stuck != NULL ? cf__check_deadlock(k, stuck) : CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_validate(const cf_plan *plan, const cf_schedule *schedule,
                                             const cf_validate_desc *desc, const cf_allocator *allocator,
                                             cf_error *error) {
    static const cf__recipe recipe = {"shape.n_stages", 1, cf__check_layout, NULL, NULL, cf__check_everything};
    const cf_validate_desc none = {{0, 0, 0, NULL, NULL, NULL, {0, 0, 0, 0}}};
    cf__validation validation;
    cf__checker *k = &validation.check;
    cf__pipeline pipe;
    CF__TRY(cf__pipe_check_schedule(plan, schedule, 2, error));
    CF__TRY(cf__pipe_check_limits(&schedule->limits, schedule->shape.n_stages, CF_ERROR_SCHEDULE, error));
    pipe = cf__pipe_of(plan, &schedule->shape, NULL);
    memset(&validation, 0, sizeof validation);
    cf__check_take_up(k, schedule, error);
    k->pipe = validation.lists.pipe = &pipe;
    k->limits = desc != NULL ? &desc->limits : &none.limits;
    validation.lists.schedules = &schedule;
    validation.lists.n_ranks = 1;
    CF__TRY(cf__pipe_check_limits(k->limits, schedule->shape.n_stages, CF_ERROR_ARGUMENT, error));
    return cf__make(&recipe, &validation, allocator, error);
}

/* ---- where actions stand ----

   A cell of the index has a place for each pass and, in lowered schedules, one for each SEND and RECV. The rules give
   the passes that a pass waits for, except for slots, which follow from the order of the list: any backward of the
   chain may have freed the slot that an R takes. */

struct cf_schedule_index {
    const cf_schedule *schedule;
    cf__pipeline pipe;
    int64_t n_places;       /* those of transfers come after those of passes */
    int32_t *at;            /* (cells x n_places) the action at that place; -1: none */
    int32_t *slot;          /* (cells) the action that freed the slot that an R takes; -1: it was free at the start */
    /* while it is made */
    int32_t *n_kept, *n_freed; /* (cells) in the cell of a chain's first chunk, the number of slots that the chain has
                                  taken and has freed */
    int32_t *freed;         /* (cells) from that cell on, the actions that freed the slots */
    struct cf_schedule_index *made;
    cf_block block;
};

static int32_t *cf__index_at(const cf_schedule_index *index, int64_t place, int64_t chunk, int64_t v) {
    return &index->at[(v * index->pipe.n + chunk) * index->n_places + place];
}

static void cf__index_scratch(void *job, cf__carver *carver) {
    cf_schedule_index *index = (cf_schedule_index *)job;
    int64_t cells = index->pipe.n * index->pipe.n_v;
    index->n_kept = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
    index->n_freed = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
    index->freed = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
}

static cf_block *cf__index_object(void *job, cf__carver *carver) {
    cf_schedule_index *index = (cf_schedule_index *)job;
    int64_t cells = index->pipe.n * index->pipe.n_v;
    index->made = (cf_schedule_index *)cf__take(carver, 1, sizeof(cf_schedule_index));
    index->at = (int32_t *)cf__take(carver, cells * index->n_places, sizeof(int32_t));
    index->slot = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
    if (index->made == NULL) return NULL;
    *index->made = *index;
    return &index->made->block;
}

/* Enters an action, and records its effect on the slots of its chain: the n-th kept chunk takes the (n - K)-th freed
   slot. Exactly one chunk waits for each freed slot. So no more than K chunks are kept even if passes of a stage change
   places. */
static void cf__index_note(cf_schedule_index *index, int64_t action) {
    const cf_action *a = &index->schedule->actions[action];
    int64_t chunk = a->chunk - index->pipe.first_chunk, cell = a->stage * index->pipe.n + chunk;
    int64_t first = cell - index->pipe.chunks[chunk].index, before = index->n_kept[first] - index->pipe.shape.k;
    *cf__index_at(index, cf__pipe_place(a->pass), chunk, a->stage) = (int32_t)action;
    if (a->keep && before >= 0) index->slot[cell] = index->freed[first + before];
    index->n_kept[first] += a->keep;
    if (a->pass == CF_B || a->pass == CF_W) index->freed[first + index->n_freed[first]++] = (int32_t)action;
}

static cf_result cf__index_fill(void *job) {
    cf_schedule_index *index = (cf_schedule_index *)job;
    size_t cells = (size_t)(index->pipe.n * index->pipe.n_v);
    int64_t i;
    memset(index->at, 0xff, cells * (size_t)index->n_places * sizeof *index->at);
    memset(index->slot, 0xff, cells * sizeof *index->slot);
    for (i = 0; i < index->schedule->n_actions; i++) cf__index_note(index, i);
    index->made->n_kept = index->made->n_freed = index->made->freed = NULL;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_index_make(const cf_plan *plan, const cf_schedule *schedule,
                                               const cf_allocator *allocator, cf_schedule_index **out,
                                               cf_error *error) {
    static const cf__recipe recipe = {"n_actions", 1, cf__index_scratch, NULL, cf__index_object, cf__index_fill};
    cf_schedule_index index;
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf_schedule_validate(plan, schedule, NULL, allocator, error));
    if (CF__NEVER(schedule->n_actions > CF_MAX_ACTIONS)) return cf__too_large(error, "n_actions");
    memset(&index, 0, sizeof index);
    index.schedule = schedule;
    index.pipe = cf__pipe_of(plan, &schedule->shape, NULL);
    index.n_places = cf__pipe_place(schedule->lowered ? CF_PASS_COUNT : CF_SEND_F);
    CF__TRY(cf__make(&recipe, &index, allocator, error));
    *out = index.made;
    return CF_OK;
}

CHUNKFLOW_API void cf_schedule_index_free(cf_schedule_index *index) {
    if (index != NULL) cf__free_object(index, &index->block);
}

CHUNKFLOW_API int64_t cf_schedule_find(const cf_schedule_index *index, cf_pass pass, int64_t chunk, int64_t stage) {
    int64_t place = (int)pass >= 0 && pass < CF_PASS_COUNT ? cf__pipe_place((int)pass) : INT64_MAX, i;
    if (index == NULL || place >= index->n_places || chunk < index->pipe.first_chunk) return -1;
    i = chunk - index->pipe.first_chunk;
    if (i >= index->pipe.n || stage < 0 || stage >= index->pipe.n_v) return -1;
    return *cf__index_at(index, place, i, stage);
}

/* Finds one need: the pass at a place of a chunk on virtual stage `from`. Returns 0 if there is no such pass. */
static int cf__index_need(const cf_schedule_index *index, int64_t place, int64_t chunk, int64_t from, int64_t v,
                          cf_edge_why why, cf_need *need) {
    if (from < 0 || from >= index->pipe.n_v) return 0;
    need->action = *cf__index_at(index, place, chunk, from);
    need->received = -1;
    need->why = why;
    if (from != v && index->n_places > CF__PIPE_PLACES)
        need->received = *cf__index_at(index, CF__PIPE_PLACES + 2 * place + 1, chunk, v);
    return need->action >= 0;
}

/* Finds the one need of a SEND or RECV. */
static int cf__index_transfer_need(const cf_schedule_index *index, const cf_action *a, cf_need *need) {
    const cf__pipe_transfer *t = cf__pipe_transfer_of(a);
    int64_t from = t->sends ? a->stage : a->stage - t->way;
    return cf__index_need(index, t->tensor, a->chunk - index->pipe.first_chunk, from, from,
                          t->way > 0 ? CF_EDGE_ACTIVATION : CF_EDGE_GRADIENT, need);
}

CHUNKFLOW_API int cf_schedule_needs(const cf_schedule_index *index, int64_t action, cf_need *needs) {
    cf__pipe_need found[CF__PIPE_MOST_NEEDS];
    const cf_action *a;
    int64_t chunk;
    int n_found, split, dropped, i, n = 0;
    if (index == NULL || action < 0 || action >= index->schedule->n_actions) return 0;
    a = &index->schedule->actions[action];
    chunk = a->chunk - index->pipe.first_chunk;
    if (cf__pipe_is_transfer(a->pass)) return cf__index_transfer_need(index, a, needs);
    split = *cf__index_at(index, CF__PIPE_W, chunk, a->stage) >= 0;
    dropped = *cf__index_at(index, CF_R, chunk, a->stage) >= 0;
    n_found = cf__pipe_needs(&index->pipe, split, cf__pipe_place(a->pass), chunk, dropped, found);
    for (i = 0; i < n_found; i++)
        n += cf__index_need(index, found[i].place, found[i].chunk, a->stage + found[i].stage, a->stage, found[i].why,
                            &needs[n]);
    if (a->pass != CF_R || index->slot[a->stage * index->pipe.n + chunk] < 0) return n;
    needs[n].action = index->slot[a->stage * index->pipe.n + chunk];
    needs[n].received = -1;
    needs[n].why = CF_EDGE_SLOT;
    return n + 1;
}

/* ================================================================================================================
   >>lockstep

   This section has no scheduler of its own, so ranks cannot wait for each other in a cycle. A list that is sound for
   the columns is sound for each rank: the chunks of a rank's chain are consecutive columns of one chain, and no rank
   holds more than the columns do. "in step" in >>pack describes how ranks are laid out so that this costs little.
   ================================================================================================================
   */

typedef struct cf__lockstep {
    const cf_plan *plan;
    cf_pass_cost cost;
    const cf_schedule *list;
    int64_t rank;
    cf_error *error;
    cf_plan *columns;      /* result of cf_lockstep_plan */
    cf_schedule *schedule; /* result of cf_lockstep_schedule */
} cf__lockstep;

static cf_block *cf__lockstep_columns(void *job, cf__carver *carver) {
    cf__lockstep *l = (cf__lockstep *)job;
    int64_t n = l->plan->chunks_per_rank;
    cf_plan columns = *l->plan;
    columns.n_sequences = columns.n_chunks = columns.n_slices = n;
    columns.n_ranks = 1;
    columns.n_empty = columns.n_tokens = columns.n_idle = columns.n_chains = columns.lower_bound = 0;
    l->columns = (cf_plan *)cf__take(carver, 1, sizeof(cf_plan));
    columns.chunks = (cf_chunk *)cf__take(carver, n, sizeof(cf_chunk));
    columns.slices = (cf_slice *)cf__take(carver, n, sizeof(cf_slice));
    columns.chains = (cf_chain *)cf__take(carver, cf__min(n, l->plan->n_chains), sizeof(cf_chain));
    if (l->columns == NULL) return NULL;
    *l->columns = columns;
    return &l->columns->block;
}

/* Makes column i a chunk, with its state in a chain; its slice begins after the most rows that a rank's chunk gathers.
   Returns the column after the chains that run through it; i if there are none. */
static int64_t cf__lockstep_column(const cf__lockstep *l, int64_t i) {
    cf_chunk *c = &l->columns->chunks[i];
    double dearest = 0, rows;
    int64_t rank, gathered = 0, end = i;
    memset(c, 0, sizeof *c);
    c->chain = -1;
    c->first_slice = i;
    for (rank = 0; rank < l->plan->n_ranks; rank++) {
        int64_t id = rank * l->plan->chunks_per_rank + i;
        const cf_chunk *of = &l->plan->chunks[id];
        if (of->n_slices == 0) continue;
        c->n_slices = 1;
        c->tokens = cf__max(c->tokens, of->tokens);
        c->rows = cf__max(c->rows, of->rows);
        c->pairs = cf__max(c->pairs, of->pairs);
        dearest = cf__most(dearest, cf_cost_seconds(&l->cost, of->rows, of->pairs));
        c->state = cf__max(c->state, of->state);
        if (of->chain >= 0) end = cf__max(end, i - of->index + l->plan->chains[of->chain].n_chunks);
        if (of->cp == 0) continue;
        c->cp = 1;
        gathered = cf__max(gathered, cf__plan_prefix(l->plan, of) - of->prefix);
    }
    l->columns->slices[i].begin = gathered;
    if (c->n_slices == 0) return end; /* idle on all ranks, so it costs nothing */
    rows = cf_cost_seconds(&l->cost, c->rows, 0);
    if (dearest - rows < cf__product(l->cost.per_pair, (double)c->pairs))
        c->pairs = (int64_t)((dearest - rows) / l->cost.per_pair);
    return end;
}

static cf_result cf__lockstep_fill(void *job) {
    cf__lockstep *l = (cf__lockstep *)job;
    cf_plan *columns = l->columns;
    cf_chain *chain = NULL;
    int64_t i, end = 0;
    for (i = 0; i < columns->n_chunks; i++) {
        cf_chunk *c = &columns->chunks[i];
        cf_slice *slice = &columns->slices[i];
        int64_t to = cf__lockstep_column(l, i);
        c->up = c->down = slice->up = -1;
        slice->n = 1;
        if (i >= end && to > i) {
            chain = &columns->chains[columns->n_chains++];
            chain->sequence = chain->first_chunk = i;
            chain->n_chunks = chain->tokens = chain->cp = 0;
        }
        end = cf__max(end, to);
        slice->sequence = slice->first = (int32_t)i;
        slice->offset = 0;
        slice->length = (int32_t)c->tokens;
        columns->n_idle += c->n_slices == 0;
        if (i >= end) continue;
        c->chain = columns->n_chains - 1;
        c->index = chain->n_chunks++;
        if (c->index > 0) c->up = slice->up = (int32_t)(i - 1);
        c->prefix = chain->tokens;
        slice->begin += c->prefix;
        slice->length = (int32_t)c->state;
        chain->tokens += c->state; /* fewer than CF_MAX_CHUNKS x CF_MAX_CHUNK_SIZE */
    }
    cf__pack_link_chunks(columns);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_lockstep_plan(const cf_plan *plan, const cf_pass_cost *cost, const cf_allocator *allocator,
                                         cf_plan **out, cf_error *error) {
    static const cf__recipe recipe = {"chunks_per_rank", 0, NULL, NULL, cf__lockstep_columns, cf__lockstep_fill};
    const cf_pass_cost none = {0, 0, 0};
    double rows = 0, pairs = 0;
    cf__lockstep l;
    int64_t i;
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (out == NULL) return cf__fail_null(error, "out");
    if (plan->order != NULL)
        return cf__refuse(error, CF_ERROR_ARGUMENT, "plan", -1,
                          "trees have no columns for ranks in step");
    for (i = 0; i < plan->n_chunks; i++) {
        rows += (double)plan->chunks[i].rows;
        pairs += (double)plan->chunks[i].pairs;
    }
    memset(&l, 0, sizeof l);
    l.plan = plan;
    l.cost = cf__pack_weights(cost != NULL ? cost : &none, rows, pairs);
    CF__TRY(cf__make(&recipe, &l, allocator, error));
    *out = l.columns;
    return CF_OK;
}

/* ---- the schedule of a rank ---- */

static cf_block *cf__lockstep_schedule(void *job, cf__carver *carver) {
    cf__lockstep *l = (cf__lockstep *)job;
    cf_schedule schedule = *l->list;
    int64_t s;
    schedule.shape.rank = l->rank;
    schedule.lockstep = 1;
    schedule.n_chunks = l->plan->n_chunks;
    l->schedule = cf__schedule_layout(&schedule, carver);
    if (l->schedule == NULL) return NULL;
    *l->schedule = schedule;
    for (s = 0; s < schedule.shape.n_stages; s++) {
        cf__pipe_room room = cf__pipe_room_of(&l->list->limits, l->list, s);
        cf__schedule_put_room(l->schedule, s, &room);
    }
    return &l->schedule->block;
}

static cf_result cf__lockstep_take(void *job) {
    cf__lockstep *l = (cf__lockstep *)job;
    int64_t i, first = l->rank * l->plan->chunks_per_rank;
    memcpy(l->schedule->first, l->list->first, (size_t)(l->list->shape.n_stages + 1) * sizeof *l->list->first);
    for (i = 0; i < l->list->n_actions; i++) {
        const cf_action *a = &l->list->actions[i];
        CF__TRY(cf__inside(a->chunk, 0, l->plan->chunks_per_rank - 1, CF_ERROR_SCHEDULE, "actions.chunk", i,
                           "there is no such column", l->error));
        l->schedule->actions[i] = *a;
        l->schedule->actions[i].chunk = (int32_t)(first + a->chunk);
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_lockstep_schedule(const cf_plan *plan, const cf_schedule *columns, int64_t rank,
                                             const cf_allocator *allocator, cf_schedule **out, cf_error *error) {
    static const cf__recipe recipe = {"n_actions", 0, NULL, NULL, cf__lockstep_schedule, cf__lockstep_take};
    const cf_result bad = CF_ERROR_SCHEDULE;
    cf__lockstep l;
    CF__TRY(cf__plan_check_counts(plan, error));
    if (columns == NULL) return cf__fail_null(error, "columns");
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__choice(rank, 0, plan->n_ranks - 1, "rank", error));
    const cf__member members[] =
        {{"n_chunks", columns->n_chunks, plan->chunks_per_rank, plan->chunks_per_rank, CF_ERROR_ARGUMENT},
                                  {"shape.rank", columns->shape.rank, 0, 0, CF_ERROR_ARGUMENT},
                                  {"shape.n_stages", columns->shape.n_stages, 1, CF_MAX_STAGES, bad},
                                  {"n_actions", columns->n_actions, 0, CF_MAX_ACTIONS, bad}};
    CF__TRY(cf__check_members(members, CF__COUNT(members), bad, error));
    CF__TRY(cf__pipe_check_first(columns, error));
    memset(&l, 0, sizeof l);
    l.plan = plan;
    l.list = columns;
    l.rank = rank;
    l.error = error;
    CF__TRY(cf__make(&recipe, &l, allocator, error));
    *out = l.schedule;
    return CF_OK;
}

/* ---- are all ranks in step? ---- */

static void cf__ranks_layout(void *job, cf__carver *carver) { cf__lists_layout((cf__lists *)job, carver); }

static cf_result cf__ranks_run(void *job) {
    const cf__lists *l = (const cf__lists *)job;
    const cf_action *stuck;
    CF__TRY(cf__lists_run(l, &stuck));
    if (stuck == NULL) return CF_OK;
    return cf__refuse(l->error, CF_ERROR_SCHEDULE, "actions", l->position[cf__pipe_stage(l->pipe, stuck->stage)],
                      "the ranks wait for each other for ever");
}

CHUNKFLOW_API cf_result cf_lockstep_validate(const cf_plan *plan, const cf_schedule *const *schedules,
                                             const cf_validate_desc *desc, const cf_allocator *allocator,
                                             cf_error *error) {
    static const cf__recipe recipe = {"shape.n_stages", 1, cf__ranks_layout, NULL, NULL, cf__ranks_run};
    cf__pipeline pipe;
    cf__lists l;
    int64_t rank;
    CF__TRY(cf__plan_check_counts(plan, error));
    if (schedules == NULL) return cf__fail_null(error, "schedules");
    for (rank = 0; rank < plan->n_ranks; rank++) {
        const cf_schedule *s = schedules[rank], *first = schedules[0];
        if (s == NULL) return cf__refuse(error, CF_ERROR_ARGUMENT, "schedules", rank, "is NULL");
        CF__TRY(cf_schedule_validate(plan, s, desc, allocator, error));
        CF__TRY(cf__inside(s->shape.rank, rank, rank, CF_ERROR_SCHEDULE, "schedules", rank, "is another rank's",
                           error));
        if (s->shape.n_stages != first->shape.n_stages || s->shape.n_virtual != first->shape.n_virtual ||
            s->shape.placement != first->shape.placement || s->shape.replay != first->shape.replay ||
            s->shape.forward_only != first->shape.forward_only || s->shape.outputs != first->shape.outputs ||
            s->lowered != first->lowered)
            return cf__refuse(error, CF_ERROR_SCHEDULE, "schedules", rank, "has not the shape of rank 0's");
    }
    pipe = cf__pipe_of(plan, &schedules[0]->shape, NULL);
    memset(&l, 0, sizeof l);
    l.pipe = &pipe;
    l.schedules = schedules;
    l.n_ranks = plan->n_ranks;
    l.in_step = 1;
    l.error = error;
    return cf__make(&recipe, &l, allocator, error);
}

/* ================================================================================================================
   >>simulate
   ================================================================================================================ */

typedef struct cf__simulation {
    cf_simulate_desc desc;
    cf__pipeline pipe;
    int splits; /* for the bounds: 0: backwards are whole, 1: split, CF__BOUNDS_EITHER: both occur */
    cf__checker check; /* also has the schedule and the error record */
    cf__clock clock;
    cf__bounds bounds;
    cf_timeline header, *timeline;
} cf__simulation;

static cf_block *cf__simulate_object(void *job, cf__carver *carver) {
    cf__simulation *sim = (cf__simulation *)job;
    cf_timeline *t = &sim->header;
    sim->timeline = (cf_timeline *)cf__take(carver, 1, sizeof(cf_timeline));
    t->start = (double *)cf__take(carver, t->n_actions, sizeof(double));
    t->end = (double *)cf__take(carver, t->n_actions, sizeof(double));
    t->live = (int32_t *)cf__take(carver, t->n_actions, sizeof(int32_t));
    t->peak_live = (int64_t *)cf__take(carver, t->n_stages, sizeof(int64_t));
    t->peak_tokens = (int64_t *)cf__take(carver, t->n_stages, sizeof(int64_t));
    t->peak_state_tokens = (int64_t *)cf__take(carver, t->n_stages, sizeof(int64_t));
    t->peak_bytes = (int64_t *)cf__take(carver, t->n_stages, sizeof(int64_t));
    if (sim->timeline == NULL) return NULL;
    *sim->timeline = *t;
    return &sim->timeline->block;
}

static void cf__simulate_scratch(void *job, cf__carver *carver) {
    cf__simulation *sim = (cf__simulation *)job;
    cf__pipe_layout(&sim->pipe, carver);
    sim->check.cells = (uint16_t *)cf__take(carver, sim->pipe.n * sim->pipe.n_v, sizeof(uint16_t));
    cf__clock_layout(&sim->clock, &sim->pipe, carver);
    if (!sim->desc.no_bounds) cf__bounds_layout(&sim->bounds, &sim->pipe, sim->splits, carver);
}

static cf_result cf__simulate_start(cf__simulation *sim, const cf_plan *plan, const cf_schedule *schedule,
                                    const cf_simulate_desc *desc, cf_error *error) {
    const cf_held_bytes *b = &sim->desc.limits.per_token;
    int64_t i;
    int whole = 0;
    memset(sim, 0, sizeof *sim);
    CF__TRY(cf__pipe_check_schedule(plan, schedule, 2, error));
    CF__TRY(cf__range(schedule->shape.n_stages * schedule->shape.n_virtual, 1, CF_MAX_STAGES, "shape.n_stages", error));
    CF__TRY(cf__range(schedule->n_actions, 0, CF_MAX_ACTIONS, "n_actions", error));
    if (desc != NULL) sim->desc = *desc;
    CF__TRY(cf__check_flag(sim->desc.no_bounds, "no_bounds", -1, error));
    sim->desc.no_bounds |= sim->desc.start != NULL || sim->desc.end != NULL;
    CF__TRY(cf__pipe_check_limits(&sim->desc.limits, schedule->shape.n_stages, CF_ERROR_ARGUMENT, error));
    CF__TRY(cf__pipe_check_timing(sim->desc.timing, &schedule->shape, error));
    CF__TRY(cf__schedule_check_bytes(plan, &schedule->shape, b, error));
    cf__check_take_up(&sim->check, schedule, error);
    sim->clock.schedule = schedule;
    sim->pipe = cf__pipe_of(plan, &schedule->shape, sim->desc.timing);
    sim->check.pipe = sim->clock.pipe = &sim->pipe;
    if ((b->activations | b->state | b->state_gradient | b->boundary) != 0)
        sim->check.bytes = b;
    sim->header.n_actions = schedule->n_actions;
    sim->header.n_stages = schedule->shape.n_stages;
    for (i = 0; i < schedule->n_actions && !sim->desc.no_bounds; i++) {
        whole |= schedule->actions[i].pass == CF_B;
        sim->splits |= schedule->actions[i].pass == CF_I;
    }
    if (sim->splits && whole) sim->splits = CF__BOUNDS_EITHER;
    return CF_OK;
}

/* Adds up the work and finds the bubbles. Transfers and copies run beside the passes and are not work of the stage. */
static void cf__simulate_count(cf_timeline *timeline, const cf_action *actions, const double *start,
                               const double *end) {
    double capacity = timeline->makespan * (double)timeline->n_stages;
    int64_t i;
    timeline->busy = timeline->replayed = 0;
    for (i = 0; i < timeline->n_actions; i++) {
        double seconds = end[i] - start[i];
        if (actions[i].pass < CF_COMPUTE_PASS_COUNT) timeline->busy += seconds;
        if (actions[i].pass == CF_R) timeline->replayed += seconds;
    }
    timeline->bubble_useful = capacity > 0 ? 1 - (timeline->busy - timeline->replayed) / capacity : 0;
    timeline->bubble_busy = capacity > 0 ? 1 - timeline->busy / capacity : 0;
}

/* Counts the passes that take longer because of their stream, gather or scan of state, and adds up the extra time. */
static void cf__simulate_count_streams(cf__simulation *sim) {
    const cf__pipeline *pipe = &sim->pipe;
    const cf_timing *t = &pipe->timing;
    int moves = t->stream_forward > 0 || t->stream_backward > 0 || t->gather_forward > 0 || t->gather_backward > 0 ||
                t->scan_forward > 0 || t->scan_backward > 0;
    int64_t i;
    for (i = 0; i < sim->check.schedule->n_actions && moves; i++) {
        const cf_action *a = &sim->check.schedule->actions[i];
        int64_t chunk = a->chunk - pipe->first_chunk;
        double more;
        if (a->pass >= CF_COMPUTE_PASS_COUNT) continue;
        more = cf__pipe_pass_seconds(pipe, a->pass, chunk, a->stage) -
               cf__pipe_compute_seconds(pipe, a->pass, chunk, a->stage);
        sim->timeline->stream_waits += more > 0;
        sim->timeline->stream_seconds += more;
    }
}

static void cf__simulate_add_bound(cf_timeline *timeline, const char *name, double value) {
    cf_bound *bound = &timeline->bounds[timeline->n_bounds++];
    bound->name = name;
    bound->value = value;
    timeline->bound = cf__most(timeline->bound, value);
}

static void cf__simulate_add_bounds(cf__simulation *sim) {
    cf__bounds *bounds = &sim->bounds;
    int64_t s;
    for (s = 0; s < sim->pipe.shape.n_stages; s++) {
        bounds->limits[s] = cf__pipe_room_of(&sim->desc.limits, sim->check.schedule, s).chunks;
        if (sim->pipe.shape.forward_only) bounds->limits[s] = INT64_MAX;
    }
    cf__bounds_find(bounds, &sim->pipe, sim->splits, DBL_MAX);
    cf__simulate_add_bound(sim->timeline, "critical-path", bounds->critical_path);
    cf__simulate_add_bound(sim->timeline, "stage-load", bounds->stage_load);
}

/* Replaces the clock's times by measured ones. Each must be finite, and no action may end before it starts. */
static cf_result cf__simulate_replace(const cf__simulation *sim) {
    const double *start = sim->desc.start, *end = sim->desc.end;
    cf_error *error = sim->check.error;
    cf_timeline *timeline = sim->timeline;
    double first = 0, last = 0;
    int64_t i, n = timeline->n_actions;
    if (start == NULL && n > 0) return cf__fail_null(error, "start");
    if (end == NULL && n > 0) return cf__fail_null(error, "end");
    for (i = 0; i < n; i++) {
        if (!(start[i] >= -DBL_MAX && start[i] <= DBL_MAX))
            return cf__fail_real(error, CF_ERROR_ARGUMENT, "start", i, start[i], "is not a finite time");
        if (!(end[i] >= start[i] && end[i] <= DBL_MAX))
            return cf__fail_real(error, CF_ERROR_ARGUMENT, "end", i, end[i], "is not finite, or is before the start");
        if (i == 0 || start[i] < first) first = start[i];
        if (i == 0 || end[i] > last) last = end[i];
    }
    if (last - first > DBL_MAX / 1e9) /* the sum of all times must stay finite */
        return cf__refuse(error, CF_ERROR_ARGUMENT, "end", -1, "the times are too far apart");
    for (i = 0; i < n; i++) {
        timeline->start[i] = start[i] - first;
        timeline->end[i] = end[i] - first;
    }
    timeline->makespan = last - first;
    cf__simulate_count(timeline, sim->check.schedule->actions, start, end);
    return CF_OK;
}

static cf_result cf__simulate_fill(void *job) {
    cf__simulation *sim = (cf__simulation *)job;
    size_t cells = (size_t)(sim->pipe.n * sim->pipe.n_v);
    cf__clock *clock = &sim->clock;
    int64_t stuck;
    cf__pipe_fill(&sim->pipe);
    CF__TRY(cf__pipe_check_total(&sim->pipe, sim->check.error));
    memset(sim->check.cells, 0, cells * sizeof *sim->check.cells);
    sim->check.timeline = sim->timeline;
    CF__TRY(cf__check_lists(&sim->check)); /* each list alone; the clock needs sound lists */
    clock->listed = sim->check.cells;
    clock->start = sim->timeline->start;
    clock->end = sim->timeline->end;
    cf__clock_run(clock);
    stuck = cf__clock_stuck(clock);
    if (stuck >= 0) return cf__check_deadlock(&sim->check, &sim->check.schedule->actions[stuck]);
    sim->timeline->makespan = clock->makespan;
    CF__TRY(cf__check_all_complete(&sim->check));
    cf__simulate_count(sim->timeline, sim->check.schedule->actions, sim->timeline->start, sim->timeline->end);
    cf__simulate_count_streams(sim);
    if (!sim->desc.no_bounds) cf__simulate_add_bounds(sim);
    return sim->desc.start != NULL || sim->desc.end != NULL ? cf__simulate_replace(sim) : CF_OK;
}

CHUNKFLOW_API cf_result cf_simulate(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                    cf_timeline **out, cf_error *error) {
    static const cf__recipe recipe = {"n_actions", 0, cf__simulate_scratch, NULL, cf__simulate_object,
                                      cf__simulate_fill};
    cf__simulation sim;
    CF__TRY(cf__simulate_start(&sim, plan, schedule, desc, error));
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf__make(&recipe, &sim, sim.desc.allocator, error));
    *out = sim.timeline;
    return CF_OK;
}

CHUNKFLOW_API void cf_timeline_free(cf_timeline *timeline) {
    if (timeline != NULL) cf__free_object(timeline, &timeline->block);
}

/* ---- memory at every moment ---- */

/* Checks the counts after a load has changed. One action adds less than half of the largest number. */
static cf_result cf__simulate_check_load(const cf_memory_load *load, int64_t action, cf_error *error) {
    if (cf__memory_check_load(load, action, NULL) != CF_OK)
        return cf__refuse(error, CF_ERROR_SCHEDULE, "actions", action, "gives back what is not held");
#define CF__SIMULATE_CHECK_LOAD(name) \
    if (load->name > INT64_MAX / 2) return cf__fail_size(error, "loads");
    CF__MEMORY_LOADS(CF__SIMULATE_CHECK_LOAD)
    return CF_OK;
}

/* Adds what an action takes when it starts (way 1), or frees after it (way -1), on its virtual stage. Scores, if
   attention writes them out, are rows times keys of a chunk. */
static cf_result cf__simulate_change_load(const cf__simulation *sim, int64_t id, int way, cf__pipe_held *held,
                                          cf_error *error) {
    const cf_action *a = &sim->check.schedule->actions[id];
    const cf_chunk *c = &sim->pipe.plan->chunks[a->chunk];
    cf_memory_load *load = &held->load;
    int64_t keys, scores = 0;
    int runs = way > 0 && a->pass < CF_COMPUTE_PASS_COUNT;
    if (!cf__add(cf__plan_prefix(sim->pipe.plan, c), c->rows, &keys) || !cf__mul(c->rows, keys, &scores) ||
        scores > INT64_MAX / 4)
        return cf__fail_size(error, "loads.live_scores");
    (way > 0 ? cf__pipe_hold : cf__pipe_let_go)(&sim->pipe, held, a, c);
    if (way > 0 ? a->keep : 1 << a->pass & CF__CHECK_ENDS) load->live_scores += way * scores;
    load->chunk_tokens = runs ? c->rows : 0;
    load->chunk_scores = runs ? scores : 0;
    return cf__simulate_check_load(load, id, error);
}

/* Walks the list of a stage, counting only virtual stage v. loads: receives one record per action, n_virtual apart;
   NULL: only checks. */
static cf_result cf__simulate_walk_loads(const cf__simulation *sim, int64_t stage, int64_t v, cf_memory_load *loads,
                                         cf_error *error) {
    const cf_schedule *schedule = sim->check.schedule;
    cf__pipe_held held;
    int64_t id;
    memset(&held, 0, sizeof held);
    for (id = schedule->first[stage]; id < schedule->first[stage + 1]; id++) {
        int own = schedule->actions[id].stage == v;
        if (own) CF__TRY(cf__simulate_change_load(sim, id, 1, &held, error));
        if (loads != NULL) loads[(id - schedule->first[stage]) * schedule->shape.n_virtual] = held.load;
        if (own) CF__TRY(cf__simulate_change_load(sim, id, -1, &held, error));
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_loads(const cf_plan *plan, const cf_schedule *schedule, int64_t stage,
                                          cf_memory_load *loads, int64_t count, cf_error *error) {
    cf__simulation sim;
    cf__checker *k = &sim.check;
    int64_t n, j;
    CF__TRY(cf__simulate_start(&sim, plan, schedule, NULL, error));
    CF__TRY(cf__choice(stage, 0, schedule->shape.n_stages - 1, "stage", error));
    n = schedule->first[stage + 1] - schedule->first[stage];
    CF__TRY(cf__range(count, n * schedule->shape.n_virtual, INT64_MAX, "count", error));
    if (loads == NULL && n > 0) return cf__fail_null(error, "loads");
    k->stage = stage;
    for (k->action = schedule->first[stage]; k->action < schedule->first[stage + 1]; k->action++)
        CF__TRY(cf__check_fields(k, &schedule->actions[k->action]));
    for (j = 0; j < schedule->shape.n_virtual; j++) /* checks everything before it writes anything */
        CF__TRY(cf__simulate_walk_loads(&sim, stage, cf__pipe_at(&sim.pipe, j, stage), NULL, error));
    for (j = 0; j < schedule->shape.n_virtual && n > 0; j++)
        (void)cf__simulate_walk_loads(&sim, stage, cf__pipe_at(&sim.pipe, j, stage), &loads[j], error);
    return CF_OK;
}

/* ================================================================================================================
   >>lower

   The clock runs the lists. It finds when each pass begins, and when its result begins to cross to another stage. Both
   are events. Sorted by time, the events of all stages are one order, and each stage follows it. So two stages never
   wait for each other: the one whose event comes first can continue.

   In this order a transfer must come after the pass that makes its tensor and before the pass that takes it. Passes
   must stay in the order of their stage's list. The times ensure this, except for events at the same time. Of these,
   transfers come first, because a stage sends its result before it begins the next pass. Only passes that take no time
   need more care. They and their transfers come between other transfers and passes that take time, in the order in
   which the clock ran them.
   ================================================================================================================
   */

typedef struct cf__lowerer {
    cf_error *error;
    cf__pipeline pipe;
    cf__clock clock;
    cf_schedule header, *lowered;
    uint16_t *listed;          /* (cells) for the clock */
    double *times;             /* (2 x n_actions) start of each event: i is the transfer of action i's result, n_actions
                                  + i the pass itself. The two halves are the clock's `sent` and `start` */
    uint64_t *events, *spare;  /* (2 x n_actions) numbers of events, in order */
    int64_t n_events;
    int64_t *cursor;           /* (n_stages) where to put the next action of each stage */
} cf__lowerer;

static void cf__lower_scratch(void *job, cf__carver *carver) {
    cf__lowerer *l = (cf__lowerer *)job;
    int64_t n = l->clock.schedule->n_actions;
    cf__pipe_layout(&l->pipe, carver);
    cf__clock_layout(&l->clock, &l->pipe, carver);
    l->listed = (uint16_t *)cf__take(carver, l->pipe.n * l->pipe.n_v, sizeof(uint16_t));
    l->times = (double *)cf__take(carver, 2 * n, sizeof(double));
    l->clock.end = (double *)cf__take(carver, n, sizeof(double));
    l->clock.order = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    l->events = (uint64_t *)cf__take(carver, 2 * n, sizeof(uint64_t));
    l->spare = (uint64_t *)cf__take(carver, 2 * n, sizeof(uint64_t));
    l->cursor = (int64_t *)cf__take(carver, l->pipe.shape.n_stages, sizeof(int64_t));
}

/* ---- the order of passes and transfers ---- */

static int cf__lower_takes_time(const cf__lowerer *l, int64_t action) {
    return l->clock.end[action] > l->clock.start[action];
}

/* Adds an action's events. Events at the same time keep the order in which they are added. */
static void cf__lower_note(cf__lowerer *l, int64_t action, int transfer, int pass) {
    if (pass) l->events[l->n_events++] = (uint64_t)(l->clock.schedule->n_actions + action);
    if (transfer && l->clock.sent[action] >= 0) l->events[l->n_events++] = (uint64_t)action;
}

static void cf__lower_order(cf__lowerer *l) {
    int64_t n = l->clock.schedule->n_actions, i;
    for (i = 0; i < n; i++)
        if (cf__lower_takes_time(l, i)) cf__lower_note(l, i, 1, 0);
    for (i = 0; i < n; i++)
        if (!cf__lower_takes_time(l, l->clock.order[i])) cf__lower_note(l, l->clock.order[i], 1, 1);
    for (i = 0; i < n; i++)
        if (cf__lower_takes_time(l, i)) cf__lower_note(l, i, 0, 1);
    cf__sort(&l->events, &l->spare, l->n_events, l->times, 0);
}

/* ---- writing the lists ---- */

/* Adds an action to its stage's list. Until there are lists, cursor[] only counts. */
static void cf__lower_put(cf__lowerer *l, const cf_action *a) {
    int64_t *cursor = &l->cursor[cf__pipe_stage(&l->pipe, a->stage)];
    if (l->lowered != NULL) l->lowered->actions[*cursor] = *a;
    ++*cursor;
}

/* Puts all events, in the one order of all stages. A transfer is two actions. */
static void cf__lower_put_events(cf__lowerer *l) {
    int64_t n = l->clock.schedule->n_actions, i;
    for (i = 0; i < l->n_events; i++) {
        int64_t event = (int64_t)l->events[i];
        cf_action a = l->clock.schedule->actions[event < n ? event : event - n], receive;
        if (event < n) {
            a.pass = (uint8_t)(CF_SEND_F + 2 * cf__pipe_place(a.pass));
            a.keep = 0;
            receive = cf__pipe_other_end(&a);
        }
        cf__lower_put(l, &a);
        if (event < n) cf__lower_put(l, &receive);
    }
}

/* Finds the order, and from it the lengths of the lists. */
static cf_result cf__lower_prepare(void *job) {
    cf__lowerer *l = (cf__lowerer *)job;
    int64_t i;
    cf__pipe_fill(&l->pipe);
    CF__TRY(cf__pipe_check_total(&l->pipe, l->error));
    l->clock.listed = l->listed;
    l->clock.sent = l->times;
    l->clock.start = l->times + l->clock.schedule->n_actions;
    cf__clock_list(&l->clock, l->listed);
    cf__clock_run(&l->clock);
    cf__lower_order(l);
    memset(l->cursor, 0, (size_t)l->pipe.shape.n_stages * sizeof *l->cursor);
    cf__lower_put_events(l);
    for (l->header.n_actions = 0, i = 0; i < l->pipe.shape.n_stages; i++) l->header.n_actions += l->cursor[i];
    return cf__range(l->header.n_actions, 0, CF_MAX_ACTIONS, "n_actions", l->error);
}

static cf_result cf__lower_fill(void *job) {
    cf__lowerer *l = (cf__lowerer *)job;
    int64_t i, *first = l->lowered->first;
    for (first[0] = 0, i = 0; i < l->pipe.shape.n_stages; i++) {
        first[i + 1] = first[i] + l->cursor[i];
        l->cursor[i] = first[i];
    }
    cf__lower_put_events(l);
    return CF_OK;
}

/* ---- the public function ---- */

static cf_block *cf__lower_object(void *job, cf__carver *carver) {
    cf__lowerer *l = (cf__lowerer *)job;
    int64_t s;
    l->header.limits = l->clock.schedule->limits; /* the layout needs to know which arrays exist */
    l->lowered = cf__schedule_layout(&l->header, carver);
    if (l->lowered == NULL) return NULL;
    *l->lowered = l->header;
    for (s = 0; s < l->pipe.shape.n_stages; s++) {
        cf__pipe_room room = cf__pipe_room_of(&l->clock.schedule->limits, l->clock.schedule, s);
        cf__schedule_put_room(l->lowered, s, &room);
    }
    return &l->lowered->block;
}

CHUNKFLOW_API cf_result cf_schedule_lower(const cf_plan *plan, const cf_schedule *schedule, const cf_lower_desc *desc,
                                          cf_schedule **out, cf_error *error) {
    static const cf__recipe recipe = {"n_actions", 1, cf__lower_scratch, cf__lower_prepare, cf__lower_object,
                                      cf__lower_fill};
    cf__lowerer l;
    const cf_lower_desc none = {NULL, NULL};
    if (desc == NULL) desc = &none;
    memset(&l, 0, sizeof l);
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf_schedule_validate(plan, schedule, NULL, desc->allocator, error));
    if (schedule->lowered) return cf__fail(error, CF_ERROR_ARGUMENT, "lowered", -1, 0, 1, "is lowered already");
    if (schedule->lockstep)
        return cf__fail(error, CF_ERROR_ARGUMENT, "lockstep", -1, 0, 1, "lower the columns' list, not a rank's part");
    CF__TRY(cf__pipe_check_timing(desc->timing, &schedule->shape, error));
    l.clock.schedule = schedule;
    l.error = error;
    l.pipe = cf__pipe_of(plan, &schedule->shape, desc->timing);
    l.clock.pipe = &l.pipe;
    l.header = *schedule;
    l.header.lowered = 1;
    CF__TRY(cf__make(&recipe, &l, desc->allocator, error));
    *out = l.lowered;
    return CF_OK;
}

/* ================================================================================================================
   >>steps

   Walks the list of a stage once. The validator's checker checks each action first. Actions take and free slots along
   the way, and each step records the slots of its action. Example: a chain of two chunks at K = 1 on one stage. F0
   keeps nothing (slot -1) and takes state 0; F1 takes slot 0; B1 clears the state's gradient and frees slot 0; R0 takes
   slot 0 again; B0 frees slot 0 and state 0.

   Cells are the rank's chunks on the virtual stages of this stage alone. Data of a chain is in the cell of its first
   chunk.
   ================================================================================================================
   */

/* The tensors of a chunk that cross stages, on one virtual stage: first those received, then those sent. */
enum { CF__STEPS_TENSORS = 2 * CF__PIPE_TENSORS };

/* Values instead of a slot. WANTED: the list has a SEND of this tensor, so the pass that makes it takes a slot. */
enum { CF__STEPS_NONE = -1, CF__STEPS_WANTED = -2 };

enum { CF__STEPS_ACTIVATIONS, CF__STEPS_STATES, CF__STEPS_BOUNDARIES, CF__STEPS_OUTPUTS, CF__STEPS_POOLS };

/* The slots of one kind, numbered from 0. A new one is made only if none is free, so the number of slots made is the
   peak. The slot that has been free longest is used first. So an arriving tensor seldom has to wait for the pass that
   has just begun. */
typedef struct cf__steps_pool {
    int64_t n;          /* possible owners, each of which has at most one slot; so also the most slots */
    int32_t *slot_of;   /* (n) */
    int32_t *free_list; /* (n) a ring */
    int64_t first_free, n_free, n_made;
} cf__steps_pool;

typedef struct cf__stepper {
    const cf_action *actions; /* (header.n) the stage's list */
    uint64_t seed;
    cf_error *error;
    cf_steps header, *made;
    cf__pipeline pipe;
    cf__checker check;
    int64_t n_cells;
    cf__steps_pool pools[CF__STEPS_POOLS]; /* activations, states and outputs (n_cells), boundaries (n_cells x
                                              CF__STEPS_TENSORS; none if nothing crosses stages) */
    int32_t *paths;     /* (n_cells) in the cell of a chain's first chunk: index of its state in made->paths */
    int32_t *last;      /* (n_virtual) position of the last B or W so far; -1: none yet */
    int64_t n_finished; /* chunks, counted on each virtual stage, whose last pass has run */
} cf__stepper;

CHUNKFLOW_API uint64_t cf_chunk_seed(uint64_t seed, int64_t chunk, int64_t stage) {
    uint64_t of_chunk = cf__mix(seed + CF__GOLDEN * ((uint64_t)chunk + 1));
    return cf__mix(of_chunk + CF__GOLDEN * ((uint64_t)stage + 1));
}

/* ---- slots ---- */

static void cf__steps_acquire(cf__stepper *s, int what, int64_t i) {
    cf__steps_pool *pool = &s->pools[what];
    if (pool->n_free == 0) {
        pool->slot_of[i] = (int32_t)pool->n_made++;
        return;
    }
    pool->slot_of[i] = pool->free_list[pool->first_free];
    pool->n_free--;
    pool->first_free = (pool->first_free + 1) % pool->n;
}

static void cf__steps_release(cf__stepper *s, int what, int64_t i) {
    cf__steps_pool *pool = &s->pools[what];
    pool->free_list[(pool->first_free + pool->n_free++) % pool->n] = pool->slot_of[i];
    pool->slot_of[i] = CF__STEPS_NONE;
}

/* The indices that an action works with: its cell, and its boundary tensors (-1: none). */
typedef struct cf__steps_places {
    int64_t row, cell;
    int64_t in, out;          /* the tensor that it reads or receives, and the tensor that it makes or sends */
    int64_t taken, given;     /* in or out: the one for which it takes a slot, and the one whose slot it frees */
} cf__steps_places;

/* Returns the index of the tensor that a pass reads. Where a V turns, it is the same tensor that another pass on this
   stage makes. */
static inline int64_t cf__steps_read(const cf__stepper *s, const cf_action *a, int64_t cell) {
    /* In local replay an R reads the input of its F again. */
    int tensor = a->pass == CF_R && s->pipe.local ? CF_F : cf__pipe_place(a->pass), way = s->pipe.takes[tensor];
    if (!cf__pipe_leads(&s->pipe, way, a->stage)) return -1;
    if (cf__pipe_hops(&s->pipe, a->stage, a->stage + way)) return cell * CF__STEPS_TENSORS + tensor;
    return (cell + way * s->pipe.n) * CF__STEPS_TENSORS + CF__PIPE_TENSORS + tensor;
}

static inline cf__steps_places cf__steps_places_of(const cf__stepper *s, const cf_action *a) {
    int64_t n_stages = s->pipe.shape.n_stages;
    int64_t row = a->stage < n_stages ? 0 : a->stage / n_stages; /* usually there is one row: no division */
    cf__steps_places at = {row, row * s->pipe.n + a->chunk - s->pipe.first_chunk, -1, -1, -1, -1};
    int64_t first = at.cell * CF__STEPS_TENSORS;
    if (!s->check.crosses || a->pass == CF_W) return at;
    if (cf__pipe_is_transfer(a->pass)) {
        const cf__pipe_transfer *t = cf__pipe_transfer_of(a);
        if (t->sends) at.out = at.given = first + CF__PIPE_TENSORS + t->tensor;
        else at.in = at.taken = first + t->tensor;
        return at;
    }
    at.in = at.given = cf__steps_read(s, a, at.cell);
    at.out = at.taken = first + CF__PIPE_TENSORS + cf__pipe_place(a->pass);
    return at;
}

/* Returns the index of the state of a chain, or of the nearest chain above it that has a state; -1: there is none. */
static int32_t cf__steps_path(const cf__stepper *s, const cf_action *a, int64_t cell, int64_t chain) {
    const cf_plan *plan = s->pipe.plan;
    int32_t path = CF__STEPS_NONE;
    for (; chain >= 0 && path < 0; chain = cf__plan_chain_above(plan, chain))
        path = s->paths[cell + plan->chains[chain].first_chunk - a->chunk];
    return path;
}

/* Starts the state of a chain that begins with this F. */
static void cf__steps_begin_state(cf__stepper *s, const cf_action *a, const cf_chunk *c, const cf__steps_places *at) {
    const cf_plan *plan = s->pipe.plan;
    cf_path *path = &s->made->paths[s->header.n_paths];
    cf__steps_acquire(s, CF__STEPS_STATES, at->cell);
    path->chain = c->chain;
    path->begin = c->prefix;
    path->rows = plan->chains[c->chain].tokens;
    path->stage = a->stage;
    path->state = s->pools[CF__STEPS_STATES].slot_of[at->cell];
    path->first = (int32_t)(a - s->actions);
    path->last = path->clear = CF__STEPS_NONE;
    path->up = cf__steps_path(s, a, at->cell, cf__plan_chain_above(plan, c->chain));
    s->paths[at->cell] = (int32_t)s->header.n_paths++;
}

/* Returns 1 for a forward whose input and outputs a local replay reads again. */
static int cf__steps_drops(const cf__stepper *s, const cf_action *a) {
    return a->pass == CF_F && !a->keep && s->pipe.local;
}

/* Takes the slots that an action needs: for the state of the chain, kept activations, a received tensor or one that
   will be sent. */
static void cf__steps_take(cf__stepper *s, const cf_action *a, const cf_chunk *c, const cf__steps_places *at) {
    if (a->pass == CF_F && c->index == 0 && c->state > 0) cf__steps_begin_state(s, a, c, at);
    if (a->keep) cf__steps_acquire(s, CF__STEPS_ACTIVATIONS, at->cell);
    if (cf__steps_drops(s, a)) cf__steps_acquire(s, CF__STEPS_OUTPUTS, at->cell);
    if (at->taken < 0) return;
    if (at->taken == at->out && s->pools[CF__STEPS_BOUNDARIES].slot_of[at->taken] != CF__STEPS_WANTED) return;
    cf__steps_acquire(s, CF__STEPS_BOUNDARIES, at->taken);
}

static void cf__steps_end_state(cf__stepper *s, const cf_action *a, int64_t cell) {
    if (s->pools[CF__STEPS_STATES].slot_of[cell] < 0) return;
    s->made->paths[s->paths[cell]].last = (int32_t)(a - s->actions);
    cf__steps_release(s, CF__STEPS_STATES, cell);
}

/* Frees the states that end with an F, in a schedule of forwards alone. */
static void cf__steps_end_states(cf__stepper *s, const cf_action *a, const cf_chunk *c, int64_t cell) {
    const cf_plan *plan = s->pipe.plan;
    int64_t chain = c->chain >= 0 ? cf__pipe_ended(plan, c, -1) : -1;
    for (; chain >= 0; chain = cf__pipe_ended(plan, c, chain))
        cf__steps_end_state(s, a, cell + plan->chains[chain].first_chunk - a->chunk);
}

/* Frees the slots that nothing needs after an action. In local replay the input of an F that kept nothing stays for its
   R. */
static void cf__steps_give_back(cf__stepper *s, const cf_action *a, const cf_chunk *c, const cf__steps_places *at) {
    int forward_only = s->pipe.shape.forward_only != 0;
    if (1 << a->pass & CF__CHECK_ENDS) cf__steps_release(s, CF__STEPS_ACTIVATIONS, at->cell);
    if (1 << a->pass & (forward_only ? 1 << CF_F : (int)CF__CHECK_ENDS)) s->n_finished++;
    if (1 << a->pass & CF__CHECK_BACKWARDS && c->index == 0) cf__steps_end_state(s, a, at->cell);
    if (forward_only && a->pass == CF_F) cf__steps_end_states(s, a, c, at->cell);
    if (a->pass == CF_R && s->pipe.local) cf__steps_release(s, CF__STEPS_OUTPUTS, at->cell);
    if (at->given >= 0 && !cf__steps_drops(s, a)) cf__steps_release(s, CF__STEPS_BOUNDARIES, at->given);
}

/* ---- one action ---- */

/* Fills in the states of a pass. A pass that adds to dK and dV of a chain also adds to those of all chains above. So
   the chains of a path without additions so far are its lowest ones. */
static void cf__steps_find_path(const cf__stepper *s, const cf_action *a, const cf_chunk *c, int64_t cell,
                                cf_step *step) {
    cf_path *paths = s->made->paths;
    int32_t i;
    step->path = cf__steps_path(s, a, cell, c->chain);
    step->state = c->state > 0 ? paths[step->path].state : -1;
    if (!(1 << a->pass & CF__CHECK_BACKWARDS)) return;
    for (i = step->path; i >= 0 && paths[i].clear < 0; i = paths[i].up) paths[i].clear = step->position;
    step->clear_state_gradient = step->state >= 0 && paths[step->path].clear == step->position;
}

/* Writes the step of an action that has its slots. */
static void cf__steps_write(cf__stepper *s, const cf_action *a, const cf_chunk *c, const cf__steps_places *at) {
    const int32_t *boundaries = s->pools[CF__STEPS_BOUNDARIES].slot_of;
    int transfer = cf__pipe_is_transfer(a->pass), keeps = a->keep || s->pipe.shape.forward_only;
    cf_step *step = &s->made->steps[a - s->actions];
    memset(step, 0, sizeof *step);
    step->action = *a;
    step->position = (int32_t)(a - s->actions);
    step->slot = transfer ? -1 : s->pools[CF__STEPS_ACTIVATIONS].slot_of[at->cell];
    step->state = step->path = -1;
    step->input = at->in >= 0 ? boundaries[at->in] : -1;
    step->output = at->out >= 0 && boundaries[at->out] >= 0 ? boundaries[at->out] : -1;
    step->outputs = a->pass == CF_R || cf__steps_drops(s, a) ? s->pools[CF__STEPS_OUTPUTS].slot_of[at->cell] : -1;
    step->peer = -1;
    if (transfer) step->peer = (int32_t)cf__pipe_stage(&s->pipe, cf__pipe_other_end(a).stage);
    else if (a->pass != CF_W) cf__steps_find_path(s, a, c, at->cell, step);
    step->seed = cf_chunk_seed(s->seed, a->chunk, a->stage);
    step->wants_loss = !transfer && keeps && a->stage == s->pipe.n_v - 1 && c->tokens > 0;
    if (a->pass == CF_B || a->pass == CF_W) s->last[at->row] = step->position;
}

static cf_result cf__steps_action(cf__stepper *s, const cf_action *a) {
    cf__pipe_held *held = &s->check.held;
    cf_step *step = &s->made->steps[a - s->actions];
    const cf_chunk *c;
    cf__steps_places at;
    s->check.action = a - s->check.schedule->actions;
    CF__TRY(cf__check_fields(&s->check, a));
    at = cf__steps_places_of(s, a);
    c = &s->pipe.plan->chunks[a->chunk];
    CF__TRY(cf__check_action(&s->check, a, c, &s->check.cells[at.cell]));
    cf__steps_take(s, a, c, &at);
    cf__steps_write(s, a, c, &at);
    if (!cf__pipe_is_transfer(a->pass)) {
        cf__pipe_hold(&s->pipe, held, a, c);
        s->made->peak_tokens = cf__max(s->made->peak_tokens, held->load.live_tokens);
        s->made->peak_state_tokens = cf__max(s->made->peak_state_tokens, held->load.state_tokens);
        s->made->peak_dropped_tokens = cf__max(s->made->peak_dropped_tokens, held->load.input_tokens);
        cf__pipe_let_go(&s->pipe, held, a, c);
    }
    cf__steps_give_back(s, a, c, &at);
    step->live = (int32_t)held->live;
    step->state_tokens = held->load.state_tokens;
    return CF_OK;
}

/* ---- making the steps ---- */

static void cf__steps_scratch(void *job, cf__carver *carver) {
    cf__stepper *s = (cf__stepper *)job;
    int what;
    s->check.cells = (uint16_t *)cf__take(carver, s->n_cells, sizeof(uint16_t));
    s->paths = (int32_t *)cf__take(carver, s->n_cells, sizeof(int32_t));
    s->last = (int32_t *)cf__take(carver, s->pipe.shape.n_virtual, sizeof(int32_t));
    for (what = 0; what < CF__STEPS_POOLS; what++) {
        s->pools[what].slot_of = (int32_t *)cf__take(carver, s->pools[what].n, sizeof(int32_t));
        s->pools[what].free_list = (int32_t *)cf__take(carver, s->pools[what].n, sizeof(int32_t));
    }
}

static cf_block *cf__steps_object(void *job, cf__carver *carver) {
    cf__stepper *s = (cf__stepper *)job;
    s->made = (cf_steps *)cf__take(carver, 1, sizeof(cf_steps));
    s->header.steps = (cf_step *)cf__take(carver, s->header.n, sizeof(cf_step));
    s->header.paths = (cf_path *)cf__take(carver, s->header.n_paths, sizeof(cf_path));
    if (s->made == NULL) return NULL;
    *s->made = s->header;
    return &s->made->block;
}

/* Marks the tensors that will be sent, or that the same stage reads where a V turns. A pass that makes a marked tensor
   will take a slot for it. Until then no slot is in use. */
static cf_result cf__steps_find_sends(void *job) {
    cf__stepper *s = (cf__stepper *)job;
    const cf_action *a = s->actions;
    int64_t i, given;
    int what;
    s->check.pipe = &s->pipe;
    for (what = 0; what < CF__STEPS_POOLS; what++)
        for (i = 0; i < s->pools[what].n; i++) s->pools[what].slot_of[i] = CF__STEPS_NONE;
    for (i = 0; i < s->n_cells; i++) s->paths[i] = CF__STEPS_NONE;
    for (i = 0; i < s->pipe.shape.n_virtual; i++) s->last[i] = CF__STEPS_NONE;
    for (i = 0; i < s->header.n && s->check.crosses; i++, a++) {
        s->check.action = a - s->check.schedule->actions;
        CF__TRY(cf__check_fields(&s->check, a));
        if (cf__pipe_is_transfer(a->pass)) CF__TRY(cf__check_ends(&s->check, a));
        given = cf__steps_places_of(s, a).given;
        if (given >= 0 && given % CF__STEPS_TENSORS >= CF__PIPE_TENSORS)
            s->pools[CF__STEPS_BOUNDARIES].slot_of[given] = CF__STEPS_WANTED;
    }
    return CF_OK;
}

/* Refuses a list that leaves out a pass. */
static cf_result cf__steps_judge_end(const cf__stepper *s) {
    int64_t n_left = 0;
    int what;
    for (what = 0; what < CF__STEPS_POOLS; what++) n_left += s->pools[what].n_made - s->pools[what].n_free;
    if (n_left > 0)
        return cf__fail(s->error, CF_ERROR_SCHEDULE, "actions", -1, 0, n_left,
                        "slots are still in use at the end of the list");
    if (s->n_finished != s->n_cells)
        return cf__fail(s->error, CF_ERROR_SCHEDULE, "actions", -1, s->n_cells, s->n_finished,
                        "some chunks never end their backward");
    return CF_OK;
}

static cf_result cf__steps_fill(void *job) {
    cf__stepper *s = (cf__stepper *)job;
    int64_t i;
    s->header.n_paths = 0; /* from here on, the number of states that have begun */
    for (i = 0; i < s->header.n; i++) CF__TRY(cf__steps_action(s, &s->actions[i]));
    CF__TRY(cf__steps_judge_end(s));
    for (i = 0; i < s->pipe.shape.n_virtual; i++)
        if (s->last[i] >= 0) s->made->steps[s->last[i]].last_backward = 1;
    s->made->n_slots = s->pools[CF__STEPS_ACTIVATIONS].n_made;
    s->made->n_states = s->pools[CF__STEPS_STATES].n_made;
    s->made->n_boundaries = s->pools[CF__STEPS_BOUNDARIES].n_made;
    s->made->n_outputs = s->pools[CF__STEPS_OUTPUTS].n_made;
    return CF_OK;
}

static const cf__recipe cf__steps_recipe = {"n_actions", 1, cf__steps_scratch, cf__steps_find_sends, cf__steps_object,
                                            cf__steps_fill};

/* Checks plan and schedule against each other, and counts the cells, paths and slots that the stage needs. */
static cf_result cf__steps_start(cf__stepper *s, const cf_plan *plan, const cf_schedule *schedule, int64_t stage,
                                 cf_error *error) {
    int64_t i, n_chains = 0;
    memset(s, 0, sizeof *s);
    CF__TRY(cf__pipe_check_schedule(plan, schedule, 0, error));
    if (!cf__mul(plan->chunks_per_rank, schedule->shape.n_virtual, &s->n_cells) ||
        s->n_cells > INT32_MAX / CF__STEPS_TENSORS)
        return cf__refuse(error, CF_ERROR_LIMIT, "shape.n_virtual", -1,
                          "a stage has too many chunks on its virtual stages");
    /* Memory must stay in proportion to the chunks and actions. */
    if (schedule->shape.n_virtual > 1 && schedule->n_actions / schedule->shape.n_stages < s->n_cells)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_actions", -1, s->n_cells, schedule->n_actions,
                        "every chunk needs two passes on every virtual stage");
    CF__TRY(cf__choice(stage, 0, schedule->shape.n_stages - 1, "stage", error));
    s->pipe = cf__pipe_of(plan, &schedule->shape, NULL);
    s->error = error;
    cf__check_take_up(&s->check, schedule, error);
    s->check.limits = &schedule->limits; /* so that positions count from the start of the list */
    s->check.stage = stage;
    s->header.stage = stage;
    s->header.transfers = s->check.crosses;
    s->header.n = schedule->first[stage + 1] - schedule->first[stage];
    CF__TRY(cf__range(s->header.n, 0, CF_MAX_ACTIONS, "n_actions", error));
    if (s->header.n > 0) s->actions = &schedule->actions[schedule->first[stage]];
    for (i = 0; i < s->pipe.n; i++) {
        const cf_chunk *c = &s->pipe.chunks[i];
        n_chains += c->index == 0 && c->state > 0;
    }
    s->header.n_paths = n_chains * schedule->shape.n_virtual;
    s->pools[CF__STEPS_ACTIVATIONS].n = s->pools[CF__STEPS_STATES].n = s->pools[CF__STEPS_OUTPUTS].n = s->n_cells;
    s->pools[CF__STEPS_BOUNDARIES].n = s->check.crosses ? s->n_cells * CF__STEPS_TENSORS : 0;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_steps_make(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, uint64_t seed,
                                      const cf_allocator *allocator, cf_steps **out, cf_error *error) {
    cf__stepper s;
    CF__TRY(cf__steps_start(&s, plan, schedule, stage, error));
    if (out == NULL) return cf__fail_null(error, "out");
    s.seed = seed;
    CF__TRY(cf__make(&cf__steps_recipe, &s, allocator, error));
    *out = s.made;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_steps_size(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, size_t *bytes,
                                      cf_error *error) {
    cf__stepper s;
    CF__TRY(cf__steps_start(&s, plan, schedule, stage, error));
    return cf__size_job(&cf__steps_recipe, &s, bytes, error);
}

CHUNKFLOW_API cf_result cf_steps_into(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, uint64_t seed,
                                      void *memory, size_t bytes, cf_steps **out, cf_error *error) {
    cf__stepper s;
    CF__TRY(cf__steps_start(&s, plan, schedule, stage, error));
    if (out == NULL) return cf__fail_null(error, "out");
    s.seed = seed;
    CF__TRY(cf__make_into(&cf__steps_recipe, &s, memory, bytes, error));
    *out = s.made;
    return CF_OK;
}

CHUNKFLOW_API void cf_steps_free(cf_steps *steps) {
    if (steps != NULL) cf__free_object(steps, &steps->block);
}

static void cf__steps_raise(int64_t *to, int64_t value) { *to = cf__max(*to, value); }

CHUNKFLOW_API cf_result cf_steps_capacity(const cf_plan *plan, const cf_steps *steps, cf_capacity *capacity,
                                          cf_error *error) {
    int64_t i;
    CF__TRY(cf__plan_check_counts(plan, error));
    if (capacity == NULL) return cf__fail_null(error, "capacity");
    CF__TRY(cf__plan_check_units(plan, 0, plan->n_ranks, error));
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        int64_t n_slices = cf__min(c->n_slices, plan->chunk_size); /* each slice has a token */
        /* There is padding after the last slice if the capacity has more rows, and after any slice if rows are
           aligned. */
        cf__steps_raise(&capacity->n_seqs, n_slices + (plan->align > 1 ? cf__max(n_slices, 1) : 1));
        cf__steps_raise(&capacity->rows, c->rows);
        cf__steps_raise(&capacity->prefix, cf__plan_prefix(plan, c));
    }
    if (steps == NULL) return CF_OK;
    cf__steps_raise(&capacity->activations, steps->n_slots);
    cf__steps_raise(&capacity->states, steps->n_states);
    cf__steps_raise(&capacity->boundaries, steps->n_boundaries);
    cf__steps_raise(&capacity->outputs, steps->n_outputs);
    return CF_OK;
}

/* ================================================================================================================
   >>write
   ================================================================================================================ */

/* A buffer for text, written in pieces of up to sizeof text. After a refused piece the rest is dropped. */
typedef struct cf__writer {
    cf_write_fn write;
    void *user;
    int code; /* the first answer of the callback that was not 0 */
    size_t used;
    char text[4096];
} cf__writer;

enum { CF__WRITE_PIECE = 256 }; /* maximum characters that one cf__write_text makes */

static void cf__write_flush(cf__writer *w) {
    if (w->code == 0) w->code = w->write(w->text, w->used, w->user);
    w->used = 0;
}

static void cf__write_text(cf__writer *w, const char *format, ...) {
    va_list arguments;
    int n;
    if (sizeof w->text - w->used < CF__WRITE_PIECE) cf__write_flush(w);
    va_start(arguments, format);
    n = vsnprintf(w->text + w->used, CF__WRITE_PIECE, format, arguments);
    va_end(arguments);
    if (n > 0) w->used += (size_t)cf__min(n, CF__WRITE_PIECE - 1);
}

/* A member of a JSON object; cf__write_members puts commas between them. */
typedef struct cf__write_member {
    const char *name;
    int64_t value;
} cf__write_member;

static void cf__write_members(cf__writer *w, const char *before, const cf__write_member *members, int64_t n,
                              const char *behind) {
    int64_t i;
    cf__write_text(w, "%s", before);
    for (i = 0; i < n; i++)
        cf__write_text(w, "%s\"%s\": %lld", i > 0 ? ", " : "", members[i].name, (long long)members[i].value);
    cf__write_text(w, "%s", behind);
}

/* Writes a double as JSON, for any decimal point of the locale, which may have several bytes. */
static void cf__write_real(cf__writer *w, const char *before, const char *name, double value) {
    char text[40], *c, *end = text;
    (void)snprintf(text, sizeof text, "%.17g", value);
    for (c = text; *c != 0; c++)
        if (strchr("0123456789+-e", *c) != NULL) *end++ = *c;
        else if (CF__NEVER(end == text) || end[-1] != '.') *end++ = '.';
    *end = 0;
    cf__write_text(w, "%s\"%s\": %s", before, name, text);
}

static cf_result cf__write_start(cf__writer *w, cf_write_fn write, void *user, cf_error *error) {
    memset(w, 0, sizeof *w);
    w->write = write;
    w->user = user;
    return write != NULL ? CF_OK : cf__fail_null(error, "write");
}

static cf_result cf__write_end(cf__writer *w, cf_error *error) {
    cf__write_flush(w);
    if (w->code == 0) return CF_OK;
    if (error != NULL) cf__record(error, CF_ERROR_WRITE, "write", -1, 0, w->code, "the callback reported an error", "");
    return CF_ERROR_WRITE;
}

static void cf__write_counts(cf__writer *w, const char *name, const int64_t *values, int64_t n) {
    int64_t i;
    cf__write_text(w, ",\n  \"%s\": [", name);
    for (i = 0; i < n && w->code == 0; i++) cf__write_text(w, "%s%lld", i > 0 ? ", " : "", (long long)values[i]);
    cf__write_text(w, "]");
}

/* ---- plans ---- */

/* Writes an array inside a line. */
static void cf__write_ids(cf__writer *w, const char *name, const int32_t *ids, int64_t n) {
    int64_t i;
    cf__write_text(w, ", \"%s\": [", name);
    for (i = 0; i < n && w->code == 0; i++) cf__write_text(w, "%s%d", i > 0 ? ", " : "", (int)ids[i]);
    cf__write_text(w, "]");
}

/* Writes the metadata that only trees have. */
static void cf__write_calls_json(cf__writer *w, const cf_metadata *m) {
    int64_t i;
    cf__write_ids(w, "extra_rows", m->extra_rows, m->n_extra);
    cf__write_ids(w, "extra_sequences", m->extra_sequences, m->n_extra);
    cf__write_ids(w, "extra_targets", m->extra_targets, m->n_extra);
    cf__write_text(w, ", \"calls\": [");
    for (i = 0; i < m->n_calls; i++) {
        const cf_attention_call *l = &m->calls[i];
        const cf__write_member members[] = {{"chain", l->chain},
                                            {"first", l->first},
                                            {"max_seqlen_q", l->max_seqlen_q},
                                            {"max_seqlen_k", l->max_seqlen_k}};
        cf__write_members(w, i > 0 ? ", {" : "{", members, CF__COUNT(members), "");
        cf__write_ids(w, "cu_seqlens_q", l->cu_seqlens_q, l->n_seqs + 1);
        cf__write_ids(w, "cu_seqlens_k", l->cu_seqlens_k, l->n_seqs + 1);
        cf__write_text(w, "}");
    }
    cf__write_text(w, "]");
}

static void cf__write_metadata_json(cf__writer *w, const cf_metadata *m, int is_tree) {
    cf__write_text(w, ", \"metadata\": {\"max_seqlen_q\": %d, \"max_seqlen_k\": %d", (int)m->max_seqlen_q,
                   (int)m->max_seqlen_k);
    cf__write_ids(w, "cu_seqlens_q", m->cu_seqlens_q, m->n_seqs + 1);
    cf__write_ids(w, "cu_seqlens_k", m->cu_seqlens_k, m->n_seqs + 1);
    cf__write_ids(w, "sequence_ids", m->sequence_ids, m->rows);
    cf__write_ids(w, "position_ids", m->position_ids, m->rows);
    cf__write_ids(w, "target_positions", m->target_positions, m->rows);
    if (is_tree) cf__write_calls_json(w, m);
    cf__write_text(w, "}");
}

/* Writes a chunk in one line. m: its metadata; NULL: without. */
static void cf__write_chunk_json(cf__writer *w, const cf_plan *plan, int64_t id, const cf_metadata *m) {
    const cf_chunk *c = &plan->chunks[id];
    const cf__write_member members[] = {{"id", id},            {"chain", c->chain},   {"index", c->index},
                                        {"prefix", c->prefix}, {"tokens", c->tokens}, {"rows", c->rows},
                                        {"pairs", c->pairs},   {"rank", c->rank},     {"up", c->up},
                                        {"down", c->down},     {"below", c->below},   {"state", c->state},
                                        {"cp", c->cp}};
    int64_t i;
    cf__write_members(w, id > 0 ? ",\n    {" : "\n    {", members, CF__COUNT(members), ", \"slices\": [");
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *s = &plan->slices[c->first_slice + i];
        const cf__write_member slice[] = {{"sequence", s->sequence}, {"begin", s->begin}, {"length", s->length},
                                          {"offset", s->offset},     {"up", s->up},       {"first", s->first},
                                          {"n", s->n}};
        cf__write_members(w, i > 0 ? ", {" : "{", slice, plan->order != NULL ? CF__COUNT(slice) : 5, "}");
    }
    cf__write_text(w, "]");
    if (m != NULL) cf__write_metadata_json(w, m, plan->order != NULL);
    cf__write_text(w, "}");
}

static void cf__write_chain_json(cf__writer *w, const cf_plan *plan, int64_t id) {
    const cf_chain *g = &plan->chains[id];
    const cf__write_member members[] = {{"id", id},
                                        {"sequence", g->sequence},
                                        {"first_chunk", g->first_chunk},
                                        {"n_chunks", g->n_chunks},
                                        {"tokens", g->tokens},
                                        {"cp", g->cp}};
    cf__write_members(w, id > 0 ? ",\n    {" : "\n    {", members, CF__COUNT(members), "}");
}

static void cf__write_plan_counts(cf__writer *w, const cf_plan *plan) {
    const cf__write_member options[] = {
        {"chunk_size", plan->chunk_size}, {"align", plan->align}, {"max_slices", plan->max_slices}};
    const cf__write_member given[] = {
        {"n_sequences", plan->n_sequences}, {"n_empty", plan->n_empty}, {"n_tokens", plan->n_tokens}};
    const cf__write_member made[] = {{"n_ranks", plan->n_ranks},   {"chunks_per_rank", plan->chunks_per_rank},
                                     {"n_chunks", plan->n_chunks}, {"n_idle", plan->n_idle},
                                     {"n_chains", plan->n_chains}, {"n_slices", plan->n_slices}};
    cf_plan_stats stats;
    cf_plan_measure(plan, NULL, &stats);
    cf__write_text(w, "{\n  \"format\": \"chunkflow-plan\", \"version\": %d,\n  ", CF_JSON_VERSION);
    cf__write_members(w, "", options, CF__COUNT(options), ", ");
    cf__write_text(w, "\"method\": \"%s\", \"split\": \"%s\"", cf_pack_method_name(plan->method),
                   cf_split_method_name(plan->split));
    cf__write_members(w, ",\n  ", given, CF__COUNT(given), "");
    cf__write_members(w, ", \n  ", made, CF__COUNT(made), "");
    cf__write_text(w, ", \n  \"lower_bound\": %lld, \"excess\": %lld", (long long)plan->lower_bound,
                   (long long)stats.excess);
    cf__write_real(w, ", ", "fill", stats.fill);
}

static void cf__write_plan_head(cf__writer *w, const cf_plan *plan) {
    int64_t i;
    cf__write_plan_counts(w, plan);
    if (plan->order != NULL) {
        cf__write_counts(w, "order", plan->order, plan->n_sequences);
        cf__write_counts(w, "common", plan->common, plan->n_sequences);
        cf__write_counts(w, "lengths", plan->lengths, plan->n_sequences);
    }
    cf__write_text(w, ",\n  \"chains\": [");
    for (i = 0; i < plan->n_chains && w->code == 0; i++) cf__write_chain_json(w, plan, i);
    cf__write_text(w, "],\n  \"chunks\": [");
}

CHUNKFLOW_API cf_result cf_write_plan_json(const cf_plan *plan, const cf_write_desc *desc, cf_write_fn write,
                                           void *user, cf_error *error) {
    cf__writer w;
    cf_allocator allocator = {NULL, NULL, NULL};
    cf_metadata m;
    void *memory = NULL; /* for the metadata of any chunk, if wanted */
    size_t bytes = 0;
    int64_t i;
    CF__TRY(cf__plan_check_counts(plan, error));
    CF__TRY(cf__write_start(&w, write, user, error));
    CF__TRY(cf__check_flag(desc != NULL ? desc->metadata : 0, "metadata", -1, error));
    if (desc != NULL && desc->metadata) {
        CF__TRY(cf_allocator_resolve(desc->allocator, &allocator, error));
        CF__TRY(cf_metadata_size(plan, -1, NULL, &bytes, error));
        CF__TRY(cf_allocate(&allocator, bytes, &memory, error));
    }
    cf__write_plan_head(&w, plan);
    for (i = 0; i < plan->n_chunks && w.code == 0; i++) {
        /* cannot fail: its size was found */
        if (memory != NULL) (void)cf_metadata_fill(plan, i, NULL, memory, bytes, &m, NULL);
        cf__write_chunk_json(&w, plan, i, memory != NULL ? &m : NULL);
    }
    if (memory != NULL) allocator.release(memory, allocator.user);
    cf__write_text(&w, "]\n}\n");
    return cf__write_end(&w, error);
}

/* ---- schedules ---- */

static void cf__write_timeline(cf__writer *w, const cf_timeline *t) {
    int64_t i;
    cf__write_real(w, "\n  ", "makespan", t->makespan);
    cf__write_real(w, ", ", "busy", t->busy);
    cf__write_real(w, ", ", "replayed", t->replayed);
    cf__write_real(w, ", ", "bubble_useful", t->bubble_useful);
    cf__write_real(w, ", ", "bubble_busy", t->bubble_busy);
    if (t->stream_waits > 0) {
        cf__write_text(w, ", \"stream_waits\": %lld", (long long)t->stream_waits);
        cf__write_real(w, ", ", "stream_seconds", t->stream_seconds);
    }
    cf__write_text(w, ",\n  \"bounds\": {");
    for (i = 0; i < t->n_bounds; i++)
        cf__write_real(w, i > 0 ? ", " : "", t->bounds[i].name, t->bounds[i].value);
    cf__write_text(w, "}");
    cf__write_counts(w, "peak_live", t->peak_live, t->n_stages);
    cf__write_counts(w, "peak_tokens", t->peak_tokens, t->n_stages);
    cf__write_counts(w, "peak_state_tokens", t->peak_state_tokens, t->n_stages);
    cf__write_counts(w, "peak_bytes", t->peak_bytes, t->n_stages);
    cf__write_text(w, ",");
}

/* Writes an action in one line. t: its timeline; NULL: without. */
static void cf__write_action_json(cf__writer *w, const cf_action *a, const cf_timeline *t, int64_t id) {
    cf__write_text(w, "{\"pass\": \"%s\", \"chunk\": %d, \"stage\": %d", cf_pass_name((cf_pass)a->pass), (int)a->chunk,
                   (int)a->stage);
    if (a->pass == CF_F || a->pass == CF_R) cf__write_text(w, ", \"keep\": %s", a->keep ? "true" : "false");
    if (t != NULL) {
        cf__write_real(w, ", ", "start", t->start[id]);
        cf__write_real(w, ", ", "end", t->end[id]);
        cf__write_text(w, ", \"live\": %d", (int)t->live[id]);
    }
    cf__write_text(w, "}");
}

/* Writes the limit of each stage (0: none), if any stage has one. */
static void cf__write_limit(cf__writer *w, const char *name, int64_t all, const int64_t *by_stage, int64_t n_stages) {
    int64_t s, any = 0;
    for (s = 0; s < n_stages; s++) any |= cf__pipe_given(all, by_stage, s) > 0;
    if (!any) return;
    cf__write_text(w, ",\n  \"%s\": [", name);
    for (s = 0; s < n_stages; s++)
        cf__write_text(w, "%s%lld", s > 0 ? ", " : "", (long long)cf__max(cf__pipe_given(all, by_stage, s), 0));
    cf__write_text(w, "]");
}

static void cf__write_limits(cf__writer *w, const cf_schedule *s) {
    const cf_limits *limits = &s->limits;
    const cf__write_member members[] = {{"activations", limits->per_token.activations},
                                        {"state", limits->per_token.state},
                                        {"state_gradient", limits->per_token.state_gradient},
                                        {"boundary", limits->per_token.boundary}};
    cf__write_limit(w, "limits", limits->chunks, limits->chunks_by_stage, s->shape.n_stages);
    cf__write_limit(w, "state_limits", limits->state, limits->state_by_stage, s->shape.n_stages);
    if (limits->bytes <= 0 && limits->bytes_by_stage == NULL) return;
    cf__write_limit(w, "byte_limits", limits->bytes, limits->bytes_by_stage, s->shape.n_stages);
    cf__write_members(w, ",\n  \"token_bytes\": {", members, CF__COUNT(members), "}");
}

static void cf__write_schedule_counts(cf__writer *w, const cf_schedule *s) {
    const cf__write_member members[] = {{"stages", s->shape.n_stages},    {"virtual_stages", s->shape.n_virtual},
                                        {"k", s->shape.k},                {"rank", s->shape.rank},
                                        {"n_chunks", s->n_chunks},  {"n_actions", s->n_actions},
                                        {"lowered", s->lowered}};
    const cf__write_member flags[] = {
        {"lockstep", s->lockstep}, {"forward_only", s->shape.forward_only}, {"outputs", s->shape.outputs}};
    int64_t i;
    cf__write_text(w, "{\n  \"format\": \"chunkflow-schedule\", \"version\": %d,\n  ", CF_JSON_VERSION);
    cf__write_text(w, "\"kind\": \"%s\", \"replay\": \"%s\", \"placement\": \"%s\"", cf_schedule_kind_name(s->kind),
                   cf_replay_name(s->shape.replay),
                   cf_placement_name(s->shape.placement == CF_PLACEMENT_V ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP));
    cf__write_members(w, ",\n  ", members, CF__COUNT(members), "");
    for (i = 0; i < CF__COUNT(flags); i++)
        if (flags[i].value) cf__write_members(w, ", ", &flags[i], 1, "");
    cf__write_limits(w, s);
    cf__write_text(w, ", ");
}

CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, const cf_timeline *timeline,
                                               cf_write_fn write, void *user, cf_error *error) {
    cf__writer w;
    int64_t stage, i;
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    CF__TRY(cf__write_start(&w, write, user, error));
    if (timeline != NULL &&
        (timeline->n_actions != schedule->n_actions || timeline->n_stages != schedule->shape.n_stages))
        return cf__fail(error, CF_ERROR_ARGUMENT, "timeline", -1, schedule->n_actions, timeline->n_actions,
                        "has another number of actions or stages than the schedule");
    cf__write_schedule_counts(&w, schedule);
    if (timeline != NULL) cf__write_timeline(&w, timeline);
    cf__write_text(&w, "\n  \"actions\": [");
    for (stage = 0; stage < schedule->shape.n_stages; stage++) {
        cf__write_text(&w, "%s\n   [", stage > 0 ? "," : "");
        for (i = schedule->first[stage]; i < schedule->first[stage + 1] && w.code == 0; i++) {
            cf__write_text(&w, "%s\n    ", i > schedule->first[stage] ? "," : "");
            cf__write_action_json(&w, &schedule->actions[i], timeline, i);
        }
        cf__write_text(&w, "]");
    }
    cf__write_text(&w, "]\n}\n");
    return cf__write_end(&w, error);
}

/* ================================================================================================================
   >>graph

   This section decides nothing: nodes are the schedule's passes, and >>check's index gives the passes that each waits
   for.
   ================================================================================================================
   */

typedef struct cf__graph_builder {
    cf_schedule_index *index; /* also has the schedule */
    cf__pipeline pipe;
    cf_error *error;
    int32_t *number;         /* (n_actions) the node of each action; transfers have none */
    cf_graph header, *graph; /* header: counts and shape, before there is memory */
} cf__graph_builder;

static void cf__graph_scratch(void *job, cf__carver *carver) {
    cf__graph_builder *g = (cf__graph_builder *)job;
    cf__pipe_layout(&g->pipe, carver);
    g->number = (int32_t *)cf__take(carver, g->index->schedule->n_actions, sizeof(int32_t));
}

static cf_result cf__graph_count(void *job) {
    cf__graph_builder *g = (cf__graph_builder *)job;
    cf_need needs[CF_MAX_NEEDS];
    int64_t i;
    for (i = 0; i < g->index->schedule->n_actions; i++) {
        if (cf__pipe_is_transfer(g->index->schedule->actions[i].pass)) continue;
        g->number[i] = (int32_t)g->header.n_nodes++;
        g->header.n_edges += cf_schedule_needs(g->index, i, needs);
    }
    return CF_OK;
}

static cf_block *cf__graph_object(void *job, cf__carver *carver) {
    cf__graph_builder *g = (cf__graph_builder *)job;
    cf_graph *graph = &g->header;
    g->graph = (cf_graph *)cf__take(carver, 1, sizeof(cf_graph));
    graph->nodes = (cf_node *)cf__take(carver, graph->n_nodes, sizeof(cf_node));
    graph->first_in = (int64_t *)cf__take(carver, graph->n_nodes + 1, sizeof(int64_t));
    graph->edges = (cf_edge *)cf__take(carver, graph->n_edges, sizeof(cf_edge));
    graph->first_out = (int64_t *)cf__take(carver, graph->n_nodes + 1, sizeof(int64_t));
    graph->out = (int32_t *)cf__take(carver, graph->n_edges, sizeof(int32_t));
    if (g->graph == NULL) return NULL;
    *g->graph = *graph;
    return &g->graph->block;
}

static void cf__graph_put_edge(const cf__graph_builder *g, cf_edge *edge, const cf_need *need, int64_t to) {
    const cf_action *a = &g->index->schedule->actions[need->action], *b = &g->index->schedule->actions[to];
    memset(edge, 0, sizeof *edge);
    if (cf__pipe_crosses(need->why))
        edge->seconds = cf__pipe_hop_seconds(&g->pipe, a->chunk - g->pipe.first_chunk, a->stage, b->stage);
    edge->from = g->number[need->action];
    edge->to = g->number[to];
    edge->why = (int32_t)need->why;
}

/* Writes the node of a pass, and its edges from number `edge` on. Returns the number of the next edge. */
static int64_t cf__graph_put(const cf__graph_builder *g, int64_t action, int64_t edge) {
    const cf_action *a = &g->index->schedule->actions[action];
    cf_node *node = &g->graph->nodes[g->number[action]];
    cf_need needs[CF_MAX_NEEDS];
    int i, n = cf_schedule_needs(g->index, action, needs);
    memset(node, 0, sizeof *node); /* also its padding, so that the same input gives the same bytes */
    node->seconds = cf__pipe_pass_seconds(&g->pipe, a->pass, a->chunk - g->pipe.first_chunk, a->stage);
    node->action = *a;
    g->graph->first_in[g->number[action]] = edge;
    for (i = 0; i < n; i++) cf__graph_put_edge(g, &g->graph->edges[edge++], &needs[i], action);
    return edge;
}

/* Sorts the edges by `from`, by counting. At first first_out[i] is the end of node i's edges. It moves down to their
   beginning as they are placed, last to first. */
static void cf__graph_sort_out(cf_graph *graph) {
    int64_t i, *first = graph->first_out;
    memset(first, 0, (size_t)(graph->n_nodes + 1) * sizeof *first);
    for (i = 0; i < graph->n_edges; i++) first[graph->edges[i].from]++;
    for (i = 0; i < graph->n_nodes; i++) first[i + 1] += first[i];
    for (i = graph->n_edges - 1; i >= 0; i--) graph->out[--first[graph->edges[i].from]] = (int32_t)i;
}

static cf_result cf__graph_fill(void *job) {
    cf__graph_builder *g = (cf__graph_builder *)job;
    int64_t i, edge = 0;
    cf__pipe_fill(&g->pipe);
    CF__TRY(cf__pipe_check_total(&g->pipe, g->error));
    for (i = 0; i < g->index->schedule->n_actions; i++)
        if (!cf__pipe_is_transfer(g->index->schedule->actions[i].pass)) edge = cf__graph_put(g, i, edge);
    g->graph->first_in[g->graph->n_nodes] = edge;
    cf__graph_sort_out(g->graph);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_graph_make(const cf_plan *plan, const cf_schedule *schedule, const cf_timing *timing,
                                      const cf_allocator *allocator, cf_graph **out, cf_error *error) {
    static const cf__recipe recipe = {"n_edges", 0, cf__graph_scratch, cf__graph_count, cf__graph_object,
                                      cf__graph_fill};
    cf__graph_builder g;
    cf_result result;
    memset(&g, 0, sizeof g);
    if (out == NULL) return cf__fail_null(error, "out");
    CF__TRY(cf_schedule_index_make(plan, schedule, allocator, &g.index, error));
    g.error = error;
    g.header.shape = schedule->shape;
    g.pipe = cf__pipe_of(plan, &schedule->shape, timing);
    result = cf__pipe_check_timing(timing, &schedule->shape, error);
    if (result == CF_OK) result = cf__make(&recipe, &g, allocator, error);
    cf_schedule_index_free(g.index);
    if (result == CF_OK) *out = g.graph;
    return result;
}

CHUNKFLOW_API void cf_graph_free(cf_graph *graph) {
    if (graph != NULL) cf__free_object(graph, &graph->block);
}

#ifdef __cplusplus
}
#endif

#if defined(__clang__)
#pragma float_control(pop)
#pragma clang diagnostic pop
#elif defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#endif /* CHUNKFLOW_IMPLEMENTATION */
