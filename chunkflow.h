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
       run them                cf_run, cf_run_size, cf_chunk_seed
       check                   cf_plan_validate (any plan, also a hand-made one)
       write                   cf_write_plan_json, cf_write_schedule_json
       errors                  cf_result_name, cf_result_text, the cf_error record
       cost numbers            cf_cost_seconds
       attend on a GPU         cf_attention_size + cf_attention_prepare, cf_attention_forward, cf_attention_backward
         (chunkflow_cuda.cu)

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

   Sections, each found by its tag: >>base >>cost >>pack >>schedule >>run >>write, first declared, then implemented in the
   same order. A section calls only sections above it. >>cuda is declared here and implemented in chunkflow_cuda.cu. */

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
    X(CF_ERROR_CALLBACK, "a callback reported an error")                              \
    X(CF_ERROR_CANCELLED, "the progress callback asked to stop")                      \
    X(CF_ERROR_WRITE, "the write callback reported an error")                         \
    X(CF_ERROR_DEVICE, "CUDA or cuBLAS reported an error")

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

typedef enum cf_schedule_kind {
    CF_SCHEDULE_DEFAULT = 0, /* CF_SCHEDULE_PAPER */
    CF_SCHEDULE_PAPER,       /* state-aware: Algorithm 2, on one stage */
    CF_SCHEDULE_COUNT
} cf_schedule_kind;

/* "paper"; "?" for anything else. */
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

/* What to schedule. Zero means default in every member. */
typedef struct cf_schedule_desc {
    cf_schedule_kind kind;  /* 0: paper */
    cf_replay replay;       /* 0: pipeline */
    int64_t n_stages;       /* 0: 1. This version schedules one stage */
    int64_t k;              /* 0: 1 */
    int64_t rank;           /* which rank's chunks */
    const cf_allocator *allocator;
} cf_schedule_desc;

/* Orders the passes of one rank's chunks.

   One stage: units run in plan order. A standalone chunk is F B. A group of N <= K chunks is F1 .. FN, BN .. B1. A group of
   N > K chunks is F1 .. F(N-K) with nothing kept, F(N-K+1) .. FN kept, BN .. B(N-K+1), then for i = N-K down to 1: R(i) B(i).
   This is Algorithm 2 with its two slips put right: as printed, its index test keeps the wrong chunks and its third pass
   runs upwards, but dK and dV of a chunk are complete only when every later chunk has run backward.

   *out: a new schedule, to be given to cf_schedule_free; untouched on failure. Errors: CF_ERROR_ARGUMENT, CF_ERROR_PLAN (the
   counts of the plan are not sound), CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error);

/* The same into the caller's memory; cf_schedule_size is exact. Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error);
CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error);

/* A copy of desc with every default filled in. */
CHUNKFLOW_API cf_schedule_desc cf_schedule_defaults(const cf_schedule_desc *desc);

/* Frees a schedule made by cf_schedule_make. NULL is allowed. */
CHUNKFLOW_API void cf_schedule_free(cf_schedule *schedule);

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
   n_actions, and actions[stage][] of {pass, chunk, stage, keep (F and R only)}. One action a line. */
CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, cf_write_fn write, void *user,
                                               cf_error *error);

/* ================================================================================================================
   >>cuda    attention on a GPU; implemented in chunkflow_cuda.cu
   ================================================================================================================ */

/* Compile chunkflow_cuda.cu with nvcc and link it with cudart and cublas; this header itself needs no CUDA. A stream is
   a cudaStream_t, `cublas` a cublasHandle_t; both names are CUDA's own. All work is put on the stream, which comes last
   but for the error in every signature; nothing is allocated and nothing waits for the device. */
struct CUstream_st;
struct cublasContext;
typedef struct CUstream_st *cf_cuda_stream;

typedef enum cf_dtype {
    CF_DTYPE_DEFAULT = 0,         /* CF_DTYPE_BF16 */
    CF_DTYPE_BF16,
    CF_DTYPE_FP16,
    CF_DTYPE_FP32                 /* for correctness, not for speed */
} cf_dtype;

typedef enum cf_attention_path {
    CF_ATTENTION_AUTO = 0,        /* the fastest path that can do the problem on the device */
    CF_ATTENTION_UNFUSED,         /* cuBLAS products around a masked softmax: any type and head size; needs `cublas` */
    CF_ATTENTION_MMA              /* fused, mma.sync: 16-bit types, head sizes to 128, compute capability 8.0 and up */
} cf_attention_path;

