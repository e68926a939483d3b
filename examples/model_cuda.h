/* model_cuda.h - the decoder of model.h on a GPU: one part of it, one chunk at a time - MIT or public domain

   The model (RMSNorm, rotary positions, grouped-query attention with biases on Q, K and V, SwiGLU), its configuration,
   the names of its tensors and their initial values are model.h's. The head is untied, and there is no dropout. Matrix
   products are cuBLAS's, attention and state chunkflow_cuda.cu's; the other kernels are simple and not tuned.

   Replace this file for a model of your own. The executor needs
       stage_needs                   bytes that a part keeps and uses for each token of a chunk
       part_forward, part_backward   put one pass on the stream of a cf_cuda_step
   Read >>activations and >>passes.

   Sections: >>errors >>numbers >>kernels >>parts >>activations >>passes. */

#ifndef TRAIN_MODEL_CUDA_H
#define TRAIN_MODEL_CUDA_H

#define CHUNKFLOW_CUDA_HEADER_ONLY
#include "../chunkflow_cuda.cu"
#include "model.h"
#include "text.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

/* ================================================================================================================
   >>errors
   ================================================================================================================ */

/* Outside passes, an error ends the program and names the call. */
#define MUST_CUDA(call)                                                                                       \
    do {                                                                                                      \
        cudaError_t status_ = (call);                                                                         \
        if (status_ != cudaSuccess) fail(EXIT_CHECK_FAILED, "%s: %s", #call, cudaGetErrorString(status_));    \
    } while (0)
#define MUST_CUBLAS(call)                                                                                     \
    do {                                                                                                      \
        cublasStatus_t status_ = (call);                                                                      \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                                                 \
            fail(EXIT_CHECK_FAILED, "%s: %s", #call, cublasGetStatusName(status_));                           \
    } while (0)
#define MUST(call)                                                                                            \
    do {                                                                                                      \
        cf_error error;                                                                                       \
        memset(&error, 0, sizeof error);                                                                      \
        cf_result result_ = (call);                                                                           \
        if (result_ != CF_OK) fail(exit_code_of(result_), "%.*s: %s", (int)strcspn(#call, "("), #call, error.text); \
    } while (0)

static int exit_code_of(cf_result result) {
    return result == CF_ERROR_ARGUMENT || result == CF_ERROR_LIMIT || result == CF_ERROR_INFEASIBLE ? EXIT_BAD_INPUT
                                                                                                    : EXIT_CHECK_FAILED;
}

/* ================================================================================================================
   >>numbers    T, the type of weights and activations, is float, __half or __nv_bfloat16; sums are always float
   ================================================================================================================ */

static __host__ __device__ inline float to_float(float x) { return x; }
static __host__ __device__ inline float to_float(__half x) { return __half2float(x); }
static __host__ __device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T> __host__ __device__ inline T from_float(float x);
template <> __host__ __device__ inline float from_float<float>(float x) { return x; }
template <> __host__ __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __host__ __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

static inline cudaDataType cublas_type(const float *) { return CUDA_R_32F; }
static inline cudaDataType cublas_type(const __half *) { return CUDA_R_16F; }
static inline cudaDataType cublas_type(const __nv_bfloat16 *) { return CUDA_R_16BF; }

/* ================================================================================================================
   >>kernels    a warp takes a row; no result depends on the order in which warps run
   ================================================================================================================ */

#define WARP 32
#define WARPS 4 /* of a block */

static __device__ inline int64_t row_of_warp() { return (int64_t)blockIdx.x * WARPS + threadIdx.y; }

static __device__ inline float warp_sum(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    return x;
}

static __device__ inline float warp_max(float x) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
    return x;
}

/* Looks up rows of the table; a token of -1 (padding) gives zeros. */
template <typename T>
__global__ void embed_kernel(int64_t rows, T *out, const int32_t *token, const T *table, int64_t width) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    for (int64_t c = threadIdx.x; c < width; c += WARP)
        out[row * width + c] = token[row] < 0 ? from_float<T>(0) : table[token[row] * width + c];
}

/* Each thread has a column and takes the rows in order. */
template <typename T>
__global__ void embed_backward_kernel(int64_t rows, float *dtable, const int32_t *token, const T *dout, int64_t width) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= width) return;
    for (int64_t row = 0; row < rows; row++)
        if (token[row] >= 0) dtable[token[row] * width + c] += to_float(dout[row * width + c]);
}

template <typename T> __global__ void repeat_row_kernel(int64_t rows, T *out, const T *row_to_repeat, int64_t width) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    for (int64_t c = threadIdx.x; c < width; c += WARP) out[row * width + c] = row_to_repeat[c];
}

/* scale[row] keeps 1 / rms for the backward. */
template <typename T>
__global__ void rmsnorm_kernel(int64_t rows, T *out, float *scale, const T *x, const T *gain, int64_t width,
                               float epsilon) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    float squares = 0;
    for (int64_t c = threadIdx.x; c < width; c += WARP) {
        const float number = to_float(x[row * width + c]);
        squares += number * number;
    }
    const float s = 1 / sqrtf(warp_sum(squares) / (float)width + epsilon);
    if (threadIdx.x == 0) scale[row] = s;
    for (int64_t c = threadIdx.x; c < width; c += WARP)
        out[row * width + c] = from_float<T>(to_float(x[row * width + c]) * s * to_float(gain[c]));
}

