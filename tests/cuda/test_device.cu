/* Tests for a device only: full sizes, offsets past 32 bits, races, and equal bits over many repeats. Not built for the
   emulation. */

#include "../harness.h"
#include "device.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#ifdef CHUNKFLOW_CUDA_EMULATION
#error "test_device.cu is for a device"
#endif

/* Pseudo-random bf16 numbers in [-1, 1), the same on the host and on the device; index counts elements of the array. */
__host__ __device__ static inline float number_at(uint64_t index, uint64_t seed) {
    uint64_t z = index * 0x9E3779B97F4A7C15u + seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (float)(int)((z >> 56) & 0xFF) / 128.0f - 1.0f; /* 8 bits: exact in bf16 */
}

__global__ static void fill_kernel(__nv_bfloat16 *to, uint64_t n, uint64_t seed) {
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < n; i += (uint64_t)gridDim.x * blockDim.x)
        to[i] = __float2bfloat16_rn(number_at(i, seed));
}

/* A problem of one slice with its arrays on the device, too large for the host. */
struct large_problem {
    int64_t n_heads, n_kv_heads, head_size, queries, keys, window;
    cf_attention_path path;
    int deterministic;
    int32_t cu_q[2], cu_k[2];
    std::vector<uint64_t> memory;
    const cf_attention *attention;
    cf_attention_tensors x;
    std::vector<void *> blocks;
    cublasHandle_t cublas;

    ~large_problem() {
        for (void *block : blocks) cudaFree(block);
        if (cublas) cublasDestroy(cublas);
    }

    void *take(size_t bytes) {
        void *block = nullptr;
        if (!CHECK(cudaMalloc(&block, bytes) == cudaSuccess)) return nullptr;
        blocks.push_back(block);
        cudaMemset(block, 0xFF, bytes);
        return block;
    }

    void *filled(int64_t n, uint64_t seed) {
        void *block = take((size_t)n * 2);
        if (block) fill_kernel<<<1024, 256>>>((__nv_bfloat16 *)block, (uint64_t)n, seed);
        return block;
    }

