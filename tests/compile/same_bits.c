/* Prints decisions that rest on floating-point sums, bit by bit, to be compared between kinds of builds. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"

static uint64_t state = 2024;

static uint64_t next_random(void) { /* splitmix64 */
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void print_costs(void) {
    int i;
    for (i = 0; i < 200; i++) {
        cf_pass_cost cost;
        double seconds;
        uint64_t bits;
        cost.constant = (double)(next_random() >> 11) * 1e-16;
        cost.per_token = (double)(next_random() >> 11) * 1e-20;
        cost.per_pair = (double)(next_random() >> 11) * 1e-24;
        seconds = cf_cost_seconds(&cost, (int64_t)(next_random() >> 40), (int64_t)(next_random() >> 24));
        memcpy(&bits, &seconds, sizeof bits);
        printf("%016llx\n", (unsigned long long)bits);
    }
}

static void print_plan(void) {
    int64_t lengths[120], i;
    cf_pack_desc pack;
    cf_plan *plan = NULL;
    cf_error error;
    memset(&pack, 0, sizeof pack);
    for (i = 0; i < 120; i++) lengths[i] = (int64_t)(next_random() % 5000);
    pack.chunk_size = 700;
    pack.split = CF_SPLIT_COST;
    pack.n_ranks = 7;
    if (cf_pack(lengths, 120, &pack, &plan, &error) != CF_OK) {
        printf("%s\n", error.text);
        return;
    }
    for (i = 0; i < plan->n_slices; i++)
        printf("%d+%d ", (int)plan->slices[i].sequence, (int)plan->slices[i].length);
    for (i = 0; i < plan->n_chunks; i++) printf("%d@%d ", (int)plan->chunks[i].tokens, (int)plan->chunks[i].rank);
    printf("\n");
    cf_plan_free(plan);
}

int main(void) {
    print_costs();
    print_plan();
    print_plan();
    print_plan();
    return 0;
}
