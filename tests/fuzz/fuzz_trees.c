/* fuzz_trees.c - sequences that share what they begin with: from bytes to shares, plan, metadata, schedule and run;
   then the same with one number of the plan changed. */

#include "fuzz.h"

#include "../reference/oracle.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 22, MOST_CHUNKS = 40 };

typedef struct grove {
    fuzz_input in;
    fuzz_batch batch;
    cf_shared_prefix shares[32];
    int wild;
    cf_plan *plan;
} grove;

static void draw_shares(grove *g) {
    int64_t i, n = g->batch.n;
    g->batch.pack.shared_prefixes = g->shares;
    g->batch.pack.min_shared_prefix = fuzz_mostly(&g->in, 1, 6, g->wild);
    if (fuzz_chance(&g->in, 2)) g->batch.pack.method = CF_PACK_BEST_FIT;
    for (i = 0; i < n; i++) {
        int64_t with = fuzz_mostly(&g->in, 0, i > 0 ? i - 1 : 0, g->wild), most = 0;
        if (with >= 0 && with < n) most = g->batch.lengths[with];
        if (g->batch.lengths[i] < most) most = g->batch.lengths[i];
        g->shares[i].with = with;
        g->shares[i].tokens = fuzz_mostly(&g->in, 0, i > 0 && most > 0 ? most : 0, g->wild);
    }
}

/* Every token of every sequence is on exactly one row. */
static void check_cover(const grove *g) {
    const cf_plan *plan = g->plan;
    int64_t s, i, rows = 0, sum = 0;
    cf_plan_stats stats;
    if (!plan->order) return;
    for (s = 0; s < plan->n_slices; s++) {
        rows += plan->slices[s].length;
        sum += plan->slices[s].length * plan->slices[s].n;
        for (i = plan->slices[s].first; i < plan->slices[s].first + plan->slices[s].n; i++)
            FUZZ_CHECK(plan->slices[s].begin + plan->slices[s].length <= g->batch.lengths[plan->order[i]],
                       "a row beyond the end of sequence %lld", (long long)plan->order[i]);
    }
    FUZZ_CHECK(sum == plan->n_tokens, "%lld tokens on rows, %lld in all", (long long)sum, (long long)plan->n_tokens);
    cf_plan_measure(plan, NULL, &stats);
    FUZZ_CHECK(stats.rows == rows && rows <= plan->n_tokens, "%lld rows", (long long)rows);
}

static void draw_limits(fuzz_input *in, cf_limits *limits) {
    limits->per_token.activations = fuzz_between(in, 0, 9);
    limits->per_token.state = fuzz_between(in, 0, 3);
    limits->per_token.state_gradient = fuzz_between(in, 0, 3);
    limits->per_token.boundary = fuzz_between(in, 0, 3);
    if (fuzz_chance(in, 2)) limits->bytes = fuzz_between(in, 1, 2000);
    if (fuzz_chance(in, 2)) limits->chunks = fuzz_between(in, 1, 4);
    if (fuzz_chance(in, 4)) limits->state = fuzz_between(in, 1, 60);
}

/* No plan may break these, sound or not. Returns whether all went well. */
static int use(grove *g, int stage, cf_error *why) {
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL, *lowered = NULL;
    cf_timeline *timeline = NULL;
    cf_graph *graph = NULL;
    cf_steps *steps = NULL;
    cf_validate_desc limits = {0};
    cf_error error = fuzz_error();
    int fine;
    desc.kind = (cf_schedule_kind)fuzz_between(&g->in, 0, CF_SCHEDULE_1F1B);
    desc.max_tries = 3;
    desc.shape.n_stages = 1 + stage;
    desc.shape.k = fuzz_between(&g->in, 1, 4);
    desc.shape.rank = fuzz_between(&g->in, 0, g->plan->n_ranks - 1);
    if (desc.kind == CF_SCHEDULE_PAPER && fuzz_chance(&g->in, 2)) desc.shape.replay = CF_REPLAY_PIPELINE;
    if (desc.kind == CF_SCHEDULE_DEFAULT) desc.shape.n_virtual = fuzz_between(&g->in, 1, 2);
    if (fuzz_chance(&g->in, 2)) draw_limits(&g->in, &desc.limits);
    *why = error;
    if (!fuzz_result(fuzz_make_schedule(g->plan, &desc, &schedule, why), why)) return 0;
    limits.limits = desc.limits;
    fine = fuzz_result(cf_schedule_validate(g->plan, schedule, &limits, NULL, &error), &error) &&
           fuzz_result(cf_simulate(g->plan, schedule, NULL, &timeline, &error), &error) &&
           fuzz_result(cf_schedule_lower(g->plan, schedule, NULL, &lowered, &error), &error) &&
           fuzz_result(cf_steps_make(g->plan, lowered, stage, 0, NULL, &steps, &error), &error) &&
           fuzz_result(cf_graph_make(g->plan, schedule, NULL, NULL, &graph, &error), &error);
    if (fine)
        FUZZ_CHECK(timeline->makespan >= timeline->bound * (1 - 1e-9), "makespan %.17g, bound %.17g",
                   timeline->makespan, timeline->bound);
    *why = error;
    cf_steps_free(steps);
    cf_graph_free(graph);
    cf_schedule_free(lowered);
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    return fine;
}

