/* The whole road with random descriptions: pack, order, time, lower, run, draw the graph, write. Everything that is
   made is judged by the library's validators and by the tests' own. */

#include "fuzz.h"

#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/pipeline.h"
#include "../reference/steps.h"
#include "tools/command/graph_dot.h"
#include "tools/command/schedule_csv.h"

#include <stdlib.h>
#include <string.h>

enum {
    MOST_STAGES = 4, MOST_VIRTUAL = 3, MOST_JUDGED = 150, MOST_SLICES = 20000, MOST_BYTES = 1 << 26 /* of a plan */
};

typedef struct road {
    fuzz_input in;
    int wild;                 /* one number in so many may be anything; 0: none */
    fuzz_batch batch;
    cf_plan *plan;
    cf_schedule_desc order;
    cf_timing timing;
    cf_stage_cost stages[MOST_STAGES * MOST_VIRTUAL];
    int64_t limits[MOST_STAGES], limits_bytes[MOST_STAGES];
    cf_schedule *schedule, *lowered;
    cf_timeline *timeline;
} road;

/* ---- packing ---- */

/* The same plan in memory of the caller's, of just the bytes that were asked for. */
static void pack_into(const road *r) {
    size_t bytes = 0;
    cf_plan *plan = NULL;
    cf_error error = fuzz_error();
    void *memory;
    FUZZ_CHECK(cf_pack_size(r->batch.lengths, r->batch.n, &r->batch.pack, &bytes, NULL) == CF_OK, "no size");
    memory = malloc(bytes);
    if (memory == NULL) abort();
    FUZZ_CHECK(fuzz_result(cf_pack_into(r->batch.lengths, r->batch.n, &r->batch.pack, memory, bytes, &plan, &error),
                           &error), "not in memory of the caller's: %s", error.text);
    FUZZ_CHECK(plan->n_chunks == r->plan->n_chunks && plan->n_slices == r->plan->n_slices &&
                   memcmp(plan->chunks, r->plan->chunks, (size_t)plan->n_chunks * sizeof *plan->chunks) == 0 &&
                   memcmp(plan->slices, r->plan->slices, (size_t)plan->n_slices * sizeof *plan->slices) == 0,
               "another plan in memory of the caller's");
    free(memory);
}

static void fill_metadata(road *r) {
    cf_metadata_desc desc = {0};
    cf_metadata metadata;
    int64_t chunk;
    for (chunk = 0; chunk < r->plan->n_chunks; chunk++) {
        size_t bytes = 0;
        void *memory;
        if (cf_metadata_size(r->plan, chunk, &desc, &bytes, NULL) != CF_OK) continue; /* longer than int32 */
        if (bytes > 1 << 20) continue;
        memory = malloc(bytes > 0 ? bytes : 1);
        if (memory == NULL) abort();
        FUZZ_CHECK(cf_metadata_fill(r->plan, chunk, &desc, memory, bytes, &metadata, NULL) == CF_OK, "no metadata");
        FUZZ_CHECK(metadata.cu_seqlens_q[metadata.n_seqs] == metadata.rows, "cu_seqlens_q do not end with the rows");
        FUZZ_CHECK(metadata.cu_seqlens_k[metadata.n_seqs] == metadata.prefix + metadata.rows, "nor do cu_seqlens_k");
        free(memory);
    }
}

/* Returns whether splits by cost would be looked for among so many slices that it takes seconds. That is sound. */
static int is_slow_to_cut(const fuzz_batch *batch) {
    int64_t i;
    if (batch->pack.split != CF_SPLIT_COST || batch->pack.chunk_size < 1) return 0;
    for (i = 0; i < batch->n; i++)
        if (batch->lengths[i] / batch->pack.chunk_size > MOST_SLICES) return 1;
    return 0;
}

