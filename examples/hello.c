/* hello.c - pack a batch into chunks, order the passes, run them - MIT or public domain
   cc examples/hello.c -o build/hello && build/hello */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"
#include <stdio.h>

static int one_pass(void *user, const cf_step *step) { /* your forward or backward goes here */
    (void)user;
    printf("%s  chunk %d  %5lld tokens after %5lld  activations: ", cf_pass_name((cf_pass)step->action.pass),
           (int)step->action.chunk, (long long)step->chunk->tokens, (long long)step->chunk->prefix);
    if (step->slot >= 0) printf("slot %lld\n", (long long)step->slot);
    else printf("not kept\n"); /* an R will run this forward again */
    return 0; /* anything else stops the run */
}

int main(void) {
    const int64_t lengths[] = {900, 14000, 350, 2600}; /* tokens of each sequence of the batch */
    cf_pack_desc packing = {.chunk_size = 4096};
    cf_schedule_desc order = {.shape.k = 1}; /* most chunks of one sequence kept at once; else the best order, local replay */
    cf_run_desc run = {.forward = one_pass, .backward = one_pass};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_run_stats stats;
    cf_error error;

    cf_result result = cf_pack(lengths, 4, &packing, &plan, &error);
    if (result == CF_OK) result = cf_schedule_make(plan, &order, &schedule, &error);
    if (result == CF_OK) result = cf_run(plan, schedule, 0, &run, &stats, &error);
    if (result == CF_OK) {
        printf("%lld tokens, longest sequence 14000: never more than %lld tokens of activations\n",
               (long long)plan->n_tokens, (long long)stats.peak_tokens);
    } else {
        fprintf(stderr, "%s\n", error.text);
    }
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return result == CF_OK && fflush(stdout) == 0 ? 0 : 1;
}
