/* cuda_emu_private.h - what the parts of the emulation know of one another - MIT or public domain

   cuda_emu.cc runs one kernel. runtime_emu.cc holds the queues that say when, memory, and everything else that a
   program calls; cublas_emu.cc and nccl_emu.cc put their work on its queues. */

#ifndef CUDA_EMU_PRIVATE_H
#define CUDA_EMU_PRIVATE_H

#include "cuda_emu.h"

#include <memory>

/* Defined from outside where the emulation is linked with AddressSanitizer without being compiled with it. */
#if defined(EMU_ASAN)
#elif defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifndef EMU_ASAN
#define EMU_ASAN 0
#endif

/* ---- kernels ---- */

struct cuda_emu_kernel_call {
    std::string name;
    const void *kernel;
    dim3 grid, block;
    size_t shared_bytes;
    std::function<void()> thread;
};

void cuda_emu_add_fault(cuda_emu_fault kind, const char *format, ...) __attribute__((format(printf, 2, 3)));
bool cuda_emu_launch_ok(const cuda_emu_kernel_call &call); /* or a fault */
void cuda_emu_run_kernel(const cuda_emu_kernel_call &call);
void cuda_emu_reset_kernels();
int cuda_emu_most_shared_memory();
void cuda_emu_set_dynamic_limit(const void *kernel, int bytes);
void cuda_emu_set_carveout(const void *kernel, int percent);
void cuda_emu_note_loaded(const void *kernel);

/* ---- queues ---- */

/* Bytes that an operation uses; one byte, where only an address is known. */
struct cuda_emu_range {
    const void *first;
    size_t bytes;
};

/* One operation of a stream. It may begin when it is the first in its queue and all of `after` are done, and run when
   it is ready too. */
struct cuda_emu_operation {
    cuda_emu_work work;
    std::function<void()> begin; /* empty: nothing to do before it is ready */
    std::function<void()> run;   /* empty: nothing to do */
    std::function<bool()> ready; /* empty: always */
    bool external = false;       /* another process makes it ready */
    std::vector<std::shared_ptr<cuda_emu_operation>> after;
    std::vector<cuda_emu_range> uses;
    cudaError_t fails = cudaSuccess; /* with this error, instead of running */
    CUstream_st *stream = nullptr;
    uint64_t number = 0; /* in the order of issue */
    double seconds = 0.0, host_time = 0.0, start = 0.0, end = 0.0;
    double not_before = 0.0; /* another process says when it can start */
    bool done = false;
};
typedef std::shared_ptr<cuda_emu_operation> cuda_emu_operation_ref;

/* Begins every call: counts it, and returns the error that it must return, or cudaSuccess. The device is that of the
   object concerned. The end of a call remembers its error. */
cudaError_t cuda_emu_begin_call(const char *name, int device);
cudaError_t cuda_emu_finish_call(cudaError_t error);
int cuda_emu_current_device();
/* NULL, with a fault, if there is no such stream. NULL stands for the legacy stream of the current device. */
CUstream_st *cuda_emu_find_stream(cudaStream_t handle);
int cuda_emu_device_of(const CUstream_st *stream);
/* Before a launch: waits until its device can hold one more. The error of the device, if there is one by then. */
cudaError_t cuda_emu_wait_for_room(int device, const char *name);
/* Puts an operation at the end of the stream's queue. */
void cuda_emu_issue(CUstream_st *stream, const cuda_emu_operation_ref &operation);
void cuda_emu_wait_for(
    const cuda_emu_operation_ref &operation); /* runs what must run, and more, as the policy has it */
void cuda_emu_wait_for_device(int device);
/* A fault unless all bytes are memory that kernels of the device can use. */
bool cuda_emu_check_range(const void *first, size_t bytes, int device, const char *what);

/* Called at every call and while the host waits: moves bytes between processes. NULL: there are none. */
extern void (*cuda_emu_progress)();
double cuda_emu_timeout();

/* Objects of the other files that are still alive. */
extern int64_t cuda_emu_live_handles, cuda_emu_live_communicators;

#endif /* CUDA_EMU_PRIVATE_H */
