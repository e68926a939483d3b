/* Runs examples/train_cuda.cu under the emulation. Its main is renamed and called here, after the environment has set
   up the emulation, and before the emulation's counts are checked.

       CUDA_EMU_SEED=N          the device's work in a random order with this seed
       CUDA_EMU_ARCH=90         another architecture
       CUDA_EMU_WGMMA=1         a run without a product of wgmma fails
       CUDA_EMU_CUDNN=1         a run without attention by cuDNN fails
       CUDA_EMU_FAIL_CALL=N     the N-th call fails
       CUDA_EMU_MEMORY=N        bytes that the device has

   A counted fault, or a resource that was not released, turns success into failure. */

#define TRAIN_CUDNN /* tests/emulation/cudnn_frontend.h */
#define main train_cuda_main
#include "../../examples/train_cuda.cu"
#undef main

static int64_t asked(const char *name) {
    const char *value = getenv(name);
    return value ? atoll(value) : 0;
}

int main(int argc, char **argv) {
    if (asked("CUDA_EMU_SEED") > 0) cuda_emu_set_policy(CUDA_EMU_RANDOM, (uint64_t)asked("CUDA_EMU_SEED"));
    if (asked("CUDA_EMU_MEMORY") > 0) cuda_emu_set_memory((size_t)asked("CUDA_EMU_MEMORY"));
    cuda_emu_fail_call(asked("CUDA_EMU_FAIL_CALL"), cudaErrorLaunchFailure);
    if (asked("CUDA_EMU_ARCH")) cuda_emu_set_arch((int)asked("CUDA_EMU_ARCH"));
    const int code = train_cuda_main(argc, argv);
    const cuda_emu_live live = cuda_emu_live_objects();
    if (code == 0 && cuda_emu_faults() > 0) {
        fprintf(stderr, "emulation: %lld faults; the first one: %s\n", (long long)cuda_emu_faults(),
                cuda_emu_first_fault());
        return 3;
    }
    if (code == 0 && asked("CUDA_EMU_WGMMA") && cuda_emu_total().wgmma == 0) {
        fprintf(stderr, "emulation: nothing was multiplied by wgmma\n");
        return 3;
    }
    if (code == 0 && asked("CUDA_EMU_CUDNN") && cudnn_emu_calls == 0) {
        fprintf(stderr, "emulation: cuDNN was not asked to attend\n");
        return 3;
    }
    const int64_t objects = live.streams + live.events + live.handles;
    if (code == 0 && live.allocations + live.pinned + objects > 0) {
        fprintf(stderr, "emulation: not given back: %lld blocks, %lld pinned, %lld streams, events and handles\n",
                (long long)live.allocations, (long long)live.pinned, (long long)objects);
        return 3;
    }
    return code;
}