/* "auto", "unfused", "mma"; "?" for anything else. */
CHUNKFLOW_API const char *cf_attention_path_name(cf_attention_path path);

/* One attention problem: the slices of one chunk. Slice s has queries cu_seqlens_q[s] .. cu_seqlens_q[s + 1] and keys
   likewise, as many of either as you like, also none. The mask is aligned bottom-right: with Sq queries and Sk keys,
   query i sees key j if j <= i + Sk - Sq; so a carried prefix is nothing but more keys than queries. cf_metadata has
   the arrays. Query head h uses key head h / (n_heads / n_kv_heads). Zero means default in every member. */
typedef struct cf_attention_desc {
    int64_t n_heads;              /* query heads; must be given */
    int64_t n_kv_heads;           /* 0: n_heads; must divide n_heads */
    int64_t head_size;            /* a multiple of 8, at most 256; must be given. 64 and 128 are the fast ones */
    int64_t n_slices;
    const int32_t *cu_seqlens_q;  /* (n_slices + 1) in host memory, from 0, not falling */
    const int32_t *cu_seqlens_k;  /* likewise */
    const int32_t *starts_q;      /* (n_slices) row of each slice's first query, where slices are padded (cf_metadata's
                                     padded twins); NULL: cu_seqlens_q. Slices must not overlap */
    const int32_t *starts_k;      /* likewise for keys */
    cf_dtype dtype;               /* of q, k, v, out and their gradients, but dk and dv are fp32 */
    int full;                     /* 0: causal; 1: a query sees all keys of its slice */
    int64_t window;               /* a query sees the last `window` keys up to its own place, itself included (key
                                     j > i + Sk - Sq - window). 0: no limit */
    double scale;                 /* of q . k before the softmax. 0: 1 / sqrt(head_size) */
    double softcap;               /* c: scores become c x tanh(score / c). 0: off */
    int deterministic;            /* 1: dq has the same bits in every run, for seven products instead of five (MMA);
                                     everything else always has */
    cf_attention_path path;       /* CF_ERROR_ARGUMENT if it cannot do the problem: never another one in silence */
    int64_t arch;                 /* compute capability x 10 of the device that will run it; 0: the current device's */
} cf_attention_desc;

/* A prepared problem: what every layer of a chunk shares. Made by cf_attention_prepare in your memory; read only. */
typedef struct cf_attention {
    cf_attention_desc desc;       /* defaults filled in; its arrays are copies inside this object */
    cf_attention_path path;       /* what will run */
    int64_t pairs;                /* visible (query, key) pairs of one head: a forward takes 4 x pairs x n_heads x
                                     head_size floating-point operations, a backward 2.5 times that */
    int64_t rows_q, rows_k;       /* rows that the slices span: end of the last one */
    size_t forward_bytes;         /* of device workspace */
    size_t backward_bytes;
    const void *tiles;            /* the list of work, longest first: copy these bytes to the device ... */
    size_t tiles_bytes;           /* ... once a chunk, and give their address as cf_attention_tensors.tiles. May be 0 */
    int64_t n_forward_tiles;      /* entries of that list, for one key head */
    int64_t n_row_tiles;
    int64_t n_key_tiles;          /* with at least one visible pair */
    int64_t n_all_key_tiles;
} cf_attention;

/* cf_attention_size: bytes of host memory, aligned to CF_MEMORY_ALIGNMENT, that cf_attention_prepare needs. If you copy
   `tiles` to the device asynchronously, put the object into pinned memory. Neither call touches the device, but to ask
   for its compute capability where arch is 0. Errors: CF_ERROR_ARGUMENT, CF_ERROR_LIMIT (more than 2^30 rows, or rows x
   heads per key head), CF_ERROR_SPACE, CF_ERROR_DEVICE (arch is 0 and there is no device). Outputs are untouched on
   failure. */
