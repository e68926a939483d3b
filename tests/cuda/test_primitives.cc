/* Tests each device function of chunkflow_cuda.cu's section >>device against known bits: which register or address
   holds which number. Other tests cannot distinguish all of this, and the emulation is only as good as these checks.
   Runs under the emulation, but matters most on a device. device_section.h is a verbatim copy of that section
   (tests/cuda/device_section.sh). */

#include "../harness.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

#include "device_section.h"

const int WARP = 32, SHARED_BYTES = 8192;

/* Runs a kernel of one warp. Its only argument is a zeroed array of n words, which is returned. */
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

/* Writes four 8 x 8 matrices, one after another; number c of row r of matrix m is 64 m + 8 r + c. */
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

/* Copies the first half of `data` in two groups, and waits for the second later. Odd lanes copy nothing. */
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

/* c (16 x 8) = 1000 + a (16 x 16) b (16 x 8), all integers that every type can represent. Fragments are filled as the
   comment at mma_16x8x16 describes. */
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

/* Adds two quads of each thread twice; then checks where sum_index places number i of them. */
__global__ void quads_kernel(float *to) {
    const int lane = (int)threadIdx.x;
    for (int quad = 0; quad < 2; quad++) {
        const float x[4] = {(float)(lane + 1000 * quad), (float)(lane + 100), (float)(lane + 200), (float)(lane + 300)};
        global_add_quad(to, quad, lane, WARP, x);
        global_add_quad(to, quad, lane, WARP, x);
    }
    __syncthreads();
    for (int i = 0; i < 8; i++) to[8 * WARP + 8 * lane + i] = to[sum_index(i / 4, i % 4, lane, WARP)];
    global_update_8(to + 16 * WARP + 2 * lane, 1.0f, 2.0f, lane % 2 == 0, lane % 4 < 3);
}

static void check_quads() {
    const std::vector<float> got = run_warp<float>(quads_kernel, 18 * WARP, 0.5f);
    for (int lane = 0; lane < WARP; lane++) {
        for (int i = 0; i < 8; i++) {
            const int added = lane + (i % 4 > 0 ? 100 * (i % 4) : 1000 * (i / 4));
            CHECK(got[(size_t)(8 * WARP + 8 * lane + i)] == (float)(2 * added) + 0.5f);
        }
        const float x = lane % 4 == 3 ? 0.5f : lane % 2 ? 1.5f : 1.0f; /* the last of four lanes adds nothing */
        CHECK(got[(size_t)(16 * WARP + 2 * lane)] == x);
        CHECK(got[(size_t)(16 * WARP + 2 * lane + 1)] == (x == 0.5f ? x : x + 1.0f));
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

/* ---- compute capability 9.0a ---- */

const int GROUP = 128, HOPPER_BYTES = 65536;

bool has_hopper() {
#ifdef CHUNKFLOW_CUDA_EMULATION
    return true;
#else
    int device = 0, major = 0, minor = 0;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess);
    CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess);
    return major == 9 && minor == 0;
#endif
}

/* Runs a kernel of `threads` threads with 64 KB of shared memory. Its first argument is an array of n numbers, -1 at
   first, which is returned. */
