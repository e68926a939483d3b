/* nccl.h - stands in for NCCL's header of the same name: one rank per process, over Unix sockets - MIT or public domain

   Fork the processes (or start them) before their first CUDA call, and hand ncclUniqueId from one to all as usual. The
   sockets lie in a directory of their own under $TMPDIR or /tmp, and are gone when all ranks have joined.

   Transfers are operations of their stream, run under its policy (cuda_emu.h). As in NCCL, those of one communicator
   follow one another in the order of issue, also where their streams differ; those of a group go together. How a send
   ends, the environment variable CUDA_EMU_NCCL says when the communicator is made: "rendezvous" (or unset) holds its
   stream until the peer's receive has begun, "buffered" does not. NCCL promises no more than the first; a program that
   needs the second hangs sooner or later, and here at once: a wait of the host that cannot end is a fault (DEADLOCK).

   A peer that is gone is an asynchronous error of the communicator once an operation needs it. The operation itself
   then stands still until ncclCommAbort, as a kernel on a device would. The two ends of a transfer start at the same
   virtual time; ranks start their clocks at 0. */

#ifndef NCCL_H_
#define NCCL_H_

#include "cuda_emu.h"

#define NCCL_MAJOR 2
#define NCCL_MINOR 20
#define NCCL_PATCH 0
#define NCCL_VERSION_CODE 22000
#define NCCL_UNIQUE_ID_BYTES 128

typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5
} ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
    ncclBfloat16 = 9,
    ncclNumTypes = 10
} ncclDataType_t;

const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
/* Waits for all ranks, at most as long as cuda_emu_set_timeout says. */
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank);

/* blocking 0: calls that wait for others, which are the init and the first transfer with each peer, return
   ncclInProgress, and go on until ncclCommGetAsyncError says otherwise: for ever where that peer is gone. */
typedef struct {
    int maxCTAs; /* changes nothing here */
    int blocking;
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {32, 1}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int n_ranks, ncclUniqueId id, int rank, ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm); /* waits for what was issued */
ncclResult_t ncclCommDestroy(ncclComm_t comm);  /* likewise */
ncclResult_t ncclCommAbort(ncclComm_t comm);    /* waits for nothing; what was issued ends without effect */
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();
ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
/* ncclSum and ncclMax of ncclFloat32, ncclFloat64 and ncclInt64; summed in the order of ranks. */
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream);

#endif /* NCCL_H_ */
