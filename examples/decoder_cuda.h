/* decoder_cuda.h - a Qwen2.5 decoder on one GPU, one chunk at a time, made for speed - MIT or public domain

   The architecture, its configuration and its tensors are model.h's: RMSNorm, rotary positions, grouped-query attention
   with biases on Q, K and V, SwiGLU, tied or untied embeddings. Weights are stored as in Hugging Face files: a matrix
   is (outputs, inputs), those of Q, K and V are adjacent, and so are gate and up. Products are products_cuda.h's.
   Attention, errors and the arrays of a layer are shared with model_cuda.h, which is a simple version of the same
   model. Unlike there:
       the head and its loss run in slices of rows, and leave the gradient of the final norm's output: no logits stay
       the residual is added by the products, and SwiGLU's output is made again by its backward
       --recompute full keeps a layer's input alone
       sums over rows go in two stages, and those of the embedding's gradient by tokens, sorted on the host

   Sections: >>kernels >>decoder >>activations >>passes >>optimizer. */

#ifndef TRAIN_DECODER_CUDA_H
#define TRAIN_DECODER_CUDA_H

#include "products_cuda.h"

/* ================================================================================================================
   >>kernels    16 bytes at a time; no result depends on the order in which blocks run
   ================================================================================================================ */

/* 16 bytes of numbers. */
template <typename T> struct pack_of {
    enum { COUNT = 16 / sizeof(T) };
    T x[COUNT];
};

template <typename T> static __device__ inline pack_of<T> load_pack(const T *from) {
    const uint4 bits = *(const uint4 *)(const void *)from;
    pack_of<T> p;
    memcpy(p.x, &bits, sizeof bits);
    return p;
}

template <typename T> static __device__ inline void store_pack(T *to, const pack_of<T> &p) {
    uint4 bits;
    memcpy(&bits, p.x, sizeof bits);
    *(uint4 *)(void *)to = bits;
}

/* Calls `use` for all columns of a row that this lane has: the first column of each pack. */
template <typename T, typename F> static __device__ inline void each_pack(int64_t width, F use) {
    const int64_t n = pack_of<T>::COUNT;
    for (int64_t c = threadIdx.x * n; c < width; c += WARP * n) use(c);
}

/* As rmsnorm_kernel. */
template <typename T>
__global__ void norm_kernel(int64_t rows, T *out, float *scale, const T *x, const T *gain, int64_t width,
                            float epsilon) {
    const int64_t row = row_of_warp(), n = pack_of<T>::COUNT;
    if (row >= rows) return;
    float squares = 0;
    each_pack<T>(width, [&](int64_t c) {
        const pack_of<T> in = load_pack(x + row * width + c);
        for (int i = 0; i < n; i++) squares += to_float(in.x[i]) * to_float(in.x[i]);
    });
    const float s = 1 / sqrtf(warp_sum(squares) / (float)width + epsilon);
    if (threadIdx.x == 0) scale[row] = s;
    each_pack<T>(width, [&](int64_t c) {
        const pack_of<T> in = load_pack(x + row * width + c), g = load_pack(gain + c);
        pack_of<T> to;
        for (int i = 0; i < n; i++) to.x[i] = from_float<T>(to_float(in.x[i]) * s * to_float(g.x[i]));
        store_pack(out + row * width + c, to);
    });
}

/* Like rmsnorm_backward_kernel: x becomes its own gradient. */
template <typename T>
__global__ void norm_backward_kernel(int64_t rows, T *x, const float *scale, const T *dout, const T *dpast,
                                     const T *gain, int64_t width) {
    const int64_t row = row_of_warp(), n = pack_of<T>::COUNT;
    if (row >= rows) return;
    const float s = scale[row];
    float along = 0;
    each_pack<T>(width, [&](int64_t c) {
        const pack_of<T> in = load_pack(x + row * width + c), d = load_pack(dout + row * width + c);
        const pack_of<T> g = load_pack(gain + c);
        for (int i = 0; i < n; i++) along += to_float(d.x[i]) * to_float(g.x[i]) * to_float(in.x[i]);
    });
    along = warp_sum(along) * s / (float)width;
    each_pack<T>(width, [&](int64_t c) {
        pack_of<T> in = load_pack(x + row * width + c), past;
        const pack_of<T> d = load_pack(dout + row * width + c), g = load_pack(gain + c);
        if (dpast) past = load_pack(dpast + row * width + c);
        for (int i = 0; i < n; i++) {
            const float through = s * (to_float(d.x[i]) * to_float(g.x[i]) - to_float(in.x[i]) * s * along);
            in.x[i] = from_float<T>((dpast ? to_float(past.x[i]) : 0) + through);
        }
        store_pack(x + row * width + c, in);
    });
}

/* Replaces gate and up by their gradients, and the gradient of SwiGLU's output by the output itself. */
template <typename T> __global__ void swiglu_again_kernel(int64_t rows, T *gate_up, T *gated, int64_t width) {
    const int64_t row = row_of_warp(), n = pack_of<T>::COUNT;
    if (row >= rows) return;
    each_pack<T>(width, [&](int64_t c) {
        T *const at_gate = gate_up + 2 * row * width + c, *const at = gated + row * width + c;
        pack_of<T> gate = load_pack(at_gate), up = load_pack(at_gate + width), out = load_pack(at);
        for (int i = 0; i < n; i++) {
            const float g = to_float(gate.x[i]), u = to_float(up.x[i]), d = to_float(out.x[i]);
            const float sigmoid = 1 / (1 + expf(-g));
            out.x[i] = from_float<T>(g * sigmoid * u);
            gate.x[i] = from_float<T>(d * u * sigmoid * (1 + g * (1 - sigmoid)));
            up.x[i] = from_float<T>(d * g * sigmoid);
        }
        store_pack(at, out);
        store_pack(at_gate, gate);
        store_pack(at_gate + width, up);
    });
}