CHUNKFLOW_API cf_result cf_attention_size(const cf_attention_desc *desc, size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_attention_prepare(const cf_attention_desc *desc, void *memory, size_t bytes,
                                             const cf_attention **out, cf_error *error);

/* A (rows, heads, head_size) array on the device, its last dimension contiguous. The address must be a multiple of 16,
   the strides (in elements) of 8 for 16-bit numbers and of 4 for fp32. */
typedef struct cf_tensor {
    void *data;
    int64_t row_stride;           /* 0: heads x head_size */
    int64_t head_stride;          /* 0: head_size */
} cf_tensor;

/* The arrays of one call. Rows outside every slice are neither read nor written, in any array. */
typedef struct cf_attention_tensors {
    cf_tensor q, k, v;            /* read */
    cf_tensor out;                /* written by the forward, read by the backward. 0 where a query sees no key */
    float *lse;                   /* (n_heads, lse_stride) natural log of the sum of exp(score); -inf where a query sees
                                     no key. Written by the forward (NULL: not wanted), read by the backward */
    int64_t lse_stride;           /* from head to head. 0: rows_q */
    cf_tensor dout;               /* read by the backward */
    cf_tensor dq;                 /* written by the backward */
    cf_tensor dk, dv;             /* fp32 accumulators, by key head: the backward adds to them */
    int overwrite;                /* 1: the backward writes dk and dv instead, 0 where no query sees a key */
    const void *tiles;            /* cf_attention.tiles, on the device */
    void *workspace;              /* at least forward_bytes or backward_bytes on the device, aligned to 256 */
    size_t workspace_bytes;
    struct cublasContext *cublas; /* for CF_ATTENTION_UNFUSED. Its stream is set to `stream` if it is another */
} cf_attention_tensors;

/* Errors: CF_ERROR_ARGUMENT (a missing or misaligned array), CF_ERROR_SPACE (workspace), CF_ERROR_DEVICE (CUDA or
   cuBLAS refused a launch; error->got is its number). A kernel's own failure shows where the caller next asks the device. */
CHUNKFLOW_API cf_result cf_attention_forward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                             cf_cuda_stream stream, cf_error *error);
CHUNKFLOW_API cf_result cf_attention_backward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                              cf_cuda_stream stream, cf_error *error);

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
    static const char *const names[CF_SCHEDULE_COUNT] = {"?", "paper"};
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
    if (full.k == 0) full.k = 1;
    return full;
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

static cf_result cf__check_schedule_desc(const cf_plan *plan, const cf_schedule_desc *desc, cf_error *error) {
    cf_result result;
    if ((result = cf__range((int64_t)desc->kind, 0, CF_SCHEDULE_COUNT - 1, "kind", error)) != CF_OK) return result;
    if ((result = cf__range((int64_t)desc->replay, 0, CF_REPLAY_COUNT - 1, "replay", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_stages, 1, 1, "n_stages", error)) != CF_OK) return result;
    if ((result = cf__range(desc->k, 1, INT64_MAX, "k", error)) != CF_OK) return result;
    return cf__range(desc->rank, 0, plan->n_ranks - 1, "rank", error);
}

/* Counts the actions of the rank, and checks that its chunks form whole units. */
static cf_result cf__count_actions(const cf_plan *plan, const cf_schedule_desc *desc, int64_t *n_actions,
                                   cf_error *error) {
    int64_t id = desc->rank * plan->n_steps, end = id + plan->n_steps, n;
    *n_actions = 0;
    for (; id < end; id += n) {
        n = cf__unit_chunks(plan, id);
        if (n == 0)
            return cf__fail(error, CF_ERROR_PLAN, "chunks.group", id, -1, plan->chunks[id].group,
                            "chunks and groups disagree");
        *n_actions += 2 * n + cf__max(0, n - desc->k);
    }
    return CF_OK;
}

static cf_result cf__schedule_start(const cf_plan *plan, const cf_schedule_desc *given, cf_schedule_desc *desc,
                                    int64_t *n_actions, cf_error *error) {
    cf_result result;
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (given == NULL) return cf__fail_null(error, "desc");
    *desc = cf_schedule_defaults(given);
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__check_schedule_desc(plan, desc, error)) != CF_OK) return result;
    return cf__count_actions(plan, desc, n_actions, error);
}

static cf_schedule *cf__layout_schedule(cf_schedule *header, cf__carver *carver) {
    cf_schedule *schedule = (cf_schedule *)cf__take(carver, 1, sizeof(cf_schedule));
    header->first = (int64_t *)cf__take(carver, header->n_stages + 1, sizeof(int64_t));
    header->actions = (cf_action *)cf__take(carver, header->n_actions, sizeof(cf_action));
    return schedule;
}

