/* Tests the emulation of compute capability 9.0a. A small product by a producer warp and a warpgroup is right whenever
   its copies land. Each mistake that a device answers with wrong numbers is reported. */

#include "../harness.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <vector>

/* ---- a product of two matrices, tile by tile ---- */

const int ROWS = 64, COLUMNS = 128, STEPS = 4, DEPTH = 64; /* c (64 x 128) = sum over steps of a (64 x 64) b */
const uint32_t A = 0, B = 8192, OTHER = 24576, FULL = 32768, EMPTY = 32776, DONE = 32784,
               BYTES = 32800;

enum mistake {
    NO_MISTAKE,
    SUMS_READ_EARLY,      /* before the wait for their group */
    SUMS_CHANGED,         /* likewise */
    SUMS_SCALED,          /* as above, by a factor that changes nothing */
    OPERAND_WRITTEN,      /* while the products read it */
    REGISTERS_CHANGED,    /* of an A operand whose product is still running */
    NO_REGISTER_FENCE,    /* before the first product */
    FENCE_TOO_EARLY,      /* before the A operand is in its registers */
    NO_GROUP_WAIT,        /* for the last group */
    NO_PROXY_FENCE,       /* between stores of threads and products */
    PROXY_FENCE_TOO_LATE, /* after the barrier that signals the others */
    NO_FULL_WAIT,         /* the tile may not be there */
    NO_EMPTY_WAIT,        /* the tile may still be in use */
    EMPTY_TOO_EARLY,      /* a warp reports the tile as free before its products are done */
    HIDDEN_TOO_EARLY,     /* as above, but the producer also waits for something later */
    ONE_WARP_RELEASES,    /* for all four */
    SAME_PARITY,          /* the full barrier's parity never changes */
    PRODUCER_PARITY, /* the empty barrier's parity is not inverted at first */
    FEW_BYTES_EXPECTED,
    MANY_BYTES_EXPECTED,
    NO_FENCE_OF_INIT, /* of the mbarriers' initialisation, for the copies */
    NO_BARRIER_AFTER_INIT,
    COPY_SWIZZLE, /* other than the descriptor's */
    DESCRIPTOR_SWIZZLE,
    DESCRIPTOR_START,
    OTHER_DESCRIPTOR, /* in one warp */
    BOX_ALIGNMENT,
    COPY_AT_EXIT /* is in flight */
};

struct product_maps {
    CUtensorMap a, b;
    float *c;
    mistake planted;
};

