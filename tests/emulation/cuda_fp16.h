/* Stands in for CUDA's header of the same name when kernels run on the host. */
#include "cuda_emu.h"