/* out = silu(gate) x up; a row of gate_up is gate, then up. */
template <typename T> __global__ void swiglu_forward_kernel(int64_t rows, T *out, const T *gate_up, int64_t width) {
    const int64_t row = row_of_warp(), n = pack_of<T>::COUNT;
    if (row >= rows) return;
    each_pack<T>(width, [&](int64_t c) {
        pack_of<T> gate = load_pack(gate_up + 2 * row * width + c);
        const pack_of<T> up = load_pack(gate_up + (2 * row + 1) * width + c);
        for (int i = 0; i < n; i++) {
            const float g = to_float(gate.x[i]);
            gate.x[i] = from_float<T>(g / (1 + expf(-g)) * to_float(up.x[i]));
        }
        store_pack(out + row * width + c, gate);
    });
}

/* ---- sums over rows ---- */

#define SUM_LANES 8  /* rows that a block takes at a time */
#define SUM_PARTS 64 /* shares into which all rows are divided */

/* First stage: for share s of the rows, partial[s][c] is the sum of a, or of a x scale, in column c. Blocks are
   numbered along the columns first. */
template <typename T>
__global__ void partial_sums_kernel(int64_t rows, float *partial, const T *a, const T *x, const float *scale,
                                    int64_t columns) {
    enum { N = pack_of<T>::COUNT };
    __shared__ float shared[SUM_LANES][WARP * 8];
    const int64_t blocks = (columns + WARP * N - 1) / (WARP * N), share = blockIdx.x / blocks;
    const int64_t c = (blockIdx.x % blocks * WARP + threadIdx.x) * N, per_share = (rows + SUM_PARTS - 1) / SUM_PARTS;
    const int64_t end = rows < (share + 1) * per_share ? rows : (share + 1) * per_share;
    float sums[N] = {};
    for (int64_t row = share * per_share + threadIdx.y; row < end && c < columns; row += SUM_LANES) {
        const pack_of<T> from = load_pack(a + row * columns + c);
        pack_of<T> times;
        if (x) times = load_pack(x + row * columns + c);
        for (int i = 0; i < N; i++) sums[i] += to_float(from.x[i]) * (x ? to_float(times.x[i]) * scale[row] : 1);
    }
    for (int i = 0; i < N; i++) shared[threadIdx.y][threadIdx.x * N + (unsigned)i] = sums[i];
    __syncthreads();
    if (threadIdx.y > 0 || c >= columns) return;
    for (int i = 0; i < N; i++) {
        float sum = 0;
        for (int lane = 0; lane < SUM_LANES; lane++) sum += shared[lane][threadIdx.x * N + (unsigned)i];
        partial[share * columns + c + i] = sum;
    }
}

/* Second stage. */
static __global__ void add_partial_sums_kernel(int64_t columns, float *out, const float *partial) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    float sum = 0;
    for (int64_t share = 0; share < SUM_PARTS; share++) sum += partial[share * columns + c];
    out[c] += sum;
}

/* Each block gives one sum, of numbers or of their squares. */
#define TOTAL_THREADS 256
#define TOTAL_BLOCKS 1024

template <typename N> __global__ void total_kernel(double *out, const N *x, int64_t count, int squared) {
    __shared__ double sums[TOTAL_THREADS];
    const int64_t stride = (int64_t)gridDim.x * TOTAL_THREADS;
    double sum = 0;
    for (int64_t i = (int64_t)blockIdx.x * TOTAL_THREADS + threadIdx.x; i < count; i += stride)
        sum += squared ? (double)x[i] * (double)x[i] : (double)x[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < TOTAL_THREADS; i++) sum += sums[i];
    out[blockIdx.x] = sum;
}

/* ---- embedding and loss ---- */

/* The rows of a chunk that have one token: sorted[begin .. begin of the next run). Each run has a warp. */
typedef struct token_run {
    int32_t token, begin;
} token_run;

template <typename T>
__global__ void embedding_gradient_kernel(int64_t n_runs, float *dtable, const token_run *runs, const int32_t *sorted,
                                          const T *dout, int64_t width) {
    enum { N = pack_of<T>::COUNT };
    const int64_t run = row_of_warp();
    if (run >= n_runs) return;
    float *const to = dtable + runs[run].token * width;
    each_pack<T>(width, [&](int64_t c) {
        float sums[N] = {};
        for (int64_t i = runs[run].begin; i < runs[run + 1].begin; i++) {
            const pack_of<T> d = load_pack(dout + sorted[i] * width + c);
            for (int j = 0; j < N; j++) sums[j] += to_float(d.x[j]);
        }
        for (int j = 0; j < N; j++) to[c + j] += sums[j];
    });
}

/* Each block has a row of logits. It computes the losses of the row's targets, each times its weight, and their
   gradient, as cross_entropy_kernel does; both are 0 without targets. */
#define LOSS_WARPS 8

