/* chunkflow.h - v0.1.0 - chunked long-context training: plans, schedules, an interpreter - MIT or public domain

   What it is. Fine-tuning data is long-tailed: most sequences are short, a few are enormous. chunkflow reorganises a
   batch into chunks of at most ChunkSize tokens: short sequences are packed together, long ones are cut into dependent
   chunks that hand on their attention state (K, V and the gradients of both). A state-aware schedule runs the chunks so
   that activation memory follows K x ChunkSize, not the longest sequence, while loss and gradients stay those of the
   unchunked batch. The method is ChunkFlow (Yuan et al., ICML 2025, arXiv 2503.02356); where this file goes past the
   paper, the comment at that place says so.

   How to use it. In ONE C or C++ file:

       #define CHUNKFLOW_IMPLEMENTATION
       #include "chunkflow.h"

   and everywhere else just #include "chunkflow.h". Define CHUNKFLOW_STATIC before every include to make all functions
   private to the file. Define CHUNKFLOW_API yourself (say, as a DLL export) to override the linkage. Needs only libc.

   The functions by task
       pack a batch            cf_pack, cf_pack_size + cf_pack_into (your memory), cf_pack_defaults, cf_plan_free
       ask a plan              cf_plan_measure (fill, bounds, balance), cf_chunk_state_tokens, cf_slice_pairs
       feed an attention       cf_metadata_size + cf_metadata_fill (cu_seqlens_q/k, max_seqlen), cf_position_ids,
         kernel                cf_sequence_ids
       order the passes        cf_schedule_make, cf_schedule_size + cf_schedule_into, cf_schedule_defaults,
                               cf_schedule_free
       time them               cf_simulate, cf_simulate_size + cf_simulate_into, cf_timeline_free
       run them                cf_run, cf_run_size, cf_chunk_seed
       check                   cf_plan_validate (any plan, also a hand-made one)
       write                   cf_write_plan_json, cf_write_schedule_json
       errors                  cf_result_name, cf_result_text, the cf_error record
       cost numbers            cf_cost_seconds

   What it does not do. It runs no model, owns no tensor, starts no thread, opens no file, prints nothing and never
   aborts. It never truncates, drops or reorders tokens inside a sequence.

   Determinism. The same input gives the same bytes out, on every compiler and platform with IEEE 754 doubles and two's
   complement integers; decisions depend on integers, or on double products that are rounded one by one.

   Threads. There is no global state. Calls on different objects may run at once; a finished object may be read by any
   number of threads.

   Untrusted input. Every number that comes from the caller is checked, in release builds too: sizes are 64-bit,
   arithmetic is overflow-checked, and a bad value is a result code plus a cf_error record, never a crash. Two things
   cannot be checked: that a pointer really points to as many items as was said, and that an object still is what this
   library built (run cf_plan_validate on one that came from elsewhere before you hand it to any other function).

   A complete program (examples/hello.c is a longer one)

       #define CHUNKFLOW_IMPLEMENTATION
       #include "chunkflow.h"
       #include <stdio.h>
       static int pass(void *user, const cf_step *step) {
           (void)user;
           printf("%s chunk %d\n", cf_pass_name((cf_pass)step->action.pass), (int)step->action.chunk);
           return 0;                                      // your forward or backward goes here; non-zero stops the run
       }
       int main(void) {
           int64_t lengths[] = {900, 14000, 350, 2600};   // tokens of each sequence of the batch
           cf_pack_desc pack = {0}; pack.chunk_size = 4096;
           cf_schedule_desc order = {0}; order.k = 1;
           cf_run_desc run = {0}; run.forward = pass; run.backward = pass;
           cf_plan *plan = NULL; cf_schedule *schedule = NULL; cf_error error = {0};
           if (cf_pack(lengths, 4, &pack, &plan, &error) == CF_OK &&
               cf_schedule_make(plan, &order, &schedule, &error) == CF_OK)
               cf_run(plan, schedule, 0, &run, NULL, &error);
           if (error.code != CF_OK) printf("%s\n", error.text);
           cf_schedule_free(schedule); cf_plan_free(plan);
           return (int)error.code;
       }

   Words. sequence: one training sample. chunk: at most chunk_size tokens that go through the model together. slice: a
   contiguous piece of one sequence inside a chunk. standalone chunk: whole sequences only. group: the chunks of one
   split sequence, in order; they are dependent chunks. prefix: the tokens of the group before a chunk. hybrid chunk: a
   group's last chunk whose free space holds whole short sequences. state: K and V of a group's tokens so far. K: how many
   chunks of one group keep their activations at once. pass: F forward, R replay (a second forward, of a chunk whose
   activations were dropped), B backward, or I + W where backward is split into input and weight gradient. attention
   pairs: the (query, key) pairs that a causal mask leaves visible. stage: a part of the model; rank: a data-parallel copy.

   Sections, each found by its tag: >>base >>cost >>pack >>schedule >>simulate >>run >>write, first declared,
   then implemented in the same order. A section calls only sections above it. */

#ifndef CHUNKFLOW_H
#define CHUNKFLOW_H

#include <stddef.h>
#include <stdint.h>

#define CHUNKFLOW_VERSION_MAJOR 0
#define CHUNKFLOW_VERSION_MINOR 1
#define CHUNKFLOW_VERSION_PATCH 0
#define CHUNKFLOW_VERSION "0.1.0"

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
#define CF_RESULTS(X)                                                                 \
    X(CF_OK, "ok")                                                                    \
    X(CF_ERROR_ARGUMENT, "an argument or option is missing or out of range")          \
    X(CF_ERROR_LIMIT, "the request goes past a documented limit")                     \
    X(CF_ERROR_OVERFLOW, "a size or sum does not fit in 64 bits")                     \
    X(CF_ERROR_MEMORY, "the allocator returned no memory")                            \
    X(CF_ERROR_SPACE, "the caller's memory is too small or misaligned")               \
    X(CF_ERROR_PLAN, "the plan breaks a rule")                                        \
    X(CF_ERROR_SCHEDULE, "the schedule breaks a rule")                                \
    X(CF_ERROR_INFEASIBLE, "no schedule can keep to the memory limit")                \
    X(CF_ERROR_CALLBACK, "a callback reported an error")                              \
    X(CF_ERROR_CANCELLED, "the progress callback asked to stop")                      \
    X(CF_ERROR_WRITE, "the write callback reported an error")

typedef enum cf_result {
#define CF__ENUM(name, text) name,
    CF_RESULTS(CF__ENUM)
#undef CF__ENUM
    CF_RESULT_COUNT /* how many codes there are; never returned */
} cf_result;

/* What went wrong, in a record that the caller owns. Every function takes a pointer to one, or NULL. It is written only
   on failure, and then all of it. */
typedef struct cf_error {
    cf_result code;    /* the code that the function also returns */
    int64_t item;      /* index of the sequence, slice, chunk, group, action ... at fault; -1: none in particular */
    const char *field; /* name of the argument, option or member at fault; a static string */
    int64_t wanted;    /* the nearest acceptable value, or the limit */
    int64_t got;       /* the value found */
    char text[200];    /* all of the above as one line, without a line end */
} cf_error;

/* "CF_ERROR_PLAN", and "the plan breaks a rule". Both return a static string for every value, also an unknown one. */
CHUNKFLOW_API const char *cf_result_name(cf_result code);
CHUNKFLOW_API const char *cf_result_text(cf_result code);

/* Where memory comes from. Give both callbacks or neither; NULL in place of the record, or an all-zero record, means
   malloc and free. alloc returns memory aligned as malloc's (16 bytes), or NULL, which the library survives and reports.
   An object remembers the allocator that made it; `user` must live as long as the object. */
typedef struct cf_allocator {
    void *(*alloc)(size_t bytes, void *user);
    void (*release)(void *memory, void *user);
    void *user;
} cf_allocator;

/* Alignment, in bytes, that memory handed to a *_into function must have. */
#define CF_MEMORY_ALIGNMENT 16

/* ================================================================================================================
   >>cost    seconds of a pass
   ================================================================================================================ */

/* Time of one pass over one chunk: constant + per_token x tokens + per_pair x attention pairs (seconds, or any unit that
   you use throughout). The last term is what makes a late chunk of a long sequence dearer than an early one. */
typedef struct cf_pass_cost {
    double constant;
    double per_token;
    double per_pair;
} cf_pass_cost;

/* The formula above. Each product and sum is rounded to double by itself, so every platform gives the same bits. */
CHUNKFLOW_API double cf_cost_seconds(const cf_pass_cost *cost, int64_t tokens, int64_t pairs);

/* Visible (query, key) pairs of a slice of `length` tokens that follows `prefix` tokens of its own sequence, under a causal
   mask: length x prefix + length x (length + 1) / 2. Returns -1 where an argument is negative or the result would not
   fit in 64 bits. */
CHUNKFLOW_API int64_t cf_slice_pairs(int64_t prefix, int64_t length);

/* The passes of one virtual stage. All zero: F = R = tokens, B = 2 x tokens, I = W = tokens, the unit costs of the paper's
   figures. Otherwise a member that is all zero is derived: R = F, B = I + W or 2 x F, I = W = B / 2. */
typedef struct cf_stage_cost {
    cf_pass_cost forward, replay, backward, input, weight;
} cf_stage_cost;

/* What a pipeline costs. Zero means default in every member: unit costs, transfers that take no time. */
typedef struct cf_timing {
    cf_stage_cost all;            /* every virtual stage, unless `stages` is given */
    const cf_stage_cost *stages;  /* (n_stages x n_virtual), by virtual stage; NULL: all alike */
    double latency;               /* seconds of any transfer between stages */
    double seconds_per_token;     /* more per token of boundary activations or their gradient (bytes / bandwidth) */
    double offload_seconds_per_token; /* per token of state moved to host memory, or back */
    int no_overlap;               /* 1: a transfer between stages also occupies both stages; 0: it runs beside compute, one
                                     at a time on each link and direction */
} cf_timing;

/* ================================================================================================================
   >>pack    lengths -> plan
   ================================================================================================================ */

#define CF_MAX_CHUNK_SIZE INT32_MAX      /* cu_seqlens are int32 */
#define CF_MAX_SEQUENCES INT32_MAX       /* sequences in a batch */
#define CF_MAX_CHUNKS INT32_MAX          /* chunks of a plan; an action names its chunk with 32 bits */
#define CF_MAX_LENGTH ((int64_t)1 << 48) /* tokens of one sequence */
#define CF_MAX_RANKS 65536

typedef enum cf_pack_method {
    CF_PACK_DEFAULT = 0,          /* CF_PACK_BEST_FIT */
    CF_PACK_BEST_FIT,             /* longest first, into the fullest chunk with room. Never more chunks than first fit:
                                     where that one wins, its packing is returned and plan->method says so */
    CF_PACK_FIRST_FIT,            /* longest first, into the earliest chunk with room */
    CF_PACK_NEXT_FIT              /* in input order, into the last chunk or a new one: sequences stay in order */
} cf_pack_method;

typedef enum cf_split_method {
    CF_SPLIT_DEFAULT = 0,         /* CF_SPLIT_FULL */
    CF_SPLIT_FULL,                /* slices of chunk_size tokens, the rest last (the paper's Algorithm 1) */
    CF_SPLIT_EVEN,                /* as many slices, equal in tokens to within one token (or one alignment unit) */
    CF_SPLIT_COST                 /* slices of at most chunk_size tokens, the dearest as cheap as possible; late slices,
                                     which see more keys, get shorter. At most about twice as many slices as FULL */
} cf_split_method;

/* "best-fit", "first-fit", "next-fit"; "full", "even", "cost"; "?" for anything else. */
CHUNKFLOW_API const char *cf_pack_method_name(cf_pack_method method);
CHUNKFLOW_API const char *cf_split_method_name(cf_split_method split);

/* Cost of the slice [begin, begin + length) of one sequence, in any unit; must be finite, not negative, and not fall as
   length grows. Must be a pure function: it is called in no particular order. */
typedef double (*cf_slice_cost_fn)(int64_t begin, int64_t length, void *user);

/* How to pack. Zero means default in every member; only chunk_size must be given. */
typedef struct cf_pack_desc {
    int64_t chunk_size;           /* most tokens in a chunk, alignment padding included; 1 .. CF_MAX_CHUNK_SIZE */
    cf_pack_method method;        /* 0: best fit */
    cf_split_method split;        /* 0: full slices */
    int no_tails;                 /* 0: whole short sequences fill the free space of a group's last chunk, which makes it a
                                     hybrid chunk (past the paper); 1: that chunk stays alone, as in the paper */
    int64_t align;                /* every slice starts at a multiple of this in its chunk; must divide chunk_size. 0: 1 */
    int64_t max_slices;           /* most slices in a chunk. 0: no cap */
    int64_t n_ranks;              /* data-parallel ranks to spread the chunks over. 0: 1 */
    cf_pass_cost cost;            /* for CF_SPLIT_COST and for balancing ranks. All zero: a token and a pair weigh so that
                                     all tokens of the batch weigh as much as all its attention pairs */
    cf_slice_cost_fn slice_cost;  /* used in place of `cost` where given */
    void *slice_cost_user;
    const cf_allocator *allocator;
} cf_pack_desc;

/* A contiguous piece of one sequence in a chunk. */
typedef struct cf_slice {
    int64_t sequence; /* index into the caller's lengths */
    int64_t begin;    /* first token, counted in the sequence */
    int64_t length;   /* tokens */
    int64_t offset;   /* where it starts in the chunk, in tokens; a multiple of the plan's align */
} cf_slice;

/* Tokens that go through the model together. */
typedef struct cf_chunk {
    int64_t first_slice; /* its slices are plan->slices[first_slice .. first_slice + n_slices); in a dependent chunk the
                            first one is the slice of the split sequence */
    int64_t n_slices;    /* 0 in an idle chunk, which only fills up a rank's steps */
    int64_t tokens;      /* sum of its slices' lengths */
    int64_t padded;      /* the same with alignment padding; at most chunk_size */
    int64_t pairs;       /* attention pairs, the prefix included */
    int64_t group;       /* index into plan->groups; -1: standalone or idle */
    int64_t index;       /* its place in the group, from 0; 0 where there is no group */
    int64_t prefix;      /* tokens of the group before this chunk */
    int64_t rank;        /* data-parallel rank that runs it */
} cf_chunk;

/* The dependent chunks of one split sequence: plan->chunks[first_chunk .. first_chunk + n_chunks). */
typedef struct cf_group {
    int64_t sequence;
    int64_t first_chunk;
    int64_t n_chunks;
    int64_t tokens; /* length of the sequence */
} cf_group;

/* The packed batch. Plain data in one block of memory: read it, do not resize it. Rank r owns the chunks
   [r x n_steps, (r + 1) x n_steps); a group's chunks are consecutive. Groups come before standalone chunks, both in input
   order of their first sequence (groups) or in order of creation (standalone); next fit keeps input order throughout. */
typedef struct cf_plan {
    int64_t chunk_size;     /* as asked */
    int64_t align;          /* as asked, 1 if none */
    int64_t max_slices;     /* as asked, 0 if none */
    cf_pack_method method;  /* the method whose packing this is */
    cf_split_method split;
    int64_t n_sequences;
    int64_t n_empty;        /* sequences of length 0; they are in no slice */
    int64_t n_tokens;
    int64_t n_ranks;
    int64_t n_steps;        /* chunks of each rank */
    int64_t n_chunks;       /* n_ranks x n_steps */
    int64_t n_idle;         /* chunks without a slice */
    int64_t n_groups;
    int64_t n_slices;
    int64_t lower_bound;    /* no packing of these slices can use fewer chunks (cf_pack says how it is found) */
    cf_chunk *chunks;       /* (n_chunks) */
    cf_slice *slices;       /* (n_slices) */
    cf_group *groups;       /* (n_groups) */
    cf_allocator allocator; /* private: how to give the block back; all zero where the memory is the caller's */
} cf_plan;

/* Packs a batch: splits every sequence longer than chunk_size, packs the others (Algorithm 1 of the paper and past it).

   lengths: n token counts, 0 .. CF_MAX_LENGTH. A sequence of length 0 takes part in nothing and is counted in n_empty; one
   of exactly chunk_size tokens is a standalone chunk; one of a multiple is a group of full chunks. With align > 1 a
   sequence counts as long when its own tokens exceed chunk_size.

   *out: a new plan, to be given to cf_plan_free; untouched on failure. Time is O(n log n) at worst, near linear in
   practice. The plan depends only on the arguments, so each data-parallel rank can compute it for itself.

   With n_ranks > 1 every rank gets the same number of chunks (n_steps); a group stays on one rank; costs are evened out by
   placing the dearest first, then by moving and exchanging; idle chunks fill what is left.

   lower_bound is the better of: total tokens / chunk_size, the count of sequences that cannot share, Martello and Toth's L2
   (Knapsack Problems, 1990, section 8.3), slices / max_slices, and the number of dependent chunks.

   Errors: CF_ERROR_ARGUMENT (names the member, or "lengths" and the sequence), CF_ERROR_LIMIT, CF_ERROR_OVERFLOW (the
   attention pairs of a chunk, or the token total, do not fit), CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_pack(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, cf_plan **out,
                                cf_error *error);

/* The same without any allocation, for a data loader that reuses one block: cf_pack_size says how many bytes are always
   enough for these lengths (plan and working space), cf_pack_into packs into `memory` and puts the plan at its start.
   Memory must be aligned to CF_MEMORY_ALIGNMENT; fewer bytes than asked is CF_ERROR_SPACE. The plan lives as long as
   `memory` does; cf_plan_free on it does nothing. */
CHUNKFLOW_API cf_result cf_pack_size(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, size_t *bytes,
                                     cf_error *error);
CHUNKFLOW_API cf_result cf_pack_into(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, void *memory,
                                     size_t bytes, cf_plan **out, cf_error *error);

/* A copy of desc with every default filled in. */
CHUNKFLOW_API cf_pack_desc cf_pack_defaults(const cf_pack_desc *desc);

/* Frees a plan made by cf_pack. NULL is allowed. */
CHUNKFLOW_API void cf_plan_free(cf_plan *plan);

/* Checks a plan from any source against the lengths that it claims to pack: every token of every sequence in exactly one
   slice, slices of a sequence in order, no chunk over chunk_size or max_slices, alignment, groups and prefixes, pairs,
   ranks and totals. Returns CF_OK, or CF_ERROR_PLAN for the first violation, with its member in error->field and the index
   of the chunk, slice, group or sequence in error->item. CF_ERROR_MEMORY if n bytes of scratch cannot be had from
   `allocator` (NULL: malloc). Reads only arrays of the plan, within the counts that the plan states. */
CHUNKFLOW_API cf_result cf_plan_validate(const cf_plan *plan, const int64_t *lengths, int64_t n,
                                         const cf_allocator *allocator, cf_error *error);

/* How good a plan is. Ratios are 1 at best. */
typedef struct cf_plan_stats {
    int64_t n_standalone;         /* chunks by kind; the four add up to n_chunks */
    int64_t n_dependent;          /* dependent chunks that are not hybrid */
    int64_t n_hybrid;
    int64_t n_idle;
    int64_t excess;               /* chunks with slices beyond lower_bound */
    int64_t largest_group;        /* chunks of the largest group, 0 if none */
    int64_t longest_sequence;     /* tokens */
    int64_t most_slices;          /* in one chunk */
    double fill;                  /* tokens / (chunks with slices x chunk_size) */
    double pairs;                 /* attention pairs of the whole batch */
    double chunk_cost_spread;     /* dearest chunk / mean, over chunks with slices (0 if there are none) */
    double rank_token_spread;     /* fullest rank / mean */
    double rank_pair_spread;
} cf_plan_stats;

/* Measures a plan. cost: as in cf_pack_desc, for chunk_cost_spread; NULL or all zero: the default weights. */
CHUNKFLOW_API void cf_plan_measure(const cf_plan *plan, const cf_pass_cost *cost, cf_plan_stats *stats);

/* Tokens that a chunk appends to its group's state: the length of its first slice, or 0 if it has no group. */
CHUNKFLOW_API int64_t cf_chunk_state_tokens(const cf_plan *plan, int64_t chunk);

/* What a variable-length attention kernel wants to know about one chunk. Usable as they are by flash_attn_varlen_func and
   cuDNN with a causal mask aligned bottom-right: the first slice of a dependent chunk has `prefix` more keys than queries
   and so sees the prefix and itself; all other slices see only themselves. Keys lie in this order: the prefix, then the
   chunk. The padded twins give where each slice starts and the plain ones how many real tokens it has; they are equal
   when the plan's align is 1. */
typedef struct cf_metadata {
    int64_t chunk;
    int64_t n_slices;
    int64_t tokens;                      /* queries */
    int64_t padded;                      /* queries with alignment padding: rows of the chunk's tensors */
    int64_t prefix;                      /* keys before the chunk's own */
    int64_t pairs;
    int32_t max_seqlen_q;                /* longest slice, in queries */
    int32_t max_seqlen_k;                /* longest slice, in keys */
    const int32_t *cu_seqlens_q;         /* (n_slices + 1) from 0, unpadded */
    const int32_t *cu_seqlens_k;         /* (n_slices + 1) from 0, unpadded */
    const int32_t *cu_seqlens_q_padded;  /* (n_slices + 1) from 0 */
    const int32_t *cu_seqlens_k_padded;  /* (n_slices + 1) from 0 */
} cf_metadata;

/* cf_metadata_size: bytes that cf_metadata_fill needs for this chunk; for chunk = -1, for any chunk of the plan. Fill puts
   the arrays into `memory` (any alignment of int32_t) and their addresses into *out, which is untouched on failure.
   Errors: CF_ERROR_ARGUMENT (chunk), CF_ERROR_SPACE (bytes), CF_ERROR_LIMIT where prefix + chunk passes INT32_MAX. */
CHUNKFLOW_API cf_result cf_metadata_size(const cf_plan *plan, int64_t chunk, size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_metadata_fill(const cf_plan *plan, int64_t chunk, void *memory, size_t bytes,
                                         cf_metadata *out, cf_error *error);

/* One number per row of the chunk's tensors (chunk->padded rows): the token's position in its own sequence (what RoPE
   wants), and the index of its sequence. Padding rows get position 0 and sequence -1. count: how many numbers `ids` can
   hold; fewer than padded is CF_ERROR_SPACE. Positions past INT32_MAX are CF_ERROR_LIMIT. Untouched on failure. */
CHUNKFLOW_API cf_result cf_position_ids(const cf_plan *plan, int64_t chunk, int32_t *ids, int64_t count,
                                        cf_error *error);
CHUNKFLOW_API cf_result cf_sequence_ids(const cf_plan *plan, int64_t chunk, int32_t *ids, int64_t count,
                                        cf_error *error);

/* ================================================================================================================
   >>schedule    plan -> order of passes
   ================================================================================================================ */

typedef enum cf_pass {
    CF_F = 0,  /* forward */
    CF_R,      /* replay: forward again, because the activations were dropped */
    CF_B,      /* backward, whole */
    CF_I,      /* backward, gradient of the inputs only */
    CF_W,      /* backward, gradient of the weights only */
    CF_SEND_F, /* boundary activations of F to the next virtual stage; from here on: lowered schedules only */
    CF_RECV_F, /* the same, from the previous virtual stage */
    CF_SEND_R, /* boundary activations of R (pipeline replay) to the next virtual stage */
    CF_RECV_R,
    CF_SEND_B, /* gradient of the boundary activations (made by B or I) to the previous virtual stage */
    CF_RECV_B, /* the same, from the next virtual stage */
    CF_OFFLOAD,  /* the chunk's rows of the state go to host memory */
    CF_PREFETCH, /* and come back */
    CF_PASS_COUNT
} cf_pass;

#define CF_COMPUTE_PASS_COUNT 5 /* F .. W */

/* "F", "R", "B", "I", "W", "SEND_F" ... "PREFETCH"; "?" for anything else. */
CHUNKFLOW_API const char *cf_pass_name(cf_pass pass);

#define CF_MAX_STAGES 65536                    /* virtual stages of a pipeline */
#define CF_MAX_ACTIONS ((int64_t)1 << 27)      /* actions of a schedule: 1.5 GiB of them */

typedef enum cf_schedule_kind {
    CF_SCHEDULE_DEFAULT = 0, /* CF_SCHEDULE_PAPER */
    CF_SCHEDULE_PAPER,       /* state-aware 1F1B: a stage runs ahead of the last one by its distance from it, counted from
                                the point where the last stage has a whole group; other work fills the wait for a replay */
    CF_SCHEDULE_GPIPE,       /* all forwards, then all backwards; under a limit in rounds that fit into it */
    CF_SCHEDULE_1F1B,        /* stage s keeps at most n_stages - s chunks, more only if a group cannot do with that */
    CF_SCHEDULE_INTERLEAVED, /* 1F1B over several virtual stages on each stage */
    CF_SCHEDULE_ZERO_BUBBLE, /* backward is cut into I and W, and W fills the gaps; keeps no more than 1F1B's fullest stage */
    CF_SCHEDULE_BEST,        /* searched for */
    CF_SCHEDULE_COUNT
} cf_schedule_kind;

/* "paper", "gpipe", "1f1b", "interleaved", "zero-bubble", "best"; "?" for anything else. */
CHUNKFLOW_API const char *cf_schedule_kind_name(cf_schedule_kind kind);

/* How a dropped forward comes back. */
typedef enum cf_replay {
    CF_REPLAY_DEFAULT = 0, /* CF_REPLAY_PIPELINE */
    CF_REPLAY_PIPELINE,    /* through all stages again (the paper) */
    CF_REPLAY_LOCAL,       /* each stage keeps its input and replays alone (past the paper) */
    CF_REPLAY_COUNT
} cf_replay;

/* "pipeline", "local"; "?" for anything else. */
CHUNKFLOW_API const char *cf_replay_name(cf_replay replay);

/* One pass of one chunk on one (virtual) stage. 12 bytes. */
typedef struct cf_action {
    int32_t chunk;     /* index into plan->chunks */
    int32_t stage;     /* virtual stage, 0 .. n_stages x n_virtual - 1 */
    uint8_t pass;      /* a cf_pass */
    uint8_t keep;      /* F and R: 1 if the activations stay for a backward. 0 for the others */
    uint16_t reserved; /* 0 */
} cf_action;

/* The order in which each stage runs its passes. Stage s runs actions[first[s] .. first[s + 1]) one after the other. */
typedef struct cf_schedule {
    cf_schedule_kind kind;
    cf_replay replay;
    int64_t n_stages;
    int64_t n_virtual;      /* virtual stages of each stage */
    int64_t k;              /* most chunks of one group that keep activations at once, on one stage */
    int64_t rank;           /* the rank of the plan whose chunks these are */
    int64_t n_chunks;       /* chunks of the plan */
    int64_t n_actions;
    int64_t *first;         /* (n_stages + 1) */
    cf_action *actions;     /* (n_actions) */
    cf_allocator allocator; /* private, as in cf_plan */
} cf_schedule;

/* Bytes that a stage holds for each token. All zero: bytes are not counted. */
typedef struct cf_bytes {
    int64_t per_token_activations;    /* of a chunk whose activations are kept, padding included */
    int64_t per_token_state;          /* K and V of a group's token, from the start of its F to the end of its B (or I) */
    int64_t per_token_state_gradient; /* dK and dV of the same, from the start of the group's first backward to that end */
    int64_t per_token_boundary;       /* local replay: the saved input of a dropped chunk, from the start of its F to that
                                         of its R */
} cf_bytes;

/* What CF_SCHEDULE_BEST tried. The fixed schedules are candidates, too, and are always tried; a search that reaches the
   bound stops there. */
typedef struct cf_search_report {
    int64_t budget;              /* candidates that it was allowed */
    int64_t n_tried;             /* candidates that were built and timed */
    int64_t n_improved;          /* times a candidate became the best so far */
    cf_schedule_kind best_fixed; /* the best fixed kind under the same limit */
    double fixed_makespan;       /* its makespan */
    double makespan;             /* of the schedule returned */
    double bound;                /* the strongest lower bound that is known */
    double gap;                  /* makespan / bound - 1 */
} cf_search_report;

/* What to schedule. Zero means default in every member. */
typedef struct cf_schedule_desc {
    cf_schedule_kind kind;       /* 0: paper */
    cf_replay replay;            /* 0: pipeline */
    int64_t n_stages;            /* 0: 1 */
    int64_t n_virtual;           /* virtual stages of each stage. 0: 1, and 2 for interleaved. More than 1 only for
                                    interleaved and best */
    int64_t k;                   /* 0: 1 */
    int64_t rank;                /* which rank's chunks */
    const cf_timing *timing;     /* NULL: unit costs */
    int64_t limit;               /* most chunks whose activations one stage keeps at once, a copy on each of its virtual
                                    stages counted by itself. 0: no limit */
    const int64_t *limits;       /* (n_stages) the same stage by stage; NULL: `limit` for all */
    cf_bytes bytes;              /* what limit_bytes counts */
    int64_t limit_bytes;         /* most bytes that one stage holds at once. 0: no limit */
    const int64_t *limits_bytes; /* (n_stages) */
    int split_backward;          /* best: 1: it may cut backwards into I and W */
    int64_t budget;              /* best: candidates to try. 0: what takes about a tenth of a second */
    cf_search_report *report;    /* best: filled in on success where given */
    const cf_allocator *allocator;
} cf_schedule_desc;

/* Orders the passes of one rank's chunks.

   One stage: units run in plan order. A standalone chunk is F B. A group of N <= K chunks is F1 .. FN, BN .. B1. A group of
   N > K chunks is F1 .. F(N-K) with nothing kept, F(N-K+1) .. FN kept, BN .. B(N-K+1), then for i = N-K down to 1: R(i) B(i).
   This is Algorithm 2 with its two slips put right: as printed, its index test keeps the wrong chunks and its third pass
   runs upwards, but dK and dV of a chunk are complete only when every later chunk has run backward.

   Several stages: every kind keeps to the rules above on each virtual stage, and to the memory limits; where a limit is
   below K, fewer chunks of a group are kept and more are replayed. Virtual stage v x n_stages + s lies on stage s. No kind
   can deadlock. `1f1b` takes the dearest units first, the other fixed kinds take them in plan order. `best` is never longer
   than a fixed schedule of as many virtual stages under the same limits (than `zero-bubble` only with split_backward); the
   same budget gives the same schedule.

   *out: a new schedule, to be given to cf_schedule_free; untouched on failure. Errors: CF_ERROR_ARGUMENT, CF_ERROR_PLAN (the
   counts of the plan are not sound), CF_ERROR_LIMIT (CF_MAX_ACTIONS, CF_MAX_STAGES), CF_ERROR_INFEASIBLE (error->wanted: the
   smallest limit of that kind that would do), CF_ERROR_OVERFLOW, CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error);

/* The same into the caller's memory. cf_schedule_size says how many bytes are enough for the schedule and the working space
   (`best` may use less). Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error);
CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error);

/* A copy of desc with every default filled in. */
CHUNKFLOW_API cf_schedule_desc cf_schedule_defaults(const cf_schedule_desc *desc);

/* Frees a schedule made by cf_schedule_make. NULL is allowed. */
CHUNKFLOW_API void cf_schedule_free(cf_schedule *schedule);

/* ================================================================================================================
   >>simulate    schedule -> when each pass runs, and what is held meanwhile
   ================================================================================================================ */

#define CF_MAX_BOUNDS 4

/* No schedule of these chunks with this K (the last K chunks of a group keep their activations) is shorter. */
typedef struct cf_bound {
    const char *name; /* a static string; cf_simulate says which there are */
    double value;
} cf_bound;

/* What to simulate. Zero means default in every member. */
typedef struct cf_simulate_desc {
    const cf_timing *timing;  /* NULL: unit costs */
    cf_bytes bytes;           /* all zero: no peak_bytes */
    int64_t limit;            /* the limit that the schedule was made under, for the bound "memory". 0: none */
    const int64_t *limits;    /* (n_stages) */
    int no_bounds;            /* 1: leave out the bounds, which take longer than all the rest */
    const cf_allocator *allocator;
} cf_simulate_desc;

/* The simulated run. One block of memory, like a plan. */
typedef struct cf_timeline {
    int64_t n_actions;
    int64_t n_stages;
    double makespan;             /* end of the last action; the first one starts at 0 */
    double busy;                 /* time of all passes on all stages */
    double replayed;             /* the part of it that is R */
    double bubble_useful;        /* 1 - (busy - replayed) / (n_stages x makespan): a replay counts as waste */
    double bubble_busy;          /* 1 - busy / (n_stages x makespan) */
    int64_t n_bounds;
    cf_bound bounds[CF_MAX_BOUNDS];
    double bound;                /* the largest of them; 0 if there are none */
    double *start, *end;         /* (n_actions) parallel to schedule->actions */
    int32_t *live;               /* (n_actions) chunks kept on that stage while the action runs */
    int64_t *peak_live;          /* (n_stages) most chunks kept at once */
    int64_t *peak_tokens;        /* (n_stages) most tokens, padding included, whose activations were kept at once */
    int64_t *peak_state_tokens;  /* (n_stages) most tokens whose K and V were held at once */
    int64_t *peak_bytes;         /* (n_stages) zeros if no bytes were given */
    cf_allocator allocator;      /* private, as in cf_plan */
} cf_timeline;

/* Runs a schedule on paper. Each stage takes its actions in order, each as soon as what it needs is there: the previous
   stage's activations (F, and R in pipeline replay) or the next stage's gradient (B, I), after the transfer. cf_timing says
   how transfers take time; with no_overlap the sender is busy with one right after its pass and the receiver right before
   the pass that needs it.

   Bounds, by name. "critical-path": the longest path of dependent passes. "stage-load": the work of a stage, the shortest
   way to it and the shortest way from it. "one-machine": each stage alone with the release time and tail of each of its
   passes, preemption allowed (Jackson's schedule; at least as strong as stage-load). "memory", under a limit: a kept chunk
   stays on a stage for the passes of all later stages, so a stage with room for few needs long.

   *out: a new timeline, to be given to cf_timeline_free; untouched on failure. A schedule that deadlocks, repeats or leaves out a
   pass, or breaks a dependency is CF_ERROR_SCHEDULE with the index of the action in error->item. Lowered schedules are
   refused the same way. Time is linear in the actions; the bounds take n log n. */
CHUNKFLOW_API cf_result cf_simulate(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                    cf_timeline **out, cf_error *error);

/* The same into the caller's memory. Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_simulate_size(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                         size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_simulate_into(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                         void *memory, size_t bytes, cf_timeline **out, cf_error *error);

/* Frees a timeline made by cf_simulate. NULL is allowed. */
CHUNKFLOW_API void cf_timeline_free(cf_timeline *timeline);

/* ================================================================================================================
   >>run    the interpreter of one stage's actions
   ================================================================================================================ */

/* What a pass callback gets. Slots are small numbers, reused as soon as they are free: size your buffers by
   cf_run_stats.peak_slots and .peak_states of a dry run (one without forward and backward). */
typedef struct cf_step {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_chunk *chunk;
    cf_action action;
    int64_t position;     /* index of the action in the stage's list */
    int64_t slot;         /* activation slot of the chunk; -1 in an F that keeps nothing */
    int64_t state;        /* state slot of the chunk's group; -1 if it has none */
    int64_t state_tokens; /* tokens of the group in that slot before this pass (for F and R: the prefix) */
    uint64_t seed;        /* for dropout and the like; the same in every pass of this chunk on this stage */
} cf_step;

typedef enum cf_resource { CF_RESOURCE_ACTIVATIONS = 0, CF_RESOURCE_STATE } cf_resource;

/* Reported after each action. */
typedef struct cf_progress {
    int64_t done, total;       /* actions */
    const cf_step *step;       /* the one just done */
    int64_t live_slots;        /* activation slots now in use */
    int64_t live_states;       /* state slots now in use */
    int64_t live_state_tokens; /* tokens whose K and V are held now, over all groups */
} cf_progress;

/* Who does the work. All callbacks are optional; pass callbacks return 0, or any other number to stop the run. Zero means
   default in every member. */
typedef struct cf_run_desc {
    void *user;                                          /* handed to every callback */
    int (*forward)(void *user, const cf_step *step);     /* F and R */
    int (*backward)(void *user, const cf_step *step);    /* B, I and W */
    int (*acquire)(void *user, cf_resource what, int64_t slot, int64_t owner); /* a slot comes into use; owner: the chunk
                                                            (activations) or the group (state) */
    void (*release)(void *user, cf_resource what, int64_t slot, int64_t owner); /* it goes out of use; called for every
                                                            slot that was acquired, also after an error */
    int (*progress)(void *user, const cf_progress *progress); /* non-zero cancels */
    uint64_t seed;                                       /* mixed into every step's seed */
    void *memory;                                        /* working space of cf_run_size bytes; NULL: from allocator */
    size_t bytes;
    const cf_allocator *allocator;
} cf_run_desc;

typedef struct cf_run_stats {
    int64_t done;              /* actions that ended without error */
    int64_t peak_slots;        /* most activation slots in use at once */
    int64_t peak_tokens;       /* most tokens (padding included) whose activations were kept at once */
    int64_t peak_states;       /* most state slots in use at once */
    int64_t peak_state_tokens; /* most tokens whose K and V were held at once */
} cf_run_stats;

/* Runs the actions of one stage in order, calling back for each, and keeps the books: an F or R with `keep` takes an
   activation slot until the chunk's B (or W); a group's first F takes a state slot until the backward (B or I) of its
   first chunk, and holds the tokens of each forwarded chunk until that chunk's own backward.

   stats: filled in on success and on failure; NULL is allowed. A schedule that asks for the impossible (a backward without
   kept activations, a forward whose prefix is missing, a chunk out of range ...) is CF_ERROR_SCHEDULE with the position in
   error->item. CF_ERROR_CALLBACK carries the callback's number in error->got; CF_ERROR_CANCELLED, CF_ERROR_MEMORY and
   CF_ERROR_SPACE as they say. However it ends, every acquired slot has been released. */
CHUNKFLOW_API cf_result cf_run(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_run_desc *desc,
                               cf_run_stats *stats, cf_error *error);

/* Bytes of working space that cf_run needs for this plan and schedule; exact. */
CHUNKFLOW_API cf_result cf_run_size(const cf_plan *plan, const cf_schedule *schedule, size_t *bytes, cf_error *error);

/* The seed that cf_run puts into a step: a 64-bit mix (splitmix64's finaliser) of run seed, chunk and virtual stage. */
CHUNKFLOW_API uint64_t cf_chunk_seed(uint64_t seed, int64_t chunk, int64_t stage);

/* ================================================================================================================
   >>write    plans and schedules as JSON
   ================================================================================================================ */

/* Gets the text piece by piece, in order; returns 0, or any other number to stop. */
typedef int (*cf_write_fn)(const char *text, size_t bytes, void *user);

/* Writes a plan: format "chunkflow-plan", version 1, chunk_size, align, max_slices, method, split, n_sequences, n_empty,
   n_tokens, n_ranks, n_steps, n_chunks, n_idle, n_groups, n_slices, lower_bound, fill; groups[] of {id, sequence,
   first_chunk, n_chunks, tokens}; chunks[] of {id, group (-1: standalone), index, prefix, tokens, padded, pairs, rank,
   slices[] of {sequence, begin, length, offset}}. One chunk a line. Errors: CF_ERROR_WRITE, with the callback's number. */
CHUNKFLOW_API cf_result cf_write_plan_json(const cf_plan *plan, cf_write_fn write, void *user, cf_error *error);

/* Writes a schedule: format "chunkflow-schedule", version 1, kind, stages, virtual_stages, k, replay, rank, n_chunks,
   n_actions, and actions[stage][] of {pass, chunk, stage, keep (F and R only)}. One action a line. With its timeline (NULL:
   without) also makespan, busy, replayed, bubble_useful, bubble_busy, bounds{name: value}, peak_live[stage],
   peak_tokens[stage], peak_state_tokens[stage], peak_bytes[stage], and start, end and live of each action.
   Errors: CF_ERROR_ARGUMENT (a timeline of another schedule), CF_ERROR_WRITE. */
CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, const cf_timeline *timeline,
                                               cf_write_fn write, void *user, cf_error *error);