template <typename... P, typename... A>
std::vector<float> run_group(void (*kernel)(float *, P...), int threads, size_t n, const A &...arguments) {
    std::vector<float> host(n, -1.0f);
    float *device = nullptr;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1, 1, 1);
    config.blockDim = dim3((unsigned)threads, 1, 1);
    config.dynamicSmemBytes = HOPPER_BYTES;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, HOPPER_BYTES) == cudaSuccess);
    CHECK(cudaMalloc((void **)&device, n * sizeof(float)) == cudaSuccess);
    CHECK(cudaMemcpy(device, host.data(), n * sizeof(float), cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaLaunchKernelEx(&config, kernel, device, arguments...) == cudaSuccess);
    CHECK(cudaMemcpy(host.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess);
    CHECK(cudaFree(device) == cudaSuccess);
    return host;
}

/* Writes two neighbouring numbers of a matrix for wgmma; blocks of 64 columns are `rows` x 128 bytes apart. */
CF_HOPPER_DEVICE void write_pair(shared_address matrix, int rows, int row, int column, uint32_t pair) {
    const int chunk = column % 64 / 8;
    shared_store_4(matrix + (shared_address)(column / 64 * rows * 128 + row * 128 + ((chunk ^ (row & 7)) << 4) +
                                             column % 8 * 2),
                   pair);
}

/* c (64 x 8 N) = 3 + a (64 x 64) b (64 x 8 N); a comes from shared memory, in both orders, or from registers. */
template <typename T, bool REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED, int N>
CF_HOPPER_DEVICE void multiply_group(float *to) {
    const int thread = (int)threadIdx.x, lane = thread % 32, columns = 8 * N;
    const shared_address a = shared_start(), b = a + 8192;
    uint32_t fragments[4][4];
    float c[N][4];
    for (int i = thread; i < 64 * 32; i += GROUP) {
        const int x = i / 32, y = i % 32 * 2;
        write_pair(a, 64, x, y,
                   A_TRANSPOSED ? pack<T>(left(y, x), left(y + 1, x)) : pack<T>(left(x, y), left(x, y + 1)));
    }
    for (int i = thread; i < 32 * columns; i += GROUP) {
        const int x = B_TRANSPOSED ? i / (columns / 2) : i / 32, y = B_TRANSPOSED ? i % (columns / 2) * 2 : i % 32 * 2;
        write_pair(b, B_TRANSPOSED ? 64 : columns, x, y,
                   B_TRANSPOSED ? pack<T>(right(x, y), right(x, y + 1)) : pack<T>(right(y, x), right(y + 1, x)));
    }
    fence_proxy_async();
    named_barrier<3, GROUP>();
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 4; i++) {
            const int row = thread / 32 * 16 + lane / 4 + i % 2 * 8, at = 16 * k + lane % 4 * 2 + i / 2 * 8;
            fragments[k][i] = pack<T>(left(row, at), left(row, at + 1));
        }
    for (int j = 0; j < N; j++)
        for (int e = 0; e < 4; e++) c[j][e] = 3.0f;
    hold_registers(c);
    hold_registers(fragments);
    const uint64_t b_first = matrix_at(b, 8192);
    const int b_step = B_TRANSPOSED ? 2048 : 32;
    wgmma_fence();
    if constexpr (REGISTERS) {
        CF_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma_registers<T, B_TRANSPOSED>(c, fragments[k], matrix_step(b_first, k * b_step), true);
    } else {
        CF_UNROLL
        for (int k = 0; k < 4; k++)
            wgmma_shared<T, A_TRANSPOSED, B_TRANSPOSED>(c, matrix_step(matrix_at(a), k * (A_TRANSPOSED ? 2048 : 32)),
                                                        matrix_step(b_first, k * b_step), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold_registers(c);
    for (int j = 0; j < N; j++)
        for (int e = 0; e < 4; e++)
            to[(thread / 32 * 16 + lane / 4 + e / 2 * 8) * columns + 8 * j + lane % 4 * 2 + e % 2] = c[j][e];
}

template <typename T, bool REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED, int N>
__global__ void __launch_bounds__(GROUP) wgmma_kernel(float *to) {
    if constexpr (CF_HOPPER) multiply_group<T, REGISTERS, A_TRANSPOSED, B_TRANSPOSED, N>(to);
}

template <typename T, bool REGISTERS, bool A_TRANSPOSED, bool B_TRANSPOSED, int N> void check_wgmma() {
    const int columns = 8 * N;
    const std::vector<float> got =
        run_group(wgmma_kernel<T, REGISTERS, A_TRANSPOSED, B_TRANSPOSED, N>, GROUP, (size_t)(64 * columns));
    for (int row = 0; row < 64; row++)
        for (int column = 0; column < columns; column++) {
            float sum = 3.0f;
            for (int k = 0; k < 64; k++) sum += left(row, k) * right(k, column);
            if (!CHECK(got[(size_t)(row * columns + column)] == sum)) return;
        }
}

template <typename T, int N> void check_wgmma_layouts() {
    check_wgmma<T, false, false, false, N>();
    check_wgmma<T, false, false, true, N>();
    check_wgmma<T, false, true, false, N>();
    check_wgmma<T, false, true, true, N>();
    check_wgmma<T, true, false, false, N>();
    check_wgmma<T, true, false, true, N>();
}

TEST(products_of_a_warpgroup) {
    if (!has_hopper()) SKIP("not of compute capability 9.0");
    check_wgmma_layouts<__nv_bfloat16, 8>();
    check_wgmma_layouts<__half, 8>();
    check_wgmma_layouts<__nv_bfloat16, 16>();
    check_wgmma_layouts<__half, 16>();
}

/* Two halves of a group take turns to write and to read. Writers arrive at a barrier, readers wait. Barriers of 64
   threads let a half write only after all of it have read. */
__global__ void turns_kernel(float *to) {
    const int half = (int)threadIdx.x / 64, at = (int)threadIdx.x % 64;
    const shared_address start = shared_start();
    for (int turn = 0; turn < 3; turn++) {
        const int barrier = 1 + turn % 2;
        if (half == turn % 2) {
            const float x = (float)(100 * turn + at);
            uint32_t bits;
            memcpy(&bits, &x, 4);
            shared_store_4(start + (shared_address)(4 * at), bits);
            named_barrier_arrive<GROUP>(barrier);
        } else {
            named_barrier<GROUP>(barrier);
            to[64 * turn + at] = shared_load_float(start + (shared_address)(4 * (63 - at)));
            named_barrier<64>(3 + half);
        }
    }
}

TEST(turns) {
    const std::vector<float> got = run_group(turns_kernel, GROUP, 3 * 64);
    for (int turn = 0; turn < 3; turn++)
        for (int at = 0; at < 64; at++) CHECK(got[(size_t)(64 * turn + at)] == (float)(100 * turn + 63 - at));
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK_STR(cuda_emu_first_fault(), "");
#endif
}

/* Tests stmatrix. Registers hold numbers that identify them, and the sixteen bytes of each row are returned. Number c
   of row r of matrix m is 64 m + 8 r + c. */
CF_HOPPER_DEVICE void store_matrices(float *to) {
    const int lane = (int)threadIdx.x;
    uint32_t from[4];
    for (int i = 0; i < 4; i++) from[i] = (uint32_t)(64 * i + 2 * lane) | (uint32_t)(64 * i + 2 * lane + 1) << 16;
    stmatrix_x4(shared_start() + (shared_address)(16 * lane), from);
    __syncwarp();
    const uint4 row = shared_load_16(shared_start() + (shared_address)(16 * lane));
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
    for (int i = 0; i < 8; i++) to[8 * lane + i] = (float)(words[i / 2] >> 16 * (i % 2) & 0xFFFF);
}

__global__ void stored_matrices_kernel(float *to) {
    if constexpr (CF_HOPPER) store_matrices(to);
}

TEST(stored_matrices) {
    if (!has_hopper()) SKIP("not of compute capability 9.0");
    const std::vector<float> got = run_group(stored_matrices_kernel, WARP, 8 * WARP);
    for (int i = 0; i < 8 * WARP; i++) CHECK(got[(size_t)i] == (float)i);
}

/* Copies a box of 64 columns, 2 heads and 4 rows of a tensor (5 rows, 3 heads, 72 columns), and 32 separate bytes. */
CF_HOPPER_DEVICE void copy_pieces(float *to, const CUtensorMap *map, const void *bytes, int x, int y, int z) {
    const shared_address box = shared_start(), beside = box + 1024, barrier = box + 2048;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 2);
        fence_mbarrier_init();
    }
    __syncthreads();
    for (int phase = 0; phase < 2; phase++) {
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect(barrier, 1024 + 32);
            copy_box(box, map, x, y, z, barrier);
            copy_bulk(beside, bytes, 32, barrier);
        }
        if (threadIdx.x == 33) mbarrier_arrive(barrier);
        mbarrier_wait(barrier, phase);
        for (int i = (int)threadIdx.x; i < 66; i += 64) {
            const uint4 chunk = shared_load_16(box + (shared_address)(16 * i));
            const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
            for (int j = 0; j < 8; j++)
                to[i * 8 + j] = (float)(words[j / 2] >> 16 * (j % 2) & 0xFFFF) + (phase ? 0.0f : 70000.0f);
        }
        __syncthreads();
    }
}