static __device__ inline float block_best(float x, bool sum) {
    __shared__ float of_warp[LOSS_WARPS];
    x = sum ? warp_sum(x) : warp_max(x);
    __syncthreads();
    if (threadIdx.x == 0) of_warp[threadIdx.y] = x;
    __syncthreads();
    x = of_warp[0];
    for (int i = 1; i < LOSS_WARPS; i++) x = sum ? x + of_warp[i] : fmaxf(x, of_warp[i]);
    return x;
}

template <typename T>
__global__ void loss_kernel(T *dlogits, float *loss, const float *logits, const int32_t *first_target,
                            const int32_t *target, const float *weight, int64_t width) {
    const int64_t row = blockIdx.x, first = threadIdx.y * WARP + threadIdx.x, step = LOSS_WARPS * WARP;
    const int32_t begin = first_target[row], end = first_target[row + 1];
    const float *x = logits + row * width;
    T *const d = dlogits + row * width;
    if (begin == end) {
        for (int64_t c = first; c < width; c += step) d[c] = from_float<T>(0);
        if (first == 0) loss[row] = 0;
        return;
    }
    float highest = -INFINITY, total = 0;
    for (int64_t c = first; c < width; c += step) { /* reads once: the sum so far is scaled when a higher logit comes */
        if (x[c] > highest) {
            total *= expf(highest - x[c]);
            highest = x[c];
        }
        total += expf(x[c] - highest);
    }
    const float top = block_best(highest, false);
    total = block_best(highest > -INFINITY ? total * expf(highest - top) : 0, true);
    float sum = 0;
    for (int32_t i = begin; i < end; i++) sum += weight[i] * (logf(total) - (x[target[i]] - top));
    if (first == 0) loss[row] = sum;
    for (int64_t c = first; c < width; c += step) {
        const float probability = expf(x[c] - top) / total;
        float slope = 0;
        for (int32_t i = begin; i < end; i++) slope += weight[i] * (probability - (c == target[i] ? 1 : 0));
        d[c] = from_float<T>(slope);
    }
}

/* ================================================================================================================
   >>decoder    weights, gradients and moments, and the tokens of a batch
   ================================================================================================================ */

/* A tensor by its name in Hugging Face files. The list has the order of model.h's. */
typedef struct decoder_tensor {
    char name[80];
    int64_t offset, rows, columns; /* of a vector: columns 0 */
    /* standard deviation of the first values; a vector's are 1 if it is a gain, else 0 */
    double deviation;
} decoder_tensor;

/* The members that model_cuda.h's functions read are filled in: config, range, type, tokens, targets, loss, first_row,
   rope and at, whose matrices are transposed here. */
struct decoder : part {
    decoder_tensor *tensors; /* (n_tensors) */
    int64_t n_tensors;
    products *lt;
    int recompute;           /* 1: a kept layer keeps only its input */
    int64_t loss_rows;       /* rows of a slice of logits */
    /* rows of each chunk, sorted by their tokens; this and everything below is chunk after chunk */
    int32_t *sorted;
    token_run *runs;         /* plus one run for each chunk, which only ends the one before */
    const int64_t *first_run;/* (chunks + 1), in host memory */
    double *totals;          /* (TOTAL_BLOCKS + 2): loss of the batch, squared length of its gradient */
};

/* Places an array at a multiple of 256 bytes, counted in 16-bit numbers. */
static int64_t place_of(int64_t *end, int64_t count) {
    const int64_t offset = *end;
    *end += (count + 127) / 128 * 128;
    return offset;
}

static layout decoder_layout(const part *p) {
    const int64_t h = p->config->hidden, f = p->config->ffn, table = p->config->vocabulary * h;
    layout at;
    int64_t end = 0;
    memset(&at, 0, sizeof at);
    at.norm1 = place_of(&end, h);
    at.qkv = place_of(&end, qkv_width(p) * h);
    at.bias = place_of(&end, qkv_width(p));
    at.o = place_of(&end, h * h);
    at.sinks = place_of(&end, p->config->kinds.n_pattern > 0 ? p->config->heads : 0);
    at.norm2 = place_of(&end, h);
    at.gate_up = place_of(&end, 2 * f * h);
    at.down = place_of(&end, h * f);
    at.layer = end;
    end *= n_layers_of(p);
    at.embedding = place_of(&end, table);
    at.final_norm = place_of(&end, h);
    at.head = p->config->untied ? place_of(&end, table) : at.embedding;
    at.count = end;
    return at;
}

static void add_tensor(decoder *d, int64_t layer, const char *name, int64_t offset, int64_t rows, int64_t columns) {
    decoder_tensor *t = &d->tensors[d->n_tensors++];
    const int before_sum = strstr(name, "o_proj") != NULL || strstr(name, "down_proj") != NULL;
    if (layer < 0) snprintf(t->name, sizeof t->name, "%s", name);
    else snprintf(t->name, sizeof t->name, "model.layers.%lld.%s", (long long)layer, name);
    t->offset = offset;
    t->rows = rows;
    t->columns = columns;
    t->deviation = columns == 0 ? 0 : layer < 0 ? 0.02 : 1 / sqrt((double)columns);
    if (before_sum) t->deviation /= sqrt(2.0 * (double)d->config->layers);
}