#ifdef __cplusplus
}
#endif

#endif /* CHUNKFLOW_H */

/* ================================================================================================================
   ================================================================================================================
   IMPLEMENTATION. Stop here if you only want the API.
   ================================================================================================================ */

#if defined(CHUNKFLOW_IMPLEMENTATION) && !defined(CHUNKFLOW_IMPLEMENTED)
#define CHUNKFLOW_IMPLEMENTED

#include <float.h>
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

CHUNKFLOW_API const char *cf_result_name(cf_result code) {
    switch (code) {
#define CF__CASE(name, text) case name: return #name;
        CF_RESULTS(CF__CASE)
#undef CF__CASE
        case CF_RESULT_COUNT: break;
    }
    return "?";
}

CHUNKFLOW_API const char *cf_result_text(cf_result code) {
    switch (code) {
#define CF__CASE(name, text) case name: return text;
        CF_RESULTS(CF__CASE)
#undef CF__CASE
        case CF_RESULT_COUNT: break;
    }
    return "unknown result code";
}

/* The one place that fills in an error record. Returns code, so that a failing function can return in one line. */
static cf_result cf__fail(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted, int64_t got,
                          const char *why) {
    char place[32] = "";
    if (error == NULL) return code;
    if (item >= 0) (void)snprintf(place, sizeof place, "[%lld]", (long long)item);
    error->code = code;
    error->item = item;
    error->field = field;
    error->wanted = wanted;
    error->got = got;
    (void)snprintf(error->text, sizeof error->text, "%s%s: %s (wanted %lld, got %lld)", field, place, why,
                   (long long)wanted, (long long)got);
    return code;
}

/* A pointer that must not be NULL, or a buffer that is too small, reads as 1 wanted, 0 got. */
static cf_result cf__fail_null(cf_error *error, const char *field) {
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, 1, 0, "must not be NULL");
}

static cf_result cf__fail_memory(cf_error *error, size_t bytes) {
    return cf__fail(error, CF_ERROR_MEMORY, "allocator", -1, (int64_t)bytes, 0, "no memory");
}

/* Checked arithmetic on numbers that are not negative: 1 and *out on success, 0 where the result would not fit. */
static int cf__add(int64_t a, int64_t b, int64_t *out) {
    if (a > INT64_MAX - b) return 0;
    *out = a + b;
    return 1;
}

static int cf__mul(int64_t a, int64_t b, int64_t *out) {
    if (b != 0 && a > INT64_MAX / b) return 0;
    *out = a * b;
    return 1;
}

static int64_t cf__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t cf__max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t cf__div_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static int64_t cf__round_up(int64_t a, int64_t multiple) { return cf__div_up(a, multiple) * multiple; }

/* Cuts one block into arrays. With base == NULL it only adds up, so the size query and the real layout are one function and
   cannot drift apart. overflow stays set once a size did not fit. */
typedef struct cf__carver {
    unsigned char *base;
    size_t used;
    int overflow;
} cf__carver;

static void *cf__take(cf__carver *carver, int64_t count, size_t item_bytes) {
    size_t start = carver->used, bytes;
    if (count < 0 || (uint64_t)count > (SIZE_MAX / 2 - start) / item_bytes) {
        carver->overflow = 1;
        return NULL;
    }
    bytes = (size_t)count * item_bytes;
    bytes = (bytes + CF_MEMORY_ALIGNMENT - 1) / CF_MEMORY_ALIGNMENT * CF_MEMORY_ALIGNMENT;
    carver->used = start + bytes;
    return carver->base != NULL ? carver->base + start : NULL;
}

static void *cf__malloc(size_t bytes, void *user) {
    (void)user;
    return malloc(bytes);
}

static void cf__free(void *memory, void *user) {
    (void)user;
    free(memory);
}

/* The caller's allocator, or malloc and free in the same form. */
static cf_result cf__allocator(const cf_allocator *given, cf_allocator *out, cf_error *error) {
    cf_allocator standard = {cf__malloc, cf__free, NULL};
    *out = standard;
    if (given == NULL || (given->alloc == NULL && given->release == NULL)) return CF_OK;
    if (given->alloc == NULL) return cf__fail_null(error, "allocator.alloc");
    if (given->release == NULL) return cf__fail_null(error, "allocator.release");
    *out = *given;
    return CF_OK;
}

/* Memory that a caller brought: present, aligned, large enough. */
static cf_result cf__check_memory(const void *memory, size_t bytes, size_t needed, cf_error *error) {
    uintptr_t off = (uintptr_t)memory % CF_MEMORY_ALIGNMENT;
    if (memory == NULL) return cf__fail_null(error, "memory");
    if (off != 0) return cf__fail(error, CF_ERROR_SPACE, "memory", -1, CF_MEMORY_ALIGNMENT, (int64_t)off, "misaligned");
    if (bytes < needed)
        return cf__fail(error, CF_ERROR_SPACE, "bytes", -1, (int64_t)needed, (int64_t)bytes, "too small");
    return CF_OK;
}

static const char *cf__name(const char *const *names, int64_t count, int64_t index) {
    return index >= 0 && index < count ? names[index] : "?";
}

static int cf__is_cost(double x) { return x >= 0 && x <= DBL_MAX; } /* also false for NaN */

/* ================================================================================================================
   >>cost
   ================================================================================================================ */

/* A product that is rounded here. Without the volatile a compiler may fuse it into a following addition, and then plans
   would differ between machines with and without that instruction. */
static double cf__product(double a, double b) {
    volatile double product = a * b;
    return product;
}

CHUNKFLOW_API double cf_cost_seconds(const cf_pass_cost *cost, int64_t tokens, int64_t pairs) {
    double seconds = cost->constant + cf__product(cost->per_token, (double)tokens);
    return seconds + cf__product(cost->per_pair, (double)pairs);
}

CHUNKFLOW_API int64_t cf_slice_pairs(int64_t prefix, int64_t length) {
    int64_t before, own, sum;
    if (prefix < 0 || length < 0) return -1;
    if (!cf__mul(length, prefix, &before)) return -1;
    if (length == INT64_MAX) return -1;
    if (length % 2 == 0 ? !cf__mul(length / 2, length + 1, &own) : !cf__mul(length, length / 2 + 1, &own)) return -1;
    return cf__add(before, own, &sum) ? sum : -1;
}

/* ================================================================================================================
   >>pack

   The road: resolve the options, measure the lengths, cut long sequences into groups, sort the short ones, assign each
   to a unit, spread units over ranks, number the chunks, write the plan.

   A unit is what gets a rank as a whole: units 0 .. n_groups - 1 are the groups (their room is the free space of the last
   chunk), the others are standalone chunks. An item is a short sequence.
   ================================================================================================================ */

typedef struct cf__unit {
    int32_t room;        /* free tokens of its open chunk */
    int32_t slices_left; /* slices that chunk may still take */
    int32_t n_items;     /* short sequences in it */
    int32_t n_chunks;
    int32_t rank;
    int32_t chunk;       /* id of its open (last) chunk, once numbered */
    int64_t next_slice;  /* while writing: where its next item goes in plan->slices */
} cf__unit;

typedef struct cf__split {
    int64_t sequence;
    int64_t length;    /* tokens of the sequence */
    int64_t n_slices;
    int64_t first_cut; /* its slices' lengths are cuts[first_cut .. first_cut + n_slices) */
    double target;     /* CF_SPLIT_COST: no slice is dearer, unless it is one alignment unit */
} cf__split;

/* Items of one padded size, next to each other after sorting. */
typedef struct cf__run_of_items {
    int32_t first;
    int32_t left; /* items of the run not yet placed, while first fit is at work */
    int32_t next; /* first fit: a run at or after this one that may still have items */
    int32_t size; /* padded tokens of each */
} cf__run_of_items;

/* Open chunks, found by room: best fit asks for the least room that is enough. Rooms fall into buckets of 2^shift, a bitmap
   tree (64 ways) finds the next bucket in use, and within a bucket the distinct rooms form an ascending list, each with a
   stack of chunks. With shift 0, the usual case, a bucket is one room. Very large chunks get wider buckets, so that space
   stays in proportion to the items. */
typedef struct cf__bins {
    uint64_t *words[6]; /* words[0]: a bit per bucket; words[i]: a bit per word of words[i - 1] */
    int64_t n_words[6];
    int n_levels;
    int shift;
    int32_t *head;      /* (buckets) unit with the least room; valid where the bit is set */
    int32_t *next;      /* (max_units) first unit of the next larger room in the bucket, -1: none */
    int32_t *same;      /* (max_units) next unit with the same room, -1: none */
} cf__bins;

typedef struct cf__packer {
    cf_pack_desc desc; /* defaults filled in */
    const int64_t *lengths;
    int64_t n;
    cf_error *error;
    cf_pass_cost weights;
    /* measured */
    int64_t n_empty, n_tokens, n_groups, n_items, n_dependent, largest_group;
    int64_t max_units;
    int64_t item_tokens; /* padded tokens of all items */
    int64_t longest_item;
    /* working space */
    cf__split *splits;       /* (n_groups) */
    int32_t *cuts;           /* (n_dependent) lengths of the slices of all groups */
    uint64_t *items;         /* (n_items) length << 32 | sequence; longest first, for next fit in input order. Both this
                                and spare have room for 2 x n_groups more, which the lower bound uses */
    uint64_t *spare;
    cf__run_of_items *runs;  /* (n_items) */
    int32_t *unit_of;        /* (n_items) the unit of each item */
    cf__unit *units;         /* (max_units) */
    int32_t *order;          /* (max_units) units in the order of their chunks */
    int32_t *sorted;         /* (max_units) */
    double *costs;           /* (max_units) cost of each unit; only with more than one rank, as what follows */
    double *loads;           /* (n_ranks) cost of each rank */
    int32_t *heap;           /* (n_ranks) */
    int32_t *aside;          /* (n_ranks) */
    int64_t *steps;          /* (n_ranks) chunks of each rank */
    cf__bins bins;           /* best fit: open chunks by room */
    /* results */
    int64_t n_runs, n_units, n_steps, lower_bound;
    int64_t n_ordered; /* units with chunks, in order */
} cf__packer;

#define CF__MAX_COST_SLICES ((int64_t)1 << 22) /* CF_SPLIT_COST searches; one sequence may not keep it busy for minutes */

/* ---- options ---- */

CHUNKFLOW_API cf_pack_desc cf_pack_defaults(const cf_pack_desc *desc) {
    cf_pack_desc full = *desc;
    if (full.method == CF_PACK_DEFAULT) full.method = CF_PACK_BEST_FIT;
    if (full.split == CF_SPLIT_DEFAULT) full.split = CF_SPLIT_FULL;
    if (full.align == 0) full.align = 1;
    if (full.n_ranks == 0) full.n_ranks = 1;
    return full;
}

CHUNKFLOW_API const char *cf_pack_method_name(cf_pack_method method) {
    static const char *const names[] = {"?", "best-fit", "first-fit", "next-fit"};
    return cf__name(names, 4, (int64_t)method);
}

CHUNKFLOW_API const char *cf_split_method_name(cf_split_method split) {
    static const char *const names[] = {"?", "full", "even", "cost"};
    return cf__name(names, 4, (int64_t)split);
}

static cf_result cf__range(int64_t value, int64_t least, int64_t most, const char *field, cf_error *error) {
    if (value < least) return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, least, value, "too small");
    if (value > most) return cf__fail(error, CF_ERROR_LIMIT, field, -1, most, value, "too large");
    return CF_OK;
}

static cf_result cf__check_cost(const cf_pass_cost *cost, cf_error *error) {
    const char *field = !cf__is_cost(cost->constant)    ? "cost.constant"
                        : !cf__is_cost(cost->per_token) ? "cost.per_token"
                        : !cf__is_cost(cost->per_pair)  ? "cost.per_pair"
                                                        : NULL;
    if (field == NULL) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, 0, -1, "must be finite and not negative");
}

static cf_result cf__check_pack_desc(const cf_pack_desc *desc, cf_error *error) {
    cf_result result;
    if ((result = cf__range(desc->chunk_size, 1, CF_MAX_CHUNK_SIZE, "chunk_size", error)) != CF_OK) return result;
    if ((result = cf__range((int64_t)desc->method, 0, CF_PACK_NEXT_FIT, "method", error)) != CF_OK) return result;
    if ((result = cf__range((int64_t)desc->split, 0, CF_SPLIT_COST, "split", error)) != CF_OK) return result;
    if ((result = cf__range(desc->align, 1, desc->chunk_size, "align", error)) != CF_OK) return result;
    if ((result = cf__range(desc->max_slices, 0, INT64_MAX, "max_slices", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_ranks, 1, CF_MAX_RANKS, "n_ranks", error)) != CF_OK) return result;
    if (desc->chunk_size % desc->align != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "align", -1, 0, desc->chunk_size % desc->align,
                        "chunk_size must be a multiple of it; remainder");
    return cf__check_cost(&desc->cost, error);
}

/* ---- cutting long sequences ---- */

/* Cost of a slice, in the caller's terms; a bad answer of the caller's callback counts as 0 and is reported. */
static double cf__slice_cost(cf__packer *p, int64_t sequence, int64_t begin, int64_t length, cf_result *result) {
    double cost;
    if (p->desc.slice_cost == NULL) return cf_cost_seconds(&p->weights, length, cf_slice_pairs(begin, length));
    cost = p->desc.slice_cost(begin, length, p->desc.slice_cost_user);
    if (cf__is_cost(cost)) return cost;
    *result = cf__fail(p->error, CF_ERROR_CALLBACK, "slice_cost", sequence, 0, -1, "must be finite and not negative");
    return 0;
}

/* The longest slice from `begin` that is no dearer than the target: at most chunk_size, at least one alignment unit. */
static int64_t cf__cut_by_cost(cf__packer *p, const cf__split *split, int64_t begin, cf_result *result) {
    int64_t rest = split->length - begin, unit = p->desc.align;
    int64_t low = 1, high = cf__div_up(cf__min(rest, p->desc.chunk_size), unit);
    while (low < high) { /* in units: low fits (or is the least there is), high + 1 does not */
        int64_t middle = low + (high - low + 1) / 2;
        double cost = cf__slice_cost(p, split->sequence, begin, cf__min(middle * unit, rest), result);
        if (cost <= split->target) low = middle;
        else high = middle - 1;
    }
    return cf__min(low * unit, rest);
}

/* Length of slice number `index` of a split sequence, which starts at `begin`. */
static int64_t cf__cut(cf__packer *p, const cf__split *split, int64_t index, int64_t begin, cf_result *result) {
    int64_t rest = split->length - begin;
    if (p->desc.split == CF_SPLIT_COST) return cf__cut_by_cost(p, split, begin, result);
    if (p->desc.split == CF_SPLIT_EVEN) {
        int64_t units = cf__div_up(split->length, p->desc.align), n = split->n_slices;
        return cf__min((units / n + (index < units % n)) * p->desc.align, rest);
    }
    return cf__min(p->desc.chunk_size, rest);
}

/* How many slices the target leads to; stops counting past `most`. */
static int64_t cf__count_cuts(cf__packer *p, const cf__split *split, int64_t most, cf_result *result) {
    int64_t begin = 0, n = 0;
    while (begin < split->length && n <= most) {
        begin += cf__cut_by_cost(p, split, begin, result);
        n++;
    }
    return n;
}

/* CF_SPLIT_COST. Start from the mean cost of full slices as the target: each resulting slice is either full or costs at
   least about the mean, so there are at most about twice as many. Keep that number and press the target down by bisection.
   Steps are capped so that a sequence of millions of slices does not take seconds. */
static cf_result cf__find_target(cf__packer *p, cf__split *split) {
    int64_t full = split->n_slices, i, n, steps;
    double sum = 0, low = 0, high;
    cf_result result = CF_OK;
    if (full > CF__MAX_COST_SLICES)
        return cf__fail(p->error, CF_ERROR_LIMIT, "lengths", split->sequence, CF__MAX_COST_SLICES, full,
                        "too many slices to even out their cost");
    for (i = 0; i < full; i++) {
        int64_t begin = i * p->desc.chunk_size;
        sum += cf__slice_cost(p, split->sequence, begin, cf__min(p->desc.chunk_size, split->length - begin), &result);
    }
    high = sum / (double)full;
    split->target = high;
    n = cf__count_cuts(p, split, INT64_MAX - 1, &result);
    steps = cf__max(2, cf__min(48, (4 * CF__MAX_COST_SLICES) / n));
    for (i = 0; i < steps && result == CF_OK; i++) {
        split->target = low + (high - low) / 2;
        if (cf__count_cuts(p, split, n, &result) <= n) high = split->target;
        else low = split->target;
    }
    split->target = high;
    split->n_slices = n;
    return result;
}

/* Decides how many slices a long sequence gets. */
static cf_result cf__plan_split(cf__packer *p, int64_t sequence, cf__split *split) {
    split->sequence = sequence;
    split->length = p->lengths[sequence];
    split->n_slices = cf__div_up(split->length, p->desc.chunk_size);
    split->target = 0;
    if (split->n_slices > CF_MAX_CHUNKS)
        return cf__fail(p->error, CF_ERROR_LIMIT, "lengths", sequence, CF_MAX_CHUNKS, split->n_slices,
                        "too many chunks");
    return p->desc.split == CF_SPLIT_COST ? cf__find_target(p, split) : CF_OK;
}

static cf_result cf__fail_fickle(cf__packer *p, int64_t sequence, int64_t wanted, int64_t got) {
    return cf__fail(p->error, CF_ERROR_CALLBACK, "slice_cost", sequence, wanted, got,
                    "must give the same answer every time");
}

/* Cuts a long sequence for good. A cost callback that answers differently the second time is caught here. */
static cf_result cf__make_cuts(cf__packer *p, const cf__split *split) {
    cf_result result = CF_OK;
    int64_t begin = 0, i;
    for (i = 0; i < split->n_slices && begin < split->length; i++) {
        int64_t length = cf__cut(p, split, i, begin, &result);
        p->cuts[split->first_cut + i] = (int32_t)length;
        begin += length;
    }
    if (result == CF_OK && (i < split->n_slices || begin < split->length))
        return cf__fail_fickle(p, split->sequence, split->length, begin);
    return result;
}

/* ---- measuring ---- */

static cf_result cf__check_lengths(cf__packer *p) {
    int64_t i;
    cf_result result = cf__range(p->n, 0, CF_MAX_SEQUENCES, "n", p->error);
    if (result != CF_OK) return result;
    if (p->n > 0 && p->lengths == NULL) return cf__fail_null(p->error, "lengths");
    for (i = 0; i < p->n; i++) {
        int64_t length = p->lengths[i];
        if (length < 0) return cf__fail(p->error, CF_ERROR_ARGUMENT, "lengths", i, 0, length, "negative");
        if (length > CF_MAX_LENGTH)
            return cf__fail(p->error, CF_ERROR_LIMIT, "lengths", i, CF_MAX_LENGTH, length, "too long");
        if (!cf__add(p->n_tokens, length, &p->n_tokens))
            return cf__fail(p->error, CF_ERROR_OVERFLOW, "lengths", i, INT64_MAX, length, "the sum of all lengths overflows");
        if (length > p->desc.chunk_size && cf_slice_pairs(length, p->desc.chunk_size) < 0)
            return cf__fail(p->error, CF_ERROR_OVERFLOW, "pairs", i, INT64_MAX, length,
                            "attention pairs of a chunk of this sequence overflow");
    }
    return CF_OK;
}

/* The cost numbers that decide: the caller's, or such that all tokens weigh as much as all pairs. */
static void cf__choose_weights(cf__packer *p) {
    double pairs = 0;
    int64_t i;
    p->weights = p->desc.cost;
    if (p->weights.constant > 0 || p->weights.per_token > 0 || p->weights.per_pair > 0 || p->n_tokens == 0) return;
    for (i = 0; i < p->n; i++) pairs += cf__product((double)p->lengths[i], (double)p->lengths[i] + 1) / 2;
    p->weights.per_token = 1 / (double)p->n_tokens;
    p->weights.per_pair = 1 / pairs;
}

static cf_result cf__measure(cf__packer *p) {
    int64_t i, size = p->desc.chunk_size, n_bins;
    cf_result result = cf__check_lengths(p);
    if (result != CF_OK) return result;
    if (p->desc.n_ranks > 1 || p->desc.split == CF_SPLIT_COST) cf__choose_weights(p);
    for (i = 0; i < p->n; i++) {
        cf__split split;
        int64_t length = p->lengths[i];
        if (length == 0) {
            p->n_empty++;
        } else if (length <= size) {
            p->n_items++;
            p->longest_item = cf__max(p->longest_item, length);
            p->item_tokens += cf__round_up(length, p->desc.align);
        } else {
            if ((result = cf__plan_split(p, i, &split)) != CF_OK) return result;
            p->n_groups++;
            p->n_dependent += split.n_slices;
            p->largest_group = cf__max(p->largest_group, split.n_slices);
        }
    }
    /* Of two chunks that are not full by count, neither could take what the other holds (next fit: of two neighbours),
       so together they hold more than one chunk_size. A long sequence may close one more chunk in next fit. */
    n_bins = 2 * cf__div_up(p->item_tokens, size) + p->n_groups + 1;
    if (p->desc.max_slices > 0) n_bins += p->n_items / p->desc.max_slices;
    if (p->desc.n_ranks > 1) n_bins = p->n_items; /* balancing may open more, never an empty one */
    p->max_units = p->n_groups + cf__min(n_bins, p->n_items);
    if (p->max_units + p->n_dependent > CF_MAX_CHUNKS)
        return cf__fail(p->error, CF_ERROR_LIMIT, "n_chunks", -1, CF_MAX_CHUNKS, p->max_units + p->n_dependent,
                        "too many chunks");
    return CF_OK;
}

/* Buckets are at most 65536 + 16 per item, so the bins cost no more than the items do. */
static void cf__layout_bins(cf__packer *p, cf__carver *carver) {
    cf__bins *bins = &p->bins;
    int64_t most = 65536 + 16 * p->n_items, n;
    for (bins->shift = 0; (p->desc.chunk_size >> bins->shift) >= most; bins->shift++) continue;
    n = (p->desc.chunk_size >> bins->shift) + 1;
    bins->head = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    bins->next = (int32_t *)cf__take(carver, p->max_units, sizeof(int32_t));
    bins->same = (int32_t *)cf__take(carver, p->max_units, sizeof(int32_t));
    bins->n_levels = 0;
    do {
        n = cf__div_up(n, 64);
        bins->n_words[bins->n_levels] = n;
        bins->words[bins->n_levels++] = (uint64_t *)cf__take(carver, n, sizeof(uint64_t));
    } while (n > 1);
}

static void cf__layout_packer(cf__packer *p, cf__carver *carver) {
    int64_t ranks = p->desc.n_ranks > 1 ? p->desc.n_ranks : 0;
    p->splits = (cf__split *)cf__take(carver, p->n_groups, sizeof(cf__split));
    p->cuts = (int32_t *)cf__take(carver, p->n_dependent, sizeof(int32_t));
    p->items = (uint64_t *)cf__take(carver, p->n_items + 2 * p->n_groups, sizeof(uint64_t));
    p->spare = (uint64_t *)cf__take(carver, p->n_items + 2 * p->n_groups, sizeof(uint64_t));
    p->runs = (cf__run_of_items *)cf__take(carver, cf__min(p->n_items, p->desc.chunk_size), sizeof(cf__run_of_items));
    p->unit_of = (int32_t *)cf__take(carver, p->n_items, sizeof(int32_t));
    p->units = (cf__unit *)cf__take(carver, p->max_units, sizeof(cf__unit));
    p->order = (int32_t *)cf__take(carver, p->max_units, sizeof(int32_t));
    p->sorted = (int32_t *)cf__take(carver, p->max_units, sizeof(int32_t));
    p->costs = (double *)cf__take(carver, ranks > 0 ? p->max_units : 0, sizeof(double));
    p->loads = (double *)cf__take(carver, ranks, sizeof(double));
    p->heap = (int32_t *)cf__take(carver, ranks, sizeof(int32_t));
    p->aside = (int32_t *)cf__take(carver, ranks, sizeof(int32_t));
    p->steps = (int64_t *)cf__take(carver, ranks, sizeof(int64_t));
    cf__layout_bins(p, carver);
}


/* ---- units and items ---- */

static int64_t cf__item_length(uint64_t item) { return (int64_t)(item >> 32); }
static int64_t cf__item_sequence(uint64_t item) { return (int64_t)(item & 0xffffffffu); }
static int64_t cf__padded(const cf__packer *p, int64_t length) { return cf__round_up(length, p->desc.align); }

static cf__unit cf__fresh_unit(const cf__packer *p) {
    cf__unit unit;
    memset(&unit, 0, sizeof unit);
    unit.room = (int32_t)p->desc.chunk_size;
    unit.slices_left = p->desc.max_slices > 0 ? (int32_t)cf__min(p->desc.max_slices, INT32_MAX) : INT32_MAX;
    unit.n_chunks = 1;
    return unit;
}

/* The unit of a group, before any item: its open chunk holds the group's last slice. */
static cf__unit cf__group_unit(const cf__packer *p, int64_t group) {
    const cf__split *split = &p->splits[group];
    cf__unit unit = cf__fresh_unit(p);
    unit.n_chunks = (int32_t)split->n_slices;
    unit.room -= (int32_t)cf__padded(p, p->cuts[split->first_cut + split->n_slices - 1]);
    unit.slices_left = p->desc.no_tails ? 0 : unit.slices_left - 1;
    return unit;
}

static int32_t cf__open_unit(cf__packer *p) {
    p->units[p->n_units] = cf__fresh_unit(p);
    return (int32_t)p->n_units++;
}

/* Fills splits and cuts, and opens a unit for each group. */
static cf_result cf__collect_groups(cf__packer *p) {
    int64_t i, n_cuts = 0;
    for (i = 0; i < p->n && p->n_units < p->n_groups; i++) {
        cf__split *split = &p->splits[p->n_units];
        cf_result result;
        if (p->lengths[i] <= p->desc.chunk_size) continue;
        if ((result = cf__plan_split(p, i, split)) != CF_OK) return result;
        split->first_cut = n_cuts;
        n_cuts += split->n_slices;
        if (n_cuts > p->n_dependent) return cf__fail_fickle(p, i, p->n_dependent, n_cuts);
        if ((result = cf__make_cuts(p, split)) != CF_OK) return result;
        p->units[p->n_units] = cf__group_unit(p, p->n_units);
        p->n_units++;
    }
    p->n_dependent = n_cuts;
    return CF_OK;
}

/* Fills items, in input order. */
static void cf__collect_items(cf__packer *p) {
    int64_t i, n = 0;
    for (i = 0; i < p->n; i++) {
        int64_t length = p->lengths[i];
        if (length > 0 && length <= p->desc.chunk_size) p->items[n++] = (uint64_t)length << 32 | (uint64_t)i;
    }
}

/* ---- sorting items, longest first ---- */

static void cf__sort_pass(const uint64_t *from, uint64_t *to, int64_t n, int shift, int bits) {
    int64_t start[2048], i, sum = 0;
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    memset(start, 0, sizeof start[0] << bits);
    for (i = 0; i < n; i++) start[~from[i] >> shift & mask]++;
    for (i = 0; i <= (int64_t)mask; i++) {
        int64_t count = start[i];
        start[i] = sum;
        sum += count;
    }
    for (i = 0; i < n; i++) to[start[~from[i] >> shift & mask]++] = from[i];
}

/* Radix sort by falling length; equal lengths keep their order. Returns whichever of the two arrays holds the result. */
static uint64_t *cf__sort_items(uint64_t *items, uint64_t *spare, int64_t n, int64_t longest) {
    int bits = 0, passes, width, i;
    while (bits < 32 && longest >> bits != 0) bits++;
    passes = (bits + 10) / 11;
    width = passes > 0 ? (bits + passes - 1) / passes : 0;
    for (i = 0; i < passes; i++) {
        uint64_t *swap = items;
        cf__sort_pass(items, spare, n, 32 + i * width, width);
        items = spare;
        spare = swap;
    }
    return items;
}

/* Groups sorted items into runs of one padded size. */
static void cf__find_runs(cf__packer *p) {
    int64_t i;
    p->n_runs = 0;
    for (i = 0; i < p->n_items; i++) {
        int32_t size = (int32_t)cf__padded(p, cf__item_length(p->items[i]));
        if (p->n_runs == 0 || p->runs[p->n_runs - 1].size != size) {
            cf__run_of_items *run = &p->runs[p->n_runs];
            run->first = (int32_t)i;
            run->left = 0;
            run->next = (int32_t)p->n_runs++;
            run->size = size;
        }
        p->runs[p->n_runs - 1].left++;
    }
}

/* ---- lower bound ---- */

/* Sizes that must share chunks, largest first: the items and, where tails may be filled, the tails. */
static int64_t cf__bound_sizes(cf__packer *p, const uint64_t *items, uint64_t *sizes) {
    int64_t i, j = 0, n = 0, n_tails = p->desc.no_tails ? 0 : p->n_groups;
    uint64_t *tails = sizes + p->n_items; /* behind all that the merge below can have written when it reads them */
    for (i = 0; i < n_tails; i++) {
        const cf__split *split = &p->splits[i];
        tails[i] = (uint64_t)p->cuts[split->first_cut + split->n_slices - 1] << 32;
    }
    tails = cf__sort_items(tails, tails + n_tails, n_tails, p->desc.chunk_size);
    for (i = 0; i < p->n_items || j < n_tails;) {
        int64_t from_item = j == n_tails || (i < p->n_items && items[i] >> 32 >= tails[j] >> 32);
        uint64_t next = from_item ? items[i++] : tails[j++];
        sizes[n++] = (uint64_t)cf__padded(p, cf__item_length(next));
    }
    return n;
}