static int pack(road *r) {
    cf_error error = fuzz_error();
    cf_plan_stats stats;
    const char *fault;
    size_t bytes = 0;
    fuzz_draw_batch(&r->in, &r->batch, 10, r->wild);
    if (is_slow_to_cut(&r->batch)) return 0;
    if (cf_pack_size(r->batch.lengths, r->batch.n, &r->batch.pack, &bytes, NULL) == CF_OK && bytes > MOST_BYTES)
        return 0; /* sound, and gigabytes of chunks */
    if (!fuzz_result(cf_pack(r->batch.lengths, r->batch.n, &r->batch.pack, &r->plan, &error), &error)) {
        FUZZ_CHECK(r->plan == NULL, "it failed, and wrote");
        return 0;
    }
    FUZZ_CHECK(fuzz_result(cf_plan_validate(r->plan, r->batch.lengths, r->batch.n, NULL, &error), &error),
               "cf_plan_validate: %s", error.text);
    cf_plan_measure(r->plan, NULL, &stats);
    FUZZ_CHECK(stats.fill >= 0 && stats.fill <= 1 + 1e-9, "fill %g", stats.fill);
    if (r->plan->n_chunks > 2000) return 0; /* sound, and too long for what follows */
    fault = oracle_plan_fault(r->plan, r->batch.lengths, r->batch.n);
    FUZZ_CHECK(fault == NULL, "the plan: %s", fault);
    pack_into(r);
    fill_metadata(r);
    return r->plan->chunks_per_rank <= 24;
}

/* ---- ordering ---- */

static void draw_limits(road *r) {
    cf_schedule_desc *d = &r->order;
    int i;
    if (fuzz_chance(&r->in, 4)) d->limits.chunks = fuzz_mostly(&r->in, -1, 8, r->wild);
    if (fuzz_chance(&r->in, 2)) d->limits.per_token.activations = fuzz_mostly(&r->in, 0, 9, r->wild);
    if (fuzz_chance(&r->in, 2)) d->limits.per_token.state = fuzz_mostly(&r->in, 0, 3, r->wild);
    if (fuzz_chance(&r->in, 2)) d->limits.per_token.state_gradient = fuzz_mostly(&r->in, 0, 3, r->wild);
    if (fuzz_chance(&r->in, 2)) d->limits.per_token.boundary = fuzz_mostly(&r->in, 0, 3, r->wild);
    if (fuzz_chance(&r->in, 2)) d->limits.bytes = fuzz_mostly(&r->in, -1, fuzz_chance(&r->in, 2) ? 1 : 6000, r->wild);
    for (i = 0; i < MOST_STAGES; i++) {
        r->limits[i] = fuzz_mostly(&r->in, 0, 8, r->wild);
        r->limits_bytes[i] = fuzz_mostly(&r->in, 0, 6000, r->wild);
    }
    if (fuzz_chance(&r->in, 5)) d->limits.chunks_by_stage = r->limits;
    if (fuzz_chance(&r->in, 5)) d->limits.bytes_by_stage = r->limits_bytes;
}

static void draw_order(road *r) {
    cf_schedule_desc *d = &r->order;
    fuzz_input *in = &r->in;
    int past = r->wild > 0; /* one past the last item of an enum */
    d->kind = (cf_schedule_kind)fuzz_between(in, 0, CF_SCHEDULE_COUNT - 1 + past);
    d->shape.replay = (cf_replay)fuzz_between(in, 0, CF_REPLAY_COUNT - 1 + past);
    d->shape.n_stages = fuzz_between(in, 0, MOST_STAGES);
    if (d->kind >= CF_SCHEDULE_INTERLEAVED || past) d->shape.n_virtual = fuzz_between(in, 0, MOST_VIRTUAL);
    if (d->kind >= CF_SCHEDULE_ZERO_BUBBLE || past)
        d->shape.placement = (cf_placement)fuzz_between(in, 0, CF_PLACEMENT_COUNT - 1 + past);
    d->shape.k = fuzz_mostly(in, 0, 5, r->wild);
    d->shape.rank = fuzz_mostly(in, 0, r->plan->n_ranks - 1, r->wild);
    d->split_backward = fuzz_chance(in, 3) && (past || d->kind >= CF_SCHEDULE_ZERO_BUBBLE || d->kind == 0);
    if (!past && d->shape.n_virtual < 2) d->shape.placement = CF_PLACEMENT_DEFAULT;
    d->max_tries = fuzz_between(in, 1, 6); /* without one, a search takes tenths of a second */
    d->timing = fuzz_draw_timing(in, &r->timing, r->stages, MOST_STAGES * MOST_VIRTUAL, r->wild);
    draw_limits(r);
    if (d->timing) fuzz_draw_stream(in, &r->timing, r->wild);
}