    bool make() {
        cf_attention_desc d;
        cf_error error;
        size_t bytes = 0;
        memset(&d, 0, sizeof d);
        memset(&x, 0, sizeof x);
        cublas = nullptr;
        cu_q[0] = cu_k[0] = 0, cu_q[1] = (int32_t)queries, cu_k[1] = (int32_t)keys;
        d.n_heads = n_heads, d.n_kv_heads = n_kv_heads, d.head_size = head_size, d.n_slices = 1;
        d.cu_seqlens_q = cu_q, d.cu_seqlens_k = cu_k, d.window = window, d.path = path, d.deterministic = deterministic;
        if (!CHECK(cf_attention_size(&d, &bytes, &error) == CF_OK)) return false;
        memory.resize(bytes / 8 + 2);
        if (!CHECK(cf_attention_prepare(&d, memory.data(), bytes, &attention, &error) == CF_OK)) return false;
        const int64_t q = n_heads * queries * head_size, k = n_kv_heads * keys * head_size;
        x.q.data = filled(q, 1), x.k.data = filled(k, 2), x.v.data = filled(k, 3), x.dout.data = filled(q, 4);
        x.out.data = take((size_t)q * 2), x.dq.data = take((size_t)q * 2);
        x.dk.data = take((size_t)k * 4), x.dv.data = take((size_t)k * 4);
        x.lse = (float *)take((size_t)(n_heads * queries) * 4);
        x.workspace_bytes =
            attention->backward_bytes > attention->forward_bytes ? attention->backward_bytes : attention->forward_bytes;
        x.workspace = take(x.workspace_bytes + 1);
        void *tiles = take(attention->tiles_bytes + 1);
        x.tiles = tiles;
        x.overwrite = 1;
        if (path == CF_ATTENTION_UNFUSED) CHECK(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
        x.cublas = cublas;
        for (void *block : blocks)
            if (!block) return false;
        return CHECK(cudaMemcpy(tiles, attention->tiles, attention->tiles_bytes, cudaMemcpyHostToDevice) ==
                     cudaSuccess) != 0;
    }

    bool run(bool backward) {
        cf_error error;
        memset(&error, 0, sizeof error);
        cf_result code = cf_attention_forward(attention, &x, nullptr, &error);
        if (code == CF_OK && backward) code = cf_attention_backward(attention, &x, nullptr, &error);
        if (code != CF_OK) FAIL("%s", error.text);
        return CHECK(cudaDeviceSynchronize() == cudaSuccess) && code == CF_OK;
    }

    double number(int64_t row, int64_t heads, int64_t head, int64_t c, uint64_t seed) const {
        return (double)number_at((uint64_t)((row * heads + head) * head_size + c), seed);
    }

    double dot(int64_t i, int64_t head, uint64_t seed_q, int64_t j, uint64_t seed_k) const {
        const int64_t kv = head / (n_heads / n_kv_heads);
        double sum = 0.0;
        for (int64_t c = 0; c < head_size; c++)
            sum += number(i, n_heads, head, c, seed_q) * number(j, n_kv_heads, kv, c, seed_k);
        return sum;
    }

    int64_t first_key(int64_t i) const {
        const int64_t own = i + keys - queries;
        return window > 0 && own - window + 1 > 0 ? own - window + 1 : 0;
    }

    /* Computes P and dS of one row, from its first visible key on. Returns its log-sum. */
    double row_slopes(int64_t i, int64_t head, std::vector<double> *prob, std::vector<double> *slope) const {
        const int64_t first = first_key(i), n = i + keys - queries - first + 1;
        double top = -INFINITY, sum = 0.0, mean = 0.0;
        prob->resize((size_t)n);
        slope->resize((size_t)n);
        for (int64_t j = 0; j < n; j++) {
            (*prob)[(size_t)j] = dot(i, head, 1, first + j, 2) / std::sqrt((double)head_size);
            (*slope)[(size_t)j] = dot(i, head, 4, first + j, 3);
            top = std::fmax(top, (*prob)[(size_t)j]);
        }
        for (double &p : *prob) sum += p = std::exp(p - top);
        for (size_t j = 0; j < prob->size(); j++) mean += ((*prob)[j] /= sum) * (*slope)[j];
        for (size_t j = 0; j < prob->size(); j++) (*slope)[j] = (*prob)[j] * ((*slope)[j] - mean);
        return top + std::log(sum);
    }

    /* Computes dq of one row in double. Returns the error relative to the row's greatest number. */
    double dq_error(int64_t i, int64_t head) const {
        const int64_t kv = head / (n_heads / n_kv_heads), first = first_key(i);
        std::vector<double> prob, slope, wanted((size_t)head_size, 0.0);
        std::vector<__nv_bfloat16> got((size_t)head_size);
        double gap = 0.0, size = 0.0;
        row_slopes(i, head, &prob, &slope);
        for (size_t j = 0; j < slope.size(); j++)
            for (int64_t c = 0; c < head_size; c++)
                wanted[(size_t)c] += slope[j] * number(first + (int64_t)j, n_kv_heads, kv, c, 2);
        cudaMemcpy(got.data(), (__nv_bfloat16 *)x.dq.data + (i * n_heads + head) * head_size, got.size() * 2,
                   cudaMemcpyDeviceToHost);
        for (size_t c = 0; c < wanted.size(); c++) {
            const double exact = wanted[c] / std::sqrt((double)head_size);
            const double off = std::fabs((double)__bfloat162float(got[c]) - exact);
            if (!(off <= gap)) gap = off;
            size = std::fmax(size, std::fabs(exact));
        }
        return gap / size;
    }

    /* Computes dk and dv of one key in the same way, for problems with a window, so that few rows see the key. */
    double dkv_error(int64_t key, int64_t kv) const {
        const int64_t chain = n_heads / n_kv_heads, begin = std::max((int64_t)0, key - (keys - queries));
        const int64_t end = std::min(queries, key + window - (keys - queries));
        std::vector<double> prob, slope, dk((size_t)head_size, 0.0), dv((size_t)head_size, 0.0);
        std::vector<float> got_k((size_t)head_size), got_v((size_t)head_size);
        double worst = 0.0, gap[2] = {0.0, 0.0}, size[2] = {0.0, 0.0};
        for (int64_t i = begin; i < end; i++)
            for (int64_t head = kv * chain; head < (kv + 1) * chain; head++) {
                row_slopes(i, head, &prob, &slope);
                const size_t at = (size_t)(key - first_key(i));
                for (int64_t c = 0; c < head_size; c++) {
                    dk[(size_t)c] += slope[at] * number(i, n_heads, head, c, 1) / std::sqrt((double)head_size);
                    dv[(size_t)c] += prob[at] * number(i, n_heads, head, c, 4);
                }
            }
        const int64_t from = (key * n_kv_heads + kv) * head_size;
        cudaMemcpy(got_k.data(), (float *)x.dk.data + from, got_k.size() * 4, cudaMemcpyDeviceToHost);
        cudaMemcpy(got_v.data(), (float *)x.dv.data + from, got_v.size() * 4, cudaMemcpyDeviceToHost);
        for (size_t c = 0; c < dk.size(); c++) {
            const double off[2] = {std::fabs((double)got_k[c] - dk[c]), std::fabs((double)got_v[c] - dv[c])};
            for (int of_v = 0; of_v < 2; of_v++)
                if (!(off[of_v] <= gap[of_v])) gap[of_v] = off[of_v];
            size[0] = std::fmax(size[0], std::fabs(dk[c]));
            size[1] = std::fmax(size[1], std::fabs(dv[c]));
        }
        for (int of_v = 0; of_v < 2; of_v++)
            if (!(gap[of_v] / size[of_v] <= worst)) worst = gap[of_v] / size[of_v];
        return worst;
    }

    /* Computes one row of out and of LSE in double. Returns the largest error of `out` in it. */
    double row_error(int64_t i, int64_t head) const {
        const int64_t kv = head / (n_heads / n_kv_heads), first = first_key(i);
        std::vector<double> prob, slope, out((size_t)head_size, 0.0);
        const double log_sum = row_slopes(i, head, &prob, &slope);
        double worst = 0.0;
        for (size_t j = 0; j < prob.size(); j++)
            for (int64_t c = 0; c < head_size; c++)
                out[(size_t)c] += prob[j] * number(first + (int64_t)j, n_kv_heads, kv, c, 3);
        std::vector<__nv_bfloat16> got((size_t)head_size);
        float lse = NAN;
        cudaMemcpy(got.data(), (__nv_bfloat16 *)x.out.data + (i * n_heads + head) * head_size, got.size() * 2,
                   cudaMemcpyDeviceToHost);
        cudaMemcpy(&lse, x.lse + head * queries + i, 4, cudaMemcpyDeviceToHost);
        if (!(std::fabs((double)lse - log_sum) <= 1e-4)) return INFINITY;
        for (int64_t c = 0; c < head_size; c++) {
            const double gap = std::fabs((double)__bfloat162float(got[(size_t)c]) - out[(size_t)c]);
            if (!(gap <= worst)) worst = gap;
        }
        return worst;
    }
};

static void check_rows(const large_problem &p) {
    for (int64_t at : {(int64_t)0, p.queries / 2 + 17, p.queries - 1})
        for (int64_t head : {(int64_t)0, p.n_heads - 1}) {
            const double error = p.row_error(at, head);
            CHECK(error <= 0.004); /* rounding of numbers below 1 to bf16 */
        }
}

/* With a bf16 result, P and dS are rounded to bf16: each is off by 2^-9 of itself, and their sum by less than this. */
static void check_gradients(const large_problem &p) {
    for (int64_t at : {(int64_t)0, p.queries / 2 + 17, p.queries - 1}) {
        if (at > 0) /* the first row sees one key, so its slope is 0 */
            for (int64_t head : {(int64_t)0, p.n_heads - 1}) CHECK(p.dq_error(at, head) <= 0.03);
        for (int64_t kv : {(int64_t)0, p.n_kv_heads - 1}) CHECK(p.dkv_error(at + p.keys - p.queries, kv) <= 0.03);
    }
}

/* Compares bf16 arrays of two paths, like compare_floats. */
static void compare_bf16(const void *a, const void *b, int64_t n, double relative) {
    std::vector<__nv_bfloat16> x((size_t)n), y((size_t)n);
    double gap = 0.0, size = 0.0;
    CHECK(cudaMemcpy(x.data(), a, (size_t)n * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaMemcpy(y.data(), b, (size_t)n * 2, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (size_t i = 0; i < (size_t)n; i++) {
        const double one = (double)__bfloat162float(x[i]), other = (double)__bfloat162float(y[i]);
        gap += (one - other) * (one - other);
        size += other * other;
    }
    CHECK(size > 0.0 && std::sqrt(gap) <= relative * std::sqrt(size));
}

/* Compares two paths on the same inputs. Nearly all bits of dk and dv come from different sums. */
static void compare_floats(const void *a, const void *b, int64_t n, double relative) {
    std::vector<float> x((size_t)n), y((size_t)n);
    double gap = 0.0, size = 0.0;
    cudaMemcpy(x.data(), a, (size_t)n * 4, cudaMemcpyDeviceToHost);
    cudaMemcpy(y.data(), b, (size_t)n * 4, cudaMemcpyDeviceToHost);
    for (size_t i = 0; i < (size_t)n; i++) {
        gap += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        size += (double)y[i] * (double)y[i];
    }
    CHECK(std::sqrt(gap) <= relative * std::sqrt(size));
}

/* Returns the fused path to test: path 3 with CHUNKFLOW_TEST_WGMMA in the environment. */
static cf_attention_path fused_path() {
    return getenv("CHUNKFLOW_TEST_WGMMA") != NULL ? CF_ATTENTION_WGMMA : CF_ATTENTION_MMA;
}

TEST(chunk_of_8k_over_a_long_prefix) {
    large_problem p = {}, oracle = {};
    p.n_heads = 16, p.n_kv_heads = 2, p.head_size = 128, p.queries = 8192, p.keys = 65536, p.path = fused_path();
    oracle.n_heads = 16, oracle.n_kv_heads = 2, oracle.head_size = 128, oracle.queries = 8192, oracle.keys = 65536;
    oracle.path = CF_ATTENTION_UNFUSED;
    if (!p.make() || !p.run(true) || !oracle.make() || !oracle.run(true)) return;
    check_rows(p);
    compare_bf16(p.x.dq.data, oracle.x.dq.data, (int64_t)16 * 8192 * 128, 0.02); /* each path rounds to bf16 */
    compare_floats(p.x.dk.data, oracle.x.dk.data, 2 * 65536 * 128, 0.01);
    compare_floats(p.x.dv.data, oracle.x.dv.data, 2 * 65536 * 128, 0.01);
}

/* 64 heads x 262144 rows x 128 is 2^31 elements. */
TEST(offsets_past_32_bits) {
    large_problem p = {};
    p.n_heads = 64, p.n_kv_heads = 8, p.head_size = 128, p.queries = p.keys = 262144 + 77, p.window = 300;
    p.path = fused_path();
    p.deterministic = 1; /* without the fp32 sums of dq, which would take 8.6 GB more */
    if (!p.make() || !p.run(true)) return;
    check_rows(p);
    check_gradients(p);
}

TEST(a_thousand_repeats) {
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        large_problem p = {};
        p.n_heads = 12, p.n_kv_heads = 3, p.head_size = 128, p.queries = 1000, p.keys = 2333, p.path = fused_path();
        p.deterministic = deterministic;
        if (!p.make()) return;
        const size_t q = (size_t)(12 * 1000 * 128), k = (size_t)(3 * 2333 * 128);
        std::vector<unsigned char> first(q * 4 + k * 8), now(first.size());
        for (int i = 0; i < 1000; i++) {
            if (!p.run(true)) return;
            unsigned char *to = i == 0 ? first.data() : now.data();
            cudaMemcpy(to, p.x.out.data, q * 2, cudaMemcpyDeviceToHost);
            cudaMemcpy(to + q * 2, p.x.dk.data, k * 4, cudaMemcpyDeviceToHost);
            cudaMemcpy(to + q * 2 + k * 4, p.x.dv.data, k * 4, cudaMemcpyDeviceToHost);
            cudaMemcpy(to + q * 2 + k * 8, p.x.dq.data, q * 2, cudaMemcpyDeviceToHost);
            const size_t same = deterministic ? first.size() : q * 2 + k * 8; /* the order of dq's sums may change */
            if (i > 0 && !CHECK(memcmp(first.data(), now.data(), same) == 0)) return;
        }
    }
}

SUITE(device, CASE(chunk_of_8k_over_a_long_prefix), CASE(offsets_past_32_bits), CASE(a_thousand_repeats));
