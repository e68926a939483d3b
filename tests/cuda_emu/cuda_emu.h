/* cuda_emu.h - runs CUDA kernels on the host, one thread at a time, and watches them - MIT or public domain

   Put this folder first on the include path and compile a .cu file as C++17 (-x c++): it then finds cuda_runtime.h and
   the other CUDA headers here, and its kernels become ordinary functions. Link cuda_emu.cc.

   What is emulated. A launch runs its blocks one after the other. The threads of a block are fibers that give way to
   one another only at barriers and warp collectives, so a run is deterministic; cuda_emu_set_order changes the order of
   the warps. Launches, copies and events take effect at once, whatever their stream. The instructions that a kernel
   reaches through named device functions (ldmatrix, mma.sync, cp.async) are here as cuda_emu_* functions with the
   fragment layouts of the PTX manual. A cp.async copy lands only when its thread waits for its group, so a missing wait
   is seen.

   What is watched, and counted as a fault of its kind (the first one is kept as text, nothing is printed):
     OUT_OF_BOUNDS   a shared access outside the block's dynamic shared memory; a vector or asynchronous access to
   global memory outside every cudaMalloc'ed block (plain dereferences are AddressSanitizer's to see) UNINITIALISED   a
   read of shared memory that nobody wrote in this block, or whose asynchronous copy is in flight MISALIGNED      a
   vector access that is not aligned to its size RACE            two threads touch the same four bytes of shared memory
   between two barriers, at least one writing (threads of one warp may, if a __syncwarp lies between) BARRIER         a
   __syncthreads that some threads of the block never reach DIVERGED        a warp collective that some of its lanes
   never reach, or where they call different ones LAUNCH          a launch that a device would refuse Only dynamic
   shared memory that is reached through cuda_emu_shared_* is watched byte by byte; static __shared__ arrays are filled
   with 0xFF bytes before each block. Per kernel it counts blocks, barriers, mma instructions, and the wavefronts of
   shared memory with those that bank conflicts add. */

#ifndef CUDA_EMU_H
#define CUDA_EMU_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

/* ================================================================================================================
   >>control    what tests use
   ================================================================================================================ */

enum cuda_emu_fault {
    CUDA_EMU_OUT_OF_BOUNDS,
    CUDA_EMU_UNINITIALISED,
    CUDA_EMU_MISALIGNED,
    CUDA_EMU_RACE,
    CUDA_EMU_BARRIER,
    CUDA_EMU_DIVERGED,
    CUDA_EMU_LAUNCH,
    CUDA_EMU_FAULTS
};

struct cuda_emu_counts {
    int64_t launches, blocks, barriers;
    int64_t mma;        /* m16n8k16 instructions, one per warp */
    int64_t wavefronts; /* of shared memory: passes that 32 banks of 4 bytes need */
    int64_t conflicts;  /* those of them that bank conflicts added */
};

void cuda_emu_reset();     /* forgets faults and counts */
int64_t cuda_emu_faults(); /* of all kinds, since the reset */
int64_t cuda_emu_faults(cuda_emu_fault kind);
const char *cuda_emu_first_fault(); /* "" if there was none */
cuda_emu_counts cuda_emu_total();
cuda_emu_counts cuda_emu_kernel(const char *name); /* by the name given to cuda_emu_name_next_launch */
void cuda_emu_set_arch(int arch);                  /* compute capability x 10; 80 at first */
void cuda_emu_set_order(int backwards);            /* 1: warps and blocks start in descending order */
void cuda_emu_name_next_launch(const char *name);
int64_t cuda_emu_live_allocations();
void *
cuda_emu_sparse_malloc(size_t bytes); /* as cudaMalloc, but zeros, and only what is touched takes memory; or NULL */

/* ================================================================================================================
   >>language    keywords and types
   ================================================================================================================ */

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
/* In a section of its own, so that all static shared memory is found and refilled before each block. */
#define __shared__ static __attribute__((section("cuda_emu_shared")))
#define __align__(n) alignas(n)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }

/* Where the running thread is. */
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

/* ================================================================================================================
   >>numbers    bf16 and fp16
   ================================================================================================================ */

float cuda_emu_half_to_float(uint16_t bits);
uint16_t cuda_emu_float_to_half(float value); /* nearest, ties to even */

static inline float cuda_emu_bf16_to_float(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static inline uint16_t cuda_emu_float_to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    if ((wide & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return (uint16_t)((wide + 0x7FFFu + ((wide >> 16) & 1u)) >> 16);
}

struct alignas(2) __nv_bfloat16 {
    uint16_t bits;
};
struct alignas(2) __half {
    uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
    __half x, y;
};

static inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {cuda_emu_float_to_bf16(value)}; }
static inline float __bfloat162float(__nv_bfloat16 value) { return cuda_emu_bf16_to_float(value.bits); }
static inline __half __float2half_rn(float value) { return {cuda_emu_float_to_half(value)}; }
static inline float __half2float(__half value) { return cuda_emu_half_to_float(value.bits); }
static inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
static inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }

