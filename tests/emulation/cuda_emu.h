/* cuda_emu.h - runs CUDA programs on the host: kernels one thread at a time, streams in any order that CUDA allows -
   MIT or public domain

   Put this folder first on the include path and compile a .cu file as C++17 (-x c++): it then finds cuda_runtime.h and
   the other CUDA headers here, and its kernels become ordinary functions. Link the .cc files of this folder. One host
   thread may use it.

   Kernels. A launch runs its blocks one after the other. The threads of a block are fibers that give way to one another
   only at barriers and warp collectives, so a run is deterministic; cuda_emu_set_order changes the order of the warps.
   The instructions that a kernel reaches through named device functions (ldmatrix, mma.sync, cp.async) are here as
   cuda_emu_* functions with the fragment layouts of the PTX manual. A cp.async copy lands only when its thread waits
   for its group, so a missing wait is seen.

   Streams. Nothing runs when it is issued. Launches (with their arguments as they were then), copies, records, waits
   and cuBLAS calls are queued, and run when the host waits, in an order that respects what CUDA promises and nothing
   else: the order of each stream, events, and the legacy default stream. Which of the possible orders, a policy says
   (cuda_emu_set_policy). A program that gives the same bits under all of them has its waits in place; one that reads a
   result before it waited finds what was there before. cudaStreamQuery and cudaEventQuery advance the device by a step.
   As in CUDA: a copy from pageable memory takes its bytes when it is issued, one from pinned memory when it runs; a
   copy to pageable memory returns when it has run; cudaMemcpy waits, but not for the arrival of bytes from pageable
   memory, nor for copies within and between devices; cudaMemset does not wait; cudaFree waits for its device,
   cudaMalloc does not; a wait for an event that was never recorded is none. There can be several devices, and with
   nccl.h several processes.

   Time. Every operation also has a duration in virtual seconds, and events and cudaEventElapsedTime tell virtual time:
   an operation starts when its stream, what it waits for and the host's time at its issue allow, whatever the order in
   which the host runs it. Streams never slow one another down: neither multiprocessors nor copy engines are shared.

   What is watched, and counted as a fault of its kind (the first one is kept as text, nothing is printed):
     OUT_OF_BOUNDS   a shared access outside the block's dynamic shared memory; a vector or asynchronous access, a copy
                     or a product outside every cudaMalloc'ed block (plain dereferences are AddressSanitizer's to see)
     UNINITIALISED   a read of dynamic shared memory that nobody wrote in this block, or whose asynchronous copy is in
                     flight
     MISALIGNED      a vector access that is not aligned to its size
     RACE            two threads touch the same four bytes of dynamic shared memory between two barriers, at least one
                     writing (threads of one warp may, if a __syncwarp lies between)
     BARRIER         a __syncthreads that some threads of the block never reach
     DIVERGED        a warp collective that some of its lanes never reach, or where they call different ones
     LAUNCH          a launch that a device would refuse
     COPY            a copy whose kind contradicts its addresses, or a cudaMemset of host memory
     PEER            memory of another device, used, or handed to a kernel, without peer access (copies need none)
     HANDLE          a stream, event or handle that does not exist (any more)
     IN_USE          memory that was freed while queued work, for which the call does not wait, uses it
     DEADLOCK        a wait of the host that cannot end, also for room in the queue of launches. All queued work is then
                     dropped
     TRANSFER        two ends of an NCCL transfer that differ in size, or a call that a communicator cannot do
     HOST_FUNCTION   a CUDA call from a function that cudaLaunchHostFunc runs
     IN_FLIGHT, PROXY, PHASE, DESCRIPTOR, REGISTERS: see hopper.h
   Of shared memory, only the dynamic kind that is reached through cuda_emu_shared_* and its like is watched, byte by
   byte: races and uninitialised reads in static __shared__ arrays are not seen. Those arrays are filled with 0xFF bytes
   before each block, and memory from cudaMalloc and cudaMallocHost once, so that such a read gives NaN. Blocks,
   barriers, mma instructions, and the wavefronts of shared memory with those that bank conflicts add, are counted by
   kernel. */

#ifndef CUDA_EMU_H
#define CUDA_EMU_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

/* ================================================================================================================
   >>control    what tests use
   ================================================================================================================ */

/* ---- faults and counts ---- */

enum cuda_emu_fault {
    CUDA_EMU_OUT_OF_BOUNDS,
    CUDA_EMU_UNINITIALISED,
    CUDA_EMU_MISALIGNED,
    CUDA_EMU_RACE,
    CUDA_EMU_BARRIER,
    CUDA_EMU_DIVERGED,
    CUDA_EMU_LAUNCH,
    CUDA_EMU_COPY,
    CUDA_EMU_PEER,
    CUDA_EMU_HANDLE,
    CUDA_EMU_IN_USE,
    CUDA_EMU_DEADLOCK,
    CUDA_EMU_TRANSFER,
    CUDA_EMU_HOST_FUNCTION,
    CUDA_EMU_IN_FLIGHT,
    CUDA_EMU_PROXY,
    CUDA_EMU_PHASE,
    CUDA_EMU_DESCRIPTOR,
    CUDA_EMU_REGISTERS,
    CUDA_EMU_FAULTS
};

