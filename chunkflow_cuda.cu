/* chunkflow_cuda.cu - attention, carried state and pipelines on NVIDIA GPUs - MIT or public domain

   The companion of chunkflow.h. A file that calls its functions, in C99 or C++, asks for the declarations alone, and
   needs no CUDA for that:

       #define CHUNKFLOW_CUDA_HEADER_ONLY
       #include "chunkflow_cuda.cu"

   The functions themselves need the CUDA Toolkit 12.1 or newer (compiled with 13.0 so far) and cuBLAS. NCCL is needed
   only where CHUNKFLOW_NCCL is defined.

       nvcc -O3 -std=c++17 -c chunkflow_cuda.cu -gencode arch=compute_80,code=sm_80 \
           -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90

   Link the object with cudart, cublas and the file that has chunkflow.h's implementation. That implementation must not
   be CHUNKFLOW_STATIC, because the executor calls it.

   The functions by task
       attend                  cf_attention_size + cf_attention_prepare, cf_attention_forward, cf_attention_backward,
                               cf_attention_path_name; by another library: cf_attention_backend, cf_attention_add
       carry state             cf_rope_size + cf_rope_fill, cf_state_k, cf_state_v
       run a pipeline          cf_executor_create, cf_executor_load, cf_executor_run, cf_executor_stream,
                               cf_executor_schedule, cf_executor_memory_of, cf_executor_timeline, cf_executor_free
         a layer's attention   cf_layer_attention_forward, cf_layer_attention_backward, cf_layer_attention_bytes

   Every function puts its work on the stream that the caller names; the stream is the argument before the error. Only
   the executor, and functions whose comments say so, allocate memory or wait for the device.

   Words: F, R, B, I and W are the passes of chunkflow.h: forward, replay, backward, and a backward's two halves (input
   and weight gradients). A chain is the dependent chunks of one split sequence. Its state is K and V of its tokens, and
   a chunk's prefix is the chain's tokens before it. A path is CF_ATTENTION_UNFUSED (1), _MMA (2) or _WGMMA (3).

   Layers of the implementation, each found by its tag. A layer calls only layers above it. Within a layer kernels come
   first, then the functions that launch them.
       >>device     named device functions for everything that is an instruction rather than arithmetic
       >>problem    descriptors resolved and checked, the mask's arithmetic, the list of tiles
       >>fragments  tiles in shared memory, products of a warp
       >>forward    attention forward, fused
       >>hopper     the same with wgmma and bulk copies, for sm_90a
       >>backward   attention backward, fused
       >>hopper_backward    the same with wgmma and bulk copies
       >>unfused    the same with cuBLAS: any type and head size, and the oracle for the others
       >>attention  the public functions and the choice of a path
       >>state      rows of K and V between projections, state and host memory; state that streams block by block
       >>layer      a layer's attention in a pass: all of these in their order
       >>arena      host memory, and slots of a stage's memory, worked out before it runs
       >>executor   streams, events and transfers for the steps of chunkflow.h

   One attention problem covers packed documents and carried state. A slice with more keys than queries is a slice with
   a prefix, and the mask is aligned bottom-right.

   Query heads that share a key head are packed into the rows of one tile: row = token x group + head. So K and V are
   read once for all these heads, and short documents fill their tiles. The backward sums dK and dV of a group in
   registers, without copies per query head.

   A replay need not compute attention again: with cf_executor_desc.outputs an F that drops its activations keeps each
   layer's out and lse. In the R, cf_layer_attention_forward returns these.

   It has run on one device, an H200 (tools/bench/results/h200.txt). Not yet run on a device: the choice of wgmma by
   AUTO, two stages of Q in its forward, descriptors that its loops hold, kernels that take a number's type at run time,
   cf_layer_attention_*, kept outputs, sinks, and cf_attention_add. Tile sizes
   follow the published tuning of such kernels on sm_80. Registers and shared memory are stated at each kernel.

   The same file compiles as C++ against a host emulation of CUDA (tests/emulation), which defines
   CHUNKFLOW_CUDA_EMULATION. Only >>device knows of it. */

#ifndef CHUNKFLOW_CUDA_H
#define CHUNKFLOW_CUDA_H

#include "chunkflow.h"

#ifndef CHUNKFLOW_CUDA_API
#define CHUNKFLOW_CUDA_API extern /* never static: these functions are in a file of their own */
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ================================================================================================================
   Attention
   ================================================================================================================ */

/* CUDA's own structs: a cudaStream_t points to the first, a cublasHandle_t to the second. */
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
    CF_ATTENTION_AUTO = 0,        /* the highest path that this program and the device have for the problem */
    CF_ATTENTION_UNFUSED,         /* cuBLAS products around a masked softmax: any type and head size; needs `cublas` */
    CF_ATTENTION_MMA,             /* fused, mma.sync: 16-bit types, compute capability 8.0 and up, at most 64 query
                                     heads for each key head. Head sizes to 256; to 128 where a block has 99 KB of
                                     shared memory (8.6, 8.9, 12.0) */
    CF_ATTENTION_WGMMA            /* fused, wgmma: head sizes to 128, compute capability 9.0, code for sm_90a. 1.2 to
                                     1.8 times as fast as mma.sync on an H200 (tools/bench/results/h200.txt) */
} cf_attention_path;

/* "auto", "unfused", "mma", "wgmma"; "?" for anything else. */
CHUNKFLOW_CUDA_API const char *cf_attention_path_name(cf_attention_path path);

/* One attention problem: the slices of one chunk, each with its queries and keys. cf_metadata has the arrays. A slice
   may have any number of queries and keys, also none. Query head h uses key head h / (n_heads / n_kv_heads). Zero means
   default in every member.

   The mask is aligned bottom-right: with Sq queries and Sk keys, query i sees key j if j <= i + Sk - Sq. So a slice
   with a carried prefix simply has more keys than queries. */
typedef struct cf_attention_desc {
    int64_t n_heads;              /* query heads; must be given */
    int64_t n_kv_heads;           /* 0: n_heads; must divide n_heads */
    int64_t head_size;            /* a multiple of 8, at most 256; must be given. 64 and 128 are the fast ones */
    int64_t n_slices;
    const int32_t *cu_seqlens_q;  /* (n_slices + 1) in host memory, from 0, not falling. Slice s has queries
                                     cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 */
    const int32_t *cu_seqlens_k;  /* likewise */
    const int32_t *starts_q;      /* (n_slices) row of each slice's first query, ascending, without overlap. Needed
                                     where rows of padding lie between slices. NULL: cu_seqlens_q */
    const int32_t *starts_k;      /* likewise for keys */
    cf_dtype dtype;               /* of q, k, v, out, dout and dq. dk and dv are fp32 */
    int full;                     /* 0: causal; 1: a query sees all keys of its slice */
    int64_t window;               /* a query sees the last `window` keys up to its own place, itself included: j > i +
                                     Sk - Sq - window. 0: no limit */
    double scale;                 /* of q . k before the softmax. 0: 1 / sqrt(head_size) */
    double softcap;               /* c: scores become c x tanh(score / c). 0: off */
    int deterministic;            /* 1: dq has the same bits in every run, as all other outputs always have for the same
                                     n_processors. Costs seven products instead of five on the fused paths, three of
                                     them by mma.sync even on path 3 */
    cf_attention_path path;       /* the only one that may run. CF_ERROR_ARGUMENT if it cannot do the problem: the error
                                     says for which architecture, head size or group (wanted, got) */
    int64_t arch;                 /* compute capability x 10 (50 to 999) of the device that will run it. 0: the current
                                     device's */
    int64_t n_processors;         /* multiprocessors of that device; more of them means smaller pieces of work. 0: the
                                     current device's, or with arch given, those of a usual device of that arch */
    int64_t cache_bytes;          /* bytes of second-level cache for the arrays of the key heads that fused paths work
                                     on at a time. 0: 32 MB in forwards, all heads at once in backwards */
    int64_t prefix;               /* for the executor; leave all three 0 (cf_attention_block_prepare explains them) */
    const int32_t *begins;        /* keys before each slice's own, in trees */
    const int32_t *parents;       /* the slice that each slice continues, in trees */
} cf_attention_desc;

/* A prepared problem, shared by all layers of a chunk. cf_attention_prepare makes it in your memory; read only. */
typedef struct cf_attention {
    cf_attention_desc desc;       /* defaults filled in; its arrays are copies inside this object */
    cf_attention_path path;       /* the path that will run, never AUTO */
    int64_t pairs;                /* visible (query, key) pairs of one head. Floating-point operations of a forward: 4 x
                                     pairs x n_heads x head_size; of a backward 2.5 times as many */
    int64_t rows_q, rows_k;       /* end of the last slice's rows */
    int64_t n_levels;             /* in trees: the most ancestors of a slice within this chunk */
    size_t forward_bytes;         /* of device workspace */
    size_t backward_bytes;
    const void *tiles;            /* the list of work, longest first. Copy it to the device once a chunk, and give that
                                     address as cf_attention_tensors.tiles */
    size_t tiles_bytes;           /* may be 0: nothing to copy */
    int64_t n_forward_tiles;      /* entries of that list, for one key head */
    int64_t n_row_tiles;
    int64_t n_key_tiles;          /* with at least one visible pair */
    int64_t n_all_key_tiles;
    int64_t n_split_forward_tiles;/* forward tiles that are cut into parts, because few key heads or small chunks would
                                     leave the device idle. Each part counts as a tile above */
    int64_t n_split_key_tiles;    /* key tiles that are cut into parts, for the same reason. Sums of parts meet in the
                                     workspace */
    int64_t forward_section;      /* key heads that a forward works on together. For these all entries of the list run
                                     before the next heads begin */
    int64_t backward_section;     /* key heads that a backward works on together */
} cf_attention;

/* cf_attention_size returns the bytes of host memory, aligned to CF_MEMORY_ALIGNMENT, that cf_attention_prepare needs.
   Use pinned memory if you copy `tiles` to the device asynchronously.

   Neither call touches the device, except for two questions: its compute capability where arch is 0, and whether it has
   path 3's code where AUTO may take that path. Make both calls with the same device current.

   Errors: CF_ERROR_ARGUMENT, CF_ERROR_LIMIT (more than 2^30 rows, or rows x heads per key head), CF_ERROR_SPACE,
   CF_ERROR_DEVICE (arch is 0 and there is no device). Outputs are untouched on failure. */
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

   NaN and infinity do not spread from rows outside all slices, nor from keys and values that no query of their slice
   sees (those before every window). dk and dv of such keys are 0, or as they were. The gradients of a query that sees
   no key do not spread either.

   NaN and infinity of a key that some query sees may reach other queries of the same tile, although the mask hides the
   key from them: 0 x NaN is NaN. All fused kernels do this. In the backward the same holds for a query and other keys
   of its tile. */
typedef struct cf_attention_tensors {
    cf_tensor q, k, v;            /* read */
    cf_tensor out;                /* written by the forward, read by the backward. 0 where a query sees no key */
    float *lse;                   /* (n_heads, lse_stride) natural log of the sum of exp(score); -inf where a query sees
                                     no key. Written by the forward, where it may be NULL; read by the backward */
    int64_t lse_stride;           /* in numbers, from head to head. 0: rows_q */
    cf_tensor dout;               /* read by the backward */
    cf_tensor dq;                 /* written by the backward */
    cf_tensor dk, dv;             /* fp32 accumulators, by key head: the backward adds to them */
    int overwrite;                /* 1: the backward overwrites dk and dv instead; 0 where no query sees a key */
    int finish;                   /* for the executor; leave it 0 */
    const void *tiles;            /* cf_attention.tiles, on the device */
    void *workspace;              /* at least forward_bytes or backward_bytes on the device, aligned to 256 */
    size_t workspace_bytes;
    struct cublasContext *cublas; /* for CF_ATTENTION_UNFUSED. The call sets its stream to `stream` */
    const float *sinks;           /* (n_heads) attention sinks: one more score for every query of a head, whose value is
                                     0. lse counts it. -inf has no effect. NULL: none. The backward needs out and lse of
                                     a forward with the same sinks */
    float *dsinks;                /* (n_heads) the backward adds the gradients of sinks here. NULL: not wanted */
} cf_attention_tensors;

/* Compute attention (out, lse) and its gradients (dq, dk, dv).

   Errors: CF_ERROR_ARGUMENT (a missing or misaligned array), CF_ERROR_OVERFLOW (a stride), CF_ERROR_SPACE (workspace),
   CF_ERROR_DEVICE (CUDA or cuBLAS refused a launch; error->got is its number). Failures inside a kernel appear when the
   caller next asks the device.

   CUDA graphs (not yet run on a device): on the fused paths both functions may be captured, since all their work is on
   `stream`. The graph has the addresses of this call. Call each function once before the capture, because a kernel
   cannot be loaded during one. On the unfused path cuBLAS decides whether it can be captured. The executor and state
   that streams cannot: they use events between several streams. */
CHUNKFLOW_CUDA_API cf_result cf_attention_forward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                                  cf_cuda_stream stream, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_attention_backward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                                   cf_cuda_stream stream, cf_error *error);

/* Adds gradients of keys and values in attention's type, as other libraries write them, to tensors->dk and dv. With
   tensors->overwrite it writes them instead. Both have the rows of k and v; those outside slices are left alone. Reads
   nothing else of `tensors`. Errors as above. */
CHUNKFLOW_CUDA_API cf_result cf_attention_add(const cf_attention *attention, const cf_tensor *dk, const cf_tensor *dv,
                                              const cf_attention_tensors *tensors, cf_cuda_stream stream,
                                              cf_error *error);

/* ================================================================================================================
   Carried state
   ================================================================================================================ */

/* K and V of the layers of one virtual stage, or their gradients. Each layer has a plane of rows for K and one for V; a
   row is (n_kv_heads, head_size) numbers. A chain has the same range of rows in every plane, in the order of its
   tokens. So K of the prefix and of the chunk are contiguous, as any variable-length attention kernel expects. */
typedef struct cf_state {
    void *data;                   /* on the device, aligned to 16: row 0 of K of layer 0 */
    int64_t n_layers;
    int64_t n_kv_heads;
    int64_t head_size;            /* n_kv_heads x head_size must be a multiple of 8 */
    int64_t rows;                 /* from plane to plane. A state may begin at a row of a larger one */
    cf_dtype dtype;               /* 0: bf16. Gradients: CF_DTYPE_FP32 */
    int one_layer;                /* 1: all layers use one layer's planes in turn. That serves the gradient of a
                                     standalone chunk, which no other chunk adds to */
} cf_state;

/* Return K and V of one layer from `row` on, for cf_attention_tensors and the functions below. data is NULL if layer or
   row is out of range, or the state is not sound. */
CHUNKFLOW_CUDA_API cf_tensor cf_state_k(const cf_state *state, int64_t layer, int64_t row);
CHUNKFLOW_CUDA_API cf_tensor cf_state_v(const cf_state *state, int64_t layer, int64_t row);

/* Rotary position embedding (RoPE: Su et al., RoFormer, 2021, section 3.4). The table holds cosines and sines for every
   position below n_positions in about 2 sqrt(n_positions) rows. It stays in cache: 0.5 MB at 256K positions and head
   size 128, where a row per position would take 134 MB.

   The angle is split into a coarse and a fine part, each rounded once; the addition theorem joins them in fp32. The
   error is at most 2.42 x 2^-24, about two units in the last place. Beyond some ten million positions the rounding of
   the angle itself, in double precision, adds to that. */
typedef struct cf_rope {
    int64_t n_positions;          /* at most 2^31. A larger position is taken for the last one: nothing outside the
                                     table is read, but the result is wrong */
    int64_t rotated;              /* elements of each head that are rotated, from its first; an even number. 0: all */
    double base;                  /* pair i turns by position x base^(-2 i / rotated). 0: 10000 */
    const double *frequencies;    /* (rotated / 2) one per pair, instead of base, for scaled variants. Only cf_rope_fill
                                     reads it */
    int interleaved;              /* 0: pairs (i, i + rotated / 2); 1: pairs (2 i, 2 i + 1) */
    const float *table;           /* the filled table on the device, aligned to 16; NULL: rotate nothing */
} cf_rope;

/* cf_rope_size returns the bytes of the table. cf_rope_fill computes it in double precision, in host memory aligned to
   4. Errors: CF_ERROR_ARGUMENT, CF_ERROR_SPACE (bytes). Outputs are untouched on failure. */
CHUNKFLOW_CUDA_API cf_result cf_rope_size(const cf_rope *rope, int64_t head_size, size_t *bytes, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_rope_fill(const cf_rope *rope, int64_t head_size, void *memory, size_t bytes,
                                          cf_error *error);

/* ================================================================================================================
   Executor
   ================================================================================================================ */

/* The data of one step for a pass callback. Addresses are on `device`, at multiples of 256 (a state's: 16). They belong
   to the executor and stay valid as each member says. */
typedef struct cf_cuda_step {
    const cf_step *step;          /* action (pass, chunk, virtual stage), wants_loss, last_backward, seed ... */
    const cf_plan *plan;
    const cf_chunk *chunk;
    cf_error *error;              /* a callback that fails may fill this in: see cf_executor_run */
    cf_cuda_stream stream;        /* put all work of the pass here; do not wait for it */
    int device;                   /* current while the callback runs */
    const cf_metadata *metadata;  /* of the chunk; its arrays are in host memory */
    const cf_attention *attention;/* prepared for the chunk, with `tiles` on the device. NULL if the executor has no
                                     attention */
    const void *tiles;
    const int32_t *positions;     /* (chunk->rows) position_ids of the metadata, -1 in padding */
    cf_state state;               /* K and V of the chain: row 0 is its first token, the chunk's own rows start at
                                     state_prefix.

                                     Standalone chunks and a tree's leaves have a state of their own, from the pass that
                                     keeps their activations to their backward. An F that keeps nothing has one for
                                     itself. In trees, where slices see rows in several places (metadata has levels), it
                                     holds the chunk's own rows alone.

                                     data is NULL in W, because rows are held until B or I. With state_block_rows it is
                                     always NULL, also in `gradient` */
    int64_t state_prefix;         /* rows of state and gradient before the chunk's own: chunk->prefix or 0 */
    cf_state gradient;            /* dK and dV of the same rows, fp32, in B and I. Elsewhere data is NULL */
    int overwrite;                /* 1: `gradient` is not initialised; overwrite it */
    const struct cf_cuda_walk *walk; /* for the library: rows that stream, or that lie elsewhere in trees. NULL: none */
    void *activations;            /* kept from this F or R to the chunk's B or W. NULL in an F that keeps nothing */
    int64_t activation_bytes;
    void *workspace;              /* for this pass only */
    int64_t workspace_bytes;
    void *attention_workspace;    /* of cf_layer_attention_forward and _backward; this pass only */
    size_t attention_workspace_bytes;
    const void *input;            /* F, R: from the previous virtual stage. B, I: the gradient from the next one. NULL
                                     where there is none. It is reused after the pass: copy what the backward needs */
    void *output;                 /* F, R: for the next virtual stage. B, I: the gradient for the previous one. NULL
                                     where no stage receives it */
    int64_t boundary_bytes;       /* bytes of input, and of output */
} cf_cuda_step;

/* Attention by another library: examples/cudnn_attention.h is one. It is asked only about chunks whose attention is one
   call: packed documents, the first of which may continue a chain. The mask is the descriptor's, aligned bottom-right.
   This file's kernels attend in trees, where a prefix streams (state_block_rows), and in layers with sinks. A chunk's
   forward and backward are always the same library's.

   attend does what cf_attention_forward or cf_attention_backward promises, without `tiles` and `workspace`. It may
   order the n_heads x lse_stride numbers of lse as it likes. If its dK and dV have 16 bits, it ends with
   cf_attention_add. An error, in `error` and as its result, ends the run. */
typedef struct cf_attention_backend {
    void *user;                   /* handed to both */
    int (*takes)(void *user, const cf_attention *attention); /* 0: this file's kernels attend to this chunk */
    cf_result (*attend)(void *user, int backward, const cf_attention *attention, const cf_attention_tensors *tensors,
                        cf_cuda_stream stream, cf_error *error);
} cf_attention_backend;

/* One layer's arrays in a pass of a chunk, with a row for each of chunk->rows, padding included. Heads, sizes, types,
   addresses and strides are as for attention. q, k and v may be parts of one packed row, and so may their gradients. */
typedef struct cf_layer_attention {
    int64_t layer;                /* of the virtual stage, from 0 */
    cf_rope rope;
    cf_tensor q, k, v;            /* from the projections. The forward rotates q in place by RoPE; with state_block_rows
                                     also k. Keep all three, as the forward left them, for the backward */
    cf_tensor out;                /* written by the forward, 0 in padding; read by the backward */
    float *lse;                   /* (n_heads, rows) written by the forward, read by the backward. Required where the
                                     executor keeps outputs */
    cf_tensor dout;               /* read by the backward */
    cf_tensor dq, dk, dv;         /* written by the backward, 0 in padding: gradients of the projections' results. They
                                     may be q, k and v themselves */
    struct cublasContext *cublas; /* these three as in cf_attention_tensors */
    const float *sinks;
    float *dsinks;
    const cf_attention_backend *backend; /* NULL: this file's kernels */
} cf_layer_attention;

/* Run one layer's attention in a pass, on the step's stream. The forward applies RoPE, puts the chunk's K and V into
   the state, and attends to everything that the rows see, wherever it lies. The backward adds to the gradients of the
   state.

       for each layer                     in an F or R          in a B or I, from the last layer on
           projections into q, k, v                                 dout = the output projection's backward
           cf_layer_attention_forward(step, &x, ...)                cf_layer_attention_backward(step, &x, ...)
           the output projection, of out                            the projections' backward, of dq, dk, dv

   A callback calls one of the two once for each layer of the stage, in that order. For full recomputation a backward
   may run the layer's forward again first, but not with state_block_rows.

   With cf_executor_desc.outputs the forward of an R does not attend. It copies the F's out and lse, bit by bit, into
   these arrays.

   Errors: as cf_attention_forward; CF_ERROR_ARGUMENT "layer" if it is not this layer's turn. */
CHUNKFLOW_CUDA_API cf_result cf_layer_attention_forward(const cf_cuda_step *step, const cf_layer_attention *layer,
                                                        cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_layer_attention_backward(const cf_cuda_step *step, const cf_layer_attention *layer,
                                                         cf_error *error);

/* Returns the bytes of attention_workspace that the two functions above need for a chunk of `rows` rows, padding
   included.

   A program without an executor makes cf_cuda_step itself. It sets step (its pass), chunk (rows), stream, attention,
   tiles, positions, state, gradient, overwrite and attention_workspace, and zeroes the rest. */
CHUNKFLOW_CUDA_API size_t cf_layer_attention_bytes(const cf_attention *attention, int64_t rows);

/* Sizes of one virtual stage. */
typedef struct cf_cuda_stage {
    int64_t n_layers;                 /* layers with attention, each with its planes of the state */
    int64_t activation_bytes;         /* kept for each chunk from F or R to its backward, without K and V */
    int64_t activation_bytes_per_token;   /* the same, for each of its tokens, padding included */
    int64_t forward_bytes;            /* workspace of an F or R */
    int64_t forward_bytes_per_token;
    int64_t backward_bytes;           /* workspace of a B, I or W */
    int64_t backward_bytes_per_token;
} cf_cuda_stage;

struct ncclComm;

/* The devices and callbacks of an executor. Zero means default in every member. Callbacks must not throw, and must not
   free the executor that calls them. A load or run of it from a callback is refused (CF_ERROR_ARGUMENT). */
typedef struct cf_executor_desc {
    void *user;                       /* handed to every callback */
    int (*forward)(void *user, const cf_cuda_step *step);   /* F and R; returns 0, or any other number to stop the
                                                               run */
    int (*backward)(void *user, const cf_cuda_step *step);  /* B, I and W */
    int (*progress)(void *user, int64_t stage, const cf_step *step); /* called when an action has been put on its
                                                                        stream; non-zero cancels. NULL: none */
    int64_t n_stages;                 /* 0: 1 */
    int64_t n_virtual;                /* virtual stages of each stage; the schedule says where each lies. 0: 1 */
    const cf_cuda_stage *stages;      /* (n_stages x n_virtual) by virtual stage; must be given */
    const int *devices;               /* (n_stages) CUDA device of each stage; NULL: the current one for all */
    cf_attention_desc attention;      /* heads, sizes, type, mask; the slices come from the plan. n_heads 0: no
                                         attention objects and no tiles, and no state unless n_kv_heads and head_size
                                         are given.

                                         arch 0: the lowest of the devices. All devices take one path. If they differ,
                                         AUTO does not take path 3. A fused path refuses a device that has less shared
                                         memory a block than the lowest one (CF_ERROR_ARGUMENT, "devices") */
    int64_t boundary_bytes_per_token; /* of what stages hand to each other; required with more than one virtual stage */
    int64_t memory_limit;             /* in bytes of device memory of one stage. 0: no limit */
    int64_t state_block_rows;         /* rows of a block where the state of chains streams from host memory: see below.
                                         0: it stays on the device */
    int64_t state_slots;              /* blocks of the ring, 2 to 64. With 2, the copies of a backward do not overlap
                                         compute. 0: 3 */
    int outputs;                      /* 1 or 2: an F that drops its activations keeps each layer's out and lse, so that
                                         its R does not attend (cf_memory_desc.outputs). 1: on the device, but in host
                                         memory with state_block_rows. 2: in host memory, as are the kept inputs.

                                         Needs attention and local replay. Ignored with a window below
                                         CF_MIN_OUTPUT_WINDOW */
    int timeline;                     /* 1: measure start and end of every action */
    int blocking;                     /* 1: wait after every action, so that a device error names the action that caused
                                         it. Slow */
    double timeout;                   /* seconds without progress of the device after which a run gives up. 0: 600 */
    uint64_t seed;
    struct ncclComm *nccl;            /* NULL: all stages run in this process, at most 256 virtual ones. Else one stage
                                         per process: this process runs the stage that is its rank in this communicator
                                         of n_stages ranks. Nothing else may use it during a run.

                                         The default of attention.n_processors leaves CF_NCCL_CHANNELS multiprocessors
                                         to transfers. Make the communicator with at most as many channels
                                         (ncclConfig_t.maxCTAs); otherwise a waiting receive takes more of the device
                                         from passes.

                                         Make it non-blocking (ncclConfig_t.blocking 0; cf_executor_create waits until
                                         it is ready). Otherwise a send to a process that died before their first
                                         transfer waits for ever */
    const cf_allocator *allocator;    /* host memory; NULL: malloc */
} cf_executor_desc;

#define CF_NCCL_CHANNELS 4 /* multiprocessors for transfers */

typedef struct cf_executor cf_executor;

/* With state_block_rows, device memory of a stage does not grow with the longest sequence, except for 4 bytes of
   metadata for each token.
   - K, V, dK and dV of all chains lie in pinned host memory. Each stage has two rings on the device, for K and V and
     for their gradients, of state_slots x state_block_rows rows of one layer. cf_layer_attention_* walk through a
     pass's prefix block by block. In cf_memory_desc.state_window the memory model takes that number of rows.
   - Inputs that local replay keeps lie in host memory. They leave during the F, return during the pass before the R,
     and use at most two slots.
   - Attention's kept outputs also lie there. They leave and return layer by layer, through two slots of one layer
     each. */

/* Makes an executor. *out must be freed by cf_executor_free; untouched on failure. desc and its arrays are copied.

   Every stage's device gets streams: compute, state out, state in, and one for each direction of transfers. All kernels
   of chunkflow_cuda.cu are loaded, so that no kernel is loaded while a receive waits; load your own in advance for the
   same reason. Device memory is taken by cf_executor_load. Transfers between devices are direct where there is peer
   access, and staged by CUDA otherwise.

   CF_ERROR_ARGUMENT if nccl is set in a build without CHUNKFLOW_NCCL. */
CHUNKFLOW_CUDA_API cf_result cf_executor_create(const cf_executor_desc *desc, cf_executor **out, cf_error *error);

/* Loads a batch. Lowers the schedule unless it is lowered, makes its steps, and copies the chunks' metadata to the
   device. Gives a place to every activation, state range, boundary tensor and host buffer, so that a run allocates
   nothing. Memory of an earlier batch is reused and grows only if it must.

   plan and schedule must be sound, and must live until the next load or the free. After a failed load the executor has
   no batch, not even the previous one, but can load another. With NCCL a load may fail in one process alone: agree on
   its result before any process runs.

   Errors: CF_ERROR_LIMIT: memory_limit (error->item: the stage, ->wanted: bytes that it needs, ->got: the limit), or an
   item that is too large (the field names the member that makes it so). CF_ERROR_MEMORY: field "memory" for the device,
   "host" for pinned memory, "allocator" for the application's own (error->item: the stage, ->wanted: bytes asked for,
   ->got: bytes that the device has free, else 0). CF_ERROR_DEVICE, field "timeout": work on a stage's stream did not
   end. CF_ERROR_ARGUMENT, CF_ERROR_PLAN, CF_ERROR_SCHEDULE, CF_ERROR_OVERFLOW. */
CHUNKFLOW_CUDA_API cf_result cf_executor_load(cf_executor *executor, const cf_plan *plan, const cf_schedule *schedule,
                                              cf_error *error);

/* Runs the loaded batch once and waits for its end. May be called again for the same batch.

   Order: work that was put on cf_executor_stream before comes first. Other streams are not waited for, not even the
   default one: synchronise with them before the call. (A cudaMemcpy from pageable memory may still be under way when it
   returns.) Actions are issued at most 4 passes for each stage ahead of the device.

   A stream takes about a thousand launches. If the device hangs, a callback that puts more than a few hundred on it may
   block in a launch, and `timeout` cannot end that.

   Errors: CF_ERROR_CALLBACK, CF_ERROR_CANCELLED, CF_ERROR_DEVICE, CF_ERROR_SCHEDULE. After an error nothing more is
   issued, and the call waits for what was issued. The text names action, chunk and stage. error->item is the position
   in the stage's list, ->got the callback's or CUDA's number. If the callback filled in step->error, its code and
   members are returned as they are, and its text follows action, chunk and stage.

   An error of the device appears late: the text names the first action that is not known to have ended; `blocking`
   finds the right one. After a timeout the executor can be used again once the device has finished.

   cudaGetLastError: an error that a callback leaves there counts as its action's, except cudaErrorNotReady. An error
   that is there before the run is reported, and nothing starts (CF_ERROR_DEVICE, field "device", item -1). The executor
   leaves no errors of its own there and removes none of the application's. CUDA itself does remove one: a query of a
   busy device replaces it by cudaErrorNotReady.

   With NCCL every process must call it. If a stage fails, the others continue their transfers, so that no process
   hangs, and report the lowest stage that failed (field "nccl", ->got the stage). If a device or process is lost, the
   others learn it from NCCL or after `timeout`. The communicator is then aborted (ncclCommAbort), and the executor can
   only be freed. */
CHUNKFLOW_CUDA_API cf_result cf_executor_run(cf_executor *executor, cf_error *error);

/* Returns the compute stream of a stage, for work before or after its passes (zeroing gradients, the optimizer). NULL
   if this process does not run the stage. */
CHUNKFLOW_CUDA_API cf_cuda_stream cf_executor_stream(const cf_executor *executor, int64_t stage);

/* Returns the lowered schedule that is loaded, valid until the next load; NULL if there is none. */
CHUNKFLOW_CUDA_API const cf_schedule *cf_executor_schedule(const cf_executor *executor);

/* Memory of one stage, in bytes of its device, except `host`. memory_limit counts the bytes that are laid out.

   A slot is as large as the largest item that ever uses it. A chain has all its rows from its first pass to its last.
   On batches of real lengths that took 1 to 12 % more than is live at once (tools/bench/results/arena.txt). Where the
   state is large beside activations, it may take half as much again. */
typedef struct cf_executor_memory {
    int64_t arena;                /* activations, outputs and boundary tensors: bytes laid out */
    int64_t arena_live;           /* most bytes in use at once. arena / arena_live - 1 is the share lost to gaps */
    int64_t inputs;               /* slots through which inputs and outputs that are kept in host memory come back */
    int64_t state;                /* K and V, or with state_block_rows their ring */
    int64_t state_live;
    int64_t gradient;             /* dK and dV of chains, or their ring */
    int64_t gradient_live;
    int64_t forward_workspace;    /* of an F or R: yours and attention's */
    int64_t backward_workspace;   /* of a B, I or W: yours, attention's, and dK and dV of one layer of a standalone
                                     chunk */
    int64_t workspace;            /* the larger of the two, which share memory */
    int64_t metadata;             /* positions and tiles of all chunks; identical neighbours share them */
    int64_t total;                /* arena, state, gradient, workspace and metadata: the high-water mark of the batch */
    int64_t allocated;            /* bytes that the executor holds on the device now, grown by earlier batches too */
    int64_t host;                 /* pinned host memory of all virtual stages. With state_block_rows: the state, its
                                     gradient, kept inputs and outputs. With desc.outputs 2: kept inputs and outputs */
    int64_t n_slots, n_states, n_boundaries, n_outputs; /* as in cf_steps, like the next two */
    int64_t peak_tokens, peak_state_tokens;
} cf_executor_memory;

/* Returns the memory of every stage: for the loaded batch (plan and schedule NULL; zeros if there is none), or for what
   a load of this plan and schedule would take. The loaded batch stays, memory_limit refuses nothing, and the device is
   not asked. Takes as long as a load without its copies.

   out: (n_stages); zero for stages of other processes; untouched on failure. Errors as of cf_executor_load. Plan and
   schedule must be sound. */
CHUNKFLOW_CUDA_API cf_result cf_executor_memory_of(const cf_executor *executor, const cf_plan *plan,
                                                   const cf_schedule *schedule, cf_executor_memory *out,
                                                   cf_error *error);

/* Returns when each action of cf_executor_schedule ran in the last run, measured by events on the streams, in the
   simulator's form (cf_simulate_desc.start). A send and its receive have the same times. Clocks of several devices are
   aligned at the start of the run, to a few microseconds.

   *out must be freed by cf_timeline_free. CF_ERROR_ARGUMENT without desc.timeline or a run that succeeded. With NCCL
   every process must call it, and each gets the whole timeline. */
CHUNKFLOW_CUDA_API cf_result cf_executor_timeline(cf_executor *executor, const cf_allocator *allocator,
                                                  cf_timeline **out, cf_error *error);

/* Waits for the device and frees everything. Waits up to the timeout, or one second after a run that timed out. Memory
   that a hung device may still use is not freed, because that would wait for ever. NULL is allowed. */
CHUNKFLOW_CUDA_API void cf_executor_free(cf_executor *executor);

#ifdef __cplusplus
}
#endif

/* ================================================================================================================
   For the implementation and its tests. Applications stop here.
   ================================================================================================================ */

#if !defined(CHUNKFLOW_CUDA_HEADER_ONLY) || defined(CHUNKFLOW_CUDA_INTERNAL)

extern "C" {

/* ---- rows between projections and state ---- */

/* The rows of one chunk between projections and state, in both directions. Heads, sizes, addresses and strides are as
   for attention, so all arrays may be parts of packed rows. */
typedef struct cf_append {
    int64_t rows;                 /* of the chunk's tensors, padding included; at most 2^30 */
    int64_t n_heads, n_kv_heads, head_size;
    cf_dtype dtype;               /* of everything but dk, dv of the state. 0: bf16 */
    const int32_t *positions;     /* (rows) on the device: position of each token in its sequence; negative in
                                     padding */
    cf_rope rope;
    cf_tensor q, k, v;            /* forward: from the projections. backward: dq from attention; dk and dv from the
                                     state gradient (fp32) */
    cf_tensor q_out;              /* forward: q rotated. backward: dq rotated back. May be q itself */
    cf_tensor k_out, v_out;       /* forward: the state at row `prefix`. backward: to the projections */
    cf_tensor out;                /* forward: the array that attention will write. Its padding rows, which attention
                                     does not touch, become 0 here. data NULL: not wanted */
} cf_append;

/* cf_append_forward rotates q and k by RoPE and puts k and v into the state. q_out of padding rows becomes 0; their
   state is not touched, because rows after a chunk may be another's. A replay writes the same bits again. Numbers move
   16 bytes at a time, or one by one where `rotated` is no multiple of 16 (in fp32, of 8).

   cf_append_backward runs once every later chunk of the chain has added its part. It rotates dq and dk back and
   converts dk and dv to dtype. Padding rows of all three become 0, so that they add nothing to weight gradients.

   Each moves rows x (n_heads + 2 n_kv_heads) x head_size numbers once, in one kernel.

   Errors: CF_ERROR_ARGUMENT, CF_ERROR_LIMIT (rows), CF_ERROR_OVERFLOW (a stride), CF_ERROR_DEVICE. */
CHUNKFLOW_CUDA_API cf_result cf_append_forward(const cf_append *append, cf_cuda_stream stream, cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_append_backward(const cf_append *append, cf_cuda_stream stream, cf_error *error);

/* ---- attention by blocks of keys ---- */

/* Attention by blocks of keys, for trees and for a prefix that streams. The chunk's problem has only its own keys.
   Three members of cf_attention_desc describe the others:

       prefix     number of earlier keys that the first slice sees and that are not in the chunk. With `begins`: length
                  of the tree's path above the chunk
       begins     (n_slices) in trees, cf_slice.begin: number of keys before each slice's own. For a slice
                  without a parent, these are the first ones of the path. NULL: the first slice has `prefix`, others
                  none
       parents    (n_slices) the earlier slice of this chunk that a slice continues: it sees its parent's keys
                  begins[parent] .. begins[s] - 1, and everything before them that the parent sees. -1: it continues
                  the path. NULL: every slice does

   Slices then have as many keys as queries. With `prefix` but no `begins`, the first slice may have more keys.

   A block is a problem of its own: keys first .. first + n - 1 of the prefix, in rows 0 .. n - 1 of k, v, dk and dv,
   for all slices that see any of them. n = 0 asks for a level instead of a block. Level d (`first` = d) has the keys of
   the chunk's slices that have d ancestors in the chunk, for the slices that descend from them. All other arrays are
   the chunk's. In both directions:

       cf_attention_forward(chunk, &x, ...)                      starts the sums, with the chunk's own keys
       cf_attention_forward(block, &x, ...)                      for each block and level, its own tiles in x.tiles
       x.finish = 1, cf_attention_forward(chunk, &x, ...)        stores `out` and `lse` (dq in the backward) of all
                                                                 slices that took part; this call reads sinks

   Between these calls the sums lie in fp32 at the start of the workspace, which needs the bytes of the largest of these
   problems. `overwrite` applies to dk and dv of the call that has it; for a level it must be 0. A block's backward
   finishes dk and dv of its rows. Slices that see the same keys take turns, a launch each, so that the order of their
   sums is fixed.

   Blocks come in any order, each once; those that no query sees may be left out. The same blocks in the same order give
   the same bits wherever their rows lie (dq: if deterministic). Without a window, blocks of one size share one object.

   chunk: needed only here. Errors as of cf_attention_prepare; CF_ERROR_ARGUMENT "first" or "n" outside the prefix. */
CHUNKFLOW_CUDA_API cf_result cf_attention_block_size(const cf_attention *chunk, int64_t first, int64_t n, size_t *bytes,
                                                     cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_attention_block_prepare(const cf_attention *chunk, int64_t first, int64_t n,
                                                        void *memory, size_t bytes, const cf_attention **out,
                                                        cf_error *error);

/* ---- state that streams ---- */

/* State that streams: K and V of a long chain and their gradients lie in host memory. A ring on the device has the
   blocks of rows that are in use or being copied:

       cf_state_stream_begin(s, &pass, &error);                  the first blocks set out
       for each layer (in a backward from the last to the first)
           while (cf_state_stream_next(s, compute, &block, &error) == CF_OK && block.n_rows > 0)
               attention with that block (or, if block.own, cf_state_stream_add)
           cf_state_stream_append(s, compute, layer, k, v, &error)   in the chain's F, except for its last chunk
       cf_state_stream_end(s, compute, &error);

   Only create allocates or waits. Copies run on two streams beside compute. A block's rows are ready for work that is
   put on `compute` after `next` returned the block. Once compute reaches the following `next`, the block's gradients
   are copied out and its slot is filled again. */
typedef struct cf_state_stream_desc {
    cf_state state;               /* n_kv_heads, head_size and dtype; nothing else is read */
    int64_t block_rows;           /* rows of a block at most */
    int64_t n_slots;              /* blocks of the ring, 2 to 64. A backward's copies overlap compute only with 3 or
                                     more, because gradients leave before their slot is filled again */
    void *ring;                   /* on the device, aligned to 16: n_slots x block_rows rows of one layer */
    void *gradient_ring;          /* the same for dK and dV; NULL: no backwards */
    cf_cuda_stream in, out;       /* two streams of the device that are used for these copies alone */
    const cf_allocator *allocator;/* host memory; NULL: malloc */
} cf_state_stream_desc;

/* Rows of a chain that other chains of the tree continue. */
typedef struct cf_state_part {
    cf_state state, gradient;     /* as in cf_state_pass */
    int64_t rows;                 /* the first `rows` rows of that chain are on the path */
} cf_state_part;

/* One pass of one chunk. The arrays must be in pinned host memory, because copies of pageable memory wait for the
   device. A chain has the same rows in every pass. Rows that a window hides from every query of the pass are not
   copied. */
typedef struct cf_state_pass {
    cf_state state;               /* K and V of the chain: row 0 is its first token; n_layers: those of this pass */
    cf_state gradient;            /* dK and dV of the same rows, fp32. data NULL: a forward */
    int64_t prefix;               /* rows of the chain before the chunk's */
    int64_t own;                  /* the chunk's own */
    int64_t window;               /* as in cf_attention_desc */
    int overwrite;                /* 1: the gradient is not initialised (the chain's last chunk). Rows that only this
                                     pass adds to never need clearing */
    const cf_state_part *above;   /* in trees: the chains above this one, from the root down; their rows come first.
                                     Clear the gradient of each before the first pass that adds to it. `window` is 0
                                     then, because siblings see other rows */
    int64_t n_above;              /* at most 64 */
    int64_t hidden;               /* in trees: first rows of the path, chains above included, that no query of the pass
                                     sees */
} cf_state_pass;

typedef struct cf_state_block {
    int64_t layer;
    int64_t index;                /* index among the blocks of the prefix, as for cf_state_stream_block */
    int64_t first_row, n_rows;    /* of its chain. n_rows 0: this layer has no more blocks; the next call is for the
                                     next layer */
    int own;                      /* 1: rows of the chunk itself, which come first; later chunks have added to their dK
                                     and dV. Add `gradient` to this pass's own by cf_state_stream_add. 0: rows of the
                                     prefix; `gradient` is copied out once the block is done */
    cf_state state;               /* one layer on the device; row 0 is first_row. data is NULL if own */
    cf_state gradient;            /* dK and dV of the same rows. data is NULL in a forward */
} cf_state_block;

typedef struct cf_state_stream cf_state_stream;

/* Makes a stream and its events on the current device. Free it when the device is done with it.

   Members and arguments are the executor's, and are not checked. Errors here and below: CF_ERROR_MEMORY (allocator),
   CF_ERROR_DEVICE; CF_ERROR_ARGUMENT for a layer too many, and for rows of k or v with gaps between their heads. */
CHUNKFLOW_CUDA_API cf_result cf_state_stream_create(const cf_state_stream_desc *desc, cf_state_stream **out,
                                                    cf_error *error);
CHUNKFLOW_CUDA_API void cf_state_stream_free(cf_state_stream *stream);

/* Returns the number of rows of block `index` of a prefix, which start at *first_row; 0 past the last block. Blocks end
   at multiples of block_rows. So every pass has the same blocks, except the first one that a window leaves and the
   last. */
CHUNKFLOW_CUDA_API int64_t cf_state_stream_block(int64_t block_rows, int64_t prefix, int64_t window, int64_t index,
                                                 int64_t *first_row);

/* Begin a pass, and return its next block. Rows that earlier passes sent out are read only after they have arrived,
   whatever stream computed them. One pass at a time. A `next` that failed with CF_ERROR_DEVICE may be called again. */
CHUNKFLOW_CUDA_API cf_result cf_state_stream_begin(cf_state_stream *stream, const cf_state_pass *pass,
                                                   cf_error *error);
CHUNKFLOW_CUDA_API cf_result cf_state_stream_next(cf_state_stream *stream, cf_cuda_stream compute, cf_state_block *out,
                                                  cf_error *error);

/* Adds the gradients of the `own` block returned last to the chunk's dK and dV of that layer. Call it after attention
   has written these. Row 0 of dk and dv is the chunk's first token. */
CHUNKFLOW_CUDA_API cf_result cf_state_stream_add(const cf_state_stream *stream, const cf_state_block *block,
                                                 const cf_tensor *dk, const cf_tensor *dv, cf_cuda_stream compute,
                                                 cf_error *error);

/* Copies the chunk's own K and V of a layer out: those rows that a later chunk sees. They must not change on `compute`
   until the next layer's call, or the end of the pass. */
CHUNKFLOW_CUDA_API cf_result cf_state_stream_append(cf_state_stream *stream, cf_cuda_stream compute, int64_t layer,
                                                    const cf_tensor *k, const cf_tensor *v, cf_error *error);

/* Ends a pass at any point. `compute` may then overwrite the chunk's K and V. The rings belong to `stream` until it is
   freed. Copied rows are in host memory once all work on `out` is done. */
CHUNKFLOW_CUDA_API cf_result cf_state_stream_end(cf_state_stream *stream, cf_cuda_stream compute, cf_error *error);

/* ---- what a pass goes through ---- */

/* Attention with blocks of a prefix that share one object: from block `first` up to the next entry's first. */
typedef struct cf_cuda_block {
    int64_t first;                /* as cf_state_block.index. In trees `first` and `n` are as in
                                     cf_attention_block_prepare */
    int64_t n;
    int64_t chain;                /* in trees: the chain whose state has the rows; -1 for a level */
    const cf_attention *attention; /* as cf_attention_block_prepare makes it */
    const void *tiles;            /* on the device */
    cf_state state, gradient;     /* its rows for this pass, in trees whose state does not stream */
} cf_cuda_block;

/* The library's own part of a step. */
typedef struct cf_cuda_walk {
    cf_state_stream *stream;      /* with state_block_rows: its pass begins before the callback and ends after it. NULL
                                     where nothing is read or sent: W, standalone chunks, the R of a chain's first
                                     chunk, a stage without layers */
    const cf_cuda_block *blocks;  /* attention with the blocks that the stream returns: see cf_cuda_walk_block. In trees
                                     whose state does not stream: all blocks, in this order, between begin and end of
                                     the chunk's own attention */
    int64_t n_blocks;             /* entries: one for all full blocks and few more. 0: no prefix, or none that is
                                     seen */
    const cf_cuda_block *levels;  /* (n_levels) in trees: attention with the chunk's own rows that other slices of it
                                     continue. They use the arrays of the chunk's own attention */
    int64_t n_levels;             /* entries of levels */
    int append;                   /* 1: later chunks of the chain read this F's K and V: cf_state_stream_append */
    struct cf_cuda_outputs *outputs; /* where an F keeps attention's outputs and its R finds them; NULL: nowhere */
} cf_cuda_walk;

/* Returns the entry of walk->blocks for the block of this index, or NULL. */
CHUNKFLOW_CUDA_API const cf_cuda_block *cf_cuda_walk_block(const cf_cuda_walk *walk, int64_t index);

} /* extern "C" */

#endif

#endif /* CHUNKFLOW_CUDA_H */

/* ================================================================================================================
   ================================================================================================================
   IMPLEMENTATION. Stop here if you only want the API.
   ================================================================================================================ */

#ifndef CHUNKFLOW_CUDA_HEADER_ONLY

#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#ifdef CHUNKFLOW_NCCL
#include <nccl.h>
#endif

#include <algorithm>
#include <cfloat>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <new>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

namespace {

/* ================================================================================================================
   >>device    instructions
   ================================================================================================================ */

#define CF_DEVICE __device__ __forceinline__
#define CF_HOPPER_DEVICE [[maybe_unused]] CF_DEVICE

/* A byte address in the block's shared memory. */
typedef uint32_t shared_address;

template <typename T> constexpr bool IS_BF16 = std::is_same<T, __nv_bfloat16>::value;

/* Each function up to "made of these" is one instruction or a short sequence. The emulation has its own version of
   them. */
#ifdef CHUNKFLOW_CUDA_EMULATION
#include "cuda_emu_device.h"
#else

inline void name_launch(const char *) {} /* the emulation wants to know */

/* CF_UNROLL: unroll the loop. CF_ROLLED: do not, because unrolling would only cost compile time. */
#define CF_UNROLL _Pragma("unroll")
#define CF_ROLLED _Pragma("unroll 1")

/* Dynamic shared memory starts here, at a multiple of 1024. */
CF_DEVICE shared_address shared_start() {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    return static_cast<shared_address>(__cvta_generic_to_shared(shared_memory));
}

CF_DEVICE void shared_store_4(shared_address to, uint32_t value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

CF_DEVICE void shared_store_8(shared_address to, uint2 value) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(value.x), "r"(value.y) : "memory");
}

[[maybe_unused]] CF_DEVICE void shared_store_16(shared_address to, uint4 value) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}

CF_DEVICE float shared_load_float(shared_address from) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
    return value;
}

CF_DEVICE uint2 shared_load_8(shared_address from) {
    uint2 value;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
    return value;
}

CF_DEVICE uint4 shared_load_16(shared_address from) {
    uint4 value;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

/* Loads four 8 x 8 matrices of 16-bit numbers. Lane 8 i + r gives the address of row r of matrix i. Of each matrix lane
   l gets row l / 4, columns 2 (l % 4) and the next one; transposed: rows 2 (l % 4) and the next one, column l / 4. */
CF_DEVICE void ldmatrix_x4(uint32_t (&to)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

CF_DEVICE void ldmatrix_x4_transposed(uint32_t (&to)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

/* c (16 x 8, fp32) += a (16 x 16) b (16 x 8). With g = lane / 4 and t = lane % 4, a lane holds:

       c     rows g and g + 8, columns 2t, 2t + 1
       a     rows g and g + 8, columns 2t, 2t + 1; then the same rows, columns 2t + 8, 2t + 9
       b     rows 2t, 2t + 1, then rows 2t + 8, 2t + 9, of column g

   So two neighbouring c tiles, rounded to 16 bits, are one a tile. */
template <typename T> CF_DEVICE void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#define CF_MMA(TYPE)                                                                                            \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, " \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                  \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
    if constexpr (IS_BF16<T>) CF_MMA("bf16");
    else CF_MMA("f16");
}

/* Starts the copy of 16 bytes from global to shared memory. If not `wanted`, nothing is read, and zeros are written. */
CF_DEVICE void copy_async_16(shared_address to, const void *from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
                 "r"(wanted ? 16 : 0)
                 : "memory");
}

/* The commit closes a group of copies. The wait lasts until at most LEFT groups of this thread are in flight. Other
   threads see the bytes after the next barrier. */
CF_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT> CF_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

/* Returns 2^x, to about two units in the last place; 2^-inf is 0. By name, so that it needs no compiler flag. */
CF_DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

CF_DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Returns x, but hides from the compiler that it is x. So what follows from x is computed here, instead of earlier and
   kept in registers across a loop. */
CF_DEVICE int compute_here(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

CF_DEVICE uint4 global_load_16(const void *from) { return *static_cast<const uint4 *>(from); }

CF_DEVICE void global_store_16(void *to, uint4 value) { *static_cast<uint4 *>(to) = value; }

/* If `wanted`, adds to or overwrites two neighbouring fp32 numbers that only this thread touches. Without branches: a
   backward has long runs of these, and branches took a third of its compile time. */
CF_DEVICE void global_update_8(float *to, float x, float y, bool overwrite, bool wanted) {
    asm volatile("{\n.reg .pred read, write;\n.reg .f32 x, y;\nmov.f32 x, 0f00000000;\nmov.f32 y, 0f00000000;\n"
                 "setp.ne.b32 read, %3, 0;\nsetp.ne.b32 write, %4, 0;\n"
                 "@read ld.global.v2.f32 {x, y}, [%0];\nadd.rn.f32 x, x, %1;\nadd.rn.f32 y, y, %2;\n"
                 "@write st.global.v2.f32 [%0], {x, y};\n}" ::"l"(__cvta_generic_to_global(to)), "f"(x), "f"(y),
                 "r"((int)(wanted && !overwrite)), "r"((int)wanted)
                 : "memory");
}

/* Returns the layout of dQ's sums in a tile of the workspace; only this file reads them. It lets a warp add to whole
   cache lines. True (sm_90 and up): four numbers of a thread are adjacent and added at once. False: one number of each
   thread lies beside those of its neighbours. */
CF_DEVICE bool adds_quads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return true;
#else
    return false;
#endif
}

/* Only code for sm_90a has the rest of these instructions. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define CF_HOPPER 1
#else
#define CF_HOPPER 0
#endif

/* An mbarrier, 8 bytes of shared memory. A phase ends when `arrivals` threads have arrived and as many bytes as they
   announced have been copied. A wait for parity 0 returns once the first phase is over. A wait for parity 1 returns at
   once before that, and later once the second phase is over; and so on. */
CF_HOPPER_DEVICE void mbarrier_init(shared_address barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/* Belongs after a thread's mbarrier_init, before the block's barrier that lets other threads use it. */
CF_HOPPER_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

CF_HOPPER_DEVICE void mbarrier_arrive(shared_address barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

CF_HOPPER_DEVICE void mbarrier_arrive_expect(shared_address barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

CF_HOPPER_DEVICE void mbarrier_wait(shared_address barrier, int parity) {
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred over;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, over;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

/* Belongs after a thread's stores to shared memory, before the barrier after which wgmma or a bulk copy uses them. */
CF_HOPPER_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A barrier of THREADS threads of the block, whole warps; ID from 1 to 15. */
template <int ID, int THREADS> CF_DEVICE void named_barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

/* Barriers whose ID is known only at run time. The first waits for the other threads, the second does not. */
template <int THREADS> CF_DEVICE void named_barrier(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS> CF_DEVICE void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

/* Change the number of registers of each thread to N. Every warp of the warpgroup must call this. */
template <int N> CF_DEVICE void give_registers_back() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

template <int N> CF_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

/* Starts the copy of a tensor map's box, whose first element is at (x, y, z) of the tensor, x innermost. Elements past
   the tensor's ends become zeros. All bytes of the box count for the mbarrier. */
CF_HOPPER_DEVICE void copy_box(shared_address to, const CUtensorMap *map, int x, int y, int z, shared_address barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

/* Starts the copy of contiguous bytes, a multiple of 16. They count for the mbarrier. */
CF_HOPPER_DEVICE void copy_bulk(shared_address to, const void *from, int bytes, shared_address barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Stores what ldmatrix_x4 loads. */
CF_HOPPER_DEVICE void stmatrix_x4(shared_address row, const uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(from[0]),
                 "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/* These stand around a warpgroup's products. After the fence, products see what was written to registers before it. The
   commit closes a group of products. The wait lasts until at most LEFT groups run; until then the sums, and an A
   operand in registers, must not be touched. */
CF_HOPPER_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

CF_HOPPER_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT> CF_DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* Nothing moves across this instruction in the machine code. Without it ptxas moves a wait for products up to the last
   branch, so that arithmetic meant to run beside the products comes after them. The instruction itself tells a
   dependent launch that it may start. No kernel here is launched that way, so it has no other effect. */
CF_HOPPER_DEVICE void keep_order() {
#if CF_HOPPER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Keeps the compiler from moving a use of these registers across this point: before a fence, and after a wait. */
template <int N> CF_DEVICE void hold_registers(float (&c)[N][4]) {
    CF_UNROLL
    for (int j = 0; j < N; j++) asm volatile("" : "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])::"memory");
}

template <int N> CF_DEVICE void hold_registers(uint32_t (&a)[N][4]) {
    CF_UNROLL
    for (int j = 0; j < N; j++) asm volatile("" : "+r"(a[j][0]), "+r"(a[j][1]), "+r"(a[j][2]), "+r"(a[j][3])::"memory");
}

#define CF_SUMS_4(c, j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
#define CF_SUMS_16(c, j) CF_SUMS_4(c, j), CF_SUMS_4(c, j + 1), CF_SUMS_4(c, j + 2), CF_SUMS_4(c, j + 3)
#define CF_SUMS_32(c) CF_SUMS_16(c, 0), CF_SUMS_16(c, 4)
#define CF_SUMS_64(c) CF_SUMS_16(c, 0), CF_SUMS_16(c, 4), CF_SUMS_16(c, 8), CF_SUMS_16(c, 12)
#define CF_NAMES_32                                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
    "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CF_NAMES_64                                                                                                  \
    CF_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
                "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* X, Y, ...: placeholders of the other operands, in their order. */
#define CF_WGMMA_SHARED(N, TYPE, NAMES, SUMS, X, Y, ADD, TA, TB)                                               \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, " X ", " Y      \
                 ", add, 1, 1, " TA ", " TB ";\n}"                                                             \
                 : SUMS                                                                                        \
                 : "l"(a), "l"(b), "r"((int)add), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED))
#define CF_WGMMA_REGISTERS(N, TYPE, NAMES, SUMS, A0, A1, A2, A3, Y, ADD, TB)                                   \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                          \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A0 ", " A1   \
                 ", " A2 ", " A3 "}, " Y ", add, 1, 1, " TB ";\n}"                                             \
                 : SUMS                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(B_TRANSPOSED))

/* c (64 x 8 N, fp32) = a (64 x 16) b (16 x 8 N), or += if `add`, by a warpgroup. Warp w has rows 16 w .. 16 w + 15 of
   c, and of an a in registers, each laid out as mma_16x8x16 says. */
template <typename T, bool A_TRANSPOSED, bool B_TRANSPOSED, int N>
CF_HOPPER_DEVICE void wgmma_shared(float (&c)[N][4], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
#if CF_HOPPER
    if constexpr (N == 8 && IS_BF16<T>)
        CF_WGMMA_SHARED("64", "bf16", CF_NAMES_32, CF_SUMS_32(c), "%32", "%33", "%34", "%35", "%36");
    else if constexpr (N == 8)
        CF_WGMMA_SHARED("64", "f16", CF_NAMES_32, CF_SUMS_32(c), "%32", "%33", "%34", "%35", "%36");
    else if constexpr (IS_BF16<T>)
        CF_WGMMA_SHARED("128", "bf16", CF_NAMES_64, CF_SUMS_64(c), "%64", "%65", "%66", "%67", "%68");
    else
        CF_WGMMA_SHARED("128", "f16", CF_NAMES_64, CF_SUMS_64(c), "%64", "%65", "%66", "%67", "%68");
#endif
}

template <typename T, bool B_TRANSPOSED, int N>
CF_HOPPER_DEVICE void wgmma_registers(float (&c)[N][4], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 8 || N == 16, "64 or 128 columns");
#if CF_HOPPER
    if constexpr (N == 8 && IS_BF16<T>)
        CF_WGMMA_REGISTERS("64", "bf16", CF_NAMES_32, CF_SUMS_32(c), "%32", "%33", "%34", "%35", "%36", "%37", "%38");
    else if constexpr (N == 8)
        CF_WGMMA_REGISTERS("64", "f16", CF_NAMES_32, CF_SUMS_32(c), "%32", "%33", "%34", "%35", "%36", "%37", "%38");
    else if constexpr (IS_BF16<T>)
        CF_WGMMA_REGISTERS("128", "bf16", CF_NAMES_64, CF_SUMS_64(c), "%64", "%65", "%66", "%67", "%68", "%69", "%70");
    else
        CF_WGMMA_REGISTERS("128", "f16", CF_NAMES_64, CF_SUMS_64(c), "%64", "%65", "%66", "%67", "%68", "%69", "%70");
#endif
}

#endif

/* ---- made of these ---- */

/* Compilers may fuse a product with the sum that uses it, in some rows of a tile and not in others. So code that could
   be fused says which it wants: fmaf, or __fmul_rn (__fadd_rn where expf ends in the product). */

/* Returns tanh, to an absolute error of about 2e-7. */
CF_DEVICE float tanh_fast(float x) {
    return fmaf(-2.0f, reciprocal_fast(1.0f + exp2_fast(2.885390081777927f * x)), 1.0f);
}

template <typename T> CF_DEVICE float to_float(T x);
template <> CF_DEVICE float to_float<float>(float x) { return x; }
template <> CF_DEVICE float to_float<__nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }
template <> CF_DEVICE float to_float<__half>(__half x) { return __half2float(x); }

template <typename T> CF_DEVICE T from_float(float x);
template <> CF_DEVICE float from_float<float>(float x) { return x; }
template <> CF_DEVICE __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <> CF_DEVICE __half from_float<__half>(float x) { return __float2half_rn(x); }

/* Two 16-bit numbers in one register, the first in the low half. */
template <typename T> CF_DEVICE uint32_t pack(float low, float high);
template <> CF_DEVICE uint32_t pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &both, 4);
    return bits;
}
template <> CF_DEVICE uint32_t pack<__half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &both, 4);
    return bits;
}

/* Returns the sum of the products of 8 pairs of 16-bit numbers. */
template <typename T> CF_DEVICE float dot_8(uint4 x, uint4 y) {
    T a[8], b[8];
    float sum = 0.0f;
    memcpy(a, &x, 16);
    memcpy(b, &y, 16);
    CF_UNROLL
    for (int i = 0; i < 8; i++) sum = fmaf(to_float<T>(a[i]), to_float<T>(b[i]), sum);
    return sum;
}

CF_DEVICE int sum_index(int quad, int i, int thread, int n_threads) {
    return adds_quads() ? (quad * n_threads + thread) * 4 + i : (quad * 4 + i) * n_threads + thread;
}

CF_DEVICE void global_add_quad(float *tile, int quad, int thread, int n_threads, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    float *to = tile + sum_index(quad, 0, thread, n_threads);
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
    CF_UNROLL
    for (int i = 0; i < 4; i++) atomicAdd(tile + sum_index(quad, i, thread, n_threads), x[i]);
#endif
}

CF_DEVICE int lesser(int x, int y) { return x < y ? x : y; }

CF_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

CF_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

CF_DEVICE float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}

CF_DEVICE float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
    return x;
}

/* Marks a value as equal in all threads of the warp, which the compiler cannot deduce from a thread's index. It then
   keeps the value, and all that is derived from it, in uniform registers. wgmma takes its addresses only from these; an
   address elsewhere costs two moves. */
CF_HOPPER_DEVICE int same_in_warp(int x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }

/* Returns the descriptor of a matrix in shared memory for wgmma. It lies in blocks of 64 columns, 128 bytes a row, each
   block at a multiple of 1024. Within a row, units of 16 bytes are permuted by the 128-byte swizzle of bulk copies:
   unit c of row r is at place c ^ (r & 7).

   To advance by 16 in k: 32 bytes if k is the column, 2048 bytes if k is the row ("transposed"). `next` is the distance
   of blocks, which matters only if k is the row. */
CF_HOPPER_DEVICE uint64_t matrix_at(shared_address start, int next = 0) {
    return (uint64_t)(start >> 4 & 0x3FFF) | (uint64_t)(uint32_t)(next >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Return an address or a descriptor unchanged, by a shuffle. So a loop holds it, and does not work it out again in each
   turn. */
CF_HOPPER_DEVICE shared_address hold_address(shared_address address) { return (uint32_t)same_in_warp((int)address); }

CF_HOPPER_DEVICE uint64_t hold_matrix(uint64_t matrix) {
    return matrix >> 32 << 32 | hold_address((uint32_t)matrix);
}

CF_HOPPER_DEVICE uint64_t matrix_step(uint64_t matrix, int bytes) { return matrix + (uint64_t)(bytes >> 4); }

/* ================================================================================================================
   >>problem    checks, masks, tiles
   ================================================================================================================ */

const int FORWARD_ROWS = 128; /* packed rows of a forward tile */
const int FORWARD_KEYS = 64;  /* keys of a step of its loop */
const int HOPPER_KEYS = 128;  /* keys of a step with wgmma */
const int ROW_TILE = 64;  /* packed rows of a backward tile, and of its sums of dQ. Some may be empty, because a tile
                             has whole tokens only */
const int LARGE_ROW_TILE = 128; /* rows of a backward tile of small heads, if shared memory allows it */
const int KEY_TILE = 128;       /* keys of a backward tile, or SMALL_KEY_TILE where shared memory is short */
const int SMALL_KEY_TILE = 64;
const int MOST_GROUP = ROW_TILE; /* query heads of a key head in the fused kernels: a token must fit into a row tile */
const int MOST_PROCESSORS = 1024, MOST_SLOTS = 3 * MOST_PROCESSORS; /* blocks at a time: at most 3 a processor */
const int64_t MOST_ROWS = (int64_t)1 << 30;                         /* leaves room for index arithmetic in 32 bits */
const int64_t MOST_LEVELS = 64; /* ancestors of a slice within its chunk */
const int32_t NO_WINDOW = 1 << 30; /* so wide that it never hides a key */
const float LN_2 = 0.6931471805599453f;
const float LOG2_E = 1.4426950408889634f;

/* One piece of work, done once for each key head. A block of threads reads its 48 bytes at once. */
struct alignas(16) tile {
    int32_t q_start, q_length; /* its slice's first row and tokens, as far as it needs them (rows_with_keys,
                                  each_key_tile) */
    int32_t k_start, k_length;
    int32_t block;      /* index of this tile, from q_start; of a key tile, from k_start */
    int32_t begin, end; /* the range that it loops over. Forward: blocks of forward_keys keys; dQ by itself: of
                           FORWARD_KEYS; key tile: row tiles; split tile: its parts */
    int32_t place;      /* index among all row tiles, in order of slices: of a row tile, its own; of a key tile, its
                           slice's first one; of others, the one that has its first row */
    int32_t part;       /* index among all parts, if this is a part of a split tile. Else -1 */
    int32_t carried;    /* 1 + its index among the tiles whose sums are carried from block to block of keys. Else 0 */
    int32_t ahead;      /* keys before the one that is aligned with query 0: may be negative, or more than there are */
    int32_t turn;       /* of a key tile: its launch, if several slices see the same keys and take turns. In the copy
                           that hopper_tell makes for the computing threads: the key head */
};
static_assert(sizeof(tile) == 48, "three accesses of 16 bytes");

/* Division by a number that the host knows, as a multiplication. Every thread splits every packed row that it loads
   into token and head. Exact for 0 <= n < 2^31. */
struct divisor {
    int32_t by, shift;
    uint32_t magic;
};

inline divisor make_divisor(int32_t by) {
    divisor d = {by, 0, 0};
    while (((int64_t)1 << d.shift) < by) d.shift++;
    d.magic = (uint32_t)((((uint64_t)1 << 32) * (((uint64_t)1 << d.shift) - (uint64_t)by)) / (uint64_t)by + 1);
    return d;
}

__host__ __device__ inline int32_t operator/(int32_t n, const divisor &d) {
    const uint32_t high = (uint32_t)(((uint64_t)(uint32_t)n * d.magic) >> 32);
    return (int32_t)((high + (uint32_t)n) >> d.shift);
}

struct mask {
    int32_t causal;
    int32_t window; /* a query sees so many keys, up to the one aligned with it; NO_WINDOW: all of these */
};

/* Query token i of a slice sees keys key_begin .. key_end - 1. The range may be empty where a window hides a block of
   the prefix. Tokens before first_seeing see none. */
__host__ __device__ inline int32_t key_end(const mask &m, const tile &t, int32_t token) {
    const int32_t own = token + t.ahead + 1;
    return m.causal && own < t.k_length ? (own > 0 ? own : 0) : t.k_length;
}

__host__ __device__ inline int32_t key_begin(const mask &m, const tile &t, int32_t token) {
    const int32_t first = token + t.ahead + 1 - m.window;
    return first > 0 ? first : 0;
}

__host__ __device__ inline int32_t first_seeing(const mask &m, const tile &t) {
    if (t.k_length == 0) return t.q_length;
    return m.causal && t.ahead < 0 ? -t.ahead : 0;
}

/* token_begin .. token_end - 1: the tokens of a slice that see any of the keys first .. last. */
__host__ __device__ inline int32_t token_begin(const mask &m, const tile &t, int32_t first) {
    const int32_t token = first - t.ahead;
    const int32_t lowest = first_seeing(m, t);
    return m.causal && token > lowest ? token : lowest;
}

__host__ __device__ inline int32_t token_end(const mask &m, const tile &t, int32_t last) {
    const int32_t past = last - t.ahead + m.window;
    return past < t.q_length ? (past > 0 ? past : 0) : t.q_length;
}

inline int32_t div_up(int64_t n, int64_t by) { return (int32_t)((n + by - 1) / by); }

cf_result cuda_result(cf_error *error, cudaError_t status, const char *what) {
    if (status == cudaSuccess) return CF_OK;
    return cf_fail(error, CF_ERROR_DEVICE, what, -1, (int64_t)cudaSuccess, (int64_t)status, cudaGetErrorName(status));
}

/* Returns the sum over i in [0, n) of (i + c), each clamped to [0, most]. */
int64_t clamped_sum(int64_t n, int64_t c, int64_t most) {
    const int64_t a = std::min(n, std::max<int64_t>(0, -c));
    const int64_t b = std::min(n, std::max(a, most - c));
    return (b - a) * c + (b - a) * (a + b - 1) / 2 + (n - b) * most;
}

int64_t slice_pairs(const mask &m, const tile &t) {
    const int64_t own = t.ahead + 1, upto = m.causal ? clamped_sum(t.q_length, own, t.k_length)
                                                     : (int64_t)t.q_length * t.k_length;
    return upto - clamped_sum(t.q_length, own - m.window, t.k_length);
}

/* Checks cu_seqlens and starts of queries or keys. *rows becomes the end of the last slice, *longest the most tokens of
   a slice. */
cf_result check_slices(const int32_t *cu, const int32_t *starts, int64_t n_slices, const char *cu_field,
                       const char *starts_field, int64_t *rows, int64_t *longest, cf_error *error) {
    int64_t end = 0;
    *longest = 0;
    if (cu == NULL) return cf_fail_null(error, cu_field);
    if (cu[0] != 0) return cf_fail(error, CF_ERROR_ARGUMENT, cu_field, 0, 0, cu[0], "must start at 0");
    for (int64_t s = 0; s < n_slices; s++) {
        const int64_t length = (int64_t)cu[s + 1] - cu[s], start = starts ? starts[s] : cu[s];
        if (length < 0) return cf_fail(error, CF_ERROR_ARGUMENT, cu_field, s + 1, cu[s], cu[s + 1], "must not fall");
        if (start < end)
            return cf_fail(error, CF_ERROR_ARGUMENT, starts_field, s, end, start,
                           "slices must lie in ascending order without overlap: at least where the last one ends");
        end = start + length;
        *longest = std::max(*longest, length);
    }
    if (end > MOST_ROWS) return cf_fail(error, CF_ERROR_LIMIT, cu_field, n_slices, MOST_ROWS, end, "too many rows");
    *rows = end;
    return CF_OK;
}

cf_result ask_device(cudaDeviceAttr what, const char *field, int64_t *answer, cf_error *error) {
    int device = 0, number = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&number, what, device);
    if (status == cudaSuccess) *answer = number;
    return cuda_result(error, status, field);
}

cf_result current_arch(int64_t *arch, cf_error *error) {
    int64_t major = 0, minor = 0;
    cf_result code = ask_device(cudaDevAttrComputeCapabilityMajor, "arch", &major, error);
    if (code == CF_OK) code = ask_device(cudaDevAttrComputeCapabilityMinor, "arch", &minor, error);
    if (code == CF_OK) *arch = 10 * major + minor;
    return code;
}

/* Returns the multiprocessors of a usual device of an architecture: an RTX 3090, an Orin, an RTX 4090, an H100, a B200,
   a B300, an RTX 5090, else an A100. */
int64_t usual_processors(int64_t arch) {
    static const int known[][2] = {{86, 82}, {87, 16}, {89, 128}, {90, 132}, {100, 148}, {103, 148}, {120, 170}};
    for (const auto &one : known)
        if (one[0] == arch) return one[1];
    return 108;
}

cf_result current_processors(int64_t *n, cf_error *error) {
    const cf_result code = ask_device(cudaDevAttrMultiProcessorCount, "n_processors", n, error);
    *n = std::max<int64_t>(1, std::min<int64_t>(*n, MOST_PROCESSORS));
    return code;
}

/* Returns an enum's bytes as an int. A caller in C may have put any int there, which C++ may not read as the enum. */
template <typename E> int number_of(const E &value) {
    int number;
    static_assert(sizeof value == sizeof number, "enums are ints");
    memcpy(&number, &value, sizeof number);
    return number;
}

/* Returns the bytes of shared memory that a block can have. */
constexpr int64_t block_memory(int64_t arch) {
    if (arch == 80 || arch == 87) return 166912;
    return arch == 90 || arch / 10 == 10 ? 232448 : 101376;
}

/* Everything that host code needs of a problem whose descriptor was checked: the public record, and more. Counts of
   tiles count a split tile as its parts. The arrays are the caller's until the problem is copied into the caller's
   memory. */
struct problem : cf_attention {
    mask visible;
    int64_t group, longest_q, longest_k;
    struct splitting {
        int64_t limit;            /* longest part; 0: nothing is split */
        int64_t n_split, n_parts; /* for one key head */
        bool carries;             /* tiles whose sums are carried count as split: all sums are those of parts */
        int64_t section;          /* key heads that run together: see work_order */
    } forward, backward;
    bool in_blocks;     /* 1: a chunk whose slices see blocks of keys, so that sums are carried */
    bool is_block;      /* 1: a block of keys of such a chunk */
    int32_t first, n;   /* keys first .. first + n - 1 of the path; with n 0, level `first` of the chunk's own keys */
    int32_t n_turns;
    int64_t n_sum_tiles; /* row tiles of all slices of the chunk, whose sums are kept between blocks */
    int32_t key_tile;
    int32_t row_tile, row_tokens, row_rows; /* of a row tile: room for packed rows, its tokens, the packed rows of
                                               these */
    int32_t forward_rows, forward_keys;     /* packed rows of a forward tile; keys of one step of its loop */
};

/* Returns the position of a slice's first query, minus the keys before that query that are among its own. */
int64_t begin_of(const cf_attention_desc *d, int64_t s) {
    return d->begins != NULL ? d->begins[s] : s == 0 ? d->prefix : 0;
}

int64_t parent_of(const cf_attention_desc *d, int64_t s) { return d->parents != NULL ? d->parents[s] : -1; }

int64_t depth_of(const cf_attention_desc *d, int64_t s) {
    int64_t depth = 0;
    while ((s = parent_of(d, s)) >= 0) depth++;
    return depth;
}

/* Makes a slice's tile see keys first .. upto - 1 of a path or of another slice, which lie from row k_start on. Its own
   keys begin at place `query` of that path. If the window hides none of the keys, they count as if they lay right
   before query 0. So tiles of slices that see the same keys are alike, however far back these keys lie. */
void see_keys(const problem *p, tile *t, int64_t k_start, int64_t first, int64_t upto, int64_t query) {
    t->k_start = (int32_t)k_start;
    t->k_length = (int32_t)std::max<int64_t>(0, upto - first);
    t->ahead += (int32_t)(query - first);
    if (t->q_length + t->ahead <= p->visible.window) t->ahead = t->k_length;
}

/* Returns a slice with its own keys, or with the keys of a block that it sees. */
tile slice_tile(const problem *p, int64_t s) {
    const cf_attention_desc *d = &p->desc;
    tile t = {};
    t.q_start = d->starts_q[s];
    t.q_length = d->cu_seqlens_q[s + 1] - d->cu_seqlens_q[s];
    t.k_start = d->starts_k[s];
    t.k_length = d->cu_seqlens_k[s + 1] - d->cu_seqlens_k[s];
    t.ahead = t.k_length - t.q_length;
    if (!p->is_block) return t;
    int64_t above = s, below = s;
    for (int64_t left = p->n > 0 ? INT64_MAX : depth_of(d, s) - p->first; left > 0 && parent_of(d, above) >= 0; left--)
        below = above, above = parent_of(d, above);
    if (p->n > 0) see_keys(p, &t, 0, p->first, std::min<int64_t>(p->first + p->n, begin_of(d, above)), begin_of(d, s));
    else if (above == s) t.k_length = 0;
    else see_keys(p, &t, d->starts_k[above], begin_of(d, above), begin_of(d, below), begin_of(d, s));
    return t;
}

bool is_carried(const problem *p, int64_t s) { return p->in_blocks && begin_of(&p->desc, s) > 0; }

/* Calls visit(slice, place of its first row tile, place of its first carried tile of `rows` packed rows) for all
   slices, except those that see nothing of a block. */
template <typename F> void each_slice(const problem *p, int64_t rows, F visit) {
    int32_t place = 0, carried = 0;
    for (int64_t s = 0; s < p->desc.n_slices; s++) {
        const tile t = slice_tile(p, s);
        if (!p->is_block || t.k_length > 0) visit(t, place, is_carried(p, s) ? carried + 1 : 0);
        place += div_up(t.q_length, p->row_tokens);
        if (is_carried(p, s)) carried += div_up(t.q_length * p->group, rows);
    }
}

/* Cuts a slice to the rows of tokens first .. last and the keys that any of these rows sees. Under a causal mask, later
   tokens are dropped. The mask stays right because it is aligned at the last token and the last key. Keys that no row
   of a tile sees are past the ends of its arrays, so they are never loaded, and a NaN there does not spread. */
tile rows_with_keys(const mask &m, const tile &slice, int32_t first, int32_t last) {
    const int32_t end = key_end(m, slice, last), begin = std::min(key_begin(m, slice, first), end);
    tile t = slice;
    if (m.causal) t.q_length = last + 1;
    t.k_start += begin;
    t.k_length = end - begin;
    t.ahead -= begin;
    return t;
}

/* Returns how many of a slice's first keys no query sees, because all windows begin after them. */
int32_t unseen_keys(const mask &m, const tile &slice) {
    return slice.q_length > 0 ? std::min(key_begin(m, slice, 0), slice.k_length) : slice.k_length;
}

/* A number of the caller's and its limits, both included. */
struct bound {
    const char *field;
    int64_t got, least, most;
};

cf_result check_range(int64_t got, int64_t least, int64_t most, const char *field, int64_t item, cf_error *error) {
    if (got >= least && got <= most) return CF_OK;
    return cf_fail(error, CF_ERROR_ARGUMENT, field, item, got < least ? least : most, got, "out of range");
}

cf_result check_bounds(std::initializer_list<bound> all, cf_error *error) {
    cf_result code = CF_OK;
    for (const bound &b : all)
        if (code == CF_OK) code = check_range(b.got, b.least, b.most, b.field, -1, error);
    return code;
}

cf_result check_aligned(const void *address, int64_t to, const char *field, cf_error *error) {
    const int64_t off = (int64_t)(reinterpret_cast<uintptr_t>(address) % (uintptr_t)to);
    return off == 0 ? CF_OK : cf_fail(error, CF_ERROR_ARGUMENT, field, -1, 0, off, "address is not aligned");
}

cf_result check_head_size(int64_t size, cf_error *error) {
    if (size >= 8 && size <= 256 && size % 8 == 0) return CF_OK;
    return cf_fail(error, CF_ERROR_ARGUMENT, "head_size", -1, 128, size, "must be a multiple of 8, at most 256");
}

cf_result check_numbers(cf_attention_desc *d, cf_error *error) {
    cf_result code = check_range(d->n_heads, 1, 65535, "n_heads", -1, error);
    if (code != CF_OK) return code;
    if (d->n_kv_heads == 0) d->n_kv_heads = d->n_heads;
    if (d->n_kv_heads < 1 || d->n_heads % d->n_kv_heads != 0)
        return cf_fail(error, CF_ERROR_ARGUMENT, "n_kv_heads", -1, d->n_heads, d->n_kv_heads, "must divide n_heads");
    code = check_head_size(d->head_size, error);
    if (code != CF_OK) return code;
    code = check_bounds({{"dtype", number_of(d->dtype), 0, CF_DTYPE_FP32},
                         {"path", number_of(d->path), 0, CF_ATTENTION_WGMMA},
                         {"window", d->window, 0, INT64_MAX},
                         {"n_processors", d->n_processors, 0, MOST_PROCESSORS},
                         {"cache_bytes", d->cache_bytes, 0, INT64_MAX},
                         {"n_slices", d->n_slices, 0, INT32_MAX - 1}}, error);
    if (code != CF_OK) return code;
    if (d->dtype == CF_DTYPE_DEFAULT) d->dtype = CF_DTYPE_BF16;
    if (d->scale == 0.0) d->scale = 1.0 / std::sqrt((double)d->head_size);
    for (const double *x : {&d->scale, &d->softcap})
        if (*x != 0.0 && !(*x > 1e-30 && *x < 1e30))
            return cf_fail_real(error, CF_ERROR_ARGUMENT, x == &d->scale ? "scale" : "softcap", -1, *x,
                                "must be a positive number from 1e-30 to 1e30, or 0");
    if (d->arch != 0 && (d->arch < 50 || d->arch > 999))
        return cf_fail(error, CF_ERROR_ARGUMENT, "arch", -1, 80, d->arch, "must be a compute capability x 10, or 0");
    return CF_OK;
}

/* ---- parts of tiles ---- */

/* Calls visit(tile) for every tile of `rows` packed rows; a row tile has whole tokens. tile.begin and tile.end count
   blocks of `keys` keys. Slices come in order. Of a slice the last tile comes first, because it sees most keys. */
template <typename F> void each_row_tile(const problem *p, int32_t rows, int32_t keys, F visit) {
    each_slice(p, rows, [&](const tile &slice, int32_t place, int32_t carried) {
        const int32_t n_rows = (int32_t)(slice.q_length * p->group), n_blocks = div_up(n_rows, rows);
        for (int32_t block = n_blocks - 1; block >= 0; block--) {
            const int64_t first_row = (int64_t)block * rows, last_row = std::min<int64_t>(n_rows, first_row + rows) - 1;
            tile t = rows_with_keys(p->visible, slice, (int32_t)(first_row / p->group), (int32_t)(last_row / p->group));
            t.block = block;
            t.part = -1;
            t.carried = carried > 0 ? carried + block : 0;
            t.place = place + (int32_t)(first_row / p->row_rows);
            t.begin = 0;
            t.end = div_up(t.k_length, keys);
            visit(t);
        }
    });
}

/* Calls visit(tile) for key tiles, from the first to the last. Keys that no query sees have tiles of their own, without
   work and without loads; they only matter where gradients are overwritten. In a block, slices that continue the same
   place see the same keys and take turns to add to their gradients. */
template <typename F> void each_key_tile(const problem *p, F visit) {
    int32_t before = -1, turn = 0;
    each_slice(p, 1, [&](tile t, int32_t place, int32_t) {
        const int32_t unseen = unseen_keys(p->visible, t);
        turn = p->is_block && t.k_start == before ? turn + 1 : 0;
        before = t.k_start;
        t.turn = turn;
        t.place = place;
        t.part = -1;
        for (int32_t first = 0; first < unseen; first += p->key_tile) {
            tile idle = t;
            idle.q_length = 0;
            idle.k_length = unseen;
            idle.block = first / p->key_tile;
            visit(idle);
        }
        t.k_start += unseen;
        t.k_length -= unseen;
        t.ahead -= unseen;
        const int32_t n_blocks = div_up(t.k_length, p->key_tile);
        for (t.block = 0; t.block < n_blocks; t.block++) {
            const int32_t first = t.block * p->key_tile, last = std::min(t.k_length, first + p->key_tile) - 1;
            const int64_t from = token_begin(p->visible, t, first), upto = token_end(p->visible, t, last);
            t.begin = (int32_t)(from / p->row_tokens);
            t.end = from < upto ? div_up(upto, p->row_tokens) : t.begin;
            visit(t);
        }
    });
}

int32_t parts_of(int64_t steps, int64_t limit) { return limit > 0 && steps > limit ? div_up(steps, limit) : 1; }

/* Returns whether a tile is put together from parts; there may be one part. */
bool is_split(const tile &t, const problem::splitting &how) {
    return parts_of(t.end - t.begin, how.limit) > 1 || (how.carries && t.carried > 0);
}

/* Costs of a kernel's blocks of threads beside the steps of their loops, counted in such steps, and how many run at a
   time. */
struct block_costs {
    int64_t whole, part; /* a part also writes its sums to the workspace, where they are read again */
    int64_t least;       /* a tile of no more steps is not cut */
    int64_t n_slots;
};

/* Work by length: the number of tiles, or parts, for each number of steps. If the longest has more steps than there are
   classes, a class holds `width` lengths, rounded up to the longest of them. */
const int64_t LENGTH_CLASSES = 2048;

struct lengths {
    int64_t width, longest, steps;
    int32_t whole[LENGTH_CLASSES + 1], part[LENGTH_CLASSES + 1];
};

template <typename Each> void count_lengths(lengths *l, const Each &each) {
    *l = lengths();
    each([&](const tile &t) {
        l->steps += t.end - t.begin;
        l->longest = std::max<int64_t>(l->longest, t.end - t.begin);
    });
    l->width = l->longest / LENGTH_CLASSES + 1;
    each([&](const tile &t) { l->whole[div_up(t.end - t.begin, l->width)]++; });
    l->whole[0] = 0; /* no work, no block */
}

/* Counts lengths after tiles of more than `limit` steps are cut into parts. */
void cut_lengths(const lengths &from, int64_t limit, lengths *to) {
    *to = from;
    for (int64_t i = 1; i <= LENGTH_CLASSES; i++) {
        const int32_t parts = parts_of(i * from.width, limit);
        if (parts == 1) continue;
        to->whole[i] -= from.whole[i];
        to->part[div_up(div_up(i * from.width, parts), from.width)] += from.whole[i] * parts;
    }
}

/* Returns how long a kernel takes, in steps. Blocks start in the order of work_order, longest first within each section
   of heads, each in the slot that is free first. */
int64_t time_of(const problem *p, const block_costs &costs, int64_t section, const lengths &l) {
    int64_t busy[MOST_SLOTS] = {0}, longest = 0;
    int64_t *end = busy + costs.n_slots;
    auto issue = [&](int64_t blocks, int64_t steps) {
        for (int64_t i = 0; i < blocks; i++) {
            std::pop_heap(busy, end, std::greater<int64_t>());
            end[-1] += steps;
            longest = std::max(longest, end[-1]);
            std::push_heap(busy, end, std::greater<int64_t>());
        }
    };
    for (int64_t head = 0; head < p->desc.n_kv_heads; head += section)
        for (int64_t i = LENGTH_CLASSES, n = std::min(section, p->desc.n_kv_heads - head); i > 0; i--) {
            issue(n * l.part[i], i * l.width + costs.part);
            issue(n * l.whole[i], i * l.width + costs.whole);
        }
    return longest;
}

/* Chooses the length of parts that takes least time. Few key heads make few tiles, and a long slice makes long ones,
   for which most of the device would wait. Limits from `least` eighths of a slot's mean work up to all of it are tried.
   A part has at least half the steps of the limit. So there are at most 16 / least parts for each slot, which bounds
   the workspace. Not yet measured. */
template <typename Each>
void choose_limit(const problem *p, const block_costs &costs, int64_t least, problem::splitting *to, const Each &each) {
    lengths uncut, cut;
    count_lengths(&uncut, each);
    const int64_t mean = uncut.steps * p->desc.n_kv_heads / costs.n_slots + 1;
    if (uncut.longest <= costs.least || uncut.longest <= mean / 2) return;
    const int64_t whole = time_of(p, costs, to->section, uncut);
    int64_t best = whole - whole / 20; /* a split must save at least 5 % */
    for (int64_t eighths = 8; eighths >= least; eighths--) {
        const int64_t limit = std::max<int64_t>(costs.least, mean * eighths / 8);
        cut_lengths(uncut, limit, &cut);
        const int64_t time = time_of(p, costs, to->section, cut);
        if (time < best) best = time, to->limit = limit;
        if (limit == costs.least) break;
    }
}

/* Chooses the parts and counts them. */
template <typename Each>
void choose_parts(const problem *p, const block_costs &costs, int64_t least, problem::splitting *to, const Each &each) {
    choose_limit(p, costs, least, to, each);
    if (to->limit == 0 && !to->carries) return;
    each([&](const tile &t) {
        to->n_split += is_split(t, *to);
        to->n_parts += is_split(t, *to) ? parts_of(t.end - t.begin, to->limit) : 0;
    });
}

/* Refuses what a fused path cannot do; `most` is its largest head size. The error names the field. */
cf_result check_16_bit(const problem *p, int64_t most, cf_error *error) {
    const cf_attention_desc *d = &p->desc;
    if (d->dtype == CF_DTYPE_FP32)
        return cf_fail(error, CF_ERROR_ARGUMENT, "path", -1, CF_DTYPE_BF16, d->dtype, "is for 16-bit types");
    if (d->arch < 80)
        return cf_fail(error, CF_ERROR_ARGUMENT, "path", -1, 80, d->arch, "is not for this architecture");
    if (d->head_size > most)
        return cf_fail(error, CF_ERROR_ARGUMENT, "path", -1, most, d->head_size,
                       "cannot do this head size on this architecture");
    if (p->group > MOST_GROUP)
        return cf_fail(error, CF_ERROR_ARGUMENT, "path", -1, MOST_GROUP, p->group,
                       "cannot do so many query heads for each key head");
    return CF_OK;
}

cf_result check_fused(const problem *p, cf_error *error) {
    return check_16_bit(p, block_memory(p->desc.arch) >= 166912 ? 256 : 128, error);
}

cf_result check_hopper(const problem *p, cf_error *error) {
    if (p->desc.arch == 90) return check_16_bit(p, 128, error);
    return cf_fail(error, CF_ERROR_ARGUMENT, "path", -1, 90, p->desc.arch, "is not for this architecture");
}

/* Returns true if this program has path 3's kernels for the current device; false without a device. */
bool has_hopper_code();

/* Turns AUTO into path 3 where possible. Must come before tiles are made. */
void choose_hopper(problem *p) {
    if (number_of(p->desc.path) == CF_ATTENTION_AUTO && check_hopper(p, NULL) == CF_OK && has_hopper_code())
        p->desc.path = CF_ATTENTION_WGMMA;
}

bool is_hopper(const problem *p) { return number_of(p->desc.path) == CF_ATTENTION_WGMMA; }

/* Chooses which tiles are split. A step of the forward is a block of keys, a step of the backward a row tile. Each
   takes as long as a block of threads takes to move about 64 KB while all other blocks do the same.

   Beside its steps a forward moves Q and the rows that it writes, or for a part 68 KB of sums. A backward moves K, V
   and what it adds to dK and dV (256 KB), or for a part 128 KB; half of that for small heads with large row tiles.
   Launch bounds and memory give the number of blocks of a processor. */
void split_tiles(problem *p) {
    const bool large = p->desc.head_size > 64, roomy = block_memory(p->desc.arch) >= 166912;
    const int64_t n = p->desc.n_processors, blocks = p->desc.head_size > 128 ? 1 : (large ? 1 : 2) + (roomy ? 1 : 0);
    const block_costs forward = {1, 3, 16, n * blocks}, hopper = {1, 2, 8, n}; /* in steps of 64 and of 128 keys */
    const block_costs backward = p->row_tile == ROW_TILE ? block_costs{2, 3, 16, n} : block_costs{1, 2, 8, n};
    p->forward.carries = p->in_blocks;
    choose_parts(p, is_hopper(p) ? hopper : forward, 4, &p->forward,
                 [&](const auto &visit) { each_row_tile(p, p->forward_rows, p->forward_keys, visit); });
    choose_parts(p, backward, 2, &p->backward, [&](const auto &visit) { each_key_tile(p, visit); });
    p->n_forward_tiles += p->forward.n_parts - p->forward.n_split;
    p->n_all_key_tiles += p->backward.n_parts - p->backward.n_split;
}

/* Returns how many key heads run together: as many as have their arrays in `cache` bytes, but at least 1. */
int64_t heads_in_cache(const problem *p, int64_t cache, int64_t bytes_per_head) {
    return std::max<int64_t>(1, std::min(cache / std::max<int64_t>(1, bytes_per_head), p->desc.n_kv_heads));
}

/* Chooses the number of heads that run together. Forward: as many as have K and V in 32 MB of an H100's 50 MB cache.
   Backward: all, because sections whose Q and dout fit leave up to a third of the device idle at the end of each. */
void choose_sections(problem *p) {
    const int64_t cache = p->desc.cache_bytes;
    p->forward.section = heads_in_cache(p, cache > 0 ? cache : (int64_t)32 << 20, p->rows_k * p->desc.head_size * 4);
    p->backward.section = p->desc.n_kv_heads;
    if (cache > 0) p->backward.section = heads_in_cache(p, cache, p->rows_q * p->group * p->desc.head_size * 4);
}

/* Chooses the shapes of tiles by what fits into registers and shared memory, and into bulk copies: whole tokens. */
void choose_tiles(problem *p) {
    const bool large = p->desc.head_size > 64, roomy = block_memory(p->desc.arch) >= 166912;
    p->key_tile = p->desc.head_size > 128 || (large && !roomy) ? SMALL_KEY_TILE : KEY_TILE;
    p->row_tile = large || !roomy ? ROW_TILE : LARGE_ROW_TILE;
    p->row_tokens = (int32_t)std::max<int64_t>(1, p->row_tile / p->group);
    p->row_rows = p->row_tokens * (int32_t)p->group;
    p->forward_rows = FORWARD_ROWS, p->forward_keys = FORWARD_KEYS;
    if (!is_hopper(p)) return;
    p->forward_rows = (int32_t)(std::max<int64_t>(1, FORWARD_ROWS / p->group) * p->group);
    p->forward_keys = HOPPER_KEYS;
}

/* Counts the tiles of each kind that the slices make. */
void count_tiles(problem *p) {
    each_slice(p, 1, [&](const tile &t, int32_t, int32_t) {
        const int32_t unseen = unseen_keys(p->visible, t);
        p->n_forward_tiles += div_up(t.q_length * p->group, p->forward_rows);
        p->n_row_tiles += div_up(t.q_length, p->row_tokens);
        p->n_all_key_tiles += div_up(unseen, p->key_tile) + div_up(t.k_length - unseen, p->key_tile);
        p->pairs += slice_pairs(p->visible, t);
    });
    p->n_turns = 1;
    if (p->is_block) each_key_tile(p, [&](const tile &t) { p->n_turns = std::max(p->n_turns, t.turn + 1); });
}

/* Chooses the shapes of tiles, counts them and decides which to split, once slices and mask are known. fill_tiles
   writes their list. */
cf_result make_tiles(problem *p, cf_error *error) {
    const int64_t heads = p->desc.n_kv_heads;
    choose_tiles(p);
    choose_sections(p);
    count_tiles(p);
    p->n_sum_tiles = p->n_row_tiles;
    const int64_t most_tiles = std::max(p->n_row_tiles, p->n_all_key_tiles);
    if (most_tiles > INT32_MAX / heads)
        return cf_fail(error, CF_ERROR_LIMIT, "n_slices", -1, INT32_MAX / heads, most_tiles, "too many tiles");
    split_tiles(p);
    return CF_OK;
}

/* Checks the slice that a slice of a tree continues: an earlier one that has not been left, or the path. */
cf_result check_place(const cf_attention_desc *d, int64_t s, cf_error *error) {
    const int64_t parent = parent_of(d, s), begin = d->begins[s];
    int64_t before = s - 1, least = 0, most = d->prefix;
    const cf_result code = check_range(parent, -1, s - 1, "parents", s, error);
    if (code != CF_OK) return code;
    while (parent >= 0 && before > parent) before = d->parents[before];
    if (parent >= 0 && before != parent)
        return cf_fail(error, CF_ERROR_ARGUMENT, "parents", s, before, parent, "has been left");
    if (depth_of(d, s) > MOST_LEVELS)
        return cf_fail(error, CF_ERROR_LIMIT, "parents", s, MOST_LEVELS, depth_of(d, s), "too many above it");
    if (parent >= 0) least = d->begins[parent] + 1;
    if (parent >= 0) most = (int64_t)least - 1 + d->cu_seqlens_q[parent + 1] - d->cu_seqlens_q[parent];
    return check_range(begin, least, most, "begins", s, error);
}

/* Checks a problem whose keys come in blocks. Every query must see a key of its own; otherwise some rows would have no
   sums to carry. */
cf_result check_prefix(problem *p, cf_error *error) {
    const cf_attention_desc *d = &p->desc;
    const cf_result none = check_range(d->prefix, 0, d->n_slices > 0 ? INT64_MAX : 0, "prefix", -1, error);
    if (none != CF_OK) return none;
    if (d->parents != NULL && d->begins == NULL) return cf_fail_null(error, "begins");
    for (int64_t s = 0; s < d->n_slices; s++) {
        const int64_t keys = (int64_t)d->cu_seqlens_k[s + 1] - d->cu_seqlens_k[s];
        const int64_t queries = (int64_t)d->cu_seqlens_q[s + 1] - d->cu_seqlens_q[s];
        const cf_result code = d->begins != NULL ? check_place(d, s, error) : CF_OK;
        if (code != CF_OK) return code;
        if (begin_of(d, s) == 0) continue;
        if (d->begins != NULL ? keys != queries : keys < queries)
            return cf_fail(error, CF_ERROR_ARGUMENT, "cu_seqlens_k", s + 1, queries, keys,
                           "has fewer keys than queries, or a tree's slice more");
        if (std::max(begin_of(d, s), d->prefix) > MOST_ROWS - keys)
            return cf_fail(error, CF_ERROR_LIMIT, "prefix", -1, MOST_ROWS - keys, d->prefix, "too many rows");
        p->in_blocks = true;
        p->n_levels = std::max(p->n_levels, depth_of(d, s));
    }
    return CF_OK;
}

cf_result resolve(const cf_attention_desc *desc, problem *p, cf_error *error) {
    if (desc == NULL) return cf_fail_null(error, "desc");
    *p = problem();
    p->desc = *desc;
    cf_attention_desc *d = &p->desc;
    cf_result code = check_numbers(d, error);
    if (code == CF_OK)
        code = check_slices(d->cu_seqlens_q, d->starts_q, d->n_slices, "cu_seqlens_q", "starts_q", &p->rows_q,
                            &p->longest_q, error);
    if (code == CF_OK)
        code = check_slices(d->cu_seqlens_k, d->starts_k, d->n_slices, "cu_seqlens_k", "starts_k", &p->rows_k,
                            &p->longest_k, error);
    if (d->n_processors == 0 && d->arch != 0) d->n_processors = usual_processors(d->arch);
    if (code == CF_OK && d->n_processors == 0) code = current_processors(&d->n_processors, error);
    if (code == CF_OK && d->arch == 0) code = current_arch(&d->arch, error);
    if (code != CF_OK) return code;
    if (d->starts_q == NULL) d->starts_q = d->cu_seqlens_q;
    if (d->starts_k == NULL) d->starts_k = d->cu_seqlens_k;
    p->group = d->n_heads / d->n_kv_heads;
    if (p->rows_q > MOST_ROWS / p->group)
        return cf_fail(error, CF_ERROR_LIMIT, "cu_seqlens_q", d->n_slices, MOST_ROWS / p->group, p->rows_q,
                       "too many rows for this many heads");
    p->visible.causal = !d->full;
    p->visible.window = d->window == 0 || d->window >= p->longest_k ? NO_WINDOW : (int32_t)d->window;
    code = check_prefix(p, error);
    choose_hopper(p);
    return code == CF_OK ? make_tiles(p, error) : code;
}

/* Makes the problem of a chunk's slices and one block of keys. The whole block lies before their queries, so only a
   window hides any of it. */
cf_result resolve_block(const problem *chunk, int64_t first, int64_t n, problem *p, cf_error *error) {
    *p = problem();
    p->desc = chunk->desc;
    p->desc.full = 1;
    p->group = chunk->group;
    p->rows_q = chunk->rows_q;
    p->rows_k = n > 0 ? n : chunk->rows_k;
    p->longest_k = n > 0 ? n : chunk->longest_k;
    p->in_blocks = p->is_block = true;
    p->first = (int32_t)first, p->n = (int32_t)n;
    const int64_t window = p->desc.window;
    p->visible.window = window == 0 || window > NO_WINDOW ? NO_WINDOW : (int32_t)window;
    const cf_result code = make_tiles(p, error);
    each_slice(p, 1, [&](const tile &t, int32_t, int32_t) {
        p->longest_q = std::max<int64_t>(p->longest_q, t.q_length);
    });
    p->n_sum_tiles = chunk->n_sum_tiles;
    return code;
}

/* Orders tiles: by turn, then the longest first, so that no long tile starts last. Ties stay in order of slices, so
   that the list is unique. */
bool longer_work(const tile &a, const tile &b) {
    if (a.turn != b.turn) return a.turn < b.turn;
    if (a.end - a.begin != b.end - b.begin) return a.end - a.begin > b.end - b.begin;
    if (a.place != b.place) return a.place < b.place;
    if (a.block != b.block) return a.block < b.block;
    return a.k_start != b.k_start ? a.k_start < b.k_start : a.begin < b.begin;
}

/* Fills the list on the device: forward tiles, row tiles, key tiles, each with parts in place of split ones; then the
   split key tiles and the split forward tiles. Returns how many tiles or parts have a visible pair; those come first in
   each turn. */
template <typename Each> int64_t fill_tiles(tile *tiles, tile *split, const problem::splitting &how, const Each &each) {
    int64_t n = 0, with_work = 0;
    int32_t part = 0;
    tile *const first_split = split;
    each([&](const tile &t) {
        const int32_t steps = t.end - t.begin, parts = parts_of(steps, how.limit);
        with_work += steps > 0 ? parts : 0;
        for (int32_t i = 0; i < parts; i++) {
            tiles[n] = t;
            tiles[n].begin = t.begin + (int32_t)((int64_t)steps * i / parts);
            tiles[n].end = t.begin + (int32_t)((int64_t)steps * (i + 1) / parts);
            if (is_split(t, how)) tiles[n].part = part + i;
            n++;
        }
        if (!is_split(t, how)) return;
        *split = t;
        split->begin = part;
        split->end = part += parts;
        split++;
    });
    std::sort(tiles, tiles + n, longer_work);
    std::stable_sort(first_split, split, [](const tile &a, const tile &b) { return a.turn < b.turn; });
    return with_work;
}

/* Fills in all tiles; returns how many key tiles have a visible pair. */
int64_t fill_all_tiles(const problem *p, tile *tiles) {
    tile *rows = tiles + p->n_forward_tiles, *keys = rows + p->n_row_tiles, *split_keys = keys + p->n_all_key_tiles;
    fill_tiles(tiles, split_keys + p->backward.n_split, p->forward,
               [&](const auto &visit) { each_row_tile(p, p->forward_rows, p->forward_keys, visit); });
    fill_tiles(rows, (tile *)NULL, problem::splitting(),
               [&](const auto &visit) { each_row_tile(p, p->row_rows, FORWARD_KEYS, visit); });
    return fill_tiles(keys, split_keys, p->backward, [&](const auto &visit) { each_key_tile(p, visit); });
}

/* ================================================================================================================
   >>fragments    tiles in shared memory, products of a warp
   ================================================================================================================ */

/* Strides in elements; the first element belongs to row 0, head 0. */
struct view {
    char *data;
    int64_t row, head;
};

/* Returns the address of a unit of 16 bytes in a tile of 16-bit numbers. Rows have ROW bytes (128, 256 or 512). Unit c
   of row r is stored at place c ^ (r & 7), so that the 8 rows of an ldmatrix are in different banks. Tiles start at
   multiples of 1024. */
template <int ROW> CF_DEVICE shared_address unit_address(shared_address base, int row, int unit) {
    return base + (shared_address)(row * ROW) + (shared_address)((unit ^ (row & 7)) << 4);
}

/* The address that a lane gives to ldmatrix_x4 for the fragment at (row, unit) of a tile, both multiples of what a
   fragment covers. Two units further is an exclusive or.

       as rows       lanes 0-15: the 16 rows; lanes 16-31: the same rows, the next unit. An A operand, or, loaded
                     transposed, a B operand with k along its rows
       as columns    lanes 0-15: 8 rows of two units; lanes 16-31: the next 8 rows. A B operand with n along its rows,
                     or, loaded transposed, an A operand with k along its rows
   */
template <int ROW>
CF_DEVICE shared_address lane_as_rows(shared_address base, int row, int unit, int thread = (int)threadIdx.x) {
    const int lane = thread % 32;
    return unit_address<ROW>(base, row + lane % 16, unit + lane / 16);
}

template <int ROW>
CF_DEVICE shared_address lane_as_columns(shared_address base, int row, int unit, int thread = (int)threadIdx.x) {
    const int lane = thread % 32;
    return unit_address<ROW>(base, row + lane % 8 + lane / 16 * 8, unit + lane / 8 % 2);
}

/* Calls change(number, j, e) for all of a lane's numbers in a row of tiles, or change(number, i, j, e) in M rows of
   tiles. */
template <int N, typename F> CF_DEVICE void each_sum(float (&c)[N][4], F change) {
    CF_UNROLL
    for (int j = 0; j < N; j++) {
        CF_UNROLL
        for (int e = 0; e < 4; e++) change(c[j][e], j, e);
    }
}

template <int M, int N, typename F> CF_DEVICE void each_sum(float (&c)[M][N][4], F change) {
    CF_UNROLL
    for (int i = 0; i < M; i++) each_sum(c[i], [&](float &x, int j, int e) { change(x, i, j, e); });
}

template <int M, int N> CF_DEVICE void clear(float (&c)[M][N][4]) {
    each_sum(c, [](float &x, int, int, int) { x = 0.0f; });
}

/* Computes one k step of all m tiles and of n tiles 2 j and 2 j + 1, whose fragments are in b. */
template <typename T, int M, int N>
CF_DEVICE void multiply_pair(float (&c)[M][N][4], int j, const uint32_t (&a)[M][4], const uint32_t (&b)[4]) {
    const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        mma_16x8x16<T>(c[i][2 * j], a[i], low);
        mma_16x8x16<T>(c[i][2 * j + 1], a[i], high);
    }
}

/* c += A B over K steps of 16. load_a(fragment, k, i) loads m tile i of step k, load_b(fragment, k, j) two n tiles. */
template <typename T, int K, int M, int N, typename A, typename B>
CF_DEVICE void multiply_steps(float (&c)[M][N][4], A load_a, B load_b) {
    CF_UNROLL
    for (int k = 0; k < K; k++) {
        uint32_t fa[M][4];
        CF_UNROLL
        for (int i = 0; i < M; i++) load_a(fa[i], k, i);
        CF_UNROLL
        for (int j = 0; j < N / 2; j++) {
            uint32_t fb[4];
            load_b(fb, k, j);
            multiply_pair<T>(c, j, fa, fb);
        }
    }
}

/* Load the fragment at step k, number i of those side by side, of a matrix whose column is k, or whose row is k. */
template <int ROW> CF_DEVICE void load_along(uint32_t (&to)[4], shared_address at, int k, int i) {
    ldmatrix_x4(to, (at ^ (shared_address)(k << 5)) + (shared_address)(i * 16 * ROW));
}

template <int ROW> CF_DEVICE void load_across(uint32_t (&to)[4], shared_address at, int k, int i) {
    ldmatrix_x4_transposed(to, (at ^ (shared_address)(i << 5)) + (shared_address)(k * 16 * ROW));
}

/* c += A B^T, where k is the column of both. a: from lane_as_rows; b: from lane_as_columns. */
template <typename T, int K, int ROW, int M, int N>
CF_DEVICE void multiply_by_transposed(float (&c)[M][N][4], shared_address a, shared_address b) {
    multiply_steps<T, K>(c, [&](uint32_t (&to)[4], int k, int i) { load_along<ROW>(to, a, k, i); },
                         [&](uint32_t (&to)[4], int k, int j) { load_along<ROW>(to, b, k, j); });
}

/* c += A^T B, where k is the row of both. a: from lane_as_columns; b: from lane_as_rows. */
template <typename T, int K, int ROW_A, int ROW_B, int M, int N>
CF_DEVICE void multiply_transposed(float (&c)[M][N][4], shared_address a, shared_address b) {
    multiply_steps<T, K>(c, [&](uint32_t (&to)[4], int k, int i) { load_across<ROW_A>(to, a, k, i); },
                         [&](uint32_t (&to)[4], int k, int j) { load_across<ROW_B>(to, b, k, j); });
}

/* c += A B, where k is the column of A and the row of B. a, b: from lane_as_rows. */
template <typename T, int K, int ROW_A, int ROW_B, int M, int N>
CF_DEVICE void multiply(float (&c)[M][N][4], shared_address a, shared_address b) {
    multiply_steps<T, K>(c, [&](uint32_t (&to)[4], int k, int i) { load_along<ROW_A>(to, a, k, i); },
                         [&](uint32_t (&to)[4], int k, int j) { load_across<ROW_B>(to, b, k, j); });
}

/* Sums of two neighbouring column tiles, rounded to T, are an A operand of one step of 16. */
template <typename T> CF_DEVICE void pack_pair(uint32_t (&to)[4], const float (&low)[4], const float (&high)[4]) {
    CF_UNROLL
    for (int e = 0; e < 4; e++) {
        const float(&pair)[4] = e < 2 ? low : high;
        to[e] = pack<T>(pair[e % 2 * 2], pair[e % 2 * 2 + 1]);
    }
}

template <typename T, int K, int M> CF_DEVICE void pack_tiles(uint32_t (&to)[K][M][4], const float (&p)[M][2 * K][4]) {
    CF_UNROLL
    for (int i = 0; i < K * M; i++) pack_pair<T>(to[i / M][i % M], p[i % M][i / M * 2], p[i % M][i / M * 2 + 1]);
}

/* c += P B, where P is packed and k is the row of B. b: from lane_as_rows. */
template <typename T, int ROW, int M, int K, int N>
CF_DEVICE void multiply_packed(float (&c)[M][N][4], const uint32_t (&p)[K][M][4], shared_address b) {
    multiply_steps<T, K>(c, [&](uint32_t (&to)[4], int k, int i) { memcpy(to, p[k][i], sizeof to); },
                         [&](uint32_t (&to)[4], int k, int j) { load_across<ROW>(to, b, k, j); });
}

/* Returns the address of a thread's first row and unit among the rows of a head, from row `first` on. The thread moves
   this pointer from tile to tile. That takes fewer registers than the tile's address and the thread's place in it. */
template <int HEAD, int THREADS> CF_DEVICE const char *thread_rows(const view &of, int64_t first, int head) {
    const int UNITS = HEAD / 8;
    return of.data + (first * of.row + head * of.head) * 2 + (int)threadIdx.x / UNITS * (of.row * 2) +
           (int)threadIdx.x % UNITS * 16;
}

/* Returns the address of a unit that is `steps` x STEP rows after the one at `first`. */
template <int ROW, int STEP> CF_DEVICE shared_address steps_on(shared_address first, int steps) {
    static_assert(STEP % 4 == 0, "other steps change more of a unit's place");
    const shared_address at = first + (shared_address)(steps * STEP * ROW);
    return STEP % 8 == 0 ? at : at ^ (shared_address)(steps % 2 << 6);
}

/* Starts the copy of ROWS rows of one head. Rows from n_rows on and units from n_units on become zeros. Nothing is
   read there, because that memory may belong to another document. */
template <int ROWS, int HEAD, int THREADS>
CF_DEVICE void load_rows(shared_address to, const char *thread_first, int64_t row_bytes, int n_rows, int n_units) {
    const int UNITS = HEAD / 8, STEP = THREADS / UNITS;
    const int unit = (int)threadIdx.x % UNITS, row = (int)threadIdx.x / UNITS;
    to = unit_address<2 * HEAD>(to, row, unit);
    if (unit >= n_units) n_rows = 0;
    CF_UNROLL
    for (int i = 0; i < ROWS / STEP; i++) {
        copy_async_16(steps_on<2 * HEAD, STEP>(to, i), thread_first, row + i * STEP < n_rows);
        thread_first += STEP * row_bytes;
    }
}

/* Starts the copy of packed rows of a key head, from first_row on: row = token x group + head. Rows outside [begin,
   end) become zeros; their addresses may be invalid, since a copy of no bytes reads nothing. */
template <int ROWS, int HEAD, int THREADS>
CF_DEVICE void load_packed_rows(shared_address to, const view &from, int64_t first_token, int head,
                                const divisor &group, int first_row, int begin, int end, int n_units) {
    const int UNITS = HEAD / 8, STEP = THREADS / UNITS;
    const char *const first = from.data + (first_token * from.row + head * group.by * from.head) * 2;
    const int64_t token_bytes = from.row * 2, head_bytes = from.head * 2;
    const int unit = (int)threadIdx.x % UNITS, row = (int)threadIdx.x / UNITS;
    to = unit_address<2 * HEAD>(to, row, unit);
    if (unit >= n_units) end = 0;
    CF_UNROLL
    for (int i = 0; i < ROWS / STEP; i++) {
        const int packed = first_row + row + i * STEP, token = packed / group;
        copy_async_16(steps_on<2 * HEAD, STEP>(to, i),
                      first + token * token_bytes + (packed - token * group.by) * head_bytes + unit * 16,
                      packed >= begin && packed < end);
    }
}

/* The order of the blocks of threads that go through one list of tiles for every key head. Key heads run in sections
   whose arrays stay in the L2 cache together. Within a section, the longest tiles of all its heads come first. */
struct work_order {
    const tile *tiles;
    int64_t n_blocks;
    int32_t n_whole;       /* full sections; a last one may have fewer heads */
    divisor section_blocks; /* of a whole section */
    divisor heads, last_heads;
};

inline work_order order_work(const tile *tiles, int64_t n_tiles, int64_t n_heads, int64_t section) {
    work_order w = {};
    w.tiles = tiles;
    w.n_blocks = n_tiles * n_heads;
    w.n_whole = (int32_t)(n_heads / section);
    w.section_blocks = make_divisor((int32_t)std::max<int64_t>(1, std::min<int64_t>(n_tiles * section, INT32_MAX)));
    w.heads = make_divisor((int32_t)section);
    w.last_heads = make_divisor((int32_t)std::max<int64_t>(1, n_heads % section));
    return w;
}

/* Returns the tile at a place of the order, and its key head. */
CF_DEVICE tile find_work(const work_order &w, int32_t at, int *head) {
    const int32_t section = at / w.section_blocks;
    const int32_t rest = at - section * w.section_blocks.by;
    const bool whole = section < w.n_whole;
    const int32_t place = whole ? rest / w.heads : rest / w.last_heads;
    *head = section * w.heads.by + rest - place * (whole ? w.heads.by : w.last_heads.by);
    return w.tiles[place];
}

/* Returns the tile of a block of threads. A kernel that is short of registers asks again after its loop, so that no
   register holds what only its end needs. */
CF_DEVICE tile find_work(const work_order &w, int *head) { return find_work(w, compute_here((int)blockIdx.x), head); }

/* Replaces each s by cap x tanh(s x scale / cap). */
template <int M, int N> CF_DEVICE void cap_scores(float (&s)[M][N][4], float scale_by_cap, float cap) {
    each_sum(s, [&](float &x, int, int, int) { x = cap * tanh_fast(x * scale_by_cap); });
}

/* Hides scores of keys that their row does not see. A lane holds rows of a warp's tile, from packed row first_row on;
   its first column is key first_key. Bounds are counted from there, so that columns are constants and take no
   registers. */
template <int M, int N>
CF_DEVICE void hide_scores(float (&s)[M][N][4], const mask &m, const tile &t, const divisor &group, int first_row,
                           int first_key) {
    const int lane = (int)threadIdx.x % 32;
    int begin[M][2], end[M][2];
    first_row = compute_here(first_row);
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int token = (first_row + 16 * i + 8 * half + lane / 4) / group;
            begin[i][half] = key_begin(m, t, token);
            end[i][half] = key_end(m, t, token);
        }
    }
    each_sum(s, [&](float &x, int i, int j, int e) {
        const int key = 8 * j + e % 2;
        if (key < begin[i][e / 2] - first_key || key >= end[i][e / 2] - first_key) x = -INFINITY;
    });
}

/* Puts one row (half 0 or 1 of a 16-row tile) of a lane's sums, scaled and rounded, into a tile of shared memory. */
template <typename T, int HEAD, int N>
CF_DEVICE void stage_row(const float (&sums)[N][4], int half, float scale, shared_address rows, int row,
                         int unit = 0) {
    const int lane = (int)threadIdx.x % 32;
    CF_UNROLL
    for (int j = 0; j < N; j++)
        shared_store_4(unit_address<2 * HEAD>(rows, row, unit + j) + (shared_address)(lane % 4 * 4),
                       pack<T>(sums[j][2 * half] * scale, sums[j][2 * half + 1] * scale));
}

/* Copies ROWS rows from shared memory to a packed array, by one warp, 16 bytes a lane. Row 0 of the tile is packed row
   tile_row. Rows from n_rows on are not stored. */
template <int HEAD, int ROWS>
CF_DEVICE void store_rows(const view &to, const divisor &group, int n_units, const tile &t, int head, int tile_row,
                          int n_rows, int warp_row, shared_address rows) {
    const int UNITS = HEAD / 8, STEP = 32 / UNITS;
    const int lane = (int)threadIdx.x % 32, unit = lane % UNITS;
    for (int i = 0; i < ROWS / STEP; i++) {
        const int row = warp_row + i * STEP + lane / UNITS, packed = tile_row + row;
        if (packed >= n_rows || unit >= n_units) continue;
        const int token = packed / group, q_head = (head - token) * group.by + packed;
        global_store_16(to.data + ((t.q_start + token) * to.row + q_head * to.head) * 2 + unit * 16,
                        shared_load_16(unit_address<2 * HEAD>(rows, row, unit)));
    }
}

/* The arrays of a call. */
struct attention_views {
    view q, k, v, out, dout, dq, dk, dv;
};

/* The parameters of the fused kernels. */
struct fused_params : attention_views {
    work_order work;
    float *lse;
    int64_t lse_stride;
    float *stats;               /* backward, by key head and row tile: log2 of each row's sum, then each dout . out */
    float *dq_sums;             /* backward, by key head and row tile: fp32 sums of dQ; NULL: none */
    int64_t n_row_tiles;        /* of one key head */
    float *carried;             /* by key head and carried tile: sums of earlier blocks of keys, laid out like a part's;
                                   of the output, or of a dQ computed by attention_dq_kernel */
    int64_t n_carried;          /* of one key head */
    int32_t carry;              /* CARRY_LOAD, CARRY_STORE, both or 0 */
    float *part_sums;           /* by key head and part of a split tile: fp32 sums of dK, then of dV; or sums of the
                                   output, then each thread's softmax */
    int64_t n_parts;            /* of one key head */
    mask visible;
    float scale;      /* of the dot products */
    float scale_log2; /* of scores in exponents of 2: scale x log2(e), or log2(e) after a softcap */
    float cap, scale_by_cap, inverse_cap;  /* 0: no softcap */
    int32_t n_units; /* head size / 8 */
    divisor group;
    int32_t row_tile, row_tokens, row_rows, forward_rows; /* as in problem */
    int64_t q_tile, dout_tile;              /* bytes from row tile to row tile */
    int32_t sums_of_tile;                   /* numbers of dq_sums that attention_stats_kernel clears for each */
    int32_t overwrite;
    cf_dtype type; /* for kernels without it among their template's parameters */
};

/* Bits of `carry`, for attention by blocks of keys. The chunk's own keys store sums, each block of the prefix loads and
   stores them. The last call loads them and puts the results into the caller's arrays. 0: nothing is carried. */
const int CARRY_LOAD = 1, CARRY_STORE = 2;

/* Returns where the two numbers of each row of a row tile lie. */
CF_DEVICE float *tile_stats(const fused_params &p, int head, int64_t place) {
    return p.stats + (head * p.n_row_tiles + place) * (2 * p.row_tile);
}

template <int ROWS, int HEAD> CF_DEVICE float *tile_sums(const fused_params &p, int head, int64_t place) {
    return p.dq_sums + (head * p.n_row_tiles + place) * (ROWS * HEAD);
}

/* Returns the sums of a carried row tile or dQ tile. */
template <int ROWS, int HEAD> CF_DEVICE float *carried_sums(const fused_params &p, int head, int64_t place) {
    return p.carried + (head * p.n_carried + place) * (ROWS * HEAD);
}

/* Stores a block's sums into the workspace, as its threads hold them. */
template <int THREADS, int M, int N> CF_DEVICE void store_part(const float (&sums)[M][N][4], float *part, int thread) {
    CF_UNROLL
    for (int i = 0; i < M * N; i++) {
        uint4 bits;
        memcpy(&bits, sums[i / N][i % N], 16);
        global_store_16(part + (i * THREADS + thread) * 4, bits);
    }
}

template <int THREADS, int M, int N> CF_DEVICE void load_part(float (&sums)[M][N][4], const float *part, int thread) {
    CF_UNROLL
    for (int i = 0; i < M * N; i++) {
        const uint4 bits = global_load_16(part + (i * THREADS + thread) * 4);
        memcpy(sums[i / N][i % N], &bits, 16);
    }
}

/* ================================================================================================================
   >>forward
   ================================================================================================================ */

const int FORWARD_THREADS = 128;

/* Threads of a forward block. Head size 256 has more sums, which two threads share. */
template <int HEAD> constexpr int FORWARD_THREADS_OF = HEAD == 256 ? 2 * FORWARD_THREADS : FORWARD_THREADS;

template <int HEAD> struct forward_layout { /* of shared memory, in bytes */
    static const int Q = 0, K = FORWARD_ROWS * HEAD * 2, V = K + 2 * FORWARD_KEYS * HEAD * 2;
    static const int BYTES = V + FORWARD_KEYS * HEAD * 2;
};

/* The running softmax of the rows that a lane holds: the greatest score, and the lane's part of the sum of
   exponentials. */
template <int M> struct running { float top[M][2], sum[M][2]; };

template <int M> CF_DEVICE void clear(running<M> &r) {
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        r.top[i][0] = r.top[i][1] = -INFINITY;
        r.sum[i][0] = r.sum[i][1] = 0.0f;
    }
}

/* Returns the factor that changes results relative to the score `before` into results relative to `top`. It is exactly
   1 if the two are equal, so that such rows need no scaling. base: top x scale_log2, rounded. */
CF_DEVICE float shrink_to(float top, float base, float before, float scale_log2) {
    return before == top ? 1.0f : exp2_fast(fmaf(before, scale_log2, -base));
}

/* Turns one row (half 0 or 1) of scores into exponentials relative to the greatest score so far. Returns the factor for
   earlier results. */
template <int N>
CF_DEVICE float soften_row(float (&s)[N][4], int half, float &row_top, float &row_sum, float scale_log2) {
    float top = row_top;
    CF_UNROLL
    for (int j = 0; j < N; j++) top = fmaxf(top, fmaxf(s[j][2 * half], s[j][2 * half + 1]));
    top = quad_max(top);
    /* A row that has seen nothing yet has top = -inf; any finite base gives it exponentials of 0. */
    const float base = top == -INFINITY ? 0.0f : __fmul_rn(top, scale_log2);
    const float shrink = shrink_to(top, base, row_top, scale_log2);
    row_top = top;
    row_sum = __fmul_rn(row_sum, shrink);
    CF_UNROLL
    for (int j = 0; j < N; j++) {
        CF_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; e++) {
            s[j][e] = exp2_fast(fmaf(s[j][e], scale_log2, -base));
            row_sum += s[j][e];
        }
    }
    return shrink;
}

/* Turns scores into exponentials. `shrink` becomes the factor of earlier results. Returns whether any factor of the
   warp differs from 1. */
template <int M, int N>
CF_DEVICE bool soften(float (&s)[M][N][4], float (&shrink)[M][2], running<M> &r, float scale_log2) {
    bool any = false;
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            shrink[i][half] = soften_row(s[i], half, r.top[i][half], r.sum[i][half], scale_log2);
            any = any || shrink[i][half] != 1.0f;
        }
    }
    return __ballot_sync(0xFFFFFFFFu, any) != 0;
}

template <int M, int N> CF_DEVICE void scale_rows(float (&o)[M][N][4], const float (&by)[M][2]) {
    each_sum(o, [&](float &x, int i, int, int e) { x *= by[i][e / 2]; });
}

/* Divides by the sums, writes LSE, and stores the rows through shared memory, where each warp has its own rows. Row 0
   is packed row first_row. Rows from n_rows on are not stored. */
template <typename T, int HEAD, int M, int O>
CF_DEVICE void finish_rows(float (&o)[M][O][4], running<M> &r, const fused_params &p, const tile &t, int head,
                           int first_row, int n_rows, int warp_row, shared_address rows) {
    const int lane = (int)threadIdx.x % 32;
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = warp_row + 16 * i + 8 * half + lane / 4, packed = first_row + row;
            const float sum = quad_sum(r.sum[i][half]);
            stage_row<T, HEAD>(o[i], half, sum == 0.0f ? 0.0f : 1.0f / sum, rows, row); /* a NaN stays NaN */
            if (p.lse != NULL && lane % 4 == 0 && packed < n_rows) {
                const int token = packed / p.group, q_head = (head - token) * p.group.by + packed;
                p.lse[q_head * p.lse_stride + t.q_start + token] =
                    sum == 0.0f ? -INFINITY : fmaf(r.top[i][half], p.scale_log2 * LN_2, logf(sum));
            }
        }
    }
    __syncwarp();
    store_rows<HEAD, 16 * M>(p.out, p.group, p.n_units, t, head, first_row, n_rows, warp_row, rows);
}

/* Size of a forward part's sums in the workspace: the output, then each thread's greatest scores and sums of
   exponentials. */
template <int HEAD> struct forward_part_size { static const int FLOATS = FORWARD_ROWS * HEAD + 8 * FORWARD_THREADS; };

template <int HEAD> CF_DEVICE float *forward_part(const fused_params &p, int head, int part) {
    return p.part_sums + (head * p.n_parts + part) * forward_part_size<HEAD>::FLOATS;
}

/* Stores the sums of a forward tile as a part's. */
template <int HEAD, int THREADS, int M>
CF_DEVICE void store_sums(const float (&o)[M][HEAD / 8][4], const running<M> &r, float *to, int thread) {
    float softmax[1][M][4];
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int at = 2 * i + half, sum_at = at + 2 * M;
            softmax[0][at / 4][at % 4] = r.top[i][half];
            softmax[0][sum_at / 4][sum_at % 4] = r.sum[i][half];
        }
    }
    store_part<THREADS>(o, to, thread);
    store_part<THREADS>(softmax, to + FORWARD_ROWS * HEAD, thread);
}

/* Returns the sums of a carried tile, as earlier blocks of keys left them. */
template <int HEAD> CF_DEVICE float *carried_part(const fused_params &p, int head, int carried) {
    return p.carried + (head * p.n_carried + carried - 1) * forward_part_size<HEAD>::FLOATS;
}

/* One block computes 128 packed rows of one key head against all keys that they see, last keys first. For a part of a
   split tile it takes some of these keys; attention_combine_kernel joins parts. Four warps have 32 rows each, so that a
   K or V fragment from shared memory serves two products (head size 256: eight warps of 16). K has two stages and V
   one: while the scores of keys n are computed, V of n and K of n - 1 arrive.

       head size   shared memory   blocks a processor
       64          40 KB           four by memory, three by registers (168)
       128         80 KB           two on sm_80 (164 KB), one where a block has 99 KB; up to 255 registers
       256         160 KB          one; up to 255 registers
   */
template <typename T, int HEAD>
__global__ void __launch_bounds__(FORWARD_THREADS_OF<HEAD>, HEAD == 256 ? 1 : HEAD == 128 ? 2 : 3)
    attention_forward_kernel(const __grid_constant__ fused_params p) {
    const int THREADS = FORWARD_THREADS_OF<HEAD>, M = 2 * FORWARD_THREADS / THREADS;
    const int KEYS = FORWARD_KEYS, ROW = 2 * HEAD, STAGE = KEYS * ROW;
    typedef forward_layout<HEAD> layout;
    int head;
    const tile t = find_work(p.work, &head);
    const int warp_row = (int)threadIdx.x / 32 * (16 * M);
    const int first_row = t.block * FORWARD_ROWS, n_rows = t.q_length * p.group.by;
    const int last_row = lesser(n_rows, first_row + FORWARD_ROWS) - 1;
    const shared_address start = shared_start(), q = start + layout::Q, k = start + layout::K, v = start + layout::V;

    /* Key blocks first .. end - 1. Every row sees those from full_begin to full_end - 1 whole. */
    const int first_token = first_row / p.group, last_token = last_row / p.group, first = t.begin, end = t.end;
    const int full_end = key_end(p.visible, t, first_token) / KEYS;
    const int full_begin = (key_begin(p.visible, t, last_token) + KEYS - 1) / KEYS;

    const int64_t last_key = t.k_start + (int64_t)(end - 1) * KEYS;
    const char *k_from = thread_rows<HEAD, THREADS>(p.k, last_key, head);
    const char *v_from = thread_rows<HEAD, THREADS>(p.v, last_key, head);

    float o[M][HEAD / 8][4];
    running<M> r;
    clear(o);
    clear(r);
    if (first < end) {
        load_packed_rows<FORWARD_ROWS, HEAD, THREADS>(q, p.q, t.q_start, head, p.group, first_row, 0, n_rows,
                                                      p.n_units);
        load_rows<KEYS, HEAD, THREADS>(k, k_from, p.k.row * 2, t.k_length - (end - 1) * KEYS, p.n_units);
        copy_async_commit();
    }
    for (int n = end - 1, stage = 0; n >= first; n--, stage ^= 1) {
        copy_async_wait<0>(); /* K of n has arrived, and ... */
        __syncthreads();      /* ... all warps are done with V and K of n + 1 */
        load_rows<KEYS, HEAD, THREADS>(v, v_from, p.v.row * 2, t.k_length - n * KEYS, p.n_units);
        copy_async_commit();
        k_from -= KEYS * p.k.row * 2;
        v_from -= KEYS * p.v.row * 2;
        if (n > first)
            load_rows<KEYS, HEAD, THREADS>(k + (shared_address)((stage ^ 1) * STAGE), k_from, p.k.row * 2, KEYS,
                                           p.n_units);
        copy_async_commit();

        float s[M][KEYS / 8][4];
        clear(s);
        /* With head size 64, registers are too few to keep a lane's addresses and columns. They are computed again in
           each step, from a number that ptxas cannot move out of the loop. */
        const int thread = HEAD == 64 ? compute_here((int)threadIdx.x) : (int)threadIdx.x;
        multiply_by_transposed<T, HEAD / 16, ROW>(
            s, lane_as_rows<ROW>(q, thread / 32 * (16 * M), 0, thread),
            lane_as_columns<ROW>(k + (shared_address)(stage * STAGE), 0, 0, thread));
        if (p.cap != 0.0f) cap_scores(s, p.scale_by_cap, p.cap);
        if (n >= full_end || n < full_begin) {
            const int again = compute_here((int)threadIdx.x), here = again / 32 * (16 * M);
            int unused; /* likewise for the tile */
            hide_scores(s, p.visible, HEAD == 64 ? find_work(p.work, &unused) : t, p.group, first_row + here,
                        n * KEYS + again % 4 * 2);
        }
        /* After the first blocks of keys few rows meet a greater score. The branch also ends a block of code: without
           it ptxas mixes exponentials into the products that follow, and runs out of registers. */
        float shrink[M][2];
        uint32_t probs[KEYS / 16][M][4];
        const bool shrinks = soften(s, shrink, r, p.scale_log2);
        pack_tiles<T>(probs, s);
        if (shrinks) scale_rows(o, shrink);
        copy_async_wait<1>(); /* V of n has arrived; K of n - 1 may still be on its way */
        __syncthreads();
        multiply_packed<T, ROW>(o, probs, lane_as_rows<ROW>(v, 0, 0));
    }
    const tile done = HEAD == 64 ? find_work(p.work, &head) : t;
    if (done.part >= 0) {
        store_sums<HEAD, THREADS>(o, r, forward_part<HEAD>(p, head, done.part), (int)threadIdx.x);
        return;
    }
    /* From here on each warp uses its own rows of Q only. */
    finish_rows<T, HEAD>(o, r, p, done, head, done.block * FORWARD_ROWS, done.q_length * p.group.by, warp_row, q);
}

/* Adds a part of a forward tile to the sums so far, both scaled to the greater of their greatest scores. Threads hold
   what they held in the kernel that computed the part. The branch ends a block of code: without it ptxas loads a whole
   part at once, for which head size 128 has too few registers. */
template <int HEAD, int THREADS, int M>
CF_DEVICE void join_part(float (&o)[M][HEAD / 8][4], running<M> &r, const float *from, float scale_log2, int thread) {
    float softmax[1][M][4]; /* greatest scores of all rows, then sums */
    load_part<THREADS>(softmax, from + FORWARD_ROWS * HEAD, thread);
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        float keep[2], add[2], x[1][HEAD / 8][4];
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int at = 2 * i + half, sum_at = at + 2 * M;
            const float its_top = softmax[0][at / 4][at % 4], top = fmaxf(r.top[i][half], its_top);
            const float base = top == -INFINITY ? 0.0f : __fmul_rn(top, scale_log2); /* as in soften_row */
            keep[half] = shrink_to(top, base, r.top[i][half], scale_log2);
            add[half] = shrink_to(top, base, its_top, scale_log2);
            r.top[i][half] = top;
            r.sum[i][half] = fmaf(softmax[0][sum_at / 4][sum_at % 4], add[half], __fmul_rn(r.sum[i][half], keep[half]));
        }
        if (__ballot_sync(0xFFFFFFFFu, keep[0] != 1.0f || keep[1] != 1.0f) != 0)
            each_sum(o[i], [&](float &sum, int, int e) { sum *= keep[e / 2]; });
        load_part<THREADS>(x, from + i * HEAD / 2 * THREADS, thread);
        each_sum(o[i], [&](float &sum, int j, int e) { sum = fmaf(x[0][j][e], add[e / 2], sum); });
    }
}

/* Computes the rows of a split forward tile: the outputs of its parts, scaled to the greatest score of all. Parts are
   added in a fixed order; what earlier blocks of keys left comes first. Threads hold what they held in the kernel that
   computed the parts: two tiles of 16 rows after attention_forward_kernel, otherwise one. Code without wgmma leaves out
   what only wgmma's parts need. */
template <int HEAD, int THREADS>
__global__ void __launch_bounds__(THREADS, 256 / THREADS)
    attention_combine_kernel(const __grid_constant__ fused_params p) {
    if constexpr (!CF_HOPPER && THREADS != FORWARD_THREADS_OF<HEAD>) return;
    const int M = 2 * FORWARD_THREADS / THREADS;
    int head;
    const tile t = find_work(p.work, &head);
    const int thread = (int)threadIdx.x, warp_row = thread / 32 * (16 * M);
    const int first_row = t.block * p.forward_rows;
    const int n_rows = lesser(t.q_length * p.group.by, first_row + p.forward_rows);
    const int carry = t.carried > 0 ? p.carry : 0;
    const shared_address rows = shared_start();
    float o[M][HEAD / 8][4];
    running<M> r;
    if (p.carry == CARRY_LOAD && carry == 0) return; /* a slice that had only its own keys, and is done */
    clear(o);
    clear(r);
    /* Part t.begin - 1 stands for what earlier blocks left. The last call has no other part. */
    const int begin = carry & CARRY_LOAD ? t.begin - 1 : t.begin, end = carry == CARRY_LOAD ? t.begin : t.end;
    for (int part = begin; part < end; part++)
        join_part<HEAD, THREADS>(
            o, r, part < t.begin ? carried_part<HEAD>(p, head, t.carried) : forward_part<HEAD>(p, head, part),
            p.scale_log2, thread);
    if (carry & CARRY_STORE) {
        store_sums<HEAD, THREADS>(o, r, carried_part<HEAD>(p, head, t.carried), thread);
        return;
    }
    if (p.type == CF_DTYPE_FP16) finish_rows<__half, HEAD>(o, r, p, t, head, first_row, n_rows, warp_row, rows);
    else finish_rows<__nv_bfloat16, HEAD>(o, r, p, t, head, first_row, n_rows, warp_row, rows);
}

/* ================================================================================================================
   >>hopper    the forward with wgmma and bulk copies, for sm_90a
   ================================================================================================================ */

const int HOPPER_THREADS = 384; /* one warpgroup that loads, by one of its warps, and two that compute */
const int HOPPER_CONSUMERS = 256; /* as many as BACKWARD_THREADS */
const int HALF_TILE = 128 * 64 * 2; /* bytes of 64 columns of 128 rows */

/* The forward runs one persistent block per processor. A block takes the next tile of the list once it has loaded its
   last. So the loads of a tile run under the products of the tile before, and its two warpgroups start their products
   in turn (hopper_wait_for_turn). The second stage of Q is not yet run on a device; by estimate it gains 3 to 14 %,
   most where tiles are short. */

struct hopper_params {
    fused_params fused;
    CUtensorMap q, k, v, dout; /* arrays of (rows, heads, columns), copied in boxes of 64 columns: of whole tokens of a
                                  group, or of keys */
    int *taken;                /* number of tiles that persistent blocks have taken, without each block's first */
};

template <int HEAD> struct hopper_forward_layout { /* of shared memory, in bytes; two stages of Q, of K and of V */
    static const int TILE = HEAD / 64 * HALF_TILE, Q = 0, K = Q + 2 * TILE, V = K + 2 * TILE, BARRIERS = V + 2 * TILE;
    static const int TOLD = BARRIERS + 112; /* two tiles, which hopper_tell tells computing warpgroups */
    static const int BYTES = TOLD + 2 * (int)sizeof(tile);
};

/* Offsets of barriers; those of stage s are 8 s bytes further. A stage is full when its copies have arrived, and empty
   when the eight computing warps are done with it. A tile's stage of Q also takes its output rows, in place of Q. */
enum tile_barrier { K_FULL = 0, K_EMPTY = 16, V_FULL = 32, V_EMPTY = 48, TILE_FULL = 64, TILE_EMPTY = 80, V_TAIL = 96 };

/* Returns the stage of Q of the block's tile number `turn`. */
template <int HEAD> CF_DEVICE shared_address hopper_q(shared_address start, int turn) {
    typedef hopper_forward_layout<HEAD> layout;
    return start + (shared_address)(layout::Q + (turn & 1) * layout::TILE);
}

/* Initialises the barriers of both stages of what bulk copies bring. */
CF_HOPPER_DEVICE void init_stages(shared_address full, shared_address empty) {
    for (int stage = 0; stage < 2; stage++) {
        mbarrier_init(full + (shared_address)(8 * stage), 1);
        mbarrier_init(empty + (shared_address)(8 * stage), HOPPER_CONSUMERS / 32);
    }
}

/* Zeroes rows begin .. end - 1 of a tile of ROWS rows and HEAD columns, by N threads, for wgmma to read. */
template <int ROWS, int HEAD, int N> CF_DEVICE void zero_rows(shared_address tile, int begin, int end, int thread) {
    const int UNITS = HEAD / 8;
    CF_ROLLED
    for (int i = begin * UNITS + thread; i < end * UNITS; i += N)
        shared_store_16(tile + (shared_address)(i % UNITS / 8 * (ROWS * 128) + i / UNITS * 128 + i % 8 * 16),
                        make_uint4(0, 0, 0, 0));
    fence_proxy_async();
}

/* Copies a tile of ROWS rows and HEAD columns: one box for each 64 columns. */
template <int ROWS, int HEAD>
CF_DEVICE void copy_tile(shared_address to, const CUtensorMap *map, int head, int row, shared_address barrier) {
    CF_UNROLL
    for (int i = 0; i < HEAD / 64; i++)
        copy_box(to + (shared_address)(i * ROWS * 128), map, 64 * i, head, row, barrier);
}

/* Puts a tile and its head into shared memory for the computing threads. */
CF_HOPPER_DEVICE void hopper_tell(shared_address to, tile t, int head) {
    uint4 bits[sizeof(tile) / 16];
    t.turn = head;
    memcpy(bits, &t, sizeof t);
    CF_UNROLL
    for (int i = 0; i < (int)sizeof(tile) / 16; i++) shared_store_16(to + (shared_address)(16 * i), bits[i]);
}

CF_HOPPER_DEVICE tile hopper_told(shared_address from, int *head) {
    uint4 bits[sizeof(tile) / 16];
    tile t;
    CF_UNROLL
    for (int i = 0; i < (int)sizeof(tile) / 16; i++) bits[i] = shared_load_16(from + (shared_address)(16 * i));
    memcpy(&t, bits, sizeof t);
    *head = t.turn;
    return t;
}

/* Returns the first row of the i-th block of keys of a tile, counted from its last block. */
CF_HOPPER_DEVICE int key_block_row(const tile &t, int i) { return t.k_start + (t.end - 1 - i) * HOPPER_KEYS; }

/* Takes the next tile of the list that no persistent block has taken. */
CF_HOPPER_DEVICE int hopper_take_work(const hopper_params &p) {
    int taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(p.taken, 1);
    return (int)gridDim.x + __shfl_sync(0xFFFFFFFFu, taken, 0);
}

/* Loads Q of the block's tile number `turn`, and tells the computing threads which tile it is; head -1: there are no
   more. */
template <int HEAD>
CF_HOPPER_DEVICE void hopper_load_q(const hopper_params &p, tile t, int head, shared_address start, int turn) {
    typedef hopper_forward_layout<HEAD> layout;
    const int rows = p.fused.forward_rows, bytes = head >= 0 && t.begin < t.end ? rows * HEAD * 2 : 0, stage = turn & 1;
    const shared_address barriers = start + layout::BARRIERS + (shared_address)(8 * stage);
    if (threadIdx.x % 32 != 0) return;
    mbarrier_wait(barriers + TILE_EMPTY, (turn >> 1 & 1) ^ 1);
    hopper_tell(start + (shared_address)(layout::TOLD + stage * (int)sizeof(tile)), t, head);
    mbarrier_arrive_expect(barriers + TILE_FULL, bytes);
    if (bytes > 0)
        copy_tile<128, HEAD>(hopper_q<HEAD>(start, turn), &p.q, head * p.fused.group.by,
                             t.q_start + t.block * (rows / p.fused.group), barriers + TILE_FULL);
}

/* Loads K or V of the i-th block of keys of a tile; `at` counts them over all tiles of this block of threads. */
template <int HEAD>
CF_HOPPER_DEVICE void hopper_load_k(const hopper_params &p, const tile &t, int head, shared_address start, int i,
                                    int at) {
    typedef hopper_forward_layout<HEAD> layout;
    const int stage = at & 1;
    const shared_address barriers = start + layout::BARRIERS + (shared_address)(8 * stage);
    const shared_address to = start + (shared_address)(layout::K + stage * layout::TILE);
    if (threadIdx.x % 32 != 0) return;
    mbarrier_wait(barriers + K_EMPTY, (at >> 1 & 1) ^ 1);
    mbarrier_arrive_expect(barriers + K_FULL, layout::TILE);
    copy_tile<128, HEAD>(to, &p.k, head, key_block_row(t, i), barriers + K_FULL);
}

/* Waits for a copy of which some rows are to become zeros. `tails` counts these waits. */
CF_HOPPER_DEVICE void wait_for_tail(shared_address landed, int &tails) {
    __syncwarp();
    mbarrier_wait(landed, tails++ & 1);
}

/* Zeroes the rows of V behind the last key, if the last block of keys is not full. That memory may belong to another
   document, and 0 x NaN is NaN. (Scores of such keys are overwritten, so K needs none of this.) */
template <int HEAD>
CF_HOPPER_DEVICE void hopper_load_v(const hopper_params &p, const tile &t, int head, shared_address start, int i,
                                    int at, int &tails) {
    typedef hopper_forward_layout<HEAD> layout;
    const int lane = (int)threadIdx.x % 32, stage = at & 1, valid = t.k_length - (t.end - 1) * HOPPER_KEYS;
    const bool part = i == 0 && valid < HOPPER_KEYS;
    const shared_address barriers = start + layout::BARRIERS + (shared_address)(8 * stage);
    const shared_address landed = part ? start + layout::BARRIERS + V_TAIL : barriers + V_FULL;
    const shared_address to = start + (shared_address)(layout::V + stage * layout::TILE);
    if (lane == 0) {
        mbarrier_wait(barriers + V_EMPTY, (at >> 1 & 1) ^ 1);
        mbarrier_arrive_expect(landed, layout::TILE);
        copy_tile<128, HEAD>(to, &p.v, head, key_block_row(t, i), landed);
    }
    if (!part) return;
    wait_for_tail(landed, tails);
    zero_rows<128, HEAD, 32>(to, valid, 128, lane);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers + V_FULL);
}

/* Loads all that a block needs, by one warp, from its first tile on. The first lane waits and copies; the others only
   help to zero rows. K is loaded one block of keys ahead of V. A tile's first K is loaded before there is room for its
   Q. */
template <int HEAD> CF_HOPPER_DEVICE void hopper_forward_loads(const hopper_params &p, shared_address start) {
    int turn = 0, tails = 0, head;
    tile t = find_work(p.fused.work, &head);
    for (int at = 0; head >= 0; turn++) {
        const int n = t.end - t.begin;
        if (n > 0) hopper_load_k<HEAD>(p, t, head, start, 0, at);
        hopper_load_q<HEAD>(p, t, head, start, turn);
        for (int i = 0; i < n; i++, at++) {
            if (i + 1 < n) hopper_load_k<HEAD>(p, t, head, start, i + 1, at + 1);
            hopper_load_v<HEAD>(p, t, head, start, i, at, tails);
        }
        const int work = hopper_take_work(p);
        if (work < p.fused.work.n_blocks) t = find_work(p.fused.work, work, &head);
        else head = -1;
    }
    hopper_load_q<HEAD>(p, t, -1, start, turn);
}

/* c = A B^T, or c += A B^T if `add`. Rows of both operands have HEAD columns, the k of the product. A_BLOCK and B_BLOCK
   are the bytes from one block of 64 columns to the next. */
template <typename T, int HEAD, int A_BLOCK, int B_BLOCK, int N>
CF_DEVICE void hopper_multiply(float (&c)[N][4], uint64_t a, uint64_t b, bool add) {
    hold_registers(c);
    wgmma_fence();
    CF_UNROLL
    for (int i = 0; i < HEAD / 16; i++)
        wgmma_shared<T, false, false>(c, matrix_step(a, i / 4 * A_BLOCK + i % 4 * 32),
                                      matrix_step(b, i / 4 * B_BLOCK + i % 4 * 32), add || i > 0);
    wgmma_commit();
}

/* o += P V, with P in registers. */
template <typename T, int N, int K>
CF_DEVICE void hopper_add_values(float (&o)[N][4], const uint32_t (&probs)[K][4], uint64_t v) {
    CF_UNROLL
    for (int i = 0; i < K; i++) wgmma_registers<T, true>(o, probs[i], matrix_step(v, i * 2048), true);
    wgmma_commit();
}

template <typename T, int N> CF_DEVICE void pack_sums(uint32_t (&to)[N][4], const float (&s)[2 * N][4]) {
    CF_UNROLL
    for (int i = 0; i < N; i++) pack_pair<T>(to[i], s[2 * i], s[2 * i + 1]);
}

/* Ping-pong: in each step a warpgroup waits for its turn, starts its products, and gives the turn to the other. So each
   one computes exponentials under the other's products.

   Each of the two has a barrier, at which it waits and the other one arrives. Both take equally many turns, and the
   first warpgroup starts. So the second arrives once before its steps, and not after its last one. */
enum { HOPPER_TURN = 2 }; /* named barriers 2 and 3 */

CF_HOPPER_DEVICE void hopper_wait_for_turn(int consumer) {
    named_barrier<HOPPER_CONSUMERS>(HOPPER_TURN + consumer);
}

CF_HOPPER_DEVICE void hopper_pass_turn(int consumer, bool wanted) {
    if (wanted) named_barrier_arrive<HOPPER_CONSUMERS>(HOPPER_TURN + 1 - consumer);
}

/* The next stage of K or V that a warpgroup uses, and the parity of the wait for it. */
struct hopper_place {
    int stage, parity;
};

/* Turns the scores of a block of keys, from `key` on, into exponentials. `shrink` becomes the factor of earlier
   results. The warp's rows begin with packed row first_row. whole: every row sees all of these keys. */
CF_HOPPER_DEVICE void hopper_soften(float (&s)[1][16][4], float (&shrink)[2], running<1> &r, const fused_params &p,
                                    const tile &t, int first_row, int key, bool whole) {
    if (p.cap != 0.0f) cap_scores(s, p.scale_by_cap, p.cap);
    if (!whole) hide_scores(s, p.visible, t, p.group, first_row, key + (int)threadIdx.x % 4 * 2);
    CF_UNROLL
    for (int half = 0; half < 2; half++)
        shrink[half] = soften_row(s[0], half, r.top[0][half], r.sum[0][half], p.scale_log2);
}

/* Computes a warpgroup's 64 rows of a tile of 128, whose stage of Q starts at `rows`. In each step the product with V
   of one block of keys runs while the scores of the next become exponentials. */
template <typename T, int HEAD>
CF_HOPPER_DEVICE void hopper_forward_rows(const hopper_params &all, const tile &t, int head, shared_address start,
                                          shared_address rows, hopper_place &at) {
    typedef hopper_forward_layout<HEAD> layout;
    const fused_params &p = all.fused;
    const int thread = (int)threadIdx.x - (HOPPER_THREADS - HOPPER_CONSUMERS);
    const int consumer = same_in_warp(thread / 128); /* index of the warpgroup */
    const int group_row = consumer * 64;             /* its first row */
    const int n_blocks = t.end - t.begin, n_rows = lesser(t.q_length * p.group.by, (t.block + 1) * p.forward_rows);
    const bool leader = thread % 32 == 0;
    const shared_address barriers = hold_address(start + layout::BARRIERS);
    const uint64_t q = matrix_at(rows + (shared_address)(group_row * 128));
    const uint64_t k = hold_matrix(matrix_at(start + layout::K));
    const uint64_t v = hold_matrix(matrix_at(start + layout::V, HALF_TILE));
    const int first_row = t.block * p.forward_rows, warp_row = thread / 32 * 16;
    /* All rows of the warpgroup see the keys from here on. */
    const int full_begin = key_begin(p.visible, t, lesser(first_row + group_row + 63, n_rows - 1) / p.group);
    const int full_end = key_end(p.visible, t, lesser(first_row + group_row, n_rows - 1) / p.group);

    float o[1][HEAD / 8][4], s[1][16][4], shrink[2];
    uint32_t probs[8][4];
    running<1> r;
    const auto soften_keys = [&](int key) {
        hopper_soften(s, shrink, r, p, t, first_row + warp_row, key,
                      key >= full_begin && key + HOPPER_KEYS <= full_end);
    };
    clear(o);
    clear(r);
    if (n_blocks > 0) {
        int stage = at.stage, parity = at.parity; /* of the V that is multiplied next */
        mbarrier_wait(barriers + (shared_address)(K_FULL + 8 * stage), parity);
        hopper_multiply<T, HEAD, HALF_TILE, HALF_TILE>(s[0], q, matrix_step(k, stage * layout::TILE), false);
        wgmma_wait<0>();
        hold_registers(s[0]);
        if (leader) mbarrier_arrive(barriers + (shared_address)(K_EMPTY + 8 * stage));
        soften_keys((t.end - 1) * HOPPER_KEYS);
        pack_sums<T>(probs, s[0]);
        hopper_pass_turn(consumer, consumer == 1 && n_blocks > 1);
        for (int key = (t.end - 2) * HOPPER_KEYS; key >= t.begin * HOPPER_KEYS; key -= HOPPER_KEYS) {
            const shared_address here = barriers + (shared_address)(8 * stage);
            const shared_address next = barriers + (shared_address)(8 - 8 * stage);
            mbarrier_wait(next + K_FULL, parity ^ stage);
            hopper_wait_for_turn(consumer);
            hold_registers(o[0]);
            hold_registers(probs);
            hopper_multiply<T, HEAD, HALF_TILE, HALF_TILE>(s[0], q, matrix_step(k, (stage ^ 1) * layout::TILE), false);
            mbarrier_wait(here + V_FULL, parity);
            wgmma_fence();
            hopper_add_values<T>(o[0], probs, matrix_step(v, stage * layout::TILE));
            hopper_pass_turn(consumer, consumer == 0 || key > t.begin * HOPPER_KEYS);
            wgmma_wait<1>();
            hold_registers(s[0]);
            if (leader) mbarrier_arrive(next + K_EMPTY);
            soften_keys(key);
            keep_order();
            wgmma_wait<0>();
            hold_registers(o[0]);
            hold_registers(probs);
            if (leader) mbarrier_arrive(here + V_EMPTY);
            each_sum(o[0], [&](float &x, int, int e) { x *= shrink[e / 2]; });
            pack_sums<T>(probs, s[0]);
            parity ^= stage;
            stage ^= 1;
        }
        mbarrier_wait(barriers + (shared_address)(V_FULL + 8 * stage), parity);
        hold_registers(o[0]);
        hold_registers(probs);
        wgmma_fence();
        hopper_add_values<T>(o[0], probs, matrix_step(v, stage * layout::TILE));
        wgmma_wait<0>();
        hold_registers(o[0]);
        if (leader) mbarrier_arrive(barriers + (shared_address)(V_EMPTY + 8 * stage));
        at.parity = parity ^ stage;
        at.stage = stage ^ 1;
    }
    if (t.part >= 0) {
        store_sums<HEAD, HOPPER_CONSUMERS>(o, r, forward_part<HEAD>(p, head, t.part), thread);
        return;
    }
    named_barrier<1, HOPPER_CONSUMERS>(); /* both warpgroups are done with Q */
    finish_rows<T, HEAD>(o, r, p, t, head, first_row, n_rows, warp_row, rows);
}

/* Computes a warpgroup's share of the block's tiles, as the loading warp tells them. Output rows that it wrote over a Q
   are fenced before another Q is copied there. */
template <typename T, int HEAD>
CF_HOPPER_DEVICE void hopper_forward_tiles(const hopper_params &p, shared_address start) {
    typedef hopper_forward_layout<HEAD> layout;
    hopper_place at = {0, 0};
    for (int turn = 0;; turn++) {
        const int stage = turn & 1;
        const shared_address barriers = start + layout::BARRIERS + (shared_address)(8 * stage);
        int head;
        mbarrier_wait(barriers + TILE_FULL, turn >> 1 & 1);
        const tile t = hopper_told(start + (shared_address)(layout::TOLD + stage * (int)sizeof(tile)), &head);
        if (head < 0) return;
        hopper_forward_rows<T, HEAD>(p, t, head, start, hold_address(hopper_q<HEAD>(start, turn)), at);
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers + TILE_EMPTY);
    }
}

template <typename T, int HEAD> CF_DEVICE void hopper_forward_block(const hopper_params &p) {
    typedef hopper_forward_layout<HEAD> layout;
    const shared_address start = shared_start(), barriers = start + layout::BARRIERS;
    if (threadIdx.x == 0) {
        init_stages(barriers + K_FULL, barriers + K_EMPTY);
        init_stages(barriers + V_FULL, barriers + V_EMPTY);
        init_stages(barriers + TILE_FULL, barriers + TILE_EMPTY);
        mbarrier_init(barriers + V_TAIL, 1);
        fence_mbarrier_init();
    }
    for (int i = 0; i < 2; i++) /* rows that hold no whole token, which no copy reaches */
        zero_rows<128, HEAD, HOPPER_THREADS>(hopper_q<HEAD>(start, i), p.fused.forward_rows, 128, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x < HOPPER_THREADS - HOPPER_CONSUMERS) {
        give_registers_back<40>();
        if (threadIdx.x < 32) hopper_forward_loads<HEAD>(p, start);
    } else {
        take_registers<232>();
        hopper_forward_tiles<T, HEAD>(p, start);
    }
}

/* Each tile has as many whole tokens as 128 packed rows hold, of one key head, against all keys that they see, or a
   part of these. 193 KB of shared memory (head size 64: 97), one block a processor. All threads start with 168
   registers. The loading warpgroup gives most of its own away: it keeps 40, and computing threads get 232. */
template <typename T, int HEAD>
__global__ void __launch_bounds__(CF_HOPPER ? HOPPER_THREADS : 32, 1)
    attention_forward_hopper_kernel(const __grid_constant__ hopper_params p) {
    if constexpr (CF_HOPPER) hopper_forward_block<T, HEAD>(p);
}

/* ================================================================================================================
   >>backward
   ================================================================================================================ */

const int STATS_THREADS = 128;
const int BACKWARD_THREADS = 256;
const int JOIN_THREADS = 2 * BACKWARD_THREADS;

/* True for tiles of devices with 99 KB of shared memory a block. No such device runs code for sm_90a, which therefore
   leaves their kernels empty: they take long to compile. Launch bounds say so (check_code). For tests,
   CHUNKFLOW_CUDA_VARIANTS puts them in. Code without wgmma likewise leaves out what only follows its kernels. */
template <int HEAD, int ROWS, int KEYS>
constexpr bool IS_SMALL = HEAD == 64 ? ROWS == ROW_TILE : HEAD == 128 && KEYS == SMALL_KEY_TILE;
#ifdef CHUNKFLOW_CUDA_VARIANTS
const bool HAS_SMALL = true;
#else
const bool HAS_SMALL = !CF_HOPPER;
#endif

/* Runs before the backward, for each row tile. Computes D = dout . out and log2 of the sum of exponentials of each row,
   in the order of packed rows, and clears the sums of dQ. A row that sees nothing, or is past the slice, gets a sum of
   +inf, so that all its probabilities are 0. Sixteen lanes work on a row. */
template <typename T>
__global__ void __launch_bounds__(STATS_THREADS)
    attention_stats_kernel(const __grid_constant__ fused_params p) {
    int head;
    const tile t = find_work(p.work, &head);
    const int lane = (int)threadIdx.x % 16, n_rows = t.q_length * p.group.by,
              begin = first_seeing(p.visible, t) * p.group.by;
    float *stats = tile_stats(p, head, t.place);
    for (int row = (int)threadIdx.x / 16; row < p.row_tile; row += STATS_THREADS / 16) {
        const int packed = t.block * p.row_rows + row, token = packed / p.group;
        const int q_head = (head - token) * p.group.by + packed;
        const bool seeing = row < p.row_rows && packed >= begin && packed < n_rows;
        const char *out = p.out.data + ((t.q_start + token) * p.out.row + q_head * p.out.head) * 2;
        const char *dout = p.dout.data + ((t.q_start + token) * p.dout.row + q_head * p.dout.head) * 2;
        float dot = 0.0f;
        for (int unit = lane; seeing && unit < p.n_units; unit += 16)
            dot += dot_8<T>(global_load_16(out + unit * 16), global_load_16(dout + unit * 16));
        for (int lanes = 8; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(0xFFFFFFFFu, dot, lanes);
        if (lane == 0) {
            stats[row] = seeing ? p.lse[q_head * p.lse_stride + t.q_start + token] * LOG2_E : INFINITY;
            stats[p.row_tile + row] = dot;
        }
    }
    for (int i = (int)threadIdx.x; i < p.sums_of_tile / 4; i += STATS_THREADS)
        global_store_16(p.dq_sums + (head * p.n_row_tiles + t.place) * p.sums_of_tile + i * 4, make_uint4(0, 0, 0, 0));
}

template <int HEAD, int ROWS, int KEYS, int STAGES> struct backward_layout { /* of shared memory, in bytes */
    static const int KV = KEYS * HEAD * 2, Q_STAGE = ROWS * HEAD * 2, P_ROW = KEYS * 2, STATS_STAGE = 2 * ROWS * 4;
    static const int K = 0, V = K + KV, Q = V + KV, DOUT = Q + STAGES * Q_STAGE, P = DOUT + STAGES * Q_STAGE;
    static const int DS = P + ROWS * P_ROW, STATS = DS + ROWS * P_ROW, OFFSETS = STATS + STAGES * STATS_STAGE;
    static const int BYTES = OFFSETS + ROWS * 8;
};

/* Writes into shared memory where each row of a row tile lies in Q and in dout. Counted from the tile's first token, in
   units of 16 bytes. Tiles have whole tokens, so all tiles share these offsets. No register is left for them. */
template <int ROWS> CF_DEVICE void write_row_offsets(const fused_params &p, shared_address offsets) {
    const int row = (int)threadIdx.x, token = row / p.group, head = row - token * p.group.by;
    if (row >= ROWS) return;
    const int64_t q = token * p.q.row + head * p.q.head, dout = token * p.dout.row + head * p.dout.head;
    shared_store_8(offsets + (shared_address)(row * 8), make_uint2((uint32_t)(q / 8), (uint32_t)(dout / 8)));
}

/* A thread's unit of the first token of the next row tile. The rest is computed again for each tile, because registers
   are scarcer than instructions. */
struct row_tile_cursor {
    const char *q, *dout;
};

template <int HEAD> CF_DEVICE row_tile_cursor first_row_tile(const fused_params &p, const tile &t, int head) {
    const int unit = (int)threadIdx.x % (HEAD / 8);
    const int64_t row = t.q_start + (int64_t)t.begin * p.row_tokens, q_head = head * p.group.by;
    return {p.q.data + (row * p.q.row + q_head * p.q.head) * 2 + unit * 16,
            p.dout.data + (row * p.dout.row + q_head * p.dout.head) * 2 + unit * 16};
}

/* Starts the copies of row tile m of a slice (Q, dout and the two numbers of each row), and moves on to the next tile.
   Rows that see nothing become zeros, so that a NaN in their gradients is not multiplied by a probability of 0. */
template <int ROWS, int HEAD>
CF_DEVICE void load_row_tile(const fused_params &p, const tile &t, int m, row_tile_cursor &at, const float *all_stats,
                             shared_address offsets, shared_address q, shared_address dout, shared_address stats) {
    const int UNITS = HEAD / 8, STEP = BACKWARD_THREADS / UNITS, unit = (int)threadIdx.x % UNITS;
    const int first_row = (int)threadIdx.x / UNITS, first_token = m * p.row_tokens;
    const int begin = (first_seeing(p.visible, t) - first_token) * p.group.by;
    int end = lesser((t.q_length - first_token) * p.group.by, p.row_rows);
    if (unit >= p.n_units) end = 0;
    const shared_address to = unit_address<2 * HEAD>(0, first_row, unit);
    CF_UNROLL
    for (int i = 0; i < ROWS / STEP; i++) {
        const int row = first_row + i * STEP;
        const bool wanted = row >= begin && row < end;
        const uint2 offset = shared_load_8(offsets + (shared_address)(row * 8));
        copy_async_16(q + to + (shared_address)(i * STEP * 2 * HEAD), at.q + offset.x * (uint64_t)16, wanted);
        copy_async_16(dout + to + (shared_address)(i * STEP * 2 * HEAD), at.dout + offset.y * (uint64_t)16, wanted);
    }
    if ((int)threadIdx.x < ROWS / 2)
        copy_async_16(stats + threadIdx.x * 16, all_stats + (int64_t)m * (2 * ROWS) + threadIdx.x * 4, true);
    at.q += p.q_tile;
    at.dout += p.dout_tile;
}

/* Turns scores and dP of some rows into P and dS = P (dP - D), times the slope of the softcap (0 where a key is
   hidden). */
template <int N>
CF_DEVICE void differentiate(float (&s)[N][4], float (&dp)[N][4], int half, float log_sum, float dot, float scale_log2,
                             float inverse_cap) {
    if (inverse_cap != 0.0f) {
        CF_UNROLL
        for (int j = 0; j < N; j++) {
            CF_UNROLL
            for (int e = 2 * half; e < 2 * half + 2; e++) {
                const float bent = s[j][e] * inverse_cap;
                dp[j][e] = bent < -1.0f ? 0.0f : __fmul_rn(dp[j][e] - dot, fmaf(-bent, bent, 1.0f));
            }
        }
        dot = 0.0f;
    }
    CF_UNROLL
    for (int j = 0; j < N; j++) {
        CF_UNROLL
        for (int e = 2 * half; e < 2 * half + 2; e++) {
            s[j][e] = exp2_fast(fmaf(s[j][e], scale_log2, -log_sum));
            dp[j][e] = s[j][e] * (dp[j][e] - dot);
        }
    }
}

/* Adds a warp's sums of dK or dV, scaled, to the caller's accumulator. The tile begins there with first_row. */
template <int M, int N>
CF_DEVICE void update_keys(const float (&sums)[M][N][4], float scale, const view &to, int64_t first_row, int head,
                           int first_key, int n_keys, int first_column, int n_columns, bool overwrite) {
    const int lane = (int)threadIdx.x % 32;
    float *const rows = reinterpret_cast<float *>(to.data) + first_row * to.row + head * to.head;
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int key = first_key + 16 * i + 8 * half + lane / 4;
            if (key >= n_keys) continue;
            float *row = rows + key * to.row;
            CF_UNROLL
            for (int j = 0; j < N; j++) {
                const int column = first_column + 8 * j + lane % 4 * 2;
                global_update_8(row + column, sums[i][j][2 * half] * scale, sums[i][j][2 * half + 1] * scale,
                                overwrite, column < n_columns);
            }
        }
    }
}

/* Returns where a part of a key tile has its sums in the workspace: dK, then dV, as the threads of a block hold
   them. */
template <int HEAD, int KEYS> CF_DEVICE float *part_address(const fused_params &p, int head, int part, int of_v) {
    return p.part_sums + ((head * p.n_parts + part) * 2 + of_v) * (KEYS * HEAD);
}

/* Adds a warp's sums of dK and dV, from `key` and `column` of the block's tile on, to the caller's accumulators; those
   of a part go to the workspace. */
template <int HEAD, int KEYS, int M, int N>
CF_DEVICE void finish_keys(const float (&dk)[M][N][4], const float (&dv)[M][N][4], const fused_params &p, int thread,
                           int key, int column) {
    int head;
    const tile t = find_work(p.work, &head);
    if (t.part >= 0) {
        store_part<BACKWARD_THREADS>(dk, part_address<HEAD, KEYS>(p, head, t.part, 0), thread);
        store_part<BACKWARD_THREADS>(dv, part_address<HEAD, KEYS>(p, head, t.part, 1), thread);
        return;
    }
    const int64_t row = t.k_start + t.block * KEYS;
    const int n_keys = t.k_length - t.block * KEYS;
    update_keys(dk, p.scale, p.dk, row, head, key, n_keys, column, p.n_units * 8, p.overwrite);
    update_keys(dv, 1.0f, p.dv, row, head, key, n_keys, column, p.n_units * 8, p.overwrite);
}

/* One block computes KEYS keys of one key head against all packed rows that see any of them. So dK and dV of a whole
   group of query heads are summed in registers and reach memory once.

   Eight warps. For scores and dQ they split the rows into ROWS / 32 parts, and the keys (or columns) into as many parts
   as that leaves. For dK and dV they split keys and columns 4 x 2. For each row tile: scores and dP, then P and dS go
   through shared memory to the three other products.

   dQ is added to fp32 sums in memory, unless p.dq_sums is NULL; then attention_dq_kernel computes it. A part of a split
   key tile has some of the rows, and leaves its dK and dV to attention_join_kernel.

       head size   rows, keys, stages   shared memory
       128         64, 128, 2           161 KB: one block per SM, up to 255 registers
       128         64, 64, 1            fits the 99 KB parts
       256         64, 64, 1            145 KB
       64          128, 128, 2          163 KB: as much work for each product as head size 128 has
       64          64, 128, 2           98 KB
   */
template <typename T, int HEAD, int ROWS, int KEYS, int STAGES>
__global__ void __launch_bounds__(HAS_SMALL || !IS_SMALL<HEAD, ROWS, KEYS> ? BACKWARD_THREADS : 32, 1)
    attention_backward_kernel(const __grid_constant__ fused_params p) {
    if constexpr (!HAS_SMALL && IS_SMALL<HEAD, ROWS, KEYS>) return;
    typedef backward_layout<HEAD, ROWS, KEYS, STAGES> layout;
    const int ROW = 2 * HEAD, P_ROW = layout::P_ROW, ROW_PARTS = ROWS / 32, OTHER_PARTS = 8 / ROW_PARTS;
    const int SCORE_KEYS = KEYS / OTHER_PARTS, SUM_KEYS = KEYS / 4; /* of a warp's scores, and of its dK and dV */
    const int DQ_COLUMNS = HEAD / OTHER_PARTS;
    int head;
    const tile t = find_work(p.work, &head);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int row_part = warp % ROW_PARTS, other_part = warp / ROW_PARTS; /* of scores: rows, keys; of dQ: rows,
                                                                             columns */
    const int dkv_part = warp % 4, column_part = warp / 4;                /* of dK and dV: keys and columns */
    const int first_key = t.block * KEYS;
    const shared_address start = shared_start(), k = start + layout::K, v = start + layout::V;
    const shared_address probs = start + layout::P, slopes = start + layout::DS, offsets = start + layout::OFFSETS;
    const int first_tile = head * (int)p.n_row_tiles + t.place; /* of the slice, among those of all heads */
    const float *all_stats = p.stats + (int64_t)first_tile * (2 * ROWS);
    row_tile_cursor next = first_row_tile<HEAD>(p, t, head);

    float dk[KEYS / 64][HEAD / 16][4], dv[KEYS / 64][HEAD / 16][4];
    clear(dk);
    clear(dv);
    if (t.begin < t.end) {
        load_rows<KEYS, HEAD, BACKWARD_THREADS>(
            k, thread_rows<HEAD, BACKWARD_THREADS>(p.k, t.k_start + first_key, head), p.k.row * 2,
            t.k_length - first_key, p.n_units);
        load_rows<KEYS, HEAD, BACKWARD_THREADS>(
            v, thread_rows<HEAD, BACKWARD_THREADS>(p.v, t.k_start + first_key, head), p.v.row * 2,
            t.k_length - first_key, p.n_units);
        write_row_offsets<ROWS>(p, offsets);
        __syncthreads();
        load_row_tile<ROWS, HEAD>(p, t, t.begin, next, all_stats, offsets, start + layout::Q, start + layout::DOUT,
                                  start + layout::STATS);
        copy_async_commit();
    }
    for (int m = t.begin, stage = 0; m < t.end; m++, stage ^= STAGES - 1) {
        const shared_address q = start + layout::Q + (shared_address)(stage * layout::Q_STAGE);
        const shared_address dout = start + layout::DOUT + (shared_address)(stage * layout::Q_STAGE);
        const shared_address stats = start + layout::STATS + (shared_address)(stage * layout::STATS_STAGE);
        if (STAGES == 1 && m > t.begin) {
            __syncthreads();
            load_row_tile<ROWS, HEAD>(p, t, m, next, all_stats, offsets, q, dout, stats);
            copy_async_commit();
        }
        copy_async_wait<0>(); /* row tile m has arrived, and ... */
        __syncthreads();      /* ... all warps are done with m - 1 and its P and dS */
        if (STAGES == 2 && m + 1 < t.end) {
            load_row_tile<ROWS, HEAD>(p, t, m + 1, next, all_stats, offsets,
                                      start + layout::Q + (shared_address)((stage ^ 1) * layout::Q_STAGE),
                                      start + layout::DOUT + (shared_address)((stage ^ 1) * layout::Q_STAGE),
                                      start + layout::STATS + (shared_address)((stage ^ 1) * layout::STATS_STAGE));
            copy_async_commit();
        }

        float s[2][SCORE_KEYS / 8][4], dp[2][SCORE_KEYS / 8][4];
        clear(s);
        multiply_by_transposed<T, HEAD / 16, ROW>(s, lane_as_rows<ROW>(q, row_part * 32, 0),
                                                  lane_as_columns<ROW>(k, other_part * SCORE_KEYS, 0));
        if (p.cap != 0.0f) cap_scores(s, p.scale_by_cap, p.cap);
        const int first_token = m * p.row_tokens, past_token = first_token + p.row_tokens;
        if (key_end(p.visible, t, first_token) < first_key + KEYS ||
            key_begin(p.visible, t, lesser(past_token, t.q_length) - 1) > first_key)
            hide_scores(s, p.visible, t, p.group, m * p.row_rows + row_part * 32,
                        first_key + other_part * SCORE_KEYS + lane % 4 * 2);
        clear(dp);
        multiply_by_transposed<T, HEAD / 16, ROW>(dp, lane_as_rows<ROW>(dout, row_part * 32, 0),
                                                  lane_as_columns<ROW>(v, other_part * SCORE_KEYS, 0));
        CF_UNROLL
        for (int i = 0; i < 2; i++) {
            CF_UNROLL
            for (int half = 0; half < 2; half++) {
                const int row = row_part * 32 + 16 * i + 8 * half + lane / 4;
                const float log_sum = shared_load_float(stats + (shared_address)(row * 4));
                const float dot = shared_load_float(stats + (shared_address)((ROWS + row) * 4));
                differentiate(s[i], dp[i], half, log_sum, dot, p.scale_log2, p.inverse_cap);
                stage_row<T, KEYS>(s[i], half, 1.0f, probs, row, other_part * SCORE_KEYS / 8);
                stage_row<T, KEYS>(dp[i], half, 1.0f, slopes, row, other_part * SCORE_KEYS / 8);
            }
        }
        __syncthreads();
        multiply_transposed<T, ROWS / 16, P_ROW, ROW>(dv, lane_as_columns<P_ROW>(probs, 0, dkv_part * SUM_KEYS / 8),
                                                      lane_as_rows<ROW>(dout, 0, column_part * HEAD / 16));
        multiply_transposed<T, ROWS / 16, P_ROW, ROW>(dk, lane_as_columns<P_ROW>(slopes, 0, dkv_part * SUM_KEYS / 8),
                                                      lane_as_rows<ROW>(q, 0, column_part * HEAD / 16));
        if (p.dq_sums != NULL) {
            float dq[2][DQ_COLUMNS / 8][4];
            clear(dq);
            multiply<T, KEYS / 16, P_ROW, ROW>(dq, lane_as_rows<P_ROW>(slopes, row_part * 32, 0),
                                               lane_as_rows<ROW>(k, 0, other_part * DQ_COLUMNS / 8));
            float *sums = p.dq_sums + (int64_t)(first_tile + m) * (ROWS * HEAD);
            CF_UNROLL
            for (int i = 0; i < 2; i++) {
                CF_UNROLL
                for (int j = 0; j < DQ_COLUMNS / 8; j++)
                    global_add_quad(sums, i * (DQ_COLUMNS / 8) + j, (int)threadIdx.x, BACKWARD_THREADS, dq[i][j]);
            }
        }
    }
    const int again = HEAD == 256 ? compute_here((int)threadIdx.x) : (int)threadIdx.x; /* or a register spills */
    finish_keys<HEAD, KEYS>(dk, dv, p, again, again / 32 % 4 * SUM_KEYS, again / 128 * HEAD / 2);
}

/* Computes dK and dV of a split key tile: sums its parts in a fixed order, so that the bits do not depend on which
   block was first. Half of the threads have dK, the others dV, laid out as in the kernel that computed them: a warp has
   M tiles of 16 keys. */
template <int HEAD, int KEYS, int M>
__global__ void __launch_bounds__(JOIN_THREADS, 1) attention_join_kernel(const __grid_constant__ fused_params p) {
    if constexpr ((!CF_HOPPER && M < KEYS / 64) || (!HAS_SMALL && IS_SMALL<HEAD, LARGE_ROW_TILE, KEYS>)) return;
    const int KEY_PARTS = KEYS / (16 * M), COLUMNS = HEAD * KEY_PARTS / 8;
    int head;
    const tile t = find_work(p.work, &head);
    const int of_v = (int)threadIdx.x / BACKWARD_THREADS, thread = (int)threadIdx.x % BACKWARD_THREADS;
    const int warp = thread / 32, key = warp % KEY_PARTS * (16 * M), column = warp / KEY_PARTS * COLUMNS;
    float sums[M][COLUMNS / 8][4];
    clear(sums);
    for (int part = t.begin; part < t.end; part++) {
        float x[M][COLUMNS / 8][4];
        load_part<BACKWARD_THREADS>(x, part_address<HEAD, KEYS>(p, head, part, of_v), thread);
        each_sum(sums, [&](float &sum, int i, int j, int e) { sum += x[i][j][e]; });
    }
    update_keys(sums, of_v ? 1.0f : p.scale, of_v ? p.dv : p.dk, t.k_start + t.block * KEYS, head, key,
                t.k_length - t.block * KEYS, column, p.n_units * 8, p.overwrite);
}

/* Puts the sums of dQ, scaled and rounded, into the caller's array. One block a row tile; threads hold what they held
   in the kernel that computed the sums: a warp has M tiles of 16 rows. */
template <int HEAD, int ROWS, int M>
__global__ void __launch_bounds__(BACKWARD_THREADS) attention_round_dq_kernel(const __grid_constant__ fused_params p) {
    if constexpr ((!CF_HOPPER && M == 1) || (!HAS_SMALL && IS_SMALL<HEAD, ROWS, KEY_TILE>)) return;
    const int ROW_PARTS = ROWS / (16 * M), COLUMNS = HEAD * ROW_PARTS / 8;
    int head;
    const tile t = find_work(p.work, &head);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int row_part = warp % ROW_PARTS, column_part = warp / ROW_PARTS;
    const int first_row = t.block * p.row_rows, n_rows = t.q_length * p.group.by;
    const shared_address rows = shared_start();
    const float *sums = tile_sums<ROWS, HEAD>(p, head, t.place);
    CF_UNROLL
    for (int i = 0; i < M; i++) {
        float dq[COLUMNS / 8][4];
        CF_UNROLL
        for (int j = 0; j < COLUMNS / 8; j++) {
            CF_UNROLL
            for (int e = 0; e < 4; e++)
                dq[j][e] = sums[sum_index(i * (COLUMNS / 8) + j, e, (int)threadIdx.x, BACKWARD_THREADS)];
        }
        CF_UNROLL
        for (int half = 0; half < 2; half++) {
            const int row = row_part * (16 * M) + 16 * i + 8 * half + lane / 4, unit = column_part * COLUMNS / 8;
            if (p.type == CF_DTYPE_FP16) stage_row<__half, HEAD>(dq, half, p.scale, rows, row, unit);
            else stage_row<__nv_bfloat16, HEAD>(dq, half, p.scale, rows, row, unit);
        }
    }
    __syncthreads();
    store_rows<HEAD, ROWS / 8>(p.dq, p.group, p.n_units, t, head, first_row, lesser(n_rows, first_row + p.row_rows),
                               warp * (ROWS / 8), rows);
}

template <int HEAD, int ROWS> struct dq_layout { /* of shared memory, in bytes */
    static const int N_KEYS = HEAD == 256 ? FORWARD_KEYS / 2 : FORWARD_KEYS; /* of a block */
    static const int TILE = ROWS * HEAD * 2, KEYS = N_KEYS * HEAD * 2;
    static const int Q = 0, DOUT = TILE, K = 2 * TILE, V = K + 2 * KEYS, BYTES = V + 2 * KEYS;
};

/* Computes dQ by itself, for the deterministic backward, also after dK and dV by wgmma. One block has a row tile and
   loops over the keys that its rows see, so every sum has one order. Its tiles are not cut into parts. By blocks of
   keys all row tiles are carried. A warp has 16 rows. Head size 128: 96 KB, two blocks on sm_80. Head size 256: 128 KB,
   32 keys at a time; no register is left for what can be computed again.

   To do on a device: replace it by ordered adds in both fused backwards, about 150 lines less.
     - attention_stats_kernel also clears a count for each row tile and key head.
     - Before a block adds its dQ to row tile m, one thread waits until the count is the number of earlier key tiles of
       the slice that m sees. After the adds the threads meet, and that thread fences and raises the count.
     - longer_work lets the key tiles of a slice keep their order. So a block waits only for blocks that were issued
       before it, and none can wait for ever.
   Measure before it is chosen: same bits in 1,000 repeats; no hang beside another kernel that fills the device; TFLOP/s
   of the six shapes of tools/bench/results/h200.txt. By wgmma its deterministic backward of causal-16k-hd128 has 312 of
   433, and FlashAttention-3 loses 17 % to such counts. */
template <typename T, int HEAD, int ROWS>
__global__ void __launch_bounds__(HAS_SMALL || !IS_SMALL<HEAD, ROWS, KEY_TILE> ? 2 * ROWS : 32,
                                  HEAD == 256 ? 1 : 128 / ROWS)
    attention_dq_kernel(const __grid_constant__ fused_params p) {
    if constexpr (!HAS_SMALL && IS_SMALL<HEAD, ROWS, KEY_TILE>) return;
    typedef dq_layout<HEAD, ROWS> layout;
    const int KEYS = layout::N_KEYS, PER = FORWARD_KEYS / KEYS, ROW = 2 * HEAD, THREADS = 2 * ROWS;
    int head;
    const tile t = find_work(p.work, &head);
    const int lane = (int)threadIdx.x % 32, warp_row = (int)threadIdx.x / 32 * 16;
    const int first_row = t.block * p.row_rows, seeing = first_seeing(p.visible, t) * p.group.by;
    const int past_row = lesser(t.q_length * p.group.by, first_row + p.row_rows);
    const shared_address start = shared_start(), q = start + layout::Q, dout = start + layout::DOUT;
    const shared_address k = start + layout::K, v = start + layout::V;
    const int first_token = first_row / p.group, last_token = (past_row - 1) / p.group;
    const int first = t.begin * PER, end = p.carry == CARRY_LOAD ? first : t.end * PER; /* the last call: all keys were
                                                                                           added */
    const int full_end = key_end(p.visible, t, first_token) / KEYS;
    const int full_begin = (key_begin(p.visible, t, last_token) + KEYS - 1) / KEYS;

    const int64_t first_key = t.k_start + (int64_t)first * KEYS;
    const char *k_from = thread_rows<HEAD, THREADS>(p.k, first_key, head);
    const char *v_from = thread_rows<HEAD, THREADS>(p.v, first_key, head);

    float dq[1][HEAD / 8][4], log_sum[2], dot[2];
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const float *stats = tile_stats(p, head, t.place) + warp_row + 8 * half + lane / 4;
        log_sum[half] = stats[0];
        dot[half] = stats[ROWS];
    }
    if (first < end) {
        load_packed_rows<ROWS, HEAD, THREADS>(q, p.q, t.q_start, head, p.group, first_row, seeing, past_row,
                                              p.n_units);
        load_packed_rows<ROWS, HEAD, THREADS>(dout, p.dout, t.q_start, head, p.group, first_row, seeing, past_row,
                                              p.n_units);
    }
    clear(dq);
    if (p.carry & CARRY_LOAD) load_part<THREADS>(dq, carried_sums<ROWS, HEAD>(p, head, t.place), (int)threadIdx.x);
    for (int n = first, stage = 0; n <= end; n++, stage ^= 1) {
        /* While keys n - 1, which have arrived, are used, keys n are copied. */
        copy_async_wait<0>();
        __syncthreads();
        if (n < end) {
            load_rows<KEYS, HEAD, THREADS>(k + (shared_address)(stage * layout::KEYS), k_from, p.k.row * 2,
                                              t.k_length - n * KEYS, p.n_units);
            load_rows<KEYS, HEAD, THREADS>(v + (shared_address)(stage * layout::KEYS), v_from, p.v.row * 2,
                                              t.k_length - n * KEYS, p.n_units);
            copy_async_commit();
            k_from += KEYS * p.k.row * 2;
            v_from += KEYS * p.v.row * 2;
        }
        if (n == first) continue;
        const int here = n - 1;
        const shared_address k_here = k + (shared_address)((stage ^ 1) * layout::KEYS);
        const shared_address v_here = v + (shared_address)((stage ^ 1) * layout::KEYS);
        const int thread = HEAD == 256 ? compute_here((int)threadIdx.x) : (int)threadIdx.x; /* for a lane's addresses */
        float s[1][KEYS / 8][4], dp[1][KEYS / 8][4];
        clear(s);
        multiply_by_transposed<T, HEAD / 16, ROW>(s, lane_as_rows<ROW>(q, thread / 32 * 16, 0, thread),
                                                  lane_as_columns<ROW>(k_here, 0, 0, thread));
        if (p.cap != 0.0f) cap_scores(s, p.scale_by_cap, p.cap);
        if (here >= full_end || here < full_begin)
            hide_scores(s, p.visible, t, p.group, first_row + warp_row, here * KEYS + lane % 4 * 2);
        clear(dp);
        multiply_by_transposed<T, HEAD / 16, ROW>(dp, lane_as_rows<ROW>(dout, thread / 32 * 16, 0, thread),
                                                  lane_as_columns<ROW>(v_here, 0, 0, thread));
        CF_UNROLL
        for (int half = 0; half < 2; half++)
            differentiate(s[0], dp[0], half, log_sum[half], dot[half], p.scale_log2, p.inverse_cap);
        uint32_t packed[KEYS / 16][1][4];
        pack_tiles<T>(packed, dp);
        multiply_packed<T, ROW>(dq, packed, lane_as_rows<ROW>(k_here, 0, 0, thread));
    }
    const tile done = HEAD == 256 ? find_work(p.work, &head) : t;
    const int done_row = done.block * p.row_rows, past_done = lesser(done.q_length * p.group.by, done_row + p.row_rows);
    if (p.carry & CARRY_STORE) {
        store_part<THREADS>(dq, carried_sums<ROWS, HEAD>(p, head, done.place), (int)threadIdx.x);
        return;
    }
    __syncwarp(); /* from here on each warp uses its own rows of Q only */
    CF_UNROLL
    for (int half = 0; half < 2; half++) stage_row<T, HEAD>(dq[0], half, p.scale, q, warp_row + 8 * half + lane / 4);
    __syncwarp();
    store_rows<HEAD, 16>(p.dq, p.group, p.n_units, done, head, done_row, past_done, warp_row, q);
}

/* ================================================================================================================
   >>hopper_backward    the backward with wgmma and bulk copies, for sm_90a
   ================================================================================================================ */

template <int HEAD> struct hopper_backward_layout { /* of shared memory, in bytes; two stages of all but K and V */
    static const int ROWS = HEAD == 64 ? LARGE_ROW_TILE : ROW_TILE, ROW_BLOCK = ROWS * 128; /* 64 columns of them */
    static const int KV = HEAD / 64 * HALF_TILE, Q_STAGE = HEAD / 64 * ROW_BLOCK, DS_STAGE = ROWS / 64 * HALF_TILE;
    static const int STATS_STAGE = 2 * ROWS * 4;
    static const int K = 0, V = K + KV, Q = V + KV, DOUT = Q + 2 * Q_STAGE, DS = DOUT + 2 * Q_STAGE;
    static const int STATS = DS + 2 * DS_STAGE, BARRIERS = STATS + 2 * STATS_STAGE, BYTES = BARRIERS + 128;
};

/* Offsets of barriers, as in the forward; those of stage s are 8 s bytes further. TAIL: a tile of which some rows
   become zeros has arrived. */
enum backward_barrier { KV_FULL = 0, TAIL = 8, Q_FULL = 16, Q_EMPTY = 32, DOUT_FULL = 48, DOUT_EMPTY = 64 };

/* Loads, by one warp, K and V of the key tile, then the row tiles that see any of its keys. Rows that see nothing, and
   keys past the end, may hold a NaN, and 0 x NaN is NaN. They become zeros before the other warps are told. */
template <int HEAD>
CF_DEVICE void hopper_load_rows(const hopper_params &all, const tile &t, int head, shared_address start) {
    typedef hopper_backward_layout<HEAD> layout;
    const fused_params &p = all.fused;
    const int lane = (int)threadIdx.x % 32, n_keys = t.k_length - t.block * KEY_TILE;
    const int tile_bytes = p.row_rows * HEAD * 2;
    const int first_key = t.k_start + t.block * KEY_TILE;
    const shared_address barriers = start + layout::BARRIERS, k = start + layout::K, v = start + layout::V;
    int tails = 0;
    if (lane == 0) {
        const shared_address landed = barriers + (n_keys < KEY_TILE ? TAIL : KV_FULL);
        mbarrier_arrive_expect(landed, 2 * layout::KV);
        copy_tile<128, HEAD>(k, &all.k, head, first_key, landed);
        copy_tile<128, HEAD>(v, &all.v, head, first_key, landed);
    }
    if (n_keys < KEY_TILE) {
        wait_for_tail(barriers + TAIL, tails);
        zero_rows<128, HEAD, 32>(k, n_keys, 128, lane);
        zero_rows<128, HEAD, 32>(v, n_keys, 128, lane);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barriers + KV_FULL);
    }
    for (int m = t.begin; m < t.end; m++) {
        const int stage = (m - t.begin) & 1, empty_parity = ((m - t.begin) >> 1 & 1) ^ 1;
        const int first_token = m * p.row_tokens, first_row = t.q_start + first_token;
        const int begin = -lesser(0, (first_token - first_seeing(p.visible, t)) * p.group.by);
        const int end = lesser((t.q_length - first_token) * p.group.by, p.row_rows);
        const bool part = begin > 0 || end < p.row_rows;
        for (int of_dout = 0; of_dout < 2; of_dout++) {
            const shared_address at = barriers + (shared_address)(8 * stage + (of_dout ? DOUT_FULL : Q_FULL));
            const shared_address landed = part ? barriers + TAIL : at;
            const shared_address to = start + (shared_address)((of_dout ? layout::DOUT : layout::Q) +
                                                               stage * layout::Q_STAGE);
            if (lane == 0) {
                mbarrier_wait(at + (Q_EMPTY - Q_FULL), empty_parity);
                mbarrier_arrive_expect(landed, tile_bytes + (of_dout ? 0 : layout::STATS_STAGE));
                copy_tile<layout::ROWS, HEAD>(to, of_dout ? &all.dout : &all.q, head * p.group.by, first_row, landed);
                if (!of_dout)
                    copy_bulk(start + (shared_address)(layout::STATS + stage * layout::STATS_STAGE),
                              tile_stats(p, head, t.place + m), layout::STATS_STAGE, landed);
            }
            if (!part) continue;
            wait_for_tail(landed, tails);
            zero_rows<layout::ROWS, HEAD, 32>(to, 0, begin, lane);
            zero_rows<layout::ROWS, HEAD, 32>(to, end, p.row_rows, lane);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(at);
        }
    }
}

/* Hides scores (keys by rows) where a row does not see the key. */
template <int N>
CF_DEVICE void hopper_hide_rows(float (&s)[N][4], const mask &m, const tile &t, const divisor &group, int first_key,
                                int first_row) {
    const int lane = (int)threadIdx.x % 32;
    CF_UNROLL
    for (int half = 0; half < 2; half++) {
        const int key = first_key + 8 * half + lane / 4;
        const int begin = token_begin(m, t, key) * group.by - first_row - lane % 4 * 2;
        const int end = key < t.k_length ? token_end(m, t, key) * group.by - first_row - lane % 4 * 2 : 0;
        CF_UNROLL
        for (int j = 0; j < N; j++) {
            CF_UNROLL
            for (int e = 0; e < 2; e++)
                if (8 * j + e < begin || 8 * j + e >= end) s[j][2 * half + e] = -INFINITY;
        }
    }
}

/* Loads the numbers of two neighbouring rows of a row tile. */
CF_HOPPER_DEVICE float2 load_pair(shared_address from) {
    const uint2 bits = shared_load_8(from);
    float2 pair;
    memcpy(&pair, &bits, 8);
    return pair;
}

/* Starts the sums of dP, whose columns are rows of the row tile, with each row's -D. */
template <int N> CF_DEVICE void hopper_start_slopes(float (&dp)[N][4], shared_address dots) {
    CF_UNROLL
    for (int j = 0; j < N; j++) {
        const float2 dot = load_pair(dots + (shared_address)(32 * j));
        dp[j][0] = dp[j][2] = -dot.x;
        dp[j][1] = dp[j][3] = -dot.y;
    }
}

/* Turns scores, whose columns are rows of the row tile, into P. */
template <int N> CF_DEVICE void hopper_exponentiate(float (&s)[N][4], shared_address log_sums, float scale_log2) {
    CF_UNROLL
    for (int j = 0; j < N; j++) {
        const float2 log_sum = load_pair(log_sums + (shared_address)(32 * j));
        CF_UNROLL
        for (int e = 0; e < 4; e++)
            s[j][e] = exp2_fast(fmaf(s[j][e], scale_log2, -(e % 2 ? log_sum.y : log_sum.x)));
    }
}

/* Multiplies dP - D by the slope of the softcap: 0 where a key is hidden. */
template <int N> CF_DEVICE void hopper_bend(float (&dp)[N][4], const float (&s)[N][4], float inverse_cap) {
    each_sum(dp, [&](float &x, int j, int e) {
        const float bent = s[j][e] * inverse_cap;
        x = bent < -1.0f ? 0.0f : x * fmaf(-bent, bent, 1.0f);
    });
}

/* Starts this warpgroup's part of dQ of a row tile, from dS and K of all 128 keys. */
template <typename T, int N>
CF_DEVICE void hopper_multiply_slopes(float (&dq)[N][4], uint64_t slopes, uint64_t k_columns) {
    hold_registers(dq);
    wgmma_fence();
    CF_UNROLL
    for (int i = 0; i < 8; i++)
        wgmma_shared<T, true, true>(dq, matrix_step(slopes, i * 2048), matrix_step(k_columns, i * 2048), i > 0);
    wgmma_commit();
}

/* Adds dQ to its sums. Comes after the wait for its products. */
CF_HOPPER_DEVICE void hopper_add_dq(float *sums, float (&dq)[8][4], int thread) {
    hold_registers(dq);
    CF_UNROLL
    for (int j = 0; j < 8; j++) global_add_quad(sums, j, thread, HOPPER_CONSUMERS, dq[j]);
}

/* Stores a warp's rows of dS, whose columns are rows of a row tile, into shared memory for wgmma. */
template <int K> CF_DEVICE void hopper_store_slopes(const uint32_t (&slopes)[K][4], shared_address to, int thread) {
    /* Key, and unit of rows, as stmatrix_x4 wants them. */
    const int ds_key = thread / 32 * 16 + thread % 16, ds_chunk = thread / 16 % 2;
    to += (shared_address)(ds_key * 128 + ((ds_chunk ^ (ds_key & 7)) << 4));
    CF_UNROLL
    for (int i = 0; i < K; i++)
        stmatrix_x4((to ^ (shared_address)(i % 4 << 5)) + (shared_address)(i / 4 * HALF_TILE), slopes[i]);
    fence_proxy_async();
}

/* Releases a row tile that this warp is done with. */
CF_HOPPER_DEVICE void hopper_release_rows(shared_address stage_barriers, bool leader) {
    __syncwarp();
    if (!leader) return;
    mbarrier_arrive(stage_barriers + DOUT_EMPTY);
    mbarrier_arrive(stage_barriers + Q_EMPTY);
}

/* Computes a warpgroup's 64 keys of a key tile. Keys run along the rows of scores and dP. So P and dS, as they lie in
   registers, are A operands of the products for dV and dK. dQ needs all 128 keys, so dS goes through shared memory.
   Each warpgroup then computes 64 columns of 64 rows of dQ; at head size 64, all columns of its 64 rows of 128. If no
   row of the tile sees a warpgroup's keys, that warpgroup adds only zeros to dQ. */
template <typename T, int HEAD>
CF_DEVICE void hopper_backward_keys(const hopper_params &all, const tile &t, int head, shared_address start) {
    typedef hopper_backward_layout<HEAD> layout;
    const int ROWS = layout::ROWS;
    const fused_params &p = all.fused;
    const int thread = (int)threadIdx.x - (HOPPER_THREADS - HOPPER_CONSUMERS), lane = thread % 32;
    const int group = same_in_warp(thread / 128), warp_key = thread / 32 * 16;
    const int first_key = t.block * KEY_TILE + group * 64;
    const int first_tile = head * (int)p.n_row_tiles + t.place; /* of the slice, among those of all heads */
    const bool leader = lane == 0, with_dq = p.dq_sums != NULL;
    const shared_address barriers = start + layout::BARRIERS;
    const uint64_t k = hold_matrix(matrix_at(start + layout::K + (shared_address)(group * 64 * 128)));
    const uint64_t v = matrix_step(k, layout::V - layout::K);
    /* The distance matters where k is the row. */
    const uint64_t q = hold_matrix(matrix_at(start + layout::Q, layout::ROW_BLOCK));
    const uint64_t dout = matrix_step(q, layout::DOUT - layout::Q);
    const int ds_half = HEAD == 64 ? group * HALF_TILE : 0, k_half = HEAD == 64 ? 0 : group * HALF_TILE;
    const uint64_t slopes_of_keys = hold_matrix(matrix_at(start + layout::DS + (shared_address)ds_half));
    const uint64_t k_columns = hold_matrix(matrix_at(start + layout::K + (shared_address)k_half));

    float dk[1][HEAD / 8][4], dv[1][HEAD / 8][4];
    clear(dk);
    clear(dv);
    if (t.begin < t.end) mbarrier_wait(barriers + KV_FULL, 0);
    for (int m = t.begin, turn = 0; m < t.end; m++, turn++) {
        const int stage = turn & 1, parity = turn >> 1 & 1;
        const shared_address here = barriers + (shared_address)(8 * stage);
        const shared_address stats =
            start + (shared_address)(layout::STATS + stage * layout::STATS_STAGE + lane % 4 * 8);
        const uint64_t q_here = matrix_step(q, stage * layout::Q_STAGE);
        const uint64_t dout_here = matrix_step(dout, stage * layout::Q_STAGE);
        float s[1][ROWS / 8][4], dp[ROWS / 8][4];
        uint32_t probs[ROWS / 16][4], slopes[ROWS / 16][4];
        const int first_token = m * p.row_tokens, past_token = lesser(first_token + p.row_tokens, t.q_length);
        float *sums = p.dq_sums + (int64_t)(first_tile + m) * (ROWS * HEAD);
        const shared_address ds = start + (shared_address)(layout::DS + stage * layout::DS_STAGE);
        const uint64_t ds_here = matrix_step(slopes_of_keys, stage * layout::DS_STAGE);
        mbarrier_wait(here + Q_FULL, parity);
        if (key_end(p.visible, t, past_token - 1) <= first_key ||
            key_begin(p.visible, t, first_token) >= first_key + 64) {
            if (with_dq) {
                float dq[8][4];
                const uint32_t none[ROWS / 16][4] = {};
                hopper_store_slopes(none, ds, compute_here(thread));
                named_barrier<1, HOPPER_CONSUMERS>();
                hopper_multiply_slopes<T>(dq, ds_here, k_columns);
                wgmma_wait<0>();
                hopper_add_dq(sums, dq, thread);
            }
            mbarrier_wait(here + DOUT_FULL, parity); /* a skipped wait would count for another turn's */
            hopper_release_rows(here, leader);
            continue;
        }
        hopper_start_slopes(dp, stats + ROWS * 4);
        hold_registers(dp);
        hopper_multiply<T, HEAD, HALF_TILE, layout::ROW_BLOCK>(s[0], k, q_here, false);
        mbarrier_wait(here + DOUT_FULL, parity);
        hopper_multiply<T, HEAD, HALF_TILE, layout::ROW_BLOCK>(dp, v, dout_here, true);
        wgmma_wait<1>();
        hold_registers(s[0]);
        if (p.cap != 0.0f) cap_scores(s, p.scale_by_cap, p.cap);
        if (key_end(p.visible, t, first_token) < first_key + 64 || key_begin(p.visible, t, past_token - 1) > first_key)
            hopper_hide_rows(s[0], p.visible, t, p.group, t.block * KEY_TILE + warp_key, m * p.row_rows);
        if (p.cap != 0.0f) { /* only a softcap needs dP before the scores are exponentials */
            wgmma_wait<0>();
            hold_registers(dp);
            hopper_bend(dp, s[0], p.inverse_cap);
        }
        hopper_exponentiate(s[0], stats, p.scale_log2);
        keep_order();
        wgmma_wait<0>();
        hold_registers(dp);
        each_sum(dp, [&](float &x, int j, int e) { x *= s[0][j][e]; }); /* dS */
        pack_sums<T>(probs, s[0]);
        pack_sums<T>(slopes, dp);
        if (with_dq) hopper_store_slopes(slopes, ds, compute_here(thread));
        hold_registers(probs);
        hold_registers(slopes);
        hold_registers(dv[0]);
        hold_registers(dk[0]);
        /* These products stand whole in each branch: across a branch, ptxas makes them wait for each other. */
        if (with_dq) {
            float dq[8][4];
            wgmma_fence();
            hopper_add_values<T>(dv[0], probs, dout_here);
            named_barrier<1, HOPPER_CONSUMERS>(); /* dS of all keys is stored, and that of two tiles before was used */
            hopper_multiply_slopes<T>(dq, ds_here, k_columns);
            hopper_add_values<T>(dk[0], slopes, q_here);
            wgmma_wait<1>();
            hopper_add_dq(sums, dq, thread);
        } else {
            wgmma_fence();
            hopper_add_values<T>(dv[0], probs, dout_here);
            hopper_add_values<T>(dk[0], slopes, q_here);
        }
        wgmma_wait<0>();
        hold_registers(dv[0]);
        hold_registers(dk[0]);
        hopper_release_rows(here, leader);
    }
    finish_keys<HEAD, KEY_TILE>(dk, dv, p, thread, warp_key, 0);
}

template <typename T, int HEAD> CF_DEVICE void hopper_backward_block(const hopper_params &p) {
    typedef hopper_backward_layout<HEAD> layout;
    int head;
    const tile t = find_work(p.fused.work, &head);
    const shared_address start = shared_start(), barriers = start + layout::BARRIERS;
    if (threadIdx.x == 0) {
        mbarrier_init(barriers + KV_FULL, 1);
        mbarrier_init(barriers + TAIL, 1);
        init_stages(barriers + Q_FULL, barriers + Q_EMPTY);
        init_stages(barriers + DOUT_FULL, barriers + DOUT_EMPTY);
        fence_mbarrier_init();
    }
    for (int i = 0; i < 4; i++) /* rows that hold no whole token, which no copy reaches */
        zero_rows<layout::ROWS, HEAD, HOPPER_THREADS>(start + (shared_address)(layout::Q + i * layout::Q_STAGE),
                                                      p.fused.row_rows, layout::ROWS, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x < HOPPER_THREADS - HOPPER_CONSUMERS) {
        give_registers_back<40>();
        if (threadIdx.x < 32 && t.begin < t.end) hopper_load_rows<HEAD>(p, t, head, start);
    } else {
        take_registers<232>();
        hopper_backward_keys<T, HEAD>(p, t, head, start);
    }
}

/* One block computes 128 keys of one key head against all packed rows that see any of them, or a part of these rows, as
   attention_backward_kernel does. If p.dq_sums is NULL, attention_dq_kernel computes dQ. A row tile has 64 rows at head
   size 128, and 128 at head size 64. 161 or 162 KB of shared memory, one block a processor. */
template <typename T, int HEAD>
__global__ void __launch_bounds__(CF_HOPPER ? HOPPER_THREADS : 32, 1)
    attention_backward_hopper_kernel(const __grid_constant__ hopper_params p) {
    if constexpr (CF_HOPPER) hopper_backward_block<T, HEAD>(p);
}

/* ================================================================================================================
   >>unfused    cuBLAS products around a masked softmax
   ================================================================================================================ */

const int UNFUSED_THREADS = 128;
const int64_t UNFUSED_ROWS = 256;                /* query tokens at a time at most, to bound the bytes of scores */
const int64_t UNFUSED_BYTES = (int64_t)64 << 20; /* bytes of scores at most: fewer query tokens at a time if they would
                                                    take more */

/* Scores of `rows` query tokens from first_token on, of all heads of one group: (group, rows, ld). The first column is
   key first_key of the slice. */
struct score_params : attention_views { /* at the block's first row, key and head */
    float *scores, *dprobs; /* q . k, dout . v */
    void *probs, *slopes;   /* P and dS */
    cf_dtype type;          /* of these two, out and dout */
    int64_t ld;
    tile slice;
    mask visible;
    int32_t group, rows, first_token, first_key, n_keys, head_size;
    float *lse; /* at the slice's first row and the group's first head */
    int64_t lse_stride;
    float scale, cap;
    view carried_rows; /* sums of earlier blocks of keys, at the same place, in fp32 */
    float *carried_lse;
    int32_t carry;
    int32_t add_rows; /* 1: row_product adds to carried_rows */
};

/* Load and store number i of an array whose type is known only at run time. So one kernel serves all types, if it moves
   more than it computes. */
CF_DEVICE float load_number(const void *array, int64_t i, cf_dtype type) {
    if (type == CF_DTYPE_FP32) return static_cast<const float *>(array)[i];
    if (type == CF_DTYPE_FP16) return to_float<__half>(static_cast<const __half *>(array)[i]);
    return to_float<__nv_bfloat16>(static_cast<const __nv_bfloat16 *>(array)[i]);
}

CF_DEVICE void store_number(void *array, int64_t i, cf_dtype type, float x) {
    if (type == CF_DTYPE_FP32) static_cast<float *>(array)[i] = x;
    else if (type == CF_DTYPE_FP16) static_cast<__half *>(array)[i] = from_float<__half>(x);
    else static_cast<__nv_bfloat16 *>(array)[i] = from_float<__nv_bfloat16>(x);
}

CF_DEVICE float masked_score(const score_params &p, float dot, int begin, int end, int column) {
    const int key = p.first_key + column;
    if (key < begin || key >= end) return -INFINITY;
    const float score = __fmul_rn(dot, p.scale);
    return p.cap != 0.0f ? __fmul_rn(p.cap, tanhf(score / p.cap)) : score;
}

/* Returns the row of a warp: each has one. */
CF_DEVICE int64_t row_of_warp() { return (int64_t)blockIdx.x * (UNFUSED_THREADS / 32) + (int64_t)threadIdx.x / 32; }

/* Adds the log-sum of a row's keys in a block to that of earlier blocks, and scales the output of these down to the new
   total. Returns the total. */
CF_DEVICE float carry_row(const score_params &p, float log_sum, int token, int head) {
    const int lane = (int)threadIdx.x % 32;
    const view &rows = p.carried_rows;
    float *row = reinterpret_cast<float *>(rows.data) + token * rows.row + head * rows.head;
    float *lse = p.carried_lse + head * (int64_t)p.slice.q_length + token;
    const float before = p.carry & CARRY_LOAD ? *lse : -INFINITY, top = fmaxf(before, log_sum);
    const float all = top == -INFINITY ? top : top + logf(__fadd_rn(expf(before - top), expf(log_sum - top)));
    const float keep = before == -INFINITY ? 0.0f : expf(before - all);
    for (int i = lane; i < p.head_size; i += 32) row[i] = before == -INFINITY ? 0.0f : row[i] * keep;
    __syncwarp();
    if (lane == 0) *lse = all;
    return all;
}

/* Turns scores into probabilities, and writes LSE. Every row sees at least one key, unless its sums are carried; then
   probabilities are relative to all keys so far. */
__global__ void __launch_bounds__(UNFUSED_THREADS) softmax_kernel(const __grid_constant__ score_params p) {
    const int64_t at = row_of_warp();
    if (at >= (int64_t)p.group * p.rows) return;
    const int lane = (int)threadIdx.x % 32, token = p.first_token + (int)(at % p.rows), head = (int)(at / p.rows);
    const int begin = key_begin(p.visible, p.slice, token), end = key_end(p.visible, p.slice, token);
    const float *scores = p.scores + at * p.ld;
    float top = -INFINITY, sum = 0.0f;
    for (int j = lane; j < p.n_keys; j += 32) top = fmaxf(top, masked_score(p, scores[j], begin, end, j));
    top = warp_max(top);
    for (int j = lane; j < p.n_keys && top != -INFINITY; j += 32)
        sum = __fadd_rn(sum, expf(masked_score(p, scores[j], begin, end, j) - top));
    sum = warp_sum(sum);
    if (p.carry != 0) {
        top = carry_row(p, top == -INFINITY ? top : top + logf(sum), token, head);
        for (int j = lane; j < p.n_keys; j += 32)
            store_number(p.probs, at * p.ld + j, p.type,
                         top == -INFINITY ? 0.0f : expf(masked_score(p, scores[j], begin, end, j) - top));
        return;
    }
    for (int j = lane; j < p.n_keys; j += 32)
        store_number(p.probs, at * p.ld + j, p.type, expf(masked_score(p, scores[j], begin, end, j) - top) / sum);
    if (p.lse != NULL && lane == 0) p.lse[head * p.lse_stride + token] = top + logf(sum);
}

/* Turns scores and dout . v into P and scale x dS. */
__global__ void __launch_bounds__(UNFUSED_THREADS) softmax_backward_kernel(const __grid_constant__ score_params p) {
    const int64_t at = row_of_warp();
    if (at >= (int64_t)p.group * p.rows) return;
    const int lane = (int)threadIdx.x % 32, row = (int)(at % p.rows), head = (int)(at / p.rows);
    const int token = p.first_token + row;
    const int begin = key_begin(p.visible, p.slice, token), end = key_end(p.visible, p.slice, token);
    const int64_t out = row * p.out.row + head * p.out.head, dout = row * p.dout.row + head * p.dout.head;
    float dot = 0.0f;
    for (int i = lane; i < p.head_size; i += 32)
        dot = fmaf(load_number(p.out.data, out + i, p.type), load_number(p.dout.data, dout + i, p.type), dot);
    dot = warp_sum(dot);
    const float lse = p.lse[head * p.lse_stride + token];
    for (int j = lane; j < p.n_keys; j += 32) {
        const float score = masked_score(p, p.scores[at * p.ld + j], begin, end, j);
        const float prob = expf(score - lse);
        float slope = prob == 0.0f ? 0.0f : prob * (p.dprobs[at * p.ld + j] - dot) * p.scale;
        if (p.cap != 0.0f && prob != 0.0f) slope *= fmaf(-(score / p.cap), score / p.cap, 1.0f);
        store_number(p.probs, at * p.ld + j, p.type, prob);
        store_number(p.slopes, at * p.ld + j, p.type, slope);
    }
}

/* Puts carried sums, rounded, into the caller's rows, and in a forward their log-sums. Without sums there was no key: 0
   and -inf. One warp for each row and head. */
struct round_params {
    const float *sums, *sums_lse; /* (rows, heads, head size), (heads, rows); NULL: none */
    view to;                      /* in elements */
    float *lse;
    int64_t lse_stride, n_rows;
    int32_t n_heads, head_size;
    cf_dtype type; /* of `to` */
};

__global__ void __launch_bounds__(UNFUSED_THREADS) round_rows_kernel(const __grid_constant__ round_params p) {
    const int64_t at = row_of_warp(), row = at / p.n_heads, head = at % p.n_heads;
    if (row >= p.n_rows) return;
    const int lane = (int)threadIdx.x % 32;
    const int64_t first = row * p.to.row + head * p.to.head;
    for (int i = lane; i < p.head_size; i += 32)
        store_number(p.to.data, first + i, p.type, p.sums != NULL ? p.sums[at * p.head_size + i] : 0.0f);
    if (p.lse != NULL && lane == 0)
        p.lse[head * p.lse_stride + row] = p.sums != NULL ? p.sums_lse[head * p.n_rows + row] : -INFINITY;
}

const int MOST_RUNS = 16; /* runs of neighbouring rows of one launch */

/* The rows of slices, counted without the rows between them. From counted row before[i] on, the row is shift[i]
   further. */
struct row_runs {
    int32_t n_rows;
    int32_t before[MOST_RUNS], shift[MOST_RUNS]; /* ascending; unused ones: INT32_MAX */
};

CF_DEVICE int64_t row_in_slices(const row_runs &p, int64_t index) {
    int32_t shift = p.shift[0];
    CF_UNROLL
    for (int i = 1; i < MOST_RUNS; i++)
        if (index >= p.before[i]) shift = p.shift[i];
    return index + shift;
}

/* ---- sinks ---- */

const int SINK_THREADS = 512; /* for the gradient of one head */

struct sink_params : row_runs {
    view out, dout; /* in elements */
    const float *sinks;
    float *lse, *dsinks;
    int64_t lse_stride;
    int32_t n_heads, head_size;
    cf_dtype type; /* of out and dout */
};

/* Applies a head's sink to the results of attention. One warp for each row and head. A sink of -inf changes no bit. */
__global__ void __launch_bounds__(UNFUSED_THREADS) sinks_kernel(const __grid_constant__ sink_params p) {
    const int64_t at = row_of_warp(), index = at / p.n_heads, head = at % p.n_heads;
    if (index >= p.n_rows) return;
    const int64_t row = row_in_slices(p, index);
    const int lane = (int)threadIdx.x % 32;
    const int64_t first = row * p.out.row + head * p.out.head;
    float *lse = p.lse + head * p.lse_stride + row;
    const float sink = p.sinks[head], keys = *lse, top = fmaxf(keys, sink);
    const float less = keys == sink ? 1.0f : expf(-fabsf(keys - sink)), sum = __fadd_rn(1.0f, less);
    const float share = (keys >= sink ? 1.0f : less) / sum;
    for (int i = lane; i < p.head_size && share != 1.0f; i += 32)
        store_number(p.out.data, first + i, p.type, load_number(p.out.data, first + i, p.type) * share);
    __syncwarp();
    if (lane == 0) *lse = top + logf(sum);
}

/* Adds to the gradient of a head's sink: -sum of exp(sink - lse) (dout . out). One block for each head adds in a fixed
   order, so that every run gives the same bits. */
__global__ void __launch_bounds__(SINK_THREADS) sinks_gradient_kernel(const __grid_constant__ sink_params p) {
    __shared__ float of_warp[SINK_THREADS / 32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t head = blockIdx.x;
    const float sink = p.sinks[head];
    float sum = 0.0f;
    for (int64_t index = warp; index < p.n_rows; index += SINK_THREADS / 32) {
        const int64_t row = row_in_slices(p, index);
        const int64_t out = row * p.out.row + head * p.out.head, dout = row * p.dout.row + head * p.dout.head;
        const float lse = p.lse[head * p.lse_stride + row], share = sink == lse ? 1.0f : expf(sink - lse);
        float dot = 0.0f;
        for (int i = lane; i < p.head_size && share != 0.0f; i += 32)
            dot = fmaf(load_number(p.out.data, out + i, p.type), load_number(p.dout.data, dout + i, p.type), dot);
        sum = fmaf(share, dot, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < SINK_THREADS / 32; i++) sum = __fadd_rn(sum, of_warp[i]);
    p.dsinks[head] = __fadd_rn(p.dsinks[head], -sum);
}

/* ================================================================================================================
   >>attention    launches, paths, public functions
   ================================================================================================================ */

/* All kernels of this file, listed before main begins. CUDA loads a kernel at its first launch, and may then wait for
   the whole device. That wait never ends if the device runs a receive from a process that waits for this one. So the
   executor loads all of them in advance, on the current device. */
struct listed_kernel {
    const void *kernel;
    const listed_kernel *next;
    explicit listed_kernel(const void *one);
};

const listed_kernel *all_kernels = NULL;

listed_kernel::listed_kernel(const void *one) : kernel(one), next(all_kernels) { all_kernels = this; }

template <auto KERNEL> struct listing { static const listed_kernel entry; };
template <auto KERNEL> const listed_kernel listing<KERNEL>::entry(reinterpret_cast<const void *>(KERNEL));

cudaError_t load_kernels() {
    cudaFuncAttributes unused;
    cudaError_t status = cudaSuccess;
    for (const listed_kernel *k = all_kernels; k != NULL && status == cudaSuccess; k = k->next)
        status = cudaFuncGetAttributes(&unused, k->kernel);
    return status;
}

/* Gives a kernel its shared memory, of the whole that a multiprocessor has. Otherwise the driver may leave room for one
   block where two or three fit. */
cudaError_t set_shared_memory(const void *kernel, size_t bytes) {
    cudaError_t status = cudaSuccess;
    if (bytes > 48 * 1024)
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (status == cudaSuccess && bytes > 0)
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      (int)cudaSharedmemCarveoutMaxShared);
    return status;
}

/* Puts a kernel on the stream. Every kernel takes its parameters by value, in one record. */
template <auto KERNEL, typename A>
cf_result launch(const char *name, int64_t blocks, int threads, size_t shared_bytes, cf_cuda_stream stream,
                 cf_error *error, const A &arguments) {
    cudaLaunchConfig_t config = {};
    if (blocks == 0) return CF_OK;
    if (blocks > INT32_MAX) return cf_fail(error, CF_ERROR_LIMIT, name, -1, INT32_MAX, blocks, "too many blocks");
    config.gridDim = dim3((unsigned)blocks, 1, 1);
    config.blockDim = dim3((unsigned)threads, 1, 1);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    name_launch(name);
    cudaError_t status = set_shared_memory(listing<KERNEL>::entry.kernel, shared_bytes);
    if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, KERNEL, arguments);
    return cuda_result(error, status, name);
}

/* Refuses a kernel that the code for this device leaves out: it is empty, and has launch bounds that say so. CUDA would
   refuse the launch too, but without a reason. */
cf_result check_code(const void *kernel, int threads, const char *field, const char *why, cf_error *error) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return cuda_result(error, status, field);
    if (attributes.maxThreadsPerBlock >= threads) return CF_OK;
    return cf_fail(error, CF_ERROR_DEVICE, field, -1, threads, attributes.maxThreadsPerBlock, why);
}

bool has_hopper_code() {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, attention_forward_hopper_kernel<__nv_bfloat16, 128>) == cudaSuccess)
        return attributes.maxThreadsPerBlock >= HOPPER_THREADS;
    (void)cudaGetLastError(); /* no device, or no code: the first launch will say so */
    return false;
}

struct call {
    const problem *of;
    const cf_attention_tensors *tensors;
    bool backward;
    cf_cuda_stream stream;
    cf_error *error;
};

size_t align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

view view_of(const cf_tensor &t, int64_t heads, int64_t head_size) {
    view v;
    v.data = static_cast<char *>(t.data);
    v.head = t.head_stride != 0 ? t.head_stride : head_size;
    v.row = t.row_stride != 0 ? t.row_stride : heads * head_size;
    return v;
}

/* Returns the arrays of a call. A forward has no gradients, whatever the caller left in their members. */
attention_views views_of(const call &c) {
    const cf_attention_desc *d = &c.of->desc;
    const cf_attention_tensors *x = c.tensors;
    attention_views v = {};
    v.q = view_of(x->q, d->n_heads, d->head_size);
    v.k = view_of(x->k, d->n_kv_heads, d->head_size);
    v.v = view_of(x->v, d->n_kv_heads, d->head_size);
    v.out = view_of(x->out, d->n_heads, d->head_size);
    if (!c.backward) return v;
    v.dout = view_of(x->dout, d->n_heads, d->head_size);
    v.dq = view_of(x->dq, d->n_heads, d->head_size);
    v.dk = view_of(x->dk, d->n_kv_heads, d->head_size);
    v.dv = view_of(x->dv, d->n_kv_heads, d->head_size);
    return v;
}

/* ---- fused ---- */

int fused_head(const problem *p) { return p->desc.head_size <= 64 ? 64 : p->desc.head_size <= 128 ? 128 : 256; }

int64_t fused_n_tiles(const problem *p) {
    return p->n_forward_tiles + p->n_row_tiles + p->n_all_key_tiles + p->backward.n_split + p->forward.n_split;
}

/* Tiles of so many packed rows whose sums are carried from block to block of keys, for one key head. */
int64_t carried_tiles(const problem *p, int64_t rows) {
    int64_t n = 0;
    for (int64_t s = 0; s < p->desc.n_slices && p->in_blocks; s++)
        n += is_carried(p, s) ? div_up((p->desc.cu_seqlens_q[s + 1] - p->desc.cu_seqlens_q[s]) * p->group, rows) : 0;
    return n;
}

/* The places of sums in a pass's device workspace, in bytes. Carried sums come first, at the same place for a chunk and
   all of its blocks; then the sums of parts of tiles. The backward has two numbers a row before them, and carries its
   sums of dQ. */
struct fused_workspace {
    size_t carried, parts, bytes;
};

fused_workspace workspace_of(const problem *p, bool backward) {
    const size_t heads = (size_t)p->desc.n_kv_heads, row_bytes = (size_t)fused_head(p) * sizeof(float);
    const size_t forward_tile = FORWARD_ROWS * row_bytes + 8 * FORWARD_THREADS * sizeof(float); /* forward_part_size */
    const size_t rows = (size_t)(p->n_sum_tiles * p->row_tile);
    fused_workspace w = {0, 0, 0};
    if (!backward) {
        w.parts = heads * (size_t)carried_tiles(p, p->forward_rows) * forward_tile;
        w.bytes = w.parts + heads * (size_t)p->forward.n_parts * forward_tile;
        return w;
    }
    w.carried = align_up(heads * rows * 2 * sizeof(float), 256);
    w.parts = w.carried + (p->desc.deterministic && !p->in_blocks ? 0 : heads * rows * row_bytes);
    w.bytes = w.parts + heads * (size_t)p->backward.n_parts * 2 * (size_t)p->key_tile * row_bytes;
    return w;
}

size_t fused_bytes(const problem *p, bool backward) { return workspace_of(p, backward).bytes; }

/* Returns the flags of a call for carried sums. */
int32_t carry_of(const call &c) {
    if (!c.of->in_blocks) return 0;
    return c.of->is_block ? CARRY_LOAD | CARRY_STORE : c.tensors->finish ? CARRY_LOAD : CARRY_STORE;
}

fused_params fused_of(const call &c) {
    const problem *p = c.of;
    const cf_attention_desc *d = &p->desc;
    const cf_attention_tensors *x = c.tensors;
    const fused_workspace at = workspace_of(p, c.backward);
    char *const memory = static_cast<char *>(x->workspace);
    fused_params f = {};
    static_cast<attention_views &>(f) = views_of(c);
    f.lse = x->lse;
    f.lse_stride = x->lse_stride != 0 ? x->lse_stride : p->rows_q;
    f.visible = p->visible;
    f.scale = (float)d->scale;
    f.scale_log2 = d->softcap != 0.0 ? LOG2_E : (float)(d->scale * 1.4426950408889634);
    f.cap = (float)d->softcap;
    f.scale_by_cap = d->softcap != 0.0 ? (float)(d->scale / d->softcap) : 0.0f;
    f.inverse_cap = d->softcap != 0.0 ? (float)(1.0 / d->softcap) : 0.0f;
    f.group = make_divisor((int32_t)p->group);
    f.n_units = (int32_t)(d->head_size / 8);
    f.row_tile = p->row_tile, f.row_tokens = p->row_tokens, f.row_rows = p->row_rows;
    f.forward_rows = p->forward_rows;
    f.type = d->dtype;
    f.carry = carry_of(c);
    f.carried = reinterpret_cast<float *>(memory + at.carried);
    f.n_carried = c.backward ? p->n_sum_tiles : carried_tiles(p, p->forward_rows);
    f.part_sums = reinterpret_cast<float *>(memory + at.parts);
    f.n_parts = (c.backward ? p->backward : p->forward).n_parts;
    if (!c.backward) return f;
    f.q_tile = p->row_tokens * f.q.row * 2;
    f.dout_tile = p->row_tokens * f.dout.row * 2;
    f.n_row_tiles = p->n_sum_tiles;
    f.stats = reinterpret_cast<float *>(memory);
    if (!d->deterministic) f.dq_sums = f.carried;
    f.overwrite = x->overwrite != 0;
    return f;
}

/* The lists of tiles on the device, in the order of fill_all_tiles. Those of key tiles have one turn's only. */
struct tile_lists {
    work_order forward, rows, keys, split_keys, split_forward;
};

/* Returns the order of one turn's key tiles; those without work only if `idle`. */
work_order order_turn(const call &c, const tile *all, int64_t n_tiles, int32_t turn, bool idle) {
    const tile *const here = static_cast<const tile *>(c.of->tiles);
    const tile *const begin = here + (all - static_cast<const tile *>(c.tensors->tiles)), *const end = begin + n_tiles;
    const tile *const first = std::partition_point(begin, end, [&](const tile &t) { return t.turn < turn; });
    const tile *const past = std::partition_point(
        first, end, [&](const tile &t) { return t.turn == turn && (idle || t.begin < t.end); });
    return order_work(all + (first - begin), past - first, c.of->desc.n_kv_heads, c.of->backward.section);
}

tile_lists lists_of(const call &c, int32_t turn = 0) {
    const problem *p = c.of;
    const int64_t heads = p->desc.n_kv_heads;
    const tile *at = static_cast<const tile *>(c.tensors->tiles);
    tile_lists l;
    l.forward = order_work(at, p->n_forward_tiles, heads, p->forward.section);
    l.rows = order_work(at += p->n_forward_tiles, p->n_row_tiles, heads, p->forward.section);
    l.keys = order_turn(c, at += p->n_row_tiles, p->n_all_key_tiles, turn, c.tensors->overwrite != 0);
    l.split_keys = order_turn(c, at += p->n_all_key_tiles, p->backward.n_split, turn, true);
    l.split_forward = order_work(at + p->backward.n_split, p->forward.n_split, heads, p->forward.section);
    return l;
}

/* Launches a kernel with a block for each tile and key head of a list. */
template <void (*KERNEL)(fused_params)>
cf_result launch_tiles(const char *name, const work_order &work, int threads, int shared_bytes, const call &c,
                       const fused_params &f) {
    fused_params with_work = f;
    with_work.work = work;
    return launch<KERNEL>(name, work.n_blocks, threads, (size_t)shared_bytes, c.stream, c.error, with_work);
}

template <int HEAD, int THREADS> cf_result combine(const call &c, const tile_lists &lists, const fused_params &f) {
    return launch_tiles<attention_combine_kernel<HEAD, THREADS>>("attention_combine", lists.split_forward, THREADS,
                                                                 FORWARD_ROWS * HEAD * 2, c, f);
}

template <typename T, int HEAD> cf_result fused_forward_as(const call &c) {
    const int THREADS = FORWARD_THREADS_OF<HEAD>;
    static_assert(forward_layout<HEAD>::BYTES <= block_memory(HEAD == 256 ? 80 : 86));
    const tile_lists lists = lists_of(c);
    const fused_params f = fused_of(c);
    cf_result code = CF_OK;
    if (f.carry != CARRY_LOAD)
        code = launch_tiles<attention_forward_kernel<T, HEAD>>("attention_forward", lists.forward, THREADS,
                                                               forward_layout<HEAD>::BYTES, c, f);
    return code == CF_OK ? combine<HEAD, THREADS>(c, lists, f) : code;
}

/* Launches all kernels of a backward, for one shape of its tiles. launch_keys launches the kernel of key tiles. Its
   warps have sums of KEY_TILES x 16 keys and of ROW_TILES x 16 rows. With several blocks of keys, the first call
   computes the rows' numbers and the last one rounds the sums. */
template <typename T, int HEAD, int ROWS, int KEYS, int KEY_TILES, int ROW_TILES, typename F>
cf_result launch_backward(const call &c, const fused_params &f, F launch_keys) {
    static_assert(dq_layout<HEAD, ROWS>::BYTES <= block_memory(HEAD == 256 ? 80 : 86));
    const tile_lists l = lists_of(c);
    const bool deterministic = c.of->desc.deterministic != 0;
    fused_params sums = f;
    cf_result code = CF_OK;
    sums.sums_of_tile = deterministic ? 0 : ROWS * HEAD;
    if ((f.carry & CARRY_LOAD) == 0)
        code = launch_tiles<attention_stats_kernel<T>>("attention_stats", l.rows, STATS_THREADS, 0, c, sums);
    for (int32_t turn = 0; turn < c.of->n_turns && f.carry != CARRY_LOAD && code == CF_OK; turn++) {
        const tile_lists of_turn = lists_of(c, turn);
        code = launch_keys(of_turn.keys);
        if (code == CF_OK)
            code = launch_tiles<attention_join_kernel<HEAD, KEYS, KEY_TILES>>("attention_join", of_turn.split_keys,
                                                                              JOIN_THREADS, 0, c, f);
    }
    if (code != CF_OK || (f.carry & CARRY_STORE && !deterministic)) return code;
    if (deterministic)
        return launch_tiles<attention_dq_kernel<T, HEAD, ROWS>>("attention_dq", l.rows, 2 * ROWS,
                                                                dq_layout<HEAD, ROWS>::BYTES, c, f);
    return launch_tiles<attention_round_dq_kernel<HEAD, ROWS, ROW_TILES>>(
        "attention_round_dq", l.rows, BACKWARD_THREADS, ROWS * HEAD * 2, c, f);
}

template <typename T, int HEAD, int ROWS, int KEYS, int STAGES>
cf_result fused_backward_of_shape(const call &c, const fused_params &f) {
    constexpr auto kernel = attention_backward_kernel<T, HEAD, ROWS, KEYS, STAGES>;
    const int BYTES = backward_layout<HEAD, ROWS, KEYS, STAGES>::BYTES;
    static_assert(BYTES <= block_memory(IS_SMALL<HEAD, ROWS, KEYS> ? 86 : 80));
    if (IS_SMALL<HEAD, ROWS, KEYS>) {
        const cf_result code = check_code(listing<kernel>::entry.kernel, BACKWARD_THREADS, "arch",
                                          "code for sm_90a has no tiles for so little memory", c.error);
        if (code != CF_OK) return code;
    }
    return launch_backward<T, HEAD, ROWS, KEYS, KEYS / 64, 2>(c, f, [&](const work_order &keys) {
        return launch_tiles<kernel>("attention_backward", keys, BACKWARD_THREADS, BYTES, c, f);
    });
}

/* Checks that the rows of a tile span less than 2^35 numbers. Kernels find them by 32-bit numbers, in units of 8. */
cf_result check_tile_spans(const call &c, const attention_views &of) {
    const int64_t most = (int64_t)1 << 35;
    for (const view *rows : {&of.q, &of.dout}) {
        const int64_t span = (c.of->row_tokens - 1) * rows->row + (c.of->group - 1) * rows->head;
        if (span >= most)
            return cf_fail(c.error, CF_ERROR_LIMIT, rows == &of.q ? "q" : "dout", -1, most, span,
                           "strides too large for this path: the rows of a tile");
    }
    return CF_OK;
}

template <typename T> cf_result fused_backward_as(const call &c) {
    const problem *p = c.of;
    const fused_params f = fused_of(c);
    const cf_result code = check_tile_spans(c, f);
    if (code != CF_OK) return code;
    if (fused_head(p) == 64)
        return p->row_tile == LARGE_ROW_TILE ? fused_backward_of_shape<T, 64, LARGE_ROW_TILE, KEY_TILE, 2>(c, f)
                                             : fused_backward_of_shape<T, 64, ROW_TILE, KEY_TILE, 2>(c, f);
    if (fused_head(p) == 256) return fused_backward_of_shape<T, 256, ROW_TILE, SMALL_KEY_TILE, 1>(c, f);
    return p->key_tile == KEY_TILE ? fused_backward_of_shape<T, 128, ROW_TILE, KEY_TILE, 2>(c, f)
                                   : fused_backward_of_shape<T, 128, ROW_TILE, SMALL_KEY_TILE, 1>(c, f);
}

template <typename T> cf_result fused_as(const call &c) {
    if (c.backward) return fused_backward_as<T>(c);
    switch (fused_head(c.of)) {
        case 64: return fused_forward_as<T, 64>(c);
        case 128: return fused_forward_as<T, 128>(c);
        default: return fused_forward_as<T, 256>(c);
    }
}

cf_result run_fused(const call &c) {
    return c.of->desc.dtype == CF_DTYPE_BF16 ? fused_as<__nv_bfloat16>(c) : fused_as<__half>(c);
}

/* ---- hopper ---- */

/* The driver's function that makes tensor maps. The runtime finds it, so that programs need not link the driver. */
typedef decltype(&cuTensorMapEncodeTiled) encode_fn;

cf_result find_encode(encode_fn *to, cf_error *error) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *function = NULL;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    if (status != cudaSuccess) return cuda_result(error, status, "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || function == NULL)
        return cf_fail(error, CF_ERROR_DEVICE, "cuTensorMapEncodeTiled", -1, cudaDriverEntryPointSuccess, found,
                       "the driver does not have it");
    *to = reinterpret_cast<encode_fn>(function);
    return CF_OK;
}

/* Makes the tensor map of an array: boxes of 64 columns, box_heads heads and some rows. An array without rows gets
   none, because no tile reads it. */
cf_result make_map(const call &c, encode_fn encode, const view &of, int64_t heads, int64_t rows, int64_t box_heads,
                   int64_t box_rows, const char *name, CUtensorMap *map) {
    const cf_attention_desc *d = &c.of->desc;
    const cuuint64_t size[3] = {(cuuint64_t)d->head_size, (cuuint64_t)heads, (cuuint64_t)rows};
    const cuuint64_t strides[2] = {(cuuint64_t)of.head * 2, (cuuint64_t)of.row * 2};
    const cuuint32_t box[3] = {64, (cuuint32_t)box_heads, (cuuint32_t)box_rows}, steps[3] = {1, 1, 1};
    const int64_t stride = std::max(of.head, of.row), most = ((int64_t)1 << 39) - 1;
    if (rows == 0) return CF_OK;
    if (stride > most)
        return cf_fail(c.error, CF_ERROR_LIMIT, name, -1, most, stride, "stride too large for this path");
    const CUresult status =
        encode(map, d->dtype == CF_DTYPE_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
               of.data, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status == CUDA_SUCCESS) return CF_OK;
    return cf_fail(c.error, CF_ERROR_DEVICE, name, -1, CUDA_SUCCESS, status,
                   "cuTensorMapEncodeTiled refused this array");
}

/* Makes the maps of a pass, if there is code for its kernel: Q, K, V and in the backward dout. */
cf_result make_maps(const call &c, const void *kernel, hopper_params *h) {
    const problem *p = c.of;
    const int64_t heads = p->desc.n_heads, kv = p->desc.n_kv_heads;
    const int64_t tokens = (c.backward ? p->row_rows : p->forward_rows) / p->group;
    encode_fn encode = NULL;
    cf_result code = check_code(kernel, HOPPER_THREADS, "path", "this program has no code for sm_90a", c.error);
    if (code == CF_OK) code = find_encode(&encode, c.error);
    if (code == CF_OK) code = make_map(c, encode, h->fused.q, heads, p->rows_q, p->group, tokens, "q", &h->q);
    if (code == CF_OK) code = make_map(c, encode, h->fused.k, kv, p->rows_k, 1, HOPPER_KEYS, "k", &h->k);
    if (code == CF_OK) code = make_map(c, encode, h->fused.v, kv, p->rows_k, 1, HOPPER_KEYS, "v", &h->v);
    if (code == CF_OK && c.backward)
        code = make_map(c, encode, h->fused.dout, heads, p->rows_q, p->group, tokens, "dout", &h->dout);
    return code;
}

/* Returns the bytes of workspace with wgmma. The count of taken tiles lies behind the sums of parts. */
size_t hopper_bytes(const problem *p, bool backward) {
    return backward ? fused_bytes(p, true) : align_up(fused_bytes(p, false), 256) + 256;
}

/* Clears the count of taken tiles, and chooses the number of blocks: at most one for each processor. */
cf_result prepare_taking(const call &c, hopper_params *h, int64_t *n_blocks) {
    if (*n_blocks > INT32_MAX - MOST_PROCESSORS)
        return cf_fail(c.error, CF_ERROR_LIMIT, "attention_forward", -1, INT32_MAX - MOST_PROCESSORS, *n_blocks,
                       "too many tiles");
    *n_blocks = std::min(*n_blocks, c.of->desc.n_processors);
    h->taken = reinterpret_cast<int *>(static_cast<char *>(c.tensors->workspace) + hopper_bytes(c.of, false) - 256);
    return cuda_result(c.error, cudaMemsetAsync(h->taken, 0, sizeof *h->taken, c.stream), "attention_forward");
}

template <typename T, int HEAD> cf_result hopper_forward_as(const call &c) {
    constexpr auto kernel = attention_forward_hopper_kernel<T, HEAD>;
    static_assert(hopper_forward_layout<HEAD>::BYTES <= block_memory(90));
    const tile_lists lists = lists_of(c);
    hopper_params h = {};
    h.fused = fused_of(c);
    h.fused.work = lists.forward;
    int64_t n_blocks = h.fused.carry != CARRY_LOAD ? lists.forward.n_blocks : 0;
    cf_result code = make_maps(c, listing<kernel>::entry.kernel, &h);
    if (code == CF_OK) code = prepare_taking(c, &h, &n_blocks);
    if (code == CF_OK)
        code = launch<kernel>("attention_forward", n_blocks, HOPPER_THREADS, hopper_forward_layout<HEAD>::BYTES,
                              c.stream, c.error, h);
    return code == CF_OK ? combine<HEAD, HOPPER_CONSUMERS>(c, lists, h.fused) : code;
}

template <typename T, int HEAD> cf_result hopper_backward_as(const call &c) {
    typedef hopper_backward_layout<HEAD> layout;
    constexpr auto kernel = attention_backward_hopper_kernel<T, HEAD>;
    static_assert(layout::BYTES <= block_memory(90));
    hopper_params h = {};
    h.fused = fused_of(c);
    cf_result code = check_tile_spans(c, h.fused);
    if (code == CF_OK) code = make_maps(c, listing<kernel>::entry.kernel, &h);
    if (code != CF_OK) return code;
    return launch_backward<T, HEAD, layout::ROWS, KEY_TILE, 1, 1>(c, h.fused, [&](const work_order &keys) {
        h.fused.work = keys;
        return launch<kernel>("attention_backward", keys.n_blocks, HOPPER_THREADS, layout::BYTES, c.stream, c.error, h);
    });
}

template <typename T> cf_result hopper_as(const call &c) {
    if (fused_head(c.of) == 64) return c.backward ? hopper_backward_as<T, 64>(c) : hopper_forward_as<T, 64>(c);
    return c.backward ? hopper_backward_as<T, 128>(c) : hopper_forward_as<T, 128>(c);
}

cf_result run_hopper(const call &c) {
    return c.of->desc.dtype == CF_DTYPE_BF16 ? hopper_as<__nv_bfloat16>(c) : hopper_as<__half>(c);
}

/* ---- unfused ---- */

cf_result check_unfused(const problem *, cf_error *) { return CF_OK; }

int64_t bytes_of(cf_dtype dtype) { return dtype == CF_DTYPE_FP32 ? 4 : 2; }
int64_t scores_ld(const problem *p) { return (std::max<int64_t>(1, p->longest_k) + 7) / 8 * 8; }

int64_t unfused_rows(const problem *p) {
    const int64_t fit = UNFUSED_BYTES / (p->group * scores_ld(p) * 4);
    return std::max<int64_t>(1, std::min(std::min(p->longest_q, UNFUSED_ROWS), fit));
}

size_t unfused_scores_bytes(const problem *p, int64_t bytes) {
    return align_up((size_t)(p->group * unfused_rows(p) * scores_ld(p) * bytes), 256);
}

/* Returns the bytes of carried sums. They come first, at the same place for a chunk and all blocks of its keys. */
size_t unfused_carried_bytes(const problem *p) {
    const int64_t rows = carried_tiles(p, p->group);
    return align_up((size_t)(rows * p->desc.n_heads * (p->desc.head_size + 1)) * sizeof(float), 256);
}

size_t unfused_block_bytes(const problem *p) {
    return unfused_scores_bytes(p, 4) + unfused_scores_bytes(p, bytes_of(p->desc.dtype));
}

size_t unfused_bytes(const problem *p, bool backward) {
    return unfused_carried_bytes(p) + (backward ? 2 : 1) * unfused_block_bytes(p);
}

/* A matrix in a product of a group of heads, column-major for cuBLAS; `step` is the distance of heads. */
struct operand {
    const void *data;
    cublasOperation_t op;
    int64_t ld, step;
};

cf_result check_cublas(const call &c, cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) return CF_OK;
    return cf_fail(c.error, CF_ERROR_DEVICE, "cublas", -1, (int64_t)CUBLAS_STATUS_SUCCESS, (int64_t)status,
                   cublasGetStatusName(status));
}

cudaDataType cuda_type(const problem *p) {
    if (p->desc.dtype == CF_DTYPE_FP32) return CUDA_R_32F;
    return p->desc.dtype == CF_DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* to (m x n) = op(a) (m x k) op(b) (k x n) + beta to. */
cf_result multiply_heads(const call &c, const operand &a, const operand &b, const operand &to, cudaDataType to_type,
                         int64_t m, int64_t n, int64_t k, int64_t batch, float beta) {
    const float one = 1.0f;
    const cudaDataType type = cuda_type(c.of);
    const int64_t ld = std::max({a.ld, b.ld, to.ld});
    if (ld > INT32_MAX)
        return cf_fail(c.error, CF_ERROR_LIMIT, "row_stride", -1, INT32_MAX, ld, "too large for cuBLAS");
    return check_cublas(c, cublasGemmStridedBatchedEx(
        c.tensors->cublas, a.op, b.op, (int)m, (int)n, (int)k, &one, a.data, type, (int)a.ld, a.step, b.data, type,
        (int)b.ld, b.step, &beta, const_cast<void *>(to.data), to_type, (int)to.ld, to.step, (int)batch,
        CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

/* Returns a view that starts `rows` rows and `heads` heads later. */
view advance(const view &v, int64_t rows, int64_t heads, int64_t bytes) {
    view to = v;
    to.data += (rows * v.row + heads * v.head) * bytes;
    return to;
}

/* (rows, keys) = x . y^T, in fp32: x by query head, y by key head. */
cf_result score_product(const call &c, const score_params &s, const view &x, const view &y, float *scores) {
    return multiply_heads(c, {y.data, CUBLAS_OP_T, y.row, 0}, {x.data, CUBLAS_OP_N, x.row, x.head},
                          {scores, CUBLAS_OP_N, s.ld, s.rows * s.ld}, CUDA_R_32F, s.n_keys, s.rows, s.head_size,
                          s.group, 0.0f);
}

/* to (rows, head size) = probs (rows, keys) . y, by query head. Carried sums of these rows are added to instead. */
cf_result row_product(const call &c, const score_params &s, const void *probs, const view &y, const view &to) {
    const view sums = s.carry != 0 ? advance(s.carried_rows, s.first_token, 0, 4) : to;
    return multiply_heads(c, {y.data, CUBLAS_OP_N, y.row, 0}, {probs, CUBLAS_OP_N, s.ld, s.rows * s.ld},
                          {sums.data, CUBLAS_OP_N, sums.row, sums.head}, s.carry != 0 ? CUDA_R_32F : cuda_type(c.of),
                          s.head_size, s.rows, s.n_keys, s.group, s.carry != 0 && s.add_rows ? 1.0f : 0.0f);
}

/* to (keys, head size), fp32, += sum over the group's heads of probs^T . x. Heads run one after the other, because they
   add to one array. */
cf_result key_product(const call &c, const score_params &s, const void *probs, const view &x, const view &to) {
    const int64_t bytes = bytes_of(c.of->desc.dtype), probs_bytes = s.rows * s.ld * bytes;
    cf_result code = CF_OK;
    for (int64_t head = 0; head < s.group && code == CF_OK; head++)
        code = multiply_heads(c, {x.data + head * x.head * bytes, CUBLAS_OP_N, x.row, 0},
                              {static_cast<const char *>(probs) + head * probs_bytes, CUBLAS_OP_T, s.ld, 0},
                              {to.data, CUBLAS_OP_N, to.row, 0}, CUDA_R_32F, s.head_size, s.n_keys, s.rows, 1, 1.0f);
    return code;
}

cf_result round_rows(const call &c, const round_params &r) {
    const int64_t per_block = UNFUSED_THREADS / 32, n_blocks = (r.n_rows * r.n_heads + per_block - 1) / per_block;
    return launch<round_rows_kernel>("round_rows", n_blocks, UNFUSED_THREADS, 0, c.stream, c.error, r);
}

/* Zeroes rows of dK or dV. */
cf_result clear_keys(const call &c, const view &rows, int64_t n_rows) {
    const cf_attention_desc *d = &c.of->desc;
    return round_rows(c, {NULL, NULL, rows, NULL, 0, n_rows, (int32_t)d->n_kv_heads, (int32_t)d->head_size,
                          CF_DTYPE_FP32});
}

/* Computes the forward of one block: some rows of one slice and one key head. */
cf_result unfused_forward_block(const call &c, const score_params &s) {
    cf_result code = score_product(c, s, s.q, s.k, s.scores);
    if (code == CF_OK)
        code = launch<softmax_kernel>("softmax", div_up((int64_t)s.group * s.rows, UNFUSED_THREADS / 32),
                                      UNFUSED_THREADS, 0, c.stream, c.error, s);
    return code == CF_OK ? row_product(c, s, s.probs, s.v, s.out) : code;
}

cf_result unfused_backward_block(const call &c, const score_params &s) {
    const int64_t n_blocks = div_up((int64_t)s.group * s.rows, UNFUSED_THREADS / 32);
    cf_result code = score_product(c, s, s.q, s.k, s.scores);
    if (code == CF_OK) code = score_product(c, s, s.dout, s.v, s.dprobs);
    if (code == CF_OK)
        code = launch<softmax_backward_kernel>("softmax_backward", n_blocks, UNFUSED_THREADS, 0, c.stream, c.error, s);
    if (code == CF_OK) code = row_product(c, s, s.slopes, s.k, s.dq);
    if (code == CF_OK) code = key_product(c, s, s.probs, s.dout, s.dv);
    return code == CF_OK ? key_product(c, s, s.slopes, s.q, s.dk) : code;
}

/* Sets the views of s's rows and keys, for one key head. */
void take_views(const call &c, const attention_views &all, int64_t head, score_params *s) {
    const int64_t bytes = bytes_of(c.of->desc.dtype), row = s->slice.q_start + s->first_token;
    const int64_t key = s->slice.k_start + s->first_key, q_head = head * c.of->group;
    s->q = advance(all.q, row, q_head, bytes);
    s->k = advance(all.k, key, head, bytes);
    s->v = advance(all.v, key, head, bytes);
    s->out = advance(all.out, row, q_head, bytes);
    if (!c.backward) return;
    s->dout = advance(all.dout, row, q_head, bytes);
    s->dq = advance(all.dq, row, q_head, bytes);
    s->dk = advance(all.dk, key, head, 4);
    s->dv = advance(all.dv, key, head, 4);
}

cf_result unfused_slice(const call &c, const score_params &base, const attention_views &all) {
    const problem *p = c.of;
    const int64_t most_rows = unfused_rows(p), length = base.slice.q_length;
    cf_result code = CF_OK;
    score_params s = base;
    for (int64_t first = first_seeing(s.visible, s.slice); first < length; first += most_rows) {
        s.first_token = (int32_t)first;
        s.rows = (int32_t)std::min(most_rows, length - first);
        s.first_key = key_begin(s.visible, s.slice, s.first_token);
        s.n_keys = key_end(s.visible, s.slice, s.first_token + s.rows - 1) - s.first_key;
        if (s.n_keys <= 0) continue; /* a block of a prefix, before all windows */
        for (int64_t head = 0; head < p->desc.n_kv_heads; head++) {
            take_views(c, all, head, &s);
            s.lse = c.tensors->lse ? c.tensors->lse + head * p->group * s.lse_stride + s.slice.q_start : NULL;
            s.carried_rows = advance(base.carried_rows, 0, head * p->group, 4);
            s.carried_lse = base.carried_lse + head * p->group * length;
            code = c.backward ? unfused_backward_block(c, s) : unfused_forward_block(c, s);
            if (code != CF_OK) return code;
        }
    }
    return code;
}

cf_result use_stream(const call &c) {
    cudaStream_t now = NULL;
    if (c.tensors->cublas == NULL)
        return cf_fail(c.error, CF_ERROR_ARGUMENT, "cublas", -1, 1, 0, "must not be NULL on this path");
    cublasStatus_t status = cublasGetStream(c.tensors->cublas, &now);
    /* Setting a stream discards the handle's workspace, so it is set only if it differs. */
    if (status == CUBLAS_STATUS_SUCCESS && now != c.stream) status = cublasSetStream(c.tensors->cublas, c.stream);
    return check_cublas(c, status);
}

/* Writes the results of a slice's first n_rows rows: from their carried sums, or without any, those of rows that see no
   key. */
cf_result unfused_round(const call &c, const score_params &s, const attention_views &all, int64_t n_rows) {
    float *const lse = c.backward ? NULL : c.tensors->lse;
    const float *sums = reinterpret_cast<const float *>(s.carry != 0 ? s.carried_rows.data : NULL);
    const view to = advance(c.backward ? all.dq : all.out, s.slice.q_start, 0, bytes_of(c.of->desc.dtype));
    return round_rows(c, {sums, s.carried_lse, to, lse != NULL ? lse + s.slice.q_start : NULL, s.lse_stride, n_rows,
                          (int32_t)c.of->desc.n_heads, s.head_size, c.of->desc.dtype});
}

/* Zeroes rows that see no key, and, if the caller overwrites, the gradients of their keys. */
cf_result unfused_clear(const call &c, const score_params &s, const attention_views &all) {
    cf_result code = CF_OK;
    if (s.carry == 0) code = unfused_round(c, s, all, first_seeing(s.visible, s.slice));
    for (const view &sums : {all.dk, all.dv})
        if (code == CF_OK && c.backward && c.tensors->overwrite)
            code = clear_keys(c, advance(sums, s.slice.k_start, 0, 4), s.slice.k_length);
    return code;
}

cf_result unfused_slices(const call &c, const score_params &base, const attention_views &all) {
    const problem *p = c.of;
    const int64_t row_floats = p->desc.n_heads * p->desc.head_size;
    const int32_t carry = carry_of(c);
    cf_result code = CF_OK;
    each_slice(p, p->group, [&](const tile &slice, int32_t, int32_t carried) {
        score_params s = base;
        if (code != CF_OK || (carry == CARRY_LOAD && carried == 0)) return;
        s.slice = slice;
        s.carry = carried > 0 ? carry : 0;
        s.add_rows = !c.backward || (s.carry & CARRY_LOAD) != 0;
        if (carried > 0) {
            s.carried_rows.data += (carried - 1) * row_floats * (int64_t)sizeof(float);
            s.carried_lse += (carried - 1) * p->desc.n_heads;
        }
        code = s.carry == CARRY_LOAD ? unfused_round(c, s, all, slice.q_length) : unfused_clear(c, s, all);
        if (code == CF_OK && s.carry != CARRY_LOAD) code = unfused_slice(c, s, all);
    });
    return code;
}

cf_result run_unfused(const call &c) {
    const problem *p = c.of;
    const cf_attention_desc *d = &p->desc;
    const cf_attention_tensors *x = c.tensors;
    char *memory = static_cast<char *>(x->workspace) + unfused_carried_bytes(p);
    cublasPointerMode_t mode = CUBLAS_POINTER_MODE_HOST;
    score_params s = {};
    cf_result code = use_stream(c);
    if (code != CF_OK) return code;
    s.scores = reinterpret_cast<float *>(memory);
    s.probs = memory + unfused_scores_bytes(p, 4);
    s.dprobs = reinterpret_cast<float *>(memory + unfused_block_bytes(p));
    s.slopes = memory + unfused_block_bytes(p) + unfused_scores_bytes(p, 4);
    s.type = d->dtype;
    s.ld = scores_ld(p);
    s.visible = p->visible;
    s.group = (int32_t)p->group;
    s.head_size = (int32_t)d->head_size;
    s.lse_stride = x->lse_stride != 0 ? x->lse_stride : p->rows_q;
    s.scale = (float)d->scale;
    s.cap = (float)d->softcap;
    if (p->in_blocks) {
        const cf_tensor sums = {x->workspace, 0, 0};
        s.carried_rows = view_of(sums, d->n_heads, d->head_size);
        s.carried_lse = static_cast<float *>(x->workspace) +
                        carried_tiles(p, p->group) * d->n_heads * d->head_size;
    }
    code = check_cublas(c, cublasGetPointerMode(x->cublas, &mode));
    if (code == CF_OK) code = check_cublas(c, cublasSetPointerMode(x->cublas, CUBLAS_POINTER_MODE_HOST));
    if (code != CF_OK) return code;
    code = unfused_slices(c, s, views_of(c));
    const cublasStatus_t restored = cublasSetPointerMode(x->cublas, mode);
    return code == CF_OK ? check_cublas(c, restored) : code;
}

/* Puts runs of rows into k, from slice *s on, while there is room. Slices without rows between them are one run. */
void take_runs(const int32_t *starts, const int32_t *cu_seqlens, int64_t n_slices, int64_t *s, row_runs *k) {
    int64_t end = -1;
    int n = 0;
    for (k->n_rows = 0; *s < n_slices; ++*s) {
        const int32_t begin = starts[*s], length = cu_seqlens[*s + 1] - cu_seqlens[*s];
        if (length == 0) continue;
        if (begin != end && n == MOST_RUNS) return;
        if (begin != end) k->before[n] = k->n_rows, k->shift[n] = begin - k->n_rows, n++;
        k->n_rows += length;
        end = begin + length;
    }
    for (; n < MOST_RUNS; n++) k->before[n] = INT32_MAX;
}

/* ---- sinks ---- */

/* Applies sinks to out and lse, or adds to the sinks' gradients. Runs once all keys have been seen. */
cf_result add_sinks(const call &c) {
    const cf_attention_desc &d = c.of->desc;
    const cf_attention_tensors *x = c.tensors;
    const attention_views v = views_of(c);
    sink_params k = {};
    if (x->sinks == NULL || (c.backward && x->dsinks == NULL) || (c.of->in_blocks && !x->finish)) return CF_OK;
    k.out = v.out, k.dout = v.dout;
    k.sinks = x->sinks, k.dsinks = x->dsinks;
    k.lse = x->lse;
    k.lse_stride = x->lse_stride != 0 ? x->lse_stride : c.of->rows_q;
    k.n_heads = (int32_t)d.n_heads, k.head_size = (int32_t)d.head_size;
    k.type = d.dtype;
    cf_result code = CF_OK;
    for (int64_t s = 0; code == CF_OK;) {
        take_runs(d.starts_q, d.cu_seqlens_q, d.n_slices, &s, &k);
        if (k.n_rows == 0) break;
        code = c.backward ? launch<sinks_gradient_kernel>("sinks_gradient", k.n_heads, SINK_THREADS, 0, c.stream,
                                                          c.error, k)
                          : launch<sinks_kernel>("sinks", div_up((int64_t)k.n_rows * k.n_heads, UNFUSED_THREADS / 32),
                                                 UNFUSED_THREADS, 0, c.stream, c.error, k);
    }
    return code;
}

/* ---- the choice ---- */

/* Fastest first. */
struct path_entry {
    cf_attention_path path;
    const char *name;
    cf_result (*check)(const problem *p, cf_error *error); /* CF_OK if the path can do the problem */
    bool has_tiles; /* uses the list of tiles */
    size_t (*bytes)(const problem *p, bool backward); /* of workspace */
    cf_result (*run)(const call &c);
};

const path_entry paths[] = {
    {CF_ATTENTION_WGMMA, "wgmma", check_hopper, true, hopper_bytes, run_hopper},
    {CF_ATTENTION_MMA, "mma", check_fused, true, fused_bytes, run_fused},
    {CF_ATTENTION_UNFUSED, "unfused", check_unfused, false, unfused_bytes, run_unfused},
};
const path_entry *find_path(cf_attention_path path) {
    for (const path_entry &one : paths)
        if (one.path == number_of(path)) return &one;
    return NULL;
}

cf_result choose_path(const problem *p, const path_entry **out, cf_error *error) {
    const cf_attention_path wanted = p->desc.path;
    if (wanted == CF_ATTENTION_AUTO) {
        int i = 1; /* choose_hopper has already chosen path 3 if possible */
        while (paths[i].check(p, NULL) != CF_OK) i++; /* the last one can do everything */
        *out = &paths[i];
        return CF_OK;
    }
    *out = find_path(wanted);
    if (*out == NULL)
        return cf_fail(error, CF_ERROR_ARGUMENT, "path", -1, CF_ATTENTION_WGMMA, number_of(wanted),
                       "there is no such path");
    return (*out)->check(p, error);
}

/* Arrays of a descriptor that a prepared problem has copies of, before its tiles. The last two are optional. */
using desc_array = const int32_t *cf_attention_desc::*;
const desc_array copied_arrays[] = {
    &cf_attention_desc::cu_seqlens_q, &cf_attention_desc::cu_seqlens_k, &cf_attention_desc::starts_q,
    &cf_attention_desc::starts_k, &cf_attention_desc::begins, &cf_attention_desc::parents};

size_t array_bytes(const problem *p) { return align_up(((size_t)p->desc.n_slices + 1) * sizeof(int32_t), 16); }

size_t tiles_at(const problem *p) {
    size_t at = align_up(sizeof(problem), 16);
    for (const desc_array array : copied_arrays) at += p->desc.*array != NULL ? array_bytes(p) : 0;
    return at;
}

size_t prepared_bytes(const problem *p, const path_entry *path) {
    return tiles_at(p) + (path->has_tiles ? (size_t)fused_n_tiles(p) * sizeof(tile) : 0);
}

/* Makes the problem of a block of keys; an error if the chunk has no such block. */
cf_result make_block(const cf_attention *chunk, int64_t first, int64_t n, problem *p, cf_error *error) {
    if (chunk == NULL) return cf_fail_null(error, "chunk");
    const problem *of = static_cast<const problem *>(chunk);
    const bool is_level = n == 0 && of->n_levels > 0;
    const int64_t end = of->is_block || !of->in_blocks ? 0 : is_level ? of->n_levels : of->desc.prefix;
    if (first < 0 || first >= end)
        return cf_fail(error, CF_ERROR_ARGUMENT, "first", -1, end - 1, first, "out of range of the prefix");
    if (!is_level && (n < 1 || n > end - first))
        return cf_fail(error, CF_ERROR_ARGUMENT, "n", -1, end - first, n, "out of range of the prefix");
    return resolve_block(of, first, n, p, error);
}

/* Writes a prepared problem into the caller's memory. */
cf_result put_prepared(const problem &p, const path_entry *path, void *memory, size_t bytes, const cf_attention **out,
                       cf_error *error) {
    const size_t tiles = tiles_at(&p), need = prepared_bytes(&p, path);
    if (memory == NULL) return cf_fail_null(error, "memory");
    if (reinterpret_cast<uintptr_t>(memory) % CF_MEMORY_ALIGNMENT != 0)
        return cf_fail(error, CF_ERROR_SPACE, "memory", -1, CF_MEMORY_ALIGNMENT,
                       (int64_t)(reinterpret_cast<uintptr_t>(memory) % CF_MEMORY_ALIGNMENT), "misaligned");
    if (bytes < need)
        return cf_fail(error, CF_ERROR_SPACE, "bytes", -1, (int64_t)need, (int64_t)bytes, "too small");

    problem *a = new (memory) problem(p);
    char *const base = static_cast<char *>(memory), *to = base + align_up(sizeof(problem), 16);
    for (const desc_array array : copied_arrays) {
        const int32_t *&from = a->desc.*array;
        if (from == NULL) continue;
        const bool has_end = array == &cf_attention_desc::cu_seqlens_q || array == &cf_attention_desc::cu_seqlens_k;
        memcpy(to, from, ((size_t)p.desc.n_slices + has_end) * sizeof(int32_t));
        from = reinterpret_cast<const int32_t *>(to);
        to += array_bytes(&p);
    }
    a->path = path->path;
    a->forward_bytes = path->bytes(&p, false);
    a->backward_bytes = path->bytes(&p, true);
    a->tiles = to;
    a->tiles_bytes = need - tiles;
    a->n_split_forward_tiles = p.forward.n_split;
    a->n_split_key_tiles = p.backward.n_split;
    a->forward_section = p.forward.section;
    a->backward_section = p.backward.section;
    if (need > tiles) {
        a->n_key_tiles = fill_all_tiles(a, reinterpret_cast<tile *>(to));
    } else { /* no list */
        a->n_forward_tiles = a->n_row_tiles = a->n_all_key_tiles = 0;
        a->n_split_forward_tiles = a->n_split_key_tiles = a->forward_section = a->backward_section = 0;
    }
    *out = a;
    return CF_OK;
}

/* ---- checks of a call ---- */

/* Checks a tensor. Strides are limited to 2^40, so that no sum here or in a kernel, which counts in 64 bits,
   overflows. */
cf_result check_tensor(const cf_tensor &t, const char *name, int64_t number, int64_t rows, int64_t heads,
                       cf_error *error) {
    const int64_t unit = 16 / number, most = (int64_t)1 << 40;
    if (rows > 0 && t.data == NULL) return cf_fail_null(error, name);
    const cf_result code = check_aligned(t.data, 16, name, error);
    if (code != CF_OK) return code;
    for (const int64_t stride : {t.row_stride, t.head_stride})
        if (stride < 0 || stride > most || stride % unit != 0)
            return cf_fail(error, CF_ERROR_ARGUMENT, name, -1, unit, stride, "strides must be multiples of 16 bytes");
    const int64_t most_row = (INT64_MAX / 8 - t.head_stride * heads) / std::max<int64_t>(1, rows);
    if (t.row_stride <= most_row) return CF_OK;
    return cf_fail(error, CF_ERROR_OVERFLOW, name, -1, most_row, t.row_stride,
                   "row stride too large for this many rows");
}

cf_result check_call(const problem *p, const cf_attention_tensors *x, bool backward, cf_error *error) {
    if (p == NULL) return cf_fail_null(error, "attention");
    if (x == NULL) return cf_fail_null(error, "tensors");
    const int64_t number = bytes_of(p->desc.dtype), q = p->rows_q, k = p->rows_k;
    const int64_t heads = p->desc.n_heads, kv = p->desc.n_kv_heads;
    const size_t need = backward ? p->backward_bytes : p->forward_bytes;
    if (backward && x->overwrite && p->is_block && p->n == 0)
        return cf_fail(error, CF_ERROR_ARGUMENT, "overwrite", -1, 0, x->overwrite, "the chunk has begun these sums");
    if (x->finish && (!p->in_blocks || p->is_block))
        return cf_fail(error, CF_ERROR_ARGUMENT, "finish", -1, 0, x->finish, "only for a problem with a prefix");
    cf_result code = check_tensor(x->q, "q", number, q, heads, error);
    if (code == CF_OK) code = check_tensor(x->k, "k", number, k, kv, error);
    if (code == CF_OK) code = check_tensor(x->v, "v", number, k, kv, error);
    if (code == CF_OK) code = check_tensor(x->out, "out", number, q, heads, error);
    if (code == CF_OK && backward) code = check_tensor(x->dout, "dout", number, q, heads, error);
    if (code == CF_OK && backward) code = check_tensor(x->dq, "dq", number, q, heads, error);
    if (code == CF_OK && backward) code = check_tensor(x->dk, "dk", 4, k, kv, error);
    if (code == CF_OK && backward) code = check_tensor(x->dv, "dv", 4, k, kv, error);
    if (code == CF_OK) code = check_aligned(x->lse, sizeof(float), "lse", error);
    if (code == CF_OK) code = check_aligned(x->sinks, sizeof(float), "sinks", error);
    if (code == CF_OK) code = check_aligned(x->dsinks, sizeof(float), "dsinks", error);
    if (code != CF_OK) return code;
    if ((backward || x->sinks != NULL) && q > 0 && x->lse == NULL) return cf_fail_null(error, "lse");
    if (backward && x->dsinks != NULL && x->sinks == NULL) return cf_fail_null(error, "sinks");
    if (x->lse_stride != 0 && x->lse_stride < q)
        return cf_fail(error, CF_ERROR_ARGUMENT, "lse_stride", -1, q, x->lse_stride, "too small");
    if (p->tiles_bytes > 0 && (x->tiles == NULL || reinterpret_cast<uintptr_t>(x->tiles) % 16 != 0))
        return cf_fail(error, CF_ERROR_ARGUMENT, "tiles", -1, 1, 0,
                       "must be the device's copy of the tiles, aligned to 16");
    if (need > 0 && (x->workspace == NULL || reinterpret_cast<uintptr_t>(x->workspace) % 256 != 0))
        return cf_fail(error, CF_ERROR_ARGUMENT, "workspace", -1, 256, 0, "must be device memory, aligned to 256");
    if (x->workspace_bytes < need)
        return cf_fail(error, CF_ERROR_SPACE, "workspace_bytes", -1, (int64_t)need, (int64_t)x->workspace_bytes,
                       "too small");
    return CF_OK;
}

} /* namespace */

extern "C" {

const char *cf_attention_path_name(cf_attention_path path) {
    const path_entry *entry = find_path(path);
    return number_of(path) == CF_ATTENTION_AUTO ? "auto" : entry ? entry->name : "?";
}

cf_result cf_attention_size(const cf_attention_desc *desc, size_t *bytes, cf_error *error) {
    problem p;
    const path_entry *path = NULL;
    if (bytes == NULL) return cf_fail_null(error, "bytes");
    cf_result code = resolve(desc, &p, error);
    if (code == CF_OK) code = choose_path(&p, &path, error);
    if (code == CF_OK) *bytes = prepared_bytes(&p, path);
    return code;
}

cf_result cf_attention_prepare(const cf_attention_desc *desc, void *memory, size_t bytes, const cf_attention **out,
                               cf_error *error) {
    problem p;
    const path_entry *path = NULL;
    if (out == NULL) return cf_fail_null(error, "out");
    cf_result code = resolve(desc, &p, error);
    if (code == CF_OK) code = choose_path(&p, &path, error);
    return code == CF_OK ? put_prepared(p, path, memory, bytes, out, error) : code;
}

cf_result cf_attention_block_size(const cf_attention *chunk, int64_t first, int64_t n, size_t *bytes,
                                  cf_error *error) {
    problem p;
    if (bytes == NULL) return cf_fail_null(error, "bytes");
    const cf_result code = make_block(chunk, first, n, &p, error);
    if (code == CF_OK) *bytes = prepared_bytes(&p, find_path(chunk->path));
    return code;
}

cf_result cf_attention_block_prepare(const cf_attention *chunk, int64_t first, int64_t n, void *memory, size_t bytes,
                                     const cf_attention **out, cf_error *error) {
    problem p;
    if (out == NULL) return cf_fail_null(error, "out");
    const cf_result code = make_block(chunk, first, n, &p, error);
    return code == CF_OK ? put_prepared(p, find_path(chunk->path), memory, bytes, out, error) : code;
}

cf_result cf_attention_forward(const cf_attention *attention, const cf_attention_tensors *tensors,
                               cf_cuda_stream stream, cf_error *error) {
    const problem *p = static_cast<const problem *>(attention);
    const call c = {p, tensors, false, stream, error};
    cf_result code = check_call(p, tensors, false, error);
    if (code == CF_OK) code = find_path(p->path)->run(c);
    return code == CF_OK ? add_sinks(c) : code;
}

cf_result cf_attention_backward(const cf_attention *attention, const cf_attention_tensors *tensors,
                                cf_cuda_stream stream, cf_error *error) {
    const problem *p = static_cast<const problem *>(attention);
    cf_result code = check_call(p, tensors, true, error);
    if (code != CF_OK) return code;
    cf_attention_tensors x = *tensors;
    const call c = {p, &x, true, stream, error};
    const bool clears = x.overwrite && p->is_block && p->desc.begins != NULL; /* no slice sees all keys */
    for (const view &sums : {views_of(c).dk, views_of(c).dv})
        if (clears && code == CF_OK) code = clear_keys(c, sums, p->rows_k);
    x.overwrite = x.overwrite && !clears;
    if (code == CF_OK) code = find_path(p->path)->run(c);
    return code == CF_OK ? add_sinks(c) : code;
}

} /* extern "C" */

/* ================================================================================================================
   >>state    rows of K and V between projections, state and host memory
   ================================================================================================================ */

namespace {

const int STATE_THREADS = 256;
const int64_t APPEND_THREADS = (int64_t)1 << 18; /* threads that fill the largest device once */
const int64_t MOST_PITCH = INT32_MAX;            /* largest stride of CUDA's two-dimensional copies, on every device so
                                                    far */
const int64_t MOST_POSITIONS = (int64_t)1 << 31; /* a position is an int32_t */

/* The rotary table: rows of (cosine, sine) for `pairs` pairs. First the 2^shift fine rows, for positions below 2^shift;
   then the coarse rows, for multiples of 2^shift. */
struct rope_table {
    const float *rows; /* NULL: nothing turns */
    int32_t pairs, shift;
    int32_t last; /* greatest position */
    int32_t interleaved;
};

/* Parameters of the kernel between projections and state. Strides are in elements. */
struct append_params {
    view q, k, v, q_out, k_out, v_out, out;
    const int32_t *positions;
    int64_t rows;
    rope_table rope;
    divisor units, slots;
    int32_t block_rows;
    int32_t n_heads, n_kv_heads, head_size;
    int32_t backward;
};

/* Load or store V numbers as fp32, in accesses of 16 bytes, or one by one if V is 1. */
template <typename T, int V> CF_DEVICE void load_numbers(float (&x)[V], const char *from) {
    const int PER = 16 / (int)sizeof(T);
    if constexpr (V == 1) {
        x[0] = to_float<T>(*reinterpret_cast<const T *>(from));
    } else {
        CF_UNROLL
        for (int i = 0; i < V; i += PER) {
            const uint4 bits = global_load_16(from + i * (int)sizeof(T));
            T part[PER];
            memcpy(part, &bits, 16);
            CF_UNROLL
            for (int j = 0; j < PER; j++) x[i + j] = to_float<T>(part[j]);
        }
    }
}

template <typename T, int V> CF_DEVICE void store_numbers(char *to, const float (&x)[V]) {
    const int PER = 16 / (int)sizeof(T);
    if constexpr (V == 1) {
        *reinterpret_cast<T *>(to) = from_float<T>(x[0]);
    } else {
        CF_UNROLL
        for (int i = 0; i < V; i += PER) {
            uint4 bits;
            T part[PER];
            CF_UNROLL
            for (int j = 0; j < PER; j++) part[j] = from_float<T>(x[i + j]);
            memcpy(&bits, part, 16);
            global_store_16(to + i * (int)sizeof(T), bits);
        }
    }
}

/* Computes cosines and sines of V pairs, from `pair` on, at a position: those of the sum of a coarse and a fine angle,
   in the backward of minus that sum. A position past the table is taken for the last one, so that nothing outside it is
   read. */
template <int V>
CF_DEVICE void load_turns(float (&cosines)[V], float (&sines)[V], const rope_table &rope, int position, int pair,
                          bool backward) {
    const int at = position < rope.last ? position : rope.last;
    const int64_t fine_row = at & ((1 << rope.shift) - 1), coarse_row = ((int64_t)1 << rope.shift) + (at >> rope.shift);
    const char *fine = reinterpret_cast<const char *>(rope.rows + (fine_row * rope.pairs + pair) * 2);
    const char *coarse = reinterpret_cast<const char *>(rope.rows + (coarse_row * rope.pairs + pair) * 2);
    const int ACCESS = V == 1 ? 1 : 4; /* numbers of a load: half a pair, or two */
    float f[2 * V], c[2 * V];
    CF_UNROLL
    for (int i = 0; i < 2 * V; i += ACCESS) {
        float fine_part[ACCESS], coarse_part[ACCESS];
        load_numbers<float, ACCESS>(fine_part, fine + i * 4);
        load_numbers<float, ACCESS>(coarse_part, coarse + i * 4);
        CF_UNROLL
        for (int j = 0; j < ACCESS; j++) f[i + j] = fine_part[j], c[i + j] = coarse_part[j];
    }
    CF_UNROLL
    for (int i = 0; i < V; i++) {
        const float sine = fmaf(f[2 * i + 1], c[2 * i], __fmul_rn(f[2 * i], c[2 * i + 1]));
        cosines[i] = fmaf(f[2 * i], c[2 * i], -__fmul_rn(f[2 * i + 1], c[2 * i + 1]));
        sines[i] = backward ? -sine : sine;
    }
}

CF_DEVICE void turn(float &x, float &y, float cosine, float sine) {
    const float before = x;
    x = fmaf(before, cosine, -__fmul_rn(y, sine));
    y = fmaf(y, cosine, __fmul_rn(before, sine));
}

/* Rotates V pairs of the 2 V numbers x, y. Number i of x is paired with number i of y; if interleaved, neighbours are
   pairs. */
template <int V>
CF_DEVICE void turn_pairs(float (&x)[V], float (&y)[V], const float (&cosines)[V], const float (&sines)[V],
                          bool interleaved) {
    if constexpr (V > 1) {
        if (interleaved) {
            CF_UNROLL
            for (int i = 0; i < V / 2; i++) {
                turn(x[2 * i], x[2 * i + 1], cosines[i], sines[i]);
                turn(y[2 * i], y[2 * i + 1], cosines[V / 2 + i], sines[V / 2 + i]);
            }
            return;
        }
    }
    CF_UNROLL
    for (int i = 0; i < V; i++) turn(x[i], y[i], cosines[i], sines[i]);
}

/* The numbers of a head that one thread handles: V from `first` on and V from `second` on (none if that is past the
   head). Both ends of a pair belong to one thread, so an array may be rotated in place. */
template <int V> struct unit_work {
    int first, second;
    bool turning;
    float cosines[V], sines[V];
};

template <typename From, typename To, int V>
CF_DEVICE void move_unit(const view &from, const view &to, int64_t row, int head, int head_size,
                         const unit_work<V> &work, bool turning, bool interleaved, bool padding) {
    const char *in = from.data + (row * from.row + head * from.head) * (int64_t)sizeof(From);
    char *out = to.data + (row * to.row + head * to.head) * (int64_t)sizeof(To);
    const bool both = work.second < head_size;
    float x[V], y[V];
    CF_UNROLL
    for (int i = 0; i < V; i++) x[i] = y[i] = 0.0f;
    if (!padding) {
        load_numbers<From, V>(x, in + work.first * (int)sizeof(From));
        if (both) load_numbers<From, V>(y, in + work.second * (int)sizeof(From));
        if (turning) turn_pairs<V>(x, y, work.cosines, work.sines, interleaved);
    }
    store_numbers<To, V>(out + work.first * (int)sizeof(To), x);
    if (both) store_numbers<To, V>(out + work.second * (int)sizeof(To), y);
}

/* Moves rows between projections and state. A head is cut into units of 2 V numbers. A thread has one unit of one row
   and loops over every `slots`-th head of q, k and v, so that it computes its cosines and sines once. Neighbouring
   threads have neighbouring units, then neighbouring heads. KV: type of k and v where they are read. */
template <typename T, typename KV, int V>
__global__ void __launch_bounds__(STATE_THREADS) append_kernel(const __grid_constant__ append_params p) {
    const int thread = (int)threadIdx.x, unit = thread - thread / p.units * p.units.by;
    const int rest = thread / p.units, block_row = rest / p.slots, slot = rest - block_row * p.slots.by;
    const int64_t row = (int64_t)blockIdx.x * p.block_rows + block_row;
    if (block_row >= p.block_rows || row >= p.rows) return;
    const int position = p.positions[row], pair = unit * V;
    const bool padding = position < 0, interleaved = p.rope.interleaved != 0;
    unit_work<V> work;
    work.turning = p.rope.rows != NULL && pair < p.rope.pairs && !padding;
    const bool split = pair < p.rope.pairs && !interleaved;
    work.first = split ? pair : 2 * pair;
    work.second = split ? p.rope.pairs + pair : 2 * pair + V;
    if (work.turning) load_turns<V>(work.cosines, work.sines, p.rope, position, pair, p.backward != 0);
    const int upto = padding && !p.backward ? p.n_heads : p.n_heads + 2 * p.n_kv_heads;
    for (int head = slot; head < upto; head += p.slots.by) {
        const int k_head = head - p.n_heads, v_head = k_head - p.n_kv_heads;
        if (k_head < 0)
            move_unit<T, T, V>(p.q, p.q_out, row, head, p.head_size, work, work.turning, interleaved, padding);
        else if (v_head < 0)
            move_unit<KV, T, V>(p.k, p.k_out, row, k_head, p.head_size, work, work.turning, interleaved, padding);
        else
            move_unit<KV, T, V>(p.v, p.v_out, row, v_head, p.head_size, work, false, interleaved, padding);
        if (padding && k_head < 0 && p.out.data != NULL)
            move_unit<T, T, V>(p.q, p.out, row, head, p.head_size, work, false, interleaved, padding);
    }
}

/* Parameters of sums of rows of dK and dV. */
struct add_params : row_runs {
    view from_k, from_v, to_k, to_v; /* in elements */
    int32_t n_heads;
    divisor pieces; /* of eight numbers, of a head */
    int32_t overwrite;
    cf_dtype type; /* of the rows that are added */
};

/* Adds rows to rows of fp32, or overwrites these. One warp for each row of dK and of dV. */
__global__ void __launch_bounds__(STATE_THREADS) add_rows_kernel(const __grid_constant__ add_params p) {
    const int64_t at = (int64_t)blockIdx.x * (STATE_THREADS / 32) + (int64_t)threadIdx.x / 32, index = at / 2;
    if (index >= p.n_rows) return;
    const int64_t row = row_in_slices(p, index);
    const view &from = at % 2 ? p.from_v : p.from_k, &to = at % 2 ? p.to_v : p.to_k;
    for (int i = (int)threadIdx.x % 32; i < p.n_heads * p.pieces.by; i += 32) {
        const int head = i / p.pieces, first = (i - head * p.pieces.by) * 8;
        char *const sums = to.data + (row * to.row + head * to.head + first) * (int64_t)sizeof(float);
        float x[8], y[8] = {};
        const int64_t place = row * from.row + head * from.head + first;
        if (p.type == CF_DTYPE_FP32) load_numbers<float, 8>(x, from.data + place * 4);
        else if (p.type == CF_DTYPE_FP16) load_numbers<__half, 8>(x, from.data + place * 2);
        else load_numbers<__nv_bfloat16, 8>(x, from.data + place * 2);
        if (!p.overwrite) load_numbers<float, 8>(y, sums);
        CF_UNROLL
        for (int e = 0; e < 8; e++) y[e] += x[e];
        store_numbers<float, 8>(sums, y);
    }
}

/* ---- planes ---- */

/* Sizes of a state, in bytes. */
struct planes {
    int64_t row_bytes;
    int64_t stride; /* from plane to plane */
};

/* True if a x b, neither negative, is more than `most`. */
bool product_above(int64_t a, int64_t b, int64_t most) { return b > 0 && a > most / b; }

/* Finds the sizes of a state. Returns false if it is not sound, or has 2^63 bytes or more. */
bool find_planes(const cf_state *s, planes *to) {
    const int type = number_of(s->dtype);
    if (s->n_layers < 0 || s->n_kv_heads < 1 || s->head_size < 1 || s->rows < 0) return false;
    if (type < 0 || type > CF_DTYPE_FP32 || product_above(s->n_kv_heads, s->head_size, INT64_MAX / 4)) return false;
    if (s->n_kv_heads * s->head_size % 8 != 0 || s->n_layers > INT64_MAX / 2) return false;
    const int64_t n = s->n_layers > 0 && s->one_layer ? 2 : 2 * s->n_layers;
    to->row_bytes = s->n_kv_heads * s->head_size * bytes_of(s->dtype);
    if (product_above(s->rows, to->row_bytes, INT64_MAX / std::max<int64_t>(1, n))) return false;
    to->stride = s->rows * to->row_bytes;
    return true;
}

/* Copies n pieces of `width` bytes, with strides on both sides: in one call, unless CUDA does not take the stride. */
cf_result copy_pieces(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t width, int64_t n,
                      cudaMemcpyKind kind, cf_cuda_stream stream, const char *what, cf_error *error) {
    cudaError_t status = cudaSuccess;
    if (width == 0 || n == 0) return CF_OK;
    if (n == 1 || (to_stride == width && from_stride == width)) {
        status = cudaMemcpyAsync(to, from, (size_t)(n * width), kind, stream);
    } else if (to_stride <= MOST_PITCH && from_stride <= MOST_PITCH) {
        status =
            cudaMemcpy2DAsync(to, (size_t)to_stride, from, (size_t)from_stride, (size_t)width, (size_t)n, kind, stream);
    } else {
        for (int64_t i = 0; i < n && status == cudaSuccess; i++)
            status = cudaMemcpyAsync(to + i * to_stride, from + i * from_stride, (size_t)width, kind, stream);
    }
    return cuda_result(error, status, what);
}

cf_tensor plane_tensor(const cf_state *state, int64_t layer, int64_t row, int64_t which) {
    cf_tensor t = {NULL, 0, 0};
    planes p = {};
    if (state == NULL || state->data == NULL || !find_planes(state, &p)) return t;
    if (layer < 0 || layer >= state->n_layers || row < 0 || row >= state->rows) return t;
    const int64_t plane = 2 * (state->one_layer ? 0 : layer) + which;
    t.data = static_cast<char *>(state->data) + plane * p.stride + row * p.row_bytes;
    t.row_stride = state->n_kv_heads * state->head_size;
    t.head_stride = state->head_size;
    return t;
}

/* ---- streaming ---- */

const int64_t MOST_STREAM_SLOTS = 64;

/* A slot of the ring: a block of K and V, and one of dK and dV. A wait for an event that was never recorded ends at
   once. */
struct stream_slot {
    cudaEvent_t loaded, used, written;
};

const int64_t MOST_PARTS = 65; /* chains on a path: the chunk's and those above it */

/* The rows that one turn of a pass moves, of one layer and one chain. */
struct stream_item {
    int64_t layer, index, part, first, n;
    bool own;
};

/* A chain's rows on the path: which of them the pass reads, and the number of its first block. */
struct stream_part {
    cf_state state, gradient;
    int64_t seen, end, first_block;
};

struct state_stream {
    cf_state_stream_desc desc;
    cf_allocator from;
    planes state, gradient; /* of one layer's slot */
    stream_slot slots[MOST_STREAM_SLOTS];
    cudaEvent_t ready, sent; /* ready: rows that are to leave are computed; sent: all rows that left so far have
                                arrived */
    cf_state_pass pass;
    bool backward;
    stream_part parts[MOST_PARTS]; /* the last one is the chunk's chain */
    int64_t n_parts;
    int64_t touched;            /* first row of the chunk's chain with a gradient to load */
    int64_t n_own, n_prefix;    /* blocks of a layer */
    int64_t issued, taken;      /* blocks of all layers: whose copies were issued; that were returned */
    int64_t layer, place;       /* layers that are done; blocks of the current layer that were returned */
    bool holds;                 /* the last block is still in use */
};

/* Returns the first row that a query after `prefix` rows sees. */
int64_t first_seen_row(int64_t prefix, int64_t window) {
    return window > 0 ? std::max<int64_t>(0, prefix - window + 1) : 0;
}

/* Counts the blocks of a range of rows. Blocks end at multiples of block_rows. */
int64_t n_blocks_of(int64_t first, int64_t end, int64_t block_rows) {
    return first < end ? (end - 1) / block_rows - first / block_rows + 1 : 0;
}

int64_t block_of(int64_t first, int64_t end, int64_t block_rows, int64_t index, int64_t *row) {
    if (index < 0 || index >= n_blocks_of(first, end, block_rows)) return 0;
    const int64_t number = first / block_rows + index;
    *row = std::max(first, number * block_rows);
    return (end - 1) / block_rows > number ? (number + 1) * block_rows - *row : end - *row;
}

cf_state one_layer_of(const cf_state_stream_desc *d, cf_dtype dtype) {
    cf_state s = d->state;
    s.data = NULL;
    s.dtype = dtype;
    s.n_layers = 1;
    s.rows = d->block_rows;
    s.one_layer = 0;
    return s;
}

/* Returns block number `turn` of a pass, counted through all layers. */
stream_item item_at(const state_stream *s, int64_t turn) {
    const int64_t per_layer = s->n_own + s->n_prefix, layer = turn / per_layer, place = turn % per_layer;
    const int64_t end = s->pass.prefix + s->pass.own, rows = s->desc.block_rows;
    stream_item i = {};
    i.layer = s->backward ? s->pass.state.n_layers - 1 - layer : layer;
    i.index = place - s->n_own;
    i.part = s->n_parts - 1;
    i.own = place < s->n_own;
    while (!i.own && s->parts[i.part].first_block > i.index) i.part--;
    const stream_part &part = s->parts[i.part];
    i.n = i.own ? block_of(std::max(s->touched, s->pass.prefix), end, rows, place, &i.first)
                : block_of(part.seen, part.end, rows, i.index - part.first_block, &i.first);
    return i;
}

char *slot_data(void *ring, const planes &slot, int64_t number) {
    return static_cast<char *>(ring) + number * 2 * slot.stride;
}

/* Copies n rows of both planes of a layer between host memory, from row `first` on, and a slot, from row `at` on. */
cf_result copy_block(const cf_state *host, int64_t layer, int64_t first, int64_t n, char *slot, const planes &of,
                     int64_t at, bool in, cudaStream_t stream, cf_error *error) {
    const int64_t width = n * of.row_bytes, pitch = host->rows * of.row_bytes;
    char *rows = static_cast<char *>(host->data) + 2 * layer * pitch + first * of.row_bytes;
    char *to = slot + at * of.row_bytes;
    return in ? copy_pieces(to, of.stride, rows, pitch, width, 2, cudaMemcpyHostToDevice, stream, "state", error)
              : copy_pieces(rows, pitch, to, of.stride, width, 2, cudaMemcpyDeviceToHost, stream, "state", error);
}

/* Loads the gradients of a block. Rows without a gradient so far, which come before all others, begin at 0. */
cf_result load_gradient(const state_stream *s, const stream_item &i, char *slot, cf_error *error) {
    const planes &of = s->gradient;
    const bool above = i.part + 1 < s->n_parts;
    const int64_t fresh = above ? 0 : std::max<int64_t>(0, std::min(i.n, s->touched - i.first));
    cudaError_t status = cudaSuccess;
    for (int64_t plane = 0; plane < 2 && fresh > 0 && status == cudaSuccess; plane++)
        status = cudaMemsetAsync(slot + plane * of.stride, 0, (size_t)(fresh * of.row_bytes), s->desc.in);
    if (status != cudaSuccess) return cuda_result(error, status, "state");
    return copy_block(&s->parts[i.part].gradient, i.layer, i.first + fresh, i.n - fresh, slot, of, fresh, true,
                      s->desc.in, error);
}

cf_result record(cudaEvent_t event, cudaStream_t stream, cf_error *error) {
    return cuda_result(error, cudaEventRecord(event, stream), "event");
}

cf_result hold(cudaStream_t stream, cudaEvent_t event, cf_error *error) {
    return cuda_result(error, cudaStreamWaitEvent(stream, event, 0), "event");
}

/* Puts the next block's copies on their stream, after the last use of its slot and after its earlier rows have left. */
cf_result issue_block(state_stream *s, cf_error *error) {
    const stream_item i = item_at(s, s->issued);
    const int64_t number = s->issued % s->desc.n_slots;
    const stream_slot &slot = s->slots[number];
    cf_result code = hold(s->desc.in, slot.used, error);
    if (code == CF_OK && !i.own)
        code = copy_block(&s->parts[i.part].state, i.layer, i.first, i.n, slot_data(s->desc.ring, s->state, number),
                          s->state, 0, true, s->desc.in, error);
    if (code == CF_OK && s->backward) code = hold(s->desc.in, slot.written, error);
    if (code == CF_OK && s->backward)
        code = load_gradient(s, i, slot_data(s->desc.gradient_ring, s->gradient, number), error);
    if (code == CF_OK) code = record(slot.loaded, s->desc.in, error);
    if (code == CF_OK) s->issued++;
    return code;
}

int64_t n_items(const state_stream *s) { return s->pass.state.n_layers * (s->n_own + s->n_prefix); }

/* Releases the block in use: once `compute` reaches this point, its gradients leave and its slot is filled again. */
cf_result release_block(state_stream *s, cudaStream_t compute, bool refill, cf_error *error) {
    if (!s->holds) return CF_OK;
    const stream_item i = item_at(s, s->taken - 1);
    const int64_t number = (s->taken - 1) % s->desc.n_slots;
    const stream_slot &slot = s->slots[number];
    cf_result code = record(slot.used, compute, error);
    if (code == CF_OK && s->backward && !i.own) {
        code = hold(s->desc.out, slot.used, error);
        if (code == CF_OK)
            code = copy_block(&s->parts[i.part].gradient, i.layer, i.first, i.n,
                              slot_data(s->desc.gradient_ring, s->gradient, number), s->gradient, 0, false, s->desc.out,
                              error);
        if (code == CF_OK) code = record(slot.written, s->desc.out, error);
    }
    s->holds = code != CF_OK; /* so that a repeated call loses no gradients */
    return code == CF_OK && refill && s->issued < n_items(s) ? issue_block(s, error) : code;
}

/* Returns the next block, whose copies are issued now if they could not be before. */
cf_result take_block(state_stream *s, cudaStream_t compute, cf_state_block *to, cf_error *error) {
    const int64_t number = s->taken % s->desc.n_slots;
    const stream_item i = item_at(s, s->taken);
    cf_result code = CF_OK;
    while (code == CF_OK && s->issued <= s->taken) code = issue_block(s, error);
    if (code == CF_OK) code = hold(compute, s->slots[number].loaded, error);
    if (code != CF_OK) return code;
    to->layer = i.layer, to->first_row = i.first, to->n_rows = i.n, to->own = i.own;
    to->index = i.own ? -1 : i.index;
    to->state = one_layer_of(&s->desc, s->desc.state.dtype);
    to->gradient = one_layer_of(&s->desc, CF_DTYPE_FP32);
    if (!i.own) to->state.data = slot_data(s->desc.ring, s->state, number);
    if (s->backward) to->gradient.data = slot_data(s->desc.gradient_ring, s->gradient, number);
    s->taken++, s->place++;
    s->holds = true;
    return CF_OK;
}

cf_result add_rows(const add_params &p, cf_cuda_stream stream, cf_error *error) {
    return launch<add_rows_kernel>("add_rows", div_up(2 * (int64_t)p.n_rows, STATE_THREADS / 32), STATE_THREADS, 0,
                                   stream, error, p);
}

/* Checks K or V of the chunk's rows, each contiguous. *stride: bytes from row to row. */
cf_result check_whole_rows(const state_stream *s, const cf_tensor *t, const char *name, int64_t *stride,
                           cf_error *error) {
    const int64_t number = bytes_of(s->desc.state.dtype), head_size = s->desc.state.head_size;
    const cf_result code = check_tensor(*t, name, number, s->pass.own, 1, error);
    if (code != CF_OK) return code;
    *stride = t->row_stride != 0 ? t->row_stride * number : s->state.row_bytes;
    if (t->head_stride != 0 && t->head_stride != head_size)
        return cf_fail(error, CF_ERROR_ARGUMENT, name, -1, head_size, t->head_stride, "no gaps between heads here");
    if (*stride < s->state.row_bytes)
        return cf_fail(error, CF_ERROR_ARGUMENT, name, -1, s->state.row_bytes, *stride, "rows overlap");
    return CF_OK;
}

/* Copies the rows that later chunks see out of K and V. These are complete once `out` reaches this point. */
cf_result send_rows(const state_stream *s, int64_t layer, const cf_tensor *tensors[2], const int64_t strides[2],
                    cf_error *error) {
    const cf_state_pass *p = &s->pass;
    const int64_t end = p->prefix + p->own, first = std::max(p->prefix, first_seen_row(end, p->window));
    const int64_t bytes = s->state.row_bytes;
    char *plane = static_cast<char *>(p->state.data) + (2 * layer * p->state.rows + first) * bytes;
    cf_result code = CF_OK;
    for (int64_t i = 0; i < 2 && code == CF_OK; i++)
        code = copy_pieces(plane + i * p->state.rows * bytes, bytes,
                           static_cast<const char *>(tensors[i]->data) + (first - p->prefix) * strides[i], strides[i],
                           bytes, end - first, cudaMemcpyDeviceToHost, s->desc.out, "state", error);
    return code;
}

void add_part(state_stream *s, const cf_state &state, const cf_state &gradient, int64_t seen, int64_t end) {
    s->parts[s->n_parts++] = {state, gradient, seen, end, s->n_prefix};
    s->n_prefix += n_blocks_of(seen, end, s->desc.block_rows);
}

state_stream *opened_stream(cf_state_stream *s) { return reinterpret_cast<state_stream *>(s); }

template <typename F> void each_event(state_stream *s, F visit) {
    visit(&s->ready);
    visit(&s->sent);
    for (int64_t i = 0; i < s->desc.n_slots; i++) {
        visit(&s->slots[i].loaded);
        visit(&s->slots[i].used);
        visit(&s->slots[i].written);
    }
}

void free_stream(state_stream *s) {
    const cf_allocator from = s->from;
    each_event(s, [](cudaEvent_t *event) {
        if (*event != NULL) (void)cudaEventDestroy(*event);
    });
    from.release(s, from.user);
}

/* ---- rotary table ---- */

cf_result check_rope(const cf_rope *rope, int64_t head_size, rope_table *to, cf_error *error) {
    if (rope == NULL) return cf_fail_null(error, "rope");
    cf_result code = check_head_size(head_size, error);
    if (code != CF_OK) return code;
    if (rope->rotated < 0 || rope->rotated > head_size || rope->rotated % 2 != 0)
        return cf_fail(error, CF_ERROR_ARGUMENT, "rotated", -1, head_size, rope->rotated,
                       "must be even, and at most head_size");
    code = check_range(rope->n_positions, 1, MOST_POSITIONS, "n_positions", -1, error);
    if (code == CF_OK) code = check_aligned(rope->table, 16, "table", error);
    if (code != CF_OK) return code;
    to->rows = rope->table;
    to->pairs = (int32_t)((rope->rotated != 0 ? rope->rotated : head_size) / 2);
    to->shift = 0;
    while ((int64_t)1 << 2 * to->shift < rope->n_positions) to->shift++;
    to->last = (int32_t)(rope->n_positions - 1);
    to->interleaved = rope->interleaved != 0;
    return CF_OK;
}

int64_t fine_rows(const rope_table &t) { return (int64_t)1 << t.shift; }
int64_t coarse_rows(const rope_table &t) { return ((int64_t)t.last >> t.shift) + 1; }

size_t table_bytes(const rope_table &t) {
    return (size_t)(fine_rows(t) + coarse_rows(t)) * (size_t)t.pairs * 2 * sizeof(float);
}

cf_result check_frequencies(const cf_rope *rope, const rope_table &t, cf_error *error) {
    if (rope->frequencies == NULL && rope->base != 0.0 && !(rope->base > 0.0 && rope->base <= DBL_MAX))
        return cf_fail_real(error, CF_ERROR_ARGUMENT, "base", -1, rope->base, "must be a positive finite number");
    for (int32_t i = 0; i < t.pairs && rope->frequencies != NULL; i++)
        if (!(std::fabs(rope->frequencies[i]) <= 1e6))
            return cf_fail_real(error, CF_ERROR_ARGUMENT, "frequencies", i, rope->frequencies[i],
                                "must be finite, at most 1e6");
    return CF_OK;
}

/* ---- append ---- */

/* Checks the descriptor and makes the kernel's parameters. *vector: whether every access can be of 16 bytes. */
cf_result resolve_append(const cf_append *a, int backward, append_params *p, cf_dtype *dtype, bool *vector,
                         cf_error *error) {
    cf_attention_desc d = {};
    if (a == NULL) return cf_fail_null(error, "append");
    if (a->rows < 0) return cf_fail(error, CF_ERROR_ARGUMENT, "rows", -1, 0, a->rows, "must not be negative");
    if (a->rows > MOST_ROWS) return cf_fail(error, CF_ERROR_LIMIT, "rows", -1, MOST_ROWS, a->rows, "too many rows");
    d.n_heads = a->n_heads;
    d.n_kv_heads = a->n_kv_heads;
    d.head_size = a->head_size;
    memcpy(&d.dtype, &a->dtype, sizeof d.dtype); /* may be any int until it is checked */
    cf_result code = check_numbers(&d, error);
    if (code != CF_OK) return code;
    if (a->rows > 0 && a->positions == NULL) return cf_fail_null(error, "positions");
    code = check_aligned(a->positions, sizeof(int32_t), "positions", error);
    *p = append_params();
    if (code == CF_OK && a->rope.table != NULL) code = check_rope(&a->rope, d.head_size, &p->rope, error);
    const int64_t number = bytes_of(d.dtype), kv_number = backward ? 4 : number;
    if (code == CF_OK) code = check_tensor(a->q, "q", number, a->rows, d.n_heads, error);
    if (code == CF_OK) code = check_tensor(a->k, "k", kv_number, a->rows, d.n_kv_heads, error);
    if (code == CF_OK) code = check_tensor(a->v, "v", kv_number, a->rows, d.n_kv_heads, error);
    if (code == CF_OK) code = check_tensor(a->q_out, "q_out", number, a->rows, d.n_heads, error);
    if (code == CF_OK) code = check_tensor(a->k_out, "k_out", number, a->rows, d.n_kv_heads, error);
    if (code == CF_OK) code = check_tensor(a->v_out, "v_out", number, a->rows, d.n_kv_heads, error);
    if (code == CF_OK && !backward && a->out.data != NULL)
        code = check_tensor(a->out, "out", number, a->rows, d.n_heads, error);
    if (code != CF_OK) return code;
    p->q = view_of(a->q, d.n_heads, d.head_size);
    p->k = view_of(a->k, d.n_kv_heads, d.head_size);
    p->v = view_of(a->v, d.n_kv_heads, d.head_size);
    p->q_out = view_of(a->q_out, d.n_heads, d.head_size);
    p->k_out = view_of(a->k_out, d.n_kv_heads, d.head_size);
    p->v_out = view_of(a->v_out, d.n_kv_heads, d.head_size);
    if (!backward) p->out = view_of(a->out, d.n_heads, d.head_size);
    p->positions = a->positions;
    p->rows = a->rows;
    p->n_heads = (int32_t)d.n_heads;
    p->n_kv_heads = (int32_t)d.n_kv_heads;
    p->head_size = (int32_t)d.head_size;
    p->backward = backward;
    *dtype = d.dtype;
    const int32_t per_access = (int32_t)(16 / number);
    *vector = p->rope.pairs % per_access == 0;
    /* Threads of a row: so many that each loops over 8 heads, and more if rows are few. */
    const int32_t units = div_up(d.head_size, 2 * (*vector ? per_access : 1));
    const int64_t heads = d.n_heads + 2 * d.n_kv_heads, most = std::min<int64_t>(heads, STATE_THREADS / units);
    const int64_t fill = APPEND_THREADS / (std::max<int64_t>(1, a->rows) * units);
    const int32_t slots = (int32_t)std::min(most, std::max<int64_t>(div_up(heads, 8), fill));
    p->units = make_divisor(units);
    p->slots = make_divisor(slots);
    p->block_rows = STATE_THREADS / (units * slots);
    return CF_OK;
}

template <typename T, typename KV>
cf_result launch_append(const append_params &p, bool vector, cf_cuda_stream stream, cf_error *error) {
    const char *const name = p.backward ? "append_backward" : "append_forward";
    const int64_t blocks = div_up(p.rows, p.block_rows);
    return vector ? launch<append_kernel<T, KV, 16 / (int)sizeof(T)>>(name, blocks, STATE_THREADS, 0, stream, error, p)
                  : launch<append_kernel<T, KV, 1>>(name, blocks, STATE_THREADS, 0, stream, error, p);
}

cf_result append(const cf_append *a, int backward, cf_cuda_stream stream, cf_error *error) {
    append_params p;
    cf_dtype dtype = CF_DTYPE_FP32;
    bool vector = false;
    const cf_result code = resolve_append(a, backward, &p, &dtype, &vector, error);
    if (code != CF_OK) return code;
    if (dtype == CF_DTYPE_FP32) return launch_append<float, float>(p, vector, stream, error);
    if (dtype == CF_DTYPE_BF16)
        return backward ? launch_append<__nv_bfloat16, float>(p, vector, stream, error)
                        : launch_append<__nv_bfloat16, __nv_bfloat16>(p, vector, stream, error);
    return backward ? launch_append<__half, float>(p, vector, stream, error)
                    : launch_append<__half, __half>(p, vector, stream, error);
}

} /* namespace */

extern "C" {

cf_tensor cf_state_k(const cf_state *state, int64_t layer, int64_t row) { return plane_tensor(state, layer, row, 0); }
cf_tensor cf_state_v(const cf_state *state, int64_t layer, int64_t row) { return plane_tensor(state, layer, row, 1); }

cf_result cf_attention_add(const cf_attention *attention, const cf_tensor *dk, const cf_tensor *dv,
                           const cf_attention_tensors *tensors, cf_cuda_stream stream, cf_error *error) {
    const void *const needed[] = {attention, dk, dv, tensors};
    const char *const names[] = {"attention", "dk", "dv", "tensors"};
    for (int i = 0; i < 4; i++)
        if (needed[i] == NULL) return cf_fail_null(error, names[i]);
    const cf_attention_desc &d = attention->desc;
    const cf_tensor *const all[] = {dk, dv, &tensors->dk, &tensors->dv};
    cf_result code = CF_OK;
    for (int i = 0; i < 4 && code == CF_OK; i++)
        code = check_tensor(*all[i], i % 2 ? "dv" : "dk", i < 2 ? bytes_of(d.dtype) : 4, attention->rows_k,
                            d.n_kv_heads, error);
    if (code != CF_OK) return code;
    add_params p = {};
    view *const views[] = {&p.from_k, &p.from_v, &p.to_k, &p.to_v};
    for (int i = 0; i < 4; i++) *views[i] = view_of(*all[i], d.n_kv_heads, d.head_size);
    p.n_heads = (int32_t)d.n_kv_heads;
    p.pieces = make_divisor((int32_t)(d.head_size / 8));
    p.overwrite = tensors->overwrite;
    p.type = d.dtype;
    for (int64_t s = 0; code == CF_OK;) {
        take_runs(d.starts_k, d.cu_seqlens_k, d.n_slices, &s, &p);
        if (p.n_rows == 0) break;
        code = add_rows(p, stream, error);
    }
    return code;
}

cf_result cf_state_stream_create(const cf_state_stream_desc *desc, cf_state_stream **out, cf_error *error) {
    cf_allocator from;
    void *memory = NULL;
    cf_result code = cf_allocator_resolve(desc->allocator, &from, error);
    if (code == CF_OK) code = cf_allocate(&from, sizeof(state_stream), &memory, error);
    if (code != CF_OK) return code;
    state_stream *s = new (memory) state_stream();
    s->desc = *desc;
    s->from = from;
    const cf_state slot = one_layer_of(desc, desc->state.dtype), gradient_slot = one_layer_of(desc, CF_DTYPE_FP32);
    (void)find_planes(&slot, &s->state);
    (void)find_planes(&gradient_slot, &s->gradient);
    each_event(s, [&](cudaEvent_t *event) {
        if (code != CF_OK) return;
        code = cuda_result(error, cudaEventCreateWithFlags(event, cudaEventDisableTiming), "event");
    });
    if (code == CF_OK) *out = reinterpret_cast<cf_state_stream *>(s);
    else free_stream(s);
    return code;
}

void cf_state_stream_free(cf_state_stream *stream) {
    if (stream != NULL) free_stream(opened_stream(stream));
}

int64_t cf_state_stream_block(int64_t block_rows, int64_t prefix, int64_t window, int64_t index, int64_t *first_row) {
    int64_t row = 0;
    if (block_rows < 1 || prefix < 0 || prefix > MOST_ROWS || window < 0) return 0;
    const int64_t n = block_of(first_seen_row(prefix, window), prefix, block_rows, index, &row);
    if (n > 0 && first_row != NULL) *first_row = row;
    return n;
}

cf_result cf_state_stream_begin(cf_state_stream *stream, const cf_state_pass *pass, cf_error *error) {
    state_stream *s = opened_stream(stream);
    const int64_t end = pass->prefix + pass->own, rows = s->desc.block_rows;
    s->pass = *pass;
    s->backward = pass->gradient.data != NULL;
    s->touched = pass->overwrite ? end : first_seen_row(end, pass->window);
    s->n_own = s->backward ? n_blocks_of(std::max(s->touched, pass->prefix), end, rows) : 0;
    s->n_parts = s->n_prefix = 0;
    int64_t hidden = pass->hidden;
    for (int64_t i = 0; i < pass->n_above; i++) {
        const cf_state_part &part = pass->above[i];
        add_part(s, part.state, part.gradient, std::min(hidden, part.rows), part.rows);
        hidden -= std::min(hidden, part.rows);
    }
    hidden = std::max(hidden, first_seen_row(pass->prefix, pass->window));
    add_part(s, pass->state, pass->gradient, hidden, pass->prefix);
    s->issued = s->taken = s->layer = s->place = 0;
    s->holds = false;
    cf_result code = record(s->sent, s->desc.out, error);
    if (code == CF_OK) code = hold(s->desc.in, s->sent, error);
    while (code == CF_OK && s->issued < std::min(s->desc.n_slots, n_items(s))) code = issue_block(s, error);
    return code;
}

cf_result cf_state_stream_next(cf_state_stream *stream, cf_cuda_stream compute, cf_state_block *out, cf_error *error) {
    state_stream *s = opened_stream(stream);
    cf_state_block block = {};
    const int64_t n_layers = s->pass.state.n_layers;
    if (s->layer >= n_layers)
        return cf_fail(error, CF_ERROR_ARGUMENT, "stream", -1, n_layers, s->layer + 1, "all layers are done");
    block.layer = s->backward ? n_layers - 1 - s->layer : s->layer;
    cf_result code = release_block(s, compute, true, error);
    if (code == CF_OK && s->place < s->n_own + s->n_prefix) {
        code = take_block(s, compute, &block, error);
    } else if (code == CF_OK) {
        s->layer++;
        s->place = 0;
    }
    if (code == CF_OK) *out = block;
    return code;
}

cf_result cf_state_stream_add(const cf_state_stream *stream, const cf_state_block *block, const cf_tensor *dk,
                              const cf_tensor *dv, cf_cuda_stream compute, cf_error *error) {
    const cf_state_pass &pass = reinterpret_cast<const state_stream *>(stream)->pass;
    const int64_t row = block->first_row - pass.prefix, heads = pass.state.n_kv_heads, size = pass.state.head_size;
    add_params p = {};
    p.n_rows = (int32_t)block->n_rows;
    p.from_k = view_of(cf_state_k(&block->gradient, 0, 0), heads, size);
    p.from_v = view_of(cf_state_v(&block->gradient, 0, 0), heads, size);
    p.to_k = advance(view_of(*dk, heads, size), row, 0, 4);
    p.to_v = advance(view_of(*dv, heads, size), row, 0, 4);
    p.n_heads = (int32_t)heads;
    p.pieces = make_divisor((int32_t)(size / 8));
    p.type = CF_DTYPE_FP32;
    for (int32_t &before : p.before) before = INT32_MAX;
    return add_rows(p, compute, error);
}

cf_result cf_state_stream_append(cf_state_stream *stream, cf_cuda_stream compute, int64_t layer, const cf_tensor *k,
                                 const cf_tensor *v, cf_error *error) {
    state_stream *s = opened_stream(stream);
    const cf_tensor *tensors[2] = {k, v};
    int64_t strides[2] = {0, 0};
    cf_result code = check_whole_rows(s, k, "k", &strides[0], error);
    if (code == CF_OK) code = check_whole_rows(s, v, "v", &strides[1], error);
    if (code == CF_OK) code = hold(compute, s->sent, error); /* the layer before, which may be overwritten from now
                                                                on */
    if (code == CF_OK) code = record(s->ready, compute, error);
    if (code == CF_OK) code = hold(s->desc.out, s->ready, error);
    if (code == CF_OK) code = send_rows(s, layer, tensors, strides, error);
    return code == CF_OK ? record(s->sent, s->desc.out, error) : code;
}

cf_result cf_state_stream_end(cf_state_stream *stream, cf_cuda_stream compute, cf_error *error) {
    state_stream *s = opened_stream(stream);
    const cf_result code = release_block(s, compute, false, error);
    return code == CF_OK ? hold(compute, s->sent, error) : code;
}

cf_result cf_rope_size(const cf_rope *rope, int64_t head_size, size_t *bytes, cf_error *error) {
    rope_table t = {};
    if (bytes == NULL) return cf_fail_null(error, "bytes");
    const cf_result code = check_rope(rope, head_size, &t, error);
    if (code == CF_OK) *bytes = table_bytes(t);
    return code;
}

cf_result cf_rope_fill(const cf_rope *rope, int64_t head_size, void *memory, size_t bytes, cf_error *error) {
    rope_table t = {};
    cf_result code = check_rope(rope, head_size, &t, error);
    if (code == CF_OK) code = check_frequencies(rope, t, error);
    if (code != CF_OK) return code;
    if (memory == NULL) return cf_fail_null(error, "memory");
    code = check_aligned(memory, sizeof(float), "memory", error);
    if (code != CF_OK) return code;
    if (bytes < table_bytes(t))
        return cf_fail(error, CF_ERROR_SPACE, "bytes", -1, (int64_t)table_bytes(t), (int64_t)bytes, "too small");
    const int64_t fine = fine_rows(t), n_rows = fine + coarse_rows(t);
    const double base = rope->base != 0.0 ? rope->base : 10000.0;
    for (int32_t i = 0; i < t.pairs; i++) {
        const double frequency = rope->frequencies ? rope->frequencies[i] : std::pow(base, -(double)i / t.pairs);
        float *to = static_cast<float *>(memory) + 2 * i;
        for (int64_t row = 0; row < n_rows; row++, to += 2 * t.pairs) {
            const double angle = frequency * (double)(row < fine ? row : (row - fine) << t.shift);
            to[0] = (float)std::cos(angle);
            to[1] = (float)std::sin(angle);
        }
    }
    return CF_OK;
}

cf_result cf_append_forward(const cf_append *rows, cf_cuda_stream stream, cf_error *error) {
    return append(rows, 0, stream, error);
}

cf_result cf_append_backward(const cf_append *rows, cf_cuda_stream stream, cf_error *error) {
    return append(rows, 1, stream, error);
}

} /* extern "C" */

/* ================================================================================================================
   >>layer    a layer's attention in a pass
   ================================================================================================================ */

namespace {

int64_t align_256(int64_t bytes) { return (int64_t)align_up((size_t)bytes, 256); }

/* Returns the bytes of rows at the end of attention's workspace. In a backward: dq before RoPE turns it back, and with
   a stream dk and dv. In a forward with a stream: K and V of two layers, because one layer's leave while the next are
   computed. */
int64_t scratch_bytes(const cf_attention_desc &d, int64_t rows, bool backward, bool streams) {
    const int64_t number = bytes_of(d.dtype), heads = rows * d.n_heads * d.head_size;
    const int64_t kv = streams ? rows * d.n_kv_heads * d.head_size : 0;
    return backward ? align_256(heads * number) + 2 * align_256(kv * 4) : 4 * align_256(kv * number);
}

/* One layer's attention in a pass. */
struct layer_call {
    const cf_cuda_step *step;
    const cf_layer_attention *of;
    bool backward, streams;
    cf_attention_tensors own; /* arrays of the chunk's own attention */
    cf_tensor k_rows, v_rows; /* K and V of the chunk's rows, or their gradients */
    cf_error *error;

    const cf_attention_desc &desc() const { return step->attention->desc; }
};

/* Finds arrays at the end of the workspace, one after the other. */
struct scratch_rows {
    char *at;
    cf_tensor take(int64_t bytes) {
        const cf_tensor t = {at, 0, 0};
        at += align_256(bytes);
        return t;
    }
};

/* Finds K and V that attention reads: in the state, or with a stream the chunk's own. */
void find_keys(layer_call *c, scratch_rows *scratch) {
    const cf_cuda_step *step = c->step;
    const int64_t layer = c->of->layer, row = step->state_prefix;
    const int64_t bytes = step->chunk->rows * c->desc().n_kv_heads * c->desc().head_size * bytes_of(c->desc().dtype);
    if (!c->streams) {
        c->own.k = cf_state_k(&step->state, layer, 0), c->own.v = cf_state_v(&step->state, layer, 0);
        c->k_rows = cf_state_k(&step->state, layer, row), c->v_rows = cf_state_v(&step->state, layer, row);
        return;
    }
    c->own.k = c->of->k, c->own.v = c->of->v;
    if (!c->backward && step->activations == NULL) {
        scratch->at += layer % 2 * 2 * align_256(bytes);
        c->own.k = scratch->take(bytes), c->own.v = scratch->take(bytes);
    }
    c->k_rows = c->own.k, c->v_rows = c->own.v;
}

/* Finds where gradients go. Those of the chunk's rows are complete once this pass has added to them. */
void find_gradients(layer_call *c, scratch_rows *scratch) {
    const cf_cuda_step *step = c->step;
    const int64_t layer = c->of->layer, row = step->state_prefix, n = step->chunk->rows * c->desc().head_size;
    c->own.dout = c->of->dout;
    c->own.dq = scratch->take(n * c->desc().n_heads * bytes_of(c->desc().dtype));
    c->own.overwrite = step->overwrite;
    if (c->streams) {
        c->k_rows = c->own.dk = scratch->take(n * c->desc().n_kv_heads * 4);
        c->v_rows = c->own.dv = scratch->take(n * c->desc().n_kv_heads * 4);
        return;
    }
    c->own.dk = cf_state_k(&step->gradient, layer, 0), c->own.dv = cf_state_v(&step->gradient, layer, 0);
    c->k_rows = cf_state_k(&step->gradient, layer, row), c->v_rows = cf_state_v(&step->gradient, layer, row);
}

cf_result begin_layer(layer_call *c) {
    const cf_cuda_step *step = c->step;
    if (step == NULL) return cf_fail_null(c->error, "step");
    if (c->of == NULL) return cf_fail_null(c->error, "layer");
    if (step->attention == NULL) return cf_fail_null(c->error, "attention");
    if (c->of->backend != NULL && (c->of->backend->takes == NULL || c->of->backend->attend == NULL))
        return cf_fail_null(c->error, "backend");
    if (c->of->layer < 0) return cf_fail(c->error, CF_ERROR_ARGUMENT, "layer", -1, 0, c->of->layer, "out of range");
    c->streams = step->state.data == NULL;
    const int64_t scratch = scratch_bytes(c->desc(), step->chunk->rows, c->backward, c->streams);
    const int64_t bytes = (int64_t)step->attention_workspace_bytes / 256 * 256;
    if (bytes < scratch || (bytes > 0 && step->attention_workspace == NULL))
        return cf_fail(c->error, CF_ERROR_SPACE, "attention_workspace_bytes", -1, scratch, bytes, "too small");
    scratch_rows rows = {static_cast<char *>(step->attention_workspace) + bytes - scratch};
    c->own.q = c->of->q;
    c->own.out = c->of->out;
    c->own.lse = c->of->lse;
    c->own.lse_stride = step->chunk->rows;
    c->own.workspace = step->attention_workspace;
    c->own.workspace_bytes = (size_t)(bytes - scratch);
    c->own.cublas = c->of->cublas;
    c->own.sinks = c->of->sinks, c->own.dsinks = c->of->dsinks;
    find_keys(c, &rows);
    if (c->backward) find_gradients(c, &rows);
    return CF_OK;
}

/* Moves rows between the projections' arrays and attention's. */
cf_result append_rows(const layer_call &c) {
    const cf_layer_attention &x = *c.of;
    cf_append a = {};
    a.rows = c.step->chunk->rows;
    a.n_heads = c.desc().n_heads;
    a.n_kv_heads = c.desc().n_kv_heads;
    a.head_size = c.desc().head_size;
    a.dtype = c.desc().dtype;
    a.positions = c.step->positions;
    a.rope = x.rope;
    if (c.backward) {
        a.q = c.own.dq, a.k = c.k_rows, a.v = c.v_rows;
        a.q_out = x.dq, a.k_out = x.dk, a.v_out = x.dv;
        return cf_append_backward(&a, c.step->stream, c.error);
    }
    a.q = a.q_out = x.q, a.k = x.k, a.v = x.v;
    a.k_out = c.k_rows, a.v_out = c.v_rows;
    a.out = x.out;
    return cf_append_forward(&a, c.step->stream, c.error);
}

cf_result attend(const layer_call &c, const cf_attention *with, const void *tiles, cf_attention_tensors x) {
    const cf_attention_backend *const backend = c.of->backend;
    const problem *const p = static_cast<const problem *>(with);
    x.tiles = tiles;
    if (backend != NULL && x.sinks == NULL && !p->in_blocks && backend->takes(backend->user, with)) {
        const cf_result code = check_call(p, &x, c.backward, c.error);
        return code == CF_OK ? backend->attend(backend->user, c.backward, with, &x, c.step->stream, c.error) : code;
    }
    return c.backward ? cf_attention_backward(with, &x, c.step->stream, c.error)
                      : cf_attention_forward(with, &x, c.step->stream, c.error);
}

/* Attends to rows that lie elsewhere. */
cf_result attend_block(const layer_call &c, const cf_cuda_block *block, const cf_state &state, const cf_state &gradient,
                       int64_t layer) {
    cf_attention_tensors x = c.own;
    x.k = cf_state_k(&state, layer, 0), x.v = cf_state_v(&state, layer, 0);
    x.dk = cf_state_k(&gradient, layer, 0), x.dv = cf_state_v(&gradient, layer, 0);
    x.overwrite = 0;
    return attend(c, block->attention, block->tiles, x);
}

/* Attends to the prefix block by block. The gradients that later chunks added for the chunk's own rows come first. */
cf_result attend_stream(const layer_call &c, const cf_cuda_walk &walk) {
    cf_state_block block = {};
    for (;;) {
        cf_result code = cf_state_stream_next(walk.stream, c.step->stream, &block, c.error);
        if (code == CF_OK && block.layer != c.of->layer)
            code = cf_fail(c.error, CF_ERROR_ARGUMENT, "layer", -1, block.layer, c.of->layer, "is not the next one");
        if (code != CF_OK || block.n_rows == 0) return code;
        if (block.own)
            code = cf_state_stream_add(walk.stream, &block, &c.own.dk, &c.own.dv, c.step->stream, c.error);
        else
            code = attend_block(c, cf_cuda_walk_block(&walk, block.index), block.state, block.gradient, 0);
        if (code != CF_OK) return code;
    }
}

/* Attends to all that the chunk's rows see. */
cf_result attend_all(const layer_call &c) {
    static const cf_cuda_walk nothing = {};
    const cf_cuda_step *step = c.step;
    const cf_cuda_walk &walk = step->walk != NULL ? *step->walk : nothing;
    cf_attention_tensors x = c.own;
    cf_result code = attend(c, step->attention, step->tiles, x);
    x.overwrite = 0;
    for (int64_t i = 0; i < walk.n_levels && code == CF_OK; i++)
        code = attend(c, walk.levels[i].attention, walk.levels[i].tiles, x);
    for (int64_t i = 0; i < walk.n_blocks && code == CF_OK && walk.stream == NULL; i++)
        code = attend_block(c, &walk.blocks[i], walk.blocks[i].state, walk.blocks[i].gradient, c.of->layer);
    if (code == CF_OK && walk.stream != NULL) code = attend_stream(c, walk);
    x = c.own;
    x.finish = 1;
    if (code == CF_OK && (c.desc().prefix > 0 || step->attention->n_levels > 0))
        code = attend(c, step->attention, step->tiles, x);
    if (code != CF_OK || c.backward || !walk.append) return code;
    return cf_state_stream_append(walk.stream, step->stream, c.of->layer, &c.own.k, &c.own.v, c.error);
}

/* ---- attention's outputs, from an F to its R ---- */

int64_t out_bytes(const cf_attention_desc &d, int64_t rows) {
    return align_256(rows * d.n_heads * d.head_size * bytes_of(d.dtype));
}

/* Counts the bytes of a layer's outputs: out without gaps, then lse. */
int64_t layer_outputs_bytes(const cf_attention_desc &d, int64_t rows) {
    return out_bytes(d, rows) + align_256(rows * d.n_heads * (int64_t)sizeof(float));
}

/* Events of each of the two slots of outputs in host memory: used by compute, left, come back. */
enum { OUTPUTS_USED, OUTPUTS_LEFT, OUTPUTS_BACK, N_OUTPUTS_EVENTS };

} /* namespace */

/* Attention's outputs of one chunk on one virtual stage. Where they lie in host memory, layers take turns in two slots
   on the device: an F fills a slot, whose bytes then leave on `out`, and an R reads a slot that `in` has filled. */
struct cf_cuda_outputs {
    char *data; /* on the device: of layer 0, or the slots */
    char *host; /* of layer 0; NULL: outputs stay on the device */
    int64_t layer_bytes, n_layers;
    int64_t next; /* layer that an R asks for next */
    cudaStream_t out, in;
    const cudaEvent_t *events; /* (2, N_OUTPUTS_EVENTS) */

    char *at(int64_t layer) const { return data + (host == NULL ? layer : layer % 2) * layer_bytes; }
    cudaEvent_t event(int64_t layer, int which) const { return events[layer % 2 * N_OUTPUTS_EVENTS + which]; }
};

namespace {

/* Copies out and lse of a layer to where they are kept, or back from there. */
cf_result copy_outputs(const layer_call &c, char *kept, bool back) {
    const cf_attention_desc &d = c.desc();
    const int64_t number = bytes_of(d.dtype), rows = c.step->chunk->rows, head = d.head_size * number;
    const view v = view_of(c.of->out, d.n_heads, d.head_size);
    const bool whole = v.head == d.head_size;
    char *const lse = reinterpret_cast<char *>(c.of->lse), *const kept_lse = kept + out_bytes(d, rows);
    const int64_t lse_bytes = rows * d.n_heads * (int64_t)sizeof(float);
    cf_result code = CF_OK;
    const auto copy = [&](char *own, int64_t own_stride, char *other, int64_t stride, int64_t width, int64_t n) {
        if (code == CF_OK)
            code = copy_pieces(back ? own : other, back ? own_stride : stride, back ? other : own,
                               back ? stride : own_stride, width, n, cudaMemcpyDeviceToDevice, c.step->stream,
                               "outputs", c.error);
    };
    for (int64_t h = 0; h < (whole ? 1 : d.n_heads); h++)
        copy(v.data + h * v.head * number, v.row * number, kept + h * head, d.n_heads * head,
             whole ? d.n_heads * head : head, rows);
    copy(lse, lse_bytes, kept_lse, lse_bytes, lse_bytes, 1);
    return code;
}

/* Makes `later` wait for all that is on `earlier` now. */
cudaError_t order_streams(cudaStream_t earlier, cudaEvent_t event, cudaStream_t later) {
    const cudaError_t status = cudaEventRecord(event, earlier);
    return status == cudaSuccess ? cudaStreamWaitEvent(later, event, 0) : status;
}

/* Keeps a layer's outputs of an F. The earlier bytes of the slot must have left before. */
cf_result keep_outputs(const layer_call &c, const cf_cuda_outputs &o) {
    const int64_t layer = c.of->layer;
    const cudaStream_t compute = c.step->stream;
    cudaError_t status = cudaSuccess;
    if (o.host != NULL) status = cudaStreamWaitEvent(compute, o.event(layer, OUTPUTS_LEFT), 0);
    const cf_result code = status == cudaSuccess ? copy_outputs(c, o.at(layer), false) : CF_OK;
    if (o.host == NULL || code != CF_OK) return code;
    if (status == cudaSuccess) status = order_streams(compute, o.event(layer, OUTPUTS_USED), o.out);
    if (status == cudaSuccess)
        status = cudaMemcpyAsync(o.host + layer * o.layer_bytes, o.at(layer), (size_t)o.layer_bytes,
                                 cudaMemcpyDeviceToHost, o.out);
    if (status == cudaSuccess) status = cudaEventRecord(o.event(layer, OUTPUTS_LEFT), o.out);
    return cuda_result(c.error, status, "outputs");
}

/* Starts the copy of a layer's outputs to the device, once its slot is free and the F's bytes are in host memory. */
cudaError_t fetch_outputs(const cf_cuda_outputs &o, int64_t layer) {
    cudaError_t status = cudaSuccess;
    if (layer >= o.n_layers) return status;
    for (const cudaEvent_t event : {o.event(layer, OUTPUTS_USED), o.event(0, OUTPUTS_LEFT), o.event(1, OUTPUTS_LEFT)})
        if (status == cudaSuccess) status = cudaStreamWaitEvent(o.in, event, 0);
    if (status == cudaSuccess)
        status = cudaMemcpyAsync(o.at(layer), o.host + layer * o.layer_bytes, (size_t)o.layer_bytes,
                                 cudaMemcpyHostToDevice, o.in);
    return status == cudaSuccess ? cudaEventRecord(o.event(layer, OUTPUTS_BACK), o.in) : status;
}

/* Gives an R the outputs that its F kept, and starts the copy of the next layer's. */
cf_result take_outputs(const layer_call &c, cf_cuda_outputs *o) {
    const int64_t layer = c.of->layer;
    const cudaStream_t compute = c.step->stream;
    cudaError_t status = cudaSuccess;
    if (o->host == NULL) return copy_outputs(c, o->at(layer), true);
    if (layer != o->next)
        return cf_fail(c.error, CF_ERROR_ARGUMENT, "layer", -1, o->next, layer, "is not the next one");
    if (layer == 0) status = fetch_outputs(*o, 0);
    if (layer == 0 && status == cudaSuccess) status = fetch_outputs(*o, 1);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(compute, o->event(layer, OUTPUTS_BACK), 0);
    const cf_result code = status == cudaSuccess ? copy_outputs(c, o->at(layer), true) : CF_OK;
    if (code != CF_OK) return code;
    if (status == cudaSuccess) status = cudaEventRecord(o->event(layer, OUTPUTS_USED), compute);
    if (status == cudaSuccess) status = fetch_outputs(*o, layer + 2);
    o->next++;
    return cuda_result(c.error, status, "outputs");
}

/* Returns the place where a forward keeps or finds its outputs; NULL: none. */
cf_cuda_outputs *outputs_of(const layer_call &c) { return c.step->walk != NULL ? c.step->walk->outputs : NULL; }

/* Checks a layer whose outputs are kept. */
cf_result check_outputs(const layer_call &c) {
    const cf_cuda_outputs *o = outputs_of(c);
    if (o == NULL || c.step->chunk->rows == 0) return CF_OK;
    if (c.of->layer >= o->n_layers)
        return cf_fail(c.error, CF_ERROR_ARGUMENT, "layer", -1, o->n_layers - 1, c.of->layer, "out of range");
    return c.of->lse == NULL ? cf_fail_null(c.error, "lse") : CF_OK;
}

} /* namespace */

extern "C" {

cf_result cf_layer_attention_forward(const cf_cuda_step *step, const cf_layer_attention *layer, cf_error *error) {
    layer_call c = {};
    c.step = step, c.of = layer, c.error = error;
    cf_result code = begin_layer(&c);
    if (code == CF_OK) code = check_outputs(c);
    if (code == CF_OK) code = append_rows(c);
    if (code != CF_OK) return code;
    cf_cuda_outputs *const outputs = outputs_of(c);
    if (outputs != NULL && step->step->action.pass == CF_R) return take_outputs(c, outputs);
    code = attend_all(c);
    return code == CF_OK && outputs != NULL ? keep_outputs(c, *outputs) : code;
}

cf_result cf_layer_attention_backward(const cf_cuda_step *step, const cf_layer_attention *layer, cf_error *error) {
    layer_call c = {};
    c.step = step, c.of = layer, c.error = error;
    c.backward = true;
    cf_result code = begin_layer(&c);
    if (code == CF_OK) code = attend_all(c);
    return code == CF_OK ? append_rows(c) : code;
}

size_t cf_layer_attention_bytes(const cf_attention *attention, int64_t rows) {
    const int64_t most = (int64_t)std::max(attention->forward_bytes, attention->backward_bytes);
    return (size_t)(align_256(most) + scratch_bytes(attention->desc, rows, true, false));
}

const cf_cuda_block *cf_cuda_walk_block(const cf_cuda_walk *walk, int64_t index) {
    if (walk == NULL || walk->n_blocks == 0) return NULL;
    const cf_cuda_block *const end = walk->blocks + walk->n_blocks;
    const cf_cuda_block *const past =
        std::partition_point(walk->blocks, end, [&](const cf_cuda_block &b) { return b.first <= index; });
    return past == walk->blocks ? NULL : past - 1;
}

} /* extern "C" */

/* ================================================================================================================
   >>arena    host memory, and slots of a stage's memory, worked out before it runs
   ================================================================================================================ */

namespace {

/* ---- host memory ---- */

/* Host memory from the application's allocator. Nothing throws; `failed` stays set after an allocation failed. */
struct heap {
    cf_allocator from;
    bool failed;
};

/* An array in such memory, freed at its end. An array that could not grow stays as it was. */
template <typename T> struct array {
    T *data = NULL;
    int64_t n = 0, room = 0;
    heap *home = NULL;

    array() = default;
    array(const array &) = delete;
    array &operator=(const array &) = delete;
    ~array() {
        clear();
        if (data != NULL) home->from.release(data, home->from.user);
    }
    T &operator[](int64_t i) const { return data[i]; }
    T *begin() const { return data; }
    T *end() const { return data + n; }

    void clear() {
        for (; n > 0; n--) data[n - 1].~T();
    }

    bool reserve(heap *h, int64_t most) {
        if (most <= room) return true;
        void *memory = NULL;
        if ((uint64_t)most <= SIZE_MAX / 2 / sizeof(T))
            memory = h->from.alloc((size_t)most * sizeof(T), h->from.user);
        h->failed |= memory == NULL;
        if (memory == NULL) return false;
        if (n > 0) memcpy(memory, static_cast<void *>(data), (size_t)n * sizeof(T));
        if (data != NULL) home->from.release(data, home->from.user);
        data = static_cast<T *>(memory);
        room = most;
        home = h;
        return true;
    }

    bool push(heap *h, const T &item) {
        if (n == room && !reserve(h, 2 * room + 16)) return false;
        data[n++] = item;
        return true;
    }

    /* Makes it `count` items, all made from `value` or, where there is none, from zeros. */
    template <typename... V> bool fill(heap *h, int64_t count, const V &...value) {
        clear();
        if (!reserve(h, count)) return false;
        for (; n < count; n++) new (static_cast<void *>(data + n)) T(value...);
        return true;
    }
};

/* ---- slots ---- */

/* The memory of one slot, as large as the largest item that ever lies in it. Regions lie one behind the other. */
struct region {
    int64_t bytes, at;
    int64_t free_from, user; /* in a pool, positions in the list: the slot is free from the first on; its last user */
};

bool raise_region(heap *home, array<region> *regions, int64_t slot, int64_t bytes) {
    while (regions->n <= slot)
        if (!regions->push(home, {0, 0, 0, -1})) return false;
    (*regions)[slot].bytes = std::max((*regions)[slot].bytes, bytes);
    return true;
}

/* Takes a slot of a pool from position `begin` until `end`: the smallest free one that is large enough, else the
   largest, which grows. *before: its last user so far, or -1. Returns -1 without memory.

   The steps of chunkflow.h number slots too, but know of no stream. They may give a transfer the slot that the pass
   which has just begun has freed, and the transfer would wait for that pass (tools/bench/results/arena.txt). */
int64_t take_slot(heap *home, array<region> *pool, int64_t bytes, int64_t begin, int64_t end, int64_t user,
                  int64_t *before) {
    int64_t best = pool->n;
    for (int64_t i = 0; i < pool->n; i++) {
        const region &r = (*pool)[i];
        if (r.free_from > begin) continue;
        const bool fits = r.bytes >= bytes, is_first = best == pool->n;
        const int64_t other = is_first ? 0 : (*pool)[best].bytes;
        if (is_first || (other >= bytes ? fits && r.bytes < other : r.bytes > other)) best = i;
    }
    if (!raise_region(home, pool, best, bytes)) return -1;
    region *r = &(*pool)[best];
    *before = r->user;
    r->free_from = end;
    r->user = user;
    return best;
}

double bytes_in(const array<region> &regions) {
    double sum = 0.0;
    for (const region &r : regions) sum += (double)r.bytes;
    return sum;
}

/* Gives each region its place from *at on. Returns the bytes of all. */
int64_t place_regions(const array<region> &regions, int64_t *at) {
    const int64_t before = *at;
    for (region &r : regions) {
        r.at = *at;
        *at += r.bytes;
    }
    return *at - before;
}

/* Counts the most bytes in use at once. `change` has what each position adds. */
int64_t most_live(const array<int64_t> &change) {
    int64_t most = 0, now = 0;
    for (const int64_t by : change) most = std::max(most, now += by);
    return most;
}

} /* namespace */

/* ================================================================================================================
   >>executor    streams, events and transfers for the steps of chunkflow.h
   ================================================================================================================ */

/* Load goes over each stage's steps. It finds the slots of memory that each action uses, and the earlier actions that
   its stream must wait for. It also finds an order in which one host thread can issue the actions of all stages, so
   that nothing waits for an action that is not issued yet. Run follows that order. Waits go only to actions that were
   issued before, so streams cannot deadlock, even if the device has fewer queues than streams and shares them.

       action         stream       waits for, and then records its own event
       F R B I W      COMPUTE      the RECV of its input
       RECV           its link     the pass that makes the tensor, on the peer's stage. It copies; the SEND does nothing
       with NCCL:
       SEND           the link     the pass that makes the tensor
       RECV           the link     nothing: NCCL waits for the peer

   Besides, the action that begins a tensor waits for the last user of its slot. All other slots are used by passes
   alone, in the order of one stream.

   With state_block_rows a pass has copies of its own on OUT and IN. cf_state_stream copies blocks of state. The input
   that an F keeps leaves during the F, and the F ends no sooner than that copy. An R's input comes back during the pass
   before it. Attention's outputs leave and come back layer by layer within the F and the R. */

namespace {

const int COMPUTE = 0, OUT = 1, IN = 2, FIRST_LINK = 3; /* streams of a stage: passes, copies to host memory, copies
                                                           back; then the links, see stream_of */
const int64_t MOST_LOCAL_STAGES = 256;           /* virtual stages in one process */
const int64_t MOST_SIZE = (int64_t)1 << 60;      /* bytes that a stage holds */
const int64_t MOST_BYTES = (int64_t)1 << 46;     /* bytes of one item: more than any device has, and sums stay in 64
                                                    bits */
const int64_t PASSES_AHEAD = 4; /* for each stage. The host issues at most so many passes before it waits for one to
                                   end; streams stay busy unless one stage lags behind by more */

/* An end event that an action's stream waits for. */
struct wait {
    int64_t stage; /* local */
    int64_t event; /* of that stage */
};

/* The facts that a load finds for each action. A tensor goes from virtual stage to virtual stage. In a stage's list it
   begins with the pass that makes it or the RECV that brings it. It lies in a slot of `tensors`. */
struct planned {
    int64_t source = -1;          /* position of the action that makes or brings the tensor that this one reads or
                                     sends; -1: none */
    int64_t last = -1;            /* position of the last reader or SEND of the tensor that begins here; -1: none */
    int64_t input = -1, output = -1;    /* slots */
    int64_t rows = -1;            /* slot of K and V: set at the F of a chain's first chunk, and at all passes of a
                                     chunk without a chain */
    int64_t host = -1;            /* slot of an input in host memory: set at the F that keeps it, and at its R */
    int64_t kept = -1;            /* position of the R at such an F, and of the F at such an R */
    int64_t fetched_at = -1;      /* at an R whose input is in host memory: the input's place on the device, counted
                                     from the stage's inputs_at */
    int64_t fetch_after = -1;     /* at such an R: position of the R whose input was at that place before; -1: none */
    int64_t fetch = -1;           /* at the pass before such an R: position of the R, whose input is fetched then */
    wait waits[2];
    int32_t n_waits = 0;
    int32_t stream = 0;
    int64_t event = -1;    /* index of its end event; the start event is the next one; -1: its RECV has it */
    int64_t partner = -1;  /* SEND: position of the RECV. RECV: position of the pass that makes the tensor. In the
                              peer's list */
    int32_t peer = -1;     /* the stage at the other end: its index among the local ones, or with NCCL its number */
};

struct executor;
struct batch;

struct block {
    char *data;
    int64_t bytes;
    bool pinned; /* in host memory */
};

/* A stage of this process. */
struct stage {
    int64_t number; /* in the pipeline */
    int device;
    int64_t arch;
    array<cudaStream_t> streams;
    array<cudaEvent_t> events;
    cudaEvent_t base; /* timeline: time 0 of the run */
    block memory;     /* on the device */
    block host;
    cf_state_stream *state_stream; /* of the batch loaded last; NULL: not needed */
};

/* What a stage does in a batch. */
struct stage_plan {
    batch *b;
    stage *on;
    const cf_action *actions;
    int64_t first, n_actions; /* range of the schedule's actions */
    array<planned> plan;
    cf_steps *steps;
    array<region> activations; /* by the steps' slots */
    array<region> rows[2];     /* pools: K and V of chains and standalone chunks; dK and dV of chains. In host memory
                                  with state_block_rows */
    array<int64_t> gradients;  /* (n_virtual x n_chains) slots of dK and dV: see gradient_slot */
    array<region> tensors;     /* a pool: between virtual stages */
    array<region> kept;        /* a pool: inputs in host memory */
    array<region> outputs;     /* attention's outputs, by the steps' slots; in host memory if kept inputs are */
    int64_t layer_slots;       /* bytes of the two slots through which outputs come back */
    int64_t inputs_at, slots_at, workspace_at, attention_at[2], standalone_at, ring_at;
    int64_t n_events;
    int64_t input_events; /* the first of N_INPUT_EVENTS */
    array<cf_cuda_block> blocks; /* the batch's, with addresses on this device */
    cf_executor_memory memory_used;
    int64_t n_done; /* number of actions of its list that are done with: placed by find_order or, in a run, known to
                       have ended */
    int64_t n_issued; /* in a run */
};

/* The data of a chunk that passes get. The copy on the device has positions, then tiles. */
struct chunk_data {
    cf_metadata metadata;
    const cf_attention *attention;
    int64_t positions_at, tiles_at;
    int64_t first_block, n_blocks, n_levels; /* range of the batch's blocks; levels behind them */
    int64_t hidden;                /* rows of the path that it does not see */
    array<unsigned char> metadata_memory, attention_memory;
    array<array<unsigned char>> block_memory;
};

struct batch {
    executor *e;
    const cf_plan *plan = NULL;
    const cf_schedule *schedule = NULL; /* lowered */
    cf_schedule *lowered = NULL;        /* owned; NULL: the caller's schedule was lowered already */
    int64_t first_chunk = 0, n_chunks = 0;         /* of the rank */
    int64_t most_rows = 0, standalone_rows = 0; /* rows of the largest chunk, and of the largest one without a chain */
    cf_schedule_index *index = NULL;
    array<stage_plan> stages;    /* the local ones */
    array<int32_t> order;        /* their indices, in the order in which actions are issued */
    array<chunk_data> chunks;
    array<cf_cuda_block> blocks;  /* blocks of all chunks */
    array<int64_t> block_tiles_at; /* place of each block's tiles in the copy on the device */
    int64_t metadata_bytes = 0;
    int64_t attention_bytes[2] = {0, 0}; /* workspace of the largest problem, forwards and backwards */
    bool timed = false;          /* the last run succeeded, so its events tell times */

    explicit batch(executor *owner) : e(owner) {}
    ~batch() {
        for (stage_plan &s : stages) cf_steps_free(s.steps);
        cf_schedule_index_free(index);
        cf_schedule_free(lowered);
    }
};

struct executor {
    cf_executor_desc desc; /* with defaults filled in; its arrays are the caller's, not used after the create */
    heap home;
    array<cf_cuda_stage> stage_descs;
    array<stage> stages; /* the local ones */
    int64_t first_stage; /* number of the first of them */
    int64_t n_virtual_stages;
    bool has_state;
    array<batch> loaded; /* one or none */
    bool lost;     /* the device made no progress: do not wait for its streams */
    bool aborted;  /* NCCL: the communicator was aborted */
    bool busy;     /* in a run: calls from callbacks are refused */

    /* the run */
    cf_error failure;  /* code CF_OK: none so far */
    int64_t failed_at; /* NCCL: index of the action in the schedule */
    bool broken;       /* NCCL: a transfer failed, so the run cannot continue */
    int64_t n_ended;   /* actions of the order that are known to have ended */
    int64_t n_ahead;   /* passes that are issued and not known to have ended */
};

executor *opened(const cf_executor *e) { return reinterpret_cast<executor *>(const_cast<cf_executor *>(e)); }

cf_result no_memory(cf_error *error) { return cf_refuse(error, CF_ERROR_MEMORY, "allocator", -1, "no memory"); }

bool is_pass(int pass) { return pass < CF_COMPUTE_PASS_COUNT; }
bool is_send(int pass) { return pass == CF_SEND_F || pass == CF_SEND_R || pass == CF_SEND_B; }
bool is_receive(int pass) { return !is_pass(pass) && !is_send(pass); }
bool is_forward(int pass) { return pass == CF_F || pass == CF_R; }
bool is_backward(int pass) { return pass == CF_B || pass == CF_I; }

/* Clears the thread's last CUDA error if it is `own`. Any other one stays. */
void forget(cudaError_t own) {
    if (own != cudaSuccess && cudaPeekAtLastError() == own) (void)cudaGetLastError();
}

/* Restores the caller's current device and the thread's last error at the end of a public function. An error that is
   there at the start is the application's, and stays. Any other one is this file's own, has been reported, and is
   cleared. CUDA keeps "not ready" like an error, though it is none. */
struct keep_thread {
    cudaError_t before;
    int device = 0;
    bool known;
    keep_thread() {
        forget(cudaErrorNotReady);
        before = cudaPeekAtLastError();
        known = cudaGetDevice(&device) == cudaSuccess;
    }
    ~keep_thread() {
        if (known) (void)cudaSetDevice(device);
        if (before == cudaSuccess) (void)cudaGetLastError();
    }
};

/* ---- who is where ---- */

bool has_nccl(const executor *e) { return e->desc.nccl != NULL; }
bool is_local_replay(const batch *b) { return b->schedule->shape.replay == CF_REPLAY_LOCAL; }

/* Returns whether the state of chains lies in host memory. */
bool streams_state(const executor *e) { return e->desc.state_block_rows > 0; }

/* Returns whether inputs that local replay keeps from F to R lie in host memory. */
bool moves_inputs(const executor *e) { return streams_state(e) || e->desc.outputs > 1; }

/* Returns whether replays take attention's outputs from their F. With a small window attention costs less than keeping
   them. */
bool keeps_outputs(const executor *e) {
    const int64_t window = e->desc.attention.window;
    return e->desc.outputs > 0 && (window == 0 || window >= CF_MIN_OUTPUT_WINDOW);
}

int64_t stage_of(const batch *b, int64_t virtual_stage) {
    return cf_placement_stage(b->schedule->shape.placement, b->e->desc.n_stages, virtual_stage);
}

/* Returns the virtual stage that a stage has in one row of the layout. */
int64_t virtual_stage_at(const stage_plan *s, int64_t row) {
    return cf_placement_at(s->b->schedule->shape.placement, s->b->e->desc.n_stages, row, s->on->number);
}

/* Returns the position of a pass or transfer in the list of its stage; -1: there is none. */
int64_t position_of(const batch *b, int pass, int64_t chunk, int64_t virtual_stage) {
    const int64_t action = cf_schedule_find(b->index, static_cast<cf_pass>(pass), chunk, virtual_stage);
    return action < 0 ? -1 : action - b->schedule->first[stage_of(b, virtual_stage)];
}

/* Returns the virtual stage at the other end of a transfer. Gradients go to the previous one. */
int64_t other_end(const cf_action &a) {
    const bool gradient = a.pass == CF_SEND_B || a.pass == CF_RECV_B;
    return a.stage + (is_send(a.pass) == gradient ? -1 : 1);
}

/* Returns the stream of an action. In one process each link between neighbouring virtual stages has a stream for each
   direction. With NCCL all transfers have one stream, because only in the order of the list can no transfer wait for
   ever. */
int32_t stream_of(const executor *e, const cf_action &a) {
    if (is_pass(a.pass)) return COMPUTE;
    if (has_nccl(e)) return FIRST_LINK;
    return (int32_t)(FIRST_LINK + 2 * (a.stage / e->desc.n_stages) + (a.pass == CF_RECV_B));
}

/* Returns whether the chunk's chain has a state. All have one except the leaves of trees, which count as chunks without
   a chain here. */
bool has_chain(const cf_chunk &c) { return c.state > 0; }

bool is_last_of_chain(const cf_plan *plan, const cf_chunk &c) { return c.index + 1 == plan->chains[c.chain].n_chunks; }

/* Returns the row of its path with which a chain's state begins. */
int64_t begin_of_chain(const cf_plan *plan, int64_t chain) {
    return plan->chunks[plan->chains[chain].first_chunk].prefix;
}

/* Returns the chain that a chain continues, or -1. */
int64_t chain_above(const cf_plan *plan, int64_t chain) {
    const int64_t up = plan->chunks[plan->chains[chain].first_chunk].up;
    return up >= 0 ? plan->chunks[up].chain : -1;
}

/* Returns the rows of the state that a chunk takes: its tokens of the chain. If it has other slices behind those (a
   hybrid chunk) or no chain: all its rows. */
int64_t rows_of(const cf_plan *plan, int64_t chunk) {
    const cf_chunk *c = &plan->chunks[chunk];
    const bool whole = has_chain(*c) && (c->n_slices == 1 || !is_last_of_chain(plan, *c));
    return whole ? plan->chunks[chunk].state : c->rows;
}

/* Returns the rows of a chunk that host memory keeps: those that later chunks may read. */
int64_t kept_rows_of(const batch *b, int64_t chunk) {
    return streams_state(b->e) ? b->plan->chunks[chunk].state : rows_of(b->plan, chunk);
}

/* Returns the rows that a chunk's chain, or a chunk without one, takes in each plane. They are rounded up so that
   planes on the device lie at multiples of 256 bytes. */
int64_t state_rows(const batch *b, const cf_chunk &c) {
    const cf_chain *g = has_chain(c) ? &b->plan->chains[c.chain] : NULL;
    const cf_chunk *last = g != NULL ? &b->plan->chunks[g->first_chunk + g->n_chunks - 1] : &c;
    const int64_t before = last->prefix - (g != NULL ? begin_of_chain(b->plan, c.chain) : last->prefix);
    const int64_t rows = before + kept_rows_of(b, last - b->plan->chunks);
    return streams_state(b->e) ? rows : (rows + 15) / 16 * 16;
}

const cf_chunk &chunk_of(const stage_plan *s, const cf_step *step) {
    return s->b->plan->chunks[step->action.chunk];
}

/* Returns the bytes of a row of K and V, or of their gradients: in a layer, and in all layers of a virtual stage. */
int64_t row_bytes(const executor *e, bool gradient) {
    const cf_attention_desc &a = e->desc.attention;
    return bytes_of(gradient ? CF_DTYPE_FP32 : a.dtype) * 2 * a.n_kv_heads * a.head_size;
}

double state_row_bytes(const executor *e, int64_t virtual_stage, bool gradient) {
    return (double)(e->stage_descs[virtual_stage].n_layers * row_bytes(e, gradient));
}

/* Each stage's own events. Each is recorded anew before anything else waits for it. The events of outputs follow; a
   wait for one of those means its last record. */
enum { INPUT_THERE, INPUT_LEFT, INPUT_BACK, CLEARED, FIRST_OUTPUTS_EVENT };
const int N_INPUT_EVENTS = FIRST_OUTPUTS_EVENT + 2 * N_OUTPUTS_EVENTS;

/* Finds the other end of a transfer. */
void find_partner(stage_plan *s, int64_t at, const cf_need *needs) {
    const batch *b = s->b;
    const cf_action &a = s->actions[at];
    const int64_t other = other_end(a), stage = stage_of(b, other);
    s->plan[at].peer = (int32_t)(stage - (has_nccl(b->e) ? 0 : b->e->first_stage));
    s->plan[at].partner = is_send(a.pass) ? position_of(b, a.pass + 1, a.chunk, other)
                                          : needs[0].action - b->schedule->first[stage];
}

/* Finds the tensor that an action reads or sends. With local replay, R reads what its F read, or a copy of that from
   host memory. */
void find_source(stage_plan *s, int64_t at, const cf_need &need) {
    planned *p = &s->plan[at];
    const int64_t from = (need.received >= 0 ? need.received : need.action) - s->first;
    const bool again = need.why == CF_EDGE_REPLAY && is_local_replay(s->b);
    if (again && moves_inputs(s->b->e) && s->plan[from].source >= 0) {
        p->kept = from;
        s->plan[from].kept = at;
    } else if (again) {
        p->source = s->plan[from].source;
    } else if (need.why == CF_EDGE_ACTIVATION || need.why == CF_EDGE_GRADIENT) {
        p->source = from;
    }
    if (p->source >= 0) s->plan[p->source].last = at;
}

/* Makes the entries of a stage's list, without their memory. */
bool start_plan(batch *b, stage_plan *s, stage *on) {
    executor *e = b->e;
    s->b = b;
    s->on = on;
    s->first = b->schedule->first[on->number];
    s->n_actions = b->schedule->first[on->number + 1] - s->first;
    s->actions = b->schedule->actions + s->first;
    if (!s->plan.fill(&e->home, s->n_actions)) return false;
    if (!s->gradients.fill(&e->home, e->desc.n_virtual * b->plan->n_chains, -1)) return false;
    for (int64_t i = 0; i < s->n_actions; i++) {
        const cf_action &a = s->actions[i];
        planned *p = &s->plan[i];
        cf_need needs[CF_MAX_NEEDS];
        const int n_needs = cf_schedule_needs(b->index, s->first + i, needs);
        p->stream = stream_of(e, a);
        if (!is_send(a.pass) || has_nccl(e)) {
            p->event = s->n_events;
            s->n_events += e->desc.timeline ? 2 : 1;
        }
        if (!is_pass(a.pass)) find_partner(s, i, needs);
        for (int j = 0; j < n_needs && (is_pass(a.pass) || is_send(a.pass)); j++) find_source(s, i, needs[j]);
    }
    s->input_events = s->n_events;
    if (moves_inputs(e)) s->n_events += N_INPUT_EVENTS;
    return true;
}

/* Finds the order of issue. It goes round the stages, and issues a stage's next action once those that it waits for on
   other stages are issued: a RECV waits for the pass that makes its tensor, and a SEND for its RECV. What an action
   waits for on its own stage is earlier in the list. Lists that do not deadlock with blocking sends are all issued. */
cf_result find_order(batch *b, cf_error *error) {
    int64_t total = 0, before;
    for (const stage_plan &s : b->stages) total += s.n_actions;
    if (!b->order.reserve(&b->e->home, total)) return no_memory(error);
    do {
        before = b->order.n;
        for (int64_t i = 0; i < b->stages.n; i++) {
            stage_plan *s = &b->stages[i];
            if (s->n_done == s->n_actions) continue;
            const planned &p = s->plan[s->n_done];
            if (p.peer >= 0 && !has_nccl(b->e) && b->stages[p.peer].n_done <= p.partner) continue;
            s->n_done++;
            b->order.data[b->order.n++] = (int32_t)i;
        }
    } while (b->order.n > before);
    if (b->order.n == total) return CF_OK;
    return cf_fail(error, CF_ERROR_SCHEDULE, "actions", -1, total, b->order.n, "the stages wait for each other");
}

/* ---- what a stage holds, and when ---- */

int64_t *gradient_slot(const stage_plan *s, int64_t chain, int64_t virtual_stage) {
    return &s->gradients[virtual_stage / s->b->e->desc.n_stages * s->b->plan->n_chains + chain];
}

/* Returns the slot of a chain's K and V. */
int64_t state_slot(const stage_plan *s, int64_t chain, int64_t virtual_stage) {
    return s->plan[position_of(s->b, CF_F, s->b->plan->chains[chain].first_chunk, virtual_stage)].rows;
}

enum { ARENA, STATE, GRADIENT, N_HELD };

/* The state of one walk through a stage's steps. */
struct recording {
    stage_plan *s;
    array<int64_t> next_pass;    /* (n_actions + 1) position of the next pass behind an action */
    array<int64_t> held[N_HELD]; /* (n_actions + 1) bytes that come into use at an action, minus those that are freed
                                    there */
    bool too_large;
};

/* Bytes that a virtual stage needs: a fixed number of each kind, and more for each row of a chunk. */
enum { ACTIVATIONS, FORWARD_WORK, BACKWARD_WORK, N_WANTED };

using stage_bytes = int64_t cf_cuda_stage::*;

const struct {
    stage_bytes fixed, each;
    const char *fixed_name, *each_name;
} wanted[N_WANTED] = {
    {&cf_cuda_stage::activation_bytes, &cf_cuda_stage::activation_bytes_per_token, "stages.activation_bytes",
     "stages.activation_bytes_per_token"},
    {&cf_cuda_stage::forward_bytes, &cf_cuda_stage::forward_bytes_per_token, "stages.forward_bytes",
     "stages.forward_bytes_per_token"},
    {&cf_cuda_stage::backward_bytes, &cf_cuda_stage::backward_bytes_per_token, "stages.backward_bytes",
     "stages.backward_bytes_per_token"}};

int64_t wanted_bytes(const cf_cuda_stage &d, int what, int64_t rows) {
    return d.*wanted[what].fixed + d.*wanted[what].each * rows;
}

/* Notes bytes that are in use from position `begin` to `end`, unless they are too many. */
void note_held(recording *r, int what, int64_t begin, int64_t end, double bytes) {
    r->too_large |= !(bytes < (double)MOST_SIZE);
    if (r->too_large) return;
    r->held[what][begin] += (int64_t)bytes;
    r->held[what][end] -= (int64_t)bytes;
}

/* Makes action `at` wait for the end of action `position` of local stage `other`, unless both are on one stream. A SEND
   ends with the copy of its RECV. */
void add_wait(stage_plan *s, int64_t at, int64_t other, int64_t position) {
    const batch *b = s->b;
    planned *p = &s->plan[at];
    const planned *from = &b->stages[other].plan[position];
    if (p->event < 0) return; /* a SEND within one process does nothing */
    if (from->event < 0) {
        other = from->peer;
        from = &b->stages[other].plan[from->partner];
    }
    if (&b->stages[other] != s || from->stream != p->stream) p->waits[p->n_waits++] = {other, from->event};
}

/* Finds the tensor that an action reads or sends, and gives a slot to the tensor that the action makes. A slot is used
   again only once the pass after its last use has begun; otherwise a transfer into it would wait for a running pass. A
   tensor that is sent keeps its slot for one more pass, so that no pass waits for the transfer. */
void record_tensors(recording *r, int64_t at, int64_t bytes) {
    stage_plan *s = r->s;
    heap *home = &s->b->e->home;
    const int64_t self = s->on->number - s->b->e->first_stage;
    const cf_action &a = s->actions[at];
    planned *p = &s->plan[at];
    int64_t before = -1;
    if (p->source >= 0) {
        const planned &from = s->plan[p->source];
        (is_send(a.pass) ? p->output : p->input) = is_pass(s->actions[p->source].pass) ? from.output : from.input;
        add_wait(s, at, self, p->source);
    }
    if (is_receive(a.pass) && !has_nccl(s->b->e)) add_wait(s, at, p->peer, p->partner);
    if (p->last >= 0) {
        const int64_t next = r->next_pass[p->last], end = is_send(s->actions[p->last].pass) ? r->next_pass[next] : next;
        note_held(r, ARENA, at, p->last + 1, (double)bytes);
        (is_pass(a.pass) ? p->output : p->input) = take_slot(home, &s->tensors, bytes, at, end, p->last, &before);
        if (before >= 0) add_wait(s, at, self, before);
    }
    if (p->kept > at) p->host = take_slot(home, &s->kept, bytes, at, p->kept + 1, p->kept, &before);
    else if (p->kept >= 0) p->host = s->plan[p->kept].host;
}

/* Records activations, from the pass that keeps them to B or W. */
void record_activations(recording *r, const cf_step *step) {
    const batch *b = r->s->b;
    const cf_action &a = step->action;
    const int64_t split = position_of(b, CF_W, a.chunk, a.stage);
    const int64_t last = split >= 0 ? split : position_of(b, CF_B, a.chunk, a.stage);
    const int64_t bytes = align_256(wanted_bytes(b->e->stage_descs[a.stage], ACTIVATIONS, chunk_of(r->s, step).rows));
    if (!is_forward(a.pass) || step->slot < 0) return;
    note_held(r, ARENA, step->position, last + 1, (double)bytes);
    (void)raise_region(&b->e->home, &r->s->activations, step->slot, bytes);
}

/* Records attention's outputs, from an F that keeps nothing to its R. */
void record_outputs(recording *r, const cf_step *step) {
    stage_plan *s = r->s;
    executor *e = s->b->e;
    const cf_action &a = step->action;
    if (a.pass != CF_F || step->outputs < 0 || !keeps_outputs(e)) return;
    const int64_t layer = layer_outputs_bytes(e->desc.attention, chunk_of(s, step).rows);
    const double bytes = (double)layer * (double)e->stage_descs[a.stage].n_layers;
    r->too_large |= !(bytes < (double)MOST_SIZE);
    if (r->too_large) return;
    if (moves_inputs(e)) s->layer_slots = std::max(s->layer_slots, 2 * layer);
    else note_held(r, ARENA, step->position, position_of(s->b, CF_R, a.chunk, a.stage) + 1, bytes);
    (void)raise_region(&e->home, &s->outputs, step->outputs, (int64_t)bytes);
}

/* Takes a slot for all rows of a chunk's chain, or of a chunk without one, at the pass that begins with them. */
int64_t take_rows(recording *r, const cf_step *step, const cf_chunk &c, bool gradient, int64_t end) {
    const batch *b = r->s->b;
    const double bytes = (double)state_rows(b, c) * state_row_bytes(b->e, step->action.stage, gradient);
    int64_t before = -1;
    r->too_large |= !(bytes < (double)MOST_SIZE);
    if (r->too_large) return -1;
    return take_slot(&b->e->home, &r->s->rows[gradient], (int64_t)bytes, step->position, end, end - 1, &before);
}

/* Records that dK and dV of a chain come into use. Each chunk's are freed with its backward. */
void record_gradient(recording *r, const cf_step *step, int64_t chain) {
    const batch *b = r->s->b;
    const cf_chain &g = b->plan->chains[chain];
    const int64_t stage = step->action.stage, end = position_of(b, CF_B, g.first_chunk, stage) + 1;
    for (int64_t i = g.first_chunk; i < g.first_chunk + g.n_chunks; i++)
        note_held(r, GRADIENT, step->position, position_of(b, CF_B, i, stage) + 1,
                  (double)kept_rows_of(b, i) * state_row_bytes(b->e, stage, true));
    *gradient_slot(r->s, chain, stage) = take_rows(r, step, b->plan->chunks[g.first_chunk], true, end);
}

/* Records the rows of chains. A chunk's rows come into use with its F and are freed with its backward. Rows of the
   gradient come into use with the first backward that adds to any of them. */
void record_rows(recording *r, const cf_step *step) {
    const batch *b = r->s->b;
    const cf_action &a = step->action;
    const cf_chunk &c = chunk_of(r->s, step);
    const cf_chain &g = b->plan->chains[c.chain];
    const int64_t end = position_of(b, CF_B, g.first_chunk, a.stage) + 1;
    if (a.pass != CF_F) return;
    if (c.index == 0) r->s->plan[step->position].rows = take_rows(r, step, c, false, end);
    note_held(r, STATE, step->position, position_of(b, CF_B, a.chunk, a.stage) + 1,
              (double)kept_rows_of(b, a.chunk) * state_row_bytes(b->e, a.stage, false));
}

/* Records the rows of a standalone chunk, from the pass that keeps its activations to its backward. An F that keeps
   nothing has rows for itself alone. */
void record_own_rows(recording *r, const cf_step *step) {
    const batch *b = r->s->b;
    const cf_action &a = step->action;
    const int64_t back = position_of(b, CF_B, a.chunk, a.stage);
    const int64_t end = step->slot >= 0 ? back + 1 : step->position + 1;
    const double bytes = (double)kept_rows_of(b, a.chunk) * state_row_bytes(b->e, a.stage, false);
    if (streams_state(b->e) || !is_forward(a.pass)) return;
    note_held(r, STATE, step->position, end, bytes);
    r->s->plan[step->position].rows = r->s->plan[back].rows = take_rows(r, step, chunk_of(r->s, step), false, end);
}

/* Records the gradients that this step clears, from the highest chain on its path down. */
void record_gradients(recording *r, const cf_step *step, int32_t path) {
    if (path < 0 || r->s->steps->paths[path].clear != step->position) return;
    record_gradients(r, step, r->s->steps->paths[path].up);
    record_gradient(r, step, r->s->steps->paths[path].chain);
}

/* Records a step. Returns whether all is well. */
bool record_step(recording *r, const cf_step *step) {
    const executor *e = r->s->b->e;
    const cf_chunk &c = chunk_of(r->s, step);
    if (is_pass(step->action.pass)) record_activations(r, step);
    record_outputs(r, step);
    if (is_pass(step->action.pass) && step->action.pass != CF_W && e->has_state) {
        record_gradients(r, step, step->path);
        if (has_chain(c)) record_rows(r, step);
        else record_own_rows(r, step);
    }
    record_tensors(r, step->position, align_256(e->desc.boundary_bytes_per_token * c.rows));
    return !e->home.failed && !r->too_large;
}

bool start_recording(recording *r, stage_plan *s) {
    const int64_t n = s->n_actions;
    r->s = s;
    if (!r->next_pass.fill(&s->b->e->home, n + 1, n)) return false;
    for (array<int64_t> &held : r->held)
        if (!held.fill(&s->b->e->home, n + 1, 0)) return false;
    for (int64_t i = n - 1, next = n; i >= 0; i--) {
        r->next_pass[i] = next;
        if (is_pass(s->actions[i].pass)) next = i;
    }
    return true;
}

/* ---- what streams ---- */

/* Sizes the ring that all virtual stages of the stage share, by the memory model. There is one if any chain has
   rows. */
void size_rings(stage_plan *s) {
    const executor *e = s->b->e;
    const int64_t rows = bytes_in(s->rows[0]) > 0.0 ? e->desc.state_slots * e->desc.state_block_rows : 0;
    cf_executor_memory *m = &s->memory_used;
    m->state = m->state_live = rows * row_bytes(e, false);
    m->gradient = m->gradient_live = rows * row_bytes(e, true);
}

/* Returns the bytes of a kept input, with alignment. */
int64_t input_bytes(const stage_plan *s, int64_t at) {
    return align_256(s->b->e->desc.boundary_bytes_per_token * s->b->plan->chunks[s->actions[at].chunk].rows);
}

/* Returns the room for kept inputs on the device: the most that are there at once, but at most two of the largest
   chunk. One is in use while the other is copied. */
int64_t slots_for_inputs(const stage_plan *s) {
    int64_t kept = 0, most = 0;
    for (int64_t at = 0; at < s->n_actions; at++) {
        if (s->plan[at].kept < 0) continue;
        kept += s->actions[at].pass == CF_F ? input_bytes(s, at) : -input_bytes(s, at);
        most = std::max(most, kept);
    }
    return std::min(most, 2 * align_256(s->b->e->desc.boundary_bytes_per_token * s->b->most_rows));
}

/* Places kept inputs, as they come back to the device, behind the arena: alternately at the lower and the upper end of
   their room. One is in use while the next one is copied.

   An input is fetched when the pass before its R has been issued, whose own copies go first. Its copy waits until the
   last R that read from the same end is done. If the room is too small for both ends, it waits for the R right before
   its own. */
void place_inputs(stage_plan *s) {
    cf_executor_memory *m = &s->memory_used;
    int64_t turn = 0, pass = -1, before = -1, second_before = -1, low = 0, high = 0;
    m->inputs = slots_for_inputs(s);
    for (int64_t at = 0; at < s->n_actions; at++) {
        planned *p = &s->plan[at];
        if (!is_pass(s->actions[at].pass)) continue;
        if (p->kept >= 0 && s->actions[at].pass == CF_R) {
            const int64_t bytes = input_bytes(s, at), place = turn++ % 2 == 0 ? 0 : m->inputs - bytes;
            p->fetched_at = place;
            p->fetch_after = place < high && low < place + bytes ? before : second_before;
            s->plan[pass].fetch = at;
            second_before = before;
            before = at;
            low = place;
            high = place + bytes;
        }
        pass = at;
    }
    s->slots_at = m->inputs;
    m->inputs += s->layer_slots;
    m->arena_live += m->inputs;
}

cf_result plan_stage(stage_plan *s, cf_error *error) {
    executor *e = s->b->e;
    cf_executor_memory *m = &s->memory_used;
    recording r = {};
    if (!start_recording(&r, s)) return no_memory(error);
    const cf_result code = cf_steps_make(s->b->plan, s->b->schedule, s->on->number, e->desc.seed, &e->home.from,
                                         &s->steps, error);
    if (code != CF_OK) return code;
    for (int64_t i = 0; i < s->steps->n && record_step(&r, &s->steps->steps[i]); i++) continue;
    if (e->home.failed) return no_memory(error);
    double total = r.too_large ? (double)MOST_SIZE : 0.0;
    for (const array<region> *one : {&s->activations, &s->rows[0], &s->rows[1], &s->tensors, &s->kept, &s->outputs})
        total += bytes_in(*one);
    if (!(total < (double)MOST_SIZE))
        return cf_fail(error, CF_ERROR_OVERFLOW, "stages", s->on->number, MOST_SIZE, -1, "sizes pass 60 bits");
    m->n_slots = s->steps->n_slots;
    m->n_states = s->steps->n_states;
    m->n_boundaries = s->steps->n_boundaries;
    m->n_outputs = s->steps->n_outputs;
    m->peak_tokens = s->steps->peak_tokens;
    m->peak_state_tokens = s->steps->peak_state_tokens;
    m->arena_live = most_live(r.held[ARENA]);
    m->state_live = most_live(r.held[STATE]);
    m->gradient_live = most_live(r.held[GRADIENT]);
    if (streams_state(e)) size_rings(s);
    if (moves_inputs(e)) place_inputs(s);
    return CF_OK;
}

/* ---- chunks ---- */

/* Returns whether the chunk's slices see rows in several places, all of which come as blocks. */
bool is_branched(const chunk_data &data) { return data.metadata.n_calls > 0; }

/* Checks the facts about one chunk that the code above relies on. The check of the schedule has seen that chains agree
   with their chunks and that slices exist. Only the last chunk of a chain may have other slices behind the chain's; in
   any other chunk, their rows would be the next chunk's. */
cf_result check_chunk(const cf_plan *plan, int64_t chunk, cf_error *error) {
    const cf_chunk *c = &plan->chunks[chunk];
    const bool goes_on = c->chain >= 0 && !is_last_of_chain(plan, *c);
    if (c->rows > plan->chunk_size)
        return cf_fail(error, CF_ERROR_PLAN, "rows", chunk, plan->chunk_size, c->rows, "out of range");
    if (c->prefix > CF_MAX_LENGTH)
        return cf_fail(error, CF_ERROR_PLAN, "prefix", chunk, CF_MAX_LENGTH, c->prefix, "out of range");
    if (c->chain >= 0 && plan->chains[c->chain].cp > 0)
        return cf_fail(error, CF_ERROR_PLAN, "chains.cp", c->chain, 0, plan->chains[c->chain].cp,
                       "rows of other ranks are not exchanged here");
    if (goes_on && c->n_slices != 1 && plan->order == NULL)
        return cf_fail(error, CF_ERROR_PLAN, "n_slices", chunk, 1, c->n_slices, "only a last chunk is hybrid");
    if (goes_on && c[1].prefix < c->prefix + rows_of(plan, chunk))
        return cf_fail(error, CF_ERROR_PLAN, "prefix", chunk + 1, c->prefix + rows_of(plan, chunk), c[1].prefix,
                       "rows overlap");
    for (int64_t i = c->first_slice; i < c->first_slice + c->n_slices; i++) {
        const cf_slice *x = &plan->slices[i];
        if (x->length < 0 || x->offset < 0 || x->length > c->rows || x->offset > c->rows - x->length)
            return cf_fail(error, CF_ERROR_PLAN, "slices", i, c->rows, x->offset, "outside its chunk");
        if (x->begin < 0 || x->begin > INT32_MAX - x->length)
            return cf_fail(error, CF_ERROR_LIMIT, "slices", i, INT32_MAX - x->length, x->begin,
                           "positions pass 32 bits");
    }
    return CF_OK;
}

/* Returns whether slice `id` of a tree lies right behind the slice that it continues: attention takes the two as
   one. */
bool continues(const cf_plan *plan, const cf_chunk &c, int64_t id) {
    return plan->order != NULL && id > c.first_slice && plan->slices[id].up == id - 1 &&
           (int64_t)plan->slices[id - 1].offset + plan->slices[id - 1].length == plan->slices[id].offset;
}

/* A chunk's slices for attention: one for each run of the plan's slices. */
struct slice_arrays {
    array<int32_t> numbers, runs; /* runs: the run of each slice of the chunk */
};

bool fill_slices(const batch *b, const cf_chunk &c, int64_t in_place, slice_arrays *to, cf_attention_desc *d) {
    const int64_t n = c.n_slices;
    if (!to->numbers.fill(&b->e->home, 6 * n + 2) || !to->runs.fill(&b->e->home, n)) return false;
    int32_t *q = to->numbers.data, *k = q + n + 1, *starts_q = k + n + 1, *starts_k = starts_q + n;
    int32_t *begins = starts_k + n, *parents = begins + n, last = -1;
    for (int64_t i = 0; i < n; i++) {
        const cf_slice &x = b->plan->slices[c.first_slice + i];
        const int64_t up = b->plan->order != NULL ? x.up : -1;
        const int64_t prefix = i == 0 ? in_place : 0;
        if (continues(b->plan, c, c.first_slice + i)) {
            q[last + 1] += (int32_t)x.length, k[last + 1] += (int32_t)x.length;
        } else {
            last++;
            q[last + 1] = q[last] + (int32_t)x.length;
            k[last + 1] = k[last] + (int32_t)(prefix + x.length);
            starts_q[last] = (int32_t)x.offset;
            starts_k[last] = (int32_t)(in_place - prefix + x.offset);
            begins[last] = (int32_t)x.begin;
            parents[last] = up >= c.first_slice ? to->runs[up - c.first_slice] : -1;
        }
        to->runs[i] = last;
    }
    d->n_slices = last + 1;
    d->cu_seqlens_q = q, d->cu_seqlens_k = k, d->starts_q = starts_q, d->starts_k = starts_k;
    d->begins = begins, d->parents = parents;
    return true;
}

/* Prepares attention of a chunk, with its slices but without sequences of padding. If the prefix comes in blocks, the
   keys are the chunk's own. */
cf_result prepare_attention(batch *b, const cf_chunk &c, chunk_data *data, cf_error *error) {
    const int64_t in_place = streams_state(b->e) || is_branched(*data) ? 0 : c.prefix;
    cf_attention_desc d = b->e->desc.attention;
    slice_arrays arrays;
    size_t bytes = 0;
    if (!fill_slices(b, c, in_place, &arrays, &d)) return no_memory(error);
    if (!is_branched(*data)) d.begins = d.parents = NULL;
    d.prefix = c.prefix - in_place;
    const cf_result code = cf_attention_size(&d, &bytes, error);
    if (code != CF_OK) return code;
    if (!data->attention_memory.fill(&b->e->home, (int64_t)bytes)) return no_memory(error);
    return cf_attention_prepare(&d, data->attention_memory.data, bytes, &data->attention, error);
}

/* Returns the first row of its path that a chunk of a tree sees. */
int64_t first_seen_by(const cf_attention_desc &d, const cf_chunk &c) {
    int64_t seen = first_seen_row(c.prefix, d.window);
    for (int64_t s = 0; s < d.n_slices && d.begins != NULL; s++)
        if (d.parents[s] < 0 && d.begins[s] > 0) seen = std::min(seen, first_seen_row(d.begins[s], d.window));
    return seen;
}

/* Lists the blocks of a chunk of a tree: the rows that it sees of each chain on its path, from the root down, in pieces
   if the state streams; then the levels of the chunk itself. */
bool list_tree_blocks(batch *b, const cf_chunk &c, chunk_data *data) {
    heap *home = &b->e->home;
    const int64_t rows = streams_state(b->e) ? b->e->desc.state_block_rows : MOST_ROWS;
    data->first_block = b->blocks.n;
    for (int64_t g = c.chain, end = c.prefix; g >= 0 && end > data->hidden; g = chain_above(b->plan, g)) {
        const int64_t begin = begin_of_chain(b->plan, g), seen = std::max<int64_t>(0, data->hidden - begin);
        for (int64_t i = n_blocks_of(seen, end - begin, rows) - 1; i >= 0; i--) {
            int64_t row = 0;
            const int64_t n = block_of(seen, end - begin, rows, i, &row);
            if (!b->blocks.push(home, {begin + row, n, g, NULL, NULL, {}, {}})) return false;
        }
        end = std::min(end, begin);
    }
    std::reverse(b->blocks.begin() + data->first_block, b->blocks.end());
    data->n_blocks = b->blocks.n - data->first_block;
    data->n_levels = data->attention->n_levels;
    for (int64_t level = 0; level < data->n_levels; level++)
        if (!b->blocks.push(home, {level, 0, -1, NULL, NULL, {}, {}})) return false;
    return data->block_memory.fill(home, data->n_blocks + data->n_levels);
}

/* Lists the blocks of a prefix that need an object of their own: their length differs from that of the block before, or
   some of the chunk's `own` tokens do not see all of their keys. */
bool list_blocks(batch *b, int64_t prefix, int64_t own, chunk_data *data) {
    const cf_executor_desc &d = b->e->desc;
    const int64_t seen_by_all = first_seen_row(prefix + own - 1, d.attention.window);
    int64_t row = 0, n, last = -1;
    bool whole = false;
    data->first_block = b->blocks.n;
    for (int64_t i = 0; (n = cf_state_stream_block(d.state_block_rows, prefix, d.attention.window, i, &row)) > 0; i++) {
        if (n == last && whole) continue;
        whole = row >= seen_by_all;
        last = n;
        if (!b->blocks.push(&b->e->home, {i, n, -1, NULL, NULL, {}, {}})) return false;
    }
    data->n_blocks = b->blocks.n - data->first_block;
    return data->block_memory.fill(&b->e->home, data->n_blocks);
}

/* Returns the place of tiles. If the chunk before has the same tiles, both share one place. So do the full chunks of a
   chain whose prefix comes in blocks. */
int64_t place_tiles(batch *b, const cf_attention *a, const cf_attention *before, int64_t before_at) {
    const int64_t at = b->metadata_bytes;
    if (before != NULL && before->tiles_bytes == a->tiles_bytes && a->tiles_bytes > 0 &&
        memcmp(before->tiles, a->tiles, a->tiles_bytes) == 0)
        return before_at;
    b->metadata_bytes += align_256((int64_t)a->tiles_bytes);
    return at;
}

/* Enlarges the workspaces for a problem. A backward's also has room for a forward, which may run again. */
void take_workspace(batch *b, const cf_attention *a) {
    const int64_t forward = align_256((int64_t)a->forward_bytes), backward = align_256((int64_t)a->backward_bytes);
    b->attention_bytes[0] = std::max(b->attention_bytes[0], forward);
    b->attention_bytes[1] = std::max(b->attention_bytes[1], std::max(forward, backward));
}

/* Prepares attention with the blocks of the prefix. before: the chunk before, or NULL. */
cf_result prepare_blocks(batch *b, const cf_chunk &c, const chunk_data *before, chunk_data *data, cf_error *error) {
    const cf_executor_desc &d = b->e->desc;
    const bool branched = is_branched(*data);
    data->hidden = first_seen_by(data->attention->desc, c);
    if (!branched && (!streams_state(b->e) || c.prefix == 0)) return CF_OK;
    if (!(branched ? list_tree_blocks(b, c, data)
                   : list_blocks(b, c.prefix, data->attention->desc.cu_seqlens_q[1], data)))
        return no_memory(error);
    for (int64_t i = 0; i < data->n_blocks + data->n_levels; i++) {
        cf_cuda_block *to = &b->blocks[data->first_block + i];
        array<unsigned char> *memory = &data->block_memory[i];
        int64_t row = to->first, n = to->n;
        size_t bytes = 0;
        if (!branched) n = cf_state_stream_block(d.state_block_rows, c.prefix, d.attention.window, to->first, &row);
        cf_result code = cf_attention_block_size(data->attention, row, n, &bytes, error);
        if (code == CF_OK && !memory->fill(&b->e->home, (int64_t)bytes)) code = no_memory(error);
        if (code == CF_OK)
            code = cf_attention_block_prepare(data->attention, row, n, memory->data, bytes, &to->attention, error);
        if (code != CF_OK) return code;
        if (branched && streams_state(b->e) && n > 0) to->first = i; /* as the stream counts them */
        const int64_t like = before != NULL && i < before->n_blocks ? before->first_block + i : -1;
        const int64_t at = like < 0 ? place_tiles(b, to->attention, NULL, -1)
                                    : place_tiles(b, to->attention, b->blocks[like].attention, b->block_tiles_at[like]);
        if (!b->block_tiles_at.push(&b->e->home, at)) return no_memory(error);
        take_workspace(b, to->attention);
    }
    return CF_OK;
}

cf_result fill_chunk(batch *b, int64_t chunk, chunk_data *data, cf_error *error) {
    const cf_chunk &c = b->plan->chunks[chunk];
    size_t bytes = 0;
    cf_result code = check_chunk(b->plan, chunk, error);
    if (code == CF_OK) code = cf_metadata_size(b->plan, chunk, NULL, &bytes, error);
    if (code != CF_OK) return code;
    if (!data->metadata_memory.fill(&b->e->home, (int64_t)bytes)) return no_memory(error);
    code = cf_metadata_fill(b->plan, chunk, NULL, data->metadata_memory.data, bytes, &data->metadata, error);
    if (code == CF_OK && b->e->desc.attention.n_heads != 0) code = prepare_attention(b, c, data, error);
    if (code != CF_OK) return code;
    b->most_rows = std::max(b->most_rows, c.rows);
    if (!has_chain(c)) b->standalone_rows = std::max(b->standalone_rows, state_rows(b, c));
    data->positions_at = b->metadata_bytes;
    b->metadata_bytes += align_256(4 * c.rows);
    if (data->attention == NULL) return CF_OK;
    const chunk_data *before = chunk > b->first_chunk ? data - 1 : NULL;
    data->tiles_at = before != NULL ? place_tiles(b, data->attention, before->attention, before->tiles_at)
                                    : place_tiles(b, data->attention, NULL, -1);
    take_workspace(b, data->attention);
    return prepare_blocks(b, c, before, data, error);
}

void put_tiles(const array<unsigned char> &image, int64_t at, const cf_attention *a) {
    if (a->tiles_bytes > 0) memcpy(image.data + at, a->tiles, a->tiles_bytes);
}

/* Copies the metadata of a stage's chunks to the device; padding has position -1 there. */
cf_result upload_chunks(stage_plan *s, cf_error *error) {
    const batch *b = s->b;
    array<unsigned char> image;
    cudaError_t status = cudaSuccess;
    if (!image.fill(&b->e->home, b->metadata_bytes)) return no_memory(error);
    if (!s->blocks.fill(&b->e->home, b->blocks.n)) return no_memory(error);
    for (int64_t i = 0; i < b->blocks.n; i++) {
        s->blocks[i] = b->blocks[i];
        s->blocks[i].tiles = s->on->memory.data + b->block_tiles_at[i];
        put_tiles(image, b->block_tiles_at[i], b->blocks[i].attention);
    }
    for (const chunk_data &data : b->chunks) {
        int32_t *ids = reinterpret_cast<int32_t *>(image.data + data.positions_at);
        for (int64_t i = 0; i < data.metadata.rows; i++)
            ids[i] = data.metadata.sequence_ids[i] < 0 ? -1 : data.metadata.position_ids[i];
        if (data.attention != NULL) put_tiles(image, data.tiles_at, data.attention);
    }
    if (image.n > 0) /* on the stream that will read it: cudaMemcpy's own would not be ordered before that */
        status = cudaMemcpyAsync(s->on->memory.data, image.data, (size_t)image.n, cudaMemcpyHostToDevice,
                                 s->on->streams[COMPUTE]);
    if (status == cudaSuccess) status = cudaStreamSynchronize(s->on->streams[COMPUTE]);
    return cuda_result(error, status, "metadata");
}

/* ---- memory ---- */

/* Checks that no item of the largest chunk exceeds MOST_BYTES. */
cf_result check_items(const batch *b, cf_error *error) {
    const int64_t rows = b->most_rows, boundary = b->e->desc.boundary_bytes_per_token;
    if (boundary > 0 && rows > MOST_BYTES / boundary)
        return cf_fail(error, CF_ERROR_LIMIT, "boundary_bytes_per_token", -1, MOST_BYTES, -1, "an item is too large");
    for (int64_t i = 0; i < b->e->n_virtual_stages * N_WANTED; i++) {
        const auto &w = wanted[i % N_WANTED];
        const cf_cuda_stage &d = b->e->stage_descs[i / N_WANTED];
        const int64_t fixed = d.*w.fixed, each = d.*w.each;
        if ((each > 0 && rows > MOST_BYTES / each) || fixed > MOST_BYTES - each * rows)
            return cf_fail(error, CF_ERROR_LIMIT, each > 0 && rows > fixed / each ? w.each_name : w.fixed_name,
                           i / N_WANTED, MOST_BYTES, -1, "an item is too large");
    }
    return CF_OK;
}

/* Lays out a stage's memory: metadata, arena, state, gradients, workspace. Rings come last, because their bytes may be
   any multiple of 16. */
void lay_out_stage(stage_plan *s) {
    const batch *b = s->b;
    cf_executor_memory *m = &s->memory_used;
    int64_t at = m->metadata = b->metadata_bytes;
    m->arena = place_regions(s->activations, &at);
    if (!moves_inputs(b->e)) m->arena += place_regions(s->outputs, &at);
    m->arena += place_regions(s->tensors, &at) + m->inputs;
    s->inputs_at = at;
    s->slots_at += at;
    at += m->inputs;
    (void)place_regions(s->kept, &m->host);
    if (moves_inputs(b->e)) (void)place_regions(s->outputs, &m->host);
    if (streams_state(b->e)) {
        (void)place_regions(s->rows[0], &m->host);
        (void)place_regions(s->rows[1], &m->host);
    } else {
        m->state = place_regions(s->rows[0], &at);
        m->gradient = place_regions(s->rows[1], &at);
    }
    s->workspace_at = at;
    for (int backward = 0; backward < 2; backward++) { /* in the same memory */
        int64_t own = 0;
        for (int64_t row = 0; row < b->e->desc.n_virtual; row++)
            own = std::max(own, wanted_bytes(b->e->stage_descs[virtual_stage_at(s, row)], FORWARD_WORK + backward,
                                             b->most_rows));
        s->attention_at[backward] = at + align_256(own);
    }
    s->standalone_at = s->attention_at[1] + b->attention_bytes[1];
    m->forward_workspace = s->attention_at[0] + b->attention_bytes[0] - at;
    m->backward_workspace = s->standalone_at - at;
    if (b->e->has_state && !streams_state(b->e)) /* gradients of standalone chunks: all layers share one layer's
                                                    planes */
        m->backward_workspace += b->standalone_rows * row_bytes(b->e, true);
    m->workspace = std::max(m->forward_workspace, m->backward_workspace);
    s->ring_at = at + m->workspace;
    m->total = s->ring_at + (streams_state(b->e) ? m->state + m->gradient : 0);
}

void free_block(block *b) {
    if (b->data != NULL) (void)(b->pinned ? cudaFreeHost(b->data) : cudaFree(b->data));
    b->data = NULL;
    b->bytes = 0;
}

/* Enlarges a block that is too small. The old one is freed first, so that both need not fit at once. error->got: bytes
   that the device has free. */
cf_result take_block(block *b, int64_t bytes, int64_t stage_number, cf_error *error) {
    const char *const field = b->pinned ? "host" : "memory";
    void *data = NULL;
    size_t room = 0, all = 0;
    if (bytes <= b->bytes) return CF_OK;
    free_block(b);
    const cudaError_t status = b->pinned ? cudaMallocHost(&data, (size_t)bytes) : cudaMalloc(&data, (size_t)bytes);
    forget(status); /* a refused allocation must not make a later call fail */
    if (status != cudaSuccess && status != cudaErrorMemoryAllocation) return cuda_result(error, status, field);
    if (status != cudaSuccess && (b->pinned || cudaMemGetInfo(&room, &all) != cudaSuccess)) room = 0;
    if (status != cudaSuccess)
        return cf_fail(error, CF_ERROR_MEMORY, field, stage_number, bytes, (int64_t)room, "there is too little memory");
    b->data = static_cast<char *>(data);
    b->bytes = bytes;
    return CF_OK;
}

void drop_state_stream(stage *on) {
    cf_state_stream_free(on->state_stream);
    on->state_stream = NULL;
}

/* Makes the stream of the stage's state. It copies on OUT and IN, where only kept inputs and outputs are copied beside
   it. */
cf_result make_state_stream(stage_plan *s, cf_error *error) {
    const executor *e = s->b->e;
    const cf_attention_desc &a = e->desc.attention;
    cf_state_stream_desc d = {};
    drop_state_stream(s->on);
    if (!streams_state(e) || s->memory_used.state == 0) return CF_OK;
    d.state.n_kv_heads = a.n_kv_heads;
    d.state.head_size = a.head_size;
    d.state.dtype = a.dtype;
    d.block_rows = e->desc.state_block_rows;
    d.n_slots = e->desc.state_slots;
    d.ring = s->on->memory.data + s->ring_at;
    d.gradient_ring = s->on->memory.data + s->ring_at + s->memory_used.state;
    d.in = s->on->streams[IN];
    d.out = s->on->streams[OUT];
    d.allocator = &e->home.from;
    return cf_state_stream_create(&d, &s->on->state_stream, error);
}

/* Allocates what a planned batch needs of a device. There is always some memory, so that addresses of empty arrays are
   not NULL. Numbers that processes exchange lie behind the batch. */
cf_result take_stage(stage_plan *s, cf_error *error) {
    executor *e = s->b->e;
    const int64_t exchanged = has_nccl(e) ? 16 * s->b->schedule->n_actions + 256 : 0;
    const unsigned flags = e->desc.timeline ? cudaEventDefault : cudaEventDisableTiming;
    array<cudaEvent_t> *events = &s->on->events;
    cudaError_t status = cudaSetDevice(s->on->device);
    cf_result code = cuda_result(error, status, "devices");
    const int64_t bytes = std::max<int64_t>(s->memory_used.total + exchanged, 256);
    if (code == CF_OK) code = take_block(&s->on->memory, bytes, s->on->number, error);
    if (code == CF_OK) code = take_block(&s->on->host, s->memory_used.host, s->on->number, error);
    if (code == CF_OK && !events->reserve(&e->home, s->n_events)) code = no_memory(error);
    while (code == CF_OK && events->n < s->n_events) {
        status = cudaEventCreateWithFlags(&events->data[events->n], flags);
        if (status == cudaSuccess) events->n++;
        else code = cuda_result(error, status, "events");
    }
    if (code == CF_OK) code = make_state_stream(s, error);
    return code == CF_OK ? upload_chunks(s, error) : code;
}

/* ---- loading ---- */

/* Checks that the schedule fits the executor and is sound, and lowers it if needed. */
cf_result take_schedule(batch *b, const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    executor *e = b->e;
    const int64_t n_stages = e->desc.n_stages, n_virtual = e->desc.n_virtual;
    cf_lower_desc lower = {};
    cf_result code = check_range(schedule->shape.n_stages, n_stages, n_stages, "n_stages", -1, error);
    if (code == CF_OK) code = check_range(schedule->shape.n_virtual, n_virtual, n_virtual, "n_virtual", -1, error);
    if (code != CF_OK) return code;
    if (e->desc.outputs > 0 && schedule->shape.replay == CF_REPLAY_PIPELINE)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "outputs", -1, "are for local replay");
    lower.allocator = &e->home.from;
    if (!schedule->lowered && n_stages > 1) code = cf_schedule_lower(plan, schedule, &lower, &b->lowered, error);
    if (code != CF_OK) return code;
    b->plan = plan;
    b->schedule = b->lowered != NULL ? b->lowered : schedule;
    b->first_chunk = schedule->shape.rank * plan->chunks_per_rank;
    b->n_chunks = plan->chunks_per_rank;
    return cf_schedule_index_make(plan, b->schedule, &e->home.from, &b->index, error);
}

/* Does all of a load that needs no device. */
cf_result plan_batch(batch *b, const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    executor *e = b->e;
    e->home.failed = false;
    cf_result code = take_schedule(b, plan, schedule, error);
    if (code == CF_OK && !b->chunks.fill(&e->home, b->n_chunks)) code = no_memory(error);
    for (int64_t i = 0; i < b->n_chunks && code == CF_OK; i++)
        code = fill_chunk(b, b->first_chunk + i, &b->chunks[i], error);
    if (code == CF_OK) code = check_items(b, error);
    if (code != CF_OK) return code;
    for (int i = 0; i < 2 && e->desc.attention.n_heads != 0; i++)
        b->attention_bytes[i] += scratch_bytes(e->desc.attention, b->most_rows, i == 1, streams_state(e));
    if (!b->stages.fill(&e->home, e->stages.n)) return no_memory(error);
    for (int64_t i = 0; i < e->stages.n; i++)
        if (!start_plan(b, &b->stages[i], &e->stages[i])) return no_memory(error);
    code = find_order(b, error);
    for (int64_t i = 0; i < b->stages.n && code == CF_OK; i++) code = plan_stage(&b->stages[i], error);
    for (int64_t i = 0; i < b->stages.n && code == CF_OK; i++) lay_out_stage(&b->stages[i]);
    return code;
}

/* ---- NCCL ---- */

/* Reads a monotonic clock, in seconds. */
double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#ifdef CHUNKFLOW_NCCL

/* Checks a result of NCCL. A non-blocking communicator answers "in progress"; it is then asked until it is done. */
cf_result check_nccl(const executor *e, ncclResult_t status, cf_error *error) {
    const double start = seconds_now();
    while (status == ncclInProgress && seconds_now() - start <= e->desc.timeout)
        if (ncclCommGetAsyncError(e->desc.nccl, &status) != ncclSuccess) status = ncclSystemError;
    if (status == ncclSuccess) return CF_OK;
    return cf_fail(error, CF_ERROR_DEVICE, "nccl", -1, (int64_t)ncclSuccess, (int64_t)status,
                   ncclGetErrorString(status));
}

cf_result find_rank(executor *e, cf_error *error) {
    int n = 0, rank = 0, device = 0, current = 0;
    const cf_result ready = check_nccl(e, ncclInProgress, error); /* until it is made */
    if (ready != CF_OK) return ready;
    const cudaError_t found = cudaGetDevice(&current);
    ncclResult_t status = ncclCommCount(e->desc.nccl, &n);
    if (status == ncclSuccess) status = ncclCommUserRank(e->desc.nccl, &rank);
    if (status == ncclSuccess) status = ncclCommCuDevice(e->desc.nccl, &device);
    if (status != ncclSuccess) return check_nccl(e, status, error);
    if (found != cudaSuccess) return cuda_result(error, found, "devices");
    if (n != e->desc.n_stages)
        return cf_fail(error, CF_ERROR_ARGUMENT, "nccl", -1, e->desc.n_stages, n, "the communicator has another size");
    if (e->desc.devices != NULL) current = e->desc.devices[rank];
    if (current != device)
        return cf_fail(error, CF_ERROR_ARGUMENT, "devices", rank, device, current, "not the communicator's device");
    e->first_stage = rank;
    return CF_OK;
}

/* Returns whether a peer is lost; transfers with it would never end. */
bool peers_lost(const executor *e) {
    ncclResult_t state = ncclSuccess;
    if (!has_nccl(e) || e->aborted) return false;
    return ncclCommGetAsyncError(e->desc.nccl, &state) != ncclSuccess ||
           (state != ncclSuccess && state != ncclInProgress);
}

cf_result send_or_receive(const executor *e, bool sends, void *data, size_t bytes, int peer, cudaStream_t stream,
                          cf_error *error) {
    return check_nccl(e, sends ? ncclSend(data, bytes, ncclUint8, peer, e->desc.nccl, stream)
                               : ncclRecv(data, bytes, ncclUint8, peer, e->desc.nccl, stream), error);
}

/* Puts the sum or the largest over all processes into each of n numbers on the device. */
cf_result reduce(const executor *e, bool sum, double *numbers, int64_t n, cudaStream_t stream, cf_error *error) {
    const ncclRedOp_t op = sum ? ncclSum : ncclMax;
    return check_nccl(e, ncclAllReduce(numbers, numbers, (size_t)n, ncclFloat64, op, e->desc.nccl, stream), error);
}

/* Aborts the communicator, which ends what waits for a peer. */
void give_up(executor *e) {
    if (!e->aborted) (void)ncclCommAbort(e->desc.nccl);
    e->aborted = true;
    e->lost = false;
}

#else

cf_result find_rank(executor *, cf_error *error) {
    return cf_refuse(error, CF_ERROR_ARGUMENT, "nccl", -1, "chunkflow_cuda.cu was built without CHUNKFLOW_NCCL");
}
bool peers_lost(const executor *) { return false; }
cf_result send_or_receive(const executor *, bool, void *, size_t, int, cudaStream_t, cf_error *) { return CF_OK; }
cf_result reduce(const executor *, bool, double *, int64_t, cudaStream_t, cf_error *) { return CF_OK; }
void give_up(executor *) {}

#endif

/* ---- waiting for the device ---- */

/* Polls `query`, at once and then in small steps, until it is ready or fails. Returns cudaErrorNotReady after the
   timeout or if a peer is lost. An executor that is lost already waits only briefly. */
template <typename F> cudaError_t wait_until_ready(const executor *e, F query) {
    const double most = e->lost ? std::min(e->desc.timeout, 1.0) : e->desc.timeout;
    const double start = seconds_now();
    for (int64_t i = 0;; i++) {
        const cudaError_t status = query();
        if (status != cudaErrorNotReady) return status;
        forget(status);
        if (i < 1000) continue;
        if (seconds_now() - start > most || peers_lost(e)) return cudaErrorNotReady;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
}

/* Waits for the end of all streams. If the device does not finish, the executor is lost until it does. */
cf_result drain(executor *e, cf_error *error) {
    cudaError_t first = cudaSuccess;
    for (const stage &on : e->stages) {
        (void)cudaSetDevice(on.device);
        for (const cudaStream_t stream : on.streams) {
            const cudaError_t status = wait_until_ready(e, [&] { return cudaStreamQuery(stream); });
            e->lost |= status == cudaErrorNotReady;
            if (first == cudaSuccess) first = status;
        }
    }
    if (first == cudaErrorNotReady)
        return cf_fail(error, CF_ERROR_DEVICE, "timeout", -1, (int64_t)cudaSuccess, (int64_t)first,
                       "work on a stage's stream did not end in time");
    e->lost = false;
    return cuda_result(error, first, "device");
}

/* ---- errors of a run ---- */

/* Keeps the first failure: the name of the action, by its place in the schedule, then what happened and its number. */
void note_error(const batch *b, int64_t index, const cf_error &error) {
    executor *e = b->e;
    const cf_action &a = b->schedule->actions[index];
    const long long number = stage_of(b, a.stage);
    char place[64];
    if (e->failure.code != CF_OK) return;
    if (e->desc.n_virtual > 1)
        (void)snprintf(place, sizeof place, "virtual stage %d (stage %lld)", (int)a.stage, number);
    else
        (void)snprintf(place, sizeof place, "stage %lld", number);
    e->failure = error;
    e->failed_at = index;
    (void)snprintf(e->failure.text, sizeof e->failure.text, "%s of chunk %d on %s: %.150s",
                   cf_pass_name(static_cast<cf_pass>(a.pass)), (int)a.chunk, place, error.text);
}

void note_failure(const stage_plan *s, int64_t position, cf_result code, const char *field, const char *what,
                  int64_t got, const char *why) {
    cf_error error = {position, code, field, 0, got, ""};
    (void)snprintf(error.text, sizeof error.text, "%s %.200s (%lld)", what, why, (long long)got);
    note_error(s->b, s->first + position, error);
}

/* Notes a failure of CUDA. Returns whether all is well. */
bool check_cuda(const stage_plan *s, int64_t position, cudaError_t status, const char *what) {
    executor *e = s->b->e;
    const bool late = status == cudaErrorNotReady;
    if (status == cudaSuccess) return true;
    note_failure(s, position, CF_ERROR_DEVICE, late ? "timeout" : "device", what, (int64_t)status,
                 !late ? cudaGetErrorName(status) : peers_lost(e) ? "lost its peers" : "made no progress in time");
    e->lost |= late;
    return false;
}

/* Checks the last CUDA error after a callback, which may be that of a failed launch. If the callback only asked whether
   something is ready, it has not failed. */
bool check_left_behind(const stage_plan *s, int64_t position, const char *callback) {
    const cudaError_t status = cudaGetLastError();
    char what[32];
    (void)snprintf(what, sizeof what, "%s left", callback);
    return check_cuda(s, position, status == cudaErrorNotReady ? cudaSuccess : status, what);
}

/* ---- issuing an action ---- */

cudaStream_t own_stream(const stage_plan *s, const planned &p) { return s->on->streams[p.stream]; }

/* Issues an action: makes its stream wait for what the action needs, calls `put`, which puts the work there and returns
   whether it succeeded, and marks the end. */
template <typename F> bool issue(const stage_plan *s, int64_t position, F put) {
    const planned &p = s->plan[position];
    cudaError_t status = cudaSetDevice(s->on->device);
    for (int32_t i = 0; i < p.n_waits && status == cudaSuccess; i++)
        status = cudaStreamWaitEvent(own_stream(s, p),
                                     s->b->stages[p.waits[i].stage].on->events[p.waits[i].event], 0);
    if (status == cudaSuccess && s->b->e->desc.timeline)
        status = cudaEventRecord(s->on->events[p.event + 1], own_stream(s, p));
    if (!check_cuda(s, position, status, "waiting") || !put()) return false;
    return check_cuda(s, position, cudaEventRecord(s->on->events[p.event], own_stream(s, p)), "ending");
}

void *tensor_at(const stage_plan *s, int64_t slot) {
    return slot < 0 ? NULL : s->on->memory.data + s->tensors[slot].at;
}

void *input_of(const stage_plan *s, const planned &p) {
    return p.fetched_at < 0 ? tensor_at(s, p.input) : s->on->memory.data + s->inputs_at + p.fetched_at;
}

void *host_of(const stage_plan *s, const planned &p) { return s->on->host.data + s->kept[p.host].at; }

/* Returns K and V in a slot, or their gradient, from `row` on; in host memory if the state streams. Slot -1: chunks
   without a chain share the planes of one layer for their gradient. */
cf_state state_in(const stage_plan *s, const cf_step *step, const cf_chunk &c, int64_t slot, bool gradient,
                  int64_t row) {
    const batch *b = s->b;
    const cf_attention_desc &d = b->e->desc.attention;
    const block &memory = streams_state(b->e) ? s->on->host : s->on->memory;
    cf_state state = {};
    state.data = memory.data + (slot < 0 ? s->standalone_at : s->rows[gradient][slot].at) +
                 row * row_bytes(b->e, gradient) / 2;
    state.n_layers = b->e->stage_descs[step->action.stage].n_layers;
    state.n_kv_heads = d.n_kv_heads;
    state.head_size = d.head_size;
    state.dtype = gradient ? CF_DTYPE_FP32 : d.dtype;
    state.rows = state_rows(b, c);
    state.one_layer = slot < 0;
    return state;
}

/* Returns K and V of a chain, or their gradient. */
cf_state chain_state(const stage_plan *s, const cf_step *step, int64_t chain, bool gradient, int64_t row) {
    const int64_t stage = step->action.stage;
    const int64_t slot = gradient ? *gradient_slot(s, chain, stage) : state_slot(s, chain, stage);
    return state_in(s, step, s->b->plan->chunks[s->b->plan->chains[chain].first_chunk], slot, gradient, row);
}

/* Returns K and V of the chunk's chain or, if it has none, of the chunk itself; with `gradient`, their gradient.
   own_rows: begins at the chunk's own rows instead of the chain's first. */
cf_state state_of(const stage_plan *s, const cf_step *step, bool gradient, bool own_rows) {
    const cf_chunk &c = chunk_of(s, step);
    if (!has_chain(c))
        return state_in(s, step, c, gradient ? -1 : s->plan[step->position].rows, gradient, 0);
    return chain_state(s, step, c.chain, gradient, own_rows ? c.prefix - begin_of_chain(s->b->plan, c.chain) : 0);
}

/* Returns whether a pass computes attention, or its gradients. */
bool attends(const executor *e, const cf_action &a) {
    return a.pass != CF_W && (a.pass != CF_R || !keeps_outputs(e));
}

/* Returns whether a pass needs the stream: to read its prefix, to send its own rows, or to add their gradients that
   came back. */
bool needs_stream(const stage_plan *s, const cf_action &a) {
    const batch *b = s->b;
    const cf_chunk &c = b->plan->chunks[a.chunk];
    if (!streams_state(b->e) || !attends(b->e, a) || b->e->stage_descs[a.stage].n_layers == 0) return false;
    return has_chain(c) ? a.pass != CF_R || c.prefix > 0 : b->chunks[a.chunk - b->first_chunk].n_blocks > 0;
}

/* Returns whether other chunks read the rows that a chunk adds to its chain. */
bool is_read_again(const cf_chunk &c) { return c.down >= 0; }

/* Finds where the blocks of a tree's chunk lie. */
void list_places(const stage_plan *s, const cf_step *step, const chunk_data &data) {
    for (int64_t i = 0; i < data.n_blocks; i++) {
        cf_cuda_block *block = &s->blocks[data.first_block + i];
        const int64_t row = block->first - begin_of_chain(s->b->plan, block->chain);
        block->state = chain_state(s, step, block->chain, false, row);
        block->gradient =
            is_backward(step->action.pass) ? chain_state(s, step, block->chain, true, row) : cf_state();
    }
}

/* Returns what attention of a pass uses beside the chunk's own arrays. */
cf_cuda_walk walk_of(const stage_plan *s, const cf_step *step) {
    const batch *b = s->b;
    const cf_action &a = step->action;
    const cf_chunk &c = chunk_of(s, step);
    const chunk_data &data = b->chunks[a.chunk - b->first_chunk];
    const bool places = b->e->has_state && !streams_state(b->e) && is_branched(data) && attends(b->e, a);
    cf_cuda_walk out = {};
    if (places) list_places(s, step, data);
    if (needs_stream(s, a)) {
        out.stream = s->on->state_stream;
        out.append = a.pass == CF_F && is_read_again(c);
    }
    if (places || out.stream != NULL) {
        out.blocks = s->blocks.data + data.first_block;
        out.n_blocks = data.n_blocks;
    }
    out.levels = s->blocks.data + data.first_block + data.n_blocks;
    out.n_levels = data.n_levels;
    return out;
}

/* Finds the place where a pass keeps attention's outputs, or reads them. Returns whether it does either. */
bool find_outputs(const stage_plan *s, const cf_step *step, cf_cuda_outputs *to) {
    const executor *e = s->b->e;
    const stage &on = *s->on;
    if (step->outputs < 0 || !keeps_outputs(e)) return false;
    const int64_t at = s->outputs[step->outputs].at;
    to->layer_bytes = layer_outputs_bytes(e->desc.attention, chunk_of(s, step).rows);
    to->n_layers = e->stage_descs[step->action.stage].n_layers;
    to->data = on.memory.data + (moves_inputs(e) ? s->slots_at : at);
    if (!moves_inputs(e)) return true;
    to->host = on.host.data + at;
    to->out = on.streams[OUT];
    to->in = on.streams[IN];
    to->events = on.events.data + s->input_events + FIRST_OUTPUTS_EVENT;
    return true;
}

/* Returns the data of a pass for its callback. */
cf_cuda_step step_of(const stage_plan *s, const cf_step *step, const cf_cuda_walk *walk, cf_error *error) {
    const batch *b = s->b;
    const executor *e = b->e;
    const cf_action &a = step->action;
    const planned &p = s->plan[step->position];
    const chunk_data &data = b->chunks[a.chunk - b->first_chunk];
    const cf_chunk &c = chunk_of(s, step);
    const int64_t rows = c.rows;
    const bool backward = !is_forward(a.pass);
    const cf_cuda_stage &d = e->stage_descs[a.stage];
    cf_cuda_step out = {};
    out.step = step;
    out.plan = b->plan;
    out.chunk = &c;
    out.error = error;
    out.stream = own_stream(s, p);
    out.device = s->on->device;
    out.metadata = &data.metadata;
    out.positions = reinterpret_cast<const int32_t *>(s->on->memory.data + data.positions_at);
    if (data.attention != NULL) {
        out.attention = data.attention;
        out.tiles = s->on->memory.data + data.tiles_at;
        out.attention_workspace = s->on->memory.data + s->attention_at[backward];
        out.attention_workspace_bytes = (size_t)b->attention_bytes[backward];
    }
    const bool resident = e->has_state && !streams_state(e), branched = is_branched(data);
    const bool has_own = !has_chain(c);
    if (resident && a.pass != CF_W) out.state = state_of(s, step, false, branched);
    if (resident && is_backward(a.pass)) out.gradient = state_of(s, step, true, branched);
    out.overwrite = is_backward(a.pass) && (!resident || has_own || (!branched && step->clear_state_gradient));
    out.state_prefix = resident && !has_own && !branched ? c.prefix : 0;
    out.walk = walk;
    if (step->slot >= 0) {
        out.activations = s->on->memory.data + s->activations[step->slot].at;
        out.activation_bytes = wanted_bytes(d, ACTIVATIONS, rows);
    }
    out.workspace = s->on->memory.data + s->workspace_at;
    out.workspace_bytes = wanted_bytes(d, FORWARD_WORK + backward, rows);
    out.input = input_of(s, p);
    out.output = tensor_at(s, p.output);
    out.boundary_bytes = e->desc.boundary_bytes_per_token * rows;
    return out;
}

/* ---- copies beside a pass ---- */

cudaEvent_t input_event(const stage_plan *s, int which) { return s->on->events[s->input_events + which]; }

/* Clears dK and dV of chains that this backward of a tree is the first to add to: on the device, or in host memory
   before any of it is fetched. */
bool clear_gradients(const stage_plan *s, const cf_step *step) {
    const batch *b = s->b;
    const cudaStream_t compute = own_stream(s, s->plan[step->position]);
    cudaError_t status = cudaSuccess;
    const cf_path *states = s->steps->paths;
    if (b->plan->order == NULL || !b->e->has_state) return true;
    if (!streams_state(b->e) && !is_branched(b->chunks[step->action.chunk - b->first_chunk])) return true;
    for (int32_t i = step->path; i >= 0 && status == cudaSuccess; i = states[i].up) {
        if (states[i].clear != step->position) break;
        const cf_state g = chain_state(s, step, states[i].chain, true, 0);
        status = cudaMemsetAsync(g.data, 0, (size_t)(g.rows * g.n_layers * row_bytes(b->e, true)), compute);
        if (status == cudaSuccess && streams_state(b->e))
            status = order_streams(compute, input_event(s, CLEARED), s->on->streams[OUT]);
    }
    return check_cuda(s, step->position, status, "clearing gradients");
}

/* Copies to host memory the input that an F keeps for its R, once the F may run. The F's end waits for the copy. */
bool send_input(const stage_plan *s, int64_t position, const void *input, size_t bytes) {
    const cudaStream_t out = s->on->streams[OUT];
    const planned &p = s->plan[position];
    if (p.kept < position || bytes == 0) return true;
    cudaError_t status = order_streams(own_stream(s, p), input_event(s, INPUT_THERE), out);
    if (status == cudaSuccess)
        status = cudaMemcpyAsync(host_of(s, p), input, bytes, cudaMemcpyDeviceToHost, out);
    if (status == cudaSuccess) status = cudaEventRecord(input_event(s, INPUT_LEFT), out);
    return check_cuda(s, position, status, "keeping the input");
}

bool wait_for_input(const stage_plan *s, int64_t position, size_t bytes) {
    const planned &p = s->plan[position];
    if (p.kept < position || bytes == 0) return true;
    return check_cuda(s, position, cudaStreamWaitEvent(own_stream(s, p), input_event(s, INPUT_LEFT), 0), "waiting");
}

/* After a pass was issued, fetches the kept input of the next pass, if that is an R, once its slot is free. */
bool fetch_input(const stage_plan *s, int64_t position) {
    const int64_t at = s->plan[position].fetch;
    if (at < 0) return true;
    const cf_action &a = s->actions[at];
    const planned &p = s->plan[at];
    const cudaStream_t in = s->on->streams[IN];
    const size_t bytes = (size_t)(s->b->e->desc.boundary_bytes_per_token * s->b->plan->chunks[a.chunk].rows);
    cudaError_t status = cudaStreamWaitEvent(in, s->on->events[s->plan[p.kept].event], 0);
    if (status == cudaSuccess && p.fetch_after >= 0)
        status = cudaStreamWaitEvent(in, s->on->events[s->plan[p.fetch_after].event], 0);
    if (status == cudaSuccess && bytes > 0)
        status = cudaMemcpyAsync(input_of(s, p), host_of(s, p), bytes, cudaMemcpyHostToDevice, in);
    if (status == cudaSuccess) status = order_streams(in, input_event(s, INPUT_BACK), own_stream(s, p));
    return check_cuda(s, position, status, "bringing an input back");
}

bool note_stream(const stage_plan *s, int64_t position, cf_result code, const cf_error &why) {
    if (code != CF_OK) note_failure(s, position, code, why.field, "state stream", why.got, why.text);
    return code == CF_OK;
}

/* Lists the states of the chains above a chunk's own, from the root down. Returns how many, or -1 if they are too
   many. */
int64_t list_above(const stage_plan *s, const cf_step *step, bool grouped, cf_state_part *above) {
    const cf_path *states = s->steps->paths;
    int64_t n = 0;
    int32_t lowest = grouped ? states[step->path].up : step->path;
    for (int32_t i = lowest; i >= 0; i = states[i].up) n++;
    if (n >= MOST_PARTS) return -1;
    for (int64_t at = n - 1; at >= 0; at--, lowest = states[lowest].up) {
        const int64_t rows = std::min(states[lowest].rows, chunk_of(s, step).prefix - states[lowest].begin);
        above[at] = {chain_state(s, step, states[lowest].chain, false, 0), {}, rows};
        if (is_backward(step->action.pass)) above[at].gradient = chain_state(s, step, states[lowest].chain, true, 0);
    }
    return n;
}

bool begin_stream(const stage_plan *s, const cf_step *step) {
    const cf_action &a = step->action;
    const cf_plan *plan = s->b->plan;
    const cf_chunk &c = chunk_of(s, step);
    const bool grouped = has_chain(c);
    cf_state_pass pass = {};
    cf_state_part above[MOST_PARTS];
    cf_error why = {};
    if (!needs_stream(s, a)) return true;
    pass.above = above;
    pass.n_above = list_above(s, step, grouped, above);
    if (pass.n_above < 0)
        return note_stream(s, step->position, cf_refuse(&why, CF_ERROR_LIMIT, "n_above", -1, "too deep"), why);
    pass.state = grouped ? state_of(s, step, false, false) : above[0].state;
    if (is_backward(a.pass)) pass.gradient = grouped ? state_of(s, step, true, false) : above[0].gradient;
    pass.prefix = grouped ? c.prefix - begin_of_chain(plan, c.chain) : 0;
    pass.own = plan->chunks[a.chunk].state;
    pass.window = plan->order == NULL ? s->b->e->desc.attention.window : 0;
    pass.hidden = plan->order == NULL ? 0 : s->b->chunks[a.chunk - s->b->first_chunk].hidden;
    pass.overwrite = step->clear_state_gradient;
    return note_stream(s, step->position, cf_state_stream_begin(s->on->state_stream, &pass, &why), why);
}

/* Ends the stream's pass, also after a failed callback: otherwise the next run could not begin one. */
bool end_stream(const stage_plan *s, const cf_step *step) {
    cf_error why = {};
    if (!needs_stream(s, step->action)) return true;
    return note_stream(s, step->position,
                       cf_state_stream_end(s->on->state_stream, own_stream(s, s->plan[step->position]), &why), why);
}

/* Issues a pass. Failures are noted in the executor, where issue_all looks: with NCCL the lists continue without
   passes. An error that the callback filled in is returned as it is. */
void run_pass(const stage_plan *s, const cf_step *step) {
    const cf_executor_desc &d = s->b->e->desc;
    const char *name = is_forward(step->action.pass) ? "forward" : "backward";
    int (*const callback)(void *, const cf_cuda_step *) = is_forward(step->action.pass) ? d.forward : d.backward;
    s->b->e->n_ahead++;
    if (s->b->e->failure.code != CF_OK) return;
    const bool ok = issue(s, step->position, [&] {
        cf_error raised = {};
        cf_cuda_outputs outputs = {};
        cf_cuda_walk walk = walk_of(s, step);
        if (find_outputs(s, step, &outputs)) walk.outputs = &outputs;
        const cf_cuda_step cuda_step = step_of(s, step, &walk, &raised);
        const size_t bytes = (size_t)cuda_step.boundary_bytes;
        if (!send_input(s, step->position, cuda_step.input, bytes)) return false;
        if (!clear_gradients(s, step) || !begin_stream(s, step)) return false;
        const int number = callback != NULL ? callback(d.user, &cuda_step) : 0;
        if (number != 0 && raised.code != CF_OK) note_error(s->b, s->first + step->position, raised);
        else if (number != 0)
            note_failure(s, step->position, CF_ERROR_CALLBACK, name, name, number, "reported an error");
        const bool left_none = number == 0 && check_left_behind(s, step->position, name);
        return end_stream(s, step) && left_none && wait_for_input(s, step->position, bytes);
    });
    if (ok) (void)fetch_input(s, step->position);
}

void report_progress(const stage_plan *s, const cf_step *step) {
    const cf_executor_desc &d = s->b->e->desc;
    if (d.progress == NULL || s->b->e->failure.code != CF_OK) return;
    const int number = d.progress(d.user, s->on->number, step);
    if (number != 0)
        note_failure(s, step->position, CF_ERROR_CANCELLED, "progress", "progress", number, "asked to stop");
    else (void)check_left_behind(s, step->position, "progress");
}

/* Issues a transfer. In one process the receiver copies, and the SEND does nothing. A tensor without rows is not sent;
   both ends know that. */
void run_transfer(const stage_plan *s, const cf_step *step) {
    executor *e = s->b->e;
    const planned &p = s->plan[step->position];
    const size_t bytes = (size_t)(e->desc.boundary_bytes_per_token * chunk_of(s, step).rows);
    const bool sends = is_send(step->action.pass);
    if (p.event < 0) return; /* its RECV does it all */
    const bool ok = issue(s, step->position, [&] {
        cf_error why = {};
        void *data = tensor_at(s, sends ? p.output : p.input);
        if (bytes == 0) return true;
        if (!has_nccl(e)) {
            const stage_plan &peer = s->b->stages[p.peer];
            const void *from = tensor_at(&peer, peer.plan[p.partner].output);
            return check_cuda(s, step->position,
                              cudaMemcpyAsync(data, from, bytes, cudaMemcpyDefault, own_stream(s, p)), "copying");
        }
        if (send_or_receive(e, sends, data, bytes, p.peer, own_stream(s, p), &why) == CF_OK) return true;
        why.item = step->position;
        note_error(s->b, s->first + step->position, why);
        return false;
    });
    e->broken |= !ok;
}

/* ---- processes ---- */

/* Returns the stream of all exchanges between processes, in the order of the lists. */
cudaStream_t exchange_stream(const stage &on) { return on.streams[on.streams.n - 1]; }

double *exchange_memory(const executor *e) {
    return reinterpret_cast<double *>(e->stages[0].memory.data + e->loaded[0].stages[0].memory_used.total);
}

/* Reduces numbers in host memory over all processes, at most two for each action of the schedule. The stream must be
   empty, or the first copy could wait for ever. */
cf_result exchange(const executor *e, bool sum, double *numbers, int64_t n, cf_error *error) {
    const cudaStream_t stream = exchange_stream(e->stages[0]);
    const size_t bytes = (size_t)n * sizeof(double);
    double *there = exchange_memory(e);
    cudaError_t status = cudaSetDevice(e->stages[0].device);
    if (status == cudaSuccess) status = cudaMemcpyAsync(there, numbers, bytes, cudaMemcpyHostToDevice, stream);
    const cf_result code = status == cudaSuccess ? reduce(e, sum, there, n, stream, error) : CF_OK;
    if (code != CF_OK) return code;
    if (status == cudaSuccess) status = wait_until_ready(e, [&] { return cudaStreamQuery(stream); });
    if (status == cudaSuccess) status = cudaMemcpyAsync(numbers, there, bytes, cudaMemcpyDeviceToHost, stream);
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
    return cuda_result(error, status, "nccl");
}

/* Tells all processes, at the end of a run, which failure comes first in the schedule, as its action and code. A
   process that cannot continue aborts the communicator; the others find that a peer is lost, or run into the
   timeout. */
void agree(executor *e) {
    const batch *b = e->loaded.data;
    const double codes = 256.0;
    const bool failed = e->failure.code != CF_OK;
    double number = failed ? (double)(b->schedule->n_actions - e->failed_at) * codes + (double)e->failure.code : 0.0;
    const bool together = !e->broken && !e->lost && !peers_lost(e) && exchange(e, false, &number, 1, NULL) == CF_OK;
    if (!together) give_up(e);
    if (!together && !failed)
        (void)cf_refuse(&e->failure, CF_ERROR_DEVICE, "nccl", -1, "the other stages do not answer");
    if (!together || failed || !(number > 0.0)) return;
    const int64_t index = b->schedule->n_actions - (int64_t)(number / codes);
    const int64_t from = stage_of(b, b->schedule->actions[index].stage);
    cf_error why = {};
    (void)cf_fail(&why, static_cast<cf_result>((int64_t)number % (int64_t)codes), "nccl",
                  index - b->schedule->first[from], e->first_stage, from, "it failed in another process");
    note_error(b, index, why);
}

/* Gathers the times of all stages. Each process knows its own, and has 0 for the others. A transfer begins when both
   ends have reached it, because the first one waits in it, and ends when the tensor has arrived. */
cf_result gather_times(executor *e, double *times, int64_t n, cf_error *error) {
    const batch *b = e->loaded.data;
    const cf_schedule *s = b->schedule;
    const cf_result code = exchange(e, true, times, 2 * n, error);
    if (code != CF_OK) give_up(e); /* or the next call would wait for ever */
    if (code != CF_OK) return code;
    for (int64_t i = 0; i < s->n_actions; i++) {
        const cf_action &a = s->actions[i];
        if (!is_send(a.pass)) continue;
        const int64_t receive =
            cf_schedule_find(b->index, static_cast<cf_pass>(a.pass + 1), a.chunk, other_end(a));
        times[i] = times[receive] = std::max(times[i], times[receive]);
        times[n + i] = times[n + receive] = std::max(times[receive], times[n + receive]);
    }
    return CF_OK;
}

/* ---- running ---- */

/* Sets time 0 of a run: a moment at which nothing runs, the same for all stages of a device; with NCCL, the arrival of
   the last process. */
cf_result start_clocks(executor *e, cf_error *error) {
    cf_result code = drain(e, error);
    for (const stage &on : e->stages) {
        const cudaStream_t stream = exchange_stream(on);
        cudaError_t status = cudaSetDevice(on.device);
        if (code == CF_OK && has_nccl(e)) code = reduce(e, false, exchange_memory(e), 1, stream, error);
        if (code != CF_OK) return code;
        if (status == cudaSuccess) status = cudaEventRecord(on.base, stream);
        if (status == cudaSuccess) status = cudaStreamWaitEvent(on.streams[COMPUTE], on.base, 0);
        if (status != cudaSuccess) return cuda_result(error, status, "timeline");
    }
    return code;
}

/* Waits for the first n actions in the order of issue. So a failure names the first action that is not known to have
   ended. */
bool await(executor *e, int64_t n) {
    const batch *b = e->loaded.data;
    while (e->n_ended < n) {
        stage_plan *s = &b->stages[b->order[e->n_ended]];
        const planned &p = s->plan[s->n_done];
        const auto query = [&] { return cudaEventQuery(s->on->events[p.event]); };
        if (p.event >= 0 && !check_cuda(s, s->n_done, wait_until_ready(e, query), "running")) return false;
        if (is_pass(s->actions[s->n_done].pass)) e->n_ahead--;
        s->n_done++;
        e->n_ended++;
    }
    return true;
}

/* Puts all actions on their streams; returns how many it issued.

   Only a few passes are issued ahead of the device. A stream takes about a thousand launches; the next launch blocks
   inside the callback. If the device hangs or a peer is lost, it blocks for ever, and no timeout is noticed.

   A failure ends the loop. With NCCL the other processes wait for the remaining transfers, so these continue one by
   one, whatever the buffers hold. All processes come to their ends and can tell each other.

   Why nothing waits for ever: an action waits only for actions before it in the order of issue, and, over NCCL, for
   actions of peers. Lowered lists finish even if every send waits for its receiver. So the actions before one in its
   list finish without it and all that follows it. Hence the host may wait for a stage's earlier actions at any
   point. */
int64_t issue_all(executor *e) {
    const batch *b = e->loaded.data;
    for (int64_t i = 0; i < b->order.n; i++) {
        stage_plan &s = b->stages[b->order[i]];
        const cf_step *step = &s.steps->steps[s.n_issued++];
        if (is_pass(step->action.pass)) run_pass(&s, step);
        else run_transfer(&s, step);
        report_progress(&s, step);
        bool ok = true;
        if (e->failure.code != CF_OK ? has_nccl(e) && !e->broken : e->desc.blocking) ok = await(e, i + 1);
        while (ok && e->failure.code == CF_OK && e->n_ahead > PASSES_AHEAD * b->stages.n) ok = await(e, e->n_ended + 1);
        if (!ok) e->broken = true;
        if (e->failure.code != CF_OK && (e->broken || !has_nccl(e))) return i + 1;
    }
    return b->order.n;
}

/* Issues all actions and waits for their ends. After a failure the device does nothing more, so later calls, also those
   of callbacks, report the failure of an earlier action. A later action is named only if all before it have ended. */
void issue_and_await(executor *e) {
    const int64_t n = issue_all(e);
    const cf_error found = e->failure;
    bool dead = false;
    for (const stage &on : e->stages) {
        const cudaError_t status = cudaStreamQuery(on.streams[COMPUTE]);
        dead |= status != cudaSuccess && status != cudaErrorNotReady;
    }
    forget(cudaErrorNotReady);
    if (found.code != CF_OK && !dead) return;
    e->failure = cf_error();
    if (await(e, n)) e->failure = found;
}

/* Runs a batch. Fails if there is a CUDA error from before, because callbacks' errors appear at the same place. */
cf_result run_batch(executor *e, cudaError_t before, cf_error *error) {
    batch *b = e->loaded.data;
    e->failure = cf_error();
    e->failed_at = b->stages[0].first;
    e->n_ended = e->n_ahead = 0;
    e->broken = false;
    b->timed = false;
    if (before != cudaSuccess)
        (void)cf_fail(&e->failure, CF_ERROR_DEVICE, "device", -1, (int64_t)cudaSuccess, (int64_t)before,
                      "a CUDA call before this run left its error");
    cf_error why = {};
    cf_result code = CF_OK;
    for (stage_plan &s : b->stages) s.n_done = s.n_issued = 0;
    if (e->desc.timeline && (has_nccl(e) || before == cudaSuccess)) code = start_clocks(e, &why);
    e->broken = code != CF_OK;
    if (e->failure.code == CF_OK) e->failure = why;
    if (e->failure.code == CF_OK || (has_nccl(e) && !e->broken)) issue_and_await(e);
    if (has_nccl(e)) agree(e);
    b->timed = e->failure.code == CF_OK && e->desc.timeline;
    if (e->failure.code == CF_OK) return CF_OK;
    (void)drain(e, NULL);
    if (error != NULL) *error = e->failure;
    return e->failure.code;
}

/* ---- the timeline ---- */

/* Reads when each action of a stage began and ended. A SEND lasts as long as its RECV. Stages on one device share its
   clock, to the last bit. */
cf_result read_times(const stage_plan *s, double *start, double *end, cf_error *error) {
    const batch *b = s->b;
    for (int64_t i = 0; i < s->n_actions; i++) {
        const bool waits = s->plan[i].event < 0;
        const stage_plan *from = waits ? &b->stages[s->plan[i].peer] : s;
        const int64_t event = waits ? from->plan[s->plan[i].partner].event : s->plan[i].event;
        const stage *clock = b->e->stages.data;
        float milliseconds[2] = {0.0f, 0.0f};
        while (clock->device != from->on->device) clock++;
        cudaError_t status = cudaEventElapsedTime(&milliseconds[0], clock->base, from->on->events[event + 1]);
        if (status == cudaSuccess)
            status = cudaEventElapsedTime(&milliseconds[1], clock->base, from->on->events[event]);
        if (status != cudaSuccess) return cuda_result(error, status, "timeline");
        start[s->first + i] = 1e-3 * (double)milliseconds[0];
        end[s->first + i] = 1e-3 * (double)std::max(milliseconds[0], milliseconds[1]);
    }
    return CF_OK;
}

/* ---- making one ---- */

cf_result check_desc(cf_executor_desc *d, cf_error *error) {
    if (d->n_stages == 0) d->n_stages = 1;
    if (d->n_virtual == 0) d->n_virtual = 1;
    if (d->state_slots == 0) d->state_slots = CF_STATE_SLOTS;
    if (d->timeout == 0.0) d->timeout = 600.0;
    cf_result code = check_range(d->n_stages, 1, CF_MAX_STAGES, "n_stages", -1, error);
    if (code == CF_OK) code = check_range(d->n_virtual, 1, CF_MAX_STAGES / d->n_stages, "n_virtual", -1, error);
    if (code != CF_OK) return code;
    const int64_t n = d->n_stages * d->n_virtual;
    if (d->nccl == NULL && n > MOST_LOCAL_STAGES)
        return cf_fail(error, CF_ERROR_LIMIT, "n_stages", -1, MOST_LOCAL_STAGES, n,
                       "too many virtual stages in one process");
    if (!(d->timeout > 0.0 && d->timeout <= 1e9))
        return cf_fail_real(error, CF_ERROR_ARGUMENT, "timeout", -1, d->timeout,
                            "must be a positive number of seconds");
    code = check_bounds({{"memory_limit", d->memory_limit, 0, INT64_MAX},
                         {"state_block_rows", d->state_block_rows, 0, MOST_ROWS},
                         {"state_slots", d->state_slots, 2, MOST_STREAM_SLOTS},
                         {"outputs", d->outputs, 0, 2},
                         /* needed with more than one virtual stage */
                         {"boundary_bytes_per_token", d->boundary_bytes_per_token, n > 1, MOST_BYTES}}, error);
    if (code == CF_OK && d->stages == NULL) code = cf_fail_null(error, "stages");
    for (int64_t i = 0; i < n && code == CF_OK; i++) {
        const cf_cuda_stage &s = d->stages[i];
        code = check_range(s.n_layers, 0, CF_MAX_LAYERS, "stages.n_layers", i, error);
        for (const auto &w : wanted) {
            if (code == CF_OK) code = check_range(s.*w.fixed, 0, MOST_BYTES, w.fixed_name, i, error);
            if (code == CF_OK) code = check_range(s.*w.each, 0, MOST_BYTES, w.each_name, i, error);
        }
    }
    return code;
}

bool are_alike(const executor *e) {
    for (const stage &on : e->stages)
        if (on.arch != e->stages[0].arch) return false;
    return true;
}

/* Refuses devices on which attention prepared for the lowest of them would not start. */
cf_result check_devices(const executor *e, cf_error *error) {
    const cf_attention_desc &d = e->desc.attention;
    if (d.n_heads == 0 || d.path == CF_ATTENTION_UNFUSED || are_alike(e)) return CF_OK;
    for (const stage &on : e->stages) {
        if (d.path == CF_ATTENTION_WGMMA && on.arch != 90)
            return cf_fail(error, CF_ERROR_ARGUMENT, "devices", on.number, 90, on.arch,
                           "attention.path is not for this architecture");
        if (block_memory(on.arch) < block_memory(d.arch))
            return cf_fail(error, CF_ERROR_ARGUMENT, "devices", on.number, block_memory(d.arch), block_memory(on.arch),
                           "has too little shared memory a block for the tiles of the least architecture");
    }
    return CF_OK;
}

/* Checks attention except for the slices, which come with a batch. Attention is wanted if there are heads; state
   without attention, if there are key heads. */
cf_result check_attention(executor *e, cf_error *error) {
    static const int32_t nothing[1] = {0};
    cf_attention_desc *d = &e->desc.attention;
    const int64_t most_row = (int64_t)1 << 30;
    size_t bytes = 0;
    const int64_t block_rows = e->desc.state_block_rows;
    if (d->n_heads == 0 && e->desc.outputs > 0)
        return cf_fail(error, CF_ERROR_ARGUMENT, "outputs", -1, 0, e->desc.outputs, "there is no attention");
    if (d->n_heads == 0 && d->n_kv_heads == 0 && d->head_size == 0)
        return block_rows == 0 ? CF_OK : cf_fail(error, CF_ERROR_ARGUMENT, "state_block_rows", -1, 0, block_rows,
                                                 "there is no state");
    cf_attention_desc empty = *d;
    if (d->n_heads == 0) empty.n_heads = d->n_kv_heads;
    if (d->n_heads == 0) empty.path = CF_ATTENTION_AUTO;
    empty.n_slices = 0;
    empty.cu_seqlens_q = empty.cu_seqlens_k = nothing;
    empty.starts_q = empty.starts_k = NULL;
    if (number_of(empty.path) == CF_ATTENTION_AUTO && !are_alike(e)) { /* not path 3, which only 9.0 has */
        empty.path = CF_ATTENTION_MMA;
        if (cf_attention_size(&empty, &bytes, NULL) != CF_OK) empty.path = CF_ATTENTION_UNFUSED;
    }
    problem p;
    const path_entry *path = NULL;
    cf_result code = resolve(&empty, &p, error);
    if (code == CF_OK) code = choose_path(&p, &path, error);
    if (code != CF_OK) return code;
    d->path = path->path; /* for all stages and batches */
    if (d->n_kv_heads == 0) d->n_kv_heads = d->n_heads;
    if (d->dtype == CF_DTYPE_DEFAULT) d->dtype = CF_DTYPE_BF16;
    for (int64_t i = 0; i < e->n_virtual_stages; i++)
        if (e->stage_descs[i].n_layers > most_row / 8 / (d->n_kv_heads * d->head_size))
            return cf_fail(error, CF_ERROR_LIMIT, "stages.n_layers", i, most_row / 8 / (d->n_kv_heads * d->head_size),
                           e->stage_descs[i].n_layers, "a row of the state is too large");
    const int64_t most_rows = MOST_BYTES / (2 * 4 * d->n_kv_heads * d->head_size) / e->desc.state_slots;
    if (block_rows > most_rows)
        return cf_fail(error, CF_ERROR_LIMIT, "state_block_rows", -1, most_rows, block_rows, "the ring is too large");
    e->has_state = true;
    return CF_OK;
}

/* Makes streams. Passes have the lowest priority, so that NCCL's few blocks, for which others wait, do not queue behind
   them. */
cf_result make_streams(executor *e, stage *on, cf_error *error) {
    const int64_t n = FIRST_LINK + (e->desc.n_stages == 1 ? 0 : has_nccl(e) ? 1 : 2 * e->desc.n_virtual);
    int least = 0, greatest = 0;
    cudaError_t status = cudaSetDevice(on->device);
    if (status == cudaSuccess) status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (!on->streams.reserve(&e->home, n)) return no_memory(error);
    while (status == cudaSuccess && on->streams.n < n) {
        status = cudaStreamCreateWithPriority(&on->streams.data[on->streams.n], cudaStreamNonBlocking,
                                              on->streams.n == COMPUTE ? least : greatest);
        on->streams.n += status == cudaSuccess;
    }
    if (status == cudaSuccess && e->desc.timeline) status = cudaEventCreateWithFlags(&on->base, cudaEventDefault);
    return cuda_result(error, status, "streams");
}

/* Makes transfers direct where a device can reach another's memory. A refusal only makes them slower. */
void allow_peers(const executor *e) {
    const int64_t n = e->stages.n;
    for (int64_t i = 0; i < n; i++)
        for (const int64_t neighbour : {(i + 1) % n, (i + n - 1) % n}) {
            const int own = e->stages[i].device, other = e->stages[neighbour].device;
            int can = 0;
            if (own != other && cudaDeviceCanAccessPeer(&can, own, other) == cudaSuccess && can &&
                cudaSetDevice(own) == cudaSuccess)
                forget(cudaDeviceEnablePeerAccess(other, 0)); /* allowed already, or refused */
        }
}

/* Makes the stages. Attention is prepared once, for the lowest of the devices; AUTO is path 3 only if all of them have
   its code. An architecture given by the application stands for all devices, with the usual number of processors. */
cf_result make_stages(executor *e, cf_error *error) {
    int n_devices = 0, current = 0;
    cudaError_t status = cudaGetDeviceCount(&n_devices);
    if (status == cudaSuccess) status = cudaGetDevice(&current);
    if (status != cudaSuccess) return cuda_result(error, status, "devices");
    if (!e->stages.fill(&e->home, has_nccl(e) ? 1 : e->desc.n_stages)) return no_memory(error);
    int64_t least_arch = INT64_MAX, least_processors = INT64_MAX;
    for (int64_t i = 0; i < e->stages.n; i++) {
        stage *on = &e->stages[i];
        on->number = e->first_stage + i;
        on->host.pinned = true;
        on->device = e->desc.devices != NULL ? e->desc.devices[on->number] : current;
        if (on->device < 0 || on->device >= n_devices)
            return cf_fail(error, CF_ERROR_ARGUMENT, "devices", on->number, n_devices - 1, on->device,
                           "no such device");
        int64_t n_processors = 0;
        cf_result code = make_streams(e, on, error);
        if (code == CF_OK) code = current_arch(&on->arch, error);
        if (code == CF_OK) code = current_processors(&n_processors, error);
        if (code != CF_OK) return code;
        least_arch = std::min(least_arch, on->arch);
        least_processors = std::min(least_processors, n_processors);
        if (i > 0 && on->device == e->stages[i - 1].device) continue;
        code = cuda_result(error, load_kernels(), "kernels");
        if (code != CF_OK) return code;
    }
    if (!has_nccl(e)) allow_peers(e);
    cf_attention_desc *d = &e->desc.attention;
    if (d->arch == 0 && d->n_processors == 0)
        d->n_processors = std::max<int64_t>(1, least_processors - (has_nccl(e) ? CF_NCCL_CHANNELS : 0));
    if (d->arch == 0) d->arch = least_arch;
    const cf_result code = check_attention(e, error);
    return code == CF_OK ? check_devices(e, error) : code;
}

/* Frees an executor, except memory that a hung device may still use: freeing that would wait for ever. */
void free_executor(executor *e) {
    const cf_allocator from = e->home.from;
    (void)drain(e, NULL);
    e->loaded.clear();
    for (stage &on : e->stages) {
        (void)cudaSetDevice(on.device);
        drop_state_stream(&on);
        for (const cudaEvent_t event : on.events) (void)cudaEventDestroy(event);
        for (const cudaStream_t stream : on.streams) (void)cudaStreamDestroy(stream);
        if (on.base != NULL) (void)cudaEventDestroy(on.base);
        if (!e->lost) free_block(&on.memory);
        if (!e->lost) free_block(&on.host);
    }
    e->~executor();
    from.release(e, from.user);
}

const stage *stage_here(const executor *e, int64_t number) {
    const int64_t i = number - e->first_stage;
    return i >= 0 && i < e->stages.n ? &e->stages[i] : NULL;
}

/* Checks that the executor can be used: not from its own callbacks, nor once its device or a peer is lost. */
cf_result check_usable(executor *e, cf_error *error) {
    if (e == NULL) return cf_fail_null(error, "executor");
    if (e->busy) return cf_fail(error, CF_ERROR_ARGUMENT, "executor", -1, 0, 1, "a callback must not call this");
    if (e->aborted)
        return cf_fail(error, CF_ERROR_DEVICE, "nccl", -1, 0, 1, "the communicator was given up after an error");
    const cf_result code = e->lost ? drain(e, error) : CF_OK;
    return e->lost ? code : CF_OK;
}

} /* namespace */

extern "C" {

cf_result cf_executor_create(const cf_executor_desc *desc, cf_executor **out, cf_error *error) {
    const keep_thread kept;
    cf_allocator from;
    if (desc == NULL) return cf_fail_null(error, "desc");
    if (out == NULL) return cf_fail_null(error, "out");
    cf_executor_desc d = *desc;
    cf_result code = cf_allocator_resolve(d.allocator, &from, error);
    if (code == CF_OK) code = check_desc(&d, error);
    void *memory = NULL;
    if (code == CF_OK) code = cf_allocate(&from, sizeof(executor), &memory, error);
    if (code != CF_OK) return code;
    executor *e = new (memory) executor();
    e->home.from = from;
    e->desc = d;
    e->n_virtual_stages = d.n_stages * d.n_virtual;
    for (int64_t i = 0; i < e->n_virtual_stages; i++) (void)e->stage_descs.push(&e->home, d.stages[i]);
    if (e->home.failed) code = no_memory(error);
    if (code == CF_OK && has_nccl(e)) code = find_rank(e, error);
    if (code == CF_OK) code = make_stages(e, error);
    if (code == CF_OK) *out = reinterpret_cast<cf_executor *>(e);
    else free_executor(e);
    return code;
}

cf_result cf_executor_load(cf_executor *executor_, const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    const keep_thread kept;
    executor *e = opened(executor_);
    const bool may_load = e != NULL && !e->busy;
    const bool is_own = may_load && schedule != NULL && e->loaded.n > 0 && schedule == e->loaded[0].lowered;
    if (may_load) e->loaded.clear(); /* its plan may be freed now, even if the new load fails */
    cf_result code = check_usable(e, error);
    if (code != CF_OK) return code;
    if (plan == NULL) return cf_fail_null(error, "plan");
    if (schedule == NULL) return cf_fail_null(error, "schedule");
    if (is_own)
        return cf_fail(error, CF_ERROR_ARGUMENT, "schedule", -1, 0, 1, "is the executor's own, which a load frees");
    code = drain(e, error); /* work that the application put on the streams */
    if (code != CF_OK) return code;
    if (!e->loaded.fill(&e->home, 1, e)) return no_memory(error);
    code = plan_batch(e->loaded.data, plan, schedule, error);
    for (stage_plan &s : e->loaded[0].stages) {
        const int64_t bytes = s.memory_used.total;
        if (code == CF_OK && e->desc.memory_limit > 0 && bytes > e->desc.memory_limit)
            code = cf_fail(error, CF_ERROR_LIMIT, "memory_limit", s.on->number, bytes, e->desc.memory_limit,
                           "the stage needs more memory");
    }
    for (stage_plan &s : e->loaded[0].stages)
        if (code == CF_OK) code = take_stage(&s, error);
    if (code != CF_OK) e->loaded.clear();
    return code;
}

cf_result cf_executor_run(cf_executor *executor_, cf_error *error) {
    const keep_thread kept;
    executor *e = opened(executor_);
    cf_result code = check_usable(e, error);
    if (code == CF_OK && e->loaded.n == 0)
        code = cf_fail(error, CF_ERROR_ARGUMENT, "executor", -1, 1, 0, "no batch is loaded");
    if (code != CF_OK) return code;
    e->busy = true;
    code = run_batch(e, kept.before, error);
    e->busy = false;
    return code;
}

cf_cuda_stream cf_executor_stream(const cf_executor *executor_, int64_t number) {
    const stage *on = executor_ != NULL ? stage_here(opened(executor_), number) : NULL;
    return on != NULL ? on->streams[COMPUTE] : NULL;
}

const cf_schedule *cf_executor_schedule(const cf_executor *executor_) {
    const executor *e = opened(executor_);
    return e != NULL && e->loaded.n > 0 ? e->loaded[0].schedule : NULL;
}

cf_result cf_executor_memory_of(const cf_executor *executor_, const cf_plan *plan, const cf_schedule *schedule,
                                cf_executor_memory *out, cf_error *error) {
    const keep_thread kept;
    if (executor_ == NULL) return cf_fail_null(error, "executor");
    if (plan == NULL && schedule != NULL) return cf_fail_null(error, "plan");
    if (schedule == NULL && plan != NULL) return cf_fail_null(error, "schedule");
    if (out == NULL) return cf_fail_null(error, "out");
    executor *e = opened(executor_);
    batch asked(e);
    const cf_result code = plan != NULL ? plan_batch(&asked, plan, schedule, error) : CF_OK;
    if (code != CF_OK) return code;
    const batch *b = plan != NULL ? &asked : e->loaded.n > 0 ? e->loaded.data : NULL;
    for (int64_t i = 0; i < e->desc.n_stages; i++) {
        const stage *on = stage_here(e, i);
        out[i] = on != NULL && b != NULL ? b->stages[i - e->first_stage].memory_used : cf_executor_memory();
        if (on != NULL) out[i].allocated = on->memory.bytes;
    }
    return CF_OK;
}

cf_result cf_executor_timeline(cf_executor *executor_, const cf_allocator *allocator, cf_timeline **out,
                               cf_error *error) {
    const keep_thread kept;
    executor *e = opened(executor_);
    heap home = {};
    if (e == NULL) return cf_fail_null(error, "executor");
    if (out == NULL) return cf_fail_null(error, "out");
    const batch *b = e->loaded.data;
    if (e->loaded.n == 0 || !b->timed)
        return cf_fail(error, CF_ERROR_ARGUMENT, "timeline", -1, 1, 0, "needs desc.timeline and a run that ended well");
    cf_result code = cf_allocator_resolve(allocator, &home.from, error);
    if (code != CF_OK) return code;
    const int64_t n = b->schedule->n_actions;
    array<double> times; /* starts, then ends */
    if (!times.fill(&home, 2 * n, 0.0)) return no_memory(error);
    for (const stage_plan &s : b->stages)
        if (code == CF_OK) code = read_times(&s, times.data, times.data + n, error);
    if (code == CF_OK && has_nccl(e)) code = gather_times(e, times.data, n, error);
    const cf_simulate_desc desc = {NULL, {}, 0, times.data, times.data + n, allocator};
    return code == CF_OK ? cf_simulate(b->plan, b->schedule, &desc, out, error) : code;
}

void cf_executor_free(cf_executor *executor_) {
    const keep_thread kept;
    if (executor_ != NULL) free_executor(opened(executor_));
}

} /* extern "C" */

#endif /* CHUNKFLOW_CUDA_HEADER_ONLY */