static uint64_t descriptor(uint32_t start, uint32_t leading, uint64_t swizzle = 1) {
    return (uint64_t)(start >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | swizzle << 62;
}

static void wgmma(float *c, const uint32_t *registers, uint64_t a, uint64_t b, bool add, bool transposed) {
    cuda_emu_wgmma_operands o = {c, COLUMNS, registers, a, b, add, false, transposed, true};
    cuda_emu_wgmma(o);
}

/* The producer: one warp, which loads the tiles of each step; both matrices have one stage. */
static void produce(const product_maps &p) {
    const mistake m = p.planted;
    for (int step = 0; step < STEPS + (m == COPY_AT_EXIT); step++) {
        if (m == HIDDEN_TOO_EARLY) cuda_emu_mbarrier_wait(DONE, (step & 1) ^ 1);
        if (m != NO_EMPTY_WAIT)
            cuda_emu_mbarrier_wait(EMPTY, (step & 1) ^ (m != PRODUCER_PARITY));
        __syncwarp();
        if (threadIdx.x % 32 != 0) continue;
        const int wrong = m == MANY_BYTES_EXPECTED ? 128 : m == FEW_BYTES_EXPECTED ? -128 : 0;
        cuda_emu_mbarrier_arrive_expect(FULL, 24576 + wrong);
        for (int half = 0; half < 3; half++) { /* of b: 64 columns each */
            const int at[3] = {half == 2 ? DEPTH * step : 64 * half, half == 2 ? 0 : DEPTH * step, 0};
            const uint32_t to = half == 2 ? A : B + 8192 * (uint32_t)half;
            cuda_emu_bulk_tensor(m == BOX_ALIGNMENT && half == 2 ? OTHER + 128 : to, half == 2 ? &p.a : &p.b, 2, at,
                                 FULL);
        }
    }
}

/* Loads an A operand into registers: this lane and warp's share of columns k .. k + 15 of the swizzled a in shared
   memory. */
static void load_fragment(uint32_t (&to)[4], int k) {
    for (int i = 0; i < 4; i++) {
        const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + (uint32_t)(i % 2) * 8;
        const uint32_t at = A + row * 128 + (uint32_t)k * 2 + threadIdx.x % 4 * 4 + (uint32_t)(i / 2) * 16;
        cuda_emu_shared_load(&to[i], at ^ ((at >> 7 & 7) << 4), 4);
    }
}

/* The consumer: four warps. The first half of the steps take A from shared memory; the others take A from registers,
   doubled through the threads' own stores. */
static void consume(const product_maps &p) {
    const mistake m = p.planted;
    const float one = 1.0f;
    float c[COLUMNS / 2];
    uint32_t a[4][4];
    for (int step = 0; step < STEPS; step++) {
        const bool from_registers = step >= STEPS / 2, last = step == STEPS - 1;
        if (m != NO_FULL_WAIT) cuda_emu_mbarrier_wait(FULL, m == SAME_PARITY ? 0 : step & 1);
        if (m == FENCE_TOO_EARLY) cuda_emu_wgmma_fence();
        if (from_registers)
            for (int k = 0; k < 4; k++) load_fragment(a[k], 16 * k);
        if (step == 1) { /* a of the second step is copied to another place by the threads */
            for (uint32_t i = 0; i < 4; i++) {
                unsigned char bytes[16];
                cuda_emu_shared_load(bytes, A + 16 * (threadIdx.x + 128 * i), 16);
                cuda_emu_shared_store(OTHER + 16 * (threadIdx.x + 128 * i), bytes, 16);
            }
            if (m != NO_PROXY_FENCE && m != PROXY_FENCE_TOO_LATE) cuda_emu_fence_proxy_async();
            cuda_emu_named_barrier(1, 128, true);
            if (m == PROXY_FENCE_TOO_LATE) cuda_emu_fence_proxy_async();
        }
        if (m != NO_REGISTER_FENCE && m != FENCE_TOO_EARLY) cuda_emu_wgmma_fence();
        for (int k = 0; k < 4; k++) {
            const uint32_t start = (step == 1 ? OTHER : A) + 32 * (uint32_t)k;
            const uint32_t odd = m == DESCRIPTOR_START ? 128 : m == OTHER_DESCRIPTOR && threadIdx.x < 32 ? 1024 : 0;
            wgmma(c, from_registers ? a[k] : nullptr,
                  descriptor(start + odd, 0, m == DESCRIPTOR_SWIZZLE ? 2 : 1),
                  descriptor(B + 2048 * (uint32_t)k, 8192), step > 0 || k > 0, true);
        }
        cuda_emu_wgmma_commit();
        if (m == SUMS_CHANGED && step == 1) c[5] = 1.0f;
        volatile const float factor = 1.0f;
        if (m == SUMS_SCALED && step == 1) c[5] *= factor;
        if (m == SUMS_READ_EARLY && last)
            for (int i = 0; i < 64; i++) p.c[i] = (float)__float2bfloat16_rn(c[i]).bits;
        if (m == OPERAND_WRITTEN && step == 1 && threadIdx.x == 77) cuda_emu_shared_store(OTHER + 64, &one, 4);
        if (m == REGISTERS_CHANGED && last) a[2][1]++;
        const bool too_early = m == EMPTY_TOO_EARLY || m == HIDDEN_TOO_EARLY, leader = threadIdx.x % 32 == 0;
        if (too_early && leader) cuda_emu_mbarrier_arrive(EMPTY);
        if (m != NO_GROUP_WAIT || !last) cuda_emu_wgmma_wait(0);
        __syncwarp();
        if (m == ONE_WARP_RELEASES) {
            for (uint32_t i = 0; threadIdx.x == 0 && i < 4; i++) cuda_emu_mbarrier_arrive(EMPTY);
        } else if (!too_early && leader) {
            cuda_emu_mbarrier_arrive(EMPTY);
        }
        if (m == HIDDEN_TOO_EARLY && leader) cuda_emu_mbarrier_arrive(DONE);
    }
    for (uint32_t i = 0; i < COLUMNS / 2; i++) {
        const uint32_t row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        p.c[row * COLUMNS + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = c[i];
    }
}

static void product_kernel(product_maps p) {
    if (threadIdx.x == 0) {
        cuda_emu_mbarrier_init(FULL, 1);
        cuda_emu_mbarrier_init(EMPTY, 4);
        cuda_emu_mbarrier_init(DONE, 4);
        if (p.planted != NO_FENCE_OF_INIT) cuda_emu_fence_mbarrier_init();
    }
    if (p.planted != NO_BARRIER_AFTER_INIT) __syncthreads();
    if (threadIdx.x < 128) consume(p);
    else produce(p);
}

/* Small integers, so that all sums are exact. */
static float number_a(int i, int k) { return (float)((3 * i + 5 * k) % 7 - 3); }
static float number_b(int k, int j) { return (float)((2 * k + 7 * j) % 5 - 2); }

static CUtensorMap encode(void *data, int columns, int rows, int box_rows, CUtensorMapSwizzle swizzle) {
    CUtensorMap map;
    const cuuint64_t size[2] = {(cuuint64_t)columns, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)columns * 2};
    const cuuint32_t box[2] = {64, (cuuint32_t)box_rows}, steps[2] = {1, 1};
    CHECK(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, size, stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS);
    return map;
}

/* Runs the product. Returns whether all numbers are right. */
static bool run_product(mistake planted) {
    const int depth = STEPS * DEPTH;
    std::vector<__nv_bfloat16> a((size_t)(ROWS * depth)), b((size_t)(depth * COLUMNS));
    std::vector<float> c((size_t)(ROWS * COLUMNS), -1.0f);
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < depth; k++) a[(size_t)(i * depth + k)] = __float2bfloat16_rn(number_a(i, k));
    for (int k = 0; k < depth; k++)
        for (int j = 0; j < COLUMNS; j++) b[(size_t)(k * COLUMNS + j)] = __float2bfloat16_rn(number_b(k, j));
    product_maps p;
    void *data_a = nullptr, *data_b = nullptr, *data_c = nullptr;
    CHECK(cudaMalloc(&data_a, a.size() * 2) == cudaSuccess && cudaMalloc(&data_b, b.size() * 2) == cudaSuccess);
    CHECK(cudaMalloc(&data_c, c.size() * 4) == cudaSuccess);
    CHECK(cudaMemcpy(data_a, a.data(), a.size() * 2, cudaMemcpyHostToDevice) == cudaSuccess);
    CHECK(cudaMemcpy(data_b, b.data(), b.size() * 2, cudaMemcpyHostToDevice) == cudaSuccess);
    p.a = encode(data_a, depth, ROWS, ROWS, planted == COPY_SWIZZLE ? CU_TENSOR_MAP_SWIZZLE_NONE
                                                                    : CU_TENSOR_MAP_SWIZZLE_128B);
    p.b = encode(data_b, COLUMNS, depth, DEPTH, CU_TENSOR_MAP_SWIZZLE_128B);
    p.c = (float *)data_c;
    p.planted = planted;
    cudaLaunchConfig_t config;
    config.gridDim = dim3(2);
    config.blockDim = dim3(160);
    config.dynamicSmemBytes = BYTES;
    CHECK(cudaLaunchKernelEx(&config, product_kernel, p) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(cudaMemcpy(c.data(), data_c, c.size() * 4, cudaMemcpyDeviceToHost) == cudaSuccess);
    for (void *data : {data_a, data_b, data_c}) cudaFree(data);
    bool ok = true;
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) {
            float sum = 0.0f;
            for (int k = 0; k < depth; k++) sum += number_a(i, k) * number_b(k, j);
            ok = ok && c[(size_t)(i * COLUMNS + j)] == sum;
        }
    return ok;
}

