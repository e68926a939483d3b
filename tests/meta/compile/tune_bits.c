/* Prints what the tuner finds of a few models, to the last bit: the same from every compiler. */

#include "../../../tools/chunkflow_tune.h"

#include <stdio.h>
#include <string.h>

static int tune(const char *model, cf_recompute recompute, int64_t ep) {
    static const int64_t sizes[] = {2048, 8192}, ks[] = {1, 4};
    static int64_t lengths[60];
    cf_tune_desc desc;
    cf_tuning *tuning = NULL;
    cf_error error;
    int64_t i;
    for (i = 0; i < 60; i++) lengths[i] = i % 13 == 0 ? 30000 + 517 * i : 300 + 91 * i;
    memset(&desc, 0, sizeof desc);
    desc.model = cf_model_find(model);
    desc.gpu = cf_gpu_find("h200");
    desc.parallel.tp = 2;
    desc.parallel.pp = 4;
    desc.parallel.dp = desc.parallel.ep = ep;
    desc.parallel.recompute = recompute;
    desc.chunk_sizes = sizes;
    desc.ks = ks;
    desc.n_chunk_sizes = desc.n_ks = 2;
    desc.batch = 16;
    desc.n_batches = 2;
    desc.max_tries = 4;
    desc.limit_bytes = (int64_t)1 << 44;
    if (cf_tune(lengths, 60, &desc, &tuning, &error) != CF_OK) {
        printf("%s: %s\n", model, error.text);
        return 1;
    }
    for (i = 0; i < tuning->n_candidates; i++)
        printf("%s %d: bound %a, %a s\n", model, (int)i, tuning->candidates[i].bound, tuning->candidates[i].seconds);
    cf_tuning_free(tuning);
    return 0;
}

int main(void) {
    return tune("qwen2.5-7b", CF_RECOMPUTE_NONE, 1) + tune("qwen2.5-7b", CF_RECOMPUTE_LAYERNORM, 1) +
           tune("qwen3-next-80b-a3b", CF_RECOMPUTE_MLP, 2);
}