/* Martello and Toth's L2: for each threshold t <= C / 2, sizes above C - t have a chunk to themselves, sizes above C / 2 one
   each, and the sizes in t .. C / 2 fill what those leave. t = 0 gives total / C. `sizes` falls. */
static int64_t cf__l2_bound(const uint64_t *sizes, int64_t n, int64_t chunk_size) {
    int64_t big = 0, alone, i, free_space = 0, best = 0, small_sum = 0;
    while (big < n && (int64_t)sizes[big] * 2 > chunk_size) big++;
    alone = big; /* sizes[alone .. big) share with sizes of at least the threshold */
    for (i = big; i < n; i++) {
        int64_t t = (int64_t)sizes[i];
        small_sum += t;
        while (alone > 0 && (int64_t)sizes[alone - 1] <= chunk_size - t) free_space += chunk_size - (int64_t)sizes[--alone];
        if (small_sum > free_space) best = cf__max(best, cf__div_up(small_sum - free_space, chunk_size));
    }
    return big + best;
}

/* `items` must be sorted; uses p->spare or p->items, whichever `items` is not. */
static int64_t cf__lower_bound(cf__packer *p, const uint64_t *items, uint64_t *sizes) {
    int64_t full = p->n_dependent - (p->desc.no_tails ? 0 : p->n_groups);
    int64_t n = cf__bound_sizes(p, items, sizes), bound = cf__l2_bound(sizes, n, p->desc.chunk_size);
    if (p->desc.max_slices > 0) bound = cf__max(bound, cf__div_up(n, p->desc.max_slices));
    return cf__max(full + bound, p->n_dependent);
}

/* ---- bins: open chunks by room ---- */

static int cf__lowest_bit(uint64_t word) { /* word != 0 */
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(word);
#else
    int n = 0;
    while ((word & 255) == 0) word >>= 8, n += 8;
    while ((word & 1) == 0) word >>= 1, n++;
    return n;
#endif
}

static void cf__bins_reset(cf__bins *bins) {
    int i;
    for (i = 0; i < bins->n_levels; i++) memset(bins->words[i], 0, (size_t)bins->n_words[i] * sizeof(uint64_t));
}

/* First bucket in use at or after `bucket`, -1 if none. */
static int64_t cf__bins_find(const cf__bins *bins, int64_t bucket) {
    int level;
    for (level = 0; level < bins->n_levels; level++) {
        int64_t word = bucket >> 6;
        uint64_t bits = word < bins->n_words[level] ? bins->words[level][word] >> (bucket & 63) : 0;
        if (bits != 0) {
            bucket += cf__lowest_bit(bits);
            while (level-- > 0) bucket = bucket << 6 | cf__lowest_bit(bins->words[level][bucket]);
            return bucket;
        }
        bucket = word + 1;
    }
    return -1;
}

static void cf__bins_mark(cf__bins *bins, int64_t bucket, int used) {
    int level;
    for (level = 0; level < bins->n_levels; level++, bucket >>= 6) {
        uint64_t *word = &bins->words[level][bucket >> 6], bit = (uint64_t)1 << (bucket & 63), before = *word;
        *word = used ? before | bit : before & ~bit;
        if (used ? before != 0 : *word != 0) return; /* the levels above know already */
    }
}

static void cf__bins_insert(cf__packer *p, int32_t unit) {
    cf__bins *bins = &p->bins;
    int32_t room = p->units[unit].room, *link;
    int64_t bucket = room >> bins->shift;
    link = &bins->head[bucket];
    if ((bins->words[0][bucket >> 6] >> (bucket & 63) & 1) == 0) {
        *link = -1;
        cf__bins_mark(bins, bucket, 1);
    }
    while (*link >= 0 && p->units[*link].room < room) link = &bins->next[*link];
    if (*link >= 0 && p->units[*link].room == room) {
        bins->same[unit] = *link;
        bins->next[unit] = bins->next[*link];
    } else {
        bins->same[unit] = -1;
        bins->next[unit] = *link;
    }
    *link = unit;
}

/* Takes out the unit with the least room of at least `size`; -1 if there is none. */
static int32_t cf__bins_take(cf__packer *p, int32_t size) {
    cf__bins *bins = &p->bins;
    int64_t bucket = cf__bins_find(bins, size >> bins->shift);
    while (bucket >= 0) {
        int32_t *link = &bins->head[bucket], unit;
        while (*link >= 0 && p->units[*link].room < size) link = &bins->next[*link];
        unit = *link;
        if (unit >= 0) {
            if (bins->same[unit] >= 0) {
                bins->next[bins->same[unit]] = bins->next[unit];
                *link = bins->same[unit];
            } else {
                *link = bins->next[unit];
            }
            if (bins->head[bucket] < 0) cf__bins_mark(bins, bucket, 0);
            return unit;
        }
        bucket = cf__bins_find(bins, bucket + 1);
    }
    return -1;
}

/* ---- assigning items to units ---- */

/* How many of `left` items of one size go into a unit. */
static int32_t cf__fit(const cf__unit *unit, int32_t size, int32_t left) {
    return (int32_t)cf__min(cf__min(left, unit->slices_left), unit->room / size);
}

static void cf__fill(cf__unit *unit, int32_t size, int32_t count) {
    unit->room -= size * count;
    unit->slices_left -= count;
    unit->n_items += count;
}

static void cf__assign(cf__packer *p, int32_t first_item, int32_t count, int32_t unit) {
    int32_t i;
    for (i = 0; i < count; i++) p->unit_of[first_item + i] = unit;
}

/* Best fit, longest first. Items of one size are placed in one go: after one of them the unit has the least room of all
   that still are large enough, so the next one would go there too. */
static void cf__assign_best_fit(cf__packer *p) {
    int64_t i;
    cf__bins_reset(&p->bins);
    for (i = 0; i < p->n_groups; i++)
        if (cf__fit(&p->units[i], 1, 1) > 0) cf__bins_insert(p, (int32_t)i);
    for (i = 0; i < p->n_runs; i++) {
        int32_t item = p->runs[i].first, left = p->runs[i].left, size = p->runs[i].size;
        while (left > 0) {
            int32_t unit = cf__bins_take(p, size), count;
            if (unit < 0) unit = cf__open_unit(p);
            count = cf__fit(&p->units[unit], size, left);
            cf__assign(p, item, count, unit);
            cf__fill(&p->units[unit], size, count);
            item += count;
            left -= count;
            if (cf__fit(&p->units[unit], 1, 1) > 0) cf__bins_insert(p, unit);
        }
    }
}

/* First run at or after `run` that has items left; n_runs if none. Shortens the path for later calls. */
static int32_t cf__next_run(cf__packer *p, int32_t run) {
    int32_t end = run;
    while (end < p->n_runs && p->runs[end].left == 0) end = p->runs[end].next > end ? p->runs[end].next : end + 1;
    while (run < end) {
        int32_t next = p->runs[run].next > run ? p->runs[run].next : run + 1;
        p->runs[run].next = end;
        run = next;
    }
    return end;
}

/* First run, by falling size, that fits into `room`; n_runs if none. */
static int32_t cf__largest_run(const cf__packer *p, int32_t room) {
    int32_t low = 0, high = (int32_t)p->n_runs;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (p->runs[middle].size <= room) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* First fit, longest first. It gives unit 0 the largest item that fits, then again, then unit 1 ... : the same packing as
   taking the items one by one, but each unit is filled once, from the runs. Returns the number of units; with `dry` that
   is all it does. Uses up the runs. */
static int64_t cf__assign_first_fit(cf__packer *p, int dry) {
    int64_t placed = 0, id;
    for (id = 0; placed < p->n_items || id < p->n_groups; id++) {
        cf__unit unit = id < p->n_groups ? cf__group_unit(p, id) : cf__fresh_unit(p);
        int32_t run = cf__next_run(p, cf__largest_run(p, unit.room));
        while (run < p->n_runs && unit.slices_left > 0) {
            cf__run_of_items *r = &p->runs[run];
            int32_t count = cf__fit(&unit, r->size, r->left);
            if (!dry) cf__assign(p, r->first, count, (int32_t)id);
            cf__fill(&unit, r->size, count);
            r->first += count;
            r->left -= count;
            placed += count;
            run = cf__next_run(p, cf__largest_run(p, unit.room));
        }
        if (!dry) p->units[id] = unit;
    }
    if (!dry) p->n_units = id;
    return id;
}

/* After first fit has used up every run: back to how cf__find_runs left them. */
static void cf__restore_runs(cf__packer *p) {
    int64_t i;
    int32_t first = 0;
    for (i = 0; i < p->n_runs; i++) {
        cf__run_of_items *run = &p->runs[i];
        int32_t end = run->first;
        run->first = first;
        run->left = end - first;
        run->next = (int32_t)i;
        first = end;
    }
}

/* Next fit. Walks all sequences, so that a long one closes the chunk before it and may offer its tail. */
static void cf__assign_next_fit(cf__packer *p) {
    int64_t i, group = 0, n_order = 0;
    int32_t item = 0, open = -1;
    for (i = 0; i < p->n; i++) {
        int32_t size = (int32_t)cf__min(cf__padded(p, p->lengths[i]), INT32_MAX);
        if (p->lengths[i] == 0) continue;
        if (p->lengths[i] > p->desc.chunk_size) {
            open = (int32_t)group++;
            p->order[n_order++] = open;
            continue;
        }
        if (open < 0 || cf__fit(&p->units[open], size, 1) == 0) {
            open = cf__open_unit(p);
            p->order[n_order++] = open;
        }
        cf__assign(p, item++, 1, open);
        cf__fill(&p->units[open], size, 1);
    }
}

/* Fills unit_of, units and order by the method asked for. Best fit gives way to first fit where that needs fewer chunks,
   which it is asked only if there is something to win. */
static void cf__assign_items(cf__packer *p) {
    uint64_t *sorted;
    int64_t i, n_closed = p->n_dependent - p->n_groups; /* chunks that take no items: all but the last of each group */
    cf__collect_items(p);
    sorted = cf__sort_items(p->items, p->spare, p->n_items, p->longest_item);
    if (sorted != p->items) {
        p->spare = p->items;
        p->items = sorted;
    }
    p->lower_bound = cf__lower_bound(p, p->items, p->spare);
    if (p->desc.method == CF_PACK_NEXT_FIT) {
        cf__collect_items(p);
        cf__assign_next_fit(p);
        return;
    }
    cf__find_runs(p);
    if (p->desc.method == CF_PACK_BEST_FIT) {
        cf__assign_best_fit(p);
        if (n_closed + p->n_units > p->lower_bound) {
            if (cf__assign_first_fit(p, 1) < p->n_units) p->desc.method = CF_PACK_FIRST_FIT;
            cf__restore_runs(p);
        }
    }
    if (p->desc.method == CF_PACK_FIRST_FIT) cf__assign_first_fit(p, 0);
    for (i = 0; i < p->n_units; i++) p->order[i] = (int32_t)i;
}

/* ---- spreading units over ranks ---- */

/* A heap of ids with the least key on top; the lower id wins a tie, so the order is total. */
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
    for (i = n; i > 1; i--) {
        int32_t least = cf__heap_pop(ids, i, keys);
        ids[i - 1] = least;
    }
}

static double cf__item_cost(const cf__packer *p, uint64_t item) {
    int64_t length = cf__item_length(item);
    return cf_cost_seconds(&p->weights, length, cf_slice_pairs(0, length));
}

/* Cost of each unit. The pairs of a group of 2^48 tokens fit only a double. */
static void cf__cost_units(cf__packer *p) {
    int64_t i;
    for (i = 0; i < p->n_units; i++) {
        double length = i < p->n_groups ? (double)p->splits[i].length : 0;
        double pairs = cf__product(length, length + 1) / 2;
        double flat = cf__product(p->weights.constant, (double)p->units[i].n_chunks);
        p->costs[i] = flat + cf__product(p->weights.per_token, length);
        p->costs[i] += cf__product(p->weights.per_pair, pairs);
    }
    for (i = 0; i < p->n_items; i++) p->costs[p->unit_of[i]] += cf__item_cost(p, p->items[i]);
}

/* Puts units first .. first + n - 1 into p->sorted, dearest first, and gives each to the least loaded rank that has steps
   left for it. Returns 0 if one fits nowhere. */
static int cf__give_units(cf__packer *p, int64_t first, int64_t n) {
    int64_t i, n_heap = 0;
    for (i = 0; i < n; i++) p->sorted[i] = (int32_t)(first + i);
    cf__sort_by_key(p->sorted, n, p->costs);
    for (i = 0; i < p->desc.n_ranks; i++) cf__heap_push(p->heap, n_heap++, (int32_t)i, p->loads);
    for (i = 0; i < n; i++) {
        cf__unit *unit = &p->units[p->sorted[i]];
        int64_t n_aside = 0;
        for (unit->rank = -1; unit->rank < 0 && n_heap > 0;) {
            int32_t rank = cf__heap_pop(p->heap, n_heap--, p->loads);
            if (p->steps[rank] + unit->n_chunks <= p->n_steps) unit->rank = rank;
            else if (p->steps[rank] < p->n_steps) p->aside[n_aside++] = rank; /* may take a smaller unit */
        }
        if (unit->rank < 0) return 0;
        p->steps[unit->rank] += unit->n_chunks;
        p->loads[unit->rank] += p->costs[p->sorted[i]];
        cf__heap_push(p->heap, n_heap++, unit->rank, p->loads);
        while (n_aside > 0) cf__heap_push(p->heap, n_heap++, p->aside[--n_aside], p->loads);
    }
    return 1;
}

static void cf__clear_ranks(cf__packer *p) {
    int64_t i;
    for (i = 0; i < p->desc.n_ranks; i++) {
        p->steps[i] = 0;
        p->loads[i] = 0;
    }
}

/* Places the groups by number of chunks alone: the fullest rank then tells how many steps are enough. */
static int64_t cf__give_groups_by_count(cf__packer *p) {
    int64_t i, most = 0;
    cf__clear_ranks(p);
    for (i = 0; i < p->n_groups; i++) p->costs[i] = p->units[i].n_chunks;
    cf__give_units(p, 0, p->n_groups);
    for (i = 0; i < p->desc.n_ranks; i++) most = cf__max(most, p->steps[i]);
    return most;
}

static void cf__recount_loads(cf__packer *p) {
    int64_t i;
    for (i = 0; i < p->desc.n_ranks; i++) p->loads[i] = 0;
    for (i = 0; i < p->n_groups; i++) p->loads[p->units[i].rank] += p->costs[i];
}

/* The fewest steps that let every rank hold its groups, then the dearest units first, each to the least loaded rank. */
static void cf__give_all(cf__packer *p) {
    int64_t n_chunks = p->n_dependent + p->n_units - p->n_groups;
    p->n_steps = INT64_MAX / 2;
    p->n_steps = cf__max(cf__give_groups_by_count(p), cf__div_up(n_chunks, p->desc.n_ranks));
    cf__clear_ranks(p);
    cf__cost_units(p);
    if (!cf__give_units(p, 0, p->n_groups)) {
        cf__give_groups_by_count(p);
        cf__cost_units(p);
        cf__recount_loads(p);
    }
    cf__give_units(p, p->n_groups, p->n_units - p->n_groups);
}

/* A change that would even out two ranks: an item moves to another unit, or two standalone chunks change places. */
typedef struct cf__shift {
    double distance; /* of the cost that it moves from half the gap; DBL_MAX: none found */
    int64_t item;    /* -1: exchange */
    int32_t from, to;
} cf__shift;

/* The best item of rank `high` to move into the roomiest chunk of rank `low`, or into a new one. */
static void cf__find_move(const cf__packer *p, int32_t high, int32_t low, double gap, cf__shift *best) {
    cf__unit fresh = cf__fresh_unit(p);
    const cf__unit *target = p->steps[low] < p->n_steps && p->n_units < p->max_units ? &fresh : NULL;
    double extra = target != NULL ? p->weights.constant : 0; /* a new chunk has its own constant cost */
    int32_t to = -1;
    int64_t i;
    for (i = 0; i < p->n_units && target != &fresh; i++) {
        const cf__unit *unit = &p->units[i];
        if (unit->rank == low && unit->slices_left > 0 && (target == NULL || unit->room > target->room)) {
            target = unit;
            to = (int32_t)i;
        }
    }
    for (i = 0; i < p->n_items && target != NULL; i++) {
        double cost = cf__item_cost(p, p->items[i]) + extra;
        double distance = cost > gap / 2 ? cost - gap / 2 : gap / 2 - cost;
        if (p->units[p->unit_of[i]].rank != high || !(cost < gap) || !(distance < best->distance)) continue;
        if (cf__padded(p, cf__item_length(p->items[i])) > target->room) continue;
        best->distance = distance;
        best->item = i;
        best->from = p->unit_of[i];
        best->to = to;
    }
}

/* The best pair of standalone chunks to exchange. Looks at the first 256 of each rank. */
static void cf__find_exchange(const cf__packer *p, int32_t high, int32_t low, double gap, cf__shift *best) {
    int32_t ours[256], theirs[256];
    int64_t i, j, n_ours = 0, n_theirs = 0;
    for (i = p->n_groups; i < p->n_units; i++) {
        if (p->units[i].rank == high && n_ours < 256) ours[n_ours++] = (int32_t)i;
        if (p->units[i].rank == low && n_theirs < 256) theirs[n_theirs++] = (int32_t)i;
    }
    for (i = 0; i < n_ours; i++) {
        for (j = 0; j < n_theirs; j++) {
            double cost = p->costs[ours[i]] - p->costs[theirs[j]];
            double distance = cost > gap / 2 ? cost - gap / 2 : gap / 2 - cost;
            if (!(cost > 0) || !(cost < gap) || !(distance < best->distance)) continue;
            best->distance = distance;
            best->item = -1;
            best->from = ours[i];
            best->to = theirs[j];
        }
    }
}

static void cf__move_item(cf__packer *p, const cf__shift *shift, int32_t high, int32_t low) {
    int32_t size = (int32_t)cf__padded(p, cf__item_length(p->items[shift->item])), to = shift->to;
    double cost = cf__item_cost(p, p->items[shift->item]);
    if (to < 0) {
        to = cf__open_unit(p);
        p->order[to] = to;
        p->units[to].rank = low;
        p->costs[to] = p->weights.constant;
        p->loads[low] += p->weights.constant;
        p->steps[low]++;
    }
    p->unit_of[shift->item] = to;
    cf__fill(&p->units[shift->from], size, -1);
    cf__fill(&p->units[to], size, 1);
    p->costs[shift->from] -= cost;
    p->costs[to] += cost;
    p->loads[high] -= cost;
    p->loads[low] += cost;
}

static void cf__exchange_units(cf__packer *p, const cf__shift *shift, int32_t high, int32_t low) {
    double cost = p->costs[shift->from] - p->costs[shift->to];
    p->units[shift->from].rank = low;
    p->units[shift->to].rank = high;
    p->loads[high] -= cost;
    p->loads[low] += cost;
}

/* Evens out the dearest and the cheapest rank, again and again, while that helps and the work stays near linear. Next fit
   keeps its items where they are. */
static void cf__even_ranks(cf__packer *p) {
    int64_t work = p->n_items + p->n_units + p->desc.n_ranks + 1;
    int64_t rounds = cf__min(8 * p->desc.n_ranks + 64, ((int64_t)1 << 24) / work);
    for (; rounds > 0; rounds--) {
        cf__shift best = {DBL_MAX, -1, -1, -1};
        int32_t high = 0, low = 0, i;
        double gap;
        for (i = 1; i < p->desc.n_ranks; i++) {
            if (p->loads[i] > p->loads[high]) high = i;
            if (p->loads[i] < p->loads[low]) low = i;
        }
        gap = p->loads[high] - p->loads[low];
        if (!(gap > p->loads[high] * 1e-4)) return;
        if (p->desc.method != CF_PACK_NEXT_FIT) cf__find_move(p, high, low, gap, &best);
        cf__find_exchange(p, high, low, gap, &best);
        if (best.from < 0) return;
        if (best.item >= 0) cf__move_item(p, &best, high, low);
        else cf__exchange_units(p, &best, high, low);
    }
}

/* Sorts order by rank, keeping the order within a rank, and drops standalone units that have lost all their items. */
static void cf__order_by_rank(cf__packer *p) {
    int64_t i, n = 0;
    int32_t rank, *start = p->aside;
    for (rank = 0; rank < p->desc.n_ranks; rank++) start[rank] = 0;
    for (i = 0; i < p->n_units; i++)
        if (rank = p->units[i].rank, rank + 1 < p->desc.n_ranks) start[rank + 1]++;
    for (rank = 1; rank < p->desc.n_ranks; rank++) start[rank] += start[rank - 1];
    for (i = 0; i < p->n_units; i++) p->sorted[start[p->units[p->order[i]].rank]++] = p->order[i];
    for (i = 0; i < p->n_units; i++)
        if (p->sorted[i] < p->n_groups || p->units[p->sorted[i]].n_items > 0) p->order[n++] = p->sorted[i];
    p->n_ordered = n;
}

static cf_result cf__spread(cf__packer *p) {
    int64_t n_chunks;
    p->n_ordered = p->n_units;
    p->n_steps = p->n_dependent + p->n_units - p->n_groups;
    if (p->desc.n_ranks > 1) {
        cf__give_all(p);
        cf__even_ranks(p);
        cf__order_by_rank(p);
    }
    n_chunks = p->n_steps * p->desc.n_ranks;
    if (n_chunks > CF_MAX_CHUNKS)
        return cf__fail(p->error, CF_ERROR_LIMIT, "n_chunks", -1, CF_MAX_CHUNKS, n_chunks, "too many chunks");
    return CF_OK;
}

/* ---- writing the plan ---- */

static void cf__layout_plan(cf_plan *plan, cf__carver *carver) {
    plan->chunks = (cf_chunk *)cf__take(carver, plan->n_chunks, sizeof(cf_chunk));
    plan->slices = (cf_slice *)cf__take(carver, plan->n_slices, sizeof(cf_slice));
    plan->groups = (cf_group *)cf__take(carver, plan->n_groups, sizeof(cf_group));
}

/* Counts of the plan, exact once the units are assigned. */
static cf_plan cf__plan_header(const cf__packer *p) {
    cf_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.chunk_size = p->desc.chunk_size;
    plan.align = p->desc.align;
    plan.max_slices = p->desc.max_slices;
    plan.method = p->desc.method;
    plan.split = p->desc.split;
    plan.n_sequences = p->n;
    plan.n_empty = p->n_empty;
    plan.n_tokens = p->n_tokens;
    plan.n_ranks = p->desc.n_ranks;
    plan.n_steps = p->n_steps;
    plan.n_chunks = p->n_steps * p->desc.n_ranks;
    plan.n_groups = p->n_groups;
    plan.n_slices = p->n_dependent + p->n_items;
    plan.lower_bound = p->lower_bound;
    return plan;
}

/* The chunks of a unit, all slices but those of its items, which come in the end. */
static void cf__write_unit(cf__packer *p, cf_plan *plan, int32_t id, int64_t chunk, int64_t *n_slices) {
    cf__unit *unit = &p->units[id];
    const cf__split *split = id < p->n_groups ? &p->splits[id] : NULL;
    int64_t i, begin = 0;
    for (i = 0; i < unit->n_chunks; i++) {
        cf_chunk *c = &plan->chunks[chunk + i];
        c->first_slice = *n_slices;
        c->index = i;
        c->prefix = begin;
        c->group = split != NULL ? id : -1;
        if (split != NULL) {
            cf_slice *slice = &plan->slices[(*n_slices)++];
            slice->sequence = split->sequence;
            slice->begin = begin;
            slice->length = p->cuts[split->first_cut + i];
            begin += slice->length;
            c->n_slices = 1;
        }
    }
    if (split != NULL) {
        cf_group *group = &plan->groups[id];
        group->sequence = split->sequence;
        group->first_chunk = chunk;
        group->n_chunks = unit->n_chunks;
        group->tokens = split->length;
    }
    unit->next_slice = *n_slices;
    plan->chunks[chunk + unit->n_chunks - 1].n_slices += unit->n_items;
    *n_slices += unit->n_items;
}

/* Offsets, and the sums of each chunk. */
static void cf__finish_chunks(cf_plan *plan) {
    int64_t i, j;
    for (i = 0; i < plan->n_chunks; i++) {
        cf_chunk *chunk = &plan->chunks[i];
        chunk->rank = i / plan->n_steps;
        for (j = 0; j < chunk->n_slices; j++) {
            cf_slice *slice = &plan->slices[chunk->first_slice + j];
            slice->offset = chunk->padded;
            chunk->tokens += slice->length;
            chunk->padded += cf__round_up(slice->length, plan->align);
            chunk->pairs += cf_slice_pairs(slice->begin, slice->length);
        }
        plan->n_idle += chunk->n_slices == 0;
    }
}

static void cf__write_plan(cf__packer *p, cf_plan *plan) {
    int64_t i, chunk = 0, n_slices = 0, rank = 0;
    memset(plan->chunks, 0, (size_t)plan->n_chunks * sizeof(cf_chunk));
    for (i = 0; i < plan->n_chunks; i++) plan->chunks[i].group = -1;
    for (i = 0; i < p->n_ordered; i++) {
        cf__unit *unit = &p->units[p->order[i]];
        if (unit->rank != rank) {
            for (; chunk < unit->rank * plan->n_steps; chunk++) plan->chunks[chunk].first_slice = n_slices;
            rank = unit->rank;
        }
        cf__write_unit(p, plan, p->order[i], chunk, &n_slices);
        chunk += unit->n_chunks;
    }
    for (; chunk < plan->n_chunks; chunk++) plan->chunks[chunk].first_slice = n_slices;
    for (i = 0; i < p->n_items; i++) {
        cf_slice *slice = &plan->slices[p->units[p->unit_of[i]].next_slice++];
        slice->sequence = cf__item_sequence(p->items[i]);
        slice->begin = 0;
        slice->length = cf__item_length(p->items[i]);
    }
    cf__finish_chunks(plan);
}

/* ---- the road, and the public functions ---- */

/* Everything that can be refused is refused here, before any memory is asked for. */
static cf_result cf__packer_start(cf__packer *p, const int64_t *lengths, int64_t n, const cf_pack_desc *desc,
                                  cf_error *error) {
    cf_result result;
    memset(p, 0, sizeof *p);
    if (desc == NULL) return cf__fail_null(error, "desc");
    p->desc = cf_pack_defaults(desc);
    p->lengths = lengths;
    p->n = n;
    p->error = error;
    if ((result = cf__check_pack_desc(&p->desc, error)) != CF_OK) return result;
    return cf__measure(p);
}

/* Needs working space; afterwards the plan's counts are known. */
static cf_result cf__packer_assign(cf__packer *p) {
    cf_result result = cf__collect_groups(p);
    if (result != CF_OK) return result;
    cf__assign_items(p);
    return cf__spread(p);
}

static cf_result cf__too_large(cf_error *error, const char *field) {
    return cf__fail(error, CF_ERROR_OVERFLOW, field, -1, INT64_MAX, -1, "does not fit in memory");
}

/* Puts a plan, header first, into memory that is large enough. */
static cf_plan *cf__place_plan(cf__packer *p, void *memory, const cf_allocator *allocator) {
    cf__carver carver = {(unsigned char *)memory, 0, 0};
    cf_plan *plan = (cf_plan *)cf__take(&carver, 1, sizeof(cf_plan));
    *plan = cf__plan_header(p);
    if (allocator != NULL) plan->allocator = *allocator;
    cf__layout_plan(plan, &carver);
    cf__write_plan(p, plan);
    return plan;
}

CHUNKFLOW_API cf_result cf_pack(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, cf_plan **out,
                                cf_error *error) {
    cf__packer p;
    cf_allocator allocator;
    cf__carver space = {NULL, 0, 0}, block = {NULL, 0, 0};
    cf_plan header;
    void *scratch, *memory = NULL;
    cf_result result = cf__packer_start(&p, lengths, n, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(desc->allocator, &allocator, error)) != CF_OK) return result;
    cf__layout_packer(&p, &space);
    if (space.overflow) return cf__too_large(error, "lengths");
    scratch = allocator.alloc(space.used, allocator.user);
    if (scratch == NULL) return cf__fail_memory(error, space.used);
    space.base = (unsigned char *)scratch;
    space.used = 0;
    cf__layout_packer(&p, &space);
    if ((result = cf__packer_assign(&p)) == CF_OK) {
        header = cf__plan_header(&p);
        cf__take(&block, 1, sizeof(cf_plan));
        cf__layout_plan(&header, &block);
        if (!block.overflow) memory = allocator.alloc(block.used, allocator.user);
        if (memory != NULL) *out = cf__place_plan(&p, memory, &allocator);
        else result = block.overflow ? cf__too_large(error, "lengths") : cf__fail_memory(error, block.used);
    }
    allocator.release(scratch, allocator.user);
    return result;
}

/* Lays out the plan at its largest, then the working space; the same function measures and places. */
static void cf__layout_pack(cf__packer *p, cf__carver *carver) {
    cf_plan most;
    int64_t n_chunks = p->n_dependent + cf__min(p->max_units - p->n_groups, p->n_items), ranks = p->desc.n_ranks;
    memset(&most, 0, sizeof most);
    most.n_groups = p->n_groups;
    most.n_slices = p->n_dependent + p->n_items;
    /* Longest-first placement of the groups leaves no rank more than one group above the mean. */
    if (ranks > 1) n_chunks = ranks * (cf__div_up(n_chunks, ranks) + p->largest_group);
    most.n_chunks = cf__min(n_chunks, CF_MAX_CHUNKS);
    cf__take(carver, 1, sizeof(cf_plan));
    cf__layout_plan(&most, carver);
    cf__layout_packer(p, carver);
}

