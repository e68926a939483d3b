/* hopper.h - what cuda_emu.h has of compute capability 9.0a: wgmma, mbarriers, bulk copies, proxies, named barriers and
   setmaxnreg - MIT or public domain

   Included by cuda_emu.h. Not all that such a device can do, but what chunkflow_cuda.cu uses of it, and each mistake
   that a device answers with wrong numbers is a fault here:

     IN_FLIGHT    a register or a byte of shared memory that a wgmma still uses is changed; its sums are used before the
                  wait for its group; registers are changed with no wgmma.fence before the wgmma that takes them; a
                  group is never waited for; a bulk copy is in flight when its block ends
     PROXY        bytes that threads wrote are read (or overwritten) by wgmma or a bulk copy, with no
                  fence.proxy.async of the writer, or none that the reader can know of
     PHASE        an mbarrier that is not initialised, or whose initialisation the thread cannot know of; a wait that
                  passes for a phase which the thread has seen already, or after one that it missed; a wait that
                  cannot end
     DESCRIPTOR   a matrix descriptor or tensor map that is misaligned or means another layout than the bytes have
     REGISTERS    setmaxnreg with a number that is not allowed, in part of a warpgroup, or for which there are no
                  registers

   A wgmma is worked out when it is issued, but its sums reach the registers at the wait: until then these hold a
   certain NaN, which is recognised wherever it is rounded, shuffled or stored. A bulk copy lands when it must
   (cuda_emu_set_arrivals). Who has seen what is kept for each thread: an access that races is found whatever the order
   in which the emulation runs the threads, as long as only barriers and mbarriers order them. The four warps of a
   warpgroup are each on their own: a release by one warp says nothing of the others' wgmma. Blocks of at most 512
   threads and 32 mbarriers. */

#ifndef CUDA_EMU_HOPPER_H
#define CUDA_EMU_HOPPER_H

/* ---- control ---- */

enum cuda_emu_arrivals {
    CUDA_EMU_ARRIVE_LATE,         /* bulk copies land in order, when no thread can go on without (at first) */
    CUDA_EMU_ARRIVE_LATE_NEWEST,  /* likewise, the newest first */
    CUDA_EMU_ARRIVE_AT_ONCE,
    CUDA_EMU_ARRIVE_AT_RANDOM     /* any, when no thread can go on without; `seed` says which */
};
void cuda_emu_set_arrivals(cuda_emu_arrivals how, uint64_t seed = 0);

/* ---- instructions ---- */

void cuda_emu_mbarrier_init(uint32_t address, int arrivals);
void cuda_emu_fence_mbarrier_init();
void cuda_emu_mbarrier_arrive(uint32_t address);
void cuda_emu_mbarrier_arrive_expect(uint32_t address, int bytes);
void cuda_emu_mbarrier_wait(uint32_t address, int parity); /* try_wait until it succeeds */
void cuda_emu_fence_proxy_async();

void cuda_emu_named_barrier(int id, int threads, bool wait); /* bar.sync or bar.arrive */
void cuda_emu_setmaxnreg(int registers, bool increase);

struct CUtensorMap_st;
/* cp.async.bulk.tensor.(rank)d.shared::cluster.global.tile.mbarrier::complete_tx::bytes */
void cuda_emu_bulk_tensor(uint32_t to, const CUtensorMap_st *map, int rank, const int *at, uint32_t barrier);
/* cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes */
void cuda_emu_bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier);

/* stmatrix.sync.aligned.m8n8.x4(.trans).shared.b16: as cuda_emu_ldmatrix_x4, the other way. */
void cuda_emu_stmatrix_x4(uint32_t address, const uint32_t (&from)[4], bool transposed);

/* wgmma.mma_async.sync.aligned.m64n(n)k16.f32.(bf16|f16): c (n / 2 registers) = a b, or += where add. a: the four
   registers, or NULL and a descriptor. Transposed: stored with k along the rows. */
struct cuda_emu_wgmma_operands {
    float *c;
    int n;
    const uint32_t *a_registers;
    uint64_t a, b;
    bool add, a_transposed, b_transposed, bf16;
};
void cuda_emu_wgmma(const cuda_emu_wgmma_operands &operands);
void cuda_emu_wgmma_fence();
void cuda_emu_wgmma_commit();
void cuda_emu_wgmma_wait(int groups_left);

/* Called where a thread gives away a NaN: a fault if it is that of sums in flight. */
void cuda_emu_note_nan(uint32_t bits);
void cuda_emu_check_words(const void *words, int bytes);

/* ---- tensor maps ---- */

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1
};
enum CUtensorMapDataType {
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE = 0 };
enum CUtensorMapSwizzle {
    CU_TENSOR_MAP_SWIZZLE_NONE = 0,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion {
    CU_TENSOR_MAP_L2_PROMOTION_NONE = 0,
    CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0 };

/* As CUDA's of 128 bytes, but readable, and aligned to 16 only: the fibers' stacks, on which parameters lie, are. */
struct alignas(16) CUtensorMap_st {
    uint32_t magic, rank, swizzle, unused;
    unsigned char *data;
    uint64_t size[5], stride[4]; /* strides in bytes */
    uint16_t box[5];
};
typedef CUtensorMap_st CUtensorMap;

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                const cuuint64_t *size, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

enum cudaDriverEntryPointQueryResult {
    cudaDriverEntryPointSuccess = 0,
    cudaDriverEntryPointSymbolNotFound = 1,
    cudaDriverEntryPointVersionNotSufficent = 2
};
enum { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult *result = nullptr);

#endif /* CUDA_EMU_HOPPER_H */