static void list_tensors(decoder *d) {
    const int64_t h = d->config->hidden, f = d->config->ffn, kv = kv_width(d), v = d->config->vocabulary;
    const layout *at = &d->at;
    d->tensors = TAKE(decoder_tensor, 3 + (TENSORS_PER_LAYER + 1) * d->config->layers);
    add_tensor(d, -1, "model.embed_tokens.weight", at->embedding, v, h);
    for (int64_t i = 0; i < d->config->layers; i++) {
        const int64_t l = i * at->layer;
        add_tensor(d, i, "input_layernorm.weight", l + at->norm1, h, 0);
        add_tensor(d, i, "self_attn.q_proj.weight", l + at->qkv, h, h);
        add_tensor(d, i, "self_attn.q_proj.bias", l + at->bias, h, 0);
        add_tensor(d, i, "self_attn.k_proj.weight", l + at->qkv + h * h, kv, h);
        add_tensor(d, i, "self_attn.k_proj.bias", l + at->bias + h, kv, 0);
        add_tensor(d, i, "self_attn.v_proj.weight", l + at->qkv + (h + kv) * h, kv, h);
        add_tensor(d, i, "self_attn.v_proj.bias", l + at->bias + h + kv, kv, 0);
        add_tensor(d, i, "self_attn.o_proj.weight", l + at->o, h, h);
        if (has_sinks(d, i)) add_tensor(d, i, "self_attn.sinks", l + at->sinks, d->config->heads, 0);
        add_tensor(d, i, "post_attention_layernorm.weight", l + at->norm2, h, 0);
        add_tensor(d, i, "mlp.gate_proj.weight", l + at->gate_up, f, h);
        add_tensor(d, i, "mlp.up_proj.weight", l + at->gate_up + f * h, f, h);
        add_tensor(d, i, "mlp.down_proj.weight", l + at->down, h, f);
    }
    add_tensor(d, -1, "model.norm.weight", at->final_norm, h, 0);
    if (d->config->untied) add_tensor(d, -1, "lm_head.weight", at->head, v, h);
}

static int64_t tensor_count(const decoder_tensor *t) { return t->rows * (t->columns > 0 ? t->columns : 1); }
static int is_gain(const decoder_tensor *t) { return strstr(t->name, "norm.weight") != NULL; }

/* Returns NULL, or the reason why the kernels, which read 16 bytes at a time, cannot run the model. */
static const char *decoder_fault(const model_config *c) {
    const char *fault = model_config_fault(c);
    if (fault) return fault;
    if (c->vocabulary < 1 || c->vocabulary > CF_MAX_VOCAB) return "the vocabulary must be 1 .. 2^28";
    if (head_dim_of(c) % 8 != 0 || kv_width_of(c) % 8 != 0 || c->ffn % 8 != 0 || c->vocabulary % 8 != 0)
        return "hidden / heads, ffn and vocabulary must be multiples of 8, for the kernels read 16 bytes at a time";
    return NULL;
}

/* Makes the rotary record, with its table on the device. */
static cf_rope upload_rope(const model_config *c, int64_t n_positions) {
    cf_rope rope = rope_of(c, n_positions);
    size_t bytes = 0;
    MUST(cf_rope_size(&rope, head_dim_of(c), &bytes, &error));
    const int64_t count = (int64_t)(bytes / sizeof(float));
    float *table = TAKE(float, count), *on_device = take_device<float>(count);
    MUST(cf_rope_fill(&rope, head_dim_of(c), table, bytes, &error));
    upload(on_device, table, count);
    rope.table = on_device;
    free(table);
    return rope;
}

/* Returns the bytes of decoder_new's arrays; fills in the sizes of *d. */
template <typename T> static double decoder_bytes(const model_config *c, decoder *d) {
    d->config = c;
    d->range = stage_of(c, 0, 1);
    d->at = decoder_layout(d);
    return (double)d->at.count * (4 * sizeof(float) + sizeof(T));
}

/* Allocates the whole model on the current device, without values. n_positions: length of the longest sequence. */
template <typename T>
static decoder decoder_new(const model_config *c, cf_dtype type, products *lt, int64_t n_positions) {
    decoder d = {};
    decoder_bytes<T>(c, &d);
    d.type = type;
    d.lt = lt;
    MUST_CUDA(cudaGetDevice(&d.device));
    list_tensors(&d);
    d.parameters = take_device<T>(d.at.count);
    d.totals = take_device<double>(TOTAL_BLOCKS + 2);
    float **const arrays[] = {&d.master, &d.gradient, &d.first, &d.second};
    for (float **array : arrays) {
        *array = take_device<float>(d.at.count);
        MUST_CUDA(cudaMemset(*array, 0, (size_t)d.at.count * sizeof(float)));
    }
    MUST_CUDA(cudaMemset(d.parameters, 0, (size_t)d.at.count * sizeof(T)));
    MUST_CUDA(cudaStreamSynchronize(NULL));
    d.rope = upload_rope(c, n_positions);
    return d;
}

static void decoder_free(decoder *d) {
    void *const all[] = {d->sorted, d->runs, d->totals};
    for (void *memory : all) MUST_CUDA(cudaFree(memory));
    free(d->tensors);
    part_free(d);
}

/* Copies a tensor's numbers into the master weights and, rounded, into the parameters. */
template <typename T> __global__ void round_kernel(int64_t n, T *parameters, const float *master) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) parameters[i] = from_float<T>(master[i]);
}