static void check_order(road *r) {
    cf_validate_desc limits = {0};
    cf_error error = fuzz_error();
    const char *fault;
    limits.limits.chunks = r->order.limits.chunks;
    limits.limits.chunks_by_stage = r->order.limits.chunks_by_stage;
    limits.limits.per_token = r->order.limits.per_token;
    limits.limits.bytes = r->order.limits.bytes;
    limits.limits.bytes_by_stage = r->order.limits.bytes_by_stage;
    FUZZ_CHECK(fuzz_result(cf_schedule_validate(r->plan, r->schedule, &limits, NULL, &error), &error),
               "cf_schedule_validate: %s", error.text);
    FUZZ_CHECK(r->schedule->shape.k == (r->order.shape.k > 0 ? r->order.shape.k : 1), "K is %lld",
               (long long)r->schedule->shape.k);
    if (r->wild > 0 || r->schedule->n_actions > MOST_JUDGED) return; /* the judge is cubic, and adds up without care */
    fault = pipeline_fault(r->plan, r->schedule, &r->order);
    FUZZ_CHECK(fault == NULL, "the schedule: %s", fault);
}

/* Few stages where there are many chunks, and fewer still for the search, which makes tens of schedules; but for one
   problem in 64. A fault shows in few passes as well as in many, and several times as soon. */
static void keep_short(road *r) {
    cf_schedule_desc *d = &r->order;
    int64_t most = MOST_JUDGED / (d->kind == CF_SCHEDULE_DEFAULT || d->kind == CF_SCHEDULE_BEST ? 10 : 4);
    if (fuzz_chance(&r->in, 64)) return;
    while (d->shape.n_stages > 1 &&
           r->plan->chunks_per_rank * d->shape.n_stages * (d->shape.n_virtual > 0 ? d->shape.n_virtual : 1) > most)
        --*(d->shape.n_virtual > 1 ? &d->shape.n_virtual : &d->shape.n_stages);
}

static int order(road *r) {
    cf_error error = fuzz_error();
    draw_order(r);
    keep_short(r);
    if (!fuzz_result(fuzz_make_schedule(r->plan, &r->order, &r->schedule, &error), &error)) {
        FUZZ_CHECK(r->schedule == NULL, "it failed, and wrote");
        return 0;
    }
    check_order(r);
    return 1;
}

/* ---- timing ---- */

/* Denormal numbers have fewer digits. */
static int near_or_more(double a, double b) { return a >= b * (1 - 1e-9) - 1e-300; }

static void time_it(road *r) {
    cf_simulate_desc desc = {0};
    cf_error error = fuzz_error();
    double wanted;
    desc.timing = r->order.timing;
    desc.limits.per_token = r->order.limits.per_token;
    FUZZ_CHECK(fuzz_result(cf_simulate(r->plan, r->schedule, &desc, &r->timeline, &error), &error),
               "cf_simulate: %s", error.text);
    FUZZ_CHECK(near_or_more(r->timeline->makespan, r->timeline->bound), "makespan %.17g, bound %.17g",
               r->timeline->makespan, r->timeline->bound);
    if (r->wild > 0 || r->schedule->n_actions > 60) return;
    wanted = pipeline_makespan(r->plan, r->schedule, r->order.timing, NULL, NULL);
    FUZZ_CHECK(near_or_more(wanted, r->timeline->makespan) && near_or_more(r->timeline->makespan, wanted),
               "makespan %.17g, the tests' simulator: %.17g", r->timeline->makespan, wanted);
}

/* Without transfers, the passes keep their times. */
static void lower_it(road *r) {
    cf_lower_desc desc = {0};
    cf_simulate_desc times = {0};
    cf_timeline *timeline = NULL;
    cf_error error = fuzz_error();
    const char *fault;
    desc.timing = times.timing = r->order.timing;
    FUZZ_CHECK(fuzz_result(cf_schedule_lower(r->plan, r->schedule, &desc, &r->lowered, &error), &error),
               "cf_schedule_lower: %s", error.text);
    FUZZ_CHECK(fuzz_result(cf_schedule_validate(r->plan, r->lowered, NULL, NULL, &error), &error),
               "the lowered schedule: %s", error.text);
    FUZZ_CHECK(fuzz_result(cf_simulate(r->plan, r->lowered, &times, &timeline, &error), &error),
               "cf_simulate of the lowered schedule: %s", error.text);
    fault = pipeline_lowered_fault(r->schedule, r->lowered);
    FUZZ_CHECK(fault == NULL, "the lowered schedule: %s", fault);
    FUZZ_CHECK(timeline->makespan == r->timeline->makespan, "makespan %.17g lowered, %.17g before", timeline->makespan,
               r->timeline->makespan);
    cf_timeline_free(timeline);
}

