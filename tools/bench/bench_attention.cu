/* bench_attention.cu - speed of the attention kernels on a device - MIT or public domain

       bench_attention --list             one line a shape: name, heads, key heads, head size, query and key lengths
       bench_attention [part of a name]   times forward and backward; one line each

   TFLOP/s count what the mask leaves visible: 4 x pairs x heads x head size for a forward, 2.5 times that for a
   backward. Inputs are normal numbers (zeros draw less power, which raises clocks); between runs the L2 cache is
   overwritten. A time is the median of the runs. bench_attention.py puts PyTorch's numbers beside these, in the same
   run.

   Not yet run on a device. */

#define CHUNKFLOW_IMPLEMENTATION
#include "../../chunkflow.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static void need(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    fprintf(stderr, "bench_attention: %s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}

static void need(cf_result code, const cf_error &error) {
    if (code == CF_OK) return;
    fprintf(stderr, "bench_attention: %s\n", error.text);
    exit(1);
}

struct shape {
    std::string name;
    int n_heads, n_kv_heads, head_size;
    std::vector<int32_t> queries, keys;
};

static shape one_document(const char *name, int heads, int kv_heads, int head_size, int queries, int keys) {
    return {name, heads, kv_heads, head_size, {queries}, {keys}};
}

/* A mix like real fine-tuning data: most documents short, some long; the same on every machine. */
static shape packed(const char *name, int heads, int kv_heads, int head_size, int tokens) {
    shape s = {name, heads, kv_heads, head_size, {}, {}};
    uint32_t state = 12345;
    for (int left = tokens; left > 0;) {
        state = state * 1664525u + 1013904223u;
        const double unit = (state >> 8) / 16777216.0;
        const int length =
            std::min(left, std::min(tokens / 4, (int)(120.0 * std::exp(2.6 * unit) + 900.0 * std::pow(unit, 8))));
        s.queries.push_back(length);
        left -= length;
    }
    s.keys = s.queries;
    return s;
}

static std::vector<shape> all_shapes() {
    return {one_document("causal-4k-hd128", 64, 8, 128, 4096, 4096),
            one_document("causal-16k-hd128", 64, 8, 128, 16384, 16384),
            one_document("causal-16k-hd64", 64, 8, 64, 16384, 16384),
            one_document("mha-8k-hd128", 16, 16, 128, 8192, 8192),
            packed("packed-8k-hd128", 64, 8, 128, 8192),
            packed("packed-32k-hd128", 64, 8, 128, 32768),
            one_document("prefix-8k-over-56k-hd128", 64, 8, 128, 8192, 65536),
            one_document("prefix-8k-over-248k-hd128", 64, 8, 128, 8192, 262144),
            /* What tensor parallelism leaves of heads on a device: few tiles, which are cut into parts. */
            one_document("causal-8k-one-key-head", 8, 1, 128, 8192, 8192),
            packed("packed-8k-one-key-head", 8, 1, 128, 8192),
            one_document("prefix-512-over-64k-one-key-head", 8, 1, 128, 512, 65536)};
}

__global__ static void normal_kernel(__nv_bfloat16 *to, size_t n, uint32_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t z = (uint32_t)i * 2654435761u + seed;
        float sum = 0.0f;
        for (int j = 0; j < 4; j++) {
            z ^= z >> 16, z *= 0x7feb352du, z ^= z >> 15, z *= 0x846ca68bu, z ^= z >> 16;
            sum += (float)(z >> 8) / 16777216.0f - 0.5f;
        }
        to[i] = __float2bfloat16_rn(1.7320508f * sum);
    }
}

static void *device_bytes(std::vector<void *> *blocks, size_t bytes) {
    void *block = nullptr;
    need(cudaMalloc(&block, std::max<size_t>(bytes, 256)), "cudaMalloc");
    blocks->push_back(block);
    return block;
}

static void *device_normal(std::vector<void *> *blocks, size_t n, uint32_t seed) {
    void *block = device_bytes(blocks, 2 * n);
    normal_kernel<<<1024, 256>>>((__nv_bfloat16 *)block, n, seed);
    return block;
}