static void fill_metadata(const grove *g) {
    cf_metadata_desc desc = {0};
    size_t bytes = 0;
    void *memory;
    int64_t chunk;
    cf_metadata m;
    desc.wants_loss_rows = desc.wants_key_ends = 1;
    FUZZ_CHECK(cf_metadata_size(g->plan, -1, &desc, &bytes, NULL) == CF_OK, "no size");
    memory = malloc(bytes > 0 ? bytes : 1);
    if (memory == NULL) abort();
    for (chunk = 0; chunk < g->plan->n_chunks; chunk++)
        FUZZ_CHECK(cf_metadata_fill(g->plan, chunk, &desc, memory, bytes, &m, NULL) == CF_OK, "no metadata");
    free(memory);
}

/* Calls what takes a plan: each walks over it safely, validated or not. */
static void walk(grove *g, const cf_schedule *schedule) {
    cf_steps *steps = NULL;
    cf_timeline *timeline = NULL;
    cf_graph *graph = NULL;
    if (cf_steps_make(g->plan, schedule, 0, 0, NULL, &steps, NULL) == CF_OK) cf_steps_free(steps);
    if (cf_simulate(g->plan, schedule, NULL, &timeline, NULL) == CF_OK) cf_timeline_free(timeline);
    if (cf_graph_make(g->plan, schedule, NULL, NULL, &graph, NULL) == CF_OK) cf_graph_free(graph);
}

/* One number of the plan is another one: the plan is refused, or it is sound and may be used. */
static void damage(grove *g) {
    cf_plan *plan = g->plan;
    int64_t *const arrays[] = {(int64_t *)plan->chunks, NULL, (int64_t *)plan->chains, plan->order, plan->common};
    const int64_t counts[] = {plan->n_chunks * (int64_t)(sizeof(cf_chunk) / 8),
                              plan->n_slices * ORACLE_SLICE_NUMBERS,
                              plan->n_chains * (int64_t)(sizeof(cf_chain) / 8),
                              plan->n_sequences,
                              plan->n_sequences};
    int64_t which = fuzz_between(&g->in, 0, 4), at;
    oracle_number number = {NULL, sizeof(int64_t)};
    cf_schedule_desc desc = {0};
    cf_schedule *schedule = NULL;
    cf_error error = fuzz_error();
    if (!plan->order || counts[which] == 0) return;
    desc.max_tries = 3;
    if (!fuzz_result(cf_schedule_make(plan, &desc, &schedule, &error), &error)) schedule = NULL;
    at = fuzz_between(&g->in, 0, counts[which] - 1);
    if (which == 1) number = oracle_slice_number(&plan->slices[at / ORACLE_SLICE_NUMBERS], at % ORACLE_SLICE_NUMBERS);
    else number.at = &arrays[which][at];
    oracle_write(number, fuzz_chance(&g->in, 2) ? oracle_read(number) + fuzz_between(&g->in, -2, 2)
                                                : fuzz_number(&g->in));
    if (schedule != NULL) walk(g, schedule);
    cf_schedule_free(schedule);
    if (!fuzz_result(cf_plan_validate(plan, g->batch.lengths, g->batch.n, NULL, &error), &error)) return;
    check_cover(g);
    (void)use(g, 0, &error);
}

static void run_trees(const uint8_t *data, size_t size) {
    grove g;
    cf_error error = fuzz_error();
    size_t bytes = 0;
    memset(&g, 0, sizeof g);
    g.in = fuzz_input_of(data, size);
    g.wild = fuzz_chance(&g.in, 4) ? 12 : 0;
    fuzz_draw_batch(&g.in, &g.batch, 12, g.wild);
    g.batch.pack.max_cp = 0; /* of trees, only `paper` on one stage takes them */
    if (g.batch.pack.split == CF_SPLIT_COST && g.wild) return; /* slow where lengths are large */
    draw_shares(&g);
    if (cf_pack_size(g.batch.lengths, g.batch.n, &g.batch.pack, &bytes, NULL) == CF_OK && bytes > MOST_BYTES) return;
    if (!fuzz_result(cf_pack(g.batch.lengths, g.batch.n, &g.batch.pack, &g.plan, &error), &error)) return;
    FUZZ_CHECK(fuzz_result(cf_plan_validate(g.plan, g.batch.lengths, g.batch.n, NULL, &error), &error),
               "cf_plan_validate: %s", error.text);
    check_cover(&g);
    if (g.plan->n_chunks <= MOST_CHUNKS) {
        fill_metadata(&g);
        FUZZ_CHECK(use(&g, (int)fuzz_between(&g.in, 0, 3), &error), "a sound plan cannot be used: %s", error.text);
        damage(&g);
    }
    cf_plan_free(g.plan);
}

const fuzz_target fuzz_trees = {"trees", run_trees, 4000};
