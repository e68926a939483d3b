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
       cost numbers            cf_cost_seconds, cf_cost_estimate (model x GPU), cf_cost_fit (your measurements)
       describe a model        cf_model_find, cf_model_at, cf_model_validate, cf_model_parameters, cf_stage_parameters,
         and a machine         cf_stage_layers, cf_parallel_validate, cf_gpu_find, cf_gpu_at
       size its memory         cf_memory_estimate, cf_memory_token_bytes, cf_memory_check_limit

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

   Sections, each found by its tag: >>base >>cost >>pack >>memory >>schedule >>run >>write, first declared, then
   implemented in the same order. A section calls only sections above it. */

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
   >>cost    seconds of a pass; models and GPUs as data
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

/* ---- measured costs ---- */

/* One measured pass. */
typedef struct cf_sample {
    int pass;       /* a cf_pass, CF_F .. CF_W */
    int64_t tokens; /* padded tokens of the chunk */
    int64_t pairs;  /* attention pairs of the chunk */
    double seconds; /* more than 0 */
} cf_sample;

/* How well the fit of one pass agrees with its samples. Errors are relative: predicted / measured - 1. */
typedef struct cf_fit {
    int64_t n_samples;    /* 0: the pass was not measured and its cost is left all zero */
    double mean_error;    /* signed */
    double mean_absolute; /* of the absolute errors */
    double worst_error;   /* signed; the largest in absolute value */
    int64_t worst_sample; /* its index; -1 if there are no samples */
} cf_fit;

/* Fits constant, per_token and per_pair of every measured pass to its samples: least squares of the relative errors,
   with no term below zero (all eight sets of terms are tried, so the result is the exact optimum and depends on nothing
   but the samples and their order). Samples of several passes may be mixed. Passes without samples stay all zero, which
   cf_timing derives from the others.

   fits: 5 records, by pass; NULL is allowed. cost and fits are untouched on failure. Errors: CF_ERROR_ARGUMENT names
   the member and the sample at fault ("samples.seconds"); or "samples" with the pass in error->item where a pass has
   fewer than three samples (error->got of them); or "samples.tokens" or "samples.pairs" where these do not vary, or
   vary together, so that the terms cannot be told apart. CF_ERROR_OVERFLOW where a sum leaves the range of double. */
CHUNKFLOW_API cf_result cf_cost_fit(const cf_sample *samples, int64_t n, cf_stage_cost *cost, cf_fit *fits,
                                    cf_error *error);

/* ---- models ---- */

#define CF_MAX_LAYERS 65536
#define CF_MAX_WIDTH ((int64_t)1 << 24) /* hidden, and heads x head_dim */
#define CF_MAX_FFN ((int64_t)1 << 26)
#define CF_MAX_VOCAB ((int64_t)1 << 28)

/* A dense decoder: RMSNorm, grouped-query attention with rotary positions, gated MLP. A mixture of experts cannot be
   described, and must not be described by its dense part. */
typedef struct cf_model {
    const char *name;
    int64_t layers;
    int64_t hidden;
    int64_t heads;    /* query heads */
    int64_t kv_heads; /* key and value heads; divides heads */
    int64_t head_dim; /* 0: hidden / heads. Qwen3 gives it outright, and there heads x head_dim need not be hidden */
    int64_t ffn;      /* width of the MLP */
    int64_t vocab;
    int tied;         /* 1: the output head is the embedding */
    int qkv_bias;     /* 1: biases on the Q, K and V projections */
    int out_bias;     /* 1: a bias on the attention output projection */
    int mlp_bias;     /* 1: biases in the MLP */
    int qk_norm;      /* 1: an RMSNorm over each head of Q and K */
    int no_gate;      /* 1: two MLP matrices; 0: three (SwiGLU) */
} cf_model;

/* The model of this name ("qwen2.5-7b"; letter case does not matter), or NULL. cf_model_at: number `index` of the
   table, NULL past its end. Both return static data. */
CHUNKFLOW_API const cf_model *cf_model_find(const char *name);
CHUNKFLOW_API const cf_model *cf_model_at(int64_t index);

/* Checks a description. Errors: CF_ERROR_ARGUMENT or CF_ERROR_LIMIT with the member ("model.kv_heads") and, in wanted,
   the nearest value that works. */
CHUNKFLOW_API cf_result cf_model_validate(const cf_model *model, cf_error *error);

/* Numbers of parameters. */
typedef struct cf_parameters {
    int64_t embedding;
    int64_t attention; /* projections and their biases */
    int64_t mlp;       /* with biases */
    int64_t norms;
    int64_t head;      /* 0 where it is tied to an embedding in the same place */
    int64_t total;     /* of the five above */
} cf_parameters;

/* Counts the whole model, exactly. */
CHUNKFLOW_API cf_result cf_model_parameters(const cf_model *model, cf_parameters *out, cf_error *error);

/* ---- splitting a model over GPUs ---- */

/* What a trainer drops in forward and makes again in backward, beside whole chunks, which are the schedule's matter. */
typedef enum cf_recompute {
    CF_RECOMPUTE_DEFAULT = 0, /* CF_RECOMPUTE_NONE */
    CF_RECOMPUTE_NONE,
    CF_RECOMPUTE_SELECTIVE,   /* the inside of attention: scores, or with fused attention its row statistics */
    CF_RECOMPUTE_FULL,        /* whole layers; each keeps only its input */
    CF_RECOMPUTE_COUNT
} cf_recompute;

/* "none", "selective", "full"; "?" for anything else. */
CHUNKFLOW_API const char *cf_recompute_name(cf_recompute recompute);

/* Zero means default in every member. */
typedef struct cf_parallel {
    int64_t tp;              /* tensor parallel; 0: 1. Must divide heads and ffn, and divide kv_heads or be a multiple
                                of it (then K and V heads are replicated) */
    int64_t pp;              /* pipeline stages; 0: 1 */
    int64_t n_virtual;       /* virtual stages of each; 0: 1. Virtual stage v x pp + s is on stage s */
    int64_t dp;              /* data-parallel ranks; 0: 1 */
    int64_t zero;            /* ZeRO level, over dp: 0 none, 1 optimizer states (Megatron's distributed optimizer), 2
                                gradients too, 3 parameters too */
    int no_sequence;         /* 1: no sequence parallelism. 0: what tensor parallelism leaves whole (norms, residuals)
                                is split over tp by tokens */
    cf_recompute recompute;  /* 0: none */
    const int64_t *layers;   /* (pp x n_virtual) layers of each virtual stage; NULL: even. What does not divide goes one
                                each to the second, third, ... virtual stage, then to the first, and never to the last,
                                which has the output head */
    int64_t vocab_multiple;  /* vocab is padded to a multiple of this x tp (Megatron: 128); 0: 1 */
} cf_parallel;

/* A copy with every default filled in. */
CHUNKFLOW_API cf_parallel cf_parallel_defaults(const cf_parallel *parallel);

/* Checks a split of a model. Errors name the member ("parallel.tp") and give the nearest value that works. */
CHUNKFLOW_API cf_result cf_parallel_validate(const cf_model *model, const cf_parallel *parallel, cf_error *error);

/* Layers of one virtual stage, and the parameters that one GPU of it holds before ZeRO takes its share. A tied head on
   another stage than the embedding is a copy and is counted as head; replicated norms, biases and K and V heads are
   counted on each GPU that has them. Errors: as cf_parallel_validate, and "stage". */
CHUNKFLOW_API cf_result cf_stage_layers(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                        int64_t *layers, cf_error *error);
CHUNKFLOW_API cf_result cf_stage_parameters(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                            cf_parameters *out, cf_error *error);

/* ---- GPUs ---- */

/* Rates are per GPU and, for links, per direction. Peaks are the maker's figures; fractions are what good kernels
   reach. */
typedef struct cf_gpu {
    const char *name;
    double flops;              /* dense bf16 peak, FLOP/s */
    double gemm;               /* fraction of it in large matrix products */
    double attention_forward;  /* fraction of it in fused causal attention */
    double attention_backward;
    int64_t processors;        /* streaming multiprocessors */
    double bandwidth;          /* device memory, bytes/s */
    int64_t memory;            /* device memory, bytes */
    double nvlink;             /* to GPUs of the same node, bytes/s */
    double network;            /* to other nodes, bytes/s */
    double pcie;               /* to host memory, bytes/s */
    double link;               /* fraction of the three rates above that transfers reach */
    double launch;             /* seconds lost around each kernel: launch gap, ramp-up, tail. Where Python launches one
                                  by one, and norms, casts and copies are kernels of their own, 20 to 40 microseconds
                                  for each that is counted here is closer than the table's 5 */
    double latency;            /* seconds before the first byte of a collective or a send arrives */
} cf_gpu;

/* The GPU of this name ("h100-80g"; letter case does not matter), or NULL; number `index` of the table, or NULL. */
CHUNKFLOW_API const cf_gpu *cf_gpu_find(const char *name);
CHUNKFLOW_API const cf_gpu *cf_gpu_at(int64_t index);

/* ---- costs from numbers ---- */

/* What to estimate. Zero means default in every member; model and gpu must be given. */
typedef struct cf_cost_desc {
    const cf_model *model;
    const cf_gpu *gpu;
    cf_parallel parallel;
    int64_t gpus_per_node;   /* 0: 8. Ranks are laid out tensor-parallel first, then data-parallel, then pipeline */
    int64_t chunk_size;      /* usual tokens of a chunk; 0: many. Where given, a pair costs what it does in such a
                                chunk: the carried state is read and its gradient added to once for each chunk, and
                                forward attention loses half a wave of blocks of 128 queries a head over the
                                processors */
} cf_cost_desc;

/* Seconds of every pass on every virtual stage, from FLOPs and rates.

     constant   kernels x launch, collectives x latency, and what a pass reads and writes whatever its tokens are
                (weights, gradient accumulators). A matrix product whose rate grows with its rows m as m / (m + m0)
                takes as long as m + m0 rows at full rate, so this is also where small chunks lose
     per_token  2 FLOPs a weight (backward 4), element-wise traffic, tensor-parallel transfers (not overlapped), and
                the output head
     per_pair   4 x heads x head_dim FLOPs a layer; 10 in backward (five products for two: Dao, FlashAttention-2, 2023)

   CF_RECOMPUTE_SELECTIVE adds attention forward to backward, CF_RECOMPUTE_FULL all of forward but the head. B = I + W.

   stages: (pp x n_virtual), count of them; timing: all else that a schedule needs, with timing->stages = stages;
   step_seconds (NULL is allowed): once an iteration, the gradient exchange over dp and the optimizer's traffic on the
   slowest stage. All are untouched on failure. Errors: as cf_model_validate and cf_parallel_validate, or the member. */
CHUNKFLOW_API cf_result cf_cost_estimate(const cf_cost_desc *desc, cf_stage_cost *stages, int64_t count,
                                         cf_timing *timing, double *step_seconds, cf_error *error);

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

   *out: a new plan, to be given to cf_plan_free; untouched on failure. Time is near linear (a million lengths in tens of
   milliseconds). The plan depends only on the arguments, so each data-parallel rank can compute it for itself.

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

/* Tokens that a chunk appends to its group's state: the length of its first slice, or 0 if it has no group or there is no
   such chunk. */
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
   >>memory    bytes of a stage
   ================================================================================================================ */