CHUNKFLOW_API cf_result cf_pack_size(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, size_t *bytes,
                                     cf_error *error) {
    cf__packer p;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__packer_start(&p, lengths, n, desc, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    cf__layout_pack(&p, &carver);
    if (carver.overflow) return cf__too_large(error, "lengths");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_pack_into(const int64_t *lengths, int64_t n, const cf_pack_desc *desc, void *memory,
                                     size_t bytes, cf_plan **out, cf_error *error) {
    cf__packer p;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__packer_start(&p, lengths, n, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    cf__layout_pack(&p, &carver);
    if (carver.overflow) return cf__too_large(error, "lengths");
    if ((result = cf__check_memory(memory, bytes, carver.used, error)) != CF_OK) return result;
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    cf__layout_pack(&p, &carver);
    if ((result = cf__packer_assign(&p)) != CF_OK) return result;
    *out = cf__place_plan(&p, memory, NULL);
    return CF_OK;
}

CHUNKFLOW_API void cf_plan_free(cf_plan *plan) {
    if (plan != NULL && plan->allocator.release != NULL) {
        cf_allocator allocator = plan->allocator;
        allocator.release(plan, allocator.user);
    }
}

/* ---- asking a plan ---- */

CHUNKFLOW_API int64_t cf_chunk_state_tokens(const cf_plan *plan, int64_t chunk) {
    const cf_chunk *c = &plan->chunks[chunk];
    return c->group >= 0 ? plan->slices[c->first_slice].length : 0;
}

static double cf__spread_of(double most, double sum, int64_t n) { return sum > 0 ? most / (sum / (double)n) : 0; }

/* Fullest rank / mean, in tokens and in pairs. */
static void cf__measure_ranks(const cf_plan *plan, cf_plan_stats *stats) {
    double most_tokens = 0, most_pairs = 0;
    int64_t rank, i;
    for (rank = 0; rank < plan->n_ranks; rank++) {
        double tokens = 0, pairs = 0;
        for (i = rank * plan->n_steps; i < (rank + 1) * plan->n_steps; i++) {
            tokens += (double)plan->chunks[i].tokens;
            pairs += (double)plan->chunks[i].pairs;
        }
        if (tokens > most_tokens) most_tokens = tokens;
        if (pairs > most_pairs) most_pairs = pairs;
        stats->pairs += pairs;
    }
    stats->rank_token_spread = cf__spread_of(most_tokens, (double)plan->n_tokens, plan->n_ranks);
    stats->rank_pair_spread = cf__spread_of(most_pairs, stats->pairs, plan->n_ranks);
}

static void cf__measure_costs(const cf_plan *plan, const cf_pass_cost *given, cf_plan_stats *stats) {
    cf_pass_cost cost = {0, 0, 0};
    double most = 0, sum = 0;
    int64_t i;
    if (given != NULL) cost = *given;
    if (!(cost.constant > 0) && !(cost.per_token > 0) && !(cost.per_pair > 0) && stats->pairs > 0) {
        cost.per_token = 1 / (double)plan->n_tokens;
        cost.per_pair = 1 / stats->pairs;
    }
    for (i = 0; i < plan->n_chunks; i++) {
        double seconds = cf_cost_seconds(&cost, plan->chunks[i].tokens, plan->chunks[i].pairs);
        if (plan->chunks[i].n_slices == 0) continue;
        sum += seconds;
        if (seconds > most) most = seconds;
    }
    stats->chunk_cost_spread = cf__spread_of(most, sum, plan->n_chunks - plan->n_idle);
}

CHUNKFLOW_API void cf_plan_measure(const cf_plan *plan, const cf_pass_cost *cost, cf_plan_stats *stats) {
    int64_t i, n_used = plan->n_chunks - plan->n_idle;
    memset(stats, 0, sizeof *stats);
    stats->n_idle = plan->n_idle;
    stats->excess = n_used - plan->lower_bound;
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *chunk = &plan->chunks[i];
        stats->most_slices = cf__max(stats->most_slices, chunk->n_slices);
        if (chunk->group >= 0 && chunk->n_slices > 1) stats->n_hybrid++;
        else if (chunk->group >= 0) stats->n_dependent++;
        else stats->n_standalone += chunk->n_slices > 0;
    }
    for (i = 0; i < plan->n_slices; i++)
        stats->longest_sequence = cf__max(stats->longest_sequence, plan->slices[i].begin + plan->slices[i].length);
    for (i = 0; i < plan->n_groups; i++)
        stats->largest_group = cf__max(stats->largest_group, plan->groups[i].n_chunks);
    if (n_used > 0) stats->fill = (double)plan->n_tokens / ((double)n_used * (double)plan->chunk_size);
    cf__measure_ranks(plan, stats);
    cf__measure_costs(plan, cost, stats);
}

/* ---- checking a plan ---- */

typedef struct cf__plan_check {
    const cf_plan *plan;
    const int64_t *lengths;
    unsigned char *seen; /* (n_sequences) */
    cf_error *error;
} cf__plan_check;

static cf_result cf__bad_plan(const cf__plan_check *check, const char *field, int64_t item, int64_t wanted, int64_t got,
                              const char *why) {
    return cf__fail(check->error, CF_ERROR_PLAN, field, item, wanted, got, why);
}

/* Counts and pointers: what every loop over a plan relies on. */
static cf_result cf__check_plan_counts(const cf_plan *plan, cf_error *error) {
    cf__plan_check check = {plan, NULL, NULL, error};
    const struct {
        const char *field;
        int64_t value, least, most;
    } counts[] = {{"chunk_size", plan->chunk_size, 1, CF_MAX_CHUNK_SIZE},
                  {"align", plan->align, 1, plan->chunk_size},
                  {"max_slices", plan->max_slices, 0, INT64_MAX},
                  {"n_sequences", plan->n_sequences, 0, CF_MAX_SEQUENCES},
                  {"n_empty", plan->n_empty, 0, plan->n_sequences},
                  {"n_tokens", plan->n_tokens, 0, INT64_MAX},
                  {"n_ranks", plan->n_ranks, 1, CF_MAX_RANKS},
                  {"n_steps", plan->n_steps, 0, CF_MAX_CHUNKS},
                  {"n_chunks", plan->n_chunks, 0, CF_MAX_CHUNKS},
                  {"n_idle", plan->n_idle, 0, plan->n_chunks},
                  {"n_groups", plan->n_groups, 0, plan->n_sequences},
                  {"n_slices", plan->n_slices, 0, INT64_MAX},
                  {"lower_bound", plan->lower_bound, 0, plan->n_chunks - plan->n_idle}};
    size_t i;
    for (i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        int64_t value = counts[i].value, wanted = value < counts[i].least ? counts[i].least : counts[i].most;
        if (value < counts[i].least || value > counts[i].most)
            return cf__bad_plan(&check, counts[i].field, -1, wanted, value, "out of range");
    }
    if (plan->n_chunks != plan->n_ranks * plan->n_steps)
        return cf__bad_plan(&check, "n_chunks", -1, plan->n_ranks * plan->n_steps, plan->n_chunks,
                            "must be n_ranks x n_steps");
    if (plan->n_chunks > 0 && plan->chunks == NULL) return cf__bad_plan(&check, "chunks", -1, 1, 0, "is NULL");
    if (plan->n_slices > 0 && plan->slices == NULL) return cf__bad_plan(&check, "slices", -1, 1, 0, "is NULL");
    if (plan->n_groups > 0 && plan->groups == NULL) return cf__bad_plan(&check, "groups", -1, 1, 0, "is NULL");
    return CF_OK;
}

static cf_result cf__check_plan_lengths(const cf__plan_check *check, int64_t n) {
    const cf_plan *plan = check->plan;
    int64_t i, n_empty = 0, n_tokens = 0;
    if (n != plan->n_sequences) return cf__bad_plan(check, "n_sequences", -1, n, plan->n_sequences, "other lengths");
    if (n > 0 && check->lengths == NULL) return cf__fail_null(check->error, "lengths");
    for (i = 0; i < n; i++) {
        int64_t length = check->lengths[i];
        if (length < 0) return cf__fail(check->error, CF_ERROR_ARGUMENT, "lengths", i, 0, length, "negative");
        n_empty += length == 0;
        if (!cf__add(n_tokens, length, &n_tokens))
            return cf__fail(check->error, CF_ERROR_OVERFLOW, "lengths", i, INT64_MAX, length, "their sum overflows");
    }
    if (n_empty != plan->n_empty) return cf__bad_plan(check, "n_empty", -1, n_empty, plan->n_empty, "wrong count");
    if (n_tokens != plan->n_tokens) return cf__bad_plan(check, "n_tokens", -1, n_tokens, plan->n_tokens, "wrong sum");
    return CF_OK;
}

/* One slice: `whole` where it must be a whole sequence that no other slice has. */
static cf_result cf__check_slice(const cf__plan_check *check, int64_t id, int whole, int64_t offset) {
    const cf_slice *s = &check->plan->slices[id];
    int64_t length;
    if (s->sequence < 0 || s->sequence >= check->plan->n_sequences)
        return cf__bad_plan(check, "slices.sequence", id, check->plan->n_sequences - 1, s->sequence, "no such sequence");
    length = check->lengths[s->sequence];
    if (s->begin < 0 || s->begin >= length)
        return cf__bad_plan(check, "slices.begin", id, length - 1, s->begin, "outside its sequence");
    if (s->length < 1 || s->length > length - s->begin)
        return cf__bad_plan(check, "slices.length", id, length - s->begin, s->length, "outside its sequence");
    if (s->offset != offset) return cf__bad_plan(check, "slices.offset", id, offset, s->offset, "wrong place in chunk");
    if (!whole) return CF_OK;
    if (s->begin != 0) return cf__bad_plan(check, "slices.begin", id, 0, s->begin, "must hold a whole sequence");
    if (s->length != length) return cf__bad_plan(check, "slices.length", id, length, s->length, "must hold a whole sequence");
    if (check->seen[s->sequence])
        return cf__bad_plan(check, "slices.sequence", id, -1, s->sequence, "this sequence is packed twice");
    check->seen[s->sequence] = 1;
    return CF_OK;
}

/* The sums of one chunk over its slices, which start at `first`. */
static cf_result cf__check_chunk(const cf__plan_check *check, int64_t id, int64_t first) {
    const cf_plan *plan = check->plan;
    const cf_chunk *c = &plan->chunks[id];
    int64_t i, tokens = 0, padded = 0, pairs = 0;
    if (c->first_slice != first) return cf__bad_plan(check, "chunks.first_slice", id, first, c->first_slice, "gap or overlap");
    if (c->n_slices < 0 || c->n_slices > plan->n_slices - first)
        return cf__bad_plan(check, "chunks.n_slices", id, plan->n_slices - first, c->n_slices, "out of range");
    if (plan->max_slices > 0 && c->n_slices > plan->max_slices)
        return cf__bad_plan(check, "chunks.n_slices", id, plan->max_slices, c->n_slices, "more than max_slices");
    if (c->rank != id / plan->n_steps)
        return cf__bad_plan(check, "chunks.rank", id, id / plan->n_steps, c->rank, "wrong rank");
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *slice = &plan->slices[first + i];
        int64_t own;
        cf_result result = cf__check_slice(check, first + i, !(c->group >= 0 && i == 0), padded);
        if (result != CF_OK) return result;
        if (slice->length > plan->chunk_size)
            return cf__bad_plan(check, "slices.length", first + i, plan->chunk_size, slice->length, "over chunk_size");
        own = cf_slice_pairs(slice->begin, slice->length);
        if (own < 0 || !cf__add(pairs, own, &pairs))
            return cf__bad_plan(check, "chunks.pairs", id, INT64_MAX, -1, "its attention pairs overflow");
        tokens += slice->length;
        padded += cf__round_up(slice->length, plan->align);
        if (padded > plan->chunk_size)
            return cf__bad_plan(check, "chunks.padded", id, plan->chunk_size, padded, "its slices exceed chunk_size");
    }
    if (c->tokens != tokens) return cf__bad_plan(check, "chunks.tokens", id, tokens, c->tokens, "wrong sum");
    if (c->padded != padded) return cf__bad_plan(check, "chunks.padded", id, padded, c->padded, "wrong sum");
    if (c->pairs != pairs) return cf__bad_plan(check, "chunks.pairs", id, pairs, c->pairs, "wrong sum");
    return CF_OK;
}

/* A chunk and the group that it names must agree. Standalone chunks have index and prefix 0. */
static cf_result cf__check_membership(const cf__plan_check *check, int64_t id) {
    const cf_chunk *c = &check->plan->chunks[id];
    const cf_group *g;
    if (c->group < -1 || c->group >= check->plan->n_groups)
        return cf__bad_plan(check, "chunks.group", id, check->plan->n_groups - 1, c->group, "no such group");
    if (c->group < 0) {
        if (c->index != 0) return cf__bad_plan(check, "chunks.index", id, 0, c->index, "is in no group");
        if (c->prefix != 0) return cf__bad_plan(check, "chunks.prefix", id, 0, c->prefix, "is in no group");
        return CF_OK;
    }
    g = &check->plan->groups[c->group];
    if (g->first_chunk < 0 || g->n_chunks < 1 || g->first_chunk > id || id - g->first_chunk >= g->n_chunks)
        return cf__bad_plan(check, "chunks.group", id, g->first_chunk, c->group, "the group does not hold this chunk");
    if (c->index != id - g->first_chunk)
        return cf__bad_plan(check, "chunks.index", id, id - g->first_chunk, c->index, "wrong place in its group");
    if (c->n_slices < 1) return cf__bad_plan(check, "chunks.n_slices", id, 1, c->n_slices, "its group's slice is missing");
    if (c->n_slices > 1 && c->index != g->n_chunks - 1)
        return cf__bad_plan(check, "chunks.n_slices", id, 1, c->n_slices, "only a group's last chunk may be hybrid");
    return CF_OK;
}

static cf_result cf__check_group(const cf__plan_check *check, int64_t id) {
    const cf_plan *plan = check->plan;
    const cf_group *g = &plan->groups[id];
    int64_t i, prefix = 0;
    if (g->sequence < 0 || g->sequence >= plan->n_sequences)
        return cf__bad_plan(check, "groups.sequence", id, plan->n_sequences - 1, g->sequence, "no such sequence");
    if (g->first_chunk < 0 || g->first_chunk >= plan->n_chunks)
        return cf__bad_plan(check, "groups.first_chunk", id, plan->n_chunks - 1, g->first_chunk, "no such chunk");
    if (g->n_chunks < 1 || g->n_chunks > plan->n_steps - g->first_chunk % plan->n_steps)
        return cf__bad_plan(check, "groups.n_chunks", id, plan->n_steps - g->first_chunk % plan->n_steps, g->n_chunks,
                            "leaves its rank");
    for (i = 0; i < g->n_chunks; i++) {
        int64_t chunk = g->first_chunk + i;
        const cf_chunk *c = &plan->chunks[chunk];
        const cf_slice *s = &plan->slices[c->first_slice];
        if (c->group != id) return cf__bad_plan(check, "chunks.group", chunk, id, c->group, "another group's chunk");
        if (c->prefix != prefix) return cf__bad_plan(check, "chunks.prefix", chunk, prefix, c->prefix, "wrong sum");
        if (s->sequence != g->sequence)
            return cf__bad_plan(check, "slices.sequence", c->first_slice, g->sequence, s->sequence, "not its group's");
        if (s->begin != prefix) return cf__bad_plan(check, "slices.begin", c->first_slice, prefix, s->begin, "out of order");
        if (i + 1 < g->n_chunks && s->length % plan->align != 0)
            return cf__bad_plan(check, "slices.length", c->first_slice, plan->align, s->length, "not aligned");
        prefix += s->length;
    }
    if (prefix != check->lengths[g->sequence])
        return cf__bad_plan(check, "groups.n_chunks", id, check->lengths[g->sequence], prefix, "tokens missing at the end");
    if (g->tokens != prefix) return cf__bad_plan(check, "groups.tokens", id, prefix, g->tokens, "wrong sum");
    if (check->seen[g->sequence])
        return cf__bad_plan(check, "groups.sequence", id, -1, g->sequence, "this sequence is packed twice");
    check->seen[g->sequence] = 1;
    return CF_OK;
}

static cf_result cf__check_plan_body(const cf__plan_check *check) {
    const cf_plan *plan = check->plan;
    int64_t i, first = 0, n_idle = 0;
    cf_result result;
    if (plan->chunk_size % plan->align != 0)
        return cf__bad_plan(check, "align", -1, 0, plan->chunk_size % plan->align, "does not divide chunk_size; remainder");
    for (i = 0; i < plan->n_chunks; i++) {
        if ((result = cf__check_membership(check, i)) != CF_OK) return result;
        if ((result = cf__check_chunk(check, i, first)) != CF_OK) return result;
        first += plan->chunks[i].n_slices;
        n_idle += plan->chunks[i].n_slices == 0;
    }
    if (first != plan->n_slices) return cf__bad_plan(check, "n_slices", -1, first, plan->n_slices, "slices in no chunk");
    if (n_idle != plan->n_idle) return cf__bad_plan(check, "n_idle", -1, n_idle, plan->n_idle, "wrong count");
    for (i = 0; i < plan->n_groups; i++)
        if ((result = cf__check_group(check, i)) != CF_OK) return result;
    for (i = 0; i < plan->n_sequences; i++)
        if (check->lengths[i] > 0 && !check->seen[i])
            return cf__bad_plan(check, "slices.sequence", -1, i, -1, "a sequence is not packed");
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_plan_validate(const cf_plan *plan, const int64_t *lengths, int64_t n,
                                         const cf_allocator *allocator, cf_error *error) {
    cf__plan_check check = {plan, lengths, NULL, error};
    cf_allocator memory;
    size_t bytes;
    cf_result result;
    if (plan == NULL) return cf__fail_null(error, "plan");
    if ((result = cf__allocator(allocator, &memory, error)) != CF_OK) return result;
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__check_plan_lengths(&check, n)) != CF_OK) return result;
    bytes = (size_t)n + 1;
    check.seen = (unsigned char *)memory.alloc(bytes, memory.user);
    if (check.seen == NULL) return cf__fail_memory(error, bytes);
    memset(check.seen, 0, bytes);
    result = cf__check_plan_body(&check);
    memory.release(check.seen, memory.user);
    return result;
}

/* ---- feeding an attention kernel ---- */

static cf_result cf__check_chunk_id(const cf_plan *plan, int64_t chunk, int64_t least, cf_error *error) {
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (chunk < least || chunk >= plan->n_chunks)
        return cf__fail(error, CF_ERROR_ARGUMENT, "chunk", -1, chunk < least ? least : plan->n_chunks - 1, chunk,
                        "no such chunk");
    return CF_OK;
}

static size_t cf__metadata_bytes(int64_t n_slices) { return 4 * (size_t)(n_slices + 1) * sizeof(int32_t); }

CHUNKFLOW_API cf_result cf_metadata_size(const cf_plan *plan, int64_t chunk, size_t *bytes, cf_error *error) {
    int64_t i, most = 0;
    cf_result result = cf__check_chunk_id(plan, chunk, -1, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    if (chunk >= 0) most = plan->chunks[chunk].n_slices;
    else for (i = 0; i < plan->n_chunks; i++) most = cf__max(most, plan->chunks[i].n_slices);
    *bytes = cf__metadata_bytes(most);
    return CF_OK;
}

/* Cumulative counts of queries and keys, plain and padded, slice by slice. */
static void cf__fill_cu_seqlens(const cf_plan *plan, const cf_chunk *c, int32_t *q, int32_t *k, int32_t *q_padded,
                                int32_t *k_padded) {
    int64_t i, queries = 0, padded = 0;
    q[0] = k[0] = q_padded[0] = k_padded[0] = 0;
    for (i = 0; i < c->n_slices; i++) {
        int64_t length = plan->slices[c->first_slice + i].length;
        queries += length;
        padded += cf__round_up(length, plan->align);
        q[i + 1] = (int32_t)queries;
        k[i + 1] = (int32_t)(c->prefix + queries);
        q_padded[i + 1] = (int32_t)padded;
        k_padded[i + 1] = (int32_t)(c->prefix + padded);
    }
}

CHUNKFLOW_API cf_result cf_metadata_fill(const cf_plan *plan, int64_t chunk, void *memory, size_t bytes,
                                         cf_metadata *out, cf_error *error) {
    const cf_chunk *c;
    int32_t *rows = (int32_t *)memory;
    int64_t n, i, longest = 0;
    cf_result result = cf__check_chunk_id(plan, chunk, 0, error);
    if (result != CF_OK) return result;
    if (memory == NULL || out == NULL) return cf__fail_null(error, memory == NULL ? "memory" : "out");
    c = &plan->chunks[chunk];
    n = c->n_slices + 1;
    if ((uintptr_t)memory % sizeof(int32_t) != 0)
        return cf__fail(error, CF_ERROR_SPACE, "memory", -1, (int64_t)sizeof(int32_t),
                        (int64_t)((uintptr_t)memory % sizeof(int32_t)), "misaligned");
    if (bytes < cf__metadata_bytes(c->n_slices))
        return cf__fail(error, CF_ERROR_SPACE, "bytes", -1, (int64_t)cf__metadata_bytes(c->n_slices), (int64_t)bytes,
                        "too small");
    if (c->prefix + c->padded > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "cu_seqlens_k", chunk, INT32_MAX, c->prefix + c->padded,
                        "prefix and chunk pass 32 bits");
    for (i = 0; i < c->n_slices; i++) longest = cf__max(longest, plan->slices[c->first_slice + i].length);
    cf__fill_cu_seqlens(plan, c, rows, rows + n, rows + 2 * n, rows + 3 * n);
    out->chunk = chunk;
    out->n_slices = c->n_slices;
    out->tokens = c->tokens;
    out->padded = c->padded;
    out->prefix = c->prefix;
    out->pairs = c->pairs;
    out->max_seqlen_q = (int32_t)longest;
    out->max_seqlen_k = (int32_t)cf__max(longest, c->prefix + cf_chunk_state_tokens(plan, chunk));
    out->cu_seqlens_q = rows;
    out->cu_seqlens_k = rows + n;
    out->cu_seqlens_q_padded = rows + 2 * n;
    out->cu_seqlens_k_padded = rows + 3 * n;
    return CF_OK;
}

/* Room for one number per row of the chunk. */
static cf_result cf__check_ids(const cf_plan *plan, int64_t chunk, const int32_t *ids, int64_t count, cf_error *error) {
    cf_result result = cf__check_chunk_id(plan, chunk, 0, error);
    if (result != CF_OK) return result;
    if (count < plan->chunks[chunk].padded)
        return cf__fail(error, CF_ERROR_SPACE, "count", -1, plan->chunks[chunk].padded, count, "too small");
    if (ids == NULL && plan->chunks[chunk].padded > 0) return cf__fail_null(error, "ids");
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_position_ids(const cf_plan *plan, int64_t chunk, int32_t *ids, int64_t count,
                                        cf_error *error) {
    int64_t i, t;
    const cf_chunk *c;
    cf_result result = cf__check_ids(plan, chunk, ids, count, error);
    if (result != CF_OK) return result;
    c = &plan->chunks[chunk];
    if (c->prefix + c->padded > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "position_ids", chunk, INT32_MAX, c->prefix + c->padded,
                        "positions pass 32 bits");
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *slice = &plan->slices[c->first_slice + i];
        int32_t *row = ids + slice->offset, begin = (int32_t)slice->begin;
        for (t = 0; t < slice->length; t++) row[t] = begin + (int32_t)t;
        for (; t < cf__round_up(slice->length, plan->align); t++) row[t] = 0;
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_sequence_ids(const cf_plan *plan, int64_t chunk, int32_t *ids, int64_t count,
                                        cf_error *error) {
    int64_t i, t;
    const cf_chunk *c;
    cf_result result = cf__check_ids(plan, chunk, ids, count, error);
    if (result != CF_OK) return result;
    c = &plan->chunks[chunk];
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *slice = &plan->slices[c->first_slice + i];
        int32_t *row = ids + slice->offset, sequence = (int32_t)slice->sequence;
        for (t = 0; t < slice->length; t++) row[t] = sequence;
        for (; t < cf__round_up(slice->length, plan->align); t++) row[t] = -1;
    }
    return CF_OK;
}

/* ================================================================================================================
   >>schedule
   ================================================================================================================ */

CHUNKFLOW_API const char *cf_pass_name(cf_pass pass) {
    static const char *const names[CF_PASS_COUNT] = {"F",      "R",      "B",      "I",      "W",       "SEND_F",  "RECV_F",
                                                     "SEND_R", "RECV_R", "SEND_B", "RECV_B", "OFFLOAD", "PREFETCH"};
    return cf__name(names, CF_PASS_COUNT, (int64_t)pass);
}

CHUNKFLOW_API const char *cf_schedule_kind_name(cf_schedule_kind kind) {
    static const char *const names[CF_SCHEDULE_COUNT] = {"?", "paper", "gpipe", "1f1b", "interleaved", "zero-bubble", "best"};
    return cf__name(names, CF_SCHEDULE_COUNT, (int64_t)kind);
}

CHUNKFLOW_API const char *cf_replay_name(cf_replay replay) {
    static const char *const names[CF_REPLAY_COUNT] = {"?", "pipeline", "local"};
    return cf__name(names, CF_REPLAY_COUNT, (int64_t)replay);
}

CHUNKFLOW_API cf_schedule_desc cf_schedule_defaults(const cf_schedule_desc *desc) {
    cf_schedule_desc full = *desc;
    if (full.kind == CF_SCHEDULE_DEFAULT) full.kind = CF_SCHEDULE_PAPER;
    if (full.replay == CF_REPLAY_DEFAULT) full.replay = CF_REPLAY_PIPELINE;
    if (full.n_stages == 0) full.n_stages = 1;
    if (full.n_virtual == 0) full.n_virtual = full.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
    if (full.k == 0) full.k = 1;
    return full;
}

/* ---- the pipeline: what is scheduled, and what each pass costs ---- */

/* All defaults filled in: one cost for each compute pass, by its cf_pass. */
typedef struct cf__costs {
    cf_pass_cost of[CF_COMPUTE_PASS_COUNT];
} cf__costs;

/* The chunks of one rank on the virtual stages. Chunks are counted from the rank's first one here. A "cell" is a chunk on a
   virtual stage, v x n + chunk; what is kept for each cell lies stage by stage, so that walking a stage walks memory. */
typedef struct cf__pipeline {
    const cf_plan *plan;
    const cf_chunk *chunks;
    int64_t first_chunk;
    int64_t n;          /* chunks */
    int64_t n_stages;
    int64_t n_v;        /* virtual stages */
    int64_t k;
    int local;          /* local replay */
    cf__costs all;      /* of every virtual stage, unless there are: */
    cf__costs *by_stage; /* (n_v) or NULL */
    const cf_timing *timing;
    double latency, per_token;
} cf__pipeline;

static cf__pipeline cf__pipeline_of(const cf_plan *plan, int64_t rank, int64_t n_stages, int64_t n_virtual, int64_t k,
                                    cf_replay replay, const cf_timing *timing) {
    cf__pipeline pipe;
    memset(&pipe, 0, sizeof pipe);
    pipe.plan = plan;
    pipe.first_chunk = rank * plan->n_steps;
    pipe.chunks = plan->n_chunks > 0 ? &plan->chunks[pipe.first_chunk] : NULL;
    pipe.n = plan->n_steps;
    pipe.n_stages = n_stages;
    pipe.n_v = n_stages * n_virtual;
    pipe.k = k;
    pipe.local = replay == CF_REPLAY_LOCAL;
    pipe.timing = timing;
    return pipe;
}

static int cf__is_free(const cf_pass_cost *cost) {
    return !(cost->constant > 0) && !(cost->per_token > 0) && !(cost->per_pair > 0);
}

static cf_pass_cost cf__sum_of_costs(const cf_pass_cost *a, const cf_pass_cost *b) {
    cf_pass_cost sum;
    sum.constant = a->constant + b->constant;
    sum.per_token = a->per_token + b->per_token;
    sum.per_pair = a->per_pair + b->per_pair;
    return sum;
}

static cf_pass_cost cf__half_of_cost(const cf_pass_cost *cost) {
    cf_pass_cost half;
    half.constant = cost->constant / 2;
    half.per_token = cost->per_token / 2;
    half.per_pair = cost->per_pair / 2;
    return half;
}

static cf__costs cf__fill_costs(const cf_stage_cost *given) {
    cf__costs costs;
    cf_pass_cost *of = costs.of;
    of[CF_F] = given->forward;
    of[CF_R] = given->replay;
    of[CF_B] = given->backward;
    of[CF_I] = given->input;
    of[CF_W] = given->weight;
    if (cf__is_free(&of[CF_F]) && cf__is_free(&of[CF_R]) && cf__is_free(&of[CF_B]) && cf__is_free(&of[CF_I]) &&
        cf__is_free(&of[CF_W]))
        of[CF_F].per_token = 1;
    if (cf__is_free(&of[CF_R])) of[CF_R] = of[CF_F];
    if (cf__is_free(&of[CF_B])) of[CF_B] = cf__sum_of_costs(&of[CF_I], &of[CF_W]);
    if (cf__is_free(&of[CF_B])) of[CF_B] = cf__sum_of_costs(&of[CF_F], &of[CF_F]);
    if (cf__is_free(&of[CF_I])) of[CF_I] = cf__half_of_cost(&of[CF_B]);
    if (cf__is_free(&of[CF_W])) of[CF_W] = cf__half_of_cost(&of[CF_B]);
    return costs;
}

static const cf__costs *cf__costs_of(const cf__pipeline *pipe, int64_t v) {
    return pipe->by_stage != NULL ? &pipe->by_stage[v] : &pipe->all;
}

/* Seconds of a compute pass of a chunk on a virtual stage. */
static double cf__pass_seconds(const cf__pipeline *pipe, int pass, int64_t chunk, int64_t v) {
    const cf_chunk *c = &pipe->chunks[chunk];
    return cf_cost_seconds(&cf__costs_of(pipe, v)->of[pass], c->tokens, c->pairs);
}

/* Seconds that the boundary activations of a chunk, or their gradient, take from one stage to the next. */
static double cf__transfer_seconds(const cf__pipeline *pipe, int64_t chunk) {
    if (pipe->n_stages == 1) return 0;
    return pipe->latency + cf__product(pipe->per_token, (double)pipe->chunks[chunk].padded);
}

static cf_result cf__check_timing(const cf_timing *timing, int64_t n_v, cf_error *error) {
    int64_t v, i, n = timing->stages != NULL ? n_v : 1;
    if (!cf__is_cost(timing->latency) || !cf__is_cost(timing->seconds_per_token) ||
        !cf__is_cost(timing->offload_seconds_per_token))
        return cf__fail(error, CF_ERROR_ARGUMENT, "timing", -1, 0, -1, "must be finite and not negative");
    for (v = 0; v < n; v++) {
        const cf_stage_cost *stage = timing->stages != NULL ? &timing->stages[v] : &timing->all;
        const cf_pass_cost *costs[CF_COMPUTE_PASS_COUNT];
        costs[0] = &stage->forward;
        costs[1] = &stage->replay;
        costs[2] = &stage->backward;
        costs[3] = &stage->input;
        costs[4] = &stage->weight;
        for (i = 0; i < CF_COMPUTE_PASS_COUNT; i++)
            if (!cf__is_cost(costs[i]->constant) || !cf__is_cost(costs[i]->per_token) || !cf__is_cost(costs[i]->per_pair))
                return cf__fail(error, CF_ERROR_ARGUMENT, "timing.stages", v, 0, -1, "must be finite and not negative");
    }
    return CF_OK;
}

/* Times must stay far from infinity, or nothing could be compared. Adds up an upper bound of every makespan. */
static cf_result cf__check_total_time(const cf__pipeline *pipe, cf_error *error) {
    double tokens = 0, pairs = 0, n = (double)pipe->n, total = 0;
    int64_t v, i;
    for (i = 0; i < pipe->n; i++) {
        tokens += (double)pipe->chunks[i].padded;
        pairs += (double)pipe->chunks[i].pairs;
    }
    for (v = 0; v < pipe->n_v; v++)
        for (i = 0; i < CF_COMPUTE_PASS_COUNT; i++) {
            const cf_pass_cost *cost = &cf__costs_of(pipe, v)->of[i];
            total += cost->constant * n + cost->per_token * tokens + cost->per_pair * pairs;
        }
    total += 3 * (double)pipe->n_v * (pipe->latency * n + pipe->per_token * tokens);
    if (total <= DBL_MAX / 1e6) return CF_OK;
    return cf__fail(error, CF_ERROR_OVERFLOW, "timing", -1, 0, -1, "the total time is not finite");
}

static void cf__layout_pipeline(cf__pipeline *pipe, cf__carver *carver) {
    int64_t n = pipe->timing != NULL && pipe->timing->stages != NULL ? pipe->n_v : 0;
    pipe->by_stage = (cf__costs *)cf__take(carver, n, sizeof(cf__costs));
    if (n == 0) pipe->by_stage = NULL;
}

/* Once the memory is there. */
static void cf__fill_pipeline(cf__pipeline *pipe) {
    static const cf_stage_cost unit = {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}};
    int64_t v;
    pipe->all = cf__fill_costs(pipe->timing != NULL ? &pipe->timing->all : &unit);
    for (v = 0; pipe->by_stage != NULL && v < pipe->n_v; v++) pipe->by_stage[v] = cf__fill_costs(&pipe->timing->stages[v]);
    pipe->latency = pipe->timing != NULL ? pipe->timing->latency : 0;
    pipe->per_token = pipe->timing != NULL ? pipe->timing->seconds_per_token : 0;
}

/* Chunks of the unit that starts at chunk `id` of the plan: its group's, or 1. 0 where plan and group disagree. */
static int64_t cf__unit_chunks(const cf_plan *plan, int64_t id) {
    const cf_chunk *c = &plan->chunks[id];
    const cf_group *g;
    if (c->group == -1) return 1;
    if (c->group < 0 || c->group >= plan->n_groups) return 0;
    g = &plan->groups[c->group];
    if (g->first_chunk != id || g->n_chunks < 1 || g->n_chunks > plan->n_steps - id % plan->n_steps) return 0;
    return g->n_chunks;
}

/* Chunks of the group after this one; 0 for a standalone chunk. */
static int64_t cf__chunks_after(const cf__pipeline *pipe, int64_t chunk) {
    const cf_chunk *c = &pipe->chunks[chunk];
    return c->group >= 0 ? pipe->plan->groups[c->group].n_chunks - 1 - c->index : 0;
}

/* ---- the clock: when each action of a schedule runs ---- */

enum { CF__FORWARDED = 1, CF__REPLAYED = 2, CF__GRADED = 4, CF__WEIGHTED = 8, CF__KEPT = 16 }; /* of a cell */
enum { CF__INPUT = 0, CF__INPUT_AGAIN, CF__GRADIENT, CF__ARRIVALS };

typedef struct cf__clock {
    const cf__pipeline *pipe;
    const cf_schedule *schedule;
    cf_error *error;
    double *start, *end;           /* (n_actions) */
    double *arrival[CF__ARRIVALS]; /* (cells) when the input of F, that of R, and the gradient are there */
    uint8_t *done;                 /* (cells) flags above */
    int64_t *next;                 /* (n_stages) first action that has not run */
    double *free_at;               /* (n_stages) */
    double *link_free[2];          /* (n_stages) when the way to the next, to the previous stage is free */
    int32_t *waiting;              /* (n_stages) stack of the stages to look at */
    uint8_t *is_waiting;           /* (n_stages) */
    int64_t n_waiting;
    int splits;                    /* there is an I */
    double makespan;
} cf__clock;

static void cf__layout_clock(cf__clock *clock, int64_t n_cells, int64_t n_stages, cf__carver *carver) {
    int i;
    for (i = 0; i < CF__ARRIVALS; i++) clock->arrival[i] = (double *)cf__take(carver, n_cells, sizeof(double));
    clock->done = (uint8_t *)cf__take(carver, n_cells, sizeof(uint8_t));
    clock->next = (int64_t *)cf__take(carver, n_stages, sizeof(int64_t));
    clock->free_at = (double *)cf__take(carver, n_stages, sizeof(double));
    for (i = 0; i < 2; i++) clock->link_free[i] = (double *)cf__take(carver, n_stages, sizeof(double));
    clock->waiting = (int32_t *)cf__take(carver, n_stages, sizeof(int32_t));
    clock->is_waiting = (uint8_t *)cf__take(carver, n_stages, sizeof(uint8_t));
}

static cf_result cf__clock_fail(const cf__clock *clock, const char *field, int64_t action, int64_t wanted, int64_t got,
                                const char *why) {
    return cf__fail(clock->error, CF_ERROR_SCHEDULE, field, action, wanted, got, why);
}

/* Indices of an action are good, and it is on the right stage. */
static cf_result cf__check_action(const cf__clock *clock, int64_t stage, int64_t id) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    if (a->chunk < pipe->first_chunk || a->chunk >= pipe->first_chunk + pipe->n)
        return cf__clock_fail(clock, "actions.chunk", id, pipe->first_chunk, a->chunk, "not a chunk of this rank");
    if (a->stage < 0 || a->stage >= pipe->n_v || a->stage % pipe->n_stages != stage)
        return cf__clock_fail(clock, "actions.stage", id, stage, a->stage, "not a virtual stage of this stage");
    if (a->pass >= CF_COMPUTE_PASS_COUNT)
        return cf__clock_fail(clock, "actions.pass", id, CF_COMPUTE_PASS_COUNT - 1, a->pass, "not a compute pass");
    return CF_OK;
}

/* What an action needs from earlier actions of its own virtual stage. As the list is an order, what is missing now never
   comes. */
static cf_result cf__check_order(const cf__clock *clock, int64_t id, int64_t chunk, const uint8_t *cell) {
    const cf_action *a = &clock->schedule->actions[id];
    int dependent = clock->pipe->chunks[chunk].group >= 0;
    switch (a->pass) {
        case CF_F:
            if (*cell != 0) return cf__clock_fail(clock, "actions.pass", id, 0, *cell, "F twice");
            if (dependent && clock->pipe->chunks[chunk].index > 0 && !(cell[-1] & CF__FORWARDED))
                return cf__clock_fail(clock, "actions", id, 1, 0, "F before that of the chunk before it in the group");
            break;
        case CF_R:
            if (!(*cell & CF__FORWARDED)) return cf__clock_fail(clock, "actions.pass", id, 1, 0, "R before F");
            if (*cell & CF__KEPT) return cf__clock_fail(clock, "actions.pass", id, 0, 1, "R of kept activations");
            if (!a->keep) return cf__clock_fail(clock, "actions.keep", id, 1, 0, "R that keeps nothing");
            break;
        case CF_W:
            if (!(*cell & CF__GRADED)) return cf__clock_fail(clock, "actions.pass", id, 1, 0, "W before I");
            if (*cell & CF__WEIGHTED) return cf__clock_fail(clock, "actions.pass", id, 0, 1, "W twice or after B");
            break;
        default: /* B, I */
            if (!(*cell & CF__KEPT))
                return cf__clock_fail(clock, "actions.pass", id, 1, 0, "backward without kept activations");
            if (*cell & CF__GRADED) return cf__clock_fail(clock, "actions.pass", id, 0, 1, "backward twice");
            if (dependent && cf__chunks_after(clock->pipe, chunk) > 0 && !(cell[1] & CF__GRADED))
                return cf__clock_fail(clock, "actions", id, 1, 0, "backward before that of the next chunk in the group");
            break;
    }
    return CF_OK;
}

