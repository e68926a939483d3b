/* The program says how functions are declared: here, that a shared library exports them although all else is hidden. */

#define CHUNKFLOW_API __attribute__((visibility("default"))) extern
#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

int not_exported(void);

int not_exported(void) {
    return (int)cf_slice_pairs(0, 1);
}