/* How the loss is computed: what it keeps for backward and how much it needs at its peak, in bytes per logit. */
typedef enum cf_loss {
    CF_LOSS_DEFAULT = 0, /* CF_LOSS_PARALLEL */
    CF_LOSS_PARALLEL,    /* vocabulary-parallel, as in Megatron-LM: bf16 logits, a float copy, a float softmax that
                            stays. Keeps 4, peak 10 */
    CF_LOSS_EAGER,       /* separate operations, as in plain PyTorch: a float log-softmax stays; backward makes two
                            float gradients beside it and the bf16 logits. Keeps 4, peak 14 */
    CF_LOSS_FUSED,       /* one kernel that turns the bf16 logits into their gradient in place. Keeps 2, peak 2 */
    CF_LOSS_CHUNKED,     /* head and loss together, a few rows at a time; only the gradient of the head's input stays (2
                            bytes x hidden). No logits at all */
    CF_LOSS_COUNT
} cf_loss;

/* "parallel", "eager", "fused", "chunked"; "?" for anything else. */
CHUNKFLOW_API const char *cf_loss_name(cf_loss loss);

#define CF_RUNTIME_BYTES ((int64_t)2 << 30) /* context, loaded kernels, buffers of libraries and of NCCL */
#define CF_FRAGMENTATION 10                 /* percent */

/* What to size. Zero means default in every member; model must be given. */
typedef struct cf_memory_desc {
    const cf_model *model;
    cf_parallel parallel;
    cf_loss loss;                 /* 0: parallel */
    int unfused;                  /* 1: norms and SwiGLU as separate operations that each keep their results (float
                                     copies of the norms' inputs, the normalised rows, the gate's activation) */
    int unfused_attention;        /* 1: attention writes out its scores; count cf_memory_load.live_scores then */
    int64_t activation_bytes;     /* of each element of activations, boundaries and logits; 0: 2 (bf16) */
    int64_t parameter_bytes;      /* of each parameter; 0: 2 (bf16) */
    int64_t gradient_bytes;       /* 0: 4 (float) */
    int64_t optimizer_bytes;      /* 0: 12 (float master copy, two Adam moments) */
    int64_t state_bytes;          /* of each element of K and V in the state; 0: 2 */
    int64_t state_gradient_bytes; /* of each element of their gradients; 0: 4 (float accumulators); 2 for bf16 */
    int64_t runtime_bytes;        /* what no formula here covers, in bytes; 0: CF_RUNTIME_BYTES. It is never nothing:
                                     measure an idle process of yours and put the number here */
    int64_t fragmentation;        /* percent of activations, logits, working memory, state and inputs that the allocator
                                     loses in gaps; 0: CF_FRAGMENTATION; -1: none (one arena, carved once) */
} cf_memory_desc;

/* A copy with every default filled in. */
CHUNKFLOW_API cf_memory_desc cf_memory_defaults(const cf_memory_desc *desc);

/* Bytes on one GPU of a virtual stage, for each token of ... */
typedef struct cf_token_bytes {
    int64_t activations;    /* a chunk whose activations are kept */
    int64_t state;          /* state: K and V of this stage's layers */
    int64_t state_gradient; /* state gradient */
    int64_t boundary;       /* what goes from stage to stage; also a stage input kept for local replay */
    int64_t logits;         /* the chunk that is at its loss, beyond what stays (last virtual stage; 0 elsewhere) */
    int64_t working;        /* the chunk that is in backward: gradients of one layer's activations, and that layer's
                               recomputed activations */
    int64_t buffers;        /* the chunk that is in any pass: gathered rows of tensor parallelism, sends and receives */
} cf_token_bytes;

/* Activations, in bytes per layer and token with two bytes an element (q = heads x head_dim / tp, kv = K heads on this
   GPU x head_dim, f = ffn / tp, s = tp with sequence parallelism, else 1):
     8 h / s  inputs of both norms, and of the projections after them
     4 q      Q, attention output;  4 kv  K, V (again, where they are in the state too)
     4 heads / tp  float row statistics of attention (not with selective recompute)
     6 f      gate, up, product (4 f without gate)
     unfused: 8 h / s more (each norm: float input in place of bf16, and the normalised rows), 2 f (the activated gate)
     unfused attention: 2 heads / tp for each score in place of the statistics (nothing with selective recompute)
   or 2 h / s with full recompute. First stage: 8 (token ids). Last stage: 4 h / s (final norm) and what the loss keeps.
   This is Korthikanti et al., Reducing Activation Recomputation (2022), Table 2, without dropout masks, with grouped
   heads and a gate. Errors: as cf_memory_estimate. */
CHUNKFLOW_API cf_result cf_memory_token_bytes(const cf_memory_desc *desc, int64_t stage, cf_token_bytes *out,
                                              cf_error *error);

/* What one virtual stage holds at the moment in question: the peaks of a simulated timeline, or counts of your own. All
   in tokens, and none negative. */
typedef struct cf_memory_load {
    int64_t live_tokens;           /* padded tokens of all chunks whose activations are kept */
    int64_t chunk_tokens;          /* padded tokens of the largest chunk that may be in a pass */
    int64_t state_tokens;          /* tokens whose K and V are in device memory */
    int64_t state_gradient_tokens; /* tokens that have gradients of K and V in device memory */
    int64_t offloaded_tokens;      /* tokens whose K and V are in host memory */
    int64_t input_tokens;          /* padded tokens of kept stage inputs (local replay) */
    int64_t live_scores;           /* unfused attention: sum over live chunks of tokens x (prefix + tokens) */
    int64_t chunk_scores;          /* the same of the largest chunk in a pass */
} cf_memory_load;

/* What a stage's memory goes to; bytes on one GPU. */
#define CF_MEMORY_TERMS(X)                                                                   \
    X(parameters, "parameters")                                                              \
    X(gradients, "gradients")                                                                \
    X(optimizer, "optimizer states")                                                         \
    X(activations, "activations")                                                            \
    X(logits, "logits and loss")                                                             \
    X(working, "backward of one layer")                                                      \
    X(state, "state (K, V)")                                                                 \
    X(state_gradient, "state gradient")                                                      \
    X(inputs, "kept stage inputs")                                                           \
    X(buffers, "communication buffers")                                                      \
    X(runtime, "runtime, not modelled")

typedef struct cf_memory_report {
#define CF__MEMBER(name, text) int64_t name;
    CF_MEMORY_TERMS(CF__MEMBER)
#undef CF__MEMBER
    int64_t total;    /* sum of all above */
    int64_t host;     /* offloaded state, in host memory; not part of total */
    int at_loss;      /* 1: the peak is at the loss, where logits exist and no layer is in backward (working is 0); 0:
                         in a layer's backward, where logits are gone (logits is 0) */
} cf_memory_report;

/* Adds up every stage. loads: (pp x n_virtual) by virtual stage; reports: (pp), by stage, with its virtual stages
   summed up; counts: of both. Parameters, gradients and optimizer states by bytes x cf_stage_parameters, divided over
   dp as parallel.zero says (rounded up); with ZeRO 3 buffers hold two gathered layers. Reports are untouched on
   failure. Errors: as cf_model_validate and cf_parallel_validate, CF_ERROR_ARGUMENT with the member, or
   CF_ERROR_OVERFLOW. */
CHUNKFLOW_API cf_result cf_memory_estimate(const cf_memory_desc *desc, const cf_memory_load *loads, int64_t n_loads,
                                           cf_memory_report *reports, int64_t n_reports, cf_error *error);

/* Checks a byte limit before anything is searched: CF_ERROR_LIMIT on "limit_bytes" if even one chunk of chunk_tokens
   does not fit some stage, with the smallest limit that would do in error->wanted and that stage in error->item. */
CHUNKFLOW_API cf_result cf_memory_check_limit(const cf_memory_desc *desc, int64_t chunk_tokens, int64_t limit_bytes,
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

   One stage: units run in plan order. An idle chunk is F B too, with no tokens, so that all ranks make the same steps. A standalone chunk is F B. A group of N <= K chunks is F1 .. FN, BN .. B1. A group of
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
   kept activations or before later chunks of its group are through, a forward whose prefix is missing, a chunk out of range
   ...) is CF_ERROR_SCHEDULE with the position in error->item; so is one that leaves a chunk out (item -1). CF_ERROR_CALLBACK carries the callback's number in error->got; CF_ERROR_CANCELLED, CF_ERROR_MEMORY and
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

/* The one place that fills in an error record. */
static void cf__record(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted, int64_t got,
                       const char *why) {
    char place[32] = "";
    if (item >= 0) (void)snprintf(place, sizeof place, "[%lld]", (long long)item);
    error->code = code;
    error->item = item;
    error->field = field;
    error->wanted = wanted;
    error->got = got;
    (void)snprintf(error->text, sizeof error->text, "%s%s: %s (wanted %lld, got %lld)", field, place, why,
                   (long long)wanted, (long long)got);
}

/* Returns code, so that a failing function can return in one line. Inline, so that compilers see that it is not CF_OK and
   do not suspect outputs of being used unset. */
static inline cf_result cf__fail(cf_error *error, cf_result code, const char *field, int64_t item, int64_t wanted,
                                 int64_t got, const char *why) {
    if (error != NULL) cf__record(error, code, field, item, wanted, got, why);
    return code;
}

/* A pointer that must not be NULL, or a buffer that is too small, reads as 1 wanted, 0 got. */
static inline cf_result cf__fail_null(cf_error *error, const char *field) {
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, 1, 0, "must not be NULL");
}

static inline cf_result cf__fail_memory(cf_error *error, size_t bytes) {
    return cf__fail(error, CF_ERROR_MEMORY, "allocator", -1, (int64_t)bytes, 0, "no memory");
}

/* Checked arithmetic on numbers that are not negative: 1 and *out on success, 0 where the result would not fit. */
static int cf__add(int64_t a, int64_t b, int64_t *out) {
    if (a > INT64_MAX - b) return 0;
    *out = a + b;
    return 1;
}

static int cf__mul(int64_t a, int64_t b, int64_t *out) {
    if ((a | b) > INT32_MAX && b != 0 && a > INT64_MAX / b) return 0; /* a division is dear: only for large factors */
    *out = a * b;
    return 1;
}

static int64_t cf__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t cf__max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t cf__div_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static int64_t cf__round_up(int64_t a, int64_t multiple) { /* packing spends its time here: no division for the usual 1 */
    return multiple == 1 ? a : cf__div_up(a, multiple) * multiple;
}

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

/* ---- measured costs ----

   Every sample is divided by its seconds, so that the target of each row is 1 and squares are of relative errors, and
   each column is scaled to at most 1. Three columns are few enough to try every set of terms that may be above zero. */

#define CF__TERMS 3               /* constant, tokens, pairs */
#define CF__INDEPENDENT 1e-10     /* least square of the part of a column that the columns before it do not explain */
#define CF__PASSES 5              /* CF_F .. CF_W */

typedef struct cf__normal {
    double scale[CF__TERMS];
    double gram[CF__TERMS][CF__TERMS]; /* columns times columns */
    double target[CF__TERMS];          /* columns times ones */
} cf__normal;

static void cf__sample_row(const cf_sample *sample, const double *scale, double *row) {
    row[0] = 1 / sample->seconds / scale[0];
    row[1] = (double)sample->tokens / sample->seconds / scale[1];
    row[2] = (double)sample->pairs / sample->seconds / scale[2];
}