/* When what an action gets from a neighbouring stage is there; -1 if that has not been sent. */
static double cf__arrival(const cf__clock *clock, int pass, int64_t v, int64_t cell) {
    int64_t n = clock->pipe->n, n_v = clock->pipe->n_v;
    if (pass == CF_F && v > 0)
        return clock->done[cell - n] & CF__FORWARDED ? clock->arrival[CF__INPUT][cell] : -1;
    if (pass == CF_R && v > 0 && !clock->pipe->local)
        return clock->done[cell - n] & CF__REPLAYED ? clock->arrival[CF__INPUT_AGAIN][cell] : -1;
    if ((pass == CF_B || pass == CF_I) && v < n_v - 1)
        return clock->done[cell + n] & CF__GRADED ? clock->arrival[CF__GRADIENT][cell] : -1;
    return 0;
}

/* The result of a pass goes to a neighbour. Returns when the sender is free again. Without overlap the arrival that is noted
   is the moment from which the receiver can take part. */
static double cf__send(cf__clock *clock, int64_t stage, int direction, double end, double seconds, double *arrival) {
    double *link = &clock->link_free[direction][stage], begin = end > *link ? end : *link;
    if (seconds > 0 && clock->pipe->timing->no_overlap) {
        *arrival = end;
        return end + seconds;
    }
    *arrival = *link = begin + seconds;
    return end;
}

static void cf__run_on_clock(cf__clock *clock, int64_t stage, int64_t id, int64_t chunk, int64_t cell, double arrival) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    int64_t v = a->stage, n = pipe->n;
    double transfer = cf__transfer_seconds(pipe, chunk), start = clock->free_at[stage], end;
    uint8_t *done = &clock->done[cell];
    int gets = (a->pass == CF_F && v > 0) || (a->pass == CF_R && v > 0 && !pipe->local) ||
               ((a->pass == CF_B || a->pass == CF_I) && v < pipe->n_v - 1);
    if (arrival > start) start = arrival;
    if (gets && transfer > 0 && pipe->timing->no_overlap) start += transfer;
    end = start + cf__pass_seconds(pipe, a->pass, chunk, v);
    clock->start[id] = start;
    clock->end[id] = end;
    clock->free_at[stage] = end;
    if (end > clock->makespan) clock->makespan = end;
    switch (a->pass) {
        case CF_F:
            *done |= (uint8_t)(a->keep ? CF__FORWARDED | CF__KEPT : CF__FORWARDED);
            if (v + 1 < pipe->n_v)
                clock->free_at[stage] = cf__send(clock, stage, 0, end, transfer, &clock->arrival[CF__INPUT][cell + n]);
            break;
        case CF_R:
            *done |= CF__REPLAYED | CF__KEPT;
            if (v + 1 < pipe->n_v && !pipe->local)
                clock->free_at[stage] = cf__send(clock, stage, 0, end, transfer, &clock->arrival[CF__INPUT_AGAIN][cell + n]);
            break;
        case CF_W: *done |= CF__WEIGHTED; break;
        default:
            *done |= (uint8_t)(a->pass == CF_B ? CF__GRADED | CF__WEIGHTED : CF__GRADED);
            clock->splits |= a->pass == CF_I;
            if (v > 0)
                clock->free_at[stage] = cf__send(clock, stage, 1, end, transfer, &clock->arrival[CF__GRADIENT][cell - n]);
            break;
    }
}

static void cf__look_at(cf__clock *clock, int64_t stage) {
    if (clock->is_waiting[stage]) return;
    clock->is_waiting[stage] = 1;
    clock->waiting[clock->n_waiting++] = (int32_t)stage;
}

/* Runs a stage until it has to wait for a neighbour. */
static cf_result cf__advance_stage(cf__clock *clock, int64_t stage) {
    const cf__pipeline *pipe = clock->pipe;
    int64_t begin = clock->next[stage], end = clock->schedule->first[stage + 1], id;
    for (id = begin; id < end; id++) {
        const cf_action *a = &clock->schedule->actions[id];
        int64_t chunk, cell;
        double arrival;
        cf_result result = cf__check_action(clock, stage, id);
        if (result != CF_OK) return result;
        chunk = a->chunk - pipe->first_chunk;
        cell = a->stage * pipe->n + chunk;
        if ((result = cf__check_order(clock, id, chunk, &clock->done[cell])) != CF_OK) return result;
        arrival = cf__arrival(clock, a->pass, a->stage, cell);
        if (arrival < 0) break;
        cf__run_on_clock(clock, stage, id, chunk, cell, arrival);
    }
    clock->next[stage] = id;
    if (id > begin && pipe->n_stages > 1) {
        cf__look_at(clock, (stage + 1) % pipe->n_stages);
        cf__look_at(clock, (stage + pipe->n_stages - 1) % pipe->n_stages);
    }
    return CF_OK;
}

/* Every stage has come to the end of its list, and every chunk through every virtual stage. */
static cf_result cf__check_finished(const cf__clock *clock) {
    const cf__pipeline *pipe = clock->pipe;
    int64_t s, i;
    for (s = 0; s < pipe->n_stages; s++)
        if (clock->next[s] < clock->schedule->first[s + 1])
            return cf__clock_fail(clock, "actions", clock->next[s], clock->schedule->first[s + 1], clock->next[s],
                                  "deadlock: it waits for a pass of another stage that never runs");
    for (i = 0; i < pipe->n * pipe->n_v; i++)
        if (!(clock->done[i] & CF__WEIGHTED))
            return cf__clock_fail(clock, "actions", -1, pipe->first_chunk + i % pipe->n, i / pipe->n,
                                  "the chunk wanted never ends its backward on the virtual stage found");
    return CF_OK;
}

/* Fills start and end. Passes over each action once; a stage is looked at again only after a neighbour has moved. */
static cf_result cf__run_clock(cf__clock *clock) {
    const cf_schedule *schedule = clock->schedule;
    int64_t n_stages = clock->pipe->n_stages, s;
    cf_result result = CF_OK;
    memset(clock->done, 0, (size_t)(clock->pipe->n * clock->pipe->n_v));
    memset(clock->is_waiting, 0, (size_t)n_stages);
    clock->n_waiting = 0;
    clock->splits = 0;
    clock->makespan = 0;
    for (s = n_stages - 1; s >= 0; s--) {
        clock->next[s] = schedule->first[s];
        clock->free_at[s] = clock->link_free[0][s] = clock->link_free[1][s] = 0;
        cf__look_at(clock, s);
    }
    while (clock->n_waiting > 0 && result == CF_OK) {
        s = clock->waiting[--clock->n_waiting];
        clock->is_waiting[s] = 0;
        result = cf__advance_stage(clock, s);
    }
    return result == CF_OK ? cf__check_finished(clock) : result;
}

/* ---- heads, tails and lower bounds ---- */

enum { CF__FORWARD = 0, CF__AGAIN, CF__BACKWARD, CF__WEIGHT, CF__KINDS }; /* of a pass, for the arrays below */

/* For each pass the longest way to it (head) and from its end (tail) through passes that must come before or after it. With
   split backwards the third kind is I, the fourth W; otherwise the third is B and there is no fourth. */
typedef struct cf__paths {
    const cf__pipeline *pipe;
    int split;
    double *seconds[CF__KINDS]; /* (cells) */
    double *head[CF__KINDS];    /* (cells) */
    double *tail[CF__KINDS];    /* (cells) */
    double critical;            /* longest head + seconds + tail */
} cf__paths;

/* Working space of the bounds of one stage. A job is a pass there. */
typedef struct cf__jobs {
    int64_t n;
    double *late;      /* (most jobs) minus the head, so that sorting by falling key sorts by rising head */
    double *urgency;   /* (most jobs) minus the tail */
    double *left;      /* (most jobs) seconds still to run */
    int32_t *by_head;  /* (most jobs) */
    int32_t *heap;     /* (most jobs) */
} cf__jobs;

static void cf__layout_paths(cf__paths *paths, int64_t n_cells, int split, cf__carver *carver) {
    int i;
    for (i = 0; i < CF__KINDS; i++) {
        int64_t n = i < CF__WEIGHT || split ? n_cells : 0;
        paths->seconds[i] = (double *)cf__take(carver, n, sizeof(double));
        paths->head[i] = (double *)cf__take(carver, n, sizeof(double));
        paths->tail[i] = (double *)cf__take(carver, n, sizeof(double));
    }
}

static void cf__layout_jobs(cf__jobs *jobs, int64_t most, cf__carver *carver) {
    jobs->late = (double *)cf__take(carver, most, sizeof(double));
    jobs->urgency = (double *)cf__take(carver, most, sizeof(double));
    jobs->left = (double *)cf__take(carver, most, sizeof(double));
    jobs->by_head = (int32_t *)cf__take(carver, most, sizeof(int32_t));
    jobs->heap = (int32_t *)cf__take(carver, most, sizeof(int32_t));
}

static double cf__most(double a, double b) { return a > b ? a : b; }

/* Head + seconds of a pass: when it can have ended at the earliest. */
static double cf__earliest_end(const cf__paths *paths, int kind, int64_t cell) {
    return paths->head[kind][cell] + paths->seconds[kind][cell];
}

/* Seconds + tail of a pass: how long before the end it must have begun. */
static double cf__latest_start(const cf__paths *paths, int kind, int64_t cell) {
    return paths->tail[kind][cell] + paths->seconds[kind][cell];
}

/* The pass that frees the slot of a chunk. */
static int cf__last_kind(const cf__paths *paths) { return paths->split ? CF__WEIGHT : CF__BACKWARD; }

static void cf__fill_seconds(cf__paths *paths) {
    const cf__pipeline *pipe = paths->pipe;
    int64_t v, i;
    for (v = 0; v < pipe->n_v; v++)
        for (i = 0; i < pipe->n; i++) {
            int64_t cell = v * pipe->n + i;
            paths->seconds[CF__FORWARD][cell] = cf__pass_seconds(pipe, CF_F, i, v);
            paths->seconds[CF__AGAIN][cell] = cf__pass_seconds(pipe, CF_R, i, v);
            paths->seconds[CF__BACKWARD][cell] = cf__pass_seconds(pipe, paths->split ? CF_I : CF_B, i, v);
            if (paths->split) paths->seconds[CF__WEIGHT][cell] = cf__pass_seconds(pipe, CF_W, i, v);
        }
}

/* Heads of the passes of one chunk, those of the group's chunks that come before them being known. `last`: the group's last
   chunk; a chunk before it by k or more is dropped, and replayed when the chunk k after it has freed its slot. */
static void cf__forward_heads(cf__paths *paths, int64_t chunk, int64_t first) {
    const cf__pipeline *pipe = paths->pipe;
    double transfer = cf__transfer_seconds(pipe, chunk);
    int64_t v;
    for (v = 0; v < pipe->n_v; v++) {
        int64_t cell = v * pipe->n + chunk;
        double head = 0;
        if (v > 0) head = cf__earliest_end(paths, CF__FORWARD, cell - pipe->n) + transfer;
        if (chunk > first) head = cf__most(head, cf__earliest_end(paths, CF__FORWARD, cell - 1));
        paths->head[CF__FORWARD][cell] = head;
    }
}

static void cf__replay_heads(cf__paths *paths, int64_t chunk, int64_t last) {
    const cf__pipeline *pipe = paths->pipe;
    double transfer = cf__transfer_seconds(pipe, chunk);
    int64_t v;
    for (v = 0; v < pipe->n_v; v++) {
        int64_t cell = v * pipe->n + chunk;
        double head = cf__earliest_end(paths, cf__last_kind(paths), cell + pipe->k);
        if (v > 0 && !pipe->local) head = cf__most(head, cf__earliest_end(paths, CF__AGAIN, cell - pipe->n) + transfer);
        if (chunk + 1 + pipe->k <= last) head = cf__most(head, cf__earliest_end(paths, CF__AGAIN, cell + 1));
        paths->head[CF__AGAIN][cell] = head;
    }
}

static void cf__backward_heads(cf__paths *paths, int64_t chunk, int64_t last) {
    const cf__pipeline *pipe = paths->pipe;
    double transfer = cf__transfer_seconds(pipe, chunk);
    int kept_by = chunk + pipe->k <= last ? CF__AGAIN : CF__FORWARD;
    int64_t v;
    for (v = pipe->n_v - 1; v >= 0; v--) {
        int64_t cell = v * pipe->n + chunk;
        double head = cf__earliest_end(paths, kept_by, cell);
        if (v + 1 < pipe->n_v) head = cf__most(head, cf__earliest_end(paths, CF__BACKWARD, cell + pipe->n) + transfer);
        if (chunk < last) head = cf__most(head, cf__earliest_end(paths, CF__BACKWARD, cell + 1));
        paths->head[CF__BACKWARD][cell] = head;
        if (paths->split) paths->head[CF__WEIGHT][cell] = cf__earliest_end(paths, CF__BACKWARD, cell);
    }
}

/* The same backwards in time. (cf__replay_tails is right for a chunk that is dropped although K would let it stay, too.) */
static void cf__backward_tails(cf__paths *paths, int64_t chunk, int64_t first) {
    const cf__pipeline *pipe = paths->pipe;
    double transfer = cf__transfer_seconds(pipe, chunk);
    int64_t v;
    for (v = 0; v < pipe->n_v; v++) {
        int64_t cell = v * pipe->n + chunk;
        double tail = 0, freed = 0;
        if (chunk - first >= pipe->k) freed = cf__latest_start(paths, CF__AGAIN, cell - pipe->k);
        if (v > 0) tail = cf__latest_start(paths, CF__BACKWARD, cell - pipe->n) + transfer;
        if (chunk > first) tail = cf__most(tail, cf__latest_start(paths, CF__BACKWARD, cell - 1));
        if (paths->split) {
            paths->tail[CF__WEIGHT][cell] = freed;
            freed = cf__latest_start(paths, CF__WEIGHT, cell);
        }
        paths->tail[CF__BACKWARD][cell] = cf__most(tail, freed);
    }
}

static void cf__replay_tails(cf__paths *paths, int64_t chunk, int64_t first) {
    const cf__pipeline *pipe = paths->pipe;
    double transfer = cf__transfer_seconds(pipe, chunk);
    int64_t v;
    for (v = pipe->n_v - 1; v >= 0; v--) {
        int64_t cell = v * pipe->n + chunk;
        double tail = cf__latest_start(paths, CF__BACKWARD, cell);
        if (v + 1 < pipe->n_v && !pipe->local)
            tail = cf__most(tail, cf__latest_start(paths, CF__AGAIN, cell + pipe->n) + transfer);
        if (chunk > first) tail = cf__most(tail, cf__latest_start(paths, CF__AGAIN, cell - 1));
        paths->tail[CF__AGAIN][cell] = tail;
    }
}

static void cf__forward_tails(cf__paths *paths, int64_t chunk, int64_t last) {
    const cf__pipeline *pipe = paths->pipe;
    double transfer = cf__transfer_seconds(pipe, chunk);
    int64_t v;
    for (v = pipe->n_v - 1; v >= 0; v--) {
        int64_t cell = v * pipe->n + chunk;
        double tail = cf__latest_start(paths, chunk + pipe->k <= last ? CF__AGAIN : CF__BACKWARD, cell);
        if (v + 1 < pipe->n_v) tail = cf__most(tail, cf__latest_start(paths, CF__FORWARD, cell + pipe->n) + transfer);
        if (chunk < last) tail = cf__most(tail, cf__latest_start(paths, CF__FORWARD, cell + 1));
        paths->tail[CF__FORWARD][cell] = tail;
        paths->critical = cf__most(paths->critical, paths->head[CF__FORWARD][cell] + cf__latest_start(paths, CF__FORWARD, cell));
    }
}

/* Fills paths, unit by unit; time is linear in the passes. Every longest path begins with an F. */
static void cf__find_paths(cf__paths *paths) {
    const cf__pipeline *pipe = paths->pipe;
    int64_t first, last, i;
    paths->critical = 0;
    cf__fill_seconds(paths);
    for (first = 0; first < pipe->n; first = last + 1) {
        last = first + cf__chunks_after(pipe, first);
        for (i = first; i <= last; i++) cf__forward_heads(paths, i, first);
        for (i = last; i >= first; i--) {
            if (last - i >= pipe->k) cf__replay_heads(paths, i, last);
            cf__backward_heads(paths, i, last);
        }
        for (i = first; i <= last; i++) {
            cf__backward_tails(paths, i, first);
            cf__replay_tails(paths, i, first); /* also of kept chunks, which a limit may cause to be dropped */
        }
        for (i = last; i >= first; i--) cf__forward_tails(paths, i, last);
    }
}

static void cf__add_job(cf__jobs *jobs, const cf__paths *paths, int kind, int64_t cell) {
    jobs->late[jobs->n] = -paths->head[kind][cell];
    jobs->urgency[jobs->n] = -paths->tail[kind][cell];
    jobs->left[jobs->n] = paths->seconds[kind][cell];
    jobs->by_head[jobs->n] = (int32_t)jobs->n;
    jobs->n++;
}

static void cf__collect_jobs(cf__jobs *jobs, const cf__paths *paths, int64_t stage) {
    const cf__pipeline *pipe = paths->pipe;
    int64_t v, i;
    jobs->n = 0;
    for (v = stage; v < pipe->n_v; v += pipe->n_stages)
        for (i = 0; i < pipe->n; i++) {
            int64_t cell = v * pipe->n + i;
            cf__add_job(jobs, paths, CF__FORWARD, cell);
            if (cf__chunks_after(pipe, i) >= pipe->k) cf__add_job(jobs, paths, CF__AGAIN, cell);
            cf__add_job(jobs, paths, CF__BACKWARD, cell);
            if (paths->split) cf__add_job(jobs, paths, CF__WEIGHT, cell);
        }
}

/* Least head + all work + least tail. */
static double cf__load_bound(const cf__jobs *jobs) {
    double head = DBL_MAX, tail = DBL_MAX, work = 0;
    int64_t i;
    for (i = 0; i < jobs->n; i++) {
        if (-jobs->late[i] < head) head = -jobs->late[i];
        if (-jobs->urgency[i] < tail) tail = -jobs->urgency[i];
        work += jobs->left[i];
    }
    return jobs->n > 0 ? head + work + tail : 0;
}

/* Jackson's preemptive schedule: always run the released job with the longest tail. Its longest completion + tail is the
   maximum of the load bound over all subsets of the jobs (Carlier, 1982). */
static double cf__one_machine_bound(cf__jobs *jobs) {
    int64_t i = 0, n_heap = 0;
    double now = 0, bound = 0;
    cf__sort_by_key(jobs->by_head, jobs->n, jobs->late);
    while (i < jobs->n || n_heap > 0) {
        double release = i < jobs->n ? -jobs->late[jobs->by_head[i]] : DBL_MAX;
        int32_t job;
        if (n_heap == 0 || release <= now) {
            now = cf__most(now, release);
            cf__heap_push(jobs->heap, n_heap++, jobs->by_head[i++], jobs->urgency);
            continue;
        }
        job = jobs->heap[0];
        if (now + jobs->left[job] > release) {
            jobs->left[job] -= release - now;
            now = release;
            continue;
        }
        now += jobs->left[job];
        bound = cf__most(bound, now - jobs->urgency[job]);
        cf__heap_pop(jobs->heap, n_heap--, jobs->urgency);
    }
    return bound;
}

/* Seconds that all chunks together must stay in the slots of each stage: at least while the later stages run the chunk's
   forward and its backward. A chunk that is not the last of its group may be dropped, even where K would let it stay; then
   that time is the one of its replay, which in local replay goes no further than its stage. */
static void cf__sum_slot_seconds(const cf__paths *paths, double *sums) {
    const cf__pipeline *pipe = paths->pipe;
    int64_t i, v;
    for (v = 0; v < pipe->n_stages; v++) sums[v] = 0;
    for (i = 0; i < pipe->n; i++) {
        double transfer = 2 * cf__transfer_seconds(pipe, i), seconds = -transfer;
        int may_drop = cf__chunks_after(pipe, i) > 0;
        for (v = pipe->n_v - 1; v >= 0; v--) {
            int64_t cell = v * pipe->n + i;
            double forward = paths->seconds[CF__FORWARD][cell], again = paths->seconds[CF__AGAIN][cell];
            if (may_drop && again < forward) forward = again;
            if (may_drop && pipe->local) seconds = -transfer;
            seconds += transfer + forward + paths->seconds[CF__BACKWARD][cell];
            sums[v % pipe->n_stages] += seconds + (paths->split ? paths->seconds[CF__WEIGHT][cell] : 0);
        }
    }
}

/* At most `limit` chunks on the stage at once, so their slot times take at least sum / limit, after the least head of a
   forward and before the least tail of a pass that frees a slot. */
static double cf__memory_bound(const cf__paths *paths, int64_t stage, int64_t limit, double slot_seconds) {
    const cf__pipeline *pipe = paths->pipe;
    double head = DBL_MAX, tail = DBL_MAX;
    int64_t v, i;
    for (v = stage; v < pipe->n_v; v += pipe->n_stages)
        for (i = 0; i < pipe->n; i++) {
            int64_t cell = v * pipe->n + i;
            if (paths->head[CF__FORWARD][cell] < head) head = paths->head[CF__FORWARD][cell];
            if (paths->tail[cf__last_kind(paths)][cell] < tail) tail = paths->tail[cf__last_kind(paths)][cell];
        }
    return pipe->n > 0 ? head + tail + slot_seconds / (double)limit : 0;
}

/* All bounds of a pipeline, and what they need. */
typedef struct cf__bounds {
    cf__paths paths;
    cf__jobs jobs;
    double *slot_seconds; /* (n_stages) */
    double critical_path, stage_load, one_machine, memory;
} cf__bounds;

static void cf__layout_bounds(cf__bounds *bounds, const cf__pipeline *pipe, int split, cf__carver *carver) {
    cf__layout_paths(&bounds->paths, pipe->n * pipe->n_v, split, carver);
    cf__layout_jobs(&bounds->jobs, pipe->n * (pipe->n_v / pipe->n_stages) * CF__KINDS, carver);
    bounds->slot_seconds = (double *)cf__take(carver, pipe->n_stages, sizeof(double));
}

/* Heads, tails and the critical path alone; linear in the passes. */
static void cf__find_critical_path(cf__bounds *bounds, const cf__pipeline *pipe, int split) {
    bounds->paths.pipe = pipe;
    bounds->paths.split = split;
    cf__find_paths(&bounds->paths);
    bounds->critical_path = bounds->paths.critical;
}

/* limits: most chunks on each stage, 0: none. NULL: none at all. */
static void cf__find_bounds(cf__bounds *bounds, const cf__pipeline *pipe, int split, int64_t limit, const int64_t *limits) {
    int64_t s;
    bounds->stage_load = bounds->one_machine = bounds->memory = 0;
    cf__find_critical_path(bounds, pipe, split);
    if (limit > 0 || limits != NULL) cf__sum_slot_seconds(&bounds->paths, bounds->slot_seconds);
    for (s = 0; s < pipe->n_stages; s++) {
        int64_t own = limits != NULL ? limits[s] : limit;
        cf__collect_jobs(&bounds->jobs, &bounds->paths, s);
        bounds->stage_load = cf__most(bounds->stage_load, cf__load_bound(&bounds->jobs));
        bounds->one_machine = cf__most(bounds->one_machine, cf__one_machine_bound(&bounds->jobs));
        if (own > 0)
            bounds->memory = cf__most(bounds->memory, cf__memory_bound(&bounds->paths, s, own, bounds->slot_seconds[s]));
    }
}

static double cf__strongest_bound(const cf__bounds *b) {
    return cf__most(cf__most(b->critical_path, b->stage_load), cf__most(b->one_machine, b->memory));
}

/* ---- memory limits ---- */

/* What stage s may hold, of two kinds: chunks and bytes. INT64_MAX: any number. */
typedef struct cf__limits {
    int64_t chunks, bytes;
} cf__limits;

static cf__limits cf__limits_of(const cf_schedule_desc *desc, int64_t stage) {
    cf__limits limits;
    limits.chunks = desc->limits != NULL ? desc->limits[stage] : desc->limit;
    limits.bytes = desc->limits_bytes != NULL ? desc->limits_bytes[stage] : desc->limit_bytes;
    if (limits.chunks == 0) limits.chunks = INT64_MAX;
    if (limits.bytes == 0) limits.bytes = INT64_MAX;
    return limits;
}

/* The same of the tightest stage, for one of its virtual stages. */
static cf__limits cf__tightest(const cf_schedule_desc *desc) {
    cf__limits least = cf__limits_of(desc, 0);
    int64_t s;
    for (s = 1; s < desc->n_stages; s++) {
        cf__limits limits = cf__limits_of(desc, s);
        least.chunks = cf__min(least.chunks, limits.chunks);
        least.bytes = cf__min(least.bytes, limits.bytes);
    }
    if (least.chunks < INT64_MAX) least.chunks /= desc->n_virtual;
    if (least.bytes < INT64_MAX) least.bytes /= desc->n_virtual;
    return least;
}

static int cf__counts_bytes(const cf_schedule_desc *desc) { return desc->limit_bytes > 0 || desc->limits_bytes != NULL; }

static int cf__is_limited(const cf_schedule_desc *desc) {
    return desc->limit > 0 || desc->limits != NULL || cf__counts_bytes(desc);
}

/* Bytes that a unit holds on a virtual stage while the backward of its chunk `i` is the next to come, k chunks of it being
   kept: the state of the chunks so far, the activations of the last k of them, and in local replay the inputs of the rest. */
typedef struct cf__holding {
    const cf_chunk *chunks; /* of the unit */
    const cf_bytes *bytes;
    int64_t n, k;
    int local, dependent;
} cf__holding;

/* Most bytes from that moment on, for every chunk of the unit: needs[i] where `needs` is given. Returns needs[n - 1]. */
static int64_t cf__unit_bytes(const cf__holding *h, const cf_plan *plan, int64_t *needs) {
    int64_t i, window = 0, saved = 0, most = 0, per_slot = h->bytes->per_token_activations;
    if (h->local && h->n > h->k) per_slot = cf__max(per_slot, h->bytes->per_token_boundary); /* just before its replay */
    for (i = 0; i < h->n; i++) {
        const cf_chunk *c = &h->chunks[i];
        int64_t state = 0, held;
        window += c->padded;
        if (i >= h->k) {
            window -= h->chunks[i - h->k].padded;
            saved += h->chunks[i - h->k].padded;
        }
        if (h->dependent) state = c->prefix + plan->slices[c->first_slice].length;
        held = window * per_slot + state * (h->bytes->per_token_state + h->bytes->per_token_state_gradient);
        if (h->local) held += saved * h->bytes->per_token_boundary;
        most = cf__max(most, held);
        if (needs != NULL) needs[i] = most;
    }
    return most;
}

/* The most chunks of a unit, up to k, that may be kept on every virtual stage; 0: not even one. *bytes: what one needs. */
static int64_t cf__fitting_k(const cf_plan *plan, const cf_schedule_desc *desc, const cf__limits *limits, int64_t chunk,
                             int64_t n, int64_t *bytes) {
    cf__holding h;
    int64_t low = 1, high = cf__min(cf__min(desc->k, n), limits->chunks);
    if (!cf__counts_bytes(desc) || high == 0) return high;
    h.chunks = &plan->chunks[chunk];
    h.bytes = &desc->bytes;
    h.n = n;
    h.local = desc->replay == CF_REPLAY_LOCAL;
    h.dependent = h.chunks->group >= 0;
    h.k = 1;
    *bytes = cf__unit_bytes(&h, plan, NULL);
    if (*bytes > limits->bytes) return 0;
    while (low < high) {
        h.k = low + (high - low + 1) / 2;
        if (cf__unit_bytes(&h, plan, NULL) <= limits->bytes) low = h.k;
        else high = h.k - 1;
    }
    return low;
}

/* ---- units, as schedules see them ---- */

/* A group, or one standalone chunk. Of its n chunks the last k are kept and the others dropped; the limits allow `most_k`. */
typedef struct cf__work_unit {
    int32_t first, n, k, most_k;
} cf__work_unit;

/* Chunk i of the unit is dropped in its first forward. */
static int cf__is_dropped(const cf__work_unit *unit, int64_t i) { return i < unit->n - unit->k; }

/* ---- fixed patterns ----

   The forward items of all stages are one sequence: F of every chunk, unit by unit, and in pipeline replay the R of dropped
   chunks, put in as soon as the first stage can have made room for them while later units fill the wait. The backwards are
   another, in the order in which the forwards make them possible. Each stage merges the two sequences; the kinds differ
   only in how far it may run ahead with forwards (cf__may_run_ahead).

   Why this cannot deadlock. Stages further down run ahead no further, and both sequences are the same everywhere. Follow what
   an action waits for: forward item i waits for item i on the stage before and for backwards that its stage takes before i;
   those wait on stages further down for items before i. The index falls each time a backward is passed, so there is no
   cycle. Room: units start one after the other, so when an item finds none, an earlier unit has a backward to run. */

typedef struct cf__item {
    int32_t chunk;
    int32_t after;  /* backwards that must have run on the same stage: R, whose slot an earlier backward frees */
    uint8_t pass, keep;
    uint8_t opens;  /* the first of its unit */
} cf__item;

typedef struct cf__pattern {
    cf_schedule_kind kind;
    int64_t n_items, n_backwards;
    cf__item *items;     /* (n + n_replays) */
    int32_t *backwards;  /* (n) chunks, in the order of their backward */
    int32_t *need;       /* (n) items that must have run before each backward */
    int32_t *reach;      /* (n) gpipe: items of all rounds up to that of each backward */
    int32_t *place;      /* (n) by chunk: place of its backward */
    int32_t *unit_of;    /* (n) by chunk */
    /* R items that are to come: a queue, as they come up in order */
    int64_t n_due, n_placed;
    int32_t *due_chunk;  /* (n_replays) */
    int64_t *due_at;     /* (n_replays) put it at this place, or later */
} cf__pattern;

/* Everything that making a schedule works with. */
typedef struct cf__maker {
    cf_schedule_desc desc; /* defaults filled in */
    cf__pipeline pipe;
    cf_error *error;
    cf__limits tightest;
    int64_t n_units, n_replays; /* n_replays: on one virtual stage */
    int64_t n_actions;          /* at most */
    /* working space, only for more than one virtual stage */
    cf__work_unit *units;       /* (n_units) in the order in which they start */
    cf__work_unit *spare;       /* (n_units) */
    double *unit_seconds;       /* (n_units) by place in plan order */
    int32_t *sorted;            /* (n_units) */
    int64_t *needs;             /* (n) bytes from each chunk's backward on, as cf__unit_bytes has it; or NULL */
    cf__pattern pattern;
} cf__maker;

static void cf__layout_pattern(cf__pattern *pattern, int64_t n, int64_t n_replays, cf__carver *carver) {
    pattern->items = (cf__item *)cf__take(carver, n + n_replays, sizeof(cf__item));
    pattern->backwards = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    pattern->need = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    pattern->reach = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    pattern->place = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    pattern->unit_of = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    pattern->due_chunk = (int32_t *)cf__take(carver, n_replays, sizeof(int32_t));
    pattern->due_at = (int64_t *)cf__take(carver, n_replays, sizeof(int64_t));
}

/* Whether there may be I and W in the schedule. */
static int cf__splits(const cf_schedule_desc *desc) {
    return desc->kind == CF_SCHEDULE_ZERO_BUBBLE || (desc->kind == CF_SCHEDULE_BEST && desc->split_backward);
}

/* One stage needs no search and no working space: Algorithm 2 as it stands, unit by unit. */
static int cf__is_plain(const cf_schedule_desc *desc) {
    return desc->n_stages == 1 && desc->n_virtual == 1 && desc->kind == CF_SCHEDULE_PAPER;
}

static void cf__layout_maker(cf__maker *m, cf__carver *carver) {
    m->units = (cf__work_unit *)cf__take(carver, m->n_units, sizeof(cf__work_unit));
    m->spare = (cf__work_unit *)cf__take(carver, m->n_units, sizeof(cf__work_unit));
    m->unit_seconds = (double *)cf__take(carver, m->n_units, sizeof(double));
    m->sorted = (int32_t *)cf__take(carver, m->n_units, sizeof(int32_t));
    m->needs = (int64_t *)cf__take(carver, cf__counts_bytes(&m->desc) ? m->pipe.n : 0, sizeof(int64_t));
    if (!cf__counts_bytes(&m->desc)) m->needs = NULL;
    cf__layout_pipeline(&m->pipe, carver);
    cf__layout_pattern(&m->pattern, m->pipe.n, m->n_replays, carver);
}

/* Sets how many chunks a unit keeps. */
static void cf__set_k(cf__maker *m, cf__work_unit *unit, int64_t k) {
    cf__holding h;
    unit->k = (int32_t)k;
    if (m->needs == NULL) return;
    h.chunks = &m->pipe.chunks[unit->first];
    h.bytes = &m->desc.bytes;
    h.n = unit->n;
    h.k = k;
    h.local = m->pipe.local;
    h.dependent = h.chunks->group >= 0;
    cf__unit_bytes(&h, m->pipe.plan, &m->needs[unit->first]);
}

/* Fills units, in plan order, and needs. */
static void cf__collect_units(cf__maker *m) {
    const cf_plan *plan = m->pipe.plan;
    int64_t chunk, n, n_units = 0, bytes = 0;
    for (chunk = 0; chunk < m->pipe.n; chunk += n) {
        cf__work_unit *unit = &m->units[n_units++];
        int64_t id = m->pipe.first_chunk + chunk;
        n = cf__unit_chunks(plan, id);
        unit->first = (int32_t)chunk;
        unit->n = (int32_t)n;
        unit->most_k = (int32_t)cf__fitting_k(plan, &m->desc, &m->tightest, id, n, &bytes);
        cf__set_k(m, unit, unit->most_k);
    }
}

/* Dearest unit first; equal ones keep their order. */
static void cf__sort_units(cf__maker *m) {
    int64_t i, j;
    int is_sorted = 1;
    for (i = 0; i < m->n_units; i++) {
        double seconds = 0;
        for (j = 0; j < m->units[i].n; j++) seconds += cf__pass_seconds(&m->pipe, CF_F, m->units[i].first + j, 0);
        m->unit_seconds[i] = -seconds;
        m->sorted[i] = (int32_t)i;
        if (i > 0 && m->unit_seconds[i] < m->unit_seconds[i - 1]) is_sorted = 0;
    }
    if (is_sorted) return;
    cf__sort_by_key(m->sorted, m->n_units, m->unit_seconds); /* cheapest first, and of equal ones the later first */
    for (i = 0; i < m->n_units; i++) m->spare[i] = m->units[m->sorted[m->n_units - 1 - i]];
    memcpy(m->units, m->spare, (size_t)m->n_units * sizeof *m->units);
}

