/* Both libraries private to one file, the declarations of the tuner first and once more at the end. */

#define CHUNKFLOW_STATIC
#define CHUNKFLOW_TUNE_STATIC
#include "../../../tools/chunkflow_tune.h"

#include "../../../tools/chunkflow_tune.h"

#include <stdio.h>
#include <string.h>

int main(void) {
    cf_plan plan;
    memset(&plan, 0, sizeof plan);
    plan.chunks_per_rank = 10;
    printf("max_tries %d, %s\n", (int)cf_tune_max_tries(&plan, 4, 1), cf_gpu_find("H200")->name);
    return 0;
}
