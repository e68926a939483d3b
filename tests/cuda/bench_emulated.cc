/* Runs tools/bench/bench_attention.cu under the emulation: its main is renamed and called here. CUDA_EMU_ARCH=90 sets
   another compute capability. A fault that the emulation has counted turns success into failure. */

#define main bench_attention_main
#include "../../tools/bench/bench_attention.cu"
#undef main

int main(int argc, char **argv) {
    const char *arch = getenv("CUDA_EMU_ARCH");
    if (arch) cuda_emu_set_arch(atoi(arch));
    const int code = bench_attention_main(argc, argv);
    if (code != 0 || cuda_emu_faults() == 0) return code;
    fprintf(stderr, "emulation: %lld faults; the first one: %s\n", (long long)cuda_emu_faults(),
            cuda_emu_first_fault());
    return 3;
}