static void cf__add_item(cf__pattern *pattern, cf_pass pass, int64_t chunk, int keep, int opens) {
    cf__item *item = &pattern->items[pattern->n_items++];
    item->chunk = (int32_t)chunk;
    item->after = 0;
    item->pass = (uint8_t)pass;
    item->keep = (uint8_t)keep;
    item->opens = (uint8_t)opens;
}

/* The backward of a chunk has become possible. In pipeline replay it frees the slot for the chunk k before it, if that one
   was dropped: its R is due when a stage that runs `ahead` items in front of the last one can have run this backward. */
static void cf__add_backward(cf__maker *m, const cf__work_unit *unit, int64_t i, int64_t ahead) {
    cf__pattern *pattern = &m->pattern;
    int64_t chunk = unit->first + i;
    pattern->need[pattern->n_backwards] = (int32_t)pattern->n_items;
    pattern->place[chunk] = (int32_t)pattern->n_backwards;
    pattern->backwards[pattern->n_backwards++] = (int32_t)chunk;
    if (m->pipe.local || i < unit->k) return;
    pattern->due_chunk[pattern->n_due] = (int32_t)(chunk - unit->k);
    pattern->due_at[pattern->n_due++] = pattern->n_items + ahead;
}

static void cf__add_replay(cf__maker *m, int64_t ahead) {
    cf__pattern *pattern = &m->pattern;
    int32_t chunk = pattern->due_chunk[pattern->n_placed++];
    const cf__work_unit *unit = &m->units[pattern->unit_of[chunk]];
    cf__add_item(pattern, CF_R, chunk, 1, 0);
    pattern->items[pattern->n_items - 1].after = pattern->place[chunk + unit->k] + 1;
    cf__add_backward(m, unit, chunk - unit->first, ahead);
}

static void cf__add_due_replays(cf__maker *m, int64_t ahead, int all) {
    cf__pattern *pattern = &m->pattern;
    while (pattern->n_placed < pattern->n_due && (all || pattern->due_at[pattern->n_placed] <= pattern->n_items))
        cf__add_replay(m, ahead);
}

static void cf__add_unit(cf__maker *m, int64_t id, int64_t ahead) {
    const cf__work_unit *unit = &m->units[id];
    int64_t i;
    for (i = 0; i < unit->n; i++) {
        m->pattern.unit_of[unit->first + i] = (int32_t)id;
        cf__add_item(&m->pattern, CF_F, unit->first + i, !cf__is_dropped(unit, i), i == 0);
        if (i + 1 < unit->n) cf__add_due_replays(m, ahead, 0);
    }
    for (i = unit->n - 1; i >= 0 && (m->pipe.local || !cf__is_dropped(unit, i)); i--) cf__add_backward(m, unit, i, ahead);
}

/* What a unit takes of the tightest stage's room, in chunks or, where those are counted, bytes. */
static int64_t cf__unit_room(const cf__maker *m, const cf__work_unit *unit) {
    return m->needs != NULL ? m->needs[unit->first + unit->n - 1] : unit->k;
}

/* All units with their replays. gpipe: a round ends where the next unit would not find room beside the others. */
static void cf__build_pattern(cf__maker *m) {
    cf__pattern *pattern = &m->pattern;
    int gpipe = pattern->kind == CF_SCHEDULE_GPIPE;
    int64_t limit = m->needs != NULL ? m->tightest.bytes : m->tightest.chunks;
    /* With bytes, a unit's room is given back only as a whole, so nothing may wait for it between a unit and its replays. */
    int64_t ahead = gpipe ? INT32_MAX : m->needs != NULL ? 0 : m->desc.n_stages - 1;
    int64_t i, used = 0, begin = 0;
    pattern->n_items = pattern->n_backwards = pattern->n_due = pattern->n_placed = 0;
    for (i = 0; i < m->n_units; i++) {
        int64_t room = cf__unit_room(m, &m->units[i]);
        if (gpipe && used > limit - room) {
            cf__add_due_replays(m, ahead, 1);
            for (; begin < pattern->n_backwards; begin++) pattern->reach[begin] = (int32_t)pattern->n_items;
            used = 0;
        }
        used += room;
        cf__add_unit(m, i, ahead);
        cf__add_due_replays(m, ahead, 0);
    }
    cf__add_due_replays(m, ahead, 1);
    for (; begin < pattern->n_backwards; begin++) pattern->reach[begin] = (int32_t)pattern->n_items;
}

/* One stage on its way through the pattern. */
typedef struct cf__merge {
    int64_t stage;
    cf__limits limits;     /* of this stage and all before it: no stage may run further ahead than those */
    int64_t i, j;          /* next item, next backward */
    int64_t chunks, bytes; /* held, or promised to a unit */
    cf_action *next;
} cf__merge;

/* Whether the stage has room for its next item. */
static int cf__has_room(const cf__maker *m, const cf__merge *merge) {
    const cf__item *item = &m->pattern.items[merge->i];
    const cf__work_unit *unit = &m->units[m->pattern.unit_of[item->chunk]];
    if (m->needs != NULL && item->opens && merge->bytes > merge->limits.bytes - cf__unit_room(m, unit)) return 0;
    return !item->keep || merge->chunks < merge->limits.chunks;
}

/* Whether a stage takes its next forward item although its next backward does not need it yet. */
static int cf__may_run_ahead(const cf__maker *m, const cf__merge *merge) {
    const cf__pattern *pattern = &m->pattern;
    int64_t further_down = m->desc.n_stages - 1 - merge->stage;
    switch (pattern->kind) {
        case CF_SCHEDULE_GPIPE: return merge->i < pattern->reach[merge->j];
        case CF_SCHEDULE_1F1B:
            if (pattern->items[merge->i].keep) return merge->chunks < further_down + 1;
            return merge->i < pattern->need[merge->j] + further_down;
        default: return merge->i < pattern->need[merge->j] + further_down;
    }
}

static int cf__takes_forward(const cf__maker *m, const cf__merge *merge) {
    const cf__pattern *pattern = &m->pattern;
    if (merge->i == pattern->n_items || pattern->items[merge->i].after > merge->j || !cf__has_room(m, merge)) return 0;
    return merge->i < pattern->need[merge->j] || cf__may_run_ahead(m, merge);
}

static void cf__put_action(cf_action **next, cf_pass pass, int64_t chunk, int64_t v, int keep) {
    cf_action *action = (*next)++;
    action->chunk = (int32_t)chunk;
    action->stage = (int32_t)v;
    action->pass = (uint8_t)pass;
    action->keep = (uint8_t)keep;
    action->reserved = 0;
}

static void cf__merge_forward(const cf__maker *m, cf__merge *merge) {
    const cf__item *item = &m->pattern.items[merge->i++];
    if (m->needs != NULL && item->opens) merge->bytes += cf__unit_room(m, &m->units[m->pattern.unit_of[item->chunk]]);
    merge->chunks += item->keep;
    cf__put_action(&merge->next, (cf_pass)item->pass, m->pipe.first_chunk + item->chunk, merge->stage, item->keep);
}

/* In local replay R comes right before B, and the slot that a backward frees goes to the next R of the group. */
static void cf__merge_backward(const cf__maker *m, cf__merge *merge) {
    int64_t chunk = m->pattern.backwards[merge->j++], id = m->pipe.first_chunk + chunk;
    const cf__work_unit *unit = &m->units[m->pattern.unit_of[chunk]];
    int64_t i = chunk - unit->first;
    if (m->pipe.local && cf__is_dropped(unit, i)) cf__put_action(&merge->next, CF_R, id, merge->stage, 1);
    cf__put_action(&merge->next, CF_B, id, merge->stage, 0);
    merge->chunks -= !(m->pipe.local && i >= unit->k);
    if (m->needs != NULL) merge->bytes -= m->needs[chunk] - (i > 0 ? m->needs[chunk - 1] : 0);
}

/* Writes the lists of all stages; returns the number of actions. */
static int64_t cf__write_pattern(const cf__maker *m, cf_schedule *schedule) {
    cf__merge merge;
    int64_t s;
    memset(&merge, 0, sizeof merge);
    merge.limits.chunks = merge.limits.bytes = INT64_MAX;
    merge.next = schedule->actions;
    for (s = 0; s < m->desc.n_stages; s++) {
        cf__limits own = cf__limits_of(&m->desc, s);
        merge.limits.chunks = cf__min(merge.limits.chunks, own.chunks);
        merge.limits.bytes = cf__min(merge.limits.bytes, own.bytes);
        merge.stage = s;
        merge.i = merge.j = 0;
        schedule->first[s] = merge.next - schedule->actions;
        while (merge.j < m->pattern.n_backwards) {
            if (cf__takes_forward(m, &merge)) cf__merge_forward(m, &merge);
            else cf__merge_backward(m, &merge);
        }
    }
    schedule->first[m->desc.n_stages] = merge.next - schedule->actions;
    return merge.next - schedule->actions;
}

/* ---- dispatch: schedules by simulated time ----

   Whenever a stage is free it takes, of the passes that are ready, the one that its policy likes best. A unit starts on a stage
   only if the stage has room for all that it may ever hold there; that room is given back as its chunks end.

   Why this cannot deadlock. Units have one order everywhere. A unit may start before an earlier one only if the room that
   the first of those waiting units needs stays free, so the first unconcluded unit never waits for room, and nothing else
   than time delays it. A policy may take the risk and count only the slots in use; if that ends in a deadlock, the search
   has tried one candidate in vain. */

typedef struct cf__policy {
    int split;             /* I and W in place of B */
    int risk;              /* 1: slots are taken one by one, not for a whole unit at its start */
    double bias;           /* seconds by which backwards (and replays) are preferred to forwards */
    double deep;           /* seconds by which a later virtual stage of the same stage is preferred in forwards */
    double patience;       /* waits for a better pass if that costs less than this part of the one at hand */
    int64_t depth;         /* most chunks that a stage keeps, if it can do with that. 0: any number */
    const int64_t *ahead;  /* (n_stages) starts no unit while this many kept forwards have no backward yet; then units start in
                              order everywhere. NULL: any number */
} cf__policy;

/* One stage at work. Heaps hold passes: cell x CF__KINDS + kind. */
typedef struct cf__worker {
    double free_at;
    double link_free[2];
    int64_t room_chunks, room_bytes; /* not yet promised */
    int64_t next_unit;               /* the first unit that has not started here */
    int64_t n_ahead;                 /* forwards minus backwards, of chunks that are not dropped */
    int32_t *coming, *fresh, *begun, *replays, *returning, *weights;
    int64_t n_coming, n_fresh, n_begun, n_replays, n_returning, n_weights;
    int32_t *done;                   /* passes in the order in which they were taken */
    int64_t n_done;
} cf__worker;

typedef struct cf__dispatch {
    const cf__maker *maker;
    const cf__pipeline *pipe;
    const cf__paths *paths;
    cf__policy policy;
    int64_t most_room_chunks, most_room_bytes;
    int64_t per_stage;    /* passes of a stage at most */
    int32_t *unit_of;     /* (n) by chunk */
    double *place;        /* (n_units) 0, 1, 2 ...: keys of the heap of fresh units */
    uint8_t *missing;     /* (passes) what must come before and has not been taken */
    double *ready_at;     /* (passes) */
    double *urgency;      /* (passes) the lower the more urgent: minus the time from its start to the end of all */
    const double *nudges; /* (passes) added to that; or NULL */
    double give_up_at;
    cf__worker *workers;  /* (n_stages) */
    double *wake;         /* (n_stages) when to look at the stage again */
    int32_t *winners;     /* a tournament over wake: winners[1] is the stage to look at next */
    int64_t n_leaves;
    uint8_t *started;     /* (n_units x n_stages) */
    double makespan;
} cf__dispatch;

static int64_t cf__leaves(int64_t n_stages) {
    int64_t n = 1;
    while (n < n_stages) n *= 2;
    return n;
}

static void cf__layout_dispatch(cf__dispatch *d, const cf__maker *m, cf__carver *carver) {
    int64_t passes = m->pipe.n * m->pipe.n_v * CF__KINDS, cells = m->pipe.n * m->desc.n_virtual, s;
    d->unit_of = (int32_t *)cf__take(carver, m->pipe.n, sizeof(int32_t));
    d->place = (double *)cf__take(carver, m->n_units, sizeof(double));
    d->missing = (uint8_t *)cf__take(carver, passes, sizeof(uint8_t));
    d->ready_at = (double *)cf__take(carver, passes, sizeof(double));
    d->urgency = (double *)cf__take(carver, passes, sizeof(double));
    d->workers = (cf__worker *)cf__take(carver, m->desc.n_stages, sizeof(cf__worker));
    d->wake = (double *)cf__take(carver, m->desc.n_stages, sizeof(double));
    d->winners = (int32_t *)cf__take(carver, 2 * cf__leaves(m->desc.n_stages), sizeof(int32_t));
    d->started = (uint8_t *)cf__take(carver, m->n_units * m->desc.n_stages, sizeof(uint8_t));
    d->per_stage = cells * CF__KINDS;
    for (s = 0; s < m->desc.n_stages; s++) {
        cf__worker none, *worker = carver->base != NULL ? &d->workers[s] : &none;
        worker->coming = (int32_t *)cf__take(carver, d->per_stage, sizeof(int32_t));
        worker->fresh = (int32_t *)cf__take(carver, m->n_units, sizeof(int32_t));
        worker->begun = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
        worker->replays = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
        worker->returning = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
        worker->weights = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
        worker->done = (int32_t *)cf__take(carver, d->per_stage, sizeof(int32_t));
    }
}

/* Sets when a stage is to be looked at again. Of equal times the lower stage comes first. */
static void cf__set_wake(cf__dispatch *d, int64_t stage, double when) {
    int64_t node = (d->n_leaves + stage) / 2;
    d->wake[stage] = when;
    for (; node > 0; node /= 2) {
        int32_t left = d->winners[2 * node], right = d->winners[2 * node + 1];
        d->winners[node] = right < 0 || d->wake[left] <= d->wake[right] ? left : right;
    }
}

static void cf__start_wakes(cf__dispatch *d) {
    int64_t i;
    d->n_leaves = cf__leaves(d->pipe->n_stages);
    for (i = 0; i < d->n_leaves; i++) {
        d->winners[d->n_leaves + i] = i < d->pipe->n_stages ? (int32_t)i : -1;
        if (i < d->pipe->n_stages) d->wake[i] = DBL_MAX;
    }
    for (i = d->n_leaves - 1; i > 0; i--) d->winners[i] = d->winners[2 * i];
    for (i = 0; i < d->pipe->n_stages; i++) cf__set_wake(d, i, DBL_MAX);
}

static int32_t cf__pass_id(int64_t cell, int kind) { return (int32_t)(cell * CF__KINDS + kind); }

/* One thing less that a pass waits for; `when` it is there. Ready passes go to their stage. */
static void cf__supply(cf__dispatch *d, int64_t cell, int kind, int64_t stage, double when) {
    int32_t pass = cf__pass_id(cell, kind);
    cf__worker *worker = &d->workers[stage];
    if (when > d->ready_at[pass]) d->ready_at[pass] = when;
    if (--d->missing[pass] > 0) return;
    if (kind == CF__WEIGHT) {
        cf__heap_push(worker->weights, worker->n_weights++, pass, d->urgency);
        return;
    }
    cf__heap_push(worker->coming, worker->n_coming++, pass, d->ready_at);
    when = cf__most(d->ready_at[pass], worker->free_at);
    if (when < d->wake[stage]) cf__set_wake(d, stage, when);
}

/* What a pass still waits for, before anything has run. */
static void cf__count_missing(cf__dispatch *d) {
    const cf__pipeline *pipe = d->pipe;
    int64_t v, i;
    for (v = 0; v < pipe->n_v; v++)
        for (i = 0; i < pipe->n; i++) {
            const cf__work_unit *unit = &d->maker->units[d->unit_of[i]];
            int64_t index = i - unit->first, cell = v * pipe->n + i;
            uint8_t *missing = &d->missing[cf__pass_id(cell, 0)];
            int dropped = cf__is_dropped(unit, index);
            missing[CF__FORWARD] = (uint8_t)((v > 0) + (index > 0));
            /* its own F, the slot, the replay of the next chunk, the input */
            missing[CF__AGAIN] = (uint8_t)(2 + cf__is_dropped(unit, index + 1) + (v > 0 && !pipe->local));
            if (!dropped) missing[CF__AGAIN] = UINT8_MAX;
            /* its activations, the state gradient, the gradient */
            missing[CF__BACKWARD] = (uint8_t)(1 + (index + 1 < unit->n) + (v + 1 < pipe->n_v));
            missing[CF__WEIGHT] = 1;
        }
}

/* A W that nothing waits for is the least urgent of all. */
static double cf__urgency_of(const cf__dispatch *d, int kind, int64_t cell) {
    double urgency = -cf__latest_start(d->paths, kind, cell);
    if (kind == CF__FORWARD)
        return urgency - cf__product(d->policy.deep, (double)(cell / (d->pipe->n * d->pipe->n_stages)));
    return kind == CF__WEIGHT && !(d->paths->tail[kind][cell] > 0) ? 0 : urgency - d->policy.bias;
}

static void cf__set_urgency(cf__dispatch *d) {
    int64_t cells = d->pipe->n * d->pipe->n_v, i;
    int kind, n_kinds = d->policy.split ? CF__KINDS : CF__WEIGHT;
    for (i = 0; i < cells; i++)
        for (kind = 0; kind < n_kinds; kind++) {
            int32_t pass = cf__pass_id(i, kind);
            d->urgency[pass] = cf__urgency_of(d, kind, i) + (d->nudges != NULL ? d->nudges[pass] : 0);
        }
}

static void cf__start_workers(cf__dispatch *d) {
    const cf__maker *m = d->maker;
    int64_t s;
    for (s = 0; s < d->pipe->n_stages; s++) {
        cf__worker *worker = &d->workers[s];
        cf__limits limits = cf__limits_of(&m->desc, s);
        int64_t depth = d->policy.depth > 0 ? cf__max(d->policy.depth, d->most_room_chunks) : INT64_MAX;
        worker->free_at = worker->link_free[0] = worker->link_free[1] = 0;
        worker->room_chunks = cf__min(limits.chunks, depth);
        worker->room_bytes = limits.bytes;
        worker->next_unit = worker->n_ahead = 0;
        worker->n_coming = worker->n_fresh = worker->n_begun = worker->n_replays = worker->n_returning = 0;
        worker->n_weights = worker->n_done = 0;
    }
}

static int64_t cf__room_chunks(const cf__dispatch *d, int64_t unit) {
    return d->maker->units[unit].k * d->maker->desc.n_virtual;
}

static int64_t cf__room_bytes(const cf__dispatch *d, int64_t unit) {
    const cf__maker *m = d->maker;
    return m->needs != NULL ? m->needs[m->units[unit].first + m->units[unit].n - 1] * m->desc.n_virtual : 0;
}

static void cf__start_dispatch(cf__dispatch *d) {
    const cf__maker *m = d->maker;
    int64_t u, i;
    d->most_room_chunks = d->most_room_bytes = 0;
    for (u = 0; u < m->n_units; u++) {
        d->place[u] = (double)u;
        for (i = 0; i < m->units[u].n; i++) d->unit_of[m->units[u].first + i] = (int32_t)u;
        d->most_room_chunks = cf__max(d->most_room_chunks, cf__room_chunks(d, u));
        d->most_room_bytes = cf__max(d->most_room_bytes, cf__room_bytes(d, u));
    }
    memset(d->ready_at, 0, (size_t)(d->pipe->n * d->pipe->n_v * CF__KINDS) * sizeof(double));
    memset(d->started, 0, (size_t)(m->n_units * d->pipe->n_stages));
    d->makespan = 0;
    cf__count_missing(d);
    cf__set_urgency(d);
    cf__start_workers(d);
    cf__start_wakes(d);
    for (u = 0; u < m->n_units; u++) {
        d->missing[cf__pass_id(m->units[u].first, CF__FORWARD)] = 1;
        cf__supply(d, m->units[u].first, CF__FORWARD, 0, 0);
    }
}

/* Whether a unit may start on a stage: see above. */
static int cf__may_start(const cf__dispatch *d, int64_t stage, int64_t unit) {
    const cf__worker *worker = &d->workers[stage];
    int64_t chunks = cf__room_chunks(d, unit), bytes = cf__room_bytes(d, unit), first = worker->next_unit;
    if (d->policy.ahead != NULL && (unit != first || worker->n_ahead >= d->policy.ahead[stage])) return 0;
    if (d->policy.risk) return bytes <= worker->room_bytes;
    if (unit != first) {
        chunks += cf__room_chunks(d, first);
        bytes += cf__room_bytes(d, first);
    }
    return chunks <= worker->room_chunks && bytes <= worker->room_bytes;
}

static void cf__start_unit(cf__dispatch *d, int64_t stage, int64_t unit) {
    cf__worker *worker = &d->workers[stage];
    if (!d->policy.risk) worker->room_chunks -= cf__room_chunks(d, unit);
    worker->room_bytes -= cf__room_bytes(d, unit);
    d->started[unit * d->pipe->n_stages + stage] = 1;
    while (worker->next_unit < d->maker->n_units && d->started[worker->next_unit * d->pipe->n_stages + stage])
        worker->next_unit++;
}

/* The slot of a chunk is free: it goes to the chunk k before it, if that was dropped, or back to the stage. */
static void cf__free_slot(cf__dispatch *d, int64_t stage, int64_t chunk, int64_t cell, double when) {
    const cf__maker *m = d->maker;
    const cf__work_unit *unit = &m->units[d->unit_of[chunk]];
    int64_t index = chunk - unit->first;
    cf__worker *worker = &d->workers[stage];
    if (index >= unit->k) cf__supply(d, cell - unit->k, CF__AGAIN, stage, when);
    worker->room_chunks += d->policy.risk || index < unit->k;
    if (m->needs != NULL) worker->room_bytes += m->needs[chunk] - (index > 0 ? m->needs[chunk - 1] : 0);
}

/* Sends a result on; cf__send says how. */
static void cf__pass_on(cf__dispatch *d, int64_t stage, int direction, int64_t cell, int kind, double end,
                        double transfer) {
    cf__worker *worker = &d->workers[stage];
    int64_t to = stage + (direction == 0 ? 1 : -1), n = d->pipe->n_stages;
    double begin = cf__most(end, worker->link_free[direction]);
    if (to == n) to = 0;
    if (to < 0) to = n - 1;
    if (transfer > 0 && d->pipe->timing->no_overlap) {
        worker->free_at = end + transfer;
        begin = end - transfer;
    }
    worker->link_free[direction] = begin + transfer;
    cf__supply(d, cell, kind, to, begin + transfer);
}

/* What comes after a pass that ends at `end`. */
static void cf__conclude(cf__dispatch *d, int64_t stage, int64_t cell, int kind, double end) {
    const cf__pipeline *pipe = d->pipe;
    int64_t v = cell / pipe->n, chunk = cell % pipe->n;
    const cf__work_unit *unit = &d->maker->units[d->unit_of[chunk]];
    int64_t index = chunk - unit->first;
    int dropped = cf__is_dropped(unit, index);
    double transfer = cf__transfer_seconds(pipe, chunk);
    switch (kind) {
        case CF__FORWARD:
            d->workers[stage].n_ahead += !dropped;
            if (index + 1 < unit->n) cf__supply(d, cell + 1, CF__FORWARD, stage, end);
            cf__supply(d, cell, dropped ? CF__AGAIN : CF__BACKWARD, stage, end);
            if (v + 1 < pipe->n_v) cf__pass_on(d, stage, 0, cell + pipe->n, CF__FORWARD, end, transfer);
            break;
        case CF__AGAIN:
            cf__supply(d, cell, CF__BACKWARD, stage, end);
            if (index > 0) cf__supply(d, cell - 1, CF__AGAIN, stage, end);
            if (v + 1 < pipe->n_v && !pipe->local) cf__pass_on(d, stage, 0, cell + pipe->n, CF__AGAIN, end, transfer);
            break;
        case CF__BACKWARD:
            d->workers[stage].n_ahead -= !dropped;
            if (index > 0) cf__supply(d, cell - 1, CF__BACKWARD, stage, end);
            if (d->policy.split) cf__supply(d, cell, CF__WEIGHT, stage, end);
            else cf__free_slot(d, stage, chunk, cell, end);
            if (v > 0) cf__pass_on(d, stage, 1, cell - pipe->n, CF__BACKWARD, end, transfer);
            break;
        default: cf__free_slot(d, stage, chunk, cell, end); break;
    }
}

/* F of a kept chunk, and R. */
static int cf__takes_slot(const cf__dispatch *d, int32_t pass) {
    int64_t chunk = pass / CF__KINDS % d->pipe->n;
    const cf__work_unit *unit = &d->maker->units[d->unit_of[chunk]];
    if (pass % CF__KINDS == CF__FORWARD) return !cf__is_dropped(unit, chunk - unit->first);
    return pass % CF__KINDS == CF__AGAIN;
}

/* Runs a pass on a free stage. */
static void cf__take_pass(cf__dispatch *d, int64_t stage, int32_t pass, double now) {
    const cf__pipeline *pipe = d->pipe;
    cf__worker *worker = &d->workers[stage];
    int64_t cell = pass / CF__KINDS, v = cell / pipe->n, chunk = cell % pipe->n;
    int kind = (int)(pass % CF__KINDS);
    int gets = (kind == CF__FORWARD && v > 0) || (kind == CF__AGAIN && v > 0 && !pipe->local) ||
               (kind == CF__BACKWARD && v + 1 < pipe->n_v);
    double end = now + d->paths->seconds[kind][cell];
    if (gets && pipe->timing != NULL && pipe->timing->no_overlap) end += cf__transfer_seconds(pipe, chunk);
    if (d->policy.risk) worker->room_chunks -= cf__takes_slot(d, pass);
    worker->done[worker->n_done++] = pass;
    worker->free_at = end;
    d->makespan = cf__most(d->makespan, end);
    if (end + d->paths->tail[kind][cell] > d->give_up_at) d->makespan = DBL_MAX;
    cf__conclude(d, stage, cell, kind, end);
    cf__set_wake(d, stage, worker->free_at);
}

/* What has arrived by now becomes a choice. */
static void cf__receive(cf__dispatch *d, int64_t stage, double now) {
    cf__worker *worker = &d->workers[stage];
    while (worker->n_coming > 0 && d->ready_at[worker->coming[0]] <= now) {
        int32_t pass = cf__heap_pop(worker->coming, worker->n_coming--, d->ready_at);
        int64_t cell = pass / CF__KINDS, chunk = cell % d->pipe->n;
        int32_t unit = d->unit_of[chunk];
        if (pass % CF__KINDS == CF__BACKWARD) cf__heap_push(worker->returning, worker->n_returning++, pass, d->urgency);
        else if (pass % CF__KINDS == CF__AGAIN) cf__heap_push(worker->replays, worker->n_replays++, pass, d->urgency);
        else if (cell < d->pipe->n * d->pipe->n_stages && chunk == d->maker->units[unit].first)
            cf__heap_push(worker->fresh, worker->n_fresh++, unit, d->place);
        else cf__heap_push(worker->begun, worker->n_begun++, pass, d->urgency);
    }
}

/* The time at which a pass on its way here is worth waiting for although there is another to run; -1: none is. */
static double cf__worth_waiting(const cf__dispatch *d, int64_t stage, int32_t at_hand, double now) {
    const cf__worker *worker = &d->workers[stage];
    int32_t coming;
    double seconds = d->paths->seconds[at_hand % CF__KINDS][at_hand / CF__KINDS];
    if (worker->n_coming == 0 || !(d->policy.patience > 0)) return -1;
    coming = worker->coming[0];
    if (d->ready_at[coming] - now >= cf__product(seconds, d->policy.patience)) return -1;
    if (at_hand % CF__KINDS != CF__WEIGHT && d->urgency[coming] >= d->urgency[at_hand]) return -1;
    return d->ready_at[coming];
}

/* Whether there is a slot for a pass, where slots are taken one by one. */
static int cf__finds_slot(const cf__dispatch *d, int64_t stage, int32_t pass) {
    return !d->policy.risk || d->workers[stage].room_chunks > 0 || !cf__takes_slot(d, pass);
}

/* The forward to take next: the first unit that may start, or a pass of one that has; -1: none. */
static int32_t cf__best_forward(const cf__dispatch *d, int64_t stage) {
    const cf__worker *worker = &d->workers[stage];
    int32_t fresh = -1, begun = worker->n_begun > 0 ? worker->begun[0] : -1;
    if (worker->n_fresh > 0 && cf__may_start(d, stage, worker->fresh[0]))
        fresh = cf__pass_id(stage * d->pipe->n + d->maker->units[worker->fresh[0]].first, CF__FORWARD);
    if (fresh >= 0 && !cf__finds_slot(d, stage, fresh)) fresh = -1;
    if (begun >= 0 && !cf__finds_slot(d, stage, begun)) begun = -1;
    if (fresh < 0 || begun < 0) return (int32_t)cf__max(fresh, begun);
    return d->urgency[begun] <= d->urgency[fresh] ? begun : fresh;
}

/* The replay or backward to take next; -1: none. */
static int32_t cf__best_return(const cf__dispatch *d, int64_t stage) {
    const cf__worker *worker = &d->workers[stage];
    int32_t replay = worker->n_replays > 0 ? worker->replays[0] : -1;
    int32_t backward = worker->n_returning > 0 ? worker->returning[0] : -1;
    if (replay >= 0 && !cf__finds_slot(d, stage, replay)) replay = -1;
    if (replay < 0 || backward < 0) return (int32_t)cf__max(replay, backward);
    return d->urgency[replay] <= d->urgency[backward] ? replay : backward;
}

/* The pass that a free stage likes best; -1: none is ready. */
static int32_t cf__best_pass(const cf__dispatch *d, int64_t stage) {
    const cf__worker *worker = &d->workers[stage];
    int32_t forward = cf__best_forward(d, stage), returning = cf__best_return(d, stage), best;
    if (forward < 0 || returning < 0) best = (int32_t)cf__max(forward, returning);
    else if (d->policy.ahead != NULL) best = worker->n_ahead < d->policy.ahead[stage] ? forward : returning;
    else best = d->urgency[returning] <= d->urgency[forward] ? returning : forward;
    if (worker->n_weights == 0) return best;
    return best < 0 || d->urgency[worker->weights[0]] < d->urgency[best] ? worker->weights[0] : best;
}

/* Takes a chosen pass out of where it waited. */
static void cf__claim(cf__dispatch *d, int64_t stage, int32_t pass) {
    cf__worker *worker = &d->workers[stage];
    int kind = (int)(pass % CF__KINDS);
    if (kind == CF__WEIGHT) {
        cf__heap_pop(worker->weights, worker->n_weights--, d->urgency);
    } else if (kind == CF__BACKWARD) {
        cf__heap_pop(worker->returning, worker->n_returning--, d->urgency);
    } else if (kind == CF__AGAIN) {
        cf__heap_pop(worker->replays, worker->n_replays--, d->urgency);
    } else if (worker->n_begun > 0 && pass == worker->begun[0]) {
        cf__heap_pop(worker->begun, worker->n_begun--, d->urgency);
    } else {
        cf__start_unit(d, stage, cf__heap_pop(worker->fresh, worker->n_fresh--, d->place));
    }
}

/* A stage that is free at `now` takes a pass, or waits. */
static void cf__decide(cf__dispatch *d, int64_t stage, double now) {
    cf__worker *worker = &d->workers[stage];
    int32_t pass;
    double wait;
    cf__receive(d, stage, now);
    pass = cf__best_pass(d, stage);
    if (pass < 0) {
        cf__set_wake(d, stage, worker->n_coming > 0 ? d->ready_at[worker->coming[0]] : DBL_MAX);
    } else if ((wait = cf__worth_waiting(d, stage, pass, now)) >= 0) {
        cf__set_wake(d, stage, wait);
    } else {
        cf__claim(d, stage, pass);
        cf__take_pass(d, stage, pass, now);
    }
}

/* Whether every stage has run all of its passes. */
static int cf__is_complete(const cf__dispatch *d) {
    const cf__maker *m = d->maker;
    int64_t u, s, passes = d->pipe->n * (d->policy.split ? 3 : 2);
    for (u = 0; u < m->n_units; u++) passes += m->units[u].n - m->units[u].k;
    for (s = 0; s < d->pipe->n_stages; s++)
        if (d->workers[s].n_done < passes * m->desc.n_virtual) return 0;
    return 1;
}

/* Returns whether it went to the end. It gives up as soon as a pass comes too late for a makespan of `give_up_at`. */
static int cf__run_dispatch(cf__dispatch *d, double give_up_at) {
    cf__start_dispatch(d);
    d->give_up_at = give_up_at;
    for (;;) {
        int64_t stage = d->winners[1];
        double now = d->wake[stage];
        if (now >= DBL_MAX) return !d->policy.risk || cf__is_complete(d);
        cf__decide(d, stage, now);
        if (d->makespan > d->give_up_at) return 0;
    }
}

static cf_pass cf__pass_of_kind(const cf__dispatch *d, int kind) {
    static const cf_pass passes[CF__KINDS] = {CF_F, CF_R, CF_B, CF_W};
    return kind == CF__BACKWARD && d->policy.split ? CF_I : passes[kind];
}

/* Writes down what was dispatched; returns the number of actions. */
static int64_t cf__write_dispatch(const cf__dispatch *d, cf_schedule *schedule) {
    const cf__pipeline *pipe = d->pipe;
    cf_action *next = schedule->actions;
    int64_t s, i;
    for (s = 0; s < pipe->n_stages; s++) {
        const cf__worker *worker = &d->workers[s];
        schedule->first[s] = next - schedule->actions;
        for (i = 0; i < worker->n_done; i++) {
            int64_t cell = worker->done[i] / CF__KINDS, chunk = cell % pipe->n;
            int kind = (int)(worker->done[i] % CF__KINDS);
            const cf__work_unit *unit = &d->maker->units[d->unit_of[chunk]];
            int keep = kind == CF__AGAIN || (kind == CF__FORWARD && !cf__is_dropped(unit, chunk - unit->first));
            cf__put_action(&next, cf__pass_of_kind(d, kind), pipe->first_chunk + chunk, cell / pipe->n, keep);
        }
    }
    schedule->first[pipe->n_stages] = next - schedule->actions;
    return next - schedule->actions;
}

/* ---- best: search ----

   First the fixed schedules, then dispatch under a grid of policies, then a walk: change one thing at random (two units change
   places, one moves, a policy, the urgency of one pass), keep it if the makespan does not grow. Everything follows from
   the problem and the budget, so the same call gives the same schedule. */

