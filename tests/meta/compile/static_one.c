/* Static mode: the library is private to this file, which uses a single function of it. */

#define CHUNKFLOW_STATIC
#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#ifdef __cplusplus
extern "C"
#endif
int64_t pairs_of_one(void);

int64_t pairs_of_one(void) {
    return cf_slice_pairs(2, 3);
}