/* Rounds the master weights into the parameters after they were written. */
template <typename T> static void round_parameters(const decoder *d) {
    MUST_CUDA(launch(round_kernel<T>, (d->at.count + 255) / 256, dim3(256), NULL, d->at.count, (T *)d->parameters,
                     (const float *)d->master));
    MUST_CUDA(cudaStreamSynchronize(NULL));
}

/* Draws the initial values as model.h does; each thread draws one number. */
static __device__ inline uint64_t mix_on_device(uint64_t x) { /* mix64 */
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static __global__ void draw_kernel(int64_t n, float *out, uint64_t key, float centre, float deviation) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint64_t bits = mix_on_device(key ^ mix_on_device((uint64_t)i));
    const float radius = sqrtf(-2 * logf(1 - (float)(bits >> 40) * 0x1p-24f));
    out[i] = centre + deviation * radius * cosf(6.2831853f * ((float)(bits & 0xFFFFFF) * 0x1p-24f));
}

template <typename T> static void draw_values(const decoder *d, uint64_t seed) {
    for (int64_t i = 0; i < d->n_tensors; i++) {
        const decoder_tensor *t = &d->tensors[i];
        MUST_CUDA(launch(draw_kernel, (tensor_count(t) + 255) / 256, dim3(256), NULL, tensor_count(t),
                         d->master + t->offset, mix64_pair(seed, (uint64_t)i), is_gain(t) ? 1.0f : 0.0f,
                         (float)t->deviation));
    }
    round_parameters<T>(d);
}

/* ================================================================================================================
   >>activations    what is kept of a chunk, and what one pass needs besides
   ================================================================================================================ */

template <typename T> struct decoder_pass : pass_of<T> {
    const decoder *model;
    T *stream0;              /* of layer 0 ... */
    int64_t stream_bytes;    /* ... and from layer to layer; 0 if all layers use the same */
    layer_activations_of<T> rest0;
    int64_t rest_bytes;
    T *gated;                /* (ffn) */
    float *logits, *partial; /* (loss_rows, vocabulary), (SUM_PARTS, widest) */
    T *dlogits;              /* (loss_rows, vocabulary) */
};

/* Takes the arrays of a layer except its input and SwiGLU's output. */
template <typename T> static layer_activations_of<T> take_rest(area *a, const part *p) {
    layer_activations_of<T> l;
    memset(&l, 0, sizeof l);
    l.normed1 = take_rows<T>(a, p->config->hidden);
    l.qkv = take_rows<T>(a, qkv_width(p));
    l.attended = take_rows<T>(a, p->config->hidden);
    l.middle = take_rows<T>(a, p->config->hidden);
    l.normed2 = take_rows<T>(a, p->config->hidden);
    l.gate_up = take_rows<T>(a, 2 * p->config->ffn);
    l.scale1 = take_rows<float>(a, 1);
    l.scale2 = take_rows<float>(a, 1);
    l.lse = take_rows<float>(a, p->config->heads);
    return l;
}

/* Takes `n` layers' arrays; returns the distance between two of them, 0 if one serves all. */
template <typename T> static int64_t take_rests(area *a, decoder_pass<T> *p, const decoder *d, int64_t n) {
    char *const begin = a->at;
    p->rest0 = take_rest<T>(a, d);
    const int64_t distance = n > 1 ? a->at - begin : 0;
    for (int64_t i = 1; i < n; i++) take_rest<T>(a, d);
    return distance;
}

template <typename T> static int64_t take_streams(area *a, decoder_pass<T> *p, const decoder *d, int64_t n) {
    char *const begin = a->at;
    p->kept.stream = take_rows<T>(a, d->config->hidden);
    p->kept.normed = take_rows<T>(a, d->config->hidden);
    p->kept.scale = take_rows<float>(a, 1);
    char *const first = begin ? a->at : NULL;
    p->stream0 = take_rows<T>(a, d->config->hidden);
    const int64_t distance = n > 1 ? a->at - first : 0;
    for (int64_t i = 1; i < n; i++) take_rows<T>(a, d->config->hidden);
    return distance;
}

/* Lays out the arrays kept from forward to backward, or in the workspace of a forward that keeps nothing. */
template <typename T> static void take_kept(area *a, decoder_pass<T> *p, const decoder *d, int keeps) {
    const int64_t n = keeps ? n_layers_of(d) : 1;
    p->stream_bytes = take_streams(a, p, d, n);
    if (!d->recompute) p->rest_bytes = take_rests(a, p, d, n);
}

/* Takes the workspace by rows, then that of fixed size. */
template <typename T> static void take_work(area *a, area *fixed, decoder_pass<T> *p, const decoder *d, int backward) {
    const model_config *c = d->config;
    if (d->recompute) p->rest_bytes = take_rests(a, p, d, 1);
    p->gated = take_rows<T>(a, c->ffn);
    p->scratch.dnormed = take_rows<T>(a, backward ? c->hidden : 0);
    p->scratch.dattended = take_rows<T>(a, backward ? c->hidden : 0);
    fixed->at = a->at;
    p->partial = take_rows<float>(fixed, backward ? SUM_PARTS * max_of(qkv_width(d), c->hidden) / d->loss_rows + 1 : 0);
    p->logits = take_rows<float>(fixed, backward ? 0 : c->vocabulary);
    p->dlogits = take_rows<T>(fixed, backward ? 0 : c->vocabulary);
}

