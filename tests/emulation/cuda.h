/* Stands in for CUDA's header of the same name when kernels run on the host: what tensor maps need of the driver. */
#ifndef CUDA_EMU_DRIVER_H
#define CUDA_EMU_DRIVER_H

#include "cuda_emu.h"

#endif /* CUDA_EMU_DRIVER_H */