/* ================================================================================================================
   >>device    what kernels call
   ================================================================================================================ */

void __syncthreads();
void __syncwarp(unsigned mask = 0xFFFFFFFFu);
float __shfl_xor_sync(unsigned mask, float value, int lanes, int width = 32);
float __shfl_sync(unsigned mask, float value, int lane, int width = 32);
int __shfl_sync(unsigned mask, int value, int lane, int width = 32);
unsigned __ballot_sync(unsigned mask, int predicate);
int __reduce_max_sync(unsigned mask, int value);
int __reduce_add_sync(unsigned mask, int value);
float atomicAdd(float *address, float value);
int atomicAdd(int *address, int value);

template <typename T> static inline T __ldg(const T *address) { return *address; }

/* Shared memory is addressed by bytes from its start, as in PTX. 4, 8 or 16 bytes at a time. */
void cuda_emu_shared_load(void *to, uint32_t address, int bytes);
void cuda_emu_shared_store(uint32_t address, const void *from, int bytes);
/* ldmatrix.sync.aligned.m8n8.x4(.trans).shared.b16: lane 8 i + r gives the address of row r of matrix i. */
void cuda_emu_ldmatrix_x4(uint32_t (&to)[4], uint32_t address, bool transposed);
/* mma.sync.aligned.m16n8k16.row.col.f32.(bf16|f16).(bf16|f16).f32 */
void cuda_emu_mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bf16);
/* cp.async with `bytes` of 4, 8 or 16, of which the first `valid` come from memory and the others are zero. */
void cuda_emu_cp_async(uint32_t address, const void *from, int bytes, int valid);
void cuda_emu_cp_async_commit();
void cuda_emu_cp_async_wait(int groups_left);
/* Counts a fault unless [address, address + bytes) is aligned to `bytes` and lies in one block from cudaMalloc. */
bool cuda_emu_check_global(const void *address, int bytes);

/* ================================================================================================================
   >>runtime    the calls in use
   ================================================================================================================ */

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8
};
enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventDisableTiming = 2
};

struct cudaLaunchAttribute {
    int id;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
    cudaLaunchAttribute *attrs = nullptr;
    unsigned numAttrs = 0;
};

const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **memory, size_t bytes);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cuda_emu_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);
cudaError_t cuda_emu_launch(const cudaLaunchConfig_t *config, const void *kernel, const std::function<void()> &thread);

template <typename T> static inline cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc((void **)memory, bytes);
}

template <typename K>
static inline cudaError_t cudaFuncSetAttribute(K *kernel, cudaFuncAttribute attribute, int value) {
    return cuda_emu_func_set_attribute((const void *)kernel, attribute, value);
}

template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...arguments) {
    return cuda_emu_launch(config, (const void *)kernel, [&] { kernel(arguments...); });
}

/* ================================================================================================================
   >>cublas    column-major products with fp32 accumulation
   ================================================================================================================ */

typedef struct cublasContext *cublasHandle_t;
enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_INVALID_VALUE = 7
};
enum cublasOperation_t {
    CUBLAS_OP_N,
    CUBLAS_OP_T
};
enum cudaDataType {
    CUDA_R_32F = 0,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14
};
enum cublasComputeType_t {
    CUBLAS_COMPUTE_32F = 68
};
enum cublasGemmAlgo_t {
    CUBLAS_GEMM_DEFAULT = -1
};
enum cublasPointerMode_t {
    CUBLAS_POINTER_MODE_HOST,
    CUBLAS_POINTER_MODE_DEVICE
};

const char *cublasGetStatusName(cublasStatus_t status);
cublasStatus_t cublasCreate(cublasHandle_t *handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasGetStream(cublasHandle_t handle, cudaStream_t *stream);
cublasStatus_t cublasSetPointerMode(cublasHandle_t handle, cublasPointerMode_t mode);
cublasStatus_t cublasGetPointerMode(cublasHandle_t handle, cublasPointerMode_t *mode);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void *workspace, size_t bytes);
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                                          int n, int k, const void *alpha, const void *a, cudaDataType type_a, int lda,
                                          long long stride_a, const void *b, cudaDataType type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm);
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k,
                            const void *alpha, const void *a, cudaDataType type_a, int lda, const void *b,
                            cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algorithm);

#endif /* CUDA_EMU_H */