/* ---- running ---- */

/* Slots are judged always, and all of the steps where the rows of chunks add up to something. */
static void run_it(road *r) {
    cf_capacity capacity = {0};
    cf_steps *steps[MOST_STAGES] = {NULL};
    const char *fault;
    int64_t stage;
    for (stage = 0; stage < r->lowered->shape.n_stages; stage++) {
        cf_error error = fuzz_error();
        FUZZ_CHECK(fuzz_result(cf_steps_make(r->plan, r->lowered, stage, 0, NULL, &steps[stage], &error), &error),
                   "cf_steps_make: %s", error.text);
        fault = steps_slots_fault(r->lowered, steps[stage]);
        FUZZ_CHECK(fault == NULL, "the steps: %s", fault);
        FUZZ_CHECK(steps[stage]->n_slots == r->timeline->peak_live[stage], "%lld slots in the steps, %lld on paper",
                   (long long)steps[stage]->n_slots, (long long)r->timeline->peak_live[stage]);
        FUZZ_CHECK(cf_steps_capacity(r->plan, steps[stage], &capacity, NULL) == CF_OK, "no capacity");
    }
    fault = r->wild > 0 || r->schedule->n_actions > MOST_JUDGED ? NULL : steps_fault(r->plan, r->lowered, steps, 0);
    FUZZ_CHECK(fault == NULL, "the steps: %s", fault);
    for (stage = 0; stage < MOST_STAGES; stage++) cf_steps_free(steps[stage]);
}

/* ---- the graph ---- */

static void draw_graph(road *r) {
    cf_graph *graph = NULL;
    double *earliest, length;
    fuzz_text text = {NULL, 0, 0};
    cf_error error = fuzz_error();
    FUZZ_CHECK(fuzz_result(cf_graph_make(r->plan, r->schedule, r->order.timing, NULL, &graph, &error), &error),
               "cf_graph_make: %s", error.text);
    FUZZ_CHECK(naive_graph_fault(graph) == NULL, "cf_graph_make: %s", naive_graph_fault(graph));
    earliest = (double *)malloc((size_t)(graph->n_nodes + 1) * sizeof *earliest);
    if (earliest == NULL) abort();
    length = naive_longest(graph, NULL, 1, earliest);
    free(earliest);
    FUZZ_CHECK(near_or_more(r->timeline->makespan, length), "makespan %.17g, longest path %.17g",
               r->timeline->makespan, length);
    FUZZ_CHECK(fuzz_result(graph_dot_write(graph, "s", 1000000, fuzz_write, &text, &error), &error), "as DOT: %s",
               error.text);
    fuzz_text_free(&text);
    cf_graph_free(graph);
}

/* ---- writing ---- */

static void write_it(const road *r) {
    cf_write_desc desc = {0};
    schedule_csv_desc csv = {0};
    cf_error error = fuzz_error();
    fuzz_text text = {NULL, 0, 0};
    desc.metadata = r->wild == 0;
    FUZZ_CHECK(cf_write_plan_json(r->plan, &desc, fuzz_write, &text, NULL) == CF_OK, "the plan cannot be written");
    FUZZ_CHECK(cf_write_schedule_json(r->schedule, r->timeline, fuzz_write, &text, NULL) == CF_OK, "nor the schedule");
    text.bytes = 0;
    csv.extensions = 1;
    csv.replay = r->lowered->shape.replay;
    csv.k = r->lowered->shape.k;
    csv.rank = r->lowered->shape.rank;
    csv.format = SCHEDULE_CSV_COMPUTE_COMMS;
    FUZZ_CHECK(fuzz_result(schedule_csv_write(r->plan, r->lowered, &csv, fuzz_write, &text, &error), &error),
               "as CSV: %s", error.text);
    fuzz_text_free(&text);
}

static void run_pipeline(const uint8_t *data, size_t size) {
    road r = {0};
    r.in = fuzz_input_of(data, size);
    r.wild = fuzz_chance(&r.in, 4) ? 12 : 0;
    if (pack(&r) && order(&r)) {
        time_it(&r);
        lower_it(&r);
        run_it(&r);
        draw_graph(&r);
        write_it(&r);
    }
    cf_timeline_free(r.timeline);
    cf_schedule_free(r.lowered);
    cf_schedule_free(r.schedule);
    cf_plan_free(r.plan);
}

const fuzz_target fuzz_pipeline = {"pipeline", run_pipeline, 3000};
