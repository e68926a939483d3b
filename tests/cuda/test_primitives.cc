/* Each device function of chunkflow_cuda.cu's section >>device against known bits: what holds which number where. Other
   tests cannot tell all of it apart, and the emulation is only as good as this says. Runs under it, and on a device
   first of all. device_section.h is that section, as it stands (tests/device_section.sh). */

#include "../harness.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace {

#include "device_section.h"

const int WARP = 32, SHARED_BYTES = 8192;

/* Runs a kernel of one warp; its only argument is a zeroed array of n words, which comes back. */
template <typename T> std::vector<T> run_warp(void (*kernel)(T *), size_t n, T first = T()) {
    std::vector<T> host(n, first);
    T *device = nullptr;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1, 1, 1);
    config.blockDim = dim3(WARP, 1, 1);
    config.dynamicSmemBytes = SHARED_BYTES;
    CHECK(cudaMalloc((void **)&device, n * sizeof(T)) == cudaSuccess);
    CHECK(cudaMemcpy(device, host.data(), n * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaLaunchKernelEx(&config, kernel, device) == cudaSuccess);
    CHECK(cudaMemcpy(host.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaFree(device) == cudaSuccess);
    return host;
}

/* ---- shared memory ---- */

/* Four 8 x 8 matrices, one after the other; number c of row r of matrix m is 64 m + 8 r + c. */
CF_DEVICE void write_matrices() {
    for (int i = (int)threadIdx.x; i < 128; i += WARP)
        shared_store_4(shared_start() + (shared_address)(4 * i), (uint32_t)(2 * i | (2 * i + 1) << 16));
    __syncthreads();
}

__global__ void matrices_kernel(uint32_t *to) {
    const int lane = (int)threadIdx.x;
    uint32_t plain[4], turned[4];
    write_matrices();
    const shared_address row = shared_start() + (shared_address)(16 * lane);
    ldmatrix_x4(plain, row);
    ldmatrix_x4_transposed(turned, row);
    for (int m = 0; m < 4; m++) {
        to[lane * 8 + m] = plain[m];
        to[lane * 8 + 4 + m] = turned[m];
    }
}

TEST(matrices) {
    const std::vector<uint32_t> got = run_warp<uint32_t>(matrices_kernel, 8 * WARP);
    for (int lane = 0; lane < WARP; lane++)
        for (int m = 0; m < 4; m++) {
            const uint32_t low = (uint32_t)(64 * m + 8 * (lane / 4) + 2 * (lane % 4));
            const uint32_t high = (uint32_t)(64 * m + 8 * (2 * (lane % 4)) + lane / 4);
            if (!CHECK_INT(got[(size_t)(lane * 8 + m)], low | (low + 1) << 16)) return;
            if (!CHECK_INT(got[(size_t)(lane * 8 + 4 + m)], high | (high + 8) << 16)) return;
        }
}

__global__ void shared_kernel(uint32_t *to) {
    const int lane = (int)threadIdx.x;
    const shared_address base = shared_start();
    shared_store_8(base + (shared_address)(8 * lane), make_uint2((uint32_t)(2 * lane), (uint32_t)(2 * lane + 1)));
    __syncthreads();
    const uint4 four = shared_load_16(base + (shared_address)(16 * (lane % 16)));
    const uint2 two = shared_load_8(base + (shared_address)(8 * (31 - lane)));
    const float one = shared_load_float(base + (shared_address)(4 * lane));
    to[lane * 7 + 0] = four.x, to[lane * 7 + 1] = four.y, to[lane * 7 + 2] = four.z, to[lane * 7 + 3] = four.w;
    to[lane * 7 + 4] = two.x, to[lane * 7 + 5] = two.y;
    memcpy(&to[lane * 7 + 6], &one, 4);
}

TEST(shared_loads_and_stores) {
    const std::vector<uint32_t> got = run_warp<uint32_t>(shared_kernel, 7 * WARP);
    for (uint32_t lane = 0; lane < (uint32_t)WARP; lane++) {
        const uint32_t *x = &got[lane * 7];
        for (uint32_t i = 0; i < 4; i++) CHECK_INT(x[i], 4 * (lane % 16) + i);
        CHECK_INT(x[4], 2 * (31 - lane));
        CHECK_INT(x[5], 2 * (31 - lane) + 1);
        CHECK_INT(x[6], lane);
    }
}

/* The first half of `data` is copied in two groups, of which the second is waited for later; odd lanes want nothing. */
__global__ void copies_kernel(uint32_t *data) {
    const int lane = (int)threadIdx.x;
    const shared_address first = shared_start() + (shared_address)(16 * lane), second = first + 16 * WARP;
    for (int i = 0; i < 4; i++) data[4 * lane + i] = (uint32_t)(100 + 4 * lane + i);
    __syncthreads();
    copy_async_16(first, data + 4 * lane, true);
    copy_async_commit();
    copy_async_16(second, data + 4 * lane, lane % 2 == 0);
    copy_async_commit();
    copy_async_wait<1>();
    const uint4 early = shared_load_16(first);
    copy_async_wait<0>();
    const uint4 late = shared_load_16(second);
    global_store_16(data + 4 * (WARP + lane), early);
    global_store_16(data + 4 * (2 * WARP + lane), late);
}

TEST(copies) {
    const std::vector<uint32_t> got = run_warp<uint32_t>(copies_kernel, 12 * WARP);
    for (uint32_t i = 0; i < 4 * (uint32_t)WARP; i++) {
        CHECK_INT(got[4 * WARP + i], 100 + i);
        CHECK_INT(got[8 * WARP + i], i / 4 % 2 == 0 ? 100 + i : 0);
    }
}

/* ---- products ---- */

__host__ __device__ inline float left(int row, int k) { return (float)((5 * row + 3 * k) % 11 - 5); }
__host__ __device__ inline float right(int k, int column) { return (float)((7 * k + 2 * column) % 13 - 6); }

/* c (16 x 8) = 1000 + a (16 x 16) b (16 x 8), all of it integers that every type has. Fragments are filled as the
   comment at mma_16x8x16 says. */
template <typename T> __global__ void product_kernel(float *to) {
    const int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4;
    float c[4] = {1000.0f, 1000.0f, 1000.0f, 1000.0f};
    uint32_t a[4], b[2];
    for (int i = 0; i < 4; i++) {
        const int row = g + i % 2 * 8, k = 2 * t + i / 2 * 8;
        a[i] = pack<T>(left(row, k), left(row, k + 1));
    }
    for (int i = 0; i < 2; i++) b[i] = pack<T>(right(2 * t + 8 * i, g), right(2 * t + 1 + 8 * i, g));
    mma_16x8x16<T>(c, a, b);
    for (int i = 0; i < 4; i++) to[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

template <typename T> void check_product() {
    const std::vector<float> got = run_warp<float>(product_kernel<T>, 16 * 8);
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float wanted = 1000.0f;
            for (int k = 0; k < 16; k++) wanted += left(row, k) * right(k, column);
            if (!CHECK(got[(size_t)(row * 8 + column)] == wanted)) return;
        }
}

TEST(products) {
    check_product<__nv_bfloat16>();
    check_product<__half>();
}

/* ---- numbers ---- */

__global__ void packing_kernel(uint32_t *to) {
    if (threadIdx.x != 0) return;
    to[0] = pack<__nv_bfloat16>(1.0f, -2.0f);
    to[1] = pack<__nv_bfloat16>(1.0f + 0x1p-8f, 1.0f + 0x3p-8f); /* ties go to even */
    to[2] = pack<__half>(1.0f, -2.0f);
    to[3] = pack<__half>(1.0f + 0x1p-11f, 1.0f + 0x3p-11f);
    const float dots[2] = {dot_8<__nv_bfloat16>(make_uint4(0x40003F80u, 0x40804040u, 0, 0x3F80u),
                                                make_uint4(0x3F803F80u, 0x3F803F80u, 0x3F803F80u, 0xC000u)),
                           dot_8<__half>(make_uint4(0x40003C00u, 0, 0, 0x3C000000u),
                                         make_uint4(0x3C003C00u, 0, 0, 0x44000000u))};
    memcpy(to + 4, dots, 8);
}

TEST(packing) {
    const std::vector<uint32_t> got = run_warp<uint32_t>(packing_kernel, 6);
    const uint32_t wanted[] = {0xC0003F80u, 0x3F823F80u, 0xC0003C00u, 0x3C023C00u};
    float dots[2];
    for (int i = 0; i < 4; i++) CHECK_INT(got[(size_t)i], wanted[i]);
    memcpy(dots, &got[4], 8);
    CHECK(dots[0] == 1.0f + 2.0f + 3.0f + 4.0f - 2.0f);
    CHECK(dots[1] == 1.0f + 2.0f + 4.0f);
}

__global__ void functions_kernel(float *to) {
    const float x = (float)((int)threadIdx.x - 16) * 0.37f;
    to[threadIdx.x] = exp2_fast(x);
    to[WARP + threadIdx.x] = tanh_fast(x);
    to[2 * WARP + threadIdx.x] = reciprocal_fast(x + 0.01f);
    to[3 * WARP + threadIdx.x] = exp2_fast((float)((int)threadIdx.x - 16));
    to[4 * WARP + threadIdx.x] = exp2_fast(threadIdx.x % 2 ? -INFINITY : -200.0f);
}

TEST(functions) {
    const std::vector<float> got = run_warp<float>(functions_kernel, 5 * WARP);
    for (int i = 0; i < WARP; i++) {
        const float x = (float)(i - 16) * 0.37f;
        CHECK(std::fabs((double)got[(size_t)i] / std::exp2((double)x) - 1.0) <= 0x1p-22);
        CHECK(std::fabs((double)got[(size_t)(WARP + i)] - std::tanh((double)x)) <= 4e-7);
        CHECK(std::fabs((double)got[(size_t)(2 * WARP + i)] * (double)(x + 0.01f) - 1.0) <= 0x1p-22);
        CHECK(got[(size_t)(3 * WARP + i)] == std::ldexp(1.0f, i - 16)); /* whole powers are exact */
        CHECK(got[(size_t)(4 * WARP + i)] <= 0x1p-149f);
    }
}

/* ---- a warp, and memory ---- */

__global__ void warp_kernel(float *to) {
    const int lane = (int)threadIdx.x;
    const float x = (float)(lane * 7 % 32);
    to[lane] = quad_max(x);
    to[WARP + lane] = quad_sum(x);
    to[2 * WARP + lane] = warp_max(x);
    to[3 * WARP + lane] = warp_sum(x);
}

TEST(warps) {
    const std::vector<float> got = run_warp<float>(warp_kernel, 4 * WARP);
    for (int lane = 0; lane < WARP; lane++) {
        float top = 0.0f, sum = 0.0f;
        for (int i = lane / 4 * 4; i < lane / 4 * 4 + 4; i++) {
            top = std::fmax(top, (float)(i * 7 % 32));
            sum += (float)(i * 7 % 32);
        }
        CHECK(got[(size_t)lane] == top && got[(size_t)(WARP + lane)] == sum);
        CHECK(got[(size_t)(2 * WARP + lane)] == 31.0f && got[(size_t)(3 * WARP + lane)] == 496.0f);
    }
}

/* Two quads of each thread, added twice; then what sum_index says of where number i of them is. */
__global__ void quads_kernel(float *to) {
    const int lane = (int)threadIdx.x;
    for (int quad = 0; quad < 2; quad++) {
        const float x[4] = {(float)(lane + 1000 * quad), (float)(lane + 100), (float)(lane + 200), (float)(lane + 300)};
        global_add_quad(to, quad, lane, WARP, x);
        global_add_quad(to, quad, lane, WARP, x);
    }
    __syncthreads();
    for (int i = 0; i < 8; i++) to[8 * WARP + 8 * lane + i] = to[sum_index(i / 4, i % 4, lane, WARP)];
    global_update_8(to + 16 * WARP + 2 * lane, 1.0f, 2.0f, lane % 2 == 0);
}

static void check_quads() {
    const std::vector<float> got = run_warp<float>(quads_kernel, 18 * WARP, 0.5f);
    for (int lane = 0; lane < WARP; lane++) {
        for (int i = 0; i < 8; i++) {
            const int added = lane + (i % 4 > 0 ? 100 * (i % 4) : 1000 * (i / 4));
            CHECK(got[(size_t)(8 * WARP + 8 * lane + i)] == (float)(2 * added) + 0.5f);
        }
        CHECK(got[(size_t)(16 * WARP + 2 * lane)] == (lane % 2 ? 1.5f : 1.0f));
        CHECK(got[(size_t)(16 * WARP + 2 * lane + 1)] == (lane % 2 ? 2.5f : 2.0f));
    }
}

TEST(quads) {
#ifdef CHUNKFLOW_CUDA_EMULATION
    for (int arch = 80; arch <= 90; arch += 10) {
        cuda_emu_set_arch(arch);
        check_quads();
    }
    cuda_emu_defaults();
    CHECK_INT(cuda_emu_faults(), 0);
#else
    check_quads();
#endif
}

} /* namespace */

SUITE(primitives, CASE(matrices), CASE(shared_loads_and_stores), CASE(copies), CASE(products), CASE(packing),
      CASE(functions), CASE(warps), CASE(quads));
