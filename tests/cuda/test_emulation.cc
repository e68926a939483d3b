/* Tests the emulation of CUDA itself: it computes what a device would, and each of its checks can fail. */

#include "../harness.h"
#include "reference.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <vector>

template <typename... P, typename... A> static cudaError_t launch(cudaStream_t stream, void (*kernel)(P...), int blocks,
                                                                  int threads, size_t shared, const A &...arguments) {
    cudaLaunchConfig_t config;
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

/* Launches and waits. */
template <typename... P, typename... A>
static cudaError_t run(void (*kernel)(P...), int blocks, int threads, size_t shared, const A &...arguments) {
    const cudaError_t error = launch(nullptr, kernel, blocks, threads, shared, arguments...);
    return error == cudaSuccess ? cudaDeviceSynchronize() : error;
}

static float load(uint32_t address) {
    float x;
    cuda_emu_shared_load(&x, address, 4);
    return x;
}

static void store(uint32_t address, float x) { cuda_emu_shared_store(address, &x, 4); }

/* An array of floats on the current device. */
struct device_floats {
    float *data = nullptr;
    size_t n;

    explicit device_floats(const std::vector<float> &from) : n(from.size()) {
        CHECK(cudaMalloc(&data, n * 4) == cudaSuccess);
        CHECK(cudaMemcpy(data, from.data(), n * 4, cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
    }
    explicit device_floats(size_t count) : n(count) { CHECK(cudaMalloc(&data, n * 4) == cudaSuccess); }
    device_floats(const device_floats &) = delete;
    device_floats &operator=(const device_floats &) = delete;
    ~device_floats() { cudaFree(data); }

    std::vector<float> host() const {
        std::vector<float> to(n);
        CHECK(cudaMemcpy(to.data(), data, n * 4, cudaMemcpyDeviceToHost) == cudaSuccess);
        return to;
    }
};

/* Checks that exactly one kind of fault was counted, at least once. */
static void check_only(cuda_emu_fault kind) {
    CHECK(cuda_emu_faults(kind) > 0);
    CHECK_INT(cuda_emu_faults(), cuda_emu_faults(kind));
    CHECK(strlen(cuda_emu_first_fault()) > 0);
    cuda_emu_reset();
    cuda_emu_set_order(0);
}

/* ---- what it computes ---- */

static void reverse_kernel(const float *in, float *out) {
    const unsigned n = blockDim.x, at = blockIdx.x * n + threadIdx.x;
    store(4 * threadIdx.x, in[at]);
    __syncthreads();
    out[at] = load(4 * (n - 1 - threadIdx.x)) + (float)gridDim.x;
}

TEST(barrier) {
    for (int backwards = 0; backwards < 2; backwards++) {
        std::vector<float> in(3 * 77), out(3 * 77, -1.0f);
        for (size_t i = 0; i < in.size(); i++) in[i] = (float)i;
        cuda_emu_reset();
        cuda_emu_set_order(backwards);
        CHECK(run(reverse_kernel, 3, 77, 77 * 4, in.data(), out.data()) == cudaSuccess);
        for (size_t i = 0; i < in.size(); i++) CHECK(out[i] == (float)(i / 77 * 77 + 76 - i % 77) + 3.0f);
        CHECK_INT(cuda_emu_faults(), 0);
        CHECK_INT(cuda_emu_kernel("kernel").blocks, 3);
        CHECK_INT(cuda_emu_kernel("kernel").barriers, 3);
    }
    cuda_emu_set_order(0);
}

static void collectives_kernel(int *out) {
    const int lane = (int)threadIdx.x % 32, n = (int)threadIdx.x;
    int *mine = out + 6 * n;
    mine[0] = (int)__shfl_xor_sync(0xFFFFFFFFu, (float)n, 5);
    mine[1] = __shfl_sync(0xFFFFFFFFu, n, 7);
    mine[2] = (int)__ballot_sync(0xFFFFFFFFu, lane % 3 == 0);
    mine[3] = __reduce_max_sync(0xFFFFFFFFu, lane == 9 ? 1000 + n : -n);
    mine[4] = __reduce_add_sync(0xFFFFFFFFu, n);
    mine[5] = lane < 16 ? __reduce_add_sync(0x0000FFFFu, n) : -1; /* half a warp */
}

TEST(collectives) {
    std::vector<int> out(6 * 96, -7);
    cuda_emu_reset();
    run(collectives_kernel, 1, 96, 0, out.data());
    for (int n = 0; n < 96; n++) {
        const int warp = n / 32, sum = 32 * 32 * warp + 496;
        CHECK_INT(out[(size_t)(6 * n)], n ^ 5);
        CHECK_INT(out[(size_t)(6 * n + 1)], 32 * warp + 7);
        CHECK_INT((unsigned)out[(size_t)(6 * n + 2)], 0x49249249u);
        CHECK_INT(out[(size_t)(6 * n + 3)], 1000 + 32 * warp + 9);
        CHECK_INT(out[(size_t)(6 * n + 4)], sum);
        CHECK_INT(out[(size_t)(6 * n + 5)], n % 32 < 16 ? 16 * 32 * warp + 120 : -1);
    }
    CHECK_INT(cuda_emu_faults(), 0);
}

/* Row r of the 32 rows of 8 numbers has 16 r + column. */
static void ldmatrix_kernel(uint32_t *out, bool transposed) {
    uint16_t row[8];
    for (int c = 0; c < 8; c++) row[c] = (uint16_t)(16 * threadIdx.x + (unsigned)c);
    cuda_emu_shared_store(16 * threadIdx.x, row, 16);
    __syncthreads();
    uint32_t to[4];
    cuda_emu_ldmatrix_x4(to, 16 * threadIdx.x, transposed);
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + (unsigned)i] = to[i];
}

TEST(ldmatrix) {
    std::vector<uint32_t> out(128);
    cuda_emu_reset();
    for (int transposed = 0; transposed < 2; transposed++) {
        run(ldmatrix_kernel, 1, 32, 512, out.data(), transposed != 0);
        for (unsigned lane = 0; lane < 32; lane++)
            for (unsigned i = 0; i < 4; i++) {
                const unsigned g = lane / 4, t = lane % 4;
                const unsigned low = transposed ? 16 * (8 * i + 2 * t) + g : 16 * (8 * i + g) + 2 * t;
                const unsigned high = transposed ? low + 16 : low + 1;
                CHECK_INT(out[4 * lane + i], low | high << 16);
            }
    }
    CHECK_INT(cuda_emu_faults(), 0);
}

struct mma_data {
    float a[16][16], b[16][8], c[16][8];
};

static uint32_t pair_of(float low, float high, bool bf16) {
    return bf16 ? cuda_emu_float_to_bf16(low) | (uint32_t)cuda_emu_float_to_bf16(high) << 16
                : cuda_emu_float_to_half(low) | (uint32_t)cuda_emu_float_to_half(high) << 16;
}

/* Fills fragments as the PTX manual lays them out for m16n8k16 with 16-bit operands. */
static void mma_kernel(mma_data *m, bool bf16) {
    const unsigned g = threadIdx.x / 4, t = threadIdx.x % 4;
    const uint32_t a[4] = {pair_of(m->a[g][2 * t], m->a[g][2 * t + 1], bf16),
                           pair_of(m->a[g + 8][2 * t], m->a[g + 8][2 * t + 1], bf16),
                           pair_of(m->a[g][2 * t + 8], m->a[g][2 * t + 9], bf16),
                           pair_of(m->a[g + 8][2 * t + 8], m->a[g + 8][2 * t + 9], bf16)};
    const uint32_t b[2] = {pair_of(m->b[2 * t][g], m->b[2 * t + 1][g], bf16),
                           pair_of(m->b[2 * t + 8][g], m->b[2 * t + 9][g], bf16)};
    float c[4] = {m->c[g][2 * t], m->c[g][2 * t + 1], m->c[g + 8][2 * t], m->c[g + 8][2 * t + 1]};
    cuda_emu_mma_16x8x16(c, a, b, bf16);
    m->c[g][2 * t] = c[0], m->c[g][2 * t + 1] = c[1], m->c[g + 8][2 * t] = c[2], m->c[g + 8][2 * t + 1] = c[3];
}

TEST(mma) {
    harness_rng rng = {11};
    cuda_emu_reset();
    for (int bf16 = 0; bf16 < 2; bf16++) {
        mma_data m;
        double wanted[16][8];
        const cf_dtype dtype = bf16 ? CF_DTYPE_BF16 : CF_DTYPE_FP16;
        for (auto &row : m.a)
            for (float &x : row) x = round_to(dtype, (float)harness_unit(&rng) - 0.5f);
        for (auto &row : m.b)
            for (float &x : row) x = round_to(dtype, (float)harness_unit(&rng) - 0.5f);
        for (auto &row : m.c)
            for (float &x : row) x = (float)harness_unit(&rng);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                wanted[i][j] = m.c[i][j];
                for (int k = 0; k < 16; k++) wanted[i][j] += (double)m.a[i][k] * m.b[k][j];
            }
        run(mma_kernel, 1, 32, 0, &m, bf16 != 0);
        CHECK_NEAR(harness_compare_float(&m.c[0][0], 128, &wanted[0][0], 128, 0.0, 1e-5));
    }
    CHECK_INT(cuda_emu_faults(), 0);
    CHECK_INT(cuda_emu_total().mma, 2);
}

static void copy_kernel(const float *in, float *out) {
    const unsigned at = 16 * threadIdx.x;
    cuda_emu_cp_async(at, in + 4 * threadIdx.x, 16, threadIdx.x % 2 ? 16 : 0);
    cuda_emu_cp_async_commit();
    cuda_emu_cp_async(at + 512, in + 4 * threadIdx.x, 16, 8);
    cuda_emu_cp_async_commit();
    cuda_emu_cp_async_wait(1);
    __syncthreads();
    out[threadIdx.x] = load(4 * threadIdx.x);
    cuda_emu_cp_async_wait(0);
    __syncthreads();
    for (unsigned i = 0; i < 4; i++) out[32 + 4 * threadIdx.x + i] = load(512 + at + 4 * i);
}

TEST(async_copies) {
    float *in, out[160];
    cuda_emu_reset();
    REQUIRE(cudaMalloc(&in, 512) == cudaSuccess);
    for (int i = 0; i < 128; i++) in[i] = (float)(i + 1);
    run(copy_kernel, 1, 32, 1024, (const float *)in, &out[0]);
    for (int i = 0; i < 32; i++) CHECK(out[i] == (i / 4 % 2 ? in[i] : 0.0f));
    for (int i = 0; i < 128; i++) CHECK(out[32 + i] == (i % 4 < 2 ? in[i] : 0.0f));
    CHECK_INT(cuda_emu_faults(), 0);
    CHECK(cudaFree(in) == cudaSuccess);
}

TEST(numbers) {
    harness_rng rng = {5};
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const float half = cuda_emu_half_to_float((uint16_t)bits), wide = cuda_emu_bf16_to_float((uint16_t)bits);
        if (half == half) CHECK_INT(cuda_emu_float_to_half(half), bits);
        else CHECK((bits & 0x7C00u) == 0x7C00u && (bits & 1023u) != 0);
        if (wide == wide) CHECK_INT(cuda_emu_float_to_bf16(wide), bits);
        else CHECK((bits & 0x7F80u) == 0x7F80u && (bits & 127u) != 0);
    }
    for (int i = 0; i < 20000; i++) {
        const float x = (float)std::ldexp(harness_unit(&rng) - 0.5, (int)harness_between(&rng, -30, 18));
        CHECK(cuda_emu_half_to_float(cuda_emu_float_to_half(x)) == round_to(CF_DTYPE_FP16, x));
        CHECK(cuda_emu_bf16_to_float(cuda_emu_float_to_bf16(x)) == round_to(CF_DTYPE_BF16, x));
    }
}