/* Returns the executor's description of a stage: bytes, for each token and for alignment. */
template <typename T> static cf_cuda_stage decoder_needs(const decoder *d) {
    decoder_pass<T> none = {};
    area kept = {NULL, 0, 0, 0};
    cf_cuda_stage needs;
    take_kept(&kept, &none, d, 1);
    needs.n_layers = n_layers_of(d);
    needs.activation_bytes = kept.n_arrays * ARRAY_ALIGNMENT;
    needs.activation_bytes_per_token = kept.bytes_per_row;
    for (int backward = 0; backward < 2; backward++) {
        area work = {NULL, 0, 0, 0}, fixed = {NULL, 0, 0, 0};
        take_work(&work, &fixed, &none, d, backward);
        if (!backward) take_kept(&work, &none, d, 0); /* for a forward that keeps nothing */
        const int64_t alignment = (work.n_arrays + fixed.n_arrays) * ARRAY_ALIGNMENT;
        (backward ? needs.backward_bytes : needs.forward_bytes) = alignment + fixed.bytes_per_row * d->loss_rows;
        (backward ? needs.backward_bytes_per_token : needs.forward_bytes_per_token) = work.bytes_per_row;
    }
    return needs;
}

template <typename T> static decoder_pass<T> begin_decoder_pass(const decoder *d, const cf_cuda_step *step) {
    decoder_pass<T> p = {};
    const int backward = step->step->action.pass != CF_F && step->step->action.pass != CF_R;
    area kept = {(char *)step->activations, step->chunk->rows, 0, 0};
    area work = {(char *)step->workspace, kept.rows, 0, 0}, fixed = {NULL, d->loss_rows, 0, 0};
    p.own = p.model = d;
    p.step = step;
    p.rows = kept.rows;
    p.first_row = d->first_row[step->step->action.chunk];
    take_work(&work, &fixed, &p, d, backward);
    work.at = fixed.at;
    take_kept(step->activations ? &kept : &work, &p, d, step->activations != NULL);
    return p;
}

/* Makes the arrays of a layer those that attention and others use, p->kept.layer0. */
template <typename T> static layer_activations_of<T> use_layer(decoder_pass<T> *p, int64_t layer) {
    layer_activations_of<T> l = p->rest0;
    const int64_t n = layer * p->rest_bytes;
    T **const arrays[] = {&l.normed1, &l.qkv, &l.attended, &l.middle, &l.normed2, &l.gate_up};
    float **const floats[] = {&l.scale1, &l.scale2, &l.lse};
    for (T **array : arrays) *array = (T *)(void *)((char *)*array + n);
    for (float **array : floats) *array = (float *)(void *)((char *)*array + n);
    l.stream = (T *)(void *)((char *)p->stream0 + layer * p->stream_bytes);
    l.gated = p->gated;
    p->kept.layer0 = l;
    return l;
}

template <typename T> static T *stream_after_layer(const decoder_pass<T> *p, int64_t layer) {
    if (layer + 1 == n_layers_of(p->own)) return p->kept.stream;
    return (T *)(void *)((char *)p->stream0 + (layer + 1) * p->stream_bytes);
}

/* ================================================================================================================
   >>passes
   ================================================================================================================ */

template <typename T, typename C>
static void product(decoder_pass<T> *p, const product_shape &shape, const void *a, const void *b, const void *bias,
                    const C *c, C *d) {
    if (p->failed) return;
    const cublasStatus_t status = multiply(p->model->lt, &shape, a, b, bias, c, d, p->step->stream);
    check(p, "cublasLtMatmul", status == CUBLAS_STATUS_SUCCESS ? NULL : cublasGetStatusName(status));
}

/* out (rows, outputs) = x (rows, inputs) w^T + bias (NULL: none), or + c */
template <typename T, typename C>
static void project(decoder_pass<T> *p, int64_t rows, C *out, const T *x, const T *w, int64_t inputs, int64_t outputs,
                    const T *bias, const C *c) {
    const product_shape shape = {CUBLAS_OP_T, CUBLAS_OP_N, cublas_type(x), cublas_type(out), outputs, rows, inputs,
                                 bias != NULL};
    product(p, shape, w, x, bias, c, out);
}

/* dx (rows, inputs) = dout (rows, outputs) w */
template <typename T>
static void project_back(decoder_pass<T> *p, int64_t rows, T *dx, const T *dout, const T *w, int64_t inputs,
                         int64_t outputs) {
    const product_shape shape = {CUBLAS_OP_N, CUBLAS_OP_N, cublas_type(w), cublas_type(w), inputs, rows, outputs, 0};
    product(p, shape, w, dout, NULL, (const T *)NULL, dx);
}

/* dw (outputs, inputs) += dout^T x, in float */
template <typename T>
static void add_gradient(decoder_pass<T> *p, int64_t rows, float *dw, const T *x, const T *dout, int64_t inputs,
                         int64_t outputs) {
    const product_shape shape = {CUBLAS_OP_N, CUBLAS_OP_T, cublas_type(x), CUDA_R_32F, inputs, outputs, rows, 0};
    product(p, shape, x, dout, NULL, (const float *)dw, dw);
}

