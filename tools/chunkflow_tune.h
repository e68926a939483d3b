/* chunkflow_tune.h - decisions before training: pass costs, ChunkSize, K and schedule - MIT or public domain.

   What it is. A second library next to chunkflow.h, for the time before the first step. It estimates the seconds of
   every pass from a model and a GPU, or fits them to your measurements. It searches for the ChunkSize, K and schedule
   with the shortest iteration that fits into memory. A trainer with fixed settings does not need it.

   How to use it. In ONE C or C++ file, which may be the one that holds chunkflow.h's implementation or another:

       #define CHUNKFLOW_TUNE_IMPLEMENTATION
       #include "chunkflow_tune.h"

   and everywhere else just #include "chunkflow_tune.h". Define CHUNKFLOW_TUNE_STATIC instead to make all functions
   private to the file; this includes the implementation. Define CHUNKFLOW_TUNE_API yourself (for example as a DLL
   export) to override the linkage. It needs only libc and the public functions of chunkflow.h, which it includes unless
   you already have.

   The functions by task
       fit costs to measured passes     cf_cost_fit
       estimate them from numbers       cf_cost_estimate, cf_cp_costs, cf_column_cost, cf_model_find, cf_gpu_find
       bytes that a schedule needs      cf_schedule_memory
       limits for given bytes           cf_memory_limits
       choose ChunkSize and K           cf_tune, cf_tune_schedule, cf_tune_defaults, cf_tune_max_tries,
                                        cf_tune_confidence, cf_tuning_free, cf_tune_status_name

   What it does not do. It measures nothing, reads no files and prints nothing. It knows decoders (cf_model); for other
   models give cf_tune your own timing and bytes per token. Estimated seconds are good enough to choose between
   settings; once you have measured passes, fit costs to them. There is no global state. Objects, defaults, errors,
   allocators and checks work as in chunkflow.h, and the same input gives the same output bytes on every platform.

   Words are those of chunkflow.h. In addition, a candidate is one combination of settings that the search tries, and a
   split is a way to distribute the model over GPUs (cf_parallel).

   A complete program (C++ people write {} for {0})

       #define CHUNKFLOW_IMPLEMENTATION
       #include "chunkflow.h"
       #define CHUNKFLOW_TUNE_IMPLEMENTATION
       #include "chunkflow_tune.h"
       #include <stdio.h>
       int main(void) {
           int64_t lengths[1000], i;                      // tokens of each sequence of the data set, or of a sample
           cf_tune_desc desc = {0}; cf_tuning *tuning = NULL; cf_error error = {0};
           for (i = 0; i < 1000; i++) lengths[i] = i % 100 == 0 ? 120000 : 300 + 2 * i;
           desc.model = cf_model_find("qwen2.5-7b");
           desc.gpu = cf_gpu_find("h100-80g");
           desc.parallel.tp = 4; desc.parallel.pp = 4;    // 16 GPUs
           desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
           if (cf_tune(lengths, 1000, &desc, &tuning, &error) != CF_OK) printf("%s\n", error.text);
           else if (tuning->winner < 0) printf("nothing fits: %lld bytes would\n", (long long)tuning->smallest_limit);
           else {
               const cf_tune_candidate *best = &tuning->candidates[tuning->winner];
               printf("ChunkSize %d, K %d, %s: %.2f s an iteration\n", (int)best->chunk_size, (int)best->k,
                      cf_schedule_kind_name(best->kind), best->seconds);
           }
           cf_tuning_free(tuning);
           return (int)error.code;
       }

   Sections, each found by its tag: >>fit >>estimate >>tune, first declared, then implemented in the same order after
   >>helpers. */

#ifndef CHUNKFLOW_TUNE_H
#define CHUNKFLOW_TUNE_H

#ifndef CHUNKFLOW_H
#include "chunkflow.h"
#endif
#if CHUNKFLOW_VERSION_MAJOR != 0 || CHUNKFLOW_VERSION_MINOR != 1 || CHUNKFLOW_VERSION_PATCH != 0
#error "chunkflow_tune.h needs the chunkflow.h of its own version, 0.1.0"
#endif

#if defined(CHUNKFLOW_TUNE_STATIC) && !defined(CHUNKFLOW_TUNE_IMPLEMENTATION)
#define CHUNKFLOW_TUNE_IMPLEMENTATION
#endif

#ifndef CHUNKFLOW_TUNE_API
#if defined(CHUNKFLOW_TUNE_STATIC)
#if defined(__GNUC__) || defined(__clang__)
#define CHUNKFLOW_TUNE_API __attribute__((unused)) static
#else
#define CHUNKFLOW_TUNE_API static
#endif
#else
#define CHUNKFLOW_TUNE_API extern
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================================
   >>fit    measured passes -> costs
   ================================================================================================================ */

/* One measured pass. */
typedef struct cf_sample {
    int pass;       /* a cf_pass, CF_F .. CF_W */
    int64_t rows;   /* tokens of the chunk, padding included (cf_chunk.rows) */
    int64_t pairs;  /* attention pairs of the chunk */
    double seconds; /* more than 0 */
} cf_sample;

/* Errors of the fit of one pass on its samples. They are relative: predicted / measured - 1. */
typedef struct cf_fit {
    int64_t n_samples;    /* 0: the pass was not measured; its cost is all zero */
    double mean_error;    /* signed */
    double mean_absolute; /* mean of the errors' absolute values */
    double worst_error;   /* the error that is largest in absolute value, with its sign */
    int64_t worst_sample; /* index of the sample with worst_error; -1 if there are no samples */
} cf_fit;

/* Fits constant, per_token and per_pair of every measured pass to its samples: least squares of the relative errors,
   with no term below zero. All eight sets of terms are tried, so the result is the exact optimum, and depends only on
   the samples and their order. Samples of several passes may be mixed. A pass without samples stays all zero, and
   cf_timing derives its cost from the others.

   fits: 5 records, by pass; NULL is allowed. cost and fits are untouched on failure.

   Errors: CF_ERROR_ARGUMENT names the member and the sample at fault ("samples.seconds"). It names "samples" if a pass
   has fewer than three samples, with the pass in error->item and their number in error->got. It names "samples.rows" or
   "samples.pairs" if rows or pairs do not vary, or vary together, because the terms then cannot be distinguished.
   CF_ERROR_OVERFLOW if a sum exceeds the range of double. */
CHUNKFLOW_TUNE_API cf_result cf_cost_fit(const cf_sample *samples, int64_t n, cf_stage_cost *cost, cf_fit *fits,
                                         cf_error *error);

/* ================================================================================================================
   >>estimate    model and GPU -> costs
   ================================================================================================================ */

/* The rates of a GPU, for links per direction. Peaks are the maker's figures; fractions say how much of a peak good
   kernels reach. */
typedef struct cf_gpu {
    const char *name;
    double flops;              /* dense bf16 peak, FLOP/s */
    double gemm;               /* fraction of `flops` in large matrix products */
    double attention_forward;  /* fraction of `flops` in fused causal attention */
    double attention_backward;
    int64_t processors;        /* streaming multiprocessors */
    double bandwidth;          /* device memory, bytes/s */
    int64_t memory;            /* device memory, bytes */
    double nvlink;             /* to GPUs of the same node, bytes/s */
    double network;            /* to other nodes, bytes/s */
    double pcie;               /* to host memory, bytes/s */
    double link;               /* fraction of the three rates above that transfers reach */
    double launch;             /* seconds lost around each kernel: launch gap, ramp-up, tail. The table has 5
                                  microseconds, for fused kernels launched from C. If Python launches each norm, cast
                                  and copy separately, use 20 to 40 microseconds. A Grace takes 2.75 times as long as a
                                  Xeon (a linear layer: 37.1 and 13.5; TransformerEngine, issue 2053) */
    double latency;            /* seconds before the first byte of a collective or a send arrives */
} cf_gpu;

/* Finds a model by name ("qwen2.5-7b"; letter case does not matter). Returns static data, or NULL if the table
   cft__models in this file has no such name. The table lists all names; you may fill in a cf_model of your own. */
CHUNKFLOW_TUNE_API const cf_model *cf_model_find(const char *name);

/* Finds a GPU by name ("h100-80g"; letter case does not matter). Returns static data, or NULL if the table cft__gpus
   in this file has no such name. */
CHUNKFLOW_TUNE_API const cf_gpu *cf_gpu_find(const char *name);

/* Options of cf_cost_estimate. Zero means default in every member; model and gpu must be given. */
typedef struct cf_cost_desc {
    const cf_model *model;
    const cf_gpu *gpu;
    cf_parallel parallel;
    int64_t gpus_per_node;   /* 0: 8. Ranks are laid out tensor-parallel first, then data-parallel, then pipeline */
    int64_t chunk_size;      /* usual tokens of a chunk. With it, the cost of a pair includes what such a chunk adds: it
                                reads the carried state once and adds to its gradient once, and forward attention loses
                                half a wave of its blocks of 128 queries per head. 0: many tokens, without this */
    int stream;              /* 1: state is in host memory and passes stream it by layer
                                (cf_memory_desc.state_window) */
    int64_t max_cp;          /* maximum ranks that share a sequence (cf_pack_desc.max_cp). 0, 1: one */
    int unfused;             /* 1: norms, rotation and SwiGLU are separate operations (cf_memory_desc.unfused), as in
                                PyTorch without torch.compile */
    int outputs;             /* 1: replays take attention's outputs from their forwards. 2, or with `stream`: from host
                                memory (cf_memory_desc.outputs) */
    int offload;             /* parts in host memory (cf_memory_desc.offload) */
} cf_cost_desc;

/* Estimates of passes that do more than a plain forward or backward.

   Recomputation. B = I + W, and B also runs again, in each layer that recomputes:

       selective  attention forward
       layernorm  8 h / s bytes of element-wise traffic
       act        6 f bytes more
       mlp        also the products of the MLP and their transfers
       full       all of forward except the head

   Streams. K and V (two bytes an element) cross the GPU's link to the host in F and R. In B and I their gradients (four
   bytes) also cross it, in and out, as if both directions shared the link's rate. The stage with the most layers stands
   for all; one of its layers is exposed.

   Cp groups. Rows of K and V come from other ranks: over the network if tp x max_cp GPUs are more than one node has,
   otherwise over NVLink. In B and I the gradients of as many rows return; both directions of the link carry the same at
   once.

   A recurrent layer of a cp group runs each part from a zero state. Beside that it finds the effect of the part's rows
   on any state, and corrects the outputs by the state that a scan over the ranks gives (scan_forward). So a delta rule
   has as many more columns as keys, and every row one more product with the state. Each rank scans 1 / max_cp of the
   heads: one exchange brings it states and effects of these heads from all parts, and a second one returns the states
   before each part and after the round. A third exchange has the convolution's rows. With n ranks each sends (n - 1) /
   n of an effect and three states: 2 states for two ranks with a delta rule, and 3.75 for 16. A prefix scan in log2 n
   rounds would send 3 and 9 states, and a gather of all parts 2 and 30. Backward has as much again. No compute hides
   any of it. */

/* Estimates of passes that also move bytes other than state.

   Outputs. An R has no pairs, no rows of a window, and one kernel less in each layer that keeps outputs. Outputs in
   host memory cross the link out in F and in again in R. Only the F of a dropped chunk sends them, so R is charged with
   both.

   ZeRO. Levels 2 and 3 scatter gradients in each backward (4 bytes each), not once an iteration. Level 3, which is FSDP
   with resharding after forward, gathers its parameters in each F, R and I (2 bytes each). So it sends three times the
   parameters, the other levels two times (Rajbhandari et al., ZeRO, 2020, section 7). These transfers run beside the
   pass, a layer ahead (Zhao et al., PyTorch FSDP, 2023). Their exposed part is in a pass's constant term: the bytes of
   one layer, and those that a pass over chunk_size tokens without a prefix is too short to hide.

   Offload. Bytes cross the GPU's link to the host in the same way, beside the pass and beside the other link:
   checkpoints, 2 h / s per row and layer, out in F and in again in B and I; the rank's own parameters before they are
   gathered; gradients if ZeRO scatters them. An optimizer in host memory sends its parameters back in two bytes, and
   takes no other time: the host's processors are not modelled. step_seconds includes both directions. */

/* Estimates the seconds of every pass on every virtual stage, from FLOPs and rates.

       constant   kernels x launch, collectives x latency, and the traffic that is the same for any number of tokens
                  (weights, gradient accumulators). A matrix product whose rate grows with its rows m as m / (m + m0)
                  takes as long as m + m0 rows at full rate, so small chunks also lose here
       per_token  per row, padding included: 2 FLOPs per weight (backward 4), element-wise traffic, tensor-parallel
                  transfers (not overlapped), and the output head
       per_pair   4 x heads x head_dim FLOPs per layer; 10 instead of 4 in backward, which has five products instead of
                  two (Dao, FlashAttention-2, 2023)

   stages: (pp x n_virtual), count of them. timing: everything else that a schedule needs; timing->stages is `stages`.
   step_seconds (may be NULL): time of an iteration besides its passes, on the stage with the most parameters: the
   gradient exchange over dp and the optimizer's traffic. All three are untouched on failure.

   Errors: those of cf_model_validate and cf_parallel_validate; the member at fault, such as "outputs" with full
   recomputation; CF_ERROR_OVERFLOW ("gpu") if a time is not finite. */
CHUNKFLOW_TUNE_API cf_result cf_cost_estimate(const cf_cost_desc *desc, cf_stage_cost *stages, int64_t count,
                                              cf_timing *timing, double *step_seconds, cf_error *error);

/* Sets the costs with which cf_pack lays out cp groups. Each is a third of a forward and a backward together. `cost` is
   that of the first stage's passes, `cp_row_seconds` of the exposed part of a row's gathers, and `cp_chunk_seconds` of
   a chunk's scans. timing: from cf_cost_estimate. */
CHUNKFLOW_TUNE_API void cf_cp_costs(const cf_timing *timing, cf_pack_desc *pack);

/* Returns the cost with which cf_tune makes columns: the first stage's forward. Parts of a cp group cost about the
   same, but the last part has the most pairs, and all ranks wait for it. So with cp groups the cost is that of the
   pass, on any of `count` virtual stages, with the most seconds per pair relative to seconds per token. */
CHUNKFLOW_TUNE_API cf_pass_cost cf_column_cost(const cf_timing *timing, int64_t max_cp, int64_t count);

/* Finds the peak memory of a schedule: each stage's report at its heaviest pass, from cf_schedule_loads and
   cf_memory_estimate. In desc->parallel, pp, n_virtual and placement must be the schedule's; unfused_attention must be
   0.

   Borders are counted by the plan's chunk_size, not by desc's. reports: (pp), n_reports of them; untouched on failure.
   Working space comes from `allocator` (NULL: malloc). Errors: CF_ERROR_ARGUMENT with the member, CF_ERROR_MEMORY,
   those of cf_schedule_loads and cf_memory_estimate. */
CHUNKFLOW_TUNE_API cf_result cf_schedule_memory(const cf_memory_desc *desc, const cf_plan *plan,
                                                const cf_schedule *schedule, cf_memory_report *reports,
                                                int64_t n_reports, const cf_allocator *allocator, cf_error *error);

/* Computes limits for cf_schedule_desc under which a schedule of the plan fits into limit_bytes on every GPU. Sets
   per_token and bytes_by_stage of *limits; its other members stay as they are. cf_tune first makes a schedule without
   these limits and, if it does not fit, another one under them.

   A scheduler weighs a token equally on all stages, although its bytes differ between stages. So the limits are those
   of the tightest stage, in hundredths of a byte. They exclude the bytes that a stage always holds and the working
   memory of a pass. They always leave room for one chunk of any chain in addition to its state, even if that does not
   fit: check the schedule with cf_schedule_memory.

   shape: the schedule's, from cf_schedule_defaults. desc: as in cf_schedule_memory. by_stage: the caller's array
   (shape->n_stages), to which limits->bytes_by_stage will point. Working space comes from `allocator` (NULL: malloc).
   Errors: those of cf_schedule_memory; CF_ERROR_ARGUMENT with the member that is not positive; CF_ERROR_OVERFLOW if
   bytes do not fit in 64 bits. */
CHUNKFLOW_TUNE_API cf_result cf_memory_limits(const cf_memory_desc *desc, const cf_plan *plan, const cf_shape *shape,
                                              int64_t limit_bytes, int64_t *by_stage, cf_limits *limits,
                                              const cf_allocator *allocator, cf_error *error);

/* ================================================================================================================
   >>tune    lengths, costs and bytes -> ChunkSize, K and schedule
   ================================================================================================================ */

#define CF_MAX_CANDIDATES ((int64_t)1 << 20)
#define CF_MAX_TUNE_BATCHES 4096
#define CF_TUNE_WINDOW (CF_STATE_SLOTS * 4096) /* state_window of a candidate that streams, unless one is given */
#define CF_MAX_STAGE_BYTES ((int64_t)1 << 48) /* any member of cf_stage_bytes */
#define CF_TUNE_RESERVE 9   /* percent of a GPU's memory to keep free */
#define CF_TUNE_ALIKE 0.05  /* memory that differs by at most this fraction of the limit counts as equal */

/* Status of a candidate. */
#define CF_TUNE_STATUSES(X)                                                                                       \
    X(CF_TUNE_UNTRIED, "untried")       /* the search was interrupted before it tried the candidate */            \
    X(CF_TUNE_OK, "ok")                 /* simulated on every batch; its time is exact for these */               \
    X(CF_TUNE_DOMINATED, "dominated")   /* cannot be among the best: `why` gives the reason, `bound` how fast */  \
                                        /* it might be */                                                         \
    X(CF_TUNE_INFEASIBLE, "infeasible") /* does not fit into the limit; `bytes` is what it would need */

typedef enum cf_tune_status {
#define CF_TUNE_ITEM(name, text) name,
    CF_TUNE_STATUSES(CF_TUNE_ITEM)
#undef CF_TUNE_ITEM
    CF_TUNE_STATUS_COUNT
} cf_tune_status;

/* Returns the string in the row of `status`, or "?" for any other value. */
CHUNKFLOW_TUNE_API const char *cf_tune_status_name(cf_tune_status status);

/* Bytes of a virtual stage on one GPU, for a model that cf_model cannot describe: measured, or counted from your
   code. */
typedef struct cf_stage_bytes {
    cf_held_bytes held;    /* per held token: kept activations (above 0), state, state gradient and, for local replay,
                              the saved input of a dropped chunk */
    int64_t per_token_pass; /* per token of the chunk in a pass, in addition to `held`: logits, gradients of
                               activations, buffers. A stage counts its largest virtual stage */
    int64_t fixed;         /* always: parameters, gradients, optimizer states, the runtime */
} cf_stage_bytes;

/* One combination of settings. Times are seconds of a whole iteration, averaged over the batches: the slowest rank's
   makespan, the gradient exchange and the optimizer. Ranks in lockstep have one makespan: each pass takes as long as on
   its slowest rank. */
typedef struct cf_tune_candidate {
    int64_t split;          /* index into tuning->splits */
    int64_t chunk_size;
    int64_t k;
    cf_schedule_kind kind;
    cf_replay replay;
    int outputs;            /* 0: dropped chunks keep no attention outputs, or no chunk is dropped. 1, 2: they keep them
                               (cf_memory_desc.outputs), on the GPU if they fit there on every batch, otherwise in host
                               memory. With 1, a stream also puts them into host memory */
    cf_recompute recompute; /* recompute and recompute_layers replace the split's */
    int64_t recompute_layers;
    int64_t state_window;   /* rows of the ring through which state streams from host memory (cf_memory_desc); 0: no
                               stream. memory.host: bytes there */
    int64_t max_cp;         /* maximum ranks that share a sequence, set by its split. 0: one */
    int offload;            /* parts in host memory (cf_memory_desc.offload): those of desc.memory and, for the last
                               recomputation that is tried, the checkpoints of full recomputation */
    int in_step;            /* 1: all ranks run the same passes at the same time (cf_pack_desc.lockstep, or max_cp) */
    cf_tune_status status;
    const char *why;        /* a static string; "" for CF_TUNE_OK and CF_TUNE_UNTRIED */
    int64_t same_as;        /* CF_TUNE_DOMINATED: index of a candidate that is at least as good; -1: none. It has the
                               same schedules. If this candidate streams or recomputes, it may instead be one that fits
                               with less of that */
    int replays;            /* 1: some tried batch has a replay */
    int limited;            /* 1: some batch fits only with schedules made under the limit, which may cost time */
    double seconds;         /* this and the next five members: only for CF_TUNE_OK, otherwise 0 */
    double confidence;      /* half of the 95 % confidence interval of the mean (Student's t); 0 with one batch */
    double behind;          /* mean difference from the fastest, batch by batch */
    double behind_confidence;
    double bubble;          /* mean bubble_useful of the slowest rank */
    double waiting;         /* mean fraction of all stages' time in which passes wait for streamed state, or for what
                               cp groups gather and scan */
    double bound;           /* lower bound of `seconds` for every schedule that fits, with this ChunkSize, K and replay,
                               on these batches; 0: not known */
    double estimate;        /* CF_TUNE_DOMINATED: approximate seconds, from the simulated batches and the bounds of the
                               others; 0: no batch was simulated */
    double chunks;          /* mean number of chunks of a rank */
    int64_t bytes;          /* CF_TUNE_OK: peak bytes of any GPU; CF_TUNE_INFEASIBLE: bytes that it would need */
    int64_t stage;          /* stage of the GPU with `bytes` */
    cf_memory_report memory; /* CF_TUNE_OK, CF_TUNE_INFEASIBLE: `bytes` by purpose. Without a model, fixed bytes count
                                as `runtime` and those of the chunk in a pass as `working` */
    int64_t peak_batch;     /* CF_TUNE_OK: the batch of the peak; n_batches: the batch for memory only */
    int64_t peak_rank;
    cf_action peak_action;  /* the pass that runs at the peak */
    double peak_seconds;    /* start of that pass */
} cf_tune_candidate;

/* Reported after each simulated or skipped batch of a candidate. */
typedef struct cf_tune_progress {
    int64_t done;                   /* work, counted and not timed, since the same worker's last report. The sum over
                                       all reports is the work of the whole search */
    int64_t left;                   /* amount of work that is now expected to be left. 0 at the end */
    const cf_tune_candidate *best;  /* the fastest so far; NULL: none yet */
} cf_tune_progress;

/* One piece of work; the pieces are independent of each other. */
typedef void (*cf_tune_task)(void *context, int64_t index);

/* Options of cf_tune. Zero means default in every member. One of these is required: a model with a gpu; a model with
   timing and a limit; or, for a model that cf_model cannot describe, timing, bytes and a limit. chunk_sizes and ks must
   rise. */
typedef struct cf_tune_desc {
    const cf_model *model;
    const cf_gpu *gpu;
    cf_parallel parallel;           /* the split. With n_gpus, a tp, pp or dp of 0 is searched for. An ep of 0 then
                                       tries 1, the maximum within a node and the maximum over all GPUs. A zero of 0
                                       then tries ZeRO 1 and, without a pipeline, 2 and 3; -1 is ZeRO 0.

                                       If recompute is 0 and costs are estimated (gpu, no timing), these levels are
                                       tried: nothing, act, mlp in half of the layers, mlp, full, and full with its
                                       checkpoints in host memory. Each is tried only if the previous one does not fit,
                                       or fits only under the limit */
    int64_t n_gpus;                 /* number of GPUs: tries every tp x pp x dp that the model allows, with tp within a
                                       node. Each rank needs a sequence of each batch, or its part of one (pack.max_cp).
                                       0: the split is `parallel` */
    int64_t gpus_per_node;          /* 0: 8 */
    const cf_timing *timing;        /* measured costs of the stages, instead of estimates; only without n_gpus */
    double step_seconds;            /* extra seconds of an iteration. Needs timing: an estimate has its own */
    cf_memory_desc memory;          /* options for counting a model's memory. Its model, parallel, chunk_size and
                                       gathered are ignored; unfused_attention must be 0 */
    const cf_stage_bytes *bytes;    /* (pp x n_virtual) by virtual stage, instead of model and memory; only without
                                       n_gpus. Of `parallel`, only pp, n_virtual, placement and dp are then used */
    int64_t limit_bytes;            /* limit of each GPU. 0: gpu->memory minus the reserve */
    int64_t reserve;                /* percent of gpu->memory to keep free, because formulas tend to count too little (5
                                       to 9 % in the paper's memory table). 0: CF_TUNE_RESERVE; negative: none. Ignored
                                       with limit_bytes */
    int64_t context;                /* tokens of the longest sequence that must fit in memory, even if the list has none
                                       that long; times are still the list's. 0: the longest of the list */
    cf_pack_desc pack;              /* options of packing; chunk_size and n_ranks are not used.

                                       shared_prefixes: those of the whole list. A tree is drawn as a whole; if a batch
                                       is full before the tree ends, the next batch begins with its rest.

                                       max_cp: maximum width of cp groups. Groups of 2, 4, 8 ... ranks that divide dp
                                       are tried as well as none, all in lockstep. Time and memory are then those of
                                       columns (>>lockstep), with whole backwards, and with `paper` schedules on one
                                       stage; `cost` and `cp_row_seconds` are the estimate's. Needs a model and a gpu,
                                       without timing, shared prefixes, virtual stages and split_backward.

                                       lockstep: all ranks run in lockstep. With a model they do so anyway in splits
                                       whose passes all have collectives: ZeRO 3, or experts over GPUs. Such splits are
                                       not tried with shared prefixes, which ranks in lockstep cannot have. Memory is
                                       then that of the columns, slightly more than that of any rank */
    const int64_t *chunk_sizes;     /* (n_chunk_sizes) NULL: 1K, 2K ... 128K and the longest sequence (rounded up to a
                                       multiple of pack.align), the smallest size that splits nothing. Without n_exact,
                                       intermediate sizes are also tried, for the best split only (n_even) */
    int64_t n_chunk_sizes;          /* this count, like the three below, needs its list */
    const int64_t *ks;              /* (n_ks) NULL: 1, 2, 4 ... 32 */
    int64_t n_ks;
    const cf_schedule_kind *kinds;  /* (n_kinds) NULL: paper, 1f1b, best; with virtual stages interleaved, best */
    int64_t n_kinds;
    const cf_replay *replays;       /* (n_replays) NULL: local. Pipeline is allowed only if `kinds` is paper alone */
    int64_t n_replays;
    int no_stream;                  /* 0: candidates that stream state from host memory are also tried, if state on the
                                       GPU does not fit, or fits only with a schedule made again under a limit
                                       (cf_tuning: limited). Needs a model with estimated costs; with timing or bytes
                                       nothing streams. 1: never. Must be 0 with memory.state_window, with which all
                                       stream */
    int no_outputs;                 /* 0: dropped chunks keep attention's outputs if the model's attention allows it,
                                       except with full recomputation. Needs a model with estimated costs. 1: they keep
                                       none. Must be 0 with memory.outputs, which says where they are kept */
    int split_backward;             /* as in cf_schedule_desc, for best, which must be among the kinds */
    int64_t max_tries;              /* tries of best per schedule. 0: cf_tune_max_tries of its plan */
    int64_t batch;                  /* sequences in a batch. 0: 256 */
    int64_t n_batches;              /* batches to simulate. 0: 16 */
    uint64_t seed;                  /* seed of the draw of batches */
    int64_t n_exact;                /* number of fastest candidates to prove: others are given up only if a bound of
                                       their time is worse. CF_MAX_CANDIDATES: simulates all except those with the
                                       schedules of another.

                                       0: a race, which proves only the fastest one. Candidates that are proved to be
                                       slower are also given up if their first batches are too slow for the tolerance */
    double tolerance;               /* fraction by which the winner may be slower than the fastest, if it needs less
                                       memory or is simpler. 0: 0.01; negative: none */
    int (*progress)(void *user, const cf_tune_progress *progress); /* non-zero ends the search early */
    /* Calls task(context, i) for every i of 0 .. n - 1, concurrently if it likes, and returns when all are done. The
       allocator and `progress` may then be called concurrently as well. The answer is the same. NULL: one after
       another */
    void (*run_tasks)(void *user, int64_t n, cf_tune_task task, void *context);
    void *user;
    const cf_allocator *allocator;  /* for the result and the working space */
} cf_tune_desc;

/* The result of a search, in one block like a plan. */
typedef struct cf_tuning {
    int64_t n_splits, n_candidates, n_batches;
    int64_t n_even;                 /* number of candidates at the end of the list with even chunk sizes, which divide a
                                       mean batch evenly, all of one split. All others are sorted as described below */
    cf_parallel *splits;            /* (n_splits) */
    int64_t *max_cps;               /* (n_splits) maximum ranks that share a sequence; 0: one */
    cf_tune_candidate *candidates;  /* (n_candidates) sorted by split, chunk_size, k, kind, replay, recompute and,
                                       last, state_window */
    double *seconds;                /* (n_candidates x n_batches) seconds of each batch; -1: not simulated */
    int64_t *batch_tokens;          /* (n_batches) */
    int64_t batch;                  /* sequences in a batch */
    int64_t *batches;               /* (n_batches + 1) x batch: lengths of the sequences; the last batch is only for
                                       memory */
    cf_shared_prefix *shared_prefixes; /* (n_batches + 1) x batch: the prefix that each sequence shares with another of
                                          its batch; NULL: none */
    int64_t winner;                 /* index of the best candidate; -1: none fits, or the search was interrupted before
                                       any was exact */
    int64_t n_ranked;
    int64_t *ranking;               /* (n_ranked) the exact candidates (CF_TUNE_OK), fastest first */
    int64_t limit_bytes;
    int64_t smallest_limit;         /* if no candidate fits: the least of their `bytes`, below which none can fit.
                                       Otherwise 0 */
    int64_t n_simulated;            /* schedules that were made and timed */
    int interrupted;                /* 1: progress asked to stop */
    cf_allocator allocator;         /* private: frees the block */
} cf_tuning;

