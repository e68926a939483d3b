/* bench_attention.cu - speed of the attention kernels on a device, and whether their variants are right - MIT or public
   domain

       bench_attention --list                          one line a shape: name, heads, key heads, head size, lengths
       bench_attention [options] [part of a name]      times forward and backward: SHAPE VARIANT PASS MS ms N TFLOP/s
       bench_attention --check [options] [part ...]    compares with the unfused path: SHAPE VARIANT check ok|FAIL ...
           --variant V    which kernels, again for each more; default mma and what can run beside it
           --seconds S    how long to repeat one pass (at least 5 runs, at most 20); default 1
           --small        tiny shapes, for a device that is emulated

   A variant is a path (unfused, mma, wgmma) and what is changed in it, without spaces:
       +deterministic         dq without atomic sums
       +arch=86               tiles and stages as on that compute capability: 86 has the small ones of 99 KB
       +cache=33554432        heads in sections whose arrays share so many bytes of cache
       +processors=66         work cut into parts as for so many multiprocessors

   TFLOP/s count only pairs that the mask leaves visible: 4 x pairs x heads x head size for a forward, 2.5 times that
   for a backward. Inputs are random normal numbers, because zeros draw less power, which raises clocks. Between runs
   the L2 cache is overwritten. A time is the median of the runs. bench_attention.py prints PyTorch's numbers beside
   these, from the same run. For a variant that cannot run, "SHAPE VARIANT error WHY" is printed, and the others go on;
   the exit status is then 1. */

#define CHUNKFLOW_IMPLEMENTATION
#include "../../chunkflow.h"
#define CHUNKFLOW_CUDA_HEADER_ONLY
#include "../../chunkflow_cuda.cu"

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

/* The failure of one variant; the others go on. */
struct failure {
    std::string why;
};

static void need(cudaError_t status, const char *what) {
    if (status != cudaSuccess) throw failure{std::string(what) + ": " + cudaGetErrorString(status)};
}

static void need(cf_result code, const cf_error &error) {
    if (code != CF_OK) throw failure{error.text};
}

static void need(bool ok, const std::string &why) {
    if (!ok) throw failure{why};
}

struct shape {
    std::string name;
    int n_heads, n_kv_heads, head_size;
    std::vector<int32_t> queries, keys;
};

static shape one_document(const char *name, int heads, int kv_heads, int head_size, int queries, int keys) {
    return {name, heads, kv_heads, head_size, {queries}, {keys}};
}

/* A mix like real fine-tuning data: most documents are short, some long. It is the same on every machine. */
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
            /* The heads that tensor parallelism leaves on a device: few tiles, which are cut into parts. */
            one_document("causal-8k-one-key-head", 8, 1, 128, 8192, 8192),
            packed("packed-8k-one-key-head", 8, 1, 128, 8192),
            one_document("prefix-512-over-64k-one-key-head", 8, 1, 128, 512, 65536)};
}

static std::vector<shape> small_shapes() {
    shape prefixes = packed("small-packed", 4, 2, 64, 40);
    prefixes.keys[0] += 70;
    return {one_document("small-causal", 2, 1, 128, 70, 70), prefixes};
}

/* The shapes of --check: tiles and documents that end at different rows, a prefix, few heads, both head sizes. They are
   small enough for the host to compare all numbers in a second or two. */
