/* A file that only uses the library, in a program of several files. */

#include "chunkflow.h"

#include <stdio.h>

int main(void) {
    const int64_t lengths[] = {5, 4, 3};
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    cf_error error;
    pack.chunk_size = 8;
    if (cf_pack(lengths, 3, &pack, &plan, &error) != CF_OK) return 1;
    printf("chunks %d\n", (int)plan->n_chunks);
    cf_plan_free(plan);
    return 0;
}