struct cuda_emu_counts {
    int64_t launches, blocks, barriers; /* when they have run, not when they are issued */
    int64_t mma;                        /* m16n8k16 instructions, one per warp */
    int64_t wgmma;                      /* one per warpgroup */
    int64_t bulk_bytes;                 /* of bulk copies, with the zeros past the ends of tensors */
    int64_t wavefronts;                 /* of shared memory: passes that 32 banks of 4 bytes need */
    int64_t conflicts;                  /* those of them that bank conflicts added */
    int64_t carved;                     /* launches of kernels that asked for all shared memory of a processor */
};

void cuda_emu_reset(); /* forgets faults, counts, errors (sticky ones too) and planned failures; changes no setting */
void cuda_emu_defaults();  /* every setting as at the start of the program */
int64_t cuda_emu_faults(); /* of all kinds, since the reset */
int64_t cuda_emu_faults(cuda_emu_fault kind);
const char *cuda_emu_first_fault(); /* "" if there was none */
cuda_emu_counts cuda_emu_total();
cuda_emu_counts cuda_emu_kernel(const char *name); /* by the name given to cuda_emu_name_next_launch */
void cuda_emu_name_next_launch(const char *name);
std::string cuda_emu_unloaded(const char *prefix); /* a kernel of such a name that was launched since the program began
                                                      and that no cudaFuncGetAttributes has loaded; "" */
int64_t cuda_emu_calls();                 /* of the runtime, cuBLAS and NCCL, since the reset */
int64_t cuda_emu_calls(const char *name); /* of one function: "cudaMalloc" */
int64_t cuda_emu_launches(const void *kernel); /* of one kernel */
int64_t cuda_emu_pending();               /* operations that are issued and have not run */

/* The objects that the program has not given back. */
struct cuda_emu_live {
    int64_t allocations, pinned; /* blocks from cudaMalloc, and of pinned memory */
    int64_t streams, events;
    int64_t handles;       /* of cuBLAS */
    int64_t communicators; /* of NCCL */
};
cuda_emu_live cuda_emu_live_objects();
int64_t cuda_emu_memory_used(int device); /* bytes of live blocks */

/* ---- the machine ---- */

void cuda_emu_set_arch(int arch);             /* compute capability x 10; 80 at first */
void cuda_emu_set_arch_of(int device, int arch); /* another one; 0: the one of all, as at first */
void cuda_emu_set_processors(int n);          /* multiprocessors of a device; 4 at first */
int cuda_emu_arch();
void cuda_emu_set_devices(int n);             /* 1 to 16; 1 at first. The current device becomes 0 */
void cuda_emu_set_peer_access(bool possible); /* between any two devices; true at first */
void cuda_emu_set_memory(size_t bytes);       /* of each device; 80 GiB at first */
/* As cudaMalloc or, if pinned, cudaMallocHost, but zeros, only what is touched takes memory, and no limit counts it; or
   NULL. */
void *cuda_emu_sparse_malloc(size_t bytes, bool pinned = false);

/* ---- the order of the device's work ---- */

enum cuda_emu_policy {
    CUDA_EMU_IN_ORDER,     /* in the order of issue, as far as the host waits (at first) */
    CUDA_EMU_IMMEDIATE,    /* at once: the fastest of devices */
    CUDA_EMU_LAZY,         /* nothing but what the host waits for, and what that waits for */
    CUDA_EMU_NEWEST_FIRST, /* the stream that got work last comes first */
    CUDA_EMU_STREAM_LATE,  /* stream number `choice` only when nothing else can run: 0 is the legacy streams, from 1 on
                              those that are alive, as they were created */
    CUDA_EMU_RANDOM        /* any, also while the host goes on (how often differs too); `choice` is the seed */
};
void cuda_emu_set_policy(cuda_emu_policy policy, uint64_t choice = 0);
/* Sets the number of launches (kernels and products) that a device holds before they run. One more makes the host wait,
   and work run as the policy has it, until there is room: devices hold about 1000. 0, as at first: any number. */
void cuda_emu_set_queue(int64_t n);
void cuda_emu_set_order(int backwards); /* 1: warps and blocks of a kernel start in descending order */

/* Calls `workload` under every policy, with every stream that it makes late once and as many seeds as said. It should
   make its objects anew each time: good bytes that an earlier call left in a buffer hide a missing wait. The policy is
   then as before. cuda_emu_policy_name tells, for messages, which one is set. */
