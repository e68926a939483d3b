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

   and everywhere else just #include "chunkflow.h". Define CHUNKFLOW_STATIC instead to get functions that are private to
   the file, implementation included. Define CHUNKFLOW_API yourself (say, as a DLL export) to override the linkage.
   Needs only libc.

   The functions by task
       pack a batch            cf_pack, cf_pack_size + cf_pack_into (your memory), cf_pack_defaults, cf_plan_free
       ask a plan              cf_plan_measure (fill, bounds, balance), cf_chunk_state_tokens, cf_slice_pairs
       feed an attention       cf_metadata_size + cf_metadata_fill (cu_seqlens_q/k, max_seqlen), cf_position_ids,
         kernel                cf_sequence_ids
       what waits for what     cf_graph_make, cf_graph_size + cf_graph_into, cf_graph_defaults, cf_graph_node,
                               cf_graph_free
         longest path, slack   cf_critical_make, cf_critical_size + cf_critical_into, cf_critical_free
         with your executor    cf_graph_start, cf_graph_complete
       order the passes        cf_schedule_make, cf_schedule_size + cf_schedule_into, cf_schedule_defaults,
                               cf_schedule_free
       time them               cf_simulate, cf_simulate_size + cf_simulate_into, cf_timeline_free
         from your own clock   cf_timeline_measured
       add the transfers       cf_schedule_lower
       run them                cf_run, cf_run_size, cf_chunk_seed
         one action at a time  cf_run_open, cf_run_peek, cf_run_next, cf_run_close
       check                   cf_plan_validate, cf_schedule_validate, cf_graph_validate (of any source)
       write                   cf_write_plan_json, cf_write_schedule_json, cf_write_schedule_csv, cf_write_graph_dot
       read                    cf_read_schedule_csv
       errors                  cf_result_name, cf_result_text, the cf_error record
       cost numbers            cf_cost_seconds, cf_cost_estimate (model x GPU), cf_cost_fit (your measurements)
       describe a model        cf_model_find, cf_model_at, cf_model_validate, cf_model_parameters, cf_stage_parameters,
         and a machine         cf_stage_layers, cf_parallel_validate, cf_gpu_find, cf_gpu_at
       size its memory         cf_memory_estimate, cf_memory_token_bytes, cf_memory_check_limit
       choose ChunkSize, K     cf_tune, cf_tune_defaults, cf_tuning_free, cf_tune_size + cf_tune_into (your memory)
       attend on a GPU         cf_attention_size + cf_attention_prepare, cf_attention_forward, cf_attention_backward
         (chunkflow_cuda.cu)
         carry state           cf_rope_size + cf_rope_fill, cf_append_forward, cf_append_backward, cf_state_bytes,
                               cf_state_k, cf_state_v, cf_state_clear, cf_state_offload, cf_state_prefetch,
                               cf_padding_clear, cf_boundary_save
         run a pipeline        cf_executor_create, cf_executor_load, cf_executor_run, cf_executor_stream,
                               cf_executor_schedule, cf_executor_memory_of, cf_executor_timeline, cf_executor_free

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

   A complete program (examples/hello.c is a longer one; C++ people write {} for {0})

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
   group's last chunk whose free space holds whole short sequences. state: K and V of a group's tokens so far. K: how
   many chunks of one group keep their activations at once. pass: F forward, R replay (a second forward, of a chunk
   whose activations were dropped), B backward, or I + W where backward is split into input and weight gradient.
   attention pairs: the (query, key) pairs that a causal mask leaves visible. stage: a part of the model; rank: a
   data-parallel copy.

   Sections, each found by its tag: >>base >>cost >>pack >>memory >>graph >>schedule >>simulate >>check >>tune >>run
   >>write, first declared, then implemented in the same order. A section calls only sections above it. >>cuda is
   declared last and implemented in chunkflow_cuda.cu. */

#ifndef CHUNKFLOW_H
#define CHUNKFLOW_H

#include <stddef.h>
#include <stdint.h>

#define CHUNKFLOW_VERSION_MAJOR 0
#define CHUNKFLOW_VERSION_MINOR 1
#define CHUNKFLOW_VERSION_PATCH 0
#define CHUNKFLOW_VERSION "0.1.0"

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
    X(CF_ERROR_INFEASIBLE, "no schedule can keep to the memory limit")                \
    X(CF_ERROR_GRAPH, "the graph breaks a rule")                                      \
    X(CF_ERROR_TEXT, "the text breaks its format")                                    \
    X(CF_ERROR_DEVICE, "CUDA or cuBLAS reported an error")

typedef enum cf_result {
#define CF__ENUM(name, text) name,
    CF_RESULTS(CF__ENUM)
#undef CF__ENUM
    CF_RESULT_COUNT /* how many codes there are; never returned */
} cf_result;

/* What went wrong, in a record that the caller owns. Every function that can fail takes a pointer to one, or NULL. It
   is written only on failure, and then all of it. */
typedef struct cf_error {
    int64_t item;      /* index of the sequence, slice, chunk, group, action ... at fault; -1: none in particular */
    cf_result code;    /* the code that the function also returns */
    const char *field; /* name of the argument, option or member at fault; a static string */
    int64_t wanted;    /* the nearest acceptable value, or the limit */
    int64_t got;       /* the value found */
    char text[200];    /* where, why, wanted and got as one line, without a line end */
} cf_error;

/* "CF_ERROR_PLAN", and "the plan breaks a rule". Both return a static string for every value, also an unknown one. */
CHUNKFLOW_API const char *cf_result_name(cf_result code);
CHUNKFLOW_API const char *cf_result_text(cf_result code);

/* Where memory comes from. Give both callbacks or neither; NULL in place of the record, or an all-zero record, means
   malloc and free. alloc returns memory aligned as malloc's (16 bytes), or NULL, which the library survives and
   reports. An object remembers the allocator that made it; `user` must live as long as the object. */
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

/* Time of one pass over one chunk: constant + per_token x tokens + per_pair x attention pairs (seconds, or any unit
   that you use throughout). The last term is what makes a late chunk of a long sequence dearer than an early one. */
typedef struct cf_pass_cost {
    double constant;
    double per_token;
    double per_pair;
} cf_pass_cost;

/* The formula above (0 without a cost). Each product and sum is rounded to double by itself, so every platform gives
   the same bits. */
CHUNKFLOW_API double cf_cost_seconds(const cf_pass_cost *cost, int64_t tokens, int64_t pairs);

/* Visible (query, key) pairs of a slice of `length` tokens that follows `prefix` tokens of its own sequence, under a
   causal mask: length x prefix + length x (length + 1) / 2. Returns -1 where an argument is negative or the result
   would not fit in 64 bits. */
CHUNKFLOW_API int64_t cf_slice_pairs(int64_t prefix, int64_t length);

/* The passes of one virtual stage. All zero: F = R = tokens, B = 2 x tokens, I = W = tokens, the unit costs of the
   paper's figures. Otherwise a member that is all zero is derived: R = F, B = I + W or 2 x F, I = W = B / 2. */
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
    int no_overlap;               /* 1: a transfer between stages also occupies both stages; 0: it runs beside compute,
                                     and a stage has a queue for each of its two directions */
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
   slowest stage. Not modelled: what ZeRO 2 and 3 send within an iteration (gradients scattered and parameters gathered
   for each pass); they take the time of ZeRO 1. All are untouched on failure. Errors: as cf_model_validate and
   cf_parallel_validate, or the member. */
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
                                     where that one wins, its packing is returned and plan->method says so. (Balancing
                                     several ranks may then use idle chunks as well) */
    CF_PACK_FIRST_FIT,            /* longest first, into the earliest chunk with room */
    CF_PACK_NEXT_FIT              /* in input order, into the last chunk or a new one: sequences stay in order */
} cf_pack_method;

typedef enum cf_split_method {
    CF_SPLIT_DEFAULT = 0,         /* CF_SPLIT_FULL */
    CF_SPLIT_FULL,                /* slices of chunk_size tokens, the rest last (the paper's Algorithm 1) */
    CF_SPLIT_EVEN,                /* as many slices, equal in tokens to within one token (or one alignment unit) */
    CF_SPLIT_COST                 /* slices of at most chunk_size tokens, the dearest as cheap as possible; late slices,
                                     which see more keys, get shorter. At most about twice as many slices as FULL. A
                                     search: a few microseconds a slice */
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
    int no_tails;                 /* 0: whole short sequences fill the free space of a group's last chunk, which makes
                                     it a hybrid chunk (past the paper); 1: that chunk stays alone, as in the paper */
    int64_t align;                /* every slice starts at a multiple of this in its chunk; divides chunk_size. 0: 1 */
    int64_t max_slices;           /* most slices in a chunk. 0: no cap */
    int64_t n_ranks;              /* data-parallel ranks to spread the chunks over. 0: 1 */
    cf_pass_cost cost;            /* for CF_SPLIT_COST and for balancing ranks. All zero: a token and a pair weigh so
                                     that all tokens of the batch weigh as much as all its attention pairs */
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
   [r x n_steps, (r + 1) x n_steps); a group's chunks are consecutive. Groups come before standalone chunks, both in
   input order of their first sequence (groups) or in order of creation (standalone); next fit keeps input order
   throughout. */
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

   lengths: n token counts, 0 .. CF_MAX_LENGTH. A sequence of length 0 takes part in nothing and is counted in n_empty;
   one of exactly chunk_size tokens is a standalone chunk; one of a multiple is a group of full chunks. With align > 1 a
   sequence counts as long when its own tokens exceed chunk_size.

   *out: a new plan, to be given to cf_plan_free; untouched on failure. Time is near linear (a million lengths in tens
   of milliseconds; CF_SPLIT_COST takes a few microseconds more for each slice of a long sequence). The plan depends
   only on the arguments, so each data-parallel rank can compute it for itself.

   With n_ranks > 1 every rank gets the same number of chunks (n_steps); a group stays on one rank; costs are evened out
   by placing the dearest first, then by moving and exchanging; idle chunks fill what is left.

   lower_bound is the better of: total tokens / chunk_size, the count of sequences that cannot share, Martello and
   Toth's L2 (Knapsack Problems, 1990, section 8.3), slices / max_slices, and the number of dependent chunks.

   Errors: CF_ERROR_ARGUMENT (names the member, or "lengths" and the sequence), CF_ERROR_LIMIT, CF_ERROR_OVERFLOW
   ("lengths": their sum does not fit; "pairs": the attention pairs of a chunk of that sequence do not),
   CF_ERROR_CALLBACK (slice_cost gave no cost, or not the same one twice), CF_ERROR_MEMORY. */
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

/* A copy of desc (NULL: of all zeros) with every default filled in. */
CHUNKFLOW_API cf_pack_desc cf_pack_defaults(const cf_pack_desc *desc);

/* Frees a plan made by cf_pack. NULL is allowed. */
CHUNKFLOW_API void cf_plan_free(cf_plan *plan);

/* Checks a plan from any source against the lengths that it claims to pack: every token of every sequence in exactly
   one slice, slices of a sequence in order, no chunk over chunk_size or max_slices, alignment, groups and prefixes,
   pairs, ranks and totals (of lower_bound only that the plan does not undercut it). Returns CF_OK, or CF_ERROR_PLAN for
   the first violation, with its member in error->field and the index of the chunk, slice, group or sequence in
   error->item. CF_ERROR_MEMORY if n bytes of scratch cannot be had from `allocator` (NULL: malloc). Reads only arrays
   of the plan, within the counts that the plan states. */
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

/* Measures a plan. cost: as in cf_pack_desc, for chunk_cost_spread; NULL or all zero: the default weights. Without a
   plan all numbers are 0. */
CHUNKFLOW_API void cf_plan_measure(const cf_plan *plan, const cf_pass_cost *cost, cf_plan_stats *stats);

/* Tokens that a chunk appends to its group's state: the length of its first slice, or 0 if it has no group or there is
   no such chunk (or no plan). */
CHUNKFLOW_API int64_t cf_chunk_state_tokens(const cf_plan *plan, int64_t chunk);

/* What a variable-length attention kernel wants to know about one chunk. Usable as they are by flash_attn_varlen_func
   and cuDNN with a causal mask aligned bottom-right: the first slice of a dependent chunk has `prefix` more keys than
   queries and so sees the prefix and itself; all other slices see only themselves. Keys lie in this order: the prefix,
   then the chunk. The padded twins give where each slice starts and the plain ones how many real tokens it has; they
   are equal when the plan's align is 1. */
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

/* cf_metadata_size: bytes that cf_metadata_fill needs for this chunk; for chunk = -1, for any chunk of the plan. Fill
   puts the arrays into `memory` (any alignment of int32_t) and their addresses into *out, which is untouched on
   failure. Errors: CF_ERROR_ARGUMENT (chunk), CF_ERROR_SPACE (bytes), CF_ERROR_LIMIT where prefix + chunk passes
   INT32_MAX. */
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
   >>graph    plan -> which pass waits for which
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

/* How a dropped forward comes back. */
typedef enum cf_replay {
    CF_REPLAY_DEFAULT = 0, /* CF_REPLAY_PIPELINE */
    CF_REPLAY_PIPELINE,    /* through all stages again (the paper) */
    CF_REPLAY_LOCAL,       /* each stage keeps its input and replays alone (past the paper) */
    CF_REPLAY_COUNT
} cf_replay;

/* "pipeline", "local"; "?" for anything else. */
CHUNKFLOW_API const char *cf_replay_name(cf_replay replay);

/* Why a pass waits for another one. Virtual stage v x n_stages + s lies on stage s. */
typedef enum cf_edge_why {
    CF_EDGE_ACTIVATION = 0, /* F or R on the virtual stage before, whose output is the input */
    CF_EDGE_GRADIENT,       /* B or I on the virtual stage behind */
    CF_EDGE_STATE,          /* F of the group's chunk before: its K and V */
    CF_EDGE_STATE_GRADIENT, /* B or I of the group's next chunk: its part of dK and dV */
    CF_EDGE_REPLAY,         /* own F, which kept nothing, before R */
    CF_EDGE_OWN,            /* own F or R with the activations before B or I; own I before W */
    CF_EDGE_SLOT,           /* the B or W that frees the place which R takes: of the chunk K later in the group */
    CF_EDGE_COUNT
} cf_edge_why;

/* "activation", "gradient", "state", "state gradient", "replay", "own", "slot"; "?" for anything else. */
CHUNKFLOW_API const char *cf_edge_name(cf_edge_why why);

#define CF_MAX_NODES ((int64_t)1 << 28) /* nodes of a graph */
#define CF_MAX_SUCCESSORS 4             /* edges that leave one node */

/* A pass of one chunk on one virtual stage. */
typedef struct cf_node {
    double seconds;
    int32_t chunk; /* index into plan->chunks */
    int32_t stage; /* virtual stage */
    int32_t pass;  /* a cf_pass: F, R, and B or I and W */
    int32_t keep;  /* F and R: 1 if the activations stay for a backward. 0 for the others */
} cf_node;

/* `to` starts when `from` has ended and then `seconds` have passed (a transfer between stages; 0 for all others). */
typedef struct cf_edge {
    double seconds;
    int32_t from, to;
    int32_t why; /* a cf_edge_why */
} cf_edge;

/* All passes of one rank's chunks, with what each waits for, in both directions. Plain data in one block: read it; the
   seconds may be overwritten with measured ones. A node's number follows from chunk, pass and virtual stage
   (cf_graph_node), and nodes[] leads back. */
typedef struct cf_graph {
    int64_t n_stages;
    int64_t n_virtual;
    int64_t k;
    cf_replay replay;
    int split;              /* 1: I and W in place of B */
    int64_t rank;
    int64_t n_steps;        /* chunks of the rank; they start at rank x n_steps */
    int64_t n_nodes;
    int64_t n_edges;
    int64_t *first;         /* (n_steps + 1) chunk i of the rank has the nodes first[i] .. first[i + 1) */
    cf_node *nodes;         /* (n_nodes) */
    int64_t *first_in;      /* (n_nodes + 1) node i waits for edges[first_in[i] .. first_in[i + 1]) */
    cf_edge *edges;         /* (n_edges) by rising `to` */
    int64_t *first_out;     /* (n_nodes + 1) node i holds up edges[out[first_out[i] .. first_out[i + 1])] */
    int32_t *out;           /* (n_edges) */
    cf_allocator allocator; /* private, as in cf_plan */
} cf_graph;

/* Which graph. Zero means default in every member. */
typedef struct cf_graph_desc {
    int64_t n_stages;        /* 0: 1 */
    int64_t n_virtual;       /* virtual stages of each stage. 0: 1 */
    int64_t k;               /* chunks of a group that keep their activations: its last K; the others replay. 0: 1 */
    cf_replay replay;        /* 0: pipeline */
    int split;               /* 1: I and W in place of B */
    int no_slots;            /* 1: without the slot edges, so that the order of a group's replays is left open */
    int64_t rank;            /* which rank's chunks */
    const cf_timing *timing; /* NULL: unit costs, free transfers */
    const cf_allocator *allocator;
} cf_graph_desc;

/* Builds the graph in time and space linear in its nodes. An executor that starts a pass when all its edges are
   satisfied keeps at most K chunks of a group on every virtual stage, the slot edges see to that.

   *out: a new graph, to be given to cf_graph_free; untouched on failure. Errors: CF_ERROR_ARGUMENT, CF_ERROR_LIMIT
   (more than CF_MAX_NODES nodes), CF_ERROR_OVERFLOW (the seconds of a pass are not finite), CF_ERROR_PLAN,
   CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_graph_make(const cf_plan *plan, const cf_graph_desc *desc, cf_graph **out, cf_error *error);

/* The same into the caller's memory; cf_graph_size is exact. Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_graph_size(const cf_plan *plan, const cf_graph_desc *desc, size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_graph_into(const cf_plan *plan, const cf_graph_desc *desc, void *memory, size_t bytes,
                                      cf_graph **out, cf_error *error);

/* A copy of desc (NULL: of all zeros) with every default filled in. */
CHUNKFLOW_API cf_graph_desc cf_graph_defaults(const cf_graph_desc *desc);

/* Frees a graph made by cf_graph_make. NULL is allowed. */
CHUNKFLOW_API void cf_graph_free(cf_graph *graph);

/* The node of a pass (F .. W) of a chunk (index into plan->chunks) on a virtual stage; -1: the graph has no such node.
   */
CHUNKFLOW_API int64_t cf_graph_node(const cf_graph *graph, cf_pass pass, int64_t chunk, int64_t stage);

/* Checks a graph from any source: counts, every index, both directions against each other, seconds, and that no node
   waits for itself. CF_ERROR_GRAPH names the member and the index; for a cycle the field is "edges" and the item one
   node on it. Scratch: 4 bytes a node and more from `allocator` (NULL: malloc). */
CHUNKFLOW_API cf_result cf_graph_validate(const cf_graph *graph, const cf_allocator *allocator, cf_error *error);

/* The longest path, and the play that every node has. All arrays are by node. */
typedef struct cf_critical {
    int64_t n_nodes;
    double length;          /* seconds of the longest path. Whatever the number of helpers, no order is faster (with
                               slot edges: none that replays each group from its last dropped chunk to its first) */
    int64_t n_path;
    int32_t *path;          /* (n_path) its nodes, first to last */
    int32_t *order;         /* (n_nodes) all nodes, each after those that it waits for */
    double *earliest;       /* (n_nodes) when a node can start at the earliest */
    double *latest;         /* (n_nodes) and when it must, for `length` to hold; latest - earliest is its slack */
    cf_allocator allocator; /* private, as in cf_plan */
} cf_critical;

/* Finds it in linear time, after the checks of cf_graph_validate. Rules and errors as for cf_graph_make. */
CHUNKFLOW_API cf_result cf_critical_make(const cf_graph *graph, const cf_allocator *allocator, cf_critical **out,
                                         cf_error *error);
CHUNKFLOW_API cf_result cf_critical_size(const cf_graph *graph, size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_critical_into(const cf_graph *graph, void *memory, size_t bytes, cf_critical **out,
                                         cf_error *error);
CHUNKFLOW_API void cf_critical_free(cf_critical *critical);

/* For an application with an executor of its own. cf_graph_start fills waiting[] (count >= n_nodes numbers, the
   caller's) with how many edges each node waits for: those at 0 are ready. cf_graph_complete notes that a node is done
   and puts the nodes which became ready by that into ready[], at most CF_MAX_SUCCESSORS, by rising number. Completing a
   node twice, or before it was ready, is CF_ERROR_ARGUMENT and changes nothing. Calls on one waiting[] must not
   overlap. */
CHUNKFLOW_API cf_result cf_graph_start(const cf_graph *graph, int32_t *waiting, int64_t count, cf_error *error);
CHUNKFLOW_API cf_result cf_graph_complete(const cf_graph *graph, int32_t *waiting, int64_t node,
                                          int32_t ready[CF_MAX_SUCCESSORS], int64_t *n_ready, cf_error *error);

/* ================================================================================================================
   >>schedule    plan -> order of passes
   ================================================================================================================ */

#define CF_MAX_STAGES 65536                    /* virtual stages of a pipeline */
#define CF_MAX_ACTIONS ((int64_t)1 << 27)      /* actions of a schedule: 1.5 GiB of them */

typedef enum cf_schedule_kind {
    CF_SCHEDULE_DEFAULT = 0, /* CF_SCHEDULE_PAPER */
    CF_SCHEDULE_PAPER,       /* state-aware 1F1B: a stage runs ahead of the last one by its distance from it, counted
                                from the point where the last stage has a whole group; other work fills the wait for a
                                replay */
    CF_SCHEDULE_GPIPE,       /* all forwards, then all backwards; under a limit in rounds that fit into it */
    CF_SCHEDULE_1F1B,        /* stage s keeps at most n_stages - s chunks, more only if a group cannot do with that */
    CF_SCHEDULE_INTERLEAVED, /* 1F1B over several virtual stages on each stage */
    CF_SCHEDULE_ZERO_BUBBLE, /* backward is cut into I and W, and W fills the gaps; keeps no more than 1F1B's fullest
                                stage */
    CF_SCHEDULE_BEST,        /* searched for */
    CF_SCHEDULE_COUNT
} cf_schedule_kind;

/* "paper", "gpipe", "1f1b", "interleaved", "zero-bubble", "best"; "?" for anything else. */
CHUNKFLOW_API const char *cf_schedule_kind_name(cf_schedule_kind kind);

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
    cf_schedule_kind kind;  /* who made it; 0: none of the generators */
    cf_replay replay;
    int64_t n_stages;
    int64_t n_virtual;      /* virtual stages of each stage */
    int64_t k;              /* most chunks of one group that keep activations at once, on one stage */
    int64_t rank;           /* the rank of the plan whose chunks these are */
    int64_t n_chunks;       /* chunks of the plan */
    int64_t n_actions;
    int lowered;            /* 1: the lists hold SEND_*, RECV_*, OFFLOAD and PREFETCH actions too (cf_schedule_lower) */
    int64_t *first;         /* (n_stages + 1) */
    cf_action *actions;     /* (n_actions) */
    cf_allocator allocator; /* private, as in cf_plan */
} cf_schedule;

/* Bytes that a stage holds for each token. All zero: bytes are not counted. */
typedef struct cf_bytes {
    int64_t per_token_activations;    /* of a chunk whose activations are kept, padding included */
    int64_t per_token_state;          /* K and V of a group's token, from the start of its F to the end of B (or I) */
    int64_t per_token_state_gradient; /* dK and dV of the same, from the start of the group's first backward to that
                                         end */
    int64_t per_token_boundary;       /* local replay: the saved input of a dropped chunk, from the start of its F to
                                         that of its R */
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
    int64_t n_stages;            /* 0: 1 */
    cf_schedule_kind kind;       /* 0: paper */
    cf_replay replay;            /* 0: pipeline */
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

   One stage: units run in plan order. An idle chunk is F B too, with no tokens, so that all ranks make the same steps.
   A standalone chunk is F B. A group of N <= K chunks is F1 .. FN, BN .. B1. A group of N > K chunks is F1 .. F(N-K)
   with nothing kept, F(N-K+1) .. FN kept, BN .. B(N-K+1), then for i = N-K down to 1: R(i) B(i). This is Algorithm 2
   with its two slips put right: as printed, its index test keeps the wrong chunks and its third pass runs upwards, but
   dK and dV of a chunk are complete only when every later chunk has run backward.

   Several stages: every kind keeps to the rules above on each virtual stage, and to the memory limits; where a limit is
   below K, fewer chunks of a group are kept and more are replayed. Virtual stage v x n_stages + s lies on stage s. No
   kind can deadlock. `1f1b` takes the dearest units first, the other fixed kinds take them in plan order. `best` is
   never longer than a fixed schedule of as many virtual stages under the same limits (than `zero-bubble` only with
   split_backward); the same budget gives the same schedule.

   *out: a new schedule, to be given to cf_schedule_free; untouched on failure. Errors: CF_ERROR_ARGUMENT, CF_ERROR_PLAN
   (the counts of the plan are not sound), CF_ERROR_LIMIT (CF_MAX_ACTIONS, CF_MAX_STAGES), CF_ERROR_INFEASIBLE
   (error->wanted: the smallest limit of that kind that would do), CF_ERROR_OVERFLOW, CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_schedule_make(const cf_plan *plan, const cf_schedule_desc *desc, cf_schedule **out,
                                         cf_error *error);

/* The same into the caller's memory. cf_schedule_size says how many bytes are enough for the schedule and the working
   space (`best` may use less). Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_schedule_size(const cf_plan *plan, const cf_schedule_desc *desc, size_t *bytes,
                                         cf_error *error);
CHUNKFLOW_API cf_result cf_schedule_into(const cf_plan *plan, const cf_schedule_desc *desc, void *memory, size_t bytes,
                                         cf_schedule **out, cf_error *error);

/* A copy of desc (NULL: of all zeros) with every default filled in. */
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

/* The simulated or measured run. One block of memory, like a plan. */
typedef struct cf_timeline {
    int64_t n_actions;
    int64_t n_stages;
    double makespan;             /* end of the last action; the first one starts at 0 */
    double busy;                 /* time of all passes on all stages; transfers and copies are none */
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
    int64_t *peak_state_tokens;  /* (n_stages) most tokens whose K and V were held at once; none in host memory */
    int64_t *peak_bytes;         /* (n_stages) zeros if no bytes were given */
    cf_allocator allocator;      /* private, as in cf_plan */
} cf_timeline;

/* Runs a schedule on paper. Each stage takes its actions in order, each as soon as what it needs is there: the previous
   stage's activations (F, and R in pipeline replay) or the next stage's gradient (B, I), after the transfer. cf_timing
   says how transfers take time; with no_overlap the sender is busy with one right after its pass and the receiver right
   before the pass that needs it.

   Bounds, by name. "critical-path": the longest path of dependent passes. "stage-load": the work of a stage, the
   shortest way to it and the shortest way from it. "one-machine": each stage alone with the release time and tail of
   each of its passes, preemption allowed (Jackson's schedule; at least as strong as stage-load). "memory", under a
   limit: a kept chunk stays on a stage for the passes of all later stages, so a stage with room for few needs long.

   Lowered schedules: a SEND begins when its tensor is made and the way is free, wherever it stands behind that pass,
   and its RECV has the same times; with no_overlap the sender is busy with it where it stands, and the receiver, who
   has times of its own then, right before the pass that needs it. So transfers take the time that they take in the
   schedule that was lowered, and all passes keep theirs. OFFLOAD and PREFETCH run on a copy engine of each stage, one
   after the other beside the passes, each from the end of the pass before it in the list; a pass that reads a group's
   state waits until all rows that were to come back are there. Neither transfers nor copies count as busy.

   *out: a new timeline, to be given to cf_timeline_free; untouched on failure. A schedule that deadlocks (lowered:
   where a send waits for its receiver), repeats or leaves out a pass, or breaks a dependency is CF_ERROR_SCHEDULE with
   the index of the action in error->item. Time is linear in the actions; the bounds take n log n. */
CHUNKFLOW_API cf_result cf_simulate(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                    cf_timeline **out, cf_error *error);

/* The same into the caller's memory. Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_simulate_size(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                         size_t *bytes, cf_error *error);
CHUNKFLOW_API cf_result cf_simulate_into(const cf_plan *plan, const cf_schedule *schedule, const cf_simulate_desc *desc,
                                         void *memory, size_t bytes, cf_timeline **out, cf_error *error);

/* A timeline of times that were measured and not simulated, in the same form, so that both are checked and drawn alike.
   start, end: (n_actions) seconds parallel to schedule->actions, on one clock; they are moved so that the earliest
   start is 0. live and the peaks are counted along the lists, which is what happened as long as each stage ran its
   passes in order. Transfers and copies of a lowered schedule are in start, end and makespan, but neither in busy nor
   in the bubbles. No bounds (n_bounds 0). bytes: as in cf_simulate_desc, NULL for none.

   *out: a new timeline, to be given to cf_timeline_free; untouched on failure. CF_ERROR_ARGUMENT where a time is not
   finite or an action ends before it starts; CF_ERROR_SCHEDULE as cf_simulate reports it. */
CHUNKFLOW_API cf_result cf_timeline_measured(const cf_plan *plan, const cf_schedule *schedule, const double *start,
                                             const double *end, const cf_bytes *bytes, const cf_allocator *allocator,
                                             cf_timeline **out, cf_error *error);

/* Frees a timeline made by cf_simulate or cf_timeline_measured. NULL is allowed. */
CHUNKFLOW_API void cf_timeline_free(cf_timeline *timeline);

/* ================================================================================================================
   >>check    is a schedule sound? and: schedule -> the same with its transfers
   ================================================================================================================ */

/* What a schedule must hold besides the rules. Zero means no limit in every member. */
typedef struct cf_validate_desc {
    int64_t limit;               /* most chunks whose activations one stage keeps at once */
    const int64_t *limits;       /* (n_stages) the same stage by stage; NULL: `limit` for all */
    cf_bytes bytes;              /* what limit_bytes counts */
    int64_t limit_bytes;         /* most bytes that one stage holds at once */
    const int64_t *limits_bytes; /* (n_stages) */
} cf_validate_desc;

/* Accepts a schedule from any source, lowered or not, only if on every virtual stage of the rank
     every chunk has one F, one B (or one I and then one W), and one R exactly where its F kept nothing;
     a group's forwards run upwards and its backwards downwards, R after F, every backward with activations at hand;
     at most K chunks of a group keep their activations at once, and no limit is passed on any stage;
     with pipeline replay, a virtual stage that replays a chunk has one before it that does so too;
   and the lists run to their end: no stage waits for ever for another. Of a lowered schedule it asks besides that every
   tensor that crosses stages is sent once and received once, after it was made and before it is used, that the lists
   end even when every send waits for its receiver (a rendezvous, no buffer anywhere), in the order in which they are
   written, and that no pass of a group runs while some of its state is in host memory.

   It shares no code with the generators. Returns CF_OK, or CF_ERROR_SCHEDULE for the first violation: error->field
   names the member, error->item is the position in the list of the stage which error->text names (-1: something is
   missing there). CF_ERROR_PLAN where the chunks are in no sound groups. desc: NULL for none. Scratch in proportion to
   the passes comes from `allocator` (NULL: malloc). Reads only within the counts that plan and schedule state. */
CHUNKFLOW_API cf_result cf_schedule_validate(const cf_plan *plan, const cf_schedule *schedule,
                                             const cf_validate_desc *desc, const cf_allocator *allocator,
                                             cf_error *error);

/* How to lower. Zero means default in every member. */
typedef struct cf_lower_desc {
    const cf_timing *timing; /* NULL: unit costs, free transfers */
    int offload;             /* 1: OFFLOAD and PREFETCH as well */
    const cf_allocator *allocator;
} cf_lower_desc;

/* Adds the transfers to a schedule: a copy whose lists hold SEND_* and RECV_* actions, none between virtual stages on
   one stage, and whose `lowered` is 1. It cannot deadlock even where a send blocks until it is received: passes and
   transfers are put into one order, by the time at which `timing` lets them begin (a transfer: when its tensor is
   made), and every stage runs its part of that one order.

   offload: later chunks attend to the whole prefix, so a group's state can leave a stage only between two passes of the
   group, while the stage runs other units or waits. Where such a gap lasts at least as long as moving rows out and
   back, with the bandwidth of `timing`, the rows of the group's first chunks leave right after the pass before it (as
   many chunks as there is time for) and come back just early enough for the next pass, beside compute. Copies of two
   groups at once are taken to be as fast as one.

   *out: a new schedule, to be given to cf_schedule_free; untouched on failure. The schedule is validated first, without
   limits; its errors are those of cf_schedule_validate. CF_ERROR_ARGUMENT where it is lowered already; CF_ERROR_LIMIT
   past CF_MAX_ACTIONS, which many chunks that leave in many gaps can reach. */
CHUNKFLOW_API cf_result cf_schedule_lower(const cf_plan *plan, const cf_schedule *schedule, const cf_lower_desc *desc,
                                          cf_schedule **out, cf_error *error);

/* ================================================================================================================
   >>tune    lengths, model and machine -> ChunkSize, K and schedule
   ================================================================================================================ */

#define CF_MAX_CANDIDATES 65536
#define CF_MAX_TUNE_BATCHES 4096

typedef enum cf_tune_status {
    CF_TUNE_UNTRIED = 0, /* the search was interrupted before it came to this */
    CF_TUNE_OK,          /* simulated on every batch; its time is exact for these */
    CF_TUNE_DOMINATED,   /* cannot be among the best; `why` says how that is known, `bound` how fast it might be */
    CF_TUNE_INFEASIBLE,  /* does not fit into the limit; `bytes` says what would do */
    CF_TUNE_STATUS_COUNT
} cf_tune_status;

/* "untried", "ok", "dominated", "infeasible"; "?" for anything else. */
CHUNKFLOW_API const char *cf_tune_status_name(cf_tune_status status);

/* One point of the search. Times are means over the batches, in seconds of a whole iteration: the slowest rank's
   makespan, the gradient exchange and the optimizer. */
typedef struct cf_tune_candidate {
    int64_t split;          /* index into tuning->splits */
    int64_t chunk_size;
    int64_t k;
    cf_schedule_kind kind;
    cf_replay replay;
    int offload;            /* 1: state goes to host memory where the schedule leaves the time */
    cf_tune_status status;
    const char *why;        /* a static string; "" for CF_TUNE_OK and CF_TUNE_UNTRIED */
    int64_t same_as;        /* CF_TUNE_DOMINATED: index of a candidate with the very same schedules; -1: none */
    int limited;            /* 1: schedules of some batch had to be made under the limit, which may cost time */
    double seconds;         /* CF_TUNE_OK only, as the four below; else 0 */
    double confidence;      /* half of the 95 % interval of the mean (Student's t); 0 where there is one batch */
    double behind;          /* mean difference to the winner, batch by batch */
    double behind_confidence;
    double bubble;          /* mean bubble_useful of the slowest rank */
    double bound;           /* no schedule with this ChunkSize, K and replay is faster on these batches; 0: not known */
    double chunks;          /* mean chunks of a rank */
    int64_t bytes;          /* CF_TUNE_OK: most on any GPU at any moment; CF_TUNE_INFEASIBLE: what it would take */
    int64_t stage;          /* that GPU's stage */
    cf_memory_report memory; /* CF_TUNE_OK: what they are, at that moment; */
    int64_t peak_batch;     /* in which batch; n_batches: the one that is only for memory */
    int64_t peak_rank;
    cf_action peak_action;  /* while this pass runs */
    double peak_seconds;    /* which starts then */
} cf_tune_candidate;

/* Reported after each simulated or skipped batch of a candidate. */
typedef struct cf_tune_progress {
    int64_t done, total;            /* batches of candidates, bounds included */
    const cf_tune_candidate *best;  /* the best so far; NULL: none yet */
} cf_tune_progress;

/* What to search. Zero means default in every member; model, and gpu or (timing and limit_bytes), must be given. Lists
   rise. */
typedef struct cf_tune_desc {
    const cf_model *model;
    const cf_gpu *gpu;
    cf_parallel parallel;           /* the split; with n_gpus, a tp, pp or dp of 0 is searched for */
    int64_t n_gpus;                 /* GPUs to split over: all tp x pp x dp that the model allows, tp within a node, no
                                       more ranks than sequences of a batch. 0: as `parallel` says */
    int64_t gpus_per_node;          /* 0: 8 */
    const cf_timing *timing;        /* measured costs of these stages, in place of estimates; only without n_gpus */
    double step_seconds;            /* with timing: what an iteration costs besides */
    cf_memory_desc memory;          /* how memory is counted; its model and parallel are not used, and unfused_attention
                                       must be 0 */
    int64_t limit_bytes;            /* of each GPU. 0: gpu->memory */
    cf_pack_desc pack;              /* how to pack; chunk_size and n_ranks are not used */
    const int64_t *chunk_sizes;     /* (n_chunk_sizes) 0: 1K, 2K ... 128K */
    int64_t n_chunk_sizes;
    const int64_t *ks;              /* (n_ks) 0: 1, 2, 4 ... 32 */
    int64_t n_ks;
    const cf_schedule_kind *kinds;  /* (n_kinds) 0: paper, 1f1b, best; with virtual stages interleaved, best */
    int64_t n_kinds;
    const cf_replay *replays;       /* (n_replays) 0: pipeline, local */
    int64_t n_replays;
    int no_offload;                 /* 1: leave out candidates that move state to host memory */
    int split_backward;             /* as in cf_schedule_desc, for best */
    int64_t budget;                 /* of best, for each schedule. 0: 8 to 64, so that a plan stays within milliseconds
                                       (cf_tune_budget) */
    int64_t batch;                  /* sequences of a batch. 0: 256 */
    int64_t n_batches;              /* batches to simulate. 0: 16 */
    uint64_t seed;                  /* which batches are drawn */
    int64_t n_exact;                /* how many of the best must be exact (CF_TUNE_OK). 0: 10. CF_MAX_CANDIDATES: all
                                       but those with the schedules of another */
    int (*progress)(void *user, const cf_tune_progress *progress); /* non-zero ends the search with what there is */
    void *user;
    const cf_allocator *allocator;  /* also of the working space */
} cf_tune_desc;

/* The outcome, in one block like a plan. */
typedef struct cf_tuning {
    int64_t n_splits, n_candidates, n_batches;
    cf_parallel *splits;            /* (n_splits) */
    cf_tune_candidate *candidates;  /* (n_candidates) by split, chunk_size, k, kind, replay and, fastest, offload */
    double *seconds;                /* (n_candidates x n_batches) each batch; -1: not simulated */
    int64_t *batch_tokens;          /* (n_batches) */
    int64_t winner;                 /* index of the best candidate; -1: none fits, or none was exact when interrupted */
    int64_t n_ranked;
    int64_t *ranking;               /* (n_ranked) the candidates that are exact, best first */
    int64_t n_neighbours;
    int64_t *neighbours;            /* (n_neighbours) those that differ from the winner in one thing: up to two steps in
                                       chunk_size or k, or kind, replay or offload; a neighbour is exact, or
                                       infeasible, or has a same_as which is */
    int64_t limit_bytes;
    int64_t smallest_limit;         /* no candidate fits: the least of their `bytes`; without it none can do. Else 0 */
    int64_t n_simulated;            /* schedules that were made and timed, those for bounds not counted */
    int interrupted;                /* 1: progress asked to stop */
    cf_allocator allocator;         /* private, as in cf_plan */
} cf_tuning;

/* Searches. Draws n_batches batches of the lengths (shuffled, one after the other, again from the start when the list
   is through), the same for every candidate, and looks for the candidate with the least mean time whose schedules fit
   the limit on every batch, and on one more, for memory only: the first with the list's longest sequence in place of
   its own.

   A candidate's schedules are made without a limit and, where that does not fit, again under one, in two ways at most.
   Its memory is the simulated timeline's: on every stage, at every pass, what is held then. The result is exact for
   these batches: nothing is left out unless a lower bound of its time (cf_simulate's, and the time of the batches
   already simulated) is above that of n_exact others, or it is known to give the same schedules as another candidate,
   or `best` includes it. The same arguments give the same result, on every platform.

   *out: a new tuning, to be given to cf_tuning_free; untouched on failure. That nothing fits is no failure: then winner
   is -1. Errors: CF_ERROR_ARGUMENT and CF_ERROR_LIMIT with the member; "limit_bytes" where even a single token does not
   fit, with what a chunk of the smallest size needs in error->wanted; those of cf_pack, cf_cost_estimate,
   cf_memory_estimate and cf_schedule_make; CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, cf_tuning **out,
                                cf_error *error);

/* The same with the outcome in the caller's memory; cf_tune_size is exact for it. Working space still comes from
   desc->allocator. Rules as for cf_pack_into. */
CHUNKFLOW_API cf_result cf_tune_size(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, size_t *bytes,
                                     cf_error *error);
CHUNKFLOW_API cf_result cf_tune_into(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, void *memory,
                                     size_t bytes, cf_tuning **out, cf_error *error);

/* A copy of desc with every default filled in, but for limit_bytes and what `parallel` leaves open. */
CHUNKFLOW_API cf_tune_desc cf_tune_defaults(const cf_tune_desc *desc);

/* The budget that a plan's `best` schedule gets by default: 8 to 64 candidates, such that all of them together have
   some 20,000 passes. A plan of more than 2,500 passes takes longer in proportion: 8 candidates are the least that is
   good. */
CHUNKFLOW_API int64_t cf_tune_budget(const cf_plan *plan, int64_t n_stages, int64_t n_virtual);

/* Frees a tuning made by cf_tune. NULL is allowed. */
CHUNKFLOW_API void cf_tuning_free(cf_tuning *tuning);

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
    int64_t input;        /* lowered: boundary slot of the tensor that a receive fills or F, R, B, I reads; -1: none */
    int64_t output;       /* lowered: the same of the tensor that F, R, B or I makes, or that a send reads; -1: none */
    int64_t peer;         /* the stage at the other end of a transfer; -1 in all other actions */
    uint64_t seed;        /* for dropout and the like; the same in every pass of this chunk on this stage */
} cf_step;

typedef enum cf_resource {
    CF_RESOURCE_ACTIVATIONS = 0,
    CF_RESOURCE_STATE,
    CF_RESOURCE_BOUNDARY /* a tensor on its way from or to another stage: chunk->padded rows at most */
} cf_resource;

/* Reported after each action. */
typedef struct cf_progress {
    int64_t done, total;       /* actions */
    const cf_step *step;       /* the one just done */
    int64_t live_slots;        /* activation slots now in use */
    int64_t live_states;       /* state slots now in use */
    int64_t live_state_tokens; /* tokens whose K and V are held now, over all groups; without those in host memory */
    int64_t live_boundaries;   /* boundary slots now in use */
} cf_progress;

/* Who does the work. All callbacks are optional; pass callbacks return 0, or any other number to stop the run. Zero
   means default in every member. */
typedef struct cf_run_desc {
    void *user;                                          /* handed to every callback */
    int (*forward)(void *user, const cf_step *step);     /* F and R */
    int (*backward)(void *user, const cf_step *step);    /* B, I and W */
    int (*send)(void *user, const cf_step *step);        /* SEND_*: from slot step->output to stage step->peer */
    int (*receive)(void *user, const cf_step *step);     /* RECV_*: from stage step->peer into slot step->input */
    int (*offload)(void *user, const cf_step *step);     /* OFFLOAD: the chunk's rows of the state, which start at row
                                                            chunk->prefix, go to host memory */
    int (*prefetch)(void *user, const cf_step *step);    /* PREFETCH: and come back */
    int (*acquire)(void *user, cf_resource what, int64_t slot, int64_t owner, int64_t stage); /* a slot comes into use;
                                                            owner: the group (state) or the chunk (all others); stage:
                                                            the virtual stage that it is for */
    void (*release)(void *user, cf_resource what, int64_t slot, int64_t owner, int64_t stage); /* it goes out of use;
                                                            called for every slot that was acquired, also after an
                                                            error */
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
    int64_t peak_boundaries;   /* most boundary slots in use at once */
} cf_run_stats;

/* Runs the actions of one stage in order, calling back for each, and keeps the books: an F or R with `keep` takes an
   activation slot until the chunk's B (or W); a group's first F takes a state slot until the backward (B or I) of its
   first chunk, and holds the tokens of each forwarded chunk until that chunk's own backward.

   A lowered schedule also sends and receives. A boundary slot holds a tensor from its RECV until the end of the pass
   that reads it (local replay: of R, where F keeps nothing), or from the start of the pass that makes it until the end
   of its SEND. Both ends of every transfer come in one order for which even sends that block are enough; transfers need
   no numbers of their own. Of rows in host memory, the books count the tokens only while they are on the stage. A
   schedule that is not lowered needs no transfers where there is one stage; where there are more, it is for dry runs.

   stats: filled in however the run ends, untouched where it cannot start (bad arguments, no memory, no list of actions
   where the schedule says); NULL is allowed.

   A schedule that asks for the impossible (a backward without kept activations or before later chunks of its group are
   through, a forward whose prefix is missing, a chunk out of range ...) is CF_ERROR_SCHEDULE with the position in
   error->item; so is one that leaves a chunk out (item -1). CF_ERROR_CALLBACK carries the callback's number in
   error->got; CF_ERROR_CANCELLED, CF_ERROR_MEMORY and CF_ERROR_SPACE as they say. However it ends, every acquired slot
   has been released. */
CHUNKFLOW_API cf_result cf_run(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_run_desc *desc,
                               cf_run_stats *stats, cf_error *error);

/* The same one action at a time, for hosts that drive several stages from one thread or have an event loop of their
   own; cf_run is open, next until the list has ended, close. `desc` is copied; what it points to, the plan and the
   schedule must live until the close. */
typedef struct cf_runner cf_runner;

/* Starts a run of one stage: the checks, the working space and the errors of cf_run. Of a lowered schedule it reads the
   stage's list once, to find what will be sent, and refuses what names no pass of this stage. *out: to be given to
   cf_run_close, in desc->memory where that was given; untouched on failure. No callback is called yet. */
CHUNKFLOW_API cf_result cf_run_open(const cf_plan *plan, const cf_schedule *schedule, int64_t stage,
                                    const cf_run_desc *desc, cf_runner **out, cf_error *error);

/* The action that cf_run_next would run, or NULL at the end of the list and after an error. */
CHUNKFLOW_API const cf_action *cf_run_peek(const cf_runner *runner);

/* Runs that action. At the end of the list it does nothing and returns CF_OK; after an error it returns that result
   again and does nothing else. */
CHUNKFLOW_API cf_result cf_run_next(cf_runner *runner, cf_error *error);

/* Ends a run at any point: releases every slot that is still in use, fills in the stats (NULL: not wanted) and frees
   the runner. CF_OK if the list was run to its end and every chunk got its backward; the result of the failed action if
   there was one; CF_ERROR_CANCELLED if the list was not run to its end. NULL is allowed. */
CHUNKFLOW_API cf_result cf_run_close(cf_runner *runner, cf_run_stats *stats, cf_error *error);

/* Bytes of working space that cf_run, or cf_run_open, needs for this plan and schedule; exact. */
CHUNKFLOW_API cf_result cf_run_size(const cf_plan *plan, const cf_schedule *schedule, size_t *bytes, cf_error *error);

/* The seed that cf_run puts into a step: a 64-bit mix (splitmix64's finaliser) of run seed, chunk and virtual stage. */
CHUNKFLOW_API uint64_t cf_chunk_seed(uint64_t seed, int64_t chunk, int64_t stage);

/* ================================================================================================================
   >>write    plans, schedules and graphs as text; schedules from text
   ================================================================================================================ */

/* Gets the text piece by piece, in order; returns 0, or any other number to stop. */
typedef int (*cf_write_fn)(const char *text, size_t bytes, void *user);

/* Writes a plan: format "chunkflow-plan", version 1, chunk_size, align, max_slices, method, split, n_sequences,
   n_empty, n_tokens, n_ranks, n_steps, n_chunks, n_idle, n_groups, n_slices, lower_bound, fill; groups[] of {id,
   sequence, first_chunk, n_chunks, tokens}; chunks[] of {id, group (-1: standalone), index, prefix, tokens, padded,
   pairs, rank, slices[] of {sequence, begin, length, offset}}. One chunk a line. Errors: CF_ERROR_WRITE, with the
   callback's number. */
CHUNKFLOW_API cf_result cf_write_plan_json(const cf_plan *plan, cf_write_fn write, void *user, cf_error *error);

/* Writes a schedule: format "chunkflow-schedule", version 1, kind, stages, virtual_stages, k, replay, rank, n_chunks,
   n_actions, lowered, and actions[stage][] of {pass, chunk, stage, keep (F and R only)}. One action a line. With its
   timeline (NULL: without) also makespan, busy, replayed, bubble_useful, bubble_busy, bounds{name: value},
   peak_live[stage], peak_tokens[stage], peak_state_tokens[stage], peak_bytes[stage], and start, end and live of each
   action. Errors: CF_ERROR_ARGUMENT (a timeline of another schedule), CF_ERROR_WRITE. */
CHUNKFLOW_API cf_result cf_write_schedule_json(const cf_schedule *schedule, const cf_timeline *timeline,
                                               cf_write_fn write, void *user, cf_error *error);

/* Writes a graph for Graphviz (dot): a cluster per stage; activations and gradients solid, state and its gradient
   dashed, slots dotted; seconds as tooltips. A drawing of many nodes helps nobody: more than max_nodes (0: 500) is
   CF_ERROR_LIMIT, and nothing is written. */
CHUNKFLOW_API cf_result cf_write_graph_dot(const cf_graph *graph, int64_t max_nodes, cf_write_fn write, void *user,
                                           cf_error *error);

/* Schedules as CSV in the form that PyTorch's pipelining reads and writes: a row per stage and no header; a cell is
   <virtual stage><pass><chunk of the rank, from 0>, as in "2B0" or "3SEND_F1"; an empty cell is a time step without
   work. */
typedef enum cf_csv_format {
    CF_CSV_AUTO = 0,       /* writing: COMMS if the schedule is lowered. Reading: if a transfer is in the text */
    CF_CSV_COMPUTE_ONLY,   /* passes and empty cells */
    CF_CSV_COMPUTE_COMMS,  /* passes and transfers; no empty cells */
    CF_CSV_FORMAT_COUNT
} cf_csv_format;

typedef struct cf_csv_desc {
    int extensions;        /* writing: 1: passes that PyTorch does not know may be written: R, SEND_R, RECV_R, OFFLOAD,
                              PREFETCH. Reading takes them always */
    cf_csv_format format;  /* 0: auto */
    int legacy;            /* reading: 1: B is the gradient of the inputs only (now I), BW the whole backward (now B) */
    cf_schedule_kind kind; /* reading: the label that the schedule gets; 0 says that it is nobody's */
    cf_replay replay;      /* reading: how an R comes back. 0: pipeline */
    int64_t k;             /* reading: the schedule's K. 0: the least that allows what is in the text */
    int64_t rank;          /* reading: which rank of the plan this is */
    const cf_allocator *allocator;
} cf_csv_desc;

/* Writes a schedule, with CRLF line ends and without empty cells. COMPUTE_ONLY leaves the transfers of a lowered
   schedule out; COMPUTE_COMMS of one that is not lowered is CF_ERROR_ARGUMENT. A pass that needs `extensions` is
   CF_ERROR_ARGUMENT without them, with its index in error->item, and nothing is written: PyTorch runs no forward twice,
   so such a file is only for this library and for people. desc: NULL for all zero. */
CHUNKFLOW_API cf_result cf_write_schedule_csv(const cf_plan *plan, const cf_schedule *schedule, const cf_csv_desc *desc,
                                              cf_write_fn write, void *user, cf_error *error);

/* Reads a schedule of the plan's chunks: `bytes` bytes of text, lines ended by LF or CRLF. Every cell must be one
   action from its first character to its last, spaces and tabs around it apart. The number of rows is the number of
   stages, the virtual stages lie on them in loops (v on row v mod rows); an F keeps its activations unless R of that
   chunk is in the row.

   *out: a new schedule that cf_schedule_validate accepts, to be given to cf_schedule_free; untouched on failure.
   Errors: CF_ERROR_TEXT with the line (from 1) in error->item and the column (in bytes, from 1) in error->got, those of
   cf_schedule_validate, CF_ERROR_ARGUMENT, CF_ERROR_LIMIT, CF_ERROR_MEMORY. */
CHUNKFLOW_API cf_result cf_read_schedule_csv(const char *text, size_t bytes, const cf_plan *plan,
                                             const cf_csv_desc *desc, cf_schedule **out, cf_error *error);

/* ================================================================================================================
   >>cuda    attention, carried state and pipelines on GPUs; implemented in chunkflow_cuda.cu
   ================================================================================================================ */

/* Compile chunkflow_cuda.cu with nvcc and link it with cudart, cublas and the file that has this header's
   implementation (not a CHUNKFLOW_STATIC one, for the executor calls it); this header itself needs no CUDA. A stream is
   a cudaStream_t, `cublas` a cublasHandle_t; both names are CUDA's own. All work is put on the stream, which comes last
   but for the error in every signature; nothing is allocated and nothing waits for the device. */
#ifndef CHUNKFLOW_CUDA_API
#define CHUNKFLOW_CUDA_API extern /* never static: these functions are in a file of their own */
#endif

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
    CF_ATTENTION_MMA              /* fused, mma.sync: 16-bit types, head sizes to 128, compute capability 8.0 and up, at
                                     most 64 query heads for each key head */
} cf_attention_path;

/* "auto", "unfused", "mma"; "?" for anything else. */
CHUNKFLOW_CUDA_API const char *cf_attention_path_name(cf_attention_path path);

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
                                     padded twins); NULL: cu_seqlens_q. Slices must not overlap,
                                     and come in ascending order of these rows */
    const int32_t *starts_k;      /* likewise for keys */
    cf_dtype dtype;               /* of q, k, v, out and their gradients, but dk and dv are fp32 */
    int full;                     /* 0: causal; 1: a query sees all keys of its slice */
    int64_t window;               /* a query sees the last `window` keys up to its own place, itself included (key
                                     j > i + Sk - Sq - window). 0: no limit */
    double scale;                 /* of q . k before the softmax. 0: 1 / sqrt(head_size) */
    double softcap;               /* c: scores become c x tanh(score / c). 0: off */
    int deterministic;            /* 1: dq has the same bits in every run, for seven products instead of five (MMA);
                                     everything else always has, for the same n_processors */
    cf_attention_path path;       /* CF_ERROR_ARGUMENT if it cannot do the problem: never another one in silence */
    int64_t arch;                 /* compute capability x 10 (50 to 999) of the device that will run it; 0: the current
                                     device's */
    int64_t n_processors;         /* its multiprocessors: says how finely work is cut. 0: the current device's; if arch
                                     is given, as many as a usual device of it has */
    int64_t cache_bytes;          /* MMA: key heads are worked on in sections whose arrays fit into so much of the
                                     second-level cache. 0: 32 MB in the forward, all heads together in the backward */
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
    int64_t n_split_forward_tiles;/* tiles cut into parts (these count as tiles above) where whole ones would leave */
    int64_t n_split_key_tiles;    /* the device idle: few key heads, small chunks. Their sums meet in the workspace */
    int64_t forward_section;      /* blocks start in sections of so many key heads: in each the list's first entry */
    int64_t backward_section;     /* for all of these heads, then its second, ... */
} cf_attention;

/* cf_attention_size: bytes of host memory, aligned to CF_MEMORY_ALIGNMENT, that cf_attention_prepare needs. If you copy
   `tiles` to the device asynchronously, put the object into pinned memory. Neither call touches the device, but to ask
   for its compute capability where arch is 0. Errors: CF_ERROR_ARGUMENT, CF_ERROR_LIMIT (more than 2^30 rows, or rows x
   heads per key head), CF_ERROR_SPACE, CF_ERROR_DEVICE (arch is 0 and there is no device). Outputs are untouched on
   failure. */
CHUNKFLOW_CUDA_API cf_result cf_attention_size(const cf_attention_desc *desc, size_t *bytes, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_attention_prepare(const cf_attention_desc *desc, void *memory, size_t bytes,
                                                  const cf_attention **out, cf_error *error);

/* A (rows, heads, head_size) array on the device, its last dimension contiguous. The address must be a multiple of 16,
   the strides (in elements) of 8 for 16-bit numbers and of 4 for fp32. */
typedef struct cf_tensor {
    void *data;
    int64_t row_stride;           /* 0: heads x head_size */
    int64_t head_stride;          /* 0: head_size */
} cf_tensor;

/* The arrays of one call. Rows outside every slice are neither read nor written, in any array.

   What a NaN or an infinity cannot do: rows outside slices reach nothing; nor do keys and values that no query of the
   slice sees (those before all windows; their dk and dv are 0, or as they were), nor the gradients of queries that see
   no key. But in a key that some query sees, it may also reach other queries that are worked on in the same tile,
   though the mask hides that key from them (0 x NaN is NaN), as with every fused kernel; likewise backwards from a
   query. */
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
   cuBLAS refused a launch; error->got is its number). A kernel's own failure shows where the caller next asks the
   device. */
CHUNKFLOW_CUDA_API cf_result cf_attention_forward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                                  cf_cuda_stream stream, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_attention_backward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                                   cf_cuda_stream stream, cf_error *error);

/* ---- carried state ---- */

/* K and V of the layers of one virtual stage, or their gradients: a plane of rows for K and one for V of each layer,
   each row (n_kv_heads, head_size) numbers. A group has the same range of rows in every plane, in the order of its
   tokens, so K of its prefix and of the chunk lie together and any variable-length attention kernel reads them. */
typedef struct cf_state {
    void *data;                   /* on the device, aligned to 16: row 0 of K of layer 0 */
    int64_t n_layers;
    int64_t n_kv_heads;
    int64_t head_size;            /* n_kv_heads x head_size must be a multiple of 8 */
    cf_dtype dtype;               /* CF_DTYPE_FP32 for gradients. 0: bf16 */
    int64_t rows;                 /* from plane to plane; a state may begin at a row of a larger one */
    int one_layer;                /* 1: every layer uses the planes of one, one after the other (the gradient of a
                                     standalone chunk, which no other chunk adds to) */
} cf_state;

/* Bytes that n_rows rows take in all planes: rows x layers (1 where one_layer) x 2 x n_kv_heads x head_size x bytes of
   a number. This is the memory model's term: cf_token_bytes.state (16-bit) and .state_gradient (fp32) for each row, as
   cf_memory_token_bytes gives them for a virtual stage. Reads neither data nor rows. Errors of this and of the calls
   below: CF_ERROR_ARGUMENT or CF_ERROR_OVERFLOW with the member or argument; CF_ERROR_DEVICE. Nothing is put on the
   stream then. No rows, or no layers: nothing to do. */
CHUNKFLOW_CUDA_API cf_result cf_state_bytes(const cf_state *state, int64_t n_rows, int64_t *bytes, cf_error *error);

/* K and V of one layer from `row` on, for cf_attention_tensors and the calls below. data is NULL where layer or row are
   out of range. */
CHUNKFLOW_CUDA_API cf_tensor cf_state_k(const cf_state *state, int64_t layer, int64_t row);
CHUNKFLOW_CUDA_API cf_tensor cf_state_v(const cf_state *state, int64_t layer, int64_t row);

/* Sets rows to 0 in every plane: gradients before the first backward of a group, if that does not overwrite them
   (cf_attention_tensors.overwrite, which costs nothing), and rows that a new group takes over. Writes
   cf_state_bytes. */
CHUNKFLOW_CUDA_API cf_result cf_state_clear(const cf_state *state, int64_t first_row, int64_t n_rows,
                                            cf_cuda_stream stream, cf_error *error);

/* Copies rows to host memory and back. host: cf_state_bytes(n_rows) bytes, planes one after the other without gaps;
   pinned (cudaMallocHost), or the copy is no longer asynchronous. Moves cf_state_bytes each way: in one call of CUDA
   that copies all planes, or in one for each plane where they are 2 GB or more apart. Whoever runs them on a stream of
   its own makes it wait for the last pass that used the rows, and the next pass wait for the prefetch; other rows may
   be in use meanwhile. */
CHUNKFLOW_CUDA_API cf_result cf_state_offload(const cf_state *state, int64_t first_row, int64_t n_rows, void *host,
                                              cf_cuda_stream stream, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_state_prefetch(const cf_state *state, int64_t first_row, int64_t n_rows,
                                               const void *host, cf_cuda_stream stream, cf_error *error);

/* Rotary position embedding (Su et al., RoFormer, 2021, section 3.4). The table holds cosines and sines for any
   position below n_positions in about 2 sqrt(n_positions) rows: the angle is split into a coarse and a fine part, and
   the addition theorem puts them together in fp32. Both parts are rounded once, so the result is off by at most 2.42 x
   2^-24, about two units in the last place (up to some ten million positions; then the angle's own rounding in double
   precision shows). So the table stays in cache: 0.5 MB at 256K positions and head size 128, where a row for each
   position would take 134 MB. */
typedef struct cf_rope {
    int64_t n_positions;          /* at most 2^31. A position that is not below it is taken for the last one: nothing
                                     outside of the table is read, but the result is wrong, so give enough of them */
    int64_t rotated;              /* how many numbers of a head are rotated, from its first on; even. 0: all */
    double base;                  /* pair i turns by position x base^(-2 i / rotated). 0: 10000 */
    const double *frequencies;    /* (rotated / 2) instead of base: scaled variants. Read by cf_rope_fill only */
    int interleaved;              /* 0: pairs (i, i + rotated / 2); 1: pairs (2 i, 2 i + 1) */
    const float *table;           /* the filled table on the device, aligned to 16; NULL: rotate nothing */
} cf_rope;

/* cf_rope_size: bytes of the table. cf_rope_fill computes it in double precision into host memory (aligned to 4).
   Errors: CF_ERROR_ARGUMENT, CF_ERROR_SPACE (bytes). Outputs are untouched on failure. */
CHUNKFLOW_CUDA_API cf_result cf_rope_size(const cf_rope *rope, int64_t head_size, size_t *bytes, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_rope_fill(const cf_rope *rope, int64_t head_size, void *memory, size_t bytes,
                                          cf_error *error);

/* The rows of one chunk between projections and state, in both directions. Heads, sizes, addresses and strides as for
   attention, so the six arrays may be parts of packed rows. */
typedef struct cf_append {
    int64_t rows;                 /* of the chunk's tensors, padding included; at most 2^30 */
    int64_t n_heads, n_kv_heads, head_size;
    cf_dtype dtype;               /* of everything but dk, dv of the state. 0: bf16 */
    const int32_t *positions;     /* (rows) on the device: place of each token in its sequence; negative: padding */
    cf_rope rope;
    cf_tensor q, k, v;            /* forward: from the projections; may be parts of one packed row.
                                     backward: dq from attention, dk and dv from the state gradient (fp32) */
    cf_tensor q_out;              /* forward: rotated; may be q itself. backward: dq turned back; may be q itself */
    cf_tensor k_out, v_out;       /* forward: the state at row `prefix`; backward: to the projections */
} cf_append;

/* Forward: turns q and k by RoPE, and puts k and v into the state. Padding rows: q_out becomes 0, the state is not
   touched (the rows after a chunk may be another's). Idempotent: a replay writes the same bits over the same rows.
   Reads and writes rows x (n_heads + 2 n_kv_heads) x head_size numbers once each, in one kernel, 16 bytes at a time
   (number by number where `rotated` is no multiple of 16, or of 8 in fp32).

   Backward, once every later chunk of the group has added its part: turns dq and dk back by RoPE, converts dk and dv
   to dtype. Padding rows of all three become 0, so that they add nothing to weight gradients. Reads as many numbers as
   it writes, those of dk and dv in fp32.

   Errors: CF_ERROR_ARGUMENT, CF_ERROR_LIMIT (rows), CF_ERROR_OVERFLOW (a stride), CF_ERROR_DEVICE. */
CHUNKFLOW_CUDA_API cf_result cf_append_forward(const cf_append *append, cf_cuda_stream stream, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_append_backward(const cf_append *append, cf_cuda_stream stream, cf_error *error);

/* Sets the padding rows (positions < 0) of a (rows, row_bytes) array to 0: attention leaves them as they are, and what
   lies there must not reach a weight gradient. stride_bytes 0: row_bytes. Reads 4 bytes a row and writes the padding,
   16 bytes at a time where address, row and stride allow it. */
CHUNKFLOW_CUDA_API cf_result cf_padding_clear(void *data, int64_t rows, int64_t row_bytes, int64_t stride_bytes,
                                              const int32_t *positions, cf_cuda_stream stream, cf_error *error);

/* Keeps a stage's input for local replay: copies rows of row_bytes bytes. A stride of 0: row_bytes. Costs rows x
   row_bytes bytes, the memory model's cf_token_bytes.boundary for each row. The executor below keeps the received
   tensor itself and copies nothing. */
CHUNKFLOW_CUDA_API cf_result cf_boundary_save(void *to, int64_t to_stride, const void *from, int64_t from_stride,
                                              int64_t rows, int64_t row_bytes, cf_cuda_stream stream, cf_error *error);

/* ---- executor ---- */

/* What a pass callback gets. All addresses are on `device`, at multiples of 256 (a state: 16), and stay valid as said;
   none may be freed. */
typedef struct cf_cuda_step {
    const cf_step *step;          /* plan, chunk, action (pass, virtual stage), seed */
    cf_cuda_stream stream;        /* put all work of the pass here; do not wait for it */
    int device;                   /* current while the callback runs */
    const cf_metadata *metadata;  /* of the chunk; arrays in host memory */
    const cf_attention *attention;/* prepared for the chunk; NULL if the executor has no attention. Use tiles below */
    const void *tiles;
    const int32_t *positions;     /* (chunk->padded): cf_position_ids, but -1 in padding */
    cf_state state;               /* K and V, row 0 the group's first token; the chunk's own rows start at
                                     chunk->prefix. A standalone chunk has one of its own, from F to its backward. W:
                                     data is NULL, because rows are held until B or I */
    cf_state gradient;            /* of the same rows, fp32. B and I only: data is NULL elsewhere */
    int overwrite;                /* 1: nothing was added to `gradient` yet, and it holds anything: overwrite it */
    void *activations;            /* from this F or R to the chunk's B or W. NULL in an F that keeps nothing */
    int64_t activation_bytes;
    void *workspace;              /* this pass only */
    int64_t workspace_bytes;
    void *attention_workspace;    /* this pass only */
    size_t attention_workspace_bytes;
    const void *input;            /* F, R: from the previous virtual stage; B, I: the gradient from the next one. NULL
                                     where there is none. Gone after the pass: copy what the backward needs */
    void *output;                 /* F, R: for the next virtual stage; B, I: the gradient for the previous one. NULL
                                     where nobody wants it */
    int64_t boundary_bytes;       /* of each of the two */
} cf_cuda_step;

/* What one virtual stage needs. */
typedef struct cf_cuda_stage {
    int64_t n_layers;                 /* with attention: planes of the state */
    int64_t activation_bytes;         /* for each kept chunk, without K and V ... */
    int64_t activation_bytes_per_token;   /* ... and for each of its padded tokens */
    int64_t workspace_bytes;          /* for the pass that runs ... */
    int64_t workspace_bytes_per_token;
} cf_cuda_stage;

struct ncclComm;

/* Who does the work, and where. Zero means default in every member. Callbacks must not throw, nor free the executor
   that calls them; a load or run of it that they call is refused (CF_ERROR_ARGUMENT). */
typedef struct cf_executor_desc {
    void *user;                       /* handed to every callback */
    int (*forward)(void *user, const cf_cuda_step *step);   /* F and R; 0, or any other number to stop the run */
    int (*backward)(void *user, const cf_cuda_step *step);  /* B, I and W */
    int (*progress)(void *user, int64_t stage, const cf_progress *progress); /* when an action has been put on its
                                         stream; non-zero cancels. NULL: none */
    int64_t n_stages;                 /* 0: 1 */
    int64_t n_virtual;                /* 0: 1 */
    const cf_cuda_stage *stages;      /* (n_stages x n_virtual) by virtual stage; must be given */
    const int *devices;               /* (n_stages) CUDA device of each stage; NULL: the current one for all */
    cf_attention_desc attention;      /* heads, sizes, type, mask; the slices come from the plan. n_heads 0: no
                                         attention objects, no tiles, and no state unless n_kv_heads and head_size are given */
    int64_t boundary_bytes_per_token; /* what goes from stage to stage; needed with more than one virtual stage */
    int64_t memory_limit;             /* most bytes of device memory of one stage. 0: no limit */
    int offload_gradients;            /* 1: OFFLOAD and PREFETCH move the rows of dK and dV too, where they exist */
    int timeline;                     /* 1: measure start and end of every action */
    int blocking;                     /* 1: wait after every action, so that an error of the device is found at the
                                         action that made it. Slow */
    double timeout;                   /* seconds without progress of the device after which a run gives up. 0: 600 */
    uint64_t seed;
    struct ncclComm *nccl;            /* one stage per process: this process runs the stage that is its rank in this
                                         communicator, of n_stages ranks, and nobody else uses it during a run. NULL:
                                         all stages in this process, which are 256 virtual ones at most */
    const cf_allocator *allocator;    /* host memory; NULL: malloc */
} cf_executor_desc;

typedef struct cf_executor cf_executor;

/* Makes an executor: streams (compute, state out, state in, and one for each direction of transfers) on every stage's
   device, where all kernels of chunkflow_cuda.cu are loaded too, so that none is loaded beside a waiting receive (do
   likewise with your own). Device memory is taken by cf_executor_load. desc and its arrays are copied. *out: to be
   given to cf_executor_free; untouched on failure. With peer access between two devices transfers are direct; CUDA
   stages them otherwise. With nccl set in a build without CHUNKFLOW_NCCL: CF_ERROR_ARGUMENT. */
CHUNKFLOW_CUDA_API cf_result cf_executor_create(const cf_executor_desc *desc, cf_executor **out, cf_error *error);

/* Makes ready for a batch: lowers the schedule unless it is lowered, walks it once and gives every activation, state
   range, boundary tensor and host buffer its place, so that nothing is allocated while it runs; copies the chunks'
   metadata to the device. Memory from an earlier batch is used again and grows only where it must. plan and schedule
   must live until the next load or the free. Whatever a load returns, the batch before it is gone; after a failure the
   executor has none, but can load another. With NCCL a load may fail in one process alone: agree on its results before
   anybody runs.

   CF_ERROR_LIMIT: memory_limit (error->item: the stage, ->wanted: bytes that it needs, ->got: the limit), or an item
   that is too large (the field names the member that makes it so). CF_ERROR_MEMORY: field "memory" for the device,
   "host" for pinned memory, "allocator" for the application's own (error->item: the stage, ->wanted: bytes asked for,
   ->got: bytes that the device has free, else 0). CF_ERROR_DEVICE, field "timeout": work on a stage's stream did not
   end. CF_ERROR_ARGUMENT, CF_ERROR_PLAN, CF_ERROR_SCHEDULE, CF_ERROR_OVERFLOW. */
CHUNKFLOW_CUDA_API cf_result cf_executor_load(cf_executor *executor, const cf_plan *plan, const cf_schedule *schedule,
                                              cf_error *error);

/* Runs the loaded batch once: puts the actions of all stages on their streams, in an order in which no stage waits for
   one that is not issued, at most 4 passes for each stage ahead of the device, and waits for the end. (A stream takes
   about a thousand launches. A callback that puts more than a few hundred on it may be held up in a launch by a device
   that hangs, where no `timeout` helps.) Work that was put on cf_executor_stream before comes first there;
   nothing waits for other streams, the default one included (a cudaMemcpy from pageable memory may still be under way
   when it returns): synchronise with those first. May be called again for the same batch.

   If a callback reports an error or CUDA does, nothing more is issued, what was issued is waited for, every slot is
   released, and the error names action, chunk and stage: error->item is the position in the stage's list, ->got the
   callback's or CUDA's number. CF_ERROR_CALLBACK, CF_ERROR_CANCELLED, CF_ERROR_DEVICE, CF_ERROR_SCHEDULE. An error of
   the device itself shows later than the action that made it: it is put down to the first action that is not known to
   have ended; `blocking` finds it exactly. After a `timeout` the executor can be used again once the device has come to
   an end.

   An error that a callback leaves to cudaGetLastError is an error of its action; cudaErrorNotReady is none. One that is
   there before the run is reported, and nothing of the stage starts (CF_ERROR_DEVICE, field "device", item -1). No
   function of the executor leaves an error of its own there, nor takes away the application's, but for what CUDA itself
   does: a look at a device that is busy puts cudaErrorNotReady in its place.

   With NCCL every process must call it. The other stages go on with their transfers, so that no process hangs, and
   report the lowest stage that failed (field "nccl", ->got the stage). Where a device or a process is gone, the others
   find that out from NCCL or after `timeout`: the communicator is then aborted (ncclCommAbort), the executor of no more
   use. */
CHUNKFLOW_CUDA_API cf_result cf_executor_run(cf_executor *executor, cf_error *error);

/* The compute stream of a stage, for what must come before or after its passes (zeroing gradients, the optimizer). NULL
   where this process does not run the stage. */
CHUNKFLOW_CUDA_API cf_cuda_stream cf_executor_stream(const cf_executor *executor, int64_t stage);

/* The lowered schedule that is loaded; NULL if there is none. Lives until the next load. */
CHUNKFLOW_CUDA_API const cf_schedule *cf_executor_schedule(const cf_executor *executor);

/* Memory of one stage, in bytes of its device but for `host`. Rows of a group, and each item of the arena, must lie
   together, so there are gaps. In small random batches what is laid out came to at most 1.8 times what is live in the
   arena, 1.9 times in the state and 2.0 times in the gradient, and to much less as a rule; memory_limit counts what is
   laid out. */
typedef struct cf_executor_memory {
    int64_t arena;                /* activations and boundary tensors: what was laid out ... */
    int64_t arena_live;           /* ... and the most that is in use at once. arena / arena_live is the loss in gaps */
    int64_t state;                /* K and V */
    int64_t state_live;
    int64_t gradient;             /* dK and dV of groups */
    int64_t gradient_live;
    int64_t workspace;            /* what the pass that runs has to itself: yours, attention's, and dK and dV of a
                                     standalone chunk, of one layer at a time */
    int64_t metadata;             /* positions and tiles of all chunks */
    int64_t total;                /* sum of the above without the _live ones: the high-water mark of the batch */
    int64_t allocated;            /* what the executor holds on the device now, also for earlier, larger batches */
    int64_t host;                 /* pinned host memory */
    cf_run_stats stats;           /* the interpreter's books */
} cf_executor_memory;

CHUNKFLOW_CUDA_API cf_result cf_executor_memory_of(const cf_executor *executor, int64_t stage, cf_executor_memory *out,
                                                   cf_error *error);

/* When each action of cf_executor_schedule ran in the last run, from events on the streams: passes on the compute
   stream, transfers on theirs (a send and its receive have the same times), in the form of the simulator
   (cf_timeline_measured). Clocks of different devices are put together at the start of the run, to a few microseconds.
   *out: to be given to cf_timeline_free. CF_ERROR_ARGUMENT without desc.timeline or a run that ended well. With NCCL
   every process must call it, and each gets the whole. */
CHUNKFLOW_CUDA_API cf_result cf_executor_timeline(cf_executor *executor, const cf_allocator *allocator,
                                                  cf_timeline **out, cf_error *error);

/* Waits for the device, up to the timeout (a second where that has passed before), and frees everything. What a device
   that does not come to an end may still use is left to it: freeing device and pinned memory would wait for ever. NULL
   is allowed. */
CHUNKFLOW_CUDA_API void cf_executor_free(cf_executor *executor);

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

/* Returns code, so that a failing function can return in one line. Inline, so that compilers see that it is not CF_OK
   and do not suspect outputs of being used unset. */
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
#define CF__GOLDEN 0x9e3779b97f4a7c15u /* the step of splitmix64: 2^64 / the golden ratio, odd */

/* The finaliser of splitmix64: every bit of the answer depends on every bit of x. */
static uint64_t cf__mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* The next of a row of random numbers: splitmix64. */
static uint64_t cf__draw(uint64_t *state) { return cf__mix(*state += CF__GOLDEN); }

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
/* Packing spends its time here: no division for the usual 1. */
static int64_t cf__round_up(int64_t a, int64_t multiple) {
    return multiple == 1 ? a : cf__div_up(a, multiple) * multiple;
}

/* Cuts one block into arrays. With base == NULL it only adds up, so the size query and the real layout are one function
   and cannot drift apart. overflow stays set once a size did not fit. */
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
    double seconds;
    if (cost == NULL) return 0;
    seconds = cost->constant + cf__product(cost->per_token, (double)tokens);
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

/* ---- passes of a stage ---- */

/* All defaults filled in: one cost for each compute pass, by its cf_pass. */
typedef struct cf__costs {
    cf_pass_cost of[CF_COMPUTE_PASS_COUNT];
} cf__costs;

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
            if (!cf__is_cost(costs[i]->constant) || !cf__is_cost(costs[i]->per_token) ||
                !cf__is_cost(costs[i]->per_pair))
                return cf__fail(error, CF_ERROR_ARGUMENT, "timing.stages", v, 0, -1, "must be finite and not negative");
    }
    return CF_OK;
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

static inline cf_result cf__fail_size(cf_error *error, const char *field) {
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
    double step = 0;
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

   A unit is what gets a rank as a whole: units 0 .. n_groups - 1 are the groups (their room is the free space of the
   last chunk), the others are standalone chunks. An item is a short sequence.
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

/* Open chunks, found by room: best fit asks for the least room that is enough. Rooms fall into buckets of 2^shift, a
   bitmap tree (64 ways) finds the next bucket in use, and within a bucket the distinct rooms form an ascending list,
   each with a stack of chunks. With shift 0, the usual case, a bucket is one room. Very large chunks get wider buckets,
   so that space stays in proportion to the items. */
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

#define CF__MAX_COST_SLICES ((int64_t)1 << 22) /* CF_SPLIT_COST searches; one sequence may not take minutes */

/* ---- options ---- */

CHUNKFLOW_API cf_pack_desc cf_pack_defaults(const cf_pack_desc *desc) {
    cf_pack_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
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

/* CF_SPLIT_COST. Start from the mean cost of full slices as the target (and a little more: rounding must not push it
   under the cost of slices that are all alike): each resulting slice is either full or costs at least about the mean,
   so there are at most about twice as many. Keep that number and press the target down by bisection. Steps are capped
   so that a sequence of millions of slices does not take seconds. */
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
    for (i = 0; i < steps && result == CF_OK && high - low > cf__product(high, 1e-7); i++) {
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
            return cf__fail(p->error, CF_ERROR_OVERFLOW, "lengths", i, INT64_MAX, length,
                            "the sum of all lengths overflows");
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

/* Radix sort by falling length; equal lengths keep their order. Returns whichever of the two arrays holds the result.
   */
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

/* Martello and Toth's L2: for each threshold t <= C / 2, sizes above C - t have a chunk to themselves, sizes above C /
   2 one each, and the sizes in t .. C / 2 fill what those leave. t = 0 gives total / C. `sizes` falls. */
static int64_t cf__l2_bound(const uint64_t *sizes, int64_t n, int64_t chunk_size) {
    int64_t big = 0, alone, i, free_space = 0, best = 0, small_sum = 0;
    while (big < n && (int64_t)sizes[big] * 2 > chunk_size) big++;
    alone = big; /* sizes[alone .. big) share with sizes of at least the threshold */
    for (i = big; i < n; i++) {
        int64_t t = (int64_t)sizes[i];
        small_sum += t;
        while (alone > 0 && (int64_t)sizes[alone - 1] <= chunk_size - t)
            free_space += chunk_size - (int64_t)sizes[--alone];
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

/* First fit, longest first. It gives unit 0 the largest item that fits, then again, then unit 1 ... : the same packing
   as taking the items one by one, but each unit is filled once, from the runs. Returns the number of units; with `dry`
   that is all it does. Uses up the runs. */
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

/* Fills unit_of, units and order by the method asked for. Best fit gives way to first fit where that needs fewer
   chunks, which it is asked only if there is something to win. */
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

/* Puts units first .. first + n - 1 into p->sorted, dearest first, and gives each to the least loaded rank that has
   steps left for it. Returns 0 if one fits nowhere. */
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

/* Evens out the dearest and the cheapest rank, again and again, while that helps and the work stays near linear. Next
   fit keeps its items where they are. */
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
    const cf_chunk *c = plan != NULL && chunk >= 0 && chunk < plan->n_chunks ? &plan->chunks[chunk] : NULL;
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
    int64_t i, n_used;
    if (stats == NULL) return;
    memset(stats, 0, sizeof *stats);
    if (plan == NULL) return;
    n_used = plan->n_chunks - plan->n_idle;
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
                  {"n_slices", plan->n_slices, 0, INT64_MAX}};
    size_t i;
    for (i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        int64_t value = counts[i].value, wanted = value < counts[i].least ? counts[i].least : counts[i].most;
        if (value < counts[i].least || value > counts[i].most)
            return cf__bad_plan(&check, counts[i].field, -1, wanted, value, "out of range");
    }
    if (plan->lower_bound < 0 || plan->lower_bound > plan->n_chunks - plan->n_idle)
        return cf__bad_plan(&check, "lower_bound", -1, plan->n_chunks - plan->n_idle, plan->lower_bound,
                            "out of range");
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
        return cf__bad_plan(check, "slices.sequence", id, check->plan->n_sequences - 1, s->sequence,
                            "no such sequence");
    length = check->lengths[s->sequence];
    if (s->begin < 0 || s->begin >= length)
        return cf__bad_plan(check, "slices.begin", id, length - 1, s->begin, "outside its sequence");
    if (s->length < 1 || s->length > length - s->begin)
        return cf__bad_plan(check, "slices.length", id, length - s->begin, s->length, "outside its sequence");
    if (s->offset != offset) return cf__bad_plan(check, "slices.offset", id, offset, s->offset, "wrong place in chunk");
    if (!whole) return CF_OK;
    if (s->begin != 0) return cf__bad_plan(check, "slices.begin", id, 0, s->begin, "must hold a whole sequence");
    if (s->length != length)
        return cf__bad_plan(check, "slices.length", id, length, s->length, "must hold a whole sequence");
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
    if (c->first_slice != first)
        return cf__bad_plan(check, "chunks.first_slice", id, first, c->first_slice, "gap or overlap");
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
    if (c->n_slices < 1)
        return cf__bad_plan(check, "chunks.n_slices", id, 1, c->n_slices, "its group's slice is missing");
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
        const cf_slice *s;
        if (c->group != id) return cf__bad_plan(check, "chunks.group", chunk, id, c->group, "another group's chunk");
        if (c->prefix != prefix) return cf__bad_plan(check, "chunks.prefix", chunk, prefix, c->prefix, "wrong sum");
        s = &plan->slices[c->first_slice];
        if (s->sequence != g->sequence)
            return cf__bad_plan(check, "slices.sequence", c->first_slice, g->sequence, s->sequence, "not its group's");
        if (s->begin != prefix)
            return cf__bad_plan(check, "slices.begin", c->first_slice, prefix, s->begin, "out of order");
        if (i + 1 < g->n_chunks && s->length % plan->align != 0)
            return cf__bad_plan(check, "slices.length", c->first_slice, plan->align, s->length, "not aligned");
        prefix += s->length;
    }
    if (prefix != check->lengths[g->sequence])
        return cf__bad_plan(check, "groups.n_chunks", id, check->lengths[g->sequence], prefix,
                            "tokens missing at the end");
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
        return cf__bad_plan(check, "align", -1, 0, plan->chunk_size % plan->align,
                            "does not divide chunk_size; remainder");
    for (i = 0; i < plan->n_chunks; i++) {
        if ((result = cf__check_membership(check, i)) != CF_OK) return result;
        if ((result = cf__check_chunk(check, i, first)) != CF_OK) return result;
        first += plan->chunks[i].n_slices;
        n_idle += plan->chunks[i].n_slices == 0;
    }
    if (first != plan->n_slices)
        return cf__bad_plan(check, "n_slices", -1, first, plan->n_slices, "slices in no chunk");
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

/* Whether one chunk fits every stage, with this many tokens of state and of its gradient beside it. */
static cf_result cf__check_chunk_fits(const cf_memory_desc *desc, int64_t chunk_tokens, int64_t state_tokens,
                                      int64_t limit_bytes, cf_error *error) {
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
    load.state_tokens = load.state_gradient_tokens = state_tokens;
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

CHUNKFLOW_API cf_result cf_memory_check_limit(const cf_memory_desc *desc, int64_t chunk_tokens, int64_t limit_bytes,
                                              cf_error *error) {
    return cf__check_chunk_fits(desc, chunk_tokens, 0, limit_bytes, error);
}

/* ================================================================================================================
   >>graph

   A chunk has 2 to 4 passes on every virtual stage, so its nodes are numbered pass by pass and, within a pass, stage by
   stage. What a node waits for follows from its number; only the other direction needs to be sorted.
   ================================================================================================================ */

CHUNKFLOW_API const char *cf_pass_name(cf_pass pass) {
    static const char *const names[CF_PASS_COUNT] = {
        "F", "R", "B", "I", "W", "SEND_F", "RECV_F", "SEND_R", "RECV_R", "SEND_B", "RECV_B", "OFFLOAD", "PREFETCH"};
    return cf__name(names, CF_PASS_COUNT, (int64_t)pass);
}

CHUNKFLOW_API const char *cf_replay_name(cf_replay replay) {
    static const char *const names[CF_REPLAY_COUNT] = {"?", "pipeline", "local"};
    return cf__name(names, CF_REPLAY_COUNT, (int64_t)replay);
}

CHUNKFLOW_API const char *cf_edge_name(cf_edge_why why) {
    static const char *const names[CF_EDGE_COUNT] = {"activation", "gradient", "state", "state gradient",
                                                     "replay",     "own",      "slot"};
    return cf__name(names, CF_EDGE_COUNT, (int64_t)why);
}

CHUNKFLOW_API cf_graph_desc cf_graph_defaults(const cf_graph_desc *desc) {
    cf_graph_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    if (full.n_stages == 0) full.n_stages = 1;
    if (full.n_virtual == 0) full.n_virtual = 1;
    if (full.k == 0) full.k = 1;
    if (full.replay == CF_REPLAY_DEFAULT) full.replay = CF_REPLAY_PIPELINE;
    return full;
}

/* ---- sizes ---- */

/* Everything that the builder knows. */
typedef struct cf__grapher {
    cf_graph_desc desc; /* defaults filled in */
    const cf_plan *plan;
    cf_error *error;
    int64_t n_stages;   /* virtual stages in all */
    int64_t n_nodes, n_edges;
} cf__grapher;

static cf__costs cf__costs_at(const cf_timing *timing, int64_t stage) {
    cf_stage_cost unit;
    memset(&unit, 0, sizeof unit);
    if (timing == NULL) return cf__fill_costs(&unit);
    return cf__fill_costs(timing->stages != NULL ? &timing->stages[stage] : &timing->all);
}

/* Chunks of the unit that chunk `id` belongs to (its group's, or 1). 0 where plan and group disagree. */
static int64_t cf__unit_of(const cf_plan *plan, int64_t id) {
    const cf_chunk *c = &plan->chunks[id];
    const cf_group *g;
    if (c->group == -1) return 1;
    if (c->group < 0 || c->group >= plan->n_groups) return 0;
    g = &plan->groups[c->group];
    if (g->first_chunk < 0 || g->first_chunk > id || id - g->first_chunk != c->index || c->index >= g->n_chunks)
        return 0;
    if (g->n_chunks > plan->n_steps - g->first_chunk % plan->n_steps) return 0;
    return g->n_chunks;
}

static int cf__is_replayed(const cf__grapher *g, int64_t chunk) {
    const cf_chunk *c = &g->plan->chunks[chunk];
    return c->group >= 0 && c->index < g->plan->groups[c->group].n_chunks - g->desc.k;
}

static int64_t cf__chunk_nodes(const cf__grapher *g, int64_t chunk) {
    return (2 + (g->desc.split != 0) + cf__is_replayed(g, chunk)) * g->n_stages;
}

/* How many edges end in the nodes of a chunk; cf__edges_into is the same, one by one. */
static int64_t cf__chunk_edges(const cf__grapher *g, int64_t chunk) {
    const cf_chunk *c = &g->plan->chunks[chunk];
    int64_t n = g->n_stages, edges = 2 * (n - 1) + n;
    if (g->desc.split) edges += n;
    if (c->group >= 0 && c->index > 0) edges += n;
    if (c->group >= 0 && c->index + 1 < g->plan->groups[c->group].n_chunks) edges += n;
    if (cf__is_replayed(g, chunk)) {
        edges += n;
        if (g->desc.replay == CF_REPLAY_PIPELINE) edges += n - 1;
        if (!g->desc.no_slots) edges += n;
    }
    return edges;
}

static cf_result cf__check_graph_desc(const cf_plan *plan, const cf_graph_desc *desc, cf_error *error) {
    cf_result result;
    if ((result = cf__range(desc->n_stages, 1, INT32_MAX, "n_stages", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_virtual, 1, INT32_MAX / desc->n_stages, "n_virtual", error)) != CF_OK)
        return result;
    if ((result = cf__range(desc->k, 1, INT64_MAX, "k", error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)desc->replay, 0, CF_REPLAY_COUNT - 1, "replay", error)) != CF_OK) return result;
    if ((result = cf__choice(desc->rank, 0, plan->n_ranks - 1, "rank", error)) != CF_OK) return result;
    if (desc->timing == NULL) return CF_OK;
    return cf__check_timing(desc->timing, desc->n_stages * desc->n_virtual, error);
}

/* Everything but a pass without finite seconds is refused here. */
static cf_result cf__grapher_start(cf__grapher *g, const cf_plan *plan, const cf_graph_desc *desc, cf_error *error) {
    int64_t id, end;
    cf_result result;
    memset(g, 0, sizeof *g);
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (desc == NULL) return cf__fail_null(error, "desc");
    g->desc = cf_graph_defaults(desc);
    g->plan = plan;
    g->error = error;
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__check_graph_desc(plan, &g->desc, error)) != CF_OK) return result;
    g->n_stages = g->desc.n_stages * g->desc.n_virtual;
    id = g->desc.rank * plan->n_steps;
    for (end = id + plan->n_steps; id < end; id++) {
        if (cf__unit_of(plan, id) == 0)
            return cf__fail(error, CF_ERROR_PLAN, "chunks.group", id, -1, plan->chunks[id].group,
                            "chunks and groups disagree");
        g->n_nodes += cf__chunk_nodes(g, id);
        g->n_edges += cf__chunk_edges(g, id);
        if (g->n_nodes > CF_MAX_NODES)
            return cf__fail(error, CF_ERROR_LIMIT, "n_nodes", -1, CF_MAX_NODES, g->n_nodes, "too many passes");
    }
    return CF_OK;
}

static cf_graph *cf__layout_graph(cf_graph *header, cf__carver *carver) {
    cf_graph *graph = (cf_graph *)cf__take(carver, 1, sizeof(cf_graph));
    header->first = (int64_t *)cf__take(carver, header->n_steps + 1, sizeof(int64_t));
    header->nodes = (cf_node *)cf__take(carver, header->n_nodes, sizeof(cf_node));
    header->first_in = (int64_t *)cf__take(carver, header->n_nodes + 1, sizeof(int64_t));
    header->edges = (cf_edge *)cf__take(carver, header->n_edges, sizeof(cf_edge));
    header->first_out = (int64_t *)cf__take(carver, header->n_nodes + 1, sizeof(int64_t));
    header->out = (int32_t *)cf__take(carver, header->n_edges, sizeof(int32_t));
    return graph;
}

static cf_graph cf__graph_header(const cf__grapher *g) {
    cf_graph graph;
    memset(&graph, 0, sizeof graph);
    graph.n_stages = g->desc.n_stages;
    graph.n_virtual = g->desc.n_virtual;
    graph.k = g->desc.k;
    graph.replay = g->desc.replay;
    graph.split = g->desc.split != 0;
    graph.rank = g->desc.rank;
    graph.n_steps = g->plan->n_steps;
    graph.n_nodes = g->n_nodes;
    graph.n_edges = g->n_edges;
    return graph;
}

/* ---- building ---- */

CHUNKFLOW_API int64_t cf_graph_node(const cf_graph *graph, cf_pass pass, int64_t chunk, int64_t stage) {
    int64_t n_stages = graph->n_stages * graph->n_virtual, i = chunk - graph->rank * graph->n_steps, place;
    int replayed;
    if (chunk < 0 || i < 0 || i >= graph->n_steps || stage < 0 || stage >= n_stages) return -1;
    replayed = graph->first[i + 1] - graph->first[i] > (2 + graph->split) * n_stages;
    if (pass == CF_F) place = 0;
    else if (pass == CF_R && replayed) place = 1;
    else if (pass == (graph->split ? CF_I : CF_B)) place = 1 + replayed;
    else if (pass == CF_W && graph->split) place = 2 + replayed;
    else return -1;
    return graph->first[i] + place * n_stages + stage;
}

/* The nodes of all chunks on one virtual stage. */
static cf_result cf__put_nodes(const cf__grapher *g, cf_graph *graph, int64_t stage) {
    int64_t first = g->desc.rank * g->plan->n_steps, chunk;
    cf__costs costs = cf__costs_at(g->desc.timing, stage);
    int pass;
    for (chunk = first; chunk < first + g->plan->n_steps; chunk++) {
        const cf_chunk *c = &g->plan->chunks[chunk];
        for (pass = CF_F; pass <= CF_W; pass++) {
            int64_t id = cf_graph_node(graph, (cf_pass)pass, chunk, stage);
            cf_node *node;
            if (id < 0) continue;
            node = &graph->nodes[id];
            node->seconds = cf_cost_seconds(&costs.of[pass], c->tokens, c->pairs);
            node->chunk = (int32_t)chunk;
            node->stage = (int32_t)stage;
            node->pass = (int32_t)pass;
            node->keep = pass == CF_R || (pass == CF_F && !cf__is_replayed(g, chunk));
            if (!cf__is_cost(node->seconds))
                return cf__fail(g->error, CF_ERROR_OVERFLOW, "timing", chunk, 0, -1,
                                "the seconds of a pass of this chunk are not finite");
        }
    }
    return CF_OK;
}

/* Seconds of a chunk's way from stage to stage; padding travels too. */
static double cf__way_seconds(const cf__grapher *g, int64_t chunk) {
    const cf_timing *timing = g->desc.timing;
    if (timing == NULL || g->desc.n_stages == 1) return 0;
    return timing->latency + cf__product(timing->seconds_per_token, (double)g->plan->chunks[chunk].padded);
}

/* Where the edges of a node are put: all but the last two arguments of cf__put_edge are the same for one node. */
typedef struct cf__edge_list {
    const cf_graph *graph;
    cf_edge *next;
    int64_t to;
} cf__edge_list;

static void cf__put_edge(cf__edge_list *list, cf_edge_why why, double seconds, cf_pass pass, int64_t chunk,
                         int64_t stage) {
    cf_edge *edge = list->next++;
    memset(edge, 0, sizeof *edge);
    edge->seconds = seconds;
    edge->from = (int32_t)cf_graph_node(list->graph, pass, chunk, stage);
    edge->to = (int32_t)list->to;
    edge->why = (int32_t)why;
}

/* What one node waits for. */
static void cf__edges_into(const cf__grapher *g, cf__edge_list *list, int64_t id) {
    const cf_node *node = &list->graph->nodes[id];
    const cf_chunk *c = &g->plan->chunks[node->chunk];
    int64_t chunk = node->chunk, stage = node->stage;
    double transfer = cf__way_seconds(g, chunk);
    cf_pass back = g->desc.split ? CF_I : CF_B, pass = (cf_pass)node->pass;
    list->to = id;
    if (pass == CF_F) {
        if (stage > 0) cf__put_edge(list, CF_EDGE_ACTIVATION, transfer, CF_F, chunk, stage - 1);
        if (c->group >= 0 && c->index > 0) cf__put_edge(list, CF_EDGE_STATE, 0, CF_F, chunk - 1, stage);
    } else if (pass == CF_R) {
        cf__put_edge(list, CF_EDGE_REPLAY, 0, CF_F, chunk, stage);
        if (stage > 0 && g->desc.replay == CF_REPLAY_PIPELINE)
            cf__put_edge(list, CF_EDGE_ACTIVATION, transfer, CF_R, chunk, stage - 1);
        if (!g->desc.no_slots)
            cf__put_edge(list, CF_EDGE_SLOT, 0, g->desc.split ? CF_W : CF_B, chunk + g->desc.k, stage);
    } else if (pass == CF_W) {
        cf__put_edge(list, CF_EDGE_OWN, 0, CF_I, chunk, stage);
    } else {
        cf__put_edge(list, CF_EDGE_OWN, 0, cf__is_replayed(g, chunk) ? CF_R : CF_F, chunk, stage);
        if (stage + 1 < g->n_stages) cf__put_edge(list, CF_EDGE_GRADIENT, transfer, back, chunk, stage + 1);
        if (c->group >= 0 && c->index + 1 < g->plan->groups[c->group].n_chunks)
            cf__put_edge(list, CF_EDGE_STATE_GRADIENT, 0, back, chunk + 1, stage);
    }
}

/* The other direction, by counting. first_out[i + 1] is where node i's next edge goes, until all are placed. */
static void cf__sort_edges_out(cf_graph *graph) {
    int64_t i, sum = 0;
    for (i = 0; i <= graph->n_nodes; i++) graph->first_out[i] = 0;
    for (i = 0; i < graph->n_edges; i++) graph->first_out[graph->edges[i].from + 1]++;
    for (i = 1; i <= graph->n_nodes; i++) {
        int64_t count = graph->first_out[i];
        graph->first_out[i] = sum;
        sum += count;
    }
    for (i = 0; i < graph->n_edges; i++) graph->out[graph->first_out[graph->edges[i].from + 1]++] = (int32_t)i;
}

static cf_result cf__write_graph(const cf__grapher *g, cf_graph *graph) {
    cf__edge_list list = {graph, graph->edges, 0};
    int64_t i, first = g->desc.rank * g->plan->n_steps;
    cf_result result;
    graph->first[0] = 0;
    for (i = 0; i < graph->n_steps; i++) graph->first[i + 1] = graph->first[i] + cf__chunk_nodes(g, first + i);
    for (i = 0; i < g->n_stages && graph->n_steps > 0; i++)
        if ((result = cf__put_nodes(g, graph, i)) != CF_OK) return result;
    for (i = 0; i < graph->n_nodes; i++) {
        graph->first_in[i] = list.next - graph->edges;
        cf__edges_into(g, &list, i);
    }
    graph->first_in[i] = list.next - graph->edges;
    cf__sort_edges_out(graph);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_graph_size(const cf_plan *plan, const cf_graph_desc *desc, size_t *bytes, cf_error *error) {
    cf__grapher g;
    cf_graph header;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__grapher_start(&g, plan, desc, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    header = cf__graph_header(&g);
    cf__layout_graph(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_nodes");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_graph_into(const cf_plan *plan, const cf_graph_desc *desc, void *memory, size_t bytes,
                                      cf_graph **out, cf_error *error) {
    cf__grapher g;
    cf_graph header, *graph;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__grapher_start(&g, plan, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    header = cf__graph_header(&g);
    cf__layout_graph(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_nodes");
    if ((result = cf__check_memory(memory, bytes, carver.used, error)) != CF_OK) return result;
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    graph = cf__layout_graph(&header, &carver);
    *graph = header;
    if ((result = cf__write_graph(&g, graph)) != CF_OK) return result;
    *out = graph;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_graph_make(const cf_plan *plan, const cf_graph_desc *desc, cf_graph **out, cf_error *error) {
    cf_allocator allocator;
    size_t bytes;
    void *memory;
    cf_result result = cf_graph_size(plan, desc, &bytes, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(desc->allocator, &allocator, error)) != CF_OK) return result;
    memory = allocator.alloc(bytes, allocator.user);
    if (memory == NULL) return cf__fail_memory(error, bytes);
    result = cf_graph_into(plan, desc, memory, bytes, out, error);
    if (result == CF_OK) (*out)->allocator = allocator;
    else allocator.release(memory, allocator.user);
    return result;
}

CHUNKFLOW_API void cf_graph_free(cf_graph *graph) {
    if (graph != NULL && graph->allocator.release != NULL) {
        cf_allocator allocator = graph->allocator;
        allocator.release(graph, allocator.user);
    }
}

/* ---- checking a graph ---- */

static cf_result cf__bad_graph(cf_error *error, const char *field, int64_t item, int64_t wanted, int64_t got,
                               const char *why) {
    return cf__fail(error, CF_ERROR_GRAPH, field, item, wanted, got, why);
}

static cf_result cf__check_graph_counts(const cf_graph *graph, cf_error *error) {
    const struct {
        const char *field;
        int64_t value, least, most;
    } counts[] = {{"n_stages", graph->n_stages, 1, INT32_MAX},
                  {"n_virtual", graph->n_virtual, 1, INT32_MAX},
                  {"replay", (int64_t)graph->replay, CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL},
                  {"split", graph->split, 0, 1},
                  {"rank", graph->rank, 0, CF_MAX_RANKS - 1},
                  {"n_steps", graph->n_steps, 0, CF_MAX_CHUNKS},
                  {"n_nodes", graph->n_nodes, 0, CF_MAX_NODES},
                  {"n_edges", graph->n_edges, 0, CF_MAX_SUCCESSORS * CF_MAX_NODES - 1}};
    const void *pointers[6];
    static const char *const fields[6] = {"first", "first_in", "first_out", "nodes", "edges", "out"};
    size_t i;
    for (i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (counts[i].value < counts[i].least || counts[i].value > counts[i].most)
            return cf__bad_graph(error, counts[i].field, -1,
                                 counts[i].value < counts[i].least ? counts[i].least : counts[i].most, counts[i].value,
                                 "out of range");
    if (graph->n_stages * graph->n_virtual > INT32_MAX)
        return cf__bad_graph(error, "n_virtual", -1, INT32_MAX / graph->n_stages, graph->n_virtual, "out of range");
    pointers[0] = graph->first;
    pointers[1] = graph->first_in;
    pointers[2] = graph->first_out;
    pointers[3] = graph->nodes;
    pointers[4] = graph->edges;
    pointers[5] = graph->out;
    for (i = 0; i < 6; i++)
        if (pointers[i] == NULL && (i < 3 || (i == 3 && graph->n_nodes > 0) || (i > 3 && graph->n_edges > 0)))
            return cf__bad_graph(error, fields[i], -1, 1, 0, "is NULL");
    return CF_OK;
}

/* An index array: from 0, never falling, up to `end`. Stops at the first bad number, which is read from the array
   itself. */
static cf_result cf__check_first(const int64_t *first, int64_t n, int64_t end, const char *field, cf_error *error) {
    int64_t i;
    if (first[0] != 0) return cf__bad_graph(error, field, 0, 0, first[0], "must start at 0");
    for (i = 0; i < n; i++)
        if (first[i + 1] < first[i] || first[i + 1] > end)
            return cf__bad_graph(error, field, i + 1, first[i + 1] < first[i] ? first[i] : end, first[i + 1],
                                 "falls or runs out of range");
    if (first[n] != end) return cf__bad_graph(error, field, n, end, first[n], "does not end with the last item");
    return CF_OK;
}

static cf_result cf__check_nodes(const cf_graph *graph, cf_error *error) {
    int64_t i, id, n_stages = graph->n_stages * graph->n_virtual;
    for (i = 0; i < graph->n_steps; i++) {
        int64_t n = graph->first[i + 1] - graph->first[i], least = 2 + graph->split;
        if (n != least * n_stages && n != (least + 1) * n_stages)
            return cf__bad_graph(error, "first", i + 1, least * n_stages, n, "wrong number of nodes for a chunk");
    }
    for (i = 0; i < graph->n_nodes; i++) {
        const cf_node *node = &graph->nodes[i];
        id = node->pass < 0 || node->pass > CF_W ? -1
                                                 : cf_graph_node(graph, (cf_pass)node->pass, node->chunk, node->stage);
        if (id != i) return cf__bad_graph(error, "nodes", i, i, id, "its pass, chunk and stage lead to another number");
        if (node->keep < 0 || node->keep > (node->pass <= CF_R))
            return cf__bad_graph(error, "nodes.keep", i, node->pass <= CF_R, node->keep, "out of range");
        if (!cf__is_cost(node->seconds))
            return cf__bad_graph(error, "nodes.seconds", i, 0, -1, "must be finite and not negative");
    }
    return CF_OK;
}

/* Edges by target, and then the list by source: as many entries as edges, rising within a node, so each edge once. */
static cf_result cf__check_edges(const cf_graph *graph, cf_error *error) {
    int64_t i, j;
    for (i = 0; i < graph->n_nodes; i++) {
        for (j = graph->first_in[i]; j < graph->first_in[i + 1]; j++) {
            const cf_edge *edge = &graph->edges[j];
            if (edge->to != i) return cf__bad_graph(error, "edges.to", j, i, edge->to, "another node's edge");
            if (edge->from < 0 || edge->from >= graph->n_nodes)
                return cf__bad_graph(error, "edges.from", j, graph->n_nodes - 1, edge->from, "no such node");
            if (edge->why < 0 || edge->why >= CF_EDGE_COUNT)
                return cf__bad_graph(error, "edges.why", j, CF_EDGE_COUNT - 1, edge->why, "out of range");
            if (!cf__is_cost(edge->seconds))
                return cf__bad_graph(error, "edges.seconds", j, 0, -1, "must be finite and not negative");
        }
    }
    for (i = 0; i < graph->n_nodes; i++) {
        if (graph->first_out[i + 1] - graph->first_out[i] > CF_MAX_SUCCESSORS)
            return cf__bad_graph(error, "first_out", i, CF_MAX_SUCCESSORS,
                                 graph->first_out[i + 1] - graph->first_out[i], "too many edges leave this node");
        for (j = graph->first_out[i]; j < graph->first_out[i + 1]; j++) {
            int64_t edge = graph->out[j];
            if (edge < 0 || edge >= graph->n_edges)
                return cf__bad_graph(error, "out", j, graph->n_edges - 1, edge, "no such edge");
            if (graph->edges[edge].from != i)
                return cf__bad_graph(error, "out", j, i, graph->edges[edge].from, "leads to another node's edge");
            if (j > graph->first_out[i] && edge <= graph->out[j - 1])
                return cf__bad_graph(error, "out", j, graph->out[j - 1] + (int64_t)1, edge,
                                     "an edge twice, or not in order");
        }
    }
    return CF_OK;
}

static cf_result cf__check_graph_arrays(const cf_graph *g, cf_error *error) {
    cf_result result;
    if (g == NULL) return cf__fail_null(error, "graph");
    if ((result = cf__check_graph_counts(g, error)) != CF_OK) return result;
    if ((result = cf__check_first(g->first, g->n_steps, g->n_nodes, "first", error)) != CF_OK) return result;
    if ((result = cf__check_first(g->first_in, g->n_nodes, g->n_edges, "first_in", error)) != CF_OK) return result;
    if ((result = cf__check_first(g->first_out, g->n_nodes, g->n_edges, "first_out", error)) != CF_OK) return result;
    if ((result = cf__check_nodes(g, error)) != CF_OK) return result;
    return cf__check_edges(g, error);
}

/* A node on a cycle. Every node that still waits has a predecessor that waits too, so walking backwards must come to a
   node for the second time. waiting[] is spent by this. */
static int64_t cf__node_on_cycle(const cf_graph *graph, int32_t *waiting) {
    int64_t node = 0, i;
    while (waiting[node] <= 0) node++;
    while (waiting[node] > 0) {
        waiting[node] = -1;
        for (i = graph->first_in[node]; waiting[graph->edges[i].from] == 0; i++) continue;
        node = graph->edges[i].from;
    }
    return node;
}

/* Fills order so that each node comes after those that it waits for. waiting: n_nodes numbers of scratch. */
static cf_result cf__sort_nodes(const cf_graph *graph, int32_t *waiting, int32_t *order, cf_error *error) {
    int64_t i, j, n = 0, cycle;
    for (i = 0; i < graph->n_nodes; i++) {
        waiting[i] = (int32_t)(graph->first_in[i + 1] - graph->first_in[i]);
        if (waiting[i] == 0) order[n++] = (int32_t)i;
    }
    for (i = 0; i < n; i++) {
        int64_t node = order[i];
        for (j = graph->first_out[node]; j < graph->first_out[node + 1]; j++) {
            int32_t to = graph->edges[graph->out[j]].to;
            if (--waiting[to] == 0) order[n++] = to;
        }
    }
    if (n == graph->n_nodes) return CF_OK;
    cycle = cf__node_on_cycle(graph, waiting);
    return cf__bad_graph(error, "edges", cycle, graph->n_nodes, n,
                         "this node waits for itself; nodes that can be ordered");
}

CHUNKFLOW_API cf_result cf_graph_validate(const cf_graph *graph, const cf_allocator *allocator, cf_error *error) {
    cf_allocator memory;
    int32_t *waiting;
    size_t bytes;
    cf_result result = cf__check_graph_arrays(graph, error);
    if (result != CF_OK) return result;
    if ((result = cf__allocator(allocator, &memory, error)) != CF_OK) return result;
    bytes = (2 * (size_t)graph->n_nodes + 1) * sizeof(int32_t);
    waiting = (int32_t *)memory.alloc(bytes, memory.user);
    if (waiting == NULL) return cf__fail_memory(error, bytes);
    result = cf__sort_nodes(graph, waiting, waiting + graph->n_nodes, error);
    memory.release(waiting, memory.user);
    return result;
}

/* ---- critical path ---- */

static cf_critical *cf__layout_critical(cf_critical *header, cf__carver *carver) {
    cf_critical *critical = (cf_critical *)cf__take(carver, 1, sizeof(cf_critical));
    header->path = (int32_t *)cf__take(carver, header->n_nodes, sizeof(int32_t));
    header->order = (int32_t *)cf__take(carver, header->n_nodes, sizeof(int32_t));
    header->earliest = (double *)cf__take(carver, header->n_nodes, sizeof(double));
    header->latest = (double *)cf__take(carver, header->n_nodes, sizeof(double));
    return critical;
}

/* Earliest starts, first to last. Returns the node that ends last, -1 if there is none. */
static int64_t cf__find_earliest(const cf_graph *graph, cf_critical *critical) {
    int64_t i, j, last = -1;
    critical->length = 0;
    for (i = 0; i < graph->n_nodes; i++) {
        int64_t node = critical->order[i];
        double start = 0, end;
        for (j = graph->first_in[node]; j < graph->first_in[node + 1]; j++) {
            const cf_edge *edge = &graph->edges[j];
            double after = critical->earliest[edge->from] + graph->nodes[edge->from].seconds + edge->seconds;
            if (after > start) start = after;
        }
        critical->earliest[node] = start;
        end = start + graph->nodes[node].seconds;
        if (last < 0 || end > critical->length) {
            critical->length = end;
            last = node;
        }
    }
    return last;
}

/* Latest starts, last to first. */
static void cf__find_latest(const cf_graph *graph, cf_critical *critical) {
    int64_t i, j;
    for (i = graph->n_nodes - 1; i >= 0; i--) {
        int64_t node = critical->order[i];
        double end = critical->length, start;
        for (j = graph->first_out[node]; j < graph->first_out[node + 1]; j++) {
            const cf_edge *edge = &graph->edges[graph->out[j]];
            double before = critical->latest[edge->to] - edge->seconds;
            if (before < end) end = before;
        }
        start = end - graph->nodes[node].seconds;
        critical->latest[node] = start > critical->earliest[node] ? start : critical->earliest[node];
    }
}

/* Walks back from the node that ends last, each time to a node that set the start. These have no slack. */
static void cf__find_path(const cf_graph *graph, cf_critical *critical, int64_t node) {
    int64_t i, n = 0;
    while (node >= 0) {
        int64_t before = -1;
        double start = critical->earliest[node];
        critical->latest[node] = start;
        critical->path[n++] = (int32_t)node;
        for (i = graph->first_in[node]; i < graph->first_in[node + 1] && before < 0; i++) {
            const cf_edge *edge = &graph->edges[i];
            double after = critical->earliest[edge->from] + graph->nodes[edge->from].seconds + edge->seconds;
            if (!(after < start)) before = edge->from;
        }
        node = before;
    }
    critical->n_path = n;
    for (i = 0; i < n / 2; i++) {
        int32_t swap = critical->path[i];
        critical->path[i] = critical->path[n - 1 - i];
        critical->path[n - 1 - i] = swap;
    }
}

CHUNKFLOW_API cf_result cf_critical_size(const cf_graph *graph, size_t *bytes, cf_error *error) {
    cf_critical header;
    cf__carver carver = {NULL, 0, 0};
    cf_result result;
    if (graph == NULL) return cf__fail_null(error, "graph");
    if ((result = cf__check_graph_counts(graph, error)) != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    memset(&header, 0, sizeof header);
    header.n_nodes = graph->n_nodes;
    cf__layout_critical(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_nodes");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_critical_into(const cf_graph *graph, void *memory, size_t bytes, cf_critical **out,
                                         cf_error *error) {
    cf_critical header, *critical;
    cf__carver carver = {(unsigned char *)memory, 0, 0};
    size_t needed;
    int64_t last;
    cf_result result = cf_critical_size(graph, &needed, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__check_memory(memory, bytes, needed, error)) != CF_OK) return result;
    if ((result = cf__check_graph_arrays(graph, error)) != CF_OK) return result;
    memset(&header, 0, sizeof header);
    header.n_nodes = graph->n_nodes;
    critical = cf__layout_critical(&header, &carver);
    *critical = header;
    if ((result = cf__sort_nodes(graph, critical->path, critical->order, error)) != CF_OK) return result;
    last = cf__find_earliest(graph, critical);
    if (!cf__is_cost(critical->length))
        return cf__fail(error, CF_ERROR_OVERFLOW, "length", -1, 0, -1, "the seconds of a path are not finite");
    cf__find_latest(graph, critical);
    cf__find_path(graph, critical, last);
    *out = critical;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_critical_make(const cf_graph *graph, const cf_allocator *allocator, cf_critical **out,
                                         cf_error *error) {
    cf_allocator memory;
    size_t bytes;
    void *block;
    cf_result result = cf_critical_size(graph, &bytes, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(allocator, &memory, error)) != CF_OK) return result;
    block = memory.alloc(bytes, memory.user);
    if (block == NULL) return cf__fail_memory(error, bytes);
    result = cf_critical_into(graph, block, bytes, out, error);
    if (result == CF_OK) (*out)->allocator = memory;
    else memory.release(block, memory.user);
    return result;
}

CHUNKFLOW_API void cf_critical_free(cf_critical *critical) {
    if (critical != NULL && critical->allocator.release != NULL) {
        cf_allocator allocator = critical->allocator;
        allocator.release(critical, allocator.user);
    }
}

/* ---- for executors ---- */

CHUNKFLOW_API cf_result cf_graph_start(const cf_graph *graph, int32_t *waiting, int64_t count, cf_error *error) {
    int64_t i;
    cf_result result = cf__check_graph_arrays(graph, error);
    if (result != CF_OK) return result;
    if (count < graph->n_nodes)
        return cf__fail(error, CF_ERROR_SPACE, "count", -1, graph->n_nodes, count, "too small");
    if (waiting == NULL && graph->n_nodes > 0) return cf__fail_null(error, "waiting");
    for (i = 0; i < graph->n_nodes; i++) waiting[i] = (int32_t)(graph->first_in[i + 1] - graph->first_in[i]);
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_graph_complete(const cf_graph *graph, int32_t *waiting, int64_t node,
                                          int32_t ready[CF_MAX_SUCCESSORS], int64_t *n_ready, cf_error *error) {
    int64_t i, j, n = 0;
    if (graph == NULL) return cf__fail_null(error, "graph");
    if (waiting == NULL) return cf__fail_null(error, "waiting");
    if (ready == NULL) return cf__fail_null(error, "ready");
    if (n_ready == NULL) return cf__fail_null(error, "n_ready");
    if (node < 0 || node >= graph->n_nodes)
        return cf__fail(error, CF_ERROR_ARGUMENT, "node", node, graph->n_nodes - 1, node, "no such node");
    if (waiting[node] != 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "node", node, 0, waiting[node],
                        waiting[node] < 0 ? "is complete already" : "is not ready; it waits for");
    waiting[node] = -1;
    for (i = graph->first_out[node]; i < graph->first_out[node + 1]; i++) {
        int32_t to = graph->edges[graph->out[i]].to;
        if (--waiting[to] != 0) continue;
        for (j = n++; j > 0 && ready[j - 1] > to; j--) ready[j] = ready[j - 1];
        ready[j] = to;
    }
    *n_ready = n;
    return CF_OK;
}

/* ================================================================================================================
   >>schedule
   ================================================================================================================ */

CHUNKFLOW_API const char *cf_schedule_kind_name(cf_schedule_kind kind) {
    static const char *const names[CF_SCHEDULE_COUNT] = {"?",           "paper",       "gpipe", "1f1b",
                                                         "interleaved", "zero-bubble", "best"};
    return cf__name(names, CF_SCHEDULE_COUNT, (int64_t)kind);
}

CHUNKFLOW_API cf_schedule_desc cf_schedule_defaults(const cf_schedule_desc *desc) {
    cf_schedule_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    if (full.kind == CF_SCHEDULE_DEFAULT) full.kind = CF_SCHEDULE_PAPER;
    if (full.replay == CF_REPLAY_DEFAULT) full.replay = CF_REPLAY_PIPELINE;
    if (full.n_stages == 0) full.n_stages = 1;
    if (full.n_virtual == 0) full.n_virtual = full.kind == CF_SCHEDULE_INTERLEAVED ? 2 : 1;
    if (full.k == 0) full.k = 1;
    return full;
}

/* ---- the pipeline: what is scheduled, and what each pass costs ---- */

/* The chunks of one rank on the virtual stages. Chunks are counted from the rank's first one here. A "cell" is a chunk
   on a virtual stage, v x n + chunk; what is kept for each cell lies stage by stage, so that walking a stage walks
   memory. */
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
    for (v = 0; pipe->by_stage != NULL && v < pipe->n_v; v++)
        pipe->by_stage[v] = cf__fill_costs(&pipe->timing->stages[v]);
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

/* What a pass can take from a neighbouring stage: F its input, R the same again, B and I the gradient. In the order of
   SEND_F, SEND_R, SEND_B. */
enum { CF__INPUT = 0, CF__INPUT_AGAIN, CF__GRADIENT, CF__ARRIVALS, CF__NOTHING = CF__ARRIVALS };

/* Of a cell. The first three say that it has made an input, the same again, a gradient. */
enum {
    CF__FORWARDED = 1 << CF__INPUT,
    CF__REPLAYED = 1 << CF__INPUT_AGAIN,
    CF__GRADED = 1 << CF__GRADIENT,
    CF__WEIGHTED = 8,
    CF__KEPT = 16
};

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
    int given;                     /* what the stage at hand has handed on since it was looked at: 1 << CF__INPUT ... */
    int splits;                    /* there is an I */
    double makespan;
    /* lowered schedules only */
    int crosses;                   /* transfers between stages are in the lists */
    int32_t *receive[CF__ARRIVALS]; /* (cells) the RECV that has brought an input, -1: none has */
    uint8_t *away;                 /* (cells) 1: the chunk's rows of the state are in host memory */
    int32_t *n_away;               /* (cells) of a group's first chunk: how many chunks' rows are there */
    double *rows_at;               /* (cells) there too: when the last rows that were fetched are back */
    double *copies_end;            /* (n_stages) when the copies to and from host memory that were begun have ended */
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

/* What only the lists of a lowered schedule need. */
static void cf__layout_traffic(cf__clock *clock, int64_t n_cells, int64_t n_stages, cf__carver *carver) {
    int i;
    for (i = 0; i < CF__ARRIVALS; i++) clock->receive[i] = (int32_t *)cf__take(carver, n_cells, sizeof(int32_t));
    clock->away = (uint8_t *)cf__take(carver, n_cells, sizeof(uint8_t));
    clock->n_away = (int32_t *)cf__take(carver, n_cells, sizeof(int32_t));
    clock->rows_at = (double *)cf__take(carver, n_cells, sizeof(double));
    clock->copies_end = (double *)cf__take(carver, n_stages, sizeof(double));
}

static cf_result cf__clock_fail(const cf__clock *clock, const char *field, int64_t action, int64_t wanted, int64_t got,
                                const char *why) {
    return cf__fail(clock->error, CF_ERROR_SCHEDULE, field, action, wanted, got, why);
}

/* keep is 1 or 0, and 0 in all but F and R; reserved is 0. */
static int cf__flags_are_wrong(const cf_action *a) { return (a->keep > (a->pass <= CF_R)) | (a->reserved != 0); }

/* Indices of an action are good, and it is on the right stage. */
static cf_result cf__check_action(const cf__clock *clock, int64_t stage, int64_t id) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    int passes = clock->schedule->lowered ? CF_PASS_COUNT : CF_COMPUTE_PASS_COUNT;
    if (a->chunk < pipe->first_chunk || a->chunk >= pipe->first_chunk + pipe->n)
        return cf__clock_fail(clock, "actions.chunk", id, pipe->first_chunk, a->chunk, "not a chunk of this rank");
    if (a->stage < 0 || a->stage >= pipe->n_v || a->stage % pipe->n_stages != stage)
        return cf__clock_fail(clock, "actions.stage", id, stage, a->stage, "not a virtual stage of this stage");
    if (a->pass >= passes) return cf__clock_fail(clock, "actions.pass", id, passes - 1, a->pass, "no such pass here");
    if (!cf__flags_are_wrong(a)) return CF_OK;
    if (a->reserved != 0) return cf__clock_fail(clock, "actions.reserved", id, 0, a->reserved, "must be 0");
    return cf__clock_fail(clock, "actions.keep", id, 0, a->keep, "only F and R keep, and that is 0 or 1");
}

/* What an action needs from earlier actions of its own virtual stage. As the list is an order, what is missing now
   never comes. */
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
                return cf__clock_fail(clock, "actions", id, 1, 0,
                                      "backward before that of the next chunk in the group");
            break;
    }
    return CF_OK;
}

/* What a pass takes from a neighbouring stage. */
static int cf__takes(const cf__pipeline *pipe, int pass, int64_t v) {
    if (pass == CF_F && v > 0) return CF__INPUT;
    if (pass == CF_R && v > 0 && !pipe->local) return CF__INPUT_AGAIN;
    return (pass == CF_B || pass == CF_I) && v < pipe->n_v - 1 ? CF__GRADIENT : CF__NOTHING;
}

/* The cell that gets what `cell` makes. */
static int64_t cf__cell_after(const cf__clock *clock, int what, int64_t cell) {
    return what == CF__GRADIENT ? cell - clock->pipe->n : cell + clock->pipe->n;
}

/* The cell that makes what `cell` gets. */
static int64_t cf__cell_before(const cf__clock *clock, int what, int64_t cell) {
    return what == CF__GRADIENT ? cell + clock->pipe->n : cell - clock->pipe->n;
}

/* Whether the pass that makes this has run on a cell. */
static int cf__is_made(const cf__clock *clock, int what, int64_t cell) { return clock->done[cell] >> what & 1; }

/* When what a pass takes is there; -1 if that has not been sent. */
static double cf__arrival(const cf__clock *clock, int what, int64_t cell) {
    int sent;
    if (what == CF__NOTHING) return 0;
    sent = clock->crosses ? clock->receive[what][cell] >= 0
                          : cf__is_made(clock, what, cf__cell_before(clock, what, cell));
    return sent ? clock->arrival[what][cell] : -1;
}

/* The result of a pass, made at that time, goes to a neighbour. Returns when it begins to. Without overlap the sender
   is busy with it, and the arrival that is noted is the moment from which the receiver can take part. */
static double cf__send(cf__clock *clock, int64_t stage, int what, double made, double seconds, double *arrival) {
    int blocks = seconds > 0 && clock->pipe->timing->no_overlap;
    double *busy = blocks ? &clock->free_at[stage] : &clock->link_free[what == CF__GRADIENT][stage];
    double begin = made > *busy ? made : *busy;
    *busy = begin + seconds;
    *arrival = blocks ? begin : *busy;
    return begin;
}

/* Notes in its cell that a pass has run. Returns what its result is to the stage that takes it. An R is taken only by
   an R: where the next stage has kept the activations of its F, nobody does. */
static int cf__conclude_on_clock(cf__clock *clock, const cf_action *a, int64_t cell) {
    const cf__pipeline *pipe = clock->pipe;
    uint8_t *done = &clock->done[cell];
    int is_last = a->stage == pipe->n_v - 1;
    switch (a->pass) {
        case CF_F:
            *done |= (uint8_t)(a->keep ? CF__FORWARDED | CF__KEPT : CF__FORWARDED);
            return is_last ? CF__NOTHING : CF__INPUT;
        case CF_R:
            *done |= CF__REPLAYED | CF__KEPT;
            return is_last || pipe->local || (done[pipe->n] & CF__KEPT) ? CF__NOTHING : CF__INPUT_AGAIN;
        case CF_W:
            *done |= CF__WEIGHTED;
            return CF__NOTHING;
        default:
            *done |= (uint8_t)(a->pass == CF_B ? CF__GRADED | CF__WEIGHTED : CF__GRADED);
            clock->splits |= a->pass == CF_I;
            return a->stage > 0 ? CF__GRADIENT : CF__NOTHING;
    }
}

/* Without overlap the receiver is busy right before the pass that needs the tensor. Returns when it has it. */
static double cf__take_in(cf__clock *clock, int what, int64_t cell, double begin, double seconds) {
    if (clock->crosses) {
        clock->start[clock->receive[what][cell]] = begin;
        clock->end[clock->receive[what][cell]] = begin + seconds;
    }
    return begin + seconds;
}

/* When the rows of the state that a pass reads are on the stage. */
static double cf__rows_time(const cf__clock *clock, int pass, int64_t chunk, int64_t cell) {
    const cf_chunk *c = &clock->pipe->chunks[chunk];
    return clock->schedule->lowered && c->group >= 0 && pass != CF_W ? clock->rows_at[cell - c->index] : 0;
}

static void cf__run_on_clock(cf__clock *clock, int64_t stage, int64_t id, int64_t chunk, int64_t cell, int takes,
                             double arrival) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    double transfer = cf__transfer_seconds(pipe, chunk), start = clock->free_at[stage], end;
    double rows = cf__rows_time(clock, a->pass, chunk, cell);
    int gives;
    if (arrival > start) start = arrival;
    if (takes != CF__NOTHING && transfer > 0 && pipe->timing->no_overlap)
        start = cf__take_in(clock, takes, cell, start, transfer);
    if (rows > start) start = rows;
    end = start + cf__pass_seconds(pipe, a->pass, chunk, a->stage);
    clock->start[id] = start;
    clock->end[id] = end;
    clock->free_at[stage] = end;
    if (end > clock->makespan) clock->makespan = end;
    gives = cf__conclude_on_clock(clock, a, cell);
    if (gives == CF__NOTHING) return;
    cell = cf__cell_after(clock, gives, cell);
    clock->given |= 1 << gives;
    if (clock->crosses) clock->arrival[gives][cell] = end; /* until its SEND knows more */
    else (void)cf__send(clock, stage, gives, end, transfer, &clock->arrival[gives][cell]);
}

static void cf__look_at(cf__clock *clock, int64_t stage) {
    if (clock->is_waiting[stage]) return;
    clock->is_waiting[stage] = 1;
    clock->waiting[clock->n_waiting++] = (int32_t)stage;
}

/* ---- the actions of lowered schedules ---- */

/* A SEND or RECV that could be one. *what: which tensor of the chunk; *to: the cell that gets it. */
static cf_result cf__check_transfer_order(const cf__clock *clock, int64_t id, int64_t cell, int *what, int64_t *to) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    int sends = (a->pass - CF_SEND_F) % 2 == 0;
    *what = (a->pass - CF_SEND_F) / 2;
    *to = sends ? cf__cell_after(clock, *what, cell) : cell;
    if (!clock->crosses || (*what == CF__INPUT_AGAIN && pipe->local) || *to < 0 || *to >= pipe->n * pipe->n_v ||
        (!sends && (cf__cell_before(clock, *what, cell) < 0 ||
                    cf__cell_before(clock, *what, cell) >= pipe->n * pipe->n_v)))
        return cf__clock_fail(clock, "actions.pass", id, -1, a->pass, "no other stage to send to or receive from");
    if (sends && !cf__is_made(clock, *what, cell))
        return cf__clock_fail(clock, "actions.pass", id, 1, 0, "nothing to send");
    if (clock->receive[*what][*to] >= 0)
        return cf__clock_fail(clock, "actions.pass", id, 0, 1, "sent or received already");
    return CF_OK;
}

/* Whether the next action of a stage is this one, and nothing is wrong with it. */
static int cf__is_next(const cf__clock *clock, int64_t stage, int pass, int64_t chunk, int64_t v) {
    const cf_schedule *schedule = clock->schedule;
    const cf_action *a = &schedule->actions[clock->next[stage]];
    return clock->next[stage] < schedule->first[stage + 1] && a->pass == pass && a->chunk == chunk && a->stage == v &&
           !cf__flags_are_wrong(a);
}

/* The lists go on only when both ends have come to a transfer, because they must end even where a send waits for its
   receiver; the time that it takes is that of tensor and link alone. */
static cf_result cf__meet_on_clock(cf__clock *clock, int64_t stage, int64_t id, int64_t cell, int *waits) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    int sends = (a->pass - CF_SEND_F) % 2 == 0, what;
    int64_t to, from, v, peer, send, receive;
    double seconds = cf__transfer_seconds(pipe, a->chunk - pipe->first_chunk), begin;
    cf_result result = cf__check_transfer_order(clock, id, cell, &what, &to);
    if (result != CF_OK) return result;
    from = cf__cell_before(clock, what, to);
    v = (sends ? to : from) / pipe->n;
    peer = v % pipe->n_stages;
    *waits = !cf__is_next(clock, peer, sends ? a->pass + 1 : a->pass - 1, a->chunk, v);
    if (*waits) return CF_OK;
    send = sends ? id : clock->next[peer];
    receive = sends ? clock->next[peer] : id;
    begin = cf__send(clock, sends ? stage : peer, what, clock->arrival[what][to], seconds, &clock->arrival[what][to]);
    clock->start[send] = clock->start[receive] = begin;
    clock->end[send] = clock->end[receive] = begin + seconds;
    clock->receive[what][to] = (int32_t)receive;
    clock->next[peer]++;
    cf__look_at(clock, peer);
    return CF_OK;
}

/* OFFLOAD and PREFETCH: the stage's copies run one after the other beside its passes, each from the point where the
   list has come to it. */
static cf_result cf__copy_on_clock(cf__clock *clock, int64_t stage, int64_t id, int64_t cell) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    const cf_chunk *c = &pipe->plan->chunks[a->chunk];
    double rate = pipe->timing != NULL ? pipe->timing->offload_seconds_per_token : 0;
    double start = clock->free_at[stage], end;
    int leaves = a->pass == CF_OFFLOAD;
    if (c->group < 0 || !(clock->done[cell] & CF__FORWARDED) || (clock->done[cell] & CF__GRADED))
        return cf__clock_fail(clock, "actions.pass", id, 1, 0, "this chunk has no rows of state now");
    if (clock->away[cell] == leaves)
        return cf__clock_fail(clock, "actions.pass", id, !leaves, leaves,
                              leaves ? "its rows are away" : "its rows are here");
    if (clock->copies_end[stage] > start) start = clock->copies_end[stage];
    end = start + cf__product(rate, (double)cf_chunk_state_tokens(pipe->plan, a->chunk));
    if (!(end <= DBL_MAX / 1e6))
        return cf__fail(clock->error, CF_ERROR_OVERFLOW, "timing", id, 0, -1, "the total time is not finite");
    clock->start[id] = start;
    clock->end[id] = clock->copies_end[stage] = end;
    clock->away[cell] = (uint8_t)leaves;
    clock->n_away[cell - c->index] += leaves ? 1 : -1;
    if (!leaves) clock->rows_at[cell - c->index] = end;
    return CF_OK;
}

/* A pass that reads the state finds all of it on the stage. */
static cf_result cf__check_rows_here(const cf__clock *clock, int64_t id, int64_t cell) {
    const cf_action *a = &clock->schedule->actions[id];
    const cf_chunk *c = &clock->pipe->plan->chunks[a->chunk];
    if (c->group < 0 || a->pass == CF_W || clock->n_away[cell - c->index] == 0) return CF_OK;
    return cf__clock_fail(clock, "actions.pass", id, 0, clock->n_away[cell - c->index],
                          "rows of its state are in host memory");
}

static void cf__start_traffic(cf__clock *clock) {
    int64_t n_cells = clock->pipe->n * clock->pipe->n_v, i;
    int what;
    clock->crosses = clock->schedule->lowered && clock->pipe->n_stages > 1;
    if (!clock->schedule->lowered) return;
    for (i = 0; i < n_cells; i++) {
        for (what = 0; what < CF__ARRIVALS; what++) clock->receive[what][i] = -1;
        clock->away[i] = 0;
        clock->n_away[i] = 0;
        clock->rows_at[i] = 0;
    }
    for (i = 0; i < clock->pipe->n_stages; i++) clock->copies_end[i] = 0;
}

/* ---- all lists together ---- */

/* Runs one action, or finds that it has to wait for a neighbour. */
static cf_result cf__clock_action(cf__clock *clock, int64_t stage, int64_t id, int *waits) {
    const cf__pipeline *pipe = clock->pipe;
    const cf_action *a = &clock->schedule->actions[id];
    int64_t chunk = a->chunk - pipe->first_chunk, cell = a->stage * pipe->n + chunk;
    int takes;
    double arrival;
    cf_result result;
    if (a->pass >= CF_OFFLOAD) return cf__copy_on_clock(clock, stage, id, cell);
    if (a->pass >= CF_COMPUTE_PASS_COUNT) return cf__meet_on_clock(clock, stage, id, cell, waits);
    if ((result = cf__check_order(clock, id, chunk, &clock->done[cell])) != CF_OK) return result;
    if (clock->schedule->lowered && (result = cf__check_rows_here(clock, id, cell)) != CF_OK) return result;
    takes = cf__takes(pipe, a->pass, a->stage);
    arrival = cf__arrival(clock, takes, cell);
    if (arrival < 0 && clock->crosses)
        return cf__clock_fail(clock, "actions.pass", id, 1, 0, "runs before its input is received");
    *waits = arrival < 0;
    if (!*waits) cf__run_on_clock(clock, stage, id, chunk, cell, takes, arrival);
    return CF_OK;
}

/* Runs a stage until it has to wait for a neighbour. */
static cf_result cf__advance_stage(cf__clock *clock, int64_t stage) {
    int64_t end = clock->schedule->first[stage + 1], n_stages = clock->pipe->n_stages, id;
    clock->given = 0;
    for (id = clock->next[stage]; id < end; id++) {
        int waits = 0;
        cf_result result = cf__check_action(clock, stage, id);
        if (result == CF_OK) result = cf__clock_action(clock, stage, id, &waits);
        if (result != CF_OK) return result;
        if (waits) break;
    }
    clock->next[stage] = id;
    if (clock->crosses || n_stages == 1) return CF_OK; /* a transfer wakes the stage at its other end */
    if (clock->given & ~(1 << CF__GRADIENT)) cf__look_at(clock, (stage + 1) % n_stages);
    if (clock->given & 1 << CF__GRADIENT) cf__look_at(clock, (stage + n_stages - 1) % n_stages);
    return CF_OK;
}

/* Every stage has come to the end of its list, and every chunk through every virtual stage. */
static cf_result cf__check_finished(const cf__clock *clock) {
    const cf__pipeline *pipe = clock->pipe;
    int64_t s, i;
    for (s = 0; s < pipe->n_stages; s++)
        if (clock->next[s] < clock->schedule->first[s + 1])
            return cf__clock_fail(clock, "actions", clock->next[s], clock->schedule->first[s + 1], clock->next[s],
                                  "deadlock: it waits for another stage for ever");
    for (i = 0; i < pipe->n * pipe->n_v; i++) {
        if (!(clock->done[i] & CF__WEIGHTED))
            return cf__clock_fail(clock, "actions", -1, pipe->first_chunk + i % pipe->n, i / pipe->n,
                                  "the chunk wanted never ends its backward on the virtual stage found");
        if (clock->crosses && clock->receive[CF__INPUT_AGAIN][i] >= 0 && !(clock->done[i] & CF__REPLAYED))
            return cf__clock_fail(clock, "actions", clock->receive[CF__INPUT_AGAIN][i], 1, 0,
                                  "nobody reads what it receives");
    }
    return CF_OK;
}

/* Fills start and end. Passes over each action once; a stage is looked at again only after a neighbour has handed
   something on to it. */
static cf_result cf__run_clock(cf__clock *clock) {
    const cf_schedule *schedule = clock->schedule;
    int64_t n_stages = clock->pipe->n_stages, s;
    cf_result result = CF_OK;
    memset(clock->done, 0, (size_t)(clock->pipe->n * clock->pipe->n_v));
    memset(clock->is_waiting, 0, (size_t)n_stages);
    clock->n_waiting = 0;
    clock->splits = 0;
    clock->makespan = 0;
    cf__start_traffic(clock);
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

/* For each pass the longest way to it (head) and from its end (tail) through passes that must come before or after it.
   With split backwards the third kind is I, the fourth W; otherwise the third is B and there is no fourth. */
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

/* Heads of the passes of one chunk, those of the group's chunks that come before them being known. `last`: the group's
   last chunk; a chunk before it by k or more is dropped, and replayed when the chunk k after it has freed its slot. */
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

/* The same backwards in time. (cf__replay_tails is right for a chunk that is dropped although K would let it stay,
   too.) */
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
        paths->critical =
            cf__most(paths->critical, paths->head[CF__FORWARD][cell] + cf__latest_start(paths, CF__FORWARD, cell));
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

/* Jackson's preemptive schedule: always run the released job with the longest tail. Its longest completion + tail is
   the maximum of the load bound over all subsets of the jobs (Carlier, 1982). */
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

/* Seconds that all chunks together must stay in the slots of each stage: at least while the later stages run the
   chunk's forward and its backward. A chunk that is not the last of its group may be dropped, even where K would let it
   stay; then that time is the one of its replay, which in local replay goes no further than its stage. */
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
static void cf__find_bounds(cf__bounds *bounds, const cf__pipeline *pipe, int split, int64_t limit,
                            const int64_t *limits) {
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
            bounds->memory =
                cf__most(bounds->memory, cf__memory_bound(&bounds->paths, s, own, bounds->slot_seconds[s]));
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

static int cf__counts_bytes(const cf_schedule_desc *desc) {
    return desc->limit_bytes > 0 || desc->limits_bytes != NULL;
}

static int cf__is_limited(const cf_schedule_desc *desc) {
    return desc->limit > 0 || desc->limits != NULL || cf__counts_bytes(desc);
}

/* Bytes that a unit holds on a virtual stage while the backward of its chunk `i` is the next to come, k chunks of it
   being kept: the state of the chunks so far, the activations of the last k of them, and in local replay the inputs of
   the rest. */
typedef struct cf__holding {
    const cf_chunk *chunks; /* of the unit */
    const cf_bytes *bytes;
    int64_t n, k;
    int local, dependent;
} cf__holding;

/* Most bytes from that moment on, for every chunk of the unit: needs[i] where `needs` is given. Returns needs[n - 1].
   */
static int64_t cf__unit_bytes(const cf__holding *h, const cf_plan *plan, int64_t *needs) {
    int64_t i, window = 0, saved = 0, most = 0, per_slot = h->bytes->per_token_activations;
    if (h->local && h->n > h->k) per_slot = cf__max(per_slot, h->bytes->per_token_boundary); /* before its replay */
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

/* The most chunks of a unit, up to k, that may be kept on every virtual stage; 0: not even one. *bytes: what one needs.
   */
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

/* A group, or one standalone chunk. Of its n chunks the last k are kept and the others dropped; the limits allow
   `most_k`. */
typedef struct cf__work_unit {
    int32_t first, n, k, most_k;
} cf__work_unit;

/* Chunk i of the unit is dropped in its first forward. */
static int cf__is_dropped(const cf__work_unit *unit, int64_t i) { return i < unit->n - unit->k; }

/* ---- fixed patterns ----

   The forward items of all stages are one sequence: F of every chunk, unit by unit, and in pipeline replay the R of
   dropped chunks, put in as soon as the first stage can have made room for them while later units fill the wait. The
   backwards are another, in the order in which the forwards make them possible. Each stage merges the two sequences;
   the kinds differ only in how far it may run ahead with forwards (cf__may_run_ahead).

   Why this cannot deadlock. Stages further down run ahead no further, and both sequences are the same everywhere.
   Follow what an action waits for: forward item i waits for item i on the stage before and for backwards that its stage
   takes before i; those wait on stages further down for items before i. The index falls each time a backward is passed,
   so there is no cycle. Room: units start one after the other, so when an item finds none, an earlier unit has a
   backward to run. */

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

/* The backward of a chunk has become possible. In pipeline replay it frees the slot for the chunk k before it, if that
   one was dropped: its R is due when a stage that runs `ahead` items in front of the last one can have run this
   backward. */
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
    for (i = unit->n - 1; i >= 0 && (m->pipe.local || !cf__is_dropped(unit, i)); i--)
        cf__add_backward(m, unit, i, ahead);
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
    /* With bytes, a unit's room is given back only as a whole, so nothing may wait for it between unit and replays. */
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

   Whenever a stage is free it takes, of the passes that are ready, the one that its policy likes best. A unit starts on
   a stage only if the stage has room for all that it may ever hold there; that room is given back as its chunks end.

   Why this cannot deadlock. Units have one order everywhere. A unit may start before an earlier one only if the room
   that the first of those waiting units needs stays free, so the first unconcluded unit never waits for room, and
   nothing else than time delays it. A policy may take the risk and count only the slots in use; if that ends in a
   deadlock, the search has tried one candidate in vain. */

typedef struct cf__policy {
    int split;             /* I and W in place of B */
    int risk;              /* 1: slots are taken one by one, not for a whole unit at its start */
    double bias;           /* seconds by which backwards (and replays) are preferred to forwards */
    double deep;           /* seconds by which a later virtual stage of the same stage is preferred in forwards */
    double patience;       /* waits for a better pass if that costs less than this part of the one at hand */
    int64_t depth;         /* most chunks that a stage keeps, if it can do with that. 0: any number */
    const int64_t *ahead;  /* (n_stages) starts no unit while this many kept forwards have no backward yet; then units
                              start in order everywhere. NULL: any number */
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

   First the fixed schedules, then dispatch under a grid of policies, then a walk: change one thing at random (two units
   change places, one moves, a policy, the urgency of one pass), keep it if the makespan does not grow. Everything
   follows from the problem and the budget, so the same call gives the same schedule. */

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

/* Candidates in about a tenth of a second: dispatch takes some 70 ns for each action. Large problems get the fixed
   schedules alone. */
static int64_t cf__default_budget(const cf__maker *m) {
    if (m->n_actions > 1 << 21) return CF__FIXED_KINDS;
    if (m->n_actions <= 64) return 50000; /* what is small enough to be checked by hand deserves to be optimal */
    return cf__max(CF__FIXED_KINDS + 3, cf__min(20000, 500000 / cf__max(m->n_actions, 1)));
}

/* Virtual stages and split backwards have no fixed pattern; a search that is only allowed the patterns needs no
   dispatch. */
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

static int64_t cf__below(cf__search *search, int64_t n) { return (int64_t)(cf__draw(&search->random) % (uint64_t)n); }

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

/* Runs dispatch as units, policy and nudges now are. Returns whether the schedule is no worse than the best so far; a
   better one is written down as `kind`. */
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
            search->nudges[move.pass] += cf__product(
                search->bounds[0].critical_path / (double)(1 << cf__below(search, 5)), cf__unit_random(search));
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
   (n_virtual - 1) x n_stages and one more are ahead, then a backward. zero-bubble: the forwards and backwards of 1F1B,
   and on each stage no more chunks than its first stage has, which are as many W as may be put off. */
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
    if ((result = cf__choice((int64_t)desc->kind, 0, CF_SCHEDULE_COUNT - 1, "kind", error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)desc->replay, 0, CF_REPLAY_COUNT - 1, "replay", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_stages, 1, CF_MAX_STAGES, "n_stages", error)) != CF_OK) return result;
    if ((result = cf__range(desc->n_virtual, 1, CF_MAX_STAGES / desc->n_stages, "n_virtual", error)) != CF_OK)
        return result;
    if (desc->n_virtual > 1 && !many)
        return cf__fail(error, CF_ERROR_ARGUMENT, "n_virtual", -1, 1, desc->n_virtual, "too large for this kind");
    if ((result = cf__range(desc->k, 1, INT64_MAX, "k", error)) != CF_OK) return result;
    if ((result = cf__choice(desc->rank, 0, plan->n_ranks - 1, "rank", error)) != CF_OK) return result;
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
        return cf__fail(m->error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, per_stage,
                        "too many (got: those of one virtual stage)");
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
    if (sim->schedule->lowered)
        cf__layout_traffic(&sim->clock, sim->pipe.n * sim->pipe.n_v, sim->pipe.n_stages, carver);
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
            return cf__fail(error, CF_ERROR_SCHEDULE, "first", s, most, schedule->first[s],
                            "action lists overlap or run out of range");
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
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_chunks", -1, plan->n_chunks, schedule->n_chunks,
                        "made for another plan");
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
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_actions", -1, 2 * cells, schedule->n_actions,
                        "passes are missing");
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
    int64_t live;                           /* chunks kept */
    int64_t tokens, state, gradient, saved; /* tokens: kept, of state, of its gradient, of saved inputs */
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
    if ((a->pass == CF_F && c->group >= 0) || a->pass == CF_PREFETCH)
        held->state += cf_chunk_state_tokens(pipe->plan, a->chunk);
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
    if (a->pass == CF_OFFLOAD) held->state -= cf_chunk_state_tokens(plan, a->chunk);
}

/* Transfers and copies run beside the passes and are no work of the stage. */
static void cf__count_time(cf_timeline *timeline, const cf_action *a, double seconds) {
    if (a->pass < CF_COMPUTE_PASS_COUNT) timeline->busy += seconds;
    if (a->pass == CF_R) timeline->replayed += seconds;
}

static void cf__find_bubbles(cf_timeline *timeline) {
    double capacity = timeline->makespan * (double)timeline->n_stages;
    timeline->bubble_useful = capacity > 0 ? 1 - (timeline->busy - timeline->replayed) / capacity : 0;
    timeline->bubble_busy = capacity > 0 ? 1 - timeline->busy / capacity : 0;
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
        cf__count_time(timeline, a, seconds);
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
    cf__find_bubbles(timeline);
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

/* ---- measured times ---- */

/* The span of the measured times. */
static cf_result cf__measure_span(const double *start, const double *end, int64_t n, double *first, double *last,
                                  cf_error *error) {
    int64_t i;
    *first = n > 0 ? start[0] : 0;
    *last = *first;
    for (i = 0; i < n; i++) {
        if (!(start[i] >= -DBL_MAX && start[i] <= DBL_MAX))
            return cf__fail(error, CF_ERROR_ARGUMENT, "start", i, 0, -1, "not a finite time");
        if (!(end[i] >= start[i] && end[i] <= DBL_MAX))
            return cf__fail(error, CF_ERROR_ARGUMENT, "end", i, 0, -1, "not a finite time, or before the start");
        if (start[i] < *first) *first = start[i];
        if (end[i] > *last) *last = end[i];
    }
    if (*last - *first <= DBL_MAX / 1e9) return CF_OK; /* sums of all of them stay finite */
    return cf__fail(error, CF_ERROR_ARGUMENT, "end", -1, 0, -1, "the times are too far apart");
}

CHUNKFLOW_API cf_result cf_timeline_measured(const cf_plan *plan, const cf_schedule *schedule, const double *start,
                                             const double *end, const cf_bytes *bytes, const cf_allocator *allocator,
                                             cf_timeline **out, cf_error *error) {
    cf_simulate_desc desc;
    cf_timeline *timeline = NULL;
    double first = 0, last = 0;
    int64_t i;
    cf_result result;
    if (out == NULL) return cf__fail_null(error, "out");
    memset(&desc, 0, sizeof desc);
    if (bytes != NULL) desc.bytes = *bytes;
    desc.no_bounds = 1;
    desc.allocator = allocator;
    result = cf_simulate(plan, schedule, &desc, &timeline, error); /* judges the lists and keeps the books */
    if (result != CF_OK) return result;
    if (start == NULL && schedule->n_actions > 0) result = cf__fail_null(error, "start");
    else if (end == NULL && schedule->n_actions > 0) result = cf__fail_null(error, "end");
    else result = cf__measure_span(start, end, schedule->n_actions, &first, &last, error);
    if (result != CF_OK) {
        cf_timeline_free(timeline);
        return result;
    }
    timeline->makespan = last - first;
    timeline->busy = timeline->replayed = 0;
    for (i = 0; i < schedule->n_actions; i++) {
        timeline->start[i] = start[i] - first;
        timeline->end[i] = end[i] - first;
        cf__count_time(timeline, &schedule->actions[i], end[i] - start[i]);
    }
    cf__find_bubbles(timeline);
    *out = timeline;
    return CF_OK;
}

CHUNKFLOW_API void cf_timeline_free(cf_timeline *timeline) {
    if (timeline != NULL && timeline->allocator.release != NULL) {
        cf_allocator allocator = timeline->allocator;
        allocator.release(timeline, allocator.user);
    }
}

/* ================================================================================================================
   >>check

   First every list by itself, action by action, as the stage would live through it; then all lists against each other,
   run as far as they go: once with every finished pass visible everywhere, and, if transfers are in the lists, once
   with nothing but a rendezvous between two stages.
   ================================================================================================================ */

/* A chunk on one virtual stage. */
typedef struct cf__cell {
    uint16_t seen;      /* a bit per pass: it is in the list, so far or at all */
    uint16_t run;       /* the same while the lists run */
    uint8_t live;       /* its activations are kept now */
    uint8_t away;       /* its rows of the state are in host memory */
    uint16_t padding;
    int32_t group_live; /* in the cell of a group's first chunk: chunks of the group with live activations */
    int32_t group_away; /* and with rows away */
} cf__cell;

typedef struct cf__checker {
    const cf_plan *plan;
    const cf_schedule *schedule;
    cf_validate_desc desc;
    cf_error *error;
    int64_t n_stages;      /* virtual stages in all */
    int64_t first_chunk;
    int64_t stage, position; /* where the walk is */
    int64_t live;            /* chunks kept there */
    int64_t bytes;           /* bytes held there */
    cf__cell *cells;       /* (n_stages x n_steps) */
    int64_t *cursor;       /* (schedule->n_stages) the next action of each stage, an index into actions */
    int32_t *stack;        /* (schedule->n_stages) stages that may be able to go on */
    unsigned char *queued; /* (schedule->n_stages) */
} cf__checker;

enum { CF__FORWARDS = 1 << CF_F | 1 << CF_R, CF__BACKWARDS = 1 << CF_B | 1 << CF_I };

static void cf__layout_checker(cf__checker *k, cf__carver *carver) {
    k->cells = (cf__cell *)cf__take(carver, k->n_stages * k->plan->n_steps, sizeof(cf__cell));
    k->cursor = (int64_t *)cf__take(carver, k->schedule->n_stages, sizeof(int64_t));
    k->stack = (int32_t *)cf__take(carver, k->schedule->n_stages, sizeof(int32_t));
    k->queued = (unsigned char *)cf__take(carver, k->schedule->n_stages, 1);
}

/* A violation at the walk's position; `why` starts with the stage. */
static cf_result cf__violation(cf__checker *k, const char *field, int64_t wanted, int64_t got, const char *why) {
    char text[128];
    (void)snprintf(text, sizeof text, "stage %lld: %s", (long long)k->stage, why);
    return cf__fail(k->error, CF_ERROR_SCHEDULE, field, k->position, wanted, got, text);
}

/* The same about a pass of a chunk, which is named. */
static cf_result cf__violation_of(cf__checker *k, const cf_action *a, const char *field, int64_t wanted, int64_t got,
                                  const char *why) {
    char text[110];
    (void)snprintf(text, sizeof text, "%s of chunk %d on virtual stage %d %s", cf_pass_name((cf_pass)a->pass),
                   (int)a->chunk, (int)a->stage, why);
    return cf__violation(k, field, wanted, got, text);
}

/* ---- counts ---- */

/* Members of a schedule that can be judged without its arrays. */
static cf_result cf__check_schedule_counts(const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    const struct {
        const char *field;
        int64_t value, least, most;
    } counts[] = {{"kind", (int64_t)schedule->kind, 0, CF_SCHEDULE_COUNT - 1},
                  {"replay", (int64_t)schedule->replay, CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL},
                  {"n_stages", schedule->n_stages, 1, INT32_MAX},
                  {"n_virtual", schedule->n_virtual, 1, INT32_MAX},
                  {"k", schedule->k, 1, INT64_MAX},
                  {"rank", schedule->rank, 0, plan->n_ranks - 1},
                  {"n_chunks", schedule->n_chunks, plan->n_chunks, plan->n_chunks},
                  {"n_actions", schedule->n_actions, 0, INT64_MAX / (int64_t)sizeof(cf_action)},
                  {"lowered", schedule->lowered, 0, 1}};
    int64_t n_stages, needed = 0;
    size_t i;
    for (i = 0; i < sizeof counts / sizeof counts[0]; i++)
        if (counts[i].value < counts[i].least || counts[i].value > counts[i].most)
            return cf__fail(error, CF_ERROR_SCHEDULE, counts[i].field, -1,
                            counts[i].value < counts[i].least ? counts[i].least : counts[i].most, counts[i].value,
                            "out of range");
    n_stages = schedule->n_stages * schedule->n_virtual;
    if (n_stages > INT32_MAX)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_virtual", -1, INT32_MAX / schedule->n_stages, schedule->n_virtual,
                        "out of range");
    if (!cf__mul(2 * n_stages, plan->n_steps, &needed) || schedule->n_actions < needed)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_actions", -1, needed, schedule->n_actions,
                        "every chunk needs two passes on every virtual stage");
    if (schedule->first == NULL) return cf__fail(error, CF_ERROR_SCHEDULE, "first", -1, 1, 0, "is NULL");
    if (schedule->actions == NULL && schedule->n_actions > 0)
        return cf__fail(error, CF_ERROR_SCHEDULE, "actions", -1, 1, 0, "is NULL");
    return CF_OK;
}

/* Where the lists begin. Stops at the first number that is wrong, so that a wrong n_stages is not followed far. */
static cf_result cf__check_schedule_lists(const cf_schedule *schedule, cf_error *error) {
    const int64_t *first = schedule->first;
    int64_t i;
    if (first[0] != 0) return cf__fail(error, CF_ERROR_SCHEDULE, "first", 0, 0, first[0], "must start at 0");
    for (i = 0; i < schedule->n_stages; i++)
        if (first[i + 1] < first[i] || first[i + 1] > schedule->n_actions)
            return cf__fail(error, CF_ERROR_SCHEDULE, "first", i + 1,
                            first[i + 1] < first[i] ? first[i] : schedule->n_actions, first[i + 1],
                            "action lists overlap or run out of range");
    if (first[i] != schedule->n_actions)
        return cf__fail(error, CF_ERROR_SCHEDULE, "first", i, schedule->n_actions, first[i], "actions in no list");
    return CF_OK;
}

static cf_result cf__judge_units(const cf__checker *k) {
    int64_t id;
    for (id = k->first_chunk; id < k->first_chunk + k->plan->n_steps; id++) {
        const cf_chunk *c = &k->plan->chunks[id];
        if (cf__unit_of(k->plan, id) == 0)
            return cf__fail(k->error, CF_ERROR_PLAN, "chunks.group", id, -1, c->group, "chunks and groups disagree");
        if (c->group >= 0 && (c->first_slice < 0 || c->first_slice >= k->plan->n_slices))
            return cf__fail(k->error, CF_ERROR_PLAN, "chunks.first_slice", id, k->plan->n_slices - 1, c->first_slice,
                            "no such slice");
        if (c->tokens < 0 || c->padded < 0 || (c->group >= 0 && k->plan->groups[c->group].tokens < 0) ||
            cf_chunk_state_tokens(k->plan, id) < 0)
            return cf__fail(k->error, CF_ERROR_PLAN, "chunks.tokens", id, 0, c->tokens, "negative");
    }
    return CF_OK;
}

static cf_result cf__judge_limits(const cf__checker *k) {
    const cf_validate_desc *d = &k->desc;
    const struct {
        const char *field;
        int64_t value;
    } single[] = {{"limit", d->limit},
                  {"limit_bytes", d->limit_bytes},
                  {"bytes.per_token_activations", d->bytes.per_token_activations},
                  {"bytes.per_token_state", d->bytes.per_token_state},
                  {"bytes.per_token_state_gradient", d->bytes.per_token_state_gradient},
                  {"bytes.per_token_boundary", d->bytes.per_token_boundary}};
    int64_t i;
    for (i = 0; i < (int64_t)(sizeof single / sizeof single[0]); i++)
        if (single[i].value < 0)
            return cf__fail(k->error, CF_ERROR_ARGUMENT, single[i].field, -1, 0, single[i].value, "negative");
    for (i = 0; i < k->schedule->n_stages; i++) {
        if (d->limits != NULL && d->limits[i] < 0)
            return cf__fail(k->error, CF_ERROR_ARGUMENT, "limits", i, 0, d->limits[i], "negative");
        if (d->limits_bytes != NULL && d->limits_bytes[i] < 0)
            return cf__fail(k->error, CF_ERROR_ARGUMENT, "limits_bytes", i, 0, d->limits_bytes[i], "negative");
    }
    return CF_OK;
}

/* ---- one list ---- */

static cf__cell *cf__cell_at(const cf__checker *k, int64_t chunk, int64_t stage) {
    return &k->cells[stage * k->plan->n_steps + chunk - k->first_chunk];
}

/* The cell of a neighbour in the group, on the same virtual stage: step -1 or 1. NULL: there is none. */
static cf__cell *cf__neighbour(const cf__checker *k, const cf_action *a, int64_t step) {
    const cf_chunk *c = &k->plan->chunks[a->chunk];
    if (c->group < 0 || c->index + step < 0 || c->index + step >= k->plan->groups[c->group].n_chunks) return NULL;
    return cf__cell_at(k, a->chunk + step, a->stage);
}

/* The cell that counts for the whole group; a standalone chunk counts for itself. */
static cf__cell *cf__group_cell(const cf__checker *k, const cf_action *a) {
    return cf__cell_at(k, a->chunk - k->plan->chunks[a->chunk].index, a->stage);
}

static int cf__has(const cf__cell *cell, cf_pass pass) { return cell->seen >> pass & 1; }

/* Transfers take place only in lowered schedules, and only between stages. */
static int cf__crosses(const cf__checker *k) { return k->schedule->lowered && k->schedule->n_stages > 1; }

static cf_result cf__check_fields(cf__checker *k, const cf_action *a) {
    int64_t passes = k->schedule->lowered ? CF_PASS_COUNT : CF_COMPUTE_PASS_COUNT;
    int forward = a->pass == CF_F || a->pass == CF_R;
    if (a->chunk < k->first_chunk || a->chunk >= k->first_chunk + k->plan->n_steps)
        return cf__violation(k, "actions.chunk", k->first_chunk, a->chunk, "not a chunk of this rank");
    if (a->stage < 0 || a->stage >= k->n_stages)
        return cf__violation(k, "actions.stage", k->n_stages - 1, a->stage, "no such virtual stage");
    if (a->stage % k->schedule->n_stages != k->stage)
        return cf__violation(k, "actions.stage", k->stage, a->stage, "this virtual stage lies on another stage");
    if (a->pass >= passes) return cf__violation(k, "actions.pass", passes - 1, a->pass, "no such pass here");
    if (a->keep > forward) return cf__violation_of(k, a, "actions.keep", forward, a->keep, "has a wrong keep flag");
    if (a->reserved != 0) return cf__violation(k, "actions.reserved", 0, a->reserved, "must be 0");
    return CF_OK;
}

/* Bytes come into use. A sum that does not fit is past every limit. */
static cf_result cf__check_hold(cf__checker *k, const cf_action *a, int64_t tokens, int64_t bytes_per_token) {
    int64_t limit = k->desc.limits_bytes != NULL ? k->desc.limits_bytes[k->stage] : k->desc.limit_bytes, bytes;
    const char *field = k->desc.limits_bytes != NULL ? "limits_bytes" : "limit_bytes";
    if (limit == 0) return CF_OK;
    if (!cf__mul(tokens, bytes_per_token, &bytes) || !cf__add(k->bytes, bytes, &k->bytes))
        return cf__violation_of(k, a, field, limit, INT64_MAX, "needs more bytes than 64 bits count");
    if (k->bytes > limit) return cf__violation_of(k, a, field, limit, k->bytes, "needs more bytes than the limit");
    return CF_OK;
}

static void cf__check_drop(cf__checker *k, int64_t tokens, int64_t bytes_per_token) {
    int limited = k->desc.limits_bytes != NULL ? k->desc.limits_bytes[k->stage] > 0 : k->desc.limit_bytes > 0;
    int64_t bytes;
    if (limited && cf__mul(tokens, bytes_per_token, &bytes)) k->bytes -= bytes;
}

/* Activations come to stay. */
static cf_result cf__check_take(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage), *group = cf__group_cell(k, a);
    int64_t limit = k->desc.limits != NULL ? k->desc.limits[k->stage] : k->desc.limit;
    cell->live = 1;
    group->group_live++;
    k->live++;
    if (group->group_live > k->schedule->k)
        return cf__violation_of(k, a, "k", k->schedule->k, group->group_live, "keeps more than K chunks of its group");
    if (limit > 0 && k->live > limit)
        return cf__violation_of(k, a, k->desc.limits != NULL ? "limits" : "limit", limit, k->live,
                                "keeps more chunks than the limit");
    return cf__check_hold(k, a, k->plan->chunks[a->chunk].padded, k->desc.bytes.per_token_activations);
}

static void cf__check_give(cf__checker *k, const cf_action *a) {
    cf__check_drop(k, k->plan->chunks[a->chunk].padded, k->desc.bytes.per_token_activations);
    cf__cell_at(k, a->chunk, a->stage)->live = 0;
    cf__group_cell(k, a)->group_live--;
    k->live--;
}

static cf_result cf__check_state_at_hand(cf__checker *k, const cf_action *a) {
    int32_t away = cf__group_cell(k, a)->group_away;
    if (away == 0) return CF_OK;
    return cf__violation_of(k, a, "actions.pass", 0, away, "runs while rows of its state are away");
}

static cf_result cf__check_forward(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage), *before = cf__neighbour(k, a, -1);
    cf_result result;
    if (cf__has(cell, CF_F)) return cf__violation_of(k, a, "actions.pass", 1, 2, "comes twice");
    if (before != NULL && !cf__has(before, CF_F))
        return cf__violation_of(k, a, "actions.chunk", a->chunk - 1, a->chunk, "comes before F of the chunk before it");
    if (cf__crosses(k) && a->stage > 0 && !cf__has(cell, CF_RECV_F))
        return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before its RECV_F");
    result = cf__check_hold(k, a, cf_chunk_state_tokens(k->plan, a->chunk), k->desc.bytes.per_token_state);
    if (result != CF_OK) return result;
    if (a->keep) return cf__check_take(k, a);
    if (k->schedule->replay != CF_REPLAY_LOCAL) return CF_OK;
    return cf__check_hold(k, a, k->plan->chunks[a->chunk].padded, k->desc.bytes.per_token_boundary);
}

static cf_result cf__check_replay(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage);
    int pipeline = k->schedule->replay == CF_REPLAY_PIPELINE;
    if (cf__has(cell, CF_R)) return cf__violation_of(k, a, "actions.pass", 1, 2, "comes twice");
    if (!cf__has(cell, CF_F)) return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before its F");
    if (cell->live || (cell->seen & CF__BACKWARDS) != 0)
        return cf__violation_of(k, a, "actions.pass", 0, 1, "is needless: its F kept the activations");
    if (!a->keep) return cf__violation_of(k, a, "actions.keep", 1, 0, "keeps nothing");
    if (cf__crosses(k) && pipeline && a->stage > 0 && !cf__has(cell, CF_RECV_R))
        return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before its RECV_R");
    if (!pipeline) cf__check_drop(k, k->plan->chunks[a->chunk].padded, k->desc.bytes.per_token_boundary);
    return cf__check_take(k, a);
}

static cf_result cf__check_backward(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage), *after = cf__neighbour(k, a, 1);
    int64_t rows = cf_chunk_state_tokens(k->plan, a->chunk), group = k->plan->chunks[a->chunk].group;
    cf_result result;
    if ((cell->seen & CF__BACKWARDS) != 0) return cf__violation_of(k, a, "actions.pass", 1, 2, "is a second backward");
    if (!cf__has(cell, CF_F)) return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before its F");
    if (!cell->live) return cf__violation_of(k, a, "actions.pass", 1, 0, "has no activations; R is missing before it");
    if (after != NULL && (after->seen & CF__BACKWARDS) == 0)
        return cf__violation_of(k, a, "actions.chunk", a->chunk + 1, a->chunk,
                                "comes before that of the group's next chunk");
    if (cf__crosses(k) && a->stage + 1 < k->n_stages && !cf__has(cell, CF_RECV_B))
        return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before its RECV_B");
    if (group >= 0 && after == NULL) { /* dK and dV of the whole group start with its last chunk */
        result = cf__check_hold(k, a, k->plan->groups[group].tokens, k->desc.bytes.per_token_state_gradient);
        if (result != CF_OK) return result;
    }
    cf__check_drop(k, rows, k->desc.bytes.per_token_state);
    cf__check_drop(k, rows, k->desc.bytes.per_token_state_gradient);
    if (a->pass == CF_B) cf__check_give(k, a);
    return CF_OK;
}

static cf_result cf__check_weight(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage);
    if (cf__has(cell, CF_W)) return cf__violation_of(k, a, "actions.pass", 1, 2, "comes twice");
    if (!cf__has(cell, CF_I)) return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before its I");
    cf__check_give(k, a);
    return CF_OK;
}

/* A send or receive: it must have a stage at the other end, come once, and, if it sends, after what it sends. */
static cf_result cf__check_transfer(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage);
    int sends = a->pass == CF_SEND_F || a->pass == CF_SEND_R || a->pass == CF_SEND_B;
    int upwards = a->pass == CF_SEND_F || a->pass == CF_SEND_R || a->pass == CF_RECV_B; /* the peer is the next one */
    int replay = a->pass == CF_SEND_R || a->pass == CF_RECV_R, made = a->pass == CF_SEND_F ? 1 << CF_F : 1 << CF_R;
    if (a->pass == CF_SEND_B) made = CF__BACKWARDS;
    if (k->schedule->n_stages == 1 || (upwards ? a->stage + 1 == k->n_stages : a->stage == 0))
        return cf__violation_of(k, a, "actions.pass", -1, a->pass, "has no other stage to go to or come from");
    if (replay && k->schedule->replay != CF_REPLAY_PIPELINE)
        return cf__violation_of(k, a, "actions.pass", -1, a->pass, "has no place in local replay");
    if (cf__has(cell, (cf_pass)a->pass)) return cf__violation_of(k, a, "actions.pass", 1, 2, "comes twice");
    if (sends && (cell->seen & made) == 0)
        return cf__violation_of(k, a, "actions.pass", 1, 0, "comes before the pass that makes its tensor");
    return CF_OK;
}

static cf_result cf__check_offload(cf__checker *k, const cf_action *a) {
    cf__cell *cell = cf__cell_at(k, a->chunk, a->stage);
    int away = a->pass == CF_OFFLOAD;
    int64_t rows;
    if (k->plan->chunks[a->chunk].group < 0)
        return cf__violation_of(k, a, "actions.chunk", -1, a->chunk, "is of a chunk without state");
    if (away && (!cf__has(cell, CF_F) || (cell->seen & CF__BACKWARDS) != 0))
        return cf__violation_of(k, a, "actions.pass", 1, 0, "has no rows: they live from F to the backward");
    if (cell->away == away)
        return cf__violation_of(k, a, "actions.pass", !away, away,
                                away ? "moves rows that are away" : "moves rows that are here");
    cell->away = (uint8_t)away;
    cf__group_cell(k, a)->group_away += away ? 1 : -1;
    rows = cf_chunk_state_tokens(k->plan, a->chunk);
    if (!away) return cf__check_hold(k, a, rows, k->desc.bytes.per_token_state);
    cf__check_drop(k, rows, k->desc.bytes.per_token_state);
    return CF_OK;
}

static cf_result cf__judge_action(cf__checker *k, const cf_action *a) {
    cf_result result = cf__check_fields(k, a);
    if (result != CF_OK) return result;
    if (a->pass == CF_F || a->pass == CF_R || a->pass == CF_B || a->pass == CF_I)
        if ((result = cf__check_state_at_hand(k, a)) != CF_OK) return result;
    switch ((cf_pass)a->pass) {
        case CF_F: result = cf__check_forward(k, a); break;
        case CF_R: result = cf__check_replay(k, a); break;
        case CF_B: case CF_I: result = cf__check_backward(k, a); break;
        case CF_W: result = cf__check_weight(k, a); break;
        case CF_OFFLOAD: case CF_PREFETCH: result = cf__check_offload(k, a); break;
        default: result = cf__check_transfer(k, a); break;
    }
    if (result == CF_OK) cf__cell_at(k, a->chunk, a->stage)->seen |= (uint16_t)(1 << a->pass);
    return result;
}

static cf_result cf__check_list(cf__checker *k, int64_t stage) {
    int64_t i, begin = k->schedule->first[stage], end = k->schedule->first[stage + 1];
    cf_result result = CF_OK;
    k->stage = stage;
    k->live = k->bytes = 0;
    for (i = begin; i < end && result == CF_OK; i++) {
        k->position = i - begin;
        result = cf__judge_action(k, &k->schedule->actions[i]);
    }
    return result;
}

/* ---- what is missing ---- */

static cf_result cf__missing(cf__checker *k, cf_pass pass, int64_t chunk, int64_t stage) {
    cf_action a;
    memset(&a, 0, sizeof a);
    a.pass = (uint8_t)pass;
    a.chunk = (int32_t)chunk;
    a.stage = (int32_t)stage;
    k->stage = stage % k->schedule->n_stages;
    k->position = -1;
    return cf__violation_of(k, &a, "actions", 1, 0, "is missing");
}

/* What one chunk must have on one virtual stage, once all lists are read. */
static cf_result cf__check_complete(cf__checker *k, int64_t chunk, int64_t stage) {
    const cf__cell *cell = cf__cell_at(k, chunk, stage);
    const cf__cell *behind = stage + 1 < k->n_stages ? cf__cell_at(k, chunk, stage + 1) : NULL;
    int pipeline = k->schedule->replay == CF_REPLAY_PIPELINE, crosses = cf__crosses(k);
    if (!cf__has(cell, CF_F)) return cf__missing(k, CF_F, chunk, stage);
    if ((cell->seen & CF__BACKWARDS) == 0) return cf__missing(k, CF_B, chunk, stage);
    if (cf__has(cell, CF_I) && !cf__has(cell, CF_W)) return cf__missing(k, CF_W, chunk, stage);
    if (pipeline && behind != NULL && cf__has(behind, CF_R) && !cf__has(cell, CF_R))
        return cf__missing(k, CF_R, chunk, stage);
    if (crosses && behind != NULL && !cf__has(cell, CF_SEND_F)) return cf__missing(k, CF_SEND_F, chunk, stage);
    if (crosses && stage > 0 && !cf__has(cell, CF_SEND_B)) return cf__missing(k, CF_SEND_B, chunk, stage);
    if (crosses && behind != NULL && cf__has(cell, CF_SEND_R) && !cf__has(behind, CF_RECV_R))
        return cf__missing(k, CF_RECV_R, chunk, stage + 1);
    if (crosses && behind != NULL && cf__has(behind, CF_RECV_R) && !cf__has(cell, CF_SEND_R))
        return cf__missing(k, CF_SEND_R, chunk, stage);
    if (crosses && cf__has(cell, CF_RECV_R) && !cf__has(cell, CF_R)) return cf__missing(k, CF_R, chunk, stage);
    return CF_OK;
}

static cf_result cf__check_all_complete(cf__checker *k) {
    int64_t chunk, stage;
    cf_result result;
    for (stage = 0; stage < k->n_stages && k->plan->n_steps > 0; stage++)
        for (chunk = k->first_chunk; chunk < k->first_chunk + k->plan->n_steps; chunk++)
            if ((result = cf__check_complete(k, chunk, stage)) != CF_OK) return result;
    return CF_OK;
}

/* ---- all lists together ---- */

/* The pass that must have run on another virtual stage before this action can, as a set of bits for *cell; 0: none. */
static int cf__waits_for(const cf__checker *k, const cf_action *a, const cf__cell **cell) {
    int backward = a->pass == CF_B || a->pass == CF_I;
    int forward = a->pass == CF_F || (a->pass == CF_R && k->schedule->replay == CF_REPLAY_PIPELINE);
    if (forward && a->stage > 0) {
        *cell = cf__cell_at(k, a->chunk, a->stage - 1);
        return 1 << a->pass;
    }
    if (backward && a->stage + 1 < k->n_stages) {
        *cell = cf__cell_at(k, a->chunk, a->stage + 1);
        return CF__BACKWARDS;
    }
    return 0;
}

static void cf__wake(cf__checker *k, int64_t stage, int64_t *n) {
    if (k->queued[stage]) return;
    k->queued[stage] = 1;
    k->stack[(*n)++] = (int32_t)stage;
}

/* Runs one list as far as it goes, and wakes the two stages that may have waited for it. */
static void cf__advance(cf__checker *k, int64_t stage, int64_t *n) {
    int64_t n_stages = k->schedule->n_stages;
    for (; k->cursor[stage] < k->schedule->first[stage + 1]; k->cursor[stage]++) {
        const cf_action *a = &k->schedule->actions[k->cursor[stage]];
        const cf__cell *other = NULL;
        int needed = cf__waits_for(k, a, &other);
        if (needed != 0 && (other->run & needed) == 0) return;
        cf__cell_at(k, a->chunk, a->stage)->run |= (uint16_t)(1 << a->pass);
        if ((1 << a->pass & CF__FORWARDS) != 0) cf__wake(k, (stage + 1) % n_stages, n);
        if ((1 << a->pass & CF__BACKWARDS) != 0) cf__wake(k, (stage + n_stages - 1) % n_stages, n);
    }
}

/* The send that a receive belongs to, and the other way round. */
static cf_pass cf__counterpart(cf_pass pass) {
    switch (pass) {
        case CF_SEND_F: return CF_RECV_F;
        case CF_RECV_F: return CF_SEND_F;
        case CF_SEND_R: return CF_RECV_R;
        case CF_RECV_R: return CF_SEND_R;
        case CF_SEND_B: return CF_RECV_B;
        case CF_RECV_B: return CF_SEND_B;
        default: return CF_PASS_COUNT;
    }
}

/* The virtual stage at the other end of a transfer. */
static int64_t cf__other_end(const cf_action *a) {
    return a->pass == CF_SEND_F || a->pass == CF_SEND_R || a->pass == CF_RECV_B ? a->stage + 1 : a->stage - (int64_t)1;
}

/* The same with nothing but rendezvous: a transfer takes place when both ends have come to it, and not before. */
static void cf__meet(cf__checker *k, int64_t stage, int64_t *n) {
    const cf_schedule *s = k->schedule;
    for (; k->cursor[stage] < s->first[stage + 1]; k->cursor[stage]++) {
        const cf_action *a = &s->actions[k->cursor[stage]], *b;
        cf_pass counterpart = cf__counterpart((cf_pass)a->pass);
        int64_t peer;
        if (counterpart == CF_PASS_COUNT) continue;
        peer = cf__other_end(a) % s->n_stages;
        if (k->cursor[peer] == s->first[peer + 1]) return;
        b = &s->actions[k->cursor[peer]];
        if (b->pass != counterpart || b->chunk != a->chunk || b->stage != cf__other_end(a)) return;
        k->cursor[peer]++;
        cf__wake(k, peer, n);
    }
}

/* The first stage that cannot go on, and its next action. */
static cf_result cf__name_deadlock(cf__checker *k, const char *field) {
    int64_t stage = 0;
    const cf_action *a;
    while (k->cursor[stage] == k->schedule->first[stage + 1]) stage++;
    a = &k->schedule->actions[k->cursor[stage]];
    k->stage = stage;
    k->position = k->cursor[stage] - k->schedule->first[stage];
    return cf__violation_of(k, a, field, 1, 0, "waits for ever: the lists deadlock");
}

static cf_result cf__run_lists(cf__checker *k, void (*run)(cf__checker *k, int64_t stage, int64_t *n),
                               const char *field) {
    int64_t stage, n = 0, n_stages = k->schedule->n_stages;
    for (stage = n_stages - 1; stage >= 0; stage--) {
        k->cursor[stage] = k->schedule->first[stage];
        cf__wake(k, stage, &n);
    }
    while (n > 0) {
        stage = k->stack[--n];
        k->queued[stage] = 0;
        run(k, stage, &n);
    }
    for (stage = 0; stage < n_stages; stage++)
        if (k->cursor[stage] < k->schedule->first[stage + 1]) return cf__name_deadlock(k, field);
    return CF_OK;
}

static cf_result cf__check_schedule(cf__checker *k) {
    int64_t stage;
    cf_result result;
    for (stage = 0; stage < k->schedule->n_stages; stage++)
        if ((result = cf__check_list(k, stage)) != CF_OK) return result;
    if ((result = cf__check_all_complete(k)) != CF_OK) return result;
    if ((result = cf__run_lists(k, cf__advance, "actions")) != CF_OK) return result;
    return cf__crosses(k) ? cf__run_lists(k, cf__meet, "transfers") : CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_validate(const cf_plan *plan, const cf_schedule *schedule,
                                             const cf_validate_desc *desc, const cf_allocator *allocator,
                                             cf_error *error) {
    cf__checker k;
    cf__carver carver = {NULL, 0, 0};
    cf_allocator memory;
    cf_result result;
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    memset(&k, 0, sizeof k);
    k.plan = plan;
    k.schedule = schedule;
    k.error = error;
    if (desc != NULL) k.desc = *desc;
    if ((result = cf__allocator(allocator, &memory, error)) != CF_OK) return result;
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__check_schedule_counts(plan, schedule, error)) != CF_OK) return result;
    if ((result = cf__check_schedule_lists(schedule, error)) != CF_OK) return result;
    k.n_stages = schedule->n_stages * schedule->n_virtual;
    k.first_chunk = schedule->rank * plan->n_steps;
    if ((result = cf__judge_units(&k)) != CF_OK) return result;
    if ((result = cf__judge_limits(&k)) != CF_OK) return result;
    cf__layout_checker(&k, &carver);
    if (carver.overflow) return cf__too_large(error, "n_stages");
    carver.base = (unsigned char *)memory.alloc(carver.used, memory.user);
    if (carver.base == NULL) return cf__fail_memory(error, carver.used);
    memset(carver.base, 0, carver.used);
    carver.used = 0;
    cf__layout_checker(&k, &carver);
    result = cf__check_schedule(&k);
    memory.release(carver.base, memory.user);
    return result;
}

/* ---- lowering ---- */

/* Something that begins at a time: a pass, or the transfer of what a pass has made. */
typedef struct cf__event {
    double time;
    int64_t action; /* index into the schedule's actions */
    int is_pass;
} cf__event;

typedef struct cf__lowerer {
    const cf_plan *plan;
    const cf_schedule *schedule;
    cf_lower_desc desc;
    cf_error *error;
    cf__pipeline pipe;
    int64_t n_stages;        /* virtual stages in all */
    int64_t n_cells;         /* n_stages x chunks of the rank */
    int64_t n_events, n_heap, n_moves;
    double *start, *end;     /* (n_actions) */
    int64_t *events;         /* (2 x n_actions) in order: an action, or ~action for the transfer of its result */
    unsigned char *replayed; /* (n_cells) 1: the chunk has R on that virtual stage */
    double *arrived[3];      /* (n_cells) when the input of F, R and B is there; -1: it is not yet */
    int64_t *cursor;         /* (schedule->n_stages) the next action of each stage */
    double *free_at;         /* (schedule->n_stages) when its last pass ends */
    unsigned char *queued;   /* (schedule->n_stages) 1: its next pass is in the heap */
    cf__event *heap;         /* (2 x schedule->n_stages) earliest first */
    /* offload only */
    int64_t *last_use;       /* (n_cells) in the cell of a group's first chunk: the last pass with its state, -1 */
    int32_t *held;           /* (n_cells) there too: chunks that have rows now */
    int32_t *moved;          /* (n_actions) after this pass the rows of so many chunks of its group leave */
    int64_t *back;           /* (n_actions) and before this pass those that left after pass back[] return; -1: none */
    int64_t *next_back;      /* (n_actions) and those that left after next_back[back[]], and so on */
} cf__lowerer;

static void cf__layout_lowerer(cf__lowerer *l, cf__carver *carver) {
    const cf_schedule *s = l->schedule;
    int64_t i, cells = l->desc.offload ? l->n_cells : 0, actions = l->desc.offload ? s->n_actions : 0;
    cf__layout_pipeline(&l->pipe, carver);
    l->start = (double *)cf__take(carver, s->n_actions, sizeof(double));
    l->end = (double *)cf__take(carver, s->n_actions, sizeof(double));
    l->events = (int64_t *)cf__take(carver, 2 * s->n_actions, sizeof(int64_t));
    l->replayed = (unsigned char *)cf__take(carver, l->n_cells, 1);
    for (i = 0; i < 3; i++) l->arrived[i] = (double *)cf__take(carver, l->n_cells, sizeof(double));
    l->cursor = (int64_t *)cf__take(carver, s->n_stages, sizeof(int64_t));
    l->free_at = (double *)cf__take(carver, s->n_stages, sizeof(double));
    l->queued = (unsigned char *)cf__take(carver, s->n_stages, 1);
    l->heap = (cf__event *)cf__take(carver, 2 * s->n_stages, sizeof(cf__event));
    l->last_use = (int64_t *)cf__take(carver, cells, sizeof(int64_t));
    l->held = (int32_t *)cf__take(carver, cells, sizeof(int32_t));
    l->moved = (int32_t *)cf__take(carver, actions, sizeof(int32_t));
    l->back = (int64_t *)cf__take(carver, actions, sizeof(int64_t));
    l->next_back = (int64_t *)cf__take(carver, actions, sizeof(int64_t));
}

static int64_t cf__lower_cell(const cf__lowerer *l, int64_t chunk, int64_t stage) {
    return stage * l->plan->n_steps + chunk - l->schedule->rank * l->plan->n_steps;
}

/* Which input a pass waits for, as an index of arrived[]. W comes behind its I in the list and waits for none. */
static int cf__input_of(const cf_action *a) { return a->pass == CF_F ? 0 : a->pass == CF_R ? 1 : 2; }

/* The virtual stage that uses the result of a pass, -1: none does. */
static int64_t cf__goes_to(const cf__lowerer *l, const cf_action *a) {
    int64_t next = a->stage + (int64_t)1;
    if (a->pass == CF_B || a->pass == CF_I) return a->stage - (int64_t)1;
    if (a->pass == CF_W || next == l->n_stages) return -1;
    if (a->pass == CF_F) return next;
    return l->schedule->replay == CF_REPLAY_PIPELINE && l->replayed[cf__lower_cell(l, a->chunk, next)] ? next : -1;
}

/* When the input of a pass is there: 0 if it needs none, -1 if it is not yet. */
static double cf__input_time(const cf__lowerer *l, const cf_action *a) {
    int none = a->pass == CF_W || ((a->pass == CF_F || a->pass == CF_R) && a->stage == 0) ||
               ((a->pass == CF_B || a->pass == CF_I) && a->stage + 1 == l->n_stages) ||
               (a->pass == CF_R && l->schedule->replay == CF_REPLAY_LOCAL);
    return none ? 0 : l->arrived[cf__input_of(a)][cf__lower_cell(l, a->chunk, a->stage)];
}

/* ---- the order of passes and transfers ---- */

/* Transfers first: a stage hands on what it has made before it begins the next pass. */
static int cf__earlier(const cf__event *a, const cf__event *b) {
    if (a->time < b->time || b->time < a->time) return a->time < b->time;
    if (a->is_pass != b->is_pass) return !a->is_pass;
    return a->action < b->action;
}

static void cf__push_event(cf__lowerer *l, double time, int64_t action, int is_pass) {
    int64_t i = l->n_heap++, parent;
    cf__event event;
    memset(&event, 0, sizeof event);
    event.time = time;
    event.action = action;
    event.is_pass = is_pass;
    for (; i > 0 && cf__earlier(&event, &l->heap[parent = (i - 1) / 2]); i = parent) l->heap[i] = l->heap[parent];
    l->heap[i] = event;
}

static cf__event cf__pop_event(cf__lowerer *l) {
    cf__event top = l->heap[0], last = l->heap[--l->n_heap];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < l->n_heap) {
        if (child + 1 < l->n_heap && cf__earlier(&l->heap[child + 1], &l->heap[child])) child++;
        if (!cf__earlier(&l->heap[child], &last)) break;
        l->heap[i] = l->heap[child];
        i = child;
    }
    l->heap[i] = last;
    return top;
}

/* Puts a stage's next pass into the heap, if its input is there. */
static void cf__push_pass(cf__lowerer *l, int64_t stage) {
    double ready;
    if (l->queued[stage] || l->cursor[stage] == l->schedule->first[stage + 1]) return;
    ready = cf__input_time(l, &l->schedule->actions[l->cursor[stage]]);
    if (ready < 0) return;
    l->queued[stage] = 1;
    cf__push_event(l, ready > l->free_at[stage] ? ready : l->free_at[stage], l->cursor[stage], 1);
}

/* What a pass has made reaches the stage that uses it. */
static void cf__arrive(cf__lowerer *l, int64_t action, double time) {
    const cf_action *a = &l->schedule->actions[action];
    int64_t to = cf__goes_to(l, a);
    l->arrived[cf__input_of(a)][cf__lower_cell(l, a->chunk, to)] = time;
    cf__push_pass(l, to % l->schedule->n_stages);
}

static void cf__begin_pass(cf__lowerer *l, const cf__event *event) {
    const cf_action *a = &l->schedule->actions[event->action];
    int64_t stage = a->stage % l->schedule->n_stages;
    double end = event->time + cf__pass_seconds(&l->pipe, a->pass, a->chunk - l->pipe.first_chunk, a->stage);
    l->start[event->action] = event->time;
    l->end[event->action] = l->free_at[stage] = end;
    l->events[l->n_events++] = event->action;
    l->cursor[stage]++;
    l->queued[stage] = 0;
    if (cf__goes_to(l, a) >= 0 && l->schedule->n_stages > 1) cf__push_event(l, end, event->action, 0);
    else if (cf__goes_to(l, a) >= 0) cf__arrive(l, event->action, end);
    cf__push_pass(l, stage);
}

/* Runs the lists in simulated time and notes what begins when. The order in which events leave the heap is the one
   order that all stages keep to: a transfer is in it behind the pass that makes the tensor and before the one that uses
   it. */
static cf_result cf__order_events(cf__lowerer *l) {
    const cf_schedule *s = l->schedule;
    int64_t i, j;
    for (i = 0; i < s->n_actions; i++)
        if (s->actions[i].pass == CF_R) l->replayed[cf__lower_cell(l, s->actions[i].chunk, s->actions[i].stage)] = 1;
    for (i = 0; i < 3; i++)
        for (j = 0; j < l->n_cells; j++) l->arrived[i][j] = -1;
    for (i = 0; i < s->n_stages; i++) l->cursor[i] = s->first[i];
    for (i = 0; i < s->n_stages; i++) cf__push_pass(l, i);
    while (l->n_heap > 0) {
        cf__event event = cf__pop_event(l);
        if (!cf__is_cost(event.time))
            return cf__fail(l->error, CF_ERROR_OVERFLOW, "timing", event.action, 0, -1, "times are not finite");
        if (event.is_pass) {
            cf__begin_pass(l, &event);
        } else {
            l->events[l->n_events++] = ~event.action;
            cf__arrive(l, event.action,
                       event.time +
                           cf__transfer_seconds(&l->pipe, s->actions[event.action].chunk - l->pipe.first_chunk));
        }
    }
    return CF_OK;
}

/* ---- state in host memory ---- */

/* The last pass of a list that begins early enough for rows to come back before pass `use`; later than pass `left`. */
static int64_t cf__return_before(const cf__lowerer *l, int64_t left, int64_t use, double seconds) {
    int64_t low = left + 1, high = use;
    while (low < high) { /* starts do not fall along a list */
        int64_t middle = low + (high - low + 1) / 2;
        if (l->start[middle] <= l->start[use] - seconds) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* The gap between two uses of a group's state, by the passes `left` and `use`, with `held` chunks' rows on the stage.
   */
static void cf__use_gap(cf__lowerer *l, int64_t left, int64_t use, int32_t held) {
    const cf_chunk *c = &l->plan->chunks[l->schedule->actions[use].chunk];
    int64_t first = l->plan->groups[c->group].first_chunk, back;
    double rate = l->desc.timing != NULL ? l->desc.timing->offload_seconds_per_token : 0;
    double gap = l->start[use] - l->end[left], seconds = 0;
    int32_t n = 0;
    if (use == left + 1) return; /* nothing else runs in between */
    while (n < held) {
        double more = seconds + cf__product(rate, (double)cf_chunk_state_tokens(l->plan, first + n));
        if (2 * more > gap) break;
        seconds = more;
        n++;
    }
    if (n == 0) return;
    back = cf__return_before(l, left, use, seconds);
    l->moved[left] = n;
    l->next_back[left] = l->back[back];
    l->back[back] = left;
    l->n_moves += n;
}

static void cf__plan_offload(cf__lowerer *l) {
    const cf_schedule *s = l->schedule;
    int64_t i;
    for (i = 0; i < l->n_cells; i++) l->last_use[i] = -1;
    for (i = 0; i < s->n_actions; i++) l->back[i] = -1;
    for (i = 0; i < s->n_actions; i++) { /* list after list; a group's cell on a virtual stage belongs to one list */
        const cf_action *a = &s->actions[i];
        const cf_chunk *c = &l->plan->chunks[a->chunk];
        int64_t cell = cf__lower_cell(l, a->chunk - c->index, a->stage);
        if (c->group < 0 || a->pass == CF_W) continue;
        if (l->last_use[cell] >= 0) cf__use_gap(l, l->last_use[cell], i, l->held[cell]);
        l->last_use[cell] = i;
        if (a->pass == CF_F) l->held[cell] = (int32_t)c->index + 1;
        if (a->pass == CF_B || a->pass == CF_I) l->held[cell] = (int32_t)c->index;
    }
}

/* ---- writing the lists ---- */

static void cf__put_lowered(cf__lowerer *l, cf_schedule *out, cf_pass pass, int64_t chunk, int64_t stage) {
    cf_action *action = &out->actions[l->cursor[stage % out->n_stages]++];
    memset(action, 0, sizeof *action);
    action->chunk = (int32_t)chunk;
    action->stage = (int32_t)stage;
    action->pass = (uint8_t)pass;
}

/* Rows of the chunks that leave after pass `left`: `pass` is OFFLOAD or PREFETCH. */
static void cf__put_moves(cf__lowerer *l, cf_schedule *out, cf_pass pass, int64_t left) {
    const cf_action *a = &l->schedule->actions[left];
    int64_t first = a->chunk - l->plan->chunks[a->chunk].index;
    int32_t i;
    for (i = 0; i < l->moved[left]; i++) cf__put_lowered(l, out, pass, first + i, a->stage);
}

/* Where each list begins: its passes, one end of every transfer, and the moves. */
static void cf__measure_lists(cf__lowerer *l, cf_schedule *out) {
    const cf_schedule *s = l->schedule;
    int64_t i;
    for (i = 0; i <= s->n_stages; i++) out->first[i] = s->first[i];
    for (i = 0; i < s->n_actions; i++) {
        const cf_action *a = &s->actions[i];
        int64_t stage = a->stage % s->n_stages, to = cf__goes_to(l, a);
        if (to >= 0 && s->n_stages > 1) {
            out->first[stage + 1]++;
            out->first[to % s->n_stages + 1]++;
        }
        if (l->desc.offload) out->first[stage + 1] += 2 * l->moved[i];
    }
    for (i = 1; i <= s->n_stages; i++) out->first[i] += out->first[i - 1] - s->first[i - 1];
    for (i = 0; i < s->n_stages; i++) l->cursor[i] = out->first[i];
}

static void cf__write_lists(cf__lowerer *l, cf_schedule *out) {
    int64_t i, left;
    cf__measure_lists(l, out);
    for (i = 0; i < l->n_events; i++) {
        int64_t action = l->events[i] >= 0 ? l->events[i] : ~l->events[i];
        const cf_action *a = &l->schedule->actions[action];
        if (l->events[i] >= 0) {
            if (l->desc.offload)
                for (left = l->back[action]; left >= 0; left = l->next_back[left])
                    cf__put_moves(l, out, CF_PREFETCH, left);
            out->actions[l->cursor[a->stage % out->n_stages]++] = *a;
            if (l->desc.offload) cf__put_moves(l, out, CF_OFFLOAD, action);
        } else {
            cf_pass send = a->pass == CF_F ? CF_SEND_F : a->pass == CF_R ? CF_SEND_R : CF_SEND_B;
            cf__put_lowered(l, out, send, a->chunk, a->stage);
            cf__put_lowered(l, out, cf__counterpart(send), a->chunk, cf__goes_to(l, a));
        }
    }
}

/* With the working space in place: decides, allocates the result and writes it. */
static cf_result cf__lower(cf__lowerer *l, const cf_allocator *allocator, cf_schedule **out) {
    cf_schedule header = *l->schedule, *schedule;
    cf__carver carver = {NULL, 0, 0};
    int64_t n_transfers;
    cf_result result = cf__order_events(l);
    if (result != CF_OK) return result;
    if (l->desc.offload) cf__plan_offload(l);
    n_transfers = l->n_events - header.n_actions;
    header.lowered = 1;
    header.n_actions += 2 * n_transfers + 2 * l->n_moves;
    if (header.n_actions > CF_MAX_ACTIONS)
        return cf__fail(l->error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, header.n_actions, "too many");
    header.allocator = *allocator;
    cf__layout_schedule(&header, &carver);
    if (carver.overflow) return cf__too_large(l->error, "n_actions");
    carver.base = (unsigned char *)allocator->alloc(carver.used, allocator->user);
    if (carver.base == NULL) return cf__fail_memory(l->error, carver.used);
    carver.used = 0;
    schedule = cf__layout_schedule(&header, &carver);
    *schedule = header;
    cf__write_lists(l, schedule);
    *out = schedule;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_schedule_lower(const cf_plan *plan, const cf_schedule *schedule, const cf_lower_desc *desc,
                                          cf_schedule **out, cf_error *error) {
    cf__lowerer l;
    cf_allocator allocator;
    cf__carver carver = {NULL, 0, 0};
    cf_result result;
    memset(&l, 0, sizeof l);
    if (desc != NULL) l.desc = *desc;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(l.desc.allocator, &allocator, error)) != CF_OK) return result;
    if ((result = cf_schedule_validate(plan, schedule, NULL, l.desc.allocator, error)) != CF_OK) return result;
    if (schedule->lowered) return cf__fail(error, CF_ERROR_ARGUMENT, "lowered", -1, 0, 1, "is lowered already");
    l.plan = plan;
    l.schedule = schedule;
    l.error = error;
    l.n_stages = schedule->n_stages * schedule->n_virtual;
    l.n_cells = l.n_stages * plan->n_steps;
    if (l.desc.timing != NULL && (result = cf__check_timing(l.desc.timing, l.n_stages, error)) != CF_OK) return result;
    l.pipe = cf__pipeline_of(plan, schedule->rank, schedule->n_stages, schedule->n_virtual, schedule->k,
                             schedule->replay, l.desc.timing);
    cf__layout_lowerer(&l, &carver);
    if (carver.overflow) return cf__too_large(error, "n_actions");
    carver.base = (unsigned char *)allocator.alloc(carver.used, allocator.user);
    if (carver.base == NULL) return cf__fail_memory(error, carver.used);
    memset(carver.base, 0, carver.used);
    carver.used = 0;
    cf__layout_lowerer(&l, &carver);
    cf__fill_pipeline(&l.pipe);
    result = cf__lower(&l, &allocator, out);
    allocator.release(carver.base, allocator.user);
    return result;
}

/* ================================================================================================================
   >>tune

   First every ChunkSize, K and replay gets, for every batch, a lower bound of its time and the least memory that it can
   do with; then the candidates are simulated, those with the smallest bounds first, until the bounds of the others show
   that they cannot be among the best; last the neighbours of the winner.
   ================================================================================================================ */

CHUNKFLOW_API const char *cf_tune_status_name(cf_tune_status status) {
    static const char *const names[CF_TUNE_STATUS_COUNT] = {"untried", "ok", "dominated", "infeasible"};
    return cf__name(names, CF_TUNE_STATUS_COUNT, (int64_t)status);
}

CHUNKFLOW_API cf_tune_desc cf_tune_defaults(const cf_tune_desc *desc) {
    static const int64_t chunk_sizes[] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
    static const int64_t ks[] = {1, 2, 4, 8, 16, 32};
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    static const cf_schedule_kind virtual_kinds[] = {CF_SCHEDULE_INTERLEAVED, CF_SCHEDULE_BEST};
    static const cf_replay replays[] = {CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL};
    cf_tune_desc full = *desc;
    if (full.gpus_per_node == 0) full.gpus_per_node = 8;
    if (full.chunk_sizes == NULL) {
        full.chunk_sizes = chunk_sizes;
        full.n_chunk_sizes = sizeof chunk_sizes / sizeof chunk_sizes[0];
    }
    if (full.ks == NULL) {
        full.ks = ks;
        full.n_ks = sizeof ks / sizeof ks[0];
    }
    if (full.kinds == NULL) {
        int many = full.parallel.n_virtual > 1;
        full.kinds = many ? virtual_kinds : kinds;
        full.n_kinds = many ? sizeof virtual_kinds / sizeof kinds[0] : sizeof kinds / sizeof kinds[0];
    }
    if (full.replays == NULL) {
        full.replays = replays;
        full.n_replays = sizeof replays / sizeof replays[0];
    }
    if (full.batch == 0) full.batch = 256;
    if (full.n_batches == 0) full.n_batches = 16;
    if (full.n_exact == 0) full.n_exact = 10;
    return full;
}

CHUNKFLOW_API int64_t cf_tune_budget(const cf_plan *plan, int64_t n_stages, int64_t n_virtual) {
    int64_t passes = cf__max(1, 2 * plan->n_steps * n_stages * n_virtual);
    return cf__max(8, cf__min(64, 20000 / passes));
}

/* ---- statistics ---- */

/* The square root, by Newton's steps from above: the same on every platform, and no libm. */
static double cf__square_root(double x) {
    double root = x > 1 ? x : 1, next;
    if (!(x > 0)) return 0;
    for (;;) {
        next = (root + x / root) / 2;
        if (!(next < root)) return root;
        root = next;
    }
}

/* Half of the 95 % interval of the mean of n numbers that may be taken for normal. */
static double cf__confidence(const double *sample, const double *minus, int64_t n) {
    static const double t[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
                               2.201,  2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
                               2.080,  2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042};
    const int64_t tabled = sizeof t / sizeof t[0];
    double mean = 0, squares = 0, quantile;
    int64_t i;
    if (n < 2) return 0;
    for (i = 0; i < n; i++) mean += (sample[i] - (minus != NULL ? minus[i] : 0)) / (double)n;
    for (i = 0; i < n; i++) {
        double off = sample[i] - (minus != NULL ? minus[i] : 0) - mean;
        squares += cf__product(off, off);
    }
    quantile = n - 1 <= tabled ? t[n - 2] : 1.95996 + 2.45 / (double)(n - 1);
    return quantile * cf__square_root(squares / (double)(n - 1) / (double)n);
}

static double cf__mean(const double *sample, int64_t n) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < n; i++) sum += sample[i];
    return sum / (double)n;
}

/* ---- the search's own books ---- */

/* Memory that is used again and again, and grows. */
typedef struct cf__buffer {
    void *memory;
    size_t bytes;
} cf__buffer;

/* Bytes for each token, times 100 + the percentage that is lost in gaps: of what one virtual stage holds, and of the
   chunk that is in a pass. */
typedef struct cf__weights {
    int64_t activations, state, gradient, input, chunk;
} cf__weights;

/* A ChunkSize, K and replay on a split: what bounds are found for. Its candidates lie one after the other, replays
   apart. */
typedef struct cf__point {
    int64_t split, chunk_size, k; /* indices, also replay */
    int64_t replay;
} cf__point;

typedef struct cf__tuner {
    cf_tune_desc desc;
    const int64_t *lengths;
    int64_t n;
    cf_error *error;
    cf_allocator allocator;
    cf_tuning *tuning;
    int64_t most_virtual;   /* virtual stages of the deepest split */
    int64_t n_kinds, n_offloads, n_points;

    int64_t *batches;       /* (n_batches + 1) x batch: lengths; the last one is for memory only */
    int32_t *pool;          /* (n) the list, being shuffled */
    double *bounds;         /* (n_points x n_batches) */
    double *split_bounds;   /* (n_points x n_batches) for kinds that cut backwards; NULL: there are none */
    uint8_t *is_bounded;    /* (n_points) 1: these bounds are its own; 0: those of the largest K, which hold for all */
    double *keys;           /* (n_candidates) to sort by */
    int32_t *order;         /* (n_candidates) */
    int64_t *most_chunks;   /* (n_splits x n_chunk_sizes) chunks of the largest group of any batch */
    double *threshold;      /* (n_exact) the best times, rising */
    int64_t n_threshold;

    /* of the split and ChunkSize at hand */
    cf_memory_desc memory;
    cf_timing timing;
    double step_seconds;
    cf_stage_cost *stages;  /* (most_virtual) */
    cf__weights *weights;   /* (most_virtual) */
    int64_t *fixed;         /* (most_virtual) bytes x 100 that a stage holds always */
    int64_t *room;          /* (most_virtual) bytes x 100 of each stage for all that a schedule can change */
    int64_t *limits;        /* (most_virtual) for schedules that must keep to one: of bytes, */
    int64_t *chunk_limits;  /* (most_virtual) and of chunks */
    cf__held *held, *held_at_peak; /* (most_virtual) */
    cf_memory_load *loads;  /* (most_virtual) */

    cf__buffer plan, schedule, timeline;
    cf_error record;        /* where errors go while the search runs: not all of them are failures of it */
    int64_t done, total;
    int stop;
} cf__tuner;

static int64_t cf__tune_offloads(const cf_tune_desc *desc) { return desc->no_offload ? 1 : 2; }

static int64_t cf__kind_place(const cf_tune_desc *desc, cf_schedule_kind kind) {
    int64_t i;
    for (i = 0; i < desc->n_kinds; i++)
        if (desc->kinds[i] == kind) return i;
    return -1;
}

static int cf__kind_splits(const cf_tune_desc *desc, cf_schedule_kind kind) {
    return kind == CF_SCHEDULE_ZERO_BUBBLE || (kind == CF_SCHEDULE_BEST && desc->split_backward);
}

static int64_t cf__point_id(const cf__tuner *t, int64_t split, int64_t chunk_size, int64_t k, int64_t replay) {
    return ((split * t->desc.n_chunk_sizes + chunk_size) * t->desc.n_ks + k) * t->desc.n_replays + replay;
}

static cf__point cf__point_of(const cf__tuner *t, int64_t id) {
    const cf_tune_desc *desc = &t->desc;
    cf__point point;
    point.replay = id % desc->n_replays;
    point.k = id / desc->n_replays % desc->n_ks;
    point.chunk_size = id / desc->n_replays / desc->n_ks % desc->n_chunk_sizes;
    point.split = id / desc->n_replays / desc->n_ks / desc->n_chunk_sizes;
    return point;
}

static int64_t cf__candidate_id(const cf__tuner *t, const cf__point *point, int64_t kind, int64_t offload) {
    int64_t at = (point->split * t->desc.n_chunk_sizes + point->chunk_size) * t->desc.n_ks + point->k;
    return ((at * t->n_kinds + kind) * t->desc.n_replays + point->replay) * t->n_offloads + offload;
}

/* The point of a candidate, and which kind it is. */
static cf__point cf__candidate_point(const cf__tuner *t, int64_t id, int64_t *kind) {
    int64_t rest = id / t->n_offloads;
    int64_t replay = rest % t->desc.n_replays;
    rest /= t->desc.n_replays;
    *kind = rest % t->n_kinds;
    return cf__point_of(t, rest / t->n_kinds * t->desc.n_replays + replay);
}

static double *cf__batch_seconds(const cf__tuner *t, int64_t id) { return &t->tuning->seconds[id * t->desc.n_batches]; }

static cf_result cf__reserve(cf__tuner *t, cf__buffer *buffer, size_t bytes) {
    if (bytes <= buffer->bytes) return CF_OK;
    if (buffer->memory != NULL) t->allocator.release(buffer->memory, t->allocator.user);
    buffer->bytes = 0;
    buffer->memory = t->allocator.alloc(bytes, t->allocator.user);
    if (buffer->memory == NULL) return cf__fail_memory(t->error, bytes);
    buffer->bytes = bytes;
    return CF_OK;
}

static void cf__release_buffer(cf__tuner *t, cf__buffer *buffer) {
    if (buffer->memory != NULL) t->allocator.release(buffer->memory, t->allocator.user);
    buffer->memory = NULL;
}

/* Reports that one more batch of a candidate is done, or `n` of them. */
static void cf__tune_done(cf__tuner *t, int64_t n) {
    cf_tune_progress progress;
    t->done += n;
    if (t->desc.progress == NULL || t->stop || n == 0) return;
    progress.done = cf__min(t->done, t->total); /* the winner's neighbours come on top */
    progress.total = t->total;
    progress.best = t->tuning->winner >= 0 ? &t->tuning->candidates[t->tuning->winner] : NULL;
    if (t->desc.progress(t->desc.user, &progress) != 0) t->stop = 1;
}

/* ---- splits ---- */

/* Whether the model and the machine allow this split, and it leaves no rank without a sequence. */
static int cf__split_fits(const cf_tune_desc *desc, const cf_parallel *split) {
    cf_parallel full = cf_parallel_defaults(split);
    if (desc->parallel.tp == 0 && split->tp > desc->gpus_per_node) return 0;
    if (desc->parallel.dp == 0 && split->dp > desc->batch) return 0;
    return cf__check_parallel(desc->model, &full, NULL) == CF_OK;
}

/* Writes the splits to `out`, or only counts them where it is NULL: by rising tp, then pp. */
static int64_t cf__list_splits(const cf_tune_desc *desc, cf_parallel *out) {
    int64_t n = 0, tp, pp, gpus = desc->n_gpus;
    cf_parallel split = desc->parallel;
    if (gpus == 0) {
        if (out != NULL) out[0] = cf_parallel_defaults(&split);
        return 1;
    }
    for (tp = 1; tp <= gpus && tp <= desc->model->heads; tp++) {
        if (gpus % tp != 0 || (desc->parallel.tp > 0 && tp != desc->parallel.tp)) continue;
        for (pp = 1; pp <= gpus / tp && pp <= desc->model->layers; pp++) {
            int64_t dp = gpus / tp / pp;
            if (gpus / tp % pp != 0 || (desc->parallel.pp > 0 && pp != desc->parallel.pp)) continue;
            if (desc->parallel.dp > 0 && dp != desc->parallel.dp) continue;
            split.tp = tp;
            split.pp = pp;
            split.dp = dp;
            if (!cf__split_fits(desc, &split)) continue;
            if (out != NULL) out[n] = cf_parallel_defaults(&split);
            n++;
        }
    }
    return n;
}

/* ---- what is asked ---- */

static cf_result cf__check_rising(const int64_t *values, int64_t n, int64_t most, const char *field, const char *count,
                                  cf_error *error) {
    int64_t i;
    cf_result r;
    if ((r = cf__range(n, 1, CF_MAX_CANDIDATES, count, error)) != CF_OK) return r;
    for (i = 0; i < n; i++) {
        int64_t least = i > 0 ? values[i - 1] + 1 : 1;
        if (values[i] < least)
            return cf__fail(error, CF_ERROR_ARGUMENT, field, i, least, values[i], i > 0 ? "must rise" : "too small");
        if (values[i] > most) return cf__fail(error, CF_ERROR_LIMIT, field, i, most, values[i], "too large");
    }
    return CF_OK;
}

static cf_result cf__check_tune_lists(const cf_tune_desc *desc, cf_error *error) {
    int64_t i, j;
    int many = desc->parallel.n_virtual > 1;
    cf_result r;
    if ((r = cf__check_rising(desc->chunk_sizes, desc->n_chunk_sizes, CF_MAX_CHUNK_SIZE, "chunk_sizes", "n_chunk_sizes",
                              error)) != CF_OK)
        return r;
    if ((r = cf__check_rising(desc->ks, desc->n_ks, INT32_MAX, "ks", "n_ks", error)) != CF_OK) return r;
    if ((r = cf__range(desc->n_kinds, 1, CF_SCHEDULE_COUNT - 1, "n_kinds", error)) != CF_OK) return r;
    for (i = 0; i < desc->n_kinds; i++) {
        cf_schedule_kind kind = desc->kinds[i];
        if ((r = cf__choice((int64_t)kind, 1, CF_SCHEDULE_COUNT - 1, "kinds", error)) != CF_OK) return r;
        if (many && kind != CF_SCHEDULE_INTERLEAVED && kind != CF_SCHEDULE_BEST)
            return cf__fail(error, CF_ERROR_ARGUMENT, "kinds", i, CF_SCHEDULE_BEST, (int64_t)kind,
                            "has no virtual stages");
        for (j = 0; j < i; j++)
            if (desc->kinds[j] == kind)
                return cf__fail(error, CF_ERROR_ARGUMENT, "kinds", i, -1, (int64_t)kind, "is in the list already");
    }
    if ((r = cf__range(desc->n_replays, 1, CF_REPLAY_COUNT - 1, "n_replays", error)) != CF_OK) return r;
    for (i = 0; i < desc->n_replays; i++) {
        if ((r = cf__choice((int64_t)desc->replays[i], 1, CF_REPLAY_COUNT - 1, "replays", error)) != CF_OK) return r;
        if (i > 0 && desc->replays[0] == desc->replays[i])
            return cf__fail(error, CF_ERROR_ARGUMENT, "replays", i, -1, (int64_t)desc->replays[i],
                            "is in the list already");
    }
    return CF_OK;
}

/* Costs: from a GPU, or measured. */
static cf_result cf__check_tune_costs(const cf_tune_desc *desc, cf_error *error) {
    cf_parallel split = cf_parallel_defaults(&desc->parallel);
    cf_result r;
    if (desc->gpu == NULL && desc->timing == NULL) return cf__fail_null(error, "gpu");
    if (desc->gpu != NULL && (r = cf__check_gpu(desc->gpu, error)) != CF_OK) return r;
    if (!cf__is_cost(desc->step_seconds))
        return cf__fail(error, CF_ERROR_ARGUMENT, "step_seconds", -1, 0, -1, "not a time");
    if (desc->timing == NULL) return CF_OK;
    if (desc->n_gpus > 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "timing", -1, 0, 1, "is for one split: without n_gpus only");
    return cf__check_timing(desc->timing, split.pp * split.n_virtual, error);
}

static cf_result cf__check_tune_split(const cf_tune_desc *desc, cf_error *error) {
    int64_t fixed = cf__max(desc->parallel.tp, 1);
    cf_result r;
    if ((r = cf_model_validate(desc->model, error)) != CF_OK) return r;
    if (desc->n_gpus == 0) return cf_parallel_validate(desc->model, &desc->parallel, error);
    if ((r = cf__range(desc->n_gpus, 1, CF_MAX_RANKS, "n_gpus", error)) != CF_OK) return r;
    if ((r = cf__range(desc->parallel.tp, 0, CF_MAX_RANKS, "parallel.tp", error)) != CF_OK) return r;
    if ((r = cf__range(desc->parallel.pp, 0, CF_MAX_LAYERS, "parallel.pp", error)) != CF_OK) return r;
    if ((r = cf__range(desc->parallel.dp, 0, CF_MAX_RANKS, "parallel.dp", error)) != CF_OK) return r;
    if (desc->parallel.layers != NULL && desc->parallel.pp == 0)
        return cf__fail(error, CF_ERROR_ARGUMENT, "parallel.layers", -1, 0, 1, "needs a given parallel.pp");
    if (cf__list_splits(desc, NULL) > 0) return CF_OK;
    { /* what is fixed may be wrong by itself, whatever the number of GPUs */
        cf_parallel alone = desc->parallel;
        if ((r = cf_parallel_validate(desc->model, &alone, error)) != CF_OK) return r;
    }
    if (!cf__mul(fixed, cf__max(desc->parallel.pp, 1), &fixed) ||
        !cf__mul(fixed, cf__max(desc->parallel.dp, 1), &fixed))
        return cf__fail_size(error, "parallel.dp");
    return cf__fail(error, CF_ERROR_ARGUMENT, "n_gpus", -1, cf__div_up(desc->n_gpus, fixed) * fixed, desc->n_gpus,
                    "there is no way to split the model over so many");
}

static cf_result cf__check_tune_memory(const cf_tune_desc *desc, cf_error *error) {
    cf_memory_desc memory = desc->memory, full;
    cf_parallel split;
    cf_result r;
    memset(&split, 0, sizeof split);
    memory.model = desc->model;
    memory.parallel = split;
    if ((r = cf__check_memory_desc(&memory, &full, error)) != CF_OK) return r;
    if (desc->memory.unfused_attention)
        return cf__fail(error, CF_ERROR_ARGUMENT, "memory.unfused_attention", -1, 0, desc->memory.unfused_attention,
                        "long sequences need attention that does not write out its scores");
    if (desc->limit_bytes == 0 && desc->gpu == NULL)
        return cf__fail(error, CF_ERROR_ARGUMENT, "limit_bytes", -1, 1, 0, "must be given where there is no gpu");
    return cf__range(desc->limit_bytes, 0, INT64_MAX / 1000, "limit_bytes", error);
}

/* Fills in desc, n, lengths and the counts of `header`; refuses what can be refused without working space. */
static cf_result cf__tune_start(cf__tuner *t, cf_tuning *header, const int64_t *lengths, int64_t n,
                                const cf_tune_desc *desc, cf_error *error) {
    cf_result r;
    memset(t, 0, sizeof *t);
    memset(header, 0, sizeof *header);
    if (desc == NULL) return cf__fail_null(error, "desc");
    if (lengths == NULL) return cf__fail_null(error, "lengths");
    if ((r = cf__range(n, 1, CF_MAX_SEQUENCES, "n", error)) != CF_OK) return r;
    t->desc = cf_tune_defaults(desc);
    t->lengths = lengths;
    t->n = n;
    t->error = error;
    if ((r = cf__range(t->desc.gpus_per_node, 1, CF_MAX_RANKS, "gpus_per_node", error)) != CF_OK) return r;
    if ((r = cf__range(t->desc.batch, 1, CF_MAX_SEQUENCES, "batch", error)) != CF_OK) return r;
    if ((r = cf__range(t->desc.n_batches, 1, CF_MAX_TUNE_BATCHES, "n_batches", error)) != CF_OK) return r;
    if ((r = cf__range(t->desc.n_exact, 1, CF_MAX_CANDIDATES, "n_exact", error)) != CF_OK) return r;
    if ((r = cf__range(t->desc.budget, 0, INT64_MAX, "budget", error)) != CF_OK) return r;
    if ((r = cf__check_tune_split(&t->desc, error)) != CF_OK) return r;
    if ((r = cf__check_tune_lists(&t->desc, error)) != CF_OK) return r;
    if ((r = cf__check_tune_costs(&t->desc, error)) != CF_OK) return r;
    if ((r = cf__check_tune_memory(&t->desc, error)) != CF_OK) return r;
    if ((r = cf__allocator(desc->allocator, &t->allocator, error)) != CF_OK) return r;
    t->n_kinds = t->desc.n_kinds;
    t->n_offloads = cf__tune_offloads(&t->desc);
    header->n_splits = cf__list_splits(&t->desc, NULL);
    header->n_batches = t->desc.n_batches;
    if (!cf__mul(header->n_splits * t->desc.n_chunk_sizes, t->desc.n_ks * t->desc.n_replays, &t->n_points) ||
        t->n_points > CF_MAX_CANDIDATES / (t->n_kinds * t->n_offloads))
        return cf__fail(error, CF_ERROR_LIMIT, "n_chunk_sizes", -1,
                        CF_MAX_CANDIDATES / (header->n_splits * t->desc.n_replays * t->n_kinds * t->n_offloads) /
                            t->desc.n_ks,
                        t->desc.n_chunk_sizes, "too many candidates in all");
    header->n_candidates = t->n_points * t->n_kinds * t->n_offloads;
    header->limit_bytes = t->desc.limit_bytes > 0 ? t->desc.limit_bytes : t->desc.gpu->memory;
    header->winner = -1;
    return CF_OK;
}

static cf_tuning *cf__layout_tuning(cf__tuner *t, cf_tuning *header, cf__carver *carver) {
    int64_t n = header->n_candidates;
    cf_tuning *tuning = (cf_tuning *)cf__take(carver, 1, sizeof(cf_tuning));
    header->splits = (cf_parallel *)cf__take(carver, header->n_splits, sizeof(cf_parallel));
    header->candidates = (cf_tune_candidate *)cf__take(carver, n, sizeof(cf_tune_candidate));
    header->seconds = (double *)cf__take(carver, n * header->n_batches, sizeof(double));
    header->batch_tokens = (int64_t *)cf__take(carver, header->n_batches, sizeof(int64_t));
    header->ranking = (int64_t *)cf__take(carver, n, sizeof(int64_t));
    header->neighbours = (int64_t *)cf__take(carver, 16 + t->n_kinds, sizeof(int64_t));
    return tuning;
}

/* tuning: its splits are there, or NULL to lay out nothing yet. */
static void cf__layout_tuner(cf__tuner *t, const cf_tuning *header, cf__carver *carver) {
    int64_t i, times = t->n_points * t->desc.n_batches, n = header->n_candidates, v = t->most_virtual;
    int splits = 0;
    for (i = 0; i < t->n_kinds; i++) splits |= cf__kind_splits(&t->desc, t->desc.kinds[i]);
    t->batches = (int64_t *)cf__take(carver, (t->desc.n_batches + 1) * t->desc.batch, sizeof(int64_t));
    t->pool = (int32_t *)cf__take(carver, t->n, sizeof(int32_t));
    t->bounds = (double *)cf__take(carver, times, sizeof(double));
    t->split_bounds = splits ? (double *)cf__take(carver, times, sizeof(double)) : NULL;
    t->is_bounded = (uint8_t *)cf__take(carver, t->n_points, sizeof(uint8_t));
    t->keys = (double *)cf__take(carver, n, sizeof(double));
    t->order = (int32_t *)cf__take(carver, n, sizeof(int32_t));
    t->most_chunks = (int64_t *)cf__take(carver, header->n_splits * t->desc.n_chunk_sizes, sizeof(int64_t));
    t->threshold = (double *)cf__take(carver, cf__min(t->desc.n_exact, n), sizeof(double));
    t->stages = (cf_stage_cost *)cf__take(carver, v, sizeof(cf_stage_cost));
    t->weights = (cf__weights *)cf__take(carver, v, sizeof(cf__weights));
    t->fixed = (int64_t *)cf__take(carver, v, sizeof(int64_t));
    t->room = (int64_t *)cf__take(carver, v, sizeof(int64_t));
    t->limits = (int64_t *)cf__take(carver, v, sizeof(int64_t));
    t->chunk_limits = (int64_t *)cf__take(carver, v, sizeof(int64_t));
    t->held = (cf__held *)cf__take(carver, v, sizeof(cf__held));
    t->held_at_peak = (cf__held *)cf__take(carver, v, sizeof(cf__held));
    t->loads = (cf_memory_load *)cf__take(carver, v, sizeof(cf_memory_load));
}

/* ---- batches ---- */

static int64_t cf__longest_of(const int64_t *lengths, int64_t n) {
    int64_t i, longest = 0;
    for (i = 1; i < n; i++)
        if (lengths[i] > lengths[longest]) longest = i;
    return longest;
}

/* As a data loader would: the list is shuffled and handed out from its start, and shuffled anew when it is through. */
static cf_result cf__draw_batches(cf__tuner *t) {
    int64_t i, next = 0, size = t->desc.batch, count = t->desc.n_batches * size;
    int64_t *memory_only = &t->batches[count];
    uint64_t state = t->desc.seed;
    for (i = 0; i < t->n; i++) {
        if (t->lengths[i] < 0 || t->lengths[i] > CF_MAX_LENGTH)
            return cf__fail(t->error, t->lengths[i] < 0 ? CF_ERROR_ARGUMENT : CF_ERROR_LIMIT, "lengths", i,
                            t->lengths[i] < 0 ? 0 : CF_MAX_LENGTH, t->lengths[i], "out of range");
        t->pool[i] = (int32_t)i;
    }
    memset(t->tuning->batch_tokens, 0, (size_t)t->desc.n_batches * sizeof(int64_t));
    for (i = 0; i < count; i++) {
        int64_t other = next + (int64_t)(cf__draw(&state) % (uint64_t)(t->n - next));
        int32_t drawn = t->pool[other];
        t->pool[other] = t->pool[next];
        t->pool[next] = drawn;
        t->batches[i] = t->lengths[drawn];
        if (!cf__add(t->tuning->batch_tokens[i / size], t->lengths[drawn], &t->tuning->batch_tokens[i / size]))
            return cf__fail_size(t->error, "lengths");
        next = (next + 1) % t->n;
    }
    memcpy(memory_only, t->batches, (size_t)size * sizeof *memory_only);
    memory_only[cf__longest_of(memory_only, size)] = t->lengths[cf__longest_of(t->lengths, t->n)];
    return CF_OK;
}

/* Packs a batch; the plan lies in t->plan until the next one. */
static cf_result cf__pack_batch(cf__tuner *t, const cf_parallel *split, int64_t chunk_size, int64_t batch,
                                cf_plan **out) {
    const int64_t *lengths = &t->batches[batch * t->desc.batch];
    cf_pack_desc desc = t->desc.pack;
    size_t bytes;
    cf_result r;
    desc.chunk_size = chunk_size;
    desc.n_ranks = split->dp;
    if ((r = cf_pack_size(lengths, t->desc.batch, &desc, &bytes, t->error)) != CF_OK) return r;
    if ((r = cf__reserve(t, &t->plan, bytes)) != CF_OK) return r;
    return cf_pack_into(lengths, t->desc.batch, &desc, t->plan.memory, t->plan.bytes, out, t->error);
}

/* ---- memory ---- */

/* Sets up what the functions below need to know about a split. */
static cf_result cf__tune_weights(cf__tuner *t, const cf_parallel *split, int64_t chunk_size) {
    int64_t most;
    cf_memory_desc memory = t->desc.memory;
    cf_memory_report report;
    int64_t v, s, n_v = split->pp * split->n_virtual;
    cf_result r;
    memory.model = t->desc.model;
    memory.parallel = *split;
    if ((r = cf__check_memory_desc(&memory, &t->memory, t->error)) != CF_OK) return r;
    for (v = 0; v < n_v; v++) {
        cf__shard shard = cf__shard_of(t->memory.model, &t->memory.parallel, v);
        cf_token_bytes bytes = cf__token_bytes(&t->memory, &shard);
        int64_t loose = 100 + t->memory.fragmentation;
        cf__weights *w = &t->weights[v];
        w->activations = bytes.activations * loose;
        w->state = bytes.state * loose;
        w->gradient = bytes.state_gradient * loose;
        w->input = bytes.boundary * loose;
        w->chunk = cf__max(bytes.logits, bytes.working) * loose + bytes.buffers * 100;
        if (!cf__mul(cf__max(w->chunk, w->activations), chunk_size, &most) || most > INT64_MAX / 16)
            return cf__fail_size(t->error, "chunk_sizes");
    }
    memset(t->loads, 0, (size_t)n_v * sizeof *t->loads);
    for (s = 0; s < split->pp; s++) {
        if (!cf__stage_report(&t->memory, s, t->loads, 0, &report) || !cf__mul(report.total, 100, &t->fixed[s]) ||
            t->fixed[s] > INT64_MAX / 4)
            return cf__fail_size(t->error, "parameters");
    }
    return CF_OK;
}

/* All tokens of a plan on one stage must be countable. */
static cf_result cf__check_weights(const cf__tuner *t, const cf_plan *plan, const cf_parallel *split) {
    int64_t i, v, tokens = 0, most = 0, sum;
    int fits = 1;
    for (i = 0; i < plan->n_chunks && fits; i++) fits = cf__add(tokens, plan->chunks[i].padded, &tokens);
    for (v = 0; v < split->pp * split->n_virtual; v++) {
        const cf__weights *w = &t->weights[v];
        most = cf__max(most, w->activations + w->state + w->gradient + w->input + w->chunk);
    }
    if (fits && cf__mul(tokens, split->n_virtual, &sum) && cf__mul(sum, most, &sum) && sum <= INT64_MAX / 4)
        return CF_OK;
    return cf__fail_size(t->error, "lengths");
}

static int64_t cf__weigh(const cf__weights *w, const cf__held *held) {
    return held->tokens * w->activations + held->state * w->state + held->gradient * w->gradient +
           held->saved * w->input;
}

/* Bytes of the fullest stage where every virtual stage holds this, and runs a pass of a chunk of so many rows. */
static int64_t cf__fullest(const cf__tuner *t, const cf_parallel *split, const cf__held *held, int64_t rows,
                           int64_t *stage) {
    int64_t s, v, most = -1;
    for (s = 0; s < split->pp; s++) {
        int64_t sum = t->fixed[s], chunk = 0;
        for (v = s; v < split->pp * split->n_virtual; v += split->pp) {
            sum += cf__weigh(&t->weights[v], held);
            chunk = cf__max(chunk, rows * t->weights[v].chunk);
        }
        if (sum + chunk > most) {
            most = sum + chunk;
            *stage = s;
        }
    }
    return most / 100;
}

/* The least bytes that any schedule needs which keeps the last k chunks of each group: the worst moment of any unit by
   itself, just before the backward of one of its chunks (of its last one where there are virtual stages, because they
   do not come to the others at the same time). */
static int64_t cf__least_bytes(const cf__tuner *t, const cf_plan *plan, const cf_parallel *split, int64_t k, int local,
                               int64_t *stage) {
    int64_t id, n, i, most = 0, at = 0;
    *stage = 0;
    for (id = 0; id < plan->n_chunks; id += n) {
        cf__held held = {0, 0, 0, 0, 0};
        n = cf__unit_chunks(plan, id);
        for (i = 0; i < n; i++) {
            const cf_chunk *c = &plan->chunks[id + i];
            int64_t bytes;
            if (i <= n - k) held.tokens = 0; /* a replayed chunk may be alone, and so may be the first one kept */
            held.tokens += c->padded;
            if (local && i > 0 && i <= n - k) held.saved += c[-1].padded;
            held.state += cf_chunk_state_tokens(plan, id + i);
            held.gradient = held.state;
            if (split->n_virtual > 1 && i < n - 1) continue;
            bytes = cf__fullest(t, split, &held, c->padded, &at);
            if (bytes > most) {
                most = bytes;
                *stage = at;
            }
        }
    }
    return most;
}

static int64_t cf__largest_group(const cf_plan *plan) {
    int64_t i, most = 1;
    for (i = 0; i < plan->n_groups; i++) most = cf__max(most, plan->groups[i].n_chunks);
    return most;
}

/* What is left on each stage beside what it holds always and what the largest chunk in a pass needs. */
static void cf__find_room(cf__tuner *t, const cf_parallel *split, int64_t chunk_size) {
    int64_t v, s;
    for (s = 0; s < split->pp; s++) {
        int64_t chunk = 0;
        for (v = s; v < split->pp * split->n_virtual; v += split->pp)
            chunk = cf__max(chunk, t->weights[v].chunk * chunk_size);
        t->room[s] = t->tuning->limit_bytes * 100 - t->fixed[s] - chunk;
    }
}

/* Limits for the scheduler that make a schedule fit, in one of two ways. It counts the tokens of all stages by the same
   bytes.

   The first: bytes of the stage whose activations are dearest; the others' limits grow in proportion, and so do the
   bytes of state, to the largest that any stage would need. That is close where stages are alike. */
static void cf__limit_bytes(cf__tuner *t, const cf_parallel *split, cf_schedule_desc *desc) {
    int64_t n_v = split->pp * split->n_virtual, v, s;
    double dearest = 0;
    cf_bytes *bytes = &desc->bytes;
    for (v = 0; v < n_v; v++) dearest = cf__most(dearest, (double)t->weights[v].activations);
    bytes->per_token_activations = (int64_t)dearest;
    for (s = 0; s < split->pp; s++) {
        double own = 0, scale;
        for (v = s; v < n_v; v += split->pp) own = cf__most(own, (double)t->weights[v].activations);
        scale = dearest / own;
        for (v = s; v < n_v; v += split->pp) {
            const cf__weights *w = &t->weights[v];
            bytes->per_token_state = cf__max(bytes->per_token_state, (int64_t)cf__product((double)w->state, scale) + 1);
            bytes->per_token_state_gradient =
                cf__max(bytes->per_token_state_gradient, (int64_t)cf__product((double)w->gradient, scale) + 1);
            bytes->per_token_boundary =
                cf__max(bytes->per_token_boundary, (int64_t)cf__product((double)w->input, scale) + 1);
        }
        t->limits[s] = 1; /* 0 would mean that there is no limit */
        if (t->room[s] > 0) t->limits[s] = cf__max(1, (int64_t)cf__product((double)t->room[s] * (1 - 1e-9), scale));
    }
    desc->limits_bytes = t->limits;
}

/* Bytes x 100 of a token of state, with its gradient and (local replay) its row of a saved input, and of a chunk that
   is kept, the dearest on that stage. */
static int64_t cf__state_weight(const cf__tuner *t, const cf_parallel *split, int64_t stage, int local) {
    int64_t v, sum = 0;
    for (v = stage; v < split->pp * split->n_virtual; v += split->pp)
        sum += t->weights[v].state + t->weights[v].gradient + (local ? t->weights[v].input : 0);
    return sum;
}

static int64_t cf__kept_weight(const cf__tuner *t, const cf_parallel *split, int64_t stage, int64_t chunk_size) {
    int64_t v, most = 1;
    for (v = stage; v < split->pp * split->n_virtual; v += split->pp)
        most = cf__max(most, t->weights[v].activations * chunk_size);
    return most;
}

/* The second, for stages that are not: every stage gets room for the state of the largest group and K chunks; of what
   is left on the fullest one half is for more state, and all else on each for more chunks. */
static void cf__limit_chunks(cf__tuner *t, const cf_plan *plan, const cf_parallel *split, cf_schedule_desc *desc) {
    int64_t at_least = cf__min(desc->k, cf__largest_group(plan)) * split->n_virtual, tokens = 0, more = INT64_MAX, s, i;
    int local = desc->replay == CF_REPLAY_LOCAL;
    for (i = 0; i < plan->n_groups; i++) tokens = cf__max(tokens, plan->groups[i].tokens);
    for (s = 0; s < split->pp; s++) {
        int64_t state = cf__state_weight(t, split, s, local);
        int64_t left = t->room[s] - tokens * state - at_least * cf__kept_weight(t, split, s, plan->chunk_size);
        more = cf__max(0, cf__min(more, left / 2 / state));
    }
    tokens = cf__min(tokens + more, INT64_MAX / 8 / split->n_virtual);
    for (s = 0; s < split->pp; s++) {
        int64_t left = t->room[s] - tokens * cf__state_weight(t, split, s, local);
        t->chunk_limits[s] = cf__max(at_least, left / cf__kept_weight(t, split, s, plan->chunk_size));
    }
    memset(&desc->bytes, 0, sizeof desc->bytes); /* tokens of state are counted, not their bytes */
    desc->bytes.per_token_state = desc->bytes.per_token_state_gradient = 1;
    desc->bytes.per_token_boundary = local;
    desc->limits_bytes = NULL;
    desc->limit_bytes = cf__max(1, tokens * (2 + local) * split->n_virtual);
    desc->limits = t->chunk_limits;
}

/* Where a schedule needs most. */
typedef struct cf__peak {
    cf_memory_report memory;
    int64_t stage;
    cf_action action;
    double seconds;
} cf__peak;

/* The heaviest moment of one stage's list; t->held_at_peak says what its virtual stages hold then. Rows in host memory
   are not held. Returns how many compute passes come before it. */
static int64_t cf__walk_peak(cf__tuner *t, const cf__simulation *sim, const cf_schedule *schedule, int64_t stage,
                             cf_action *action, int64_t *rows) {
    int64_t n_v = schedule->n_stages * schedule->n_virtual, pp = schedule->n_stages, weight = 0, most = -1, at = 0;
    int64_t passes = 0, id, v;
    for (v = stage; v < n_v; v += pp) memset(&t->held[v], 0, sizeof t->held[v]);
    for (id = schedule->first[stage]; id < schedule->first[stage + 1]; id++) {
        const cf_action *a = &schedule->actions[id];
        const cf__weights *w = &t->weights[a->stage];
        cf__held *held = &t->held[a->stage];
        int64_t padded = sim->pipe.plan->chunks[a->chunk].padded;
        int64_t moved = cf_chunk_state_tokens(sim->pipe.plan, a->chunk);
        if (a->pass == CF_PREFETCH) {
            held->state += moved;
            weight += moved * w->state;
        }
        if (a->pass < CF_COMPUTE_PASS_COUNT) {
            weight -= cf__weigh(w, held);
            cf__hold(sim, held, a);
            weight += cf__weigh(w, held);
            if (weight + padded * w->chunk > most) {
                most = weight + padded * w->chunk;
                at = passes;
                *action = *a;
                *rows = padded;
                for (v = stage; v < n_v; v += pp) t->held_at_peak[v] = t->held[v];
            }
            weight -= cf__weigh(w, held);
            cf__let_go(sim, held, a);
            weight += cf__weigh(w, held);
            passes++;
        }
        if (a->pass == CF_OFFLOAD) {
            held->state -= moved;
            weight -= moved * w->state;
        }
    }
    return at;
}

/* The fullest stage at its heaviest moment. walked: the schedule of the timeline, or the same with its transfers. */
static cf_result cf__find_peak(cf__tuner *t, const cf_plan *plan, const cf_schedule *schedule,
                               const cf_schedule *walked, const cf_timeline *timeline, cf__peak *out) {
    int64_t n_v = schedule->n_stages * schedule->n_virtual, s, v;
    cf__simulation sim;
    memset(&sim, 0, sizeof sim);
    memset(out, 0, sizeof *out);
    sim.pipe = cf__pipeline_of(plan, schedule->rank, schedule->n_stages, schedule->n_virtual, schedule->k,
                               schedule->replay, NULL);
    memset(t->loads, 0, (size_t)n_v * sizeof *t->loads);
    for (s = 0; s < schedule->n_stages; s++) {
        cf_memory_report report;
        cf_action action;
        int64_t rows = 0, at;
        memset(&action, 0, sizeof action);
        for (v = s; v < n_v; v += schedule->n_stages) memset(&t->held_at_peak[v], 0, sizeof t->held_at_peak[v]);
        at = cf__walk_peak(t, &sim, walked, s, &action, &rows);
        for (v = s; v < n_v; v += schedule->n_stages) {
            t->loads[v].live_tokens = t->held_at_peak[v].tokens;
            t->loads[v].state_tokens = t->held_at_peak[v].state;
            t->loads[v].state_gradient_tokens = t->held_at_peak[v].gradient;
            t->loads[v].input_tokens = t->held_at_peak[v].saved;
        }
        t->loads[action.stage].chunk_tokens = rows;
        if (!cf__stage_report(&t->memory, s, t->loads, 0, &report)) return cf__fail_size(t->error, "lengths");
        if (s > 0 && report.total <= out->memory.total) continue;
        out->memory = report;
        out->stage = s;
        out->action = action;
        out->seconds = plan->n_steps > 0 ? timeline->start[schedule->first[s] + at] : 0;
    }
    return CF_OK;
}

/* ---- one plan: schedule, time, memory ---- */

/* Costs, memory and limits of a split and a ChunkSize. */
static cf_result cf__set_up(cf__tuner *t, int64_t split_id, int64_t chunk_size) {
    const cf_parallel *split = &t->tuning->splits[split_id];
    cf_result r;
    if (t->desc.timing != NULL) {
        t->timing = *t->desc.timing;
        t->step_seconds = t->desc.step_seconds;
    } else {
        cf_cost_desc cost;
        memset(&cost, 0, sizeof cost);
        cost.model = t->desc.model;
        cost.gpu = t->desc.gpu;
        cost.parallel = *split;
        cost.gpus_per_node = t->desc.gpus_per_node;
        cost.chunk_size = chunk_size;
        r = cf_cost_estimate(&cost, t->stages, split->pp * split->n_virtual, &t->timing, &t->step_seconds, t->error);
        if (r != CF_OK) return r;
    }
    if ((r = cf__tune_weights(t, split, chunk_size)) != CF_OK) return r;
    cf__find_room(t, split, chunk_size);
    return CF_OK;
}

static cf_schedule_desc cf__rank_desc(const cf__tuner *t, const cf_parallel *split, int64_t k, cf_replay replay,
                                      cf_schedule_kind kind, int64_t rank) {
    cf_schedule_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = kind;
    desc.replay = replay;
    desc.n_stages = split->pp;
    desc.n_virtual = split->n_virtual;
    desc.k = k;
    desc.rank = rank;
    desc.timing = &t->timing;
    desc.split_backward = t->desc.split_backward;
    desc.allocator = &t->allocator;
    return desc;
}

/* Makes a schedule and its timeline in the buffers. */
static cf_result cf__time_rank(cf__tuner *t, const cf_plan *plan, const cf_schedule_desc *desc, int bounds,
                               cf_schedule **schedule, cf_timeline **timeline) {
    cf_simulate_desc simulate;
    size_t bytes;
    cf_result r;
    if ((r = cf_schedule_size(plan, desc, &bytes, t->error)) != CF_OK) return r;
    if ((r = cf__reserve(t, &t->schedule, bytes)) != CF_OK) return r;
    r = cf_schedule_into(plan, desc, t->schedule.memory, t->schedule.bytes, schedule, t->error);
    if (r != CF_OK) return r;
    memset(&simulate, 0, sizeof simulate);
    simulate.timing = &t->timing;
    simulate.no_bounds = !bounds;
    if ((r = cf_simulate_size(plan, *schedule, &simulate, &bytes, t->error)) != CF_OK) return r;
    if ((r = cf__reserve(t, &t->timeline, bytes)) != CF_OK) return r;
    return cf_simulate_into(plan, *schedule, &simulate, t->timeline.memory, t->timeline.bytes, timeline, t->error);
}

/* The same, and its memory. */
static cf_result cf__try_rank(cf__tuner *t, const cf_plan *plan, const cf_schedule_desc *desc, int offload,
                              cf_timeline **timeline, cf__peak *peak) {
    cf_schedule *schedule, *lowered = NULL;
    cf_result r = cf__time_rank(t, plan, desc, 0, &schedule, timeline);
    if (r == CF_OK && offload) {
        cf_lower_desc lower;
        memset(&lower, 0, sizeof lower);
        lower.timing = &t->timing;
        lower.offload = 1;
        lower.allocator = &t->allocator;
        r = cf_schedule_lower(plan, schedule, &lower, &lowered, t->error);
    }
    if (r == CF_OK) r = cf__find_peak(t, plan, schedule, lowered != NULL ? lowered : schedule, *timeline, peak);
    cf_schedule_free(lowered);
    return r;
}

static void cf__not_feasible(cf_tune_candidate *c, int64_t bytes, int64_t stage, const char *why) {
    c->status = CF_TUNE_INFEASIBLE;
    c->why = why;
    c->bytes = bytes;
    c->stage = stage;
}

/* Notes the peak of a schedule that fits. */
static void cf__note_peak(cf_tune_candidate *c, const cf__peak *peak, int64_t batch, int64_t rank) {
    if (peak->memory.total <= c->bytes) return;
    c->memory = peak->memory;
    c->bytes = peak->memory.total;
    c->stage = peak->stage;
    c->peak_batch = batch;
    c->peak_rank = rank;
    c->peak_action = peak->action;
    c->peak_seconds = peak->seconds;
}

/* One rank of one batch: without a limit if that fits, else with one, in the first way that does. */
static cf_result cf__fit_rank(cf__tuner *t, const cf_plan *plan, cf_tune_candidate *c, int64_t batch, int64_t rank,
                              cf_timeline **timeline) {
    const cf_parallel *split = &t->tuning->splits[c->split];
    cf_schedule_desc desc = cf__rank_desc(t, split, c->k, c->replay, c->kind, rank);
    int64_t least = INT64_MAX, stage = 0;
    int way;
    desc.budget = t->desc.budget > 0 ? t->desc.budget : cf_tune_budget(plan, split->pp, split->n_virtual);
    for (way = 0; way < 3; way++) {
        cf__peak peak;
        cf_result r;
        if (way == 1) cf__limit_bytes(t, split, &desc);
        if (way == 2) cf__limit_chunks(t, plan, split, &desc);
        c->limited |= way > 0;
        t->tuning->n_simulated++;
        r = cf__try_rank(t, plan, &desc, c->offload, timeline, &peak);
        if (r == CF_ERROR_INFEASIBLE) continue;
        if (r != CF_OK) return r;
        if (peak.memory.total <= t->tuning->limit_bytes) {
            cf__note_peak(c, &peak, batch, rank);
            return CF_OK;
        }
        if (peak.memory.total < least) {
            least = peak.memory.total;
            stage = peak.stage;
        }
    }
    cf__not_feasible(c, least, stage, "no schedule of some batch keeps to the limit");
    return CF_OK;
}

/* One batch of a candidate: seconds of the slowest rank and what an iteration costs besides. */
static cf_result cf__try_batch(cf__tuner *t, cf_tune_candidate *c, int64_t batch, double *seconds) {
    const cf_parallel *split = &t->tuning->splits[c->split];
    cf_plan *plan = NULL;
    cf_timeline *timeline = NULL;
    double slowest = 0, bubble = 0;
    int64_t rank;
    cf_result r = cf__pack_batch(t, split, c->chunk_size, batch, &plan);
    if (r != CF_OK) return r;
    for (rank = 0; rank < split->dp; rank++) {
        if ((r = cf__fit_rank(t, plan, c, batch, rank, &timeline)) != CF_OK) return r;
        if (c->status == CF_TUNE_INFEASIBLE) return CF_OK;
        if (rank > 0 && !(timeline->makespan > slowest)) continue;
        slowest = timeline->makespan;
        bubble = timeline->bubble_useful;
    }
    *seconds = slowest + t->step_seconds;
    if (batch == t->desc.n_batches) return CF_OK;
    c->bubble += bubble / (double)t->desc.n_batches;
    c->chunks += (double)plan->n_steps / (double)t->desc.n_batches;
    return CF_OK;
}

/* ---- bounds ---- */

/* The strongest bound of the slowest rank for passes as `kind` cuts them. */
static cf_result cf__bound_plan(cf__tuner *t, const cf_plan *plan, const cf_parallel *split, int64_t k,
                                cf_replay replay, cf_schedule_kind kind, double *out) {
    int64_t rank;
    *out = 0;
    for (rank = 0; rank < split->dp; rank++) {
        cf_schedule_desc desc = cf__rank_desc(t, split, k, replay, kind, rank);
        cf_schedule *schedule;
        cf_timeline *timeline;
        cf_result r = cf__time_rank(t, plan, &desc, 1, &schedule, &timeline);
        if (r != CF_OK) return r;
        *out = cf__most(*out, timeline->bound);
    }
    *out += t->step_seconds;
    return CF_OK;
}

/* Bounds of one point and batch. */
static cf_result cf__bound_point(cf__tuner *t, const cf_plan *plan, int64_t point_id, int64_t batch) {
    cf__point point = cf__point_of(t, point_id);
    const cf_parallel *split = &t->tuning->splits[point.split];
    int64_t at = point_id * t->desc.n_batches + batch, k = t->desc.ks[point.k];
    cf_replay replay = t->desc.replays[point.replay];
    cf_schedule_kind probe = split->n_virtual > 1 ? CF_SCHEDULE_INTERLEAVED : CF_SCHEDULE_PAPER;
    cf_result r = cf__bound_plan(t, plan, split, k, replay, probe, &t->bounds[at]);
    if (r != CF_OK || t->split_bounds == NULL) return r;
    t->split_bounds[at] = 0;
    if (split->n_virtual > 1) return CF_OK; /* no fixed kind cuts the backwards of virtual stages */
    return cf__bound_plan(t, plan, split, k, replay, CF_SCHEDULE_ZERO_BUBBLE, &t->split_bounds[at]);
}

/* The bounds of the largest K hold for the smaller ones too: leaving out replays makes no schedule longer. */
static void cf__copy_bounds(cf__tuner *t, const cf__point *point, int64_t from, int64_t batch) {
    int64_t k, n = t->desc.n_batches;
    for (k = 0; k < t->desc.n_ks; k++) {
        int64_t id = cf__point_id(t, point->split, point->chunk_size, k, point->replay);
        t->bounds[id * n + batch] = t->bounds[from * n + batch];
        if (t->split_bounds != NULL) t->split_bounds[id * n + batch] = t->split_bounds[from * n + batch];
    }
}

/* A bound of one batch of a candidate. */
static double cf__candidate_bound(const cf__tuner *t, const cf__point *point, cf_schedule_kind kind, int64_t batch) {
    int64_t at = cf__point_id(t, point->split, point->chunk_size, point->k, point->replay) * t->desc.n_batches + batch;
    if (!cf__kind_splits(&t->desc, kind)) return t->bounds[at];
    if (kind == CF_SCHEDULE_ZERO_BUBBLE || t->split_bounds[at] < t->bounds[at]) return t->split_bounds[at];
    return t->bounds[at];
}

/* All candidates of a point that are not infeasible yet become so. */
static void cf__point_not_feasible(cf__tuner *t, const cf__point *point, int64_t bytes, int64_t stage) {
    int64_t kind, offload;
    for (kind = 0; kind < t->n_kinds; kind++)
        for (offload = 0; offload < t->n_offloads; offload++) {
            cf_tune_candidate *c = &t->tuning->candidates[cf__candidate_id(t, point, kind, offload)];
            if (c->status != CF_TUNE_INFEASIBLE || bytes > c->bytes)
                cf__not_feasible(c, bytes, stage, "K chunks of a group do not fit, even alone");
        }
}

/* All points of one split and ChunkSize on one batch: the least memory and time that they need. */
static cf_result cf__bound_batch(cf__tuner *t, int64_t split_id, int64_t chunk_size, int64_t batch) {
    const cf_parallel *split = &t->tuning->splits[split_id];
    int64_t k, replay, at_most_k = t->desc.n_ks - 1, largest, first = -1;
    int64_t *most = &t->most_chunks[split_id * t->desc.n_chunk_sizes + chunk_size];
    cf_plan *plan = NULL;
    cf_result r = cf__pack_batch(t, split, t->desc.chunk_sizes[chunk_size], batch, &plan);
    if (r != CF_OK) return r;
    if ((r = cf__check_weights(t, plan, split)) != CF_OK) return r;
    largest = cf__largest_group(plan);
    *most = cf__max(*most, largest);
    for (replay = 0; replay < t->desc.n_replays; replay++) {
        int64_t id = cf__point_id(t, split_id, chunk_size, at_most_k, replay), stage;
        cf__point point = cf__point_of(t, id);
        for (k = 0; k < t->desc.n_ks; k++) {
            int local = t->desc.replays[replay] == CF_REPLAY_LOCAL;
            int64_t bytes = cf__least_bytes(t, plan, split, t->desc.ks[k], local, &stage);
            point.k = k;
            if (bytes > t->tuning->limit_bytes) cf__point_not_feasible(t, &point, bytes, stage);
        }
        if (batch == t->desc.n_batches) continue;
        if (first < 0 || t->desc.ks[at_most_k] < largest)
            first = id; /* else nothing is replayed: the other form's will do */
        if (first == id && (r = cf__bound_point(t, plan, id, batch)) != CF_OK) return r;
        cf__copy_bounds(t, &point, first, batch);
        cf__tune_done(t, t->desc.n_ks);
        if (t->stop) return CF_OK;
    }
    return CF_OK;
}

static void cf__sum_bounds(const cf__tuner *t, int64_t id) {
    cf_tune_candidate *c = &t->tuning->candidates[id];
    int64_t batch, kind;
    cf__point point = cf__candidate_point(t, id, &kind);
    c->bound = 0;
    for (batch = 0; batch < t->desc.n_batches; batch++)
        c->bound += cf__candidate_bound(t, &point, c->kind, batch) / (double)t->desc.n_batches;
}

/* Gives a candidate the bounds of its own K; its costs are set up. */
static cf_result cf__own_bounds(cf__tuner *t, int64_t id) {
    const cf_tune_candidate *c = &t->tuning->candidates[id];
    int64_t batch, kind, point_id;
    cf__point point = cf__candidate_point(t, id, &kind);
    point_id = cf__point_id(t, point.split, point.chunk_size, point.k, point.replay);
    for (batch = 0; batch < t->desc.n_batches && !t->is_bounded[point_id]; batch++) {
        cf_plan *plan = NULL;
        cf_result r = cf__pack_batch(t, &t->tuning->splits[c->split], c->chunk_size, batch, &plan);
        if (r == CF_OK) r = cf__bound_point(t, plan, point_id, batch);
        if (r != CF_OK) return r;
    }
    t->is_bounded[point_id] = 1;
    cf__sum_bounds(t, id);
    return CF_OK;
}

/* Even a single token must fit some split; what is wanted is a whole chunk, and the state of the longest sequence. */
static cf_result cf__check_least_limit(cf__tuner *t) {
    int64_t i, wanted = INT64_MAX, item = -1, longest = t->lengths[cf__longest_of(t->lengths, t->n)];
    int64_t tokens = cf__max(1, cf__min(longest, t->desc.chunk_sizes[0]));
    for (i = 0; i < t->tuning->n_splits; i++) {
        cf_memory_desc memory = t->desc.memory;
        cf_error error;
        cf_result r;
        memory.model = t->desc.model;
        memory.parallel = t->tuning->splits[i];
        r = cf__check_chunk_fits(&memory, 1, 0, t->tuning->limit_bytes, &error);
        if (r == CF_OK) return CF_OK;
        if (r != CF_ERROR_LIMIT) {
            *t->error = error;
            return r;
        }
        (void)cf__check_chunk_fits(&memory, tokens, longest > tokens ? longest : 0, t->tuning->limit_bytes, &error);
        if (error.wanted >= wanted) continue;
        wanted = error.wanted;
        item = error.item;
    }
    return cf__fail(t->error, CF_ERROR_LIMIT, "limit_bytes", item, wanted, t->tuning->limit_bytes,
                    "too little for this stage's model state and a chunk of the smallest size");
}

/* A K beyond the largest group makes the same schedules as the smallest such K. */
static void cf__drop_copies(cf__tuner *t, int64_t split, int64_t chunk_size) {
    int64_t most = t->most_chunks[split * t->desc.n_chunk_sizes + chunk_size], enough = 0, k, replay, kind, offload;
    while (enough < t->desc.n_ks && t->desc.ks[enough] < most) enough++;
    for (k = enough + 1; k < t->desc.n_ks; k++)
        for (replay = 0; replay < t->desc.n_replays; replay++) {
            cf__point copy = cf__point_of(t, cf__point_id(t, split, chunk_size, k, replay)), origin = copy;
            origin.k = enough;
            for (kind = 0; kind < t->n_kinds; kind++)
                for (offload = 0; offload < t->n_offloads; offload++) {
                    cf_tune_candidate *c = &t->tuning->candidates[cf__candidate_id(t, &copy, kind, offload)];
                    if (c->status == CF_TUNE_INFEASIBLE) continue;
                    c->status = CF_TUNE_DOMINATED;
                    c->why = "no group has so many chunks: the same as a smaller K";
                    c->same_as = cf__candidate_id(t, &origin, kind, offload);
                }
        }
}

static void cf__fill_candidates(cf__tuner *t) {
    int64_t id, kind;
    for (id = 0; id < t->tuning->n_candidates; id++) {
        cf__point point = cf__candidate_point(t, id, &kind);
        cf_tune_candidate *c = &t->tuning->candidates[id];
        memset(c, 0, sizeof *c);
        c->split = point.split;
        c->chunk_size = t->desc.chunk_sizes[point.chunk_size];
        c->k = t->desc.ks[point.k];
        c->kind = t->desc.kinds[kind];
        c->replay = t->desc.replays[point.replay];
        c->offload = (int)(id % t->n_offloads);
        c->why = "";
        c->same_as = -1;
    }
    for (id = 0; id < t->tuning->n_candidates * t->desc.n_batches; id++) t->tuning->seconds[id] = -1;
}

static cf_result cf__find_all_bounds(cf__tuner *t) {
    int64_t split, size, batch, id;
    cf_result r;
    for (id = 0; id < t->n_points; id++) t->is_bounded[id] = cf__point_of(t, id).k == t->desc.n_ks - 1;
    memset(t->most_chunks, 0, (size_t)(t->tuning->n_splits * t->desc.n_chunk_sizes) * sizeof *t->most_chunks);
    for (split = 0; split < t->tuning->n_splits; split++)
        for (size = 0; size < t->desc.n_chunk_sizes; size++) {
            if ((r = cf__set_up(t, split, t->desc.chunk_sizes[size])) != CF_OK) return r;
            for (batch = t->desc.n_batches; batch >= 0 && !t->stop; batch--)
                if ((r = cf__bound_batch(t, split, size, batch)) != CF_OK) return r;
            if (t->stop) return CF_OK;
            cf__drop_copies(t, split, size);
        }
    for (id = 0; id < t->tuning->n_candidates; id++) cf__sum_bounds(t, id);
    return CF_OK;
}

/* ---- the search ---- */

/* What a time must stay below to be among the best; rounding is no reason to give up a candidate. */
static double cf__to_beat(const cf__tuner *t) {
    return t->n_threshold < t->desc.n_exact ? DBL_MAX : t->threshold[t->n_threshold - 1] * (1 + 1e-9);
}

static void cf__note_time(cf__tuner *t, int64_t id) {
    cf_tuning *tuning = t->tuning;
    double seconds = tuning->candidates[id].seconds;
    int64_t room = cf__min(t->desc.n_exact, tuning->n_candidates), i;
    if (tuning->winner < 0 || seconds < tuning->candidates[tuning->winner].seconds ||
        (!(seconds > tuning->candidates[tuning->winner].seconds) && id < tuning->winner))
        tuning->winner = id;
    if (t->n_threshold == room && !(seconds < t->threshold[room - 1])) return;
    if (t->n_threshold < room) t->n_threshold++;
    for (i = t->n_threshold - 1; i > 0 && seconds < t->threshold[i - 1]; i--) t->threshold[i] = t->threshold[i - 1];
    t->threshold[i] = seconds;
}

static void cf__give_up(cf_tune_candidate *c, const char *why) {
    c->status = CF_TUNE_DOMINATED;
    c->why = why;
    c->bubble = c->chunks = 0;
}

/* Simulates a candidate batch by batch, the one for memory first. `forced`: to the end, however slow. */
static cf_result cf__try_candidate(cf__tuner *t, int64_t id, int forced) {
    cf_tune_candidate *c = &t->tuning->candidates[id];
    int64_t i, n = t->desc.n_batches, kind;
    cf__point point = cf__candidate_point(t, id, &kind);
    double *seconds = cf__batch_seconds(t, id), at_least, ignored;
    cf_result r;
    if (!forced && c->bound > cf__to_beat(t)) {
        cf__give_up(c, "a lower bound of its time is above the best");
        return CF_OK;
    }
    if ((r = cf__set_up(t, c->split, c->chunk_size)) != CF_OK) return r;
    if ((r = cf__own_bounds(t, id)) != CF_OK) return r;
    if (!forced && c->bound > cf__to_beat(t)) {
        cf__give_up(c, "a lower bound of its time is above the best");
        return CF_OK;
    }
    at_least = c->bound * (double)n;
    c->status = CF_TUNE_UNTRIED;
    c->why = "";
    c->bubble = c->chunks = 0;
    c->bytes = 0;
    c->limited = 0;
    for (i = 0; i <= n && !t->stop; i++) {
        r = i == 0 ? cf__try_batch(t, c, n, &ignored) : cf__try_batch(t, c, i - 1, &seconds[i - 1]);
        if (r != CF_OK || c->status == CF_TUNE_INFEASIBLE) return r;
        if (i == 0) continue;
        at_least += seconds[i - 1] - cf__candidate_bound(t, &point, c->kind, i - 1);
        if (!forced && i < n && at_least / (double)n > cf__to_beat(t)) {
            cf__give_up(c, "its first batches and bounds of the others are above the best");
            return CF_OK;
        }
        if (i < n) cf__tune_done(t, 1);
    }
    if (i <= n) return CF_OK; /* interrupted */
    c->status = CF_TUNE_OK;
    c->why = "";
    c->seconds = cf__mean(seconds, n);
    c->confidence = cf__confidence(seconds, NULL, n);
    cf__note_time(t, id);
    return CF_OK;
}

/* Whether it is known how good a candidate is, or that it is not good enough. */
static int cf__is_settled(const cf_tune_candidate *c) {
    return c->status == CF_TUNE_OK || c->status == CF_TUNE_DOMINATED;
}

/* `c` makes the same schedules as `other`. */
static int cf__give_up_for(const cf__tuner *t, cf_tune_candidate *c, const cf_tune_candidate *other, const char *why) {
    cf__give_up(c, why);
    c->same_as = other->same_as >= 0 ? other->same_as : other - t->tuning->candidates;
    return 1;
}

/* In which of three rounds a candidate is looked at: 0 best, or all where there is no best, and kinds that best does
   not include; 1 the kinds that best tries too; 2 those that offload. */
static int cf__round_of(const cf__tuner *t, const cf_tune_candidate *c) {
    int fixed = c->kind != CF_SCHEDULE_BEST && !(c->kind == CF_SCHEDULE_ZERO_BUBBLE && !t->desc.split_backward);
    if (t->tuning->splits[c->split].n_virtual == 1 && c->kind == CF_SCHEDULE_INTERLEAVED) fixed = 0;
    if (c->offload) return 2;
    return fixed && cf__kind_place(&t->desc, CF_SCHEDULE_BEST) >= 0 ? 1 : 0;
}

/* Whether another candidate's outcome says that this one need not be simulated; then its status says why. */
static int cf__is_needless(cf__tuner *t, int64_t id) {
    cf_tune_candidate *c = &t->tuning->candidates[id], *other;
    int64_t kind, most;
    cf__point point = cf__candidate_point(t, id, &kind), origin = point;
    most = t->most_chunks[point.split * t->desc.n_chunk_sizes + point.chunk_size];
    origin.replay = 0;
    if (point.replay > 0 && c->k >= most) {
        other = &t->tuning->candidates[cf__candidate_id(t, &origin, kind, c->offload)];
        if (!other->limited && cf__is_settled(other))
            return cf__give_up_for(t, c, other, "nothing is replayed: the same as the other form");
    }
    if (c->offload) {
        other = &t->tuning->candidates[id - 1];
        if (!other->limited && cf__is_settled(other)) return cf__give_up_for(t, c, other, "it fits without");
    }
    if (t->desc.n_exact == CF_MAX_CANDIDATES || cf__round_of(t, c) != 1) return 0;
    other = &t->tuning->candidates[cf__candidate_id(t, &point, cf__kind_place(&t->desc, CF_SCHEDULE_BEST), c->offload)];
    if (other->limited || other->status != CF_TUNE_OK) return 0;
    cf__give_up(c, "the searched schedule is never slower");
    return 1;
}

static cf_result cf__search_round(cf__tuner *t, int round) {
    cf_tuning *tuning = t->tuning;
    int64_t i;
    for (i = 0; i < tuning->n_candidates && !t->stop; i++) {
        int64_t id = t->order[tuning->n_candidates - 1 - i]; /* falling keys, read backwards */
        cf_tune_candidate *c = &tuning->candidates[id];
        int64_t before = t->done;
        cf_result r = CF_OK;
        if (cf__round_of(t, c) != round) continue;
        if (c->status == CF_TUNE_UNTRIED && !cf__is_needless(t, id)) r = cf__try_candidate(t, id, 0);
        if (r != CF_OK) return r;
        cf__tune_done(t, t->desc.n_batches - (t->done - before));
    }
    return CF_OK;
}

/* ---- the neighbours of the winner ---- */

static int64_t cf__distance(int64_t a, int64_t b) { return a > b ? a - b : b - a; }

/* Whether two candidates of the same split differ in exactly one thing, and in ChunkSize and K by at most two steps. */
static int cf__is_neighbour(const cf__tuner *t, int64_t a, int64_t b) {
    int64_t kind_a, kind_b;
    cf__point p = cf__candidate_point(t, a, &kind_a), q = cf__candidate_point(t, b, &kind_b);
    int64_t sizes = cf__distance(p.chunk_size, q.chunk_size), ks = cf__distance(p.k, q.k);
    int differences = (sizes != 0) + (ks != 0) + (kind_a != kind_b) + (p.replay != q.replay) +
                      (a % t->n_offloads != b % t->n_offloads);
    return p.split == q.split && differences == 1 && sizes <= 2 && ks <= 2;
}

/* The candidate whose schedules this one has too, which may itself have been found to be a copy later. */
static int64_t cf__origin_of(const cf__tuner *t, int64_t id) {
    while (t->tuning->candidates[id].same_as >= 0) id = t->tuning->candidates[id].same_as;
    return id;
}

/* Makes the neighbours exact. A neighbour that turns out to be better becomes the winner, and has neighbours of its
   own. */
static cf_result cf__try_neighbours(cf__tuner *t) {
    cf_tuning *tuning = t->tuning;
    int64_t around = -1, id;
    while (around != tuning->winner && !t->stop) {
        around = tuning->winner;
        tuning->n_neighbours = 0;
        for (id = 0; id < tuning->n_candidates && !t->stop; id++) {
            const cf_tune_candidate *c = &tuning->candidates[id];
            int64_t exact;
            cf_result r;
            if (!cf__is_neighbour(t, around, id)) continue;
            tuning->neighbours[tuning->n_neighbours++] = id;
            exact = c->same_as >= 0 ? cf__origin_of(t, id) : id;
            if (tuning->candidates[exact].status == CF_TUNE_DOMINATED ||
                tuning->candidates[exact].status == CF_TUNE_UNTRIED)
                if ((r = cf__try_candidate(t, exact, 1)) != CF_OK) return r;
        }
    }
    return CF_OK;
}

/* ---- the whole of it ---- */

static void cf__rank_candidates(cf__tuner *t) {
    cf_tuning *tuning = t->tuning;
    int64_t i, n = t->desc.n_batches, least = INT64_MAX;
    for (i = 0; i < tuning->n_candidates; i++) {
        cf_tune_candidate *c = &tuning->candidates[i];
        if (c->same_as >= 0) c->same_as = cf__origin_of(t, i);
        if (c->status == CF_TUNE_INFEASIBLE) least = cf__min(least, c->bytes);
        if (c->status != CF_TUNE_OK) continue;
        t->keys[i] = c->seconds;
        t->order[tuning->n_ranked++] = (int32_t)i;
    }
    cf__sort_by_key(t->order, tuning->n_ranked, t->keys);
    for (i = 0; i < tuning->n_ranked; i++) {
        int64_t id = t->order[tuning->n_ranked - 1 - i]; /* sorted by falling key, of equals the higher index first */
        cf_tune_candidate *c = &tuning->candidates[id];
        tuning->ranking[i] = id;
        c->behind = c->seconds - tuning->candidates[tuning->winner].seconds;
        c->behind_confidence = cf__confidence(cf__batch_seconds(t, id), cf__batch_seconds(t, tuning->winner), n);
    }
    if (tuning->winner < 0 && !t->stop) tuning->smallest_limit = least;
    tuning->interrupted = t->stop;
}

static cf_result cf__tune_all(cf__tuner *t) {
    cf_tuning *tuning = t->tuning;
    int64_t i;
    int round;
    cf_result r;
    (void)cf__list_splits(&t->desc, tuning->splits);
    cf__fill_candidates(t);
    t->total = (t->n_points + tuning->n_candidates) * t->desc.n_batches;
    if ((r = cf__draw_batches(t)) != CF_OK) return r;
    if ((r = cf__check_least_limit(t)) != CF_OK) return r;
    if ((r = cf__find_all_bounds(t)) != CF_OK) return r;
    for (i = 0; i < tuning->n_candidates; i++) {
        t->keys[i] = tuning->candidates[i].bound;
        t->order[i] = (int32_t)i;
    }
    cf__sort_by_key(t->order, tuning->n_candidates, t->keys);
    for (round = 0; round < 3; round++)
        if ((r = cf__search_round(t, round)) != CF_OK) return r;
    if (tuning->winner >= 0 && (r = cf__try_neighbours(t)) != CF_OK) return r;
    cf__rank_candidates(t);
    return CF_OK;
}

/* The most virtual stages of any split. */
static cf_result cf__measure_splits(cf__tuner *t, const cf_tuning *header) {
    cf_parallel *splits =
        (cf_parallel *)t->allocator.alloc((size_t)header->n_splits * sizeof(cf_parallel), t->allocator.user);
    int64_t i;
    if (splits == NULL) return cf__fail_memory(t->error, (size_t)header->n_splits * sizeof(cf_parallel));
    (void)cf__list_splits(&t->desc, splits);
    for (i = 0; i < header->n_splits; i++)
        t->most_virtual = cf__max(t->most_virtual, splits[i].pp * splits[i].n_virtual);
    t->allocator.release(splits, t->allocator.user);
    return CF_OK;
}

/* Everything but the outcome's own memory, which `tuning` points to. */
static cf_result cf__tune_in(cf__tuner *t, cf_tuning *tuning) {
    cf__carver space = {NULL, 0, 0};
    void *scratch;
    cf_error *error = t->error;
    cf_result r = cf__measure_splits(t, tuning);
    if (r != CF_OK) return r;
    t->tuning = tuning;
    cf__layout_tuner(t, tuning, &space);
    if (space.overflow) return cf__too_large(t->error, "batch");
    scratch = t->allocator.alloc(space.used, t->allocator.user);
    if (scratch == NULL) return cf__fail_memory(t->error, space.used);
    space.base = (unsigned char *)scratch;
    space.used = 0;
    cf__layout_tuner(t, tuning, &space);
    t->error = &t->record;
    r = cf__tune_all(t);
    if (r != CF_OK && error != NULL) *error = t->record;
    cf__release_buffer(t, &t->plan);
    cf__release_buffer(t, &t->schedule);
    cf__release_buffer(t, &t->timeline);
    t->allocator.release(scratch, t->allocator.user);
    return r;
}

CHUNKFLOW_API cf_result cf_tune_size(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, size_t *bytes,
                                     cf_error *error) {
    cf__tuner t;
    cf_tuning header;
    cf__carver carver = {NULL, 0, 0};
    cf_result r = cf__tune_start(&t, &header, lengths, n, desc, error);
    if (r != CF_OK) return r;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    (void)cf__layout_tuning(&t, &header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_batches");
    *bytes = carver.used;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_tune_into(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, void *memory,
                                     size_t bytes, cf_tuning **out, cf_error *error) {
    cf__tuner t;
    cf_tuning header, *tuning;
    cf__carver carver = {NULL, 0, 0};
    cf_result r = cf__tune_start(&t, &header, lengths, n, desc, error);
    if (r != CF_OK) return r;
    if (out == NULL) return cf__fail_null(error, "out");
    (void)cf__layout_tuning(&t, &header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_batches");
    if ((r = cf__check_memory(memory, bytes, carver.used, error)) != CF_OK) return r;
    carver.base = (unsigned char *)memory;
    carver.used = 0;
    tuning = cf__layout_tuning(&t, &header, &carver);
    *tuning = header;
    if ((r = cf__tune_in(&t, tuning)) == CF_OK) *out = tuning;
    return r;
}

CHUNKFLOW_API cf_result cf_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, cf_tuning **out,
                                cf_error *error) {
    cf__tuner t;
    cf_tuning header, *tuning;
    cf__carver block = {NULL, 0, 0};
    void *memory;
    cf_result r = cf__tune_start(&t, &header, lengths, n, desc, error);
    if (r != CF_OK) return r;
    if (out == NULL) return cf__fail_null(error, "out");
    (void)cf__layout_tuning(&t, &header, &block);
    if (block.overflow) return cf__too_large(error, "n_batches");
    memory = t.allocator.alloc(block.used, t.allocator.user);
    if (memory == NULL) return cf__fail_memory(error, block.used);
    block.base = (unsigned char *)memory;
    block.used = 0;
    tuning = cf__layout_tuning(&t, &header, &block);
    *tuning = header;
    tuning->allocator = t.allocator;
    if ((r = cf__tune_in(&t, tuning)) == CF_OK) *out = tuning;
    else t.allocator.release(memory, t.allocator.user);
    return r;
}

CHUNKFLOW_API void cf_tuning_free(cf_tuning *tuning) {
    if (tuning != NULL && tuning->allocator.release != NULL) {
        cf_allocator allocator = tuning->allocator;
        allocator.release(tuning, allocator.user);
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
    uint8_t away;      /* its rows of the state are in host memory */
} cf__chunk_state;

enum { CF__HALF = 1, CF__WHOLE = 2 };

typedef struct cf__group_state {
    int32_t slot;    /* state slot, -1: none */
    int32_t n_away;  /* chunks whose rows are in host memory */
    int64_t tokens;  /* tokens whose K and V it holds, there or here */
    int64_t reached; /* the most that it has held: all of the sequence once every chunk ran forward */
} cf__group_state;

/* The tensors of a chunk that cross stages, on one virtual stage: in and out, of F, of R and of the backward. */
enum { CF__IN_F = 0, CF__IN_R, CF__IN_B, CF__OUT_F, CF__OUT_R, CF__OUT_B, CF__TENSORS };

/* Where such a tensor is: in a boundary slot (0 ..), or one of these. */
enum { CF__NOT_THERE = -1, CF__WANTED = -2, CF__GONE = -3 }; /* WANTED: there is a SEND for it in the list */

/* Small numbers: the one freed last is handed out first, so the highest in use is the peak. */
typedef struct cf__slots {
    int32_t *free_list;
    int64_t n_free, n_made, n_live;
} cf__slots;

/* A run of one stage. The next action is the one at position stats.done of its list. */
struct cf_runner {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_action *actions; /* (n_actions) the stage's list */
    int64_t n_actions;
    cf_run_desc desc;
    cf_allocator allocator;   /* gives the memory back; its release is NULL where the memory is the caller's */
    cf_error failure;         /* what ended the run; its code is CF_OK before */
    int64_t stage, first_chunk, n_virtual_stages;
    int64_t n_states, n_group_states; /* lengths of the two arrays below */
    cf__chunk_state *chunks;  /* (n_virtual x n_steps) */
    cf__group_state *groups;  /* (n_virtual x n_groups) */
    int64_t n_tensors;        /* length of tensors[]; 0 where nothing crosses stages */
    int32_t *tensors;         /* (n_virtual x n_steps x CF__TENSORS) */
    cf__slots activations, states, boundaries;
    int64_t n_finished; /* chunks, counted on each virtual stage, whose backward is complete */
    int64_t live_tokens, live_state_tokens;
    cf_run_stats stats;
};

CHUNKFLOW_API uint64_t cf_chunk_seed(uint64_t seed, int64_t chunk, int64_t stage) {
    uint64_t of_chunk = cf__mix(seed + CF__GOLDEN * ((uint64_t)chunk + 1));
    return cf__mix(of_chunk + CF__GOLDEN * ((uint64_t)stage + 1));
}

static cf_runner *cf__layout_runner(cf_runner *r, cf__carver *carver) {
    cf_runner *runner = (cf_runner *)cf__take(carver, 1, sizeof(cf_runner));
    r->chunks = (cf__chunk_state *)cf__take(carver, r->n_states, sizeof(cf__chunk_state));
    r->groups = (cf__group_state *)cf__take(carver, r->n_group_states, sizeof(cf__group_state));
    r->activations.free_list = (int32_t *)cf__take(carver, r->n_states, sizeof(int32_t));
    r->states.free_list = (int32_t *)cf__take(carver, r->n_group_states, sizeof(int32_t));
    r->tensors = (int32_t *)cf__take(carver, r->n_tensors, sizeof(int32_t));
    r->boundaries.free_list = (int32_t *)cf__take(carver, r->n_tensors, sizeof(int32_t));
    return runner;
}

/* Checks plan and schedule against each other and measures the working space. */
static cf_result cf__run_start(cf_runner *r, const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    cf_result result;
    memset(r, 0, sizeof *r);
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if (schedule->n_chunks != plan->n_chunks)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_chunks", -1, plan->n_chunks, schedule->n_chunks,
                        "made for another plan");
    if (schedule->rank < 0 || schedule->rank >= plan->n_ranks)
        return cf__fail(error, CF_ERROR_SCHEDULE, "rank", -1, plan->n_ranks - 1, schedule->rank, "no such rank");
    if (schedule->n_stages < 1 || schedule->n_virtual < 1 || schedule->first == NULL)
        return cf__fail(error, CF_ERROR_SCHEDULE, "n_stages", -1, 1, schedule->n_stages, "not a schedule");
    r->plan = plan;
    r->schedule = schedule;
    r->first_chunk = schedule->rank * plan->n_steps;
    if (!cf__mul(schedule->n_stages, schedule->n_virtual, &r->n_virtual_stages) || r->n_virtual_stages > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "n_stages", -1, INT32_MAX, schedule->n_stages, "too many stages");
    if (!cf__mul(plan->n_steps, schedule->n_virtual, &r->n_states) ||
        !cf__mul(plan->n_groups, schedule->n_virtual, &r->n_group_states) || r->n_states > INT32_MAX / CF__TENSORS ||
        r->n_group_states > INT32_MAX)
        return cf__fail(error, CF_ERROR_LIMIT, "n_virtual", -1, INT32_MAX, schedule->n_virtual,
                        "too many chunks per stage");
    if (schedule->lowered && schedule->n_stages > 1) r->n_tensors = r->n_states * CF__TENSORS;
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_run_size(const cf_plan *plan, const cf_schedule *schedule, size_t *bytes, cf_error *error) {
    cf_runner header;
    cf__carver carver = {NULL, 0, 0};
    cf_result result = cf__run_start(&header, plan, schedule, error);
    if (result != CF_OK) return result;
    if (bytes == NULL) return cf__fail_null(error, "bytes");
    cf__layout_runner(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_chunks");
    *bytes = carver.used;
    return CF_OK;
}

static cf_result cf__fail_callback(cf_runner *r, const char *callback, int64_t position, int64_t code) {
    return cf__fail(&r->failure, CF_ERROR_CALLBACK, callback, position, 0, code, "reported an error");
}

static cf_result cf__bad_action(cf_runner *r, const char *field, const cf_step *step, int64_t wanted, int64_t got,
                                const char *why) {
    return cf__fail(&r->failure, CF_ERROR_SCHEDULE, field, step->position, wanted, got, why);
}

static cf__slots *cf__slots_of(cf_runner *r, cf_resource what) {
    return what == CF_RESOURCE_STATE ? &r->states : what == CF_RESOURCE_BOUNDARY ? &r->boundaries : &r->activations;
}

/* Takes a slot and tells the host. On refusal the slot goes back unused. */
static cf_result cf__acquire(cf_runner *r, cf_resource what, int64_t owner, const cf_step *step, int32_t *out) {
    cf__slots *slots = cf__slots_of(r, what);
    int32_t slot = slots->n_free > 0 ? slots->free_list[--slots->n_free] : (int32_t)slots->n_made++;
    int code = r->desc.acquire != NULL ? r->desc.acquire(r->desc.user, what, slot, owner, step->action.stage) : 0;
    if (code != 0) {
        slots->free_list[slots->n_free++] = slot;
        return cf__fail_callback(r, "acquire", step->position, code);
    }
    slots->n_live++;
    *out = slot;
    return CF_OK;
}

static void cf__release(cf_runner *r, cf_resource what, int64_t owner, int64_t stage, int32_t *slot) {
    cf__slots *slots = cf__slots_of(r, what);
    if (r->desc.release != NULL) r->desc.release(r->desc.user, what, *slot, owner, stage);
    slots->free_list[slots->n_free++] = *slot;
    slots->n_live--;
    *slot = -1;
}

static int64_t cf__virtual_of(const cf_runner *r, const cf_step *step) {
    return step->action.stage / r->schedule->n_stages;
}

static cf__chunk_state *cf__chunk_state_of(const cf_runner *r, const cf_step *step) {
    return &r->chunks[cf__virtual_of(r, step) * r->plan->n_steps + step->action.chunk - r->first_chunk];
}

static cf__group_state *cf__group_state_of(const cf_runner *r, const cf_step *step) {
    if (step->chunk->group < 0) return NULL;
    return &r->groups[cf__virtual_of(r, step) * r->plan->n_groups + step->chunk->group];
}

/* Turns an action into a step, once every index in it is known to be good. */
static cf_result cf__read_action(cf_runner *r, int64_t position, cf_step *step) {
    const cf_plan *plan = r->plan;
    const cf_action *a = &r->actions[position];
    int64_t passes = r->schedule->lowered ? CF_PASS_COUNT : CF_COMPUTE_PASS_COUNT;
    memset(step, 0, sizeof *step);
    step->plan = plan;
    step->schedule = r->schedule;
    step->action = *a;
    step->position = position;
    step->slot = step->state = step->input = step->output = step->peer = -1;
    if (a->chunk < r->first_chunk || a->chunk >= r->first_chunk + plan->n_steps)
        return cf__bad_action(r, "chunk", step, r->first_chunk, a->chunk, "not a chunk of this rank");
    if (a->stage < 0 || a->stage >= r->n_virtual_stages)
        return cf__bad_action(r, "stage", step, r->stage, a->stage, "no such virtual stage");
    if (a->stage % r->schedule->n_stages != r->stage)
        return cf__bad_action(r, "stage", step, r->stage, a->stage, "this virtual stage lies on another stage");
    if (a->pass >= passes) return cf__bad_action(r, "pass", step, passes - 1, a->pass, "no such pass");
    if (cf__flags_are_wrong(a) && a->reserved != 0)
        return cf__bad_action(r, "reserved", step, 0, a->reserved, "must be 0");
    if (cf__flags_are_wrong(a))
        return cf__bad_action(r, "keep", step, 0, a->keep, "only F and R keep, and that is 0 or 1");
    step->chunk = &plan->chunks[a->chunk];
    if (step->chunk->group < -1 || step->chunk->group >= plan->n_groups || step->chunk->first_slice < 0 ||
        step->chunk->first_slice > plan->n_slices - (step->chunk->group >= 0))
        return cf__fail(&r->failure, CF_ERROR_PLAN, "chunks", a->chunk, 0, step->chunk->group,
                        "its group or slices do not exist");
    step->seed = cf_chunk_seed(r->desc.seed, a->chunk, a->stage);
    return CF_OK;
}

/* ---- tensors that cross stages ---- */

static int32_t *cf__tensor_of(const cf_runner *r, const cf_step *step, int tensor) {
    int64_t state = cf__virtual_of(r, step) * r->plan->n_steps + step->action.chunk - r->first_chunk;
    return &r->tensors[state * CF__TENSORS + tensor];
}

static cf_result cf__acquire_boundary(cf_runner *r, const cf_step *step, int32_t *tensor) {
    cf_result result = cf__acquire(r, CF_RESOURCE_BOUNDARY, step->action.chunk, step, tensor);
    r->stats.peak_boundaries = cf__max(r->stats.peak_boundaries, r->boundaries.n_live);
    return result;
}

static void cf__release_boundary(cf_runner *r, const cf_step *step, int32_t *tensor) {
    cf__release(r, CF_RESOURCE_BOUNDARY, step->action.chunk, step->action.stage, tensor);
    *tensor = CF__GONE;
}

/* The tensor that a pass reads, -1: none that crosses stages. */
static int cf__tensor_in(const cf_runner *r, const cf_step *step) {
    int64_t stage = step->action.stage, last = r->n_virtual_stages - 1;
    if (r->n_tensors == 0 || step->action.pass == CF_W) return -1;
    if (step->action.pass == CF_B || step->action.pass == CF_I) return stage < last ? CF__IN_B : -1;
    if (stage == 0) return -1;
    return step->action.pass == CF_R && r->schedule->replay != CF_REPLAY_LOCAL ? CF__IN_R : CF__IN_F;
}

/* The tensor that a pass makes, -1: none that crosses stages. */
static int cf__tensor_out(const cf_runner *r, const cf_step *step) {
    if (r->n_tensors == 0 || step->action.pass == CF_W) return -1;
    return step->action.pass == CF_F ? CF__OUT_F : step->action.pass == CF_R ? CF__OUT_R : CF__OUT_B;
}

/* The input must have come; the output gets a slot if the list has a SEND for it. */
static cf_result cf__before_boundary(cf_runner *r, cf_step *step) {
    int in = cf__tensor_in(r, step), out = cf__tensor_out(r, step);
    cf_result result;
    if (in >= 0 && *cf__tensor_of(r, step, in) < 0)
        return cf__bad_action(r, "pass", step, 1, 0, "runs before its input is received");
    if (in >= 0) step->input = *cf__tensor_of(r, step, in);
    if (out < 0 || *cf__tensor_of(r, step, out) != CF__WANTED) return CF_OK;
    if ((result = cf__acquire_boundary(r, step, cf__tensor_of(r, step, out))) != CF_OK) return result;
    step->output = *cf__tensor_of(r, step, out);
    return CF_OK;
}

/* The input has been read; local replay will read it once more where F kept nothing. */
static void cf__after_boundary(cf_runner *r, const cf_step *step) {
    int in = cf__tensor_in(r, step);
    int again = step->action.pass == CF_F && !step->action.keep && r->schedule->replay == CF_REPLAY_LOCAL;
    if (in >= 0 && !again) cf__release_boundary(r, step, cf__tensor_of(r, step, in));
}

/* A SEND or RECV: which tensor of the chunk, and which virtual stage at the other end. */
static cf_result cf__read_transfer(cf_runner *r, cf_step *step, int *tensor) {
    static const int tensors[] = {CF__OUT_F, CF__IN_F, CF__OUT_R, CF__IN_R, CF__OUT_B, CF__IN_B};
    int64_t other;
    *tensor = tensors[step->action.pass - CF_SEND_F];
    other = step->action.stage + (*tensor == CF__OUT_F || *tensor == CF__OUT_R || *tensor == CF__IN_B ? 1 : -1);
    if (r->n_tensors == 0 || other < 0 || other >= r->n_virtual_stages)
        return cf__bad_action(r, "pass", step, -1, step->action.pass, "no other stage to send to or receive from");
    step->peer = other % r->schedule->n_stages;
    return CF_OK;
}

static cf_result cf__run_transfer(cf_runner *r, cf_step *step) {
    int tensor, code = 0, sends;
    int32_t *slot;
    cf_result result = cf__read_transfer(r, step, &tensor);
    if (result != CF_OK) return result;
    slot = cf__tensor_of(r, step, tensor);
    sends = tensor >= CF__OUT_F;
    if (sends && *slot < 0) return cf__bad_action(r, "pass", step, 1, 0, "nothing to send, or sent already");
    if (!sends && *slot != CF__NOT_THERE) return cf__bad_action(r, "pass", step, 0, 1, "received already");
    if (!sends && (result = cf__acquire_boundary(r, step, slot)) != CF_OK) return result;
    if (sends) step->output = *slot;
    else step->input = *slot;
    if (sends && r->desc.send != NULL) code = r->desc.send(r->desc.user, step);
    if (!sends && r->desc.receive != NULL) code = r->desc.receive(r->desc.user, step);
    if (code != 0) return cf__fail_callback(r, sends ? "send" : "receive", step->position, code);
    if (sends) cf__release_boundary(r, step, slot);
    return CF_OK;
}

/* Looks ahead which tensors will be sent, so that the passes which make them get a slot for them. */
static cf_result cf__find_sends(cf_runner *r) {
    int64_t i;
    for (i = 0; i < r->n_tensors; i++) r->tensors[i] = CF__NOT_THERE;
    for (i = 0; i < r->n_actions && r->n_tensors > 0; i++) {
        cf_step step;
        int tensor;
        cf_result result = cf__read_action(r, i, &step);
        if (result != CF_OK) return result;
        if (step.action.pass != CF_SEND_F && step.action.pass != CF_SEND_R && step.action.pass != CF_SEND_B) continue;
        if ((result = cf__read_transfer(r, &step, &tensor)) != CF_OK) return result;
        *cf__tensor_of(r, &step, tensor) = CF__WANTED;
    }
    return CF_OK;
}

/* ---- state in host memory ---- */

static cf_result cf__run_offload(cf_runner *r, cf_step *step) {
    cf__chunk_state *chunk = cf__chunk_state_of(r, step);
    cf__group_state *group = cf__group_state_of(r, step);
    int64_t rows = cf_chunk_state_tokens(r->plan, step->action.chunk);
    int leaves = step->action.pass == CF_OFFLOAD, code = 0;
    if (group == NULL || !chunk->forwarded || chunk->backward != 0)
        return cf__bad_action(r, "pass", step, 1, 0, "this chunk has no rows of state now");
    if (chunk->away == leaves)
        return cf__bad_action(r, "pass", step, !leaves, leaves, leaves ? "its rows are away" : "its rows are here");
    if (!leaves) r->live_state_tokens += rows;
    r->stats.peak_state_tokens = cf__max(r->stats.peak_state_tokens, r->live_state_tokens);
    if (leaves && r->desc.offload != NULL) code = r->desc.offload(r->desc.user, step);
    if (!leaves && r->desc.prefetch != NULL) code = r->desc.prefetch(r->desc.user, step);
    if (code != 0) return cf__fail_callback(r, leaves ? "offload" : "prefetch", step->position, code);
    if (leaves) r->live_state_tokens -= rows;
    chunk->away = (uint8_t)leaves;
    group->n_away += leaves ? 1 : -1;
    return CF_OK;
}

/* ---- passes ---- */

static cf_result cf__check_rows(cf_runner *r, const cf_step *step) {
    const cf__group_state *group = cf__group_state_of(r, step);
    if (group == NULL || group->n_away == 0 || step->action.pass == CF_W) return CF_OK;
    return cf__bad_action(r, "pass", step, 0, group->n_away, "rows of its state are in host memory");
}

/* Takes what F or R needs: the state of the group, and a slot if the activations stay. */
static cf_result cf__before_forward(cf_runner *r, cf_step *step) {
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
        result = cf__acquire(r, CF_RESOURCE_STATE, step->chunk->group, step, &group->slot);
        if (result != CF_OK) return result;
        r->stats.peak_states = cf__max(r->stats.peak_states, r->states.n_live);
    }
    if (!step->action.keep) return CF_OK;
    result = cf__acquire(r, CF_RESOURCE_ACTIVATIONS, step->action.chunk, step, &chunk->slot);
    if (result != CF_OK) return result;
    r->live_tokens += step->chunk->padded;
    r->stats.peak_slots = cf__max(r->stats.peak_slots, r->activations.n_live);
    r->stats.peak_tokens = cf__max(r->stats.peak_tokens, r->live_tokens);
    return CF_OK;
}

static void cf__after_forward(cf_runner *r, const cf_step *step) {
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
static cf_result cf__before_backward(cf_runner *r, cf_step *step) {
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

static void cf__after_backward(cf_runner *r, const cf_step *step) {
    cf__chunk_state *chunk = cf__chunk_state_of(r, step);
    cf__group_state *group = cf__group_state_of(r, step);
    if (step->action.pass != CF_I) {
        cf__release(r, CF_RESOURCE_ACTIVATIONS, step->action.chunk, step->action.stage, &chunk->slot);
        r->live_tokens -= step->chunk->padded;
        r->n_finished++;
    }
    chunk->backward = step->action.pass == CF_I ? CF__HALF : CF__WHOLE;
    if (group == NULL || step->action.pass == CF_W) return;
    r->live_state_tokens -= group->tokens - step->chunk->prefix;
    group->tokens = step->chunk->prefix;
    if (step->chunk->index == 0)
        cf__release(r, CF_RESOURCE_STATE, step->chunk->group, step->action.stage, &group->slot);
}

static cf_result cf__report_progress(cf_runner *r, const cf_step *step) {
    cf_progress progress = {
        r->stats.done,        r->n_actions,     step, r->activations.n_live, r->states.n_live,
        r->live_state_tokens, r->boundaries.n_live};
    int code = r->desc.progress != NULL ? r->desc.progress(r->desc.user, &progress) : 0;
    if (code == 0) return CF_OK;
    return cf__fail(&r->failure, CF_ERROR_CANCELLED, "progress", step->position, 0, code, "asked to stop");
}

/* The slots that a step is told of, once they are taken. */
static void cf__show_slots(const cf_runner *r, cf_step *step) {
    const cf__group_state *group = cf__group_state_of(r, step);
    step->slot = cf__chunk_state_of(r, step)->slot;
    if (group == NULL) return;
    step->state = group->slot;
    step->state_tokens = step->action.pass == CF_R ? step->chunk->prefix : group->tokens;
}

static cf_result cf__run_pass(cf_runner *r, cf_step *step) {
    int forward = step->action.pass == CF_F || step->action.pass == CF_R, code = 0;
    cf_result result = cf__check_rows(r, step);
    if (result != CF_OK) return result;
    result = forward ? cf__before_forward(r, step) : cf__before_backward(r, step);
    if (result == CF_OK) result = cf__before_boundary(r, step);
    if (result != CF_OK) return result;
    cf__show_slots(r, step);
    if (forward && r->desc.forward != NULL) code = r->desc.forward(r->desc.user, step);
    if (!forward && r->desc.backward != NULL) code = r->desc.backward(r->desc.user, step);
    if (code != 0) return cf__fail_callback(r, forward ? "forward" : "backward", step->position, code);
    if (forward) cf__after_forward(r, step);
    else cf__after_backward(r, step);
    cf__after_boundary(r, step);
    return CF_OK;
}

static cf_result cf__run_action(cf_runner *r) {
    cf_step step;
    cf_result result = cf__read_action(r, r->stats.done, &step);
    if (result != CF_OK) return result;
    cf__show_slots(r, &step);
    if (step.action.pass < CF_COMPUTE_PASS_COUNT) result = cf__run_pass(r, &step);
    else if (step.action.pass == CF_OFFLOAD || step.action.pass == CF_PREFETCH) result = cf__run_offload(r, &step);
    else result = cf__run_transfer(r, &step);
    if (result != CF_OK) return result;
    r->stats.done++;
    return cf__report_progress(r, &step);
}

/* Gives back what an error, or a schedule that stops short, has left in use. */
static int64_t cf__release_all(cf_runner *r) {
    int64_t i, n_left = r->activations.n_live + r->states.n_live + r->boundaries.n_live;
    int64_t n_steps = r->plan->n_steps, n_groups = r->plan->n_groups, pp = r->schedule->n_stages;
    for (i = 0; i < r->n_states; i++)
        if (r->chunks[i].slot >= 0)
            cf__release(r, CF_RESOURCE_ACTIVATIONS, r->first_chunk + i % n_steps, i / n_steps * pp + r->stage,
                        &r->chunks[i].slot);
    for (i = 0; i < r->n_group_states; i++)
        if (r->groups[i].slot >= 0)
            cf__release(r, CF_RESOURCE_STATE, i % n_groups, i / n_groups * pp + r->stage, &r->groups[i].slot);
    for (i = 0; i < r->n_tensors; i++)
        if (r->tensors[i] >= 0)
            cf__release(r, CF_RESOURCE_BOUNDARY, r->first_chunk + i / CF__TENSORS % n_steps,
                        i / CF__TENSORS / n_steps * pp + r->stage, &r->tensors[i]);
    return n_left;
}

/* What the end of a run has to say, once everything is given back. */
static cf_result cf__judge_end(cf_runner *r, int64_t n_left) {
    if (r->failure.code != CF_OK) return r->failure.code;
    if (r->stats.done < r->n_actions)
        return cf__fail(&r->failure, CF_ERROR_CANCELLED, "actions", r->stats.done, r->n_actions, r->stats.done,
                        "the list was not run to its end");
    if (n_left > 0)
        return cf__fail(&r->failure, CF_ERROR_SCHEDULE, "actions", -1, 0, n_left, "slots still in use at the end");
    if (r->n_finished != r->n_states)
        return cf__fail(&r->failure, CF_ERROR_SCHEDULE, "actions", -1, r->n_states, r->n_finished,
                        "chunks without a complete backward");
    return CF_OK;
}

/* The caller's copy of what went wrong. */
static cf_result cf__tell_failure(const cf_runner *r, cf_error *error) {
    if (error != NULL && r->failure.code != CF_OK) *error = r->failure;
    return r->failure.code;
}

/* Finds the stage's list. */
static cf_result cf__find_list(cf_runner *r, int64_t stage, cf_error *error) {
    const cf_schedule *s = r->schedule;
    if (s->first[stage] < 0 || s->first[stage + 1] < s->first[stage] || s->first[stage + 1] > s->n_actions)
        return cf__fail(error, CF_ERROR_SCHEDULE, "first", stage, s->n_actions, s->first[stage + 1],
                        "action lists overlap or run out of range");
    r->stage = stage;
    r->n_actions = s->first[stage + 1] - s->first[stage];
    if (r->n_actions == 0) return CF_OK;
    if (s->actions == NULL) return cf__fail(error, CF_ERROR_SCHEDULE, "actions", -1, 1, 0, "is NULL");
    r->actions = &s->actions[s->first[stage]];
    return CF_OK;
}

/* The block of `bytes` bytes that the runner lives in: the caller's, or from the allocator. */
static cf_result cf__runner_memory(cf_runner *r, size_t bytes, unsigned char **memory, cf_error *error) {
    cf_result result = cf__allocator(r->desc.allocator, &r->allocator, error);
    if (result != CF_OK) return result;
    *memory = (unsigned char *)r->desc.memory;
    if (*memory != NULL) {
        r->allocator.release = NULL;
        return cf__check_memory(*memory, r->desc.bytes, bytes, error);
    }
    *memory = (unsigned char *)r->allocator.alloc(bytes, r->allocator.user);
    return *memory != NULL ? CF_OK : cf__fail_memory(error, bytes);
}

static void cf__free_runner(cf_runner *r) {
    cf_allocator allocator = r->allocator;
    if (allocator.release != NULL) allocator.release(r, allocator.user);
}

CHUNKFLOW_API cf_result cf_run_open(const cf_plan *plan, const cf_schedule *schedule, int64_t stage,
                                    const cf_run_desc *desc, cf_runner **out, cf_error *error) {
    cf_runner header, *r;
    cf__carver carver = {NULL, 0, 0};
    int64_t i;
    cf_result result = cf__run_start(&header, plan, schedule, error);
    if (result != CF_OK) return result;
    if (desc == NULL) return cf__fail_null(error, "desc");
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__choice(stage, 0, schedule->n_stages - 1, "stage", error)) != CF_OK) return result;
    if ((result = cf__find_list(&header, stage, error)) != CF_OK) return result;
    header.desc = *desc;
    cf__layout_runner(&header, &carver);
    if (carver.overflow) return cf__too_large(error, "n_chunks");
    if ((result = cf__runner_memory(&header, carver.used, &carver.base, error)) != CF_OK) return result;
    memset(carver.base, 0, carver.used);
    carver.used = 0;
    r = cf__layout_runner(&header, &carver);
    *r = header;
    for (i = 0; i < r->n_states; i++) r->chunks[i].slot = -1;
    for (i = 0; i < r->n_group_states; i++) r->groups[i].slot = -1;
    result = cf__find_sends(r);
    if (result == CF_OK) {
        *out = r;
    } else {
        (void)cf__tell_failure(r, error);
        cf__free_runner(r);
    }
    return result;
}

CHUNKFLOW_API const cf_action *cf_run_peek(const cf_runner *r) {
    return r != NULL && r->failure.code == CF_OK && r->stats.done < r->n_actions ? &r->actions[r->stats.done] : NULL;
}

CHUNKFLOW_API cf_result cf_run_next(cf_runner *r, cf_error *error) {
    if (r == NULL) return cf__fail_null(error, "runner");
    if (cf_run_peek(r) != NULL) (void)cf__run_action(r);
    return cf__tell_failure(r, error);
}

CHUNKFLOW_API cf_result cf_run_close(cf_runner *r, cf_run_stats *stats, cf_error *error) {
    cf_result result;
    if (r == NULL) return CF_OK;
    (void)cf__judge_end(r, cf__release_all(r));
    result = cf__tell_failure(r, error);
    if (stats != NULL) *stats = r->stats;
    cf__free_runner(r);
    return result;
}

CHUNKFLOW_API cf_result cf_run(const cf_plan *plan, const cf_schedule *schedule, int64_t stage, const cf_run_desc *desc,
                               cf_run_stats *stats, cf_error *error) {
    cf_runner *runner = NULL;
    cf_result result = cf_run_open(plan, schedule, stage, desc, &runner, error);
    if (result != CF_OK) return result;
    while (cf_run_peek(runner) != NULL) (void)cf_run_next(runner, NULL); /* the close says how it went */
    return cf_run_close(runner, stats, error);
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
    cf__print(w, "\"method\": \"%s\", \"split\": \"%s\",\n  ", cf_pack_method_name(plan->method),
              cf_split_method_name(plan->split));
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
        cf__print(
            &w,
            "%s\n    {\"id\": %lld, \"sequence\": %lld, \"first_chunk\": %lld, \"n_chunks\": %lld, \"tokens\": %lld}",
            i > 0 ? "," : "", (long long)i, (long long)g->sequence, (long long)g->first_chunk, (long long)g->n_chunks,
            (long long)g->tokens);
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
    cf__print_count(&w, "lowered", schedule->lowered);
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

/* ---- graphs ---- */

static void cf__write_node_dot(cf__writer *w, const cf_graph *graph, int64_t id) {
    static const char *const looks[] = {"fillcolor=\"#397af2\", fontcolor=white", "fillcolor=\"#a9c6fb\"",
                                        "fillcolor=\"#f2a154\"", "fillcolor=\"#44d3da\"", "fillcolor=\"#e0f0e7\""};
    const cf_node *node = &graph->nodes[id];
    cf__print(w, "    n%lld [label=\"%s %d", (long long)id, cf_pass_name((cf_pass)node->pass), (int)node->chunk);
    if (graph->n_virtual > 1) cf__print(w, " @ %d", (int)node->stage);
    cf__print(w, "\", tooltip=\"");
    cf__print_real(w, node->seconds);
    cf__print(w, " s\", %s];\n", looks[node->pass]);
}

static void cf__write_edge_dot(cf__writer *w, const cf_edge *edge) {
    static const char *const looks[CF_EDGE_COUNT] = {"style=solid",
                                                     "style=solid, color=\"#b05a00\"",
                                                     "style=dashed, constraint=false",
                                                     "style=dashed, constraint=false, color=\"#b05a00\"",
                                                     "style=solid, color=\"#5b8def\"",
                                                     "style=solid, color=gray",
                                                     "style=dotted, constraint=false, color=gray"};
    cf__print(w, "  n%d -> n%d [%s, tooltip=\"%s\"];\n", (int)edge->from, (int)edge->to, looks[edge->why],
              cf_edge_name((cf_edge_why)edge->why));
}

CHUNKFLOW_API cf_result cf_write_graph_dot(const cf_graph *graph, int64_t max_nodes, cf_write_fn write, void *user,
                                           cf_error *error) {
    cf__writer w;
    int64_t most = max_nodes == 0 ? 500 : max_nodes, stage, i;
    cf_result result = cf__check_graph_arrays(graph, error);
    if (result != CF_OK) return result;
    if (write == NULL) return cf__fail_null(error, "write");
    if (max_nodes < 0) return cf__fail(error, CF_ERROR_ARGUMENT, "max_nodes", -1, 0, max_nodes, "negative");
    if (graph->n_nodes > most)
        return cf__fail(error, CF_ERROR_LIMIT, "n_nodes", -1, most, graph->n_nodes,
                        "too many nodes to draw; raise max_nodes or draw fewer chunks");
    memset(&w, 0, sizeof w);
    w.write = write;
    w.user = user;
    cf__print(&w, "// solid: activation, gradient, replay, own; dashed: state, state gradient; dotted: slot\n");
    cf__print(&w, "digraph chunkflow {\n  rankdir=LR;\n  node [shape=box, style=filled];\n");
    for (stage = 0; stage < graph->n_stages && graph->n_nodes > 0; stage++) {
        cf__print(&w, "  subgraph cluster_s%lld {\n    label=\"stage %lld\";\n", (long long)stage, (long long)stage);
        for (i = 0; i < graph->n_nodes; i++)
            if (graph->nodes[i].stage % graph->n_stages == stage) cf__write_node_dot(&w, graph, i);
        cf__print(&w, "  }\n");
    }
    for (i = 0; i < graph->n_edges; i++) cf__write_edge_dot(&w, &graph->edges[i]);
    cf__print(&w, "}\n");
    return cf__finish_writing(&w, error);
}

/* ---- schedules as CSV ---- */

static int cf__is_extension(int64_t pass) {
    return pass == CF_R || pass == CF_SEND_R || pass == CF_RECV_R || pass == CF_OFFLOAD || pass == CF_PREFETCH;
}

/* Everything that can be refused, before the first character is written. */
static cf_result cf__check_csv_actions(const cf_plan *plan, const cf_schedule *s, const cf_csv_desc *desc,
                                       cf_error *error) {
    int64_t i, first = s->rank * plan->n_steps, n_stages = s->n_stages * s->n_virtual;
    for (i = 0; i < s->n_actions; i++) {
        const cf_action *a = &s->actions[i];
        if (a->chunk < first || a->chunk >= first + plan->n_steps)
            return cf__fail(error, CF_ERROR_SCHEDULE, "actions.chunk", i, first, a->chunk, "not a chunk of this rank");
        if (a->stage < 0 || a->stage >= n_stages)
            return cf__fail(error, CF_ERROR_SCHEDULE, "actions.stage", i, n_stages - 1, a->stage,
                            "no such virtual stage");
        if (a->pass >= CF_PASS_COUNT)
            return cf__fail(error, CF_ERROR_SCHEDULE, "actions.pass", i, CF_PASS_COUNT - 1, a->pass, "no such pass");
        if (a->pass >= CF_COMPUTE_PASS_COUNT && desc->format == CF_CSV_COMPUTE_ONLY) continue;
        if (cf__is_extension(a->pass) && !desc->extensions)
            return cf__fail(error, CF_ERROR_ARGUMENT, "extensions", i, 1, 0, "a pass that PyTorch's files do not have");
    }
    return CF_OK;
}

CHUNKFLOW_API cf_result cf_write_schedule_csv(const cf_plan *plan, const cf_schedule *schedule, const cf_csv_desc *desc,
                                              cf_write_fn write, void *user, cf_error *error) {
    cf__writer w;
    cf_csv_desc full;
    int64_t stage, i;
    int written;
    cf_result result;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (schedule == NULL) return cf__fail_null(error, "schedule");
    if (write == NULL) return cf__fail_null(error, "write");
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__check_schedule_counts(plan, schedule, error)) != CF_OK) return result;
    if ((result = cf__check_schedule_lists(schedule, error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)full.format, 0, CF_CSV_FORMAT_COUNT - 1, "format", error)) != CF_OK)
        return result;
    if (full.format == CF_CSV_COMPUTE_COMMS && !schedule->lowered && schedule->n_stages > 1)
        return cf__fail(error, CF_ERROR_ARGUMENT, "format", -1, CF_CSV_COMPUTE_ONLY, full.format,
                        "lower the schedule first");
    if ((result = cf__check_csv_actions(plan, schedule, &full, error)) != CF_OK) return result;
    memset(&w, 0, sizeof w);
    w.write = write;
    w.user = user;
    for (stage = 0; stage < schedule->n_stages && w.code == 0; stage++) {
        for (i = schedule->first[stage], written = 0; i < schedule->first[stage + 1] && w.code == 0; i++) {
            const cf_action *a = &schedule->actions[i];
            if (a->pass >= CF_COMPUTE_PASS_COUNT && full.format == CF_CSV_COMPUTE_ONLY) continue;
            cf__print(&w, "%s%d%s%lld", written ? "," : "", (int)a->stage, cf_pass_name((cf_pass)a->pass),
                      (long long)(a->chunk - schedule->rank * plan->n_steps));
            written = 1;
        }
        cf__print(&w, "\r\n");
    }
    return cf__finish_writing(&w, error);
}

/* The reader goes through the text twice: once to count, once to fill in the schedule. */
typedef struct cf__csv {
    const char *text;
    size_t bytes, at;         /* length; where the next cell begins */
    int more;                 /* 1: there is a next cell */
    cf_csv_desc desc;
    const cf_plan *plan;
    cf_error *error;
    int64_t line;             /* of the next cell, from 1 */
    size_t line_begin;
    int64_t row;              /* of the cell last read, from 0 */
    const char *cell;         /* that cell without the blanks around it */
    size_t cell_bytes;
    int64_t cell_line, cell_column;
    int64_t n_rows, n_actions, last_stage; /* counted */
    int has_transfers;
    int64_t empty_line, empty_column;      /* of the first empty cell; 0: there is none */
} cf__csv;

static cf_result cf__bad_text(const cf__csv *r, int64_t line, int64_t column, const char *why) {
    cf_error *error = r->error;
    char excerpt[25];
    size_t i;
    if (error == NULL) return CF_ERROR_TEXT;
    for (i = 0; i < r->cell_bytes && i + 1 < sizeof excerpt; i++)
        excerpt[i] = (char)(r->cell[i] >= ' ' && r->cell[i] <= '~' ? r->cell[i] : '?');
    excerpt[i] = 0;
    memset(error, 0, sizeof *error);
    error->code = CF_ERROR_TEXT;
    error->field = "csv";
    error->item = line;
    error->got = column;
    (void)snprintf(error->text, sizeof error->text, "csv line %lld, column %lld: %s: \"%s\"", (long long)line,
                   (long long)column, why, excerpt);
    return CF_ERROR_TEXT;
}

static cf_result cf__bad_cell(const cf__csv *r, const char *why) {
    return cf__bad_text(r, r->cell_line, r->cell_column, why);
}

static int cf__is_blank(char c) { return c == ' ' || c == '\t'; }

/* The next cell, in ->cell. Returns 0 at the end of the text. A line without any character has no cells, not an empty
   one; *none says so. */
static int cf__next_cell(cf__csv *r, int *none) {
    size_t begin = r->at, end = begin;
    if (!r->more) return 0;
    if (begin == r->line_begin) r->row++;
    while (end < r->bytes && r->text[end] != ',' && r->text[end] != '\n') end++;
    r->at = end < r->bytes ? end + 1 : end;
    r->more = end < r->bytes && (r->text[end] == ',' || r->at < r->bytes); /* there is a cell behind the last comma */
    r->cell_line = r->line;
    if (end < r->bytes && r->text[end] == '\n') {
        if (end > begin && r->text[end - 1] == '\r') end--;
        *none = end == r->line_begin;
        r->line++;
    } else {
        *none = 0;
    }
    while (begin < end && cf__is_blank(r->text[begin])) begin++;
    while (end > begin && cf__is_blank(r->text[end - 1])) end--;
    r->cell = r->text + begin;
    r->cell_bytes = end - begin;
    r->cell_column = (int64_t)(begin - r->line_begin) + 1;
    if (r->line != r->cell_line) r->line_begin = r->at;
    return 1;
}

/* A number without sign and leading zeros that fits in 31 bits. Returns its number of characters, 0: there is none. */
static size_t cf__read_number(const char *text, size_t bytes, int64_t *value) {
    size_t n = 0;
    int64_t sum = 0;
    while (n < bytes && text[n] >= '0' && text[n] <= '9') {
        sum = sum * 10 + (text[n++] - '0');
        if (sum > INT32_MAX) return 0;
    }
    *value = sum;
    return n > 1 && text[0] == '0' ? 0 : n;
}

static int cf__is_word(const char *text, size_t bytes, const char *word) {
    return strlen(word) == bytes && memcmp(text, word, bytes) == 0;
}

/* The pass of that name, as this file means it; CF_PASS_COUNT: there is none. */
static cf_pass cf__read_pass(const cf__csv *r, const char *text, size_t bytes) {
    int pass;
    if (r->desc.legacy && cf__is_word(text, bytes, "BW")) return CF_B;
    for (pass = 0; pass < CF_PASS_COUNT; pass++)
        if (cf__is_word(text, bytes, cf_pass_name((cf_pass)pass))) break;
    return r->desc.legacy && pass == CF_B ? CF_I : (cf_pass)pass;
}

/* The cell as an action; chunk counts within the rank. */
static cf_result cf__read_cell(const cf__csv *r, cf_action *action) {
    static const char *const foreign[] = {"UNSHARD", "RESHARD", "REDUCE_GRAD"};
    int64_t stage, chunk;
    size_t used = cf__read_number(r->cell, r->cell_bytes, &stage), word = used, i;
    cf_pass pass;
    if (used == 0) return cf__bad_cell(r, "an action starts with the number of its virtual stage");
    while (word < r->cell_bytes && ((r->cell[word] >= 'A' && r->cell[word] <= 'Z') || r->cell[word] == '_')) word++;
    pass = cf__read_pass(r, r->cell + used, word - used);
    for (i = 0; i < 3; i++)
        if (cf__is_word(r->cell + used, word - used, foreign[i]))
            return cf__bad_cell(r, "sharding is not scheduled here");
    if (pass == CF_PASS_COUNT && cf__is_word(r->cell + used, word - used, "BW"))
        return cf__bad_cell(r, "BW is of older files; read it with `legacy`");
    if (pass == CF_PASS_COUNT) return cf__bad_cell(r, "no such pass");
    used = cf__read_number(r->cell + word, r->cell_bytes - word, &chunk);
    if (used == 0 || word + used != r->cell_bytes)
        return cf__bad_cell(r, "an action ends with the number of its chunk");
    if (chunk >= r->plan->n_steps) return cf__bad_cell(r, "the rank has no such chunk");
    memset(action, 0, sizeof *action);
    action->chunk = (int32_t)chunk;
    action->stage = (int32_t)stage;
    action->pass = (uint8_t)pass;
    return CF_OK;
}

static void cf__rewind(cf__csv *r) {
    r->at = r->line_begin = 0;
    r->more = r->bytes > 0;
    r->line = 1;
    r->row = -1;
}

/* First time through: every cell must be an action, and the dialect must be one. */
static cf_result cf__count_cells(cf__csv *r) {
    int none;
    cf__rewind(r);
    while (cf__next_cell(r, &none)) {
        cf_action action;
        cf_result result;
        if (none) continue;
        if (r->cell_bytes == 0) {
            if (r->empty_line == 0) {
                r->empty_line = r->cell_line;
                r->empty_column = r->cell_column;
            }
            continue;
        }
        if ((result = cf__read_cell(r, &action)) != CF_OK) return result;
        if (action.pass >= CF_COMPUTE_PASS_COUNT && r->desc.format == CF_CSV_COMPUTE_ONLY)
            return cf__bad_cell(r, "a transfer in a file of passes only");
        if (r->n_actions == CF_MAX_ACTIONS)
            return cf__fail(r->error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, r->n_actions + 1, "too many");
        r->has_transfers |= action.pass >= CF_COMPUTE_PASS_COUNT;
        r->last_stage = cf__max(r->last_stage, action.stage);
        r->n_actions++;
    }
    r->n_rows = r->row + 1;
    r->cell_bytes = 0;
    if (r->n_rows == 0) return cf__bad_text(r, 1, 1, "no rows");
    if (r->empty_line > 0 && (r->has_transfers || r->desc.format == CF_CSV_COMPUTE_COMMS))
        return cf__bad_text(r, r->empty_line, r->empty_column, "an empty cell in a file with transfers");
    return CF_OK;
}

/* What follows from the counts. An action less than two per chunk and stage is refused here, before memory is asked
   for. */
static cf_result cf__csv_header(const cf__csv *r, cf_schedule *header) {
    int64_t needed = 0, n_stages = r->n_actions > 0 ? r->last_stage + 1 : r->n_rows;
    memset(header, 0, sizeof *header);
    header->kind = r->desc.kind;
    header->replay = r->desc.replay == CF_REPLAY_DEFAULT ? CF_REPLAY_PIPELINE : r->desc.replay;
    header->n_stages = r->n_rows;
    header->n_virtual = n_stages / r->n_rows;
    header->k = cf__max(1, r->desc.k);
    header->rank = r->desc.rank;
    header->n_chunks = r->plan->n_chunks;
    header->n_actions = r->n_actions;
    header->lowered = r->has_transfers || r->desc.format == CF_CSV_COMPUTE_COMMS;
    if (n_stages % r->n_rows != 0)
        return cf__fail(r->error, CF_ERROR_SCHEDULE, "n_virtual", -1, r->n_rows, n_stages,
                        "the virtual stages are no multiple of the rows");
    if (!cf__mul(2 * n_stages, r->plan->n_steps, &needed) || r->n_actions < needed)
        return cf__fail(r->error, CF_ERROR_SCHEDULE, "n_actions", -1, needed, r->n_actions,
                        "every chunk needs two passes on every virtual stage");
    return CF_OK;
}

/* Second time: the actions, with chunks as the plan numbers them. */
static cf_result cf__fill_from_csv(cf__csv *r, cf_schedule *schedule) {
    int64_t n = 0, row = 0;
    int none;
    cf__rewind(r);
    schedule->first[0] = 0;
    while (cf__next_cell(r, &none)) {
        cf_action *action = &schedule->actions[n];
        for (; row < r->row; row++) schedule->first[row + 1] = n;
        if (none || r->cell_bytes == 0) continue;
        (void)cf__read_cell(r, action); /* it could be read the first time */
        if (action->stage % r->n_rows != r->row)
            return cf__bad_cell(r, "this virtual stage lies on another row (v mod rows)");
        action->chunk += (int32_t)(schedule->rank * r->plan->n_steps);
        n++;
    }
    for (; row < r->n_rows; row++) schedule->first[row + 1] = n;
    return CF_OK;
}

/* R keeps, and so does F unless there is an R; then K, if it was left open. live: a zero per chunk and virtual
   stage. */
static void cf__find_keeps(const cf_plan *plan, cf_schedule *schedule, int32_t *live, int64_t given_k) {
    int64_t i, first = schedule->rank * plan->n_steps;
    for (i = 0; i < schedule->n_actions; i++) {
        cf_action *a = &schedule->actions[i];
        if (a->pass == CF_R) live[a->stage * plan->n_steps + a->chunk - first] = 1;
    }
    for (i = 0; i < schedule->n_actions; i++) {
        cf_action *a = &schedule->actions[i];
        if (a->pass == CF_R) a->keep = 1;
        if (a->pass == CF_F) a->keep = !live[a->stage * plan->n_steps + a->chunk - first];
    }
    if (given_k > 0) return;
    memset(live, 0, (size_t)(schedule->n_stages * schedule->n_virtual * plan->n_steps) * sizeof *live);
    for (i = 0; i < schedule->n_actions; i++) {
        const cf_action *a = &schedule->actions[i];
        int64_t index = plan->chunks[a->chunk].index, unit = a->chunk - first - index;
        int32_t *count;
        if (unit < 0 || unit >= plan->n_steps) continue; /* the plan is not sound, which the validator will say */
        count = &live[a->stage * plan->n_steps + unit];
        *count += a->keep - (a->pass == CF_B || a->pass == CF_W);
        schedule->k = cf__max(schedule->k, *count);
    }
}

static cf_result cf__csv_start(cf__csv *r, const char *text, size_t bytes, const cf_plan *plan, const cf_csv_desc *desc,
                               cf_error *error) {
    cf_result result;
    memset(r, 0, sizeof *r);
    if (text == NULL && bytes > 0) return cf__fail_null(error, "text");
    if (plan == NULL) return cf__fail_null(error, "plan");
    if (desc != NULL) r->desc = *desc;
    r->text = text != NULL ? text : "";
    r->bytes = bytes;
    r->plan = plan;
    r->error = error;
    if ((result = cf__check_plan_counts(plan, error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)r->desc.format, 0, CF_CSV_FORMAT_COUNT - 1, "format", error)) != CF_OK)
        return result;
    if ((result = cf__choice((int64_t)r->desc.kind, 0, CF_SCHEDULE_COUNT - 1, "kind", error)) != CF_OK) return result;
    if ((result = cf__choice((int64_t)r->desc.replay, 0, CF_REPLAY_COUNT - 1, "replay", error)) != CF_OK) return result;
    if ((result = cf__range(r->desc.k, 0, INT64_MAX, "k", error)) != CF_OK) return result;
    if ((result = cf__choice(r->desc.rank, 0, plan->n_ranks - 1, "rank", error)) != CF_OK) return result;
    return cf__count_cells(r);
}

/* The schedule and, behind it, the scratch of cf__find_keeps. */
static cf_schedule *cf__layout_csv(const cf__csv *r, cf_schedule *header, int32_t **live, cf__carver *carver) {
    cf_schedule *schedule = cf__layout_schedule(header, carver);
    *live = (int32_t *)cf__take(carver, header->n_stages * header->n_virtual * r->plan->n_steps, sizeof(int32_t));
    return schedule;
}

CHUNKFLOW_API cf_result cf_read_schedule_csv(const char *text, size_t bytes, const cf_plan *plan,
                                             const cf_csv_desc *desc, cf_schedule **out, cf_error *error) {
    cf__csv r;
    cf_schedule header, *schedule;
    cf_allocator allocator;
    cf__carver carver = {NULL, 0, 0};
    int32_t *live;
    cf_result result = cf__csv_start(&r, text, bytes, plan, desc, error);
    if (result != CF_OK) return result;
    if (out == NULL) return cf__fail_null(error, "out");
    if ((result = cf__allocator(r.desc.allocator, &allocator, error)) != CF_OK) return result;
    if ((result = cf__csv_header(&r, &header)) != CF_OK) return result;
    cf__layout_csv(&r, &header, &live, &carver);
    if (carver.overflow) return cf__too_large(error, "bytes");
    carver.base = (unsigned char *)allocator.alloc(carver.used, allocator.user);
    if (carver.base == NULL) return cf__fail_memory(error, carver.used);
    memset(carver.base, 0, carver.used);
    carver.used = 0;
    schedule = cf__layout_csv(&r, &header, &live, &carver);
    *schedule = header;
    schedule->allocator = allocator;
    result = cf__fill_from_csv(&r, schedule);
    if (result == CF_OK) {
        cf__find_keeps(plan, schedule, live, r.desc.k);
        result = cf_schedule_validate(plan, schedule, NULL, r.desc.allocator, error);
    }
    if (result == CF_OK) *out = schedule;
    else cf_schedule_free(schedule);
    return result;
}

#ifdef __cplusplus
}
#endif

#endif /* CHUNKFLOW_IMPLEMENTATION */
