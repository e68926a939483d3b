/* Static mode a second time in the same program. */

#define CHUNKFLOW_STATIC
#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

#ifdef __cplusplus
extern "C"
#endif
int64_t pairs_of_one(void);

int main(void) {
    printf("pairs %d %d\n", (int)pairs_of_one(), (int)cf_slice_pairs(0, 4));
    return 0;
}
