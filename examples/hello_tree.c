/* hello_tree.c - answers that share a prompt: it is computed once, and they continue its state - MIT or public domain
   cc examples/hello_tree.c -o hello_tree && ./hello_tree */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"
#include <stdio.h>
#include <stdlib.h>

enum { PROMPT = 9000, ANSWER = 1000, ANSWERS = 6 };

/* Your forward or backward goes here. */
static cf_result one_pass(const cf_plan *plan, const cf_steps *steps, const cf_step *step,
                          const cf_metadata_desc *loss, cf_error *error) {
    const int64_t chunk = step->action.chunk;
    cf_metadata m;
    size_t bytes;
    void *memory;
    cf_result result = cf_metadata_size(plan, chunk, loss, &bytes, error);
    int32_t i;

    if (result != CF_OK) return result;
    memory = malloc(bytes);
    if (memory == NULL) return cf_refuse(error, CF_ERROR_MEMORY, "metadata", -1, "no memory");
    result = cf_metadata_fill(plan, chunk, loss, memory, bytes, &m, error);
    if (result == CF_OK) {
        printf("%s  chunk %d  %5lld rows", cf_pass_name((cf_pass)step->action.pass), (int)chunk, (long long)m.rows);
        for (i = step->path; i >= 0; i = steps->paths[i].up) {
            const cf_path *path = &steps->paths[i]; /* read its K and V; in a backward, add to its dK and dV */
            const int64_t before = plan->chunks[chunk].prefix - path->begin; /* its rows before this chunk */
            printf("  path: %lld of chain %lld in slot %d%s", (long long)(before < path->rows ? before : path->rows),
                   (long long)path->chain, path->state, path->clear == step->position ? ", cleared" : "");
        }
        printf("  attention: %lld calls  targets beside the first: %lld\n", (long long)m.n_calls + 1,
               (long long)m.n_extra);
    }
    free(memory);
    return result;
}

/* Makes a schedule of the first rank and runs it. */
static cf_result run_all(const cf_plan *plan, const cf_schedule_desc *order, const cf_metadata_desc *loss,
                         cf_error *error) {
    cf_schedule *schedule = NULL;
    cf_steps *steps = NULL;
    cf_result result = cf_schedule_make(plan, order, &schedule, error);
    int64_t i;

    puts(order->shape.forward_only ? "the old policy's log-probabilities" : "training");
    if (result == CF_OK) result = cf_steps_make(plan, schedule, 0, 0, NULL, &steps, error);
    for (i = 0; result == CF_OK && i < steps->n; i++) result = one_pass(plan, steps, &steps->steps[i], loss, error);
    cf_steps_free(steps);
    cf_schedule_free(schedule);
    return result;
}

int main(void) {
    static int32_t tokens[ANSWERS][PROMPT + ANSWER];
    const double weights[ANSWERS] = {0.5, -1, 0.25, 1.5, -0.75, -0.5}; /* advantages, say */
    const void *sequences[ANSWERS];
    int64_t lengths[ANSWERS], i, j;
    cf_shared_prefix shares[ANSWERS];
    cf_pack_desc packing = {.chunk_size = 4096, .shared_prefixes = shares};
    cf_schedule_desc scores = {.shape = {.forward_only = 1}}, order = {.shape = {.k = 1}};
    cf_metadata_desc loss = {.weights = weights};
    cf_plan *plan = NULL;
    cf_plan_stats stats;
    cf_error error;
    cf_result result;

    for (i = 0; i < ANSWERS; i++) {
        sequences[i] = tokens[i];
        lengths[i] = PROMPT + ANSWER;
        for (j = 0; j < lengths[i]; j++) tokens[i][j] = (int32_t)(j < PROMPT ? j : j + 1000 * i);
    }
    result = cf_shared_prefixes_find(sequences, sizeof(int32_t), lengths, ANSWERS, shares, NULL, &error);
    if (result == CF_OK) result = cf_pack(lengths, ANSWERS, &packing, &plan, &error);
    /* Forwards alone keep nothing, and run the prompt only once as well. */
    if (result == CF_OK) result = run_all(plan, &scores, &loss, &error);
    if (result == CF_OK) result = run_all(plan, &order, &loss, &error);
    if (result == CF_OK) {
        cf_plan_measure(plan, NULL, &stats);
        printf("%lld rows were computed for %lld tokens\n", (long long)stats.rows, (long long)plan->n_tokens);
    } else {
        fprintf(stderr, "%s\n", error.text);
    }
    cf_plan_free(plan);
    return result == CF_OK && fflush(stdout) == 0 ? 0 : 1;
}