void cuda_emu_each_policy(int seeds, const std::function<void()> &workload);
const char *cuda_emu_policy_name();

/* The same for a workload that returns its results: which policies change a bit of them, compared with the first, or
   count a fault; "" if none does. This is the test for a missing wait. */
std::string cuda_emu_find_race(int seeds, const std::function<std::vector<unsigned char>()> &workload);

/* ---- failures ---- */

/* The n-th call from now (from 1), of the runtime, cuBLAS or NCCL, returns the error (the other two: one of their own).
   It then does nothing, but for calls that wait, free or destroy: they do that too, as in CUDA, where such a call
   reports what went wrong before. 0: none. True from _failed: it has come to that. */
enum cudaError_t : int;
void cuda_emu_fail_call(int64_t n, cudaError_t error);
bool cuda_emu_failed();
/* Sets the threads a block that cudaFuncGetAttributes says of every kernel. 1024 at first. */
void cuda_emu_set_kernel_threads(int n);
/* The n-th kernel that is launched from now (from 1) fails as it runs. From then on its device does nothing, and every
   call that has to do with it returns the error, until the reset; what is freed is freed all the same. */
void cuda_emu_fail_kernel(int64_t n, cudaError_t error);

/* ---- time ---- */

enum cuda_emu_work_kind {
    CUDA_EMU_WORK_KERNEL,
    CUDA_EMU_WORK_PRODUCT, /* cuBLAS */
    CUDA_EMU_WORK_COPY,
    CUDA_EMU_WORK_SET,
    CUDA_EMU_WORK_HOST,     /* a host function */
    CUDA_EMU_WORK_TRANSFER, /* NCCL */
    CUDA_EMU_WORK_DELAY,    /* cuda_emu_delay and cuda_emu_hang */
    CUDA_EMU_WORK_ORDER     /* records and waits; takes no time, whatever the rule says */
};

/* One operation on a stream. */
struct cuda_emu_work {
    cuda_emu_work_kind kind = CUDA_EMU_WORK_ORDER;
    std::string name;                /* of the kernel, or of the call */
    int64_t blocks = 0, threads = 0; /* of a kernel; threads of one block */
    int64_t bytes = 0;               /* copied, set or sent */
    double flops = 0.0;              /* of a product */
    int device = 0;                  /* of the stream */
    int from = -1, to = -1;          /* of a copy: a device, or -1 for the host. Of a transfer: ranks */
};

/* Sets the rule for the seconds of an operation; an empty rule: the default one. Kernels take 2 us and 1 ns for 1000
   threads, products 2 us and 100 TFLOP/s. Copies take 5 us, with 25 GB/s to and from the host, 100 GB/s between devices
   and 1 TB/s in one. */
void cuda_emu_set_rule(const std::function<double(const cuda_emu_work &)> &rule);
/* The host's virtual time: nothing that is issued later starts earlier. 0 at first; a wait of the host moves it on to
   the end of what it waited for, a query to the end of what it finds done. Setting it back to 0 also sets back the
   clocks of all streams that are idle. */
void cuda_emu_set_host_time(double seconds);
double cuda_emu_host_time();
/* Sets the time from an operation's issue to its earliest start; 0 at first. Events that are recorded at one moment of
   the host, one on each device, then lie apart by the difference, as the starts of two devices' clocks do: no time
   between two events of one device changes, as long as the host does not wait between their issues, but what one device
   does for the other moves. (An offset that a whole clock had could not be seen: CUDA compares no two devices.) */
void cuda_emu_set_latency(int device, double seconds);

typedef struct CUstream_st *cudaStream_t;
void cuda_emu_delay(cudaStream_t stream, double seconds); /* an operation that does nothing for so long */
void cuda_emu_hang(cudaStream_t stream);                  /* an operation that never ends ... */
void cuda_emu_unhang();                                   /* ... until now */
/* Sets how long, on a real clock, the host waits while other processes do not move. 60 s at first. */
void cuda_emu_set_timeout(double seconds);

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

void cuda_emu_note_nan(uint32_t bits);
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
    if ((wide & 0x7FFFFFFFu) > 0x7F800000u) {
        cuda_emu_note_nan(wide);
        return 0x7FFF;
    }
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
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
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

/* Here, so that they are compiled with the kernels and AddressSanitizer sees where they write. */
static inline float atomicAdd(float *address, float value) {
    float old = *address;
    *address = old + value;
    return old;
}

static inline int atomicAdd(int *address, int value) {
    int old = *address;
    *address = (int)((unsigned)old + (unsigned)value);
    return old;
}

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

typedef struct CUevent_st *cudaEvent_t;
typedef void (*cudaHostFn_t)(void *user);