TEST(cublas) {
    cublasHandle_t handle;
    harness_rng rng = {3};
    REQUIRE(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    for (int ops = 0; ops < 4; ops++) {
        const int m = 5, n = 7, k = 11, batch = 2, lda = 13, ldb = 12, ldc = 6;
        const cublasOperation_t op_a = ops & 1 ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = ops & 2 ? CUBLAS_OP_T : CUBLAS_OP_N;
        std::vector<float> a(2 * 13 * 13), b(2 * 13 * 13), c((size_t)(2 * ldc * n), NAN);
        const float alpha = 2.0f, zero = 0.0f, one = 1.0f;
        for (float &x : a) x = (float)harness_unit(&rng);
        for (float &x : b) x = (float)harness_unit(&rng);
        device_floats on_a(a), on_b(b), on_c(c);
        for (int pass = 0; pass < 2; pass++)
            CHECK(cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, &alpha, on_a.data, CUDA_R_32F, lda, 169,
                                             on_b.data, CUDA_R_32F, ldb, 169, pass ? &one : &zero, on_c.data,
                                             CUDA_R_32F, ldc, ldc * n, batch, CUBLAS_COMPUTE_32F,
                                             CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
        c = on_c.host();
        for (int s = 0; s < batch; s++)
            for (int i = 0; i < ldc; i++)
                for (int j = 0; j < n; j++) {
                    double sum = 0.0;
                    for (int p = 0; p < k && i < m; p++)
                        sum += (double)a[(size_t)(169 * s + (ops & 1 ? p + i * lda : i + p * lda))] *
                               (double)b[(size_t)(169 * s + (ops & 2 ? j + p * ldb : p + j * ldb))];
                    const double got = (double)c[(size_t)(s * ldc * n + i + j * ldc)];
                    if (i < m) CHECK(std::fabs(got - 4.0 * sum) < 1e-4);
                    else CHECK(got != got); /* rows past m are unchanged */
                }
    }
    cublasDestroy(handle);
}

static void static_shared_kernel(float *out) {
    __shared__ float values[4];
    if (threadIdx.x == 0) values[1] = 5.0f;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

TEST(static_shared_memory) {
    float out[4];
    for (int i = 0; i < 2; i++) {
        run(static_shared_kernel, 2, 4, 0, &out[0]);
        CHECK(out[1] == 5.0f);
        CHECK(out[0] != out[0] && out[2] != out[2] && out[3] != out[3]); /* never written: NaN */
    }
}

/* ---- each checker fires ---- */

static void out_of_bounds_kernel(int bytes_past) { store((uint32_t)(128 + bytes_past), 1.0f); }

TEST(shared_out_of_bounds) {
    cuda_emu_reset();
    run(out_of_bounds_kernel, 1, 1, 128, -4);
    CHECK_INT(cuda_emu_faults(), 0);
    run(out_of_bounds_kernel, 1, 1, 128, 0);
    check_only(CUDA_EMU_OUT_OF_BOUNDS);
}

static void misaligned_kernel(int at) {
    float four[4] = {0, 0, 0, 0};
    cuda_emu_shared_store((uint32_t)at, four, 16);
}

TEST(shared_misaligned) {
    cuda_emu_reset();
    run(misaligned_kernel, 1, 1, 128, 16);
    CHECK_INT(cuda_emu_faults(), 0);
    run(misaligned_kernel, 1, 1, 128, 8);
    check_only(CUDA_EMU_MISALIGNED);
}

static void uninitialised_kernel(int written) {
    if (written) store(4, 1.0f);
    (void)load(4);
}

TEST(uninitialised_read) {
    cuda_emu_reset();
    run(uninitialised_kernel, 1, 1, 8, 1);
    CHECK_INT(cuda_emu_faults(), 0);
    run(uninitialised_kernel, 1, 1, 8, 0); /* data that an earlier launch wrote does not count */
    check_only(CUDA_EMU_UNINITIALISED);
}

static void copy_without_wait_kernel(const float *in, int wait) {
    cuda_emu_cp_async(0, in, 16, 16);
    cuda_emu_cp_async_commit();
    cuda_emu_cp_async_wait(wait ? 0 : 1);
    (void)load(0);
}

TEST(read_of_a_copy_in_flight) {
    float *in;
    REQUIRE(cudaMalloc(&in, 16) == cudaSuccess);
    cuda_emu_reset();
    run(copy_without_wait_kernel, 1, 1, 16, (const float *)in, 1);
    CHECK_INT(cuda_emu_faults(), 0);
    run(copy_without_wait_kernel, 1, 1, 16, (const float *)in, 0);
    check_only(CUDA_EMU_UNINITIALISED);
    cudaFree(in);
}

/* how: 0 no barrier, 1 block barrier, 2 warp barrier */
static void exchange_kernel(int how) {
    store(4 * threadIdx.x, 1.0f);
    if (how == 1) __syncthreads();
    if (how == 2) __syncwarp();
    (void)load(4 * ((threadIdx.x + blockDim.x - 1) % blockDim.x));
}

static void overwrite_kernel(int barrier) {
    store(4 * threadIdx.x, 1.0f);
    __syncthreads();
    (void)load(4 * (threadIdx.x ^ 1));
    if (barrier) __syncthreads();
    store(4 * threadIdx.x, 2.0f);
}

TEST(race) {
    cuda_emu_reset();
    run(exchange_kernel, 1, 64, 256, 1);
    run(exchange_kernel, 1, 32, 128, 2);
    run(overwrite_kernel, 1, 32, 128, 1);
    CHECK_INT(cuda_emu_faults(), 0);
    run(exchange_kernel, 1, 64, 256, 2); /* a warp barrier does not order two warps */
    CHECK(cuda_emu_faults(CUDA_EMU_RACE) > 0);
    cuda_emu_reset();
    run(overwrite_kernel, 1, 32, 128, 0); /* written while a neighbour may still read */
    check_only(CUDA_EMU_RACE);
    cuda_emu_set_order(1);
    run(exchange_kernel, 1, 32, 128, 0);
    CHECK(cuda_emu_faults(CUDA_EMU_RACE) > 0);
    cuda_emu_reset();
    cuda_emu_set_order(0);
}

static void missing_barrier_kernel(int all) {
    if (all || threadIdx.x != 40) __syncthreads();
}

TEST(barrier_not_reached) {
    cuda_emu_reset();
    run(missing_barrier_kernel, 2, 64, 0, 1);
    CHECK_INT(cuda_emu_faults(), 0);
    run(missing_barrier_kernel, 2, 64, 0, 0);
    CHECK_INT(cuda_emu_faults(CUDA_EMU_BARRIER), 2);
    check_only(CUDA_EMU_BARRIER);
    run(missing_barrier_kernel, 2, 64, 0, 1); /* the abandoned threads run again */
    CHECK_INT(cuda_emu_faults(), 0);
}

static void missing_lane_kernel() {
    if (threadIdx.x != 3) (void)__shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}

static void two_collectives_kernel() {
    if (threadIdx.x < 16) __syncwarp();
    else (void)__ballot_sync(0xFFFFFFFFu, 1);
}

TEST(diverged_collective) {
    cuda_emu_reset();
    run(missing_lane_kernel, 1, 32, 0);
    check_only(CUDA_EMU_DIVERGED);
    run(two_collectives_kernel, 1, 32, 0);
    check_only(CUDA_EMU_DIVERGED);
    std::vector<int> out(6 * 32);
    run(collectives_kernel, 1, 32, 0, out.data());
    CHECK_INT(cuda_emu_faults(), 0);
}

static void global_kernel(const char *address) { (void)cuda_emu_check_global(address, 16); }

TEST(global_access) {
    char *block;
    REQUIRE(cudaMalloc(&block, 64) == cudaSuccess);
    cuda_emu_reset();
    run(global_kernel, 1, 1, 0, (const char *)block + 48);
    CHECK_INT(cuda_emu_faults(), 0);
    run(global_kernel, 1, 1, 0, (const char *)block + 64);
    check_only(CUDA_EMU_OUT_OF_BOUNDS);
    run(global_kernel, 1, 1, 0, (const char *)block + 8);
    check_only(CUDA_EMU_MISALIGNED);
    CHECK(cudaFree(block) == cudaSuccess);
    run(global_kernel, 1, 1, 0, (const char *)block);
    check_only(CUDA_EMU_OUT_OF_BOUNDS);
    CHECK(cudaFree(block) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
}

TEST(refused_launches) {
    cuda_emu_reset();
    CHECK(run(missing_barrier_kernel, 0, 32, 0, 1) == cudaErrorInvalidConfiguration);
    check_only(CUDA_EMU_LAUNCH);
    CHECK(run(missing_barrier_kernel, 1, 1025, 0, 1) == cudaErrorInvalidConfiguration);
    check_only(CUDA_EMU_LAUNCH);
    CHECK(run(missing_barrier_kernel, 1, 32, 49153, 1) == cudaErrorInvalidConfiguration);
    check_only(CUDA_EMU_LAUNCH);
    CHECK(cudaFuncSetAttribute(missing_barrier_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536) ==
          cudaSuccess);
    CHECK(run(missing_barrier_kernel, 1, 32, 49153, 1) == cudaSuccess);
    CHECK_INT(cuda_emu_faults(), 0);
    cuda_emu_set_arch(86);
    CHECK(cudaFuncSetAttribute(missing_barrier_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 102400) ==
          cudaErrorInvalidValue);
    cuda_emu_set_arch(80);
}

/* Lane l stores 4 bytes at l x stride. */
static void stride_kernel(unsigned stride) { store(4 * stride * threadIdx.x, 1.0f); }

static void wide_kernel(unsigned stride) {
    float four[4] = {0, 0, 0, 0};
    cuda_emu_shared_store(16 * stride * threadIdx.x, four, 16);
}

TEST(bank_conflicts) {
    const struct {
        unsigned stride;
        int64_t wavefronts;
    } narrow[] = {{1, 1}, {2, 2}, {8, 8}, {32, 32}, {33, 1}, {0, 1}};
    for (const auto &one : narrow) {
        cuda_emu_reset();
        run(stride_kernel, 1, 32, 8192, one.stride);
        CHECK_INT(cuda_emu_total().wavefronts, one.wavefronts);
        CHECK_INT(cuda_emu_total().conflicts, one.wavefronts - 1);
    }
    cuda_emu_reset();
    run(wide_kernel, 1, 32, 8192, 1u); /* 512 bytes take at least four passes */
    CHECK_INT(cuda_emu_total().wavefronts, 4);
    CHECK_INT(cuda_emu_total().conflicts, 0);
    cuda_emu_reset();
    run(wide_kernel, 1, 32, 8192, 8u); /* all lanes use the same four banks */
    CHECK_INT(cuda_emu_total().wavefronts, 32);
    CHECK_INT(cuda_emu_total().conflicts, 28);
    cuda_emu_reset();
}

SUITE(emulation, CASE(barrier), CASE(collectives), CASE(ldmatrix), CASE(mma), CASE(async_copies), CASE(numbers),
      CASE(cublas), CASE(static_shared_memory), CASE(shared_out_of_bounds), CASE(shared_misaligned),
      CASE(uninitialised_read), CASE(read_of_a_copy_in_flight), CASE(race), CASE(barrier_not_reached),
      CASE(diverged_collective), CASE(global_access), CASE(refused_launches), CASE(bank_conflicts));
