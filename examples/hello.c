/* hello.c - pack a batch into chunks, order the passes, run them - MIT or public domain
   cc examples/hello.c -o hello && ./hello */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"
#include <stdio.h>

static void one_pass(const cf_plan *plan, const cf_step *step) { /* your forward or backward goes here */
    const cf_chunk *chunk = &plan->chunks[step->action.chunk];
    printf("%s  chunk %d  %5lld tokens after %5lld  activations: ", cf_pass_name((cf_pass)step->action.pass),
           step->action.chunk, (long long)chunk->tokens, (long long)chunk->prefix);
    if (step->slot >= 0) printf("slot %d\n", step->slot);
    else printf("not kept\n"); /* an R will run this forward again */
}

int main(void) {
    const int64_t lengths[] = {900, 14000, 350, 2600}; /* tokens of each sequence of the batch */
    cf_pack_desc packing = {.chunk_size = 4096};
    cf_schedule_desc order = {.shape = {.k = 1}}; /* K: chunks of a sequence that keep their activations at once */
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_steps *steps = NULL;
    cf_error error;

    cf_result result = cf_pack(lengths, 4, &packing, &plan, &error);
    if (result == CF_OK) result = cf_schedule_make(plan, &order, &schedule, &error);
    if (result == CF_OK) result = cf_steps_make(plan, schedule, 0, 0, NULL, &steps, &error);
    if (result == CF_OK) {
        for (int64_t i = 0; i < steps->n; i++) one_pass(plan, &steps->steps[i]);
        printf("%lld tokens, longest sequence 14000: never more than %lld tokens of activations\n",
               (long long)plan->n_tokens, (long long)steps->peak_tokens);
    } else {
        fprintf(stderr, "%s\n", error.text);
    }
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return result == CF_OK && fflush(stdout) == 0 ? 0 : 1;
}