/* Sums over the samples of one pass. Returns 0 where something is not finite. */
static int cf__normal_sums(const cf_sample *samples, int64_t n, int pass, cf__normal *normal) {
    static const double unscaled[CF__TERMS] = {1, 1, 1};
    double row[CF__TERMS];
    int64_t s;
    int i, j;
    memset(normal, 0, sizeof *normal);
    for (s = 0; s < n; s++) {
        if (samples[s].pass != pass) continue;
        cf__sample_row(&samples[s], unscaled, row);
        for (i = 0; i < CF__TERMS; i++) {
            if (!cf__is_cost(row[i])) return 0;
            if (row[i] > normal->scale[i]) normal->scale[i] = row[i];
        }
    }
    for (i = 0; i < CF__TERMS; i++)
        if (normal->scale[i] < DBL_MIN) normal->scale[i] = 1; /* an empty column; found out by its pivot */
    for (s = 0; s < n; s++) {
        if (samples[s].pass != pass) continue;
        cf__sample_row(&samples[s], normal->scale, row);
        for (i = 0; i < CF__TERMS; i++) {
            normal->target[i] += row[i];
            for (j = 0; j < CF__TERMS; j++) normal->gram[i][j] += cf__product(row[i], row[j]);
        }
    }
    return 1;
}

/* Solves for the terms in `set` (bits), the others being 0. Returns CF__TERMS, or the first term of the set that
   depends on those before it. Elimination without pivoting is sound: the matrix is symmetric and not negative. */
static int cf__solve_terms(const cf__normal *normal, int set, double *x) {
    double a[CF__TERMS][CF__TERMS + 1];
    int index[CF__TERMS], n = 0, i, j, k;
    for (i = 0; i < CF__TERMS; i++) {
        x[i] = 0;
        if (set >> i & 1) index[n++] = i;
    }
    for (i = 0; i < n; i++) {
        for (j = 0; j < n; j++) a[i][j] = normal->gram[index[i]][index[j]];
        a[i][n] = normal->target[index[i]];
    }
    for (i = 0; i < n; i++) {
        if (!(a[i][i] > cf__product(CF__INDEPENDENT, normal->gram[index[i]][index[i]]))) return index[i];
        for (k = i + 1; k < n; k++) {
            double factor = a[k][i] / a[i][i];
            for (j = i; j <= n; j++) a[k][j] -= cf__product(factor, a[i][j]);
        }
    }
    for (i = n - 1; i >= 0; i--) {
        double rest = a[i][n];
        for (j = i + 1; j < n; j++) rest -= cf__product(a[i][j], x[index[j]]);
        x[index[i]] = rest / a[i][i];
    }
    return CF__TERMS;
}

static double cf__relative_error(const cf_pass_cost *cost, const cf_sample *sample) {
    return cf_cost_seconds(cost, sample->tokens, sample->pairs) / sample->seconds - 1;
}

static double cf__sum_of_squares(const cf_sample *samples, int64_t n, int pass, const cf_pass_cost *cost) {
    double sum = 0;
    int64_t s;
    for (s = 0; s < n; s++) {
        if (samples[s].pass == pass) {
            double error = cf__relative_error(cost, &samples[s]);
            sum += cf__product(error, error);
        }
    }
    return sum;
}

static void cf__measure_fit(const cf_sample *samples, int64_t n, int pass, const cf_pass_cost *cost, cf_fit *fit) {
    int64_t s;
    memset(fit, 0, sizeof *fit);
    fit->worst_sample = -1;
    for (s = 0; s < n; s++) {
        double error, worst = fit->worst_error < 0 ? -fit->worst_error : fit->worst_error;
        if (samples[s].pass != pass) continue;
        error = cf__relative_error(cost, &samples[s]);
        fit->n_samples++;
        fit->mean_error += error;
        fit->mean_absolute += error < 0 ? -error : error;
        if (fit->worst_sample < 0 || (error < 0 ? -error : error) > worst) {
            fit->worst_error = error;
            fit->worst_sample = s;
        }
    }
    if (fit->n_samples == 0) return;
    fit->mean_error /= (double)fit->n_samples;
    fit->mean_absolute /= (double)fit->n_samples;
}

/* The best terms of one pass that has enough samples. */
static cf_result cf__fit_pass(const cf_sample *samples, int64_t n, int pass, cf_pass_cost *out, cf_error *error) {
    static const char *const fields[CF__TERMS] = {"samples", "samples.tokens", "samples.pairs"};
    cf__normal normal;
    cf_pass_cost best = {0, 0, 0};
    double least = DBL_MAX, x[CF__TERMS];
    int set, dependent;
    if (!cf__normal_sums(samples, n, pass, &normal))
        return cf__fail(error, CF_ERROR_OVERFLOW, "samples.seconds", pass, 0, -1, "too small for the tokens and pairs");
    dependent = cf__solve_terms(&normal, 7, x);
    if (dependent < CF__TERMS)
        return cf__fail(error, CF_ERROR_ARGUMENT, fields[dependent], pass, CF__TERMS, dependent,
                        "must vary, and not only with the terms before it; independent terms of this pass");
    for (set = 1; set < 1 << CF__TERMS; set++) {
        cf_pass_cost cost;
        double squares;
        (void)cf__solve_terms(&normal, set, x);
        if (!(x[0] >= 0 && x[1] >= 0 && x[2] >= 0)) continue;
        cost.constant = x[0] / normal.scale[0];
        cost.per_token = x[1] / normal.scale[1];
        cost.per_pair = x[2] / normal.scale[2];
        squares = cf__sum_of_squares(samples, n, pass, &cost);
        if (squares < least) {
            least = squares;
            best = cost;
        }
    }
    *out = best;
    return CF_OK;
}