/* Searches for the best candidate. Draws n_batches batches of the lengths, the same for every candidate. The list is
   shuffled and read through, as often as needed. Candidates whose schedules fit the limit are timed on every batch. One
   extra batch is only for memory. It is the first batch, with its longest sequence replaced by the longest of the list
   or, if that is longer, by one of `context` tokens.

   A candidate's schedules are made without a limit and, if they do not fit, again under one (cf_memory_limits). Its
   memory is that really held, on every stage at every pass. A CF_TUNE_OK is exact for these batches. Any other
   candidate has a reason why it was given up:

   - a lower bound of its time (the load of a stage plus the time of the batches already simulated);
   - in a race, a lower bound above the best time, and first batches slower than the best's by more than the tolerance
     and twice the variation of batches (even chunk sizes need no such bound);
   - the same schedules as another candidate.

   The winner is not simply the fastest, whose lead may be accidental:
   - A candidate is close to the fastest if it is slower by at most the tolerance.
   - Of the close ones, those count whose memory exceeds that of the smallest of them by at most CF_TUNE_ALIKE of the
     limit.
   - The winner is the simplest of these: without a stream, with less recomputation, with local replay, without outputs,
     of a fixed kind, of the smallest K, and only then the fastest.

   No other candidate is both faster than the winner and smaller.

   Free *out with cf_tuning_free. It is no failure if nothing fits: winner is then -1. Errors: CF_ERROR_ARGUMENT and
   CF_ERROR_LIMIT with the member; those of cf_pack, cf_cost_estimate, cf_memory_estimate and cf_schedule_make;
   CF_ERROR_MEMORY. */
CHUNKFLOW_TUNE_API cf_result cf_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, cf_tuning **out,
                                     cf_error *error);

/* Makes a candidate's schedule for one rank of a plan, so that a trainer can use the search's choice for every batch;
   the plan need not be one of the search's batches. As in cf_tune, the schedule is made without a limit and, if it does
   not fit, under one.

   desc: as given to cf_tune. tuning: its result. plan: packed with the candidate's chunk_size and max_cp, for the dp of
   its split, with lockstep if the candidate runs in lockstep. Free *out with cf_schedule_free; it is untouched on
   failure.

   Errors: CF_ERROR_ARGUMENT with the argument or member that does not match; CF_ERROR_INFEASIBLE if no schedule of this
   plan keeps the limit, with the bytes that one needs in error->wanted; those of cf_tune. */
CHUNKFLOW_TUNE_API cf_result cf_tune_schedule(const cf_tune_desc *desc, const cf_tuning *tuning, int64_t candidate,
                                              const cf_plan *plan, int64_t rank, cf_schedule **out, cf_error *error);

/* Returns a copy of desc with defaults filled in. These stay unchanged: limit_bytes, context, max_tries, n_exact, and
   the parts of `parallel` that are searched for. chunk_sizes lack the longest sequence. */
CHUNKFLOW_TUNE_API cf_tune_desc cf_tune_defaults(const cf_tune_desc *desc);

/* Returns how many schedules `best` tries for a plan by default: 8 to 64, which together have about 20,000 passes and
   take milliseconds. For a plan of more than 2,500 passes it still tries 8, because fewer find too little, and takes
   correspondingly longer. Returns 0 without a plan, or if n_stages or n_virtual is below 1. Reads only chunks_per_rank
   of the plan. */
CHUNKFLOW_TUNE_API int64_t cf_tune_max_tries(const cf_plan *plan, int64_t n_stages, int64_t n_virtual);

/* Returns half of the 95 % confidence interval (Student's t) of the mean of n numbers, assumed to be normal; 0 for
   fewer than two. minus (may be NULL): subtracted from `sample`, number by number. */
CHUNKFLOW_TUNE_API double cf_tune_confidence(const double *sample, const double *minus, int64_t n);

/* Frees a tuning made by cf_tune. NULL is allowed. */
CHUNKFLOW_TUNE_API void cf_tuning_free(cf_tuning *tuning);

#ifdef __cplusplus
}
#endif

#endif /* CHUNKFLOW_TUNE_H */

/* ================================================================================================================
   The implementation
   ================================================================================================================ */

#if defined(CHUNKFLOW_TUNE_IMPLEMENTATION) && !defined(CHUNKFLOW_TUNE_IMPLEMENTED)
#define CHUNKFLOW_TUNE_IMPLEMENTED

#include <float.h>

/* Requires the same arithmetic as chunkflow.h's implementation, for the reasons given there. */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "chunkflow_tune.h needs IEEE 754 arithmetic: compile its implementation in a file of its own, without -Ofast"
#endif
#if defined(FLT_EVAL_METHOD) && (FLT_EVAL_METHOD == 2 || FLT_EVAL_METHOD < 0)
#error "chunkflow_tune.h needs doubles computed as doubles: compile its implementation with -msse2 -mfpmath=sse"
#endif
typedef char cft__constants_are_doubles[sizeof 0.1 == sizeof(double) ? 1 : -1]; /* no -fsingle-precision-constant */
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wignored-pragmas"
#pragma float_control(push)
#pragma float_control(precise, on)
#endif

#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================================
   >>helpers    failing, arithmetic, memory
   ================================================================================================================ */

/* Returns the result of `call` from the enclosing function, unless it is CF_OK. */
#define CFT__TRY(call)                                \
    do {                                              \
        cf_result cft__result = (call);               \
        if (cft__result != CF_OK) return cft__result; \
    } while (0)

#define CFT__COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

static cf_result cft__fail_size(cf_error *error, const char *field) {
    return cf_refuse(error, CF_ERROR_OVERFLOW, field, -1, "does not fit in 64 bits");
}

static int cft__is_time(double x) { return x >= 0 && x <= DBL_MAX; } /* also false for NaN */

static cf_result cft__check_time(double x, const char *field, cf_error *error) {
    if (cft__is_time(x)) return CF_OK;
    return cf_fail_real(error, CF_ERROR_ARGUMENT, field, -1, x, "must be finite and not negative");
}

/* Refuses a model or GPU that is NULL, which a search for an unknown name returns. */
static cf_result cft__check_found(const void *found, const char *field, cf_error *error) {
    if (found != NULL) return CF_OK;
    return cf_refuse(error, CF_ERROR_ARGUMENT, field, -1,
                     "is NULL, as cf_model_find and cf_gpu_find return for a name that they do not know");
}

/* Checks that a number is in a range. past: the code for a value above it. */
static cf_result cft__range(int64_t value, int64_t least, int64_t most, cf_result past, const char *field,
                            int64_t item, cf_error *error) {
    if (value < least) return cf_fail(error, CF_ERROR_ARGUMENT, field, item, least, value, "is too small");
    if (value > most) return cf_fail(error, past, field, item, most, value, "is too large");
    return CF_OK;
}

static int64_t cft__min(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t cft__max(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t cft__div_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/* Adds a x b to *sum; none of the three is negative. If the sum does not fit, *sum becomes INT64_MAX, and stays
   INT64_MAX. */
static void cft__add_product(int64_t *sum, int64_t a, int64_t b) {
    int fits = b == 0 || a <= (INT64_MAX - *sum) / b;
    *sum = fits ? *sum + a * b : INT64_MAX;
}

/* Returns a x b, rounded. Without `volatile` a compiler may fuse the product with a following addition, and results
   would differ between machines with and without that instruction. */
static double cft__product(double a, double b) {
    volatile double product = a * b;
    return product;
}

/* Divides one block into arrays. With base == NULL it only adds up sizes, so that one function both measures and lays
   out. overflow stays set once a size does not fit. */
typedef struct cft__carver {
    unsigned char *base;
    size_t used;
    int overflow;
} cft__carver;

static void *cft__take(cft__carver *carver, int64_t count, size_t item_bytes) {
    size_t start = carver->used;
    if (count < 0 || (uint64_t)count > (SIZE_MAX / 2 - start) / item_bytes) {
        carver->overflow = 1;
        return NULL;
    }
    carver->used += ((size_t)count * item_bytes + CF_MEMORY_ALIGNMENT - 1) / CF_MEMORY_ALIGNMENT * CF_MEMORY_ALIGNMENT;
    return carver->base != NULL ? carver->base + start : NULL;
}

/* ================================================================================================================
   >>fit

   Every sample is divided by its seconds, so that the target of each row is 1 and squares are of relative errors. Each
   column is scaled to at most 1. Every set of terms that may be above zero is tried; with three columns there are only
   eight.
   ================================================================================================================
   */

#define CFT__TERMS 3               /* constant, rows, pairs */
/* minimum fraction of a column's square that earlier columns must leave unexplained */
#define CFT__INDEPENDENT 1e-10

typedef struct cft__normal {
    double scale[CFT__TERMS];
    double gram[CFT__TERMS][CFT__TERMS + 1]; /* products of columns; in the last column, products with ones */
} cft__normal;

static void cft__sample_row(const cf_sample *sample, const double *scale, double *row) {
    row[0] = 1 / sample->seconds / scale[0];
    row[1] = (double)sample->rows / sample->seconds / scale[1];
    row[2] = (double)sample->pairs / sample->seconds / scale[2];
    row[3] = 1;
}

/* Adds up the samples of one pass. Returns 0 if a number is not finite. */
static int cft__normal_sums(const cf_sample *samples, int64_t n, int pass, cft__normal *normal) {
    static const double unscaled[CFT__TERMS] = {1, 1, 1};
    double row[CFT__TERMS + 1];
    int64_t s;
    int i, j;
    memset(normal, 0, sizeof *normal);
    for (s = 0; s < n; s++) {
        if (samples[s].pass != pass) continue;
        cft__sample_row(&samples[s], unscaled, row);
        for (i = 0; i < CFT__TERMS; i++) {
            if (!cft__is_time(row[i])) return 0;
            if (row[i] > normal->scale[i]) normal->scale[i] = row[i];
        }
    }
    for (i = 0; i < CFT__TERMS; i++)
        if (normal->scale[i] < DBL_MIN) normal->scale[i] = 1; /* a column of zeros, found by its pivot */
    for (s = 0; s < n; s++) {
        if (samples[s].pass != pass) continue;
        cft__sample_row(&samples[s], normal->scale, row);
        for (i = 0; i < CFT__TERMS; i++)
            for (j = 0; j <= CFT__TERMS; j++) normal->gram[i][j] += cft__product(row[i], row[j]);
    }
    return 1;
}

/* Solves for the terms in `set` (bits); the others are 0. Returns CFT__TERMS, or the first term of the set that depends
   on earlier ones. Elimination needs no pivoting, because the matrix is symmetric and positive semidefinite. */
static int cft__solve_terms(const cft__normal *normal, int set, double *x) {
    double a[CFT__TERMS][CFT__TERMS + 1];
    int i, j, k;
    memcpy(a, normal->gram, sizeof a);
    x[0] = x[1] = x[2] = 0;
    for (i = 0; i < CFT__TERMS; i++) {
        if (!(set >> i & 1)) continue;
        if (!(a[i][i] > cft__product(CFT__INDEPENDENT, normal->gram[i][i]))) return i;
        for (k = i + 1; k < CFT__TERMS; k++) {
            double factor = a[k][i] / a[i][i];
            for (j = i; j <= CFT__TERMS; j++) a[k][j] -= cft__product(factor, a[i][j]);
        }
    }
    for (i = CFT__TERMS - 1; i >= 0; i--) {
        double rest = a[i][CFT__TERMS];
        if (!(set >> i & 1)) continue;
        for (j = i + 1; j < CFT__TERMS; j++) rest -= cft__product(a[i][j], x[j]);
        x[i] = rest / a[i][i];
    }
    return CFT__TERMS;
}

/* Fills in *fit, the errors of a cost on the samples of one pass. Returns the sum of the squares of the relative
   errors. */
static double cft__measure_fit(const cf_sample *samples, int64_t n, int pass, const cf_pass_cost *cost, cf_fit *fit) {
    int64_t s;
    double squares = 0, worst = 0;
    memset(fit, 0, sizeof *fit);
    fit->worst_sample = -1;
    for (s = 0; s < n; s++) {
        double error, absolute;
        if (samples[s].pass != pass) continue;
        error = cf_cost_seconds(cost, samples[s].rows, samples[s].pairs) / samples[s].seconds - 1;
        absolute = error < 0 ? -error : error;
        squares += cft__product(error, error);
        fit->n_samples++;
        fit->mean_error += error;
        fit->mean_absolute += absolute;
        if (fit->worst_sample >= 0 && !(absolute > worst)) continue;
        worst = absolute;
        fit->worst_error = error;
        fit->worst_sample = s;
    }
    if (fit->n_samples == 0) return 0;
    fit->mean_error /= (double)fit->n_samples;
    fit->mean_absolute /= (double)fit->n_samples;
    return squares;
}

/* Finds the best terms of one pass that has enough samples. */
static cf_result cft__fit_pass(const cf_sample *samples, int64_t n, int pass, cf_pass_cost *best, cf_error *error) {
    static const char *const fields[CFT__TERMS] = {"samples", "samples.rows", "samples.pairs"};
    cft__normal normal;
    double least = DBL_MAX, x[CFT__TERMS];
    int set, dependent;
    if (!cft__normal_sums(samples, n, pass, &normal))
        return cf_refuse(error, CF_ERROR_OVERFLOW, "samples.seconds", pass,
                         "is too small beside the rows and pairs of this pass");
    dependent = cft__solve_terms(&normal, 7, x);
    if (dependent < CFT__TERMS)
        return cf_refuse(error, CF_ERROR_ARGUMENT, fields[dependent], pass,
                         "must vary among the samples of this pass, and not only as the other terms do");
    for (set = 1; set < 1 << CFT__TERMS; set++) {
        cf_pass_cost cost;
        cf_fit unused;
        double squares;
        (void)cft__solve_terms(&normal, set, x);
        if (!(x[0] >= 0 && x[1] >= 0 && x[2] >= 0)) continue;
        cost.constant = x[0] / normal.scale[0];
        cost.per_token = x[1] / normal.scale[1];
        cost.per_pair = x[2] / normal.scale[2];
        squares = cft__measure_fit(samples, n, pass, &cost, &unused);
        if (!(squares < least)) continue;
        least = squares;
        *best = cost;
    }
    return CF_OK;
}

static cf_result cft__check_samples(const cf_sample *samples, int64_t n, int64_t *counts, cf_error *error) {
    int64_t s;
    int pass;
    if (samples == NULL && n != 0) return cf_fail_null(error, "samples");
    if (n < CFT__TERMS) return cf_fail(error, CF_ERROR_ARGUMENT, "n", -1, CFT__TERMS, n, "too few samples");
    for (s = 0; s < n; s++) {
        const cf_sample *sample = &samples[s];
        CFT__TRY(cft__range(sample->pass, 0, CF_COMPUTE_PASS_COUNT - 1, CF_ERROR_ARGUMENT, "samples.pass", s, error));
        CFT__TRY(cft__range(sample->rows, 0, INT64_MAX, CF_ERROR_LIMIT, "samples.rows", s, error));
        CFT__TRY(cft__range(sample->pairs, 0, INT64_MAX, CF_ERROR_LIMIT, "samples.pairs", s, error));
        if (!(sample->seconds > 0 && sample->seconds <= DBL_MAX))
            return cf_fail_real(error, CF_ERROR_ARGUMENT, "samples.seconds", s, sample->seconds,
                                "must be finite and more than 0");
        counts[sample->pass]++;
    }
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (counts[pass] > 0 && counts[pass] < CFT__TERMS)
            return cf_fail(error, CF_ERROR_ARGUMENT, "samples", pass, CFT__TERMS, counts[pass],
                           "there are too few samples of this pass");
    return CF_OK;
}

CHUNKFLOW_TUNE_API cf_result cf_cost_fit(const cf_sample *samples, int64_t n, cf_stage_cost *cost, cf_fit *fits,
                                         cf_error *error) {
    cf_pass_cost found[CF_COMPUTE_PASS_COUNT];
    int64_t counts[CF_COMPUTE_PASS_COUNT] = {0, 0, 0, 0, 0};
    int pass;
    if (cost == NULL) return cf_fail_null(error, "cost");
    CFT__TRY(cft__check_samples(samples, n, counts, error));
    memset(found, 0, sizeof found);
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++)
        if (counts[pass] > 0) CFT__TRY(cft__fit_pass(samples, n, pass, &found[pass], error));
    cost->forward = found[CF_F];
    cost->replay = found[CF_R];
    cost->backward = found[CF_B];
    cost->input = found[CF_I];
    cost->weight = found[CF_W];
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT && fits != NULL; pass++)
        (void)cft__measure_fit(samples, n, pass, &found[pass], &fits[pass]);
    return CF_OK;
}

/* ================================================================================================================
   >>estimate
   ================================================================================================================ */

/* Layers, from the models' published configurations. Tests compare each model with its published number of
   parameters. */
/* Columns of kinds of layers. Attention: output gate, sinks, window. Routed experts: width, count, experts per token;
   then the width of the shared experts, and whether they have a gate. */
#define CFT__ATTENTION(mixer, gate, sinks, window) mixer, gate, sinks, 0, 0, 0, 0, 0, window, 0, 0, 0, 0, 0
#define CFT__FULL CFT__ATTENTION(CF_MIXER_FULL, 0, 0, 0)
#define CFT__GATED CFT__ATTENTION(CF_MIXER_FULL, 1, 0, 0)
#define CFT__DELTA(heads) CF_MIXER_DELTA, 0, 0, 0, heads, 16, 128, 128, 0, 0, 0, 0, 4, 0
#define CFT__LATENT(reach) CF_MIXER_LATENT, 0, 0, 0, 0, 0, 192, 128, 0, 512, 1536, 64, 0, reach
#define CFT__ALONE(mixer, no_ffn, heads, groups, dim, value, tail) \
    mixer, 0, 0, no_ffn, heads, groups, dim, value, 0, 0, 0, 0, tail, 0

static const cf_layer cft__qwen3_30b[] = {{CFT__FULL, 768, 128, 8, 0, 0}};
static const cf_layer cft__qwen3_235b[] = {{CFT__FULL, 1536, 128, 8, 0, 0}};
static const cf_layer cft__qwen3_480b[] = {{CFT__FULL, 2560, 160, 8, 0, 0}};
static const cf_layer cft__qwen3_next[] = {{CFT__DELTA(32), 512, 512, 10, 512, 1}, {CFT__GATED, 512, 512, 10, 512, 1}};
static const cf_layer cft__qwen35_27b[] = {{CFT__DELTA(48), 0, 0, 0, 0, 0}, {CFT__GATED, 0, 0, 0, 0, 0}};
static const cf_layer cft__qwen35_35b[] = {{CFT__DELTA(32), 512, 256, 8, 512, 1}, {CFT__GATED, 512, 256, 8, 512, 1}};
static const cf_layer cft__qwen35_122b[] = {
    {CFT__DELTA(64), 1024, 256, 8, 1024, 1}, {CFT__GATED, 1024, 256, 8, 1024, 1}};
static const cf_layer cft__qwen35_397b[] = {
    {CFT__DELTA(64), 1024, 512, 10, 1024, 1}, {CFT__GATED, 1024, 512, 10, 1024, 1}};
static const cf_layer cft__gpt_oss_20b[] = {{CFT__ATTENTION(CF_MIXER_WINDOW, 0, 1, 128), 2880, 32, 4, 0, 0},
                                            {CFT__ATTENTION(CF_MIXER_FULL, 0, 1, 0), 2880, 32, 4, 0, 0}};
static const cf_layer cft__gpt_oss_120b[] = {{CFT__ATTENTION(CF_MIXER_WINDOW, 0, 1, 128), 2880, 128, 4, 0, 0},
                                             {CFT__ATTENTION(CF_MIXER_FULL, 0, 1, 0), 2880, 128, 4, 0, 0}};
static const cf_layer cft__deepseek_v3[] = {{CFT__LATENT(128), 2048, 256, 8, 2048, 0}};
static const cf_layer cft__glm_45[] = {{CFT__FULL, 1536, 160, 8, 1536, 0}};
static const cf_layer cft__glm_45_air[] = {{CFT__FULL, 1408, 128, 8, 1408, 0}};
static const cf_layer cft__kimi_k2[] = {{CFT__LATENT(0), 2048, 384, 8, 2048, 0}};
static const cf_layer cft__kimi_linear[] = {
    {CF_MIXER_KDA, 0, 0, 0, 32, 32, 128, 128, 0, 0, 0, 0, 4, 0, 1024, 256, 8, 1024, 0},
    {CF_MIXER_LATENT, 0, 0, 0, 0, 0, 192, 128, 0, 512, 0, 64, 0, 0, 1024, 256, 8, 1024, 0}};
static const cf_layer cft__scout[] = {{CFT__ATTENTION(CF_MIXER_CHUNKED, 0, 0, 8192), 8192, 16, 1, 8192, 0},
                                      {CFT__FULL, 8192, 16, 1, 8192, 0}};
static const cf_layer cft__maverick[] = {{CFT__ATTENTION(CF_MIXER_CHUNKED, 0, 0, 8192), 16384, 0, 0, 0, 0},
                                         {CFT__ATTENTION(CF_MIXER_CHUNKED, 0, 0, 8192), 8192, 128, 1, 8192, 0},
                                         {CFT__FULL, 8192, 128, 1, 8192, 0}};
static const cf_layer cft__mixtral_7b[] = {{CFT__FULL, 14336, 8, 2, 0, 0}};
static const cf_layer cft__mixtral_22b[] = {{CFT__FULL, 16384, 8, 2, 0, 0}};
static const cf_layer cft__nemotron_nano[] = {{CFT__ALONE(CF_MIXER_MAMBA2, 1, 64, 8, 128, 64, 4), 0, 0, 0, 0, 0},
                                              {CFT__ALONE(CF_MIXER_NONE, 0, 0, 0, 0, 0, 0), 1856, 128, 6, 3712, 0},
                                              {CFT__ALONE(CF_MIXER_FULL, 1, 0, 0, 0, 0, 0), 0, 0, 0, 0, 0}};

#define CFT__DENSE NULL, 0, NULL, 0, 0, 0
#define CFT__KINDS_OF(kinds, pattern, first_dense) kinds, CFT__COUNT(kinds), pattern, first_dense, 0, 0