static cf_schedule cf__schedule_header(const cf_plan *plan, const cf_schedule_desc *desc, int64_t n_actions) {
    cf_schedule schedule;
    memset(&schedule, 0, sizeof schedule);
    schedule.kind = desc->kind;
    schedule.replay = desc->replay;
    schedule.n_stages = desc->n_stages;
    schedule.n_virtual = 1;
    schedule.k = desc->k;
    schedule.rank = desc->rank;
    schedule.n_chunks = plan->n_chunks;
    schedule.n_actions = n_actions;
    return schedule;
}

static void cf__put_action(cf_action **next, cf_pass pass, int64_t chunk, int keep) {
    cf_action *action = (*next)++;
    memset(action, 0, sizeof *action);
    action->chunk = (int32_t)chunk;
    action->pass = (uint8_t)pass;
    action->keep = (uint8_t)keep;
}

/* Algorithm 2 for one unit of n chunks, the first being `chunk`. A standalone chunk is a unit of one. */
static void cf__put_unit(cf_action **next, int64_t chunk, int64_t n, int64_t k) {
    int64_t dropped = cf__max(0, n - k), i;
    for (i = 0; i < n; i++) cf__put_action(next, CF_F, chunk + i, i >= dropped);
    for (i = n - 1; i >= dropped; i--) cf__put_action(next, CF_B, chunk + i, 0);
    for (i = dropped - 1; i >= 0; i--) {
        cf__put_action(next, CF_R, chunk + i, 1);
        cf__put_action(next, CF_B, chunk + i, 0);
    }
}

static void cf__write_schedule(const cf_plan *plan, cf_schedule *schedule) {
    int64_t id = schedule->rank * plan->n_steps, end = id + plan->n_steps;
    cf_action *next = schedule->actions;
    for (; id < end; id += cf__unit_chunks(plan, id))
        cf__put_unit(&next, id, cf__unit_chunks(plan, id), schedule->k);
    schedule->first[0] = 0;
    schedule->first[1] = schedule->n_actions;
}

CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error) {
    cf_schedule_desc full;
    cf_schedule header;
    cf__carver carver = {NULL, 0, 0};
    int64_t n_actions;
    cf_result result = cf__schedule_start(plan, desc, &full, &n_actions, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    header = cf__schedule_header(plan, &full, n_actions);
    cf__layout_schedule(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error) {
    cf_schedule_desc full;
    cf_schedule header, *schedule;
    cf__carver carver = {NULL, 0, 0};
    int64_t n_actions;
    cf_result result = cf__schedule_start(plan, desc, &full, &n_actions, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    header = cf__schedule_header(plan, &full, n_actions);
    cf__layout_schedule(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    if ((result = cf__check_memory(memory, bytes, carver.used, error)) != CF_OK) return result;
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    schedule = cf__layout_schedule(&header, &carver);
    *schedule = header;
    cf__write_schedule(plan, schedule);
    *out = schedule;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error) {
    cf_allocator allocator;
    size_t bytes;
    void *memory;
    cf_result result = cf_schedule_size(plan, desc, &bytes, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(desc->allocator, &allocator, error)) != CF_OK) return result;
    memory = allocator.alloc(bytes, allocator.user);
    if (memory == NULL) return cf__fail_memory(error, bytes);
    result = cf_schedule_into(plan, desc, memory, bytes, out, error);
    if (result == CF_OK) (*out)->allocator = allocator;
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

static void cf__write_action_json(cf__writer *w, const cf_action *a) {
    cf__print(w, "{\"pass\": \"%s\", \"chunk\": %d, \"stage\": %d", cf_pass_name((cf_pass)a->pass), (int)a->chunk,
              (int)a->stage);
    if (a->pass == CF_F || a->pass == CF_R) cf__print(w, ", \"keep\": %s", a->keep ? "true" : "false");
    cf__print(w, "}");
}

CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, cf_write_fn write, void *user,
                                               cf_error *error) {
    cf__writer w;
    int64_t stage, i;
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    if (write == NULL) return cf__fail_null(error, "write");
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
    cf__print(&w, "\n  \"actions\": [");
    for (stage = 0; stage < schedule->n_stages; stage++) {
        cf__print(&w, "%s\n   [", stage > 0 ? "," : "");
        for (i = schedule->first[stage]; i < schedule->first[stage + 1] && w.code == 0; i++) {
            cf__print(&w, "%s\n    ", i > schedule->first[stage] ? "," : "");
            cf__write_action_json(&w, &schedule->actions[i]);
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