static cf_result cf__check_samples(const cf_sample *samples, int64_t n, int64_t *counts, cf_error *error) {
    int64_t s;
    int pass;
    if (samples == NULL && n != 0) return cf__fail_null(error, "samples");
    if (n < CF__TERMS) return cf__fail(error, CF_ERROR_ARGUMENT, "n", -1, CF__TERMS, n, "too few samples");
    for (s = 0; s < n; s++) {
        const cf_sample *sample = &samples[s];
        if (sample->pass < 0 || sample->pass >= CF__PASSES)
            return cf__fail(error, CF_ERROR_ARGUMENT, "samples.pass", s, CF__PASSES - 1, sample->pass, "unknown pass");
        if (sample->tokens < 0)
            return cf__fail(error, CF_ERROR_ARGUMENT, "samples.tokens", s, 0, sample->tokens, "must not be negative");
        if (sample->pairs < 0)
            return cf__fail(error, CF_ERROR_ARGUMENT, "samples.pairs", s, 0, sample->pairs, "must not be negative");
        if (!(sample->seconds > 0 && sample->seconds <= DBL_MAX))
            return cf__fail(error, CF_ERROR_ARGUMENT, "samples.seconds", s, 1, 0, "must be finite and more than 0");
        counts[sample->pass]++;
    }
    for (pass = 0; pass < CF__PASSES; pass++)
        if (counts[pass] > 0 && counts[pass] < CF__TERMS)
            return cf__fail(error, CF_ERROR_ARGUMENT, "samples", pass, CF__TERMS, counts[pass],
                            "too few samples of this pass");
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_cost_fit(const cf_sample *samples, int64_t n, cf_stage_cost *cost, cf_fit *fits,
                                    cf_error *error) {
    cf_pass_cost found[CF__PASSES];
    int64_t counts[CF__PASSES] = {0, 0, 0, 0, 0};
    cf_result result;
    int pass;
    if (cost == NULL) return cf__fail_null(error, "cost");
    if ((result = cf__check_samples(samples, n, counts, error)) != CF_OK) return result;
    memset(found, 0, sizeof found);
    for (pass = 0; pass < CF__PASSES; pass++)
        if (counts[pass] > 0 && (result = cf__fit_pass(samples, n, pass, &found[pass], error)) != CF_OK) return result;
    cost->forward = found[0];
    cost->replay = found[1];
    cost->backward = found[2];
    cost->input = found[3];
    cost->weight = found[4];
    for (pass = 0; pass < CF__PASSES && fits != NULL; pass++)
        cf__measure_fit(samples, n, pass, &found[pass], &fits[pass]);
    return CF_OK;
}

/* ---- models ---- */

/* From the models' published configurations; tests hold each against its published number of parameters. */
static const cf_model cf__models[] = {
    /* name, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tied, qkv_bias, out_bias, mlp_bias, qk_norm, no_gate
       */
    {"qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, 1, 1, 0, 0, 0, 0},
    {"qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, 1, 1, 0, 0, 0, 0},
    {"qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, 1, 1, 0, 0, 0, 0},
    {"qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 0, 1, 0, 0, 0, 0},
    {"qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, 0, 1, 0, 0, 0, 0},
    {"qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, 0, 1, 0, 0, 0, 0},
    {"qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, 0, 1, 0, 0, 0, 0},
    {"qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 1, 0, 0, 0, 1, 0},
    {"qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, 1, 0, 0, 0, 1, 0},
    {"qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 1, 0, 0, 0, 1, 0},
    {"qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 0, 0, 0, 0, 1, 0},
    {"qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936, 0, 0, 0, 0, 1, 0},
    {"qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 0, 0, 0, 0, 1, 0},
    {"llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 0, 0, 0, 0, 0, 0},
    {"llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 0, 0, 0, 0, 0, 0},
    {"llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, 0, 0, 0, 0, 0, 0},
    {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 1, 0, 0, 0, 0, 0},
    {"llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, 1, 0, 0, 0, 0, 0},
};

static int cf__same_name(const char *a, const char *b) { /* ASCII letters in either case */
    for (;; a++, b++) {
        int x = *a >= 'A' && *a <= 'Z' ? *a - 'A' + 'a' : *a;
        int y = *b >= 'A' && *b <= 'Z' ? *b - 'A' + 'a' : *b;
        if (x != y) return 0;
        if (x == 0) return 1;
    }
}

CHUNKFLOW_API const cf_model *cf_model_at(int64_t index) {
    const int64_t count = (int64_t)(sizeof cf__models / sizeof cf__models[0]);
    return index >= 0 && index < count ? &cf__models[index] : NULL;
}

CHUNKFLOW_API const cf_model *cf_model_find(const char *name) {
    const cf_model *model;
    int64_t i;
    for (i = 0; name != NULL && (model = cf_model_at(i)) != NULL; i++)
        if (cf__same_name(model->name, name)) return model;
    return NULL;
}

static int64_t cf__head_dim(const cf_model *model) {
    return model->head_dim != 0 ? model->head_dim : model->hidden / model->heads;
}

static cf_result cf__range(int64_t value, int64_t least, int64_t most, const char *field, cf_error *error) {
    if (value < least) return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, least, value, "too small");
    if (value > most) return cf__fail(error, CF_ERROR_LIMIT, field, -1, most, value, "too large");
    return CF_OK;
}

/* The same for a choice among things that there are: above the last one is no limit, but a mistake. */
static cf_result cf__choice(int64_t value, int64_t first, int64_t last, const char *field, cf_error *error) {
    if (value >= first && value <= last) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, value < first ? first : last, value, "no such choice");
}

/* A value that something else bounds, which `why` names. */
static cf_result cf__bounded(int64_t value, int64_t least, int64_t most, const char *field, const char *why,
                             cf_error *error) {
    if (value < least) return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, least, value, "too small");
    if (value > most) return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, most, value, why);
    return CF_OK;
}

/* The divisor of `whole` next below value. */
static int64_t cf__divisor_below(int64_t whole, int64_t value) {
    while (value > 1 && whole % value != 0) value--;
    return value;
}

CHUNKFLOW_API cf_result cf_model_validate(const cf_model *model, cf_error *error) {
    cf_result r;
    if (model == NULL) return cf__fail_null(error, "model");
    if ((r = cf__range(model->layers, 1, CF_MAX_LAYERS, "model.layers", error)) != CF_OK) return r;
    if ((r = cf__range(model->hidden, 1, CF_MAX_WIDTH, "model.hidden", error)) != CF_OK) return r;
    if ((r = cf__range(model->heads, 1, CF_MAX_WIDTH, "model.heads", error)) != CF_OK) return r;
    r = cf__bounded(model->kv_heads, 1, model->heads, "model.kv_heads", "more than heads", error);
    if (r != CF_OK) return r;
    if ((r = cf__range(model->head_dim, 0, CF_MAX_WIDTH / model->heads, "model.head_dim", error)) != CF_OK) return r;
    if ((r = cf__range(model->ffn, 1, CF_MAX_FFN, "model.ffn", error)) != CF_OK) return r;
    if ((r = cf__range(model->vocab, 1, CF_MAX_VOCAB, "model.vocab", error)) != CF_OK) return r;
    if (model->heads % model->kv_heads != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "model.kv_heads", -1,
                        cf__divisor_below(model->heads, model->kv_heads), model->kv_heads, "must divide heads");
    if (model->head_dim == 0 && model->hidden % model->heads != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "model.heads", -1, cf__divisor_below(model->hidden, model->heads),
                        model->heads, "must divide hidden, or head_dim must be given");
    return CF_OK;
}

/* ---- splitting ---- */

/* A sum of products of sizes that are not negative. overflow stays set once something did not fit. */
typedef struct cf__tally {
    int64_t sum;
    int overflow;
} cf__tally;

static void cf__tally_add(cf__tally *tally, int64_t a, int64_t b, int64_t c) {
    int64_t product;
    if (!cf__mul(a, b, &product) || !cf__mul(product, c, &product) || !cf__add(tally->sum, product, &tally->sum))
        tally->overflow = 1;
}

CHUNKFLOW_API const char *cf_recompute_name(cf_recompute recompute) {
    static const char *const names[] = {"?", "none", "selective", "full"};
    return cf__name(names, CF_RECOMPUTE_COUNT, (int64_t)recompute);
}

CHUNKFLOW_API cf_parallel cf_parallel_defaults(const cf_parallel *parallel) {
    cf_parallel full = *parallel;
    if (full.tp == 0) full.tp = 1;
    if (full.pp == 0) full.pp = 1;
    if (full.n_virtual == 0) full.n_virtual = 1;
    if (full.dp == 0) full.dp = 1;
    if (full.recompute == CF_RECOMPUTE_DEFAULT) full.recompute = CF_RECOMPUTE_NONE;
    if (full.vocab_multiple == 0) full.vocab_multiple = 1;
    return full;
}

static int cf__tp_fits(const cf_model *model, int64_t tp) {
    return model->heads % tp == 0 && model->ffn % tp == 0 && (model->kv_heads % tp == 0 || tp % model->kv_heads == 0);
}

/* Layers given stage by stage: none empty, and together those of the model. */
static cf_result cf__check_layers(const cf_model *model, const cf_parallel *parallel, cf_error *error) {
    int64_t s, sum = 0;
    for (s = 0; s < parallel->pp * parallel->n_virtual; s++) {
        if (parallel->layers[s] < 1 || parallel->layers[s] > model->layers)
            return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.layers", s, 1, parallel->layers[s],
                            "a stage must have at least one layer, and no more than the model");
        sum += parallel->layers[s];
    }
    if (sum != model->layers)
        return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.layers", -1, model->layers, sum,
                        "must add up to the model's layers");
    return CF_OK;
}

/* parallel: defaults filled in. */
static cf_result cf__check_parallel(const cf_model *model, const cf_parallel *parallel, cf_error *error) {
    int64_t most = model->layers, tp = parallel->tp;
    cf_result r;
    if ((r = cf__bounded(tp, 1, model->heads, "parallel.tp", "more than heads", error)) != CF_OK) return r;
    r = cf__bounded(parallel->pp, 1, most, "parallel.pp", "more stages than layers", error);
    if (r != CF_OK) return r;
    most /= parallel->pp;
    r = cf__bounded(parallel->n_virtual, 1, most, "parallel.n_virtual", "more virtual stages than layers", error);
    if (r != CF_OK) return r;
    if ((r = cf__range(parallel->dp, 1, CF_MAX_RANKS, "parallel.dp", error)) != CF_OK) return r;
    if ((r = cf__choice(parallel->zero, 0, 3, "parallel.zero", error)) != CF_OK) return r;
    if ((r = cf__choice((int64_t)parallel->recompute, 0, CF_RECOMPUTE_COUNT - 1, "parallel.recompute", error)) != CF_OK)
        return r;
    if ((r = cf__range(parallel->vocab_multiple, 1, CF_MAX_VOCAB, "parallel.vocab_multiple", error)) != CF_OK) return r;
    if (!cf__tp_fits(model, tp)) {
        int64_t fitting = tp;
        while (!cf__tp_fits(model, fitting)) fitting--; /* 1 fits always */
        return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.tp", -1, fitting, tp,
                        "must divide heads and ffn, and divide kv_heads or be a multiple of it");
    }
    return parallel->layers != NULL ? cf__check_layers(model, parallel, error) : CF_OK;
}

/* Checks both and hands back the split with its defaults. */
static cf_result cf__resolve_parallel(const cf_model *model, const cf_parallel *given, cf_parallel *full,
                                      cf_error *error) {
    cf_result r;
    if ((r = cf_model_validate(model, error)) != CF_OK) return r;
    if (given == NULL) return cf__fail_null(error, "parallel");
    *full = cf_parallel_defaults(given);
    return cf__check_parallel(model, full, error);
}

CHUNKFLOW_API cf_result cf_parallel_validate(const cf_model *model, const cf_parallel *parallel, cf_error *error) {
    cf_parallel full;
    return cf__resolve_parallel(model, parallel, &full, error);
}

static cf_result cf__check_stage(const cf_parallel *parallel, int64_t stage, cf_error *error) {
    int64_t last = parallel->pp * parallel->n_virtual - 1;
    return cf__bounded(stage, 0, last, "stage", "there are fewer virtual stages", error);
}

/* What one GPU of a virtual stage has of the model. */
typedef struct cf__shard {
    int64_t layers;
    int64_t hidden;
    int64_t q;          /* heads x head_dim on this GPU */
    int64_t kv;         /* the same for K (or V), replicas included */
    int64_t heads;
    int64_t ffn;
    int64_t vocab;      /* rows of the embedding and of the head */
    int64_t sequence;   /* over how many GPUs the rows of norms and residuals are split */
    int64_t mlp_matrices;
    int first, last;    /* has the embedding; has the head */
} cf__shard;

/* Layers of virtual stage `stage` where they are split evenly: the remainder goes to stages 1, 2, ... and then to 0. */
static int64_t cf__even_layers(int64_t layers, int64_t n_stages, int64_t stage) {
    int64_t left = layers % n_stages;
    if (stage == 0) return layers / n_stages + (left == n_stages - 1 && left > 0);
    return layers / n_stages + (stage <= left && stage < n_stages - 1);
}

/* model and parallel have been checked. */
static cf__shard cf__shard_of(const cf_model *model, const cf_parallel *parallel, int64_t stage) {
    int64_t n_stages = parallel->pp * parallel->n_virtual, tp = parallel->tp;
    int64_t dim = cf__head_dim(model);
    cf__shard shard;
    shard.layers = parallel->layers != NULL ? parallel->layers[stage] : cf__even_layers(model->layers, n_stages, stage);
    shard.hidden = model->hidden;
    shard.heads = model->heads / tp;
    shard.q = shard.heads * dim;
    shard.kv = cf__max(model->kv_heads / tp, 1) * dim;
    shard.ffn = model->ffn / tp;
    shard.vocab = cf__div_up(cf__div_up(model->vocab, tp), parallel->vocab_multiple) * parallel->vocab_multiple;
    shard.sequence = parallel->no_sequence ? 1 : tp;
    shard.mlp_matrices = model->no_gate ? 2 : 3;
    shard.first = stage == 0;
    shard.last = stage == n_stages - 1;
    return shard;
}

/* 0 where a count does not fit. */
static int cf__count_parameters(const cf_model *model, const cf__shard *shard, cf_parameters *out) {
    int64_t n = shard->layers, h = shard->hidden;
    int gate = model->no_gate ? 1 : 2; /* MLP matrices that lead in */
    cf__tally embedding = {0, 0}, attention = {0, 0}, mlp = {0, 0}, norms = {0, 0}, head = {0, 0}, total = {0, 0};
    if (shard->first) cf__tally_add(&embedding, shard->vocab, h, 1);
    if (shard->last && !(model->tied && shard->first)) cf__tally_add(&head, shard->vocab, h, 1);
    cf__tally_add(&attention, n, h, 2 * shard->q + 2 * shard->kv);
    if (model->qkv_bias) cf__tally_add(&attention, n, shard->q + 2 * shard->kv, 1);
    if (model->out_bias) cf__tally_add(&attention, n, h, 1);
    cf__tally_add(&mlp, n * shard->mlp_matrices, h, shard->ffn);
    if (model->mlp_bias) cf__tally_add(&mlp, n, gate * shard->ffn + h, 1);
    cf__tally_add(&norms, n, 2 * h + (model->qk_norm ? 2 * cf__head_dim(model) : 0), 1);
    if (shard->last) cf__tally_add(&norms, h, 1, 1);
    cf__tally_add(&total, embedding.sum, 1, 1);
    cf__tally_add(&total, attention.sum, 1, 1);
    cf__tally_add(&total, mlp.sum, 1, 1);
    cf__tally_add(&total, norms.sum, 1, 1);
    cf__tally_add(&total, head.sum, 1, 1);
    out->embedding = embedding.sum;
    out->attention = attention.sum;
    out->mlp = mlp.sum;
    out->norms = norms.sum;
    out->head = head.sum;
    out->total = total.sum;
    return !(embedding.overflow || attention.overflow || mlp.overflow || norms.overflow || head.overflow ||
             total.overflow);
}

static cf_result cf__fail_size(cf_error *error, const char *field) {
    return cf__fail(error, CF_ERROR_OVERFLOW, field, -1, INT64_MAX, -1, "does not fit in 64 bits");
}

CHUNKFLOW_API cf_result cf_stage_layers(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                        int64_t *layers, cf_error *error) {
    cf_parallel full;
    cf_result r;
    if (layers == NULL) return cf__fail_null(error, "layers");
    if ((r = cf__resolve_parallel(model, parallel, &full, error)) != CF_OK) return r;
    if ((r = cf__check_stage(&full, stage, error)) != CF_OK) return r;
    *layers = cf__shard_of(model, &full, stage).layers;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_stage_parameters(const cf_model *model, const cf_parallel *parallel, int64_t stage,
                                            cf_parameters *out, cf_error *error) {
    cf_parallel full;
    cf_parameters counted;
    cf__shard shard;
    cf_result r;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((r = cf__resolve_parallel(model, parallel, &full, error)) != CF_OK) return r;
    if ((r = cf__check_stage(&full, stage, error)) != CF_OK) return r;
    shard = cf__shard_of(model, &full, stage);
    if (!cf__count_parameters(model, &shard, &counted)) return cf__fail_size(error, "parameters");
    *out = counted;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_model_parameters(const cf_model *model, cf_parameters *out, cf_error *error) {
    cf_parallel whole;
    memset(&whole, 0, sizeof whole);
    return cf_stage_parameters(model, &whole, 0, out, error);
}

/* ---- GPUs ----

   Peaks: NVIDIA's data sheets (A100 2021, H100 2023, H200 2024; SXM, dense bf16; NVLink and PCIe figures halved, as
   they are given for both directions together). Memory: what nvidia-smi reports as total. Network: one 200 Gbit/s
   (A100) or 400 Gbit/s (H100, H200) port per GPU, as in the maker's own systems. Attention fractions: causal,
   head size 128, long sequences, rounded down from what the FlashAttention-2 (A100, up to 0.73 forward) and
   FlashAttention-3 (H100, up to 0.75) papers report. Product and link fractions, launch and latency are common
   experience rather than anyone's publication: replace them by cf_cost_fit on your own measurements as soon as you have
   some. */
static const cf_gpu cf__gpus[] = {
    /* name, flops, gemm, attention forward and backward, processors,
       bandwidth, memory, nvlink, network, pcie, link, launch, latency */
    {"a100-40g", 312e12, 0.80, 0.60, 0.55, 108,
     1.555e12, (int64_t)40960 << 20, 300e9, 25e9, 32e9, 0.75, 5e-6, 15e-6},
    {"a100-80g", 312e12, 0.80, 0.60, 0.55, 108,
     2.039e12, (int64_t)81920 << 20, 300e9, 25e9, 32e9, 0.75, 5e-6, 15e-6},
    {"h100-80g", 989.4e12, 0.70, 0.60, 0.50, 132,
     3.35e12, (int64_t)81559 << 20, 450e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"h200", 989.4e12, 0.70, 0.60, 0.50, 132,
     4.8e12, (int64_t)143771 << 20, 450e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
};

CHUNKFLOW_API const cf_gpu *cf_gpu_at(int64_t index) {
    const int64_t count = (int64_t)(sizeof cf__gpus / sizeof cf__gpus[0]);
    return index >= 0 && index < count ? &cf__gpus[index] : NULL;
}

CHUNKFLOW_API const cf_gpu *cf_gpu_find(const char *name) {
    const cf_gpu *gpu;
    int64_t i;
    for (i = 0; name != NULL && (gpu = cf_gpu_at(i)) != NULL; i++)
        if (cf__same_name(gpu->name, name)) return gpu;
    return NULL;
}

/* ---- costs from numbers ---- */

/* Kernels of a layer: norm, QKV, rotation, attention, projection, residual, norm, gate and up, SwiGLU, down, residual,
   and appending to the state; in backward each one's input gradient, and one weight gradient for each of the seven
   matrices. */
#define CF__FORWARD_KERNELS 12
#define CF__INPUT_KERNELS 14
#define CF__WEIGHT_KERNELS 7
#define CF__COLLECTIVES 4       /* of a layer in each direction: two gathers and two reduce-scatters */
#define CF__LOSS_KERNELS 6

/* Amounts of work of one pass on one stage; an amount over a rate is seconds. */
typedef struct cf__work {
    double kernels, collectives;                /* a pass */
    double pass_bytes;                          /* device memory, a pass */
    double token_flops, token_bytes, link_bytes; /* a token */
    double pair_flops, pair_bytes;              /* an attention pair */
} cf__work;

static void cf__work_add(cf__work *to, const cf__work *more) {
    to->kernels += more->kernels;
    to->collectives += more->collectives;
    to->pass_bytes += more->pass_bytes;
    to->token_flops += more->token_flops;
    to->token_bytes += more->token_bytes;
    to->link_bytes += more->link_bytes;
    to->pair_flops += more->pair_flops;
    to->pair_bytes += more->pair_bytes;
}

/* link_rate: bytes/s between the GPUs of a tensor-parallel group. */
static cf_pass_cost cf__work_seconds(const cf__work *work, const cf_gpu *gpu, double attention, double link_rate) {
    cf_pass_cost cost;
    cost.constant = cf__product(work->kernels, gpu->launch) + cf__product(work->collectives, gpu->latency);
    cost.constant += work->pass_bytes / gpu->bandwidth;
    cost.per_token = work->token_flops / cf__product(gpu->flops, gpu->gemm) + work->token_bytes / gpu->bandwidth;
    cost.per_token += work->link_bytes / link_rate;
    cost.per_pair = work->pair_flops / cf__product(gpu->flops, attention) + work->pair_bytes / gpu->bandwidth;
    return cost;
}

/* Bytes of a collective that one GPU sends for each byte of the whole tensor. */
static double cf__ring_share(int64_t ranks) { return (double)(ranks - 1) / (double)ranks; }

/* Element-wise traffic of one token in the layers: norms and residuals read and write 20 h, rotation 4 (q + kv), SwiGLU
   6 f bytes. Whole numbers below 2^53, so exact. */
static double cf__elementwise_bytes(const cf__shard *shard) {
    int64_t bytes = 20 * shard->hidden / shard->sequence + 4 * (shard->q + shard->kv) + 6 * shard->ffn;
    return cf__product((double)shard->layers, (double)bytes);
}

/* Weights of the layers' matrices on one GPU. */
static double cf__matrix_weights(const cf__shard *shard) {
    double a_layer = cf__product((double)shard->hidden, (double)(2 * shard->q + 2 * shard->kv));
    a_layer += cf__product((double)shard->hidden, (double)(shard->mlp_matrices * shard->ffn));
    return cf__product((double)shard->layers, a_layer);
}

/* The layers forward, without loss. */
static cf__work cf__layers_forward(const cf__shard *shard, int64_t tp, int64_t chunk_size) {
    double layers = (double)shard->layers, weights = cf__matrix_weights(shard);
    cf__work work;
    memset(&work, 0, sizeof work);
    work.kernels = CF__FORWARD_KERNELS * layers;
    work.collectives = tp > 1 ? CF__COLLECTIVES * layers : 0;
    work.pass_bytes = 2 * weights;
    work.token_flops = 2 * weights;
    work.token_bytes = cf__elementwise_bytes(shard);
    work.link_bytes = cf__product(CF__COLLECTIVES * layers, cf__product(2 * (double)shard->hidden, cf__ring_share(tp)));
    work.pair_flops = cf__product(4 * layers, (double)shard->q);
    if (chunk_size > 0) work.pair_bytes = cf__product(layers, 4 * (double)shard->kv) / (double)chunk_size; /* K and V */
    return work;
}

/* How much longer forward attention takes because its last wave of blocks is half empty on average. Backward has blocks
   of keys, of which a prefix has plenty. */
static double cf__partial_wave(const cf_gpu *gpu, const cf__shard *shard, int64_t chunk_size) {
    double blocks = cf__product((double)shard->heads, (double)chunk_size) / 128;
    return chunk_size > 0 ? 1 + (double)gpu->processors / blocks / 2 : 1;
}

/* The gradient of the inputs: as many products as forward, attention's five for two, and dK and dV (float) read and
   written beside K and V. */
static cf__work cf__layers_input(const cf__shard *shard, int64_t tp, int64_t chunk_size) {
    cf__work work = cf__layers_forward(shard, tp, 0);
    double layers = (double)shard->layers;
    work.kernels = CF__INPUT_KERNELS * layers;
    work.token_bytes *= 2;
    work.pair_flops = cf__product(10 * layers, (double)shard->q);
    if (chunk_size > 0) work.pair_bytes = cf__product(layers, 20 * (double)shard->kv) / (double)chunk_size;
    return work;
}

/* The gradient of the weights, added to a float accumulator. */
static cf__work cf__layers_weight(const cf__shard *shard) {
    double weights = cf__matrix_weights(shard);
    cf__work work;
    memset(&work, 0, sizeof work);
    work.kernels = CF__WEIGHT_KERNELS * (double)shard->layers;
    work.pass_bytes = 8 * weights;
    work.token_flops = 2 * weights;
    return work;
}

/* Output head and loss in forward; in backward the head's input or weight gradient has the same FLOPs. Logits are
   written and read about twice in 10 bytes each. */
static cf__work cf__head_work(const cf__shard *shard) {
    double weights = cf__product((double)shard->hidden, (double)shard->vocab);
    cf__work work;
    memset(&work, 0, sizeof work);
    work.kernels = CF__LOSS_KERNELS;
    work.pass_bytes = 2 * weights;
    work.token_flops = 2 * weights;
    work.token_bytes = 20 * (double)shard->vocab;
    return work;
}

static void cf__cost_sum(const cf_pass_cost *a, const cf_pass_cost *b, cf_pass_cost *out) {
    out->constant = a->constant + b->constant;
    out->per_token = a->per_token + b->per_token;
    out->per_pair = a->per_pair + b->per_pair;
}

static cf_stage_cost cf__stage_seconds(const cf_cost_desc *desc, const cf__shard *shard, double link_rate) {
    const cf_gpu *gpu = desc->gpu;
    int64_t tp = desc->parallel.tp;
    cf__work forward = cf__layers_forward(shard, tp, desc->chunk_size);
    cf__work input = cf__layers_input(shard, tp, desc->chunk_size), weight = cf__layers_weight(shard);
    cf__work again, head = cf__head_work(shard);
    cf_pass_cost again_seconds;
    cf_stage_cost cost;
    forward.pair_flops = cf__product(forward.pair_flops, cf__partial_wave(gpu, shard, desc->chunk_size));
    again = forward;
    if (shard->last) {
        cf__work_add(&forward, &head);
        cf__work_add(&input, &head);
        head.pass_bytes *= 4; /* the float accumulator */
        head.token_bytes = 0;
        cf__work_add(&weight, &head);
    }
    cost.forward = cf__work_seconds(&forward, gpu, gpu->attention_forward, link_rate);
    cost.replay = cost.forward;
    cost.input = cf__work_seconds(&input, gpu, gpu->attention_backward, link_rate);
    cost.weight = cf__work_seconds(&weight, gpu, gpu->attention_backward, link_rate);
    again_seconds = cf__work_seconds(&again, gpu, gpu->attention_forward, link_rate);
    if (desc->parallel.recompute == CF_RECOMPUTE_SELECTIVE) cost.input.per_pair += again_seconds.per_pair;
    if (desc->parallel.recompute == CF_RECOMPUTE_FULL) cf__cost_sum(&cost.input, &again_seconds, &cost.input);
    cf__cost_sum(&cost.input, &cost.weight, &cost.backward);
    return cost;
}

static int cf__is_rate(double x) { return x > 0 && x <= DBL_MAX; }

static cf_result cf__check_gpu(const cf_gpu *gpu, cf_error *error) {
    const char *field = NULL;
    if (gpu == NULL) return cf__fail_null(error, "gpu");
    if (!cf__is_rate(gpu->flops)) field = "gpu.flops";
    else if (!(gpu->gemm > 0 && gpu->gemm <= 1)) field = "gpu.gemm";
    else if (!(gpu->attention_forward > 0 && gpu->attention_forward <= 1)) field = "gpu.attention_forward";
    else if (!(gpu->attention_backward > 0 && gpu->attention_backward <= 1)) field = "gpu.attention_backward";
    else if (!cf__is_rate(gpu->bandwidth)) field = "gpu.bandwidth";
    else if (!cf__is_rate(gpu->nvlink)) field = "gpu.nvlink";
    else if (!cf__is_rate(gpu->network)) field = "gpu.network";
    else if (!cf__is_rate(gpu->pcie)) field = "gpu.pcie";
    else if (!(gpu->link > 0 && gpu->link <= 1)) field = "gpu.link";
    if (field != NULL)
        return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, 1, 0, "must be finite and above 0; a fraction at most 1");
    if (gpu->processors < 1 || gpu->processors > CF_MAX_RANKS)
        return cf__fail(error, CF_ERROR_ARGUMENT, "gpu.processors", -1, 1, gpu->processors, "out of range");
    if (!cf__is_cost(gpu->launch)) field = "gpu.launch";
    if (!cf__is_cost(gpu->latency)) field = "gpu.latency";
    if (field == NULL) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, 0, -1, "must be finite and not negative");
}

/* Bytes/s of a group that spans `span` neighbouring ranks. */
static double cf__link_rate(const cf_cost_desc *desc, int64_t span) {
    return cf__product(span <= desc->gpus_per_node ? desc->gpu->nvlink : desc->gpu->network, desc->gpu->link);
}

/* Once an iteration: gradients (float) reduced over dp, parameters gathered again, and the optimizer's reads and
   writes: a float gradient, three float states both ways, a bf16 parameter. */
static double cf__step_seconds(const cf_cost_desc *desc, double parameters) {
    const cf_parallel *parallel = &desc->parallel;
    double rate = cf__link_rate(desc, parallel->tp * parallel->dp), share = cf__ring_share(parallel->dp);
    double owned = parallel->zero > 0 ? parameters / (double)parallel->dp : parameters;
    double exchanged = parallel->zero > 0 ? 6 * parameters : 8 * parameters; /* all-reduce: 4 bytes twice */
    double seconds = cf__product(exchanged, share) / rate;
    return seconds + 30 * owned / desc->gpu->bandwidth;
}

/* The slowest stage's. */
static cf_result cf__slowest_step(const cf_cost_desc *desc, double *out, cf_error *error) {
    int64_t s, v;
    double slowest = 0;
    for (s = 0; s < desc->parallel.pp; s++) {
        double parameters = 0, seconds;
        for (v = 0; v < desc->parallel.n_virtual; v++) {
            cf__shard shard = cf__shard_of(desc->model, &desc->parallel, v * desc->parallel.pp + s);
            cf_parameters counted;
            if (!cf__count_parameters(desc->model, &shard, &counted)) return cf__fail_size(error, "parameters");
            parameters += (double)counted.total;
        }
        seconds = cf__step_seconds(desc, parameters);
        if (seconds > slowest) slowest = seconds;
    }
    *out = slowest;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_cost_estimate(const cf_cost_desc *desc, cf_stage_cost *stages, int64_t count,
                                         cf_timing *timing, double *step_seconds, cf_error *error) {
    cf_cost_desc full;
    cf__shard shard;
    cf_result r;
    int64_t s, span, most_layers = 0;
    double step;
    if (desc == NULL) return cf__fail_null(error, "desc");
    if (stages == NULL) return cf__fail_null(error, "stages");
    if (timing == NULL) return cf__fail_null(error, "timing");
    full = *desc;
    if ((r = cf__resolve_parallel(desc->model, &desc->parallel, &full.parallel, error)) != CF_OK) return r;
    if ((r = cf__check_gpu(desc->gpu, error)) != CF_OK) return r;
    if (full.gpus_per_node == 0) full.gpus_per_node = 8;
    if ((r = cf__range(full.gpus_per_node, 1, CF_MAX_RANKS, "gpus_per_node", error)) != CF_OK) return r;
    if ((r = cf__range(full.chunk_size, 0, CF_MAX_CHUNK_SIZE, "chunk_size", error)) != CF_OK) return r;
    if (count != full.parallel.pp * full.parallel.n_virtual)
        return cf__fail(error, CF_ERROR_ARGUMENT, "count", -1, full.parallel.pp * full.parallel.n_virtual, count,
                        "must be the number of virtual stages");
    if ((r = cf__slowest_step(&full, &step, error)) != CF_OK) return r;
    for (s = 0; s < count; s++) {
        shard = cf__shard_of(full.model, &full.parallel, s);
        stages[s] = cf__stage_seconds(&full, &shard, cf__link_rate(&full, full.parallel.tp));
        most_layers = cf__max(most_layers, shard.layers);
    }
    shard = cf__shard_of(full.model, &full.parallel, 0);
    span = full.parallel.tp * full.parallel.dp * full.parallel.pp;
    memset(timing, 0, sizeof *timing);
    timing->all = stages[0];
    timing->stages = stages;
    timing->latency = full.gpu->latency;
    timing->seconds_per_token = (double)cf__div_up(2 * shard.hidden, shard.sequence) / cf__link_rate(&full, span);
    timing->offload_seconds_per_token = cf__product(4 * (double)shard.kv, (double)most_layers) /
                                        cf__product(full.gpu->pcie, full.gpu->link);
    if (step_seconds != NULL) *step_seconds = step;
    return CF_OK;
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
    double *item_costs;      /* (n_items) only with more than one rank, as what follows */
    double *costs;           /* (max_units) cost of each unit */
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

static cf_result cf__check_cost(const cf_pass_cost *cost, cf_error *error) {
    const char *field = !cf__is_cost(cost->constant)    ? "cost.constant"
                        : !cf__is_cost(cost->per_token) ? "cost.per_token"
                        : !cf__is_cost(cost->per_pair)  ? "cost.per_pair"
                                                        : NULL;
    if (field == NULL) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, field, -1, 0, -1, "must be finite and not negative");
}

static int64_t cf__common_divisor(int64_t a, int64_t b) {
    while (b != 0) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static cf_result cf__check_pack_desc(const cf_pack_desc *desc, cf_error *error) {
    cf_result result;
    if ((result = cf__range(desc->chunk_size, 1, CF_MAX_CHUNK_SIZE, "chunk_size", error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)desc->method, 0, CF_PACK_NEXT_FIT, "method", error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)desc->split, 0, CF_SPLIT_COST, "split", error)) != CF_OK) return result;
    if ((result = cf__choice(desc->align, 1, desc->chunk_size, "align", error)) != CF_OK) return result;
    if ((result = cf__range(desc->max_slices, 0, INT64_MAX, "max_slices", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_ranks, 1, CF_MAX_RANKS, "n_ranks", error)) != CF_OK) return result;
    if (desc->chunk_size % desc->align != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "align", -1, cf__common_divisor(desc->chunk_size, desc->align),
                        desc->align, "must divide chunk_size");
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
        /* The last slices get the units left over: the very last one may lack part of a unit. */
        return cf__min((units / n + (index >= n - units % n)) * p->desc.align, rest);
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

/* CF_SPLIT_COST. Start from the mean cost of full slices as the target (and a little more: rounding must not push it under
   the cost of slices that are all alike): each resulting slice is either full or costs at least about the mean, so there
   are at most about twice as many. Keep that number and press the target down by bisection. Steps are capped so that a
   sequence of millions of slices does not take seconds. */
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
    high += cf__product(high, 1e-9);
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
    p->item_costs = (double *)cf__take(carver, ranks > 0 ? p->n_items : 0, sizeof(double));
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

/* A chunk's constant cost is counted once per chunk, so that of its slices is left out. */
static double cf__slice_share(cf__packer *p, int64_t sequence, int64_t begin, int64_t length, cf_result *result) {
    cf_pass_cost cost = p->weights;
    cost.constant = 0;
    if (p->desc.slice_cost != NULL) return cf__slice_cost(p, sequence, begin, length, result);
    return cf_cost_seconds(&cost, length, cf_slice_pairs(begin, length));
}

static double cf__chunk_constant(const cf__packer *p) {
    return p->desc.slice_cost == NULL ? p->weights.constant : 0;
}

/* Cost of each item and of each group, the items of its last chunk left out. */
static cf_result cf__cost_sequences(cf__packer *p, double *group_costs) {
    cf_result result = CF_OK;
    int64_t i, j;
    for (i = 0; i < p->n_items; i++)
        p->item_costs[i] = cf__slice_share(p, cf__item_sequence(p->items[i]), 0, cf__item_length(p->items[i]), &result);
    for (i = 0; i < p->n_groups; i++) {
        const cf__split *split = &p->splits[i];
        int64_t begin = 0;
        group_costs[i] = 0;
        for (j = 0; j < split->n_slices; begin += p->cuts[split->first_cut + j++])
            group_costs[i] += cf__slice_share(p, split->sequence, begin, p->cuts[split->first_cut + j], &result);
    }
    return result;
}

/* Cost of each unit. */
static cf_result cf__cost_units(cf__packer *p) {
    int64_t i;
    cf_result result;
    for (i = 0; i < p->n_units; i++) p->costs[i] = 0;
    result = cf__cost_sequences(p, p->costs);
    for (i = 0; i < p->n_units; i++)
        p->costs[i] += cf__product(cf__chunk_constant(p), (double)p->units[i].n_chunks);
    for (i = 0; i < p->n_items; i++) p->costs[p->unit_of[i]] += p->item_costs[i];
    return result;
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
static cf_result cf__give_all(cf__packer *p) {
    cf_result result;
    int64_t n_chunks = p->n_dependent + p->n_units - p->n_groups;
    p->n_steps = INT64_MAX / 2;
    p->n_steps = cf__max(cf__give_groups_by_count(p), cf__div_up(n_chunks, p->desc.n_ranks));
    cf__clear_ranks(p);
    if ((result = cf__cost_units(p)) != CF_OK) return result;
    if (!cf__give_units(p, 0, p->n_groups)) {
        cf__give_groups_by_count(p);
        if ((result = cf__cost_units(p)) != CF_OK) return result;
        cf__recount_loads(p);
    }
    cf__give_units(p, p->n_groups, p->n_units - p->n_groups);
    return CF_OK;
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
    double extra = target != NULL ? cf__chunk_constant(p) : 0; /* a new chunk has its own constant cost */
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
        double cost = p->item_costs[i] + extra;
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
    double cost = p->item_costs[shift->item];
    if (to < 0) {
        to = cf__open_unit(p);
        p->order[to] = to;
        p->units[to].rank = low;
        p->costs[to] = cf__chunk_constant(p);
        p->loads[low] += cf__chunk_constant(p);
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
    cf_result result;
    p->n_ordered = p->n_units;
    p->n_steps = p->n_dependent + p->n_units - p->n_groups;
    if (p->desc.n_ranks > 1) {
        if ((result = cf__give_all(p)) != CF_OK) return result;
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
    const cf_chunk *c = chunk >= 0 && chunk < plan->n_chunks ? &plan->chunks[chunk] : NULL;
    return c != NULL && c->group >= 0 ? plan->slices[c->first_slice].length : 0;
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
                  {"method", (int64_t)plan->method, 0, CF_PACK_NEXT_FIT},
                  {"split", (int64_t)plan->split, 0, CF_SPLIT_COST},
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

/* first, first + step, first + 2 x step ... The blocks of 16 are what compilers turn into vector code at -O2. */
static void cf__fill_rows(int32_t *row, int64_t n, int32_t first, int32_t step) {
    int64_t t = 0;
    int32_t value = first, i;
    for (; t + 16 <= n; t += 16, value += 16 * step)
        for (i = 0; i < 16; i++) row[t + i] = value + i * step;
    for (; t < n; t++, value += step) row[t] = value;
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
    int64_t i;
    const cf_chunk *c;
    cf_result result = cf__check_ids(plan, chunk, ids, count, error);
    if (result != CF_OK) return result;
    c = &plan->chunks[chunk];
    if (c->prefix + c->padded > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "position_ids", chunk, INT32_MAX, c->prefix + c->padded,
                        "positions pass 32 bits");
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *slice = &plan->slices[c->first_slice + i];
        int32_t *row = ids + slice->offset;
        cf__fill_rows(row, slice->length, (int32_t)slice->begin, 1);
        cf__fill_rows(row + slice->length, cf__round_up(slice->length, plan->align) - slice->length, 0, 0);
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_sequence_ids(const cf_plan *plan, int64_t chunk, int32_t *ids, int64_t count,
                                        cf_error *error) {
    int64_t i;
    const cf_chunk *c;
    cf_result result = cf__check_ids(plan, chunk, ids, count, error);
    if (result != CF_OK) return result;
    c = &plan->chunks[chunk];
    for (i = 0; i < c->n_slices; i++) {
        const cf_slice *slice = &plan->slices[c->first_slice + i];
        int32_t *row = ids + slice->offset;
        cf__fill_rows(row, slice->length, (int32_t)slice->sequence, 0);
        cf__fill_rows(row + slice->length, cf__round_up(slice->length, plan->align) - slice->length, -1, 0);
    }
    return CF_OK;
}

/* ================================================================================================================
   >>memory
   ================================================================================================================ */

typedef struct cf__loss_bytes {
    int64_t kept; /* for each logit, until backward */
    int64_t peak; /* for each logit, at the worst moment */
} cf__loss_bytes;

/* logit: bytes of a logit as the head makes it. */
static cf__loss_bytes cf__loss_bytes_of(cf_loss loss, int64_t logit) {
    cf__loss_bytes bytes;
    bytes.kept = 4;         /* a float softmax */
    bytes.peak = logit + 8; /* beside it the logits and their float copy */
    if (loss == CF_LOSS_EAGER) bytes.peak = logit + 12;
    if (loss == CF_LOSS_FUSED) bytes.kept = bytes.peak = logit;
    if (loss == CF_LOSS_CHUNKED) bytes.kept = bytes.peak = 0;
    return bytes;
}

CHUNKFLOW_API const char *cf_loss_name(cf_loss loss) {
    static const char *const names[] = {"?", "parallel", "eager", "fused", "chunked"};
    return cf__name(names, CF_LOSS_COUNT, (int64_t)loss);
}

CHUNKFLOW_API cf_memory_desc cf_memory_defaults(const cf_memory_desc *desc) {
    cf_memory_desc full = *desc;
    full.parallel = cf_parallel_defaults(&desc->parallel);
    if (full.loss == CF_LOSS_DEFAULT) full.loss = CF_LOSS_PARALLEL;
    if (full.activation_bytes == 0) full.activation_bytes = 2;
    if (full.parameter_bytes == 0) full.parameter_bytes = 2;
    if (full.gradient_bytes == 0) full.gradient_bytes = 4;
    if (full.optimizer_bytes == 0) full.optimizer_bytes = 12;
    if (full.state_bytes == 0) full.state_bytes = 2;
    if (full.state_gradient_bytes == 0) full.state_gradient_bytes = 4;
    if (full.runtime_bytes == 0) full.runtime_bytes = CF_RUNTIME_BYTES;
    if (full.fragmentation == 0) full.fragmentation = CF_FRAGMENTATION;
    if (full.fragmentation == -1) full.fragmentation = 0;
    return full;
}

#define CF__MAX_BYTES_EACH 1024 /* of a parameter's gradient, say */

static cf_result cf__check_memory_desc(const cf_memory_desc *given, cf_memory_desc *full, cf_error *error) {
    cf_result r;
    if (given == NULL) return cf__fail_null(error, "desc");
    if ((r = cf_parallel_validate(given->model, &given->parallel, error)) != CF_OK) return r;
    if ((r = cf__range(given->fragmentation, -1, 1000, "fragmentation", error)) != CF_OK) return r;
    *full = cf_memory_defaults(given);
    if ((r = cf__choice((int64_t)full->loss, 0, CF_LOSS_COUNT - 1, "loss", error)) != CF_OK) return r;
    if ((r = cf__range(full->activation_bytes, 1, CF__MAX_BYTES_EACH, "activation_bytes", error)) != CF_OK) return r;
    if ((r = cf__range(full->parameter_bytes, 1, CF__MAX_BYTES_EACH, "parameter_bytes", error)) != CF_OK) return r;
    if ((r = cf__range(full->gradient_bytes, 1, CF__MAX_BYTES_EACH, "gradient_bytes", error)) != CF_OK) return r;
    if ((r = cf__range(full->optimizer_bytes, 1, CF__MAX_BYTES_EACH, "optimizer_bytes", error)) != CF_OK) return r;
    if ((r = cf__range(full->state_bytes, 1, CF__MAX_BYTES_EACH, "state_bytes", error)) != CF_OK) return r;
    if ((r = cf__range(full->state_gradient_bytes, 1, CF__MAX_BYTES_EACH, "state_gradient_bytes", error)) != CF_OK)
        return r;
    return cf__range(full->runtime_bytes, 1, INT64_MAX, "runtime_bytes", error);
}

/* ---- bytes per token ---- */

/* What one layer keeps for backward when nothing but (with `selective`) the inside of attention is recomputed. */
static int64_t cf__layer_bytes(const cf_memory_desc *desc, const cf__shard *shard, int selective) {
    int64_t element = desc->activation_bytes;
    int64_t rows = 4 * element * shard->hidden;               /* inputs of two norms, and their outputs */
    int64_t attention = 2 * element * (shard->q + shard->kv); /* Q, output; K, V */
    int64_t mlp = (desc->model->no_gate ? 2 : 3) * element * shard->ffn;
    if (!selective && !desc->unfused_attention) attention += 4 * shard->heads;
    if (desc->unfused) {
        rows += 8 * shard->hidden; /* twice: the input as float, not as it is, and the normalised rows as they are */
        if (!desc->model->no_gate) mlp += element * shard->ffn;
    }
    return cf__div_up(rows, shard->sequence) + attention + mlp;
}

/* Gradients of one layer's activations while it is in backward: the larger of MLP and attention, and those of the
   residual and of a norm's output. */
static int64_t cf__working_bytes(const cf_memory_desc *desc, const cf__shard *shard) {
    int64_t element = desc->activation_bytes, attention = 2 * element * (shard->q + shard->kv);
    int64_t mlp = (desc->model->no_gate ? 2 : 3) * element * shard->ffn;
    int64_t bytes = cf__div_up(2 * element * shard->hidden, shard->sequence);
    if (desc->unfused && !desc->model->no_gate) mlp += element * shard->ffn;
    bytes += cf__max(mlp, attention);
    if (desc->parallel.recompute == CF_RECOMPUTE_FULL) bytes += cf__layer_bytes(desc, shard, 0);
    return bytes;
}

/* Bytes of a score (a query and a key of one layer, all heads of this GPU), kept and in work. */
static int64_t cf__kept_score_bytes(const cf_memory_desc *desc, const cf__shard *shard) {
    if (!desc->unfused_attention || desc->parallel.recompute != CF_RECOMPUTE_NONE) return 0;
    return desc->activation_bytes * shard->heads * shard->layers; /* the softmax */
}

static int64_t cf__working_score_bytes(const cf_memory_desc *desc, const cf__shard *shard) {
    if (!desc->unfused_attention) return 0;
    return (desc->parallel.recompute == CF_RECOMPUTE_NONE ? 1 : 2) * desc->activation_bytes *
           shard->heads; /* the gradient, and the softmax where it is made again */
}

static cf_token_bytes cf__token_bytes(const cf_memory_desc *desc, const cf__shard *shard) {
    int64_t element = desc->activation_bytes, row = cf__div_up(element * shard->hidden, shard->sequence);
    cf__loss_bytes loss = cf__loss_bytes_of(desc->loss, element);
    int64_t ends = (shard->first != 0) + (shard->last != 0), tp = desc->parallel.tp;
    cf_token_bytes bytes;
    memset(&bytes, 0, sizeof bytes);
    bytes.activations = cf__layer_bytes(desc, shard, desc->parallel.recompute == CF_RECOMPUTE_SELECTIVE);
    if (desc->parallel.recompute == CF_RECOMPUTE_FULL) bytes.activations = row;
    bytes.activations *= shard->layers;
    if (shard->first) bytes.activations += 8;
    if (shard->last) {
        bytes.activations += cf__div_up(2 * element * shard->hidden, shard->sequence) + loss.kept * shard->vocab;
        if (desc->loss == CF_LOSS_CHUNKED) bytes.activations += row;
        bytes.logits = (loss.peak - loss.kept) * shard->vocab;
    }
    bytes.state = 2 * shard->kv * shard->layers * desc->state_bytes;
    bytes.state_gradient = 2 * shard->kv * shard->layers * desc->state_gradient_bytes;
    bytes.boundary = row;
    bytes.working = cf__working_bytes(desc, shard);
    bytes.buffers = (4 - 2 * ends) * bytes.boundary; /* in and out, of activations and of gradients */
    if (tp > 1 && !desc->parallel.no_sequence) bytes.buffers += 2 * element * shard->hidden; /* gathered; gradient */
    return bytes;
}

CHUNKFLOW_API cf_result cf_memory_token_bytes(const cf_memory_desc *desc, int64_t stage, cf_token_bytes *out,
                                              cf_error *error) {
    cf_memory_desc full;
    cf__shard shard;
    cf_result r;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((r = cf__check_memory_desc(desc, &full, error)) != CF_OK) return r;
    if ((r = cf__check_stage(&full.parallel, stage, error)) != CF_OK) return r;
    shard = cf__shard_of(full.model, &full.parallel, stage);
    *out = cf__token_bytes(&full, &shard);
    return CF_OK;
}

/* ---- stages ---- */

static cf_result cf__check_load(const cf_memory_load *load, int64_t item, cf_error *error) {
    const char *field = NULL;
    int64_t got = 0;
    if ((got = load->live_tokens) < 0) field = "loads.live_tokens";
    else if ((got = load->chunk_tokens) < 0) field = "loads.chunk_tokens";
    else if ((got = load->state_tokens) < 0) field = "loads.state_tokens";
    else if ((got = load->state_gradient_tokens) < 0) field = "loads.state_gradient_tokens";
    else if ((got = load->offloaded_tokens) < 0) field = "loads.offloaded_tokens";
    else if ((got = load->input_tokens) < 0) field = "loads.input_tokens";
    else if ((got = load->live_scores) < 0) field = "loads.live_scores";
    else if ((got = load->chunk_scores) < 0) field = "loads.chunk_scores";
    if (field == NULL) return CF_OK;
    return cf__fail(error, CF_ERROR_ARGUMENT, field, item, 0, got, "must not be negative");
}

/* The terms of one stage while they are added up over its virtual stages. */
typedef struct cf__stage_sums {
    cf__tally parameters;     /* numbers of them; all below are bytes but the next */
    int64_t layer_parameters; /* of the largest layer */
    cf__tally activations, logits, state, state_gradient, inputs, host;
    int64_t working, buffers; /* the largest of any virtual stage */
    int overflow;
} cf__stage_sums;

static void cf__sum_virtual_stage(const cf_memory_desc *desc, int64_t stage, const cf_memory_load *load,
                                  cf__stage_sums *sums) {
    cf__shard shard = cf__shard_of(desc->model, &desc->parallel, stage);
    cf_token_bytes bytes = cf__token_bytes(desc, &shard);
    cf__tally working = {0, 0}, buffers = {0, 0};
    cf_parameters counted;
    if (!cf__count_parameters(desc->model, &shard, &counted)) sums->overflow = 1;
    cf__tally_add(&sums->parameters, counted.total, 1, 1);
    sums->layer_parameters = cf__max(sums->layer_parameters,
                                     (counted.total - counted.embedding - counted.head) / shard.layers);
    cf__tally_add(&sums->activations, load->live_tokens, bytes.activations, 1);
    cf__tally_add(&sums->activations, load->live_scores, cf__kept_score_bytes(desc, &shard), 1);
    cf__tally_add(&sums->logits, load->chunk_tokens, bytes.logits, 1);
    cf__tally_add(&sums->state, load->state_tokens, bytes.state, 1);
    cf__tally_add(&sums->state_gradient, load->state_gradient_tokens, bytes.state_gradient, 1);
    cf__tally_add(&sums->inputs, load->input_tokens, bytes.boundary, 1);
    cf__tally_add(&sums->host, load->offloaded_tokens, bytes.state, 1);
    cf__tally_add(&working, load->chunk_tokens, bytes.working, 1);
    cf__tally_add(&working, load->chunk_scores, cf__working_score_bytes(desc, &shard), 1);
    cf__tally_add(&buffers, load->chunk_tokens, bytes.buffers, 1);
    sums->working = cf__max(sums->working, working.sum);
    sums->buffers = cf__max(sums->buffers, buffers.sum);
    sums->overflow |= working.overflow | buffers.overflow;
}

/* number x bytes, or a dp-th of it, rounded up. */
static int64_t cf__shared_bytes(int64_t number, int64_t bytes, int64_t dp, int shared, int *overflow) {
    int64_t product = 0;
    if (!cf__mul(number, bytes, &product)) *overflow = 1;
    return shared ? cf__div_up(product, dp) : product;
}

static int64_t cf__runtime_bytes(const cf_memory_desc *desc, const cf_memory_report *report, int *overflow) {
    cf__tally moving = {0, 0}, runtime = {0, 0};
    cf__tally_add(&moving, report->activations, desc->fragmentation, 1);
    cf__tally_add(&moving, report->logits, desc->fragmentation, 1);
    cf__tally_add(&moving, report->working, desc->fragmentation, 1);
    cf__tally_add(&moving, report->state, desc->fragmentation, 1);
    cf__tally_add(&moving, report->state_gradient, desc->fragmentation, 1);
    cf__tally_add(&moving, report->inputs, desc->fragmentation, 1);
    cf__tally_add(&runtime, desc->runtime_bytes, 1, 1);
    cf__tally_add(&runtime, moving.sum / 100, 1, 1);
    *overflow |= moving.overflow | runtime.overflow;
    return runtime.sum;
}

/* loads: by virtual stage; where `alike`, one record that holds for all. Returns 0 where something does not fit. */
static int cf__stage_report(const cf_memory_desc *desc, int64_t stage, const cf_memory_load *loads, int alike,
                            cf_memory_report *out) {
    const cf_parallel *parallel = &desc->parallel;
    cf__stage_sums sums;
    cf__tally total = {0, 0};
    int64_t v;
    memset(&sums, 0, sizeof sums);
    memset(out, 0, sizeof *out);
    for (v = 0; v < parallel->n_virtual; v++) {
        int64_t at = v * parallel->pp + stage;
        cf__sum_virtual_stage(desc, at, alike ? loads : &loads[at], &sums);
    }
    sums.overflow |= sums.parameters.overflow | sums.activations.overflow | sums.logits.overflow | sums.state.overflow |
                     sums.state_gradient.overflow | sums.inputs.overflow | sums.host.overflow;
    out->parameters =
        cf__shared_bytes(sums.parameters.sum, desc->parameter_bytes, parallel->dp, parallel->zero >= 3, &sums.overflow);
    out->gradients =
        cf__shared_bytes(sums.parameters.sum, desc->gradient_bytes, parallel->dp, parallel->zero >= 2, &sums.overflow);
    out->optimizer =
        cf__shared_bytes(sums.parameters.sum, desc->optimizer_bytes, parallel->dp, parallel->zero >= 1, &sums.overflow);
    out->activations = sums.activations.sum;
    out->at_loss = sums.logits.sum > sums.working;
    out->logits = out->at_loss ? sums.logits.sum : 0;
    out->working = out->at_loss ? 0 : sums.working;
    out->state = sums.state.sum;
    out->state_gradient = sums.state_gradient.sum;
    out->inputs = sums.inputs.sum;
    out->buffers = sums.buffers;
    if (parallel->zero >= 3 && parallel->dp > 1) {
        int64_t layers = cf__shared_bytes(sums.layer_parameters, 2 * desc->parameter_bytes, 1, 0, &sums.overflow);
        if (!cf__add(out->buffers, layers, &out->buffers)) sums.overflow = 1;
    }
    out->runtime = cf__runtime_bytes(desc, out, &sums.overflow);
#define CF__ADD_TERM(name, text) cf__tally_add(&total, out->name, 1, 1);
    CF_MEMORY_TERMS(CF__ADD_TERM)
#undef CF__ADD_TERM
    out->total = total.sum;
    out->host = sums.host.sum;
    return !(sums.overflow || total.overflow);
}

CHUNKFLOW_API cf_result cf_memory_estimate(const cf_memory_desc *desc, const cf_memory_load *loads, int64_t n_loads,
                                           cf_memory_report *reports, int64_t n_reports, cf_error *error) {
    cf_memory_desc full;
    cf_memory_report report;
    cf_result r;
    int64_t s, n_stages;
    if (loads == NULL) return cf__fail_null(error, "loads");
    if (reports == NULL) return cf__fail_null(error, "reports");
    if ((r = cf__check_memory_desc(desc, &full, error)) != CF_OK) return r;
    n_stages = full.parallel.pp * full.parallel.n_virtual;
    if (n_loads != n_stages)
        return cf__fail(error, CF_ERROR_ARGUMENT, "n_loads", -1, n_stages, n_loads,
                        "must be the number of virtual stages");
    if (n_reports != full.parallel.pp)
        return cf__fail(error, CF_ERROR_ARGUMENT, "n_reports", -1, full.parallel.pp, n_reports, "must be parallel.pp");
    for (s = 0; s < n_stages; s++)
        if ((r = cf__check_load(&loads[s], s, error)) != CF_OK) return r;
    for (s = 0; s < n_reports; s++) /* nothing is written unless all of it can be */
        if (!cf__stage_report(&full, s, loads, 0, &report)) return cf__fail_size(error, "loads");
    for (s = 0; s < n_reports; s++) (void)cf__stage_report(&full, s, loads, 0, &reports[s]);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_memory_check_limit(const cf_memory_desc *desc, int64_t chunk_tokens, int64_t limit_bytes,
                                              cf_error *error) {
    cf_memory_desc full;
    cf_memory_report report;
    cf_memory_load load;
    cf_result r;
    int64_t s, most = 0, fullest = 0;
    if ((r = cf__check_memory_desc(desc, &full, error)) != CF_OK) return r;
    if ((r = cf__range(chunk_tokens, 1, CF_MAX_CHUNK_SIZE, "chunk_tokens", error)) != CF_OK) return r;
    memset(&load, 0, sizeof load);
    load.live_tokens = chunk_tokens;
    load.chunk_tokens = chunk_tokens;
    for (s = 0; s < full.parallel.pp; s++) {
        if (!cf__stage_report(&full, s, &load, 1, &report)) return cf__fail_size(error, "chunk_tokens");
        if (report.total > most) {
            most = report.total;
            fullest = s;
        }
    }
    if (limit_bytes >= most) return CF_OK;
    return cf__fail(error, CF_ERROR_LIMIT, "limit_bytes", fullest, most, limit_bytes,
                    "too little for this stage's model state and a single chunk");
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
    if ((result = cf__choice((int64_t)desc->kind, 0, CF_SCHEDULE_COUNT - 1, "kind", error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)desc->replay, 0, CF_REPLAY_COUNT - 1, "replay", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_stages, 1, 1, "n_stages", error)) != CF_OK) return result;
    if ((result = cf__range(desc->k, 1, INT64_MAX, "k", error)) != CF_OK) return result;
    return cf__choice(desc->rank, 0, plan->n_ranks - 1, "rank", error);
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
    int32_t slot;    /* state slot, -1: none */
    int64_t tokens;  /* tokens whose K and V it holds */
    int64_t reached; /* the most that it has held: all of the sequence once every chunk ran forward */
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
    int64_t stage, first_chunk, n_virtual_stages;
    int64_t n_states, n_group_states; /* lengths of the two arrays below */
    cf__chunk_state *chunks;  /* (n_virtual x n_steps) */
    cf__group_state *groups;  /* (n_virtual x n_groups) */
    cf__slots activations, states;
    int64_t n_finished; /* chunks, counted on each virtual stage, whose backward is complete */
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
    if (!cf__mul(schedule->n_stages, schedule->n_virtual, &r->n_virtual_stages) || r->n_virtual_stages > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "n_stages", -1, INT32_MAX, schedule->n_stages, "too many stages");
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
    if (a->stage < 0 || a->stage >= r->n_virtual_stages)
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
    group->reached = group->tokens;
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
    if (group == NULL || step->action.pass == CF_W) return CF_OK;
    if (group->reached != r->plan->groups[step->chunk->group].tokens)
        return cf__bad_action(r, "chunk", step, r->plan->groups[step->chunk->group].tokens, group->reached,
                              "backward before the forward of a later chunk");
    if (group->tokens != end)
        return cf__bad_action(r, "chunk", step, end, group->tokens, "backward before that of a later chunk");
    return CF_OK;
}

static void cf__after_backward(cf__runner *r, const cf_step *step) {
    cf__chunk_state *chunk = cf__chunk_state_of(r, step);
    cf__group_state *group = cf__group_state_of(r, step);
    if (step->action.pass != CF_I) {
        cf__release(r, CF_RESOURCE_ACTIVATIONS, step->action.chunk, &chunk->slot);
        r->live_tokens -= step->chunk->padded;
        r->n_finished++;
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
    if (result == CF_OK && r->n_finished != r->n_states)
        return cf__fail(r->error, CF_ERROR_SCHEDULE, "actions", -1, r->n_states, r->n_finished,
                        "chunks without a complete backward");
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
    if ((result = cf__choice(stage, 0, schedule->n_stages - 1, "stage", error)) != CF_OK) return result;
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