struct piece_maps {
    CUtensorMap map;
    const void *bytes;
};

__global__ void pieces_kernel(float *to, const __grid_constant__ piece_maps p, int x, int y, int z) {
    if constexpr (CF_HOPPER) copy_pieces(to, &p.map, p.bytes, x, y, z);
}

TEST(copied_boxes) {
    const int at[][3] = {{0, 0, 0}, {8, 1, 1}, {64, 2, 3}, {0, -1, -2}};
    if (!has_hopper()) SKIP("not of compute capability 9.0");
    std::vector<uint16_t> tensor(5 * 3 * 72);
    for (size_t i = 0; i < tensor.size(); i++) tensor[i] = (uint16_t)(i + 1);
    void *data = nullptr, *encode = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    REQUIRE(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found) ==
            cudaSuccess);
#else
    REQUIRE(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &encode, cudaEnableDefault, &found) == cudaSuccess);
#endif
    REQUIRE(found == cudaDriverEntryPointSuccess);
    CHECK(cudaMalloc(&data, tensor.size() * 2) == cudaSuccess);
    CHECK(cudaMemcpy(data, tensor.data(), tensor.size() * 2, cudaMemcpyHostToDevice) == cudaSuccess);
    piece_maps p;
    const cuuint64_t size[3] = {72, 3, 5}, strides[2] = {144, 432};
    const cuuint32_t box[3] = {64, 2, 4}, steps[3] = {1, 1, 1};
    CHECK(reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
              &p.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, size, strides, box, steps,
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
    p.bytes = data;
    for (const auto &corner : at) {
        const std::vector<float> got = run_group(pieces_kernel, 64, 66 * 8, p, corner[0], corner[1], corner[2]);
        for (int row = 0; row < 8; row++)
            for (int i = 0; i < 64; i++) {
                const int x = corner[0] + i, y = corner[1] + row % 2, z = corner[2] + row / 2;
                const bool inside = x < 72 && y >= 0 && y < 3 && z >= 0 && z < 5;
                const float wanted = inside ? (float)((z * 3 + y) * 72 + x + 1) : 0.0f;
                if (!CHECK(got[(size_t)(64 * row + ((i / 8 ^ row) * 8) + i % 8)] == wanted)) return;
            }
        for (int i = 0; i < 16; i++) CHECK(got[(size_t)(512 + i)] == (float)(i + 1));
    }
    CHECK(cudaFree(data) == cudaSuccess);
#ifdef CHUNKFLOW_CUDA_EMULATION
    CHECK_STR(cuda_emu_first_fault(), "");
#endif
}

} /* namespace */

SUITE(primitives, CASE(matrices), CASE(shared_loads_and_stores), CASE(copies), CASE(products), CASE(packing),
      CASE(functions), CASE(warps), CASE(quads), CASE(turns), CASE(products_of_a_warpgroup), CASE(stored_matrices),
      CASE(copied_boxes));