typedef struct cf__search {
    cf__maker maker;
    cf_schedule *schedule;  /* holds the best so far, unless that is a fixed pattern */
    cf__clock clock;        /* times the fixed schedules */
    cf__bounds bounds[2];   /* whole and split backwards; bounds[1] only if they may be split */
    cf__dispatch dispatch;
    double *nudges;         /* (passes) */
    int64_t *ahead;         /* (n_stages) of interleaved */
    uint64_t random;
    int64_t budget;
    double goal;            /* no schedule is shorter */
    cf__policy best_policy; /* of the best dispatch so far */
    cf_schedule_kind holder; /* whose the best schedule is */
    cf_search_report report;
} cf__search;

enum { CF__FIXED_KINDS = 3, CF__WALK = 1000 /* candidates of one walk */ };

/* Candidates in about a tenth of a second: dispatch takes some 70 ns for each action. Large problems get the fixed schedules
   alone. */
static int64_t cf__default_budget(const cf__maker *m) {
    if (m->n_actions > 1 << 21) return CF__FIXED_KINDS;
    return cf__max(CF__FIXED_KINDS + 3, cf__min(20000, 500000 / cf__max(m->n_actions, 1)));
}

/* Virtual stages and split backwards have no fixed pattern; a search that is only allowed the patterns needs no dispatch. */
static int cf__dispatches(const cf__maker *m) {
    int64_t budget = m->desc.budget > 0 ? m->desc.budget : cf__default_budget(m);
    if (m->desc.kind == CF_SCHEDULE_INTERLEAVED || m->desc.kind == CF_SCHEDULE_ZERO_BUBBLE) return 1;
    if (m->desc.kind != CF_SCHEDULE_BEST) return 0;
    return m->desc.n_virtual > 1 || m->desc.split_backward || budget > CF__FIXED_KINDS;
}

static void cf__layout_search(cf__search *search, cf__carver *carver) {
    cf__maker *m = &search->maker;
    int64_t cells = m->pipe.n * m->pipe.n_v;
    int best = m->desc.kind == CF_SCHEDULE_BEST, dispatches = cf__dispatches(m);
    if (cf__is_plain(&m->desc)) return;
    cf__layout_maker(m, carver);
    if (best) {
        search->clock.start = (double *)cf__take(carver, m->n_actions, sizeof(double));
        search->clock.end = (double *)cf__take(carver, m->n_actions, sizeof(double));
        cf__layout_clock(&search->clock, cells, m->pipe.n_stages, carver);
    }
    if (best || m->desc.kind == CF_SCHEDULE_INTERLEAVED) cf__layout_bounds(&search->bounds[0], &m->pipe, 0, carver);
    if (cf__splits(&m->desc)) cf__layout_bounds(&search->bounds[1], &m->pipe, 1, carver);
    if (!dispatches) return;
    cf__layout_dispatch(&search->dispatch, m, carver);
    search->nudges = best ? (double *)cf__take(carver, cells * CF__KINDS, sizeof(double)) : NULL;
    search->ahead = (int64_t *)cf__take(carver, m->pipe.n_stages, sizeof(int64_t));
}

static uint64_t cf__random(cf__search *search) { /* splitmix64 */
    uint64_t x = search->random += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int64_t cf__below(cf__search *search, int64_t n) { return (int64_t)(cf__random(search) % (uint64_t)n); }

/* In [-1, 1), a multiple of 2^-20. */
static double cf__unit_random(cf__search *search) { return (double)cf__below(search, 1 << 21) / (1 << 20) - 1; }

static int cf__is_over(const cf__search *search) {
    return search->report.n_tried >= search->budget || search->report.makespan <= search->goal * (1 + 1e-12);
}

/* ---- the fixed schedules as candidates ---- */

static void cf__write_fixed(cf__search *search, cf_schedule_kind kind) {
    cf__maker *m = &search->maker;
    m->pattern.kind = kind;
    cf__collect_units(m);
    if (kind == CF_SCHEDULE_1F1B) cf__sort_units(m);
    cf__build_pattern(m);
    search->schedule->n_actions = cf__write_pattern(m, search->schedule);
}

/* The best schedule so far has this makespan and comes from this kind. */
static void cf__note_best(cf__search *search, cf_schedule_kind kind, double makespan) {
    search->report.n_improved++;
    search->report.makespan = makespan;
    search->holder = kind;
    if (kind == CF_SCHEDULE_BEST) return;
    search->report.best_fixed = kind;
    search->report.fixed_makespan = makespan;
}

static cf_result cf__try_patterns(cf__search *search) {
    static const cf_schedule_kind kinds[CF__FIXED_KINDS] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_GPIPE};
    cf__clock *clock = &search->clock;
    int i;
    clock->pipe = &search->maker.pipe;
    clock->schedule = search->schedule;
    clock->error = search->maker.error;
    for (i = 0; i < CF__FIXED_KINDS; i++) {
        cf_result result;
        cf__write_fixed(search, kinds[i]);
        if ((result = cf__run_clock(clock)) != CF_OK) return result;
        search->report.n_tried++;
        if (clock->makespan < search->report.makespan) cf__note_best(search, kinds[i], clock->makespan);
    }
    return CF_OK;
}

/* ---- dispatch as a candidate ---- */

/* Runs dispatch as units, policy and nudges now are. Returns whether the schedule is no worse than the best so far; a better
   one is written down as `kind`. */
static int cf__try_dispatch(cf__search *search, cf_schedule_kind kind, double most) {
    cf__dispatch *d = &search->dispatch;
    d->paths = &search->bounds[d->policy.split].paths;
    search->report.n_tried++;
    if (!cf__run_dispatch(d, most)) return 0;
    search->best_policy = d->policy;
    if (!(d->makespan < search->report.makespan)) return 1;
    search->schedule->n_actions = cf__write_dispatch(d, search->schedule);
    cf__note_best(search, kind, d->makespan);
    return 1;
}

static cf__policy cf__policy_of(int split, int risk, double bias, double patience) {
    cf__policy policy;
    memset(&policy, 0, sizeof policy);
    policy.split = split;
    policy.risk = risk;
    policy.bias = bias;
    policy.patience = patience;
    return policy;
}

/* The n units reversed from place `first` on. */
static void cf__reverse_units(cf__work_unit *units, int64_t first, int64_t n) {
    int64_t i;
    for (i = 0; i < n / 2; i++) {
        cf__work_unit swap = units[first + i];
        units[first + i] = units[first + n - 1 - i];
        units[first + n - 1 - i] = swap;
    }
}

/* Starting orders: plan order and its reverse, dearest first and cheapest first, cheap ones at both ends. A short chunk
   fills the pipeline sooner, and empties it sooner. */
enum { CF__ORDERS = 5 };

static void cf__set_order(cf__maker *m, int order) {
    int64_t n = m->n_units, i;
    cf__collect_units(m);
    if (order >= 2) cf__sort_units(m);
    if (order == 1 || order == 3) cf__reverse_units(m->units, 0, n);
    if (order != 4) return;
    for (i = 0; i < n; i++) m->spare[i % 2 == 0 ? n - 1 - i / 2 : i / 2] = m->units[n - 1 - i];
    memcpy(m->units, m->spare, (size_t)n * sizeof *m->units);
}

/* Each order with each policy, the most promising ones first. Leaves the best order, and its policy in best_policy. */
static void cf__try_grid(cf__search *search) {
    static const int orders[CF__ORDERS] = {2, 0, 4, 1, 3};
    cf__maker *m = &search->maker;
    double much = search->bounds[0].critical_path;
    int risks = cf__is_limited(&m->desc), splits = m->desc.split_backward != 0;
    int i, o, best_order = 2, n = 6 * (1 + risks) * (1 + splits);
    for (i = 0; i < n; i++)
        for (o = 0; o < CF__ORDERS && !cf__is_over(search); o++) {
            double bias = i % 3 == 0 ? 0 : i % 3 == 1 ? much : -much;
            int risk = risks && i / 6 % 2 == 1, split = splits && i >= n / 2;
            cf__set_order(m, orders[o]);
            search->dispatch.policy = cf__policy_of(split, risk, bias, i / 3 % 2 == 0 ? 0 : 0.5);
            if (cf__try_dispatch(search, CF_SCHEDULE_BEST, search->report.makespan)) best_order = orders[o];
        }
    cf__set_order(m, best_order);
}

/* ---- the walk ---- */

typedef enum cf__move_kind { CF__SWAP = 0, CF__SHIFT, CF__NUDGE, CF__POLICY, CF__KEEP } cf__move_kind;

typedef struct cf__move {
    cf__move_kind kind;
    int64_t from, to;   /* units */
    int64_t k;          /* of unit `from` before the move */
    int64_t pass;
    double nudge;       /* before the move */
    cf__policy policy;  /* before the move */
} cf__move;

/* Moves the unit at `from` to `to`; those between close up. */
static void cf__shift_unit(cf__work_unit *units, int64_t from, int64_t to) {
    cf__work_unit unit = units[from];
    if (from < to) memmove(&units[from], &units[from + 1], (size_t)(to - from) * sizeof unit);
    else memmove(&units[to + 1], &units[to], (size_t)(from - to) * sizeof unit);
    units[to] = unit;
}

static void cf__swap_units(cf__work_unit *units, int64_t a, int64_t b) {
    cf__work_unit swap = units[a];
    units[a] = units[b];
    units[b] = swap;
}

static void cf__change_policy(cf__search *search) {
    cf__policy *policy = &search->dispatch.policy;
    double much = search->bounds[0].critical_path;
    if (cf__is_limited(&search->maker.desc) && cf__below(search, 2)) policy->risk = !policy->risk;
    switch (cf__below(search, 3)) {
        case 0: policy->bias = cf__product(much, cf__unit_random(search)); break;
        case 1: policy->patience = cf__below(search, 2) ? cf__most(0, cf__unit_random(search)) : 0; break;
        default:
            policy->bias = 0;
            if (search->maker.desc.split_backward) policy->split = (int)cf__below(search, 2);
            break;
    }
}

static cf__move cf__make_move(cf__search *search) {
    cf__maker *m = &search->maker;
    cf__dispatch *d = &search->dispatch;
    int64_t chance = cf__below(search, 16), passes = m->pipe.n * m->pipe.n_v * CF__KINDS;
    cf__move move;
    memset(&move, 0, sizeof move);
    move.policy = d->policy;
    move.kind = chance < 4 ? CF__SWAP : chance < 8 ? CF__SHIFT : chance < 14 ? CF__NUDGE : CF__POLICY;
    if (m->n_units < 2 && (move.kind == CF__SWAP || move.kind == CF__SHIFT)) move.kind = CF__NUDGE;
    if (chance % 4 == 0 && cf__is_limited(&m->desc)) move.kind = CF__KEEP;
    switch (move.kind) {
        case CF__KEEP:
            move.from = cf__below(search, m->n_units);
            move.k = m->units[move.from].k;
            cf__set_k(m, &m->units[move.from], 1 + cf__below(search, m->units[move.from].most_k));
            break;
        case CF__SWAP:
        case CF__SHIFT:
            move.from = cf__below(search, m->n_units);
            move.to = (move.from + 1 + cf__below(search, m->n_units - 1)) % m->n_units;
            if (move.kind == CF__SWAP) cf__swap_units(m->units, move.from, move.to);
            else cf__shift_unit(m->units, move.from, move.to);
            break;
        case CF__NUDGE:
            move.pass = cf__below(search, passes);
            move.nudge = search->nudges[move.pass];
            search->nudges[move.pass] += cf__product(search->bounds[0].critical_path / (double)(1 << cf__below(search, 5)), cf__unit_random(search));
            break;
        default: cf__change_policy(search); break;
    }
    return move;
}

static void cf__undo_move(cf__search *search, const cf__move *move) {
    cf__maker *m = &search->maker;
    if (move->kind == CF__SWAP) cf__swap_units(m->units, move->from, move->to);
    if (move->kind == CF__SHIFT) cf__shift_unit(m->units, move->to, move->from);
    if (move->kind == CF__KEEP) cf__set_k(m, &m->units[move->from], move->k);
    if (move->kind == CF__NUDGE) search->nudges[move->pass] = move->nudge;
    search->dispatch.policy = move->policy;
}

/* One walk, up to candidate `until`, from where the search stands; `current` is the makespan there. */
static void cf__walk(cf__search *search, int64_t until, double current) {
    while (!cf__is_over(search) && search->report.n_tried < until) {
        cf__move move = cf__make_move(search);
        if (cf__try_dispatch(search, CF_SCHEDULE_BEST, current)) current = search->dispatch.makespan;
        else cf__undo_move(search, &move);
    }
}

/* Another point to walk from, far from the best. */
static void cf__jump(cf__search *search) {
    cf__maker *m = &search->maker;
    double much = search->bounds[0].critical_path;
    int64_t i, passes = m->pipe.n * m->pipe.n_v * CF__KINDS;
    int risk = cf__is_limited(&m->desc) && cf__below(search, 2), split = m->desc.split_backward && cf__below(search, 2);
    for (i = 0; i < passes; i++) search->nudges[i] = 0;
    cf__set_order(m, (int)cf__below(search, CF__ORDERS));
    search->dispatch.policy = cf__policy_of(split, risk, cf__product(much, cf__unit_random(search)), 0);
}

/* The first walk starts at the best point so far, later ones, where the budget is ample, at others. */
static void cf__walk_about(cf__search *search) {
    int64_t left = search->budget - search->report.n_tried, n_walks = 1 + left / CF__WALK, i;
    search->dispatch.policy = search->best_policy;
    for (i = 0; i < n_walks; i++) {
        int64_t until = search->budget - left / n_walks * (n_walks - 1 - i);
        if (i > 0) cf__jump(search);
        cf__walk(search, until, i == 0 ? search->report.makespan : DBL_MAX);
    }
}

/* ---- the fixed kinds that are dispatched ---- */

/* interleaved: forwards, those of later virtual stages first, until Megatron's warm-up of 2 x (n_stages - 1 - s) +
   (n_virtual - 1) x n_stages and one more are ahead, then a backward. zero-bubble: the forwards and backwards of 1F1B, and on
   each stage no more chunks than its first stage has, which are as many W as may be put off. */
static void cf__set_fixed_policy(cf__search *search, cf_schedule_kind kind) {
    cf__maker *m = &search->maker;
    cf__policy *policy = &search->dispatch.policy;
    int64_t p = m->desc.n_stages, n = m->desc.n_virtual, s;
    int split = kind == CF_SCHEDULE_ZERO_BUBBLE;
    double much = 4 * search->bounds[split].critical_path;
    *policy = cf__policy_of(split, 0, cf__product(much, (double)(n + 1)), 0);
    policy->deep = much;
    policy->depth = split ? p * n : 0;
    policy->ahead = search->ahead;
    for (s = 0; s < p; s++) search->ahead[s] = n == 1 ? p - s : 2 * (p - 1 - s) + (n - 1) * p + 1;
    cf__collect_units(m);
}

static void cf__dispatch_fixed(cf__search *search, cf_schedule_kind kind) {
    cf__set_fixed_policy(search, kind);
    cf__try_dispatch(search, kind, search->report.makespan);
}

/* ---- the whole search ---- */

static void cf__start_search(cf__search *search, cf_schedule *schedule) {
    cf__maker *m = &search->maker;
    const cf_schedule_desc *desc = &m->desc;
    int64_t i, passes = m->pipe.n * m->pipe.n_v * CF__KINDS;
    int split;
    search->schedule = schedule;
    search->budget = desc->budget > 0 ? desc->budget : cf__default_budget(m);
    search->dispatch.maker = m;
    search->dispatch.pipe = &m->pipe;
    search->report.makespan = DBL_MAX;
    search->goal = DBL_MAX;
    if (desc->kind == CF_SCHEDULE_INTERLEAVED) cf__find_critical_path(&search->bounds[0], &m->pipe, 0);
    if (desc->kind == CF_SCHEDULE_ZERO_BUBBLE) cf__find_critical_path(&search->bounds[1], &m->pipe, 1);
    if (desc->kind != CF_SCHEDULE_BEST) return;
    for (split = 0; split <= (desc->split_backward != 0); split++) {
        cf__find_bounds(&search->bounds[split], &m->pipe, split, desc->limit, desc->limits);
        if (cf__strongest_bound(&search->bounds[split]) < search->goal)
            search->goal = cf__strongest_bound(&search->bounds[split]);
    }
    if (search->nudges == NULL) return;
    for (i = 0; i < passes; i++) search->nudges[i] = 0;
    search->dispatch.nudges = search->nudges;
}

static cf_result cf__search_best(cf__search *search) {
    const cf_schedule_desc *desc = &search->maker.desc;
    cf_search_report *report = &search->report;
    cf_result result;
    if (desc->n_virtual == 1) {
        if ((result = cf__try_patterns(search)) != CF_OK) return result;
    } else {
        cf__dispatch_fixed(search, CF_SCHEDULE_INTERLEAVED);
    }
    if (desc->split_backward) cf__dispatch_fixed(search, CF_SCHEDULE_ZERO_BUBBLE);
    if (cf__dispatches(&search->maker) && !cf__is_over(search)) {
        cf__try_grid(search);
        cf__walk_about(search);
    }
    if (desc->n_virtual == 1 && search->holder != CF_SCHEDULE_BEST && search->holder != CF_SCHEDULE_ZERO_BUBBLE)
        cf__write_fixed(search, search->holder);
    report->budget = search->budget;
    report->bound = search->goal;
    report->gap = report->bound > 0 ? report->makespan / report->bound - 1 : 0;
    if (desc->report != NULL) *desc->report = *report;
    return CF_OK;
}

/* ---- the road, and the public functions ---- */

static cf_result cf__check_limits(const cf_schedule_desc *desc, cf_error *error) {
    const cf_bytes *bytes = &desc->bytes;
    int64_t s;
    cf_result result;
    if ((result = cf__range(desc->limit, 0, INT64_MAX, "limit", error)) != CF_OK) return result;
    if ((result = cf__range(desc->limit_bytes, 0, INT64_MAX, "limit_bytes", error)) != CF_OK) return result;
    if (bytes->per_token_activations < 0 || bytes->per_token_state < 0 || bytes->per_token_state_gradient < 0 ||
        bytes->per_token_boundary < 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "bytes", -1, 0, -1, "negative");
    for (s = 0; s < desc->n_stages; s++) {
        if (desc->limits != NULL && desc->limits[s] < 0)
            return cf__fail(error, CF_ERROR_ARGUMENT, "limits", s, 0, desc->limits[s], "negative");
        if (desc->limits_bytes != NULL && desc->limits_bytes[s] < 0)
            return cf__fail(error, CF_ERROR_ARGUMENT, "limits_bytes", s, 0, desc->limits_bytes[s], "negative");
    }
    return CF_OK;
}

/* Bytes of all tokens at once must fit, on all virtual stages of a stage. */
static cf_result cf__check_bytes(const cf_plan *plan, int64_t rank, const cf_bytes *bytes, int64_t n_virtual,
                                 cf_error *error) {
    int64_t i, tokens = 0, per_token = 0, sum;
    int fits = cf__add(bytes->per_token_activations, bytes->per_token_state, &per_token) &&
               cf__add(per_token, bytes->per_token_state_gradient, &per_token) &&
               cf__add(per_token, bytes->per_token_boundary, &per_token);
    for (i = rank * plan->n_steps; i < (rank + 1) * plan->n_steps && fits; i++)
        fits = plan->chunks[i].padded >= 0 && cf__add(tokens, plan->chunks[i].padded, &tokens);
    if (fits && cf__mul(tokens, n_virtual, &sum) && cf__mul(sum, per_token, &sum)) return CF_OK;
    return cf__fail(error, CF_ERROR_OVERFLOW, "bytes", -1, INT64_MAX, -1, "all tokens of the batch take more");
}

static cf_result cf__check_schedule_desc(const cf_plan *plan, const cf_schedule_desc *desc, cf_error *error) {
    int many = desc->kind == CF_SCHEDULE_INTERLEAVED || desc->kind == CF_SCHEDULE_BEST;
    cf_result result;
    if ((result = cf__range((int64_t)desc->kind, 0, CF_SCHEDULE_COUNT - 1, "kind", error)) != CF_OK) return result;
    if ((result = cf__range((int64_t)desc->replay, 0, CF_REPLAY_COUNT - 1, "replay", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_stages, 1, CF_MAX_STAGES, "n_stages", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_virtual, 1, CF_MAX_STAGES / desc->n_stages, "n_virtual", error)) != CF_OK) return result;
    if (desc->n_virtual > 1 && !many)
        return cf__fail(error, CF_ERROR_ARGUMENT, "n_virtual", -1, 1, desc->n_virtual, "too large for this kind");
    if ((result = cf__range(desc->k, 1, INT64_MAX, "k", error)) != CF_OK) return result;
    if ((result = cf__range(desc->rank, 0, plan->n_ranks - 1, "rank", error)) != CF_OK) return result;
    if ((result = cf__range(desc->budget, 0, INT64_MAX, "budget", error)) != CF_OK) return result;
    if ((result = cf__check_limits(desc, error)) != CF_OK) return result;
    if (desc->timing != NULL &&
        (result = cf__check_timing(desc->timing, desc->n_stages * desc->n_virtual, error)) != CF_OK)
        return result;
    return cf__check_bytes(plan, desc->rank, &desc->bytes, desc->n_virtual, error);
}

/* A unit's chunks agree with its group: the dispatch and the patterns count on it. */
static cf_result cf__check_unit(const cf_plan *plan, int64_t id, int64_t n, cf_error *error) {
    int64_t i;
    for (i = 0; i < n; i++) {
        const cf_chunk *c = &plan->chunks[id + i];
        if (c->group != plan->chunks[id].group || c->index != i)
            return cf__fail(error, CF_ERROR_PLAN, "chunks.group", id + i, plan->chunks[id].group, c->group,
                            "chunks and groups disagree");
        if (c->group >= 0 && (c->n_slices < 1 || c->first_slice < 0 || c->first_slice >= plan->n_slices))
            return cf__fail(error, CF_ERROR_PLAN, "chunks.first_slice", id + i, plan->n_slices - 1, c->first_slice,
                            "its slices do not exist");
    }
    return CF_OK;
}

static cf_result cf__check_units(const cf_plan *plan, int64_t rank, cf_error *error) {
    int64_t id = rank * plan->n_steps, end = id + plan->n_steps, n;
    for (; id < end; id += n) {
        cf_result result;
        n = cf__unit_chunks(plan, id);
        if (n == 0)
            return cf__fail(error, CF_ERROR_PLAN, "chunks.group", id, -1, plan->chunks[id].group,
                            "chunks and groups disagree");
        if ((result = cf__check_unit(plan, id, n, error)) != CF_OK) return result;
    }
    return CF_OK;
}

/* No chunk of the unit at `id` finds room: says how much is needed at least, and on which stage it is missing. */
static cf_result cf__fail_limit(const cf__maker *m, int64_t bytes) {
    const cf_schedule_desc *desc = &m->desc;
    int counts_bytes = m->tightest.chunks > 0;
    int64_t wanted = (counts_bytes ? bytes : 1) * desc->n_virtual, s, got = 0;
    for (s = 0; s < desc->n_stages; s++) {
        cf__limits limits = cf__limits_of(desc, s);
        got = counts_bytes ? limits.bytes : limits.chunks;
        if (got < wanted) break;
    }
    return cf__fail(m->error, CF_ERROR_INFEASIBLE, counts_bytes ? "limit_bytes" : "limit", s, wanted, got,
                    "no schedule can keep to it");
}

/* Counts units and actions; refuses limits that even the smallest K cannot keep. */
static cf_result cf__count_actions(cf__maker *m, const cf_plan *plan) {
    int64_t id = m->desc.rank * plan->n_steps, end = id + plan->n_steps, n, bytes = 0, most_bytes = 0, per_stage;
    int fits = 1, may_keep_fewer = m->desc.kind == CF_SCHEDULE_BEST && cf__is_limited(&m->desc);
    for (; id < end; id += n) {
        int64_t k;
        n = cf__unit_chunks(plan, id);
        k = cf__fitting_k(plan, &m->desc, &m->tightest, id, n, &bytes);
        fits &= k > 0;
        most_bytes = cf__max(most_bytes, bytes);
        m->n_units++;
        if (may_keep_fewer) k = cf__min(k, 1);
        m->n_replays += n - cf__max(k, 1);
    }
    if (!fits) return cf__fail_limit(m, most_bytes);
    per_stage = (cf__splits(&m->desc) ? 3 : 2) * plan->n_steps + m->n_replays;
    if (per_stage > 0 && m->pipe.n_v > CF_MAX_ACTIONS / per_stage)
        return cf__fail(m->error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, per_stage, "too many (got: those of one virtual stage)");
    m->n_actions = per_stage * m->pipe.n_v;
    return CF_OK;
}

/* Everything that can be refused without working space is refused here. */
static cf_result cf__schedule_start(cf__search *search, const cf_plan *plan, const cf_schedule_desc *desc,
                                    cf_error *error) {
    cf__maker *m = &search->maker;
    cf_result result;
    memset(search, 0, sizeof *search);
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (desc == NULL) return cf__fail_null(error, "desc");
    m->desc = cf_schedule_defaults(desc);
    m->error = error;
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__check_schedule_desc(plan, &m->desc, error)) != CF_OK) return result;
    if ((result = cf__check_units(plan, m->desc.rank, error)) != CF_OK) return result;
    m->tightest = cf__tightest(&m->desc);
    m->pipe = cf__pipeline_of(plan, m->desc.rank, m->desc.n_stages, m->desc.n_virtual, m->desc.k, m->desc.replay,
                              m->desc.timing);
    return cf__count_actions(m, plan);
}

static cf_schedule *cf__layout_schedule(cf_schedule *header, cf__carver *carver) {
    cf_schedule *schedule = (cf_schedule *)cf__take(carver, 1, sizeof(cf_schedule));
    header->first = (int64_t *)cf__take(carver, header->n_stages + 1, sizeof(int64_t));
    header->actions = (cf_action *)cf__take(carver, header->n_actions, sizeof(cf_action));
    return schedule;
}

static cf_schedule cf__schedule_header(const cf__maker *m) {
    cf_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = m->desc.kind;
    schedule.replay = m->desc.replay;
    schedule.n_stages = m->desc.n_stages;
    schedule.n_virtual = m->desc.n_virtual;
    schedule.k = m->desc.k;
    schedule.rank = m->desc.rank;
    schedule.n_chunks = m->pipe.plan->n_chunks;
    schedule.n_actions = m->n_actions;
    return schedule;
}

/* Algorithm 2 for each unit. A standalone chunk is a unit of one. */
static void cf__write_plain(const cf__maker *m, cf_schedule *schedule) {
    const cf_plan *plan = m->pipe.plan;
    int64_t id = m->pipe.first_chunk, end = id + plan->n_steps, n, i, bytes;
    cf_action *next = schedule->actions;
    for (; id < end; id += n) {
        int64_t dropped;
        n = cf__unit_chunks(plan, id);
        dropped = n - cf__fitting_k(plan, &m->desc, &m->tightest, id, n, &bytes);
        for (i = 0; i < n; i++) cf__put_action(&next, CF_F, id + i, 0, i >= dropped);
        for (i = n - 1; i >= 0; i--) {
            if (i < dropped) cf__put_action(&next, CF_R, id + i, 0, 1);
            cf__put_action(&next, CF_B, id + i, 0, 0);
        }
    }
    schedule->first[0] = 0;
    schedule->first[1] = schedule->n_actions;
}