TEST(product) {
    for (int order = 0; order < 2; order++)
        for (int how = CUDA_EMU_ARRIVE_LATE; how <= CUDA_EMU_ARRIVE_AT_RANDOM; how++)
            for (uint64_t seed = 0; seed < (how == CUDA_EMU_ARRIVE_AT_RANDOM ? 5 : 1); seed++) {
                cuda_emu_reset();
                cuda_emu_set_order(order);
                cuda_emu_set_arrivals((cuda_emu_arrivals)how, seed);
                CHECK(run_product(NO_MISTAKE));
                CHECK_INT(cuda_emu_faults(), 0);
                CHECK_STR(cuda_emu_first_fault(), "");
                CHECK_INT(cuda_emu_total().wgmma, 2 * STEPS * 4);
                CHECK_INT(cuda_emu_total().bulk_bytes, 2 * STEPS * 24576);
            }
    cuda_emu_set_order(0);
    cuda_emu_set_arrivals(CUDA_EMU_ARRIVE_LATE);
}

TEST(mistakes) {
    const struct {
        mistake planted;
        cuda_emu_fault fault;
        const char *name;
    } cases[] = {
        {SUMS_READ_EARLY, CUDA_EMU_IN_FLIGHT, "sums read before the wait"},
        {SUMS_CHANGED, CUDA_EMU_IN_FLIGHT, "sums changed before the wait"},
        {SUMS_SCALED, CUDA_EMU_IN_FLIGHT, "sums scaled before the wait"},
        {OPERAND_WRITTEN, CUDA_EMU_IN_FLIGHT, "operand written in flight"},
        {REGISTERS_CHANGED, CUDA_EMU_IN_FLIGHT, "registers changed in flight"},
        {NO_REGISTER_FENCE, CUDA_EMU_IN_FLIGHT, "no wgmma.fence"},
        {FENCE_TOO_EARLY, CUDA_EMU_IN_FLIGHT, "wgmma.fence before the registers are set"},
        {NO_GROUP_WAIT, CUDA_EMU_IN_FLIGHT, "no wait for the last group"},
        {NO_PROXY_FENCE, CUDA_EMU_PROXY, "no proxy fence"},
        {PROXY_FENCE_TOO_LATE, CUDA_EMU_PROXY, "proxy fence after the barrier"},
        {NO_FULL_WAIT, CUDA_EMU_UNINITIALISED, "no wait for a tile"},
        {NO_EMPTY_WAIT, CUDA_EMU_RACE, "no wait for a free stage"},
        {EMPTY_TOO_EARLY, CUDA_EMU_IN_FLIGHT, "stage freed before the wait for its products"},
        {HIDDEN_TOO_EARLY, CUDA_EMU_IN_FLIGHT, "stage freed before that wait, and refilled after it"},
        {ONE_WARP_RELEASES, CUDA_EMU_IN_FLIGHT, "stage freed by one warp for four"},
        {SAME_PARITY, CUDA_EMU_PHASE, "the same parity twice"},
        {PRODUCER_PARITY, CUDA_EMU_PHASE, "the producer's parity not inverted"},
        {FEW_BYTES_EXPECTED, CUDA_EMU_PHASE, "fewer bytes expected than come"},
        {MANY_BYTES_EXPECTED, CUDA_EMU_PHASE, "more bytes expected than come"},
        {NO_FENCE_OF_INIT, CUDA_EMU_PROXY, "no fence after mbarrier.init"},
        {NO_BARRIER_AFTER_INIT, CUDA_EMU_PHASE, "no barrier after mbarrier.init"},
        {COPY_SWIZZLE, CUDA_EMU_DESCRIPTOR, "a copy without swizzle"},
        {DESCRIPTOR_SWIZZLE, CUDA_EMU_DESCRIPTOR, "a descriptor of another swizzle"},
        {DESCRIPTOR_START, CUDA_EMU_DESCRIPTOR, "a descriptor that starts inside a pattern"},
        {OTHER_DESCRIPTOR, CUDA_EMU_DIVERGED, "warps of a group disagree"},
        {BOX_ALIGNMENT, CUDA_EMU_MISALIGNED, "a tile inside a pattern"},
        {COPY_AT_EXIT, CUDA_EMU_IN_FLIGHT, "a copy that nobody waits for"},
    };
    for (const auto &one : cases)
        for (int order = harness_rounds(0, (int)(&one - cases) % 2); order < 2; order += harness_rounds(1, 2)) {
            cuda_emu_reset();
            cuda_emu_set_order(order);
            run_product(one.planted);
            harness_note("%s, order %d: %s", one.name, order, cuda_emu_first_fault());
            CHECK(cuda_emu_faults(one.fault) > 0);
        }
    cuda_emu_reset();
    cuda_emu_set_order(0);
}

