/* hello_tree.c - answers that share a prompt: it is computed once, and they go on from its state - MIT or public domain
   cc examples/hello_tree.c -o build/hello_tree && build/hello_tree */

#define CHUNKFLOW_IMPLEMENTATION
#include "../chunkflow.h"
#include <stdio.h>
#include <stdlib.h>

enum { PROMPT = 9000, ANSWER = 1000, ANSWERS = 6 };

static int one_pass(void *user, const cf_step *step) { /* your forward or backward goes here */
    const cf_metadata_desc *loss = (const cf_metadata_desc *)user;
    const int64_t chunk = step->action.chunk;
    cf_metadata m;
    size_t bytes;
    void *memory;
    cf_result result = cf_metadata_size(step->plan, chunk, loss, &bytes, step->error);
    int64_t i;

    if (result != CF_OK) return 1;
    memory = malloc(bytes);
    if (memory == NULL) return 1;
    result = cf_metadata_fill(step->plan, chunk, loss, memory, bytes, &m, step->error);
    if (result == CF_OK) {
        printf("%s  chunk %d  %5lld rows", cf_pass_name((cf_pass)step->action.pass), (int)chunk, (long long)m.rows);
        for (i = 0; i < step->n_path; i++) { /* K and V of these rows are read; a backward adds to their dK and dV */
            const cf_path *path = &step->path[i];
            printf("  path: %lld of group %lld in slot %lld%s", (long long)path->rows, (long long)path->group,
                   (long long)path->state, path->clear_gradient ? ", cleared" : "");
        }
        printf("  attention: %lld calls  targets beside the first: %lld\n", (long long)m.n_levels + 1,
               (long long)m.n_more);
    }
    free(memory);
    return result != CF_OK; /* anything but 0 stops the run */
}

/* Makes a schedule of the first rank and runs it. */
static cf_result run_all(const cf_plan *plan, const cf_schedule_desc *order, const cf_run_desc *run, cf_error *error) {
    cf_schedule *schedule = NULL;
    cf_result result = cf_schedule_make(plan, order, &schedule, error);

    puts(order->shape.forward_only ? "the old policy's log-probabilities" : "training");
    if (result == CF_OK) result = cf_run(plan, schedule, 0, run, NULL, error);
    cf_schedule_free(schedule);
    return result;
}

int main(void) {
    static int32_t tokens[ANSWERS][PROMPT + ANSWER];
    const double weights[ANSWERS] = {0.5, -1, 0.25, 1.5, -0.75, -0.5}; /* advantages, say */
    const void *sequences[ANSWERS];
    int64_t lengths[ANSWERS], i, j;
    cf_share shares[ANSWERS];
    cf_pack_desc packing = {.chunk_size = 4096, .shares = shares};
    cf_schedule_desc scores = {.shape.forward_only = 1}, order = {.shape.k = 1};
    cf_metadata_desc loss = {.weights = weights};
    cf_run_desc run = {.user = &loss, .forward = one_pass, .backward = one_pass};
    cf_plan *plan = NULL;
    cf_plan_stats stats;
    cf_error error;
    cf_result result;

    for (i = 0; i < ANSWERS; i++) {
        sequences[i] = tokens[i];
        lengths[i] = PROMPT + ANSWER;
        for (j = 0; j < lengths[i]; j++) tokens[i][j] = (int32_t)(j < PROMPT ? j : j + 1000 * i);
    }
    result = cf_shares_find(sequences, sizeof(int32_t), lengths, ANSWERS, shares, NULL, &error);
    if (result == CF_OK) result = cf_pack(lengths, ANSWERS, &packing, &plan, &error);
    /* Forwards alone keep nothing, and the prompt runs once there, too. */
    if (result == CF_OK) result = run_all(plan, &scores, &run, &error);
    if (result == CF_OK) result = run_all(plan, &order, &run, &error);
    if (result == CF_OK) {
        cf_plan_measure(plan, NULL, &stats);
        printf("%lld rows were computed for %lld tokens\n", (long long)stats.rows, (long long)plan->n_tokens);
    } else {
        fprintf(stderr, "%s\n", error.text);
    }
    cf_plan_free(plan);
    return result == CF_OK && fflush(stdout) == 0 ? 0 : 1;
}