/* out (columns) += sums over the rows of a, or of a x scale. */
template <typename T>
static void add_sums(decoder_pass<T> *p, float *out, int64_t columns, const T *a, const T *x, const float *scale) {
    const int64_t per_block = WARP * pack_of<T>::COUNT, blocks = (columns + per_block - 1) / per_block;
    if (p->failed) return;
    check(p, "sums over rows", launch(partial_sums_kernel<T>, blocks * SUM_PARTS, dim3(WARP, SUM_LANES),
                                      p->step->stream, p->rows, p->partial, a, x, scale, columns));
    check(p, "sums over parts", launch(add_partial_sums_kernel, (columns + 255) / 256, dim3(256), p->step->stream,
                                       columns, out, (const float *)p->partial));
}

/* ---- one layer ---- */

/* Runs a layer up to gate and up, which is all that a backward needs. */
template <typename T> static void layer_inside(decoder_pass<T> *p, int64_t layer) {
    const decoder *own = p->model;
    const layout *at = &own->at;
    const int64_t h = own->config->hidden, f = own->config->ffn, qkv = qkv_width(own);
    const float epsilon = (float)own->config->norm_epsilon;
    const layer_activations_of<T> a = use_layer(p, layer);
    const T *w = (const T *)own->parameters + layer * at->layer, *const none = NULL;
    on_rows(p, "norm1", norm_kernel<T>, a.normed1, a.scale1, a.stream, w + at->norm1, h, epsilon);
    project(p, p->rows, a.qkv, a.normed1, w + at->qkv, h, qkv, w + at->bias, none);
    attention_forward(p, layer);
    project(p, p->rows, a.middle, a.attended, w + at->o, h, h, none, a.stream);
    on_rows(p, "norm2", norm_kernel<T>, a.normed2, a.scale2, a.middle, w + at->norm2, h, epsilon);
    project(p, p->rows, a.gate_up, a.normed2, w + at->gate_up, h, 2 * f, none, none);
}

template <typename T> static void decoder_layer_forward(decoder_pass<T> *p, int64_t layer) {
    const decoder *own = p->model;
    const int64_t h = own->config->hidden, f = own->config->ffn;
    const T *w = (const T *)own->parameters + layer * own->at.layer, *const none = NULL;
    layer_inside(p, layer);
    const layer_activations_of<T> a = p->kept.layer0;
    on_rows(p, "swiglu", swiglu_forward_kernel<T>, a.gated, a.gate_up, f);
    project(p, p->rows, stream_after_layer(p, layer), a.gated, w + own->at.down, f, h, none, a.middle);
}

/* Turns the gradient of the layer's output, in the stream after it, into that of its input, in the stream before it.
   Each weight gets its gradient as soon as both factors are there. */
template <typename T> static void feed_forward_backward(decoder_pass<T> *p, int64_t layer) {
    const decoder *own = p->model;
    const layout *at = &own->at;
    const int64_t h = own->config->hidden, f = own->config->ffn, rows = p->rows;
    const layer_activations_of<T> a = p->kept.layer0;
    const T *w = (const T *)own->parameters + layer * at->layer, *dout = stream_after_layer(p, layer);
    float *g = own->gradient + layer * at->layer;
    project_back(p, rows, a.gated, dout, w + at->down, f, h);
    on_rows(p, "swiglu backward", swiglu_again_kernel<T>, a.gate_up, a.gated, f);
    add_gradient(p, rows, g + at->down, a.gated, dout, f, h);
    project_back(p, rows, p->scratch.dnormed, a.gate_up, w + at->gate_up, h, 2 * f);
    add_gradient(p, rows, g + at->gate_up, a.normed2, a.gate_up, h, 2 * f);
    add_sums<T>(p, g + at->norm2, h, p->scratch.dnormed, a.middle, a.scale2);
    on_rows(p, "norm2 backward", norm_backward_kernel<T>, a.middle, a.scale2, p->scratch.dnormed, dout, w + at->norm2,
            h);
}

template <typename T> static void attention_part_backward(decoder_pass<T> *p, int64_t layer) {
    const decoder *own = p->model;
    const layout *at = &own->at;
    const int64_t h = own->config->hidden, qkv = qkv_width(own), rows = p->rows;
    const layer_activations_of<T> a = p->kept.layer0;
    const T *w = (const T *)own->parameters + layer * at->layer;
    const float *const no_scale = NULL;
    float *g = own->gradient + layer * at->layer;
    project_back(p, rows, p->scratch.dattended, a.middle, w + at->o, h, h);
    add_gradient(p, rows, g + at->o, a.attended, a.middle, h, h);
    attention_backward(p, layer);
    project_back(p, rows, p->scratch.dnormed, a.qkv, w + at->qkv, h, qkv);
    add_gradient(p, rows, g + at->qkv, a.normed1, a.qkv, h, qkv);
    add_sums<T>(p, g + at->bias, qkv, a.qkv, NULL, no_scale);
    add_sums<T>(p, g + at->norm1, h, p->scratch.dnormed, a.stream, a.scale1);
    on_rows(p, "norm1 backward", norm_backward_kernel<T>, a.stream, a.scale1, p->scratch.dnormed, a.middle,
            w + at->norm1, h);
}

/* ---- the ends of the model ---- */