/* ---- registers, named barriers, tensor maps ---- */

static void registers_kernel(int how) {
    const unsigned group = threadIdx.x / 128;
    if (how == 3 && threadIdx.x < 32) return; /* a warp that does not take part */
    if (group == 0) cuda_emu_setmaxnreg(how == 1 ? 56 : how == 2 ? 30 : 24, false);
    else cuda_emu_setmaxnreg(how == 4 ? 160 : 240, true);
}

TEST(registers) {
    for (int how = 0; how < 5; how++) {
        cudaLaunchConfig_t config;
        config.blockDim = dim3(384);
        cuda_emu_reset();
        CHECK(cudaLaunchKernelEx(&config, registers_kernel, how) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        harness_note("%d: %s", how, cuda_emu_first_fault());
        CHECK_INT(cuda_emu_faults(CUDA_EMU_REGISTERS) > 0, how > 0); /* 24 and 240, twice, are 64512 */
        CHECK_INT(cuda_emu_faults(), cuda_emu_faults(CUDA_EMU_REGISTERS));
    }
    cuda_emu_reset();
}

/* Two warps write, two read. The barrier counts all of them, or has a mistake. */
static void named_barrier_kernel(int how, float *out) {
    const bool writer = threadIdx.x < 64;
    const uint32_t at = 4 * (threadIdx.x % 64);
    float x = (float)threadIdx.x;
    if (writer) cuda_emu_shared_store(at, &x, 4);
    /* one arrival too many: complete without the readers */
    if (how == 4 && writer) cuda_emu_named_barrier(1, 128, false);
    if (how == 5 && writer) cuda_emu_named_barrier(3, 64, false);  /* nobody waits for these */
    if (how != 1 || writer) cuda_emu_named_barrier(how == 2 && writer ? 2 : 1, how == 3 ? 96 : 128, !writer);
    if (!writer) {
        cuda_emu_shared_load(&x, at, 4);
        out[threadIdx.x - 64] = x;
    }
}

TEST(named_barriers) {
    for (int how = 0; how < 6; how++) {
        std::vector<float> out(64, -1.0f);
        cudaLaunchConfig_t config;
        config.blockDim = dim3(128);
        config.dynamicSmemBytes = 256;
        cuda_emu_reset();
        CHECK(cudaLaunchKernelEx(&config, named_barrier_kernel, how, out.data()) == cudaSuccess);
        CHECK(cudaDeviceSynchronize() == cudaSuccess);
        harness_note("%d: %s", how, cuda_emu_first_fault());
        for (size_t i = 0; how == 0 && i < 64; i++) CHECK(out[i] == (float)i);
        CHECK_INT(cuda_emu_faults() > 0, how > 0);
        CHECK_INT(cuda_emu_faults(CUDA_EMU_BARRIER) > 0, how > 0);
    }
    cuda_emu_reset();
}

TEST(tensor_maps) {
    alignas(128) static unsigned char data[256];
    CUtensorMap map;
    for (int how = 0; how < 9; how++) {
        cuuint64_t size[3] = {64, 2, 3}, strides[2] = {128, 256};
        cuuint32_t box[3] = {64, 2, 1}, steps[3] = {1, 1, 1};
        void *at = data;
        if (how == 1) at = data + 8;
        if (how == 2) size[1] = 0;
        if (how == 3) strides[0] = 136;
        if (how == 4) strides[1] = (cuuint64_t)1 << 40;
        if (how == 5) box[0] = 72; /* more than the swizzle's 128 bytes */
        if (how == 6) box[1] = 257;
        if (how == 7) box[0] = 12;
        if (how == 8) steps[2] = 0;
        CHECK_INT(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, at, size, strides, box, steps,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS,
                  how == 0);
    }
    void *function = &map;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result) == cudaSuccess);
    CHECK(function == (void *)cuTensorMapEncodeTiled && result == cudaDriverEntryPointSuccess);
    CHECK(cudaGetDriverEntryPoint("cuTensorMapEncode", &function, cudaEnableDefault, &result) == cudaSuccess);
    CHECK(function == nullptr && result == cudaDriverEntryPointSymbolNotFound);
}

SUITE(hopper, CASE(product), CASE(mistakes), CASE(registers), CASE(named_barriers), CASE(tensor_maps));
