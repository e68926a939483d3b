/* Static mode where nothing is used: bodies without a caller may not warn. */

#define CHUNKFLOW_STATIC
#include "chunkflow.h"

int64_t largest_chunk_size(void);

int64_t largest_chunk_size(void) {
    return CF_MAX_CHUNK_SIZE;
}

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
