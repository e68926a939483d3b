/* The CUDA tests. The emulation runs everything on the host; built with nvcc, they run on a device. */

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "../../tools/chunkflow_tune.h"

#include <cuda_runtime.h>

extern const harness_suite suite_primitives, suite_attention, suite_wgmma, suite_state, suite_blocks,
    suite_executor, suite_outputs;

#ifdef CHUNKFLOW_CUDA_EMULATION
extern const harness_suite suite_emulation, suite_hopper, suite_streams, suite_nccl;

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_emulation, &suite_hopper,    &suite_primitives,
                                                  &suite_streams,   &suite_nccl,      &suite_attention,
                                                  &suite_wgmma,     &suite_state,     &suite_blocks,
                                                  &suite_executor,  &suite_outputs};
    return harness_main(argc, argv, suites, sizeof suites / sizeof suites[0]);
}
#else
#ifndef CHUNKFLOW_PTX /* compiled code on a CPU leaves out tests of a device's size */
extern const harness_suite suite_device;
#endif

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_primitives, &suite_attention, &suite_wgmma,
                                                  &suite_state,      &suite_blocks,    &suite_executor,
                                                  &suite_outputs,
#ifndef CHUNKFLOW_PTX
                                                  &suite_device
#endif
    };
    int n_devices = 0;
    const cudaError_t found = cudaGetDeviceCount(&n_devices);
    if (found != cudaSuccess || n_devices == 0) {
        printf("cuda: no device (%s)\n0 passed, 0 failed, 1 skipped\n", cudaGetErrorName(found));
        return 0;
    }
    return harness_main(argc, argv, suites, sizeof suites / sizeof suites[0]);
}
#endif