/* Replaces x, the residual stream before the norm, by its gradient: the part past the norm (dpast; NULL: none) plus the
   part through it (dout). No thread reads a number of x that another one writes. */
template <typename T>
__global__ void rmsnorm_backward_kernel(int64_t rows, T *x, const float *scale, const T *dout, const T *dpast,
                                        const T *gain, int64_t width) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    const float s = scale[row];
    float along = 0;
    for (int64_t c = threadIdx.x; c < width; c += WARP)
        along += to_float(dout[row * width + c]) * to_float(gain[c]) * to_float(x[row * width + c]);
    along = warp_sum(along) * s / (float)width;
    for (int64_t c = threadIdx.x; c < width; c += WARP) {
        const int64_t i = row * width + c;
        const float through = s * (to_float(dout[i]) * to_float(gain[c]) - to_float(x[i]) * s * along);
        x[i] = from_float<T>((dpast ? to_float(dpast[i]) : 0) + through);
    }
}

/* out[c] += sum over rows of a[row][c], or of a[row][c] x[row][c] scale[row]. Each warp has a column. */
template <typename T>
__global__ void add_column_sums_kernel(int64_t columns, float *out, const T *a, const T *x, const float *scale,
                                       int64_t rows) {
    const int64_t c = row_of_warp();
    if (c >= columns) return;
    float sum = 0;
    for (int64_t row = threadIdx.x; row < rows; row += WARP)
        sum += to_float(a[row * columns + c]) * (x ? to_float(x[row * columns + c]) * scale[row] : 1);
    sum = warp_sum(sum);
    if (threadIdx.x == 0) out[c] += sum;
}

/* out = silu(gate) x up; a row of gate_up is gate, then up. */
template <typename T> __global__ void swiglu_kernel(int64_t rows, T *out, const T *gate_up, int64_t width) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    for (int64_t c = threadIdx.x; c < width; c += WARP) {
        const float gate = to_float(gate_up[2 * row * width + c]), up = to_float(gate_up[(2 * row + 1) * width + c]);
        out[row * width + c] = from_float<T>(gate / (1 + expf(-gate)) * up);
    }
}

/* Replaces gate and up by their gradients. */
template <typename T> __global__ void swiglu_backward_kernel(int64_t rows, T *gate_up, const T *dout, int64_t width) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    for (int64_t c = threadIdx.x; c < width; c += WARP) {
        const float gate = to_float(gate_up[2 * row * width + c]), up = to_float(gate_up[(2 * row + 1) * width + c]);
        const float d = to_float(dout[row * width + c]), sigmoid = 1 / (1 + expf(-gate));
        gate_up[2 * row * width + c] = from_float<T>(d * up * sigmoid * (1 + gate * (1 - sigmoid)));
        gate_up[(2 * row + 1) * width + c] = from_float<T>(d * gate * sigmoid);
    }
}

/* Computes the loss of each row, and the gradient of the sum of all losses by the logits. A row has the targets
   first[row] .. first[row + 1] - 1: none, one, or several where sequences diverge, each with its weight (NULL: 1). */
template <typename T>
__global__ void cross_entropy_kernel(int64_t rows, T *dlogits, float *loss, const float *logits, const int32_t *first,
                                     const int32_t *target, const float *weight, int64_t width) {
    const int64_t row = row_of_warp();
    if (row >= rows) return;
    const int32_t begin = first[row], end = first[row + 1];
    const float *x = logits + row * width;
    float highest = -INFINITY, total = 0;
    for (int64_t c = threadIdx.x; c < width; c += WARP) highest = fmaxf(highest, x[c]);
    highest = warp_max(highest);
    for (int64_t c = threadIdx.x; c < width; c += WARP) total += expf(x[c] - highest);
    total = warp_sum(total);
    float sum = 0;
    for (int32_t i = begin; i < end; i++) sum += (weight ? weight[i] : 1) * (logf(total) - (x[target[i]] - highest));
    if (threadIdx.x == 0) loss[row] = sum;
    for (int64_t c = threadIdx.x; c < width; c += WARP) {
        const float probability = expf(x[c] - highest) / total;
        float slope = 0;
        for (int32_t i = begin; i < end; i++)
            slope += (weight ? weight[i] : 1) * (probability - (c == target[i] ? 1 : 0));
        dlogits[row * width + c] = from_float<T>(slope);
    }
}

typedef struct adam_numbers {
    float rate, beta1, beta2, epsilon, correct1, correct2, gradient_scale;
} adam_numbers;

template <typename T>
__global__ void adam_kernel(int64_t n, T *parameters, float *master, float *first, float *second, const float *gradient,
                            adam_numbers k) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float g = gradient[i] * k.gradient_scale;
    first[i] = k.beta1 * first[i] + (1 - k.beta1) * g;
    second[i] = k.beta2 * second[i] + (1 - k.beta2) * g * g;
    master[i] -= k.rate * first[i] * k.correct1 / (sqrtf(second[i] * k.correct2) + k.epsilon);
    parameters[i] = from_float<T>(master[i]);
}