static std::vector<shape> check_shapes() {
    shape prefixes = packed("packed-4k-with-a-prefix", 16, 2, 128, 4096);
    prefixes.keys[0] += 3001;
    return {prefixes, packed("packed-3k-hd64", 12, 4, 64, 3001), one_document("one-key-head-1k", 8, 1, 128, 1001, 8193),
            one_document("group-of-7", 14, 2, 128, 1555, 2001)};
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

/* Memory of one problem, freed at its end. */
struct device_memory {
    std::vector<void *> blocks;

    ~device_memory() {
        for (void *block : blocks) cudaFree(block);
    }

    void *bytes(size_t n) {
        void *block = nullptr;
        need(cudaMalloc(&block, std::max<size_t>(n, 256)), "cudaMalloc");
        blocks.push_back(block);
        need(cudaMemset(block, 0xFF, std::max<size_t>(n, 256)), "cudaMemset"); /* what is not written is NaN */
        return block;
    }

    void *normal(size_t n, uint32_t seed) {
        __nv_bfloat16 *block = (__nv_bfloat16 *)bytes(2 * n);
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3((unsigned)std::min<size_t>(1024, n / 256 + 1), 1, 1);
        config.blockDim = dim3(256, 1, 1);
        need(cudaLaunchKernelEx(&config, normal_kernel, block, n, seed), "normal_kernel");
        return block;
    }
};

/* ---- variants ---- */

struct variant {
    std::string name;
    cf_attention_path path = CF_ATTENTION_AUTO;
    bool deterministic = false;
    int64_t arch = 0, cache = 0, processors = 0;
};

/* "mma+arch=86": the path, then what is changed. */
static variant parse_variant(const std::string &name) {
    variant v;
    v.name = name;
    for (size_t at = 0, n = 0; at <= name.size(); at += n + 1) {
        n = std::min(name.find('+', at), name.size()) - at;
        const std::string word = name.substr(at, n), key = word.substr(0, word.find('='));
        const int64_t value = key.size() < word.size() ? atoll(word.c_str() + key.size() + 1) : 0;
        if (at == 0) {
            for (cf_attention_path path : {CF_ATTENTION_UNFUSED, CF_ATTENTION_MMA, CF_ATTENTION_WGMMA})
                if (word == cf_attention_path_name(path)) v.path = path;
            need(v.path != CF_ATTENTION_AUTO, "no path is named " + word);
        } else if (word == "deterministic") v.deterministic = true;
        else if (key == "arch" && value > 0) v.arch = value;
        else if (key == "cache" && value > 0) v.cache = value;
        else if (key == "processors" && value > 0) v.processors = value;
        else need(false, "no variant is named " + word);
    }
    return v;
}

/* ---- one problem ---- */

static std::vector<int32_t> sums_of(const std::vector<int32_t> &lengths) {
    std::vector<int32_t> sums = {0};
    for (int32_t n : lengths) sums.push_back(sums.back() + n);
    return sums;
}

/* A shape with a variant, prepared, with arrays of random numbers on the device. */
struct instance {
    device_memory memory;
    std::vector<int32_t> cu_q, cu_k;
    std::vector<uint64_t> host;
    const cf_attention *attention = nullptr;
    cf_attention_tensors x;
    size_t n_q = 0, n_k = 0, n_lse = 0; /* numbers of q, k and lse */
    cublasHandle_t cublas = nullptr;
    cudaStream_t stream = nullptr;

    ~instance() {
        if (cublas) cublasDestroy(cublas);
        if (stream) cudaStreamDestroy(stream);
    }
    instance(const instance &) = delete;

    instance(const shape &s, const variant &v) : cu_q(sums_of(s.queries)), cu_k(sums_of(s.keys)) {
        cf_attention_desc d;
        cf_error error;
        size_t bytes = 0;
        memset(&d, 0, sizeof d);
        memset(&x, 0, sizeof x);
        d.n_heads = s.n_heads, d.n_kv_heads = s.n_kv_heads, d.head_size = s.head_size;
        d.n_slices = (int64_t)s.queries.size();
        d.cu_seqlens_q = cu_q.data(), d.cu_seqlens_k = cu_k.data();
        d.deterministic = v.deterministic, d.path = v.path, d.cache_bytes = v.cache;
        d.arch = v.arch, d.n_processors = v.processors;
        if (d.arch > 0 && d.n_processors == 0) { /* other tiles, on this device */
            int n = 0;
            need(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
            d.n_processors = n;
        }
        need(cf_attention_size(&d, &bytes, &error), error);
        host.resize(bytes / 8 + 2);
        need(cf_attention_prepare(&d, host.data(), bytes, &attention, &error), error);
        need(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
        if (attention->path == CF_ATTENTION_UNFUSED)
            need(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS, "cublasCreate");
        take_arrays(s);
    }

    void take_arrays(const shape &s) {
        n_q = (size_t)(attention->rows_q * s.n_heads * s.head_size);
        n_k = (size_t)(attention->rows_k * s.n_kv_heads * s.head_size);
        n_lse = (size_t)(attention->rows_q * s.n_heads);
        x.q.data = memory.normal(n_q, 1), x.k.data = memory.normal(n_k, 2);
        x.v.data = memory.normal(n_k, 3), x.dout.data = memory.normal(n_q, 4);
        x.out.data = memory.bytes(2 * n_q), x.dq.data = memory.bytes(2 * n_q);
        x.dk.data = memory.bytes(4 * n_k), x.dv.data = memory.bytes(4 * n_k);
        x.lse = (float *)memory.bytes(4 * n_lse);
        x.workspace_bytes = std::max(attention->forward_bytes, attention->backward_bytes);
        x.workspace = memory.bytes(x.workspace_bytes);
        x.cublas = cublas;
        void *tiles = memory.bytes(attention->tiles_bytes);
        x.tiles = tiles;
        need(cudaMemset(x.dk.data, 0, 4 * n_k), "cudaMemset");
        need(cudaMemset(x.dv.data, 0, 4 * n_k), "cudaMemset");
        need(cudaMemcpy(tiles, attention->tiles, attention->tiles_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
        need(cudaDeviceSynchronize(), "inputs");
    }

    void run(bool backward) {
        cf_error error;
        need(backward ? cf_attention_backward(attention, &x, stream, &error)
                      : cf_attention_forward(attention, &x, stream, &error), error);
    }
};

/* ---- speed ---- */

struct timing {
    double seconds = 1.0;
    int warm = 2, least = 5, most = 20; /* runs: not counted, and then counted */
    size_t flush_bytes = (size_t)128 << 20;
};

/* Returns the median milliseconds of a pass. The cache is overwritten before each run. */
static double median_ms(instance &i, bool backward, void *flush, const timing &how) {
    std::vector<float> times;
    cudaEvent_t start, end;
    double spent = 0.0;
    need(cudaEventCreate(&start), "cudaEventCreate");
    need(cudaEventCreate(&end), "cudaEventCreate");
    for (int n = 0, warm = how.warm; n < warm + how.least || (n < warm + how.most && spent < how.seconds * 1e3); n++) {
        float ms = 0.0f;
        need(cudaMemsetAsync(flush, n, how.flush_bytes, i.stream), "cudaMemsetAsync");
        need(cudaEventRecord(start, i.stream), "cudaEventRecord");
        i.run(backward);
        need(cudaEventRecord(end, i.stream), "cudaEventRecord");
        need(cudaEventSynchronize(end), "cudaEventSynchronize");
        need(cudaEventElapsedTime(&ms, start, end), "cudaEventElapsedTime");
        if (n >= how.warm) times.push_back(ms);
        spent += ms;
    }
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static void time_shape(const shape &s, const variant &v, const timing &how) {
    instance i(s, v);
    void *flush = i.memory.bytes(how.flush_bytes);
    const double flop = 4.0 * (double)i.attention->pairs * s.n_heads * s.head_size;
    for (int backward = 0; backward < 2; backward++) {
        const double ms = median_ms(i, backward != 0, flush, how);
        printf("%s %s %s %.4f ms %.1f TFLOP/s\n", s.name.c_str(), v.name.c_str(), backward ? "backward" : "forward",
               ms, (backward ? 2.5 : 1.0) * flop / ms * 1e-9);
        fflush(stdout);
    }
}

/* ---- correctness ---- */

/* Everything that a forward and a backward write, as doubles: out, lse, dq, dk, dv. */
struct outputs {
    std::vector<double> arrays[5];
};

static const char *const output_names[5] = {"out", "lse", "dq", "dk", "dv"};

template <typename T> static std::vector<T> download(const void *from, size_t n) {
    std::vector<T> to(n);
    need(cudaMemcpy(to.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return to;
}

static std::vector<double> doubles_of(const void *from, size_t n, bool bf16) {
    std::vector<double> to;
    to.reserve(n);
    if (bf16)
        for (__nv_bfloat16 value : download<__nv_bfloat16>(from, n)) to.push_back((double)__bfloat162float(value));
    else
        for (float value : download<float>(from, n)) to.push_back((double)value);
    return to;
}

static outputs run_once(instance &i) {
    i.x.overwrite = 1;
    i.run(false);
    i.run(true);
    need(cudaStreamSynchronize(i.stream), "the kernels");
    return {{doubles_of(i.x.out.data, i.n_q, true), doubles_of(i.x.lse, i.n_lse, false),
             doubles_of(i.x.dq.data, i.n_q, true), doubles_of(i.x.dk.data, i.n_k, false),
             doubles_of(i.x.dv.data, i.n_k, false)}};
}

/* Returns the norm of the difference over the norm of the reference. With a NaN on either side, the result is never
   good. */
static double relative_difference(const std::vector<double> &got, const std::vector<double> &wanted) {
    double gap = 0.0, size = 0.0;
    for (size_t i = 0; i < got.size(); i++) {
        gap += (got[i] - wanted[i]) * (got[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return std::sqrt(gap) / std::sqrt(size);
}

/* Compares with the unfused path. Also runs a second time: the bits must be equal where the interface promises that,
   and a difference is a race. Both sides round P, dS and all results to bf16; the limit of 1 % allows for that, and for
   nothing else. */
static bool check_shape(const shape &s, const variant &v, const timing &) {
    instance one(s, v), reference(s, parse_variant("unfused"));
    const outputs first = run_once(one), second = run_once(one), wanted = run_once(reference);
    bool ok = true, same = true;
    std::string text;
    for (int a = 0; a < 5; a++) {
        char part[64];
        const double difference = relative_difference(first.arrays[a], wanted.arrays[a]);
        ok = ok && difference <= 0.01;
        if (a != 2 || v.deterministic) same = same && first.arrays[a] == second.arrays[a];
        snprintf(part, sizeof part, " %s %.2g", output_names[a], difference);
        text += part;
    }
    printf("%s %s check %s%s%s\n", s.name.c_str(), v.name.c_str(), ok && same ? "ok" : "FAIL", text.c_str(),
           same ? "" : ", and other bits the second time");
    fflush(stdout);
    return ok && same;
}

static void list_shape(const shape &s) {
    printf("%s %d %d %d ", s.name.c_str(), s.n_heads, s.n_kv_heads, s.head_size);
    for (size_t i = 0; i < s.queries.size(); i++) printf("%s%d", i ? "," : "", s.queries[i]);
    printf(" ");
    for (size_t i = 0; i < s.keys.size(); i++) printf("%s%d", i ? "," : "", s.keys[i]);
    printf("\n");
}

/* ---- program ---- */

struct settings {
    bool list = false, check = false, small = false;
    timing how;
    std::string part;
    std::vector<variant> variants;
};

/* Returns false if an option is unknown, or has no value. */
static bool parse_settings(int argc, char **argv, settings *to) {
    for (int i = 1; i < argc; i++) {
        const std::string word = argv[i];
        if (word == "--list") to->list = true;
        else if (word == "--check") to->check = true;
        else if (word == "--small") to->small = true, to->how = {0.0, 0, 1, 1, 1 << 16};
        else if (word == "--variant" && i + 1 < argc) to->variants.push_back(parse_variant(argv[++i]));
        else if (word == "--seconds" && i + 1 < argc) to->how.seconds = atof(argv[++i]);
        else if (word[0] == '-') return false;
        else to->part = word;
    }
    if (to->variants.empty())
        for (const char *name : {"mma", "mma+deterministic", "wgmma"}) to->variants.push_back(parse_variant(name));
    return true;
}

/* Returns whether all went well. An error of the device itself ends everything, because it stays. */
static bool run_shape(const shape &s, const variant &v, const settings &all) {
    try {
        if (all.check) return check_shape(s, v, all.how);
        time_shape(s, v, all.how);
        return true;
    } catch (const failure &f) {
        printf("%s %s error %s\n", s.name.c_str(), v.name.c_str(), f.why.c_str());
        fflush(stdout);
        if (cudaDeviceSynchronize() != cudaSuccess) exit(1);
        return false;
    }
}

int main(int argc, char **argv) {
    settings all;
    bool ok = true;
    try {
        need(parse_settings(argc, argv, &all), "the options are in the first lines of bench_attention.cu");
    } catch (const failure &f) {
        fprintf(stderr, "bench_attention: %s\n", f.why.c_str());
        return 2;
    }
    for (const shape &s : all.small ? small_shapes() : all.check ? check_shapes() : all_shapes()) {
        if (s.name.find(all.part) == std::string::npos) continue;
        if (all.list) list_shape(s);
        else
            for (const variant &v : all.variants) ok = run_shape(s, v, all) && ok;
    }
    return ok ? 0 : 1;
}