/* Writes actions and first, and sets n_actions to what was written. */
static cf_result cf__write_schedule(cf__search *search, cf_schedule *schedule) {
    cf__maker *m = &search->maker;
    cf_result result;
    if (cf__is_plain(&m->desc)) {
        cf__write_plain(m, schedule);
        return CF_OK;
    }
    cf__fill_pipeline(&m->pipe);
    if ((result = cf__check_total_time(&m->pipe, m->error)) != CF_OK) return result;
    cf__start_search(search, schedule);
    if (m->desc.kind == CF_SCHEDULE_BEST) return cf__search_best(search);
    if (cf__dispatches(m)) cf__dispatch_fixed(search, m->desc.kind);
    else cf__write_fixed(search, m->desc.kind);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error) {
    cf__search search;
    cf_schedule header;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__schedule_start(&search, plan, desc, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    header = cf__schedule_header(&search.maker);
    cf__layout_schedule(&header, &carver);
    cf__layout_search(&search, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error) {
    cf__search search;
    cf_schedule header, *schedule;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__schedule_start(&search, plan, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    header = cf__schedule_header(&search.maker);
    cf__layout_schedule(&header, &carver);
    cf__layout_search(&search, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    if ((result = cf__check_memory(memory, bytes, carver.used, error)) != CF_OK) return result;
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    schedule = cf__layout_schedule(&header, &carver);
    cf__layout_search(&search, &carver);
    *schedule = header;
    if ((result = cf__write_schedule(&search, schedule)) != CF_OK) return result;
    *out = schedule;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error) {
    cf__search search;
    cf_allocator allocator;
    cf_schedule header, *schedule;
    cf__carver block = {NULL, 0, 0}, space = {NULL, 0, 0};
    void *memory, *scratch = NULL;
    cf_result result = cf__schedule_start(&search, plan, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(desc->allocator, &allocator, error)) != CF_OK) return result;
    header = cf__schedule_header(&search.maker);
    cf__layout_schedule(&header, &block);
    cf__layout_search(&search, &space);
    if (block.overflow || space.overflow) return cf__too_large(error, "n_actions");
    if (space.used > 0 && (scratch = allocator.alloc(space.used, allocator.user)) == NULL)
        return cf__fail_memory(error, space.used);
    memory = allocator.alloc(block.used, allocator.user);
    if (memory == NULL) {
        if (scratch != NULL) allocator.release(scratch, allocator.user);
        return cf__fail_memory(error, block.used);
    }
    block.base = (unsigned char *)memory;
    space.base = (unsigned char *)scratch;
    block.used = space.used = 0;
    schedule = cf__layout_schedule(&header, &block);
    cf__layout_search(&search, &space);
    *schedule = header;
    schedule->allocator = allocator;
    result = cf__write_schedule(&search, schedule);
    if (scratch != NULL) allocator.release(scratch, allocator.user);
    if (result == CF_OK) *out = schedule;
    else allocator.release(memory, allocator.user);
    return result;
}

CHUNKFLOW_API void cf_schedule_free(cf_schedule *schedule) {
    if (schedule != NULL && schedule->allocator.release != NULL) {
        cf_allocator allocator = schedule->allocator;
        allocator.release(schedule, allocator.user);
    }
}

/* ================================================================================================================
   >>simulate
   ================================================================================================================ */

typedef struct cf__simulation {
    cf_simulate_desc desc;
    const cf_schedule *schedule;
    cf__pipeline pipe;
    int splits; /* the schedule has an I or a W */
    cf__clock clock;
    cf__bounds bounds;
} cf__simulation;

static cf_timeline *cf__layout_timeline(cf_timeline *header, cf__carver *carver) {
    cf_timeline *timeline = (cf_timeline *)cf__take(carver, 1, sizeof(cf_timeline));
    header->start = (double *)cf__take(carver, header->n_actions, sizeof(double));
    header->end = (double *)cf__take(carver, header->n_actions, sizeof(double));
    header->live = (int32_t *)cf__take(carver, header->n_actions, sizeof(int32_t));
    header->peak_live = (int64_t *)cf__take(carver, header->n_stages, sizeof(int64_t));
    header->peak_tokens = (int64_t *)cf__take(carver, header->n_stages, sizeof(int64_t));
    header->peak_state_tokens = (int64_t *)cf__take(carver, header->n_stages, sizeof(int64_t));
    header->peak_bytes = (int64_t *)cf__take(carver, header->n_stages, sizeof(int64_t));
    return timeline;
}

static void cf__layout_simulation(cf__simulation *sim, cf__carver *carver) {
    cf__layout_pipeline(&sim->pipe, carver);
    cf__layout_clock(&sim->clock, sim->pipe.n * sim->pipe.n_v, sim->pipe.n_stages, carver);
    if (!sim->desc.no_bounds) cf__layout_bounds(&sim->bounds, &sim->pipe, sim->splits, carver);
}

/* The action lists are where the schedule says. */
static cf_result cf__check_lists(const cf_schedule *schedule, cf_error *error) {
    int64_t s;
    if (schedule->first == NULL) return cf__fail(error, CF_ERROR_SCHEDULE, "first", -1, 1, 0, "is NULL");
    if (schedule->n_actions < 0 || schedule->n_actions > CF_MAX_ACTIONS)
        return cf__fail(error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, schedule->n_actions, "out of range");
    if (schedule->n_actions > 0 && schedule->actions == NULL)
        return cf__fail(error, CF_ERROR_SCHEDULE, "actions", -1, 1, 0, "is NULL");
    for (s = 0; s <= schedule->n_stages; s++) {
        int64_t least = s > 0 ? schedule->first[s - 1] : 0, most = s > 0 ? schedule->n_actions : 0;
        if (schedule->first[s] < least || schedule->first[s] > most)
            return cf__fail(error, CF_ERROR_SCHEDULE, "first", s, most, schedule->first[s], "action lists overlap or run out of range");
    }
    return CF_OK;
}

static cf_result cf__simulate_start(cf__simulation *sim, cf_timeline *header, const cf_plan *plan,
                                    const cf_schedule *schedule, const cf_simulate_desc *desc, cf_error *error) {
    cf_schedule_desc limits;
    int64_t i, n_v, cells;
    cf_result result;
    memset(sim, 0, sizeof *sim);
    memset(header, 0, sizeof *header);
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    if (desc != NULL) sim->desc = *desc;
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if (schedule->n_chunks != plan->n_chunks)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_chunks", -1, plan->n_chunks, schedule->n_chunks, "made for another plan");
    if (schedule->rank < 0 || schedule->rank >= plan->n_ranks)
        return cf__fail(error, CF_ERROR_SCHEDULE, "rank", -1, plan->n_ranks - 1, schedule->rank, "no such rank");
    if (schedule->n_stages < 1 || schedule->n_virtual < 1 || schedule->n_stages > CF_MAX_STAGES / schedule->n_virtual)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_stages", -1, CF_MAX_STAGES, schedule->n_stages, "out of range");
    if (schedule->k < 1) return cf__fail(error, CF_ERROR_SCHEDULE, "k", -1, 1, schedule->k, "too small");
    if ((result = cf__check_lists(schedule, error)) != CF_OK) return result;
    if ((result = cf__check_units(plan, schedule->rank, error)) != CF_OK) return result;
    n_v = schedule->n_stages * schedule->n_virtual;
    cells = plan->n_steps * n_v;
    if (cells > schedule->n_actions / 2)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_actions", -1, 2 * cells, schedule->n_actions, "passes are missing");
    memset(&limits, 0, sizeof limits);
    limits.n_stages = schedule->n_stages;
    limits.limit = sim->desc.limit;
    limits.limits = sim->desc.limits;
    limits.bytes = sim->desc.bytes;
    if ((result = cf__check_limits(&limits, error)) != CF_OK) return result;
    if (sim->desc.timing != NULL && (result = cf__check_timing(sim->desc.timing, n_v, error)) != CF_OK) return result;
    if ((result = cf__check_bytes(plan, schedule->rank, &sim->desc.bytes, schedule->n_virtual, error)) != CF_OK)
        return result;
    sim->schedule = schedule;
    sim->pipe = cf__pipeline_of(plan, schedule->rank, schedule->n_stages, schedule->n_virtual, schedule->k,
                                schedule->replay, sim->desc.timing);
    for (i = 0; i < schedule->n_actions && !sim->splits; i++) sim->splits = schedule->actions[i].pass == CF_I;
    sim->clock.error = error;
    header->n_actions = schedule->n_actions;
    header->n_stages = schedule->n_stages;
    return CF_OK;
}

/* What a stage holds while it walks its list. */
typedef struct cf__held {
    int64_t live, tokens, state, gradient, saved; /* chunks kept; tokens: kept, of state, of its gradient, of saved inputs */
} cf__held;

static int64_t cf__held_bytes(const cf__held *held, const cf_bytes *bytes) {
    return held->tokens * bytes->per_token_activations + held->state * bytes->per_token_state +
           held->gradient * bytes->per_token_state_gradient + held->saved * bytes->per_token_boundary;
}

/* What comes into being when the action starts, and what goes when it has ended. */
static void cf__hold(const cf__simulation *sim, cf__held *held, const cf_action *a) {
    const cf__pipeline *pipe = &sim->pipe;
    const cf_chunk *c = &pipe->plan->chunks[a->chunk];
    int backward = a->pass == CF_B || a->pass == CF_I;
    if (a->keep) {
        held->live++;
        held->tokens += c->padded;
    }
    if (a->pass == CF_F && c->group >= 0) held->state += cf_chunk_state_tokens(pipe->plan, a->chunk);
    if (a->pass == CF_F && !a->keep && pipe->local) held->saved += c->padded;
    if (a->pass == CF_R && pipe->local) held->saved -= c->padded;
    if (backward && c->group >= 0 && cf__chunks_after(pipe, a->chunk - pipe->first_chunk) == 0)
        held->gradient += c->prefix + cf_chunk_state_tokens(pipe->plan, a->chunk);
}

static void cf__let_go(const cf__simulation *sim, cf__held *held, const cf_action *a) {
    const cf_plan *plan = sim->pipe.plan;
    const cf_chunk *c = &plan->chunks[a->chunk];
    if (a->pass == CF_B || a->pass == CF_W) {
        held->live--;
        held->tokens -= c->padded;
    }
    if ((a->pass == CF_B || a->pass == CF_I) && c->group >= 0) {
        held->state -= cf_chunk_state_tokens(plan, a->chunk);
        held->gradient -= cf_chunk_state_tokens(plan, a->chunk);
    }
}

/* The books of one stage. Needs no clock: the order of its list decides. */
static void cf__walk_stage(const cf__simulation *sim, cf_timeline *timeline, int64_t stage) {
    cf__held held = {0, 0, 0, 0, 0}, peak = {0, 0, 0, 0, 0};
    int64_t id, peak_bytes = 0;
    for (id = sim->schedule->first[stage]; id < sim->schedule->first[stage + 1]; id++) {
        const cf_action *a = &sim->schedule->actions[id];
        double seconds = timeline->end[id] - timeline->start[id];
        cf__hold(sim, &held, a);
        timeline->live[id] = (int32_t)held.live;
        peak.live = cf__max(peak.live, held.live);
        peak.tokens = cf__max(peak.tokens, held.tokens);
        peak.state = cf__max(peak.state, held.state);
        peak_bytes = cf__max(peak_bytes, cf__held_bytes(&held, &sim->desc.bytes));
        timeline->busy += seconds;
        if (a->pass == CF_R) timeline->replayed += seconds;
        cf__let_go(sim, &held, a);
    }
    timeline->peak_live[stage] = peak.live;
    timeline->peak_tokens[stage] = peak.tokens;
    timeline->peak_state_tokens[stage] = peak.state;
    timeline->peak_bytes[stage] = peak_bytes;
}

static void cf__add_bound(cf_timeline *timeline, const char *name, double value) {
    cf_bound *bound = &timeline->bounds[timeline->n_bounds++];
    bound->name = name;
    bound->value = value;
    timeline->bound = cf__most(timeline->bound, value);
}

static void cf__add_bounds(cf__simulation *sim, cf_timeline *timeline) {
    cf__bounds *bounds = &sim->bounds;
    cf__find_bounds(bounds, &sim->pipe, sim->splits, sim->desc.limit, sim->desc.limits);
    cf__add_bound(timeline, "critical-path", bounds->critical_path);
    cf__add_bound(timeline, "stage-load", bounds->stage_load);
    cf__add_bound(timeline, "one-machine", bounds->one_machine);
    if (sim->desc.limit > 0 || sim->desc.limits != NULL) cf__add_bound(timeline, "memory", bounds->memory);
}

/* Needs working space. */
static cf_result cf__fill_timeline(cf__simulation *sim, cf_timeline *timeline) {
    double capacity;
    int64_t s;
    cf_result result;
    cf__fill_pipeline(&sim->pipe);
    if ((result = cf__check_total_time(&sim->pipe, sim->clock.error)) != CF_OK) return result;
    sim->clock.pipe = &sim->pipe;
    sim->clock.schedule = sim->schedule;
    sim->clock.start = timeline->start;
    sim->clock.end = timeline->end;
    if ((result = cf__run_clock(&sim->clock)) != CF_OK) return result;
    timeline->makespan = sim->clock.makespan;
    for (s = 0; s < timeline->n_stages; s++) cf__walk_stage(sim, timeline, s);
    capacity = timeline->makespan * (double)timeline->n_stages;
    if (capacity > 0) {
        timeline->bubble_useful = 1 - (timeline->busy - timeline->replayed) / capacity;
        timeline->bubble_busy = 1 - timeline->busy / capacity;
    }
    if (!sim->desc.no_bounds) cf__add_bounds(sim, timeline);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_simulate_size(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                         size_t *bytes, cf_error *error) {
    cf__simulation sim;
    cf_timeline header;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__simulate_start(&sim, &header, plan, schedule, desc, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    cf__layout_timeline(&header, &carver);
    cf__layout_simulation(&sim, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_simulate_into(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                         void *memory, size_t bytes, cf_timeline **out, cf_error *error) {
    cf__simulation sim;
    cf_timeline header, *timeline;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__simulate_start(&sim, &header, plan, schedule, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    cf__layout_timeline(&header, &carver);
    cf__layout_simulation(&sim, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    if ((result = cf__check_memory(memory, bytes, carver.used, error)) != CF_OK) return result;
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    timeline = cf__layout_timeline(&header, &carver);
    cf__layout_simulation(&sim, &carver);
    *timeline = header;
    if ((result = cf__fill_timeline(&sim, timeline)) != CF_OK) return result;
    *out = timeline;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_simulate(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                    cf_timeline **out, cf_error *error) {
    cf__simulation sim;
    cf_allocator allocator;
    cf_timeline header, *timeline;
    cf__carver block = {NULL, 0, 0}, space = {NULL, 0, 0};
    void *memory, *scratch;
    cf_result result = cf__simulate_start(&sim, &header, plan, schedule, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(sim.desc.allocator, &allocator, error)) != CF_OK) return result;
    cf__layout_timeline(&header, &block);
    cf__layout_simulation(&sim, &space);
    if (block.overflow || space.overflow) return cf__too_large(error, "n_actions");
    scratch = allocator.alloc(space.used, allocator.user);
    if (scratch == NULL) return cf__fail_memory(error, space.used);
    memory = allocator.alloc(block.used, allocator.user);
    if (memory == NULL) {
        allocator.release(scratch, allocator.user);
        return cf__fail_memory(error, block.used);
    }
    block.base = (unsigned char *)memory;
    space.base = (unsigned char *)scratch;
    block.used = space.used = 0;
    timeline = cf__layout_timeline(&header, &block);
    cf__layout_simulation(&sim, &space);
    *timeline = header;
    timeline->allocator = allocator;
    result = cf__fill_timeline(&sim, timeline);
    allocator.release(scratch, allocator.user);
    if (result == CF_OK) *out = timeline;
    else allocator.release(memory, allocator.user);
    return result;
}

CHUNKFLOW_API void cf_timeline_free(cf_timeline *timeline) {
    if (timeline != NULL && timeline->allocator.release != NULL) {
        cf_allocator allocator = timeline->allocator;
        allocator.release(timeline, allocator.user);
    }
}

/* ================================================================================================================
   >>run
   ================================================================================================================ */

/* What has happened to a chunk on one virtual stage. */
typedef struct cf__chunk_state {
    int32_t slot;      /* activation slot, -1: none */
    uint8_t forwarded; /* F ran */
    uint8_t backward;  /* 0: not yet; CF__HALF: I ran, W is to come; CF__WHOLE */
} cf__chunk_state;

enum { CF__HALF = 1, CF__WHOLE = 2 };

typedef struct cf__group_state {
    int32_t slot;   /* state slot, -1: none */
    int64_t tokens; /* tokens whose K and V it holds */
} cf__group_state;

/* Small numbers: the one freed last is handed out first, so the highest in use is the peak. */
typedef struct cf__slots {
    int32_t *free_list;
    int64_t n_free, n_made, n_live;
} cf__slots;

typedef struct cf__runner {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_run_desc *desc;
    cf_error *error;
    int64_t stage, first_chunk;
    int64_t n_states, n_group_states; /* lengths of the two arrays below */
    cf__chunk_state *chunks;  /* (n_virtual x n_steps) */
    cf__group_state *groups;  /* (n_virtual x n_groups) */
    cf__slots activations, states;
    int64_t live_tokens, live_state_tokens;
    cf_run_stats stats;
} cf__runner;

CHUNKFLOW_API uint64_t cf_chunk_seed(uint64_t seed, int64_t chunk, int64_t stage) {
    uint64_t x = seed + 0x9e3779b97f4a7c15u * ((uint64_t)chunk + 1);
    int round;
    for (round = 0; round < 2; round++) {
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        x ^= x >> 31;
        if (round == 0) x += 0x9e3779b97f4a7c15u * ((uint64_t)stage + 1);
    }
    return x;
}

static void cf__layout_run(cf__runner *r, cf__carver *carver) {
    r->chunks = (cf__chunk_state *)cf__take(carver, r->n_states, sizeof(cf__chunk_state));
    r->groups = (cf__group_state *)cf__take(carver, r->n_group_states, sizeof(cf__group_state));
    r->activations.free_list = (int32_t *)cf__take(carver, r->n_states, sizeof(int32_t));
    r->states.free_list = (int32_t *)cf__take(carver, r->n_group_states, sizeof(int32_t));
}

/* Checks plan and schedule against each other and measures the working space. */
static cf_result cf__run_start(cf__runner *r, const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    cf_result result;
    memset(r, 0, sizeof *r);
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if (schedule->n_chunks != plan->n_chunks)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_chunks", -1, plan->n_chunks, schedule->n_chunks, "made for another plan");
    if (schedule->rank < 0 || schedule->rank >= plan->n_ranks)
        return cf__fail(error, CF_ERROR_SCHEDULE, "rank", -1, plan->n_ranks - 1, schedule->rank, "no such rank");
    if (schedule->n_stages < 1 || schedule->n_virtual < 1 || schedule->first == NULL)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_stages", -1, 1, schedule->n_stages, "not a schedule");
    r->plan = plan;
    r->schedule = schedule;
    r->error = error;
    r->first_chunk = schedule->rank * plan->n_steps;
    if (!cf__mul(plan->n_steps, schedule->n_virtual, &r->n_states) ||
        !cf__mul(plan->n_groups, schedule->n_virtual, &r->n_group_states) || r->n_states > INT32_MAX ||
        r->n_group_states > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "n_virtual", -1, INT32_MAX, schedule->n_virtual, "too many chunks per stage");
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_run_size(const cf_plan *plan, const cf_schedule *schedule, size_t *bytes, cf_error *error) {
    cf__runner r;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__run_start(&r, plan, schedule, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    cf__layout_run(&r, &carver);
    if (carver.overflow) return cf__too_large(error, "n_chunks");
    *bytes = carver.used;
    return CF_OK;
}

static cf_result cf__fail_callback(cf__runner *r, const char *callback, int64_t position, int64_t code) {
    return cf__fail(r->error, CF_ERROR_CALLBACK, callback, position, 0, code, "reported an error");
}

static cf_result cf__bad_action(cf__runner *r, const char *field, const cf_step *step, int64_t wanted, int64_t got,
                                const char *why) {
    return cf__fail(r->error, CF_ERROR_SCHEDULE, field, step->position, wanted, got, why);
}

/* Takes a slot and tells the host. On refusal the slot goes back unused. */
static cf_result cf__acquire(cf__runner *r, cf_resource what, int64_t owner, int64_t position, int32_t *out) {
    cf__slots *slots = what == CF_RESOURCE_STATE ? &r->states : &r->activations;
    int32_t slot = slots->n_free > 0 ? slots->free_list[--slots->n_free] : (int32_t)slots->n_made++;
    int code = r->desc->acquire != NULL ? r->desc->acquire(r->desc->user, what, slot, owner) : 0;
    if (code != 0) {
        slots->free_list[slots->n_free++] = slot;
        return cf__fail_callback(r, "acquire", position, code);
    }
    slots->n_live++;
    *out = slot;
    return CF_OK;
}

static void cf__release(cf__runner *r, cf_resource what, int64_t owner, int32_t *slot) {
    cf__slots *slots = what == CF_RESOURCE_STATE ? &r->states : &r->activations;
    if (r->desc->release != NULL) r->desc->release(r->desc->user, what, *slot, owner);
    slots->free_list[slots->n_free++] = *slot;
    slots->n_live--;
    *slot = -1;
}

static int64_t cf__virtual_of(const cf__runner *r, const cf_step *step) {
    return step->action.stage / r->schedule->n_stages;
}

static cf__chunk_state *cf__chunk_state_of(const cf__runner *r, const cf_step *step) {
    return &r->chunks[cf__virtual_of(r, step) * r->plan->n_steps + step->action.chunk - r->first_chunk];
}

static cf__group_state *cf__group_state_of(const cf__runner *r, const cf_step *step) {
    if (step->chunk->group < 0) return NULL;
    return &r->groups[cf__virtual_of(r, step) * r->plan->n_groups + step->chunk->group];
}

/* Turns an action into a step, once every index in it is known to be good. */
static cf_result cf__read_action(cf__runner *r, int64_t position, cf_step *step) {
    const cf_plan *plan = r->plan;
    const cf_action *a = &r->schedule->actions[r->schedule->first[r->stage] + position];
    memset(step, 0, sizeof *step);
    step->plan = plan;
    step->schedule = r->schedule;
    step->action = *a;
    step->position = position;
    step->slot = step->state = -1;
    if (a->chunk < r->first_chunk || a->chunk >= r->first_chunk + plan->n_steps)
        return cf__bad_action(r, "chunk", step, r->first_chunk, a->chunk, "not a chunk of this rank");
    if (a->stage < 0 || a->stage >= r->schedule->n_stages * r->schedule->n_virtual)
        return cf__bad_action(r, "stage", step, r->stage, a->stage, "no such virtual stage");
    if (a->pass >= CF_COMPUTE_PASS_COUNT)
        return cf__bad_action(r, "pass", step, CF_COMPUTE_PASS_COUNT - 1, a->pass, "no such pass");
    step->chunk = &plan->chunks[a->chunk];
    if (step->chunk->group < -1 || step->chunk->group >= plan->n_groups || step->chunk->first_slice < 0 ||
        step->chunk->first_slice > plan->n_slices - (step->chunk->group >= 0))
        return cf__fail(r->error, CF_ERROR_PLAN, "chunks", a->chunk, 0, step->chunk->group, "its group or slices do not exist");
    step->seed = cf_chunk_seed(r->desc->seed, a->chunk, a->stage);
    return CF_OK;
}

/* Takes what F or R needs: the state of the group, and a slot if the activations stay. */
static cf_result cf__before_forward(cf__runner *r, cf_step *step) {
    cf__chunk_state *chunk = cf__chunk_state_of(r, step);
    cf__group_state *group = cf__group_state_of(r, step);
    int replay = step->action.pass == CF_R;
    cf_result result;
    if (chunk->forwarded != replay)
        return cf__bad_action(r, "pass", step, replay, chunk->forwarded, replay ? "R before F" : "F twice");
    if (chunk->slot >= 0 || chunk->backward != 0)
        return cf__bad_action(r, "pass", step, 0, 1, "R of a chunk that has its activations or its backward");
    if (replay && !step->action.keep) return cf__bad_action(r, "keep", step, 1, 0, "R that keeps nothing");
    if (group != NULL && !replay && group->tokens != step->chunk->prefix)
        return cf__bad_action(r, "chunk", step, step->chunk->prefix, group->tokens, "F without its whole prefix");
    if (group != NULL && group->slot < 0) {
        result = cf__acquire(r, CF_RESOURCE_STATE, step->chunk->group, step->position, &group->slot);
        if (result != CF_OK) return result;
        r->stats.peak_states = cf__max(r->stats.peak_states, r->states.n_live);
    }
    if (!step->action.keep) return CF_OK;
    result = cf__acquire(r, CF_RESOURCE_ACTIVATIONS, step->action.chunk, step->position, &chunk->slot);
    if (result != CF_OK) return result;
    r->live_tokens += step->chunk->padded;
    r->stats.peak_slots = cf__max(r->stats.peak_slots, r->activations.n_live);
    r->stats.peak_tokens = cf__max(r->stats.peak_tokens, r->live_tokens);
    return CF_OK;
}

static void cf__after_forward(cf__runner *r, const cf_step *step) {
    cf__group_state *group = cf__group_state_of(r, step);
    int64_t tokens = cf_chunk_state_tokens(r->plan, step->action.chunk);
    cf__chunk_state_of(r, step)->forwarded = 1;
    if (group == NULL || step->action.pass == CF_R) return;
    group->tokens += tokens;
    r->live_state_tokens += tokens;
    r->stats.peak_state_tokens = cf__max(r->stats.peak_state_tokens, r->live_state_tokens);
}

/* B and I need the activations, and the backward of every later chunk of the group behind them: only then are dK and dV
   complete. W needs its I. */
static cf_result cf__before_backward(cf__runner *r, cf_step *step) {
    cf__chunk_state *chunk = cf__chunk_state_of(r, step);
    cf__group_state *group = cf__group_state_of(r, step);
    int64_t end = step->chunk->prefix + cf_chunk_state_tokens(r->plan, step->action.chunk);
    int64_t wanted = step->action.pass == CF_W ? CF__HALF : 0;
    if (chunk->slot < 0) return cf__bad_action(r, "pass", step, 1, 0, "backward without kept activations");
    if (chunk->backward != wanted)
        return cf__bad_action(r, "pass", step, wanted, chunk->backward, "backward out of order");
    if (group != NULL && step->action.pass != CF_W && group->tokens != end)
        return cf__bad_action(r, "chunk", step, end, group->tokens, "backward before that of a later chunk");
    return CF_OK;
}

static void cf__after_backward(cf__runner *r, const cf_step *step) {
    cf__chunk_state *chunk = cf__chunk_state_of(r, step);
    cf__group_state *group = cf__group_state_of(r, step);
    if (step->action.pass != CF_I) {
        cf__release(r, CF_RESOURCE_ACTIVATIONS, step->action.chunk, &chunk->slot);
        r->live_tokens -= step->chunk->padded;
    }
    chunk->backward = step->action.pass == CF_I ? CF__HALF : CF__WHOLE;
    if (group == NULL || step->action.pass == CF_W) return;
    r->live_state_tokens -= group->tokens - step->chunk->prefix;
    group->tokens = step->chunk->prefix;
    if (step->chunk->index == 0) cf__release(r, CF_RESOURCE_STATE, step->chunk->group, &group->slot);
}

static cf_result cf__report_progress(cf__runner *r, const cf_step *step, int64_t total) {
    cf_progress progress = {step->position + 1, total, step, r->activations.n_live, r->states.n_live, r->live_state_tokens};
    int code = r->desc->progress != NULL ? r->desc->progress(r->desc->user, &progress) : 0;
    if (code == 0) return CF_OK;
    return cf__fail(r->error, CF_ERROR_CANCELLED, "progress", step->position, 0, code, "asked to stop");
}

static cf_result cf__run_action(cf__runner *r, int64_t position, int64_t total) {
    cf_step step;
    cf__group_state *group;
    int forward, code = 0;
    cf_result result = cf__read_action(r, position, &step);
    if (result != CF_OK) return result;
    forward = step.action.pass == CF_F || step.action.pass == CF_R;
    result = forward ? cf__before_forward(r, &step) : cf__before_backward(r, &step);
    if (result != CF_OK) return result;
    group = cf__group_state_of(r, &step);
    step.slot = cf__chunk_state_of(r, &step)->slot;
    if (group != NULL) {
        step.state = group->slot;
        step.state_tokens = step.action.pass == CF_R ? step.chunk->prefix : group->tokens;
    }
    if (forward && r->desc->forward != NULL) code = r->desc->forward(r->desc->user, &step);
    if (!forward && r->desc->backward != NULL) code = r->desc->backward(r->desc->user, &step);
    if (code != 0) return cf__fail_callback(r, forward ? "forward" : "backward", position, code);
    if (forward) cf__after_forward(r, &step);
    else cf__after_backward(r, &step);
    r->stats.done++;
    return cf__report_progress(r, &step, total);
}

/* Gives back what an error, or a schedule that stops short, has left in use. */
static int64_t cf__release_all(cf__runner *r) {
    int64_t i, n_left = r->activations.n_live + r->states.n_live;
    for (i = 0; i < r->n_states; i++)
        if (r->chunks[i].slot >= 0)
            cf__release(r, CF_RESOURCE_ACTIVATIONS, r->first_chunk + i % r->plan->n_steps, &r->chunks[i].slot);
    for (i = 0; i < r->n_group_states; i++)
        if (r->groups[i].slot >= 0) cf__release(r, CF_RESOURCE_STATE, i % r->plan->n_groups, &r->groups[i].slot);
    return n_left;
}

static cf_result cf__run_stage(cf__runner *r) {
    int64_t i, n_left, *first = r->schedule->first, total;
    cf_result result = CF_OK;
    if (first[r->stage] < 0 || first[r->stage + 1] < first[r->stage] || first[r->stage + 1] > r->schedule->n_actions)
        return cf__fail(r->error, CF_ERROR_SCHEDULE, "first", r->stage, r->schedule->n_actions, first[r->stage + 1],
                        "action lists overlap or run out of range");
    total = first[r->stage + 1] - first[r->stage];
    if (total > 0 && r->schedule->actions == NULL)
        return cf__fail(r->error, CF_ERROR_SCHEDULE, "actions", -1, 1, 0, "is NULL");
    for (i = 0; i < r->n_states; i++) r->chunks[i].slot = -1;
    for (i = 0; i < r->n_group_states; i++) r->groups[i].slot = -1;
    for (i = 0; i < total && result == CF_OK; i++) result = cf__run_action(r, i, total);
    n_left = cf__release_all(r);
    if (result == CF_OK && n_left > 0)
        return cf__fail(r->error, CF_ERROR_SCHEDULE, "actions", -1, 0, n_left, "slots still in use at the end");
    return result;
}

CHUNKFLOW_API cf_result cf_run(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_run_desc *desc,
                               cf_run_stats *stats, cf_error *error) {
    cf__runner r;
    cf__carver carver = {NULL, 0, 0};
    cf_allocator allocator;
    void *memory;
    cf_result result = cf__run_start(&r, plan, schedule, error);
    if (result != CF_OK) return result;
    if (desc == NULL) return cf__fail_null(error, "desc");
    if ((result = cf__range(stage, 0, schedule->n_stages - 1, "stage", error)) != CF_OK) return result;
    if ((result = cf__allocator(desc->allocator, &allocator, error)) != CF_OK) return result;
    r.desc = desc;
    r.stage = stage;
    cf__layout_run(&r, &carver);
    if (carver.overflow) return cf__too_large(error, "n_chunks");
    memory = desc->memory;
    if (memory != NULL) result = cf__check_memory(memory, desc->bytes, carver.used, error);
    else if ((memory = allocator.alloc(carver.used + 1, allocator.user)) == NULL) result = cf__fail_memory(error, carver.used);
    if (result != CF_OK) return result;
    memset(memory, 0, carver.used);
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    cf__layout_run(&r, &carver);
    result = cf__run_stage(&r);
    if (stats != NULL) *stats = r.stats;
    if (desc->memory == NULL) allocator.release(memory, allocator.user);
    return result;
}

/* ================================================================================================================
   >>write
   ================================================================================================================ */

/* Text on its way out, in pieces of up to sizeof text. After a refused piece the rest is swallowed. */
typedef struct cf__writer {
    cf_write_fn write;
    void *user;
    int code; /* the first answer of the callback that was not 0 */
    size_t used;
    char text[4096];
} cf__writer;

enum { CF__LONGEST_PIECE = 256 }; /* no single cf__print makes more characters than this */

static void cf__flush(cf__writer *w) {
    if (w->code == 0 && w->used > 0) w->code = w->write(w->text, w->used, w->user);
    w->used = 0;
}

static void cf__print(cf__writer *w, const char *format, ...) {
    va_list arguments;
    int n;
    if (sizeof w->text - w->used < CF__LONGEST_PIECE) cf__flush(w);
    va_start(arguments, format);
    n = vsnprintf(w->text + w->used, CF__LONGEST_PIECE, format, arguments);
    va_end(arguments);
    if (n > 0) w->used += (size_t)cf__min(n, CF__LONGEST_PIECE - 1);
}

/* A number member, followed by a comma. */
static void cf__print_count(cf__writer *w, const char *name, int64_t value) {
    cf__print(w, "\"%s\": %lld, ", name, (long long)value);
}

/* A double as JSON wants it, whatever the locale's decimal point is. */
static void cf__print_real(cf__writer *w, double value) {
    char text[40], *c;
    (void)snprintf(text, sizeof text, "%.17g", value);
    for (c = text; *c != 0; c++)
        if (*c == ',') *c = '.';
    cf__print(w, "%s", text);
}

static cf_result cf__finish_writing(cf__writer *w, cf_error *error) {
    cf__flush(w);
    if (w->code == 0) return CF_OK;
    return cf__fail(error, CF_ERROR_WRITE, "write", -1, 0, w->code, "reported an error");
}

static void cf__write_chunk_json(cf__writer *w, const cf_plan *plan, int64_t id) {
    const cf_chunk *c = &plan->chunks[id];
    int64_t i;
    cf__print(w, "%s\n    {", id > 0 ? "," : "");
    cf__print_count(w, "id", id);
    cf__print_count(w, "group", c->group);
    cf__print_count(w, "index", c->index);
    cf__print_count(w, "prefix", c->prefix);
    cf__print_count(w, "tokens", c->tokens);
    cf__print_count(w, "padded", c->padded);
    cf__print_count(w, "pairs", c->pairs);
    cf__print_count(w, "rank", c->rank);
    cf__print(w, "\"slices\": [");
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *s = &plan->slices[c->first_slice + i];
        cf__print(w, "%s{\"sequence\": %lld, \"begin\": %lld, \"length\": %lld, \"offset\": %lld}", i > 0 ? ", " : "",
                  (long long)s->sequence, (long long)s->begin, (long long)s->length, (long long)s->offset);
    }
    cf__print(w, "]}");
}

static void cf__write_plan_counts(cf__writer *w, const cf_plan *plan) {
    cf_plan_stats stats;
    cf_plan_measure(plan, NULL, &stats);
    cf__print(w, "{\n  \"format\": \"chunkflow-plan\", \"version\": 1,\n  ");
    cf__print_count(w, "chunk_size", plan->chunk_size);
    cf__print_count(w, "align", plan->align);
    cf__print_count(w, "max_slices", plan->max_slices);
    cf__print(w, "\"method\": \"%s\", \"split\": \"%s\",\n  ", cf_pack_method_name(plan->method), cf_split_method_name(plan->split));
    cf__print_count(w, "n_sequences", plan->n_sequences);
    cf__print_count(w, "n_empty", plan->n_empty);
    cf__print_count(w, "n_tokens", plan->n_tokens);
    cf__print(w, "\n  ");
    cf__print_count(w, "n_ranks", plan->n_ranks);
    cf__print_count(w, "n_steps", plan->n_steps);
    cf__print_count(w, "n_chunks", plan->n_chunks);
    cf__print_count(w, "n_idle", plan->n_idle);
    cf__print_count(w, "n_groups", plan->n_groups);
    cf__print_count(w, "n_slices", plan->n_slices);
    cf__print(w, "\n  ");
    cf__print_count(w, "lower_bound", plan->lower_bound);
    cf__print_count(w, "excess", stats.excess);
    cf__print(w, "\"fill\": ");
    cf__print_real(w, stats.fill);
}

CHUNKFLOW_API cf_result cf_write_plan_json(const cf_plan *plan, cf_write_fn write, void *user, cf_error *error) {
    cf__writer w;
    int64_t i;
    cf_result result;
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (write == NULL) return cf__fail_null(error, "write");
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    memset(&w, 0, sizeof w);
    w.write = write;
    w.user = user;
    cf__write_plan_counts(&w, plan);
    cf__print(&w, ",\n  \"groups\": [");
    for (i = 0; i < plan->n_groups; i++) {
        const cf_group *g = &plan->groups[i];
        cf__print(&w, "%s\n    {\"id\": %lld, \"sequence\": %lld, \"first_chunk\": %lld, \"n_chunks\": %lld, \"tokens\": %lld}",
                  i > 0 ? "," : "", (long long)i, (long long)g->sequence, (long long)g->first_chunk,
                  (long long)g->n_chunks, (long long)g->tokens);
    }
    cf__print(&w, "],\n  \"chunks\": [");
    for (i = 0; i < plan->n_chunks && w.code == 0; i++) cf__write_chunk_json(&w, plan, i);
    cf__print(&w, "]\n}\n");
    return cf__finish_writing(&w, error);
}

static void cf__print_real_member(cf__writer *w, const char *name, double value) {
    cf__print(w, "\"%s\": ", name);
    cf__print_real(w, value);
}

static void cf__print_counts(cf__writer *w, const char *name, const int64_t *values, int64_t n) {
    int64_t i;
    cf__print(w, ",\n  \"%s\": [", name);
    for (i = 0; i < n && w->code == 0; i++) cf__print(w, "%s%lld", i > 0 ? ", " : "", (long long)values[i]);
    cf__print(w, "]");
}

static void cf__write_timeline(cf__writer *w, const cf_timeline *t) {
    const struct {
        const char *name;
        double value;
    } reals[] = {{"makespan", t->makespan}, {"busy", t->busy}, {"replayed", t->replayed},
                 {"bubble_useful", t->bubble_useful}, {"bubble_busy", t->bubble_busy}};
    int64_t i;
    for (i = 0; i < 5; i++) {
        cf__print(w, "%s", i > 0 ? ", " : "\n  ");
        cf__print_real_member(w, reals[i].name, reals[i].value);
    }
    cf__print(w, ",\n  \"bounds\": {");
    for (i = 0; i < t->n_bounds; i++) {
        cf__print(w, "%s", i > 0 ? ", " : "");
        cf__print_real_member(w, t->bounds[i].name, t->bounds[i].value);
    }
    cf__print(w, "}");
    cf__print_counts(w, "peak_live", t->peak_live, t->n_stages);
    cf__print_counts(w, "peak_tokens", t->peak_tokens, t->n_stages);
    cf__print_counts(w, "peak_state_tokens", t->peak_state_tokens, t->n_stages);
    cf__print_counts(w, "peak_bytes", t->peak_bytes, t->n_stages);
    cf__print(w, ",");
}

static void cf__write_action_json(cf__writer *w, const cf_action *a) {
    cf__print(w, "{\"pass\": \"%s\", \"chunk\": %d, \"stage\": %d", cf_pass_name((cf_pass)a->pass), (int)a->chunk,
              (int)a->stage);
    if (a->pass == CF_F || a->pass == CF_R) cf__print(w, ", \"keep\": %s", a->keep ? "true" : "false");
}

static void cf__write_action_times(cf__writer *w, const cf_timeline *t, int64_t id) {
    cf__print(w, ", ");
    cf__print_real_member(w, "start", t->start[id]);
    cf__print(w, ", ");
    cf__print_real_member(w, "end", t->end[id]);
    cf__print(w, ", \"live\": %d", (int)t->live[id]);
}

CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, const cf_timeline *timeline,
                                               cf_write_fn write, void *user, cf_error *error) {
    cf__writer w;
    int64_t stage, i;
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    if (write == NULL) return cf__fail_null(error, "write");
    if (timeline != NULL && (timeline->n_actions != schedule->n_actions || timeline->n_stages != schedule->n_stages))
        return cf__fail(error, CF_ERROR_ARGUMENT, "timeline", -1, schedule->n_actions, timeline->n_actions,
                        "made from another schedule");
    memset(&w, 0, sizeof w);
    w.write = write;
    w.user = user;
    cf__print(&w, "{\n  \"format\": \"chunkflow-schedule\", \"version\": 1,\n  ");
    cf__print(&w, "\"kind\": \"%s\", \"replay\": \"%s\",\n  ", cf_schedule_kind_name(schedule->kind),
              cf_replay_name(schedule->replay));
    cf__print_count(&w, "stages", schedule->n_stages);
    cf__print_count(&w, "virtual_stages", schedule->n_virtual);
    cf__print_count(&w, "k", schedule->k);
    cf__print_count(&w, "rank", schedule->rank);
    cf__print_count(&w, "n_chunks", schedule->n_chunks);
    cf__print_count(&w, "n_actions", schedule->n_actions);
    if (timeline != NULL) cf__write_timeline(&w, timeline);
    cf__print(&w, "\n  \"actions\": [");
    for (stage = 0; stage < schedule->n_stages; stage++) {
        cf__print(&w, "%s\n   [", stage > 0 ? "," : "");
        for (i = schedule->first[stage]; i < schedule->first[stage + 1] && w.code == 0; i++) {
            cf__print(&w, "%s\n    ", i > schedule->first[stage] ? "," : "");
            cf__write_action_json(&w, &schedule->actions[i]);
            if (timeline != NULL) cf__write_action_times(&w, timeline, i);
            cf__print(&w, "}");
        }
        cf__print(&w, "]");
    }
    cf__print(&w, "]\n}\n");
    return cf__finish_writing(&w, error);
}

#ifdef __cplusplus
}
#endif

#endif /* CHUNKFLOW_IMPLEMENTATION */