template <typename... P, typename... A>
static cudaError_t launch(void (*kernel)(P...), int64_t blocks, dim3 threads, cudaStream_t stream, A... arguments) {
    cudaLaunchConfig_t config = {};
    if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = threads;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/* ================================================================================================================
   >>parts    the share of the model that one virtual stage has, on its device
   ================================================================================================================ */

/* The places of the parameters in an array of a whole part: offsets in numbers. A matrix is (inputs, outputs),
   row-major. Weights, gradients and the optimizer's moments all have this layout. */
typedef struct layout {
    int64_t norm1, qkv, bias;            /* in a layer: (hidden), (hidden, q + k + v), (q + k + v), */
    int64_t sinks;                       /* (heads), if layers have them */
    int64_t o, norm2, gate_up, down;     /* (hidden, hidden), (hidden), (hidden, 2 ffn), (ffn, hidden) */
    int64_t layer;                       /* from layer to layer */
    int64_t embedding, final_norm, head; /* after all layers: (vocabulary, hidden), (hidden), (vocabulary, hidden) */
    int64_t count;
} layout;

typedef struct part {
    const model_config *config;
    stage range;                 /* its layers, and whether it has embedding and head */
    int device;
    cf_dtype type;
    cublasHandle_t cublas;       /* of the stage */
    const cf_attention_backend *backend; /* attention by another library; NULL: chunkflow_cuda.cu's */
    layout at;
    void *parameters;            /* (at.count) T: read by the products */
    float *master, *gradient, *first, *second; /* (at.count) */
    cf_rope rope;                /* its table is on the device */
    int32_t *tokens, *first_target; /* rows of all chunks of the batch, one chunk after another ... */
    int32_t *targets;            /* of the rows, in cross_entropy_kernel's form */
    float *target_weights;       /* NULL: 1 */
    float *loss;
    const int64_t *first_row;    /* ... the first row of each chunk, in host memory */
} part;

static int64_t n_layers_of(const part *p) { return p->range.end_layer - p->range.first_layer; }
static int64_t kv_width(const part *p) { return kv_width_of(p->config); }
static int64_t qkv_width(const part *p) { return p->config->hidden + 2 * kv_width(p); }
static int has_sinks(const part *p, int64_t layer) {
    return layer_kind_of(p->config, p->range.first_layer + layer).sinks;
}

static int64_t next_offset(int64_t *end, int64_t count) {
    int64_t offset = *end;
    *end += (count + 63) / 64 * 64;
    return offset;
}

static layout layout_of(const part *p) {
    const int64_t h = p->config->hidden, f = p->config->ffn, table = p->config->vocabulary * h;
    layout at = {};
    int64_t end = 0;
    at.norm1 = next_offset(&end, h);
    at.qkv = next_offset(&end, h * qkv_width(p));
    at.bias = next_offset(&end, qkv_width(p));
    at.o = next_offset(&end, h * h);
    at.norm2 = next_offset(&end, h);
    at.gate_up = next_offset(&end, h * 2 * f);
    at.down = next_offset(&end, f * h);
    at.layer = end;
    end *= n_layers_of(p);
    at.embedding = next_offset(&end, p->range.has_embedding ? table : 0);
    at.final_norm = next_offset(&end, p->range.has_head ? h : 0);
    at.head = next_offset(&end, p->range.has_head ? table : 0);
    at.count = end;
    return at;
}

/* The place of one of model.h's tensors in a part's array: its rows of `columns` numbers are `stride` apart. */
typedef struct piece {
    int64_t tensor; /* index into model.h's list */
    int64_t offset, columns, stride;
} piece;

/* Lists all pieces of a part. list: room for as many as the model has tensors. */
static int64_t list_pieces(const part *p, piece *list) {
    const int64_t h = p->config->hidden, f = p->config->ffn, kv = kv_width(p), qkv = qkv_width(p);
    const int64_t after_layers = 1 + p->config->layers * TENSORS_PER_LAYER;
    const layout *at = &p->at;
    const piece layer[TENSORS_PER_LAYER] = {
        {0, at->norm1, h, h},         {1, at->qkv, h, qkv},            {2, at->bias, h, h},
        {3, at->qkv + h, kv, qkv},    {4, at->bias + h, kv, kv},       {5, at->qkv + h + kv, kv, qkv},
        {6, at->bias + h + kv, kv, kv}, {7, at->o, h, h},              {8, at->norm2, h, h},
        {9, at->gate_up, f, 2 * f},   {10, at->gate_up + f, f, 2 * f}, {11, at->down, h, h},
    };
    int64_t n = 0;
    for (int64_t i = 0; i < n_layers_of(p); i++) {
        for (int64_t t = 0; t < TENSORS_PER_LAYER; t++) {
            list[n] = layer[t];
            list[n].tensor += 1 + (p->range.first_layer + i) * TENSORS_PER_LAYER;
            list[n++].offset += i * at->layer;
        }
    }
    if (p->range.has_embedding) list[n++] = {0, at->embedding, h, h};
    if (p->range.has_head) list[n++] = {after_layers, at->final_norm, h, h};
    if (p->range.has_head) list[n++] = {after_layers + 1, at->head, h, h};
    return n;
}

/* Calls `use` on every number of a part, on the host (model.h's layout) and in a copy of the device's array. */
template <typename T, typename F> static void each_number(const part *p, const weights *host, T *flat, F use) {
    piece *list = TAKE(piece, host->n_tensors);
    const int64_t n = list_pieces(p, list);
    for (int64_t i = 0; i < n; i++) {
        const tensor *t = &host->tensors[list[i].tensor];
        for (int64_t j = 0; j < t->count; j++) {
            const int64_t row = j / list[i].columns, column = j % list[i].columns;
            use(&host->flat[t->offset + j], &flat[list[i].offset + row * list[i].stride + column]);
        }
    }
    free(list);
}

/* Allocates a device array of `count` T, filled with NaN to expose reads of unwritten numbers. */
template <typename T> static T *take_device(int64_t count) {
    T *memory = NULL;
    const size_t bytes = (size_t)max_of(count, 1) * sizeof(T);
    MUST_CUDA(cudaMalloc((void **)&memory, bytes));
    MUST_CUDA(cudaMemset(memory, 0xFF, bytes));
    MUST_CUDA(cudaStreamSynchronize(NULL)); /* the executor's streams do not wait for the default stream */
    return memory;
}

template <typename T> static void upload(T *to, const T *from, int64_t count) {
    MUST_CUDA(cudaMemcpy(to, from, (size_t)count * sizeof(T), cudaMemcpyHostToDevice));
    MUST_CUDA(cudaStreamSynchronize(NULL));
}

/* Replaces the last batch's array by the next one's. */
template <typename T> static void replace_on_device(T **array, const T *host, int64_t count) {
    MUST_CUDA(cudaFree(*array));
    *array = take_device<T>(count);
    if (host) upload(*array, host, count);
}

template <typename T> static T *download(const T *from, int64_t count) {
    T *to = TAKE(T, count);
    MUST_CUDA(cudaMemcpy(to, from, (size_t)count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

static cf_rope rope_of(const model_config *c, int64_t n_positions) {
    cf_rope rope;
    memset(&rope, 0, sizeof rope);
    rope.n_positions = n_positions;
    rope.base = c->rope_theta;
    return rope;
}

/* Copies the weights `w` to the device. With 16-bit numbers `w` is then rounded to the device's values. n_positions:
   length of the longest sequence. */
template <typename T>
static part part_new(const model_config *c, stage range, int device, cf_dtype type, cublasHandle_t cublas,
                     const weights *w, int64_t n_positions) {
    part p;
    size_t bytes = 0;
    memset(&p, 0, sizeof p);
    MUST_CUDA(cudaSetDevice(device));
    p.config = c;
    p.range = range;
    p.device = device;
    p.type = type;
    p.cublas = cublas;
    p.at = layout_of(&p);
    float *master = TAKE(float, p.at.count);
    T *parameters = TAKE(T, p.at.count);
    each_number(&p, w, parameters, [](real *host, T *own) { *host = to_float(*own = from_float<T>((float)*host)); });
    each_number(&p, w, master, [](real *host, float *own) { *own = (float)*host; });
    upload((T *)(p.parameters = take_device<T>(p.at.count)), parameters, p.at.count);
    upload(p.master = take_device<float>(p.at.count), master, p.at.count);
    float *zeros = TAKE(float, p.at.count), **const others[] = {&p.gradient, &p.first, &p.second};
    for (float **array : others) upload(*array = take_device<float>(p.at.count), zeros, p.at.count);
    free(zeros);
    p.rope = rope_of(c, n_positions);
    MUST(cf_rope_size(&p.rope, head_dim_of(c), &bytes, &error));
    float *table = TAKE(float, (int64_t)(bytes / sizeof(float)));
    MUST(cf_rope_fill(&p.rope, head_dim_of(c), table, bytes, &error));
    upload((float *)(p.rope.table = take_device<float>((int64_t)(bytes / sizeof(float)))), table,
           (int64_t)(bytes / sizeof(float)));
    free(table);
    free(master);
    free(parameters);
    return p;
}

static void part_free(part *p) {
    MUST_CUDA(cudaSetDevice(p->device));
    void *const all[] = {p->parameters, p->master, p->gradient, p->first, p->second, (void *)p->rope.table, p->tokens,
                         p->first_target, p->targets, p->target_weights, p->loss};
    for (void *memory : all) MUST_CUDA(cudaFree(memory));
    memset(p, 0, sizeof *p);
}

/* ================================================================================================================
   >>activations    what a stage keeps of a chunk from forward to backward, and what it needs for one pass

   The backward leaves gradients in place of activations that are no longer read: each stored residual stream becomes
   its own gradient, and so does gate_up, and qkv gets the gradient of the projections. So everything that the weights'
   gradients (pass W) need is there when pass I has ended, and a split backward needs no more memory.
   ================================================================================================================
   */

template <typename T> struct layer_activations_of {
    T *stream;         /* (hidden) at the layer's input; then its gradient */
    T *normed1;        /* (hidden) */
    T *qkv;            /* (q + k + v), as attention leaves them; then the gradients of all three */
    T *attended;       /* (hidden) */
    T *middle;         /* (hidden) the stream between attention and feed-forward; then its gradient */
    T *normed2;        /* (hidden) */
    T *gate_up;        /* (2 ffn); then its gradient */
    T *gated;          /* (ffn) */
    float *scale1, *scale2, *lse; /* (1), (1), (heads) */
};

template <typename T> struct activations_of {
    T *stream;         /* (hidden) after the last layer; then its gradient */
    T *normed;         /* (hidden); this and the next two exist only with a head */
    T *dlogits;        /* (vocabulary) */
    float *scale;
    layer_activations_of<T> layer0;
    int64_t layer_bytes; /* from layer to layer; 0 if they are not kept and all use the same */
};

/* Scratch of one pass. */
template <typename T> struct scratch_of {
    T *dnormed, *dgated, *dattended; /* backward */
    float *logits;                   /* forward, with a head */
};

/* Hands out arrays of `rows` rows, or only adds up their sizes if `at` is NULL. */
typedef struct area {
    char *at;
    int64_t rows;
    int64_t bytes_per_row, n_arrays;
} area;

#define ARRAY_ALIGNMENT 256

template <typename N> static N *take_rows(area *a, int64_t width) {
    char *array = a->at;
    const int64_t row = width * (int64_t)sizeof(N);
    a->bytes_per_row += row;
    a->n_arrays++;
    if (a->at) a->at += (a->rows * row + ARRAY_ALIGNMENT - 1) / ARRAY_ALIGNMENT * ARRAY_ALIGNMENT;
    return (N *)(void *)array;
}

template <typename T> static layer_activations_of<T> take_layer(area *a, const part *p) {
    const model_config *c = p->config;
    layer_activations_of<T> l;
    l.stream = take_rows<T>(a, c->hidden);
    l.normed1 = take_rows<T>(a, c->hidden);
    l.qkv = take_rows<T>(a, qkv_width(p));
    l.attended = take_rows<T>(a, c->hidden);
    l.middle = take_rows<T>(a, c->hidden);
    l.normed2 = take_rows<T>(a, c->hidden);
    l.gate_up = take_rows<T>(a, 2 * c->ffn);
    l.gated = take_rows<T>(a, c->ffn);
    l.scale1 = take_rows<float>(a, 1);
    l.scale2 = take_rows<float>(a, 1);
    l.lse = take_rows<float>(a, c->heads);
    return l;
}

template <typename T> static activations_of<T> take_activations(area *a, const part *p, int keep) {
    const int head = p->range.has_head;
    activations_of<T> k;
    k.stream = take_rows<T>(a, p->config->hidden);
    k.normed = take_rows<T>(a, head ? p->config->hidden : 0);
    k.dlogits = take_rows<T>(a, head ? p->config->vocabulary : 0);
    k.scale = take_rows<float>(a, head ? 1 : 0);
    char *begin = a->at;
    k.layer0 = take_layer<T>(a, p);
    k.layer_bytes = keep ? a->at - begin : 0;
    for (int64_t i = 1; i < n_layers_of(p) && keep; i++) take_layer<T>(a, p);
    return k;
}

template <typename T> static scratch_of<T> take_scratch(area *a, const part *p, int backward) {
    scratch_of<T> s;
    s.dnormed = take_rows<T>(a, backward ? p->config->hidden : 0);
    s.dgated = take_rows<T>(a, backward ? p->config->ffn : 0);
    s.dattended = take_rows<T>(a, backward ? p->config->hidden : 0);
    s.logits = take_rows<float>(a, p->range.has_head && !backward ? p->config->vocabulary : 0);
    return s;
}

/* Returns the executor's description of a stage: bytes, for each token and for alignment. */
template <typename T> static cf_cuda_stage stage_needs(const part *p) {
    area kept = {NULL, 0, 0, 0}, forward = {NULL, 0, 0, 0}, backward = {NULL, 0, 0, 0};
    cf_cuda_stage needs;
    take_activations<T>(&kept, p, 1);
    take_scratch<T>(&forward, p, 0);
    take_activations<T>(&forward, p, 0); /* for a forward that keeps nothing */
    take_scratch<T>(&backward, p, 1);
    needs.n_layers = n_layers_of(p);
    needs.activation_bytes = kept.n_arrays * ARRAY_ALIGNMENT;
    needs.activation_bytes_per_token = kept.bytes_per_row;
    needs.forward_bytes = forward.n_arrays * ARRAY_ALIGNMENT;
    needs.forward_bytes_per_token = forward.bytes_per_row;
    needs.backward_bytes = backward.n_arrays * ARRAY_ALIGNMENT;
    needs.backward_bytes_per_token = backward.bytes_per_row;
    return needs;
}

/* ================================================================================================================
   >>passes    forward and backward of one chunk through one part
   ================================================================================================================ */

template <typename T> struct pass_of {
    const part *own;
    const cf_cuda_step *step;
    int64_t rows;           /* of the chunk, padding included */
    int64_t first_row;      /* of the chunk, in the batch's tokens */
    activations_of<T> kept;
    scratch_of<T> scratch;
    int failed;             /* 1: the step's error has the reason; nothing more is put on the stream */
};

template <typename T> static void check(pass_of<T> *p, const char *what, const char *problem) {
    if (!problem || p->failed) return;
    (void)cf_refuse(p->step->error, CF_ERROR_CALLBACK, what, -1, problem);
    p->failed = 1;
}

template <typename T> static void check(pass_of<T> *p, const char *what, cudaError_t status) {
    check(p, what, status == cudaSuccess ? NULL : cudaGetErrorString(status));
}

/* Calls a function of the library with its arguments before `error`. */
#define LIBRARY(p, function, ...)                                                               \
    do {                                                                                        \
        if (!(p)->failed) (p)->failed = function(__VA_ARGS__, (p)->step->error) != CF_OK; \
    } while (0)

/* Launches a kernel on all rows of the chunk. */
template <typename T, typename... P, typename... A>
static void on_rows(pass_of<T> *p, const char *name, void (*kernel)(int64_t, P...), A... arguments) {
    if (p->failed) return;
    check(p, name, launch(kernel, (p->rows + WARPS - 1) / WARPS, dim3(WARP, WARPS), p->step->stream, p->rows,
                          arguments...));
}

/* out (columns) += sums over the rows of a, or of a x scale. */
template <typename T>
static void add_column_sums(pass_of<T> *p, float *out, int64_t columns, const T *a, const T *x, const float *scale) {
    if (p->failed) return;
    check(p, "column sums", launch(add_column_sums_kernel<T>, (columns + WARPS - 1) / WARPS, dim3(WARP, WARPS),
                                   p->step->stream, columns, out, a, x, scale, p->rows));
}

template <typename T> static void copy_rows_of(pass_of<T> *p, void *to, const void *from, int64_t width) {
    if (p->failed || to == NULL || from == NULL) return;
    check(p, "copy", cudaMemcpyAsync(to, from, (size_t)(p->rows * width) * sizeof(T), cudaMemcpyDeviceToDevice,
                                     p->step->stream));
}

/* Column-major c (m, n) = op(a) (m, k) op(b) (k, n) + beta c, with sums in float. */
template <typename T, typename C>
static void gemm(pass_of<T> *p, cublasOperation_t op_a, cublasOperation_t op_b, int64_t m, int64_t n, int64_t k,
                 const T *a, int64_t lda, const T *b, int64_t ldb, float beta, C *c) {
    const float one = 1;
    if (p->failed) return;
    cublasStatus_t status =
        cublasGemmEx(p->own->cublas, op_a, op_b, (int)m, (int)n, (int)k, &one, a, cublas_type(a), (int)lda, b,
                     cublas_type(b), (int)ldb, &beta, c, cublas_type(c), (int)m, CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT);
    check(p, "cublasGemmEx", status == CUBLAS_STATUS_SUCCESS ? NULL : cublasGetStatusName(status));
}

/* out (rows, outputs) = x (rows, inputs) w (inputs, outputs), or added to it with beta 1. cuBLAS gets the transposed
   product. */
template <typename T>
static void linear(pass_of<T> *p, T *out, const T *x, const T *w, int64_t inputs, int64_t outputs, float beta) {
    gemm(p, CUBLAS_OP_N, CUBLAS_OP_N, outputs, p->rows, inputs, w, outputs, x, inputs, beta, out);
}

/* dx (rows, inputs) = dout (rows, outputs) w^T */
template <typename T, typename C>
static void linear_backward(pass_of<T> *p, C *dx, const T *dout, const T *w, int64_t inputs, int64_t outputs) {
    gemm(p, CUBLAS_OP_T, CUBLAS_OP_N, inputs, p->rows, outputs, w, outputs, dout, outputs, 0, dx);
}

/* dw (inputs, outputs) += x^T dout, in float */
template <typename T>
static void add_weight_gradient(pass_of<T> *p, float *dw, const T *x, const T *dout, int64_t inputs, int64_t outputs) {
    gemm(p, CUBLAS_OP_N, CUBLAS_OP_T, outputs, inputs, p->rows, dout, outputs, x, inputs, 1, dw);
}

template <typename T>
static pass_of<T> begin_pass(const part *own, const cf_cuda_step *step) {
    pass_of<T> p = {};
    area kept = {(char *)step->activations, step->chunk->rows, 0, 0};
    area scratch = {(char *)step->workspace, kept.rows, 0, 0};
    p.own = own;
    p.step = step;
    p.rows = kept.rows;
    p.first_row = own->first_row[step->step->action.chunk];
    p.scratch = take_scratch<T>(&scratch, own, step->step->action.pass != CF_F && step->step->action.pass != CF_R);
    p.kept = step->activations ? take_activations<T>(&kept, own, 1) : take_activations<T>(&scratch, own, 0);
    return p;
}

template <typename T> static layer_activations_of<T> layer_at(const pass_of<T> *p, int64_t layer) {
    layer_activations_of<T> l = p->kept.layer0;
    const int64_t n = layer * p->kept.layer_bytes;
    T **const arrays[] = {&l.stream, &l.normed1, &l.qkv, &l.attended, &l.middle, &l.normed2, &l.gate_up, &l.gated};
    float **const floats[] = {&l.scale1, &l.scale2, &l.lse};
    for (T **array : arrays) *array = (T *)(void *)((char *)*array + n);
    for (float **array : floats) *array = (float *)(void *)((char *)*array + n);
    return l;
}

/* Returns where a layer's residual stream goes: the next layer's input, or the output. */
template <typename T> static T *stream_after(const pass_of<T> *p, int64_t layer) {
    return layer + 1 < n_layers_of(p->own) ? layer_at(p, layer + 1).stream : p->kept.stream;
}

template <typename T> static const T *weights_of(const pass_of<T> *p, int64_t layer) {
    return (const T *)p->own->parameters + layer * p->own->at.layer;
}

/* Returns columns of a packed array: q, k or v of qkv. */
template <typename T> static cf_tensor columns_of(T *array, int64_t first, int64_t width) {
    cf_tensor t = {array + first, width, 0};
    return t;
}

/* Describes one layer's attention; in the backward, from dattended to the gradient of the projections, in qkv. */
template <typename T> static cf_layer_attention attention_of_layer(const pass_of<T> *p, int64_t layer) {
    const int64_t h = p->own->config->hidden, kv = kv_width(p->own), width = qkv_width(p->own);
    const layer_activations_of<T> a = layer_at(p, layer);
    cf_layer_attention x;
    memset(&x, 0, sizeof x);
    x.layer = layer;
    x.rope = p->own->rope;
    x.q = x.dq = columns_of(a.qkv, 0, width);
    x.k = x.dk = columns_of(a.qkv, h, width);
    x.v = x.dv = columns_of(a.qkv, h + kv, width);
    x.out = columns_of(a.attended, 0, h);
    x.lse = a.lse;
    x.dout = columns_of(p->scratch.dattended, 0, h);
    x.cublas = p->own->cublas;
    x.backend = p->own->backend;
    if (has_sinks(p->own, layer)) { /* in float, because they are few */
        x.sinks = p->own->master + layer * p->own->at.layer + p->own->at.sinks;
        x.dsinks = p->own->gradient + layer * p->own->at.layer + p->own->at.sinks;
    }
    return x;
}

template <typename T> static void attention_forward(pass_of<T> *p, int64_t layer) {
    const cf_layer_attention x = attention_of_layer(p, layer);
    LIBRARY(p, cf_layer_attention_forward, p->step, &x);
}

template <typename T> static void attention_backward(pass_of<T> *p, int64_t layer) {
    const cf_layer_attention x = attention_of_layer(p, layer);
    LIBRARY(p, cf_layer_attention_backward, p->step, &x);
}

/* ---- one layer ---- */

template <typename T> static void layer_forward(pass_of<T> *p, int64_t layer) {
    const part *own = p->own;
    const layout *at = &own->at;
    const int64_t h = own->config->hidden, f = own->config->ffn, qkv = qkv_width(own);
    const float epsilon = (float)own->config->norm_epsilon;
    const layer_activations_of<T> a = layer_at(p, layer);
    const T *w = weights_of(p, layer);
    T *out = stream_after(p, layer);
    on_rows(p, "norm1", rmsnorm_kernel<T>, a.normed1, a.scale1, a.stream, w + at->norm1, h, epsilon);
    on_rows(p, "bias", repeat_row_kernel<T>, a.qkv, w + at->bias, qkv);
    linear(p, a.qkv, a.normed1, w + at->qkv, h, qkv, 1);
    attention_forward(p, layer);
    copy_rows_of(p, a.middle, a.stream, h);
    linear(p, a.middle, a.attended, w + at->o, h, h, 1);
    on_rows(p, "norm2", rmsnorm_kernel<T>, a.normed2, a.scale2, a.middle, w + at->norm2, h, epsilon);
    linear(p, a.gate_up, a.normed2, w + at->gate_up, h, 2 * f, 0);
    on_rows(p, "swiglu", swiglu_kernel<T>, a.gated, a.gate_up, f);
    copy_rows_of(p, out, a.middle, h);
    linear(p, out, a.gated, w + at->down, f, h, 1);
}

/* Runs backward down to the layer's input. The gains of the norms, which cost almost nothing, get their gradients
   here. */
template <typename T> static void layer_backward_input(pass_of<T> *p, int64_t layer) {
    const part *own = p->own;
    const layout *at = &own->at;
    const int64_t h = own->config->hidden, f = own->config->ffn, qkv = qkv_width(own);
    const layer_activations_of<T> a = layer_at(p, layer);
    const scratch_of<T> s = p->scratch;
    const T *w = weights_of(p, layer), *dout = stream_after(p, layer);
    float *g = own->gradient + layer * at->layer;
    linear_backward(p, s.dgated, dout, w + at->down, f, h);
    on_rows(p, "swiglu backward", swiglu_backward_kernel<T>, a.gate_up, s.dgated, f);
    linear_backward(p, s.dnormed, a.gate_up, w + at->gate_up, h, 2 * f);
    add_column_sums(p, g + at->norm2, h, s.dnormed, a.middle, a.scale2);
    on_rows(p, "norm2 backward", rmsnorm_backward_kernel<T>, a.middle, a.scale2, s.dnormed, dout, w + at->norm2, h);
    linear_backward(p, s.dattended, a.middle, w + at->o, h, h);
    attention_backward(p, layer);
    linear_backward(p, s.dnormed, a.qkv, w + at->qkv, h, qkv);
    add_column_sums(p, g + at->norm1, h, s.dnormed, a.stream, a.scale1);
    on_rows(p, "norm1 backward", rmsnorm_backward_kernel<T>, a.stream, a.scale1, s.dnormed, a.middle, w + at->norm1,
            h);
}

template <typename T> static void layer_backward_weights(pass_of<T> *p, int64_t layer) {
    const part *own = p->own;
    const layout *at = &own->at;
    const int64_t h = own->config->hidden, f = own->config->ffn, qkv = qkv_width(own);
    const layer_activations_of<T> a = layer_at(p, layer);
    float *g = own->gradient + layer * at->layer, *const no_scale = NULL;
    T *const alone = NULL;
    add_weight_gradient(p, g + at->down, a.gated, stream_after(p, layer), f, h);
    add_weight_gradient(p, g + at->gate_up, a.normed2, a.gate_up, h, 2 * f);
    add_weight_gradient(p, g + at->o, a.attended, a.middle, h, h);
    add_weight_gradient(p, g + at->qkv, a.normed1, a.qkv, h, qkv);
    add_column_sums(p, g + at->bias, qkv, a.qkv, alone, no_scale);
}

/* ---- the whole part ---- */

template <typename T> static int part_forward(const part *own, const cf_cuda_step *step) {
    const int64_t h = own->config->hidden, v = own->config->vocabulary;
    pass_of<T> p = begin_pass<T>(own, step);
    const layout *at = &own->at;
    const T *w = weights_of(&p, 0);
    T *stream = p.kept.layer0.stream;
    if (p.rows == 0) return 0; /* an idle chunk */
    if (own->range.has_embedding)
        on_rows(&p, "embedding", embed_kernel<T>, stream, own->tokens + p.first_row, w + at->embedding, h);
    else copy_rows_of(&p, stream, step->input, h);
    for (int64_t i = 0; i < n_layers_of(own); i++) layer_forward(&p, i);
    if (step->step->wants_loss) {
        on_rows(&p, "final norm", rmsnorm_kernel<T>, p.kept.normed, p.kept.scale, p.kept.stream, w + at->final_norm, h,
                (float)own->config->norm_epsilon);
        linear_backward(&p, p.scratch.logits, p.kept.normed, w + at->head, v, h); /* the head is (vocabulary, hidden) */
        on_rows(&p, "loss", cross_entropy_kernel<T>, p.kept.dlogits, own->loss + p.first_row, p.scratch.logits,
                own->first_target + p.first_row, own->targets, own->target_weights, v);
    }
    copy_rows_of(&p, step->output, p.kept.stream, h);
    return p.failed;
}

/* Computes all that the previous stage and the chain's earlier chunks wait for. */
template <typename T> static void part_backward_input(pass_of<T> *p) {
    const part *own = p->own;
    const int64_t h = own->config->hidden, v = own->config->vocabulary;
    const layout *at = &own->at;
    const T *w = weights_of(p, 0), *const nothing_past = NULL;
    copy_rows_of(p, p->kept.stream, p->step->input, h);
    if (own->range.has_head) {
        T *const dnormed = p->scratch.dnormed;
        linear(p, dnormed, p->kept.dlogits, w + at->head, v, h, 0);
        add_column_sums(p, own->gradient + at->final_norm, h, dnormed, p->kept.stream, p->kept.scale);
        on_rows(p, "final norm backward", rmsnorm_backward_kernel<T>, p->kept.stream, p->kept.scale, dnormed,
                nothing_past, w + at->final_norm, h);
    }
    for (int64_t i = n_layers_of(own) - 1; i >= 0; i--) layer_backward_input(p, i);
    copy_rows_of(p, p->step->output, p->kept.layer0.stream, h);
}

template <typename T> static void part_backward_weights(pass_of<T> *p) {
    const part *own = p->own;
    const int64_t h = own->config->hidden, v = own->config->vocabulary;
    if (own->range.has_head)
        add_weight_gradient(p, own->gradient + own->at.head, p->kept.dlogits, p->kept.normed, v, h);
    for (int64_t i = n_layers_of(own) - 1; i >= 0; i--) layer_backward_weights(p, i);
    if (own->range.has_embedding && !p->failed)
        check(p, "embedding backward",
              launch(embed_backward_kernel<T>, (h + WARP - 1) / WARP, dim3(WARP), p->step->stream, p->rows,
                     own->gradient + own->at.embedding, own->tokens + p->first_row, p->kept.layer0.stream, h));
}

template <typename T> static int part_backward(const part *own, const cf_cuda_step *step) {
    const int kind = step->step->action.pass;
    pass_of<T> p = begin_pass<T>(own, step);
    if (p.rows == 0) return 0;
    if (kind != CF_W) part_backward_input(&p);
    if (kind != CF_I) part_backward_weights(&p);
    return p.failed;
}

#endif /* TRAIN_MODEL_CUDA_H */