static const cf_model cft__models[] = {
    /* layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tied, qkv_bias, out_bias, mlp_bias, qk_norm, no_gate,
       and kinds */
    {"qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936, 1, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936, 1, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936, 1, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 0, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064, 0, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064, 0, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, 0, 1, 0, 0, 0, 0, CFT__DENSE},
    {"qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, 1, 0, 0, 0, 1, 0, CFT__DENSE},
    {"qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936, 1, 0, 0, 0, 1, 0, CFT__DENSE},
    {"qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936, 1, 0, 0, 0, 1, 0, CFT__DENSE},
    {"qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 0, 0, 0, 0, 1, 0, CFT__DENSE},
    {"qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936, 0, 0, 0, 0, 1, 0, CFT__DENSE},
    {"qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936, 0, 0, 0, 0, 1, 0, CFT__DENSE},
    {"llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, 0, 0, 0, 0, 0, 0, CFT__DENSE},
    {"llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, 0, 0, 0, 0, 0, 0, CFT__DENSE},
    {"llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256, 0, 0, 0, 0, 0, 0, CFT__DENSE},
    {"llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, 1, 0, 0, 0, 0, 0, CFT__DENSE},
    {"llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256, 1, 0, 0, 0, 0, 0, CFT__DENSE},
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, 0, 0, 0, 0, 1, 0, CFT__KINDS_OF(cft__qwen3_30b, "a", 0)},
    {"qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, 0, 0, 0, 0, 1, 0, CFT__KINDS_OF(cft__qwen3_235b, "a", 0)},
    {"qwen3-coder-480b-a35b", 62, 6144, 96, 8, 128, 8192, 151936, 0, 0, 0, 0, 1, 0,
     CFT__KINDS_OF(cft__qwen3_480b, "a", 0)},
    {"qwen3-next-80b-a3b", 48, 2048, 16, 2, 256, 5120, 151936, 0, 0, 0, 0, 1, 0,
     CFT__KINDS_OF(cft__qwen3_next, "aaab", 0)},
    {"qwen3.5-27b", 64, 5120, 24, 4, 256, 17408, 248320, 0, 0, 0, 0, 1, 0, CFT__KINDS_OF(cft__qwen35_27b, "aaab", 0)},
    {"qwen3.5-35b-a3b", 40, 2048, 16, 2, 256, 512, 248320, 0, 0, 0, 0, 1, 0,
     CFT__KINDS_OF(cft__qwen35_35b, "aaab", 0)},
    {"qwen3.5-122b-a10b", 48, 3072, 32, 2, 256, 1024, 248320, 0, 0, 0, 0, 1, 0,
     CFT__KINDS_OF(cft__qwen35_122b, "aaab", 0)},
    {"qwen3.5-397b-a17b", 60, 4096, 32, 2, 256, 1024, 248320, 0, 0, 0, 0, 1, 0,
     CFT__KINDS_OF(cft__qwen35_397b, "aaab", 0)},
    {"gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088, 0, 1, 1, 1, 0, 0, CFT__KINDS_OF(cft__gpt_oss_20b, "ab", 0)},
    {"gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, 0, 1, 1, 1, 0, 0, CFT__KINDS_OF(cft__gpt_oss_120b, "ab", 0)},
    {"deepseek-v3", 61, 7168, 128, 128, 192, 18432, 129280, 0, 0, 0, 0, 0, 0,
     CFT__KINDS_OF(cft__deepseek_v3, "a", 3)},
    {"glm-4.5", 92, 5120, 96, 8, 128, 12288, 151552, 0, 1, 0, 0, 1, 0, CFT__KINDS_OF(cft__glm_45, "a", 3)},
    {"glm-4.5-air", 46, 4096, 96, 8, 128, 10944, 151552, 0, 1, 0, 0, 0, 0, CFT__KINDS_OF(cft__glm_45_air, "a", 1)},
    {"kimi-k2", 61, 7168, 64, 64, 192, 18432, 163840, 0, 0, 0, 0, 0, 0, CFT__KINDS_OF(cft__kimi_k2, "a", 1)},
    {"kimi-linear-48b-a3b", 27, 2304, 32, 32, 192, 9216, 163840, 0, 0, 0, 0, 0, 0,
     CFT__KINDS_OF(cft__kimi_linear, "aaabaaabaaabaaabaaabaaabaab", 1)},
    {"llama-4-scout", 48, 5120, 40, 8, 128, 16384, 202048, 0, 0, 0, 0, 0, 0, CFT__KINDS_OF(cft__scout, "aaab", 0)},
    {"llama-4-maverick", 48, 5120, 40, 8, 128, 16384, 202048, 0, 0, 0, 0, 0, 0,
     CFT__KINDS_OF(cft__maverick, "abac", 0)},
    {"mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 0, 0, 0, 0, 0, 0, CFT__KINDS_OF(cft__mixtral_7b, "a", 0)},
    {"mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32000, 0, 0, 0, 0, 0, 0, CFT__KINDS_OF(cft__mixtral_22b, "a", 0)},
    {"nemotron-3-nano-30b-a3b", 52, 2688, 32, 2, 128, 1856, 131072, 0, 0, 0, 0, 0, 1,
     CFT__KINDS_OF(cft__nemotron_nano, "ababacbababacbababacbababacbababacbabababacbabababab", 0)},
};

/* Sources of the table. Peaks: NVIDIA's data sheets (A100 2021, H100 2023, H200 2024; SXM, dense bf16). NVLink and PCIe
   figures are halved, because the sheets give them for both directions together. Memory: the total that nvidia-smi
   reports. Network: one 200 Gbit/s (A100) or 400 Gbit/s (H100, H200) port per GPU, as in the maker's own systems.
   Attention fractions: causal, head size 128, long sequences, rounded down from the papers on FlashAttention-2 (A100,
   up to 0.73 forward) and FlashAttention-3 (H100, up to 0.75). Product and link fractions, launch and latency are
   common experience, without a publication. Replace them with cf_cost_fit on your own measurements as soon as you
   can. */
static const cf_gpu cft__gpus[] = {
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
    /* Rates of these GPUs come from published data sheets, second hand (HGX B200 and B300, GB200 and GB300 NVL72,
       GH200, RTX PRO 6000 Workstation Edition, MI300X, MI355X). Fractions are copied from the A100 (for A800, L40S,
       RTX) or the H100 (all others), without measurement.

       - B200, B300, GB200, GB300: dense bf16 is half of the rate given with sparsity. The B200's memory has 7,680 bits
         at 3,996 MHz. GB200 and GB300 have four GPUs a node, and NVLink to 72. Exponentials of B300 and GB300, which
         are twice as fast, are not modelled.
       - GH200: the H100's die with 96 GB of HBM3. Its link to the host is NVLink-C2C, 900 GB/s in both directions
         together; for all others PCIe 5 is assumed.
       - H800, A800: H100 and A100 (SXM) with NVLink of 400 GB/s in both directions together.
       - L40S, RTX: PCIe replaces NVLink. bf16 is twice the float rate on RTX 4090 and 5090, and four times on the RTX
         PRO 6000.
       - MI300X, MI355X: seven links of 64 and 76.8 GB/s.
       - Memory is the nominal size for MI300X, MI355X, H20, RTX 4090 and 5090, and nvidia-smi's total for the
       others. */
    {"b200", 2250e12, 0.70, 0.60, 0.50, 148,
     7.67e12, (int64_t)182630 << 20, 900e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"gb200", 2500e12, 0.70, 0.60, 0.50, 148,
     8e12, (int64_t)189471 << 20, 900e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"b300", 2250e12, 0.70, 0.60, 0.50, 148,
     7.7e12, (int64_t)275040 << 20, 900e9, 100e9, 64e9, 0.75, 5e-6, 15e-6},
    {"gb300", 2500e12, 0.70, 0.60, 0.50, 152,
     8e12, (int64_t)284208 << 20, 900e9, 100e9, 64e9, 0.75, 5e-6, 15e-6},
    {"gh200-96g", 989.4e12, 0.70, 0.60, 0.50, 132,
     4e12, (int64_t)97871 << 20, 450e9, 50e9, 450e9, 0.75, 5e-6, 15e-6},
    {"h800-80g", 989.4e12, 0.70, 0.60, 0.50, 132,
     3.35e12, (int64_t)81559 << 20, 200e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"a800-80g", 312e12, 0.80, 0.60, 0.55, 108,
     2.039e12, (int64_t)81920 << 20, 200e9, 25e9, 32e9, 0.75, 5e-6, 15e-6},
    {"h20", 148e12, 0.70, 0.60, 0.50, 78,
     4e12, (int64_t)96 << 30, 450e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"mi300x", 1307e12, 0.70, 0.60, 0.50, 304,
     5.3e12, (int64_t)192 << 30, 448e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"mi355x", 2517e12, 0.70, 0.60, 0.50, 256,
     8e12, (int64_t)288 << 30, 537.6e9, 50e9, 64e9, 0.75, 5e-6, 15e-6},
    {"l40s", 362e12, 0.80, 0.60, 0.55, 142,
     0.864e12, (int64_t)46068 << 20, 32e9, 25e9, 32e9, 0.75, 5e-6, 15e-6},
    {"rtx4090", 165.2e12, 0.80, 0.60, 0.55, 128,
     1.008e12, (int64_t)24 << 30, 32e9, 12.5e9, 32e9, 0.75, 5e-6, 15e-6},
    {"rtx5090", 209.5e12, 0.80, 0.60, 0.55, 170,
     1.792e12, (int64_t)32 << 30, 64e9, 12.5e9, 64e9, 0.75, 5e-6, 15e-6},
    {"rtx-pro-6000", 503.8e12, 0.80, 0.60, 0.55, 188,
     1.792e12, (int64_t)97887 << 20, 64e9, 25e9, 64e9, 0.75, 5e-6, 15e-6},
};

static int cft__lower(char c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c; } /* in any locale */

static int cft__has_name(const char *own, const char *asked) { /* own: lower case */
    while (*own != '\0' && *own == cft__lower(*asked)) own++, asked++;
    return *own == *asked; /* both have ended */
}

CHUNKFLOW_TUNE_API const cf_model *cf_model_find(const char *name) {
    int64_t i;
    for (i = 0; name != NULL && i < CFT__COUNT(cft__models); i++)
        if (cft__has_name(cft__models[i].name, name)) return &cft__models[i];
    return NULL;
}

CHUNKFLOW_TUNE_API const cf_gpu *cf_gpu_find(const char *name) {
    int64_t i;
    for (i = 0; name != NULL && i < CFT__COUNT(cft__gpus); i++)
        if (cft__has_name(cft__gpus[i].name, name)) return &cft__gpus[i];
    return NULL;
}

#define CFT__COLLECTIVES 4       /* per layer in each direction: two gathers and two reduce-scatters */
#define CFT__LOSS_KERNELS 6

/* The three kinds of work in a layer, and their kernels. Forward: norm, QKV, rotation, attention, projection, residual,
   norm, gate and up, SwiGLU, down, residual, and appending to the state. Gradient of the inputs: one for each of these;
   attention has five products instead of two, and reads and writes dK and dV (float) in addition to K and V. Gradient
   of the weights: one for each of the seven matrices, which adds to a float accumulator. */
typedef enum cft__kind { CFT__FORWARD, CFT__INPUT_GRADIENT, CFT__WEIGHT_GRADIENT, CFT__KINDS } cft__kind;

typedef struct cft__factor {
    double kernels;     /* per layer */
    double weight;      /* bytes read and written per weight in a pass */
    double transfers;   /* 1: tensor-parallel collectives */
    double elementwise; /* factor of a token's element-wise traffic */
    double logits;      /* bytes per logit: written and read about twice */
    double pair_flops;  /* per pair and column of Q */
    double pair_bytes;  /* per column of K: each chunk reads its prefix once */
    double biases;      /* kernels for an expert's bias */
} cft__factor;

static const cft__factor cft__factors[CFT__KINDS] = {
    {12, 2, 1, 1, 20, 4, 4, 2}, {14, 2, 1, 2, 20, 10, 20, 6}, {7, 8, 0, 0, 0, 0, 0, 0}};

/* Returns the bytes that one GPU sends in a collective, per byte of the whole tensor. */
static double cft__ring_share(int64_t ranks) { return (double)(ranks - 1) / (double)ranks; }

/* Returns how many copies of each row the experts of the fullest GPU compute, imbalance included. */
static double cft__expert_rows(const cf_cost_desc *desc, const cf_shard *shard) {
    double more = desc->parallel.ep > 1 ? 1 + (double)desc->parallel.imbalance / 100 : 1;
    if (shard->active == 0) return 0;
    return more * (double)shard->active / (double)shard->expert_share;
}

/* Return the bytes per number of a norm, of SwiGLU, and of the rotation. Unfused, a norm casts to float, squares,
   means, scales, casts back and multiplies by its weights; a rotation is a product of complex floats between two
   casts. */
static double cft__norm_bytes(const cf_cost_desc *desc) { return desc->unfused ? 36 : 4; }
static double cft__glu_bytes(const cf_cost_desc *desc) { return desc->unfused ? 10 : 6; }
static double cft__rotation_bytes(const cf_cost_desc *desc) { return desc->unfused ? 20 : 4; }

/* Returns the element-wise traffic of one token in the layers: two norms, two residuals of 6 h bytes, rotation, SwiGLU.
   A recurrent layer writes and reads its kept rows once. A row is copied to its experts and back.

   Grouped products add no biases (TransformerEngine, issue 2766). Megatron-LM's experts.py (d98e8a6) adds the bias of
   the down product in float, expert by expert, joins the pieces and casts them: 28 h bytes forward, 40 h backward. Its
   clamp before the activation is three passes: 16 f and 20 f. One third of these bytes is counted in forward and two
   thirds in backward. */
static double cft__elementwise_bytes(const cf_cost_desc *desc, const cf_shard *shard) {
    double glu = cft__glu_bytes(desc), rotated = cft__rotation_bytes(desc) * (double)(shard->q + shard->kv);
    double rows = (double)shard->hidden / (double)shard->sequence, kept = 4 * (double)shard->elements;
    double bytes = cft__product(12 + 2 * cft__norm_bytes(desc), rows) + cft__product(glu, (double)shard->ffn);
    int64_t biases = desc->model->mlp_bias ? (68 * shard->hidden + 36 * shard->expert_ffn) / 3 : 0;
    double copy = (double)(8 * shard->hidden + biases) + cft__product(glu, (double)shard->expert_ffn);
    bytes += (shard->snapshot > 0 ? kept : rotated) + cft__product(cft__expert_rows(desc, shard), copy);
    return cft__product((double)shard->layers, bytes);
}

/* Returns the number of weights in all layers. matrices: weights of a layer's matrices. experts: number of experts in a
   layer, either those on this GPU or those that a row uses. */
static double cft__weights_of(const cf_shard *shard, int64_t matrices, double experts) {
    double a_layer = (double)matrices + cft__product(experts, (double)shard->expert_size);
    return cft__product((double)shard->layers, a_layer);
}

/* Returns the factor by which forward attention takes longer because its last wave of blocks is half empty on average.
   Backward has blocks of keys instead, and a prefix has enough keys. */
static double cft__partial_wave(const cf_gpu *gpu, const cf_shard *shard, int64_t chunk_size) {
    double blocks = cft__product((double)shard->heads, (double)chunk_size) / 128;
    return chunk_size > 0 ? 1 + (double)gpu->processors / blocks / 2 : 1;
}

/* Returns the rate of heads narrower than 128 as a fraction of the rate at 128, to which cf_gpu's fractions apply. Each
   pair and head needs one exponential, however narrow the head is. A processor computes 16 in a cycle, 28.8 G/s, and
   products do not hide them. flops: of the products, per column and pair.

   Heads of 64 on an H100: 0.75 forward and 0.86 backward by this formula. FlashAttention-3 reaches 0.77 and 0.84 (497
   of 648 and 474 of 561 TFLOP/s; Shah et al., 2024, figures 5 and 6). On a B200: 0.67, and FlashAttention-4 reaches
   0.56 (762 of 1,362; its pull request 2605). */
static double cft__narrow_heads(const cf_gpu *gpu, const cf_shard *shard, double flops) {
    double columns = (double)(shard->q + shard->out) / 2, exponential = gpu->flops / (double)gpu->processors / 28.8e9;
    double width = columns / (double)cft__max(1, shard->heads);
    if (shard->snapshot > 0 || !(columns > 0) || width >= 128) return 1;
    return width * (128 * flops + exponential) / (128 * (width * flops + exponential));
}

/* Returns the bytes/s within a group of `span` neighbouring ranks. */
static double cft__link_rate(const cf_cost_desc *desc, int64_t span) {
    return cft__product(span <= desc->gpus_per_node ? desc->gpu->nvlink : desc->gpu->network, desc->gpu->link);
}

/* Returns the bytes/s of collectives over data-parallel ranks. The ranks of a node send through its ports at the same
   time. */
static double cft__data_rate(const cf_cost_desc *desc) {
    const cf_parallel *parallel = &desc->parallel;
    int64_t side_by_side = cft__max(1, desc->gpus_per_node / parallel->tp);
    double rate = desc->gpu->network * (double)side_by_side;
    if (parallel->tp * parallel->dp <= desc->gpus_per_node || rate > desc->gpu->nvlink) rate = desc->gpu->nvlink;
    return cft__product(rate, desc->gpu->link);
}

/* Returns the seconds per token of `transfers` tensor-parallel collectives. */
static double cft__transfer_seconds(const cf_cost_desc *desc, const cf_shard *shard, double transfers) {
    double bytes = cft__product(2 * (double)shard->hidden, cft__ring_share(desc->parallel.tp));
    return cft__product(transfers, bytes) / cft__link_rate(desc, desc->parallel.tp);
}

/* Returns the mean number of other places that a row reaches, if its experts are spread over `n` places with equally
   many experts. */
static double cft__others_met(const cf_cost_desc *desc, const cf_shard *shard, double n) {
    double missed = 1, part = (double)shard->reach / (double)(shard->experts * desc->parallel.ep);
    int64_t k;
    if (part < 1 / n) part = 1 / n; /* at least one of the places */
    for (k = 0; k < shard->active; k++) missed *= 1 - 1 / (n * part);
    return (n - 1) * part * (1 - missed);
}

/* Returns the seconds per row to send it to its experts' GPUs and back, in a forward or backward of one layer. One copy
   goes to each node, which passes it to each of its GPUs at the same time (DeepSeek-V3's report, 2024, section 3.2.2,
   and DeepEP). */
static double cft__dispatch_seconds(const cf_cost_desc *desc, const cf_shard *shard) {
    int64_t ep = desc->parallel.ep, nodes = (ep + desc->gpus_per_node - 1) / desc->gpus_per_node;
    double bytes = cft__product(4, (double)shard->hidden) / (double)shard->expert_share;
    double within = cft__others_met(desc, shard, (double)ep) / desc->gpu->nvlink;
    double across = cft__others_met(desc, shard, (double)nodes) / desc->gpu->network;
    return cft__product(bytes, across > within ? across : within) / desc->gpu->link;
}

/* Returns the FLOPs of one row in a layer's mixer that do not depend on its prefix, expressed as pairs times columns of
   Q. They are those of a window's rows, or of a gated delta rule in blocks of 64 (Yang et al., 2024): six products with
   the state, five with the block. The rate of such layers was not measured; attention's rate is used. */
static double cft__row_flops(const cf_shard *shard) {
    double window = shard->mixer == CF_MIXER_CHUNKED ? (double)shard->window / 2 : (double)shard->window;
    double keys = shard->out > 0 ? (double)shard->heads * ((double)shard->snapshot / (double)shard->out) : 0;
    if (shard->window_row > 0) return cft__product(window, (double)(shard->q + shard->out) / 2);
    if (shard->snapshot == 0) return 0;
    return (6 * (double)shard->snapshot + 128 * (cft__product(3, keys) + 2 * (double)shard->out)) / 4;
}

/* Returns the seconds that a pass over a chunk of a cp group spends on scans of the recurrent layers of one kind. */
static double cft__scan_seconds(const cf_cost_desc *desc, const cf_shard *shard) {
    const cf_gpu *gpu = desc->gpu;
    int delta = shard->mixer != CF_MIXER_MAMBA2;
    double effect = (double)shard->effect, state = (double)shard->snapshot, ranks = (double)desc->max_cp;
    double share, keys, flops, bytes, seconds; /* share: of the heads, those that a rank scans */
    if (shard->snapshot == 0) return 0;
    share = (double)((shard->heads + desc->max_cp - 1) / desc->max_cp) / (double)shard->heads;
    keys = state / (double)shard->out; /* of a head */
    flops = 2 * state + (delta ? 6 * effect + 256 * keys * (double)shard->heads : 0); /* of a row: cft__row_flops */
    flops = cft__product(flops, (double)desc->chunk_size);
    seconds = flops / cft__product(gpu->flops, gpu->attention_forward);
    if (delta) seconds += 2 * ranks * share * keys * state / cft__product(gpu->flops, gpu->gemm);
    bytes = 4 * share * (effect + 3 * state) + 2 * (double)(shard->tail * shard->tail_row);
    seconds += (ranks - 1) * bytes / cft__link_rate(desc, desc->parallel.tp * desc->max_cp);
    seconds += 3 * gpu->latency + (ranks + 3) * gpu->launch;
    return cft__product((double)shard->layers, seconds);
}

/* Returns the seconds of a layer's mixer. per_token: the FLOPs of cft__row_flops. per_pair: attention, and computing K
   and V of the prefix from latents again in each chunk. */
static cf_pass_cost cft__pair_seconds(const cf_cost_desc *desc, const cf_shard *shard, cft__kind kind) {
    const cf_gpu *gpu = desc->gpu;
    const cft__factor *factor = &cft__factors[kind];
    double layers = (double)shard->layers, pair_bytes = 0, expand = 0, columns = (double)(shard->q + shard->out) / 2;
    double fraction = kind == CFT__FORWARD ? gpu->attention_forward : gpu->attention_backward;
    double attention = cft__product(gpu->flops, fraction) * cft__narrow_heads(gpu, shard, factor->pair_flops);
    cf_pass_cost cost = {0, 0, 0};
    cost.per_token = cft__product(factor->pair_flops * layers, cft__row_flops(shard)) / attention;
    if (shard->state_row == 0) return cost;
    if (desc->chunk_size > 0) {
        double rows = layers / (double)desc->chunk_size; /* rows of the prefix that are read for each pair */
        pair_bytes = cft__product(layers, factor->pair_bytes * ((double)(shard->kv + shard->value) / 2)) /
                     (double)desc->chunk_size;
        expand = cft__product(rows * (kind == CFT__INPUT_GRADIENT ? 4 : 2), (double)shard->expand);
    }
    cost.per_pair = cft__product(factor->pair_flops * layers, columns);
    if (kind == CFT__FORWARD)
        cost.per_pair = cft__product(cost.per_pair, cft__partial_wave(gpu, shard, desc->chunk_size));
    cost.per_pair = cost.per_pair / attention + pair_bytes / gpu->bandwidth;
    cost.per_pair += expand / cft__product(gpu->flops, gpu->gemm);
    return cost;
}

/* Returns the additional kernels of a layer's experts: router, choice, two copies, two transfers, two sums, and two
   products for each expert instead of two for all. (TransformerEngine's grouped linear calls cuBLAS for each: pull
   request 853, issue 1386.) biases: kernels per expert. */
static double cft__expert_kernels(const cf_cost_desc *desc, const cf_shard *shard, double biases) {
    double each = desc->model->mlp_bias ? 2 + biases : 2;
    return shard->active > 0 ? 6 + cft__product(each, (double)shard->experts) : 0;
}

/* Returns the seconds of one kind of work in the layers of one kind: amounts divided by rates. head: 1 includes output
   head and loss. */
static cf_pass_cost cft__work_seconds(const cf_cost_desc *desc, const cf_shard *shard, cft__kind kind, int head) {
    const cf_gpu *gpu = desc->gpu;
    const cft__factor *factor = &cft__factors[kind];
    double layers = (double)shard->layers, experts = cft__expert_kernels(desc, shard, factor->biases);
    int64_t matrices = shard->mixer_weights + shard->mlp_weights;
    double weights = cft__weights_of(shard, matrices, (double)shard->experts);
    double active = cft__weights_of(shard, matrices, cft__expert_rows(desc, shard));
    double transfers = factor->transfers * CFT__COLLECTIVES * layers;
    double collectives = desc->parallel.tp > 1 ? transfers : 0, out;
    double apart = desc->unfused ? 16 * factor->elementwise : 0; /* five more per norm and for rotation, one for
                                                                    SwiGLU */
    double kernels = cft__product(factor->kernels + experts + apart, layers);
    double token_bytes = cft__product(factor->elementwise, cft__elementwise_bytes(desc, shard));
    cf_pass_cost cost, pairs = cft__pair_seconds(desc, shard, kind);
    if (shard->active > 0 && desc->parallel.ep > 1) collectives += 2 * factor->transfers * layers;
    if (head) {
        out = cft__product((double)shard->hidden, (double)shard->vocab) * (double)(1 + desc->model->mtp);
        weights += out;
        active += out;
        kernels += CFT__LOSS_KERNELS;
        token_bytes += factor->logits * (double)shard->vocab * (double)(1 + desc->model->mtp);
    }
    cost.constant = cft__product(kernels, gpu->launch) + cft__product(collectives, gpu->latency);
    cost.constant += factor->weight * weights / gpu->bandwidth;
    cost.per_token = 2 * active / cft__product(gpu->flops, gpu->gemm) + token_bytes / gpu->bandwidth;
    cost.per_token += cft__transfer_seconds(desc, shard, transfers);
    if (shard->active > 0 && desc->parallel.ep > 1)
        cost.per_token += cft__product(factor->transfers * layers, cft__dispatch_seconds(desc, shard));
    cost.per_token += pairs.per_token;
    cost.per_pair = pairs.per_pair;
    return cost;
}

static void cft__cost_sum(const cf_pass_cost *a, const cf_pass_cost *b, cf_pass_cost *out) {
    out->constant = a->constant + b->constant;
    out->per_token = a->per_token + b->per_token;
    out->per_pair = a->per_pair + b->per_pair;
}

/* Returns the time of the norms and MLP that backward recomputes, by the modules of Megatron-LM. Each norm reads and
   writes h; the activation reads 2 f and writes f. The MLP takes three kernels, SwiGLU included, and two of the
   collectives. */
static cf_pass_cost cft__modules_seconds(const cf_cost_desc *desc, const cf_shard *shard) {
    const cf_gpu *gpu = desc->gpu;
    int norms_only = desc->parallel.recompute == CF_RECOMPUTE_LAYERNORM;
    int mlp = desc->parallel.recompute == CF_RECOMPUTE_MLP;
    double layers = (double)shard->layers, transfers = mlp ? CFT__COLLECTIVES / 2 * layers : 0;
    double rows = cft__expert_rows(desc, shard), numbers = (double)shard->hidden / (double)shard->sequence;
    double bytes = cft__product(2 * cft__norm_bytes(desc), numbers);
    double weights = mlp ? cft__weights_of(shard, shard->mlp_weights, (double)shard->experts) : 0;
    double active = mlp ? cft__weights_of(shard, shard->mlp_weights, rows) : 0;
    cf_pass_cost cost;
    if (!norms_only)
        bytes += cft__product(cft__glu_bytes(desc), (double)shard->ffn + cft__product(rows, (double)shard->expert_ffn));
    cost.constant = cft__product((norms_only ? 2 : mlp ? 5 : 3) * layers, gpu->launch) + 2 * weights / gpu->bandwidth;
    if (desc->parallel.tp > 1) cost.constant += cft__product(transfers, gpu->latency);
    cost.per_token = 2 * active / cft__product(gpu->flops, gpu->gemm) + cft__product(layers, bytes) / gpu->bandwidth;
    cost.per_token += cft__transfer_seconds(desc, shard, transfers);
    if (mlp && shard->active > 0 && desc->parallel.ep > 1)
        cost.per_token += cft__product(layers, cft__dispatch_seconds(desc, shard));
    cost.per_pair = 0;
    return cost;
}

/* Returns the extra time of a backward in which `layers` layers of one kind recompute. */
static cf_pass_cost cft__again_seconds(const cf_cost_desc *desc, const cf_shard *all, int64_t layers) {
    cf_recompute what = desc->parallel.recompute;
    cf_pass_cost cost = {0, 0, 0};
    cf_shard shard = *all;
    shard.layers = layers;
    if (what == CF_RECOMPUTE_SELECTIVE) cost.per_pair = cft__work_seconds(desc, &shard, CFT__FORWARD, 0).per_pair;
    else if (what == CF_RECOMPUTE_FULL) cost = cft__work_seconds(desc, &shard, CFT__FORWARD, 0);
    else if (what > CF_RECOMPUTE_NONE) cost = cft__modules_seconds(desc, &shard);
    return cost;
}

/* Returns the bytes that a data-parallel rank sends for `shared` bytes of its parameters and for `routed` bytes of
   routed experts, which have fewer copies. */
static double cft__exchanged(const cf_parallel *parallel, double shared, double routed) {
    int64_t copies = parallel->ep > 1 ? parallel->tp * parallel->dp / parallel->ep : parallel->dp;
    return cft__product(shared, cft__ring_share(parallel->dp)) + cft__product(routed, cft__ring_share(copies));
}

/* Bytes that a pass sends: per parameter, to other ranks, and to or from host memory; per row, to or from host
   memory. */
typedef struct cft__sent {
    double ranks, host, rows;
} cft__sent;

/* Returns the number of parameters that a data-parallel rank owns on a stage. */
static double cft__owned(const cf_parallel *parallel, double shared, double routed) {
    int64_t copies = parallel->ep > 1 ? parallel->tp * parallel->dp / parallel->ep : parallel->dp;
    return shared / (double)parallel->dp + routed / (double)copies;
}

/* Returns the seconds for which a pass over a usual chunk waits for its transfers. Both links are used while it runs.
   It waits for the bytes of one layer, and for those that it is too short to hide. */
static double cft__exposed_seconds(const cf_cost_desc *desc, const cf_shard *shard, const cf_pass_cost *pass,
                                   const cf_parameters *counted, cft__sent sent) {
    double shared = (double)(counted->total - counted->experts), routed = (double)counted->experts;
    double ranks = cft__exchanged(&desc->parallel, sent.ranks * shared, sent.ranks * routed) / cft__data_rate(desc);
    double all = ranks, host = cft__product(sent.host, cft__owned(&desc->parallel, shared, routed));
    double first, room = cf_cost_seconds(pass, desc->chunk_size, cf_slice_pairs(0, desc->chunk_size));
    host += cft__product(sent.rows, (double)desc->chunk_size);
    host /= cft__product(desc->gpu->pcie, desc->gpu->link);
    if (host > all) all = host;
    first = all / (double)shard->layers;
    return desc->chunk_size > 0 && all - first > room ? all - room : first;
}

/* Returns the bytes per row of outputs that go to host memory on a virtual stage. */
static double cft__outputs_away(const cf_cost_desc *desc, int64_t stage) {
    cf_memory_desc memory;
    cf_token_bytes bytes;
    if (desc->outputs < (desc->stream ? 1 : 2)) return 0;
    memset(&memory, 0, sizeof memory);
    memory.model = desc->model;
    memory.parallel = desc->parallel;
    memory.outputs = 1;
    return cf_memory_token_bytes(&memory, stage, &bytes, NULL) == CF_OK ? (double)(bytes.dropped - bytes.boundary) : 0;
}

/* Adds the exposed transfers of a virtual stage's passes. ZeRO 3 gathers weights for each pass, ZeRO 2 and 3 scatter
   the gradients of each backward, and offloaded parts cross the link to the host. outputs: bytes per row of a dropped
   chunk that cross this link, out in F and in again in R. */
static void cft__add_exposed(const cf_cost_desc *desc, const cf_shard *shard, const cf_parameters *counted,
                             double outputs, cf_stage_cost *cost) {
    int zero = desc->parallel.dp > 1 ? (int)desc->parallel.zero : 0;
    int checkpoints = (desc->offload & CF_OFFLOAD_CHECKPOINTS) != 0;
    int own = (desc->offload & CF_OFFLOAD_PARAMETERS) != 0;
    int gradients = desc->offload & CF_OFFLOAD_OPTIMIZER && desc->parallel.zero > 1;
    double row = cft__product(2 * (double)shard->hidden / (double)shard->sequence, (double)shard->layers), waits;
    const cft__sent forward = {zero > 2 ? 2.0 : 0.0, own ? 2.0 : 0.0, checkpoints ? row : 0.0};
    const cft__sent dropped = {forward.ranks, forward.host, forward.rows + outputs};
    const cft__sent weight = {zero > 1 ? 4.0 : 0.0, gradients ? 4.0 : 0.0, 0};
    if (zero < 2 && desc->offload == 0 && !(outputs > 0)) return;
    waits = cft__exposed_seconds(desc, shard, &cost->forward, counted, forward);
    cost->replay.constant += cft__exposed_seconds(desc, shard, &cost->replay, counted, dropped);
    cost->replay.constant += cft__exposed_seconds(desc, shard, &cost->forward, counted, dropped) - waits;
    cost->forward.constant += waits;
    cost->input.constant += cft__exposed_seconds(desc, shard, &cost->input, counted, forward);
    cost->weight.constant += cft__exposed_seconds(desc, shard, &cost->weight, counted, weight);
}

/* Subtracts attention from the forward of one kind's layers, for a replay that reuses attention's outputs. */
static void cft__leave_out_attention(const cf_cost_desc *desc, const cf_shard *shard, cf_pass_cost *cost) {
    cost->constant -= cft__product((double)shard->layers, desc->gpu->launch);
    cost->per_token -= cft__pair_seconds(desc, shard, CFT__FORWARD).per_token;
    cost->per_pair = 0;
}

/* Adds the costs of the layers of one kind. again: number of these layers that recompute. */
static void cft__add_kind(const cf_cost_desc *desc, const cf_shard *shard, int head, int64_t again,
                          cf_stage_cost *cost) {
    cf_pass_cost part = cft__work_seconds(desc, shard, CFT__FORWARD, head);
    cft__cost_sum(&cost->forward, &part, &cost->forward);
    if (desc->outputs && shard->outputs) cft__leave_out_attention(desc, shard, &part);
    cft__cost_sum(&cost->replay, &part, &cost->replay);
    part = cft__work_seconds(desc, shard, CFT__INPUT_GRADIENT, head);
    cft__cost_sum(&cost->input, &part, &cost->input);
    part = cft__again_seconds(desc, shard, again);
    cft__cost_sum(&cost->input, &part, &cost->input);
    part = cft__work_seconds(desc, shard, CFT__WEIGHT_GRADIENT, head);
    cft__cost_sum(&cost->weight, &part, &cost->weight);
}

/* Returns the costs of a virtual stage, which must exist. */
static cf_stage_cost cft__stage_seconds(const cf_cost_desc *desc, int64_t stage) {
    cf_parameters counted;
    cf_shard whole, shard;
    cf_stage_cost cost;
    int64_t k, left, some = desc->parallel.recompute_layers;
    int head;
    (void)cf_stage_shard(desc->model, &desc->parallel, stage, -1, &whole, NULL);
    (void)cf_stage_parameters(desc->model, &desc->parallel, stage, &counted, NULL);
    memset(&cost, 0, sizeof cost);
    left = some > 0 ? cft__min(whole.layers, some) : whole.layers;
    head = whole.last;
    for (k = 0; cf_stage_shard(desc->model, &desc->parallel, stage, k, &shard, NULL) == CF_OK; k++) {
        if (shard.layers == 0) continue;
        cft__add_kind(desc, &shard, head, cft__min(left, shard.layers), &cost);
        left -= cft__min(left, shard.layers);
        head = 0; /* counted once, with the first kind */
    }
    cft__add_exposed(desc, &whole, &counted, cft__outputs_away(desc, stage), &cost);
    cft__cost_sum(&cost.input, &cost.weight, &cost.backward);
    return cost;
}

static cf_result cft__check_gpu(const cf_gpu *gpu, cf_error *error) {
    const struct {
        const char *field;
        double rate, most;
    } members[] = {{"gpu.flops", gpu->flops, DBL_MAX},
                   {"gpu.gemm", gpu->gemm, 1},
                   {"gpu.attention_forward", gpu->attention_forward, 1},
                   {"gpu.attention_backward", gpu->attention_backward, 1},
                   {"gpu.bandwidth", gpu->bandwidth, DBL_MAX},
                   {"gpu.nvlink", gpu->nvlink, DBL_MAX},
                   {"gpu.network", gpu->network, DBL_MAX},
                   {"gpu.pcie", gpu->pcie, DBL_MAX},
                   {"gpu.link", gpu->link, 1}};
    int64_t i;
    for (i = 0; i < CFT__COUNT(members); i++)
        if (!(members[i].rate > 0 && members[i].rate <= members[i].most))
            return cf_fail_real(error, CF_ERROR_ARGUMENT, members[i].field, -1, members[i].rate,
                                members[i].most > 1 ? "must be finite and above 0" : "must be above 0 and at most 1");
    CFT__TRY(cft__range(gpu->processors, 1, CF_MAX_RANKS, CF_ERROR_ARGUMENT, "gpu.processors", -1, error));
    CFT__TRY(cft__check_time(gpu->launch, "gpu.launch", error));
    return cft__check_time(gpu->latency, "gpu.latency", error);
}

/* Estimates the seconds of an iteration outside its passes, on the stage with the most parameters. Gradients (float)
   are reduced over dp, and parameters are gathered again, unless passes do both. The optimizer reads a float gradient,
   reads and writes three float states, and writes a bf16 parameter. */
static cf_result cft__step_seconds(const cf_cost_desc *desc, double *seconds, cf_error *error) {
    static const double bytes[] = {8, 6, 2, 0}; /* by ZeRO level; an all-reduce sends 4 bytes twice */
    const cf_parallel *parallel = &desc->parallel;
    double rate = cft__data_rate(desc), host = cft__product(desc->gpu->pcie, desc->gpu->link);
    double most = 0, experts = 0, owned, exchanged;
    int64_t s, v;
    for (s = 0; s < parallel->pp; s++) {
        double parameters = 0, routed = 0;
        for (v = 0; v < parallel->n_virtual; v++) {
            cf_parameters counted;
            int64_t at = cf_placement_at(parallel->placement, parallel->pp, v, s);
            CFT__TRY(cf_stage_parameters(desc->model, parallel, at, &counted, error));
            parameters += (double)(counted.total - counted.experts);
            routed += (double)counted.experts;
        }
        if (parameters + routed <= most + experts) continue;
        most = parameters;
        experts = routed;
    }
    owned = parallel->zero > 0 ? cft__owned(parallel, most, experts) : most + experts;
    exchanged = cft__exchanged(parallel, bytes[parallel->zero] * most, bytes[parallel->zero] * experts);
    *seconds = exchanged / rate;
    if (desc->offload & CF_OFFLOAD_OPTIMIZER) *seconds += (parallel->zero > 1 ? 2 : 6) * owned / host;
    else *seconds += 30 * owned / desc->gpu->bandwidth;
    return CF_OK;
}

/* Returns everything else that a schedule needs: transfers between stages, and streams and gathers of state. row_bytes:
   state per token of the stage with the most state. shard: of the first stage. */
static cf_timing cft__transfer_timing(const cf_cost_desc *desc, const cf_shard *shard, int64_t most_layers,
                                      double row_bytes) {
    const cf_parallel *parallel = &desc->parallel;
    double rate = cft__link_rate(desc, parallel->tp * parallel->dp * parallel->pp);
    cf_timing timing;
    memset(&timing, 0, sizeof timing);
    timing.latency = desc->gpu->latency;
    timing.seconds_per_token = (double)cft__div_up(2 * shard->hidden, shard->sequence) / rate;
    if (desc->stream) timing.stream_forward = row_bytes / cft__product(desc->gpu->pcie, desc->gpu->link);
    timing.stream_backward = 5 * timing.stream_forward; /* also 8 kv twice */
    if (desc->max_cp > 1) timing.gather_forward = row_bytes / cft__link_rate(desc, parallel->tp * desc->max_cp);
    timing.gather_backward = 3 * timing.gather_forward; /* plus 8 kv bytes once in each direction */
    if (timing.stream_forward > 0 || timing.gather_forward > 0) timing.stream_exposed = 1 / (double)most_layers;
    return timing;
}

CHUNKFLOW_TUNE_API void cf_cp_costs(const cf_timing *timing, cf_pack_desc *pack) {
    const cf_stage_cost *first = timing->stages != NULL ? &timing->stages[0] : &timing->all;
    const cf_pass_cost *f = &first->forward, *b = &first->backward;
    pack->cost.constant = (f->constant + b->constant) / 3;
    pack->cost.per_token = (f->per_token + b->per_token) / 3;
    pack->cost.per_pair = (f->per_pair + b->per_pair) / 3;
    pack->cp_row_seconds = cft__product((timing->gather_forward + timing->gather_backward) / 3, timing->stream_exposed);
    pack->cp_chunk_seconds = (timing->scan_forward + timing->scan_backward) / 3;
}

CHUNKFLOW_TUNE_API cf_pass_cost cf_column_cost(const cf_timing *timing, int64_t max_cp, int64_t count) {
    const cf_stage_cost *stages = timing->stages != NULL ? timing->stages : &timing->all;
    cf_pass_cost most = stages[0].forward;
    int64_t i;
    if (max_cp < 2) return most;
    for (i = 0; i < 2 * (timing->stages != NULL ? count : 1); i++) {
        const cf_pass_cost *pass = i % 2 != 0 ? &stages[i / 2].backward : &stages[i / 2].forward;
        if (cft__product(pass->per_pair, most.per_token) > cft__product(most.per_pair, pass->per_token)) most = *pass;
    }
    return most;
}

/* Returns the bytes of K and V, or latents, of one token on a stage: two per element. */
static double cft__row_bytes(const cf_cost_desc *desc, int64_t stage) {
    double sum = 0;
    cf_shard shard;
    int64_t k;
    for (k = 0; cf_stage_shard(desc->model, &desc->parallel, stage, k, &shard, NULL) == CF_OK; k++)
        sum += cft__product(2 * (double)shard.state_row, (double)shard.layers);
    return sum;
}

/* Returns the seconds of the scans of all recurrent layers of a stage, in a pass over a chunk of a cp group. */
static double cft__stage_scan_seconds(const cf_cost_desc *desc, int64_t stage) {
    double sum = 0;
    cf_shard shard;
    int64_t k;
    if (desc->max_cp < 2) return 0;
    for (k = 0; cf_stage_shard(desc->model, &desc->parallel, stage, k, &shard, NULL) == CF_OK; k++)
        sum += cft__scan_seconds(desc, &shard);
    return sum;
}

/* Refuses estimates that are not finite: a rate close to 0 gives times too large for a double. */
static cf_result cft__check_estimate(const cf_cost_desc *full, int64_t count, const cf_timing *timing, double step,
                                     cf_error *error) {
    double of[sizeof(cf_stage_cost) / sizeof(double)];
    int64_t s, i;
    int finite = cft__is_time(step) && cft__is_time(timing->latency) && cft__is_time(timing->seconds_per_token) &&
                 cft__is_time(timing->stream_backward) && cft__is_time(timing->gather_backward) &&
                 cft__is_time(timing->scan_backward);
    for (s = 0; s < count && finite; s++) {
        cf_stage_cost cost = cft__stage_seconds(full, s);
        memcpy(of, &cost, sizeof of);
        for (i = 0; i < CFT__COUNT(of); i++) finite &= cft__is_time(of[i]);
    }
    if (finite) return CF_OK;
    return cf_refuse(error, CF_ERROR_OVERFLOW, "gpu", -1, "is so slow that a pass or a transfer takes for ever");
}

/* Checks what is offloaded, by the rules of cf_memory_estimate. */
static cf_result cft__check_offload(const cf_cost_desc *desc, cf_error *error) {
    cf_memory_desc memory;
    cf_token_bytes unused;
    memset(&memory, 0, sizeof memory);
    memory.model = desc->model;
    memory.parallel = desc->parallel;
    memory.offload = desc->offload;
    return desc->offload == 0 ? CF_OK : cf_memory_token_bytes(&memory, 0, &unused, error);
}

CHUNKFLOW_TUNE_API cf_result cf_cost_estimate(const cf_cost_desc *desc, cf_stage_cost *stages, int64_t count,
                                              cf_timing *timing, double *step_seconds, cf_error *error) {
    cf_cost_desc full;
    cf_shard shard, first;
    cf_timing transfers;
    int64_t s, most_layers = 0;
    double step = 0, row_bytes = 0, scan = 0;
    if (desc == NULL) return cf_fail_null(error, "desc");
    if (stages == NULL) return cf_fail_null(error, "stages");
    if (timing == NULL) return cf_fail_null(error, "timing");
    full = *desc;
    CFT__TRY(cft__check_found(desc->model, "model", error));
    CFT__TRY(cf_parallel_validate(desc->model, &desc->parallel, error));
    full.parallel = cf_parallel_defaults(&desc->parallel);
    CFT__TRY(cft__check_found(desc->gpu, "gpu", error));
    CFT__TRY(cft__check_gpu(desc->gpu, error));
    if (full.gpus_per_node == 0) full.gpus_per_node = 8;
    CFT__TRY(cft__range(full.gpus_per_node, 1, CF_MAX_RANKS, CF_ERROR_LIMIT, "gpus_per_node", -1, error));
    CFT__TRY(cft__range(full.chunk_size, 0, CF_MAX_CHUNK_SIZE, CF_ERROR_LIMIT, "chunk_size", -1, error));
    CFT__TRY(cft__range(full.stream, 0, 1, CF_ERROR_ARGUMENT, "stream", -1, error));
    CFT__TRY(cft__range(full.unfused, 0, 1, CF_ERROR_ARGUMENT, "unfused", -1, error));
    CFT__TRY(cft__range(full.max_cp, 0, CF_MAX_RANKS, CF_ERROR_LIMIT, "max_cp", -1, error));
    CFT__TRY(cft__range(full.outputs, 0, 2, CF_ERROR_ARGUMENT, "outputs", -1, error));
    if (full.outputs && full.parallel.recompute == CF_RECOMPUTE_FULL)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "outputs", -1, "are dropped again with full recomputation");
    CFT__TRY(cft__check_offload(&full, error));
    if (count != full.parallel.pp * full.parallel.n_virtual)
        return cf_fail(error, CF_ERROR_ARGUMENT, "count", -1, full.parallel.pp * full.parallel.n_virtual, count,
                       "must be the number of virtual stages");
    CFT__TRY(cf_stage_shard(full.model, &full.parallel, 0, -1, &first, error));
    CFT__TRY(cft__step_seconds(&full, &step, error));
    for (s = 0; s < count; s++) {
        (void)cf_stage_shard(full.model, &full.parallel, s, -1, &shard, error); /* succeeds, because the first stage
                                                                                   did */
        most_layers = cft__max(most_layers, shard.layers);
        if (cft__row_bytes(&full, s) > row_bytes) row_bytes = cft__row_bytes(&full, s);
        if (cft__stage_scan_seconds(&full, s) > scan) scan = cft__stage_scan_seconds(&full, s);
    }
    transfers = cft__transfer_timing(&full, &first, most_layers, row_bytes);
    transfers.scan_forward = transfers.scan_backward = scan;
    CFT__TRY(cft__check_estimate(&full, count, &transfers, step, error));
    for (s = 0; s < count; s++) stages[s] = cft__stage_seconds(&full, s);
    *timing = transfers;
    timing->stages = stages;
    if (step_seconds != NULL) *step_seconds = step;
    return CF_OK;
}

/* ================================================================================================================
   >>tune

   First every ChunkSize, K and replay gets, for every batch, a lower bound of its time and of its memory. Then the
   candidates are simulated in rounds, smallest bounds first. A family is a set of candidates that differ only in
   replay, recomputation and window. The families of a round are tried independently; the results of a round decide what
   the next round leaves out. So the answer does not depend on how many families run at the same time.
   ================================================================================================================
   */

CHUNKFLOW_TUNE_API const char *cf_tune_status_name(cf_tune_status status) {
#define CFT__NAME(name, text) case name: return text;
    switch ((int)status) { CF_TUNE_STATUSES(CFT__NAME) }
#undef CFT__NAME
    return "?";
}

enum {
    CFT__SIZES = 9, /* number of default ChunkSizes, the longest sequence included */
    CFT__EVEN = 8,  /* maximum number of ChunkSizes tried because they divide a batch evenly */
    CFT__FEW = 64,  /* even sizes are tried if a rank has at most this many chunks; with more, one partly filled chunk
                       matters little */
    CFT__UNIT = 128 /* even sizes are multiples of this, which suits kernels */
};

CHUNKFLOW_TUNE_API cf_tune_desc cf_tune_defaults(const cf_tune_desc *desc) {
    static const int64_t chunk_sizes[CFT__SIZES - 1] = {1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072};
    static const int64_t ks[] = {1, 2, 4, 8, 16, 32};
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    static const cf_schedule_kind virtual_kinds[] = {CF_SCHEDULE_INTERLEAVED, CF_SCHEDULE_BEST};
    static const cf_replay local = CF_REPLAY_LOCAL;
    cf_tune_desc full;
    memset(&full, 0, sizeof full);
    if (desc != NULL) full = *desc;
    if (full.gpus_per_node == 0) full.gpus_per_node = 8;
    if (full.chunk_sizes == NULL) {
        full.chunk_sizes = chunk_sizes;
        full.n_chunk_sizes = CFT__COUNT(chunk_sizes);
    }
    if (full.ks == NULL) {
        full.ks = ks;
        full.n_ks = CFT__COUNT(ks);
    }
    if (full.kinds == NULL) {
        int many = full.parallel.n_virtual > 1;
        int turns = many && full.parallel.placement == CF_PLACEMENT_V; /* V excludes interleaved */
        full.kinds = many ? &virtual_kinds[turns] : kinds;
        full.n_kinds = many ? CFT__COUNT(virtual_kinds) - turns : CFT__COUNT(kinds);
    }
    if (full.replays == NULL) {
        full.replays = &local;
        full.n_replays = 1;
    }
    if (full.batch == 0) full.batch = 256;
    if (full.n_batches == 0) full.n_batches = 16;
    if (full.reserve == 0) full.reserve = CF_TUNE_RESERVE;
    if (full.tolerance >= 0 && full.tolerance <= 0) full.tolerance = 0.01;
    return full;
}

CHUNKFLOW_TUNE_API int64_t cf_tune_max_tries(const cf_plan *plan, int64_t n_stages, int64_t n_virtual) {
    int64_t stages = 0, passes = 0;
    if (plan == NULL || plan->chunks_per_rank < 0 || n_stages < 1 || n_virtual < 1) return 0;
    cft__add_product(&stages, n_stages, n_virtual);
    cft__add_product(&passes, plan->chunks_per_rank, stages);
    return cft__max(8, cft__min(64, 10000 / cft__max(1, passes)));
}

/* ---- statistics ---- */

/* Returns the square root, by Newton's method from above: the same on every platform, without libm. */
static double cft__square_root(double x) {
    double root = x > 1 ? x : 1, next;
    if (!(x > 0)) return 0;
    for (;;) {
        next = (root + x / root) / 2;
        if (!(next < root)) return root;
        root = next;
    }
}

CHUNKFLOW_TUNE_API double cf_tune_confidence(const double *sample, const double *minus, int64_t n) {
    static const double t[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
                               2.201,  2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
                               2.080,  2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042};
    double mean = 0, squares = 0, quantile;
    int64_t i;
    if (n < 2) return 0;
    for (i = 0; i < n; i++) mean += (sample[i] - (minus != NULL ? minus[i] : 0)) / (double)n;
    for (i = 0; i < n; i++) {
        double off = sample[i] - (minus != NULL ? minus[i] : 0) - mean;
        squares += cft__product(off, off);
    }
    quantile = n - 1 <= CFT__COUNT(t) ? t[n - 2] : 1.95996 + 2.45 / (double)(n - 1);
    quantile *= cft__square_root(squares / (double)(n - 1) / (double)n);
    return quantile > cft__product(1e-12, sample[0]) ? quantile : 0; /* less than this is rounding of equal numbers */
}

/* ---- the data of the search ---- */

/* Bytes x 100 per token that a virtual stage holds or (CFT__CHUNK) per token of the chunk in a pass. The factor 100 is
   there because the allocator's loss in gaps is given in percent. */
enum { CFT__ACTIVATIONS, CFT__STATE, CFT__GRADIENT, CFT__INPUT, CFT__CHUNK, CFT__PARTS };

typedef struct cft__weights {
    int64_t of[CFT__PARTS];
    int64_t carry;  /* once per chain in backward */
    int64_t dropped; /* per token of dropped chunks, if these are kept in host memory */
    int64_t staged;  /* per token of the chunk in a pass, doubled: the part of `dropped` that is on the device */
} cft__weights;

/* Lists of choices, the one that changes slowest first. A "point" is a candidate without its kind and window: bounds of
   time are found for each point, bounds of memory for each point and window. */
enum { CFT__SPLIT, CFT__SIZE, CFT__K, CFT__KIND, CFT__REPLAY, CFT__LEVEL, CFT__WINDOW, CFT__LISTS };

/* Recomputations, from the cheapest to the one that frees most. A module has no level of its own if others free as much
   at less cost. With fused attention, recomputing its inside frees nothing; norms cost as little as the activation. */
static const struct {
    cf_recompute what;
    int64_t part; /* recomputes 1 / part of a stage's layers */
    int offload;
} cft__levels[] = {{CF_RECOMPUTE_NONE, 1, 0}, {CF_RECOMPUTE_ACT, 1, 0},  {CF_RECOMPUTE_MLP, 2, 0},
                   {CF_RECOMPUTE_MLP, 1, 0},  {CF_RECOMPUTE_FULL, 1, 0},
                   {CF_RECOMPUTE_FULL, 1, CF_OFFLOAD_CHECKPOINTS}};

/* A stage of the current split. */
typedef struct cft__stage {
    cft__weights all;  /* sums over its virtual stages */
    cft__weights most; /* the largest of each weight */
    int64_t fixed;     /* bytes x 100 that it always holds */
    int64_t room;      /* bytes x 100 for everything that depends on the schedule, except the largest chunk in a pass */
    cf_action peak;    /* the pass of the current schedule during which the stage holds most */
    int64_t before;    /* number of passes before `peak` in its list */
    int64_t host;      /* bytes in host memory */
} cft__stage;

/* The batches as packed for a split and ChunkSize. */
typedef struct cft__packing {
    int64_t most_chunks; /* of a chain, or of a path of a tree */
    double work[2];      /* mean work of a batch: [0] in a fixed kind, [1] in best */
} cft__packing;

/* A family's or batch's place in the order; the least key comes first. */
typedef struct cft__turn {
    double key;
    int64_t first; /* the family's first candidate, or the batch */
} cft__turn;

typedef struct cft__tuner {
    cf_tune_desc desc;       /* defaults filled in */
    int64_t longest;         /* tokens of the longest sequence that must fit in memory */
    int64_t sizes[CFT__SIZES]; /* desc.chunk_sizes if none were given */
    const int64_t *lengths;
    int64_t n;
    cf_error *error;         /* the caller's record until the search starts; then `record` */
    cf_error record;         /* for errors in the search that are not failures of the search */
    cf_allocator allocator;
    cf_tuning header;        /* initial value of *tuning */
    cf_tuning *tuning;
    cf_plan *trees;              /* the whole list packed, whose `order` puts the sequences of a tree next to each
                                    other; NULL: no sequences share a prefix */
    int64_t counts[CFT__LISTS];  /* length of each list */
    int outputs;                 /* where dropped chunks keep outputs, as in cf_memory_desc */
    int moves;                   /* 1: outputs are on the GPU if they fit there, else in host memory */
    int64_t windows[2];          /* the last list: rows of the ring through which state streams; 0: no stream */
    int64_t strides[CFT__LISTS]; /* distance to the candidate with the next choice of that list, all else equal */
    int64_t most_virtual;    /* virtual stages of the deepest split */
    int64_t room;            /* for candidates of even sizes, after the others */

    int32_t *pool;           /* (n) shuffled: sequences of the list, or the places in `trees` where its trees begin */
    int splits;              /* 1: some kind may split a backward */
    double *bounds;          /* (n_candidates x n_batches) lower bounds of times */
    cft__turn *turns;        /* (n_families) in the order of the search */
    cft__turn *order;        /* (n_batches) the batches in the order in which candidates try them */
    int64_t n_families, family; /* family: number of candidates in one */
    cft__packing *packings;  /* (n_splits x n_chunk_sizes), see cft__packing_of */

    /* of the current split and ChunkSize */
    cf_parallel split;       /* with the recomputation of the candidate */
    cf_memory_desc memory;   /* of the candidate, or of those with the same description of memory */
    cf_timing timing;
    double step_seconds;
    cf_stage_cost *costs;    /* (most_virtual) */
    cft__weights *weights;   /* (most_virtual) */
    cft__stage *stages;      /* (most_virtual) */
    int64_t *limits;         /* (most_virtual) in bytes x 100, for schedules under the limit */
    cf_memory_load *loads;   /* (most_virtual) at the heaviest pass of its stage */
    cf_memory_load *streamed; /* (most_virtual) `loads` with the maximum of everything that streams: for host memory */
    cf_memory_report *reports; /* (most_virtual) */
    int64_t fullest;         /* the first stage with the most bytes in `reports` */
    struct cft__relief *reliefs; /* (strides[CFT__REPLAY]) of the split and ChunkSize being bounded */

    /* of the current batch and schedule; each lives until the next one is made */
    cf_plan *plan;           /* with cp groups: the columns of `packed` */
    cf_plan *packed;         /* NULL: `plan` is the packed one */
    cf_schedule *schedule;
    cf_timeline *timeline;

    int part;                /* current phase of the search: CFT__BOUNDS and so on */
    double worked;           /* work done so far, see cft__report_done */
    /* for a worker: `worked` when it was started, and the value expected at the end of its piece */
    double began, due;
    double expected;         /* expected `worked` at the end of the search */
    /* mean work for bounding a split and ChunkSize; mean number of batches in a family's tries */
    double of_bounds, of_tries;
    double reported;         /* the part of `worked` that the caller was told of */
    int64_t simulated;
    int stop;

    struct cft__tuner *workers; /* (CFT__ROUND) one for each piece of work that may run concurrently */
    cf_result (*work)(struct cft__tuner *worker, int64_t first); /* does the work of a family */
    int64_t first_index;     /* first turn of the current round */
    cf_result result;        /* of a worker */
} cft__tuner;

enum { CFT__ROUND = 16 }; /* maximum pieces of work in a round */

/* Returns the index into `list` of candidate `id`'s choice. */
static int64_t cft__index(const cft__tuner *t, int64_t id, int list) {
    return id / t->strides[list] % t->counts[list];
}

/* Returns the data about all batches as packed for candidate `id`. */
static cft__packing *cft__packing_of(const cft__tuner *t, int64_t id) {
    return &t->packings[id / t->strides[CFT__SIZE]];
}

enum { CFT__BOUNDS, CFT__TRIES };

/* Reports the work done and expected. Work is counted, not timed: 1 for each pass in each try of best, about 0.1 us. A
   fixed kind counts 2 for a pass, and other work in proportion to its time. */
static void cft__report_done(cft__tuner *t) {
    cf_tune_progress progress;
    if (t->desc.progress == NULL || t->stop) return;
    progress.done = (int64_t)(t->worked - t->reported);
    progress.left = cft__max((int64_t)(t->expected - (t->worked < t->due ? t->worked : t->due)), 0);
    t->reported += (double)progress.done;
    progress.best = t->tuning->winner >= 0 ? &t->tuning->candidates[t->tuning->winner] : NULL;
    if (t->desc.progress(t->desc.user, &progress) != 0) t->stop = 1;
}

/* ---- splits ---- */

/* Returns whether every rank has a sequence, or its part of one. */
static int cft__has_sequences(const cf_tune_desc *desc, const cf_parallel *split, int64_t max_cp) {
    return (split->dp - 1) / cft__max(max_cp, 1) < desc->batch;
}

/* Returns whether a split matches the request, suits model and machine, and gives every rank a sequence or its part of
   one. */
static int cft__split_fits(const cf_tune_desc *desc, const cf_parallel *split) {
    const cf_parallel *fixed = &desc->parallel;
    if (fixed->tp > 0 ? split->tp != fixed->tp : split->tp > desc->gpus_per_node) return 0;
    if (fixed->dp > 0 ? split->dp != fixed->dp : !cft__has_sequences(desc, split, desc->pack.max_cp)) return 0;
    if (fixed->pp > 0 && split->pp != fixed->pp) return 0;
    return cf_parallel_validate(desc->model, split, NULL) == CF_OK;
}

/* Returns the largest valid ep, at most `most`: the number of GPUs that share a layer's experts. 0: no experts, or no
   ep above 1 is valid. If ep is given, returns it. */
static int64_t cft__most_ep(const cf_tune_desc *desc, const cf_parallel *of, int64_t most) {
    cf_parallel split = *of;
    cf_parameters counted;
    if (desc->parallel.ep != 0 || cf_model_parameters(desc->model, &counted, NULL) != CF_OK) return desc->parallel.ep;
    if (counted.experts == 0) return 0;
    for (split.ep = cft__min(most, split.tp * split.dp); split.ep > 1; split.ep--)
        if (cf_parallel_validate(desc->model, &split, NULL) == CF_OK) return split.ep;
    return 0;
}

/* Returns whether ZeRO is searched for. */
static int cft__searches_zero(const cf_tune_desc *desc) { return desc->n_gpus > 0 && desc->parallel.zero == 0; }

/* Returns the given part of the split, with a valid ZeRO level. */
static cf_parallel cft__given_split(const cf_tune_desc *desc) {
    cf_parallel split = desc->parallel;
    if (desc->n_gpus > 0 && split.zero == -1) split.zero = 0;
    return split;
}

/* Adds a split, and copies of it with cp groups of every requested width that divides its ranks. Returns the new number
   of splits. out: the tuning to write to; NULL: only counts. */
static int64_t cft__add_cp_groups(const cf_tune_desc *desc, const cf_parallel *split, cf_tuning *out, int64_t n) {
    int64_t cp, ranks = cft__max(split->dp, 1), most = desc->pack.max_cp;
    if (desc->timing != NULL || desc->model == NULL) most = 0;
    for (cp = 0; cp <= cft__min(most, ranks) && ranks % cft__max(cp, 1) == 0; cp = cft__max(2 * cp, 2)) {
        if (desc->parallel.dp == 0 && !cft__has_sequences(desc, split, cp)) continue;
        if (n++, out == NULL) continue;
        out->splits[n - 1] = cf_parallel_defaults(split);
        out->splits[n - 1].zero = split->zero;
        out->max_cps[n - 1] = cp;
    }
    return n;
}

/* Returns whether the ranks of a split meet in every pass: with ZeRO 3 to gather parameters, with experts over GPUs to
   exchange rows. */
static int cft__meets(const cf_tune_desc *desc, const cf_parallel *split) {
    return desc->model != NULL && split->dp > 1 && (split->zero > 2 || split->ep > 1);
}

/* Returns whether sequences may share prefixes. Trees have no columns, so their ranks cannot run in lockstep. */
static int cft__shares(const cf_tune_desc *desc) {
    return desc->pack.shared_prefixes != NULL && desc->pack.min_shared_prefix < INT64_MAX;
}

/* Adds a split with each ZeRO level that is searched for: 2 and 3 without a pipeline, but only 3 if parameters are in
   host memory. With shared prefixes, splits whose ranks meet are left out. */
static int64_t cft__add_split(const cf_tune_desc *desc, const cf_parallel *split, cf_tuning *out, int64_t n) {
    cf_parallel level = *split;
    int64_t last = split->zero;
    if (cft__searches_zero(desc)) {
        level.zero = desc->memory.offload & CF_OFFLOAD_PARAMETERS ? 3 : 1;
        last = split->pp == 1 && split->dp > 1 ? 3 : level.zero;
    }
    for (;; level.zero++) { /* a given level may be any number */
        if (!cft__shares(desc) || !cft__meets(desc, &level)) n = cft__add_cp_groups(desc, &level, out, n);
        if (level.zero >= last) return n;
    }
}

/* Writes the splits to `out` by rising tp, then pp, ep, ZeRO and cp group; with NULL only counts them. Experts are
   tried on as many GPUs of a node as possible, and on as many of all. */
static int64_t cft__list_splits(const cf_tune_desc *desc, cf_tuning *out) {
    int64_t n = 0, i, gpus = desc->n_gpus, most;
    cf_parallel split = cft__given_split(desc);
    if (gpus == 0) return cft__add_split(desc, &split, out, 0);
    for (split.tp = 1; split.tp <= gpus && split.tp <= desc->model->heads; split.tp++) {
        if (gpus % split.tp != 0) continue;
        for (split.pp = 1; split.pp <= gpus / split.tp && split.pp <= desc->model->layers; split.pp++) {
            split.dp = gpus / split.tp / split.pp;
            split.ep = desc->parallel.ep;
            if (split.tp * split.pp * split.dp != gpus || !cft__split_fits(desc, &split)) continue;
            n = cft__add_split(desc, &split, out, n);
            for (i = 0; i < 2; i++) {
                most = cft__most_ep(desc, &split, i == 0 ? desc->gpus_per_node : gpus);
                if (most == split.ep) continue;
                split.ep = most;
                n = cft__add_split(desc, &split, out, n);
            }
        }
    }
    return n;
}

/* ---- checks of the description ---- */

static cf_result cft__check_rising(const int64_t *values, int64_t n, int64_t most, const char *field,
                                   const char *count, cf_error *error) {
    int64_t i;
    CFT__TRY(cft__range(n, 1, CF_MAX_CANDIDATES, CF_ERROR_LIMIT, count, -1, error));
    for (i = 0; i < n; i++) {
        int64_t least = i > 0 ? values[i - 1] + 1 : 1;
        if (i > 0 && values[i] < least)
            return cf_fail(error, CF_ERROR_ARGUMENT, field, i, least, values[i], "must be more than the one before");
        CFT__TRY(cft__range(values[i], least, most, CF_ERROR_LIMIT, field, i, error));
    }
    return CF_OK;
}

/* Checks an item of a list of choices. *seen: a bit for each earlier item. */
static cf_result cft__check_choice(int64_t choice, int64_t count, const char *field, int64_t item, uint32_t *seen,
                                   cf_error *error) {
    CFT__TRY(cft__range(choice, 1, count - 1, CF_ERROR_ARGUMENT, field, -1, error));
    if (*seen >> choice & 1) return cf_refuse(error, CF_ERROR_ARGUMENT, field, item, "is in the list already");
    *seen |= (uint32_t)1 << choice;
    return CF_OK;
}

/* Refuses a member without the member that it needs. given: the caller's options, without defaults. */
static cf_result cft__check_needs(const cf_tune_desc *given, cf_error *error) {
    const struct {
        const char *field;
        int64_t value;
        int there;
        const char *why;
    } members[] = {
        {"n_chunk_sizes", given->n_chunk_sizes, given->chunk_sizes != NULL, "needs chunk_sizes"},
        {"n_ks", given->n_ks, given->ks != NULL, "needs ks"},
        {"n_kinds", given->n_kinds, given->kinds != NULL, "needs kinds"},
        {"n_replays", given->n_replays, given->replays != NULL, "needs replays"},
        {"pack.max_cp", given->pack.max_cp > 1 ? given->pack.max_cp : 0,
         given->model != NULL && given->gpu != NULL && given->timing == NULL,
         "needs estimated costs: a model and a gpu, whose links price it, without timing"},
        {"no_stream", given->no_stream, given->memory.state_window == 0, "needs memory.state_window to be 0"},
        {"no_outputs", given->no_outputs, given->memory.outputs == 0, "needs memory.outputs to be 0"}};
    int64_t i;
    for (i = 0; i < CFT__COUNT(members); i++)
        if (members[i].value != 0 && !members[i].there)
            return cf_fail(error, CF_ERROR_ARGUMENT, members[i].field, -1, 0, members[i].value, members[i].why);
    CFT__TRY(cft__range(given->no_stream, 0, 1, CF_ERROR_ARGUMENT, "no_stream", -1, error));
    CFT__TRY(cft__range(given->no_outputs, 0, 1, CF_ERROR_ARGUMENT, "no_outputs", -1, error));
    if (given->step_seconds > 0 && given->timing == NULL)
        return cf_fail_real(error, CF_ERROR_ARGUMENT, "step_seconds", -1, given->step_seconds, "needs timing");
    return CF_OK;
}

static cf_result cft__check_lists(const cf_tune_desc *desc, cf_error *error) {
    uint32_t kinds = 0, replays = 0;
    int64_t i;
    CFT__TRY(cft__check_rising(desc->chunk_sizes, desc->n_chunk_sizes, CF_MAX_CHUNK_SIZE, "chunk_sizes",
                               "n_chunk_sizes", error));
    CFT__TRY(cft__check_rising(desc->ks, desc->n_ks, INT32_MAX, "ks", "n_ks", error));
    CFT__TRY(cft__range(desc->n_kinds, 1, CF_SCHEDULE_COUNT - 1, CF_ERROR_LIMIT, "n_kinds", -1, error));
    for (i = 0; i < desc->n_kinds; i++) {
        cf_schedule_kind kind = desc->kinds[i];
        CFT__TRY(cft__check_choice((int)kind, CF_SCHEDULE_COUNT, "kinds", i, &kinds, error));
        if (desc->parallel.n_virtual > 1 && kind != CF_SCHEDULE_INTERLEAVED && kind != CF_SCHEDULE_ZERO_BUBBLE &&
            kind != CF_SCHEDULE_BEST)
            return cf_fail(error, CF_ERROR_ARGUMENT, "kinds", i, CF_SCHEDULE_BEST, (int)kind,
                           "cannot use virtual stages");
        if (desc->parallel.placement == CF_PLACEMENT_V && kind != CF_SCHEDULE_ZERO_BUBBLE && kind != CF_SCHEDULE_BEST)
            return cf_fail(error, CF_ERROR_ARGUMENT, "kinds", i, CF_SCHEDULE_BEST, (int)kind,
                           "cannot lay virtual stages in a V");
    }
    if (desc->split_backward && !(kinds & ((uint32_t)1 << CF_SCHEDULE_BEST | (uint32_t)1 << CF_SCHEDULE_ZERO_BUBBLE)))
        return cf_fail(error, CF_ERROR_ARGUMENT, "split_backward", -1, 0, desc->split_backward,
                       "needs best among kinds");
    CFT__TRY(cft__range(desc->split_backward, 0, 1, CF_ERROR_ARGUMENT, "split_backward", -1, error));
    if (desc->pack.max_cp > 1 && (desc->split_backward || kinds == (uint32_t)1 << CF_SCHEDULE_ZERO_BUBBLE))
        return cf_refuse(error, CF_ERROR_ARGUMENT, desc->split_backward ? "split_backward" : "kinds", -1,
                         "cp groups keep backwards whole, as their columns price them");
    if (desc->pack.max_cp > 1 && desc->parallel.n_virtual > 1)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "pack.max_cp", -1, "virtual stages have no cp groups");
    CFT__TRY(cft__range(desc->n_replays, 1, CF_REPLAY_COUNT - 1, CF_ERROR_LIMIT, "n_replays", -1, error));
    for (i = 0; i < desc->n_replays; i++) {
        if ((int)desc->replays[i] < CF_REPLAY_LOCAL && kinds != (uint32_t)1 << CF_SCHEDULE_PAPER)
            return cf_fail(error, CF_ERROR_ARGUMENT, "replays", -1, CF_REPLAY_LOCAL, (int)desc->replays[i],
                           "only paper replays through the pipeline, and other kinds are to be tried");
        CFT__TRY(cft__check_choice((int)desc->replays[i], CF_REPLAY_COUNT, "replays", i, &replays, error));
    }
    return CF_OK;
}

/* Checks that costs come from a GPU or are measured. Measured costs are checked when the first schedule is made. */
static cf_result cft__check_costs(const cf_tune_desc *desc, cf_error *error) {
    if (desc->timing == NULL && desc->model == NULL) return cf_fail_null(error, "timing");
    if (desc->timing == NULL) CFT__TRY(cft__check_found(desc->gpu, "gpu", error));
    if (desc->gpu != NULL) CFT__TRY(cft__check_gpu(desc->gpu, error));
    CFT__TRY(cft__check_time(desc->step_seconds, "step_seconds", error));
    if (desc->timing != NULL && desc->n_gpus > 0)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "timing", -1, "is for one split, so n_gpus cannot be searched");
    return CF_OK;
}

/* Refuses options that ranks with trees do not support. */
static cf_result cft__check_shares(const cf_tune_desc *desc, cf_error *error) {
    cf_parallel most = desc->parallel;
    if (desc->pack.shared_prefixes != NULL && desc->pack.max_cp > 1)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "pack.max_cp", -1, "trees are not spread over several ranks");
    if (!cft__shares(desc)) return CF_OK;
    if (desc->pack.lockstep)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "pack.lockstep", -1, "trees are not laid out for ranks in step");
    if (most.dp == 0) most.dp = desc->n_gpus;
    if (!cft__meets(desc, &most)) return CF_OK;
    return cf_refuse(error, CF_ERROR_ARGUMENT, most.zero > 2 ? "parallel.zero" : "parallel.ep", -1,
                     "needs ranks in step, which shared prompts cannot have");
}

/* Checks a model's split, or the given part of it. */
static cf_result cft__check_split(const cf_tune_desc *desc, cf_error *error) {
    const cf_parallel *parallel = &desc->parallel, given = cft__given_split(desc);
    cf_tune_desc nearest = *desc;
    int64_t fixed, most;
    CFT__TRY(cft__check_found(desc->model, "model", error));
    CFT__TRY(cf_model_validate(desc->model, error));
    if (desc->bytes != NULL)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "bytes", -1, "stand in place of a model, but one is given");
    if (desc->n_gpus == 0) return cf_parallel_validate(desc->model, parallel, error);
    CFT__TRY(cft__range(parallel->tp, 0, CF_MAX_RANKS, CF_ERROR_LIMIT, "parallel.tp", -1, error));
    CFT__TRY(cft__range(parallel->pp, 0, CF_MAX_LAYERS, CF_ERROR_LIMIT, "parallel.pp", -1, error));
    CFT__TRY(cft__range(parallel->dp, 0, CF_MAX_RANKS, CF_ERROR_LIMIT, "parallel.dp", -1, error));
    fixed = cft__max(parallel->tp, 1) * cft__max(parallel->pp, 1) * cft__max(parallel->dp, 1);
    most = CF_MAX_RANKS / fixed * fixed; /* 0: the given part has too many GPUs already */
    CFT__TRY(cft__range(desc->n_gpus, most > 0 ? fixed : 1, most > 0 ? most : CF_MAX_RANKS, CF_ERROR_LIMIT, "n_gpus",
                        -1, error));
    if (parallel->layers != NULL && parallel->pp == 0)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "parallel.layers", -1, "cannot be given while pp is searched for");
    if (cft__list_splits(desc, NULL) > 0) return CF_OK;
    CFT__TRY(cf_parallel_validate(desc->model, &given, error)); /* an error for any number of GPUs */
    nearest.n_gpus = cft__div_up(desc->n_gpus, fixed) * fixed;
    if (nearest.n_gpus > most || cft__list_splits(&nearest, NULL) == 0)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "n_gpus", -1,
                         "cannot be split over heads, layers and the sequences of a batch");
    return cf_fail(error, CF_ERROR_ARGUMENT, "n_gpus", -1, nearest.n_gpus, desc->n_gpus,
                   "there is no way to split the model over so many");
}

/* Checks the stages and the bytes of each, which a description without a model gives. */
static cf_result cft__check_bytes(const cf_tune_desc *desc, cf_error *error) {
    cf_parallel split = cf_parallel_defaults(&desc->parallel);
    int64_t v;
    if (desc->n_gpus != 0) return cf_refuse(error, CF_ERROR_ARGUMENT, "n_gpus", -1, "needs a model to split");
    CFT__TRY(cft__range(split.pp, 1, CF_MAX_STAGES, CF_ERROR_LIMIT, "parallel.pp", -1, error));
    CFT__TRY(cft__range(split.n_virtual, 1, CF_MAX_STAGES / split.pp, CF_ERROR_LIMIT, "parallel.n_virtual", -1, error));
    if (split.placement != CF_PLACEMENT_LOOP && split.placement != CF_PLACEMENT_V)
        return cf_fail(error, CF_ERROR_ARGUMENT, "parallel.placement", -1, CF_PLACEMENT_V, (int)split.placement,
                       "must be loop or v");
    CFT__TRY(cft__range(split.dp, 1, CF_MAX_RANKS, CF_ERROR_LIMIT, "parallel.dp", -1, error));
    for (v = 0; v < split.pp * split.n_virtual; v++) {
        const cf_stage_bytes *b = &desc->bytes[v];
        const struct {
            const char *field;
            int64_t value, least;
        } members[] = {{"bytes.held.activations", b->held.activations, 1},
                       {"bytes.held.state", b->held.state, 0},
                       {"bytes.held.state_gradient", b->held.state_gradient, 0},
                       {"bytes.held.boundary", b->held.boundary, 0},
                       {"bytes.per_token_pass", b->per_token_pass, 0},
                       {"bytes.fixed", b->fixed, 0}};
        int64_t i;
        for (i = 0; i < CFT__COUNT(members); i++)
            CFT__TRY(cft__range(members[i].value, members[i].least, CF_MAX_STAGE_BYTES, CF_ERROR_LIMIT,
                                members[i].field, v, error));
    }
    return CF_OK;
}

static cf_result cft__check_memory(const cf_tune_desc *desc, cf_error *error) {
    cf_memory_desc memory = desc->memory;
    cf_token_bytes unused;
    if (desc->model != NULL) {
        memset(&memory.parallel, 0, sizeof memory.parallel);
        memory.parallel.recompute = desc->parallel.recompute;
        memory.parallel.zero = cft__searches_zero(desc) ? 3 : cft__given_split(desc).zero;
        CFT__TRY(cf_memory_token_bytes(&memory, 0, &unused, error));
        if (memory.unfused_attention)
            return cf_refuse(error, CF_ERROR_ARGUMENT, "memory.unfused_attention", -1,
                             "must be 0: long sequences need attention that does not write out its scores");
    }
    if (desc->limit_bytes == 0 && desc->gpu == NULL)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "limit_bytes", -1, "must be given where there is no gpu");
    if (desc->limit_bytes == 0)
        return cft__range(desc->gpu->memory, 1, INT64_MAX / 1000, CF_ERROR_LIMIT, "gpu.memory", -1, error);
    return cft__range(desc->limit_bytes, desc->gpu == NULL, INT64_MAX / 1000, CF_ERROR_LIMIT, "limit_bytes", -1, error);
}

/* Returns whether some layer can keep attention's outputs. */
static int cft__keeps_outputs(const cf_model *model) {
    const cf_parallel whole = cf_parallel_defaults(NULL);
    cf_shard shard;
    int64_t k;
    for (k = 0; cf_stage_shard(model, &whole, 0, k, &shard, NULL) == CF_OK; k++)
        if (shard.outputs) return 1;
    return 0;
}

/* Lists the reliefs of memory: streams if state does not fit, recomputation if activations do not. With measured costs
   there are none, because the cost of a relief is unknown. Outputs are not a choice: kept in host memory they take
   hardly any bytes of the GPU, and little time. */
static void cft__list_reliefs(cft__tuner *t) {
    const cf_tune_desc *desc = &t->desc;
    int estimated = desc->model != NULL && desc->timing == NULL;
    int searched = estimated && desc->parallel.recompute == CF_RECOMPUTE_DEFAULT;
    t->counts[CFT__LEVEL] = searched ? CFT__COUNT(cft__levels) : 1;
    t->moves = estimated && !desc->memory.outputs && !desc->no_outputs && cft__keeps_outputs(desc->model);
    t->outputs = t->moves ? 2 : desc->memory.outputs;
    t->windows[0] = desc->model != NULL ? desc->memory.state_window : 0;
    t->windows[1] = CF_TUNE_WINDOW;
    t->counts[CFT__WINDOW] = 1;
    if (t->windows[0] == 0 && !desc->no_stream && desc->model != NULL && desc->timing == NULL)
        t->counts[CFT__WINDOW] = 2;
}

/* Counts the candidates. */
static cf_result cft__count_candidates(cft__tuner *t) {
    cf_tuning *header = &t->header;
    const cf_tune_desc *desc = &t->desc;
    int64_t of_a_size, i;
    for (i = 0; i < desc->n_kinds; i++) {
        t->splits |= desc->kinds[i] == CF_SCHEDULE_ZERO_BUBBLE;
        if (desc->kinds[i] == CF_SCHEDULE_BEST) t->splits |= desc->split_backward != 0;
    }
    header->n_splits = cft__list_splits(desc, NULL);
    header->n_batches = desc->n_batches;
    header->batch = desc->batch;
    t->counts[CFT__SPLIT] = header->n_splits;
    t->counts[CFT__SIZE] = desc->n_chunk_sizes;
    t->counts[CFT__K] = desc->n_ks;
    t->counts[CFT__KIND] = desc->n_kinds;
    t->counts[CFT__REPLAY] = desc->n_replays;
    cft__list_reliefs(t);
    t->strides[CFT__WINDOW] = 1;
    for (i = CFT__WINDOW; i > 0; i--) t->strides[i - 1] = t->strides[i] * t->counts[i];
    of_a_size = header->n_splits * t->strides[CFT__SIZE];
    if (desc->n_chunk_sizes > CF_MAX_CANDIDATES / of_a_size)
        return cf_fail(t->error, CF_ERROR_LIMIT, "n_chunk_sizes", -1, CF_MAX_CANDIDATES / of_a_size,
                       desc->n_chunk_sizes, "makes too many candidates");
    header->n_candidates = desc->n_chunk_sizes * of_a_size;
    header->limit_bytes = desc->limit_bytes;
    if (desc->limit_bytes == 0)
        header->limit_bytes = desc->gpu->memory - desc->gpu->memory / 100 * cft__max(desc->reserve, 0);
    header->winner = -1;
    header->allocator = t->allocator;
    return CF_OK;
}

/* Inserts the longest sequence into the default ChunkSizes. Chunks of that size split nothing, so the result is at
   least as good as 1F1B on packed sequences. Skips a length that cannot be a ChunkSize. */
static void cft__add_longest(cft__tuner *t) {
    int64_t align = cft__max(t->desc.pack.align, 1), longest = 0, i, n;
    for (i = 0; i < t->n; i++) longest = cft__max(longest, t->lengths[i]);
    if (longest < 1 || longest > CF_MAX_CHUNK_SIZE || align > CF_MAX_CHUNK_SIZE) return;
    longest = cft__div_up(longest, align) * align;
    if (longest > CF_MAX_CHUNK_SIZE) return;
    for (n = 0; n < t->desc.n_chunk_sizes && t->desc.chunk_sizes[n] < longest; n++)
        t->sizes[n] = t->desc.chunk_sizes[n];
    if (n < t->desc.n_chunk_sizes && t->desc.chunk_sizes[n] == longest) return;
    t->sizes[n] = longest;
    for (i = n; i < t->desc.n_chunk_sizes; i++) t->sizes[i + 1] = t->desc.chunk_sizes[i];
    t->desc.chunk_sizes = t->sizes;
    t->desc.n_chunk_sizes++;
}

static int64_t cft__longest_of(const int64_t *lengths, int64_t n) {
    int64_t i, longest = 0;
    for (i = 1; i < n; i++)
        if (lengths[i] > lengths[longest]) longest = i;
    return longest;
}

/* Fills in desc, n, lengths and the counts of the result. Reports every error that can be found without working
   space. */
static cf_result cft__start(cft__tuner *t, const int64_t *lengths, int64_t n, const cf_tune_desc *desc,
                            cf_error *error) {
    memset(t, 0, sizeof *t);
    if (desc == NULL) return cf_fail_null(error, "desc");
    if (lengths == NULL) return cf_fail_null(error, "lengths");
    CFT__TRY(cft__range(n, 1, CF_MAX_SEQUENCES, CF_ERROR_LIMIT, "n", -1, error));
    t->desc = cf_tune_defaults(desc);
    t->desc.memory.model = desc->model;
    t->lengths = lengths;
    t->n = n;
    t->error = error;
    t->longest = cft__max(desc->context, lengths[cft__longest_of(lengths, n)]);
    if (desc->chunk_sizes == NULL) cft__add_longest(t);
    CFT__TRY(cft__range(t->desc.gpus_per_node, 1, CF_MAX_RANKS, CF_ERROR_LIMIT, "gpus_per_node", -1, error));
    CFT__TRY(cft__range(t->desc.batch, 1, CF_MAX_SEQUENCES, CF_ERROR_LIMIT, "batch", -1, error));
    CFT__TRY(cft__range(t->desc.n_batches, 1, CF_MAX_TUNE_BATCHES, CF_ERROR_LIMIT, "n_batches", -1, error));
    CFT__TRY(cft__range(t->desc.n_exact, 0, CF_MAX_CANDIDATES, CF_ERROR_LIMIT, "n_exact", -1, error));
    CFT__TRY(cft__range(t->desc.reserve, INT64_MIN, 99, CF_ERROR_LIMIT, "reserve", -1, error));
    CFT__TRY(cft__range(t->desc.context, 0, CF_MAX_LENGTH, CF_ERROR_LIMIT, "context", -1, error));
    if (!(t->desc.tolerance < 0)) CFT__TRY(cft__check_time(t->desc.tolerance, "tolerance", error));
    CFT__TRY(cft__range(t->desc.max_tries, 0, INT64_MAX, CF_ERROR_LIMIT, "max_tries", -1, error));
    CFT__TRY(cft__check_shares(&t->desc, error));
    if (desc->model == NULL && desc->bytes != NULL) CFT__TRY(cft__check_bytes(&t->desc, error));
    else CFT__TRY(cft__check_split(&t->desc, error));
    CFT__TRY(cft__check_needs(desc, error));
    CFT__TRY(cft__range(t->desc.pack.max_cp, 0, CF_MAX_RANKS, CF_ERROR_LIMIT, "pack.max_cp", -1, error));
    CFT__TRY(cft__check_lists(&t->desc, error));
    CFT__TRY(cft__check_costs(&t->desc, error));
    CFT__TRY(cft__check_memory(&t->desc, error));
    CFT__TRY(cf_allocator_resolve(desc->allocator, &t->allocator, error));
    CFT__TRY(cft__count_candidates(t));
    if (desc->chunk_sizes == NULL && desc->n_exact == 0) t->room = CFT__EVEN * t->strides[CFT__SIZE];
    return CF_OK;
}

/* Measures a layout, allocates its bytes and lays it out. field: named if the bytes do not fit. */
static cf_result cft__carve(cft__tuner *t, void (*lay_out)(cft__tuner *, cft__carver *), const char *field,
                            void **memory) {
    cft__carver carver = {NULL, 0, 0};
    lay_out(t, &carver);
    if (carver.overflow) return cf_refuse(t->error, CF_ERROR_OVERFLOW, field, -1, "does not fit in memory");
    CFT__TRY(cf_allocate(&t->allocator, carver.used, memory, t->error));
    carver.base = (unsigned char *)*memory;
    carver.used = 0;
    lay_out(t, &carver);
    return CF_OK;
}

static void cft__lay_out_tuning(cft__tuner *t, cft__carver *carver) {
    cf_tuning *header = &t->header, *tuning = (cf_tuning *)cft__take(carver, 1, sizeof(cf_tuning));
    int64_t n = header->n_candidates + t->room;
    header->splits = (cf_parallel *)cft__take(carver, header->n_splits, sizeof(cf_parallel));
    header->max_cps = (int64_t *)cft__take(carver, header->n_splits, sizeof(int64_t));
    header->candidates = (cf_tune_candidate *)cft__take(carver, n, sizeof(cf_tune_candidate));
    header->seconds = (double *)cft__take(carver, n * header->n_batches, sizeof(double));
    header->batch_tokens = (int64_t *)cft__take(carver, header->n_batches, sizeof(int64_t));
    header->batches = (int64_t *)cft__take(carver, (header->n_batches + 1) * header->batch, sizeof(int64_t));
    if (t->desc.pack.shared_prefixes != NULL)
        header->shared_prefixes =
            (cf_shared_prefix *)cft__take(carver, (header->n_batches + 1) * header->batch, sizeof(cf_shared_prefix));
    header->ranking = (int64_t *)cft__take(carver, n, sizeof(int64_t));
    if (tuning != NULL) *tuning = *header;
    t->tuning = tuning;
}

/* Lays out a worker's own arrays. */
static void cft__lay_out_worker(cft__tuner *t, cft__carver *carver) {
    int64_t v = t->most_virtual;
    t->costs = (cf_stage_cost *)cft__take(carver, v, sizeof(cf_stage_cost));
    t->weights = (cft__weights *)cft__take(carver, v, sizeof(cft__weights));
    t->stages = (cft__stage *)cft__take(carver, v, sizeof(cft__stage));
    t->limits = (int64_t *)cft__take(carver, v, sizeof(int64_t));
    t->loads = (cf_memory_load *)cft__take(carver, v, sizeof(cf_memory_load));
    t->streamed = (cf_memory_load *)cft__take(carver, v, sizeof(cf_memory_load));
    t->reports = (cf_memory_report *)cft__take(carver, v, sizeof(cf_memory_report));
}

static void cft__lay_out_tuner(cft__tuner *t, cft__carver *carver) {
    cft__tuner measured;
    int64_t i, n = t->tuning->n_candidates + t->room;
    t->pool = (int32_t *)cft__take(carver, t->n, sizeof(int32_t));
    t->bounds = (double *)cft__take(carver, n * t->desc.n_batches, sizeof(double));
    t->order = (cft__turn *)cft__take(carver, t->desc.n_batches, sizeof(cft__turn));
    t->turns = (cft__turn *)cft__take(carver, n / t->strides[CFT__KIND], sizeof *t->turns);
    t->packings = (cft__packing *)cft__take(carver, n / t->strides[CFT__SIZE], sizeof *t->packings);
    t->workers = (cft__tuner *)cft__take(carver, CFT__ROUND, sizeof(cft__tuner));
    cft__lay_out_worker(t, carver);
    for (i = 0; i < CFT__ROUND; i++) {
        cft__tuner *worker = t->workers != NULL ? &t->workers[i] : &measured;
        worker->most_virtual = t->most_virtual;
        cft__lay_out_worker(worker, carver);
    }
}

/* ---- batches ---- */

/* Returns the next random number: splitmix64. */
static uint64_t cft__draw(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns whether sequence `id`, counted over all sequences, belongs to the same tree as the sequence before it. */
static int cft__goes_on(const cft__tuner *t, int64_t id) {
    return t->trees != NULL && t->trees->common != NULL && id < t->n && t->trees->common[id] > 0;
}

/* Finds the index at which each tree of the list begins, in the order of all sequences. Without shared prefixes, every
   sequence is a tree. */
static cf_result cft__find_trees(cft__tuner *t, int64_t *n_trees) {
    cf_pack_desc desc;
    int64_t i;
    *n_trees = 0;
    memset(&desc, 0, sizeof desc);
    desc.shared_prefixes = t->desc.pack.shared_prefixes;
    desc.chunk_size = t->desc.chunk_sizes[t->desc.n_chunk_sizes - 1];
    desc.min_shared_prefix = 1; /* the draw does not depend on how much sharing is packed */
    desc.allocator = &t->allocator;
    if (desc.shared_prefixes != NULL) CFT__TRY(cf_pack(t->lengths, t->n, &desc, &t->trees, t->error));
    for (i = 0; i < t->n; i++)
        if (!cft__goes_on(t, i)) t->pool[(*n_trees)++] = (int32_t)i;
    return CF_OK;
}

/* Stores a drawn sequence at index `at` of the batches. It shares with the previous sequence, unless it is the first of
   its batch. */
static cf_result cft__put_drawn(cft__tuner *t, int64_t at, int64_t drawn) {
    int64_t size = t->desc.batch, *tokens = &t->tuning->batch_tokens[at / size], length;
    const int64_t *common = t->trees != NULL ? t->trees->common : NULL;
    const cf_shared_prefix share = {cft__max(at % size - 1, 0), common != NULL && at % size > 0 ? common[drawn] : 0};
    length = t->lengths[common != NULL ? t->trees->order[drawn] : drawn];
    t->tuning->batches[at] = length;
    if (t->tuning->shared_prefixes != NULL) t->tuning->shared_prefixes[at] = share;
    cft__add_product(tokens, length, 1);
    return *tokens == INT64_MAX ? cft__fail_size(t->error, "lengths") : CF_OK;
}

/* Draws batches like a data loader: shuffles the list, hands it out from its start, and shuffles it again at its
   end. */
static cf_result cft__draw_batches(cft__tuner *t) {
    int64_t i, id, n, next = 0, size = t->desc.batch, count = t->desc.n_batches * size;
    int64_t *memory_only = &t->tuning->batches[count];
    uint64_t state = t->desc.seed;
    for (i = 0; i < t->n; i++)
        CFT__TRY(cft__range(t->lengths[i], 0, CF_MAX_LENGTH, CF_ERROR_LIMIT, "lengths", i, t->error));
    CFT__TRY(cft__find_trees(t, &n));
    memset(t->tuning->batch_tokens, 0, (size_t)t->desc.n_batches * sizeof(int64_t));
    for (i = 0; i < count;) {
        int64_t other = next + (int64_t)(cft__draw(&state) % (uint64_t)(n - next));
        int32_t drawn = t->pool[other];
        t->pool[other] = t->pool[next];
        t->pool[next] = drawn;
        next = (next + 1) % n;
        for (id = drawn; i < count && (id == drawn || cft__goes_on(t, id)); id++) CFT__TRY(cft__put_drawn(t, i++, id));
    }
    memcpy(memory_only, t->tuning->batches, (size_t)size * sizeof *memory_only);
    if (t->tuning->shared_prefixes != NULL)
        memcpy(&t->tuning->shared_prefixes[count], t->tuning->shared_prefixes, (size_t)size * sizeof(cf_shared_prefix));
    memory_only[cft__longest_of(memory_only, size)] = t->longest;
    return CF_OK;
}

static void cft__free_plans(cft__tuner *t) {
    cf_plan_free(t->plan);
    cf_plan_free(t->packed);
    t->plan = t->packed = NULL;
}

/* Returns whether all ranks of the current split run in lockstep: because they meet in every pass, or cp groups
   exchange state. */
static int cft__in_step(const cft__tuner *t, int64_t max_cp) {
    return max_cp > 1 || (t->desc.pack.lockstep && t->split.dp > 1) || cft__meets(&t->desc, &t->split);
}

/* Returns whether a candidate uses the schedules of paper, whatever kinds were requested: cp groups on one stage, which
   has no bubbles. */
static int cft__takes_paper(const cft__tuner *t, const cf_tune_candidate *c) {
    return c->max_cp > 1 && t->tuning->splits[c->split].pp == 1;
}

/* Replaces t->plan by its columns, because its ranks run in lockstep. The plan itself is then t->packed. */
static cf_result cft__take_columns(cft__tuner *t, int64_t max_cp) {
    const cf_pass_cost cost = cf_column_cost(&t->timing, max_cp, t->split.pp * t->split.n_virtual);
    t->packed = t->plan;
    t->plan = NULL;
    return cf_lockstep_plan(t->packed, &cost, &t->allocator, &t->plan, t->error);
}

/* Packs a batch for t->split, whose costs are known. */
static cf_result cft__pack_batch(cft__tuner *t, const cf_tune_candidate *c, int64_t batch) {
    cf_pack_desc desc = t->desc.pack;
    desc.chunk_size = c->chunk_size;
    desc.max_cp = c->max_cp;
    if (c->max_cp > 1) cf_cp_costs(&t->timing, &desc);
    desc.lockstep = c->in_step && desc.method != CF_PACK_NEXT_FIT;
    desc.n_ranks = t->split.dp;
    desc.allocator = &t->allocator;
    if (t->tuning->shared_prefixes != NULL && c->in_step) { /* trees then only decide what is drawn together */
        desc.shared_prefixes = NULL;
        desc.min_shared_prefix = desc.no_copies = 0;
    } else if (t->tuning->shared_prefixes != NULL) {
        desc.shared_prefixes = &t->tuning->shared_prefixes[batch * t->desc.batch];
    }
    cft__free_plans(t);
    CFT__TRY(cf_pack(&t->tuning->batches[batch * t->desc.batch], t->desc.batch, &desc, &t->plan, t->error));
    t->worked += (double)(c->max_cp > 1 ? 8 : 2) * (double)(t->desc.batch + t->plan->n_chunks);
    return c->in_step ? cft__take_columns(t, c->max_cp) : CF_OK;
}

/* ---- memory ---- */

/* Fills in the report of one stage from the caller's bytes. Returns 0 if they do not fit in 64 bits. */
static int cft__add_bytes(const cft__tuner *t, int64_t stage, cf_memory_report *out) {
    const int64_t *const parts[] = {&out->activations, &out->state,   &out->state_gradient,
                                    &out->inputs,      &out->working, &out->runtime};
    int64_t row, i;
    memset(out, 0, sizeof *out);
    for (row = 0; row < t->split.n_virtual; row++) {
        int64_t v = cf_placement_at(t->split.placement, t->split.pp, row, stage);
        const cf_stage_bytes *b = &t->desc.bytes[v];
        const cf_memory_load *load = &t->loads[v];
        int64_t working = 0;
        cft__add_product(&out->activations, load->live_tokens, b->held.activations);
        cft__add_product(&out->state, load->state_tokens, b->held.state);
        cft__add_product(&out->state_gradient, load->state_gradient_tokens, b->held.state_gradient);
        cft__add_product(&out->inputs, load->input_tokens, b->held.boundary);
        cft__add_product(&out->runtime, b->fixed, 1);
        cft__add_product(&working, load->chunk_tokens, b->per_token_pass);
        out->working = cft__max(out->working, working);
    }
    for (i = 0; i < CFT__COUNT(parts); i++) cft__add_product(&out->total, *parts[i], 1);
    return out->total < INT64_MAX;
}

/* Returns whether inputs, outputs or state of chunks are in host memory; the second function, whether anything is. */
static int cft__stages_host(const cft__tuner *t) {
    return t->desc.model != NULL && (t->memory.state_window > 0 || t->memory.outputs > 1);
}
static int cft__uses_host(const cft__tuner *t) { return cft__stages_host(t) || t->memory.offload > 0; }

/* Fills in reports from t->loads, and their host memory from t->streamed, whose loads are never smaller. */
static cf_result cft__estimate_memory(cft__tuner *t, cf_memory_report *reports) {
    int64_t s, pp = t->split.pp, n_v = pp * t->split.n_virtual;
    if (!cft__uses_host(t)) return cf_memory_estimate(&t->memory, t->loads, n_v, reports, pp, t->error);
    CFT__TRY(cf_memory_estimate(&t->memory, t->streamed, n_v, reports, pp, t->error));
    for (s = 0; s < pp; s++) t->stages[s].host = reports[s].host;
    CFT__TRY(cf_memory_estimate(&t->memory, t->loads, n_v, reports, pp, t->error));
    for (s = 0; s < pp; s++) reports[s].host = t->stages[s].host;
    return CF_OK;
}

/* Fills in t->reports and t->fullest. field: named if bytes do not fit in 64 bits. */
static cf_result cft__report_stages(cft__tuner *t, const char *field) {
    int64_t s, pp = t->split.pp;
    cf_result result = CF_OK;
    if (t->desc.model != NULL) result = cft__estimate_memory(t, t->reports);
    for (s = 0; s < pp && t->desc.model == NULL; s++)
        if (!cft__add_bytes(t, s, &t->reports[s])) result = CF_ERROR_OVERFLOW;
    if (result != CF_OK) return result == CF_ERROR_OVERFLOW ? cft__fail_size(t->error, field) : result;
    for (t->fullest = 0, s = 1; s < pp; s++)
        if (t->reports[s].total > t->reports[t->fullest].total) t->fullest = s;
    return CF_OK;
}

/* Finds the bytes per token of a model on one virtual stage. */
static cf_result cft__weigh_model(const cf_memory_desc *memory, int64_t v, cft__weights *w, cf_error *error) {
    cf_token_bytes bytes;
    int64_t loose;
    int away;
    CFT__TRY(cf_memory_token_bytes(memory, v, &bytes, error));
    loose = 100 + cf_memory_defaults(memory).fragmentation;
    w->of[CFT__ACTIVATIONS] = cft__max(1, bytes.activations) * loose; /* the unit of limits: never 0 */
    w->of[CFT__STATE] = bytes.state * loose;
    w->of[CFT__GRADIENT] = bytes.state_gradient * loose;
    away = memory->state_window > 0 || memory->outputs > 1;
    w->of[CFT__INPUT] = away ? 0 : bytes.dropped * loose;
    w->of[CFT__CHUNK] = cft__max(bytes.logits, bytes.working) * loose + bytes.buffers * 100;
    w->carry = bytes.carry * loose;
    w->dropped = away ? bytes.dropped * loose : 0;
    w->staged = away ? bytes.staged * loose : 0;
    return CF_OK;
}

/* Finds the bytes per token on one virtual stage, from the model or the caller. */
static cf_result cft__weigh_tokens(cft__tuner *t, int64_t v, cft__weights *w) {
    if (t->desc.model == NULL) {
        const cf_stage_bytes *own = &t->desc.bytes[v];
        w->of[CFT__ACTIVATIONS] = own->held.activations * 100;
        w->of[CFT__STATE] = own->held.state * 100;
        w->of[CFT__GRADIENT] = own->held.state_gradient * 100;
        w->of[CFT__INPUT] = own->held.boundary * 100;
        w->of[CFT__CHUNK] = own->per_token_pass * 100;
        w->carry = w->dropped = w->staged = 0;
        return CF_OK;
    }
    return cft__weigh_model(&t->memory, v, w, t->error);
}

/* If host memory is used, subtracts from the room for chunks the ring and the staged bytes, which the bytes per token
   do not include. */
static cf_result cft__leave_room_for_stream(cft__tuner *t, int64_t chunk_size) {
    int64_t v, s, n_v = t->split.pp * t->split.n_virtual;
    if (!cft__stages_host(t)) return CF_OK;
    for (v = 0; v < n_v; v++) {
        t->loads[v].chunk_tokens = chunk_size;
        t->loads[v].input_tokens = 2 * chunk_size;
        t->loads[v].state_tokens = t->memory.state_window > 0;
        t->streamed[v] = t->loads[v];
    }
    CFT__TRY(cft__report_stages(t, "parameters"));
    for (s = 0; s < t->split.pp; s++) {
        if (t->reports[s].total > INT64_MAX / 400) return cft__fail_size(t->error, "parameters");
        t->stages[s].room = t->tuning->limit_bytes * 100 - t->reports[s].total * 100;
        if (t->memory.state_window == 0) t->stages[s].room -= t->stages[s].all.carry;
    }
    return CF_OK;
}

/* Sets the description of memory for a split with its recomputation, with or without streamed state. */
static void cft__set_memory(cft__tuner *t, const cf_parallel *split, int64_t state_window) {
    t->split = *split;
    t->memory = t->desc.memory;
    t->memory.parallel = *split;
    t->memory.state_window = state_window;
}

static void cft__set_memory_of(cft__tuner *t, const cf_tune_candidate *c) {
    cf_parallel split = t->tuning->splits[c->split];
    split.recompute = c->recompute;
    split.recompute_layers = c->recompute_layers;
    cft__set_memory(t, &split, c->state_window);
    t->memory.chunk_size = c->chunk_size;
    t->memory.gathered = c->max_cp > 1 ? t->longest : 0;
    t->memory.outputs = c->outputs;
    t->memory.offload = c->offload;
}

/* Sets up the weights and stages of a split for the functions below. */
static cf_result cft__set_weights(cft__tuner *t, int64_t chunk_size) {
    int64_t v, s, i, n_v = t->split.pp * t->split.n_virtual;
    memset(t->loads, 0, (size_t)n_v * sizeof *t->loads);
    memset(t->streamed, 0, (size_t)n_v * sizeof *t->streamed);
    memset(t->stages, 0, (size_t)n_v * sizeof *t->stages);
    t->memory.chunk_size = chunk_size;
    for (v = 0; v < n_v; v++) {
        cft__stage *stage = &t->stages[cf_placement_stage(t->split.placement, t->split.pp, v)];
        const int64_t *of = t->weights[v].of;
        CFT__TRY(cft__weigh_tokens(t, v, &t->weights[v]));
        if (cft__max(of[CFT__CHUNK], of[CFT__ACTIVATIONS]) > INT64_MAX / 16 / chunk_size)
            return cft__fail_size(t->error, "chunk_sizes");
        cft__add_product(&stage->all.carry, t->weights[v].carry, 1);
        for (i = 0; i < CFT__PARTS; i++) {
            cft__add_product(&stage->all.of[i], of[i], 1);
            stage->most.of[i] = cft__max(stage->most.of[i], of[i]);
        }
    }
    CFT__TRY(cft__report_stages(t, "parameters"));
    for (s = 0; s < t->split.pp; s++) {
        cft__stage *stage = &t->stages[s];
        if (t->reports[s].total > INT64_MAX / 400) return cft__fail_size(t->error, "parameters");
        stage->fixed = t->reports[s].total * 100;
        stage->room = t->tuning->limit_bytes * 100 - stage->fixed - stage->most.of[CFT__CHUNK] * chunk_size;
        stage->room -= stage->all.carry;
    }
    return cft__leave_room_for_stream(t, chunk_size);
}

/* Checks that the bytes of all tokens of a plan on one stage can be counted. */
static cf_result cft__check_weights(const cft__tuner *t) {
    const cf_plan *plan = t->plan;
    int64_t i, v, tokens = 0, most = 0, total = 0;
    for (i = 0; i < plan->n_chunks; i++) cft__add_product(&tokens, plan->chunks[i].rows, t->split.n_virtual);
    for (v = 0; v < t->split.pp * t->split.n_virtual; v++) {
        int64_t sum = 0;
        for (i = 0; i < CFT__PARTS; i++) sum += t->weights[v].of[i];
        most = cft__max(most, sum);
    }
    cft__add_product(&total, tokens, most);
    return total <= INT64_MAX / 4 ? CF_OK : cft__fail_size(t->error, "lengths");
}

static int64_t cft__weigh(const cft__weights *w, const cf_memory_load *load) {
    int64_t sum = 0;
    cft__add_product(&sum, load->live_tokens, w->of[CFT__ACTIVATIONS]);
    cft__add_product(&sum, load->state_tokens, w->of[CFT__STATE]);
    cft__add_product(&sum, load->state_gradient_tokens, w->of[CFT__GRADIENT]);
    cft__add_product(&sum, load->input_tokens, w->of[CFT__INPUT]);
    return sum;
}

/* Returns the bytes of the fullest stage if every virtual stage holds `load` and runs a pass of load->chunk_tokens
   rows. cft__check_weights has checked that no sum overflows. */
static int64_t cft__most_bytes(const cft__tuner *t, const cf_memory_load *load, int64_t *stage) {
    int64_t s, most = -1;
    for (s = 0; s < t->split.pp; s++) {
        const cft__stage *own = &t->stages[s];
        const int64_t *w = own->all.of;
        int64_t sum = own->fixed + load->live_tokens * w[CFT__ACTIVATIONS] + load->state_tokens * w[CFT__STATE];
        sum += load->state_gradient_tokens * w[CFT__GRADIENT] + load->input_tokens * w[CFT__INPUT];
        sum += load->chunk_tokens * own->most.of[CFT__CHUNK];
        if (sum <= most) continue;
        most = sum;
        *stage = s;
    }
    return most / 100;
}

/* The least memory of any schedule: bytes of a stage, and the load of each of its virtual stages at that time. */
typedef struct cft__least {
    int64_t bytes, stage;
    cf_memory_load load;
} cft__least;

/* Returns the tokens of state before a chunk: those of its path, and of its own chain before it. */
static int64_t cft__tokens_before(const cf_plan *plan, int64_t id) {
    return plan->chunks[id].chain >= 0 ? plan->chunks[id].prefix : 0;
}

/* Returns how many chunks of a chain keep their activations if a path keeps at most k. Chains further down the path
   come first; at least the running chunk is kept. last: the last chunk of the chain. */
static int64_t cft__kept_of(const cf_chunk *last, int64_t k) { return cft__max(1, k - last->below); }

/* Returns whether no member of load a exceeds b's. */
static int cft__is_less(const cf_memory_load *a, const cf_memory_load *b) {
    return a->live_tokens <= b->live_tokens && a->state_tokens <= b->state_tokens &&
           a->input_tokens <= b->input_tokens && a->chunk_tokens <= b->chunk_tokens;
}

/* Returns the least bytes of any schedule that keeps the last k chunks of each chain. A chain or standalone chunk alone
   needs them at its worst moment, just before the backward of one of its chunks. State grows to a chain's end, so only
   its last two chunks are examined. With virtual stages only the last one is, because they reach the other backwards at
   different times. */
static cft__least cft__least_bytes(const cft__tuner *t, int64_t k, int local) {
    const cf_plan *plan = t->plan;
    int64_t id, n, i, kept, at = 0, alone = -1;
    cft__least least;
    memset(&least, 0, sizeof least);
    for (id = 0; id < plan->n_chunks; id += n) {
        cf_memory_load load;
        memset(&load, 0, sizeof load);
        n = plan->chunks[id].chain >= 0 ? plan->chains[plan->chunks[id].chain].n_chunks : 1;
        if (plan->chunks[id].chain < 0 && plan->chunks[id].rows <= alone) continue;
        if (plan->chunks[id].chain < 0) alone = plan->chunks[id].rows;
        kept = cft__kept_of(&plan->chunks[id + n - 1], k);
        load.state_tokens = cft__tokens_before(plan, id);
        for (i = 0; i < n; i++) {
            const cf_chunk *c = &plan->chunks[id + i];
            int64_t bytes;
            if (i <= n - kept) load.live_tokens = 0; /* a replayed chunk, and the first kept one, may be alone */
            load.live_tokens += c->rows;
            if (local && i > 0 && i <= n - kept) load.input_tokens += c[-1].rows;
            load.state_tokens += plan->chunks[id + i].state;
            load.state_gradient_tokens = load.state_tokens;
            load.chunk_tokens = c->rows;
            if (i < n - (t->split.n_virtual > 1 ? 1 : 2)) continue;
            if (least.bytes > 0 && cft__is_less(&load, &least.load)) continue;
            bytes = cft__most_bytes(t, &load, &at);
            if (bytes > least.bytes) {
                least.bytes = bytes;
                least.stage = at;
                least.load = load;
            }
        }
    }
    return least;
}

static int64_t cft__longest_path(const cf_plan *plan) {
    int64_t i, most = 1;
    for (i = 0; i < plan->n_chunks; i++) most = cft__max(most, plan->chunks[i].below + 1);
    return most;
}

/* ---- limits ---- */

/* Returns the bytes x 100 of the state of `tokens` tokens, of its gradient and, with local replay, of the saved
   inputs. */
static int64_t cft__state_bytes(const cft__tuner *t, const cft__weights *w, int local, int64_t tokens) {
    return tokens * t->split.n_virtual * (w->of[CFT__STATE] + w->of[CFT__GRADIENT] + (local ? w->of[CFT__INPUT] : 0));
}

/* Sets limits in bytes for a scheduler that weighs a token equally on all stages, although its bytes differ between
   stages. The weight of a token is that of the tightest stage: the one with room for the fewest tokens in addition to
   the state of the deepest path. Limits of other stages are scaled to leave room for as many tokens as really fit. No
   limit is below that state and one chunk, because a chain does not always need all of its state at one time. */
static void cft__limit_bytes(cft__tuner *t, cf_schedule_desc *desc) {
    const cf_plan *plan = t->plan;
    const cft__weights *tightest = NULL;
    int64_t s, i, tokens = 0, fewest = INT64_MAX, state, least;
    int local = desc->shape.replay == CF_REPLAY_LOCAL;
    for (i = 0; i < plan->n_chains; i++)
        tokens = cft__max(tokens, cft__tokens_before(plan, plan->chains[i].first_chunk) + plan->chains[i].tokens);
    for (s = 0; s < t->split.pp; s++) {
        const cft__weights *w = &t->stages[s].most;
        t->limits[s] = t->stages[s].room - cft__state_bytes(t, w, local, tokens);
        if (t->limits[s] / w->of[CFT__ACTIVATIONS] >= fewest) continue;
        fewest = t->limits[s] / w->of[CFT__ACTIVATIONS];
        tightest = w;
    }
    state = least = cft__state_bytes(t, tightest, local, tokens);
    cft__add_product(&least, t->split.n_virtual * plan->chunk_size, tightest->of[CFT__ACTIVATIONS]);
    for (s = 0; s < t->split.pp; s++) {
        double scale = (double)tightest->of[CFT__ACTIVATIONS] / (double)t->stages[s].most.of[CFT__ACTIVATIONS];
        double left = cft__product((double)t->limits[s] * (1 - 1e-9), scale);
        t->limits[s] = cft__max(least, left < 1e18 ? (int64_t)left + state : INT64_MAX);
    }
    desc->limits.per_token.activations = tightest->of[CFT__ACTIVATIONS];
    desc->limits.per_token.state = tightest->of[CFT__STATE];
    desc->limits.per_token.state_gradient = tightest->of[CFT__GRADIENT];
    desc->limits.per_token.boundary = tightest->of[CFT__INPUT];
    desc->limits.bytes_by_stage = t->limits;
}

/* ---- one plan: schedule, time, memory ---- */

/* Returns the bytes x 100 that a stage needs during a pass, beyond those that it always holds. held: load of each of
   its virtual stages. */
static int64_t cft__weigh_moment(const cft__tuner *t, int64_t stage, const cf_memory_load *held) {
    const cf_shape *shape = &t->schedule->shape;
    int64_t weight = 0, inputs = 0, two_inputs = 0, j;
    for (j = 0; j < shape->n_virtual; j++) {
        const cft__weights *w = &t->weights[cf_placement_at(shape->placement, shape->n_stages, j, stage)];
        cft__add_product(&weight, cft__weigh(w, &held[j]), 1);
        cft__add_product(&weight, held[j].chunk_tokens, w->of[CFT__CHUNK]);
        cft__add_product(&weight, held[j].carries, w->carry);
        cft__add_product(&inputs, held[j].input_tokens, w->dropped);
        two_inputs = cft__max(two_inputs, 2 * held[j].chunk_tokens * w->staged);
    }
    cft__add_product(&weight, cft__min(inputs, two_inputs), 1);
    return weight;
}

/* Stores the load during a stage's heaviest pass in t->loads, and the pass in t->stages. moments: load while each
   action of the stage's list runs. */
static void cft__note_heaviest(cft__tuner *t, int64_t stage, const cf_memory_load *moments) {
    const cf_schedule *schedule = t->schedule;
    const cf_placement placement = schedule->shape.placement;
    int64_t n_virtual = schedule->shape.n_virtual, n_stages = schedule->shape.n_stages, most = -1, passes = 0, id, j;
    cft__stage *own = &t->stages[stage];
    memset(&own->peak, 0, sizeof own->peak);
    own->before = 0;
    for (j = 0; j < n_virtual; j++) {
        int64_t v = cf_placement_at(placement, n_stages, j, stage);
        memset(&t->loads[v], 0, sizeof *t->loads);
        memset(&t->streamed[v], 0, sizeof *t->streamed);
    }
    for (id = schedule->first[stage]; id < schedule->first[stage + 1]; id++, moments += n_virtual) {
        int64_t weight;
        if (schedule->actions[id].pass >= CF_COMPUTE_PASS_COUNT) continue;
        weight = cft__weigh_moment(t, stage, moments);
        if (weight > most) {
            most = weight;
            own->before = passes;
            own->peak = schedule->actions[id];
            for (j = 0; j < n_virtual; j++) t->loads[cf_placement_at(placement, n_stages, j, stage)] = moments[j];
        }
        passes++;
    }
}

/* Fills in t->streamed with maxima over all moments, which host memory must hold. The ring on the device always exists,
   so t->loads gets at least one token of state if the stage ever streams any. */
static void cft__note_streamed(cft__tuner *t, int64_t stage, const cf_memory_load *moments, int64_t count) {
    const cf_shape *shape = &t->schedule->shape;
    int64_t i;
    for (i = 0; i < count; i++) {
        int64_t v = cf_placement_at(shape->placement, shape->n_stages, i % shape->n_virtual, stage);
        cf_memory_load *load = &t->streamed[v];
        if (i < shape->n_virtual) *load = t->loads[v];
        load->state_tokens = cft__max(load->state_tokens, moments[i].state_tokens);
        load->state_gradient_tokens = cft__max(load->state_gradient_tokens, moments[i].state_gradient_tokens);
        load->input_tokens = cft__max(load->input_tokens, moments[i].input_tokens);
        load->live_tokens = cft__max(load->live_tokens, moments[i].live_tokens);
        if (load->state_tokens > 0 && t->memory.state_window > 0)
            t->loads[v].state_tokens = cft__max(t->loads[v].state_tokens, 1);
    }
}

/* Finds the load of every stage during its heaviest pass, for the current schedule. */
static cf_result cft__find_heaviest(cft__tuner *t) {
    const cf_schedule *schedule = t->schedule;
    int64_t s;
    for (s = 0; s < schedule->shape.n_stages; s++) {
        int64_t count = (schedule->first[s + 1] - schedule->first[s]) * schedule->shape.n_virtual;
        void *moments;
        cf_result result;
        CFT__TRY(cf_allocate(&t->allocator, (size_t)count * sizeof(cf_memory_load), &moments, t->error));
        result = cf_schedule_loads(t->plan, schedule, s, (cf_memory_load *)moments, count, t->error);
        if (result == CF_OK) cft__note_heaviest(t, s, (const cf_memory_load *)moments);
        if (result == CF_OK && cft__uses_host(t))
            cft__note_streamed(t, s, (const cf_memory_load *)moments, count);
        t->allocator.release(moments, t->allocator.user);
        CFT__TRY(result);
    }
    return CF_OK;
}

static cf_result cft__check_memory_of(const cf_memory_desc *desc, const cf_shape *shape, int64_t n_reports,
                                      cf_error *error) {
    const cf_parallel parallel = cf_parallel_defaults(&desc->parallel);
    const cf_placement placement = shape->placement == CF_PLACEMENT_V ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
    const struct {
        const char *field;
        int64_t wanted, got;
    } members[] = {{"parallel.pp", shape->n_stages, parallel.pp},
                   {"parallel.n_virtual", shape->n_virtual, parallel.n_virtual},
                   {"parallel.placement", (int)placement, (int)parallel.placement},
                   {"n_reports", shape->n_stages, n_reports}};
    int64_t i;
    if (desc->unfused_attention != 0)
        return cf_fail(error, CF_ERROR_ARGUMENT, "unfused_attention", -1, 0, desc->unfused_attention,
                       "is not supported here");
    for (i = 0; i < CFT__COUNT(members); i++)
        if (members[i].got != members[i].wanted)
            return cf_fail(error, CF_ERROR_ARGUMENT, members[i].field, -1, members[i].wanted, members[i].got,
                           "is not that of the schedule");
    return CF_OK;
}

/* Starts a tuner for work on one plan, without a search. *scratch: its working space. */
static cf_result cft__start_alone(cft__tuner *t, const cf_memory_desc *desc, const cf_plan *plan,
                                  const cf_shape *shape, const cf_allocator *allocator, cf_error *error,
                                  void **scratch) {
    const cf_parallel split = cf_parallel_defaults(&desc->parallel);
    memset(t, 0, sizeof *t);
    CFT__TRY(cf_allocator_resolve(allocator, &t->allocator, error));
    t->error = error;
    t->desc.model = desc->model;
    t->desc.memory = *desc;
    t->tuning = &t->header;
    t->most_virtual = shape->n_stages * shape->n_virtual;
    t->plan = (cf_plan *)plan; /* only read */
    cft__set_memory(t, &split, desc->state_window);
    t->memory.chunk_size = plan->chunk_size;
    return cft__carve(t, cft__lay_out_worker, "plan", scratch);
}

/* Finds the weights, then the heaviest pass of each stage, then its report. */
static cf_result cft__report_schedule(cft__tuner *t, cf_memory_report *reports) {
    int64_t v;
    for (v = 0; v < t->most_virtual; v++) CFT__TRY(cft__weigh_model(&t->memory, v, &t->weights[v], t->error));
    CFT__TRY(cft__find_heaviest(t));
    return cft__estimate_memory(t, reports);
}

CHUNKFLOW_TUNE_API cf_result cf_schedule_memory(const cf_memory_desc *desc, const cf_plan *plan,
                                                const cf_schedule *schedule, cf_memory_report *reports,
                                                int64_t n_reports, const cf_allocator *allocator, cf_error *error) {
    cft__tuner t;
    void *scratch;
    cf_result result;
    if (desc == NULL) return cf_fail_null(error, "desc");
    if (plan == NULL) return cf_fail_null(error, "plan");
    if (schedule == NULL) return cf_fail_null(error, "schedule");
    if (reports == NULL) return cf_fail_null(error, "reports");
    CFT__TRY(cft__check_memory_of(desc, &schedule->shape, n_reports, error));
    CFT__TRY(cft__start_alone(&t, desc, plan, &schedule->shape, allocator, error, &scratch));
    t.schedule = (cf_schedule *)schedule; /* only read */
    result = cft__report_schedule(&t, reports);
    t.allocator.release(scratch, t.allocator.user);
    return result;
}

static cf_result cft__check_limits_of(const cf_memory_desc *desc, const cf_plan *plan, const cf_shape *shape,
                                      int64_t limit_bytes, cf_error *error) {
    if (desc == NULL) return cf_fail_null(error, "desc");
    if (plan == NULL) return cf_fail_null(error, "plan");
    if (shape == NULL) return cf_fail_null(error, "shape");
    CFT__TRY(cft__range(shape->n_stages, 1, CF_MAX_STAGES, CF_ERROR_ARGUMENT, "shape.n_stages", -1, error));
    CFT__TRY(cft__range(shape->n_virtual, 1, CF_MAX_STAGES / shape->n_stages, CF_ERROR_ARGUMENT, "shape.n_virtual", -1,
                        error));
    CFT__TRY(cft__range(limit_bytes, 1, CF_MAX_STAGE_BYTES, CF_ERROR_ARGUMENT, "limit_bytes", -1, error));
    CFT__TRY(cft__range(plan->chunk_size, 1, CF_MAX_CHUNK_SIZE, CF_ERROR_ARGUMENT, "plan.chunk_size", -1, error));
    return cft__check_memory_of(desc, shape, shape->n_stages, error);
}

CHUNKFLOW_TUNE_API cf_result cf_memory_limits(const cf_memory_desc *desc, const cf_plan *plan, const cf_shape *shape,
                                              int64_t limit_bytes, int64_t *by_stage, cf_limits *limits,
                                              const cf_allocator *allocator, cf_error *error) {
    cf_schedule_desc made;
    cft__tuner t;
    void *scratch;
    cf_result result;
    CFT__TRY(cft__check_limits_of(desc, plan, shape, limit_bytes, error));
    if (by_stage == NULL) return cf_fail_null(error, "by_stage");
    if (limits == NULL) return cf_fail_null(error, "limits");
    CFT__TRY(cft__start_alone(&t, desc, plan, shape, allocator, error, &scratch));
    memset(&made, 0, sizeof made);
    made.shape.replay = shape->replay;
    t.header.limit_bytes = limit_bytes;
    t.limits = by_stage;
    result = cft__set_weights(&t, plan->chunk_size);
    if (result == CF_OK) result = cft__check_weights(&t);
    if (result == CF_OK) {
        cft__limit_bytes(&t, &made);
        limits->per_token = made.limits.per_token;
        limits->bytes_by_stage = by_stage;
    }
    t.allocator.release(scratch, t.allocator.user);
    return result;
}

/* Sets up the costs, memory and room of a candidate's split and ChunkSize. */
static cf_result cft__set_up(cft__tuner *t, const cf_tune_candidate *c) {
    cft__set_memory_of(t, c);
    if (t->desc.timing != NULL) {
        t->timing = *t->desc.timing;
        t->step_seconds = t->desc.step_seconds;
    } else {
        cf_cost_desc cost;
        memset(&cost, 0, sizeof cost);
        cost.model = t->desc.model;
        cost.gpu = t->desc.gpu;
        cost.parallel = t->split;
        cost.gpus_per_node = t->desc.gpus_per_node;
        cost.chunk_size = c->chunk_size;
        cost.stream = c->state_window > 0;
        cost.max_cp = c->max_cp;
        cost.unfused = t->memory.unfused;
        cost.outputs = t->memory.outputs;
        cost.offload = t->memory.offload;
        CFT__TRY(cf_cost_estimate(&cost, t->costs, t->split.pp * t->split.n_virtual, &t->timing, &t->step_seconds,
                                  t->error));
        t->worked += 60 * (double)(t->split.pp * t->split.n_virtual);
    }
    return cft__set_weights(t, c->chunk_size);
}

static void cft__free_schedule(cft__tuner *t) {
    cf_timeline_free(t->timeline);
    cf_schedule_free(t->schedule);
    t->schedule = NULL;
    t->timeline = NULL;
}

static cf_schedule_desc cft__rank_desc(const cft__tuner *t, const cf_tune_candidate *c, cf_schedule_kind kind,
                                       int64_t rank) {
    cf_schedule_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.kind = kind;
    desc.shape.replay = c->replay;
    desc.shape.n_stages = t->split.pp;
    desc.shape.n_virtual = t->split.n_virtual;
    desc.shape.placement = t->split.placement;
    desc.shape.k = c->k;
    desc.shape.rank = rank;
    desc.shape.outputs = c->outputs > 0;
    desc.timing = &t->timing;
    desc.limits.chunks = CF_NO_LIMIT; /* a GPU limits bytes, not chunks */
    desc.split_backward = t->desc.split_backward && kind == CF_SCHEDULE_BEST;
    desc.allocator = &t->allocator;
    return desc;
}

static int64_t cft__max_tries(const cft__tuner *t) {
    return t->desc.max_tries > 0 ? t->desc.max_tries : cf_tune_max_tries(t->plan, t->split.pp, t->split.n_virtual);
}

/* Returns the work of a schedule of a rank of the current plan. */
static double cft__schedule_work(const cft__tuner *t, int best) {
    double passes = 2 * (double)(t->split.pp * t->split.n_virtual) * (double)t->plan->chunks_per_rank;
    return passes * (double)(best ? cft__max_tries(t) : 2);
}

/* Makes a schedule of the current plan, times it, and reports every stage at its heaviest moment. */
static cf_result cft__try_schedule(cft__tuner *t, const cf_schedule_desc *desc) {
    cf_simulate_desc simulate;
    memset(&simulate, 0, sizeof simulate);
    simulate.timing = &t->timing;
    simulate.no_bounds = 1;
    simulate.allocator = &t->allocator;
    cft__free_schedule(t);
    t->worked += cft__schedule_work(t, desc->kind == CF_SCHEDULE_BEST);
    CFT__TRY(cf_schedule_make(t->plan, desc, &t->schedule, t->error));
    CFT__TRY(cf_simulate(t->plan, t->schedule, &simulate, &t->timeline, t->error));
    CFT__TRY(cft__find_heaviest(t));
    return cft__report_stages(t, "lengths");
}

static void cft__set_infeasible(cf_tune_candidate *c, const cf_memory_report *memory, int64_t bytes, int64_t stage,
                                const char *why) {
    c->status = CF_TUNE_INFEASIBLE;
    c->why = why;
    c->memory = *memory;
    c->bytes = bytes;
    c->stage = stage;
}

/* Records the peak of a schedule that fits. */
static void cft__note_peak(const cft__tuner *t, cf_tune_candidate *c, int64_t batch, int64_t rank) {
    int64_t stage = t->fullest;
    const cft__stage *own = &t->stages[stage];
    if (t->reports[stage].total <= c->bytes) return;
    c->memory = t->reports[stage];
    c->bytes = c->memory.total;
    c->stage = stage;
    c->peak_batch = batch;
    c->peak_rank = rank;
    c->peak_action = own->peak;
    c->peak_seconds = t->plan->chunks_per_rank > 0 ? t->timeline->start[t->schedule->first[stage] + own->before] : 0;
}

/* Returns whether a candidate's outputs are on the GPU and may move to host memory; the second function, whether they
   must. */
static int cft__may_move(const cft__tuner *t, const cf_tune_candidate *c) {
    return t->moves && c->outputs == 1 && c->state_window == 0;
}
static int cft__moves_away(const cft__tuner *t, const cf_tune_candidate *c) {
    return cft__may_move(t, c) && c->status == CF_TUNE_INFEASIBLE;
}

/* Returns whether no schedule of the current plan fits that keeps K chunks of each chain, as the fixed kinds do. Under
   a limit they would keep fewer: that is a candidate with a smaller K. */
static int cft__needs_too_much(const cft__tuner *t, const cf_tune_candidate *c) {
    int64_t k = c->kind == CF_SCHEDULE_BEST ? 1 : c->k;
    return cft__least_bytes(t, k, c->replay == CF_REPLAY_LOCAL).bytes > t->tuning->limit_bytes;
}

/* Schedules one rank of one batch: without a limit and, if that does not fit, under one. No limit is used if moving
   outputs to host memory is possible. */
static cf_result cft__fit_rank(cft__tuner *t, cf_tune_candidate *c, int64_t batch, int64_t rank) {
    cf_schedule_desc desc = cft__rank_desc(t, c, c->kind, rank);
    int64_t least = INT64_MAX, stage = 0;
    cf_memory_report memory;
    int held;
    memset(&memory, 0, sizeof memory);
    if (cft__may_move(t, c) && cft__needs_too_much(t, c)) {
        c->status = CF_TUNE_INFEASIBLE; /* known without making a schedule */
        return CF_OK;
    }
    desc.max_tries = cft__max_tries(t);
    for (held = 0; held < (cft__may_move(t, c) ? 1 : 2); held++) {
        int64_t total;
        cf_result result;
        if (held) cft__limit_bytes(t, &desc);
        c->limited |= held;
        t->simulated++;
        result = cft__try_schedule(t, &desc);
        if (result == CF_ERROR_INFEASIBLE) continue;
        if (result != CF_OK) return result;
        total = t->reports[t->fullest].total;
        if (total <= t->tuning->limit_bytes) {
            c->replays |= t->timeline->replayed > 0;
            cft__note_peak(t, c, batch, rank);
            return CF_OK;
        }
        if (total >= least) continue;
        least = total;
        stage = t->fullest;
        memory = t->reports[stage];
    }
    cft__set_infeasible(c, &memory, least, stage, "no schedule of some batch keeps to the limit");
    return CF_OK;
}

/* Returns whether a rank has the same chunks as the previous rank, in the same order, and so the same schedule. With
   equally long sequences most ranks do. With trees it returns 0, because the load of other ranks also matters. */
static int cft__is_like_last(const cf_plan *plan, int64_t rank) {
    const cf_chunk *a = &plan->chunks[(rank - 1) * plan->chunks_per_rank], *b = a + plan->chunks_per_rank, *end = b;
    if (plan->order != NULL) return 0;
    for (; a < end; a++, b++) {
        if (a->tokens != b->tokens || a->rows != b->rows || a->pairs != b->pairs) return 0;
        if (a->index != b->index || a->prefix != b->prefix || (a->chain < 0) != (b->chain < 0)) return 0;
    }
    return 1;
}

/* ---- bounds ---- */

/* Amounts of a pass's work; cost x amount is seconds. */
typedef struct cft__amount {
    double chunks, rows, pairs;
} cft__amount;

static double cft__seconds_of(const cf_pass_cost *cost, const cft__amount *amount) {
    double seconds = cft__product(cost->constant, amount->chunks);
    seconds += cft__product(cost->per_token, amount->rows);
    return seconds + cft__product(cost->per_pair, amount->pairs);
}

static void cft__add_chunk(cft__amount *sum, const cf_chunk *c) {
    sum->chunks++;
    sum->rows += (double)c->rows;
    sum->pairs += (double)c->pairs;
}

static void cft__take_least(cft__amount *least, const cf_chunk *c) {
    if (least->chunks < 1 || (double)c->rows < least->rows) least->rows = (double)c->rows;
    if (least->chunks < 1 || (double)c->pairs < least->pairs) least->pairs = (double)c->pairs;
    least->chunks = 1;
}

/* Adds a lower bound of the replays of a chain with more than k chunks: n - k of them. Each full slice costs more than
   the previous one, except the last, which is shorter; so the cheapest n - k are known. Other slices have no known
   order, and each counts as much as the cheapest of all. */
static void cft__add_dropped(const cft__tuner *t, const cf_chunk *chunks, int64_t n, int64_t k, cft__amount *sum) {
    int full = t->plan->split == CF_SPLIT_FULL;
    cft__amount least = {0, 0, 0};
    int64_t i;
    if (n <= k) return;
    for (i = 0; i < n && !full; i++) cft__take_least(&least, &chunks[i]);
    for (i = 0; i < n - k - 1 && full; i++) cft__add_chunk(sum, &chunks[i]);
    if (full) {
        cft__take_least(&least, &chunks[n - k - 1]);
        cft__take_least(&least, &chunks[n - 1]);
    }
    sum->chunks += full ? 1 : (double)(n - k);
    sum->rows += full ? least.rows : cft__product(least.rows, (double)(n - k));
    sum->pairs += full ? least.pairs : cft__product(least.pairs, (double)(n - k));
}

/* Returns the smaller of two costs, term by term, which is a lower bound of both. */
static cf_pass_cost cft__least_cost(const cf_pass_cost *a, const cf_pass_cost *b) {
    cf_pass_cost least = *a;
    if (b->constant < least.constant) least.constant = b->constant;
    if (b->per_token < least.per_token) least.per_token = b->per_token;
    if (b->per_pair < least.per_pair) least.per_pair = b->per_pair;
    return least;
}

static int cft__is_free(const cf_pass_cost *cost) {
    return !(cost->constant > 0) && !(cost->per_token > 0) && !(cost->per_pair > 0);
}

/* Lower bounds of the costs of a virtual stage: F, R, and a whole backward. */
typedef struct cft__costs {
    cf_pass_cost forward, replay, backward;
} cft__costs;

static cft__costs cft__costs_of(const cft__tuner *t, int64_t v) {
    cf_stage_cost c = t->timing.stages != NULL ? t->timing.stages[v] : t->timing.all;
    cft__costs least;
    cf_pass_cost parts;
    cft__cost_sum(&c.input, &c.weight, &parts);
    if (cft__is_free(&c.forward) && cft__is_free(&c.replay) && cft__is_free(&c.backward) && cft__is_free(&parts))
        c.forward.per_token = 1;
    if (cft__is_free(&c.replay)) {
        c.replay = c.forward;
        if (t->memory.outputs) c.replay.per_pair = 0;
    }
    if (cft__is_free(&c.backward)) c.backward = parts;
    if (cft__is_free(&c.backward)) cft__cost_sum(&c.forward, &c.forward, &c.backward);
    least.forward = c.forward;
    least.replay = c.replay;
    least.backward = c.backward;
    if (!t->splits || (cft__is_free(&c.input) && cft__is_free(&c.weight))) return least;
    if (!cft__is_free(&c.input) && !cft__is_free(&c.weight)) least.backward = cft__least_cost(&c.backward, &parts);
    else memset(&least.backward, 0, sizeof least.backward); /* only half of it was measured: the bound is 0 */
    return least;
}

/* Returns the largest load of a stage: its work, plus the shortest way to it and back from it. If a backward may be
   split, nothing needs to follow the last pass of a stage. */
static double cft__stage_load(const cft__tuner *t, int64_t rank, int64_t k) {
    const cf_plan *plan = t->plan;
    cft__amount all = {0, 0, 0}, dropped = {0, 0, 0}, least = {0, 0, 0};
    int64_t id, end = (rank + 1) * plan->chunks_per_rank, n, i, s, row;
    double most = 0, head = 0, tail = 0, transfer;
    for (id = rank * plan->chunks_per_rank; id < end; id += n) {
        n = plan->chunks[id].chain >= 0 ? plan->chains[plan->chunks[id].chain].n_chunks : 1;
        cft__add_dropped(t, &plan->chunks[id], n, k, &dropped);
        for (i = id; i < id + n; i++) {
            cft__add_chunk(&all, &plan->chunks[i]);
            cft__take_least(&least, &plan->chunks[i]);
        }
    }
    transfer = t->timing.latency + cft__product(t->timing.seconds_per_token, least.rows);
    for (s = 0; s < t->split.pp; s++) {
        cft__costs own = cft__costs_of(t, s);
        double load = head + tail;
        for (row = 0; row < t->split.n_virtual; row++) {
            cft__costs c = cft__costs_of(t, cf_placement_at(t->split.placement, t->split.pp, row, s));
            load += cft__seconds_of(&c.forward, &all) + cft__seconds_of(&c.replay, &dropped);
            load += cft__seconds_of(&c.backward, &all);
        }
        if (load > most) most = load;
        head += cft__seconds_of(&own.forward, &least) + transfer;
        if (!t->splits) tail += cft__seconds_of(&own.backward, &least) + transfer;
    }
    return most;
}

/* Returns a lower bound of the time of every schedule of the current batch, of any kind and replay: the bound of the
   slowest rank, which is *slowest. It sums over the chunks; their order does not matter. */
static double cft__find_bound(const cft__tuner *t, int64_t k, int64_t *slowest) {
    double most = 0;
    int64_t rank;
    *slowest = 0;
    for (rank = 0; rank < t->plan->n_ranks && t->plan->chunks_per_rank > 0; rank++) {
        double load = cft__stage_load(t, rank, k);
        if (!(load > most)) continue;
        most = load;
        *slowest = rank;
    }
    return cft__product(most, 1 - 1e-12) + t->step_seconds;
}

/* One combination of recomputation, offload and stream for a split and ChunkSize: its settings, and its memory. */
typedef struct cft__relief {
    cf_parallel split;
    cf_memory_desc memory;
    cf_timing timing;
    double step_seconds;
    cf_stage_cost *costs;
    cft__weights *weights;
    cft__stage *stages;
    cft__least (*most)[2]; /* (n_replays x n_ks) maximum over the batches of the least memory: [0] with this K, [1] with
                              1, because `best` may keep fewer */
} cft__relief;

/* Stores the bounds of the candidates of a point, which differ only in kind from `first`, for the current batch. bound:
   of their time, or NULL; that of the first window holds for all, because a stream makes nothing faster. */
static void cft__bound_point(cft__tuner *t, int64_t first, int64_t batch, const double *bound,
                            const cft__least *least) {
    int64_t kind, w;
    for (kind = 0; kind < t->counts[CFT__KIND]; kind++) {
        int64_t id = first + kind * t->strides[CFT__KIND];
        cf_tune_candidate *c = &t->tuning->candidates[id];
        for (w = 0; w < t->counts[CFT__WINDOW] && bound != NULL; w++)
            t->bounds[(id + w) * t->desc.n_batches + batch] = *bound;
        if (least[c->kind == CF_SCHEDULE_BEST].bytes > t->tuning->limit_bytes) c->status = CF_TUNE_INFEASIBLE;
    }
    if (bound != NULL) cft__report_done(t);
}

/* Bounds all points of one split, ChunkSize and relief on one batch. first: the first of their candidates. */
static void cft__bound_points(cft__tuner *t, int64_t first, int64_t batch, cft__least (*noted)[2]) {
    int timed = batch < t->desc.n_batches && cft__index(t, first, CFT__WINDOW) == 0;
    const int64_t most = cft__packing_of(t, first)->most_chunks, *ks = t->desc.ks;
    cft__least least[CF_REPLAY_COUNT][2];
    int64_t replay, k, unused;
    double bound = 0;
    int best;
    for (k = 0; k < t->desc.n_ks && !t->stop; k++) {
        int same = k > 0 && ks[k - 1] >= most; /* no chain has more chunks to keep */
        if (timed && !same) bound = cft__find_bound(t, ks[k], &unused);
        for (replay = 0; replay < t->desc.n_replays; replay++, noted++) {
            cft__least *of = least[replay];
            int local = t->desc.replays[replay] == CF_REPLAY_LOCAL;
            if (k == 0) of[1] = cft__least_bytes(t, 1, local);
            if (!same) t->worked += 15 + (double)t->plan->n_chunks / 16;
            if (!same) of[0] = ks[k] > 1 ? cft__least_bytes(t, ks[k], local) : of[1];
            for (best = 0; best < 2; best++)
                if (of[best].bytes > (*noted)[best].bytes) (*noted)[best] = of[best];
            cft__bound_point(t, first + k * t->strides[CFT__K] + replay * t->strides[CFT__REPLAY], batch,
                             timed ? &bound : NULL, of);
        }
    }
}

/* Returns the candidate's `outputs`, as in cf_memory_desc: 0 none, 1 kept, 2 kept in host memory. With a state_window 1
   stands for 2 as well, because streaming itself moves kept outputs to host memory. away: 1 if they do not fit on the
   GPU. */
static int cft__keeps(const cft__tuner *t, const cf_tune_candidate *c, int away) {
    int outputs = c->recompute != CF_RECOMPUTE_FULL && c->replay == CF_REPLAY_LOCAL ? t->outputs : 0;
    return outputs > 1 && (c->state_window > 0 || (t->moves && !away)) ? 1 : outputs;
}

/* Lays out the reliefs of the current split. */
static void cft__lay_out_reliefs(cft__tuner *t, cft__carver *carver) {
    int64_t way, n = t->strides[CFT__REPLAY], n_v = t->split.pp * t->split.n_virtual;
    cft__relief measured;
    t->reliefs = (cft__relief *)cft__take(carver, n, sizeof *t->reliefs);
    for (way = 0; way < n; way++) {
        cft__relief *relief = t->reliefs != NULL ? &t->reliefs[way] : &measured;
        relief->costs = (cf_stage_cost *)cft__take(carver, n_v, sizeof *relief->costs);
        relief->weights = (cft__weights *)cft__take(carver, n_v, sizeof *relief->weights);
        relief->stages = (cft__stage *)cft__take(carver, n_v, sizeof *relief->stages);
        relief->most = (cft__least(*)[2])cft__take(carver, t->desc.n_replays * t->desc.n_ks, sizeof *relief->most);
    }
}

static void cft__take_relief(cft__tuner *t, const cft__relief *relief) {
    t->split = relief->split;
    t->memory = relief->memory;
    t->timing = relief->timing;
    t->step_seconds = relief->step_seconds;
    t->costs = relief->costs;
    t->weights = relief->weights;
    t->stages = relief->stages;
}

/* Sets up a relief, once for all batches. first: the first candidate that has it. */
static cf_result cft__set_up_relief(cft__tuner *t, int64_t first, cft__relief *relief) {
    cf_tune_candidate c = t->tuning->candidates[first];
    t->costs = relief->costs;
    t->weights = relief->weights;
    t->stages = relief->stages;
    memset(relief->most, 0, (size_t)(t->desc.n_replays * t->desc.n_ks) * sizeof *relief->most);
    c.replay = CF_REPLAY_LOCAL;
    c.outputs = cft__keeps(t, &c, 0); /* takes the least time; with outputs in host memory it takes the least memory */
    CFT__TRY(cft__set_up(t, &c));
    t->memory.outputs = cft__keeps(t, &c, 1);
    if (t->memory.outputs != c.outputs) CFT__TRY(cft__set_weights(t, c.chunk_size));
    relief->split = t->split;
    relief->memory = t->memory;
    relief->timing = t->timing;
    relief->step_seconds = t->step_seconds;
    return CF_OK;
}

/* Records the current batch as packed. Its work is that of a schedule of each rank, and of packing. */
static void cft__note_packing(const cft__tuner *t, cft__packing *packing) {
    double part = 1 / (double)(t->desc.n_batches + 1);
    int best;
    packing->most_chunks = cft__max(packing->most_chunks, cft__longest_path(t->plan));
    for (best = 0; best < 2; best++) {
        double schedules = (double)t->plan->n_ranks * cft__schedule_work(t, best);
        packing->work[best] += part * (schedules + 2 * (double)(t->desc.batch + t->plan->n_chunks));
    }
}

/* Bounds all points of one split and ChunkSize on one batch, with every relief. */
static cf_result cft__bound_batch(cft__tuner *t, int64_t first, int64_t batch) {
    int64_t way;
    for (way = 0; way < t->strides[CFT__REPLAY]; way++) {
        cft__take_relief(t, &t->reliefs[way]);
        if (way == 0) { /* the same plan for every relief */
            CFT__TRY(cft__pack_batch(t, &t->tuning->candidates[first], batch));
            cft__note_packing(t, cft__packing_of(t, first));
        }
        CFT__TRY(cft__check_weights(t));
        cft__bound_points(t, first + way, batch, t->reliefs[way].most);
    }
    return CF_OK;
}

/* Fills in the need of a relief's candidates that cannot fit. Unlike bytes per token, a report includes the ring of a
   stream. best: 1 for those of kind best. first, end: the candidates of the split and ChunkSize. */
static cf_result cft__report_relief(cft__tuner *t, int64_t way, int best, int64_t first, int64_t end) {
    const cft__least *reported = NULL;
    int64_t id, v;
    for (id = first + way; id < end; id += t->strides[CFT__REPLAY]) {
        cf_tune_candidate *c = &t->tuning->candidates[id];
        int64_t point = cft__index(t, id, CFT__K) * t->desc.n_replays + cft__index(t, id, CFT__REPLAY);
        const cft__least *least = &t->reliefs[way].most[point][best];
        int64_t bytes;
        if (c->status != CF_TUNE_INFEASIBLE || (c->kind == CF_SCHEDULE_BEST) != best) continue;
        for (v = 0; v < t->split.pp * t->split.n_virtual; v++) t->loads[v] = t->streamed[v] = least->load;
        if (reported == NULL || memcmp(reported, least, sizeof *least) != 0) CFT__TRY(cft__report_stages(t, "lengths"));
        reported = least;
        bytes = cft__stages_host(t) ? t->reports[least->stage].total : least->bytes;
        if (bytes <= c->bytes) continue; /* a schedule has been tried */
        cft__set_infeasible(c, &t->reports[least->stage], bytes, least->stage,
                            best ? "a chunk of a chain does not fit, even alone"
                                 : "K chunks of a chain do not fit, even alone");
    }
    return CF_OK;
}

static void cft__set_recompute(const cft__tuner *t, cf_tune_candidate *c, int64_t level) {
    const cf_parallel *split = &t->tuning->splits[c->split];
    c->recompute = split->recompute;
    c->recompute_layers = split->recompute_layers;
    c->offload = t->desc.memory.offload;
    if (t->counts[CFT__LEVEL] == 1) return;
    c->recompute = cft__levels[level].what;
    c->recompute_layers = 0;
    c->offload |= cft__levels[level].offload;
    if (cft__levels[level].part > 1)
        c->recompute_layers = cft__div_up(t->desc.model->layers,
                                          split->pp * split->n_virtual * cft__levels[level].part);
}

/* Fills in all candidates of a split and ChunkSize, from `first` on. */
static void cft__fill_size(cft__tuner *t, int64_t first, int64_t split, int64_t chunk_size) {
    int64_t id, end = first + t->strides[CFT__SIZE];
    t->split = t->tuning->splits[split];
    for (id = first; id < end; id++) {
        cf_tune_candidate *c = &t->tuning->candidates[id];
        memset(c, 0, sizeof *c);
        c->split = split;
        c->chunk_size = chunk_size;
        c->k = t->desc.ks[cft__index(t, id, CFT__K)];
        c->kind = t->desc.kinds[cft__index(t, id, CFT__KIND)];
        c->replay = t->desc.replays[cft__index(t, id, CFT__REPLAY)];
        c->max_cp = t->tuning->max_cps[split];
        c->in_step = cft__in_step(t, c->max_cp);
        if (cft__takes_paper(t, c)) c->kind = CF_SCHEDULE_PAPER;
        cft__set_recompute(t, c, cft__index(t, id, CFT__LEVEL));
        c->state_window = t->windows[cft__index(t, id, CFT__WINDOW)];
        c->outputs = cft__keeps(t, c, 0);
        c->why = "";
        c->same_as = -1;
    }
    for (id = first * t->desc.n_batches; id < end * t->desc.n_batches; id++) {
        t->tuning->seconds[id] = -1;
        t->bounds[id] = 0;
    }
    memset(cft__packing_of(t, first), 0, sizeof(cft__packing));
}

/* ---- rounds ---- */

/* Returns the mean work of a batch of the families of candidate `id`. */
static double cft__batch_work(const cft__tuner *t, int64_t id) {
    return cft__packing_of(t, id)->work[t->tuning->candidates[id].kind == CF_SCHEDULE_BEST];
}

/* A cf_tune_task: does the work of worker `i` in this round. */
static void cft__work(void *context, int64_t i) {
    cft__tuner *t = (cft__tuner *)context, *worker = &t->workers[i];
    worker->result = t->work(worker, t->turns[t->first_index + i].first);
}

/* Starts a worker, with its own working space and everything known so far. began: work that will about be done when it
   starts. expected: its own work. */
static void cft__hire(const cft__tuner *t, cft__tuner *worker, double began, double expected) {
    const cft__tuner own = *worker;
    *worker = *t;
    worker->costs = own.costs;
    worker->weights = own.weights;
    worker->stages = own.stages;
    worker->limits = own.limits;
    worker->loads = own.loads;
    worker->streamed = own.streamed;
    worker->reports = own.reports;
    worker->plan = NULL;
    worker->packed = NULL;
    worker->schedule = NULL;
    worker->timeline = NULL;
    worker->error = &worker->record;
    worker->simulated = 0;
    worker->worked = worker->reported = worker->began = began;
    worker->due = began + expected;
    worker->result = CF_OK;
}

/* Takes over a worker's counts and frees its plan and schedule. *result: the first failure of a round. */
static void cft__dismiss(cft__tuner *t, cft__tuner *worker, cf_result *result) {
    cft__free_schedule(worker);
    cft__free_plans(worker);
    t->reported += worker->reported - worker->began;
    t->simulated += worker->simulated;
    t->worked += worker->worked - worker->began;
    t->stop |= worker->stop;
    if (*result != CF_OK || worker->result == CF_OK) return;
    *result = worker->result;
    t->record = worker->record;
}

/* Does the work of n turns from `first` on; n is at most CFT__ROUND. */
static cf_result cft__run_round(cft__tuner *t, int64_t first, int64_t n) {
    int64_t i;
    double began = t->worked;
    cf_result result = CF_OK;
    t->first_index = first;
    for (i = 0; i < n; i++) {
        int64_t id = t->turns[first + i].first;
        cft__hire(t, &t->workers[i], began,
                  t->part == CFT__BOUNDS ? t->of_bounds : t->of_tries * cft__batch_work(t, id));
        began = t->workers[i].due;
    }
    if (t->desc.run_tasks != NULL) t->desc.run_tasks(t->desc.user, n, cft__work, t);
    for (i = 0; i < n; i++) {
        if (t->desc.run_tasks == NULL && !t->stop) cft__work(t, i);
        cft__dismiss(t, &t->workers[i], &result);
    }
    return result;
}

/* Bounds all candidates of one split and ChunkSize, with the reliefs' memory. The batch for memory comes first, because
   it shows soonest if none fits. */
static cf_result cft__bound_batches(cft__tuner *t, int64_t first) {
    int64_t batch, way, id = first, end = first + t->strides[CFT__SIZE];
    for (way = 0; way < t->strides[CFT__REPLAY]; way++)
        CFT__TRY(cft__set_up_relief(t, first + way, &t->reliefs[way]));
    for (batch = t->desc.n_batches; batch >= 0 && id < end && !t->stop; batch--) {
        CFT__TRY(cft__bound_batch(t, first, batch));
        while (id < end && t->tuning->candidates[id].status == CF_TUNE_INFEASIBLE) id++;
    }
    for (way = 0; way < t->strides[CFT__REPLAY]; way++) {
        cft__take_relief(t, &t->reliefs[way]);
        CFT__TRY(cft__report_relief(t, way, 0, first, end));
        CFT__TRY(cft__report_relief(t, way, 1, first, end));
    }
    return CF_OK;
}

/* Bounds all candidates of one split and ChunkSize. */
static cf_result cft__bound_size(cft__tuner *t, int64_t first) {
    cf_stage_cost *const costs = t->costs;
    cft__weights *const weights = t->weights;
    cft__stage *const stages = t->stages;
    void *memory = NULL;
    cf_result result;
    cft__set_memory_of(t, &t->tuning->candidates[first]);
    CFT__TRY(cft__carve(t, cft__lay_out_reliefs, "parallel.pp", &memory));
    result = cft__bound_batches(t, first);
    t->allocator.release(memory, t->allocator.user);
    t->costs = costs;
    t->weights = weights;
    t->stages = stages;
    return result;
}

static void cft__mean_bounds(cft__tuner *t, int64_t first, int64_t end) {
    int64_t n = t->desc.n_batches, id, batch;
    for (id = first; id < end; id++)
        for (batch = 0; batch < n; batch++)
            t->tuning->candidates[id].bound += t->bounds[id * n + batch] / (double)n;
}

/* ---- the search ---- */

/* Returns the time above which a candidate cannot be among the best, with a margin for rounding. */
static double cft__to_beat(const cft__tuner *t) {
    const cf_tuning *tuning = t->tuning;
    int64_t n = cft__max(t->desc.n_exact, 1);
    double slower = t->desc.n_exact == 0 && t->desc.tolerance > 0 ? t->desc.tolerance : 1e-9;
    if (tuning->n_ranked < n) return DBL_MAX;
    return cft__product(tuning->candidates[tuning->ranking[n - 1]].seconds, 1 + slower);
}

/* Inserts a candidate whose time is known into the ranking, unless it is there: by time, then by number. */
static void cft__rank_candidate(cf_tuning *tuning, int64_t id) {
    double seconds = tuning->candidates[id].seconds;
    int64_t place;
    for (place = 0; place < tuning->n_ranked; place++)
        if (tuning->ranking[place] == id) return;
    tuning->n_ranked++;
    for (; place > 0; place--) {
        int64_t before = tuning->ranking[place - 1];
        double faster = tuning->candidates[before].seconds;
        if (faster < seconds || (!(faster > seconds) && before < id)) break;
        tuning->ranking[place] = before;
    }
    tuning->ranking[place] = id;
    tuning->winner = tuning->ranking[0]; /* provisional, until all are known */
}

static void cft__give_up(cf_tune_candidate *c, const char *why) {
    c->status = CF_TUNE_DOMINATED;
    c->why = why;
    c->bubble = c->chunks = c->waiting = 0;
}

/* Returns which of two candidates is simpler to run; below 0: a, above 0: b. */
static int64_t cft__compare_simplicity(const cf_tune_candidate *a, const cf_tune_candidate *b) {
    if ((a->state_window > 0) != (b->state_window > 0)) return (a->state_window > 0) - (b->state_window > 0);
    if (a->recompute != b->recompute) return (int)a->recompute - (int)b->recompute;
    if (a->offload != b->offload) return a->offload - b->offload;
    if (a->replay != b->replay) return a->replay == CF_REPLAY_LOCAL ? -1 : 1;
    if (a->outputs != b->outputs) return a->outputs - b->outputs;
    if ((a->kind == CF_SCHEDULE_BEST) != (b->kind == CF_SCHEDULE_BEST))
        return (a->kind == CF_SCHEDULE_BEST) - (b->kind == CF_SCHEDULE_BEST);
    return a->k - b->k;
}

/* Returns the longest time, projected from m batches, at which a candidate stays in the race. best: the best time. A
   projection is off by about 1 % after one batch of 256 sequences, and by more after fewer; the margin is twice
   that. */
static double cft__race_time(const cft__tuner *t, int64_t m, double best) {
    double tolerance = t->desc.tolerance > 0 ? t->desc.tolerance : 0, margin;
    if (!(best > 0)) return DBL_MAX;
    margin = 0.02 * 16 / cft__square_root(cft__product((double)m, (double)t->desc.batch));
    return cft__product(best, 1 + tolerance + margin);
}

/* Projects the mean time of candidate `id`, whose first m batches take `sum` seconds. It assumes that the other batches
   exceed their bounds by the same factor, so the choice of first batches matters little. */
static double cft__project(const cft__tuner *t, int64_t id, int64_t m, double sum) {
    const double *bounds = &t->bounds[id * t->desc.n_batches];
    double first = 0, all = 0;
    int64_t i;
    for (i = 0; i < t->desc.n_batches; i++) {
        all += bounds[i];
        if (i < m) first += bounds[t->order[i].first];
    }
    if (!(first > 0)) return sum / (double)m;
    return cft__product(sum, all / first) / (double)t->desc.n_batches;
}

/* The time of a candidate's tries so far. */
typedef struct cft__lap {
    int64_t m;       /* batches that are done */
    double sum;      /* their seconds */
    double at_least; /* their seconds, and the bounds of the other batches */
} cft__lap;

/* Returns the reason for giving up a candidate whose next batch takes at least `seconds`, or NULL. A race gives it up
   for a projection only if a lower bound of its time proves that it is not the fastest. For even sizes, which are not
   in the caller's list, a projection is enough. */
static const char *cft__why_give_up(const cft__tuner *t, cf_tune_candidate *c, const cft__lap *lap, double seconds) {
    const cf_tuning *tuning = t->tuning;
    int64_t id = c - tuning->candidates, n = t->desc.n_batches;
    double mean = (lap->at_least + (seconds - t->bounds[id * n + t->order[lap->m].first])) / (double)n, best;
    if (lap->m == n - 1) return NULL; /* all is known then */
    if (mean > cft__to_beat(t)) {
        c->bound = mean;
        return "its first batches and bounds of the others are above the best";
    }
    if (t->desc.n_exact > 0 || tuning->n_ranked == 0) return NULL;
    best = tuning->candidates[tuning->ranking[0]].seconds;
    if (mean < best && id < tuning->n_candidates - tuning->n_even) return NULL;
    if (cft__project(t, id, lap->m + 1, lap->sum + seconds) <= cft__race_time(t, lap->m + 1, best)) return NULL;
    return "its first batches take longer than the best's";
}

/* Tries one batch of a candidate. *seconds: a whole iteration, at the speed of the slowest rank. The rank with the
   largest bound comes first: if its time alone gives the candidate up, the others are left out. lap: of the batches
   before; NULL: no rank is left out. */
static cf_result cft__try_batch(cft__tuner *t, cf_tune_candidate *c, int64_t batch, const cft__lap *lap,
                                double *seconds) {
    double slowest = 0, bubble = 0, waiting = 0;
    int64_t i, rank, first;
    CFT__TRY(cft__pack_batch(t, c, batch));
    if (cft__needs_too_much(t, c)) {
        c->status = CF_TUNE_INFEASIBLE; /* the bounds have its need */
        return CF_OK;
    }
    (void)cft__find_bound(t, c->k, &first);
    for (i = -1; i < t->plan->n_ranks; i++) {
        rank = i < 0 ? first : i;
        if (i == first || (rank > 0 && cft__is_like_last(t->plan, rank))) continue;
        CFT__TRY(cft__fit_rank(t, c, batch, rank));
        if (c->status == CF_TUNE_INFEASIBLE) return CF_OK;
        if (i >= 0 && !(t->timeline->makespan > slowest)) continue;
        slowest = t->timeline->makespan;
        bubble = t->timeline->bubble_useful;
        waiting = slowest > 0 ? t->timeline->stream_seconds / (slowest * (double)t->split.pp) : 0;
        if (lap != NULL && cft__why_give_up(t, c, lap, slowest + t->step_seconds) != NULL) break;
    }
    *seconds = slowest + t->step_seconds;
    if (batch == t->desc.n_batches) return CF_OK;
    c->bubble += bubble / (double)t->desc.n_batches;
    c->waiting += waiting / (double)t->desc.n_batches;
    c->chunks += (double)t->plan->chunks_per_rank / (double)t->desc.n_batches;
    return CF_OK;
}

/* Resets a candidate of any status, and sets up its costs and memory. away: 1 if its outputs do not fit on the GPU. */
static cf_result cft__begin(cft__tuner *t, int64_t id, int away) {
    cf_tune_candidate *c = &t->tuning->candidates[id];
    int64_t i;
    c->status = CF_TUNE_UNTRIED;
    c->why = "";
    c->same_as = -1;
    c->bytes = c->limited = c->replays = 0;
    c->bubble = c->chunks = c->waiting = 0;
    c->outputs = cft__keeps(t, c, away);
    for (i = 0; i < t->desc.n_batches; i++) t->tuning->seconds[id * t->desc.n_batches + i] = -1;
    return cft__set_up(t, c);
}

/* Simulates a candidate that was reset, batch by batch. The batch for memory follows the first, unless that was too
   slow. */
static cf_result cft__try_batches(cft__tuner *t, int64_t id, int forced) {
    cf_tune_candidate *c = &t->tuning->candidates[id];
    int64_t i, batch, n = t->desc.n_batches;
    double *seconds = &t->tuning->seconds[id * n], sum = 0, unused;
    cft__lap lap = {0, 0, cft__product(c->bound, (double)n)};
    for (; lap.m < n; lap.m++) {
        const char *why = NULL;
        if (t->stop) return CF_OK;
        batch = t->order[lap.m].first;
        CFT__TRY(cft__try_batch(t, c, batch, forced ? NULL : &lap, &seconds[batch]));
        if (c->status == CF_TUNE_INFEASIBLE) return CF_OK;
        if (!forced) why = cft__why_give_up(t, c, &lap, seconds[batch]);
        if (why != NULL) {
            cft__give_up(c, why);
            return CF_OK;
        }
        lap.sum += seconds[batch];
        lap.at_least += seconds[batch] - t->bounds[id * n + batch];
        if (lap.m == 0) CFT__TRY(cft__try_batch(t, c, n, NULL, &unused));
        if (c->status == CF_TUNE_INFEASIBLE) return CF_OK;
        if (lap.m < n - 1) cft__report_done(t);
    }
    c->status = CF_TUNE_OK;
    /* in one order for all candidates, so that equal times give equal sums */
    for (i = 0; i < n; i++) sum += seconds[i];
    c->seconds = sum / (double)n;
    c->confidence = cf_tune_confidence(seconds, NULL, n);
    return CF_OK;
}

/* Simulates a candidate; if its outputs do not fit on the GPU, again with them in host memory. forced: runs all
   batches, however slow, even if the candidate was given up before. */
static cf_result cft__try_candidate(cft__tuner *t, int64_t id, int forced) {
    cf_tune_candidate *c = &t->tuning->candidates[id];
    int away;
    if (!forced && c->bound > cft__to_beat(t)) {
        cft__give_up(c, "a lower bound of its time is above the best");
        return CF_OK;
    }
    for (away = 0; away == 0 || (away == 1 && cft__moves_away(t, c)); away++) {
        CFT__TRY(cft__begin(t, id, away));
        CFT__TRY(cft__try_batches(t, id, forced));
    }
    return CF_OK;
}

/* Returns the original of a candidate that repeats its schedules. It follows same_as repeatedly, because an original
   may later turn out to be a copy itself. */
static int64_t cft__origin_of(const cf_tuning *tuning, int64_t id) {
    while (tuning->candidates[id].same_as >= 0) id = tuning->candidates[id].same_as;
    return id;
}

/* Gives up a candidate for another one that is as good, if the other's result is known. Returns whether it did. */
static int cft__give_up_for(const cft__tuner *t, cf_tune_candidate *c, const cf_tune_candidate *other,
                            const char *why) {
    int tried = other->status == CF_TUNE_OK || other->status == CF_TUNE_DOMINATED;
    if (other->limited || other->status == CF_TUNE_INFEASIBLE || !tried) return 0;
    cft__give_up(c, why);
    c->same_as = other->same_as >= 0 ? other->same_as : other - t->tuning->candidates;
    return 1;
}

static int cft__is_tried(const cft__tuner *t, int64_t id) {
    return t->tuning->seconds[id * t->desc.n_batches + t->order[0].first] >= 0;
}

/* Returns whether the schedules of a candidate, or of its original, were made and fit without a limit. */
static int cft__fits_freely(const cft__tuner *t, int64_t id) {
    const cf_tune_candidate *c;
    id = cft__origin_of(t->tuning, id);
    c = &t->tuning->candidates[id];
    return cft__is_tried(t, id) && !c->limited && c->status != CF_TUNE_INFEASIBLE;
}

/* Returns whether a candidate's schedules split backwards, though the columns of its cp groups price whole ones. */
static int cft__cuts_groups(const cf_tune_candidate *c) {
    return c->max_cp > 1 && c->kind == CF_SCHEDULE_ZERO_BUBBLE;
}

/* Returns whether another candidate's result makes this one needless; its status then has the reason. All K that no
   chain exceeds make the same schedules, and so do both forms of replay if nothing is replayed. */
static int cft__is_needless(cft__tuner *t, int64_t id) {
    cf_tune_candidate *c = &t->tuning->candidates[id];
    int64_t most = cft__packing_of(t, id)->most_chunks;
    int64_t k = cft__index(t, id, CFT__K), replay = cft__index(t, id, CFT__REPLAY);
    if (k > 0 && t->desc.ks[k - 1] >= most) {
        cft__give_up(c, "no chain has so many chunks: the same as a smaller K");
        c->same_as = id - t->strides[CFT__K];
        return 1;
    }
    if (cft__cuts_groups(c)) {
        cft__give_up(c, "columns price the whole backwards of cp groups");
        return 1;
    }
    if (cft__takes_paper(t, c) && cft__index(t, id, CFT__KIND) > 0) {
        cft__give_up(c, "cp groups on one stage take the schedules of paper: the same");
        c->same_as = id - cft__index(t, id, CFT__KIND) * t->strides[CFT__KIND];
        return 1;
    }
    if (c->k >= most && replay > 0 &&
        cft__give_up_for(t, c, c - replay * t->strides[CFT__REPLAY],
                         "nothing is replayed: the same as the other form"))
        return 1;
    if (cft__index(t, id, CFT__LEVEL) > 0 && cft__fits_freely(t, id - t->strides[CFT__LEVEL]) &&
        cft__give_up_for(t, c, c - t->strides[CFT__LEVEL], "it fits with less recomputation"))
        return 1;
    return cft__index(t, id, CFT__WINDOW) > 0 && cft__give_up_for(t, c, &c[-1], "it fits without");
}

/* Orders turns by rising key, then by number, where the fixed kinds come first. */
static int cft__compare_turns(const void *a, const void *b) {
    const cft__turn *x = (const cft__turn *)a, *y = (const cft__turn *)b;
    if (x->key < y->key || x->key > y->key) return x->key < y->key ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

/* Puts the batches with the largest bounds first: they have the list's long sequences and account for most of a
   candidate's time. */
static void cft__order_batches(cft__tuner *t) {
    int64_t i, id, n = t->desc.n_batches;
    for (i = 0; i < n; i++) {
        t->order[i].first = i;
        t->order[i].key = 0;
        for (id = 0; id < t->tuning->n_candidates; id++) t->order[i].key -= t->bounds[id * n + i];
    }
    qsort(t->order, (size_t)n, sizeof *t->order, cft__compare_turns);
}

/* Sorts families by the least bound of their remaining candidates. */
static void cft__sort_turns(cft__tuner *t, int64_t family) {
    int64_t i, id;
    t->family = family;
    t->n_families = t->tuning->n_candidates / family;
    for (i = 0; i < t->n_families; i++) {
        cft__turn *turn = &t->turns[i];
        turn->first = i * family;
        turn->key = DBL_MAX;
        for (id = turn->first; id < turn->first + family; id++) {
            const cf_tune_candidate *c = &t->tuning->candidates[id];
            if (c->status == CF_TUNE_UNTRIED && c->bound < turn->key) turn->key = c->bound;
        }
    }
    qsort(t->turns, (size_t)t->n_families, sizeof *t->turns, cft__compare_turns);
}

/* ---- trying candidates ---- */

/* Tries a family: candidates that differ only in replay, recomputation and window. Some may be given up for another of
   the family, so they are tried one after another. */
static cf_result cft__try_family(cft__tuner *t, int64_t first) {
    int64_t id;
    for (id = first; id < first + t->family && !t->stop; id++) {
        cf_tune_candidate *c = &t->tuning->candidates[id];
        if (c->status != CF_TUNE_UNTRIED) continue;
        if (!cft__is_needless(t, id)) CFT__TRY(cft__try_candidate(t, id, 0));
    }
    cft__report_done(t);
    return CF_OK;
}

static void cft__note_exact(cft__tuner *t, int64_t id) {
    if (t->tuning->candidates[id].status == CF_TUNE_OK) cft__rank_candidate(t->tuning, id);
}

/* Makes a candidate exact, whether or not it was given up. */
static cf_result cft__make_exact(cft__tuner *t, int64_t id) {
    CFT__TRY(cft__try_candidate(t, id, 1));
    cft__note_exact(t, id);
    return CF_OK;
}

/* Finds an answer quickly, before anything is known. It goes through the splits from the most tensor parallelism down,
   and takes the first that fits with the least K and a usual ChunkSize. It uses the first kind, or the second if cp
   groups do not support that. It tries no relief first and, if nothing fits, all reliefs. No progress is reported
   before, because a search ended sooner would have no answer. */
static cf_result cft__find_first(cft__tuner *t) {
    enum { CFT__USUAL = 8192 };
    int64_t n = t->tuning->n_splits, i, size = 0;
    int (*const progress)(void *, const cf_tune_progress *) = t->desc.progress;
    t->desc.progress = NULL;
    while (size + 1 < t->desc.n_chunk_sizes && t->desc.chunk_sizes[size + 1] <= CFT__USUAL) size++;
    for (i = 2 * n - 1; i >= 0 && t->tuning->n_ranked == 0; i--) {
        int64_t id = i % n * t->strides[CFT__SPLIT] + size * t->strides[CFT__SIZE];
        if (i < n) id += t->strides[CFT__REPLAY] - 1;
        if (cft__cuts_groups(&t->tuning->candidates[id])) id += t->strides[CFT__KIND];
        CFT__TRY(cft__set_up(t, &t->tuning->candidates[id]));
        CFT__TRY(cft__pack_batch(t, &t->tuning->candidates[id], 0));
        CFT__TRY(cft__check_weights(t));
        CFT__TRY(cft__make_exact(t, id));
    }
    t->desc.progress = progress;
    return CF_OK;
}

/* Returns the least bound of any candidate that may still be tried. */
static double cft__least_bound(const cft__tuner *t) {
    double least = DBL_MAX / 4;
    int64_t id;
    for (id = 0; id < t->tuning->n_candidates; id++) {
        const cf_tune_candidate *c = &t->tuning->candidates[id];
        if (c->status == CF_TUNE_UNTRIED && c->bound > 0 && c->bound < least) least = c->bound;
    }
    return least;
}

/* Returns the work of one batch of each family that may still be tried. Candidates count if their bound is below the
   best time or, as long as that is far from the least bound, within 10 % of the least bound. */
static double cft__look_ahead(const cft__tuner *t) {
    double reach = cft__to_beat(t), nearby = cft__product(1.1, cft__least_bound(t)), sum = 0;
    int64_t family = t->strides[CFT__KIND], first, id;
    if (reach > nearby && t->desc.n_exact < t->tuning->n_candidates) reach = nearby;
    for (first = 0; first < t->tuning->n_candidates; first += family) {
        int64_t k = cft__index(t, first, CFT__K);
        if (k > 0 && t->desc.ks[k - 1] >= cft__packing_of(t, first)->most_chunks) continue;
        if (t->tuning->candidates[first].max_cp > 1 && cft__index(t, first, CFT__KIND) > 0) continue;
        for (id = first; id < first + family; id++)
            if (t->tuning->candidates[id].status == CF_TUNE_UNTRIED && t->tuning->candidates[id].bound <= reach) break;
        if (id < first + family) sum += cft__batch_work(t, first);
    }
    return sum;
}

/* Updates the expected work of the whole search. first: the next turn. */
static void cft__expect(cft__tuner *t, int64_t first) {
    const cf_tuning *tuning = t->tuning;
    double work = cft__product(t->of_tries, cft__look_ahead(t));
    if (t->part == CFT__BOUNDS) work += t->of_bounds * (double)(t->n_families - first);
    if (t->room > 0 && tuning->n_ranked > 0 && tuning->candidates[tuning->ranking[0]].chunks <= (double)CFT__FEW)
        work += t->of_bounds * (double)(2 * CFT__EVEN);
    t->expected = t->due = t->worked + work;
}

/* Goes through all families in rounds. The first rounds are small: the sooner results are known, the fewer tries are
   wasted. */
static cf_result cft__try_all(cft__tuner *t, int part) {
    static cf_result (*const works[])(cft__tuner *, int64_t) = {cft__bound_size, cft__try_family};
    int64_t i, j, id, n, size = 1;
    double began = t->worked, last = -1, tried = 0;
    double most = cft__product(2.5, t->of_tries); /* the first tries take longer than others */
    t->work = works[part];
    t->part = part;
    for (i = 0; i < t->n_families && !t->stop; i += n) {
        n = cft__min(size, t->n_families - i);
        if (t->desc.progress != NULL && t->worked > last) cft__expect(t, i);
        last = t->worked;
        CFT__TRY(cft__run_round(t, i, n));
        for (j = i; j < i + n; j++) {
            int64_t first = t->turns[j].first, end = first + t->family;
            if (t->workers[j - i].worked > t->workers[j - i].began) tried += cft__batch_work(t, first);
            if (part == CFT__BOUNDS && !t->stop) cft__mean_bounds(t, first, end);
            for (id = first; id < end; id++) cft__note_exact(t, id);
        }
        if (part == CFT__BOUNDS) t->of_bounds = (t->worked - began) / (double)(i + n);
        else if (tried > 0) t->of_tries = t->worked - began < most * tried ? (t->worked - began) / tried : most;
        size = cft__min(2 * size, CFT__ROUND);
    }
    return CF_OK;
}

/* Runs the bounds first, then tries the candidates that they leave. */
static cf_result cft__search(cft__tuner *t) {
    cft__sort_turns(t, t->strides[CFT__SIZE]);
    CFT__TRY(cft__try_all(t, CFT__BOUNDS));
    cft__order_batches(t);
    cft__sort_turns(t, t->strides[CFT__KIND]);
    return cft__try_all(t, CFT__TRIES);
}

/* ---- the choice of the winner ---- */

/* Finds the mean and uncertainty of the time by which an exact candidate is behind the fastest. */
static void cft__find_behind(cf_tuning *tuning, int64_t id) {
    cf_tune_candidate *c = &tuning->candidates[id];
    int64_t fastest = tuning->ranking[0], n = tuning->n_batches;
    c->behind = c->seconds - tuning->candidates[fastest].seconds;
    c->behind_confidence = cf_tune_confidence(&tuning->seconds[id * n], &tuning->seconds[fastest * n], n);
}

/* Returns whether a candidate is as fast as the fastest, within the tolerance. A larger difference counts even if it is
   uncertain, so that the winner is never slower than promised. */
static int cft__is_as_fast(const cft__tuner *t, const cf_tune_candidate *c) {
    double slower = cft__product(t->tuning->candidates[t->tuning->ranking[0]].seconds, t->desc.tolerance);
    if (t->desc.tolerance < 0) return c == &t->tuning->candidates[t->tuning->ranking[0]];
    return c->behind <= slower;
}

/* Returns whether another candidate is faster and needs less memory. */
static int cft__is_beaten(const cf_tuning *tuning, const cf_tune_candidate *c) {
    int64_t i;
    for (i = 0; i < tuning->n_ranked; i++) {
        const cf_tune_candidate *other = &tuning->candidates[tuning->ranking[i]];
        if (!(other->seconds < c->seconds)) return 0;
        if (other->bytes < c->bytes) return 1;
    }
    return 0;
}

static void cft__choose_winner(cft__tuner *t) {
    cf_tuning *tuning = t->tuning;
    double alike = cft__product((double)tuning->limit_bytes, CF_TUNE_ALIKE);
    int64_t i, least = INT64_MAX;
    const cf_tune_candidate *best = NULL;
    for (i = 0; i < tuning->n_ranked; i++) {
        const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[i]];
        cft__find_behind(tuning, tuning->ranking[i]);
        if (cft__is_as_fast(t, c)) least = cft__min(least, c->bytes);
    }
    for (i = 0; i < tuning->n_ranked; i++) {
        const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[i]];
        if (!cft__is_as_fast(t, c) || (double)(c->bytes - least) > alike || cft__is_beaten(tuning, c)) continue;
        if (best == NULL || cft__compare_simplicity(c, best) < 0) best = c;
    }
    if (best != NULL) tuning->winner = best - tuning->candidates;
}

/* ---- even sizes ---- */

/* Returns the ChunkSize that divides a batch into about `part` times as many chunks as a rank has so far, or 0 if it
   was tried already. It has room for 6 % more than the mean batch, for packing and for differences between batches. */
static int64_t cft__even_size(const cft__tuner *t, const cf_tune_candidate *best, double part) {
    int64_t unit = t->desc.pack.align > 1 ? t->desc.pack.align : 1, chunks, size, id;
    double tokens = 0;
    for (id = 0; id < t->desc.n_batches; id++)
        tokens += (double)t->tuning->batch_tokens[id] / (double)(t->desc.n_batches * t->tuning->splits[best->split].dp);
    chunks = cft__max(1, (int64_t)(cft__product(tokens, part) / (double)best->chunk_size + 0.5));
    while (unit < CFT__UNIT) unit *= 2;
    size = cft__div_up((int64_t)(cft__product(tokens, 1.06) / (double)chunks), unit) * unit;
    for (id = 0; id < t->tuning->n_candidates; id += t->strides[CFT__SIZE])
        if (t->tuning->candidates[id].chunk_size == size) return 0;
    return size <= CF_MAX_CHUNK_SIZE ? size : 0;
}

/* Tries intermediate sizes, which divide batches more evenly, for the split of the winner. */
static cf_result cft__try_even_sizes(cft__tuner *t) {
    static const double parts[CFT__EVEN] = {1.68, 1.41, 1.19, 1.09, 0.92, 0.84, 0.71, 0.6};
    cf_tuning *tuning = t->tuning;
    const cf_tune_candidate best = tuning->candidates[tuning->winner];
    int64_t i, id;
    for (i = 0; i < CFT__EVEN && t->room > 0 && best.chunks <= (double)CFT__FEW && !t->stop; i++) {
        int64_t first = tuning->n_candidates, size = cft__even_size(t, &best, parts[i]);
        if (size == 0) continue;
        t->expected = t->due = t->worked + t->of_bounds * (double)(2 * (CFT__EVEN - i));
        cft__fill_size(t, first, best.split, size);
        tuning->n_candidates += t->strides[CFT__SIZE];
        tuning->n_even += t->strides[CFT__SIZE];
        CFT__TRY(cft__bound_size(t, first));
        cft__mean_bounds(t, first, tuning->n_candidates);
        for (id = first; id < tuning->n_candidates && !t->stop; id++) {
            if (id % t->family == 0) CFT__TRY(cft__try_family(t, id));
            cft__note_exact(t, id);
        }
    }
    cft__choose_winner(t);
    return CF_OK;
}

/* ---- the whole search ---- */

/* Estimates the time of a candidate that was given up before all batches were tried. */
static void cft__estimate(cft__tuner *t, int64_t id) {
    const double *seconds = &t->tuning->seconds[id * t->desc.n_batches];
    cf_tune_candidate *c = &t->tuning->candidates[id];
    double sum = 0;
    int64_t m;
    for (m = 0; m < t->desc.n_batches && seconds[t->order[m].first] >= 0; m++) sum += seconds[t->order[m].first];
    if (m > 0) c->estimate = cft__project(t, id, m, sum);
}

/* Fills in the members of candidates that are known only at the end. */
static void cft__finish_candidates(cft__tuner *t) {
    cf_tuning *tuning = t->tuning;
    int64_t id, least = INT64_MAX;
    for (id = 0; id < tuning->n_candidates; id++) {
        cf_tune_candidate *c = &tuning->candidates[id];
        if (c->same_as >= 0) c->same_as = cft__origin_of(tuning, id);
        else if (c->status == CF_TUNE_DOMINATED) cft__estimate(t, id);
        if (c->status == CF_TUNE_INFEASIBLE) least = cft__min(least, c->bytes);
        if (cft__is_tried(t, id) && !c->replays && !c->limited) c->outputs = 0;
    }
    if (tuning->winner < 0 && !t->stop) tuning->smallest_limit = least;
    tuning->n_simulated = t->simulated;
    tuning->interrupted = t->stop;
}

static cf_result cft__tune_all(cft__tuner *t) {
    cf_tuning *tuning = t->tuning;
    int64_t id;
    for (id = 0; id < tuning->n_candidates; id += t->strides[CFT__SIZE])
        cft__fill_size(t, id, cft__index(t, id, CFT__SPLIT), t->desc.chunk_sizes[cft__index(t, id, CFT__SIZE)]);
    /* provisional, until they are known */
    t->of_bounds = (double)(t->strides[CFT__REPLAY] * t->desc.n_ks * t->desc.n_batches) * 30;
    t->of_tries = (double)t->desc.n_batches / (t->desc.n_exact > 0 ? 1 : 2) + 1;
    CFT__TRY(cft__draw_batches(t));
    cft__order_batches(t); /* in the drawn order, because no bound is known */
    CFT__TRY(cft__find_first(t));
    CFT__TRY(cft__search(t));
    cft__choose_winner(t);
    if (tuning->winner >= 0) CFT__TRY(cft__try_even_sizes(t));
    t->expected = t->due = t->worked; /* nothing is left */
    cft__report_done(t);
    cft__finish_candidates(t);
    return CF_OK;
}

/* Does everything except allocating the result, to which t->tuning points. */
static cf_result cft__tune_in(cft__tuner *t) {
    cf_tuning *tuning = t->tuning;
    cf_error *error = t->error;
    void *scratch = NULL;
    int64_t i;
    cf_result result;
    (void)cft__list_splits(&t->desc, tuning);
    for (i = 0; i < tuning->n_splits; i++)
        t->most_virtual = cft__max(t->most_virtual, tuning->splits[i].pp * tuning->splits[i].n_virtual);
    CFT__TRY(cft__carve(t, cft__lay_out_tuner, "batch", &scratch));
    t->error = &t->record;
    result = cft__tune_all(t);
    if (result != CF_OK && error != NULL) *error = t->record;
    cft__free_schedule(t);
    cft__free_plans(t);
    cf_plan_free(t->trees);
    t->allocator.release(scratch, t->allocator.user);
    return result;
}

CHUNKFLOW_TUNE_API cf_result cf_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, cf_tuning **out,
                                     cf_error *error) {
    cft__tuner t;
    void *memory;
    cf_result result;
    CFT__TRY(cft__start(&t, lengths, n, desc, error));
    if (out == NULL) return cf_fail_null(error, "out");
    CFT__TRY(cft__carve(&t, cft__lay_out_tuning, "n_batches", &memory));
    result = cft__tune_in(&t);
    if (result == CF_OK) *out = t.tuning;
    else t.allocator.release(memory, t.allocator.user);
    return result;
}

/* Checks that a plan matches a candidate, and desc its search. */
static cf_result cft__check_choice_of(const cf_tune_desc *desc, const cf_tuning *tuning, const cf_tune_candidate *c,
                                      const cf_plan *plan, int64_t rank, cf_error *error) {
    const cf_parallel *split = &tuning->splits[c->split];
    cf_parallel asked = cf_parallel_defaults(&desc->parallel);
    if (desc->n_gpus == 0 && (asked.pp != split->pp || asked.n_virtual != split->n_virtual || asked.dp != split->dp))
        return cf_refuse(error, CF_ERROR_ARGUMENT, "desc.parallel", -1, "is not the split of the tuning");
    if (plan->chunk_size != c->chunk_size)
        return cf_fail(error, CF_ERROR_ARGUMENT, "plan.chunk_size", -1, c->chunk_size, plan->chunk_size,
                       "is not that of the candidate");
    if (plan->n_ranks != split->dp)
        return cf_fail(error, CF_ERROR_ARGUMENT, "plan.n_ranks", -1, split->dp, plan->n_ranks,
                       "is not the dp of the candidate's split");
    return cft__range(rank, 0, plan->n_ranks - 1, CF_ERROR_ARGUMENT, "rank", -1, error);
}

/* Makes a candidate's schedule and leaves it in t->schedule. */
static cf_result cft__make_choice(cft__tuner *t, const cf_tune_candidate *chosen, int64_t rank) {
    cf_tune_candidate c = *chosen;
    CFT__TRY(cft__set_up(t, &c));
    CFT__TRY(cft__check_weights(t));
    c.status = CF_TUNE_UNTRIED;
    c.bytes = 0;
    if (c.in_step) CFT__TRY(cft__take_columns(t, c.max_cp));
    CFT__TRY(cft__fit_rank(t, &c, 0, c.in_step ? 0 : rank));
    if (c.in_step && c.status != CF_TUNE_INFEASIBLE) {
        cf_schedule *list = t->schedule;
        cf_result result = cf_lockstep_schedule(t->packed, list, rank, &t->allocator, &t->schedule, t->error);
        if (result == CF_OK) cf_schedule_free(list);
        return result;
    }
    if (c.status != CF_TUNE_INFEASIBLE) return CF_OK;
    return cf_fail(t->error, CF_ERROR_INFEASIBLE, "limit_bytes", c.stage, c.bytes, t->tuning->limit_bytes,
                   "is too little for any schedule of this plan");
}

CHUNKFLOW_TUNE_API cf_result cf_tune_schedule(const cf_tune_desc *desc, const cf_tuning *tuning, int64_t candidate,
                                              const cf_plan *plan, int64_t rank, cf_schedule **out, cf_error *error) {
    static const int64_t length = 1; /* desc is checked as for a search; its lists are not needed */
    const cf_tune_candidate *c;
    cft__tuner t;
    void *scratch = NULL;
    cf_result result;
    if (tuning == NULL) return cf_fail_null(error, "tuning");
    if (plan == NULL) return cf_fail_null(error, "plan");
    if (out == NULL) return cf_fail_null(error, "out");
    CFT__TRY(cft__range(candidate, 0, tuning->n_candidates - 1, CF_ERROR_ARGUMENT, "candidate", -1, error));
    CFT__TRY(cft__start(&t, &length, 1, desc, error));
    c = &tuning->candidates[candidate];
    CFT__TRY(cft__check_choice_of(desc, tuning, c, plan, rank, error));
    t.header = *tuning;
    t.header.n_candidates = t.room = 0;
    t.longest = tuning->batches[cft__longest_of(tuning->batches, (tuning->n_batches + 1) * tuning->batch)];
    t.tuning = &t.header;
    t.most_virtual = tuning->splits[c->split].pp * tuning->splits[c->split].n_virtual;
    CFT__TRY(cft__carve(&t, cft__lay_out_tuner, "plan", &scratch));
    t.error = &t.record;
    t.plan = (cf_plan *)plan; /* only read */
    result = cft__make_choice(&t, c, rank);
    if (result == CF_OK) {
        *out = t.schedule;
        t.schedule = NULL;
    } else if (error != NULL) {
        *error = t.record;
    }
    cft__free_schedule(&t);
    if (t.packed != NULL) cf_plan_free(t.plan); /* columns; t.packed is the caller's plan */
    t.allocator.release(scratch, t.allocator.user);
    return result;
}

CHUNKFLOW_TUNE_API void cf_tuning_free(cf_tuning *tuning) {
    if (tuning != NULL) tuning->allocator.release(tuning, tuning->allocator.user);
}

#ifdef __cplusplus
}
#endif

#if defined(__clang__)
#pragma float_control(pop)
#pragma clang diagnostic pop
#endif

#endif /* CHUNKFLOW_TUNE_IMPLEMENTATION */