/* Computes loss and gradients of one slice of rows: of the head's weight, and of its input, which it overwrites. */
template <typename T> static void head_slice(decoder_pass<T> *p, int64_t begin, int64_t rows) {
    const decoder *own = p->model;
    const int64_t h = own->config->hidden, v = own->config->vocabulary, first = p->first_row + begin;
    const T *w = (const T *)own->parameters + own->at.head, *const no_bias = NULL;
    const float *const nothing = NULL;
    T *const normed = p->kept.normed + begin * h;
    project(p, rows, p->logits, normed, w, h, v, no_bias, nothing);
    if (!p->failed)
        check(p, "loss", launch(loss_kernel<T>, rows, dim3(WARP, LOSS_WARPS), p->step->stream, p->dlogits,
                                own->loss + first, (const float *)p->logits, (const int32_t *)own->first_target + first,
                                (const int32_t *)own->targets, (const float *)own->target_weights, v));
    add_gradient(p, rows, own->gradient + own->at.head, normed, p->dlogits, h, v);
    project_back(p, rows, normed, p->dlogits, w, h, v);
}

/* Runs the head, in the one forward of a chunk that keeps its activations. */
template <typename T> static void head_pass(decoder_pass<T> *p) {
    const decoder *own = p->model;
    const int64_t h = own->config->hidden;
    on_rows(p, "final norm", norm_kernel<T>, p->kept.normed, p->kept.scale, p->kept.stream,
            (const T *)own->parameters + own->at.final_norm, h, (float)own->config->norm_epsilon);
    for (int64_t begin = 0; begin < p->rows; begin += own->loss_rows)
        head_slice(p, begin, min_of(own->loss_rows, p->rows - begin));
}

template <typename T> static void head_norm_backward(decoder_pass<T> *p) {
    const decoder *own = p->model;
    const int64_t h = own->config->hidden;
    const T *const nothing_past = NULL;
    add_sums<T>(p, own->gradient + own->at.final_norm, h, p->kept.normed, p->kept.stream, p->kept.scale);
    on_rows(p, "final norm backward", norm_backward_kernel<T>, p->kept.stream, p->kept.scale, p->kept.normed,
            nothing_past, (const T *)own->parameters + own->at.final_norm, h);
}

template <typename T> static void embedding_backward_pass(decoder_pass<T> *p) {
    const decoder *own = p->model;
    const int64_t chunk = p->step->step->action.chunk, first = own->first_run[chunk];
    const int64_t n_runs = own->first_run[chunk + 1] - first - 1;
    if (p->failed || n_runs == 0) return;
    check(p, "embedding backward",
          launch(embedding_gradient_kernel<T>, (n_runs + WARPS - 1) / WARPS, dim3(WARP, WARPS), p->step->stream, n_runs,
                 own->gradient + own->at.embedding, (const token_run *)own->runs + first,
                 (const int32_t *)own->sorted + p->first_row, (const T *)p->stream0, own->config->hidden));
}

/* ---- the whole model ---- */

template <typename T> static int decoder_forward(const decoder *d, const cf_cuda_step *step) {
    decoder_pass<T> p = begin_decoder_pass<T>(d, step);
    if (p.rows == 0) return 0; /* an idle chunk */
    on_rows<T>(&p, "embedding", embed_kernel<T>, p.stream0, (const int32_t *)d->tokens + p.first_row,
               (const T *)d->parameters + d->at.embedding, d->config->hidden);
    for (int64_t i = 0; i < n_layers_of(d); i++) decoder_layer_forward(&p, i);
    if (step->step->wants_loss && d->range.has_head) head_pass(&p);
    return p.failed;
}

template <typename T> static int decoder_backward(const decoder *d, const cf_cuda_step *step) {
    decoder_pass<T> p = begin_decoder_pass<T>(d, step);
    if (p.rows == 0) return 0;
    if (d->range.has_head) head_norm_backward(&p);
    for (int64_t i = n_layers_of(d) - 1; i >= 0; i--) {
        if (d->recompute) layer_inside(&p, i);
        else use_layer(&p, i);
        feed_forward_backward(&p, i);
        attention_part_backward(&p, i);
    }
    embedding_backward_pass(&p);
    return p.failed;
}

/* ================================================================================================================
   >>optimizer    AdamW with the whole gradient clipped to a length
   ================================================================================================================ */

/* *out = sum of x, or of its squares: by blocks, then over the blocks. */
static void add_up(const decoder *d, double *out, const float *x, int64_t count, int squared, cudaStream_t stream) {
    const int64_t blocks = max_of(1, min_of(TOTAL_BLOCKS, (count + TOTAL_THREADS - 1) / TOTAL_THREADS));
    MUST_CUDA(launch(total_kernel<float>, blocks, dim3(TOTAL_THREADS), stream, d->totals, x, count, squared));
    MUST_CUDA(launch(total_kernel<double>, 1, dim3(TOTAL_THREADS), stream, out, (const double *)d->totals, blocks, 0));
}

/* squares: squared length of the gradient, on the device. k's gradient_scale is not used; clip 0: no limit. */
template <typename T>
__global__ void adamw_kernel(int64_t n, T *parameters, float *master, float *first, float *second,
                             const float *gradient, const double *squares, adam_numbers k, float decay, float clip) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float length = (float)sqrt(*squares), g = gradient[i] * (clip > 0 && length > clip ? clip / length : 1);
    const float m = k.beta1 * first[i] + (1 - k.beta1) * g, v = k.beta2 * second[i] + (1 - k.beta2) * g * g;
    const float update = m * k.correct1 / (sqrtf(v * k.correct2) + k.epsilon) + decay * master[i];
    first[i] = m;
    second[i] = v;
    master[i] -= k.rate * update;
    parameters[i] = from_float<T>(master[i]);
}

#endif /* TRAIN_DECODER_CUDA_H */