/* Median milliseconds of `work`, with the cache overwritten before each run. */
template <typename F> static double median_ms(cudaStream_t stream, void *flush, size_t flush_bytes, F work) {
    std::vector<float> times;
    cudaEvent_t start, end;
    need(cudaEventCreate(&start), "cudaEventCreate");
    need(cudaEventCreate(&end), "cudaEventCreate");
    for (int i = 0; i < 23; i++) {
        float ms = 0.0f;
        need(cudaMemsetAsync(flush, i, flush_bytes, stream), "cudaMemsetAsync");
        need(cudaEventRecord(start, stream), "cudaEventRecord");
        work();
        need(cudaEventRecord(end, stream), "cudaEventRecord");
        need(cudaEventSynchronize(end), "cudaEventSynchronize");
        need(cudaEventElapsedTime(&ms, start, end), "cudaEventElapsedTime");
        if (i >= 3) times.push_back(ms); /* the first ones warm up */
    }
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static std::vector<int32_t> sums_of(const std::vector<int32_t> &lengths) {
    std::vector<int32_t> sums = {0};
    for (int32_t n : lengths) sums.push_back(sums.back() + n);
    return sums;
}

static void run_shape(const shape &s, int deterministic) {
    const std::vector<int32_t> cu_q = sums_of(s.queries), cu_k = sums_of(s.keys);
    std::vector<void *> blocks;
    cf_attention_desc d;
    cf_attention_tensors x;
    cf_error error;
    size_t bytes = 0;
    const cf_attention *a = nullptr;
    cudaStream_t stream;
    memset(&d, 0, sizeof d);
    memset(&x, 0, sizeof x);
    d.n_heads = s.n_heads, d.n_kv_heads = s.n_kv_heads, d.head_size = s.head_size;
    d.n_slices = (int64_t)s.queries.size();
    d.cu_seqlens_q = cu_q.data(), d.cu_seqlens_k = cu_k.data();
    d.deterministic = deterministic;
    need(cf_attention_size(&d, &bytes, &error), error);
    std::vector<uint64_t> memory(bytes / 8 + 2);
    need(cf_attention_prepare(&d, memory.data(), bytes, &a, &error), error);
    need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    const size_t q = (size_t)(a->rows_q * s.n_heads * s.head_size),
                 k = (size_t)(a->rows_k * s.n_kv_heads * s.head_size);
    const size_t flush_bytes = (size_t)128 << 20;
    void *flush = device_bytes(&blocks, flush_bytes), *tiles = device_bytes(&blocks, a->tiles_bytes);
    x.q.data = device_normal(&blocks, q, 1), x.k.data = device_normal(&blocks, k, 2);
    x.v.data = device_normal(&blocks, k, 3), x.dout.data = device_normal(&blocks, q, 4);
    x.out.data = device_bytes(&blocks, 2 * q), x.dq.data = device_bytes(&blocks, 2 * q);
    x.dk.data = device_bytes(&blocks, 4 * k), x.dv.data = device_bytes(&blocks, 4 * k);
    x.lse = (float *)device_bytes(&blocks, (size_t)(a->rows_q * s.n_heads) * 4);
    x.workspace_bytes = std::max(a->forward_bytes, a->backward_bytes);
    x.workspace = device_bytes(&blocks, x.workspace_bytes);
    x.tiles = tiles;
    need(cudaMemset(x.dk.data, 0, 4 * k), "cudaMemset");
    need(cudaMemset(x.dv.data, 0, 4 * k), "cudaMemset");
    need(cudaMemcpy(tiles, a->tiles, a->tiles_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    need(cudaDeviceSynchronize(), "inputs");
    const double flop = 4.0 * (double)a->pairs * s.n_heads * s.head_size;
    const double forward =
        median_ms(stream, flush, flush_bytes, [&] { need(cf_attention_forward(a, &x, stream, &error), error); });
    const double backward =
        median_ms(stream, flush, flush_bytes, [&] { need(cf_attention_backward(a, &x, stream, &error), error); });
    printf("%s %s forward %.4f ms %.1f TFLOP/s\n", s.name.c_str(), cf_attention_path_name(a->path), forward,
           flop / forward * 1e-9);
    printf("%s %s%s backward %.4f ms %.1f TFLOP/s\n", s.name.c_str(), cf_attention_path_name(a->path),
           deterministic ? "-deterministic" : "", backward, 2.5 * flop / backward * 1e-9);
    fflush(stdout);
    for (void *block : blocks) cudaFree(block);
    cudaStreamDestroy(stream);
}

static void list_shape(const shape &s) {
    printf("%s %d %d %d ", s.name.c_str(), s.n_heads, s.n_kv_heads, s.head_size);
    for (size_t i = 0; i < s.queries.size(); i++) printf("%s%d", i ? "," : "", s.queries[i]);
    printf(" ");
    for (size_t i = 0; i < s.keys.size(); i++) printf("%s%d", i ? "," : "", s.keys[i]);
    printf("\n");
}

int main(int argc, char **argv) {
    const bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    const char *part = argc > 1 && !list ? argv[1] : "";
    for (const shape &s : all_shapes()) {
        if (!list && !strstr(s.name.c_str(), part)) continue;
        if (list) {
            list_shape(s);
            continue;
        }
        run_shape(s, 0);
        if (s.queries.size() == 1 && s.keys[0] == 16384) run_shape(s, 1);
    }
    return 0;
}