/* name, number */
#define CUDA_EMU_ERRORS(X)                    \
    X(cudaSuccess, 0)                         \
    X(cudaErrorInvalidValue, 1)               \
    X(cudaErrorMemoryAllocation, 2)           \
    X(cudaErrorInvalidConfiguration, 9)       \
    X(cudaErrorInvalidPitchValue, 12)         \
    X(cudaErrorInvalidMemcpyDirection, 21)    \
    X(cudaErrorNoDevice, 100)                 \
    X(cudaErrorInvalidDevice, 101)            \
    X(cudaErrorPeerAccessUnsupported, 217)    \
    X(cudaErrorInvalidResourceHandle, 400)    \
    X(cudaErrorNotReady, 600)                 \
    X(cudaErrorIllegalAddress, 700)           \
    X(cudaErrorLaunchTimeout, 702)            \
    X(cudaErrorPeerAccessAlreadyEnabled, 704) \
    X(cudaErrorPeerAccessNotEnabled, 705)     \
    X(cudaErrorLaunchFailure, 719)            \
    X(cudaErrorNotPermitted, 800)             \
    X(cudaErrorNotSupported, 801)             \
    X(cudaErrorUnknown, 999)

enum cudaError_t : int {
#define CUDA_EMU_ERROR(name, number) name = number,
    CUDA_EMU_ERRORS(CUDA_EMU_ERROR)
#undef CUDA_EMU_ERROR
};
enum cudaMemcpyKind {
    cudaMemcpyHostToHost,
    cudaMemcpyHostToDevice,
    cudaMemcpyDeviceToHost,
    cudaMemcpyDeviceToDevice,
    cudaMemcpyDefault
};
enum cudaDeviceAttr {
    cudaDevAttrMaxPitch = 11,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrConcurrentKernels = 31,
    cudaDevAttrAsyncEngineCount = 40,
    cudaDevAttrUnifiedAddressing = 41,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
    cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
struct cudaFuncAttributes {
    int maxThreadsPerBlock;
};
enum cudaSharedCarveout { cudaSharedmemCarveoutMaxShared = 100 };
enum cudaMemoryType {
    cudaMemoryTypeUnregistered,
    cudaMemoryTypeHost,
    cudaMemoryTypeDevice,
    cudaMemoryTypeManaged
};
enum {
    cudaStreamDefault = 0,
    cudaStreamNonBlocking = 1,
    cudaEventDefault = 0,
    cudaEventBlockingSync = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocDefault = 0,
    cudaHostAllocPortable = 1,
    cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4
};
#define cudaStreamLegacy ((cudaStream_t)0x1)
#define CUDART_VERSION 12000

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
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
    void *devicePointer, *hostPointer;
};

const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDeviceDisablePeerAccess(int peer);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMallocHost(void **memory, size_t bytes);
cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *memory);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind);
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t bytes);
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void *to, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height);
cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream = nullptr);
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cuda_emu_func_get_attributes(cudaFuncAttributes *to, const void *kernel);
cudaError_t cuda_emu_func_set_attribute(const void *kernel, cudaFuncAttribute attribute, int value);
/* `values`: the arguments as bytes, in which addresses of allocations are looked for. `thread` runs one thread. */
cudaError_t cuda_emu_launch(const cudaLaunchConfig_t *config, const void *kernel, const void *values, size_t bytes,
                            const std::function<void()> &thread);

template <typename T> static inline cudaError_t cudaMalloc(T **memory, size_t bytes) {
    return cudaMalloc((void **)memory, bytes);
}

template <typename T> static inline cudaError_t cudaMallocHost(T **memory, size_t bytes) {
    return cudaMallocHost((void **)memory, bytes);
}

template <typename T> static inline cudaError_t cudaHostAlloc(T **memory, size_t bytes, unsigned flags) {
    return cudaHostAlloc((void **)memory, bytes, flags);
}

template <typename K>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *to, K *kernel) {
    return cuda_emu_func_get_attributes(to, (const void *)kernel);
}

template <typename K>
static inline cudaError_t cudaFuncSetAttribute(K *kernel, cudaFuncAttribute attribute, int value) {
    return cuda_emu_func_set_attribute((const void *)kernel, attribute, value);
}

/* The arguments are converted and kept now; the threads run later. */
template <typename... P, typename... A>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(P...), A &&...arguments) {
    const std::tuple<P...> values{static_cast<P>(arguments)...};
    return cuda_emu_launch(config, (const void *)kernel, &values, sizeof values,
                           [kernel, values] { std::apply(kernel, values); });
}

/* ================================================================================================================
   >>cublas    column-major products with fp32 accumulation
   ================================================================================================================ */

typedef struct cublasContext *cublasHandle_t;
enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
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
const char *cublasGetStatusString(cublasStatus_t status);
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

#include "hopper.h"

#endif /* CUDA_EMU_H */
